"""Scrubs: a sound archive gives no error, and whatever is missing or damaged is found and named."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import pytest
from tests.engine.engine_model import CLUSTER_ID
from tests.tiering.lines import begun, restored
from tests.tiering.whole_archive import (
    copy_of,
    made,
    put,
    ship,
    ship_checkpoint,
    store_of,
    types_in,
    whole_archive,
)

from lowwater.engine.log.check import Finding, Progress
from lowwater.engine.state import catalogue
from lowwater.errors import NotFound, StoreUnavailable
from lowwater.tiering import names, reached, scrub_checkpoints
from lowwater.tiering.archive import open_archive
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.objects import Manifest, encode_cluster
from lowwater.tiering.open_store import open_store
from lowwater.tiering.scrub import Scrub
from lowwater.tiering.testing.s3_server import S3Server

TYPES = {"cluster", "epoch", "state", "segment", "manifest", "chunk", "checkpoint", "pack"}


def scrubbed(objects: MemoryObjects, **named: Any) -> list[Finding]:
    return list(Scrub(store_of(objects), **{"at_once": 1, **named}).findings())


def errors(objects: MemoryObjects, **named: Any) -> list[Finding]:
    return [each for each in scrubbed(objects, **named) if each.severity == "error"]


def told(objects: MemoryObjects, **named: Any) -> list[Finding]:
    """Of a state there are others that say the same: so that is a warning."""
    return [each for each in scrubbed(objects, **named) if each.severity != "note"]


def names_it(finding: Finding, name: str) -> bool:
    """A finding about what is gone has a star where nobody knows the rest of its name any more."""
    return fnmatch(f"memory://archive/{name}", finding.where)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """An archive whose catalogue has many chunks and runs, although it is small."""
    for module in (catalogue, reached):
        monkeypatch.setattr(module, "CHUNK_RECORDS", 16)
        monkeypatch.setattr(module, "RUN_RECORDS", 4)
    return made(60).data


# ---------------------------------------------------------------------------- sound archives


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("at_once", [1, 5])
def test_a_sound_archive_gives_notes_and_no_more(deep: bool, at_once: int) -> None:
    """With objects of all types, raw and compressed, and with what a fenced line left."""
    objects = whole_archive()
    assert types_in(objects).keys() == TYPES
    scrub = Scrub(store_of(objects), deep=deep, at_once=at_once)
    steps = list(scrub.steps())
    found = [each for each in steps if isinstance(each, Finding)]
    assert {each.severity for each in found} == {"note"}
    assert ["fenced" in each.what for each in found] == [True]
    done = sum(each.bytes_done for each in steps if isinstance(each, Progress))
    assert scrub.manifest is not None
    assert scrub.manifest == open_archive(store_of(objects)).newest()
    assert scrub.objects == len(objects.data)
    if deep:
        assert scrub.bytes_read >= scrub.stored_bytes
    else:
        assert scrub.requests < len(objects.data)
        assert scrub.bytes_read < scrub.stored_bytes / 2
    assert 0.5 * scrub.stored_bytes < done <= scrub.stored_bytes


def test_an_empty_archive_is_sound() -> None:
    """It was opened, and nothing is shipped yet."""
    objects = MemoryObjects()
    open_archive(MemoryStore(objects=objects), bytes(16), create=True)
    assert scrubbed(objects, deep=True) == []


@pytest.mark.parametrize("data", [{}, {"what/ever": b"1"}])
def test_where_there_is_no_archive_it_says_so(data: dict[str, bytes]) -> None:
    with pytest.raises(NotFound, match="no archive"):
        Scrub(store_of(copy_of(data)))


def test_what_a_shipper_writes_meanwhile_is_no_finding() -> None:
    """The newest manifest is looked up before the list is made: what it reaches is in the list."""
    objects = MemoryObjects()
    line = begun(objects)
    put(line, "a", 3)
    ship_checkpoint(line)
    store = store_of(objects)
    real = store.list

    def list_then_ship(prefix: str = "", start_after: str = "") -> Iterator[Any]:
        if prefix:
            return real(prefix, start_after)
        checkpoints = [each for each in real() if each.name < "manifest"]
        put(line, "b", 3)
        ship_checkpoint(line)
        line.db._log.seal()
        ship(line)
        return iter([*checkpoints, *(each for each in real() if each.name >= "manifest")])

    store.list = list_then_ship  # type: ignore[method-assign]
    found = list(Scrub(store, deep=True, at_once=1).findings())
    assert [each for each in found if each.severity != "note"] == []
    line.db.close()


def test_a_store_that_is_down_ends_a_scrub() -> None:
    """It is no damage, and nothing may be concluded from it."""

    class Down(MemoryStore):
        def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
            if name.startswith(names.WAL):
                raise StoreUnavailable("no answer")
            return super().read(name, start, end)

    for at_once in (1, 4):
        with pytest.raises(StoreUnavailable):
            list(Scrub(Down(objects=whole_archive()), at_once=at_once).steps())


# ---------------------------------------------------------------------------- removed


def removals(objects: dict[str, bytes], name: str) -> list[Finding]:
    without = copy_of(objects)
    without.remove(name)
    return told(without)


def test_every_removed_object_is_found_and_named(small_chunks: dict[str, bytes]) -> None:
    """All but what no reader would miss: what a fenced line has left, and the newest state, without which the
    one before it is the newest, and a list has what the newest one named."""
    newest = max(name for name in small_chunks if name.startswith(names.STATES))
    unreached = {each.where.removeprefix("memory://archive/") for each in scrubbed(copy_of(small_chunks))}
    assert len(unreached) == 1
    counts: dict[str, int] = {}
    for name in small_chunks:
        found = removals(small_chunks, name)
        if name in unreached or name == newest:
            assert found == [], name
            continue
        assert any(names_it(each, name) for each in found), name
        assert all("gone" in each.what and each.hint for each in found), found
        if "chunks" not in name:
            assert all(names_it(each, name) for each in found), found
        parsed = names.parse(name)
        assert parsed is not None
        counts[parsed.type] = counts.get(parsed.type, 0) + 1
    assert counts.keys() == TYPES
    assert counts["chunk"] > 10


def test_a_parent_that_is_gone_is_found_though_the_log_lacks_its_entry() -> None:
    """A restored log has lost its parent's last entries: only the fork still names that manifest."""
    objects = MemoryObjects()
    first = begun(objects)
    put(first, "a", 3)
    ship_checkpoint(first)
    parent = open_archive(store_of(objects)).newest()
    assert parent is not None
    second = restored(objects)
    ship(second)
    put(second, "b", 3)
    second.db._log.seal()
    ship(second)
    assert scrubbed(objects, deep=True) == []
    objects.remove(parent.name)
    assert any(names_it(each, parent.name) for each in errors(objects))
    first.db.close()
    second.db.close()


