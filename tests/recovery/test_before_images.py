"""A restored directory says of what was there what the lost one would have said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.engine.images import check_images
from tests.recovery.shipped import SMALL, Place, checkpoint, opened, ship
from tests.recovery.test_going_on import Restoring

from lowwater import Delete, Put
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore


def change(db: Any, start: int) -> None:
    """Some of everything, over keys that are there, were deleted, or are new."""
    for number in range(start, start + 120, 7):
        db.put("b", f"k{number:04}", b"%d" % start * (100 if number % 3 else 1))
    db.delete("b", f"k{start + 1:04}")
    db.write([Put("b", f"k{start + 2:04}", b"group", {"m": "n"}), Delete("b", f"k{start + 3:04}")])
    db.copy("b", f"k{start + 2:04}", "b", f"k{start + 1:04}")
    with db.transaction() as txn:
        txn.put("b", f"k{start + 4:04}", b"transaction")


def test_changes_after_a_restore_say_what_was_there_before_the_loss() -> None:
    """Its pages are references to blocks at first, and large values lie in segments that it has not."""
    objects = MemoryObjects()
    place = Place()
    with_images = replace(SMALL, before_images=True)
    db = opened(place, MemoryStore(objects=objects), log_options=with_images)
    db.create_bucket("b")
    for number in range(300):
        db.put("b", f"k{number:04}", b"%d" % number * (200 if number % 9 == 0 else 1), {"n": str(number)})
    change(db, 10)
    checkpoint(db, place, MemoryStore(objects=objects))
    change(db, 60)
    ship(db, place)
    lost = [entry for entry in db.log() if entry.before is not None]
    assert check_images(db.log()) == len(lost)
    again = Restoring(objects, 1)
    again.restore()
    other = again.open()
    assert list(other.leaving.away()), "nothing has to be brought"
    change(other, 40)
    change(other, 150)
    other._log.sync()
    found = [entry for entry in other.log() if entry.before is not None]
    assert found[: len(lost)] == lost
    assert check_images(other.log()) == len(found) > len(lost) + 40
    ship(other, again.place)
    other.close()
