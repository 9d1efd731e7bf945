"""`export_parquet`: an archive's log, changes, versions or state as Parquet, written by the tasks themselves.

Always true:
  - each row is exported once, whatever was killed and called again: what counts is what a manifest says
    (`exported.py`), and a run is finished as it was planned;
  - another call exports what was shipped since, and nothing that was exported before; a state is as of one
    seq, and calling again for that seq does nothing;
  - a run goes on in the log that those before it have exported: one that was replaced, went backwards, or was
    purged is an error;
  - no row of the log goes through Spark: a task reads its frames and writes its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import pyarrow as pa

from lowwater.engine.seams.real import RealRandomness
from lowwater.errors import Corrupt, InvalidConfig, LogDivergence, OtherCluster, VersionGone
from lowwater.spark.entry_columns import COLUMNS, MAIN_COLUMNS, arrow_schema, schema_of
from lowwater.spark.exported import ExportPlan, Run, Target, note_done, runs_in, stem
from lowwater.spark.frames import (
    CHANGES_TYPES,
    STATE_COLUMNS,
    VERSIONS_COLUMNS,
    changes,
    state_as_of,
    versions,
)
from lowwater.spark.jobs import Progress, run_job, waited_for
from lowwater.spark.parquet_files import BUFFER_BYTES, COMPRESSIONS, ParquetFile, ParquetFiles, PartitionBy
from lowwater.spark.plan import (
    PART_BYTES,
    Part,
    PartPlace,
    Pinned,
    PlanPiece,
    PlanSelection,
    Verify,
    open_own,
    parts,
    pin,
    require_kinds,
    require_names,
    require_reading,
    seq_of,
    store_place,
)
from lowwater.spark.segments import raw_batches, require_columns
from lowwater.spark.tasks import cores_of, map_batches
from lowwater.tiering.shipped_log import Moment
from lowwater.tiering.store import Store
from lowwater.tiering.store_uri import parse_uri

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

What = Literal["log", "changes", "versions", "state"]


HINT = (
    "find out what has happened to the archive. To export it as it is now, give a folder that is empty: what "
    "was exported before is not a part of it"
)


class Exported(NamedTuple):
    """What a call has exported. Without files there was nothing new."""

    to: str
    what: str
    seq_first: int
    seq_last: int
    rows: int
    bytes: int
    files: int


def export_parquet(
    spark: SparkSession,
    uri: str,
    to: str,
    *,
    what: What = "log",
    at: Moment = None,
    partition_by: PartitionBy | None = None,
    bucket: str | None = None,
    prefix: str | None = None,
    kinds: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    compression: str = "snappy",
    verify: Verify = "strict",
    options: Mapping[str, str] | None = None,
    to_options: Mapping[str, str] | None = None,
    part_bytes: int = PART_BYTES,
    progress: Progress | None = None,
) -> Exported:
    """Export the archive at `uri` to `to`, a folder or the URI of a store, which is for this export alone.

    `what` is the log (one row an entry), `changes`, `versions`, or the `state` as of `at`; for the others
    `at` is where this call ends. Called again, it exports what has come since. `bucket`, `prefix`, and for
    the log `kinds` and `columns`, choose rows and columns. They have to be the same in every call for one
    `to`.

    Read the files that `exported_files` names, or call `read_exported`. All files may be read while
    `_SUCCESS` is there, which is so when no call is under way or was killed. Run one call at a time."""
    _require(what, partition_by, kinds, columns, compression)
    require_names(bucket=bucket, prefix=prefix)
    require_reading(verify, part_bytes)
    place = store_place(to, to_options)
    wanted: dict[str, Any] = {
        "what": what,
        "partition_by": partition_by,
        "bucket": bucket,
        "prefix": prefix,
        "kinds": None if kinds is None else sorted(kinds),
        "columns": None if columns is None else list(columns),
    }
    pinned = pin(uri, options)
    store = open_own(place, read_only=False)
    try:
        target = Target(store)
        _require_same(target, pinned, wanted)
        target.clean()
        begun = target.plan()
        if begun is not None and what == "state" and at is not None:
            _require_state(begun, seq_of(pinned, at), target)
        plan = begun or _plan(target, pinned, wanted, at, part_bytes, 2 * cores_of(spark))
        if plan is None:
            last = target.last
            assert last is not None
            target.tidy(last.number)
            return Exported(store.uri, what, last.seq_last + 1, last.seq_last, 0, 0, 0)
        plan = target.begin(plan)
        job = _ExportJob(place, plan.number, partition_by, compression)
        if what == "log":
            files = _export_log(spark, target, pinned, plan, job, verify, progress)
        else:
            made = _frame(spark, uri, what, plan, options=options, verify=verify)
            files = _export_frame(spark, made, job, progress)
        run = target.publish(Run(*plan[:-1], sum(file.rows for file in files), files))
    finally:
        store.close()
    size = sum(file.bytes for file in run.files)
    return Exported(store.uri, what, run.seq_first, run.seq_last, run.rows, size, len(run.files))


def read_exported(spark: SparkSession, to: str, options: Mapping[str, str] | None = None) -> DataFrame:
    """Return the rows that count in a folder that every executor can read. For another store, give
    `spark.read.parquet` the files that `exported_files` names, by what your Spark calls that store."""
    place = parse_uri(store_place(to, options).uri)
    if place.kind not in ("file", "shared_fs"):
        raise InvalidConfig(
            "Spark reads other stores by connectors of its own",
            path=place.uri,
            hint="give `spark.read.parquet` the files that `exported_files` names",
        )
    runs = runs_in(to, options)
    names = [f"file://{place.path}/{file.name}" for run in runs for file in run.files]
    if not names:
        return _nothing(spark, runs[0].wanted)
    frame = spark.read.option("basePath", f"file://{place.path}")
    if runs[0].wanted["partition_by"] is not None:
        from pyspark.sql.types import DateType, StringType

        # By itself Spark takes a bucket that is called 007 for a number.
        name = runs[0].wanted["partition_by"]
        own = spark.read.parquet(names[0]).schema
        frame = frame.schema(own.add(name, StringType() if name == "bucket" else DateType()))
    return frame.parquet(*names)


def _nothing(spark: SparkSession, wanted: Mapping[str, Any]) -> DataFrame:
    """Return an empty frame for an export without rows, so without a file that says what columns it has."""
    types: Mapping[str, str] = CHANGES_TYPES if wanted["what"] == "changes" else COLUMNS
    columns = {
        "log": wanted["columns"] or MAIN_COLUMNS,
        "state": STATE_COLUMNS,
        "versions": VERSIONS_COLUMNS,
        "changes": tuple(CHANGES_TYPES),
    }[wanted["what"]]
    frame = spark.createDataFrame([], schema_of(types, columns))
    if wanted["partition_by"] == "bucket":
        return frame.select(*(name for name in columns if name != "bucket"), "bucket")
    return frame if wanted["partition_by"] is None else frame.selectExpr("*", "to_date(time) AS day")


def _require(
    what: str,
    partition_by: str | None,
    kinds: Sequence[str] | None,
    columns: Sequence[str] | None,
    compression: str,
) -> None:
    if what not in get_args(What):
        raise InvalidConfig(f"there is no export of {what!r:.80}", hint=f"choose {_either(What)}")
    if partition_by is not None and partition_by not in get_args(PartitionBy):
        raise InvalidConfig(
            f"there are no partitions by {partition_by!r:.80}", hint=f"choose {_either(PartitionBy)}, or none"
        )
    if what != "log" and (kinds is not None or columns is not None):
        raise InvalidConfig(
            f"kinds and columns are chosen of the log, not of {what}", hint="leave them out, or choose later"
        )
    require_kinds(kinds)
    if columns is not None:
        require_columns(columns)
    if compression not in COMPRESSIONS:
        raise InvalidConfig(
            f"there is no compression {compression!r:.80}", hint=f"choose {' or '.join(COMPRESSIONS)}"
        )
    needed = {"bucket": "bucket", "day": "time"}.get(partition_by or "")
    if needed is not None and columns is not None and needed not in columns:
        raise InvalidConfig(
            f"partitions by {partition_by} need the column {needed}", hint="add it to the columns"
        )


def _either(choice: Any) -> str:
    return " or ".join(get_args(choice))


def _require_same(target: Target, pinned: Pinned, wanted: Mapping[str, Any]) -> None:
    """An export that goes on, goes on with the same, and in the same log."""
    before = target.plan() or target.last
    if before is None:
        return
    if before.cluster_id != pinned.cluster_id.hex():
        raise OtherCluster(
            "what was exported to here is from another archive",
            path=target.uri,
            hint="give each export a folder of its own",
        )
    if before.seq_last > pinned.hwm:
        raise LogDivergence(
            f"the archive ends with seq {pinned.hwm} now, and it was exported up to {before.seq_last}",
            path=pinned.reached_by,
            seq=before.seq_last,
            hint=HINT,
        )
    first = before.seq_first if isinstance(before, ExportPlan) else before.seq_last + 1
    if first <= pinned.seq_before:
        raise VersionGone(
            f"the entries from {first} to {pinned.seq_before} are gone, and were not exported",
            path=pinned.place.uri,
            seq=first,
            hint="export from the archive, which has all of it, or export what is here into another folder",
        )
    if before.segment != pinned.segment_hash(before.seq_last):
        raise LogDivergence(
            f"seq {before.seq_last} lies in another segment than when it was exported: the archive goes on "
            "from an older state",
            path=pinned.reached_by,
            seq=before.seq_last,
            hint=HINT,
        )
    different = [name for name, value in wanted.items() if before.wanted[name] != value]
    if different:
        name = different[0]
        raise InvalidConfig(
            f"the export that is here has {name} {before.wanted[name]}, not {wanted[name]}",
            path=target.uri,
            hint="go on with the same, or give this one a folder of its own",
        )


def _require_state(before: Run | ExportPlan, seq: int, target: Target) -> None:
    if before.seq_last != seq:
        raise InvalidConfig(
            f"the state as of seq {before.seq_last} is here, and not of {seq}",
            path=target.uri,
            hint="export each state into a folder of its own",
        )


def _plan(
    target: Target,
    pinned: Pinned,
    wanted: dict[str, Any],
    at: Moment,
    part_bytes: int,
    tasks_min: int,
) -> ExportPlan | None:
    """What there is to export that was not exported yet; None for nothing."""
    last = seq_of(pinned, at)
    before = target.last
    what = wanted["what"]
    if what == "state" and before is not None:
        _require_state(before, last, target)
        return None
    first = pinned.seq_first if before is None else before.seq_last + 1
    if before is not None and first > last:
        return None
    pieces: list[list[list[int]]] = []
    if what == "log":
        found = parts(pinned, _selection(wanted, first, last), part_bytes=part_bytes, tasks_min=tasks_min)
        pieces = [
            [[each.segment.first, each.frame_first, each.frame_stop] for each in part.pieces]
            for part in found
        ]
    return ExportPlan(
        target.next_number, wanted, pinned.cluster_id.hex(), first, last, pinned.segment_hash(last), pieces
    )


def _selection(wanted: Mapping[str, Any], first: int, last: int) -> PlanSelection:
    kinds = None if wanted["kinds"] is None else frozenset(wanted["kinds"])
    return PlanSelection(first, last, kinds=kinds, bucket=wanted["bucket"], prefix=wanted["prefix"])


# ---------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class _ExportJob:
    """What every task has to know of where its files belong."""

    place: PartPlace
    run: int
    partition_by: PartitionBy | None
    compression: str

    def files(self, store: Store, name: str, schema: pa.Schema, buffer_bytes: int | None) -> ParquetFiles:
        return ParquetFiles(
            store,
            name,
            schema,
            partition_by=self.partition_by,
            compression=self.compression,
            buffer_bytes=buffer_bytes,
        )


def _export_log(
    spark: SparkSession,
    target: Target,
    pinned: Pinned,
    plan: ExportPlan,
    job: _ExportJob,
    verify: Verify,
    progress: Progress | None,
) -> list[ParquetFile]:
    segments = {segment.first: segment for segment in pinned.segments}
    selection = _selection(plan.wanted, plan.seq_first, plan.seq_last)
    done = target.done()
    columns = tuple(plan.wanted["columns"] or MAIN_COLUMNS)
    items: list[tuple[int, Part]] = []
    for number, pieces in enumerate(plan.parts):
        if number in done:
            continue
        if any(first not in segments for first, _, _ in pieces):
            raise Corrupt(
                "the archive has lost segments that an export had begun to read",
                path=pinned.place.uri,
                hint="`lowwater scrub` says which are gone",
            )
        part = tuple(
            PlanPiece(pinned.name_of(segments[first]), segments[first], start, stop)
            for first, start, stop in pieces
        )
        items.append((number, Part(pinned.place, part, selection, verify)))
    work = partial(_export_part, job, columns)
    for (number, _), files in zip(
        items, run_job(spark, work, items, what="the log", progress=progress), strict=True
    ):
        done[number] = files
    return [file for number in sorted(done) for file in done[number]]


def _export_part(job: _ExportJob, columns: Sequence[str], item: tuple[int, Part]) -> list[ParquetFile]:
    number, part = item
    store = open_own(job.place, read_only=False)
    try:
        files = job.files(store, stem(job.run, number), arrow_schema(columns), None)
        for batch in raw_batches(part, columns):
            files.add(batch)
        made = files.close()
        note_done(store, job.run, number, made)
    finally:
        store.close()
    return made


def _frame(
    spark: SparkSession,
    uri: str,
    what: str,
    plan: ExportPlan,
    *,
    options: Mapping[str, str] | None,
    verify: Verify,
) -> DataFrame:
    """What is no row of the log comes from Spark."""
    named: dict[str, Any] = {
        "bucket": plan.wanted["bucket"],
        "prefix": plan.wanted["prefix"],
        "options": options,
        "verify": verify,
    }
    if what == "state":
        return state_as_of(spark, uri, plan.seq_last, **named)
    made = changes if what == "changes" else versions
    return made(spark, uri, start=plan.seq_first, end=plan.seq_last, **named)


def _export_frame(
    spark: SparkSession, frame: DataFrame, job: _ExportJob, progress: Progress | None
) -> list[ParquetFile]:
    # Attempts of this call meet no file of another one.
    token = RealRandomness().token(4).hex()
    write = partial(_write_rows, job, token)
    noted = map_batches(frame, write, "name string, rows bigint, bytes bigint")
    rows = waited_for(spark, noted.collect, "rows", 0, progress or (lambda _what, _done, _total: None))
    return [
        ParquetFile(row["name"], row["rows"], row["bytes"])
        for row in sorted(rows, key=lambda row: row["name"])
    ]


def _write_rows(job: _ExportJob, token: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    context = TaskContext.get()
    task = context.partitionId() if context is not None else 0
    attempt = context.taskAttemptId() if context is not None else 0
    files: ParquetFiles | None = None
    store = open_own(job.place, read_only=False)
    try:
        for batch in batches:
            if files is None:
                name = stem(job.run, task, f"-{token}-{attempt}")
                files = job.files(store, name, batch.schema, BUFFER_BYTES)
            files.add(batch)
        made = [] if files is None else files.close()
    finally:
        store.close()
    if made:
        names, rows, sizes = zip(*made, strict=True)
        yield pa.record_batch({"name": list(names), "rows": list(rows), "bytes": list(sizes)})