def test_a_checkpoint_that_is_gone_is_a_warning_where_the_log_has_what_was_in_it() -> None:
    """A restore takes longer without it. Where the log has a hole, nothing else has it."""
    objects = whole_archive()
    found = types_in(objects)
    checkpoint, segment = min(found["checkpoint"]), min(found["segment"])
    objects.remove(checkpoint)
    for deep in (False, True):
        (only,) = told(objects, deep=deep)
        assert (only.severity, only.what) == ("warning", "the checkpoint is gone")
        assert names_it(only, checkpoint)
    objects.remove(segment)
    assert {each.what for each in errors(objects)} >= {"the checkpoint is gone", "the segment is gone"}


def test_an_object_of_another_size_is_found_without_reading_it() -> None:
    for kind, found in types_in(whole_archive()).items():
        objects = whole_archive()
        name = min(found)
        objects.data[name] = objects.data[name][:-1]
        assert any(names_it(each, name) for each in told(objects)), kind


# ---------------------------------------------------------------------------- flipped


def flipped(objects: MemoryObjects, rng: random.Random, name: str) -> MemoryObjects:
    data = bytearray(objects.data[name])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    objects.data[name] = bytes(data)
    return objects


def holds_every_flip(archive: dict[str, bytes], seed: int, count: int) -> None:
    """Flips at random, as many of each type, found by whole scrubs: as an error, or as a warning where
    nothing reaches the object, or others say the same."""
    rng = random.Random(seed)
    by_type = list(types_in(copy_of(archive)).values())
    unreached = {each.where for each in scrubbed(copy_of(archive))}
    for number in range(count):
        name = rng.choice(by_type[number % len(by_type)])
        found = scrubbed(flipped(copy_of(archive), rng, name), deep=True)
        is_minor = f"memory://archive/{name}" in unreached or name.startswith(names.STATES)
        severity = "warning" if is_minor else "error"
        assert any(names_it(each, name) and each.severity == severity for each in found), (name, found)
        assert all(each.hint for each in found)


