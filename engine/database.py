"""The embedded database: one node that orders its own entries.

Always true:
  - a write has its effect in memory and its frame in the log's queue at one moment, under the state's
    lock, so both have one order; it returns once the frame is durable;
  - an answer (a value, an absence, a refusal) that rests on an entry which is not durable yet waits for it;
  - what a write depends on is decided before its frame exists: a refusal raises and leaves nothing behind;
  - after a failure in the log or the page store writes are refused, and reads go on with what is durable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

from lowwater.engine import format
from lowwater.engine.aio import AsyncDatabase
from lowwater.engine.chain import Chain
from lowwater.engine.core import EngineOptions, meta_of
from lowwater.engine.entries import Control, Copy, CreateBucket, Delete, DeleteBucket, Put
from lowwater.engine.format import BUCKET_BYTES_MAX, KEY_BYTES_MAX, Extras, Kind
from lowwater.engine.locks import LockManager
from lowwater.engine.log import Log, Seams
from lowwater.engine.pages import after_prefix
from lowwater.engine.pagestore import PageStore
from lowwater.engine.reading import Reading
from lowwater.engine.replay import Meta, Progress
from lowwater.engine.requests import request_hash
from lowwater.engine.transactions import Isolation, Transaction
from lowwater.errors import (
    AlreadyExists,
    ConditionFailed,
    InputError,
    LowwaterError,
    NotEmpty,
    NotFound,
    VersionGone,
)

_new = tuple.__new__
_pack_fixed = format.FIXED.pack

__all__ = ["Database", "EngineOptions", "open_database"]


class Database(Reading):
    """Use `lowwater.open`."""

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
        super().__init__(log, store, meta, seams=seams, options=options, progress=progress)
        self._locks = LockManager(seams.clock)
        self._transactions = itertools.count(1)

    # ------------------------------------------------------------------ writing

    def _commit(
        self, encode: Callable[[Chain, int], list[bytes]], keys: Sequence[bytes], timeout_s: float | None
    ) -> Any:
        """With the lock: order entries and apply them. `encode` gets the chain and the time. The caller
        waits for the ticket without the lock."""
        clock = self._seams.clock
        payloads: list[bytes] = []
        chain_before: Chain = self._wal.chain

        def build(chain: Chain) -> tuple[None, list[bytes]]:
            nonlocal payloads, chain_before
            chain_before = chain
            payloads = encode(chain, max(clock.now_us(), chain.time_us))
            return None, payloads

        self._require_writable()
        ticket, pieces = self._wal.order(build, timeout_s=timeout_s)
        state = self._state
        try:
            seq_last = ticket.seq_last
            # A payload of this size has a value that is not large, whatever its names.
            plain_bytes_max = state.inline_bytes_max + format.FIXED_BYTES + 2
            if keys and max(map(len, payloads)) <= plain_bytes_max:
                seqs = range(seq_last - len(payloads) + 1, seq_last + 1)
                records = list(zip(seqs, payloads, repeat(0), repeat(0), strict=False))
                state.apply_plain(keys, records, seq_last)
            else:
                self._apply_placed(pieces, chain_before)
        except BaseException as error:
            self._fail_unapplied(error)
            raise
        return ticket

    def _write(
        self,
        encode: Callable[[Chain, int], list[bytes]],
        keys: Sequence[bytes],
        timeout_s: float | None,
        decide: Callable[[], None] | None = None,
    ) -> int:
        state = self._state
        self._wait_for_room(timeout_s)
        with state.lock:
            self._require_writable()
            if decide is not None:
                decide()
            ticket = self._commit(encode, keys, timeout_s)
        self._wake_flusher()
        try:
            return int(self._wal.wait(ticket))
        except LowwaterError as error:
            self._fail(error)
            raise

    def create_bucket(self, bucket: str) -> int:
        """Make a bucket. Raises AlreadyExists where there is one."""
        format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)

        def decide() -> None:
            if bucket in self._state.buckets:
                self._await(self._state.buckets_seq)
                raise AlreadyExists(f"there is a bucket {bucket!r} already", hint="choose another name")

        entry = CreateBucket(bucket)
        return self._write(lambda _, time_us: [entry.encode(time_us)], (), None, decide)

    def delete_bucket(self, bucket: str) -> int:
        """Delete an empty bucket."""
        entry = DeleteBucket(bucket)

        def decide() -> None:
            prefix = self._prefix(bucket)
            for found in self._state.scan(bucket, prefix, after_prefix(prefix)):
                self._await(found.seq)
                raise NotEmpty(f"the bucket {bucket!r} holds {found.key!r} and perhaps more")

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
        """Store a value, and return its seq once it is durable. `if_absent` only where there is none;
        `if_seq` only where the newest version has this seq (0: where there is none)."""
        if if_absent and if_seq:
            raise InputError("a key that is absent has no seq", hint="give if_absent or if_seq, not both")
        if if_absent or if_seq is not None:
            return self._put_if(bucket, key, value, metadata, 0 if if_seq is None else if_seq, timeout_s)
        encoded = self._prefix(bucket) + format.encode_name(key, "key", KEY_BYTES_MAX)
        entry = Put(bucket, key, value, metadata)
        return self._write(
            lambda _, time_us: [entry.encode(time_us)], (encoded,), timeout_s, self._bucket_check(bucket)
        )

    def put_many(
        self, bucket: str, items: Iterable[tuple[str, bytes]], *, timeout_s: float | None = None
    ) -> int:
        """Store many values with one sync, and return the last one's seq. Each is a put of its own: after
        a crash some may be there and others not, in their order."""
        prefix = self._prefix(bucket)
        name = prefix[1:]
        name_bytes = len(name)
        keys: list[bytes] = []
        rests: list[tuple[int, bytes]] = []
        try:
            for key, value in items:
                key_bytes = format.encode_name(key, "key", KEY_BYTES_MAX)
                encoded = prefix + key_bytes
                if type(value) is not bytes:
                    value = _as_bytes(value)
                keys.append(encoded)
                rests.append((len(key_bytes), name + key_bytes + value))
        except (TypeError, ValueError) as error:
            raise InputError(f"these are no items: {error}", hint="give pairs of key and value") from error
        if not keys:
            raise InputError("there is nothing to put", hint="give at least one key and value")
        put = Kind.PUT

        def encode(_: Chain, time_us: int) -> list[bytes]:
            heads: dict[int, bytes] = {}
            payloads = []
            for key_bytes, rest in rests:
                head = heads.get(key_bytes)
                if head is None:
                    head = heads[key_bytes] = _pack_fixed(put, 0, name_bytes, key_bytes, 0, time_us, 0)
                payloads.append(head + rest)
            return payloads

        return self._write(encode, keys, timeout_s, self._bucket_check(bucket))

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
            found, _ = self._newest(bucket, key)
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
            found, _ = self._newest(bucket, key)
            if found is None:
                raise NotFound(f"there is no {key!r} in the bucket {bucket!r}")

        encoded = self._prefix(bucket) + format.encode_name(key, "key", KEY_BYTES_MAX)
        return self._write(lambda _, time_us: [entry.encode(time_us)], (encoded,), timeout_s, decide)

    def copy(
        self, bucket: str, key: str, to_bucket: str, to_key: str, *, timeout_s: float | None = None
    ) -> int:
        """Store what a key has under another one too. A large value is not written again."""
        format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
        format.encode_name(key, "key", KEY_BYTES_MAX)
        extras = Extras(request_hash=request_hash(Copy(bucket, key, to_bucket, to_key)))
        name = format.encode_name(to_bucket, "bucket", BUCKET_BYTES_MAX)
        to_name = format.encode_name(to_key, "key", KEY_BYTES_MAX)
        payload_of: Callable[[int], bytes]

        def decide() -> None:
            nonlocal payload_of
            self._bucket_check(to_bucket)()
            found, _ = self._newest(bucket, key)
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
        """Write all of them or none, with one sync. All get the seq that this returns. `decide` may raise
        to refuse them: it is called when nothing can come between it and them."""
        entries = _as_list(entries, "entries", "Put and Delete")
        if not entries:
            raise InputError("there is nothing to write", hint="give at least one Put or Delete")
        for entry in entries:
            if not isinstance(entry, Put | Delete):
                raise InputError(f"{entry!r:.80} cannot be in a group", hint="give Put and Delete")
            entry.encode(0)  # what is wrong with one is told before any is ordered

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
        """Begin a transaction: `with db.transaction() as txn:` commits at the end of the block, and aborts
        where it raises. `serializable` also refuses a commit when what was read has changed."""
        if isolation not in ("snapshot", "serializable"):
            raise InputError(f"the isolation is {isolation!r:.80}", hint="give snapshot or serializable")
        self._require_open()
        return Transaction(
            self, started=next(self._transactions), isolation=isolation, lock_timeout_s=lock_timeout_s
        )

    def _commit_transaction(self, entries: Sequence[Put | Delete], decide: Callable[[], None]) -> int | None:
        if entries:
            return self.write(entries, decide=decide)
        with self._state.lock:
            decide()
        return None

    def _bucket_check(self, bucket: str) -> Callable[[], None]:
        def check() -> None:
            self._prefix(bucket)

        return check

    # ------------------------------------------------------------------ which versions are kept

    def snapshot(self, name: str) -> int:
        """Keep what can be read now under a name, until `drop_snapshot`. Returns its seq."""
        format.encode_name(name, "snapshot", 255)

        def decide() -> None:
            if name in self._state.snapshots:
                raise AlreadyExists(f"there is a snapshot {name!r} already", hint="choose another name")

        def encode(chain: Chain, time_us: int) -> list[bytes]:
            return [Control(Kind.PIN, {"name": name, "seq": chain.seq_last}).encode(time_us)]

        return self._write(encode, (), None, decide) - 1

    def drop_snapshot(self, name: str) -> int:
        format.encode_name(name, "snapshot", 255)

        def decide() -> None:
            if name not in self._state.snapshots:
                raise NotFound(f"there is no snapshot {name!r}")

        return self._write(
            lambda _, time_us: [Control(Kind.UNPIN, {"name": name}).encode(time_us)], (), None, decide
        )

    def move_horizon(self, seq: int | None) -> int:
        """Keep versions back to `seq` from now on, whoever needs them. None keeps those of snapshots and
        running scans only, which is how a database begins."""
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

        return self._write(
            lambda _, time_us: [Control(Kind.HORIZON, {"seq": seq}).encode(time_us)], (), None, decide
        )

    def aio(self) -> AsyncDatabase:
        """The same calls for coroutines."""
        return AsyncDatabase(self)


def open_database(
    log: Log,
    store: PageStore,
    *,
    seams: Seams,
    options: EngineOptions,
    progress: Progress | None = None,
) -> Database:
    meta = meta_of(log, store)
    assert meta is not None, "a database's log has its first entry from the beginning"
    return Database(log, store, meta, seams=seams, options=options, progress=progress)


def _encode_put(
    bucket: str, key: str, value: bytes, metadata: Mapping[str, str] | None, time_us: int, extras: Extras
) -> bytes:
    return format.encode_payload(
        Kind.PUT,
        format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX),
        format.encode_name(key, "key", KEY_BYTES_MAX),
        format.encode_metadata(dict(metadata)) if metadata else b"",
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
