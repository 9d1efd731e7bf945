"""Opening a log directory after anything may have happened to the process or the machine.

Always true once `recover` has returned:
  - every frame that was ever acknowledged is there, and everything that is there is durable: what was only
    in the page cache has been written again and synced, also after a sync that had failed;
  - the only bytes that were dropped are those of one torn batch, above every position known to be durable;
  - any other damage raised an error, and no byte of the directory was changed before that was known;
  - the chain says what the log was created with, unless the segment that begins with it is not here.

| row | current.log                      | decision        | the crash that makes it                      |
|-----|----------------------------------|-----------------|----------------------------------------------|
| A   | missing                          | begin a segment | between two segments, or a new directory     |
| B   | no header, nothing durable in it | begin a segment | before the first sync of a segment           |
| C   | no header, but durable frames    | Corrupt         | none: damage                                 |
| D   | header does not follow the chain | Corrupt         | none: damage, or a file from elsewhere       |
| E   | good frames, then zeros          | go on           | kill -9, power loss between batches, a close |
| F   | good frames, then a torn batch   | truncate, go on | power loss while a batch was written         |
| G   | good frames, then other damage   | Corrupt         | none: damage                                 |
| H   | fewer frames than were durable   | Corrupt         | none: damage                                 |
| I   | a complete segment               | rotate, go on   | after the last sync of a segment             |

A batch is torn (F) where it lies above the hint and what the caller knows to be durable, and no whole frame
starts more than one maximal batch after it. With sync mode `none` everything above the hint can be torn.

The last sealed segment is looked into, since the log goes on from it: it must end as the rule of the chain
has it (`chain_after_frames`), and begin as its header says.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field as dataclass_field

from lowwater.engine.format import format
from lowwater.engine.format.entries import decode_payload
from lowwater.engine.format.format import BATCH_BYTES_MAX, HEADER_BYTES, Flag, Kind, SegmentHeader
from lowwater.engine.log.chain import FIRST_CONTROL_KIND, Chain, Creation, before_segment, leave, why_not_next
from lowwater.engine.log.directory import (
    CURRENT,
    DirectoryNames,
    Hint,
    Segment,
    check_link,
    load_sealed,
    read_names,
    require_hint,
    typed_errors,
)
from lowwater.engine.log.footer import BlockHasher
from lowwater.engine.log.pieces import GroupWalk, step
from lowwater.engine.log.scan import READ_BYTES, FrameBytes, Scan, find_frame, is_frame, scan_frames
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.seams.seams import File, Files, write_all
from lowwater.errors import Corrupt, DataError, InvalidEntry, NewerVersion, NotLowwater

# One batch is unsynced at a time, and the first of a segment has the header before it.
_TORN_BYTES_MAX = BATCH_BYTES_MAX + HEADER_BYTES
# More than the header and the first entry of any log.
_BEGINNING_BYTES = 4096

BEFORE_TRUNCATE = Failpoint("recover.before_truncate")
BEFORE_REWRITE = Failpoint("recover.before_rewrite")


@dataclass(slots=True)
class Current:
    """The segment that was being written: what is good of it."""

    header: SegmentHeader
    scan: Scan
    seq_first: int
    torn_bytes: int


@dataclass(slots=True)
class Recovered:
    chain: Chain
    segments: list[Segment] = dataclass_field(default_factory=list)
    current: Current | None = None
    hint: Hint | None = None
    names: DirectoryNames = dataclass_field(default_factory=lambda: DirectoryNames([], False, [], []))


def has_begun(files: Files, directory: str) -> bool:
    """Whether there is a log. One whose making was ended by a crash, before its first entry was durable, is
    none yet."""
    with typed_errors(directory, "open the log"):
        try:
            names = read_names(files, directory)
        except FileNotFoundError:
            return False
        if names.numbered or not names.has_current:
            return bool(names.numbered)
        file = files.open(f"{directory}/{CURRENT}")
        try:
            header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
            if scan_frames(file, header, stop=min(file.size(), _BEGINNING_BYTES)).positions:
                return True
        except (DataError, NewerVersion):
            pass
        finally:
            file.close()
    try:
        return not inspect_directory(files, directory).chain.is_empty
    except (DataError, NewerVersion):
        return True  # opening says what is wrong


def inspect_directory(files: Files, directory: str, *, durable_seq: int = 0) -> Recovered:
    """Everything that opening decides, decided without changing a byte."""
    with typed_errors(directory, "read the log directory"):
        names = read_names(files, directory)
        hint = require_hint(files, directory)
    segments: list[Segment] = []
    chain = Chain()
    before: Segment | None = None
    for seq_first, seq_last, sealed, name in names.numbered:
        path = f"{directory}/{name}"
        with typed_errors(path, "read the segment"):
            if sealed:
                segment = load_sealed(files, directory, seq_first, seq_last, name)
            else:
                segment = _load_unsealed(files, path, seq_first, seq_last)
            check_link(segment.header, before, path)
        segments.append(segment)
        before = segment
    if before is not None:
        with typed_errors(before.path, "read the segment"):
            chain = chain_after(files, before)

    floor = max(durable_seq, hint.durable_seq if hint is not None else 0)
    current = None
    path = f"{directory}/{CURRENT}"
    if names.has_current:
        with typed_errors(path, "read the segment that is being written"):
            file = files.open(path)
            try:
                current = inspect_current(file, path, before, hint, floor)
                if current is not None and before is not None:
                    why = why_not_next(chain, current.header, forks=begins_with_fork(file))
                    if why is not None:
                        raise Corrupt(why, offset=0, seq=current.seq_first)
            finally:
                file.close()
    if current is not None:
        chain = current.scan.chain
    if segments:
        chain = _with_creation(files, chain, segments[0])
    if chain.seq_last < floor:
        raise Corrupt(
            f"the log was durable up to seq {floor} and ends with seq {chain.seq_last} now",
            path=directory,
            seq=chain.seq_last,
            hint="files of the log are missing or were replaced: restore them; nothing was changed",
        )
    return Recovered(chain, segments, current, hint, names)


def _with_creation(files: Files, chain: Chain, first: Segment) -> Chain:
    """The chain with what the log's first entry alone says, where the directory still has it."""
    if first.header.seq_before:
        return chain
    with typed_errors(first.path, "read the segment"):
        file = files.open(first.path)
        try:
            creation = creation_of(file, first.header)
        finally:
            file.close()
    settings = chain.settings._replace(
        page_keys=creation.settings.page_keys, inline_bytes_max=creation.settings.inline_bytes_max
    )
    return chain._replace(creation=creation, settings=settings)


