"""What the reference documents claim in figures, measured: an upload cycle of 10 MB, how long a reader takes
until its first entry, and how often one that follows the log finds it in memory.

Always true: a cycle begins when its bytes are durable and ends when they count as shipped; a cold reader
begins in a process that knows nothing of the segment that it reads.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from array import array
from typing import Any

from bench import payloads
from bench.loops import Contender, Job, Meter, Result
from bench.shipping_jobs import (
    AT_ONCE,
    BUCKET,
    PART_BYTES,
    SERVER,
    VALUE_BYTES,
    only_in_the_store,
    opened,
    server,
)

CYCLE_BYTES = 10_000_000
CYCLES_MIN = 5
SEGMENTS, SEGMENT_BYTES = 40, 2_000_000
HOT_ENTRIES, HOT_READERS = 20_000, 2000


# ---------------------------------------------------------------------------- a cycle of 10 MB


def _cycle_values() -> list[bytes]:
    source = random.Random(payloads.SEED)
    return [source.randbytes(VALUE_BYTES) for _ in range(CYCLE_BYTES // VALUE_BYTES + 1)]


def _of_cycles(meter: Meter, latencies: array[float], size: int) -> Result:
    took_s = sum(latencies)
    return meter.result(len(latencies), took_s, latencies) | {"rate": size * len(latencies) / took_s}


def cycle(job: Job) -> Result:
    """Write 10 MB, and then: how long until they are in the store, recorded, and count."""
    values = _cycle_values()
    with server(job) as (scratch, started), opened(scratch / "database", started) as db:
        db.create_bucket(BUCKET)
        db.ship()
        latencies = array("d")
        meter = Meter(job)
        ends_s = time.perf_counter() + job.seconds
        while len(latencies) < CYCLES_MIN or time.perf_counter() < ends_s:
            db.put_many(BUCKET, [(f"{number:04}", value) for number, value in enumerate(values)])
            began_s = time.perf_counter()
            db.ship()
            latencies.append(time.perf_counter() - began_s)
        return _of_cycles(meter, latencies, len(values) * VALUE_BYTES)


def cycle_raw(job: Job) -> Result:
    """The same bytes through OpenDAL alone, as an object each time."""
    import opendal

    data = b"".join(_cycle_values())
    with server(job) as (_, started):
        operator = opendal.Operator("s3", bucket="lowwater", root="/raw", **started.options)
        latencies = array("d")
        meter = Meter(job)
        ends_s = time.perf_counter() + job.seconds
        while len(latencies) < CYCLES_MIN or time.perf_counter() < ends_s:
            began_s = time.perf_counter()
            with operator.open(f"{len(latencies)}", "wb", chunk=PART_BYTES, concurrent=AT_ONCE) as target:
                target.write(data)
            latencies.append(time.perf_counter() - began_s)
        return _of_cycles(meter, latencies, len(data))


# ---------------------------------------------------------------------------- until the first entry


def _first_entries(job: Job, db: Any, seqs: list[int]) -> Result:
    latencies = array("d")
    meter = Meter(job)
    for seq in seqs:
        began_s = time.perf_counter()
        entry = next(db.log(seq))
        latencies.append(time.perf_counter() - began_s)
        assert entry.seq == seq
    return meter.result(len(latencies), sum(latencies), latencies)


def reader_hot(job: Job) -> Result:
    """Of entries in the live tail."""
    with server(job) as (scratch, _), opened(scratch / "database", None) as db:
        db.create_bucket(BUCKET)
        values = payloads.values(payloads.VALUE_BYTES, 1000)
        for first in range(0, HOT_ENTRIES, 1000):
            db.put_many(BUCKET, [(f"{first + n:06}", value) for n, value in enumerate(values)])
        seqs = random.Random(payloads.SEED).choices(range(2, db.marks().durable), k=HOT_READERS)
        return _first_entries(job, db, seqs)


def reader_cold(job: Job) -> Result:
    """Of an entry in the middle of a segment that is in the store only, another one each time."""
    source = random.Random(payloads.SEED)
    with server(job) as (scratch, started):
        wal = {"rotate_max_bytes": SEGMENT_BYTES}
        with opened(scratch / "database", started, wal=wal) as db:
            db.create_bucket(BUCKET)
            for number in range(SEGMENTS * SEGMENT_BYTES // (100 * 1000)):
                db.put_many(BUCKET, [(f"{number:04}{n:03}", source.randbytes(1000)) for n in range(100)])
            only_in_the_store(db)
        shutil.rmtree(scratch / "database" / "cache", ignore_errors=True)
        with opened(scratch / "database", started, wal=wal) as db:
            db.ship()  # so that nobody but the readers asks for anything
            purged = db.marks().purged
            middles = [(each.first + each.last) // 2 for each in db.catalogue.segments if each.last <= purged]
            assert len(middles) >= SEGMENTS // 2
            return _first_entries(job, db, middles)


# ---------------------------------------------------------------------------- who follows the log


class _CountedTail:
    """The live tail, with how often readers found what they asked it for."""

    def __init__(self, wal: Any) -> None:
        self._wal = wal
        self._ring = wal.ring
        self.hits = self.misses = 0

    def after(self, seq: int) -> Any:
        chunk = self._ring.after(seq)
        if chunk is not None:
            self.hits += 1
        elif self._wal.durable_seq > seq:
            self.misses += 1
        return chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)


def follow(job: Job) -> Result:
    """One reader follows, while batches of 100 puts of 100 B are written as fast as they become durable."""
    values = payloads.values(payloads.VALUE_BYTES, 100)
    with server(job) as (scratch, _), opened(scratch / "database", None) as db:
        db.create_bucket(BUCKET)
        wal = db._log.wal
        wal.ring = tail = _CountedTail(wal)
        ends_s = time.perf_counter() + job.seconds
        written = 0

        def write() -> None:
            nonlocal written
            while time.perf_counter() < ends_s:
                db.put_many(BUCKET, [(f"{written + n:09}", value) for n, value in enumerate(values)])
                written += len(values)
            db.put(BUCKET, "last", b"")

        entries = db.log("latest", follow=True)
        meter = Meter(job)
        began_s = time.perf_counter()
        writer = threading.Thread(target=write)
        writer.start()
        seen = 0
        for entry in entries:
            seen += 1
            if entry.key == "last":
                break
        took_s = time.perf_counter() - began_s
        writer.join()
        assert seen == written + 1
        share = tail.hits / (tail.hits + tail.misses)
        return meter.result(seen, took_s) | {"hit_share": share}


# ---------------------------------------------------------------------------- who takes part

CLAIMS: dict[str, list[Contender]] = {
    "cycle": [
        Contender(
            name="raw",
            label="OpenDAL alone",
            run=cycle_raw,
            configuration=f"10 MB as one object, parts of 8 MiB; {SERVER}",
        ),
        Contender(
            name="ours",
            label="Lowwater",
            run=cycle,
            configuration="10 MB of 64 KiB values, durable before: sealed, shipped, recorded, read back",
        ),
    ],
    "newreader": [
        Contender(
            name="ours-hot",
            label="from memory",
            run=reader_hot,
            configuration=f"db.log(seq) and its first entry, {HOT_ENTRIES:,} entries in the live tail",
        ),
        Contender(
            name="ours-cold",
            label="from the store",
            run=reader_cold,
            configuration="the same in the middle of segments of 2 MB that are in the store only",
        ),
    ],
    "follow": [
        Contender(
            name="ours",
            label="Lowwater",
            run=follow,
            configuration="db.log(follow=True) beside a writer, in one process",
        ),
    ],
}
