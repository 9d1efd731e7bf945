"""Reads below the horizon of a database that ships: from the archive, and the same as they were."""

from __future__ import annotations

import random
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tests.tiering.shipping import FedMachine, TieredMachine, tier_options

import lowwater
from lowwater.chaos.failing_store import FaultyStore, StoreFault
from lowwater.engine.database.database import Database
from lowwater.engine.database.reads import Reads
from lowwater.errors import Corrupt, InputError, NotFound, RetryError, VersionGone
from lowwater.tiering import cold_versions, fetcher
from lowwater.tiering.names import WAL

PURGING = tier_options(retention={"age_max_s": 1.0, "check_interval_s": 1.0})


class Life:
    """A database, and what it had at each seq that was looked at, with its root."""

    def __init__(self, seed: int = 1) -> None:
        self.machine = TieredMachine(servers=[FaultyStore()], options=PURGING, seed=seed)
        self.db: Any = self.machine.open()
        self.db.move_horizon(1)
        self.rng = random.Random(seed)
        self.had: dict[int, tuple[dict[str, dict[str, Any]], str]] = {}

    def look(self) -> None:
        db = self.db
        content = {bucket: {each.key: each for each in db.scan(bucket)} for bucket in db.buckets()}
        self.had[db.marks().applied] = content, db.root()

    def write(self, count: int) -> None:
        db, rng = self.db, self.rng
        for number in range(count):
            bucket, key = rng.choice(("b", "cc")), f"k/{rng.randrange(40):02}"
            large = rng.random() < 0.1
            choice = rng.random()
            if choice < 0.7:
                value = rng.randbytes(900 if large else 9)
                db.put(bucket, key, value, {"n": str(number)} if number % 3 else None)
            elif choice < 0.85:
                db.delete(bucket, key) if self._is_there(bucket, key) else db.put(bucket, key, b"")
            else:
                with db.transaction() as txn:
                    txn.put("b", key, b"of a transaction")
                    txn.put("cc", key, rng.randbytes(500))
            if number % 25 == 0:
                self.look()

    def _is_there(self, bucket: str, key: str) -> bool:
        try:
            self.db.get(bucket, key)
        except NotFound:
            return False
        return True

    def run(self) -> None:
        """Histories, checkpoints between them, all shipped, and what may be purged and dropped is."""
        db = self.db
        db.create_bucket("b")
        self.look()
        db.create_bucket("cc")
        for _ in range(3):
            self.write(120)
            db.checkpoint()
            self.machine.later(30)
        self.write(40)
        assert len(db.catalogue.checkpoints) >= 2
        db.flush()

    def require_as_it_was(self, seqs: list[int] | None = None) -> None:
        db = self.db
        for seq in seqs or list(self.had):
            content, root = self.had[seq]
            assert db.buckets(at=seq) == sorted(content)
            assert db.root(seq) == root, seq
            for bucket, expected in content.items():
                assert {each.key: each for each in db.scan(bucket, at=seq)} == expected
                listed = db.list(bucket, prefix="k/", limit=7, at=seq)
                assert [each.key for each in listed.objects] == sorted(expected)[:7]
                assert db.list(bucket, delimiter="/", at=seq).prefixes == (["k/"] if expected else [])
                for number in range(0, 40, 3):
                    self._require_key(bucket, f"k/{number:02}", seq, expected)

    def _require_key(self, bucket: str, key: str, seq: int, expected: dict[str, Any]) -> None:
        db, there = self.db, expected.get(key)
        if there is None:
            with pytest.raises(NotFound):
                db.get(bucket, key, at=seq)
            return
        assert db.get(bucket, key, at=seq) == db.read(bucket, key, seq) == there
        head = db.head(bucket, key, at=seq)
        assert (head.size_bytes, head.seq, head.metadata) == (len(there.value), there.seq, there.metadata)
        assert db.read_range(bucket, key, 0, 5, at=seq) == there.value[:5]
        with pytest.raises(InputError):
            db.read_range(bucket, key, len(there.value) + 1, 5, at=seq)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_gone_here_is_read_from_the_archive(seed: int) -> None:
    """Keys, parts of values, scans, pages of keys, buckets and roots, in the next life too."""
    life = Life(seed)
    life.run()
    db = life.db
    db.move_horizon(None)
    db.put("b", "last", b"1")
    life.machine.later(60)
    assert db.marks().purged > min(life.had)
    with pytest.raises(VersionGone):
        db._pin(min(life.had))
    life.require_as_it_was()
    life.machine.crash("random", life.rng)
    life.db = life.machine.open()
    life.require_as_it_was(list(life.had)[::4])
    life.db.close()


