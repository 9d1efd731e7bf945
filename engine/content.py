"""The content of the state as of a seq, cut into blocks, and its root.

Always true:
  - the root depends on the buckets and the newest version of each live key and on nothing else: not on pages,
    dropped versions, tombstones, flushes, or the place of a large value;
  - a block begins at a key that is a boundary, a list of blocks at a rarer one (256 times), so blocks without
    a change stay the same blocks.

| a row of a block | |
|---|---|
| 2 | length of the encoded key |
| 8 | seq |
| 8 | time_us |
| 1 | flags: 2 large value, 4 bucket |
| 4 | length of the metadata |
| 8 | length of the value |
| … | encoded key, metadata (canonical CBOR), the value, or for a large one its BLAKE3 |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct

from blake3 import blake3

from lowwater.engine import format
from lowwater.engine.pages import BUCKET, REFERENCE, Boundaries
from lowwater.engine.records import Object

ROW = Struct("<HQQBIQ")
# Every how many blocks, on average, a list of blocks ends.
LIST_BLOCKS = 256


def rows(objects: Iterable[tuple[bytes, Object]], inline_bytes_max: int) -> Iterator[tuple[bytes, bytes]]:
    """Encoded keys with their rows."""
    for key, found in objects:
        metadata = format.encode_metadata(found.metadata)
        value = found.value
        flags = BUCKET if key[0] == 0 else 0
        stored = value
        if len(value) > inline_bytes_max:
            flags |= REFERENCE
            stored = blake3(value).digest()
        head = ROW.pack(len(key), found.seq, found.time_us, flags, len(metadata), len(value))
        yield key, head + key + metadata + stored


def root(
    objects: Iterable[tuple[bytes, Object]],
    *,
    boundaries: Boundaries,
    lists: Boundaries,
    inline_bytes_max: int,
) -> str:
    """The root over all live keys, in order. `lists` says which keys begin a list of blocks."""
    list_hashes: list[bytes] = []
    block_hashes: list[bytes] = []
    block: list[bytes] = []
    for key, row in rows(objects, inline_bytes_max):
        if block and boundaries.is_boundary(key):
            block_hashes.append(blake3(b"".join(block)).digest())
            block = []
            if lists.is_boundary(key):
                list_hashes.append(blake3(b"".join(block_hashes)).digest())
                block_hashes = []
        block.append(row)
    if block:
        block_hashes.append(blake3(b"".join(block)).digest())
    list_hashes.append(blake3(b"".join(block_hashes)).digest())
    return blake3(b"".join(list_hashes)).hexdigest()
