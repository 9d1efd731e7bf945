"""Checkpoints in the archive: whole before the log says so, the same whoever ships them, and pages stand on
them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from tests.tiering.lines import Line

from lowwater.engine.format.ckpt import decode_checkpoint, pack_name
from lowwater.engine.seams.real import RealClock
from lowwater.engine.state.catalogue import checkpoint_shipped_entry, segment_shipped_entry
from lowwater.errors import (
    Corrupt,
    DiskFailed,
    LowwaterError,
    NotFound,
    StoreCorrupt,
    StoreUnavailable,
)
from lowwater.tiering import names
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.ship_checkpoints import CheckpointShipper
from lowwater.tiering.shipped_blocks import ArchivedBlocks
from lowwater.tiering.store import FoundObject, Part
from lowwater.tiering.verify import ObjectFile, verify_object


class StoppingStore(MemoryStore):
    """Fails at one operation, before or after it takes effect, and at all of them while it is down."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__("test://archive", objects=objects)
        self.operations = 0
        self.stop_at: int | None = None
        self.after = False
        self.is_down = False

    def _do(self, effect: Callable[[], Any]) -> Any:
        self.operations += 1
        stops = self.is_down or self.operations == self.stop_at
        if stops and not self.after:
            raise StoreUnavailable("the store is away", path=self.uri)
        try:
            return effect()
        finally:
            if stops:
                raise StoreUnavailable("the store is away", path=self.uri)

    def write(self, name: str, parts: Iterable[Part], *, size: int) -> bool:
        made: bool = self._do(lambda: MemoryStore.write(self, name, parts, size=size))
        return made

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        data: bytes = self._do(lambda: MemoryStore.read(self, name, start, end))
        return data

    def stat(self, name: str) -> FoundObject:
        found: FoundObject = self._do(lambda: MemoryStore.stat(self, name))
        return found


class Shipping:
    """A database, its archive, and what ships its checkpoints."""

    def __init__(self, seed: int = 0) -> None:
        self.objects = MemoryObjects()
        self.line = Line(self.objects, "first", seed=seed)
        self.store = StoppingStore(self.objects)
        self.open()

    def open(self) -> None:
        # Nothing of what it has read is kept from one life to the next.
        blocks = ArchivedBlocks(Fetcher(self.store, clock=RealClock()))
        self.line.machine.archive = blocks  # type: ignore[assignment]
        self.line.machine.open()
        self.shipper = CheckpointShipper(self.db, self.store)

    @property
    def db(self) -> Any:
        return self.line.db

    def fill(self) -> None:
        self.db.create_bucket("b")
        for number in range(120):
            self.db.put("b", f"k{number:03}", b"%d" % number * (300 if number % 40 == 7 else 3))

    def ship_log(self) -> None:
        """As the shipper of segments does."""
        for header, described, data in self.line.segments():
            if described.last > self.db.catalogue.hwm:
                self.objects.add(names.segment_name(described), data)
                entry = segment_shipped_entry(header.seq_before, header.hash_before, described)
                assert self.db.propose_control(entry) is not None

    def ship(self) -> None:
        while self.shipper.advance() is not None:
            pass

    def checkpoint(self) -> int:
        self.db.checkpoint()
        seq: int = self.db.checkpoints()[0].seq
        return seq

    def require_sound(self) -> None:
        """Every object is what its name says, and of each index all packs are there."""
        plain = MemoryStore(objects=self.objects)
        for name in self.objects.data:
            verify_object(name, ObjectFile(plain, name))
            if name.startswith(names.CHECKPOINTS):
                for pack in decode_checkpoint(self.objects.data[name]).packs:
                    assert names.PACKS + pack_name(pack) in self.objects.data


@pytest.fixture
def shipping() -> Iterator[Shipping]:
    made = Shipping()
    made.fill()
    yield made
    made.store.is_down = False
    made.db.close()


def test_a_checkpoint_is_shipped_once_its_log_is(shipping: Shipping) -> None:
    """A restore goes from it to the log's entries behind it."""
    seq = shipping.checkpoint()
    shipping.ship()
    assert not any(name.startswith(("data/", "checkpoints/")) for name in shipping.objects.data)
    shipping.ship_log()
    shipping.ship()
    newest = shipping.db.catalogue.checkpoints.last
    assert newest.seq == seq
    assert newest.root.hex() == shipping.db.checkpoints()[0].root
    assert shipping.objects.data[names.checkpoint_name(newest)]
    shipping.require_sound()
    assert shipping.shipper.advance() is None


