"""What of a damaged log can be kept. Decides; `repair.py` writes.

Always true:
  - nothing is invented: what is kept is a run of whole frames from the beginning of the log, in segments of
    which each follows the one before it by its hash;
  - names are not trusted: a segment is what its header, its frames and its link say;
  - a header is put back only where a hash proves that it is the one that was there.

| row | a segment                                              | decision                              |
|-----|--------------------------------------------------------|---------------------------------------|
| A   | all of it is good                                      | keep                                  |
| B   | good frames up to its end, footer damaged or missing   | keep, build the footer again          |
| C   | header damaged, and a hash proves what it was          | keep, put the header back             |
| D   | header damaged, and nothing proves what it was         | end the log before it                 |
| E   | lost its name, or has another's                        | keep, under its own name              |
| F   | a damaged frame, or the file ends early                | end the log before that frame         |
| G   | does not follow: one is missing, or its history is another | end the log before it             |
| H   | being written: good frames, then zeros or a torn batch | keep the frames                       |
| I   | a second copy of what was kept                         | leave out                             |
| J   | of another cluster, or no segment at all               | leave out                             |
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from blake3 import blake3

from lowwater.engine.chain import CHANGES_OWNER, Chain, same_cut
from lowwater.engine.check import Progress
from lowwater.engine.compress import CompressedSegment, open_segment_file
from lowwater.engine.directory import (
    CURRENT,
    Hint,
    Segment,
    check_link,
    read_hint,
    read_names,
    read_trailer,
    segment_name,
    typed_errors,
)
from lowwater.engine.footer import footer_steps
from lowwater.engine.format import HEADER_BYTES, SEQ_MAX, SegmentHeader, SegmentTrailer
from lowwater.engine.pieces import GroupWalk, step
from lowwater.engine.reader import SealedReader
from lowwater.engine.recover import chain_after_frames, inspect_current
from lowwater.engine.salvage import Frame, TolerantFile, salvage_frames, whole_frames
from lowwater.engine.scan import READ_BYTES, Scan, all_zero, scan_frames
from lowwater.engine.seams import Files
from lowwater.engine.walk import is_directory
from lowwater.errors import Corrupt, DataError, InputError, LowwaterError, NewerVersion

_NO_HASH = bytes(32)


@dataclass(slots=True)
class Candidate:
    """A file that may be a segment of the log."""

    path: str
    seq_first_named: int = 0
    seq_last_named: int = 0
    file_bytes: int = 0
    compressed: bool = False
    header: SegmentHeader | None = None
    header_problem: str = ""
    trailer: SegmentTrailer | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def named(self) -> bool:
        return bool(self.seq_first_named) or self.name == CURRENT

    @property
    def seq_first(self) -> int:
        if self.header is not None:
            return self.header.seq_first
        return self.trailer.seq_first if self.trailer is not None else self.seq_first_named

    @property
    def seq_last(self) -> int:
        """As far as it is known without reading the frames."""
        return self.trailer.seq_last if self.trailer is not None else self.seq_last_named


@dataclass(slots=True)
class KeptSegment:
    """What becomes of a file of which something is kept."""

    path: str
    name: str
    """In the copy."""
    head: bytes
    body_bytes: int
    seq_first: int
    seq_last: int
    frames: int
    trailer: SegmentTrailer | None
    """None for the segment in which the log ends."""
    footer_is_good: bool
    done: list[str]
    """In words; empty where it is copied as it is."""


@dataclass(frozen=True, slots=True)
class Unconnected:
    """Whole frames that are in the source and not in the copy, because what comes before them is missing."""

    path: str
    seq_first: int
    seq_last: int
    frames: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the log ends, and why."""

    path: str
    offset: int | None
    what: str


@dataclass(slots=True)
class Plan:
    kept: list[KeptSegment] = field(default_factory=list)
    cut: Cut | None = None
    lost: list[tuple[int, int]] = field(default_factory=list)
    """Seqs, first and last, of which at least some were entries that are gone."""
    unconnected: list[Unconnected] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """(path, why) of files that are not of this log, or hold nothing that is not kept."""
    torn_bytes: int = 0


def plan_steps(files: Files, source: str) -> Generator[Progress, None, Plan]:
    """Decide what of the log in `source`, a directory or one segment, can be kept."""
    return (yield from _Planner(files, source).steps())


