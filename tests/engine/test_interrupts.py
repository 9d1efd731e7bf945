"""engine/seams/interrupts.py: an interrupt at any instruction, and calls of signal handlers.

`Walk` has a signal come at any one instruction at which Python looks for signals, be it of the package or of
what that calls: Python calls the handler there, as it would otherwise.
"""

from __future__ import annotations

import _thread
import ctypes
import dis
import errno
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar

import pytest

import lowwater
from lowwater.chaos.disk import Fault, FaultyFiles, Operation
from lowwater.engine.database import transactions
from lowwater.engine.database.database import Database
from lowwater.engine.format.entries import Delete, Put
from lowwater.engine.log.directory import CURRENT
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.errors import AlreadyExists, Busy, Closed, LowwaterError, NotFound, VersionGone

CONFIG = {"wal": {"sync_mode": "none"}}
T = TypeVar("T")
SPILL_BYTES = 10_000


@pytest.fixture(autouse=True)
def interrupts_are_handled() -> Iterator[None]:
    """A shell has what it begins in the background ignore them."""
    with handling(signal.default_int_handler):
        yield


@pytest.fixture(autouse=True)
def small_transactions_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "SPILL_ABOVE_BYTES", 2 * SPILL_BYTES)
    monkeypatch.setattr(transactions, "PIECE_BYTES", SPILL_BYTES)


Call = Callable[[Database, bytes], object]


# Where a function begins, a loop goes back, or a call has returned.
LOOKS_FOR_SIGNALS = {
    code
    for name, code in dis.opmap.items()
    if name in ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD")
    or name.startswith("POP_JUMP_BACKWARD")
}


class Walk:
    """Calls something, and has a signal come at one of its instructions, or of those in a file."""

    def __init__(self, file: str = "") -> None:
        self.count = 0
        self.at = 0
        self.dropped = 0
        self._file = file
        self._come: Iterator[None] = iter(())

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        code = frame.f_code
        if code is Walk.run.__code__:
            return None
        if not code.co_filename.endswith(self._file):
            return self._trace
        if event == "opcode" and code.co_code[frame.f_lasti] in LOOKS_FOR_SIGNALS:
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                # No call from here on: the handler would be called here, and not where the package is.
                [*self._come]  # noqa: B018
        return self._trace

    def run(self, call: Callable[[], object], at: int) -> None:
        """With `at` 0 nothing comes, and `count` says how many instructions there are."""
        self.count, self.at = 0, at
        self._come = map(_thread.interrupt_main, (signal.SIGINT,))  # type: ignore[assignment]
        gc.disable()  # what is raised while it frees another test's objects is raised nowhere
        self.dropped, before = 0, sys.unraisablehook
        sys.unraisablehook = self._drop
        sys.settrace(self._trace)
        try:
            call()
            sys.settrace(None)
            if self.at:
                [*self._come]  # noqa: B018 — the call may have had fewer instructions than when they were counted
            for _ in range(3):
                pass  # here at the latest
        finally:
            sys.settrace(None)
            sys.unraisablehook = before
            gc.enable()

    def _drop(self, _: object) -> None:
        """cbor2 calls Python to look at a type, and has no use for what a handler raises there."""
        self.dropped += 1


