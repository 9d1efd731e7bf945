"""The embedded database: what each call does, what is refused and how, and what a failure leaves possible."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import cbor2
import pytest

import lowwater
from lowwater import Database, Delete, Put
from lowwater.chaos.disk import Fault, FaultyFiles, Operation
from lowwater.engine.database.database import EngineOptions
from lowwater.engine.database.opening import open_with
from lowwater.engine.flush.flush import AFTER_COMMIT, BEFORE_COMMIT
from lowwater.engine.format import format
from lowwater.engine.log.log import LogOptions, Seams
from lowwater.engine.log.pieces import Piece
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.engine.pages.memory_pages import MemoryPages
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.state.meta import META_KEY, META_VERSION
from lowwater.errors import (
    AlreadyExists,
    Closed,
    ConditionFailed,
    Corrupt,
    DirectoryLocked,
    DirectoryNotWritable,
    InputError,
    InvalidConfig,
    LogPoisoned,
    LowwaterError,
    NewerVersion,
    NotEmpty,
    NotFound,
    OlderVersion,
    OutOfOrderSeq,
    OutOfSpace,
    VersionGone,
)

MIB = 2**20
LARGE = 5000  # more than what a page holds of a value
SMALL_SEGMENTS = LogOptions(segment_bytes=65536, block_bytes=4096)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "data")


@pytest.fixture
def db(path: str) -> Iterator[Database]:
    with lowwater.open(path) as opened:
        opened.create_bucket("b")
        yield opened


def values_of(db: Database, bucket: str = "b", at: int | None = None) -> dict[str, bytes]:
    return {found.key: found.value for found in db.scan(bucket, at=at)}


# ---------------------------------------------------------------------------- what the calls do


def test_a_put_is_read_back_with_its_metadata_and_seq(db: Database) -> None:
    """The first thing that anybody does."""
    seq = db.put("b", "k", b"value", {"type": "text"})
    found = db.get("b", "k")
    assert (found.bucket, found.key, found.value, found.metadata, found.seq) == (
        "b",
        "k",
        b"value",
        {"type": "text"},
        seq,
    )
    assert found.time_us > 0
    head = db.head("b", "k")
    assert (head.size_bytes, head.seq, head.metadata) == (5, seq, {"type": "text"})


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 300, 400, LARGE, 3 * MIB])
def test_a_value_of_any_size_survives_pages_and_reopening(path: str, size: int) -> None:
    """Around the size from which values stay in the log, each side has a path of its own."""
    value = random.Random(size).randbytes(size)
    with lowwater.open(path) as db:
        db.create_bucket("b")
        db.put("b", "put", value)
        db.put_many("b", [("many", value)])
        db.write([Put("b", "group", value)])
        db.put("b", "conditional", value, if_absent=True)
        db.copy("b", "put", "b", "copy")
        expected = dict.fromkeys(("put", "many", "group", "conditional", "copy"), value)
        assert values_of(db) == expected
        db.flush()
        assert values_of(db) == expected
        db.copy("b", "copy", "b", "copy of a copy from a page")
        expected["copy of a copy from a page"] = value
    for _ in range(2):
        with lowwater.open(path) as db:
            assert values_of(db) == expected
            assert db.get("b", "copy").value == value


def test_a_large_value_anywhere_in_the_log_can_be_copied(path: str) -> None:
    """A copy refers to the frame with the value, which may lie far behind the beginning of its segment."""
    with lowwater.open(path) as db:
        db.create_bucket("b")
        for number in range(6):
            db.put("b", f"filler {number}", bytes(MIB))
        db.put("b", "k", b"x" * LARGE)
        db.put("b", "after", bytes(MIB))
        db.copy("b", "k", "b", "copy")
        assert db.get("b", "copy").value == b"x" * LARGE
    with lowwater.open(path) as db:
        assert db.get("b", "copy").value == b"x" * LARGE
        db.copy("b", "copy", "b", "copy of the copy")
        assert db.get("b", "copy of the copy").value == b"x" * LARGE


def test_a_conditional_put_is_refused_with_the_seq_that_is_there(db: Database) -> None:
    """Whoever is refused decides by it whether to try again."""
    first = db.put("b", "k", b"1", if_absent=True)
    with pytest.raises(ConditionFailed) as caught:
        db.put("b", "k", b"2", if_absent=True)
    assert caught.value.seq == first
    assert caught.value.hint
    second = db.put("b", "k", b"2", if_seq=first)
    with pytest.raises(ConditionFailed):
        db.put("b", "k", b"3", if_seq=first)
    with pytest.raises(ConditionFailed):
        db.put("b", "none", b"3", if_seq=first)
    db.delete("b", "k")
    assert db.put("b", "k", b"4", if_seq=0) > second
    assert db.get("b", "k").value == b"4"


def test_a_group_is_one_version_of_all_its_keys(db: Database) -> None:
    """Whoever reads at its seq sees all of it, and below it nothing."""
    db.put("b", "gone", b"1")
    db.snapshot("before")
    seq = db.write([Put("b", "x", b"1"), Put("b", "x", b"2"), Put("b", "y", b"3"), Delete("b", "gone")])
    assert {found.key: found.seq for found in db.scan("b")} == {"x": seq, "y": seq}
    assert values_of(db) == {"x": b"2", "y": b"3"}
    assert values_of(db, at=seq - 1) == {"gone": b"1"}
    db.flush()
    assert values_of(db, at=seq - 1) == {"gone": b"1"}


def test_a_listing_pages_through_keys_and_prefixes(db: Database) -> None:
    """Page by page it gives what one large page gives."""
    keys = ["a", "photos/1", "photos/2", "photos/old/1", "videos/1", "z"]
    db.put_many("b", [(key, key.encode()) for key in keys])
    whole = db.list("b", delimiter="/")
    assert [each.key for each in whole.objects] == ["a", "z"]
    assert whole.prefixes == ["photos/", "videos/"]
    assert whole.next is None
    for limit in (1, 2, 3, 4, 5):
        objects: list[str] = []
        prefixes: list[str] = []
        start_after: str | None = None
        while True:
            page = db.list("b", delimiter="/", limit=limit, start_after=start_after)
            assert len(page.objects) + len(page.prefixes) <= limit
            objects += [each.key for each in page.objects]
            prefixes += page.prefixes
            if (start_after := page.next) is None:
                break
        assert (objects, prefixes) == (["a", "z"], ["photos/", "videos/"])
    assert [each.key for each in db.list("b", "photos/").objects] == keys[1:4]
    assert db.list("b", "photos/", delimiter="/").prefixes == ["photos/old/"]
    assert db.list("b", "nothing").objects == []


def test_scans_keep_the_order_of_bytes_and_the_moment_they_began(db: Database) -> None:
    """Writes and flushes that come while a scan runs are not in it, and nothing of it goes."""
    keys = ["a", "b", "ä", "€", "😀", "a\0", "ab"]
    db.put_many("b", [(key, b"old") for key in keys])
    scan = db.scan("b")
    db.put_many("b", [(key, b"new") for key in [*keys, "new"]])
    db.delete("b", "a")
    first = next(scan)
    assert (first.key, first.value) == ("a", b"old")
    db.flush()
    db.put_many("b", [(key, b"newer") for key in keys])
    db.flush()
    rest = list(scan)
    assert [first.key, *(found.key for found in rest)] == sorted(keys, key=str.encode)
    assert {found.value for found in rest} == {b"old"}
    assert [found.key for found in db.scan("b", start_after="b")] == ["new", "ä", "€", "😀"]


def test_buckets_never_mix(db: Database) -> None:
    """One bucket's name may begin with another's, and a key may look like a bucket."""
    for name in ("bb", "b/", "Ünïcode", "x" * 255):
        db.create_bucket(name)
        db.put(name, "k", name.encode())
    db.flush()
    assert db.buckets() == sorted(["b", "bb", "b/", "Ünïcode", "x" * 255])
    for name in db.buckets():
        assert values_of(db, name) == ({} if name == "b" else {"k": name.encode()})


def test_a_bucket_can_be_deleted_and_made_again(path: str) -> None:
    """It is empty then, here and after opening again."""
    with lowwater.open(path) as db:
        db.create_bucket("b")
        db.put("b", "k", b"1")
        with pytest.raises(NotEmpty):
            db.delete_bucket("b")
        db.delete("b", "k")
        db.delete_bucket("b")
        assert db.buckets() == []
        with pytest.raises(NotFound):
            db.put("b", "k", b"1")
    with lowwater.open(path) as db:
        assert db.buckets() == []
        db.create_bucket("b")
        assert values_of(db) == {}


def test_a_bucket_that_may_exist_is_made_once(path: str) -> None:
    """A program that makes its buckets when it starts may start again, and nothing is written then."""
    with lowwater.open(path) as db:
        seq = db.create_bucket("b", exist_ok=True)
        db.put("b", "k", b"1")
        applied = db.marks().applied
        assert db.create_bucket("b", exist_ok=True) == seq < applied == db.marks().applied
    with lowwater.open(path) as db:
        assert db.create_bucket("b", exist_ok=True) == seq
        assert db.create_bucket("c", exist_ok=True) > applied
        with pytest.raises(AlreadyExists) as caught:
            db.create_bucket("c")
        assert "exist_ok=True" in caught.value.hint


def test_a_snapshot_keeps_what_could_be_read(path: str) -> None:
    """Through flushes, opening again, and writes to the same keys."""
    with lowwater.open(path) as db:
        db.create_bucket("b")
        db.put("b", "k", b"1")
        seq = db.snapshot("one")
        root = db.root()
        db.put("b", "k", b"2")
        db.flush()
        db.put("b", "k", b"3")
        assert db.get("b", "k", at=seq).value == b"1"
        assert db.root(seq) == root != db.root()
        with pytest.raises(AlreadyExists):
            db.snapshot("one")
    with lowwater.open(path) as db:
        assert db.snapshots() == {"one": (seq, None)}
        db.put("b", "k", b"4")
        db.put("b", "k", b"5")
        db.flush()
        assert db.read("b", "k", seq).value == b"1"
        assert db.root(seq) == root
        db.drop_snapshot("one")
        with pytest.raises(VersionGone):
            db.get("b", "k", at=seq)
        with pytest.raises(NotFound):
            db.drop_snapshot("one")


def test_every_version_above_the_horizon_can_be_read(path: str) -> None:
    """After opening again as well, in memory and in pages."""
    seqs: dict[int, bytes] = {}

    def put(db: Database, number: int) -> None:
        seqs[db.put("b", "k", b"%d" % number)] = b"%d" % number

    def check(db: Database) -> None:
        for seq, value in seqs.items():
            assert db.get("b", "k", at=seq).value == value

    with lowwater.open(path) as db:
        db.create_bucket("b")
        put(db, 0)
        db.move_horizon(db.marks().applied)
        for number in range(1, 4):
            put(db, number)
    for life in range(1, 3):
        with lowwater.open(path) as db:
            check(db)
            for number in range(3):
                put(db, 10 * life + number)
            check(db)
            db.flush()
            check(db)
            put(db, 10 * life + 9)
            check(db)


@pytest.mark.parametrize("point", [BEFORE_COMMIT, AFTER_COMMIT], ids=["before", "after"])
def test_after_an_interrupted_flush_no_more_is_written(path: str, point: Failpoint) -> None:
    """What was under way is in neither place as it should be: a flush, or a close, would wait for it for
    ever, and others would say of it that it is in the pages. No signal comes there."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with lowwater.open(path) as db:
        db._task.stop()  # so that it is the caller who flushes
        db.create_bucket("b")
        db.put_many("b", [(f"{number}", b"v") for number in range(100)])
        with point.armed(interrupt), pytest.raises(KeyboardInterrupt):
            db.flush()
        for write in (db.flush, lambda: db.put("b", "k", b"v")):
            with pytest.raises(LogPoisoned, match="stopped writing: KeyboardInterrupt"):
                write()
        assert db.get("b", "99").value == b"v"
    with lowwater.open(path) as db:
        assert sum(1 for _ in db.scan("b")) == 100
        assert list(db.check()) == []


