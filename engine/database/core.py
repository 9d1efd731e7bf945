"""What a database and a fed engine have in common: a log, the state that its entries make, and its pages.

Always true:
  - an answer (a value, an absence, a refusal) that rests on an entry which is not durable yet waits for it;
  - an entry is in the log's queue before it is applied, and both happen under the state's lock;
  - after a failure in the log or the page store writes are refused, and reads go on with what is durable.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Self

from prometheus_client import CollectorRegistry

from lowwater.engine.checkpoint.checkpointer import Checkpointer, MustWait
from lowwater.engine.checkpoint.checkpoints import Checkpoints, StoredCheckpoint
from lowwater.engine.checkpoint.content import list_boundaries
from lowwater.engine.checkpoint.leaving import Leaving
from lowwater.engine.database.measure import Recovering, watch
from lowwater.engine.database.redo import Progress, parts_from, redo
from lowwater.engine.database.space import Space
from lowwater.engine.database.tier import OlderVersions, ShippingStatus, Tier
from lowwater.engine.database.upkeep import KEEP_AS_IT_IS, VersionPolicy
from lowwater.engine.flush.flush import Flusher
from lowwater.engine.format import format
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.entries import Control, Entry, decode_body
from lowwater.engine.format.format import Kind
from lowwater.engine.format.moments import require_seq, timeout_of
from lowwater.engine.format.records import VALUE_PLACE, Marks
from lowwater.engine.log.chain import Chain, checkpoint_entry, seal_entry
from lowwater.engine.log.check import Finding
from lowwater.engine.log.directory import Segment, typed_errors
from lowwater.engine.log.log import Log, Seams, Start
from lowwater.engine.log.pieces import Piece, frames_of, places_of
from lowwater.engine.log.reader import ColdSource, place_of
from lowwater.engine.log.tickets import again
from lowwater.engine.log.values import ValueReader, segments_of
from lowwater.engine.pages.pagestore import PageStore
from lowwater.engine.seams.interrupts import busy, is_in_handler, is_interrupt, to_the_end
from lowwater.engine.seams.seams import Task
from lowwater.engine.seams.waiting import Condition, Event
from lowwater.engine.state.away import BlockSource, ReadFirst
from lowwater.engine.state.catalogue import Catalogue, CheckpointDescriptor, record_of
from lowwater.engine.state.check_pages import check_pages
from lowwater.engine.state.measured import Measured
from lowwater.engine.state.meta import Meta
from lowwater.engine.state.state import State
from lowwater.engine.state.transaction_table import load_table
from lowwater.errors import (
    Busy,
    Closed,
    Corrupt,
    DiskFull,
    InputError,
    InternalError,
    LogDivergence,
    LogPoisoned,
    LowwaterError,
    NotFound,
    OutOfSpace,
    ReopenError,
    TimedOut,
)
from lowwater.logging import get_logger

_logger = get_logger("engine")

# After how many new changes the background looks whether there is something to flush.
LOOK_AFTER_BYTES = 2**20
# Where writers have to help, in shares of the pool.
DIRTY_MAX = 0.9
# After how long what did not come from afar is asked for again, at first and in the end.
BRING_AGAIN_S = 1.0
BRING_AGAIN_S_MAX = 30.0
# Until who opens this has attached its archive. That wakes who waits for it.
ATTACHED_AFTER_S = 1.0
# Of so many copied values it is remembered where they lie.
PLACES_MAX = 4096
# How often the length of the log is looked at, where checkpoint entries go by it.
LOOK_AFTER_S = 1.0
# Less of the log than this is little: where an age is set, a checkpoint of it waits for that.
LITTLE_BYTES = 2**20
# A caller that does the background's work lets others run so often, and so long: as long as it takes to wake.
PAUSE_EVERY_S = 0.0005
PAUSE_S = 0.00005


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How this process works. Nothing here changes a byte that is shared, except through the entries that it
    asks for, such as those of `versions`."""

    pool_bytes_max: int = 2**30
    # How long pages may lag behind the log: redo after a crash takes the longer.
    checkpoint_interval_s: float | None = 300.0
    versions: VersionPolicy = KEEP_AS_IT_IS
    # What is kept back of the disk; 0 to write until it is full, and the log is poisoned.
    disk_reserve_bytes: int = 64 * 2**20
    # How long a transaction may be open before it is aborted; None for as long as somebody has it.
    transaction_age_max_s: float | None = 3600.0
    # When the engine itself has a checkpoint entry ordered: after so long, or so many bytes of log.
    checkpoint_entry_interval_s: float | None = None
    checkpoint_entry_bytes: int | None = None
    # With it, the interval is for logs that have grown by more than a little; the others wait for this age.
    checkpoint_entry_age_max_s: float | None = None

    def __post_init__(self) -> None:
        if not 2**20 <= self.pool_bytes_max <= 2**44:
            raise InputError(
                f"engine.pool_bytes_max is {self.pool_bytes_max:,}", hint="give 1 MiB or more, say 256 MiB"
            )


ColdOf = Callable[[Catalogue], ColdSource]


