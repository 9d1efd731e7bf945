"""Compressed segments: any zstd decompresses them, readers read them in place, and believe nothing."""

from __future__ import annotations

import importlib.util
import random
import shutil
import struct
import subprocess
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zstandard
from blake3 import blake3

from lowwater.engine.format import format
from lowwater.engine.format.entries import decode_frames
from lowwater.engine.log import compress
from lowwater.engine.log.check import check_segment
from lowwater.engine.log.compress import (
    CompressedSegment,
    compress_segment,
    compressed_name,
    open_segment_file,
    verify_stored,
)
from lowwater.engine.log.reader import SealedReader
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.errors import Corrupt, NewerVersion, NotFound, NotLowwater


def _load_make() -> ModuleType:
    path = Path(__file__).parent.parent / "golden" / "make.py"
    spec = importlib.util.spec_from_file_location("golden_make", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _load_make()


def segment(count: int, value_bytes: int, **settings: int) -> bytes:
    values = random.Random(count)
    puts = [
        make.put(
            2 + at,
            f"key-{at}",
            values.randbytes(value_bytes // 2) + bytes(value_bytes // 2),
            time_us=make.TIME_US,
        )
        for at in range(count)
    ]
    seal = make.seal(count + 2, 1) | {"time_us": make.TIME_US}
    ((_, data),) = make.write_log([make.create(**settings), *puts, seal]).items()
    return bytes(data)


def compressed(raw: bytes) -> bytes:
    parts: list[bytes] = []
    assert compress_segment(make.file_of(raw), parts.append) == (len(raw), sum(map(len, parts)))
    return b"".join(parts)


def rehashed(stored: bytes) -> bytes:
    """With the stored hash that belongs to what comes before it, as somebody with bad intentions would."""
    body = stored[: -compress.STORED_HASH.size]
    return body + compress.STORED_HASH.pack(compress.STORED_HASH_MAGIC, 32, blake3(body).digest())


RAW = segment(40, 700, block_bytes=2048)
STORED = compressed(RAW)
TABLE_END = len(STORED) - compress.STORED_HASH.size - compress.SEEK_FOOTER.size
BLOCKS = compress.SEEK_FOOTER.unpack_from(STORED, TABLE_END)[0]
TABLE = TABLE_END - compress.SEEK_ENTRY.size * BLOCKS


def opened(stored: bytes) -> CompressedSegment:
    return CompressedSegment(make.file_of(stored))


# ---------------------------------------------------------------------------- the form


@pytest.mark.parametrize(
    ("count", "value_bytes", "block_bytes"),
    [(1, 0, 262_144), (40, 700, 2048), (3, 1024, 1024), (200, 3000, 65_536), (30, 100_000, 262_144)],
)
def test_any_zstd_decompresses_a_segment_to_the_raw_bytes(
    count: int, value_bytes: int, block_bytes: int
) -> None:
    """Who has lost everything but the archive and a command line can still read it."""
    raw = segment(count, value_bytes, block_bytes=block_bytes)
    stored = compressed(raw)
    assert make.decompress(stored) == raw
    verify_stored(make.file_of(stored))
    file = opened(stored)
    assert file.size() == len(raw)
    assert file.read_at(0, len(raw) + 1) == raw


@pytest.mark.skipif(shutil.which("zstd") is None, reason="there is no zstd command here")
def test_the_zstd_command_decompresses_a_segment(tmp_path: Path) -> None:
    """It skips the table and the hash, and knows nothing of either."""
    path = tmp_path / compressed_name(1, 42)
    path.write_bytes(STORED)
    done = subprocess.run(["zstd", "-d", "-c", str(path)], capture_output=True, check=True)
    assert done.stdout == RAW


def test_a_compressed_segment_is_laid_out_as_the_document_says() -> None:
    """By hand, without the code under test."""
    at, raw = 0, b""
    sizes = list(struct.iter_unpack("<II", STORED[TABLE:TABLE_END]))
    for stored_bytes, raw_bytes in sizes:
        block = STORED[at : at + stored_bytes]
        assert zstandard.get_frame_parameters(block).content_size == raw_bytes
        raw += zstandard.ZstdDecompressor().decompress(block, allow_extra_data=False)
        at += stored_bytes
    assert raw == RAW
    assert [raw_bytes for _, raw_bytes in sizes[:-1]] == [2048] * (len(sizes) - 1)
    assert struct.unpack_from("<II", STORED, at) == (0x184D2A5E, 8 * len(sizes) + 9)
    assert at + 8 == TABLE
    assert struct.unpack_from("<IBI", STORED, TABLE_END) == (len(sizes), 0, 0x8F92EAB1)
    assert struct.unpack_from("<II", STORED, len(STORED) - 40) == (0x184D2A50, 32)
    assert STORED[-32:] == blake3(STORED[:-40]).digest()
    # Tools for the seekable format find the table at the end of what comes before the hash.
    assert STORED[:-40].endswith(struct.pack("<I", 0x8F92EAB1))


def test_levels_change_stored_bytes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they may change at any time: stored bytes are nobody's identity."""
    forms = set()
    monkeypatch.setattr(compress, "QUICK_SIZE_MAX", 0)
    for level in (1, 3, 19):
        monkeypatch.setattr(compress, "LEVEL", level)
        forms.add(compressed(RAW))
    assert len(forms) == 3
    assert {opened(form).read_at(0, len(RAW)) for form in forms} == {RAW}


def test_only_what_looks_like_noise_is_compressed_quickly() -> None:
    """Text would become a third larger. Noise does not, and is read in a third of the time."""
    block_bytes = 2048
    noise = [make.put(2 + at, f"key-{at}", random.Random(at).randbytes(900)) for at in range(100)]
    words = [str(number).encode() for number in range(1000, 1100)]
    text = [
        make.put(102 + at, f"key-{at}", b" ".join(random.Random(at).choices(words, k=180)))
        for at in range(100)
    ]
    entries = [each | {"time_us": make.TIME_US} for each in (*noise, *text, make.seal(202, 1))]
    ((_, raw),) = make.write_log([make.create(block_bytes=block_bytes), *entries]).items()
    raw = bytes(raw)
    stored, at, levels = compressed(raw), 0, []
    for start in range(0, len(raw), block_bytes):
        block = raw[start : start + block_bytes]
        forms = {
            level: zstandard.ZstdCompressor(level=level, write_checksum=True).compress(block)
            for level in (compress.QUICK_LEVEL, compress.LEVEL)
        }
        (level,) = (each for each, form in forms.items() if stored.startswith(form, at))
        levels.append(level)
        at += len(forms[level])
    switch = levels.index(compress.LEVEL)
    assert switch == 48
    assert set(levels[:switch]) == {compress.QUICK_LEVEL}
    assert set(levels[switch : switch + 32]) == {compress.LEVEL}
    assert make.decompress(stored) == raw


def test_only_sealed_segments_are_compressed() -> None:
    """What may still grow has no place in an archive."""
    for raw, error in (
        (RAW[:-1], Corrupt),
        (RAW[:3000], Corrupt),
        (b"", NotLowwater),
        (STORED, NotLowwater),
    ):
        with pytest.raises(error):
            compress_segment(make.file_of(raw), lambda _: None)
    damaged = bytearray(RAW)
    damaged[-1] ^= 1
    with pytest.raises(Corrupt):
        compress_segment(make.file_of(bytes(damaged)), lambda _: None)


def test_compressing_and_reading_take_memory_for_a_few_blocks_only() -> None:
    """A node ships segments of 2 GiB beside its work."""
    raw = segment(60, 200_000, block_bytes=65_536)
    raw_file = make.file_of(raw)
    stored = make.file_of(compressed(raw))
    tracemalloc.start()
    try:
        compress_segment(raw_file, lambda _: None)
        verify_stored(stored)
        reader = SealedReader(CompressedSegment(stored))
        for chunk in reader.chunks_after(0):
            assert len(chunk.data) < 3 * 2**20
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(raw) > 12_000_000
    assert peak < 10_000_000


# ---------------------------------------------------------------------------- reading in place


def test_every_range_of_a_compressed_segment_is_that_of_the_raw_one() -> None:
    """Readers do not know which of the two they have."""
    file = opened(STORED)
    ranges = random.Random(7)
    for _ in range(2000):
        offset, size = ranges.randrange(len(RAW) + 3000), ranges.choice([0, 1, 8, 41, 2048, 9000, len(RAW)])
        assert file.read_at(offset, size) == RAW[offset : offset + size]
    for offset in (0, 2047, 2048, 2049, len(RAW) - 1, len(RAW)):
        for size in (0, 1, 2, 2048, 4097):
            assert file.read_at(offset, size) == RAW[offset : offset + size]


def test_a_compressed_segment_reads_and_checks_as_the_raw_one() -> None:
    """By the very same code."""

    def entries(file: Any) -> Iterator[Any]:
        for chunk in SealedReader(file).chunks_after(0):
            yield from decode_frames(chunk.data, chunk.start, chunk.end, verify=False)

    assert list(entries(opened(STORED))) == list(entries(make.file_of(RAW)))
    assert list(check_segment(files_with(STORED), "segment")) == []


def test_a_small_read_decompresses_one_block() -> None:
    """A key is looked up in an archive of terabytes."""

    class Counting:
        def __init__(self) -> None:
            self.file = make.file_of(STORED)
            self.read: list[int] = []

        def read_at(self, offset: int, size: int) -> bytes:
            self.read.append(size)
            data: bytes = self.file.read_at(offset, size)
            return data

        def size(self) -> int:
            return len(STORED)

    counting = Counting()
    file = CompressedSegment(counting)  # type: ignore[arg-type]
    counting.read.clear()
    for _ in range(3):
        file.read_at(10 * 2048 + 5, 100)
    assert len(counting.read) == 1
    assert counting.read[0] < compress.stored_bytes_max(2048)


def test_the_cache_is_bounded() -> None:
    """However large the segment is, and whatever is read of it."""
    raw = segment(50, 400_000, block_bytes=2**20)
    file = opened(compressed(raw))
    file.read_at(0, len(raw))
    assert sum(map(len, file._cache.values())) <= compress.CACHE_BYTES
    big = opened(compressed(segment(2, 10_000, block_bytes=2**24)))
    assert big._cache_blocks_max >= compress.CACHE_BLOCKS_MIN


def test_a_compressed_segment_cannot_be_written() -> None:
    """Segments never change."""
    file = opened(STORED)
    with pytest.raises(OSError, match="Errno"):
        file.write_at(0, [b"x"])
    with pytest.raises(OSError, match="Errno"):
        file.truncate(0)
    with pytest.raises(OSError, match="Errno"):
        file.sync("fsync")
    file.close()
    with pytest.raises(OSError, match="Errno"):
        file.read_at(0, 1)


# ---------------------------------------------------------------------------- opening by content


def files_with(data: bytes) -> MemoryFiles:
    files = MemoryFiles()
    files.open("segment", create=True).write_at(0, [data])
    return files


def test_a_segment_file_is_opened_by_what_it_holds() -> None:
    """Names are changed by people, contents are not."""
    for data in (RAW, STORED):
        file = open_segment_file(files_with(data), "segment")
        assert isinstance(file, CompressedSegment) == (data is STORED)
        assert file.read_at(0, file.size()) == RAW
        file.close()
    with pytest.raises(NotFound):
        open_segment_file(MemoryFiles(), "segment")


def test_other_compressed_files_are_not_taken_for_segments() -> None:
    """A backup beside the segments is no damage."""
    other = zstandard.ZstdCompressor().compress(b"something else " * 1000)
    for data in (other, other + STORED[TABLE - 8 :], compress.ZSTD_MAGIC, compress.ZSTD_MAGIC + bytes(100)):
        with pytest.raises((NotLowwater, Corrupt)) as caught:
            open_segment_file(files_with(data), "segment")
        assert caught.value.path == "segment"
    with pytest.raises(NotLowwater):
        open_segment_file(files_with(other), "segment")
    for data in (b"", b"PK\x03\x04", RAW):
        with pytest.raises(NotLowwater):
            opened(data)
        with pytest.raises(NotLowwater):
            verify_stored(make.file_of(data))


def test_a_compressed_segment_that_was_cut_short_is_corrupt() -> None:
    """It is ours, so it is damage, and not a file of another format."""
    for size in (len(STORED) - 1, len(STORED) - 40, TABLE_END, TABLE, len(STORED) // 2, 2000):
        with pytest.raises(Corrupt):
            opened(STORED[:size])
        with pytest.raises(Corrupt):
            verify_stored(make.file_of(STORED[:size]))


def test_a_segment_of_a_newer_version_is_newer_when_it_is_compressed() -> None:
    """The reader must say "upgrade", not "damaged"."""
    for case in ("future-minor", "future-major", "future-segment-flag"):
        folder = Path(__file__).parent.parent / "golden" / case
        raw = next(folder.glob("*.log")).read_bytes()
        block = zstandard.ZstdCompressor(write_content_size=True).compress(raw)
        table = compress.SKIPPABLE_HEAD.pack(compress.SEEK_TABLE_MAGIC, 17)
        table += compress.SEEK_ENTRY.pack(len(block), len(raw))
        table += compress.SEEK_FOOTER.pack(1, 0, compress.SEEK_FOOTER_MAGIC)
        with pytest.raises(NewerVersion):
            opened(rehashed(block + table + bytes(40)))


# ---------------------------------------------------------------------------- nothing is believed


def test_the_stored_hash_finds_what_decompresses_all_the_same() -> None:
    """A flip in what zstd skips changes no raw byte, and is damage of the object."""
    damaged = bytearray(STORED)
    damaged[-1] ^= 1
    with pytest.raises(Corrupt, match="stored bytes"):
        verify_stored(make.file_of(bytes(damaged)))
    assert opened(bytes(damaged)).read_at(0, len(RAW)) == RAW
    findings = list(check_segment(files_with(bytes(damaged)), "segment"))
    assert [finding.severity for finding in findings] == ["error"]


def table_with(entries: list[tuple[int, int]], *, descriptor: int = 0, count: int | None = None) -> bytes:
    data = compress.SKIPPABLE_HEAD.pack(compress.SEEK_TABLE_MAGIC, 8 * len(entries) + 9)
    data += b"".join(compress.SEEK_ENTRY.pack(*entry) for entry in entries)
    data += compress.SEEK_FOOTER.pack(
        len(entries) if count is None else count, descriptor, compress.SEEK_FOOTER_MAGIC
    )
    return rehashed(STORED[: TABLE - 8] + data + bytes(40))


ENTRIES = list(compress.SEEK_ENTRY.iter_unpack(STORED[TABLE:TABLE_END]))


def test_a_table_that_was_made_up_is_corrupt() -> None:
    """It is not covered by any hash of the segment, so each of its numbers is compared with the others."""
    assert table_with(ENTRIES) == STORED
    first, second = ENTRIES[0], ENTRIES[1]
    last_stored, last_raw = ENTRIES[-1]
    made_up = [
        [(first[0] + 1, first[1]), *ENTRIES[1:]],
        [(first[0] + 1, first[1]), (second[0] - 1, second[1]), *ENTRIES[2:]],
        [(first[0], first[1] + 1), *ENTRIES[1:]],
        [*ENTRIES[:-1], (last_stored, last_raw + 1)],
        [*ENTRIES[:-1], (last_stored, 0)],
        [*ENTRIES[:-1], (last_stored, 2**32 - 1)],
        [*ENTRIES, (0, 1)],
        ENTRIES[:-1],
        ENTRIES[1:],
        [(0, first[1]), (first[0] + second[0], second[1]), *ENTRIES[2:]],
        [(stored, 2**32 - 1) for stored, _ in ENTRIES],
        [(2**32 - 1, raw) for _, raw in ENTRIES],
        [(sum(stored for stored, _ in ENTRIES), len(RAW))],
    ]
    for entries in made_up:
        with pytest.raises(Corrupt):
            opened(table_with(entries)).read_at(0, len(RAW))
    for count in (0, 1, len(ENTRIES) - 1, len(ENTRIES) + 1, 2**32 - 1):
        with pytest.raises(Corrupt):
            opened(table_with(ENTRIES, count=count)).read_at(0, len(RAW))
    for descriptor in (0x80, 0x01, 0x04):
        with pytest.raises(NewerVersion):
            opened(table_with(ENTRIES, descriptor=descriptor))


def test_a_bomb_is_refused_before_it_is_decompressed() -> None:
    """A few kilobytes of zstd can stand for terabytes of zeros."""
    compressor = zstandard.ZstdCompressor(level=3, write_content_size=True)
    silent = zstandard.ZstdCompressor(level=3, write_content_size=False)
    bomb = compressor.compress(bytes(200_000_000))
    for frame in (bomb, silent.compress(bytes(200_000_000)), silent.compress(bytes(2048))):
        entries = [ENTRIES[0], (len(frame), ENTRIES[1][1]), *ENTRIES[2:]]
        start, end = ENTRIES[0][0], ENTRIES[0][0] + ENTRIES[1][0]
        blocks = STORED[:start] + frame + STORED[end : TABLE - 8]
        stored = rehashed(blocks + table_with(entries)[TABLE - 8 :])
        tracemalloc.start()
        try:
            with pytest.raises(Corrupt):
                opened(stored).read_at(2048, 1)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1_000_000


def test_a_block_with_a_window_beyond_the_limit_is_refused() -> None:
    """The decompressor would allocate the window."""
    # A frame header that is not a single segment, with a window of 1 GiB and the right content size.
    raw = RAW[2048:4096]
    header = compress.ZSTD_MAGIC + bytes([0b01_0_0_0_0_00, 20 << 3]) + struct.pack("<H", 2048 - 256)
    block = header + struct.pack("<I", 1 | 2048 << 3)[:3] + raw
    assert zstandard.ZstdDecompressor(max_window_size=2**31).decompress(block) == raw
    entries = [ENTRIES[0], (len(block), 2048), *ENTRIES[2:]]
    start, end = ENTRIES[0][0], ENTRIES[0][0] + ENTRIES[1][0]
    stored = rehashed(STORED[:start] + block + STORED[end : TABLE - 8] + table_with(entries)[TABLE - 8 :])
    with pytest.raises(Corrupt):
        opened(stored).read_at(2048, 1)


def test_a_block_that_holds_other_frames_is_found_by_the_segment() -> None:
    """Valid zstd, a valid table and a valid stored hash make no history."""
    other = compressed(RAW.replace(b"key-7", b"key-8"))
    verify_stored(make.file_of(other))
    with pytest.raises(Corrupt):
        list(SealedReader(opened(other)).chunks_after(0))
    assert any(finding.severity == "error" for finding in check_segment(files_with(other), "segment"))


def test_a_block_may_not_grow_beyond_what_compressing_can_make_of_it() -> None:
    """zstd's own bound lies below ours for every size of a block."""
    for size in (1, 100, 1024, 2**16, 2**17 - 1, 2**17, 2**20, format.BLOCK_BYTES_MAX):
        bound = size + (size >> 8) + ((2**17 - size) >> 11 if size < 2**17 else 0)
        assert bound <= compress.stored_bytes_max(size)
    noise = random.Random(1).randbytes(2**20)
    assert len(zstandard.ZstdCompressor(level=1).compress(noise)) <= compress.stored_bytes_max(len(noise))
