"""The transaction table: what has become of each transaction, and of its versions in memory and in pages.

Always true:
  - it is a function of the entries applied. A row knows its transaction up to `seq_last`: what redo repeats
    of it up to there changes nothing, so a row may be ahead of redo, or made anew by it;
  - a version of a transaction carries the seq of its frame and the id of its transaction (the seq of its
    `begin`), in memory and in pages; only its row says whether, and with which seq and time, others see it;
  - the row of a transaction is here as long as a record in memory or a row of a page carries its id, or redo
    may meet its frames without its `begin`;
  - rows are never changed, but exchanged: what was taken out of the table with the lock stays what it was.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import cbor2

from lowwater.engine.format import format
from lowwater.engine.format.entries import decode_body, decode_payload
from lowwater.engine.format.format import Kind
from lowwater.engine.format.page import UNSTAMPED, DataPage
from lowwater.engine.format.records import (
    PageVersion,
    Record,
    is_transactional,
    seq_of,
    transaction_of,
)
from lowwater.errors import Corrupt

TABLE_KEY = b"transactions"
# Before the key of a page that has rows of transactions: the meta has their ids.
UNSTAMPED_PREFIX = b"unstamped/"
_NO_ROWS = cbor2.dumps([])
_NOBODY: frozenset[int] = frozenset()
_IDS = "Q"

# Codes of refusals after which a transaction can only abort (`decide.Refusal`).
DOOMING_CODES = frozenset({31, 33})


class TransactionRow(NamedTuple):
    """One transaction. `end_seq` is 0 while it is open."""

    txn: int
    snapshot_seq: int
    floor: int  # while it is open, versions that were superseded above this seq are kept
    seq_last: int
    entries: int = 0
    size_bytes: int = 0
    doomed: bool = False
    # Frames between the two seqs of a pair were undone by a roll-back to a savepoint. In order.
    undone: tuple[tuple[int, int], ...] = ()
    end_seq: int = 0
    end_time_us: int = 0
    committed: bool = False

    @property
    def is_open(self) -> bool:
        return not self.end_seq

    def has_undone(self, seq: int) -> bool:
        """Whether its frame with this seq counts no more, even if it commits."""
        undone = self.undone
        if not undone:
            return False
        index = bisect_left(undone, seq, key=_before) if len(undone) > 1 else 0
        return index < len(undone) and undone[index][0] < seq < undone[index][1]

    def to_control(self) -> list[Any]:
        """What a checkpoint says of an open transaction: the log has its writes, from its `begin` on."""
        return [self.txn, self.snapshot_seq, self.seq_last, self.doomed, list(map(list, self.undone))]

    def after(self, seq: int, kind: int, refused: int | None, payload: bytes) -> TransactionRow:
        """What the next frame of the transaction makes of it."""
        if kind == Kind.COMMIT:
            time_us = int.from_bytes(payload[format.TIME_SLICE], "little")
            return self._replace(seq_last=seq, end_seq=seq, end_time_us=time_us, committed=refused is None)
        if refused is not None:
            return self._replace(seq_last=seq, doomed=self.doomed or refused in DOOMING_CODES)
        if kind == Kind.ABORT:
            savepoint_seq = decode_body(decode_payload(seq, payload)).get("savepoint")
            if savepoint_seq is None:
                return self._replace(seq_last=seq, end_seq=seq)
            return self.undo(savepoint_seq, seq)
        return self._replace(
            seq_last=seq, entries=self.entries + 1, size_bytes=self.size_bytes + len(payload)
        )

    def undo(self, savepoint_seq: int, seq: int) -> TransactionRow:
        """Back to `savepoint_seq`, by the frame `seq`."""
        kept = [pair for pair in self.undone if pair[0] < savepoint_seq]
        if kept and kept[-1][1] >= savepoint_seq:
            # The savepoint is that roll-back itself, or lies in what it undid: nothing of it is between.
            savepoint_seq = kept.pop()[0]
        return self._replace(undone=(*kept, (savepoint_seq, seq)), seq_last=seq)


def _before(pair: tuple[int, int]) -> int:
    return pair[1]


View = Mapping[int, TransactionRow]
"""The rows that versions in one place may need."""


class SeenVersion(NamedTuple):
    """A version that somebody can see: a record, or a row of a page where `record` is None."""

    seq: int
    time_us: int | None  # None: as it stands there
    record: Record | None
    row: int
    is_own: bool = False


def seen(
    records: Iterable[Record], page: DataPage | None, row: int, view: View, *, viewer: int = 0
) -> Iterator[SeenVersion]:
    """The versions of a key that are committed, or of the transaction `viewer`, newest first. Its own have
    the seqs of their frames."""
    for record in records:
        seq = seq_of(record)
        if not is_transactional(record):
            yield SeenVersion(seq, None, record, -1)
        elif (found := _seen(view[transaction_of(record)], seq, viewer)) is not None:
            yield SeenVersion(found[0], found[1], record, -1, found[2])
    if page is None or row < 0:
        return
    flags, seqs, times = page.flags, page.seqs, page.times
    for index in range(row, row + page.versions(row)):
        if not flags[index] & UNSTAMPED:
            yield SeenVersion(seqs[index], None, None, index)
        elif (found := _seen(view[times[index]], seqs[index], viewer)) is not None:
            yield SeenVersion(found[0], found[1], None, index, found[2])


def _seen(row: TransactionRow, seq: int, viewer: int) -> tuple[int, int, bool] | None:
    if row.txn == viewer:
        return None if row.has_undone(seq) else (seq, 0, True)
    if not row.committed or row.has_undone(seq):
        return None
    return row.end_seq, row.end_time_us, False


def holder(records: Iterable[Record], page: DataPage | None, row: int, view: View) -> TransactionRow | None:
    """The open transaction that has written a key, and may still commit."""
    for record in records:
        if not is_transactional(record):
            return None
        each = view[transaction_of(record)]
        if not each.has_undone(seq_of(record)):
            if each.committed:
                return None
            if each.is_open and not each.doomed:
                return each
    if page is None or row < 0:
        return None
    flags, seqs, times = page.flags, page.seqs, page.times
    for index in range(row, row + page.versions(row)):
        if not flags[index] & UNSTAMPED:
            return None
        each = view[times[index]]
        if not each.has_undone(seqs[index]):
            if each.committed:
                return None
            if each.is_open and not each.doomed:
                return each
    return None


# ---------------------------------------------------------------------------- the table


class TransactionTable:
    """All rows by their ids. With the state's lock."""

    def __init__(self) -> None:
        self.rows: dict[int, TransactionRow] = {}
        self.open: dict[int, TransactionRow] = {}
        # The pages with rows that carry an id: page key, ids.
        self.unstamped: dict[bytes, frozenset[int]] = {}
        self._page_counts: Counter[int] = Counter()
        # How much transactions have written that ended since pages were last swept.
        self.ended_bytes = 0
        # How many of them others have doomed, by writing first.
        self.doomed = 0

    @property
    def floor(self) -> int | None:
        """Versions that were superseded above this seq are kept; None where no transaction is open."""
        return min((row.floor for row in self.open.values()), default=None)

    def floor_at(self, seq: int) -> int:
        """Return the seq above which superseded versions are kept, as of `seq`; `seq` itself where no
        transaction was open. In redo rows are ahead: what a transaction has written stays unstamped up to its
        end, and takes the place of nothing before."""
        return min((row.floor for row in self.rows.values() if not 0 < row.end_seq <= seq), default=seq)

    @property
    def oldest_open_seq(self) -> int | None:
        """The seq of the oldest `begin` of which the end is not known."""
        return min(self.open, default=None)

    def put(self, row: TransactionRow) -> None:
        self.rows[row.txn] = row
        if row.is_open:
            self.open[row.txn] = row
        elif self.open.pop(row.txn, None) is not None:
            self.ended_bytes += row.size_bytes

    def mark(self, page_key: bytes, ids: frozenset[int]) -> bool:
        """A page carries these ids, and no others. Whether that is news."""
        before = self.unstamped.pop(page_key, _NOBODY)
        if ids:
            self.unstamped[page_key] = ids
        if before == ids:
            return False
        self._page_counts.update(ids)
        self._page_counts.subtract(before)
        for txn in before:
            if not self._page_counts[txn]:
                del self._page_counts[txn]
        return True

    @property
    def in_pages(self) -> set[int]:
        """The transactions whose ids pages carry."""
        return set(self._page_counts)

    def doom(self, txn: int) -> None:
        self.doomed += 1
        self.put(self.rows[txn]._replace(doomed=True))

    def view(self, *ids: Iterable[int]) -> View | None:
        """The rows of these ids; None where there are none."""
        rows = self.rows
        found = {txn: rows[txn] for each in ids for txn in each}
        return found or None

    def forget(self, carried: set[int], redo_seq: int) -> None:
        """Rows of transactions whose ids nothing carries any more, and of which redo from `redo_seq` on meets
        nothing. One of which it would meet everything stays: it may meet a part when `redo_seq` has risen."""
        for txn, row in list(self.rows.items()):
            if 0 < row.end_seq < redo_seq and txn not in carried:
                del self.rows[txn]

    def ended(self, applied: int) -> set[int]:
        """Return the transactions that have ended by `applied`."""
        return {txn for txn, row in self.rows.items() if 0 < row.end_seq <= applied}

    def carries(self, keys: Iterable[bytes], ids: set[int]) -> Iterator[bytes]:
        """Which of these pages carry one of the ids."""
        unstamped = self.unstamped
        return (key for key in keys if key in unstamped and not ids.isdisjoint(unstamped[key]))


