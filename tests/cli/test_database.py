"""The commands on a database: what each prints, what it leaves alone, and how it ends."""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from click.testing import CliRunner, Result

import lowwater
from lowwater.cli.root import root
from lowwater.engine.testing.damage import flip

COMMANDS = ("check", "get", "history", "ls", "put", "root")
BINARY = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command line sets up the logging of the whole process."""
    logger = logging.getLogger("lowwater")
    before = (logger.handlers, logger.propagate, logger.level)
    yield
    logger.handlers, logger.propagate, logger.level = before


@pytest.fixture
def path(tmp_path: Path) -> str:
    directory = str(tmp_path / "data")
    with lowwater.open(directory) as db:
        db.create_bucket("b")
        db.create_bucket("other")
        db.put("b", "k", b"first")
        db.put("b", "k", BINARY, {"type": "binary"})
        db.put_many("b", [(f"photos/{number:03}.jpg", b"photo") for number in range(100)])
        db.put("b", "zz\x1b[31m", b"")
    return directory


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    result = CliRunner().invoke(root, list(arguments), prog_name="lowwater", input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def run_json(*arguments: str, stdin: bytes | None = None) -> Any:
    result = run(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def lines_of(*arguments: str) -> list[Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def arguments_of(command: str, path: str) -> list[str]:
    names = {"get": ["b", "k"], "history": ["b", "k"], "put": ["b", "k"]}
    return [command, path, *names.get(command, [])]


def tree_of(path: str) -> dict[str, bytes]:
    """Every file with what is in it; LMDB's table of readers is no data."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(Path(path).rglob("*"))
        if file.is_file() and file.name != "lock.mdb"
    }


