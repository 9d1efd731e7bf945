"""Integrity of a log directory: the one function that everybody calls to know whether a log is sound.

Always true: checking changes nothing; it goes on after a finding as far as it can; memory does not depend on
the size of the log. What is checked of a sealed segment is everything: header, trailer, footer, block hashes,
every frame and what it holds, the rule by which it was cut, and that its footer is the one that its frames
give.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Generator, Iterator
from typing import Literal, NamedTuple

from blake3 import blake3

from lowwater.engine.format import format
from lowwater.engine.format.entries import decode_frames
from lowwater.engine.format.format import HEADER_BYTES, SegmentHeader, SegmentTrailer
from lowwater.engine.log.chain import Chain, why_not_next
from lowwater.engine.log.compress import CompressedSegment, verify_stored
from lowwater.engine.log.directory import (
    CURRENT,
    HINT,
    HINT_HINT,
    STRANGER_HINT,
    DirectoryNames,
    Hint,
    Segment,
    check_link,
    look_at_hint,
    read_names,
    read_trailer,
    sealed_segment,
    typed_errors,
)
from lowwater.engine.log.footer import footer_steps, hash_blocks
from lowwater.engine.log.recover import Current, begins_with_fork, chain_after_frames
from lowwater.engine.log.scan import READ_BYTES, Scan, scan_frames
from lowwater.engine.log.walk import WalkPlace, judge_current, numbered_places, open_place, open_single, walk
from lowwater.engine.seams.seams import File, Files
from lowwater.errors import Corrupt, DeniedError, LowwaterError, NotFound

Severity = Literal["error", "warning", "note"]

_RESTORE = "restore this segment, or run `lowwater log repair` into a copy"


class Finding(NamedTuple):
    """Something that is not as it should be. An error means that data cannot be trusted, or is gone. A note
    tells of what is no fault, such as the leftovers of an upload."""

    severity: Severity
    what: str
    where: str
    seq: int | None = None
    offset: int | None = None
    hint: str = ""

    @classmethod
    def of(cls, error: LowwaterError, path: str) -> Finding:
        """Return the finding that tells of an error. Raise the error itself if it is a DeniedError: nothing
        is known of what may not be read."""
        if isinstance(error, DeniedError):
            raise error
        # What errors advise elsewhere is what has led here.
        hint = _RESTORE if error.hint == Corrupt.default_hint else error.hint
        return cls("error", error.message, error.path or path, error.seq, error.offset, hint)


class Progress(NamedTuple):
    """Yielded among the findings of the `_steps` functions, once for each file: so much was checked."""

    bytes_done: int
    frames: int = 0


Step = Finding | Progress


def check_directory(files: Files, directory: str) -> Iterator[Finding]:
    """Yield every finding about the log in a directory that nobody writes to."""
    return (step for step in check_directory_steps(files, directory) if isinstance(step, Finding))


def check_directory_steps(
    files: Files,
    directory: str,
    *,
    names: DirectoryNames | None = None,
    current: tuple[File, int] | None = None,
) -> Iterator[Step]:
    """`check_directory` with progress. A log that is open gives the names, and the file of its current
    segment with the place up to which it is durable."""
    live = names is not None
    try:
        with typed_errors(directory, "check the log directory"):
            names = names or read_names(files, directory)
            hint, hint_damaged = look_at_hint(files, directory)
    except LowwaterError as error:
        yield Finding.of(error, directory)
        return
    if hint_damaged:
        hint_path = f"{directory}/{HINT}"
        yield Finding("error", "the hint cannot be read", hint_path, hint=HINT_HINT)
    for name in names.strangers:
        what = "this file does not belong to a log"
        yield Finding("warning", what, f"{directory}/{name}", hint=STRANGER_HINT)
    before: Segment | None = None
    chain: Chain | None = None
    seq_last = 0
    of_current: list[Step] = []
    for place in numbered_places(names, directory) if live else walk(files, directory):
        if place.state == "current":
            of_current, seq_last = _check_current(files, place.path, before, chain, hint, seq_last)
            continue
        # Where the log was rotated while its current segment was being read, that comes again.
        of_current = []
        seq_last = max(seq_last, place.seq_last)
        segment: Segment | None = None
        try:
            with typed_errors(place.path, "check the segment"):
                file, place = open_place(files, place)
                try:
                    segment = yield from _check_complete(file, place)
                    if segment is not None:
                        yield from _check_follows(segment, before, chain, place.path)
                        # Of a damaged one no more is known than what its trailer says.
                        is_whole = segment.positions is not None
                        chain = chain_after_frames(file, segment) if is_whole else None
                finally:
                    file.close()
        except LowwaterError as error:
            if not (isinstance(error, NotFound) and _is_purged(files, directory, place.seq_last)):
                yield Finding.of(error, place.path)
            segment = None
        # After a segment that could not be read, the next one has nothing to be compared with.
        before = segment
        if segment is None:
            chain = None
    if current is not None:
        of_current, seq_last = _check_durable(*current, f"{directory}/{CURRENT}")
    yield from of_current
    if hint is not None and not live and seq_last < hint.durable_seq:
        yield Finding(
            "error",
            f"the log was durable up to seq {hint.durable_seq} and ends with seq {seq_last} now",
            directory,
            seq_last,
            None,
            "files of the log are missing or were replaced: restore them",
        )


def _is_purged(files: Files, directory: str, seq_last: int) -> bool:
    """Whether the log begins after a segment by now: retention removes the oldest ones while somebody looks.
    The newest complete one always stays, so where none is left they were lost."""
    with typed_errors(directory, "check the log directory"):
        numbered = read_names(files, directory).numbered
    return bool(numbered) and numbered[0][0] > seq_last


def _check_durable(file: File, end: int, path: str) -> tuple[list[Step], int]:
    """The current segment of a log that is open, up to where it is durable."""
    steps: list[Step] = []
    seq_last = 0
    try:
        with typed_errors(path, "check the segment that is being written"):
            scan = scan_frames(file, SegmentHeader.decode(file.read_at(0, HEADER_BYTES)), stop=end)
            seq_last = scan.chain.seq_last
            if scan.problem is not None or scan.end != end:
                what = scan.problem or "durable frames are missing"
                steps.append(Finding("error", what, path, seq_last, scan.end, _RESTORE))
            steps += _check_entries(file, path, scan)
            steps.append(Progress(end, len(scan.positions)))
    except LowwaterError as error:
        steps.append(Finding.of(error, path))
    return steps, seq_last


def _check_current(
    files: Files, path: str, before: Segment | None, chain: Chain | None, hint: Hint | None, seq_last: int
) -> tuple[list[Step], int]:
    """The current segment of a log that may be open elsewhere, and the log's last seq."""
    steps: list[Step] = []
    try:
        with typed_errors(path, "check the segment that is being written"):
            file = files.open(path)
            try:
                size = file.size()
                found = judge_current(file, path, before, hint)
                if found is None:
                    steps.append(Progress(size))
                    return steps, seq_last
                forks = begins_with_fork(file)
                steps += _check_entries(file, path, found.scan)
            finally:
                file.close()
            steps.append(Progress(size, len(found.scan.positions)))
            seq_last = found.scan.chain.seq_last
            why = why_not_next(chain, found.header, forks=forks) if chain is not None else None
            if why is not None:
                steps.append(Finding("error", why, path, found.seq_first, 0, _RESTORE))
            if found.torn_bytes:
                steps.append(torn_write(path, found))
    except LowwaterError as error:
        steps.append(Finding.of(error, path))
        # The hint has nothing to add to what was said.
        seq_last = max(seq_last, hint.durable_seq if hint is not None else 0)
    return steps, seq_last


