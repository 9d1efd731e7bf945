"""The fed engine: what becomes of each entry, what is recognised, and that entries alone decide the bytes."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.images import check_images

import lowwater
from lowwater import Copy, Create, CreateBucket, Delete, DeleteBucket, Outcome, Put, Refusal, Write
from lowwater.chaos.clock import SeededRandomness, VirtualClock
from lowwater.chaos.disk import Fault, FaultyFiles, Operation
from lowwater.chaos.runner import StepRunner
from lowwater.chaos.survival import SURVIVALS, Survival
from lowwater.engine.database.core import EngineOptions
from lowwater.engine.database.engine import FedEngine
from lowwater.engine.format.entries import Control
from lowwater.engine.format.format import Kind
from lowwater.engine.log.chain import seal_entry, settings_entry
from lowwater.engine.log.log import LogOptions, Seams
from lowwater.engine.log.pieces import Piece
from lowwater.engine.pages.memory_pages import MemoryPages
from lowwater.engine.state.requests import Request, members_of
from lowwater.engine.testing.engine import CLUSTER_ID, HISTORY, SALT, EngineConformance, Place, feed
from lowwater.engine.testing.orchestrator import OrchestratorConformance
from lowwater.errors import (
    Closed,
    InputError,
    InvalidEntry,
    LogDivergence,
    LogPoisoned,
    LowwaterError,
    NewerVersion,
    NotFound,
)

FORMAT_MD = Path(__file__).parents[2] / "docs" / "FORMAT.md"
SETTINGS = {"segment_bytes": 8192, "block_bytes": 1024, "page_keys": 4}
CREATE = Create(CLUSTER_ID, SALT, SETTINGS)

WITH_IMAGES = CREATE._replace(settings={**SETTINGS, "before_images": 1})

Pair = tuple[int, Request]


class Node:
    """An engine and everything under it, in one thread, on a disk that forgets."""

    def __init__(self, *, sync_interval_ms: float = 10, pool_bytes_max: int = 2**20) -> None:
        self.clock = VirtualClock()
        self.files = FaultyFiles(clock=self.clock)
        self.pages = MemoryPages(self.files)
        self.rng = random.Random(5)
        self.runner = StepRunner(self.clock)
        self.log_options = LogOptions(sync_interval_ms=sync_interval_ms)
        # Flushes begin by themselves, and a crash finds them anywhere.
        self.options = EngineOptions(checkpoint_interval_s=0.05)
        object.__setattr__(
            self.options, "pool_bytes_max", pool_bytes_max
        )  # less than is sensible and allowed
        self.engine: FedEngine

    def open(self, **more: Any) -> FedEngine:
        self.pages.reopen()
        self.runner = StepRunner(self.clock)
        self.engine = FedEngine(
            "node",
            log_options=more.pop("log_options", self.log_options),
            options=self.options,
            store=self.pages,
            seams=Seams(
                files=self.files,
                clock=self.clock,
                randomness=SeededRandomness(1),
                runner=self.runner,
                owner=f"life {self.files.life}",
            ),
            **more,
        )
        return self.engine

    def open_again(self) -> FedEngine:
        return self.open()

    def crash(self, mode: Survival = "lose", seed: int = 0) -> FedEngine:
        self.files.crash(random.Random(seed), mode)
        self.pages.crash()
        return self.open()

    def restart(self) -> FedEngine:
        self.engine.close()
        return self.open()

    def step(self, count: int) -> None:
        self.clock.advance(0.02)
        for _ in range(count):
            if not self.runner.run_one(self.rng):
                break

    def segments(self) -> dict[str, bytes]:
        """The bytes of what is sealed, and the entries of what is not. The engine is closed afterwards."""
        self.engine.sync()
        payloads = {str(entry.seq): repr(entry).encode() for entry in self.engine.log()}
        assert list(self.engine.check()) == []
        self.engine.close()
        found = {}
        for name in self.files.list("node/wal"):
            if name.startswith("segment-"):
                file = self.files.open(f"node/wal/{name}")
                found[name] = file.read_at(0, file.size())
                file.close()
        return {**found, **payloads}


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    made.open()
    yield made
    made.engine.close()


@pytest.fixture
def engine(node: Node) -> FedEngine:
    feed(node.engine, [(1, CREATE), (2, CreateBucket("b"))])
    return node.engine


class TestEngineOnDisk(EngineConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return lambda: FedEngine(tmp_path / "data")


class TestEngineInMemory(EngineConformance):
    @pytest.fixture
    def place(self) -> Place:
        return Node().open_again


class TestEngineWithHardlyAnyMemory(EngineConformance):
    """Everything is flushed all the time."""

    @pytest.fixture
    def place(self) -> Place:
        return Node(pool_bytes_max=4096, sync_interval_ms=0).open_again


# ---------------------------------------------------------------------------- what is decided


def values(engine: FedEngine) -> dict[str, bytes]:
    return {found.key: found.value for found in engine.scan("b")}


def test_a_refused_entry_is_framed_with_its_code_and_the_hash_of_its_request(engine: FedEngine) -> None:
    """Readers see that it was ordered, and replays decide nothing."""
    assert (
        engine.apply_log_entry(5, Put("no", "k", bytes(1000), {"m": "n"}, origin=7)).refused
        == Refusal.NO_BUCKET
    )
    engine.sync()
    (entry,) = engine.log(5)
    assert (entry.kind, entry.bucket, entry.key, entry.origin) == ("put", "no", "k", 7)
    assert (entry.refused, entry.value, entry.metadata) == (Refusal.NO_BUCKET, b"", None)
    assert entry.extras is not None
    assert len(entry.extras.request_hash or b"") == 16


def test_conditional_and_copied_entries_carry_the_hash_and_plain_ones_do_not(engine: FedEngine) -> None:
    """It costs 16 bytes: only where the frame does not show what was asked."""
    feed(
        engine, [(3, Put("b", "k", b"v")), (4, Put("b", "k", b"w", if_seq=3)), (5, Copy("b", "k", "b", "l"))]
    )
    feed(engine, [(6, Delete("b", "l")), (7, Delete("b", "k", if_seq=4)), (8, CreateBucket("c"))])
    engine.sync()
    hashed = [entry.seq for entry in engine.log() if entry.extras and entry.extras.request_hash]
    assert hashed == [4, 5, 7]
    assert values(engine) == {}


def test_a_group_is_refused_as_a_whole(engine: FedEngine) -> None:
    """One condition that fails takes the others with it, and every frame says so."""
    engine.apply_log_entry(3, Put("b", "k", b"v"))
    write = Write([Put("b", "x", b""), Put("b", "k", b"", if_absent=True), Delete("b", "k")])
    assert engine.apply_log_entry(8, write) == (8, Refusal.CONDITION_FAILED)
    engine.sync()
    frames = [(entry.seq, entry.refused) for entry in engine.log(4)]
    assert frames == [(seq, Refusal.CONDITION_FAILED) for seq in (6, 7, 8)]
    assert values(engine) == {"k": b"v"}
    assert engine.apply_log_entry(8, write) == (8, Refusal.CONDITION_FAILED)


def test_a_group_is_decided_by_what_was_there_before_it(engine: FedEngine) -> None:
    """Its members happen at one moment."""
    both = Write(
        [Put("b", "k", b"1", if_absent=True), Put("b", "k", b"2", if_absent=True), Copy("b", "k", "b", "l")]
    )
    assert engine.apply_log_entry(10, both).refused == Refusal.NO_KEY
    engine.apply_log_entry(11, Put("b", "k", b"0"))
    assert engine.apply_log_entry(20, Write([Put("b", "k", b"1"), Copy("b", "k", "b", "l")])).refused is None
    assert values(engine) == {"k": b"1", "l": b"0"}
    assert engine.get("b", "k").seq == engine.get("b", "l").seq == 20


def test_if_seq_names_a_version_as_reads_show_it(engine: FedEngine) -> None:
    """That of a group is the group's last seq, a deleted key has none."""
    feed(engine, [(10, Write([Put("b", "k", b"1"), Put("b", "l", b"1")])), (11, Delete("b", "l"))])
    assert engine.apply_log_entry(12, Put("b", "k", b"2", if_seq=9)).refused == Refusal.CONDITION_FAILED
    assert engine.apply_log_entry(13, Put("b", "k", b"2", if_seq=engine.get("b", "k").seq)).refused is None
    assert engine.apply_log_entry(14, Put("b", "l", b"2", if_seq=10)).refused == Refusal.CONDITION_FAILED
    assert engine.apply_log_entry(15, Put("b", "l", b"2", if_seq=0)).refused is None
    assert engine.apply_log_entry(16, Delete("b", "l", if_seq=10)).refused == Refusal.CONDITION_FAILED
    assert engine.apply_log_entry(17, Copy("b", "k", "b", "l", if_seq=15)).refused is None
    assert values(engine) == {"k": b"2", "l": b"2"}