@contextmanager
def handling(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def elsewhere(call: Callable[[], T]) -> T:
    """In another thread: this one may have locks that it must not have."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 — told by `result`
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(60)


def require_nothing_held(db: Database) -> None:
    """What an interrupted call held is given back, by the background if need be."""

    def held() -> list[object]:
        table, state = db._locks.table, db._state
        return [*state._pins, *state.transactions.open, *db._open_transactions._held, *table._locks]

    deadline_s = time.monotonic() + 60
    while held():
        assert time.monotonic() < deadline_s, held()
        time.sleep(0.001)


def places(call: Callable[[], object], most: int, seed: int, file: str = "") -> list[int]:
    walk = Walk(file)
    walk.run(call, 0)
    everywhere = range(1, walk.count + 1)
    return list(everywhere) if most >= walk.count else sorted(random.Random(seed).sample(everywhere, most))


def _transaction(db: Database, value: bytes) -> object:
    with db.transaction() as txn:
        txn.put("b", "k", value)
        txn.get("b", "other")
        txn.put("b", "l", value)
    return txn.seq


def _large_transaction(db: Database, value: bytes) -> object:
    with db.transaction() as txn:
        txn.put("b", "k", value)
        savepoint = txn.savepoint()
        for number in range(4):
            txn.put("b", f"large {number}", bytes(SPILL_BYTES))
        txn.rollback_to(savepoint)
        for number in range(4):
            txn.put("b", f"large {number}", bytes(SPILL_BYTES))
        txn.put("b", "l", value)
    return txn.seq


def _bucket(db: Database, value: bytes) -> object:
    with suppress(AlreadyExists):
        db.create_bucket("c")
    db.put("b", "k", value)
    return db.delete_bucket("c")


def _snapshot(db: Database, value: bytes) -> object:
    db.put("b", "k", value)
    with suppress(NotFound):
        db.drop_snapshot("of the walk")
    return db.snapshot("of the walk")


def _session(db: Database, value: bytes) -> object:
    session = db.session(ttl=60)
    session.write([Put("b", "k", value), Put("b", "l", value)])
    return session.close()


def _delete(db: Database, value: bytes) -> object:
    db.put_many("b", [("k", value), ("l", value)])
    return db.delete("b", "gone") if db.list("b", "gone").objects else None


def _scan(db: Database, value: bytes) -> object:
    db.put("b", "k", value)
    with suppress(VersionGone):  # a handler may have written in between, and nobody keeps versions
        return list(db.scan("b", at=db.marks().applied))


WRITES: dict[str, Call] = {
    "put": lambda db, value: db.put("b", "k", value),
    "put_with_metadata": lambda db, value: db.put("b", "k", value, {"a": "b"}),
    "put_many": lambda db, value: db.put_many("b", [("k", value), ("m", b"x"), ("k", value), ("l", value)]),
    "write": lambda db, value: db.write([Put("b", "k", value), Put("b", "l", value), Delete("b", "gone")]),
    "delete": _delete,
    "copy": lambda db, value: (db.put("b", "source", value), db.copy("b", "source", "b", "k")),
    "transaction": _transaction,
    "session": _session,
    "flush": lambda db, value: (db.put("b", "k", value), db.flush()),
    "checkpoint": lambda db, value: (db.put("b", "k", value), db.checkpoint()),
    "scan": _scan,
    "get": lambda db, value: (db.put("b", "k", value), db.get("b", "k"), db.head("b", "k")),
    "large_transaction": _large_transaction,
    "list": lambda db, value: (db.put("b", "k", value), db.list("b", "k", delimiter="/")),
    "snapshot": _snapshot,
    "bucket": _bucket,
}
# What happens whole or not at all.
GROUPS = ("write", "transaction", "large_transaction", "session")


def opened(path: Path) -> Database:
    db = lowwater.open(path, config=CONFIG)
    db.create_bucket("b", exist_ok=True)
    db.put_many("b", [("k", b"0"), ("l", b"0"), ("gone", b"0"), ("other", b"0")])
    return db


def interrupt_everywhere(path: Path, name: str, most: int) -> None:
    call, walk = WRITES[name], Walk()
    db = opened(path)
    seq = db.snapshot("first")  # versions are kept, which takes more steps
    acknowledged = {"k": b"0", "after": b""}
    try:
        for number, at in enumerate(places(lambda: call(db, b"walked"), most, seed=1)):
            value = f"{name} {at}".encode()
            interrupted = False
            try:
                walk.run(lambda: call(db, value), at)  # noqa: B023
            except KeyboardInterrupt:
                interrupted = True

            def go_on() -> bytes:
                found = bytes(db.get("b", "k").value)
                assert found == value or interrupted  # noqa: B023
                if name in GROUPS and found != b"walked":
                    assert found == db.get("b", "l").value, at  # noqa: B023
                db.put("b", "after", value)  # noqa: B023
                assert db.get("b", "k", at=seq).value == b"0", at  # noqa: B023
                assert [each.key for each in db.scan("b", "after")] == ["after"]
                with db.transaction() as txn:
                    txn.put("b", "l", found)
                if number % 20 == 0:  # noqa: B023
                    db.flush()
                    assert db.registry.get_sample_value("lowwater_pool_dirty_bytes") == 0, at  # noqa: B023
                return found

            acknowledged = {"k": elsewhere(go_on), "after": value}
        require_nothing_held(db)
        assert list(db.check()) == []
    finally:
        db.close()
    with lowwater.open(path, config=CONFIG) as db:
        assert {key: db.get("b", key).value for key in acknowledged} == acknowledged
        assert db.get("b", "k", at=seq).value == b"0"
        assert list(db.check()) == []


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("get", "engine/state/state.py"),
        ("scan", "engine/database/reads.py"),
        ("transaction", "engine/database/open_transactions.py"),
        ("transaction", "engine/seams/real.py"),
        ("large_transaction", "engine/database/spill.py"),
        ("flush", "threading.py"),
        ("flush", "engine/seams/waiting.py"),
    ],
)
def test_nothing_is_held_after_an_interrupt(tmp_path: Path, name: str, file: str) -> None:
    """A lock would stop everybody else, a pin keep versions for ever, an open transaction refuse others."""
    with opened(tmp_path / "db") as db:
        call = WRITES[name]
        call(db, b"0")
        walk = Walk(file)
        for at in places(lambda: call(db, b"walked"), 150, 8, file):
            with suppress(KeyboardInterrupt):
                walk.run(lambda: call(db, b"%d" % at), at)  # noqa: B023
            elsewhere(lambda: (call(db, b"after"), db.get("b", "k"), db.get("b", "k")))
        require_nothing_held(db)
        assert list(db.check()) == []


def test_a_read_that_waits_for_an_interrupted_write_ends(tmp_path: Path) -> None:
    """It is applied, and whoever has applied it was to say so."""
    walk = Walk("engine/database/database.py")
    with opened(tmp_path / "db") as db:
        for at in places(lambda: db.put("b", "k", b"v"), 1000, 9, "engine/database/database.py"):
            awaited = db.marks().applied + 1
            found: Future[bytes] = Future()

            def read() -> None:
                try:
                    found.set_result(db.get("b", "k", at=awaited, wait_s=20).value)  # noqa: B023
                except LowwaterError as error:
                    found.set_exception(error)  # noqa: B023

            reader = threading.Thread(target=read)
            reader.start()
            while not db._waiting_readers:
                time.sleep(0)
            with suppress(KeyboardInterrupt):
                walk.run(lambda: db.put("b", "k", b"%d" % at), at)  # noqa: B023
            if db.marks().applied < awaited:
                db.put("b", "k", b"%d" % at)
            assert found.result(60) == b"%d" % at
            reader.join()


def test_coroutines_that_wait_for_room_are_woken_after_an_interrupt() -> None:
    """There is room once a run was written, and who has written it was to say so."""
    walk = Walk("engine/log/wal.py")
    entry = Put("b", "k", b"v")
    with Log.open(None) as log:
        for at in places(lambda: log.append(entry), 1000, 10, "engine/log/wal.py"):
            told: list[object] = []
            loop: Any = SimpleNamespace(call_soon_threadsafe=lambda *args: told.append(args))  # noqa: B023
            waiter: Any = None
            log.wal._room_waiters.append((loop, waiter))
            with suppress(KeyboardInterrupt):
                walk.run(lambda: log.append(entry), at)
            log.append(entry)
            assert told, at


def test_a_handler_that_ships_is_told_that_it_cannot(tmp_path: Path) -> None:
    """What it has interrupted may hold any lock on the way to the store."""
    refused = []

    def handler(*_: object) -> None:
        with pytest.raises(Busy):
            db.ship()
        refused.append(1)

    with lowwater.open(tmp_path / "db", tier=f"file://{tmp_path}/archive", config=CONFIG) as db:
        db.create_bucket("b")
        for at in places(lambda: db.put("b", "k", b"v"), 5, 11, "engine/log/wal.py"):
            with handling(handler):
                Walk("engine/log/wal.py").run(lambda: db.put("b", "k", b"v"), at)
        assert len(refused) == 5
        assert db.ship() > 0


@pytest.mark.parametrize("name", WRITES)
def test_after_an_interrupt_the_database_goes_on(tmp_path: Path, name: str) -> None:
    """The user of a notebook presses Ctrl-C daily, and goes on with the database that is open."""
    interrupt_everywhere(tmp_path / "db", name, 12)


@pytest.mark.long
@pytest.mark.parametrize("name", WRITES)
def test_an_interrupt_at_any_instruction_loses_nothing(tmp_path: Path, name: str) -> None:
    interrupt_everywhere(tmp_path / "db", name, 10_000)


@pytest.mark.parametrize("most", [40, pytest.param(10_000, marks=pytest.mark.long)])
def test_after_an_interrupt_the_log_goes_on(tmp_path: Path, most: int) -> None:
    """Also where the interrupted append has begun a segment, or ended one."""
    walk = Walk()
    log = Log.open(tmp_path / "log", options=LogOptions(sync_mode="none", segment_bytes=65_536))
    told: dict[int, bytes] = {}
    for at in places(lambda: log.append(Put("b", "k", bytes(20_000))), most, seed=2):
        value = b"%d" % at + bytes(20_000)
        with_seqs: list[int] = []
        try:
            walk.run(lambda: with_seqs.append(log.append(Put("b", "k", value))), at)  # noqa: B023
        except KeyboardInterrupt:
            pass
        told.update(dict.fromkeys(with_seqs, value))
        told[log.append(Put("b", "after", value))] = value
    assert list(log.check()) == []
    read = {entry.seq: entry.value for entry in log.read()}
    assert read.items() >= told.items()
    assert sorted(read) == list(range(1, log.seq_last + 1))
    log.close()
    with Log.open(tmp_path / "log") as log:
        assert {entry.seq: entry.value for entry in log.read()} == read
        assert list(log.check()) == []


@pytest.mark.parametrize("name", ["put", "write", "transaction", "checkpoint", "scan"])
@pytest.mark.parametrize("call", ["put", "get", "scan", "flush"])
def test_a_call_of_a_handler_works_or_raises_at_once(tmp_path: Path, name: str, call: str) -> None:
    """It would wait for what goes on when the handler has returned."""
    walk = Walk()
    outcomes: list[str] = []
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: db.put("b", "of the handler", b"v"),
        "get": lambda: db.get("b", "other").value,
        "scan": lambda: list(db.scan("b", at=db.marks().applied)),
        "flush": lambda: db.flush(),  # noqa: PLW0108 — it is opened below
    }

    def handler(*_: object) -> None:
        with suppress(Busy):
            calls[call]()
        outcomes.append(call)

    with opened(tmp_path / "db") as db:
        for at in places(lambda: WRITES[name](db, b"walked"), 12, seed=3):
            # It may put something between the scan's moment and the scan.
            with handling(handler), suppress(VersionGone):
                walk.run(lambda: WRITES[name](db, b"%d" % at), at)  # noqa: B023
            assert db.get("b", "k").value == b"%d" % at
        assert len(outcomes) == 12
        assert list(db.check()) == []


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Whoever waits for longer is told, where the test would never end."""

    def handler(*_: object) -> None:
        raise AssertionError(f"nothing has happened for {seconds} s")

    before = signal.signal(signal.SIGALRM, handler)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("file", ["log/values.py", "pages/lmdb_store.py", "state/cleanpages.py"])
@pytest.mark.parametrize("call", ["put", "scan"])
def test_a_call_of_a_handler_waits_for_nobody_who_waits_for_its_thread(
    tmp_path: Path, file: str, call: str
) -> None:
    """Another thread may have the state's lock, and want one that the interrupted read has."""
    walk = Walk(file)
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: db.put("b", "of the handler", b"v"),
        "scan": lambda: list(db.scan("b", "other")),
    }
    others: list[threading.Thread] = []
    called: list[bool] = []

    def write() -> None:
        """It reads with the state's lock: what it is to copy, and what was there, for before-images."""
        db.copy("b", "large", "b", "copy")
        db.put("b", f"far {len(others) % 1000}", b"v")

    def handler(*_: object) -> None:
        other = threading.Thread(target=write)
        other.start()
        others.append(other)
        other.join(0.05)
        with suppress(Busy):
            calls[call]()
        called.append(True)

    def read() -> None:
        db._state.clean.limit(0)
        db._state.limit_clean()
        db._values.forget_before(db.marks().applied)
        db.get("b", "large")
        list(db.scan("b", "gone"))

    with lowwater.open(tmp_path / "db", config={"wal": {**CONFIG["wal"], "before_images": True}}) as db:
        db.create_bucket("b")
        db.put_many("b", [("large", bytes(9000)), ("gone", b"0"), ("other", b"0")])
        db.put_many("b", [(f"far {number}", b"0") for number in range(1000)])
        db.flush()
        for at in places(read, 25, 12, file):
            with handling(handler), at_most(20):
                walk.run(read, at)
            for each in others:
                each.join(20)
                assert not each.is_alive()
        assert called
        assert list(db.check()) == []


