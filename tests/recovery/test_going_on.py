"""What becomes of a directory that was restored: a line that goes on, or a clone of its own."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from tests.recovery.shipped import QUIET, SMALL, Place, checkpoint, content, opened, ship

import lowwater
from lowwater.chaos.disk import SimulatedCrash
from lowwater.engine.database.origin import ORIGIN, read_origin
from lowwater.engine.seams.failpoints import registry
from lowwater.engine.seams.real import ThreadRunner, ThreadTask
from lowwater.engine.seams.seams import Step
from lowwater.errors import Corrupt, Fenced, InputError
from lowwater.recovery.restore import restore_with
from lowwater.recovery.restored_opening import open_restored
from lowwater.tiering.archive import open_archive
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.names import STATES, segment_name
from lowwater.tiering.scrub import Scrub
from lowwater.tiering.ship_checkpoints import CheckpointShipper


class Restoring:
    """A directory of a restore, in a place of its own."""

    def __init__(self, objects: MemoryObjects, seed: int) -> None:
        self.objects = objects
        self.place = Place(seed)

    def restore(self, at: int | None = None, **given: Any) -> Any:
        store = MemoryStore(objects=self.objects)
        return restore_with(store, "to", at, seams=self.place.seams(), pages=self.place.pages, **given)

    def open(self, uri: str | None = None) -> Any:
        seams = self.place.seams()
        origin = read_origin(self.place.files, "to")
        assert origin is not None
        self.place.pages.reopen()
        store = MemoryStore(uri or "memory://", objects=self.objects)
        return open_restored(
            "to", origin, [store], log_options=SMALL, options=QUIET, seams=seams, store=self.place.pages
        )


def shipped(objects: MemoryObjects) -> tuple[Any, Place]:
    place = Place()
    db = opened(place, MemoryStore(objects=objects))
    db.create_bucket("b")
    for number in range(300):
        db.put("b", f"k{number:04}", b"%d" % number * (200 if number % 9 == 0 else 1))
    checkpoint(db, place, MemoryStore(objects=objects))
    for number in range(0, 300, 7):
        db.put("b", f"k{number:04}", b"tail %d" % number)
    ship(db, place)
    return db, place


def unpublish_newest(objects: MemoryObjects) -> None:
    """As if whoever shipped it had died before it could say so."""
    newest = open_archive(MemoryStore(objects=objects)).newest()
    assert newest is not None
    objects.remove(newest.name)
    objects.remove(max(name for name in objects.data if name.startswith(STATES)))


def test_a_restored_line_goes_on_and_ships_and_its_parent_is_fenced() -> None:
    """Twice over: what was restored is restored again from what it shipped."""
    objects = MemoryObjects()
    db, place = shipped(objects)
    expected = content(db)
    again = Restoring(objects, 1)
    assert not again.restore().is_clone
    other = again.open()
    assert content(other) == expected
    assert other.epoch > 1
    other.put("b", "new", b"n" * 1000)
    ship(other, again.place)
    expected = content(other)
    db.put("b", "lost", b"l")
    with pytest.raises(Fenced):
        ship(db, place)
    with pytest.raises(Fenced):
        db.put("b", "lost", b"l")
    other.close()
    reopened = again.open()
    assert content(reopened) == expected
    reopened.put("b", "newer", b"n")
    ship(reopened, again.place)
    expected = content(reopened)
    root = reopened.root()
    third = Restoring(objects, 2)
    done = third.restore(full=True)
    assert done.root == root
    assert content(third.open()) == expected


def test_who_has_written_meanwhile_is_seen() -> None:
    """A restore that is opened late must not take the archive back in time."""
    objects = MemoryObjects()
    db, place = shipped(objects)
    late = Restoring(objects, 1)
    late.restore()
    db.put("b", "meanwhile", b"m")
    ship(db, place)
    with pytest.raises(Fenced) as caught:
        late.open()
    assert "restore again" in caught.value.hint
    db.put("b", "more", b"m")
    ship(db, place)


def test_a_clone_is_a_cluster_of_its_own_and_leaves_the_archive_alone() -> None:
    objects = MemoryObjects()
    db, place = shipped(objects)
    before = dict(objects.data)
    seq = db.marks().applied
    clone = Restoring(objects, 1)
    done = clone.restore(seq - 20)
    assert done.is_clone
    copy = clone.open()
    assert copy.cluster_id != db.cluster_id
    copy.put("b", "own", b"o" * 1000)
    copy.flush()
    clone.place.idle(1.0)
    expected, root = content(copy), copy.root()
    copy.checkpoint()
    assert list(copy.check()) == []
    with pytest.raises(InputError):
        copy.ship()
    copy.close()
    copy = clone.open()
    assert (content(copy), copy.root()) == (expected, root)
    copy.close()
    assert dict(objects.data) == before
    db.put("b", "goes on", b"1")
    ship(db, place)


def test_pages_are_written_although_the_flusher_runs_before_all_else_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first step finds pages away. If that ended it, nothing would say so, and memory would fill."""
    config = {"engine": {"checkpoint_interval_s": 0.01, "pool_bytes_max": "1 MiB"}}
    uri, clone = f"file://{tmp_path}/archive", tmp_path / "clone"
    with lowwater.open(tmp_path / "data", tier=uri, config=config) as db:
        db.create_bucket("b")
        for group in range(100):
            db.put_many("b", [(f"{group:03}/{number}", b"x" * 600) for number in range(20)])
        db.checkpoint()
        db.put_many("b", [(f"{group:03}/0", b"later") for group in range(100)])
        db.ship()
    lowwater.restore(uri, clone, clone=True)
    start = ThreadRunner.start

    def start_and_give_way(runner: ThreadRunner, name: str, step: Step) -> ThreadTask:
        task = start(runner, name, step)
        if name == "engine-flusher":
            time.sleep(0.3)
        return task

    monkeypatch.setattr(ThreadRunner, "start", start_and_give_way)
    with lowwater.open(clone, config=config) as db:
        db.flush()
        assert db._task.error is None


