"""The raw loop and the peers, each configured as somebody who knows it would for this work.

Always true: a call returns once the peer says that the batch is durable (SlateDB: as far as its wheel goes),
and every peer gets the same keys and values from `payloads`. Libraries are imported where they are used, so
that one that is not installed costs one line of the table.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import zlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from struct import Struct
from typing import Any

from bench import loops, payloads
from bench.loops import Contender, Job, Result

# The raw loop's file and our log's segments are of one size, our default: zeroed, synced, and written over.
SEGMENT_BYTES = 100_000_000
CHUNK_BYTES = 1 << 20

# Unsynced writes ahead of the measurement, until RocksDB has old log files to write over: it fills a new one
# each 64 MiB.
ROCKSDB_PRIME_BYTES = 320 << 20

_seq_key = Struct(">Q").pack


# ---------------------------------------------------------------------------- the raw loop


def _raw_file(directory: Path, zeroed_bytes: int) -> int:
    """A new file, with this much of it zeroed and synced, as our log prepares its segments."""
    fd = os.open(directory / "raw", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    zeros = bytes(CHUNK_BYTES)
    for offset in range(0, zeroed_bytes, CHUNK_BYTES):
        os.pwrite(fd, zeros, offset)
    os.fsync(fd)
    return fd


def _raw_loop(job: Job, buffers: list[bytes], zeroed_bytes: int) -> Result:
    """`zeroed_bytes` of 0 means a file that grows; else the loop starts over at the end of the file."""
    fd = _raw_file(job.directory, zeroed_bytes)
    count, size = len(buffers), len(buffers[0])
    limit = zeroed_bytes - size if zeroed_bytes else 1 << 62
    pwrite, fdatasync = os.pwrite, os.fdatasync
    position = 0

    def call(number: int) -> None:
        nonlocal position
        if position > limit:
            position = 0
        pwrite(fd, buffers[number % count], position)
        fdatasync(fd)
        position += size

    return loops.calls(job, call)


def raw_batches(job: Job) -> Result:
    return _raw_loop(job, list(map(payloads.framed, payloads.batches(job.distinct_batches))), SEGMENT_BYTES)


def raw_batches_growing(job: Job) -> Result:
    return _raw_loop(job, list(map(payloads.framed, payloads.batches(job.distinct_batches))), 0)


def raw_single(job: Job) -> Result:
    flat = chain.from_iterable(payloads.batches(job.distinct_batches))
    return _raw_loop(job, [payloads.framed([entry]) for entry in flat], SEGMENT_BYTES)


def raw_open_prepare(job: Job) -> None:
    fd = _raw_file(job.directory, 0)
    block = os.urandom(CHUNK_BYTES)
    for offset in range(0, job.open_bytes, CHUNK_BYTES):
        os.pwrite(fd, block, offset)
    os.fsync(fd)


def raw_open(job: Job) -> Result:
    fill_cache(job.directory)
    return _raw_open(job)


def raw_open_cold(job: Job) -> Result:
    drop_cache(job.directory)
    return _raw_open(job)


def _raw_open(job: Job) -> Result:
    def read() -> int:
        fd = os.open(job.directory / "raw", os.O_RDONLY)
        crc = offset = 0
        while data := os.pread(fd, CHUNK_BYTES, offset):
            crc = zlib.crc32(data, crc)
            offset += len(data)
        return offset

    return loops.once(job, read)


def drop_cache(directory: Path) -> None:
    """Have the kernel forget the contents of a directory's files. This needs no privilege."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def fill_cache(directory: Path) -> None:
    """Have the kernel hold the contents of a directory's files."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(CHUNK_BYTES):
                    pass


# ---------------------------------------------------------------------------- RocksDB


def _rocksdb_open(directory: Path, *, recycle: bool) -> Any:
    from rocksdict import Options, Rdict

    options = Options(raw_mode=True)
    options.create_if_missing(True)
    if recycle:
        options.set_recycle_log_file_num(4)
    return Rdict(os.fspath(directory / "rocksdb"), options)


def _rocksdb_batches(job: Job, *, recycle: bool, as_log: bool) -> Result:
    from rocksdict import WriteBatch, WriteOptions

    db = _rocksdb_open(job.directory, recycle=recycle)
    batches = payloads.batches(job.distinct_batches)
    records = [[key + value for key, value in part] for part in batches] if as_log else []
    options = WriteOptions()
    count = len(batches)
    seq = 0

    def by_key(number: int) -> None:
        batch = WriteBatch(raw_mode=True)
        put = batch.put
        for key, value in batches[number % count]:
            put(key, value)
        db.write(batch, options)

    def by_seq(number: int) -> None:
        nonlocal seq
        batch = WriteBatch(raw_mode=True)
        put = batch.put
        for record in records[number % count]:
            seq += 1
            put(_seq_key(seq), record)
        db.write(batch, options)

    call = by_seq if as_log else by_key
    if recycle:
        options.sync = False
        for number in range(ROCKSDB_PRIME_BYTES // payloads.BATCH_BYTES):
            call(number)
        db.flush(True)
    options.sync = True
    return loops.calls(job, call)


def rocksdb_batches(job: Job) -> Result:
    return _rocksdb_batches(job, recycle=True, as_log=False)


def rocksdb_batches_defaults(job: Job) -> Result:
    return _rocksdb_batches(job, recycle=False, as_log=False)


def rocksdb_batches_as_log(job: Job) -> Result:
    return _rocksdb_batches(job, recycle=True, as_log=True)


def rocksdb_read_prepare(job: Job) -> None:
    from rocksdict import WriteBatch

    db = _rocksdb_open(job.directory, recycle=False)
    seq = 0
    for part in payloads.mixed(job.read_entries):
        batch = WriteBatch(raw_mode=True)
        for key, value in part:
            seq += 1
            batch.put(_seq_key(seq), key + value)
        db.write(batch)
    db.flush(True)
    db.close()


def rocksdb_read(job: Job) -> Result:
    db = _rocksdb_open(job.directory, recycle=False)
    return loops.passes(job, lambda: sum(1 for _ in db.items()))


# ---------------------------------------------------------------------------- LMDB


def _lmdb_open(directory: Path) -> Any:
    import lmdb

    return lmdb.open(os.fspath(directory / "lmdb"), map_size=64 << 30)


def lmdb_batches(job: Job) -> Result:
    environment = _lmdb_open(job.directory)
    batches = payloads.batches(job.distinct_batches)
    count = len(batches)

    def call(number: int) -> None:
        with environment.begin(write=True) as txn:
            txn.cursor().putmulti(batches[number % count])

    return loops.calls(job, call)


def lmdb_batches_as_log(job: Job) -> Result:
    environment = _lmdb_open(job.directory)
    records = [[key + value for key, value in part] for part in payloads.batches(job.distinct_batches)]
    count = len(records)
    seq = 0

    def call(number: int) -> None:
        nonlocal seq
        part = records[number % count]
        keys = map(_seq_key, range(seq, seq + len(part)))
        with environment.begin(write=True) as txn:
            txn.cursor().putmulti(zip(keys, part, strict=True), append=True)
        seq += len(part)

    return loops.calls(job, call)


def lmdb_read_prepare(job: Job) -> None:
    environment = _lmdb_open(job.directory)
    seq = 0
    for part in payloads.mixed(job.read_entries):
        keys = map(_seq_key, range(seq, seq + len(part)))
        with environment.begin(write=True) as txn:
            txn.cursor().putmulti(zip(keys, (key + value for key, value in part), strict=True), append=True)
        seq += len(part)
    environment.close()


def lmdb_read(job: Job) -> Result:
    environment = _lmdb_open(job.directory)

    def one_pass() -> int:
        with environment.begin() as txn:
            return sum(1 for _ in txn.cursor())

    return loops.passes(job, one_pass)


# ---------------------------------------------------------------------------- SQLite

SQLITE_BY_KEY = "(key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID"
SQLITE_AS_LOG = "(seq INTEGER PRIMARY KEY, key BLOB, value BLOB)"


def _sqlite_open(directory: Path, columns: str) -> sqlite3.Connection:
    connection = sqlite3.connect(directory / "sqlite.db", isolation_level=None)
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=10000", "cache_size=-65536"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute(f"CREATE TABLE IF NOT EXISTS entries {columns}")
    return connection


def _sqlite_batches(job: Job, columns: str) -> Result:
    connection = _sqlite_open(job.directory, columns)
    batches = payloads.batches(job.distinct_batches)
    count = len(batches)
    execute, executemany = connection.execute, connection.executemany

    def call(number: int) -> None:
        execute("BEGIN")
        executemany("INSERT OR REPLACE INTO entries (key, value) VALUES (?, ?)", batches[number % count])
        execute("COMMIT")

    return loops.calls(job, call)


def sqlite_batches(job: Job) -> Result:
    return _sqlite_batches(job, SQLITE_BY_KEY)


def sqlite_batches_as_log(job: Job) -> Result:
    return _sqlite_batches(job, SQLITE_AS_LOG)


def sqlite_read_prepare(job: Job) -> None:
    connection = _sqlite_open(job.directory, SQLITE_AS_LOG)
    connection.execute("BEGIN")
    for part in payloads.mixed(job.read_entries):
        connection.executemany("INSERT INTO entries (key, value) VALUES (?, ?)", part)
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def sqlite_read(job: Job) -> Result:
    connection = _sqlite_open(job.directory, SQLITE_AS_LOG)
    query = "SELECT seq, key, value FROM entries ORDER BY seq"
    return loops.passes(job, lambda: sum(1 for _ in connection.execute(query)))


# ---------------------------------------------------------------------------- SlateDB


def slatedb_batches(job: Job) -> Result:
    from slatedb.uniffi import DbBuilder, FlushOptions, FlushType, ObjectStore, WriteBatch

    batches = payloads.batches(job.distinct_batches)
    count = len(batches)
    loop = asyncio.new_event_loop()
    root = job.directory / "slatedb"
    root.mkdir()
    wal = FlushOptions(flush_type=FlushType.WAL)

    async def build() -> Any:
        # The path goes to the database: this store takes only the root of the file system as its own.
        return await DbBuilder(os.fspath(root).lstrip("/"), ObjectStore.resolve("file:///")).build()

    async def write(number: int) -> None:
        batch = WriteBatch()
        put = batch.put
        for key, value in batches[number % count]:
            put(key, value)
        await db.write(batch)
        await db.flush_with_options(wal)

    db = loop.run_until_complete(build())
    run: Callable[[Any], Any] = loop.run_until_complete
    return loops.calls(job, lambda number: run(write(number)))


# ---------------------------------------------------------------------------- who takes part

_ROCKSDB = "rocksdict, raw mode, WriteBatch of 100 built inside the measurement, WriteOptions.sync"
_LMDB = "one transaction of 100 by putmulti, sync and metasync on, no writemap (measured slower), 64 GiB map"
_SQLITE = (
    "WAL, synchronous=FULL, executemany of 100 in a transaction, checkpoint each 10,000 pages, 64 MiB cache"
)
_RAW = f"os.pwrite of one joined buffer ({payloads.BATCH_BYTES:,} B, as many as our log writes), os.fdatasync"

CONTENDERS: dict[str, list[Contender]] = {
    "batches": [
        Contender(
            name="raw",
            label="raw loop",
            run=raw_batches,
            configuration=f"{_RAW}; a file of 100 MB, zeroed and synced before, written over and over",
        ),
        Contender(
            name="rocksdb",
            label="RocksDB",
            run=rocksdb_batches,
            configuration=f"{_ROCKSDB}; recycle_log_file_num=4 and 320 MiB written before, so that it too "
            "writes over existing log files; the other options as they come",
        ),
        Contender(
            name="rocksdb-log",
            label="RocksDB as a log",
            run=rocksdb_batches_as_log,
            configuration="as RocksDB, but key = seq (8 bytes, rising), value = key and value joined before: "
            "its best case",
        ),
        Contender(
            name="rocksdb-defaults",
            label="RocksDB, defaults",
            run=rocksdb_batches_defaults,
            configuration=f"{_ROCKSDB}; all options as they come: its log files are new, and grow",
        ),
        Contender(
            name="raw-growing",
            label="raw loop, growing file",
            run=raw_batches_growing,
            configuration="as the raw loop, on an empty file: each fdatasync commits the new size too",
        ),
        Contender(name="lmdb", label="LMDB", run=lmdb_batches, configuration=_LMDB),
        Contender(
            name="lmdb-log",
            label="LMDB as a log",
            run=lmdb_batches_as_log,
            configuration="as LMDB, but key = seq (8 bytes, rising), append=True",
        ),
        Contender(
            name="sqlite",
            label="SQLite",
            run=sqlite_batches,
            configuration=f"{_SQLITE}; table {SQLITE_BY_KEY}",
        ),
        Contender(
            name="sqlite-log",
            label="SQLite as a log",
            run=sqlite_batches_as_log,
            configuration=f"as SQLite; table {SQLITE_AS_LOG}",
        ),
        Contender(
            name="slatedb",
            label="SlateDB (not synced)",
            run=slatedb_batches,
            configuration="local file store, default settings, write() and then a flush of its WAL (waiting "
            "for its 100 ms timer instead gives 10 batches/s); its store calls no fsync, and the wheel has "
            "no switch for it: it alone would lose acknowledged batches with the power",
        ),
    ],
    "single": [
        Contender(
            name="raw",
            label="raw loop",
            run=raw_single,
            configuration=f"os.pwrite of {payloads.FRAME_BYTES} B, os.fdatasync, on a zeroed file as above",
        ),
    ],
    "read": [
        Contender(
            name="rocksdb",
            label="RocksDB",
            run=rocksdb_read,
            prepare=rocksdb_read_prepare,
            data="rocksdb",
            configuration="db.items() as Python bytes, keys are seqs, tables flushed, default compression",
        ),
        Contender(
            name="lmdb",
            label="LMDB",
            run=lmdb_read,
            prepare=lmdb_read_prepare,
            data="lmdb",
            configuration="one cursor over all, as Python bytes, keys are seqs",
        ),
        Contender(
            name="sqlite",
            label="SQLite",
            run=sqlite_read,
            prepare=sqlite_read_prepare,
            data="sqlite",
            configuration="SELECT seq, key, value … ORDER BY seq, row by row",
        ),
    ],
    "open": [
        Contender(
            name="raw",
            label="read + CRC-32",
            run=raw_open,
            prepare=raw_open_prepare,
            data="raw",
            configuration="a file of the same size, os.pread of 1 MiB and zlib.crc32, in the page cache",
        ),
        Contender(
            name="raw-cold",
            label="read + CRC-32, cold",
            run=raw_open_cold,
            prepare=raw_open_prepare,
            data="raw",
            configuration="the same, the page cache dropped before (POSIX_FADV_DONTNEED)",
        ),
    ],
}
