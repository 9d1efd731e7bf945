"""The embedded database: one node that orders its own entries.

Always true:
  - a write has its effect in memory and its frame in the log's queue at one moment, under the state's
    lock, so both have one order; it returns once the frame is durable;
  - an answer (a value, an absence, a refusal) that rests on an entry which is not durable yet waits for it;
  - what a write depends on is decided before its frame exists: a refusal raises and leaves nothing behind;
  - a transaction that is open in the log belongs to this process: opening ends those that a crash has left;
  - after a failure in the log or the page store writes are refused, and reads go on with what is durable.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from lowwater.engine.checkpoint.checkpoints import Checkpoints
from lowwater.engine.database.aio import AsyncDatabase
from lowwater.engine.database.core import ColdOf, EngineOptions
from lowwater.engine.database.locks import LockManager
from lowwater.engine.database.open_transactions import OpenTransactions
from lowwater.engine.database.reads import Reads
from lowwater.engine.database.redo import Progress
from lowwater.engine.database.session import TTL_S_DEFAULT, Session, write_request
from lowwater.engine.database.spill import abort_losers
from lowwater.engine.database.transactions import Isolation, Transaction
from lowwater.engine.database.upkeep import Upkeep
from lowwater.engine.format import format
from lowwater.engine.format.before_images import find_images, with_images
from lowwater.engine.format.entries import Control, Copy, CreateBucket, Delete, DeleteBucket, Put
from lowwater.engine.format.fast import IS_COMPILED
from lowwater.engine.format.format import BUCKET_BYTES_MAX, KEY_BYTES_MAX, Extras, Kind
from lowwater.engine.format.keys import after_prefix
from lowwater.engine.format.moments import duration_us, timeout_of
from lowwater.engine.format.records import Unread, put_record
from lowwater.engine.log.chain import Chain, seal_entry
from lowwater.engine.log.log import Log, LogOptions, Seams, wanted_settings
from lowwater.engine.log.pieces import Piece, cut_puts, frames_of, places_of
from lowwater.engine.log.wal import WalOptions
from lowwater.engine.pages.pagestore import PageStore
from lowwater.engine.seams.interrupts import busy, is_interrupt, to_the_end
from lowwater.engine.state.away import BlockSource
from lowwater.engine.state.catalogue import Fork, fork_entry
from lowwater.engine.state.decide import decide as decide_request
from lowwater.engine.state.keeping import PER_KEY_MAX
from lowwater.engine.state.meta import Meta, meta_of
from lowwater.engine.state.requests import request_hash, require_control
from lowwater.errors import (
    AlreadyExists,
    ConditionFailed,
    InputError,
    InvalidEntry,
    LowwaterError,
    NotEmpty,
    NotFound,
    VersionGone,
)
from lowwater.logging import get_logger

_new = tuple.__new__
T = TypeVar("T")
# Makes payloads, given the chain that they will follow and their time.
Encode = Callable[[Chain, int], list[bytes]]
_pack_fixed = format.FIXED.pack

__all__ = ["Database", "EngineOptions", "open_database"]


class Database(Reads):
    """An embedded database. Open one with `lowwater.open`."""

    _votes_alone = True

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
        self._one_checkpoint = threading.RLock()
        super().__init__(
            log,
            store,
            meta,
            seams=seams,
            options=options,
            checkpoints=checkpoints,
            blocks=blocks,
            cold=cold,
            progress=progress,
        )
        self._locks = LockManager(seams.clock)
        self._transactions = itertools.count(1)
        self._open_transactions = OpenTransactions(self)
        try:
            self.aborted = abort_losers(self)
        except BaseException:
            self._task.stop()
            self._open_transactions.stop()
            raise
        self._upkeep = Upkeep(
            self._state, log, options.versions, order=self.propose_control, now_us=seams.clock.now_us
        )
        self._upkeep_task = seams.runner.start("engine-upkeep", self._upkeep_step)

    # ------------------------------------------------------------------ writing

    def _commit(
        self,
        encode: Encode,
        keys: Sequence[bytes],
        timeout_s: float | None,
        puts: _Puts | None = None,
    ) -> Any:
        """With the lock: order entries and apply them. `encode` gets the chain and the time. `keys` are those
        of puts without metadata, where all entries are such, or they are `puts`. The caller waits for the
        ticket without the lock."""
        clock = self._seams.clock
        before = chain_before = self._wal.chain

        def build(chain: Chain) -> tuple[None, list[bytes]]:
            nonlocal chain_before
            chain_before = chain
            return None, encode(chain, max(clock.now_us(), chain.time_us))

        def cut(chain: Chain, options: WalOptions) -> tuple[Piece, Chain] | None:
            nonlocal chain_before
            chain_before = chain
            assert puts is not None
            return puts.cut(chain, max(clock.now_us(), chain.time_us), options)

        made: list[Piece] = []
        self._require_writable()
        # One call of `encode` gives all of them one time.
        is_alike = puts is not None or bool(keys)
        state = self._state
        try:
            ticket, pieces = self._wal.order(
                build,
                timeout_s=timeout_s,
                alike=is_alike,
                cut_at_once=None if puts is None else cut,
                made=made,
            )
            if puts is not None:
                keys = puts.keys
            if keys:
                records = frames_of(pieces)
                if max(map(len, records)) > (small_bytes := state.small_record_bytes):
                    records = [
                        put_record(frame, small_bytes, segment_first, position)
                        for frame, (segment_first, position) in zip(
                            records, places_of(pieces, chain_before), strict=True
                        )
                    ]
                state.apply_puts(keys, records, ticket.seq_last)
            else:
                self._apply_placed(pieces, chain_before)
        except BaseException as error:
            # Ctrl-C may come when they are ordered, and nobody has said so yet.
            if self._wal.chain is not before:
                try:
                    self._mend(error, made, chain_before)
                except BaseException:
                    to_the_end(self._mend, error, made, chain_before)
                    raise
            raise
        return ticket

    def _write(
        self,
        encode: Encode,
        keys: Sequence[bytes],
        timeout_s: float | None,
        decide: Callable[[], None] | None = None,
        *,
        may_use_reserve: bool = False,
        puts: _Puts | None = None,
    ) -> int:
        ticket = self._queue(encode, keys, timeout_s, decide, may_use_reserve=may_use_reserve, puts=puts)
        try:
            # What the log itself needs joins nobody, and holds up nobody.
            return int(self._wal.wait(ticket, urgent=may_use_reserve))
        except LowwaterError as error:
            if not is_interrupt(error):
                self._fail(error)
            raise

    def _write_apart(self, *args: Any, **kwargs: Any) -> int:
        """`_write` where no interrupt comes: for entries of which a part cannot be applied again."""
        return self._apart(lambda: self._write(*args, **kwargs))

    def _apart(self, call: Callable[[], T]) -> T:
        """Write where no interrupt comes. Raises Busy to a signal handler that would wait for its thread."""
        self._refuse_reentry()
        return self._seams.runner.apart(call)

    def _queue(
        self,
        encode: Encode,
        keys: Sequence[bytes],
        timeout_s: float | None,
        decide: Callable[[], None] | None = None,
        *,
        may_use_reserve: bool = False,
        puts: _Puts | None = None,
    ) -> Any:
        """Order a write, and return its ticket without waiting until it is durable. With `may_use_reserve`,
        which is for what makes the log smaller, it may use the disk's reserve."""
        state = self._state
        self._refuse_reentry()
        self._wait_for_room(timeout_s, may_use_reserve=may_use_reserve)

        def order() -> Any:
            with state.lock:
                self._require_writable()
                if decide is not None:
                    decide()
                if self._wal.chain.settings.before_images:
                    return self._commit(self._with_images(encode), (), timeout_s)
                return self._commit(encode, keys, timeout_s, puts)

        # Without a condition nothing is read, but for before-images.
        try:
            reads = decide is not None or self._wal.chain.settings.before_images
            ticket = state.away.call(order) if reads else order()
            self._wake_flusher()
        except BaseException:
            self._wake_flusher()  # an interrupt may have come when it was applied, and nobody told
            raise
        return ticket

    def _with_images(self, encode: Encode) -> Encode:
        """With the lock: the same with before-images. They are looked for here, because pages may have to be
        read, and while entries are ordered the log cannot tell anybody that a write is durable."""
        chain, state = self._wal.chain, self._state
        found = find_images(state, encode(chain, chain.time_us))

        def encode_with_images(chain: Chain, time_us: int) -> list[bytes]:
            payloads = encode(chain, time_us)
            seqs = range(chain.seq_last + 1, chain.seq_last + 1 + len(payloads))
            return with_images(payloads, found, seqs, state.inline_bytes_max)

        return encode_with_images

    def create_bucket(self, bucket: str, exist_ok: bool = False) -> int:
        """Make a bucket, and return its seq. If it exists, raise AlreadyExists; with `exist_ok`, write
        nothing and return the seq of the bucket that is there."""
        format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
        found: int | None = None

        def decide() -> None:
            nonlocal found
            if bucket in self._state.buckets:
                self._await(self._state.buckets_seq)
                found = self._state.buckets[bucket].seq
                hint = "choose another name, or say exist_ok=True"
                raise AlreadyExists(f"there is a bucket {bucket!r} already", hint=hint)

        entry = CreateBucket(bucket)
        try:
            return self._write(lambda _, time_us: [entry.encode(time_us)], (), None, decide)
        except AlreadyExists:
            if not exist_ok or found is None:
                raise
            return found

    def delete_bucket(self, bucket: str) -> int:
        """Delete an empty bucket."""
        entry = DeleteBucket(bucket)

        def decide() -> None:
            prefix = self._prefix(bucket)
            found = self._state.first(bucket, prefix, after_prefix(prefix))
            if found is not None:
                self._await(found.seq)
                raise NotEmpty(f"the bucket {bucket!r} holds {found.key!r} and perhaps more")
            if self._state.is_held(prefix, after_prefix(prefix)):
                raise NotEmpty(f"a transaction that is open has written to the bucket {bucket!r}")

        return self._write(lambda _, time_us: [entry.encode(time_us)], (), None, decide)

    def put(
        self,
        bucket: str,
        key: str,
        value: bytes,
        metadata: Mapping[str, str] | None = None,
        *,
        if_absent: bool = False,
        if_seq: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Store a value, and return its seq once it is durable. `if_absent` stores it only where the key has
        no value. `if_seq` stores it only where the newest version has this seq (0: where there is none)."""
        if if_absent and if_seq:
            raise InputError("a key that is absent has no seq", hint="give if_absent or if_seq, not both")
        if if_absent or if_seq is not None:
            return self._put_if(bucket, key, value, metadata, 0 if if_seq is None else if_seq, timeout_s)
        encoded = self._prefix(bucket) + format.encode_name(key, "key", KEY_BYTES_MAX)
        entry = Put(bucket, key, value, metadata)
        return self._write(
            lambda _, time_us: [entry.encode(time_us)],
            () if metadata else (encoded,),
            timeout_s,
            self._bucket_check(bucket),
        )

    def put_many(
        self, bucket: str, items: Iterable[tuple[str, bytes]], *, timeout_s: float | None = None
    ) -> int:
        """Store many values with one sync, and return the last one's seq. Each is a put of its own: after a
        crash the first ones may be there and the others not."""
        puts = _Puts(self._prefix(bucket), items)

        def write() -> int:
            return self._write(
                lambda _, time_us: puts.encode(time_us), (), timeout_s, self._bucket_check(bucket), puts=puts
            )

        try:
            return write()
        except _NotCheckedError:
            pass
        puts.check()
        return write()

    def _put_if(
        self,
        bucket: str,
        key: str,
        value: bytes,
        metadata: Mapping[str, str] | None,
        if_seq: int,
        timeout_s: float | None,
    ) -> int:
        if not isinstance(if_seq, int) or isinstance(if_seq, bool) or not 0 <= if_seq <= format.SEQ_MAX:
            raise InputError(f"if_seq is {if_seq!r:.80}", hint="give the seq of a version, or 0 for none")
        Put(bucket, key, value, metadata).encode(0)  # what is wrong with it is told before all else
        extras = Extras(request_hash=request_hash(Put(bucket, key, value, metadata, if_seq=if_seq)))

        def decide() -> None:
            self._bucket_check(bucket)()
            found, _ = self._newest(bucket, key, Unread)
            seq = 0 if found is None else found.seq
            if seq != if_seq:
                raise ConditionFailed(
                    f"{key!r} has the seq {seq}, not {if_seq}" if seq else f"there is no {key!r}", seq=seq
                )

        def encode(_: Chain, time_us: int) -> list[bytes]:
            return [_encode_put(bucket, key, value, metadata, time_us, extras)]

        return self._write(encode, (), timeout_s, decide)

    def delete(self, bucket: str, key: str, *, timeout_s: float | None = None) -> int:
        """Remove a key. Raises NotFound where there is none."""
        entry = Delete(bucket, key)

        def decide() -> None:
            self._bucket_check(bucket)()
            found, _ = self._newest(bucket, key, Unread)
            if found is None:
                raise NotFound(f"there is no {key!r} in the bucket {bucket!r}")

        return self._write(lambda _, time_us: [entry.encode(time_us)], (), timeout_s, decide)

    def copy(
        self, bucket: str, key: str, to_bucket: str, to_key: str, *, timeout_s: float | None = None
    ) -> int:
        """Store what a key has under another key too. A large value is not written again."""
        format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
        format.encode_name(key, "key", KEY_BYTES_MAX)
        name = format.encode_name(to_bucket, "bucket", BUCKET_BYTES_MAX)
        to_name = format.encode_name(to_key, "key", KEY_BYTES_MAX)
        extras = Extras(request_hash=request_hash(Copy(bucket, key, to_bucket, to_key)))
        payload_of: Callable[[int], bytes]

        def decide() -> None:
            nonlocal payload_of
            self._bucket_check(to_bucket)()
            found, _ = self._newest(bucket, key, Unread)
            if found is None:
                raise NotFound(f"there is no {key!r} in the bucket {bucket!r}")
            metadata, value, value_ref = self._copied(bucket, key)
            all_extras = extras._replace(value_ref=value_ref)

            def payload_of(time_us: int) -> bytes:
                return format.encode_payload(
                    Kind.COPY, name, to_name, metadata, value, time_us=time_us, extras=all_extras
                )

        return self._write(lambda _, time_us: [payload_of(time_us)], (), timeout_s, decide)

    def write(
        self,
        entries: Sequence[Put | Delete],
        *,
        timeout_s: float | None = None,
        decide: Callable[[], None] | None = None,
    ) -> int:
        """Write all entries or none, with one sync. Return the seq that all of them get. `decide` may raise
        to refuse them: it is called when nothing can come between it and them."""
        entries = _as_list(entries, "entries", "Put and Delete")
        if not entries:
            raise InputError("there is nothing to write", hint="give at least one Put or Delete")
        for entry in entries:
            if not isinstance(entry, Put | Delete):
                raise InputError(f"{entry!r:.80} cannot be in a group", hint="give Put and Delete")
            entry.encode(0)  # what is wrong with one is told before any is ordered
        if decide is not None and not callable(decide):
            raise InputError(f"decide is {decide!r:.80}", hint="give a function without arguments")

        def check() -> None:
            for bucket in {entry.bucket for entry in entries}:
                self._bucket_check(bucket)()
            if decide is not None:
                decide()

        def encode(chain: Chain, time_us: int) -> list[bytes]:
            extras = Extras(group_seq_last=chain.seq_last + len(entries))
            return [
                _encode_put(entry.bucket, entry.key, entry.value, entry.metadata, time_us, extras)
                if isinstance(entry, Put)
                else _encode_delete(entry, time_us, extras)
                for entry in entries
            ]

        return self._write(encode, (), timeout_s, check)

    def transaction(
        self, isolation: Isolation = "snapshot", *, lock_timeout_s: float | None = 10.0
    ) -> Transaction:
        """Begin a transaction. `with db.transaction() as txn:` commits at the end of the block, and aborts if
        the block raises. `serializable` also refuses a commit when what was read has changed."""
        if isolation not in ("snapshot", "serializable"):
            raise InputError(f"the isolation is {isolation!r:.80}", hint="give snapshot or serializable")
        lock_timeout_s = timeout_of(lock_timeout_s, "lock_timeout_s")
        self._require_open()
        transaction = Transaction(
            self, started=next(self._transactions), isolation=isolation, lock_timeout_s=lock_timeout_s
        )
        self.measured.transactions_begun += 1
        return transaction

    def _commit_transaction(self, entries: Sequence[Put | Delete], decide: Callable[[], None]) -> int | None:
        if entries:
            return self.write(entries, decide=decide)

        def check() -> None:
            with self._state.lock:
                decide()

        self._state.away.call(check)
        return None

    def _bucket_check(self, bucket: str) -> Callable[[], None]:
        def check() -> None:
            self._prefix(bucket)

        return check

    # ------------------------------------------------------------------ which versions are kept

    def snapshot(self, name: str, ttl: float | timedelta | None = None) -> int:
        """Keep what can be read now under a name, and return its seq. The snapshot ends with `drop_snapshot`,
        or after `ttl` (seconds, or a timedelta)."""
        format.encode_name(name, "snapshot", 255)
        ttl_us = None if ttl is None else duration_us(ttl, "time to live")

        def decide() -> None:
            if name in self._state.snapshots:
                raise AlreadyExists(f"there is a snapshot {name!r} already", hint="choose another name")

        def encode(chain: Chain, time_us: int) -> list[bytes]:
            body: dict[str, Any] = {"name": name, "seq": chain.seq_last}
            if ttl_us is not None:
                body["expires_us"] = time_us + ttl_us
            return [Control(Kind.PIN, body).encode(time_us)]

        seq = self._write_apart(encode, (), None, decide) - 1
        if ttl is not None:
            self._upkeep_task.wake()
        return seq

    def drop_snapshot(self, name: str) -> int:
        """Remove a snapshot: nothing is kept for it any more. Return the seq, or raise NotFound."""
        format.encode_name(name, "snapshot", 255)

        def decide() -> None:
            if name not in self._state.snapshots:
                raise NotFound(f"there is no snapshot {name!r}")

        return self._write_apart(
            lambda _, time_us: [Control(Kind.UNPIN, {"name": name}).encode(time_us)], (), None, decide
        )

    def move_horizon(self, seq: int | None) -> int:
        """Keep versions back to `seq` from now on, whether or not somebody needs them. With None, keep only
        those of snapshots and running scans, as a new database does."""
        if seq is not None and (not isinstance(seq, int) or isinstance(seq, bool)):
            raise InputError(f"{seq!r:.80} is no seq", hint="give the seq of an entry, or None")

        def decide() -> None:
            # Not by what is pinned here: after a crash nothing keeps those versions.
            floor = self._state.floor_kept(self._state.applied)
            if seq is not None and not floor <= seq <= self._state.applied:
                raise VersionGone(
                    f"the horizon cannot be at {seq}",
                    seq=seq,
                    hint=f"from {floor} on there are versions",
                )

        return self._write_apart(
            lambda _, time_us: [Control(Kind.HORIZON, {"seq": seq}).encode(time_us)], (), None, decide
        )

    def limit_versions(self, per_key: int | None) -> int:
        """Keep at most `per_key` versions of each key, of those that the horizon keeps; None keeps all.
        Snapshots keep what they show. A read whose answer the limit may have dropped raises VersionGone. Once
        a limit was raised or lifted, only snapshots can be read of the time before."""
        if per_key is not None and (
            not isinstance(per_key, int) or isinstance(per_key, bool) or not 1 <= per_key <= PER_KEY_MAX
        ):
            raise InputError(f"the limit is {per_key!r:.80}", hint="give a number from 1 up, or None")
        entry = Control(Kind.HORIZON, {"per_key_max": per_key})
        return self._write_apart(lambda _, time_us: [entry.encode(time_us)], (), None)

    # ------------------------------------------------------------------ sessions

    def session(self, session_id: int | None = None, *, ttl: float | timedelta = TTL_S_DEFAULT) -> Session:
        """Open a session, or go on with the one that has this id. Its requests happen once, however often
        they are made. It ends when it was not used for `ttl` (seconds, or a timedelta)."""
        self._require_open()
        if session_id is None:
            entry = Control(Kind.SESSION_OPEN, {"ttl_us": duration_us(ttl, "time to live")})
            session_id = write_request(self, entry, None, "session")
            self._upkeep_task.wake()
        elif not isinstance(session_id, int) or isinstance(session_id, bool):
            raise InputError(f"{session_id!r:.80} is no session", hint="give the id of one, or None")
        return Session(self, session_id)

    # ------------------------------------------------------------------ what time brings

    def propose_control(self, entry: Control) -> int | None:
        require_control(entry)

        def decide() -> None:
            if decide_request(self._state, self._wal.chain, [entry], group=False) is not None:
                raise _NotWantedError
            if not self._is_ours(entry):
                raise InvalidEntry("the log has another segment there", hint="describe the one that it has")

        try:
            return self._write_apart(
                lambda _, time_us: [entry.encode(time_us)], (), None, decide, may_use_reserve=True
            )
        except _NotWantedError:
            return None  # somebody was faster

    def fork(self, epoch: int, *, parent_segment: bytes, parent_manifest: bytes) -> int:
        """Go on in an epoch that was claimed. Return the seq of the entry that says so, once it is durable.
        The segment that is being written is sealed before. The hashes are those of the newest manifest and
        its last segment, zeros where there is none."""

        def encode(chain: Chain, time_us: int) -> list[bytes]:
            entries = []
            if chain.body_bytes:
                entries.append(seal_entry(chain.seq_first))
            fork = Fork(
                chain.cluster_id,
                epoch,
                chain.epoch,
                chain.seq_last + len(entries),
                parent_segment,
                parent_manifest,
            )
            return [each.encode(time_us) for each in (*entries, fork_entry(fork))]

        return self._write_apart(encode, (), None, may_use_reserve=True)

    def _upkeep_step(self) -> float | None:
        if self._failure is not None:
            return None
        try:
            return self._upkeep.step()
        except LowwaterError as error:
            _logger.warning(
                "versions and sessions are not looked after any more", path=self.directory, error=str(error)
            )
            return None

    def begin_upkeep(self, options: LogOptions) -> None:
        """Write into the log the settings that somebody has asked for, and what the version policy says. It
        is called before anything else is written."""
        if (change := wanted_settings(self._wal.chain, options)) is not None:
            self.propose_control(change)
        self._upkeep.begin()

    def _close(self) -> None:
        self._upkeep_task.stop()
        self._open_transactions.stop()
        super()._close()

    # ------------------------------------------------------------------ checkpoints

    def checkpoint(self) -> str:
        """Make a checkpoint of what is there now, and return its id once all of it is durable here. If
        nothing has happened since the last one, return the id of that one."""
        self._wal.refuse_forked()
        self._refuse_reentry()
        if self._one_checkpoint._is_owned():  # type: ignore[attr-defined]
            raise busy(self._log.directory)
        with self._one_checkpoint:
            self._require_writable()
            with self._state.lock:
                seq = self._state.checkpoint_seq
                is_enough = not self._has_news and self._comes(seq)
            if not is_enough:
                seq = self._order_checkpoint()
            return self.wait_for_checkpoint(seq)

    def _order_checkpoint(self) -> int:
        return self._write_apart(
            lambda _, time_us: [self._next_checkpoint_entry().encode(time_us)], (), None, may_use_reserve=True
        )

    def _want_checkpoint_entry(self) -> None:
        if self._one_checkpoint.acquire(blocking=False):
            try:
                self._order_checkpoint()
            finally:
                self._one_checkpoint.release()

    def aio(self) -> AsyncDatabase:
        """Return the calls that read and write keys, for coroutines. Its `run` makes the others."""
        return AsyncDatabase(self)


class _NotWantedError(Exception):
    """An entry that the engine itself wants would have no effect."""


_logger = get_logger("engine")


def open_database(
    log: Log,
    store: PageStore,
    *,
    seams: Seams,
    options: EngineOptions,
    checkpoints: Checkpoints,
    blocks: BlockSource | None = None,
    cold: ColdOf | None = None,
    progress: Progress | None = None,
) -> Database:
    meta = meta_of(log, store)
    assert meta is not None, "a database's log has its first entry from the beginning"
    return Database(
        log,
        store,
        meta,
        seams=seams,
        options=options,
        checkpoints=checkpoints,
        blocks=blocks,
        cold=cold,
        progress=progress,
    )


class _NotCheckedError(Exception):
    """There is something unusual about puts, and nobody has looked at all of them yet."""


class _Puts:
    """Puts into one bucket, on their way into the log."""

    def __init__(self, prefix: bytes, items: Iterable[tuple[str, bytes]]) -> None:
        self._prefix = prefix
        try:
            self._pairs = list(items)
        except TypeError as error:
            raise InputError(f"these are no items: {error}", hint="give pairs of key and value") from error
        if not self._pairs:
            raise InputError("there is nothing to put", hint="give at least one key and value")
        # What they are called in pages: known once they are encoded.
        self.keys: list[bytes] = []
        self._names: list[bytes] = []
        self._values: Sequence[bytes] = ()
        if not IS_COMPILED:
            self.check()

    def cut(self, chain: Chain, time_us: int, options: WalOptions) -> tuple[Piece, Chain] | None:
        """The common case, in one go."""
        made = cut_puts(
            chain,
            self._pairs,
            self._prefix,
            time_us,
            batch_bytes_max=options.batch_bytes_max,
            entry_bytes_max=options.entry_bytes_max,
        )
        if made is None:
            return None
        piece, after, self.keys = made
        return piece, after

    def encode(self, time_us: int) -> list[bytes]:
        """All cases: the payloads."""
        if not self._names:
            raise _NotCheckedError
        bucket_name = self._prefix[1:]
        sizes = list(map(len, self._names))
        heads = {
            size: _pack_fixed(Kind.PUT, 0, len(bucket_name), size, 0, time_us, 0) + bucket_name
            for size in set(sizes)
        }
        self.keys = [self._prefix + name for name in self._names]
        parts = zip(map(heads.__getitem__, sizes), self._names, self._values, strict=True)
        return list(map(b"".join, parts))

    def check(self) -> None:
        """Without a lock: what it is given may be of types that run code of their own, and nobody waits."""
        try:
            texts, values = zip(*self._pairs, strict=True)
        except (TypeError, ValueError) as error:
            raise InputError(f"these are no items: {error}", hint="give pairs of key and value") from error
        self._names = _encode_keys(texts)
        self._values = values if set(map(type, values)) == {bytes} else list(map(_as_bytes, values))


def _encode_keys(texts: Sequence[Any]) -> list[bytes]:
    """`format.encode_name` of many keys."""
    if set(map(type, texts)) == {str}:
        try:
            names = [text.encode() for text in texts]
        except UnicodeEncodeError:
            pass  # told below
        else:
            if all(names) and max(map(len, names)) <= KEY_BYTES_MAX:
                return names
    return [format.encode_name(text, "key", KEY_BYTES_MAX) for text in texts]


def _encode_put(
    bucket: str, key: str, value: bytes, metadata: Mapping[str, str] | None, time_us: int, extras: Extras
) -> bytes:
    return format.encode_payload(
        Kind.PUT,
        format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX),
        format.encode_name(key, "key", KEY_BYTES_MAX),
        format.encode_metadata(metadata),
        _as_bytes(value),
        time_us=time_us,
        extras=extras,
    )


def _encode_delete(entry: Delete, time_us: int, extras: Extras) -> bytes:
    return format.encode_payload(
        Kind.DELETE,
        format.encode_name(entry.bucket, "bucket", BUCKET_BYTES_MAX),
        format.encode_name(entry.key, "key", KEY_BYTES_MAX),
        b"",
        b"",
        time_us=time_us,
        extras=extras,
    )


def _as_list(given: Iterable[Any], what: str, wanted: str) -> list[Any]:
    try:
        return list(given)
    except TypeError:
        raise InputError(f"{type(given).__name__} gives no {what}", hint=f"give a list of {wanted}") from None


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InputError(
        f"a value is bytes, not {type(value).__name__}", hint="encode it first, for example text.encode()"
    )
