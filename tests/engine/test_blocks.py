"""docs/CHECKPOINT.md says what engine/format/blocks.py and ckpt.py do; what is decoded is what was encoded,
and nothing that was changed is decoded."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from lowwater.engine.format import blocks, ckpt
from lowwater.engine.format.blocks import (
    LARGE,
    NO_HASH,
    Listed,
    Location,
    Rows,
    decode_places,
    decode_rows,
    encode_list,
    encode_locations,
    encode_places,
    encode_rows,
    hash_of,
    list_columns,
    location_columns,
    made_of,
)
from lowwater.engine.format.ckpt import (
    Checkpoint,
    ListEntry,
    decode_checkpoint,
    decode_named,
    encode_checkpoint,
    name_of,
)
from lowwater.engine.format.page import BUCKET, REFERENCE
from lowwater.errors import Corrupt, LowwaterError, NewerVersion, NotLowwater

CHECKPOINT_MD = Path(__file__).parent.parent.parent / "docs" / "CHECKPOINT.md"
CODES = {"u8": (1, "B"), "u16": (2, "H"), "u32": (4, "I"), "u64": (8, "Q")}
HEADERS = {
    "Rows header": (blocks.ROWS, blocks.ROWS_MAGIC),
    "List header": (blocks.LIST, blocks.LIST_MAGIC),
    "Places header": (blocks.PLACES, blocks.PLACES_MAGIC),
    "Locations header": (blocks.LOCATIONS, blocks.LOCATIONS_MAGIC),
    "Pack header": (ckpt.PACK_HEADER, ckpt.PACK_MAGIC),
    "Index header": (ckpt.HEADER, ckpt.CKPT_MAGIC),
}


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    document = CHECKPOINT_MD.read_text(encoding="utf-8")
    _, found, rest = document.partition(f"# {heading}\n")
    assert found, f"docs/CHECKPOINT.md has no heading {heading!r}"
    lines = rest[rest.index("\n|") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("heading", HEADERS)
def test_the_document_has_the_headers_of_the_code(heading: str) -> None:
    """Readers in other languages are written from it."""
    layout, magic = HEADERS[heading]
    position, found, names = 0, "<", []
    for offset, size, kind, name, _why in table(heading):
        base, _, count = kind.partition(" ")
        expected, code = (
            CODES[base] if base in CODES else (int(count), count + {"bytes": "s", "zero": "x"}[base])
        )
        assert (int(offset), int(size)) == (position, expected), name or kind
        found += code
        position += expected
        names.append(name)
    assert (struct.Struct(found).format, position) == (layout.format, layout.size)
    assert bytes.fromhex(table(heading)[0][4].strip("`")) == magic
    assert names[:3] == ["magic", "version_major", "version_minor"]


def sizes(heading: str, **counts: int) -> int:
    """What the parts of a table add up to."""
    total = 0
    for _, size, note in table(heading):
        if "Not there when `metadata_bytes` = 0" in note and not counts["metadata_bytes"]:
            continue
        factors = [part.strip().strip("`") for part in size.split("×")]
        product = 1
        for factor in factors:
            product *= int(factor) if factor.isdigit() else counts[factor]
        total += product
    return total


ROWS = Rows(
    [b"\0b", b"\1bk", b"\1bl"],
    array("Q", [2, 7, 9]),
    array("Q", [50, 60, 60]),
    bytes([BUCKET, 0, REFERENCE]),
    [b"", b"\xa1\x61m\x61n", b""],
    [b"", b"value", LARGE.pack(5000, blake3(bytes(5000)).digest())],
)
LISTED = [Listed(b"\0b", b"h" * 32, 3, 200), Listed(b"\1bz", b"i" * 32, 1, 80)]
LOCATIONS = [Location(b"p" * 32, 16, b"q" * 32, 28), Location(b"r" * 32, 16)]
PLACES = [(1, 128), (2**63, 2**32 - 1)]


def index(**changes: Any) -> Checkpoint:
    entry = ListEntry(b"\0b", b"l" * 32, 300, b"m" * 32, 100, b"n" * 32, b"p" * 32, 16)
    fields: dict[str, Any] = {
        "seq": 50, "time_us": 60, "cluster_id": bytes(range(16)), "base_seq": 20, "base_hash": b"b" * 32,
        "row_count": 4, "block_count": 2,
        "lists": [entry, entry._replace(key=b"\1bm", list_hash=b"o" * 32, pack=b"r" * 32)],
        "packs": {b"p" * 32: 1000, b"r" * 32: 2000}, "control": b"\xa1ghorizon\xf6",
    }  # fmt: skip
    return Checkpoint(**{**fields, **changes})


def test_the_document_adds_up_to_the_sizes_of_what_is_written() -> None:
    """No part is missing in it, and none is described that is not there."""
    assert sizes("Block of rows", row_count=3, key_bytes=8, metadata_bytes=5, value_bytes=45) == len(
        encode_rows(ROWS)
    )
    plain = Rows([b"\1bk"], array("Q", [7]), array("Q", [60]), b"\0", [b""], [b"v"])
    assert sizes("Block of rows", row_count=1, key_bytes=3, metadata_bytes=0, value_bytes=1) == len(
        encode_rows(plain)
    )
    assert sizes("List of blocks", block_count=2, key_bytes=5) == len(encode_list(LISTED))
    assert sizes("Block of places", place_count=2) == len(encode_places(PLACES))
    assert sizes("List of locations", block_count=2, pack_count=2) == len(encode_locations(LOCATIONS))
    assert sizes("Index", list_count=2, pack_count=2, key_bytes=5, control_bytes=10) == len(
        encode_checkpoint(index())
    )


def decoded(name: str, data: bytes, expected: bytes) -> Any:
    decode: dict[str, Callable[[bytes, bytes], Any]] = {
        "rows": decode_rows,
        "list": lambda data, expected: made_of(Listed, *list_columns(data, expected)),
        "places": decode_places,
        "locations": lambda data, expected: made_of(Location, *location_columns(data, expected)),
        "index": lambda data, _: decode_checkpoint(data),
    }
    return decode[name](data, expected)


ENCODED = {
    "rows": (encode_rows(ROWS), ROWS),
    "list": (encode_list(LISTED), LISTED),
    "places": (encode_places(PLACES), PLACES),
    "locations": (encode_locations(LOCATIONS), LOCATIONS),
    "index": (encode_checkpoint(index()), index()),
}


@pytest.mark.parametrize("name", ENCODED)
def test_what_is_decoded_is_what_was_encoded(name: str) -> None:
    """Nothing is lost on the way."""
    data, content = ENCODED[name]
    assert decoded(name, data, hash_of(data)) == content


@pytest.mark.parametrize("name", ENCODED)
def test_magic_version_and_hash_are_three_checks_with_three_errors(name: str) -> None:
    """In this order: what another program wrote is not corrupt, and neither is what is newer."""
    data, _ = ENCODED[name]
    expected = hash_of(data)
    with pytest.raises(NotLowwater):
        decoded(name, b"PK\3\4" + data[4:], expected)
    with pytest.raises(NotLowwater):
        decoded(name, b"", expected)
    for place in (8, 10):
        newer = data[:place] + b"\xff\xff" + data[place + 2 :]
        with pytest.raises(NewerVersion):
            decoded(name, newer, expected)
    with pytest.raises(Corrupt, match="never existed"):
        decoded(name, data[:8] + b"\0\0\0\0" + data[12:], expected)
    for place in range(12, len(data)):
        damaged = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(Corrupt):
            decoded(name, damaged, expected)
    for size in range(8, len(data)):
        with pytest.raises(Corrupt):
            decoded(name, data[:size], expected)


@pytest.mark.parametrize("name", ENCODED)
@settings(max_examples=200)
@given(noise=st.binary(min_size=1, max_size=40), data=st.data())
def test_hostile_bytes_with_the_right_hash_are_typed_errors(name: str, noise: bytes, data: Any) -> None:
    """A hash proves who wrote it, not that it makes sense."""
    encoded, _ = ENCODED[name]
    place = data.draw(st.integers(12, len(encoded)))
    changed = encoded[:place] + noise + encoded[place + data.draw(st.integers(0, len(noise))) :]
    if name == "index":
        rest = changed[16:]
        changed = changed[:12] + struct.pack("<I", blocks_crc(rest, changed[:12])) + rest
    try:
        decoded(name, changed, hash_of(changed))
    except LowwaterError:
        pass


def blocks_crc(rest: bytes, recognised: bytes) -> int:
    from zlib import crc32

    return crc32(rest, crc32(recognised))


def test_rows_out_of_order_are_corrupt() -> None:
    """Whoever searches in them would miss some."""
    rows = Rows(ROWS.keys[::-1], ROWS.seqs, ROWS.times, bytes(3), [b""] * 3, [b""] * 3)
    data = encode_rows(rows)
    with pytest.raises(Corrupt, match="order"):
        decode_rows(data, hash_of(data))


def test_an_unknown_flag_is_newer() -> None:
    """Its row may mean something else altogether."""
    rows = Rows([b"\1bk"], array("Q", [7]), array("Q", [60]), bytes([8]), [b""], [b""])
    data = encode_rows(rows)
    with pytest.raises(NewerVersion):
        decode_rows(data, hash_of(data))


def test_a_file_with_another_hash_than_its_name_is_corrupt() -> None:
    """The name is what others trust."""
    data = encode_checkpoint(index())
    assert decode_named(data, name_of(50, hash_of(data))) == index()
    for name in (name_of(51, hash_of(data)), name_of(50, NO_HASH)):
        with pytest.raises(Corrupt, match="name"):
            decode_named(data, name)


@pytest.mark.parametrize(
    "changes",
    [{"base_seq": 50}, {"base_seq": 0}, {"base_hash": NO_HASH}],
    ids=["of itself", "without seq", "without hash"],
)
def test_a_base_that_cannot_be_is_corrupt(changes: dict[str, Any]) -> None:
    """Reading would go round in circles."""
    with pytest.raises(Corrupt, match="base"):
        decode_checkpoint(encode_checkpoint(index(**changes)))


def test_the_control_hash_covers_places_and_not_locations() -> None:
    """Replicas with other bases have other locations, and the same state."""
    moved = [each._replace(offset=99, locations_hash=b"x" * 32) for each in index().lists]
    assert index(lists=moved).control_hash == index().control_hash
    assert index(lists=moved).root == index().root
    elsewhere = [each._replace(places_hash=b"x" * 32) for each in index().lists]
    assert index(lists=elsewhere).control_hash != index().control_hash
    assert index(lists=elsewhere).root == index().root
    assert index(control=b"\xa0").control_hash != index().control_hash
