"""Workloads over a log that note what they were promised, on a disk that forgets.

Always true:
  - a `Machine` runs a log in one thread from one seed: its disk, its clock and its background steps;
  - an `Oracle` knows every entry by its seq from before it was given to the log, and what was promised of it;
  - a promise is the return of an append, or a reader that saw an entry. Both hold for all that comes before,
    because frames become durable in the order of their seqs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from lowwater.chaos.clock import SeededRandomness, VirtualClock
from lowwater.chaos.disk import FaultyFiles, SimulatedCrash
from lowwater.chaos.runner import StepRunner
from lowwater.chaos.survival import SURVIVALS, Survival
from lowwater.engine.format.entries import Delete, Entry, Put, Writable, decode_payload
from lowwater.engine.format.format import Extras
from lowwater.engine.log.chain import create_entry, seal_entry, settings_entry
from lowwater.engine.log.log import Log, LogOptions, Seams

DIRECTORY = "log"
CLUSTER_ID = bytes(range(16))
SALT = bytes(range(16, 32))


class Oracle:
    """What a log must hold after whatever happened to it."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.group_ends: dict[int, int] = {}
        self.promised = 0

    def expect(self, entries: Sequence[Entry]) -> None:
        """These are on their way: after a crash a first part of them may be there."""
        for entry in entries:
            self.entries[entry.seq] = entry

    def promise(self, seq: int) -> None:
        self.promised = max(self.promised, seq)

    def verify(self, log: Log) -> None:
        """Compare the log with what was promised. What it holds beyond counts as promised from now on, and
        what it does not hold was never there: its seqs may be given to other entries."""
        held = list(log.read())
        assert [entry.seq for entry in held] == sorted({entry.seq for entry in held}), (
            "out of order, or twice"
        )
        last = held[-1].seq if held else 0
        assert last >= self.promised, f"seq {self.promised} was promised, and the log ends with {last}"
        expected = [entry for seq, entry in sorted(self.entries.items()) if seq <= last]
        for mine, found in zip(expected, held, strict=True):
            assert mine == found, f"{mine} became {found}"
        if held and held[-1].extras is not None:
            assert held[-1].extras.group_seq_last in (None, last), "a group was divided"
        findings = list(log.check())
        assert findings == [], findings
        assert log.seq_last == last, "the next seq does not follow what is there"
        self.entries = {entry.seq: entry for entry in held}
        self.promised = last


