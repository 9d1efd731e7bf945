"""Appends on their way to the disk, and waking whoever waits for them.

Always true:
  - `settle`, `wake` and `wake_room_waiters` run nobody's code and may be called while leading;
    `resolve_futures` runs the callbacks of futures, and may not;
  - a thread that waits for a settled append is woken by who has settled it, or by the thread that waits
    `WOKEN_AT_ONCE` places before it, which does that before anything else, also when it leaves.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, RUNNING
from typing import Any, NamedTuple

from lowwater.errors import LowwaterError

# So many threads are woken by whoever has settled their appends, and the others by these. All at once would
# wait for the interpreter, which only one of them can have: each would be woken and put to sleep twice.
WOKEN_AT_ONCE = 8

# A coroutine that waits for room in the queue, in its event loop.
RoomWaiter = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


# Held while a future resolves, or while a thread makes sure that it has not, for less than a microsecond.
_resolving = threading.Lock()


class AppendFuture(Future[int]):
    """The standard library's future at a third of its cost: it has a condition only once somebody asks for
    more than `done()` and `result()`. It cannot be cancelled: what is queued will be written."""

    # What the standard library's has of its own, each time that one is made.
    _state = RUNNING
    _result: int | None = None
    _exception: BaseException | None = None
    _sleepers: tuple[threading.Lock, ...] = ()

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        """What goes with a condition, when somebody asks for it first."""
        if name not in ("_condition", "_waiters", "_done_callbacks"):
            raise AttributeError(name)
        with _resolving:
            mine = self.__dict__
            if "_condition" not in mine:
                mine["_waiters"], mine["_done_callbacks"] = [], []
                mine["_condition"] = threading.Condition()
            return mine[name]

    def done(self) -> bool:
        return self._state == FINISHED

    def result(self, timeout: float | None = None) -> int:
        if self._state != FINISHED and timeout is None:
            sleeper = threading.Lock()
            sleeper.acquire()
            with _resolving:
                # No call in here: a signal handler would come with the lock taken, and may want it.
                asleep = self._state != FINISHED
                if asleep:
                    self._sleepers = (*self._sleepers, sleeper)
            if asleep:
                sleeper.acquire()
        if self._state == FINISHED and self._exception is None:
            assert self._result is not None
            return self._result
        return super().result(timeout)

    def resolve(self, result: int | None, error: LowwaterError | None) -> None:
        """Harmless when an interrupt had it done by half and it is done again."""
        with _resolving:
            if "_condition" not in self.__dict__:
                self._result, self._exception = result, error
                self._state = FINISHED
        if self._state != FINISHED:
            if error is None:
                assert result is not None
                self.set_result(result)
            else:
                self.set_exception(error)
            with _resolving:
                pass  # who found it unresolved is among the sleepers now
        for sleeper in self._sleepers:
            if sleeper.locked():
                sleeper.release()


class Ticket:
    """One append on its way to the disk, and who waits for it."""

    seq_last = 0
    done = False
    error: LowwaterError | None = None
    # The lead was given to this append's thread; its thread has taken it up.
    promoted = False
    leads = False
    # One of the three: a thread waits for `turn`, a future, or a coroutine's future in `loop`.
    turn: threading.Lock | None = None
    # Whom its thread has to wake, once it is settled.
    next: Ticket | None = None
    future: AppendFuture | None = None
    waiter: asyncio.Future[int] | None = None
    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s


def settle(
    tickets: Sequence[Ticket],
    error: LowwaterError | None,
    futures: list[Ticket],
    *,
    all_at_once: bool = False,
) -> Settled:
    """With the log's lock held, settle the appends, and add to `futures` those with futures to resolve. Says
    whom to wake. Where an interrupt had it done by half and it is done again, all have to be woken at once:
    some may have left since, and some have woken another already."""
    sleepers: list[Ticket] = []
    by_loop: dict[asyncio.AbstractEventLoop, list[Ticket]] = {}
    for ticket in tickets:
        ticket.error = error
        ticket.done = True
        if ticket.turn is not None:
            # A leader is awake, and may not be so for others.
            if not ticket.leads:
                sleepers.append(ticket)
        elif ticket.future is not None:
            futures.append(ticket)
        elif ticket.loop is not None:
            by_loop.setdefault(ticket.loop, []).append(ticket)
    if not all_at_once:
        for ticket, other in zip(sleepers, sleepers[WOKEN_AT_ONCE:], strict=False):
            ticket.next = other
        del sleepers[WOKEN_AT_ONCE:]
    return Settled(sleepers, by_loop)


class Settled(NamedTuple):
    """Who waits for appends that are settled, and is not told by another."""

    sleepers: list[Ticket]
    by_loop: dict[asyncio.AbstractEventLoop, list[Ticket]]

    def wake(self) -> None:
        """Wake threads and coroutines. Without the lock, and harmless when it is done again."""
        for ticket in self.sleepers:
            _wake_thread(ticket)
        for loop, mine in self.by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve_coroutines, mine)
            except RuntimeError:
                pass  # the loop was closed: nobody waits there any more


def wake_next(ticket: Ticket) -> None:
    """By the thread of a settled append, before anything else: wake the one that waits for that."""
    other = ticket.next
    if other is not None:
        _wake_thread(other)


def _wake_thread(ticket: Ticket) -> None:
    turn = ticket.turn
    if turn is not None:
        try:
            turn.release()
        except RuntimeError:
            pass  # it was woken before


def again(error: LowwaterError) -> LowwaterError:
    """Return a copy of an error to raise to another caller: a traceback belongs to one."""
    copy = type(error)(error.message, path=error.path, seq=error.seq, offset=error.offset, hint=error.hint)
    copy.__cause__ = error.__cause__
    return copy


def wake_room_waiters(waiters: Sequence[RoomWaiter]) -> None:
    for loop, room in waiters:
        try:
            loop.call_soon_threadsafe(_set_if_waiting, room)
        except RuntimeError:
            pass  # the loop was closed


def _set_if_waiting(room: asyncio.Future[None]) -> None:
    if not room.done():
        room.set_result(None)


def resolve_futures(tickets: Sequence[Ticket], *, reporting: bool = False) -> None:
    """Resolve every future, whatever the callback of one of them raises. What is no `Exception` is raised
    again, or with `reporting` told of as if the thread had ended by it: `sys.exit` is not meant for it."""
    interrupt: BaseException | None = None
    for ticket in tickets:
        future = ticket.future
        assert future is not None
        try:
            future.resolve(ticket.seq_last, ticket.error and again(ticket.error))
        except BaseException as error:  # noqa: BLE001 — raised again below
            interrupt = error
            # Whoever waits for it has to be woken all the same.
            future.resolve(ticket.seq_last, ticket.error and again(ticket.error))
    if interrupt is None:
        return
    if not reporting:
        raise interrupt
    thread = threading.current_thread()
    told = (type(interrupt), interrupt, interrupt.__traceback__, thread)
    threading.excepthook(threading.ExceptHookArgs(told))


def _resolve_coroutines(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        waiter = ticket.waiter
        assert waiter is not None
        if waiter.done():
            continue
        if ticket.error is None:
            waiter.set_result(ticket.seq_last)
        else:
            waiter.set_exception(again(ticket.error))
