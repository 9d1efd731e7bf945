"""The live tail: the newest durable frames, in memory, for readers that keep up.

Always true: what is in the ring is durable; its chunks follow one another without a gap, each naming the
seq before its first; the ring holds at most `bytes_max` and `frames_max`, or one chunk. Its owner's lock
guards it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

# What a chunk costs besides its bytes, so that many tiny chunks count for what they take.
CHUNK_OVERHEAD_BYTES = 300


class Chunk(NamedTuple):
    """Whole frames, in order: `data[start:end]`."""

    seq_before: int
    seq_last: int
    data: bytes
    start: int
    end: int
    verified: bool


class Ring:
    def __init__(self, bytes_max: int, frames_max: int | None = None) -> None:
        self._bytes_max = bytes_max
        self._frames_max = frames_max
        self._frame_counts: list[int] = []
        self._frames = 0
        self._chunks: list[Chunk] = []
        self._seqs_last: list[int] = []
        self._evicted = 0  # how many at the head of the lists are gone already
        self.bytes = 0

    def append(self, chunk: Chunk, frame_count: int) -> None:
        assert not self._chunks or chunk.seq_before == self._seqs_last[-1], "the ring has a gap"
        self._chunks.append(chunk)
        self._seqs_last.append(chunk.seq_last)
        self._frame_counts.append(frame_count)
        self.bytes += len(chunk.data) + CHUNK_OVERHEAD_BYTES
        self._frames += frame_count
        frames_max = self._frames_max
        while self._evicted < len(self._chunks) - 1 and (
            self.bytes > self._bytes_max or (frames_max is not None and self._frames > frames_max)
        ):
            self.bytes -= len(self._chunks[self._evicted].data) + CHUNK_OVERHEAD_BYTES
            self._frames -= self._frame_counts[self._evicted]
            self._chunks[self._evicted] = _GONE
            self._evicted += 1
        if self._evicted > 1024 and self._evicted * 2 > len(self._chunks):
            del self._chunks[: self._evicted]
            del self._seqs_last[: self._evicted]
            del self._frame_counts[: self._evicted]
            self._evicted = 0

    def clear(self) -> None:
        """After an interrupt. The next chunk may be any: who looks for an earlier one has the files."""
        chunks: list[Chunk] = []
        seqs_last: list[int] = []
        frame_counts: list[int] = []
        self._chunks, self._seqs_last, self._frame_counts = chunks, seqs_last, frame_counts
        self._evicted = self._frames = self.bytes = 0

    def after(self, seq: int) -> Chunk | None:
        """The chunk with the first frame above `seq`, or None where the ring does not reach back to it."""
        index = bisect_right(self._seqs_last, seq, self._evicted)
        if index == len(self._chunks):
            return None
        chunk = self._chunks[index]
        return chunk if chunk.seq_before <= seq else None


_GONE = Chunk(0, 0, b"", 0, 0, verified=False)