def _load_unsealed(files: Files, path: str, seq_first: int, seq_last: int) -> Segment:
    file = files.open(path)
    try:
        header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
        scan = scan_frames(file, header, stop=file.size())
        if not scan.complete or scan.chain.seq_last != seq_last or scan.seq_first != seq_first:
            raise Corrupt(
                f"the segment was complete with seq {seq_last} and is good up to {scan.chain.seq_last}",
                offset=scan.end,
                seq=scan.chain.seq_last,
            )
        block_hashes, segment_hash = hash_body(file, scan.end, header.block_bytes)
    finally:
        file.close()
    return Segment(
        path=path,
        header=header,
        seq_first=seq_first,
        seq_last=seq_last,
        body_bytes=scan.end,
        time_last_us=scan.chain.time_us,
        segment_hash=segment_hash,
        sealed=False,
        positions=scan.positions,
        block_hashes=block_hashes,
    )


def hash_body(file: FrameBytes, body_bytes: int, block_bytes: int) -> tuple[list[bytes], bytes]:
    return hasher_of(file, body_bytes, block_bytes).finish()


def hasher_of(file: FrameBytes, body_bytes: int, block_bytes: int) -> BlockHasher:
    """A hasher that has seen the first `body_bytes` of a segment."""
    hasher = BlockHasher(block_bytes)
    for start in range(0, body_bytes, READ_BYTES):
        hasher.add(file.read_at(start, min(READ_BYTES, body_bytes - start)))
    return hasher


def chain_after(files: Files, segment: Segment) -> Chain:
    file = files.open(segment.path)
    try:
        return chain_after_frames(file, segment)
    finally:
        file.close()


