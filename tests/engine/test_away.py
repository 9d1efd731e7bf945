"""Pages that left: nothing that can be read changes, nothing is read from afar without need, and an archive
that is down is in the way of nobody but who needs it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engine_model import Archive, ArchiveDown, Driver, Machine, check_structure, small_limits
from tests.engine.test_engine import CREATE, Node
from tests.engine.test_engine_crash import LOSSES, reach_failure_point
from tests.engine.test_interrupts import Walk, elsewhere, places
from tests.engine.test_measure import scraped
from tests.engine.test_pages import PAGES_MD, table

from lowwater import CreateBucket, Put, Refusal
from lowwater.chaos.disk import SimulatedCrash
from lowwater.engine.database.core import EngineOptions
from lowwater.engine.database.database import Database
from lowwater.engine.database.opening import open_with
from lowwater.engine.format import references
from lowwater.engine.format.records import make_record
from lowwater.engine.format.references import (
    Reference,
    decode_reference,
    encode_reference,
    is_reference,
)
from lowwater.engine.log.chain import checkpoint_entry
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.engine.state.ranges import Layout, Range
from lowwater.errors import Conflict, Corrupt, InputError, NewerVersion, NotFound

LARGE = bytes(range(256)) * 9
REFERENCE = Reference(7, 9, b"b" * 32, b"p" * 32, b"l" * 32, 12, 340, 28, 5)


@pytest.fixture
def archive() -> Archive:
    return Archive()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "data")


@pytest.fixture
def db(path: str, archive: Archive) -> Iterator[Database]:
    with open_with(path, blocks=archive, options=EngineOptions(checkpoint_interval_s=None)) as opened:
        opened.create_bucket("b")
        yield opened


def fill(db: Database, count: int = 3000) -> None:
    db.put_many("b", [(f"k{number:06}", b"%d" % number * 3) for number in range(count)])
    db.put("b", "k002700large", LARGE, {"m": "n"})


def leave(db: Any, archive: Archive, wants: Callable[[bytes], bool] = lambda _: True) -> int:
    db.checkpoint()
    newest = db.checkpoints()[0]
    archive.ship(newest)
    left: int = db.leaving.leave(newest, wants)
    db._state.clean.limit(0)
    db._state.limit_clean()
    return left


def test_an_interrupted_read_of_a_page_keeps_nobody_waiting(db: Database, archive: Archive) -> None:
    """Others who need the page would wait for the thread that was to read it."""
    fill(db, 100)

    def read() -> bytes:
        return db.get("b", "k000050").value

    leave(db, archive)
    for at in places(read, 1000, 1, "engine/state/away.py"):
        leave(db, archive)
        with suppress(KeyboardInterrupt):
            Walk("engine/state/away.py").run(read, at)
        assert elsewhere(read) == b"505050"
        assert not db._state.away._flights
        assert not db._state.away._held


def stored(db: Any) -> dict[bytes, bytes]:
    keys = list(db._store.page_keys())
    return dict(zip(keys, db._store.get_many(keys), strict=True))


# ---------------------------------------------------------------------------- references


def test_the_table_of_the_document_is_what_the_code_packs() -> None:
    """Somebody reads references from the document alone."""
    names, position = [], 0
    for offset, size, _, name, _ in table("References", PAGES_MD.read_text(encoding="utf-8")):
        assert int(offset) == position, name
        position += int(size)
        names.append(name)
    assert position == references.REFERENCE_BYTES
    assert names == ["magic", "version_major", "version_minor", "checksum", *Reference._fields]


def test_a_reference_comes_back_as_it_was_and_no_other_byte_does() -> None:
    """Each byte of it is checked, and so is the key under which it stands."""
    data = encode_reference(REFERENCE, b"key")
    assert is_reference(data)
    assert decode_reference(data, b"key") == REFERENCE
    with pytest.raises(Corrupt):
        decode_reference(data, b"other")
    for at in range(len(references.MAGIC), len(data)):
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises((Corrupt, NewerVersion)):
            decode_reference(damaged, b"key")
    with pytest.raises(Corrupt):
        decode_reference(data[:-1], b"key")


# ---------------------------------------------------------------------------- leaving and coming back


def test_a_page_that_comes_back_is_the_page_that_left_byte_for_byte(db: Database, archive: Archive) -> None:
    """Also where large values lie in the log."""
    fill(db)
    before = (db.flush(), stored(db))[1]
    assert leave(db, archive) == len(before) - 1, "all but the page with the buckets"
    gone = list(db.leaving.away())
    assert [key for key, data in stored(db).items() if is_reference(data)] == gone
    assert db.leaving.bring(gone) == len(gone)
    assert stored(db) == before
    assert not list(db.leaving.away())
    assert archive.reads == len(gone)


def test_what_left_is_not_here_any_more(db: Database, archive: Archive) -> None:
    """Otherwise nothing of the disk is won, and no test here tests anything."""
    fill(db, 20_000)
    db.flush()
    before = sum(map(len, stored(db).values()))
    leave(db, archive)
    assert sum(map(len, stored(db).values())) < before / 10


def test_reads_of_all_kinds_see_what_they_saw(db: Database, archive: Archive) -> None:
    """Each of them finds pages away."""
    fill(db)
    db.snapshot("s")
    everything = list(db.scan("b"))
    listing = db.list("b", "k0027")
    at = db.marks().applied
    leave(db, archive)
    assert db.list("b", "k0027") == listing
    leave(db, archive)
    assert db.get("b", "k002700large").value == LARGE
    assert db.read_range("b", "k002700large", 5, 7) == LARGE[5:12]
    assert db.head("b", "k001000").size_bytes == 12
    assert db.get("b", "k002000", at).value == b"2000" * 3
    with pytest.raises(NotFound):
        db.get("b", "k002000x")
    leave(db, archive)
    assert list(db.scan("b")) == everything
    assert list(db.scan("b", at=at)) == everything


def test_a_page_with_versions_that_somebody_reads_stays(db: Database, archive: Archive) -> None:
    """A block has one version of a key. Once nobody can read the others, the page leaves without them."""
    fill(db)
    seq = db.snapshot("s")
    # Without a key at which a page begins, the block before has its page's rows as well.
    is_boundary = db._state.boundaries.is_boundary
    number = next(each for each in range(2400, 2700) if not is_boundary(b"\1bk%06d" % each))
    gone = f"k{number:06}"
    db.put("b", "k002100", b"new")
    db.delete("b", gone)
    left = leave(db, archive)
    pages = len(stored(db))
    assert pages - 3 <= left < pages - 1
    assert db.get("b", "k002100", seq).value == b"2100" * 3
    assert db.get("b", gone, seq).value == b"%d" % number * 3
    db.drop_snapshot("s")
    left += leave(db, archive)
    assert left == pages - 1
    assert db.get("b", "k002100").value == b"new"
    with pytest.raises(NotFound):
        db.get("b", gone)


def test_a_page_with_changes_in_memory_or_of_an_open_transaction_stays(
    db: Database, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of a checkpoint has neither."""
    from lowwater.engine.database import transactions

    monkeypatch.setattr(transactions, "SPILL_ABOVE_BYTES", 500)
    fill(db)
    with db.transaction() as txn:
        for number in range(20):
            txn.put("b", f"k{2000 + number:06}", b"x" * 200)
        db.flush()
        assert db._state.transactions.unstamped
        db.checkpoint()
        db.put("b", "k002999", b"later")
        newest = db.checkpoints()[0]
        archive.ship(newest)
        db.leaving.leave(newest)
        gone = set(db.leaving.away())
        layout = db._state.map.ranges[0].layout
        assert layout.keys[layout.index(b"\1bk002999")] not in gone
        assert not gone & set(db._state.transactions.unstamped)
        assert gone
    assert db.get("b", "k002003").value == b"x" * 200
    assert db.get("b", "k002999").value == b"later"


