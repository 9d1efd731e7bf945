"""The files of a damaged log, by what is in them.

Always true: names are not trusted; nothing is changed; a header is put back only where a hash proves that
it is the one that was there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from blake3 import blake3

from lowwater.engine.format.format import (
    FRAME_BYTES,
    HEADER_BYTES,
    SEQ_MAX,
    U32,
    SegmentHeader,
    SegmentTrailer,
)
from lowwater.engine.log.chain import Chain
from lowwater.engine.log.compress import CompressedSegment, open_segment_file
from lowwater.engine.log.directory import (
    CURRENT,
    Hint,
    Segment,
    read_hint,
    read_names,
    read_trailer,
    typed_errors,
)
from lowwater.engine.log.pieces import GroupWalk, step
from lowwater.engine.log.reader import SealedReader
from lowwater.engine.log.recover import hash_body
from lowwater.engine.log.salvage import TolerantFile, whole_frames
from lowwater.engine.log.scan import all_zero, scan_frames
from lowwater.engine.log.walk import is_directory
from lowwater.engine.seams.seams import Files
from lowwater.errors import DataError, InputError, LowwaterError, NewerVersion, NotFound, NotLowwater


@dataclass(slots=True)
class Candidate:
    """A file that may be a segment of the log."""

    path: str
    named: tuple[int, int] | None = None
    """The seqs in its name."""
    file_bytes: int = 0
    compressed: bool = False
    header: SegmentHeader | None = None
    header_problem: str = ""
    is_newer: bool = False
    """Whether its header says that a newer version wrote it."""
    trailer: SegmentTrailer | None = None
    head: bytes = b""
    """The header, where it was put back."""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def is_current(self) -> bool:
        return self.name == CURRENT

    @property
    def is_named(self) -> bool:
        """Whether its name is one of a log's."""
        return self.is_current or self.named is not None

    @property
    def is_unsealed(self) -> bool:
        """Whether it may end as a segment does that is being written, or has just been."""
        return self.is_current or self.name.startswith("sealing-")

    @property
    def seq_first(self) -> int:
        if self.header is not None:
            return self.header.seq_first
        if self.trailer is not None:
            return self.trailer.seq_first
        return self.named[0] if self.named is not None else SEQ_MAX

    @property
    def seq_last(self) -> int:
        """As far as it is known without the frames; 0 where it is not."""
        if self.trailer is not None:
            return self.trailer.seq_last
        return self.named[1] if self.named is not None else 0

    @property
    def frames_stop(self) -> int:
        return self.trailer.body_bytes if self.trailer is not None else self.file_bytes


@dataclass(slots=True)
class DamagedLog:
    """A log directory, or one segment, with all that may belong to the log."""

    path: str
    hint: Hint | None = None
    candidates: list[Candidate] = field(default_factory=list)
    """In the order of their seqs."""
    others: list[tuple[str, str]] = field(default_factory=list)
    """(path, why it is no segment)."""


def load_source(files: Files, path: str) -> DamagedLog:
    source = DamagedLog(path)
    found: list[Candidate] = []
    if is_directory(files, path):
        with typed_errors(path, "read the log directory"):
            names = read_names(files, path)
            source.hint = read_hint(files, path)
        found += [Candidate(f"{path}/{name}", (first, last)) for first, last, _, name in names.numbered]
        found += [Candidate(f"{path}/{name}") for name in [CURRENT][: names.has_current] + names.strangers]
    else:
        found.append(Candidate(path))
    for candidate in found:
        why_not = _look_into(files, candidate, alone=candidate.path == path)
        if why_not is None:
            source.candidates.append(candidate)
        else:
            source.others.append((candidate.path, why_not))
    if not source.candidates:
        if is_directory(files, path):
            raise NotFound("there is no log here", path=path, hint="check the path")
        raise NotLowwater("this is no segment of a log", path=path)
    source.candidates.sort(key=lambda candidate: (candidate.seq_first, candidate.name))
    return source


def _look_into(files: Files, candidate: Candidate, *, alone: bool) -> str | None:
    """Read both ends of a file. The answer is why it cannot be a segment."""
    try:
        with open_candidate(files, candidate) as file:
            candidate.file_bytes = size = file.size()
            is_foreign = False
            try:
                candidate.header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
            except (DataError, NewerVersion) as error:
                candidate.header_problem = error.message
                candidate.is_newer = isinstance(error, NewerVersion)
                is_foreign = isinstance(error, NotLowwater)
            try:
                candidate.trailer = read_trailer(file, size)
            except (DataError, NewerVersion):
                pass  # where it is newer and not damaged, so is the header
            if candidate.header is None and candidate.trailer is None:
                if all_zero(file, 0, size):
                    return "there is nothing in it"
                if is_foreign and not candidate.is_named:
                    return "it is no segment"
    except LowwaterError as error:
        if alone:
            raise
        return error.message
    return None


@contextmanager
def open_candidate(files: Files, candidate: Candidate) -> Iterator[TolerantFile]:
    with typed_errors(candidate.path, "read the segment"):
        file = open_segment_file(files, candidate.path)
        candidate.compressed = isinstance(file, CompressedSegment)
        try:
            yield TolerantFile(file, head=candidate.head)
        finally:
            file.close()


def put_header_back(
    files: Files, candidate: Candidate, before: Segment | None, chain: Chain, links: set[tuple[int, bytes]]
) -> bool:
    """Whether a damaged header could be restored: as the log up to here and the first frame have it, and
    proved by what is left of it, by the footer, or by `links`: the (seq, hash) that other segments follow."""
    with open_candidate(files, candidate) as file:
        header = _header_that_fits(file, candidate, before, chain)
        if header is None:
            return False
        head = header.encode()
        mended = TolerantFile(file, head=head)
        # Its own checksum, or all that this covers, is left of it.
        stored = file.read_at(0, HEADER_BYTES)
        own = stored[-U32.size :] == head[-U32.size :] or stored[: -U32.size] == head[: -U32.size]
        if not own and not _is_proved(mended, candidate, header, links):
            return False
    candidate.header, candidate.head = header, head
    return True


def _header_that_fits(
    file: TolerantFile, candidate: Candidate, before: Segment | None, chain: Chain
) -> SegmentHeader | None:
    try:
        frames = whole_frames(file, HEADER_BYTES, candidate.frames_stop, seq_before=chain.seq_last)
        frame = next(frames, None)
        if frame is None:
            return None
        _, entered, _ = step(chain, frame.seq, frame.payload, FRAME_BYTES + len(frame.payload), GroupWalk())
    except NewerVersion:
        raise
    except (DataError, InputError):
        return None
    if entered is None:
        return None
    if before is None:
        return entered.header(frame.seq, 0, bytes(32))
    return entered.header(frame.seq, before.seq_last, before.segment_hash)


def _is_proved(
    file: TolerantFile, candidate: Candidate, header: SegmentHeader, links: set[tuple[int, bytes]]
) -> bool:
    try:
        reader = SealedReader(file)
        block = file.read_at(0, min(header.block_bytes, reader.trailer.body_bytes))
        return blake3(block).digest() == reader.block_hashes[0]
    except DataError:
        pass  # the footer cannot tell
    scan = scan_frames(file, header, stop=candidate.frames_stop)
    if not scan.complete:
        return False
    _, segment_hash = hash_body(file, scan.end, header.block_bytes)
    if candidate.trailer is not None and candidate.trailer.segment_hash == segment_hash:
        return True
    return (scan.chain.seq_last, segment_hash) in links
