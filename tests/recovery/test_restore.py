"""From an archive alone back to a database: as it was, at any seq."""

from __future__ import annotations

from typing import Any

from tests.recovery.shipped import Place, checkpoint, content, opened, ship

from lowwater.recovery.opening import open_to_read
from lowwater.recovery.restore import restore_with
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore


def test_the_newest_is_what_was_shipped() -> None:
    """With a tail above the checkpoint, large values, and nothing of the old directory."""
    objects = MemoryObjects()
    store = MemoryStore(objects=objects)
    first = Place()
    db = opened(first, store)
    db.create_bucket("b")
    for number in range(300):
        db.put("b", f"k{number:04}", b"%d" % number * (200 if number % 9 == 0 else 1))
    checkpoint(db, first, MemoryStore(objects=objects))
    for number in range(0, 300, 7):
        db.put("b", f"k{number:04}", b"tail %d" % number)
    db.delete("b", "k0001")
    ship(db, first)
    expected, root, seq = content(db), db.root(), db.marks().applied
    db.close()

    place = Place(1)
    store = MemoryStore(objects=objects)
    done = restore_with(store, "to", seams=place.seams(), pages=place.pages)
    print(done)
    assert done.checkpoint_seq > 0
    place.pages.reopen()
    core: Any = open_to_read("to", store, seams=place.seams(), pages=place.pages)
    assert core.root() == root
    assert content(core) == expected
    assert list(core.check(away=True)) == []
    core.close()
    assert seq >= done.seq
