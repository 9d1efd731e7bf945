"""What tasks read to make versions: stretches of the log, and slices of a checkpoint.

Always true:
  - a stretch gives the versions that its own frames made, each complete: a value that another frame has was
    read there, and compared with the hash that the entry has;
  - rows say the same whichever they come from: a version in a checkpoint is the version that the log made;
  - memory is bounded by the part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from lowwater.engine.format.blocks import LARGE, Place, Rows
from lowwater.engine.format.entries import decode_payload
from lowwater.engine.format.format import FRAME_BYTES
from lowwater.engine.format.keys import decode_key, encode_key
from lowwater.engine.format.page import BUCKET, REFERENCE
from lowwater.engine.state.catalogue import CheckpointDescriptor, SegmentDescriptor
from lowwater.errors import Corrupt
from lowwater.spark import replay
from lowwater.spark.entry_columns import arrow_schema, as_arrow
from lowwater.spark.maps import decode_maps
from lowwater.spark.plan import PART_BYTES, Part
from lowwater.spark.plan import PartPlace as Where
from lowwater.spark.replay import (
    CHANGES,
    COUNT_COLUMNS,
    END_COLUMNS,
    ENDS,
    FROM_THE_BEGINNING,
    NO_ENDS,
    Ends,
    Since,
    counting,
    ends_of,
    is_bucket,
    is_deletion,
    joined,
    needed,
    numbers,
    one_batch,
    there,
    thinned,
)
from lowwater.spark.segments import fetcher_of, raw_batches
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint
from lowwater.tiering.remote_segment import RemoteSegment

# What tasks hand on at once.
BATCH_ROWS = 16_384
VALUE_BYTES = 2**24
"""How many bytes of values, but for one that is larger."""

VERSION_COLUMNS = {
    "bucket": "string",
    "key": "string",
    "seq": "bigint",
    "time": "timestamp",
    "kind": "string",
    "metadata": "map<string,string>",
    "value": "binary",
    "origin": "bigint",
    "txn": "bigint",
    "frame": "bigint",
}
"""The columns of a version. `frame` is the seq of the frame that made it; below 0 in a checkpoint, where it
is the row's own number, so that it is nobody else's."""

# What they are made of.
_SOURCES = {
    "seq": (),
    "frame": (),
    "time": (),
    "value": ("value", "value_seq", "value_length", "value_hash"),
}
_LIST_ROWS_MAX = 2**32


@dataclass(frozen=True)
class Segments:
    """Where entries lie, to look one up by its seq."""

    place: Where
    pieces: tuple[tuple[str, SegmentDescriptor], ...]


class Lookup:
    """Frames that others refer to. Ask in order: what lies next to each other is read once."""

    def __init__(self, segments: Segments) -> None:
        self._fetcher = fetcher_of(segments.place)
        self._pieces = segments.pieces
        self._opened: dict[int, RemoteSegment] = {}

    def _segment(self, seq: int) -> RemoteSegment:
        number = bisect_right(self._pieces, seq, key=_first_of) - 1
        if number < 0:
            raise Corrupt(f"there is no entry {seq}, whose value is needed", seq=seq)
        found = self._opened.get(number)
        if found is None:
            found = self._opened[number] = RemoteSegment(self._fetcher, *self._pieces[number])
        return found

    def frame(self, seq: int) -> tuple[Place, bytes]:
        """Where a frame lies, and its payload."""
        segment = self._segment(seq)
        found = segment.frame_of(seq)
        if found is None:
            raise Corrupt(f"there is no entry {seq}, whose value is needed", path=segment.name, seq=seq)
        return (segment.descriptor.first, found[0]), found[1][FRAME_BYTES:]

    def value(self, seq: int, length: int, value_hash: bytes) -> bytes:
        """The value of the entry `seq`."""
        _, payload = self.frame(seq)
        return _verified(decode_payload(seq, payload).value, length, value_hash, seq)

    def value_at(self, place: Place, length: int, value_hash: bytes) -> bytes:
        """The value that ends with the frame at a place."""
        frame = self._segment(place[0]).frame_at(place[1], length, 2048)
        return _verified(frame[len(frame) - length :], length, value_hash, place[0])


def _first_of(piece: tuple[str, SegmentDescriptor]) -> int:
    return piece[1].first


def _verified(value: bytes, length: int, value_hash: bytes, seq: int) -> bytes:
    if len(value) != length or blake3(value).digest() != value_hash:
        raise Corrupt(f"the value that is needed of seq {seq} is another one there", seq=seq)
    return value


# ---------------------------------------------------------------------------- stretches of the log


@dataclass(frozen=True)
class ReadStretch:
    """A part of the log, and what there is to know of the others to replay it: versions of seqs above `above`
    and up to `at` are wanted."""

    part: Part
    at: int
    columns: tuple[str, ...]
    above: int = 0
    ends: Ends = NO_ENDS
    since: Since = FROM_THE_BEGINNING
    buckets: bool = False
    """Whether the records of buckets are wanted too."""

    @property
    def is_narrowed(self) -> bool:
        """Whether entries that are no changes are not among those selected."""
        selection = self.part.selection
        return not selection.bucket is selection.prefix is selection.key is None


def frames_of(stretch: ReadStretch, columns: Sequence[str]) -> pa.RecordBatch:
    """The frames that count, with these columns, and those of `counting`."""
    # What else there is, is not even decoded.
    kinds = CHANGES if stretch.is_narrowed else CHANGES | ENDS
    part = replace(stretch.part, selection=stretch.part.selection._replace(kinds=kinds))
    columns = needed(COUNT_COLUMNS, columns, () if stretch.is_narrowed else END_COLUMNS)
    batches = raw_batches(part, columns)
    if part.selection.share is not None:
        # Of a key that is written often all may be in one share, which is for the newest versions only.
        batches = thinned(batches, PART_BYTES)
    frames = one_batch(batches, arrow_schema(columns))
    own = frames
    if stretch.is_narrowed:
        selection = part.selection._replace(bucket=None, prefix=None, key=None, kinds=ENDS)
        ended = Part(part.place, part.pieces, selection, part.verify)
        own = one_batch(raw_batches(ended, END_COLUMNS), arrow_schema(END_COLUMNS))
    ends = joined(ends_of(own), stretch.ends)
    return counting(frames, ends, stretch.at, above=stretch.above, since=stretch.since)


def crossing_ends(part: Part) -> Iterator[pa.RecordBatch]:
    """The ends in a part of transactions that began before it."""
    selection = part.selection._replace(bucket=None, prefix=None, key=None, kinds=ENDS)
    ended = Part(part.place, part.pieces, selection, part.verify)
    first: int | None = None
    for batch in raw_batches(ended, END_COLUMNS):
        ends = ends_of(batch)
        if len(ends):
            if first is None:
                first = seq_first_of(part)
            ends = ends.where(ends.txn < first)
            if len(ends):
                yield ends.to_batch()


def seq_first_of(part: Part) -> int:
    """Where what is read of a part begins. Of a segment with holes it is the selection that says so."""
    piece = part.pieces[0]
    first = piece.segment.first
    if piece.frame_first:
        first = RemoteSegment(fetcher_of(part.place), piece.name, piece.segment).seq_at(piece.frame_first)
    return max(first, part.selection.seq_first)


def newest_keys(stretch: ReadStretch) -> Iterator[pa.RecordBatch]:
    """The newest frame of each key, deletions too: bucket, key, frame."""
    frames = frames_of(stretch, ("bucket", "key"))
    found = replay.newest(frames, None if stretch.buckets else is_bucket(frames))
    yield from _as_versions(found, ("bucket", "key", "frame"))


def newest_objects(stretch: ReadStretch, segments: Segments | None = None) -> Iterator[pa.RecordBatch]:
    """The newest version of each key, where that is no deletion."""
    frames = frames_of(stretch, _source_columns(stretch.columns))
    unwanted = is_deletion(frames) if stretch.buckets else is_deletion(frames) | is_bucket(frames)
    found = replay.newest(frames, unwanted)
    yield from _as_versions(found, stretch.columns, segments)


def versions(stretch: ReadStretch, segments: Segments | None = None) -> Iterator[pa.RecordBatch]:
    """All versions of all keys. Where a transaction or a group is in several parts, each gives one."""
    found = replay.surviving(frames_of(stretch, _source_columns(stretch.columns)))
    yield from _as_versions(found, stretch.columns, segments)


def _source_columns(columns: Sequence[str]) -> tuple[str, ...]:
    return needed(("bucket", "key"), *(_SOURCES.get(name, (name,)) for name in columns))


def _as_versions(
    frames: pa.RecordBatch, columns: Sequence[str], segments: Segments | None = None
) -> Iterator[pa.RecordBatch]:
    """A few rows at once: copies may have far more to them than there is in the part."""
    lookup = None if segments is None else Lookup(segments)
    lengths = numbers(frames.column("value_length")) if "value" in columns else None
    start = 0
    while start < len(frames):
        stop = min(start + BATCH_ROWS, len(frames))
        if lengths is not None:
            within = np.cumsum(lengths[start:stop])
            stop = min(stop, start + max(1, int(np.searchsorted(within, VALUE_BYTES, "right"))))
        yield _some_versions(frames.slice(start, stop - start), columns, lookup)
        start = stop


def _some_versions(frames: pa.RecordBatch, columns: Sequence[str], lookup: Lookup | None) -> pa.RecordBatch:
    made = []
    for name in columns:
        if name == "frame":
            column = frames.column("seq")
        elif name == "seq":
            column = frames.column("version_seq")
        elif name == "time":
            column = frames.column("version_time_us").cast(_TIMESTAMP)
        elif name == "value":
            column = _values(frames, lookup)
        else:
            column = frames.column(name)
        made.append(column)
    return pa.RecordBatch.from_arrays(made, list(columns))


_TIMESTAMP = pa.timestamp("us", tz="UTC")


def _values(frames: pa.RecordBatch, lookup: Lookup | None) -> pa.Array:
    """Null for deletions and buckets; those that were copied from where they are."""
    values = frames.column("value")
    referring = np.flatnonzero(there(frames.column("value_seq")))
    absent = is_deletion(frames) | is_bucket(frames)
    if len(referring):
        assert lookup is not None
        seqs = numbers(frames.column("value_seq"))
        lengths = numbers(frames.column("value_length"))
        hashes = frames.column("value_hash")
        items = values.to_pylist()
        for place in sorted(referring.tolist(), key=seqs.__getitem__):
            items[place] = lookup.value(int(seqs[place]), int(lengths[place]), hashes[place].as_py())
        values = pa.array(items, pa.binary())
    if absent.any():
        values = pc.if_else(pa.array(absent), pa.scalar(None, pa.binary()), values)
    return values


# ---------------------------------------------------------------------------- content, as checkpoints have it

CONTENT_TYPES = {
    "ekey": "binary",
    "seq": "bigint",
    "time_us": "bigint",
    "flags": "int",
    "metadata": "binary",
    "value": "binary",
    "segment": "bigint",
    "position": "bigint",
    "frame": "bigint",
}
"""A row of a block: the encoded key first, at the end where the log has a large value."""
CONTENT_COLUMNS = tuple(CONTENT_TYPES)
_CONTENT_SOURCES = (
    "bucket", "key", "metadata_bytes", "value", "value_seq", "value_length", "value_hash", "segment",
    "position",
)  # fmt: skip
_CONTENT_SCHEMA = as_arrow(CONTENT_TYPES)


def newest_content(
    stretch: ReadStretch, segments: Segments | None = None, *, inline_bytes_max: int
) -> Iterator[pa.RecordBatch]:
    """The newest version of each key and bucket that is there, as a block has it."""
    frames = frames_of(stretch, _CONTENT_SOURCES)
    frames = replay.newest(frames, is_deletion(frames))
    for start in range(0, len(frames), BATCH_ROWS):
        yield _as_content(frames.slice(start, BATCH_ROWS), segments, inline_bytes_max)


def _as_content(frames: pa.RecordBatch, segments: Segments | None, inline_bytes_max: int) -> pa.RecordBatch:
    buckets = [name.encode() for name in frames.column("bucket").to_pylist()]
    names = [name.encode() for name in frames.column("key").to_pylist()]
    of_bucket = is_bucket(frames)
    keys = [
        encode_key(b"", bucket) if alone else encode_key(bucket, name)
        for bucket, name, alone in zip(buckets, names, of_bucket.tolist(), strict=True)
    ]
    flags = np.where(of_bucket, BUCKET, 0)
    lengths = numbers(frames.column("value_length"))
    places = numbers(frames.column("segment")), numbers(frames.column("position")).copy()
    segment_firsts, positions = places[0].copy(), places[1]
    values = frames.column("value").to_pylist()
    referred = numbers(frames.column("value_seq"))
    hashes = frames.column("value_hash")
    large = np.flatnonzero((referred > 0) | ((lengths > inline_bytes_max) & ~of_bucket))
    lookup: Lookup | None = None
    for row in sorted(large.tolist(), key=referred.__getitem__):
        flags[row] = REFERENCE
        if not referred[row]:
            values[row] = LARGE.pack(len(values[row]), blake3(values[row]).digest())
            continue
        if lookup is None:
            assert segments is not None
            lookup = Lookup(segments)
        values[row] = LARGE.pack(int(lengths[row]), hashes[row].as_py())
        segment_firsts[row], positions[row] = lookup.frame(int(referred[row]))[0]
    is_large = flags == REFERENCE
    return pa.RecordBatch.from_arrays(
        [
            pa.array(keys, pa.binary()),
            frames.column("version_seq"),
            frames.column("version_time_us"),
            pa.array(flags.astype(np.int32)),
            frames.column("metadata_bytes"),
            pa.array(values, pa.binary()),
            pa.array(np.where(is_large, segment_firsts, 0)),
            pa.array(np.where(is_large, positions, 0)),
            frames.column("seq"),
        ],
        schema=_CONTENT_SCHEMA,
    )


# ---------------------------------------------------------------------------- slices of a checkpoint


@dataclass(frozen=True)
class Slice:
    """Lists of a checkpoint, from one number to below another, and which of their keys are wanted."""

    place: Where
    checkpoint: CheckpointDescriptor
    first: int
    stop: int
    bucket: str | None
    prefix: str | None
    columns: tuple[str, ...]
    buckets: bool = False


def blocks_of(slice_: Slice) -> Iterator[tuple[int, Rows, list[Place]]]:
    """The rows of each block, with the number of the first of them, and the places of the large values."""
    remote = RemoteCheckpoint(fetcher_of(slice_.place), slice_.checkpoint)
    for number in range(slice_.first, slice_.stop):
        row = number * _LIST_ROWS_MAX
        for known in remote.blocks_of(remote.index.lists[number]):
            rows, places = remote.content_of(known)
            yield row, rows, places
            row += len(rows)


def checkpoint_keys(slice_: Slice) -> Iterator[pa.RecordBatch]:
    """As `newest_keys`."""
    yield from _checkpoint_rows(slice_, ("bucket", "key", "frame"))


def checkpoint_objects(slice_: Slice, segments: Segments | None = None) -> Iterator[pa.RecordBatch]:
    """As `newest_objects`."""
    yield from _checkpoint_rows(slice_, slice_.columns, segments)


def checkpoint_content(slice_: Slice, segments: Segments | None = None) -> Iterator[pa.RecordBatch]:
    """As `newest_content`: large values stay in their segments."""
    for first, rows, places in blocks_of(slice_):
        count = len(rows)
        where = np.zeros((2, count), np.int64)
        if places:
            large = [number for number, flag in enumerate(rows.flags) if flag & REFERENCE]
            where[:, large] = np.array(places, np.int64).T
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(rows.keys, pa.binary()),
                pa.array(np.frombuffer(rows.seqs, np.int64)),
                pa.array(np.frombuffer(rows.times, np.int64)),
                pa.array(np.frombuffer(rows.flags, np.uint8).astype(np.int32)),
                pa.array(rows.metadata, pa.binary()),
                pa.array(rows.values, pa.binary()),
                pa.array(where[0]),
                pa.array(where[1]),
                pa.array(-1 - first - np.arange(count)),
            ],
            schema=_CONTENT_SCHEMA,
        )


def _checkpoint_rows(
    slice_: Slice, columns: Sequence[str], segments: Segments | None = None
) -> Iterator[pa.RecordBatch]:
    lookup = None if segments is None else Lookup(segments)
    schema = as_arrow({name: VERSION_COLUMNS[name] for name in columns})
    found: list[tuple[Any, ...]] = []
    value_bytes = 0
    wanted = None if slice_.bucket is None else slice_.bucket.encode()
    prefix = (slice_.prefix or "").encode()
    for first, rows, places in blocks_of(slice_):
        at = iter(places)
        for number, key in enumerate(rows.keys):
            flags = rows.flags[number]
            place = next(at) if flags & REFERENCE else None
            bucket, name = decode_key(key)
            if flags & BUCKET:
                bucket, name = name, b""
                if not slice_.buckets:
                    continue
            if not name.startswith(prefix) or (wanted is not None and bucket != wanted):
                continue
            value = None
            if "value" in columns:
                stored = rows.values[number]
                if place is not None:
                    assert lookup is not None
                    value = lookup.value_at(place, *LARGE.unpack(stored))
                elif not flags & BUCKET:
                    value = stored
                value_bytes += len(value or b"")
            found.append(
                (
                    bucket.decode(),
                    name.decode(),
                    rows.seqs[number],
                    rows.times[number],
                    rows.metadata[number],
                    value,
                    -1 - first - number,
                )
            )
            if len(found) >= BATCH_ROWS or value_bytes >= VALUE_BYTES:
                yield _batch_of(found, schema)
                found, value_bytes = [], 0
    if found:
        yield _batch_of(found, schema)


_FIELDS = ("bucket", "key", "seq", "time", "metadata", "value", "frame")


def _batch_of(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = dict(zip(_FIELDS, zip(*rows, strict=True), strict=True))
    made = []
    for field in schema:
        if field.name == "metadata":
            encoded = pa.array(
                [each or None for each in columns["metadata"]], pa.binary()
            ).dictionary_encode()
            made.append(decode_maps(encoded.dictionary).take(encoded.indices))
        else:
            made.append(pa.array(columns[field.name], field.type))
    return pa.RecordBatch.from_arrays(made, schema=schema)
