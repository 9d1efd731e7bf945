"""What a database measures: every metric moves, and the list for people is the one that is scraped."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import lowwater
from lowwater.engine.database.core import EngineOptions
from lowwater.engine.database.database import Database
from lowwater.engine.database.locks import Owner
from lowwater.engine.database.opening import open_with
from lowwater.engine.log.log import LogOptions
from lowwater.errors import Conflict, Corrupt, Deadlock, LockTimeout
from lowwater.metrics import (
    ENGINE_COUNTERS,
    ENGINE_DURATIONS,
    ENGINE_GAUGES,
    ColdMetrics,
    StoreMetrics,
    TierMetrics,
    text,
)
from lowwater.recovery.warming import PAGES_AWAY

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    """The samples by name, as a scraper sees them, without the buckets of histograms."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text(registry))
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_the_table_for_people_lists_what_is_scraped(tmp_path: Path) -> None:
    """A dashboard is built from the document."""
    table = re.findall(
        r"^\| `(\w+)` \| (\w+) \| (.+) \|$", (ROOT / "docs/operating/metrics.md").read_text(), re.MULTILINE
    )
    with lowwater.open(tmp_path / "data") as db:
        metrics = [
            (metric.name + "_total" * (metric.type == "counter"), metric.type, metric.documentation)
            for metric in (
                *db.metrics().collect(),
                *ColdMetrics().collect(),
                *TierMetrics().collect(),
                *StoreMetrics().collect(),
            )
        ]
    name, documentation = PAGES_AWAY
    assert table == [*metrics, (name, "gauge", documentation)]


def test_every_metric_of_the_engine_is_there_before_anything_has_happened(tmp_path: Path) -> None:
    """A rate over a series that begins with its first event misses that event."""
    with lowwater.open(tmp_path / "data") as db:
        samples = scraped(db.metrics())
    assert {*ENGINE_COUNTERS, *ENGINE_GAUGES, *(f"{name}_count" for name in ENGINE_DURATIONS)} <= set(samples)
    assert all(samples[name] == 0 for name in ENGINE_COUNTERS if "recovery" not in name)


def _crashed(tmp_path: Path) -> Path:
    """What a process that was killed would have left: pages that are behind their log."""
    data = tmp_path / "data"
    db = open_with(
        str(data),
        log_options=LogOptions(segment_bytes=MIB),
        options=EngineOptions(checkpoint_interval_s=None),
    )
    db.create_bucket("b")
    db.put_many("b", [(f"{number:05}", b"v" * 200) for number in range(20_000)])
    db.flush()
    shutil.copytree(data / "pages", tmp_path / "pages")
    db.put_many("b", [(f"{number:05}", b"w" * 200) for number in range(0, 20_000, 2)])
    db.close()
    shutil.rmtree(data / "pages")
    (tmp_path / "pages").rename(data / "pages")
    return data


class Someone(Owner):
    """An owner of locks that is no transaction."""

    def __init__(self, started: int) -> None:
        self._started = started

    @property
    def started(self) -> int:
        return self._started

    def __hash__(self) -> int:
        return self._started


def _transact(db: Database) -> None:
    """One that commits, one that is refused, one that meets a deadlock, one that waits in vain."""
    with db.transaction() as transaction:
        transaction.put("b", "x", b"1")
    transaction = db.transaction()
    db.put("b", "y", b"1")
    with pytest.raises(Conflict):
        transaction.put("b", "y", b"2")
    transaction.abort()
    locks = db._locks
    old, young = Someone(1), Someone(2)
    locks.acquire(old, ("b", "1"), "X")
    locks.acquire(young, ("b", "2"), "X")
    with pytest.raises(LockTimeout):
        locks.acquire(young, ("b", "1"), "X", timeout_s=0.001)
    waiting = threading.Thread(target=locks.acquire, args=(old, ("b", "2"), "X"))
    waiting.start()
    while locks.table.waits < 2:
        pass
    with pytest.raises(Deadlock):
        locks.acquire(young, ("b", "1"), "X")
    locks.release_all(young)
    waiting.join()
    locks.release_all(old)


