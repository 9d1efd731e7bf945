"""Real power losses: a database on a real file system, on a block device that forgets what was not flushed.

Always true of what is tested here:
  - each machine has one disk, which loses its power at a write or flush that the machine's seed chooses, and
    once more, sometimes, while the database recovers;
  - after that all that was acknowledged is there, with its values, in the database and in what its log or its
    archive makes of it elsewhere, and nothing that was never asked for;
  - with sync mode `none` that does not hold, which shows that the device forgets.

Which writes are under way at that moment depends on threads, so a seed repeats the kind of a loss and not its
bytes. `POWER_LOSSES=60` has as many as have to hold once.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import pytest
from tests.chaos.forgetful_disk import FILE_SYSTEMS, SECTOR_BYTES, ForgetfulDisk, why_not_here
from tests.chaos.power_writer import BUCKET, THREADS, Changes, change_of

import lowwater
from lowwater.errors import LowwaterError

LOSSES = int(os.environ.get("POWER_LOSSES", "20"))
LOSSES_EACH = 5
MACHINES = -(-LOSSES // LOSSES_EACH)
CONTROLS, CONTROLS_MAX = 5, 30
ROOT = Path(__file__).parents[2]
# Of the test itself, beside the writer's threads.
OWN = "own"

State = dict[str, bytes]

pytestmark = [pytest.mark.long, pytest.mark.root]


@pytest.fixture(autouse=True)
def devices() -> None:
    """They are not to be had everywhere."""
    if (why := why_not_here()) is not None:
        pytest.skip(f"NOT TESTED: power losses: {why}")


class WrongContents(AssertionError):
    """Something is missing that was acknowledged, or there is what nobody asked for."""


class Writer:
    """Lives of a process that writes, each in a fork of one that has imported everything."""

    def __init__(self) -> None:
        self.pid = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.power_writer"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.orders: IO[bytes] = self.process.stdin
        self.lines: IO[bytes] = self.process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.kill()
        self.process.wait()
        self.orders.close()
        self.lines.close()

    def begin(self, **life: Any) -> None:
        self.orders.write(json.dumps(life).encode() + b"\n")
        self.orders.flush()
        word, pid = self.lines.readline().split()
        assert word == b"forked"
        self.pid = int(pid)

    def kill(self) -> None:
        """With the process that merges pages for it, if it has one."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # its group may be still to come
        self.pid = 0

    def said(self) -> Iterator[list[str]]:
        """All that it says until it is dead."""
        while (line := self.lines.readline()) != b"dead\n":
            assert line, "the process that forks has ended"
            yield line.decode().split()


