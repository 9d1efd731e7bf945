"""`lowwater scrub`, `lowwater tier` and `lowwater log` on archives: what they print, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.tiering.whole_archive import whole_archive

import lowwater
from lowwater.cli.root import root
from lowwater.errors import DataError, LowwaterError, NotFound, StoreMissing
from lowwater.tiering import names
from lowwater.tiering.archive import open_archive
from lowwater.tiering.memory_store import MemoryStore
from lowwater.tiering.open_store import open_store


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """An archive in a folder."""
    path = str(tmp_path / "archive")
    store = open_store(path)
    for name, data in whole_archive(12).data.items():
        store.write(name, [data], size=len(data))
    store.close()
    return path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(root, arguments, prog_name="lowwater")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    return json.loads(result.stdout) | {"exit_code": result.exit_code}


def flip(folder: str, name: str, at: int = -100) -> None:
    path = Path(folder, name)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()
    path.write_bytes(data)


def a_segment(folder: str) -> str:
    return str(min(Path(folder, "wal", "0000000003").iterdir()).relative_to(folder))


# ---------------------------------------------------------------------------- scrub


@pytest.mark.parametrize("options", [[], ["--deep"]])
@pytest.mark.parametrize("scheme", ["", "file://", "shared_fs://"])
def test_scrub_tells_a_sound_archive(folder: str, options: list[str], scheme: str) -> None:
    document = run_json("scrub", *options, scheme + folder)
    assert (document["exit_code"], document["sound"], document["deep"]) == (0, True, bool(options))
    assert [each["severity"] for each in document["findings"]] == ["note"]
    newest = open_archive(MemoryStore(objects=whole_archive(12))).newest()
    assert newest is not None
    assert (document["hwm"], document["manifest"]) == (newest.hwm, newest.name)
    assert document["objects"] == len(whole_archive(12).data)
    assert "sound:" in run("scrub", *options, scheme + folder).stdout


def test_scrub_names_what_is_wrong_and_exits_with_65(folder: str) -> None:
    flip(folder, a_segment(folder), at=150)
    gone = min(Path(folder, "data", "packs").iterdir())
    gone.unlink()
    document = run_json("scrub", "--deep", folder)
    assert document["exit_code"] == DataError.exit_code
    assert not document["sound"]
    wrong = {each["path"]: each for each in document["findings"] if each["severity"] == "error"}
    assert wrong.keys() == {f"file://{folder}/{a_segment(folder)}", f"file://{gone}"}
    assert wrong.popitem()[1].keys() == {"severity", "what", "path", "seq", "offset", "hint"}
    text = run("scrub", "--deep", folder)
    assert a_segment(folder) in text.stdout, "the whole name below the archive"
    assert text.stdout.splitlines()[-1].startswith("damaged: ")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "told"),
    [
        (["scrub"], 2, "Missing argument"),
        (["scrub", "s4://bucket/x"], 2, "unknown scheme"),
        (["scrub", "s3:///x"], 2, "names no bucket"),
        (["scrub", "/there/is/nothing"], 2, "no such folder"),
        (
            ["scrub", "s3://bucket/x?endpoint=http://127.0.0.1:9&secret_access_key=hidden"],
            None,
            "s3://bucket/x",
        ),
        (["tier", "verify", "{folder}"], 2, "either NAME or a range"),
        (["tier", "verify", "{folder}", "cluster.cbor", "--from", "1"], 2, "either NAME or a range"),
        (["tier", "verify", "{folder}", "--from", "5", "--to", "4"], 2, "above"),
        (["tier", "verify", "{folder}", "wal/nothing"], 2, "no such object"),
        (["tier", "verify", "{folder}", "../x"], 2, "no name for an object"),
        (["tier", "ls", "{folder}", "--type", "file"], 2, "is not one of"),
        (["tier", "status", "{folder}/wal"], 2, "not known where the archive"),
        (["tier", "status", "{folder}", "--tier", "x"], 2, "archive already"),
        (["log", "verify", "s4://bucket/x"], 2, "unknown scheme"),
    ],
)
def test_wrong_calls_say_what_is_wrong(
    folder: str, arguments: list[str], exit_code: int | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And show no secret."""
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("LOWWATER_TIER__TIMEOUT_MS", "1000")
    monkeypatch.setenv("LOWWATER_TIER__ATTEMPTS_MAX", "1")
    result = run(*(each.format(folder=folder) for each in arguments))
    assert result.exit_code == exit_code or (exit_code is None and result.exit_code in (2, 75, 77))
    assert told in result.stderr
    assert "hidden" not in result.output


