"""The future of an append behaves as the standard library's does, however one waits for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from concurrent.futures import Future

import pytest

from lowwater.engine.log.tickets import AppendFuture
from lowwater.errors import LogPoisoned


def _resolved() -> AppendFuture:
    future = AppendFuture()
    future.resolve(7, None)
    return future


def _failed() -> AppendFuture:
    future = AppendFuture()
    future.resolve(None, LogPoisoned("the disk is gone"))
    return future


def test_a_resolved_future_has_its_result_and_no_exception() -> None:
    future = _resolved()
    assert future.done()
    assert not future.running()
    assert future.result() == future.result(timeout=0) == 7
    assert future.exception() is None


def test_a_failed_future_raises_its_error_each_time() -> None:
    future = _failed()
    assert future.done()
    for _ in range(2):
        with pytest.raises(LogPoisoned, match="the disk is gone"):
            future.result()
    assert isinstance(future.exception(), LogPoisoned)


def test_it_cannot_be_cancelled() -> None:
    future = AppendFuture()
    assert not future.cancel()
    assert not future.cancelled()
    assert future.running()
    future.resolve(1, None)
    assert not future.cancel()
    assert future.result() == 1


def test_waiting_with_a_limit_ends_without_a_result() -> None:
    future = AppendFuture()
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(timeout=0.01)
    with pytest.raises(concurrent.futures.TimeoutError):
        future.exception(timeout=0.01)
    future.resolve(3, None)
    assert future.result(timeout=0.01) == 3


def test_resolving_again_changes_nothing() -> None:
    for future in (_resolved(), _resolved()):
        future.add_done_callback(lambda _: None)
        future.resolve(8, None)
        assert future.result() == 7


@pytest.mark.parametrize("error", [None, LogPoisoned("no")])
def test_callbacks_run_once_before_and_after(error: LogPoisoned | None) -> None:
    future = AppendFuture()
    called: list[Future[int]] = []
    future.add_done_callback(called.append)
    future.resolve(1, error)
    future.add_done_callback(called.append)
    assert called == [future, future]


def test_the_standard_library_waits_for_it() -> None:
    pending, done = AppendFuture(), _resolved()
    assert concurrent.futures.wait([pending, done], timeout=0.01).done == {done}
    threading.Timer(0.02, pending.resolve, (9, None)).start()
    results = [each.result() for each in concurrent.futures.as_completed([pending, done], timeout=10)]
    assert results == [7, 9]


def test_a_coroutine_waits_for_it() -> None:
    async def main() -> int:
        future = AppendFuture()
        threading.Timer(0.02, future.resolve, (5, None)).start()
        return await asyncio.wait_for(asyncio.wrap_future(future), 10)

    assert asyncio.run(main()) == 5


def test_all_that_wait_wake_however_they_wait() -> None:
    """Threads that come early, late and in the very moment; none may sleep on."""
    for number in range(300):
        future = AppendFuture()
        start = threading.Barrier(5)
        got: list[int] = []

        def plain(
            future: AppendFuture = future, start: threading.Barrier = start, got: list[int] = got
        ) -> None:
            start.wait()
            got.append(future.result())

        def limited(
            future: AppendFuture = future, start: threading.Barrier = start, got: list[int] = got
        ) -> None:
            start.wait()
            got.append(future.result(timeout=30))

        threads = [threading.Thread(target=each) for each in (plain, limited, plain, limited)]
        for thread in threads:
            thread.start()
        start.wait()
        future.resolve(number, None)
        for thread in threads:
            thread.join(timeout=30)
            assert not thread.is_alive(), "a thread sleeps on"
        assert got == [number] * 4
