"""Transactions that are in the log before their commit, and in pages before their end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import cbor2
import pytest
from tests.engine.engine_model import Driver, Machine, check_structure, encoded, small_limits
from tests.engine.transaction_model import OpenTransaction, Written

from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.survival import Survival
from lowwater.engine.database import spill, transactions
from lowwater.engine.database.transactions import Transaction
from lowwater.engine.flush import flush
from lowwater.engine.log.log import LogOptions
from lowwater.engine.pages.memory_pages import MemoryPages
from lowwater.engine.state import transaction_table
from lowwater.engine.state.meta import META_KEY
from lowwater.errors import Conflict, InputError, LimitExceeded, LowwaterError, NotEmpty

LOSSES: tuple[Survival, ...] = ("lose", "keep", "torn", "prefix", "random")
CHUNKS = 4
FEW_PAGES = 12_000


@pytest.fixture(autouse=True)
def _small_limits() -> Iterator[None]:
    with small_limits():
        yield


def new_driver(seed: int = 0, pool_bytes_max: int = FEW_PAGES) -> Driver:
    options = LogOptions(segment_bytes=16_384, block_bytes=1024)
    driver = Driver(Machine(seed=seed, pool_bytes_max=pool_bytes_max, log_options=options))
    driver.open()
    driver.create_bucket("a")
    driver.create_bucket("b")
    driver.put_many("a", [(f"{n:02}", driver.value(40)) for n in range(40)])
    return driver


def write(
    driver: Driver, opened: OpenTransaction, names: range, size: int = 60, *, bucket: str = "a"
) -> None:
    for n in names:
        data = None if n % 7 == 3 and n < 40 else driver.value(size)
        driver.txn_write(opened, Written((bucket, f"{n:02}"), data))
        driver.machine.step(n % 3)


# ---------------------------------------------------------------------------- a life, ended anywhere


def script(driver: Driver) -> None:
    """Large transactions, all of what may become of one."""
    machine = driver.machine
    first = driver.begin()
    write(driver, first, range(50))
    driver.savepoint(first)
    write(driver, first, range(10, 60), 100)
    driver.flush()
    driver.rollback_to(first, 0)
    write(driver, first, range(60, 70), 400)
    driver.compare()
    driver.commit(first)
    machine.idle()
    driver.flush()

    second = driver.begin()
    write(driver, second, range(60), 90)
    driver.put("b", "plain", driver.value(300))
    driver.flush()
    driver.abort(second)
    machine.step(5)

    third = driver.begin(serializable=True)
    driver.txn_get(third, ("a", "05"))
    write(driver, third, range(20, 60), 90)
    driver.put("a", "25", driver.value(5))  # which dooms it
    driver.commit(third)
    driver.flush()
    machine.idle()

    fourth = driver.begin()
    write(driver, fourth, range(40), 50, bucket="b")
    driver.reopen()
    last = driver.begin()
    write(driver, last, range(30, 50), 70)
    driver.commit(last)
    driver.put("a", "end", b"")


@cache
def operations_of_the_script() -> tuple[int, int]:
    """Where it begins, and where it ends."""
    driver = new_driver()
    begun = driver.machine.files.operations
    script(driver)
    driver.compare()
    assert driver.seen["spilled"] == 5
    assert driver.seen["committed large"] == 2
    assert driver.seen["rolled back in the log"] == 1
    assert driver.seen["doomed"] == 1
    return begun, driver.machine.files.operations


def crashed(number: int, *, after: bool) -> Driver:
    driver = new_driver()
    driver.machine.files.crash_at(number, after=after)
    with pytest.raises(SimulatedCrash):
        script(driver)
    return driver


def go_on(driver: Driver) -> None:
    """All of it is as the model has it, and as one from the log alone, and it can be gone on with."""
    driver.compare()
    check_as_from_the_log_alone(driver)
    assert list(driver.db.check()) == []
    opened = driver.begin()
    write(driver, opened, range(30), 80)
    driver.commit(opened)
    driver.compare()
    driver.machine.idle()
    driver.flush()
    driver.machine.idle()
    assert not driver.db._state.transactions.rows, "nothing needs the table any more"
    assert not driver.db._state.transactions.unstamped
    driver.reopen()
    driver.compare()
    assert list(driver.db.check()) == []
    driver.close()


def check_as_from_the_log_alone(driver: Driver) -> None:
    """Pages decide nothing: whether transactions were in them before their end is not seen."""
    machine = driver.machine
    driver.machine.db.close()
    stolen, machine.pages = machine.pages, MemoryPages(machine.files)
    machine.open()
    driver.lost_transactions = False
    root = machine.db.root()
    check_structure(machine.db, machine.pages)
    machine.db.close()
    machine.pages = stolen
    machine.open()
    assert machine.db.root() == root == driver.model.root()


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_crash_at_any_operation_leaves_all_or_nothing(chunk: int) -> None:
    """Of each transaction; and nothing that was acknowledged is lost."""
    begun, ended = operations_of_the_script()
    for number in range(begun + 1 + chunk, ended + 1, CHUNKS):
        for salt, mode in enumerate(LOSSES):
            survive(number, after=bool((number + salt) & 1), mode=mode)


def test_some_crashes_leave_all_or_nothing() -> None:
    """The fast part of the above."""
    begun, ended = operations_of_the_script()
    for number in range(begun + 3, ended + 1, 17):
        survive(number, after=bool(number & 1), mode=LOSSES[number % len(LOSSES)])


def survive(number: int, *, after: bool, mode: Survival) -> None:
    driver = crashed(number, after=after)
    try:
        driver.recover(mode, again=0)
        go_on(driver)
    except Exception as error:
        error.add_note(f"after a crash at operation {number}, {after=}, {mode=}")
        raise


# ---------------------------------------------------------------------------- undo under steal


@pytest.mark.parametrize("seed", range(3))
def test_an_abort_that_crashes_again_and_again_undoes_everything(seed: int) -> None:
    """A transaction larger than the pool, whose versions are in most pages: its undoing is interrupted
    wherever it can be, by a crash that ends the recovery from the one before."""
    driver = new_driver(seed)
    root = driver.model.root()
    opened = driver.begin()
    write(driver, opened, range(99), 150)
    driver.flush()
    assert len(driver.db._state.transactions.unstamped) > 5
    assert sum(len(each.value or b"") for each in opened.writes) > FEW_PAGES
    driver._forget_all()
    driver.machine.crash("lose", random.Random(seed))
    files = driver.machine.files
    crashes = 0
    for stop in range(1, 200):
        files.crash_at(files.operations + stop, after=bool((stop + seed) & 1))
        try:
            db = driver.machine.open()
            db.flush()
            driver.machine.idle()
            driver.machine.step(50)
            break
        except SimulatedCrash:
            crashes += 1
            driver.machine.crash(LOSSES[(stop + seed) % len(LOSSES)], random.Random(stop))
    files._crash_number = None
    assert crashes > 5
    driver._compare_marks()
    assert driver.db.root() == root
    driver.flush()
    driver.machine.idle()
    assert not driver.db._state.transactions.rows
    go_on(driver)


def test_a_roll_back_that_was_stolen_shows_what_was_there_before() -> None:
    """Also the transaction's own earlier versions, which pages have kept."""
    driver = new_driver(1)
    opened = driver.begin()
    write(driver, opened, range(60), 50)
    for _ in range(5):
        driver.savepoint(opened)
        write(driver, opened, range(0, 60, 2), 200)
        driver.flush()
        driver.rollback_to(opened, len(opened.savepoints) - 1)
        driver.txn_scan(opened, "a", "")
    driver.compare()
    assert len(driver.db._state.transactions.rows[opened.transaction._spill.txn].undone) == 1
    driver.commit(opened)
    driver.compare()
    go_on(driver)