@pytest.mark.parametrize("name", ["put", "write", "transaction", "flush", "scan"])
def test_a_handler_may_raise_what_it_was_refused_with(tmp_path: Path, name: str) -> None:
    """What it does not catch ends the interrupted call, and is no failure of the disk."""
    walk = Walk()
    with opened(tmp_path / "db") as db:

        def handler(number: int, frame: FrameType | None) -> None:
            db.put("b", "of the handler", b"v")
            raise TimeoutError("too late")

        for at in places(lambda: WRITES[name](db, b"walked"), 12, seed=4):
            with handling(handler):
                try:
                    walk.run(lambda: WRITES[name](db, b"%d" % at), at)  # noqa: B023
                except (Busy, TimeoutError):
                    pass
                else:
                    assert walk.dropped, at
            db.put("b", "after", b"%d" % at)
        assert list(db.check()) == []


OF_THE_SYSTEM: dict[str, tuple[str, Call]] = {
    "checkpoint": ("engine/database/core.py", lambda db, value: (db.put("b", "k", value), db.checkpoint())),
    "session": ("engine/format/entries.py", lambda db, value: db.session(ttl=60).close()),
    "metadata": (
        "engine/format/format.py",
        lambda db, value: (db.put("b", "k", value, {"a": "b"}), [*db.scan("b")]),
    ),
    "log": ("engine/seams/real.py", lambda db, value: list(db.log(1))),
}