def test_warming_brings_everything_once() -> None:
    """In the background, and it is remembered."""
    objects = MemoryObjects()
    shipped(objects)
    clone = Restoring(objects, 1)
    done = clone.restore(clone=True)
    assert done.pages_away > 3
    copy = clone.open()
    clone.place.idle(1.0)
    assert not list(copy.leaving.away())
    assert copy.registry.get_sample_value("lowwater_restore_pages_away") == 0
    copy.close()
    origin = read_origin(clone.place.files, "to", ORIGIN)
    assert origin is not None
    assert origin.is_whole
    objects.data.clear()
    reads = clone.open()
    assert reads.get("b", "k0001").value == b"1"


def test_the_claim_of_a_restored_line_is_in_the_archive() -> None:
    objects = MemoryObjects()
    shipped(objects)
    again = Restoring(objects, 1)
    again.restore()
    db = again.open()
    fork = db.catalogue.forks[-1]
    newest = open_archive(MemoryStore(objects=objects)).newest()
    assert newest is not None
    assert fork.parent_manifest == newest.hash
    assert fork.epoch == db.epoch


def test_what_was_restored_in_full_needs_no_archive() -> None:
    """Large values lie in older segments of the log than what the newest pages need."""
    objects = MemoryObjects()
    shipped(objects)
    clone = Restoring(objects, 1)
    clone.restore(clone=True, full=True)
    copy = clone.open()
    expected = content(copy)
    copy.close()
    assert any(len(each.value) > 256 for each in expected["b"])
    objects.data.clear()
    copy = clone.open()
    assert content(copy) == expected
    assert list(copy.check(away=True)) == []
    copy.close()


