"""Sessions: a request happens once, however often it comes, and whatever crashes in between."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import cbor2
import pytest
from tests.engine.engine_model import Machine, small_limits
from tests.engine.test_engine import CREATE, Node

import lowwater
from lowwater import Copy, CreateBucket, Delete, Outcome, Put, Refusal, RequestId, Write
from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.survival import SURVIVALS
from lowwater.engine.database import engine as engine_module
from lowwater.engine.flush.flush import Flusher
from lowwater.engine.format import request_id
from lowwater.engine.format.entries import Control
from lowwater.engine.format.format import Kind
from lowwater.engine.format.request_id import RESULTS_MAX, as_request_id, request_of_word
from lowwater.engine.log.chain import checkpoint_entry
from lowwater.engine.log.log import LogOptions
from lowwater.engine.state import meta as meta_module
from lowwater.engine.state import sessions as engine_sessions
from lowwater.engine.state.requests import Request
from lowwater.engine.state.sessions import Result, Sessions, StoredSession, session_key
from lowwater.engine.testing.engine import feed
from lowwater.errors import (
    AlreadyExists,
    Closed,
    ConditionFailed,
    Corrupt,
    InputError,
    InvalidEntry,
    LimitExceeded,
    NotFound,
)

OPEN = Control(Kind.SESSION_OPEN, {"ttl_us": 3_600_000_000})


def tables(engine: Any) -> dict[int, tuple[Any, ...]]:
    """All that is known of sessions."""
    found = engine._state.sessions
    result = {
        each: (session.seq, session.time_us, session.ttl_us, session.acknowledged, dict(session._results))
        for each, session in found.sessions.items()
    }
    assert found.result_count == sum(len(each[-1]) for each in result.values())
    return result


@contextmanager
def limits(**constants: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            for module in (engine_sessions, request_id):
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        yield


# ---------------------------------------------------------------------------- numbers


def test_a_request_is_the_same_after_its_frame() -> None:
    """Number and acknowledgement share eight bytes."""
    rng = random.Random(1)
    for _ in range(300):
        number = rng.choice((1, 2, 500, 1000, 1001, 2**48 - 1, rng.randrange(1, 2**48)))
        unanswered = rng.randrange(min(number, RESULTS_MAX))
        request = as_request_id((7, number, number - 1 - unanswered))
        assert request_of_word(7, request.word) == request
        assert as_request_id((7, number)).unanswered == min(number, RESULTS_MAX) - 1


@pytest.mark.parametrize(
    "wrong",
    [
        (0, 1), (1, 0), (1,), 5, "ab", (1, 2, 2), (1, 2, -1), (1, 2000, 1), (1, 2**48), (2**64, 1), (1, True),
        (1, "1"), (1, 1.0), (1, 2, 3, 4), (None, 1),
    ],
)  # fmt: skip
def test_a_request_that_is_none_is_refused(wrong: Any) -> None:
    node = Node()
    engine = node.open()
    feed(engine, [(1, CREATE), (2, CreateBucket("b")), (3, OPEN)])
    for entry in (
        Put("b", "k", b"", session=wrong),
        Write([Put("b", "k", b"")], session=wrong),
        Control(Kind.NOOP, session=wrong),
    ):
        with pytest.raises(InvalidEntry):
            engine.apply_log_entry(10, entry)
    assert engine.marks().applied == 3
    engine.close()


@pytest.mark.parametrize(
    "entry",
    [
        Control(Kind.SESSION_OPEN, {}),
        Control(Kind.SESSION_OPEN, {"ttl_us": -1}),
        Control(Kind.SESSION_OPEN, {"ttl_us": 2**60}),
        Control(Kind.SESSION_KEEP, {"session": None}),
        Control(Kind.SESSION_CLOSE, {"session": "x"}),
        Control(Kind.SESSION_CLOSE, {"session": 3}, session=(3, 1)),
        Write([Put("b", "k", b"", session=(3, 1))]),
    ],
)
def test_what_makes_no_sense_about_sessions_is_refused(entry: Request) -> None:
    node = Node()
    engine = node.open()
    feed(engine, [(1, CREATE), (2, CreateBucket("b")), (3, OPEN)])
    with pytest.raises(InvalidEntry):
        engine.apply_log_entry(10, entry)
    engine.close()


def test_a_log_alone_takes_no_requests(tmp_path: Path) -> None:
    """It could not tell a repetition."""
    with lowwater.Log.open(None) as log:
        for entry in (
            Put("b", "k", b"", session=(1, 1)),
            Delete("b", "k", session=(1, 1)),
            CreateBucket("b", session=(1, 1)),
            Control(Kind.NOOP, session=(1, 1)),
        ):
            with pytest.raises(InvalidEntry):
                log.append(entry)


# ---------------------------------------------------------------------------- fed engines


class Model:
    """Sessions as dictionaries of everything that there ever was."""

    def __init__(self) -> None:
        self.open: dict[int, dict[int, Outcome]] = {}
        self.acknowledged: dict[int, int] = {}
        self.keys: dict[str, int] = {}
        self.effects: Counter[tuple[int, int]] = Counter()

    def apply(self, seq: int, entry: Any) -> Outcome:
        if isinstance(entry, Control):
            return Outcome(seq, self._control(seq, entry))
        request = as_request_id(entry.session)
        seen = self.open.get(request.session)
        if seen is None:
            return Outcome(seq, Refusal.NO_SESSION)
        acknowledged = self.acknowledged[request.session]
        repeated = seen.get(request.number)
        if repeated is not None and request.number > acknowledged:
            outcome = repeated
        elif request.number <= acknowledged:
            outcome = Outcome(seq, Refusal.REQUEST_FORGOTTEN)
        else:
            outcome = seen[request.number] = Outcome(seq, self._put(seq, entry))
            self.effects[request.session, request.number] += 1
        self.acknowledged[request.session] = max(acknowledged, request.number - 1 - request.unanswered)
        return outcome

    def _control(self, seq: int, entry: Control) -> Refusal | None:
        if entry.kind == Kind.SESSION_OPEN:
            self.open[seq], self.acknowledged[seq] = {}, 0
            return None
        assert entry.body is not None
        if entry.body["session"] not in self.open:
            return Refusal.NO_SESSION
        if entry.kind == Kind.SESSION_CLOSE:
            del self.open[entry.body["session"]]
        return None

    def _put(self, seq: int, entry: Any) -> Refusal | None:
        members = entry.entries if isinstance(entry, Write) else [entry]
        for member in members:
            if member.if_seq is not None and self.keys.get(member.key, 0) != member.if_seq:
                return Refusal.CONDITION_FAILED
        for member in members:
            self.keys[member.key] = seq
        return None


class Client:
    """Makes requests out of order and again, and acknowledges some of them."""

    def __init__(self, session: int, rng: random.Random) -> None:
        self.session = session
        self.rng = rng
        self.made: dict[int, Any] = {}
        self.acknowledged = 0

    def request(self, model: Model) -> Any:
        rng = self.rng
        if self.made and rng.random() < 0.4:
            entry = rng.choice(list(self.made.values()))
            session = as_request_id(entry.session)
            if rng.random() < 0.5 and session.number > self.acknowledged:
                # The same request, with a newer acknowledgement.
                entry = entry._replace(session=RequestId(self.session, session.number, self.acknowledged))
            return entry
        if rng.random() < 0.3:
            self.acknowledged = max(self.acknowledged, max(self.made, default=0) - rng.randrange(8))
        number = self.acknowledged + rng.randrange(1, 12)
        key = rng.choice("abcdef")
        if_seq = rng.choice((None, None, model.keys.get(key, 0), 0))
        of = rng.choice(
            (RequestId(self.session, number, self.acknowledged), (self.session, number, self.acknowledged))
        )
        entry: Any = Put("b", key, rng.randbytes(rng.choice((5, 400))), if_seq=if_seq, session=of)
        if rng.random() < 0.3:
            entry = Write([entry._replace(session=None), Put("b", "g", b"")], session=of)
        self.made.setdefault(number, entry)
        return self.made[number]


@pytest.fixture(params=[False, True], ids=["redo what is needed", "redo everything"])
def redo(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redo may begin anywhere below what the pages need: what it repeats has no effect."""
    if request.param:

        def meta_of(log: Any, store: Any) -> Any:
            meta = meta_module.meta_of(log, store)
            return None if meta is None else meta._replace(redo_seq=1)

        monkeypatch.setattr(engine_module, "meta_of", meta_of)


