"""What reads return, and how a version is read out of the frame that made it.

Always true: an `Object` is immutable and holds its own bytes; its `seq` and `time_us` are its version's,
which for a member of a group is the group's last seq.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

from blake3 import blake3

from lowwater.engine.format import format
from lowwater.engine.format.format import FIXED_BYTES, FRAME_BYTES, Flag, Kind
from lowwater.engine.format.page import BUCKET, REFERENCE, TOMBSTONE, UNSTAMPED

_unpack_fixed = format.FIXED.unpack_from
_new = tuple.__new__

# Reads a large value from its place, or makes an `Unread` of it.
PlaceReader = Callable[[bytes], Any]

# Where a large value lies: its frame's segment (that one's first seq) and offset, its length, its BLAKE3.
VALUE_PLACE = Struct("<QI4xQ32s")


class Object(NamedTuple):
    """One version of a key."""

    bucket: str
    key: str
    value: bytes
    metadata: dict[str, str] | None
    seq: int
    time_us: int


class Unread:
    """A stand-in for a large value, for whoever wants to know no more than its size or a part of it."""

    __slots__ = ("_length", "place")

    def __init__(self, place: bytes) -> None:
        self.place = place
        self._length: int = VALUE_PLACE.unpack(place)[2]

    def __len__(self) -> int:
        return self._length


class Head(NamedTuple):
    """An `Object` without its value."""

    bucket: str
    key: str
    size_bytes: int
    metadata: dict[str, str] | None
    seq: int
    time_us: int


class Page(NamedTuple):
    """One page of a listing. Give `next` as `start_after` to continue it; it is None at the end."""

    objects: list[Head]
    prefixes: list[str]
    next: str | None


class Marks(NamedTuple):
    """How far things are, as seqs: `purged ≤ hwm ≤ lwm ≤ durable ≤ applied ≤ committed`."""

    committed: int
    applied: int
    durable: int
    lwm: int
    hwm: int
    purged: int


# A version that is in no page yet: its frame as the log has it. The version's seq stands where the frame's
# does: of a member of a group it is the group's last. Where the value is a large one, the first seq of the
# segment and the offset at which the frame with the value lies follow, else nothing.
# Plain bytes, because there are millions of them: the garbage collector does not look at a dictionary of
# bytes, and they cost less than anything that has fields.
Record = bytes

_PLACE = Struct("<QI")
_HEAD = Struct("<QI4x")
_unpack_seq = format.U64.unpack_from
_unpack_head = _HEAD.unpack_from
_unpack_frame = format.FRAME_FIXED.unpack_from
_FIXED_END = format.FRAME_FIXED_BYTES

# A version on its way into a page: the seq up to which a page that has it may claim to be complete, its own
# seq, time, flags, metadata, value.
PageVersion = tuple[int, int, int, int, bytes, bytes]


def make_record(seq: int, payload: bytes, segment_first: int = 0, offset: int = 0) -> Record:
    """The record of a version with this seq; with a place, where its value is a large one."""
    head = _HEAD.pack(seq, len(payload))
    return head + payload + (_PLACE.pack(segment_first, offset) if segment_first else b"")


def small_record_bytes(inline_bytes_max: int) -> int:
    """Return the size up to which the record of a put without flags and metadata has no place. Its value is
    then not large, whatever its names. A longer record has a place."""
    return _FIXED_END + 2 + inline_bytes_max


def put_record(frame: bytes, small_bytes: int, segment_first: int, offset: int) -> Record:
    """Return the record of a put without flags and metadata. Its frame lies at `offset` in the segment whose
    first seq is `segment_first`."""
    return frame if len(frame) <= small_bytes else frame + _PLACE.pack(segment_first, offset)


def is_mere_put(frame: bytes) -> bool:
    """Whether this is the frame of a put without flags and metadata."""
    return frame[_KIND_AND_FLAGS] == PUT_HEAD and frame[_METADATA_LEN] == b"\0\0"


# Kind and flags, with which its payload begins.
PUT_HEAD = bytes((Kind.PUT, 0, 0))
_KIND_AND_FLAGS = slice(FRAME_BYTES, FRAME_BYTES + 3)
_METADATA_LEN = slice(FRAME_BYTES + 7, FRAME_BYTES + 9)


# Of a frame: kind, flags, and the lengths of bucket, key and metadata.
SHAPE = slice(FRAME_BYTES, FRAME_BYTES + 9)
_unpack_name_sizes = Struct("<HH").unpack_from
_LENGTHS = [bytes([length]) for length in range(256)]


class KeyPlaces(dict[bytes, tuple[bytes, int] | None]):
    """What to take from a frame to make its encoded key, by the frame's shape, of which there are few. For a
    mere put it is what the key begins with, before its names, and where these end in the frame. For all
    others it is None."""

    def __missing__(self, shape: bytes) -> tuple[bytes, int] | None:
        frame = bytes(FRAME_BYTES) + shape
        place = None
        if is_mere_put(frame):
            bucket_len, key_len = _unpack_name_sizes(frame, FRAME_BYTES + 3)
            if bucket_len < len(_LENGTHS):
                place = _LENGTHS[bucket_len], _FIXED_END + bucket_len + key_len
        self[shape] = place
        return place


def seq_of(record: Record) -> int:
    seq: int = _unpack_seq(record)[0]
    return seq


def place_of(record: Record) -> tuple[int, int]:
    """The first seq of the segment and the offset at which the frame with the value lies."""
    assert len(record) == FRAME_BYTES + _unpack_head(record)[1] + _PLACE.size, "a large value has no place"
    segment_first, offset = _PLACE.unpack_from(record, len(record) - _PLACE.size)
    return segment_first, offset


def encoded_key_of(payload: bytes) -> bytes:
    """The key under which a data frame's version is kept: `pages.encode_key` of its names."""
    kind, flags, bucket_len, key_len, _, _, _ = _unpack_fixed(payload)
    start = _names_start(payload, flags)
    if kind == Kind.CREATE_BUCKET or kind == Kind.DELETE_BUCKET:
        return b"\0" + payload[start : start + bucket_len]
    return bytes((bucket_len,)) + payload[start : start + bucket_len + key_len]