@dataclass
class Machine:
    """A log and everything under it. `open` begins a life of the program, `crash` ends it."""

    options: LogOptions
    seed: int = 0
    files: FaultyFiles = field(init=False)
    clock: VirtualClock = field(default_factory=VirtualClock)
    oracle: Oracle = field(default_factory=Oracle)
    log: Any = None
    runner: StepRunner = field(init=False)

    def __post_init__(self) -> None:
        self.files = FaultyFiles(clock=self.clock)
        self.rng = random.Random(self.seed)
        self.randomness = SeededRandomness(self.seed)
        self.serial = 0
        self.closed_seq = 0

    # ------------------------------------------------------------------ lives

    def open(self, create: Writable | None = None) -> None:
        self.runner = StepRunner(self.clock)
        seams = Seams(
            files=self.files,
            clock=self.clock,
            randomness=self.randomness,
            runner=self.runner,
            owner=f"life {self.files.life}",
        )
        settings = {"segment_bytes": self.options.segment_bytes, "block_bytes": self.options.block_bytes}
        create = create or create_entry(CLUSTER_ID, SALT, settings)
        created = decode_payload(1, create.encode(self.clock.now_us()))
        self.oracle.entries.setdefault(1, created)
        self.log = Log.open(DIRECTORY, options=self.options, seams=seams, create=create)
        if not self.oracle.promised and list(self.log.read()) == [created]:
            # Nothing survived of the log that was being made: this is another one, with a time of its own.
            self.oracle.entries = {1: created}

    def close(self) -> None:
        self.log.close()
        self.closed_seq = self.log.seq_last

    def synced_seq(self) -> int:
        """What survives a power loss also with sync mode `none`: what was sealed, or closed in peace."""
        segments = self.log.wal.store.segments if self.log is not None else []
        return max(self.closed_seq, segments[-1].seq_last if segments else 0)

    def crash(self, mode: Survival, rng: random.Random) -> None:
        """The program is gone; of what was not synced the disk keeps what the mode says."""
        self.files.crash(rng, mode)

    def recover(self) -> None:
        """Open after a crash and hold the log to its promises."""
        self.open()
        self.oracle.verify(self.log)

    # ------------------------------------------------------------------ entries

    def put(self, size: int) -> Put:
        """An entry that no other is equal to."""
        self.serial += 1
        value = (b"%d " % self.serial) * (size // len(b"%d " % self.serial) + 1)
        metadata = {"n": str(self.serial)} if self.serial % 5 == 0 else None
        return Put("bücher", f"key {self.serial}", value[:size], metadata)

    def _expect(self, entries: Sequence[Writable], *, group: bool = False) -> None:
        time_us = max(self.clock.now_us(), self.log.chain.time_us)
        seq_first = self.log.seq_last + 1
        expected = [
            decode_payload(seq, entry.encode(time_us)) for seq, entry in enumerate(entries, seq_first)
        ]
        if group:
            extras = Extras(group_seq_last=expected[-1].seq)
            expected = [entry._replace(extras=extras) for entry in expected]
        self.oracle.expect(expected)

    def append(self, *entries: Writable) -> None:
        self._expect(entries)
        self.oracle.promise(self.log.append(*entries))

    def append_group(self, *entries: Writable) -> None:
        self._expect(entries, group=True)
        self.oracle.promise(self.log.append_group(*entries))

    def append_in_memory(self, *entries: Writable) -> None:
        self._expect(entries)
        self.log.append(*entries, ack="memory")

    def submit(self, *entries: Writable) -> None:
        self._expect(entries)
        future = self.log.submit(*entries)
        future.add_done_callback(self._keep_promise)

    def _keep_promise(self, done: Future[int]) -> None:
        if done.exception() is None:
            self.oracle.promise(done.result())

    def append_with_holes(self, step: int, *entries: Writable) -> None:
        seqs = [self.log.seq_last + step * number for number in range(1, len(entries) + 1)]
        payloads = [entry.encode(max(self.clock.now_us(), self.log.chain.time_us)) for entry in entries]
        self.oracle.expect([decode_payload(seq, data) for seq, data in zip(seqs, payloads, strict=True)])
        self.oracle.promise(self.log.append_payloads(payloads, seqs=seqs))

    def seal(self) -> None:
        if self.log.chain.body_bytes:
            self._expect([seal_entry(self.log.chain.seq_first)])
            self.oracle.promise(self.log.seal())

    def sync(self) -> None:
        self.oracle.promise(self.log.sync())

    def read(self) -> None:
        """What a reader saw is as good as promised."""
        for entry in self.log.read():
            assert self.oracle.entries[entry.seq] == entry
            self.oracle.promise(entry.seq)

    # ------------------------------------------------------------------ time

    def idle(self, seconds: float = 0) -> None:
        """Let the background do what there is to do."""
        self.clock.advance(seconds)
        self.runner.run_until_idle(self.rng)

    def step(self) -> None:
        self.runner.run_one(self.rng)


# ---------------------------------------------------------------------------- the scripted workload

SCRIPT_OPTIONS = LogOptions(segment_bytes=8192, block_bytes=1024)


def script(machine: Machine) -> None:
    """A bit of everything that a log does, in a few hundred operations of the file system."""
    m = machine
    m.open()
    m.read()
    m.append(m.put(20))
    m.append(*[m.put(50) for _ in range(5)])
    m.append_group(m.put(10), m.put(600), Delete("bücher", "key 1"))
    m.idle()
    m.append(m.put(1500))
    m.idle(1.1)  # a hint; and a spare, because a quarter of the segment is full
    m.append_in_memory(m.put(100))
    m.append_in_memory(m.put(0), m.put(700))
    m.sync()
    m.submit(m.put(40), m.put(41))
    m.submit(m.put(42))
    m.step()
    m.step()
    m.read()
    m.append(m.put(4000))
    m.append(m.put(3000))  # ends the segment by its size
    m.append(m.put(30))  # before the footer is built
    m.idle()
    m.seal()
    m.seal()
    m.append(settings_entry({"segment_bytes": 12_288, "block_bytes": 2048}))
    m.append_with_holes(7, m.put(5), m.put(900), m.put(6))
    m.idle(0.5)
    m.append(*[m.put(1100) for _ in range(26)])  # ends two segments, and begins a third
    m.append_group(m.put(2500), m.put(2500), m.put(2500), m.put(2500), m.put(2500), m.put(1))
    m.step()
    m.append_in_memory(m.put(333))
    m.close()
    m.open()
    m.append(m.put(77))
    m.idle(1.5)
    m.append(m.put(5000))
    m.submit(m.put(5001))
    m.idle()
    m.append_group(m.put(9), m.put(8))
    m.seal()
    m.append(m.put(1))
    m.read()
    m.append_in_memory(m.put(222))


# Batches of one or two entries: what waits is many of them.
RUNS_OPTIONS = replace(SCRIPT_OPTIONS, batch_bytes_max=900)


def script_of_runs(machine: Machine) -> None:
    """Entries that wait for the writer thread, so that it writes many batches in one call."""
    m = machine
    m.open()
    m.append(m.put(20))
    for count in (2, 14):
        for number in range(count):
            m.submit(m.put(100 + 97 * number % 700))
        m.step()
        m.read()
        m.step()
        m.append(m.put(300))  # by the caller, what is left of the others before it
    m.idle(1.5)
    for number in range(6):
        m.append_in_memory(m.put(50 * number), m.put(5))
        m.submit(m.put(400), m.put(401))
    m.idle()
    m.close()
    m.open()
    for _ in range(8):
        m.submit(m.put(450))
    m.step()
    m.submit(m.put(1200))  # more than a batch by itself
    m.idle()
    m.sync()


# ---------------------------------------------------------------------------- the random workload


def random_workload(seed: int, *, actions: int = 60) -> str:
    """Appends, seals, readers, idle times, closes and crashes from one seed, on a log that is held to its
    promises after each crash. Returns a hash over all operations of the file system."""
    rng = random.Random(seed)
    options = LogOptions(
        sync_mode=rng.choice(("fsync", "fsync", "fdatasync", "none")),
        segment_bytes=rng.choice((4096, 8192, 16_384)),
        block_bytes=rng.choice((1024, 4096)),
        batch_bytes_max=rng.choice((512, 4096, 2**20)),
        ring_bytes_max=rng.choice((0, 2000, 2**20)),
        sync_interval_ms=rng.choice((0, 0, 50)),
    )
    machine = Machine(options, seed)
    machine.open()
    for _ in range(actions):
        try:
            if rng.random() < 0.1:
                machine.files.crash_at(
                    machine.files.operations + rng.randint(1, 12), after=rng.random() < 0.5
                )
            _random_action(machine, rng)
        except SimulatedCrash:
            _crash_and_recover(machine, rng)
    _crash_and_recover(machine, rng)
    return machine.files.trace


def _random_action(machine: Machine, rng: random.Random) -> None:
    def puts(most: int) -> list[Put]:
        return [machine.put(rng.choice((0, 10, 100, 1000))) for _ in range(rng.randint(1, most))]

    m = machine
    match rng.choice("aaaagmmsshriiixxc"):
        case "a":
            m.append(*puts(6))
        case "g":
            m.append_group(*puts(4))
        case "m":
            m.append_in_memory(*puts(3))
        case "s":
            m.submit(*puts(3))
        case "h":
            m.append_with_holes(rng.randint(1, 1000), *puts(3))
        case "r":
            m.read()
        case "i":
            m.idle(rng.choice((0, 0.01, 0.6, 2)))
        case "x":
            m.step()
        case "c":
            if rng.random() < 0.5:
                m.seal()
            elif rng.random() < 0.5:
                m.append(settings_entry({"segment_bytes": rng.choice((4096, 12_288))}))
            else:
                m.close()
                m.open()


def _crash_and_recover(machine: Machine, rng: random.Random) -> None:
    """Power fails, and may fail again while the log is being opened."""
    while True:
        mode = rng.choice(SURVIVALS)
        if mode != "keep" and machine.options.sync_mode == "none":
            machine.oracle.promised = machine.synced_seq()
        machine.crash(mode, rng)
        if rng.random() < 0.3:
            machine.files.crash_at(machine.files.operations + rng.randint(1, 8), after=rng.random() < 0.5)
        try:
            machine.recover()
        except SimulatedCrash:
            continue
        return
