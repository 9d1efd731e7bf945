"""Parts of sealed segments, verified without the rest of them.

Always true: a byte is returned only after the block that it lies in was hashed. The hashes of the blocks add
up to the segment's, which stands in the trailer under a checksum; nothing else of the footer is read.
"""

from __future__ import annotations

from blake3 import blake3

from lowwater.engine.format import format
from lowwater.engine.format.format import SegmentHeader
from lowwater.engine.log.directory import read_trailer
from lowwater.engine.log.footer import segment_hash
from lowwater.engine.seams.seams import File
from lowwater.errors import Corrupt

_HASH_BYTES = 32


class VerifiedBlocks:
    """A sealed segment, whose file belongs to the caller."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._block_bytes = SegmentHeader.decode(file.read_at(0, format.HEADER_BYTES)).block_bytes
        trailer = read_trailer(file, file.size())
        self._body_bytes = trailer.body_bytes
        start = trailer.section_offsets().block_hashes
        stored = file.read_at(start, _HASH_BYTES * trailer.block_count)
        self._hashes = [stored[at : at + _HASH_BYTES] for at in range(0, len(stored), _HASH_BYTES)]
        if segment_hash(self._hashes) != trailer.segment_hash:
            raise Corrupt("the block hashes do not add up to the segment's hash", offset=start)
        if -(-trailer.body_bytes // self._block_bytes) != len(self._hashes):
            raise Corrupt("the number of block hashes does not fit the segment's size", offset=start)

    def read(self, start: int, end: int) -> bytes:
        """What lies from `start` to below `end`."""
        if not 0 <= start <= end <= self._body_bytes:
            raise Corrupt("a value is said to lie beyond the end of its segment", offset=start)
        if start == end:
            return b""
        size = self._block_bytes
        first, last = start // size, -(-end // size)
        offset = first * size
        data = self._file.read_at(offset, min(last * size, self._body_bytes) - offset)
        view = memoryview(data)
        for block in range(first, last):
            at = block * size - offset
            if blake3(view[at : at + size]).digest() != self._hashes[block]:
                raise Corrupt("a block's hash does not match", offset=offset + at)
        return data[start - offset : end - offset]