def test_what_is_written_above_pages_that_left_is_no_part_of_what_left(
    db: Database, path: str, archive: Archive
) -> None:
    """It stays in memory, and in the log, until the page is there to take it."""
    fill(db)
    leave(db, archive)
    db.put("b", "k002005", b"new")
    db.put_many("b", [(f"k{number:06}x", b"more") for number in range(0, 3000, 100)])
    assert archive.reads == 0, "a put reads nothing"
    assert db.get("b", "k002005").value == b"new"
    assert archive.reads == 0, "what is in memory is newer than any page"
    db.close()
    with open_with(path, blocks=archive) as again:
        assert archive.reads == 0, "neither closing nor opening reads anything"
        assert again.redone >= 31
        root = again.root()
        again.flush()
        assert again.root() == root
        assert again.get("b", "k002005").value == b"new"
        assert sum(1 for _ in again.scan("b")) == 3031
        assert list(again.check(away=True)) == []


def test_many_who_ask_for_a_page_at_once_read_it_once(db: Database, archive: Archive) -> None:
    """They wait for the first of them."""
    fill(db)
    leave(db, archive)
    read, started, go = archive.read_block, threading.Event(), threading.Event()

    def slowly(*args: Any) -> bytes:
        started.set()
        go.wait(60)
        return read(*args)

    archive.read_block = slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(8) as threads:
        found = [threads.submit(db.get, "b", "k002123") for _ in range(8)]
        started.wait(60)
        # Who needs other pages, or none, does not wait.
        db.put("b", "k002123y", b"1")
        assert db.get("b", "k002123y").value == b"1"
        go.set()
        assert {each.result(60).value for each in found} == {b"2123" * 3}
    assert archive.reads == 1