def test_what_a_limit_of_versions_has_dropped_is_read_there_too() -> None:
    """Also where a scan finds out in the middle of its keys."""
    life = Life(7)
    life.run()
    life.db.limit_versions(1)
    for number in range(20, 40):
        life.db.put("b", f"k/{number:02}", b"newer")
    life.db.flush()
    life.machine.later(20)
    life.require_as_it_was()
    life.db.close()


def test_a_time_below_the_horizon_is_a_moment_like_any_other() -> None:
    life = Life(8)
    db = life.db
    db.create_bucket("b")
    db.put("b", "k", b"first")
    life.machine.later(5)
    before = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=life.machine.clock.now_us())
    life.machine.later(5)
    db.put("b", "k", b"second")
    db.move_horizon(None)
    life.machine.later(20)
    db.flush()
    life.machine.later(20)
    assert db.marks().purged > 3
    assert db.get("b", "k", at=before).value == b"first"
    assert db.get("b", "k").value == b"second"
    db.close()


def test_a_store_that_is_away_is_told_and_no_absence_is_made_of_it() -> None:
    """Neither does it say that the version is gone: calling again is right. What was not written yet is told
    as ever."""
    life = Life(9)
    life.run()
    life.db.move_horizon(None)
    life.machine.later(60)
    seq = list(life.had)[3]
    life.db.close()
    life.db = life.machine.open()
    for each in life.machine.files.list("db/cache"):
        life.machine.files.remove(f"db/cache/{each}")
    life.machine.server.fault = lambda _: StoreFault(error="timed_out")
    for call in (lambda: life.db.get("b", "k/01", at=seq), lambda: list(life.db.scan("b", at=seq))):
        with pytest.raises(RetryError):
            call()
    with pytest.raises(VersionGone, match="not written yet"):
        life.db.get("b", "k/01", at=10**6)
    life.machine.server.fault = None
    life.require_as_it_was([seq])
    life.db.close()


def test_a_fed_engine_reads_them_too() -> None:
    from lowwater.engine.format.entries import Control, CreateBucket, Put
    from lowwater.engine.format.format import Kind

    machine = FedMachine(options=PURGING)
    engine: Reads = machine.open()
    machine.order.engines.append(engine)  # type: ignore[arg-type]
    machine.order.deliver(engine)  # type: ignore[arg-type]
    machine.order.order(CreateBucket("b"))
    seqs = [machine.order.order(Put("b", "k", b"%d" % number * 100)) for number in range(300)]
    machine.order.order(Control(Kind.HORIZON, {"seq": seqs[-1]}))
    machine.later(20)
    engine.flush()
    machine.later(20)
    assert engine.marks().purged > seqs[100]
    for number in (0, 150, 299):
        assert engine.get("b", "k", at=seqs[number]).value == b"%d" % number * 100
    engine.close()


def test_a_copy_of_a_purged_value_reads_the_store_without_the_lock() -> None:
    """Else one copy would hold up every writer as long as a store takes to answer."""
    machine = TieredMachine(servers=[FaultyStore()], options=PURGING)
    db: Any = machine.open()
    db.create_bucket("b")
    values = {f"k{number}": bytes([number]) * 3000 for number in range(8)}
    for key, value in values.items():
        db.put("b", key, value)
    machine.later(20)
    db.flush()
    db.put("b", "later", b"1")
    machine.later(40)
    assert db.marks().purged > 8
    session = db.session()
    held: list[bool] = []
    machine.server.fault = lambda _: held.append(db._state.lock._is_owned())
    for key in values:
        (session if key > "k4" else db).copy("b", key, "b", f"copy of {key}")
    assert held
    assert not any(held)
    machine.server.fault = None
    for key, value in values.items():
        assert db.get("b", f"copy of {key}").value == value
    machine.crash("lose", random.Random(1))
    db = machine.open()
    assert db.get("b", "copy of k3").value == values["k3"]
    assert list(db.check()) == []
    db.close()


def test_without_an_archive_they_are_gone(tmp_path: Any) -> None:
    import lowwater

    with lowwater.open(tmp_path / "db") as db:
        assert isinstance(db, Database)
        db.create_bucket("b")
        seq = db.put("b", "k", b"1")
        db.put("b", "k", b"2")
        for call in (lambda: db.get("b", "k", at=seq), lambda: db.root(seq), lambda: db.scan("b", at=seq)):
            with pytest.raises(VersionGone):
                call()


