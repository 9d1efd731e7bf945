"""Reads at a seq of which the local pages know nothing any more: from a shipped checkpoint and the log.

Always true:
  - the answer is what the log says: the newest checkpoint not above the seq whose index can be read, and of
    the segments between them every frame that their key indexes have of the key. Slower than a page, and
    never wrong;
  - frames of a key that took effect stand in the log in the order in which they did: who commits first wins,
    and everybody else who has written the key is refused. So the newest frame that counts has the answer;
  - a version of a transaction counts from its `commit` on, whose seq and time it has, if nothing has undone
    it before; one of a group from the group's last seq on;
  - a scan holds in memory the keys that were written since the checkpoint, and values of BATCH_BYTES, or one
    that is larger: those of many keys are read together, in the order in which they lie in the log;
  - what cannot be read is the error of its own key: a scan gives all that come before it, and whoever stops
    there never hears of it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol

from blake3 import blake3

from lowwater.engine.checkpoint.checkpoints import CheckpointRow
from lowwater.engine.format import format
from lowwater.engine.format.entries import Entry, decode_body, decode_frames, decode_payload
from lowwater.engine.format.format import FRAME_BYTES, Flag, Kind
from lowwater.engine.format.keys import decode_key, encode_key
from lowwater.engine.format.records import Object
from lowwater.engine.log.log import Log
from lowwater.engine.log.reader import read_chunks
from lowwater.engine.log.ring import Chunk
from lowwater.engine.state.catalogue import CheckpointDescriptor, SegmentDescriptor
from lowwater.engine.state.transaction_table import TransactionRow
from lowwater.errors import Corrupt, LowwaterError, VersionGone
from lowwater.logging import get_logger
from lowwater.tiering.cold import ColdLog, ShippedSegments
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint

_logger = get_logger("cold")

CHECKPOINTS_MAX = 4
# So many transactions that have ended are remembered, and so many entries that ended some, with all others of
# their segments: frames have no index by transaction, so each segment is gone through once.
ENDED_MAX = 10_000
ENDS_MAX = 100_000

# Of so many keys a scan reads the values together: of few at first, since many look at the first ones only.
BATCH_KEYS_MIN = 16
BATCH_KEYS_MAX = 1024
BATCH_BYTES = 4 * 2**20

_ENDS = frozenset({Kind.COMMIT, Kind.ABORT})
_DELETIONS = frozenset({"delete", "delete_bucket"})
_DATA = frozenset({"create_bucket", "delete_bucket", "put", "delete", "copy"})


class Shipped(ShippedSegments, Protocol):
    """What is read here of the log's catalogue (`engine/state/catalogue.py`)."""

    def checkpoint_not_above(self, seq: int) -> CheckpointDescriptor | None: ...


class _Found(NamedTuple):
    """A frame of the key that counts, with the seq and time of its version."""

    entry: Entry
    seq: int
    time_us: int


class _Wanted(NamedTuple):
    """A key of a scan, with what the checkpoint has of it."""

    key: bytes
    row: CheckpointRow | None


