"""What a repaired log has lost: told by what else is in its files, and by what they say of it.

Always true: a seq that is called lost lies in a gap for which somebody vouches (a link to a seq, a name, a
footer, the hint), never merely beyond the end. Holes are legal, so not every seq in such a gap was an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from lowwater.engine.format.format import HEADER_BYTES, SEQ_MAX
from lowwater.engine.log.reader import SealedReader
from lowwater.engine.log.repair.damaged_log import Candidate, DamagedLog, open_candidate
from lowwater.engine.log.repair.kept import RepairPlan
from lowwater.engine.log.salvage import Frame, salvage_frames
from lowwater.engine.seams.seams import Files
from lowwater.errors import DataError


@dataclass(frozen=True, slots=True)
class Unconnected:
    """Whole frames of the source that are not in the copy, because what comes before them is missing."""

    path: str
    seq_before: int
    """There is nothing between this and the first."""
    seq_first: int
    seq_last: int
    frames: int


@dataclass(slots=True)
class Losses:
    lost: list[tuple[int, int]] = field(default_factory=list)
    """First and last seqs of the gaps."""
    unconnected: list[Unconnected] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """(path, why) of files that have nothing that is missing in the copy."""


def find_losses(files: Files, source: DamagedLog, plan: RepairPlan) -> Losses:
    """Reads every file that was not kept, and the rest of the one that was cut."""
    losses = Losses(left_out=list(source.others))
    vouched = [source.hint.durable_seq] if source.hint is not None else []
    runs: list[Unconnected] = []
    if plan.cut is not None and plan.kept and plan.kept[-1].trailer is None:
        last = plan.kept[-1]
        vouched.append(last.candidate.seq_last)
        runs += _runs(files, last.candidate, last.body_bytes, last.seq_last)
    for candidate in plan.unused:
        if plan.is_foreign(candidate):
            losses.left_out.append((candidate.path, "it belongs to another log"))
            continue
        seq_before = candidate.header.seq_before if candidate.header is not None else None
        found = _runs(files, candidate, HEADER_BYTES, seq_before)
        held = [run for run in found if run.seq_last > plan.seq_last]
        if not held and candidate.seq_last <= plan.seq_last:
            losses.left_out.append((candidate.path, "nothing in it is missing in the copy"))
            continue
        runs += held
        vouched.append(candidate.seq_last)
    cursor = plan.seq_last
    for run in sorted(runs, key=lambda run: (run.seq_first, run.seq_before)):
        if run.seq_last <= cursor:
            continue
        losses.unconnected.append(run)
        if run.seq_before > cursor:
            losses.lost.append((cursor + 1, run.seq_before))
        cursor = run.seq_last
    if max(vouched, default=0) > cursor:
        losses.lost.append((cursor + 1, max(vouched)))
    return losses


def _runs(files: Files, candidate: Candidate, start: int, seq_before: int | None) -> list[Unconnected]:
    """The runs of whole frames from `start` on. The first follows `seq_before`, where that is known."""
    runs: list[Unconnected] = []
    with open_candidate(files, candidate) as file:
        positions: Sequence[int] = ()
        if candidate.trailer is not None:
            try:
                positions = SealedReader(file).positions
            except DataError:
                pass
        salvaged = salvage_frames(
            file,
            start,
            candidate.frames_stop,
            seq_before=seq_before or 0,
            seq_max=candidate.seq_last or SEQ_MAX,
            positions=positions,
        )
        follows = seq_before
        for connected, items in groupby(salvaged, key=lambda item: isinstance(item, Frame)):
            if not connected:
                follows = None
                continue
            seqs = [item.seq for item in items if isinstance(item, Frame)]
            before = seqs[0] - 1 if follows is None else follows
            runs.append(Unconnected(candidate.path, before, seqs[0], seqs[-1], len(seqs)))
            follows = seqs[-1]
    return runs
