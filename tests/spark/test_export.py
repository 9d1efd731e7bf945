"""Exports: each row once, whatever is killed and called again, and never half of a run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lowwater
from lowwater.errors import Corrupt, InvalidConfig, LogDivergence, NotFound, OtherCluster, VersionGone
from lowwater.spark import export
from lowwater.spark.export import Exported, export_parquet, read_exported
from lowwater.spark.exported import exported_files, runs_in
from lowwater.spark.frames import changes, log_frame, state_as_of, versions
from lowwater.spark.parquet_files import ParquetFiles, folder_of
from lowwater.spark.plan import pin
from lowwater.tiering.folder_store import FolderStore
from lowwater.tiering.memory_store import MemoryStore
from lowwater.tiering.open_store import open_store
from lowwater.tiering.testing.s3_server import S3Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STRANGE = [
    "photos",
    "a=b",
    "ünï/cödé",
    "50%",
    "007",
    ".hidden",
    "_under",
    "__HIVE_DEFAULT_PARTITION__",
    "a b:c?*",
]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[lowwater.Database]:
    """With buckets of all kinds of names, and an archive in `tmp_path/archive`."""
    config = {"wal": {"rotate_max_bytes": 65536}}
    tier = f"file://{tmp_path}/archive"
    with lowwater.open(tmp_path / "data", tier=tier, config=config) as db:
        for bucket in STRANGE:
            db.create_bucket(bucket)
        fill(db, 0)
        yield db


def fill(db: lowwater.Database, start: int) -> None:
    for number in range(start, start + 40):
        bucket = STRANGE[number % len(STRANGE)]
        db.put_many(bucket, [(f"{number}/{n}", b"v" * n * 40) for n in range(20)])
        db.delete(bucket, f"{number}/3")
        db.put(bucket, f"{number}/4", b"large" * 1000, metadata={"n": str(number)})
    db.ship()


def archive_of(tmp_path: Path) -> str:
    return f"file://{tmp_path}/archive"


def plain(folder: Path) -> list[Path]:
    """What somebody sees who knows nothing of Lowwater, and takes what is no secret."""
    return [
        path
        for path in folder.rglob("*.parquet")
        if not any(part.startswith(("_", ".")) for part in path.relative_to(folder).parts)
    ]


def seqs_in(folder: Path) -> list[int]:
    return sorted(
        seq for path in plain(folder) for seq in pq.ParquetFile(path).read(["seq"])["seq"].to_pylist()
    )


def expected_seqs(spark: SparkSession, tmp_path: Path) -> list[int]:
    return [
        row.seq for row in log_frame(spark, archive_of(tmp_path), columns=["seq"]).orderBy("seq").collect()
    ]


def rows_of(frame: Any, *columns: str) -> list[Any]:
    """In an order; a map has none."""
    names = columns or tuple(frame.columns)
    return sorted(repr([_plain(row[name]) for name in names]) for row in frame.collect())


def _plain(value: Any) -> Any:
    return sorted(value.items()) if isinstance(value, dict) else value


# ---------------------------------------------------------------------------- the log


@pytest.mark.slow
@pytest.mark.parametrize("partition_by", [None, "bucket", "day"])
def test_the_log_is_exported_and_then_what_is_new(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path, partition_by: Any
) -> None:
    to = tmp_path / "to"
    uri = archive_of(tmp_path)

    def export() -> Exported:
        return export_parquet(spark, uri, str(to), partition_by=partition_by, part_bytes=2**17)

    first = export()
    assert first.rows == len(expected_seqs(spark, tmp_path))
    assert seqs_in(to) == expected_seqs(spark, tmp_path)
    assert (to / "_SUCCESS").exists()
    before = {path: path.stat().st_mtime_ns for path in plain(to)}
    nothing = export()
    assert (nothing.rows, nothing.files) == (0, 0)
    assert {path: path.stat().st_mtime_ns for path in plain(to)} == before
    fill(database, 1000)
    second = export()
    assert second.seq_first == first.seq_last + 1
    assert before.items() <= {path: path.stat().st_mtime_ns for path in plain(to)}.items(), "none again"
    assert seqs_in(to) == expected_seqs(spark, tmp_path)
    assert {str(path.relative_to(to)) for path in plain(to)} == set(exported_files(str(to)))
    assert [run.number for run in runs_in(str(to))] == [1, 2]
    found = read_exported(spark, str(to))
    whole = log_frame(spark, uri)
    names = [name for name in whole.columns if name != "bucket" or partition_by is None]
    assert rows_of(found, *names) == rows_of(whole, *names)
    assert not list((to / "_lowwater").glob("*/*")), "what tasks leave is removed in the end"


@pytest.mark.slow
def test_whatever_a_bucket_is_called_spark_reads_its_name_back(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path
) -> None:
    to = str(tmp_path / "to")
    export_parquet(spark, archive_of(tmp_path), to, partition_by="bucket")
    found = read_exported(spark, to).groupBy("bucket").count().collect()
    whole = log_frame(spark, archive_of(tmp_path)).groupBy("bucket").count().collect()
    assert {row["bucket"] or "": row["count"] for row in found} == {
        row["bucket"]: row["count"] for row in whole
    }
    assert {row["bucket"] for row in found} == {*STRANGE, None}


def test_folders_of_partitions_are_safe_names() -> None:
    """Nothing leaves the folder, and two buckets never share one."""
    names = [*STRANGE, "..", ".", "../../etc", "%2E", "", "\\", "\x1f", "=", "/"]
    folders = [folder_of("bucket", name) for name in names]
    assert len(set(folders)) == len(names)
    for folder in folders:
        assert folder.startswith("bucket=")
        assert folder.count("/") == 1
    assert folder_of("bucket", "") == "bucket=__HIVE_DEFAULT_PARTITION__/"


@pytest.mark.slow
def test_a_part_of_the_log_is_exported(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path
) -> None:
    to, uri = str(tmp_path / "to"), archive_of(tmp_path)
    wanted: dict[str, Any] = {"kinds": ["delete"], "bucket": "photos", "columns": ["seq", "key", "bucket"]}
    done = export_parquet(spark, uri, to, **wanted)
    assert 0 < done.rows < 40
    assert rows_of(read_exported(spark, to)) == rows_of(log_frame(spark, uri, **wanted))
    with pytest.raises(InvalidConfig, match="has bucket photos"):
        export_parquet(spark, uri, to, **{**wanted, "bucket": "a=b"})
    fill(database, 1000)
    again = export_parquet(spark, uri, to, **wanted)
    assert again.rows > 0
    assert rows_of(read_exported(spark, to)) == rows_of(log_frame(spark, uri, **wanted))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["log", "versions", "changes", "state"])
@pytest.mark.parametrize("partition_by", [None, "bucket", "day"])
def test_an_export_of_nothing_is_read_as_nothing(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path, what: Any, partition_by: Any
) -> None:
    """With the columns that it would have; a part of keys may be empty for a while."""
    uri, empty, full = archive_of(tmp_path), str(tmp_path / "empty"), str(tmp_path / "full")
    named: dict[str, Any] = {"what": what, "partition_by": partition_by}
    assert export_parquet(spark, uri, empty, prefix="none such", **named).rows == 0
    assert export_parquet(spark, uri, full, prefix="1/1", **named).rows > 0
    nothing = read_exported(spark, empty)
    assert nothing.count() == 0
    assert nothing.dtypes == read_exported(spark, full).dtypes


# ---------------------------------------------------------------------------- state, versions, changes


@pytest.mark.slow
def test_a_state_is_exported_once(spark: SparkSession, database: lowwater.Database, tmp_path: Path) -> None:
    to, uri = str(tmp_path / "to"), archive_of(tmp_path)
    at = pin(uri).hwm // 2
    done = export_parquet(spark, uri, to, what="state", at=at, partition_by="bucket")
    columns = ["bucket", "key", "seq", "value", "metadata"]
    assert rows_of(read_exported(spark, to), *columns) == rows_of(state_as_of(spark, uri, at), *columns)
    assert done.rows == state_as_of(spark, uri, at).count()
    assert export_parquet(spark, uri, to, what="state", at=at, partition_by="bucket").files == 0
    with pytest.raises(InvalidConfig, match=f"state as of seq {at} is here"):
        export_parquet(spark, uri, to, what="state", partition_by="bucket")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["versions", "changes"])
def test_versions_and_changes_are_exported_and_then_what_is_new(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path, what: Any
) -> None:
    to, uri = str(tmp_path / "to"), archive_of(tmp_path)
    export_parquet(spark, uri, to, what=what)
    fill(database, 0)  # the same keys again: now there is something before
    assert export_parquet(spark, uri, to, what=what).rows > 0
    whole = (versions if what == "versions" else changes)(spark, uri)
    assert rows_of(read_exported(spark, to), *whole.columns) == rows_of(whole)
    assert set(exported_files(to)) == {str(path.relative_to(to)) for path in plain(Path(to))}


# ---------------------------------------------------------------------------- bad input


@pytest.mark.slow
def test_what_cannot_be_exported_is_told_before_anything_is_written(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path
) -> None:
    uri = archive_of(tmp_path)
    to = tmp_path / "to"
    bad: list[dict[str, Any]] = [
        {"what": "everything"},
        {"partition_by": "hour"},
        {"what": "state", "kinds": ["put"]},
        {"kinds": ["puts"]},
        {"columns": ["seqs"]},
        {"columns": ["seq"], "partition_by": "day"},
    ]
    for wanted in bad:
        with pytest.raises(InvalidConfig):
            export_parquet(spark, uri, str(to), **wanted)
    assert not to.exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    with pytest.raises(InvalidConfig, match="something else is here"):
        export_parquet(spark, uri, str(other))
    assert [path.name for path in other.iterdir() if path.name[0] != "."] == ["mine.txt"]
    (tmp_path / "nothing").mkdir()
    with pytest.raises(NotFound, match="nothing was exported"):
        exported_files(str(tmp_path / "nothing"))


@pytest.mark.slow
def test_another_archive_is_not_exported_into_the_same_folder(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path
) -> None:
    to = str(tmp_path / "to")
    export_parquet(spark, archive_of(tmp_path), to)
    with lowwater.open(tmp_path / "second", tier=f"file://{tmp_path}/second-archive") as db:
        db.create_bucket("b")
        db.ship()
        with pytest.raises(OtherCluster):
            export_parquet(spark, f"file://{tmp_path}/second-archive", to)


@pytest.mark.slow
def test_an_archive_that_went_backwards_is_not_exported_further(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path
) -> None:
    """Neither while it is behind what was exported, nor when it has come so far again, with other entries."""
    to, uri = str(tmp_path / "to"), archive_of(tmp_path)
    for folder in ("archive", "data"):
        shutil.copytree(
            tmp_path / folder, tmp_path / f"older-{folder}", ignore=shutil.ignore_patterns("hint*")
        )
    fill(database, 1000)
    last = export_parquet(spark, uri, to).seq_last
    database.close()
    for folder in ("archive", "data"):
        (tmp_path / folder).rename(tmp_path / f"newer-{folder}")
        (tmp_path / f"older-{folder}").rename(tmp_path / folder)
    before = plain(tmp_path / "to")
    with pytest.raises(LogDivergence, match="ends with seq") as caught:
        export_parquet(spark, uri, to)
    assert f"{uri}/manifest/" in str(caught.value)
    with lowwater.open(tmp_path / "data", tier=uri) as db:
        fill(db, 2000)
        fill(db, 3000)
        db.ship()
        assert pin(uri).hwm > last
        with pytest.raises(LogDivergence, match="another segment"):
            export_parquet(spark, uri, to)
    assert plain(tmp_path / "to") == before


@pytest.mark.slow
def test_what_was_purged_before_it_was_exported_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    """Of a directory: there would be a gap in what was exported."""
    to, uri = str(tmp_path / "to"), str(tmp_path / "data")

    def write(*entries: bytes) -> None:
        with lowwater.open(tmp_path / "data") as db:
            if "b" not in db.buckets():
                db.create_bucket("b")
            for value in entries:
                db.put("b", "k", value)
                db._log.seal()

    write(b"1", b"2")
    last = export_parquet(spark, uri, to).seq_last
    write(b"3", b"4", b"5")
    wal = tmp_path / "data" / "wal"
    names = [pin(uri).name_of(segment) for segment in pin(uri).segments if segment.first <= last + 1]
    for name in names[:-1]:
        (wal / name).unlink()
    assert pin(uri).seq_first == last + 1, "what was exported may go"
    (wal / names[-1]).unlink()
    with pytest.raises(VersionGone, match="are gone, and were not exported"):
        export_parquet(spark, uri, to)


@pytest.mark.slow
def test_a_damaged_segment_ends_an_export_and_nothing_of_it_counts(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path
) -> None:
    """When the object is back, the next call goes on."""
    to = tmp_path / "to"
    segment = sorted((tmp_path / "archive" / "wal").rglob("*.log"))[5]
    good = segment.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 3] ^= 1
    segment.write_bytes(bad)
    with pytest.raises(lowwater.errors.DataError) as caught:
        export_parquet(spark, archive_of(tmp_path), str(to), part_bytes=2**17)
    assert segment.name in str(caught.value.path)
    assert not (to / "_SUCCESS").exists()
    with pytest.raises(NotFound):
        exported_files(str(to))
    segment.write_bytes(good)
    export_parquet(spark, archive_of(tmp_path), str(to), part_bytes=2**17)
    assert seqs_in(to) == expected_seqs(spark, tmp_path)


# ---------------------------------------------------------------------------- killed

KILLED = """
import sys
import threading
import lowwater.spark
from lowwater.spark import export
export.Target.publish = lambda *_: threading.Event().wait()  # or it might be faster than the kill
if __name__ == "__main__":
    spark = lowwater.spark.session(master="local[1]", config={"spark.driver.memory": "600m"})
    print("begins", flush=True)
    export.export_parquet(spark, sys.argv[1], sys.argv[2], what=sys.argv[3], part_bytes=2**16,
                          partition_by=sys.argv[4] or None)
    print("done", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(("what", "partition_by"), [("log", ""), ("log", "bucket"), ("versions", "")])
def test_a_kill_in_the_middle_and_another_call_give_each_row_once(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path, what: Any, partition_by: Any
) -> None:
    """kill -9 of the driver, and so of its executors, when a few files are there; the log grows meanwhile."""
    to = tmp_path / "to"
    uri = archive_of(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, uri, str(to), what, partition_by],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "begins\n"
        _until(lambda: len(plain(to)) >= (2 if what == "log" else 1), child)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert not (to / "_SUCCESS").exists()
    with pytest.raises(NotFound):
        exported_files(str(to))
    fill(database, 1000)
    named: dict[str, Any] = {"what": what, "partition_by": partition_by or None}
    kept = {path: path.stat().st_mtime_ns for path in plain(to)} if what == "log" else {}
    finished = export_parquet(spark, uri, str(to), **named)
    assert finished.seq_last < pin(uri).hwm, "it was finished as it was planned"
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in plain(to)}.items()
    export_parquet(spark, uri, str(to), **named)
    whole = log_frame(spark, uri) if what == "log" else versions(spark, uri)
    assert seqs_in(to) == sorted(row.seq for row in whole.select("seq").collect())
    assert set(exported_files(str(to))) == {str(path.relative_to(to)) for path in plain(to)}


