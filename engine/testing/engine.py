"""What an orchestrator relies on in every StorageEngine. A new one is tested by a few lines:

    class TestMyEngine(EngineConformance):
        @pytest.fixture
        def place(self, tmp_path: Path) -> Place:
            return lambda: MyEngine(str(tmp_path / "data"))

Always true: each test finds a new place; the place gives the engine that is there, which was closed before.
What a crash leaves is not tested here: no call of the interface makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lowwater.engine.chain import Create
from lowwater.engine.decide import Refusal
from lowwater.engine.entries import Copy, CreateBucket, Delete, DeleteBucket, Put, Write
from lowwater.engine.orchestrator import Outcome, StorageEngine
from lowwater.engine.requests import Request
from lowwater.errors import Closed, InvalidEntry, LogDivergence, NotFound, VersionGone

# Opens the engine of one place, again and again.
Place = Callable[[], StorageEngine]
Pairs = Sequence[tuple[int, Request]]

CLUSTER_ID = bytes(range(16))
SALT = bytes(range(16, 32))

# Some of everything, with holes between the seqs, and what must come of it.
HISTORY: Pairs = [
    (3, Create(CLUSTER_ID, SALT)),
    (4, CreateBucket("b", time_us=50)),
    (7, Put("b", "a", b"1", {"m": "n"}, time_us=60)),
    (8, Put("b", "a", b"2", if_absent=True)),
    (9, Put("b", "a", b"3", if_seq=7, time_us=40)),
    (20, Put("b", "large", bytes(5000), origin=9)),
    (21, Copy("b", "large", "b", "copy")),
    (22, Copy("b", "copy", "b", "a", if_seq=7)),
    (33, Write([Put("b", "x", b"x"), Delete("b", "nothing"), Copy("b", "a", "b", "y")])),
    (36, Write([Put("b", "z", b"z"), Put("b", "x", b"", if_absent=True)])),
    (37, Delete("b", "nothing")),
    (38, Delete("b", "large")),
    (39, DeleteBucket("b")),
    (40, CreateBucket("b")),
    (41, Put("c", "a", b"")),
    (42, DeleteBucket("c")),
    (43, Copy("b", "nothing", "b", "a")),
]
REFUSED = {
    8: Refusal.CONDITION_FAILED,
    22: Refusal.CONDITION_FAILED,
    36: Refusal.CONDITION_FAILED,
    37: Refusal.NO_KEY,
    39: Refusal.BUCKET_NOT_EMPTY,
    40: Refusal.BUCKET_EXISTS,
    41: Refusal.NO_BUCKET,
    42: Refusal.NO_BUCKET,
    43: Refusal.NO_KEY,
}
OUTCOMES = [Outcome(seq, REFUSED.get(seq)) for seq, _ in HISTORY]
VALUES = {"a": b"3", "copy": bytes(5000), "x": b"x", "y": b"3"}


def feed(engine: StorageEngine, pairs: Pairs) -> list[Outcome]:
    return [engine.apply_log_entry(seq, entry) for seq, entry in pairs]


def values(engine: StorageEngine, seq: int) -> dict[str, bytes]:
    found = {}
    for key in ("a", "large", "copy", "x", "y", "z", "nothing"):
        try:
            found[key] = engine.read("b", key, seq).value
        except NotFound:
            pass
    return found


class EngineConformance:
    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError("a subclass says how its engine is opened")

    def test_entries_are_applied_in_order(self, place: Place) -> None:
        """Each has its effect, or none and a reason."""
        engine = place()
        assert feed(engine, HISTORY) == OUTCOMES
        assert values(engine, 43) == VALUES
        assert engine.read("b", "a", 43).seq == 9
        assert engine.read("b", "x", 43).seq == engine.read("b", "y", 43).seq == 33
        engine.close()

    def test_time_comes_from_the_entries_and_never_falls(self, place: Place) -> None:
        """A replica's own clock must not be in its bytes."""
        engine = place()
        feed(engine, HISTORY)
        assert engine.read("b", "a", 43).time_us == 60  # 40 was proposed, after 60
        engine.close()

    def test_what_is_synced_is_there_in_the_next_life(self, place: Place) -> None:
        """And marks say so."""
        engine = place()
        feed(engine, HISTORY)
        assert engine.sync() == engine.marks().durable == 43
        root = engine.root()
        engine.close()
        engine = place()
        assert engine.marks().applied == engine.marks().durable == 43
        assert values(engine, 43) == VALUES
        assert engine.root() == root
        engine.close()

    def test_what_is_delivered_again_has_the_same_outcome_and_no_effect(self, place: Place) -> None:
        """An orchestrator that is not sure what arrived delivers again."""
        engine = place()
        feed(engine, HISTORY)
        root = engine.root()
        for start in range(len(HISTORY)):
            assert feed(engine, HISTORY[start:]) == OUTCOMES[start:]
        engine.close()
        engine = place()
        assert feed(engine, HISTORY) == OUTCOMES
        assert engine.root() == root
        assert engine.marks().applied == 43
        engine.close()

    def test_another_entry_under_an_applied_seq_is_a_divergence(self, place: Place) -> None:
        """Two histories: the engine stops writing, and goes on telling what it has."""
        engine = place()
        feed(engine, HISTORY)
        with pytest.raises(LogDivergence):
            engine.apply_log_entry(7, Put("b", "a", b"other", {"m": "n"}))
        with pytest.raises(LogDivergence):
            engine.apply_log_entry(50, Put("b", "new", b""))
        assert values(engine, 43) == VALUES
        engine.close()

    def test_an_entry_in_a_hole_is_a_divergence(self, place: Place) -> None:
        """What was ordered before has been applied: nothing can come between any more."""
        engine = place()
        feed(engine, HISTORY)
        with pytest.raises(LogDivergence):
            engine.apply_log_entry(5, Put("b", "a", b"late"))
        engine.close()

    def test_a_log_begins_with_create_and_has_no_other(self, place: Place) -> None:
        """An engine that missed the beginning must not make one up."""
        engine = place()
        with pytest.raises(InvalidEntry):
            engine.apply_log_entry(4, CreateBucket("b"))
        feed(engine, HISTORY)
        with pytest.raises(InvalidEntry):
            engine.apply_log_entry(50, Create(CLUSTER_ID, SALT))
        assert engine.apply_log_entry(51, Put("b", "k", b"")) == (51, None)
        engine.close()

    def test_marks_are_in_order_and_the_low_water_mark_never_falls(self, place: Place) -> None:
        """Shipping and purging go by it."""
        engine = place()
        for seq, entry in HISTORY:
            engine.apply_log_entry(seq, entry)
            marks = engine.marks()
            assert list(marks) == sorted(marks, reverse=True)
            assert marks.applied == seq
        engine.sync()
        assert engine.update_low_water_mark(20) == engine.marks().lwm == 20
        assert engine.update_low_water_mark(7) == engine.marks().lwm == 20
        assert engine.update_low_water_mark(1000) == engine.marks().lwm == 43
        assert engine.get_s3_high_water_mark() <= 43
        engine.close()

    def test_a_checkpoint_covers_what_was_applied(self, place: Place) -> None:
        """And changes nothing that can be read."""
        engine = place()
        feed(engine, HISTORY)
        root = engine.root()
        assert engine.create_checkpoint() == 43
        assert engine.root() == root
        engine.close()
        engine = place()
        assert engine.root() == root
        assert feed(engine, HISTORY) == OUTCOMES
        engine.close()

    def test_two_engines_with_the_same_entries_have_the_same_root(self, place: Place) -> None:
        """Whatever happened between the calls."""
        engine = place()
        roots = []
        for seq, entry in HISTORY:
            engine.apply_log_entry(seq, entry)
            roots.append(engine.root())
            engine.create_checkpoint()
            engine.close()
            engine = place()
            assert engine.root() == roots[-1]
        assert len(set(roots)) == len(HISTORY) - len(REFUSED)  # each change, and the empty one
        engine.close()

    def test_a_seq_that_was_not_applied_cannot_be_read(self, place: Place) -> None:
        """What it will show is not known yet."""
        engine = place()
        feed(engine, HISTORY)
        with pytest.raises(VersionGone):
            engine.read("b", "a", 44)
        engine.close()

    def test_a_closed_engine_takes_nothing(self, place: Place) -> None:
        """Its directory may belong to another process by now."""
        engine = place()
        feed(engine, HISTORY)
        engine.close()
        engine.close()
        with pytest.raises(Closed):
            engine.apply_log_entry(50, Put("b", "k", b""))
        with pytest.raises(Closed):
            engine.sync()
