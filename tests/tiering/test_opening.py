"""`lowwater.open` and `lowwater.Engine` with a tier, on real files and with threads."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.tiering.shipping import FedMachine
from tests.tiering.test_shipper import values_in

import lowwater
from lowwater.chaos.failing_store import FaultyStore
from lowwater.engine.log.log import LogOptions
from lowwater.errors import (
    ArchivedOnly,
    Busy,
    InputError,
    InvalidConfig,
    LowwaterError,
    StoreUnavailable,
    TimedOut,
)
from lowwater.metrics import STORE_COUNTERS, TIER_COUNTERS, TIER_DURATIONS, TIER_GAUGES
from lowwater.tiering.folder_store import FolderStore
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.shipper import Shipper
from lowwater.tiering.tiered_opening import open_tiered


def server_of(folder: Path) -> FaultyStore:
    """What is in a folder, for the helpers."""
    store = FolderStore(str(folder))
    objects = MemoryObjects()
    for found in store.list():
        objects.add(found.name, store.read(found.name))
    return FaultyStore(objects=objects)


def test_closing_ships_the_checkpoint_that_was_made(tmp_path: Path) -> None:
    """Whoever makes one before going expects it in the archive: a restore begins with it."""
    archive = f"file://{tmp_path}/archive"
    with lowwater.open(tmp_path / "db", tier=archive) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"{number}", b"value") for number in range(100)])
        db.checkpoint()
        seq = db.checkpoints()[0].seq
    assert lowwater.restore(archive, tmp_path / "again", clone=True).checkpoint_seq == seq


def test_closing_does_not_wait_for_a_store_that_is_down(tmp_path: Path) -> None:
    """The next life ships it."""
    archive = tmp_path / "archive"
    db = lowwater.open(tmp_path / "db", tier=f"file://{archive}")
    db.create_bucket("b")
    db.ship()
    shutil.move(archive, tmp_path / "away")
    archive.write_bytes(b"in its place")
    db.put("b", "k", b"v")
    with pytest.raises(LowwaterError):
        db.ship()
    db.checkpoint()
    db.close()
    archive.unlink()
    shutil.move(tmp_path / "away", archive)
    with lowwater.open(tmp_path / "db", tier=f"file://{archive}") as db:
        db.ship(timeout=120)
        seq = db.checkpoints()[0].seq
    assert lowwater.restore(f"file://{archive}", tmp_path / "again", clone=True).checkpoint_seq == seq


@pytest.mark.slow
def test_with_a_tier_checkpoints_are_made_without_being_asked_for(tmp_path: Path) -> None:
    """A restore never replays all history. Here by size; without a tier there are none."""
    archive = f"file://{tmp_path}/archive"
    value = random.Random(1).randbytes(2**20)
    for tier in (archive, None):
        with lowwater.open(tmp_path / f"db {tier is None}", tier=tier) as db:
            db.create_bucket("b")
            for number in range(260):
                db.put("b", f"{number}", value)
            while tier and not db.checkpoints():
                threading.Event().wait(0.1)
            assert bool(db.checkpoints()) == bool(tier)
    assert lowwater.restore(archive, tmp_path / "again", clone=True).checkpoint_seq > 250


def test_checkpoints_by_themselves_can_be_switched_off(tmp_path: Path) -> None:
    """Each way on its own: what is not set has its default, and none is not unset."""
    config: dict[str, Any] = {"engine": {"checkpoint_entry_interval_s": "none"}}
    with lowwater.open(tmp_path / "one", tier=f"file://{tmp_path}/archive", config=config) as db:
        assert db.options.checkpoint_entry_interval_s is None
        assert db.options.checkpoint_entry_bytes == 2**28
    config["engine"]["checkpoint_entry_bytes"] = "none"
    with lowwater.open(tmp_path / "two", tier=f"file://{tmp_path}/other", config=config) as db:
        assert db.options.checkpoint_entry_interval_s is None
        assert db.options.checkpoint_entry_bytes is None


def test_a_user_ships_to_a_folder_and_purges(tmp_path: Path) -> None:
    """The whole of it, by the public names."""
    archive = tmp_path / "archive"
    config = {
        "wal": {"rotate_max_bytes": "64 KiB"},
        "retention": {"age_max_s": "0 s", "check_interval_s": "100 ms"},
    }
    with lowwater.open(tmp_path / "db", tier=f"file://{archive}", config=config) as db:
        db.create_bucket("b")
        written = {f"{n}": random.Random(n).randbytes(2000) for n in range(200)}
        for key, value in written.items():
            db.put("b", key, value)
        hwm = db.ship(timeout=60)
        assert hwm == db.marks().hwm > 200
        assert db.shipping().as_dict()["state"] in ("idle", "working")
        db.flush()
        for _ in range(600):
            if db.marks().purged > 100:
                break
            threading.Event().wait(0.1)
        assert db.marks().purged > 100
        assert {found.key: found.value for found in db.scan("b")} == written
        assert next(iter(db.log())).seq == 1
        assert list(db.check()) == []
    from tests.tiering.shipping import archived

    assert values_in(archived(server_of(archive))[1]) == written


def test_checkpoints_follow_the_log_into_the_store(tmp_path: Path) -> None:
    """Nobody has to ask for it; a second one takes only what is new, and a copy stands on them."""
    archive = tmp_path / "archive"
    config = {"tier": {"uri": f"file://{archive}"}, "shipping": {"interval_s": "100 ms"}}

    def stored(folder: str) -> set[str]:
        return {found.name for found in FolderStore(str(archive)).list(folder)}

    with lowwater.open(tmp_path / "db", config=config) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"{n:05}", b"%d" % n) for n in range(5000)])
        ids = [db.checkpoint()]
        db.put("b", "00001", b"changed")
        ids.append(db.checkpoint())
        db.ship(timeout=60)
        last = f"checkpoints/checkpoint-{ids[-1]}.ckpt"
        for _ in range(600):
            if last in stored("checkpoints/") and db.shipping().as_dict()["state"] == "idle":
                break
            threading.Event().wait(0.1)
        assert last in stored("checkpoints/")
        assert stored("data/packs/")
        db.ship(timeout=60)
        root = db.root()
    assert not [finding for finding in lowwater.check(f"file://{archive}") if finding.severity != "note"]
    restored = lowwater.restore(f"file://{archive}", tmp_path / "copy")
    assert restored.checkpoint_seq == int(ids[-1][:20])
    with lowwater.open(tmp_path / "copy", config=config) as db:
        assert db.root() == root


def test_every_metric_of_shipping_moves(tmp_path: Path) -> None:
    """One that is declared and never shown misleads."""
    registry = CollectorRegistry()
    config = {
        "wal": {"rotate_max_bytes": "64 KiB"},
        "retention": {"age_max_s": "0 s", "check_interval_s": "50 ms"},
        "shipping": {"interval_s": "200 ms"},
    }
    archive = tmp_path / "archive"
    seen: dict[str, set[float]] = {}

    def look() -> None:
        for family in registry.collect():
            for sample in family.samples:
                if "le" not in sample.labels:
                    seen.setdefault(sample.name, set()).add(sample.value)

    with lowwater.open(tmp_path / "db", tier=f"file://{archive}", config=config, registry=registry) as db:
        db.create_bucket("b")
        look()
        for number in range(100):
            db.put("b", f"{number}", bytes(3000))
            look()
        uploading = True

        def watch() -> None:
            while uploading:
                look()

        thread = threading.Thread(target=watch)
        thread.start()
        db.ship(timeout=60)
        db.flush()
        db.put("b", "more", random.Random(1).randbytes(200_000))
        db.ship(timeout=60)
        for _ in range(300):
            if registry.get_sample_value("lowwater_retention_purged_bytes_total"):
                break
            threading.Event().wait(0.1)
        archive.rename(tmp_path / "away")
        (tmp_path / "archive").write_bytes(b"in the way")
        db.put("b", "again", b"")
        with pytest.raises(LowwaterError):
            db.ship(timeout=1)
        look()
        uploading = False
        thread.join()
    names = {*STORE_COUNTERS, "lowwater_store_request_duration_seconds_count"}
    names -= {"lowwater_store_repeated_total"}  # tests/tiering/test_opendal_store.py has some
    names |= {*TIER_COUNTERS, *TIER_GAUGES, "lowwater_uploader_chunk_bytes_count"}
    names |= {f"{name}_count" for name in TIER_DURATIONS}
    names -= {"lowwater_shipping_alarm"}  # tests/tiering/test_shipper.py has one
    assert {name for name in names if len(seen[name]) < 2} == set()


def test_a_bad_tier_is_refused_before_a_directory_is_made(tmp_path: Path) -> None:
    """With what to write instead."""
    for bad in ("nonsense://x", "s3://", "", 5):
        with pytest.raises(LowwaterError) as caught:
            lowwater.open(tmp_path / "db", tier=bad)  # type: ignore[arg-type]
        assert isinstance(caught.value, InputError)
        assert caught.value.hint
    assert not (tmp_path / "db").exists()


def test_a_prefix_of_another_database_is_refused(tmp_path: Path) -> None:
    """Two clusters in one place would each take the other's objects for its own."""
    tier = f"file://{tmp_path}/archive"
    with lowwater.open(tmp_path / "one", tier=tier) as db:
        db.create_bucket("b")
        db.ship()
    with pytest.raises(lowwater.errors.OtherCluster):
        lowwater.open(tmp_path / "two", tier=tier)


