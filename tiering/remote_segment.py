"""One shipped segment, read where it lies: verified ranges, frames from a seq, frames of a key.

Always true:
  - the descriptor from the log's catalogue pins everything: the segment's hash is over its block hashes, and
    a byte of the body is used only after its block was compared with its own. Of the footer it is the hash
    in the trailer, which has to say what the descriptor says;
  - what turns out wrong is forgotten and fetched once more: damage on the way heals, damage in the store is
    an error that names the object and the offset, as the raw segment counts it;
  - memory does not depend on the segment's size, but for 32 bytes a block: a footer is verified piece by
    piece as it passes, and its pieces are compared with their own hashes whenever they come again;
  - a search rests on nothing that was not verified.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from blake3 import blake3

from lowwater.engine.format import format
from lowwater.engine.format.format import (
    FRAME_BYTES,
    FRAME_FIXED_BYTES,
    HEADER_BYTES,
    SegmentHeader,
    SegmentTrailer,
)
from lowwater.engine.log.reader import CHUNK_BYTES, Measure, seq_of, time_of
from lowwater.engine.log.ring import Chunk
from lowwater.engine.seams.checksum import crc32
from lowwater.engine.state.catalogue import SegmentDescriptor
from lowwater.errors import Corrupt, LowwaterError
from lowwater.tiering.block_cache import UNIT_BYTES
from lowwater.tiering.fetcher import FETCH_BYTES, HINT, Fetcher
from lowwater.tiering.stored_forms import CompressedForm, Form, RawForm

# What one request for the end of an object brings: the footer of most segments, and a table of blocks.
TAIL_BYTES = 2**19
PIECE_BYTES = 2**18
# Positions are looked at in stretches of so many frames.
STRETCH_FRAMES = 2**15
# What a sequential reader is read ahead of at most, in parts of what it has read: it may stop at any time.
AHEAD_PARTS = 8
AHEAD_BYTES_MIN = 2**18
# It begins and ends inside of units, and one request is to bring all of them.
AHEAD_BYTES_MAX = FETCH_BYTES - 2 * UNIT_BYTES

T = TypeVar("T")


class _Opened(NamedTuple):
    form: Form
    trailer: SegmentTrailer
    block_hashes: bytes


class SegmentStretch(NamedTuple):
    """Positions of frames that follow one another, from the frame with the number `first` on."""

    first: int
    positions: array[int]


class RemoteSegment:
    """A segment of the catalogue. It may be read by several threads at once."""

    def __init__(
        self, fetcher: Fetcher, name: str, descriptor: SegmentDescriptor, *, trusting: bool = False
    ) -> None:
        """With `trusting` nothing is compared with its hash: for who has verified the archive before."""
        self.name = name
        self.descriptor = descriptor
        self._trusting = trusting
        self._fetcher = fetcher
        self._lock = threading.Lock()
        self._opened: _Opened | None = None
        self._piece_hashes: list[bytes] | None = None

    # ------------------------------------------------------------------ opening

    def _open(self) -> _Opened:
        opened = self._opened
        if opened is None:
            with self._lock:
                # Others that wanted to open it have waited for this.
                opened = self._opened
                if opened is None:
                    opened = self._opened = self._twice(self._read_end)
        return opened

    def _read_end(self) -> _Opened:
        descriptor = self.descriptor
        form = self._find_form()
        size = descriptor.size
        end = form.read(size - format.TRAILER_BYTES, size)
        try:
            trailer = SegmentTrailer.decode(end)
        except LowwaterError as error:
            error.offset = size - format.TRAILER_BYTES
            raise
        told = (
            trailer.file_bytes, trailer.body_bytes, trailer.seq_first, trailer.seq_last, trailer.time_min_us,
            trailer.time_max_us, trailer.frame_count, trailer.segment_hash,
        )  # fmt: skip
        wanted = (
            descriptor.size, descriptor.body_bytes, descriptor.first, descriptor.last, descriptor.time_min_us,
            descriptor.time_max_us, descriptor.frame_count, descriptor.hash,
        )  # fmt: skip
        if told != wanted or -(-trailer.body_bytes // descriptor.block_bytes) != trailer.block_count:
            raise Corrupt(
                "the segment is another one than the catalogue has", offset=size - format.TRAILER_BYTES
            )
        at = trailer.section_offsets().block_hashes
        block_hashes = form.read(at, at + 32 * trailer.block_count)
        if blake3(block_hashes).digest() != trailer.segment_hash:
            raise Corrupt("the block hashes do not add up to the segment's hash", offset=at)
        return _Opened(form, trailer, block_hashes)

    def _find_form(self) -> Form:
        """By as few requests as can be: the catalogue knows what the raw segment has, and no stored size."""
        fetcher, name, size = self._fetcher, self.name, self.descriptor.size
        stored_bytes = size
        if self.descriptor.compression != format.Compression.NONE:
            stored_bytes = fetcher.size_of(name)
        tail_start = max(0, stored_bytes - TAIL_BYTES)
        if stored_bytes == size:
            tail_start = max(tail_start, self.descriptor.body_bytes)
        tail = fetcher.read(name, stored_bytes, tail_start, stored_bytes)
        if stored_bytes == size and tail[-format.TRAILER_BYTES :].startswith(format.TRAILER_MAGIC):
            return RawForm(fetcher, name, size)
        if self.descriptor.compression == format.Compression.NONE:
            raise Corrupt(
                "the segment does not end with its trailer", offset=max(0, size - format.TRAILER_BYTES)
            )
        return CompressedForm(fetcher, name, stored_bytes, size)

    def _twice(self, read: Callable[[], T]) -> T:
        return self._fetcher.twice(self.name, self._stored_bytes, read)

    def _stored_bytes(self) -> int:
        if self._opened is not None:
            return self._opened.form.stored_bytes
        if self.descriptor.compression == format.Compression.NONE:
            return self.descriptor.size
        return self._fetcher.size_of(self.name)

    # ------------------------------------------------------------------ the body

    def read(self, start: int, end: int) -> bytes:
        """What lies from `start` to below `end` of the body."""
        if not 0 <= start <= end <= self.descriptor.body_bytes:
            raise Corrupt(
                "what is to be read lies beyond the end of the segment",
                path=self._fetcher.where(self.name),
                offset=start,
            )
        if start == end:
            return b""
        offset, data = self.read_blocks(start, end)
        return data[start - offset : end - offset]

    def read_blocks(self, start: int, end: int, *, sequential: bool = False) -> tuple[int, bytes]:
        """The whole blocks that cover `start` to `end`: (offset of the first, bytes)."""
        opened = self._open()
        offset, stop = self.blocks_around(start, end)

        def read() -> bytes:
            data = opened.form.read(offset, stop, sequential=sequential)
            self._verify_blocks(opened, offset, data)
            return data

        return offset, self._twice(read)

    def blocks_around(self, start: int, end: int) -> tuple[int, int]:
        """Where the blocks begin and end that cover `start` to `end` of the body."""
        body_bytes, size = self.descriptor.body_bytes, self.descriptor.block_bytes
        if not 0 <= start < end <= body_bytes:
            raise self._misfit()
        return start // size * size, min(-(-end // size) * size, body_bytes)

    def read_blocks_into(self, start: int, raw: memoryview) -> None:
        """Whole blocks from `start` on, where the first begins. They are wanted once, and kept nowhere."""
        opened = self._open()

        def read() -> None:
            opened.form.read_into(start, raw)
            self._verify_blocks(opened, start, raw)

        self._twice(read)

    def _verify_blocks(self, opened: _Opened, start: int, data: bytes | memoryview) -> None:
        if self._trusting:
            return
        size, view = self.descriptor.block_bytes, memoryview(data)
        for at in range(0, len(data), size):
            block = (start + at) // size
            expected = opened.block_hashes[32 * block : 32 * block + 32]
            if blake3(view[at : at + size]).digest() != expected:
                raise Corrupt("a block's hash does not match", offset=block * size)

    def header(self) -> SegmentHeader:
        return SegmentHeader.decode(self.read(0, HEADER_BYTES))

    # ------------------------------------------------------------------ the footer

    def _footer(self, start: int, end: int) -> bytes:
        """A part of the footer, by its place in the segment."""
        body_bytes = self.descriptor.body_bytes
        if start == end:
            return b""
        first, last = (start - body_bytes) // PIECE_BYTES, -(-(end - body_bytes) // PIECE_BYTES)
        parts = [self._piece(number) for number in range(first, last)]
        parts[-1] = parts[-1][: end - body_bytes - (last - 1) * PIECE_BYTES]
        parts[0] = parts[0][start - body_bytes - first * PIECE_BYTES :]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def verify_footer(self) -> list[bytes]:
        """Compare all of the footer with its hash, where that was not done before: the hashes of its pieces.
        There are none where nothing is compared."""
        opened = self._open()
        if self._trusting:
            return []
        with self._lock:
            if self._piece_hashes is None:
                self._piece_hashes = self._twice(lambda: self._verify_footer(opened))
            return self._piece_hashes

    def _piece(self, number: int) -> bytes:
        kept = self._fetcher.pieces.get((self.name, number))
        if kept is not None:
            return kept
        opened = self._open()
        if self._trusting:
            return opened.form.read(*self._piece_range(number))
        expected = self.verify_footer()[number]
        kept = self._fetcher.pieces.get((self.name, number))
        if kept is not None:
            return kept
        start, end = self._piece_range(number)

        def read() -> bytes:
            data = opened.form.read(start, end)
            if blake3(data).digest() != expected:
                raise Corrupt("a part of the footer is not what it was", offset=start)
            return data

        data = self._twice(read)
        self._fetcher.pieces.put((self.name, number), data)
        return data

    def _piece_range(self, number: int) -> tuple[int, int]:
        start = self.descriptor.body_bytes + number * PIECE_BYTES
        return start, min(start + PIECE_BYTES, self.descriptor.size - format.TRAILER_BYTES)

    def _verify_footer(self, opened: _Opened) -> list[bytes]:
        """Compare the footer with its hash: the hashes of its pieces."""
        hashes, pieces = [], []
        for data in self._footer_parts(opened):
            pieces = [data[place : place + PIECE_BYTES] for place in range(0, len(data), PIECE_BYTES)]
            hashes += [blake3(piece).digest() for piece in pieces]
        if len(hashes) <= 4:
            for number, piece in enumerate(pieces):
                self._fetcher.pieces.put((self.name, number), piece)
        return hashes

    def _footer_parts(self, opened: _Opened) -> Iterator[bytes]:
        """All of the footer, in large parts: a piece begins and ends inside of blocks, which would each be
        decompressed for two of them. After the last one Corrupt is raised where its hash does not match."""
        start, end = self.descriptor.body_bytes, self.descriptor.size - format.TRAILER_BYTES
        hasher = blake3()
        for at in range(start, end, FETCH_BYTES):
            self._load(opened, at, at + FETCH_BYTES)
            data = opened.form.read(at, min(at + FETCH_BYTES, end))
            hasher.update(data)
            yield data
        if hasher.digest() != opened.trailer.footer_hash:
            raise Corrupt("the footer's hash does not match", offset=start)

    def all_positions(self) -> bytes:
        """Where all frames begin, as numbers of four bytes, from one pass over the footer, all of which is
        compared with its hash. Nothing else of it is held."""
        opened = self._open()
        first = opened.trailer.section_offsets().positions
        size = 4 * self.descriptor.frame_count

        def read() -> bytes:
            if self._trusting:
                return opened.form.read(first, first + size, passing=True)
            found, at = [], self.descriptor.body_bytes
            for data in self._footer_parts(opened):
                found.append(data[max(0, first - at) : max(0, first + size - at)])
                at += len(data)
            return b"".join(found)

        return self._twice(read)

    def _numbers(self, at: int, first: int, last: int) -> array[int]:
        """Numbers of four bytes of a section that begins at `at`."""
        numbers = array("I")
        numbers.frombytes(self._footer(at + 4 * first, at + 4 * last))
        return numbers

    def positions(self, first: int, last: int) -> array[int]:
        """Where the frames from `first` to below `last` begin."""
        at = self._open().trailer.section_offsets().positions
        positions = self._numbers(at, first, last)
        if not HEADER_BYTES <= positions[0] <= positions[-1] < self.descriptor.body_bytes:
            raise self._misfit()
        return positions

    def _misfit(self) -> Corrupt:
        return Corrupt(
            "the positions in the footer do not fit the segment",
            path=self._fetcher.where(self.name),
            offset=self.descriptor.body_bytes,
            hint=HINT,
        )

    # ------------------------------------------------------------------ frames, in order

    def first_frame(self, measure: Measure, lowest: int, values: tuple[int, int]) -> tuple[int, int | None]:
        """The number of the first frame that measures at least `lowest`, and the seq of the one before it,
        None where that is in no block that was read. `values` are what the first and the last one measure: a
        guess that lies between them is mostly right, so few blocks are read."""
        low, high = 0, self.descriptor.frame_count
        low_value, high_value = values
        seq_before: int | None = None
        if lowest <= low_value:
            return 0, None
        guesses = 0
        while low < high:
            middle = (low + high) // 2
            if guesses < 3 and high_value > low_value:
                share = (lowest - low_value) / (high_value - low_value)
                middle = min(max(low + int((high - low) * share), low), high - 1)
            guesses += 1
            first, heads = self._heads_around(middle)
            measured = [measure(head) for head in heads]
            if any(map(int.__gt__, measured, measured[1:])):
                raise Corrupt(
                    "the frames of the segment are not in order",
                    path=self._fetcher.where(self.name),
                    offset=self.positions(first, first + 1)[0],
                )
            at = bisect_left(measured, lowest)
            if at > 0:
                low, low_value = max(low, first + at), measured[at - 1]
                seq_before = seq_of(heads[at - 1])
            if at < len(measured):
                high, high_value = min(high, first + at), measured[at]
        return low, seq_before

    def _heads_around(self, frame: int) -> tuple[int, list[bytes]]:
        """The beginnings of frames in the blocks of this one: the number of the first, and each."""
        (position,) = self.positions(frame, frame + 1)
        offset, data = self.read_blocks(position, position + FRAME_FIXED_BYTES)
        end = offset + len(data) - FRAME_FIXED_BYTES
        first = max(0, frame - STRETCH_FRAMES)
        positions = self.positions(first, min(frame + STRETCH_FRAMES, self.descriptor.frame_count))
        start, stop = bisect_left(positions, offset), bisect_right(positions, end)
        heads = [data[at - offset : at - offset + FRAME_FIXED_BYTES] for at in positions[start:stop]]
        assert first + start <= frame < first + stop
        return first + start, heads

    def frame_after(self, seq: int) -> int:
        """The number of the first frame above `seq`."""
        descriptor = self.descriptor
        if seq < descriptor.first:
            return 0
        if seq >= descriptor.last:
            return descriptor.frame_count
        if descriptor.last - descriptor.first + 1 == descriptor.frame_count:
            return seq + 1 - descriptor.first  # seqs rise, and there is one for each frame
        return self.first_frame(seq_of, seq + 1, (descriptor.first, descriptor.last))[0]

    def end_of(self, seq: int) -> int:
        """Where the frames up to `seq` end."""
        frame = self.frame_after(seq)
        if frame == self.descriptor.frame_count:
            return self.descriptor.body_bytes
        return self.positions(frame, frame + 1)[0]

    def chunks_after(self, seq: int, seq_stop: int, reading: SegmentReading) -> Iterator[Chunk]:
        """Chunks from the first frame above `seq` on, until one ends at `seq_stop` or above, or the segment
        ends."""
        descriptor = self.descriptor
        frame = self.frame_after(seq)
        end_frame = descriptor.frame_count
        if descriptor.last - descriptor.first + 1 == end_frame and seq_stop < descriptor.last:
            end_frame = max(seq_stop + 1 - descriptor.first, frame + 1)
        stretch = SegmentStretch(0, array("I"))
        while frame < end_frame:
            stretch = self._stretch(stretch, frame, end_frame)
            chunk = self._chunk(frame, seq, stretch, reading)
            yield chunk
            seq = chunk.seq_last
            if seq >= seq_stop:
                return
            frame += reading.frames

    def _stretch(self, stretch: SegmentStretch, frame: int, end_frame: int) -> SegmentStretch:
        """The positions from `frame` on, with one after the last frame that a chunk may have."""
        at = frame - stretch.first
        known = stretch.positions
        reaches_end = stretch.first + len(known) > end_frame
        if at < len(known) and (reaches_end or known[-1] >= known[at] + CHUNK_BYTES):
            return stretch
        last = min(frame + STRETCH_FRAMES, end_frame + 1)
        positions = self.positions(frame, min(last, self.descriptor.frame_count))
        if last > self.descriptor.frame_count:
            positions.append(self.descriptor.body_bytes)
        if any(map(int.__ge__, positions, positions[1:])):
            raise self._misfit()
        return SegmentStretch(frame, positions)

    def _chunk(self, frame: int, seq: int, stretch: SegmentStretch, reading: SegmentReading) -> Chunk:
        """The frames from `frame` on, about CHUNK_BYTES of them."""
        positions, at = stretch.positions, frame - stretch.first
        start = positions[at]
        stop = min(max(bisect_right(positions, start + CHUNK_BYTES) - 1, at + 1), len(positions) - 1)
        end = positions[stop]
        self._read_ahead(start, end, positions[-1], reading)
        offset, data = self.read_blocks(start, end, sequential=True)
        seq_before = seq
        if not frame:
            seq_before = SegmentHeader.decode(data[:HEADER_BYTES]).seq_before
        seq_last = seq_of(data[positions[stop - 1] - offset :][:8])
        if not seq < seq_of(data[start - offset :][:8]) <= seq_last <= self.descriptor.last:
            raise Corrupt(
                "the frames of the segment are not in order",
                path=self._fetcher.where(self.name),
                seq=seq_last,
                offset=start,
            )
        reading.frames = stop - at
        reading.used_bytes += end - start
        return Chunk(seq_before, seq_last, data, start - offset, end - offset, verified=True)

    def _read_ahead(self, start: int, end: int, limit: int, reading: SegmentReading) -> None:
        """Bring the chunk into memory, with what is likely to be read after it."""
        opened = self._open()
        if reading.segment is not self:
            reading.segment, reading.loaded = self, 0
        if end <= reading.loaded:
            return
        ahead = min(max(reading.used_bytes // AHEAD_PARTS, AHEAD_BYTES_MIN), AHEAD_BYTES_MAX)
        until = min(max(end, start + ahead), limit)
        self._load(opened, start, until)
        reading.loaded = until
        if reading.used_bytes >= FETCH_BYTES:
            stored = opened.form.stored_range(until, min(until + ahead, limit))
            self._fetcher.load_ahead(self.name, opened.form.stored_bytes, *stored)

    def _load(self, opened: _Opened, start: int, end: int) -> None:
        start, end = opened.form.stored_range(start, min(end, self.descriptor.size))
        # More than this would push out of memory what was read first.
        self._fetcher.load(self.name, opened.form.stored_bytes, start, min(end, start + FETCH_BYTES))

    def seq_before_time(self, time_us: int) -> int | None:
        """The seq of the last frame before `time_us`; None where there is none."""
        descriptor = self.descriptor
        times = (descriptor.time_min_us, descriptor.time_max_us)
        frame, seq_before = self.first_frame(time_of, time_us, times)
        if not frame:
            return None
        return self.seq_at(frame - 1) if seq_before is None else seq_before

    def seq_at(self, frame: int) -> int:
        (position,) = self.positions(frame, frame + 1)
        return seq_of(self.read(position, position + 8))

    # ------------------------------------------------------------------ frames, one by one

    def frame_at(self, position: int, size: int = FRAME_FIXED_BYTES, slack: int = 0) -> bytes:
        """The whole frame that begins there. It is likely to have at least `size` bytes and at most `slack`
        more, so that one request brings it."""
        body_bytes = self.descriptor.body_bytes
        if not HEADER_BYTES <= position <= body_bytes - FRAME_FIXED_BYTES:
            raise Corrupt(
                "no frame can begin there",
                path=self._fetcher.where(self.name),
                offset=position,
                hint=HINT,
            )
        end = min(position + size + slack, body_bytes)
        offset, data = self.read_blocks(position, end)
        at = position - offset
        frame_bytes = FRAME_BYTES + format.FRAME.unpack_from(data, at)[1]
        if at + frame_bytes <= len(data):
            return data[at : at + frame_bytes]
        return data[at:] + self.read(offset + len(data), position + frame_bytes)

    def frame_of(self, seq: int) -> tuple[int, bytes] | None:
        """The frame with this seq, and where it begins."""
        frame = self.frame_after(seq - 1)
        if frame == self.descriptor.frame_count:
            return None
        (position,) = self.positions(frame, frame + 1)
        data = self.frame_at(position)
        return (position, data) if seq_of(data) == seq else None

    def frames_of(
        self, seqs: Sequence[int], fits: Callable[[int], bool] = lambda _: True
    ) -> Iterator[tuple[int, bytes | None]]:
        """The frames with these seqs, which rise and are all here; None for those that do not fit, by their
        size. Blocks that several lie in are read once."""
        offset, data = 0, b""
        for seq in seqs:
            frame = self.frame_after(seq - 1)
            if frame == self.descriptor.frame_count:
                raise self._misfit()
            (position,) = self.positions(frame, frame + 1)
            if not offset <= position <= offset + len(data) - FRAME_FIXED_BYTES:
                body_bytes = self.descriptor.body_bytes
                offset, data = self.read_blocks(position, min(position + FRAME_FIXED_BYTES, body_bytes))
            at = position - offset
            end = at + FRAME_BYTES + format.FRAME.unpack_from(data, at)[1]
            if seq_of(data[at : at + 8]) != seq:
                raise self._misfit()
            if not fits(end - at):
                yield seq, None
            elif end <= len(data):
                yield seq, data[at:end]
            else:
                yield seq, data[at:] + self.read(offset + len(data), offset + end)

    def frames_of_key(self, bucket: bytes, key: bytes) -> Iterator[tuple[int, bytes]]:
        """The frames of a key, or of one with the same checksum, the newest first, with where they begin."""
        trailer = self._open().trailer
        sections = trailer.section_offsets()
        wanted = crc32(bucket + key)
        low, high = 0, trailer.key_count
        while high - low > STRETCH_FRAMES:
            middle = (low + high) // 2
            if self._numbers(sections.key_hashes, middle, middle + 1)[0] < wanted:
                low = middle
            else:
                high = middle + 1
                if self._numbers(sections.key_hashes, middle, middle + 1)[0] == wanted:
                    break
        hashes = self._numbers(sections.key_hashes, low, high)
        start = low + bisect_left(hashes, wanted)
        stop = low + bisect_right(hashes, wanted)
        while stop == high and high < trailer.key_count:
            more = self._numbers(sections.key_hashes, high, min(high + STRETCH_FRAMES, trailer.key_count))
            stop, high = high + bisect_right(more, wanted), high + len(more)
        for frame in reversed(self._numbers(sections.key_frames, start, stop)):
            if frame >= self.descriptor.frame_count:
                raise self._misfit()
            (position,) = self.positions(frame, frame + 1)
            yield position, self.frame_at(position)

    @property
    def key_count(self) -> int:
        """How many frames are in the key index."""
        return self._open().trailer.key_count

    def kinds(self) -> dict[int, int]:
        """How many frames there are of each kind."""
        trailer = self._open().trailer
        start = trailer.section_offsets().kinds
        stored = self._footer(start, start + format.KIND_COUNT.size * trailer.kind_count)
        return dict(format.KIND_COUNT.iter_unpack(stored))


class SegmentReading:
    """How far a sequential reader has come."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.frames = 0  # of the last chunk
        self.segment: RemoteSegment | None = None
        self.loaded = 0  # up to here the segment was read ahead