# ---------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_it_does_and_whether_the_directory_must_be_free(command: str) -> None:
    """Somebody whose server is running has to know before calling it."""
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    text = " ".join(result.stdout.split())
    assert "must not be open elsewhere" in text or "may be open elsewhere; nothing is changed" in text
    assert command in run("--help").stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_without_a_database_is_an_error_and_makes_none(command: str, tmp_path: Path) -> None:
    """A slip in a path must not leave an empty database behind."""
    empty = tmp_path / "empty"
    empty.mkdir()
    for place in (tmp_path / "missing", empty):
        result = run(*arguments_of(command, str(place)), "--json", stdin=b"value")
        assert result.exit_code == 2, result.output
        error = json.loads(result.stderr)
        assert error["error"] == "NotFound"
        assert "Traceback" not in result.output
    assert not (tmp_path / "missing").exists()
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_call_is_told(command: str, path: str) -> None:
    """Two is the code for it everywhere."""
    assert run(command).exit_code == 2
    assert run(command, path, "--no-such-option").exit_code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_database_that_is_open_can_be_looked_at_by_those_that_say_so(command: str, path: str) -> None:
    """The others say who has it, and what to do."""
    script = (
        "import sys, lowwater\n"
        "with lowwater.open(sys.argv[1]):\n"
        "    print('open', flush=True)\n"
        "    sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        result = run(*arguments_of(command, path), stdin=b"value")
        other.communicate()
    if command in ("check", "history"):
        assert result.exit_code == 0, result.output
    else:
        assert result.exit_code == 2
        assert "hint: stop the process" in result.stderr


@pytest.mark.parametrize("command", ["check", "get", "history", "ls", "root"])
def test_looking_changes_no_file(command: str, path: str) -> None:
    """Of a database that was closed, that is."""
    before = tree_of(path)
    assert run(*arguments_of(command, path)).exit_code == 0
    assert {name for name, data in tree_of(path).items() if before.get(name) != data} <= (
        set() if command in ("check", "history") else {"wal/lock", "pages/data.mdb"}
    )


# ---------------------------------------------------------------------------- each of them


def test_get_writes_the_bytes_of_a_value_and_nothing_else(path: str) -> None:
    """It may be an image that goes into a file."""
    assert run("get", path, "b", "k").stdout_bytes == BINARY
    document = run_json("get", path, "b", "k")
    assert base64.b64decode(document["value"]) == BINARY
    assert document["metadata"] == {"type": "binary"}
    assert (document["bucket"], document["key"], document["value_bytes"]) == ("b", "k", len(BINARY))
    assert run_json("get", path, "b", "k", "--at", str(lines_of("ls", path, "b")[-1]["seq"]))["seq"]


def test_get_tells_what_is_missing(path: str) -> None:
    """On standard error, with nothing in the file that its output goes to."""
    for arguments, kind in (
        (("b", "none"), "NotFound"),
        (("none", "k"), "NotFound"),
        (("b", "k", "--at", "999999"), "VersionGone"),
        (("b", "k", "--at", "1"), "VersionGone"),
    ):
        result = run("get", path, *arguments, "--json")
        assert result.exit_code == 2
        assert result.stdout == ""
        assert json.loads(result.stderr)["error"] == kind


def test_put_stores_what_comes_in(path: str, tmp_path: Path) -> None:
    """From standard input or from a file, byte for byte."""
    seq = run("put", path, "b", "new", "--metadata", "a=b=c", stdin=BINARY)
    assert seq.exit_code == 0
    document = run_json("get", path, "b", "new")
    assert document["seq"] == int(seq.stdout)
    assert document["metadata"] == {"a": "b=c"}
    assert run("get", path, "b", "new").stdout_bytes == BINARY
    file = tmp_path / "file"
    file.write_bytes(b"from a file")
    assert run_json("put", path, "b", "new", str(file))["value_bytes"] == 11
    assert run("get", path, "b", "new").stdout_bytes == b"from a file"


def test_put_keeps_its_conditions(path: str) -> None:
    """A script that runs twice does its work once."""
    assert run("put", path, "b", "k", "--if-absent", stdin=b"x").exit_code == 2
    assert run("put", path, "b", "k", "--if-seq", "1", stdin=b"x").exit_code == 2
    seq = run_json("get", path, "b", "k")["seq"]
    assert run("put", path, "b", "k", "--if-seq", str(seq), stdin=b"x").exit_code == 0
    assert run("put", path, "none", "k", stdin=b"x").exit_code == 2
    assert run("put", path, "b", "k", "--metadata", "none", stdin=b"x").exit_code == 2


def test_put_makes_a_database_only_where_it_is_told_to(tmp_path: Path) -> None:
    """And the bucket with it."""
    path = str(tmp_path / "data")
    assert run("put", path, "b", "k", stdin=b"x").exit_code == 2
    for value in (b"1", b"2"):
        assert run("put", path, "b", "k", "--create", stdin=value).exit_code == 0
        assert run("get", path, "b", "k").stdout_bytes == value


def test_ls_lists_buckets_and_keys(path: str) -> None:
    """One a line, and nothing in a key can steer the terminal."""
    assert run("ls", path).stdout == "b\nother\n"
    assert lines_of("ls", path) == [{"bucket": "b"}, {"bucket": "other"}]
    text = run("ls", path, "b").stdout
    assert len(text.splitlines()) == 102
    assert "\x1b" not in text
    assert "zz\\x1b[31m" in text
    assert "10.0 KiB" in text
    keys = lines_of("ls", path, "b")
    assert [each["key"] for each in keys][:2] == ["k", "photos/000.jpg"]
    assert set(keys[0]) == {"key", "seq", "time_us", "value_bytes", "metadata"}
    assert len(lines_of("ls", path, "b", "photos/", "--limit", "7")) == 7
    short = lines_of("ls", path, "b", "--delimiter", "/")
    assert [each.get("key") or each["prefix"] for each in short] == ["k", "photos/", "zz\x1b[31m"]
    assert lines_of("ls", path, "other") == []
    assert run("ls", path, "none").exit_code == 2


def test_history_lists_what_was_done_to_one_key(path: str) -> None:
    """The log remembers what the pages have dropped."""
    with lowwater.open(path) as db:
        db.delete("b", "k")
        db.copy("b", "photos/000.jpg", "b", "k")
        db.write([lowwater.Put("b", "k", b"in a group"), lowwater.Delete("other", "k")])
    entries = lines_of("history", path, "b", "k")
    assert [entry["kind"] for entry in entries] == ["put", "put", "delete", "copy", "put"]
    assert base64.b64decode(entries[0]["value"]) == b"first"
    assert [entry["kind"] for entry in lines_of("history", path, "other", "k")] == ["delete"]
    assert len(run("history", path, "b", "k", "--limit", "2").stdout.splitlines()) == 2
    assert "first" in run("history", path, "b", "k", "--values", "utf8").stdout
    assert run("history", path, "b", "none").stdout == ""
    assert run("history", path, "b", "k", "--json", "--values", "hex").exit_code == 2


def test_root_prints_what_the_database_says(path: str) -> None:
    """Scripts compare it."""
    with lowwater.open(path) as db:
        expected = db.root()
        seq = db.snapshot("now")
        db.put("b", "k", b"later")
    assert run("root", path, "--at", str(seq)).stdout == expected + "\n"
    assert run("root", path).stdout != expected + "\n"
    assert run_json("root", path, "--at", str(seq)) == {"root": expected, "seq": seq}


def test_check_finds_nothing_in_a_sound_database(path: str) -> None:
    """Also before there are pages."""
    assert run("check", path).stdout == "sound\n"
    assert run_json("check", path) == {"path": path, "sound": True, "findings": []}
    os.rename(f"{path}/pages", f"{path}/away")
    assert run("check", path).exit_code == 0


def test_check_finds_a_flipped_byte_in_the_log_and_in_a_page(path: str) -> None:
    """It says which of the two, because the log alone is not replaced by anything else."""
    with lmdb.open(f"{path}/pages", max_dbs=8) as environment:
        database = environment.open_db(b"pages", create=False)
        with environment.begin(write=True) as transaction:
            key, value = next(iter(transaction.cursor(database)))
            transaction.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=database)
    result = run("check", path, "--json")
    assert result.exit_code == 65
    document = json.loads(result.stdout)
    assert not document["sound"]
    (finding,) = document["findings"]
    assert finding["path"].endswith("pages")
    assert "made from the log" in finding["hint"]
    flip(f"{path}/wal/current.log", 500)
    document = json.loads(run("check", path, "--json").stdout)
    assert {os.path.basename(each["path"]) for each in document["findings"]} >= {"pages", "current.log"}
    assert "damaged:" in run("check", path).stdout


