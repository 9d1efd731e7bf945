"""The content of a state as of a seq, cut into blocks, and the root over them.

Always true:
  - the root depends on the buckets and the newest version of each live key and on nothing else: not on pages,
    dropped versions, tombstones, flushes, or the place of a large value;
  - a block begins at a live key that is a boundary, unless the one before it is equal in its first 500 bytes;
    a list of blocks at a block whose key is a rarer boundary. So blocks without a change stay the same;
  - a block of the base is kept without a look at its rows only where every page of its keys says that it has
    not changed since: its first key still begins a page, and no page of its keys is younger than the base;
  - a page that is away, and has not changed since, is the block that its reference names. Its rows are read
    only where they have to be written again, or belong to the block before.

A page that takes over the keys of one that became empty becomes as young (`flush.py`): otherwise deletions
could not be seen. A page of seq 0 says nothing: it was made for a range that was divided before it had any.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

from lowwater.engine.checkpoint.pagewalk import PageStretch, walk
from lowwater.engine.format.blocks import (
    LARGE,
    Listed,
    Location,
    Place,
    Rows,
    encode_list,
    encode_rows,
    hash_of,
    root_of,
    rows_block,
)
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.format import encode_metadata
from lowwater.engine.format.keys import KEY_END, PAGE_KEY_BYTES, page_key
from lowwater.engine.format.page import (
    BUCKET,
    REFERENCE,
    TOMBSTONE,
    DataPage,
    StoredColumns,
    decode_page,
    stored_columns,
    stored_seq,
)
from lowwater.engine.format.records import Object, is_transactional, page_version
from lowwater.engine.format.references import Reference, as_content, decode_reference, is_reference
from lowwater.engine.state.state import LOWEST, State

# How many blocks a list has on average.
LIST_BLOCKS = 256

# Flags of rows that are what they say, whatever else there is.
_LIVE_BYTES = bytes([0, REFERENCE, BUCKET])

IsBoundary = Callable[[bytes], bool]


class KnownBlocks(NamedTuple):
    """A block of an earlier checkpoint."""

    listed: Listed
    location: Location


class Block(NamedTuple):
    """A block whose rows were read, with the places of its large values."""

    listed: Listed
    data: bytes
    places: list[Place]


class AwayBlock(NamedTuple):
    """A block that is known and not here."""

    listed: Listed
    read: Callable[[], Block]


AnyBlock = Block | KnownBlocks | AwayBlock


class Base(Protocol):
    """An earlier checkpoint, of which blocks can be kept."""

    seq: int

    def blocks(self) -> Iterator[KnownBlocks]:
        """All of them, in order."""
        ...


def list_boundaries(salt: bytes, page_keys: int) -> Boundaries:
    """Which blocks begin a list."""
    return Boundaries(salt, page_keys * LIST_BLOCKS)


def root(blocks: Iterable[AnyBlock | None], lists: Boundaries) -> bytes:
    """The root over blocks, in order."""
    listed = (each.listed for each in blocks if each is not None)
    return root_of(hash_of(encode_list(part)) for part in lists_of(listed, lists.is_boundary))


def lists_of(listed: Iterable[Listed], is_boundary: IsBoundary) -> Iterator[list[Listed]]:
    part: list[Listed] = []
    for each in listed:
        if part and is_boundary(each.key):
            yield part
            part = []
        part.append(each)
    if part:
        yield part


def root_of_objects(
    objects: Iterable[tuple[bytes, Object]], boundaries: Boundaries, lists: Boundaries, inline_bytes_max: int
) -> bytes:
    """The root of live objects, each behind its encoded key, in their order."""

    def listed() -> Iterator[Listed]:
        rows: list[_Row] = []
        for key, each in objects:
            begins = bool(rows) and boundaries.is_boundary(key) and page_key(key) != page_key(rows[-1][0])
            if begins:
                yield _listed(rows)
                rows = []
            flags, value = BUCKET if key[0] == 0 else 0, each.value
            if len(value) > inline_bytes_max:
                flags, value = flags | REFERENCE, LARGE.pack(len(value), hash_of(value))
            rows.append((key, each.seq, each.time_us, flags, encode_metadata(each.metadata), value))
        if rows:
            yield _listed(rows)

    return root_of(hash_of(encode_list(part)) for part in lists_of(listed(), lists.is_boundary))


def _listed(rows: list[_Row]) -> Listed:
    keys, seqs, times, flags, metadata, values = map(list, zip(*rows, strict=True))
    data = encode_rows(Rows(keys, array("Q", seqs), array("Q", times), bytes(flags), metadata, values))
    return Listed(page_key(keys[0]), hash_of(data), len(rows), len(data))


# ---------------------------------------------------------------------------- blocks


def blocks_at(
    state: State, seq: int, *, base: Base | None = None, with_changes: bool = True
) -> Iterator[AnyBlock | None]:
    """The blocks of the content as of `seq`, which is pinned; None where others may run. `base` is of a seq
    that is not higher. Leave changes out when all of them up to `seq` are in pages."""
    builder = _BlockBuilder(state.boundaries.is_boundary)
    # What was kept last is given out when it is known that what follows does not belong to it.
    kept: tuple[KnownBlocks, bytes, bytes] | None = None

    def chunks(low: bytes, high: bytes) -> Iterator[_Chunk | None]:
        for run in walk(state, low, high, with_changes=with_changes):
            for stretch in run:
                yield from _chunks_of(stretch, seq, state)
            yield None

    for step in _plan(state, base, with_changes=with_changes):
        if step is None:
            yield None
            continue
        low, high, known = step
        if known is not None:
            yield builder.finish()
            if kept is not None:
                yield kept[0]
            kept = known, low, high
            continue
        for chunk in chunks(low, high):
            if chunk is None:
                yield None
                continue
            if kept is not None:
                if builder.begins(chunk):
                    yield kept[0]
                else:
                    # Its last keys are what comes now: the key that they began with is gone.
                    for earlier in chunks(*kept[1:]):
                        if earlier is not None:
                            assert builder.add(earlier) is None, "a block that was kept is several"
                kept = None
            yield builder.add(chunk)
    if kept is not None:
        yield kept[0]
    yield builder.finish()


_Step = tuple[bytes, bytes, KnownBlocks | None]
"""From where to below where, and the block that is kept."""


def _plan(state: State, base: Base | None, *, with_changes: bool) -> Iterator[_Step | None]:
    """Which blocks of the base are kept, and which keys are read, in order; None where others may run."""
    blocks = iter(()) if base is None else base.blocks()
    current = next(blocks, None)
    if current is None:
        yield LOWEST, KEY_END, None
        return
    assert base is not None
    runs = walk(state, LOWEST, KEY_END, with_changes=with_changes)
    run = next(runs)
    at = 0
    low = LOWEST
    while current is not None:
        following = next(blocks, None)
        high = KEY_END if following is None else following.listed.key
        is_clean = True
        while True:
            stretch = run[at]
            is_clean = is_clean and _is_unchanged(stretch, low, current.listed.key, base.seq)
            if stretch.high > high:
                break  # the next block begins in the middle of it: it will not be kept
            at += 1
            if at == len(run) and stretch.high < KEY_END:
                run, at = next(runs), 0
                yield None
            if stretch.high == high:
                break
        yield low, high, current if is_clean else None
        low, current = high, following


def _is_unchanged(stretch: PageStretch, low: bytes, block_key: bytes, base_seq: int) -> bool:
    """Whether nothing in a stretch of a block, which reaches down to `low`, has changed since the base."""
    if stretch.changes or stretch.is_unstamped:
        return False  # a transaction may have ended since, of which its pages do not know
    if stretch.key is None:
        # Before the first page of all there are no keys. There were none either, if the block began above.
        return stretch.low == low == LOWEST and block_key >= stretch.high
    if stretch.low <= low:
        if low == LOWEST and block_key < stretch.key:
            return False
        if low != LOWEST and stretch.key != block_key:
            return False
    return 0 < _seq_of(stretch) <= base_seq


def _seq_of(stretch: PageStretch) -> int:
    page = stretch.page
    assert stretch.key is not None
    assert page is not None
    if isinstance(page, DataPage):
        return page.seq
    if is_reference(page):
        return decode_reference(page, stretch.key).page_seq
    return stored_seq(page, stretch.key)


# ---------------------------------------------------------------------------- rows


class _Chunk(NamedTuple):
    """Rows that belong to one block. `may_begin`: whether the first one may be the first of its block."""

    first_key: bytes
    may_begin: bool
    rows: Rows | None
    places: list[Place]
    stored: StoredColumns | None
    page: DataPage | None
    listed: Listed | None = None
    """The block of a page that is away: the page's rows are that block, if nothing else belongs to it."""
    read: Callable[[], _Chunk] | None = None
    """Returns the chunk with its rows, where the page is away."""

    def here(self) -> _Chunk:
        return self if self.read is None else self.read()

    def as_rows(self) -> Rows:
        if self.rows is not None:
            return self.rows
        page = self.page
        assert page is not None
        return Rows(page.keys, page.seqs, page.times, bytes(page.flags), page.metadata, page.values)