@pytest.mark.parametrize("name", OF_THE_SYSTEM)
def test_what_a_handler_raises_is_taken_for_nothing_else(tmp_path: Path, name: str) -> None:
    """A TimeoutError is an OSError: it is neither a disk that fails, nor what damaged bytes lead to."""
    file, call = OF_THE_SYSTEM[name]
    walk = Walk(file)

    def handler(*_: object) -> None:
        raise TimeoutError("too late")

    with lowwater.open(tmp_path / "db", config={"wal": {**CONFIG["wal"], "cache_bytes_max": 1}}) as db:
        db.create_bucket("b")
        for at in places(lambda: call(db, b"walked"), 60, 13, file):
            with handling(handler), suppress(TimeoutError):
                walk.run(lambda: call(db, b"%d" % at), at)  # noqa: B023
            db.put("b", "after", b"v")
        assert list(db.check()) == []


@pytest.mark.parametrize("name", ["put", "put_many", "transaction", "flush", "scan"])
def test_a_handler_may_close(tmp_path: Path, name: str) -> None:
    """What is interrupted ends, or says that it is closed."""
    walk = Walk()
    with opened(tmp_path / "db") as db:
        found = places(lambda: WRITES[name](db, b"walked"), 5, seed=5)
    for at in found:
        db = opened(tmp_path / "db")
        with handling(lambda *_: db.close()):  # noqa: B023
            try:
                walk.run(lambda: WRITES[name](db, b"%d" % at), at)  # noqa: B023
                wrote = True
            except Closed:
                wrote = False
        db.close()  # returns once it is closed
        with lowwater.open(tmp_path / "db", config=CONFIG) as db:
            assert db.get("b", "k").value == b"%d" % at or not wrote
            assert list(db.check()) == []


