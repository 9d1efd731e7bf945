"""What a database and a fed engine have in common: a log, the state that its entries make, and its pages.

Always true:
  - an answer (a value, an absence, a refusal) that rests on an entry which is not durable yet waits for it;
  - an entry is in the log's queue before it is applied, and both happen under the state's lock;
  - after a failure in the log or the page store writes are refused, and reads go on with what is durable.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from prometheus_client import CollectorRegistry

from lowwater.engine import format
from lowwater.engine.chain import Chain, Creation
from lowwater.engine.check import Finding
from lowwater.engine.check_pages import check_pages
from lowwater.engine.entries import Entry
from lowwater.engine.flush import Flusher
from lowwater.engine.log import Log, Seams, Start
from lowwater.engine.pages import Boundaries
from lowwater.engine.pagestore import PageStore
from lowwater.engine.pieces import Piece
from lowwater.engine.records import Marks
from lowwater.engine.replay import Meta, Progress, frames_from, read_meta, redo
from lowwater.engine.state import State
from lowwater.engine.tickets import again
from lowwater.engine.values import ValueReader, segments_of
from lowwater.errors import (
    Busy,
    Closed,
    Corrupt,
    InputError,
    InternalError,
    LogPoisoned,
    LowwaterError,
)

# After how many new changes the background looks whether there is something to flush.
LOOK_AFTER_BYTES = 2**20
# Where writers have to help, in shares of the pool.
DIRTY_MAX = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How this process works. Nothing here changes a byte that is shared."""

    pool_bytes_max: int = 2**30
    # How long pages may lag behind the log: redo after a crash takes the longer.
    checkpoint_interval_s: float | None = 300.0

    def __post_init__(self) -> None:
        if not 2**20 <= self.pool_bytes_max <= 2**44:
            raise InputError(
                f"engine.pool_bytes_max is {self.pool_bytes_max:,}", hint="give 1 MiB or more, say 256 MiB"
            )