def chain_after_frames(file: File, segment: Segment) -> Chain:
    """The chain after a complete segment. Its header tells what held in it, and its first frame must agree;
    only its last frame can have changed that for what follows."""
    header = segment.header
    if file.read_at(HEADER_BYTES + format.FRAME_BYTES, 1)[0] >= FIRST_CONTROL_KIND or not header.seq_before:
        _after_first_frame(file, header)
    chain = before_segment(header)._replace(
        seq_last=segment.seq_last, time_us=segment.time_last_us, body_bytes=segment.body_bytes
    )
    position = _last_position(file, segment)
    payload = _payload_at(file, position, segment.seq_last)
    kind, flags = payload[0], payload[1] | payload[2] << 8
    try:
        entry = decode_payload(segment.seq_last, payload)
        chain, ended = leave(chain, kind, flags, entry, in_group=False)
    except InvalidEntry as error:
        raise Corrupt(error.message, offset=position, seq=segment.seq_last) from error
    if not ended:
        raise Corrupt("the segment was sealed before it was complete", seq=segment.seq_last, offset=position)
    return chain


def _after_first_frame(file: FrameBytes, header: SegmentHeader) -> Chain:
    """The chain after a segment's first frame, which is compared with the header."""
    payload = _payload_at(file, HEADER_BYTES, header.seq_first)
    frame_bytes = format.FRAME_BYTES + len(payload)
    try:
        chain, _, _ = step(
            before_segment(header), header.seq_first, payload, frame_bytes, GroupWalk(), header
        )
    except (Corrupt, InvalidEntry) as error:
        raise Corrupt(error.message, offset=HEADER_BYTES, seq=header.seq_first) from error
    return chain


def creation_of(file: FrameBytes, header: SegmentHeader) -> Creation:
    """What the first entry of a log says. The segment is the log's first."""
    assert not header.seq_before
    creation = _after_first_frame(file, header).creation
    assert creation is not None, "an empty chain takes no other first frame"
    return creation


def begins_with_fork(file: FrameBytes) -> bool:
    """Whether a segment, of which the first frame is known to be good, begins with another owner's `fork`."""
    head = file.read_at(HEADER_BYTES + format.FRAME_BYTES, 3)
    return head[0] == Kind.FORK and not (head[1] | head[2] << 8) & Flag.REFUSED


def _payload_at(file: FrameBytes, position: int, seq: int) -> bytes:
    """The payload of the frame that must be there, with this seq."""
    head = file.read_at(position, format.FRAME_BYTES)
    if len(head) < format.FRAME_BYTES:
        raise Corrupt("the file is shorter than it was", offset=position)
    found, length, checksum = format.FRAME.unpack(head)
    payload = file.read_at(position + format.FRAME_BYTES, min(length, format.PAYLOAD_BYTES_MAX))
    if len(payload) != length or length < format.FIXED_BYTES or found != seq:
        raise Corrupt(f"the frame of seq {seq} is not where it should be", offset=position)
    if format.frame_checksum(seq, payload) != checksum:
        raise Corrupt("a frame's checksum does not match", offset=position, seq=seq)
    return payload


def _last_position(file: File, segment: Segment) -> int:
    if segment.positions is not None:
        return segment.positions[-1]
    size = file.size()
    trailer = format.SegmentTrailer.decode(file.read_at(size - format.TRAILER_BYTES, format.TRAILER_BYTES))
    at = trailer.section_offsets().key_hashes - format.U32.size
    position: int = format.U32.unpack(file.read_at(at, format.U32.size))[0]
    if not HEADER_BYTES <= position < segment.body_bytes:
        raise Corrupt("the footer's last position lies outside the segment", offset=at)
    return position


