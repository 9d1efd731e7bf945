"""The reading calls of a database and of a fed engine.

Always true:
  - what a call returns is durable, or it waits until it is;
  - a scan, a page of a listing and a root show one moment, which is pinned while they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lowwater.engine import content, format
from lowwater.engine.core import Core
from lowwater.engine.format import BUCKET_BYTES_MAX, KEY_BYTES_MAX, ValueRef
from lowwater.engine.pages import Boundaries, after_prefix, bucket_range, encode_key
from lowwater.engine.records import VALUE_PLACE, Head, Object, Page
from lowwater.engine.requests import Copied
from lowwater.errors import InputError, NotFound, VersionGone

LIMIT_DEFAULT = 1000
_NO_OBJECT = Object("", "", b"", None, 0, 0)


class Reading(Core):
    def buckets(self) -> list[str]:
        self._require_open()
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
                f"there is no bucket {bucket!r}", hint="make it with create_bucket, or look at buckets()"
            ) from None

    def _newest(self, bucket: str, key: str) -> tuple[Object | None, int]:
        encoded = self._prefix(bucket) + format.encode_name(key, "key", KEY_BYTES_MAX)
        found, rests_on = self._state.newest(encoded, bucket, key, self._wal.durable_seq)
        if rests_on > self._wal.durable_seq:
            self._await(rests_on)
        return found, rests_on

    def _copied(self, bucket: str, key: str) -> Copied:
        """With the state's lock: what a copy of this key holds, which is there."""
        state = self._state
        encoded = state.prefixes[bucket] + key.encode()
        found, _ = state.newest(encoded, bucket, key, self._wal.durable_seq)
        assert found is not None, "what is copied is there"
        metadata = format.encode_metadata(found.metadata)
        if len(found.value) <= state.inline_bytes_max:
            return metadata, found.value, None
        self._await(found.seq)  # the place is read from the log's file
        length, value_hash = VALUE_PLACE.unpack(place := state.place_of(encoded))[2:]
        return metadata, b"", ValueRef(length, self._values.frame_seq(place), value_hash)

    def get(self, bucket: str, key: str, at: int | None = None) -> Object:
        """The newest version of a key, or the newest one not above the seq `at`. Raises NotFound."""
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
                found, rests_on = state.newest(encoded, bucket, key, durable_seq)
                if found is not None and rests_on <= durable_seq:
                    return found
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
            for each in self._state.scan(found.key, *bucket_range(name), seq):
                yield encode_key(name, each.key.encode()), each

    def snapshots(self) -> dict[str, int]:
        """The snapshots by name, with their seqs."""
        return dict(self._state.snapshots)


def _as_text(text: Any, what: str) -> bytes:
    return format.encode_name(text, what, KEY_BYTES_MAX, empty_allowed=True)


def _head(found: Object) -> Head:
    return Head(found.bucket, found.key, len(found.value), found.metadata, found.seq, found.time_us)
