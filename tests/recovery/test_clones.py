"""Clones that ship: an archive of their own for what is theirs, and their parent's for what was before."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.recovery.shipped import QUIET, SMALL, Place, checkpoint, content, opened, ship
from tests.recovery.test_going_on import shipped

import lowwater
from lowwater.engine.database.origin import read_origin
from lowwater.engine.log.check import Finding
from lowwater.errors import Corrupt, Fenced, InvalidConfig, NotFound, OtherCluster
from lowwater.recovery.restore import restore_with
from lowwater.recovery.restored_opening import open_restored
from lowwater.tiering.archive import open_archive
from lowwater.tiering.lineage import Lineage
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.names import STATES
from lowwater.tiering.objects import Parent, decode_cluster, encode_cluster
from lowwater.tiering.retention import RetentionOptions
from lowwater.tiering.scrub import Scrub
from lowwater.tiering.shipper import ShippingOptions
from lowwater.tiering.tiered_opening import TierOptions

PURGING = TierOptions(
    shipping=ShippingOptions(uploads_at_once=1),
    retention=RetentionOptions(age_max_s=0.5, bytes_max=None, check_interval_s=0.5),
)


class World:
    """Stores by their URIs."""

    def __init__(self) -> None:
        self.objects: dict[str, MemoryObjects] = {}
        self.opened: list[Parent] = []

    def store(self, uri: str) -> MemoryStore:
        return MemoryStore(uri, objects=self.objects.setdefault(uri, MemoryObjects()))

    def open_parent(self, parent: Parent) -> MemoryStore:
        self.opened.append(parent)
        return self.store(parent.uri)

    def lineage(self, uri: str) -> Lineage:
        return Lineage(self.store(uri), self.open_parent)

    def scrubbed(self, uri: str, *, deep: bool = True) -> list[Finding]:
        found = Scrub(self.store(uri), deep=deep, at_once=1).findings()
        return [each for each in found if each.severity != "note"]


class Copy:
    """A directory that was made from the archive at `source`."""

    def __init__(self, world: World, source: str, seed: int) -> None:
        self.world, self.source = world, source
        self.place = Place(seed)

    def restore(self, at: int | None = None, **given: Any) -> Any:
        store = self.world.lineage(self.source)
        return restore_with(store, "to", at, seams=self.place.seams(), pages=self.place.pages, **given)

    def open(self, uri: str, options: TierOptions = PURGING, **given: Any) -> Any:
        seams = self.place.seams()
        origin = read_origin(self.place.files, "to")
        assert origin is not None
        self.place.pages.reopen()
        return open_restored(
            "to",
            origin,
            [self.world.store(uri)],
            options,
            log_options=SMALL,
            options=QUIET,
            seams=seams,
            store=self.place.pages,
            open_parent=self.world.open_parent,
            **given,
        )


def parent_in(world: World) -> tuple[Any, Place]:
    world.objects["memory://a"] = objects = MemoryObjects()
    place = Place()
    db = opened(place, MemoryStore("memory://a", objects=objects))
    db.create_bucket("b")
    for number in range(300):
        db.put("b", f"k{number:04}", b"%d" % number * (200 if number % 9 == 0 else 1))
    checkpoint(db, place, MemoryStore("memory://a", objects=objects))
    for number in range(0, 300, 7):
        db.put("b", f"k{number:04}", b"tail %d" % number * (100 if number % 2 else 1))
    ship(db, place)
    return db, place


def write(db: Any, name: str) -> None:
    for number in range(120):
        db.put("b", f"{name} {number:03}", b"%d" % number * (300 if number % 5 == 0 else 1))
    db.put("b", f"k{len(name):04}", name.encode())


def later(copy: Copy, seconds: int) -> None:
    for _ in range(seconds):
        copy.place.idle(1.0)


@pytest.mark.parametrize("back", [0, 1, 20])
def test_a_clone_ships_to_a_prefix_of_its_own_and_its_parent_has_its_history(back: int) -> None:
    """It is written, purged, read below its first entry, scrubbed, and restored from: also as a clone."""
    world = World()
    db, place = parent_in(world)
    before = dict(world.objects["memory://a"].data)
    seq = db.marks().hwm - back
    then = {each.key: each for each in db.scan("b", at=seq)}
    first = Copy(world, "memory://a", 1)
    assert first.restore(seq).is_clone
    clone = first.open("memory://b")
    write(clone, "own")
    checkpoint(clone, first.place, world.store("memory://b"))
    write(clone, "more")
    ship(clone, first.place)
    clone.flush()
    later(first, 10)
    assert clone.marks().purged > seq
    expected, root = content(clone), clone.root()
    assert {each.key: each for each in clone.scan("b", at=seq)} == then
    assert list(clone.check()) == []
    assert clone.shipping().alarm is None
    assert dict(world.objects["memory://a"].data) == before
    cluster = decode_cluster(world.objects["memory://b"].data["cluster.cbor"])
    assert cluster.cluster_id == clone.cluster_id != db.cluster_id
    assert cluster.parent is not None
    assert (cluster.parent.uri, cluster.parent.cluster_id) == ("memory://a", db.cluster_id)
    for deep in (False, True):
        (found,) = world.scrubbed("memory://b", deep=deep)
        assert found.severity == "warning"
        assert "memory://a" in found.what
    clone.close()

    again = Copy(world, "memory://b", 2)
    done = again.restore(full=True)
    assert (done.root, done.is_clone) == (root, False)
    other = again.open("memory://b")
    assert content(other) == expected
    write(other, "line")
    ship(other, again.place)
    assert list(other.check(away=True)) == []
    other.close()
    with pytest.raises(Fenced):
        ship(first.open("memory://b"), first.place)

    older = Copy(world, "memory://b", 3)
    assert older.restore(seq, full=True).checkpoint_seq
    opened_older = older.open("memory://b2")
    assert {each.key: each for each in opened_older.scan("b")} == then
    write(opened_older, "second")
    ship(opened_older, older.place)
    root = opened_older.root()
    opened_older.close()
    third = Copy(world, "memory://b2", 4)
    assert third.restore(full=True).root == root, "the history of a clone of a clone lies in three archives"
    db.put("b", "goes on", b"1")
    ship(db, place)


def shipped_clone(world: World) -> Copy:
    """A clone of the archive at memory://a that has written and shipped to memory://b, and is closed."""
    parent_in(world)
    copy = Copy(world, "memory://a", 1)
    copy.restore(clone=True)
    clone = copy.open("memory://b")
    write(clone, "own")
    ship(clone, copy.place)
    clone.close()
    return copy


