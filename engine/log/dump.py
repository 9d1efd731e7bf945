"""Entries from the files of a log: which are wanted, and how they look. For logs in any state.

Always true:
  - an entry comes from a whole frame whose checksum holds, in the order of the log, and once;
  - memory is one frame, a read, and the footer of one segment, whatever is asked for;
  - what cannot be read ends the dump with an error, after all that comes before it; in salvage mode it is
    told as a finding, and the dump goes on with the next whole frame.

A log that another process writes to is read as far as it is whole; its newest entries may not be durable yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from zlib import crc32

from lowwater.engine.format import format
from lowwater.engine.format.entries import Entry, decode_payload
from lowwater.engine.format.format import HEADER_BYTES, Flag, Kind, SegmentHeader, SegmentTrailer
from lowwater.engine.log.check import Finding, require_log
from lowwater.engine.log.directory import (
    Hint,
    Segment,
    check_link,
    read_hint,
    read_trailer,
    sealed_segment,
    typed_errors,
)
from lowwater.engine.log.reader import SealedReader, first_frame, seq_of, time_of
from lowwater.engine.log.recover import hash_body
from lowwater.engine.log.salvage import Frame, TolerantFile, salvage_frames, whole_frames
from lowwater.engine.log.scan import FrameBytes, Scan, scan_frames
from lowwater.engine.log.walk import WalkPlace, is_directory, judge_current, open_place, open_single, walk
from lowwater.engine.seams.seams import File, Files
from lowwater.errors import Corrupt, DataError, LowwaterError

SALVAGE_HINT = "run `lowwater log repair` into a copy, or restore this segment"


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which entries are wanted. Seqs are inclusive; a time is before `time_stop_us`.

    A bucket with a key asks for what was done to that key: refused entries and messages are left out, as
    they are from the key index of a footer.
    """

    seq_first: int = 0
    seq_last: int = format.SEQ_MAX
    time_first_us: int = 0
    time_stop_us: int = format.SEQ_MAX + 1
    kinds: frozenset[int] = frozenset()
    bucket: str | None = None
    key: str | None = None
    key_prefix: str | None = None
    _bucket: bytes | None = field(init=False, default=None)
    _key: bytes | None = field(init=False, default=None)
    _prefix: bytes | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for name, text in (("_bucket", self.bucket), ("_key", self.key), ("_prefix", self.key_prefix)):
            if text is not None:
                data = format.encode_name(text, "name", format.METADATA_BYTES_MAX, empty_allowed=True)
                object.__setattr__(self, name, data)

    @property
    def key_hash(self) -> int | None:
        """What the key index is asked for, where it can answer."""
        if not self._bucket or self._key is None:
            return None
        return crc32(self._bucket + self._key)

    def wants(self, frame: Frame) -> bool:
        payload = frame.payload
        kind, flags, bucket_len, key_len, _, time_us, _ = format.FIXED.unpack_from(payload)
        if not self.seq_first <= frame.seq <= self.seq_last:
            return False
        if not self.time_first_us <= time_us < self.time_stop_us or (self.kinds and kind not in self.kinds):
            return False
        if self._bucket is None and self._key is None and self._prefix is None:
            return True
        start = format.FIXED_BYTES
        if flags:
            start = format.decode_extras(flags, payload, start, len(payload))[1]
        bucket = payload[start : start + bucket_len]
        key = payload[start + bucket_len : start + bucket_len + key_len]
        if self.key_hash is not None and (kind == Kind.APPEND or flags & Flag.REFUSED):
            return False
        return (
            (self._bucket is None or bucket == self._bucket)
            and (self._key is None or key == self._key)
            and (self._prefix is None or key.startswith(self._prefix))
        )


