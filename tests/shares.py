"""Which share of a long test belongs to which of the Makefile's targets."""

from __future__ import annotations

import pytest


def shares(count: int) -> list[object]:
    """The first share of a `slow` test is one of `make test`, the others are of `make test-long`."""
    return [0, *(pytest.param(share, marks=pytest.mark.long) for share in range(1, count))]