def test_the_next_one_ships_what_is_new(shipping: Shipping) -> None:
    """Its base is the one that was shipped: blocks of that are not written again."""
    shipping.checkpoint()
    shipping.ship_log()
    shipping.ship()
    before = dict(shipping.objects.data)
    shipping.db.put("b", "k050", b"new")
    seq = shipping.checkpoint()
    shipping.ship_log()
    shipping.store.operations = 0
    shipping.ship()
    assert shipping.db.catalogue.checkpoint_seq == seq
    new = {name: data for name, data in shipping.objects.data.items() if name not in before}
    packs = [len(data) for name, data in new.items() if name.startswith(names.PACKS)]
    assert len(packs) == 2, "a pack of blocks and one of lists"
    all_packs = sum(len(data) for name, data in before.items() if name.startswith(names.PACKS))
    assert sum(packs) < all_packs
    assert shipping.store.operations <= 12
    assert {name: shipping.objects.data[name] for name in before} == before
    shipping.require_sound()


@pytest.mark.parametrize("after", [False, True])
def test_a_stop_at_any_operation_leaves_nothing_that_misleads_and_is_gone_on_from(after: bool) -> None:
    """Of the store, before or after it took effect; a new process goes on. The objects are the same."""
    expected: dict[str, bytes] | None = None
    number = 0
    while True:
        shipping = Shipping()
        shipping.fill()
        shipping.checkpoint()
        shipping.ship_log()
        shipping.store.stop_at, shipping.store.after = number or None, after
        try:
            shipping.ship()
        except StoreUnavailable:
            shipping.require_sound()
            assert shipping.db.catalogue.checkpoint_seq == 0
            shipping.db.close()
            shipping.open()
            shipping.ship()
        else:
            if number:
                break
        shipping.require_sound()
        found = {name: data for name, data in shipping.objects.data.items() if not name.startswith("wal/")}
        expected = expected or found
        assert found == expected
        assert shipping.db.catalogue.checkpoint_seq
        shipping.db.close()
        number += 1
    assert number > 6


def test_the_one_that_is_being_shipped_is_not_outrun_by_those_to_come(shipping: Shipping) -> None:
    """An upload may take longer than the time from one checkpoint to the next: it is kept until it is
    recorded. Then comes the newest, and what lies between is passed over."""
    db = shipping.db
    db.attach_tier(Keeping(db))
    seqs = [shipping.checkpoint()]
    shipping.ship_log()
    assert shipping.shipper.advance() is not None
    for number in range(4):
        db.put("b", f"k{number:03}", b"again")
        seqs.append(shipping.checkpoint())
    assert [each.seq for each in db.checkpoints()] == [*reversed(seqs[-2:]), seqs[0]]
    shipping.ship_log()
    shipping.ship()
    assert [each.seq for each in db.catalogue.checkpoints] == [seqs[0], seqs[-1]]
    shipping.require_sound()
    db.put("b", "k", b"once more")
    seqs.append(shipping.checkpoint())
    assert [each.seq for each in db.checkpoints()] == [*reversed(seqs[-2:])]


class Keeping:
    """What a tier asks to be kept, and nothing else of one."""

    def __init__(self, db: Any) -> None:
        self.db = db

    def checkpoints_needed(self) -> list[int]:
        return [self.db.ships_seq]

    own_after = cache_bytes = 0

    def older_versions(self, *_: Any) -> None: ...

    def stop(self) -> None:
        pass

    finish = close = stop


def test_two_that_ship_the_same_make_the_same(shipping: Shipping) -> None:
    """Who comes second finds what is there, and records nothing twice."""
    shipping.checkpoint()
    shipping.ship_log()
    other = CheckpointShipper(shipping.db, MemoryStore(objects=shipping.objects))
    while True:
        first, second = shipping.shipper.advance(), other.advance()
        if first is None and second is None:
            break
    assert len(shipping.db.catalogue.checkpoints) == 1
    assert shipping.shipper.packs_written + other.packs_written == sum(
        name.startswith(names.PACKS) for name in shipping.objects.data
    )
    shipping.require_sound()


def flip_pack(shipping: Shipping) -> None:
    stored = shipping.db.checkpoints()[0]
    [pack, *_] = stored.index.packs
    shipping.line.machine.files.flip_byte(f"{stored.packs_directory}/{pack_name(pack)}", 100, 1)


