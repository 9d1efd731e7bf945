"""Some adjacent frames, as the footer of their segment needs them, read one by one. `vectors.py` reads many
at once.

Always true: both give the same, byte for byte; a test sees to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lowwater.engine.format import format
from lowwater.engine.format.format import Flag, Kind
from lowwater.engine.seams.checksum import crc32
from lowwater.errors import Corrupt

# A plain window takes about 0.2 ms, a vectorised one is the better the larger it is.
PLAIN_WINDOW_BYTES = 2**15
VECTOR_WINDOW_BYTES = 2**21


def stream_offset_of(data: bytes, at: int, flags: int) -> int:
    """The offset that a message has in its stream."""
    if not flags & Flag.STREAM_OFFSET:
        raise Corrupt("a message has no offset in its stream")
    start = at + format.FRAME_FIXED_BYTES + format.GROUP_BYTES[flags & (Flag.STREAM_OFFSET - 1)]
    offset: int = format.U64.unpack_from(data, start)[0]
    return offset


class PlainKeyIndex:
    """Sorts the key index without ever sorting for long: by the top byte of the hash."""

    def __init__(self) -> None:
        self._buckets: list[list[int]] = [[] for _ in range(256)]

    def add(self, items: Sequence[int]) -> None:
        buckets = self._buckets
        for item in items:
            buckets[item >> 56].append(item)

    def finish(self) -> Iterator[tuple[bytes, bytes]]:
        """Hashes and frames in order, in parts, so that the caller can pause between them."""
        for bucket in self._buckets:
            bucket.sort()
            yield (
                array("I", [item >> 32 for item in bucket]).tobytes(),
                array("I", [item & 0xFFFFFFFF for item in bucket]).tobytes(),
            )


class Window(NamedTuple):
    """What the footer needs to know of some adjacent frames."""

    key_index: Any
    """`hash << 32 | frame` of each frame in the key index, in any order."""
    kind_counts: dict[int, int]
    streams: list[tuple[bytes, int, int]]
    """(topic, offset, frame) of each message."""


# The key index leaves out what has no bucket, what was refused, and messages, which streams index.
def read_window(data: bytes, base: int, positions: Sequence[int], frame_first: int) -> Window:
    """The plain way to read a window: `positions` are those of its frames, and `data` begins at `base`."""
    unpack = format.FRAME_FIXED.unpack_from
    key_index: list[int] = []
    kind_counts: dict[int, int] = {}
    streams: list[tuple[bytes, int, int]] = []
    for frame, position in enumerate(positions, frame_first):
        at = position - base
        _, length, _, kind, flags, bucket_len, key_len, metadata_len, _, _ = unpack(data, at)
        kind_counts[kind] = kind_counts.get(kind, 0) + 1
        start, end = at + format.FRAME_FIXED_BYTES, at + format.FRAME_BYTES + length
        if flags:
            _, start = format.decode_extras(flags, data, start, end)
        if start + bucket_len + key_len + metadata_len > end:
            raise Corrupt("the lengths inside a frame exceed it", offset=position)
        if not bucket_len or flags & Flag.REFUSED:
            continue
        if kind == Kind.APPEND:
            streams.append((data[start : start + bucket_len], stream_offset_of(data, at, flags), frame))
        else:
            key_index.append(crc32(data[start : start + bucket_len + key_len]) << 32 | frame)
    return Window(key_index, kind_counts, streams)
