"""Calling again, a little later each time.

Always true: a call is made at most `attempts` times, and only `StoreUnavailable` makes it again; waits grow
from `first_s` to at most `longest_s`, each a random part of that, so that many clients do not call at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from lowwater.engine.seams.seams import Randomness
from lowwater.errors import StoreUnavailable, UploadGone

T = TypeVar("T")


class Retries:
    """`calls`, `repeated` and `failed` count since the beginning."""

    def __init__(
        self,
        *,
        attempts: int,
        randomness: Randomness,
        sleep: Callable[[float], None],
        first_s: float = 0.1,
        longest_s: float = 5.0,
    ) -> None:
        assert attempts >= 1, "a call is made once at least"
        self.calls = 0
        self.repeated = 0
        self.failed = 0
        self._attempts = attempts
        self._randomness = randomness
        self._sleep = sleep
        self._first_s = first_s
        self._longest_s = longest_s
        self._mutex = threading.Lock()

    def run(self, call: Callable[[], T]) -> T:
        self._count("calls")
        attempt = 1
        while True:
            try:
                return call()
            except UploadGone:
                raise  # more than this call has to be made again
            except StoreUnavailable:
                if attempt >= self._attempts:
                    self._count("failed")
                    raise
            self._count("repeated")
            self._sleep(self.delay_s(attempt))
            attempt += 1

    def run_making(self, make: Callable[[], bool]) -> bool | None:
        """Whether the call made what it says; None where it says that there is one, and it may have made that
        itself before: the answer was lost."""
        attempts = 0

        def attempt() -> bool:
            nonlocal attempts
            attempts += 1
            return make()

        return self.run(attempt) or (False if attempts == 1 else None)

    def delay_s(self, attempt: int) -> float:
        """Between half and all of what doubles with each attempt."""
        limit = min(self._longest_s, self._first_s * float(2 ** (attempt - 1)))
        return limit * (0.5 + int.from_bytes(self._randomness.token(2), "big") / 0x20000)

    def _count(self, name: str) -> None:
        with self._mutex:
            setattr(self, name, getattr(self, name) + 1)
