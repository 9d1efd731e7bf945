"""The state: what the entries applied so far make of buckets and keys, in memory and in pages.

Always true:
  - it is a function of the entries applied, in their order; nothing here decides whether an entry has an
    effect, that is written in its frame;
  - `applied` is the seq of the last entry applied, and changes together with its effects, under `lock`;
  - a version of a transaction looks like any other; who finds one asks `transactions` whether it counts. That
    is decided for a page, or a record, with the lock: the answer is one moment's;
  - versions at or above `floor` can be read: dropping one that a pin or the horizon needs is a bug;
  - what a read returns may rest on entries that are not durable yet: `rests_on` says up to which;
  - an interrupt may come between any two steps: `mend` completes what is under way, and the entries above
    `applied` are applied once more then;
  - a call that needs a page that is away raises PageAway before anything has changed: `away.call` reads the
    page, without the lock, and calls again. Scans do that themselves.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from operator import attrgetter
from typing import Any
from weakref import ref

import cbor2

from lowwater.engine.format import format
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.entries import decode_body, decode_payload
from lowwater.engine.format.fast import Begun, Superseded, put_changes
from lowwater.engine.format.format import Flag, Kind
from lowwater.engine.format.keys import encode_key
from lowwater.engine.format.page import REFERENCE, TOMBSTONE, UNSTAMPED, DataPage, decode_page
from lowwater.engine.format.records import (
    Object,
    PageVersion,
    PlaceReader,
    Record,
    Unread,
    encoded_key_of,
    is_deletion,
    is_mere_put,
    is_transactional,
    make_record,
    object_of,
    page_version,
    put_record,
    seq_of,
    small_record_bytes,
)
from lowwater.engine.format.references import decode_reference, is_reference
from lowwater.engine.log.chain import IDLE_KINDS
from lowwater.engine.pages.pagestore import PageStore
from lowwater.engine.seams.interrupts import busy
from lowwater.engine.state.away import AwayPages, BlockSource, PageAway
from lowwater.engine.state.catalogue import RECORDED, Catalogue, CheckpointDescriptor, record_of
from lowwater.engine.state.cleanpages import CleanPages
from lowwater.engine.state.due import DUE_MAX, Due
from lowwater.engine.state.keeping import Keeping, Pin, Pins, add_pin
from lowwater.engine.state.meta import Meta
from lowwater.engine.state.ranges import Layout, Range, RangeMap, add_older, add_older_once, records_in
from lowwater.engine.state.session_frames import apply_session_frame
from lowwater.engine.state.sessions import SESSION_KINDS, Sessions
from lowwater.engine.state.transaction_table import (
    SeenVersion,
    TransactionRow,
    TransactionTable,
    View,
    holder,
    seen,
)
from lowwater.errors import Corrupt, InternalError, PagesDamaged

_new = tuple.__new__
_DATA_KINDS = frozenset({Kind.CREATE_BUCKET, Kind.DELETE_BUCKET, Kind.PUT, Kind.DELETE, Kind.COPY})
_END_KINDS = frozenset({Kind.COMMIT, Kind.ABORT})
# Stands for a row of which only the transaction table knows whether it counts.
_UNSTAMPED = Object("", "", b"", None, 0, 0)

# What a record and a ready object cost in memory besides their bytes, with their places in dictionaries: of a
# record that is 121. What is above it is for what allocators leave unused.
RECORD_OVERHEAD_BYTES = 200
OBJECT_OVERHEAD_BYTES = 400


# The smallest page key: those of the buckets' own records begin with it.
LOWEST = b"\0"
# Of so many keys it is known that they were read: an object is kept when it is read again.
ASKED_FOR_MAX = 65_536
ASKED_FOR_SHARE = 2048  # each takes about 100 bytes: a twentieth of the pool
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
        now_s: Callable[[], float],
        blocks: BlockSource | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.owns_lock: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self.store = store
        self.away = AwayPages(blocks, path=store.path, pool_bytes_max=pool_bytes_max)
        self.boundaries = boundaries
        self.inline_bytes_max = inline_bytes_max
        self.pool_bytes_max = pool_bytes_max
        self.now_s = now_s
        self._place_reader = place_reader
        self.applied = 0
        # Where the frame with a seq lies.
        self.locate: Callable[[int], tuple[int, int]] = _nowhere
        keys = list(store.page_keys())
        if not store.has_sums:
            _require_boundaries(keys, boundaries, store.path)
        self.map = RangeMap(_ranges_of(keys))
        self.buckets: dict[str, Object] = {}
        self.prefixes: dict[str, bytes] = {}
        self.buckets_seq = 0  # of the last change of a bucket
        # None: nothing is kept but for pins; else versions back to this seq are.
        self.horizon: int | None = None
        self.low_water_mark = 0  # as it was told
        self.snapshots: dict[str, int] = {}  # the log's pins, by name
        self.keeping = Keeping()
        self.sessions = Sessions()
        self.catalogue = Catalogue()
        self.changed_seq = 0  # of the last entry that changed a key or a bucket
        self.versions_seq = 0  # these are those as of this seq, or of `applied` where that is higher
        self.pages_from = 0  # of what was dropped before this seq, pages here know nothing
        self.checkpoint_seq = 0  # of the last checkpoint entry; this and the next as the snapshots
        # Of the one that is shipped next, 0 for none yet. All replicas keep it until it is recorded, so that
        # each can ship it, and none is outrun by those to come.
        self.ships_seq = 0
        self.checkpoints_due: list[Due] = []  # each pinned, until it is durable here
        self._due_pins: dict[int, Pin] = {}
        self.is_checkpoint_here: Callable[[int], bool] = _never
        self.idle_seq = 0  # nothing but entries without news lies between the last checkpoint and this
        self._pins: Pins = {}  # this process' own
        self.transactions = TransactionTable()
        self.keeps_older = False
        self.dirty_bytes = 0
        # What `_put` is about to note of its changes, for who has to do it where an interrupt comes.
        self._putting: tuple[Superseded, Begun] | None = None
        self._mends = False
        self.clean = CleanPages()
        # What this thread may have locked, and who has the state's lock may want.
        self.own_locks: tuple[Callable[[], bool], ...] = (
            self.owns_lock,
            self.clean.owns_lock,
            self.away.owns_lock,
            store.owns_lock,
        )
        self.keeps_clean = True  # until it is closing, when nobody will read them
        self.limit_clean()
        self._ready_new: dict[bytes, Object] = {}
        self._ready_old: dict[bytes, Object] = {}
        self._ready_new_bytes = self._ready_old_bytes = 0
        self.pages_read = self.page_hits = self.page_misses = 0
        self._asked_for: set[bytes] = set()
        self._asked_for_max = min(ASKED_FOR_MAX, pool_bytes_max // ASKED_FOR_SHARE)

    # ------------------------------------------------------------------ applying (with the lock)

    @property
    def small_record_bytes(self) -> int:
        return small_record_bytes(self.inline_bytes_max)

    def apply(self, seq: int, payload: bytes, segment_first: int = 0, offset: int = 0) -> None:
        """One frame. `segment_first` and `offset` say where its value lies."""
        kind = payload[0]
        flags = payload[1] | payload[2] << 8
        if flags & Flag.SESSION or kind in SESSION_KINDS:
            apply_session_frame(self.sessions, seq, payload)
        if flags & Flag.TXN:
            self._apply_transactional(seq, kind, flags, payload, segment_first, offset)
        elif not flags & Flag.REFUSED:
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
                frame = make_record(version_seq, payload)
                if is_mere_put(frame):
                    record = put_record(frame, self.small_record_bytes, segment_first, offset)
                else:
                    record = make_record(version_seq, payload, segment_first, offset)
                    self.map.find(key).odd.add(key)
                self._doom_holders((key,), seq)
                self._put((key,), (record,), seq)
                self.changed_seq = max(self.changed_seq, seq)
                if key[0] == 0:
                    self._apply_bucket(key, record)
            elif kind in (Kind.HORIZON, Kind.PIN, Kind.UNPIN):
                # What redo repeats of these is in force already: going through it again would lift the
                # floor in between, where a pin that kept it down is gone since.
                if seq > self.versions_seq:
                    self._apply_versions_entry(seq, kind, payload)
            elif kind == Kind.CHECKPOINT:
                if seq > self.versions_seq:
                    self._apply_checkpoint(seq, payload)
            elif kind in RECORDED:
                if seq > self.versions_seq:
                    self._apply_recorded(seq, kind, payload)
            elif kind == Kind.BEGIN:
                self._apply_begin(seq, payload)
        if kind in IDLE_KINDS and self.applied == self.idle_seq:
            self.idle_seq = seq
        self.applied = seq

    def apply_puts(self, keys: Sequence[bytes], records: Sequence[Record], seq_last: int) -> None:
        """Mere puts, the last of which is `seq_last`."""
        if self.transactions.open:
            for key, record in zip(keys, records, strict=True):
                self._doom_holders((key,), seq_of(record))
        self._put(keys, records)
        self.applied = self.changed_seq = seq_last

    def _put(
        self, keys: Sequence[bytes], records: Sequence[Record], frame_seq: int = 0, *, keeps: bool = False
    ) -> None:
        """New versions. `frame_seq` is the seq of their frame where it is not theirs, as in a group. `keeps`
        what they supersede, whoever reads it: what a transaction writes may never count."""
        lows, ranges = self.map.view
        older: Superseded = []
        begun: Begun = []
        self._putting = older, begun
        left_bytes, left_count = put_changes(
            lows, ranges, keys, records, self.keeps_older or keeps, older, begun
        )
        if older:
            add = add_older_once if self._mends else add_older
            for place, key, before in older:
                add(place.older, key, before)
        for place, record in begun:
            if not place.rec_seq:
                place.since_s = self.now_s()
                place.rec_seq = frame_seq or seq_of(record)
        added = sum(map(len, records)) - left_bytes + RECORD_OVERHEAD_BYTES * (len(records) - left_count)
        self.dirty_bytes += added
        # Whoever sees one of the changes waits for the lock first, and then finds nothing older here.
        for ready in (self._ready_new, self._ready_old):
            if ready:
                for key in keys:
                    ready.pop(key, None)
        self._putting = None

    @contextmanager
    def mended(self) -> Iterator[None]:
        """With the lock, after an interrupt while entries were applied: in the block those that are not are
        applied again, which does no harm where a part of it was done. It may be repeated."""
        self._mends = True
        try:
            if self._putting is not None:
                for place, key, before in self._putting[0]:
                    add_older_once(place.older, key, before)
                self._putting = None
            self._mend_ranges()
            yield
            self._mend_ranges()
            self.decide_keeping()
        finally:
            self._mends = False

    def _mend_ranges(self) -> None:
        size = 0
        for each in self.map.ranges:
            if each.dirty and not each.rec_seq:
                each.since_s = self.now_s()
                each.rec_seq = self.applied + 1  # what was applied before has its range known
            for records, older in ((each.dirty, each.older), (each.frozen or {}, each.frozen_older)):
                held = [*records.values(), *chain.from_iterable(map(records_in, older.values()))]
                size += sum(map(len, held)) + RECORD_OVERHEAD_BYTES * len(held)
        self.dirty_bytes = size

    def _apply_bucket(self, key: bytes, record: Record) -> None:
        bucket = key[1:].decode()
        self.buckets_seq = seq_of(record)
        if is_deletion(record):
            self.prefixes.pop(bucket, None)
            self.buckets.pop(bucket, None)
        else:
            self.buckets[bucket] = object_of(record, "", bucket, self._place_reader)
            self.prefixes[bucket] = encode_key(key[1:], b"")

    def _apply_versions_entry(self, seq: int, kind: int, payload: bytes) -> None:
        body = decode_body(decode_payload(seq, payload))
        if kind == Kind.HORIZON:
            if "seq" in body:
                horizon = body["seq"]
                if horizon is not None:
                    horizon = max(horizon, self.horizon or 0)
                self.horizon = horizon
            if "per_key_max" in body:
                self.keeping.limit(body["per_key_max"], seq)
        elif kind == Kind.PIN:
            self.snapshots[body["name"]] = body["seq"]
            if "expires_us" in body:
                self.keeping.expires_us[body["name"]] = body["expires_us"]
        else:
            self.snapshots.pop(body["name"], None)
            self.keeping.expires_us.pop(body["name"], None)
        self.decide_keeping()

    # ------------------------------------------------------------------ checkpoints to be made

    def _apply_checkpoint(self, seq: int, payload: bytes) -> None:
        """What a checkpoint needs of `seq` stays until it is durable here, whatever happens in between."""
        body = decode_body(decode_payload(seq, payload))
        base_seq = 0 if body.get("full") else self.base_seq
        time_us = int.from_bytes(payload[format.TIME_SLICE], "little")
        self.checkpoint_seq = self.idle_seq = seq
        self.ships_seq = self.ships_seq or seq
        if not self.is_checkpoint_here(seq):
            self.add_due(Due(seq, time_us, base_seq, self.control_part()))
            if len(self.checkpoints_due) > DUE_MAX:
                # A log is applied from its beginning: nobody waits for what was due then.
                self.remove_due(self.checkpoints_due[0].seq)

    def _apply_recorded(self, seq: int, kind: int, payload: bytes) -> None:
        record = record_of(kind, seq, decode_body(decode_payload(seq, payload)))
        self.catalogue.add(record)
        if isinstance(record, CheckpointDescriptor):
            self.ships_seq = self.checkpoint_seq if self.checkpoint_seq > record.seq else 0

    @property
    def base_seq(self) -> int:
        """The seq of the checkpoint whose blocks the next one need not repeat. It is the last one that was
        shipped, which every replica can get; until one was, it is the last one that was asked for."""
        return self.catalogue.checkpoint_seq or self.checkpoint_seq

    def add_due(self, due: Due) -> None:
        self.checkpoints_due.append(due)
        self._due_pins[due.seq] = self.pin(due.seq)

    def remove_due(self, seq: int) -> None:
        with self.lock:
            if any(due.seq == seq for due in self.checkpoints_due):
                self.checkpoints_due = [due for due in self.checkpoints_due if due.seq != seq]
                self.unpin(self._due_pins.pop(seq))

    def take_meta(self, meta: Meta) -> None:
        """Take over what the pages say. `applied` is set when all that is read from them is here."""
        self.horizon, self.snapshots = meta.horizon, dict(meta.snapshots)
        self.keeping.from_meta(meta.keeping)
        self.changed_seq = meta.changed_seq
        self.low_water_mark = meta.low_water_mark
        self.versions_seq = meta.applied
        self.pages_from = meta.pages_from
        self.checkpoint_seq = self.idle_seq = meta.checkpoint_seq
        self.ships_seq = meta.ships_seq

    def to_meta(self, meta: Meta, frozen_seq: int) -> Meta:
        """With the lock: what goes into the store with what is frozen. All of it is durable before the pages
        are. Of `meta` it has whose pages these are, and a `redo_seq` that is not decided yet."""
        fork = self.catalogue.forks.last
        return meta._replace(
            cluster_id=meta.cluster_id if fork is None else fork.cluster_id,
            applied=max(frozen_seq, self.versions_seq),
            horizon=self.horizon,
            low_water_mark=self.low_water_mark,
            snapshots=dict(sorted(self.snapshots.items())),
            keeping=self.keeping.to_meta(),
            changed_seq=self.changed_seq,
            checkpoint_seq=self.checkpoint_seq,
            ships_seq=self.ships_seq,
            checkpoints_due=list(self.checkpoints_due),
            pages_from=self.pages_from,
        )

    def control_part(self) -> bytes:
        """With the lock: what the state has besides its content. All of it is a function of the log."""
        body = {
            "horizon": self.horizon,
            "snapshots": dict(self.snapshots),
            **self.keeping.to_meta(),
        }
        if self.transactions.open:
            rows = sorted(self.transactions.open.items())
            body["transactions"] = [row.to_control() for _, row in rows]
        if self.sessions.sessions:
            body["sessions"] = self.sessions.to_control()
        if self.catalogue:
            body["catalogue"] = self.catalogue.body()
        data: bytes = cbor2.dumps(body, canonical=True)
        return data

    # ------------------------------------------------------------------ transactions (with the lock)

    def _apply_begin(self, seq: int, payload: bytes) -> None:
        transactions = self.transactions
        if seq not in transactions.rows:
            body = decode_body(decode_payload(seq, payload))
            snapshot_seq = body.get("snapshot", seq - 1)
            # What was superseded before has not been kept for it, whatever it may read of it here.
            floor = max(snapshot_seq, self.floor_kept(seq - 1))
            transactions.put(TransactionRow(seq, snapshot_seq, floor, seq))
            self.decide_keeping()

    def _apply_transactional(
        self, seq: int, kind: int, flags: int, payload: bytes, segment_first: int, offset: int
    ) -> None:
        """A frame inside a transaction, or its end. What its row knows already changes nothing there; a
        version goes into memory in any case, as others do in redo."""
        extras, _ = format.decode_extras(flags, payload, format.FIXED_BYTES, len(payload))
        assert extras.txn is not None
        row = self.transactions.rows.get(extras.txn)
        refused = format.U16.unpack(payload[-format.U16.size :])[0] if flags & Flag.REFUSED else None
        if row is None:
            # Of what had ended by the checkpoint that the pages are made of, the blocks have all there is,
            # and redo may begin in the middle of it.
            if refused is None and seq > self.pages_from:
                raise InternalError("a transaction goes on that never began", seq=seq)
            return
        if kind in _DATA_KINDS and refused is None:
            key = encoded_key_of(payload)
            if flags & Flag.VALUE_REF:
                segment_first, offset = self.locate(_referred_seq(payload))
            place = self.map.find(key)
            place.odd.add(key)
            place.txns.add(row.txn)
            self._put((key,), (make_record(seq, payload, segment_first, offset),), seq, keeps=True)
        if seq > row.seq_last and row.is_open:
            self.transactions.put(row.after(seq, kind, refused, payload))
            if kind == Kind.COMMIT and refused is None:
                self.changed_seq = max(self.changed_seq, seq)
            if kind in _END_KINDS:
                self.decide_keeping()

    def _doom_holders(self, keys: Sequence[bytes], seq: int) -> None:
        """Before the keys are written from outside: the first to commit wins. What redo repeats is known:
        pages may be ahead of it, and rows say what came of it."""
        transactions = self.transactions
        if transactions.open and seq > self.versions_seq:
            for key in keys:
                row = self.holder(key)
                if row is not None:
                    transactions.doom(row.txn)

    @property
    def oldest_open_seq(self) -> int | None:
        """The `begin` of the oldest transaction that is open in the log; None where there is none. From there
        on the log has to stay."""
        with self.lock:
            return self.transactions.oldest_open_seq

    def holder(self, key: bytes) -> TransactionRow | None:
        """The open transaction that has written a key, and may still commit."""
        with self.lock:
            view = self.view_of(self.map.find(key), key)
            if view is None or not any(row.is_open and not row.doomed for row in view.values()):
                return None  # without a look at the page, which may have to be read
            # A page that is away has nothing of transactions of which it does not say what became.
            records, page, row_index, view = self._versions(key, above=format.SEQ_MAX)
        return holder(records, page, row_index, view or {})

    def is_held(self, low: bytes, high: bytes) -> bool:
        """Whether such a transaction has written a key from `low` to below `high`."""
        position: bytes | None = low if self.transactions.open else None
        while position is not None:
            with self.lock:
                start = position
                place, page, end, position = self._interval(start, high, above=format.SEQ_MAX)
                keys = set(place.changed_keys(start, end)) if place.txns or place.frozen_txns else set()
                if page is not None:
                    keys |= {
                        key
                        for key, flags in zip(page.keys, page.flags, strict=True)
                        if flags & UNSTAMPED and start <= key and (end is None or key < end)
                    }
                if any(self.holder(key) is not None for key in sorted(keys)):
                    return True
        return False

    def view(self, place: Range, page_key: bytes | None) -> View | None:
        """The rows that versions in this page, or in memory before it, may need."""
        transactions = self.transactions
        if not transactions.rows:
            return None
        ids = transactions.unstamped.get(page_key, ()) if page_key is not None else ()
        return transactions.view(place.txns, place.frozen_txns, ids)

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
        return min([self.floor_kept(seq), *self._pins.values()])

    def floor_kept(self, seq: int) -> int:
        """Return the floor as of `seq`, without this process' pins: what the log says, and redo keeps."""
        floors = [seq, *self.snapshots.values()]
        if (floor := self.transactions.floor) is not None:
            floors.append(floor)
        if self.horizon is not None:
            floors.append(self.horizon)
        return min(floors)

    def pin(self, seq: int | None = None) -> Pin:
        """Keep what is read at `seq`, or now, until `unpin`, or until nobody has what this returns."""
        with self.lock:
            pin = Pin(self.applied if seq is None else seq)
            add_pin(self._pins, pin)
            if self.keeping.is_exact(pin.seq, self.applied, self.snapshots):
                add_pin(self.keeping.exact_pins, pin)
            self.decide_keeping()
            return pin

    def unpin(self, pin: Pin) -> None:
        """Harmless when it is done again."""
        with self.lock:
            self._pins.pop(ref(pin), None)
            self.keeping.exact_pins.pop(ref(pin), None)
            self.decide_keeping()

    def needed_seqs(self) -> list[int]:
        """With the lock: the seqs at which somebody may read, besides the newest, in order."""
        open_rows = self.transactions.open.values()
        return sorted(
            {*self.snapshots.values(), *self._pins.values(), *(row.snapshot_seq for row in open_rows)}
        )

    def is_limited(self, seq: int) -> bool:
        keeping = self.keeping
        return keeping.per_key_max is not None and not keeping.is_exact(seq, self.applied, self.snapshots)

    def decide_keeping(self) -> None:
        """After a change of the horizon, the snapshots, the pins or the open transactions."""
        self.keeps_older = (
            bool(self._pins or self.snapshots or self.transactions.open) or self.horizon is not None
        )

    # ------------------------------------------------------------------ reading the newest version

    def ready(self, key: bytes) -> Object | None:
        """An object that was read a short while ago, if nothing has changed since. Always durable."""
        found = self._ready_new.get(key)
        if found is None and (found := self._ready_old.get(key)) is not None:
            self._unless_locked(self._move_to_new, key, found)
        return found

    def _move_to_new(self, key: bytes, found: Object) -> None:
        """With the lock, because a writer may be taking it out."""
        if self._ready_old.get(key) is found:
            self._add_ready(key, found)

    def refuse_inside(self) -> None:
        """Raise Busy to a signal handler that has interrupted its own thread where that has a lock."""
        for owns_lock in self.own_locks:
            if owns_lock():
                raise busy(self.store.path)

    def _unless_locked(self, step: Callable[..., None], *args: Any) -> None:
        """With the lock, do what can as well be done another time: nobody waits for a writer that has it."""
        if self.owns_lock():
            return
        try:
            if self.lock.acquire(blocking=False):
                step(*args)
                self.lock.release()
        except BaseException:
            # An interrupt may have come before the lock was taken, with it, or after it was given back.
            if self.owns_lock():
                self.lock.release()
            raise

    def newest(
        self, key: bytes, bucket: str, name: str, durable_seq: int, reader: PlaceReader | None = None
    ) -> tuple[Object | None, int]:
        """The newest version of a key, None where there is none, and the seq that this rests on. `reader` is
        for large values."""
        waited_for = 0
        while True:
            lows, ranges = self.map.view
            place = ranges[bisect_right(lows, key) - 1]
            epoch = place.epoch
            record = changed = place.dirty.get(key)
            if record is None and (frozen := place.frozen) is not None:
                record = frozen.get(key)
            if record is not None:
                if is_transactional(record):
                    return self._newest_resolved(key, bucket, name, reader)
                seq = seq_of(record)
                if seq > self.applied and seq != waited_for:
                    # Of a group that is being applied: who has seen one of its changes sees all from then on.
                    waited_for = seq
                    if not self.owns_lock():
                        self.refuse_inside()
                    with self.lock:
                        continue
                if is_deletion(record):
                    return None, seq
                found: Object | None = object_of(record, bucket, name, reader or self._place_reader)
            else:
                try:
                    page = self._page_of(place, key)
                except Corrupt:
                    if place.epoch != epoch:
                        continue
                    raise
                row = None if page is None else page.newest(key)
                if row is None:
                    found = None
                else:
                    seq, time_us, flags, metadata, value = row
                    if not flags and not metadata:
                        found = _new(Object, (bucket, name, value, None, seq, time_us))
                    elif flags & UNSTAMPED:
                        return self._newest_resolved(key, bucket, name, reader)
                    else:
                        found = self._object_of_row(*row, bucket, name, reader)
            if place.epoch != epoch:
                continue
            if found is None:
                return None, 0
            seq = found.seq
            if seq <= durable_seq and len(found.value) <= self.inline_bytes_max:
                # What was asked for once may never be again. Losing one of these to a race costs nothing.
                asked_for = self._asked_for
                if key in asked_for:
                    self._unless_locked(self._keep_ready, key, found, place, epoch, changed)
                else:
                    if len(asked_for) >= self._asked_for_max:
                        asked_for.clear()
                    asked_for.add(key)
            return found, seq

    def _newest_resolved(
        self, key: bytes, bucket: str, name: str, reader: PlaceReader | None
    ) -> tuple[Object | None, int]:
        """Return the newest version of a key that a transaction was the last to write, or None, and the seq
        that this rests on. Nothing is kept ready: the transaction's end would not take that out again."""
        if not self.owns_lock():
            self.refuse_inside()
        with self.lock:
            records, page, row, view = self._versions(key)
            each = next(seen(records, page, row, view or {}), None)
        if each is None:
            return None, 0
        return self._object_seen(each, page, bucket, name, reader), each.seq

    def _object_seen(
        self, each: SeenVersion, page: DataPage | None, bucket: str, name: str, reader: PlaceReader | None
    ) -> Object | None:
        """A version as reads return it; None for a deletion. Of a transaction's own the seq is not known."""
        if each.record is not None:
            if is_deletion(each.record):
                return None
            found = object_of(each.record, bucket, name, reader or self._place_reader)
        else:
            assert page is not None
            seq, time_us, flags, metadata, value = page.row(each.row)
            row = self._object_of_row(seq, time_us, flags & ~UNSTAMPED, metadata, value, bucket, name, reader)
            if row is None:
                return None
            found = row
        if each.time_us is None:
            return found
        return found._replace(seq=0 if each.is_own else each.seq, time_us=each.time_us)

    def _keep_ready(
        self, key: bytes, found: Object, place: Range, epoch: int, changed: Record | None
    ) -> None:
        """With the lock. Who changes the key takes it out of here afterwards, also with the lock; who was
        faster than us is seen. Without the lock others could find it here before we have looked."""
        if place.epoch == epoch and place.dirty.get(key) is changed:
            self._add_ready(key, found)

    def _add_ready(self, key: bytes, found: Object) -> None:
        """With the lock. Those that are not read again go with the next generation but one."""
        self._ready_new[key] = found
        self._ready_new_bytes += len(found.value) + OBJECT_OVERHEAD_BYTES
        if self._ready_new_bytes > self.pool_bytes_max // 8:
            self._ready_old, self._ready_new = self._ready_new, {}
            self._ready_old_bytes, self._ready_new_bytes = self._ready_new_bytes, 0

    @property
    def ready_bytes(self) -> int:
        """What ready objects take, at most: those that were changed since are gone, and still counted."""
        return self._ready_new_bytes + self._ready_old_bytes

    def _row_of(
        self, page: DataPage, row: int, bucket: str, name: str, reader: PlaceReader | None
    ) -> Object | None:
        if row < 0:
            return None
        seq, time_us, flags, metadata, value = page.row(row)
        if flags:
            if flags & UNSTAMPED:
                return _UNSTAMPED
            return self._object_of_row(seq, time_us, flags, metadata, value, bucket, name, reader)
        decoded = format.decode_metadata(metadata) if metadata else None
        return _new(Object, (bucket, name, value, decoded, seq, time_us))

    def _object_of_row(
        self,
        seq: int,
        time_us: int,
        flags: int,
        metadata: bytes,
        value: bytes,
        bucket: str,
        name: str,
        reader: PlaceReader | None,
    ) -> Object | None:
        if flags & TOMBSTONE:
            return None
        if flags & REFERENCE:
            value = (reader or self._place_reader)(value)
        decoded = format.decode_metadata(metadata) if metadata else None
        return _new(Object, (bucket, name, value, decoded, seq, time_us))

    # ------------------------------------------------------------------ pages

    def _page_of(self, place: Range, key: bytes) -> DataPage | None:
        layout = place.layout
        index = bisect_right(layout.keys, key) - 1
        if index < 0:
            return None
        page = layout.pages[index]
        if page is None:
            self.page_misses += 1
            page = self.fetch(layout, index)
            self.clean.add(layout, index, page)
        else:
            self.page_hits += 1
        layout.used[index] = 1
        return page

    def _page_at(self, layout: Layout, index: int, above: int = 0) -> DataPage | None:
        """With the lock: a page that is looked at once, and leaves those in memory alone that are not. None
        where it is away, and has nothing above the seq `above`: who looks for that need not have it."""
        page = layout.pages[index]
        if page is not None:
            self.page_hits += 1
            return page
        self.page_misses += 1
        try:
            return self.fetch(layout, index)
        except PageAway as away:
            if decode_reference(away.data, away.key).page_seq <= above:
                return None
            raise

    def limit_clean(self) -> None:
        """Give pages what changes and ready objects leave of the pool."""
        if not self.keeps_clean:
            self.clean.limit(0)
            return
        rest = self.pool_bytes_max - self.dirty_bytes - self.pool_bytes_max // 4 - self.away.returning_bytes
        self.clean.limit(max(rest, self.pool_bytes_max // 16))

    def fetch(self, layout: Layout, index: int) -> DataPage:
        """A page from the store. The caller sees to it that the layout is still in force afterwards."""
        key = layout.keys[index]
        self.pages_read += 1
        data = self.store.get(key)
        if data is None:
            raise PagesDamaged("a page is missing from the page store", path=self.store.path)
        return self.away.page(key, data) if is_reference(data) else decode_page(data, key)

    # ------------------------------------------------------------------ versions at a seq

    def _versions(
        self, key: bytes, above: int = 0, *, keeps: bool = False
    ) -> tuple[list[Record], DataPage | None, int, View | None]:
        """With the lock: all versions of a key that there are: records, then rows of a page, and with the
        last one what says which of them count; None where all do. Of a page that is away and has nothing
        above the seq `above` there are none. `keeps` the page in memory."""
        place = self.map.find(key)
        layout = place.layout
        index = layout.index(key)
        page = None
        if index >= 0:
            page = self._page_of(place, key) if keeps else self._page_at(layout, index, above)
        view = self.view(place, layout.keys[index] if index >= 0 else None)
        return place.records_of(key), page, -1 if page is None else page.find(key), view

    def at(
        self,
        key: bytes,
        bucket: str,
        name: str,
        seq: int,
        reader: PlaceReader | None = None,
        viewer: int = 0,
    ) -> Object | None:
        """The newest version not above `seq`, or what the transaction `viewer` has written itself: that has
        the seq 0 and the time 0."""
        with self.lock:
            records, page, row, view = self._versions(key)
            is_limited = self.is_limited(seq)
            if is_limited and view is None:
                self.keeping.require_kept(key, records, page, row, seq)
        if view is not None:
            versions = list(seen(records, page, row, view, viewer=viewer))
            if is_limited:
                self.keeping.require_few(key, (each.seq for each in versions), seq)
            for each in versions:
                if each.is_own or each.seq <= seq:
                    return self._object_seen(each, page, bucket, name, reader)
            return None
        return self._overlaid(key, records, page, bucket, name, seq, reader)

    def newest_version(
        self, key: bytes, *, seq: int = format.SEQ_MAX, viewer: int = 0, keeps: bool = False
    ) -> PageVersion | None:
        """The newest version not above `seq`, or of the viewer's own, as pages hold it, deletions included:
        the seq of its frame, its own, time, flags, metadata, value or place. `keeps` its page in memory."""
        with self.lock:
            records, page, row, view = self._versions(key, keeps=keeps)
        for each in seen(records, page, row, view or {}, viewer=viewer):
            if each.is_own or each.seq <= seq:
                return self.page_version_of(each, page)
        return None

    def page_version_of(self, each: SeenVersion, page: DataPage | None) -> PageVersion:
        """A version as a page has it once it is stamped."""
        if each.record is not None:
            frame_seq, _, time_us, flags, metadata, value = page_version(each.record, self.inline_bytes_max)
        else:
            assert page is not None
            frame_seq, time_us, flags, metadata, value = page.row(each.row)
        if each.time_us is not None:
            time_us = each.time_us
        return frame_seq, each.seq, time_us, flags & ~UNSTAMPED, metadata, value

    def newest_seq(self, key: bytes, viewer: int = 0, *, above: int = 0) -> int:
        """The seq of the newest version of a key that is not the viewer's own, deletions included; 0 where
        there is none, or only one that everybody sees who may be reading. Of those that are not above the
        seq `above`, it may say 0 as well."""
        with self.lock:
            records, page, row, view = self._versions(key, above)
        if view is not None:
            others = (each.seq for each in seen(records, page, row, view, viewer=viewer) if not each.is_own)
            return next(others, 0)
        if records:
            return seq_of(records[0])
        return 0 if page is None or row < 0 else page.seqs[row]

    def live_seq(self, key: bytes, *, seq: int = format.SEQ_MAX, viewer: int = 0) -> int:
        """The seq of the newest version of a key, or of what the viewer sees; 0 where there is none, or the
        key was deleted."""
        with self.lock:
            records, page, row, view = self._versions(key)
        for each in seen(records, page, row, view or {}, viewer=viewer):
            if each.is_own or each.seq <= seq:
                return 0 if self._is_deletion(each, page) else each.seq
        return 0

    def is_own(self, key: bytes, seq: int, viewer: int) -> bool:
        """Whether what the transaction `viewer` sees of a key, as of `seq`, it has written itself."""
        with self.lock:
            records, page, row, view = self._versions(key)
        for each in seen(records, page, row, view or {}, viewer=viewer):
            if each.is_own or each.seq <= seq:
                return each.is_own
        return False

    def changed_since(self, low: bytes, high: bytes, seq: int, viewer: int = 0) -> bool:
        """Whether a key from `low` to below `high` has a version above `seq` that is not the viewer's own."""
        position: bytes | None = low
        while position is not None:
            with self.lock:
                start = position
                place, page, end, position = self._interval(start, high, above=seq)
                view = self.view_of(place, start)
                changed = place.changed_keys(start, end)
                if view is None and any(seq_of(place.records_of(key)[0]) > seq for key in changed):
                    return True
            first, stop = (0, 0) if page is None else page.bounds(start, end)
            if view is not None:
                keys = set(changed) if page is None else {*changed, *page.keys[first:stop]}
                if any(self.newest_seq(key, viewer, above=seq) > seq for key in sorted(keys)):
                    return True
            elif page is not None and page.seq > seq and any(each > seq for each in page.seqs[first:stop]):
                return True
        return False

    def view_of(self, place: Range, key: bytes) -> View | None:
        """With the lock held: return the rows that versions in the page of this key, or in memory before it,
        may need. Return None where there are none."""
        if not self.transactions.rows:
            return None
        index = place.layout.index(key)
        return self.view(place, place.layout.keys[index] if index >= 0 else None)

    # ------------------------------------------------------------------ scanning

    def scan(
        self,
        bucket: str,
        low: bytes,
        high: bytes | None,
        at: int | None = None,
        reader: PlaceReader | None = None,
        viewer: int = 0,
    ) -> Iterator[Object]:
        """The live objects from `low` to below `high`, in order, as of `at` (which is pinned), else as they
        are when the scan comes by; with what the transaction `viewer` has written. Not with the lock: pages
        that are away are read, one by one."""
        return chain.from_iterable(self.scan_lists(bucket, low, high, at, reader, viewer))

    def first(self, bucket: str, low: bytes, high: bytes | None) -> Object | None:
        """The first live object from `low` to below `high`, if there is one."""
        position: bytes | None = low
        while position is not None:
            found, position = self._scan_page(
                bucket, 1 + len(bucket.encode()), position, high, format.SEQ_MAX, Unread, 0
            )
            if found:
                return found[0]
        return None

    def scan_lists(
        self,
        bucket: str,
        low: bytes,
        high: bytes | None,
        at: int | None = None,
        reader: PlaceReader | None = None,
        viewer: int = 0,
    ) -> Iterator[list[Object]]:
        """Yield the live objects from `low` to below `high`, in order, a list for each page. They are as of
        `at`, which is pinned, else as they are when the scan comes by. What the transaction `viewer` has
        written is among them. Not with the lock: pages that are away are read, one by one."""
        seq = format.SEQ_MAX if at is None else at
        skip = 1 + len(bucket.encode())
        position: bytes | None = low
        while position is not None:
            scanned = partial(self._scan_page, bucket, skip, position, high, seq, reader, viewer)
            try:
                objects, position = scanned()
            except PageAway:
                objects, position = self.away.call(scanned, keeps=False)
            yield objects

    def _scan_page(
        self,
        bucket: str,
        skip: int,
        low: bytes,
        high: bytes | None,
        seq: int,
        reader: PlaceReader | None,
        viewer: int,
    ) -> tuple[list[Object], bytes | None]:
        """The objects of the first page from `low` on, and where the next one begins."""
        with self.lock:
            place, page, end, following = self._interval(low, high)
            overlay = {key: place.records_of(key) for key in place.changed_keys(low, end)}
            view = self.view_of(place, low)
            is_limited = self.is_limited(seq)
            if is_limited and view is None:
                self._require_kept(page, low, end, overlay, seq)
        if view is not None:
            between = self.seen_between(page, low, end, overlay, view, viewer, seq if is_limited else None)
            return self._objects_seen(between, page, bucket, skip, seq, reader), following
        if page is None:
            rows: list[Object] = []
        else:
            # Where another page follows, all of this one lies below its key.
            stop = end if following is None else None
            rows = self._rows_between(page, bucket, skip, low, stop, seq, overlay, reader)
        if overlay:
            for key, records in overlay.items():
                found = self._overlaid(key, records, page, bucket, key[skip:].decode(), seq, reader)
                if found is not None:
                    rows.append(found)
            rows.sort(key=_name)
        return rows, following

    def require_readable(
        self, page: DataPage | None, low: bytes, end: bytes, overlay: dict[bytes, list[Record]], seq: int
    ) -> None:
        """Raise VersionGone where a limit may have taken what these keys had at `seq`."""
        if self.is_limited(seq):
            self._require_kept(page, low, end, overlay, seq)

    def _require_kept(
        self,
        page: DataPage | None,
        low: bytes,
        end: bytes | None,
        overlay: dict[bytes, list[Record]],
        seq: int,
    ) -> None:
        """Raise VersionGone where the limit may have taken what a key had at `seq`."""
        for key, records in overlay.items():
            self.keeping.require_kept(key, records, page, -1 if page is None else page.find(key), seq)
        if page is not None:
            self.keeping.require_rows_kept(page, *page.bounds(low, end), seq)

    def seen_between(
        self,
        page: DataPage | None,
        low: bytes,
        high: bytes | None,
        overlay: dict[bytes, list[Record]],
        view: View,
        viewer: int,
        limited_seq: int | None,
    ) -> Iterator[tuple[bytes, list[SeenVersion]]]:
        """Keys in order with what can be seen of them, where transactions have written."""
        keys = set(overlay)
        if page is not None:
            start, stop = page.bounds(low, high)
            keys.update(page.keys[start:stop])
        for key in sorted(keys):
            row = -1 if page is None else page.find(key)
            versions = list(seen(overlay.get(key, ()), page, row, view, viewer=viewer))
            if limited_seq is not None:
                self.keeping.require_few(key, (each.seq for each in versions), limited_seq)
            yield key, versions

    def _objects_seen(
        self,
        between: Iterator[tuple[bytes, list[SeenVersion]]],
        page: DataPage | None,
        bucket: str,
        skip: int,
        seq: int,
        reader: PlaceReader | None,
    ) -> list[Object]:
        objects = []
        for key, versions in between:
            each = next((each for each in versions if each.is_own or each.seq <= seq), None)
            # The key of a page's placeholder may be no text.
            if each is not None and not self._is_deletion(each, page):
                found = self._object_seen(each, page, bucket, key[skip:].decode(), reader)
                assert found is not None
                objects.append(found)
        return objects

    def _is_deletion(self, each: SeenVersion, page: DataPage | None) -> bool:
        if each.record is not None:
            return is_deletion(each.record)
        assert page is not None
        return page.flags[each.row] & TOMBSTONE != 0

    def _interval(
        self, low: bytes, high: bytes | None, above: int = 0
    ) -> tuple[Range, DataPage | None, bytes | None, bytes | None]:
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
            page = self._page_at(layout, index, above)
            if page is not None and layout.pages[index] is None:
                self.clean.add_to_room(layout, index, page)
        return place, page, end, following

    def _overlaid(
        self,
        key: bytes,
        records: list[Record],
        page: DataPage | None,
        bucket: str,
        name: str,
        seq: int,
        reader: PlaceReader | None,
    ) -> Object | None:
        for record in records:
            if seq_of(record) <= seq:
                if is_deletion(record):
                    return None
                return object_of(record, bucket, name, reader or self._place_reader)
        return None if page is None else self._row_of(page, page.version_at(key, seq), bucket, name, reader)

    def _rows_between(
        self,
        page: DataPage,
        bucket: str,
        skip: int,
        low: bytes,
        high: bytes | None,
        seq: int,
        overlay: dict[bytes, list[Record]],
        reader: PlaceReader | None,
    ) -> list[Object]:
        is_common = not overlay and page.is_plain and page.seq <= seq
        if is_common and (found := page.plain_objects(low, high, skip, bucket, Object)) is not NotImplemented:
            objects: list[Object] = found
            return objects
        start, stop = page.bounds(low, high)
        if is_common:
            # Each key has one version, which is a value.
            names, values, seqs, times = page.plain_rows(start, stop, skip)
            columns = zip(repeat(bucket), names, values, repeat(None), seqs, times, strict=False)
            return list(map(_new, repeat(Object), columns))
        rows = []
        row = start
        keys, seqs, flags = page.keys, page.seqs, page.flags
        while row < stop:
            key = keys[row]
            after = bisect_right(keys, key, row)
            if key not in overlay:
                while row < after and seqs[row] > seq:
                    row += 1
                # The key of a page's placeholder may be no text, so it is decoded for those that live only.
                if row < after and not flags[row] & TOMBSTONE:
                    found = self._row_of(page, row, bucket, key[skip:].decode(), reader)
                    assert found is not None
                    rows.append(found)
            row = after
        return rows


# Text is ordered as its UTF-8 is.
_name = attrgetter("key")


def _never(seq: int) -> bool:
    return False


def _nowhere(seq: int) -> tuple[int, int]:
    raise InternalError("nobody knows where frames lie", seq=seq)


def _referred_seq(payload: bytes) -> int:
    return int(format.VALUE_REF.unpack(payload[-format.VALUE_REF.size :])[1])


def _require_boundaries(keys: list[bytes], boundaries: Boundaries, path: str) -> None:
    """Raise PagesDamaged unless pages begin where they may. It is for a store without sums: a key that is not
    what it was is hardly one at which a page may begin."""
    keys = [key for key in keys if key != LOWEST]
    if boundaries.cuts(keys) != keys:
        raise PagesDamaged("a page lies under a key at which none begins", path=path)


def _ranges_of(keys: list[bytes]) -> list[Range]:
    """Ranges over the pages that the store has."""
    if not keys:
        return [Range(LOWEST, Layout([], []))]
    ranges = []
    for start in range(0, len(keys), RANGE_PAGES):
        part = keys[start : start + RANGE_PAGES]
        ranges.append(Range(part[0] if start else LOWEST, Layout(part, [None] * len(part))))
    return ranges