def torn_write(path: str, found: Current) -> Finding:
    return Finding(
        "warning",
        "the last write is not complete: nothing acknowledged is in it",
        path,
        found.scan.chain.seq_last,
        found.scan.end,
        "a process is writing, or a crash tore it: then opening the log removes it",
    )


def _check_follows(
    segment: Segment, before: Segment | None, chain: Chain | None, path: str
) -> Iterator[Step]:
    try:
        check_link(segment.header, before, path)
    except LowwaterError as error:
        yield Finding.of(error, path)
        return
    if chain is None:
        return
    why = why_not_next(chain, segment.header, forks=segment.forks)
    if why is not None:
        yield Finding("error", why, path, segment.header.seq_first, 0, _RESTORE)


def check_segment(files: Files, path: str) -> Iterator[Finding]:
    """Yield every finding about one segment by itself: raw or compressed, sealed or not."""
    return (step for step in check_segment_steps(files, path) if isinstance(step, Finding))


def check_segment_steps(files: Files, path: str) -> Iterator[Step]:
    try:
        with typed_errors(path, "check the segment"):
            file, place = open_single(files, path)
            try:
                if place.state == "current":
                    SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
                    yield from _check_current(files, path, None, None, None, 0)[0]
                    return
                if isinstance(file, CompressedSegment):
                    yield from _check_stored(file, path)
                yield from _check_complete(file, place)
            finally:
                file.close()
    except LowwaterError as error:
        yield Finding.of(error, path)


def _check_stored(file: CompressedSegment, path: str) -> Iterator[Step]:
    try:
        verify_stored(file.stored)
    except LowwaterError as error:
        yield Finding.of(error, path)