@pytest.mark.parametrize("command", [["scrub"], ["tier", "status"], ["tier", "ls"], ["log", "inspect"]])
def test_where_there_is_no_archive_all_say_so(tmp_path: Path, command: list[str]) -> None:
    result = run(*command, f"file://{tmp_path}", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stderr)["error"] == "NotFound"
    assert result.stdout == ""


def test_sigterm_ends_a_scrub(folder: str) -> None:
    """As Ctrl-C does, and with the code that says so."""
    code = (
        "import os, signal, sys\n"
        "from lowwater.tiering import scrub_objects\n"
        "real = scrub_objects.verify_segment\n"
        "asks = iter([signal.SIGTERM])\n"
        "def verify(found, reader):\n"
        "    for once in asks:\n"
        "        os.kill(os.getpid(), once)\n"
        "    return real(found, reader)\n"
        "scrub_objects.verify_segment = verify\n"
        "from lowwater.cli.root import root\n"
        f"sys.argv = ['lowwater', 'scrub', '--deep', {folder!r}]\n"
        "root()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert b"Traceback" not in done.stderr


# ---------------------------------------------------------------------------- tier


def test_status_of_an_archive(folder: str) -> None:
    document = run_json("tier", "status", folder)
    archive = open_archive(MemoryStore(objects=whole_archive(12)))
    newest = archive.newest()
    assert newest is not None
    catalogue = archive.catalogue_of(newest)
    assert document["exit_code"] == 0
    assert document["cluster_id"] == archive.cluster_id.hex()
    assert (document["epoch"], document["epochs"], document["hwm"]) == (3, [1, 2, 3], newest.hwm)
    assert (document["segments"], document["manifest"]) == (len(catalogue.segments), newest.name)
    assert document["checkpoint"]["root"] == catalogue.checkpoints[-1].root.hex()
    assert document["lag"] is None
    assert f"up to seq {newest.hwm}" in run("tier", "status", folder).stdout


def test_status_of_a_directory_has_its_lag(tmp_path: Path, folder: str) -> None:
    """Against its own archive; that of another cluster is refused."""
    directory = str(tmp_path / "db")
    with lowwater.open(directory) as db:
        db.create_bucket("b")
        db.put("b", "k", b"v")
        cluster_id = db._wal.chain.cluster_id
    refused = run("tier", "status", directory, "--tier", folder)
    assert refused.exit_code == 2
    assert "of the cluster" in refused.stderr
    own = str(tmp_path / "own")
    store = open_store(own)
    open_archive(store, cluster_id, create=True)
    store.close()
    document = run_json("tier", "status", directory, "--tier", own)
    assert document["hwm"] == 0
    assert document["lag"]["entries"] == document["lag"]["seq_last"] >= 3
    assert document["lag"]["body_bytes"] > 0
    assert "lag" in run("tier", "status", directory, "--tier", own).stdout


def test_ls_counts_by_type_and_lists(folder: str) -> None:
    Path(folder, "stranger").write_bytes(b"12345")
    document = run_json("tier", "ls", folder)
    objects = whole_archive(12).data
    assert sum(each["objects"] for each in document["types"].values()) == len(objects) + 1
    assert document["types"]["other"] == {"objects": 1, "stored_bytes": 5}
    assert "objects" not in document
    listed = run_json("tier", "ls", folder, "--long", "--type", "segment", "--type", "other")["objects"]
    assert [each["name"] for each in listed] == sorted(
        ["stranger", *(name for name in objects if name.startswith(names.WAL))]
    )
    assert listed[-1]["seq"] == 84
    text = run("tier", "ls", folder, "--long").stdout
    assert all(name in text for name in objects)


def test_verify_takes_an_object_or_a_range(folder: str) -> None:
    segment = a_segment(folder)
    assert run("tier", "verify", folder, segment).exit_code == 0
    seqs = names.parse(segment)
    assert seqs is not None
    flip(folder, segment, at=150)
    document = run_json("tier", "verify", folder, segment)
    assert (document["exit_code"], document["sound"], document["name"]) == (65, False, segment)
    inside = run_json("tier", "verify", folder, "--from", str(seqs.seq), "--to", str(seqs.seq))
    assert inside["exit_code"] == 65
    assert [each["path"] for each in inside["findings"]] == [f"file://{folder}/{segment}"]
    assert run("tier", "verify", folder, "--from", str(seqs.seq_last + 1)).exit_code == 0


def test_verify_of_a_range_counts_the_range(folder: str) -> None:
    """Else it says that a terabyte is sound of which it has read a megabyte."""
    segment = a_segment(folder)
    seqs = names.parse(segment)
    assert seqs is not None
    of_range = run_json("tier", "verify", folder, "--from", str(seqs.seq), "--to", str(seqs.seq_last))
    whole = run_json("scrub", folder)
    listed = run_json("tier", "ls", folder, "--long")["objects"]
    inside = [
        each
        for each in listed
        if (each["type"] in ("manifest", "checkpoint") and seqs.seq <= each["seq"] <= seqs.seq_last)
        or each["name"] == segment
    ]
    assert whole["objects"] == len(listed) > of_range["objects"]
    # Besides these the packs of a checkpoint in the range, if there is one.
    sizes = [each["stored_bytes"] for each in inside]
    has_checkpoint = any(each["type"] == "checkpoint" for each in inside)
    assert of_range["objects"] >= len(inside)
    assert of_range["stored_bytes"] >= sum(sizes)
    assert has_checkpoint or (of_range["objects"], of_range["stored_bytes"]) == (len(inside), sum(sizes))
    assert (of_range["seq_first"], of_range["seq_last"]) == (seqs.seq, seqs.seq_last)
    none = run_json("tier", "verify", folder, "--from", "1000000")
    assert (none["objects"], none["stored_bytes"], none["sound"]) == (0, 0, True)
    text = run("tier", "verify", folder, "--from", "1000000").stdout
    assert "0 objects, 0 B, from seq 1000000 on" in text


def test_dump_shows_what_a_manifest_reaches(folder: str) -> None:
    """Each segment, checkpoint and fork, by the name of its object."""
    listed = run_json("tier", "ls", folder, "--long")["objects"]
    newest = run_json("tier", "status", folder)
    rows = [
        json.loads(line)
        for line in run("tier", "dump", folder, newest["manifest"], "--json").stdout.splitlines()
    ]
    kinds = [row["type"] for row in rows]
    assert kinds == sorted(kinds, key=("segment", "checkpoint", "fork").index)
    assert kinds.count("segment") == newest["segments"]
    assert kinds.count("checkpoint") == newest["checkpoints"]
    assert kinds.count("fork") >= 1
    assert {row["name"] for row in rows if row["name"]} <= {each["name"] for each in listed}
    assert max(row["last"] for row in rows if row["type"] == "segment") == newest["hwm"]
    text = run("tier", "dump", folder, newest["manifest"]).stdout
    assert len(text.splitlines()) == len(rows)
    flip(folder, newest["manifest"], at=20)
    assert run("tier", "dump", folder, newest["manifest"]).exit_code == 65


def test_dump_shows_the_rows_of_a_checkpoint(folder: str) -> None:
    """As they would come back."""
    found = run_json("tier", "status", folder)["checkpoint"]
    name = f"{names.CHECKPOINTS}checkpoint-{found['id']}.ckpt"
    rows = [json.loads(line) for line in run("tier", "dump", folder, name, "--json").stdout.splitlines()]
    lowwater.restore(Path(folder).as_uri(), Path(folder).parent / "as-of", at=found["seq"])
    with lowwater.open(Path(folder).parent / "as-of") as db:
        live = {(each.bucket, each.key): each.seq for bucket in db.buckets() for each in db.scan(bucket)}
    assert {(row["bucket"], row["key"]): row["seq"] for row in rows if row["bucket"]} == live
    flip(folder, name)
    assert run("tier", "dump", folder, name).exit_code == 65


@pytest.mark.parametrize(
    ("kind", "hint"),
    [("segment", "lowwater log dump"), ("pack", "tier ls --long"), ("cluster", "tier ls --long")],
)
def test_dump_of_what_has_no_rows_says_where_to_look(folder: str, kind: str, hint: str) -> None:
    objects = run_json("tier", "ls", folder, "--long", "--type", kind)["objects"]
    result = run("tier", "dump", folder, objects[0]["name"])
    assert result.exit_code == 2
    assert hint in result.stderr
    gone = run("tier", "dump", folder, "checkpoints/checkpoint-00000000000000000001-0123456789abcdef.ckpt")
    assert gone.exit_code == NotFound.exit_code


def test_a_catalogue_that_is_not_whole_is_damage_and_no_wrong_call(tmp_path: Path) -> None:
    """The other commands cannot go on without it, and send to the one that can."""
    path = str(tmp_path / "archive")
    store = open_store(path)
    for name, data in whole_archive().data.items():
        if not name.startswith(names.CHUNKS):
            store.write(name, [data], size=len(data))
    for command in (["tier", "status"], ["log", "verify"]):
        result = run(*command, path, "--json")
        assert result.exit_code == 65
        error = json.loads(result.stderr)
        assert names.CHUNKS in error["path"]
        assert "lowwater scrub" in error["hint"]
    assert run("scrub", path).exit_code == 65
    store.close()


# ---------------------------------------------------------------------------- check


def test_check_takes_directories_and_archives(tmp_path: Path, folder: str) -> None:
    """`lowwater.check` is what the command calls."""
    directory = str(tmp_path / "db")
    with lowwater.open(directory) as db:
        db.create_bucket("b")
    assert list(lowwater.check(directory)) == []
    assert [each.severity for each in lowwater.check(f"file://{folder}")] == ["note"]
    assert run("check", folder).exit_code == 0
    flip(folder, a_segment(folder), at=150)
    assert [each.severity for each in lowwater.check(Path(folder))] == ["error", "note"]
    assert run("check", folder).exit_code == 65
    expected: list[tuple[str, type[LowwaterError]]] = [
        (str(tmp_path / "nothing"), NotFound),
        (f"shared_fs://{tmp_path}/nothing", StoreMissing),
    ]
    for place, error in expected:
        with pytest.raises(error):
            list(lowwater.check(place))


# ---------------------------------------------------------------------------- logs


def test_the_log_tools_read_archives(folder: str) -> None:
    """As they read a directory with the same segments, raw or compressed, over forks."""
    verified = run_json("log", "verify", folder)
    inspected = run_json("log", "inspect", f"file://{folder}")
    assert verified["exit_code"] == inspected["exit_code"] == 0
    assert verified["sound"]
    assert verified["segments"] == len(inspected["segments"]) == 12
    assert all(each["follows"] for each in inspected["segments"][1:])
    lines = run("log", "dump", folder, "--json").stdout.splitlines()
    assert len(lines) == verified["entries"] == inspected["entries"]
    forks = [
        json.loads(line)["seq"]
        for line in run("log", "dump", folder, "--kind", "fork", "--json").stdout.splitlines()
    ]
    assert len(forks) == 2
    large = run("log", "dump", folder, "--bucket", "b", "--key", "large 000", "--json").stdout
    assert json.loads(large)["value_bytes"] == 2000


def test_the_log_tools_read_one_segment_of_an_archive(folder: str) -> None:
    for path in sorted(Path(folder, "wal", "0000000003").iterdir()):
        single = f"file://{folder}/{path.relative_to(folder)}"
        assert run_json("log", "verify", single)["sound"]
        assert run_json("log", "inspect", single)["path"] == single
    flip(folder, a_segment(folder))
    damaged = run_json("log", "verify", f"file://{folder}/{a_segment(folder)}")
    assert damaged["exit_code"] == 65
    assert run("log", "verify", f"file://{folder}/wal/0000000003/segment-1-2-3.log").exit_code == 2


def test_the_log_tools_name_the_objects_of_an_archive(folder: str) -> None:
    segment = a_segment(folder)
    object_path = f"file://{folder}/{segment}"
    flip(folder, segment, at=150)
    assert {each["path"] for each in run_json("log", "verify", folder)["findings"]} == {object_path}
    assert json.loads(run("log", "dump", folder, "--json").stderr)["path"] == object_path
    salvaged = run("log", "dump", folder, "--json", "--salvage")
    assert {json.loads(line)["path"] for line in salvaged.stderr.splitlines()} == {object_path}
    Path(folder, segment).unlink()
    (finding,) = [
        each
        for each in run_json("log", "inspect", folder)["findings"]
        if "gone from the archive" in each["what"]
    ]
    assert finding["path"] == object_path