def dump_entries(
    files: Files, path: str, selection: Selection, *, salvage: bool = False
) -> Iterator[Entry | Finding]:
    """The wanted entries of a log directory, or of one segment. Findings come in salvage mode only."""
    dump = _Dump(files, selection)
    read = dump.salvage if salvage else dump.read
    if not is_directory(files, path):
        dump.single = True
        with typed_errors(path, "read the segment"):
            file, place = open_single(files, path)
            try:
                yield from read(file, place)
            finally:
                file.close()
        return
    require_log(files, path)
    with typed_errors(path, "read the log directory"):
        dump.hint = read_hint(files, path)
    held: LowwaterError | None = None
    seq_last = 0
    for place in walk(files, path):
        held = None
        if place.seq_first > selection.seq_last:
            return
        seq_last = max(seq_last, place.seq_last)
        if place.state != "current" and place.seq_last < selection.seq_first:
            dump.before = None
            continue
        try:
            with typed_errors(place.path, "read the segment"):
                file, place = open_place(files, place)
                try:
                    yield from read(file, place)
                finally:
                    file.close()
        except LowwaterError as error:
            if place.state != "current":
                raise
            # The log may have been rotated while this was read: then a segment comes after it.
            held = error
        if dump.finished:
            return
    if held is not None:
        raise held
    seq_last = max(seq_last, dump.seq_last)
    if dump.hint is not None and seq_last < dump.hint.durable_seq:
        missing = Corrupt(
            f"the log was durable up to seq {dump.hint.durable_seq} and ends with seq {seq_last} now",
            path=path,
            seq=seq_last,
        )
        if not salvage:
            raise missing
        yield Finding.of(missing, path)


class _Dump:
    def __init__(self, files: Files, selection: Selection) -> None:
        self._files = files
        self._selection = selection
        self.hint: Hint | None = None
        self.before: Segment | None = None
        self.finished = False
        # A file on its own must be a segment; in a log it may be one that a crash kept from beginning.
        self.single = False
        self.seq_last = 0  # of what was passed, wanted or not

    # ------------------------------------------------------------------ sound logs

    def read(self, file: File, place: WalkPlace) -> Iterator[Entry]:
        """The entries of a segment; raises where the first is damaged that was asked for."""
        if place.state == "current":
            yield from self._read_current(file, place)
            return
        header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
        before, self.before = self.before, None
        check_link(header, before, place.path)
        problem: DataError | None = None
        try:
            if place.state == "sealed":
                reader = SealedReader(file)
                if not self._may_hold(reader.trailer):
                    self.before = sealed_segment(place.path, header, reader.trailer)
                    return
                yield from self._read_sealed(file, reader)
                self.before = sealed_segment(place.path, header, reader.trailer)
                return
        except Corrupt as error:
            # The frames may be whole where the footer is not, or up to a bad block.
            problem = error
        scan = scan_frames(file, header, stop=file.size())
        yield from self._frames(file, HEADER_BYTES, scan.end, header.seq_before)
        if not scan.complete:
            problem = problem or Corrupt(
                scan.problem or "the segment is not complete", seq=scan.chain.seq_last, offset=scan.end
            )
        if problem is not None:
            raise problem
        self.before = _unsealed_segment(file, place.path, header, scan)

    def _may_hold(self, trailer: SegmentTrailer) -> bool:
        selection = self._selection
        return selection.time_first_us <= trailer.time_max_us and trailer.time_min_us < selection.time_stop_us

    def _read_sealed(self, file: File, reader: SealedReader) -> Iterator[Entry]:
        selection, positions = self._selection, reader.positions
        stop = reader.trailer.body_bytes
        key_hash = selection.key_hash
        if key_hash is not None:
            for frame in _frames_of_key(file, reader.trailer, key_hash):
                end = positions[frame + 1] if frame + 1 < len(positions) else stop
                yield from self._frames(file, positions[frame], end, self.seq_last)
            self.seq_last = reader.trailer.seq_last
            return
        start, seq_before = self._start(file, reader)
        yield from self._frames(file, start, stop, seq_before)

    def _start(self, file: File, reader: SealedReader) -> tuple[int, int]:
        """Where the wanted frames begin, and the seq before them."""
        selection, positions = self._selection, reader.positions
        start, seq_before = HEADER_BYTES, reader.header.seq_before
        verified = partial(_verified, file, reader.trailer.body_bytes)
        try:
            for measure, lowest in ((seq_of, selection.seq_first), (time_of, selection.time_first_us)):
                frame, before = first_frame(file, positions, len(positions), verified, measure, lowest)
                if before is not None and seq_of(before) > seq_before:
                    start = positions[frame] if frame < len(positions) else reader.trailer.body_bytes
                    seq_before = seq_of(before)
        except Corrupt:
            pass  # all is read then, up to the damage
        return start, seq_before

    def _read_current(self, file: File, place: WalkPlace) -> Iterator[Entry]:
        if self.single:
            SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
        problem: LowwaterError | None = None
        try:
            found = judge_current(file, place.path, self.before, self.hint)
            if found is None:
                return
            header, scan = found.header, found.scan
        except Corrupt as error:
            problem = error
            header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
            check_link(header, self.before, place.path)
            scan = scan_frames(file, header, stop=file.size())
        yield from self._frames(file, HEADER_BYTES, scan.end, header.seq_before)
        if problem is not None:
            raise problem

    def _frames(self, file: FrameBytes, start: int, stop: int, seq_before: int) -> Iterator[Entry]:
        for frame in whole_frames(file, start, stop, seq_before=seq_before):
            if frame.seq > self._selection.seq_last:
                self.finished = True
                return
            if frame.seq > self.seq_last:
                self.seq_last = frame.seq
                if self._selection.wants(frame):
                    try:
                        yield decode_payload(frame.seq, frame.payload)
                    except LowwaterError as error:
                        error.offset = frame.offset
                        raise

    # ------------------------------------------------------------------ damaged logs

    def salvage(self, file: File, place: WalkPlace) -> Iterator[Entry | Finding]:
        """The entries of all whole frames of a segment, and what is wrong with the rest."""
        tolerant = TolerantFile(file)
        path, stop = place.path, file.size()
        header: SegmentHeader | None = None
        positions: Sequence[int] = ()
        seq_before, seq_max = self.seq_last, place.seq_last or format.SEQ_MAX
        try:
            header = SegmentHeader.decode(tolerant.read_at(0, HEADER_BYTES))
            check_link(header, self.before, path)
        except DataError as error:
            yield Finding.of(error, path)
        self.before = None
        if place.state == "sealed":
            try:
                trailer = read_trailer(tolerant, stop)
                stop, seq_max = trailer.body_bytes, trailer.seq_last
                reader = SealedReader(tolerant)
                positions = reader.positions
                self.before = sealed_segment(path, reader.header, trailer)
            except DataError as error:
                yield Finding.of(error, path)
        if header is not None and not positions:
            scan = scan_frames(tolerant, header, stop=stop)
            if scan.complete:
                stop = scan.end  # what follows is the footer
        for item in salvage_frames(
            tolerant, HEADER_BYTES, stop, seq_before=seq_before, seq_max=seq_max, positions=positions
        ):
            if not isinstance(item, Frame):
                what = f"{item.what}: skipped {item.end - item.start:,} bytes after seq {item.seq_before}"
                yield Finding("error", what, path, item.seq_before, item.start, SALVAGE_HINT)
                continue
            self.seq_last = item.seq
            try:
                if self._selection.wants(item):
                    yield decode_payload(item.seq, item.payload)
            except Corrupt as error:
                error.offset = item.offset
                yield Finding.of(error, path)


