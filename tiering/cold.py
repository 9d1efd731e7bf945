"""The log in the object store, for readers whose entries or values are no longer on the local disk.

Always true:
  - what is read is what the catalogue names, and nothing else: its descriptors pin every byte;
  - a reader gets the frames above its position in order, each once, or an error; by that it loses nothing,
    because a new one can begin where it stood;
  - the catalogue may grow while somebody reads, and never changes otherwise.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from lowwater.engine.format import format
from lowwater.engine.log.reader import seq_of
from lowwater.engine.log.ring import Chunk
from lowwater.engine.state.catalogue import SegmentDescriptor
from lowwater.errors import Corrupt
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.remote_segment import RemoteSegment, SegmentReading

# Of so many segments the hashes are kept in memory.
SEGMENTS_MAX = 256
# What a frame may have before its value without a second request for the rest: names and metadata.
FRAME_SLACK_BYTES = 2048


class ShippedSegments(Protocol):
    """What is read here of the log's catalogue (`engine/state/catalogue.py`)."""

    def segment_of(self, seq: int) -> SegmentDescriptor | None: ...

    def segments_from(self, seq: int) -> Iterator[SegmentDescriptor]: ...

    def segment_from_time(self, time_us: int) -> SegmentDescriptor | None: ...

    @property
    def hwm(self) -> int: ...


class ColdLog:
    """Fulfils `ColdSource`. It may be read by several threads at once."""

    def __init__(
        self,
        fetcher: Fetcher,
        catalogue: ShippedSegments,
        name_of: Callable[[SegmentDescriptor], str],
    ) -> None:
        """`name_of` says what an object is called."""
        self._fetcher = fetcher
        self._catalogue = catalogue
        self._name_of = name_of
        self._lock = threading.Lock()
        self._segments: OrderedDict[tuple[int, int], RemoteSegment] = OrderedDict()

    def segment(self, descriptor: SegmentDescriptor) -> RemoteSegment:
        key = (descriptor.epoch, descriptor.first)
        with self._lock:
            found = self._segments.get(key)
            if found is None:
                found = RemoteSegment(self._fetcher, self._name_of(descriptor), descriptor)
                self._segments[key] = found
                if len(self._segments) > SEGMENTS_MAX:
                    self._segments.popitem(last=False)
            self._segments.move_to_end(key)
            return found

    # ------------------------------------------------------------------ entries

    def chunks_after(self, seq: int, seq_stop: int) -> Iterator[Chunk]:
        """Chunks from the first frame above `seq` on, until one ends at `seq_stop` or above it, or no more
        was shipped."""
        reading = SegmentReading()
        for descriptor in self._catalogue.segments_from(seq + 1):
            chunks = self.segment(descriptor).chunks_after(seq, seq_stop, reading)
            while True:
                with self._fetcher.query():
                    chunk = next(chunks, None)
                if chunk is None:
                    break
                self._fetcher.metrics.used(chunk.end - chunk.start)
                seq = chunk.seq_last
                yield chunk
                if seq >= seq_stop:
                    return

    def seq_before_time(self, time_us: int) -> int | None:
        """The last seq before `time_us`, or None where the archive begins later."""
        descriptor = self._catalogue.segment_from_time(time_us)
        if descriptor is None:
            return self._catalogue.hwm or None
        segment = self.segment(descriptor)
        with self._fetcher.query():
            seq = segment.seq_before_time(time_us)
            if seq is None:
                header = segment.header()
                seq = header.seq_before
                if seq and time_us <= header.time_before_us:
                    return None
        return seq

    # ------------------------------------------------------------------ values

    def value(self, segment_first: int, offset: int, length: int) -> bytes:
        """The large value whose frame lies there."""
        with self._fetcher.query():
            size = format.FRAME_FIXED_BYTES + length
            frame = self._holding(segment_first).frame_at(offset, size, FRAME_SLACK_BYTES)
        if len(frame) < size:
            raise self._no_value(segment_first, offset)
        self._fetcher.metrics.used(length)
        return frame[len(frame) - length :]

    def value_range(self, segment_first: int, offset: int, length: int, start: int, stop: int) -> bytes:
        """The bytes from `start` to below `stop` of it."""
        with self._fetcher.query():
            segment = self._holding(segment_first)
            head = segment.read(offset, offset + format.FRAME_BYTES)
            frame_bytes = format.FRAME_BYTES + format.FRAME.unpack(head)[1]
            if frame_bytes < format.FRAME_FIXED_BYTES + length:
                raise self._no_value(segment_first, offset)
            value_at = offset + frame_bytes - length
            data = segment.read(value_at + start, value_at + stop)
        self._fetcher.metrics.used(len(data))
        return data

    def frame_seq(self, segment_first: int, offset: int) -> int:
        with self._fetcher.query():
            return seq_of(self._holding(segment_first).read(offset, offset + 8))

    def place_of(self, seq: int) -> tuple[int, int] | None:
        descriptor = self._catalogue.segment_of(seq)
        if descriptor is None:
            return None
        with self._fetcher.query():
            found = self.segment(descriptor).frame_of(seq)
        return None if found is None else (descriptor.first, found[0])

    def _holding(self, segment_first: int) -> RemoteSegment:
        descriptor = self._catalogue.segment_of(segment_first)
        if descriptor is None or descriptor.first != segment_first:
            raise Corrupt(
                f"the segment from {segment_first} on, with a large value, is neither here nor shipped",
                seq=segment_first,
            )
        return self.segment(descriptor)

    def _no_value(self, segment_first: int, offset: int) -> Corrupt:
        segment = self._holding(segment_first)
        return Corrupt(
            "the frame there is too short for the value that it has to hold",
            path=self._fetcher.where(segment.name),
            offset=offset,
        )
