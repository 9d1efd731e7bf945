"""All pages of a state in the order of their keys, for who reads every key as of one pinned seq.

Always true:
  - stretches follow each other without a gap and without overlap, whatever is flushed, divided or joined
    meanwhile: what each of them shows of a pinned seq is the same before and after;
  - the state's lock is held for a few pages and a few changed keys at a time, and not while the store reads,
    unless pages change faster than they can be read;
  - nothing is decoded here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lowwater.engine.format.keys import KEY_END
from lowwater.engine.format.page import DataPage
from lowwater.engine.format.records import Record
from lowwater.engine.state.ranges import Range
from lowwater.engine.state.state import State
from lowwater.engine.state.transaction_table import View
from lowwater.errors import PagesDamaged

# How many pages, and how many changed keys, are looked up at a time.
RUN_PAGES = 32
RUN_CHANGES = 256
# How often pages are read without the lock before they are read with it.
ATTEMPTS = 4


class PageStretch(NamedTuple):
    """The keys from `low` to below `high`, which lie in one page, or in none."""

    low: bytes
    high: bytes
    key: bytes | None
    """The page's."""
    page: DataPage | bytes | None
    """As it is stored, where it is not in memory: perhaps as a reference."""
    changes: dict[bytes, list[Record]]
    """What is in no page yet, newest first."""
    is_whole: bool
    """Whether these are all keys of the page."""
    is_unstamped: bool
    """Whether the page has rows of transactions of which it does not say what became."""
    view: View | None
    """What became of the transactions that have written here."""


def walk(state: State, low: bytes, high: bytes, *, with_changes: bool) -> Iterator[list[PageStretch]]:
    """The stretches from `low` to below `high`, a few at a time. Leave the changes out where all that is to
    be seen is in pages."""
    while low < high:
        run = _run(state, low, high, with_changes=with_changes)
        yield run
        low = run[-1].high


def _run(state: State, low: bytes, high: bytes, *, with_changes: bool) -> list[PageStretch]:
    for _ in range(ATTEMPTS):
        with state.lock:
            place = state.map.find(low)
            epoch = place.epoch
            run = _look_up(state, place, low, high, RUN_PAGES, with_changes=with_changes)
        read = _read(state, run)
        if place.epoch == epoch:
            return _required(read)
    with state.lock:
        place = state.map.find(low)
        return _required(_read(state, _look_up(state, place, low, high, 4, with_changes=with_changes)))


def _look_up(
    state: State, place: Range, low: bytes, high: bytes, pages_max: int, *, with_changes: bool
) -> list[PageStretch]:
    """With the lock: the next stretches of a range, with those pages that are in memory."""
    layout = place.layout
    range_high = state.map.high_of(place.low)
    stretches: list[PageStretch] = []
    index = layout.index(low)
    changes_left = RUN_CHANGES
    while low < high and len(stretches) < pages_max:
        natural = layout.keys[index + 1] if index + 1 < len(layout.keys) else range_high
        end = high if natural is None else min(natural, high)
        changed: list[bytes] = []
        if with_changes:
            changed = place.changed_keys(low, end)
            if len(changed) > changes_left:
                if stretches:
                    break
                end = changed[changes_left]
                del changed[changes_left:]
            changes_left -= len(changed)
        key = layout.keys[index] if index >= 0 else None
        is_whole = low == key and end == (KEY_END if natural is None else natural)
        changes = {each: place.records_of(each) for each in changed}
        page = layout.pages[index] if index >= 0 else None
        is_unstamped = key in state.transactions.unstamped
        view = state.view(place, key)
        stretches.append(PageStretch(low, end, key, page, changes, is_whole, is_unstamped, view))
        low = end
        if end == natural:
            index += 1
            if index == len(layout.keys):
                break
    return stretches


def _read(state: State, run: list[PageStretch]) -> list[PageStretch]:
    """Return the stretches, with pages as they are stored where they are not in memory."""
    missing = [each.key for each in run if each.key is not None and each.page is None]
    if not missing:
        return run
    stored = iter(state.store.get_many(missing))
    return [
        each._replace(page=next(stored)) if each.key is not None and each.page is None else each
        for each in run
    ]


def _required(run: list[PageStretch]) -> list[PageStretch]:
    if any(each.key is not None and each.page is None for each in run):
        raise PagesDamaged("a page is missing from the page store")
    return run
