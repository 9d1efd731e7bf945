"""engine/seams/waiting.py: what an interrupt leaves of a condition and of an event."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from tests.engine.test_interrupts import Walk, elsewhere, places

from lowwater.engine.seams.waiting import Condition, Event


@pytest.mark.parametrize("is_woken", [False, True])
def test_a_condition_that_is_interrupted_gives_its_lock_back(is_woken: bool) -> None:
    """With that of the standard library one Ctrl-C stops everybody who needs the lock."""
    lock = threading.RLock()
    condition = Condition(lock)

    def notify() -> None:
        with lock:
            condition.notify_all()

    def wait() -> None:
        waker = threading.Timer(0, notify) if is_woken else None
        try:
            with lock:
                if waker is not None:
                    waker.start()  # it waits for the lock
                assert condition.wait(60 if is_woken else 0.001) is is_woken
                notify()
        finally:
            if waker is not None and waker.ident is not None:
                waker.join()

    for at in places(wait, 1000, 1, "engine/seams/waiting.py"):
        with suppress(KeyboardInterrupt):
            Walk("engine/seams/waiting.py").run(wait, at)
        assert not lock._is_owned()  # type: ignore[attr-defined]
        elsewhere(notify)
        assert not condition._sleepers


def test_a_condition_wakes_all_who_wait() -> None:
    lock = threading.RLock()
    condition = Condition(lock)
    waiting = threading.Semaphore(0)
    woken: list[bool] = []

    def wait() -> None:
        with lock:
            waiting.release()
            woken.append(condition.wait(60))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for each in threads:
        each.start()
        waiting.acquire()
    with lock:  # free only once the last of them waits
        condition.notify_all()
    for each in threads:
        each.join(60)
    assert woken == [True] * 3


@pytest.mark.parametrize("happens_first", [False, True])
def test_an_event_that_is_interrupted_happens_for_the_others(happens_first: bool) -> None:
    def wait_and_set(event: Event) -> None:
        if happens_first:
            event.set()
        assert event.wait(0.001) is happens_first
        event.set()
        assert event.wait()

    for at in places(lambda: wait_and_set(Event()), 1000, 2, "engine/seams/waiting.py"):
        event = Event()
        with suppress(KeyboardInterrupt):
            Walk("engine/seams/waiting.py").run(lambda: wait_and_set(event), at)  # noqa: B023
        others = [threading.Thread(target=event.wait) for _ in range(2)]
        for each in others:
            each.start()
        elsewhere(event.set)
        for each in others:
            each.join(60)
        assert not any(each.is_alive() for each in others)
        assert event.is_set()