def test_a_scan_holds_one_page_at_a_time(path: str, archive: Archive) -> None:
    """However many are away, and it leaves those in memory alone that others read."""
    with open_with(path, blocks=archive, options=EngineOptions(pool_bytes_max=2**20)) as db:
        db.create_bucket("b")
        fill(db, 20_000)
        leave(db, archive)
        away = db._state.away
        held_max = 0
        read = archive.read_block

        def counting(*args: Any) -> bytes:
            nonlocal held_max
            held_max = max(held_max, len(away._held))
            return read(*args)

        archive.read_block = counting  # type: ignore[method-assign]
        assert sum(1 for _ in db.scan("b")) == 20_001
        assert archive.reads > 200
        assert held_max == 0, "the one before was let go"
        assert not away._held
        assert not away.returning_bytes


def test_pages_that_were_read_by_key_get_back_into_the_store(db: Database, archive: Archive) -> None:
    """A few at a time: what is asked for is here the next time, also in another life."""
    fill(db, 20_000)
    leave(db, archive)
    away = db._state.away
    away.returning_bytes_max = 40_000
    gone = len(list(db.leaving.away()))
    for number in range(20_000):
        db.get("b", f"k{number:06}")
        while away.is_return_due:
            db._step()
    assert gone > 200
    assert len(list(db.leaving.away())) < 10
    assert away.returning_bytes <= away.returning_bytes_max
    assert db._flusher.pages_returned
    assert list(db.check(away=True)) == []


# ---------------------------------------------------------------------------- roots and checkpoints


def test_a_root_and_a_checkpoint_read_no_page_that_has_not_changed(db: Database, archive: Archive) -> None:
    """The reference has the hash of its block: a root over all of a cold database is one look at its keys."""
    fill(db)
    root = db.root()
    leave(db, archive)
    assert db.root() == root
    pinned = db._pin(None)
    assert db._root_at(pinned.seq, None) == root, "nor without a checkpoint's help"
    db._state.unpin(pinned)
    assert archive.reads == 0
    db.put("b", "k001500", b"new")
    changed = db.root()
    assert archive.reads == 1, "the page that has changed"
    db.checkpoint()
    assert db.checkpoints()[0].root == changed
    assert archive.reads <= 2, "and that once more, to be written"


def test_a_full_checkpoint_of_pages_that_left_is_the_one_of_pages_that_did_not(
    path: str, tmp_path: Path, archive: Archive
) -> None:
    """Who has what at hand decides nothing: the bytes are a function of the log."""
    names = []
    for directory, leaves in ((path, True), (str(tmp_path / "other"), False)):
        node = lowwater_engine(directory, archive)
        with node as engine:
            engine.apply_log_entry(1, CREATE)
            engine.apply_log_entry(2, CreateBucket("b", time_us=2))
            for seq in range(3, 400):
                engine.apply_log_entry(seq, Put("b", f"k{seq % 200:04}", LARGE[: seq * 3], time_us=seq))
            engine.apply_log_entry(400, checkpoint_entry(0))
            engine.wait_for_checkpoint(400)
            if leaves:
                archive.ship(engine.checkpoints()[0])
                assert engine.leaving.leave(engine.checkpoints()[0]) > 20
            engine.apply_log_entry(401, Put("b", "k0027", b"x", time_us=401))
            engine.apply_log_entry(402, checkpoint_entry(400, full=True))
            names.append(engine.wait_for_checkpoint(402))
            newest = engine.checkpoints()[0]
            assert newest.index.base_seq == 0
            assert len(list(newest.rows())) == newest.index.row_count
    assert names[0] == names[1]