def test_an_endpoint_that_does_not_answer_holds_up_no_database_that_has_shipped(tmp_path: Path) -> None:
    """Its history is in its log; the store is asked in the background."""
    with lowwater.open(tmp_path / "db", tier=f"file://{tmp_path}/archive") as db:
        db.create_bucket("b")
        db.ship()
    options = "access_key_id=x&secret_access_key=very-secret&region=us-east-1"
    config = {"tier": {"timeout_ms": 100, "attempts_max": 1}}
    with lowwater.open(
        tmp_path / "db", tier=f"s3://bucket/prefix?endpoint=http://127.0.0.1:1&{options}", config=config
    ) as db:
        db.put("b", "k", b"v")
        with pytest.raises((StoreUnavailable, TimedOut, Busy)) as caught:
            db.ship(timeout=1)
        assert "very-secret" not in str(caught.value)
        assert "very-secret" not in str(db.shipping())
        assert db.get("b", "k").value == b"v"


@pytest.mark.parametrize("scheme", ["file", "shared_fs"])
def test_a_folder_that_is_away_holds_up_no_database(tmp_path: Path, scheme: str) -> None:
    """A share that is not mounted is a store that is down: nothing is made in its place, and when it is back,
    shipping goes on where it was."""
    share = tmp_path / "share"
    (share / "archive").mkdir(parents=True)
    tier = f"{scheme}://{share}/archive"
    with lowwater.open(tmp_path / "db", tier=tier) as db:
        db.create_bucket("b")
        hwm = db.ship()
    for away in (share / "archive", share):
        away.rename(tmp_path / "unmounted")
        with lowwater.open(tmp_path / "db", tier=tier, config={"shipping": {"interval_s": "50 ms"}}) as db:
            db.put("b", str(away), b"v")
            with pytest.raises(StoreUnavailable, match="away") as caught:
                db.ship(timeout=0.1)
            assert "mount" in caught.value.hint
            assert "away" in str(db.shipping().as_dict())
            assert not away.exists()
            (tmp_path / "unmounted").rename(away)
            assert db.ship(timeout=60) > hwm
            hwm = db.marks().hwm
    share.rename(tmp_path / "unmounted")
    share.write_bytes(b"no folder")
    with lowwater.open(tmp_path / "db", tier=tier) as db:
        assert db.marks().hwm >= hwm
        assert db.get("b", str(share)).value == b"v"


