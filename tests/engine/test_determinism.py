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

from lowwater.chaos.disk import FaultyFiles, SimulatedCrash
from lowwater.chaos.survival import SURVIVALS
from lowwater.chaos.workload import CLUSTER_ID, SALT, Machine
from lowwater.engine.chain import create_entry, seal_entry, settings_entry
from lowwater.engine.entries import Delete, Put
from lowwater.engine.format import FIXED, FIXED_BYTES, U64, Flag
from lowwater.engine.log import Log, LogOptions, Seams
from lowwater.engine.memory import MemoryFiles

SCHEDULES = 60
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
                Put("b", f"k{rng.randrange(50)}", rng.randbytes(rng.choice((0, 10, 300, 3000)))).encode(time_us)
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


@cache
def reference() -> dict[str, bytes]:
    """The segments that one call an entry gives, without any trouble."""
    files = MemoryFiles()
    log = Log.open("log", seams=Seams(files=files), create=False) if False else None
    assert log is None
    with Log.open("log", seams=Seams(files=files), create=_first_entry()) as log:
        for seqs, payloads in history()[1:]:
            log.append_payloads(payloads, seqs=seqs)
    segments = sealed_files(files, "log")
    assert len(segments) > 20
    return segments
