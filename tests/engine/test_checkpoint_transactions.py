"""Checkpoints, transactions, sessions and limits of versions at once: what is in them is what the log says,
and replicas write the same bytes and give the same answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
from blake3 import blake3
from tests.engine.engine_model import check_structure, small_limits
from tests.engine.test_checkpoint import scanned
from tests.engine.test_engine import CREATE, Node, Pair
from tests.engine.test_sessions import OPEN, tables

from lowwater import (
    Abort,
    Begin,
    Commit,
    Copy,
    CreateBucket,
    Delete,
    DeleteBucket,
    Engine,
    Outcome,
    Put,
    Write,
)
from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.survival import SURVIVALS
from lowwater.engine.checkpoint.checkpointer import Checkpointer
from lowwater.engine.checkpoint.checkpoints import StoredCheckpoint
from lowwater.engine.format.entries import Control, Entry, decode_body
from lowwater.engine.format.format import Kind
from lowwater.engine.format.records import VALUE_PLACE
from lowwater.engine.log.chain import checkpoint_entry, seal_entry
from lowwater.engine.state.decide import Refusal
from lowwater.engine.testing.engine import feed
from lowwater.errors import NotFound, VersionGone

COUNT = 250
SEEDS = 40
INLINE_BYTES_MAX = 256
Name = tuple[str, str]


@pytest.fixture(autouse=True)
def _small_limits() -> Iterator[None]:
    with small_limits(range_pages=3, group_bytes=4000, read_bytes=600):
        yield


# ---------------------------------------------------------------------------- what the log says


class Version(NamedTuple):
    seq: int
    time_us: int
    value: bytes | None


class Written:
    """All versions of all keys, oldest first, as the frames of a log have them."""

    def __init__(self, entries: list[Entry]) -> None:
        self.versions: dict[Name, list[Version]] = {}
        self.ends: dict[int, int | None] = {}
        self._values: dict[int, bytes] = {}
        open_writes: dict[int, list[tuple[int, Name, bytes | None]]] = {}
        for entry in entries:
            if entry.refused is not None:
                if entry.kind == "commit" and entry.txn in open_writes:
                    del open_writes[entry.txn]
                    self.ends[entry.txn] = entry.seq
            elif entry.kind == "begin":
                open_writes[entry.seq] = []
                self.ends[entry.seq] = None
            elif entry.kind == "commit":
                assert entry.txn is not None
                self.ends[entry.txn] = entry.seq
                last = {name: value for _, name, value in open_writes.pop(entry.txn)}
                for name, value in last.items():
                    self._add(name, Version(entry.seq, entry.time_us, value))
            elif entry.kind == "abort":
                assert entry.txn is not None
                savepoint_seq = decode_body(entry).get("savepoint")
                writes = open_writes.pop(entry.txn)
                if savepoint_seq is None:
                    self.ends[entry.txn] = entry.seq
                else:
                    open_writes[entry.txn] = [each for each in writes if each[0] <= savepoint_seq]
            elif entry.kind in ("put", "delete", "copy", "create_bucket", "delete_bucket"):
                value = self._value_of(entry)
                name = ("", entry.bucket) if entry.kind.endswith("_bucket") else (entry.bucket, entry.key)
                if entry.txn is not None:
                    open_writes[entry.txn].append((entry.seq, name, value))
                    continue
                seq = (entry.extras and entry.extras.group_seq_last) or entry.seq
                self._add(name, Version(seq, entry.time_us, value))

    def _value_of(self, entry: Entry) -> bytes | None:
        if entry.kind.startswith("delete"):
            return None
        value = entry.value
        if entry.extras is not None and entry.extras.value_ref is not None:
            value = self._values[entry.extras.value_ref.seq]
        self._values[entry.seq] = value
        return value

    def _add(self, name: Name, version: Version) -> None:
        versions = self.versions.setdefault(name, [])
        if versions and versions[-1].seq == version.seq:
            versions.pop()  # of several writes in a group the last survives
        versions.append(version)

    def at(self, name: Name, seq: int) -> Version | None:
        found = [each for each in self.versions.get(name, ()) if each.seq <= seq]
        return found[-1] if found and found[-1].value is not None else None

    def open_at(self, seq: int) -> list[int]:
        """The transactions that had begun and not ended."""
        return [txn for txn, end in self.ends.items() if txn <= seq and (end is None or end > seq)]

    def rows(self, seq: int) -> dict[Name, Version]:
        return {name: found for name in self.versions if (found := self.at(name, seq)) is not None}


def require_as_written(engine: Any, stored: StoredCheckpoint, written: Written) -> None:
    """The rows of a checkpoint, and where it says that large values lie."""
    rows = {}
    for row in stored.rows():
        value = row.value
        if value is None:
            assert row.place is not None
            assert row.value_bytes > INLINE_BYTES_MAX
            place = (*row.place, row.value_bytes, row.value_hash)
            value = engine._values.read(VALUE_PLACE.pack(*place))
            assert blake3(value).digest() == row.value_hash
        rows[row.bucket, row.key] = Version(row.seq, row.time_us, value)
    assert rows == written.rows(stored.seq)
    opened = stored.index.control_body.get("transactions", [])
    assert [each[0] for each in opened] == written.open_at(stored.seq)


def written_of(engine: Engine) -> Written:
    engine.sync()
    return Written(list(engine.log()))


# ---------------------------------------------------------------------------- entries of all kinds


class Straight(NamedTuple):
    """What an engine makes of entries that nothing comes between."""

    pairs: list[Pair]
    outcomes: list[Outcome]
    root: str
    checkpoints: dict[int, str]
    sessions: Any
    answers: list[Any]
    segments: dict[str, bytes]


def questions(engine: Engine, seed: int) -> list[tuple[str, str, int]]:
    """Keys, at any seq and at those of snapshots."""
    rng = random.Random(f"questions {seed}")
    last, snapshots = engine.marks().applied, sorted(engine._state.snapshots.values())
    return [
        (
            rng.choice("bbbc"),
            f"k{rng.randrange(60):02}",
            rng.choice([rng.randrange(last // 2, last + 1), *snapshots]),
        )
        for _ in range(300)
    ]


def answers_of(engine: Engine, seed: int) -> list[Any]:
    """Values, absences and refusals at seqs that may be gone."""
    found: list[Any] = []
    for bucket, key, seq in questions(engine, seed):
        try:
            found.append(engine.get(bucket, key, seq))
        except NotFound:
            found.append((bucket, key, seq))
        except VersionGone:
            found.append("gone")
    return found


def require_answers(engine: Engine, answers: list[Any], seed: int) -> None:
    """What was answered is what the log says."""
    written = written_of(engine)
    for (bucket, key, seq), answer in zip(questions(engine, seed), answers, strict=True):
        if answer == "gone":
            continue
        expected = written.at((bucket, key), seq)
        if expected is None:
            assert answer == (bucket, key, seq)
        else:
            assert (answer.seq, answer.time_us, answer.value) == expected


class Orderer:
    """Makes entries that mostly make sense, by what the engine has become."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine = engine
        self.rng = rng
        self.keys = rng.choice((8, 60))
        self.seq = 2
        self.time_us = 1_000_000
        self.requests: list[Any] = []

    def key(self) -> str:
        return f"k{self.rng.randrange(self.keys):02}"

    def txn(self) -> int:
        opened = list(self.engine._state.transactions.open)
        if opened and self.rng.random() < 0.95:
            return self.rng.choice(opened)
        return self.rng.randrange(1, self.seq + 2)

    def session(self) -> Any:
        known = self.engine._state.sessions.sessions
        if not known or self.rng.random() < 0.7:
            return None
        session = self.rng.choice(list(known))
        acknowledged = known[session].acknowledged + self.rng.choice((0, 0, 2))
        return (session, acknowledged + self.rng.randrange(1, 12), acknowledged)

    def data(self, txn: int, session: Any = None) -> Any:
        rng = self.rng
        bucket = rng.choice("bbbbc")
        condition = rng.choice((None,) * 8 + (0, rng.randrange(self.seq + 1)))
        more: Any = {"if_seq": condition, "txn": txn, "session": session, "time_us": self.time_us}
        roll = rng.random()
        if roll < 0.6:
            metadata = rng.choice((None, None, None, {"m": "n"}))
            return Put(bucket, self.key(), rng.randbytes(rng.choice((0, 5, 60, 300, 1500))), metadata, **more)
        if roll < 0.85:
            return Delete(bucket, self.key(), **more)
        return Copy("b", self.key(), bucket, self.key(), **more)

    def next(self) -> Pair:
        rng, state = self.rng, self.engine._state
        self.time_us += rng.randrange(10)
        self.seq += rng.choice((1, 1, 1, 2, 30))
        roll = rng.random()
        entry: Any
        if roll < 0.06:
            entry = Begin(
                rng.choice((None, None, self.seq - 1, state.applied, state.floor_kept(state.applied)))
            )
        elif roll < 0.4:
            entry = self.data(self.txn(), self.session())
        elif roll < 0.45:
            txn = self.txn()
            row = state.transactions.open.get(txn)
            entry = Abort(txn, rng.randrange(txn, row.seq_last + 1) if row is not None else txn)
        elif roll < 0.48:
            entry = Abort(self.txn())
        elif roll < 0.54:
            entry = Commit(
                self.txn(), *rng.choice((((), ()), ([("b", self.key())], ()), ((), [("b", "k1", "k2")])))
            )
        elif roll < 0.56:
            entry = (DeleteBucket if "c" in state.buckets else CreateBucket)("c", time_us=self.time_us)
        elif roll < 0.64:
            entry = Write([self.data(0) for _ in range(rng.randrange(1, 5))], session=self.session())
            self.seq += len(entry.entries)
        elif roll < 0.7:
            entry = checkpoint_entry(state.checkpoint_seq, full=rng.random() < 0.2)
        elif roll < 0.8:
            entry = self.control()
        elif roll < 0.83 and self.requests:
            entry = rng.choice(self.requests)  # of a client that has heard nothing
        else:
            entry = self.data(0, self.session())
        if getattr(entry, "session", None) is not None:
            self.requests.append(entry)
            self.seq += len(entry.entries) if isinstance(entry, Write) else 0
        return self.seq, entry

    def control(self) -> Any:
        rng, state = self.rng, self.engine._state
        applied, floor = state.applied, state.floor_kept(state.applied)
        sessions = [*state.sessions.sessions, 7]
        seq = rng.choice((applied, applied, rng.randrange(floor, applied + 1)))
        return rng.choice((
            lambda: OPEN,
            lambda: Control(Kind.SESSION_KEEP, {"session": rng.choice(sessions)}),
            lambda: Control(Kind.SESSION_CLOSE, {"session": rng.choice(sessions)}),
            lambda: Control(Kind.PIN, {"name": rng.choice("xyz"), "seq": seq}),
            lambda: Control(Kind.PIN, {"name": rng.choice("xyz"), "seq": seq}),
            lambda: Control(Kind.UNPIN, {"name": rng.choice("xyz")}),
            lambda: Control(Kind.HORIZON, {"seq": rng.choice((seq, seq, None))}),
            lambda: Control(Kind.HORIZON, {"per_key_max": rng.choice((1, 2, 3, None))}),
            lambda: seal_entry(self.engine._wal.chain.seq_first),
            lambda: Control(Kind.NOOP),
        ))()  # fmt: skip


