"""Which versions are kept: by age, by number, of each key so many, and for snapshots, some of which end."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engine_model import Machine, small_limits
from tests.engine.test_engine import CREATE, Node

import lowwater
from lowwater import CreateBucket, Delete, Engine, Put, Refusal
from lowwater.chaos.survival import SURVIVALS
from lowwater.engine.database.upkeep import VersionPolicy
from lowwater.engine.format.entries import Control, decode_body
from lowwater.engine.format.format import Kind
from lowwater.engine.state.requests import Request
from lowwater.engine.testing.engine import feed
from lowwater.errors import Closed, InputError, InvalidConfig, InvalidEntry, NotFound, VersionGone


@pytest.fixture
def machine() -> Iterator[Machine]:
    with small_limits():
        yield Machine()


def opened(machine: Machine, **policy: Any) -> Any:
    machine.versions = VersionPolicy(**policy)
    return machine.open()


def controls(db: Any) -> list[tuple[str, dict[str, Any]]]:
    return [
        (entry.kind, decode_body(entry)) for entry in db.log() if entry.kind in ("horizon", "pin", "unpin")
    ]


# ---------------------------------------------------------------------------- snapshots that end


def test_a_snapshot_ends_after_its_time_to_live(machine: Machine) -> None:
    """By an entry of the log, so that every replica drops the same at the same place."""
    db = opened(machine)
    db.create_bucket("b")
    db.put("b", "k", b"1")
    seq = db.snapshot("short", ttl=10)
    db.snapshot("long", ttl=timedelta(minutes=1))
    db.snapshot("for ever")
    assert db.snapshots()["short"] == (seq, db._log.chain.time_us + 10_000_000)
    assert db.snapshots()["for ever"].expires_us is None
    db.put("b", "k", b"2")
    machine.idle(9.9)
    assert list(db.snapshots()) == ["short", "long", "for ever"]
    machine.idle(0.2)
    assert list(db.snapshots()) == ["long", "for ever"]
    assert controls(db)[-1][0] == "unpin"
    machine.idle(60)
    assert list(db.snapshots()) == ["for ever"]
    applied = db.marks().applied
    machine.idle(1000)
    assert db.marks().applied == applied
    db.close()


@pytest.mark.parametrize("crash", [False, True])
def test_what_ended_while_nobody_looked_ends_at_the_next_opening(machine: Machine, crash: bool) -> None:
    db = opened(machine)
    db.snapshot("s", ttl=10)
    if crash:
        machine.crash("keep", machine.rng)
    else:
        db.close()
    machine.clock.advance(60)
    db = machine.open()
    assert list(db.snapshots()) == ["s"]
    machine.idle()
    assert db.snapshots() == {}
    db.close()


def test_an_end_does_not_drop_another_snapshot_of_that_name() -> None:
    """It comes late, or twice, and meanwhile the name was given again."""
    node = Node()
    engine = node.open()
    feed(engine, [(1, CREATE), (2, Control(Kind.PIN, {"name": "s", "seq": 1, "expires_us": 50}))])
    end = Control(Kind.UNPIN, {"name": "s", "expires_us": 50})
    assert engine.snapshots() == {"s": (1, 50)}
    assert engine.apply_log_entry(3, end).refused is None
    assert engine.apply_log_entry(4, end).refused == Refusal.NO_SNAPSHOT
    feed(engine, [(5, Control(Kind.PIN, {"name": "s", "seq": 4}))])
    assert engine.apply_log_entry(6, end).refused == Refusal.OUT_OF_DATE
    assert engine.apply_log_entry(7, Control(Kind.UNPIN, {"name": "s"})).refused is None
    engine.close()


class Proposals:
    """An orchestrator that only notes what it is asked for."""

    def __init__(self) -> None:
        self.entries: list[Request] = []

    def get_low_water_mark(self) -> int:
        return 0

    def fetch_log_entries(self, seq_first: int, seq_last: int) -> list[tuple[int, Request]]:
        return []

    def propose(self, entry: Request) -> None:
        self.entries.append(entry)


def test_a_fed_engine_proposes_ends_by_the_clock_of_the_log() -> None:
    """Its own clock says nothing, and it asks again until it sees the end."""
    node, proposals = Node(), Proposals()
    engine = node.open(orchestrator=proposals)
    pin = Control(Kind.PIN, {"name": "s", "seq": 2, "expires_us": 1000}, time_us=500)
    feed(engine, [(1, CREATE), (2, CreateBucket("b", time_us=100)), (3, pin)])
    node.clock.advance(1000)
    node.runner.run_until_idle(node.rng)
    assert proposals.entries == []
    feed(engine, [(4, Put("b", "k", b"", time_us=1000))])
    end = Control(Kind.UNPIN, {"name": "s", "expires_us": 1000})
    for count in (1, 2):
        node.clock.advance(1.1)
        node.runner.run_until_idle(node.rng)
        assert proposals.entries == [end] * count
    feed(engine, [(5, end)])
    node.clock.advance(10)
    node.runner.run_until_idle(node.rng)
    assert proposals.entries == [end] * 2
    engine.close()


# ---------------------------------------------------------------------------- the horizon


def test_versions_are_kept_by_age(machine: Machine) -> None:
    db = opened(machine, age_max_s=100)
    db.create_bucket("b")
    seqs = []
    for number in range(30):
        seqs.append(db.put("b", "k", b"%d" % number))
        machine.idle(10)
        # What was the newest within the last 100 seconds can be read.
        for age in range(min(len(seqs), 10)):
            assert db.get("b", "k", seqs[-1 - age]).seq == seqs[-1 - age]
    with pytest.raises(VersionGone):
        db.get("b", "k", seqs[10])
    machine.idle(1000)
    applied, horizon = db.marks().applied, db._state.horizon
    assert horizon == seqs[-1]
    for _ in range(5):
        machine.idle(1000)
    assert db.marks().applied == applied, "a log that rests grew by its horizon"
    db.close()
    db = machine.open()
    machine.idle(1000)
    assert db.marks().applied == applied
    db.close()


def test_versions_are_kept_by_number(machine: Machine) -> None:
    db = opened(machine, seqs_max=160)
    db.create_bucket("b")
    for number in range(1000):
        seq = db.put("b", "k", b"%d" % number)
        machine.idle(1)
        if number > 200:
            assert db.get("b", "k", seq - 150).seq <= seq - 150
            with pytest.raises(VersionGone):
                db.get("b", "k", seq - 200)
    assert len(controls(db)) < 1000 / (160 / 16) + 3, "the horizon moves by runs"
    db.close()


def test_the_first_of_two_limits_counts(machine: Machine) -> None:
    db = opened(machine, age_max_s=1000, seqs_max=16)
    db.create_bucket("b")
    for _ in range(50):
        seq = db.put("b", "k", b"")
    machine.idle(100)
    assert db._state.horizon == seq - 16
    machine.idle(2000)
    assert db._state.horizon == seq
    db.close()


def test_a_policy_holds_from_the_first_write_on(tmp_path: Path) -> None:
    """Not from whenever the background comes to it."""
    with lowwater.open(tmp_path / "data", config={"versions": {"age_max_s": "1h", "per_key_max": 3}}) as db:
        db.create_bucket("b")
        seqs = [db.put("b", "k", b"%d" % number) for number in range(5)]
        assert db.get("b", "k", seqs[2]).value == b"2"
        with pytest.raises(VersionGone):
            db.get("b", "k", seqs[1])
    with lowwater.open(tmp_path / "data") as db:
        assert db.get("b", "k", seqs[2]).value == b"2"
        assert len(controls(db)) == 1


def test_snapshots_hold_what_the_horizon_leaves_behind(machine: Machine) -> None:
    db = opened(machine, age_max_s=10)
    db.create_bucket("b")
    db.put("b", "k", b"1")
    seq = db.snapshot("s")
    for _ in range(5):
        db.put("b", "k", b"2")
        machine.idle(10)
        db.flush()
    assert db.get("b", "k", seq).value == b"1"
    db.close()


def test_a_fed_engine_proposes_its_horizon() -> None:
    """With the one that it expects before it, so that two proposals move it once."""
    node, proposals = Node(), Proposals()
    node.options = type(node.options)(versions=VersionPolicy(seqs_max=16, per_key_max=5))
    engine = node.open(orchestrator=proposals)
    feed(engine, [(1, CREATE), (2, CreateBucket("b"))])
    node.clock.advance(20)
    node.runner.run_until_idle(node.rng)
    assert proposals.entries[-1] == Control(Kind.HORIZON, {"seq": 2, "before": None, "per_key_max": 5})
    assert engine.apply_log_entry(3, proposals.entries[-1]).refused is None
    assert engine.apply_log_entry(4, proposals.entries[-1]).refused == Refusal.OUT_OF_DATE
    feed(engine, [(seq, Put("b", "k", b"")) for seq in range(5, 100)])
    node.clock.advance(20)
    node.runner.run_until_idle(node.rng)
    assert proposals.entries[-1] == Control(Kind.HORIZON, {"seq": 83, "before": 2})
    assert engine.apply_log_entry(100, proposals.entries[-1]).refused is None
    assert engine._state.horizon == 83
    engine.close()


@pytest.mark.parametrize("policy", [{"age_max_s": 0}, {"seqs_max": 0}, {"per_key_max": -1}])
def test_a_policy_that_makes_no_sense_is_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        VersionPolicy(**policy)


# ---------------------------------------------------------------------------- so many of each key

KEYS = [f"k{number}" for number in range(6)]


class Versions:
    """Every version there ever was, and the rule by which reads are answered or refused."""

    def __init__(self) -> None:
        self.applied = 0
        self.horizon: int | None = None
        self.limit: int | None = None
        self.exact_from = 0
        self.snapshots: dict[str, int] = {}
        self.versions: dict[str, list[tuple[int, bytes | None]]] = {key: [] for key in KEYS}

    def floor(self) -> int:
        return min([self.applied if self.horizon is None else self.horizon, *self.snapshots.values()])

    def is_exact(self, seq: int) -> bool:
        return seq >= self.applied or seq in self.snapshots.values()

    def read(self, key: str, seq: int) -> bytes | str | None:
        if not self.floor() <= seq <= self.applied or (seq < self.exact_from and not self.is_exact(seq)):
            return "gone"
        versions = self.versions[key]
        index = bisect_right(versions, seq, key=lambda each: each[0])
        if self.limit is not None and not self.is_exact(seq) and len(versions) - index >= self.limit:
            return "gone"
        return versions[index - 1][1] if index else None

    def apply(self, seq: int, entry: Any) -> Refusal | None:
        """What must become of it."""
        refused = None
        if isinstance(entry, Put):
            self.versions[entry.key].append((seq, entry.value))
        elif isinstance(entry, Delete):
            versions = self.versions[entry.key]
            if not versions or versions[-1][1] is None:
                refused = Refusal.NO_KEY
            else:
                versions.append((seq, None))
        elif isinstance(entry, Control):
            refused = self._apply_control(seq, entry.kind, dict(entry.body or {}))
        self.applied = seq
        return refused

    def _apply_control(self, seq: int, kind: Kind, body: dict[str, Any]) -> Refusal | None:
        if kind == Kind.UNPIN:
            return Refusal.NO_SNAPSHOT if self.snapshots.pop(body["name"], None) is None else None
        if kind == Kind.PIN:
            if body["name"] in self.snapshots:
                return Refusal.NAME_EXISTS
            wanted = body["seq"]
            kept = self.limit is None and wanted >= self.exact_from
            if not self.floor() <= wanted <= self.applied or not (kept or self.is_exact(wanted)):
                return Refusal.VERSION_GONE
            self.snapshots[body["name"]] = wanted
            return None
        if "seq" in body:
            wanted = body["seq"]
            if wanted is not None and not self.floor() <= wanted <= self.applied:
                return Refusal.VERSION_GONE
            self.horizon = None if wanted is None else max(wanted, self.horizon or 0)
        if "per_key_max" in body:
            limit = body["per_key_max"]
            if self.limit is not None and (limit is None or limit > self.limit):
                self.exact_from = seq
            self.limit = limit
        return None


def draw(rng: random.Random, versions: Versions, seq: int) -> Any:
    kind = rng.choices(("put", "delete", "limit", "horizon", "pin", "unpin"), (60, 10, 2, 2, 4, 4))[0]
    if kind == "put":
        return Put("b", rng.choice(KEYS), b"%d" % seq + b"x" * rng.choice((0, 300)))
    if kind == "delete":
        return Delete("b", rng.choice(KEYS))
    if kind == "limit":
        return Control(Kind.HORIZON, {"per_key_max": rng.choice((None, 1, 2, 3, 5, 10))})
    back = rng.choice((0, 0, 3, 20))
    if kind == "horizon":
        return Control(Kind.HORIZON, {"seq": rng.choice((None, seq - 1, seq - 1 - back, seq - 1 - back))})
    if kind == "pin":
        return Control(Kind.PIN, {"name": rng.choice("xyz"), "seq": rng.choice((seq - 1, seq - 1 - back))})
    return Control(Kind.UNPIN, {"name": rng.choice("xyz")})


def answer(engine: Engine, key: str, seq: int) -> bytes | str | None:
    try:
        return engine.read("b", key, seq).value
    except NotFound:
        return None
    except VersionGone:
        return "gone"


def live_on(node: Node, rng: random.Random) -> None:
    roll = rng.random()
    if roll < 0.2:
        node.engine.flush()
    elif roll < 0.3:
        node.step(rng.choice((1, 5, 30)))
    elif roll < 0.33:
        node.restart()
    elif roll < 0.36:
        node.engine.sync()
        node.crash(rng.choice(SURVIVALS), rng.randrange(100))


@pytest.mark.parametrize("seed", range(12))
def test_every_read_is_answered_or_refused_by_the_rule_on_every_replica(seed: int) -> None:
    """Whatever was flushed and dropped where: the same answer, the right one, or VersionGone."""
    rng = random.Random(seed)
    with small_limits():
        nodes = [Node(pool_bytes_max=20_000), Node()]
        for node in nodes:
            node.open()
            feed(node.engine, [(1, CREATE), (2, CreateBucket("b"))])
        versions = Versions()
        versions.applied = 2
        answers: set[str] = set()
        for seq in range(3, 240):
            entry = draw(rng, versions, seq)
            refused = versions.apply(seq, entry)
            for number, node in enumerate(nodes):
                assert node.engine.apply_log_entry(seq, entry).refused == refused, (seq, entry)
                live_on(node, random.Random(f"{seed} {seq} {number}"))
            if seq % 8:
                continue
            for key in KEYS:
                for at in {*range(seq - 40, seq + 1), *versions.snapshots.values()}:
                    if at < 1:
                        continue
                    expected = versions.read(key, at)
                    answers.add("gone" if expected == "gone" else type(expected).__name__)
                    for node in nodes:
                        assert answer(node.engine, key, at) == expected, (seed, key, at, seq)
        assert answers == {"gone", "bytes", "NoneType"}
        assert nodes[0].engine.root() == nodes[1].engine.root()
        for node in nodes:
            assert list(node.engine.check()) == []
            node.engine.close()


def test_a_limit_drops_versions_from_pages(machine: Machine) -> None:
    """Or it would limit nothing."""
    db = opened(machine, per_key_max=3)
    db.create_bucket("b")
    for number in range(50):
        db.put("b", "k", b"%d" % number)
        db.flush()
    _, page, row, _ = db._state._versions(b"\1bk")
    assert page.versions(row) == 3
    snapshot = db.snapshot("s")
    for number in range(50):
        db.put("b", "k", b"%d" % number)
        db.flush()
    _, page, row, _ = db._state._versions(b"\1bk")
    assert page.versions(row) == 4
    assert db.get("b", "k", snapshot).value == b"49"
    db.close()


def test_a_scan_that_runs_keeps_what_it_shows(machine: Machine) -> None:
    """Also of keys that get many versions meanwhile."""
    db = opened(machine, per_key_max=2)
    db.create_bucket("b")
    db.put_many("b", [(f"{number:02}", b"old") for number in range(60)])
    scan = db.scan("b")
    assert next(scan).value == b"old"
    for _ in range(5):
        db.put_many("b", [(f"{number:02}", b"new") for number in range(60)])
        db.flush()
    assert [found.value for found in scan] == [b"old"] * 59
    db.close()


def test_a_scan_of_what_the_limit_took_is_refused(machine: Machine) -> None:
    """A listing or a root that leaves out keys would be a wrong one."""
    db = opened(machine, per_key_max=2)
    db.create_bucket("b")
    seq = db.put_many("b", [(f"{number:02}", b"old") for number in range(60)])
    root = db.root()
    db.put("b", "30", b"1")
    assert db.root(seq) == root
    db.put("b", "30", b"2")
    for flushed in (False, True):
        if flushed:
            db.flush()
        with pytest.raises(VersionGone):
            db.root(seq)
        with pytest.raises(VersionGone):
            list(db.scan("b", at=seq))
        with pytest.raises(VersionGone):
            db.list("b", at=seq)
        assert len(list(db.scan("b", "0", at=seq))) == 10
    db.close()


@pytest.mark.parametrize("wrong", [0, -1, True, "3", 2**33, 1.5])
def test_a_limit_that_is_none_is_refused(machine: Machine, wrong: Any) -> None:
    db = machine.open()
    with pytest.raises(InputError):
        db.limit_versions(wrong)
    with pytest.raises(InputError):
        db.snapshot("s", ttl="soon")
    db.close()
    with pytest.raises(Closed):
        db.limit_versions(3)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.HORIZON, {}),
        (Kind.HORIZON, {"before": 3}),
        (Kind.HORIZON, {"per_key_max": 0}),
        (Kind.HORIZON, {"per_key_max": "3"}),
        (Kind.HORIZON, {"seq": 1, "before": -1}),
        (Kind.PIN, {"name": "s", "seq": 1, "expires_us": None}),
        (Kind.PIN, {"name": "s", "seq": 1, "expires_us": 2**63}),
        (Kind.UNPIN, {"name": "s", "expires_us": "soon"}),
    ],
)
def test_a_body_that_makes_no_sense_is_refused(kind: Kind, body: dict[str, Any]) -> None:
    node = Node()
    engine = node.open()
    feed(engine, [(1, CREATE)])
    with pytest.raises(InvalidEntry):
        engine.apply_log_entry(2, Control(kind, body))
    assert engine.marks().applied == 1
    engine.close()