def test_a_deletion_that_is_kept_in_a_page_is_no_version(engine: FedEngine) -> None:
    """What somebody may still read decides nothing."""
    feed(engine, [(3, Put("b", "k", b"1")), (4, Control(Kind.HORIZON, {"seq": 3})), (5, Delete("b", "k"))])
    engine.flush()
    assert engine.read("b", "k", 4).value == b"1"
    assert engine.apply_log_entry(6, Delete("b", "k")).refused == Refusal.NO_KEY
    assert engine.apply_log_entry(7, Copy("b", "k", "b", "l")).refused == Refusal.NO_KEY
    assert engine.apply_log_entry(8, Put("b", "k", b"2", if_absent=True)).refused is None


def test_a_large_value_is_copied_by_reference_to_the_frame_that_has_it(engine: FedEngine) -> None:
    """Also a copy of a copy, and also when nothing was durable yet."""
    large = bytes(range(256)) * 20
    feed(
        engine,
        [(5, Put("b", "k", large, {"m": "n"})), (6, Copy("b", "k", "b", "l")), (7, Copy("b", "l", "b", "m"))],
    )
    engine.flush()
    engine.apply_log_entry(8, Copy("b", "m", "b", "n"))
    assert values(engine) == dict.fromkeys("klmn", large)
    assert engine.get("b", "n").metadata == {"m": "n"}
    references = [entry.extras.value_ref for entry in engine.log(6) if entry.extras]
    assert [(each.seq, each.length) for each in references if each] == [(5, len(large))] * 3


def test_a_seal_ends_the_segment_that_it_names_and_no_other(engine: FedEngine) -> None:
    """Proposed twice, it must not cut twice."""
    assert engine.apply_log_entry(5, seal_entry(1)).refused is None
    assert engine.apply_log_entry(6, seal_entry(1)).refused == Refusal.OUT_OF_DATE
    assert engine.apply_log_entry(7, seal_entry(1)).refused == Refusal.OUT_OF_DATE
    assert engine.apply_log_entry(8, seal_entry(6)).refused is None
    assert engine.apply_log_entry(9, seal_entry(0)).refused == Refusal.OUT_OF_DATE
    assert engine.apply_log_entry(8, seal_entry(6)).refused is None
    engine.sync()
    assert [s.seq_first for s in engine._wal.store.segments] == [1, 6]


