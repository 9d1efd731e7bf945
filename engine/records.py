"""What reads return, and how a version is read out of the frame that made it.

Always true: an `Object` is immutable and holds its own bytes; its `seq` and `time_us` are its version's,
which for a member of a group is the group's last seq.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import NamedTuple

from blake3 import blake3

from lowwater.engine import format
from lowwater.engine.format import FIXED_BYTES, Flag, Kind
from lowwater.engine.pages import BUCKET, REFERENCE, TOMBSTONE

_unpack_fixed = format.FIXED.unpack_from
_new = tuple.__new__

# Reads a large value from its place.
PlaceReader = Callable[[bytes], bytes]

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


class Head(NamedTuple):
    """An `Object` without its value."""

    bucket: str
    key: str
    size_bytes: int
    metadata: dict[str, str] | None
    seq: int
    time_us: int


class Page(NamedTuple):
    """One page of a listing. `next` continues it: give it as `start_after`; None at the end."""

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


# A version that is in no page yet: its seq, its frame's payload, and the first seq of
# the segment and the offset at which the frame with its value lies, 0 where the value is small. A plain
# tuple: the garbage collector soon leaves those alone, and there are millions of them.
Record = tuple[int, bytes, int, int]

# A version on its way into a page: the seq up to which a page that has it may claim to be complete, its own
# seq, time, flags, metadata, value.
PageVersion = tuple[int, int, int, int, bytes, bytes]


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


def is_deletion(payload: bytes) -> bool:
    return payload[0] == Kind.DELETE or payload[0] == Kind.DELETE_BUCKET


def object_of(record: Record, bucket: str, key: str, place_reader: PlaceReader) -> Object:
    """A record as reads return it. Not for deletions."""
    seq, payload, segment_first, offset = record
    _, flags, bucket_len, key_len, metadata_len, time_us, _ = _unpack_fixed(payload)
    start = (FIXED_BYTES if not flags else _names_start(payload, flags)) + bucket_len + key_len
    metadata = format.decode_metadata(payload[start : start + metadata_len]) if metadata_len else None
    value = payload[start + metadata_len :]
    if flags & Flag.VALUE_REF:
        length, _, value_hash = format.VALUE_REF.unpack(value)
        value = place_reader(VALUE_PLACE.pack(segment_first, offset, length, value_hash))
    return _new(Object, (bucket, key, value, metadata, seq, time_us))


def page_version(record: Record, inline_bytes_max: int) -> PageVersion:
    """A record as pages hold it: a large value by its place."""
    seq, payload, segment_first, offset = record
    kind, flags, bucket_len, key_len, metadata_len, time_us, _ = _unpack_fixed(payload)
    if kind == Kind.DELETE or kind == Kind.DELETE_BUCKET:
        return (seq, seq, time_us, TOMBSTONE, b"", b"")
    start = (FIXED_BYTES if not flags else _names_start(payload, flags)) + bucket_len + key_len
    metadata = payload[start : start + metadata_len]
    if kind == Kind.CREATE_BUCKET:
        return (seq, seq, time_us, BUCKET, metadata, b"")
    value = payload[start + metadata_len :]
    if flags & Flag.VALUE_REF:
        length, _, value_hash = format.VALUE_REF.unpack(value)
    elif len(value) <= inline_bytes_max:
        return (seq, seq, time_us, 0, metadata, value)
    else:
        length, value_hash = len(value), blake3(value).digest()
    assert segment_first, "a large value has no place in the log"
    return (
        seq,
        seq,
        time_us,
        REFERENCE,
        metadata,
        VALUE_PLACE.pack(segment_first, offset, length, value_hash),
    )
