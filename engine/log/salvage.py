"""Reading frames one by one, and going on after damage.

Always true: a frame that comes out of here is whole and its checksum holds; every byte that was left out is
told as `Skipped`; seqs rise. Where the next frame begins is asked of the footer first, then of the damaged
frame's own length, and searched for last: a value may hold bytes that look like frames.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowwater.engine.format import format
from lowwater.engine.format.format import FRAME_BYTES, FRAME_FIXED_BYTES
from lowwater.engine.log.scan import READ_BYTES, FrameBytes, all_zero, find_frame, is_frame, why_not_a_frame
from lowwater.engine.seams.seams import File, SyncMode, write_in_turn
from lowwater.errors import Corrupt

_SECTOR_BYTES = 4096


class Frame(NamedTuple):
    offset: int
    seq: int
    payload: bytes

    @property
    def end(self) -> int:
        return self.offset + FRAME_BYTES + len(self.payload)


class Skipped(NamedTuple):
    """Bytes in which there is no whole frame, and the seq of the frame before them."""

    start: int
    end: int
    seq_before: int
    what: str


def whole_frames(file: FrameBytes, start: int, stop: int, *, seq_before: int) -> Iterator[Frame]:
    """The frames from `start` to `stop`. Raises Corrupt where the next one is not whole."""
    base, at, data = start, 0, b""
    seq_last = seq_before
    while base + at < stop:
        left = stop - base - at
        needed = FRAME_FIXED_BYTES
        if len(data) - at >= needed:
            seq, length, checksum = format.FRAME.unpack_from(data, at)
            if seq <= seq_last or not format.FIXED_BYTES <= length <= format.PAYLOAD_BYTES_MAX:
                raise Corrupt(why_not_a_frame(data, at, seq_last), offset=base + at, seq=seq_last)
            needed = FRAME_BYTES + length
            if len(data) - at >= needed:
                payload = data[at + FRAME_BYTES : at + needed]
                if format.frame_checksum(seq, payload) != checksum:
                    raise Corrupt("a frame's checksum does not match", offset=base + at, seq=seq_last)
                yield Frame(base + at, seq, payload)
                at += needed
                seq_last = seq
                continue
        if needed > left:
            raise Corrupt("a frame is longer than what is left", offset=base + at, seq=seq_last)
        base, at = base + at, 0
        data = file.read_at(base, min(max(READ_BYTES, needed), left))
        if len(data) < needed:
            raise Corrupt("the file is shorter than it was", offset=base, seq=seq_last)


def salvage_frames(
    file: FrameBytes,
    start: int,
    stop: int,
    *,
    seq_before: int,
    seq_max: int = format.SEQ_MAX,
    positions: Sequence[int] = (),
) -> Iterator[Frame | Skipped]:
    """All frames that are whole. `positions` is where a footer that was verified says they are."""
    offset, seq = start, seq_before
    while offset < stop:
        try:
            for frame in whole_frames(file, offset, stop, seq_before=seq):
                yield frame
                offset, seq = frame.end, frame.seq
        except Corrupt as error:
            if all_zero(file, offset, stop):
                return
            resume = _next_frame(file, offset, stop, seq, seq_max, positions)
            yield Skipped(offset, resume, seq, error.message)
            offset = resume


def _next_frame(
    file: FrameBytes, offset: int, stop: int, seq: int, seq_max: int, positions: Sequence[int]
) -> int:
    """Where the first whole frame after the damage at `offset` begins; `stop` where none does."""
    for index in range(bisect_right(positions, offset), len(positions)):
        if is_frame(file, positions[index], stop, seq_above=seq, seq_max=seq_max):
            return positions[index]
    if positions:
        return stop
    head = file.read_at(offset, FRAME_BYTES)
    if len(head) == FRAME_BYTES:
        end = offset + FRAME_BYTES + int(format.FRAME.unpack(head)[1])
        if is_frame(file, end, stop, seq_above=seq, seq_max=seq_max):
            return end
    found = find_frame(file, offset + 1, stop, seq_above=seq)
    while found is not None and not is_frame(file, found, stop, seq_above=seq, seq_max=seq_max):
        found = find_frame(file, found + 1, stop, seq_above=seq)
    return stop if found is None else found


class TolerantFile:
    """A file of which the disk may not give all: such sectors read as ones, which no checksum accepts.

    Zeros would not do: they are what follows the last frame of a sound log. `head` stands in the place of
    as many bytes at the beginning, for a header that was restored.
    """

    def __init__(self, file: File, *, head: bytes = b"") -> None:
        self._file = file
        self._head = head

    def size(self) -> int:
        return self._file.size()

    def close(self) -> None:
        self._file.close()

    def write_at(self, offset: int, buffers: Sequence[bytes], sync: SyncMode = "none") -> int:
        return self._file.write_at(offset, buffers, sync)

    def write_each(self, offset: int, parts: Sequence[bytes], sync: SyncMode) -> None:
        write_in_turn(self, offset, parts, sync)

    def sync(self, mode: SyncMode) -> None:
        self._file.sync(mode)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def read_at(self, offset: int, size: int) -> bytes:
        if offset < len(self._head):
            head = self._head[offset : offset + size]
            return head + self._read_tolerantly(offset + len(head), size - len(head))
        return self._read_tolerantly(offset, size)

    def _read_tolerantly(self, offset: int, size: int) -> bytes:
        data = self._read(offset, size)
        if data is not None:
            return data
        parts = []
        end = min(offset + size, self._file.size())
        while offset < end:
            part = min(_SECTOR_BYTES - offset % _SECTOR_BYTES, end - offset)
            parts.append(self._read(offset, part) or b"\xff" * part)
            offset += part
        return b"".join(parts)

    def _read(self, offset: int, size: int) -> bytes | None:
        try:
            return self._file.read_at(offset, size)
        except Corrupt:
            return None  # a compressed block that cannot be decompressed
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return None
