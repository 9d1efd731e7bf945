"""Transactions of the fed engine: what becomes of each entry, and that entries alone decide the bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.engine_model import check_structure, small_limits
from tests.engine.images import check_images
from tests.engine.test_engine import CREATE, EVENTS, WITH_IMAGES, Node, Pair

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
    Refusal,
    Write,
)
from lowwater.engine.state import decide
from lowwater.engine.state.requests import Request, members_of
from lowwater.engine.testing.engine import feed
from lowwater.errors import InvalidEntry, LogDivergence, NotFound


@pytest.fixture(autouse=True)
def _small_limits() -> Iterator[None]:
    with small_limits():
        yield


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    made.open()
    feed(made.engine, [(1, CREATE), (2, CreateBucket("b"))])
    yield made
    made.engine.close()


@pytest.fixture
def engine(node: Node) -> Engine:
    return node.engine


def value(engine: Engine, key: str, at: int | None = None) -> bytes | None:
    try:
        return engine.get("b", key, at).value
    except NotFound:
        return None


# ---------------------------------------------------------------------------- one by one


def test_nobody_sees_a_transaction_before_its_commit(engine: Engine) -> None:
    """Then all of it has one seq and one time."""
    feed(engine, [(3, Put("b", "x", b"0", time_us=5)), (10, Begin()), (11, Put("b", "x", b"1", txn=10))])
    feed(engine, [(12, Put("b", "y", b"2", txn=10)), (13, Put("b", "x", b"3", txn=10))])
    assert (value(engine, "x"), value(engine, "y")) == (b"0", None)
    assert [found.key for found in engine.scan("b")] == ["x"]
    assert engine.apply_log_entry(14, Commit(10, time_us=9)) == (14, None)
    assert [found[2:] for found in engine.scan("b")] == [(b"3", None, 14, 9), (b"2", None, 14, 9)]
    assert value(engine, "x", 14) == b"3"


def test_frames_name_their_transaction_and_its_frame_before(engine: Engine) -> None:
    """By that an archive can be walked back."""
    feed(engine, [(5, Begin()), (7, Put("b", "x", b"1", txn=5)), (8, Put("b", "other", b""))])
    feed(engine, [(9, Delete("b", "nothing", txn=5)), (10, Put("b", "y", b"", txn=5)), (11, Commit(5))])
    engine.sync()
    frames = [
        (entry.seq, entry.kind, entry.txn, entry.extras and entry.extras.txn_seq_before, entry.refused)
        for entry in engine.log(5)
    ]
    assert frames == [
        (5, "begin", None, None, None),
        (7, "put", 5, 5, None),
        (8, "put", None, None, None),
        (9, "delete", 5, 7, Refusal.NO_KEY),
        (10, "put", 5, 9, None),
        (11, "commit", 5, 10, None),
    ]


def test_the_first_to_commit_wins(engine: Engine) -> None:
    """Against a version above the snapshot, and against one that may still be committed."""
    feed(engine, [(3, Begin()), (4, Begin()), (5, Put("b", "x", b"", txn=3))])
    assert engine.apply_log_entry(6, Put("b", "x", b"", txn=4)).refused == Refusal.CONFLICT
    assert engine.apply_log_entry(7, Put("b", "y", b"", txn=4)).refused == Refusal.DOOMED
    assert engine.apply_log_entry(8, Commit(3)).refused is None
    assert engine.apply_log_entry(9, Commit(4)).refused == Refusal.DOOMED
    assert engine.apply_log_entry(10, Commit(4)).refused == Refusal.NO_TRANSACTION
    feed(engine, [(11, Begin()), (12, Put("b", "x", b"plain"))])
    assert engine.apply_log_entry(13, Delete("b", "x", txn=11)).refused == Refusal.CONFLICT


def test_a_deletion_is_a_newer_version(node: Node, engine: Engine) -> None:
    """Also where nothing else would keep it: a replica that has flushed must decide as one that has not."""
    feed(engine, [(3, Put("b", "x", b"")), (4, Begin()), (5, Delete("b", "x"))])
    engine.flush()
    node.step(100)
    engine = node.restart()
    assert engine.apply_log_entry(6, Put("b", "x", b"", txn=4)).refused == Refusal.CONFLICT


def test_a_plain_write_dooms_the_transaction_that_wrote_before(engine: Engine) -> None:
    """It commits at once, so it is the first."""
    feed(engine, [(3, Begin()), (4, Put("b", "x", b"lost", txn=3)), (6, Write([Put("b", "x", b"won")]))])
    assert value(engine, "x") == b"won"
    feed(engine, [(7, Begin())])
    assert engine.apply_log_entry(8, Put("b", "x", b"next", txn=7)).refused is None
    assert engine.apply_log_entry(9, Commit(3)).refused == Refusal.DOOMED
    assert engine.apply_log_entry(10, Commit(7)).refused is None
    assert value(engine, "x") == b"next"


def test_a_roll_back_undoes_what_lies_between(node: Node, engine: Engine) -> None:
    """For good, and an earlier version of the same transaction counts again."""
    feed(engine, [(3, Begin()), (4, Put("b", "x", b"1", txn=3)), (5, Put("b", "x", b"2", txn=3))])
    feed(engine, [(6, Put("b", "y", b"2", txn=3)), (7, Abort(3, 4)), (8, Put("b", "z", b"3", txn=3))])
    for savepoint_seq in (2, 5, 6, 18):
        refused = engine.apply_log_entry(engine.marks().applied + 1, Abort(3, savepoint_seq)).refused
        assert refused == Refusal.NO_SAVEPOINT, savepoint_seq
    engine.flush()
    engine = node.restart()
    assert engine.apply_log_entry(20, Begin()).refused is None
    assert engine.apply_log_entry(21, Put("b", "y", b"free again", txn=20)).refused is None
    feed(engine, [(22, Commit(20)), (23, Commit(3))])
    assert [value(engine, key) for key in "xyz"] == [b"1", b"free again", b"3"]
    assert engine.apply_log_entry(24, Abort(3)).refused == Refusal.NO_TRANSACTION


def test_a_commit_that_tells_what_was_read_is_refused_where_it_has_changed(engine: Engine) -> None:
    """Its own writes are no change."""
    feed(engine, [(3, Put("b", "x", b"")), (4, Begin()), (5, Put("b", "x", b"", txn=4))])
    feed(engine, [(6, Begin()), (7, Begin()), (8, Begin()), (9, Put("b", "m", b""))])
    assert engine.apply_log_entry(10, Commit(6, keys=[("b", "m")])).refused == Refusal.CONFLICT
    assert engine.apply_log_entry(11, Commit(7, ranges=[("b", "l", "n")])).refused == Refusal.CONFLICT
    assert (
        engine.apply_log_entry(12, Commit(8, [("b", "l")], [("b", "n", None), ("b", "", "m")])).refused
        is None
    )
    assert engine.apply_log_entry(13, Commit(4, [("b", "x")], [("b", "x", None)])).refused is None


def test_a_transaction_reads_its_own_and_its_snapshot(engine: Engine) -> None:
    """What conditions, deletions and copies are about."""
    feed(engine, [(3, Put("b", "x", b"1")), (4, Begin()), (5, Put("b", "x", b"later"))])
    large = bytes(5000)
    feed(engine, [(6, Copy("b", "x", "b", "c", txn=4)), (7, Put("b", "large", large, txn=4))])
    assert engine.apply_log_entry(8, Copy("b", "large", "b", "c2", txn=4)).refused is None
    assert engine.apply_log_entry(9, Put("b", "c", b"", if_seq=6, txn=4)).refused is None
    assert engine.apply_log_entry(10, Put("b", "c", b"", if_seq=6, txn=4)).refused == Refusal.CONDITION_FAILED
    assert engine.apply_log_entry(11, Copy("b", "large", "b", "no")).refused == Refusal.NO_KEY
    assert engine.apply_log_entry(12, Delete("b", "large", txn=4)).refused is None
    assert engine.apply_log_entry(13, Delete("b", "large", txn=4)).refused == Refusal.NO_KEY
    assert engine.apply_log_entry(14, Commit(4)).refused is None
    assert [value(engine, key) for key in ("x", "c", "large", "c2")] == [b"later", b"", None, large]


def test_a_bucket_with_an_open_transaction_is_in_use(engine: Engine) -> None:
    """Otherwise its commit would bring keys without a bucket."""
    feed(engine, [(3, CreateBucket("c")), (4, Begin()), (5, Put("c", "x", b"", txn=4))])
    assert engine.apply_log_entry(6, DeleteBucket("c")).refused == Refusal.BUCKET_NOT_EMPTY
    feed(engine, [(7, Abort(4))])
    assert engine.apply_log_entry(8, DeleteBucket("c")).refused is None


def test_a_snapshot_has_to_be_kept(engine: Engine) -> None:
    """And is, as long as the transaction is open."""
    feed(engine, [(3, Put("b", "x", b"3")), (4, Put("b", "x", b"4"))])
    assert engine.apply_log_entry(5, Begin(3)).refused == Refusal.VERSION_GONE
    assert engine.apply_log_entry(6, Begin(9)).refused == Refusal.VERSION_GONE
    assert engine.apply_log_entry(7, Begin(6)).refused is None
    feed(engine, [(8, Put("b", "x", b"8"))])
    assert engine.apply_log_entry(9, Begin(7)).refused is None
    assert value(engine, "x", 7) == b"4"


def test_limits_are_refusals(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all replicas come to the same end."""
    monkeypatch.setattr(decide, "OPEN_MAX", 2)
    monkeypatch.setattr(decide, "TXN_ENTRIES_MAX", 2)
    monkeypatch.setattr(decide, "TXN_BYTES_MAX", 500)
    feed(engine, [(3, Begin()), (4, Begin())])
    assert engine.apply_log_entry(5, Begin()).refused == Refusal.TOO_MANY_TRANSACTIONS
    feed(engine, [(6, Put("b", "x", b"", txn=3)), (7, Put("b", "y", b"", txn=3))])
    assert engine.apply_log_entry(8, Put("b", "z", b"", txn=3)).refused == Refusal.TRANSACTION_TOO_LARGE
    feed(engine, [(9, Put("b", "large", bytes(600), txn=4))])
    assert engine.apply_log_entry(10, Delete("b", "large", txn=4)).refused == Refusal.TRANSACTION_TOO_LARGE
    assert engine.apply_log_entry(11, Commit(4)).refused == Refusal.DOOMED
    assert engine._state.oldest_open_seq == 3


