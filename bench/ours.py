"""Our log as a contender. `Driver` is the only place in the benchmarks that names its calls."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Iterable, Iterator
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Any

from bench import loops, payloads
from bench.loops import Contender, Job, Result
from bench.payloads import Entry
from bench.peers import SEGMENT_BYTES, drop_cache, fill_cache

OUTSTANDING = 64
WAITERS = 64
# Later than the log that takes them, as times are that were given by the proposer a moment ago.
TIME_US = 2_000_000_000_000_000

# Segments for reading are smaller, so that most of what is read is sealed.
READ_SEGMENT_BYTES = 32 << 20


class Driver:
    """A log in a directory, and the calls that the benchmarks make of it."""

    def __init__(self, directory: Path, **options: Any) -> None:
        from lowwater.engine.format.entries import Put, encode_put
        from lowwater.engine.log.log import Log, LogOptions

        self._put = Put
        self._encode_put = encode_put
        settings = {"sync_mode": "fdatasync", "segment_bytes": SEGMENT_BYTES, **options}
        self.log = Log.open(directory / "log", options=LogOptions(**settings))

    def encode(self, part: Iterable[tuple[str, bytes]]) -> list[bytes]:
        encode_put = self._encode_put
        return [encode_put(payloads.BUCKET, key, value, time_us=TIME_US) for key, value in part]

    def append(self, encoded: list[bytes]) -> int:
        """Waits until all are durable. Returns the last one's seq."""
        return self.log.append_payloads(encoded, trusted=True)

    def append_puts(self, part: list[tuple[str, bytes]]) -> int:
        put = self._put
        return self.log.append(*[put(payloads.BUCKET, key, value) for key, value in part])

    def submit(self, encoded: list[bytes]) -> Future[int]:
        return self.log.submit_payloads(encoded, trusted=True)

    def submit_puts(self, part: list[tuple[str, bytes]]) -> Future[int]:
        put = self._put
        return self.log.submit(*[put(payloads.BUCKET, key, value) for key, value in part])

    def append_async(self, encoded: list[bytes]) -> Awaitable[object]:
        return self.log.append_payloads_async(encoded, trusted=True)

    def entries(self) -> Iterator[Any]:
        return iter(self.log.read("earliest"))

    def last_seq(self) -> int:
        return self.log.seq_last

    def close(self) -> None:
        self.log.close()


def sealed_segments(directory: Path) -> list[Path]:
    return sorted(directory.rglob("segment-*.log"))


def read_columns(segment: Path) -> int:
    """Decode and verify a whole sealed segment into columns. Returns how many entries it has."""
    from lowwater.engine.log import columns
    from lowwater.engine.seams.real import RealFiles

    file = RealFiles().open(os.fspath(segment))
    try:
        return int(columns.read_columns(file).num_rows)
    finally:
        file.close()


# ---------------------------------------------------------------------------- batches


def _batches(job: Job) -> list[list[tuple[str, bytes]]]:
    return [[_as_text(entry) for entry in part] for part in payloads.batches(job.distinct_batches)]


def _as_text(entry: Entry) -> tuple[str, bytes]:
    return entry[0].decode(), entry[1]


def _encoded(driver: Driver, job: Job) -> list[list[bytes]]:
    batches = [driver.encode(part) for part in _batches(job)]
    written = sum(len(payload) + payloads.FRAME_HEADER_BYTES for payload in batches[0])
    if written != payloads.BATCH_BYTES:
        raise AssertionError(
            f"our log writes {written} bytes a batch, the raw loop {payloads.BATCH_BYTES}: "
            "correct ENTRY_OVERHEAD_BYTES in bench/payloads.py"
        )
    return batches


def waiting(job: Job) -> Result:
    driver = Driver(job.directory)
    batches = _encoded(driver, job)
    count = len(batches)
    return loops.calls(job, lambda number: driver.append(batches[number % count]))


def waiting_encoding(job: Job) -> Result:
    driver = Driver(job.directory)
    batches = _batches(job)
    count = len(batches)
    return loops.calls(job, lambda number: driver.append_puts(batches[number % count]))


def pipelined(job: Job) -> Result:
    # No room for a second batch beside the first: one sync each, as the raw loop.
    driver = Driver(job.directory, batch_bytes_max=payloads.BATCH_BYTES)
    batches = _encoded(driver, job)
    count = len(batches)
    return loops.futures(job, lambda number: driver.submit(batches[number % count]), OUTSTANDING)


def pipelined_encoding(job: Job) -> Result:
    driver = Driver(job.directory, batch_bytes_max=payloads.BATCH_BYTES)
    batches = _batches(job)
    count = len(batches)
    return loops.futures(job, lambda number: driver.submit_puts(batches[number % count]), OUTSTANDING)


def merging(job: Job) -> Result:
    driver = Driver(job.directory)
    batches = _encoded(driver, job)
    count = len(batches)
    return loops.futures(job, lambda number: driver.submit(batches[number % count]), OUTSTANDING)


# ---------------------------------------------------------------------------- single entries


def _singles(driver: Driver, job: Job) -> list[list[bytes]]:
    return [[payload] for payload in chain.from_iterable(_encoded(driver, job))]


def single_thread(job: Job) -> Result:
    driver = Driver(job.directory)
    singles = _singles(driver, job)
    count = len(singles)
    return loops.calls(job, lambda number: driver.append(singles[number % count]))


def single_threads(job: Job) -> Result:
    driver = Driver(job.directory)
    singles = _singles(driver, job)
    count = len(singles)
    return loops.threads(job, lambda number: driver.append(singles[number % count]), WAITERS)


