"""Scrubs of archives in which restored databases went on: each line back through every fork."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest
from tests.recovery.shipped import checkpoint, ship
from tests.recovery.test_going_on import Restoring, shipped

from lowwater.engine.log.check import Finding
from lowwater.errors import Fenced
from lowwater.tiering.archive import open_archive
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.names import state_name
from lowwater.tiering.scrub import Scrub


def scrubbed(objects: MemoryObjects, *, deep: bool) -> list[Finding]:
    return list(Scrub(MemoryStore("memory://a", objects=objects), deep=deep, at_once=1).findings())


def gone_on() -> MemoryObjects:
    """Restored twice, each with a checkpoint of its own, while the first one still ships and is fenced."""
    objects = MemoryObjects()
    db, place = shipped(objects)
    # Many segments at once: a restored log lacks the entries of all of them, and gives their seqs to its own.
    for number in range(150):
        db.put("b", f"wide {number}", b"w" * 1000)
    ship(db, place)
    for number in range(2):
        again = Restoring(objects, number + 1)
        again.restore()
        other = again.open()
        other.put("b", "first", b"f")
        ship(other, again.place)
        for key in range(40):
            other.put("b", f"line {number} {key}", b"n" * (10 if key % 9 else 1000))
        checkpoint(other, again.place, MemoryStore(objects=objects))
        other.put("b", "more", b"n")
        ship(other, again.place)
        if not number:
            db.put("b", "lost", b"l")
            with pytest.raises(Fenced):
                ship(db, place)
        other.close()
    return objects


def test_an_archive_that_was_restored_from_twice_is_sound_and_nothing_of_it_can_go_unseen() -> None:
    objects = gone_on()
    archive = open_archive(MemoryStore(objects=objects))
    newest = archive.newest()
    assert newest is not None
    assert newest.epoch >= 4
    assert archive.states.seen is not None
    for deep in (False, True):
        assert [each for each in scrubbed(objects, deep=deep) if each.severity != "note"] == []
    unreached = {each.where.removeprefix("memory://a/") for each in scrubbed(objects, deep=False)}
    unseen = []
    for name in [*objects.data]:
        data = objects.data[name]
        objects.remove(name)
        found = [each for each in scrubbed(objects, deep=False) if each.severity != "note"]
        if not any(fnmatch(f"memory://a/{name}", each.where) for each in found):
            unseen.append(name)
        objects.add(name, data)
    assert set(unseen) == {*unreached, state_name(archive.states.seen.number)}
