"""The process that merges: what it makes is what the flusher would have made, and nothing depends on it."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psutil
import pytest

from lowwater.engine import core, flush, merge_aside, merge_process
from lowwater.engine.core import EngineOptions
from lowwater.engine.database import Database
from lowwater.engine.failpoints import Failpoint
from lowwater.engine.merge_messages import ANSWER, NoAnswer
from lowwater.engine.merge_process import MergeProcess
from lowwater.engine.opening import open_with
from lowwater.engine.testing.merger import LocalMerger
from lowwater.errors import LogPoisoned

if not merge_process.can_begin():
    pytest.skip("there can be no worker here", allow_module_level=True)

MIB = 2**20
SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def _for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flush goes to the worker, each of its own database, and none to compiled code."""
    monkeypatch.setattr(flush, "IS_COMPILED", False)
    monkeypatch.setattr(merge_aside, "CHANGES_MIN", 1)
    monkeypatch.setattr(merge_aside, "CHANGES_A_PAGE_MIN", 0)
    monkeypatch.setattr(
        core, "new_merger", lambda options, _: MergeProcess() if options.merge_worker else None
    )


def open_one(path: Path, *, pool_bytes_max: int = MIB, merge_worker: bool = True) -> Database:
    options = EngineOptions(
        pool_bytes_max=pool_bytes_max, checkpoint_interval_s=None, merge_worker=merge_worker
    )
    return open_with(str(path), options=options)


def merger_of(db: Database) -> MergeProcess:
    assert isinstance(db._merger, MergeProcess)
    return db._merger


def below() -> set[psutil.Process]:
    """The processes that this one has begun, and theirs: other tests may have left some, such as Spark's."""
    return set(psutil.Process().children(recursive=True))


def made_aside(db: Database) -> int:
    aside = db._flusher.aside
    assert aside is not None
    return aside.pages


def failures_of(db: Database) -> int:
    aside = db._flusher.aside
    assert aside is not None
    return aside.failures


class Load:
    """Random changes of all kinds, and what they come to."""

    def __init__(self, db: Database, seed: int) -> None:
        self.db = db
        self.rng = random.Random(seed)
        self.model: dict[str, tuple[bytes, dict[str, str] | None]] = {}
        db.create_bucket("b")

    def go_on(self, batches: int) -> None:
        rng = self.rng
        for _ in range(batches):
            turn = rng.random()
            if turn < 0.85:
                size = rng.choice((0, 10, 100, 300, 2000))
                items = [(f"{rng.randrange(5000):05}", rng.randbytes(size)) for _ in range(50)]
                self.db.put_many("b", items)
                self.model |= {key: (value, None) for key, value in items}
            elif turn < 0.95 and self.model:
                for key in rng.sample(sorted(self.model), min(20, len(self.model))):
                    self.db.delete("b", key)
                    del self.model[key]
            else:
                key = f"{rng.randrange(5000):05}"
                self.db.put("b", key, b"with", {"a": "b"})
                self.model[key] = (b"with", {"a": "b"})

    def check(self, db: Database) -> None:
        found = {each.key: (each.value, each.metadata) for each in db.scan("b")}
        assert found == self.model
        assert list(db.check()) == []


def pages_of(path: Path) -> list[tuple[bytes, bytes, bytes]]:
    from lowwater.engine.lmdb_store import LmdbPages

    store = LmdbPages.open(str(path / "pages"), read_only=True)
    try:
        return [row for row in store.rows() if row[0] == b"pages"]
    finally:
        store.close()


@pytest.mark.long
def test_a_load_of_all_kinds_comes_out_as_the_model_with_pages_of_the_worker(tmp_path: Path) -> None:
    """Puts, large values, metadata, deletions, and pages that become empty."""
    with open_one(tmp_path) as db:
        load = Load(db, 1)
        for _ in range(6):
            load.go_on(40)
            db.flush()
            load.check(db)
        for key in sorted(load.model):
            db.delete("b", key)
        load.model.clear()
        db.flush()
        load.check(db)
        assert made_aside(db) > 100
        assert failures_of(db) == 0
    with open_one(tmp_path) as db:
        load.check(db)