class _BlockBuilder:
    """Puts chunks together into blocks."""

    def __init__(self, is_boundary: IsBoundary) -> None:
        self._is_boundary = is_boundary
        self._chunks: list[_Chunk] = []

    def begins(self, chunk: _Chunk) -> bool:
        """Whether a chunk begins a block, wherever it stands."""
        return chunk.may_begin and self._is_boundary(chunk.first_key)

    def add(self, chunk: _Chunk) -> Block | AwayBlock | None:
        """Returns the block before, when the chunk begins another one."""
        before = None
        if self._chunks and self.begins(chunk) and not self._is_same_page(chunk.first_key):
            before = self.finish()
        self._chunks.append(chunk)
        return before

    def _is_same_page(self, key: bytes) -> bool:
        if len(key) <= PAGE_KEY_BYTES:
            return False  # the key before it is another one, so it is not equal in so many bytes
        before = self._chunks[-1]
        if before.read is not None:
            return False  # it was a page of its own, and keys that are equal in them share one
        return page_key(before.as_rows().keys[-1]) == page_key(key)

    def finish(self) -> Block | AwayBlock | None:
        """The block so far; None where there are no rows."""
        chunks, self._chunks = self._chunks, []
        if not chunks:
            return None
        if len(chunks) == 1 and (listed := chunks[0].listed) is not None:
            return AwayBlock(listed, partial(_block, chunks))
        return _block(chunks)