def test_a_scan_gives_what_comes_before_what_cannot_be_read() -> None:
    """Values of many keys are read together, and whoever stops before a damaged one never hears of it."""
    machine = TieredMachine(servers=[FaultyStore()], options=PURGING)
    db: Any = machine.open()
    db.move_horizon(1)
    db.create_bucket("b")
    rng = random.Random(1)
    for number in range(60):
        db.put("b", f"{number:02}", rng.randbytes(7000))
    db.checkpoint()
    seq = db.marks().applied
    db.ship()
    for number in range(60):
        db.put("b", f"{number:02}", b"new")
    db.checkpoint()
    db.move_horizon(db.marks().applied)
    for _ in range(2):
        db.ship()
        db.flush()
        machine.later(20)
        db.put("b", "zz", bytes(100_000))
    assert db.marks().purged >= seq
    name = sorted(each for each in machine.server.objects.data if each.startswith(WAL))[3]
    machine.server.flip_byte(name, len(machine.server.objects.data[name]) // 2, 3)
    sound = 0
    with suppress(Corrupt):
        for number in range(60):
            db.get("b", f"{number:02}", at=seq)
            sound += 1
    assert 17 < sound < 60
    found: list[str] = []
    with pytest.raises(Corrupt):
        found.extend(each.key for each in db.scan("b", at=seq))
    assert found == [f"{number:02}" for number in range(sound)]
    for count in range(sound + 1):
        assert len([*islice(db.scan("b", at=seq), count)]) == count
    db.close()


@pytest.mark.parametrize("batch_bytes", [1, 2000, 30_000])
@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_a_scan_gives_values_that_are_larger_than_what_it_holds(
    monkeypatch: pytest.MonkeyPatch, batch_bytes: int, with_checkpoint: bool
) -> None:
    """In their turn, also those that were copied."""
    monkeypatch.setattr(cold_versions, "BATCH_BYTES", batch_bytes)
    machine = TieredMachine(servers=[FaultyStore()], options=PURGING)
    db: Any = machine.open()
    db.create_bucket("b")
    rng = random.Random(2)
    keys = [f"{number:02}" for number in range(80)]
    rng.shuffle(keys)
    for key in keys:
        db.put("b", key, rng.randbytes(rng.choice([0, 5, 900, 5000, 40_000])))
    for key in keys[:20]:
        db.copy("b", key, "b", f"{key} copied")
    if with_checkpoint:
        db.checkpoint()
    db.put("b", keys[0], b"after it")
    seq = db.marks().applied
    expected = [(each.key, each.value, each.seq) for each in db.scan("b")]
    for key in keys:
        db.put("b", key, b"new")
    db.ship()
    db.move_horizon(db.marks().applied)
    db.flush()
    assert [(each.key, each.value, each.seq) for each in db.scan("b", at=seq)] == expected
    db.close()


def _units_read(db: Any) -> float:
    """Units of the archive's objects that were not in memory."""
    return sum(
        sample.value
        for family in db.metrics().collect()
        for sample in family.samples
        if sample.name in ("lowwater_cold_cache_hits_total", "lowwater_cold_cache_misses_total")
    )


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_a_scan_of_what_is_older_reads_together_what_lies_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_checkpoint: bool
) -> None:
    """A key at a time, each would read a part of the log of its own: keys are not written in their order."""
    monkeypatch.setattr(fetcher, "MEMORY_BYTES", 2**19)
    keys = [f"k{number:04}" for number in range(1200)]
    rng = random.Random(7)
    rng.shuffle(keys)
    config = {"engine": {"checkpoint_entry_interval_s": "none"}, "wal": {"sync_mode": "none"}}
    uri = f"file://{tmp_path}/archive"
    (tmp_path / "archive").mkdir()
    with lowwater.open(tmp_path / "original", tier=uri, config=config) as db:
        db.create_bucket("b")
        db.put_many("b", [(key, rng.randbytes(1500)) for key in keys])
        if with_checkpoint:
            db.checkpoint()
        db.ship()
        with db.transaction() as txn:
            txn.put("b", "k0100", b"of a transaction")
            txn.delete("b", "k0101")
        seq = db.marks().applied
        expected = [(each.key, each.value, each.seq) for each in db.scan("b")]
        for key in keys[:10]:
            db.delete("b", key)
        db.checkpoint()
        db.ship()
    lowwater.restore(uri, tmp_path / "to", clone=True)
    with lowwater.open(tmp_path / "to", config=config) as db:
        before = _units_read(db)
        assert [(each.key, each.value, each.seq) for each in db.scan("b", at=seq)] == expected
        assert _units_read(db) - before < len(expected) / 4
