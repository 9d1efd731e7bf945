"""When to try again: later each time, and not all at once."""

from __future__ import annotations

from lowwater.engine.seams.seams import Clock, Randomness
from lowwater.errors import LowwaterError

FIRST_S = 1.0
MOST_S = 60.0


class Backoff:
    """Always true: between two attempts there is at least half the wait, which doubles with each failure in a
    row up to MOST_S; what is random in it keeps many nodes from coming back at the same moment."""

    def __init__(self, clock: Clock, randomness: Randomness) -> None:
        self._clock = clock
        self._randomness = randomness
        self._at_s = 0.0
        self.failures = 0
        """In a row."""
        self.total = 0
        self.error: LowwaterError | None = None

    def failed(self, error: LowwaterError) -> None:
        wait_s = min(MOST_S, FIRST_S * 2 ** min(self.failures, 10))
        jitter = int.from_bytes(self._randomness.token(2), "little") / 2**16
        self._at_s = self._clock.monotonic() + wait_s * (0.5 + jitter / 2)
        self.failures += 1
        self.total += 1
        self.error = error

    def succeeded(self) -> None:
        self.failures = 0
        self.error = None
        self._at_s = 0.0

    def forget_wait(self) -> None:
        """Somebody asks: the next attempt is now."""
        self._at_s = 0.0

    @property
    def wait_s(self) -> float:
        """How long until the next attempt; 0 for now."""
        return max(0.0, self._at_s - self._clock.monotonic()) if self.error is not None else 0.0