def lowwater_engine(directory: str, archive: Archive) -> Any:
    from lowwater.engine.database.engine import FedEngine

    return FedEngine(directory, blocks=archive)


# ---------------------------------------------------------------------------- an archive that is down


def test_an_archive_that_is_down_is_the_error_of_who_needs_it(db: Database, archive: Archive) -> None:
    """All others go on, and so does who asked, once it is back."""
    fill(db)
    leave(db, archive)
    archive.is_down = True
    calls: list[Callable[[], object]] = [
        lambda: db.get("b", "k002100"),
        lambda: list(db.scan("b")),
        lambda: db.list("b"),
        lambda: db.put("b", "k002100", b"x", if_absent=True),
        lambda: db.delete("b", "k002100"),
        lambda: db.copy("b", "k002100", "b", "copy"),
        lambda: db.get("b", "k002100", db.marks().applied),
    ]
    for call in calls:
        with pytest.raises(ArchiveDown):
            call()
    applied = db.marks().applied
    db.put("b", "k002100", b"new")
    assert db.get("b", "k002100").value == b"new"
    assert db.marks().applied == applied + 1
    archive.is_down = False
    assert db.get("b", "k002101").value == b"2101" * 3
    assert db.get("b", "k002100").value == b"new"


def test_a_flush_goes_on_with_all_pages_that_are_here(db: Database, archive: Archive) -> None:
    """Changes of the others wait in memory, and keep the beginning of redo down."""
    fill(db)
    db.flush()
    assert leave(db, archive, lambda key: key >= b"\1bk0015") > 5
    archive.is_down = True
    first_away = db.put("b", "k002900", b"new")
    for _ in range(3):
        here = db.put("b", "k000001", b"new")
        with pytest.raises(ArchiveDown):
            db.flush()
        assert db._flusher.flushed_redo_seq == first_away, "redo begins at what is in no page"
        assert db._state.dirty_bytes < 1000
    layout = db._state.map.find(b"\1bk000001").layout
    page = db._store.get(layout.keys[layout.index(b"\1bk000001")])
    assert page is not None
    assert page.count(b"new") == 1
    assert not any(each.frozen for each in db._state.map.ranges)
    archive.is_down = False
    assert db.flush() == here
    assert db._flusher.is_flushed(here)
    assert db._state.dirty_bytes == 0
    assert not db._flusher.awaited
    assert not db._flusher._brought
    check = list(db.check())
    assert check == []


def test_who_waits_for_a_page_that_does_not_come_asks_for_it_rarely() -> None:
    """The flusher, woken because it did not come, woke who had asked: both turned as fast as they could, for
    as long as the archive was down."""
    driver = Driver(Machine(checkpoint_interval_s=1.0))
    driver.open()
    driver.create_bucket("a")
    driver.put_many("a", [(f"{n:03}", b"x") for n in range(100)])
    driver.checkpoint()
    driver.flush()
    driver.machine.idle()
    driver.pages_leave(lambda _: True)
    assert driver.seen["left"] > 5
    driver.db._state.clean.limit(0)
    driver.db._state.limit_clean()
    archive = driver.machine.archive
    archive.is_down = True
    for n in range(0, 100, 10):
        driver.put("a", f"{n:03}", b"y")
    failures = driver.db._state.away.failures
    for _ in range(60):
        driver.machine.idle(1.0)
    assert 3 <= driver.db._state.away.failures - failures < 20
    archive.is_down = False
    for _ in range(60):
        driver.machine.idle(1.0)
    assert not driver.db._flusher.awaited
    driver.compare()
    driver.close()


def test_changes_that_wait_are_as_if_they_had_never_been_set_aside() -> None:
    """All versions of a key, in their order, whatever was written while the group was flushed."""
    records = [make_record(seq, Put("b", "k", b"%d" % seq).encode(0)) for seq in range(1, 5)]
    place = Range(b"\0", Layout([], []))
    place.dirty, place.older, place.rec_seq = {b"k": records[1], b"gone": records[0]}, {b"k": [records[0]]}, 1
    place.odd.add(b"k")
    place.freeze()
    place.dirty, place.older, place.rec_seq = {b"k": records[3]}, {b"k": [records[2]]}, 3
    assert place.records_of(b"k") == records[::-1]
    place.thaw([b"k"])
    assert place.records_of(b"k") == records[::-1]
    assert place.records_of(b"gone") == []
    assert (place.rec_seq, place.frozen, place.odd, place.has_news) == (1, None, {b"k"}, False)
    place.freeze()
    place.thaw([b"k"])
    assert place.records_of(b"k") == records[::-1]
    place.dirty[b"new"] = records[0]
    assert place.has_news


