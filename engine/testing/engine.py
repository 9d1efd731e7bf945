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

from lowwater.engine.database.orchestrator import Outcome, StorageEngine
from lowwater.engine.format.entries import (
    Abort,
    Begin,
    Commit,
    Control,
    Copy,
    CreateBucket,
    Delete,
    DeleteBucket,
    Put,
    Write,
)
from lowwater.engine.format.format import Kind
from lowwater.engine.log.chain import Create, checkpoint_entry
from lowwater.engine.state.decide import Refusal
from lowwater.engine.state.requests import Request
from lowwater.errors import Closed, InputError, InvalidEntry, LogDivergence, NotFound, VersionGone

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


# The same with transactions; the first begins after `HISTORY`.
TRANSACTIONS: Pairs = [
    (50, Begin()),
    (51, Put("b", "a", b"4", txn=50)),
    (52, Begin(51, time_us=70)),
    (53, Delete("b", "x", txn=50)),
    (54, Put("b", "x", b"5", txn=52)),
    (55, Put("b", "z", b"6", txn=50)),
    (56, Put("b", "z", b"7", txn=50, if_seq=55)),
    (57, Abort(50, 55)),
    (58, Commit(52)),
    (59, Copy("b", "z", "b", "nothing", txn=50)),
    (60, Commit(50, [("b", "y")], [("b", "a", "b")], time_us=80)),
    (61, Put("b", "y", b"8", txn=50)),
    (62, Begin()),
    (63, Put("b", "y", b"9", txn=62)),
    (64, Abort(62)),
    (65, Begin()),
    (66, Put("b", "y", b"10", txn=65)),
    (67, Put("b", "y", b"11")),
    (68, Commit(65)),
]
TRANSACTIONS_REFUSED = {
    54: Refusal.CONFLICT,
    58: Refusal.DOOMED,
    61: Refusal.NO_TRANSACTION,
    68: Refusal.DOOMED,
}
TRANSACTIONS_OUTCOMES = [Outcome(seq, TRANSACTIONS_REFUSED.get(seq)) for seq, _ in TRANSACTIONS]
TRANSACTIONS_VALUES = {"a": b"4", "copy": bytes(5000), "y": b"11", "z": b"6", "nothing": b"6"}


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

    def test_a_checkpoint_entry_makes_a_checkpoint_and_changes_nothing(self, place: Place) -> None:
        """Its id depends on the entries alone, so a second engine must have the same one."""
        engine = place()
        feed(engine, HISTORY)
        root = engine.root()
        entry = checkpoint_entry(0)
        assert engine.apply_log_entry(50, entry) == Outcome(50, None)
        found = engine.wait_for_checkpoint(50)
        assert engine.root() == engine.root(50) == root
        engine.close()
        engine = place()
        assert engine.wait_for_checkpoint(50) == found
        assert engine.apply_log_entry(50, entry) == Outcome(50, None)
        assert engine.root() == root
        engine.close()

    def test_a_checkpoint_entry_that_comes_late_is_refused(self, place: Place) -> None:
        """Proposals are repeated until they are seen: a second one must not make a second checkpoint."""
        engine = place()
        feed(engine, HISTORY)
        assert engine.apply_log_entry(50, checkpoint_entry(0)) == Outcome(50, None)
        assert engine.apply_log_entry(51, checkpoint_entry(0)) == Outcome(51, Refusal.OUT_OF_DATE)
        with pytest.raises(NotFound):
            engine.wait_for_checkpoint(51)
        assert engine.apply_log_entry(52, checkpoint_entry(50)) == Outcome(52, None)
        assert engine.wait_for_checkpoint(52) > engine.wait_for_checkpoint(50)
        engine.close()

    def test_nobody_orders_a_checkpoint_where_no_orchestrator_was_named(self, place: Place) -> None:
        """To wait for it for ever would be no answer."""
        engine = place()
        feed(engine, HISTORY)
        with pytest.raises(InputError):
            engine.create_checkpoint()
        engine.close()

    def test_two_engines_with_the_same_entries_have_the_same_root(self, place: Place) -> None:
        """Whatever happened between the calls."""
        engine = place()
        roots = []
        for seq, entry in HISTORY:
            engine.apply_log_entry(seq, entry)
            roots.append(engine.root())
            engine.close()
            engine = place()
            assert engine.root() == roots[-1]
        assert len(set(roots)) == len(HISTORY) - len(REFUSED)  # each change, and the empty one
        engine.close()

    def test_a_request_of_a_session_happens_once(self, place: Place) -> None:
        """Who does not know what became of it proposes it again, under another seq."""
        engine = place()
        feed(engine, [(3, Create(CLUSTER_ID, SALT)), (4, CreateBucket("b"))])
        assert engine.apply_log_entry(9, Control(Kind.SESSION_OPEN, {"ttl_us": 10**9})) == (9, None)
        first, refused = (
            Put("b", "k", b"first", session=(9, 1)),
            Put("b", "k", b"", if_absent=True, session=(9, 2)),
        )
        history: list[tuple[int, Request]] = [
            (10, first),
            (11, refused),
            (12, Put("b", "k", b"second")),
            (20, first),
            (21, refused),
            (24, Write([Put("b", "x", b""), Delete("b", "k")], session=(9, 5))),
            (26, Write([Put("b", "x", b""), Delete("b", "k")], session=(9, 5))),
            (27, Put("b", "y", b"", session=(9, 6, 5))),
            (28, Put("b", "k", b"", session=(9, 5))),
            (29, Put("b", "k", b"", session=(8, 1))),
        ]
        outcomes = [
            (10, None), (11, Refusal.CONDITION_FAILED), (12, None),
            (10, None), (11, Refusal.CONDITION_FAILED),
            (24, None), (24, None), (27, None), (28, Refusal.REQUEST_FORGOTTEN), (29, Refusal.NO_SESSION),
        ]  # fmt: skip
        assert feed(engine, history[:5]) == outcomes[:5]
        assert engine.read("b", "k", 21).value == b"second"
        assert feed(engine, history[5:]) == outcomes[5:]
        with pytest.raises(NotFound):
            engine.read("b", "k", 29)
        engine.sync()
        engine.close()
        engine = place()
        assert engine.apply_log_entry(40, Put("b", "k", b"", session=(9, 6, 5))) == (27, None)
        assert engine.apply_log_entry(41, Control(Kind.SESSION_CLOSE, {"session": 9})) == (41, None)
        assert engine.apply_log_entry(42, first) == (42, Refusal.NO_SESSION)
        engine.close()

    def test_a_transaction_takes_effect_with_its_commit_or_not_at_all(self, place: Place) -> None:
        """What it writes is seen by nobody before, and the first to commit wins."""
        engine = place()
        feed(engine, HISTORY)
        for (seq, entry), outcome in zip(TRANSACTIONS, TRANSACTIONS_OUTCOMES, strict=True):
            assert engine.apply_log_entry(seq, entry) == outcome
            if seq < 60:
                assert values(engine, seq) == VALUES
        assert values(engine, 68) == TRANSACTIONS_VALUES
        assert engine.read("b", "a", 68)[4:] == engine.read("b", "nothing", 68)[4:] == (60, 80)
        engine.close()

    def test_a_transaction_stays_open_in_the_next_life(self, place: Place) -> None:
        """Only its entries end it: it is open on every replica."""
        engine = place()
        feed(engine, HISTORY)
        roots = []
        for pair, outcome in zip(TRANSACTIONS, TRANSACTIONS_OUTCOMES, strict=True):
            assert engine.apply_log_entry(*pair) == outcome
            roots.append(engine.root())
            engine.close()
            engine = place()
            assert engine.root() == roots[-1]
        assert values(engine, 68) == TRANSACTIONS_VALUES
        assert len(set(roots)) == 3  # before, with the one that commits, and with the put outside
        assert feed(engine, TRANSACTIONS) == TRANSACTIONS_OUTCOMES
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