def test_it_remembers_where_it_ships_to() -> None:
    """What was purged is nowhere else. Its parent's archive is not taken for its own."""
    world = World()
    copy = shipped_clone(world)
    origin = read_origin(copy.place.files, "to")
    assert origin is not None
    assert origin.ships_to == "memory://b"
    with pytest.raises(InvalidConfig, match="memory://b"):
        copy.open("memory://a")
    clone = copy.open("memory://b")
    write(clone, "again")
    ship(clone, copy.place)
    clone.close()


def test_a_crash_while_a_clone_begins_to_ship_leaves_nothing_that_misleads() -> None:
    """At each of its first operations."""
    for number in range(1, 12):
        world = World()
        parent_in(world)
        copy = Copy(world, "memory://a", 1)
        copy.restore(clone=True)
        failing = Stopping(world.objects.setdefault("memory://b", MemoryObjects()), number)
        world.objects["memory://b"] = failing.objects
        origin = read_origin(copy.place.files, "to")
        assert origin is not None
        copy.place.pages.reopen()
        seams = copy.place.seams()
        clone = open_restored(
            "to", origin, [failing], PURGING, log_options=SMALL, options=QUIET, seams=seams,
            store=copy.place.pages, open_parent=world.open_parent,
        )  # fmt: skip
        write(clone, "own")
        later(copy, 3)
        clone.close()
        clone = copy.open("memory://b")
        write(clone, "own")
        ship(clone, copy.place)
        expected = content(clone)
        clone.close()
        assert [each.severity for each in world.scrubbed("memory://b")] == ["warning"]
        again = Copy(world, "memory://b", 2)
        again.restore()
        other = again.open("memory://b")
        assert content(other) == expected
        other.close()


