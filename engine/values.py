"""Large values, read from the log where they were written.

Always true: a value is returned only after its frame's checksum was compared; it is read from a file of the
log directory that is looked up by the segment's first seq, whatever that file is called by now.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from lowwater.engine import format
from lowwater.engine.checksum import crc32
from lowwater.engine.directory import CURRENT, typed_errors
from lowwater.engine.format import SegmentHeader
from lowwater.engine.log import Log
from lowwater.engine.records import VALUE_PLACE
from lowwater.engine.seams import File, Files
from lowwater.engine.walk import steady_names
from lowwater.errors import Corrupt, NotFound

OPEN_FILES_MAX = 32

# Opens the segment with this first seq; None where it is not.
OpenSegment = Callable[[int], File | None]


def segments_of(log: Log, files: Files) -> OpenSegment:
    """The segments of a log that is open here."""

    def open_segment(seq_first: int) -> File | None:
        wal = log.wal
        with wal.lock:
            # Renaming happens under the lock, and an open file stays what it is.
            path = wal.store.path_from(seq_first)
            return None if path is None else files.open(path)

    return open_segment


def segments_in(files: Files, directory: str) -> OpenSegment:
    """The segments of a log directory that somebody else may have open."""

    def open_segment(seq_first: int) -> File | None:
        with typed_errors(directory, "read the log"):
            names = steady_names(files, directory)
            for first, _, _, name in names.numbered:
                if first == seq_first:
                    return files.open(f"{directory}/{name}")
            if not names.has_current:
                return None
            file = files.open(f"{directory}/{CURRENT}")
            try:
                header = SegmentHeader.decode(file.read_at(0, format.HEADER_BYTES))
            except BaseException:
                file.close()
                raise
            if header.seq_first == seq_first:
                return file
            file.close()
            return None

    return open_segment


class ValueReader:
    def __init__(self, open_segment: OpenSegment) -> None:
        self._open_segment = open_segment
        self._open: OrderedDict[int, File] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, place: bytes) -> bytes:
        """The value that lies there."""
        segment_first, offset, length, _ = VALUE_PLACE.unpack(place)
        with self._lock:
            file = self._file(segment_first)
            head = file.read_at(offset, format.FRAME_BYTES)
            if len(head) < format.FRAME_BYTES:
                raise Corrupt("the log ends before a value that it holds", offset=offset)
            _, payload_bytes, checksum = format.FRAME.unpack(head)
            payload = file.read_at(offset + format.FRAME_BYTES, payload_bytes)
        if crc32(payload, crc32(head[:12])) != checksum or length > len(payload):
            raise Corrupt("the frame of a value does not match its checksum", offset=offset)
        return payload[len(payload) - length :]

    def frame_seq(self, place: bytes) -> int:
        """The seq of the frame that holds a value."""
        segment_first, offset, _, _ = VALUE_PLACE.unpack(place)
        with self._lock:
            head = self._file(segment_first).read_at(offset, format.FRAME_BYTES)
        return int(format.FRAME.unpack(head)[0])

    def _file(self, segment_first: int) -> File:
        file = self._open.get(segment_first)
        if file is not None:
            self._open.move_to_end(segment_first)
            return file
        file = self._open_segment(segment_first)
        if file is None:
            raise NotFound(f"the segment from {segment_first} on, with a large value, is not here")
        self._open[segment_first] = file
        if len(self._open) > OPEN_FILES_MAX:
            self._open.popitem(last=False)[1].close()
        return file

    def close(self) -> None:
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()