@pytest.mark.parametrize(
    "entry",
    [
        Put("b", "k", b"", txn=-1),
        Put("b", "k", b"", txn="3"),  # type: ignore[arg-type]
        Commit(0),
        Abort(0),
        Abort(3, -1),
        Begin(-1),
        Begin("now"),  # type: ignore[arg-type]
        Commit(3, keys=["b"]),  # type: ignore[list-item]
        Commit(3, keys=[("b", "")]),
        Commit(3, keys=5),  # type: ignore[arg-type]
        Commit(3, ranges=[("b", "x")]),  # type: ignore[list-item]
        Commit(3, keys=[("b", f"{n}") for n in range(10_001)]),
        Write([Put("b", "k", b"", txn=3)]),
    ],
)
def test_what_no_engine_takes_is_told(engine: Engine, entry: Any) -> None:
    """And changes nothing."""
    feed(engine, [(3, Begin())])
    with pytest.raises(InvalidEntry):
        engine.apply_log_entry(4, entry)
    assert engine.apply_log_entry(4, Commit(3)) == (4, None)


APPLIED: list[Pair] = [
    (3, Begin()),
    (4, Begin(3)),
    (5, Put("b", "x", b"1", txn=3)),
    (6, Put("b", "x", b"2", txn=4)),
    (7, Abort(3, 3)),
    (8, Commit(4)),
    (9, Commit(3, [("b", "x")])),
]