def test_roots_do_not_depend_on_what_was_stolen() -> None:
    """The same calls with a pool of a few pages, which steals, and with one that never has to."""
    roots = set()
    for pool_bytes_max in (FEW_PAGES, 2**20):
        driver = new_driver(3, pool_bytes_max)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transactions, "SPILL_ABOVE_BYTES", 500)
            if pool_bytes_max == 2**20:
                patch.setattr(driver.machine, "step", lambda _count=1: None)
            opened = driver.begin()
            write(driver, opened, range(80), 100)
            unstamped = len(driver.db._state.transactions.unstamped)
            assert bool(unstamped) == (pool_bytes_max == FEW_PAGES)
            driver.commit(opened)
        roots.add(driver.db.root())
        driver.compare()
    assert len(roots) == 1


def test_reads_at_a_seq_see_a_transaction_from_its_commit_on() -> None:
    """Whether its pages were stamped or not."""
    driver = new_driver()
    driver.snapshot("before")
    opened = driver.begin()
    write(driver, opened, range(50))
    driver.flush()
    driver.snapshot("within")
    driver.commit(opened)
    driver.snapshot("after")
    for _ in range(2):
        for at in driver.model.snapshots.values():
            driver.get("a", "00", at)
            driver.get("a", "03", at)
            driver.get("a", "49", at)
            driver.list("a", at=at)
            driver.root(at)
        driver.flush()
        driver.machine.idle()
    assert not driver.db._state.transactions.unstamped