# ---------------------------------------------------------------------------- in the page store


def load_table(stored: Mapping[bytes, bytes], path: str) -> TransactionTable:
    """What the store's meta says."""
    table = TransactionTable()
    try:
        for fields in cbor2.loads(stored.get(TABLE_KEY, _NO_ROWS)):
            row = TransactionRow(*fields)
            table.put(row._replace(undone=tuple((after, before) for after, before in row.undone)))
    except Exception as error:  # cbor2 raises whatever its decoding of hostile bytes runs into
        raise Corrupt("the transaction table of the pages cannot be read", path=path) from error
    for key, data in stored.items():
        if key.startswith(UNSTAMPED_PREFIX):
            table.mark(key.removeprefix(UNSTAMPED_PREFIX), decode_ids(data))
    if not table.in_pages <= set(table.rows):
        raise Corrupt("pages have rows of transactions that are not in their table", path=path)
    table.ended_bytes = sum(
        row.size_bytes for row in map(table.rows.__getitem__, table.in_pages) if row.end_seq
    )
    return table


def encode_table(view: View, carried: set[int], redo_seq: int) -> bytes | None:
    """The rows that the next life needs, for the meta of the transaction that makes `redo_seq` hold."""
    rows: list[Any] = [
        list(row)
        for _, row in sorted(view.items())
        if row.is_open or row.txn in carried or _is_met_halfway(row, redo_seq)
    ]
    return cbor2.dumps(rows, canonical=True) if rows else None