def remove_pack(shipping: Shipping) -> None:
    stored = shipping.db.checkpoints()[0]
    [pack, *_] = stored.index.packs
    shipping.line.machine.files.remove(f"{stored.packs_directory}/{pack_name(pack)}")


def flip_index(shipping: Shipping) -> None:
    shipping.line.machine.files.flip_byte(shipping.db.checkpoints()[0].path, 50, 1)


def refuse_pack(shipping: Shipping) -> None:
    """The disk cannot read it any more."""
    stored = shipping.db.checkpoints()[0]
    [pack, *_] = stored.index.packs
    refused = f"{stored.packs_directory}/{pack_name(pack)}"
    files = shipping.line.machine.files
    opened = files.open

    def read_at(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    def open_file(path: str, **options: Any) -> Any:
        file = opened(path, **options)
        if path == refused:
            file.read_at = read_at
        return file

    files.open = open_file


@pytest.mark.parametrize("damage", [flip_pack, remove_pack, refuse_pack, flip_index])
@pytest.mark.parametrize("count", [1, 2])
def test_what_was_damaged_here_does_not_get_there_and_keeps_nothing_from_it(
    shipping: Shipping, damage: Callable[[Shipping], None], count: int
) -> None:
    """Its name would promise other bytes, for ever. Nor does the next checkpoint rest on it."""
    for number in range(count):
        shipping.db.put("b", "new", b"%d" % number)
        shipping.checkpoint()
    shipping.ship_log()
    damage(shipping)
    refused: list[LowwaterError] = []
    while len(refused) <= count:
        try:
            shipping.ship()
            break
        except (Corrupt, DiskFailed, NotFound) as error:
            refused.append(error)
    assert 1 <= len(refused) <= count
    assert all("passed over" in str(error.hint) for error in refused)
    for each in shipping.db.checkpoints():
        assert len(list(each.rows())) == 122
    shipping.require_sound()
    shipping.db.put("b", "new", b"another")
    shipping.checkpoint()
    shipping.ship_log()
    shipping.ship()
    assert shipping.db.catalogue.checkpoint_seq == shipping.db.checkpoints()[0].seq
    shipping.require_sound()


def test_an_object_of_another_size_is_told_and_nothing_is_recorded(shipping: Shipping) -> None:
    """Somebody else has written under the name."""
    shipping.checkpoint()
    shipping.ship_log()
    [pack, *_] = shipping.db.checkpoints()[0].index.packs
    shipping.objects.add(names.pack_object_name(pack), b"something else")
    with pytest.raises(StoreCorrupt, match="not what its name says") as caught:
        shipping.ship()
    assert caught.value.path == f"test://archive/{names.pack_object_name(pack)}"
    assert shipping.db.catalogue.checkpoint_seq == 0


def test_an_entry_that_is_ahead_of_the_log_in_the_archive_is_refused(shipping: Shipping) -> None:
    """Whoever proposes it."""
    shipping.checkpoint()
    stored = shipping.db.checkpoints()[0]
    from lowwater.engine.state.catalogue import describe_checkpoint

    described = describe_checkpoint(stored.read_index())
    assert shipping.db.propose_control(checkpoint_shipped_entry(0, described)) is None


def test_pages_stand_on_what_was_shipped(shipping: Shipping) -> None:
    """They leave, are read from the store, and a block that was damaged there is found and named."""
    shipping.checkpoint()
    shipping.ship_log()
    shipping.ship()
    db = shipping.db
    root = db.root()
    assert db.leaving.leave(db.checkpoints()[0]) > 10
    db.close()
    shipping.open()
    db = shipping.db
    assert db.root() == root
    assert {each.key: each.value for each in db.scan("b")} == {
        f"k{number:03}": b"%d" % number * (300 if number % 40 == 7 else 3) for number in range(120)
    }
    shipping.store.is_down = True
    assert list(db.scan("b")), "what was read a moment ago is still known"
    db.close()
    shipping.open()
    db = shipping.db
    with pytest.raises(StoreUnavailable):
        list(db.scan("b"))
    shipping.store.is_down = False
    for name, data in list(shipping.objects.data.items()):
        if name.startswith(names.PACKS):
            shipping.objects.data[name] = bytes(len(data))
    with pytest.raises(Corrupt, match="block"):
        list(db.scan("b"))