def test_pins_and_horizons_are_decided_by_the_log(engine: FedEngine) -> None:
    """What this process happens to read keeps nothing for others."""
    feed(engine, [(3, Put("b", "k", b"1")), (4, Put("b", "k", b"2"))])
    pin = Control(Kind.PIN, {"name": "s", "seq": 4})
    assert (
        engine.apply_log_entry(5, Control(Kind.PIN, {"name": "s", "seq": 9})).refused == Refusal.VERSION_GONE
    )
    assert (
        engine.apply_log_entry(6, Control(Kind.PIN, {"name": "s", "seq": 4})).refused == Refusal.VERSION_GONE
    )
    assert engine.apply_log_entry(7, Control(Kind.HORIZON, {"seq": 6})).refused is None
    assert engine.apply_log_entry(8, pin).refused == Refusal.VERSION_GONE
    assert engine.apply_log_entry(9, Control(Kind.PIN, {"name": "s", "seq": 7})).refused is None
    assert (
        engine.apply_log_entry(10, Control(Kind.PIN, {"name": "s", "seq": 7})).refused == Refusal.NAME_EXISTS
    )
    assert engine.apply_log_entry(11, Control(Kind.UNPIN, {"name": "t"})).refused == Refusal.NO_SNAPSHOT
    feed(engine, [(12, Put("b", "k", b"3")), (13, Control(Kind.NOOP))])
    assert engine.read("b", "k", 7).value == b"2"
    assert engine.snapshots() == {"s": (7, None)}
    assert engine.apply_log_entry(14, Control(Kind.HORIZON, {"seq": None})).refused is None
    assert engine.apply_log_entry(15, Control(Kind.UNPIN, {"name": "s"})).refused is None


def test_the_table_of_refusals_is_the_one_of_the_code() -> None:
    """The numbers are in logs that outlive the code."""
    section = FORMAT_MD.read_text(encoding="utf-8").partition("### Refusals\n")[2].partition("\n#")[0]
    rows = [
        line.strip("|").split("|")
        for line in section.splitlines()
        if line.startswith("| ") and "why" not in line
    ]
    assert {int(code): name.strip() for code, name, _ in rows} == {
        each: each.name.lower() for each in Refusal
    }


def test_conditions_are_refused_where_nobody_decides_them(tmp_path: Path) -> None:
    """A log has no state, and a group of a database checks none: leaving them out would be worse."""
    with lowwater.Log.open(None) as log, lowwater.open(tmp_path) as db:
        db.create_bucket("b")
        for entry in (
            Put("b", "k", b"", if_absent=True),
            Put("b", "k", b"", if_seq=0),
            Delete("b", "k", if_seq=1),
        ):
            with pytest.raises(InvalidEntry):
                log.append(entry)
            with pytest.raises(InvalidEntry):
                db.write([entry])
        db.write([Put("b", "k", b"", time_us=5), Delete("b", "l", time_us=5)])
        assert db.get("b", "k").time_us > 5


@pytest.mark.parametrize(
    ("seq", "entry"),
    [
        (0, Put("b", "k", b"")),
        (2**64, Put("b", "k", b"")),
        (True, Put("b", "k", b"")),
        ("9", Put("b", "k", b"")),
        (1, Write([Put("b", "k", b""), Put("b", "l", b"")])),
        (9, Write([])),
        (9, Write(5)),  # type: ignore[arg-type]
        (9, Write([CreateBucket("c")])),  # type: ignore[list-item]
        (9, Write([Write([Put("b", "k", b"")])])),  # type: ignore[list-item]
        (9, "entry"),
        (9, None),
        (9, Put("b", "", b"")),
        (9, Put("", "k", b"")),
        (9, Put("b", "k" * 1025, b"")),
        (9, Put("no", "k", 5)),  # type: ignore[arg-type]
        (9, Put("b", "k", "text", if_absent=True)),  # type: ignore[arg-type]
        (9, Put("b", "k", b"", {"m": 5})),  # type: ignore[dict-item]
        (9, Put("b", "k", b"", 5)),  # type: ignore[arg-type]
        (9, Put("b", "k", b"", if_absent=True, if_seq=3)),
        (9, Put("b", "k", b"", if_seq=-1)),
        (9, Delete("b", "k", if_seq="3")),  # type: ignore[arg-type]
        (9, Put("b", "k", b"", time_us=-1)),
        (9, Put("b", "k", b"", time_us=2**63)),
        (9, Put("b", "k", b"", origin=2**64)),
        (9, Put("b", "k", b"", origin=1.5)),  # type: ignore[arg-type]
        (9, Copy("b", "", "b", "k")),
        (9, Copy("b", "k", "", "k")),
        (9, CreateBucket("")),
        (9, CreateBucket("c" * 256)),
        (9, CREATE),
        (9, Control(Kind.FORK, {"epoch": 2})),
        (9, Control(Kind.BEGIN)),
        (9, Control(99)),  # type: ignore[arg-type]
        (9, Control(Kind.NOOP, 5)),  # type: ignore[arg-type]
        (9, Control(Kind.SEAL)),
        (9, Control(Kind.HORIZON)),
        (9, Control(Kind.PIN, {"name": "s"})),
        (9, Control(Kind.PIN, {"seq": 1})),
        (9, Control(Kind.UNPIN, {"name": 5})),
        (9, Control(Kind.SETTINGS, {"page_keys": 8})),
        (9, Control(Kind.SETTINGS, {"segment_bytes": 1})),
    ],
)
def test_what_no_engine_takes_is_told_and_changes_nothing(engine: FedEngine, seq: Any, entry: Any) -> None:
    """A mistake of the orchestrator must not end in the log, nor depend on what the state is."""
    before = engine.marks()
    with pytest.raises(InvalidEntry):
        engine.apply_log_entry(seq, entry)
    assert engine.marks() == before
    assert engine.apply_log_entry(10, Put("b", "k", b"v")) == (10, None)