def live_on(node: Node, rng: random.Random) -> None:
    roll = rng.random()
    if roll < 0.15:
        node.engine.flush()
    elif roll < 0.4:
        node.step(rng.choice((1, 2, 3, 5, 30)))
    elif roll < 0.44:
        node.restart()
    elif roll < 0.5:
        node.engine.sync()
        node.crash(rng.choice(SURVIVALS), rng.randrange(100))


@pytest.mark.usefixtures("redo")
@pytest.mark.parametrize("seed", range(6))
def test_every_request_has_one_effect_and_one_outcome_on_every_replica(seed: int) -> None:
    """However often it comes, through flushes, crashes and restarts of one replica and not of the other."""
    rng = random.Random(seed)
    with small_limits():
        nodes = [Node(pool_bytes_max=20_000), Node()]
        for node in nodes:
            node.open()
            feed(node.engine, [(1, CREATE), (2, CreateBucket("b"))])
        model, clients, seq = Model(), list[Client](), 2
        delivered: list[tuple[int, Any, Outcome]] = []
        for step in range(250):
            if not clients or rng.random() < 0.03:
                seq += 1
                entry: Any = OPEN
                clients.append(Client(seq, rng))
            elif rng.random() < 0.04:
                seq += 1
                kind = rng.choice((Kind.SESSION_KEEP, Kind.SESSION_KEEP, Kind.SESSION_CLOSE))
                entry = Control(kind, {"session": rng.choice(clients).session})
            else:
                entry = rng.choice(clients).request(model)
                seq += (len(entry.entries) if isinstance(entry, Write) else 1) + rng.choice((0, 0, 3))
            expected = model.apply(seq, entry)
            delivered.append((seq, entry, expected))
            for number, node in enumerate(nodes):
                assert node.engine.apply_log_entry(seq, entry) == expected, (step, seq, entry)
                live_on(node, random.Random(f"{seed} {step} {number}"))
            assert tables(nodes[0].engine) == tables(nodes[1].engine)
            if rng.random() < 0.05:
                # Whatever an orchestrator delivers again is known, and changes nothing.
                for again_seq, again, outcome in delivered[-10:]:
                    found = nodes[0].engine.apply_log_entry(again_seq, again)
                    assert found == outcome or found == (again_seq, Refusal.REPEATED)
                assert tables(nodes[0].engine) == tables(nodes[1].engine)
        assert set(model.effects.values()) == {1}
        assert {outcome.refused for _, _, outcome in delivered} >= {
            None, Refusal.CONDITION_FAILED, Refusal.NO_SESSION, Refusal.REQUEST_FORGOTTEN,
        }  # fmt: skip
        assert sum(outcome.seq != at for at, _, outcome in delivered) > 20, "hardly anything was repeated"
        before = tables(nodes[0].engine)
        assert nodes[0].engine.root() == nodes[1].engine.root()
        assert tables(nodes[0].restart()) == before
        assert nodes[0].segments() == nodes[1].segments()


