"""`lowwater spark`: what it prints, how it ends, and that Spark keeps quiet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from click.testing import CliRunner, Result
from tests.tiering.whole_archive import whole_archive

import lowwater
from lowwater.cli.root import root
from lowwater.errors import DataError, InputError
from lowwater.spark.exported import exported_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


SMALL = ["--master", "local[1]", "--conf", "spark.driver.memory=600m"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """An archive in a folder."""
    for name, data in whole_archive(12).data.items():
        path = tmp_path / "archive" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return str(tmp_path / "archive")


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(root, arguments, prog_name="lowwater")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    return json.loads(result.stdout) | {"exit_code": result.exit_code}


def damage(folder: str) -> None:
    segment = min(Path(folder, "wal", "0000000003").iterdir())
    data = bytearray(segment.read_bytes())
    data[150] ^= 1
    segment.write_bytes(data)
    min(Path(folder, "data", "packs").iterdir()).unlink()


# ---------------------------------------------------------------------------- in one session


@pytest.mark.long
@pytest.mark.parametrize(("ours", "theirs"), [([], ["--deep"]), (["--shallow"], [])])
def test_verify_says_what_scrub_says(
    spark: SparkSession, folder: str, ours: list[str], theirs: list[str]
) -> None:
    for _ in range(2):
        expected, found = run_json("scrub", *theirs, folder), run_json("spark", "verify", *ours, folder)
        assert {**found, "bytes_read": 0} == {**expected, "bytes_read": 0}
        assert found["bytes_read"] > 0
        text = run("spark", "verify", *ours, folder)
        assert text.stdout == run("scrub", *theirs, folder).stdout
        damage(folder)
    assert found["exit_code"] == text.exit_code == DataError.exit_code


@pytest.mark.long
def test_export_writes_files_and_says_so(spark: SparkSession, folder: str, tmp_path: Path) -> None:
    to = str(tmp_path / "to")
    arguments = ["spark", "export", folder, to, "--partition-by", "bucket", "--compression", "zstd"]
    done = run_json(*arguments)
    assert done.keys() == {"to", "what", "seq_first", "seq_last", "rows", "bytes", "files", "exit_code"}
    assert (done["to"], done["what"], done["seq_first"]) == (f"file://{to}", "log", 1)
    assert len(exported_files(to)) == done["files"] > 1
    assert done["rows"] == run_json("spark", "count", folder)["entries"]
    again = run(*arguments)
    assert again.stdout == f"nothing is new: file://{to} has all up to seq {done['seq_last']}\n"
    state = run("spark", "export", folder, str(tmp_path / "state"), "--what", "state", "--at", "20")
    assert "has state as of seq 20 now" in state.stdout


@pytest.mark.slow
def test_count_counts_by_kind(spark: SparkSession, folder: str) -> None:
    document = run_json("spark", "count", folder)
    assert sum(document["kinds"].values()) == document["entries"]
    text = run("spark", "count", folder).stdout
    assert f"seq 1 to {document['seq_last']}" in text
    assert "put" in text


@pytest.mark.long
def test_roots_and_checkpoints_are_those_of_the_database(spark: SparkSession, tmp_path: Path) -> None:
    tier = str(tmp_path / "archive")
    with lowwater.open(tmp_path / "data", tier=tier) as db:
        db.create_bucket("b")
        early = db.put_many("b", [(f"{n}", b"v") for n in range(300)])
        roots = {early: db.root()}
        checkpoint = db.checkpoint()
        db.delete("b", "7")
        db.ship()
        roots[db.catalogue.hwm] = db.root(db.catalogue.hwm)
    for seq, expected in roots.items():
        assert run_json("spark", "root", tier, "--at", str(seq)) == {
            "root": expected,
            "seq": seq,
            "exit_code": 0,
        }
    assert run("spark", "root", tier, "--from-segments").stdout == f"{[*roots.values()][-1]}\n"
    built = run_json("spark", "build-checkpoint", tier)
    assert built["id"] == checkpoint
    again = run("spark", "build-checkpoint", tier, "--from-segments").stdout
    assert f"root {built['root']}" in again
    assert "0 of" in again, "what is there already is not written again"


@pytest.mark.slow
def test_damage_that_a_task_meets_ends_with_65(spark: SparkSession, folder: str, tmp_path: Path) -> None:
    damage(folder)
    for what in ("log", "versions"):
        result = run("spark", "export", folder, str(tmp_path / what), "--what", what, "--json")
        assert result.exit_code == DataError.exit_code
        document = json.loads(result.stderr)
        assert document["error"] == "Corrupt"
        assert "segment-" in f"{document['path']} {document['message']}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["verify", "/there/is/nothing"], "no such folder"),
        (["count", "/there/is/nothing"], "no such folder"),
        (["export", "{folder}", "{folder}"], "something else is here"),
        (["export", "{folder}", "{folder}/../to", "--column", "sequence"], "there is no column"),
        (["export", "{folder}", "{folder}/../to", "--at", "10000000"], "seq"),
        (["count", "{folder}", "--master", "local[3]"], "a session is running"),
        (["count", "s3://bucket/x?secret_access_key=hidden&nothing=1"], "nothing"),
    ],
)
def test_bad_input_is_one_error_with_a_hint(
    spark: SparkSession, folder: str, arguments: list[str], told: str
) -> None:
    result = run("spark", *[each.format(folder=folder) for each in arguments], "--json")
    assert result.exit_code == InputError.exit_code
    document = json.loads(result.stderr)
    assert told in document["message"]
    assert document["hint"]
    assert "hidden" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["verify"], "Missing argument"),
        (["export", "x"], "Missing argument"),
        (["export", "x", "y", "--what", "all"], "is not one of"),
        (["count", "x", "--conf", "spark.driver.memory"], "is no setting of Spark"),
        (["count", "x", "--conf", "memory=1g"], "is no setting of Spark"),
    ],
)
def test_a_wrong_call_starts_no_spark(arguments: list[str], told: str) -> None:
    result = run("spark", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_without_the_extra_it_says_what_to_install(folder: str) -> None:
    """Also `--help` works then, and all other commands do."""
    code = (
        "import sys; sys.modules['pyspark'] = None\n"
        "from lowwater.cli.root import root\n"
        "root(sys.argv[1:], prog_name='lowwater')\n"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code, "spark", "count", folder], capture_output=True, text=True, check=False
    )
    assert (asked.returncode, asked.stdout) == (2, "")
    assert asked.stderr.splitlines() == [
        "error: this command needs pyspark, which is not installed",
        "hint: pip install 'lowwater[spark]'",
    ]
    helped = subprocess.run([sys.executable, "-c", code, "spark", "--help"], capture_output=True, check=True)
    assert b"export" in helped.stdout


# ---------------------------------------------------------------------------- in a process of its own


@pytest.mark.slow
def test_a_process_prints_results_and_nothing_of_spark(folder: str) -> None:
    """Neither a JVM nor its workers say anything where results or errors are."""
    done = subprocess.run(
        [sys.executable, "-m", "lowwater", "spark", "verify", folder, "--json", *SMALL],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sound"]
    assert done.stderr == ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (("--master", "nowhere"), "Master must"),
        (("--conf", "spark.driver.memory=much"), "Invalid maximum heap size: -Xmxmuch"),
        # Here a line of Spark's log says first that there is an error, and not which.
        (("--conf", "spark.network.timeout=5s"), "spark.network.timeout=5000ms must be greater"),
    ],
)
def test_a_spark_that_does_not_start_is_one_error(setting: tuple[str, str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lowwater", "spark", "count", "x", *setting],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: Spark did not start: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


SLOW = """
import sys, time
from lowwater.cli.root import root
from lowwater.spark import audit
def slow(*rest):
    open(sys_argv[0], "w").close()
    time.sleep(600)
