"""What the benchmark of shipping does, each in a process of its own, with an S3 server of its own.

Always true: the server starts empty and ends with its measurement, and the log that is shipped was made
before: each round has a copy of it.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench import payloads
from bench.loops import Contender, Job, Result

BUCKET = "b"
VALUE_BYTES = 64 * 2**10
ENTRIES, ENTRY_BYTES = 10_000, 10 * 2**10
WANTED = range(1000, 2000)
PART_BYTES = 8 * 2**20
AT_ONCE = 4
# rclone reads a whole object again to say what its ETag is, each time. No store does, and nobody asks for it.
NO_ETAGS = ("--etag-hash", "")


@contextmanager
def server(job: Job, *, etags: bool = False) -> Iterator[tuple[Path, Any]]:
    """An empty folder, and a server beside it. Both are gone afterwards."""
    from lowwater.tiering.testing.s3_server import S3Server

    scratch = Path(tempfile.mkdtemp(prefix="measured-", dir=job.directory))
    try:
        with S3Server(scratch / "server", arguments=() if etags else NO_ETAGS) as started:
            yield scratch, started
    finally:
        shutil.rmtree(scratch)


def opened(directory: Path, started: Any, **config: Any) -> Any:
    import lowwater

    tier = {} if started is None else {"uri": started.uri("bench"), "options": started.options}
    sections: dict[str, Any] = {"tier": tier, "wal": {"sync_mode": "fdatasync"}}
    for name, section in config.items():
        sections[name] = {**sections.get(name, {}), **section}
    return lowwater.open(directory, config=sections)


def only_in_the_store(db: Any) -> int:
    """Ship all that there is, and remove it here. Returns the last seq of it."""
    shipped: int = db.ship()
    db.put(BUCKET, "later", b"")  # the newest segment is never removed
    db.ship()
    db.flush()
    assert db.purge(shipped) >= shipped
    return shipped


# ---------------------------------------------------------------------------- the same bytes, shipped


def make_log(job: Job, *, compression: str, in_one: bool = False) -> None:
    """A database whose log has so many bytes, none of them shipped: in usual segments, or in one."""
    source = random.Random(payloads.SEED)
    usual_bytes = max(min(100_000_000, job.ship_bytes // 8), 2**20)
    # 2 GiB is the most that one may have.
    segment_bytes = min(2 * job.ship_bytes, 2**31) if in_one else usual_bytes
    wal = {"compression": compression, "rotate_max_bytes": segment_bytes}
    with opened(job.directory / "log", None, wal=wal) as db:
        db.create_bucket(BUCKET)
        for first in range(0, job.ship_bytes // VALUE_BYTES, 64):
            db.put_many(BUCKET, [(f"{first + n:08}", source.randbytes(VALUE_BYTES)) for n in range(64)])
        db.propose_seal()
        db.finish_sealing()
        db.flush()


def _copy_of_log(job: Job, scratch: Path) -> Path:
    copy = scratch / "log"
    shutil.copytree(job.directory / "log", copy, copy_function=_copy)
    os.sync()
    return copy


def _copy(source: str, target: str) -> None:
    """Sealed segments never change."""
    if Path(source).name.startswith("segment-"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def _segments(directory: Path) -> list[Path]:
    return sorted((directory / "wal").glob("segment-*.log"))


def ship(job: Job, *, etags: bool = False) -> Result:
    """From opening the database until all of it is in the store, recorded, and seen to count."""
    with server(job, etags=etags) as (scratch, started):
        copy = _copy_of_log(job, scratch)
        size = sum(path.stat().st_size for path in _segments(copy))
        began_s = time.perf_counter()
        with opened(copy, started) as db:
            db.ship()
            took_s = time.perf_counter() - began_s
    return {"rate": size / took_s}


def upload_raw(job: Job, *, etags: bool = False) -> Result:
    """The same files through OpenDAL alone, as many at once and in as large parts."""
    import opendal

    with server(job, etags=etags) as (scratch, started):
        copy = _copy_of_log(job, scratch)
        paths = _segments(copy)
        operator = opendal.Operator("s3", bucket="lowwater", root="/raw", **started.options)

        def upload(path: Path) -> int:
            size = 0
            with (
                path.open("rb", buffering=0) as file,
                operator.open(path.name, "wb", chunk=PART_BYTES, concurrent=AT_ONCE) as target,
            ):
                while part := file.read(PART_BYTES):
                    target.write(part)
                    size += len(part)
            return size

        began_s = time.perf_counter()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            size = sum(pool.map(upload, paths))
        took_s = time.perf_counter() - began_s
    return {"rate": size / took_s}


# ---------------------------------------------------------------------------- writers beside it


def write(job: Job, *, shipping: bool) -> Result:
    """Batches of 100 puts of 100 B, each synced, for so many seconds."""
    values = payloads.values(payloads.VALUE_BYTES, 10_000)
    source = random.Random(payloads.SEED)

    def batches() -> Iterator[list[tuple[str, bytes]]]:
        while True:
            keys = (source.randbytes(8).hex() for _ in range(100))
            yield [(key, values[number]) for number, key in enumerate(keys)]

    with server(job) as (scratch, started):
        wal = {"rotate_max_bytes": 4_000_000}
        with opened(scratch / "database", started if shipping else None, wal=wal) as db:
            db.create_bucket(BUCKET)
            _until(job.warmup_seconds, db, batches())
            seq = db.catalogue.hwm

            def was_shipped() -> bool:
                return not shipping or db.catalogue.hwm > seq

            written, took_s = _until(job.seconds, db, batches(), was_shipped)
            result: Result = {"rate": written / took_s}
            if shipping:
                result["shipped_share"] = (db.catalogue.hwm - seq) / written
                result["lag_s"] = db.shipping().lag_seconds
    return result


def _until(
    seconds: float,
    db: Any,
    batches: Iterable[list[tuple[str, bytes]]],
    enough: Callable[[], bool] = lambda: True,
) -> tuple[int, float]:
    began_s = time.perf_counter()
    written, took_s = 0, 0.0
    for batch in batches:
        db.put_many(BUCKET, batch)
        written += len(batch)
        took_s = time.perf_counter() - began_s
        if took_s >= seconds and enough():
            break
    return written, took_s


# ---------------------------------------------------------------------------- memory


def measure_memory(job: Job) -> Result:
    """How far resident memory rises above what a process has that has shipped, and read back, a little: while
    it ships, and then while it reads."""
    with server(job) as (scratch, started):
        with opened(scratch / "small", started, tier={"uri": started.uri("small")}) as db:
            db.create_bucket(BUCKET)
            db.put(BUCKET, "k", bytes(VALUE_BYTES))
            _read_back(db, only_in_the_store(db))
        copy = _copy_of_log(job, scratch)
        size = sum(path.stat().st_size for path in _segments(copy))
        began_s = time.perf_counter()
        with _Highest() as shipping, opened(copy, started) as db:
            shipped = only_in_the_store(db)
            shipping_mib = shipping.until_now() / 2**20
            with _Highest() as reading:
                _read_back(db, shipped)
        took_s = time.perf_counter() - began_s
    return {"rate": size / took_s, "shipping_mib": shipping_mib, "reading_mib": reading.until_now() / 2**20}


def _read_back(db: Any, shipped: int) -> None:
    last = 0
    for entry in db.log("earliest"):
        last = entry.seq
        if last >= shipped:
            break
    assert last == shipped


class _Highest:
    """Looks at the resident memory of this process, from beginning to end."""

    def __enter__(self) -> _Highest:
        self._ended = threading.Event()
        self._before = self._highest = _resident_bytes()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self._highest = max(self._highest, _resident_bytes())

    def until_now(self) -> int:
        """By how many bytes it grew at most."""
        return self._highest - self._before


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------------------- reading what is shipped only


class _Counting:
    """A store that counts what it is asked for."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.uri = store.uri
        self.requests = self.bytes = 0

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        data: bytes = self._store.read(name, start, end)
        self.requests += 1
        self.bytes += len(data)
        return data

    def stat(self, name: str) -> Any:
        self.requests += 1
        return self._store.stat(name)

    def list(self, *arguments: Any) -> Any:
        self.requests += 1
        return self._store.list(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def read_cold(job: Job, measured: Callable[[Any, _Counting, int], Result], *, compression: str) -> Result:
    """One segment of 10,000 entries of 10 KiB, which is in the store only, in a process that knows nothing
    of it yet."""
    from lowwater.engine.log.log import LogOptions
    from lowwater.tiering.open_store import open_store
    from lowwater.tiering.tiered_opening import open_tiered

    source = random.Random(payloads.SEED)
    with server(job) as (scratch, started):
        directory = scratch / "database"
        wal = {"rotate_max_bytes": 2 * ENTRIES * ENTRY_BYTES, "compression": compression}
        with opened(directory, started, wal=wal) as db:
            db.create_bucket(BUCKET)
            for first in range(0, ENTRIES, 100):
                values = (source.randbytes(ENTRY_BYTES) for _ in range(100))
                db.put_many(BUCKET, [(f"{first + n:05}", value) for n, value in enumerate(values)])
            only_in_the_store(db)
            stored_bytes = db.catalogue.segment_of(ENTRIES // 2).size
        shutil.rmtree(directory / "cache", ignore_errors=True)
        store = _Counting(open_store(started.uri("bench"), options=started.options))
        with open_tiered(os.fspath(directory), [store], log_options=LogOptions(sync_mode="fdatasync")) as db:
            db.ship()  # so that nobody but the reader asks for anything
            return measured(db, store, stored_bytes)


def read_range(db: Any, store: _Counting, stored_bytes: int) -> Result:
    store.requests = store.bytes = 0
    began_s = time.perf_counter()
    size = 0
    for entry in db.log(WANTED.start):
        size += len(entry.value)
        if entry.seq >= WANTED.stop:
            break
    took_s = time.perf_counter() - began_s
    assert size == (len(WANTED) + 1) * ENTRY_BYTES
    return {"rate": size / took_s, "share": store.bytes / stored_bytes, "requests": store.requests}


def read_points(db: Any, store: _Counting, stored_bytes: int) -> Result:
    """The first value, and then others of the same segment, far from each other."""
    counts = []
    took_s = 0.0
    for number in (ENTRIES // 2, *range(500, ENTRIES, 1900)):
        store.requests = 0
        began_s = time.perf_counter()
        assert len(db.get(BUCKET, f"{number:05}").value) == ENTRY_BYTES
        took_s += time.perf_counter() - began_s
        counts.append(store.requests)
    return {
        "rate": len(counts) / took_s,
        "requests": counts[0],
        "requests_cached": max(counts[1:]),
    }


# ---------------------------------------------------------------------------- who takes part

SERVER = "rclone serve s3 on this machine, which shares its cores and its disk"

CONTENDERS: dict[str, list[Contender]] = {
    "ship": [
        Contender(
            name="raw",
            label="OpenDAL alone",
            run=upload_raw,
            configuration=f"the same files, {AT_ONCE} at once, {AT_ONCE} parts of 8 MiB each; {SERVER}",
            prepare=partial(make_log, compression="none"),
            data="none",
        ),
        Contender(
            name="ours",
            label="Lowwater",
            run=ship,
            configuration="as they are, each byte compared with its hash, read back, recorded",
            prepare=partial(make_log, compression="none"),
            data="none",
        ),
        Contender(
            name="raw-checked",
            label="OpenDAL alone, to a server with checksums",
            run=partial(upload_raw, etags=True),
            configuration="the same files to a server that says the MD5 of what it has",
            prepare=partial(make_log, compression="none"),
            data="none",
        ),
        Contender(
            name="ours-checked",
            label="Lowwater, to a server with checksums",
            run=partial(ship, etags=True),
            configuration="compared with that, for which this server reads an object again; no real one does",
            prepare=partial(make_log, compression="none"),
            data="none",
        ),
        Contender(
            name="ours-zstd",
            label="Lowwater, zstd",
            run=ship,
            configuration="the same, compressed on the way (the default); these values do not get smaller",
            prepare=partial(make_log, compression="zstd"),
            data="zstd",
        ),
    ],
    "writers": [
        Contender(
            name="ours-alone",
            label="shipping nothing",
            run=partial(write, shipping=False),
            configuration="lowwater.open without a tier; segments of 4 MB",
        ),
        Contender(
            name="ours-shipping",
            label="shipping meanwhile",
            run=partial(write, shipping=True),
            configuration=f"the same with a tier, compressed as by default; {SERVER}",
        ),
    ],
    "shipmemory": [
        Contender(
            name="ours-one",
            label="Lowwater, one segment",
            run=measure_memory,
            configuration="shipped, removed here, and read back through the log; engine and caches included",
            prepare=partial(make_log, compression="zstd", in_one=True),
            data="one",
        ),
        Contender(
            name="ours-many",
            label="Lowwater, many segments",
            run=measure_memory,
            configuration="the same in segments of the usual size, several of which are uploaded at once",
            prepare=partial(make_log, compression="zstd"),
            data="many",
        ),
    ],
    "coldrange": [
        Contender(
            name=name,
            label=label,
            run=partial(read_cold, measured=read_range, compression=compression),
            configuration=f"entries {WANTED.start:,} to {WANTED.stop:,} of {ENTRIES:,}, nothing known before",
        )
        for name, label, compression in (
            ("ours", "Lowwater, zstd", "zstd"),
            ("ours-raw", "Lowwater, as it is", "none"),
        )
    ],
    "coldpoint": [
        Contender(
            name=name,
            label=label,
            run=partial(read_cold, measured=read_points, compression=compression),
            configuration="values that are in the store only, the first with nothing known before",
        )
        for name, label, compression in (
            ("ours", "Lowwater, zstd", "zstd"),
            ("ours-raw", "Lowwater, as it is", "none"),
        )
    ],
}