@pytest.mark.parametrize(
    ("seq", "entry"),
    [
        (3, Begin(2)),
        (4, Begin()),
        (5, Put("b", "x", b"1", txn=4)),
        (5, Put("b", "x", b"1")),
        (6, Put("b", "x", b"3", txn=4)),
        (7, Abort(3)),
        (7, Abort(3, 5)),
        (8, Abort(4)),
        (8, Commit(4, [("b", "x")])),
        (9, Commit(3)),
        (9, Commit(3, [("b", "y")])),
    ],
)
def test_each_part_of_a_request_is_recognised(node: Node, seq: int, entry: Request) -> None:
    """What was delivered is delivered again; another one is a divergence."""
    outcomes = feed(node.engine, APPLIED)
    engine = node.restart()
    assert feed(engine, APPLIED) == outcomes
    with pytest.raises(LogDivergence):
        engine.apply_log_entry(seq, entry)


# ---------------------------------------------------------------------------- any history of deliveries

COUNT = 250
Keys = dict[tuple[str, str], tuple[int, bytes | None]]


class Open:
    def __init__(self, txn: int, snapshot: int, floor: int, view: Keys) -> None:
        self.txn, self.snapshot, self.floor, self.view = txn, snapshot, floor, view
        self.writes: list[tuple[int, tuple[str, str], bytes | None]] = []
        self.undone: set[int] = set()
        self.seq_last = txn
        self.doomed = False

    def own(self) -> Keys:
        return {name: (seq, data) for seq, name, data in self.writes}

    def live(self, name: tuple[str, str]) -> tuple[int, bytes | None]:
        seq, data = self.own().get(name) or self.view.get(name, (0, None))
        return (0, None) if data is None else (seq, data)