if __name__ == "__main__":
    sys_argv = [sys.argv[1]]
    audit._look_at = slow
    root(sys.argv[2:], prog_name="lowwater")
"""


def begun(folder: str, tmp_path: Path) -> subprocess.Popen[str]:
    """A command in the middle of its work, which takes for ever."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    started = tmp_path / "started"
    child = subprocess.Popen(
        [sys.executable, str(script), str(started), "spark", "verify", folder, *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not started.exists():
        assert child.poll() is None, child.communicate()
        time.sleep(0.1)
    return child


@pytest.mark.long
def test_a_jvm_that_is_killed_is_one_error(folder: str, tmp_path: Path) -> None:
    """As the system does it, where memory runs out."""
    child = begun(folder, tmp_path)
    for each in psutil.Process(child.pid).children():
        if "java" in each.name():
            each.kill()
    out, err = child.communicate(timeout=300)
    assert (child.returncode, out) == (1, ""), err
    assert err.startswith("error: Spark has ended in the middle of ")
    assert err.count("\n") == 2


KILLED = """
import sys, threading, psutil
import lowwater.spark.audit
from lowwater.cli.root import root
def killed(spark, *rest, **named):
    java, = (each for each in psutil.Process().children() if "java" in each.name())
    java.suspend()
    threading.Timer(1, java.kill).start()
    spark.sparkContext.statusTracker().getJobIdsForGroup("none")
lowwater.spark.audit.look_in_spark = killed
root(sys.argv[1:], prog_name="lowwater")
"""


@pytest.mark.long
def test_a_jvm_that_is_killed_while_it_is_asked_is_the_same_error(folder: str, tmp_path: Path) -> None:
    """What it has not read makes a reset of the connection: Py4J logs it, and its error says nothing."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = subprocess.run(
        [sys.executable, str(script), "spark", "verify", folder, *SMALL],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: Spark has ended in the middle of ")
    assert done.stderr.count("\n") == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)]
)
def test_a_signal_ends_it_and_all_that_it_started(
    folder: str, tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    child = begun(folder, tmp_path)
    below = psutil.Process(child.pid).children(recursive=True)
    assert any("java" in each.name() for each in below)
    os.kill(child.pid, number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == exit_code, err
    assert (out, err) == ("", "interrupted\n" if number == signal.SIGINT else "")
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive, alive
