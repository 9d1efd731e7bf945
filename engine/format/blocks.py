"""The bytes of a checkpoint's blocks: rows, places of large values, lists of blocks, and where blocks lie.

Always true:
  - equal rows give equal bytes: an encoder has no freedom, and nothing here depends on pages, packs or time;
  - a block is known by its hash, and is decoded only against it: magic, version and hash are three checks,
    made in that order, with three different errors;
  - rows and lists are content: the root is over them. Places and locations are not: where a large value, or a
    block, lies may differ where the content is the same.

`docs/CHECKPOINT.md` has the byte tables for people; a test ties the two. This module knows nothing of files.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress
from typing import Any, NamedTuple, TypeVar

from blake3 import blake3

from lowwater.engine.format.page import BUCKET, REFERENCE
from lowwater.errors import Corrupt, NewerVersion, NotLowwater

T = TypeVar("T", bound=tuple[Any, ...])

VERSION_MAJOR = 1
VERSION_MINOR = 0
ROWS_MAGIC = b"LWBLK\r\n\x1a"
PLACES_MAGIC = b"LWPLC\r\n\x1a"
LIST_MAGIC = b"LWLST\r\n\x1a"
LOCATIONS_MAGIC = b"LWLOC\r\n\x1a"

# What all of them begin with.
RECOGNISED = struct.Struct("<8sHH")
ROWS = struct.Struct("<8sHHIIII4x")
PLACES = struct.Struct("<8sHHI")
LIST = struct.Struct("<8sHHII4x")
LOCATIONS = struct.Struct("<8sHHII4x")
# Of a large value: its length, its BLAKE3.
LARGE = struct.Struct("<Q32s")

HASH_BYTES = 32
NO_HASH = bytes(HASH_BYTES)
FLAGS_KNOWN = REFERENCE | BUCKET

assert ROWS.size == 32
assert PLACES.size == 16
assert LIST.size == LOCATIONS.size == 24
assert LARGE.size == 40

HINT = "this checkpoint cannot be trusted: make another one from the database, or go back to an older one"


def hash_of(data: bytes) -> bytes:
    return blake3(data).digest()


def require(data: bytes, magic: bytes, what: str, size: int) -> None:
    """Raise unless `data` is a `what` of a version that is known here."""
    if data[: len(magic)] != magic:
        raise NotLowwater(f"there is no {what} here", hint="check the path")
    if len(data) < max(size, RECOGNISED.size):
        raise Corrupt(f"a {what} is cut short: {len(data)} of at least {size} bytes", hint=HINT)
    _, major, minor = RECOGNISED.unpack_from(data)
    if (major, minor) > (VERSION_MAJOR, VERSION_MINOR):
        raise NewerVersion(
            f"this {what} has format version {major}.{minor}; "
            f"this Lowwater reads up to {VERSION_MAJOR}.{VERSION_MINOR}"
        )
    if (major, minor) < (VERSION_MAJOR, VERSION_MINOR):
        raise Corrupt(f"a {what} has format version {major}.{minor}, which never existed", hint=HINT)


def _verify(data: bytes, magic: bytes, what: str, size: int, expected: bytes) -> None:
    require(data, magic, what, size)
    if hash_of(data) != expected:
        raise Corrupt(f"the hash of a {what} does not match", hint=HINT)


def require_sizes(data: bytes, size: int, what: str) -> None:
    if size != len(data):
        raise Corrupt(f"the counts of a {what} do not add up to its size", hint=HINT)


# ---------------------------------------------------------------------------- columns


def u32s(numbers: Iterable[int]) -> bytes:
    # From a list, because an array grows by single items from anything else.
    return array("I", [*numbers]).tobytes()


def ends_of(parts: Sequence[bytes]) -> bytes:
    return array("I", [*accumulate(map(len, parts))]).tobytes()


def numbers_at(code: str, data: bytes, at: int, count: int) -> array[int]:
    numbers: array[int] = array(code)
    numbers.frombytes(data[at : at + numbers.itemsize * count])
    return numbers


def cut(blob: bytes, ends: array[int], what: str) -> list[bytes]:
    start = 0
    parts = [blob[start : (start := end)] for end in ends]
    if b"".join(parts) != blob:
        raise Corrupt(f"the parts of a {what} do not follow each other", hint=HINT)
    return parts


def hashes_at(data: bytes, at: int, count: int) -> list[bytes]:
    return [data[start : start + HASH_BYTES] for start in range(at, at + HASH_BYTES * count, HASH_BYTES)]


# ---------------------------------------------------------------------------- rows


@dataclass(slots=True)
class Rows:
    """Live keys in order, each with one version, as columns. The value of a large one (flag `REFERENCE`) is
    `LARGE`; its place is no content."""

    keys: list[bytes]
    seqs: array[int]
    times: array[int]
    flags: bytes
    metadata: list[bytes]
    values: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.keys)


def rows_body(rows: Rows) -> bytes:
    """All of a block of rows but its header. A page in which each key has one version, none of them deleted
    and none large, stores its columns in this order too."""
    metadata = b"".join(rows.metadata)
    return b"".join(
        (
            rows.seqs.tobytes(),
            rows.times.tobytes(),
            ends_of(rows.keys),
            ends_of(rows.metadata) if metadata else b"",
            ends_of(rows.values),
            rows.flags,
            *rows.keys,
            metadata,
            *rows.values,
        )
    )


def rows_block(row_count: int, key_bytes: int, metadata_bytes: int, value_bytes: int, body: bytes) -> bytes:
    assert row_count, "a block has rows"
    head = ROWS.pack(
        ROWS_MAGIC, VERSION_MAJOR, VERSION_MINOR, row_count, key_bytes, metadata_bytes, value_bytes
    )
    return head + body


def encode_rows(rows: Rows) -> bytes:
    assert len(rows.keys) == len(rows.seqs) == len(rows.times) == len(rows.flags) == len(rows.values)
    return rows_block(
        len(rows),
        sum(map(len, rows.keys)),
        sum(map(len, rows.metadata)),
        sum(map(len, rows.values)),
        rows_body(rows),
    )


def decode_rows(data: bytes, expected: bytes) -> Rows:
    """The rows of the block with the hash `expected`."""
    _verify(data, ROWS_MAGIC, "block of rows", ROWS.size, expected)
    _, _, _, count, key_bytes, metadata_bytes, value_bytes = ROWS.unpack_from(data)
    key_ends_at = ROWS.size + 16 * count
    metadata_ends_at = key_ends_at + 4 * count
    value_ends_at = metadata_ends_at + (4 * count if metadata_bytes else 0)
    flags_at = value_ends_at + 4 * count
    keys_at = flags_at + count
    metadata_at = keys_at + key_bytes
    values_at = metadata_at + metadata_bytes
    require_sizes(data, values_at + value_bytes, "block of rows")
    flags = data[flags_at:keys_at]
    if any(flag & ~FLAGS_KNOWN for flag in flags):
        raise NewerVersion("a block has row flags that are not known to this version")
    metadata = [b""] * count
    if metadata_bytes:
        ends = numbers_at("I", data, metadata_ends_at, count)
        metadata = cut(data[metadata_at:values_at], ends, "block of rows")
    rows = Rows(
        cut(data[keys_at:metadata_at], numbers_at("I", data, key_ends_at, count), "block of rows"),
        numbers_at("Q", data, ROWS.size, count),
        numbers_at("Q", data, ROWS.size + 8 * count, count),
        flags,
        metadata,
        cut(data[values_at:], numbers_at("I", data, value_ends_at, count), "block of rows"),
    )
    if any(map(bytes.__ge__, rows.keys, rows.keys[1:])):
        raise Corrupt("the keys of a block are out of order", hint=HINT)
    large = [flag & REFERENCE for flag in flags]
    if any(len(value) != LARGE.size for value in compress(rows.values, large)):
        raise Corrupt("a large value in a block has a description of the wrong size", hint=HINT)
    return rows


# ---------------------------------------------------------------------------- places

Place = tuple[int, int]
"""The first seq of the segment, and the offset, of the frame that holds a large value."""


def encode_places(places: Sequence[Place]) -> bytes:
    """Where the large values of a block lie, in the order of its rows."""
    assert places, "a block without large values has no places"
    head = PLACES.pack(PLACES_MAGIC, VERSION_MAJOR, VERSION_MINOR, len(places))
    segments = array("Q", [segment_first for segment_first, _ in places]).tobytes()
    return head + segments + u32s(offset for _, offset in places)


def decode_places(data: bytes, expected: bytes) -> list[Place]:
    _verify(data, PLACES_MAGIC, "block of places", PLACES.size, expected)
    count = PLACES.unpack_from(data)[3]
    require_sizes(data, PLACES.size + 12 * count, "block of places")
    segments = numbers_at("Q", data, PLACES.size, count)
    offsets = numbers_at("I", data, PLACES.size + 8 * count, count)
    return list(zip(segments, offsets, strict=True))


# ---------------------------------------------------------------------------- lists


class Listed(NamedTuple):
    """A block of rows in a list. `key` is the first 500 bytes of its first key."""

    key: bytes
    block_hash: bytes
    row_count: int
    block_bytes: int


def encode_list(blocks: Sequence[Listed]) -> bytes:
    assert blocks, "a list has blocks"
    keys = [block.key for block in blocks]
    key_blob = b"".join(keys)
    return b"".join(
        (
            LIST.pack(LIST_MAGIC, VERSION_MAJOR, VERSION_MINOR, len(blocks), len(key_blob)),
            *(block.block_hash for block in blocks),
            u32s(block.row_count for block in blocks),
            u32s(block.block_bytes for block in blocks),
            ends_of(keys),
            key_blob,
        )
    )


ListColumns = tuple[list[bytes], list[bytes], "array[int]", "array[int]"]
"""What lists of blocks say, a column each: keys, hashes, numbers of rows, and sizes."""


def list_columns(data: bytes, expected: bytes) -> ListColumns:
    _verify(data, LIST_MAGIC, "list of blocks", LIST.size, expected)
    count, key_bytes = LIST.unpack_from(data)[3:]
    rows_at = LIST.size + HASH_BYTES * count
    keys_at = rows_at + 12 * count
    require_sizes(data, keys_at + key_bytes, "list of blocks")
    return (
        cut(data[keys_at:], numbers_at("I", data, rows_at + 8 * count, count), "list of blocks"),
        hashes_at(data, LIST.size, count),
        numbers_at("I", data, rows_at, count),
        numbers_at("I", data, rows_at + 4 * count, count),
    )


def made_of(kind: type[T], *columns: Iterable[Any]) -> list[T]:
    """`[kind(*row) for row in zip(*columns)]` of a named tuple, in a third of the time."""
    return list(map(partial(tuple.__new__, kind), zip(*columns, strict=True)))


def root_of(list_hashes: Iterable[bytes]) -> bytes:
    """The root over the lists of blocks, in order."""
    return hash_of(b"".join(list_hashes))


# ---------------------------------------------------------------------------- locations


class Location(NamedTuple):
    """Where a block lies: its pack, by hash, and the offset in it. Its places, where it has large values, lie
    right behind it."""

    pack: bytes
    offset: int
    places_hash: bytes = NO_HASH
    places_bytes: int = 0


def encode_locations(locations: Sequence[Location]) -> bytes:
    """Where the blocks of a list lie, in its order."""
    packs = list(dict.fromkeys(location.pack for location in locations))
    numbers = {pack: number for number, pack in enumerate(packs)}
    return b"".join(
        (
            LOCATIONS.pack(LOCATIONS_MAGIC, VERSION_MAJOR, VERSION_MINOR, len(locations), len(packs)),
            *packs,
            *(location.places_hash for location in locations),
            u32s(numbers[location.pack] for location in locations),
            u32s(location.offset for location in locations),
            u32s(location.places_bytes for location in locations),
        )
    )


LocationColumns = tuple[list[bytes], "array[int]", list[bytes], "array[int]"]
"""Where blocks lie, a column each, as in a `Location`."""


def location_columns(data: bytes, expected: bytes) -> LocationColumns:
    _verify(data, LOCATIONS_MAGIC, "list of locations", LOCATIONS.size, expected)
    count, pack_count = LOCATIONS.unpack_from(data)[3:]
    places_at = LOCATIONS.size + HASH_BYTES * pack_count
    numbers_begin = places_at + HASH_BYTES * count
    require_sizes(data, numbers_begin + 12 * count, "list of locations")
    packs = hashes_at(data, LOCATIONS.size, pack_count)
    numbers = numbers_at("I", data, numbers_begin, count)
    if max(numbers, default=-1) >= pack_count:
        raise Corrupt("a list of locations names a pack that it does not have", hint=HINT)
    return (
        [packs[number] for number in numbers],
        numbers_at("I", data, numbers_begin + 4 * count, count),
        hashes_at(data, places_at, count),
        numbers_at("I", data, numbers_begin + 8 * count, count),
    )


KnownColumns = tuple[ListColumns, LocationColumns]
"""Blocks, and where they lie."""


def places_hash_of(locations: Sequence[Location]) -> bytes:
    """What the control part's hash is over, of each list: the places, and not where blocks lie."""
    return hash_of(b"".join(location.places_hash for location in locations))
