"""`format("lowwater")`: the entries of an archive as a DataFrame, or as a stream.

Always true:
  - a batch query reads what the newest manifest reached when it was planned: one that is planned later may
    reach more;
  - the offset of a stream is the last entry that was read, with the hash of its segment and the cluster: what
    was read once is never read again, and an archive that is not the same any more is an error;
  - between two offsets there are always the same rows;
  - an error names the object, and says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from lowwater.errors import InvalidConfig
from lowwater.spark.entry_columns import COLUMNS, MAIN_COLUMNS, schema_of
from lowwater.spark.filters import narrowed
from lowwater.spark.following import Follower
from lowwater.spark.options import Options, parse
from lowwater.spark.plan import Part, parts, pin
from lowwater.spark.segments import raw_batches, require_columns
from lowwater.spark.tasks import hinted, settle

NAME = "lowwater"


class LowwaterSource(DataSource):
    """The data source of `spark.read.format("lowwater")`. `lowwater.spark.session` registers it, as
    `spark.dataSource.register(LowwaterSource)` does."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        with hinted():
            parse(self.options)
        return schema_of(COLUMNS, MAIN_COLUMNS)

    def reader(self, schema: StructType) -> LowwaterReader:
        with hinted():
            return LowwaterReader(parse(self.options), schema)

    def streamReader(self, schema: StructType) -> LowwaterStreamReader:  # noqa: N802
        with hinted():
            return LowwaterStreamReader(parse(self.options), schema)


class _Rows:
    """The columns that a schema asks for."""

    def __init__(self, schema: StructType) -> None:
        self.columns = [field.name.lower() for field in schema.fields]
        require_columns(self.columns)
        for name, field in zip(self.columns, schema.fields, strict=True):
            found = field.dataType.simpleString()
            if found != COLUMNS[name]:
                raise InvalidConfig(
                    f"the column {name} is {COLUMNS[name]}, and the schema says {found}",
                    hint="change the schema, or cast the column after it was read",
                )
        self.schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        settle()
        part: Part | None = partition.value
        if part is not None:
            with hinted():
                for batch in raw_batches(part, self.columns):
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=self.schema)


class LowwaterReader(DataSourceReader):
    def __init__(self, options: Options, schema: StructType) -> None:
        if options.latest:
            raise InvalidConfig("start is latest, which is for streams", hint="give a seq or a time")
        self._options = options
        self._rows = _Rows(schema)
        self._pinned = pin(options.uri, options.store)
        self._selection = options.selection(self._pinned)

    @property
    def pushFilters(self) -> _Pushing:  # noqa: N802
        return _Pushing(self)

    def narrow(self, filters: Iterable[Filter]) -> list[Filter]:
        """Take in what filters say, and return those that Spark has to evaluate."""
        self._selection, left = narrowed(self._selection, filters)
        return left

    def partitions(self) -> list[InputPartition]:
        with hinted():
            options = self._options
            found = parts(
                self._pinned,
                self._selection,
                verify=options.verify,
                part_bytes=options.partition_bytes,
                tasks_min=options.tasks_min,
            )
            return [InputPartition(part) for part in found]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._rows.read(partition)

    def __getstate__(self) -> dict[str, Any]:
        # Tasks get this reader, and need neither the catalogue nor what was asked for.
        return {"_rows": self._rows}


class _Pushing:
    """`pushFilters` of a reader that works whether or not filters are pushed: where that is switched off,
    Spark refuses every reader that overrides the method, and looks for that at `__func__`."""

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: LowwaterReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return self._reader.narrow(filters)


# ---------------------------------------------------------------------------- streams


class LowwaterStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Options, schema: StructType) -> None:
        self._rows = _Rows(schema)
        self._follower = Follower(options)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        with hinted():
            return self._follower.initial()._asdict()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxBytes(self._follower.options.batch_bytes_max)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        with hinted():
            unlimited = isinstance(limit, ReadAllAvailable)
            return self._follower.latest(start, unlimited=unlimited)._asdict()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        with hinted():
            return self._follower.newest()._asdict()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with hinted():
            self._follower.stop_at_newest()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        with hinted():
            return [InputPartition(part) for part in self._follower.parts(start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._rows.read(partition)

    def __getstate__(self) -> dict[str, Any]:
        return {"_rows": self._rows}
