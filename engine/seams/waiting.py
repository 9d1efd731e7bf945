"""Conditions and events for threads that may be interrupted while they wait.

Always true:
  - whoever has waited, however that ended, holds the lock as before. A `threading.Condition` that is
    interrupted while it takes its lock back may leave it taken for ever, and a `threading.Event` has one;
  - who is to be woken is woken where an interrupt came before it slept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lowwater.engine.seams.interrupts import to_the_end


class Event:
    """Happens once. It has no lock: a signal handler may come in the middle of either call, and call too."""

    __slots__ = ("_has_happened", "_sleepers")

    def __init__(self) -> None:
        self._has_happened = False
        self._sleepers: list[threading.Lock] = []

    def is_set(self) -> bool:
        return self._has_happened

    def set(self) -> None:
        """It may be repeated."""
        self._has_happened = True
        for sleeper in list(self._sleepers):
            _release(sleeper)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has happened."""
        if not self._has_happened:
            sleeper = _asleep()
            self._sleepers.append(sleeper)
            # Whoever sets it from here on finds this thread among the sleepers.
            try:
                if not self._has_happened:
                    sleeper.acquire(timeout=_seconds(timeout_s))
            finally:
                self._sleepers.remove(sleeper)
        return self._has_happened


class Condition:
    """What is waited for with a lock, which a thread holds once while it waits."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._owns_lock: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]
        self._sleepers: list[threading.Lock] = []

    def wait(self, timeout_s: float | None = None) -> bool:
        """With the lock held, give it back until somebody notifies. False where nobody did in time."""
        sleeper = _asleep()
        try:
            self._sleepers.append(sleeper)
            self._lock.release()
            assert not self._owns_lock(), "the lock is held more than once"
            woken = sleeper.acquire(timeout=_seconds(timeout_s))
            self._take_back(sleeper)
        except BaseException:
            try:
                self._take_back(sleeper)
            except BaseException:
                to_the_end(self._take_back, sleeper)
                raise
            raise
        return woken

    def _take_back(self, sleeper: threading.Lock) -> None:
        if not self._owns_lock():
            self._lock.acquire()
        if sleeper in self._sleepers:
            self._sleepers.remove(sleeper)

    def notify_all(self) -> None:
        """With the lock held: wake everybody. It may be repeated."""
        for sleeper in self._sleepers:
            _release(sleeper)


def _asleep() -> threading.Lock:
    sleeper = threading.Lock()
    sleeper.acquire()
    return sleeper


def _release(sleeper: threading.Lock) -> None:
    try:
        sleeper.release()
    except RuntimeError:
        pass  # it was woken before


def _seconds(timeout_s: float | None) -> float:
    return -1.0 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
