"""Restores to random seqs and times, each compared with what the log says by the rules of the model."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest
from tests.engine.engine_model import PAGE_KEYS, SALT
from tests.recovery.replayed import Replayed
from tests.recovery.shipped import QUIET, SMALL, Place, checkpoint, content, opened, ship

from lowwater import Delete, Put
from lowwater.engine.database import transactions
from lowwater.engine.database.origin import read_origin
from lowwater.engine.log.chain import create_entry
from lowwater.engine.log.log import Log
from lowwater.recovery.restore import restore_with
from lowwater.recovery.restored_opening import open_restored, open_to_read
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
KEYS = [f"{letter}/{number}" for letter in "abc" for number in range(30)]


class Original(NamedTuple):
    objects: MemoryObjects
    entries: list[Any]


def a_log(place: Place) -> None:
    settings = {"segment_bytes": SMALL.segment_bytes, "block_bytes": 4096, "page_keys": PAGE_KEYS}
    create = create_entry(bytes(range(16)), SALT, settings)
    Log.open("db/wal", options=SMALL, seams=place.seams(), create=create).close()


def worked(seed: int, steps: int) -> Original:
    """A database that has lived, and shipped all of it."""
    rng = random.Random(f"work {seed}")
    objects, place = MemoryObjects(), Place(seed)
    a_log(place)
    db = opened(place, MemoryStore(objects=objects))
    store = MemoryStore(objects=objects)
    db.create_bucket("b")
    open_transactions: list[Any] = []
    for number in range(steps):
        place.clock.advance(rng.choice([0, 0, 0.001, 2.0]))
        _work(db, rng, number, open_transactions)
        if rng.random() < 0.3:
            place.runner.run_one(place.rng)
        if rng.random() < 0.03:
            ship(db, place)
        if rng.random() < 0.02:
            checkpoint(db, place, store)
    for each in open_transactions:
        each.commit()
    ship(db, place)
    entries = [*db.log("earliest")]
    db.close()
    return Original(objects, entries)


def _value(rng: random.Random, number: int) -> bytes:
    return b"%d." % number * rng.choice([1, 5, 50, 100, 800])


def _work(db: Any, rng: random.Random, number: int, open_transactions: list[Any]) -> None:
    key = rng.choice(KEYS)
    what = rng.random()
    held = {each.key for each in db.scan("b")} if what > 0.5 else set()
    if what < 0.5:
        db.put("b", key, _value(rng, number), {"n": str(number)} if rng.random() < 0.2 else None)
    elif what < 0.62:
        if key in held:
            db.delete("b", key)
    elif what < 0.7:
        if key in held:
            db.copy("b", key, "b", rng.choice(KEYS))
    elif what < 0.82:
        group = rng.sample(KEYS, 4)
        db.write(
            [Delete("b", each) if each in held else Put("b", each, _value(rng, number)) for each in group]
        )
    elif what < 0.9 and len(open_transactions) < 2:
        txn = db.transaction()
        prefix = f"txn{number}/"
        for each in range(rng.randint(1, 6)):
            txn.put("b", f"{prefix}{each}", _value(rng, number) + bytes(300))
        open_transactions.append(txn)
    elif open_transactions:
        txn = open_transactions.pop(0)
        txn.commit() if rng.random() < 0.7 else txn.abort()
    elif rng.random() < 0.2:
        db.create_bucket(f"bucket {number}")


def compare(original: Original, moments: list[int | datetime], *, full_of: int = 5) -> None:
    """Restore each, in the order of the log."""
    by_seq: list[tuple[int, int | datetime]] = []
    for moment in moments:
        seq = moment
        if isinstance(moment, datetime):
            time_us = (moment - EPOCH) // timedelta(microseconds=1)
            seq = max(entry.seq for entry in original.entries if entry.time_us <= time_us)
        assert isinstance(seq, int)
        by_seq.append((seq, moment))
    replayed, number = Replayed(), 0
    for count, (seq, moment) in enumerate(sorted(by_seq, key=lambda each: each[0])):
        while number < len(original.entries) and original.entries[number].seq <= seq:
            replayed.add(original.entries[number])
            number += 1
        compare_one(original, replayed.model, seq, moment, full=count % full_of == 0)


def compare_one(original: Original, model: Any, seq: int, moment: int | datetime, *, full: bool) -> None:
    place, store = Place(seq), MemoryStore(objects=original.objects)
    done = restore_with(store, "to", moment, seams=place.seams(), pages=place.pages, full=full)
    assert done.seq == model.applied <= seq, "a group that is not complete does not count"
    assert done.is_clone
    place.pages.reopen()
    core: Any = open_to_read("to", store, seams=place.seams(), pages=place.pages)
    try:
        assert core.root() == model.root()
        if full:
            assert done.root == model.root()
            assert not list(core.leaving.away())
        assert content(core) == {bucket: model.live(bucket) for bucket in model.bucket_names()}
        assert list(core.check(away=True)) == []
    finally:
        core.close()


def live_on(original: Original, seqs: list[int]) -> int:
    """Clone at each, and go on with it. How many clones had transactions that were open."""
    with_losers = 0
    replayed, number = Replayed(), 0
    for seq in sorted(seqs):
        while number < len(original.entries) and original.entries[number].seq <= seq:
            replayed.add(original.entries[number])
            number += 1
        place = Place(seq)
        store = MemoryStore(objects=original.objects)
        restore_with(store, "to", seq, seams=place.seams(), pages=place.pages)
        expected = {bucket: replayed.model.live(bucket) for bucket in replayed.model.bucket_names()}
        for life in range(3):
            db = _reopened(place, original.objects)
            with_losers += bool(db.aborted)
            assert content(db) == expected
            if not life:
                assert db.root() == replayed.model.root()
            db.put("b", "a/1", b"life %d" % life * 100) if "b" in expected else db.create_bucket("b")
            place.idle(1.0 if life else 0.0)
            expected = content(db)
            if life == 1:
                db.checkpoint()
            assert list(db.check(away=True)) == []
            db.close()
    return with_losers


def _reopened(place: Place, objects: MemoryObjects) -> Any:
    place.pages.reopen()
    origin = read_origin(place.files, "to")
    assert origin is not None
    return open_restored(
        "to",
        origin,
        [MemoryStore(objects=objects)],
        log_options=SMALL,
        options=QUIET,
        seams=place.seams(),
        store=place.pages,
    )


@pytest.fixture(autouse=True)
def _transactions_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "SPILL_ABOVE_BYTES", 500)


def moments_of(original: Original, rng: random.Random, seqs: int, times: int) -> list[int | datetime]:
    last = original.entries[-1].seq
    moments: list[int | datetime] = [rng.randint(1, last) for _ in range(seqs)]
    for _ in range(times):
        at = rng.randrange(len(original.entries) - 1)
        low, high = original.entries[at].time_us, original.entries[at + 1].time_us
        moments.append(EPOCH + timedelta(microseconds=(low + high) // 2))
    return moments


@pytest.mark.parametrize("seed", range(2))
def test_a_restore_is_what_the_log_says(seed: int) -> None:
    """At a few places."""
    original = worked(seed, 250)
    compare(original, moments_of(original, random.Random(seed), 8, 4))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 104))
def test_restores_to_many_seqs_and_times_are_what_the_log_says(seed: int) -> None:
    """A hundred seqs, and times between entries."""
    original = worked(seed, 1200)
    compare(original, moments_of(original, random.Random(seed), 100, 40))


def test_a_clone_lives_on_from_anywhere() -> None:
    """Also from the middle of transactions, which end there as after a crash."""
    original = worked(5, 300)
    last = original.entries[-1].seq
    rng = random.Random(5)
    assert live_on(original, [rng.randint(1, last) for _ in range(12)]) > 1


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 203))
def test_a_clone_lives_on_from_each_of_many_places(seed: int) -> None:
    original = worked(seed, 700)
    last = original.entries[-1].seq
    rng = random.Random(seed)
    assert live_on(original, [rng.randint(1, last) for _ in range(60)]) > 5