class Stopping(MemoryStore):
    """Takes so many objects, and then no more."""

    def __init__(self, objects: MemoryObjects, count: int) -> None:
        super().__init__("memory://b", objects=objects)
        self.objects, self.left = objects, count

    def write(self, name: str, parts: Any, *, size: int | None) -> bool:
        self.left -= 1
        if self.left < 0:
            raise lowwater.errors.StoreUnavailable("the store is away", path=self.uri)
        return super().write(name, parts, size=size)


def test_without_the_parent_it_is_said_what_is_missing() -> None:
    """Neither an absence nor a segment that somebody has removed."""
    world = World()
    shipped_clone(world)
    for objects, message in ((MemoryObjects(), "there is no archive"), (other_archive(), "of the cluster")):
        world.objects["memory://a"] = objects
        with pytest.raises(Corrupt, match="memory://a") as caught:
            Copy(world, "memory://b", 2).restore()
        assert message in str(caught.value)
        assert caught.value.path == "memory://b"


def other_archive() -> MemoryObjects:
    objects = MemoryObjects()
    open_archive(MemoryStore(objects=objects), bytes(16), create=True)
    return objects


@pytest.mark.parametrize(
    "parent",
    [
        {"uri": 1, "options": {}, "cluster_id": bytes(16), "seq": 1},
        {"uri": "a", "options": [], "cluster_id": bytes(16), "seq": 1},
        {"uri": "a", "options": {"x": 1}, "cluster_id": bytes(16), "seq": 1},
        {"uri": "a", "options": {}, "cluster_id": bytes(3), "seq": 1},
        {"uri": "a", "options": {}, "cluster_id": bytes(16), "seq": -1},
        {"uri": "a", "options": {}, "cluster_id": bytes(16)},
        {"uri": "a", "options": {}, "cluster_id": bytes(16), "seq": 1, "more": 1},
        "a", None,
    ],
)  # fmt: skip
def test_what_an_archive_says_of_its_parent_is_checked(parent: Any) -> None:
    import cbor2

    body = {**cbor2.loads(encode_cluster(bytes(16))), "parent": parent}
    with pytest.raises(Corrupt):
        decode_cluster(cbor2.dumps(body, canonical=True))


def test_an_archive_that_is_no_clones_asks_nobody() -> None:
    world = World()
    shipped(world.objects.setdefault("memory://a", MemoryObjects()))
    lineage = world.lineage("memory://a")
    with pytest.raises(NotFound):
        lineage.read("data/packs/none.pack")
    assert world.opened == []


def test_a_copy_of_what_the_parent_has_is_the_clones_own() -> None:
    """Whoever copies an object before he repairs it finds it beside the others."""
    world = World()
    shipped_clone(world)
    lineage = world.lineage("memory://b")
    name = next(
        name for name in world.objects["memory://a"].data if name not in world.objects["memory://b"].data
    )
    expected = world.objects["memory://a"].data[name]
    assert lineage.copy(name, "kept/copy") is True
    assert lineage.copy(name, "kept/copy") is False
    assert world.objects["memory://b"].data["kept/copy"] == expected
    assert "kept/copy" not in world.objects["memory://a"].data
    with pytest.raises(NotFound):
        lineage.copy("data/packs/none.pack", "kept/other")


def test_a_circle_of_parents_ends() -> None:
    world = World()
    parent = Parent("memory://a", {}, bytes(16), 5)
    open_archive(world.store("memory://a"), bytes(16), create=True, parent=parent)
    with pytest.raises(Corrupt, match="a clone of itself"):
        world.lineage("memory://a").stat("data/packs/none.pack")


def test_a_user_clones_into_folders(tmp_path: Path) -> None:
    """With nothing but URIs; opened again, nothing has to be named."""
    a, b = (f"file://{tmp_path}/{name}" for name in "ab")
    with lowwater.open(tmp_path / "db", tier=a) as db:
        db.create_bucket("b")
        seq = db.put("b", "k", b"first" * 200)
        db.ship()
        db.put("b", "k", b"second")
        db.ship()
    lowwater.restore(a, tmp_path / "clone", at=seq)
    with lowwater.open(tmp_path / "clone", tier=b) as clone:
        assert clone.get("b", "k").value == b"first" * 200
        clone.put("b", "own", b"1" * 5000)
        clone.ship()
    with lowwater.open(tmp_path / "clone") as clone:
        clone.put("b", "own 2", b"2")
        clone.ship()
        root = clone.root()
    assert lowwater.restore(b, tmp_path / "again", full=True).root == root
    with lowwater.open(tmp_path / "again") as again:
        assert again.get("b", "k").value == b"first" * 200
        assert again.get("b", "own 2").value == b"2"
    with pytest.raises(OtherCluster):
        lowwater.open(tmp_path / "other", tier=b).close()


