"""Data frames over an archive: its log, the state as of a moment, versions, and what changed.

Always true:
  - all of them have one sense of replay (`replay.py`): what the engine would say, they say too;
  - what they show is what was shipped when they were made: others may ship meanwhile, and nothing changes;
  - what is wrong with a call is told by that call, on the driver, before a task runs.

Moments are seqs, or times with a zone; `start` and `end` are both inclusive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowwater.spark.entry_columns import COLUMNS, MAIN_COLUMNS, schema_of
from lowwater.spark.pinned_archive import PinnedArchive, StoreOptions, WantedParts
from lowwater.spark.plan import (
    PART_BYTES,
    PASSING_BYTES,
    Part,
    PlanSelection,
    Verify,
    require_kinds,
    require_names,
)
from lowwater.spark.reading import VERSION_COLUMNS
from lowwater.spark.replay import needed
from lowwater.spark.segments import raw_batches, require_columns
from lowwater.spark.tasks import run_tasks
from lowwater.tiering.shipped_log import Moment

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

STATE_COLUMNS = ("bucket", "key", "seq", "time", "metadata", "value")
VERSIONS_COLUMNS = ("seq", "time", "kind", "bucket", "key", "metadata", "value", "origin", "txn")
CHANGES_TYPES = {name: VERSION_COLUMNS[name] for name in VERSIONS_COLUMNS} | {
    f"before_{name}": VERSION_COLUMNS[name] for name in ("seq", "time", "metadata", "value")
}


def log_frame(
    spark: SparkSession,
    uri: str,
    *,
    start: Moment = None,
    end: Moment = None,
    kinds: Sequence[str] | None = None,
    bucket: str | None = None,
    prefix: str | None = None,
    columns: Sequence[str] = MAIN_COLUMNS,
    verify: Verify = "strict",
    options: StoreOptions = None,
    part_bytes: int = PASSING_BYTES,
) -> DataFrame:
    """Return the entries as they stand in the log, refused ones too: one row for each, with its `seq` and
    `time`."""
    require_columns(columns)
    require_kinds(kinds)
    require_names(bucket=bucket, prefix=prefix)
    archive = PinnedArchive.open(spark, uri, options, verify, part_bytes)
    first, last = archive.range(start, end)
    wanted = None if kinds is None else frozenset(kinds)
    selection = PlanSelection(first, last, kinds=wanted, bucket=bucket, prefix=prefix)
    items = [(part, tuple(columns)) for part in archive.parts(selection)]
    return run_tasks(spark, items, _entries, schema_of(COLUMNS, columns))


def _entries(item: tuple[Part, tuple[str, ...]]) -> Iterator[pa.RecordBatch]:
    return raw_batches(*item)


def state_as_of(
    spark: SparkSession,
    uri: str,
    at: Moment = None,
    *,
    bucket: str | None = None,
    prefix: str | None = None,
    columns: Sequence[str] = STATE_COLUMNS,
    verify: Verify = "strict",
    options: StoreOptions = None,
    part_bytes: int = PART_BYTES,
) -> DataFrame:
    """Return the live keys as of a seq or a time, or as of the newest entry that was shipped. There is one
    row for each key, with the seq and time of its version."""
    require_columns(columns, STATE_COLUMNS)
    require_names(bucket=bucket, prefix=prefix)
    archive = PinnedArchive.open(spark, uri, options, verify, part_bytes)
    wanted = WantedParts(needed(columns, ("frame",)), bucket, prefix)
    return archive.state(wanted, archive.seq(at)).select(*columns)


def versions(
    spark: SparkSession,
    uri: str,
    *,
    start: Moment = None,
    end: Moment = None,
    bucket: str | None = None,
    prefix: str | None = None,
    columns: Sequence[str] = VERSIONS_COLUMNS,
    verify: Verify = "strict",
    options: StoreOptions = None,
    part_bytes: int = PART_BYTES,
) -> DataFrame:
    """Return all versions that came between two moments, also of what was deleted or superseded since.
    Deletions are among them: the kind says which. Versions of buckets have an empty key."""
    require_columns(columns, VERSIONS_COLUMNS)
    require_names(bucket=bucket, prefix=prefix)
    archive = PinnedArchive.open(spark, uri, options, verify, part_bytes)
    first, last = archive.range(start, end)
    wanted = WantedParts(needed(columns, ("bucket", "key", "seq", "frame")), bucket, prefix)
    return archive.versions(wanted, first, last).select(*columns)


def changes(
    spark: SparkSession,
    uri: str,
    *,
    start: Moment = None,
    end: Moment = None,
    bucket: str | None = None,
    prefix: str | None = None,
    verify: Verify = "strict",
    options: StoreOptions = None,
    part_bytes: int = PART_BYTES,
) -> DataFrame:
    """Return what changed between two moments: one row for each version, with what the key had before it
    (`before_seq`, `before_time`, `before_metadata`, `before_value`; null where the key was not there)."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812 — as everybody calls it

    require_names(bucket=bucket, prefix=prefix)
    archive = PinnedArchive.open(spark, uri, options, verify, part_bytes)
    first, last = archive.range(start, end)
    wanted = WantedParts((*VERSIONS_COLUMNS, "frame"), bucket, prefix, buckets=True)
    if first <= archive.pinned.seq_first:
        archive.require_beginning()
    news = archive.versions(wanted, first, last).withColumn("is_new", F.lit(True))
    rows = news
    if first > archive.pinned.seq_first:
        # What is older than the range, of the keys that have changed in it.
        olds = archive.state(wanted._replace(columns=(*STATE_COLUMNS, "frame")), first - 1)
        for name in ("kind", "origin", "txn"):
            olds = olds.withColumn(name, F.lit(None).cast(VERSION_COLUMNS[name]))
        changed = news.select("bucket", "key").distinct()
        olds = olds.join(changed, ["bucket", "key"], "left_semi").withColumn("is_new", F.lit(False))
        rows = news.unionByName(olds)
    # Seqs of the versions of one key differ.
    before = Window.partitionBy("bucket", "key").orderBy("seq")
    is_there = ~F.coalesce(F.lag("kind").over(before).startswith("delete"), F.lit(False))
    for name in ("seq", "time", "metadata", "value"):
        rows = rows.withColumn(f"before_{name}", F.when(is_there, F.lag(name).over(before)))
    return rows.filter("is_new").select(*CHANGES_TYPES)
