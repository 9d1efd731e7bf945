"""The reading calls of a database and of a fed engine.

Always true:
  - what a call returns is durable, or it waits until it is;
  - a scan, a page of a listing and a root show one moment, which is pinned while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import chain
from typing import Any

from lowwater.engine.checkpoint import content
from lowwater.engine.checkpoint.check_checkpoints import check_checkpoints
from lowwater.engine.checkpoint.checkpoints import StoredCheckpoint
from lowwater.engine.database.core import Core
from lowwater.engine.database.listing import LIMIT_DEFAULT, Listing, as_text, head_of
from lowwater.engine.database.tier import OlderVersions
from lowwater.engine.format import format
from lowwater.engine.format.format import BUCKET_BYTES_MAX, KEY_BYTES_MAX, ValueRef
from lowwater.engine.format.keys import after_prefix, encode_key
from lowwater.engine.format.moments import At, require_seq, time_us_of, timeout_of
from lowwater.engine.format.page import REFERENCE
from lowwater.engine.format.records import VALUE_PLACE, Head, Object, Page, PlaceReader, Unread
from lowwater.engine.log.check import Finding
from lowwater.engine.state.away import PageAway
from lowwater.engine.state.keeping import Pin, Snapshot
from lowwater.engine.state.requests import Copied
from lowwater.engine.state.transaction_table import TransactionRow
from lowwater.errors import InputError, LowwaterError, NotFound, RetryError, VersionGone

_Objects = Callable[[str, bytes, bytes, PlaceReader | None], Iterator[Object]]


class Reads(Core):
    def buckets(self, at: At | None = None) -> list[str]:
        """Return the names of the buckets, in order: now, or as of a seq or time."""
        self._require_open()
        if at is not None:
            with self._moment(at) as objects:
                return sorted(found.key for found in objects("", b"\0", b"\1", None))
        self._await(self._state.buckets_seq)
        return sorted(self._state.buckets)

    def _prefix(self, bucket: str) -> bytes:
        try:
            return self._state.prefixes[bucket]
        except (KeyError, TypeError):
            format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
            self._require_open()
            self._await(self._state.buckets_seq)
            raise NotFound(
                f"there is no bucket {bucket!r}",
                hint="make it with create_bucket or `lowwater put --create`, or look at buckets()",
            ) from None

    def _newest(self, bucket: str, key: str, reader: PlaceReader | None = None) -> tuple[Object | None, int]:
        encoded = self._prefix(bucket) + format.encode_name(key, "key", KEY_BYTES_MAX)
        found, rests_on = self._state.newest(encoded, bucket, key, self._wal.durable_seq, reader)
        if rests_on > self._wal.durable_seq:
            self._await(rests_on)
        return found, rests_on

    def _newest_here(self, bucket: str, key: str, reader: PlaceReader | None = None) -> Object | None:
        """Return the newest version of a key, or None where there is none. A page that is away is read, so
        the caller holds no lock."""
        self._refuse_inside()
        return self._state.away.call(lambda: self._newest(bucket, key, reader))[0]

    def _copied(self, bucket: str, key: str, row: TransactionRow | None = None) -> Copied:
        """With the state's lock: what a copy of this key holds, which is there for this transaction."""
        state = self._state
        encoded = state.prefixes[bucket] + key.encode()
        if row is None:
            found = state.newest_version(encoded)
        else:
            found = state.newest_version(encoded, seq=row.snapshot_seq, viewer=row.txn)
        assert found is not None, "what is copied is there"
        _, seq, _, flags, metadata, value = found
        if not flags & REFERENCE:
            return metadata, value, None
        self._await(seq)  # the place is read from the log's file
        length, value_hash = VALUE_PLACE.unpack(value)[2:]
        return metadata, b"", ValueRef(length, self._frame_seq(value), value_hash)

    def get(self, bucket: str, key: str, at: At | None = None, *, wait_s: float | None = None) -> Object:
        """Return the newest version of a key, or the newest one not above the seq or time `at`. Raise
        NotFound where there is none, and VersionGone where that cannot be told any more. Wait up to `wait_s`
        seconds for a seq that is still to come, then raise TimedOut. Without `wait_s`, raise VersionGone."""
        if at is None and not self._closed:
            # What is wrong with the arguments is told below.
            state = self._state
            try:
                encoded = state.prefixes[bucket] + key.encode()
            except (KeyError, AttributeError, TypeError, UnicodeEncodeError):
                pass
            else:
                found = state.ready(encoded)
                if found is not None:
                    return found
                durable_seq = self._wal.durable_seq
                try:
                    found, rests_on = state.newest(encoded, bucket, key, durable_seq)
                except PageAway:
                    pass  # it is read below
                else:
                    if found is not None and rests_on <= durable_seq:
                        return found
        self._require_open()
        found = self._newest_here(bucket, key) if at is None else self._read_at(bucket, key, at, wait_s)
        if found is None:
            raise NotFound(f"there is no {key!r} in the bucket {bucket!r}" + (f" at {at}" if at else ""))
        return found

    def read(self, bucket: str, key: str, seq: int, *, wait_s: float | None = None) -> Object:
        """Return the newest version of a key that is not above `seq`. It is `get`, under the name that the
        engine's interface has."""
        return self.get(bucket, key, at=seq, wait_s=wait_s)

    def head(self, bucket: str, key: str, at: At | None = None, *, wait_s: float | None = None) -> Head:
        """Return what `get` returns, without the value. A large value is not read."""
        return head_of(self._find(bucket, key, at, wait_s))

    def read_range(
        self,
        bucket: str,
        key: str,
        start: int,
        length: int,
        at: At | None = None,
        *,
        wait_s: float | None = None,
    ) -> bytes:
        """Return `length` bytes of a value from `start` on, fewer if the value ends before. Raise InputError
        for a `start` beyond the end; at the end there is nothing more to read. Of a large value in a sealed
        segment, only the blocks around the part are read, and each is verified."""
        for number, what in ((start, "start"), (length, "length")):
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise InputError(f"the {what} is {number!r:.80}", hint="give a whole number from 0 up")
        found = self._find(bucket, key, at, wait_s)
        size = len(found.value)
        if start > size:
            raise InputError(
                f"{key!r} has {size:,} bytes, and none at {start:,}", hint="head() says how many there are"
            )
        stop = min(start + length, size)
        value: Any = found.value
        if isinstance(value, Unread):
            return self._values.read_range(value.place, start, stop)
        return found.value[start:stop]

    def _find(self, bucket: str, key: str, at: At | None, wait_s: float | None) -> Object:
        """An object, whose value is an `Unread` where it is a large one."""
        self._require_open()
        if at is None:
            found = self._newest_here(bucket, key, Unread)
        else:
            found = self._read_at(bucket, key, at, wait_s, Unread)
        if found is None:
            raise NotFound(f"there is no {key!r} in the bucket {bucket!r}" + (f" at {at}" if at else ""))
        return found

    def _read_at(
        self, bucket: str, key: str, at: At, wait_s: float | None, reader: PlaceReader | None = None
    ) -> Object | None:
        encoded = encode_key(
            format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX),
            format.encode_name(key, "key", KEY_BYTES_MAX),
        )
        try:
            pinned = self._pin(at, wait_s)
            try:
                return self._state.away.call(lambda: self._state.at(encoded, bucket, key, pinned.seq, reader))
            finally:
                self._state.unpin(pinned)
        except VersionGone as gone:
            older, seq = self._older_than_here(at, gone)
            return older.at(bucket, key, seq)

    def _older_than_here(self, at: At | None, gone: VersionGone) -> tuple[OlderVersions, int]:
        """Who knows what is gone here, and the seq that is meant. Raises `gone` where nobody does."""
        if self._older is None or at is None:
            raise gone
        self._refuse_in_handler()
        seq = self.seq_at(at) if isinstance(at, datetime) else at
        if seq > self._state.applied:
            raise gone
        self._await(seq)
        return self._older, seq

    @contextmanager
    def _moment(self, at: At | None, wait_s: float | None = None) -> Iterator[_Objects]:
        """What gives the live objects between two encoded keys, as of one moment."""
        try:
            pinned = self._pin(at, wait_s)
        except VersionGone as gone:
            older, seq = self._older_than_here(at, gone)
            yield lambda bucket, low, high, _: older.scan(bucket, low, high, seq)
            return
        try:
            yield lambda bucket, low, high, reader: chain.from_iterable(
                self._lists_at(bucket, low, high, pinned.seq, reader)
            )
        finally:
            self._state.unpin(pinned)

    def _lists_at(
        self, bucket: str, low: bytes, high: bytes, pinned: int, reader: PlaceReader | None = None
    ) -> Iterator[Sequence[Object]]:
        """Yield the objects from `low` to below `high` in lists, as of the seq `pinned`, which is pinned.
        Where a limit has taken versions of some keys, what is left is read from elsewhere."""
        last: str | None = None
        try:
            for objects in self._state.scan_lists(bucket, low, high, pinned, reader):
                if objects:
                    last = objects[-1].key
                yield objects
        except VersionGone as gone:
            older, seq = self._older_than_here(pinned, gone)
            if last is not None:
                low = encode_key(bucket.encode(), last.encode()) + b"\0"
            yield from ([each] for each in older.scan(bucket, low, high, seq))

    def _pin(self, at: At | None, wait_s: float | None = None) -> Pin:
        """Pin a moment that can be read, and wait until what it shows is durable."""
        self._refuse_inside()
        state = self._state
        timeout_s = timeout_of(wait_s)
        if isinstance(at, datetime):
            at = self.seq_at(at)
        with state.lock:
            pinned = state.pin() if at is None else self._pin_seq(require_seq(at), timeout_s)
        try:
            self._await(pinned.seq)
        except BaseException:
            state.unpin(pinned)
            raise
        return pinned

    def _pin_seq(self, seq: int, timeout_s: float | None) -> Pin:
        """With the state's lock."""
        state = self._state
        if seq > state.applied:
            if timeout_s is None:
                raise VersionGone(
                    f"seq {seq} was not written yet", seq=seq, hint=f"the last one is {state.applied}"
                )
            # What comes above it before this thread runs again takes nothing of it away.
            pinned = state.pin(seq)
            try:
                self._wait_applied(seq, timeout_s)
            except BaseException:
                state.unpin(pinned)
                raise
            return pinned
        if seq < state.floor:
            raise VersionGone(f"versions below {state.floor} were dropped", seq=seq)
        if seq < state.pages_from:
            raise VersionGone(
                f"what is older than {state.pages_from} is not here",
                seq=seq,
                hint="these pages were made from a checkpoint of that seq: older versions are in the archive",
            )
        keeping = state.keeping
        if seq < keeping.exact_from and not keeping.is_exact(seq, state.applied, state.snapshots):
            raise VersionGone(f"not all versions below {keeping.exact_from} are kept", seq=seq)
        return state.pin(seq)

    def seq_at(self, moment: datetime) -> int:
        """Return the seq of the last entry not after `moment`. Raise VersionGone where there is none."""
        self._require_open()
        time_us = time_us_of(moment)
        self._refuse_inside()
        with self._state.lock:
            if self._wal.chain.time_us <= time_us:
                return self._state.applied
        if self._wal.durable_time_us <= time_us:
            self._log.sync()  # times never fall: all up to that time are durable once a later one is
        return self._log.seq_at_us(time_us)

    def scan(
        self,
        bucket: str,
        prefix: str = "",
        *,
        start_after: str | None = None,
        at: At | None = None,
        wait_s: float | None = None,
    ) -> Iterator[Object]:
        """Return the objects of a bucket in the order of their keys, all as of one moment."""
        self._require_open()
        if at is None:
            self._prefix(bucket)
        name = format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
        low = encode_key(name, as_text(prefix, "prefix"))
        high = after_prefix(low)
        if start_after is not None:
            low = max(low, encode_key(name, as_text(start_after, "key")) + b"\0")
        found = self._scan(bucket, low, high, at, wait_s)
        next(found)  # into the block that unpins, which a generator that never began does not leave
        return ScanBelow(found)

    def _scan(
        self, bucket: str, low: bytes, high: bytes, at: At | None, wait_s: float | None
    ) -> Generator[Sequence[Object], None, None]:
        try:
            pinned = self._pin(at, wait_s)
        except VersionGone as gone:
            older, seq = self._older_than_here(at, gone)
            yield ()
            yield from ([each] for each in older.scan(bucket, low, high, seq))
            return
        try:
            yield ()
            yield from self._lists_at(bucket, low, high, pinned.seq)
        finally:
            self._state.unpin(pinned)

    def list(
        self,
        bucket: str,
        prefix: str = "",
        delimiter: str | None = None,
        start_after: str | None = None,
        limit: int = LIMIT_DEFAULT,
        at: At | None = None,
        *,
        wait_s: float | None = None,
    ) -> Page:
        """Return one page of the keys that begin with `prefix`. Keys that have `delimiter` after it are
        grouped: each group comes once, as the prefix that ends with the delimiter, and counts as one key."""
        listing = Listing(bucket, prefix, delimiter, start_after, limit)
        self._require_open()
        if at is None:
            self._prefix(bucket)
        with self._moment(at, wait_s) as objects:
            return listing.page(lambda low, high: objects(bucket, low, high, Unread))

    def root(self, seq: At | None = None, *, wait_s: float | None = None) -> str:
        """Return the fingerprint of the content as of a seq or a time, or now. For what is gone here, return
        the recorded one where there was a checkpoint; else read all of the content as of then."""
        self._require_open()
        try:
            return self._root_here(seq, wait_s)
        except VersionGone as gone:
            older, older_seq = self._older_than_here(seq, gone)
            return older.root(older_seq) or self._root_of_older(older, older_seq)

    def _root_here(self, at: At | None, wait_s: float | None) -> str:
        pinned = self._pin(at, wait_s)
        try:
            base = self._checkpoints.not_above(pinned.seq)
            try:
                return self._root_at(pinned.seq, base)
            except LowwaterError as error:
                if base is None or isinstance(error, RetryError | VersionGone):
                    raise
                # A checkpoint that is damaged, of which `check()` tells, or removed meanwhile, is no reason
                # not to read what it was made of.
                return self._root_at(pinned.seq, None)
        finally:
            self._state.unpin(pinned)

    def _root_at(self, seq: int, base: StoredCheckpoint | None) -> str:
        blocks = content.blocks_at(self._state, seq, base=base)
        return content.root(blocks, content.list_boundaries(self._salt, self._page_keys)).hex()

    def _root_of_older(self, older: OlderVersions, seq: int) -> str:
        def objects() -> Iterator[tuple[bytes, Object]]:
            buckets = [
                (encode_key(b"", each.key.encode()), each) for each in older.scan("", b"\0", b"\1", seq)
            ]
            yield from buckets
            for low, name in sorted((encode_key(each.key.encode(), b""), each.key) for _, each in buckets):
                for found in older.scan(name, low, after_prefix(low), seq):
                    yield low + found.key.encode(), found

        lists = content.list_boundaries(self._salt, self._page_keys)
        state = self._state
        return content.root_of_objects(objects(), state.boundaries, lists, state.inline_bytes_max).hex()

    def _check(self, *, away: bool) -> Iterator[Finding]:
        yield from super()._check(away=away)
        yield from check_checkpoints(
            self._seams.files,
            self._checkpoints.data_directory,
            cluster_id_at=self._log.cluster_id_at,
            begins_block=self._state.boundaries.is_boundary,
            begins_list=content.list_boundaries(self._salt, self._page_keys).is_boundary,
        )
        newest = next(iter(self._checkpoints.complete), None)
        if newest is not None:
            yield from self._check_against_state(newest)

    def _check_against_state(self, newest: StoredCheckpoint) -> Iterator[Finding]:
        """Whether a checkpoint holds what the state shows of its seq, where that can still be read."""
        try:
            pinned = self._pin(newest.seq)
        except VersionGone:
            return
        try:
            expected = self._root_at(pinned.seq, None)
            root = newest.root
        except LowwaterError:
            return  # what is wrong with pages, or with it, was found before
        finally:
            self._state.unpin(pinned)
        if root != expected:
            what = "the newest checkpoint differs from the state that it is of"
            yield Finding("error", what, newest.path, newest.seq)

    def snapshots(self) -> dict[str, Snapshot]:
        """Return the snapshots by name, each with its seq and when it ends."""
        self._require_open()
        self._refuse_inside()
        state = self._state
        with state.lock:
            ends = state.keeping.expires_us
            return {name: Snapshot(seq, ends.get(name)) for name, seq in state.snapshots.items()}


class ScanBelow(Iterator[Object]):
    """The objects of a scan. A caller that leaves the scan before its end can `close` it. Until then its
    moment is pinned."""

    __slots__ = ("_lists", "_objects")

    def __init__(self, lists: Generator[Sequence[Object], None, None]) -> None:
        self._lists = lists
        self._objects = chain.from_iterable(lists)

    def __iter__(self) -> Iterator[Object]:
        return self._objects  # itself, without a call for each object

    def __next__(self) -> Object:
        return next(self._objects)

    def close(self) -> None:
        self._lists.close()
        self._objects = chain()
