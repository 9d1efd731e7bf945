"""What of a damaged log can be kept. It decides; `repair_log` writes.

Always true: nothing is invented. What is kept is a run of whole frames from the beginning of the log, in
segments of which each follows the one before it by its hash.

| row | a segment                                                  | decision                          |
|-----|------------------------------------------------------------|-----------------------------------|
| A   | all of it is good                                          | keep                              |
| B   | good frames up to its end; footer damaged or missing       | keep, build the footer again      |
| C   | header damaged, and a hash proves what it was              | keep, put the header back         |
| D   | header damaged, and nothing proves what it was             | end the log before it             |
| E   | lost its name, or has another's                            | keep, under its own name          |
| F   | a damaged frame, or the file ends early                    | end the log before that frame     |
| G   | does not follow: one is missing, or it has another history | end the log before it             |
| H   | being written: good frames, then zeros or a torn batch     | keep the frames                   |
| I   | a second copy of what was kept                             | leave out                         |
| J   | of another cluster, or no segment at all                   | leave out                         |
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from lowwater.engine.format.format import SegmentHeader, SegmentTrailer
from lowwater.engine.log.chain import Chain, why_not_next
from lowwater.engine.log.directory import CURRENT, Segment, check_link, segment_name
from lowwater.engine.log.footer import footer_steps
from lowwater.engine.log.recover import begins_with_fork, chain_after_frames, inspect_current
from lowwater.engine.log.repair.damaged_log import Candidate, DamagedLog, open_candidate, put_header_back
from lowwater.engine.log.salvage import TolerantFile
from lowwater.engine.log.scan import READ_BYTES, Scan, scan_frames
from lowwater.engine.seams.seams import Files
from lowwater.errors import Corrupt, NewerVersion


@dataclass(frozen=True, slots=True)
class KeptSegment:
    """A file of which something is kept."""

    candidate: Candidate
    name: str
    """In the copy."""
    body_bytes: int
    seq_first: int
    seq_last: int
    frames: int
    trailer: SegmentTrailer | None
    """None for the segment in which the log ends."""
    footer_is_good: bool
    done: tuple[str, ...]
    """What is done to it, in words: nothing where it is copied as it is."""


@dataclass(frozen=True, slots=True)
class LogCut:
    """Where the log ends because of damage."""

    path: str
    offset: int | None
    what: str


@dataclass(slots=True)
class RepairPlan:
    kept: list[KeptSegment] = field(default_factory=list)
    cut: LogCut | None = None
    torn_bytes: int = 0
    unused: list[Candidate] = field(default_factory=list)

    @property
    def seq_last(self) -> int:
        return self.kept[-1].seq_last if self.kept else 0

    def is_foreign(self, candidate: Candidate) -> bool:
        """Whether a file with a name of its own holds another log's segment. A `fork` changes the cluster id,
        so what is named as this log's segments are counts as this log's."""
        if candidate.is_named or candidate.header is None or not self.kept:
            return False
        owners = {kept.candidate.header.cluster_id for kept in self.kept if kept.candidate.header is not None}
        return candidate.header.cluster_id not in owners


class Planner:
    def __init__(self, files: Files, source: DamagedLog) -> None:
        self._files = files
        self._source = source
        self._rest = list(source.candidates)
        self._links = {
            (candidate.header.seq_before, candidate.header.hash_before)
            for candidate in source.candidates
            if candidate.header is not None
        }
        # The last segment that is kept, and the chain after it.
        self._before: Segment | None = None
        self._chain = Chain()
        self._ended = False
        self.plan = RepairPlan()

    def steps(self) -> Generator[Candidate, None, RepairPlan]:
        """Yields each file that was read."""
        for candidate in self._beginning():
            if not self._ended:
                self._take(candidate)
                yield candidate
        while not self._ended and (following := self._following()) is not None:
            self._take(following)
            yield following
        self.plan.unused = self._rest
        return self.plan

    # ------------------------------------------------------------------ which comes next

    def _beginning(self) -> list[Candidate]:
        """Where the log begins. A file that lost its name begins it only where one with a name follows it."""
        named = [candidate for candidate in self._rest if candidate.is_named]
        beginning = named[:1] or self._rest[:1]
        while beginning:
            header = beginning[0].header
            before = None
            if header is not None and header.seq_before:
                before = next((item for item in self._rest if _is_followed_by(item, header)), None)
            if before is None:
                break
            beginning.insert(0, before)
        return beginning

    def _following(self) -> Candidate | None:
        """The candidate that follows, the best where there are copies; else one whose header was damaged."""
        later = [candidate for candidate in self._rest if candidate.seq_first > self.plan.seq_last]
        linked = [candidate for candidate in later if self._link_problem(candidate) is None]
        if linked:
            return linked[0] if len(linked) == 1 else max(linked, key=self._worth)
        for candidate in later:
            if candidate.header is None and self._put_header_back(candidate):
                return candidate
        for candidate in later:
            if not self.plan.is_foreign(candidate):
                # The log is known to go on, and does not from here.
                problem = self._link_problem(candidate) or "the segment does not follow"
                self._end(LogCut(candidate.path, None, problem))
                break
        return None

    def _put_header_back(self, candidate: Candidate) -> bool:
        if put_header_back(self._files, candidate, self._before, self._chain, self._links):
            return True
        if candidate.is_newer:
            # It is what it says, and not damaged.
            raise NewerVersion(candidate.header_problem, path=candidate.path)
        return False

    def _link_problem(self, candidate: Candidate) -> str | None:
        if candidate.header is None:
            return candidate.header_problem
        try:
            check_link(candidate.header, self._before, candidate.path)
        except Corrupt as error:
            return error.message
        return None

    def _worth(self, candidate: Candidate) -> tuple[int, bool]:
        """Return how good a copy of a segment is: where its good frames end, and then whether it has the
        name. The best copy is kept."""
        assert candidate.header is not None
        with open_candidate(self._files, candidate) as file:
            end = scan_frames(file, candidate.header, stop=candidate.frames_stop).end
        return end, candidate.is_named

    # ------------------------------------------------------------------ what of it is kept

    def _end(self, cut: LogCut | None) -> None:
        self._ended = True
        self.plan.cut = cut

    def _take(self, candidate: Candidate) -> None:
        if candidate.header is None and not self._put_header_back(candidate):
            self._end(LogCut(candidate.path, 0, candidate.header_problem))
            return
        header = candidate.header
        assert header is not None
        with open_candidate(self._files, candidate) as file:
            scan = scan_frames(file, header, stop=candidate.frames_stop)
            misfit = self._misfit(file, header, scan)
            if misfit is not None:
                self._end(LogCut(candidate.path, 0, misfit))
            elif scan.complete:
                self._take_whole(candidate, file, header, scan)
            else:
                self._take_beginning(candidate, file, scan)

    def _misfit(self, file: TolerantFile, header: SegmentHeader, scan: Scan) -> str | None:
        """Why frames do not follow the log up to here, although their header links to it."""
        if not scan.positions:
            return None
        if scan.seq_first != header.seq_first:
            return f"the header names seq {header.seq_first} as the first, and it is {scan.seq_first}"
        if self._before is None:
            return None
        return why_not_next(self._chain, header, forks=begins_with_fork(file))

    def _take_whole(
        self, candidate: Candidate, file: TolerantFile, header: SegmentHeader, scan: Scan
    ) -> None:
        try:
            footer, trailer = _run(
                footer_steps(file, scan.positions, scan.end, block_bytes=header.block_bytes)
            )
        except Corrupt as error:
            self._end(LogCut(candidate.path, error.offset, error.message))
            return
        is_good = _ends_with(file, candidate, footer + trailer.encode(), scan.end)
        done = [] if is_good else ["sealed" if candidate.is_unsealed else "footer built again"]
        self._keep(candidate, scan, segment_name(scan.seq_first, scan.chain.seq_last), trailer, done, is_good)
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

    def _take_beginning(self, candidate: Candidate, file: TolerantFile, scan: Scan) -> None:
        """The log ends in this segment: it is the one being written, or it is damaged."""
        what = scan.problem or "the file ends before the segment does"
        cut: LogCut | None = LogCut(candidate.path, scan.end, what)
        done = ["cut"]
        if candidate.is_current or (candidate.named is None and candidate.trailer is None):
            # Nothing says that there was more of it, unless this does.
            try:
                floor = self._source.hint.durable_seq if self._source.hint is not None else 0
                inspect_current(file, candidate.path, self._before, self._source.hint, floor)
                cut, done = None, []
                if scan.problem is not None:
                    self.plan.torn_bytes = candidate.file_bytes - scan.end
                    done = ["torn write removed"]
            except Corrupt as error:
                cut = LogCut(candidate.path, error.offset, error.message)
        if scan.positions:
            self._keep(candidate, scan, CURRENT, None, done, footer_is_good=False)
        self._end(cut)

    def _keep(
        self,
        candidate: Candidate,
        scan: Scan,
        name: str,
        trailer: SegmentTrailer | None,
        done: list[str],
        footer_is_good: bool,
    ) -> None:
        if candidate.head:
            done.insert(0, "header put back")
        if candidate.compressed:
            done.append("decompressed")
        elif candidate.name != name and not candidate.is_unsealed and (trailer or not candidate.named):
            done.append("renamed")
        self._rest.remove(candidate)
        self.plan.kept.append(
            KeptSegment(
                candidate=candidate,
                name=name,
                body_bytes=scan.end,
                seq_first=scan.seq_first,
                seq_last=scan.chain.seq_last,
                frames=len(scan.positions),
                trailer=trailer,
                footer_is_good=footer_is_good,
                done=tuple(done),
            )
        )


def _is_followed_by(candidate: Candidate, header: SegmentHeader) -> bool:
    trailer = candidate.trailer
    return trailer is not None and (trailer.seq_last, trailer.segment_hash) == (
        header.seq_before,
        header.hash_before,
    )


def _ends_with(file: TolerantFile, candidate: Candidate, ending: bytes, start: int) -> bool:
    if candidate.file_bytes != start + len(ending):
        return False
    return all(
        file.read_at(start + offset, READ_BYTES) == ending[offset : offset + READ_BYTES]
        for offset in range(0, len(ending), READ_BYTES)
    )


def _run(steps: Generator[None, None, tuple[bytes, SegmentTrailer]]) -> tuple[bytes, SegmentTrailer]:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: tuple[bytes, SegmentTrailer] = end.value
            return result