def _check_complete(file: File, place: WalkPlace) -> Generator[Step, None, Segment | None]:
    """Check a complete segment; the generator's value is what is known of it, or None."""
    path = place.path
    size = file.size()
    header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
    trailer: SegmentTrailer | None = None
    stop = size
    if place.state == "sealed":
        try:
            trailer = read_trailer(file, size)
            stop = trailer.body_bytes
        except LowwaterError as error:
            yield Finding.of(error, path)
    if trailer is not None:
        yield from _check_blocks(file, path, header, trailer)
    scan = scan_frames(file, header, stop=stop)
    yield from _check_entries(file, path, scan)
    yield Progress(size, len(scan.positions))
    if scan.problem is not None and trailer is not None:
        yield Finding("error", scan.problem, path, scan.chain.seq_last, scan.problem_offset, _RESTORE)
        return sealed_segment(path, header, trailer)
    if not scan.complete:
        yield Finding(
            "error",
            f"the segment is not complete: its frames are good up to seq {scan.chain.seq_last}",
            path,
            scan.chain.seq_last,
            scan.end,
            _RESTORE,
        )
        return None
    if trailer is not None and scan.end != trailer.body_bytes:
        what = "the frames end before the footer says"
        yield Finding("error", what, path, scan.chain.seq_last, scan.end, _RESTORE)
        return sealed_segment(path, header, trailer)
    if scan.seq_first != header.seq_first:
        what = f"the header names seq {header.seq_first} as the first, and it is {scan.seq_first}"
        yield Finding("error", what, path, scan.seq_first, 0, _RESTORE)
    if place.seq_first and (place.seq_first, place.seq_last) != (scan.seq_first, scan.chain.seq_last):
        what = f"the file holds the seqs {scan.seq_first} to {scan.chain.seq_last}, its name says otherwise"
        yield Finding("error", what, path, scan.seq_first, None, _RESTORE)
    segment = yield from _check_footer(file, path, header, trailer, scan)
    return segment


def _check_entries(file: File, path: str, scan: Scan) -> Iterator[Finding]:
    """Whether a reader can decode what the good frames hold, of which checksums say nothing."""
    positions = scan.positions
    first = 0
    while first < len(positions):
        start = positions[first]
        stop = bisect_left(positions, start + READ_BYTES, first + 1)
        end = positions[stop] if stop < len(positions) else scan.end
        data = file.read_at(start, end - start)
        at = 0
        while at < len(data):
            try:
                deque(decode_frames(data, at, len(data), verify=False), maxlen=0)
                break
            except Corrupt as error:
                offset = start + (error.offset or 0)
                yield Finding("error", error.message, path, error.seq, offset, _RESTORE)
                after = bisect_right(positions, offset)
                at = positions[after] - start if after < stop else len(data)
        first = stop


def _check_blocks(file: File, path: str, header: SegmentHeader, trailer: SegmentTrailer) -> Iterator[Step]:
    sections = trailer.section_offsets()
    footer_hash = blake3()
    for offset in range(trailer.body_bytes, sections.end, READ_BYTES):
        footer_hash.update(file.read_at(offset, min(READ_BYTES, sections.end - offset)))
    if footer_hash.digest() != trailer.footer_hash:
        yield Finding("error", "the footer's hash does not match", path, None, trailer.body_bytes, _RESTORE)
        return
    block_bytes = header.block_bytes
    for block in range(trailer.block_count):
        offset = block * block_bytes
        data = file.read_at(offset, min(block_bytes, trailer.body_bytes - offset))
        held = file.read_at(sections.block_hashes + 32 * block, 32)
        if hash_blocks(data, block_bytes) != [held]:
            yield Finding("error", "a block's hash does not match", path, None, offset, _RESTORE)


def _check_footer(
    file: File, path: str, header: SegmentHeader, trailer: SegmentTrailer | None, scan: Scan
) -> Generator[Step, None, Segment]:
    """Whether the footer is the one that the frames give. The value is the segment."""
    steps = footer_steps(file, scan.positions, scan.end, block_bytes=header.block_bytes)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            footer, expected = end.value
            break
    if trailer is not None and trailer != expected:
        fields = [name for name in trailer._fields if getattr(trailer, name) != getattr(expected, name)]
        yield Finding(
            "error",
            f"the trailer is not the one that the frames give: {', '.join(fields)}",
            path,
            None,
            expected.file_bytes - format.TRAILER_BYTES,
            "run `lowwater log repair` into a copy: the frames are good",
        )
    elif trailer is not None:
        for offset in range(0, len(footer), READ_BYTES):
            part = footer[offset : offset + READ_BYTES]
            if file.read_at(scan.end + offset, len(part)) != part:
                yield Finding(
                    "error",
                    "the footer is not the one that the frames give",
                    path,
                    None,
                    scan.end + offset,
                    "run `lowwater log repair` into a copy: the frames are good",
                )
                break
    return Segment(
        path=path,
        header=header,
        seq_first=scan.seq_first,
        seq_last=scan.chain.seq_last,
        body_bytes=scan.end,
        time_last_us=scan.chain.time_us,
        segment_hash=expected.segment_hash,
        sealed=trailer is not None,
        forks=begins_with_fork(file),
        positions=scan.positions,
    )


def require_log(files: Files, directory: str) -> None:
    """Raise NotFound where there is no log to open."""
    with typed_errors(directory, "open the log"):
        names = read_names(files, directory)
    if not names.numbered and not names.has_current:
        raise no_log(directory)


def no_log(directory: str) -> NotFound:
    hint = "check the path, or open it with create=True"
    return NotFound("there is no log here", path=directory, hint=hint)