def test_items_may_write_themselves(db: Database) -> None:
    """They are asked for what they hold, and whoever held a lock then would wait for itself."""

    def pair(number: int) -> Iterator[Any]:
        db.put("b", f"of {number}", b"w")
        yield f"{number}"
        yield b"v"

    writing = threading.Thread(target=db.put_many, args=("b", [pair(1), pair(2)]), daemon=True)
    writing.start()
    writing.join(30)
    assert not writing.is_alive()
    assert values_of(db) == {"1": b"v", "2": b"v", "of 1": b"w", "of 2": b"w"}


def test_puts_end_where_the_seqs_do(db: Database) -> None:
    """Compiled or not, it is said in the same words."""
    chain = db._wal._chain
    for seq_last in (format.SEQ_MAX, format.SEQ_MAX - 1):
        db._wal._chain = chain._replace(seq_last=seq_last)
        with pytest.raises(OutOfOrderSeq, match="the seqs are used up"):
            db.put_many("b", [("j", b"v"), ("k", b"v")])
    db._wal._chain = chain
    db.put_many("b", [("j", b"v"), ("k", b"v")])
    assert values_of(db) == {"j": b"v", "k": b"v"}


class _InterruptedQueue(deque[Piece]):
    """Ctrl-C comes when a call returns."""

    def extend(self, pieces: Iterable[Piece]) -> None:
        super().extend(pieces)
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "write",
    [
        lambda db: db.put("b", "k", b"new"),
        lambda db: db.put_many("b", [("j", b"new"), ("k", b"new")]),
        lambda db: db.write([Put("b", "j", b"new"), Put("b", "k", b"new")]),
    ],
    ids=["put", "put_many", "write"],
)
def test_what_is_ordered_when_an_interrupt_comes_is_not_lost(
    path: str, write: Callable[[Database], int]
) -> None:
    """The log has it, and memory did not: pages that are written then would say that they hold it."""
    with lowwater.open(path) as db:
        db.create_bucket("b")
        db.put("b", "k", b"old")
        db._wal._queue = _InterruptedQueue()
        with pytest.raises(KeyboardInterrupt):
            write(db)
        db._wal._queue = deque(db._wal._queue)
        assert db.get("b", "k").value == b"new"
        db.flush()
        db.put("b", "l", b"v")
    with lowwater.open(path) as db:
        assert db.get("b", "k").value == b"new"
        assert list(db.check()) == []