def test_pages_are_the_same_whoever_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte: the same frames, flushed at the same moments, in a process and without one."""
    clock = count(1_700_000_000_000_000)
    monkeypatch.setattr("lowwater.engine.real.RealClock.now_us", lambda _: next(clock))
    monkeypatch.setattr("lowwater.engine.real.RealRandomness.token", lambda _, size: b"t" * size)
    found = []
    for name, merge_worker in (("aside", True), ("here", False)):
        clock = count(1_700_000_000_000_000)
        with open_one(tmp_path / name, pool_bytes_max=64 * MIB, merge_worker=merge_worker) as db:
            load = Load(db, 2)
            for _ in range(4):
                load.go_on(30)
                db.flush()
            load.check(db)
        found.append(pages_of(tmp_path / name))
    assert found[0] == found[1]
    assert len(found[0]) > 20


@pytest.fixture
def _in_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there is always another one to be asked for before this one is written."""
    monkeypatch.setattr(flush, "FLUSH_ABOVE", 0.2)
    monkeypatch.setattr(flush, "GROUP_SHARE", 1000)
    monkeypatch.setattr(flush, "GROUP_BYTES_MIN", 16 * 1024)


@pytest.mark.usefixtures("_in_small_groups")
@pytest.mark.parametrize("point", [flush.BEFORE_COMMIT, flush.AFTER_COMMIT], ids=["before", "after"])
def test_a_group_that_was_asked_for_is_nowhere_when_the_one_before_it_fails(
    tmp_path: Path, point: Failpoint
) -> None:
    """It is not written without that, what it has is read from memory, and comes again from the log."""
    rng = random.Random(10)
    model: dict[str, bytes] = {}
    with open_one(tmp_path) as db:
        db.create_bucket("b")
        followed = 0

        def fail() -> None:
            nonlocal followed
            followed += db._flusher._following is not None
            if followed == 10:
                raise OSError("this one fails")

        items: dict[str, bytes] = {}

        def put_much() -> None:
            for _ in range(2000):
                model.update(items)
                items.clear()
                items.update((f"{rng.randrange(50_000):05}", rng.randbytes(50)) for _ in range(200))
                db.put_many("b", items.items())

        with point.armed(fail), pytest.raises(LogPoisoned, match="this one fails"):
            put_much()
        assert db._flusher._following is not None
        assert made_aside(db) > 0
        assert {each.key: each.value for each in db.scan("b")} == model
    with open_one(tmp_path) as db:
        found = {each.key: each.value for each in db.scan("b")}
        assert found in (model, model | items)  # the batch that met the failure is there, or is not
        assert list(db.check()) == []


def test_a_worker_that_is_killed_at_random_moments_changes_nothing(tmp_path: Path) -> None:
    """The next one is asked, or nobody: what was acknowledged is there, and all pages are sound."""
    ended = threading.Event()
    killed = 0

    def kill(db: Database) -> None:
        nonlocal killed
        rng = random.Random(3)
        while not ended.wait(rng.random() * 0.05):
            pid = merger_of(db).pid
            if pid is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                except ProcessLookupError:
                    pass

    with open_one(tmp_path) as db:
        load = Load(db, 3)
        killer = threading.Thread(target=kill, args=(db,))
        killer.start()
        try:
            for _ in range(20):
                load.go_on(20)
                db.flush()
                # It may have given up: here it is to be killed again and again.
                merger_of(db)._failures = 0
        finally:
            ended.set()
            killer.join()
        load.check(db)
    assert killed > 3
    with open_one(tmp_path) as db:
        load.check(db)


ANSWERS = {
    "noise": "reply = os.urandom(size)",
    "too short": "reply = bytes(3); stop = True",
    "a size beyond all": "reply = answer.pack(b'LWM!', 2, 3, 1 << 40, 0)",
    "another version": "reply = answer.pack(b'LWM!', 1, 0, 0, 0)",
    "no pages": "reply = answer.pack(b'LWM!', 2, 1, 12, 0)",
    "nothing, and it ends": "stop = True; reply = b''",
    "an error": "raise ValueError",
}