def _block(chunks: list[_Chunk]) -> Block:
    chunks = [each.here() for each in chunks]
    first = chunks[0]
    if len(chunks) == 1 and (stored := first.stored) is not None:
        count = stored.row_count
        data = rows_block(*stored)
    else:
        rows = first.as_rows() if len(chunks) == 1 else _joined([each.as_rows() for each in chunks])
        count = len(rows)
        data = encode_rows(rows)
    listed = Listed(page_key(first.first_key), hash_of(data), count, len(data))
    return Block(listed, data, [*chain.from_iterable(each.places for each in chunks)])


def _joined(parts: list[Rows]) -> Rows:
    seqs, times = array("Q"), array("Q")
    for part in parts:
        seqs.extend(part.seqs)
        times.extend(part.times)
    return Rows(
        [*chain.from_iterable(part.keys for part in parts)],
        seqs,
        times,
        b"".join(part.flags for part in parts),
        [*chain.from_iterable(part.metadata for part in parts)],
        [*chain.from_iterable(part.values for part in parts)],
    )


def _chunk_away(stretch: PageStretch, reference: Reference, seq: int, state: State) -> _Chunk:
    """Return the chunk of a page that is away and is one block."""
    key, data = stretch.key, stretch.page
    assert key is not None
    assert isinstance(data, bytes)

    def read() -> _Chunk:
        [chunk] = _chunks_of(stretch._replace(page=state.away.read(key, data)), seq, state)
        return chunk

    return _Chunk(key, True, None, [], None, None, reference.listed(key), read)


_Row = tuple[bytes, int, int, int, bytes, bytes]
"""encoded key, seq, time_us, flags, metadata, value as pages have it"""


