"""References: what stands in the page store in the place of a page whose content is a block of a checkpoint.

Always true:
  - under a page's key the store has the page or a reference, and never both: one takes the place of the other
    in one transaction, so neither is ever missing, and there is nothing to compare;
  - a page that comes back from its block is that page: the same rows, the same places of large values, the
    same seq. What it was before it left can only have had more in versions that nobody could read any more;
  - a block is taken only when its hash is the one that the reference has.

`docs/PAGES.md` has the byte table for people; a test ties the two. This module knows nothing of files.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from lowwater.engine.format import format
from lowwater.engine.format.blocks import (
    HASH_BYTES,
    LARGE,
    NO_HASH,
    KnownColumns,
    Listed,
    Location,
    Place,
    Rows,
    decode_places,
    decode_rows,
    encode_places,
    encode_rows,
    hash_of,
)
from lowwater.engine.format.ckpt import pack_name
from lowwater.engine.format.keys import page_key
from lowwater.engine.format.page import BUCKET, REFERENCE, DataPage, encode_page, stored_page
from lowwater.engine.format.records import VALUE_PLACE
from lowwater.engine.seams.checksum import crc32
from lowwater.errors import Corrupt, DataError, NewerVersion

VERSION_MAJOR = 1
VERSION_MINOR = 0
MAGIC = b"LWREF\r\n\x1a"

# Two parts, as of a page: the checksum between them covers what is before and after it, and the page's key.
RECOGNISED = struct.Struct("<8sHH")
COVERED = struct.Struct("<QQ32s32s32sIIII")
REFERENCE_BYTES = RECOGNISED.size + format.U32.size + COVERED.size
_COVERED_AT = RECOGNISED.size + format.U32.size
_RECOGNISED = RECOGNISED.pack(MAGIC, VERSION_MAJOR, VERSION_MINOR)
_LIVE_BYTES = bytes([0, REFERENCE, BUCKET])

assert REFERENCE_BYTES == 144

HINT = "the archive has what this stands for: restore this node, or build its pages again from the whole log"


class Reference(NamedTuple):
    """Where the content of a page lies. Right behind its block lie the places of its large values."""

    page_seq: int
    """The page holds every frame up to it for its keys."""
    checkpoint_seq: int
    """The block is the content of these keys as of this seq, and as of any later one up to which no change
    lies in memory."""
    block_hash: bytes
    pack: bytes
    places_hash: bytes
    offset: int
    block_bytes: int
    places_bytes: int
    row_count: int

    @property
    def size_bytes(self) -> int:
        """How many bytes are read to have it."""
        return self.block_bytes + self.places_bytes

    def listed(self, key: bytes) -> Listed:
        """The block as lists have it."""
        return Listed(key, self.block_hash, self.row_count, self.block_bytes)


def reference_to(listed: Listed, location: Location, *, page_seq: int, checkpoint_seq: int) -> Reference:
    return Reference(
        page_seq,
        checkpoint_seq,
        listed.block_hash,
        location.pack,
        location.places_hash,
        location.offset,
        listed.block_bytes,
        location.places_bytes,
        listed.row_count,
    )


def encode_reference(reference: Reference, key: bytes) -> bytes:
    """The bytes of the reference that stands under the page key `key`."""
    covered = COVERED.pack(*reference)
    return b"".join((_RECOGNISED, format.U32.pack(_checksum(covered, key)), covered))


def encode_references(blocks: KnownColumns, page_seq: int, checkpoint_seq: int) -> list[bytes]:
    """The references to these blocks, each under its own key, in a third of the time: a restore makes all of
    them before the first read."""
    (keys, block_hashes, row_counts, block_bytes), (packs, offsets, places_hashes, places_bytes) = blocks
    covered = [
        *map(
            COVERED.pack,
            repeat(page_seq),
            repeat(checkpoint_seq),
            block_hashes,
            packs,
            places_hashes,
            offsets,
            block_bytes,
            places_bytes,
            row_counts,
        )
    ]
    checksums = map(format.U32.pack, map(_checksum, covered, keys))
    return list(map(b"".join, zip(repeat(_RECOGNISED), checksums, covered)))


def is_reference(data: bytes) -> bool:
    """Whether what lies under a page's key is a reference, and not the page."""
    return data.startswith(MAGIC)


