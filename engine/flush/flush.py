"""Flushing: what was changed in memory goes into pages, group by group, in the background.

Always true:
  - a page goes to the store only when every change in it is durable in the log (write-ahead), asserted;
  - a group is one transaction of the store: its pages, those that are gone, and with them `redo_seq`, below
    which nothing has to be applied again;
  - readers find a changed key in `frozen` until the page that has it can be found, and a page in memory until
    the transaction that has it is durable;
  - the transaction table goes to the store with every group, and with a page which transactions its rows
    carry: a page that is written has no row of a transaction that had ended when the group was frozen;
  - nothing is read from afar: changes of a page that is away stay in memory, and keep `redo_seq` down, until
    the page was brought (`bring`). All others are flushed meanwhile;
  - one group is under way at a time.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise, repeat
from typing import NamedTuple

from lowwater.engine.format.fast import IS_COMPILED, merge_range
from lowwater.engine.format.page import TOMBSTONE, DataPage, encode_page, stored_bytes, stored_page
from lowwater.engine.format.records import PageVersion, page_version
from lowwater.engine.pages.merging import Merged, Rules, merge_changes
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.seams.trim import Trimmer
from lowwater.engine.state.away import PageAway
from lowwater.engine.state.keeping import limited
from lowwater.engine.state.measured import Measured
from lowwater.engine.state.meta import META_KEY, Meta, encode_meta
from lowwater.engine.state.ranges import Layout, Range, Records, older_of, records_in
from lowwater.engine.state.state import LOWEST, RANGE_PAGES, RECORD_OVERHEAD_BYTES, State
from lowwater.engine.state.transaction_table import (
    TABLE_KEY,
    UNSTAMPED_PREFIX,
    View,
    encode_ids,
    encode_table,
    ids_in,
    settle_page,
    settle_versions,
)

BEFORE_COMMIT = Failpoint("pages.before_commit")
AFTER_COMMIT = Failpoint("pages.after_commit")
BEFORE_RETURN = Failpoint("pages.before_return")

# What a group writes is in memory three times over: merged, encoded, and in the store's transaction. So it is
# at most this, and no more than a share of the pool.
GROUP_BYTES = 8 * 2**20
GROUP_BYTES_MIN = 2 * 2**20
GROUP_SHARE = 16
# When transactions have written so much that ended since, their pages are stamped.
SWEEP_ABOVE_BYTES = 4 * 2**20
# What new keys are divided by: where so many of the last ones say that it is worth it, by so many of all,
# into at most so many parts with about so many each.
LOOKED_AT = 64
SAMPLED_KEYS = 4096
PARTS_MAX = 32
PART_CHANGES_MIN = 4096
# How many changed keys are sorted, and merged, and sessions encoded, before others may run.
SORTED_AT_ONCE = 256
MERGED_AT_ONCE = 64
LET_GO_AT_ONCE = 256
# With fewer changes for each of its pages, of a range only those pages are read that have some.
FETCHED_MIN = 2
SESSIONS_AT_ONCE = 16
# A range with so many changes and few pages is flushed early: then it has pages to be divided at.
CHANGES_MAX = 16_384
# Memory goes back to the system after flushes that have freed so much, or a share of the pool: a smaller one
# where few changes are left, so that it is not wanted for the next ones.
TRIM_AFTER_BYTES_MIN = 8 * 2**20
TRIM_SHARE = 2
TRIM_SHARE_AT_REST = 8
# How many pages are read for compiled code before others may run.
PAGES_AT_ONCE = 16
# Of the pool, what changes may take before they are flushed; pages and objects have the rest.
FLUSH_ABOVE = 0.6


Part = tuple[int, list[tuple[bytes, bytes, DataPage]]]
"""The index of a page of a range (-1: below the first), and all that it became: page keys, bytes, pages.
Perhaps nothing."""


class Kept(NamedTuple):
    """Which versions a flush leaves: those above the floor, so many of a key, and what somebody may read."""

    floor: int
    per_key_max: int | None
    needed: list[int]


class _Group(NamedTuple):
    """What is to be flushed together, as it was when it was frozen."""

    ranges: list[Range]
    frozen_seq: int
    kept: Kept
    meta: Meta
    view: View
    ended: set[bytes]
    """Pages of transactions that have ended."""
    sessions: list[int]
    catalogue: Mapping[bytes, bytes | None]
    sizes: dict[Range, int]
    """How much the changes take of those of which it is known."""

    @property
    def is_plain(self) -> bool:
        """Whether it has no rows of transactions, and no limit of versions. Those are merged step by step."""
        return not self.view and self.kept.per_key_max is None


class _Merged(NamedTuple):
    """What became of a range: its new layout, and the changed keys whose pages are away."""

    layout: Layout
    waiting: list[bytes]


class Flusher:
    def __init__(
        self,
        state: State,
        *,
        meta: Meta,
        make_durable: Callable[[int], None],
        measured: Measured,
    ) -> None:
        """`meta` says whose pages these are, `make_durable(seq)` returns when the log is durable up to
        there."""
        self._state = state
        self._measured = measured
        self._trimmer = Trimmer(
            max(TRIM_AFTER_BYTES_MIN, state.pool_bytes_max // TRIM_SHARE),
            max(TRIM_AFTER_BYTES_MIN, state.pool_bytes_max // TRIM_SHARE_AT_REST),
        )
        self.meta = meta
        self._make_durable = make_durable
        # Pages at which ranges were divided, and of which the store has nothing yet.
        self._unstored: dict[bytes, DataPage] = {}
        self._job: Generator[None, None, None] | None = None
        # Changes that are in the pages, and take memory still.
        self._going: list[Records] = []
        self._going_bytes = 0
        # Everything up to here is to be flushed, whatever memory there is.
        self._wanted_seq = 0
        self.flushed_redo_seq = 0
        # Whether pages of transactions that have ended are looked for; `_ended` are those of the group under
        # way.
        self.sweeps = False
        self._sweep_low = b""
        self._view: View = {}
        self._ended: set[bytes] = set()
        self._has_table = bool(state.transactions.rows)
        # Pages that changes wait for, with the references in their places; those of them that were read; and
        # whether it is time to go on with those.
        self.awaited: dict[bytes, bytes] = {}
        self._brought: dict[bytes, tuple[bytes, DataPage]] = {}
        self._bringing = threading.Lock()
        self._brought_bytes = 0
        self._goes_on = False
        self.groups = self.pages_written = self.pages_deleted = self.pages_returned = 0

    # ------------------------------------------------------------------ when

    @property
    def flush_above_bytes(self) -> int:
        return int(self._state.pool_bytes_max * FLUSH_ABOVE)

    @property
    def _group_bytes(self) -> int:
        return min(GROUP_BYTES, max(GROUP_BYTES_MIN, self._state.pool_bytes_max // GROUP_SHARE))

    def want(self, seq: int) -> None:
        """Ask that everything up to `seq` gets into the pages soon."""
        self._wanted_seq = max(self._wanted_seq, seq)
        self.sweeps = self.sweeps or bool(self._state.transactions.rows)

    @property
    def sweep_is_due(self) -> bool:
        return self._state.transactions.ended_bytes >= SWEEP_ABOVE_BYTES

    def is_flushed(self, seq: int) -> bool:
        return self.flushed_redo_seq > seq

    def step(self) -> float | None:
        """One short piece of work."""
        if self._job is None:
            group = self._choose()
            if group is not None:
                self._job = self._flush(group)
            elif self._state.away.is_return_due:
                self._job = self._return_pages()
            else:
                self._rest()
                return None
        try:
            next(self._job)
        except StopIteration:
            self._job = None
        except BaseException:
            self._job = None
            self._rest()
            raise
        return 0

    def _choose(self) -> _Group | None:
        """The next group, frozen; one without ranges only moves `redo_seq`."""
        with self._state.lock:
            ranges = self._choose_ranges()
            return None if ranges is None else self._freeze(ranges)

    def _choose_ranges(self) -> list[Range] | None:
        """With the lock."""
        state = self._state
        for each in state.map.ranges:
            if len(each.dirty) > CHANGES_MAX:
                self._divide_changes(each)
        if self._goes_on:
            self._goes_on = False
            for key in list(self._brought):
                state.map.find(key).waiting = 0
        ranges = [each for each in state.map.ranges if each.has_news]
        if self._is_wanted:
            wanted = [each for each in state.map.ranges if 0 < each.rec_seq <= self._wanted_seq]
            old = [each for each in wanted if each.has_news]
            if old or not wanted:
                return _as_group(sorted(old, key=_rec_seq), self._group_bytes)
        crowded = [each for each in ranges if _is_crowded(each)]
        if crowded:
            return crowded[:1]
        if state.dirty_bytes > self.flush_above_bytes and ranges:
            return self._largest(ranges)
        if self.sweeps or self.sweep_is_due:
            return self._choose_to_sweep()
        return None

    @property
    def _is_wanted(self) -> bool:
        return bool(self._wanted_seq) and self.flushed_redo_seq <= self._wanted_seq

    def _largest(self, ranges: list[Range]) -> list[Range]:
        return _as_group(sorted(ranges, key=_change_count, reverse=True), self._group_bytes)

    def _choose_to_sweep(self) -> list[Range] | None:
        """With the lock: the next ranges with versions of transactions that have ended."""
        state = self._state
        transactions = state.transactions
        transactions.ended_bytes = 0
        ended = transactions.ended(state.applied)
        found: list[Range] = []
        if ended:
            for each in state.map.ranges:
                if each.low >= self._sweep_low and (
                    (each.has_news and not ended.isdisjoint(each.txns))
                    or any(transactions.carries(each.layout.keys, ended))
                ):
                    found.append(each)
                    if len(found) * RANGE_PAGES * 8192 >= self._group_bytes:
                        break
        was_low, self._sweep_low = self._sweep_low, found[-1].low + b"\0" if found else b""
        self.sweeps = bool(found or was_low)
        return found or (self._choose_to_sweep() if was_low else None)

    # ------------------------------------------------------------------ one group

    def flush_all(self) -> None:
        """Bring everything that is applied into the pages, except for what waits for pages that are away. The
        log has that."""
        self.want(self._state.applied)
        wanted = self._state.applied
        while not self.is_flushed(wanted) and self.step() is not None:
            pass
        if self._job is None:
            self._rest()

    def _rest(self) -> None:
        if self._state.dirty_bytes < self.flush_above_bytes // 2:
            self._trimmer.rest()

    # ------------------------------------------------------------------ pages that are away

    @property
    def can_bring(self) -> bool:
        """Whether there is a page to be read, and room for it."""
        return len(self._brought) < len(self.awaited) and self._brought_bytes < self._group_bytes

    def bring(self) -> bool:
        """Read one page that changes wait for, from where it is, for the next group. False where there is
        none to read: then those that were read are flushed. Raises what is in the way of this one; the next
        call asks for another. Not with a lock."""
        with self._bringing:
            key = next((key for key in self.awaited if key not in self._brought), None)
            if key is None or self._brought_bytes >= self._group_bytes:
                self._goes_on = self._goes_on or bool(self._brought)
                return False
            # To the end: the next call asks for another one.
            data = self.awaited[key] = self.awaited.pop(key)
        try:
            page = self._state.away.read(key, data)
        except BaseException:
            with self._bringing:
                # Those that were read need not wait for it.
                self._goes_on = self._goes_on or bool(self._brought)
            raise
        with self._bringing:
            if self.awaited.get(key) == data and key not in self._brought:
                self._brought[key] = data, page
                self._brought_bytes += page.size_bytes
            self._goes_on = self._goes_on or not self.can_bring
        return True

    def _fetch(self, layout: Layout, index: int) -> DataPage | None:
        """A page to be merged into; None where it is away and was not brought yet."""
        key = layout.keys[index]
        page = layout.pages[index]
        if page is None:
            try:
                page = self._state.fetch(layout, index)
            except PageAway as away:
                found = self._brought.get(key)
                if found is None or found[0] != away.data:
                    self._forget_brought([key])
                    with self._bringing:
                        self.awaited[key] = away.data
                    return None
                page = found[1]
        return page

    def _forget_brought(self, keys: Iterable[bytes]) -> None:
        with self._bringing:
            for key in keys:
                self.awaited.pop(key, None)
                if (found := self._brought.pop(key, None)) is not None:
                    self._brought_bytes -= found[1].size_bytes

    def finish(self) -> None:
        """Complete what is under way."""
        while self._job is not None:
            self.step()

    def put_back(self) -> None:
        """Put pages that were read from afar into the store again. Nothing may be under way."""
        assert self._job is None
        for _ in self._return_pages():
            pass

    def _return_pages(self) -> Generator[None, None, None]:
        """Pages that were read from afar go back in the place of their references, if these still stand."""
        state = self._state
        waiting = state.away.returning()
        keys = [key for key, _, _ in waiting]
        stored = state.store.get_many(keys)
        yield
        puts = [
            (key, encode_page(page, key))
            for (key, data, page), there in zip(waiting, stored, strict=True)
            if there == data
        ]
        if puts:
            BEFORE_RETURN()
            state.store.write(puts, [], {})
        self.pages_returned += len(puts)
        state.away.returned(keys)

    def _freeze(self, ranges: list[Range]) -> _Group:
        """With the lock."""
        state = self._state
        frozen_seq = state.applied
        floor = min(state.floor_for(frozen_seq), state.transactions.floor_at(frozen_seq))
        kept = Kept(floor, state.keeping.per_key_max, state.needed_seqs())
        for each in ranges:
            each.freeze()
        transactions = state.transactions
        ended = transactions.ended(frozen_seq)
        return _Group(
            ranges=ranges,
            frozen_seq=frozen_seq,
            kept=kept,
            meta=state.to_meta(self.meta, frozen_seq),
            view=dict(transactions.rows),
            ended={key for each in ranges for key in transactions.carries(each.layout.keys, ended)},
            sessions=state.sessions.freeze(),
            catalogue=state.catalogue.freeze(),
            sizes={},
        )

    def _flush(self, group: _Group) -> Generator[None, None, None]:
        state = self._state
        began_s = state.now_s()
        ranges, frozen_seq = group.ranges, group.frozen_seq
        self._view, self._ended = group.view, group.ended
        stored_sessions = yield from self._encode_sessions(group.sessions)
        self._make_durable(frozen_seq)
        yield
        puts: list[tuple[bytes, bytes]] = []
        deletes: list[bytes] = []
        layouts: list[Layout] = []
        waiting: dict[Range, list[bytes]] = {}
        sizes: list[int] = []
        yield from self._free()
        for each in ranges:
            layout, waiting[each] = yield from self._merge_range(each, group, puts, deletes)
            layouts.append(layout)
            size = group.sizes.get(each)
            if size is None or waiting[each]:
                size = yield from _changed_bytes(each, waiting[each])
            sizes.append(size)
        marks = self._marks(puts, deletes, layouts)
        with state.lock:
            for each, layout in zip(ranges, layouts, strict=True):
                before, each.layout = each.layout, layout
                each.epoch += 1
                state.clean.forget(before)
            redo_seq = self._redo_seq([each for each in ranges if not waiting[each]], frozen_seq)
            changes = self._exchange_marks(marks, redo_seq)
        meta = group.meta._replace(redo_seq=redo_seq)
        written = {key for key, _ in puts}
        puts += [(key, encode_page(page, key)) for key, page in self._unstored.items() if key not in written]
        self._unstored.clear()
        BEFORE_COMMIT()
        write_began_s = state.now_s()
        state.store.write(
            sorted(puts),
            deletes,
            {META_KEY: encode_meta(meta), **stored_sessions, **group.catalogue, **changes},
        )
        AFTER_COMMIT()
        self.groups += 1
        self.pages_written += len(puts)
        self.pages_deleted += len(deletes)
        self._measured.flush_write_duration.observe(state.now_s() - write_began_s)
        # What changed in pages was in memory twice: LMDB has a copy until it commits.
        self._going_bytes += sum(len(data) for _, data in puts) + sum(sizes)
        del puts
        yield
        for each, layout, size in zip(ranges, layouts, sizes, strict=True):
            self._let_go(each, layout, waiting[each], size)
            yield
        yield from self._free()
        if self.awaited:
            self._forget_brought([*written, *deletes])
        state.limit_clean()
        self.flushed_redo_seq = redo_seq
        self._measured.flush_duration.observe(state.now_s() - began_s)
        if state.transactions.rows:
            with state.lock:
                self._forget_transactions(redo_seq)

    # ------------------------------------------------------------------ what pages carry of transactions

    def _marks(
        self, puts: list[tuple[bytes, bytes]], deletes: list[bytes], layouts: list[Layout]
    ) -> dict[bytes, frozenset[int]]:
        """The transactions whose ids the pages of the group carry."""
        if not self._view:
            return {}
        marks: dict[bytes, frozenset[int]] = dict.fromkeys(deletes, frozenset())
        written = {key for key, _ in puts}
        for layout in layouts:
            for key, page in zip(layout.keys, layout.pages, strict=True):
                if key in written:
                    assert page is not None, "a page that is written is in memory"
                    marks[key] = ids_in(page)
        return marks

    def _exchange_marks(self, marks: dict[bytes, frozenset[int]], redo_seq: int) -> dict[bytes, bytes | None]:
        """With the lock, in the moment in which the pages can be found: what changes in the store's meta."""
        transactions = self._state.transactions
        changes: dict[bytes, bytes | None] = {
            UNSTAMPED_PREFIX + key: encode_ids(ids) if ids else None
            for key, ids in marks.items()
            if transactions.mark(key, ids)
        }
        if self._view or self._has_table:
            table = encode_table(self._view, transactions.in_pages, redo_seq)
            changes[TABLE_KEY] = table
            self._has_table = table is not None
        return changes

    def _forget_transactions(self, redo_seq: int) -> None:
        state = self._state
        carried = state.transactions.in_pages
        for each in state.map.ranges:
            carried |= each.txns | each.frozen_txns
        state.transactions.forget(carried, redo_seq)

    def _encode_sessions(self, session_ids: list[int]) -> Generator[None, None, dict[bytes, bytes | None]]:
        """What the store is to have of the sessions that have changed. There may be thousands of them, so
        others run in between."""
        encoded: dict[bytes, bytes | None] = {}
        for start in range(0, len(session_ids), SESSIONS_AT_ONCE):
            with self._state.lock:
                encoded |= self._state.sessions.encode(session_ids[start : start + SESSIONS_AT_ONCE])
            yield
        return encoded

    def _merge_range(
        self, each: Range, group: _Group, puts: list[tuple[bytes, bytes]], deletes: list[bytes]
    ) -> Generator[None, None, _Merged]:
        """The layout of a range with what is frozen merged into its pages, of those that are here."""
        before, frozen_seq, kept = each.layout, group.frozen_seq, group.kept
        waiting: list[bytes] = []
        parts = yield from self._merged_at_once(each, group)
        keys: list[bytes] = []
        pages: list[DataPage | None] = []
        passed = 0  # pages that have gone into the new layout, or what has become of them
        for part in parts if parts is not None else self._merged_here(each, frozen_seq, kept, waiting):
            if part is None:
                yield
                continue
            index, made = part
            keys += before.keys[passed : max(index, 0)]
            pages += before.pages[passed : max(index, 0)]
            passed = index + 1
            if index >= 0 and not (made and made[0][0] == before.keys[index]):
                low = before.keys[index]
                page = self._fetch(before, index)
                assert page is not None, "a page that was merged is here"
                seq = max(frozen_seq, page.seq)
                if self._joins(each, before, keys, pages, seq):
                    deletes.append(low)
                    if keys:
                        self._age(before, keys, pages, frozen_seq, puts)
                else:
                    made.insert(0, _made(low, _placeholder(low, seq)))
            for key, data, page in made:
                keys.append(key)
                pages.append(page)
                puts.append((key, data))
        return _Merged(Layout(keys + before.keys[passed:], pages + before.pages[passed:]), waiting)

    def _merged_at_once(self, each: Range, group: _Group) -> Generator[None, None, list[Part] | None]:
        """What becomes of the pages of a range, by compiled code, during which others run; None where it has
        to be done step by step."""
        state, frozen, layout = self._state, each.frozen, each.layout
        assert frozen is not None
        if not IS_COMPILED or not group.is_plain or not frozen:
            return None
        wanted: Sequence[int] = range(len(layout.keys))
        if len(frozen) < FETCHED_MIN * len(layout.keys):
            wanted = sorted({layout.index(key) for key in frozen} - {-1})
        pages = [b""] * len(layout.keys)
        for start in range(0, len(wanted), PAGES_AT_ONCE):
            part = wanted[start : start + PAGES_AT_ONCE]
            for index, data in zip(part, self._stored_pages(layout, part), strict=True):
                pages[index] = data
            yield
        made = merge_range(
            frozen,
            each.frozen_older,
            each.low,
            layout.keys,
            pages,
            group.frozen_seq,
            group.kept.floor,
            state.inline_bytes_max,
            state.boundaries.hash_key,
            state.boundaries.highest,
        )
        if made is None:
            return None
        yield
        record_bytes, record_count, merged = made
        group.sizes[each] = record_bytes + RECORD_OVERHEAD_BYTES * record_count
        parts: list[Part] = []
        for index, pairs in merged:
            parts.append((index, [(key, data, stored_page(data)) for key, data in pairs]))
            if index % PAGES_AT_ONCE == 0:
                yield
        return parts

    def _stored_pages(self, layout: Layout, indexes: Sequence[int]) -> list[bytes]:
        """The bytes of some pages, from memory or from the store. Who merges sees
        that a missing one is no page."""
        state, unstored = self._state, self._unstored
        keys = [layout.keys[index] for index in indexes]
        pages = [layout.pages[index] or unstored.get(key) for index, key in zip(indexes, keys, strict=True)]
        wanted = [key for key, page in zip(keys, pages, strict=True) if page is None]
        state.pages_read += len(wanted)
        fetched = iter(state.store.get_many(wanted) if wanted else ())
        return [
            (next(fetched) or b"") if page is None else stored_bytes(page, key)
            for key, page in zip(keys, pages, strict=True)
        ]

    def _merged_here(
        self, each: Range, frozen_seq: int, kept: Kept, waiting: list[bytes]
    ) -> Iterator[Part | None]:
        """What becomes of the pages of a range that have changed, in order; None when others may run. Keys of
        pages that are away go to `waiting`."""
        before = each.layout
        assert each.frozen is not None
        all_changed = yield from _sorted(each.frozen)
        ends = [*(bisect_left(all_changed, key) for key in before.keys), len(all_changed)]
        start = 0
        # Below the first page there is none: it was empty once, or never was.
        for index, end in enumerate(ends, -1):
            changed, start = all_changed[start:end], end
            if not changed and not (index >= 0 and before.keys[index] in self._ended):
                continue
            low = each.low
            page = None
            if index >= 0:
                low = before.keys[index]
                page = self._fetch(before, index)
                if page is None:
                    waiting += changed
                    continue
            merged = yield from self._merge_page(each, page, low, changed, frozen_seq, kept)
            made: list[tuple[bytes, bytes, DataPage]] = []
            for number, (key, result) in enumerate(merged):
                made.append(_made(key, result))
                if number % 4 == 3:
                    yield None
            yield index, made
            yield None

    def _merge_page(
        self,
        each: Range,
        page: DataPage | None,
        low: bytes,
        changed: list[bytes],
        frozen_seq: int,
        kept: Kept,
    ) -> Generator[None, None, Merged]:
        """What becomes of one page."""
        if page is not None and self._view:
            page = settle_page(page, self._view, frozen_seq)
        state = self._state
        per_key_max = kept.per_key_max

        def limit(merged: Merged) -> Merged:
            assert per_key_max is not None
            return [(key, limited(found, per_key_max, kept.needed)) for key, found in merged]

        assert each.frozen is not None
        return (
            yield from merge_changes(
                page,
                low,
                changed,
                each.frozen,
                rules=Rules(frozen_seq, kept.floor, state.inline_bytes_max, state.boundaries),
                rec_seq=each.frozen_rec_seq,
                odd=each.frozen_odd,
                has_older=bool(each.frozen_older),
                versions=lambda part: list(self._versions(each, part, frozen_seq)),
                after=None if per_key_max is None else limit,
                at_once=MERGED_AT_ONCE,
            )
        )

    def _joins(
        self, each: Range, before: Layout, keys: list[bytes], pages: list[DataPage | None], seq: int
    ) -> bool:
        """Whether the page before may take over the keys of one that has become empty: its seq would say
        that it has all their changes up to there. So it must not be above `seq`, which is what is known of
        them (redo meets pages that are ahead of it), and it must be of the same range: others are flushed
        at other times. One that is away stays as it is: changes of its own may wait for it."""
        if not keys:
            return each.low == LOWEST  # before the first page of all there is none
        page = pages[-1]
        if page is None:
            try:
                page = self._state.fetch(before, before.index(keys[-1]))
            except PageAway:
                return False
        return page.seq <= seq

    def _age(
        self,
        before: Layout,
        keys: list[bytes],
        pages: list[DataPage | None],
        frozen_seq: int,
        puts: list[tuple[bytes, bytes]],
    ) -> None:
        """The last page takes over the keys of one that has become empty: what was deleted there has changed
        it too, and who looks for what has changed looks at seqs. It holds everything up to `frozen_seq`, as
        all pages of a range that is flushed do."""
        key = keys[-1]
        page = pages[-1] or self._state.fetch(before, before.index(key))
        if page.seq < frozen_seq:
            page = DataPage(
                frozen_seq, page.keys, page.seqs, page.times, page.flags, page.metadata, page.values
            )
            data = encode_page(page, key)
            pages[-1] = stored_page(data)
            puts.append((key, data))

    def _versions(
        self, each: Range, keys: list[bytes], frozen_seq: int
    ) -> Iterator[tuple[bytes, list[PageVersion]]]:
        frozen, older = each.frozen, each.frozen_older
        assert frozen is not None
        inline = self._state.inline_bytes_max
        for key in keys:
            versions = [page_version(frozen[key], inline)]
            if older:
                versions += [page_version(record, inline) for record in reversed(older_of(older, key))]
            if each.frozen_txns:
                versions = settle_versions(versions, self._view, frozen_seq)
                if not versions:
                    continue
            yield key, versions

    def _let_go(self, each: Range, layout: Layout, waiting: list[bytes], size: int) -> None:
        """The pages are durable: changes, which took so much, leave memory, but for those that wait, and so
        do pages that nobody reads."""
        state = self._state
        with state.lock:
            assert each.frozen is not None
            self._going.append(each.frozen)
            each.thaw(waiting)
            state.dirty_bytes -= size
            state.clean.adopt(layout)
            if len(layout.keys) > 2 * RANGE_PAGES:
                self._divide(each)

    def _free(self) -> Generator[None, None, None]:
        """Thousands of small objects take as long to free as to make. Who still reads in these looks again:
        their ranges' epochs have risen."""
        while self._going:
            frozen = self._going.pop()
            while frozen:
                for _ in range(min(LET_GO_AT_ONCE, len(frozen))):
                    frozen.popitem()
                yield
        self._trimmer.freed(self._going_bytes)
        self._going_bytes = 0

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
        """With the lock: a range most of whose changes lie above its last page's keys, as all do when keys
        come in ascending order. It can be divided there at any key; at one that begins a page, pages come out
        as they would have anyway. Each part gets a page at once, which goes to the store with the first
        others: or a page before it would claim the part's keys."""
        page_key = each.layout.keys[-1] if each.layout.keys else each.low
        newest = [*islice(reversed(each.dirty), LOOKED_AT)]
        # To look at all of them takes a while, and writers wait: so not in vain, nor again and again.
        if 2 * sum(key > page_key for key in newest) < len(newest) or len(each.dirty) < each.tried * 3 // 2:
            return
        each.tried = len(each.dirty)
        sample = [*islice(each.dirty, 0, None, len(each.dirty) // SAMPLED_KEYS + 1)]
        above = [key for key in sample if key > page_key]
        if 2 * len(above) < len(sample):
            return
        last = self._last_key(each)
        if last is None:
            return
        lows = sorted({low for low in self._state.boundaries.cuts(above) if low > last})
        lows = lows[:: len(lows) // min(PARTS_MAX, len(each.dirty) // PART_CHANGES_MIN) + 1]
        if lows:
            self._unstored.update((low, _placeholder(low, 0)) for low in lows)
            parts = [Range(low, Layout([low], [self._unstored[low]])) for low in lows]
            self._replace(each, [Range(each.low, each.layout), *parts])

    def _last_key(self, each: Range) -> bytes | None:
        """Return the last key of a range's pages, or its `low` where it has no pages. Return None where
        changes wait for its pages, or will."""
        layout = each.layout
        if not layout.keys:
            return each.low
        if each.waiting:
            return None
        try:
            page = layout.pages[-1] or self._state.fetch(layout, len(layout.keys) - 1)
        except PageAway:
            return None
        return page.keys[-1]

    def _replace(self, each: Range, parts: list[Range]) -> None:
        """With the lock: a range by several, which get its changes."""
        lows = [part.low for part in parts]
        # Writers wait for this.
        places = [part.dirty for part in parts]
        found = map(bisect_right, repeat(lows), each.dirty)
        for number, (key, record) in zip(found, each.dirty.items(), strict=True):
            places[number - 1][key] = record
        for key, older in each.older.items():
            parts[bisect_right(lows, key) - 1].older[key] = older
        for key in each.odd:
            parts[bisect_right(lows, key) - 1].odd.add(key)
        for part in parts:
            if part.dirty:
                part.rec_seq, part.since_s = each.rec_seq, each.since_s
                part.txns = set(each.txns)  # perhaps of another part: which is found out when it is flushed
        self._state.map.replace(each, parts)

    def _redo_seq(self, group: list[Range], frozen_seq: int) -> int:
        """With the lock: from where on entries have to be applied again once the group is durable."""
        redo_seqs = [each.rec_seq if each in group else each.redo_seq() for each in self._state.map.ranges]
        return min([frozen_seq + 1, *(seq for seq in redo_seqs if seq)])


def _changed_bytes(each: Range, waiting: list[bytes]) -> Generator[None, None, int]:
    """How much the frozen changes take, but for those that wait."""
    frozen = each.frozen
    assert frozen is not None
    size = 0
    older = (records_in(held) for held in each.frozen_older.values())
    for records in (frozen.values(), chain.from_iterable(older)):
        remaining = iter(records)
        while sizes := [*map(len, islice(remaining, LET_GO_AT_ONCE))]:
            size += sum(sizes) + RECORD_OVERHEAD_BYTES * len(sizes)
            if len(sizes) == LET_GO_AT_ONCE:
                yield
    for key in waiting:
        back = [frozen[key], *older_of(each.frozen_older, key)]
        size -= sum(map(len, back)) + RECORD_OVERHEAD_BYTES * len(back)
    return size


def _sorted(records: Records) -> Generator[None, None, list[bytes]]:
    """The keys in order, sorted by runs, between which others may run."""
    keys: list[bytes] = []
    unsorted = iter(records)
    while run := sorted(islice(unsorted, SORTED_AT_ONCE)):
        keys += run
        yield
    keys.sort()
    return keys


def _made(key: bytes, page: DataPage) -> tuple[bytes, bytes, DataPage]:
    """A page that is to be stored: its page key, its bytes, and the page as whose bytes it is kept."""
    data = stored_bytes(page, key)
    return key, data, stored_page(data)


def _placeholder(low: bytes, seq: int) -> DataPage:
    """A page without keys: one tombstone, which is older than all that was ever written."""
    return DataPage(seq, [low], array("Q", [0]), array("Q", [0]), bytearray([TOMBSTONE]), [b""], [b""])


def _as_group(ranges: list[Range], group_bytes: int) -> list[Range]:
    """As many of the ranges, from the first on, as make a transaction."""
    size = 0
    for count, each in enumerate(ranges, 1):
        # At most all pages of the range are written, and those that come; or a page for each change.
        pages = len(each.layout.keys) + len(each.dirty) // 64 + 1
        size += min(pages, len(each.dirty)) * 8192
        if size >= group_bytes:
            return ranges[:count]
    return ranges


def _is_crowded(each: Range) -> bool:
    return len(each.dirty) > CHANGES_MAX and len(each.layout.keys) < RANGE_PAGES


def _rec_seq(each: Range) -> int:
    return each.rec_seq


def _change_count(each: Range) -> int:
    return len(each.dirty)
