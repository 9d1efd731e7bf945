"""A restore that is killed anywhere is gone on with, and nobody takes what is half there for a database."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.recovery.shipped import QUIET, Place, checkpoint, content, opened, ship

from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.failing_store import FaultyStore
from lowwater.chaos.survival import SURVIVALS
from lowwater.engine.database.opening import open_with
from lowwater.engine.database.origin import ORIGIN, RESTORING, read_origin
from lowwater.engine.seams.failpoints import registry
from lowwater.errors import Corrupt, NotFound, StoreUnavailable
from lowwater.recovery.restore import restore_with
from lowwater.recovery.restored_opening import open_to_read
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore


class Shipped:
    def __init__(self) -> None:
        self.objects, place = MemoryObjects(), Place()
        db: Any = opened(place, MemoryStore(objects=self.objects))
        db.create_bucket("b")
        for number in range(150):
            db.put("b", f"k{number:04}", b"%d" % number * (100 if number % 9 == 0 else 1))
        checkpoint(db, place, MemoryStore(objects=self.objects))
        for number in range(0, 150, 3):
            db.put("b", f"k{number:04}", b"tail %d" % number * 50)
        ship(db, place)
        # In the middle of a segment.
        self.seq = db.catalogue.segments[-2].last - 3
        self.entries = db.marks().applied
        db.close()
        self.expected: Any = None
        place = self.restore(Place(1), full=True)
        core: Any = open_to_read(
            "to", MemoryStore(objects=self.objects), seams=place.seams(), pages=place.pages
        )
        self.expected, self.root = content(core), core.root()
        core.close()
        self.origin_seq = _origin_seq(place)

    def restore(self, place: Place, *, full: bool = False, store: Any = None) -> Place:
        store = store or MemoryStore(objects=self.objects)
        restore_with(store, "to", self.seq, seams=place.seams(), pages=place.pages, full=full)
        place.pages.reopen()
        return place

    def check(self, place: Place) -> None:
        assert ORIGIN in place.files.list("to")
        assert RESTORING not in place.files.list("to")
        assert _origin_seq(place) == self.origin_seq, "a crash has changed what it was made from"
        store = MemoryStore(objects=self.objects)
        core: Any = open_to_read("to", store, seams=place.seams(), pages=place.pages)
        assert core.root() == self.root
        assert content(core) == self.expected
        assert list(core.check(away=True)) == []
        core.close()


def _origin_seq(place: Place) -> int:
    origin = read_origin(place.files, "to")
    assert origin is not None
    return origin.seq


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    return Shipped()


def _exists(place: Place) -> bool:
    try:
        place.files.list("to")
    except FileNotFoundError:
        return False
    return True


def kill_anywhere(shipped: Shipped, every: int, rng: random.Random, *, full: bool) -> int:
    """At each so manieth operation of the file system."""
    number, crashes = 1, 0
    while True:
        place = Place(number)
        place.files.crash_at(number, after=rng.random() < 0.5)
        try:
            shipped.restore(place, full=full)
            return crashes
        except SimulatedCrash:
            crashes += 1
        place.files.crash(rng, rng.choice(SURVIVALS))
        place.pages.crash()
        place.pages.reopen()
        if _exists(place):
            names = place.files.list("to")
            if RESTORING in names:
                with pytest.raises(NotFound, match="has not ended"):
                    open_with("to", seams=place.seams(), store=place.pages, options=QUIET)
        if not _exists(place) or ORIGIN not in place.files.list("to"):
            shipped.restore(place, full=full)
        place.pages.reopen()
        shipped.check(place)
        number += every


@pytest.mark.parametrize("full", [False, True])
def test_a_restore_that_is_killed_goes_on(shipped: Shipped, full: bool) -> None:
    """At some operations of the file system."""
    assert kill_anywhere(shipped, 3, random.Random(1), full=full) > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("full", [False, True])
def test_a_restore_that_is_killed_anywhere_goes_on(shipped: Shipped, seed: int, full: bool) -> None:
    assert kill_anywhere(shipped, 1, random.Random(seed), full=full) > 40


def test_a_restore_whose_store_fails_at_any_request_goes_on(shipped: Shipped) -> None:
    """The error is told, and the same call goes on later."""
    number = 0
    while True:
        number += 1
        failing: Callable[[Any], Any] = _fault_at(number)
        server = FaultyStore(objects=shipped.objects, fault=failing)
        place = Place(number)
        try:
            shipped.restore(place, store=_named(server.open(), "memory://"))
            break
        except StoreUnavailable:
            pass
        place.pages.reopen()
        shipped.restore(place)
        shipped.check(place)
    assert number > 15


def _named(client: Any, uri: str) -> Any:
    client.uri = uri
    return client


def _fault_at(number: int) -> Callable[[Any], Any]:
    from lowwater.chaos.failing_store import StoreFault

    return lambda operation: StoreFault(error="unavailable") if operation.number == number else None


def test_damage_on_the_way_heals_and_damage_in_the_store_is_told(shipped: Shipped) -> None:
    """Whichever read it is."""
    from lowwater.chaos.failing_store import StoreFault

    number = healed = 0
    while True:
        number += 1

        def flip(operation: Any, number: int = number) -> Any:
            return StoreFault(flip_bit=1_000_003) if operation.number == number else None

        server = FaultyStore(objects=shipped.objects, fault=flip)
        place = Place(number)
        damage: Corrupt | None = None
        try:
            shipped.restore(place, store=server.open())
            healed += 1
        except Corrupt as error:
            damage = error
        assert damage is None or "memory" in str(damage.path)
        if server.operations < number:
            break
        if _exists(place) and ORIGIN in place.files.list("to"):
            shipped.check(place)
    assert healed > 5


@pytest.mark.parametrize("name", sorted(name for name in registry if name.startswith("restore.")))
def test_a_restore_that_ends_at_a_named_point_goes_on(shipped: Shipped, name: str) -> None:
    """Each point is reached, and the next life ends what this one began."""

    def end() -> None:
        raise SimulatedCrash(name)

    place = Place(7)
    with registry[name].armed(end), pytest.raises(SimulatedCrash):
        shipped.restore(place)
    place.files.crash(random.Random(7), "keep")
    place.pages.crash()
    with pytest.raises(NotFound, match="has not ended"):
        open_with("to", seams=place.seams(), store=place.pages, options=QUIET)
    shipped.restore(place)
    shipped.check(place)
