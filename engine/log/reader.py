"""Reading the log: one ordered stream over a colder source, sealed segments, the active file, the live tail.

Always true:
  - a reader gets every frame above its position exactly once, in order, or an error that names the gap;
  - it never sees a frame that is not durable;
  - its memory is one chunk, whatever it reads and however slow it is; it never holds up a writer;
  - bytes from a sealed segment were verified by their block's hash, all others by each frame's checksum.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from typing import Protocol

from blake3 import blake3

from lowwater.engine.format import format
from lowwater.engine.format.entries import Entry, decode_frames
from lowwater.engine.format.format import (
    FRAME_BYTES,
    FRAME_FIXED_BYTES,
    HEADER_BYTES,
    SegmentHeader,
    SegmentTrailer,
)
from lowwater.engine.log.directory import Segment, read_trailer, typed_errors
from lowwater.engine.log.footer import segment_hash
from lowwater.engine.log.ring import Chunk
from lowwater.engine.log.segment_store import CurrentSegment
from lowwater.engine.log.tickets import again
from lowwater.engine.log.wal import Wal
from lowwater.engine.seams.seams import File
from lowwater.errors import Corrupt, LowwaterError, NotFound

CHUNK_BYTES = 2**20


class ColdSource(Protocol):
    """Where entries are that the directory holds no longer. Tiering brings one."""

    def chunks_after(self, seq: int, seq_stop: int) -> Iterator[Chunk]:
        """Chunks that follow one another from the first frame above `seq` on, until one ends at `seq_stop` or
        above it, or there are no more."""
        ...

    def seq_before_time(self, time_us: int) -> int | None:
        """The last seq before `time_us`, or None where the source begins later."""
        ...

    # Where large values lie is said as in the log: the first seq of the segment, the offset of the frame.

    def value(self, segment_first: int, offset: int, length: int) -> bytes:
        """A large value."""
        ...

    def value_range(self, segment_first: int, offset: int, length: int, start: int, stop: int) -> bytes:
        """The bytes from `start` to below `stop` of a large value."""
        ...

    def frame_seq(self, segment_first: int, offset: int) -> int:
        """The seq of the frame that holds a large value."""
        ...

    def place_of(self, seq: int) -> tuple[int, int] | None:
        """Where the frame with this seq lies; None where there is none."""
        ...


class SealedReader:
    """One sealed segment, read by blocks that are verified against its footer."""

    def __init__(self, file: File) -> None:
        self._file = file
        size = file.size()
        self.header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
        self.trailer: SegmentTrailer = read_trailer(file, size)
        footer_start = self.trailer.body_bytes
        sections = self.trailer.section_offsets()
        footer = file.read_at(footer_start, sections.end - footer_start)
        if blake3(footer).digest() != self.trailer.footer_hash:
            raise Corrupt("the footer's hash does not match", offset=footer_start)
        at = sections.positions - footer_start
        self.positions = array("I")
        self.positions.frombytes(footer[at : at + 4 * self.trailer.frame_count])
        at = sections.block_hashes - footer_start
        self.block_hashes = [
            footer[at + 32 * block : at + 32 * (block + 1)] for block in range(self.trailer.block_count)
        ]
        self._check_against_each_other()

    def _check_against_each_other(self) -> None:
        trailer = self.trailer
        if segment_hash(self.block_hashes) != trailer.segment_hash:
            raise Corrupt("the block hashes do not add up to the segment's hash", offset=trailer.body_bytes)
        if -(-trailer.body_bytes // self.header.block_bytes) != trailer.block_count:
            raise Corrupt(
                "the number of block hashes does not fit the segment's size", offset=trailer.body_bytes
            )
        if self.positions[0] != HEADER_BYTES or self.positions[-1] >= trailer.body_bytes:
            raise Corrupt("the positions in the footer do not fit the segment", offset=trailer.body_bytes)

    def read_verified(self, start: int, end: int) -> tuple[int, bytes]:
        """The whole blocks that cover `start` to `end`: (offset of the first, bytes)."""
        if not 0 <= start < end <= self.trailer.body_bytes:
            raise Corrupt(
                "the positions in the footer do not fit the segment", offset=self.trailer.body_bytes
            )
        block_bytes = self.header.block_bytes
        first = start // block_bytes
        last = min(-(-end // block_bytes), len(self.block_hashes))
        offset = first * block_bytes
        data = self._file.read_at(offset, min(last * block_bytes, self.trailer.body_bytes) - offset)
        view = memoryview(data)
        for block in range(first, last):
            at = block * block_bytes - offset
            if blake3(view[at : at + block_bytes]).digest() != self.block_hashes[block]:
                raise Corrupt("a block's hash does not match", offset=offset + at)
        return offset, data

    def seq_before_time(self, time_us: int) -> int:
        return self._first_frame(time_of, time_us)[1]

    def _first_frame(self, measure: Measure, lowest: int) -> tuple[int, int]:
        positions = self.positions
        frame, before = first_frame(self._file, positions, len(positions), self._verified, measure, lowest)
        return frame, self.header.seq_before if before is None else seq_of(before)

    def _verified(self, position: int) -> bytes:
        offset, data = self.read_verified(position, position + FRAME_FIXED_BYTES)
        return data[position - offset :][:FRAME_FIXED_BYTES]

    def chunks_after(self, seq: int) -> Iterator[Chunk]:
        positions, body_bytes = self.positions, self.trailer.body_bytes
        frame, seq_before = 0, self.header.seq_before
        if seq > seq_before:
            frame, seq_before = self._first_frame(seq_of, seq + 1)
        while frame < len(positions):
            start = positions[frame]
            stop = max(bisect_right(positions, start + CHUNK_BYTES) - 1, frame + 1)
            end = positions[stop] if stop < len(positions) else body_bytes
            offset, data = self.read_verified(start, end)
            seq_last = seq_of(data[positions[stop - 1] - offset :][:8])
            yield Chunk(seq_before, seq_last, data, start - offset, end - offset, verified=True)
            seq_before, frame = seq_last, stop


# What a search goes by: the seq or the time of a frame, from its first bytes.
Measure = Callable[[bytes], int]


def seq_of(frame: bytes) -> int:
    return int.from_bytes(frame[:8], "little")


def time_of(frame: bytes) -> int:
    start = FRAME_BYTES + format.TIME_SLICE.start
    return int.from_bytes(frame[start : start + 8], "little")


class Positions(Protocol):
    """Where frames begin, by their numbers."""

    def __getitem__(self, frame: int, /) -> int: ...


def first_frame(
    file: File,
    positions: Positions,
    frame_count: int,
    verified: Callable[[int], bytes],
    measure: Measure,
    lowest: int,
) -> tuple[int, bytes | None]:
    """The number of the first frame that measures at least `lowest`, and the start of the one before it.

    The search looks at bytes that nobody has verified, and one flipped bit leads it past good frames. So
    what it found and what comes before it are read again by `verified`: between them lies the answer.
    """
    low, high = 0, frame_count
    while low < high:
        middle = (low + high) // 2
        if measure(file.read_at(positions[middle], FRAME_FIXED_BYTES)) < lowest:
            low = middle + 1
        else:
            high = middle
    before = verified(positions[low - 1]) if low else None
    if before is not None and measure(before) >= lowest:
        raise Corrupt("the frames of the segment are not in order", offset=positions[low - 1])
    if low < frame_count and measure(verified(positions[low])) < lowest:
        raise Corrupt("the frames of the segment are not in order", offset=positions[low])
    return low, before


def _verified_frame(file: File, position: int) -> bytes:
    """The first bytes of a frame of which there is nothing but its own checksum to go by."""
    head = file.read_at(position, FRAME_BYTES)
    if len(head) == FRAME_BYTES:
        seq, length, checksum = format.FRAME.unpack(head)
        payload = file.read_at(position + FRAME_BYTES, min(length, format.PAYLOAD_BYTES_MAX))
        if len(payload) == length and format.frame_checksum(seq, payload) == checksum:
            return head + payload[: format.FIXED_BYTES]
    raise Corrupt("a frame's checksum does not match", offset=position)


class _StoredPositions:
    """The positions of frames in the footer of a sealed segment. A search reads only a few of them."""

    def __init__(self, file: File) -> None:
        self._file = file
        trailer = read_trailer(file, file.size())
        self.count = trailer.frame_count
        self._at = trailer.section_offsets().positions

    def __getitem__(self, frame: int, /) -> int:
        return int.from_bytes(self._file.read_at(self._at + 4 * frame, 4), "little")


def place_of(wal: Wal, seq: int) -> tuple[int, int] | None:
    """The first seq of the segment and the offset at which the durable frame with this seq lies; None where
    there is none. Of a long segment it reads little."""
    with wal.lock:
        segment = wal.store.segment_after(seq - 1)
        if segment is None:
            return None
        # Names change under the lock only.
        path = wal.store.path_of(segment)
        with typed_errors(path, "look for a frame"):
            file = wal.files.open(path)
        known = segment.positions
        seq_first = segment.header.seq_first
        count = segment.durable_frames if isinstance(segment, CurrentSegment) else len(known or ())
    try:
        with typed_errors(path, "look for a frame"):
            positions: Positions
            if known is not None:
                positions = known
            else:
                positions = stored = _StoredPositions(file)
                count = stored.count
            frame, _ = first_frame(file, positions, count, partial(_verified_frame, file), seq_of, seq)
            if frame == count or seq_of(file.read_at(positions[frame], FRAME_FIXED_BYTES)) != seq:
                return None
            return seq_first, positions[frame]
    finally:
        file.close()


def _unsealed_chunks(
    file: File, seq_before: int, positions: array[int], frame_count: int, end: int, seq: int
) -> Iterator[Chunk]:
    """Chunks of a segment without a footer, up to `end`, the place up to which it is durable."""
    frame = 0
    if seq > seq_before:
        verified = partial(_verified_frame, file)
        frame, before = first_frame(file, positions, frame_count, verified, seq_of, seq + 1)
        seq_before = seq_before if before is None else seq_of(before)
    while frame < frame_count:
        start = positions[frame]
        stop = min(max(bisect_right(positions, start + CHUNK_BYTES) - 1, frame + 1), frame_count)
        chunk_end = positions[stop] if stop < frame_count else end
        data = file.read_at(start, chunk_end - start)
        if len(data) != chunk_end - start:
            raise Corrupt("the segment is shorter than it was", offset=start + len(data))
        seq_last = seq_of(data[positions[stop - 1] - start :][:8])
        yield Chunk(seq_before, seq_last, data, 0, len(data), verified=False)
        seq_before, frame = seq_last, stop


def read_chunks(
    wal: Wal, seq: int, *, seq_stop: int | None, cold: ColdSource | None = None
) -> Generator[Chunk, None, None]:
    """What lies above `seq`, up to `seq_stop`; where that is None it goes on, waiting for what comes, until
    the log is closed. Chunks follow one another; the first may begin before what was asked, and the last end
    after it."""
    wal.refuse_forked()
    while seq_stop is None or seq < seq_stop:
        wal.refuse_inside()
        with wal.lock:
            chunk = wal.ring.after(seq)
            view = None if chunk is not None else _view_after(wal, seq)
            if chunk is None and view is None:
                if seq_stop is not None:
                    return
                if wal.failure is not None:
                    raise again(wal.failure)
                if wal.ended:
                    return
                wal.followers += 1
                try:
                    wal.durable_changed.wait()
                finally:
                    wal.followers -= 1
                continue
        if chunk is not None:
            yield chunk
            seq = chunk.seq_last
            continue
        assert view is not None
        with closing(view):
            if view.header.seq_before > seq:
                seq = yield from _cold_chunks(cold, seq, view.header, seq_stop)
                if seq_stop is not None and seq >= seq_stop:
                    return
            with typed_errors(view.path, "read the log"):
                for chunk in view.chunks_after(seq):
                    if not chunk.seq_before <= seq < chunk.seq_last:
                        raise Corrupt(
                            "the frames of the segment do not follow one another", seq=chunk.seq_last
                        )
                    yield chunk
                    seq = chunk.seq_last
                    if seq_stop is not None and seq >= seq_stop:
                        return


def _cold_chunks(
    cold: ColdSource | None, seq: int, header: SegmentHeader, wanted: int | None
) -> Generator[Chunk, None, int]:
    """What lies above `seq` and before the segment with this header, up to `wanted`. Returns the last seq."""
    seq_stop = header.seq_before if wanted is None else min(header.seq_before, wanted)
    if cold is not None:
        for chunk in cold.chunks_after(seq, seq_stop):
            if not chunk.seq_before <= seq < chunk.seq_last <= header.seq_before:
                raise Corrupt(f"the archive has no entries that follow seq {seq}", seq=chunk.seq_last)
            yield chunk
            seq = chunk.seq_last
    if seq < seq_stop:
        raise NotFound(
            f"the entries from {seq + 1} to {seq_stop} are not here",
            seq=seq + 1,
            hint=f"the oldest entry of this log is {header.seq_first}: start there, or at 'earliest'",
        )
    return seq


class _View:
    """A segment as it stood when a reader came to it, with a file of its own."""

    def __init__(self, file: File, path: str, segment: Segment | CurrentSegment) -> None:
        self.file = file
        self.path = path
        self.header = segment.header
        self._sealed = isinstance(segment, Segment) and segment.sealed
        if isinstance(segment, CurrentSegment):
            self._end, self._frame_count = segment.durable_bytes, segment.durable_frames
            self._positions: array[int] | None = segment.positions
        else:
            self._end, self._positions = segment.body_bytes, segment.positions
            self._frame_count = len(segment.positions) if segment.positions is not None else 0

    def chunks_after(self, seq: int) -> Iterator[Chunk]:
        if self._sealed:
            return SealedReader(self.file).chunks_after(seq)
        assert self._positions is not None
        return _unsealed_chunks(
            self.file, self.header.seq_before, self._positions, self._frame_count, self._end, seq
        )

    def seq_before_time(self, time_us: int) -> int:
        if self._sealed:
            return SealedReader(self.file).seq_before_time(time_us)
        positions, frame_count = self._positions, self._frame_count
        assert positions is not None
        verified = partial(_verified_frame, self.file)
        _, before = first_frame(self.file, positions, frame_count, verified, time_of, time_us)
        return self.header.seq_before if before is None else seq_of(before)

    def close(self) -> None:
        self.file.close()


def _view_after(wal: Wal, seq: int) -> _View | None:
    """With the lock held, so that the segment is not renamed before it is open."""
    segment = wal.store.segment_after(seq)
    if segment is None or (isinstance(segment, CurrentSegment) and segment.durable_seq_last <= seq):
        return None
    path = wal.store.path_of(segment)
    with typed_errors(path, "read the log"):
        return _View(wal.files.open(path), path, segment)


def seq_before_time(wal: Wal, time_us: int, cold: ColdSource | None) -> int:
    """The seq above which everything is at or after `time_us`."""
    with wal.lock:
        segment = wal.store.segment_from_time(time_us)
        if segment is None:
            return wal.durable_seq
        path = wal.store.path_of(segment)
        with typed_errors(path, "read the log"):
            view = _View(wal.files.open(path), path, segment)
    with closing(view), typed_errors(path, "read the log"):
        seq = view.seq_before_time(time_us)
    if seq == view.header.seq_before and time_us <= view.header.time_before_us and cold is not None:
        # The frames before this segment may be late enough too.
        earlier = cold.seq_before_time(time_us)
        return seq if earlier is None else earlier
    return seq


def entries_of(chunks: Iterator[Chunk], seq: int, seq_stop: int | None, directory: str) -> Iterator[Entry]:
    """The entries of chunks, above `seq` and up to `seq_stop`."""
    for chunk in chunks:
        entries = decode_frames(chunk.data, chunk.start, chunk.end, verify=not chunk.verified)
        try:
            if chunk.seq_before >= seq and (seq_stop is None or chunk.seq_last <= seq_stop):
                yield from entries
            else:
                for entry in entries:
                    if entry.seq > seq and (seq_stop is None or entry.seq <= seq_stop):
                        yield entry
        except LowwaterError as error:
            # A chunk does not say where it was read; its offsets would mislead.
            if error.path is None:
                error.path, error.offset = directory, None
            raise
