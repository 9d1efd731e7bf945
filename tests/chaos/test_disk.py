"""Every fault has an effect, every operation can be the last, and a seed decides all of it.

A checker that has never failed proves nothing, and neither does a disk that never fails.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import get_args

import pytest

from lowwater.chaos.clock import VirtualClock
from lowwater.chaos.disk import Fault, FaultyFile, FaultyFiles, MutatingKind, Operation, SimulatedCrash
from lowwater.chaos.survival import SURVIVALS, Survival
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.seams.seams import Files, write_all

RNG = random.Random(0)


def synced_file(files: FaultyFiles, path: str, data: bytes = b"") -> FaultyFile:
    file = files.open(path, create=True)
    write_all(file, 0, [data])
    file.sync("fdatasync")
    files.sync_directory("")
    return file


def contents(files: Files) -> dict[str, bytes]:
    left = {}
    for name in files.list("log"):
        file = files.open(f"log/{name}")
        left[name] = file.read_at(0, file.size())
    return left


def on(kind: str, fault: Fault) -> Callable[[Operation], Fault | None]:
    """A schedule: this fault at the first operation of that kind."""
    left = [fault]
    return lambda operation: left.pop() if operation.kind == kind and left else None


def workload(files: Files) -> None:
    """Every mutating operation at least once, in the way of a log."""
    files.make_directory("log")
    files.lock("log/lock", "me")
    for number in range(3):
        file = files.open("log/spare", create=True)
        write_all(file, 0, [bytes(2000)])
        file.sync("fdatasync")
        files.sync_directory("log")
        files.rename("log/spare", "log/current")
        files.sync_directory("log")
        for frame in range(3):
            write_all(file, frame * 300, [b"%d" % number * 100, b"%d" % frame * 200])
            file.sync("fdatasync")
        file.truncate(900)
        file.sync("fsync")
        files.rename("log/current", f"log/segment-{number}")
        files.sync_directory("log")
        file.close()
    files.link("log/segment-1", "log/segment-0b")
    files.remove("log/segment-0")
    files.sync_directory("log")


# ---- faults


def failing_operations() -> dict[MutatingKind, Callable[[FaultyFiles, FaultyFile], object]]:
    return {
        "create": lambda files, file: files.open("log/new", create=True),
        "write": lambda files, file: file.write_at(0, [b"new"]),
        "sync": lambda files, file: file.sync("fdatasync"),
        "truncate": lambda files, file: file.truncate(1),
        "rename": lambda files, file: files.rename("log/a", "log/b"),
        "link": lambda files, file: files.link("log/a", "log/b"),
        "remove": lambda files, file: files.remove("log/a"),
        "sync_directory": lambda files, file: files.sync_directory("log"),
        "lock": lambda files, file: files.lock("log/lock", "me"),
        "make_directory": lambda files, file: files.make_directory("log/x"),
    }


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("kind", get_args(MutatingKind))
def test_any_operation_can_fail_and_then_has_no_effect(kind: MutatingKind, error: int) -> None:
    """The error is the operating system's, with the path, and the same call succeeds the next time."""
    files = FaultyFiles()
    files.make_directory("log")
    file = synced_file(files, "log/a", b"old")
    call = failing_operations()[kind]
    files.fault = on(kind, Fault(error=error))
    with pytest.raises(OSError, match=r"log") as caught:
        call(files, file)
    assert caught.value.errno == error
    assert contents(files) == {"a": b"old"}
    call(files, file)


@pytest.mark.parametrize("kind", ["open", "read", "size", "list"])
def test_reading_can_fail_too(kind: str) -> None:
    """A sector that cannot be read is an error, never an empty answer."""
    files = FaultyFiles()
    files.make_directory("log")
    synced_file(files, "log/a", b"old")
    files.fault = on(kind, Fault(error=errno.EIO))
    with pytest.raises(OSError, match="Errno 5"):
        contents(files)
    assert contents(files) == {"a": b"old"}


def test_a_fault_schedule_sees_what_an_operation_is_about() -> None:
    """Schedules choose by kind, path and place, and every number comes once."""
    seen: list[Operation] = []
    files = FaultyFiles(fault=seen.append)
    file = files.open("a", create=True)
    file.write_at(7, [b"123", b"45"])
    file.read_at(6, 4)
    files.rename("a", "b")
    assert seen == [
        Operation(1, "create", "a", 0, 0, ""),
        Operation(2, "write", "a", 7, 5, ""),
        Operation(1, "read", "a", 6, 4, ""),
        Operation(3, "rename", "a", 0, 0, "b"),
    ]
    assert (files.operations, files.reads) == (3, 1)