@pytest.mark.parametrize("point", [BEFORE_COMMIT, AFTER_COMMIT], ids=["before", "after"])
def test_closing_waits_for_a_step_of_a_caller_that_flushes(path: str, point: Failpoint) -> None:
    """Both work on one group: a step in the middle of another one would end both with an error, and leave
    what is flushed where redo has to find it."""
    db = lowwater.open(path)
    db._task.stop()  # so that it is the caller who flushes
    db.create_bucket("b")
    db.put_many("b", [(f"{number}", b"v") for number in range(100)])
    is_there, goes_on = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def guarded(action: Callable[[], Any]) -> None:
        try:
            action()
        except Closed:
            pass  # the flusher's right: it was closed before it could look whether it is done
        except BaseException as error:  # noqa: BLE001 — shown below
            failures.append(error)

    def hold() -> None:
        is_there.set()
        assert goes_on.wait(60)

    with point.armed(hold):
        flushing = threading.Thread(target=guarded, args=(db.flush,))
        flushing.start()
        assert is_there.wait(60)
        closing = threading.Thread(target=guarded, args=(db.close,))
        closing.start()
        closing.join(0.3)
        assert closing.is_alive()
        goes_on.set()
        flushing.join()
        closing.join()
    assert failures == []
    with lowwater.open(path) as db:
        assert db.redone == 0
        assert sum(1 for _ in db.scan("b")) == 100
        assert list(db.check()) == []


@pytest.mark.parametrize("leave", ["close", "forget", "end", "break"])
def test_a_scan_keeps_its_moment_until_it_is_left(db: Database, leave: str) -> None:
    """Nothing that is read there may go before, and everything may afterwards."""
    db.put_many("b", [(f"{number:04}", b"old") for number in range(500)])
    db.flush()
    scan: Any = db.scan("b")
    assert next(scan).key == "0000"
    db.put_many("b", [(f"{number:04}", b"new") for number in range(500)])
    assert [found.value for found, _ in zip(scan, range(200), strict=False)] == [b"old"] * 200
    assert db._state.needed_seqs()
    if leave == "close":
        scan.close()
        assert list(scan) == []
    elif leave == "end":
        assert {found.value for found in scan} == {b"old"}
        assert next(scan, None) is None
    elif leave == "break":
        for _ in scan:
            break
    del scan
    gc.collect()
    assert db._state.needed_seqs() == []


def test_a_scan_keeps_pages_where_there_is_room_and_takes_nobodys(tmp_path: Path) -> None:
    """What is scanned again is there; what is read again and again stays, however much is scanned."""
    path = str(tmp_path / "data")
    with lowwater.open(path) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"{number:05}", b"v" * 200) for number in range(20_000)])
    with lowwater.open(path) as db:
        state = db._state
        assert sum(1 for _ in db.scan("b")) == 20_000
        read = state.pages_read
        assert sum(1 for _ in db.scan("b")) == 20_000
        assert state.pages_read == read
        assert 0 < state.clean.bytes <= state.clean.bytes_max
    with lowwater.open(path) as db:
        state = db._state
        hot = [f"{number:05}" for number in range(0, 20_000, 2000)]
        for key in hot:
            state.newest(state.prefixes["b"] + key.encode(), "b", key, 0)
        # How large ten pages are depends on the salt, which is another one each time.
        bytes_max = state.clean.bytes + 100_000
        state.clean.limit(bytes_max)
        assert sum(1 for _ in db.scan("b")) == 20_000
        assert (state.clean.evictions, state.clean.bytes <= bytes_max) == (0, True)
        read = state.pages_read
        for key in hot:
            state.newest(state.prefixes["b"] + key.encode(), "b", key, 0)
        assert state.pages_read == read


def test_a_scan_that_is_not_begun_keeps_nothing(db: Database) -> None:
    """Versions that nobody can ask for would stay for good."""
    seq = db.put("b", "k", b"1")
    scan = db.scan("b")
    db.put("b", "k", b"2")
    assert db.get("b", "k", at=seq).value == b"1"
    del scan
    with pytest.raises(VersionGone):
        db.get("b", "k", at=seq)


def test_the_root_is_that_of_the_content(tmp_path: Path) -> None:
    """Pages, flushes and opening again change nothing of it, and any write does."""
    path = str(tmp_path / "data")
    roots = set()
    with lowwater.open(path) as db:
        for step in (
            lambda: db.create_bucket("b"),
            lambda: db.put("b", "k", b"1"),
            lambda: db.put("b", "k", b"2"),
            lambda: db.put("b", "k", b"2", {"a": "b"}),
            lambda: db.put("b", "large", bytes(LARGE)),
            lambda: db.create_bucket("c"),
        ):
            step()
            roots.add(db.root())
        assert len(roots) == 6
        root = db.root()
        db.put("b", "other", b"")
        db.delete("b", "other")
        assert db.root() == root
        db.flush()
        assert db.root() == root
    with lowwater.open(path) as db:
        assert db.root() == root
        assert len(root) == 64