@cache
def straight(seed: int) -> Straight:
    node = Node(sync_interval_ms=0)
    engine = node.open()
    pairs: list[Pair] = [(1, CREATE), (2, CreateBucket("b"))]
    outcomes = feed(engine, pairs)
    orderer = Orderer(engine, random.Random(f"all kinds {seed}"))
    checkpoints: dict[int, str] = {}
    while len(pairs) < COUNT:
        pairs.append(orderer.next())
        seq, entry = pairs[-1]
        outcomes.append(engine.apply_log_entry(seq, entry))
        if isinstance(entry, Control) and entry.kind == Kind.CHECKPOINT and not outcomes[-1].refused:
            checkpoints[seq] = engine.wait_for_checkpoint(seq)
            require_as_written(engine, engine.checkpoints()[0], written_of(engine))
            assert engine.checkpoints()[0].root == scanned(engine)
    while engine._make_checkpoints():
        pass  # what it needs it keeps, and could answer
    answers = answers_of(engine, seed)
    require_answers(engine, answers, seed)
    return Straight(pairs, outcomes, engine.root(), checkpoints, tables(engine), answers, node.segments())


@pytest.mark.parametrize("seed", range(SEEDS))
def test_checkpoints_and_answers_are_what_the_log_says(seed: int) -> None:
    """Read from its frames by other means: whatever was open, rolled back, repeated or limited."""
    assert straight(seed).checkpoints