def _until(condition: Callable[[], bool], child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert child.poll() is None, "it was faster than this test"
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_a_run_that_was_stopped_between_any_two_writes_is_finished(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the driver: plan, manifest, tidying up and _SUCCESS. Those of tasks are kills."""
    to, uri = tmp_path / "to", archive_of(tmp_path)
    calls = {"write": FolderStore.write, "delete": FolderStore.delete}
    stopped = 0
    for number in range(100):
        left = [number]
        for name, call in calls.items():
            monkeypatch.setattr(FolderStore, name, _stopping(call, left))
        folder = to / str(number)
        try:
            export_parquet(spark, uri, str(folder), part_bytes=2**20)
        except KeyboardInterrupt:
            stopped += 1
        else:
            break
        finally:
            monkeypatch.undo()
        export_parquet(spark, uri, str(folder), part_bytes=2**20)
        assert seqs_in(folder) == expected_seqs(spark, tmp_path)
        assert (folder / "_SUCCESS").exists()
        assert not list((folder / "_lowwater").glob("*/*"))
    assert stopped >= 4


@pytest.mark.slow
def test_two_calls_at_once_lose_nothing_of_each_other(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody should; but files that count are never those that the slower one removes."""
    to, uri = tmp_path / "to", archive_of(tmp_path)
    write_rows, others = export._export_frame, []

    def after_another(*given: Any) -> Any:
        monkeypatch.undo()
        files = write_rows(*given)
        others.append(export_parquet(spark, uri, str(to), what="versions"))
        return files

    monkeypatch.setattr(export, "_export_frame", after_another)
    assert export_parquet(spark, uri, str(to), what="versions") == others[0]
    assert set(exported_files(str(to))) == {str(path.relative_to(to)) for path in plain(to)}
    assert read_exported(spark, str(to)).count() == versions(spark, uri).count()


@pytest.mark.slow
def test_the_files_of_a_call_that_was_overtaken_and_killed_are_removed_by_the_next(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_SUCCESS` is there by then, and whoever takes all files would see rows twice."""
    to, uri = tmp_path / "to", archive_of(tmp_path)
    write_rows = export._export_frame

    def overtaken(*given: Any) -> Any:
        monkeypatch.undo()
        export_parquet(spark, uri, str(to), what="versions")
        write_rows(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "_export_frame", overtaken)
    with pytest.raises(KeyboardInterrupt):
        export_parquet(spark, uri, str(to), what="versions")
    counted = set(exported_files(str(to)))
    assert len(plain(to)) > len(counted)
    assert export_parquet(spark, uri, str(to), what="versions").files == 0
    assert {str(path.relative_to(to)) for path in plain(to)} == counted


@pytest.mark.parametrize("noted", [b"", b"[]", b"{", b'"x"'])
def test_a_manifest_that_is_damaged_is_an_error_that_names_it(tmp_path: Path, noted: bytes) -> None:
    """And no traceback."""
    (tmp_path / "_lowwater").mkdir()
    (tmp_path / "_lowwater" / "0000000001.json").write_bytes(noted)
    with pytest.raises(Corrupt, match=r"_lowwater/0000000001\.json"):
        exported_files(str(tmp_path))


def _stopping(call: Any, left: list[int]) -> Any:
    """The call, which stops this process when none is left."""

    def stopping(self: Any, name: str, *rest: Any, **named: Any) -> Any:
        if "/to/" in self.uri and name.startswith("_"):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        return call(self, name, *rest, **named)

    return stopping


# ---------------------------------------------------------------------------- stores and memory


@pytest.mark.slow
def test_an_export_goes_to_a_real_s3_server(
    spark: SparkSession, database: lowwater.Database, tmp_path: Path
) -> None:
    with S3Server(tmp_path / "s3") as server:
        to = server.uri("exports/daily")
        options = server.options
        uri = archive_of(tmp_path)
        export_parquet(spark, uri, to, partition_by="bucket", part_bytes=2**18, to_options=options)
        fill(database, 1000)
        export_parquet(spark, uri, to, partition_by="bucket", part_bytes=2**18, to_options=options)
        store = open_store(to, options=options, read_only=True)
        names = exported_files(to, options)
        assert set(names) == {each.name for each in store.list() if each.name.endswith(".parquet")}
        seqs: list[int] = []
        for name in names:
            seqs += pq.read_table(pa.BufferReader(store.read(name)), columns=["seq"])["seq"].to_pylist()
        store.close()
        assert sorted(seqs) == expected_seqs(spark, tmp_path)


def test_memory_of_a_task_is_bounded_by_what_it_may_buffer() -> None:
    """However many partitions there are, and however many rows."""
    store = MemoryStore("memory://export")
    schema = pa.schema([("bucket", pa.string()), ("seq", pa.int64()), ("value", pa.binary())])
    files = ParquetFiles(store, "x", schema, partition_by="bucket", compression="zstd", buffer_bytes=2**25)
    before = pa.total_allocated_bytes()
    peak = 0
    for _ in range(60):
        rows = 1000
        batch = pa.record_batch(
            [
                pa.array([f"b{n % 50}" for n in range(rows)]),
                pa.array(range(rows)),
                pa.array([bytes(2000)] * rows, pa.binary()),
            ],
            schema=schema,
        )
        files.add(batch)
        del batch
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert peak < 2**26, "120 MB went through"
    made = files.close()
    assert len({file.name for file in made}) == len(made) == 50 * 4
    assert sum(file.rows for file in made) == 60_000
