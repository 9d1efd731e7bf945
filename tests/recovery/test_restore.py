"""From an archive alone back to a database: as it was, at any seq."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.test_sessions import tables
from tests.recovery.shipped import QUIET, SMALL, Place, checkpoint, content, opened, ship

from lowwater.engine.database.origin import read_origin
from lowwater.errors import InputError, NotFound
from lowwater.recovery.restore import restore_with
from lowwater.recovery.restored_opening import open_restored, open_to_read
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


def test_a_request_that_was_made_before_the_loss_is_not_made_again_after_it() -> None:
    """Its client may not know what became of it, whether it is below the checkpoint or above."""
    objects = MemoryObjects()
    first = Place()
    db = opened(first, MemoryStore(objects=objects))
    db.create_bucket("b")
    session, ended = db.session(), db.session()
    below = session.put("b", "k", b"below", request=3)
    session.acknowledge(1)
    ended.put("b", "other", b"1", request=1)
    ended.close()
    checkpoint(db, first, MemoryStore(objects=objects))
    above = session.put("b", "k", b"above", request=5)
    ship(db, first)
    expected = tables(db)
    db.close()

    place = Place(1)
    store = MemoryStore(objects=objects)
    assert restore_with(store, "to", clone=True, seams=place.seams(), pages=place.pages).checkpoint_seq
    place.pages.reopen()
    origin = read_origin(place.files, "to")
    assert origin is not None
    again: Any = open_restored(
        "to", origin, [store], log_options=SMALL, options=QUIET, seams=place.seams(), store=place.pages
    )
    assert tables(again) == expected
    session = again.session(session.id)
    assert session.put("b", "k", b"below", request=3) == below
    assert session.put("b", "k", b"above", request=5) == above
    assert again.get("b", "k").value == b"above"
    with pytest.raises(InputError, match="acknowledged"):
        session.put("b", "k", b"forgotten", request=1)
    with pytest.raises(NotFound, match="ended"):
        again.session(ended.id)
    again.close()
