"""The fed engine: somebody else orders the entries (their own consensus, or ours), and it applies them.

Always true:
  - apply decides, then logs: what becomes of a request is decided once, when it is applied in order, from
    what every replica has; its frame says the outcome, and nothing decides it again;
  - the frames of two engines that were fed the same pairs are the same bytes, whatever happened between the
    calls: nothing here has a clock, makes a seq, or appends an entry of its own;
  - `apply_log_entry` returns once the entry is applied and queued for the log. It is durable after `sync`,
    or soon; what others read waits for that;
  - a seq is never given to two requests: whoever tries that gets LogDivergence, and the engine stops writing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from lowwater.engine.checkpoint.checkpoints import Checkpoints
from lowwater.engine.database.core import ColdOf, EngineOptions
from lowwater.engine.database.opening import configured, open_parts
from lowwater.engine.database.orchestrator import Orchestrator, Outcome
from lowwater.engine.database.reads import Reads
from lowwater.engine.database.redelivery import HeldFrames
from lowwater.engine.database.redo import Progress
from lowwater.engine.database.upkeep import Upkeep
from lowwater.engine.format import format
from lowwater.engine.format.before_images import find_images, with_images
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.entries import Abort, Begin, Commit, Control, Copy, Write, decode_payload
from lowwater.engine.format.format import Kind
from lowwater.engine.format.request_id import RequestId
from lowwater.engine.log.chain import CLUSTER_ID_BYTES, SALT_BYTES, Create, Creation, LogSettings
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.log.pieces import Piece
from lowwater.engine.pages.pagestore import PageStore
from lowwater.engine.seams.interrupts import to_the_end
from lowwater.engine.seams.seams import Task
from lowwater.engine.seams.waiting import Condition
from lowwater.engine.state.away import BlockSource
from lowwater.engine.state.decide import Refusal, decide
from lowwater.engine.state.due import DUE_MAX
from lowwater.engine.state.meta import meta_of, new_meta
from lowwater.engine.state.requests import (
    Copied,
    Request,
    Single,
    encode_outcome,
    group_of,
    is_same_request,
    members_of,
    require_control,
    session_of,
    txn_of,
)
from lowwater.errors import (
    InputError,
    InvalidEntry,
    LogDivergence,
    LowwaterError,
    NewerVersion,
    TimedOut,
)
from lowwater.logging import get_logger

if TYPE_CHECKING:
    from lowwater.config import Config


class FedEngine(Reads):
    """An engine that is fed by an orchestrator: `apply_log_entry(seq, entry)`, in the order of the seqs.

    The first entry is `Create(cluster_id, salt)`; until it comes there is nothing to read. After a restart,
    deliver again from any seq that is not above `marks().durable`, or from the next one on.
    """

    def __init__(
        self,
        data: str | os.PathLike[str],
        tier: str | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
        orchestrator: Orchestrator | None = None,
        *,
        registry: CollectorRegistry | None = None,
        progress: Progress | None = None,
        log_options: LogOptions | None = None,
        options: EngineOptions | None = None,
        seams: Seams | None = None,
        store: PageStore | None = None,
        blocks: BlockSource | None = None,
        cold: ColdOf | None = None,
    ) -> None:
        """Open the engine in the directory `data`, or make one there. `orchestrator` is told what the engine
        itself wants to have ordered. The last six are what a test, or a simulation, puts in their place."""
        if tier is not None:
            raise InputError("this engine knows no object store", hint="open lowwater.Engine, which does")
        settings = configured(data, config)
        wanted = log_options or settings.log_options
        self._orchestrator = orchestrator
        self._checkpoints_lock = threading.RLock()
        self._checkpoint_came = Condition(self._checkpoints_lock)
        self._upkeep_task: Task | None = None

        def begin(log: Log, pages: PageStore, found: Seams) -> None:
            self._held = HeldFrames(log)
            Reads.__init__(
                self,
                log,
                pages,
                meta_of(log, pages) or _NOTHING,
                seams=found,
                options=options or settings.options,
                checkpoints=Checkpoints(found.files, settings.path, owned=True),
                blocks=blocks,
                cold=cold,
                progress=progress,
            )

        open_parts(
            settings.path,
            begin,
            # A log that seals by age appends to itself; here that is for the orchestrator to order.
            log_options=replace(wanted, segment_age_max_s=None),
            seams=seams,
            store=store,
            log_directory=settings.log_directory,
            create=None,
            registry=registry,
            owner="fed",
        )
        if orchestrator is None:
            return
        try:
            self.update_low_water_mark(orchestrator.get_low_water_mark())
        except BaseException:
            self.close()
            raise
        self._upkeep = Upkeep(self._state, self._log, self.options.versions, order=self._propose, now_us=None)
        self._upkeep_task = self._seams.runner.start("engine-upkeep", self._upkeep_step)
        if wanted.segment_age_max_s is not None:
            self.seal_by_age(wanted.segment_age_max_s)

    # ------------------------------------------------------------------ applying

    def apply_log_entry(self, seq: int, entry: Request) -> Outcome:
        """Apply an entry, and return what became of it. Seqs rise, with holes as the orchestrator likes. The
        n members of a `Write` have the n seqs that end at `seq`.

        An entry that was applied before has no effect, and has the same outcome. Another entry under its seq,
        or one in a hole, raises LogDivergence. What no engine would take raises InvalidEntry and changes
        nothing.
        """
        members = members_of(entry)
        if not isinstance(seq, int) or isinstance(seq, bool) or not len(members) <= seq <= format.SEQ_MAX:
            raise InvalidEntry(
                f"{seq!r:.80} is no seq for this entry", hint="give a whole number from 1 to 2^64-1"
            )
        group_seq_last = seq if isinstance(entry, Write) else None
        asks_for_checkpoint = isinstance(entry, Control) and entry.kind == Kind.CHECKPOINT
        # What ends transactions, ships and purges is taken also where there is no room for more data.
        self._wait_for_room(None, may_use_reserve=isinstance(members[0], Control | Commit | Abort))
        if asks_for_checkpoint:
            self._make_checkpoints_below(DUE_MAX)

        def apply() -> Outcome | Refusal | None:
            with self._state.lock:
                self._require_writable()
                if seq - len(members) < self._state.applied:
                    return self._apply_again(seq, members, group_seq_last)
                return self._apply(seq, members, group_seq_last)

        # What a condition rests on may have to be read from afar, before anything is decided.
        refusal = self._state.away.call(apply)
        if isinstance(refusal, Outcome):
            return refusal
        self._wake_flusher()
        if self._upkeep_task is not None and isinstance(members[0], Control):
            self._upkeep_task.wake()
        if refusal is Refusal.REPEATED:
            return self._first_outcome(seq, session_of(members))
        if asks_for_checkpoint:
            with self._checkpoints_lock:
                self._checkpoint_came.notify_all()
        return Outcome(seq, refusal)

    def _first_outcome(self, seq: int, request: RequestId | None) -> Outcome:
        """What became of a request that was repeated at `seq`, when it came first. Nothing is known of it
        where the session is gone, or has acknowledged it."""
        assert request is not None
        with self._state.lock:
            session = self._state.sessions.sessions.get(request.session)
            first = None if session is None else session.result(request.number)
        if first is None:
            return Outcome(seq, Refusal.REPEATED)
        return Outcome(first.seq, Refusal(first.code) if first.code else None)

    def _apply(self, seq: int, members: Sequence[Single], group_seq_last: int | None) -> Refusal | None:
        """With the lock: decide, log and apply."""
        state, chain = self._state, self._wal.chain
        if isinstance(members[0], Create) != chain.is_empty:
            raise InvalidEntry(
                "the first entry of a log is a Create, and no other one is",
                hint="deliver a log from its beginning, into a directory of its own",
            )
        # Before it is decided, and for refusals too: what can be taken must not depend on the state.
        row = state.transactions.open.get(txn_of(members[0]))
        before = 0 if row is None else row.seq_last
        encode = partial(encode_outcome, group_seq_last=group_seq_last, txn_seq_before=before)
        payloads = [encode(member, member.time_us, copied=_NOT_LOOKED_UP) for member in members]
        refusal = decide(state, chain, members, group=group_seq_last is not None)
        if refusal is None and isinstance(members[0], Control) and not self._is_ours(members[0]):
            raise self._diverged(seq, "another segment lies here than the one that was shipped")
        seqs = range(seq - len(members) + 1, seq + 1)
        if refusal is None:
            for index, member in enumerate(members):
                if isinstance(member, Copy):
                    copied = self._copied(member.bucket, member.key, row)
                    payloads[index] = encode(member, member.time_us, copied=copied)
            if chain.settings.before_images:
                with_them = with_images(payloads, find_images(state, payloads), seqs, state.inline_bytes_max)
                if _fit_batch(payloads) and not _fit_batch(with_them):
                    refusal = Refusal.TOO_LARGE
                payloads = with_them
        if refusal is not None:
            payloads = [encode(member, member.time_us, refused=refusal) for member in members]
        made: list[Piece] = []
        doomed_before = state.transactions.doomed
        try:
            pieces = self._wal.enqueue(lambda _: (seqs, payloads), made=made)
            if chain.is_empty:
                self._begin()
            self._apply_placed(pieces, chain)
        except BaseException as error:
            # Ctrl-C may come when they are ordered, and nobody has said so yet.
            if self._wal.chain is not chain:
                try:
                    self._mend(error, made, chain)
                except BaseException:
                    to_the_end(self._mend, error, made, chain)
                    raise
            raise
        measured = self.measured
        measured.conflicts += state.transactions.doomed - doomed_before + (refusal is Refusal.CONFLICT)
        if isinstance(members[0], Begin) and refusal is None:
            measured.transactions_begun += 1
        elif row is not None and row.txn not in state.transactions.open:
            # Its end, which a commit that was refused is too.
            if isinstance(members[0], Commit) and refusal is None:
                measured.transactions_committed += 1
            else:
                measured.transactions_aborted += 1
        return refusal

    def _begin(self) -> None:
        """With the lock: what the first entry says for ever."""
        creation = self._wal.chain.creation
        assert creation is not None
        meta = new_meta(creation)
        self._salt, self._page_keys = meta.salt, meta.page_keys
        self._state.boundaries = Boundaries(meta.salt, meta.page_keys)
        self._state.inline_bytes_max = meta.inline_bytes_max
        self._flusher.meta = meta

    def _apply_again(self, seq: int, members: Sequence[Single], group_seq_last: int | None) -> Outcome:
        """With the lock: what became of an entry that was applied before. Raises LogDivergence where that was
        another one."""
        purged = self._log.seq_before_first
        if seq <= purged:
            return Outcome(seq, None)
        self._await(min(seq, self._state.applied))
        seq_first = seq - len(members) + 1
        before = self._held.payload(seq_first - 1) if seq_first - 1 > purged else None
        if before is not None and group_seq_last is not None and group_of(seq, before) == group_seq_last:
            raise self._diverged(seq, "its group has more entries here")
        held = None
        for member_seq, member in enumerate(members, seq_first):
            held = self._held.payload(member_seq)
            if held is None:
                raise self._diverged(member_seq, f"it is a hole here, below {self._state.applied}")
            if not is_same_request(member, member_seq, held, group_seq_last):
                raise self._diverged(member_seq, "it is another entry here")
        assert held is not None
        refusal = _refusal_of(seq, held)
        if refusal is Refusal.REPEATED:
            return self._first_outcome(seq, session_of(members))
        return Outcome(seq, refusal)

    def _diverged(self, seq: int, why: str) -> LogDivergence:
        """The error, after which nothing is written any more."""
        error = LogDivergence(f"seq {seq} was delivered, and {why}", seq=seq, path=self.directory)
        self._fail(error)
        return error

    def sync(self) -> int:
        """Wait until everything that was applied is durable, and return the last durable seq."""
        self._require_open()
        try:
            return self._log.sync()
        except LowwaterError as error:
            self._fail(error)
            raise

    # ------------------------------------------------------------------ marks and checkpoints

    def update_low_water_mark(self, lwm: int) -> int:
        """Set the lowest durable seq of all voting members. Return the mark: it never falls while the engine
        is open, and is not above what is durable here. It is stored with the next pages that are written, so
        set it again after a restart."""
        if not isinstance(lwm, int) or isinstance(lwm, bool) or not 0 <= lwm <= format.SEQ_MAX:
            raise InputError(f"{lwm!r:.80} is no seq", hint="give the seq of an entry, or 0")
        state = self._state
        with state.lock:
            state.low_water_mark = max(state.low_water_mark, lwm)
            return self.marks().lwm

    def get_s3_high_water_mark(self) -> int:
        """Return the seq up to which every entry is in the object store. Without a store none is."""
        return self.marks().hwm

    def create_checkpoint(self, timeout_s: float | None = None) -> str:
        """Ask the orchestrator for a checkpoint entry, and return the id of the checkpoint once it is durable
        here. Raise TimedOut after `timeout_s`; the entry may still come then. Raise InputError where no
        orchestrator was named. Whoever orders entries without being told delivers `checkpoint_entry(...)`
        itself, and calls `wait_for_checkpoint(seq)`."""
        if self._orchestrator is None:
            raise InputError(
                "nobody was named who orders entries",
                hint="give an orchestrator, or deliver a checkpoint entry and call wait_for_checkpoint",
            )
        state = self._state
        seq_before = state.checkpoint_seq
        deadline_s = None if timeout_s is None else self._now_s() + timeout_s

        def has_come() -> bool:
            return state.checkpoint_seq > seq_before or self._closed or self._failure is not None

        while True:
            self._want_checkpoint_entry()
            wait_s = PROPOSE_AGAIN_S if deadline_s is None else deadline_s - self._now_s()
            with self._checkpoints_lock:
                if not has_come():
                    self._checkpoint_came.wait(min(wait_s, PROPOSE_AGAIN_S))
            if has_come():
                break
            if deadline_s is not None and self._now_s() >= deadline_s:
                raise TimedOut("the checkpoint entry was proposed, and has not come", path=self.directory)
        self._require_writable()
        return self.wait_for_checkpoint(state.checkpoint_seq)

    def _want_checkpoint_entry(self) -> None:
        if self._orchestrator is None:
            return
        try:
            self._orchestrator.propose(self._next_checkpoint_entry())
        except Exception as error:  # noqa: BLE001 — best effort, whatever somebody else's code raises
            _logger.warning("the orchestrator took no checkpoint", path=self.directory, error=str(error))

    # ------------------------------------------------------------------ what the engine asks for

    def _upkeep_step(self) -> float | None:
        if self._failure is not None:
            return None
        if self._wal.chain.is_empty:
            return None  # there is nothing to look after yet
        try:
            return self._upkeep.step()
        except LowwaterError as error:
            _logger.warning(
                "versions and sessions are not looked after any more", path=self.directory, error=str(error)
            )
            return None

    def propose_control(self, entry: Control) -> int | None:
        require_control(entry)
        if self._orchestrator is None:
            raise InputError("nobody was named who orders entries", hint="give an orchestrator")
        self._propose(entry)
        return None

    def _propose(self, entry: Control) -> None:
        assert self._orchestrator is not None
        try:
            self._orchestrator.propose(entry)
        except Exception as error:  # noqa: BLE001 — best effort, whatever somebody else's code raises
            kind = entry.kind.name.lower()
            _logger.warning(
                "the orchestrator took no entry", kind=kind, path=self.directory, error=str(error)
            )

    def _close(self) -> None:
        if self._upkeep_task is not None:
            self._upkeep_task.stop()
        super()._close()
        with self._checkpoints_lock:
            self._checkpoint_came.notify_all()


_logger = get_logger("engine")

# How long a proposal may take before it is repeated.
PROPOSE_AGAIN_S = 1.0

_NOT_LOOKED_UP: Copied = (b"", b"", None)


def _fit_batch(payloads: Sequence[bytes]) -> bool:
    """Whether the frames of these can be written at once."""
    return sum(map(len, payloads)) + format.FRAME_BYTES * len(payloads) <= format.BATCH_BYTES_MAX


# What is known before the first entry. No page is written with it: there is nothing to write.
_NOTHING = new_meta(Creation(bytes(CLUSTER_ID_BYTES), bytes(SALT_BYTES), LogSettings()))


def _refusal_of(seq: int, held: bytes) -> Refusal | None:
    code = decode_payload(seq, held).refused
    if code is None:
        return None
    try:
        return Refusal(code)
    except ValueError:
        raise NewerVersion(f"the refusal {code} is not known to this version", seq=seq) from None
