"""Crashes and failures of the disk at every operation of a checkpoint: it is there as a whole or not at all,
the next life makes it, and its bytes are those of an undisturbed one."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from functools import cache

import pytest
from tests.engine.engine_model import Driver, Machine, small_limits
from tests.engine.test_engine_crash import LOSSES, on_failure, reach_failure_point

from lowwater.chaos.disk import Fault, Operation, SimulatedCrash
from lowwater.engine.log.log import LogOptions
from lowwater.errors import DiskFull, LowwaterError, ReopenError

CHUNKS = 4
DIRECTORIES = ("checkpoints", "packs")


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("lowwater.engine.checkpoint.packing.PACK_BYTES", 1500)
    with small_limits():
        yield


def new_driver() -> Driver:
    options = LogOptions(segment_bytes=8192, block_bytes=1024)
    return Driver(Machine(pool_bytes_max=40_000, log_options=options))


def script(driver: Driver) -> None:
    """Three checkpoints with several packs each, of which the last takes the first one's place."""
    d, value = driver, driver.value
    d.open()
    d.create_bucket("a")
    d.put_many("a", [(f"{n:02}", value(60)) for n in range(60)])
    d.put("a", "large", value(700), {"n": "1"})
    d.checkpoint()
    d.machine.step(3)
    for n in range(20, 32):
        d.delete("a", f"{n:02}")
    d.copy("a", "large", "a", "copy")
    d.snapshot("x")
    d.checkpoint()
    d.put_many("a", [(f"{n:02}", value(50)) for n in range(10, 25)])
    d.checkpoint()
    d.machine.idle()
    d.put("a", "last", value(3))


def files_of(driver: Driver) -> dict[str, bytes]:
    found = {}
    files = driver.machine.files
    for directory in DIRECTORIES:
        for name in files.list(f"db/{directory}"):
            file = files.open(f"db/{directory}/{name}")
            found[name] = file.read_at(0, file.size())
            file.close()
    return found


def finish(driver: Driver) -> dict[str, bytes]:
    """What was under way is made, one more is made, and nothing else is left."""
    driver.machine.idle()
    assert driver.db._state.checkpoints_due == []
    driver.compare()
    due_before = files_of(driver) if driver.db.checkpoints() else {}
    if not driver.model.has_bucket("a"):
        driver.create_bucket("a")
    driver.put("a", "again", driver.value(40))
    driver.checkpoint()
    driver.machine.idle()
    driver.compare()
    assert list(driver.db.check()) == []
    needed = {pack.hex() + ".pack" for each in driver.db.checkpoints() for pack in each.index.packs}
    names = {each.path.rpartition("/")[2] for each in driver.db.checkpoints()}
    assert set(files_of(driver)) == needed | names
    return due_before


@cache
def undisturbed() -> tuple[int, dict[str, bytes]]:
    """How many operations the script has, and every file that it ever had under a final name."""
    driver = new_driver()
    written: dict[str, bytes] = {}
    seen = driver.machine.files

    def note(operation: Operation) -> Fault | None:
        if operation.kind == "rename" and any(f"/{name}/" in operation.path for name in DIRECTORIES):
            inode = seen._names[operation.path]
            written[operation.new_path.rpartition("/")[2]] = bytes(inode.cache)
        return None

    seen.fault = note
    script(driver)
    count = seen.operations
    assert sum(name.endswith(".ckpt") for name in written) == 3
    assert len(written) >= 10
    return count, written


def crash_and_finish(number: int, *, after: bool, loss: int) -> None:
    mode, salt = LOSSES[loss % len(LOSSES)]
    count, written = undisturbed()
    with on_failure(f"after a crash at operation {number} of {count}, {after=}, {mode=}, {salt=}"):
        driver = new_driver()
        driver.machine.files.crash_at(number, after=after)
        with pytest.raises(SimulatedCrash):
            script(driver)
        driver.rng = random.Random(salt * 100_003 + number)
        driver.recover(mode, again=0.2)
        for name, data in finish(driver).items():
            assert written.get(name) == data, "another file than without a crash"
        driver.close()


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_crash_at_any_operation_leaves_a_whole_checkpoint_or_none(chunk: int) -> None:
    """And the next life makes the one that was asked for, with the same bytes."""
    for number in range(1 + chunk, undisturbed()[0] + 1, CHUNKS):
        for after in (False, True):
            for loss in range(len(LOSSES)):
                crash_and_finish(number, after=after, loss=loss)