@pytest.mark.parametrize("reply", ANSWERS.values(), ids=ANSWERS.keys())
def test_what_is_no_answer_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reply: str
) -> None:
    """Garbage of every kind: the flusher does it by itself, and asks no more after some times."""
    script = f"""
import os, socket, struct, sys
answer = struct.Struct({ANSWER.format!r})
size = answer.size
_, connection, memory, parent = sys.argv[:4]
connection = socket.socket(fileno=int(sys.argv[2]))
stop = False
while not stop and connection.recv(65536):
    {reply}
    connection.sendall(reply)
"""
    monkeypatch.setattr(merge_process, "_BEGIN", script)
    with open_one(tmp_path) as db:
        load = Load(db, 4)
        for _ in range(5):
            load.go_on(10)
            db.flush()
        load.check(db)
        assert made_aside(db) == 0
        assert failures_of(db) == merge_process.FAILURES_MAX
        assert merger_of(db).pid is None
        assert not merger_of(db).is_usable


def test_a_page_of_another_place_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and well formed, but not what was asked for: pages of the wrong keys, order or bytes."""

    class Liar(LocalMerger):
        lies = answered = 0

        def answer(self) -> tuple[bytes, bytes]:
            header, body = super().answer()
            self.answered += 1
            magic, version, number, size, checksum = ANSWER.unpack(header)
            broken = bytearray(body)
            turn = self.answered % 4
            if turn == 0:
                broken[-1] ^= 1  # a value
            elif turn == 1:
                broken[12 * number] ^= 1  # a page key
            elif turn == 2:
                struct.pack_into("<i", broken, 0, 7_000)  # an index
            else:
                del broken[-1:]
            return ANSWER.pack(magic, version, number, size, checksum), bytes(broken)

        def failed(self, error: Exception) -> NoAnswer:
            self.lies += 1
            return NoAnswer(str(error))

    liar = Liar()
    monkeypatch.setattr(core, "new_merger", lambda *_: liar)
    with open_one(tmp_path) as db:
        load = Load(db, 5)
        for _ in range(6):
            load.go_on(20)
            db.flush()
        load.check(db)
        assert liar.lies == liar.asked > 4
        assert made_aside(db) == 0


def test_a_worker_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while it is ended, and the flush goes on."""
    monkeypatch.setattr(merge_process, "ANSWER_WITHIN_S", 0.05)
    monkeypatch.setattr(merge_process, "_BEGIN", "import time\ntime.sleep(10_000)")
    before = below()
    with open_one(tmp_path) as db:
        load = Load(db, 6)
        for _ in range(4):
            load.go_on(10)
            db.flush()
        load.check(db)
        assert failures_of(db) == merge_process.FAILURES_MAX
        assert below() <= before


@pytest.mark.parametrize("executable", [None, "", "/usr/sbin/uwsgi", "/nowhere/python3"])
def test_where_it_cannot_begin_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    """A program that has Python in it is not begun a second time by its name."""
    monkeypatch.setattr(sys, "executable", executable)
    with open_one(tmp_path) as db:
        load = Load(db, 7)
        load.go_on(20)
        db.flush()
        load.check(db)
        assert made_aside(db) == 0
        assert merger_of(db).pid is None


def test_it_begins_only_when_there_is_much_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small program never has a second process."""
    monkeypatch.setattr(merge_aside, "CHANGES_MIN", 512)
    monkeypatch.setattr(merge_aside, "CHANGES_A_PAGE_MIN", 2)
    with open_one(tmp_path, pool_bytes_max=16 * MIB) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"{number}", b"v") for number in range(300)])
        db.flush()
        assert merger_of(db).pid is None
        db.put_many("b", [(f"{number}", b"v") for number in range(1000)])
        db.flush()
        assert merger_of(db).pid is not None


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    """By `engine.merge_worker`."""
    before = below()
    with open_one(tmp_path, merge_worker=False) as db:
        Load(db, 8).go_on(20)
        db.flush()
        assert db._merger is None
        assert below() <= before


@pytest.mark.long
def test_opening_and_closing_leaves_no_process_and_no_descriptor(tmp_path: Path) -> None:
    """Two hundred times; each of the lives has had a worker."""
    me, before = psutil.Process(), below()
    for number in range(203):
        with open_one(tmp_path) as db:
            if not number:
                db.create_bucket("b")
            db.put("b", f"{number}", b"v")
            db.flush()
            assert merger_of(db).pid is not None
        if number == 2:  # whatever the first ones have imported, and opened for good
            descriptors = me.num_fds()
    assert me.num_fds() == descriptors
    assert below() <= before


LIVE = """
import sys, threading
from lowwater.engine import merge_aside
from lowwater.engine.core import EngineOptions
from lowwater.engine.opening import open_with

