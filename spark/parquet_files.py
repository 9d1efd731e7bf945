"""Record batches as Parquet files in a store: what a task of an export does with its rows.

Always true:
  - a file appears whole or not at all, and one that is there already is kept;
  - there is a file for each value of the partition that comes, in a folder that readers of Hive's layout
    understand: whatever a bucket is called, its folder's name gives that name back;
  - memory: the rows of the task, or BUFFER_BYTES of them, and one compressed file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lowwater.tiering.store import Store, send

PartitionBy = Literal["bucket", "day"]

COMPRESSIONS = ("snappy", "zstd", "gzip", "lz4", "brotli", "none")
BUFFER_BYTES = 128 * 2**20
ROW_GROUP_BYTES = 32 * 2**20
# What Hive, and Spark, have for nothing.
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
# What Spark escapes in the names of folders, and what would be taken for NO_VALUE.
_ESCAPED = re.compile("[\x00-\x1f\"#%'*/:=?\\\\\x7f{\\[\\]^]|^_|^\\.")


class ParquetFile(NamedTuple):
    name: str
    rows: int
    bytes: int


def folder_of(partition_by: PartitionBy | None, value: str) -> str:
    """The folder of a partition, with a slash behind it."""
    if partition_by is None:
        return ""
    escaped = _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", value) if value else NO_VALUE
    return f"{partition_by}={escaped}/"


class ParquetFiles:
    """The files of one task, in the folders of their partitions: one in each, or several numbered ones where
    there are more rows than may be in memory."""

    def __init__(
        self,
        store: Store,
        name: str,
        schema: pa.Schema,
        *,
        partition_by: PartitionBy | None,
        compression: str,
        buffer_bytes: int | None = BUFFER_BYTES,
    ) -> None:
        """`schema` is that of the batches; the files lack the column that their folder tells. Without
        `buffer_bytes` all rows are held until the end, and the files depend on nothing but them."""
        self._store = store
        self._stem = name
        self._partition_by = partition_by
        self._compression = compression
        self._buffer_bytes = buffer_bytes
        self._kept = [field for field in schema.names if partition_by != "bucket" or field != "bucket"]
        # Of columns with few values; a dictionary of keys is made only to be thrown away.
        self._repeating = [field for field in ("kind", "bucket") if field in self._kept]
        # There is no writer for each: one takes megabytes, whatever it has written.
        self._waiting: dict[str, list[pa.RecordBatch]] = {}
        self._waiting_bytes = 0
        self._made: list[ParquetFile] = []
        self._times_full = 0

    def add(self, batch: pa.RecordBatch) -> None:
        for value, rows in self._divided(batch):
            self._waiting.setdefault(value, []).append(rows)
            self._waiting_bytes += rows.nbytes
        if self._buffer_bytes is not None and self._waiting_bytes >= self._buffer_bytes:
            self._write()
            self._times_full += 1

    def close(self) -> list[ParquetFile]:
        """Write what is left; all files that there are."""
        self._write()
        return self._made

    def _write(self) -> None:
        number = f"-{self._times_full}" if self._times_full else ""
        for value in sorted(self._waiting):
            table = pa.Table.from_batches(self._waiting.pop(value)).select(self._kept)
            name = f"{folder_of(self._partition_by, value)}{self._stem}{number}.parquet"
            data = self._encoded(table)
            parts = [memoryview(data)]
            made = send(lambda n=name, p=parts, s=data.size: self._store.write(n, p, size=s))  # type: ignore[misc]
            size = data.size if made else self._store.stat(name).size
            self._made.append(ParquetFile(name, len(table), size))
        self._waiting_bytes = 0

    def _encoded(self, table: pa.Table) -> pa.Buffer:
        sink = pa.BufferOutputStream()
        pq.write_table(
            table,
            sink,
            row_group_size=max(1, len(table) * ROW_GROUP_BYTES // max(table.nbytes, ROW_GROUP_BYTES)),
            compression=self._compression,
            use_dictionary=self._repeating,
        )
        return sink.getvalue()

    def _divided(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows of each partition, in their order."""
        if self._partition_by is None:
            yield "", batch
            return
        values = batch.column("bucket" if self._partition_by == "bucket" else "time")
        if self._partition_by == "day":
            values = pc.strftime(values, format="%Y-%m-%d")
        encoded = pc.fill_null(values, "").dictionary_encode()
        names, codes = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
        if len(names) == 1:
            yield names[0], batch
            return
        order = np.argsort(codes, kind="stable")
        bounds = np.searchsorted(codes[order], np.arange(len(names) + 1))
        for number, name in enumerate(names):
            yield name, batch.take(pa.array(order[bounds[number] : bounds[number + 1]]))
