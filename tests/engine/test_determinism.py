"""The same entries give the same segments, and the same seed gives the same operations, whatever happens."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import cache

import pytest
from tests.shares import shares

from lowwater.chaos.disk import FaultyFiles, SimulatedCrash
from lowwater.chaos.survival import SURVIVALS
from lowwater.chaos.workload import CLUSTER_ID, SALT, Machine
from lowwater.engine.format.entries import Delete, Put
from lowwater.engine.format.format import FIXED, FIXED_BYTES, U64, Flag
from lowwater.engine.log.chain import create_entry, seal_entry, settings_entry
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.seams.memory import MemoryFiles

SCHEDULES = 100
SEEDS = 200

# Entries that must be given to the log in one call: one, or a group.
Unit = tuple[list[int], list[bytes]]


@cache
def history() -> list[Unit]:
    """Entries with seqs of their own, as an orchestrator hands them out: holes, groups, and all that ends a
    segment. The last one ends the last segment."""
    rng = random.Random(11)
    settings = {"segment_bytes": 16_384, "block_bytes": 2048}
    units: list[Unit] = [([1], [create_entry(CLUSTER_ID, SALT, settings).encode(5)])]
    seq, time_us, segment_start = 1, 5, 1
    for _ in range(400):
        seq += rng.choice((1, 1, 1, 2, 1000))
        time_us += rng.choice((0, 0, 3, 1_000_000)) - 1  # clocks go back, too: the log raises the time
        roll = rng.random()
        if roll < 0.03:
            units.append(([seq], [seal_entry(segment_start).encode(time_us)]))
        elif roll < 0.05:
            changes = {"segment_bytes": rng.choice((8192, 16_384, 32_768))}
            units.append(([seq], [settings_entry(changes).encode(time_us)]))
        else:
            puts = [
                Put("b", f"k{rng.randrange(50)}", rng.randbytes(rng.choice((0, 10, 300, 3000)))).encode(
                    time_us
                )
                for _ in range(rng.choice((1, 1, 1, 4)))
            ]
            puts.append(Delete("b", f"k{rng.randrange(50)}").encode(time_us))
            seqs = list(range(seq, seq + len(puts)))
            if roll < 0.3:
                units.append((seqs, [in_group(put, seqs[-1]) for put in puts]))
            else:
                units += [([one], [put]) for one, put in zip(seqs, puts, strict=True)]
            seq = seqs[-1]
    units.append(([seq + 1], [seal_entry(segment_start).encode(time_us)]))
    return units


def in_group(payload: bytes, seq_last: int) -> bytes:
    kind, _, *rest = FIXED.unpack_from(payload)
    return FIXED.pack(kind, Flag.GROUP, *rest) + U64.pack(seq_last) + payload[FIXED_BYTES:]


def calls_after(seq: int, rng: random.Random) -> list[Unit]:
    """What is left of the history, divided into calls by chance."""
    rest = [unit for unit in history() if unit[0][0] > seq]
    calls: list[Unit] = []
    most = rng.choice((1, 3, 50))
    while rest:
        count = rng.randint(1, most)
        taken, rest = rest[:count], rest[count:]
        calls.append(([s for unit in taken for s in unit[0]], [p for unit in taken for p in unit[1]]))
    return calls


def random_options(rng: random.Random) -> LogOptions:
    """Everything that a process may choose for itself."""
    return LogOptions(
        sync_mode=rng.choice(("fsync", "fdatasync", "none")),
        batch_bytes_max=rng.choice((1, 1000, 20_000, 2**20)),
        queue_bytes_max=rng.choice((5000, 100_000, 2**24)),
        ring_bytes_max=rng.choice((0, 2**20)),
        segment_bytes=rng.choice((4096, 2**20)),  # of a new log only, and this one brings its `create`
    )


def sealed_files(files: MemoryFiles | FaultyFiles, directory: str) -> dict[str, bytes]:
    """All segments, by name; there must be nothing unfinished."""
    contents: dict[str, bytes] = {}
    for name in files.list(directory):
        assert name in ("lock", "hint") or name.startswith("segment-"), name
        if name.startswith("segment-"):
            file = files.open(f"{directory}/{name}")
            contents[name] = file.read_at(0, file.size())
            file.close()
    return contents


class Encoded:
    """An entry that has its payload, and its time, already."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def encode(self, _time_us: int) -> bytes:
        return self._payload


def first_entry() -> Encoded:
    return Encoded(history()[0][1][0])


