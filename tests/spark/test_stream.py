"""Streams end to end: each entry is in the sink exactly once, through restarts and kills."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark.fed import Fed, random_archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = pytest.mark.slow


def started(spark: SparkSession, uri: str, folder: Path, **options: Any) -> StreamingQuery:
    stream = spark.readStream.format("lowwater").options(**options).load(uri)
    writer = stream.writeStream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))
    return writer.option("path", str(folder / "sink")).trigger(availableNow=True).start()


def run(spark: SparkSession, uri: str, folder: Path, **options: Any) -> list[int]:
    """To the end of what is there now: the entries of each batch."""
    query = started(spark, uri, folder, **options)
    query.awaitTermination()
    return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


def sunk(spark: SparkSession, folder: Path) -> list[tuple[Any, ...]]:
    """What a reader of the sink finds, in the order of the log."""
    found = spark.read.parquet(str(folder / "sink")).selectExpr(
        "seq", "kind", "bucket", "key", "metadata", "value", "unix_micros(time)", "origin", "txn"
    )
    return sorted(map(tuple, found.collect()))


def told(fed: Fed) -> list[tuple[Any, ...]]:
    """The same from the engine."""
    rows = []
    for entry in fed.engine.log():
        if entry.seq <= fed.engine.counted_hwm:
            value = None if entry.extras and entry.extras.value_ref else entry.value
            last = (entry.time_us, entry.origin, entry.txn)
            rows.append((*entry[:4], entry.metadata, value, *last))
    return rows


def test_a_stream_that_is_started_again_goes_on_where_it_was(spark: SparkSession, tmp_path: Path) -> None:
    """Everything once, also what is shipped between two runs, in batches as large as was asked for."""
    fed = random_archive(tmp_path / "archive", seed=10, steps=120)
    segments = len(fed.engine.catalogue.segments)
    batches = run(spark, fed.uri, tmp_path, batch_segments_max=4)
    assert len(batches) == -(-segments // 4)
    assert sunk(spark, tmp_path) == told(fed)
    fed.step(60)
    fed.ship()
    # The limits may be others: what was read is not read again.
    assert len(run(spark, fed.uri, tmp_path)) == 1
    assert sunk(spark, tmp_path) == told(fed)
    assert run(spark, fed.uri, tmp_path) == []


@pytest.mark.long
def test_an_archive_that_was_replaced_ends_the_stream(spark: SparkSession, tmp_path: Path) -> None:
    """With words, and with nothing in the sink that was not there."""
    from pyspark.errors import StreamingQueryException

    first = random_archive(tmp_path / "archive", seed=11, steps=120)
    run(spark, first.uri, tmp_path)
    before = sunk(spark, tmp_path)
    other = random_archive(tmp_path / "other", seed=12, steps=40)
    assert other.engine.counted_hwm < first.engine.counted_hwm
    (tmp_path / "archive").rename(tmp_path / "gone")
    (tmp_path / "other").rename(tmp_path / "archive")
    # The last batch was done, and then it was not, so that it is planned once more as it was.
    commits = sorted((tmp_path / "checkpoint" / "commits").iterdir())
    for is_done in (True, False):
        if not is_done:
            for path in commits:
                path.unlink()
        query = started(spark, first.uri, tmp_path)
        with pytest.raises(StreamingQueryException, match="the archive ends with seq") as caught:
            query.awaitTermination()
        assert f"{first.uri}/manifest/" in str(caught.value)
        assert sunk(spark, tmp_path) == before