class _Planner:
    def __init__(self, files: Files, source: str) -> None:
        self._files = files
        self._source = source
        self._plan = Plan()
        self._candidates: list[Candidate] = []
        self._hint: Hint | None = None
        # The last complete segment that is kept, and the chain after it.
        self._before: Segment | None = None
        self._chain = Chain()

    def steps(self) -> Generator[Progress, None, Plan]:
        plan = self._plan
        yield from self._load()
        for candidate in self._before_the_named():
            self._keep(candidate)
        while plan.cut is None and not self._ended:
            candidate = self._next()
            if candidate is None:
                break
            self._keep(candidate)
            yield Progress(candidate.file_bytes)
        yield from self._account()
        return plan

    @property
    def _ended(self) -> bool:
        return bool(self._plan.kept) and self._plan.kept[-1].trailer is None

    @property
    def _seq_last(self) -> int:
        return self._plan.kept[-1].seq_last if self._plan.kept else 0

    # ------------------------------------------------------------------ what there is

    def _load(self) -> Iterator[Progress]:
        found: list[Candidate] = []
        if is_directory(self._files, self._source):
            with typed_errors(self._source, "read the log directory"):
                names = read_names(self._files, self._source)
                self._hint = read_hint(self._files, self._source)
            for seq_first, seq_last, _, name in names.numbered:
                found.append(Candidate(f"{self._source}/{name}", seq_first, seq_last))
            others = names.strangers + ([CURRENT] if names.has_current else [])
            found += [Candidate(f"{self._source}/{name}") for name in others]
        else:
            found.append(Candidate(self._source))
        for candidate in found:
            why_not = self._look_into(candidate)
            if why_not is None:
                self._candidates.append(candidate)
            else:
                self._plan.left_out.append((candidate.path, why_not))
            yield Progress(0)
        self._candidates.sort(key=lambda candidate: (candidate.seq_first, not candidate.named, candidate.name))

    def _look_into(self, candidate: Candidate) -> str | None:
        """Read its ends. The answer is why it cannot be a segment."""
        try:
            with typed_errors(candidate.path, "read the file"), self._open(candidate) as file:
                candidate.file_bytes = size = file.size()
                try:
                    candidate.header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
                except DataError as error:
                    candidate.header_problem = error.message
                try:
                    candidate.trailer = read_trailer(file, size)
                except DataError:
                    pass
                if candidate.header is None and candidate.trailer is None:
                    if all_zero(file, 0, size):
                        return "it is empty"
                    if not candidate.named and candidate.path != self._source:
                        return "this file does not belong to a log"
        except NewerVersion:
            raise
        except LowwaterError as error:
            return error.message
        return None

    @contextmanager
    def _open(self, candidate: Candidate, head: bytes = b"") -> Iterator[TolerantFile]:
        file = open_segment_file(self._files, candidate.path)
        candidate.compressed = isinstance(file, CompressedSegment)
        try:
            yield TolerantFile(file, head=head)
        finally:
            file.close()

    # ------------------------------------------------------------------ which comes next

    def _before_the_named(self) -> list[Candidate]:
        """Where the log begins. A file without a name may begin it only if one with a name follows it."""
        named = [candidate for candidate in self._candidates if candidate.named]
        if not named:
            return self._candidates[:1]
        start = [named[0]]
        while (header := start[0].header) is not None and header.seq_before:
            for candidate in self._candidates:
                trailer = candidate.trailer
                if trailer is not None and trailer.segment_hash == header.hash_before:
                    start.insert(0, candidate)
                    break
            else:
                break
        return start

    def _next(self) -> Candidate | None:
        """The best of those that follow by their header, or one that might with its header put back."""
        rest = [candidate for candidate in self._candidates if candidate.seq_first > self._seq_last]
        linked = [candidate for candidate in rest if self._follows(candidate)]
        if linked:
            return max(linked, key=self._good_bytes) if len(linked) > 1 else linked[0]
        damaged = [candidate for candidate in rest if candidate.header is None]
        for candidate in damaged:
            if self._restore_header(candidate):
                return candidate
        self._explain_end(rest)
        return None

    def _follows(self, candidate: Candidate) -> bool:
        if candidate.header is None:
            return False
        try:
            check_link(candidate.header, self._before, candidate.path)
        except Corrupt:
            return False
        return True

    def _good_bytes(self, candidate: Candidate) -> int:
        assert candidate.header is not None
        with self._open(candidate) as file:
            return scan_frames(file, candidate.header, stop=_stop(candidate)).end

    def _explain_end(self, rest: list[Candidate]) -> None:
        for candidate in rest:
            if not self._is_foreign(candidate):
                what = candidate.header_problem
                if candidate.header is not None:
                    try:
                        check_link(candidate.header, self._before, candidate.path)
                    except Corrupt as error:
                        what = error.message
                self._plan.cut = Cut(candidate.path, None, what)
                return

    def _is_foreign(self, candidate: Candidate) -> bool:
        chain = self._chain
        return (
            candidate.header is not None
            and not chain.is_empty
            and candidate.header.cluster_id != chain.cluster_id
        )

    # ------------------------------------------------------------------ keeping

    def _keep(self, candidate: Candidate) -> None:
        """Keep what is good of a segment that follows, or that begins the log."""
        head = b""
        done = []
        if candidate.header is None and not self._restore_header(candidate):
            self._plan.cut = Cut(candidate.path, 0, candidate.header_problem)
            return
        header = candidate.header
        assert header is not None
        with typed_errors(candidate.path, "read the segment"), self._open(candidate) as file:
            if candidate.header_problem:
                head = header.encode()
                done.append("header put back")
            tolerant = TolerantFile(file, head=head)
            scan = scan_frames(tolerant, header, stop=_stop(candidate))
            misfit = self._misfit(tolerant, header, scan)
            if misfit is None and scan.complete:
                misfit = self._keep_complete(candidate, tolerant, head, header, scan, done)
            elif misfit is None:
                self._keep_beginning(candidate, tolerant, head, header, scan, done)
        if misfit is not None:
            self._plan.cut = Cut(candidate.path, 0, misfit)

    def _misfit(self, file: TolerantFile, header: SegmentHeader, scan: Scan) -> str | None:
        """Why the frames cannot follow what is kept, though the link says so."""
        if not scan.positions:
            return None
        if scan.seq_first != header.seq_first:
            return f"the header names seq {header.seq_first} as the first, and it is {scan.seq_first}"
        if self._chain.is_empty:
            return None
        if not same_cut(self._chain, header):
            return "the segment is cut by other settings than the log's"
        owner = (self._chain.cluster_id, self._chain.epoch)
        kind = next(whole_frames(file, HEADER_BYTES, scan.end, seq_before=header.seq_before)).payload[0]
        if (header.cluster_id, header.epoch) != owner and kind not in CHANGES_OWNER:
            return "the segment belongs to another cluster or epoch"
        return None

    def _keep_complete(
        self,
        candidate: Candidate,
        file: TolerantFile,
        head: bytes,
        header: SegmentHeader,
        scan: Scan,
        done: list[str],
    ) -> str | None:
        try:
            footer, trailer = _run(
                footer_steps(file, scan.positions, scan.end, block_bytes=header.block_bytes)
            )
        except Corrupt as error:
            return error.message
        ending = footer + trailer.encode()
        footer_is_good = candidate.file_bytes == trailer.file_bytes
        for offset in range(0, len(ending), READ_BYTES):
            part = ending[offset : offset + READ_BYTES]
            footer_is_good = footer_is_good and file.read_at(scan.end + offset, len(part)) == part
        if not footer_is_good:
            done.append("footer built again" if candidate.trailer or not _unsealed(candidate) else "sealed")
        if candidate.compressed:
            done.append("decompressed")
        name = segment_name(scan.seq_first, scan.chain.seq_last)
        self._add(candidate, name, head, scan, trailer, done, footer_is_good=footer_is_good)
        self._before = Segment(
            path=candidate.path,
            header=header,
            seq_first=scan.seq_first,
            seq_last=scan.chain.seq_last,
            body_bytes=scan.end,
            time_last_us=scan.chain.time_us,
            segment_hash=trailer.segment_hash,
            sealed=True,
            positions=scan.positions,
        )
        self._chain = chain_after_frames(file, self._before)
        self._before.positions = None
        return None

    def _keep_beginning(
        self,
        candidate: Candidate,
        file: TolerantFile,
        head: bytes,
        header: SegmentHeader,
        scan: Scan,
        done: list[str],
    ) -> None:
        """The log ends in this segment: because it is the one being written, or because it is damaged."""
        what = scan.problem or "the file ends before the segment does"
        damaged = bool(scan.problem) or not _unsealed(candidate)
        if damaged and _unsealed(candidate):
            try:
                floor = self._hint.durable_seq if self._hint is not None else 0
                inspect_current(file, candidate.path, self._before, self._hint, floor)
                damaged = False
                self._plan.torn_bytes = candidate.file_bytes - scan.end
            except Corrupt as error:
                what = error.message
        if damaged:
            self._plan.cut = Cut(candidate.path, scan.end, what)
            done.append("cut")
        elif self._plan.torn_bytes:
            done.append("torn write removed")
        if scan.positions:
            self._chain = scan.chain
            self._add(candidate, CURRENT, head, scan, None, done, footer_is_good=False)

    def _add(
        self,
        candidate: Candidate,
        name: str,
        head: bytes,
        scan: Scan,
        trailer: SegmentTrailer | None,
        done: list[str],
        *,
        footer_is_good: bool,
    ) -> None:
        if candidate.name != name and not _unsealed(candidate):
            done.append("renamed")
        self._candidates.remove(candidate)
        self._plan.kept.append(
            KeptSegment(
                path=candidate.path,
                name=name,
                head=head,
                body_bytes=scan.end,
                seq_first=scan.seq_first,
                seq_last=scan.chain.seq_last,
                frames=len(scan.positions),
                trailer=trailer,
                footer_is_good=footer_is_good,
                done=done,
            )
        )
