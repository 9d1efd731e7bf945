"""Both page stores behave alike, and LMDB's survives what happens to files, disks and processes."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from lowwater.chaos.disk import Fault, FaultyFiles, Operation, SimulatedCrash
from lowwater.engine.pages import lmdb_store
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.engine.pages.memory_pages import MemoryPages
from lowwater.engine.pages.pagestore import PageStore
from lowwater.engine.testing.pagestore import PageStoreConformance, Place
from lowwater.errors import (
    AlreadyExists,
    Closed,
    Corrupt,
    DirectoryLocked,
    DirectoryNotWritable,
    DiskFailed,
    LogPoisoned,
    LowwaterError,
    NewerVersion,
    NotFound,
    NotLowwater,
    OutOfSpace,
)

as_root = os.geteuid() == 0


class TestLmdbPages(PageStoreConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return lambda: LmdbPages.open(str(tmp_path / "data" / "pages"))


class MemoryConformance(PageStoreConformance):
    @staticmethod
    def place_of(pages: MemoryPages) -> Place:
        def open_pages() -> PageStore:
            pages.reopen()
            return pages

        return open_pages


class TestMemoryPages(MemoryConformance):
    @pytest.fixture
    def place(self) -> Place:
        return self.place_of(MemoryPages())


class TestMemoryPagesOnAFaultyDisk(MemoryConformance):
    @pytest.fixture
    def place(self) -> Place:
        return self.place_of(MemoryPages(FaultyFiles()))


def content(pages: PageStore) -> tuple[dict[bytes, bytes | None], dict[bytes, bytes]]:
    keys = list(pages.page_keys())
    return dict(zip(keys, pages.get_many(keys), strict=True)), pages.read_meta()


def random_write(
    rng: random.Random,
) -> tuple[list[tuple[bytes, bytes]], list[bytes], dict[bytes, bytes | None]]:
    keys = sorted(rng.sample([b"key%03d" % number for number in range(300)], rng.choice((0, 1, 5, 40))))
    puts = [(key, rng.randbytes(rng.choice((0, 10, 900, 2030, 2040, 4080, 9000, 50_000)))) for key in keys]
    deletes = [b"key%03d" % rng.randrange(300) for _ in range(rng.choice((0, 0, 3, 60)))]
    meta = {b"m%d" % rng.randrange(9): rng.choice((None, b"", rng.randbytes(8))) for _ in range(3)}
    return puts, deletes, meta


@pytest.mark.parametrize("seed", range(3))
def test_both_stores_have_the_same_content_after_the_same_writes(tmp_path: Path, seed: int) -> None:
    """The simulation proves something about the real engine only where the two do not differ."""
    rng = random.Random(seed)
    path = str(tmp_path / "pages")
    real: PageStore = LmdbPages.open(path)
    memory = MemoryPages()
    for number in range(150):
        write = random_write(rng)
        real.write(*write)
        memory.write(*write)
        if number % 10 == 9:
            assert content(real) == content(memory)
        if number % 50 == 49:
            real.close()
            real = LmdbPages.open(path)
    real.close()


# ---------------------------------------------------------------------------- the stand-in and its faults


def memory_script(pages: MemoryPages, states: list[object]) -> None:
    for number in range(1, 6):
        pages.write(
            [(b"a", b"%d" % number), (b"b%d" % number, b"")], [b"b%d" % (number - 1)], {b"n": b"%d" % number}
        )
        states.append(content(pages))
        pages.get(b"a")


@pytest.mark.parametrize("after", [False, True])
def test_a_simulated_crash_at_any_operation_leaves_whole_transactions(after: bool) -> None:
    """Before it takes effect the transaction is gone, after it the transaction is there."""
    whole = FaultyFiles()
    states: list[object] = [content(MemoryPages())]
    memory_script(MemoryPages(whole), states)
    assert whole.operations == 5
    for number in range(1, whole.operations + 1):
        disk = FaultyFiles()
        pages = MemoryPages(disk)
        disk.crash_at(number, after=after)
        with pytest.raises(SimulatedCrash):
            memory_script(pages, [])
        with pytest.raises(SimulatedCrash):
            pages.get(b"a")
        disk.crash(random.Random(number))
        with pytest.raises(SimulatedCrash):
            pages.get(b"a")
        pages.crash()
        assert content(pages) == states[number if after else number - 1]
        memory_script(pages, [])


@pytest.mark.parametrize("landing", [None, 1, 2])
def test_a_failed_write_of_the_stand_in_is_the_last_one(landing: int | None) -> None:
    """What reads show is the state before it; what a reopen finds, the fault's own generator decides."""
    landed = None if landing is None else random.Random(landing)
    expected = b"2" if landed is not None and random.Random(landing).random() < 0.5 else b"1"
    number_failing = 2

    def fault(operation: Operation) -> Fault | None:
        if operation.kind == "sync" and operation.number == number_failing:
            return Fault(error=errno.ENOSPC, landed=landed)
        return None

    pages = MemoryPages(FaultyFiles(fault=fault))
    pages.write([(b"a", b"1")], [], {})
    for _ in range(2):
        with pytest.raises(OutOfSpace):
            pages.write([(b"a", b"2")], [], {})
        assert pages.get(b"a") == b"1"
    pages.close()
    pages.reopen()
    assert pages.get(b"a") == expected
    pages.write([(b"a", b"3")], [], {})
    assert pages.get(b"a") == b"3"


