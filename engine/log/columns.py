"""Whole segments as Arrow columns, decoded without a Python loop over frames.

Always true:
  - every byte that becomes a column was verified first: by the block hashes of a sealed segment, by each
    frame's checksum where there is no footer;
  - a column that is not asked for costs nothing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lowwater.engine.format import format
from lowwater.engine.format.format import HEADER_BYTES, Flag, Kind, SegmentHeader
from lowwater.engine.log.reader import SealedReader
from lowwater.engine.log.scan import scan_frames
from lowwater.engine.log.vectors import Frames, Int64, slices
from lowwater.engine.log.windows import VECTOR_WINDOW_BYTES
from lowwater.engine.seams.seams import File
from lowwater.errors import Corrupt, InvalidEntry, NotFound

if TYPE_CHECKING:
    import pyarrow


COLUMNS = (
    "seq", "kind", "bucket", "key", "metadata", "value", "time", "origin", "txn", "flags",
)  # fmt: skip


def read_columns(file: File, *, columns: Sequence[str] | None = None) -> pyarrow.Table:
    """A whole segment, sealed or not, as an Arrow table of one row a frame."""
    import pyarrow as pa

    return pa.Table.from_batches(list(read_batches(file, columns=columns)))


def read_batches(file: File, *, columns: Sequence[str] | None = None) -> Iterator[pyarrow.RecordBatch]:
    """A segment as Arrow record batches of about 8 MiB of frames.

    `metadata` is the canonical CBOR of the frame, `value` what stands at the frame's end: for refused
    frames their code, for references the reference; `flags` tells which. Windows of this size stay in the
    processor's cache, which makes this several times as fast as decoding the segment at once.
    """
    names = list(COLUMNS if columns is None else columns)
    for name in names:
        if name not in COLUMNS:
            raise InvalidEntry(f"there is no column {name!r:.80}", hint=f"choose from {', '.join(COLUMNS)}")
    empty = True
    for data, base, positions in _verified_windows(file):
        empty = False
        yield _decode_batch(data, np.frombuffer(positions, np.uint32).astype(np.int64) - base, names)
    if empty:
        raise NotFound("the segment holds no entries yet", hint="choose another segment")


def _decode_batch(data: bytes, positions: Int64, names: Sequence[str]) -> pyarrow.RecordBatch:
    import pyarrow as pa

    frames = Frames(data, positions)
    fixed = frames.fixed
    made: dict[str, Any] = {}
    for name in names:
        if name in ("seq", "origin", "flags"):
            made[name] = pa.array(np.ascontiguousarray(fixed[name]))
        elif name == "time":
            times = np.ascontiguousarray(fixed["time_us"]).view("<i8")
            made[name] = pa.array(times).cast(pa.timestamp("us", tz="UTC"))
        elif name == "kind":
            made[name] = _kind_column(frames.kinds)
        elif name == "txn":
            made[name] = _txn_column(frames)
        elif name == "bucket":
            made[name] = slices(data, frames.bucket_starts, frames.key_starts, text=True)
        elif name == "key":
            made[name] = slices(data, frames.key_starts, frames.metadata_starts, text=True)
        elif name == "metadata":
            made[name] = slices(data, frames.metadata_starts, frames.value_starts, text=False)
        else:
            made[name] = slices(data, frames.value_starts, frames.ends, text=False)
    return pa.record_batch(made)


def _verified_windows(file: File) -> Iterator[tuple[bytes, int, array[int]]]:
    """(bytes, offset of the first byte, positions of the whole frames in them), all verified."""
    size = file.size()
    header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
    tail = file.read_at(max(0, size - format.TRAILER_BYTES), format.TRAILER_BYTES)
    sealed = None
    if tail[: len(format.TRAILER_MAGIC)] == format.TRAILER_MAGIC:
        sealed = SealedReader(file)
        positions, end = sealed.positions, sealed.trailer.body_bytes
    else:
        scan = scan_frames(file, header, stop=size)
        if scan.problem is not None:
            raise Corrupt(scan.problem, offset=scan.problem_offset, seq=scan.chain.seq_last)
        positions, end = scan.positions, scan.end
    first = 0
    while first < len(positions):
        start = positions[first]
        stop = bisect_left(positions, start + VECTOR_WINDOW_BYTES, first + 1)
        window_end = positions[stop] if stop < len(positions) else end
        if sealed is not None:
            base, data = sealed.read_verified(start, window_end)
        else:
            base, data = start, file.read_at(start, window_end - start)
        yield data, base, positions[first:stop]
        first = stop


def _kind_column(kinds: npt.NDArray[np.uint8]) -> pyarrow.Array:
    import pyarrow as pa

    codes = np.full(256, -1, np.int8)
    for place, kind in enumerate(Kind):
        codes[kind] = place
    names = pa.array([kind.name.lower() for kind in Kind])
    return pa.DictionaryArray.from_arrays(pa.array(codes[kinds]), names)


def _txn_column(frames: Frames) -> pyarrow.Array:
    import pyarrow as pa

    inside = frames.fixed["flags"] & int(Flag.TXN) != 0
    values = np.zeros(len(inside), np.uint64)
    if bool(inside.any()):
        values[inside] = frames.group(Flag.TXN, 0, "<u8", np.flatnonzero(inside))
    return pa.array(values, mask=~inside)