def test_metrics_say_what_left_what_came_and_what_is_waited_for(db: Database, archive: Archive) -> None:
    """An operator sees an archive that cannot be reached before memory is full."""
    fill(db)
    left = leave(db, archive)
    db.get("b", "k002100")
    archive.is_down = True
    db.put("b", "k002900", b"new")
    with pytest.raises(ArchiveDown):
        db.flush()
    samples = scraped(db.metrics())
    assert samples["lowwater_pages_left_total"] == left
    assert samples["lowwater_pages_brought_total"] == 1
    assert samples["lowwater_pages_brought_bytes_total"] > 100
    assert samples["lowwater_pages_brought_failures_total"] >= 1
    assert samples["lowwater_pages_awaited"] == 1
    archive.is_down = False
    db.flush()
    assert scraped(db.metrics())["lowwater_pages_awaited"] == 0


@pytest.mark.long
def test_memory_full_of_changes_that_wait_is_told_to_writers(path: str, archive: Archive) -> None:
    """They are neither held up for ever nor taken without bound."""
    with open_with(path, blocks=archive, options=EngineOptions(pool_bytes_max=2**20)) as db:
        db.create_bucket("b")
        fill(db, 5000)
        leave(db, archive)
        archive.is_down = True
        rng = random.Random(1)
        written = {}
        key = ""

        def write() -> None:
            nonlocal key
            while len(written) < 20_000:
                key, value = f"k{rng.randrange(5000):06}", b"%d" % rng.randrange(10**9)
                db.put("b", key, value * 12)
                written[key] = value * 12

        with pytest.raises(ArchiveDown):
            write()
        assert db._state.dirty_bytes <= 2**20
        assert db.get("b", key).value == written[key] if key in written else True
        archive.is_down = False
        db.put("b", key, b"at last")
        written[key] = b"at last"
        db.flush()
        found = {each.key: each.value for each in db.scan("b")}
        assert {key: found[key] for key in written} == written
        assert len(found) == 5001


def test_a_checkpoint_waits_for_what_is_away(db: Database, archive: Archive) -> None:
    """It stays due, whoever wants it is told why, and it comes when it can."""
    fill(db)
    leave(db, archive)
    archive.is_down = True
    db.put("b", "k002100", b"new")
    for _ in range(2):
        with pytest.raises(ArchiveDown):
            db.checkpoint()
    archive.is_down = False
    db.checkpoint()
    assert db.checkpoints()[0].root == db.root()
    assert db.checkpoints()[0].index.base_seq


def test_a_flipped_block_is_found_and_named(db: Database, path: str, archive: Archive) -> None:
    """Whoever reads other pages, or writes, does not notice. What was written for its page waits."""
    fill(db)
    leave(db, archive)
    key = db._state.map.ranges[0].layout.keys[4]
    reference = decode_reference(stored(db)[key], key)
    good = archive.packs[reference.pack]
    at = reference.offset + reference.block_bytes // 2
    archive.packs[reference.pack] = good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :]
    name = key[2:].decode()
    with pytest.raises(Corrupt) as caught:
        db.get("b", name)
    assert caught.value.path == f"packs/{reference.pack.hex()}.pack"
    assert caught.value.offset == reference.offset
    assert db.get("b", "k002999").value == b"2999" * 3
    findings = list(db.check(away=True))
    assert [finding.severity for finding in findings] == ["error"]
    assert name in findings[0].what
    assert list(db.check()) == []
    db.put("b", name, b"new")
    db.put("b", "k002999", b"new")
    with pytest.raises(Corrupt):
        db.flush()
    db.close()
    archive.packs[reference.pack] = good
    with open_with(path, blocks=archive) as again:
        again.flush()
        assert again.get("b", name).value == b"new"
        assert again.get("b", "k002999").value == b"new"
        assert sum(1 for _ in again.scan("b")) == 3001