class _Looking(NamedTuple):
    """For what, and from where on."""

    bucket: str
    key: str
    seq: int
    base: RemoteCheckpoint | None
    base_seq: int
    opened: dict[int, TransactionRow]
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
        self._lost: set[int] = set()
        """Seqs of checkpoints whose index could not be read."""
        self._ended: OrderedDict[int, TransactionRow] = OrderedDict()
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
        """Return the recorded root of the checkpoint of this very seq; None where there is none."""
        found = self._catalogue.checkpoint_not_above(seq)
        return found.root.hex() if found is not None and found.seq == seq else None

    def scan(self, bucket: str, low: bytes, high: bytes, seq: int) -> Iterator[Object]:
        """The objects of a bucket whose encoded keys are from `low` to below `high`, in their order."""
        self._require_shipped(seq)
        looking = self._look(bucket, "", seq)
        changed = self._changed(looking, low, high)
        wanted = self._merged(looking, low, high, changed)
        waiting: deque[_Wanted] = deque()
        read: dict[bytes, Object | None] = {}
        count = BATCH_KEYS_MIN
        alone_until = b""
        ended_by: LowwaterError | None = None
        while True:
            with self._fetcher.query():
                try:
                    waiting.extend(islice(wanted, max(0, count - len(waiting))))
                except LowwaterError as error:
                    ended_by = error  # of the keys after those that wait
                if not waiting:
                    if ended_by is not None:
                        raise ended_by
                    return
                if waiting[0].key not in read:
                    batch = [*waiting][: 1 if waiting[0].key <= alone_until else count]
                    try:
                        is_all = self._read_batch(batch, changed, looking, read)
                    except LowwaterError:
                        if batch[0].key not in read:
                            raise
                        # Nobody has asked for the key that it is of: one by one, that comes in its turn.
                        alone_until, is_all = batch[-1].key, False
                    count = min(2 * count, BATCH_KEYS_MAX) if is_all else max(1, count // 2)
            found = read.pop(waiting.popleft().key)
            if found is not None:
                self._fetcher.metrics.used(len(found.value))
                yield found
                del found  # or it would be in memory while the next one is read

    def _merged(
        self, looking: _Looking, low: bytes, high: bytes, changed: Iterable[bytes]
    ) -> Iterator[_Wanted]:
        """The keys of the checkpoint and of the log above it, in their order."""
        rows = iter(()) if looking.base is None else looking.base.rows_between(low, high)
        row = next(rows, None)
        for key in sorted(changed):
            while row is not None and (row_key := _key_of(row)) < key:
                yield _Wanted(row_key, row)
                row = next(rows, None)
            is_row = row is not None and _key_of(row) == key
            yield _Wanted(key, row if is_row else None)
            if is_row:
                row = next(rows, None)
        while row is not None:
            yield _Wanted(_key_of(row), row)
            row = next(rows, None)

    def _changed(self, looking: _Looking, low: bytes, high: bytes) -> dict[bytes, list[int]]:
        """The keys of which the log has frames that the checkpoint says nothing of, with the seqs of those
        that may be their newest: of the last one that counts, and of those of transactions after it."""
        found: dict[bytes, list[int]] = {}
        after = min([looking.base_seq, *(txn - 1 for txn in looking.opened)])
        for chunk in self._chunks(after, looking.seq):
            for entry in decode_frames(chunk.data, chunk.start, chunk.end, verify=not chunk.verified):
                if entry.kind not in _DATA or entry.refused is not None or entry.seq > looking.seq:
                    continue
                if entry.seq <= looking.base_seq and entry.txn not in looking.opened:
                    continue
                encoded = encode_key(*_indexed(entry.bucket, entry.key))
                if not low <= encoded < high:
                    continue
                if entry.txn is not None:
                    found.setdefault(encoded, []).append(entry.seq)
                elif self._counted(entry, looking) is not None:
                    found[encoded] = [entry.seq]
        return found

    def _read_batch(
        self,
        batch: list[_Wanted],
        changed: dict[bytes, list[int]],
        looking: _Looking,
        read: dict[bytes, Object | None],
    ) -> bool:
        """Read what the first of these keys holds, and of the others what there is room for, in the order of
        the log. Whether that is all."""
        first, *others = batch
        read.update(self._read([first], changed, looking, read, lambda _: True))
        held = sum(len(each.value) for each in read.values() if each is not None)

        def fits(value_bytes: int) -> bool:
            return held + value_bytes <= BATCH_BYTES

        for key, found in self._read(others, changed, looking, read, fits):
            read[key] = found
            held += 0 if found is None else len(found.value)
        return all(each.key in read for each in others)

    def _read(
        self,
        batch: list[_Wanted],
        changed: dict[bytes, list[int]],
        looking: _Looking,
        known: Container[bytes],
        fits: Callable[[int], bool],
    ) -> Iterator[tuple[bytes, Object | None]]:
        """What keys hold that are not known. A value that does not fit, by its size, is left out."""
        left = {key: list(changed.get(key, ())) for key, _ in batch if key not in known}
        while by_seq := {seqs.pop(): key for key, seqs in left.items() if seqs}:
            for seq, entry in self._entries(sorted(by_seq), fits):
                key = by_seq[seq]
                if entry is None:
                    del left[key]
                elif (counted := self._counted(entry, looking)) is not None:
                    del left[key]
                    if fits(_referred_bytes(entry)):
                        name = decode_key(key)[1].decode()
                        yield key, self._object_of_entry(looking.bucket, name, counted)
        # Of these the log says nothing that counts.
        rows = [each.row for each in batch if each.key in left and each.row is not None]
        for row in sorted(rows, key=_place_of):
            if row.place is None or fits(row.value_bytes):
                yield _key_of(row), self._object_of(row)
            del left[_key_of(row)]
        yield from dict.fromkeys(left).items()

    def _entries(self, seqs: list[int], fits: Callable[[int], bool]) -> Iterator[tuple[int, Entry | None]]:
        """The entries with these seqs, which rise; None for those that do not fit. What lies in one block is
        read once."""
        hwm = self._catalogue.hwm
        at = 0
        while at < len(seqs) and seqs[at] <= hwm:
            descriptor = self._catalogue.segment_of(seqs[at])
            if descriptor is None:
                raise _no_entry(seqs[at])
            stop = bisect_right(seqs, descriptor.last, at)
            for seq, frame in self._cold.segment(descriptor).frames_of(seqs[at:stop], fits):
                yield seq, None if frame is None else next(decode_frames(frame, 0, len(frame), verify=False))
            at = stop
        for seq in seqs[at:]:
            entry = self._entry(seq)
            yield seq, entry if fits(len(entry.value)) else None

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
            return self._object_of_entry(bucket, key, found)
        return None if looking.base is None else self._of_base(looking, looking.base)

    def _look(self, bucket: str, key: str, seq: int) -> _Looking:
        base = self._base(seq)
        if base is None:
            return _Looking(bucket, key, seq, None, 0, {})
        opened = {
            txn: TransactionRow(
                txn, snapshot_seq, 0, seq_last, doomed=doomed, undone=tuple(map(tuple, undone))
            )
            for txn, snapshot_seq, seq_last, doomed, undone in base.index.control_body.get("transactions", [])
        }
        return _Looking(bucket, key, seq, base, base.seq, opened)

    def _base(self, seq: int) -> RemoteCheckpoint | None:
        """The newest checkpoint not above a seq that can be read."""
        while (descriptor := self._catalogue.checkpoint_not_above(seq)) is not None:
            if descriptor.seq not in self._lost:
                base = self._checkpoint(descriptor)
                error = base.why_lost()
                if error is None:
                    return base
                # Not asked for again in this life: without it a read is only slower.
                self._lost.add(descriptor.seq)
                _logger.warning("a checkpoint of the archive is lost", object=base.path, error=str(error))
            seq = descriptor.seq - 1
        return None

    def _checkpoint(self, descriptor: CheckpointDescriptor) -> RemoteCheckpoint:
        with self._lock:
            found = self._checkpoints.get(descriptor.seq)
            if found is None:
                found = self._checkpoints[descriptor.seq] = RemoteCheckpoint(self._fetcher, descriptor)
                if len(self._checkpoints) > CHECKPOINTS_MAX:
                    self._checkpoints.popitem(last=False)
            self._checkpoints.move_to_end(descriptor.seq)
            return found

    # ------------------------------------------------------------------ frames of the key

    def _frames_of_key(self, looking: _Looking) -> Iterator[Entry]:
        """Yield the entries of a key that may count, the newest first. Above the checkpoint these are all
        entries, below it those of transactions that were open there."""
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

    def _transaction(self, txn: int, looking: _Looking) -> TransactionRow:
        """What has become of a transaction up to the seq that is looked at, or later."""
        with self._lock:
            ended = self._ended.get(txn)
        if ended is not None:
            return ended
        row = looking.opened.get(txn)
        after = txn if row is None else looking.base_seq
        row = row or TransactionRow(txn, 0, 0, txn)
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
        """Return the commits and aborts in a segment, by transaction."""
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

    def _object_of_entry(self, bucket: str, key: str, found: _Found) -> Object | None:
        entry = found.entry
        if entry.kind in _DELETIONS:
            return None
        return Object(bucket, key, self._value_of(entry), entry.metadata, found.seq, found.time_us)

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
            raise _no_entry(seq)
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


def _no_entry(seq: int) -> Corrupt:
    return Corrupt(f"there is no entry {seq}, which has a value that is wanted", seq=seq)


def _referred_bytes(entry: Entry) -> int:
    """How large a value is that lies in another entry; 0 where there is none."""
    return 0 if entry.extras is None or entry.extras.value_ref is None else entry.extras.value_ref[0]


def _key_of(row: CheckpointRow) -> bytes:
    return encode_key(row.bucket.encode(), row.key.encode())


def _place_of(row: CheckpointRow) -> tuple[int, int]:
    """Where its value lies; what is in the row itself comes first."""
    return row.place or (0, 0)


def _indexed(bucket: str, key: str) -> tuple[bytes, bytes]:
    """Bucket and key as pages have them: the record of a bucket is the key of its name in the bucket ""."""
    return (bucket.encode(), key.encode()) if key else (b"", bucket.encode())