def _names_start(payload: bytes, flags: int) -> int:
    if not flags:
        return FIXED_BYTES
    return format.decode_extras(flags, payload, FIXED_BYTES, len(payload))[1]


def is_deletion(record: Record) -> bool:
    kind = record[FRAME_BYTES]
    return kind == Kind.DELETE or kind == Kind.DELETE_BUCKET


def is_transactional(record: Record) -> bool:
    """Whether this is a version of a transaction."""
    return record[_FLAGS_AT] & Flag.TXN != 0


def transaction_of(record: Record) -> int:
    """Return the id of the transaction that wrote a record. It is the first group after the fixed fields."""
    txn: int = _unpack_seq(record, _FIXED_END)[0]
    return txn


_FLAGS_AT = FRAME_BYTES + 1


def _rest_at(record: Record, flags: int, bucket_len: int, key_len: int) -> int:
    """Where the metadata begins."""
    start = _FIXED_END
    if flags:
        _, start = format.decode_extras(flags, record, start, len(record))
    return start + bucket_len + key_len


def object_of(record: Record, bucket: str, key: str, place_reader: PlaceReader) -> Object:
    """A record as reads return it. Not for deletions."""
    seq, length, _, _, flags, bucket_len, key_len, metadata_len, time_us, _ = _unpack_frame(record)
    start = _rest_at(record, flags, bucket_len, key_len)
    metadata = format.decode_metadata(record[start : start + metadata_len]) if metadata_len else None
    value = record[start + metadata_len : FRAME_BYTES + length]
    if flags & Flag.VALUE_REF:
        value_length, _, value_hash = format.VALUE_REF.unpack(value)
        value = place_reader(VALUE_PLACE.pack(*place_of(record), value_length, value_hash))
    return _new(Object, (bucket, key, value, metadata, seq, time_us))


class Columns(NamedTuple):
    """Versions as pages have them."""

    seqs: array[int]
    times: array[int]
    flags: bytearray
    values: list[bytes]


def put_columns(keys: list[bytes], records: list[Record], inline_bytes_max: int) -> Columns:
    """Records of mere puts, as pages hold them."""
    seqs, times = array("Q"), array("Q")
    seqs.frombytes(b"".join(map(_SEQ, records)))
    times.frombytes(b"".join(map(_TIME, records)))
    flags = bytearray(len(records))
    # The length of the bucket's name is in the encoded key, and not in the frame's.
    starts = map((_FIXED_END - 1).__add__, map(len, keys))
    values = [record[start:] for start, record in zip(starts, records, strict=True)]
    if max(map(len, records)) > small_record_bytes(inline_bytes_max):
        small_bytes = small_record_bytes(inline_bytes_max)
        for index, record in enumerate(records):
            if len(record) > small_bytes:
                value = values[index][: -_PLACE.size]
                if len(value) > inline_bytes_max:
                    flags[index] = REFERENCE
                    value = VALUE_PLACE.pack(*place_of(record), len(value), blake3(value).digest())
                values[index] = value
    return Columns(seqs, times, flags, values)


_SEQ = itemgetter(slice(0, 8))
_TIME = itemgetter(slice(FRAME_BYTES + format.TIME_SLICE.start, FRAME_BYTES + format.TIME_SLICE.stop))


def page_version(record: Record, inline_bytes_max: int) -> PageVersion:
    """A record as pages hold it: a large value by its place, a version of a transaction unstamped."""
    seq, length, _, kind, flags, bucket_len, key_len, metadata_len, time_us, _ = _unpack_frame(record)
    unstamped = 0
    if flags & Flag.TXN:
        time_us, unstamped = transaction_of(record), UNSTAMPED
    if kind == Kind.DELETE or kind == Kind.DELETE_BUCKET:
        return (seq, seq, time_us, TOMBSTONE | unstamped, b"", b"")
    start = _rest_at(record, flags, bucket_len, key_len)
    metadata = record[start : start + metadata_len]
    if kind == Kind.CREATE_BUCKET:
        return (seq, seq, time_us, BUCKET, metadata, b"")
    value = record[start + metadata_len : FRAME_BYTES + length]
    if flags & Flag.VALUE_REF:
        value_length, _, value_hash = format.VALUE_REF.unpack(value)
    elif len(value) <= inline_bytes_max:
        return (seq, seq, time_us, unstamped, metadata, value)
    else:
        value_length, value_hash = len(value), blake3(value).digest()
    place = VALUE_PLACE.pack(*place_of(record), value_length, value_hash)
    return (seq, seq, time_us, REFERENCE | unstamped, metadata, place)
