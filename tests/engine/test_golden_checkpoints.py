"""The golden checkpoints: what was written once must be written again, and read to the same rows for ever.

Always true: the reader here is written from docs/CHECKPOINT.md and shares no code with the engine.
"""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import cbor2
import pytest
from blake3 import blake3

from lowwater import read_checkpoint
from lowwater.engine.checkpoint.checkpoints import open_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden_checkpoints"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text("utf-8"))


def load_make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_checkpoints_make", GOLDEN / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_same_files_are_written_again() -> None:
    """Whoever has an older checkpoint keeps it as the base of the next."""
    found, expected = load_make().made()
    on_disk = {
        f"{directory}/{path.name}": path.read_bytes()
        for directory in ("checkpoints", "packs")
        for path in (GOLDEN / directory).iterdir()
    }
    assert found == on_disk
    assert expected == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_checkpoints_are_read_to_their_rows(name: str) -> None:
    """By the reader that ships."""
    expected = EXPECTED[name]
    path = str(GOLDEN / "checkpoints" / name)
    rows = []
    for row in read_checkpoint(path):
        found = {
            "bucket": row.bucket, "key": row.key, "seq": row.seq, "time_us": row.time_us,
            "metadata": row.metadata or {},
        }  # fmt: skip
        if row.value is None:
            assert row.value_hash is not None
            found |= {"value_bytes": row.value_bytes, "value_hash": row.value_hash.hex()}
        else:
            found |= {"value": row.value.hex()}
        rows.append(found)
    assert rows == expected["rows"]
    stored = open_checkpoint(path)
    assert (stored.root, stored.seq) == (expected["root"], expected["seq"])
    assert stored.index.time_us == expected["time_us"]
    assert stored.index.control_body == expected["control"]


# ---------------------------------------------------------------------------- the other reader


def numbers(data: bytes, at: int, count: int, code: str) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}{code}", data, at)


def parts(blob: bytes, ends: tuple[int, ...]) -> list[bytes]:
    return [blob[start:end] for start, end in zip((0, *ends), ends, strict=False)]


def hashes(data: bytes, at: int, count: int) -> list[bytes]:
    return [data[at + 32 * number : at + 32 * number + 32] for number in range(count)]


def packed(pack: bytes, offset: int, size: int, expected: bytes) -> bytes:
    data = (GOLDEN / "packs" / f"{pack.hex()}.pack").read_bytes()
    assert blake3(data).digest() == pack
    found = data[offset : offset + size]
    assert blake3(found).digest() == expected
    return found


def read_independently(name: str) -> tuple[str, Any, list[dict[str, Any]]]:
    """The root, the control map and the rows."""
    data = (GOLDEN / "checkpoints" / name).read_bytes()
    assert name.endswith(f"-{blake3(data).hexdigest()[:16]}.ckpt")
    (checksum,) = struct.unpack_from("<I", data, 12)
    assert crc32(data[:12] + data[16:]) == checksum
    root, control_hash = data[56:88], data[88:120]
    list_count, pack_count, key_bytes, control_bytes = struct.unpack_from("<4I", data, 168)
    list_hashes = hashes(data, 184, list_count)
    locations_hashes = hashes(data, 184 + 32 * list_count, list_count)
    places_hashes = hashes(data, 184 + 64 * list_count, list_count)
    at = 184 + 96 * list_count
    columns = [numbers(data, at + 4 * list_count * number, list_count, "I") for number in range(5)]
    packs = hashes(data, at + 20 * list_count, pack_count)
    assert len(data) == at + 20 * list_count + 36 * pack_count + key_bytes + control_bytes
    control = data[len(data) - control_bytes :]
    assert blake3(b"".join(list_hashes)).digest() == root
    assert blake3(blake3(control).digest() + b"".join(places_hashes)).digest() == control_hash
    rows: list[dict[str, Any]] = []
    for number in range(list_count):
        pack, offset, size, located, _ = (column[number] for column in columns)
        listed = packed(packs[pack], offset, size, list_hashes[number])
        locations = packed(packs[pack], offset + size, located, locations_hashes[number])
        for block, places_hash in blocks_of(listed, locations):
            assert bool(any(places_hash)) == any("value_hash" in row for row in block)
            rows += block
    return root.hex(), cbor2.loads(control), rows


def blocks_of(listed: bytes, locations: bytes) -> Iterator[tuple[list[dict[str, Any]], bytes]]:
    count, pack_count = struct.unpack_from("<II", locations, 12)
    assert struct.unpack_from("<I", listed, 12) == (count,)
    packs = hashes(locations, 24, pack_count)
    places_hashes = hashes(locations, 24 + 32 * pack_count, count)
    at = 24 + 32 * (pack_count + count)
    where = [numbers(locations, at + 4 * count * number, count, "I") for number in range(3)]
    block_hashes = hashes(listed, 24, count)
    row_counts = numbers(listed, 24 + 32 * count, count, "I")
    sizes = numbers(listed, 24 + 36 * count, count, "I")
    keys = parts(listed[24 + 44 * count :], numbers(listed, 24 + 40 * count, count, "I"))
    for number in range(count):
        pack, offset, places_bytes = (column[number] for column in where)
        block = packed(packs[pack], offset, sizes[number], block_hashes[number])
        if places_bytes:
            places = packed(packs[pack], offset + sizes[number], places_bytes, places_hashes[number])
            assert struct.unpack_from("<I", places, 12) == ((places_bytes - 16) // 12,)
        rows, first_key = rows_of(block)
        assert len(rows) == row_counts[number]
        assert keys[number] == first_key[:500]
        yield rows, places_hashes[number]


def rows_of(block: bytes) -> tuple[list[dict[str, Any]], bytes]:
    count, key_bytes, metadata_bytes, value_bytes = struct.unpack_from("<4I", block, 12)
    seqs, times = numbers(block, 32, count, "Q"), numbers(block, 32 + 8 * count, count, "Q")
    at = 32 + 16 * count
    ends = []
    for is_there in (True, bool(metadata_bytes), True):
        ends.append(numbers(block, at, count, "I") if is_there else (0,) * count)
        at += 4 * count * is_there
    flags = block[at : at + count]
    at += count
    assert len(block) == at + key_bytes + metadata_bytes + value_bytes
    keys = parts(block[at : at + key_bytes], ends[0])
    metadata = parts(block[at + key_bytes : at + key_bytes + metadata_bytes], ends[1])
    values = parts(block[at + key_bytes + metadata_bytes :], ends[2])
    rows = []
    for number, key in enumerate(keys):
        row: dict[str, Any] = {
            "bucket": key[1 : 1 + key[0]].decode(),
            "key": key[1 + key[0] :].decode(),
            "seq": seqs[number],
            "time_us": times[number],
            "metadata": cbor2.loads(metadata[number]) if metadata[number] else {},
        }
        if flags[number] & 2:
            (length,) = struct.unpack_from("<Q", values[number])
            row |= {"value_bytes": length, "value_hash": values[number][8:].hex()}
        else:
            row["value"] = values[number].hex()
        assert bool(flags[number] & 4) == (not key[0])
        rows.append(row)
    return rows, keys[0]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_reader_that_was_written_from_the_document_finds_the_same(name: str) -> None:
    """The document is enough."""
    expected = EXPECTED[name]
    assert read_independently(name) == (expected["root"], expected["control"], expected["rows"])
