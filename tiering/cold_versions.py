"""Reads at a seq of which the local pages know nothing any more: from a shipped checkpoint and the log.

Always true:
  - the answer is what the log says: the newest checkpoint not above the seq, and of the segments between them
    every frame that their key indexes have of the key. Slower than a page, and never wrong;
  - frames of a key that took effect stand in the log in the order in which they did: who commits first wins,
    and everybody else who has written the key is refused. So the newest frame that counts has the answer;
  - a version of a transaction counts from its `commit` on, whose seq and time it has, if nothing has undone
    it before; one of a group from the group's last seq on;
  - a scan holds in memory the keys that were written since the checkpoint, and no values but one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from blake3 import blake3

from lowwater.engine import format
from lowwater.engine.catalogue import CheckpointDescriptor, SegmentDescriptor
from lowwater.engine.checkpoints import CheckpointRow
from lowwater.engine.entries import Entry, decode_body, decode_frames, decode_payload
from lowwater.engine.format import FRAME_BYTES, Flag, Kind
from lowwater.engine.log import Log
from lowwater.engine.pages import decode_key, encode_key
from lowwater.engine.reader import read_chunks
from lowwater.engine.records import Object
from lowwater.engine.ring import Chunk
from lowwater.engine.transaction_table import Row
from lowwater.errors import Corrupt, VersionGone
from lowwater.tiering.cold import ColdLog, ShippedSegments
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint

CHECKPOINTS_MAX = 4
# So many transactions that have ended are remembered, and so many entries that ended some, with all others of
# their segments: frames have no index by transaction, so each segment is gone through once.
ENDED_MAX = 10_000
ENDS_MAX = 100_000

_ENDS = frozenset({Kind.COMMIT, Kind.ABORT})
_DELETIONS = frozenset({"delete", "delete_bucket"})
_DATA = frozenset({"create_bucket", "delete_bucket", "put", "delete", "copy"})


class Shipped(ShippedSegments, Protocol):
    """What is read here of the log's catalogue (`engine/catalogue.py`)."""

    def checkpoint_not_above(self, seq: int) -> CheckpointDescriptor | None: ...


class _Found(NamedTuple):
    """A frame of the key that counts, with the seq and time of its version."""

    entry: Entry
    seq: int
    time_us: int


class _Looking(NamedTuple):
    """For what, and from where on."""

    bucket: str
    key: str
    seq: int
    base: RemoteCheckpoint | None
    base_seq: int
    opened: dict[int, Row]
    """The transactions that were open in the checkpoint."""