def test_check_misses_a_large_value_that_the_log_lost(tmp_path: Path) -> None:
    """A page that refers to it is sound in itself."""
    path = str(tmp_path / "data")
    with lowwater.open(path, config={"wal": {"rotate_max_bytes": "64 KiB"}}) as db:
        db.create_bucket("b")
        for number in range(30):
            db.put("b", f"{number}", b"%d" % number * 4000)
    first = min(name for name in os.listdir(f"{path}/wal") if name.startswith("segment"))
    os.rename(f"{path}/wal/{first}", f"{path}/away")
    document = json.loads(run("check", path, "--json").stdout)
    assert any("large value" in finding["what"] for finding in document["findings"])


def test_the_configuration_says_where_the_log_is(tmp_path: Path) -> None:
    """Commands that read its files must look there too."""
    (tmp_path / "lowwater.toml").write_text(f'[wal]\ndir = "{tmp_path}/elsewhere"\n')
    config = ["--config", str(tmp_path / "lowwater.toml")]
    path = str(tmp_path / "data")
    assert run(*config, "put", path, "b", "k", "--create", stdin=b"x").exit_code == 0
    assert (tmp_path / "elsewhere" / "current.log").exists()
    assert run(*config, "get", path, "b", "k").stdout_bytes == b"x"
    assert len(run(*config, "history", path, "b", "k").stdout.splitlines()) == 1
    assert run(*config, "check", path).stdout == "sound\n"
