"""What a log directory, or one segment, consists of: for people who look into it.

Always true:
  - describing changes nothing, needs no lock, and works on damaged files: what can be read is told, and
    what cannot is a finding;
  - of a sealed segment only header and trailer are read (and the footer, of a segment on its own), so a large
    log is described at once. That is no proof that it is sound: `check.py` gives that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lowwater.engine.format import format
from lowwater.engine.format.format import HEADER_BYTES, FooterSections, SegmentHeader, SegmentTrailer
from lowwater.engine.log.chain import IDLE_KINDS, Chain, LogSettings, before_segment
from lowwater.engine.log.check import Finding, torn_write
from lowwater.engine.log.compress import CompressedSegment
from lowwater.engine.log.directory import (
    STRANGER_HINT,
    Hint,
    Segment,
    check_link,
    read_hint,
    read_names,
    read_trailer,
    typed_errors,
)
from lowwater.engine.log.footer import footer_steps
from lowwater.engine.log.reader import SealedReader, time_of
from lowwater.engine.log.recover import chain_after_frames, creation_of, hash_body
from lowwater.engine.log.scan import FrameBytes, Scan, scan_frames
from lowwater.engine.log.walk import State, WalkPlace, judge_current, open_place, open_single, walk
from lowwater.engine.seams.seams import File, Files
from lowwater.errors import Corrupt, DataError, NewerVersion, NotFound, NotLowwater


@dataclass(slots=True)
class StreamDescription:
    """The messages of one stream in a segment."""

    topic: str
    offset_first: int
    messages: int


@dataclass(slots=True)
class SegmentDescription:
    """One file of a log. None stands for what could not be read."""

    path: str
    state: State
    file_bytes: int = 0
    compressed_bytes: int | None = None
    header: SegmentHeader | None = None
    trailer: SegmentTrailer | None = None
    """The trailer of a sealed segment."""
    seq_first: int | None = None
    seq_last: int | None = None
    frames: int | None = None
    body_bytes: int | None = None
    time_first_us: int | None = None
    time_last_us: int | None = None
    segment_hash: bytes | None = None
    follows: bool | None = None
    """Whether its link to the segment before it holds; None where there is nothing to compare."""
    has_news: bool = True
    """False of one that is being written, and holds nothing but what shipping itself wrote."""
    torn_bytes: int = 0
    """Bytes of a last write that is not complete."""
    keys: int | None = None
    kinds: dict[str, int] = field(default_factory=dict)
    """Only for a segment on its own, like the next."""
    streams: list[StreamDescription] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(slots=True)
class LogDescription:
    """A log directory."""

    path: str
    cluster_id: bytes | None = None
    epoch: int | None = None
    settings: LogSettings | None = None
    hint: Hint | None = None
    segments: list[SegmentDescription] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """All findings, those about the segments included."""

    @property
    def seq_first(self) -> int | None:
        return self.segments[0].seq_first if self.segments else None

    @property
    def seq_last(self) -> int | None:
        return self.segments[-1].seq_last if self.segments else None

    @property
    def frames(self) -> int:
        return sum(segment.frames or 0 for segment in self.segments)

    @property
    def body_bytes(self) -> int:
        return sum(segment.body_bytes or 0 for segment in self.segments)


def describe_log(files: Files, directory: str) -> LogDescription:
    """What a log directory holds. Raises NotFound where there is no log."""
    with typed_errors(directory, "read the log directory"):
        names = read_names(files, directory)
        hint = read_hint(files, directory)
    if not names.numbered and not names.has_current:
        raise NotFound("there is no log here", path=directory, hint="check the path")
    log = LogDescription(directory, hint=hint)
    before: Segment | None = None
    current: SegmentDescription | None = None
    chain: Chain | None = None
    created: LogSettings | None = None
    for place in walk(files, directory):
        description = SegmentDescription(place.path, place.state)
        # Where the log was rotated while its current segment was being read, that comes again.
        current = None
        segment: Segment | None = None
        try:
            with typed_errors(place.path, "read the segment"):
                file, place = open_place(files, place)
                try:
                    description.path, description.state = place.path, place.state
                    segment = _describe(file, description, before, hint)
                    if description.header is not None:
                        chain = before_segment(description.header)
                        if description.header.seq_before == 0 and description.frames:
                            created = creation_of(file, description.header).settings
                    if segment is not None:
                        chain = chain_after_frames(file, segment)
                finally:
                    file.close()
        except NotFound:
            continue  # renamed or purged since it was listed
        except (DataError, NewerVersion) as error:
            description.findings.append(Finding.of(error, place.path))
        if place.state == "current":
            current = description if description.frames or description.findings else None
            continue
        if description.frames:
            _compare_name(description, place)
        log.segments.append(description)
        before = segment
    if current is not None:
        log.segments.append(current)
    for name in names.strangers:
        what = "this file does not belong to a log"
        log.findings.append(Finding("warning", what, f"{directory}/{name}", hint=STRANGER_HINT))
    log.findings += [finding for segment in log.segments for finding in segment.findings]
    if chain is not None:
        log.cluster_id, log.epoch = chain.cluster_id, chain.epoch
        log.settings = chain.settings
        if created is not None:
            log.settings = log.settings._replace(
                page_keys=created.page_keys, inline_bytes_max=created.inline_bytes_max
            )
    seq_last = log.seq_last
    if hint is not None and seq_last is not None and seq_last < hint.durable_seq and not log.findings:
        what = f"the log was durable up to seq {hint.durable_seq} and ends with seq {seq_last} now"
        hint_text = "files of the log are missing or were replaced: restore them"
        log.findings.append(Finding("error", what, directory, seq_last, hint=hint_text))
    return log


def describe_segment(files: Files, path: str) -> SegmentDescription:
    """One segment on its own, with what its footer, or a scan, says of its frames."""
    description = SegmentDescription(path, "sealed")
    try:
        with typed_errors(path, "read the segment"):
            file, place = open_single(files, path)
            try:
                description.state = place.state
                if isinstance(file, CompressedSegment):
                    description.compressed_bytes = file.stored.size()
                _describe(file, description, None, None, alone=True)
            finally:
                file.close()
    except (DataError, NewerVersion) as error:
        description.findings.append(Finding.of(error, path))
    return description


def _describe(
    file: File,
    description: SegmentDescription,
    before: Segment | None,
    hint: Hint | None,
    *,
    alone: bool = False,
) -> Segment | None:
    """Fill in what the file says. The value is what the next segment is compared with."""
    path, findings = description.path, description.findings
    description.file_bytes = file.size()
    if description.state == "sealed":
        try:
            description.trailer = read_trailer(file, file.size())
            _copy_trailer(description, description.trailer)
        except (DataError, NewerVersion) as error:
            findings.append(Finding.of(error, path))
    try:
        header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
    except (DataError, NewerVersion) as error:
        if isinstance(error, NotLowwater):
            findings.clear()  # what is no segment has no trailer either
        if description.state == "current" and not alone and judge_current(file, path, before, hint) is None:
            return None  # a crash kept it from beginning
        raise
    description.header = header
    if before is not None:
        try:
            check_link(header, before, path)
            description.follows = True
        except Corrupt as error:
            description.follows = False
            findings.append(Finding.of(error, path))
    scan: Scan | None = None
    if description.trailer is None:
        scan = scan_frames(file, header, stop=description.file_bytes)
        _copy_scan(file, description, scan)
        if scan.complete:
            # A segment is followed by its hash, and only a complete one can be.
            description.segment_hash = hash_body(file, scan.end, header.block_bytes)[1]
        elif description.state != "current":
            what = f"{scan.problem or 'the segment is not complete'}: its frames are good up to here"
            raise Corrupt(what, seq=scan.chain.seq_last, offset=scan.end)
        elif description.follows is not False:
            found = judge_current(file, path, before, hint)
            if found is not None and found.torn_bytes:
                description.torn_bytes = found.torn_bytes
                findings.append(torn_write(path, found))
    elif header.seq_first != description.trailer.seq_first:
        raise Corrupt("header and trailer of the segment name different first seqs", offset=0)
    if alone:
        _describe_footer(file, description, header, scan)
    if description.segment_hash is None or description.time_last_us is None:
        return None
    return Segment(
        path=path,
        header=header,
        seq_first=header.seq_first,
        seq_last=description.seq_last or 0,
        body_bytes=description.body_bytes or 0,
        time_last_us=description.time_last_us,
        segment_hash=description.segment_hash,
        sealed=description.trailer is not None,
        positions=scan.positions if scan is not None else None,
    )


def _copy_trailer(description: SegmentDescription, trailer: SegmentTrailer) -> None:
    description.seq_first, description.seq_last = trailer.seq_first, trailer.seq_last
    description.time_first_us, description.time_last_us = trailer.time_min_us, trailer.time_max_us
    description.frames, description.body_bytes = trailer.frame_count, trailer.body_bytes
    description.segment_hash, description.keys = trailer.segment_hash, trailer.key_count


def _copy_scan(file: File, description: SegmentDescription, scan: Scan) -> None:
    """Describe a segment without a trailer by what its frames say."""
    description.frames, description.body_bytes = len(scan.positions), scan.end
    if scan.positions:
        description.seq_first, description.seq_last = scan.seq_first, scan.chain.seq_last
        first = file.read_at(scan.positions[0], format.FRAME_FIXED_BYTES)
        description.time_first_us, description.time_last_us = time_of(first), scan.chain.time_us
        kinds = (file.read_at(position + format.FRAME_BYTES, 1)[0] for position in scan.positions)
        description.has_news = any(kind not in IDLE_KINDS for kind in kinds)


def _describe_footer(
    file: File, description: SegmentDescription, header: SegmentHeader, scan: Scan | None
) -> None:
    """Counts and streams, from the footer or from what it would be."""
    if scan is None:
        trailer = SealedReader(file).trailer
        sections = trailer.section_offsets()
        data = file.read_at(sections.kinds, sections.end - sections.kinds)
    elif scan.positions:
        footer, trailer = _footer(file, scan, header)
        sections = trailer.section_offsets()
        data = footer[sections.kinds - scan.end :]
    else:
        return
    description.keys = trailer.key_count
    description.kinds = dict(_kinds(data, trailer))
    description.streams = list(_streams(data, sections, trailer))


def _footer(file: FrameBytes, scan: Scan, header: SegmentHeader) -> tuple[bytes, SegmentTrailer]:
    steps = footer_steps(file, scan.positions, scan.end, block_bytes=header.block_bytes)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: tuple[bytes, SegmentTrailer] = end.value
            return result


def _kinds(data: bytes, trailer: SegmentTrailer) -> Iterator[tuple[str, int]]:
    for kind, count in format.KIND_COUNT.iter_unpack(data[: trailer.kind_count * format.KIND_COUNT.size]):
        name = format.KIND_NAMES[kind] if kind < 256 else None
        yield name or f"kind {kind}", count


def _streams(data: bytes, sections: FooterSections, trailer: SegmentTrailer) -> Iterator[StreamDescription]:
    at = sections.streams - sections.kinds
    for _ in range(trailer.stream_count):
        if at + format.STREAM_HEAD.size > len(data):
            raise Corrupt("the streams in the footer are cut short", offset=sections.streams)
        topic_len, offset_first, messages = format.STREAM_HEAD.unpack_from(data, at)
        at += format.STREAM_HEAD.size
        topic = data[at : at + topic_len].decode(errors="replace")
        at += topic_len + 4 * messages
        yield StreamDescription(topic, offset_first, messages)


def _compare_name(description: SegmentDescription, place: WalkPlace) -> None:
    seqs = (description.seq_first, description.seq_last)
    if seqs != (place.seq_first, place.seq_last):
        what = f"the file holds the seqs {seqs[0]} to {seqs[1]}, its name says otherwise"
        error = Corrupt(what, seq=description.seq_first)
        description.findings.append(Finding.of(error, place.path))