@pytest.mark.parametrize("lost", [1, 2])
def test_segments_beyond_the_newest_manifest_are_taken_and_recorded_again(lost: int) -> None:
    """They were shipped, and whoever did it died before it could say so."""
    objects = MemoryObjects()
    db, _ = shipped(objects)
    expected = content(db)
    seq = db.catalogue.hwm
    for _ in range(lost):
        unpublish_newest(objects)
    again = Restoring(objects, 1)
    done = again.restore()
    assert done.seq == seq
    assert "beyond its newest manifest" in done.missing
    other = again.open()
    assert content(other) == expected
    ship(other, again.place)
    other.put("b", "new", b"n")
    ship(other, again.place)
    expected = content(other)
    assert list(other.check()) == []
    other.close()
    third = Restoring(objects, 2)
    assert third.restore(full=True).seq > seq
    assert content(third.open()) == expected


def test_the_chain_ends_where_a_segment_is_missing() -> None:
    """What lies behind a gap was never acknowledged as shipped."""
    objects = MemoryObjects()
    db, _ = shipped(objects)
    last = db.catalogue.segments[-1]
    unpublish_newest(objects)
    other = MemoryObjects()
    again = Restoring(objects, 1)
    for name, data in objects.data.items():
        other.add(name, data)
    other.remove(segment_name(last))
    twin = Restoring(other, 2)
    assert twin.restore().seq == last.first - 1
    assert again.restore().seq == last.last


def test_what_was_shipped_only_once_goes_on_too() -> None:
    """The newest manifest is of the epoch that was claimed to ship, and the log that was shipped ends before
    the `fork` to it: a line that took no epoch of its own takes writes, and can never ship them."""
    objects = MemoryObjects()
    place = Place()
    db = opened(place, MemoryStore(objects=objects))
    db.create_bucket("b")
    db.put("b", "k", b"v")
    ship(db, place)
    again = Restoring(objects, 1)
    again.restore()
    other = again.open()
    assert other.epoch > db.epoch
    other.put("b", "new", b"n")
    ship(other, again.place)
    expected = content(other)
    third = Restoring(objects, 2)
    third.restore()
    assert content(third.open()) == expected
    db.put("b", "lost", b"l")
    with pytest.raises(Fenced):
        ship(db, place)


@pytest.mark.parametrize("seed", range(30))
def test_lives_and_restores_in_any_order_go_on(seed: int) -> None:
    """What was shipped is there after whatever was done, and everybody who goes on can ship."""
    rng = random.Random(f"lives {seed}")
    objects = MemoryObjects()
    place = Place()
    db = opened(place, MemoryStore(objects=objects))
    db.create_bucket("b")
    states: dict[int, Any] = {}
    again: Restoring | None = None
    shipped_seq = 0
    for number in range(25):
        do = rng.choice(["put", "put", "ship", "checkpoint", "reopen", "restore"])
        if do == "put":
            seq = db.put("b", f"k{rng.randrange(9)}", b"%d" % number * rng.choice([1, 1000]))
            states[seq] = content(db)
        elif do == "ship":
            ship(db, place)
            shipped_seq = max(states, default=0)
        elif do == "checkpoint":
            checkpoint(db, place, MemoryStore(objects=objects))
        elif do == "reopen":
            db.close()
            if again is None:
                place.pages.reopen()
                db = opened(place, MemoryStore(objects=objects))
            else:
                db = again.open()
        elif shipped_seq:
            db.close()
            again = Restoring(objects, 100 * seed + number)
            place = again.place
            done = again.restore(full=rng.random() < 0.3)
            assert done.seq >= shipped_seq
            states = {seq: state for seq, state in states.items() if seq <= done.seq}
            db = again.open()
            assert content(db) == states[max(states)]
    ship(db, place)
    last = Restoring(objects, seed)
    last.restore()
    assert content(last.open()) == content(db)
    findings = Scrub(MemoryStore(objects=objects), deep=True).findings()
    assert [each for each in findings if each.severity == "error"] == []