def script() -> list[tuple[int, Any]]:
    """Sessions that are opened, used, acknowledged and closed, between puts that make pages flush."""
    rng = random.Random(11)
    pairs: list[tuple[int, Any]] = [(1, CREATE), (2, CreateBucket("b")), (3, OPEN), (4, OPEN)]
    number = 0
    for seq in range(5, 120):
        roll = rng.random()
        if roll < 0.4:
            entry: Any = Put("b", f"{rng.randrange(60):02}", rng.randbytes(100))
        elif roll < 0.85:
            session = rng.choice((3, 4))
            if rng.random() < 0.7:
                number += 1
            of = (session, max(1, number), max(0, number - rng.randrange(1, 9)))
            entry = Put("b", f"{rng.randrange(60):02}", b"%d" % seq, if_seq=rng.choice((None, 0)), session=of)
        elif roll < 0.9:
            entry = OPEN
        elif roll < 0.95:
            entry = Control(Kind.SESSION_KEEP, {"session": rng.choice((3, 4))})
        else:
            entry = Control(Kind.SESSION_CLOSE, {"session": rng.choice([each for each, _ in pairs][3:])})
        pairs.append((seq, entry))
    pairs.append((120, Control(Kind.SESSION_CLOSE, {"session": 4})))
    return pairs


