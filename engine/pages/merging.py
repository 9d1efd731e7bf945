"""What becomes of one page and the changes to its keys.

Always true: it is a function of what it is given. Nothing here knows ranges, locks, stores or processes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Generator, Mapping
from typing import NamedTuple

from lowwater.engine.format.pages import Boundaries, DataPage, merge, merge_puts
from lowwater.engine.format.pages import Record as Versions
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
    versions: Callable[[list[bytes]], list[Versions]],
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