def test_a_read_of_the_stand_in_fails_and_rots_on_demand() -> None:
    """A page has a checksum, and the simulation must be able to break it."""
    faults = {1: Fault(error=errno.EIO), 2: Fault(flip_bit=9)}
    pages = MemoryPages(
        FaultyFiles(fault=lambda operation: faults.get(operation.number * (operation.kind == "read")))
    )
    pages.write([(b"a", b"\0\0")], [], {})
    with pytest.raises(DiskFailed):
        pages.get(b"a")
    assert pages.get(b"a") == b"\0\2"
    assert pages.get(b"a") == b"\0\0"


def test_the_trace_of_the_stand_in_depends_on_what_was_written() -> None:
    """The same seed must give the same trace, and another content another one."""

    def trace(last: bytes) -> str:
        disk = FaultyFiles()
        pages = MemoryPages(disk)
        pages.write([(b"a", b"1"), (b"b", last)], [b"c"], {b"m": None})
        return disk.trace

    assert trace(b"2") == trace(b"2")
    assert trace(b"2") != trace(b"3")


# ---------------------------------------------------------------------------- kill -9

WRITER = """
import os, random, sys
from lowwater.engine.pages.lmdb_store import LmdbPages

pages = LmdbPages.open(sys.argv[1], map_bytes=1 << 20)
number = int(pages.read_meta().get(b"number", b"0"))
while True:
    number += 1
    rng = random.Random(number)
    keys = sorted(rng.sample(range(500), 40))
    # Every transaction rewrites the same ten pages, and moves others around.
    puts = [(b"all%d" % key, b"%d" % number * 900) for key in range(10)]
    puts += [(b"key%d.%d" % (number, key), rng.randbytes(rng.choice((20, 3000)))) for key in keys]
    rng = random.Random(number - 3)
    old = [b"key%d.%d" % (number - 3, key) for key in sorted(rng.sample(range(500), 40))]
    pages.write(puts, old, {b"number": b"%d" % number})
    os.write(1, b"%d\\n" % number)
"""


def keys_at(number: int) -> set[bytes]:
    keys = {b"all%d" % key for key in range(10)}
    for recent in range(max(1, number - 2), number + 1):
        keys |= {b"key%d.%d" % (recent, key) for key in random.Random(recent).sample(range(500), 40)}
    return keys


@pytest.mark.slow
def test_a_killed_process_leaves_a_whole_transaction(tmp_path: Path) -> None:
    """The pages are what recovery starts from: half a flush is a lost key."""
    path = str(tmp_path / "pages")
    rng = random.Random(4)
    acknowledged = 0
    for _ in range(20):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, path],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(rng.randint(1, 40))]
            time.sleep(rng.random() * 0.005)
            os.kill(process.pid, signal.SIGKILL)
            acknowledged = int(([*lines, *process.stdout.read().splitlines()])[-1])
        pages = LmdbPages.open(path)
        number = int(pages.read_meta()[b"number"])
        assert number in (acknowledged, acknowledged + 1)
        assert set(pages.page_keys()) == keys_at(number)
        assert pages.get_many([b"all%d" % key for key in range(10)]) == [b"%d" % number * 900] * 10
        assert "txnid" not in pages._environment.readers(), "a slot of a dead reader was left"
        pages.close()
    assert acknowledged > 20


