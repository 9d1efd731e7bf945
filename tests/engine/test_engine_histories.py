"""The same entries give the same root and the same segments, and the same seed the same operations, whatever
happens in between."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.engine.engine_model import BUCKETS, Chance, Driver, Machine, run_by_chance, small_limits
from tests.engine.log_frames import frames_from

from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.survival import SURVIVALS
from lowwater.engine.format.entries import decode_payload
from lowwater.engine.log.log import LogOptions

HISTORIES = 200
SEEDS = 20
SEGMENT_BYTES = 8192
WRITES = (
    "create_bucket", "delete_bucket", "put", "put_many", "delete", "copy", "write", "snapshot",
    "drop_snapshot", "move_horizon", "checkpoint",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small_limits() -> Iterator[None]:
    with small_limits():
        yield


# ---------------------------------------------------------------------------- the history


class Call(NamedTuple):
    """A write that was acknowledged, with the time and the seqs that it got."""

    now_us: int
    name: str
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    seq_first: int
    seq_last: int
    result: Any


class History(NamedTuple):
    calls: list[Call]
    units: list[tuple[list[int], list[bytes]]]  # what a log takes in one call: an entry or a group
    root: str
    checkpoints: dict[int, str]  # all that were made, by seq
    segments: dict[str, bytes]
    live: frozenset[int]  # seqs of entries that a live key has its value from
    referred: frozenset[int]  # seqs of entries whose values copies refer to
    seal_us: int


class Recorder:
    """A database that notes its writes."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._db = machine.db
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._db, name)
        return partial(self._write, name, real) if name in WRITES else real

    def _write(self, name: str, real: Any, *arguments: Any, **named: Any) -> Any:
        now_us = self._machine.clock.now_us()
        seq_first = self._db.marks().applied + 1
        result = real(*arguments, **named)
        self.calls.append(Call(now_us, name, arguments, named, seq_first, self._db.marks().applied, result))
        return result


def new_machine(rng: random.Random, seed: int) -> Machine:
    """Everything that a process may choose for itself."""
    return Machine(
        seed=seed,
        pool_bytes_max=rng.choice((8000, 20_000, 100_000, 2**20)),
        checkpoint_interval_s=rng.choice((None, 0.5, 5.0)),
        log_options=LogOptions(
            segment_bytes=SEGMENT_BYTES,
            block_bytes=1024,
            sync_mode=rng.choice(("fsync", "fdatasync")),
            batch_bytes_max=rng.choice((1, 3000, 2**20)),
            ring_bytes_max=rng.choice((0, 2**20)),
        ),
    )


@cache
def history() -> History:
    rng = random.Random("history")
    machine = new_machine(rng, 0)
    driver = Driver(machine)
    driver.open()
    machine.db = recorder = Recorder(machine)
    chance = Chance(driver, rng)
    for bucket in BUCKETS[:2]:
        driver.create_bucket(bucket)
    writes = [name for name in chance.names if name in (*WRITES, "put_if", "advance", "root", "step")]
    weights = [Chance.WEIGHTS[name] for name in writes]
    for name in rng.choices(writes, weights, k=600):
        getattr(chance, name)()
    driver.compare()
    root = driver.model.root()
    log = recorder._db._log
    frames = frames_from(log, machine.files, 1)
    entries = [decode_payload(frame.seq, frame.payload) for frame in frames]
    units: list[tuple[list[int], list[bytes]]] = []
    for frame, entry in zip(frames, entries, strict=True):
        if not units or not _goes_on(units[-1], entry):
            units.append(([], []))
        units[-1][0].append(frame.seq)
        units[-1][1].append(frame.payload)
    live = {found.seq for bucket in driver.model.bucket_names() for found in driver.model.live(bucket)}
    extras = [entry.extras for entry in entries if entry.extras is not None]
    machine.db.close()
    seal_us = machine.clock.now_us() + 10**9
    return History(
        recorder.calls,
        units,
        root,
        {call.seq_last: call.result for call in recorder.calls if call.name == "checkpoint"},
        sealed(machine, seal_us),
        frozenset(live),
        frozenset(each.value_ref.seq for each in extras if each.value_ref is not None),
        seal_us,
    )