def test_flipped_bytes_are_found(small_chunks: dict[str, bytes]) -> None:
    holds_every_flip(small_chunks, seed=1, count=35)


@pytest.mark.long
def test_two_hundred_flipped_bytes_are_found_by_whole_scrubs() -> None:
    holds_every_flip(whole_archive().data, seed=2, count=200)


@pytest.mark.long
def test_an_archive_whose_catalogue_has_a_real_chunk_is_scrubbed() -> None:
    """More segments than one chunk of 1,024 takes; removals and flips in it."""
    archive = made(1100).data
    chunks = [name for name in archive if name.startswith(names.CHUNKS)]
    assert max(len(archive[name]) for name in chunks) > 50_000
    assert {each.severity for each in scrubbed(copy_of(archive), deep=True)} == {"note"}
    rng = random.Random(3)
    newest = open_archive(store_of(copy_of(archive))).newest()
    assert newest is not None
    unreached = {each.where for each in scrubbed(copy_of(archive))}
    for name in [*chunks[:3], max(chunks, key=lambda each: len(archive[each])), *rng.sample([*archive], 8)]:
        if f"memory://archive/{name}" not in unreached and name != newest.name:
            assert any(names_it(each, name) for each in removals(archive, name)), name
    holds_every_flip(archive, seed=4, count=7)


# ---------------------------------------------------------------------------- told apart


def findings_of(objects: MemoryObjects, name: str, **named: Any) -> list[tuple[str, str]]:
    found = [each for each in scrubbed(objects, **named) if names_it(each, name)]
    return [(each.severity, each.what) for each in found]


def test_orphans_are_notes_and_say_what_they_are() -> None:
    objects = whole_archive()
    stray = {
        "what/ever": ("warning", "no object of an archive"),
        names.pack_object_name(bytes(32)): ("note", "no recorded checkpoint needs"),
        names.chunk_name(bytes(32)): ("note", "no manifest that counts needs"),
        f"checkpoints/checkpoint-{7:020}-{0:016}.ckpt": ("note", "no entry records"),
        f"epochs/{9:010}-{0:016}.cbor": ("error", ""),
        f"wal/{9:010}/segment-{7:020}-{8:020}-{0:016}.log": ("note", "nothing is published"),
        f"wal/{2:010}/segment-{7:020}-{8:020}-{0:016}.log": ("note", "fenced"),
        f"wal/{3:010}/segment-{10**6:020}-{10**7:020}-{0:016}.log": ("note", "before the one"),
        f"manifest/{2:010}/{10**6:020}-{0:016}.cbor": ("note", "fenced"),
    }
    for name, (severity, what) in stray.items():
        with_it = copy_of(objects.data)
        with_it.add(name, b"x" * 10)
        ((found_severity, found_what),) = findings_of(with_it, name)
        assert found_severity == severity, name
        assert what in found_what
        if severity == "note":
            ((found_severity, found_what),) = findings_of(with_it, name, deep=True)
            assert found_severity == "warning"
            assert "nothing reaches it" in found_what


def test_segments_that_are_shipped_and_not_recorded_are_notes() -> None:
    objects = MemoryObjects()
    line = begun(objects)
    line.live(1)
    put(line, "b", 2)
    line.db._log.seal()
    _, described, data = line.segments()[-1]
    name = names.segment_name(described)
    objects.add(name, data)
    ((severity, what),) = findings_of(objects, name, deep=True)
    assert severity == "note"
    assert "no manifest says so yet" in what
    line.db.close()


def test_two_manifests_of_the_newest_entry_are_an_error() -> None:
    objects = whole_archive()
    newest = open_archive(store_of(objects)).newest()
    assert newest is not None
    other = Manifest(newest.cluster_id, newest.epoch, newest.seq, 0, catalogue.Catalogue().heads())
    objects.add(other.name, other.encode())
    assert any("two manifests" in each.what for each in errors(objects))


def test_an_archive_of_another_cluster_in_the_same_place_is_found() -> None:
    """Somebody copied two archives into one prefix."""
    objects = whole_archive()
    objects.data[names.CLUSTER] = encode_cluster(bytes(16))
    found = errors(objects)
    assert {names.parse(each.where.removeprefix("memory://archive/")).type for each in found} == {  # type: ignore[union-attr]
        "manifest",
        "epoch",
    }
    assert all("another cluster" in each.what for each in found)