def test_redo_that_meets_the_end_of_a_transaction_only_knows_it() -> None:
    """Its row was let go when redo would have met all of it, and was missing in the meta once redo began
    after its `begin`: such a database did not open."""
    driver = new_driver(pool_bytes_max=2**20)
    driver.put_many("a", [(f"{n:03}", b"") for n in range(200)])
    driver.flush()
    driver.put("a", "000", b"")
    driver.flush()  # after which the ranges are divided
    driver.put("a", "000", b"what redo has to begin with, so far")
    opened = driver.begin()
    for _ in range(10):
        driver.txn_write(opened, Written(("a", "199"), driver.value(90)))
    driver.put("a", "100", b"what it has to begin with later")
    for _ in range(10):
        driver.txn_write(opened, Written(("a", "199"), driver.value(90)))
    driver.commit(opened)
    flush_range_of(driver, "199")
    flush_range_of(driver, "000")
    meta = cbor2.loads(driver.machine.pages._meta[META_KEY])
    row = driver.db._state.transactions.rows[next(iter(driver.db._state.transactions.rows))]
    assert row.txn < meta["redo_seq"] <= row.end_seq
    driver.recover("lose", again=0)
    go_on(driver)


def test_redo_that_knows_the_commit_already_keeps_what_lies_before() -> None:
    """A flush in redo, between a transaction's writes and its commit, took them for newer versions that all
    see: what a snapshot between the two reads was gone."""
    driver = new_driver(pool_bytes_max=2**20)
    driver.put_many("a", [(f"{n:03}", b"before") for n in range(200)])
    driver.flush()
    driver.put("a", "000", b"before, too")
    driver.flush()  # after which the ranges are divided
    opened = driver.begin()
    for n in range(30):
        driver.txn_write(opened, Written(("a", f"{n:03}"), driver.value(100) if n % 7 else None))
    driver.snapshot("s")
    at = driver.model.snapshots["s"]
    for n in range(100, 200):
        driver.put("a", f"{n:03}", driver.value(90))
    driver.commit(opened)
    db = driver.db
    written = db._state.map.find(encoded("a", "000"))
    others = [each for each in db._state.map.ranges if each is not written and each.dirty]
    for _ in db._flusher._flush(db._flusher._freeze(others)):
        pass
    driver.machine.pool_bytes_max = FEW_PAGES  # so redo has to flush
    driver.recover("lose", again=0)
    for n in range(30):
        driver.get("a", f"{n:03}", at)
    driver.root(at)
    go_on(driver)


def flush_range_of(driver: Driver, key: str) -> None:
    """Only the range with this key."""
    db = driver.db
    for _ in db._flusher._flush(db._flusher._freeze([db._state.map.find(encoded("a", key))])):
        pass


# ---------------------------------------------------------------------------- what is told


def put_all(txn: Transaction, names: range, bucket: str = "a") -> None:
    for n in names:
        txn.put(bucket, f"{n:02}", bytes(60))


def test_a_doomed_transaction_is_told_at_its_next_write_to_the_log() -> None:
    """And its abort is in the log: nothing of it is left."""
    driver = new_driver()
    txn = driver.db.transaction()
    put_all(txn, range(30))
    driver.db.put("a", "05", b"mine")
    with pytest.raises(Conflict):
        put_all(txn, range(30, 60))
    with pytest.raises(Conflict):
        txn.commit()
    assert driver.db.get("a", "05").value == b"mine"
    driver.db._log.sync()
    assert [entry.kind for entry in driver.db.log(driver.db.marks().applied)] == ["abort"]


def test_a_savepoint_that_was_taken_back_is_told() -> None:
    """In the log, too."""
    driver = new_driver()
    with driver.db.transaction() as txn:
        first = txn.savepoint()
        put_all(txn, range(40))
        second = txn.savepoint()
        txn.rollback_to(first)
        with pytest.raises(InputError):
            txn.rollback_to(second)
        txn.put("a", "only", b"this")
    assert driver.db.get("a", "only").value == b"this"
    assert len(driver.db.get("a", "00").value) == 40


