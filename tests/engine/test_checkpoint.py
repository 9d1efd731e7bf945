"""Checkpoints: what they hold, that replicas write the same bytes, and how little is read for the next."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.engine_model import Machine, small_limits
from tests.engine.test_engine import CREATE, Node

import lowwater
from lowwater import Copy, CreateBucket, Delete, Engine, Put, Write, read_checkpoint
from lowwater.chaos.clock import VirtualClock
from lowwater.engine.checkpoint import content, pagewalk
from lowwater.engine.checkpoint.checkpoints import Checkpoints, StoredCheckpoint
from lowwater.engine.database.core import EngineOptions
from lowwater.engine.database.database import Database
from lowwater.engine.database.opening import open_with
from lowwater.engine.format.entries import Control
from lowwater.engine.format.format import Kind
from lowwater.engine.format.records import VALUE_PLACE
from lowwater.engine.log.chain import checkpoint_entry
from lowwater.engine.log.log import LogOptions
from lowwater.engine.state.decide import Refusal
from lowwater.engine.state.due import DUE_MAX
from lowwater.engine.state.requests import Request
from lowwater.engine.testing.damage import flip
from lowwater.errors import (
    Closed,
    Corrupt,
    InputError,
    InvalidEntry,
    LowwaterError,
    NotFound,
    NotLowwater,
    TimedOut,
    VersionGone,
)

MIB = 2**20
LARGE = bytes(range(256)) * 5


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "data")


@pytest.fixture
def db(path: str) -> Iterator[Database]:
    with lowwater.open(path) as opened:
        opened.create_bucket("b")
        yield opened


def newest(db: Any) -> StoredCheckpoint:
    found: StoredCheckpoint = db.checkpoints()[0]
    return found


def scanned(db: Any) -> str:
    """The root without a checkpoint's help."""
    pinned = db._pin(None)
    try:
        return str(db._root_at(pinned.seq, None))
    finally:
        db._state.unpin(pinned)


