"""Large values, read from the log where they were written.

Always true:
  - a value is returned only after its frame's checksum was compared, and a part of one after the blocks
    around it were hashed; in a segment that has no footer yet its whole frame is compared;
  - it is read from a file of the log directory that is looked up by the segment's first seq, whatever that
    file is called by now; where there is none any more, from the colder source, and nobody waits for that who
    does not want what it has.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

from lowwater.engine.format import format
from lowwater.engine.format.format import SegmentHeader
from lowwater.engine.format.records import VALUE_PLACE
from lowwater.engine.log.directory import CURRENT, typed_errors
from lowwater.engine.log.log import Log
from lowwater.engine.log.reader import ColdSource
from lowwater.engine.log.verified import VerifiedBlocks
from lowwater.engine.log.walk import steady_names
from lowwater.engine.seams.checksum import crc32
from lowwater.engine.seams.seams import File, Files
from lowwater.errors import ArchivedOnly, Corrupt, NotFound

OPEN_FILES_MAX = 32


class OpenedSegment(NamedTuple):
    """A segment's file, and whether it has its footer."""

    file: File
    sealed: bool


# Opens the segment with this first seq; None where it is not.
OpenSegment = Callable[[int], OpenedSegment | None]


def segments_of(log: Log, files: Files) -> OpenSegment:
    """The segments of a log that is open here."""

    def open_segment(seq_first: int) -> OpenedSegment | None:
        wal = log.wal
        with wal.lock:
            # Renaming happens under the lock, and an open file stays what it is.
            path = wal.store.path_from(seq_first)
            if path is None:
                return None
            return OpenedSegment(files.open(path), wal.store.is_sealed(seq_first))

    return open_segment


def segments_in(files: Files, directory: str) -> OpenSegment:
    """The segments of a log directory that somebody else may have open."""

    def open_segment(seq_first: int) -> OpenedSegment | None:
        with typed_errors(directory, "read the log"):
            names = steady_names(files, directory)
            for first, _, sealed, name in names.numbered:
                if first == seq_first:
                    return OpenedSegment(files.open(f"{directory}/{name}"), sealed)
            if not names.has_current:
                return None
            file = files.open(f"{directory}/{CURRENT}")
            try:
                header = SegmentHeader.decode(file.read_at(0, format.HEADER_BYTES))
            except BaseException:
                file.close()
                raise
            if header.seq_first == seq_first:
                return OpenedSegment(file, sealed=False)
            file.close()
            return None

    return open_segment


