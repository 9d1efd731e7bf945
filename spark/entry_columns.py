"""The columns that Spark gets, each made of many frames at once.

Always true:
  - a column says of each frame what the engine's `Entry` says of it, in Spark's types;
  - a column that is not asked for costs nothing, and neither does what no frame of the batch has;
  - metadata that comes again is decoded once a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lowwater.engine.format import format
from lowwater.engine.format.before_images import IMAGE, LARGE_VALUE
from lowwater.engine.format.entries import decode_body, decode_payload
from lowwater.engine.format.format import KIND_NAMES, Flag, Kind
from lowwater.engine.log.vectors import Frames, gather, slices
from lowwater.errors import Corrupt, LimitExceeded, NewerVersion
from lowwater.spark.maps import decode_maps

# By name, with their types in Spark's words. Numbers are signed: what does not fit is an error. What an entry
# does not have is null, but for the bucket and the key of control entries, which are empty texts, as `Entry`
# has them.
COLUMNS: dict[str, str] = {
    "seq": "bigint",
    "kind": "string",
    "bucket": "string",
    "key": "string",
    "metadata": "map<string,string>",  # null for none
    "value": "binary",  # null where another frame has it (`value_seq`), empty for a refused entry
    "time": "timestamp",
    "origin": "bigint",
    "txn": "bigint",
    # What a frame says besides.
    "kind_code": "smallint",
    "flags": "int",
    "refused": "int",  # the code; null where the entry took effect
    "previous": "bigint",  # the frame before, of the same transaction; 0 where that is not open
    "group_last": "bigint",
    "session": "bigint",
    "request": "bigint",
    "request_hash": "binary",
    "stream_offset": "bigint",
    "before": "binary",  # as the frame has it
    "before_seq": "bigint",  # of what the key had before; 0 for nothing, null where the log does not say so
    "before_time": "timestamp",
    "before_metadata": "map<string,string>",
    "before_value": "binary",  # null for a large one: the key has it as of `before_seq`
    "before_value_length": "bigint",
    "before_value_hash": "binary",  # of a large one
    "value_length": "bigint",  # also where another frame has the value
    "value_seq": "bigint",  # of the frame that has it; null where it is here
    "value_hash": "binary",  # its BLAKE3; null where it is here
    "metadata_bytes": "binary",  # canonical CBOR, empty for none
    "time_us": "bigint",
    "savepoint": "bigint",  # of an abort that goes back to one
    "payload": "binary",  # the whole frame but for its head
    # Where it lies.
    "segment": "bigint",  # the first seq of the segment
    "position": "bigint",  # of the frame in the raw segment
    "frame_length": "bigint",  # of the whole frame
}
MAIN_COLUMNS = tuple(COLUMNS)[:9]
"""What is read where no schema is given."""

_MAP = pa.map_(pa.string(), pa.string())
_TYPES = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "smallint": pa.int16(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "map<string,string>": _MAP,
}
_NUMPY: dict[str, np.dtype[Any]] = {
    "bigint": np.dtype("<i8"),
    "int": np.dtype("<i4"),
    "smallint": np.dtype("<i2"),
}
_Places = npt.NDArray[np.intp]
_SIGNED_MAX = 2**63 - 1


def schema_of(types: Mapping[str, str], columns: Sequence[str]) -> str:
    """Return Spark's schema of the columns. A session may change what `timestamp` means, so this says
    `timestamp_ltz`."""
    return ", ".join(f"{name} {types[name]}".replace(" timestamp", " timestamp_ltz") for name in columns)


def as_arrow(types: Mapping[str, str]) -> pa.Schema:
    """Return Arrow's schema of columns with these types of Spark."""
    return pa.schema([pa.field(name, _TYPES[kind]) for name, kind in types.items()])


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([pa.field(name, _TYPES[COLUMNS[name]]) for name in columns])