class Core:
    def __init__(
        self,
        log: Log,
        store: PageStore,
        meta: Meta,
        *,
        seams: Seams,
        options: EngineOptions,
        progress: Progress | None = None,
    ) -> None:
        self.options = options
        self._log = log
        self._wal = log.wal
        self._store = store
        self._seams = seams
        self._salt = meta.salt
        self._page_keys = meta.page_keys
        self._values = ValueReader(segments_of(log, seams.files))
        self._state = state = State(
            store,
            Boundaries(meta.salt, meta.page_keys),
            inline_bytes_max=meta.inline_bytes_max,
            place_reader=self._values.read,
            pool_bytes_max=options.pool_bytes_max,
        )
        self._failure: LowwaterError | None = None
        self._closed = False
        self._stepping = threading.Lock()
        self._looked_at_bytes = 0
        self._flusher = Flusher(state, identity=identity_of(meta), make_durable=self._make_durable)
        state.horizon = meta.horizon
        state.snapshots = dict(meta.snapshots)
        state.low_water_mark = meta.low_water_mark
        state.versions_seq = meta.applied
        state.decide_keeping()
        state.locate = self._locate
        state.load_buckets()
        state.applied = meta.redo_seq - 1
        self._flusher.flushed_redo_seq = meta.redo_seq
        self.redone = redo(
            state,
            frames_from(log, seams.files, meta.redo_seq),
            make_room=self._make_room_in_redo,
            progress=progress,
            seq_last=log.seq_durable,
        )
        state.applied = max(state.applied, log.seq_durable)
        self._checkpoint_at_s = self._now_s()
        self._task = seams.runner.start("engine-flusher", self._flush_step)

    # ------------------------------------------------------------------ the background

    def _now_s(self) -> float:
        return self._seams.clock.monotonic()

    def _flush_step(self) -> float | None:
        if self._failure is not None:
            return None
        interval_s = self.options.checkpoint_interval_s
        try:
            if interval_s is not None and self._now_s() - self._checkpoint_at_s >= interval_s:
                self._checkpoint_at_s = self._now_s()
                self._flusher.want(self._state.applied)
            if self._step() == 0:
                return 0
        except Exception as error:  # noqa: BLE001 — whatever it was, pages are no longer written
            self._fail(error)
            return None
        self._looked_at_bytes = self._state.dirty_bytes + LOOK_AFTER_BYTES
        return interval_s

    def _fail(self, cause: BaseException) -> None:
        failure = cause if isinstance(cause, LowwaterError) else None
        if failure is None:
            failure = LogPoisoned(f"the engine stopped writing: {cause}", path=self._log.directory)
            failure.__cause__ = cause
        with self._state.lock:
            if self._failure is None:
                self._failure = failure

    def _make_durable(self, seq: int) -> None:
        if self._wal.durable_seq < seq:
            self._log.sync()
        assert self._wal.durable_seq >= seq, "a page would get ahead of the log"

    def _step(self) -> float | None:
        """One step of flushing, by the background or by whoever waits for it."""
        with self._stepping:
            return self._flusher.step()

    def _help(self) -> None:
        """A step of flushing by a caller that needs what it brings about."""
        self._require_writable()
        try:
            self._step()
        except Exception as error:  # noqa: BLE001 — as in the background
            self._fail(error)
            self._require_writable()

    def _make_room_in_redo(self) -> None:
        while self._state.dirty_bytes > self._flusher.flush_above_bytes:
            self._flusher.step()

    def _wait_for_room(self, timeout_s: float | None) -> None:
        """Return once there is memory for more changes."""
        if timeout_s is not None and (isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float)):
            raise InputError(f"timeout_s is {timeout_s!r:.80}", hint="give seconds, or None to wait for ever")
        state = self._state
        bytes_max = state.pool_bytes_max * DIRTY_MAX
        if state.dirty_bytes < bytes_max:
            return
        deadline_s = None if timeout_s is None else self._now_s() + timeout_s
        while state.dirty_bytes >= bytes_max:
            self._help()
            if deadline_s is not None and self._now_s() >= deadline_s:
                raise Busy("memory is full of changes that are not in pages yet", path=self._log.directory)

    def _apply_placed(self, pieces: Sequence[Piece], chain_before: Chain) -> None:
        """With the lock: what the log has taken goes into the state, with the place of each frame, and as it
        was queued: the writer may have raised a time."""
        segment_first = chain_before.seq_first
        for piece in pieces:
            if piece.starts_segment is not None:
                segment_first = piece.seq_first
            for position in piece.positions:
                at = position - piece.offset
                seq, length, _ = format.FRAME.unpack_from(piece.data, at)
                start = at + format.FRAME_BYTES
                self._state.apply(seq, piece.data[start : start + length], segment_first, position)

    def _fail_unapplied(self, error: BaseException) -> None:
        """Entries are in the log, and what memory has of them is not known."""
        self._fail(InternalError(f"an entry could not be applied: {error}"))

    # ------------------------------------------------------------------ what is possible now

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("the database is closed", path=self._log.directory)

    def _require_writable(self) -> None:
        self._require_open()
        if self._failure is not None:
            raise again(self._failure)

    def _await(self, seq: int) -> None:
        """Return once an answer that rests on `seq` can be given."""
        if self._wal.durable_seq < seq:
            self._log.sync()
            if self._wal.durable_seq < seq:
                raise again(self._failure or self._wal.failure or Closed("the log is closed"))

    def _wake_flusher(self) -> None:
        """After changes: have the background look at them, from time to time."""
        state = self._state
        if state.dirty_bytes > self._looked_at_bytes:
            self._looked_at_bytes = state.dirty_bytes + LOOK_AFTER_BYTES
            self._task.wake()

    # ------------------------------------------------------------------ the log, and where things stand

    @property
    def directory(self) -> str:
        """Where the log is."""
        return self._log.directory

    def log(self, start: Start = "earliest", *, follow: bool = False) -> Iterator[Entry]:
        """The durable entries from `start` on."""
        self._require_open()
        return self._log.read(start, follow=follow)

    def marks(self) -> Marks:
        durable = self._wal.durable_seq
        applied = self._state.applied
        durable = min(durable, applied)
        purged = self._log.seq_before_first
        lwm = max(min(self._state.low_water_mark, durable), purged)
        return Marks(max(applied, self._log.seq_last), applied, durable, lwm, purged, purged)

    def checkpoint(self) -> int:
        """Bring all changes so far into pages, and return the seq up to which they are there. Opening
        again then begins after it."""
        with self._state.lock:
            self._require_writable()
            seq = self._state.applied
            self._flusher.want(seq)
        while not self._flusher.is_flushed(seq):
            self._help()
        return seq

    @property
    def registry(self) -> CollectorRegistry:
        return self._log.registry

    def metrics(self) -> CollectorRegistry:
        """The registry with everything that is measured here."""
        return self._log.registry

    def check(self) -> Iterator[Finding]:
        """Verify the log and the pages, byte for byte. An empty answer means that both are sound."""
        self._require_open()
        return self._check()

    def _check(self) -> Iterator[Finding]:
        marks = self.marks()
        if list(marks) != sorted(marks, reverse=True):
            yield Finding("error", f"the marks are out of order: {marks}", self._log.directory)
        yield from self._log.check()
        yield from check_pages(
            self._store,
            self._store.path,
            boundaries=self._state.boundaries,
            seq_durable=lambda: self._wal.durable_seq,
            read_value=self._values.read,
        )

    def _locate(self, seq: int) -> tuple[int, int]:
        """Where the frame with this seq lies: its segment's first seq, and its offset."""
        for run in frames_from(self._log, self._seams.files, seq):
            if run:
                if run[0].seq == seq:
                    return run[0].segment_first, run[0].offset
                break
        raise Corrupt(f"the log does not hold seq {seq}, which has a value", seq=seq)

    def close(self) -> None:
        """Bring everything into pages and let the directory go."""
        with self._state.lock:
            if self._closed:
                return
        self._task.stop()
        try:
            if self._failure is None and self._wal.failure is None:
                self._flusher.flush_all()
        finally:
            with self._state.lock:
                self._closed = True
            try:
                self._log.close()
            finally:
                self._values.close()
                self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def meta_of(log: Log, store: PageStore) -> Meta | None:
    """What the pages say of themselves, by the table of `replay.py`, or the log's first entry. None where
    there are no pages and the log is empty."""
    meta = read_meta(store.read_meta(), log.directory)
    if meta is None:
        if log.chain.is_empty:
            return None
        if log.creation is None:
            raise Corrupt(
                "there are no pages, and the log's beginning is not here",
                path=log.directory,
                hint="restore it from the archive",
            )
        return new_meta(log.creation)
    if meta.cluster_id != log.chain.cluster_id:
        raise Corrupt("the pages belong to another cluster than the log", path=log.directory)
    if log.seq_durable < meta.applied:
        raise Corrupt(
            f"the log ends at {log.seq_durable}, and the pages hold entries up to {meta.applied}",
            path=log.directory,
            seq=meta.applied,
        )
    if log.seq_before_first >= meta.redo_seq:
        raise Corrupt(
            f"the log begins at {log.seq_first}, and the pages need it from {meta.redo_seq} on",
            path=log.directory,
        )
    return meta


def new_meta(creation: Creation) -> Meta:
    """For what has no pages yet: all of it is in the log."""
    settings = creation.settings
    assert settings.page_keys is not None
    assert settings.inline_bytes_max is not None
    return Meta(
        cluster_id=creation.cluster_id,
        salt=creation.salt,
        page_keys=settings.page_keys,
        inline_bytes_max=settings.inline_bytes_max,
        redo_seq=1,
        applied=0,
        horizon=None,
        snapshots={},
        low_water_mark=0,
    )


def identity_of(meta: Meta) -> dict[str, object]:
    """What the pages' meta says for ever."""
    return {
        "cluster_id": meta.cluster_id,
        "salt": meta.salt,
        "page_keys": meta.page_keys,
        "inline_bytes_max": meta.inline_bytes_max,
    }