@pytest.mark.parametrize("stage", ["nothing", "directory", "torn file", "whole"])
def test_a_creation_that_was_killed_is_begun_again(tmp_path: Path, stage: str) -> None:
    """The directory has its name only once it holds a store."""
    path = tmp_path / "pages"
    new = tmp_path / "pages.new"
    if stage != "nothing":
        new.mkdir()
    if stage == "torn file":
        (new / "data.mdb").write_bytes(bytes(100))
        (new / "lock.mdb").write_bytes(b"")
    if stage == "whole":
        LmdbPages.open(str(tmp_path / "other")).close()
        os.rmdir(new)
        os.rename(tmp_path / "other", new)
    pages = LmdbPages.open(str(path))
    pages.write([(b"a", b"1")], [], {})
    pages.close()
    assert sorted(os.listdir(tmp_path)) == ["pages"]


# ---------------------------------------------------------------------------- the map grows


def test_the_map_grows_under_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of a map that was taken away reads memory of somebody else, or none."""
    monkeypatch.setattr(lmdb_store, "GROWTH_BYTES_MIN", 2**20)
    pages = LmdbPages.open(str(tmp_path / "pages"), map_bytes=2**20)
    done = threading.Event()
    wrong: list[object] = []
    reads = [0] * 3

    def page_of(number: int) -> bytes:
        return b"%06d" % number * 800

    def read(reader: int) -> None:
        rng = random.Random(reader)
        try:
            while not done.is_set():
                number = rng.randrange(1200)
                key = b"%06d" % number
                way = rng.randrange(20)
                if way == 0:
                    found = list(pages.page_keys())
                    if found != sorted(found):
                        wrong.append(found)
                elif way < 4:
                    many = pages.get_many([key, b"missing", key])
                    if many[0] != many[2] or many[0] not in (None, page_of(number)):
                        wrong.append(number)
                elif pages.get(key) not in (None, page_of(number)):
                    wrong.append(number)
                reads[reader] += 1
                if reads[reader] % 20 == 0:
                    time.sleep(0.001)
        except LowwaterError as error:
            wrong.append(error)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(len(reads))]
    # LMDB gives up the interpreter in every put, and would get it back from each reader after 5 ms.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in readers:
        thread.start()
    try:
        for number in range(0, 1200, 20):
            while min(reads) < number // 60 and not wrong:
                time.sleep(0.001)  # a machine with few cores lets some wait for long
            pages.write([(b"%06d" % key, page_of(key)) for key in range(number, number + 20)], [], {})
    finally:
        done.set()
        for thread in readers:
            thread.join()
        sys.setswitchinterval(interval)
    assert wrong == []
    assert min(reads) > 10
    assert pages._generation > 5, "the map grew less often than this test needs"
    assert pages.get_many([b"%06d" % key for key in range(1200)]) == [page_of(key) for key in range(1200)]
    pages.close()


def test_a_store_that_reached_its_limit_can_be_read_and_used(tmp_path: Path) -> None:
    """Deleting is what an operator does next."""
    pages = LmdbPages.open(str(tmp_path / "pages"), map_bytes=2**20, map_bytes_max=2 * 2**20)
    pages.write([(b"a", b"1"), (b"big", bytes(2**19))], [], {b"n": b"1"})
    for _ in range(2):
        with pytest.raises(OutOfSpace, match="limit") as caught:
            pages.write([(b"a", b"2"), (b"huge", bytes(4 * 2**20))], [], {b"n": b"2"})
        assert "raise it" in caught.value.hint
        assert pages.get(b"a") == b"1"
        assert pages.read_meta() == {b"n": b"1"}
    pages.write([(b"a", b"3")], [b"big"], {b"n": b"3"})
    assert pages.get_many([b"a", b"big"]) == [b"3", None]
    pages.close()


def test_a_map_that_another_process_grew_is_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that follows a running engine must not end when that grows."""
    # LMDB gives a reader at least the map that the store was made with.
    monkeypatch.setattr(lmdb_store, "MAP_BYTES_INITIAL", 2**20)
    path = str(tmp_path / "pages")
    LmdbPages.open(path).close()
    pages = LmdbPages.open(path, read_only=True, map_bytes=2**20)
    script = (
        "import sys; from lowwater.engine.pages.lmdb_store import LmdbPages; p = LmdbPages.open(sys.argv[1]);"
        "p.write([(b'%04d' % n, bytes(5000)) for n in range(1000)], [], {b'n': b'1'}); p.close()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script, path], env=environment, check=True)
    threads = [threading.Thread(target=lambda: pages.get(b"0999")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pages.get(b"0999") == bytes(5000)
    assert len(list(pages.page_keys())) == 1000
    assert pages._generation == 1
    pages.close()


def test_more_threads_than_reader_slots_can_read(tmp_path: Path) -> None:
    """LMDB has 126 slots for all processes together; nobody may be refused for that."""
    pages = LmdbPages.open(str(tmp_path / "pages"))
    pages.write([(b"a", bytes(100_000))], [], {})
    inside = threading.Barrier(lmdb_store.READERS_HERE_MAX)
    failures: list[BaseException] = []

    def read(number: int) -> None:
        try:
            if number < lmdb_store.READERS_HERE_MAX:
                pages._read(lambda transaction: inside.wait(20))
            assert pages.get(b"a") == bytes(100_000)
        except (LowwaterError, AssertionError, threading.BrokenBarrierError) as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(160)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    pages.close()


def test_closing_waits_for_readers(tmp_path: Path) -> None:
    """The map goes away with the store."""
    pages = LmdbPages.open(str(tmp_path / "pages"))
    inside, leave, closed = threading.Event(), threading.Event(), threading.Event()

    def read(transaction: object) -> None:
        inside.set()
        leave.wait(20)

    def close() -> None:
        pages.close()
        closed.set()

    reader = threading.Thread(target=lambda: pages._read(read))
    reader.start()
    inside.wait(20)
    closer = threading.Thread(target=close)
    closer.start()
    assert not closed.wait(0.05)
    leave.set()
    reader.join()
    closer.join()
    with pytest.raises(Closed):
        pages.get(b"a")


# ---------------------------------------------------------------------------- a disk that fails


def descriptors_of(path: str) -> list[int]:
    """LMDB's own for this file: the one for data, and the one for the root. Nothing else writes."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            is_it = os.readlink(f"/proc/self/fd/{name}") == os.path.realpath(path)
            if is_it and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                found.append(int(name))
        except OSError:
            pass
    return sorted(found)


@contextmanager
def writes_to(device: str, flags: int, descriptor: int) -> Iterator[None]:
    """While the block runs, what LMDB writes through this descriptor goes somewhere else."""
    saved = os.dup(descriptor)
    other = os.open(device, flags)
    os.dup2(other, descriptor)
    os.close(other)
    try:
        yield
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)


@pytest.mark.parametrize("which", ["data", "root"])
@pytest.mark.parametrize(
    ("device", "flags", "error"),
    [("/dev/full", os.O_RDWR, OutOfSpace), ("/dev/zero", os.O_RDONLY, LogPoisoned)],
)
def test_a_failed_write_is_the_last_one_and_reads_go_on(
    tmp_path: Path, which: str, device: str, flags: int, error: type[LowwaterError]
) -> None:
    """After a failed write nobody knows what is durable: only a reopen does. LMDB itself would write on
    after the first of these failures, and refuse even reads after the second."""
    path = str(tmp_path / "pages")
    pages = LmdbPages.open(path)
    pages.write([(b"a", b"1"), (b"big", bytes(20_000))], [], {b"n": b"1"})
    before = content(pages)
    descriptor = descriptors_of(f"{path}/data.mdb")[which == "root"]
    with writes_to(device, flags, descriptor), pytest.raises(error) as caught:
        pages.write([(b"a", b"2"), (b"big", bytes(30_000))], [], {b"n": b"2"})
    assert type(caught.value) is error
    assert "close and open again" in caught.value.hint
    for _ in range(2):
        assert content(pages) == before
        assert pages.get(b"a") == b"1"
        assert pages.used_bytes() <= pages.size_bytes()
        with pytest.raises(error):
            pages.write([(b"a", b"3")], [], {})
    pages.close()
    pages = LmdbPages.open(path)
    assert content(pages) == before
    pages.write([(b"a", b"4")], [], {})
    assert pages.get(b"a") == b"4"
    pages.close()


def test_a_failed_sync_is_a_failed_write(tmp_path: Path) -> None:
    """/dev/null takes writes, but no sync. What was written before may or may not be on the disk."""
    path = str(tmp_path / "pages")
    pages = LmdbPages.open(path)
    pages.write([(b"a", b"1")], [], {})
    data = descriptors_of(f"{path}/data.mdb")[0]
    with writes_to("/dev/null", os.O_RDWR, data), pytest.raises(LogPoisoned, match="invalid argument"):
        pages.write([(b"a", b"2")], [], {})
    assert pages.get(b"a") == b"1"
    with pytest.raises(LogPoisoned):
        pages.write([(b"a", b"3")], [], {})
    pages.close()


def test_a_limit_on_the_size_of_files_ends_the_writing(tmp_path: Path) -> None:
    """Containers and users have such limits. The first write is cut short, which LMDB reports as EIO."""
    pages = LmdbPages.open(str(tmp_path / "pages"))
    pages.write([(b"a", b"1")], [], {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(LogPoisoned):
            pages.write([(b"a", b"2"), (b"big", bytes(2**21))], [], {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert pages.get(b"a") == b"1"
    pages.close()


WITHOUT_ADDRESS_SPACE = """
import resource, sys
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.errors import LogPoisoned

pages = LmdbPages.open(sys.argv[1], map_bytes=1 << 20)
pages.write([(b"a", b"1")], [], {})
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), -1))
for _ in range(2):
    try:
        pages.write([(b"a", b"2"), (b"big", bytes(2 << 20))], [], {})
    except LogPoisoned as error:
        print(error)
    assert pages.get(b"a") == b"1"