def test_the_entries_come_to_all_ends() -> None:
    """Otherwise nothing was compared."""
    seen: Counter[Any] = Counter()
    for seed in range(SEEDS):
        found = straight(seed)
        for (_, entry), outcome in zip(found.pairs, found.outcomes, strict=True):
            seen[type(entry).__name__, outcome.refused] += 1
        seen["gone"] += found.answers.count("gone")
    assert seen["Commit", None] > 2 * SEEDS
    assert seen["gone"] > 10 * SEEDS
    assert {each[1] for each in seen if each != "gone"} >= {
        None, Refusal.CONFLICT, Refusal.DOOMED, Refusal.NO_SAVEPOINT, Refusal.VERSION_GONE,
        Refusal.NO_SESSION, Refusal.BUCKET_NOT_EMPTY, Refusal.CONDITION_FAILED, Refusal.REQUEST_FORGOTTEN,
    }  # fmt: skip


# ---------------------------------------------------------------------------- another life of the same


class Life:
    """A replica that is flushed, restarted and crashed as chance has it."""

    def __init__(self, seed: int, number: int) -> None:
        self.rng = random.Random(f"life {seed} {number}")
        self.expected = straight(seed)
        self.node = Node(pool_bytes_max=self.rng.choice((8192, 20_000, 2**20)))
        self.seen: set[str] = set()
        self.crashing = self.rng.choice((0.0, 0.02, 0.06))

    def look_around(self) -> None:
        rng, node = self.rng, self.node
        roll = rng.random()
        if roll < 0.03:
            node.engine.flush()
        elif roll < 0.3:
            node.step(rng.choice((1, 2, 5, 30, 200)))
        elif roll < 0.33:
            node.restart()
        elif roll < 0.36:
            node.engine.root()
        elif roll < 0.4:
            node.crash(rng.choice(SURVIVALS), rng.randrange(1000))
        if rng.random() < self.crashing:
            node.files.crash_at(node.files.operations + rng.randint(1, 60), after=rng.random() < 0.5)
        if node.engine._state.applied:
            check_structure(node.engine, node.pages)
        for stored in node.engine.checkpoints():
            if stored.id not in self.seen:
                self.seen.add(stored.id)
                require_as_written(node.engine, stored, written_of(node.engine))
                assert stored.id == self.expected.checkpoints[stored.seq]

    def feed(self) -> None:
        pairs, outcomes = self.expected.pairs, self.expected.outcomes
        applied = self.node.engine.marks().applied
        place = sum(seq <= applied for seq, _ in pairs)
        start = max(0, place - self.rng.choice((0, 0, 5, 40)))
        for (seq, entry), outcome in list(zip(pairs, outcomes, strict=True))[start:]:
            found = self.node.engine.apply_log_entry(seq, entry)
            assert found == outcome or (seq <= applied and found == (seq, Refusal.REPEATED)), (seq, entry)
            self.look_around()
            if self.node.engine.marks().applied < seq:
                return  # what was not durable is gone

    def live(self) -> None:
        while True:
            try:
                if not hasattr(self.node, "engine"):
                    self.node.open()
                self.feed()
                if self.node.engine.marks().applied == self.expected.pairs[-1][0]:
                    self.node.engine.sync()
                    break
            except SimulatedCrash:
                self.crash()
        self.node.files._crash_number = None

    def crash(self) -> None:
        while True:
            try:
                self.node.crash(self.rng.choice(SURVIVALS), self.rng.randrange(1000))
                return
            except SimulatedCrash:
                continue


