"""What becomes of a directory that was restored: a line that goes on, or a clone of its own."""

from __future__ import annotations

from typing import Any

import pytest
from tests.recovery.shipped import QUIET, SMALL, Place, checkpoint, content, opened, ship

from lowwater.engine.origin import ORIGIN, read_origin
from lowwater.errors import Fenced, InputError, InvalidConfig
from lowwater.recovery.opening import open_restored
from lowwater.recovery.restore import restore_with
from lowwater.tiering.archive import open_archive
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.names import segment_name


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
    with pytest.raises(InvalidConfig):
        clone.open("memory://other")
    db.put("b", "goes on", b"1")
    ship(db, place)


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
    manifests = sorted(name for name in objects.data if name.startswith("manifest/0"))
    for name in manifests[-lost:]:
        objects.remove(name)
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
    manifests = sorted(name for name in objects.data if name.startswith("manifest/0"))
    objects.remove(manifests[-1])
    other = MemoryObjects()
    again = Restoring(objects, 1)
    for name, data in objects.data.items():
        other.add(name, data)
    other.remove(segment_name(last))
    twin = Restoring(other, 2)
    assert twin.restore().seq == last.first - 1
    assert again.restore().seq == last.last
