"""What entries make of keys: from frames to versions, and to the newest of each key.

Always true:
  - what comes out is what the engine says of the same entries: a frame says what was decided, so nothing is
    decided here;
  - a version is as of the end of what made it: a frame in a transaction counts from its `commit` on, whose
    seq and time the version has, if nothing has undone it before; a member of a group from the group's last;
  - frames of a key that count stand in the log in the order of their versions: who commits first wins, and
    others that have written the key are refused. So the last frame that counts has the newest version, and of
    several in one transaction or group the last one survives;
  - a part is replayed on its own. Of other parts it has to know only the ends of the transactions that are
    open where it ends, of which there are never more than `OPEN_MAX` (`engine/state/decide.py`).

Nothing here knows of Spark: tables go in, and tables come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lowwater.engine.format.format import Kind

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ENDS = frozenset({"commit", "abort"})
CHANGES = frozenset({"create_bucket", "delete_bucket", "put", "delete", "copy"})
END_COLUMNS = ("seq", "kind_code", "refused", "txn", "previous", "time_us", "savepoint")
"""What `ends_of` needs of a frame."""
COUNT_COLUMNS = ("seq", "kind_code", "refused", "txn", "group_last", "time_us")
"""What `counting` needs of a frame."""

_DATA_KIND_LAST = int(Kind.COPY)
_DELETIONS = (int(Kind.DELETE), int(Kind.DELETE_BUCKET))
_BUCKETS = (int(Kind.CREATE_BUCKET), int(Kind.DELETE_BUCKET))

# What the end of a transaction is.
ABORTED, COMMITTED, ROLLED_BACK = 0, 1, 2


@dataclass(frozen=True)
class Ends:
    """Ends of transactions, and roll-backs to savepoints, in the order of the log."""

    seq: Int64
    txn: Int64
    time_us: Int64
    what: Int64
    savepoint: Int64
    """The savepoint of a roll-back: what lies between this seq and its own is undone. Else 0."""

    def __len__(self) -> int:
        return len(self.seq)

    def where(self, mask: Mask) -> Ends:
        return Ends(*(each[mask] for each in self._columns))

    def in_order(self) -> Ends:
        order = np.argsort(self.seq, kind="stable")
        return Ends(*(each[order] for each in self._columns))

    @property
    def _columns(self) -> tuple[Int64, ...]:
        return self.seq, self.txn, self.time_us, self.what, self.savepoint

    def to_batch(self) -> pa.RecordBatch:
        return pa.record_batch(dict(zip(_END_FIELDS, map(pa.array, self._columns), strict=True)))

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch) -> Ends:
        return cls(*(numbers(batch.column(name)) for name in _END_FIELDS)).in_order()


_END_FIELDS = ("seq", "txn", "time_us", "what", "savepoint")
ENDS_SCHEMA = ", ".join(f"{name} bigint" for name in _END_FIELDS)
NO_ENDS = Ends(*(np.empty(0, np.int64) for _ in _END_FIELDS))


def joined(some: Ends, others: Ends) -> Ends:
    """All of them in the order of the log. One that is among both is the same as one."""
    if not len(others):
        return some
    pairs = zip(some._columns, others._columns, strict=True)
    return Ends(*(np.concatenate(pair) for pair in pairs)).in_order()


def ends_of(frames: pa.RecordBatch) -> Ends:
    """The ends and roll-backs among frames, of which END_COLUMNS are known."""
    kinds = numbers(frames.column("kind_code"))
    mask = (kinds == int(Kind.COMMIT)) | (kinds == int(Kind.ABORT))
    if not mask.any():
        return NO_ENDS
    frames = frames.filter(pa.array(mask))
    kinds = kinds[mask]
    refused = there(frames.column("refused"))
    savepoints = there(frames.column("savepoint"))
    # A refused commit ends its transaction too, where that was open: then it has a frame before this one. A
    # refused abort changes nothing.
    is_commit = kinds == int(Kind.COMMIT)
    counts = (numbers(frames.column("previous")) > 0) & (is_commit | ~refused)
    what = np.where(savepoints, ROLLED_BACK, np.where(is_commit & ~refused, COMMITTED, ABORTED))
    return Ends(
        numbers(frames.column("seq")),
        numbers(frames.column("txn")),
        numbers(frames.column("time_us")),
        what.astype(np.int64),
        numbers(frames.column("savepoint")),
    ).where(counts)


@dataclass(frozen=True)
class Since:
    """Entries up to `seq` are known from a checkpoint, but for those of the transactions that were open."""

    seq: int = 0
    opened: tuple[int, ...] = ()


FROM_THE_BEGINNING = Since()


def counting(
    frames: pa.RecordBatch, ends: Ends, at: int, *, above: int = 0, since: Since = FROM_THE_BEGINNING
) -> pa.RecordBatch:
    """The frames that made a version of a seq up to `at` and above `above`, with two more columns:
    `version_seq` and `version_time_us`. Of the frames COUNT_COLUMNS are known; `ends` are all that concern
    them, in order."""
    seqs = numbers(frames.column("seq"))
    kinds = numbers(frames.column("kind_code"))
    in_txn = there(frames.column("txn"))
    groups = frames.column("group_last")
    version_seqs = seqs if groups.null_count == len(seqs) else np.where(there(groups), numbers(groups), seqs)
    times = numbers(frames.column("time_us"))
    mask = (kinds <= _DATA_KIND_LAST) & ~there(frames.column("refused"))
    if since.seq:
        mask &= in_txn | (seqs > since.seq)
    places = np.flatnonzero(mask & in_txn)
    if len(places):
        txns = numbers(frames.column("txn"))[places]
        committed, end_seqs, end_times = _resolved(seqs[places], txns, ends)
        if since.seq:
            committed &= (seqs[places] > since.seq) | np.isin(txns, np.array(since.opened, np.int64))
        version_seqs, times = version_seqs.copy(), times.copy()
        version_seqs[places], times[places] = end_seqs, end_times
        mask[places] = committed
    mask &= (version_seqs <= at) & (version_seqs > above)
    frames = frames.append_column("version_seq", pa.array(version_seqs))
    frames = frames.append_column("version_time_us", pa.array(times))
    return frames if mask.all() else frames.filter(pa.array(mask))


def _resolved(seqs: Int64, txns: Int64, ends: Ends) -> tuple[Mask, Int64, Int64]:
    """Return which frames in transactions count once theirs has ended, and the seqs and times of those
    ends."""
    final = ends.where(ends.what != ROLLED_BACK)
    # What names one that has ended already is refused and has no frame before it, so it is not here.
    names, firsts = np.unique(final.txn, return_index=True)
    if not len(names):
        nothing = np.zeros(len(seqs), np.int64)
        return np.zeros(len(seqs), np.bool_), nothing, nothing
    found = np.minimum(np.searchsorted(names, txns), len(names) - 1)
    rows = firsts[found]
    committed: Mask = (names[found] == txns) & (final.what[rows] == COMMITTED)
    back = ends.where(ends.what == ROLLED_BACK)
    if len(back):
        committed &= ~_undone(seqs, txns, back)
    return committed, final.seq[rows], final.time_us[rows]


def _undone(seqs: Int64, txns: Int64, back: Ends) -> Mask:
    """Which frames lie between a savepoint and the roll-back to it. What was undone stays so."""
    order = np.lexsort((seqs, txns))
    sorted_seqs, sorted_txns = seqs[order], txns[order]
    steps = np.zeros(len(order) + 1, np.int64)
    starts = np.searchsorted(sorted_txns, back.txn, "left")
    stops = np.searchsorted(sorted_txns, back.txn, "right")
    for start, stop, savepoint, seq in zip(starts, stops, back.savepoint, back.seq, strict=True):
        within = sorted_seqs[start:stop]
        steps[start + np.searchsorted(within, savepoint, "right")] += 1
        steps[start + np.searchsorted(within, seq, "left")] -= 1
    undone = np.zeros(len(order), np.bool_)
    undone[order] = np.cumsum(steps[:-1]) > 0
    return undone


# ---------------------------------------------------------------------------- keys


def newest(versions: pa.RecordBatch, unwanted: Mask | None = None) -> pa.RecordBatch:
    """The last row of each (bucket, key), in order, but for those that are unwanted. The record of a bucket
    has an empty key."""
    return _last_of(versions, _keys(versions), unwanted)


def thinned(batches: Iterable[pa.RecordBatch], bytes_max: int) -> Iterator[pa.RecordBatch]:
    """Frames, of which COUNT_COLUMNS, bucket and key are known, without some that are not the newest of their
    key: whenever there are more than so many bytes, or twice what was left before."""
    kept: list[pa.RecordBatch] = []
    size, limit = 0, bytes_max
    for batch in batches:
        kept.append(batch)
        size += batch.nbytes
        if size > limit:
            kept = [_without_outdated(pa.concat_batches(kept))]
            size = kept[0].nbytes
            limit = max(bytes_max, 2 * size)
    yield from kept


def _without_outdated(frames: pa.RecordBatch) -> pa.RecordBatch:
    """Without what stands before a frame of the same key that counts whatever comes: one in no transaction
    and no group."""
    outside = ~(
        there(frames.column("txn")) | there(frames.column("group_last")) | there(frames.column("refused"))
    )
    is_change = numbers(frames.column("kind_code")) <= _DATA_KIND_LAST
    places = np.arange(len(frames))
    keys = _keys(frames)
    last = np.full(int(keys.max()) + 1, -1, np.int64)
    certain = outside & is_change
    last[keys[certain]] = places[certain]
    return frames.filter(pa.array(~is_change | (places >= last[keys])))


def surviving(versions: pa.RecordBatch) -> pa.RecordBatch:
    """The last row of each version: of several writes to a key in one transaction or group. Others may be in
    other parts."""
    if not (there(versions.column("txn")) | there(versions.column("group_last"))).any():
        return versions
    seqs, count = _dense(versions.column("version_seq"))
    return _last_of(versions, _paired(_keys(versions), seqs, count))


def _last_of(rows: pa.RecordBatch, identities: Int64, unwanted: Mask | None = None) -> pa.RecordBatch:
    """The last of all rows with one identity, which are dense numbers."""
    if not len(identities):
        return rows
    last = np.full(int(identities.max()) + 1, -1, np.int64)
    # Of several that are assigned to one place the last stays.
    last[identities] = np.arange(len(identities))
    places = last[last >= 0]
    if unwanted is not None:
        places = places[~unwanted[places]]
    if len(places) == len(identities):
        return rows
    places.sort()
    return rows.take(pa.array(places))


def _keys(rows: pa.RecordBatch) -> Int64:
    """A dense number for each row, equal where bucket and key are."""
    keys, _ = _dense(rows.column("key"))
    buckets, count = _dense(rows.column("bucket"))
    return keys if count <= 1 else _paired(keys, buckets, count)


def _paired(some: Int64, others: Int64, count: int) -> Int64:
    return _dense(pa.array(some * count + others))[0]


def _dense(column: pa.Array) -> tuple[Int64, int]:
    """Each value as a number from 0 up, and how many there are."""
    encoded = column.dictionary_encode()
    return numbers(encoded.indices), len(encoded.dictionary)


def is_deletion(rows: pa.RecordBatch) -> Mask:
    return np.isin(numbers(rows.column("kind_code")), _DELETIONS)


def is_bucket(rows: pa.RecordBatch) -> Mask:
    return np.isin(numbers(rows.column("kind_code")), _BUCKETS)


# ---------------------------------------------------------------------------- columns


def numbers(column: pa.Array) -> Int64:
    """0 for what is not there."""
    filled = pc.fill_null(column, 0) if column.null_count else column
    found: Int64 = filled.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return found


def there(column: pa.Array) -> Mask:
    if column.null_count in (0, len(column)):
        return np.full(len(column), not column.null_count, np.bool_)
    mask: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    return mask


def needed(*columns: Iterable[str]) -> tuple[str, ...]:
    """All of these columns, each once."""
    return tuple(dict.fromkeys(name for each in columns for name in each))


def one_batch(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """All of them as one. They are of one part, whose size is bounded."""
    kept = [each for each in batches if len(each)]
    if len(kept) == 1:
        return kept[0]
    if not kept:
        return pa.RecordBatch.from_pylist([], schema)
    return pa.concat_batches(kept)
