"""Our engine as a contender. `Driver` is the only place in the benchmarks that names its calls."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import cycle, islice
from typing import Any

from bench import engine_jobs, loops, payloads
from bench.engine_jobs import Purpose
from bench.loops import Contender, Job, Result

WRITERS = 2
# So much of the pool for each record keeps all of them dirty: nothing is flushed before it is asked for.
DIRTY_BYTES = 1024


def missing() -> str:
    """Why our engine cannot be measured, or nothing."""
    try:
        lowwater = import_module("lowwater")
    except ModuleNotFoundError as error:
        return f"{error}"
    absent = [name for name in ("open", "Put") if not hasattr(lowwater, name)]
    return f"lowwater has no {' and no '.join(absent)}" if absent else ""


def how_it_runs() -> str:
    """Whether the innermost loops are compiled here."""
    compiled: bool = import_module("lowwater.engine.format.fast").IS_COMPILED
    return "Lowwater's innermost loops are compiled" if compiled else "Lowwater's innermost loops are Python"


class Driver:
    """A database in a directory, and the calls that the benchmarks make of it."""

    def __init__(self, job: Job, purpose: Purpose, *, pool_bytes: int = 0) -> None:
        import lowwater

        # By name: mypy checks this file before the engine is there, and after.
        open_database: Callable[..., Any] = getattr(lowwater, "open")  # noqa: B009
        config = {
            "engine": {"pool_bytes_max": pool_bytes or job.memory_bytes},
            "wal": {"sync_mode": "none" if purpose == "load" else "fdatasync"},
        }
        path = job.directory / "ours"
        new = not path.exists()
        self._db = open_database(path, config=config, create=True)
        if new:
            self._db.create_bucket(payloads.BUCKET)

    def key(self, text: str) -> str:
        return text

    def record(self, key: str, value: bytes, seq: int) -> tuple[str, bytes]:
        return key, value

    def put(self, records: list[tuple[str, bytes]]) -> int:
        """Independent puts, one sync. Returns the last one's seq."""
        seq: int = self._db.put_many(payloads.BUCKET, records)
        return seq

    load = put  # which does not sync where the purpose is to load

    def get(self, key: str) -> bytes:
        value: bytes = self._db.get(payloads.BUCKET, key).value
        return value

    def gets(self, keys: list[str]) -> None:
        get, bucket = self._db.get, payloads.BUCKET
        for key in keys:
            get(bucket, key).value  # noqa: B018

    def scan(self, prefix: str) -> list[Any]:
        """Objects: each has its key, value, metadata, seq and time."""
        return list(self._db.scan(payloads.BUCKET, prefix=prefix))

    def flush(self) -> None:
        self._db.flush()

    def checkpoint(self) -> None:
        self._db.checkpoint()

    def close(self) -> None:
        self._db.close()


# ---------------------------------------------------------------------------- a checkpoint beside writers


def _beside(job: Job, *, checkpoint: bool) -> Result:
    driver = Driver(job, "write", pool_bytes=job.keys * DIRTY_BYTES)
    flat = list(engine_jobs.records(driver, payloads.keys(job.keys)))
    for part in engine_jobs.parts(flat, engine_jobs.LOAD_BATCH):
        driver.put(part)
    os.sync()
    batches = list(engine_jobs.parts(flat))
    count = len(batches)
    # Without it: as long as a measurement takes, to see what stalls by itself.
    background = driver.checkpoint if checkpoint else partial(time.sleep, job.seconds)
    return loops.beside(
        job, lambda number: driver.put(batches[number % count]), WRITERS, engine_jobs.BATCH, background
    )


# ---------------------------------------------------------------------------- recovery


def prepare_crash(job: Job) -> None:
    """A state of `job.keys` records in pages, then `job.log_records` that only the log has: fresh
    ones without a state, else overwriting it. The process ends without closing anything."""
    pool_bytes = (job.keys + job.log_records) * DIRTY_BYTES
    driver = Driver(job, "load", pool_bytes=pool_bytes)
    total = job.keys or job.log_records
    flat = list(engine_jobs.records(driver, payloads.keys(total)))
    if job.keys:
        for part in engine_jobs.parts(flat, engine_jobs.LOAD_BATCH):
            driver.load(part)
        driver.flush()
    for part in engine_jobs.parts(islice(cycle(flat), job.log_records)):
        driver.load(part)


def recover(job: Job) -> Result:
    """Open a copy of what the crash left. Units are records that only the log has."""
    directory = job.directory / "copy"
    shutil.rmtree(directory, ignore_errors=True)  # a round that failed
    directory.mkdir()
    shutil.copytree(job.directory / "ours", directory / "ours")
    os.sync()
    copy = replace(job, directory=directory)
    opened = []

    def open_it() -> int:
        opened.append(Driver(copy, "write", pool_bytes=(job.keys + job.log_records) * DIRTY_BYTES))
        return job.log_records

    result = loops.once(copy, open_it)
    last = list(payloads.keys(job.keys or job.log_records))[-1]
    assert len(opened[0].get(last)) == payloads.VALUE_BYTES
    shutil.rmtree(directory)
    return result


def _only_log(job: Job) -> Job:
    return replace(job, keys=0, log_records=job.keys)


# ---------------------------------------------------------------------------- who takes part

_OURS = "pool_bytes_max = memory limit; wal.sync_mode = fdatasync"
_DIRTY = f"a pool of {DIRTY_BYTES} B a record, so that all of them are dirty"


def _contender(
    run: Callable[[Job], Result], configuration: str, prepare: Callable[[Job], None] | None = None
) -> Contender:
    return Contender(
        name="ours",
        label="Lowwater",
        run=run,
        configuration=f"{_OURS}; {configuration}",
        prepare=prepare,
        data="ours" if prepare else "",
    )


CONTENDERS: dict[str, list[Contender]] = {
    **{
        name: [_contender(partial(run, Driver), "db.put_many of 100, which waits for one sync")]
        for name, run in engine_jobs.WRITING.items()
    },
    **{
        name: [_contender(partial(run, Driver), "db.get(…).value", partial(prepare, Driver))]
        for name, (prepare, run) in engine_jobs.READING.items()
    },
    **{
        name: [_contender(partial(run, Driver), "list(db.scan(…)), Objects", partial(prepare, Driver))]
        for name, (prepare, run) in engine_jobs.SCANNING.items()
    },
    "mixed": [
        Contender(
            name="ours-quiet",
            label="Lowwater, no checkpoint",
            run=partial(_beside, checkpoint=False),
            configuration=f"{_DIRTY}; {WRITERS} threads, each waiting for db.put_many of 100",
        ),
        Contender(
            name="ours-checkpoint",
            label="Lowwater, a checkpoint running",
            run=partial(_beside, checkpoint=True),
            configuration="the same from the begin of db.checkpoint() to its end",
        ),
    ],
    "redo": [
        Contender(
            name="ours",
            label="Lowwater",
            run=lambda job: recover(_only_log(job)),
            prepare=lambda job: prepare_crash(_only_log(job)),
            data="ours",
            configuration=f"lowwater.open after a crash; {_DIRTY}",
        ),
    ],
}

# For bench/recovery.py: its points are jobs of this one contender.
RECOVERY = Contender(
    name="ours",
    label="Lowwater",
    run=recover,
    prepare=prepare_crash,
    data="ours",
    configuration=f"lowwater.open after a crash; {_DIRTY}",
)