def _is_met_halfway(row: TransactionRow, redo_seq: int) -> bool:
    """Whether redo would meet frames of the transaction and not its `begin`."""
    return row.txn < redo_seq <= row.end_seq


def encode_ids(ids: Iterable[int]) -> bytes:
    return array(_IDS, sorted(ids)).tobytes()


def decode_ids(data: bytes) -> frozenset[int]:
    if len(data) % format.U64.size or not data:
        raise Corrupt("the ids of a page's transactions cannot be read")
    return frozenset(array(_IDS, data))


# ---------------------------------------------------------------------------- on the way into pages


def settle_versions(versions: list[PageVersion], view: View, frozen_seq: int) -> list[PageVersion]:
    """Versions of a key without those that were undone, and with seq and time of what was committed up to
    `frozen_seq`: a page may not show what is above its own seq."""
    settled = []
    for version in versions:
        frame_seq, _, txn, flags, metadata, value = version
        if flags & UNSTAMPED:
            row = view[txn]
            if _is_dead(row, frame_seq):
                continue
            if row.committed and row.end_seq <= frozen_seq:
                version = (frame_seq, row.end_seq, row.end_time_us, flags & ~UNSTAMPED, metadata, value)
        settled.append(version)
    return settled


def settle_page(page: DataPage, view: View, frozen_seq: int) -> DataPage:
    """Return a page without rows that were undone, and with seq and time of what was committed up to
    `frozen_seq`. If one transaction wrote a key several times, the last of the writes survives its commit."""
    if not ids_in(page):
        return page
    keep: list[bool] = []
    keys = page.keys
    seqs, times, flags = page.seqs[:], page.times[:], page.flags[:]
    last = (b"", 0)
    for index, key in enumerate(keys):
        if flags[index] & UNSTAMPED:
            row = view[times[index]]
            if _is_dead(row, seqs[index]):
                keep.append(False)
                continue
            if row.committed and row.end_seq <= frozen_seq:
                if last == (key, row.txn):
                    keep.append(False)
                    continue
                last = (key, row.txn)
                seqs[index], times[index] = row.end_seq, row.end_time_us
                flags[index] &= ~UNSTAMPED
        keep.append(True)
    return DataPage(page.seq, keys, seqs, times, flags, page.metadata, page.values).only(keep)


def _is_dead(row: TransactionRow, seq: int) -> bool:
    return row.has_undone(seq) or not (row.is_open or row.committed)


def unstamped_in(page: DataPage) -> Iterator[tuple[int, int]]:
    """The transactions of the rows that carry one, each with the seq of its frame."""
    for txn, seq, flags in zip(page.times, page.seqs, page.flags, strict=True):
        if flags & UNSTAMPED:
            yield txn, seq


def ids_in(page: DataPage) -> frozenset[int]:
    """The transactions whose ids a page's rows carry."""
    flags = page.flags
    if max(flags, default=0) < UNSTAMPED:
        return frozenset()
    return frozenset(txn for txn, flag in zip(page.times, flags, strict=True) if flag & UNSTAMPED)