@cache
def reference() -> dict[str, bytes]:
    """The segments that one call for each entry gives, without any trouble."""
    files = MemoryFiles()
    with Log.open("log", seams=Seams(files=files), create=first_entry()) as log:
        for seqs, payloads in history()[1:]:
            log.append_payloads(payloads, seqs=seqs)
    segments = sealed_files(files, "log")
    assert len(segments) > 20
    return segments


@pytest.mark.parametrize("chunk", shares(4))
def test_segments_do_not_depend_on_batching_and_crashes(chunk: int) -> None:
    """Replicas that crash and batch as they do must ship the same objects under the same names."""
    crashes = 0
    for schedule in range(chunk, SCHEDULES, 4):
        rng = random.Random(f"crashes {schedule}")
        machine = Machine(random_options(rng), schedule)
        done = False
        while not done:
            if rng.random() < 0.7:
                machine.files.crash_at(
                    machine.files.operations + rng.randint(1, 150), after=rng.random() < 0.5
                )
            machine.options = replace(random_options(rng), segment_bytes=machine.options.segment_bytes)
            try:
                live_once(machine, rng)
                done = True
            except SimulatedCrash:
                crashes += 1
                machine.crash(rng.choice(SURVIVALS), rng)
        assert sealed_files(machine.files, "log") == reference(), f"schedule {schedule}"
    assert crashes > SCHEDULES // 8


def live_once(machine: Machine, rng: random.Random) -> None:
    machine.open(create=first_entry())
    log = machine.log
    for seqs, payloads in calls_after(log.seq_last, rng):
        if rng.random() < 0.5:
            log.append_payloads(payloads, seqs=seqs)
        else:
            log.submit_payloads(payloads, seqs=seqs)
        if rng.random() < 0.2:
            machine.idle(rng.choice((0, 0.7)))
    log.sync()
    log.close()


@pytest.mark.parametrize("chunk", shares(4))
def test_segments_do_not_depend_on_the_timing_of_threads(chunk: int) -> None:
    """Batches form by chance, and footers and spares are made while entries arrive."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for schedule in range(chunk, SCHEDULES, 4):
            assert segments_by_threads(random.Random(f"threads {schedule}")) == reference(), schedule
    finally:
        sys.setswitchinterval(interval)


def segments_by_threads(rng: random.Random) -> dict[str, bytes]:
    files = MemoryFiles()
    log = Log.open("log", options=random_options(rng), seams=Seams(files=files), create=first_entry())
    calls = iter(calls_after(1, rng))
    turn = threading.Lock()
    futures: list[Future[int]] = []
    failures: list[BaseException] = []
    seen: list[int] = []
    blocking = rng.choice((0, 0.1, 0.9))
    chances = random.Random(rng.random())

    def append() -> None:
        try:
            while True:
                with turn:  # whoever orders entries gives them to the log in order
                    call = next(calls, None)
                    if call is None:
                        return
                    if chances.random() < blocking:
                        log.append_payloads(call[1], seqs=call[0])
                    else:
                        futures.append(log.submit_payloads(call[1], seqs=call[0]))
        except BaseException as error:  # noqa: BLE001 - the test's own thread raises it
            failures.append(error)

    reader = threading.Thread(target=lambda: seen.extend(e.seq for e in log.read(follow=True)))
    threads = [threading.Thread(target=append) for _ in range(rng.choice((1, 3)))]
    for thread in (reader, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    for future in futures:
        future.result()
    log.close()
    reader.join()
    assert failures == []
    assert seen == [seq for seqs, _ in history() for seq in seqs]
    return sealed_files(files, "log")


# ---------------------------------------------------------------------------- one seed, one trace

TRACES = f"""
from lowwater.chaos.workload import random_workload
for seed in range({SEEDS}):
    print(random_workload(seed))
"""


@pytest.mark.long
def test_a_seed_gives_the_same_operations_in_every_process() -> None:
    """A failure that cannot be repeated cannot be understood. Hashing differs from process to process."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", TRACES],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("0", "1", "42", "random")
    ]
    outputs = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0] * 4, outputs[0][1]
    traces = [out.split("\n")[-SEEDS - 1 : -1] for out, _ in outputs]
    for seed, of_seed in enumerate(zip(*traces, strict=True)):
        assert len(set(of_seed)) == 1, f"seed {seed}"
    assert len(set(traces[0])) == SEEDS, "different seeds do different things"
