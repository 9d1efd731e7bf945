"""RocksDB, LMDB and SQLite as peers of the engine, each configured as somebody who knows it would.

Always true: `put` returns once the peer says that the batch is durable, and what holds memory keeps within
the limit that ours gets, as far as the peer has such a limit. Libraries are imported where they are used, so
that one that is not installed costs one line of the table.
"""

from __future__ import annotations

import os
import sqlite3
from functools import partial
from typing import Any

from bench import engine_jobs, payloads
from bench.engine_jobs import Prepare, Purpose, Run, Store
from bench.loops import Contender, Job


class RocksDB:
    def __init__(self, job: Job, purpose: Purpose) -> None:
        from rocksdict import (
            BlockBasedOptions,
            Cache,
            DBCompressionType,
            Options,
            Rdict,
            WriteBatch,
            WriteBufferManager,
            WriteOptions,
        )

        buffer_bytes = job.memory_bytes // 4
        cache = Cache(job.memory_bytes)
        tables = BlockBasedOptions()
        tables.set_block_cache(cache)
        tables.set_bloom_filter(10, False)
        tables.set_format_version(5)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.increase_parallelism(os.cpu_count() or 2)
        options.set_compression_type(DBCompressionType.none())
        options.set_block_based_table_factory(tables)
        options.set_write_buffer_size(buffer_bytes)
        options.set_max_write_buffer_number(3)
        manager = WriteBufferManager.new_write_buffer_manager_with_cache(job.memory_bytes, False, cache)
        options.set_write_buffer_manager(manager)
        options.set_recycle_log_file_num(4)
        self._db = Rdict(os.fspath(job.directory / "rocksdb"), options)
        self._batch = partial(WriteBatch, raw_mode=True)
        self._options = WriteOptions()
        if purpose == "write":
            self._fill_log_files(5 * buffer_bytes)
            self._options.sync = True

    def _fill_log_files(self, total_bytes: int) -> None:
        """Have old log files to write over, as after a while of use: RocksDB fills one with each buffer."""
        value = bytes(256 << 10)
        for number in range(total_bytes // len(value)):
            self.load([(b"fill%d" % (number % 4), value)])
        for number in range(4):
            self._db.delete(b"fill%d" % number)
        self.tidy()

    def key(self, text: str) -> bytes:
        return text.encode()

    def record(self, key: bytes, value: bytes, seq: int) -> tuple[bytes, bytes]:
        return key, value

    def put(self, records: list[tuple[bytes, bytes]]) -> None:
        batch = self._batch()
        put = batch.put
        for key, value in records:
            put(key, value)
        self._db.write(batch, self._options)

    load = put  # which syncs only where the purpose is to write

    def get(self, key: bytes) -> bytes:
        value = self._db.get(key)
        assert isinstance(value, bytes)
        return value

    def gets(self, keys: list[bytes]) -> None:
        get = self._db.get
        for key in keys:
            get(key)

    def scan(self, prefix: str) -> list[Any]:
        raise NotImplementedError

    def tidy(self) -> None:
        self._db.flush(True)
        self._db.compact_range(None, None)

    def close(self) -> None:
        self.tidy()
        self._db.close()


class LMDB:
    def __init__(self, job: Job, purpose: Purpose) -> None:
        import lmdb

        path = os.fspath(job.directory / "lmdb")
        self._environment = lmdb.open(path, map_size=64 << 30, sync=purpose != "load")

    def key(self, text: str) -> bytes:
        return text.encode()

    def record(self, key: bytes, value: bytes, seq: int) -> tuple[bytes, bytes]:
        return key, value

    def put(self, records: list[tuple[bytes, bytes]]) -> None:
        with self._environment.begin(write=True) as txn:
            txn.cursor().putmulti(records)

    load = put

    def get(self, key: bytes) -> bytes:
        with self._environment.begin() as txn:
            value = txn.get(key)
        assert value is not None
        return value

    def gets(self, keys: list[bytes]) -> None:
        begin = self._environment.begin
        for key in keys:
            with begin() as txn:
                txn.get(key)

    def scan(self, prefix: str) -> list[Any]:
        raise NotImplementedError

    def close(self) -> None:
        self._environment.sync(True)
        self._environment.close()


class SQLite:
    TABLE = """CREATE TABLE IF NOT EXISTS objects (
        bucket TEXT, key TEXT, value BLOB, metadata BLOB, seq INTEGER, time INTEGER, PRIMARY KEY (bucket, key)
    ) WITHOUT ROWID"""
    PUT = f"INSERT OR REPLACE INTO objects VALUES ('{payloads.BUCKET}', ?, ?, NULL, ?, ?)"
    GET = f"SELECT value, metadata, seq, time FROM objects WHERE bucket = '{payloads.BUCKET}' AND key = ?"
    SCAN = f"""SELECT key, value, metadata, seq, time FROM objects
        WHERE bucket = '{payloads.BUCKET}' AND key >= ? AND key < ? ORDER BY key"""

    def __init__(self, job: Job, purpose: Purpose) -> None:
        self._connection = sqlite3.connect(job.directory / "sqlite.db", isolation_level=None)
        for pragma in (
            "journal_mode=WAL",
            f"synchronous={'OFF' if purpose == 'load' else 'FULL'}",
            "wal_autocheckpoint=10000",
            f"cache_size=-{job.memory_bytes >> 10}",
        ):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute(self.TABLE)

    def key(self, text: str) -> str:
        return text

    def record(self, key: str, value: bytes, seq: int) -> tuple[str, bytes, int, int]:
        return key, value, seq, 1_700_000_000_000_000 + seq

    def put(self, records: list[tuple[str, bytes, int, int]]) -> None:
        execute = self._connection.execute
        execute("BEGIN")
        self._connection.executemany(self.PUT, records)
        execute("COMMIT")

    load = put

    def get(self, key: str) -> bytes:
        value: bytes = self._connection.execute(self.GET, (key,)).fetchone()[0]
        return value

    def gets(self, keys: list[str]) -> None:
        execute, query = self._connection.execute, self.GET
        for key in keys:
            execute(query, (key,)).fetchone()

    def scan(self, prefix: str) -> list[Any]:
        after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        return self._connection.execute(self.SCAN, (prefix, after)).fetchall()

    def close(self) -> None:
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()


# ---------------------------------------------------------------------------- who takes part

_KINDS: dict[str, type[Store]] = {"RocksDB": RocksDB, "LMDB": LMDB, "SQLite": SQLite}
_CONFIGURATIONS = {
    "RocksDB": "rocksdict, raw mode; block cache = memory limit, with the write buffers (3, each a quarter "
    "of it) charged to it; bloom filters of 10 bits; log files recycled, and written before; a background "
    "job a core; no compression, as values are random and the others have none; holds key and value only",
    "LMDB": "64 GiB map; its memory is the page cache, which the limit does not hold; no compression; holds "
    "key and value only",
    "SQLite": "WAL, a checkpoint each 10,000 pages; page cache = memory limit; no compression; table "
    "(bucket, key, value, metadata, seq, time) WITHOUT ROWID",
}
NOTES = tuple(f"{label}: {configuration}" for label, configuration in _CONFIGURATIONS.items())
_WRITES = {
    "RocksDB": "WriteBatch of 100 built inside the measurement, WriteOptions.sync",
    "LMDB": "one transaction of 100 by putmulti, sync and metasync on",
    "SQLite": "executemany of 100 in a transaction, synchronous=FULL; rows with seq and time made before",
}
_GETS = {
    "RocksDB": "db.get; tables flushed and compacted before",
    "LMDB": "a read transaction each",
    "SQLite": "one statement each: value, metadata, seq, time",
}
_SCANS = {"SQLite": "fetchall of key, value, metadata, seq, time in order of keys"}


def _contenders(configurations: dict[str, str], run: Run, prepare: Prepare | None = None) -> list[Contender]:
    return [
        Contender(
            name=label.lower(),
            label=label,
            run=partial(run, _KINDS[label]),
            configuration=configuration,
            prepare=partial(prepare, _KINDS[label]) if prepare else None,
            data=label.lower() if prepare else "",
        )
        for label, configuration in configurations.items()
    ]


CONTENDERS: dict[str, list[Contender]] = {
    **{name: _contenders(_WRITES, run) for name, run in engine_jobs.WRITING.items()},
    **{name: _contenders(_GETS, run, prepare) for name, (prepare, run) in engine_jobs.READING.items()},
    **{name: _contenders(_SCANS, run, prepare) for name, (prepare, run) in engine_jobs.SCANNING.items()},
}