def test_a_first_entry_that_makes_no_sense_is_told(node: Node) -> None:
    """And the right one is taken after it."""
    for wrong in (
        Create(b"short", SALT),
        Create(CLUSTER_ID, "text"),  # type: ignore[arg-type]
        Create(CLUSTER_ID, SALT, {"page_keys": 0}),
        Create(CLUSTER_ID, SALT, [1]),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidEntry):
            node.engine.apply_log_entry(1, wrong)
    with pytest.raises(NewerVersion):
        node.engine.apply_log_entry(1, Create(CLUSTER_ID, SALT, {"future": 1}))
    assert node.engine.marks() == (0, 0, 0, 0, 0, 0)
    assert node.engine.buckets() == []
    with pytest.raises(NotFound):
        node.engine.get("b", "k")
    assert node.engine.flush() == 0
    assert node.restart().sync() == 0
    assert node.engine.apply_log_entry(1000, CREATE) == (1000, None)


# ---------------------------------------------------------------------------- what is recognised

APPLIED: list[Pair] = [
    (1, CREATE),
    (2, CreateBucket("b")),
    (5, Put("b", "k", b"v", {"m": "n"}, origin=4, time_us=100)),
    (6, Put("b", "k", b"w", if_seq=5, time_us=90)),
    (7, Copy("b", "k", "b", "l")),
    (8, Put("b", "k", b"x", if_absent=True)),
    (12, Write([Put("b", "x", b"1"), Put("b", "y", b"2"), Delete("b", "z")])),
    (14, Write([Put("b", "x", b"1"), Put("b", "y", b"2", if_absent=True)])),
    (15, Delete("b", "y")),
    (16, seal_entry(1)),
    (17, seal_entry(1)),
    (20, Put("b", "end", b"")),
]

DIVERGENT: list[Pair] = [
    (1, Create(CLUSTER_ID, bytes(16), SETTINGS)),
    (1, Create(CLUSTER_ID, SALT)),
    (1, CreateBucket("b")),
    (2, CreateBucket("c")),
    (2, DeleteBucket("b")),
    (3, CreateBucket("b")),
    (5, Put("b", "k", b"V", {"m": "n"}, origin=4)),
    (5, Put("b", "K", b"v", {"m": "n"}, origin=4)),
    (5, Put("b", "k", b"v", {"m": "N"}, origin=4)),
    (5, Put("b", "k", b"v", None, origin=4)),
    (5, Put("b", "k", b"v", {"m": "n"})),
    (5, Put("b", "k", b"v", {"m": "n"}, origin=4, time_us=101)),
    (5, Put("b", "k", b"v", {"m": "n"}, origin=4, if_absent=True)),
    (5, Write([Put("b", "k", b"v", {"m": "n"}, origin=4)])),
    (6, Put("b", "k", b"w")),
    (6, Put("b", "k", b"w", if_seq=4)),
    (6, Put("b", "k", b"w", if_seq=5, time_us=101)),
    (7, Copy("b", "l", "b", "l")),
    (7, Copy("b", "k", "b", "m")),
    (7, Copy("b", "k", "b", "l", if_absent=True)),
    (7, Put("b", "l", b"w", {"m": "n"})),
    (8, Put("b", "k", b"y", if_absent=True)),
    (8, Put("b", "k", b"x")),
    (8, Delete("b", "k")),
    (10, Put("b", "x", b"1")),
    (12, Delete("b", "z")),
    (12, Write([Delete("b", "z")])),
    (12, Write([Put("b", "y", b"2"), Delete("b", "z")])),
    (12, Write([Put("b", "k", b""), Put("b", "x", b"1"), Put("b", "y", b"2"), Delete("b", "z")])),
    (12, Write([Put("b", "y", b"2"), Put("b", "x", b"1"), Delete("b", "z")])),
    (11, Write([Put("b", "x", b"1"), Put("b", "y", b"2")])),
    (13, Write([Put("b", "x", b"1"), Put("b", "y", b"2"), Delete("b", "z")])),
    (14, Write([Put("b", "y", b"2", if_absent=True)])),
    (14, Write([Put("b", "x", b"1"), Put("b", "y", b"2")])),
    (15, Delete("b", "y", if_seq=12)),
    (16, seal_entry(2)),
    (17, seal_entry(2)),
    (18, Control(Kind.NOOP)),
    (19, Put("b", "end", b"")),
    (21, Write([Put("b", "end", b""), Put("b", "f", b"")])),
]


@pytest.mark.parametrize("again", ["at once", "durable", "restarted", "in pages"])
@pytest.mark.parametrize(("seq", "entry"), DIVERGENT)
def test_what_is_not_the_same_request_is_a_divergence(
    node: Node, again: str, seq: int, entry: Request
) -> None:
    """Every part of a request counts, and so does what is a hole. After it nothing is written any more."""
    engine = node.engine
    outcomes = feed(engine, APPLIED)
    if again == "durable":
        engine.sync()
    elif again == "restarted":
        engine = node.restart()
    elif again == "in pages":
        engine.flush()
        engine = node.crash()
    assert feed(engine, APPLIED) == outcomes
    root = engine.root()
    with pytest.raises(LogDivergence) as caught:
        engine.apply_log_entry(seq, entry)
    assert caught.value.seq is not None
    for attempt in ((21, Put("b", "new", b"")), APPLIED[0]):
        with pytest.raises(LogDivergence):
            engine.apply_log_entry(*attempt)
    with pytest.raises(LogDivergence):
        engine.flush()
    assert engine.get("b", "k").value == b"w"
    assert engine.root() == root
    assert feed(node.restart(), APPLIED) == outcomes