def _chunks_of(stretch: PageStretch, seq: int, state: State) -> Iterator[_Chunk]:
    """The live rows of a stretch as of `seq`."""
    page = stretch.page
    if isinstance(page, bytes):
        assert stretch.key is not None
        if not is_reference(page):
            page = decode_page(page, stretch.key)
        else:
            reference = decode_reference(page, stretch.key)
            if not stretch.changes and stretch.is_whole and reference.checkpoint_seq <= seq:
                yield _chunk_away(stretch, reference, seq, state)
                return
            page = state.away.read(stretch.key, page)
    resolved = stretch.is_unstamped or any(
        is_transactional(record) for records in stretch.changes.values() for record in records
    )
    if not resolved:
        state.require_readable(page, stretch.low, stretch.high, stretch.changes, seq)
    if page is not None and not stretch.changes and stretch.is_whole and max(page.seqs) <= seq:
        found = stored_columns(page)
        if found is not None:
            first, stored = found
            yield _Chunk(first, page_key(first) == stretch.key, None, [], stored, page)
            return
        all_keys, all_flags = page.keys, bytes(page.flags)
        if not all_flags.translate(None, _LIVE_BYTES) and len(set(all_keys)) == len(all_keys):
            yield _chunk(all_keys, page.seqs, page.times, all_flags, page.metadata, page.values, stretch)
            return
    rows = [*_resolved_rows(page, stretch, seq, state)] if resolved else _rows(page, stretch, seq, state)
    if not rows:
        return
    # A key in a page that does not begin it is no boundary; a changed one may be.
    begins = [0]
    for number, (before, row) in enumerate(pairwise(rows), 1):
        key = row[0]
        if (
            key in stretch.changes
            and state.boundaries.is_boundary(key)
            and page_key(key) != page_key(before[0])
        ):
            begins.append(number)
    for start, stop in pairwise([*begins, len(rows)]):
        keys, seqs, times, flags, metadata, values = zip(*rows[start:stop], strict=True)
        yield _chunk(
            list(keys), array("Q", seqs), array("Q", times), bytes(flags), list(metadata), values, stretch
        )


def _rows(page: DataPage | None, stretch: PageStretch, seq: int, state: State) -> list[_Row]:
    """Where no transaction has written."""
    rows = [] if page is None else _page_rows(page, stretch, seq)
    if not stretch.changes:
        return rows
    for key, records in stretch.changes.items():
        for record in records:
            version = page_version(record, state.inline_bytes_max)
            if version[1] <= seq:
                if not version[3] & TOMBSTONE:
                    rows.append((key, *version[1:]))
                break
        else:
            rows += [] if page is None else _page_row(page, key, seq)
    rows.sort()
    return rows


def _resolved_rows(page: DataPage | None, stretch: PageStretch, seq: int, state: State) -> Iterator[_Row]:
    """Where transactions have written."""
    for key, versions in state.seen_between(
        page,
        stretch.low,
        stretch.high,
        stretch.changes,
        stretch.view or {},
        0,
        seq if state.is_limited(seq) else None,
    ):
        found = next((each for each in versions if each.seq <= seq), None)
        if found is None:
            continue
        _, version_seq, time_us, flags, metadata, value = state.page_version_of(found, page)
        if not flags & TOMBSTONE:
            yield key, version_seq, time_us, flags, metadata, value


def _page_rows(page: DataPage, stretch: PageStretch, seq: int) -> list[_Row]:
    keys, seqs = page.keys, page.seqs
    stop = bisect_left(keys, stretch.high)
    row = bisect_left(keys, stretch.low)
    changes = stretch.changes
    found: list[_Row] = []
    key_before = None
    while row < stop:
        key = keys[row]
        if key != key_before and seqs[row] <= seq:
            key_before = key
            version_seq, time_us, flags, metadata, value = page.row(row)
            if not flags & TOMBSTONE and key not in changes:
                found.append((key, version_seq, time_us, flags, metadata, value))
        row += 1
    return found


def _page_row(page: DataPage, key: bytes, seq: int) -> list[_Row]:
    row = page.version_at(key, seq)
    if row < 0:
        return []
    found = page.row(row)
    return [] if found[2] & TOMBSTONE else [(key, *found)]


def _chunk(
    keys: list[bytes],
    seqs: array[int],
    times: array[int],
    flags: bytes,
    metadata: list[bytes],
    values: Sequence[bytes],
    stretch: PageStretch,
) -> _Chunk:
    """Return the chunk of these columns, whose values are as pages have them."""
    values, places = as_content(flags, values)
    first = keys[0]
    may_begin = first in stretch.changes or page_key(first) == stretch.key
    return _Chunk(first, may_begin, Rows(keys, seqs, times, flags, metadata, values), places, None, None)