def test_who_ends_while_it_records_again_what_its_parent_had_shipped_leaves_nothing_out() -> None:
    """Its first manifests have a lower mark than its parent's last one: the rest lies in the epoch before. A
    restore that followed the newest manifest's epoch alone ended below what had counted."""
    objects = MemoryObjects()
    db, place = shipped(objects)
    for number in range(60):
        db.put("b", f"more {number}", b"%d" % number * 500)
    ship(db, place)
    counted, expected = db.counted_hwm, content(db)
    again = Restoring(objects, 1)
    again.restore()
    other = again.open()
    assert len([each for each in db.catalogue.segments if each.last > other.catalogue.hwm]) >= 2

    def end() -> None:
        raise SimulatedCrash

    with registry["ship.after_manifest"].armed(end), pytest.raises(SimulatedCrash):
        ship(other, again.place)
    newest = open_archive(MemoryStore(objects=objects)).newest()
    assert newest is not None
    assert newest.epoch == other.epoch
    assert newest.hwm < counted
    third = Restoring(objects, 2)
    assert third.restore().seq >= counted
    assert content(third.open()) == expected


def test_a_copy_of_what_was_recorded_as_shipped_after_it_is_restored() -> None:
    """Redo comes to the copy before it comes to the entry that says where its value is."""
    objects = MemoryObjects()
    place, store = Place(), MemoryStore(objects=objects)
    db = opened(place, store)
    db.create_bucket("b")
    db.put("b", "large", b"l" * 1000)
    db.checkpoint()
    db.copy("b", "large", "b", "copy")
    checkpointed = db.checkpoints()[0].seq
    ship(db, place)
    shipper = CheckpointShipper(db, store)
    while shipper.advance() is not None:
        place.idle()
    db.put("b", "more", b"m" * 20_000)
    ship(db, place)
    expected = content(db)
    for full in (False, True):
        again = Restoring(objects, 1)
        assert again.restore(clone=True, full=full).checkpoint_seq == checkpointed
        assert content(again.open()) == expected


@pytest.mark.parametrize("who", ["the same", "restored"])
def test_an_archive_of_before_gets_its_states_when_it_is_shipped_to(who: str) -> None:
    """The first one names what lists have shown then; and whoever had the log before is fenced as ever."""
    objects = MemoryObjects()
    db, place = shipped(objects)
    before = open_archive(MemoryStore(objects=objects)).newest()
    assert before is not None
    db.close()
    for name in [name for name in objects.data if name.startswith(STATES)]:
        objects.remove(name)
    assert open_archive(MemoryStore(objects=objects)).newest() == before
    again = Restoring(objects, 1)
    if who == "restored":
        again.restore()
        db, place = again.open(), again.place
    else:
        place.pages.reopen()
        db = opened(place, MemoryStore(objects=objects))
    db.put("b", "new", b"n")
    ship(db, place)
    expected = content(db)
    db.close()
    archive = open_archive(MemoryStore(objects=objects))
    assert archive.states.read(1).manifest == before.name
    newest = archive.newest()
    assert newest is not None
    assert archive.states.seen is not None
    assert archive.states.seen.manifest == newest.name
    assert [
        each for each in Scrub(MemoryStore(objects=objects), deep=True).findings() if each.severity != "note"
    ] == []
    third = Restoring(objects, 2)
    third.restore()
    assert content(third.open()) == expected


def test_a_newest_manifest_that_is_gone_is_written_again_by_its_own_log() -> None:
    """Nobody else can go on meanwhile: a state says that it is there."""
    objects = MemoryObjects()
    db, place = shipped(objects)
    db.close()
    newest = open_archive(MemoryStore(objects=objects)).newest()
    assert newest is not None
    objects.remove(newest.name)
    with pytest.raises(Corrupt, match="the newest manifest is gone"):
        Restoring(objects, 1).restore()
    place.pages.reopen()
    db = opened(place, MemoryStore(objects=objects))
    db.put("b", "new", b"n")
    ship(db, place)
    assert objects.data[newest.name] == newest.encode()
    expected = content(db)
    again = Restoring(objects, 2)
    again.restore()
    assert content(again.open()) == expected