def test_an_archive_that_was_not_named_is_told(db: Database, path: str, archive: Archive) -> None:
    """What is here can be read without it."""
    fill(db)
    db.flush()
    leave(db, archive, lambda key: key >= b"\1bk0015")
    db.close()
    with open_with(path) as again:
        assert again.get("b", "k000001").value == b"1" * 3
        with pytest.raises(InputError, match="archive") as caught:
            again.get("b", "k002500")
        assert type(caught.value) is InputError, "NotFound would be an answer"


def test_a_pack_that_is_missing_is_no_absent_key(db: Database, archive: Archive) -> None:
    """Who asks whether a key is there must not be told that it is not."""
    fill(db)
    leave(db, archive)
    gone = dict(archive.packs)
    archive.packs.clear()
    with pytest.raises(Corrupt, match="missing") as caught:
        db.get("b", "k002100")
    assert caught.value.path in {f"packs/{pack.hex()}.pack" for pack in gone}
    archive.packs.update(gone)
    assert db.get("b", "k002100").value == b"2100" * 3


def test_check_finds_a_reference_that_is_damaged_or_out_of_place(db: Database, archive: Archive) -> None:
    """By itself, without the archive."""
    fill(db)
    leave(db, archive)
    archive.is_down = True
    key, other = db._state.map.ranges[0].layout.keys[3:5]
    data = stored(db)[key]
    reference = decode_reference(data, key)
    for under, wrong, what in (
        (key, data[:60] + bytes([data[60] ^ 1]) + data[61:], "checksum"),
        (other, data, "checksum"),
        (key, encode_reference(reference._replace(page_seq=10**9), key), "the log ends"),
        (key, encode_reference(reference._replace(row_count=0), key), "without rows"),
    ):
        right = stored(db)[under]
        db._store.write([(under, wrong)], [], {})
        assert any(what in finding.what for finding in db.check())
        db._store.write([(under, right)], [], {})
    assert list(db.check()) == []


# ---------------------------------------------------------------------------- deciding


def test_transactions_read_what_is_away_only_where_it_may_have_changed(
    db: Database, archive: Archive
) -> None:
    """A page that left holds nothing that is newer than its seq."""
    fill(db)
    leave(db, archive)
    db.put("b", "k002900", b"later")
    with db.transaction("serializable") as txn:
        txn.put("b", "k002100", b"1")
        txn.put("b", "new", b"1")
    late = db.transaction()
    late.put("b", "k002100", b"2")
    db.put("b", "k002100", b"other")
    with pytest.raises(Conflict):
        late.commit()
    assert archive.reads == 0
    with db.transaction("serializable") as txn:
        assert txn.get("b", "k002200").value == b"2200" * 3
        assert len(list(txn.scan("b", "k0023"))) == 100
        reads = archive.reads
        txn.put("b", "k002201", b"1")
    assert archive.reads == reads
    assert db.get("b", "k002100").value == b"other"


def test_a_fed_engine_decides_the_same_with_pages_away_and_decides_nothing_without_them() -> None:
    """An entry that cannot be decided is not applied. Given again it has the outcome that it has elsewhere,
    and the frames are the same bytes."""
    with small_limits():
        archive, nodes = Archive(), [Node(), Node()]
        rng = random.Random(4)
        for number, node in enumerate(nodes):
            node.open(blocks=archive if not number else None)
        seq = 0

        def feed(entry: Any) -> list[Any]:
            nonlocal seq
            seq += 1
            outcomes = []
            for node in nodes:
                try:
                    outcomes.append(node.engine.apply_log_entry(seq, entry))
                except ArchiveDown:
                    assert node.engine.marks().applied == seq - 1
                    assert node.engine._failure is None
                    archive.is_down = False
                    outcomes.append(node.engine.apply_log_entry(seq, entry))
                    archive.is_down = True
                    refused.append(seq)
            assert outcomes[0] == outcomes[1]
            return outcomes

        refused: list[int] = []
        feed(CREATE)
        feed(CreateBucket("b", time_us=1))
        codes = set()
        for round_number in range(6):
            for _ in range(60):
                key = f"k{rng.randrange(60):03}"
                condition: dict[str, Any] = rng.choice(
                    ({}, {"if_absent": True}, {"if_seq": rng.randrange(seq)})
                )
                codes.add(feed(Put("b", key, b"%d" % seq, time_us=seq, **condition))[0].refused)
                for node in nodes:
                    node.step(2)
            before = nodes[0].engine._state.checkpoint_seq
            archive.is_down = False
            feed(checkpoint_entry(before, full=round_number == 3))
            for node in nodes:
                node.engine.wait_for_checkpoint(seq)
            assert nodes[0].engine.checkpoints()[0].id == nodes[1].engine.checkpoints()[0].id
            archive.ship(nodes[0].engine.checkpoints()[0])
            assert nodes[0].engine.leaving.leave(nodes[0].engine.checkpoints()[0])
            nodes[0].engine._state.clean.limit(0)
            archive.is_down = True
        assert codes == {None, Refusal.CONDITION_FAILED}
        assert len(refused) > 5
        archive.is_down = False
        assert nodes[0].engine.root() == nodes[1].engine.root()
        assert nodes[0].segments() == nodes[1].segments()


