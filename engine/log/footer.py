"""The footer of a segment: positions, key index, block hashes, counts, streams. Built when a segment seals.

Always true:
  - a footer is a function of the segment's header and frames: whoever builds it builds the same bytes;
  - it is built window by window: memory depends on the number of frames (12 bytes each), not on their size;
  - windows that `vectors.py` reads and those that `windows.py` does give the same result; a test sees to it.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Generator, Sequence
from types import ModuleType
from typing import NamedTuple

from blake3 import blake3

from lowwater.engine.format import format
from lowwater.engine.format.format import SegmentTrailer
from lowwater.engine.log.scan import FrameBytes
from lowwater.engine.log.windows import PLAIN_WINDOW_BYTES, VECTOR_WINDOW_BYTES, PlainKeyIndex, read_window
from lowwater.errors import Corrupt

assert sys.byteorder == "little", "the index arrays are written as they are in memory"
assert array("I").itemsize == 4


class BlockHasher:
    """The BLAKE3 of every block of a segment's body, and of the body: the hash over those hashes.

    So a block that was fetched alone is verified against the segment's one hash, and the bytes are hashed
    once. Short pieces are collected first: BLAKE3 is five times as fast on a whole block.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._hashes: list[bytes] = []

    def add(self, data: bytes) -> None:
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes >= self._block_bytes:
            joined = b"".join(self._pending)
            whole = len(joined) - len(joined) % self._block_bytes
            self._hashes += hash_blocks(memoryview(joined)[:whole], self._block_bytes)
            rest = joined[whole:]
            self._pending = [rest] if rest else []
            self._pending_bytes = len(rest)

    def finish(self) -> tuple[list[bytes], bytes]:
        """The block hashes, and the hash of the body."""
        if self._pending:
            self._hashes += hash_blocks(memoryview(b"".join(self._pending)), self._block_bytes)
            self._pending = []
            self._pending_bytes = 0
        return self._hashes, segment_hash(self._hashes)


def hash_blocks(data: memoryview | bytes, block_bytes: int) -> list[bytes]:
    view = memoryview(data)
    return [blake3(view[start : start + block_bytes]).digest() for start in range(0, len(view), block_bytes)]


def segment_hash(block_hashes: Sequence[bytes]) -> bytes:
    return blake3(b"".join(block_hashes)).digest()


class StreamRange(NamedTuple):
    """Messages of one stream in a segment with dense offsets from `offset_first`, and their frames. Who
    assigns offsets leaves no gaps; where there is one all the same, another range begins."""

    offset_first: int
    frames: array[int]


def vectorised() -> ModuleType | None:
    """The module with the vectorised readers, where numpy is installed."""
    try:
        from lowwater.engine.log import vectors
    except ImportError:
        return None
    return vectors


class FooterBuilder:
    """What a footer says of the frames that were read so far, in order, in windows of any size."""

    def __init__(self, *, plain: bool = False) -> None:
        vectors = None if plain else vectorised()
        self._read = read_window if vectors is None else vectors.read_window
        self.key_index = PlainKeyIndex() if vectors is None else vectors.VectorKeyIndex()
        self.window_bytes = PLAIN_WINDOW_BYTES if vectors is None else VECTOR_WINDOW_BYTES
        self.frame_count = 0
        self.kind_counts: dict[int, int] = {}
        self.streams: dict[bytes, list[StreamRange]] = {}

    def read(self, data: bytes, base: int, positions: Sequence[int]) -> None:
        """The frames at `positions`, which follow those before; `data` begins at `base`."""
        window = self._read(data, base, positions, self.frame_count)
        self.key_index.add(window.key_index)
        for kind, count in window.kind_counts.items():
            self.kind_counts[kind] = self.kind_counts.get(kind, 0) + count
        for topic, offset, frame in window.streams:
            ranges = self.streams.setdefault(topic, [])
            if not ranges or offset != ranges[-1].offset_first + len(ranges[-1].frames):
                ranges.append(StreamRange(offset, array("I")))
            ranges[-1].frames.append(frame)
        self.frame_count += len(positions)


