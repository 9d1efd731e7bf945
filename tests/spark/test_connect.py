"""Over Spark Connect everything gives what it gives without it. What its client needs lies in a folder of its
own (`connect.txt`), which `make` fills: nothing else may lean on it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.spark.archives import archive_of

import lowwater.spark
from lowwater.errors import InvalidConfig
from lowwater.spark import start

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CLIENT = Path(sys.prefix) / "connect"

PAGE = (Path(__file__).parents[2] / "docs" / "operating" / "spark.md").read_text()
(SHOWN,) = re.findall(r"```python\n(.*remote=.*\n)```", PAGE)

ASKED = """
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
import lowwater.spark
from lowwater.errors import InvalidConfig

def refused(**wanted):
    try:
        lowwater.spark.session(**wanted)
    except InvalidConfig as error:
        return str(error), error.hint

if __name__ == "__main__":
    before = dict(os.environ)
    remote, uri, to = sys.argv[1:]
    SHOWN
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lowwater.spark.session, remote=remote).result() is spark
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
    print(json.dumps({
        "changed": sorted(name for name in changed if not name.startswith("SPARK_")),
        "pushdown": spark.conf.get("spark.sql.python.filterPushdown.enabled"),
        "zone": spark.conf.get("spark.sql.session.timeZone"),
        "another remote": refused(remote="sc://elsewhere:7/;token=secret"),
        "a master": refused(master="local[2]"),
        "what is fixed": refused(config={"spark.driver.memory": "3g"}),
        "a setting": lowwater.spark.session(config={"spark.sql.shuffle.partitions": 2}) is spark,
    }))
    spark.stop()
"""

SERVER = """
import sys
import lowwater.spark
spark = lowwater.spark.session(master="local[2]", config={
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.port": 0,
})
service = getattr(spark._jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
print(getattr(service, "MODULE$").localPort(), flush=True)
sys.stdin.read()
spark.stop()
"""


@contextmanager
def server(environment: dict[str, str], cwd: Path) -> Iterator[str]:
    """A server in a process of its own, which lives as long as its input is open."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=environment,
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        try:
            yield f"sc://localhost:{port}"
        finally:
            process.communicate()


needs_client = pytest.mark.skipif(not CLIENT.is_dir(), reason="needs Spark Connect's client: make .venv/dev")


@pytest.mark.long
@needs_client
@pytest.mark.parametrize("place", [pytest.param("a server", marks=pytest.mark.long), "its own"])
def test_everything_works_over_spark_connect_where_the_only_java_is_that_of_the_wheel(
    spark: SparkSession, hidden_java: dict[str, str], tmp_path: Path, place: str
) -> None:
    """By the line that the documents show, and with the settings of any other session."""
    archive = archive_of(tmp_path / "archive", 1)
    archive.close()
    uri = archive.uri
    environment = {**os.environ, **hidden_java, "HOME": os.fspath(tmp_path), "TMPDIR": os.fspath(tmp_path)}
    environment.pop("PYSPARK_PYTHON", None)
    client = {**environment, "PYTHONPATH": os.fspath(CLIENT)}
    script = tmp_path / "asked.py"
    script.write_text(ASKED.replace("SHOWN", SHOWN.strip().replace('"sc://host:15002"', "remote")))
    with ExitStack() as stack:
        if place == "its own":
            remote = "local[2]"
            # PySpark takes a free port with this, and 15002 without: other tests may run on this machine.
            client["SPARK_TESTING"] = "1"
        else:
            remote = stack.enter_context(server(environment, tmp_path))
        asked = subprocess.run(
            [sys.executable, str(script), remote, uri, str(tmp_path / "to")],
            capture_output=True,
            text=True,
            check=False,
            env=client,
            cwd=tmp_path,
        )
    assert asked.returncode == 0, asked.stderr[-2000:]
    assert "Warning" not in asked.stderr
    said, session = map(json.loads, asked.stdout.splitlines()[-2:])
    entries = lowwater.spark.log_frame(spark, uri).count()
    assert said == {
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
    running = f"a session is running with remote {remote.removeprefix('sc://')}"
    stop = "stop() that one first: there is one in a process"
    fixed = "spark.driver.memory is fixed when a session starts, and one is running"
    assert session == {
        "changed": [],
        "pushdown": "true",
        "zone": "UTC",
        "another remote": [f"{running}, not remote elsewhere:7", stop],
        "a master": [f"{running}, not master local[2]", stop],
        "what is fixed": [fixed, stop if place == "its own" else "have its server start with it"],
        "a setting": True,
    }


def test_a_remote_that_cannot_be_is_an_error_that_says_what_can(spark: SparkSession) -> None:
    """Spark's own would name one of its settings."""
    with pytest.raises(InvalidConfig, match="master and remote are both given"):
        lowwater.spark.session(master="local[2]", remote="sc://host:15002")
    with pytest.raises(InvalidConfig, match=r"master local\[2\], not remote sc://host:15002$"):
        lowwater.spark.session(remote="sc://host:15002/;token=secret")


@pytest.mark.slow
@pytest.mark.parametrize("client", [True, False], ids=["with the client", "without"])
def test_without_its_client_or_an_address_spark_connect_is_one_error_with_a_hint(
    tmp_path: Path, client: bool
) -> None:
    """The extra does not bring the client: whoever tries it first is told what to install."""
    code = """
import sys
import lowwater.spark
from lowwater.errors import LowwaterError
for remote in ["localhost:15002", "sc://", "sc://host:word", "sc://host:99999", "sc://host/path", "sc://host/;token"]:
    try:
        lowwater.spark.session(remote=remote)
    except LowwaterError as error:
        print(type(error).__name__, error.hint)
"""
    if client and not CLIENT.is_dir():
        pytest.skip("needs Spark Connect's client: make .venv/dev")
    environment = {**os.environ, **({"PYTHONPATH": os.fspath(CLIENT)} if client else {})}
    if not client:
        code = code.replace("import sys", "import sys\nsys.modules['grpc'] = None")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    hint = "InvalidConfig it is sc://host:15002, or local[2]"
    assert set(done.stdout.splitlines()) == {hint if client else f"NotFound pip install {start.CLIENT}"}
    assert len(done.stdout.splitlines()) == 6
    assert f"pip install {start.CLIENT}" in PAGE