merge_aside.CHANGES_MIN = 1
merge_aside.CHANGES_A_PAGE_MIN = 0
db = open_with(sys.argv[1], options=EngineOptions(pool_bytes_max=2**20, checkpoint_interval_s=None))
db.create_bucket("b")
number = 0
while True:
    db.put_many("b", [(f"{number + each:012}", b"v" * 100) for each in range(100)])
    number += 100
    if number == 5000:
        db.flush()
        print(db._merger.pid, flush=True)
    if number >= 5000 and sys.argv[2] == "fork":
        import os
        child = os.fork()
        if not child:
            # It keeps what it has inherited, for as long as the test lasts.
            assert not db._merger.is_usable
            assert db._merger.pid is None
            print("forked", os.getpid(), flush=True)
            threading.Event().wait()
        threading.Event().wait()
"""


@pytest.fixture
def living(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with a database, and its worker's pid."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PURE_PYTHON": "1"}
    command = [sys.executable, "-c", LIVE, str(tmp_path / "data"), getattr(request, "param", "")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def wait_until_gone(pid: int) -> None:
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def test_it_ends_with_a_parent_that_is_killed(
    living: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    """`kill -9` of the parent, in the middle of writing: no process stays, and the data is sound."""
    process, worker = living
    assert psutil.pid_exists(worker)
    process.kill()
    process.wait()
    wait_until_gone(worker)
    with open_one(tmp_path / "data") as db:
        assert list(db.check()) == []
        assert sum(1 for _ in db.scan("b")) >= 5000


@pytest.mark.parametrize("living", ["fork"], indirect=True)
def test_a_forked_child_does_not_keep_it_alive(living: tuple[subprocess.Popen[str], int]) -> None:
    """Nor does it use it: what is the worker's is closed there."""
    process, worker = living
    assert process.stdout is not None
    word, child = process.stdout.readline().split()
    assert word == "forked"
    try:
        process.kill()
        process.wait()
        wait_until_gone(worker)
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_the_terminals_interrupt_does_not_reach_it(living: tuple[subprocess.Popen[str], int]) -> None:
    """It is in no group of the terminal's, and would not hear it either."""
    process, worker = living
    assert os.getpgid(worker) != os.getpgid(process.pid)
    os.kill(worker, signal.SIGINT)
    os.kill(worker, 0)
    ignored = next(
        line for line in Path(f"/proc/{worker}/status").read_text().splitlines() if line.startswith("SigIgn")
    )
    assert int(ignored.split()[1], 16) & (1 << (signal.SIGINT - 1))


def test_it_has_nothing_open_but_what_it_needs(living: tuple[subprocess.Popen[str], int]) -> None:
    """Nothing of the log's, nor of the program's: a port that stayed open would be a surprise."""
    _, worker = living
    opened = {os.readlink(f"/proc/{worker}/fd/{name}") for name in os.listdir(f"/proc/{worker}/fd")}
    assert len(opened) == 3
    assert {name.partition(":")[0] for name in opened} == {"/dev/null", "socket", "/memfd"}


def test_it_ends_when_it_is_not_asked_and_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory goes back, and that is no failure."""
    script = merge_process._BEGIN.replace(
        "main()", "from lowwater.engine import merge_worker\nmerge_worker.IDLE_S = 0.0\n"
        "merge_worker.LOOK_AFTER_S = 0.05\nmain()"
    )  # fmt: skip
    assert script != merge_process._BEGIN
    monkeypatch.setattr(merge_process, "_BEGIN", script)
    with open_one(tmp_path) as db:
        load = Load(db, 9)
        for _ in range(3):
            load.go_on(10)
            db.flush()
            before = made_aside(db)
            pid = merger_of(db).pid
            assert pid is not None
            wait_until_gone(pid)
            assert before > 0
        load.check(db)
        assert failures_of(db) == 0


def test_a_simulation_has_none() -> None:
    """Nothing happens there that it does not call."""
    from lowwater.chaos.clock import VirtualClock
    from lowwater.chaos.runner import StepRunner
    from lowwater.engine.log import Seams

    assert not StepRunner(VirtualClock()).has_processes
    assert Seams().runner.has_processes