class ValueReader:
    def __init__(
        self,
        open_segment: OpenSegment,
        directory: str,
        cold_source: Callable[[], ColdSource | None] = lambda: None,
        *,
        is_shipped: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """`is_shipped` says whether the log has recorded that the segment which begins there is in an object
        store: what is missing here is no damage then."""
        self._open_segment = open_segment
        self._directory = directory
        self._cold_source = cold_source
        self._is_shipped = is_shipped
        self._open: OrderedDict[int, OpenedSegment] = OrderedDict()
        self._blocks: dict[int, VerifiedBlocks] = {}  # of the open ones that parts were read of
        self._lock = threading.RLock()  # a signal handler may call too
        self.owns_lock: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]

    @contextmanager
    def _reading(self) -> Generator[None, None, None]:
        """With the lock. NotFound is for keys: a segment that is not found is damage."""
        try:
            with typed_errors(self._directory, "read a large value"), self._lock:
                yield
        except NotFound as error:
            raise Corrupt(error.message, path=error.path) from error

    def read(self, place: bytes) -> bytes:
        """The value that lies there."""
        segment_first, offset, length, _ = VALUE_PLACE.unpack(place)
        with self._reading():
            segment = self._segment(segment_first)
            if segment is not None:
                return self._whole(segment.file, offset, length)
        return self._cold(segment_first).value(segment_first, offset, length)

    def read_range(self, place: bytes, start: int, stop: int) -> bytes:
        """The bytes from `start` to below `stop` of the value that lies there."""
        segment_first, offset, length, _ = VALUE_PLACE.unpack(place)
        assert 0 <= start <= stop <= length
        with self._reading():
            blocks = self._blocks_of(segment_first)
            if blocks is not None:
                _, payload_bytes, _ = format.FRAME.unpack(blocks.read(offset, offset + format.FRAME_BYTES))
                value_at = offset + format.FRAME_BYTES + payload_bytes - length
                return blocks.read(value_at + start, value_at + stop)
            segment = self._segment(segment_first)
            if segment is not None:
                return self._whole(segment.file, offset, length)[start:stop]
        return self._cold(segment_first).value_range(segment_first, offset, length, start, stop)

    @staticmethod
    def _whole(file: File, offset: int, length: int) -> bytes:
        head = file.read_at(offset, format.FRAME_BYTES)
        if len(head) < format.FRAME_BYTES:
            raise Corrupt("the log ends before a value that it holds", offset=offset)
        _, payload_bytes, checksum = format.FRAME.unpack(head)
        payload = file.read_at(offset + format.FRAME_BYTES, payload_bytes)
        if crc32(payload, crc32(head[:12])) != checksum or length > len(payload):
            raise Corrupt("the frame of a value does not match its checksum", offset=offset)
        return payload[len(payload) - length :]

    def _blocks_of(self, segment_first: int) -> VerifiedBlocks | None:
        """With the lock: None where the segment has no footer yet, or is not here."""
        found = self._blocks.get(segment_first)
        if found is not None:
            return found
        segment = self._segment(segment_first)
        if segment is not None and not segment.sealed:
            # It may have been sealed since it was opened.
            self._forget(segment_first)
            segment = self._segment(segment_first)
        if segment is None or not segment.sealed:
            return None
        found = self._blocks[segment_first] = VerifiedBlocks(segment.file)
        return found

    def frame_seq(self, place: bytes) -> int:
        """The seq of the frame that holds a value."""
        found = self.frame_seq_here(place)
        if found is not None:
            return found
        segment_first, offset, _, _ = VALUE_PLACE.unpack(place)
        return self._cold(segment_first).frame_seq(segment_first, offset)

    def frame_seq_here(self, place: bytes) -> int | None:
        """Return the seq of the frame that holds a value; None where its segment is not here any more."""
        segment_first, offset, _, _ = VALUE_PLACE.unpack(place)
        with self._reading():
            segment = self._segment(segment_first)
            if segment is not None:
                head = segment.file.read_at(offset, format.FRAME_BYTES)
                if len(head) < format.FRAME_BYTES:
                    raise Corrupt("the log ends before a value that it holds", offset=offset)
                return int(format.FRAME.unpack(head)[0])
        return None

    def _cold(self, segment_first: int) -> ColdSource:
        cold = self._cold_source()
        if cold is None and self._is_shipped(segment_first):
            raise ArchivedOnly(
                f"the segment from {segment_first} on, with a large value, is in the object store only",
                path=self._directory,
                hint="name the store: open with tier=, or with a configuration that has tier.uri",
            )
        if cold is None:
            raise Corrupt(
                f"the segment from {segment_first} on, with a large value, is not here", path=self._directory
            )
        return cold

    def forget_before(self, seq: int) -> None:
        """Close the segments that begin at `seq` or below: while they are open, their room on the disk is
        taken. One that is here is opened again."""
        with self._lock:
            for segment_first in [each for each in self._open if each <= seq]:
                self._forget(segment_first)

    def _segment(self, segment_first: int) -> OpenedSegment | None:
        """With the lock: None where it is not here."""
        found = self._open.get(segment_first)
        if found is not None:
            self._open.move_to_end(segment_first)
            return found
        found = self._open_segment(segment_first)
        if found is None:
            return None
        self._open[segment_first] = found
        if len(self._open) > OPEN_FILES_MAX:
            self._forget(next(iter(self._open)))
        return found

    def _forget(self, segment_first: int) -> None:
        self._blocks.pop(segment_first, None)
        self._open.pop(segment_first).file.close()

    def close(self) -> None:
        with self._lock:
            for segment_first in list(self._open):
                self._forget(segment_first)