def test_after_a_failed_sync_a_later_one_succeeds_and_the_data_is_lost() -> None:
    """Linux marks the pages clean, so whoever syncs again and believes it loses what it acknowledged."""
    files = FaultyFiles()
    file = synced_file(files, "a", b"old")
    file.write_at(0, [b"new"])
    files.fault = on("sync", Fault(error=errno.EIO))
    with pytest.raises(OSError, match="Errno 5"):
        file.sync("fdatasync")
    assert file.read_at(0, 3) == b"new"
    file.sync("fdatasync")
    files.crash(RNG, "keep")
    assert files.open("a").read_at(0, 3) == b"new", "a restarted program reads it from the cache"
    files.open("a").sync("fsync")
    files.crash(RNG, "lose")
    assert files.open("a").read_at(0, 3) == b"old"


def test_after_a_failed_sync_only_what_is_written_again_becomes_durable() -> None:
    """What lies before it in the file is a hole."""
    files = FaultyFiles()
    file = synced_file(files, "a")
    file.write_at(0, [b"x" * 600])
    files.fault = on("sync", Fault(error=errno.EIO))
    with pytest.raises(OSError, match="Errno 5"):
        file.sync("fdatasync")
    file.write_at(600, [b"y" * 10])
    file.sync("fdatasync")
    files.crash(RNG, "lose")
    assert files.open("a").read_at(0, 1000) == bytes(600) + b"y" * 10


def test_a_failed_sync_may_have_written_some_sectors() -> None:
    """Failed is not the same as undone: the frames may be there after the crash."""
    seen = set()
    for seed in range(200):
        files = FaultyFiles()
        file = synced_file(files, "a", bytes(1024))
        file.write_at(0, [b"x" * 1024])
        files.fault = on("sync", Fault(error=errno.EIO, landed=random.Random(seed)))
        with pytest.raises(OSError, match="Errno 5"):
            file.sync("fdatasync")
        files.crash(RNG, "lose")
        seen.add(tuple(byte != 0 for byte in files.open("a").read_at(0, 1024)[::512]))
    assert len(seen) == 4


def test_a_short_write_takes_a_first_part_and_write_all_goes_on() -> None:
    """Whoever ignores the count loses the rest."""
    files = FaultyFiles(fault=on("write", Fault(taken_bytes=4)))
    file = files.open("a", create=True)
    assert file.write_at(0, [b"012", b"345"]) == 4
    assert file.read_at(0, 10) == b"0123"
    files.fault = lambda operation: Fault(taken_bytes=4)
    write_all(file, 0, [b"abc", b"defg", b"hijk"])
    assert file.read_at(0, 20) == b"abcdefghijk"


def test_a_write_may_fail_after_it_took_a_part() -> None:
    """An error does not say that nothing was written."""
    files = FaultyFiles(fault=on("write", Fault(error=errno.EIO, taken_bytes=4)))
    file = files.open("a", create=True)
    with pytest.raises(OSError, match="Errno 5"):
        file.write_at(0, [b"012345"])
    assert file.read_at(0, 10) == b"0123"


def test_a_full_disk_takes_what_fits_and_then_refuses() -> None:
    """First a short write, then the error: the order in which programs forget to handle it."""
    files = FaultyFiles(free_bytes=1000)
    file = synced_file(files, "a", bytes(900))
    assert file.write_at(900, [b"x" * 300]) == 100
    with pytest.raises(OSError, match="Errno 28"):
        file.write_at(1000, [b"x"])
    with pytest.raises(OSError, match="Errno 28"):
        file.truncate(1001)
    assert file.write_at(0, [b"y" * 1000]) == 1000, "what is there already can be overwritten"
    assert (file.size(), files.free_bytes) == (1000, 0)


def test_space_is_free_again_once_files_go() -> None:
    """Purging must get a full disk going, and a test can fill and empty the disk as it likes."""
    files = FaultyFiles(free_bytes=1000)
    synced_file(files, "a", bytes(1000))
    files.remove("a")
    assert files.free_bytes == 1000
    files.crash(RNG, "lose")
    assert files.free_bytes == 0, "the file is back"
    files.free_bytes = 10
    assert files.open("b", create=True).write_at(0, [bytes(20)]) == 10
    files.free_bytes = None
    assert files.open("b", write=True).write_at(0, [bytes(2000)]) == 2000