pages.close()
"""


def test_a_map_that_cannot_grow_leaves_a_store_that_can_be_read(tmp_path: Path) -> None:
    """The old map is gone by the time that the new one is refused."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ADDRESS_SPACE, str(tmp_path / "pages")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot allocate memory") == 2


# ---------------------------------------------------------------------------- damaged files


@pytest.fixture
def stored(tmp_path: Path) -> str:
    path = str(tmp_path / "pages")
    pages = LmdbPages.open(path)
    for number in range(10):
        pages.write(
            [(b"%d.%03d" % (number, key), bytes(3000)) for key in range(40)], [], {b"n": b"%d" % number}
        )
    pages.close()
    return path


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("size", "error"),
    [(None, Corrupt), (0, Corrupt), (100, Corrupt), (8192, Corrupt), (500_000, Corrupt)],
)
def test_a_file_that_is_missing_or_was_cut_is_damage(
    stored: str, size: int | None, error: type[LowwaterError], read_only: bool
) -> None:
    """LMDB begins a new store where the file is empty, and dies of SIGBUS where its end is missing."""
    if size is None:
        os.unlink(f"{stored}/data.mdb")
    else:
        os.truncate(f"{stored}/data.mdb", size)
    with pytest.raises(error):
        LmdbPages.open(stored, read_only=read_only)
    if size is not None:
        assert os.path.getsize(f"{stored}/data.mdb") == size


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_of_something_else_is_refused(stored: str, read_only: bool) -> None:
    """Whatever stands in its place, it is not written to."""
    Path(stored, "data.mdb").write_bytes(b"something else\n" * 10_000)
    with pytest.raises(NotLowwater):
        LmdbPages.open(stored, read_only=read_only)
    assert Path(stored, "data.mdb").read_bytes() == b"something else\n" * 10_000