def test_a_time_that_was_raised_is_recognised(engine: FedEngine) -> None:
    """The frame's is later than what was proposed, and nobody kept that."""
    feed(engine, [(3, Put("b", "k", b"1", time_us=100)), (4, Put("b", "k", b"2", time_us=50))])
    for time_us in (0, 50, 99, 100):
        assert engine.apply_log_entry(4, Put("b", "k", b"2", time_us=time_us)) == (4, None)
    with pytest.raises(LogDivergence):
        engine.apply_log_entry(4, Put("b", "k", b"2", time_us=101))


def test_what_means_the_same_is_the_same(engine: FedEngine) -> None:
    """A request that came over a network has other types and no empty maps."""
    feed(
        engine, [(3, Put("b", "k", b"1", {}, if_absent=True)), (4, Put("b", "l", b"1", {"m": "n", "a": "b"}))]
    )
    assert engine.apply_log_entry(3, Put("b", "k", bytearray(b"1"), None, if_seq=0)) == (3, None)
    assert engine.apply_log_entry(4, Put("b", "l", memoryview(b"1"), {"a": "b", "m": "n"})) == (4, None)  # type: ignore[arg-type]


def test_below_what_was_purged_nothing_is_known_and_nothing_happens(
    engine: FedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who delivers from the beginning to an engine without its beginning is not told that it diverged."""
    feed(engine, [(3, Put("b", "k", b"1")), (9, Put("b", "k", b"2"))])
    engine.sync()
    monkeypatch.setattr(type(engine._log), "seq_before_first", property(lambda _: 3))
    for entry in (
        Put("b", "k", b"other"),
        Put("no", "k", b""),
        Write([Put("b", "k", b""), Put("b", "k", b"")]),
    ):
        assert engine.apply_log_entry(3, entry) == (3, None)
    assert engine.marks() == (9, 9, 9, 3, 3, 3)
    assert engine.apply_log_entry(9, Put("b", "k", b"2")) == (9, None)
    with pytest.raises(LogDivergence):
        engine.apply_log_entry(4, Put("b", "k", b""))


# ---------------------------------------------------------------------------- durability, marks


class _InterruptedQueue(deque[Piece]):
    """Ctrl-C comes when a call returns."""

    def extend(self, pieces: Iterable[Piece]) -> None:
        super().extend(pieces)
        raise KeyboardInterrupt


def test_what_is_logged_when_an_interrupt_comes_is_not_lost(tmp_path: Path) -> None:
    """The log has it, and memory did not: pages that are written then would say that they hold it."""
    entries: list[Pair] = [(1, CREATE), (2, CreateBucket("b")), (3, Put("b", "k", b"v"))]
    with FedEngine(tmp_path / "data") as engine:
        feed(engine, entries[:2])
        engine.sync()
        engine._wal._queue = _InterruptedQueue()
        with pytest.raises(KeyboardInterrupt):
            engine.apply_log_entry(*entries[2])
        engine._wal._queue = deque(engine._wal._queue)
        assert values(engine) == {"k": b"v"}
        engine.apply_log_entry(4, Put("b", "l", b"w"))
    with FedEngine(tmp_path / "data") as engine:
        feed(engine, entries)
        assert values(engine) == {"k": b"v", "l": b"w"}
        assert list(engine.check()) == []


def test_an_entry_is_applied_before_it_is_durable(engine: FedEngine) -> None:
    """The orchestrator goes on, and syncs when it wants to acknowledge."""
    engine.sync()
    engine.apply_log_entry(5, Put("b", "k", b"v"))
    assert engine.marks()[:3] == (5, 5, 2)
    assert [entry.seq for entry in engine.log()] == [1, 2]
    assert engine.sync() == 5
    assert engine.marks()[:3] == (5, 5, 5)


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.get("b", "k"),
        lambda engine: engine.read("b", "k", 5),
        lambda engine: engine.head("b", "k"),
        lambda engine: engine.list("b"),
        lambda engine: list(engine.scan("b")),
        lambda engine: engine.root(),
        lambda engine: engine.root(5),
        lambda engine: list(engine.check()),
        lambda engine: engine.apply_log_entry(5, Put("b", "k", b"v")),
    ],
)
def test_what_is_read_is_durable_first(engine: FedEngine, ask: Callable[[FedEngine], Any]) -> None:
    """Nobody sees what a crash could take back."""
    engine.sync()
    engine.apply_log_entry(5, Put("b", "k", b"v"))
    assert engine.marks().durable == 2
    ask(engine)
    assert engine.marks().durable == 5


def test_an_absence_is_durable_first(engine: FedEngine) -> None:
    """That a key is gone is an answer like another."""
    engine.apply_log_entry(5, Put("b", "k", b"v"))
    engine.sync()
    feed(engine, [(6, Delete("b", "k"))])
    with pytest.raises(NotFound):
        engine.get("b", "k")
    assert engine.marks().durable == 6
    engine.apply_log_entry(7, DeleteBucket("b"))
    with pytest.raises(NotFound):
        engine.get("b", "k")
    assert engine.marks().durable == 7


def test_the_interval_makes_it_durable(node: Node, engine: FedEngine) -> None:
    """Without anybody's sync."""
    engine.sync()
    engine.apply_log_entry(5, Put("b", "k", b"v"))
    node.step(10)
    node.step(10)
    assert engine.marks().durable == 5


@pytest.mark.parametrize("mode", SURVIVALS)
def test_a_crash_takes_back_what_was_not_durable_and_it_is_applied_again(node: Node, mode: Survival) -> None:
    """All of it or a part, but of a group nothing or all."""
    feed(node.engine, APPLIED[:5])
    node.engine.sync()
    outcomes = feed(node.engine, APPLIED)
    engine = node.crash(mode, seed=3)
    applied = engine.marks().applied
    assert 7 <= applied == engine.marks().durable
    assert applied in {seq for seq, _ in APPLIED}
    assert feed(engine, APPLIED) == outcomes
    assert engine.marks().applied == 20


def test_marks_keep_their_rules(node: Node, engine: FedEngine) -> None:
    """LWM never falls, is told again after a restart, and does not pass what is durable here."""
    engine.sync()
    engine.apply_log_entry(9, Put("b", "k", b"v"))
    assert engine.update_low_water_mark(9) == 2
    assert engine.marks() == (9, 9, 2, 2, 0, 0)
    engine.sync()
    assert engine.marks() == (9, 9, 9, 9, 0, 0)
    assert engine.update_low_water_mark(5) == 9
    assert engine.get_s3_high_water_mark() == 0
    for wrong in (-1, 2**64, True, "9", None, 1.0):
        with pytest.raises(InputError):
            engine.update_low_water_mark(wrong)  # type: ignore[arg-type]
    engine.flush()
    assert node.restart().marks() == (9, 9, 9, 9, 0, 0)


def test_a_disk_that_fails_stops_writing_and_not_reading(node: Node, engine: FedEngine) -> None:
    """And the next life goes on from what is durable."""
    feed(engine, [(4, Put("b", "other", b"o")), (5, Put("b", "k", b"v"))])
    engine.sync()

    def fault(operation: Operation) -> Fault | None:
        return Fault(error=5) if "wal" in operation.path and operation.kind in ("write", "sync") else None

    node.files.fault = fault
    engine.apply_log_entry(6, Put("b", "k", b"w"))
    with pytest.raises(LogPoisoned):
        engine.sync()
    for call in (
        lambda: engine.apply_log_entry(7, Put("b", "k", b"")),
        engine.sync,
        engine.flush,
    ):
        with pytest.raises(LogPoisoned):
            call()
    with pytest.raises(LogPoisoned):
        engine.get("b", "k")
    assert engine.get("b", "other").value == b"o"
    node.files.fault = None
    engine = node.crash()
    assert engine.marks().applied in (5, 6)
    assert feed(engine, [(5, Put("b", "k", b"v")), (6, Put("b", "k", b"w"))]) == [(5, None), (6, None)]
    assert engine.get("b", "k").value == b"w"


def test_pages_without_their_log_are_refused(node: Node, engine: FedEngine) -> None:
    """An orchestrator that delivers from the beginning would build another history under them."""
    engine.flush()
    engine.close()
    for name in node.files.list("node/wal"):
        node.files.remove(f"node/wal/{name}")
    with pytest.raises(LowwaterError):
        node.open()
    node.pages = MemoryPages(node.files)
    assert node.open().marks().applied == 0


def test_what_is_wrong_with_opening_is_told(tmp_path: Path) -> None:
    """Before anything is made."""
    with pytest.raises(InputError):
        FedEngine(tmp_path / "data", tier="s3://bucket")
    with pytest.raises(InputError):
        FedEngine(5)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    with FedEngine(tmp_path / "data", config={"wal": {"fsync_interval_ms": 5}}) as engine:
        feed(engine, HISTORY)
        with pytest.raises(LowwaterError):
            FedEngine(tmp_path / "data")
    with pytest.raises(Closed):
        engine.apply_log_entry(99, CreateBucket("c"))


# ---------------------------------------------------------------------------- the other side


class Recorder:
    """An orchestrator in a few lines, which orders every other proposal."""

    def __init__(self, lwm: int = 0) -> None:
        self.lwm = lwm
        self.proposed: list[Request] = []
        self.pairs: list[Pair] = [(3, CREATE)]

    def get_low_water_mark(self) -> int:
        return self.lwm

    def fetch_log_entries(self, seq_first: int, seq_last: int) -> Iterable[Pair]:
        return [pair for pair in self.pairs if seq_first <= pair[0] <= seq_last]

    def propose(self, entry: Request) -> None:
        self.proposed.append(entry)
        if len(self.proposed) == 1:
            raise RuntimeError("no leader")
        if len(self.proposed) % 2:
            self.pairs.append((self.pairs[-1][0] + 2, entry))


class TestOrchestrator(OrchestratorConformance):
    @pytest.fixture
    def orchestrator(self) -> lowwater.Orchestrator:
        made = Recorder()
        with pytest.raises(RuntimeError):
            made.propose(Control(Kind.NOOP))
        return made


def test_the_low_water_mark_is_asked_for_when_it_opens(node: Node, engine: FedEngine) -> None:
    """Nobody may tell it for a while."""
    feed(engine, [(9, Put("b", "k", b""))])
    engine.close()
    orchestrator: lowwater.Orchestrator = Recorder(lwm=7)
    opened: lowwater.StorageEngine = node.open(orchestrator=orchestrator)
    assert opened.marks().lwm == 7


def test_an_old_segment_is_sealed_by_a_proposal(node: Node, engine: FedEngine) -> None:
    """An engine that appended a seal of its own would diverge from the others."""
    engine.close()
    orchestrator = Recorder()
    engine = node.open(
        orchestrator=orchestrator, log_options=LogOptions(segment_age_max_s=10, sync_interval_ms=1)
    )
    engine.apply_log_entry(5, Put("b", "k", b""))
    engine.sync()
    for _ in range(40):
        node.clock.advance(1)
        node.runner.run_until_idle(node.rng)
    assert engine.marks().applied == 5
    assert set(map(type, orchestrator.proposed)) == {Control}
    assert 2 <= len(orchestrator.proposed) <= 4
    assert engine.apply_log_entry(6, orchestrator.proposed[-1]).refused is None
    assert engine.apply_log_entry(7, orchestrator.proposed[-1]).refused == Refusal.OUT_OF_DATE


def test_many_threads_may_read_while_one_applies(tmp_path: Path) -> None:
    """Each read shows one of the states that there were."""
    with FedEngine(tmp_path / "data") as engine:
        feed(
            engine,
            [(1, CREATE), (2, CreateBucket("b")), (4, Write([Put("b", "x", b"4"), Put("b", "y", b"4")]))],
        )
        over = threading.Event()
        errors: list[BaseException] = []

        def read() -> None:
            try:
                while not over.is_set():
                    found = [each.value for each in engine.scan("b")]
                    assert found[0] == found[1]
            except BaseException as error:  # noqa: BLE001 — told below
                errors.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for seq in range(6, 400, 2):
            value = b"%d" % seq
            engine.apply_log_entry(seq, Write([Put("b", "x", value), Put("b", "y", value)]))
        over.set()
        for thread in threads:
            thread.join()
        assert errors == []
        assert engine.get("b", "x").value == b"398"


# ---------------------------------------------------------------------------- any history of deliveries


class Model:
    """Buckets and keys as dictionaries: what a request must come to."""

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, tuple[int, bytes]]] = {}

    def apply(self, seq: int, entry: Request) -> Refusal | None:
        members = members_of(entry)
        for member in members:
            refusal = self._refusal(member, alone=not isinstance(entry, Write))
            if refusal is not None:
                return refusal
        before = {name: dict(keys) for name, keys in self.buckets.items()}
        for member in members:
            if isinstance(member, CreateBucket):
                self.buckets[member.bucket] = {}
            elif isinstance(member, DeleteBucket):
                del self.buckets[member.bucket]
            elif isinstance(member, Put):
                self.buckets[member.bucket][member.key] = (seq, member.value)
            elif isinstance(member, Delete):
                self.buckets[member.bucket].pop(member.key, None)
            elif isinstance(member, Copy):
                self.buckets[member.to_bucket][member.to_key] = (seq, before[member.bucket][member.key][1])
        return None

    def _refusal(self, member: Any, *, alone: bool) -> Refusal | None:
        if isinstance(member, CreateBucket):
            return Refusal.BUCKET_EXISTS if member.bucket in self.buckets else None
        if isinstance(member, DeleteBucket):
            if member.bucket not in self.buckets:
                return Refusal.NO_BUCKET
            return Refusal.BUCKET_NOT_EMPTY if self.buckets[member.bucket] else None
        if not isinstance(member, Put | Delete | Copy):
            return None
        target, key = (member.to_bucket, member.to_key) if isinstance(member, Copy) else member[:2]
        if target not in self.buckets or member.bucket not in self.buckets:
            return Refusal.NO_BUCKET
        wanted = 0 if getattr(member, "if_absent", False) else member.if_seq
        if wanted is not None and self.buckets[target].get(key, (0, b""))[0] != wanted:
            return Refusal.CONDITION_FAILED
        if isinstance(member, Copy) and member.key not in self.buckets[member.bucket]:
            return Refusal.NO_KEY
        return (
            Refusal.NO_KEY
            if isinstance(member, Delete) and alone and key not in self.buckets[target]
            else None
        )


