"""The two forms in which a shipped segment may be stored: raw, and as compressed blocks behind a table.

Always true: offsets and sizes are those of the raw segment; nothing is verified here but that a compressed
block is what its table says.
"""

from __future__ import annotations

from typing import Protocol

from lowwater.engine.log.compress import (
    block_decompressor,
    decompress_block,
    decompress_block_into,
    read_table,
)
from lowwater.errors import Corrupt
from lowwater.tiering.fetcher import FETCH_BYTES, Fetcher


class Form(Protocol):
    """How a segment is stored. Offsets and sizes are those of the raw segment."""

    def read(self, start: int, end: int, *, sequential: bool = False, passing: bool = False) -> bytes: ...

    def read_into(self, start: int, raw: memoryview) -> None:
        """What begins at `start`, the beginning of a block, and is wanted once: it is kept nowhere."""

    def stored_range(self, start: int, end: int) -> tuple[int, int]: ...

    stored_bytes: int


class RawForm:
    def __init__(self, fetcher: Fetcher, name: str, size: int) -> None:
        self._fetcher = fetcher
        self._name = name
        self.stored_bytes = size

    def read(self, start: int, end: int, *, sequential: bool = False, passing: bool = False) -> bytes:
        return self._fetcher.read(
            self._name, self.stored_bytes, start, end, sequential=sequential, passing=passing
        )

    def read_into(self, start: int, raw: memoryview) -> None:
        raw[:] = self.read(start, start + len(raw), passing=True)

    def stored_range(self, start: int, end: int) -> tuple[int, int]:
        return start, end


class _StoredFile:
    """What `read_table` needs of a file."""

    def __init__(self, fetcher: Fetcher, name: str, size: int) -> None:
        self._fetcher = fetcher
        self._name = name
        self._size = size

    def read_at(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self._size)
        return self._fetcher.read(self._name, self._size, min(offset, end), end)

    def size(self) -> int:
        return self._size


class CompressedForm:
    def __init__(self, fetcher: Fetcher, name: str, stored_bytes: int, size: int) -> None:
        self._fetcher = fetcher
        self._name = name
        self.stored_bytes = stored_bytes
        starts, block_bytes, raw_bytes = read_table(_StoredFile(fetcher, name, stored_bytes))
        if raw_bytes != size:
            raise Corrupt(f"the compressed segment has {raw_bytes:,} raw bytes instead of {size:,}", offset=0)
        self._starts, self._block_bytes, self._raw_bytes = starts, block_bytes, raw_bytes

    def _blocks(self, start: int, end: int) -> range:
        return range(start // self._block_bytes, -(-end // self._block_bytes))

    def stored_range(self, start: int, end: int) -> tuple[int, int]:
        blocks = self._blocks(start, end)
        return self._starts[blocks.start], self._starts[blocks.stop]

    def read(self, start: int, end: int, *, sequential: bool = False, passing: bool = False) -> bytes:
        if start == end:
            return b""
        blocks = self._blocks(start, end)
        decompressor = block_decompressor()
        parts = []
        step = max(1, FETCH_BYTES // self._block_bytes)
        for first in range(blocks.start, blocks.stop, step):
            last = min(first + step, blocks.stop)
            stored_start = self._starts[first]
            stored = self._fetcher.read(
                self._name,
                self.stored_bytes,
                stored_start,
                self._starts[last],
                sequential=sequential,
                passing=passing,
            )
            for block in range(first, last):
                at, stop = self._starts[block] - stored_start, self._starts[block + 1] - stored_start
                raw_bytes = min(self._block_bytes, self._raw_bytes - block * self._block_bytes)
                parts.append(decompress_block(decompressor, stored[at:stop], raw_bytes, self._starts[block]))
        parts[-1] = parts[-1][: end - (blocks.stop - 1) * self._block_bytes]
        parts[0] = parts[0][start - blocks.start * self._block_bytes :]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, start: int, raw: memoryview) -> None:
        block_bytes, blocks = self._block_bytes, self._blocks(start, start + len(raw))
        assert start == blocks.start * block_bytes
        decompressor = block_decompressor()
        step = max(1, FETCH_BYTES // block_bytes)
        for first in range(blocks.start, blocks.stop, step):
            last = min(first + step, blocks.stop)
            stored_start = self._starts[first]
            stored = memoryview(
                self._fetcher.read(
                    self._name, self.stored_bytes, stored_start, self._starts[last], passing=True
                )
            )
            for block in range(first, last):
                data = stored[self._starts[block] - stored_start : self._starts[block + 1] - stored_start]
                raw_bytes = min(block_bytes, self._raw_bytes - block * block_bytes)
                at = block * block_bytes - start
                into = raw[at : at + block_bytes]
                if len(into) == raw_bytes:
                    decompress_block_into(decompressor, data, into, self._starts[block])
                else:
                    whole = decompress_block(decompressor, bytes(data), raw_bytes, self._starts[block])
                    into[:] = whole[: len(into)]
