"""Reading frames from a file whose footer does not exist yet, or is not to be trusted.

Always true: a scan returns the longest run of whole, checked frames (and whole groups) from the start of a
segment, and says why it ended; it decides nothing about what that means. Memory does not depend on the size
of the file.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from typing import Protocol

from lowwater.engine.format import format
from lowwater.engine.format.fast import walk_frames
from lowwater.engine.format.format import FRAME_BYTES, HEADER_BYTES, Flag, SegmentHeader
from lowwater.engine.log.chain import FIRST_CONTROL_KIND, Chain, before_segment
from lowwater.engine.log.pieces import GroupWalk, step
from lowwater.engine.seams.checksum import crc32
from lowwater.errors import DataError, InputError, NewerVersion

READ_BYTES = 2**20
_ZEROS = bytes(READ_BYTES)
_GROUP = int(Flag.GROUP)
# Of data, as most frames are.
_PLAIN_KINDS = bytes(kind for kind in format.Kind if kind < FIRST_CONTROL_KIND)
_PLAIN_FLAGS = format.FLAGS_KNOWN & ~_GROUP


class FrameBytes(Protocol):
    def read_at(self, offset: int, size: int) -> bytes: ...


@dataclass(slots=True)
class Scan:
    """What a scan found."""

    chain: Chain
    """The chain after the last good frame."""
    end: int
    """Where the last good frame, or the last whole group, ends."""
    positions: array[int] = field(default_factory=lambda: array("I"))
    seq_first: int = 0
    complete: bool = False
    """The last good frame ends its segment."""
    problem: str | None = None
    """Why the scan stopped before the end of the data; None where nothing but zeros, or nothing, follows."""
    problem_offset: int = 0


def scan_frames(file: FrameBytes, header: SegmentHeader, *, stop: int) -> Scan:
    """Check the frames between the header and `stop`, which is where the file, or its frames, end."""
    scan = Scan(chain=before_segment(header), end=HEADER_BYTES)
    positions = scan.positions
    add_position = positions.append
    unpack = format.FRAME_FIXED.unpack_from
    walk = GroupWalk()
    chain = scan.chain
    # The common frame moves only these three; `chain` is brought up to date for the others.
    seq_last, time_us, position = chain.seq_last, chain.time_us, 0
    segment_bytes = header.segment_bytes
    good: tuple[Chain, int, int] | None = None  # (chain, end, frames) before an unfinished group
    offset, data = HEADER_BYTES, b""
    problem: str | None = None

    while True:
        view = memoryview(data)
        size = len(data)
        needed = format.FRAME_FIXED_BYTES
        while True:
            if walk_frames is not None and good is None and chain.body_bytes:
                found, seq_last, time_us, position = walk_frames(
                    data, position, seq_last, time_us, _PLAIN_KINDS, _PLAIN_FLAGS, offset, segment_bytes
                )
                positions.frombytes(found)
            if size - position < format.FRAME_FIXED_BYTES:
                break
            seq, length, checksum, kind, flags, _, _, _, frame_time_us, _ = unpack(data, position)
            frame_end = position + FRAME_BYTES + length
            if frame_end > size:
                needed = FRAME_BYTES + length
                break
            if (
                seq <= seq_last
                or length < format.FIXED_BYTES
                or checksum != crc32(view[position + 16 : frame_end], crc32(view[position : position + 12]))
            ):
                break
            if (
                kind >= FIRST_CONTROL_KIND
                or flags & _GROUP
                or good is not None
                or format.KIND_NAMES[kind] is None
                or flags & ~format.FLAGS_KNOWN
                or frame_time_us < time_us
                or not chain.body_bytes
                or offset + frame_end >= segment_bytes
            ):
                format.check_kind_and_flags(kind, flags)
                if chain.body_bytes:
                    chain = chain._replace(seq_last=seq_last, time_us=time_us, body_bytes=offset + position)
                elif scan.complete:
                    problem = "a frame follows the one that ends its segment"
                    break
                if flags & _GROUP and good is None:
                    good = chain, offset + position, len(positions)
                payload = data[position + FRAME_BYTES : frame_end]
                try:
                    chain, _, scan.complete = step(chain, seq, payload, FRAME_BYTES + length, walk, header)
                except NewerVersion:
                    raise
                except (DataError, InputError) as error:
                    problem = error.message
                    break
                if not walk.in_group:
                    good = None
            add_position(offset + position)
            if not scan.seq_first:
                scan.seq_first = seq
            seq_last, time_us = seq, frame_time_us
            position = frame_end
        view.release()
        if problem is not None:
            break
        # Either the frame at `position` is not wholly in `data`, or it is not a frame.
        available = stop - (offset + position)
        if size - position >= needed and size - position >= format.FRAME_FIXED_BYTES:
            problem = why_not_a_frame(data, position, seq_last)
            break
        if available < format.FRAME_FIXED_BYTES or needed > available:
            problem = "a frame is cut short" if available else None
            if available and all_zero(file, offset + position, stop):
                problem = None
            elif needed > available:
                problem = "a frame is longer than what is left"
            break
        if needed > format.BATCH_BYTES_MAX:
            problem = "a frame has an impossible length"
            break
        offset += position
        data = file.read_at(offset, min(max(READ_BYTES, needed), stop - offset))
        position = 0
        if len(data) < needed:
            problem = "the file is shorter than it was"
            break

    end = offset + position
    if scan.complete:
        scan.chain = chain
    elif chain.body_bytes:
        scan.chain = chain._replace(seq_last=seq_last, time_us=time_us, body_bytes=end)
    scan.end = end
    if problem is not None and all_zero(file, end, stop):
        problem = None
    scan.problem, scan.problem_offset = problem, end
    if good is not None:
        # What was read of an unfinished group does not count.
        scan.chain, scan.end, frame_count = good
        del positions[frame_count:]
        if scan.problem is None:
            scan.problem = "a group is not complete"
    return scan


def why_not_a_frame(data: bytes, position: int, seq_last: int) -> str:
    seq, length, _ = format.FRAME.unpack_from(data, position)
    if not length and not seq:
        return "there is no frame here"
    if length > format.PAYLOAD_BYTES_MAX or length < format.FIXED_BYTES:
        return "a frame has an impossible length"
    if format.frame_checksum(seq, data[position + 16 : position + 16 + length]) != int.from_bytes(
        data[position + 12 : position + 16], "little"
    ):
        return "a frame's checksum does not match"
    return f"seq {seq} follows seq {seq_last}"


def all_zero(file: FrameBytes, start: int, stop: int) -> bool:
    while start < stop:
        data = file.read_at(start, min(READ_BYTES, stop - start))
        if not data:
            return True
        if data != (_ZEROS if len(data) == READ_BYTES else bytes(len(data))):
            return False
        start += len(data)
    return True


# What one search may read in candidates, each of which can claim to be 32 MiB long.
_SEARCH_BYTES_MAX = 2**30

_known_kinds = b"".join(re.escape(bytes([kind])) for kind in format.Kind)
# Where a frame could begin: a length below 32 MiB, a known kind, and no flag above the known ones.
_CANDIDATE = re.compile(rb"(?=.{11}[\x00\x01].{4}[" + _known_kinds + rb"].[\x00-\x03])", re.DOTALL)


def is_frame(
    file: FrameBytes, offset: int, stop: int, *, seq_above: int = 0, seq_max: int = format.SEQ_MAX
) -> bool:
    """Whether a whole, checked frame with a seq above `seq_above` begins at `offset` and ends by `stop`."""
    if offset + format.FRAME_FIXED_BYTES > stop:
        return False
    head = file.read_at(offset, FRAME_BYTES)
    if len(head) < FRAME_BYTES:
        return False  # the file is shorter than it was
    seq, length, checksum = format.FRAME.unpack(head)
    if not seq_above < seq <= seq_max or not format.FIXED_BYTES <= length <= format.PAYLOAD_BYTES_MAX:
        return False
    if offset + FRAME_BYTES + length > stop:
        return False
    payload = file.read_at(offset + FRAME_BYTES, length)
    return len(payload) == length and bool(format.frame_checksum(seq, payload) == checksum)


def find_frame(file: FrameBytes, start: int, stop: int, *, seq_above: int) -> int | None:
    """Where the first whole, checked frame with a seq above `seq_above` begins at or after `start`.

    It may also name a place of which it could not tell in a reasonable time: to the caller, who asks whether
    damage is more than a torn write, the careful answer is yes.
    """
    budget_bytes = _SEARCH_BYTES_MAX
    overlap = format.FRAME_FIXED_BYTES - 1
    while start < stop:
        window = file.read_at(start, min(READ_BYTES + overlap, stop - start))
        if not window:
            return None
        if window.count(0) < len(window):
            for match in _CANDIDATE.finditer(window):
                at = match.start()
                if len(window) - at < format.FRAME_FIXED_BYTES:
                    break
                fields = format.FRAME_FIXED.unpack_from(window, at)
                seq, length, checksum, _, _, bucket_len, key_len, metadata_len, _, _ = fields
                if (
                    seq <= seq_above
                    or bucket_len > format.BUCKET_BYTES_MAX
                    or key_len > format.KEY_BYTES_MAX
                    or format.FIXED_BYTES + bucket_len + key_len + metadata_len > length
                    or start + at + FRAME_BYTES + length > stop
                ):
                    continue
                budget_bytes -= length
                if budget_bytes < 0:
                    # Data that looks like the beginnings of frames everywhere: this may be one.
                    return start + at
                payload = file.read_at(start + at + FRAME_BYTES, length)
                if len(payload) == length and format.frame_checksum(seq, payload) == checksum:
                    return start + at
        start += READ_BYTES
    return None