COUNT = 120


@cache
def history(seed: int) -> tuple[list[Pair], list[Outcome], dict[str, dict[str, tuple[int, bytes]]]]:
    """Entries as an orchestrator may hand them out, and what must become of them."""
    rng = random.Random(seed)
    model = Model()
    pairs: list[Pair] = []
    outcomes: list[Outcome] = []
    seqs = [0]
    segment_first = seq = rng.choice((1, 5, 1000))

    def add(seq: int, entry: Request) -> None:
        pairs.append((seq, entry))
        outcomes.append(Outcome(seq, model.apply(seq, entry)))
        seqs.append(seq)

    def times() -> dict[str, int]:
        return {
            "time_us": rng.choice((0, seq * 10, seq * 10 - 500 if seq > 50 else 0)),
            "origin": rng.choice((0, seq)),
        }

    def condition() -> dict[str, Any]:
        return {"if_seq": rng.choice((None, None, None, 0, rng.choice(seqs[-10:])))}

    def key() -> str:
        return f"k{rng.randrange(30)}"

    def data() -> Put | Delete | Copy:
        bucket = rng.choice(("b", "b", "b", "c", "no"))
        roll = rng.random()
        if roll < 0.65:
            value = rng.randbytes(rng.choice((0, 5, 300, 1500)))
            return Put(bucket, key(), value, rng.choice((None, {"m": "n"})), **condition(), **times())
        if roll < 0.85:
            return Delete(bucket, key(), **condition(), **times())
        return Copy("b", key(), bucket, key(), **condition(), **times())

    has_images = seed % 2 == 1
    add(seq, WITH_IMAGES if has_images else CREATE)
    add(seq := seq + 1, CreateBucket("b"))
    while len(pairs) < COUNT:
        seq += rng.choice((1, 1, 1, 2, 1000))
        roll = rng.random()
        if roll < 0.04:
            add(seq, rng.choice((CreateBucket("c"), DeleteBucket("c"), DeleteBucket("b"))))
        elif roll < 0.06:
            change = {"segment_bytes": rng.choice((4096, 8192))}
            if has_images:
                change = rng.choice((change, {"before_images": rng.choice((0, 1, 1))}))
            add(seq, settings_entry(change))
        elif roll < 0.1:
            # Whether it is refused depends on where segments end, which the model does not know.
            pairs.append((seq, seal_entry(segment_first if roll < 0.08 else seqs[-1])))
            outcomes.append(Outcome(seq, None))
        elif roll < 0.2:
            members = [data() for _ in range(rng.randrange(1, 6))]
            seq += len(members)
            add(seq, Write(members))
        else:
            add(seq, data())
    return pairs, outcomes, model.buckets