# ---------------------------------------------------------------------------- a part of it


def test_a_range_of_seqs_looks_at_no_more() -> None:
    objects = whole_archive()
    archive = open_archive(store_of(objects))
    newest = archive.newest()
    assert newest is not None
    catalogued = archive.catalogue_of(newest)
    middle = catalogued.segments[40]
    for each in catalogued.segments:
        if each != middle:
            objects.remove(names.segment_name(each))
    seqs = (middle.first, middle.last)
    assert errors(objects, seqs=seqs, deep=True) == []
    objects.remove(names.segment_name(middle))
    (found,) = errors(objects, seqs=seqs, deep=True)
    assert names_it(found, names.segment_name(middle))


def test_blocks_are_looked_at_beyond_their_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries and places: what a bug would get wrong, with hashes that all fit."""
    objects = whole_archive()
    real = scrub_checkpoints.list_boundaries
    monkeypatch.setattr(scrub_checkpoints, "Boundaries", lambda salt, keys: real(salt[::-1], 1))
    assert any(
        "begins where none begins" in each.what or "goes on" in each.what
        for each in errors(objects, deep=True)
    )
    monkeypatch.undo()
    monkeypatch.setattr(scrub_checkpoints.CheckpointChecker, "_is_place", lambda self, row: row.place[1] < 10)
    assert any("large value" in each.what for each in errors(objects, deep=True))


def test_a_segment_that_does_not_follow_is_found() -> None:
    """The catalogue itself skips one, and every object is what its name says."""
    line = begun(MemoryObjects())
    for number in range(3):
        put(line, f"{number}", 2)
        line.db._log.seal()
    objects = MemoryObjects()
    archive = open_archive(MemoryStore(objects=objects), CLUSTER_ID, create=True)
    skipping = catalogue.Catalogue()
    for number, (_, described, data) in enumerate(line.segments()):
        if number != 1:
            objects.add(names.segment_name(described), data)
            skipping.add(described._replace(recorded_seq=100 + number))
    archive.publish(skipping, 101)
    archive.publish(skipping, 102)
    for deep in (False, True):
        # The manifests were made with more than there was.
        found = [each for each in errors(objects, deep=deep) if "segment" in each.where]
        assert ["does not follow the one before it" in each.what for each in found] == [True]
    line.db.close()


def test_what_lies_in_the_archive_of_another_cluster_is_said_once() -> None:
    """A clone's catalogue begins with its parent's segments, of which its own archive has none."""
    line = begun(MemoryObjects())
    put(line, "a", 3)
    line.db._log.seal()
    ((_, parents, _),) = line.segments()
    other_id = bytes(16)
    objects = MemoryObjects()
    archive = open_archive(MemoryStore(objects=objects), other_id, create=True)
    cloned = catalogue.Catalogue()
    cloned.add(parents._replace(recorded_seq=parents.last + 1))
    seq = parents.last + 2
    cloned.add(catalogue.Fork(other_id, 2, 1, seq - 1, parents.hash, b"m" * 32, seq))
    checkpoint = catalogue.CheckpointDescriptor(seq, 0, b"c" * 32, 100, b"r" * 32, b"k" * 32, seq + 1)
    cloned.add(checkpoint)
    archive.publish(cloned, seq + 1)
    found = scrubbed(objects)
    assert [each.severity for each in found] == ["warning", "error"]
    assert "cloned from" in found[0].what
    assert names_it(found[1], names.checkpoint_name(checkpoint))
    objects.add(names.segment_name(parents), b"x")
    assert any("segment" in each.where for each in errors(objects)), "then it is no clone"
    line.db.close()


def test_an_archive_on_a_real_server_is_scrubbed(s3_server: S3Server) -> None:
    """With several requests at once."""
    uri = s3_server.uri("scrub/archive")
    store = open_store(uri, options=s3_server.options)
    archive = whole_archive(12).data
    for name, data in archive.items():
        store.write(name, [data], size=len(data))
    for deep in (False, True):
        assert {each.severity for each in Scrub(store, deep=deep).findings()} == {"note"}
    lost = min(name for name in archive if name.startswith(names.PACKS))
    store.delete(lost)
    found = [each for each in Scrub(store).findings() if each.severity == "error"]
    assert [each.where for each in found] == [f"{store.uri}/{lost}"]
    store.close()
