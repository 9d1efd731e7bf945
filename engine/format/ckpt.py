"""The file that describes a checkpoint: what it is of, its lists, its packs, and the control part.

Always true:
  - it is a function of the log alone, so every replica writes the same file under the same name;
  - its name holds its own hash, and it holds the hashes of all that it leads to: who has the name can verify
    every row;
  - magic, version and checksum are three checks, made in that order, with three different errors.

`docs/CHECKPOINT.md` has the byte table for people; a test ties the two. This module knows nothing of files.
"""

from __future__ import annotations

import re
import struct
from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import cbor2
from blake3 import blake3

from lowwater.engine.format import format
from lowwater.engine.format.blocks import (
    HASH_BYTES,
    HINT,
    NO_HASH,
    VERSION_MAJOR,
    VERSION_MINOR,
    cut,
    ends_of,
    hash_of,
    hashes_at,
    numbers_at,
    require,
    require_sizes,
    root_of,
    u32s,
)
from lowwater.engine.seams.checksum import crc32
from lowwater.errors import Corrupt

CKPT_MAGIC = b"LWCKP\r\n\x1a"
PACK_MAGIC = b"LWPAK\r\n\x1a"

HEADER = struct.Struct("<8sHHIQQQQQ32s32s32s16sIIII")
PACK_HEADER = struct.Struct("<8sHH4x")
_CHECKED_AT = 16

assert HEADER.size == 184
assert PACK_HEADER.size == 16

# A pack ends with the block that brings it to this size.
PACK_BYTES = 8 * 2**20

_NAME = re.compile(r"checkpoint-(\d{20})-([0-9a-f]{16})\.ckpt")


def name_of(seq: int, file_hash: bytes) -> str:
    return f"checkpoint-{seq:020}-{file_hash.hex()[:16]}.ckpt"


def parse_name(name: str) -> tuple[int, str] | None:
    """The seq and the beginning of the hash; None for what is called otherwise."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def pack_name(pack_hash: bytes) -> str:
    return f"{pack_hash.hex()}.pack"


def pack_header() -> bytes:
    return PACK_HEADER.pack(PACK_MAGIC, VERSION_MAJOR, VERSION_MINOR)


class ListEntry(NamedTuple):
    """A list of blocks and where it lies, with the locations of its blocks right behind it. `key` is that of
    its first block."""

    key: bytes
    list_hash: bytes
    list_bytes: int
    locations_hash: bytes
    locations_bytes: int
    places_hash: bytes
    pack: bytes
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a `.ckpt` file says."""

    seq: int
    time_us: int
    cluster_id: bytes
    base_seq: int
    base_hash: bytes
    row_count: int
    block_count: int
    lists: list[ListEntry]
    packs: dict[bytes, int]
    """All packs that are needed, with their sizes, in the order in which they are first needed."""
    control: bytes
    """Canonical CBOR: what the state has besides content and places."""

    @property
    def root(self) -> bytes:
        return root_of(entry.list_hash for entry in self.lists)

    @property
    def control_hash(self) -> bytes:
        """The hash of the control part: places of large values are part of it, where blocks lie is not."""
        return hash_of(hash_of(self.control) + b"".join(entry.places_hash for entry in self.lists))

    @property
    def control_body(self) -> dict[str, Any]:
        try:
            body = cbor2.loads(self.control)
        except Exception as error:  # cbor2 raises whatever its decoding of hostile bytes runs into
            raise Corrupt("the control part of a checkpoint is not CBOR", hint=HINT) from error
        if not isinstance(body, dict):
            raise Corrupt("the control part of a checkpoint is not a map", hint=HINT)
        return body


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    lists, packs = checkpoint.lists, checkpoint.packs
    numbers = {pack: number for number, pack in enumerate(packs)}
    keys = [entry.key for entry in lists]
    head = HEADER.pack(
        CKPT_MAGIC,
        VERSION_MAJOR,
        VERSION_MINOR,
        0,
        checkpoint.seq,
        checkpoint.time_us,
        checkpoint.base_seq,
        checkpoint.row_count,
        checkpoint.block_count,
        checkpoint.root,
        checkpoint.control_hash,
        checkpoint.base_hash,
        checkpoint.cluster_id,
        len(lists),
        len(packs),
        sum(map(len, keys)),
        len(checkpoint.control),
    )
    rest = b"".join(
        (
            head[_CHECKED_AT:],
            *(entry.list_hash for entry in lists),
            *(entry.locations_hash for entry in lists),
            *(entry.places_hash for entry in lists),
            u32s(numbers[entry.pack] for entry in lists),
            u32s(entry.offset for entry in lists),
            u32s(entry.list_bytes for entry in lists),
            u32s(entry.locations_bytes for entry in lists),
            ends_of(keys),
            *packs,
            u32s(packs.values()),
            *keys,
            checkpoint.control,
        )
    )
    recognised = head[: _CHECKED_AT - 4]
    return recognised + format.U32.pack(crc32(rest, crc32(recognised))) + rest


