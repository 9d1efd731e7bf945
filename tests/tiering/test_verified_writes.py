"""tiering/verified_writes.py: a store that has other bytes than it was given is not believed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from tests.tiering.shipping import archived, crashes, objects_of, shared
from tests.tiering.test_shipper import fill, new_machine, values_in

from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.failing_store import FaultyStore, StoreFault, StoreOperation
from lowwater.errors import DataError, StoreCorrupt
from lowwater.tiering.checksums import Hashing, Sent, md5_of_base64, md5_of_etag
from lowwater.tiering.memory_store import MemoryStore
from lowwater.tiering.names import PACKS, WAL
from lowwater.tiering.scrub import Scrub
from lowwater.tiering.verified_writes import KnownObjects, has_sound, write_verified

# All that a database ships; what is flipped is not what these names say.
EVERYTHING = ("cluster.cbor", "epochs/", "states/", "wal/", "manifest/", "checkpoints/", "data/packs/")
PACK = "data/packs/" + "ab" * 32 + ".pack"


def flips(names: str, *, first: int = 10**9) -> Callable[[StoreOperation], StoreFault | None]:
    """Of the objects whose names begin so, the first writes are kept with another bit."""
    left = [first]

    def schedule(operation: StoreOperation) -> StoreFault | None:
        if operation.kind != "write" or not operation.name.startswith(names) or not left[0]:
            return None
        left[0] -= 1
        return StoreFault(flip_kept=operation.size * 4)

    return schedule


def errors_in(server: FaultyStore) -> list[str]:
    store = MemoryStore(objects=server.objects)
    return [str(each) for each in Scrub(store, deep=True, at_once=1).findings() if each.severity == "error"]


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("names", EVERYTHING)
def test_an_upload_that_was_changed_on_its_way_is_sent_again(names: str, has_checksums: bool) -> None:
    """At once, where it has the name of its content; nothing ever rests on it. A state is followed by the
    next one."""
    machine = new_machine(servers=[FaultyStore(fault=flips(names, first=1), has_checksums=has_checksums)])
    written = fill(machine, 0, 300)
    machine.db.checkpoint()
    if names == "states/":
        with pytest.raises(StoreCorrupt, match="a state is not what was written"):
            machine.db.ship()
        machine.later(10)
    hwm = machine.db.ship()
    assert machine.db.counted_hwm == hwm
    assert machine.db.shipping().alarm is None
    assert errors_in(machine.server) == []
    if names != "states/":
        assert values_in(archived(machine.server)[1]) == written
    machine.db.close()


@pytest.mark.parametrize("names", ["wal/", "manifest/", "checkpoints/", "data/packs/"])
def test_an_upload_that_was_changed_on_its_way_and_never_answered_is_sent_again(names: str) -> None:
    """Nobody but this process has sent it, though it does not know that it has."""
    left = [1]

    def fault(operation: StoreOperation) -> StoreFault | None:
        if operation.kind != "write" or not operation.name.startswith(names) or not left[0]:
            return None
        left[0] -= 1
        return StoreFault(error="timed_out", after=True, flip_kept=operation.size * 4)

    machine = new_machine(servers=[FaultyStore(fault=fault)])
    written = fill(machine, 0, 300)
    machine.db.checkpoint()
    machine.later(60)
    assert left == [0]
    assert machine.db.shipping().alarm is None
    assert machine.db.counted_hwm == machine.db.ship()
    assert errors_in(machine.server) == []
    assert values_in(archived(machine.server)[1]) == written
    machine.db.close()


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("names", EVERYTHING[1:])
def test_nothing_is_purged_while_uploads_are_changed_on_their_way(names: str, has_checksums: bool) -> None:
    """It is an alarm, and once the network is sound again, shipping goes on without hands."""
    machine = new_machine(servers=[FaultyStore(has_checksums=has_checksums)])
    written = fill(machine, 0, 300)
    machine.db.checkpoint()
    machine.db.flush()
    machine.server.fault = flips(names)
    with pytest.raises(StoreCorrupt) as caught:
        machine.db.ship()
    assert names in str(caught.value.path)
    machine.later(30)
    status = machine.db.shipping()
    assert status.state == "stopped"
    assert status.alarm is not None
    if names not in ("data/packs/", "checkpoints/"):
        assert machine.db.counted_hwm == 0
        assert machine.db.purge(machine.db.purgeable_seq()) == 0
    written |= fill(machine, 300, 10)
    machine.server.fault = None
    machine.later(120)
    assert machine.db.shipping().alarm is None
    machine.db.checkpoint()
    machine.db.ship()
    assert errors_in(machine.server) == []
    if names != "states/":
        assert values_in(archived(machine.server)[1]) == written
    machine.db.flush()
    assert machine.db.purge(machine.db.purgeable_seq()) > 0
    machine.db.close()


@pytest.mark.parametrize("names", ["wal/", "data/packs/", "checkpoints/"])
def test_an_object_that_was_there_with_other_bytes_does_not_count(names: str) -> None:
    """Of the right size, and with the right ends. It is not this process's to write over: it is an alarm, and
    goes on when it was moved away."""
    line = new_machine()
    fill(line, 0, 300)
    line.db.checkpoint()
    line.db.ship()
    name = [each for each in objects_of(line.server) if each.startswith(names)][1 if names == "wal/" else 0]
    line.db.close()
    for has_checksums in (True, False):
        machine = new_machine(servers=[FaultyStore(has_checksums=has_checksums)])
        machine.server.objects.add(name, objects_of(line.server)[name])
        machine.server.flip_byte(name, len(objects_of(line.server)[name]) // 2, 4)
        spoiled = machine.server.objects.data[name]
        written = fill(machine, 0, 300)
        machine.db.checkpoint()
        with pytest.raises(StoreCorrupt) as caught:
            machine.db.ship()
        assert caught.value.path == f"memory://faulty/{name}"
        assert "move it away" in caught.value.hint
        machine.later(20)
        assert machine.server.objects.data[name] == spoiled
        machine.server.objects.remove(name)
        machine.later(100)
        machine.db.ship()
        assert values_in(archived(machine.server)[1]) == written
        assert shared(objects_of(machine.server)) == shared(objects_of(line.server))
        machine.db.close()


@pytest.mark.parametrize("is_other_life", [True, False])
@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_segment_that_is_flipped_after_it_was_shipped_is_not_purged(
    has_checksums: bool, is_other_life: bool
) -> None:
    """Its two ends are as they should be. What another life has shipped, or the store has another mark for
    since, is read or compared before it goes here."""
    machine = new_machine(servers=[FaultyStore(has_checksums=has_checksums)])
    fill(machine, 0, 300)
    machine.db.ship()
    machine.db.flush()
    name = [each for each in objects_of(machine.server) if each.startswith(WAL)][1]
    machine.server.flip_byte(name, len(machine.server.objects.data[name]) // 2, 1)
    if is_other_life:
        machine.db.close()
        machine.open()
        machine.later(5)
    with pytest.raises(DataError, match="not what its name says"):
        machine.db.purge(machine.db.purgeable_seq())
    assert machine.db.marks().purged == 0
    alarm = machine.db.shipping().alarm
    assert alarm is not None
    assert name in str(alarm.where)
    machine.server.flip_byte(name, len(machine.server.objects.data[name]) // 2, 1)
    assert machine.db.purge(machine.db.purgeable_seq()) > 0
    machine.db.close()


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_beside_a_flipped_upload_leaves_nothing_that_counts(after: bool) -> None:
    """Wherever it happens: the object is sent again, or it is an alarm until somebody has moved it away."""
    for number in range(1, 400):
        machine = new_machine()
        written = fill(machine, 0, 100)
        machine.db.checkpoint()
        machine.server.fault = flips(WAL, first=1)
        crashes(machine, number, after=after)
        try:
            machine.db.ship()
        except SimulatedCrash:
            pass
        else:
            machine.db.close()
            break
        machine.crash("keep", machine.rng)
        machine.server.fault = None
        machine.open()
        machine.later(5)
        for each in errors_in(machine.server) if machine.server.objects.data else []:
            assert machine.db.counted_hwm == 0, each
        alarm = machine.db.shipping().alarm
        if alarm is not None:
            assert WAL in str(alarm.where)
            machine.server.objects.remove(str(alarm.where).removeprefix("memory://faulty/"))
        machine.db.ship()
        assert values_in(archived(machine.server)[1]) == written
        machine.db.close()
    else:
        raise AssertionError("it never came to an end")


def test_a_checksum_of_other_bytes_is_none() -> None:
    """A store that encrypts with a key of its own says one that looks like an MD5, and is not."""
    machine = new_machine()
    written = fill(machine, 0, 300)
    machine.db.checkpoint()
    read: set[str] = set()

    def schedule(operation: StoreOperation) -> StoreFault | None:
        if operation.kind == "read":
            read.add(operation.name)
        return StoreFault(wrong_checksum=True) if operation.kind == "stat" else None

    machine.server.fault = schedule
    machine.db.ship()
    sent = {name for name in objects_of(machine.server) if name.startswith((WAL, PACKS))}
    assert sent <= read
    assert values_in(archived(machine.server)[1]) == written
    machine.db.close()


def test_nothing_is_read_back_where_the_checksum_is_right() -> None:
    machine = new_machine()
    fill(machine, 0, 300)
    machine.db.checkpoint()
    read: list[str] = []
    machine.server.fault = lambda each: read.append(each.name) if each.kind == "read" else None
    machine.db.ship()
    assert [name for name in read if name.startswith((WAL, PACKS))] == []
    machine.db.close()


def test_of_two_senders_neither_takes_the_others_sound_object_away() -> None:
    """Both were told that they made it, as by a server without conditions, and both saw it flipped."""
    server = FaultyStore()
    right = b"what this name says"
    flip = server.open("network")
    name = "data/packs/" + hashlib.sha256(right).hexdigest() + ".pack"
    flip.write(name, [b"what that name says"], size=len(right))
    first, second = KnownObjects(), KnownObjects()
    for known in (first, second):
        known.doubt(name)
    written: list[str] = []
    server.fault = lambda each: written.append(each.client) if each.kind == "write" else None
    for known, client in ((first, "first"), (second, "second")):
        write_verified(server.open(client), name, lambda: [right], size=len(right), known=known)
        assert server.objects.data[name] == right
    assert written.count("first") == 2, "asked, and replaced"
    assert written.count("second") == 1, "asked, and kept"


def test_what_has_no_name_of_an_archives_is_never_written_over() -> None:
    server = FaultyStore(fault=flips("mine"))
    store = server.open()
    with pytest.raises(StoreCorrupt):
        write_verified(store, "mine", lambda: [b"0123456789"], size=10)
    kept = server.objects.data["mine"]
    server.fault = None
    assert not write_verified(store, "mine", lambda: [b"0123456789"], size=10)
    assert server.objects.data["mine"] == kept


def test_an_object_is_compared_once() -> None:
    """Not at each look: where there is no checksum, that reads all of it."""
    server = FaultyStore(has_checksums=False)
    store, known = server.open(), KnownObjects()
    name = "states/" + f"{1:020}.cbor"
    server.objects.add(name, objects_of(shipped())[name])
    read: list[str] = []
    server.fault = lambda each: read.append(each.name) if each.kind == "read" else None
    assert has_sound(store, name, None, known=known)
    assert len(read) == 1
    assert has_sound(store, name, None, known=known)
    assert len(read) == 1
    known.doubt(name)
    assert has_sound(store, name, None, known=known)
    assert len(read) == 2
    known.doubt(name)
    server.flip_byte(name, 5, 1)
    assert not has_sound(store, name, None, known=known)
    known.trust(name)
    with pytest.raises(StoreCorrupt):
        has_sound(store, name, None, known=known)


def shipped() -> FaultyStore:
    machine = new_machine()
    machine.db.ship()
    machine.db.close()
    return machine.server


# ---- checksums


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20, 25, 100])
@pytest.mark.parametrize("cut", [1, 3, 10, 17, 1000])
def test_a_checksum_is_of_the_bytes_however_they_came(size: int, cut: int) -> None:
    """As S3 makes it of an object in parts of 10 bytes, and of one that came at once."""
    data = bytes(range(size))
    hashing = Hashing(10)
    sent = Sent(hashing)
    parts = [data[start : start + cut] for start in range(0, size, cut)]
    assert b"".join(sent.passing(parts)) == data
    assert sent.size == size
    whole = hashlib.md5(data).hexdigest()
    pieces = [data[start : start + 10] for start in range(0, size, 10)]
    of_parts = hashlib.md5(b"".join(hashlib.md5(each).digest() for each in pieces)).hexdigest()
    expected = {whole, f"{of_parts}-{len(pieces)}"} if size > 10 else {whole}
    assert sent.md5s == expected
    for said in expected:
        hashing.learn(size, said, is_right=True)
        again = Sent(hashing)
        list(again.passing(parts))
        assert again.md5s == ({said} if size > 10 else {whole})
        hashing.learn(1000, "", is_right=False)
    assert sent.anew().md5s == Sent(Hashing(10)).md5s


@pytest.mark.parametrize(
    ("etag", "md5"),
    [
        ('"5d41402abc4b2a76b9719d911017c592"', "5d41402abc4b2a76b9719d911017c592"),
        ("5D41402ABC4B2A76B9719D911017C592", "5d41402abc4b2a76b9719d911017c592"),
        ('"5d41402abc4b2a76b9719d911017c592-12"', "5d41402abc4b2a76b9719d911017c592-12"),
        ('W/"5d41402abc4b2a76b9719d911017c592"', ""),
        ('"CJD6u5P1y5EDEAE="', ""),
        ("", ""),
        (None, ""),
    ],
)
def test_an_etag_is_an_md5_where_it_looks_like_one(etag: str | None, md5: str) -> None:
    assert md5_of_etag(etag) == md5


def test_a_content_md5_is_one_where_it_has_16_bytes() -> None:
    assert md5_of_base64("XUFAKrxLKna5cZ2REBfFkg==") == "5d41402abc4b2a76b9719d911017c592"
    assert md5_of_base64("XUFAKrxLKna5cZ2REBfF") == ""
    assert md5_of_base64("no base64") == ""