def test_some_crashes_leave_a_whole_checkpoint_or_none() -> None:
    """The fast part of the above."""
    for number in range(3, undisturbed()[0] + 1, 7):
        crash_and_finish(number, after=bool(number & 1), loss=number)


@pytest.mark.parametrize(
    "name", ["checkpoint.before_pack", "checkpoint.before_index", "checkpoint.after_index"]
)
def test_the_failure_points_of_checkpoints_are_reached_and_survived(name: str) -> None:
    """By name, so a new one is not forgotten."""
    assert reach_failure_point(name, new_driver, script, finish) >= 3


class Failing:
    """The disk fails once, at the nth operation on checkpoints."""

    def __init__(self, at: int, error: int) -> None:
        self.at = at
        self.error = error
        self.count = 0
        self.kind = ""

    def __call__(self, operation: Operation) -> Fault | None:
        if operation.kind in ("list", "open", "read", "size", "make_directory"):
            return None
        if not any(f"db/{name}" in operation.path for name in DIRECTORIES):
            return None
        self.count += 1
        if self.count == self.at:
            self.kind = operation.kind
            return Fault(error=self.error)
        return None


def failure_of(driver: Driver) -> LowwaterError | None:
    """Why a checkpoint was not made. Its entry is in the log all the same."""
    try:
        driver.checkpoint()
    except LowwaterError as error:
        for unit in driver.pending:
            driver.model.apply(unit)
        driver.pending = []
        return error
    return None


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_costs_one_checkpoint_and_nothing_else(error: int) -> None:
    """A checkpoint is a copy: without it the database goes on, and the next one is made."""
    kinds = set()
    for at in range(1, 200):
        driver = new_driver()
        driver.open()
        driver.create_bucket("a")
        driver.put_many("a", [(f"{n:02}", driver.value(60)) for n in range(40)])
        driver.checkpoint()
        driver.machine.idle()
        driver.put_many("a", [(f"{n:02}", driver.value(60)) for n in range(20)])
        failing = Failing(at, error)
        driver.machine.files.fault = failing
        failure = failure_of(driver)
        driver.machine.idle()
        if not failing.kind:
            break
        kinds.add(failing.kind)
        driver.machine.files.fault = None
        driver.put("a", "k", driver.value(10))
        driver.checkpoint()
        assert (driver.db.checkpoints()[0].index.base_seq == 0) == (failure is not None)
        assert failure is None or (
            isinstance(failure, ReopenError | DiskFull) and "make another" in failure.hint
        )
        finish(driver)
        driver.close()
    assert kinds >= {"create", "write", "sync", "rename", "sync_directory"}


def test_a_disk_that_is_full_for_long_takes_no_room_for_checkpoints_that_failed() -> None:
    """What was written of them is removed at once: the log needs the room."""
    driver = new_driver()
    driver.open()
    driver.create_bucket("a")
    driver.put_many("a", [(f"{n:02}", driver.value(200)) for n in range(60)])
    driver.checkpoint()
    driver.machine.idle()
    before = files_of(driver)
    driver.put_many("a", [(f"{n:02}", driver.value(200)) for n in range(60)])
    written = 0

    def full(operation: Operation) -> Fault | None:
        nonlocal written
        if operation.kind == "write" and any(f"db/{name}" in operation.path for name in DIRECTORIES):
            written += operation.size
            if written > 8000:
                return Fault(error=errno.ENOSPC)
        return None

    driver.machine.files.fault = full
    for number in range(3):
        driver.put("a", f"{number}", b"")
        assert failure_of(driver) is not None
    assert files_of(driver) == before
    driver.machine.files.fault = None
    finish(driver)
    driver.close()