def test_every_metric_of_the_engine_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is declared and never moves misleads."""
    moved: set[str] = set()

    def look(db: Database) -> dict[str, float]:
        samples = scraped(db.metrics())
        moved.update(name for name, value in samples.items() if value)
        return samples

    data = _crashed(tmp_path)
    watched = CollectorRegistry()
    left: list[float] = []
    with open_with(
        str(data),
        options=EngineOptions(pool_bytes_max=MIB, checkpoint_interval_s=None),
        registry=watched,
        progress=lambda seq, seq_last: left.append(scraped(watched)["lowwater_recovery_left_seqs"]),
    ) as db:
        assert left
        assert left[-1] == 0
        samples = look(db)
        assert samples["lowwater_recovery_frames_total"] == db.redone == 10_000
        assert samples["storage_recovery_duration_seconds_count"] == 1
        for key in ("00001", "19999", *(f"{number:05}" for number in range(1000, 9000, 10))):
            for _ in range(3):
                db.get("b", key)
        _transact(db)
        samples = look(db)
        assert samples["lowwater_transactions_begun_total"] == 2
        assert samples["lowwater_transactions_committed_total"] == 1
        assert samples["lowwater_transactions_aborted_total"] == 1
        assert samples["lowwater_transactions_conflicts_total"] == 1
        assert samples["storage_buffer_pool_size_bytes"] == (
            samples["lowwater_pool_dirty_bytes"]
            + samples["lowwater_pool_clean_bytes"]
            + samples["lowwater_pool_objects_bytes"]
        )
        for _ in range(4):
            db.put_many("b", [(f"{each:05}", b"v" * 20) for each in range(5000)])
            db.flush()
        samples = look(db)
        before = samples["lowwater_pages_deleted_total"]
        for number in range(2000):
            db.delete("b", f"{number:05}")
        assert look(db)["lowwater_redo_lag_seqs"] > 0
        db.flush()
        samples = look(db)
        assert samples["lowwater_pages_deleted_total"] > before
        assert samples["storage_checkpoint_creation_duration_seconds_count"] == 0
        db.checkpoint()
        samples = look(db)
        assert samples["storage_checkpoint_creation_duration_seconds_count"] == 1
        assert samples["lowwater_redo_lag_seqs"] == 0
        assert samples["lowwater_dirty_age_seconds"] == 0
        assert samples["lowwater_flush_duration_seconds_count"] == samples["lowwater_flush_groups_total"]
    if any(left):
        moved.add("lowwater_recovery_left_seqs")
    # There is nobody in this version who sets them above 0: nothing is shipped, and nothing purged.
    waiting = {"storage_s3_hwm", "storage_orchestrator_lwm"}
    # Of pages that leave: tests/engine/test_away.py.
    waiting |= {name for name in ENGINE_COUNTERS if "_pages_brought_" in name}
    waiting |= {"lowwater_pages_left_total", "lowwater_pages_awaited"}
    declared = {*ENGINE_COUNTERS, *ENGINE_GAUGES, *(f"{name}_count" for name in ENGINE_DURATIONS)}
    assert declared - moved == waiting


def test_a_fed_engine_shows_the_mark_that_it_was_told(tmp_path: Path) -> None:
    """The one metric that only an orchestrator moves."""
    with lowwater.Engine(tmp_path / "data") as engine:
        engine.apply_log_entry(1, lowwater.Create(bytes(16), bytes(16)))
        engine.apply_log_entry(2, lowwater.CreateBucket("b"))
        engine.sync()
        engine.update_low_water_mark(2)
        assert scraped(engine.metrics())["storage_orchestrator_lwm"] == 2


def test_a_fed_engine_counts_the_transactions_that_it_is_fed(tmp_path: Path) -> None:
    """Nobody has a handle there: its entries begin and end them, a refused commit too."""
    names = [f"lowwater_transactions_{name}_total" for name in ("begun", "committed", "aborted", "conflicts")]
    with lowwater.Engine(tmp_path / "data") as engine:
        engine.apply_log_entry(1, lowwater.Create(bytes(16), bytes(16)))
        engine.apply_log_entry(2, lowwater.CreateBucket("b"))
        entries = [
            lowwater.Begin(),
            lowwater.Put("b", "x", b"1", txn=3),
            lowwater.Begin(),
            lowwater.Put("b", "x", b"2", txn=5),  # refused: the first may still commit
            lowwater.Abort(3, 3),  # to a savepoint, which ends nothing
            lowwater.Commit(3),
            lowwater.Commit(5),  # refused, as it is doomed
            lowwater.Begin(),
            lowwater.Put("b", "y", b"1", txn=10),
            lowwater.Put("b", "y", b"2"),  # dooms it
            lowwater.Abort(10),
        ]
        for seq, entry in enumerate(entries, 3):
            engine.apply_log_entry(seq, entry)
        samples = scraped(engine.metrics())
        assert [samples[name] for name in names] == [3, 1, 2, 2]
        engine.apply_log_entry(3, entries[0])
        engine.apply_log_entry(13, entries[-1])
        samples = scraped(engine.metrics())
        assert [samples[name] for name in names] == [3, 1, 2, 2]


def _bytes_below(*directories: Path) -> int:
    return sum(path.stat().st_size for each in directories for path in each.iterdir())


def test_the_hot_tier_is_all_that_takes_room_on_the_local_disk(tmp_path: Path) -> None:
    """Packs of checkpoints and the cache of cold reads may be larger than log and pages."""
    data = tmp_path / "data"
    config = {"wal": {"rotate_max_bytes": "1 MiB"}, "retention": {"age_max_s": 0, "check_interval_s": 1}}
    with lowwater.open(data, tier=(tmp_path / "archive").as_uri(), config=config) as db:
        db.create_bucket("b")
        for number in range(40):
            db.put("b", f"{number:04}", os.urandom(100_000))
        db.checkpoint()
        db.flush()
        db.ship()
        deadline = time.monotonic() + 60
        while not db.marks().purged and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(db.get("b", "0000").value) == 100_000  # through the cache
        samples = scraped(db.metrics())
        checkpoints = _bytes_below(data / "checkpoints", data / "packs")
        assert samples["lowwater_checkpoints_size_bytes"] == checkpoints > 0
        assert samples["lowwater_cold_cache_bytes"] == _bytes_below(data / "cache") > 0
        parts = ("storage_wal_size_bytes", "lowwater_pages_size_bytes")
        parts += ("lowwater_checkpoints_size_bytes", "lowwater_cold_cache_bytes")
        assert samples["storage_hot_tier_size_bytes"] == sum(samples[name] for name in parts)


def test_events_tell_object_size_and_duration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who looks for a slow upload, or a lost object, has the log of events before anything else."""
    archive, data = tmp_path / "archive", tmp_path / "data"
    config = {"wal": {"rotate_max_bytes": "1 MiB"}}
    with caplog.at_level(logging.DEBUG, "lowwater"):
        with lowwater.open(data, tier=archive.as_uri(), config=config) as db:
            db.create_bucket("b")
            db.put_many("b", [(f"{number:05}", b"v" * 1000) for number in range(3000)])
            db.checkpoint()
            db.ship()
        lowwater.restore(archive.as_uri(), tmp_path / "restored")
    told: dict[str, list[dict[str, Any]]] = {}
    for record in caplog.records:
        if isinstance(record.msg, dict):
            told.setdefault(record.msg["event"], []).append(record.msg)
    for event in ("uploaded", "published", "checkpoint shipped", "fetched"):
        for fields in told[event]:
            path = Path(fields["object"].removeprefix("file://"))
            assert path.is_file(), event
            assert 0 < fields["bytes"] <= path.stat().st_size or event == "checkpoint shipped", event
            assert fields["duration_s"] >= 0
    (stored,) = (data / "checkpoints").iterdir()
    (made,) = told["checkpoint made"]
    assert made["path"] == str(stored)
    assert made["rows"] == made["rows_written"] == 3001
    assert made["bytes"] == _bytes_below(data / "checkpoints", data / "packs")
    assert {fields["bytes"] for fields in told["checkpoint shipped"]} == {made["bytes"]}
    segments = sorted((data / "wal").glob("segment-*"))
    assert {fields["path"] for fields in told["sealed"]} >= {str(path) for path in segments}
    uploaded, shipped = ({each["seq_last"] for each in told[name]} for name in ("uploaded", "shipped"))
    assert uploaded == shipped
    (restored,) = told["restored"]
    assert restored["bytes"] > 0
    assert restored["path"] == str(tmp_path / "restored")
    documented = (ROOT / "docs/operating/metrics.md").read_text()
    for event in told:
        if event != "claimed":
            assert f"`{event}`" in documented, event


