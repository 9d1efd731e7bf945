"""Counts come from the manifest and from footers, and are those of the log."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.spark.archives import archive_of

import lowwater.spark
from lowwater.errors import NotFound
from lowwater.spark.plan import pin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def test_entries_are_counted_by_kind_without_reading_them(spark: SparkSession, tmp_path: Path) -> None:
    """A flipped byte in the frames is not met."""
    archive = archive_of(tmp_path / "archive", 3)
    archive.close()
    rows = lowwater.spark.log_frame(spark, archive.uri, columns=["seq", "kind", "time"]).collect()
    for path in archive.folder.rglob("wal/*/*.log"):
        data = bytearray(path.read_bytes())
        if data[:4] != b"\x28\xb5\x2f\xfd":  # a compressed one has no frames to flip a byte in
            data[200] ^= 1
            path.write_bytes(data)
    counted = lowwater.spark.count(spark, archive.uri)
    assert counted.kinds == Counter(row.kind for row in rows)
    assert counted.entries == len(rows) == sum(counted.kinds.values())
    assert (counted.seq_first, counted.seq_last) == (
        min(row.seq for row in rows),
        max(row.seq for row in rows),
    )
    assert counted.time_last_us == round(max(row.time.timestamp() for row in rows) * 1e6)
    pinned = pin(archive.uri)
    assert (counted.segments, counted.checkpoints) == (len(pinned.segments), len(pinned.checkpoints))
    assert counted.cluster_id == pinned.cluster_id.hex()


def test_nothing_to_count_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound):
        lowwater.spark.count(spark, str(tmp_path / "empty"))
