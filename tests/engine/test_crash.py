"""A crash at every operation of the file system, and at every failure point, takes back no promise."""

from __future__ import annotations

import errno
import importlib
import pkgutil
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache

import pytest
from tests.shares import shares

from lowwater import engine
from lowwater.chaos.disk import Fault, FaultyFile, SimulatedCrash
from lowwater.chaos.survival import Survival
from lowwater.chaos.workload import RUNS_OPTIONS, SCRIPT_OPTIONS, Machine, script, script_of_runs
from lowwater.engine.log import recover
from lowwater.engine.log.log import LogOptions
from lowwater.engine.seams import failpoints
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.seams.seams import SyncMode
from lowwater.errors import LowwaterError

# Each mode with a seed; a `random` power loss has several outcomes worth looking at.
Loss = tuple[Survival, int]
LOSSES: tuple[Loss, ...] = (
    ("lose", 0), ("keep", 0), ("torn", 0), ("torn", 1), ("prefix", 0), ("prefix", 1),
    ("random", 0), ("random", 1), ("random", 2), ("random", 3),
)  # fmt: skip
# As many tests as keep all processors busy.
CHUNKS = 16


@cache
def operations_of_the_script(sync_mode: SyncMode = "fsync") -> int:
    machine = Machine(options_with(sync_mode))
    script(machine)
    return machine.files.operations


def options_with(sync_mode: SyncMode) -> LogOptions:
    return replace(SCRIPT_OPTIONS, sync_mode=sync_mode)


def crashed(number: int, *, after: bool, sync_mode: SyncMode = "fsync") -> Machine:
    """A machine whose program ended at this operation of the script."""
    machine = Machine(options_with(sync_mode))
    machine.files.crash_at(number, after=after)
    with pytest.raises(SimulatedCrash):
        script(machine)
    return machine


def lose_and_recover(machine: Machine, loss: Loss, salt: int) -> None:
    """Crash, come back, hold the log to its promises, and show that it can go on."""
    mode, seed = loss
    machine.crash(mode, random.Random(seed * 100_003 + salt))
    machine.recover()
    go_on(machine)


@contextmanager
def on_failure(note: str) -> Iterator[None]:
    """What it takes to repeat a failure stands below its traceback."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def go_on(machine: Machine) -> None:
    machine.append(machine.put(30))
    machine.append_group(machine.put(5), machine.put(900))
    machine.idle()
    machine.oracle.verify(machine.log)
    machine.seal()
    machine.close()
    machine.open()
    machine.oracle.verify(machine.log)
    machine.close()


def test_the_script_has_enough_crash_points() -> None:
    """Two for each operation, one before and one after it takes effect, times the losses that follow."""
    assert operations_of_the_script() * 2 * len(LOSSES) >= 2000


@pytest.mark.parametrize("chunk", shares(CHUNKS, 4))
def test_a_crash_at_any_operation_takes_back_no_promise(chunk: int) -> None:
    """An acknowledged entry that a power loss can take was never durable."""
    for number in range(1 + chunk, operations_of_the_script() + 1, CHUNKS):
        for after in (False, True):
            for loss in LOSSES:
                machine = crashed(number, after=after)
                with on_failure(f"after a crash at operation {number}, {after=}, {loss=}"):
                    lose_and_recover(machine, loss, number)


def crashed_again(number: int, loss: Loss, second: int) -> Machine | None:
    """A machine whose program ended once more, in its recovery; None where that has no more operations."""
    machine = crashed(number, after=bool(number & 8))
    machine.crash(loss[0], random.Random(loss[1] * 7 + number))
    machine.files.crash_at(machine.files.operations + second, after=bool(second & 1))
    try:
        machine.open()
    except SimulatedCrash:
        return machine
    return None


@pytest.mark.parametrize("chunk", shares(4))
def test_a_crash_at_any_operation_of_the_recovery_takes_back_no_promise(chunk: int) -> None:
    """Power that fails once often fails again, and what recovery half did must be recovered from."""
    points = 0
    for number in range(3 + 6 * chunk, operations_of_the_script() + 1, 24):
        for loss in LOSSES[1:3] + LOSSES[-2:]:
            for second in range(1, 100):
                for then in (LOSSES[0], LOSSES[-1]):
                    machine = crashed_again(number, loss, second)
                    if machine is None:
                        break
                    points += 1
                    with on_failure(
                        f"after crashes at {number} ({loss}) and {second} of the recovery ({then})"
                    ):
                        lose_and_recover(machine, then, number * 31 + second)
                else:
                    continue
                break
    assert points > 200


@pytest.mark.parametrize("part_bytes", [512, 700, 4096])
def test_a_repair_in_several_parts_takes_back_no_promise(
    part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of megabytes is written again part by part; here the parts are small instead."""
    monkeypatch.setattr(recover, "READ_BYTES", part_bytes)
    for number in range(5, operations_of_the_script() + 1, 5):
        for loss in (LOSSES[1], LOSSES[2], LOSSES[-1]):
            machine = crashed(number, after=bool(number & 1))
            with on_failure(f"after a crash at operation {number}, {loss=}"):
                lose_and_recover(machine, loss, number)


# ---------------------------------------------------------------------------- the other sync modes


def test_with_fdatasync_a_crash_takes_back_no_promise() -> None:
    """It leaves out what fsync does beyond the data, and the size of a file is part of the data."""
    for number in range(1, operations_of_the_script("fdatasync") + 1, 3):
        for loss in (LOSSES[0], LOSSES[2], LOSSES[-1]):
            machine = crashed(number, after=bool(number & 1), sync_mode="fdatasync")
            lose_and_recover(machine, loss, number)