def decode_checkpoint(data: bytes) -> Checkpoint:
    require(data, CKPT_MAGIC, "checkpoint", HEADER.size)
    checksum = crc32(memoryview(data)[_CHECKED_AT:], crc32(data[: _CHECKED_AT - 4]))
    if checksum != format.U32.unpack_from(data, _CHECKED_AT - 4)[0]:
        raise Corrupt("a checkpoint's checksum does not match", hint=HINT)
    (
        *_, seq, time_us, base_seq, row_count, block_count, root, control_hash, base_hash, cluster_id,
        list_count, pack_count, key_bytes, control_bytes,
    ) = HEADER.unpack_from(data)  # fmt: skip
    sizes = [HASH_BYTES] * 3 + [4] * 5
    columns = [*accumulate((size * list_count for size in sizes), initial=HEADER.size)]
    packs_at = columns[-1]
    keys_at = packs_at + (HASH_BYTES + 4) * pack_count
    require_sizes(data, keys_at + key_bytes + control_bytes, "checkpoint")
    packs = hashes_at(data, packs_at, pack_count)
    numbers: array[int] = numbers_at("I", data, columns[3], list_count)
    if any(number >= pack_count for number in numbers) or len(set(packs)) != pack_count:
        raise Corrupt("a checkpoint names a pack that it does not have, or one twice", hint=HINT)
    key_ends = numbers_at("I", data, columns[7], list_count)
    keys = cut(data[keys_at : keys_at + key_bytes], key_ends, "checkpoint")
    lists = map(
        ListEntry,
        keys,
        hashes_at(data, columns[0], list_count),
        numbers_at("I", data, columns[5], list_count),
        hashes_at(data, columns[1], list_count),
        numbers_at("I", data, columns[6], list_count),
        hashes_at(data, columns[2], list_count),
        [packs[number] for number in numbers],
        numbers_at("I", data, columns[4], list_count),
    )
    checkpoint = Checkpoint(
        seq=seq,
        time_us=time_us,
        cluster_id=cluster_id,
        base_seq=base_seq,
        base_hash=base_hash,
        row_count=row_count,
        block_count=block_count,
        lists=list(lists),
        packs=dict(
            zip(packs, numbers_at("I", data, packs_at + HASH_BYTES * pack_count, pack_count), strict=True)
        ),
        control=data[keys_at + key_bytes :],
    )
    if checkpoint.root != root or checkpoint.control_hash != control_hash:
        raise Corrupt("a checkpoint's hashes are not those of its parts", hint=HINT)
    if bool(base_seq) != (base_hash != NO_HASH) or base_seq >= seq:
        raise Corrupt("a checkpoint's base cannot be its base", hint=HINT)
    return checkpoint


def decode_named(data: bytes, name: str) -> Checkpoint:
    """The checkpoint of the file with this name."""
    found = parse_name(name)
    checkpoint = decode_checkpoint(data)
    if found is not None and found != (checkpoint.seq, blake3(data).hexdigest()[:16]):
        raise Corrupt("a checkpoint has another seq or hash than its name says", hint=HINT)
    return checkpoint