def inspect_current(
    file: File, path: str, before: Segment | None, hint: Hint | None, floor: int
) -> Current | None:
    size = file.size()
    seq_before = before.seq_last if before is not None else 0
    unsynced = hint is not None and hint.sync_mode == "none"
    try:
        header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
    except (Corrupt, NotLowwater) as error:
        if (
            floor > seq_before
            or (not unsynced and find_frame(file, _TORN_BYTES_MAX, size, seq_above=seq_before) is not None)
            # Header and first frame begin in one sector: a crash leaves zeros of it, or a first part.
            or (any(file.read_at(0, HEADER_BYTES)) and is_frame(file, HEADER_BYTES, size))
        ):
            raise Corrupt(
                "the segment's header is damaged, and it holds acknowledged entries", offset=0
            ) from error
        magic = file.read_at(0, len(format.HEADER_MAGIC)).rstrip(b"\0")
        if isinstance(error, NotLowwater) and not format.HEADER_MAGIC.startswith(magic):
            # A crash leaves zeros here, or a first part of a header (a write that failed may have taken one
            # byte): opening must not remove a file that is somebody else's.
            raise NotLowwater(
                "this file has the name of a segment that is being written, and is none",
                offset=0,
                hint="find out what wrote it; `lowwater log repair` makes a copy of the log without it",
            ) from error
        return None
    if before is not None:
        check_link(header, before, path)
    scan = scan_frames(file, header, stop=size)
    if not scan.positions:
        # The header came through, the first frames did not.
        _require_no_frame(file, scan, seq_before)
        if floor > seq_before:
            raise Corrupt("the segment has lost acknowledged entries", offset=HEADER_BYTES, seq=seq_before)
        if scan.problem is not None and not unsynced:
            _require_torn(file, scan, size, seq_before)
        return None
    if scan.seq_first != header.seq_first:
        raise Corrupt(
            f"the segment begins with seq {scan.seq_first}; its header says {header.seq_first}", offset=0
        )
    torn_bytes = 0
    if scan.problem is not None:
        in_hint = hint is not None and hint.segment_seq_first == header.seq_first
        if scan.chain.seq_last < floor or (in_hint and hint is not None and scan.end < hint.durable_bytes):
            raise Corrupt(
                f"{scan.problem}, below what is known to be durable",
                offset=scan.problem_offset,
                seq=scan.chain.seq_last,
            )
        _require_no_frame(file, scan, scan.chain.seq_last)
        if not unsynced:
            _require_torn(file, scan, size, scan.chain.seq_last)
        torn_bytes = _end_of_data(file, size) - scan.end
    return Current(header, scan, scan.seq_first, torn_bytes)


def _end_of_data(file: File, size: int) -> int:
    """Where the zeros begin that the file ends with."""
    end = size
    while end:
        start = max(0, end - READ_BYTES)
        kept = len(file.read_at(start, end - start).rstrip(b"\0"))
        if kept:
            return start + kept
        end = start
    return 0


def _require_no_frame(file: File, scan: Scan, seq_last: int) -> None:
    """A frame whose checksum matches was not torn: where the scan stopped there, it breaks a rule."""
    if scan.problem is not None and is_frame(file, scan.problem_offset, file.size()):
        raise Corrupt(scan.problem, offset=scan.problem_offset, seq=seq_last)


def _require_torn(file: File, scan: Scan, size: int, seq_last: int) -> None:
    if scan.complete:
        raise Corrupt(scan.problem or "", offset=scan.problem_offset, seq=seq_last)
    found = find_frame(file, scan.problem_offset + _TORN_BYTES_MAX, size, seq_above=seq_last)
    if found is not None:
        raise Corrupt(
            f"{scan.problem}, but whole frames follow from offset {found} on: this is no torn write",
            offset=scan.problem_offset,
            seq=seq_last,
        )


def repair_current(file: File, current: Current, hint: Hint | None) -> None:
    """Make durable what is good of the current segment, and remove what is not.

    What is above the hint is written again before it is synced: after a sync that failed, the page cache
    shows bytes that the disk does not have and a second sync would not write.
    """
    end = current.scan.end
    if current.torn_bytes:
        BEFORE_TRUNCATE()
        file.truncate(end)
    known = 0
    if hint is not None and hint.segment_seq_first == current.header.seq_first:
        known = min(hint.durable_bytes, end)
    unsynced = hint is not None and hint.sync_mode == "none"
    start = known if unsynced else max(known, end - _TORN_BYTES_MAX)
    BEFORE_REWRITE()
    for offset in range(start, end, READ_BYTES):
        write_all(file, offset, [file.read_at(offset, min(READ_BYTES, end - offset))])
    file.sync("fsync")
