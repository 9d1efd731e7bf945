"""The engine's map of keys: ranges of adjacent pages, each with the records that are in no page yet.

Always true:
  - ranges cover all keys without a gap: a key lies in the range with the greatest low key not above it, and
    in the page of that range with the greatest page key not above it;
  - a change lies in `dirty`, then in `frozen` while it is flushed, and is in its page before it leaves
    `frozen`. Who looks in this order misses nothing;
  - `rec_seq` is not above the seq of any change in `dirty`, and `frozen_rec_seq` the same of `frozen`: redo
    begins at the smallest;
  - `epoch` rises whenever what belongs to the range, or its layout, is exchanged. Who reads without the lock
    compares it before and after.

The lock of the state guards changes. Readers take no lock: they see each attribute as it is at one moment.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

from lowwater.engine.format.page import DataPage
from lowwater.engine.format.records import Record, is_transactional, seq_of, transaction_of

Records = dict[bytes, Record]
# What newer records superseded and somebody may still read, oldest first. A list only where there are
# several: there may be a million, and the garbage collector looks at each list, and at no bytes.
Older = dict[bytes, Record | list[Record]]


def records_in(held: Record | list[Record]) -> list[Record]:
    return held if isinstance(held, list) else [held]


def older_of(older: Older, key: bytes) -> list[Record]:
    """What was superseded of a key, oldest first."""
    held = older.get(key)
    return [] if held is None else records_in(held)


def add_older(older: Older, key: bytes, record: Record) -> None:
    """Add a record as the newest that was superseded of a key."""
    held = older.setdefault(key, record)
    if isinstance(held, list):
        held.append(record)
    elif held is not record:
        older[key] = [held, record]


def add_older_once(older: Older, key: bytes, record: Record) -> None:
    """Add a record as the newest that was superseded of a key, unless that was done before an interrupt."""
    if all(seq_of(each) != seq_of(record) for each in older_of(older, key)):
        add_older(older, key, record)


class Layout:
    """The pages of a range: their keys, and those pages that are in memory. Keys never change; pages come
    and go."""

    __slots__ = ("keys", "pages", "sizes", "used")

    def __init__(self, keys: list[bytes], pages: list[DataPage | None]) -> None:
        assert len(keys) == len(pages)
        self.keys = keys
        self.pages = pages
        self.sizes = array("Q", bytes(8 * len(keys)))  # what the pages here count for
        self.used = bytearray(len(keys))  # which were read since the clean pages were last thinned out

    def index(self, key: bytes) -> int:
        """Which page a key belongs to; -1 where there is none."""
        return bisect_right(self.keys, key) - 1


class Range:
    __slots__ = (
        "_sorted", "_sorted_frozen", "dirty", "epoch", "frozen", "frozen_odd", "frozen_older",
        "frozen_rec_seq", "frozen_since_s", "frozen_txns", "layout", "low", "odd", "older", "rec_seq",
        "since_s", "tried", "txns", "waiting",
    )  # fmt: skip

    def __init__(self, low: bytes, layout: Layout) -> None:
        self.low = low
        self.layout = layout
        self.dirty: Records = {}
        self.older: Older = {}
        self.rec_seq = 0
        self.since_s = self.frozen_since_s = 0.0  # when the change of `rec_seq` came, and `frozen_rec_seq`
        # The keys in `dirty` of which not all records are mere puts: without flags and metadata.
        self.odd: set[bytes] = set()
        self.frozen_odd: set[bytes] = set()
        # The transactions that have records in `dirty`.
        self.txns: set[int] = set()
        self.frozen_txns: set[int] = set()
        # How many keys of `dirty` a flush has met whose pages were away.
        self.waiting = 0
        # How many keys `dirty` had when it was last tried to divide the range.
        self.tried = 0
        self.frozen: Records | None = None
        self.frozen_older: Older = {}
        self.frozen_rec_seq = 0
        self.epoch = 0
        self._sorted: list[bytes] = []
        self._sorted_frozen: list[bytes] | None = None

    def freeze(self) -> None:
        """Set the changes so far aside, to be flushed."""
        assert self.frozen is None, "a range is flushed already"
        self.frozen_older, self.frozen_rec_seq, self.frozen_since_s = self.older, self.rec_seq, self.since_s
        self.frozen = self.dirty
        self.frozen_odd, self.frozen_txns = self.odd, self.txns
        self.dirty, self.older, self.odd, self.txns, self.rec_seq = {}, {}, set(), set(), 0
        self._sorted, self._sorted_frozen = [], None
        self.waiting = self.tried = 0
        self.epoch += 1

    def thaw(self, waiting: list[bytes] | None = None) -> None:
        """What was frozen is in the pages, but for the keys that wait for theirs: these are as if they had
        never been frozen."""
        if waiting:
            self._take_back(waiting)
        self.frozen, self.frozen_older, self.frozen_odd, self.frozen_rec_seq = None, {}, set(), 0
        self.frozen_txns = set()
        self._sorted_frozen = None
        self.epoch += 1

    def _take_back(self, keys: list[bytes]) -> None:
        assert self.frozen is not None
        for key in keys:
            record, before = self.frozen[key], older_of(self.frozen_older, key)
            if key in self.dirty:
                self.older[key] = [*before, record, *older_of(self.older, key)]
            else:
                self.dirty[key] = record
                if before:
                    self.older[key] = self.frozen_older[key]
            if key in self.frozen_odd:
                self.odd.add(key)
            self.txns.update(transaction_of(each) for each in (*before, record) if is_transactional(each))
        self.rec_seq, self.since_s = self.frozen_rec_seq, self.frozen_since_s
        self.waiting = len(keys)
        self._sorted = []

    @property
    def has_news(self) -> bool:
        """Whether there are changes that do not wait for pages that are away, or may not."""
        return len(self.dirty) > self.waiting

    def redo_seq(self) -> int:
        """The smallest seq that is not in the pages; 0 where there is none."""
        if self.frozen_rec_seq and self.rec_seq:
            return min(self.frozen_rec_seq, self.rec_seq)
        return self.frozen_rec_seq or self.rec_seq

    def dirty_since_s(self) -> float | None:
        """When the oldest change came that is in no page; None where there is none."""
        if self.frozen_rec_seq:
            return self.frozen_since_s
        return self.since_s if self.rec_seq else None

    def changed_keys(self, low: bytes, high: bytes | None) -> list[bytes]:
        """The keys from `low` to below `high` with changes that are in no page, in order. With the lock."""
        if len(self._sorted) != len(self.dirty):
            # No key ever leaves `dirty`: as many are the same ones.
            self._sorted = sorted(self.dirty)
        keys = _between(self._sorted, low, high)
        if self.frozen is not None:
            if self._sorted_frozen is None:
                self._sorted_frozen = sorted(self.frozen)
            frozen = _between(self._sorted_frozen, low, high)
            if frozen:
                keys = sorted({*keys, *frozen}) if keys else frozen
        return keys

    def records_of(self, key: bytes) -> list[Record]:
        """All versions of a key that are in no page, newest first. With the lock."""
        found: list[Record] = []
        for records, older in ((self.dirty, self.older), (self.frozen, self.frozen_older)):
            if records is not None and (record := records.get(key)) is not None:
                found.append(record)
                found.extend(reversed(older_of(older, key)))
        return found


def _between(keys: list[bytes], low: bytes, high: bytes | None) -> list[bytes]:
    return keys[bisect_left(keys, low) : bisect_left(keys, high) if high is not None else len(keys)]


class RangeMap:
    """All ranges, in order."""

    def __init__(self, ranges: list[Range]) -> None:
        assert ranges, "the keys are not covered"
        # One object that is exchanged as a whole: a reader has a map that fits together.
        self.view = ([each.low for each in ranges], ranges)

    def find(self, key: bytes) -> Range:
        lows, ranges = self.view
        return ranges[bisect_right(lows, key) - 1]

    @property
    def ranges(self) -> list[Range]:
        return self.view[1]

    def high_of(self, low: bytes) -> bytes | None:
        """Where the range that begins at `low` ends."""
        lows, _ = self.view
        index = bisect_right(lows, low)
        return lows[index] if index < len(lows) else None

    def replace(self, old: Range, new: list[Range]) -> None:
        """With the lock: one range by several that cover the same keys."""
        assert new[0].low == old.low
        lows, ranges = self.view
        index = bisect_left(lows, old.low)
        assert ranges[index] is old
        self.view = (
            [*lows[:index], *(each.low for each in new), *lows[index + 1 :]],
            [*ranges[:index], *new, *ranges[index + 1 :]],
        )
        old.epoch += 1