def run(node: Node, pairs: list[tuple[int, Any]], rng: random.Random) -> None:
    for seq, entry in pairs:
        node.engine.apply_log_entry(seq, entry)
        if seq % 9 == 0:
            node.engine.sync()
        node.step(rng.choice((0, 0, 1, 3)))
        if seq % 20 == 0:
            node.engine.flush()


@pytest.mark.long
@pytest.mark.usefixtures("redo")
@pytest.mark.parametrize("mode", SURVIVALS)
def test_a_crash_at_any_operation_leaves_the_sessions_as_the_log_has_them(mode: Any) -> None:
    """Between any two flushes, and in the middle of one: what is stored may be ahead of what is redone."""
    pairs = script()
    with small_limits():
        whole = Node(pool_bytes_max=10_000)
        whole.open()
        first = whole.files.operations
        run(whole, pairs, random.Random(1))
        expected, root = tables(whole.engine), whole.engine.root()
        operations = whole.files.operations
        ahead = 0
        for number in range(first + 1, operations, 2):
            node = Node(pool_bytes_max=10_000)
            node.open()
            node.files.crash_at(number, after=bool(number & 1))
            with pytest.raises(SimulatedCrash):
                run(node, pairs, random.Random(1))
            node.crash(mode, number)
            node.files._crash_number = None
            applied = node.engine.marks().applied
            ahead += node.engine.redone > 0 and bool(tables(node.engine))
            run(node, [pair for pair in pairs if pair[0] > applied], random.Random(2))
            assert tables(node.engine) == expected, f"after a crash at operation {number}"
            assert node.engine.root() == root
            assert list(node.engine.check()) == []
            node.engine.close()
        assert ahead > 5, "nothing was ever redone"