def test_marks_stand_in_their_order_and_the_log_holds_what_was_written(db: Database) -> None:
    """Operators compare them."""
    db.put("b", "k", b"1")
    seq = db.put_many("b", [("k", b"2"), ("l", b"3")])
    marks = db.marks()
    assert marks.purged <= marks.hwm <= marks.lwm <= marks.durable <= marks.applied <= marks.committed
    assert marks.durable == seq
    assert [entry.value for entry in db.log() if entry.kind == "put"] == [b"1", b"2", b"3"]


def test_a_database_that_was_closed_has_nothing_to_redo(path: str) -> None:
    """Closing brings everything into pages, so opening is quick."""
    with lowwater.open(path) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"{number}", b"v") for number in range(1000)])
    with lowwater.open(path) as db:
        assert db.redone == 0
        assert len(values_of(db)) == 1000


def test_values_may_be_any_bytes_like(db: Database) -> None:
    """What a program has read into a buffer is not copied by hand first."""
    for key, value in (("a", bytearray(b"xy")), ("b", memoryview(b"xy")), ("c", b"xy")):
        db.put("b", key, value)
        db.put_many("b", [(f"{key}2", value)])
        assert db.get("b", key).value == db.get("b", f"{key}2").value == b"xy"


# ---------------------------------------------------------------------------- bad input

