"""The commands on a database: what each prints, what it leaves alone, and how it ends."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import lmdb
import pytest
from blake3 import blake3
from click.testing import CliRunner, Result

import lowwater
from lowwater.cli.root import root
from lowwater.engine.testing.damage import flip
from lowwater.errors import NotFound

COMMANDS = ("check", "checkpoints", "compact-local", "get", "history", "ls", "pages", "put", "root")
BINARY = bytes(range(256)) * 40


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
def test_a_directory_may_have_a_name_that_is_no_text(command: str, path: str, tmp_path: Path) -> None:
    """Names of files are bytes."""
    other = str(tmp_path / os.fsdecode(b"d\xff"))
    os.rename(path, other)
    more = {"compact-local": ["--yes"], "checkpoints": ["--make"]}
    result = run(*arguments_of(command, other), *more.get(command, []), "--json", stdin=b"value")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", ["history", "ls", "pages"])
def test_a_limit_may_be_larger_than_any_number_of_lines(command: str, path: str) -> None:
    """Who wants all of them writes many nines."""
    arguments = (*arguments_of(command, path), *(["b"] if command == "ls" else []))
    assert len(lines_of(*arguments, "--limit", "9" * 30)) == len(lines_of(*arguments))
    assert run(*arguments, "--limit", "0").exit_code == 2


def test_a_source_that_cannot_be_read_is_told(path: str) -> None:
    """The disk that it is on may fail."""
    result = run("put", path, "b", "k", "/proc/self/mem")  # whose first byte nobody can read
    assert result.exit_code == 74
    assert "cannot read the value" in result.stderr


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
    if command in ("check", "checkpoints", "compact-local", "history", "pages"):
        assert result.exit_code == 0, result.output
    else:
        assert result.exit_code == 2
        assert "hint: stop the process" in result.stderr


@pytest.mark.parametrize("command", ["check", "compact-local", "get", "history", "ls", "pages", "root"])
def test_looking_changes_no_file(command: str, path: str) -> None:
    """Of a database that was closed, that is."""
    before = tree_of(path)
    assert run(*arguments_of(command, path)).exit_code == 0
    assert {name for name, data in tree_of(path).items() if before.get(name) != data} <= (
        {"wal/lock", "pages/data.mdb"} if command in ("get", "ls", "root") else set()
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


def test_put_ships_where_it_is_told_to(tmp_path: Path) -> None:
    """The archive alone has the value, then. Without a store, or with one that is gone, it is an error."""
    path, archive = str(tmp_path / "data"), tmp_path / "archive"
    refused = run("put", path, "b", "k", "--create", "--ship", stdin=b"x")
    assert (refused.exit_code, refused.stdout) == (2, "")
    config = tmp_path / "lowwater.toml"
    config.write_text(f'[tier]\nuri = "file://{archive}"\n')
    done = run("--config", str(config), "put", path, "b", "k", "--create", "--ship", stdin=b"shipped")
    assert done.exit_code == 0, done.output
    copy = str(tmp_path / "copy")
    assert lowwater.restore(f"file://{archive}", copy, clone=True).seq >= int(done.stdout)
    assert run("get", copy, "b", "k").stdout_bytes == b"shipped"
    shutil.rmtree(archive)
    archive.write_bytes(b"in its place")
    gone = run("--config", str(config), "put", path, "b", "k", "--ship", stdin=b"here")
    assert gone.exit_code != 0
    assert "Traceback" not in gone.output


def test_put_makes_a_database_only_where_it_is_told_to(tmp_path: Path) -> None:
    """And the bucket with it."""
    path = str(tmp_path / "data")
    for command in ("put", "get", "history", "ls", "root", "checkpoints", "pages", "check"):
        refused = run(*arguments_of(command, path), stdin=b"x")
        assert refused.exit_code != 0
        assert not (tmp_path / "data").exists(), command
    for command in ("put", "get", "ls", "root"):
        refused = run(*arguments_of(command, path), stdin=b"x")
        assert (refused.exit_code, "`lowwater put --create`" in refused.stderr) == (2, True), command
    for value in (b"1", b"2"):
        assert run("put", path, "b", "k", "--create", stdin=value).exit_code == 0
        assert run("get", path, "b", "k").stdout_bytes == value
    assert "`lowwater put --create`" in run("put", path, "other", "k", stdin=b"x").stderr
    assert run("ls", path).stdout == "b\n"


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


def test_moments_are_seqs_or_times(tmp_path: Path) -> None:
    """As people write them; without a zone they are UTC."""
    path = str(tmp_path / "data")
    with lowwater.open(path) as db:
        db.create_bucket("b")
        db.move_horizon(2)
        first = db.put("b", "k", b"first")
        time_us = db.head("b", "k").time_us
        while db.put("b", "k", b"second") and db.head("b", "k").time_us == time_us:
            pass
    moment = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)).isoformat()
    for at in (str(first), moment, moment.removesuffix("+00:00"), moment.replace("+00:00", "Z")):
        assert run("get", path, "b", "k", "--at", at).stdout_bytes == b"first"
        assert lines_of("ls", path, "b", "--at", at)[0]["seq"] == first
        assert lines_of("ls", path, "--at", at) == [{"bucket": "b"}]
        assert run_json("root", path, "--at", at)["seq"] == first
        assert [line["seq"] for line in lines_of("history", path, "b", "k", "--at", at)] == [first]
    assert run("get", path, "b", "k").stdout_bytes == b"second"
    assert run("get", path, "b", "k", "--at", "yesterday").exit_code == 2
    early = run("get", path, "b", "k", "--at", "1999-12-31")
    assert early.exit_code == 2
    assert "begins after" in early.stderr


def test_check_finds_nothing_in_a_sound_database(path: str) -> None:
    """Also before there are pages."""
    assert run("check", path).stdout == "sound\n"
    assert run_json("check", path) == {"path": path, "sound": True, "findings": []}
    os.rename(f"{path}/pages", f"{path}/away")
    assert run("check", path).exit_code == 0


def damage_page(path: str) -> None:
    """The first one, in its last byte."""
    with lmdb.open(f"{path}/pages", max_dbs=8) as environment:
        database = environment.open_db(b"pages", create=False)
        with environment.begin(write=True) as transaction:
            key, value = next(iter(transaction.cursor(database)))
            transaction.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=database)


def test_check_finds_a_flipped_byte_in_the_log_and_in_a_page(path: str) -> None:
    """It says which of the two, because the log alone is not replaced by anything else."""
    damage_page(path)
    result = run("check", path, "--json")
    assert result.exit_code == 65
    document = json.loads(result.stdout)
    assert not document["sound"]
    (finding,) = document["findings"]
    assert finding["path"].endswith("pages")
    assert "rebuild-pages" in finding["hint"]
    flip(f"{path}/wal/current.log", 500)
    document = json.loads(run("check", path, "--json").stdout)
    assert {os.path.basename(each["path"]) for each in document["findings"]} >= {"pages", "current.log"}
    assert "damaged:" in run("check", path).stdout


def test_check_finds_damage_in_the_structure_of_the_page_file(path: str) -> None:
    """LMDB trusts what it maps: it could end the process, or read what was never written."""
    with lowwater.open(path) as db:
        db.put_many("b", [(f"{number:05}", b"v" * 100) for number in range(5000)])
    data = Path(path, "pages", "data.mdb")
    held = data.read_bytes()
    for damaged in (held[: len(held) // 2], held[:8192] + bytes(len(held) - 8192), b"\xff" * len(held)):
        data.write_bytes(damaged)
        result = run("check", path, "--json")
        assert result.exit_code == 65
        findings = json.loads(result.stdout)["findings"]
        assert findings
        assert all(each["path"].endswith("pages/data.mdb") and each["hint"] for each in findings)
    data.write_bytes(held)
    assert run("check", path).stdout == "sound\n"


def test_check_beside_an_engine_that_flushes_finds_nothing(path: str) -> None:
    """A file that changes while it is looked at is no damage."""
    script = (
        "import sys, time, lowwater\n"
        "with lowwater.open(sys.argv[1], config={'engine': {'pool_bytes_max': '1 MiB'}}) as db:\n"
        "    print('open', flush=True)\n"
        "    for number in range(300):\n"
        "        db.put_many('b', [(f'{number * 7 % 97:06}-{each}', b'v' * 200) for each in range(100)])\n"
        "        time.sleep(0.005)\n"
    )
    command = [sys.executable, "-c", script, path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        while writer.poll() is None:
            findings = json.loads(run("check", path, "--json").stdout)["findings"]
            assert [each for each in findings if each["severity"] == "error"] == []
        assert writer.returncode == 0


def test_pages_lists_the_pages(path: str) -> None:
    """What an operator looks at when a database takes more room than its data."""
    with lowwater.open(path) as db:
        db.put_many("b", [(f"{number:05}", b"v" * 100) for number in range(5000)])
        db.delete("b", "00007")
    pages = lines_of("pages", path)
    assert len(pages) > 20
    assert sum(each["keys"] for each in pages) == 5000 - 1 + 102 + 2
    assert sum(each["large"] for each in pages) == 1
    assert sum(each["buckets"] for each in pages) == 2
    spans = [(each["bucket_first"], each["key_first"]) for each in pages]
    assert spans == sorted(spans)
    assert all(each["rows"] >= each["keys"] > 0 and each["problem"] is None for each in pages)
    text = run("pages", path).stdout
    assert len(text.splitlines()) >= len(pages)
    assert "\x1b" not in text
    assert len(lines_of("pages", path, "--limit", "3")) == 3
    (one,) = lines_of("pages", path, "--bucket", "b", "--key", "02500")
    assert one["key_first"] <= "02500" <= one["key_last"]
    photos = lines_of("pages", path, "--bucket", "b", "--prefix", "photos/")
    assert 0 < len(photos) < len(pages)
    assert photos[-1]["key_last"].startswith(("photos/", "zz"))
    assert len(lines_of("pages", path, "--bucket", "none", "--key", "k")) == 1


def test_pages_sums_up(path: str) -> None:
    """Histograms of what pages hold, which say whether they have the size that they should."""
    pages = lines_of("pages", path)
    summary = run_json("pages", path, "--summary")
    assert summary["pages"] == len(pages)
    for name in ("keys", "rows", "bytes", "deleted", "large"):
        assert summary[name] == sum(each[name] for each in pages)
    for name in ("by_rows", "by_bytes"):
        assert sum(each["pages"] for each in summary[name]) == len(pages)
    assert all(each["from"] & each["from"] - 1 == 0 for each in summary["by_rows"])
    assert summary["damaged"] == 0
    text = run("pages", path, "--summary").stdout
    assert f"{len(pages)} pages" in text
    assert "rows, from" in text


def test_pages_lists_a_damaged_one_with_what_is_wrong(path: str) -> None:
    """The others are still there."""
    damage_page(path)
    result = run("pages", path, "--json")
    assert result.exit_code == 65
    problems = [json.loads(line)["problem"] for line in result.stdout.splitlines()]
    assert [bool(each) for each in problems] == [True] + [False] * (len(problems) - 1)
    assert "checksum" in run("pages", path).stdout
    assert run("pages", path, "--summary").exit_code == 65
    assert "cannot be read" in run("pages", path, "--summary").stdout


def test_pages_show_their_rows(path: str) -> None:
    """Who doubts an answer looks at what is stored: each version, deletions, and where large values lie."""
    with lowwater.open(path) as db:
        db.snapshot("before")
        seq = db.put("b", "k", b"third", {"a": "b"})
        db.delete("b", "photos/007.jpg")
    rows = lines_of("pages", path, "--rows")
    assert len(rows) == sum(each["rows"] for each in lines_of("pages", path))
    of_k = [row for row in rows if (row["bucket"], row["key"]) == ("b", "k")]
    assert of_k[0]["seq"] == seq
    assert base64.b64decode(of_k[0]["value"]) == b"third"
    assert of_k[0]["metadata"] == {"a": "b"}
    large = of_k[1]
    assert (large["value_bytes"], large["blake3"]) == (len(BINARY), blake3(BINARY).hexdigest())
    log = Path(path, "wal", "current.log").read_bytes()
    assert large["place"]["segment_first"] == 1
    assert log[large["place"]["offset"] :].index(BINARY) < 200
    assert {(row["key"], row["what"]) for row in rows if not row["bucket"]} == {
        ("b", "bucket"),
        ("other", "bucket"),
    }
    (gone, kept) = [row for row in rows if row["key"] == "photos/007.jpg"]
    assert (gone["what"], kept["what"]) == ("deletion", "value")
    assert "value" not in gone
    assert not any("value" in row for row in lines_of("pages", path, "--rows", "--values", "none"))
    some = lines_of("pages", path, "--rows", "--bucket", "b", "--key", "k")
    assert all(row in rows for row in some)
    assert of_k[0] in some
    text = run("pages", path, "--rows", "--values", "utf8").stdout
    assert len(text.splitlines()) == len(rows)
    assert "b/k" in text
    assert "third" in text
    assert "\x1b" not in text


def test_rows_of_an_open_transaction_name_it_instead_of_a_time(tmp_path: Path) -> None:
    """The page does not know yet what becomes of it."""
    data = str(tmp_path / "data")
    with lowwater.Engine(data) as engine:
        engine.apply_log_entry(1, lowwater.Create(bytes(16), bytes(16)))
        engine.apply_log_entry(2, lowwater.CreateBucket("b"))
        engine.apply_log_entry(3, lowwater.Begin())
        engine.apply_log_entry(4, lowwater.Put("b", "k", b"v", txn=3))
        engine.flush()
    (row,) = [row for row in lines_of("pages", data, "--rows") if row["key"] == "k"]
    assert (row["seq"], row["txn"], row["time_us"]) == (4, 3, None)
    assert "txn=3" in run("pages", data, "--rows").stdout


def test_a_damaged_page_is_told_among_the_rows(path: str) -> None:
    """The others are still there."""
    with lowwater.open(path) as db:
        # Where pages begin depends on the salt: of a few keys all may be in one.
        db.put_many("b", [(f"more {number:05}", b"v") for number in range(5000)])
    damage_page(path)
    result = run("pages", path, "--rows", "--json")
    assert result.exit_code == 65
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [bool(each.get("problem")) for each in lines].count(True) == 1
    assert len(lines) > 1
    assert "checksum" in run("pages", path, "--rows").stdout


def test_checkpoints_show_their_rows(path: str) -> None:
    """What a restore would bring back, key by key."""
    first = run_json("checkpoints", path, "--make")["checkpoints"][0]
    packs = sorted(Path(path, "packs").iterdir())
    with lowwater.open(path) as db:
        db.put("b", "k", b"third")
        live = {(each.bucket, each.key): each for bucket in db.buckets() for each in db.scan(bucket)}
    run("checkpoints", path, "--make")
    rows = lines_of("checkpoints", path, "--rows")
    assert {(row["bucket"], row["key"]) for row in rows} == {*live, ("", "b"), ("", "other")}
    for row in rows:
        if row["what"] == "value":
            found = live[row["bucket"], row["key"]]
            assert (base64.b64decode(row["value"]), row["seq"], row["time_us"]) == (
                found.value,
                found.seq,
                found.time_us,
            )
    older = lines_of("checkpoints", path, "--rows", "--seq", str(first["seq"]))
    assert len(older) == first["rows"]
    (large,) = [row for row in older if row["key"] == "k"]
    assert (large["value_bytes"], "value" in large) == (len(BINARY), False)
    assert "b/k" in run("checkpoints", path, "--rows").stdout
    missing = run("checkpoints", path, "--rows", "--seq", "7")
    assert missing.exit_code == NotFound.exit_code
    assert "no checkpoint of seq 7" in missing.stderr
    for pack in packs:
        flip(pack, pack.stat().st_size // 2)
        assert run("checkpoints", path, "--rows", "--seq", str(first["seq"])).exit_code == 65
        flip(pack, pack.stat().st_size // 2)


@pytest.mark.parametrize(
    "wrong",
    [
        ["pages", "--rows", "--summary"],
        ["pages", "--values", "hex"],
        ["checkpoints", "--values", "hex"],
        ["checkpoints", "--seq", "5"],
        ["pages", "--rows", "--values", "hex", "--json"],
    ],
)
def test_options_for_rows_need_rows(path: str, wrong: list[str]) -> None:
    """What would be ignored is refused."""
    command, *options = wrong
    result = run(command, path, *options)
    assert result.exit_code == 2
    assert result.stdout == ""


@pytest.mark.parametrize(
    "wrong", [["--key", "k"], ["--prefix", "k"], ["--bucket", "b", "--key", "k", "--prefix", "k"]]
)
def test_pages_of_a_key_need_its_bucket(path: str, wrong: list[str]) -> None:
    """And one of key and prefix is enough."""
    result = run("pages", path, *wrong)
    assert result.exit_code == 2
    assert "hint: give" in result.stderr


def test_compact_local_gives_free_room_back(path: str) -> None:
    """And changes nothing before it is told to."""
    with lowwater.open(path) as db:
        db.put_many("b", [(f"{number:05}", b"v" * 200) for number in range(20_000)])
        db.flush()
        for start in range(0, 20_000, 1000):
            db.write([lowwater.Delete("b", f"{number:05}") for number in range(start, start + 1000)])
        root = db.root()
    before = tree_of(path)
    planned = run_json("compact-local", path)
    assert not planned["written"]
    assert planned["after_bytes"] is None
    assert "nothing was changed" in run("compact-local", path).stdout
    assert tree_of(path) == before
    done = run_json("compact-local", path, "--yes")
    assert done["written"]
    assert done["before_bytes"] == planned["before_bytes"]
    assert done["after_bytes"] < done["before_bytes"] // 4
    assert os.path.getsize(f"{path}/pages/data.mdb") == done["after_bytes"]
    assert "before" in run("compact-local", path, "--yes").stdout
    assert sorted(os.listdir(path)) == ["pages", "wal"]
    assert run("check", path).stdout == "sound\n"
    with lowwater.open(path) as db:
        assert db.root() == root
        assert db.redone <= 1


def test_rebuild_pages_says_where_the_others_lie_now(path: str) -> None:
    """Nothing is deleted, and what was damaged takes room until somebody removes it."""
    with lowwater.open(path) as db:
        root = db.root()
    os.truncate(f"{path}/pages/data.mdb", 10_000)
    assert run("pages", path).exit_code == 65
    assert "lowwater rebuild-pages" in run("pages", path).stderr
    done = run_json("rebuild-pages", path)
    assert done["kept_as"] == f"{path}/pages.damaged-1"
    assert os.path.getsize(f"{path}/pages.damaged-1/data.mdb") == 10_000
    assert "makes all pages from the log" in run("rebuild-pages", path).stdout
    assert run_json("root", path)["root"] == root
    assert run("check", path).stdout == "sound\n"


def test_compact_local_refuses_a_database_that_is_open(path: str) -> None:
    """What is written meanwhile would be lost."""
    with lowwater.open(path):
        script = "import sys; from lowwater.cli import main; sys.argv[0] = 'lowwater'; main()"
        done = subprocess.run(
            [sys.executable, "-c", script, "compact-local", path, "--yes", "--json"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    error = json.loads(done.stderr)
    assert error["error"] == "DirectoryLocked"
    assert error["hint"]
    assert sorted(os.listdir(path)) == ["pages", "wal"]


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


def test_a_command_that_reads_changes_no_setting_of_the_log(path: str, tmp_path: Path) -> None:
    """A look is no change, whatever the configuration asks for; the first write is one."""
    config = tmp_path / "lowwater.toml"
    config.write_text('[wal]\ncompression = "none"\nbefore_images = true\n')
    for command in ("get", "history", "ls", "root"):
        assert run("--config", str(config), *arguments_of(command, path)).exit_code == 0
    with lowwater.open(path) as db:
        assert "settings" not in [entry.kind for entry in db.log()]
    assert run("--config", str(config), "put", path, "b", "new", stdin=b"x").exit_code == 0
    with lowwater.open(path) as db:
        assert [entry.kind for entry in db.log()].count("settings") == 1


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


URI = "s3://user:hunter2@bucket/x?secret_access_key=hunter2"


@pytest.mark.parametrize(
    "arguments",
    [
        *([name, URI] for name in ("root", "ls", "checkpoints", "pages", "compact-local", "rebuild-pages")),
        ["get", URI, "b", "k"],
        ["history", URI, "b", "k"],
        ["put", "--create", URI, "b", "k"],
        ["restore", "memory://", URI],
        ["log", "repair", URI, "copy"],
        ["log", "repair", "log", URI],
        ["--config", URI, "root", "data"],
    ],
    ids=lambda arguments: " ".join(arguments).replace(URI, "URI"),
)
def test_the_uri_of_a_store_is_no_directory_and_its_secrets_are_not_shown(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would become a directory of that name, and errors would tell what it is called."""
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert "is the URI of a store" in result.stderr
    assert "hunter2" not in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["get", "data", "b", "k", "--at"],
        ["put", "data", "b", "k", "--if-seq"],
        ["log", "dump", "data", "--from"],
        ["log", "dump", "data", "--since"],
    ],
    ids=" ".join,
)
def test_a_number_of_thousands_of_digits_is_a_wrong_call(arguments: list[str]) -> None:
    """Python refuses to read it by an error of its own."""
    result = run(*arguments, "9" * 5000)
    assert result.exit_code == 2
    assert "is no" in result.stderr
    assert len(result.stderr) < 1000


def test_what_has_no_end_is_refused_before_memory_ends(path: str) -> None:
    """A value that is larger than any entry, and a configuration that is a device."""
    put = run("put", path, "b", "endless", "/dev/zero")
    assert put.exit_code == 2
    assert "at most" in put.stderr
    config = run("--config", "/dev/zero", "root", path)
    assert config.exit_code == 2
    assert "far too long" in config.stderr
