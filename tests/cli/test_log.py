"""`lowwater log`: what each command prints, on sound and on damaged logs, and how it ends."""

from __future__ import annotations

import base64
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from click.testing import CliRunner, Result

from lowwater.cli.root import root
from lowwater.engine.format.entries import Put
from lowwater.engine.log.compress import compress_segment
from lowwater.engine.log.directory import read_sealed
from lowwater.engine.log.log import Log
from lowwater.engine.seams.real import RealFiles
from lowwater.engine.testing.damage import (
    current_path,
    flip,
    make_log,
    read,
    sealed_paths,
    seqs_of,
    truncate,
    write,
)

GOLDEN = Path(__file__).parents[1] / "golden"
COMMANDS = ("inspect", "dump", "verify", "repair")
ENTRIES = 151


@pytest.fixture
def directory(tmp_path: Path) -> str:
    path = str(tmp_path / "log")
    make_log(path)
    return path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(root, ["log", *arguments], prog_name="lowwater")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def run_json(*arguments: str) -> Any:
    """The document that a command prints; its exit code is in `exit_code`."""
    result = run(*arguments, "--json")
    document = json.loads(result.stdout)
    assert "exit_code" not in document
    return document | {"exit_code": result.exit_code}


def lines_of(*arguments: str) -> list[Any]:
    result = run("dump", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def process(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lowwater", "log", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=environment, **options)


# ---------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_it_does_and_that_nothing_is_changed(command: str) -> None:
    """It is read by somebody whose log is damaged."""
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert len(result.stdout.splitlines()) > 8
    overview = " ".join(run("--help").stdout.split())
    assert command in overview
    assert "None changes what it reads" in overview


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_without_a_log_is_an_error_with_a_hint(command: str, tmp_path: Path) -> None:
    """Each wrong path has its own message, and none has a traceback."""
    target = [str(tmp_path / "target")] if command == "repair" else []
    text = tmp_path / "text.log"
    text.write_text("2026-01-01 INFO started\n" * 99)
    empty = tmp_path / "empty.log"
    empty.touch()
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    for path, code, message in (
        (tmp_path / "missing", 2, "there is nothing there"),
        (nothing, 2, "there is no log here"),
        (text, 65, "no segment"),
        (empty, 65, "empty|nothing in it|no segment"),
    ):
        result = run(command, str(path), *target)
        assert result.exit_code == code, (path, result.output)
        assert any(part in result.output for part in message.split("|")), (path, result.output)
        assert "Traceback" not in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_call_is_told_before_anything_is_read(command: str) -> None:
    """Two is the code for it everywhere."""
    assert run(command).exit_code == 2
    assert "Missing argument" in run(command).stderr
    assert run(command, "--no-such-option").exit_code == 2


@pytest.mark.parametrize("name", ["future-minor", "future-major", "future-kind", "future-flag"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_newer_format_is_told_with_what_to_do(command: str, name: str, tmp_path: Path) -> None:
    """It is neither damaged nor to be ignored."""
    (path,) = (GOLDEN / name).glob("*.log")
    result = run(command, str(path), *([str(tmp_path / "target")] if command == "repair" else []))
    if command == "inspect" and name in ("future-kind", "future-flag"):
        assert result.exit_code == 0, "it looks into no entry"
        return
    assert result.exit_code in (2, 65)
    assert "this version" in result.output or "this Lowwater reads up to" in result.output
    assert "pip install --upgrade lowwater" in result.output


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_they_work_while_a_process_has_the_log_open(command: str, directory: str) -> None:
    """Nobody stops a server to look into its log."""
    with Log.open(directory) as log:
        log.append(Put("users", "new", b"value"))
        document = run_json(command, directory)
        assert document["exit_code"] == 0
        assert document["entries"] == ENTRIES + 1
        assert len(lines_of(directory)) == ENTRIES + 1


WRITE_UNTIL_KILLED = """
import sys
from lowwater.engine.format.entries import Put
from lowwater.engine.log.log import Log

with Log.open(sys.argv[1]) as log:
    log.append(Put("users", "ready", b"yes"))
    print("ready", flush=True)
    for number in range(100_000):
        log.append(*[Put("users", f"user-{number}-{item}", bytes(100)) for item in range(10)])
"""


def test_they_work_while_a_process_writes_as_fast_as_it_can(tmp_path: Path) -> None:
    """Files are rotated, sealed and renamed under them. What they show has no gap all the same."""
    directory = str(tmp_path / "log")
    make_log(directory, entries=1)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITE_UNTIL_KILLED, directory]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(12):
            document = run_json("inspect", directory)
            assert document["exit_code"] == 0, document["findings"]
            seqs = [line["seq"] for line in lines_of(directory, "--from", str(document["seq_last"]))]
            assert seqs == list(range(document["seq_last"], seqs[-1] + 1))
        writer.kill()


# ---------------------------------------------------------------------------- inspect


def test_inspect_shows_every_file_of_a_log(directory: str) -> None:
    """One line a segment, and whose log it is."""
    result = run("inspect", directory)
    assert result.exit_code == 0
    for path in sealed_paths(directory):
        line = next(line for line in result.stdout.splitlines() if os.path.basename(path) in line)
        assert "sealed" in line
        first, last = seqs_of(path)
        assert f" {first} " in line
        assert f" {last} " in line
    assert "current.log" in result.stdout
    assert "segments of 4.0 KiB, blocks of 1.0 KiB" in result.stdout
    assert "151, seq 1 to 151" in result.stdout
    assert result.stdout.count("follows") == len(sealed_paths(directory))


def test_inspect_json_has_what_its_document_promises(directory: str) -> None:
    """Scripts are written against it."""
    document = run_json("inspect", directory)
    assert document.keys() == {
        "path", "cluster_id", "epoch", "settings", "seq_first", "seq_last", "entries", "body_bytes", "hint",
        "segments", "findings", "exit_code",
    }  # fmt: skip
    with Log.open(directory) as log:
        assert document["cluster_id"] == log.chain.cluster_id.hex()
    assert document["settings"] == {
        "segment_bytes": 4096, "block_bytes": 1024, "compression": "zstd", "before_images": 0,
        "page_keys": 64, "inline_bytes_max": 256,
    }  # fmt: skip
    assert (document["seq_first"], document["seq_last"], document["entries"]) == (1, ENTRIES, ENTRIES)
    assert document["hint"]["durable_seq"] == ENTRIES
    assert document["findings"] == []
    first, *_, last = document["segments"]
    assert first.keys() == {
        "name", "state", "seq_first", "seq_last", "entries", "file_bytes", "body_bytes", "time_first_us",
        "time_last_us", "epoch", "hash", "follows", "torn_bytes",
    }  # fmt: skip
    assert (first["state"], first["follows"], last["state"], last["follows"]) == (
        "sealed",
        None,
        "current",
        True,
    )
    path = sealed_paths(directory)[0]
    assert first["hash"] == read_sealed(RealFiles(), path)[1].segment_hash.hex()


def test_inspect_of_one_segment_shows_what_is_in_it(directory: str) -> None:
    """Kinds and streams, from the footer."""
    path = sealed_paths(directory)[0]
    document = run_json("inspect", path)
    assert document["exit_code"] == 0
    assert document["kinds"]["create"] == 1
    assert sum(document["kinds"].values()) == document["entries"]
    assert document["streams"] == [{"topic": "news", "offset_first": 0, "messages": 4}]
    assert document["header"]["seq_first"] == 1
    assert document["trailer"]["frame_count"] == document["entries"]
    result = run("inspect", path)
    assert "key index" in result.stdout
    assert "news" in result.stdout


def test_inspect_of_an_unsealed_segment_counts_for_itself(directory: str) -> None:
    """It has no footer to ask."""
    document = run_json("inspect", current_path(directory))
    assert document["state"] == "current"
    assert document["trailer"] is None
    assert sum(document["kinds"].values()) == document["entries"]
    shutil.copy(current_path(directory), f"{directory}/../saved")
    assert run_json("inspect", f"{directory}/../saved")["entries"] == document["entries"]


def test_inspect_reads_compressed_segments(directory: str) -> None:
    """They are what an archive holds."""
    path = sealed_paths(directory)[1]
    raw = run_json("inspect", path)
    compressed = run_json("inspect", compress(path))
    assert compressed["compressed_bytes"] == os.path.getsize(f"{path}.zst")
    assert (compressed["hash"], compressed["kinds"]) == (raw["hash"], raw["kinds"])


def compress(path: str) -> str:
    file = RealFiles().open(path)
    parts: list[bytes] = []
    compress_segment(file, parts.append)
    file.close()
    write(f"{path}.zst", b"".join(parts))
    return f"{path}.zst"


def test_inspect_shows_what_it_can_of_a_damaged_log(directory: str) -> None:
    """And says what it cannot."""
    first, second, third = sealed_paths(directory)[:3]
    flip(first, 20)
    flip(second, -20)
    os.remove(third)
    document = run_json("inspect", directory)
    assert document["exit_code"] == 65
    segments = {segment["name"]: segment for segment in document["segments"]}
    assert segments[os.path.basename(first)]["epoch"] is None
    assert segments[os.path.basename(first)]["entries"] == seqs_of(first)[1]
    assert segments[os.path.basename(second)]["entries"] == seqs_of(second)[1] - seqs_of(second)[0] + 1
    assert {finding["path"] for finding in document["findings"]} >= {first, second}
    assert all(finding["hint"] for finding in document["findings"])
    result = run("inspect", directory)
    assert result.exit_code == 65
    assert "header's checksum" in result.stdout
    assert "trailer's checksum" in result.stdout
    assert "BROKEN" in result.stdout


def test_what_a_key_had_before_is_shown(tmp_path: Path) -> None:
    """Whoever looks for what a change has replaced finds it beside the change."""
    (path,) = (GOLDEN / "before-images").glob("*0001-*.log")
    images = {line["seq"]: line.get("before_image") for line in lines_of(str(path))}
    assert images[2] is images[9] is images[13] is None
    assert images[3] == {"seq": 0}
    assert images[4] == {
        "seq": 3, "time_us": 1_700_000_000_000_003, "value_bytes": 3, "metadata": {"b": "c"},
        "value": base64.b64encode(b"one").decode(),
    }  # fmt: skip
    large = images[6]
    assert (large["seq"], large["value_bytes"], "value" in large) == (5, 1024, False)
    assert large["blake3"] == blake3(bytes(range(256)) * 4).hexdigest()
    assert "value" not in lines_of(str(path), "--values", "none")[3]["before_image"]
    lines = run("dump", str(path), "--values", "utf8").stdout.splitlines()
    assert "before=nothing" in lines[2]
    assert 'before=3  {"b": "c"}  one' in lines[3]
    assert "1024 B" in lines[5]
    assert "say what their keys had before" in run("inspect", str(path)).stdout
    # Frames that no engine has made may hold anything there.
    (path,) = (GOLDEN / "optional-groups").glob("*.log")
    document = next(line for line in lines_of(str(path)) if line.get("key") == "before")
    assert "before_image" not in document
    assert document["before"] == base64.b64encode(b"what was there \x00\xff").decode()
    assert f"before={document['before']}" in run("dump", str(path)).stdout


def test_inspect_tells_a_torn_tail_from_damage(tmp_path: Path) -> None:
    """A crash leaves one, and nothing is wrong with that."""
    log = tmp_path / "log"
    log.mkdir()
    shutil.copy(GOLDEN / "current-torn" / "current.log", log)
    document = run_json("inspect", str(log))
    assert document["exit_code"] == 0
    assert document["segments"][-1]["torn_bytes"] > 0
    assert [finding["severity"] for finding in document["findings"]] == ["warning"]
    assert "torn" in run("inspect", str(log)).stdout


# ---------------------------------------------------------------------------- verify


def test_verify_says_that_a_log_is_sound_and_how_much_of_it(directory: str) -> None:
    """A number that is too low would show that something was not looked at."""
    result = run("verify", directory)
    assert result.exit_code == 0
    segments = len(sealed_paths(directory)) + 1
    assert result.stdout.startswith(f"sound: {segments} segments, {ENTRIES} entries, ")
    document = run_json("verify", directory)
    assert document["sound"] is True
    assert (document["segments"], document["entries"]) == (segments, ENTRIES)
    assert document["findings"] == []
    assert document["exit_code"] == 0


def test_verify_lists_what_is_wrong_and_where(directory: str) -> None:
    """With the place, for whoever restores it, and what to do."""
    path = sealed_paths(directory)[1]
    flip(path, 1500)
    result = run("verify", directory)
    assert result.exit_code == 65
    assert os.path.basename(path) in result.stdout
    assert "a frame's checksum does not match" in result.stdout
    assert "restore this segment" in result.stdout
    assert "damaged: 2 errors" in result.stdout
    document = run_json("verify", directory)
    assert document["sound"] is False
    for finding in document["findings"]:
        assert finding.keys() == {"severity", "what", "path", "seq", "offset", "hint"}
        assert finding["path"] == path


def test_verify_takes_single_segments(directory: str) -> None:
    """Raw, compressed, or being written."""
    path = sealed_paths(directory)[1]
    for one in (path, compress(path), current_path(directory)):
        document = run_json("verify", one)
        assert (document["sound"], document["segments"]) == (True, 1), one
    flip(f"{path}.zst", 100)
    assert run_json("verify", f"{path}.zst")["exit_code"] == 65


def test_a_warning_is_shown_and_is_no_failure(directory: str) -> None:
    """Sixty-five means damage to whoever calls it."""
    write(f"{directory}/notes.txt", b"")
    result = run("verify", directory)
    assert result.exit_code == 0
    assert "notes.txt" in result.stdout
    assert "sound: " in result.stdout


# ---------------------------------------------------------------------------- dump


def test_dump_prints_every_entry_in_order(directory: str) -> None:
    """By line and as JSON."""
    lines = lines_of(directory)
    assert [line["seq"] for line in lines] == list(range(1, ENTRIES + 1))
    result = run("dump", directory)
    assert result.exit_code == 0
    assert [int(line.split()[0]) for line in result.stdout.splitlines()] == list(range(1, ENTRIES + 1))


def test_dump_json_is_the_entry(directory: str) -> None:
    """All of it, the value as base64."""
    with Log.open(directory) as log:
        entries = list(log.read())
    for line, entry in zip(lines_of(directory), entries, strict=True):
        assert (line["seq"], line["kind"], line["time_us"]) == (entry.seq, entry.kind, entry.time_us)
        assert line.get("bucket", "") == entry.bucket
        assert line.get("key", "") == entry.key
        assert line.get("metadata") == entry.metadata
        assert base64.b64decode(line["value"]) == entry.value
        assert line["value_bytes"] == len(entry.value)
    assert lines_of(directory)[0]["body"]["settings"] == {"block_bytes": 1024, "segment_bytes": 4096}
    assert [line["stream_offset"] for line in lines_of(directory, "--kind", "append")] == list(range(15))
    assert "value" not in lines_of(directory, "--limit", "1", "--values", "none")[0]


def test_dump_json_has_what_the_optional_groups_say() -> None:
    """Against the golden file, which says what must come out."""
    (path,) = (GOLDEN / "optional-groups").glob("*.log")
    expected = json.loads(Path(f"{path}.json").read_text())["entries"]
    for line, entry in zip(lines_of(str(path)), expected, strict=True):
        for name in ("txn", "txn_seq_before", "group_seq_last", "session", "request", "request_hash"):
            assert line.get(name) == entry.get(name), (name, line)
        assert line.get("stream_offset") == entry.get("stream_offset")
        assert line.get("refused") == entry.get("refused")
        before = line.get("before")
        assert (None if before is None else base64.b64decode(before).hex()) == entry.get("before")
        assert line.get("value_ref") == entry.get("value_ref")


@pytest.mark.parametrize("case", sorted({path.parent.name for path in GOLDEN.glob("*/*.log*")}))
def test_dump_reads_every_golden_file_or_says_why_not(case: str) -> None:
    """Whatever can stand in a log can be printed."""
    for path in sorted((GOLDEN / case).glob("*.log*")):
        if path.suffix == ".json":
            continue
        expected = json.loads(Path(f"{path}.json").read_text())
        for arguments in ([], ["--values", "utf8"], ["--values", "hex"], ["--json"]):
            result = run("dump", str(path), *arguments)
            if "error" in expected:
                assert result.exit_code in (2, 65), path
            else:
                assert result.exit_code == 0, (path, result.stderr)
                assert len(result.stdout.splitlines()) == len(expected["entries"])


def test_dump_filters(directory: str) -> None:
    """Each filter alone, and together."""
    everything = lines_of(directory)

    def seqs(*arguments: str) -> list[int]:
        return [line["seq"] for line in lines_of(directory, *arguments)]

    def expected(wanted: Any) -> list[int]:
        return [line["seq"] for line in everything if wanted(line)]

    assert seqs("--from", "40", "--to", "90") == list(range(40, 91))
    assert seqs("--from", "150") == [150, 151]
    assert seqs("--to", "2") == [1, 2]
    assert seqs("--from", "1000") == []
    assert seqs("--kind", "delete") == expected(lambda line: line["kind"] == "delete")
    assert seqs("--kind", "delete", "--kind", "create") == expected(
        lambda line: line["kind"] in ("delete", "create")
    )
    assert seqs("--bucket", "news") == expected(lambda line: line.get("bucket") == "news")
    key = "user-0056"
    assert len(seqs("--bucket", "users", "--key", key)) == 2
    assert seqs("--bucket", "users", "--key", key) == expected(lambda line: line.get("key") == key)
    assert seqs("--key", key) == expected(lambda line: line.get("key") == key)
    assert seqs("--prefix", "user-001") == expected(lambda line: line.get("key", "").startswith("user-001"))
    assert seqs("--limit", "7") == list(range(1, 8))
    times = [line["time_us"] for line in everything]
    since, until = times[30], times[120]
    assert seqs("--since", str(since), "--until", str(until)) == expected(
        lambda line: since <= line["time_us"] < until
    )
    assert seqs("--since", "2099-01-01") == []
    assert seqs("--until", "2020-02-29T12:00:00+02:00") == []
    assert seqs("--from", "40", "--to", "90", "--kind", "put", "--limit", "3", "--prefix", "user-004") == [
        42, 43, 44,
    ]  # fmt: skip


def test_dump_shows_values_as_asked(directory: str) -> None:
    """Not at all where nobody asked: they can be large, and somebody's."""
    arguments = ("dump", directory, "--bucket", "users", "--key", "user-0001")
    assert " 30 B" in run(*arguments).stdout
    assert "1 1 1 1" in run(*arguments, "--values", "utf8").stdout
    assert "31203120" in run(*arguments, "--values", "hex").stdout
    assert "MSAxIDEg" in run(*arguments, "--values", "base64").stdout


def test_a_key_cannot_steer_the_terminal(tmp_path: Path) -> None:
    """Keys and values are whatever a program wrote."""
    directory = str(tmp_path / "log")
    with Log.open(directory) as log:
        log.append(Put("b\x1b[2J", "k\x9b\n\u202e[bold]", b"\x1b]0;title\x07"))
    for command in ("dump", "inspect", "verify"):
        output = run(command, directory).output
        assert not any(letter in output for letter in "\x1b\x9b\u202e\x07"), command
    line = run("dump", directory, "--values", "utf8").stdout.splitlines()[1]
    assert r"b\x1b[2J/k\x9b\n\u202e[bold]" in line
    assert r"\x1b]0;title\x07" in line


def test_dump_ends_at_damage_with_an_error_after_all_that_is_good(directory: str) -> None:
    """What was printed can be relied on, and nobody takes it for the whole."""
    path = sealed_paths(directory)[1]
    flip(path, 1500)
    result = run("dump", directory, "--json")
    assert result.exit_code == 65
    seqs = [json.loads(line)["seq"] for line in result.stdout.splitlines()]
    assert seqs == list(range(1, seqs[-1] + 1))
    error = json.loads(result.stderr)
    assert error["error"] == "Corrupt"
    assert error["path"] == path
    assert error["seq"] == seqs[-1]
    assert error["offset"] < 1500
    assert error["hint"]
    assert run("dump", directory, "--from", str(seqs[-1] + 3)).exit_code == 0, "what was asked for is good"


def test_dump_ends_with_an_error_where_a_footer_is_damaged(directory: str) -> None:
    """Its frames are good, and printed; the log is not."""
    path = sealed_paths(directory)[1]
    flip(path, -20)
    result = run("dump", path, "--json")
    assert result.exit_code == 65
    first, last = seqs_of(path)
    assert [json.loads(line)["seq"] for line in result.stdout.splitlines()] == list(range(first, last + 1))
    assert "trailer" in json.loads(result.stderr)["message"]


def test_dump_ends_with_an_error_where_a_segment_is_missing(directory: str) -> None:
    """A gap must not look like entries that never were."""
    paths = sealed_paths(directory)
    os.remove(paths[1])
    result = run("dump", directory)
    assert result.exit_code == 65
    assert len(result.stdout.splitlines()) == seqs_of(paths[0])[1]
    assert "the segment follows seq" in result.stderr


def test_dump_ends_with_an_error_where_the_end_is_missing(directory: str) -> None:
    """The hint vouches for more."""
    os.remove(current_path(directory))
    result = run("dump", directory)
    assert result.exit_code == 65
    assert "the log was durable up to seq 151" in result.stderr


def test_salvage_goes_on_after_damage_and_says_what_it_skipped(directory: str) -> None:
    """The rest of a log is worth having, as long as nobody takes it for the whole."""
    paths = sealed_paths(directory)
    flip(paths[0], 1500)
    flip(paths[1], -20)
    truncate(paths[2], 2000)
    flip(current_path(directory), 20)
    result = run("dump", directory, "--salvage", "--json")
    assert result.exit_code == 65
    seqs = [json.loads(line)["seq"] for line in result.stdout.splitlines()]
    missing = set(range(1, ENTRIES + 1)) - set(seqs)
    assert len(seqs) == len(set(seqs))
    lost_by_truncation = seqs_of(paths[2])[1] - max(seq for seq in seqs if seq <= seqs_of(paths[2])[1])
    assert len(missing) == 1 + lost_by_truncation
    told = [json.loads(line) for line in result.stderr.splitlines()]
    assert {finding["path"] for finding in told} == {*paths[:3], current_path(directory)}
    skipped = next(finding for finding in told if "skipped" in finding["what"])
    assert skipped["seq"] + 1 in missing
    text = run("dump", directory, "--salvage")
    assert "damaged: " in text.stderr
    assert len(text.stdout.splitlines()) == len(seqs)


def test_salvage_of_a_sound_log_is_a_dump(directory: str) -> None:
    """So that one can begin with it."""
    result = run("dump", directory, "--salvage")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout == run("dump", directory).stdout


def test_salvage_does_not_take_bytes_in_a_value_for_an_entry(tmp_path: Path) -> None:
    """Somebody may keep segments as values; the damaged frame itself tells where it ends."""
    inner = str(tmp_path / "inner")
    make_log(inner, entries=400)
    directory = str(tmp_path / "outer")
    with Log.open(directory) as log:
        log.append(Put("backup", "segment", read(sealed_paths(inner)[-1])))
        log.append(Put("backup", "next", b"1"))
        log.seal()
    (path,) = sealed_paths(directory)
    flip(path, read(path).index(b"segment") + 100)
    flip(path, -20)
    result = run("dump", directory, "--salvage", "--json")
    assert [json.loads(line)["seq"] for line in result.stdout.splitlines()] == [1, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "-1"], "is no seq"),
        (["--to", str(2**64)], "is no seq"),
        (["--since", "yesterday"], "is no time"),
        (["--kind", "nothing"], "Invalid value for '--kind'"),
        (["--limit", "0"], "Invalid value for '--limit'"),
        (["--values", "xml"], "Invalid value for '--values'"),
        (["--key", "a", "--prefix", "a"], "exclude each other"),
        (["--json", "--values", "utf8"], "base64"),
    ],
)
def test_wrong_arguments_of_dump_are_told(directory: str, arguments: list[str], message: str) -> None:
    """A filter that is not understood must not print everything."""
    result = run("dump", directory, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_reader_that_has_enough_ends_dump_quietly(directory: str) -> None:
    """`lowwater log dump ... | head` is how it is used most."""
    big = f"{directory}-big"
    with Log.open(big) as log:
        log.append(*[Put("users", f"user-{number}", bytes(200)) for number in range(20_000)])
    with process("dump", big, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as dump:
        assert dump.stdout is not None
        assert dump.stderr is not None
        assert json.loads(dump.stdout.readline())["seq"] == 1
        dump.stdout.close()
        assert dump.stderr.read() == b""
        dump.wait(30)


def test_the_memory_of_dump_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """Logs are larger than machines."""
    directory = str(tmp_path / "log")
    with Log.open(directory) as log:
        for _ in range(24):
            log.append(Put("users", "key", bytes(4 * 2**20)))
    script = (
        "import resource, sys\n"
        "sys.argv = ['lowwater', 'log', 'dump', sys.argv[1]]\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (90 * 2**20, 90 * 2**20))\n"
        "from lowwater.cli import main\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, directory]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 25


# ---------------------------------------------------------------------------- repair


def test_repair_of_a_sound_log_says_that_it_is_whole(directory: str, tmp_path: Path) -> None:
    """And is a verified copy."""
    target = str(tmp_path / "target")
    result = run("repair", directory, target)
    assert result.exit_code == 0
    assert "whole: " in result.stdout
    assert "kept: 151 entries, seq 1 to 151" in result.stdout
    assert run("verify", target).exit_code == 0


def test_repair_tells_what_was_kept_built_and_lost(directory: str, tmp_path: Path) -> None:
    """Its user decides by this what to do with the copy."""
    paths = sealed_paths(directory)
    flip(paths[0], -20)
    flip(paths[1], 1500)
    write(f"{directory}/notes.txt", b"do not delete")
    target = str(tmp_path / "target")
    result = run("repair", directory, target)
    assert result.exit_code == 65
    assert "footer built again" in result.stdout
    assert "cut: a frame's checksum does not match" in result.stdout
    assert "lost: seq " in result.stdout
    assert "not connected: " in result.stdout
    assert "left out: " in result.stdout
    assert "INCOMPLETE" in result.stdout
    shutil.rmtree(target)
    document = run_json("repair", directory, target)
    assert document.keys() == {
        "source", "target", "written", "whole", "seq_first", "seq_last", "entries", "body_bytes",
        "torn_bytes", "segments", "cut", "lost", "unconnected", "left_out", "exit_code",
    }  # fmt: skip
    assert document["exit_code"] == 65
    assert document["written"] is True
    assert document["whole"] is False
    assert document["cut"]["path"] == paths[1]
    assert document["lost"][0]["seq_first"] == document["seq_last"] + 1
    assert document["unconnected"][-1]["seq_last"] == ENTRIES
    assert document["left_out"] == [{"path": f"{directory}/notes.txt", "why": "it is no segment"}]
    assert len(lines_of(target)) == document["entries"] == document["seq_last"]


def test_a_dry_run_writes_nothing(directory: str, tmp_path: Path) -> None:
    """It answers whether a repair is worth it."""
    flip(sealed_paths(directory)[1], 1500)
    target = str(tmp_path / "target")
    document = run_json("repair", directory, target, "--dry-run")
    assert document["exit_code"] == 65
    assert document["written"] is False
    assert document["entries"] > 0
    assert "would keep" in run("repair", directory, target, "--dry-run").stdout
    assert sorted(os.listdir(tmp_path)) == ["log"]


def test_repair_refuses_what_would_do_harm(directory: str, tmp_path: Path) -> None:
    """Each refusal says what to do instead."""
    target = str(tmp_path / "target")
    os.mkdir(target)
    write(f"{target}/precious", b"")
    link = str(tmp_path / "link")
    os.symlink(directory, link)
    for source, where, message in (
        (directory, target, "something at the target"),
        (directory, f"{directory}/copy", "would lie in"),
        (directory, f"{link}/copy", "would lie in"),
        (link, directory, "would lie in"),
    ):
        result = run("repair", source, where)
        assert result.exit_code == 2, (source, where)
        assert message in result.stderr
        assert "hint: " in result.stderr
    with Log.open(directory):
        result = run("repair", directory, str(tmp_path / "new"), "--json")
        assert result.exit_code == 2
        assert json.loads(result.stderr)["error"] == "DirectoryLocked"
    assert not os.path.exists(tmp_path / "new")


@pytest.mark.slow
def test_a_terminated_repair_leaves_no_copy(tmp_path: Path) -> None:
    """Whoever stops it gets his room back."""
    directory, target = str(tmp_path / "log"), str(tmp_path / "target")
    with Log.open(directory) as log:
        for _ in range(40):
            log.append(Put("users", "key", os.urandom(10 * 2**20)))
    with process("repair", directory, target, stderr=subprocess.PIPE) as repair:
        assert repair.stderr is not None
        while repair.poll() is None and not list(Path(f"{target}.repairing").glob("*.log")):
            time.sleep(0.01)
        repair.send_signal(signal.SIGTERM)
        assert b"Traceback" not in repair.stderr.read()
    assert repair.returncode in (143, 0)
    if repair.returncode:
        assert not os.path.exists(target)
        assert os.listdir(f"{target}.repairing") == ["lock"]


# ---------------------------------------------------------------------------- progress


def test_progress_is_shown_on_a_terminal_and_nowhere_else(directory: str) -> None:
    """A bar in a log file is noise, and in a result it is damage."""
    assert run("verify", directory).stderr == ""
    leader, follower = pty.openpty()
    with process("verify", directory, "--json", stdout=subprocess.PIPE, stderr=follower) as verify:
        os.close(follower)
        shown = b""
        try:
            while part := os.read(leader, 4096):
                shown += part
        except OSError:
            pass  # the other end is closed
        assert verify.stdout is not None
        assert json.loads(verify.stdout.read())["sound"] is True
    os.close(leader)
    assert b"verifying" in shown


# ---------------------------------------------------------------------------- the contract


def names_in(document: Any) -> set[str]:
    """The names of all fields, except below those whose names are data."""
    if isinstance(document, list):
        return set().union(*map(names_in, document))
    if not isinstance(document, dict):
        return set()
    inner = [names_in(value) for name, value in document.items() if name not in _NAMES_ARE_DATA]
    return set(document).union(*inner)


_NAMES_ARE_DATA = ("kinds", "metadata", "body", "header", "trailer")


def test_every_field_of_the_json_is_documented(directory: str, tmp_path: Path) -> None:
    """The document is the contract; what it does not mention is not promised."""
    text = (GOLDEN.parents[1] / "docs" / "operating" / "log-tools.md").read_text()
    write(f"{directory}/notes.txt", b"do not delete")
    flip(sealed_paths(directory)[1], 1500)
    documents = [
        run_json("inspect", directory),
        run_json("inspect", sealed_paths(directory)[0]),
        run_json("verify", directory),
        run_json("repair", directory, str(tmp_path / "target")),
        *map(json.loads, run("dump", directory, "--json").stdout.splitlines()),
        json.loads(run("dump", directory, "--json").stderr),
    ]
    (golden,) = (GOLDEN / "optional-groups").glob("*.log")
    documents += lines_of(str(golden))
    undocumented = {name for name in names_in(documents) if f"`{name}`" not in text}
    assert undocumented == {"exit_code"}
