"""engine/database/transactions.py: what others see of a transaction, what it sees of others, and who wins."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lowwater
from lowwater.chaos.clock import VirtualClock
from lowwater.engine.database import transactions
from lowwater.engine.database.database import Database, EngineOptions
from lowwater.engine.database.opening import open_with
from lowwater.engine.database.transactions import Transaction
from lowwater.engine.log.log import Seams
from lowwater.engine.pages.memory_pages import MemoryPages
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.errors import (
    Conflict,
    Deadlock,
    InputError,
    LimitExceeded,
    LockTimeout,
    NotFound,
    TransactionEnded,
)


@pytest.fixture
def db() -> Iterator[Database]:
    with open_with(
        "memory", seams=Seams(files=MemoryFiles()), store=MemoryPages(), options=EngineOptions()
    ) as database:
        database.create_bucket("b")
        yield database


def value(db: Database, key: str) -> bytes | None:
    try:
        return db.get("b", key).value
    except NotFound:
        return None


def test_writes_take_effect_together_at_the_commit(db: Database) -> None:
    """Nobody sees half of a transfer."""
    with db.transaction() as txn:
        txn.put("b", "x", b"1")
        txn.put("b", "y", b"2", {"m": "n"})
        assert value(db, "x") is None
        assert txn.get("b", "x").value == b"1"
    assert (value(db, "x"), value(db, "y")) == (b"1", b"2")
    assert db.get("b", "x").seq == db.get("b", "y").seq == txn.seq
    assert db.get("b", "y").metadata == {"m": "n"}


def test_an_error_in_the_block_takes_everything_back(db: Database) -> None:
    """An exception means that the work is not done."""
    txn = db.transaction()
    txn.put("b", "x", b"1")
    with pytest.raises(RuntimeError), txn:
        raise RuntimeError
    assert value(db, "x") is None
    with pytest.raises(TransactionEnded):
        txn.put("b", "x", b"2")


def test_a_transaction_reads_as_of_one_moment(db: Database) -> None:
    """Others may go on: what it sees fits together."""
    db.put("b", "x", b"1")
    txn = db.transaction()
    db.put("b", "x", b"2")
    db.put("b", "new", b"3")
    db.flush()
    assert txn.get("b", "x").value == b"1"
    with pytest.raises(NotFound):
        txn.get("b", "new")
    assert [each.key for each in txn.scan("b")] == ["x"]
    txn.abort()
    assert value(db, "x") == b"2"


def test_the_first_to_commit_wins(db: Database) -> None:
    """No update is lost."""
    db.put("b", "x", b"1")
    txn = db.transaction()
    assert txn.get("b", "x").value == b"1"
    db.put("b", "x", b"2")
    with pytest.raises(Conflict):
        txn.put("b", "x", b"3")
    txn.abort()
    first, second = db.transaction(), db.transaction()
    first.put("b", "x", b"4")
    with pytest.raises(LockTimeout):
        db.transaction(lock_timeout_s=0).put("b", "x", b"5")
    first.commit()
    with pytest.raises(Conflict):
        second.put("b", "x", b"5")
    assert value(db, "x") == b"4"


def test_a_plain_put_between_write_and_commit_dooms_the_commit(db: Database) -> None:
    """Plain writes take no locks; the commit finds them."""
    txn = db.transaction()
    txn.put("b", "x", b"1")
    db.put("b", "x", b"2")
    with pytest.raises(Conflict):
        txn.commit()
    assert value(db, "x") == b"2"


def test_a_deletion_by_others_is_a_conflict_too(db: Database) -> None:
    """Even when it was flushed meanwhile."""
    db.put("b", "x", b"1")
    txn = db.transaction()
    db.delete("b", "x")
    db.flush()
    with pytest.raises(Conflict):
        txn.put("b", "x", b"2")


@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
def test_write_skew_is_refused_by_serializable_only(db: Database, isolation: str) -> None:
    """The two doctors who both go off call."""
    db.put("b", "x", b"on")
    db.put("b", "y", b"on")
    first = db.transaction(isolation)  # type: ignore[arg-type]
    second = db.transaction(isolation)  # type: ignore[arg-type]
    assert first.get("b", "y").value == second.get("b", "x").value == b"on"
    first.put("b", "x", b"off")
    second.put("b", "y", b"off")
    first.commit()
    if isolation == "serializable":
        with pytest.raises(Conflict):
            second.commit()
        assert value(db, "y") == b"on"
    else:
        second.commit()
        assert value(db, "y") == b"off"


@pytest.mark.parametrize("spills", [False, True], ids=["small", "large"])
def test_what_it_has_written_itself_does_not_count_as_read(
    db: Database, monkeypatch: pytest.MonkeyPatch, spills: bool
) -> None:
    """Found by the model: read, and taken back, it refused the commit of a large transaction alone."""
    if spills:
        monkeypatch.setattr(transactions, "SPILL_ABOVE_BYTES", 1)
    db.put("b", "deleted", b"1")
    txn = db.transaction("serializable")
    txn.put("b", "kept", b"1")
    savepoint = txn.savepoint()
    txn.put("b", "k", b"1")
    txn.put("b", "new", b"1")
    txn.delete("b", "new")
    assert txn.get("b", "k").value == b"1"
    with pytest.raises(NotFound):
        txn.get("b", "new")
    txn.rollback_to(savepoint)
    db.put("b", "k", b"other")
    db.put("b", "new", b"other")
    txn.commit()
    assert (value(db, "k"), value(db, "new"), value(db, "kept")) == (b"other", b"other", b"1")
    # What was there before, or was not, was read before it was written.
    txn = db.transaction("serializable")
    savepoint = txn.savepoint()
    txn.delete("b", "deleted")
    txn.rollback_to(savepoint)
    db.put("b", "deleted", b"other")
    txn.put("b", "y", b"1")
    with pytest.raises(Conflict):
        txn.commit()


def test_a_phantom_is_refused_by_serializable(db: Database) -> None:
    """What a scan did not find counts as read."""
    txn = db.transaction("serializable")
    assert list(txn.scan("b", "room/")) == []
    db.put("b", "room/1", b"taken")
    db.flush()
    txn.put("b", "booking", b"room 1")
    with pytest.raises(Conflict):
        txn.commit()
    absent = db.transaction("serializable")
    with pytest.raises(NotFound):
        absent.get("b", "nobody")
    db.put("b", "nobody", b"here")
    absent.put("b", "booking", b"2")
    with pytest.raises(Conflict):
        absent.commit()


def test_savepoints_take_back_what_came_after_them(db: Database) -> None:
    """One step fails, the work before it stays."""
    db.put("b", "old", b"0")
    with db.transaction() as txn:
        txn.put("b", "x", b"1")
        first = txn.savepoint()
        txn.put("b", "x", b"2")
        txn.put("b", "y", b"3")
        txn.delete("b", "old")
        second = txn.savepoint()
        txn.put("b", "z", b"4")
        txn.rollback_to(second)
        assert [each.key for each in txn.scan("b")] == ["x", "y"]
        txn.rollback_to(first)
        assert [(each.key, each.value) for each in txn.scan("b")] == [("old", b"0"), ("x", b"1")]
        with pytest.raises(InputError):
            txn.rollback_to(second)
        other = db.transaction(lock_timeout_s=0)
        other.put("b", "y", b"mine")
        other.commit()
    assert (value(db, "x"), value(db, "y"), value(db, "z")) == (b"1", b"mine", None)


def test_a_scan_merges_own_writes_in_order(db: Database) -> None:
    """A transaction reads what it wrote, in its place."""
    for key in "bdf":
        db.put("b", key, b"old")
    with db.transaction() as txn:
        for key in "aceg":
            txn.put("b", key, b"new")
        txn.put("b", "d", b"own")
        txn.delete("b", "f")
        assert [(each.key, each.value) for each in txn.scan("b")] == [
            ("a", b"new"), ("b", b"old"), ("c", b"new"), ("d", b"own"), ("e", b"new"), ("g", b"new"),
        ]  # fmt: skip


def test_two_that_wait_for_each_other_are_found(db: Database) -> None:
    """One gives way, the other commits."""
    outcomes: list[str] = []
    both = threading.Barrier(2)

    def run(first: str, second: str) -> None:
        try:
            with db.transaction(lock_timeout_s=20) as txn:
                txn.put("b", first, b"1")
                both.wait(10)
                txn.put("b", second, b"1")
            outcomes.append("committed")
        except (Deadlock, Conflict) as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=run, args=order) for order in (("x", "y"), ("y", "x"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == ["Deadlock", "committed"]


@pytest.mark.parametrize("before_images", [False, True])
def test_a_value_that_is_as_large_as_allowed_can_be_written_after_others(
    tmp_path: Path, *, before_images: bool
) -> None:
    """What waits for the commit, and it, are more than one batch."""
    most = 31 * 2**20
    with lowwater.open(
        tmp_path / "data", config={"wal": {"entry_bytes_max": most, "before_images": before_images}}
    ) as db:
        db.create_bucket("b")
        db.put("b", "large", bytes(200), {"m": "n" * 60_000})
        with db.transaction() as txn:
            txn.put("b", "k", bytes(transactions.SPILL_ABOVE_BYTES - 1000))
            txn.put("b", "large", bytes(most - 100))
            txn.put("b", "last", b"1")
        found = db.get("b", "large")
        assert (len(found.value), found.seq) == (most - 100, txn.seq)
        assert list(db.check()) == []


def test_misuse_is_told(db: Database) -> None:
    """Each wrong use has an error that says what to do."""
    with pytest.raises(InputError, match="isolation"):
        db.transaction("dirty")  # type: ignore[arg-type]
    txn = db.transaction()
    with pytest.raises(NotFound):
        txn.put("nowhere", "k", b"")
    with pytest.raises(NotFound):
        txn.delete("b", "nothing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transactions, "TXN_BYTES_MAX", 1000)
        txn.put("b", "0", bytes(500))
        with pytest.raises(LimitExceeded):
            txn.put("b", "2", bytes(500))
        patch.setattr(transactions, "TXN_ENTRIES_MAX", 1)
        with pytest.raises(LimitExceeded):
            txn.put("b", "2", b"")
    errors: list[Exception] = []

    def elsewhere() -> None:
        try:
            txn.put("b", "k", b"")
        except InputError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "thread" in str(errors[0])
    with pytest.raises(InputError):
        db.transaction().rollback_to(txn.savepoint())
    txn.abort()
    for call in (txn.commit, txn.abort, txn.savepoint, lambda: txn.get("b", "x")):
        with pytest.raises(TransactionEnded):
            call()


def test_nothing_stays_behind_an_end(db: Database) -> None:
    """Pins keep versions, and locks keep others out."""
    for number in range(20):
        txn = db.transaction("serializable")
        txn.put("b", "x", b"%d" % number)
        (txn.commit if number % 2 else txn.abort)()
    assert db._state._pins == {}
    assert db._locks.table.held == 0
    assert list(db._locks.check()) == []


@pytest.mark.parametrize("seed", range(20))
def test_interleaved_transactions_agree_with_copies_of_a_dictionary(db: Database, seed: int) -> None:
    """Snapshot isolation, by its definition."""
    rng = random.Random(seed)
    keys = [f"k{number}" for number in range(6)]
    model: dict[str, bytes] = {}
    changed: dict[str, int] = {}
    clock = 0
    running: list[tuple[lowwater.Transaction, dict[str, bytes], dict[str, bytes | None], int]] = []
    locked: dict[lowwater.Transaction, set[str]] = {}
    for step in range(300):
        what = rng.random()
        key = rng.choice(keys)
        if what < 0.15 and len(running) < 4:
            running.append((db.transaction(lock_timeout_s=0), dict(model), {}, clock))
        elif what < 0.3:
            db.put("b", key, b"%d" % step)
            clock += 1
            model[key], changed[key] = b"%d" % step, clock
        elif what < 0.35:
            db.flush()
        elif running:
            txn, seen, own, began = running[rng.randrange(len(running))]
            mine = {**seen, **own}
            expected = sorted((each, data) for each, data in mine.items() if data is not None)
            if what < 0.7:
                try:
                    if rng.random() < 0.7:
                        txn.put("b", key, b"t%d" % step)
                        own[key] = b"t%d" % step
                    else:
                        txn.delete("b", key)
                        own[key] = None
                except NotFound:
                    assert mine.get(key) is None
                except Conflict:
                    assert changed.get(key, 0) > began
                    locked.setdefault(txn, set()).add(key)
                except LockTimeout:
                    assert any(each[0] is not txn and key in locked.get(each[0], ()) for each in running)
                else:
                    locked.setdefault(txn, set()).add(key)
            elif what < 0.85:
                assert [(each.key, each.value) for each in txn.scan("b")] == expected
            else:
                running = [each for each in running if each[0] is not txn]
                try:
                    txn.commit()
                except Conflict:
                    assert any(changed.get(each, 0) > began for each in own)
                else:
                    assert not any(changed.get(each, 0) > began for each in own)
                    clock += 1
                    for each, data in own.items():
                        changed[each] = clock
                        if data is None:
                            model.pop(each, None)
                        else:
                            model[each] = data
    assert {each.key: each.value for each in db.scan("b")} == model


def test_counters_by_many_threads_lose_nothing(tmp_path: Path) -> None:
    """The same as above, with real threads and a real disk."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        db.put("b", "n", b"0")

        def retry(work: Callable[[lowwater.Transaction], None]) -> None:
            while True:
                try:
                    with db.transaction() as txn:
                        work(txn)
                except (Conflict, Deadlock, LockTimeout):
                    continue
                return

        def add(txn: lowwater.Transaction) -> None:
            txn.put("b", "n", b"%d" % (int(txn.get("b", "n").value) + 1))

        threads = [threading.Thread(target=lambda: [retry(add) for _ in range(25)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert db.get("b", "n").value == b"100"
        root = db.root()
    with lowwater.open(tmp_path / "data") as db:
        assert db.root() == root


@pytest.mark.slow
def test_a_transaction_larger_than_memory_commits_and_aborts(tmp_path: Path) -> None:
    """1 MiB of pool and 40 MiB of values, in files, with the real limits."""
    options = EngineOptions(pool_bytes_max=2**20)
    with open_with(str(tmp_path), options=options) as db:
        db.create_bucket("b")
        rng = random.Random(1)
        expected = {f"{n:06}": rng.randbytes(200) for n in range(20_000)}
        expected |= {f"large {n}": rng.randbytes(2**20) for n in range(36)}
        with db.transaction() as txn:
            for key, data in expected.items():
                txn.put("b", key, data)
            assert db.list("b").objects == []
            assert txn.get("b", "000000").value == expected["000000"]
            # A write waits while nine tenths are dirty, and then adds at most a quarter.
            assert db._state.dirty_bytes < 1.25 * 2**20
        assert {found.key: found.value for found in db.scan("b")} == expected
        root = db.root()
        txn = db.transaction()
        for key in expected:
            txn.put("b", key, b"other" * 30)
        txn.abort()
        assert db.root() == root
        assert list(db.check()) == []
    with lowwater.open(tmp_path) as db:
        assert db.root() == root
        assert list(db.check()) == []


# ---------------------------------------------------------------------------- those that nobody ends


def until(condition: Callable[[], bool]) -> None:
    """Give way to other threads until something that must happen has happened."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.01)


SMALL = {
    "engine": {"pool_bytes_max": "1 MiB"},
    "wal": {"rotate_max_bytes": "64 KiB"},
    "retention": {"age_max_s": 0, "check_interval_s": "50 ms"},
}


def left_open(db: Database) -> Transaction:
    """A transaction of which a part is in the log, and the whole log after it has to stay."""
    txn = db.transaction(lock_timeout_s=0)
    for number in range(40):
        txn.put("b", f"{number}", bytes(10_000))
    return txn


def test_a_transaction_whose_handle_is_gone_is_aborted(tmp_path: Path) -> None:
    """A function that returned early, or a task that was cancelled, held the log's purging at its first
    entry, and its keys, until the end of the process."""
    with lowwater.open(tmp_path / "db", tier=f"{tmp_path}/archive", config=SMALL) as db:
        db.create_bucket("b")
        txn = left_open(db)
        db.put("b", "other", bytes(70_000))
        assert "begin" in [entry.kind for entry in db.log()]
        del txn
        gc.collect()
        until(lambda: db.metrics().get_sample_value("lowwater_transactions_aborted_total") == 1)
        with db.transaction(lock_timeout_s=0) as txn:
            txn.put("b", "1", b"free")
        db.ship()
        db.flush()
        until(lambda: db.marks().purged > 3)
        assert [found.key for found in db.scan("b")] == ["1", "other"]
        assert list(db.check()) == []


@pytest.fixture
def aging() -> Iterator[tuple[Database, VirtualClock]]:
    """A database whose transactions get old when a test says so."""
    clock = VirtualClock()
    with open_with(
        "memory",
        seams=Seams(files=MemoryFiles(), clock=clock),
        store=MemoryPages(),
        options=EngineOptions(pool_bytes_max=2**20),
    ) as database:
        database.create_bucket("b")
        yield database, clock


def grow_old(aging: tuple[Database, VirtualClock]) -> None:
    """Beyond what the default allows, until the background has seen it."""
    db, clock = aging
    aborted = db.measured.transactions_aborted
    clock.advance(3601)
    until(lambda: db.measured.transactions_aborted > aborted)


def test_a_transaction_that_is_open_for_too_long_is_aborted(aging: tuple[Database, VirtualClock]) -> None:
    """Whoever holds its handle is told so, whatever he does next: above all at the end of a `with`."""
    db, clock = aging
    txn = left_open(db)
    clock.advance(3500)
    assert txn.get("b", "1").value == bytes(10_000)
    grow_old(aging)

    def use(error: Exception | None = None) -> None:
        with left_open(db):
            grow_old(aging)
            if error is not None:
                raise error

    with pytest.raises(TransactionEnded, match="open for more than 3600 s"):
        use()
    with pytest.raises(ValueError, match="the block's own"):
        use(ValueError("the block's own"))
    for call in (
        lambda: txn.get("b", "1"),
        lambda: txn.put("b", "1", b""),
        txn.savepoint,
        lambda: list(txn.scan("b")),
        txn.commit,
        txn.abort,
    ):
        with pytest.raises(TransactionEnded) as caught:
            call()
        assert "transaction_age_max_s" in caught.value.hint
    with db.transaction(lock_timeout_s=0) as other:
        other.put("b", "1", b"free")
    assert [found.key for found in db.scan("b")] == ["1"]
    assert [entry.kind for entry in db.log()].count("abort") == 3


def test_a_scan_of_a_transaction_that_is_aborted_meanwhile_says_so(
    aging: tuple[Database, VirtualClock],
) -> None:
    """Nobody keeps its versions any more: what comes next may lack keys."""
    db, _ = aging
    db.put_many("b", [(f"{number:03}", b"") for number in range(100)])
    txn = db.transaction()
    found = txn.scan("b")
    next(found)
    grow_old(aging)
    with pytest.raises(TransactionEnded):
        next(found)


@pytest.mark.parametrize("age_max", ["1 ms", "none"])
def test_how_old_a_transaction_may_get_is_configured(tmp_path: Path, age_max: str) -> None:
    """An application knows how long its own take."""
    config = {"engine": {"transaction_age_max_s": age_max}}
    with lowwater.open(tmp_path / "db", config=config) as db:
        txn = db.transaction()
        if age_max == "1 ms":
            until(lambda: db.metrics().get_sample_value("lowwater_transactions_aborted_total") == 1)
            with pytest.raises(TransactionEnded):
                txn.commit()
        else:
            txn.commit()


def test_threads_whose_transactions_grow_too_old_lose_no_commit(tmp_path: Path) -> None:
    """Whoever commits in that moment has committed, or is told that nothing of it is there."""
    config = {"engine": {**SMALL["engine"], "transaction_age_max_s": "50 ms"}}
    outcomes: dict[str, bool] = {}
    with lowwater.open(tmp_path / "db", config=config) as db:
        db.create_bucket("b")

        def work(thread: int) -> None:
            pause = threading.Event()
            for number in range(6):
                name = f"{thread}-{number}"
                txn = db.transaction()
                try:
                    for part in range(30):
                        txn.put("b", f"{name}-{part}", bytes(10_000))
                    pause.wait(0.02 * number)
                    txn.commit()
                except TransactionEnded:
                    outcomes[name] = False
                else:
                    outcomes[name] = True

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 18
        for name, is_there in outcomes.items():
            assert len(list(db.scan("b", prefix=f"{name}-"))) == (30 if is_there else 0)
        assert list(db.check()) == []
    with lowwater.open(tmp_path / "db") as db:
        assert db.aborted == 0, "none of them was left open"