BAD: dict[str, tuple[type[LowwaterError], Callable[[Database], object]]] = {
    "get: missing key": (NotFound, lambda db: db.get("b", "none")),
    "get: missing bucket": (NotFound, lambda db: db.get("none", "k")),
    "get: key of another type": (InputError, lambda db: db.get("b", 5)),
    "get: no key": (InputError, lambda db: db.get("b", "")),
    "get: bucket of another type": (InputError, lambda db: db.get([], "k")),
    "get: lone surrogate": (InputError, lambda db: db.get("b", "\ud800")),
    "get: long key": (InputError, lambda db: db.get("b", "k" * 1025)),
    "get: future": (VersionGone, lambda db: db.get("b", "k", at=10**6)),
    "get: dropped": (VersionGone, lambda db: db.get("b", "k", at=1)),
    "get: below zero": (InputError, lambda db: db.get("b", "k", at=-1)),
    "get: seq of another type": (InputError, lambda db: db.get("b", "k", at="3")),
    "head: missing key": (NotFound, lambda db: db.head("b", "none")),
    "read: future": (VersionGone, lambda db: db.read("b", "k", 10**6)),
    "put: missing bucket": (NotFound, lambda db: db.put("none", "k", b"")),
    "put: text": (InputError, lambda db: db.put("b", "k", "text")),
    "put: no key": (InputError, lambda db: db.put("b", "", b"")),
    "put: key of another type": (InputError, lambda db: db.put("b", 5, b"")),
    "put: bucket of another type": (InputError, lambda db: db.put({}, "k", b"")),
    "put: too large": (InputError, lambda db: db.put("b", "k", bytes(17 * MIB))),
    "put: metadata of another type": (InputError, lambda db: db.put("b", "k", b"", {"a": 5})),
    "put: metadata that is none": (InputError, lambda db: db.put("b", "k", b"", ["a"])),
    "put: if_seq of another type": (InputError, lambda db: db.put("b", "k", b"", if_seq="1")),
    "put: if_seq below zero": (InputError, lambda db: db.put("b", "k", b"", if_seq=-1)),
    "put: two conditions": (InputError, lambda db: db.put("b", "k", b"", if_absent=True, if_seq=3)),
    "put: text with a condition": (InputError, lambda db: db.put("b", "k", "text", if_absent=True)),
    "put: too large with a condition": (InputError, lambda db: db.put("b", "n", bytes(17 * MIB), if_seq=0)),
    "put_many: nothing": (InputError, lambda db: db.put_many("b", [])),
    "put_many: no list": (InputError, lambda db: db.put_many("b", 5)),
    "put_many: no pairs": (InputError, lambda db: db.put_many("b", ["abc"])),
    "put_many: text": (InputError, lambda db: db.put_many("b", [("k", b""), ("l", "text")])),
    "put_many: key of another type": (InputError, lambda db: db.put_many("b", [("k", b""), (5, b"")])),
    "put_many: too large": (InputError, lambda db: db.put_many("b", [("k", b""), ("l", bytes(17 * MIB))])),
    "put_many: missing bucket": (NotFound, lambda db: db.put_many("none", [("k", b"")])),
    "delete: missing key": (NotFound, lambda db: db.delete("b", "none")),
    "delete: missing bucket": (NotFound, lambda db: db.delete("none", "k")),
    "delete: key of another type": (InputError, lambda db: db.delete("b", None)),
    "copy: missing key": (NotFound, lambda db: db.copy("b", "none", "b", "x")),
    "copy: missing bucket": (NotFound, lambda db: db.copy("none", "k", "b", "x")),
    "copy: missing target": (NotFound, lambda db: db.copy("b", "k", "none", "x")),
    "copy: key of another type": (InputError, lambda db: db.copy("b", object(), "b", "x")),
    "copy: target of another type": (InputError, lambda db: db.copy("b", "k", "b", 5)),
    "write: nothing": (InputError, lambda db: db.write([])),
    "write: no list": (InputError, lambda db: db.write(5)),
    "write: no entries": (InputError, lambda db: db.write([Put("b", "x", b""), "x"])),
    "write: missing bucket": (NotFound, lambda db: db.write([Put("b", "x", b""), Put("none", "x", b"")])),
    "write: text": (InputError, lambda db: db.write([Put("b", "x", b""), Put("b", "y", "text")])),
    "write: too large": (InputError, lambda db: db.write([Put("b", "x", bytes(9 * MIB))] * 4)),
    "scan: missing bucket": (NotFound, lambda db: db.scan("none")),
    "scan: bucket of another type": (InputError, lambda db: db.scan(5, at=db.marks().applied)),
    "scan: prefix of another type": (InputError, lambda db: db.scan("b", 5)),
    "scan: start of another type": (InputError, lambda db: db.scan("b", start_after=5)),
    "scan: future": (VersionGone, lambda db: db.scan("b", at=10**6)),
    "list: missing bucket": (NotFound, lambda db: db.list("none")),
    "list: bucket of another type": (InputError, lambda db: db.list(5, at=db.marks().applied)),
    "list: delimiter of another type": (InputError, lambda db: db.list("b", delimiter=5)),
    "list: no limit": (InputError, lambda db: db.list("b", limit=0)),
    "list: limit of another type": (InputError, lambda db: db.list("b", limit="all")),
    "create_bucket: there is one": (AlreadyExists, lambda db: db.create_bucket("b")),
    "create_bucket: no name": (InputError, lambda db: db.create_bucket("")),
    "create_bucket: long name": (InputError, lambda db: db.create_bucket("x" * 256)),
    "create_bucket: name of another type": (InputError, lambda db: db.create_bucket(5)),
    "delete_bucket: missing": (NotFound, lambda db: db.delete_bucket("none")),
    "delete_bucket: not empty": (NotEmpty, lambda db: db.delete_bucket("b")),
    "delete_bucket: name of another type": (InputError, lambda db: db.delete_bucket([])),
    "snapshot: no name": (InputError, lambda db: db.snapshot("")),
    "snapshot: name of another type": (InputError, lambda db: db.snapshot(5)),
    "drop_snapshot: missing": (NotFound, lambda db: db.drop_snapshot("none")),
    "drop_snapshot: name of another type": (InputError, lambda db: db.drop_snapshot([])),
    "move_horizon: future": (VersionGone, lambda db: db.move_horizon(10**6)),
    "move_horizon: dropped": (VersionGone, lambda db: db.move_horizon(1)),
    "move_horizon: seq of another type": (InputError, lambda db: db.move_horizon("3")),
    "root: future": (VersionGone, lambda db: db.root(10**6)),
    "root: seq of another type": (InputError, lambda db: db.root("3")),
    "log: start of another type": (InputError, lambda db: db.log("yesterday")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_changes_nothing(name: str, db: Database) -> None:
    """Each has its type, says what is wrong, and leaves a database that goes on."""
    kind, call = BAD[name]
    seq = db.put("b", "k", b"value")
    root = db.root()
    with pytest.raises(kind) as caught:
        call(db)
    assert str(caught.value)
    assert "Error" not in str(caught.value), "no other library's error shows through"
    assert caught.value.exit_code == 2
    assert db.marks().committed == seq, "nothing was written"
    assert db.root() == root
    assert db.put("b", "k", b"more") == seq + 1
    assert db.get("b", "k").value == b"more"


def test_a_closed_database_says_so(path: str) -> None:
    """Also for a key that was read a moment ago, which is still in memory."""
    db = lowwater.open(path)
    db.create_bucket("b")
    db.put("b", "k", b"1")
    db.get("b", "k")
    db.close()
    db.close()
    for call in (
        lambda: db.get("b", "k"),
        lambda: db.get("none", "k"),
        lambda: db.put("b", "k", b""),
        lambda: db.put("b", "k", b"", if_absent=True),
        lambda: db.put_many("b", [("k", b"")]),
        lambda: db.write([Put("b", "k", b"")]),
        lambda: db.delete("b", "k"),
        lambda: db.copy("b", "k", "b", "l"),
        lambda: db.scan("b"),
        lambda: db.list("b"),
        db.buckets,
        lambda: db.create_bucket("c"),
        lambda: db.delete_bucket("b"),
        lambda: db.snapshot("s"),
        lambda: db.move_horizon(None),
        db.flush,
        db.root,
        db.log,
        lambda: list(db.check()),
    ):
        with pytest.raises(Closed) as caught:
            call()
        assert caught.value.hint


# ---------------------------------------------------------------------------- opening


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    """Before anything is made there."""
    for directory in ("", "a\0b", 5, None, b"bytes"):
        with pytest.raises(InputError):
            lowwater.open(directory)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        lowwater.open(tmp_path / "missing", create=False)
    assert not (tmp_path / "missing").exists()
    (tmp_path / "file").write_text("text")
    with pytest.raises(LowwaterError):
        lowwater.open(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "text"


def test_a_memory_limit_that_is_too_small_is_refused(tmp_path: Path) -> None:
    """Before anything is made, and with what would do."""
    with pytest.raises(InvalidConfig) as caught:
        lowwater.open(tmp_path / "data", config={"engine": {"pool_bytes_max": "1 KiB"}})
    assert "pool_bytes_max" in str(caught.value)
    with pytest.raises(InputError) as other:
        EngineOptions(pool_bytes_max=1000)
    assert other.value.hint
    with pytest.raises(InvalidConfig):
        lowwater.open(tmp_path / "data", config=5)  # type: ignore[arg-type]
    assert not (tmp_path / "data").exists()


def test_a_second_open_is_refused_here_and_in_another_process(path: str) -> None:
    """Two writers on one log would be its end."""
    with lowwater.open(path) as db:
        db.create_bucket("b")
        with pytest.raises(DirectoryLocked) as caught:
            lowwater.open(path)
        assert caught.value.hint
        script = (
            "import sys, lowwater\n"
            "try: lowwater.open(sys.argv[1])\n"
            "except lowwater.errors.DirectoryLocked as error: print('locked', error.hint)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, path],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith("locked stop the process")
        db.put("b", "k", b"still works")
    lowwater.open(path).close()


def make(path: str, *, puts: int = 50, log_options: LogOptions = SMALL_SEGMENTS) -> str:
    """A closed database with several segments; its root."""
    with open_with(path, log_options=log_options) as db:
        db.create_bucket("b")
        for number in range(puts):
            db.put("b", f"{number:04}", b"%d" % number * 1000)
        return db.root()


def test_pages_that_were_removed_are_built_from_the_log(path: str) -> None:
    """They are a cache of it."""
    root = make(path)
    os.rename(f"{path}/pages", f"{path}/pages-away")
    with lowwater.open(path) as db:
        assert db.redone > 50
        assert db.root() == root


def test_pages_of_another_cluster_are_refused(tmp_path: Path) -> None:
    """Two directories were mixed: neither may be believed."""
    for name in "ab":
        make(str(tmp_path / name))
    os.rename(tmp_path / "a" / "pages", tmp_path / "a" / "away")
    os.rename(tmp_path / "b" / "pages", tmp_path / "a" / "pages")
    with pytest.raises(Corrupt, match="another cluster") as caught:
        lowwater.open(tmp_path / "a")
    assert caught.value.hint
    with pytest.raises(Corrupt, match="another cluster"):
        lowwater.open(tmp_path / "a")  # the first attempt let go of everything


def segments_of(path: str) -> list[str]:
    return sorted(name for name in os.listdir(f"{path}/wal") if name.startswith("segment-"))


def test_a_log_that_lost_its_end_is_refused(path: str) -> None:
    """The pages know what was durable, whatever the log's own files say."""
    make(path, puts=150)
    assert len(segments_of(path)) >= 2
    for name in ("current.log", "hint", segments_of(path)[-1]):
        if os.path.exists(f"{path}/wal/{name}"):
            os.rename(f"{path}/wal/{name}", f"{path}/{name}")
    with pytest.raises(Corrupt, match="the log ends at") as caught:
        lowwater.open(path)
    assert caught.value.hint
    with pytest.raises(LowwaterError):
        lowwater.open(path)


def test_a_log_whose_beginning_is_gone_is_enough_for_pages_and_too_little_without(path: str) -> None:
    """Pages need the log from where they end on; without pages all of it is needed."""
    root = make(path, puts=150)
    os.rename(f"{path}/wal/{segments_of(path)[0]}", f"{path}/away")
    with lowwater.open(path) as db:
        assert db.buckets() == ["b"]
        with pytest.raises(LowwaterError):
            db.get("b", "0000")  # a large value was there
        assert db.root() == root  # which counts by its hash
        assert db.get("b", "0149").value == b"149" * 1000
    os.rename(f"{path}/pages", f"{path}/pages-away")
    with pytest.raises(Corrupt, match="beginning is not here") as caught:
        lowwater.open(path)
    assert "name the archive: --tier URI" in caught.value.hint
    os.rename(f"{path}/away", f"{path}/wal/segment-{1:020}-{seq_last_of(path):020}.log")
    with lowwater.open(path) as db:
        assert db.root() == root


def seq_last_of(path: str) -> int:
    """The last seq of the first segment that was taken away: the one before those that are left."""
    return int(segments_of(path)[0].split("-")[1]) - 1


def test_a_log_that_begins_above_what_pages_need_is_refused(path: str) -> None:
    """A crash before a flush, and then somebody removed segments."""
    with open_with(path, log_options=SMALL_SEGMENTS) as db:
        db.create_bucket("b")
        db.flush()
        away = f"{path}/../pages-early"
        copy_pages(path, away)
        for number in range(150):
            db.put("b", f"{number}", b"v" * 1000)
    os.rename(f"{path}/pages", f"{path}/pages-late")
    os.rename(away, f"{path}/pages")
    os.rename(f"{path}/wal/{segments_of(path)[0]}", f"{path}/away")
    with pytest.raises(Corrupt, match="the pages need it from") as caught:
        lowwater.open(path)
    assert caught.value.hint


def copy_pages(path: str, target: str) -> None:
    """The pages as they are durable now, which is what a crash would leave."""
    os.mkdir(target)
    data = Path(path, "pages", "data.mdb").read_bytes()
    Path(target, "data.mdb").write_bytes(data)


def change_store(path: str, table: bytes, change: Callable[[bytes, bytes], bytes | None]) -> int:
    """Pass each key and value of a table of the closed page store through `change`; how many changed."""
    pages = LmdbPages.open(f"{path}/pages")
    found = {
        each: new
        for name, each, value in list(pages.rows())
        if name == table and (new := change(each, value)) is not None and new != value
    }
    if table == b"meta":
        pages.write([], [], found)
    else:
        pages.write(sorted(found.items()), [], {})
    pages.close()
    return len(found)


def test_a_page_with_a_flipped_byte_is_an_error_and_never_an_answer(path: str) -> None:
    """Other pages go on being read; the log can build this one again."""
    root = make(path, puts=1000)
    pages = 0

    def flip(key: bytes, value: bytes) -> bytes | None:
        nonlocal pages
        pages += 1
        if pages != 2:
            return None
        place = len(value) // 2
        return value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]

    assert change_store(path, b"pages", flip) == 1
    assert pages > 3
    with lowwater.open(path) as db:
        good: list[int] = []
        for number in range(1000):
            try:
                assert db.get("b", f"{number:04}").value == b"%d" % number * 1000
                good.append(number)
            except Corrupt:
                pass
        assert 100 < len(good) < 1000
        with pytest.raises(Corrupt):
            db.root()
        assert any(finding.severity == "error" for finding in db.check())
        db.put("b", f"{good[0]:04}", b"new")
        assert db.get("b", f"{good[0]:04}").value == b"new"
    os.rename(f"{path}/pages", f"{path}/pages-away")
    with lowwater.open(path) as db:
        db.put("b", f"{good[0]:04}", b"%d" % good[0] * 1000)
        assert [found.value for found in db.scan("b")] == [b"%d" % n * 1000 for n in range(1000)]
        assert list(db.check()) == []
        assert db.root() != root, "versions have their seqs"


def test_a_newer_state_is_not_called_damage(path: str) -> None:
    """An old program must not touch what a newer one wrote."""
    make(path)

    def newer(key: bytes, value: bytes) -> bytes | None:
        return cbor2.dumps({**cbor2.loads(value), "version": 99}) if key == META_KEY else None

    assert change_store(path, b"meta", newer) == 1
    with pytest.raises(NewerVersion) as caught:
        lowwater.open(path)
    assert "upgrade" in caught.value.hint


def test_an_older_state_is_made_again_from_the_log(path: str) -> None:
    """Its fields are others. It is no damage, and the hint is all that has to be done."""
    root = make(path)

    def older(key: bytes, value: bytes) -> bytes | None:
        if key != META_KEY:
            return None
        fields = {name: each for name, each in cbor2.loads(value).items() if name != "checkpoints_due"}
        return cbor2.dumps({**fields, "version": META_VERSION - 1})

    assert change_store(path, b"meta", older) == 1
    with pytest.raises(OlderVersion, match="older") as caught:
        lowwater.open(path)
    assert caught.value.path == f"{path}/pages"
    assert "move the pages aside" in caught.value.hint
    os.rename(f"{path}/pages", f"{path}/pages-away")
    with lowwater.open(path) as db:
        assert db.root() == root


@pytest.mark.parametrize(
    "data", [b"", b"\xff", cbor2.dumps([]), cbor2.dumps({"version": META_VERSION}), b"\x9b" + b"\xff" * 8]
)
def test_a_state_that_cannot_be_read_is_damage(path: str, data: bytes) -> None:
    """Whatever the decoder runs into."""
    make(path)
    assert change_store(path, b"meta", lambda key, value: data if key == META_KEY else None) == 1
    with pytest.raises(Corrupt, match="cannot be read"):
        lowwater.open(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_told(path: str) -> None:
    """With what to do about it."""
    make(path)
    os.chmod(f"{path}/wal", 0o500)
    try:
        with pytest.raises(DirectoryNotWritable) as caught:
            lowwater.open(path)
        assert caught.value.hint
    finally:
        os.chmod(f"{path}/wal", 0o700)


@pytest.mark.root
def test_a_read_only_file_system_is_told(tmp_path: Path) -> None:
    """The same for root, whom no permission holds back."""
    place = tmp_path / "mount"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        make(str(place / "data"))
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        with pytest.raises(DirectoryNotWritable) as caught:
            lowwater.open(place / "data")
        assert caught.value.hint
    finally:
        subprocess.run(["umount", place], check=True)


# ---------------------------------------------------------------------------- disks that fail


class Disk:
    """A database on files and pages that fail on demand."""

    def __init__(self, *, free_bytes: int | None = None) -> None:
        self.files = FaultyFiles(free_bytes=free_bytes)
        self.pages = MemoryPages(self.files)

    def open(self, **options: Any) -> Database:
        return open_with(
            "data",
            log_options=SMALL_SEGMENTS,
            options=EngineOptions(pool_bytes_max=MIB, disk_reserve_bytes=0, **options),
            seams=Seams(files=self.files),
            store=self.pages,
        )

    def reopen(self) -> Database:
        self.files.fault = None
        self.pages.reopen()
        return self.open()


def test_a_full_disk_stops_writes_and_not_reads() -> None:
    """What was acknowledged stays, and opening again once there is room goes on."""
    disk = Disk(free_bytes=MIB)
    db = disk.open()
    db.create_bucket("b")
    written: dict[str, bytes] = {}

    def fill() -> None:
        for number in range(10**6):
            value = b"%d" % number * 1000
            db.put("b", f"{number}", value)
            written[f"{number}"] = value

    with pytest.raises(OutOfSpace) as caught:
        fill()
    assert "free some space" in caught.value.hint
    assert written
    for _ in range(2):
        with pytest.raises(LogPoisoned):
            db.put("b", "more", b"")
        with pytest.raises(LogPoisoned):
            db.put_many("b", [("more", b"")])
        with pytest.raises(LogPoisoned):
            db.flush()
        for key, value in written.items():
            assert db.get("b", key).value == value
        with pytest.raises(NotFound):
            db.get("b", "nothing")
    db.close()
    with disk.reopen() as db:
        held = values_of(db)
        assert all(held[key] == value for key, value in written.items())
        assert len(held) <= len(written) + 1, "of what was not acknowledged, at most the last put"


def test_a_page_store_that_fails_stops_writes_and_not_reads() -> None:
    """The log has everything that was acknowledged, and reads find it in memory."""
    disk = Disk()
    db = disk.open()
    db.create_bucket("b")
    db.put("b", "k", b"1")
    db.put("b", "large", bytes(LARGE))

    def fault(operation: Operation) -> Fault | None:
        return Fault(error=errno.ENOSPC) if operation.path == disk.pages.path else None

    disk.files.fault = fault
    with pytest.raises(OutOfSpace) as caught:
        db.flush()
    assert caught.value.hint
    with pytest.raises(OutOfSpace):
        db.put("b", "k", b"2")
    assert db.get("b", "k").value == b"1"
    assert db.get("b", "large").value == bytes(LARGE)
    assert list(values_of(db)) == ["k", "large"]
    assert len(db.root()) == 64
    db.close()
    with disk.reopen() as db:
        assert values_of(db) == {"k": b"1", "large": bytes(LARGE)}
        db.put("b", "k", b"2")


def test_a_sync_that_fails_stops_writes_and_not_reads() -> None:
    """Durability can no longer be promised, so nothing more is."""
    disk = Disk()
    db = disk.open()
    db.create_bucket("b")
    db.put("b", "k", b"1")

    def fault(operation: Operation) -> Fault | None:
        return Fault(error=errno.EIO) if "wal" in operation.path and operation.kind != "read" else None

    disk.files.fault = fault
    with pytest.raises(LogPoisoned):
        db.put("b", "l", b"2")
    disk.files.fault = None
    with pytest.raises(LogPoisoned) as caught:
        db.put("b", "l", b"2")
    assert caught.value.hint
    assert db.get("b", "k").value == b"1"
    db.close()
    with disk.reopen() as db:
        assert db.get("b", "k").value == b"1"
        db.put("b", "l", b"3")


@pytest.mark.root
def test_a_real_full_disk_stops_writes_and_not_reads(tmp_path: Path) -> None:
    """LMDB and the kernel have ways of their own to run out of room."""
    place = tmp_path / "mount"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        db = open_with(
            str(place / "data"),
            log_options=SMALL_SEGMENTS,
            options=EngineOptions(pool_bytes_max=MIB, disk_reserve_bytes=0),
        )
        db.create_bucket("b")
        written = {}

        def fill() -> None:
            for number in range(10**6):
                db.put("b", f"{number}", b"%d" % number * 40)
                written[f"{number}"] = b"%d" % number * 40

        with pytest.raises(LogPoisoned) as caught:
            fill()
        assert caught.value.hint
        for key, value in written.items():
            assert db.get("b", key).value == value
        db.close()
        subprocess.run(["mount", "-o", "remount,size=64m", place], check=True)
        with lowwater.open(place / "data") as db:
            held = values_of(db)
            assert all(held[key] == value for key, value in written.items())
            assert list(db.check()) == []
    finally:
        subprocess.run(["umount", place], check=True)


# ---------------------------------------------------------------------------- threads


def test_threads_find_every_acknowledged_put_and_nothing_older(path: str) -> None:
    """Eight writers, four readers, a pool so small that pages and ready objects come and go all the time."""
    seconds = 2.0  # and until each has done something, however slow the machine
    keys = [f"{number}" for number in range(24)]
    acknowledged = dict.fromkeys(keys, 0)  # by key: what a get that begins now must not fall below
    failures: list[BaseException] = []
    stop = threading.Event()
    reads = [0] * 4

    def value_of(number: int) -> bytes:
        return b"%d" % number + b"." * (LARGE if number % 50 == 0 else 40)

    def number_of(value: bytes) -> int:
        return int(value.partition(b".")[0])

    with open_with(path, options=EngineOptions(pool_bytes_max=MIB, checkpoint_interval_s=0.05)) as db:
        db.create_bucket("b")
        db.put_many("b", [(key, value_of(0)) for key in keys])

        def write(thread: int) -> None:
            mine = keys[thread::8]
            number = 0
            while not stop.is_set():
                number += 1
                way = number % 4
                if way == 0:
                    db.write([Put("b", key, value_of(number)) for key in mine])
                elif way == 1:
                    db.put_many("b", [(key, value_of(number)) for key in mine])
                else:
                    for key in mine:
                        db.put("b", key, value_of(number))
                for key in mine:
                    acknowledged[key] = number
                    assert number_of(db.get("b", key).value) == number, "a writer reads its own put"
                db.put("b", f"filler {thread} {number}", b"f" * 200)

        def read(thread: int) -> None:
            rng = random.Random(thread)
            while not stop.is_set():
                if rng.random() < 0.01:
                    floor = dict(acknowledged)
                    found = {each.key: number_of(each.value) for each in db.scan("b") if each.key in floor}
                    assert all(found[key] >= floor[key] for key in keys), "a scan fell behind"
                    continue
                key = rng.choice(keys)
                least = acknowledged[key]
                assert number_of(db.get("b", key).value) >= least, "a get fell behind an acknowledged put"
                reads[thread] += 1

        def guarded(action: Callable[[int], None], thread: int) -> None:
            try:
                action(thread)
            except BaseException as error:  # noqa: BLE001 — told by the test
                failures.append(error)
                stop.set()

        threads = [threading.Thread(target=guarded, args=(write, number)) for number in range(8)]
        threads += [threading.Thread(target=guarded, args=(read, number)) for number in range(4)]
        former = sys.getswitchinterval()
        sys.setswitchinterval(0.0002)
        try:
            for thread in threads:
                thread.start()
            stop.wait(seconds)
            while not stop.is_set() and (min(acknowledged.values()) <= 3 or min(reads) <= 50):
                stop.wait(0.1)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            sys.setswitchinterval(former)
        assert not failures, failures
        assert min(acknowledged.values()) > 3
        assert min(reads) > 50
        held = {key: number_of(value) for key, value in values_of(db).items() if key in acknowledged}
        assert held == acknowledged
        assert list(db.check()) == []
        root = db.root()
    with lowwater.open(path) as db:
        assert db.root() == root


def test_a_ready_object_never_outlives_a_put(path: str) -> None:
    """One key, read all the time by some and written by others, with the cache of ready objects between."""
    with open_with(path, log_options=LogOptions(sync_mode="none")) as db:
        db.create_bucket("b")
        db.put("b", "k", b"0")
        acknowledged = 0
        failures: list[str] = []
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                least = acknowledged
                found = int(db.get("b", "k").value)
                if found < least:
                    failures.append(f"{found} after {least}")
                    stop.set()

        threads = [threading.Thread(target=read) for _ in range(4)]
        former = sys.getswitchinterval()
        sys.setswitchinterval(0.00001)
        try:
            for thread in threads:
                thread.start()
            end = time.monotonic() + 1
            while (time.monotonic() < end or acknowledged <= 50) and not stop.is_set():
                number = acknowledged + 1
                if number % 3 == 0:
                    db.write([Put("b", "k", b"%d" % (number - 1)), Put("b", "k", b"%d" % number)])
                else:
                    db.put("b", "k", b"%d" % number)
                acknowledged = number
                found = int(db.get("b", "k").value)
                assert found == number, f"{found} after {number}"
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            sys.setswitchinterval(former)
        assert not failures
        assert acknowledged > 50


def test_a_ready_object_that_was_replaced_while_it_was_looked_up_does_not_come_back(db: Database) -> None:
    """The one moment that threads hit once in a million: between finding an old object and keeping it."""
    db.put("b", "k", b"old")
    for _ in range(3):
        db.get("b", "k")
    state = db._state
    assert state._ready_new, "there is no such object, and nothing is tested"

    class Meanwhile(dict[bytes, Any]):
        """Has somebody else write once the object was found."""

        def get(self, key: bytes, default: Any = None) -> Any:
            found = super().get(key, default)
            if found is not None and found.value == b"old":
                db.put("b", "k", b"new")
            return found

    state._ready_old, state._ready_new = Meanwhile(state._ready_new), {}
    db.get("b", "k")
    assert db.get("b", "k").value == b"new"


def test_who_has_seen_one_change_of_a_group_sees_all_of_it(path: str) -> None:
    """Gets take no lock, and a group of hundreds is not applied in one moment."""
    keys = [f"{number:03}" for number in range(300)]
    wrong: list[str] = []
    reads = 0
    stop = threading.Event()
    with open_with(path, log_options=LogOptions(sync_mode="none")) as db:
        db.create_bucket("b")
        db.write([Put("b", key, b"0") for key in keys])

        def read() -> None:
            nonlocal reads
            while not stop.is_set():
                first = int(db.get("b", keys[0]).value)
                last = int(db.get("b", keys[-1]).value)
                if last < first:
                    wrong.append(f"{last} after {first}")
                reads += 1

        def write_others() -> None:
            while not stop.is_set():
                db.put("b", "other", b"")

        threads = [threading.Thread(target=action) for action in (read, read, write_others)]
        former = sys.getswitchinterval()
        sys.setswitchinterval(0.00001)
        try:
            for thread in threads:
                thread.start()
            end = time.monotonic() + 1
            number = 0
            while (time.monotonic() < end or number <= 5 or reads <= 100) and not wrong:
                number += 1
                db.write([Put("b", key, b"%d" % number) for key in keys])
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            sys.setswitchinterval(former)
    assert number > 5
    assert reads > 100
    assert not wrong


@pytest.mark.parametrize(
    "call",
    [
        lowwater.open,
        lowwater.Engine,
        lambda path: lowwater.restore("memory://", path),
        lowwater.Log.open,
    ],
)
def test_a_uri_in_the_place_of_the_directory_is_refused_without_its_secrets(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments are easily confused, and a directory of that name would be made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="URI of a store") as caught:
        call("s3://me:hunter2@bucket/x?secret_access_key=hunter2")
    assert "hunter2" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800", b"bytes", None, 5])
@pytest.mark.parametrize("call", [lowwater.open, lowwater.Engine, lambda path: list(lowwater.check(path))])
def test_what_is_no_path_is_a_typed_error(call: Any, path: Any) -> None:
    """Python's own errors for these are three others."""
    with pytest.raises(InputError, match="is no directory"):
        call(path)


def test_a_forked_child_is_refused_and_closes_whatever_its_parent_did_meanwhile(tmp_path: Path) -> None:
    """A thread that read a page, or had a lock, is not in the child: it would be waited for without end."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        db.put("b", "k", b"1")
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with db._state.lock:
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            try:
                for use in (lambda: db.put_many("b", [("k", b"2")]), db.flush, db.checkpoint):
                    with pytest.raises(LogPoisoned, match="was forked"):
                        use()
                db.close()
                db.close()
                os._exit(7)
            finally:
                os._exit(1)
        done.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        db.put("b", "k", b"3")
        assert list(db.check()) == []
    with lowwater.open(tmp_path / "data") as db:
        assert db.get("b", "k").value == b"3"