def test_a_new_folder_is_made_for_an_archive_that_begins(tmp_path: Path) -> None:
    """By its plain path; but not below one that is missing, where something may not be mounted."""
    lowwater.open(tmp_path / "db").close()
    tier = f"file://{tmp_path}/mount/archive"
    config = {"shipping": {"interval_s": "50 ms"}, "tier": {"uri": tier, "regions": [f"{tmp_path}/other"]}}
    with lowwater.open(tmp_path / "db", config=config) as db:
        db.create_bucket("b")
        with pytest.raises(StoreUnavailable):
            db.ship(timeout=0.1)
        assert not (tmp_path / "mount").exists()
        (tmp_path / "mount").mkdir()
        assert db.ship(timeout=60) > 0
    for folder in ("mount/archive", "other"):
        assert (tmp_path / folder / "cluster.cbor").exists()


@pytest.mark.parametrize("make", [lowwater.open, lowwater.Engine])
def test_nothing_is_made_beside_a_share_that_is_away(tmp_path: Path, make: Any) -> None:
    """Its history may be there: a new database would begin another one."""
    with pytest.raises(lowwater.errors.StoreMissing):
        make(tmp_path / "db", tier=f"shared_fs://{tmp_path}/share")
    assert not (tmp_path / "db").exists()


