"""Rows in the order of their keys, cut into blocks: what a checkpoint stores.

Always true:
  - blocks begin where the engine's do: at a key that is a boundary, unless the row before it is equal in its
    first 500 bytes. So whoever cuts the same rows gets the same blocks;
  - what a task has of the order may begin and end in the middle of a block. What it cannot know to be one is
    handed on as a fragment, and cut once more with those of its neighbours;
  - in memory are the rows of one block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa

from lowwater.engine.checkpoint.packing import Described
from lowwater.engine.format.blocks import (
    NO_HASH,
    Listed,
    Place,
    Rows,
    decode_places,
    decode_rows,
    encode_places,
    encode_rows,
    hash_of,
)
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.keys import PAGE_KEY_BYTES, page_key
from lowwater.engine.format.page import REFERENCE
from lowwater.spark.entry_columns import as_arrow

BLOCK_TYPES = {
    "is_block": "boolean",
    "key": "binary",
    "block_hash": "binary",
    "row_count": "int",
    "block_bytes": "int",
    "places_hash": "binary",
    "places_bytes": "int",
    "data": "binary",
}
"""A block, or a fragment of which `key` is the first key, with its places behind its bytes. Without places
there is no hash of them."""
_SCHEMA = as_arrow(BLOCK_TYPES)
# What a task hands on at once.
BATCH_BYTES = 2**21


class CutRow(NamedTuple):
    key: bytes
    seq: int
    time_us: int
    flags: int
    metadata: bytes
    value: bytes
    place: Place


class Cut(NamedTuple):
    is_block: bool
    described: Described
    first_key: bytes
    data: bytes


def cut(rows: Iterable[CutRow], boundaries: Boundaries, *, is_all: bool) -> Iterator[Cut]:
    """Blocks, in order. Where that is not all there is, the first rows and the last are a fragment each,
    since what lies before and after may belong to them."""
    open_rows: list[CutRow] = []
    is_fragment = not is_all
    for row in rows:
        if open_rows and boundaries.is_boundary(row.key) and not _is_same_page(open_rows[-1].key, row.key):
            yield _cut(open_rows, is_block=not is_fragment)
            open_rows, is_fragment = [], False
        open_rows.append(row)
    if open_rows:
        yield _cut(open_rows, is_block=is_all)


def _is_same_page(before: bytes, key: bytes) -> bool:
    return len(key) > PAGE_KEY_BYTES and page_key(before) == page_key(key)


def _cut(rows: list[CutRow], *, is_block: bool) -> Cut:
    keys, seqs, times, flags, metadata, values, places = zip(*rows, strict=True)
    data = encode_rows(
        Rows(list(keys), array("Q", seqs), array("Q", times), bytes(flags), list(metadata), values)
    )
    large = [place for place, flag in zip(places, flags, strict=True) if flag & REFERENCE]
    encoded = encode_places(large) if large else b""
    listed = Listed(page_key(keys[0]), hash_of(data), len(rows), len(data))
    places_hash = hash_of(encoded) if large else NO_HASH
    return Cut(is_block, Described(listed, places_hash, len(encoded)), keys[0], data + encoded)


def rows_of_fragment(data: bytes, described: Described) -> Iterator[CutRow]:
    block_bytes = described.listed.block_bytes
    rows = decode_rows(data[:block_bytes], described.listed.block_hash)
    places = iter(decode_places(data[block_bytes:], described.places_hash) if described.places_bytes else ())
    for key, seq, time_us, flags, metadata, value in zip(
        rows.keys, rows.seqs, rows.times, rows.flags, rows.metadata, rows.values, strict=True
    ):
        yield CutRow(key, seq, time_us, flags, metadata, value, next(places) if flags & REFERENCE else (0, 0))


# ---------------------------------------------------------------------------- as tasks do it


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[CutRow]:
    """Yield the rows of batches of content, in order."""
    for batch in batches:
        *columns, segments, positions = (
            batch.column(name).to_pylist()
            for name in ("ekey", "seq", "time_us", "flags", "metadata", "value", "segment", "position")
        )
        yield from map(CutRow, *columns, zip(segments, positions, strict=True))


def cut_part(batches: Iterator[pa.RecordBatch], boundaries: Boundaries) -> Iterator[pa.RecordBatch]:
    """Cut the content of a range of keys into blocks, in order."""
    return _batches(cut(rows_of(batches), boundaries, is_all=False))


def cut_fragments(batches: Iterator[pa.RecordBatch], boundaries: Boundaries) -> Iterator[pa.RecordBatch]:
    """Cut all fragments there are into blocks, in order."""
    rows = (row for batch in batches for each in described_in(batch) for row in rows_of_fragment(*each))
    return _batches(cut(rows, boundaries, is_all=True))


def _batches(cuts: Iterable[Cut]) -> Iterator[pa.RecordBatch]:
    waiting: list[Cut] = []
    size = 0
    for each in cuts:
        waiting.append(each)
        size += len(each.data)
        if size >= BATCH_BYTES:
            yield _batch(waiting)
            waiting, size = [], 0
    if waiting:
        yield _batch(waiting)


def _batch(cuts: list[Cut]) -> pa.RecordBatch:
    columns = zip(
        *(
            (
                each.is_block,
                each.described.listed.key if each.is_block else each.first_key,
                each.described.listed.block_hash,
                each.described.listed.row_count,
                each.described.listed.block_bytes,
                each.described.places_hash if each.described.places_bytes else None,
                each.described.places_bytes,
                each.data,
            )
            for each in cuts
        ),
        strict=True,
    )
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def described_in(batch: pa.RecordBatch) -> Iterator[tuple[bytes, Described]]:
    """The blocks of a batch, with their bytes where it has them."""
    names = ("key", "block_hash", "row_count", "block_bytes", "places_hash", "places_bytes")
    columns = [batch.column(name).to_pylist() for name in names]
    data = batch.column("data").to_pylist() if "data" in batch.schema.names else [b""] * len(batch)
    for key, block_hash, rows, size, places_hash, places_bytes, each in zip(*columns, data, strict=True):
        yield each, Described(Listed(key, block_hash, rows, size), places_hash or NO_HASH, places_bytes)