def test_a_database_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """It would get our tables otherwise."""
    lmdb.open(str(tmp_path / "pages")).close()
    with pytest.raises(NotLowwater):
        LmdbPages.open(str(tmp_path / "pages"))


def test_a_store_of_a_newer_format_is_refused(stored: str) -> None:
    """Upgrade, do not guess."""
    with lmdb.open(stored, max_dbs=8) as environment, environment.begin(write=True) as transaction:
        transaction.put(lmdb_store.FORMAT_KEY, b"3")
    with pytest.raises(NewerVersion):
        LmdbPages.open(stored)


def test_damage_within_the_tree_is_a_typed_error(stored: str) -> None:
    """Pages of zeros are what a disk leaves that lost a write. The file ends where it should."""
    size = os.path.getsize(f"{stored}/data.mdb")
    os.truncate(f"{stored}/data.mdb", 8192)
    os.truncate(f"{stored}/data.mdb", size)
    with pytest.raises(Corrupt) as caught:
        content(LmdbPages.open(stored))
    assert caught.value.hint


def test_a_file_is_as_long_as_lmdb_counts(tmp_path: Path) -> None:
    """Else a cut could not be told from pages at the end that LMDB took and did not write."""
    path = str(tmp_path / "pages")
    rng = random.Random(1)
    pages = LmdbPages.open(path)
    for _ in range(100):
        pages.write(*random_write(rng))
        assert os.path.getsize(f"{path}/data.mdb") >= pages._counted_bytes()
    pages.close()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_that_lacks_only_free_pages_is_whole(stored: str, read_only: bool) -> None:
    """What a process leaves that was killed between LMDB's commit and ours to the length of the file."""
    pages = LmdbPages.open(stored)
    pages.write([(b"z", bytes(400_000))], [], {})
    pages.write([], [b"z"], {})
    pages.write([(b"a", b"1")], [], {})
    counted = pages._counted_bytes()
    pages.close()
    os.truncate(f"{stored}/data.mdb", counted - 4 * 4096)
    pages = LmdbPages.open(stored, read_only=read_only)
    assert len(list(pages.page_keys())) == 401
    pages.close()
    assert os.path.getsize(f"{stored}/data.mdb") == counted - 4 * 4096 * read_only


