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
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import cbor2
from blake3 import blake3
from prometheus_client import CollectorRegistry

from lowwater.engine import content, format
from lowwater.engine.aio import AsyncDatabase
from lowwater.engine.chain import Chain
from lowwater.engine.check import Finding
from lowwater.engine.check_pages import check_pages
from lowwater.engine.entries import Control, CreateBucket, Delete, DeleteBucket, Entry, Put
from lowwater.engine.flush import Flusher
from lowwater.engine.format import BUCKET_BYTES_MAX, KEY_BYTES_MAX, Extras, Kind, ValueRef
from lowwater.engine.locks import LockManager
from lowwater.engine.log import Log, Seams, Start
from lowwater.engine.pages import Boundaries, after_prefix, encode_key
from lowwater.engine.pagestore import PageStore
from lowwater.engine.pieces import Piece
from lowwater.engine.records import Head, Marks, Object, Page
from lowwater.engine.replay import Meta, Progress, frames_from, read_meta, redo
from lowwater.engine.state import State
from lowwater.engine.tickets import again
from lowwater.engine.transactions import Isolation, Transaction
from lowwater.engine.values import ValueReader, segments_of
from lowwater.errors import (
    AlreadyExists,
    Busy,
    Closed,
    ConditionFailed,
    Corrupt,
    InputError,
    InternalError,
    LogPoisoned,
    LowwaterError,
    NotEmpty,
    NotFound,
    VersionGone,
)

_new = tuple.__new__
_pack_fixed = format.FIXED.pack

LIMIT_DEFAULT = 1000
_NO_OBJECT = Object("", "", b"", None, 0, 0)
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


