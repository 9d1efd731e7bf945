"""The log, states, versions and changes as data frames: what the engine says."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.shares import shares
from tests.spark.archives import RandomArchive, archive_of
from tests.spark.fed import Fed, random_archive

from lowwater.engine.format.entries import Begin, Commit, CreateBucket, Delete, Put, Write
from lowwater.errors import InvalidConfig, InvalidEntry, LowwaterError, VersionGone
from lowwater.spark import pinned_archive as spark_archive
from lowwater.spark import plan
from lowwater.spark.frames import changes, log_frame, state_as_of, versions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

SEEDS = int(os.environ.get("SPARK_ARCHIVES", "3"))
SEQS = 10 if SEEDS > 3 else 4
PART_BYTES = 16_384
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of them, though archives are tiny."""
    monkeypatch.setattr(plan, "PART_BYTES_MIN", 8192)


def objects(frame: Any) -> list[tuple[Any, ...]]:
    return sorted(map(as_object, frame.collect()), key=lambda row: row[:2])


def as_object(row: Any) -> tuple[Any, ...]:
    time_us = (row["time"].astimezone(UTC) - _EPOCH) // timedelta(microseconds=1)
    return row["bucket"], row["key"], bytes(row["value"]), row["metadata"], row["seq"], time_us


def answers_of(made: RandomArchive) -> list[Any]:
    """Some, of seqs that were shipped."""
    hwm = plan.pin(made.uri).hwm
    found = [each for each in made.answers if each.seq <= hwm]
    return found[:: max(1, len(found) // SEQS)]


@pytest.mark.parametrize("seed", shares(SEEDS))
def test_states_versions_and_changes_are_the_engines(
    spark: SparkSession, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a state begins with a checkpoint, which is every second one here."""
    made = archive_of(tmp_path / "archive", seed)
    answers = answers_of(made)
    assert len(answers) >= SEQS
    total = sum(each.body_bytes for each in plan.pin(made.uri).segments)
    assert total > plan.SHARES_MAX * PART_BYTES
    for number, answer in enumerate(answers):
        monkeypatch.setattr(spark_archive, "ROW_COST", 0 if number % 2 else 10**9)
        # In parts of the log, and in shares of the keys.
        for part_bytes in (PART_BYTES, total // 3):
            found = objects(state_as_of(spark, made.uri, answer.seq, part_bytes=part_bytes))
            assert found == answer.state, answer.seq
    start = answers[0].seq + 1
    check_changes(spark, made, start, answers)
    made.close()


def check_changes(spark: SparkSession, made: RandomArchive, start: int, answers: list[Any]) -> None:
    """They lead from one state to each of those after it, and every before image is what was there."""
    rows = changes(spark, made.uri, start=start, part_bytes=PART_BYTES).collect()
    live = {row[:2]: row for row in answers[0].state}
    ahead = list(answers[1:])
    for row in sorted(rows, key=lambda row: (row["seq"], row["key"])):
        while ahead and ahead[0].seq < row["seq"]:
            answer = ahead.pop(0)
            assert sorted(live.values(), key=lambda row: row[:2]) == answer.state, answer.seq
        if not row["key"]:
            continue
        name = row["bucket"], row["key"]
        before = live.get(name)
        assert row["before_seq"] == (None if before is None else before[4]), row
        if before is not None:
            assert (bytes(row["before_value"]), row["before_metadata"]) == before[2:4]
        if row["kind"] == "delete":
            live.pop(name, None)
        else:
            live[name] = as_object(row)
    for answer in ahead:
        assert sorted(live.values(), key=lambda row: row[:2]) == answer.state, answer.seq
    names = ("bucket", "key", "seq")
    all_versions = versions(spark, made.uri, start=start, columns=names, part_bytes=PART_BYTES).collect()
    assert sorted(map(tuple, all_versions)) == sorted((row["bucket"], row["key"], row["seq"]) for row in rows)
    assert len(rows) > 20


def test_a_change_says_what_was_there_before_it(spark: SparkSession, tmp_path: Path) -> None:
    """Of a key that is older than the range, of a tombstone, of a bucket."""
    fed = Fed(tmp_path / "archive", 1)
    fed.order(CreateBucket("a"))
    created = fed.seq
    fed.order(Put("a", "k", b"one", {"m": "1"}))
    put = fed.seq
    fed.order(Put("a", "gone", b"x"))
    fed.order(Delete("a", "gone"))
    fed.order(Delete("a", "k"))
    deleted = fed.seq
    fed.order(Put("a", "k", b"two"))
    again = fed.seq
    fed.ship()
    rows = changes(spark, fed.uri, start=deleted).orderBy("seq").collect()
    assert [(row["kind"], row["seq"], row["before_seq"], row["before_value"]) for row in rows] == [
        ("delete", deleted, put, b"one"),
        ("put", again, None, None),
    ]
    assert rows[0]["before_metadata"] == {"m": "1"}
    assert rows[0]["value"] is None
    first = versions(spark, fed.uri, end=created).collect()
    assert [(row["kind"], row["bucket"], row["key"], row["value"]) for row in first] == [
        ("create_bucket", "a", "", None)
    ]
    fed.close()


def test_a_range_that_begins_in_a_group_has_all_of_it(spark: SparkSession, tmp_path: Path) -> None:
    """What a group has made is as of its last seq, which is in the range."""
    fed = Fed(tmp_path / "archive", 1)
    fed.order(CreateBucket("a"))
    fed.order(Put("a", "k0", b"before"))
    fed.order(Write([Put("a", f"k{number}", b"%d" % number) for number in range(5)]))
    last = fed.seq
    fed.order(Put("a", "k9", b"after"))
    fed.ship()
    for start in range(last - 4, last + 1):
        rows = changes(spark, fed.uri, start=start, end=last).orderBy("key").collect()
        assert [(row["key"], row["seq"]) for row in rows] == [(f"k{number}", last) for number in range(5)]
        assert [row["before_value"] for row in rows] == [b"before", None, None, None, None]
    assert changes(spark, fed.uri, start=last + 1).count() == 1
    fed.close()


def test_a_range_that_begins_in_a_transaction_has_all_of_it(spark: SparkSession, tmp_path: Path) -> None:
    """Also where the seqs of its segment have holes, so that nobody can tell frames by their numbers."""
    fed = Fed(tmp_path / "archive", 1, segment_bytes=65_536)
    fed.order(CreateBucket("a"))
    fed.seq += 7
    fed.order(Begin(time_us=fed.time_us))
    txn = fed.seq
    fed.order(Put("a", "in", b"1", txn=txn, time_us=fed.time_us))
    fed.seq += 5
    fed.order(Put("a", "beside", b"2", time_us=fed.time_us))
    beside = fed.seq
    fed.order(Commit(txn, time_us=fed.time_us))
    committed = fed.seq
    fed.ship()
    for start in (txn, txn + 1, txn + 2, beside, committed):
        rows = versions(spark, fed.uri, start=start, columns=("key", "seq")).orderBy("seq").collect()
        expected = [("beside", beside), ("in", committed)]
        assert list(map(tuple, rows)) == [each for each in expected if each[1] >= start]
    fed.close()


def test_a_state_is_narrowed_by_bucket_prefix_and_columns(spark: SparkSession, tmp_path: Path) -> None:
    fed = random_archive(tmp_path / "archive", 7, steps=300)
    hwm = plan.pin(fed.uri).hwm
    expected = [row for row in fed.state(hwm) if row[0] == "b" and row[1].startswith("k1")]
    assert expected
    found = state_as_of(
        spark, fed.uri, bucket="b", prefix="k1", columns=("key", "seq"), part_bytes=PART_BYTES
    )
    assert found.columns == ["key", "seq"]
    assert sorted(map(tuple, found.collect())) == [(row[1], row[4]) for row in expected]
    fed.close()


def test_the_state_as_of_a_time_is_that_of_the_last_entry_until_then(
    spark: SparkSession, tmp_path: Path
) -> None:
    fed = random_archive(tmp_path / "archive", 9, steps=120)
    pinned = plan.pin(fed.uri)
    middle = pinned.segments[len(pinned.segments) // 2]
    at = _EPOCH + timedelta(microseconds=middle.time_max_us)
    seq = plan.seq_of(pinned, at)
    assert objects(state_as_of(spark, fed.uri, at)) == fed.state(seq)
    fed.close()


def test_between_times_without_an_entry_there_is_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """A quiet day is no error; only a start that is after the end is one."""
    fed = Fed(tmp_path / "archive", 1)
    fed.order(CreateBucket("a", time_us=fed.time_us))
    fed.order(Put("a", "k1", b"1", time_us=fed.time_us + 10_000_000))
    fed.ship()
    after_first, quiet = (_EPOCH + timedelta(microseconds=fed.time_us + each) for each in (1, 5_000_000))
    later = datetime(2100, 1, 1, tzinfo=UTC)
    for start, end in ((after_first, quiet), (quiet, quiet), (later, None), (later, later)):
        for frame in (changes, versions, log_frame):
            assert frame(spark, fed.uri, start=start, end=end).count() == 0
    assert [row["key"] for row in changes(spark, fed.uri, start=quiet).collect()] == ["k1"]
    with pytest.raises(InvalidEntry, match="the range begins at 2"):
        changes(spark, fed.uri, start=quiet, end=after_first)
    fed.close()


def test_the_log_is_what_the_engine_reads(spark: SparkSession, tmp_path: Path) -> None:
    fed = random_archive(tmp_path / "archive", 4, steps=200)
    hwm = plan.pin(fed.uri).hwm
    expected = [(each.seq, each.kind, each.bucket, each.key) for each in fed.engine.log() if each.seq <= hwm]
    found = log_frame(spark, fed.uri, columns=("seq", "kind", "bucket", "key"), part_bytes=PART_BYTES)
    assert sorted(map(tuple, found.collect())) == expected
    puts = log_frame(spark, fed.uri, kinds=("put",), start=hwm // 2, columns=("seq",)).collect()
    assert sorted(row["seq"] for row in puts) == [
        row[0] for row in expected if row[1] == "put" and row[0] >= hwm // 2
    ]
    fed.close()


@pytest.mark.parametrize(
    ("call", "given", "error", "says"),
    [
        (state_as_of, {"at": 10**6}, VersionGone, "is not in the archive"),
        (state_as_of, {"at": 2**63}, VersionGone, "is not in the archive"),
        (state_as_of, {"at": 0}, VersionGone, "begins with seq"),
        (state_as_of, {"columns": ("valu",)}, InvalidConfig, "no column 'valu'"),
        (versions, {"start": 30, "end": 20}, InvalidEntry, "begins at seq 30 and ends at seq 20"),
        (changes, {"start": 10**6}, VersionGone, "is not in the archive"),
        (log_frame, {"kinds": ("putt",)}, InvalidConfig, "no kind 'putt'"),
        (log_frame, {"columns": ("sek",)}, InvalidConfig, "the nearest one is seq"),
    ],
)
def test_a_wrong_call_is_told_at_once(
    spark: SparkSession, tmp_path_factory: Any, call: Any, given: dict[str, Any], error: Any, says: str
) -> None:
    """On the driver, before any task runs."""
    fed = random_archive(tmp_path_factory.mktemp("wrong") / "archive", 4, steps=100)
    with pytest.raises(error) as found:
        call(spark, fed.uri, **given)
    assert isinstance(found.value, LowwaterError)
    assert says in f"{found.value.message} {found.value.hint}"
    fed.close()