def test_limits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of the entry is in the log."""
    driver = new_driver()
    monkeypatch.setattr(transactions, "TXN_ENTRIES_MAX", 25)
    txn = driver.db.transaction()
    with pytest.raises(LimitExceeded):
        put_all(txn, range(40))
    assert txn.commit() == driver.db.marks().applied
    monkeypatch.setattr(spill, "OPEN_MAX", 0)
    txn = driver.db.transaction()
    with pytest.raises(LimitExceeded):
        put_all(txn, range(20))
    txn.abort()
    monkeypatch.setattr(spill, "OPEN_MAX", 1)
    monkeypatch.setattr(spill, "ROLLBACKS_MAX", 0)
    with driver.db.transaction() as txn:
        savepoint = txn.savepoint()
        put_all(txn, range(20))
        with pytest.raises(LimitExceeded):
            txn.rollback_to(savepoint)


def test_a_bucket_that_a_large_transaction_has_written_to_is_in_use() -> None:
    """Its commit needs it."""
    driver = new_driver()
    txn = driver.db.transaction()
    put_all(txn, range(30), "b")
    with pytest.raises(NotEmpty):
        driver.db.delete_bucket("b")
    txn.abort()
    driver.db.delete_bucket("b")


def test_opening_tells_how_many_transactions_it_has_ended() -> None:
    """They cannot go on: whoever wrote them is gone."""
    driver = new_driver()
    for number in range(3):
        opened = driver.begin()
        write(driver, opened, range(number * 20, number * 20 + 20))
    driver.reopen()
    assert driver.db.aborted == 3
    assert driver.db._state.oldest_open_seq is None
    driver.reopen()
    assert driver.db.aborted == 0


def test_writes_beside_a_large_transaction_read_no_pages() -> None:
    """Whether it has written their keys is known without: else each put would read and decode one."""
    driver = new_driver(pool_bytes_max=2**20)
    driver.put_many("a", [(f"{n:03}", b"old") for n in range(200)])
    driver.reopen()
    opened = driver.begin()
    write(driver, opened, range(30), bucket="b")
    assert driver.db._state.transactions.open
    read = driver.db._state.pages_read
    driver.db.put_many("a", [(f"{n:03}", b"new") for n in range(200)])
    assert driver.db._state.pages_read == read


# ---------------------------------------------------------------------------- check


def damage_table(driver: Driver) -> None:
    driver.machine.pages._meta[transaction_table.TABLE_KEY] = b"\xff"


def lose_table(driver: Driver) -> None:
    del driver.machine.pages._meta[transaction_table.TABLE_KEY]


def lose_mark(driver: Driver) -> None:
    meta = driver.machine.pages._meta
    del meta[next(key for key in meta if key.startswith(transaction_table.UNSTAMPED_PREFIX))]


def mark_too_much(driver: Driver) -> None:
    row = next(iter(driver.db._state.transactions.rows))
    ids = transaction_table.encode_ids([row])
    driver.machine.pages._meta[transaction_table.UNSTAMPED_PREFIX + b"\0"] = ids


def keep_a_row(driver: Driver) -> None:
    row = transaction_table.TransactionRow(2, 1, 1, 3, end_seq=4)
    table = [*cbor2.loads(driver.machine.pages._meta[transaction_table.TABLE_KEY]), list(row)]
    driver.machine.pages._meta[transaction_table.TABLE_KEY] = cbor2.dumps(table)


def know_too_much(driver: Driver) -> None:
    row = transaction_table.TransactionRow(900_000, 1, 1, 900_000)
    table = [*cbor2.loads(driver.machine.pages._meta[transaction_table.TABLE_KEY]), list(row)]
    driver.machine.pages._meta[transaction_table.TABLE_KEY] = cbor2.dumps(table)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (damage_table, "cannot be read"),
        (lose_table, "not in their table"),
        (lose_mark, "not known to have versions of transactions"),
        (mark_too_much, "has not the transactions"),
        (keep_a_row, "nothing needs it"),
        (know_too_much, "ahead of its entries"),
    ],
)
def test_check_finds_what_is_wrong_with_the_table(damage: Any, what: str) -> None:
    """Without it rows of transactions mean nothing."""
    driver = new_driver()
    opened = driver.begin()
    write(driver, opened, range(60))
    driver.flush()
    assert list(driver.db.check()) == []
    damage(driver)
    assert what in str(list(driver.db.check()))


# ---------------------------------------------------------------------------- the tests themselves


def run_all() -> None:
    driver = new_driver()
    script(driver)
    go_on(driver)
    begun, ended = operations_of_the_script()
    for number in range(begun + 5, ended, 41):
        survive(number, after=True, mode="keep")


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "aborted versions stay": (transaction_table, "_is_dead", lambda row, seq: row.has_undone(seq)),
    "what was undone stays": (transaction_table.TransactionRow, "has_undone", lambda self, seq: False),
    "open versions are shown": (
        transaction_table,
        "_seen",
        lambda row, seq, viewer: (row.end_seq or seq, row.end_time_us, row.txn == viewer),
    ),
    "a page keeps what was not stamped": (flush, "settle_page", lambda page, view, seq: page),
    "nobody writes down which pages": (flush, "ids_in", lambda page: frozenset()),
    "rows are forgotten": (flush, "encode_table", lambda *_: None),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_finds_a_transaction_that_goes_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that has never failed proves nothing."""
    operations_of_the_script()
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises((AssertionError, KeyError, LowwaterError, RuntimeError, pytest.fail.Exception)):
        run_all()