def test_a_session_is_stored_as_the_pages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come while a flush is under way, and a checkpoint entry: what that holds of sessions must be
    the same where redo makes it once more."""
    node = Node()
    engine = node.open()
    feed(engine, [(1, CREATE), (2, CreateBucket("b")), (3, OPEN), (4, OPEN)])
    feed(engine, [(5, Put("b", "a", b"1", session=(3, 1))), (6, Put("b", "b", b"1", session=(4, 1)))])
    engine.sync()
    real = Flusher._encode_sessions
    control = b""

    def encode(self: Flusher, session_ids: list[int]) -> Any:
        nonlocal control
        if not control:
            assert session_ids == [3, 4]
            engine.apply_log_entry(9, Put("b", "c", b"2", session=(3, 2)))
            engine.apply_log_entry(10, checkpoint_entry(0))
            control = engine._state.checkpoints_due[0].control
            engine.apply_log_entry(11, Put("b", "c", b"3", session=(3, 3, 2)))
            engine.apply_log_entry(12, Control(Kind.SESSION_CLOSE, {"session": 4}))
            engine.apply_log_entry(13, Put("b", "d", b"2", session=(4, 2)))
            engine.apply_log_entry(14, OPEN)
            engine.sync()
        return (yield from real(self, session_ids))

    monkeypatch.setattr(Flusher, "_encode_sessions", encode)
    assert engine.flush() == 6
    expected = tables(engine)
    engine = node.crash("lose")
    assert engine.redone == 6
    assert tables(engine) == expected
    assert engine._state.checkpoints_due[0].control == control
    rows = cbor2.loads(control)["sessions"]
    assert rows == [
        [3, 9, 0, 3_600_000_000, 0, [1, 2], [5, 9], [0, 0]],
        [4, 6, 0, 3_600_000_000, 0, [1], [6], [0]],
    ]
    assert engine.apply_log_entry(20, Put("b", "c", b"3", session=(3, 3, 2))) == (11, None)
    assert (
        engine.apply_log_entry(21, Put("b", "c", b"2", session=(3, 2))).refused == Refusal.REQUEST_FORGOTTEN
    )
    engine.close()


def test_what_did_not_change_is_not_stored_again() -> None:
    """Ten thousand sessions must not make each flush slow."""
    node = Node()
    engine = node.open()
    feed(engine, [(1, CREATE), (2, CreateBucket("b"))])
    feed(engine, [(seq, OPEN) for seq in range(3, 503)])
    engine.flush()
    written: list[int] = []
    real = node.pages.write

    def write(puts: Any, deletes: Any, meta: Any) -> None:
        written.append(sum(key.startswith(b"session:") for key in meta))
        real(puts, deletes, meta)

    node.pages.write = write  # type: ignore[method-assign]
    feed(engine, [(600, Put("b", "k", b"", session=(7, 1))), (601, Put("b", "k", b"", session=(9, 1)))])
    engine.flush()
    assert sum(written) == 2
    engine.close()


def test_sessions_that_come_and_go_between_flushes_leave_nothing() -> None:
    """There may be very many, and hardly anything else that would ask for a flush."""
    sessions = Sessions()
    for seq in range(1, 100):
        sessions.open(seq, 0, 1)
        sessions.close(seq)
    assert sessions.freeze() == []
    sessions.open(100, 0, 1)
    assert sessions.freeze() == [100]
    sessions.close(100)
    assert sessions.encode(sessions.freeze()) == {session_key(100): None}, "the store has it by now"
    sessions.load({session_key(100): StoredSession(100, 0, 1).encode()})
    sessions.close(100)
    assert sessions.freeze() == [100]


def test_limits_are_the_same_for_all() -> None:
    """What is beyond them is refused by an entry's outcome, on every replica alike."""
    node = Node()
    engine = node.open()
    feed(engine, [(1, CREATE), (2, CreateBucket("b"))])
    with limits(SESSIONS_MAX=2, RESULTS_TOTAL_MAX=3):
        assert [engine.apply_log_entry(seq, OPEN).refused for seq in (3, 4, 5)] == [
            None, None, Refusal.TOO_MANY_SESSIONS,
        ]  # fmt: skip
        requests = [Put("b", "k", b"", session=(3 + number % 2, number)) for number in range(1, 6)]
        refusals = [
            engine.apply_log_entry(10 + number, entry).refused for number, entry in enumerate(requests)
        ]
        assert refusals == [None, None, None, Refusal.TOO_MANY_RESULTS, Refusal.TOO_MANY_RESULTS]
        assert engine.apply_log_entry(20, requests[0]) == (10, None)
        # One that was not looked at can be made again.
        feed(engine, [(21, Put("b", "k", b"", session=(4, 9, 8)))])
        assert engine.apply_log_entry(22, Put("b", "k", b"", session=(3, 4))).refused is None
        assert engine.apply_log_entry(23, Control(Kind.SESSION_CLOSE, {"session": 3})).refused is None
        assert engine.apply_log_entry(24, OPEN).refused is None
    tables(engine)
    engine.close()


