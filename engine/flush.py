"""Flushing: what was changed in memory goes into pages, group by group, in the background.

Always true:
  - a page goes to the store only when every change in it is durable in the log (write-ahead), asserted;
  - a group is one transaction of the store: its pages, those that are gone, and with them `redo_seq`, below
    which nothing has to be applied again;
  - readers find a changed key in `frozen` until the page that has it can be found, and a page in memory until
    the transaction that has it is durable;
  - one group is under way at a time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator
from itertools import islice, pairwise

import cbor2

from lowwater.engine.failpoints import Failpoint
from lowwater.engine.pages import TOMBSTONE, Page, encode_page, merge, page_key
from lowwater.engine.ranges import Layout, Range
from lowwater.engine.records import PageVersion, page_version
from lowwater.engine.state import LOWEST, RANGE_PAGES, RECORD_OVERHEAD_BYTES, State

BEFORE_COMMIT = Failpoint("pages.before_commit")
AFTER_COMMIT = Failpoint("pages.after_commit")

GROUP_BYTES = 8 * 2**20
# What a range without pages is divided by: so many of its keys, into at most so many parts.
SAMPLED_KEYS = 1024
PARTS_MAX = 8
# How many changed keys are merged before others may run.
MERGED_AT_ONCE = 64
# A range with so many changes and few pages is flushed early: then it has pages to be divided at.
CHANGES_MAX = 16_384
META_KEY = b"state"
META_VERSION = 1
# Of the pool, what changes may take before they are flushed; pages and objects have the rest.
FLUSH_ABOVE = 0.6


class Flusher:
    def __init__(
        self,
        state: State,
        *,
        identity: dict[str, object],
        make_durable: Callable[[int], None],
    ) -> None:
        """`identity` goes into the store's meta, `make_durable(seq)` returns when the log is durable up to
        there."""
        self._state = state
        self.identity = identity
        self._make_durable = make_durable
        # Pages of ranges that were divided before there was anything in the store.
        self._unstored: dict[bytes, Page] = {}
        self._job: Generator[None, None, None] | None = None
        # Everything up to here is to be flushed, whatever memory there is.
        self._wanted_seq = 0
        self.flushed_redo_seq = 0
        self.groups = 0

    # ------------------------------------------------------------------ when

    @property
    def flush_above_bytes(self) -> int:
        return int(self._state.pool_bytes_max * FLUSH_ABOVE)

    def want(self, seq: int) -> None:
        """Have everything up to `seq` in the pages soon."""
        self._wanted_seq = max(self._wanted_seq, seq)

    def is_flushed(self, seq: int) -> bool:
        return self.flushed_redo_seq > seq

    def step(self) -> float | None:
        """One short piece of work."""
        if self._job is None:
            group = self._choose()
            if group is None:
                return None
            self._job = self._flush(group)
        try:
            next(self._job)
        except StopIteration:
            self._job = None
        except BaseException:
            self._job = None
            raise
        return 0

    def _choose(self) -> list[Range] | None:
        """The ranges of the next group; none at all for a group that only moves `redo_seq`."""
        state = self._state
        with state.lock:
            for each in state.map.ranges:
                if len(each.dirty) > CHANGES_MAX and all(key in self._unstored for key in each.layout.keys):
                    self._divide_changes(each)
            ranges = [each for each in state.map.ranges if each.dirty]
            if self._wanted_seq and self.flushed_redo_seq <= self._wanted_seq:
                old = [each for each in ranges if each.rec_seq <= self._wanted_seq]
                return _as_group(sorted(old, key=_rec_seq))
            crowded = [each for each in ranges if _is_crowded(each)]
            if crowded:
                return crowded[:1]
            if state.dirty_bytes > self.flush_above_bytes:
                return _as_group(sorted(ranges, key=_change_count, reverse=True))
        return None

    # ------------------------------------------------------------------ one group

    def flush_all(self) -> None:
        """Have everything that is applied in the pages when this returns."""
        self.want(self._state.applied)
        wanted = self._state.applied
        while not self.is_flushed(wanted):
            self.step()

    def _flush(self, group: list[Range]) -> Generator[None, None, None]:
        state = self._state
        with state.lock:
            frozen_seq = state.applied
            floor = state.floor_for(frozen_seq)
            for each in group:
                each.freeze()
            meta = self._meta(frozen_seq)
        self._make_durable(frozen_seq)
        yield
        puts: list[tuple[bytes, bytes]] = []
        deletes: list[bytes] = []
        layouts: list[Layout] = []
        for each in group:
            layout = yield from self._merge_range(each, frozen_seq, floor, puts, deletes)
            layouts.append(layout)
        with state.lock:
            for each, layout in zip(group, layouts, strict=True):
                before, each.layout = each.layout, layout
                each.epoch += 1
                state.clean.forget(before)
            redo_seq = self._redo_seq(group, frozen_seq)
        meta["redo_seq"] = redo_seq
        written = {key for key, _ in puts}
        puts += [(key, encode_page(page, key)) for key, page in self._unstored.items() if key not in written]
        self._unstored.clear()
        BEFORE_COMMIT()
        state.store.write(sorted(puts), deletes, {META_KEY: cbor2.dumps(meta, canonical=True)})
        AFTER_COMMIT()
        self.groups += 1
        yield
        for each, layout in zip(group, layouts, strict=True):
            self._let_go(each, layout)
            yield
        state.limit_clean()
        self.flushed_redo_seq = redo_seq

    def _merge_range(
        self,
        each: Range,
        frozen_seq: int,
        floor: int,
        puts: list[tuple[bytes, bytes]],
        deletes: list[bytes],
    ) -> Generator[None, None, Layout]:
        """The layout of a range with what is frozen merged into its pages."""
        state = self._state
        before = each.layout
        by_page: dict[int, list[bytes]] = {}
        assert each.frozen is not None
        for number, key in enumerate(each.frozen):
            by_page.setdefault(before.index(key), []).append(key)
            if not number % 256:
                yield
        keys: list[bytes] = []
        pages: list[Page | None] = []
        # Below the first page there is none: it was empty once, or never was.
        for index in range(-1, len(before.keys)):
            changed = by_page.get(index)
            if changed is None:
                if index >= 0:
                    keys.append(before.keys[index])
                    pages.append(before.pages[index])
                continue
            low = each.low
            page = None
            if index >= 0:
                low = before.keys[index]
                page = before.pages[index] or state.fetch(before, index)
            changed.sort()
            merged = yield from self._merge_page(each, page, low, changed, frozen_seq, floor)
            if page is not None and not (merged and merged[0][0] == low):
                seq = max(frozen_seq, page.seq)
                if self._joins(each, before, keys, pages, seq):
                    deletes.append(low)
                else:
                    merged.insert(0, (low, _placeholder(low, seq)))
            for number, (key, result) in enumerate(merged):
                keys.append(key)
                pages.append(result)
                puts.append((key, encode_page(result, key)))
                if number % 8 == 7:
                    yield
            yield
        return Layout(keys, pages)

    def _merge_page(
        self, each: Range, page: Page | None, low: bytes, changed: list[bytes], frozen_seq: int, floor: int
    ) -> Generator[None, None, list[tuple[bytes, Page]]]:
        """What becomes of one page. Many changes go in by parts, in order: the last page that a part leaves
        is where the next part goes, still with the seq of the page that it was."""
        done: list[tuple[bytes, Page]] = []
        seq_held = 0 if page is None else page.seq
        for start in range(0, len(changed), MERGED_AT_ONCE):
            part = changed[start : start + MERGED_AT_ONCE]
            merged = merge(
                page,
                low,
                list(self._versions(each, part)),
                frozen_seq=frozen_seq,
                floor=floor,
                boundaries=self._state.boundaries,
            )
            if start + len(part) == len(changed):
                return done + merged
            if merged:
                low, page = merged.pop()
                page.seq = seq_held
                done += merged
            else:
                page = Page(seq_held, [], array("Q"), array("Q"), bytearray(), [], [])
            yield
        raise AssertionError("a page without changes is not merged")

    def _joins(
        self, each: Range, before: Layout, keys: list[bytes], pages: list[Page | None], seq: int
    ) -> bool:
        """Whether the page before may take over the keys of one that has become empty: its seq would say
        that it has all their changes up to there. So it must not be above `seq`, which is what is known of
        them (redo meets pages that are ahead of it), and it must be of the same range: others are flushed
        at other times."""
        if not keys:
            return each.low == LOWEST  # before the first page of all there is none
        page = pages[-1]
        if page is None:
            page = self._state.fetch(before, before.index(keys[-1]))
        return page.seq <= seq

    def _versions(self, each: Range, keys: list[bytes]) -> Iterator[tuple[bytes, list[PageVersion]]]:
        frozen, older = each.frozen, each.frozen_older
        assert frozen is not None
        inline = self._state.inline_bytes_max
        for key in keys:
            versions = [page_version(frozen[key], inline)]
            if older and key in older:
                versions += [page_version(record, inline) for record in reversed(older[key])]
            yield key, versions

    def _let_go(self, each: Range, layout: Layout) -> None:
        """The pages are durable: changes leave memory, and so do pages that nobody reads."""
        state = self._state
        assert each.frozen is not None
        freed = sum(len(record[1]) + RECORD_OVERHEAD_BYTES for record in each.frozen.values()) + sum(
            len(record[1]) + RECORD_OVERHEAD_BYTES
            for records in each.frozen_older.values()
            for record in records
        )
        with state.lock:
            each.thaw()
            state.dirty_bytes -= freed
            state.clean.adopt(layout)
            if len(layout.keys) > 2 * RANGE_PAGES:
                self._divide(each)

    def _divide(self, each: Range) -> None:
        """With the lock: a range that has become large, at the keys of its pages."""
        layout = each.layout
        pages = layout.pages
        self._state.clean.forget(layout)
        starts = [*range(0, len(pages), RANGE_PAGES)]
        if len(pages) - starts[-1] < RANGE_PAGES // 2:
            starts.pop()
        parts = []
        for start, stop in pairwise([*starts, len(pages)]):
            part = Layout(layout.keys[start:stop], pages[start:stop])
            parts.append(Range(part.keys[0] if start else each.low, part))
            self._state.clean.adopt(part)
        self._replace(each, parts)

    def _divide_changes(self, each: Range) -> None:
        """With the lock: a range that has nothing in the store yet. It can be divided at any key; at one that
        begins a page, pages come out as they would have anyway. Each part gets a page at once, which goes
        to the store with the first others: or a page before it would claim the part's keys."""
        every = len(each.dirty) // SAMPLED_KEYS + 1
        sample = sorted(islice(each.dirty, 0, None, every))
        is_boundary = self._state.boundaries.is_boundary
        lows = sorted({page_key(key) for key in sample if is_boundary(key)} - {each.low})
        lows = [each.low, *lows[:: len(lows) // PARTS_MAX + 1]]
        if len(lows) > 1 and lows[1] > each.low:
            self._unstored.update((low, _placeholder(low, 0)) for low in lows[1:])
            parts = [Range(low, Layout([low], [self._unstored[low]])) for low in lows[1:]]
            self._replace(each, [Range(each.low, each.layout), *parts])

    def _replace(self, each: Range, parts: list[Range]) -> None:
        """With the lock: a range by several, which get its changes."""
        lows = [part.low for part in parts]
        for key, record in each.dirty.items():
            parts[bisect_right(lows, key) - 1].dirty[key] = record
        for key, records in each.older.items():
            parts[bisect_right(lows, key) - 1].older[key] = records
        for part in parts:
            if part.dirty:
                part.rec_seq = each.rec_seq
        self._state.map.replace(each, parts)

    def _redo_seq(self, group: list[Range], frozen_seq: int) -> int:
        """With the lock: from where on entries have to be applied again once the group is durable."""
        redo_seqs = [each.rec_seq if each in group else each.redo_seq() for each in self._state.map.ranges]
        return min([frozen_seq + 1, *(seq for seq in redo_seqs if seq)])

    def _meta(self, frozen_seq: int) -> dict[str, object]:
        """With the lock: what goes into the store with the pages. All of it is durable before they are."""
        state = self._state
        return {
            **self.identity,
            "version": META_VERSION,
            "applied": max(frozen_seq, state.versions_seq),
            "horizon": state.horizon,
            "low_water_mark": state.low_water_mark,
            "snapshots": dict(sorted(state.snapshots.items())),
        }


def _placeholder(low: bytes, seq: int) -> Page:
    """A page without keys: one tombstone, which is older than all that was ever written."""
    return Page(seq, [low], array("Q", [0]), array("Q", [0]), bytearray([TOMBSTONE]), [b""], [b""])


def _as_group(ranges: list[Range]) -> list[Range]:
    """As many of the ranges, from the first on, as make a transaction."""
    size = 0
    for count, each in enumerate(ranges, 1):
        # At most all pages of the range are written, and those that come; or a page for each change.
        pages = len(each.layout.keys) + len(each.dirty) // 64 + 1
        size += min(pages, len(each.dirty)) * 8192
        if size >= GROUP_BYTES:
            return ranges[:count]
    return ranges


def _is_crowded(each: Range) -> bool:
    return len(each.dirty) > CHANGES_MAX and len(each.layout.keys) < RANGE_PAGES


def _rec_seq(each: Range) -> int:
    return each.rec_seq


def _change_count(each: Range) -> int:
    return len(each.dirty)