def single_tasks(job: Job) -> Result:
    driver = Driver(job.directory)
    singles = _singles(driver, job)
    count = len(singles)
    return loops.tasks(job, lambda number: driver.append_async(singles[number % count]), WAITERS)


def single_futures(job: Job) -> Result:
    driver = Driver(job.directory)
    singles = _singles(driver, job)
    count = len(singles)
    return loops.futures(job, lambda number: driver.submit(singles[number % count]), OUTSTANDING)


# ---------------------------------------------------------------------------- reading back


def read_prepare(job: Job) -> None:
    driver = Driver(job.directory, segment_bytes=READ_SEGMENT_BYTES)
    for part in payloads.mixed(job.read_entries):
        driver.append(driver.encode(map(_as_text, part)))
    driver.close()


def read_entries(job: Job) -> Result:
    driver = Driver(job.directory, segment_bytes=READ_SEGMENT_BYTES)
    return loops.passes(job, lambda: sum(1 for _ in driver.entries()))


def read_vectorised(job: Job) -> Result:
    segments = sealed_segments(job.directory)
    if not segments:
        raise AssertionError("no sealed segment to read: prepare more entries, or smaller segments")
    return loops.passes(job, lambda: sum(map(read_columns, segments)))


# ---------------------------------------------------------------------------- opening


def _open_options(job: Job) -> dict[str, Any]:
    return {"segment_bytes": job.open_bytes + (64 << 20)}


def _open_prepare(job: Job, value_bytes: int) -> None:
    """Fill one segment and end without closing it: a clean close could leave hints that a crash does not."""
    driver = Driver(job.directory, **_open_options(job))
    part = driver.encode(map(_as_text, payloads.entries(5000, value_bytes)))
    part_bytes = sum(len(payload) + payloads.FRAME_HEADER_BYTES for payload in part)
    for _ in range(job.open_bytes // part_bytes):
        driver.append(part)
    if sealed_segments(job.directory):
        raise AssertionError("the segment that was to stay open has been sealed")


def open_prepare_100(job: Job) -> None:
    _open_prepare(job, 100)


def open_prepare_1024(job: Job) -> None:
    _open_prepare(job, 1024)


def open_warm(job: Job) -> Result:
    fill_cache(job.directory)
    return _open_unsealed(job)


def open_cold(job: Job) -> Result:
    drop_cache(job.directory)
    return _open_unsealed(job)


def _open_unsealed(job: Job) -> Result:
    def open_it() -> int:
        driver = Driver(job.directory, **_open_options(job))
        assert driver.last_seq() > 5000
        return job.open_bytes

    return loops.once(job, open_it)


# ---------------------------------------------------------------------------- who takes part

_ENCODED = "fdatasync, segments of 100 MB, payloads encoded before"
_PIPELINED = f"{OUTSTANDING} futures outstanding, batch_bytes_max = one batch: one sync each, no merging"
_ENCODING = "as above, but 100 Put records are made and encoded inside the measurement"
_SINGLE = "default options, one entry an append, encoded before"

CONTENDERS: dict[str, list[Contender]] = {
    "batches": [
        Contender(
            name="ours-waiting",
            label="Lowwater, waiting",
            run=waiting,
            configuration=f"{_ENCODED}, one blocking append a batch",
        ),
        Contender(
            name="ours-pipelined",
            label="Lowwater, pipelined",
            run=pipelined,
            configuration=f"{_ENCODED}, {_PIPELINED}",
        ),
        Contender(
            name="ours-merging",
            label="Lowwater, pipelined, merging",
            run=merging,
            configuration=f"the same, default batch_bytes_max: up to {OUTSTANDING} batches share a sync",
        ),
        Contender(
            name="ours-waiting-encoding",
            label="Lowwater, waiting, with encoding",
            run=waiting_encoding,
            configuration=f"Lowwater, waiting {_ENCODING}",
        ),
        Contender(
            name="ours-pipelined-encoding",
            label="Lowwater, pipelined, with encoding",
            run=pipelined_encoding,
            configuration=f"Lowwater, pipelined {_ENCODING}",
        ),
    ],
    "single": [
        Contender(name="ours-thread", label="Lowwater, 1 thread", run=single_thread, configuration=_SINGLE),
        Contender(
            name="ours-threads",
            label=f"Lowwater, {WAITERS} threads",
            run=single_threads,
            configuration=f"{_SINGLE}; each thread waits for its own",
        ),
        Contender(
            name="ours-tasks",
            label=f"Lowwater, {WAITERS} asyncio tasks",
            run=single_tasks,
            configuration=f"{_SINGLE}; each task awaits its own",
        ),
        Contender(
            name="ours-futures",
            label=f"Lowwater, {OUTSTANDING} futures",
            run=single_futures,
            configuration=f"{_SINGLE}; one thread keeps that many outstanding",
        ),
    ],
    "read": [
        Contender(
            name="ours-entries",
            label="Lowwater, one by one",
            run=read_entries,
            prepare=read_prepare,
            data="ours",
            configuration="log.read from the earliest, each an Entry",
        ),
        Contender(
            name="ours-columns",
            label="Lowwater, vectorised",
            run=read_vectorised,
            prepare=read_prepare,
            data="ours",
            configuration="read_columns of each sealed segment: all columns, verified",
        ),
    ],
    "open": [
        Contender(
            name=f"ours-{value_bytes}{suffix}",
            label=f"Lowwater, {value_bytes} B values{', cold' if suffix else ''}",
            run=run,
            prepare=prepare,
            data=f"ours-{value_bytes}",
            configuration=f"Log.open after a crash, page cache {'dropped before' if suffix else 'warm'}",
        )
        for value_bytes, prepare in ((100, open_prepare_100), (1024, open_prepare_1024))
        for suffix, run in (("", open_warm), ("-cold", open_cold))
    ],
}