class Machine:
    """A disk with a database, what was done to it, and what must be there."""

    def __init__(
        self, tmp_path: Path, seed: int, disk: ForgetfulDisk, writer: Writer, config: dict[str, Any]
    ):
        self.tmp_path = tmp_path
        self.seed = seed
        self.rng = random.Random(f"machine {seed}")
        self.disk = disk
        self.writer = writer
        # Every second pair of machines ships to a store that is not on the disk.
        self.tier = f"file://{tmp_path}/archive" if seed % 4 in (1, 2) else None
        self.config = config
        self.life = 0
        self.counts: Counter[str] = Counter()
        self.begin_anew(0)

    def begin_anew(self, number: int) -> None:
        """With a directory in which nothing is."""
        self.path = str(self.disk.place / f"data-{number}")
        # Of each thread the states that its keys may have: without and with what was under way.
        self.states: dict[str, list[State]] = {str(thread): [{}] for thread in range(THREADS)}
        self.states[OWN] = [{}]
        self.seq_acknowledged = 0
        self.seq_shipped = 0

    # ---- the loss

    def lose_power(self) -> None:
        """One life of the process, until the power goes, and the disk as that leaves it, mounted again."""
        self.life += 1
        requests = self.rng.choice(
            (self.rng.randrange(40), self.rng.randrange(400), *2 * [self.rng.randrange(1500)])
        )
        self.disk.arm(requests, unflushed=self.rng.choice((0, 0, 3, 6, 12)))
        self.writer.begin(
            path=self.path,
            seed=self.seed,
            life=self.life,
            threads=self.rng.randint(1, THREADS),
            tier=self.tier,
            config=self.config,
        )
        said: list[list[str]] = []

        def listen() -> None:
            said.extend(self.writer.said())
            self.disk.cut()  # nobody waits for a process that has ended by itself

        listener = threading.Thread(target=listen)
        listener.start()
        self.disk.wait_for_loss()
        # What is acknowledged after the device has gone has to be there as well.
        time.sleep(self.rng.choice((0, 0.05)))
        self.writer.kill()
        listener.join()
        self.take_in(said)
        self.disk.unmount()
        self.counts.update(self.disk.forget(f"{self.seed}/{self.life}"))
        self.disk.mount()

    def take_in(self, said: list[list[str]]) -> None:
        serials: dict[int, int] = {}
        for word, *numbers in said:
            assert word != "untyped", f"after the disk had gone: {' '.join(numbers)}"
            if word == "done":
                thread, serial, seq = map(int, numbers)
                assert serial == serials.get(thread, -1) + 1
                serials[thread] = serial
                self.seq_acknowledged = max(self.seq_acknowledged, seq)
                self.counts["acknowledged"] += 1
            elif word == "typed":
                self.counts[f"ended with {numbers[0]}"] += 1
            elif word == "shipped":
                self.seq_shipped = max(self.seq_shipped, int(numbers[0]))
                self.counts["shipped"] += 1
        if ["open"] not in said:
            return  # and nothing was written
        for thread in range(THREADS):
            last = serials.get(thread, -1)
            states = self.states[str(thread)]
            for serial in range(last + 1):
                for state in states:
                    for key, value in self.effects(thread, serial)[-1]:
                        change(state, key, value)
            # Of the next one nobody knows whether it was made.
            self.states[str(thread)] = [
                after(state, changes) for state in states for changes in self.effects(thread, last + 1)
            ]

    def effects(self, thread: int, serial: int) -> list[Changes]:
        """All that one change can have come to, the whole of it last."""
        way, changes = change_of(self.seed, self.life, thread, serial)
        if way == "aborted":
            return [[]]
        if way == "many":  # each is a put of its own
            return [changes[:count] for count in range(len(changes) + 1)]
        return [[], changes]

    # ---- what must hold

    def open(self) -> lowwater.Database:
        return lowwater.open(self.path, tier=self.tier, config=self.config)

    def verify(self) -> None:
        where = f"machine {self.seed}, loss {self.life}"
        with self.open() as db:
            db.create_bucket(BUCKET, exist_ok=True)
            self.require_contents(db, where)
            marks = db.marks()
            assert marks.durable >= self.seq_acknowledged, f"{where}: seqs were acknowledged that are gone"
            assert marks.hwm >= self.seq_shipped, f"{where}: what was shipped is no longer known to be"
            assert list(db.check()) == [], where
            # And writing goes on.
            key, value = f"{OWN}/{self.life % 3}", f"{self.life}".encode()
            db.put(BUCKET, key, value)
            self.states[OWN][0][key] = value
            self.require_contents(db, where)
            root = db.root()
            if self.tier is not None:
                db.ship()
                db.flush()
                self.counts["purged seqs"] = db.purge(db.purgeable_seq())
        self.require_root_elsewhere(root, where)
        found = [each for each in lowwater.check(self.path) if each.severity != "note"]
        assert not found, where
        with self.open() as db:
            assert db.root() == root, where
            self.require_contents(db, where)

    def require_contents(self, db: lowwater.Database, where: str) -> None:
        held: dict[str, State] = {thread: {} for thread in self.states}
        for found in db.scan(BUCKET):
            held[found.key.split("/")[0]][found.key] = found.value
        for thread, states in self.states.items():
            if held[thread] not in states:
                raise WrongContents(f"{where}, thread {thread}: {difference(held[thread], states[0])}")
            self.states[thread] = [held[thread]]

    def require_root_elsewhere(self, root: str, where: str) -> None:
        """A database that has only the log, or only the archive, is the same."""
        elsewhere = self.tmp_path / f"elsewhere-{self.life}"
        if self.tier is None:
            elsewhere.mkdir()
            shutil.copytree(f"{self.path}/wal", elsewhere / "wal")
        else:
            lowwater.restore(self.tier, elsewhere, clone=True)
        with lowwater.open(elsewhere) as other:
            assert other.root() == root, where
            self.require_contents(other, where)
        shutil.rmtree(elsewhere)


def change(state: State, key: str, value: bytes | None) -> None:
    if value is None:
        state.pop(key, None)
    else:
        state[key] = value


def after(state: State, changes: Changes) -> State:
    state = dict(state)
    for key, value in changes:
        change(state, key, value)
    return state


def difference(held: State, wanted: State) -> str:
    missing = [key for key in wanted if key not in held]
    other = [key for key in wanted if key in held and held[key] != wanted[key]]
    more = [key for key in held if key not in wanted]
    return (
        f"{len(missing)} keys missing {missing[:3]}, {len(other)} with other values {other[:3]}, "
        f"{len(more)} that nobody wrote {more[:3]}"
    )


def config_of(sync_mode: str) -> dict[str, Any]:
    """Everything is small, so that all of it happens within a second or two."""
    return {
        "wal": {"rotate_max_bytes": "256 KiB", "sync_mode": sync_mode},
        "engine": {"pool_bytes_max": "1 MiB", "checkpoint_interval_s": 0.05, "disk_reserve_bytes": "8 MiB"},
        "shipping": {"interval_s": 0.1},
        "retention": {"check_interval_s": 0.2, "bytes_max": "1 MiB"},
    }