def test_a_slow_operation_lets_virtual_time_pass() -> None:
    """A simulation must be able to meet time-outs without waiting for them."""
    clock = VirtualClock()
    files = FaultyFiles(clock=clock)
    file = synced_file(files, "a")
    files.fault = on("sync", Fault(slow_s=2.5))
    file.sync("fdatasync")
    assert clock.monotonic() == 2.5


def test_a_stalled_sync_holds_its_thread_only_and_covers_what_was_written_before_it() -> None:
    """A write that arrives while a sync is under way is not covered, however long that takes."""
    gate = threading.Event()
    files = FaultyFiles()
    file = synced_file(files, "a", b"....")
    file.write_at(0, [b"1"])
    stalled = threading.Event()

    def fault(operation: Operation) -> Fault | None:
        if operation.kind != "sync" or stalled.is_set():
            return None
        stalled.set()
        return Fault(gate=gate)

    files.fault = fault
    thread = threading.Thread(target=file.sync, args=("fdatasync",))
    thread.start()
    assert stalled.wait(10)
    file.write_at(1, [b"2"])
    assert file.read_at(0, 4) == b"12.."
    gate.set()
    thread.join(10)
    files.crash(RNG, "lose")
    assert files.open("a").read_at(0, 4) == b"1..."


def test_a_thread_that_was_stalled_during_a_crash_changes_nothing_afterwards() -> None:
    """It belongs to the former life."""
    gate = threading.Event()
    stalled = threading.Event()
    files = FaultyFiles()
    file = synced_file(files, "a", b"old")
    raised: list[BaseException] = []

    def fault(operation: Operation) -> Fault | None:
        stalled.set()
        return Fault(gate=gate)

    def write() -> None:
        try:
            file.write_at(0, [b"new"])
        except SimulatedCrash as crash:
            raised.append(crash)

    files.fault = fault
    thread = threading.Thread(target=write)
    thread.start()
    assert stalled.wait(10)
    files.fault = None
    files.crash(RNG, "keep")
    gate.set()
    thread.join(10)
    assert len(raised) == 1
    assert files.open("a").read_at(0, 3) == b"old"


def test_a_flipped_bit_in_a_read_is_gone_the_next_time() -> None:
    """A bad transfer, as opposed to rot: reading again helps."""
    files = FaultyFiles()
    file = synced_file(files, "a", bytes(4))
    files.fault = on("read", Fault(flip_bit=17))
    assert file.read_at(0, 4) == b"\0\0\2\0"
    assert file.read_at(0, 4) == bytes(4)


def test_a_flipped_byte_stays_flipped() -> None:
    """Rot: in the cache, on the disk, after every crash."""
    files = FaultyFiles()
    file = synced_file(files, "a", bytes(4))
    files.flip_byte("a", 2, 0x81)
    assert file.read_at(0, 4) == b"\0\0\x81\0"
    files.crash(RNG, "lose")
    assert files.open("a").read_at(0, 4) == b"\0\0\x81\0"


# ---- crash points


def test_a_crash_can_end_the_program_at_every_operation_before_or_after_it() -> None:
    """In all of them exactly the operations before it have happened, or those and it."""
    plain = FaultyFiles()
    states: list[dict[str, bytes]] = [{}]
    plain.fault = lambda operation: states.append(contents_without_fault(plain, operation))
    workload(plain)
    plain.fault = None
    states.append(contents(plain))
    kinds = set()
    for number in range(1, plain.operations + 1):
        for after in (False, True):
            files = FaultyFiles()
            files.crash_at(number, after=after)
            with pytest.raises(SimulatedCrash, match=f"at operation {number}:") as caught:
                workload(files)
            kinds.add(str(caught.value).split()[3])
            assert files.operations == number
            files.crash(RNG, "keep")
            files.make_directory("log")
            assert contents(files) == states[number + after]
    assert kinds == set(get_args(MutatingKind))


def contents_without_fault(files: FaultyFiles, operation: Operation) -> dict[str, bytes]:
    """What the cache holds before this mutating operation."""
    hook, files.fault = files.fault, None
    try:
        return contents(files) if operation.kind != "make_directory" else {}
    finally:
        files.fault = hook