def test_the_tier_can_stand_in_the_configuration(tmp_path: Path) -> None:
    """Also in the reference plan's words."""
    with lowwater.open(tmp_path / "db", config={"tier": {"uri": f"file://{tmp_path}/archive"}}) as db:
        db.create_bucket("b")
        assert db.ship() > 0
    assert (tmp_path / "archive" / "cluster.cbor").exists()
    with pytest.raises(InvalidConfig):
        lowwater.open(tmp_path / "db", config={"tier": {"regions": ["file:///x"]}})


def test_a_registry_serves_one_database_after_the_other(tmp_path: Path) -> None:
    """As without a tier."""
    registry = CollectorRegistry()
    for _ in range(2):
        with lowwater.open(tmp_path / "db", tier=f"file://{tmp_path}/archive", registry=registry) as db:
            assert db.metrics() is registry
            assert registry.get_sample_value("storage_s3_shipping_lag_seconds") is not None
    assert list(registry.collect()) == []


def test_a_directory_without_a_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    """Where none is to be made."""
    with pytest.raises(lowwater.errors.NotFound):
        lowwater.open(tmp_path / "none", tier=f"file://{tmp_path}/archive", create=False)
    assert not (tmp_path / "none").exists()


def test_a_fed_engine_needs_somebody_who_orders(tmp_path: Path) -> None:
    """What was shipped is recorded in its log."""
    with pytest.raises(InputError, match="orders entries"):
        lowwater.Engine(tmp_path / "db", tier=f"file://{tmp_path}/archive")
    engine = lowwater.Engine(tmp_path / "db")
    engine.close()


def test_a_fed_engine_ships_and_says_how_far() -> None:
    """By the name that the reference plan has for it."""
    machine = FedMachine()
    engine = machine.open()
    machine.order.engines.append(engine)
    machine.order.deliver(engine)
    assert engine.get_s3_high_water_mark() == 0
    machine.order.order(lowwater.CreateBucket("b"))
    assert engine.ship(timeout=30) == engine.get_s3_high_water_mark() >= 2
    assert not any(name.startswith("epochs/") for name in machine.server.objects.data)
    engine.close()


def test_writers_and_many_who_ship_at_once(tmp_path: Path) -> None:
    """Threads of all kinds; in the end all of it is there."""
    archive = tmp_path / "archive"
    config = {"wal": {"rotate_max_bytes": "64 KiB"}, "shipping": {"interval_s": "50 ms"}}
    errors: list[BaseException] = []
    with lowwater.open(tmp_path / "db", tier=f"file://{archive}", config=config) as db:
        db.create_bucket("b")

        def work(number: int) -> None:
            try:
                for serial in range(60):
                    db.put("b", f"{number} {serial}", random.Random(serial).randbytes(1500))
                    if serial % 20 == number:
                        assert db.ship(timeout=60) > 0
            except BaseException as error:  # noqa: BLE001 — told by the test
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        db.ship(timeout=60)
    from tests.tiering.shipping import archived

    assert len(values_in(archived(server_of(archive))[1])) == 360


