"""docs/PAGES.md says what engine/format/page.py does; pages come back as they were; merging loses no row.

Always true of the model: it keeps what `merge` must, key by key, in the plainest way, and knows no pages.
"""

from __future__ import annotations

import pickle
import random
import struct
from array import array
from bisect import bisect_right
from pathlib import Path
from zlib import crc32

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from lowwater.engine.format import keys
from lowwater.engine.format import page as page_format
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.keys import (
    PAGE_KEY_BYTES,
    after_prefix,
    bucket_range,
    decode_key,
    encode_key,
    page_key,
)
from lowwater.engine.format.page import (
    BUCKET,
    REFERENCE,
    TOMBSTONE,
    UNSTAMPED,
    DataPage,
    KeyVersions,
    Version,
    decode_page,
    encode_page,
    stored_bytes,
)
from lowwater.engine.pages.merging import merge, merge_puts
from lowwater.errors import Corrupt, LowwaterError, NewerVersion, NotLowwater

PAGES_MD = Path(__file__).parent.parent.parent / "docs" / "PAGES.md"
CODES = {"u8": (1, "B"), "u16": (2, "H"), "u32": (4, "I"), "u64": (8, "Q")}
ALWAYS = Boundaries(b"salt", 1)
NEVER = Boundaries(b"salt", 2**64)
Rows = list[tuple[bytes, int, int, int, bytes, bytes]]


# ---------------------------------------------------------------------------- the document


def text() -> str:
    return PAGES_MD.read_text(encoding="utf-8")