def fill(db: Database, count: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    db.put_many("b", [(f"k{number:06}", b"%d" % rng.randrange(10**9)) for number in range(count)])


# ---------------------------------------------------------------------------- what it holds


def test_a_checkpoint_holds_what_was_there_when_it_was_ordered(db: Database) -> None:
    """Row by row, from its files alone."""
    fill(db, 1000)
    db.put("b", "large", LARGE, {"m": "n"})
    db.copy("b", "large", "b", "copy")
    db.delete("b", "k000500")
    found = db.checkpoint()
    objects = {each.key: each for each in db.scan("b")}
    db.put("b", "k000001", b"later")
    rows = list(read_checkpoint(newest(db).path))
    assert newest(db).id == found
    assert (rows[0].bucket, rows[0].key) == ("", "b")
    assert [row.key for row in rows[1:]] == sorted(objects)
    for row in rows[1:]:
        each = objects[row.key]
        assert (row.bucket, row.seq, row.time_us, row.metadata) == (
            "b",
            each.seq,
            each.time_us,
            each.metadata,
        )
        assert row.value_bytes == len(each.value)
        if len(each.value) <= 256:
            assert (row.value, row.value_hash, row.place) == (each.value, None, None)
        else:
            assert (row.value, row.value_hash) == (None, blake3(LARGE).digest())
            assert row.place is not None
            place = (*row.place, row.value_bytes, row.value_hash)
            assert db._values.read(VALUE_PLACE.pack(*place)) == LARGE


def test_its_root_is_that_of_the_database(db: Database) -> None:
    """One number for all of it."""
    fill(db, 3000)
    root = db.root()
    db.checkpoint()
    assert newest(db).root == root == db.root() == scanned(db)
    assert newest(db).index.row_count == 3001


def test_where_nothing_has_happened_there_is_no_other_checkpoint(db: Database) -> None:
    """Each costs an entry, a segment, and a look at every page."""
    fill(db, 10)
    found = db.checkpoint()
    applied = db.marks().applied
    assert db.checkpoint() == found
    assert db.marks().applied == applied
    db.put("b", "k", b"")
    assert db.checkpoint() > found


def test_also_after_it_was_opened_again(path: str) -> None:
    """Neither is there one at every start."""
    with lowwater.open(path) as db:
        db.create_bucket("b")
        found = db.checkpoint()
    with lowwater.open(path) as db:
        assert db.checkpoint() == found
        assert len(db.checkpoints()) == 1


def test_a_checkpoint_entry_ends_its_segment(db: Database) -> None:
    """What was there before it can be shipped without what comes after."""
    fill(db, 10)
    seq = int(db.checkpoint().partition("-")[0])
    db._log.wal.store.seal_all()
    assert any(name.endswith(f"-{seq:020}.log") for name in os.listdir(f"{db.directory}"))


def test_an_empty_database_has_a_checkpoint_too(path: str) -> None:
    """The root of nothing is the hash of nothing."""
    with lowwater.open(path) as db:
        db.checkpoint()
        assert newest(db).root == db.root() == blake3(b"").hexdigest()
        assert list(newest(db).rows()) == []
        assert newest(db).index.packs == {}
        assert list(db.check()) == []


def test_the_control_part_has_horizon_and_snapshots_as_of_its_seq(db: Database) -> None:
    """A restore needs them as they were, not as they are."""
    fill(db, 10)
    seq = db.snapshot("s")
    db.move_horizon(seq)
    db.checkpoint()
    db.drop_snapshot("s")
    db.move_horizon(None)
    body = {"horizon": seq, "snapshots": {"s": seq}, "expires_us": {}, "per_key_max": None, "exact_from": 0}
    assert newest(db).index.control_body == body
    before = newest(db).index.control_hash
    root = newest(db).root
    db.checkpoint()
    assert newest(db).index.control_body == {**body, "horizon": None, "snapshots": {}}
    assert newest(db).index.control_hash != before
    assert newest(db).root == root


def test_the_newest_two_are_kept_and_packs_that_they_need(db: Database) -> None:
    """A disk must not fill with them."""
    rng = random.Random(1)
    for number in range(6):
        fill(db, 2000 if not number else 20 * number, number)
        db.delete("b", f"k{rng.randrange(100, 2000):06}")
        db.checkpoint()
    while db._make_checkpoints():
        pass  # old ones are removed when the new one is there
    found = db.checkpoints()
    assert len(found) == 2
    directory = Path(db.directory).parent
    assert sorted(os.listdir(directory / "checkpoints")) == sorted(Path(each.path).name for each in found)
    needed = {f"{pack.hex()}.pack" for each in found for pack in each.index.packs}
    assert set(os.listdir(directory / "packs")) == needed
    for each in found:
        assert len(list(each.rows())) == each.index.row_count
    assert list(db.check()) == []


def test_packs_are_cut_by_size(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no object grows without end, and what is uploaded again is small."""
    monkeypatch.setattr("lowwater.engine.checkpoint.packing.PACK_BYTES", 20_000)
    with lowwater.open(path) as db:
        db.create_bucket("b")
        fill(db, 5000)
        db.put("b", "large", LARGE)
        db.checkpoint()
        packs = newest(db).index.packs
        assert len(packs) > 5
        largest = max(each.listed.block_bytes for each in newest(db).blocks())
        assert max(packs.values()) < 20_000 + largest + 100
        assert len(list(newest(db).rows())) == 5002
        db.put("b", "k002500", b"new")
        db.checkpoint()
        assert len(newest(db).index.packs.keys() - packs.keys()) == 2  # a block, and a list
        assert newest(db).root == scanned(db)
        assert list(db.check()) == []


# ---------------------------------------------------------------------------- what is read for it


class Counted:
    """How many pages were decoded, and how many keys were looked at in one locked section."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded = 0
        decode, look_up = content.decode_page, pagewalk._look_up
        self.pages_at_once = self.changes_at_once = 0

        def counting(data: bytes, key: bytes) -> Any:
            self.decoded += 1
            return decode(data, key)

        def watching(*arguments: Any, **named: Any) -> Any:
            found = look_up(*arguments, **named)
            self.pages_at_once = max(self.pages_at_once, len(found))
            self.changes_at_once = max(self.changes_at_once, sum(len(each.changes) for each in found))
            return found

        monkeypatch.setattr(content, "decode_page", counting)
        monkeypatch.setattr(pagewalk, "_look_up", watching)


def test_a_checkpoint_decodes_the_pages_that_changed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large database that changes little, the next one costs little."""
    with lowwater.open(path) as db:
        db.create_bucket("b")
        fill(db, 60_000)
        db.checkpoint()
        written = db._checkpointer.rows_written
    with lowwater.open(path) as db:  # with no page in memory
        pages = len(list(db._store.page_keys()))
        rng = random.Random(2)
        changed = [f"k{rng.randrange(60_000):06}" for _ in range(10)]
        db.put_many("b", [(key, b"new") for key in changed])
        counted = Counted(monkeypatch)
        db.checkpoint()
        assert pages > 600
        assert counted.decoded <= 3 * len(changed)
        assert 0 < db._checkpointer.rows_written < written / 20
        counted.decoded = 0
        assert db.root() == newest(db).root
        assert counted.decoded == 0
        db.put("b", changed[0], b"newer")
        root = db.root()
        assert counted.decoded <= 3
        assert root == scanned(db)
        assert counted.decoded > pages / 2


def test_the_lock_is_held_for_a_few_pages_and_keys(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers must not stand still, however many changes are in memory."""
    with lowwater.open(path) as db:
        db.create_bucket("b")
        fill(db, 30_000)
        counted = Counted(monkeypatch)
        root = db.root()
        assert 0 < counted.changes_at_once <= pagewalk.RUN_CHANGES
        counted.changes_at_once = 0
        db.checkpoint()
        assert counted.changes_at_once == 0
        assert 0 < counted.pages_at_once <= pagewalk.RUN_PAGES
        assert root == newest(db).root == scanned(db)


def test_a_step_of_a_checkpoint_looks_at_a_few_blocks(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for one, and the background, must let others run."""
    with open_with(path, options=EngineOptions(checkpoint_interval_s=None)) as db:
        db.create_bucket("b")
        fill(db, 20_000)
        db.flush()
        steps = 0
        blocks: list[int] = [0]
        make = content.encode_rows

        def counting(rows: Any) -> bytes:
            blocks[-1] += 1
            return make(rows)

        make_stored = content.rows_block

        def counting_stored(*columns: Any) -> bytes:
            blocks[-1] += 1
            return make_stored(*columns)

        monkeypatch.setattr(content, "encode_rows", counting)
        monkeypatch.setattr(content, "rows_block", counting_stored)
        step = db._checkpointer.step

        def stepping() -> bool:
            nonlocal steps
            steps += 1
            blocks.append(0)
            return step()

        monkeypatch.setattr(db._checkpointer, "step", stepping)
        db.checkpoint()
        assert sum(blocks) > 200
        assert max(blocks) <= 33
        assert steps > 10


# ---------------------------------------------------------------------------- equal bytes


def files_of(node: Any) -> dict[str, bytes]:
    """The files of the newest checkpoint, by name."""
    stored = newest(node.engine)
    found = {Path(stored.path).name: b""}
    for pack in stored.index.packs:
        found[pack.hex()] = b""
    for name in list(found):
        path = f"node/checkpoints/{name}" if name.endswith(".ckpt") else f"node/packs/{name}.pack"
        file = node.files.open(path)
        found[name] = file.read_at(0, file.size())
        file.close()
    return found


KEYS = [f"{letter}{number}" for letter in "abc" for number in range(12)]
_key = st.sampled_from(KEYS)
SINGLES = st.one_of(
    st.tuples(_key, st.binary(max_size=300)).map(lambda item: Put("b", *item)),
    _key.map(lambda key: Put("b", key, LARGE, {"m": "n"})),
    _key.map(lambda key: Delete("b", key)),
    st.tuples(_key, _key).map(lambda keys: Copy("b", keys[0], "b", keys[1])),
    st.lists(st.tuples(_key, st.binary(max_size=20)), min_size=1, max_size=5).map(
        lambda items: Write([Put("b", *item) for item in items])
    ),
)
ENTRIES = st.lists(st.one_of(SINGLES, SINGLES, SINGLES, SINGLES, st.just("checkpoint")), max_size=60)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 20)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("crash"), st.integers(0, 1000)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("root"), st.just(0)),
    ),
    max_size=12,
)


def as_pairs(entries: list[Any]) -> list[tuple[int, Request]]:
    """With their seqs; the last one asks for a checkpoint."""
    pairs: list[tuple[int, Request]] = [(1, CREATE), (2, CreateBucket("b"))]
    seq, before = 2, 0
    for entry in [*entries, "checkpoint"]:
        if entry == "checkpoint":
            seq += 1
            pairs.append((seq, checkpoint_entry(before)))
            before = seq
        else:
            seq += len(entry.entries) if isinstance(entry, Write) else 1
            pairs.append((seq, entry))
    return pairs


def lived(pairs: list[tuple[int, Request]], events: list[tuple[str, int]], pool: int) -> tuple[Node, str]:
    """An engine that was fed these, with this in between; and its root at the end."""
    rng = random.Random(len(events))
    node = Node(pool_bytes_max=pool)
    engine = node.open()
    moments = sorted(rng.sample(range(len(pairs) + 1), min(len(events), len(pairs))))
    place = 0
    for moment, (what, number) in zip([*moments, len(pairs)], [*events, ("", 0)], strict=False):
        while place < moment:
            engine.apply_log_entry(*pairs[place])
            place += 1
        if what == "step":
            node.step(number)
        elif what == "restart":
            engine = node.restart()
        elif what == "flush":
            engine.flush()
        elif what == "root":
            engine.root()
        elif what == "crash":
            engine = node.crash("random", number)
            applied = engine.marks().applied
            place = sum(seq <= applied for seq, _ in pairs)
    for pair in pairs[place:]:
        engine.apply_log_entry(*pair)
    engine.wait_for_checkpoint(pairs[-1][0])
    return node, engine.root()


@settings(max_examples=120, deadline=None)
@given(entries=ENTRIES, events=EVENTS, pool=st.sampled_from((8192, 2**20)))
def test_replicas_write_the_same_bytes_whatever_happened_to_them(
    entries: list[Any], events: list[tuple[str, int]], pool: int
) -> None:
    """Flushes, pools, crashes, restarts, and when the background ran are a process' own business."""
    pairs = as_pairs(entries)
    with small_limits():
        straight, root = lived(pairs, [], 2**20)
        other, other_root = lived(pairs, events, pool)
        assert files_of(other) == files_of(straight)
        assert root == other_root == newest(other.engine).root == scanned(other.engine)
        assert list(other.engine.check()) == []
        straight.engine.close()
        other.engine.close()


def test_an_embedded_database_and_a_fed_engine_have_the_same_root() -> None:
    """What orders the entries is no part of the content."""
    with small_limits():
        machine = Machine(page_keys=4)
        db = machine.open()
        db.create_bucket("b")
        for number in range(200):
            db.put("b", f"{number % 70:03}", b"%d" % number)
        db.checkpoint()
        node = Node()
        engine = node.open()
        engine.apply_log_entry(1, CREATE)
        for number, entry in enumerate(db.log(2), 2):
            request: Request = {
                "create_bucket": CreateBucket(entry.bucket, time_us=entry.time_us),
                "put": Put(entry.bucket, entry.key, entry.value, time_us=entry.time_us),
                "checkpoint": checkpoint_entry(0),
            }[entry.kind]
            engine.apply_log_entry(number, request)
        engine.wait_for_checkpoint(newest(db).seq)
        assert newest(engine).root == newest(db).root == db.root() == engine.root()
        assert newest(engine).index.lists == newest(db).index.lists
        db.close()
        engine.close()


# ---------------------------------------------------------------------------- writers beside it


def test_writers_beside_checkpoints_change_nothing_in_them(path: str) -> None:
    """Each shows one moment, though pages are flushed, divided and joined meanwhile."""
    options = EngineOptions(pool_bytes_max=MIB, checkpoint_interval_s=0.05)
    with open_with(path, options=options) as db:
        db.create_bucket("b")
        fill(db, 3000)
        stopping = threading.Event()
        errors: list[Exception] = []

        def write(number: int) -> None:
            rng = random.Random(number)
            try:
                while not stopping.is_set():
                    items = [(f"k{rng.randrange(6000):06}", rng.randbytes(40)) for _ in range(20)]
                    db.write(
                        [Put("b", *item) if rng.random() < 0.6 else Delete("b", item[0]) for item in items]
                    )
            except Exception as error:  # noqa: BLE001 — all of them fail the test
                errors.append(error)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(12):
                found = db.checkpoint()
                stored = newest(db)
                assert stored.id == found
                rows = [row for row in stored.rows() if row.bucket]
                expected: dict[str, tuple[int, bytes]] = {}
                for entry in db.log("earliest"):
                    if entry.seq >= stored.seq:
                        break
                    seq = entry.seq
                    if entry.extras is not None and entry.extras.group_seq_last is not None:
                        seq = entry.extras.group_seq_last
                    if entry.kind == "put":
                        expected[entry.key] = seq, entry.value
                    elif entry.kind == "delete":
                        expected.pop(entry.key, None)
                assert {row.key: (row.seq, row.value) for row in rows} == expected
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
        assert not errors
        assert db.root() == scanned(db)
        assert list(db.check()) == []


def test_many_threads_may_ask_for_checkpoints(db: Database) -> None:
    """Each gets one that holds what it has written, whoever has made it."""
    errors: list[Exception] = []
    roots: set[str] = set()

    def ask(number: int) -> None:
        try:
            for serial in range(15):
                seq = db.put("b", f"{number}", b"%d" % serial)
                assert int(db.checkpoint().partition("-")[0]) > seq
                roots.add(db.root())
        except Exception as error:  # noqa: BLE001 — all of them fail the test
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(roots) > 1
    assert list(db.check()) == []


# ---------------------------------------------------------------------------- damage


def damaged_files(db: Database) -> list[str]:
    directory = Path(db.directory).parent
    return [
        *(f"{directory}/checkpoints/{name}" for name in os.listdir(directory / "checkpoints")),
        *(f"{directory}/packs/{name}" for name in os.listdir(directory / "packs")),
    ]


def test_every_flipped_byte_is_found_and_the_database_goes_on(path: str) -> None:
    """A checkpoint that is wrong is worse than none."""
    with lowwater.open(path) as db:
        db.create_bucket("b")
        fill(db, 300)
        db.put("b", "large", LARGE)
        db.checkpoint()
        root = db.root()
    rng = random.Random(5)
    for file in damaged_files(db):
        size = os.path.getsize(file)
        for place in {0, 9, 12, size - 1, *(rng.randrange(size) for _ in range(12))}:
            flip(file, place)
            with lowwater.open(path) as db:
                findings = list(db.check())
                assert findings
                assert all(finding.severity == "error" and finding.hint for finding in findings)
                assert any("pack" in each.what or "checkpoint" in each.what for each in findings)
                assert db.root() == root
            flip(file, place)
    with lowwater.open(path) as db:
        assert list(db.check()) == []


def test_after_damage_the_next_checkpoint_is_a_full_one(db: Database) -> None:
    """The one after the damage fails for want of blocks; nobody has to repair anything."""
    fill(db, 300)
    db.checkpoint()
    for file in damaged_files(db):
        if file.endswith(".pack"):
            os.unlink(file)
    db.put("b", "k", b"")
    with pytest.raises(LowwaterError):
        db.checkpoint()
    db.checkpoint()
    assert newest(db).index.base_seq == 0
    assert newest(db).root == scanned(db)
    assert list(newest(db).rows())


def test_checkpoints_that_were_removed_are_made_anew(path: str) -> None:
    """They are copies: an operator may throw them away."""
    with lowwater.open(path) as db:
        db.create_bucket("b")
        fill(db, 300)
        db.checkpoint()
        expected = newest(db).id
    shutil.rmtree(f"{path}/checkpoints")
    shutil.rmtree(f"{path}/packs")
    with lowwater.open(path) as db:
        db.checkpoint()
        assert newest(db).id == expected
        assert newest(db).index.base_seq == 0
        assert newest(db).root == db.root()


def test_pages_that_are_built_from_the_log_make_no_checkpoint_that_is_there(path: str) -> None:
    """The log asks for all that were ever made."""
    with lowwater.open(path) as db:
        db.create_bucket("b")
        for number in range(12):
            fill(db, 30, number)
            db.checkpoint()
        expected = [each.id for each in db.checkpoints()]
    shutil.rmtree(f"{path}/pages")
    with lowwater.open(path) as db:
        assert db._state.checkpoints_due == []
        assert [each.id for each in db.checkpoints()] == expected
        assert db.root() == newest(db).root


def test_without_pages_and_checkpoints_the_last_ones_are_given_up(path: str) -> None:
    """They need the blocks of the ones before, for which nobody waits any more. The next is a full one."""
    with lowwater.open(path) as db:
        db.create_bucket("b")
        for number in range(12):
            fill(db, 30, number)
            db.checkpoint()
    for directory in ("pages", "checkpoints", "packs"):
        shutil.rmtree(f"{path}/{directory}")
    with lowwater.open(path) as db:
        db.checkpoint()
        assert newest(db).root == scanned(db)


def test_a_checkpoint_of_another_log_is_refused(path: str, tmp_path: Path) -> None:
    """Two directories were mixed: blocks of one must not come into the other."""
    other = str(tmp_path / "other")
    for place, count in ((path, 5), (other, 50)):
        with lowwater.open(place) as db:
            db.create_bucket("b")
            fill(db, count)
            db.checkpoint()
    for directory in ("checkpoints", "packs"):
        shutil.rmtree(f"{path}/{directory}")
        shutil.copytree(f"{other}/{directory}", f"{path}/{directory}")
    with pytest.raises(Corrupt, match="the log ends at") as caught:
        lowwater.open(path)
    assert caught.value.hint
    for directory in ("checkpoints", "packs"):
        shutil.rmtree(f"{other}/{directory}")
        shutil.copytree(f"{path}/{directory}", f"{other}/{directory}")
    with lowwater.open(other) as db:
        fill(db, 1)
    with lowwater.open(other) as db:
        assert list(db.check()) == []


def test_what_is_no_checkpoint_is_refused_with_a_reason(tmp_path: Path) -> None:
    """Names are given by people."""
    with pytest.raises(NotFound, match="not the name"):
        read_checkpoint(str(tmp_path / "something"))
    name = f"checkpoint-{5:020}-{0:016x}.ckpt"
    with pytest.raises(NotFound):
        read_checkpoint(str(tmp_path / name))
    (tmp_path / name).write_bytes(b"something else")
    with pytest.raises(NotLowwater):
        read_checkpoint(tmp_path / name)
    for no_path in (None, 5, b"x", [], "", "a\0b"):
        with pytest.raises(InputError):
            read_checkpoint(no_path)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- asking for it


class Orderer:
    """Orders what an engine proposes, at once or later."""

    def __init__(self, *, lose: int = 0) -> None:
        self.engine: Engine
        self.seq = 2
        self.lose = lose
        self.proposed: list[Any] = []

    def get_low_water_mark(self) -> int:
        return 0

    def fetch_log_entries(self, seq_first: int, seq_last: int) -> Any:
        return []

    def propose(self, entry: Request) -> None:
        self.proposed.append(entry)
        if len(self.proposed) > self.lose:
            self.seq += 1
            self.engine.apply_log_entry(self.seq, entry)


def fed(path: str, orderer: Orderer, **options: Any) -> Engine:
    engine = Engine(path, orchestrator=orderer, options=EngineOptions(**options))
    orderer.engine = engine
    engine.apply_log_entry(1, CREATE)
    engine.apply_log_entry(2, CreateBucket("b"))
    return engine


def test_a_fed_engine_has_its_orchestrator_order_one(path: str) -> None:
    """It has no seqs of its own to give."""
    orderer = Orderer()
    with fed(path, orderer) as engine:
        found = engine.create_checkpoint()
        assert found.startswith(f"{3:020}-")
        assert newest(engine).root == engine.root()
        assert engine.create_checkpoint() > found
        assert [dict(each.body) for each in orderer.proposed] == [{"before": 0}, {"before": 3}]


def test_a_proposal_that_was_lost_is_repeated(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposing is best effort."""
    monkeypatch.setattr("lowwater.engine.database.engine.PROPOSE_AGAIN_S", 0.01)
    orderer = Orderer(lose=3)
    with fed(path, orderer) as engine:
        assert engine.create_checkpoint()
        assert len(orderer.proposed) == 4


def test_who_does_not_want_to_wait_is_told(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry may still come."""
    monkeypatch.setattr("lowwater.engine.database.engine.PROPOSE_AGAIN_S", 0.01)
    with fed(path, Orderer(lose=10**9)) as engine, pytest.raises(TimedOut):
        engine.create_checkpoint(timeout_s=0.03)


def test_closing_ends_the_wait_for_one(path: str) -> None:
    """Nobody delivers anything to a closed engine."""
    orderer = Orderer(lose=10**9)
    engine = fed(path, orderer)
    caught: list[Exception] = []

    def wait() -> None:
        try:
            engine.create_checkpoint()
        except Exception as error:  # noqa: BLE001 — all of them fail the test
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not orderer.proposed:
        time.sleep(0.001)
    engine.close()
    thread.join()
    assert [type(error) for error in caught] == [Closed]


@pytest.mark.parametrize("body", [{}, {"before": -1}, {"before": "3"}, {"before": 0, "full": 1}])
def test_a_checkpoint_entry_that_makes_no_sense_is_refused_before_it_is_applied(
    path: str, body: dict[str, Any]
) -> None:
    """No engine would take it, so no log may hold it."""
    with fed(path, Orderer()) as engine:
        with pytest.raises(InvalidEntry):
            engine.apply_log_entry(3, Control(Kind.CHECKPOINT, body))
        assert engine.apply_log_entry(3, checkpoint_entry(2)).refused == Refusal.OUT_OF_DATE


def test_entries_are_ordered_from_time_to_time() -> None:
    """Where the configuration says so, and where anything has happened."""
    machine = Machine(clock=VirtualClock())
    machine.open().close()
    db = open_with(
        "db",
        log_options=machine.log_options,
        options=EngineOptions(checkpoint_entry_interval_s=10),
        seams=machine.seams(),
        store=_reopened(machine),
        create=False,
    )
    machine.db = db
    db.create_bucket("b")
    machine.idle(9)
    assert db.checkpoints() == []
    machine.idle(2)
    first = newest(db).seq
    machine.idle(30)
    assert newest(db).seq == first == db.marks().applied
    db.put("b", "k", b"")
    machine.idle(11)
    assert newest(db).seq == first + 2
    db.close()


def test_where_little_has_changed_a_checkpoint_waits_until_the_last_one_is_old() -> None:
    """`checkpoint_max_age_secs` of the reference plan, beside `checkpoint_interval_secs`."""
    machine = Machine(clock=VirtualClock())
    machine.open().close()
    db = open_with(
        "db",
        log_options=machine.log_options,
        options=EngineOptions(checkpoint_entry_interval_s=10, checkpoint_entry_age_max_s=60),
        seams=machine.seams(),
        store=_reopened(machine),
        create=False,
    )
    machine.db = db
    db.create_bucket("b")
    machine.idle(50)
    assert db.checkpoints() == []
    machine.idle(11)
    first = newest(db).seq
    machine.idle(100)
    assert newest(db).seq == first == db.marks().applied
    db.put("b", "k", bytes(1_100_000))
    machine.idle(11)
    assert newest(db).seq > first, "much has changed: the interval counts"
    db.close()


def test_entries_are_ordered_by_the_length_of_the_log() -> None:
    """Recovery from the archive reads what came after the last one."""
    machine = Machine(clock=VirtualClock(), log_options=LogOptions(segment_bytes=16_384, block_bytes=4096))
    machine.open().close()
    options = EngineOptions()
    object.__setattr__(options, "checkpoint_entry_bytes", 20_000)
    db = open_with(
        "db",
        log_options=machine.log_options,
        options=options,
        seams=machine.seams(),
        store=_reopened(machine),
        create=False,
    )
    machine.db = db
    db.create_bucket("b")
    for number in range(30):
        db.put("b", f"{number}", bytes(500))
    machine.idle(2)
    assert db.checkpoints() == []
    for number in range(30):
        db.put("b", f"{number}", bytes(500))
    machine.idle(2)
    assert len(db.checkpoints()) == 1
    db.close()


def _reopened(machine: Machine) -> Any:
    machine.pages.reopen()
    return machine.pages


def test_what_a_checkpoint_needs_stays_readable_until_it_is_made() -> None:
    """Also over a restart, and whatever is flushed meanwhile."""
    with small_limits():
        node = Node()
        engine = node.open()
        engine.apply_log_entry(1, CREATE)
        engine.apply_log_entry(2, CreateBucket("b"))
        for seq in range(3, 60):
            engine.apply_log_entry(seq, Put("b", f"{seq % 20}", b"%d" % seq))
        root = engine.root()
        # The background has not run: it is due, and no more.
        engine.apply_log_entry(60, checkpoint_entry(0))
        for seq in range(61, 120):
            engine.apply_log_entry(seq, Put("b", f"{seq % 20}", b"%d" % seq))
        engine.flush()
        assert engine._state.checkpoints_due
        assert engine.root(60) == root
        engine = node.crash("keep")
        assert engine._state.checkpoints_due
        for seq in range(120, 180):
            engine.apply_log_entry(seq, Delete("b", f"{seq % 20}"))
        engine.flush()
        engine = node.restart()
        assert engine.root(60) == root
        engine.wait_for_checkpoint(60)
        assert newest(engine).root == root
        with pytest.raises(VersionGone):
            engine.root(60)
        engine.close()


def test_more_checkpoints_than_can_be_made_at_once_are_made_one_by_one() -> None:
    """Each needs the blocks of the one before: leaving one out would leave out all that follow."""
    node = Node()
    engine = node.open()
    engine.apply_log_entry(1, CREATE)
    engine.apply_log_entry(2, CreateBucket("b"))
    for seq in range(3, 60, 2):
        engine.apply_log_entry(seq, Put("b", f"{seq}", b""))
        engine.apply_log_entry(seq + 1, checkpoint_entry(seq - 1 if seq > 3 else 0))
        assert len(engine._state.checkpoints_due) <= DUE_MAX
    engine.sync()
    engine = node.crash()
    assert engine.wait_for_checkpoint(60)
    assert newest(engine).index.base_seq == 58
    assert newest(engine).root == scanned(engine)
    engine.close()


def test_a_directory_without_checkpoints_has_none(tmp_path: Path) -> None:
    """Looking makes nothing."""
    from lowwater.engine.seams.real import RealFiles

    assert Checkpoints(RealFiles(), str(tmp_path / "nothing")).complete == []
    assert not (tmp_path / "nothing").exists()


# ---------------------------------------------------------------------------- blocks that come and go


def spread(seed: int = 0) -> tuple[Machine, Any, dict[bytes, list[str]]]:
    """A database with a checkpoint, and the keys of each of its pages."""
    machine = Machine(page_keys=4, seed=seed)
    db: Any = machine.open()
    db.create_bucket("b")
    db.put_many("b", [(f"{number:03}", b"%d" % number) for number in range(80)])
    db.checkpoint()
    machine.idle()
    lows = list(db._store.page_keys())
    keys: dict[bytes, list[str]] = {low: [] for low in lows}
    for found in db.scan("b"):
        encoded = b"\1b" + found.key.encode()
        keys[max(low for low in lows if low <= encoded)].append(found.key)
    return machine, db, keys


def test_a_block_whose_keys_are_all_gone_is_not_kept() -> None:
    """Its page is joined to the one before, which must not look as if nothing had changed."""
    _, first, pages = spread()
    first.close()
    joined = 0
    for low in pages:
        _, db, keys = spread()
        for key in keys[low]:
            db.delete("b", key)
        db.flush()
        joined += low not in set(db._store.page_keys())
        assert db.root() == scanned(db)
        db.checkpoint()
        assert newest(db).root == db.root()
        assert list(db.check()) == []
        db.close()
    assert joined > 5


def test_a_page_in_the_middle_of_a_block_that_went_away_is_seen() -> None:
    """The block begins elsewhere, and no page of it that is left has changed, but for what it took over."""
    _, first, pages = spread()
    boundary = first._state.boundaries.is_boundary
    first.close()
    joined = 0
    for low, keys in pages.items():
        if len(keys) < 2 or not boundary(low):
            continue
        machine, db, _ = spread()
        db.delete("b", keys[0])
        db.checkpoint()
        machine.idle()
        for key in keys[1:]:
            db.delete("b", key)
        db.flush()
        joined += low not in set(db._store.page_keys())
        assert db.root() == scanned(db)
        db.close()
    assert joined > 3


def test_a_block_that_lost_its_first_key_belongs_to_the_one_before() -> None:
    """That one did not change, and yet there are more rows in it."""
    machine, first, pages = spread()
    boundary = first._state.boundaries.is_boundary
    first.close()
    merged = 0
    for low, keys in pages.items():
        if len(keys) < 2 or not boundary(low):
            continue
        machine, db, _ = spread()
        before = newest(db).index.block_count
        db.delete("b", keys[0])
        for _ in range(2):
            assert db.root() == scanned(db)
            db.checkpoint()
            assert newest(db).root == scanned(db)
            db.put("b", "zzz", b"")
        merged += newest(db).index.block_count < before
        machine.idle()
        db.close()
    assert merged > 3


def test_the_first_block_is_not_kept_when_its_page_is_gone() -> None:
    """Below the first page of all there is none, so none can say that it has changed."""
    for seed in range(5):
        machine = Machine(page_keys=4, seed=seed)
        db: Any = machine.open()
        for name in ("a", "b", "c"):
            db.create_bucket(name)
        db.put_many("c", [(f"{number:03}", b"") for number in range(60)])
        db.checkpoint()
        for name in ("a", "b"):
            db.delete_bucket(name)
            db.flush()
            assert db.root() == scanned(db)
        for found in list(db.scan("c")):
            db.delete("c", found.key)
            db.flush()
            assert db.root() == scanned(db)
        db.delete_bucket("c")
        db.flush()
        assert db.root() == scanned(db) == blake3(b"").hexdigest()
        db.checkpoint()
        assert newest(db).root == blake3(b"").hexdigest()
        machine.idle()
        db.close()


def test_lists_begin_at_rarer_boundaries_and_are_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With lists of a few blocks: those that did not change lie where they lay."""
    monkeypatch.setattr(content, "LIST_BLOCKS", 3)
    machine, db, _ = spread()
    before = newest(db).index.lists
    assert len(before) > 3
    db.put("b", "040", b"new")
    db.checkpoint()
    after = newest(db).index.lists
    assert len(after) == len(before)
    assert sum(each in before for each in after) == len(before) - 1
    rng = random.Random(3)
    for _ in range(30):
        for key in rng.sample(range(80), 5):
            if rng.random() < 0.5:
                db.write([Delete("b", f"{key:03}")])
            else:
                db.put("b", f"{key:03}", b"%d" % rng.randrange(10))
        db.checkpoint()
        assert newest(db).root == scanned(db)
        assert len(list(newest(db).rows())) == newest(db).index.row_count
    assert list(db.check()) == []
    machine.idle()
    db.close()


def test_keys_that_are_equal_in_their_first_500_bytes_share_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they share a page, also while they are in no page yet, and are looked up a few at a time."""
    monkeypatch.setattr(pagewalk, "RUN_CHANGES", 4)
    machine = Machine(page_keys=2)
    db: Any = machine.open()
    db.create_bucket("b")
    for letter in "abcdefgh":
        db.put_many("b", [(letter * 499 + f"{number:03}", b"") for number in range(10)])
    db.put_many("b", [(f"{number:03}", b"") for number in range(20)])
    root = db.root()
    db.checkpoint()
    assert newest(db).root == root == scanned(db)
    begins = db._state.boundaries.is_boundary
    assert any(len(known.listed.key) == 500 and begins(known.listed.key) for known in newest(db).blocks())
    assert all(known.listed.row_count >= 10 for known in newest(db).blocks() if len(known.listed.key) == 500)
    assert list(db.check()) == []
    db.close()