def _goes_on(unit: tuple[list[int], list[bytes]], entry: Any) -> bool:
    """Whether the entry is of the same group as the ones before."""
    before = decode_payload(unit[0][-1], unit[1][-1]).extras
    last = None if before is None else before.group_seq_last
    return last is not None and entry.seq <= last


def at_time(machine: Machine, now_us: int) -> None:
    machine.clock.wall_offset_us += now_us - machine.clock.now_us()


def sealed(machine: Machine, seal_us: int) -> dict[str, bytes]:
    """All segments, the last one ended too."""
    log = machine.open_log()
    at_time(machine, seal_us)
    log.seal()
    log.close()
    segments = machine.wal_segments()
    assert len(segments) > 10
    return segments


# ---------------------------------------------------------------------------- lived through again


def look_around(machine: Machine, rng: random.Random) -> None:
    """What happens to one process and not to another."""
    machine.step(rng.choice((0, 0, 1, 5, 40)))
    roll = rng.random()
    if roll < 0.03:
        machine.clock.advance(rng.choice((0.1, 2)))
    elif roll < 0.05:
        machine.db.flush()
    elif roll < 0.07:
        machine.db.root()
    elif roll < 0.1 and machine.db.buckets():
        list(machine.db.scan(rng.choice(machine.db.buckets())))
    elif roll < 0.11:
        machine.db.close()
        machine.pool_bytes_max = rng.choice((8000, 100_000))
        machine.open()


def write_again(machine: Machine, rng: random.Random) -> None:
    """One life of a database that is given the rest of the calls."""
    machine.open()
    applied = machine.db.marks().applied
    for call in history().calls:
        if call.seq_last <= applied:
            continue
        at_time(machine, call.now_us)
        arguments = call.arguments
        if call.seq_first <= applied:
            assert call.name == "put_many", "a crash has divided something else"
            bucket, items = arguments
            arguments = (bucket, items[applied + 1 - call.seq_first :])
        getattr(machine.db, call.name)(*arguments, **call.named)
        assert machine.db.marks().applied == call.seq_last
        look_around(machine, rng)


def feed_again(machine: Machine, rng: random.Random, units: list[tuple[list[int], list[bytes]]]) -> None:
    """The rest of the entries go into the log, so many at a time, and the database opens on it."""
    while True:
        log = machine.open_log()
        rest = [unit for unit in units if unit[0][0] > log.seq_last]
        for unit in rest[: rng.choice((1, 20, 150, 10**6))]:
            log.append_payloads(unit[1], seqs=unit[0])
            machine.step(rng.choice((0, 0, 3)))
        done = not rest or log.seq_last == units[-1][0][-1]
        log.close()
        machine.open()
        if done:
            return
        look_around(machine, rng)
        machine.step(rng.choice((0, 3, 30)))
        if rng.random() < 0.5:
            machine.db.close()
        else:
            machine.crash(rng.choice(SURVIVALS), rng)


def live_through(number: int, units: list[tuple[list[int], list[bytes]]] | None = None) -> Machine:
    """History `number`: crashes as often as they come, until all is done."""
    rng = random.Random(f"histories {number}")
    machine = new_machine(rng, number)
    crashing = rng.choice((0, 0.5, 0.9))
    while True:
        at_time(machine, 1_700_000_000_000_000)
        if rng.random() < crashing:
            crashing *= 0.97
            files = machine.files
            files.crash_at(files.operations + rng.randint(1, 400), after=rng.random() < 0.5)
        try:
            if units is None and number % 2:
                write_again(machine, rng)
            else:
                feed_again(machine, rng, history().units if units is None else units)
            break
        except SimulatedCrash:
            machine.crash(rng.choice(SURVIVALS), rng)
            machine.pool_bytes_max = rng.choice((8000, 20_000, 2**20))
    machine.files._crash_number = None
    return machine