class Database:
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
        self._locks = LockManager(seams.clock)
        self._transactions = itertools.count(1)
        self._looked_at_bytes = 0
        self._flusher = Flusher(
            state,
            identity={
                "cluster_id": meta.cluster_id,
                "salt": meta.salt,
                "page_keys": meta.page_keys,
                "inline_bytes_max": meta.inline_bytes_max,
            },
            make_durable=self._make_durable,
        )
        state.horizon = meta.horizon
        state.snapshots = dict(meta.snapshots)
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
        state = self._state
        bytes_max = state.pool_bytes_max * DIRTY_MAX
        if state.dirty_bytes < bytes_max:
            return
        deadline_s = None if timeout_s is None else self._now_s() + timeout_s
        while state.dirty_bytes >= bytes_max:
            self._help()
            if deadline_s is not None and self._now_s() >= deadline_s:
                raise Busy("memory is full of changes that are not in pages yet", path=self._log.directory)

    # ------------------------------------------------------------------ writing

    def _require_writable(self) -> None:
        if self._closed:
            raise Closed("the database is closed", path=self._log.directory)
        if self._failure is not None:
            raise again(self._failure)

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
                for seq, payload, segment_first, offset in _placed(pieces, payloads, chain_before):
                    state.apply(seq, payload, segment_first, offset)
        except BaseException as error:
            # The entries are in the log: what memory has of them is not known.
            self._fail(InternalError(f"an entry could not be applied: {error}"))
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
        if state.dirty_bytes > self._looked_at_bytes:
            self._looked_at_bytes = state.dirty_bytes + LOOK_AFTER_BYTES
            self._task.wake()
        try:
            return int(self._wal.wait(ticket))
        except LowwaterError as error:
            self._fail(error)
            raise

    def create_bucket(self, bucket: str) -> int:
        """Make a bucket. Raises AlreadyExists where there is one."""
        name = format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)

        def decide() -> None:
            if bucket in self._state.buckets:
                self._await(self._state.buckets_seq)
                raise AlreadyExists(f"there is a bucket {bucket!r} already", hint="choose another name")

        entry = CreateBucket(bucket)
        del name
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

    def buckets(self) -> list[str]:
        self._require_open()
        self._await(self._state.buckets_seq)
        return sorted(self._state.buckets)

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
        plain = Put(bucket, key, value, metadata).encode(0)
        request_hash = blake3(plain + cbor2.dumps(["if_seq", if_seq], canonical=True)).digest(16)

        def decide() -> None:
            self._bucket_check(bucket)()
            found, _ = self._newest(bucket, key)
            seq = 0 if found is None else found.seq
            if seq != if_seq:
                raise ConditionFailed(
                    f"{key!r} has the seq {seq}, not {if_seq}" if seq else f"there is no {key!r}", seq=seq
                )

        def encode(_: Chain, time_us: int) -> list[bytes]:
            return [_encode_put(bucket, key, value, metadata, time_us, Extras(request_hash=request_hash))]

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
        request = cbor2.dumps(["copy", bucket, key, to_bucket, to_key], canonical=True)
        extras = Extras(request_hash=blake3(request).digest(16))
        name = format.encode_name(to_bucket, "bucket", BUCKET_BYTES_MAX)
        to_name = format.encode_name(to_key, "key", KEY_BYTES_MAX)
        payload_of: Callable[[int], bytes]

        def decide() -> None:
            nonlocal payload_of
            self._bucket_check(to_bucket)()
            found, _ = self._newest(bucket, key)
            if found is None:
                raise NotFound(f"there is no {key!r} in the bucket {bucket!r}")
            metadata = format.encode_metadata(found.metadata)
            value, all_extras = found.value, extras
            if len(value) > self._state.inline_bytes_max:
                self._await(found.seq)
                place = self._state.place_of(encode_key(bucket.encode(), key.encode()))
                seq = self._values.frame_seq(place)
                all_extras = extras._replace(value_ref=ValueRef(seq, len(value), blake3(value).digest()))
                value = b""

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

    @property
    def directory(self) -> str:
        """Where the log is."""
        return self._log.directory

    def _bucket_check(self, bucket: str) -> Callable[[], None]:
        def check() -> None:
            self._prefix(bucket)

        return check

    # ------------------------------------------------------------------ reading

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("the database is closed", path=self._log.directory)

    def _prefix(self, bucket: str) -> bytes:
        try:
            return self._state.prefixes[bucket]
        except (KeyError, TypeError):
            format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
            self._require_open()
            self._await(self._state.buckets_seq)
            raise NotFound(
                f"there is no bucket {bucket!r}", hint="make it with create_bucket, or look at buckets()"
            ) from None

    def _await(self, seq: int) -> None:
        """Return once an answer that rests on `seq` can be given."""
        if self._wal.durable_seq < seq:
            self._log.sync()
            if self._wal.durable_seq < seq:
                raise again(self._failure or self._wal.failure or Closed("the log is closed"))

    def _newest(self, bucket: str, key: str) -> tuple[Object | None, int]:
        encoded = self._prefix(bucket) + format.encode_name(key, "key", KEY_BYTES_MAX)
        found, rests_on = self._state.newest(encoded, bucket, key, self._wal.durable_seq)
        if rests_on > self._wal.durable_seq:
            self._await(rests_on)
        return found, rests_on

    def get(self, bucket: str, key: str, at: int | None = None) -> Object:
        """The newest version of a key, or the newest one not above the seq `at`. Raises NotFound."""
        try:
            ready = self._state.ready(self._state.prefixes[bucket] + key.encode())
        except (KeyError, AttributeError, TypeError, UnicodeEncodeError):
            ready = None
        if ready is not None and at is None and not self._closed:
            return ready
        self._require_open()
        found = self._newest(bucket, key)[0] if at is None else self._read_at(bucket, key, at)
        if found is None:
            raise NotFound(f"there is no {key!r} in the bucket {bucket!r}" + (f" at {at}" if at else ""))
        return found

    def read(self, bucket: str, key: str, seq: int) -> Object:
        """`get` with a seq, as the engine's interface names it."""
        return self.get(bucket, key, at=seq)

    def head(self, bucket: str, key: str, at: int | None = None) -> Head:
        """What `get` returns, without the value."""
        return _head(self.get(bucket, key, at))

    def _read_at(self, bucket: str, key: str, at: int) -> Object | None:
        encoded = encode_key(
            format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX),
            format.encode_name(key, "key", KEY_BYTES_MAX),
        )
        pinned = self._pin(at)
        try:
            return self._state.at(encoded, bucket, key, at)
        finally:
            self._state.unpin(pinned)

    def _pin(self, at: int | None) -> int:
        """Pin a seq that can be read, and wait until what it shows is durable."""
        state = self._state
        with state.lock:
            if at is None:
                pinned = state.pin()
            else:
                if not isinstance(at, int) or isinstance(at, bool) or at < 0:
                    raise InputError(f"{at!r:.80} is no seq", hint="give the seq of an entry")
                if at > state.applied:
                    raise VersionGone(
                        f"seq {at} was not written yet", seq=at, hint=f"the last one is {state.applied}"
                    )
                if at < state.floor:
                    raise VersionGone(f"versions below {state.floor} were dropped", seq=at)
                pinned = state.pin(at)
        try:
            self._await(pinned)
        except BaseException:
            state.unpin(pinned)
            raise
        return pinned

    def scan(
        self, bucket: str, prefix: str = "", *, start_after: str | None = None, at: int | None = None
    ) -> Iterator[Object]:
        """The objects of a bucket in the order of their keys, all as of one moment."""
        self._require_open()
        if at is None:
            self._prefix(bucket)
        name = format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
        low = encode_key(name, _as_text(prefix, "prefix"))
        high = after_prefix(low)
        if start_after is not None:
            low = max(low, encode_key(name, _as_text(start_after, "key")) + b"\0")
        found = self._scan(bucket, low, high, self._pin(at))
        next(found)  # into the block that unpins, which a generator that never began does not leave
        return found

    def _scan(self, bucket: str, low: bytes, high: bytes, pinned: int) -> Iterator[Object]:
        try:
            yield _NO_OBJECT
            yield from self._state.scan(bucket, low, high, pinned)
        finally:
            self._state.unpin(pinned)

    def list(
        self,
        bucket: str,
        prefix: str = "",
        delimiter: str | None = None,
        start_after: str | None = None,
        limit: int = LIMIT_DEFAULT,
        at: int | None = None,
    ) -> Page:
        """One page of the keys that begin with `prefix`. Keys that have `delimiter` after it come as the
        prefix that ends with it, once each, and count as one."""
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise InputError(f"the limit is {limit!r:.80}", hint="give a whole number above 0")
        if delimiter is not None:
            _as_text(delimiter, "delimiter")
        self._require_open()
        if at is None:
            self._prefix(bucket)
        name = format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
        low = encode_key(name, _as_text(prefix, "prefix"))
        high = after_prefix(low)
        if start_after is not None:
            after = encode_key(name, _as_text(start_after, "key"))
            skips = delimiter and start_after.endswith(delimiter) and len(start_after) > len(prefix)
            low = max(low, after_prefix(after) if skips else after + b"\0")
        objects: list[Head] = []
        prefixes: list[str] = []
        pinned = self._pin(at)
        last: str | None = None
        try:
            while low < high:
                found = None
                for found in self._state.scan(bucket, low, high, pinned):
                    if len(objects) + len(prefixes) == limit:
                        return Page(objects, prefixes, last)
                    end = found.key.find(delimiter, len(prefix)) if delimiter else -1
                    if end >= 0:
                        assert delimiter is not None
                        last = found.key[: end + len(delimiter)]
                        prefixes.append(last)
                        low = after_prefix(encode_key(name, last.encode()))
                        break
                    last = found.key
                    objects.append(_head(found))
                else:
                    break
        finally:
            self._state.unpin(pinned)
        return Page(objects, prefixes, None)

    # ------------------------------------------------------------------ the log, and where things stand

    def log(self, start: Start = "earliest", *, follow: bool = False) -> Iterator[Entry]:
        """The durable entries from `start` on."""
        self._require_open()
        return self._log.read(start, follow=follow)

    def marks(self) -> Marks:
        durable = self._wal.durable_seq
        applied = self._state.applied
        purged = max(self._log.seq_first - 1, 0)
        return Marks(max(applied, self._log.seq_last), applied, min(durable, applied), purged, purged, purged)

    def root(self, seq: int | None = None) -> str:
        """The fingerprint of the content as of `seq`, or now."""
        self._require_open()
        pinned = self._pin(seq)
        try:
            with self._state.lock:
                buckets = self._buckets_at(pinned)
            objects = self._content(buckets, pinned)
            return content.root(
                objects,
                boundaries=self._state.boundaries,
                lists=Boundaries(self._salt, self._page_keys * content.LIST_BLOCKS),
                inline_bytes_max=self._state.inline_bytes_max,
            )
        finally:
            self._state.unpin(pinned)

    def _buckets_at(self, seq: int) -> Sequence[Object]:
        return [*self._state.scan("", b"\0", b"\1", seq)]

    def _content(self, buckets: Sequence[Object], seq: int) -> Iterator[tuple[bytes, Object]]:
        for found in buckets:
            yield encode_key(b"", found.key.encode()), found
        # The order of their keys: shorter names first.
        for found in sorted(buckets, key=lambda each: (len(each.key.encode()), each.key)):
            name = found.key.encode()
            low = encode_key(name, b"")
            for each in self._state.scan(found.key, low, after_prefix(low), seq):
                yield encode_key(name, each.key.encode()), each

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

    def snapshots(self) -> dict[str, int]:
        """The snapshots by name, with their seqs."""
        return dict(self._state.snapshots)

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

    def metrics(self) -> CollectorRegistry:
        """The registry with everything that is measured here."""
        return self._log.registry

    def _locate(self, seq: int) -> tuple[int, int]:
        """Where the frame with this seq lies: its segment's first seq, and its offset."""
        for run in frames_from(self._log, self._seams.files, seq):
            if run:
                if run[0].seq == seq:
                    return run[0].segment_first, run[0].offset
                break
        raise Corrupt(f"the log does not hold seq {seq}, which has a value", seq=seq)

    def aio(self) -> AsyncDatabase:
        """The same calls for coroutines."""
        return AsyncDatabase(self)

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

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_database(
    log: Log,
    store: PageStore,
    *,
    seams: Seams,
    options: EngineOptions,
    progress: Progress | None = None,
) -> Database:
    """By the table of `replay.py`."""
    meta = read_meta(store.read_meta(), log.directory)
    if meta is None:
        meta = _meta_of_log(log)
    elif meta.cluster_id != log.chain.cluster_id:
        raise Corrupt("the pages belong to another cluster than the log", path=log.directory)
    elif log.seq_durable < meta.applied:
        raise Corrupt(
            f"the log ends at {log.seq_durable}, and the pages hold entries up to {meta.applied}",
            path=log.directory,
            seq=meta.applied,
        )
    elif log.seq_first > meta.redo_seq:
        raise Corrupt(
            f"the log begins at {log.seq_first}, and the pages need it from {meta.redo_seq} on",
            path=log.directory,
        )
    return Database(log, store, meta, seams=seams, options=options, progress=progress)


def _meta_of_log(log: Log) -> Meta:
    """For a database without pages: all of it is in the log."""
    creation = log.creation
    if creation is None:
        raise Corrupt(
            "there are no pages, and the log's beginning is not here",
            path=log.directory,
            hint="restore it from the archive",
        )
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
    )


def _placed(
    pieces: Sequence[Piece], payloads: Sequence[bytes], chain_before: Chain
) -> Iterator[tuple[int, bytes, int, int]]:
    """Each payload with its seq and the place of its frame. The writer may have raised its time."""
    segment_first = chain_before.seq_first
    for piece in pieces:
        if piece.starts_segment is not None:
            segment_first = piece.seq_first
        data, base = piece.data, piece.offset
        for position in piece.positions:
            at = position - base
            seq, length, _ = format.FRAME.unpack_from(data, at)
            yield (
                seq,
                data[at + format.FRAME_BYTES : at + format.FRAME_BYTES + length],
                segment_first,
                position,
            )


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


def _as_text(text: Any, what: str) -> bytes:
    return format.encode_name(text, what, KEY_BYTES_MAX, empty_allowed=True)


def _head(found: Object) -> Head:
    return Head(found.bucket, found.key, len(found.value), found.metadata, found.seq, found.time_us)