class Model:
    """Keys with their last change, and what they were at each seq: what a request must come to."""

    def __init__(self) -> None:
        self.buckets: set[str] = set()
        self.keys: Keys = {}
        self.past: list[tuple[int, Keys]] = [(0, {})]
        self.open: dict[int, Open] = {}
        self.seen: set[Refusal | None] = set()

    def apply(self, seq: int, entry: Request) -> Refusal | None:
        refusal = self._apply(seq, entry)
        self.past.append((seq, dict(self.keys)))
        self.seen.add(refusal)
        return refusal

    def _apply(self, seq: int, entry: Any) -> Refusal | None:
        if isinstance(entry, Begin):
            return self._begin(seq, entry)
        if isinstance(entry, Commit | Abort):
            opened = self.open.get(entry.txn)
            if opened is None:
                return Refusal.NO_TRANSACTION
            end = self._commit if isinstance(entry, Commit) else self._abort
            refusal = end(seq, entry, opened)
            opened.seq_last = seq
            return refusal
        if getattr(entry, "txn", 0):
            opened = self.open.get(entry.txn)
            if opened is None:
                return Refusal.NO_TRANSACTION
            refusal = self._write(seq, entry, opened)
            opened.doomed = opened.doomed or refusal == Refusal.CONFLICT
            opened.seq_last = seq
            return refusal
        if isinstance(entry, CreateBucket):
            self.buckets.add(entry.bucket)
        elif isinstance(entry, DeleteBucket):
            held = {name for name, (_, data) in self.keys.items() if data is not None}
            held |= {name for each in self.open.values() if not each.doomed for name in each.own()}
            if any(name[0] == entry.bucket for name in held):
                return Refusal.BUCKET_NOT_EMPTY
            self.buckets.remove(entry.bucket)
        else:
            return self._plain(seq, entry)
        return None

    def _floor(self, seq: int) -> int:
        return min([seq, *(each.floor for each in self.open.values())])

    def _begin(self, seq: int, entry: Begin) -> Refusal | None:
        applied = self.past[-1][0]
        if entry.snapshot_seq is not None and not self._floor(applied) <= entry.snapshot_seq <= applied:
            return Refusal.VERSION_GONE
        snapshot = seq - 1 if entry.snapshot_seq is None else entry.snapshot_seq
        view = next(keys for at, keys in reversed(self.past) if at <= snapshot)
        self.open[seq] = Open(seq, snapshot, max(snapshot, self._floor(seq - 1)), view)
        return None

    def _write(self, seq: int, entry: Any, opened: Open) -> Refusal | None:
        if opened.doomed:
            return Refusal.DOOMED
        name, data, refusal = self._target(entry, opened)
        if refusal is not None:
            return refusal
        others = [each for each in self.open.values() if each is not opened and not each.doomed]
        if self.keys.get(name, (0, None))[0] > opened.snapshot or any(name in each.own() for each in others):
            return Refusal.CONFLICT
        if (refusal := self._condition(entry, opened.live)) is not None:
            return refusal
        if isinstance(entry, Copy):
            data = opened.live((entry.bucket, entry.key))[1]
        opened.writes.append((seq, name, data))
        return None

    def _target(
        self, entry: Any, opened: Open | None
    ) -> tuple[tuple[str, str], bytes | None, Refusal | None]:
        is_copy = isinstance(entry, Copy)
        name = (entry.to_bucket, entry.to_key) if is_copy else (entry.bucket, entry.key)
        missing = entry.bucket not in self.buckets or name[0] not in self.buckets
        return name, getattr(entry, "value", None), Refusal.NO_BUCKET if missing else None

    def _condition(self, entry: Any, live: Any, *, alone: bool = True) -> Refusal | None:
        is_copy = isinstance(entry, Copy)
        name = (entry.to_bucket, entry.to_key) if is_copy else (entry.bucket, entry.key)
        if entry.if_seq is not None and live(name)[0] != entry.if_seq:
            return Refusal.CONDITION_FAILED
        if (is_copy or (isinstance(entry, Delete) and alone)) and not live((entry.bucket, entry.key))[0]:
            return Refusal.NO_KEY
        return None

    def live(self, name: tuple[str, str]) -> tuple[int, bytes | None]:
        seq, data = self.keys.get(name, (0, None))
        return (0, None) if data is None else (seq, data)

    def _plain(self, seq: int, entry: Request) -> Refusal | None:
        members: Any = members_of(entry)
        for member in members:
            _, _, refusal = self._target(member, None)
            refusal = refusal or self._condition(member, self.live, alone=not isinstance(entry, Write))
            if refusal is not None:
                return refusal
        before = dict(self.keys)
        for member in members:
            name, data, _ = self._target(member, None)
            if isinstance(member, Copy):
                data = before[member.bucket, member.key][1]
            self.keys[name] = (seq, data)
            for each in self.open.values():
                each.doomed = each.doomed or name in each.own()
        return None

    def _commit(self, seq: int, entry: Commit, opened: Open) -> Refusal | None:
        del self.open[opened.txn]
        if opened.doomed:
            return Refusal.DOOMED
        for name, (changed, _) in self.keys.items():
            read = name in entry.keys or any(
                name[0] == bucket and name[1] >= first and (end is None or name[1] < end)
                for bucket, first, end in entry.ranges
            )
            if read and changed > opened.snapshot:
                return Refusal.CONFLICT
        for name, (_, data) in opened.own().items():
            self.keys[name] = (seq, data)
        return None

    def _abort(self, seq: int, entry: Abort, opened: Open) -> Refusal | None:
        savepoint = entry.savepoint_seq
        if savepoint is None:
            del self.open[opened.txn]
            return None
        if not opened.txn <= savepoint <= opened.seq_last or savepoint in opened.undone:
            return Refusal.NO_SAVEPOINT
        opened.writes = [each for each in opened.writes if each[0] <= savepoint]
        opened.undone |= set(range(savepoint + 1, seq))
        return None


