"""What an engine relies on in every Orchestrator. A new one is tested by a few lines:

    class TestMyOrchestrator(OrchestratorConformance):
        @pytest.fixture
        def orchestrator(self) -> Orchestrator:
            return MyOrchestrator()

Always true: the suite makes only calls of `orchestrator.py`, and each test finds a new log. Proposing is best
effort: a test proposes again until it sees the entry, as an engine does.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from lowwater.engine.database.orchestrator import Orchestrator
from lowwater.engine.format.entries import Control
from lowwater.engine.format.format import SEQ_MAX, Kind
from lowwater.engine.log.chain import Create
from lowwater.engine.state.requests import Request

PROPOSALS_MAX = 10_000


class OrchestratorConformance:
    @pytest.fixture
    def orchestrator(self) -> Orchestrator:
        raise NotImplementedError("a subclass says which orchestrator")

    def test_a_log_begins_with_create(self, orchestrator: Orchestrator) -> None:
        """An engine takes nothing before it, whatever else was proposed."""
        _propose(orchestrator, Control(Kind.NOOP, origin=1))
        assert isinstance(_entries(orchestrator)[0][1], Create)

    def test_what_is_proposed_is_delivered_as_it_is(self, orchestrator: Orchestrator) -> None:
        """The engine recognises its own control entries, and counts on what they name."""
        entry = Control(Kind.SEAL, {"seq_first": 5}, origin=2)
        _propose(orchestrator, entry)
        found = [each for _, each in _entries(orchestrator) if isinstance(each, Control) and each.origin == 2]
        assert found[0]._replace(time_us=0) == entry

    def test_seqs_rise_and_what_was_ordered_stays(self, orchestrator: Orchestrator) -> None:
        """A seq that meant something else later would be a divergence."""
        before: list[tuple[int, Request]] = []
        for number in range(1, 6):
            _propose(orchestrator, Control(Kind.NOOP, origin=number))
            found = _entries(orchestrator)
            assert found[: len(before)] == before
            assert all(one < following for (one, _), (following, _) in pairwise(found))
            before = found

    def test_a_part_of_the_log_is_that_part(self, orchestrator: Orchestrator) -> None:
        """Both ends belong to it, and whether they are holes makes no difference."""
        for number in range(1, 6):
            _propose(orchestrator, Control(Kind.NOOP, origin=number))
        whole = _entries(orchestrator)
        seqs = [seq for seq, _ in whole]
        for first in seqs:
            for last in (first - 1, first, seqs[-1], seqs[-1] + 1):
                part = [each for each in whole if first <= each[0] <= last]
                assert list(orchestrator.fetch_log_entries(first, last)) == part

    def test_the_low_water_mark_never_falls(self, orchestrator: Orchestrator) -> None:
        """What was purged by it is gone."""
        marks = [orchestrator.get_low_water_mark()]
        for number in range(1, 6):
            _propose(orchestrator, Control(Kind.NOOP, origin=number))
            marks.append(orchestrator.get_low_water_mark())
        assert marks == sorted(marks)
        assert 0 <= marks[-1] <= _entries(orchestrator)[-1][0]


def _entries(orchestrator: Orchestrator) -> list[tuple[int, Request]]:
    return list(orchestrator.fetch_log_entries(1, SEQ_MAX))


def _propose(orchestrator: Orchestrator, entry: Control) -> None:
    for _ in range(PROPOSALS_MAX):
        orchestrator.propose(entry)
        if any(isinstance(each, Control) and each[:3] == entry[:3] for _, each in _entries(orchestrator)):
            return
    raise AssertionError(f"{entry} was never ordered, in {PROPOSALS_MAX:,} proposals")
