"""Memory that was freed goes back to the system.

Always true: nothing depends on it. glibc keeps what is freed between other things that are still in use: half
as much again as the pool may take, after a large flush. Other allocators need no telling.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        import ctypes

        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (ImportError, OSError, AttributeError):
        return None  # not this C library
    return found


class Trimmer:
    """Asks for it from time to time: a call takes milliseconds, in which other threads may have to wait for
    memory, and what is then wanted again comes from the system page by page, 1.3 µs each."""

    def __init__(self, after_bytes: int, at_rest_bytes: int) -> None:
        self._after_bytes = after_bytes
        self._at_rest_bytes = at_rest_bytes
        self._freed_bytes = 0
        self.trims = 0

    def freed(self, size: int) -> None:
        """So much was freed since."""
        self._freed_bytes += size
        self._trim_above(self._after_bytes)

    def rest(self) -> None:
        """What was freed is not wanted again soon."""
        self._trim_above(self._at_rest_bytes)

    def _trim_above(self, size: int) -> None:
        if self._freed_bytes < size:
            return
        self._freed_bytes = 0
        trim = _malloc_trim()
        if trim is not None:
            trim(0)
            self.trims += 1
