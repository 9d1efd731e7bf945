"""Appends on their way to the disk, and waking whoever waits for them.

Always true: `settle` and `wake_room_waiters` run nobody's code and may be called while leading;
`resolve_futures` runs the callbacks of futures, and may not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from lowwater.errors import LowwaterError

# A coroutine that waits for room in the queue, in its event loop.
RoomWaiter = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class Ticket:
    """One append on its way to the disk, and who waits for it."""

    __slots__ = (
        "done", "error", "future", "leads", "loop", "promoted", "seq_last", "started_s", "turn", "waiter",
    )  # fmt: skip

    def __init__(self, started_s: float) -> None:
        self.seq_last = 0
        self.started_s = started_s
        self.done = False
        self.error: LowwaterError | None = None
        # The lead was given to this append's thread; its thread has taken it up.
        self.promoted = False
        self.leads = False
        # One of the three: a thread waits for `turn`, a future, or a coroutine's future in `loop`.
        self.turn: threading.Lock | None = None
        self.future: Future[int] | None = None
        self.waiter: asyncio.Future[int] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None


def settle(tickets: Sequence[Ticket], error: LowwaterError | None, futures: list[Ticket]) -> None:
    """Settle the appends: wake threads and coroutines, and add to `futures` those with futures to resolve.
    Harmless when an interrupt had it done by half and it is done again."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Ticket]] = {}
    for ticket in tickets:
        ticket.error = error
        ticket.done = True
        turn = ticket.turn
        if turn is not None:
            if turn.locked():
                turn.release()
        elif ticket.future is not None:
            futures.append(ticket)
        elif ticket.loop is not None:
            by_loop.setdefault(ticket.loop, []).append(ticket)
    for loop, mine in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve_coroutines, mine)
        except RuntimeError:
            pass  # the loop was closed: nobody waits there any more


def again(error: LowwaterError) -> LowwaterError:
    """The same error for another caller: a traceback belongs to one."""
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


def resolve_futures(tickets: Sequence[Ticket]) -> None:
    """Resolve every future, whatever the callback of one of them raises."""
    interrupt: BaseException | None = None
    for ticket in tickets:
        future = ticket.future
        assert future is not None
        try:
            if future.done():
                continue
            if ticket.error is None:
                future.set_result(ticket.seq_last)
            else:
                future.set_exception(again(ticket.error))
        except BaseException as error:  # noqa: BLE001 — raised again below
            interrupt = error
    if interrupt is not None:
        raise interrupt


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