def compare(number: int) -> None:
    machine = live_through(number)
    try:
        assert machine.db.root() == history().root
        machine.idle()
        assert machine.db.root() == history().root
        for found in machine.db.checkpoints():
            assert found.id == history().checkpoints[found.seq]
        machine.db.close()
        assert sealed(machine, history().seal_us) == history().segments
    except AssertionError as error:
        error.add_note(f"in history {number}")
        raise


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(4))
def test_the_same_entries_give_the_same_root_and_segments(chunk: int) -> None:
    """Batches, flushes, pools, crashes and restarts are a process' own business."""
    for number in range(chunk, HISTORIES, 4):
        compare(number)


def test_a_few_histories_give_the_same_root_and_segments() -> None:
    """The fast part of the above."""
    for number in range(1000, 1006):
        compare(number)


def changed(seq: int) -> list[tuple[list[int], list[bytes]]]:
    """The entries with another last byte in one value."""
    units = []
    for seqs, payloads in history().units:
        if seq in seqs:
            at = seqs.index(seq)
            other = payloads[at][:-1] + bytes([payloads[at][-1] ^ 1])
            payloads = [*payloads[:at], other, *payloads[at + 1 :]]
        units.append((seqs, payloads))
    return units


def plain_puts() -> list[int]:
    """The seqs of puts with a value, without groups and conditions."""
    return [
        seqs[0]
        for seqs, payloads in history().units
        if len(seqs) == 1
        and (entry := decode_payload(seqs[0], payloads[0])).kind == "put"
        and entry.value
        and entry.extras is None
    ]


def test_one_byte_of_a_live_value_changes_the_root() -> None:
    """Otherwise equal roots would mean nothing."""
    rng = random.Random(3)
    live = [seq for seq in plain_puts() if seq in history().live]
    assert len(live) > 10
    roots = {history().root}
    chosen = rng.sample(live, 10)
    for number, seq in enumerate(chosen):
        machine = live_through(2000 + number, changed(seq))
        roots.add(machine.db.root())
    assert len(roots) == 1 + len(chosen)


def test_one_byte_of_a_dead_value_does_not() -> None:
    """The root is over what is there, not over what was."""
    rng = random.Random(4)
    dead = [seq for seq in plain_puts() if seq not in history().live and seq not in history().referred]
    for number, seq in enumerate(rng.sample(dead, 10)):
        machine = live_through(3000 + number, changed(seq))
        assert machine.db.root() == history().root
        machine.db.close()
        assert sealed(machine, history().seal_us) != history().segments


# ---------------------------------------------------------------------------- one seed, one trace


def trace(seed: int) -> str:
    driver = run_by_chance(seed, 250)
    return f"{driver.machine.files.trace} {driver.model.root()}"


PROGRAM = f"""
from tests.engine.engine_model import small_limits
from tests.engine.test_engine_histories import trace
with small_limits():
    for seed in range({SEEDS}):
        print(trace(seed))
"""


@pytest.mark.long
def test_a_seed_gives_the_same_operations_in_every_process() -> None:
    """Of files and of pages, flushes among them: a failure that cannot be repeated cannot be understood."""
    root = str(Path(__file__).resolve().parents[2])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=root,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([root, *sys.path]),
                "PYTHONHASHSEED": hash_seed,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "random")
    ]
    first = [trace(seed) for seed in range(SEEDS)]
    assert [trace(seed) for seed in range(SEEDS)] == first
    assert len(set(first)) == SEEDS
    for child in children:
        out, errors = child.communicate()
        assert child.returncode == 0, errors
        assert [line for line in out.split("\n") if len(line.split()) == 2 and len(line) == 129] == first
