"""Which share of a test that takes long belongs to which of the Makefile's targets."""

from __future__ import annotations

import pytest


def shares(count: int, kept: int = 1) -> list[object]:
    """The first ones run where the test's own marks say, the others in `make test-long`."""
    return [*range(kept), *(pytest.param(share, marks=pytest.mark.long) for share in range(kept, count))]