class Core:
    _votes_alone = False

    def __init__(
        self,
        log: Log,
        store: PageStore,
        meta: Meta,
        *,
        seams: Seams,
        options: EngineOptions,
        checkpoints: Checkpoints,
        blocks: BlockSource | None = None,
        cold: ColdOf | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`blocks` is where pages come from that have left, `cold` makes what reads the entries and values
        that were purged."""
        checkpoints.require_of(log.cluster_id_at, log.seq_durable)
        self.options = options
        self._checkpoints = checkpoints
        self._log = log
        self._wal = log.wal
        self._store = store
        self._seams = seams
        self._salt = meta.salt
        self._page_keys = meta.page_keys
        self._values = ValueReader(
            segments_of(log, seams.files),
            log.directory,
            lambda: log.cold_source,
            is_shipped=lambda seq: self._state.catalogue.segment_of(seq) is not None,
        )
        self._state = state = State(
            store,
            Boundaries(meta.salt, meta.page_keys),
            inline_bytes_max=meta.inline_bytes_max,
            place_reader=self._read_value,
            pool_bytes_max=options.pool_bytes_max,
            now_s=seams.clock.monotonic,
            blocks=blocks,
        )
        state.own_locks += (log.wal.owns_lock, self._values.owns_lock)
        store.on_full = lambda: self._tier is not None and self._tier.make_room()
        self.measured = Measured()
        self._failure: LowwaterError | None = None
        # With the state's lock: of values that were copied, where they lie and the seqs of their frames.
        self._place_by_seq: dict[int, tuple[int, int]] = {}
        self._seq_by_place: dict[tuple[int, int], int] = {}
        self._counted_hwm = 0
        self._tier: Tier | None = None
        self._older: OlderVersions | None = None
        self._age_task: Task | None = None
        self._before_close: list[Callable[[], None]] = []
        self.space = Space(
            seams.files,
            log_directory=log.directory,
            data_directory=checkpoints.data_directory,
            reserve_bytes=options.disk_reserve_bytes,
            clock=seams.clock,
            written=lambda: log.wal.ordered_bytes,
            owed=lambda: state.dirty_bytes,
            on_full=self._make_room,
        )
        self._closing = self._closed = False
        self._ending = threading.Lock()
        self._closes_aside = False
        # Who waits for a seq sleeps on this. Writers look at the number without the lock: who comes later
        # sees what they have applied.
        self._applied_more = Condition(state.lock)
        self._waiting_readers = 0
        self._stepping = threading.Lock()
        self._pause = Event()  # nobody sets it
        self._paused_s = 0.0
        self._looked_at_bytes = 0
        state.transactions = load_table(store.read_meta(), store.path)
        self._flusher = Flusher(
            state,
            meta=meta,
            make_durable=self._make_durable,
            measured=self.measured,
        )
        state.take_meta(meta)
        state.sessions.load(store.read_meta())
        state.catalogue.load(store.read_meta())
        self._cold_of = cold
        self._cold_ahead: ColdSource | None = None
        if cold is not None:
            log.set_cold_source(cold(state.catalogue))
        # What is here, or has something newer here, nobody waits for.
        state.is_checkpoint_here = lambda seq: checkpoints.seq_newest >= seq
        for due in meta.checkpoints_due:
            if not state.is_checkpoint_here(due.seq):
                state.add_due(due)
        state.decide_keeping()
        state.locate = self._locate
        state.load_buckets()
        state.applied = meta.redo_seq - 1
        self._flusher.flushed_redo_seq = meta.redo_seq
        self._metrics = watch(self)
        try:
            self.redone = self._redo(meta.redo_seq, progress)
        except BaseException:
            log.registry.unregister(self._metrics)
            raise
        state.applied = max(state.applied, log.seq_durable)
        self._cold_ahead = None
        self._checkpointer = Checkpointer(
            state,
            checkpoints,
            flush_to=self._flush_to,
            begins_list=lambda: list_boundaries(self._salt, self._page_keys).is_boundary,
            cluster_id=log.cluster_id_at,
            needed=self._checkpoints_needed,
            from_archive=self._checkpoint_in_archive,
            redone_seq=state.applied,
            measured=self.measured,
        )
        self._checkpointing = threading.Lock()
        self._entry_at_s = self._now_s()  # when a checkpoint was last ordered automatically
        self._flushed_at_s = self._now_s()
        self._bring_again_s = BRING_AGAIN_S
        self._bring_at_s = 0.0
        self._bring_task: Task | None = None
        self._task = seams.runner.start("engine-flusher", self._flush_step)
        self._checkpoint_task = seams.runner.start("engine-checkpoint", self._checkpoint_step)
        # Not before this: the flusher is woken when a page did not come, and would wake who has just failed.
        self._bring_task = seams.runner.start("engine-bring", self._bring_step)
        self._bring_task.wake()  # the flusher may have found work for it before
        state.away.wake = self._task.wake
        self.leaving = Leaving(
            state, alone=self._alone, make_durable=self._make_durable, put_back=self._flusher.put_back
        )

    def _redo(self, redo_seq: int, progress: Progress | None) -> int:
        recovering = Recovering(self, redo_seq, progress)
        state = self._state
        read = parts_from(self._log, self._seams.files, redo_seq, state.small_record_bytes)
        count = redo(state, read, make_room=self._make_room_in_redo, applied=recovering.applied)
        recovering.done()
        return count

    # ------------------------------------------------------------------ the background

    def _now_s(self) -> float:
        return self._seams.clock.monotonic()

    def _flush_step(self) -> float | None:
        if self._failure is not None:
            return None
        interval_s = self.options.checkpoint_interval_s
        try:
            if interval_s is not None and self._now_s() - self._flushed_at_s >= interval_s:
                self._flushed_at_s = self._now_s()
                self._flusher.want(self._state.applied)
            if self._step() == 0:
                return 0
        except Exception as error:  # noqa: BLE001 — whatever it was, pages are no longer written
            self._fail(error)
            return None
        self._looked_at_bytes = self._state.dirty_bytes + LOOK_AFTER_BYTES
        bring = self._bring_task
        if bring is not None and self._flusher.can_bring and self._now_s() >= self._bring_at_s:
            bring.wake()
        return interval_s

    def _bring_step(self) -> float | None:
        """Read a page from afar that a flush waits for. Where it does not come, others are not in its way."""
        if self._failure is not None or not self._flusher.can_bring:
            return None
        try:
            if self._flusher.bring():
                self._bring_again_s = BRING_AGAIN_S
                return 0
        except LowwaterError as error:
            _logger.warning("a page that changes wait for did not come", error=str(error))
            wait_s, self._bring_again_s = self._bring_again_s, min(2 * self._bring_again_s, BRING_AGAIN_S_MAX)
            self._bring_at_s = self._now_s() + wait_s
            return wait_s
        finally:
            self._task.wake()
        return None

    def _flush_to(self, seq: int) -> bool:
        """A step towards having everything up to `seq` in pages. False when it is there."""
        if self._flusher.is_flushed(seq):
            return False
        self._flusher.want(seq)
        if self._step() is None:
            try:
                self._flusher.bring()
            except LowwaterError as error:
                raise MustWait(error) from error
        return True

    def _checkpoint_step(self) -> float | None:
        if self._failure is not None:
            return None
        if self._is_tier_to_come:
            return ATTACHED_AFTER_S  # a checkpoint that rests on one in the archive can be made then
        try:
            if self._make_checkpoints():
                return 0
            return self._order_in_time()
        except MustWait as wait:
            _logger.warning("a checkpoint waits for what is away", error=str(wait.error))
            return BRING_AGAIN_S_MAX
        except Exception as error:  # noqa: BLE001 — of flushing: what checkpoints run into does not come here
            self._fail(error)
            return None

    def _make_checkpoints(self) -> bool:
        """One step, by the background or by whoever waits for it. False where nothing is left to do."""
        with self._checkpointing:
            return self._checkpointer.step()

    def _make_checkpoints_below(self, count: int) -> None:
        """Return once fewer than so many are due: what each needs takes room, and none is left out."""
        while len(self._state.checkpoints_due) >= count:
            self._require_writable()
            if self._checkpointer.is_closed:
                raise Closed("the database is being closed", path=self._log.directory)
            self._help_checkpoint()

    def _help_checkpoint(self) -> None:
        try:
            self._seams.runner.apart(self._make_checkpoints)
        except MustWait as wait:
            raise again(wait.error) from wait
        except Exception as failure:  # as in the background
            if is_interrupt(failure):
                raise  # what it came to is known in the thread that the step has for itself
            self._fail(failure)
            self._require_writable()

    def _order_in_time(self) -> float | None:
        """Order a checkpoint entry if it is time, or ask for one. Return how many seconds to wait before
        looking again; None where no option asks for such entries."""
        options = self.options
        interval_s, size_max = options.checkpoint_entry_interval_s, options.checkpoint_entry_bytes
        age_max_s = options.checkpoint_entry_age_max_s
        if interval_s is None and size_max is None and age_max_s is None:
            return None
        now_s, grown_bytes = self._now_s(), self._bytes_since_checkpoint()
        is_little = age_max_s is not None and grown_bytes < LITTLE_BYTES
        after_s = age_max_s if is_little or interval_s is None else interval_s
        wait_s = LOOK_AFTER_S if after_s is None else self._entry_at_s + after_s - now_s
        is_full = size_max is not None and grown_bytes >= size_max
        if wait_s > 0 and not is_full:
            goes_by_size = size_max is not None or (is_little and interval_s is not None)
            return min(wait_s, LOOK_AFTER_S) if goes_by_size else wait_s
        self._entry_at_s = now_s
        if self._has_news and self._state.changed_seq > self._state.checkpoint_seq:
            self._want_checkpoint_entry()
        return 0 if self._state.checkpoints_due else LOOK_AFTER_S

    def _bytes_since_checkpoint(self) -> int:
        """The log above the last checkpoint entry, whichever life wrote it: short ones would never come
        to the next one otherwise."""
        complete = self.complete_segments(self._state.checkpoint_seq)
        return sum(each.body_bytes for each in complete) + self.opened_bytes

    def _want_checkpoint_entry(self) -> None:
        """Order a checkpoint entry, or ask for one."""
        raise NotImplementedError

    @property
    def _has_news(self) -> bool:
        """Whether anything has happened since the last checkpoint entry."""
        return self._state.applied != self._state.idle_seq

    def _next_checkpoint_entry(self) -> Control:
        """The entry that would be taken now. It is a full one where the last one's blocks are not here."""
        state = self._state
        with state.lock:
            base_seq = state.base_seq
            return checkpoint_entry(
                state.checkpoint_seq, full=bool(base_seq) and not self._can_be_base(base_seq)
            )

    def _comes(self, seq: int) -> bool:
        """With the lock: whether the checkpoint of `seq` is here, or due with all that it needs."""
        if self._checkpoints.of(seq) is not None:
            return True
        due = next((each for each in self._state.checkpoints_due if each.seq == seq), None)
        return due is not None and (not due.base_seq or self._can_be_base(due.base_seq))

    def _can_be_base(self, seq: int) -> bool:
        """With the lock held: whether the checkpoint of `seq` is here, is due with all that it needs, or can
        be brought here."""
        is_there = self._recorded_checkpoint(seq) is not None and seq not in self._checkpointer.unreadable
        return is_there or self._comes(seq)

    def _recorded_checkpoint(self, seq: int) -> CheckpointDescriptor | None:
        """The checkpoint of `seq`, where the log says that it is in the archive, which is this cluster's."""
        found = None if self._tier is None else self._state.catalogue.checkpoint_not_above(seq)
        if found is None or found.seq != seq:
            return None
        assert self._tier is not None
        return found if found.recorded_seq > self._tier.own_after else None

    def _checkpoint_in_archive(self, seq: int) -> tuple[bytes, Callable[[bytes], bytes]] | None:
        found = self._recorded_checkpoint(seq)
        if found is None:
            return None
        assert self._tier is not None
        return self._tier.read_checkpoint(found)

    def wait_for_checkpoint(self, seq: int) -> str:
        """Return the id of the checkpoint that the entry `seq` asked for, once it is durable here. Raise the
        error that was in its way."""
        require_seq(seq)
        self._require_open()
        while True:
            # First: it ends being due when the others say how it ended.
            is_due = any(due.seq == seq for due in self._state.checkpoints_due)
            found = self._checkpoints.of(seq)
            if found is not None:
                return found.id
            error = self._checkpointer.failures.get(seq)
            if error is not None:
                raise again(error)
            if not is_due:
                raise NotFound(f"there is no checkpoint of {seq}, and none is being made", seq=seq)
            self._require_writable()
            if self._checkpointer.is_closed:
                raise Closed("the database is being closed", path=self._log.directory)
            self._help_checkpoint()
            self._let_others_run()

    def checkpoints(self) -> list[StoredCheckpoint]:
        """Return the checkpoints that are durable here, the newest first."""
        self._require_open()
        return self._checkpoints.complete

    def pass_over_checkpoint(self, seq: int) -> None:
        """Do without the checkpoint of `seq`, whose files here are damaged. A checkpoint that would rest on
        it is made whole, unless this one is in the archive."""
        with self._checkpointing:
            self._checkpoints.pass_over(seq)

    def checkpoints_bytes(self) -> int:
        """Return how many bytes the checkpoints take of the disk."""
        return self._checkpoints.size_bytes()

    @property
    def cache_bytes(self) -> int:
        """How many bytes of what was read from the object store are kept on the disk."""
        return 0 if self._tier is None else self._tier.cache_bytes

    @property
    def _is_tier_to_come(self) -> bool:
        """Whether it is being opened, by who has an archive and has not attached that yet."""
        return self._tier is None and self._log.cold_source is not None

    def _checkpoints_needed(self) -> Iterable[int]:
        """The seqs of those here that somebody has to ship, or may have to."""
        if self._tier is not None:
            return self._tier.checkpoints_needed()
        if self._is_tier_to_come:
            # What is to be shipped will be known in a moment.
            return [each.seq for each in self._checkpoints.complete]
        return []

    @property
    def ships_seq(self) -> int:
        """The seq of the checkpoint that all replicas ship next; 0 where there is none yet."""
        return self._state.ships_seq

    def is_checkpoint_due(self, seq: int) -> bool:
        """Whether a checkpoint is being made here, or will be."""
        return any(due.seq == seq for due in self._state.checkpoints_due)

    def stop_writing(self, cause: LowwaterError) -> None:
        """Refuse writes from now on; reads go on."""
        self._fail(cause)

    def _fail(self, cause: BaseException) -> None:
        failure = cause if isinstance(cause, LowwaterError) else None
        if isinstance(cause, DiskFull):
            failure = OutOfSpace(cause.message, path=cause.path)
            failure.__cause__ = cause
        if failure is None:
            what = str(cause) or type(cause).__name__
            failure = LogPoisoned(f"the engine stopped writing: {what}", path=self._log.directory)
            failure.__cause__ = cause
        with self._state.lock:
            if self._failure is None:
                self._failure = failure
            self._applied_more.notify_all()

    def _make_durable(self, seq: int) -> None:
        if self._wal.durable_seq < seq:
            self._log.sync()
        assert self._wal.durable_seq >= seq, "a page would get ahead of the log"

    def _step(self) -> float | None:
        """One step of flushing, by the background or by whoever waits for it. Where it is cut short, be it
        by an interrupt, some of its group is neither in the pages nor among the changes: no more is written,
        and the log has all of it."""
        with self._stepping:
            try:
                return self._flusher.step()
            except BaseException as error:
                self._fail(error)
                raise

    def _help(self) -> None:
        """A step of flushing by a caller that needs what it brings about."""
        self._require_writable()
        try:
            # Where no interrupt comes: what is cut short there is in neither the pages nor the changes.
            ended = self._seams.runner.apart(self._step) is None
        except Exception:
            self._require_writable()
            raise
        if ended:
            # Nothing is left but changes of pages that are away: what is in the way of them is the caller's
            # to know.
            self._flusher.bring()

    def _let_others_run(self) -> None:
        """Between two steps of a caller that does many: a writer would wait for the interpreter as long as it
        takes to be taken away, which is 5 ms, several times for each write."""
        if self._now_s() - self._paused_s >= PAUSE_EVERY_S:
            self._pause.wait(PAUSE_S)
            self._paused_s = self._now_s()

    def _make_room_in_redo(self) -> None:
        while self._state.dirty_bytes > self._flusher.flush_above_bytes:
            if self._flusher.step() is None:
                self._flusher.bring()

    def _wait_for_room(self, timeout_s: float | None, *, may_use_reserve: bool = False) -> None:
        """Return once there is memory for more changes. Raises DiskFull where the disk has no room."""
        self._wal.refuse_forked()
        if not may_use_reserve:
            self.space.require()
        if timeout_s is not None:
            timeout_s = timeout_of(timeout_s, "timeout_s")
        state = self._state
        bytes_max = state.pool_bytes_max * DIRTY_MAX
        if state.dirty_bytes < bytes_max:
            return
        deadline_s = None if timeout_s is None else self._now_s() + timeout_s
        while state.dirty_bytes >= bytes_max:
            self._help()
            if deadline_s is not None and self._now_s() >= deadline_s:
                raise Busy("memory is full of changes that are not in pages yet", path=self._log.directory)

    def _make_room(self) -> bool:
        """The disk is full: what keeps the log from being purged goes into pages. Returns whether anything
        may be purged then."""
        if self._failure is None:
            self._flusher.want(self._state.applied)
            self._task.wake()
        return self._tier is not None and self._tier.make_room()

    def _apply_placed(self, pieces: Sequence[Piece], chain_before: Chain) -> None:
        """With the lock: what the log has taken goes into the state, with the place of each frame, and as it
        was queued: the writer may have raised a time."""
        places = places_of(pieces, chain_before)
        for frame, (segment_first, position) in zip(frames_of(pieces), places, strict=True):
            seq = format.FRAME.unpack_from(frame)[0]
            self._state.apply(seq, frame[format.FRAME_BYTES :], segment_first, position)

    def _mend(self, error: BaseException, made: Sequence[Piece], chain_before: Chain) -> None:
        """With the lock, after an exception: entries are in the log, and memory may not have all of them yet.
        After an interrupt they are applied; nobody waits for them any more, and the log writes them."""
        if not is_interrupt(error):
            self._fail_unapplied(error)
            return
        try:
            to_the_end(self._apply_rest, made, chain_before)
        except Exception as failure:  # noqa: BLE001 — whatever it was, memory lacks what the log has
            if not is_interrupt(failure):
                self._fail_unapplied(failure)
        self._wal.leave_to_writer()

    def _apply_rest(self, made: Sequence[Piece], chain_before: Chain) -> None:
        state = self._state
        with state.mended():
            places = places_of(made, chain_before)
            for frame, (segment_first, position) in zip(frames_of(made), places, strict=True):
                seq = format.FRAME.unpack_from(frame)[0]
                if seq > state.applied:
                    state.apply(seq, frame[format.FRAME_BYTES :], segment_first, position)

    def _fail_unapplied(self, error: BaseException) -> None:
        """Entries are in the log, and what memory has of them is not known."""
        is_ours = isinstance(error, Exception) and not isinstance(error, ReopenError)
        kind = InternalError if is_ours else LogPoisoned
        what = str(error) or type(error).__name__
        self._fail(kind(f"an entry could not be applied: {what}", path=self._log.directory))

    # ------------------------------------------------------------------ what is possible now

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("the database is closed", path=self._log.directory)

    def _require_writable(self) -> None:
        self._require_open()
        if self._failure is not None:
            raise again(self._failure)

    def _refuse_reentry(self) -> None:
        """Raise Busy to a signal handler that has interrupted a call of its own thread where that has a lock,
        or leads, or stands in line."""
        self._refuse_inside()
        self._wal.refuse_reentry()

    def _refuse_inside(self) -> None:
        """Raise Busy to a signal handler that has interrupted its own thread where that has a lock. A read
        there may find changes made by half, or wait for somebody who waits for this thread."""
        self._state.refuse_inside()

    def _read_value(self, place: bytes) -> bytes:
        """Who opens a segment for that waits for the log's lock."""
        if self._wal.owns_lock():
            raise busy(self._log.directory)
        return self._values.read(place)

    def _refuse_in_handler(self) -> None:
        """Raise Busy in a signal handler that has interrupted this package. It is for calls that ask an
        object store, where locks are held in many places."""
        if is_in_handler():
            raise busy(self._log.directory)

    def _await(self, seq: int) -> None:
        """Return once an answer that rests on `seq` can be given."""
        if self._wal.durable_seq < seq:
            self._log.sync()
            if self._wal.durable_seq < seq:
                raise again(self._failure or self._wal.failure or Closed("the log is closed"))

    def _wait_applied(self, seq: int, wait_s: float) -> None:
        """With the state's lock, which is free meanwhile: return once `seq` is applied."""
        state = self._state
        deadline_s = self._now_s() + wait_s
        left_s = wait_s
        self._waiting_readers += 1
        try:
            while state.applied < seq:
                self._require_writable()
                if self._closing:
                    raise Closed("the database was closed while a read waited", path=self._log.directory)
                if left_s <= 0 or not self._applied_more.wait(left_s):
                    raise TimedOut(
                        f"seq {seq} was not applied within {wait_s:g} s",
                        seq=seq,
                        hint=f"the last one is {state.applied}: wait for longer, or read at that",
                    )
                left_s = deadline_s - self._now_s()
        finally:
            self._waiting_readers -= 1

    def _wake_flusher(self) -> None:
        """After changes: tell those who wait for them, and have the background look at them, from time to
        time."""
        state = self._state
        if self._waiting_readers:
            with state.lock:
                self._applied_more.notify_all()
        if state.dirty_bytes > self._looked_at_bytes or self._flusher.sweep_is_due:
            self._task.wake()
            self._looked_at_bytes = state.dirty_bytes + LOOK_AFTER_BYTES
        if state.checkpoints_due:
            self._checkpoint_task.wake()

    # ------------------------------------------------------------------ the log, and where things stand

    @property
    def directory(self) -> str:
        """The directory of the log."""
        return self._log.directory

    def log(self, start: Start = "earliest", *, follow: bool = False) -> Iterator[Entry]:
        """Return the durable entries from `start` on. With `follow`, wait for more until the log closes."""
        self._require_open()
        return self._log.read(start, follow=follow)

    def marks(self) -> Marks:
        """Return how far entries have come: appended, applied, durable everywhere, shipped, purged."""
        durable = self._wal.durable_seq
        applied = self._state.applied
        durable = min(durable, applied)
        purged = self._log.seq_before_first
        # What was pruned without a store counts as shipped: nothing else of it will ever be.
        hwm = max(self._state.catalogue.hwm_at(durable), purged)
        # Where nobody else votes, what is durable here is durable wherever it has to be.
        low_water_mark = (
            durable if self._votes_alone and self._tier is not None else self._state.low_water_mark
        )
        lwm = max(min(low_water_mark, durable), hwm)
        return Marks(max(applied, self._log.seq_last), applied, durable, lwm, hwm, purged)

    @property
    def catalogue(self) -> Catalogue:
        """What the log says is in the object store."""
        return self._state.catalogue

    # ------------------------------------------------------------------ what ships

    @property
    def counted_hwm(self) -> int:
        """The high-water mark that counts, for purging and for whoever waits until entries are shipped."""
        return self._counted_hwm

    # ------------------------------------------------------------------ the object store

    @property
    def seams(self) -> Seams:
        return self._seams

    @property
    def cluster_id(self) -> bytes:
        return self._wal.chain.cluster_id

    @property
    def epoch(self) -> int:
        return self._wal.chain.epoch

    @property
    def failure(self) -> LowwaterError | None:
        """The error for which writes are refused; None where they are not."""
        return self._failure or self._wal.failure

    @property
    def opened_us(self) -> int | None:
        """The time of the first entry that is in no complete segment; None where none of them is worth
        shipping."""
        return self._wal.store.opened_us

    @property
    def opened_bytes(self) -> int:
        """The size of the segment that is being written, as far as it is durable; 0 where there is none."""
        current = self._wal.store.current
        return 0 if current is None else current.durable_bytes

    def complete_segments(self, seq: int = 0) -> list[Segment]:
        """Return the complete segments that end above `seq`, in order. The last ones may lack a footer."""
        with self._wal.lock:
            segments = self._wal.store.segments
            return segments[bisect_right(segments, seq, key=attrgetter("seq_last")) :]

    def finish_sealing(self) -> None:
        """Give the complete segments their footers. The background would do that too."""
        if not all(each.sealed for each in self.complete_segments()):
            with typed_errors(self.directory, "seal a segment"):
                self._seams.runner.apart(self._wal.store.seal_all)

    def call_when_sealed(self, call: Callable[[], None]) -> None:
        self._wal.store.on_sealed = call

    def attach_tier(self, tier: Tier) -> None:
        """Make the database ship to `tier`, which is stopped and closed with the database."""
        assert self._tier is None, "a database ships to one place"
        self._tier = tier
        self._older = tier.older_versions(self._log, self._state.catalogue)
        self._checkpoint_task.wake()

    def before_close(self, stop: Callable[[], None]) -> None:
        """Call `stop` before the engine closes. It stops something that works on this engine."""
        self._before_close.append(stop)

    def ship(self, timeout: float | None = None) -> int:
        """Seal what is being written, and ship all that is durable now. Return the high-water mark once all
        of it, with the checkpoint that was made last, is in the object store, is recorded, and counts. A tail
        of nothing but what shipping itself writes stays.

        With a `timeout`, in seconds, try again until then while the store does not answer; then raise the
        store's error, or TimedOut. Without one, raise what the store answers.
        """
        self._require_open()
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)):
            raise InputError(f"timeout is {timeout!r:.80}", hint="give seconds, or None")
        tier = self._require_tier()
        self._refuse_in_handler()
        return tier.ship(timeout)

    def shipping(self) -> ShippingStatus:
        """Return how far shipping is, and what is in its way."""
        self._require_open()
        return self._require_tier().status()

    def _require_tier(self) -> Tier:
        if self._tier is None:
            raise InputError(
                "this database has no object store",
                hint="open it with tier=, or set tier.uri in the configuration",
            )
        return self._tier

    def seal_by_age(self, age_max_s: float) -> None:
        """From now on, seal the segment that is being written when its first entry is `age_max_s` old. A
        segment of nothing but what shipping itself writes is not sealed."""

        def step() -> float | None:
            if self._failure is not None:
                return None
            if (wait_s := self._log.seal_wait_s(age_max_s)) > 0:
                return wait_s
            try:
                self.propose_seal()
            except (LowwaterError, OSError) as error:
                _logger.warning("a segment was not sealed", path=self.directory, error=str(error))
            return age_max_s

        assert self._age_task is None
        self._age_task = self._seams.runner.start("engine-age", step)
        self._age_task.wake()

    def propose_seal(self) -> None:
        """End the segment that is being written, if there is one."""
        seq_first = self._wal.chain.seq_first
        if seq_first and self._failure is None:
            self.propose_control(seal_entry(seq_first))

    def purgeable_seq(self) -> int:
        """Return the seq up to which nobody needs the local log. Up to there it is shipped and counts, its
        changes are in pages, and no open transaction began there. Return 0 where what is purged could not be
        read from elsewhere."""
        if self._log.cold_source is None:
            return 0
        with self._state.lock:
            bounds = [self._counted_hwm, self._flusher.flushed_redo_seq - 1]
            bounds += [txn - 1 for txn in self._state.transactions.open]
            return max(0, min(bounds))

    def purge(self, seq: int) -> int:
        """Remove the segments that hold nothing above `seq`, nor above what may be purged. Return the seq up
        to which entries are gone."""
        require_seq(seq)
        self._refuse_in_handler()
        seq = min(seq, self.purgeable_seq())
        if self._tier is not None:
            leaving = [each.seq_first for each in self.complete_segments() if each.seq_last <= seq]
            found = map(self._state.catalogue.segment_of, leaving)
            self._tier.require_shipped([each for each in found if each is not None])
        purged = self._log.purge(seq)
        self._values.forget_before(purged)
        return purged

    def mark_counts(self, hwm: int) -> int:
        """Note that a manifest with this high-water mark was read back, and that nobody has claimed a higher
        epoch since. Return the mark that counts. It is never above what is recorded durably here, and never
        falls while the engine is open. It is stored nowhere: each process has to find out by itself."""
        require_seq(hwm)
        with self._state.lock:
            self._counted_hwm = max(self._counted_hwm, min(hwm, self.marks().hwm))
            return self._counted_hwm

    def _why_not_shipped(self, segment: Segment) -> str | None:
        """Why a segment cannot be the one that was shipped; None where it is, or none of it was."""
        found = self._state.catalogue.segment_of(segment.seq_first)
        if found is None or _as_described(segment) == (found.epoch, found.first, found.last, found.hash):
            return None
        return f"this segment is not the one that was shipped: that has the hash {found.hash.hex()}"

    def _is_ours(self, entry: Control) -> bool:
        """Whether the segment that an entry says was shipped is the one that is here, if it is here: its hash
        is a checksum that all replicas compare."""
        if entry.kind != Kind.SEGMENT_SHIPPED:
            return True
        body = entry.body
        assert body is not None
        with self._wal.lock:
            here = self._wal.store.segment_after(body["first"] - 1)
        if not isinstance(here, Segment) or here.seq_first > body["last"]:
            return True
        return _as_described(here) == (body["epoch"], body["first"], body["last"], body["hash"])

    def propose_control(self, entry: Control) -> int | None:
        """Order a control entry, or ask for it to be ordered. Where the engine orders entries itself, return
        its seq once it is applied and durable, or None where it would have no effect. Where somebody else
        orders them, return None; the state says later what came of it. Entries name what they expect, so they
        may be proposed again."""
        raise NotImplementedError

    def flush(self) -> int:
        """Bring all changes so far into pages, and return the seq up to which they are there. When the
        database is opened again, redo begins after it."""
        self._wal.refuse_forked()
        self._refuse_reentry()
        with self._state.lock:
            self._require_writable()
            seq = self._state.applied
            self._flusher.want(seq)
        while not self._flusher.is_flushed(seq):
            self._help()
            self._let_others_run()
        if self._flusher.sweeps:
            self._task.wake()
        return seq

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """For who writes pages besides the flusher: nothing is flushed meanwhile."""
        with self._stepping:
            self._require_writable()
            try:
                self._flusher.finish()
                yield
            except BaseException as error:
                self._fail(error)
                if isinstance(error, Exception):
                    self._require_writable()
                raise

    @property
    def registry(self) -> CollectorRegistry:
        return self._log.registry

    def metrics(self) -> CollectorRegistry:
        """Return the registry with everything that is measured here."""
        return self._log.registry

    def check(self, *, away: bool = False) -> Iterator[Finding]:
        """Verify the log, the pages and the checkpoints, byte for byte, and return the findings. No findings
        mean that all are sound. Pages that are away are read only with `away`, their references always."""
        self._require_open()
        self._refuse_in_handler()
        return self._check(away=away)

    def _check(self, *, away: bool) -> Iterator[Finding]:
        marks = self.marks()
        if list(marks) != sorted(marks, reverse=True):
            yield Finding("error", f"the marks are out of order: {marks}", self._log.directory)
        yield from self._log.check()
        with self._wal.lock:
            segments = list(self._wal.store.segments)
        for segment in segments:
            if (why := self._why_not_shipped(segment)) is not None:
                yield Finding("error", why, segment.path, segment.seq_first, None, LogDivergence.default_hint)
        yield from check_pages(
            self._store,
            self._store.path,
            boundaries=self._state.boundaries,
            seq_durable=lambda: self._wal.durable_seq,
            read_value=self._values.read,
            read_away=self._state.away.read if away else None,
        )

    def _frame_seq(self, place: bytes) -> int:
        """With the state's lock: the seq of the frame that holds a value. Where that is not here, it is read
        without the lock first."""
        segment_first, offset, *_ = VALUE_PLACE.unpack(place)
        seq = self._values.frame_seq_here(place)
        if seq is None:
            seq = self._seq_by_place.get((segment_first, offset))
            if seq is None:

                def read() -> None:
                    found = self._values.frame_seq(place)
                    with self._state.lock:
                        self._remember_place(found, (segment_first, offset))

                raise ReadFirst(read)
        # Who applies the copy asks for the way back, and the segment may be purged by then.
        self._remember_place(seq, (segment_first, offset))
        return seq

    def _remember_place(self, seq: int, place: tuple[int, int]) -> None:
        if len(self._seq_by_place) >= PLACES_MAX:
            self._seq_by_place.clear()
            self._place_by_seq.clear()
        self._seq_by_place[place] = seq
        self._place_by_seq[seq] = place

    def _locate(self, seq: int) -> tuple[int, int]:
        """Where the frame with this seq lies: its segment's first seq, and its offset."""
        found = self._place_by_seq.get(seq)
        if found is None:
            found = place_of(self._wal, seq)
        cold = self._log.cold_source
        if found is None and cold is not None:
            found = cold.place_of(seq) or self._locate_ahead(seq)
        if found is not None:
            return found
        raise Corrupt(f"the log does not hold seq {seq}, which has a value", seq=seq)

    def _locate_ahead(self, seq: int) -> tuple[int, int] | None:
        """In redo the catalogue is that of the entry to which it has come. Where the segment was purged
        since, or a restore has left it where it was, an entry further on says that it is in the store."""
        if self._cold_of is None or self._state.applied >= self._log.seq_durable:
            return None
        if self._cold_ahead is None:
            ahead = Catalogue()
            for entry in self._log.read(self._state.applied + 1):
                if entry.kind == "segment_shipped" and entry.refused is None:
                    ahead.add(record_of(Kind.SEGMENT_SHIPPED, entry.seq, decode_body(entry)))
            self._cold_ahead = self._cold_of(ahead)
        return self._cold_ahead.place_of(seq)

    def close(self) -> None:
        """Bring everything into pages, and let the directory go. With an object store, a database whose
        newest checkpoint is still to be shipped waits up to ten seconds for it, and for the log with it.
        Otherwise nothing is shipped at the end. In a forked child this does nothing: what is open is the
        parent's, and its threads, which are not here, may have held any lock.

        An interrupt is raised once the database is closed. In a signal handler that has interrupted another
        call, the database is closed in the background, and the program does not end before that.
        """
        if self._wal.is_forked:
            self._closed = True
            return
        runner = self._seams.runner
        if not is_in_handler():
            runner.apart(self._close_once)
        elif not self._closes_aside:
            # Of two signals in a row the second handler may have interrupted the first one in here.
            self._closes_aside = True
            try:
                runner.start_call("close", self.close)
            except BaseException:
                self._closes_aside = False
                raise

    def _close_once(self) -> None:
        with self._ending:  # whoever comes second returns when it is closed
            if not self._closed:
                self._close()

    def _close(self) -> None:
        with self._state.lock:
            if self._closed:
                return
            self._closing = True
            self._applied_more.notify_all()
        for stop in self._before_close:
            stop()
        if self._tier is not None:
            self._tier.finish()
            self._tier.stop()
        if self._age_task is not None:
            self._age_task.stop()
        self._checkpoint_task.stop()
        assert self._bring_task is not None
        self._bring_task.stop()
        self._task.stop()
        with self._checkpointing:
            self._checkpointer.close()
        # Callers may help to flush until now: who comes later finds it closed.
        with self._stepping:
            if self._closed:
                return
            try:
                if self._failure is None and self._wal.failure is None:
                    self._state.keeps_clean = False
                    self._state.limit_clean()
                    self._flusher.flush_all()
            finally:
                with self._state.lock:
                    self._closed = True
                self.registry.unregister(self._metrics)
                try:
                    self._log.close()
                finally:
                    self._values.close()
                    self._store.close()
                    if self._tier is not None:
                        self._tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_described(segment: Segment) -> tuple[int, int, int, bytes]:
    return segment.header.epoch, segment.seq_first, segment.seq_last, segment.segment_hash
