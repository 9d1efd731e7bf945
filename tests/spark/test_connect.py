"""Over Spark Connect everything gives what it gives without it. What its client needs lies in a folder of its
own (`connect.txt`), which `make` fills: nothing else may lean on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.spark.archives import archive_of

import lowwater.spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CLIENT = Path(sys.prefix) / "connect"

ASKED = """
import json, sys
from pyspark.sql import SparkSession
import lowwater.spark
from lowwater.spark.source import LowwaterSource
if __name__ == "__main__":
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    spark.dataSource.register(LowwaterSource)
    uri, to = sys.argv[1:]
    print(json.dumps({
        "load": spark.read.format("lowwater").load(uri).count(),
        "log_frame": lowwater.spark.log_frame(spark, uri).count(),
        "state_as_of": lowwater.spark.state_as_of(spark, uri).count(),
        "versions": lowwater.spark.versions(spark, uri).count(),
        "changes": lowwater.spark.changes(spark, uri).count(),
        "verify": sorted(row.what for row in lowwater.spark.verify(spark, uri).collect()),
        "count": lowwater.spark.count(spark, uri).kinds,
        "root_as_of": lowwater.spark.root_as_of(spark, uri),
        "export_parquet": lowwater.spark.export_parquet(spark, uri, to).rows,
        "read_exported": lowwater.spark.read_exported(spark, to).count(),
    }))
    spark.stop()
"""


@pytest.mark.slow
@pytest.mark.skipif(not CLIENT.is_dir(), reason="needs Spark Connect's client: make .venv/dev")
def test_everything_works_over_spark_connect(spark: SparkSession, tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive", 1)
    archive.close()
    uri = archive.uri
    script = tmp_path / "asked.py"
    script.write_text(ASKED)
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.fspath(CLIENT)}
    asked = subprocess.run(
        [sys.executable, str(script), uri, str(tmp_path / "to")],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert asked.returncode == 0, asked.stderr[-2000:]
    entries = lowwater.spark.log_frame(spark, uri).count()
    assert json.loads(asked.stdout.splitlines()[-1]) == {
        "load": entries,
        "log_frame": entries,
        "state_as_of": lowwater.spark.state_as_of(spark, uri).count(),
        "versions": lowwater.spark.versions(spark, uri).count(),
        "changes": lowwater.spark.changes(spark, uri).count(),
        "verify": sorted(row.what for row in lowwater.spark.verify(spark, uri).collect()),
        "count": lowwater.spark.count(spark, uri).kinds,
        "root_as_of": lowwater.spark.root_as_of(spark, uri),
        "export_parquet": entries,
        "read_exported": entries,
    }