def test_a_handler_may_wait_for_a_future_where_one_is_waited_for() -> None:
    """All futures have one lock."""
    walk = Walk("engine/log/tickets.py")
    entry = Put("b", "k", b"v")
    seqs: list[int] = []

    def handler(*_: object) -> None:
        with suppress(Busy):
            seqs.append(log.submit(entry).result())

    with Log.open(None) as log:
        for at in range(1, 13):
            future = log.submit(entry)
            with handling(handler), at_most(20):
                walk.run(future.result, at)
    assert seqs


def test_an_interrupted_close_is_to_the_end(tmp_path: Path) -> None:
    walk, path = Walk(), tmp_path / "db"
    db = opened(path)
    found = places(db.close, 8, seed=6)
    for at in found:
        db = opened(path)
        try:
            walk.run(db.close, at)
        except KeyboardInterrupt:
            db.close()
        with lowwater.open(path, config=CONFIG) as db:
            assert list(db.check()) == []


CHILD = """
import os, random, signal, sys, threading, time
import lowwater
from lowwater.errors import Closed

path, seed = sys.argv[1], int(sys.argv[2])
rng = random.Random(seed)
# A shell has what it begins in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
"""

INTERRUPTED = (
    CHILD
    + """
db = lowwater.open(path)
db.create_bucket("b")
told, interrupts = {}, 0
asked_for = 0  # no event: an interrupt in the middle of setting it would leave its lock taken
def press():
    for number in range(40):
        while asked_for <= number:
            time.sleep(0.0001)
        for _ in range(rng.randrange(3000)):
            pass
        os.kill(os.getpid(), signal.SIGINT)
pressing = threading.Thread(target=press)
others = [threading.Thread(target=lambda n=n: [db.put("b", f"other {n} {i}", b"v") for i in range(30)])
          for n in range(2)]
for each in [pressing, *others]:
    each.start()
number = 0
while interrupts < 40:
    try:
        asked_for = interrupts + 1
        while True:
            number += 1
            key, value = f"{number % 50}", str(number).encode()
            told.pop(key, None)
            db.put("b", key, value)
            told[key] = value
    except KeyboardInterrupt:
        interrupts += 1
for each in [pressing, *others]:
    each.join()
assert {key: db.get("b", key).value for key in told} == told
assert list(db.check()) == []
db.close()
with lowwater.open(path) as db:
    assert {key: db.get("b", key).value for key in told} == told
    assert sum(1 for _ in db.scan("b", "other")) == 60
print("interrupted", interrupts)
"""
)

