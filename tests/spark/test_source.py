"""`format("lowwater")` in a Spark session: rows, schemas, filters, and errors that reach the driver."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark.fed import Fed, random_archive
from tests.spark.moments import moment

from lowwater.engine.format.entries import Entry
from lowwater.spark.entry_columns import COLUMNS, MAIN_COLUMNS
from lowwater.spark.plan import pin

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Fed:
    return random_archive(tmp_path_factory.mktemp("source") / "archive", seed=4)


@pytest.fixture(scope="module")
def entries(archive: Fed) -> list[Entry]:
    return [entry for entry in archive.engine.log() if entry.seq <= archive.engine.counted_hwm]


def read(spark: SparkSession, uri: str, schema: str | None = None, **options: str) -> DataFrame:
    reader = spark.read.format("lowwater").options(**options)
    return (reader if schema is None else reader.schema(schema)).load(uri)


def test_load_gives_one_row_an_entry_as_the_log_has_it(
    spark: SparkSession, archive: Fed, entries: list[Entry]
) -> None:
    """The columns of the design, with their types."""
    frame = read(spark, archive.uri)
    assert frame.dtypes == [(name, COLUMNS[name]) for name in MAIN_COLUMNS]
    assert [name for name, _ in frame.dtypes] == [
        "seq", "kind", "bucket", "key", "metadata", "value", "time", "origin", "txn"
    ]  # fmt: skip
    rows = frame.selectExpr("*", "unix_micros(time) as us").collect()
    assert len(rows) == len(entries)
    for row, entry in zip(rows, entries, strict=True):
        value = None if entry.extras and entry.extras.value_ref else entry.value
        found = (row.seq, row.kind, row.bucket, row.key, row.metadata, row.us, row.origin, row.txn)
        assert found == (*entry[:4], entry.metadata, entry.time_us, entry.origin, entry.txn)
        assert (None if row.value is None else bytes(row.value)) == value


def test_several_tasks_read_what_one_does(spark: SparkSession, archive: Fed, entries: list[Entry]) -> None:
    """And small archives are not cut to pieces."""
    whole = read(spark, archive.uri)
    assert whole.rdd.getNumPartitions() == 1
    divided = read(spark, archive.uri, partition_bytes="9000", verify="deep")
    assert divided.rdd.getNumPartitions() > 5
    assert [row.seq for row in divided.select("seq").collect()] == [entry.seq for entry in entries]


def test_a_schema_chooses_columns_of_all_there_are(
    spark: SparkSession, archive: Fed, entries: list[Entry]
) -> None:
    """Spark prunes none by itself. Names are in any case, as everywhere in Spark."""
    frame = read(spark, archive.uri, "refused int, SEQ bigint")
    assert [(row.SEQ, row.refused) for row in frame.collect()] == [(e.seq, e.refused) for e in entries]
    every = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    assert read(spark, archive.uri, every).count() == len(entries)


FILTERS: list[tuple[str, Callable[[Entry], bool]]] = [
    ("seq > 100 and seq <= 200", lambda e: 100 < e.seq <= 200),
    ("seq = 150 or seq = 151", lambda e: e.seq in (150, 151)),
    ("kind = 'put' and key like 'k1%'", lambda e: e.kind == "put" and e.key.startswith("k1")),
    (
        "kind in ('copy', 'delete') and bucket = 'a'",
        lambda e: e.kind in ("copy", "delete") and e.bucket == "a",
    ),
    ("bucket = 'bücket' and key = 'k7'", lambda e: (e.bucket, e.key) == ("bücket", "k7")),
    ("bucket = 'a' and bucket = 'b'", lambda e: False),
    ("kind <> 'put' and seq < 50", lambda e: e.kind != "put" and e.seq < 50),
    ("kind = 'put' and kind in ('put', 'nothing')", lambda e: e.kind == "put"),
    ("txn is not null and key >= 'k5'", lambda e: e.txn is not None and e.key >= "k5"),
    ("key like '%7' and key like 'k%'", lambda e: e.key.endswith("7") and e.key.startswith("k")),
    ("bucket = ''", lambda e: e.bucket == ""),
    ("kind = 'nothing'", lambda e: False),
]


@pytest.fixture(params=["pushed", "not pushed"])
def pushing(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[bool]:
    """Filters are pushed down in our sessions, and in no others."""
    key = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(key)
    spark.conf.set(key, str(request.param == "pushed").lower())
    yield request.param == "pushed"
    spark.conf.set(key, before)


def test_a_filter_gives_the_same_rows_whether_or_not_it_is_pushed(
    spark: SparkSession, archive: Fed, entries: list[Entry], pushing: bool
) -> None:
    """Refused entries and control entries too."""
    frame = read(spark, archive.uri)
    for condition, holds in FILTERS:
        expected = [entry.seq for entry in entries if holds(entry)]
        filtered = frame.where(condition)
        assert [row.seq for row in filtered.collect()] == expected, condition
    middle = entries[len(entries) // 2].time_us
    for sign, holds in (
        ("<", lambda e: e.time_us < middle),
        (">=", lambda e: e.time_us >= middle),
        ("=", lambda e: e.time_us == middle),
    ):
        found = frame.where(f"time {sign} timestamp '{moment(middle).isoformat()}'")
        assert [row.seq for row in found.collect()] == [entry.seq for entry in entries if holds(entry)]
    plan = frame.where("seq > 100 and kind = 'put'")._jdf.queryExecution().executedPlan().toString()
    assert (" Filter (" not in plan) == pushing


def test_options_select_as_filters_do(spark: SparkSession, archive: Fed, entries: list[Entry]) -> None:
    """They work where filters are not pushed, and prune whole segments too."""
    middle = entries[len(entries) // 2]
    for options, holds in (
        ({"start": "100", "end": "200"}, lambda e: 100 <= e.seq <= 200),
        ({"start": moment(middle.time_us).isoformat()}, lambda e: e.time_us >= middle.time_us),
        ({"end": moment(middle.time_us).isoformat()}, lambda e: e.time_us <= middle.time_us),
        ({"kinds": "put, Copy", "bucket": "b"}, lambda e: e.kind in ("put", "copy") and e.bucket == "b"),
        ({"bucket": "a", "key": "k3"}, lambda e: (e.bucket, e.key) == ("a", "k3")),
        ({"prefix": "ü"}, lambda e: e.key.startswith("ü")),
    ):
        found = read(spark, archive.uri, "seq bigint", **options).collect()
        assert [row.seq for row in found] == [entry.seq for entry in entries if holds(entry)], options


def error_of(make: Callable[[], Any]) -> str:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        make()
    return str(caught.value)


def test_bad_input_is_one_error_on_the_driver(spark: SparkSession, archive: Fed, tmp_path: Path) -> None:
    """With the object that it is about, and what to do."""
    uri = archive.uri
    for words, make in {
        ("no such folder", f"file://{tmp_path}/x", "check the path"): lambda: read(
            spark, f"{tmp_path}/x"
        ).count(),
        ("no archive here", f"file://{tmp_path}", "prefix"): lambda: read(spark, str(tmp_path)).count(),
        ("no option 'strat'", "start"): lambda: read(spark, uri, strat="1"),
        ("start is seq 99999999", uri): lambda: read(spark, uri, start="99999999").count(),
        ("end is seq 99999999", uri): lambda: read(spark, uri, end="99999999").count(),
        ("start is 9, above end, 8",): lambda: read(spark, uri, start="9", end="8"),
        ("no column 'kye'", "the nearest one is key"): lambda: read(spark, uri, "kye string").count(),
        ("the column key is string, and the schema says int",): lambda: read(spark, uri, "key int").count(),
        ("start is latest",): lambda: read(spark, uri, start="latest").count(),
    }.items():
        told = error_of(make)
        for each in words:
            assert each in told


def test_damage_fails_the_query_and_names_the_object(
    spark: SparkSession, archive: Fed, tmp_path: Path
) -> None:
    """A count of what is left would be a wrong answer."""
    folder = tmp_path / "archive"
    shutil.copytree(archive.uri.removeprefix("file://"), folder)
    pinned = pin(str(folder))
    name = pinned.name_of(pinned.segments[5])
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 3] ^= 4
    (folder / name).write_bytes(data)
    told = error_of(lambda: read(spark, str(folder)).count())
    assert f"{folder}/{name}" in told
    assert "scrub" in told
    (folder / name).unlink()
    told = error_of(lambda: read(spark, str(folder)).count())
    assert "not in the store" in told
    assert f"{folder}/{name}" in told
    # What does not need it is read.
    assert read(spark, str(folder), end=str(pinned.segments[4].last)).count()


def test_a_query_that_was_planned_does_not_see_what_is_shipped_later(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Between the first task and the last the archive may grow."""
    fed = random_archive(tmp_path / "archive", seed=5, steps=80)
    frame = read(spark, fed.uri, "seq bigint")
    planned = frame.rdd
    before = fed.engine.counted_hwm
    fed.step(50)
    fed.ship()
    assert max(row.seq for row in planned.collect()) == before
    assert max(row.seq for row in read(spark, fed.uri, "seq bigint").collect()) == fed.engine.counted_hwm