def test_the_age_of_changes_is_that_of_the_oldest(tmp_path: Path) -> None:
    """An alarm on it must not be put off by writing on."""
    with open_with(str(tmp_path / "data"), options=EngineOptions(checkpoint_interval_s=None)) as db:
        db.create_bucket("b")
        db.flush()
        ages = []
        for number in range(5):
            db.put("b", "k", b"%d" % number)
            ages.append(scraped(db.metrics())["lowwater_dirty_age_seconds"])
        assert ages == sorted(ages)
        assert ages[0] > 0


def test_ready_objects_keep_to_their_share_of_the_pool(tmp_path: Path) -> None:
    """Objects that are read again move to the new generation, where they take room as any other does."""
    with open_with(
        str(tmp_path / "data"), options=EngineOptions(pool_bytes_max=2 * MIB, checkpoint_interval_s=None)
    ) as db:
        db.create_bucket("b")
        keys = [f"{number:04}" for number in range(4000)]
        db.put_many("b", [(key, b"v" * 100) for key in keys])
        for _ in range(6):
            for key in keys:
                db.get("b", key)
                db.get("b", key)
        state = db._state
        share = state.pool_bytes_max // 8
        assert 0 < state.ready_bytes <= 2 * share + 1000
        assert (len(state._ready_new) + len(state._ready_old)) * 500 <= state.ready_bytes


