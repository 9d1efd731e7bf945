"""Two that go on from one log: one of them stops, nothing that counted is lost, and readers follow one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from tests.engine.engine_model import CLUSTER_ID
from tests.tiering.lines import Line, Turns, begun, restored

from lowwater.engine.format.blocks import NO_HASH
from lowwater.errors import Busy, Fenced
from lowwater.tiering import archive as archive_module
from lowwater.tiering import names
from lowwater.tiering.archive import Archive, open_archive
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.objects import EpochClaim
from lowwater.tiering.states import States
from lowwater.tiering.verify import ObjectFile, verify_object

Pair = Callable[[MemoryObjects], list[Line]]


def shipping(objects: MemoryObjects) -> Line:
    """A database that runs in an epoch of its own, and has shipped."""
    line = begun(objects)
    line.live(1)
    assert line.fenced is None
    return line


def copied_before_anything_was_shipped(objects: MemoryObjects) -> list[Line]:
    lines = [begun(objects), begun(objects)]
    lines[1].name = "copy"
    return lines


def copied_while_it_was_shipping(objects: MemoryObjects) -> list[Line]:
    """The one that was copied runs on, and claims nothing more."""
    first, copy = shipping(objects), shipping(MemoryObjects())
    copy.store.objects = objects
    copy.name, copy.epoch = "copy", 0
    return [first, copy]


def copied_and_both_opened(objects: MemoryObjects) -> list[Line]:
    lines = copied_while_it_was_shipping(objects)
    lines[0].epoch = 0
    return lines


def restored_while_it_was_shipping(objects: MemoryObjects) -> list[Line]:
    first = shipping(objects)
    return [first, restored(objects)]


def restored_twice(objects: MemoryObjects) -> list[Line]:
    shipping(objects)
    return [restored(objects), restored(objects, "again")]


PAIRS = [
    copied_before_anything_was_shipped,
    copied_while_it_was_shipping,
    copied_and_both_opened,
    restored_while_it_was_shipping,
    restored_twice,
]


def operations_of(pair: Pair, rounds: int = 2) -> list[int]:
    """How many operations each line makes alone."""
    counts = []
    for number in (0, 1):
        lines = pair(MemoryObjects())
        before = lines[number].store.operations
        lines[number].live(rounds)
        assert lines[number].fenced is None
        counts.append(lines[number].store.operations - before)
    return counts


def check(lines: list[Line], note: str) -> None:
    """What a reader finds afterwards."""
    assert any(line.fenced for line in lines), f"{note}: both went on"
    store = MemoryStore(objects=lines[0].store.objects)
    archive = open_archive(store, CLUSTER_ID)
    newest = archive.newest()
    if newest is None:
        assert all(line.db.counted_hwm == 0 for line in lines), note
        return
    read = [each._replace(recorded_seq=0) for each in archive.catalogue_of(newest).segments]
    own = [[each for _, each, _ in line.segments()] for line in lines]
    assert read in [each[: len(read)] for each in own], f"{note}: it is nobody's line"
    for each in read:
        name = names.segment_name(each)
        verify_object(name, ObjectFile(store, name))
    for line, segments in zip(lines, own, strict=True):
        counted = [each for each in segments if each.last <= line.db.counted_hwm]
        assert read[: len(counted)] == counted, f"{note}: what counted for {line.name} is lost"
        assert list(line.db.check()) == []
        line.db.close()
    if not all(line.fenced for line in lines):
        (going_on,) = (number for number, line in enumerate(lines) if line.fenced is None)
        assert read == own[going_on][: len(read)], f"{note}: readers follow who was fenced"
        assert lines[going_on].db.counted_hwm == newest.hwm, note


def run_with_two_switches(pair: Pair, start: int, every: int) -> None:
    """One of them anywhere between two operations, the other one from beginning to end."""
    counts = operations_of(pair)
    outcomes = set()
    for first in (0, 1):
        for count in range(start, counts[first] + 1, every):
            lines = pair(MemoryObjects())
            turns = Turns(lines)
            turns.run(first, count)
            turns.run(1 - first)
            turns.finish()
            check(lines, f"{count} of {lines[first].name}")
            outcomes.add(tuple(line.fenced is not None for line in lines))
    assert {(True, False), (False, True)} <= outcomes, "whoever comes first always wins"


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_two_that_go_on_from_one_log_meet_at_some_places(pair: Pair, start: int) -> None:
    """The first and the last of the places, and some between."""
    run_with_two_switches(pair, start, 7)


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS)
def test_two_that_go_on_from_one_log_meet_anywhere(pair: Pair) -> None:
    """With two switches from one to the other."""
    run_with_two_switches(pair, 0, 1)


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS)
def test_two_that_stop_each_other_anywhere_follow_one_line(pair: Pair) -> None:
    """Both stopped anywhere between two operations, and then going on one after the other."""
    counts = operations_of(pair, rounds=1)
    for first in (0, 1):
        for count, other in product(range(1, counts[first] + 1), range(1, counts[1 - first])):
            lines = pair(MemoryObjects())
            for line in lines:
                line.rounds = 1
            turns = Turns(lines)
            turns.run(first, count)
            turns.run(1 - first, other)
            turns.run(first)
            turns.finish()
            check(lines, f"{count} of {lines[first].name}, {other} of the other")


def test_one_that_opens_again_and_again_is_never_fenced() -> None:
    """Also where it ended between its claim and its fork."""
    objects = MemoryObjects()
    line = begun(objects)
    for number in range(5):
        line.live(1)
        assert line.fenced is None
        assert line.db.counted_hwm == line.db.catalogue.hwm
        line.db.close()
        line.machine.open()
        line.epoch = 0
        if number % 2:
            archive = open_archive(line.store, CLUSTER_ID)
            archive.claim(line.db.catalogue, line.db._wal.chain.epoch, token=line.machine.randomness.token)
    line.live(1)
    assert [fork.epoch for fork in line.db.catalogue.forks] == [2, 3, 5, 6, 8, 9]
    archive = open_archive(MemoryStore(objects=objects))
    newest = archive.newest()
    assert newest is not None
    assert newest.epoch == 9
    catalogue = archive.catalogue_of(newest)
    assert catalogue.body() == line.db.catalogue.body(newest.seq)
    assert len([name for name in objects.data if name.startswith("epochs/")]) == 8
    # Every entry has its manifest.
    manifests = [names.parse(name) for name in sorted(objects.data)]
    seqs = [each.seq for each in manifests if each is not None and each.type == "manifest"]
    assert seqs == catalogue.seqs_after(0)
    line.db.close()


def test_a_restored_one_records_again_what_its_log_lacks() -> None:
    """Its log ends where the last segment did, before the entry that recorded that."""
    objects = MemoryObjects()
    first = shipping(objects)
    first.db.close()
    line = restored(objects)
    assert len(line.db.catalogue.segments) < len(first.db.catalogue.segments)
    line.live(1)
    assert line.fenced is None
    fork = line.db.catalogue.forks.last
    assert fork is not None
    assert (fork.parent_epoch, fork.epoch, fork.parent_manifest) == (2, 3, line.follows)
    assert fork.parent_segment == first.db.catalogue.hash_last
    archive = open_archive(MemoryStore(objects=objects))
    newest = archive.newest()
    assert newest is not None
    assert newest.epoch == 3
    recorded = [each._replace(recorded_seq=0) for each in archive.catalogue_of(newest).segments]
    before = [each._replace(recorded_seq=0) for each in first.db.catalogue.segments]
    assert recorded[: len(before)] == before
    # It may end before it has published anything, and goes on all the same.
    line.db.close()
    again = restored(objects, "third")
    archive = open_archive(again.store, CLUSTER_ID)
    again.claim(archive)
    again.follows, again.epoch = NO_HASH, 0
    again.live(1)
    assert again.fenced is None
    first.machine.open()
    first.epoch = 0
    first.live(1)
    assert isinstance(first.fenced, Fenced)
    assert [fork.epoch for fork in first.db.catalogue.forks] == [2], "whoever is fenced claims nothing"
    for each in (first, again):
        each.db.close()


def test_the_error_names_who_goes_on() -> None:
    objects = MemoryObjects()
    first, copy = copied_while_it_was_shipping(objects)
    copy.live(1)
    first.live(1)
    assert first.fenced is not None
    assert "copy" in str(first.fenced)
    assert "manifest/0000000003" in str(first.fenced)
    assert first.fenced.hint
    assert first.db.counted_hwm < first.db.catalogue.hwm


def test_whoever_finds_another_claim_takes_the_next_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that claim one epoch see each other, or one of them does."""
    objects = MemoryObjects()
    line = begun(objects)
    archive = open_archive(line.store, CLUSTER_ID, create=True)
    real = archive._write

    def write_beside(name: str, data: bytes) -> bool:
        found = names.parse(name)
        if found is not None and found.type == "epoch" and found.epoch < 4:
            other = EpochClaim(CLUSTER_ID, found.epoch, 1, NO_HASH, b"n" * 16, "other")
            real(other.name, other.encode())
        return real(name, data)

    monkeypatch.setattr(archive, "_write", write_beside)
    token = line.machine.randomness.token
    assert archive.claim(line.db.catalogue, 1, token=token).epoch == 4
    monkeypatch.setattr(archive_module, "COLLISIONS_MAX", 0)
    with pytest.raises(Busy):
        archive.claim(line.db.catalogue, 1, token=token)
    line.db.close()