def footer_steps(
    file: FrameBytes,
    positions: array[int],
    body_bytes: int,
    *,
    block_bytes: int,
    block_hashes: Sequence[bytes] | None = None,
    builder: FooterBuilder | None = None,
    plain: bool = False,
) -> Generator[None, None, tuple[bytes, SegmentTrailer]]:
    """Build the footer of a body that was checked. Yields between short pieces of work, and returns the
    footer's bytes (with the padding before it) and the trailer that follows it.

    `block_hashes` spares the hashing where the writer has done it already, and `builder` the reading of
    the frames that it has seen.
    """
    assert positions, "a segment has at least one frame"
    if builder is None:
        builder = FooterBuilder(plain=plain)
    hasher = BlockHasher(block_bytes) if block_hashes is None else None
    if hasher is not None:
        assert not builder.frame_count, "what is to be hashed must be read"
        hasher.add(file.read_at(0, positions[0]))

    while builder.frame_count < len(positions):
        first = builder.frame_count
        start = positions[first]
        stop = bisect_left(positions, start + builder.window_bytes, first + 1)
        end = positions[stop] if stop < len(positions) else body_bytes
        data = file.read_at(start, end - start)
        if len(data) != end - start:
            raise Corrupt("the segment is shorter than it was", offset=start + len(data))
        if hasher is not None:
            hasher.add(data)
        builder.read(data, start, positions[first:stop])
        yield

    key_hashes, key_frames = [], []
    for hashes_part, frames_part in builder.key_index.finish():
        key_hashes.append(hashes_part)
        key_frames.append(frames_part)
        yield
    if hasher is not None:
        block_hashes, _ = hasher.finish()
    assert block_hashes is not None
    return _assemble(
        file,
        positions,
        body_bytes,
        key_hashes,
        key_frames,
        block_hashes,
        builder.kind_counts,
        builder.streams,
    )


def _assemble(
    file: FrameBytes,
    positions: array[int],
    body_bytes: int,
    key_hashes: list[bytes],
    key_frames: list[bytes],
    block_hashes: Sequence[bytes],
    kind_counts: dict[int, int],
    streams: dict[bytes, list[StreamRange]],
) -> tuple[bytes, SegmentTrailer]:
    kinds = b"".join(format.KIND_COUNT.pack(*item) for item in sorted(kind_counts.items()))
    stream_ranges = b"".join(
        format.STREAM_HEAD.pack(len(topic), stream.offset_first, len(stream.frames))
        + topic
        + stream.frames.tobytes()
        for topic, ranges in sorted(streams.items())
        for stream in ranges
    )
    padding = bytes(format.align_footer(body_bytes) - body_bytes)
    footer = b"".join(
        (padding, positions.tobytes(), *key_hashes, *key_frames, *block_hashes, kinds, stream_ranges)
    )
    seq_first, time_min_us = _seq_and_time(file, positions[0])
    seq_last, time_max_us = _seq_and_time(file, positions[-1])
    trailer = SegmentTrailer(
        file_bytes=body_bytes + len(footer) + format.TRAILER_BYTES,
        body_bytes=body_bytes,
        seq_first=seq_first,
        seq_last=seq_last,
        time_min_us=time_min_us,
        time_max_us=time_max_us,
        frame_count=len(positions),
        key_count=sum(map(len, key_hashes)) // 4,
        block_count=len(block_hashes),
        kind_count=len(kind_counts),
        stream_count=sum(map(len, streams.values())),
        stream_bytes=len(stream_ranges),
        segment_hash=segment_hash(block_hashes),
        footer_hash=blake3(footer).digest(),
    )
    assert trailer.section_offsets().end == body_bytes + len(footer)
    return footer, trailer


def _seq_and_time(file: FrameBytes, position: int) -> tuple[int, int]:
    """Times never fall inside a segment, so its first and last frame have the lowest and the highest."""
    fields = format.FRAME_FIXED.unpack(file.read_at(position, format.FRAME_FIXED_BYTES))
    return fields[0], fields[8]
