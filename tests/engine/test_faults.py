"""A disk that fails, fills up, is slow or takes half: typed errors, and nothing that was promised is lost."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable

import pytest

from lowwater.chaos.clock import VirtualClock
from lowwater.chaos.disk import Fault, FaultyFiles, Operation
from lowwater.chaos.survival import Survival
from lowwater.chaos.workload import DIRECTORY, SCRIPT_OPTIONS, Machine, script
from lowwater.engine.format.entries import Put
from lowwater.engine.log.directory import HINT, HINT_TEMPORARY, SPARE
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.errors import (
    Closed,
    Corrupt,
    DirectoryNotWritable,
    DiskFailed,
    LogPoisoned,
    LowwaterError,
    OutOfSpace,
    ReopenError,
)

FaultOf = Callable[[Operation], Fault | None]


def nth(number: int, fault: Fault, *, mutating: bool = True) -> FaultOf:
    """This fault, at the operation with this number and nowhere else."""

    def fault_of(operation: Operation) -> Fault | None:
        reading = operation.kind in ("open", "read", "size", "list")
        return fault if operation.number == number and reading != mutating else None

    return fault_of


def operations_of_the_script() -> int:
    machine = Machine(SCRIPT_OPTIONS)
    script(machine)
    return machine.files.operations


def heal_and_recover(machine: Machine, mode: Survival, number: int) -> None:
    """The disk is well again, the power fails, and the log is opened."""
    machine.files.fault = None
    if machine.log is not None:
        machine.log.close()
    machine.crash(mode, random.Random(number))
    machine.recover()
    machine.append(machine.put(10))
    machine.seal()
    machine.oracle.verify(machine.log)
    machine.close()


def script_until_it_fails(machine: Machine) -> LowwaterError | None:
    """The script; where the log fails it must be with an error of its own, and reads must go on."""
    try:
        script(machine)
    except LowwaterError as error:
        log = machine.log
        if log is not None and log.wal.failure is not None:
            check_poisoned(log, machine)
        return error
    return machine.log.wal.failure if machine.log is not None else None


def check_poisoned(log: Log, machine: Machine) -> None:
    failure = log.wal.failure
    operations = machine.files.operations
    for attempt in (lambda: log.append(Put("b", "k", b"")), log.seal, log.sync):
        with pytest.raises(type(failure)):
            attempt()
    with pytest.raises(type(failure)):
        log.submit(Put("b", "k", b"")).result()
    with pytest.raises(type(failure)):
        log.append(Put("b", "k", b""), ack="memory")
    assert machine.files.operations == operations, "a poisoned log writes no more"
    for entry in log.read():
        assert machine.oracle.entries[entry.seq] == entry
        machine.oracle.promise(entry.seq)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("mode", ["keep", "lose", "random"])
def test_an_error_at_any_operation_loses_nothing_that_was_promised(number: int, mode: Survival) -> None:
    """The write that failed may be there or not; what was acknowledged before must be."""
    poisoned = 0
    for at in range(1, operations_of_the_script() + 1):
        machine = Machine(SCRIPT_OPTIONS)
        machine.files.fault = nth(at, Fault(error=number))
        error = script_until_it_fails(machine)
        if error is not None and isinstance(error, LogPoisoned):
            poisoned += 1
            assert isinstance(error, OutOfSpace) == (number == errno.ENOSPC), error
        heal_and_recover(machine, mode, at)
    assert poisoned > 50


@pytest.mark.parametrize("landed", [False, True])
def test_after_a_failed_sync_nothing_is_believed_until_it_was_written_again(landed: bool) -> None:
    """After a failed fsync Linux calls the pages clean: reading shows what the disk does not have, and a
    second sync succeeds. Only a rewrite at the next opening makes it durable."""
    for at in range(1, operations_of_the_script() + 1):
        machine = Machine(SCRIPT_OPTIONS)
        rng = random.Random(at)

        def fault_of(operation: Operation, at: int = at, rng: random.Random = rng) -> Fault | None:
            if operation.number == at and operation.kind == "sync":
                return Fault(error=errno.EIO, landed=rng if landed else None)
            return None

        machine.files.fault = fault_of
        if script_until_it_fails(machine) is None:
            continue
        # The process dies, the machine goes on: the cache is there, and the next life believes what it sees.
        machine.files.fault = None
        if machine.log is not None:
            machine.log.close()
        machine.crash("keep", rng)
        machine.recover()
        # Now the power fails as well.
        machine.crash("lose", rng)
        machine.recover()
        machine.close()


@pytest.mark.parametrize("taken_bytes", [0, 1, 511, 100_000])
def test_a_write_that_stops_half_way_with_an_error_is_torn_and_no_more(taken_bytes: int) -> None:
    """The half that went in is not synced, and must not be taken for entries."""
    for at in range(1, operations_of_the_script() + 1, 2):
        machine = Machine(SCRIPT_OPTIONS)
        machine.files.fault = nth(at, Fault(error=errno.EIO, taken_bytes=taken_bytes))
        script_until_it_fails(machine)
        heal_and_recover(machine, "keep", at)


@pytest.mark.parametrize("taken_bytes", [1, 700])
def test_a_file_system_that_takes_a_little_at_a_time_gets_everything(taken_bytes: int) -> None:
    """A short write is no error: signals and quotas make them."""
    machine = Machine(SCRIPT_OPTIONS)
    shortened = 0

    def fault_of(operation: Operation) -> Fault | None:
        nonlocal shortened
        # Zeros and footers go in one piece now and then, or the test would take a minute.
        if operation.kind == "write" and operation.size < 2000 and shortened < 2000:
            shortened += 1
            return Fault(taken_bytes=taken_bytes)
        return None

    machine.files.fault = fault_of
    script(machine)
    assert shortened > 20
    machine.sync()
    machine.oracle.verify(machine.log)
    machine.close()
    machine.crash("lose", random.Random(0))
    machine.recover()


def test_a_slow_disk_is_slow_and_nothing_else() -> None:
    """Hints are due, ages are reached, while one sync takes an hour."""
    machine = Machine(SCRIPT_OPTIONS)
    machine.files.fault = lambda operation: (
        Fault(slow_s=1200) if operation.kind in ("sync", "write") else None
    )
    script(machine)
    machine.sync()
    machine.oracle.verify(machine.log)


# ---------------------------------------------------------------------------- what is not worth an error


@pytest.mark.parametrize("name", [SPARE, HINT_TEMPORARY, HINT])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_spares_and_hints_may_fail(name: str, number: int) -> None:
    """They make the log faster to write and to open; the entries are as durable without."""
    machine = Machine(SCRIPT_OPTIONS)
    machine.open()
    failed = 0

    def fault_of(operation: Operation) -> Fault | None:
        nonlocal failed
        path = operation.new_path if operation.kind == "rename" else operation.path
        if path == f"{DIRECTORY}/{name}" and operation.kind in ("create", "write", "sync", "rename"):
            failed += 1
            return Fault(error=number)
        return None

    machine.files.fault = fault_of
    for _ in range(6):
        machine.append(machine.put(3000))
        machine.idle(2)
    assert failed
    assert machine.log.wal.failure is None
    machine.oracle.verify(machine.log)
    machine.files.fault = None
    machine.close()
    machine.crash("lose", random.Random(0))
    machine.recover()


def test_zeros_that_do_not_fit_may_fail_while_the_entries_fit() -> None:
    """Eight megabytes of zeros for one entry of a hundred bytes is no reason to refuse it."""
    machine = Machine(LogOptions(segment_bytes=2**20))
    machine.files.free_bytes = 100_000
    machine.open()
    for _ in range(20):
        machine.append(machine.put(1000))
        machine.idle(2)
    assert machine.log.wal.failure is None
    machine.oracle.verify(machine.log)


def test_a_full_disk_poisons_and_room_and_a_reopening_heal() -> None:
    """The operator frees some space; nothing else is needed."""
    machine = Machine(LogOptions(segment_bytes=16_384, block_bytes=1024))
    machine.files.free_bytes = 200_000
    machine.open()

    def fill() -> None:
        for _ in range(300):
            machine.append(machine.put(1000))
            machine.idle(0.1)

    with pytest.raises(OutOfSpace) as raised:
        fill()
    assert raised.value.path == DIRECTORY
    assert raised.value.hint
    check_poisoned(machine.log, machine)
    machine.log.close()
    with pytest.raises((OutOfSpace, Closed)):
        machine.log.append(machine.put(1))
    machine.files.free_bytes = 10**7
    machine.recover()
    machine.append(machine.put(1000))
    machine.close()
    machine.crash("lose", random.Random(0))
    machine.recover()


def test_a_directory_on_a_full_disk_can_be_read() -> None:
    """Also by a log that was opened only after the disk was full, as long as nothing is written."""
    machine = Machine(SCRIPT_OPTIONS)
    script(machine)
    machine.close()
    machine.files.free_bytes = 0
    machine.recover()


# ---------------------------------------------------------------------------- reading


def test_an_error_while_reading_is_typed_and_harms_nothing() -> None:
    """A bad sector under one reader is not the end of the log."""
    machine = Machine(LogOptions(segment_bytes=8192, block_bytes=1024, ring_bytes_max=0))
    script(machine)
    machine.sync()
    seqs = [entry.seq for entry in machine.log.read()]
    reads = machine.files.reads
    list(machine.log.read())
    count = machine.files.reads - reads
    for at in range(1, count + 1):
        machine.files.fault = nth(machine.files.reads + at, Fault(error=errno.EIO), mutating=False)
        with pytest.raises(DiskFailed):
            list(machine.log.read())
        assert machine.log.wal.failure is None
    machine.files.fault = None
    assert [entry.seq for entry in machine.log.read()] == seqs
    machine.append(machine.put(10))


def test_a_bit_that_flips_on_the_way_is_an_error_or_makes_no_difference() -> None:
    """Never another entry, never an entry less."""
    machine = Machine(LogOptions(segment_bytes=8192, block_bytes=1024, ring_bytes_max=0))
    script(machine)
    machine.sync()
    expected = list(machine.log.read())
    reads = machine.files.reads
    list(machine.log.read())
    count = machine.files.reads - reads
    errors: list[LowwaterError] = []
    rng = random.Random(4)
    for at in range(1, count + 1):
        for _ in range(8):
            machine.files.fault = nth(
                machine.files.reads + at, Fault(flip_bit=rng.randrange(2**40)), mutating=False
            )
            try:
                assert list(machine.log.read()) == expected
            except LowwaterError as error:
                errors.append(error)
    assert len(errors) > count
    assert all(error.path is not None for error in errors)


def test_a_byte_that_rots_in_a_sealed_segment_is_found() -> None:
    """By the reader that comes to it, and by the check."""
    machine = Machine(SCRIPT_OPTIONS)
    script(machine)
    machine.close()
    name = next(name for name in machine.files.list(DIRECTORY) if name.startswith("segment-"))
    path = f"{DIRECTORY}/{name}"
    file = machine.files.open(path, write=True)
    size = file.size()
    file.sync("fsync")
    machine.open()
    for offset in range(0, size, 97):
        machine.files.flip_byte(path, offset, 1 << offset % 8)
        assert [finding for finding in machine.log.check() if finding.severity == "error"], offset
        machine.files.flip_byte(path, offset, 1 << offset % 8)
    machine.files.flip_byte(path, 200, 4)
    with pytest.raises(Corrupt) as raised:
        list(machine.log.read())
    assert raised.value.path == path
    assert machine.log.wal.failure is None


# ---------------------------------------------------------------------------- opening


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_read_only_directory_is_refused_as_such(number: int) -> None:
    """The hint says what to do; a traceback would not."""
    machine = Machine(SCRIPT_OPTIONS)
    script(machine)
    machine.close()
    before = {name: bytes(machine.files._names[name].cache) for name in machine.files._names}

    def fault_of(operation: Operation) -> Fault | None:
        writing = operation.kind not in ("open", "read", "size", "list", "make_directory")
        return Fault(error=number) if writing else None

    machine.files.fault = fault_of
    for _ in range(2):
        with pytest.raises(DirectoryNotWritable) as raised:
            machine.open()
        assert raised.value.path is not None
        assert raised.value.hint
    assert before == {name: bytes(machine.files._names[name].cache) for name in machine.files._names}
    machine.files.fault = None
    machine.recover()


def test_an_error_at_any_operation_of_an_opening_is_typed_and_leaves_the_directory_unlocked() -> None:
    """Whoever opens it again must get the log, not `DirectoryLocked` by his own process."""
    machine = Machine(SCRIPT_OPTIONS)
    script(machine)
    machine.crash("torn", random.Random(3))
    errors: list[LowwaterError] = []
    for mutating in (True, False):
        for at in range(1, 400):
            count = machine.files.operations if mutating else machine.files.reads
            machine.files.fault = nth(count + at, Fault(error=errno.EIO), mutating=mutating)
            try:
                machine.open()
            except LowwaterError as error:
                errors.append(error)
            else:
                reached = machine.files.operations if mutating else machine.files.reads
                machine.files.fault = None
                machine.close()
                if reached < count + at:
                    break
    assert len(errors) > 20
    for error in errors:
        assert isinstance(error, ReopenError)
        assert error.path is not None
    machine.recover()


# ---------------------------------------------------------------------------- with threads


def test_every_waiter_gets_the_error_of_the_write_that_failed() -> None:
    """Somebody who waits for a sync that nobody will ever do would hang."""
    files = FaultyFiles(clock=VirtualClock())
    log = Log.open("log", seams=Seams(files=files))
    gate = threading.Event()
    entered = threading.Event()

    def fault_of(operation: Operation) -> Fault | None:
        if operation.kind != "sync":
            return None
        entered.set()
        return Fault(gate=gate, error=errno.EIO)

    files.fault = fault_of
    errors: list[BaseException] = []

    def append() -> None:
        try:
            log.append(Put("b", "k", b""))
        except ReopenError as error:
            errors.append(error)

    threads = [threading.Thread(target=append) for _ in range(8)]
    threads[0].start()
    entered.wait()
    for thread in threads[1:]:
        thread.start()
    futures = [log.submit(Put("b", "k", b"")) for _ in range(8)]
    follower = iter(log.read("latest", follow=True))
    gate.set()
    for thread in threads:
        thread.join()
    assert len(errors) == 8
    assert len({id(error) for error in errors}) == 8, "a traceback belongs to one caller"
    for future in futures:
        with pytest.raises(LogPoisoned):
            future.result()
    with pytest.raises(LogPoisoned):
        next(follower)
    assert [entry.seq for entry in log.read()] == [1]
    log.close()
    files.fault = None
    files.crash(random.Random(1), "keep")
    with Log.open("log", seams=Seams(files=files)) as log:
        assert list(log.check()) == []
