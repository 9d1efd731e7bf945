"""Time and randomness that a simulation decides.

Always true:
  - time stands still until somebody calls `advance`;
  - `monotonic` never goes back, whatever is done to the wall clock;
  - the same seed gives the same tokens, in every process.
"""

from __future__ import annotations

import random


class VirtualClock:
    """`wall_offset_us` may be set to anything at any time: that is how a wall clock jumps."""

    def __init__(self, *, start_us: int = 1_700_000_000_000_000) -> None:
        self.wall_offset_us = 0
        self._start_us = start_us
        self._elapsed_us = 0

    def now_us(self) -> int:
        return self._start_us + self._elapsed_us + self.wall_offset_us

    def monotonic(self) -> float:
        return self._elapsed_us / 1_000_000

    def advance(self, seconds: float) -> None:
        """Let time pass, in whole microseconds: sums of floats would differ from one order to another."""
        assert seconds >= 0, "time does not go back; set wall_offset_us to make the wall clock jump"
        self._elapsed_us += round(seconds * 1_000_000)


class SeededRandomness:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def token(self, size: int) -> bytes:
        return self._random.randbytes(size)