@cache
def history(seed: int) -> tuple[list[Pair], list[Outcome], Keys]:
    """Entries as an orchestrator may hand them out, and what must become of them."""
    rng = random.Random(f"transactions {seed}")
    model = Model()
    pairs: list[Pair] = [(1, WITH_IMAGES if seed % 2 else CREATE), (2, CreateBucket("b"))]
    outcomes = [Outcome(1, None), Outcome(2, model.apply(2, pairs[1][1]))]
    keys = rng.choice((8, 60))
    seq = 2

    def key() -> str:
        return f"k{rng.randrange(keys):02}"

    def some_txn() -> int:
        if model.open and rng.random() < 0.95:
            return rng.choice(list(model.open))
        return rng.randrange(1, seq + 2)

    def data(txn: int) -> Any:
        bucket = rng.choice(("b", "b", "b", "b", "c"))
        condition = rng.choice((None,) * 8 + (0, rng.randrange(seq + 1)))
        roll = rng.random()
        if roll < 0.7:
            size = rng.choice((0, 5, 60, 300, 1500))
            return Put(bucket, key(), rng.randbytes(size), if_seq=condition, txn=txn)
        if roll < 0.85:
            return Delete(bucket, key(), if_seq=condition, txn=txn)
        return Copy("b", key(), bucket, key(), if_seq=condition, txn=txn)

    while len(pairs) < COUNT:
        seq += rng.choice((1, 1, 1, 2, 30))
        roll = rng.random()
        entry: Any
        if roll < 0.08 and len(model.open) < 5:
            entry = Begin(rng.choice((None, None, seq - 1, rng.randrange(seq + 1))))
        elif roll < 0.6:
            entry = data(some_txn())
        elif roll < 0.66:
            txn = some_txn()
            seqs = [each[0] for each in model.open[txn].writes] if txn in model.open else []
            entry = Abort(txn, rng.choice([txn, rng.randrange(seq), *seqs]))
        elif roll < 0.7:
            entry = Abort(some_txn())
        elif roll < 0.77:
            reads: Any = rng.choice(
                (((), ()), ([("b", key())], ()), ((), [("b", "k1", "k2"), ("c", "", None)]))
            )
            entry = Commit(some_txn(), *reads)
        elif roll < 0.8:
            entry = DeleteBucket("c") if "c" in model.buckets else CreateBucket("c")
        elif roll < 0.85:
            members = [data(0) for _ in range(rng.randrange(1, 4))]
            seq += len(members)
            entry = Write(members)
        else:
            entry = data(0)
        pairs.append((seq, entry))
        outcomes.append(Outcome(seq, model.apply(seq, entry)))
    return pairs, outcomes, {name: found for name, found in model.keys.items() if found[1] is not None}