def test_recovery_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An operator who waits for it wants to know what for."""
    data = _crashed(tmp_path)
    with caplog.at_level(logging.INFO, "lowwater.engine"), lowwater.open(data):
        pass
    (told,) = [each.msg for each in caplog.records if each.name == "lowwater.engine"]
    assert isinstance(told, dict)
    assert told["event"] == "recovered"
    assert told["frames"] == 10_000
    assert told["seq_last"] > told["seq_first"] > 1
    assert told["duration_s"] >= 0


@pytest.mark.parametrize("close", [Database.close, lambda db: None], ids=["closed", "open"])
def test_a_scrape_needs_no_lock_and_no_open_database(
    tmp_path: Path, close: Callable[[Database], None]
) -> None:
    """A scrape that waits for a writer, or raises, is a gap in every graph."""
    db = lowwater.open(tmp_path / "data")
    collector = db._metrics
    db.create_bucket("b")
    close(db)
    with db._state.lock:
        done: list[int] = []
        scrape = threading.Thread(target=lambda: done.append(len(list(collector.collect()))))
        scrape.start()
        scrape.join(60)
        assert done
    db.close()


def test_a_database_that_cannot_be_opened_leaves_its_registry_alone(tmp_path: Path) -> None:
    """Who tries again does so with the same one."""
    data = _crashed(tmp_path)
    segment = sorted((data / "wal").glob("segment-*"))[-1]
    held = segment.read_bytes()
    registry = CollectorRegistry()
    at = held.index(b"w" * 200)
    segment.write_bytes(held[:at] + b"\xff" * 8 + held[at + 8 :])
    with pytest.raises(Corrupt):
        lowwater.open(data, registry=registry)
    segment.write_bytes(held)
    with lowwater.open(data, registry=registry):
        assert scraped(registry)["lowwater_recovery_frames_total"] == 10_000
    assert list(registry.collect()) == []