@cache
def straight(seed: int) -> tuple[list[Outcome], str, dict[str, bytes]]:
    """The same without anything in between, on another machine: outcomes, root, segments."""
    pairs, outcomes, buckets = history(seed)
    node = Node(sync_interval_ms=0)
    engine = node.open()
    found = feed(engine, pairs)
    for (_, entry), outcome, expected in zip(pairs, found, outcomes, strict=True):
        if not isinstance(entry, Control):
            assert outcome == expected
    held = {
        name: {each.key: (each.seq, each.value) for each in engine.scan(name)} for name in engine.buckets()
    }
    assert held == buckets
    engine.sync()
    assert bool(check_images(engine.log())) == (seed % 2 == 1)
    return found, engine.root(), node.segments()


@pytest.mark.parametrize("seed", range(20))
def test_outcomes_agree_with_dictionaries(seed: int) -> None:
    """Everything that a request can be, and where it is refused."""
    _, _, segments = straight(seed)
    assert sum(name.startswith("segment-") for name in segments) >= 3


EVENTS = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 40)),
    st.tuples(st.just("again"), st.integers(0, COUNT)),
    st.tuples(st.just("step"), st.integers(1, 8)),
    st.tuples(st.just("sync"), st.just(0)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("flush"), st.just(0)),
    st.tuples(st.just("read"), st.just(0)),
    st.tuples(st.just("lwm"), st.integers(0, 100_000)),
    st.tuples(st.sampled_from(SURVIVALS), st.integers(0, 1000)),
)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 5),
    pool_bytes_max=st.sampled_from((8192, 2**20)),
    events=st.lists(EVENTS, max_size=14),
)
def test_root_and_segments_depend_on_the_entries_alone(
    seed: int, pool_bytes_max: int, events: list[tuple[str, int]]
) -> None:
    """Whatever happens between the calls: crashes, restarts, flushes, reads, what is delivered again."""
    pairs, _, _ = history(seed)
    expected, root, segments = straight(seed)
    node = Node(pool_bytes_max=pool_bytes_max)
    engine = node.open()
    place = 0
    lwm = 0

    def deliver(start: int, stop: int) -> None:
        assert feed(engine, pairs[start:stop]) == expected[start:stop]

    for what, number in events:
        if what == "feed":
            deliver(place, place + number)
            place = min(place + number, len(pairs))
        elif what == "again":
            deliver(min(number, place), place)
        elif what == "step":
            node.step(number)
        elif what == "sync":
            engine.sync()
        elif what == "restart":
            engine = node.restart()
            lwm = 0  # what was told since the last flush is to be told again
        elif what == "flush":
            engine.flush()
        elif what == "read":
            engine.root()
            if "b" in engine.buckets():
                list(engine.scan("b"))
        elif what == "lwm":
            assert engine.update_low_water_mark(number) >= lwm
        else:
            durable = engine.marks().durable
            engine = node.crash(what, number)  # type: ignore[arg-type]
            applied = engine.marks().applied
            assert applied >= durable
            place = sum(seq <= applied for seq, _ in pairs)
            assert applied == (pairs[place - 1][0] if place else 0)
            lwm = 0
        marks = engine.marks()
        assert list(marks) == sorted(marks, reverse=True)
        assert lwm <= marks.lwm
        lwm = marks.lwm
    deliver(place, len(pairs))
    assert engine.root() == root
    assert node.segments() == segments


@settings(max_examples=60)
@given(seed=st.integers(0, 5), stop=st.integers(2, COUNT), data=st.data())
def test_a_hole_is_noticed_wherever_it_is(seed: int, stop: int, data: st.DataObject) -> None:
    """After a restart, too."""
    pairs, _, _ = history(seed)
    node = Node()
    engine = node.open()
    feed(engine, pairs[:stop])
    taken = {seq - number for seq, entry in pairs[:stop] for number in range(len(members_of(entry)))}
    last = pairs[stop - 1][0]
    holes = sorted({seq + step for seq in taken for step in (-1, 1)} - taken - {0, last + 1})
    if not holes:
        return
    if data.draw(st.booleans()):
        engine = node.restart()
    with pytest.raises(LogDivergence):
        engine.apply_log_entry(data.draw(st.sampled_from(holes)), Put("b", "k", b""))
    with pytest.raises(LogDivergence):
        engine.apply_log_entry(last + 1, Put("b", "k", b""))
    engine.close()