TERMINATED = (
    CHILD
    + """
for life in range(40):
    db = lowwater.open(path)
    db.create_bucket("b", exist_ok=True)
    handled = []
    def handler(*_):
        db.close()
        handled.append(1)
    signal.signal(signal.SIGTERM, handler)
    told = {}
    began = threading.Event()
    def terminate():
        began.wait()
        for _ in range(rng.randrange(3000)):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
    terminating = threading.Thread(target=terminate)
    terminating.start()
    try:
        for number in range(10**9):
            db.put("b", f"{number % 50}", f"{life} {number}".encode())
            told[f"{number % 50}"] = f"{life} {number}".encode()
            began.set()
    except Closed:
        pass
    terminating.join()
    assert handled
    db.close()
    with lowwater.open(path) as db:
        held = {key: db.get("b", key).value for key in told}
    # The last one may be written, and nobody have been told.
    assert sum(held[key] != told[key] for key in told) <= 1, (held, told)
print("closed", 40)
"""
)

EXITING = (
    CHILD
    + """
db = lowwater.open(path)
db.create_bucket("b", exist_ok=True)
def handler(*_):
    db.close()
    sys.exit(3)
signal.signal(signal.SIGTERM, handler)
print("up", flush=True)
def terminate():
    for _ in range(1 + seed % 2):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(rng.randrange(3000)):
            pass
for number in range(10**9):
    if number == seed // 3:
        threading.Thread(target=terminate).start()
    if seed % 3 == 0:
        db.put("b", f"{number % 50}", b"v")
    elif seed % 3 == 1:
        with db.transaction() as txn:
            txn.put("b", f"{number % 50}", b"v")
    else:
        db.put_many("b", [(f"{number % 50}", b"v")] * 20)
        list(db.scan("b"))
        db.flush()
"""
)