def _unsealed_segment(file: File, path: str, header: SegmentHeader, scan: Scan) -> Segment:
    return Segment(
        path=path,
        header=header,
        seq_first=scan.seq_first,
        seq_last=scan.chain.seq_last,
        body_bytes=scan.end,
        time_last_us=scan.chain.time_us,
        segment_hash=hash_body(file, scan.end, header.block_bytes)[1],
        sealed=False,
    )


def _verified(file: File, stop: int, position: int) -> bytes:
    """The first bytes of a frame, for a search that must not be led astray."""
    for frame in whole_frames(file, position, stop, seq_before=0):
        head = format.FRAME.pack(frame.seq, len(frame.payload), 0)
        return head + frame.payload[: format.FIXED_BYTES]
    raise Corrupt("the footer names a frame where there is none", offset=position)


def _frames_of_key(file: File, trailer: SegmentTrailer, key_hash: int) -> list[int]:
    """The numbers of the frames with this key hash, in order."""
    sections = trailer.section_offsets()

    def first_not_below(value: int) -> int:
        low, high = 0, trailer.key_count
        while low < high:
            middle = (low + high) // 2
            found = int.from_bytes(file.read_at(sections.key_hashes + 4 * middle, 4), "little")
            if found < value:
                low = middle + 1
            else:
                high = middle
        return low

    first, stop = first_not_below(key_hash), first_not_below(key_hash + 1)
    frames = array("I", file.read_at(sections.key_frames + 4 * first, 4 * (stop - first)))
    if any(frame >= trailer.frame_count for frame in frames):
        raise Corrupt("the key index names frames that do not exist", offset=sections.key_frames)
    return sorted(frames)