def test_nothing_of_a_clones_own_archive_can_go_unseen() -> None:
    """What it does not have of its own is said once, and is no excuse for what it should have."""
    world = World()
    parent_in(world)
    copy = Copy(world, "memory://a", 1)
    copy.restore(340)
    clone = copy.open("memory://b")
    write(clone, "own")
    checkpoint(clone, copy.place, world.store("memory://b"))
    write(clone, "more")
    ship(clone, copy.place)
    clone.close()
    objects = world.objects["memory://b"]
    newest_state = max(name for name in objects.data if name.startswith(STATES))
    unseen = []
    for name in [*objects.data]:
        data = objects.data[name]
        objects.remove(name)
        errors = [each for each in world.scrubbed("memory://b", deep=False) if each.severity != "note"]
        if not any(fnmatch(f"memory://b/{name}", each.where) for each in errors):
            unseen.append(name)
        objects.add(name, data)
    assert unseen == [newest_state], "what it names is in a list"


@pytest.mark.parametrize("at", [None, 330, 400])
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("cluster_there", [False, True])
def test_a_clone_of_a_clone_is_sound(at: int | None, deep: bool, cluster_there: bool) -> None:
    """Taken for damage, its older history would be moved away by whoever trusts a scrub. What is damaged in
    its own archive is seen all the same."""
    world = World()
    parent_in(world)
    first = Copy(world, "memory://a", 1)
    first.restore(clone=True)
    clone = first.open("memory://b")
    write(clone, "own")
    checkpoint(clone, first.place, world.store("memory://b"))
    write(clone, "more")
    ship(clone, first.place)
    clone.close()
    second = Copy(world, "memory://b", 2)
    second.restore(at, clone=True)
    other = second.open("memory://c")
    write(other, "third")
    checkpoint(other, second.place, world.store("memory://c"))
    write(other, "and more")
    ship(other, second.place)
    other.close()
    objects = world.objects["memory://c"]
    if not cluster_there:
        objects.remove("cluster.cbor")
    found = world.scrubbed("memory://c", deep=deep)
    assert [each.what for each in found if each.severity == "error"] == (
        [] if cluster_there else ["the cluster is gone"]
    )
    (elsewhere,) = [each for each in found if each.severity == "warning"]
    assert ("memory://b" in elsewhere.what) == cluster_there
    if deep or not cluster_there or at:
        return
    for name in {*objects.data} - {max(name for name in objects.data if name.startswith(STATES))}:
        data = objects.data[name]
        objects.remove(name)
        errors = [each for each in world.scrubbed("memory://c", deep=False) if each.severity != "note"]
        assert any(fnmatch(f"memory://c/{name}", each.where) for each in errors), name
        objects.add(name, data)


def test_a_registry_serves_one_life_of_a_clone_after_the_other(tmp_path: Path) -> None:
    """Whether it ships or not."""
    a, b = (f"file://{tmp_path}/{name}" for name in "ab")
    with lowwater.open(tmp_path / "db", tier=a) as db:
        db.create_bucket("b")
        db.put("b", "k", b"first" * 200)
        db.ship()
    lowwater.restore(a, tmp_path / "clone", clone=True)
    registry = CollectorRegistry()
    for tier in (None, None, b, None):
        with lowwater.open(tmp_path / "clone", tier=tier, registry=registry) as clone:
            assert clone.get("b", "k").value == b"first" * 200
            assert registry.get_sample_value("lowwater_store_bytes_read_total") is not None


def test_also_while_its_pages_have_still_to_come() -> None:
    """Each life says how many these are."""
    world = World()
    parent_in(world)
    copy = Copy(world, "memory://a", 1)
    copy.restore(clone=True)
    registry = CollectorRegistry()
    for _ in range(2):
        clone = copy.open("memory://a", registry=registry)
        assert registry.get_sample_value("lowwater_restore_pages_away") is not None
        clone.close()
    assert registry.get_sample_value("lowwater_restore_pages_away") is None
