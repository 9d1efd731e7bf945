"""What pages there are, one by one and together, and what rows they have: for who looks into a page store.

Always true: nothing is changed, and memory depends on the largest page alone, besides the keys of all pages.
A page that cannot be read is listed with what is wrong with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from lowwater.engine.format.blocks import Place
from lowwater.engine.format.format import decode_metadata
from lowwater.engine.format.keys import KEY_END, decode_key
from lowwater.engine.format.page import BUCKET, REFERENCE, TOMBSTONE, UNSTAMPED, DataPage, decode_page
from lowwater.engine.format.records import VALUE_PLACE
from lowwater.engine.format.references import decode_reference, is_reference
from lowwater.engine.pages.pagestore import PageStore
from lowwater.errors import LowwaterError

# Pages of one transaction of the store.
RUN_PAGES = 64


class PageInfo(NamedTuple):
    """One page. `low` is its page key, and `high` that of the next one."""

    low: bytes
    high: bytes
    key_first: bytes
    key_last: bytes
    keys: int
    rows: int
    bytes: int
    seq: int
    deleted: int
    large: int
    buckets: int
    problem: str | None
    is_away: bool = False
    """There is a reference in its place: of what is in it, only the number of rows is known."""


class Summary:
    """All pages of a listing together. Histograms are by powers of two: under 8 is what has 8 to 15."""

    def __init__(self) -> None:
        self.pages = self.damaged = self.away = 0
        self.keys = self.rows = self.bytes = self.deleted = self.large = 0
        self.seq_first = self.seq_last = 0
        self.by_rows: dict[int, int] = {}
        self.by_bytes: dict[int, int] = {}

    def add(self, page: PageInfo) -> None:
        self.pages += 1
        self.bytes += page.bytes
        if page.is_away:
            self.away += 1
        else:
            _count(self.by_bytes, page.bytes)
        if page.problem is not None:
            self.damaged += 1
            return
        _count(self.by_rows, page.rows)
        self.keys += page.keys
        self.rows += page.rows
        self.deleted += page.deleted
        self.large += page.large
        self.seq_first = min(self.seq_first or page.seq, page.seq)
        self.seq_last = max(self.seq_last, page.seq)


def _count(histogram: dict[int, int], amount: int) -> None:
    floor = 1 << amount.bit_length() >> 1
    histogram[floor] = histogram.get(floor, 0) + 1


class PageRow(NamedTuple):
    """A version of a key in a page, or a bucket's own record: then `key` is its name, and `bucket` is empty.
    Of a large value there is where the log has it. `txn` is the transaction that has written it, where the
    page does not say yet what became of that: then it has no time."""

    bucket: str
    key: str
    value: bytes | None
    metadata: dict[str, str] | None
    seq: int
    time_us: int | None
    txn: int | None
    is_deletion: bool
    value_bytes: int
    value_hash: bytes | None
    place: Place | None


def list_rows(
    store: PageStore, low: bytes = b"", high: bytes = KEY_END
) -> Iterator[PageInfo | Iterator[PageRow]]:
    """The rows of each page that may hold keys from `low` to below `high`. Of one that is away, or cannot be
    read, there is what `list_pages` says."""
    for key, end, data in _stored(store, low, high):
        info = _info(key, end, data)
        if info.is_away or info.problem is not None:
            yield info
        else:
            yield _rows_of(decode_page(data, key))


def _rows_of(page: DataPage) -> Iterator[PageRow]:
    for encoded, seq, time_us, flags, metadata, value in zip(
        page.keys, page.seqs, page.times, page.flags, page.metadata, page.values, strict=True
    ):
        bucket, key = decode_key(encoded)
        value_bytes, value_hash, place = len(value), None, None
        if flags & REFERENCE:
            segment_first, offset, value_bytes, value_hash = VALUE_PLACE.unpack(value)
            place = segment_first, offset
        is_stamped = not flags & UNSTAMPED
        yield PageRow(
            bucket.decode(),
            key.decode(),
            None if flags & (REFERENCE | TOMBSTONE) else value,
            decode_metadata(metadata) if metadata else None,
            seq,
            time_us if is_stamped else None,
            None if is_stamped else time_us,
            bool(flags & TOMBSTONE),
            value_bytes,
            value_hash,
            place,
        )


def list_pages(store: PageStore, low: bytes = b"", high: bytes = KEY_END) -> Iterator[PageInfo]:
    """The pages that may hold keys from `low` to below `high`, in order."""
    return (_info(*each) for each in _stored(store, low, high))


def _stored(store: PageStore, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Their page keys, those of the next ones, and their bytes."""
    keys = list(store.page_keys())
    start = max(0, bisect_right(keys, low) - 1)
    ends = [*keys[1:], KEY_END]
    stop = start
    while stop < len(keys) and keys[stop] < high:
        stop += 1
    for at in range(start, stop, RUN_PAGES):
        run = keys[at : min(at + RUN_PAGES, stop)]
        for key, end, data in zip(run, ends[at:], store.get_many(run), strict=False):
            if data is not None:  # else it went away meanwhile
                yield key, end, data


def _info(low: bytes, high: bytes, data: bytes) -> PageInfo:
    try:
        if is_reference(data):
            reference = decode_reference(data, low)
            rows = reference.row_count
            return PageInfo(
                low, high, low, low, rows, rows, len(data), reference.page_seq, 0, 0, 0, None, is_away=True
            )
        page = decode_page(data, low)
        keys = page.keys
    except LowwaterError as error:
        return PageInfo(low, high, low, low, 0, 0, len(data), 0, 0, 0, 0, error.message)
    return PageInfo(
        low=low,
        high=high,
        key_first=keys[0],
        key_last=keys[-1],
        keys=len(set(keys)),
        rows=len(page),
        bytes=len(data),
        seq=page.seq,
        deleted=_with_flag(page, TOMBSTONE),
        large=_with_flag(page, REFERENCE),
        buckets=_with_flag(page, BUCKET),
        problem=None,
    )


def _with_flag(page: DataPage, flag: int) -> int:
    return sum(bool(flags & flag) for flags in page.flags)