def live_through(seed: int, number: int) -> None:
    life = Life(seed, number)
    expected, node = life.expected, life.node
    life.live()
    engine = node.engine
    assert engine.root() == scanned(engine) == expected.root
    node.step(5000)
    engine.flush()
    node.step(5000)
    life.look_around()
    node.files._crash_number = None
    engine = node.engine
    node.step(5000)
    assert not engine._state.checkpoints_due
    assert engine.checkpoints()[0].seq == max(expected.checkpoints)
    assert not engine._checkpointer.failures
    assert engine.root() == scanned(engine) == expected.root
    assert tables(engine) == expected.sessions
    assert answers_of(engine, seed) == expected.answers
    assert set(engine._state.transactions.rows) >= set(engine._state.transactions.open)
    assert node.segments() == expected.segments


@pytest.mark.parametrize("seed", range(12))
def test_replicas_write_the_same_and_answer_alike(seed: int) -> None:
    """Whatever was stolen, stamped, flushed and redone in between, and wherever it crashed."""
    live_through(seed, 0)


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(4))
def test_200_lives_write_the_same_and_answer_alike(chunk: int) -> None:
    """The same, more often."""
    for number in range(chunk, 200, 4):
        try:
            live_through(number % SEEDS, 1 + number)
        except Exception as error:
            error.add_note(f"in life {number}")
            raise


def test_a_checkpoint_that_was_found_after_a_kill_survives_a_power_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed between the rename and its sync, it was seen and counted, and gone when the next needed its
    blocks."""
    given_up: list[Any] = []
    monkeypatch.setattr(Checkpointer, "_give_up", lambda _, due, error: given_up.append((due.seq, error)))
    live_through(196, 1396)
    assert not given_up