@cache
def straight(seed: int) -> tuple[str, dict[str, bytes]]:
    """The same without anything in between, on another machine: root and segments."""
    pairs, outcomes, keys = history(seed)
    node = Node(sync_interval_ms=0)
    engine = node.open()
    for (seq, entry), outcome in zip(pairs, outcomes, strict=True):
        assert engine.apply_log_entry(seq, entry) == outcome, entry
    held = {
        (name, each.key): (each.seq, each.value) for name in engine.buckets() for each in engine.scan(name)
    }
    assert held == keys
    engine.sync()
    assert bool(check_images(engine.log())) == (seed % 2 == 1)
    return engine.root(), node.segments()


SEEDS = 40


@pytest.mark.parametrize("seed", range(SEEDS))
def test_outcomes_agree_with_dictionaries(seed: int) -> None:
    """Everything that can become of an entry in a transaction."""
    straight(seed)


def test_the_histories_have_all_refusals_in_them() -> None:
    """Otherwise nothing was compared."""
    seen = {outcome.refused for seed in range(SEEDS) for outcome in history(seed)[1]}
    assert seen >= {
        None, Refusal.NO_TRANSACTION, Refusal.CONFLICT, Refusal.DOOMED, Refusal.NO_SAVEPOINT,
        Refusal.NO_BUCKET,
        Refusal.VERSION_GONE, Refusal.CONDITION_FAILED, Refusal.NO_KEY, Refusal.BUCKET_NOT_EMPTY,
    }  # fmt: skip
    commits = [
        outcome.refused
        for seed in range(SEEDS)
        for (_, entry), outcome in zip(*history(seed)[:2], strict=True)
        if isinstance(entry, Commit)
    ]
    assert commits.count(None) > SEEDS