# ---------------------------------------------------------------------------- crashes


def script(driver: Driver) -> None:
    """Pages leave, are changed, come back by reads, by a flush and by themselves, and leave again."""
    driver.create_bucket("b")
    driver.put_many("b", [(f"k{number:03}", driver.value(40)) for number in range(60)])
    driver.put("b", "k030", driver.value(600))
    driver.checkpoint()
    driver.pages_leave(lambda key: key[-1] % 3 != 0)
    driver.get("b", "k010")
    driver.put_many("b", [(f"k{number:03}", driver.value(30)) for number in range(0, 60, 9)])
    driver.machine.step(3)
    driver.delete("b", "k031")
    driver.flush()
    for number in range(0, 60, 4):
        driver.get("b", f"k{number:03}")
    driver.machine.idle()
    driver.checkpoint()
    driver.pages_leave(lambda _: True)
    driver.db.leaving.bring(list(driver.db.leaving.away())[::2])
    driver.put("b", "k000", driver.value(20))
    driver.compare()
    driver.reopen()


def go_on(driver: Driver) -> None:
    driver.compare()
    assert list(driver.db.check(away=True)) == []
    driver.create_bucket("b")
    driver.put("b", "after", driver.value(30))
    driver.checkpoint()
    driver.pages_leave(lambda _: True)
    driver.reopen()
    driver.compare()
    driver.flush()
    check_structure(driver.db, driver.machine.pages)
    assert list(driver.db.check(away=True)) == []


def new_driver() -> Driver:
    driver = Driver(Machine(seed=2, pool_bytes_max=60_000))
    driver.open()
    return driver


@pytest.mark.parametrize("name", ["pages.before_leave", "pages.after_leave", "pages.before_return"])
def test_the_failure_points_are_reached_and_survived(name: str) -> None:
    with small_limits():
        assert reach_failure_point(name, new_driver, script, go_on) >= 1


def crashed(number: int, *, after: bool) -> Driver | None:
    """After a crash at that operation of the script; None where it ends before."""
    driver = new_driver()
    files = driver.machine.files
    files.crash_at(files.operations + number, after=after)
    try:
        script(driver)
    except SimulatedCrash:
        return driver
    return None


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(4))
def test_a_crash_at_any_operation_loses_neither_page_nor_reference(chunk: int) -> None:
    """Of the disk: log, checkpoint and page store."""
    assert crash_everywhere(chunk + 1, 4) > 20


def test_a_crash_at_some_operations_loses_neither_page_nor_reference() -> None:
    """The fast part of the above."""
    assert crash_everywhere(3, 17) >= 5


def crash_everywhere(first: int, every: int) -> int:
    with small_limits():
        for number in range(first, 10_000, every):
            for after in (False, True):
                driver = crashed(number, after=after)
                if driver is None:
                    return number // every
                mode, _ = LOSSES[number % len(LOSSES)]
                try:
                    driver.recover(mode, again=0)
                    go_on(driver)
                except BaseException as error:
                    error.add_note(f"after a crash at operation {number}, {after=}, {mode=}")
                    raise
                driver.close()
    raise AssertionError("the script does not end")


def test_an_lmdb_store_lists_sizes_without_reading_pages(tmp_path: Path) -> None:
    """The list of what is away takes the size of each page, and nothing else of it."""
    store = LmdbPages.open(str(tmp_path / "pages"))
    puts = [(b"%05d" % number, bytes(number % 9000)) for number in range(3000)]
    store.write(puts, [], {b"state": b"x"})
    assert list(store.page_sizes()) == [(key, len(page)) for key, page in puts]
    store.close()
