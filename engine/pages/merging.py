"""What becomes of one page and the changes to its keys.

Always true:
  - it is a function of what it is given. Nothing here knows ranges, locks or stores;
  - no page that was given is changed: others may be reading it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Generator, Mapping
from itertools import pairwise
from operator import itemgetter, neg
from typing import NamedTuple

from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.keys import PAGE_KEY_BYTES
from lowwater.engine.format.page import (
    TOMBSTONE,
    TOMBSTONE_BYTES,
    DataPage,
    KeyVersions,
    Version,
    overwritten,
)
from lowwater.engine.format.records import Record, put_columns

Merged = list[tuple[bytes, DataPage]]
"""Pages with their page keys, in order."""


class Rules(NamedTuple):
    """What is the same for all pages of a flush."""

    frozen_seq: int
    floor: int
    inline_bytes_max: int
    boundaries: Boundaries


def merge_changes(
    page: DataPage | None,
    low: bytes,
    changed: list[bytes],
    records: Mapping[bytes, Record],
    *,
    rules: Rules,
    rec_seq: int,
    odd: Collection[bytes],
    versions: Callable[[list[bytes]], list[KeyVersions]],
    has_older: bool = False,
    after: Callable[[Merged], Merged] | None = None,
    at_once: int,
) -> Generator[None, None, Merged]:
    """The pages that the one at `low` becomes with the records of the `changed` keys, which are sorted. None
    of the records is below `rec_seq`, and all but those of `odd` keys are mere puts; `versions` gives those
    of some keys as `merge` takes them, and `after` may take rows away.

    Many changes go in by parts, in order: the last page that a part leaves is where the next part goes,
    still with the seq of the page that it was."""
    done: Merged = []
    seq_held = 0 if page is None else page.seq
    by_column = not has_older and rec_seq > seq_held and rules.frozen_seq <= rules.floor
    no_odd = not odd
    for start in range(0, max(1, len(changed)), at_once):
        part = changed[start : start + at_once]
        if (
            by_column
            and part
            and (no_odd or not any(key in odd for key in part))
            and (page is None or page.has_mere_puts)
        ):
            columns = put_columns(part, [*map(records.__getitem__, part)], rules.inline_bytes_max)
            merged = merge_puts(
                page, low, part, columns, frozen_seq=rules.frozen_seq, boundaries=rules.boundaries
            )
        else:
            merged = merge(
                page,
                low,
                versions(part),
                frozen_seq=rules.frozen_seq,
                floor=rules.floor,
                boundaries=rules.boundaries,
            )
            if after is not None:
                merged = after(merged)
        if start + len(part) == len(changed):
            return done + merged
        if merged:
            low, page = merged.pop()
            page.seq = seq_held
            done += merged
        else:
            page = DataPage(seq_held, [], array("Q"), array("Q"), bytearray(), [], [])
        yield
    raise AssertionError("a page without changes is not merged")


def merge(
    page: DataPage | None,
    low: bytes,
    records: list[KeyVersions],
    *,
    frozen_seq: int,
    floor: int,
    boundaries: Boundaries,
) -> list[tuple[bytes, DataPage]]:
    """What becomes of the page at `low` with `records`, which are sorted and belong to its range: pages with
    their page keys. None of them is empty, so the first may be missing, and all of them.

    Versions whose frame the page holds are dropped. A version with the seq of one of the page's replaces
    it. Of each key, everything older than its newest version at or below `floor` goes; where that version
    is the newest of all and a tombstone, the key goes. The page's rows lose that before the versions come: so
    nothing depends on how many come at once.
    """
    many = False
    if page is None:
        seq_held = 0
        keys: list[bytes] = []
        seqs, times, flags = array("Q"), array("Q"), bytearray()
        metadata: list[bytes] = []
        values: list[bytes] = []
    else:
        seq_held = page.seq
        keys, seqs, flags = page.keys, page.seqs, page.flags
        many = len(set(keys)) != len(keys)
        # Otherwise the floor can only take rows of keys that have a record, which the loop sees to.
        if (many or len(flags.translate(None, TOMBSTONE_BYTES)) != len(flags)) and min(seqs) <= floor:
            page = swept(page, floor)
            keys, seqs, flags = page.keys, page.seqs, page.flags
        keys, seqs, times, flags = keys[:], seqs[:], page.times[:], flags[:]
        metadata, values = page.metadata[:], page.values[:]
    is_boundary = boundaries.is_boundary
    cuts: list[bytes] = []
    at = 0
    for key, versions in records:
        if len(versions) == 1:
            if versions[0][0] <= seq_held:
                continue
        else:
            versions = _newer(versions, seq_held, floor)
            if not versions:
                continue
        _, seq, time_us, flag, meta, value = versions[0]
        # Old rows of the key are at:end, and of those at:kept make room.
        at = kept = bisect_left(keys, key, at)
        if at < len(keys) and keys[at] == key:
            end = bisect_right(keys, key, at) if many else at + 1
            seq_above = versions[-1][1]
            # A page that was made from a checkpoint may have rows of frames that it does not claim to hold:
            # these come again, all of them.
            assert seqs[at] <= seq_above or seqs[at] > seq_held, "a record is older than its page"
            if seq_above <= floor:
                kept = end
            elif seqs[at] <= seq_above:
                kept = at + (seqs[at] == seq_above)
            else:
                kept = bisect_left(seqs, 1 - seq_above, at, end, key=neg)
            if flag & TOMBSTONE and seq <= floor:
                del keys[at:end], seqs[at:end], times[at:end], flags[at:end]
                del metadata[at:end], values[at:end]
                continue
        elif flag & TOMBSTONE and seq <= floor:
            continue
        elif is_boundary(key):
            cuts.append(key[:PAGE_KEY_BYTES])
        if len(versions) == 1 and kept == at:
            keys.insert(at, key)
            seqs.insert(at, seq)
            times.insert(at, time_us)
            flags.insert(at, flag)
            metadata.insert(at, meta)
            values.insert(at, value)
        elif len(versions) == 1 and kept == at + 1:
            seqs[at] = seq
            times[at] = time_us
            flags[at] = flag
            metadata[at] = meta
            values[at] = value
        else:
            _, new_seqs, new_times, new_flags, new_metadata, new_values = zip(*versions, strict=True)
            keys[at:kept] = [key] * len(versions)
            seqs[at:kept] = array("Q", new_seqs)
            times[at:kept] = array("Q", new_times)
            flags[at:kept] = bytes(new_flags)
            metadata[at:kept] = new_metadata
            values[at:kept] = new_values
    if not keys:
        return []
    assert keys[0] >= low, "a key below its page"
    merged = DataPage(max(frozen_seq, seq_held), keys, seqs, times, flags, metadata, values)
    return _split(merged, low, cuts)


def merge_puts(
    page: DataPage | None,
    low: bytes,
    keys: list[bytes],
    columns: tuple[array[int], array[int], bytearray, list[bytes]],
    *,
    frozen_seq: int,
    boundaries: Boundaries,
) -> list[tuple[bytes, DataPage]]:
    """`merge` for what most changes are: puts without metadata, as columns of seqs, times, flags and values.
    All of them are newer than the page, which `has_mere_puts`, and nobody needs what they supersede."""
    seqs, times, flags, values = columns
    seq = frozen_seq
    if page is not None:
        assert page.has_mere_puts
        assert min(seqs) > page.seq, "a record is older than its page"
        seq = max(seq, page.seq)
    # It has no rows where the changes before these, of the same flush, took all of them.
    if page is None or not len(page):
        cuts = boundaries.cuts(keys)
    else:
        row_count = len(page)
        keys_held = page.keys
        rows = dict(zip(keys_held, range(row_count), strict=True))
        fresh = [key for key in keys if key not in rows]
        if not fresh:
            assert keys[0] >= low, "a key below its page"
            changed = list(map(rows.__getitem__, keys))
            return [(low, overwritten(page, low, keys_held, seq, changed, columns))]
        cuts = boundaries.cuts(fresh)
        rows.update(zip(keys, range(row_count, row_count + len(keys)), strict=True))
        keys = sorted(rows)
        order = list(map(rows.__getitem__, keys))
        in_order = itemgetter(*order)  # there are two at least
        values = list(in_order(page.values + values))
        seqs = array("Q", in_order(page.seqs + seqs))
        times = array("Q", in_order(page.times + times))
        if any(flags) or any(page.flags):
            flags = bytearray(map((page.flags + flags).__getitem__, order))
        else:
            flags = bytearray(len(keys))
    assert keys[0] >= low, "a key below its page"
    merged = DataPage(seq, keys, seqs, times, flags, [b""] * len(keys), values)
    merged._mere_puts = True
    return _split(merged, low, cuts)


def _newer(versions: list[Version], seq_held: int, floor: int) -> list[Version]:
    """What a page does not hold of some versions of a key, without what the floor takes of them."""
    newer: list[Version] = []
    for version in versions:
        # Of several writes in one group, which have one seq, the last survives.
        if version[0] > seq_held and not (newer and newer[-1][1] == version[1]):
            newer.append(version)
            if version[1] <= floor:
                break
    return newer


def swept(page: DataPage, floor: int) -> DataPage:
    """The page without the rows that the floor takes: of each key, what is older than its newest version at
    or below it, and that one where it is a deletion."""
    keep: list[bool] = []
    key_before = None
    below = False
    for key, seq, flag in zip(page.keys, page.seqs, page.flags, strict=True):
        if key != key_before:
            key_before = key
            below = seq <= floor
            keep.append(not (below and flag & TOMBSTONE))
        else:
            keep.append(not below)
            below = below or seq <= floor
    return page.only(keep)


def _split(page: DataPage, low: bytes, cuts: list[bytes]) -> list[tuple[bytes, DataPage]]:
    """The pages that begin at `low` and at each of `cuts`, without empty ones."""
    keys = page.keys
    if not cuts:
        return [(low, page)] if keys else []
    # A key may come twice: when a page's own key comes again after its row was dropped, and when two new
    # keys begin with the same bytes. Then the page of the first of both is empty.
    lows = [low, *cuts]
    starts = [0, *(bisect_left(keys, cut) for cut in cuts), len(keys)]
    parts = []
    for low, (start, end) in zip(lows, pairwise(starts), strict=True):
        if start < end:
            part = DataPage(
                page.seq,
                keys[start:end],
                page.seqs[start:end],
                page.times[start:end],
                page.flags[start:end],
                page.metadata[start:end],
                page.values[start:end],
            )
            part._mere_puts = page._mere_puts or None
            parts.append((low, part))
    return parts