def live_through(seed: int, pool_bytes_max: int, events: list[tuple[str, int]]) -> None:
    pairs, expected, _ = history(seed)
    root, segments = straight(seed)
    node = Node(pool_bytes_max=pool_bytes_max)
    engine = node.open()
    place = 0
    for what, number in [*events, ("feed", COUNT)]:
        if what == "feed":
            for pair, outcome in list(zip(pairs, expected, strict=True))[place : place + number]:
                assert engine.apply_log_entry(*pair) == outcome, pair
                if pair[0] % 3 == 0:
                    node.step(1)
            place = min(place + number, len(pairs))
        elif what == "again":
            start = min(number, place)
            assert feed(engine, pairs[start:place]) == expected[start:place]
        elif what == "step":
            node.step(number)
        elif what == "restart":
            engine = node.restart()
        elif what == "flush":
            engine.flush()
        elif what == "read":
            engine.root()
        elif what not in ("sync", "lwm"):
            engine = node.crash(what, number)  # type: ignore[arg-type]
            applied = engine.marks().applied
            place = sum(seq <= applied for seq, _ in pairs)
        if engine._state.applied:
            check_structure(engine, node.pages)
    assert engine.root() == root
    node.step(1000)
    engine.flush()
    node.step(1000)
    assert engine.root() == root
    assert set(engine._state.transactions.rows) == set(engine._state.transactions.open)
    assert node.segments() == segments


@settings(max_examples=60)
@given(
    seed=st.integers(0, SEEDS - 1),
    pool_bytes_max=st.sampled_from((8192, 2**20)),
    events=st.lists(EVENTS, max_size=14),
)
def test_root_and_segments_depend_on_the_entries_alone(
    seed: int, pool_bytes_max: int, events: list[tuple[str, int]]
) -> None:
    """Whether transactions were stolen, stamped, swept or redone is a replica's own business."""
    live_through(seed, pool_bytes_max, events)


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(4))
def test_200_histories_with_transactions_give_the_same_root_and_segments(chunk: int) -> None:
    """The same, drawn from one seed."""
    kinds = (
        "feed",
        "feed",
        "feed",
        "again",
        "step",
        "restart",
        "flush",
        "lose",
        "keep",
        "torn",
        "random",
    )
    for number in range(chunk, 200, 4):
        rng = random.Random(f"history {number}")
        events = [(kind, rng.randrange(1, 40)) for kind in rng.choices(kinds, k=30)]
        try:
            live_through(number % SEEDS, rng.choice((8192, 20_000, 2**20)), events)
        except Exception as error:
            error.add_note(f"in history {number}")
            raise


def test_a_frame_of_the_log_is_an_outcome(engine: Engine) -> None:
    """Redo and replay never look at what a commit has read."""
    feed(engine, [(3, Begin()), (4, Commit(3, [("b", "x")]))])
    engine.sync()
    entry = next(iter(engine.log(4)))
    assert entry.value == b""
    assert entry.extras is not None
    assert entry.extras.request_hash is not None