@contextlib.contextmanager
def powered(tmp_path: Path, seed: int, sync_mode: str) -> Iterator[Machine]:
    file_system = ("ext4", "xfs")[seed // 2 % 2]
    if shutil.which(FILE_SYSTEMS[file_system][0][0]) is None:
        file_system = "ext4"
    # Ways in which ext4 writes data and its journal.
    options = ("", "data=writeback", "data=journal")[seed // 4 % 3] if file_system == "ext4" else ""
    with ForgetfulDisk(tmp_path / "disk", file_system, options) as disk, Writer() as writer:
        disk.make_file_system()
        disk.mount()
        yield Machine(tmp_path, seed, disk, writer, config_of(sync_mode))


@pytest.mark.parametrize("seed", range(MACHINES))
def test_nothing_acknowledged_is_lost_with_the_power(seed: int, tmp_path: Path) -> None:
    """The promise itself, with nothing simulated but the disk: both durable sync modes, file systems that
    replay their journals, and a store elsewhere that knows what was shipped."""
    with powered(tmp_path, seed, ("fsync", "fdatasync")[seed % 2]) as machine:
        for _ in range(min(LOSSES_EACH, LOSSES - seed * LOSSES_EACH)):
            machine.lose_power()
            # What recovery wrote may be lost as well.
            if machine.rng.random() < 0.3:
                machine.lose_power()
            machine.verify()
        print(f"machine {seed}, {machine.disk.file_system}: {json.dumps(machine.counts)}")
        assert machine.counts["acknowledged"] > 0
        assert machine.counts["purged seqs"] > 0 or machine.tier is None


def test_without_syncing_acknowledged_writes_are_lost(tmp_path: Path) -> None:
    """The negative control: a device that forgets nothing would let every database pass."""
    lost = number = 0
    with powered(tmp_path, 1000, "none") as machine:
        # The moment decides: right after somebody's flush nothing is lost.
        while number < CONTROLS or (not lost and number < CONTROLS_MAX):
            machine.begin_anew(number)
            machine.lose_power()
            try:
                with machine.open() as db:
                    db.create_bucket(BUCKET, exist_ok=True)
                    machine.require_contents(db, f"control {number}")
            except (LowwaterError, WrongContents):
                lost += 1
            number += 1
        print(f"control: {lost} of {number} lost, {json.dumps(machine.counts)}")
    assert lost > 0, "the device has forgotten nothing"


def test_the_device_keeps_what_was_flushed_and_forgets_of_the_rest(tmp_path: Path) -> None:
    """What all of this rests on: a sync of the loop device comes as a flush, and nothing else is one."""
    blocks = 64
    whole = mmap.mmap(-1, blocks * mmap.PAGESIZE)  # aligned, as a write past the cache has to be
    seen: Counter[bytes | str] = Counter()
    with ForgetfulDisk(tmp_path / "disk") as disk:
        for seed in range(8):
            with raw(disk) as fd:
                whole[:] = b"1" * len(whole)
                os.pwrite(fd, whole, 0)
                os.fsync(fd)
                whole[:] = b"2" * len(whole)
                for block in range(blocks // 2):
                    at = block * mmap.PAGESIZE
                    os.pwrite(fd, memoryview(whole)[at : at + mmap.PAGESIZE], at)
                disk.cut()
                disk.wait_for_loss()
                with pytest.raises(OSError, match="Errno 5"):
                    os.pwrite(fd, whole, 0)
                with pytest.raises(OSError, match="Errno 5"):
                    os.fsync(fd)
                counts = disk.forget(f"{seed}")
            assert counts["unflushed sectors"] == blocks // 2 * mmap.PAGESIZE // SECTOR_BYTES
            with raw(disk) as fd:
                os.preadv(fd, [whole], 0)
            sectors = [whole[at : at + SECTOR_BYTES] for at in range(0, len(whole), SECTOR_BYTES)]
            middle = len(sectors) // 2
            assert sectors.count(b"1" * SECTOR_BYTES) == middle + counts["forgotten sectors"]
            assert sectors.count(b"2" * SECTOR_BYTES) == middle - counts["forgotten sectors"]
            assert set(sectors[middle:]) == {b"1" * SECTOR_BYTES}
            seen.update(sectors[:middle])
            seen["torn"] += counts["torn writes"]
    assert min(seen[b"1" * SECTOR_BYTES], seen[b"2" * SECTOR_BYTES], seen["torn"]) > 0


@contextlib.contextmanager
def raw(disk: ForgetfulDisk) -> Iterator[int]:
    fd = os.open(disk.plug_in(), os.O_RDWR | os.O_DIRECT)
    try:
        yield fd
    finally:
        os.close(fd)
        disk.unplug()