def test_without_syncing_kill_9_takes_back_no_promise() -> None:
    """Sync mode `none` trusts the machine, not the program."""
    for number in range(1, operations_of_the_script("none") + 1):
        machine = crashed(number, after=bool(number & 1), sync_mode="none")
        lose_and_recover(machine, ("keep", 0), number)


@pytest.mark.parametrize("chunk", shares(4))
def test_without_syncing_a_power_loss_takes_nothing_of_sealed_segments_and_clean_closes(chunk: int) -> None:
    """What is left is a first part of the log, never less than what was sealed or closed in peace."""
    for number in range(1 + chunk, operations_of_the_script("none") + 1, 4):
        for loss in (LOSSES[0], *LOSSES[3:]):
            machine = crashed(number, after=bool(number & 1), sync_mode="none")
            machine.oracle.promised = machine.synced_seq()
            with on_failure(f"after a crash at operation {number}, {loss=}"):
                lose_and_recover(machine, loss, number)


# ---------------------------------------------------------------------------- runs of batches


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts each call had that wrote several."""
    counts: list[int] = []
    write_each = FaultyFile.write_each

    def counting(file: FaultyFile, offset: int, parts: Sequence[bytes], sync: SyncMode) -> None:
        counts.append(len(parts))
        write_each(file, offset, parts, sync)

    monkeypatch.setattr(FaultyFile, "write_each", counting)
    return counts


def run_of_batches(sync_mode: SyncMode) -> Machine:
    return Machine(replace(RUNS_OPTIONS, sync_mode=sync_mode))


@pytest.mark.parametrize("chunk", shares(4))
@pytest.mark.parametrize("sync_mode", ["fsync", "fdatasync"])
def test_a_crash_within_a_run_of_batches_takes_back_no_promise(
    sync_mode: SyncMode, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch begins after the sync of the one before it, also where nobody looks in between: a crash leaves
    whole batches and a torn one, and never a batch behind a torn one, which would be corruption."""
    # Recovery sees the difference where it reckons with the largest batch of this script, and not of 32 MiB.
    monkeypatch.setattr(recover, "_TORN_BYTES_MAX", 1400)
    runs = count_runs(monkeypatch)
    machine = run_of_batches(sync_mode)
    script_of_runs(machine)
    assert max(runs) > 5
    for number in range(1 + chunk, machine.files.operations + 1, 4):
        for loss in LOSSES[:3] + LOSSES[-3:]:
            machine = run_of_batches(sync_mode)
            machine.files.crash_at(number, after=bool(loss[1] & 1))
            with pytest.raises(SimulatedCrash):
                script_of_runs(machine)
            with on_failure(f"after a crash at operation {number}, {loss=}"):
                lose_and_recover(machine, loss, number)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_an_error_within_a_run_of_batches_fails_all_that_waited(error: int) -> None:
    """Those before it are durable, and nobody was told so: after an error the next opening decides."""
    script_of_runs(counted := run_of_batches("fsync"))
    failed = 0
    for number in range(1, counted.files.operations + 1):
        machine = run_of_batches("fsync")
        machine.files.fault = lambda operation, number=number: (
            Fault(error=error) if operation.number == number and operation.kind in ("write", "sync") else None
        )
        try:
            script_of_runs(machine)
        except LowwaterError:
            failed += 1
        machine.files.fault = None
        with on_failure(f"after error {error} at operation {number}"):
            lose_and_recover(machine, ("keep", 0), number)
    assert failed > 30


# ---------------------------------------------------------------------------- failure points


def load_all_points() -> list[str]:
    for module in pkgutil.iter_modules(engine.__path__, "lowwater.engine."):
        importlib.import_module(module.name)
    return sorted(failpoints.registry)


@contextmanager
def crashing_at(point: Failpoint, hit: int, machine: Machine) -> Iterator[None]:
    """The program ends when it comes to this point for the `hit`th time."""
    hits = 0

    def crash() -> None:
        nonlocal hits
        hits += 1
        if hits == hit:
            # Nothing that the program does on its way out may reach the disk.
            machine.files.crash_at(machine.files.operations + 1)
            raise SimulatedCrash(point.name)

    with point.armed(crash):
        yield


def script_with_recovery(machine: Machine) -> None:
    """The script, a power loss in the middle of a write, and what comes after it."""
    script(machine)
    machine.append_in_memory(machine.put(3000))
    machine.files.crash_at(machine.files.operations + 1, after=True)
    with pytest.raises(SimulatedCrash) as ended:
        machine.idle()
    if not str(ended.value).startswith("at operation"):
        raise ended.value
    machine.crash("torn", random.Random(5))
    machine.recover()
    go_on(machine)


@pytest.mark.parametrize("name", [name for name in load_all_points() if name.startswith("wal.")])
def test_every_failure_point_is_reached_and_survived(name: str) -> None:
    """A point that the workload does not come by would look as if it had been tested."""
    reached = 0
    for hit in range(1, 60):
        machine = Machine(SCRIPT_OPTIONS)
        try:
            with crashing_at(failpoints.registry[name], hit, machine):
                script_with_recovery(machine)
        except SimulatedCrash:
            reached += 1
        else:
            break
        lose_and_recover(machine, LOSSES[hit % len(LOSSES)], hit)
    assert reached > 0, f"the workload does not reach {name}"


def test_a_second_step_is_not_taken_after_a_crash() -> None:
    """The harness itself: a program that went on after its crash would make all of the above worthless."""
    machine = crashed(40, after=False)
    operations = machine.files.operations
    calls: tuple[Callable[[], object], ...] = (
        machine.close,
        machine.idle,
        lambda: machine.append(machine.put(1)),
    )
    for call in calls:
        with suppress(BaseException):  # a crash, or the poisoned log's error
            call()
    assert machine.files.operations == operations
