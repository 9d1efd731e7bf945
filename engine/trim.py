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
    memory."""

    def __init__(self, after_bytes: int) -> None:
        self._after_bytes = after_bytes
        self._freed_bytes = 0
        self.trims = 0

    def freed(self, size: int) -> None:
        """So much was freed since."""
        self._freed_bytes += size
        if self._freed_bytes >= self._after_bytes:
            self._freed_bytes = 0
            trim = _malloc_trim()
            if trim is not None:
                trim(0)
                self.trims += 1