def test_a_session_with_all_its_results_is_read_back() -> None:
    session = StoredSession(2**64 - 1, 2**62, 5)
    for number in range(1, RESULTS_MAX + 1):
        session.record(number, Result(2**64 - number, number % 30))
    again = StoredSession.decode(session.encode())
    assert again._results == session._results
    assert (again.seq, again.time_us, again.ttl_us) == (session.seq, session.time_us, session.ttl_us)
    session.acknowledge(400)
    assert session.numbers() == list(range(401, 1001))
    session.acknowledge(2**47)
    assert session.numbers() == []


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x80", b"\xff", b"\x87\1\2\3\4\x81\1\x80\x80",
        cbor2.dumps([1, 2, 3, "4", [], [], []]), cbor2.dumps([1, 2, 3, 4, [1, 1], [5, 6], [0, 0]]),
        cbor2.dumps([1, 2, 3, 4, [1], ["5"], [0]]),
    ],
)  # fmt: skip
def test_a_stored_session_that_is_damaged_is_told(data: bytes) -> None:
    with pytest.raises(Corrupt):
        StoredSession.decode(data)
    node = Node()
    engine = node.open()
    feed(engine, [(1, CREATE), (2, OPEN)])
    engine.flush()
    node.pages.write([], [], {b"session:" + (2).to_bytes(8, "big"): data})
    assert [finding.severity for finding in engine.check()] == ["error"]
    engine.close()
    with pytest.raises(Corrupt):
        node.open()


# ---------------------------------------------------------------------------- a database's sessions


@pytest.fixture
def machine() -> Iterator[Machine]:
    with small_limits():
        yield Machine()


