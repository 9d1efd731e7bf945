"""Opening: from pages and log to the state that was acknowledged.

Always true:
  - what the pages claim to hold is in the log, or the log has lost something and is not opened;
  - redo applies every frame from `redo_seq` on, in order. Pages that have some of them already drop those
    when they are flushed; until then the newest change of each key is in memory, where readers look first;
  - memory keeps its limit: changes are flushed while redo goes on.

| | pages | log | decision | reason |
|---|---|---|---|---|
| A | none | none | a new database | |
| B | none | from its first entry on | build the pages | a crash before the first flush, or lost pages |
| C | none | its beginning was purged | refuse | what was purged is not here |
| D | some | none, or ending below what they hold | refuse | the log was lost |
| E | some | of another cluster | refuse | two databases were mixed |
| F | some | beginning above `redo_seq` | refuse | what pages still need was purged |
| G | some | goes on from there | redo | a crash, or a clean end |
| H | of another version of this format | | refuse | an upgrade, or the way back |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from lowwater.engine.format import format
from lowwater.engine.format.fast import PutRecords
from lowwater.engine.format.fast import put_records as compiled_put_records
from lowwater.engine.format.format import FRAME_BYTES, FRAME_FIXED_BYTES
from lowwater.engine.format.records import PUT_HEAD, SHAPE, KeyPlaces, Record, put_record
from lowwater.engine.log.directory import typed_errors
from lowwater.engine.log.log import Log
from lowwater.engine.seams.checksum import crc32
from lowwater.engine.seams.seams import File, Files
from lowwater.engine.state.state import State
from lowwater.errors import Corrupt

READ_BYTES = 2**22

Progress = Callable[[int, int], None]
"""(the seq that was applied, the last one)"""


class Puts(NamedTuple):
    """Mere puts that follow one another: keys in pages, records, and the last one's seq."""

    keys: list[bytes]
    records: list[Record]
    seq_last: int


class Other(NamedTuple):
    """Any other frame, and where it lies."""

    seq: int
    payload: bytes
    segment_first: int
    offset: int


Part = Puts | Other


def parts_from(log: Log, files: Files, seq: int, small_bytes: int) -> Iterator[list[Part]]:
    """The durable frames from `seq` on, each checked, as much at once as one reading brings. `small_bytes` is
    from where on a record says where its value lies."""
    wal = log.wal
    with wal.lock:
        places = [
            (segment.seq_first, segment.body_bytes)
            for segment in wal.store.segments
            if segment.seq_last >= seq
        ]
        current = wal.store.current
        if current is not None and current.durable_frames:
            places.append((current.header.seq_first, current.durable_bytes))
    for segment_first, end in places:
        with wal.lock:
            # A segment that a crash has left unsealed is sealed meanwhile, and renamed under the lock.
            path = wal.store.path_from(segment_first)
            assert path is not None, "a segment is removed by nobody while the database is opened"
            with typed_errors(path, "read the log"):
                file = files.open(path)
        try:
            with typed_errors(path, "read the log"):
                yield from _parts_of(file, segment_first, end, seq, small_bytes)
        finally:
            file.close()


def _parts_of(
    file: File, segment_first: int, end: int, seq_from: int, small_bytes: int
) -> Iterator[list[Part]]:
    offset = format.HEADER_BYTES
    want = READ_BYTES
    while offset < end:
        data = file.read_at(offset, min(want, end - offset))
        parts, read_bytes = _parts_in(data, segment_first, offset, seq_from, small_bytes)
        if not read_bytes:
            if len(data) < want:
                raise Corrupt("the log ends inside a frame", offset=offset)
            want *= 2
            continue
        want = READ_BYTES
        offset += read_bytes
        yield parts


def _parts_in(
    data: bytes, segment_first: int, offset: int, seq_from: int, small_bytes: int
) -> tuple[list[Part], int]:
    """The frames of `data`, which lies at `offset`, from `seq_from` on; and where the last whole one ends."""
    parts: list[Part] = []
    at = 0
    while True:
        if data.startswith(PUT_HEAD, at + FRAME_BYTES):
            keys, records, seq, at = put_records(data, at, seq_from, small_bytes, segment_first, offset)
            if keys:
                parts.append(Puts(keys, records, seq))
        # What is left is no mere put, or not whole, or damaged.
        if at + FRAME_BYTES > len(data):
            return parts, at
        seq, length, checksum = format.FRAME.unpack_from(data, at)
        start, stop = at + FRAME_BYTES, at + FRAME_BYTES + length
        if stop > len(data):
            return parts, at
        if seq >= seq_from:
            payload = data[start:stop]
            if format.frame_checksum(seq, payload) != checksum:
                raise Corrupt("a frame's checksum does not match", seq=seq, offset=offset + at)
            parts.append(Other(seq, payload, segment_first, offset + at))
        at = stop


def _put_records(
    data: bytes, at: int, seq_from: int, small_bytes: int, segment_first: int, offset: int
) -> PutRecords:
    """The mere puts that follow one another from `at` on, up to what is none, not whole, or damaged. What is
    below `seq_from` is passed over."""
    keys: list[bytes] = []
    records: list[Record] = []
    places = KeyPlaces()
    unpack = format.FRAME.unpack_from
    last_seq, size = 0, len(data)
    while at + FRAME_BYTES <= size:
        seq, length, checksum = unpack(data, at)
        stop = at + FRAME_BYTES + length
        if stop > size:
            break
        if seq >= seq_from:
            frame = data[at:stop]
            place = places[frame[SHAPE]]
            if place is None or place[1] > len(frame) or crc32(frame[16:], crc32(frame[:12])) != checksum:
                break
            last_seq = seq
            keys.append(place[0] + frame[FRAME_FIXED_BYTES : place[1]])
            records.append(put_record(frame, small_bytes, segment_first, offset + at))
        at = stop
    return keys, records, last_seq, at


put_records = compiled_put_records or _put_records


def redo(
    state: State,
    read: Iterator[list[Part]],
    *,
    make_room: Callable[[], None],
    applied: Callable[[int, int], None],
) -> int:
    """Apply frames, and return how many there were. `applied` is told of each reading: how many frames, and
    the last one's seq."""
    total = 0
    for parts in read:
        count = 0
        with state.lock:
            for part in parts:
                if isinstance(part, Puts):
                    state.apply_puts(*part)
                    count += len(part.keys)
                else:
                    state.apply(*part)
                    count += 1
        total += count
        make_room()
        applied(count, state.applied)
    return total
