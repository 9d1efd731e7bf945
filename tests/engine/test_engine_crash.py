"""A crash at every operation of the file system and of the page store takes back no promise of a database."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest
from tests.engine.engine_model import Driver, Machine, small_limits

from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.survival import Survival
from lowwater.engine.format.entries import Delete, Put
from lowwater.engine.log.log import LogOptions
from lowwater.engine.seams import failpoints

Loss = tuple[Survival, int]
LOSSES: tuple[Loss, ...] = (
    ("lose", 0), ("keep", 0), ("torn", 0), ("prefix", 0), ("prefix", 1), ("random", 0), ("random", 1),
)  # fmt: skip
CHUNKS = 8


@pytest.fixture(autouse=True)
def _small_limits() -> Iterator[None]:
    with small_limits():
        yield


def new_driver(seed: int = 0) -> Driver:
    options = LogOptions(segment_bytes=8192, block_bytes=1024)
    return Driver(Machine(seed=seed, pool_bytes_max=40_000, log_options=options))


def script(driver: Driver) -> None:
    """A bit of everything that a database does, in a few hundred operations that change the disk."""
    d, machine = driver, driver.machine
    value = d.value
    d.open()
    d.create_bucket("a")
    d.create_bucket("b")
    d.put("a", "k", value(20), {"n": "1"})
    d.put_many("a", [(f"{n:02}", value(30)) for n in range(40)])
    machine.step(3)
    d.write([Put("a", "00", value(5)), Delete("a", "01"), Put("b", "big", value(700)), Put("a", "00", b"")])
    d.put("a", "large", value(1500))
    d.copy("a", "large", "b", "copy")
    d.copy("a", "k", "b", "k")
    d.flush()  # and the range is divided
    machine.idle()
    d.put_many("a", [(f"{n:02}", value(257)) for n in range(0, 40, 7)])
    d.snapshot("x")
    for n in range(20, 30):
        d.delete("a", f"{n:02}")
        if n % 4 == 0:
            machine.step(2)
    d.put("a", "25", value(9), if_absent=True)
    d.flush()
    d.get("a", "22", d.model.snapshots["x"])
    d.put_many("b", [(f"{n}", value(400)) for n in range(30)])  # more than the pool takes without flushing
    d.move_horizon(d.model.snapshots["x"])
    d.drop_snapshot("x")
    d.reopen()
    d.put_many("b", [(f"{n}", value(100)) for n in range(60)])
    machine.step(4)
    d.move_horizon(None)
    d.write([Delete("b", f"{n}") for n in range(50)])
    d.put("a", "25", value(8), if_seq=d.model.keys["a"]["25"][-1].seq)
    machine.step(9)
    for found in d.model.live("b"):
        d.delete("b", found.key)
    d.delete_bucket("b")
    d.create_bucket("c")
    d.put("c", "25", value(2000))
    d.flush()
    d.delete_bucket("c") if not d.model.live("c") else None
    d.write([Put("c", "25", value(300)), Put("c", "1", b"1")])
    machine.step(5)
    d.put("a", "last", value(3))


def go_on(driver: Driver) -> None:
    """It can be read, compared and written after whatever happened, and opened once more."""
    driver.compare()
    for bucket in ("a", "again"):
        if not driver.model.has_bucket(bucket):
            driver.create_bucket(bucket)
    driver.write([Put("a", "k", driver.value(300)), Delete("a", "00"), Put("again", "k", b"")])
    driver.put_many("again", [(f"{n}", driver.value(50)) for n in range(12)])
    driver.machine.step(3)
    driver.compare()
    driver.flush()
    driver.compare()
    driver.reopen()
    driver.compare()
    assert list(driver.db.check()) == []
    driver.close()


@cache
def operations_of_the_script() -> int:
    driver = new_driver()
    script(driver)
    driver.compare()
    assert driver.db._flusher.groups > 2
    assert len(driver.db._state.map.ranges) > 1
    return driver.machine.files.operations


def crashed(number: int, *, after: bool) -> Driver:
    """A database whose program ended at this operation of the script."""
    driver = new_driver()
    driver.machine.files.crash_at(number, after=after)
    with pytest.raises(SimulatedCrash):
        script(driver)
    return driver


@contextmanager
def on_failure(note: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def test_the_script_has_enough_crash_points() -> None:
    assert operations_of_the_script() * 2 * len(LOSSES) >= 1500


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_crash_at_any_operation_takes_back_no_promise(chunk: int) -> None:
    """What was acknowledged is there, what was not is there from its beginning on or not at all, and the
    root is the model's at the seq that was recovered."""
    for number in range(1 + chunk, operations_of_the_script() + 1, CHUNKS):
        for after in (False, True):
            for mode, salt in LOSSES:
                driver = crashed(number, after=after)
                driver.rng = random.Random(salt * 100_003 + number)
                with on_failure(f"after a crash at operation {number}, {after=}, {mode=}, {salt=}"):
                    driver.recover(mode, again=0)
                    go_on(driver)


def test_some_crashes_take_back_no_promise() -> None:
    """The fast part of the above."""
    for number in range(5, operations_of_the_script() + 1, 11):
        driver = crashed(number, after=bool(number & 1))
        with on_failure(f"after a crash at operation {number}"):
            driver.recover(LOSSES[number % len(LOSSES)][0], again=0)
            go_on(driver)


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(4))
def test_a_crash_at_any_operation_of_the_recovery_takes_back_no_promise(chunk: int) -> None:
    """Redo flushes while it goes on: what it half did must be recovered from, again and again."""
    points = 0
    for number in range(9 + 5 * chunk, operations_of_the_script() + 1, 20):
        for mode in ("lose", "keep"):
            for second in range(1, 200):
                driver = crashed(number, after=bool(number & 2))
                # A pool so small that redo has to flush.
                driver.machine.pool_bytes_max = 9000
                files = driver.machine.files
                driver.machine.crash(mode, random.Random(number))
                files.crash_at(files.operations + second, after=bool(second & 1))
                try:
                    driver.machine.open()
                    break
                except SimulatedCrash:
                    points += 1
                with on_failure(f"after crashes at {number} ({mode}) and {second} of the recovery"):
                    driver.recover(("lose", "random", "keep")[second % 3], again=0)
                    go_on(driver)
    assert points > 100


@pytest.mark.parametrize("name", ["pages.before_commit", "pages.after_commit"])
def test_the_failure_points_of_pages_are_reached_and_survived(name: str) -> None:
    assert reach_failure_point(name, new_driver, script, go_on) > 5


def reach_failure_point(
    name: str,
    new_driver: Callable[[], Driver],
    script: Callable[[Driver], object],
    go_on: Callable[[Driver], object],
) -> int:
    """Crash each time that the script comes to the point, and go on after it. How often it came there."""
    point = failpoints.registry[name]
    reached = 0
    for hit in range(1, 100):
        driver = new_driver()
        hits = 0

        def crash(driver: Driver = driver, hit: int = hit) -> None:
            nonlocal hits
            hits += 1
            if hits == hit:
                # Nothing that the program does on its way out may reach the disk.
                driver.machine.files.crash_at(driver.machine.files.operations + 1)
                raise SimulatedCrash(name)

        try:
            with point.armed(crash):
                script(driver)
        except SimulatedCrash:
            reached += 1
        else:
            break
        driver.recover(LOSSES[hit % len(LOSSES)][0], again=0)
        go_on(driver)
        driver.close()
    return reached