def test_a_claim_names_the_manifest_that_it_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that had this log before may publish one more of their common past while the claim is
    written. A scrub takes a fork whose claim names another manifest for one without a claim."""
    line = shipping(MemoryObjects())
    archive = open_archive(line.store, CLUSTER_ID, create=True)
    real_publish, real_write = archive.publish, archive._write
    late: list[int] = []
    monkeypatch.setattr(archive, "publish", lambda _, seq: late.append(seq))
    line.db.put("b", "late", b"v" * 100)
    line.db._log.seal()
    with suppress(AttributeError):
        line.ship(archive)  # but for its manifest
    assert len(late) == 1

    def write_beside(name: str, data: bytes) -> bool:
        if name.startswith(names.EPOCHS) and late:
            real_publish(line.db.catalogue, late.pop())
        return real_write(name, data)

    monkeypatch.setattr(archive, "_write", write_beside)
    claim = archive.claim(line.db.catalogue, line.epoch, token=line.machine.randomness.token)
    (name,) = archive_module.epochs_above(line.store, claim.epoch - 1)
    newest = archive.newest()
    assert newest is not None
    assert newest.hwm == line.db.catalogue.hwm
    assert archive._read_claim(name).parent_manifest == claim.parent_manifest == newest.hash
    assert claim.epoch == line.epoch + 2
    line.db.close()


@pytest.mark.parametrize("pair", PAIRS)
def test_lists_alone_stop_one_of_two(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is with a store that keeps no name which is taken, and with older versions."""
    monkeypatch.setattr(States, "newest", lambda _: None)
    monkeypatch.setattr(Archive, "have_count", lambda *_: None)
    monkeypatch.setattr(Archive, "_append_claim", lambda *_: True)
    run_with_two_switches(pair, 0, 3)


