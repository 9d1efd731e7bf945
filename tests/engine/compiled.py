"""For tests of compiled loops."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest

from lowwater.engine.format import fast

needs_compiled = pytest.mark.skipif(
    not fast.IS_COMPILED, reason="NOT TESTED: the loops of engine/format/_fast*.c are not compiled here"
)


def blocks_left(call: Callable[[], object]) -> int:
    """How many more pieces of memory are in use after the call was repeated."""
    for _ in range(100):
        call()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(10_000):
        call()
    gc.collect()
    return sys.getallocatedblocks() - before


def refused(call: Callable[[], object]) -> Callable[[], object]:
    def tried() -> None:
        try:
            call()
        except (TypeError, IndexError, AttributeError, UnicodeDecodeError):
            return
        raise AssertionError("it was done")

    return tried
