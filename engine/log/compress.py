"""Segments compressed for the archive: independent zstd frames, found through a table at the end.

Always true:
  - any zstd decompresses the file to the raw segment, and all hashes inside are over the raw bytes;
  - each block of the segment, as its header counts them, is one frame: a ranged read decompresses the blocks
    that it touches and no more, and the footer has a hash of each block of the body;
  - stored bytes are nobody's identity, because another zstd may compress the same segment to others. The file
    ends with their BLAKE3, so that damage is found without decompressing anything;
  - memory is a few blocks, whatever the file claims: sizes are compared with the limits before they are used.

`docs/FORMAT.md` has the layout. The table is the one of the Zstandard Seekable Format.
"""

from __future__ import annotations

import errno
import os
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import zstandard
from blake3 import blake3

from lowwater.engine.format.format import BLOCK_BYTES_MAX, HEADER_BYTES, HEADER_MAGIC, SegmentHeader
from lowwater.engine.log.directory import read_trailer, segment_name, typed_errors
from lowwater.engine.log.scan import READ_BYTES
from lowwater.engine.seams.seams import File, Files, Readable, SyncMode, write_in_turn
from lowwater.errors import Corrupt, NewerVersion, NotLowwater

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
SEEK_TABLE_MAGIC = 0x184D2A5E
SEEK_FOOTER_MAGIC = 0x8F92EAB1
STORED_HASH_MAGIC = 0x184D2A50

SKIPPABLE_HEAD = struct.Struct("<II")  # magic, bytes that follow
SEEK_ENTRY = struct.Struct("<II")  # compressed size, raw size
SEEK_FOOTER = struct.Struct("<IBI")  # number of entries, descriptor, magic
STORED_HASH = struct.Struct("<II32s")  # a skippable frame of its own: magic, 32, BLAKE3

assert SEEK_FOOTER.size == 9
assert STORED_HASH.size == 40

# One is read while the footer's block is looked at again and again; the rest serve binary searches.
CACHE_BLOCKS_MIN = 3
CACHE_BYTES = 2**22
# A block's first 128 KiB decompress from no more than this.
_PEEK_BYTES = 2**17 + 64


def stored_bytes_max(raw_bytes: int) -> int:
    """What a block may grow to. zstd's own bound is below this for every size."""
    return raw_bytes + raw_bytes // 128 + 512


def compressed_name(seq_first: int, seq_last: int) -> str:
    return f"{segment_name(seq_first, seq_last)}.zst"


# What text needs: most of the gain is that bytes that come often take fewer bits.
LEVEL = 3
# Without that both directions take a third of the time, and values that look like noise come out 2 % larger.
QUICK_LEVEL = -1
QUICK_SIZE_MAX = 1.05
"""How much larger a block may become that way."""
TRIAL_BLOCKS = 16
"""One of so many is compressed both ways, and decides on the others."""


def compress_segment(file: File, write: Callable[[bytes], None]) -> tuple[int, int]:
    """Give the compressed form of a sealed segment to `write`, piece by piece: (raw bytes, stored bytes)."""
    stored_bytes = 0
    for data in compressed_pieces(file):
        stored_bytes += len(data)
        write(data)
    return file.size(), stored_bytes