def decode_reference(data: bytes, key: bytes) -> Reference:
    """The reference that stands under the page key `key`. Its magic was compared: `is_reference`."""
    assert is_reference(data)
    if data[: len(_RECOGNISED)] > _RECOGNISED:
        raise NewerVersion("a reference has a format version that is not known to this Lowwater")
    if len(data) != REFERENCE_BYTES or data[: len(_RECOGNISED)] != _RECOGNISED:
        raise Corrupt("a reference in the place of a page is damaged", hint=HINT)
    covered = data[_COVERED_AT:]
    if _checksum(covered, key) != format.U32.unpack_from(data, RECOGNISED.size)[0]:
        raise Corrupt("a reference's checksum does not match, or it lies under another page's key", hint=HINT)
    reference = Reference(*COVERED.unpack(covered))
    assert len(reference.pack) == HASH_BYTES
    return reference


def _checksum(covered: bytes, key: bytes) -> int:
    return crc32(covered, crc32(_RECOGNISED, crc32(key)))


# ---------------------------------------------------------------------------- pages and blocks


def as_content(flags: bytes | bytearray, values: Sequence[bytes]) -> tuple[Sequence[bytes], list[Place]]:
    """Values of a page as blocks have them, and the places of the large ones."""
    places: list[Place] = []
    if any(flag & REFERENCE for flag in flags):
        values = list(values)
        for number, flag in enumerate(flags):
            if flag & REFERENCE:
                segment_first, offset, length, value_hash = VALUE_PLACE.unpack(values[number])
                values[number] = LARGE.pack(length, value_hash)
                places.append((segment_first, offset))
    return values, places


def is_block(page: DataPage, listed: Listed, location: Location) -> bool:
    """Whether a page is this very block and nothing else: each row, and each place of a large value."""
    flags = bytes(page.flags)
    keys = page.keys
    if len(page) != listed.row_count or flags.translate(None, _LIVE_BYTES) or len(set(keys)) != len(keys):
        return False
    values, places = as_content(flags, page.values)
    data = encode_rows(Rows(keys, page.seqs, page.times, flags, page.metadata, values))
    places_hash = hash_of(encode_places(places)) if places else NO_HASH
    return hash_of(data) == listed.block_hash and places_hash == location.places_hash


def page_of_block(reference: Reference, key: bytes, data: bytes) -> DataPage:
    """The page under the page key `key`, of what was read where its reference says. Nothing of that is
    trusted: a block that is not the one is named."""
    try:
        rows = decode_rows(data[: reference.block_bytes], reference.block_hash)
        values = list(rows.values)
        large = [number for number, flag in enumerate(rows.flags) if flag & REFERENCE]
        places: list[Place] = []
        if reference.places_hash != NO_HASH:
            places = decode_places(data[reference.block_bytes :], reference.places_hash)
        if len(places) != len(large):
            raise Corrupt("a block has other places than large values")
    except DataError as error:
        raise Corrupt(
            f"a block that a page was given up for cannot be used: {error.message}",
            path=f"packs/{pack_name(reference.pack)}",
            seq=reference.checkpoint_seq,
            offset=reference.offset,
            hint="look for the pack in the archive with `lowwater scrub`; other pages can be read",
        ) from error
    for number, (segment_first, offset) in zip(large, places, strict=True):
        values[number] = VALUE_PLACE.pack(segment_first, offset, *LARGE.unpack(values[number]))
    if page_key(rows.keys[0]) != key:
        raise Corrupt("a reference leads to the block of another page", hint=HINT)
    page = DataPage(
        reference.page_seq, rows.keys, rows.seqs, rows.times, bytearray(rows.flags), rows.metadata, values
    )
    return stored_page(encode_page(page, key))