PROGRAM = """
import os, random, sys
import lowwater
config = {"wal": {"rotate_max_bytes": "64 KiB"}, "shipping": {"interval_s": "20 ms"},
          "retention": {"age_max_s": "0 s", "check_interval_s": "20 ms"}}
db = lowwater.open(sys.argv[1], tier="file://" + sys.argv[2], config=config)
if not db.buckets():
    db.create_bucket("b")
rng = random.Random(int(sys.argv[3]))
for serial in range(10**9):
    key = f"{sys.argv[3]} {serial}"
    db.put("b", key, rng.randbytes(1500))
    os.write(1, (key + "\\n").encode())
    if serial % 40 == 39:
        db.ship()
    if serial % 150 == 149:
        db.flush()
"""


@pytest.mark.slow
class Slow(MemoryStore):
    """Takes a while for each segment."""

    def write(self, name: str, parts: Any, *, size: int | None) -> bool:
        if name.startswith("wal/"):
            threading.Event().wait(0.1)
        return super().write(name, parts, size=size)


def test_who_waits_for_shipping_keeps_nobody_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting and shipping once woke each other without end, which took one of two cores from the uploads."""
    steps = 0
    real = Shipper.step

    def step(self: Shipper) -> float | None:
        nonlocal steps
        steps += 1
        return real(self)

    monkeypatch.setattr(Shipper, "step", step)
    with open_tiered(str(tmp_path / "db"), [Slow()], log_options=LogOptions(segment_bytes=65_536)) as db:
        db.create_bucket("b")
        for number in range(60):
            db.put("b", f"{number}", bytes(10_000))
        steps = 0
        db.ship()
        segments = len(db.catalogue.segments)
    assert segments >= 8
    assert steps < 10 * segments


@pytest.mark.long
def test_a_program_that_is_killed_all_the_time_ships_everything(tmp_path: Path) -> None:
    """`kill -9` wherever it happens to be: nothing acknowledged is lost, and nothing wrong is left."""
    rng = random.Random(5)
    acknowledged: set[str] = set()
    for number in range(25):
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "db"), str(tmp_path / "archive"), str(number)],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            for _ in range(rng.randrange(1, 250)):
                acknowledged.add(process.stdout.readline().strip())
            process.send_signal(signal.SIGKILL)
            acknowledged |= {line.strip() for line in process.stdout if line.endswith("\n")}
    acknowledged.discard("")
    with lowwater.open(tmp_path / "db", tier=f"file://{tmp_path}/archive") as db:
        db.ship(timeout=120)
        assert list(db.check()) == []
        assert acknowledged <= {found.key for found in db.scan("b")}
    from tests.tiering.shipping import archived

    assert acknowledged <= set(values_in(archived(server_of(tmp_path / "archive"))[1]))


def test_what_was_purged_is_no_damage_where_nobody_says_where_the_store_is(tmp_path: Path) -> None:
    """Opened without its tier the database is whole but for old large values: nothing has to be repaired."""
    path = str(tmp_path / "data")
    with lowwater.open(path, tier=str(tmp_path / "archive")) as db:
        db.create_bucket("b")
        db.put("b", "large", b"x" * 5000)
        db.ship()
        db.put("b", "later", b"1")
        db.ship()
        db.flush()
        assert db.purge(db.purgeable_seq())
    with lowwater.open(path) as db:
        with pytest.raises(ArchivedOnly) as caught:
            db.get("b", "large")
        assert "tier=" in caught.value.hint
        assert db.get("b", "later").value == b"1"
        assert [each.severity for each in db.check()] == ["note"]
    assert [each.severity for each in lowwater.check(path)] == ["note"]
    with lowwater.open(path, tier=str(tmp_path / "archive")) as db:
        assert db.get("b", "large").value == b"x" * 5000
        assert list(db.check()) == []