class ColdVersions:
    """It may be used by several threads at once."""

    def __init__(
        self, fetcher: Fetcher, cold: ColdLog, catalogue: Shipped, *, log: Log | None = None
    ) -> None:
        """With a `log`, whose cold source has to be `cold`, what is not shipped yet is read from there."""
        self._fetcher = fetcher
        self._cold = cold
        self._catalogue = catalogue
        self._log = log
        self._lock = threading.Lock()
        self._checkpoints: OrderedDict[int, RemoteCheckpoint] = OrderedDict()
        self._ended: OrderedDict[int, Row] = OrderedDict()
        self._ends: OrderedDict[tuple[int, int], dict[int, list[Entry]]] = OrderedDict()
        self._ends_count = 0

    def at(self, bucket: str, key: str, seq: int) -> Object | None:
        """The newest version not above `seq`, as a read at `seq` returns it; None where there is no key then.
        A bucket's own record is the key of its name in the bucket ""."""
        with self._fetcher.query():
            found = self._at(bucket, key, seq)
        if found is not None:
            self._fetcher.metrics.used(len(found.value))
        return found

    def root(self, seq: int) -> str | None:
        """That of a checkpoint is recorded."""
        found = self._catalogue.checkpoint_not_above(seq)
        return found.root.hex() if found is not None and found.seq == seq else None

    def scan(self, bucket: str, low: bytes, high: bytes, seq: int) -> Iterator[Object]:
        """The objects of a bucket whose encoded keys are from `low` to below `high`, in their order."""
        self._require_shipped(seq)
        looking = self._look(bucket, "", seq)
        changed = iter(sorted(self._changed(looking, low, high)))
        rows = iter(()) if looking.base is None else looking.base.rows_between(low, high)
        row, key = self._next_row(rows), next(changed, None)
        while row is not None or key is not None:
            row_key = None if row is None else encode_key(row.bucket.encode(), row.key.encode())
            if key is None or (row_key is not None and row_key < key):
                assert row is not None
                yield self._object_of(row)
                row = self._next_row(rows)
                continue
            if row_key == key:
                row = self._next_row(rows)
            found = self.at(bucket, decode_key(key)[1].decode(), seq)
            if found is not None:
                yield found
            key = next(changed, None)

    def _next_row(self, rows: Iterator[CheckpointRow]) -> CheckpointRow | None:
        with self._fetcher.query():
            return next(rows, None)

    def _changed(self, looking: _Looking, low: bytes, high: bytes) -> set[bytes]:
        """The keys of which the log has frames that the checkpoint says nothing of."""
        found: set[bytes] = set()
        after = min([looking.base_seq, *(txn - 1 for txn in looking.opened)])
        for chunk in self._chunks(after, looking.seq):
            for entry in decode_frames(chunk.data, chunk.start, chunk.end, verify=not chunk.verified):
                if entry.kind not in _DATA or entry.refused is not None or entry.seq > looking.seq:
                    continue
                encoded = encode_key(*_indexed(entry.bucket, entry.key))
                if low <= encoded < high:
                    found.add(encoded)
        return found

    def _require_shipped(self, seq: int) -> None:
        if seq > self._catalogue.hwm and self._log is None:
            raise VersionGone(
                f"the archive ends at seq {self._catalogue.hwm}",
                seq=seq,
                hint="read at that seq, or an earlier one",
            )

    def _at(self, bucket: str, key: str, seq: int) -> Object | None:
        self._require_shipped(seq)
        looking = self._look(bucket, key, seq)
        for entry in self._frames_of_key(looking):
            found = self._counted(entry, looking)
            if found is None:
                continue
            if entry.kind in _DELETIONS:
                return None
            return Object(bucket, key, self._value_of(entry), entry.metadata, found.seq, found.time_us)
        return None if looking.base is None else self._of_base(looking, looking.base)

    def _look(self, bucket: str, key: str, seq: int) -> _Looking:
        descriptor = self._catalogue.checkpoint_not_above(seq)
        if descriptor is None:
            return _Looking(bucket, key, seq, None, 0, {})
        with self._lock:
            base = self._checkpoints.get(descriptor.seq)
            if base is None:
                base = self._checkpoints[descriptor.seq] = RemoteCheckpoint(self._fetcher, descriptor)
                if len(self._checkpoints) > CHECKPOINTS_MAX:
                    self._checkpoints.popitem(last=False)
            self._checkpoints.move_to_end(descriptor.seq)
        opened = {
            txn: Row(txn, snapshot_seq, 0, seq_last, doomed=doomed, undone=tuple(map(tuple, undone)))
            for txn, snapshot_seq, seq_last, doomed, undone in base.index.control_body.get("transactions", [])
        }
        return _Looking(bucket, key, seq, base, base.seq, opened)

    # ------------------------------------------------------------------ frames of the key

    def _frames_of_key(self, looking: _Looking) -> Iterator[Entry]:
        """Those that may count, the newest first: above the checkpoint all, below it those of transactions
        that were open there."""
        hwm = self._catalogue.hwm
        if looking.seq > hwm:
            yield from reversed(list(self._unshipped(max(hwm, looking.base_seq), looking)))
        for descriptor in reversed(self._segments(looking.base_seq + 1, looking.seq)):
            for entry in self._of_key(descriptor, looking):
                if looking.base_seq < entry.seq <= looking.seq:
                    yield entry
        if looking.opened:
            for descriptor in reversed(self._segments(min(looking.opened), looking.base_seq)):
                for entry in self._of_key(descriptor, looking):
                    if entry.seq < looking.base_seq and entry.txn in looking.opened:
                        yield entry

    def _segments(self, first: int, last: int) -> list[SegmentDescriptor]:
        found = []
        for descriptor in self._catalogue.segments_from(first):
            if descriptor.first > last:
                break
            found.append(descriptor)
        return found

    def _of_key(self, descriptor: SegmentDescriptor, looking: _Looking) -> Iterator[Entry]:
        # The record of a bucket is indexed by its name alone.
        names = (looking.bucket or looking.key, looking.key if looking.bucket else "")
        for _, frame in self._cold.segment(descriptor).frames_of_key(*map(str.encode, names)):
            (entry,) = decode_frames(frame, 0, len(frame), verify=False)
            if (entry.bucket, entry.key) == names and entry.refused is None:
                yield entry

    def _unshipped(self, after: int, looking: _Looking) -> Iterator[Entry]:
        names = (looking.bucket or looking.key, looking.key if looking.bucket else "")
        for chunk in self._chunks(after, looking.seq):
            for entry in decode_frames(chunk.data, chunk.start, chunk.end, verify=not chunk.verified):
                counts = entry.refused is None and entry.kind != "append"
                if after < entry.seq <= looking.seq and (entry.bucket, entry.key) == names and counts:
                    yield entry

    def _chunks(self, after: int, seq_stop: int) -> Iterator[Chunk]:
        if self._log is None:
            return self._cold.chunks_after(after, seq_stop)
        return read_chunks(self._log.wal, after, seq_stop=seq_stop, cold=self._cold)

    # ------------------------------------------------------------------ what counts

    def _counted(self, entry: Entry, looking: _Looking) -> _Found | None:
        if entry.txn is not None:
            row = self._transaction(entry.txn, looking)
            if not row.committed or row.end_seq > looking.seq or row.has_undone(entry.seq):
                return None
            return _Found(entry, row.end_seq, row.end_time_us)
        seq = entry.seq
        if entry.extras is not None and entry.extras.group_seq_last is not None:
            seq = entry.extras.group_seq_last
        return _Found(entry, seq, entry.time_us) if seq <= looking.seq else None

    def _transaction(self, txn: int, looking: _Looking) -> Row:
        """What has become of a transaction up to the seq that is looked at, or later."""
        with self._lock:
            ended = self._ended.get(txn)
        if ended is not None:
            return ended
        row = looking.opened.get(txn)
        after = txn if row is None else looking.base_seq
        row = row or Row(txn, 0, 0, txn)
        for entry in self._ends_after(after, looking.seq, txn):
            if entry.kind == "commit":
                row = row._replace(
                    end_seq=entry.seq, end_time_us=entry.time_us, committed=entry.refused is None
                )
            elif entry.refused is None:
                savepoint_seq = decode_body(entry).get("savepoint")
                if savepoint_seq is None:
                    row = row._replace(end_seq=entry.seq)
                else:
                    row = row.undo(savepoint_seq, entry.seq)
            if not row.is_open:
                break
        if not row.is_open and txn not in looking.opened:
            # One that began in the checkpoint has only those roll-backs that the checkpoint says.
            with self._lock:
                self._ended[txn] = row
                if len(self._ended) > ENDED_MAX:
                    self._ended.popitem(last=False)
        return row

    def _ends_after(self, after: int, seq: int, txn: int) -> Iterator[Entry]:
        """The commits and aborts of a transaction. Segments without any are not read, others once."""
        hwm = self._catalogue.hwm
        for descriptor in self._segments(after + 1, min(seq, hwm)):
            for entry in self._ends_of(descriptor).get(txn, ()):
                if after < entry.seq <= seq:
                    yield entry
        if seq > hwm:
            yield from (each for each in self._ends_in(max(after, hwm), seq) if each.txn == txn)

    def _ends_of(self, descriptor: SegmentDescriptor) -> dict[int, list[Entry]]:
        """Those of a segment, by transaction."""
        key = (descriptor.epoch, descriptor.first)
        with self._lock:
            found = self._ends.get(key)
            if found is not None:
                self._ends.move_to_end(key)
                return found
        found = {}
        if _ENDS.intersection(self._cold.segment(descriptor).kinds()):
            for entry in self._ends_in(descriptor.first - 1, descriptor.last):
                assert entry.txn is not None
                found.setdefault(entry.txn, []).append(entry)
        with self._lock:
            if key not in self._ends:
                self._ends[key] = found
                self._ends_count += 1 + sum(map(len, found.values()))
            while self._ends_count > ENDS_MAX and len(self._ends) > 1:
                _, gone = self._ends.popitem(last=False)
                self._ends_count -= 1 + sum(map(len, gone.values()))
        return found

    def _ends_in(self, after: int, seq: int) -> Iterator[Entry]:
        for chunk in self._chunks(after, seq):
            at, data = chunk.start, chunk.data
            while at < chunk.end:
                found, length, _, kind, flags, *_ = format.FRAME_FIXED.unpack_from(data, at)
                end = at + FRAME_BYTES + length
                if after < found <= seq and kind in _ENDS and flags & Flag.TXN:
                    (entry,) = decode_frames(data, at, end, verify=not chunk.verified)
                    yield entry
                at = end

    # ------------------------------------------------------------------ values

    def _value_of(self, entry: Entry) -> bytes:
        if entry.extras is None or entry.extras.value_ref is None:
            return entry.value
        length, seq, value_hash = entry.extras.value_ref
        value = self._entry(seq).value
        if len(value) != length or blake3(value).digest() != value_hash:
            raise Corrupt(f"the value that was copied from seq {seq} is another one there", seq=entry.seq)
        return value

    def _entry(self, seq: int) -> Entry:
        descriptor = self._catalogue.segment_of(seq)
        if descriptor is not None:
            found = self._cold.segment(descriptor).frame_of(seq)
            payload = None if found is None else found[1][FRAME_BYTES:]
        else:
            payload = None if self._log is None else self._log.payload_at(seq)
        if payload is None:
            raise Corrupt(f"there is no entry {seq}, whose value was copied", seq=seq)
        return decode_payload(seq, payload)

    def _of_base(self, looking: _Looking, base: RemoteCheckpoint) -> Object | None:
        row = base.row(looking.bucket.encode(), looking.key.encode())
        return None if row is None else self._object_of(row)

    def _object_of(self, row: CheckpointRow) -> Object:
        value = row.value
        if value is None:
            assert row.place is not None
            value = self._cold.value(*row.place, row.value_bytes)
            if blake3(value).digest() != row.value_hash:
                raise Corrupt("a large value is another one than the checkpoint has", seq=row.seq)
        return Object(row.bucket, row.key, value, row.metadata, row.seq, row.time_us)


def _indexed(bucket: str, key: str) -> tuple[bytes, bytes]:
    """Bucket and key as pages have them: the record of a bucket is the key of its name in the bucket ""."""
    return (bucket.encode(), key.encode()) if key else (b"", bucket.encode())
