"""The first checkpoint of what was restored: what the archive has is not written, and shipped, again."""

from __future__ import annotations

from typing import Any

import pytest
from tests.recovery.shipped import Place, checkpoint, content, opened, ship
from tests.recovery.test_clones import Copy, World, parent_in
from tests.recovery.test_going_on import Restoring

from lowwater.chaos.runner import StepRunner
from lowwater.engine.checkpoint import checkpointer
from lowwater.errors import Corrupt, RetryError, StoreUnavailable
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.names import PACKS
from lowwater.tiering.scrub import Scrub


def packs_in(objects: MemoryObjects) -> dict[str, int]:
    return {name: len(data) for name, data in objects.data.items() if name.startswith(PACKS)}


def begun(objects: MemoryObjects) -> None:
    """A thousand keys in a checkpoint, and nothing above it."""
    place = Place()
    db = opened(place, MemoryStore(objects=objects))
    db.create_bucket("b")
    db.put_many(
        "b", [(f"k{number:04}", b"%d" % number * (300 if number % 50 == 0 else 1)) for number in range(1000)]
    )
    checkpoint(db, place, MemoryStore(objects=objects))
    ship(db, place)
    db.close()


def require_sound(objects: MemoryObjects) -> None:
    found = Scrub(MemoryStore(objects=objects), deep=True, at_once=1).findings()
    assert [each for each in found if each.severity == "error"] == []


def test_it_is_made_of_the_one_in_the_archive() -> None:
    """In the next life too, and the next one of that."""
    objects = MemoryObjects()
    begun(objects)
    again = Restoring(objects, 1)
    again.restore()
    db = again.open()
    base = db.catalogue.checkpoints.last
    assert base is not None
    assert db.checkpoints() == []
    before = packs_in(objects)
    db.put("b", "k0007x", b"one more")
    checkpoint(db, again.place, MemoryStore(objects=objects))
    newest, brought = db.checkpoints()
    assert (brought.seq, newest.index.base_seq) == (base.seq, base.seq)
    assert db._checkpointer.brought == 1
    assert 0 < db._checkpointer.rows_written < newest.index.row_count
    assert set(before) < set(packs_in(objects)), "what is there is used on"
    assert newest.root == db.root(newest.seq)
    assert list(db.check()) == []
    db.close()
    db = again.open()
    db.put("b", "k0008x", b"one more")
    checkpoint(db, again.place, MemoryStore(objects=objects))
    assert db._checkpointer.brought == 0
    assert db.checkpoints()[0].index.base_seq == newest.seq
    expected, root = content(db), db.root()
    db.close()
    require_sound(objects)
    third = Restoring(objects, 2)
    assert third.restore(full=True).root == root
    assert content(third.open()) == expected


def test_a_store_that_is_away_holds_it_up_and_one_that_lost_a_pack_makes_it_a_full_one() -> None:
    """The first is waited for. For the second, a checkpoint that rests on nothing is what is needed."""
    objects = MemoryObjects()
    begun(objects)
    again = Restoring(objects, 1)
    again.restore()
    db = again.open()
    db.put("b", "k0007x", b"one more")
    away = objects.data.copy()
    pack = next(iter(packs_in(objects)))
    db._tier._read_from = read_from = Sometimes(db._tier._read_from)
    read_from.error = StoreUnavailable("the store is away", path="memory://")
    with pytest.raises(RetryError):
        db.checkpoint()
    read_from.error = None
    data = bytearray(away[pack])
    data[100] ^= 1
    objects.data[pack] = bytes(data)
    with pytest.raises(Corrupt):
        db.checkpoint()
    db.put("b", "k0009x", b"one more")
    db.checkpoint()
    newest = db.checkpoints()[0]
    assert newest.index.base_seq == 0
    objects.data[pack] = away[pack]
    assert list(db.check()) == []
    db.close()


def test_what_a_former_life_asked_for_and_cannot_be_made_is_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a clone: what its parent's checkpoints rest on lies with that, and the next one is a whole one."""
    objects = MemoryObjects()
    begun(objects)
    place = Restoring(objects, 1)
    place.restore()
    db = place.open()
    seqs: list[int] = []
    for number in range(12):
        db.put("b", "more", b"%d" % number)
        db.checkpoint()
        seqs.append(db.marks().durable)
    ship(db, place.place)
    db.close()
    told: list[tuple[str, str]] = []
    for level in ("info", "warning", "error"):
        monkeypatch.setattr(
            checkpointer._logger, level, lambda what, level=level, **_: told.append((level, what))
        )
    clone = Restoring(objects, 2)
    clone.restore(seqs[6])
    db = clone.open()
    clone.place.idle(60.0)
    assert ("info", "a checkpoint was given up") in told
    assert {level for level, _ in told} == {"info"}
    db.put("b", "own", b"1")
    db.checkpoint()
    assert db.checkpoints()[0].index.base_seq == 0
    db.close()


def test_one_that_is_due_waits_until_its_archive_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background begins while the database is opened: what the checkpoint rests on comes in a moment."""
    objects = MemoryObjects()
    begun(objects)
    again = Restoring(objects, 1)
    again.restore()
    db = again.open()
    base = db.catalogue.checkpoints.last
    db.put("b", "more", b"1")
    db._want_checkpoint_entry()
    db._log.sync()
    assert len(db._state.checkpoints_due) == 1
    db.close()
    start = StepRunner.start

    def eager(self: StepRunner, name: str, step: Any) -> Any:
        if name == "engine-checkpoint":
            for _ in range(100):
                step()
        return start(self, name, step)

    monkeypatch.setattr(StepRunner, "start", eager)
    db = again.open()
    again.place.idle(2.0)
    assert db._checkpointer.failures == {}
    assert [each.index.base_seq for each in db.checkpoints()] == [base.seq, 0]
    db.close()


class Sometimes:
    """A store that answers with an error when it is told so."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.error: Exception | None = None

    def read(self, *arguments: Any) -> bytes:
        if self.error is not None:
            raise self.error
        data: bytes = self._store.read(*arguments)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_clone_makes_a_whole_one() -> None:
    """Its archive must not need packs that lie elsewhere, and what its parent made is another cluster's."""
    world = World()
    parent_in(world)
    copy = Copy(world, "memory://a", 1)
    copy.restore(clone=True)
    clone = copy.open("memory://b")
    clone.put("b", "own", b"1")
    checkpoint(clone, copy.place, world.store("memory://b"))
    assert clone._checkpointer.brought == 0
    index = clone.checkpoints()[0].index
    assert index.base_seq == 0
    assert {f"{PACKS}{pack.hex()}.pack" for pack in index.packs} <= set(packs_in(world.objects["memory://b"]))
    clone.close()
    clone = copy.open("memory://b")
    assert list(clone.check(away=True)) == []
    clone.put("b", "own", b"2")
    ship(clone, copy.place)
    clone.close()
    assert [each.severity for each in world.scrubbed("memory://b")] == ["warning"]