def test_after_a_crash_point_nothing_works_until_the_crash() -> None:
    """Clean-up code of the crashed program must not tidy up what a crash would leave."""
    files = FaultyFiles()
    file = synced_file(files, "a", b"old")
    lock = files.lock("lock", "me")
    files.crash_at(files.operations + 1)
    calls: list[Callable[[], object]] = [
        lambda: file.write_at(0, [b"new"]),
        lambda: file.read_at(0, 3),
        file.size,
        lambda: file.truncate(0),
        lambda: file.sync("fsync"),
        lambda: files.open("a"),
        lambda: files.list(""),
        lambda: files.remove("a"),
    ]
    for call in calls:
        with pytest.raises(SimulatedCrash):
            call()
    lock.close()
    file.close()
    assert not issubclass(SimulatedCrash, Exception)
    files.crash(RNG, "keep")
    assert files.open("a").read_at(0, 3) == b"old"


def test_a_crash_point_that_was_not_reached_is_forgotten() -> None:
    """The next life has its own."""
    files = FaultyFiles()
    files.crash_at(2)
    files.open("a", create=True)
    files.crash(RNG, "keep")
    files.open("a", write=True).write_at(0, [b"new"])
    assert files.operations == 2


@pytest.mark.parametrize("mode", SURVIVALS)
def test_a_crash_frees_locks_and_kills_handles(mode: Survival) -> None:
    """The next life must be able to start, and the former one must not write into it."""
    files = FaultyFiles()
    file = synced_file(files, "a", b"old")
    lock = files.lock("lock", "me")
    files.crash(RNG, mode)
    with pytest.raises(SimulatedCrash):
        file.write_at(0, [b"new"])
    held = files.lock("lock", "another")
    lock.close()
    with pytest.raises(BlockingIOError):
        files.lock("lock", "a third")
    held.close()


# ---- determinism


def traced_run(seed: int) -> str:
    """Random work with faults and crashes; what it came to, as one hash."""
    rng = random.Random(seed)

    def fault(operation: Operation) -> Fault | None:
        if rng.random() < 0.9:
            return None
        if operation.kind == "read":
            return Fault(flip_bit=rng.randrange(10_000))
        return rng.choice([Fault(error=errno.EIO, landed=rng), Fault(taken_bytes=1 + rng.randrange(50))])

    files = FaultyFiles(fault=fault, free_bytes=20_000)
    for _ in range(10):
        try:
            random_work(files, rng, 30)
        except OSError:
            files.crash(rng, rng.choice(SURVIVALS))
    return files.trace


def random_work(files: Files, rng: random.Random, count: int) -> None:
    files.make_directory("log")
    for _ in range(count):
        path, other = (f"log/{rng.choice('abcd')}" for _ in range(2))
        action = rng.randrange(8)
        if path[4:] not in files.list("log"):
            files.open(path, create=True)
        file = files.open(path, write=True)
        if action < 3:
            write_all(file, rng.randrange(1500), [rng.randbytes(rng.randrange(1500))])
        elif action == 3:
            file.truncate(rng.randrange(2000))
        elif action == 4:
            file.sync("fdatasync")
        elif action == 5:
            files.rename(path, other)
        elif action == 6:
            files.remove(path)
        else:
            files.sync_directory("log")
        file.close()
        contents(files)


def test_equal_seeds_give_equal_traces_and_others_do_not() -> None:
    """The trace is what says that a failing run was repeated."""
    traces = [traced_run(seed) for seed in range(50)]
    assert traces == [traced_run(seed) for seed in range(50)]
    assert len(set(traces)) == 50


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_the_trace_is_the_same_in_another_process(hash_seed: str) -> None:
    """Nothing may depend on the order of a set, which differs from process to process."""
    program = f"import runpy; run = runpy.run_path({__file__!r})['traced_run']; print(*map(run, range(20)))"
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.split() == [traced_run(seed) for seed in range(20)]


def test_the_trace_covers_bytes_reads_and_outcomes() -> None:
    """A run that differs in any of them is another run."""

    def trace(data: bytes = b"abc", fault: Fault | None = None) -> str:
        files = FaultyFiles()
        file = files.open("a", create=True)
        file.write_at(0, [b"abc"])
        if fault is not None:
            files.fault = on("read", fault)
        with suppress(OSError):
            file.read_at(0, 3)
        file.write_at(0, [data])
        return files.trace

    assert trace() == trace()
    others = [trace(b"abd"), trace(fault=Fault(flip_bit=0)), trace(fault=Fault(error=errno.EIO))]
    assert len({trace(), *others}) == 4


def test_without_faults_it_behaves_as_files_in_memory_do() -> None:
    """A fake with bugs of its own would be blamed on the log."""
    for seed in range(50):
        faulty, memory = FaultyFiles(), MemoryFiles()
        random_work(faulty, random.Random(seed), 60)
        random_work(memory, random.Random(seed), 60)
        assert contents(faulty) == contents(memory)
