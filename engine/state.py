"""The state: what the entries applied so far make of buckets and keys, in memory and in pages.

Always true:
  - it is a function of the entries applied, in their order; nothing here decides whether an entry has an
    effect, that is written in its frame;
  - `applied` is the seq of the last entry applied, and changes together with its effects, under `lock`;
  - versions at or above `floor` can be read: dropping one that a pin or the horizon needs is a bug;
  - what a read returns may rest on entries that are not durable yet: `rests_on` says up to which.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter

from lowwater.engine import format
from lowwater.engine.cleanpages import CleanPages
from lowwater.engine.entries import decode_body, decode_payload
from lowwater.engine.format import Flag, Kind
from lowwater.engine.pages import REFERENCE, TOMBSTONE, Boundaries, Page, decode_page, encode_key
from lowwater.engine.pagestore import PageStore
from lowwater.engine.ranges import Layout, Range, RangeMap
from lowwater.engine.records import (
    Object,
    PlaceReader,
    Record,
    encoded_key_of,
    is_deletion,
    object_of,
    page_version,
)
from lowwater.errors import Corrupt, InternalError

_new = tuple.__new__
_DATA_KINDS = frozenset({Kind.CREATE_BUCKET, Kind.DELETE_BUCKET, Kind.PUT, Kind.DELETE, Kind.COPY})

# What a record and a ready object cost in memory besides their bytes.
RECORD_OVERHEAD_BYTES = 200
OBJECT_OVERHEAD_BYTES = 400


# The smallest page key: those of the buckets' own records begin with it.
LOWEST = b"\0"
# Of so many keys it is known that they were read: an object is kept when it is read again.
ASKED_FOR_MAX = 65_536
# How many pages a range has after a split.
RANGE_PAGES = 96


class State:
    def __init__(
        self,
        store: PageStore,
        boundaries: Boundaries,
        *,
        inline_bytes_max: int,
        place_reader: PlaceReader,
        pool_bytes_max: int,
    ) -> None:
        self.lock = threading.RLock()
        self.store = store
        self.boundaries = boundaries
        self.inline_bytes_max = inline_bytes_max
        self.pool_bytes_max = pool_bytes_max
        self._place_reader = place_reader
        self.applied = 0
        # Where the frame with a seq lies.
        self.locate: Callable[[int], tuple[int, int]] = _nowhere
        keys = list(store.page_keys())
        self.map = RangeMap(_ranges_of(keys))
        self.buckets: dict[str, Object] = {}
        self.prefixes: dict[str, bytes] = {}
        self.buckets_seq = 0  # of the last change of a bucket
        # None: nothing is kept but for pins; else versions back to this seq are.
        self.horizon: int | None = None
        self.low_water_mark = 0  # as it was told
        self.snapshots: dict[str, int] = {}  # the log's pins, by name
        self.versions_seq = 0  # both are those as of this seq, or of `applied` where that is higher
        self._pins: dict[int, int] = {}  # this process' own, with their number
        self.keeps_older = False
        self.dirty_bytes = 0
        self.clean = CleanPages()
        self.limit_clean()
        self._ready_new: dict[bytes, Object] = {}
        self._ready_old: dict[bytes, Object] = {}
        self._ready_bytes = 0
        self._asked_for: set[bytes] = set()

    # ------------------------------------------------------------------ applying (with the lock)

    def apply(self, seq: int, payload: bytes, segment_first: int = 0, offset: int = 0) -> None:
        """One frame. `segment_first` and `offset` say where its value lies."""
        kind = payload[0]
        flags = payload[1] | payload[2] << 8
        if not flags & Flag.REFUSED:
            if kind in _DATA_KINDS:
                key = encoded_key_of(payload)
                version_seq = seq
                if flags & Flag.GROUP:
                    extras, _ = format.decode_extras(flags, payload, format.FIXED_BYTES, len(payload))
                    assert extras.group_seq_last is not None
                    version_seq = extras.group_seq_last
                if flags & Flag.VALUE_REF:
                    # A copy: what lies there is what it was copied from.
                    segment_first, offset = self.locate(_referred_seq(payload))
                self._put((key,), ((version_seq, payload, segment_first, offset),), seq)
                if key[0] == 0:
                    self._apply_bucket(key, version_seq, payload)
            elif kind in (Kind.HORIZON, Kind.PIN, Kind.UNPIN):
                # What redo repeats of these is in force already: going through it again would lift the
                # floor in between, where a pin that kept it down is gone since.
                if seq > self.versions_seq:
                    self._apply_versions_entry(seq, kind, payload)
            elif kind in (Kind.BEGIN, Kind.COMMIT, Kind.ABORT) or flags & Flag.TXN:
                raise InternalError("transactions are not in this version", seq=seq)
        self.applied = seq

    def apply_plain(self, keys: Sequence[bytes], records: Sequence[Record], seq_last: int) -> None:
        """Puts and deletes of keys, each with its record, the last of which is `seq_last`."""
        self._put(keys, records)
        self.applied = seq_last

    def _put(self, keys: Sequence[bytes], records: Sequence[Record], frame_seq: int = 0) -> None:
        """New versions. `frame_seq` is the seq of their frame where it is not theirs, as in a group."""
        find = self.map.find
        ready_new, ready_old = self._ready_new, self._ready_old
        keeps_older = self.keeps_older
        added = 0
        for key, record in zip(keys, records, strict=True):
            place = find(key)
            dirty = place.dirty
            before = dirty.get(key)
            dirty[key] = record
            if before is not None:
                if keeps_older and before[0] < record[0]:
                    place.older.setdefault(key, []).append(before)
                else:
                    added -= len(before[1]) + RECORD_OVERHEAD_BYTES
            if not place.rec_seq:
                place.rec_seq = frame_seq or record[0]
            added += len(record[1]) + RECORD_OVERHEAD_BYTES
            if ready_new or ready_old:
                ready_new.pop(key, None)
                ready_old.pop(key, None)
        self.dirty_bytes += added

    def _apply_bucket(self, key: bytes, seq: int, payload: bytes) -> None:
        bucket = key[1:].decode()
        self.buckets_seq = seq
        if is_deletion(payload):
            self.prefixes.pop(bucket, None)
            self.buckets.pop(bucket, None)
        else:
            self.buckets[bucket] = object_of((seq, payload, 0, 0), "", bucket, self._place_reader)
            self.prefixes[bucket] = encode_key(key[1:], b"")

    def _apply_versions_entry(self, seq: int, kind: int, payload: bytes) -> None:
        body = decode_body(decode_payload(seq, payload))
        if kind == Kind.HORIZON:
            horizon = body.get("seq")
            if horizon is not None:
                horizon = max(horizon, self.horizon or 0)
            self.horizon = horizon
        elif kind == Kind.PIN:
            self.snapshots[body["name"]] = body["seq"]
        else:
            self.snapshots.pop(body["name"], None)
        self.decide_keeping()

    def load_buckets(self) -> None:
        """Find the buckets in the pages, when nothing was applied yet."""
        for found in self.scan("", b"\0", b"\1"):
            self.buckets[found.key] = found
            self.prefixes[found.key] = encode_key(found.key.encode(), b"")
            self.buckets_seq = max(self.buckets_seq, found.seq)

    # ------------------------------------------------------------------ which versions are kept

    @property
    def floor(self) -> int:
        """Versions that were superseded at or below this seq are gone, or may be."""
        return self.floor_for(self.applied)

    def floor_for(self, seq: int) -> int:
        return min([self.floor_kept(seq), *list(self._pins)])

    def floor_kept(self, seq: int) -> int:
        """The same without this process' pins: what the log says, and redo keeps."""
        floors = [seq, *self.snapshots.values()]
        if self.horizon is not None:
            floors.append(self.horizon)
        return min(floors)

    def pin(self, seq: int | None = None) -> int:
        """Keep what is read at `seq`, or now, until `unpin`."""
        with self.lock:
            seq = self.applied if seq is None else seq
            self._pins[seq] = self._pins.get(seq, 0) + 1
            self.decide_keeping()
            return seq

    def unpin(self, seq: int) -> None:
        with self.lock:
            count = self._pins.pop(seq) - 1
            if count:
                self._pins[seq] = count
            self.decide_keeping()

    def decide_keeping(self) -> None:
        """After a change of the horizon, the snapshots or the pins."""
        self.keeps_older = bool(self._pins or self.snapshots) or self.horizon is not None

    # ------------------------------------------------------------------ reading the newest version

    def ready(self, key: bytes) -> Object | None:
        """An object that was read a short while ago, if nothing has changed since. Always durable."""
        found = self._ready_new.get(key)
        if found is None and (found := self._ready_old.get(key)) is not None:
            self._move_to_new(key, found)
        return found

    def _move_to_new(self, key: bytes, found: Object) -> None:
        # With the lock, because a writer may be taking it out. Nobody waits for that: it can be moved later.
        if self.lock.acquire(blocking=False):
            if self._ready_old.get(key) is found:
                self._ready_new[key] = found
            self.lock.release()

    def newest(self, key: bytes, bucket: str, name: str, durable_seq: int) -> tuple[Object | None, int]:
        """The newest version of a key, None where there is none, and the seq that this rests on."""
        waited_for = 0
        while True:
            lows, ranges = self.map.view
            place = ranges[bisect_right(lows, key) - 1]
            epoch = place.epoch
            record = changed = place.dirty.get(key)
            if record is None and (frozen := place.frozen) is not None:
                record = frozen.get(key)
            if record is not None:
                if record[0] > self.applied and record[0] != waited_for:
                    # Of a group that is being applied: who has seen one of its changes sees all from then on.
                    waited_for = record[0]
                    with self.lock:
                        continue
                if is_deletion(record[1]):
                    return None, record[0]
                found: Object | None = object_of(record, bucket, name, self._place_reader)
            else:
                try:
                    page = self._page_of(place, key)
                except Corrupt:
                    if place.epoch != epoch:
                        continue
                    raise
                found = None if page is None else self._row_of(page, page.find(key), bucket, name)
            if place.epoch != epoch:
                continue
            if found is None:
                return None, 0
            if found.seq <= durable_seq and len(found.value) <= self.inline_bytes_max:
                self._keep_ready(key, found, place, epoch, changed)
            return found, found.seq

    def _keep_ready(
        self, key: bytes, found: Object, place: Range, epoch: int, changed: Record | None
    ) -> None:
        """Who changes the key takes it out of here afterwards, with the lock; who was faster than us is seen.
        Without the lock others could find it here before we have looked."""
        # What was asked for once may never be again. Losing one of these to a race costs nothing.
        asked_for = self._asked_for
        if key not in asked_for:
            if len(asked_for) >= ASKED_FOR_MAX:
                asked_for.clear()
            asked_for.add(key)
            return
        if not self.lock.acquire(blocking=False):
            return
        try:
            if place.epoch != epoch or place.dirty.get(key) is not changed:
                return
            self._ready_new[key] = found
            self._ready_bytes += len(found.value) + OBJECT_OVERHEAD_BYTES
            if self._ready_bytes > self.pool_bytes_max // 8:
                self._ready_old, self._ready_new, self._ready_bytes = self._ready_new, {}, 0
        finally:
            self.lock.release()

    def _row_of(self, page: Page, row: int, bucket: str, name: str) -> Object | None:
        if row < 0:
            return None
        seq, time_us, flags, metadata, value = page.row(row)
        if flags & TOMBSTONE:
            return None
        if flags & REFERENCE:
            value = self._place_reader(value)
        decoded = format.decode_metadata(metadata) if metadata else None
        return _new(Object, (bucket, name, value, decoded, seq, time_us))

    # ------------------------------------------------------------------ pages

    def _page_of(self, place: Range, key: bytes) -> Page | None:
        layout = place.layout
        index = layout.index(key)
        if index < 0:
            return None
        page = layout.pages[index]
        if page is None:
            page = self.fetch(layout, index)
            self.clean.add(layout, index, page)
        layout.used[index] = 1
        return page

    def limit_clean(self) -> None:
        """Give pages what changes and ready objects leave of the pool."""
        rest = self.pool_bytes_max - self.dirty_bytes - self.pool_bytes_max // 4
        self.clean.limit(max(rest, self.pool_bytes_max // 16))

    def place_of(self, key: bytes) -> bytes:
        """Where the large value of a key lies."""
        with self.lock:
            records, page, row = self.versions(key)
        if records:
            flags, place = page_version(records[0], self.inline_bytes_max)[3::2]
        else:
            assert page is not None
            _, _, flags, _, place = page.row(row)
        assert flags & REFERENCE, "this value is not a large one"
        return place

    def fetch(self, layout: Layout, index: int) -> Page:
        """A page from the store. The caller sees to it that the layout is still in force afterwards."""
        key = layout.keys[index]
        data = self.store.get(key)
        if data is None:
            raise Corrupt("a page is missing from the page store")
        return decode_page(data, key)

    # ------------------------------------------------------------------ versions at a seq

    def versions(self, key: bytes) -> tuple[list[Record], Page | None, int]:
        """With the lock: all versions of a key that there are: records, then rows of a page."""
        place = self.map.find(key)
        layout = place.layout
        index = layout.index(key)
        page = None
        if index >= 0:
            page = layout.pages[index] or self.fetch(layout, index)
        return place.records_of(key), page, -1 if page is None else page.find(key)

    def at(self, key: bytes, bucket: str, name: str, seq: int) -> Object | None:
        """The newest version not above `seq`."""
        with self.lock:
            records, page, row = self.versions(key)
        for record in records:
            if record[0] <= seq:
                if is_deletion(record[1]):
                    return None
                return object_of(record, bucket, name, self._place_reader)
        if page is None or row < 0:
            return None
        return self._row_of(page, page.version_at(key, seq), bucket, name)

    def newest_seq(self, key: bytes) -> int:
        """The seq of the newest version of a key, deletions included; 0 where there is none, or only one
        that everybody sees who may be reading."""
        with self.lock:
            records, page, row = self.versions(key)
        if records:
            return records[0][0]
        return 0 if page is None or row < 0 else page.seqs[row]

    def live_seq(self, key: bytes) -> int:
        """The seq of the newest version of a key; 0 where there is none, or the key was deleted."""
        with self.lock:
            records, page, row = self.versions(key)
        if records:
            return 0 if is_deletion(records[0][1]) else records[0][0]
        if page is None or row < 0:
            return 0
        seq, _, flags, _, _ = page.row(row)
        return 0 if flags & TOMBSTONE else seq

    def changed_since(self, low: bytes, high: bytes, seq: int) -> bool:
        """Whether a key from `low` to below `high` has a version above `seq`."""
        position: bytes | None = low
        while position is not None:
            with self.lock:
                start = position
                place, page, end, position = self._interval(start, high)
                if any(place.records_of(key)[0][0] > seq for key in place.changed_keys(start, end)):
                    return True
            if page is not None and page.seq > seq:
                keys = page.keys
                stop = len(keys) if end is None else bisect_left(keys, end)
                if any(each > seq for each in page.seqs[bisect_left(keys, low) : stop]):
                    return True
        return False

    # ------------------------------------------------------------------ scanning

    def scan(self, bucket: str, low: bytes, high: bytes | None, at: int | None = None) -> Iterator[Object]:
        """The live objects from `low` to below `high`, in order, as of `at` (which is pinned), else as they
        are when the scan comes by."""
        skip = 1 + len(bucket.encode())
        seq = format.SEQ_MAX if at is None else at
        position: bytes | None = low
        while position is not None:
            objects, position = self._scan_page(bucket, skip, position, high, seq)
            yield from objects

    def _scan_page(
        self, bucket: str, skip: int, low: bytes, high: bytes | None, seq: int
    ) -> tuple[list[Object], bytes | None]:
        """The objects of the first page from `low` on, and where the next one begins."""
        with self.lock:
            place, page, end, following = self._interval(low, high)
            overlay = {key: place.records_of(key) for key in place.changed_keys(low, end)}
        if page is None:
            rows: list[Object] = []
        else:
            rows = self._rows_between(page, bucket, skip, low, end, seq, overlay)
        if overlay:
            for key, records in overlay.items():
                found = self._overlaid(key, records, page, bucket, key[skip:].decode(), seq)
                if found is not None:
                    rows.append(found)
            rows.sort(key=_name)
        return rows, following

    def _interval(
        self, low: bytes, high: bytes | None
    ) -> tuple[Range, Page | None, bytes | None, bytes | None]:
        """With the lock: the range and the page of `low`, where that page ends or `high` does, and where the
        next one begins, None where nothing follows."""
        place = self.map.find(low)
        layout = place.layout
        index = layout.index(low)
        end = layout.keys[index + 1] if index + 1 < len(layout.keys) else self.map.high_of(place.low)
        if high is not None and (end is None or end >= high):
            end, following = high, None
        else:
            following = end
        page = None
        if index >= 0:
            page = layout.pages[index] or self.fetch(layout, index)
        return place, page, end, following

    def _overlaid(
        self, key: bytes, records: list[Record], page: Page | None, bucket: str, name: str, seq: int
    ) -> Object | None:
        for record in records:
            if record[0] <= seq:
                if is_deletion(record[1]):
                    return None
                return object_of(record, bucket, name, self._place_reader)
        return None if page is None else self._row_of(page, page.version_at(key, seq), bucket, name)

    def _rows_between(
        self,
        page: Page,
        bucket: str,
        skip: int,
        low: bytes,
        high: bytes | None,
        seq: int,
        overlay: dict[bytes, list[Record]],
    ) -> list[Object]:
        keys = page.keys
        start = bisect_left(keys, low)
        stop = bisect_left(keys, high) if high is not None else len(keys)
        if not overlay and page.is_plain and page.seq <= seq:
            # The common case: each key has one version, which is a value.
            columns = zip(
                repeat(bucket),
                [key[skip:].decode() for key in keys[start:stop]],
                page.values[start:stop],
                repeat(None),
                page.seqs[start:stop],
                page.times[start:stop],
                strict=False,
            )
            return list(map(_new, repeat(Object), columns))
        rows = []
        row = start
        while row < stop:
            key = keys[row]
            after = row + page.versions(row)
            if key not in overlay:
                while row < after and page.seqs[row] > seq:
                    row += 1
                # The key of a page's placeholder may be no text, so it is decoded for those that live only.
                if row < after and not page.flags[row] & TOMBSTONE:
                    found = self._row_of(page, row, bucket, key[skip:].decode())
                    assert found is not None
                    rows.append(found)
            row = after
        return rows


# Text is ordered as its UTF-8 is.
_name = attrgetter("key")


def _nowhere(seq: int) -> tuple[int, int]:
    raise InternalError("nobody knows where frames lie", seq=seq)


def _referred_seq(payload: bytes) -> int:
    return int(format.VALUE_REF.unpack(payload[-format.VALUE_REF.size :])[1])


def _ranges_of(keys: list[bytes]) -> list[Range]:
    """Ranges over the pages that the store has."""
    if not keys:
        return [Range(LOWEST, Layout([], []))]
    ranges = []
    for start in range(0, len(keys), RANGE_PAGES):
        part = keys[start : start + RANGE_PAGES]
        ranges.append(Range(part[0] if start else LOWEST, Layout(part, [None] * len(part))))
    return ranges
