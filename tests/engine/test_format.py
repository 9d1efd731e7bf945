"""docs/FORMAT.md says what engine/format/format.py does; encoders and decoders keep the rules of the format.

Always true of the first half: it compares every number of every table in the document with the code, so a
change in either alone fails here.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any
from zlib import crc32

import cbor2
import pytest

from lowwater.engine.format import before_images, format
from lowwater.engine.format.entries import Delete, Entry, Put, decode_frames, decode_payload
from lowwater.engine.format.format import (
    NO_EXTRAS,
    Compression,
    Extras,
    Flag,
    Kind,
    SegmentHeader,
    SegmentTrailer,
    ValueRef,
)
from lowwater.engine.log import chain, compress, directory
from lowwater.engine.log.chain import LogSettings
from lowwater.engine.log.directory import Hint
from lowwater.engine.seams import checksum
from lowwater.errors import Corrupt, InvalidEntry, NewerVersion, NotLowwater

FORMAT_MD = Path(__file__).parent.parent.parent / "docs" / "FORMAT.md"

# Each byte table of the document, by the heading above it.
STRUCTS = {
    "Frame head": format.FRAME,
    "Payload fixed part": format.FIXED,
    "Value reference": format.VALUE_REF,
    "Before-image": before_images.IMAGE,
    "Large value before": before_images.LARGE_VALUE,
    "Segment header": format.HEADER,
    "Segment trailer": format.TRAILER,
    "Kind count": format.KIND_COUNT,
    "Stream": format.STREAM_HEAD,
    "Skippable frame head": compress.SKIPPABLE_HEAD,
    "Table entry": compress.SEEK_ENTRY,
    "Table end": compress.SEEK_FOOTER,
    "Stored hash": compress.STORED_HASH,
    "The hint": struct.Struct("<8sI"),
}
FIELDS = {
    "Payload fixed part": ("kind", "flags", "bucket_len", "key_len", "metadata_len", "time_us", "origin"),
    "Value reference": ValueRef._fields,
    "Segment header": SegmentHeader._fields,
    "Segment trailer": SegmentTrailer._fields,
}
NOT_FIELDS = {"magic", "version_major", "version_minor", "checksum", ""}

HEADER = SegmentHeader(
    seq_first=7,
    seq_before=5,
    hash_before=bytes(range(32)),
    cluster_id=bytes(range(16)),
    epoch=3,
    segment_bytes=1_000_000,
    block_bytes=65536,
    compression=1,
    time_before_us=1_700_000_000_000_000,
)
TRAILER = SegmentTrailer(
    file_bytes=320 + 8 + 4 + 4 + 32 + 8 + 192,
    body_bytes=300,
    seq_first=7,
    seq_last=8,
    time_min_us=1,
    time_max_us=2,
    frame_count=2,
    key_count=1,
    block_count=1,
    kind_count=1,
    stream_count=0,
    stream_bytes=0,
    segment_hash=bytes(32),
    footer_hash=bytes(32),
)


# ---------------------------------------------------------------------------- the document


def text() -> str:
    return FORMAT_MD.read_text(encoding="utf-8")


def table(heading: str, document: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    _, found, rest = document.partition(f"# {heading}\n")
    assert found, f"docs/FORMAT.md has no heading {heading!r}"
    lines = [line for line in rest[rest.index("\n|") + 1 :].split("\n\n")[0].split("\n") if line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def check_byte_table(heading: str, document: str) -> None:
    """Raises AssertionError where the table is not the one of the code."""
    codes = {"u8": (1, "B"), "u16": (2, "H"), "u32": (4, "I"), "u64": (8, "Q")}
    position, layout, names = 0, "<", []
    for offset, size, kind, name, _why in table(heading, document):
        assert int(offset) == position, f"{heading}: {name or kind} is not at {offset}"
        base, _, count = kind.partition(" ")
        if base in codes:
            expected, code = codes[base]
        else:
            assert base in ("bytes", "zero"), f"{heading}: what is {kind!r}?"
            expected, code = int(count), f"{count}{'s' if base == 'bytes' else 'x'}"
        assert int(size) == expected, f"{heading}: {name or kind} has not {size} bytes"
        layout += code
        position += expected
        if base != "zero":
            names.append(name)
    assert layout == STRUCTS[heading].format, heading
    assert position == STRUCTS[heading].size, heading
    if heading in FIELDS:
        own = [name for name in names if name not in NOT_FIELDS]
        if heading in ("Segment header", "Segment trailer"):
            own.remove("flags")
        if heading == "Segment header":
            own.append("before_images")  # in the flags
        assert tuple(own) == FIELDS[heading], heading


@pytest.mark.parametrize("heading", STRUCTS)
def test_every_byte_table_of_the_document_is_what_the_code_packs(heading: str) -> None:
    """Somebody writes a reader from the document alone."""
    check_byte_table(heading, text())


@pytest.mark.parametrize("heading", STRUCTS)
def test_a_change_of_any_number_in_a_byte_table_is_noticed(heading: str) -> None:
    """A checker that has never failed proves nothing."""
    document = text()
    for offset, size, kind, name, _why in table(heading, document):
        row = f"| {offset} | {size} | {kind} |{name and f' {name}'} |"
        before, _, rest = document.partition(f"# {heading}\n")
        assert row in rest
        other_kind = {"u8": "u16", "u16": "u32", "u32": "u64", "u64": "u32"}.get(kind, kind + "1")
        changes = [(int(offset) + 1, size, kind, name), (offset, int(size) + 1, kind, name)]
        changes.append((offset, size, other_kind, name))
        if heading in FIELDS and name not in NOT_FIELDS | {"flags"}:
            changes.append((offset, size, kind, name + "x"))
        for change in changes:
            cells = " | ".join(map(str, change))
            changed = f"{before}# {heading}\n{rest.replace(row, f'| {cells} |', 1)}"
            assert changed != document
            with pytest.raises(AssertionError):
                check_byte_table(heading, changed)


def test_no_byte_table_of_the_document_is_left_out_here() -> None:
    """A new table needs a line in STRUCTS."""
    assert text().count("| offset | size | type | field | why |") == len(STRUCTS)


def test_a_frame_begins_with_its_head_and_then_the_fixed_part() -> None:
    """Readers gather both at once."""
    assert format.FRAME_FIXED.format == "<" + format.FRAME.format[1:] + format.FIXED.format[1:]
    assert format.FRAME_CHECKED_HEAD.format == format.FRAME.format[:-1]


def magic_of(heading: str) -> bytes:
    (why,) = (row[4] for row in table(heading, text()) if row[3] == "magic")
    found = re.search(r"`((?:[0-9a-f]{2} ?)+)`", why)
    assert found is not None
    return bytes.fromhex(found[1])


def test_magics_and_versions_of_the_document_are_those_that_are_written() -> None:
    """They are what a file is recognised by."""
    assert magic_of("Segment header") == format.HEADER_MAGIC == HEADER.encode()[:8]
    assert magic_of("Segment trailer") == format.TRAILER_MAGIC == TRAILER.encode()[:8]
    assert magic_of("The hint") == Hint(1, 2, 3, "fsync").encode()[:8]
    version = f"{format.VERSION_MAJOR}.{format.VERSION_MINOR}"
    assert text().startswith(f"# The format of the log, version {version}\n")
    for heading in ("Segment header", "Segment trailer"):
        written = {row[3]: row[4] for row in table(heading, text())}
        assert f"{written['version_major']}.{written['version_minor']}" == version
    for heading, magic in (
        ("Skippable frame head", compress.SEEK_TABLE_MAGIC),
        ("Table end", compress.SEEK_FOOTER_MAGIC),
        ("Stored hash", compress.STORED_HASH_MAGIC),
    ):
        assert f"| magic | 0x{magic:08X}" in text().partition(f"# {heading}\n")[2][:600]


def test_kinds_of_the_document_are_those_of_the_code() -> None:
    """Codes are for ever."""
    rows = table("Kinds", text())
    assert [(int(row[0]), row[1]) for row in rows] == [(kind.value, kind.name.lower()) for kind in Kind]
    assert min(kind for kind in Kind if kind >= 32) == chain.FIRST_CONTROL_KIND == Kind.CREATE
    ends = {row[1] for row in rows if "ends its segment" in row[4]}
    assert ends == {kind.name.lower() for kind in chain.ENDS_SEGMENT}
    for first, last in ((64, 79), (83, 95), (96, 111)):
        assert f"{first}–{last}" in text()
        assert not [kind for kind in Kind if first <= kind <= last]


def test_flags_and_groups_of_the_document_are_those_of_the_code() -> None:
    """The flags tell where the bucket begins."""
    rows = table("Flags", text())
    assert [(1 << int(row[0]), int(row[1]), row[2]) for row in rows] == [
        (flag.value, flag.value, flag.name.lower()) for flag in Flag if flag.name is not None
    ]
    groups = table("Optional groups", text())
    assert [row[0] for row in groups] == [row[2] for row in rows if int(row[1]) < Flag.REFUSED]
    sizes = {row[0]: int(row[1].partition(" ")[0]) for row in groups}
    assert sizes.pop("before") == format.U32.size
    for flags, size in enumerate(format.GROUP_BYTES):
        assert size == sum(
            sizes[flag.name.lower()] for flag in Flag if flags & flag and flag.name is not None
        )
    for row in groups:
        numbers = sum(8 for _ in re.findall(r"\bu64\b", row[2])) + 16 * row[2].startswith(
            "the first 16 bytes"
        )
        assert row[0] == "before" or numbers == int(row[1]), row


def test_limits_and_settings_of_the_document_are_those_of_the_code() -> None:
    """A writer in another language must not write what this one refuses to read."""
    limits = {row[0]: int(row[1]) for row in table("Limits", text())}
    assert limits == {
        "bucket": format.BUCKET_BYTES_MAX,
        "key": format.KEY_BYTES_MAX,
        "metadata": format.METADATA_BYTES_MAX,
        "payload": format.PAYLOAD_BYTES_MAX,
        "batch": format.BATCH_BYTES_MAX,
        "body": format.SEGMENT_BYTES_MAX + format.BATCH_BYTES_MAX,
    }
    assert limits["body"] < 2**32
    assert f"at most {format.PAYLOAD_BYTES_MAX}" in text()
    rows = {row[0]: (int(row[1]), int(row[2])) for row in table("Settings", text())}
    assert rows == chain._SETTING_RANGES
    defaults = {row[0]: int(row[3]) for row in table("Settings", text())}
    assert defaults == LogSettings()._asdict()
    for row in table("Settings", text()):
        assert (row[0] in SegmentHeader._fields) == ("header" in row[4])
        assert (row[0] in chain._UNCHANGEABLE) == ("for ever" in row[4])
    for compression in Compression:
        assert f"{compression.value} {compression.name.lower()}" in text()


def test_names_of_files_are_those_of_the_code() -> None:
    """The list of segments is made from them."""
    names = {row[0].strip("`") for row in table("Files", text())}
    first_last = "<first>-<last>"
    for name in (f"segment-{first_last}.log", f"sealing-{first_last}.log", f"segment-{first_last}.log.zst"):
        assert name in names
    assert {directory.CURRENT, directory.HINT, directory.LOCK, directory.OWNER} <= names
    assert f"`{directory.SPARE}`, `{directory.HINT_TEMPORARY}`, `{directory.OWNER_TEMPORARY}`" in text()
    digits = "00000000000000000001-18446744073709551615"
    assert directory.segment_name(1, format.SEQ_MAX) == f"segment-{digits}.log"
    assert directory.segment_name(1, format.SEQ_MAX, sealed=False) == f"sealing-{digits}.log"
    assert compress.compressed_name(1, format.SEQ_MAX) == f"segment-{digits}.log.zst"


def test_links_inside_the_document_lead_somewhere() -> None:
    """Half of the document is references to the other half."""
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text().splitlines()
        if line.startswith("#")
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text())) <= headings


def test_the_checksum_is_the_one_that_the_document_names() -> None:
    """There are several CRC-32."""
    assert checksum.crc32(b"123456789") == crc32(b"123456789") == 0xCBF43926


# ---------------------------------------------------------------------------- header and trailer


@pytest.mark.parametrize("part", [HEADER, TRAILER])
def test_magic_version_and_checksum_are_three_checks_in_this_order(
    part: SegmentHeader | SegmentTrailer,
) -> None:
    """A newer format may have its checksum elsewhere, and another file has none at all."""
    data = bytearray(part.encode())
    assert type(part).decode(bytes(data)) == part
    data[-1] ^= 1
    with pytest.raises(Corrupt, match="checksum"):
        type(part).decode(bytes(data))
    for major, minor in ((1, 1), (2, 0), (1, 65535), (65535, 0)):
        struct.pack_into("<HH", data, 8, major, minor)
        with pytest.raises(NewerVersion, match=rf"format version {major}\.{minor}") as caught:
            type(part).decode(bytes(data))
        assert "upgrade" in caught.value.hint
    struct.pack_into("<HH", data, 8, 0, 9)
    with pytest.raises(Corrupt, match="never existed"):
        type(part).decode(bytes(data))
    data[0] ^= 1
    # What has a header is a segment: without its trailer it was cut off, or something was added.
    with pytest.raises(NotLowwater if part is HEADER else Corrupt):
        type(part).decode(bytes(data))
    with pytest.raises(
        NotLowwater if part is HEADER else Corrupt, match="empty" if part is HEADER else "end"
    ):
        type(part).decode(b"")


def with_checksum(data: bytearray) -> bytes:
    struct.pack_into("<I", data, len(data) - 4, crc32(data[:-4]))
    return bytes(data)


@pytest.mark.parametrize("part", [HEADER, TRAILER])
def test_segment_flags_that_are_not_known_are_newer(part: SegmentHeader | SegmentTrailer) -> None:
    """What they mean could change the meaning of all that follows."""
    known = format.SEGMENT_FLAG_BEFORE_IMAGES if part is HEADER else 0
    for bit in range(32):
        if 1 << bit == known:
            continue
        data = bytearray(part.encode())
        struct.pack_into("<I", data, 12, 1 << bit)
        with pytest.raises(NewerVersion):
            type(part).decode(with_checksum(data))


@pytest.mark.parametrize("part", [HEADER, TRAILER])
def test_bytes_that_must_be_zero_are_compared(part: SegmentHeader | SegmentTrailer) -> None:
    """Whoever uses them one day relies on their having been zero."""
    heading = "Segment header" if part is HEADER else "Segment trailer"
    for offset, size, kind, *_ in table(heading, text()):
        if kind.startswith("zero"):
            for at in range(int(offset), int(offset) + int(size)):
                data = bytearray(part.encode())
                data[at] = 1
                with pytest.raises(Corrupt, match="must be zero"):
                    type(part).decode(with_checksum(data))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"seq_before": 7}, Corrupt),
        ({"seq_before": 8}, Corrupt),
        ({"epoch": 0}, Corrupt),
        ({"block_bytes": 0}, Corrupt),
        ({"block_bytes": 2**24 + 1}, Corrupt),
        ({"segment_bytes": 4095}, Corrupt),
        ({"segment_bytes": 2**31 + 1}, Corrupt),
        ({"compression": 2}, NewerVersion),
    ],
)
def test_a_header_beyond_its_limits_is_refused(change: dict[str, Any], error: type[Exception]) -> None:
    """A block size of zero would divide by it, and an enormous one would be allocated."""
    fields = HEADER._replace(**change)
    data = bytearray(format.HEADER.pack(format.HEADER_MAGIC, 1, 0, 0, *fields[:-1], 0))
    with pytest.raises(error):
        SegmentHeader.decode(with_checksum(data))


@pytest.mark.parametrize(
    "change",
    [
        {"file_bytes": TRAILER.file_bytes + 1},
        {"frame_count": 3},
        {"frame_count": 0, "file_bytes": TRAILER.file_bytes - 8},
        {"body_bytes": 0, "file_bytes": TRAILER.file_bytes - 320},
        {"stream_bytes": 2**32 - 1},
        {"key_count": 2**32 - 1},
    ],
)
def test_a_trailer_whose_numbers_do_not_add_up_is_refused(change: dict[str, Any]) -> None:
    """They say where everything is."""
    data = TRAILER._replace(**change).encode()
    with pytest.raises(Corrupt):
        SegmentTrailer.decode(data)


@pytest.mark.parametrize("part", [HEADER, TRAILER])
def test_a_part_that_is_cut_short_is_corrupt(part: SegmentHeader | SegmentTrailer) -> None:
    """With its magic it is ours, and without its end it is damaged."""
    data = part.encode()
    for size in range(8, len(data)):
        with pytest.raises(Corrupt):
            type(part).decode(data[:size])


# ---------------------------------------------------------------------------- entries and frames


@pytest.mark.parametrize("key", ["", "x" * 1025, "é" * 513, "\ud800", b"bytes", None, 7])
def test_a_key_that_no_log_accepts_is_refused(key: object) -> None:
    """One typed error, before anything is written."""
    with pytest.raises(InvalidEntry):
        Put("bucket", key, b"value").encode(1)  # type: ignore[arg-type]
    with pytest.raises(InvalidEntry):
        Delete("bucket", key).encode(1)  # type: ignore[arg-type]


@pytest.mark.parametrize("bucket", ["", "x" * 256, "é" * 128, "\udfff", b"b", None])
def test_a_bucket_that_no_log_accepts_is_refused(bucket: object) -> None:
    """Buckets are shorter than keys."""
    with pytest.raises(InvalidEntry):
        Put(bucket, "key", b"value").encode(1)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["text", 7, None, [1], object()])
def test_a_value_that_is_not_bytes_is_refused(value: object) -> None:
    """`bytes(7)` would be seven zeros."""
    with pytest.raises(InvalidEntry):
        Put("bucket", "key", value).encode(1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "metadata", [{"a": 1}, {1: "a"}, {"a": b"b"}, {"a": None}, {"\ud800": "a"}, {"a": "x" * 65536}]
)
def test_metadata_that_is_not_text_to_text_is_refused(metadata: object) -> None:
    """Spark shows it as a map of text to text."""
    with pytest.raises(InvalidEntry):
        Put("bucket", "key", b"", metadata).encode(1)  # type: ignore[arg-type]


def test_a_payload_larger_than_a_frame_is_refused() -> None:
    """A frame fits into one batch, or a crash could tear more than recovery expects."""
    room = format.PAYLOAD_BYTES_MAX - format.FIXED_BYTES - 2
    assert len(Put("b", "k", bytes(room)).encode(1)) == format.PAYLOAD_BYTES_MAX
    with pytest.raises(InvalidEntry):
        Put("b", "k", bytes(room + 1)).encode(1)


@pytest.mark.parametrize(("time_us", "origin"), [(-1, 0), (2**63, 0), (2**64, 0), (0, -1), (0, 2**64)])
def test_times_and_origins_that_do_not_fit_are_refused(time_us: int, origin: int) -> None:
    """They would come back as others: from 2^63 on a time is negative where it is a signed number."""
    with pytest.raises(InvalidEntry):
        Put("b", "k", b"", origin=origin).encode(time_us)
    entry = decode_payload(1, Put("b", "k", b"", origin=2**64 - 1).encode(2**63 - 1))
    assert (entry.time_us, entry.origin) == (format.TIME_US_MAX, format.SEQ_MAX)


def test_equal_metadata_gives_equal_bytes_in_any_order() -> None:
    """Replicas build their dictionaries in different orders."""
    names = ["b", "a", "aa", "", "é", "B", "x" * 30]
    forward = format.encode_metadata({name: name for name in names})
    assert format.encode_metadata({name: name for name in reversed(names)}) == forward
    assert list(cbor2.loads(forward)) == ["", "B", "a", "b", "aa", "é", "x" * 30]
    assert format.encode_metadata({}) == format.encode_metadata(None) == b""


@pytest.mark.parametrize("data", [b"\x01", b"\xa1\x61a\x01", b"\xa1\x01\x61a", b"\xa1", b"\xff", b"\x81\xa0"])
def test_metadata_that_is_not_a_map_of_texts_is_corrupt(data: bytes) -> None:
    """Whatever cbor2 makes of it."""
    with pytest.raises(Corrupt):
        format.decode_metadata(data)


def frame(payload: bytes, seq: int = 9) -> bytes:
    return format.encode_frames([seq], [payload], [len(payload)])


def decode(data: bytes) -> list[Entry]:
    return list(decode_frames(data, 0, len(data), verify=True))


PAYLOAD = Put("bucket", "key", b"value", {"a": "b"}).encode(1)


@pytest.mark.parametrize("kind", sorted(set(range(256)) - set(Kind)))
def test_a_kind_that_is_not_known_is_newer(kind: int) -> None:
    """Never skipped: it may change what all later entries mean."""
    with pytest.raises(NewerVersion) as caught:
        decode(frame(bytes([kind]) + PAYLOAD[1:]))
    assert caught.value.seq == 9
    assert "upgrade" in caught.value.hint


@pytest.mark.parametrize("bit", [6, 7, 10, 11, 12, 13, 14, 15])
def test_an_entry_flag_that_is_not_known_is_newer(bit: int) -> None:
    """It could name a group that stands before the bucket."""
    payload = PAYLOAD[:1] + struct.pack("<H", 1 << bit) + PAYLOAD[3:]
    with pytest.raises(NewerVersion):
        decode(frame(payload))


def test_a_payload_whose_lengths_exceed_it_is_corrupt() -> None:
    """The next frame's bytes must not become part of this one's value."""
    for at in (3, 5, 7):
        payload = PAYLOAD[:at] + b"\xff\xff" + PAYLOAD[at + 2 :]
        with pytest.raises(Corrupt):
            decode(frame(payload) + frame(PAYLOAD, 10))
    for size in range(len(PAYLOAD)):
        if size < len(PAYLOAD) - len(b"value"):
            with pytest.raises(Corrupt):
                decode(frame(PAYLOAD[:size]) + frame(PAYLOAD, 10))


def test_a_refused_entry_carries_its_code_and_nothing_else() -> None:
    """A refused entry with a value would be two things at once."""
    extras = Extras(refused=513)
    payload = format.encode_payload(Kind.PUT, b"b", b"k", b"", b"", time_us=1, extras=extras)
    assert payload.endswith(b"\x01\x02")
    assert decode_payload(1, payload).refused == 513
    for wrong in (payload[:-1], payload + b"x", payload[:-2]):
        with pytest.raises(Corrupt):
            decode_payload(1, wrong)
    both = payload[:1] + struct.pack("<H", Flag.REFUSED | Flag.VALUE_REF) + payload[3:]
    with pytest.raises(Corrupt):
        decode_payload(1, both)


def test_a_value_reference_of_another_size_is_corrupt() -> None:
    """Its fields would be read from elsewhere."""
    extras = Extras(value_ref=ValueRef(1, 2, bytes(32)))
    payload = format.encode_payload(Kind.COPY, b"b", b"k", b"", b"", time_us=1, extras=extras)
    entry = decode_payload(1, payload)
    assert entry.value == b""
    assert entry.extras == extras
    for wrong in (payload[:-1], payload + b"x"):
        with pytest.raises(Corrupt):
            decode_payload(1, wrong)


def test_groups_that_exceed_the_payload_are_corrupt() -> None:
    """Every flag moves the bucket, and no flag may move it out of the frame."""
    extras = Extras(
        txn=1, group_seq_last=2, session=3, request_hash=bytes(16), stream_offset=4, before=b"before"
    )
    payload = format.encode_payload(Kind.APPEND, b"b", b"", b"", b"", time_us=1, extras=extras)
    assert decode_payload(1, payload).extras == extras
    for size in range(len(payload)):
        with pytest.raises(Corrupt):
            decode_payload(1, payload[:size])


def test_frames_encoded_together_are_frames_encoded_alone() -> None:
    """How entries were batched changes no byte."""
    payloads = [Put("b", f"k{at}", bytes(at)).encode(at) for at in range(50)]
    together = format.encode_frames(range(1, 51), payloads, list(map(len, payloads)))
    assert together == b"".join(frame(payload, seq) for seq, payload in enumerate(payloads, 1))
    for seq, payload in enumerate(payloads, 1):
        assert format.frame_checksum(seq, payload) == format.FRAME.unpack_from(frame(payload, seq))[2]


def test_a_plain_entry_has_no_extras() -> None:
    """Most frames have none, and readers must not pay for them."""
    entry = decode(frame(PAYLOAD))[0]
    assert entry == Entry(9, "put", "bucket", "key", b"value", {"a": "b"}, 1, 0)
    assert entry.extras is None
    assert not any(flag for flag in NO_EXTRAS if flag)