def test_a_repeated_request_returns_the_first_seq(tmp_path: Path) -> None:
    """In this life of the program, and in the next one."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        session = db.session()
        seq = session.put("b", "k", b"1", request=1)
        db.put("b", "k", b"2")
        applied = db.marks().applied
        assert session.put("b", "k", b"1", request=1) == seq
        assert db.marks().applied == applied
        group = session.write([Put("b", "x", b""), Delete("b", "nothing")], request=2)
        assert session.write([Put("b", "x", b""), Delete("b", "nothing")], request=2) == group
        copied = session.copy("b", "k", "b", "copy", request=3)
        made = session.create_bucket("other", request=4)
    with lowwater.open(tmp_path / "data") as db:
        session = db.session(session.id)
        assert session.results() == {1: seq, 2: group, 3: copied, 4: made}
        assert session.put("b", "k", b"1", request=1) == seq
        assert session.create_bucket("other", request=4) == made
        assert session.delete("b", "copy", request=5) > made
        assert session.delete_bucket("other", request=6) > made
        assert db.get("b", "k").value == b"2"
        session.acknowledge(6)
        session.keep_alive()
        assert session.put("b", "k", b"3", request=7) == db.get("b", "k").seq
        with pytest.raises(InputError):
            session.put("b", "k", b"4", request=6)
        assert session.results() == {7: db.get("b", "k").seq}


def test_what_is_copied_in_a_session_may_be_large(tmp_path: Path) -> None:
    """Also while nobody has made it durable yet, and among others in a group."""
    large = bytes(range(256)) * 20
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        session = db.session()
        for flushed in (False, True):
            session.put("b", "k", large)
            if flushed:
                db.flush()
            session.copy("b", "k", "b", "copy")
            entries = [Put("b", "x", large), Copy("b", "k", "b", "y", if_absent=not flushed)]
            assert session.write(entries) == db.head("b", "y").seq
            for key in ("k", "copy", "x", "y"):
                assert db.get("b", key).value == large
        with pytest.raises(ConditionFailed):
            session.write([Put("b", "x", b""), Copy("b", "k", "b", "y", if_absent=True)])
        assert db.get("b", "x").value == large


def test_numbers_that_the_session_gives_are_acknowledged(tmp_path: Path) -> None:
    """So it can be used for ever, by many threads."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        with db.session(ttl=60) as session:

            def write() -> None:
                for number in range(300):
                    session.put("b", f"{number}", b"")

            threads = [threading.Thread(target=write) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert session.acknowledged == 1200
            session.put("b", "k", b"")
            assert len(session.results()) == 1
            with pytest.raises(ConditionFailed):
                session.put("b", "k", b"", if_absent=True)
            assert session.acknowledged == 1202
        with pytest.raises(NotFound):
            session.put("b", "k", b"")
        with pytest.raises(NotFound):
            db.session(session.id)


def test_a_refusal_leaves_nothing_behind(tmp_path: Path) -> None:
    """The same number may be used again, and for something else."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        session = db.session()
        db.put("b", "k", b"")
        applied = db.marks().applied
        for error, call in (
            (ConditionFailed, lambda: session.put("b", "k", b"", if_absent=True, request=1)),
            (NotFound, lambda: session.put("nothing", "k", b"", request=1)),
            (NotFound, lambda: session.delete("b", "nothing", request=1)),
            (AlreadyExists, lambda: session.create_bucket("b", request=1)),
            (InvalidEntry, lambda: session.put("b", "", b"", request=1)),
            (InvalidEntry, lambda: session.put("b", "k", 5, request=1)),  # type: ignore[arg-type]
            (InvalidEntry, lambda: session.write([], request=1)),
            (InputError, lambda: session.put("b", "k", b"", request=0)),
            (InputError, lambda: session.put("b", "k", b"", request="1")),  # type: ignore[arg-type]
            (LimitExceeded, lambda: session.put("b", "k", b"", request=1001)),
            (InputError, lambda: session.acknowledge(-1)),
            (InputError, lambda: session.acknowledge(5000)),
            (InputError, lambda: db.session(ttl=0)),
        ):
            with pytest.raises(error):
                call()
        assert db.marks().applied == applied
        assert session.put("b", "k", b"1", request=1) == applied + 1
    with pytest.raises(Closed):
        session.put("b", "k", b"1", request=1)


def test_an_idle_session_ends_by_itself(machine: Machine) -> None:
    db = machine.open()
    db.create_bucket("b")
    idle, used = db.session(ttl=100), db.session(ttl=timedelta(seconds=100))
    for _ in range(5):
        machine.idle(50)
        used.put("b", "k", b"")
    with pytest.raises(NotFound):
        idle.put("b", "k", b"")
    machine.idle(50)
    used.keep_alive()
    machine.idle(60)
    used.put("b", "k", b"")
    machine.idle(101)
    assert db._state.sessions.sessions == {}
    applied = db.marks().applied
    machine.idle(10_000)
    assert db.marks().applied == applied
    db.close()


@pytest.mark.parametrize("mode", SURVIVALS)
def test_a_client_that_repeats_after_a_crash_has_each_effect_once(mode: Any) -> None:
    """It cannot know what had happened, and need not."""
    with small_limits():
        for seed in range(12):
            machine = Machine(seed=seed, log_options=LogOptions(segment_bytes=8192, block_bytes=1024))
            db = machine.open()
            db.create_bucket("b")
            session_id = db.session().id
            rng = random.Random(seed)
            number = 1
            while number <= 40:
                machine.files.crash_at(
                    machine.files.operations + rng.randrange(1, 40), after=rng.random() < 0.5
                )
                try:
                    session = db.session(session_id)
                    while number <= 40:
                        if number % 4:
                            session.put("b", f"{number}", b"%d" % number, request=number)
                        else:
                            entries = [Put("b", f"{number}", bytes(300)), Put("b", "counter", b"%d" % number)]
                            session.write(entries, request=number)
                        machine.step(rng.choice((0, 2)))
                        number += 1
                except SimulatedCrash:
                    number = max(1, number - rng.randrange(4))  # it had not noted how far it was
                    machine.crash(mode, rng)
                    machine.files._crash_number = None
                    db = machine.open()
            machine.files._crash_number = None
            effects = Counter(
                entry.extras.request & 0xFFFF_FFFF_FFFF
                for entry in db.log()
                if entry.extras is not None and entry.extras.session == session_id
            )
            assert effects == Counter(range(1, 41))
            assert sorted(db.session(session_id).results()) == list(range(1, 41))
            assert list(db.check()) == []
            db.close()