@pytest.mark.parametrize("pair", PAIRS)
def test_without_lists_one_of_two_is_stopped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a hint where to begin, and the error's, who goes on."""
    monkeypatch.setattr(MemoryStore, "list", lambda *_: iter(()))
    run_with_two_switches(pair, 0, 3)


@pytest.mark.parametrize("step", ["the look after publishing", "the second look", "what is missing"])
def test_without_any_of_its_steps_two_go_on(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that has never failed proves nothing."""
    if step == "the look after publishing":
        monkeypatch.setattr(Archive, "require_epoch", lambda *_: None)
        monkeypatch.setattr(Archive, "_require_ours", lambda *_: None)
    elif step == "the second look":
        real = Archive._require_past
        looked: set[Archive] = set()

        def require_past(self: Archive, *args: Any) -> Any:
            # The claim's second look is that of an archive which has looked once.
            if self in looked and not self._published:
                return self.newest()
            looked.add(self)
            return real(self, *args)

        monkeypatch.setattr(Archive, "_require_past", require_past)
    else:
        monkeypatch.setattr(
            Archive,
            "unpublished",
            lambda self, catalogue: catalogue.seqs_after(getattr(self.newest(), "seq", 0)),
        )
        monkeypatch.setattr(Archive, "is_past", lambda *_: True)
    with pytest.raises(AssertionError):
        run_all_pairs()


def run_all_pairs() -> None:
    for pair in PAIRS:
        run_with_two_switches(pair, 0, 1)