def run_child(source: str, path: Path, seed: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", source, str(path), str(seed)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("source", "said"), [(INTERRUPTED, "interrupted 40\n"), (TERMINATED, "closed 40\n")])
def test_forty_signals_under_load(tmp_path: Path, source: str, said: str) -> None:
    done = run_child(source, tmp_path / "db", 1)
    assert (done.returncode, done.stdout) == (0, said), done.stderr


@pytest.mark.parametrize(
    "count", [pytest.param(6, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.long)]
)
def test_the_program_ends_once_a_handler_has_closed(tmp_path: Path, count: int) -> None:
    """The directory is free then, and holds what it has to. Some get two signals in a row."""
    for seed in range(count):
        done = run_child(EXITING, tmp_path / "db", seed)
        assert (done.returncode, done.stdout) == (3, "up\n"), done.stderr
        with lowwater.open(tmp_path / "db") as db:
            assert list(db.check()) == []


@pytest.mark.parametrize("most", [30, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_disk_that_fails_where_an_interrupt_comes_ends_the_log(most: int) -> None:
    """Nobody waits for ever for the leader that was interrupted in the middle of saying so."""
    walk = Walk()

    def fails(operation: Operation) -> Fault | None:
        is_write = operation.kind in ("write", "sync") and operation.path.endswith(CURRENT)
        return Fault(errno.EIO) if is_write else None

    def run(at: int) -> None:
        files = FaultyFiles()
        log = Log.open("log", seams=Seams(files=files))
        log.append(Put("b", "k", b"before"))
        files.fault = fails
        futures: list[Future[int]] = []
        with suppress(KeyboardInterrupt, LowwaterError):
            walk.run(
                lambda: (futures.append(log.submit(Put("b", "k", b"1"))), log.append(Put("b", "k", b"2"))), at
            )
        for future in futures:
            with pytest.raises(LowwaterError):
                future.result(60)
        with pytest.raises(LowwaterError):
            log.append(Put("b", "k", b"3"))
        assert log.wal.failure is not None
        assert str(log.wal.failure)
        assert [entry.value for entry in log.read()][-1:] == [b"before"]
        with suppress(LowwaterError):
            log.close()

    run(0)
    count = walk.count
    for at in sorted(random.Random(7).sample(range(1, count + 1), min(most, count))):
        run(at)


def test_what_is_raised_in_the_writer_thread_does_not_end_it() -> None:
    """Tools that end threads do that. Futures would wait for ever."""
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    with Log.open(None) as log:
        writer = next(each for each in threading.enumerate() if each.name == "lowwater-wal-writer")
        seqs = []
        for number in range(200):
            raise_in(ctypes.c_ulong(writer.ident or 0), ctypes.py_object(KeyboardInterrupt))
            futures = [log.submit(Put("b", "k", b"v")) for _ in range(number % 3 + 1)]
            seqs += [future.result(60) for future in futures]
        assert seqs == list(range(2, len(seqs) + 2))
        assert log.append(Put("b", "k", b"v")) == len(seqs) + 2
