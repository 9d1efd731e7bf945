"""The writer: many appenders, one owner of the file, one sync for all that wait.

Always true:
  - seqs, times and segment boundaries are decided under one lock, in the order in which appends are queued;
    bytes reach the file in that order;
  - at any time at most one thread leads: it alone takes batches, writes and syncs. Whoever appends and finds
    no leader leads; a leader whose own append is done hands the lead to the next waiter. Nobody runs a
    caller's code (the callback of a future) while leading;
  - one batch is unsynced at a time, and no batch exceeds `format.BATCH_BYTES_MAX`. Several may go to the disk
    in one call: each begins after the sync of the one before it, also where that one failed. So recovery may
    find whole batches behind a torn one; all of them together are smaller than a batch may be;
  - nobody is told "durable", and no reader sees a frame, before the sync that covers it has returned;
  - after any failure of a write or a sync the log is poisoned: every waiter and every later append gets the
    error, reads go on, and nothing is written any more. Whether the last batch survives is decided by the
    next opening;
  - an interrupt is no failure: what was queued is written all the same. A leader that is interrupted puts
    back what it has not published, and hands the lead over; who leads next writes the same bytes to the same
    place. Only what is in `publish` may not be repeated, so it is done to the end;
  - a call from a signal handler that would wait for its own thread raises Busy.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from lowwater.engine.format import format
from lowwater.engine.format.before_images import bytes_without_image
from lowwater.engine.format.moments import timeout_of
from lowwater.engine.log.chain import Chain
from lowwater.engine.log.directory import LOCK, typed_errors
from lowwater.engine.log.pieces import Piece, cut, cut_alone
from lowwater.engine.log.recover import inspect_directory
from lowwater.engine.log.ring import Chunk, Ring
from lowwater.engine.log.segment_store import Batch, SegmentStore
from lowwater.engine.log.tickets import (
    AppendFuture,
    RoomWaiter,
    Settled,
    Ticket,
    again,
    resolve_futures,
    settle,
    wake_next,
    wake_room_waiters,
)
from lowwater.engine.seams.interrupts import busy, count_below, is_interrupt, to_the_end
from lowwater.engine.seams.seams import Clock, File, Files, Runner, SyncMode
from lowwater.engine.seams.waiting import Condition
from lowwater.errors import (
    Busy,
    Closed,
    DirectoryLocked,
    DiskFull,
    InvalidConfig,
    InvalidEntry,
    LogPoisoned,
    LowwaterError,
    OutOfOrderSeq,
    OutOfSpace,
)
from lowwater.metrics import LogMetrics

# What goes to the disk in one call, when more waits than one batch may hold: who waits for the first of these
# batches waits for all.
RUN_BATCHES = 16
RUN_BYTES_MAX = 2**19
assert RUN_BYTES_MAX < format.BATCH_BYTES_MAX, "recovery would take what lies behind a torn batch for damage"
# What an append costs in memory besides its frames.
APPEND_OVERHEAD_BYTES = 600

_this_thread = threading.get_ident

# What encoding runs into when it is given something else than entries.
_ENCODING_ERRORS = (TypeError, ValueError, AttributeError, struct.error, OverflowError)

# Makes the payloads of an append, given the chain that they will follow: (seqs or None, payloads).
Build = Callable[[Chain], tuple[Sequence[int] | None, Sequence[bytes]]]
# Makes and cuts them at once: what `pieces.cut` would give, or None where it has to be asked.
CutAtOnce = Callable[[Chain, "WalOptions"], tuple[Piece, Chain] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class WalOptions:
    """How this process writes. Nothing here changes a byte of a segment."""

    sync_mode: SyncMode = "fsync"
    batch_bytes_max: int = 10 * 2**20
    queue_bytes_max: int = 64 * 2**20
    ring_bytes_max: int = 64 * 2**20
    ring_frames_max: int | None = None
    entry_bytes_max: int = format.ENTRY_BYTES_DEFAULT
    # How long frames that nobody waits for may stay unsynced.
    sync_interval_ms: float = 0
    # How long frames that somebody waits for may wait for others, to share one sync.
    gather_ms: float = 0

    def __post_init__(self) -> None:
        for name, lowest, highest in (
            ("batch_bytes_max", 1, format.BATCH_BYTES_MAX),
            ("queue_bytes_max", 1, 2**40),
            ("ring_bytes_max", 0, 2**40),
            ("entry_bytes_max", 64, format.PAYLOAD_BYTES_MAX),
            ("sync_interval_ms", 0, 3_600_000),
            ("gather_ms", 0, 3_600_000),
        ):
            value = getattr(self, name)
            if not lowest <= value <= highest:
                raise InvalidConfig(
                    f"{name} is {value:,}", hint=f"give a number from {lowest:,} to {highest:,}"
                )
        if self.sync_mode not in ("fsync", "fdatasync", "none"):
            raise InvalidConfig(f"sync_mode is {self.sync_mode!r}", hint="give fsync, fdatasync or none")


class _QueueFullError(Exception):
    """A coroutine cannot wait here: it would hold up its event loop."""


class Wal:
    def __init__(
        self,
        files: Files,
        directory: str,
        *,
        clock: Clock,
        runner: Runner,
        owner: str,
        options: WalOptions,
        durable_seq: int = 0,
    ) -> None:
        """Open the log in `directory`. `durable_seq` is what the caller knows to have been durable: a log
        that has lost it is not opened."""
        self.directory = directory
        self.files = files
        self.clock = clock
        self.options = options
        self._metrics: LogMetrics | None = None
        self._registry: CollectorRegistry | None = None
        # It knows its thread: a signal handler comes in the middle of anything, and must not wait for that.
        self.lock = threading.RLock()
        self.owns_lock: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self._room = Condition(self.lock)
        self._room_sleepers = 0
        self.durable_changed = Condition(self.lock)
        self.followers = 0  # readers that wait for `durable_changed`
        self._queue: deque[Piece] = deque()
        self._in_flight: list[Piece] = []
        self._queued_bytes = 0
        self._urgent = False
        self._sync_due_s: float | None = None
        # Who leads waits for others to join it, until the first of them has waited so long, or in a hurry.
        self._gather_s = options.gather_ms / 1000
        self._joined = Condition(self.lock)
        self._gathering = self._hurry = False
        self._leading = False
        self._leads_ended = 0
        self._lead_over = Condition(self.lock)
        self._settling: list[Ticket] = []  # durable, and perhaps not told so yet
        self._writer_leads = False
        self._writer_is_up = False  # the writer thread will look at the queue again by itself
        self._failure: LowwaterError | None = None
        self._closing = False
        self._ended = False
        self._forked = False
        self._closing_ticket: Ticket | None = None
        # Entries were taken with ack="memory" and discarded: there is nobody else to tell.
        self._lost_unheard = False
        self._room_waiters: list[RoomWaiter] = []
        # Of leads that an exception has ended.
        self._unresolved: list[Ticket] = []
        self._to_wake: list[tuple[Settled, list[RoomWaiter]]] = []
        self.ring = Ring(options.ring_bytes_max, options.ring_frames_max)
        # Of all frames that were ever queued here.
        self.ordered_bytes = 0

        with typed_errors(directory, "make the log directory"):
            try:
                files.make_directory(directory)
            except FileExistsError as error:
                raise NotADirectoryError(errno.ENOTDIR, "a file is there") from error
        self._lock_file = lock_directory(files, directory, owner)
        try:
            recovered = inspect_directory(files, directory, durable_seq=durable_seq)
            self._chain = recovered.chain
            self.torn_bytes = recovered.current.torn_bytes if recovered.current is not None else 0
            with typed_errors(directory, "open the log"):
                self.store = SegmentStore(
                    files,
                    directory,
                    recovered,
                    sync_mode=options.sync_mode,
                    clock=clock,
                    lock=self.lock,
                    apart=runner.apart,
                )
            self.durable_seq = self._chain.seq_last
            self.durable_time_us = self._chain.time_us
        except BaseException:
            self._lock_file.close()
            raise
        self._writer = runner.start("wal-writer", self._writer_step)
        self._housekeeper = runner.start("wal-housekeeping", self._housekeeping_step)
        self._housekeeper.wake()
        _open_wals.add(self)

    # ------------------------------------------------------------------ appending

    @property
    def chain(self) -> Chain:
        """Where the log stands with everything that was queued."""
        return self._chain

    def watch(self, registry: CollectorRegistry, metrics: LogMetrics) -> None:
        """Show this log in metrics that are in `registry`."""
        metrics.watch(
            segments=lambda: self.store.segment_count,
            size_bytes=lambda: self.store.bytes_total,
            current_seq=lambda: self._chain.seq_last,
            cache_bytes=lambda: self.ring.bytes,
            queue_bytes=lambda: self._queued_bytes,
        )
        self._metrics = metrics
        self._registry = registry

    def purge(self, seq: int) -> int:
        """Remove sealed segments that hold nothing above `seq`: the seq up to which entries are gone."""
        self.refuse_forked()
        with self.lock:
            if self._closing or self._ended:
                raise Closed("the log is closed", path=self.directory)
        with typed_errors(self.directory, "purge the log"):
            self.store.remove_up_to(seq)
        with self.lock:
            return self.store.seq_before_first

    @property
    def failure(self) -> LowwaterError | None:
        """Why the log refuses writes, if it does."""
        return self._failure

    def append(self, build: Build, *, timeout_s: float | None = None, urgent: bool = False) -> int:
        """Append, and return the last seq once it is durable. What is `urgent` does not wait for others."""
        if self._forked or self._leading or self.owns_lock():
            self.refuse_forked()
            self.refuse_reentry(1)
        ticket = Ticket(self.clock.monotonic())
        try:
            with self.lock:
                self._enqueue(build, ticket, timeout_s)
                self._get_in_line(ticket, urgent=urgent)
            self._wait_or_lead(ticket)
        except BaseException:
            try:
                self._abandon(ticket)
            except BaseException:
                to_the_end(self._abandon, ticket)
                raise
            raise
        return ticket.seq_last

    def order(
        self,
        build: Build,
        *,
        timeout_s: float | None = None,
        alike: bool = False,
        cut_at_once: CutAtOnce | None = None,
        made: list[Piece] | None = None,
    ) -> tuple[Ticket, list[Piece]]:
        """Give entries their seqs and queue them. `wait` returns once they are durable, and has to be called:
        until then nobody need be writing them. `alike` is for `cut`. What is queued is in `made` before it is
        queued: an interrupt may take the result away. A signal handler asks `refuse_reentry` before."""
        self.refuse_forked()
        ticket = Ticket(self.clock.monotonic())
        try:
            with self.lock:
                pieces = self._enqueue(
                    build, ticket, timeout_s, alike=alike, cut_at_once=cut_at_once, made=made
                )
        except BaseException:
            try:
                self._abandon(ticket)
            except BaseException:
                to_the_end(self._abandon, ticket)
                raise
            raise
        return ticket, pieces

    def wait(self, ticket: Ticket, *, urgent: bool = False) -> int:
        """Return the last seq of what was ordered, once it is durable. What is `urgent` does not wait for
        others."""
        self.refuse_forked()
        try:
            with self.lock:
                if not ticket.done:
                    self._get_in_line(ticket, urgent=urgent)
            self._wait_or_lead(ticket)
        except BaseException:
            try:
                self._abandon(ticket)
            except BaseException:
                to_the_end(self._abandon, ticket)
                raise
            raise
        return ticket.seq_last

    def sync(self) -> int:
        """Return once everything that was appended before is durable: the last durable seq."""
        self.refuse_forked()
        with self.lock:
            self._require_open()
        return self._flush()

    def _flush(self) -> int:
        self.refuse_reentry(1)
        ticket = Ticket(self.clock.monotonic())
        try:
            with self.lock:
                if self._failure is not None:
                    raise again(self._failure)
                if not self._queue and not self._leading:
                    return self.durable_seq
                if self._closing:
                    self._closing_ticket = ticket
                marker = _empty_piece(self._chain)
                marker.owner, marker.completes = ticket, True
                self._queue.append(marker)
                ticket.seq_last = self._chain.seq_last
                self._get_in_line(ticket, urgent=True)
            self._wait_or_lead(ticket)
        except BaseException:
            try:
                self._abandon(ticket)
            except BaseException:
                to_the_end(self._abandon, ticket)
                raise
            raise
        return ticket.seq_last

    def _get_in_line(self, ticket: Ticket, *, urgent: bool) -> None:
        """With the lock held: have this thread lead, or wait for its turn."""
        self._urgent = True
        if self._gather_s:
            self._end_gathering(urgent=urgent)
        if self._leading and not self._writer_leads:
            ticket.turn = threading.Lock()
            ticket.turn.acquire()
        else:
            # Also where the writer thread was to lead and has not begun yet.
            self._leading, self._writer_leads = True, False
            ticket.promoted = True

    def _wait_or_lead(self, ticket: Ticket) -> None:
        if ticket.turn is not None:
            # Also where it is done already: whom it has to wake may not be known yet.
            ticket.turn.acquire()
        if not ticket.done:
            self._lead(ticket)
        wake_next(ticket)
        if ticket.error is not None:
            raise again(ticket.error)

    def _abandon(self, ticket: Ticket) -> None:
        """The thread leaves (an error, Ctrl-C): a lead that it was given and did not take up goes on, and so
        does a wake-up."""
        with self.lock:
            ticket.turn = None
            wake_next(ticket)
            if ticket.promoted and not ticket.leads:
                self._hand_over(ticket)
            self._wake_for_others()

    def _wake_for_others(self) -> None:
        """With the lock held, by who was interrupted: whom it may not have woken any more."""
        if self._writer_leads or (self._queue and not self._leading):
            # Also where it left between queueing its entries and getting in line.
            self._writer.wake()
        if not self._leading:
            self._lead_over.notify_all()
        self._room.notify_all()

    def submit(self, build: Build, *, timeout_s: float | None = None) -> Future[int]:
        """Append, and return a future of the last seq that resolves once it is durable. Blocks only while
        the queue is full."""
        self.refuse_forked()
        self.refuse_inside()
        ticket = Ticket(self.clock.monotonic())
        future = ticket.future = AppendFuture()
        try:
            with self.lock:
                self._enqueue(build, ticket, timeout_s)
                wake = self._claim_for_writer()
            if wake:
                self._writer.wake()
        except BaseException:
            self.leave_to_writer()
            raise
        return future

    async def append_async(self, build: Build) -> int:
        """`append` for coroutines: one wake-up of the event loop for all that one sync made durable."""
        self.refuse_forked()
        self.refuse_inside()
        loop = asyncio.get_running_loop()
        ticket = Ticket(self.clock.monotonic())
        ticket.loop = loop
        waiter: asyncio.Future[int] = loop.create_future()
        ticket.waiter = waiter
        while True:
            room: asyncio.Future[None] | None = None
            try:
                with self.lock:
                    try:
                        self._enqueue(build, ticket, None)
                    except _QueueFullError:
                        room = loop.create_future()
                        self._room_waiters.append((loop, room))
                    wake = self._claim_for_writer()
                if wake:
                    self._writer.wake()
            except BaseException:
                self.leave_to_writer()
                raise
            if room is None:
                return await waiter
            await room

    def enqueue(
        self, build: Build, *, timeout_s: float | None = None, made: list[Piece] | None = None
    ) -> list[Piece]:
        """Append, and return the pieces at once (`ack="memory"`): they are durable after the next sync.
        `made` is as for `order`."""
        self.refuse_forked()
        self.refuse_inside()
        try:
            with self.lock:
                pieces = self._enqueue(build, None, timeout_s, made=made)
                if not self._urgent and self._queued_bytes >= self.options.batch_bytes_max:
                    self._urgent = True
                wake = False
                if self._urgent or not self.options.sync_interval_ms:
                    wake = self._claim_for_writer()
                elif self._sync_due_s is None:
                    self._sync_due_s = self.clock.monotonic() + self.options.sync_interval_ms / 1000
                    wake = True
            if wake:
                self._writer.wake()
        except BaseException:
            self.leave_to_writer()
            raise
        return pieces

    def leave_to_writer(self) -> None:
        """The thread leaves (an error, Ctrl-C), perhaps without having woken the writer thread that it had
        given the lead, or with entries queued that nobody knows of."""
        if self._writer_leads or (self._queue and not self._leading):
            self._writer.wake()

    @property
    def is_forked(self) -> bool:
        """Whether this is another process than the one that opened the log."""
        return self._forked

    def refuse_forked(self) -> None:
        """A forked child shares the files and not the threads: it may touch nothing, and no lock either."""
        if self._forked:
            raise LogPoisoned(
                "this process was forked from the one that opened the log",
                path=self.directory,
                hint="open a log after the fork, in one process only",
            )

    def refuse_reentry(self, calls: int = 0) -> None:
        """Raise Busy where a signal handler calls, and its thread has the lock, or leads or stands in line:
        the handler would wait for what goes on when it has returned. `calls` of this thread need not."""
        if self.owns_lock() or (self._leading and self._is_reentry(calls)):
            raise busy(self.directory)

    def refuse_inside(self) -> None:
        """Raise Busy where a signal handler calls, and its thread has the lock. It is for calls that wait for
        no write."""
        if self.owns_lock():
            raise busy(self.directory)

    def _is_reentry(self, calls: int) -> bool:
        """Whether this thread is inside more than so many calls that lead, or wait for their turn. Who
        resolves futures has led, and may be called back."""
        if _this_thread() != threading.main_thread().ident:
            return False  # nowhere else are handlers called
        return count_below(_WAITING, resolve_futures.__code__) > calls

    def _require_open(self) -> None:
        if self._failure is not None:
            self._lost_unheard = False
            raise again(self._failure)
        if self._closing or self._ended:
            raise Closed("the log is closed", path=self.directory)

    def _enqueue(
        self,
        build: Build,
        ticket: Ticket | None,
        timeout_s: float | None,
        *,
        alike: bool = False,
        cut_at_once: CutAtOnce | None = None,
        made: list[Piece] | None = None,
    ) -> list[Piece]:
        """With the lock held: order the entries, cut them, queue them. Raises before anything changed."""
        if timeout_s is not None:
            timeout_s = timeout_of(timeout_s, "timeout_s")
        room_needed = 1
        while True:
            full = self._queued_bytes and self._queued_bytes + room_needed > self.options.queue_bytes_max
            if full or self._failure is not None or self._closing or self._ended:
                self._wait_for_room(room_needed, timeout_s, blocking=ticket is None or ticket.loop is None)
            try:
                payloads: Sequence[bytes] = ()
                alone = None if cut_at_once is None else cut_at_once(self._chain, self.options)
                if alone is None:
                    seqs, payloads = build(self._chain)
                    alone = self._cut_alone(seqs, payloads)
                if alone is None:
                    sizes = list(map(len, payloads))
                    self._check(seqs, payloads, sizes)
            except _ENCODING_ERRORS as error:
                raise InvalidEntry(
                    f"this is not an entry: {error}",
                    hint="append Put, Delete, …, or what their encode() gives",
                ) from error
            if alone is not None:
                pieces, chain = [alone[0]], alone[1]
                size = len(pieces[0].data) + APPEND_OVERHEAD_BYTES
            else:
                if seqs is None:
                    seq_first = self._chain.seq_last + 1
                    seqs = range(seq_first, seq_first + len(payloads))
                pieces, chain = cut(
                    self._chain,
                    seqs,
                    payloads,
                    sizes,
                    batch_bytes_max=self.options.batch_bytes_max,
                    alike=alike,
                )
                size = sum([len(piece.data) for piece in pieces]) + APPEND_OVERHEAD_BYTES
            if not self._queued_bytes or self._queued_bytes + size <= self.options.queue_bytes_max:
                break
            room_needed = size
            # Many threads may wait here, and what each of them encoded is in no queue that is counted.
            del payloads, pieces, alone
        for piece in pieces:
            piece.owner = ticket
        pieces[-1].completes = True
        if ticket is not None:
            ticket.seq_last = chain.seq_last
        if made is not None:
            made += pieces
        # Last and in this order: Ctrl-C comes after a call returns, and must find all of it done or nothing.
        self._chain = chain
        self._queued_bytes += size
        self.ordered_bytes += size
        self._queue.extend(pieces)
        return pieces

    def _cut_alone(self, seqs: Sequence[int] | None, payloads: Sequence[bytes]) -> tuple[Piece, Chain] | None:
        """One entry of the most common form, checked and cut in a third of the time; None for all others."""
        chain, options = self._chain, self.options
        if seqs is None and len(payloads) == 1 and chain.seq_last < format.SEQ_MAX:
            payload = payloads[0]
            if format.FIXED_BYTES <= len(payload) <= options.entry_bytes_max:
                return cut_alone(chain, chain.seq_last + 1, payload, options.batch_bytes_max)
        return None

    def _check(self, seqs: Sequence[int] | None, payloads: Sequence[bytes], sizes: Sequence[int]) -> None:
        if not sizes:
            raise InvalidEntry("there is nothing to append", hint="give at least one entry")
        largest = max(sizes)
        if largest > self.options.entry_bytes_max:
            # What the log adds by itself is nobody's fault.
            most = self.options.entry_bytes_max
            largest = max(bytes_without_image(payload) for payload in payloads if len(payload) > most)
        if largest > self.options.entry_bytes_max:
            raise InvalidEntry(
                f"this entry has {largest:,} bytes; at most {self.options.entry_bytes_max:,} are allowed",
                hint="split the value, or raise wal.entry_bytes_max on every node",
            )
        if min(sizes) < format.FIXED_BYTES:
            raise InvalidEntry("a payload is too short to be one", hint="make it with an entry's encode()")
        if sum(sizes) > format.BATCH_BYTES_MAX:
            raise InvalidEntry(
                f"one append takes at most {format.BATCH_BYTES_MAX:,} bytes",
                hint="append fewer entries at once",
            )
        if seqs is None:
            if self._chain.seq_last + len(sizes) > format.SEQ_MAX:
                raise OutOfOrderSeq("the seqs are used up", hint="this log cannot grow any more")
            return
        if len(seqs) != len(sizes):
            raise InvalidEntry(f"{len(sizes)} entries came with {len(seqs)} seqs")
        before = self._chain.seq_last
        for seq in seqs:
            if not isinstance(seq, int) or isinstance(seq, bool) or not 0 < seq <= format.SEQ_MAX:
                raise InvalidEntry(f"{seq!r:.80} is no seq", hint="a seq is a whole number from 1 to 2^64-1")
            if seq <= before:
                raise OutOfOrderSeq(f"seq {seq} does not lie above {before}", seq=seq)
            before = seq

    def _wait_for_room(self, needed: int, timeout_s: float | None, *, blocking: bool) -> None:
        """With the lock held: return once `needed` bytes fit into the queue, or it is empty. Raises where
        nothing is taken any more."""
        deadline_s = None if timeout_s is None else self.clock.monotonic() + timeout_s
        while True:
            self._require_open()
            if not self._queued_bytes or self._queued_bytes + needed <= self.options.queue_bytes_max:
                return
            if not blocking:
                raise _QueueFullError
            if self._leading and self._is_reentry(1):
                raise busy(self.directory)
            self._urgent = True
            self._end_gathering(urgent=True)
            if not self._leading or self._writer_leads:
                # Also where the writer thread was to lead: a simulation has no thread that would begin.
                lead = Ticket(0)
                lead.promoted = lead.done = True  # one batch is enough
                self._leading, self._writer_leads = True, False
                try:
                    self.lock.release()
                    self._lead(lead)
                except BaseException:
                    to_the_end(self._abandon, lead)
                    raise
                finally:
                    while not self.owns_lock():
                        to_the_end(self.lock.acquire)
                continue
            remaining_s = None if deadline_s is None else deadline_s - self.clock.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                raise Busy(f"the write queue has been full for {timeout_s} s", path=self.directory)
            self._room_sleepers += 1
            try:
                self._room.wait(remaining_s)
            finally:
                self._room_sleepers -= 1

    # ------------------------------------------------------------------ leading

    def _claim_for_writer(self) -> bool:
        """With the lock held: have the writer thread lead, unless somebody does. Whether to wake it."""
        self._urgent = True
        if self._gather_s:
            self._end_gathering(urgent=False)
        if self._leading:
            return False
        self._leading = self._writer_leads = True
        return True

    def _writer_step(self) -> float | None:
        # Batch after batch without leaving: between two of them the interpreter must not change hands, or the
        # disk waits until the thread that encodes the next entries is done.
        lead = Ticket(0)
        try:
            while True:
                if lead.leads:
                    lead = Ticket(0)
                with self.lock:
                    wait_s = self._take_up_lead(lead)
                    self._writer_is_up = wait_s == 0
                    if wait_s != 0:
                        return wait_s
                self._lead(None, lead)
        except BaseException:
            # Whoever raises something in this thread finds it anywhere: it is called again.
            lead.turn = None
            to_the_end(self._abandon, lead)
            self._writer.wake()
            raise

    def _take_up_lead(self, lead: Ticket) -> float | None:
        """With the lock held, by the writer thread: 0 when it leads now, else how long it can sleep."""
        if not self._writer_leads:
            if self._leading or not self._queue:
                return None
            if not self._urgent and self._sync_due_s is not None:
                wait_s = self._sync_due_s - self.clock.monotonic()
                if wait_s > 0:
                    return wait_s
        # Together, for an interrupt to find all of it or nothing.
        self._leading, self._writer_leads, lead.promoted = True, False, True
        return 0

    def _gather(self) -> None:
        """By the leader, before it writes: let others join its sync. An interrupt finds nothing begun, and
        the lead as one that was not taken up."""
        with self.lock:
            first = next((piece.owner for piece in self._queue if piece.owner is not None), None)
            due_s = 0.0 if first is None else first.started_s + self._gather_s
            self._gathering = True
            try:
                while not self._hurry and self._queued_bytes < self.options.batch_bytes_max:
                    wait_s = due_s - self.clock.monotonic()
                    if wait_s <= 0 or not self._joined.wait(wait_s):
                        break
            finally:
                self._gathering = self._hurry = False

    def _end_gathering(self, *, urgent: bool) -> None:
        """With the lock held: have what is queued written now, where it is a batch, or somebody is in a
        hurry."""
        if urgent or self._queued_bytes >= self.options.batch_bytes_max:
            self._hurry = True
            if self._gathering:
                self._joined.notify_all()

    def _lead(self, ticket: Ticket | None, lead: Ticket | None = None) -> None:
        """Write batches until `ticket` is done, or one batch, then hand the lead over. The caller has it,
        which stands in `lead` where it has no ticket."""
        if self._gather_s:
            self._gather()
        resolved: list[Ticket] = []
        leads_ended = self._leads_ended
        try:
            if ticket is not None:
                ticket.leads = True
            elif lead is not None:
                lead.leads = True
            while True:
                with self.lock:
                    run = self._take_run(alone=ticket is not None)
                if run:
                    self._write_run(run, resolved)
                if ticket is None or ticket.done:
                    break
            with self.lock:
                self._hand_over()
        except BaseException as error:
            try:
                is_over = self._end_lead(error, leads_ended, ticket or lead, resolved)
            except BaseException:
                # The failure that it began with has ended the lead, whatever comes while it is dealt with.
                to_the_end(self._end_lead, error, leads_ended, ticket or lead, resolved)
                raise
            if is_over:
                raise
        finally:
            # The writer thread has to be there for others.
            try:
                resolve_futures(resolved, reporting=ticket is None)
            except BaseException:
                to_the_end(resolve_futures, resolved)
                raise

    def _end_lead(
        self, error: BaseException, leads_ended: int, ticket: Ticket | None, resolved: list[Ticket]
    ) -> bool:
        """After an exception in a lead: where it was an interrupt, the next leader goes on, else nobody does.
        Whether to raise it again: a failure is told with the entries. It may be repeated."""
        if not is_interrupt(error):
            self._poison(error, leads_ended)
            return not isinstance(error, Exception)
        with self.lock:
            # Ctrl-C may come after the lead was handed over, and the next leader be inside a write.
            if self._leads_ended == leads_ended:
                self._account()
                self._put_back()
                self._to_wake.append((settle(self._settling, None, resolved, all_at_once=True), []))
                self._settling = []
                if ticket is not None:
                    ticket.turn = None
                self._hand_over(ticket)
            self._wake_for_others()
        self._wake_those()
        self._housekeeper.wake()
        return True

    def _account(self) -> None:
        """With the lock held, by an interrupted leader: what the store has published is durable, and whoever
        waits for it is to be told."""
        run = self._in_flight
        framed = [piece for piece in run if piece.frame_count]
        if not framed or self.store.published_seq < framed[-1].seq_last:
            return
        tickets = [piece.owner for piece in run if piece.completes and piece.owner is not None]
        queued_bytes = _queue_bytes(run)
        last = framed[-1]
        self.durable_seq, self.durable_time_us = last.seq_last, last.time_us
        self._queued_bytes -= queued_bytes
        self._in_flight, self._settling = [], tickets
        self.durable_changed.notify_all()

    def _put_back(self) -> None:
        """With the lock held, by an interrupted leader: what it has taken and not published is in the queue
        again. A piece that it was about to take may be there still."""
        run, queue = self._in_flight, self._queue
        if run and queue and queue[0] is run[-1]:
            run = run[:-1]
        queue = deque([*run, *queue])
        self._queue, self._in_flight = queue, []

    def _wake_those(self) -> None:
        """Wake whom an interrupted or failed leader has settled. Harmless when it is done again."""
        for settled, room_waiters in list(self._to_wake):
            settled.wake()
            wake_room_waiters(room_waiters)
        self._to_wake.clear()

    def _hand_over(self, ticket: Ticket | None = None) -> None:
        """With the lock held, by the leader: the lead goes to whoever waits at the head of the queue. Nothing
        but the last step can be interrupted, and that may be repeated. `ticket` is of who leaves, with a lead
        that it has, or was given."""
        owner: Ticket | None = self._queue[0].owner if self._queue else None
        if ticket is not None:
            ticket.leads = True
        self._leads_ended += 1
        if not self._queue:
            self._leading = self._urgent = False
            self._sync_due_s = None
            self._lead_over.notify_all()
        elif owner is not None and owner.turn is not None:
            owner.promoted = True
            owner.turn.release()
        elif self._urgent or self._sync_due_s is None:
            self._writer_leads = True
            if not self._writer_is_up:
                self._writer.wake()
        else:
            self._leading = False
            self._writer.wake()

    def _take_run(self, *, alone: bool) -> list[Piece]:
        """One batch; where nobody waits for just that, perhaps several, of one segment that has begun."""
        # Ctrl-C comes after a call returns, and must find each piece in one of the two, or in both.
        run = self._in_flight = []
        size = 0
        queue = self._queue
        size_max = self.options.batch_bytes_max
        if not alone and self.store.current is not None:
            size_max = max(size_max, min(RUN_BATCHES * size_max, RUN_BYTES_MAX))
        while queue:
            piece = queue[0]
            size += len(piece.data)
            if run and size > size_max:
                break
            run.append(piece)
            queue.popleft()
            if piece.ends_segment:
                break
        return run

    def _write_run(self, run: list[Piece], resolved: list[Ticket]) -> None:
        tickets: list[Ticket] = []
        frame_count = append_count = 0
        for piece in run:
            frame_count += piece.frame_count
            if piece.completes:
                append_count += piece.frame_count > 0
                if piece.owner is not None:
                    tickets.append(piece.owner)
        size = 0
        batches: list[Batch] = []
        if frame_count:
            # What a sync waits behind has no frames.
            pieces = [piece for piece in run if piece.frame_count] if len(run) > 1 else run
            last = pieces[-1]
            batches = self.store.write(pieces, self.options.batch_bytes_max)
            size = sum([len(batch.data) for batch in batches])
        queued_bytes = size + APPEND_OVERHEAD_BYTES * append_count
        with self.lock:
            if frame_count:
                try:
                    self.store.publish(pieces, batches)
                    for parts, data in batches:
                        chunk = Chunk(parts[0].seq_before, parts[-1].seq_last, data, 0, len(data), True)
                        self.ring.append(chunk, sum([piece.frame_count for piece in parts]))
                except BaseException:
                    try:
                        self._mend_publishing()
                    except BaseException:
                        to_the_end(self._mend_publishing)
                        raise
                    raise
                self.durable_seq = last.seq_last
                self.durable_time_us = last.time_us
            # From `durable_seq` to here there is no call that an interrupt could come after.
            self._queued_bytes -= queued_bytes
            self._in_flight = []
            self._settling = tickets
            assert self._queued_bytes >= 0
            if self.followers:
                self.durable_changed.notify_all()
            settled = settle(tickets, None, resolved)
            if self._room_sleepers:
                self._room.notify_all()
            if self._room_waiters:
                self._to_wake.append((settle((), None, resolved), self._room_waiters))
                self._room_waiters = []
        settled.wake()
        self._settling = []
        if self._to_wake:
            self._wake_those()
        if not frame_count:
            return
        metrics = self._metrics
        if metrics is not None:
            store = self.store
            metrics.batches_written(len(batches), frame_count, size, store.sync_s)
            synced_at_s = store.synced_at_s
            metrics.appends_durable([synced_at_s - ticket.started_s for ticket in tickets])
            metrics.rotations += last.ends_segment
        if last.ends_segment:
            self.store.end_segment()
            self._housekeeper.wake()
        elif self.store.claim_housekeeping():
            self._housekeeper.wake()

    def _mend_publishing(self) -> None:
        """With the lock held: what the ring has of a run is not known, and readers have the file."""
        self.ring.clear()
        self.store.mend_publishing()

    def _poison(self, cause: BaseException, leads_ended: int | None = None) -> None:
        """Refuse writes from now on: what is on the disk above the durable position is unknown.

        `leads_ended` is of who may have the lead, which then ends. Who has not must leave the leader its
        batch: it may be inside a write, and nobody may take the file away before it has come back. Cut short
        by an interrupt, it is done again.
        """
        failure: LowwaterError
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if isinstance(cause, LowwaterError) and not isinstance(cause, DiskFull):
            failure = cause
        elif is_full or isinstance(cause, DiskFull):
            failure = OutOfSpace("the disk is full: the log refuses writes", path=self.directory)
        else:
            why = str(cause) or type(cause).__name__
            failure = LogPoisoned(f"a write to the log failed: {why}", path=self.directory)
        failure.__cause__ = cause if failure is not cause else None
        futures: list[Ticket] = []
        with self.lock:
            if self._failure is None:
                self._failure = failure
            leading = self._leads_ended == leads_ended
            pieces, settling = list(self._queue), self._settling if leading else []
            left_bytes = 0 if leading else self._queued_bytes - _queue_bytes(pieces)
            if leading:
                pieces += self._in_flight
            tickets = [piece.owner for piece in pieces if piece.completes and piece.owner is not None]
            written = settle(settling, None, futures, all_at_once=True)
            lost = settle(tickets, self._failure, futures, all_at_once=True)
            heard = any(ticket is not self._closing_ticket for ticket in tickets)
            unheard = not heard and any(piece.owner is None for piece in pieces)
            self._to_wake += [(written, self._room_waiters), (lost, [])]
            self._unresolved += futures
            nothing: deque[Piece] = deque()
            # From here to the end of the statements without a call nobody comes between.
            self._room_waiters = []
            self._lost_unheard |= unheard
            self._queue, self._queued_bytes = nothing, left_bytes
            if leading:
                self._in_flight, self._settling = [], []
                self._leading = self._writer_leads = False
                self._leads_ended += 1
            self._lead_over.notify_all()
            self._room.notify_all()
            self.durable_changed.notify_all()
        self._wake_those()
        futures, self._unresolved = self._unresolved, []
        try:
            resolve_futures(futures)
        except BaseException:
            to_the_end(resolve_futures, futures)
            raise

    # ------------------------------------------------------------------ housekeeping and closing

    def _housekeeping_step(self) -> float | None:
        if self._failure is not None:
            return None
        try:
            return self.store.housekeeping_step()
        except Exception as error:  # noqa: BLE001 — as for the leader
            to_the_end(self._poison, error)
            return None

    def close(self) -> None:
        """Write and sync what was queued, finish the sealing, and let the directory go.

        Raises where entries were lost of which nobody else was told. Interrupted while it waits for a write,
        it can be called again: the directory must not go to another process before that write has ended.
        """
        if self._forked:
            return
        closing = flushed = False
        try:
            with self.lock:
                if self._closing:
                    return
                closing = self._closing = True
                self._room.notify_all()
            if self._failure is None:
                try:
                    self._flush()
                    flushed = True
                except LowwaterError:
                    pass  # it is in `_failure`
            with self.lock:
                if self._writer_leads:
                    # Nobody is inside: the writer was to take it up.
                    self._leading = self._writer_leads = False
                while self._leading:
                    self._lead_over.wait()
                self._ended = True
                self.durable_changed.notify_all()
            self._housekeeper.stop()
            self._writer.stop()
        except BaseException:
            if closing:
                with self.lock:
                    self._closing = False
            raise
        try:
            if self._registry is not None and self._metrics is not None:
                self._registry.unregister(self._metrics)
            with typed_errors(self.directory, "close the log"):
                self.store.close(clean=flushed and self._failure is None)
        finally:
            self._lock_file.close()
            _open_wals.discard(self)
        if self._failure is not None and self._lost_unheard:
            raise again(self._failure)

    @property
    def ended(self) -> bool:
        """Whether nothing will become durable any more: closing writes first what was queued."""
        return self._ended


# Who leads, or stands in line.
_WAITING = frozenset(
    each.__code__ for each in (Wal.append, Wal.wait, Wal._flush, Wal._wait_or_lead, Wal._lead)
)

_open_wals: weakref.WeakSet[Wal] = weakref.WeakSet()


def _forbid_in_child() -> None:
    for wal in list(_open_wals):
        wal._forked = True
        # The lock belongs to every process that has its file open: it would outlive the one that writes.
        wal._lock_file.close()


os.register_at_fork(after_in_child=_forbid_in_child)


def _queue_bytes(pieces: Sequence[Piece]) -> int:
    """What pieces count for in the queue."""
    appends = sum(piece.completes and piece.frame_count > 0 for piece in pieces)
    return sum(len(piece.data) for piece in pieces) + APPEND_OVERHEAD_BYTES * appends


def lock_directory(files: Files, directory: str, owner: str) -> File:
    """Be the only one to write there until this is closed. Raises DirectoryLocked."""
    path = f"{directory}/{LOCK}"
    with typed_errors(path, "lock the log directory"):
        try:
            lock = files.lock(path, owner)
        except BlockingIOError as error:
            file = files.open(path)
            holder = file.read_at(0, 256).decode(errors="replace").strip()
            file.close()
            raise DirectoryLocked(
                f"this log is open already: {holder}" if holder else "this log is open already",
                path=directory,
            ) from error
        return lock


def _empty_piece(chain: Chain) -> Piece:
    """What a sync waits behind when there is nothing of its own to write."""
    return Piece(
        b"",
        offset=0,
        positions=array("I"),
        seq_before=chain.seq_last,
        seq_first=chain.seq_last,
        seq_last=chain.seq_last,
        time_us=chain.time_us,
        starts_segment=None,
        ends_segment=False,
    )