class FrameBatch:
    """Frames of one segment, of which columns are made. `base` is where their data begins in it."""

    def __init__(self, frames: Frames, base: int, segment_first: int) -> None:
        self.frames = frames
        self.base = base
        self.segment_first = segment_first
        self.flags = frames.fixed["flags"]
        if frames.flags_seen & (Flag.REFUSED | Flag.VALUE_REF):
            self._check_values()

    def _check_values(self) -> None:
        """Raise Corrupt unless codes and references have their sizes, so that they can be gathered."""
        lengths = self.frames.ends - self.frames.value_starts
        refused, referring = self.having(Flag.REFUSED), self.having(Flag.VALUE_REF)
        if bool((self.flags[refused] & int(Flag.VALUE_REF)).any()):
            raise Corrupt("an entry is refused and has a value")
        if bool((lengths[refused] != format.U16.size).any()):
            raise Corrupt("a refused entry does not carry a code of two bytes")
        if bool((lengths[referring] != format.VALUE_REF.size).any()):
            raise Corrupt("a reference to a value has the wrong size")

    def decode(self) -> None:
        """Decode what could not be decoded, though its bytes are those that were written."""
        for name in ("bucket", "key", "metadata"):
            _MAKERS[name](self)

    def record_batch(self, columns: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([_MAKERS[name](self) for name in columns], schema=schema)

    def having(self, flag: Flag) -> _Places:
        """The places of the frames with a flag."""
        return np.flatnonzero(self.flags & int(flag)) if self.frames.flags_seen & flag else _NOWHERE

    def __len__(self) -> int:
        return len(self.frames.positions)


_NOWHERE = np.empty(0, np.intp)


# ---------------------------------------------------------------------------- numbers


def _signed(numbers: npt.NDArray[Any], what: str) -> npt.NDArray[np.int64]:
    """Unsigned numbers of eight bytes, as Spark can hold them."""
    found: npt.NDArray[np.int64] = np.ascontiguousarray(numbers).view("<i8")
    if len(found) and int(found.min()) < 0:
        place = int(found.argmin())
        raise LimitExceeded(
            f"the {what} {int(numbers[place])} is above 2^63-1, the highest number that Spark has",
            hint=f"read it with `lowwater log dump`, or leave the column {what} out",
        )
    return found


def _of_all(name: str, field: str) -> Callable[[FrameBatch], pa.Array]:
    """A number of the fixed part."""
    dtype = _NUMPY[COLUMNS[name]]

    def make(batch: FrameBatch) -> pa.Array:
        numbers = batch.frames.fixed[field]
        if numbers.dtype.itemsize == 8:
            return pa.array(_signed(numbers, name))
        return pa.array(numbers.astype(dtype))

    return make


def _of_some(name: str, flag: Flag, offset: int) -> Callable[[FrameBatch], pa.Array]:
    """A number of eight bytes in an optional group."""

    def make(batch: FrameBatch) -> pa.Array:
        places = batch.having(flag)
        return _scattered(
            len(batch), places, _signed(batch.frames.group(flag, offset, "<u8", places), name), pa.int64()
        )

    return make


def _scattered(count: int, places: _Places, numbers: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """The numbers at their places, null elsewhere."""
    if not len(places):
        return pa.nulls(count, kind)
    values = np.zeros(count, numbers.dtype)
    values[places] = numbers
    absent = np.ones(count, np.bool_)
    absent[places] = False
    return pa.array(values, kind, mask=absent)


def _time(batch: FrameBatch) -> pa.Array:
    return pa.array(_signed(batch.frames.fixed["time_us"], "time")).cast(_TYPES["timestamp"])


def _refused(batch: FrameBatch) -> pa.Array:
    places = batch.having(Flag.REFUSED)
    codes = _gathered(batch, batch.frames.value_starts[places], "<u2")
    return _scattered(len(batch), places, codes.astype("<i4"), pa.int32())


def _value_length(batch: FrameBatch) -> pa.Array:
    lengths = batch.frames.ends - batch.frames.value_starts
    lengths[batch.having(Flag.REFUSED)] = 0
    places = batch.having(Flag.VALUE_REF)
    if len(places):
        lengths[places] = _signed(_reference(batch, places, 0), "value_length")
    return pa.array(lengths)


def _value_seq(batch: FrameBatch) -> pa.Array:
    places = batch.having(Flag.VALUE_REF)
    return _scattered(len(batch), places, _signed(_reference(batch, places, 8), "value_seq"), pa.int64())


def _reference(batch: FrameBatch, places: _Places, offset: int) -> npt.NDArray[Any]:
    return _gathered(batch, batch.frames.value_starts[places] + offset, "<u8")


def _gathered(batch: FrameBatch, starts: npt.NDArray[np.int64], dtype: str) -> npt.NDArray[Any]:
    return gather(batch.frames.data, np.dtype(dtype), starts)


def _segment(batch: FrameBatch) -> pa.Array:
    return pa.array(np.full(len(batch), batch.segment_first, np.int64))


def _position(batch: FrameBatch) -> pa.Array:
    return pa.array(batch.frames.positions + batch.base)


def _frame_length(batch: FrameBatch) -> pa.Array:
    return pa.array(batch.frames.ends - batch.frames.positions)


# ---------------------------------------------------------------------------- texts and bytes

_KINDS = pa.array([name or "" for name in KIND_NAMES], pa.string())


def _kind(batch: FrameBatch) -> pa.Array:
    return _KINDS.take(pa.array(batch.frames.kinds))


def _bucket(batch: FrameBatch) -> pa.Array:
    frames = batch.frames
    return slices(frames.data, frames.bucket_starts, frames.key_starts, text=True)


def _key(batch: FrameBatch) -> pa.Array:
    frames = batch.frames
    return slices(frames.data, frames.key_starts, frames.metadata_starts, text=True)


def _metadata_bytes(batch: FrameBatch) -> pa.Array:
    frames = batch.frames
    return slices(frames.data, frames.metadata_starts, frames.value_starts, text=False)


def _value(batch: FrameBatch) -> pa.Array:
    frames = batch.frames
    refused, referring = batch.having(Flag.REFUSED), batch.having(Flag.VALUE_REF)
    ends, absent = frames.ends, None
    if len(refused):
        ends = ends.copy()
        ends[refused] = frames.value_starts[refused]
    if len(referring):
        absent = np.zeros(len(batch), np.bool_)
        absent[referring] = True
    return slices(frames.data, frames.value_starts, ends, text=False, absent=absent)


def _payload(batch: FrameBatch) -> pa.Array:
    frames = batch.frames
    return slices(frames.data, frames.positions + format.FRAME_BYTES, frames.ends, text=False)


def _savepoint(batch: FrameBatch) -> pa.Array:
    frames = batch.frames
    places = np.flatnonzero((frames.kinds == int(Kind.ABORT)) & (batch.flags & int(Flag.REFUSED) == 0))
    found = []
    for place in places.tolist():
        payload = frames.data[frames.positions[place] + format.FRAME_BYTES : frames.ends[place]]
        body = decode_body(decode_payload(int(frames.fixed["seq"][place]), bytes(payload)))
        found.append(body.get("savepoint"))
    back = [number for number, savepoint in enumerate(found) if savepoint is not None]
    savepoints = np.array([found[number] for number in back], np.int64)
    return _scattered(len(batch), places[back], savepoints, pa.int64())


def _request_hash(batch: FrameBatch) -> pa.Array:
    places = batch.having(Flag.REQUEST_HASH)
    if not len(places):
        return pa.nulls(len(batch), pa.binary())
    frames = batch.frames
    before = batch.flags[places] & (int(Flag.REQUEST_HASH) - 1)
    starts = frames.positions[places] + format.FRAME_FIXED_BYTES + _GROUP_SIZES[before]
    return _some_slices(batch, places, starts, starts + 16)


_GROUP_SIZES = np.array(format.GROUP_BYTES, dtype=np.int64)


def _before(batch: FrameBatch) -> pa.Array:
    return _some_slices(batch, *_before_bounds(batch))


def _before_bounds(batch: FrameBatch) -> tuple[_Places, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The places of the frames with a before-image, and where these begin and end."""
    places = batch.having(Flag.BEFORE)
    frames = batch.frames
    groups = batch.flags[places] & (len(format.GROUP_BYTES) - 1)
    starts = frames.positions[places] + format.FRAME_FIXED_BYTES + _GROUP_SIZES[groups] + 4
    return places, starts, frames.bucket_starts[places]


class _Images(NamedTuple):
    """The before-images of a batch that are not empty: the places of their frames, and of their parts."""

    places: _Places
    starts: npt.NDArray[np.int64]
    metadata_starts: npt.NDArray[np.int64]
    value_starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    is_large: npt.NDArray[np.bool_]

    def taken(self, wanted: npt.NDArray[np.bool_]) -> _Images:
        return _Images._make(each[wanted] for each in self)


def _images(batch: FrameBatch) -> _Images:
    places, starts, ends = _before_bounds(batch)
    full = np.flatnonzero(ends > starts)
    places, starts, ends = places[full], starts[full], ends[full]
    metadata_starts = starts + IMAGE.size
    if bool((metadata_starts > ends).any()):
        raise Corrupt("a before-image is cut short")
    value_starts = metadata_starts + _gathered(batch, starts + 16, "<u2")
    forms = _gathered(batch, starts + 18, "u1")
    if bool((forms > 1).any()):
        raise NewerVersion(f"before-images of the form {int(forms.max())} are not known to this version")
    is_large = forms == 1
    if bool((value_starts > ends).any()):
        raise Corrupt("a before-image ends inside its metadata")
    if bool(((ends - value_starts)[is_large] != LARGE_VALUE.size).any()):
        raise Corrupt("a before-image's reference to a value has the wrong size")
    return _Images(places, starts, metadata_starts, value_starts, ends, is_large)


def _before_seq(batch: FrameBatch) -> pa.Array:
    images = _images(batch)
    seqs = np.zeros(len(batch), np.int64)
    seqs[images.places] = _signed(_gathered(batch, images.starts, "<u8"), "before_seq")
    places = batch.having(Flag.BEFORE)
    return _scattered(len(batch), places, seqs[places], pa.int64())


def _before_time(batch: FrameBatch) -> pa.Array:
    images = _images(batch)
    times = _signed(_gathered(batch, images.starts + 8, "<u8"), "before_time")
    return _scattered(len(batch), images.places, times, pa.int64()).cast(_TYPES["timestamp"])


def _before_metadata(batch: FrameBatch) -> pa.Array:
    images = _images(batch)
    images = images.taken(images.value_starts > images.metadata_starts)
    return _maps_at(batch, images.places, images.metadata_starts, images.value_starts)


def _before_value(batch: FrameBatch) -> pa.Array:
    images = _images(batch)
    images = images.taken(~images.is_large)
    return _some_slices(batch, images.places, images.value_starts, images.ends)


def _before_value_length(batch: FrameBatch) -> pa.Array:
    images = _images(batch)
    lengths = images.ends - images.value_starts
    large = np.flatnonzero(images.is_large)
    lengths[large] = _signed(_gathered(batch, images.value_starts[large], "<u8"), "before_value_length")
    return _scattered(len(batch), images.places, lengths, pa.int64())


def _before_value_hash(batch: FrameBatch) -> pa.Array:
    images = _images(batch)
    images = images.taken(images.is_large)
    return _some_slices(batch, images.places, images.value_starts + 8, images.ends)


def _value_hash(batch: FrameBatch) -> pa.Array:
    places = batch.having(Flag.VALUE_REF)
    if not len(places):
        return pa.nulls(len(batch), pa.binary())
    starts = batch.frames.value_starts[places] + 16
    return _some_slices(batch, places, starts, starts + 32)


def _some_slices(
    batch: FrameBatch, places: _Places, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> pa.Array:
    """Slices that few frames have: null for the others."""
    if not len(places):
        return pa.nulls(len(batch), pa.binary())
    all_starts = batch.frames.positions.copy()
    all_starts[places] = starts
    all_ends = all_starts.copy()
    all_ends[places] = ends
    absent = np.ones(len(batch), np.bool_)
    absent[places] = False
    return slices(batch.frames.data, all_starts, all_ends, text=False, absent=absent)


# ---------------------------------------------------------------------------- metadata


def _metadata(batch: FrameBatch) -> pa.Array:
    frames = batch.frames
    places = np.flatnonzero(frames.fixed["metadata_len"])
    return _maps_at(batch, places, frames.metadata_starts[places], frames.value_starts[places])


def _maps_at(
    batch: FrameBatch, places: _Places, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> pa.Array:
    """Maps that some frames have: null for the others."""
    if not len(places):
        return pa.nulls(len(batch), _MAP)
    encoded = slices(batch.frames.data, starts, ends, text=False).dictionary_encode()
    decoded = decode_maps(encoded.dictionary)
    indices = np.zeros(len(batch), np.int32)
    indices[places] = encoded.indices.to_numpy()
    absent = np.ones(len(batch), np.bool_)
    absent[places] = False
    return decoded.take(pa.array(indices, mask=absent))


_MAKERS: dict[str, Callable[[FrameBatch], pa.Array]] = {
    "seq": _of_all("seq", "seq"),
    "kind": _kind,
    "bucket": _bucket,
    "key": _key,
    "metadata": _metadata,
    "value": _value,
    "time": _time,
    "origin": _of_all("origin", "origin"),
    "txn": _of_some("txn", Flag.TXN, 0),
    "kind_code": _of_all("kind_code", "kind"),
    "flags": _of_all("flags", "flags"),
    "refused": _refused,
    "previous": _of_some("previous", Flag.TXN, 8),
    "group_last": _of_some("group_last", Flag.GROUP, 0),
    "session": _of_some("session", Flag.SESSION, 0),
    "request": _of_some("request", Flag.SESSION, 8),
    "request_hash": _request_hash,
    "stream_offset": _of_some("stream_offset", Flag.STREAM_OFFSET, 0),
    "before": _before,
    "before_seq": _before_seq,
    "before_time": _before_time,
    "before_metadata": _before_metadata,
    "before_value": _before_value,
    "before_value_length": _before_value_length,
    "before_value_hash": _before_value_hash,
    "value_length": _value_length,
    "value_seq": _value_seq,
    "value_hash": _value_hash,
    "metadata_bytes": _metadata_bytes,
    "time_us": _of_all("time_us", "time_us"),
    "savepoint": _savepoint,
    "payload": _payload,
    "segment": _segment,
    "position": _position,
    "frame_length": _frame_length,
}
assert _MAKERS.keys() == COLUMNS.keys()