def table(heading: str, document: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    _, found, rest = document.partition(f"# {heading}\n")
    assert found, f"docs/PAGES.md has no heading {heading!r}"
    lines = rest[rest.index("\n|") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def check_header_table(document: str) -> None:
    """Raises AssertionError where the table is not the one of the code."""
    position, layout, names = 0, "<", []
    for offset, size, kind, name, _why in table("Page header", document):
        base, _, count = kind.partition(" ")
        expected, code = (
            CODES[base] if base in CODES else (int(count), count + {"bytes": "s", "zero": "x"}[base])
        )
        assert (int(offset), int(size)) == (position, expected), name or kind
        layout += code
        position += expected
        names.append(name)
    assert (layout, position) == (page_format.HEADER.format, page_format.HEADER_BYTES)
    assert names == [
        *("magic", "version_major", "version_minor", "checksum", "page_seq"),
        *("key_count", "row_count", "key_bytes", "metadata_bytes", "value_bytes", ""),
    ]


def test_the_header_of_the_document_is_what_the_code_packs() -> None:
    """Somebody reads pages from the document alone."""
    check_header_table(text())
    assert page_format.HEADER.format == page_format.RECOGNISED.format + "I" + page_format._COVERED.format[1:]
    assert f"`{page_format.MAGIC.hex(' ')}`" in text()
    rows = {row[3]: row[4] for row in table("Page header", text())}
    assert int(rows["version_major"]) == page_format.VERSION_MAJOR
    assert int(rows["version_minor"]) == page_format.VERSION_MINOR
    assert f"format version {page_format.VERSION_MAJOR}.{page_format.VERSION_MINOR}\n" in text()


def test_a_change_of_any_number_in_the_header_table_is_noticed() -> None:
    """A checker that has never failed proves nothing."""
    # References begin as pages do.
    document = text().partition("## References")[0]
    for offset, size, kind, name, _why in table("Page header", document):
        row = f"| {offset} | {size} | {kind} |{name and f' {name}'} |"
        assert document.count(row) == 1
        for change in (
            (int(offset) + 1, size, kind, name),
            (offset, int(size) + 1, kind, name),
            (offset, size, {"u16": "u32", "u32": "u64", "u64": "u32"}.get(kind, kind + "1"), name),
            (offset, size, kind, name + "x"),
        ):
            with pytest.raises(AssertionError):
                check_header_table(document.replace(row, f"| {' | '.join(map(str, change))} |"))


def test_flags_and_limits_of_the_document_are_those_of_the_code() -> None:
    """They say what a value means, and where pages begin."""
    assert [(1 << int(row[0]), int(row[1]), row[2]) for row in table("Row flags", text())] == [
        (TOMBSTONE, TOMBSTONE, "tombstone"),
        (REFERENCE, REFERENCE, "reference"),
        (BUCKET, BUCKET, "bucket"),
        (UNSTAMPED, UNSTAMPED, "unstamped"),
    ]
    assert page_format.FLAGS_KNOWN == TOMBSTONE | REFERENCE | BUCKET | UNSTAMPED
    assert f"first {PAGE_KEY_BYTES} bytes" in text()


def reader_of_the_document(data: bytes) -> tuple[int, Rows]:
    """A page read by the document's list of parts."""
    fields = struct.unpack_from("<QIIIII", data, 16)
    page_seq, key_count, row_count, key_bytes, metadata_bytes, value_bytes = fields
    sizes = {
        "`row_count`": row_count,
        "`key_count`": key_count,
        "`key_bytes`": key_bytes,
        "`metadata_bytes`": metadata_bytes,
        "`value_bytes`": value_bytes,
    }
    parts: dict[str, bytes] = {}
    at = 0
    for name, size, note in table("Pages", text()):
        number, _, unit = size.rpartition(" × ")
        length = int(number or 1) * (sizes[unit] if unit in sizes else int(unit))
        if "Not there when `key_count`" in note and key_count == row_count:
            length = 0
        if "Not there when `metadata_bytes`" in note and not metadata_bytes:
            length = 0
        parts[name] = data[at : at + length]
        at += length
    assert at == len(data)

    def cut(blob: str, ends: str) -> list[bytes]:
        numbers = array("I", parts[ends])
        return [parts[blob][start:end] for start, end in zip([0, *numbers], numbers, strict=False)]

    keys = cut("keys", "ends of keys")
    row_ends = array("I", parts["ends of rows"]) or range(1, key_count + 1)
    rows = [
        keys[bisect_right(row_ends, row)] for row in range(row_count)
    ]  # the first key whose rows end after this one
    metadata = cut("metadata", "ends of metadata") or [b""] * row_count
    values = cut("values", "ends of values")
    columns = (rows, array("Q", parts["seqs"]), array("Q", parts["times"]), parts["flags"], metadata, values)
    return page_seq, list(zip(*columns, strict=True))


# ---------------------------------------------------------------------------- keys and boundaries


@given(st.binary(max_size=255), st.binary(max_size=40), st.binary(max_size=255), st.binary(max_size=40))
def test_encoded_keys_keep_buckets_apart_and_keys_in_order(a: bytes, x: bytes, b: bytes, y: bytes) -> None:
    """Or a scan of one bucket would return another's keys."""
    encoded, other = encode_key(a, x), encode_key(b, y)
    assert decode_key(encoded) == (a, x)
    low, high = bucket_range(a)
    assert low <= encoded < high
    assert (low <= other < high) == (a == b)
    assert a != b or (encoded < other) == (x < y)


@given(st.binary(max_size=4), st.binary(max_size=6))
def test_the_key_after_a_prefix_is_the_smallest_above_all_with_it(prefix: bytes, key: bytes) -> None:
    """A scan must neither miss the last key nor return one more."""
    after = after_prefix(prefix)
    assert prefix + key < after
    assert (prefix <= key < after) == key.startswith(prefix)


def test_the_range_of_the_last_bucket_of_all_has_an_end() -> None:
    """There is no next byte after 0xff."""
    bucket = b"\xff" * 255
    low, high = bucket_range(bucket)
    assert low <= encode_key(bucket, b"\xff" * 1024) < high


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x05four"])
def test_an_encoded_key_that_ends_inside_its_bucket_is_corrupt(data: bytes) -> None:
    """It would belong to another bucket."""
    with pytest.raises(Corrupt):
        decode_key(data)


def test_boundaries_that_were_sent_to_another_process_are_the_same() -> None:
    keys = [b"key %d" % number for number in range(1000)]
    boundaries = Boundaries(b"some salt", 64)
    sent = pickle.loads(pickle.dumps(boundaries))
    assert sent.cuts(keys) == boundaries.cuts(keys)
    assert 5 < len(sent.cuts(keys)) < 50


def test_a_boundary_is_what_the_document_says() -> None:
    """Replicas, and Spark, must cut at the same keys."""
    boundaries = Boundaries(b"some salt", 64)
    hash_key = blake3(b"some salt").digest()
    count = 0
    for number in range(20_000):
        key = encode_key(b"bucket", b"%d" % number)
        first = int.from_bytes(blake3(key, key=hash_key).digest()[:8], "little")
        assert boundaries.is_boundary(key) == (first < 2**64 // 64)
        count += boundaries.is_boundary(key)
    assert 250 < count < 380
    for number in range(200):
        key = encode_key(b"b", b"%0600d" % 0) + b"%d" % number
        assert len(page_key(key)) == PAGE_KEY_BYTES
        assert boundaries.is_boundary(key) == boundaries.is_boundary(page_key(key))


# ---------------------------------------------------------------------------- the bytes of a page


def make_page(rows: Rows, seq: int = 99) -> DataPage:
    keys, seqs, times, flags, metadata, values = zip(*rows, strict=True)
    return DataPage(
        seq, list(keys), array("Q", seqs), array("Q", times), bytearray(flags), list(metadata), list(values)
    )


def rows_of(page: DataPage) -> Rows:
    columns = (page.keys, page.seqs, page.times, page.flags, page.metadata, page.values)
    return list(zip(*columns, strict=True))


U64 = st.integers(0, 2**64 - 1)


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    rows: Rows = []
    metadata = st.binary(max_size=3) if draw(st.booleans()) else st.just(b"")
    for key in sorted(draw(st.sets(st.binary(min_size=1, max_size=5), min_size=1, max_size=12))):
        seqs = draw(st.sets(U64, min_size=1, max_size=draw(st.sampled_from([1, 1, 4]))))
        for seq in sorted(seqs, reverse=True):
            flags = draw(st.integers(0, 7))
            rows.append((key, seq, draw(U64), flags, draw(metadata), draw(st.binary(max_size=9))))
    return rows


@given(some_rows(), U64, st.binary(max_size=8))
def test_a_page_comes_back_as_it_was(rows: Rows, seq: int, key: bytes) -> None:
    """Also read by the document, row by row, and by keys that are not there."""
    data = encode_page(make_page(rows, seq), key)
    assert reader_of_the_document(data) == (seq, rows)
    page = decode_page(data, key)
    assert (page.seq, len(page)) == (seq, len(rows))
    assert [page.row(index) for index in range(len(page))] == [row[1:] for row in rows]
    wanted = [row[0] for row in rows]
    for each in (page, make_page(rows)):
        assert each.is_plain == (
            len(set(wanted)) == len(wanted) and not any(row[3] or row[4] for row in rows)
        )
        assert each.size_bytes >= sum(len(row[4]) + len(row[5]) for row in rows) + len(b"".join({*wanted}))
    assert rows_of(page) == rows
    assert encode_page(page, key) == data
    for one in {*wanted, *(part + b"\0" for part in wanted), b"", b"\xff" * 6}:
        index = wanted.index(one) if one in wanted else -1
        cold = decode_page(data, key)
        assert [each.find(one) for each in (cold, cold, cold, page, make_page(rows))] == [index] * 5
        newest = page.row(index) if index >= 0 else None
        again = decode_page(data, key)
        assert [each.newest(one) for each in (again, again, again, make_page(rows))] == [newest] * 4
        if index >= 0:
            assert cold.versions(index) == wanted.count(one)
    for one, seq, *_ in rows:
        for at in {0, seq - 1, seq, seq + 1}:
            expected = [index for index, row in enumerate(rows) if row[0] == one and row[1] <= at]
            assert decode_page(data, key).version_at(one, at) == (expected[0] if expected else -1)


@given(
    st.text("bä\x7f", min_size=1, max_size=90),
    st.lists(st.text("ax\0ä€", min_size=1, max_size=4), min_size=1, max_size=12, unique=True),
    st.data(),
)
def test_bounds_and_plain_rows_are_those_of_the_keys(
    bucket: str, names: list[str], data: st.DataObject
) -> None:
    """With names of buckets that are long and no ASCII: their length is a byte of the key."""
    names = sorted(names, key=str.encode)
    keys = [encode_key(bucket.encode(), name.encode()) for name in names]
    columns = make_page([(key, 1 + at, 20 + at, 0, b"", b"v" * at) for at, key in enumerate(keys)])
    low = data.draw(st.sampled_from([*keys, b"", keys[0] + b"\0", keys[-1] + b"\0"]))
    high = data.draw(st.sampled_from([*keys, None, keys[0] + b"\0", b"\xff" * 99]))
    inside = [index for index, key in enumerate(keys) if low <= key and (high is None or key < high)]
    for page in (columns, decode_page(encode_page(columns, b""), b"")):
        start, stop = page.bounds(low, high)
        assert [*range(start, stop)] == inside
        found = page.plain_rows(start, stop, 1 + len(bucket.encode()))
        assert [list(column) for column in found] == [
            [names[at] for at in inside],
            [b"v" * at for at in inside],
            [1 + at for at in inside],
            [20 + at for at in inside],
        ]


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 600])
@pytest.mark.parametrize(("name_bytes", "value_bytes"), [(9, 100), (9, 0), (9, 5000), (700, 1), (None, None)])
def test_rows_of_one_size_are_those_of_the_columns(
    count: int, name_bytes: int | None, value_bytes: int | None
) -> None:
    """They are cut all at once where all to the last have one size, wherever the rows begin and end."""
    rng = random.Random(count)

    def rows(odd: int) -> Rows:
        """Row `odd` is of another size."""
        made = []
        for at in range(count):
            name_size = rng.randint(8, 12) if name_bytes is None else name_bytes + (at == odd)
            value_size = rng.randint(0, 9) if value_bytes is None else value_bytes + (at == odd)
            name = b"%06d" % at + b"n" * (name_size - 6)
            made.append((encode_key(b"bucket", name), at, 9, 0, b"", rng.randbytes(value_size)))
        return made

    for odd in {-1, 0, count // 2, count - 1}:
        columns = make_page(rows(odd))
        page = decode_page(encode_page(columns, b""), b"")
        for _ in range(10):
            start, stop = sorted(rng.choices(range(count + 1), k=2))
            for first, last in ((start, stop), (0, stop), (start, count), (0, count)):
                found = page.plain_rows(first, last, 7)
                assert [list(each) for each in found] == [
                    [key[7:].decode() for key in columns.keys[first:last]],
                    columns.values[first:last],
                    columns.seqs[first:last].tolist(),
                    columns.times[first:last].tolist(),
                ]


def test_a_key_of_many_versions_is_stored_once() -> None:
    """Or history would cost a key a version."""
    one = encode_page(make_page([(b"k" * 400, 9, 0, 0, b"", b"")]), b"")
    many = encode_page(make_page([(b"k" * 400, seq, 0, 0, b"", b"") for seq in range(9, 0, -1)]), b"")
    assert len(many) - len(one) < 9 * 22


PAGE = make_page(
    [
        (b"\1ba", 7, 70, 0, b"\xa0", b"value"),
        (b"\1bb", 9, 90, TOMBSTONE, b"", b""),
        (b"\1bb", 8, 80, REFERENCE, b"", bytes(64)),
    ]
)
DATA = encode_page(PAGE, b"page key")


def read_all(data: bytes, key: bytes) -> None:
    page = decode_page(data, key)
    page.find(b"\1bb")
    for index in range(len(page)):
        page.row(index)
    rows_of(page)
    page.version_at(b"\1bb", 8)


def test_every_single_flipped_bit_is_noticed() -> None:
    """Of the page, and of the key that it lies under."""
    for bit in range(8 * len(DATA)):
        data = bytearray(DATA)
        data[bit >> 3] ^= 1 << (bit & 7)
        error: type[LowwaterError] = NotLowwater if bit < 64 else NewerVersion if bit < 96 else Corrupt
        # Bit 64 makes the version 0.0, which never existed.
        with pytest.raises(Corrupt if bit == 64 else error) as caught:
            decode_page(bytes(data), b"page key")
        assert caught.value.hint
    for bit in range(64):
        key = bytearray(b"page key")
        key[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(Corrupt, match="another page's key"):
            decode_page(DATA, bytes(key))


def test_magic_version_and_checksum_are_three_checks_in_this_order() -> None:
    """A newer page may have its checksum elsewhere."""
    data = bytearray(DATA)
    data[-1] ^= 1
    with pytest.raises(Corrupt, match="checksum"):
        decode_page(bytes(data), b"page key")
    for major, minor in ((1, 1), (2, 0)):
        struct.pack_into("<HH", data, 8, major, minor)
        with pytest.raises(NewerVersion, match=rf"format version {major}\.{minor}"):
            decode_page(bytes(data), b"page key")
    struct.pack_into("<HH", data, 8, 0, 9)
    with pytest.raises(Corrupt, match="never existed"):
        decode_page(bytes(data), b"page key")
    data[0] ^= 1
    with pytest.raises(NotLowwater):
        decode_page(bytes(data), b"page key")
    with pytest.raises(NotLowwater, match="empty"):
        decode_page(b"", b"page key")


def test_a_page_that_is_cut_short_or_continued_is_refused() -> None:
    """By whatever check it meets first."""
    for size in range(len(DATA)):
        with pytest.raises(NotLowwater if size < 8 else Corrupt):
            decode_page(DATA[:size], b"page key")
    with pytest.raises(Corrupt):
        decode_page(DATA + b"\0", b"page key")


def with_checksum(data: bytearray, key: bytes) -> bytes:
    struct.pack_into("<I", data, 12, crc32(data[16:], crc32(data[:12], crc32(key))))
    return bytes(data)


@settings(max_examples=400)
@given(st.binary(max_size=200), st.integers(0, 3))
def test_arbitrary_bytes_raise_typed_errors_only(tail: bytes, kind: int) -> None:
    """Also behind a right magic, a right version, and a right checksum."""
    data = bytearray((b"", DATA[:8], DATA[:12], DATA[:16])[kind] + tail)
    if kind == 3:
        data = bytearray(with_checksum(data, b""))
    try:
        read_all(bytes(data), b"")
    except LowwaterError:
        pass


@settings(max_examples=600)
@given(st.lists(st.tuples(st.integers(16, len(DATA) - 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_wrong_numbers_under_a_right_checksum_raise_typed_errors_only(changes: list[tuple[int, int]]) -> None:
    """Whoever can compute a checksum must not crash a reader, nor make it read beyond the page."""
    data = bytearray(DATA)
    for at, byte in changes:
        data[at] = byte
    try:
        read_all(with_checksum(data, b"page key"), b"page key")
    except LowwaterError:
        pass


def test_what_is_not_known_is_newer_and_what_must_be_zero_is_compared() -> None:
    """A flag may change what a value means."""
    data = bytearray(DATA)
    data[DATA.index(bytes([0, TOMBSTONE, REFERENCE]) + b"\1ba")] = 16
    with pytest.raises(NewerVersion):
        decode_page(with_checksum(data, b"page key"), b"page key")
    data = bytearray(DATA)
    data[47] = 1
    with pytest.raises(Corrupt, match="must be zero"):
        decode_page(with_checksum(data, b"page key"), b"page key")


# ---------------------------------------------------------------------------- merging


def put(seq: int, value: bytes = b"", flags: int = 0) -> tuple[int, int, int, int, bytes, bytes]:
    return seq, seq, 10 * seq, flags, b"", value


def rows_after(
    page: DataPage | None, records: list[KeyVersions], floor: int = 0, frozen_seq: int = 100
) -> list[tuple[bytes, int, bytes]]:
    result = merge(page, b"", records, frozen_seq=frozen_seq, floor=floor, boundaries=NEVER)
    assert len(result) <= 1
    return [(row[0], row[1], row[5]) for _, page in result for row in rows_of(page)]


def one_page(records: list[KeyVersions], frozen_seq: int, floor: int = 0) -> DataPage:
    ((_, page),) = merge(None, b"", records, frozen_seq=frozen_seq, floor=floor, boundaries=NEVER)
    return page


def test_frames_that_the_page_holds_are_dropped() -> None:
    """Redo delivers them again, and rows may have been dropped since."""
    page = one_page([(b"a", [put(5, b"5")])], 10)
    assert rows_after(page, [(b"a", [put(7, b"7")]), (b"b", [put(10, b"10")])]) == [(b"a", 5, b"5")]
    assert rows_after(page, [(b"a", [put(11, b"11"), put(10, b"10")])]) == [
        (b"a", 11, b"11"),
        (b"a", 5, b"5"),
    ]
    for frozen_seq, expected in ((3, 10), (12, 12)):
        ((_, after),) = merge(page, b"", [], frozen_seq=frozen_seq, floor=0, boundaries=NEVER)
        assert after.seq == expected


def test_a_version_of_the_same_seq_replaces_the_one_that_the_page_has() -> None:
    """Of several writes to a key in one group the last survives, also when a flush came between them."""
    page = one_page([(b"a", [(5, 6, 0, 0, b"", b"first"), put(2, b"2")])], 5)
    for floor in (0, 4, 6, 9):
        rows = rows_after(page, [(b"a", [(6, 6, 0, 0, b"", b"last")])], floor)
        assert rows == [(b"a", 6, b"last"), (b"a", 2, b"2")][: 2 if floor < 6 else 1]
    both: list[KeyVersions] = [(b"a", [(6, 6, 0, 0, b"", b"last"), (5, 6, 0, 0, b"", b"first")])]
    assert rows_after(None, both) == [(b"a", 6, b"last")]


def test_the_floor_takes_what_nobody_may_read_any_more() -> None:
    """A version that was superseded at or below it, and a tombstone that hides nothing."""
    versions = [put(8, b"8"), put(6, b"6"), put(4, b"4"), put(2, b"2")]
    page = one_page([(b"a", versions)], 8)
    for floor, kept in ((0, 4), (2, 4), (3, 4), (4, 3), (5, 3), (6, 2), (7, 2), (8, 1), (99, 1)):
        expected = [(b"a", version[1], version[5]) for version in versions[:kept]]
        assert rows_after(page, [], floor) == expected
        assert rows_after(None, [(b"a", versions)], floor) == expected
        older = one_page([(b"a", versions[2:])], 5)
        assert rows_after(older, [(b"a", versions[:2])], floor) == expected
    tombstone: list[KeyVersions] = [(b"a", [put(9, flags=TOMBSTONE)])]
    assert rows_after(page, tombstone, 9) == rows_after(None, tombstone, 9) == []
    assert len(rows_after(page, tombstone, 8)) == 2
    assert rows_after(one_page(tombstone, 9), [], 9) == []
    assert rows_after(one_page(tombstone, 9), [(b"a", [put(10, b"10")])], 9)[0] == (b"a", 10, b"10")


def test_merging_leaves_the_page_that_it_was_given_alone() -> None:
    """Readers hold it."""
    page = decode_page(DATA, b"page key")
    before = rows_of(decode_page(DATA, b"page key"))
    records: list[KeyVersions] = [
        (b"\1ba", [put(200)]),
        (b"\1bab", [put(201)]),
        (b"\1bb", [put(202, flags=1)]),
    ]
    for floor in (0, 300):
        merge(page, b"\1", records, frozen_seq=202, floor=floor, boundaries=ALWAYS)
        assert rows_of(page) == before
        assert page.seq == 99


def test_keys_that_begin_with_the_same_500_bytes_share_a_page() -> None:
    """The database cannot tell their pages apart."""
    prefix = encode_key(b"b", b"p" * 498)
    assert len(prefix) == PAGE_KEY_BYTES
    keys = [prefix + tail for tail in (b"", b"a", b"b", b"c")]
    for order in (keys, keys[::-1], [keys[2], keys[0], keys[3], keys[1]]):
        store = Store(ALWAYS, b"\1b")
        for seq, key in enumerate([*order, b"\1bz"], 1):
            store.flush([(key, [put(seq)])], seq, 0)
        assert [low for low, page in store.pages()] == [prefix, b"\1bz"]
        assert store.pages()[0][1].keys == keys


def test_a_boundary_key_that_comes_again_finds_its_page() -> None:
    """The page stayed when its first key went."""
    page = one_page([(b"c", [put(1)])], 1)
    records: list[KeyVersions] = [(b"b", [put(2)]), (b"d", [put(3)])]
    result = merge(page, b"b", records, frozen_seq=3, floor=0, boundaries=ALWAYS)
    assert [(low, page.keys) for low, page in result] == [(b"b", [b"b", b"c"]), (b"d", [b"d"])]


def test_a_page_without_rows_is_left_out() -> None:
    """The first when the smallest key is a boundary, and all of them when nothing is left."""
    result = merge(None, b"", [(b"b", [put(1)])], frozen_seq=1, floor=0, boundaries=ALWAYS)
    assert [(low, page.keys) for low, page in result] == [(b"b", [b"b"])]
    gone: list[KeyVersions] = [(b"b", [put(2, flags=TOMBSTONE)])]
    assert merge(result[0][1], b"b", gone, frozen_seq=2, floor=2, boundaries=ALWAYS) == []
    assert merge(None, b"", gone, frozen_seq=2, floor=2, boundaries=ALWAYS) == []
    assert merge(None, b"", [], frozen_seq=2, floor=2, boundaries=ALWAYS) == []


class Store:
    """Encoded pages by page key, and the flush that an engine makes of records: page by page."""

    def __init__(self, boundaries: Boundaries, low: bytes) -> None:
        self.boundaries = boundaries
        self.low = low
        self.data: dict[bytes, bytes | None] = {low: None}

    def flush(self, records: list[KeyVersions], frozen_seq: int, floor: int) -> None:
        lows = sorted(self.data)
        parts: dict[bytes, list[KeyVersions]] = {}
        for record in records:
            parts.setdefault(lows[bisect_right(lows, record[0]) - 1], []).append(record)
        for low, part in parts.items():
            data = self.data[low]
            page = decode_page(data, low) if data is not None else None
            result = merge(page, low, part, frozen_seq=frozen_seq, floor=floor, boundaries=self.boundaries)
            self.data[low] = None  # an interval of its own, with or without rows
            self.data.update((new_low, encode_page(page, new_low)) for new_low, page in result)

    def pages(self) -> list[tuple[bytes, DataPage]]:
        return [(low, decode_page(data, low)) for low, data in sorted(self.data.items()) if data is not None]


@pytest.mark.parametrize("seed", range(6))
def test_where_pages_begin_depends_on_the_keys_alone(seed: int) -> None:
    """Replicas flush when they like."""
    rng = random.Random(seed)
    keys = [encode_key(b"b", b"%d" % rng.randrange(10**6)) for _ in range(300)]
    keys += [encode_key(b"b", b"x" * rng.choice([400, 499, 600]) + b"%d" % at) for at in range(60)]
    boundaries = Boundaries(b"salt %d" % seed, rng.choice([2, 8, 64]))
    distinct = sorted(set(keys))
    expected = {page_key(key) for key in distinct if boundaries.is_boundary(key)}
    expected |= {b"\1b"} if page_key(distinct[0]) not in expected else set()
    for batch_max in (1, 10, 500):
        rng.shuffle(keys)
        store = Store(boundaries, b"\1b")
        seq = 0
        while seq < len(keys):
            batch = keys[seq : seq + rng.randint(1, batch_max)]
            versions: dict[bytes, list[page_format.Version]] = {}
            for key in batch:
                seq += 1
                versions.setdefault(key, []).insert(0, put(seq))
            store.flush(sorted(versions.items()), seq, rng.choice([0, seq // 2, 10**9]))
        assert {low for low, _ in store.pages()} == expected
        assert [key for _, page in store.pages() for key in dict.fromkeys(page.keys)] == distinct


class Model:
    """The rows of each key, newest first, and the seq that its page holds."""

    def __init__(self) -> None:
        self.rows: dict[bytes, list[page_format.Version]] = {}

    def add(self, key: bytes, version: page_format.Version) -> None:
        rows = self.rows.setdefault(key, [])
        if rows and rows[0][1] == version[1]:
            rows.pop(0)
        rows.insert(0, version)

    def retain(self, keys: list[bytes], floor: int) -> None:
        for key in keys:
            rows = self.rows.get(key, [])
            kept = [
                row for above, row in zip([None, *rows], rows, strict=False) if not above or above[1] > floor
            ]
            if kept and kept[0][3] & TOMBSTONE and kept[0][1] <= floor:
                kept = []
            self.rows[key] = kept


def without_last_tombstones(
    rows: dict[bytes, list[page_format.Row]], floor: int
) -> dict[bytes, list[page_format.Row]]:
    found = {}
    for key, versions in rows.items():
        while len(versions) > 1 and versions[-1][2] & TOMBSTONE and versions[-1][0] <= floor:
            versions = versions[:-1]
        found[key] = versions
    return found


@pytest.mark.parametrize("seed", range(40))
def test_merging_keeps_what_the_model_keeps(seed: int) -> None:
    """Inserts, overwrites, deletes, groups, floors that move, and frames that come again."""
    rng = random.Random(seed)
    names = [encode_key(b"b", b"%d" % number) for number in range(rng.choice([5, 40, 300]))]
    names += [encode_key(b"b", b"p" * 600 + b"%d" % number) for number in range(5)]
    store = Store(Boundaries(b"salt", rng.choice([1, 4, 64, 2**40])), b"\1b")
    model = Model()
    log: list[tuple[bytes, page_format.Version]] = []
    seq = floor = 0
    retention = rng.choice([0, 5, 60, 10**9])  # how far below the newest seq the floor is
    for _ in range(rng.choice([10, 60])):
        new: list[tuple[bytes, page_format.Version]] = []
        for _ in range(rng.choice([1, 5, 50])):
            group = rng.choice([1, 1, 1, 4])
            for frame in range(seq + 1, seq + group + 1):
                flags = rng.choice([0, 0, 0, REFERENCE, TOMBSTONE])
                metadata = rng.choice([b"", b"", b"\xa0"])
                value = b"%d" % frame * (not flags & TOMBSTONE)
                key = rng.choice(names)
                new.append((key, (frame, seq + group, 10 * seq, flags, metadata, value)))
            seq += group
        log += new
        floor = max(floor, seq - retention)
        again = log[-len(new) - rng.choice([0, 0, 30]) :]  # redo begins below what is new
        versions: dict[bytes, list[page_format.Version]] = {}
        for key, version in again:
            versions.setdefault(key, []).insert(0, version)
        for key, version in new:
            model.add(key, version)
        lows = sorted(store.data)
        touched = {bisect_right(lows, key) for key in versions}
        model.retain([key for key in model.rows if bisect_right(lows, key) in touched], floor)
        store.flush(sorted(versions.items()), seq, floor)

        found: dict[bytes, list[page_format.Row]] = {}
        highs = [*sorted(store.data)[1:], keys.KEY_END]
        for low, page in store.pages():
            assert page.keys == sorted(page.keys)
            assert low <= page.keys[0] <= page.keys[-1] < highs[bisect_right(highs, low)]
            for index, key in enumerate(page.keys):
                found.setdefault(key, []).append(page.row(index))
        # A tombstone at or below the floor went before the newer version came. A page that was left out has
        # forgotten what it held, so one that it had dropped may come again. Nobody sees either.
        wanted = {key: [row[1:] for row in rows] for key, rows in model.rows.items() if rows}
        assert without_last_tombstones(found, floor) == without_last_tombstones(wanted, floor)
        for key in rng.sample(names, 3):
            at = rng.randint(0, seq)
            expected = next((row[1:] for row in model.rows.get(key, []) if row[1] <= at), None)
            low = max(low for low in store.data if low <= key)
            data = store.data[low]
            page = decode_page(data, low) if data is not None else None
            index = page.version_at(key, at) if page is not None else -1
            row = page.row(index) if page is not None and index >= 0 else None
            is_idle = (
                row is None and expected is not None and expected[0] <= floor and expected[2] & TOMBSTONE
            )
            assert row == expected or is_idle


# ---------------------------------------------------------------------------- merging by column


@given(
    st.sets(st.integers(0, 300), max_size=80),
    st.sets(st.integers(0, 300), min_size=1),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["differ", "alike", "empty", "alike and then empty", "differ and then empty"]),
)
def test_merging_by_column_is_merging(
    held: set[int], put: set[int], stored: bool, overwrites: bool, sizes: str
) -> None:
    """Small values, and large ones by reference, in pages that may be divided; with new keys, or without;
    values of one size and without references, which are put in their places in a page's bytes; empty ones."""
    boundaries = Boundaries(b"salt", 7)
    if overwrites and held:
        put = {sorted(held)[number % len(held)] for number in put}
    low = b"\1b"

    def version(number: int, seq: int) -> Version:
        if sizes == "empty" or (seq >= 500 and sizes.endswith("then empty")):
            return seq, seq, seq * 7, 0, b"", b""
        if sizes.startswith("alike"):
            return seq, seq, seq * 7, 0, b"", b"%05d" % seq
        if number % 5 == 0 and sizes == "differ":
            return seq, seq, seq * 7, REFERENCE, b"", bytes(64)
        return seq, seq, seq * 7, 0, b"", b"v" * (number % 7)

    def keys_of(numbers: set[int]) -> list[bytes]:
        return [encode_key(b"b", b"%03d" % number) for number in sorted(numbers)]

    rows = [
        (key, *version(number, 10 + number)[1:])
        for key, number in zip(keys_of(held), sorted(held), strict=True)
    ]
    page = make_page(rows, 400) if rows else None
    if page is not None and stored:
        page = decode_page(encode_page(page, low), low)
    keys = keys_of(put)
    versions = [version(number, 500 + number) for number in sorted(put)]
    _, seqs, times, flags, _, values = zip(*versions, strict=True)
    columns = (array("Q", seqs), array("Q", times), bytearray(flags), list(values))
    before = None if page is None else encode_page(page, low)
    by_column = merge_puts(page, low, keys, columns, frozen_seq=900, boundaries=boundaries)
    assert before is None or page is None or encode_page(page, low) == before, "it was changed itself"
    one_by_one = merge(
        page,
        low,
        [(key, [each]) for key, each in zip(keys, versions, strict=True)],
        frozen_seq=900,
        floor=900,
        boundaries=boundaries,
    )
    expected = [(key, encode_page(each, key)) for key, each in one_by_one]
    assert [(key, encode_page(each, key)) for key, each in by_column] == expected
    assert [(key, stored_bytes(each, key)) for key, each in by_column] == expected
    assert all(each.has_mere_puts for _, each in by_column)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_puts_come_into_a_page_that_has_become_empty(count: int) -> None:
    """Of many changes to a page the first may be deletions of all that it has."""
    keys = [encode_key(b"b", b"%03d" % number) for number in range(count)]
    seqs = array("Q", range(501, 501 + count))
    columns = (seqs, seqs[:], bytearray(count), [b"v"] * count)
    empty = DataPage(400, [], array("Q"), array("Q"), bytearray(), [], [])
    for boundaries in (Boundaries(b"salt", 1), Boundaries(b"salt", 10**9)):
        expected = merge_puts(None, b"\1b", keys, columns, frozen_seq=900, boundaries=boundaries)
        merged = merge_puts(empty, b"\1b", keys, columns, frozen_seq=900, boundaries=boundaries)
        assert [(key, encode_page(each, key)) for key, each in merged] == [
            (key, encode_page(each, key)) for key, each in expected
        ]


@given(st.lists(st.binary(min_size=1, max_size=600)), st.sampled_from([1, 2, 7, 64, 10**9]))
def test_the_cuts_of_many_keys_are_those_of_each(keys: list[bytes], page_keys: int) -> None:
    boundaries = Boundaries(b"salt", page_keys)
    assert boundaries.cuts(keys) == [page_key(key) for key in keys if boundaries.is_boundary(key)]


@pytest.mark.parametrize("ends", [[2, 1, 3], [1, 2, 4], [0, 9, 3], [3, 3, 2]])
def test_a_page_whose_keys_do_not_follow_each_other_is_corrupt(ends: list[int]) -> None:
    """Under a good checksum, as nobody but us could write it."""
    data = bytearray(encode_page(make_page([(key, 1, 1, 0, b"", b"") for key in (b"a", b"b", b"c")]), b""))
    at = page_format.HEADER_BYTES + 3 * 16
    assert data[at : at + 12] == array("I", [1, 2, 3]).tobytes()
    data[at : at + 12] = array("I", ends).tobytes()
    covered = bytes(data[:12] + data[16:])
    data[12:16] = struct.pack("<I", crc32(covered))
    page = decode_page(bytes(data), b"")
    for read in (lambda: page.find(b"a"), lambda: page.keys, lambda: page.bounds(b"", None)):
        with pytest.raises(Corrupt):
            read()