# ---------------------------------------------------------------------------- who may open it, and how


def test_a_store_is_opened_once_in_a_process(stored: str) -> None:
    """LMDB's file locks end for both when one of them is closed."""
    pages = LmdbPages.open(stored)
    for read_only in (False, True):
        with pytest.raises(DirectoryLocked):
            LmdbPages.open(stored, read_only=read_only)
    assert pages.get(b"0.000") == bytes(3000)
    pages.close()


def test_a_tool_makes_nothing_and_writes_nothing(stored: str, tmp_path: Path) -> None:
    """It may look at a directory by mistake, or at evidence."""
    with pytest.raises(NotFound):
        LmdbPages.open(str(tmp_path / "missing"), read_only=True)
    assert sorted(os.listdir(tmp_path)) == ["pages"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(Corrupt):
        LmdbPages.open(str(tmp_path / "empty"), read_only=True)
    assert os.listdir(tmp_path / "empty") == []

    os.unlink(f"{stored}/lock.mdb")
    data = Path(stored, "data.mdb").read_bytes()
    pages = LmdbPages.open(stored, read_only=True)
    assert pages.get(b"0.000") == bytes(3000)
    with pytest.raises(DirectoryNotWritable):
        pages.write([(b"a", b"1")], [], {})
    pages.close()
    assert os.listdir(stored) == ["data.mdb"]
    assert Path(stored, "data.mdb").read_bytes() == data


@pytest.mark.skipif(as_root, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_named(stored: str, tmp_path: Path) -> None:
    """And it can still be looked at."""
    os.chmod(f"{stored}/data.mdb", 0o444)
    with pytest.raises(DirectoryNotWritable):
        LmdbPages.open(stored)
    os.chmod(tmp_path, 0o555)
    with pytest.raises(DirectoryNotWritable):
        LmdbPages.open(str(tmp_path / "new"))
    pages = LmdbPages.open(stored, read_only=True)
    assert pages.get(b"0.000") == bytes(3000)
    pages.close()
    os.chmod(tmp_path, 0o755)


def test_a_place_below_a_file_is_named(tmp_path: Path) -> None:
    """A wrong path is the operator's most common mistake."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((AlreadyExists, NotFound)):
        LmdbPages.open(str(tmp_path / "file" / "pages"))
    with pytest.raises((AlreadyExists, NotFound)):
        LmdbPages.open(str(tmp_path / "file"))


def test_opening_and_closing_leaves_nothing_behind(stored: str) -> None:
    """An engine is opened and closed for as long as its process lives."""
    LmdbPages.open(stored).close()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        pages = LmdbPages.open(stored, read_only=bool(number % 2))
        pages.get(b"0.000")
        next(pages.page_keys())
        if not number % 2:
            pages.write([(b"n", b"%d" % number)], [], {})
        assert "txnid" not in pages._environment.readers(), "a read transaction was left open"
        pages.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with open("/proc/self/maps") as maps:
        assert stored not in maps.read()


@pytest.mark.slow
def test_the_keys_of_200_000_pages_are_read_in_order(tmp_path: Path) -> None:
    """An engine reads them all whenever it starts, in many runs."""
    pages = LmdbPages.open(str(tmp_path / "pages"))
    keys = [b"bucket/%012d" % number for number in range(200_000)]
    for start in range(0, len(keys), 20_000):
        pages.write([(key, bytes(500)) for key in keys[start : start + 20_000]], [], {})
    assert list(pages.page_keys()) == keys
    pages.close()