def compressed_pieces(file: Readable) -> Iterator[bytes]:
    """The compressed form of a sealed segment, piece by piece."""
    raw_bytes = file.size()
    block_bytes = SegmentHeader.decode(file.read_at(0, HEADER_BYTES)).block_bytes
    read_trailer(file, raw_bytes)
    slow, quick = (
        zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
        for level in (LEVEL, QUICK_LEVEL)
    )
    compressor = slow
    hasher = blake3()
    table = array("I")
    for number, offset in enumerate(range(0, raw_bytes, block_bytes)):
        block = file.read_at(offset, min(block_bytes, raw_bytes - offset))
        if len(block) != min(block_bytes, raw_bytes - offset):
            raise Corrupt("the segment is shorter than it was", offset=offset + len(block))
        if not number % TRIAL_BLOCKS:
            compressor = quick if _is_enough(quick, slow, block) else slow
        frame = compressor.compress(block)
        hasher.update(frame)
        yield frame
        table.extend((len(frame), len(block)))
    entries = table.tobytes()
    head = SKIPPABLE_HEAD.pack(SEEK_TABLE_MAGIC, len(entries) + SEEK_FOOTER.size)
    end = head + entries + SEEK_FOOTER.pack(len(table) // 2, 0, SEEK_FOOTER_MAGIC)
    hasher.update(end)
    yield end
    yield STORED_HASH.pack(STORED_HASH_MAGIC, 32, hasher.digest())


def _is_enough(quick: zstandard.ZstdCompressor, slow: zstandard.ZstdCompressor, block: bytes) -> bool:
    return len(quick.compress(block)) <= QUICK_SIZE_MAX * len(slow.compress(block))


def verify_stored(file: File) -> None:
    """Compare the BLAKE3 that ends a compressed segment with its stored bytes. Decompresses nothing."""
    size = file.size()
    magic, length, expected = _read_end(file, size)
    if (magic, length) != (STORED_HASH_MAGIC, 32):
        raise _not_ours(file)
    hasher = blake3()
    stop = size - STORED_HASH.size
    for offset in range(0, stop, READ_BYTES):
        hasher.update(file.read_at(offset, min(READ_BYTES, stop - offset)))
    if hasher.digest() != expected:
        raise Corrupt("the hash of the stored bytes does not match", offset=stop)


def _read_end(file: File, size: int) -> tuple[int, int, bytes]:
    if file.read_at(0, len(ZSTD_MAGIC)) != ZSTD_MAGIC:
        raise NotLowwater("the file is empty" if not size else "this is not a compressed segment")
    if size < STORED_HASH.size:
        raise _not_ours(file)
    magic, length, expected = STORED_HASH.unpack(file.read_at(size - STORED_HASH.size, STORED_HASH.size))
    return magic, length, expected


def _not_ours(file: Readable) -> Corrupt | NotLowwater:
    """Why a file begins as zstd and does not end as a compressed segment: damage, or it never was one."""
    try:
        with zstandard.ZstdDecompressor(max_window_size=BLOCK_BYTES_MAX).stream_reader(
            file.read_at(0, _PEEK_BYTES)
        ) as reader:
            start = reader.read(len(HEADER_MAGIC))
    except zstandard.ZstdError:
        start = b""
    if start == HEADER_MAGIC:
        return Corrupt("the compressed segment does not end as one: it was cut short, or its end is damaged")
    return NotLowwater("the file is compressed, and is no segment or only the beginning of one")


class CompressedSegment:
    """A compressed segment that reads like the file it was made from. Not for several threads at once."""

    def __init__(self, stored: File) -> None:
        self.stored = stored
        _read_end(stored, stored.size())
        self._starts, self._block_bytes, self._raw_bytes = read_table(stored)
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._cache_blocks_max = max(CACHE_BLOCKS_MIN, CACHE_BYTES // self._block_bytes)
        self._decompressor = block_decompressor()
        header = SegmentHeader.decode(self.read_at(0, HEADER_BYTES))
        if len(self._starts) > 2 and header.block_bytes != self._block_bytes:
            raise Corrupt("the table of the compressed segment has other blocks than its header", offset=0)
        if self._raw_bytes > header.block_bytes * (len(self._starts) - 1):
            raise Corrupt("the compressed segment has a block larger than its header says", offset=0)

    def read_at(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self._raw_bytes)
        if offset >= end:
            return b""
        first, last = offset // self._block_bytes, (end - 1) // self._block_bytes
        if first == last:
            start = offset - first * self._block_bytes
            return self._block(first)[start : start + end - offset]
        joined = b"".join([self._block(block) for block in range(first, last + 1)])
        start = offset - first * self._block_bytes
        return joined[start : start + end - offset]

    def size(self) -> int:
        return self._raw_bytes

    def close(self) -> None:
        self._cache.clear()
        self.stored.close()

    def write_at(self, offset: int, buffers: Sequence[bytes], sync: SyncMode = "none") -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def write_each(self, offset: int, parts: Sequence[bytes], sync: SyncMode) -> None:
        write_in_turn(self, offset, parts, sync)

    def sync(self, mode: SyncMode) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def truncate(self, size: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def _block(self, block: int) -> bytes:
        cached = self._cache.get(block)
        if cached is not None:
            self._cache.move_to_end(block)
            return cached
        start, end = self._starts[block], self._starts[block + 1]
        raw_bytes = min(self._block_bytes, self._raw_bytes - block * self._block_bytes)
        data = self.stored.read_at(start, end - start)
        raw = decompress_block(self._decompressor, data, raw_bytes, start)
        self._cache[block] = raw
        while len(self._cache) > self._cache_blocks_max:
            self._cache.popitem(last=False)
        return raw


def block_decompressor() -> zstandard.ZstdDecompressor:
    """One for the blocks of segments. Not for several threads at once."""
    return zstandard.ZstdDecompressor(max_window_size=BLOCK_BYTES_MAX)


def decompress_block(
    decompressor: zstandard.ZstdDecompressor, data: bytes, raw_bytes: int, offset: int
) -> bytes:
    """The raw bytes of a block that is stored at `offset`."""
    try:
        # The decompressor allocates what a frame asks for, so a frame is asked first.
        _check_frame(data, raw_bytes, offset)
        raw: bytes = decompressor.decompress(data, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt("a compressed block is damaged", offset=offset) from error
    if len(raw) != raw_bytes:
        raise Corrupt("a compressed block is not of the size that the table says", offset=offset)
    return raw


def decompress_block_into(
    decompressor: zstandard.ZstdDecompressor, data: bytes | memoryview, raw: memoryview, offset: int
) -> None:
    """Decompress a block that is stored at `offset` into `raw`, which takes all of it."""
    try:
        _check_frame(data, len(raw), offset)
        with decompressor.stream_reader(data) as reader:
            count = reader.readinto(raw)
    except zstandard.ZstdError as error:
        raise Corrupt("a compressed block is damaged", offset=offset) from error
    if count != len(raw):
        raise Corrupt("a compressed block is not of the size that the table says", offset=offset)


def _check_frame(data: bytes | memoryview, raw_bytes: int, offset: int) -> None:
    frame = zstandard.get_frame_parameters(data)
    if frame.content_size != raw_bytes or frame.window_size > BLOCK_BYTES_MAX or frame.dict_id:
        raise Corrupt("a compressed block is not of the size that the table says", offset=offset)


def read_table(file: Readable) -> tuple[array[int], int, int]:
    """(where each stored block begins, and the last ends; raw bytes of a block; raw bytes of all). Of a
    sound file it reads nothing but the end."""
    size = file.size()
    footer_start = size - STORED_HASH.size - SEEK_FOOTER.size
    if footer_start < SKIPPABLE_HEAD.size:
        raise _not_ours(file)
    magic, length, _ = STORED_HASH.unpack(file.read_at(size - STORED_HASH.size, STORED_HASH.size))
    if (magic, length) != (STORED_HASH_MAGIC, 32):
        raise _not_ours(file)
    count, descriptor, magic = SEEK_FOOTER.unpack(file.read_at(footer_start, SEEK_FOOTER.size))
    if magic != SEEK_FOOTER_MAGIC:
        raise _not_ours(file)
    if descriptor:
        raise NewerVersion(f"a table with the descriptor {descriptor:#x} is not known to this version")
    table_start = footer_start - SEEK_ENTRY.size * count
    stop = table_start - SKIPPABLE_HEAD.size
    if not count or stop <= 0:
        raise Corrupt("the table of the compressed segment has an impossible size", offset=footer_start)
    data = file.read_at(stop, footer_start - stop)
    expected = SKIPPABLE_HEAD.pack(SEEK_TABLE_MAGIC, footer_start - table_start + SEEK_FOOTER.size)
    if len(data) != footer_start - stop or data[: len(expected)] != expected:
        raise Corrupt("the table of the compressed segment does not begin where it says", offset=stop)
    starts = array("Q", [0])
    start = raw_bytes = 0
    impossible = Corrupt("the table of the compressed segment has an impossible entry", offset=stop)
    block_bytes, last = SEEK_ENTRY.unpack_from(data, len(expected))[1], count - 1
    for block, (stored, raw) in enumerate(SEEK_ENTRY.iter_unpack(data[len(expected) :])):
        if not 0 < stored <= stored_bytes_max(raw):
            raise impossible
        if raw != block_bytes if block < last else not 0 < raw <= block_bytes:
            raise impossible
        start += stored
        raw_bytes += raw
        starts.append(start)
    if start != stop or block_bytes > BLOCK_BYTES_MAX:
        raise Corrupt("the table of the compressed segment does not fit its blocks", offset=stop)
    return starts, block_bytes, raw_bytes


def open_segment_file(files: Files, path: str) -> File:
    """Open a segment for reading, raw or compressed: its first bytes tell which it is."""
    with typed_errors(path, "open the segment"):
        file = files.open(path)
        try:
            if file.read_at(0, len(ZSTD_MAGIC)) == ZSTD_MAGIC:
                return CompressedSegment(file)
        except BaseException:
            file.close()
            raise
        return file
