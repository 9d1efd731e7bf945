"""`lowwater restore`: what it prints, what it leaves alone, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner, Result

import lowwater
from lowwater.cli.root import root
from lowwater.errors import LowwaterError


class Archive(NamedTuple):
    uri: str
    seq: int
    root: str
    early_seq: int
    early_root: str


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    uri = f"file://{tmp_path}/store"
    with lowwater.open(tmp_path / "original", tier=uri) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"k{number:04}", b"%d" % number) for number in range(500)])
        db.checkpoint()
        db.ship()
        early_seq, early_root = db.put("b", "k0007", b"early"), db.root()
        db.put("b", "k0007", b"late")
        db.ship()
        return Archive(uri, db.catalogue.hwm, db.root(), early_seq, early_root)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(root, list(arguments), prog_name="lowwater")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_newest_can_be_looked_at_without_fencing_anybody(archive: Archive, tmp_path: Path) -> None:
    """Only who writes goes on with the archive."""
    to = str(tmp_path / "to")
    done = run_json("restore", archive.uri, to)
    assert done["seq"] == archive.seq
    assert not done["is_clone"]
    assert done["pages_away"] > 0
    assert f"seq {archive.seq}" in done["missing"]
    assert run("get", to, "b", "k0007").stdout == "late"
    assert run_json("root", to)["root"] == archive.root
    with lowwater.open(tmp_path / "original", tier=archive.uri) as db:
        db.put("b", "more", b"1")
        db.ship()


def test_it_goes_on_with_the_archive_that_it_remembers(archive: Archive, tmp_path: Path) -> None:
    """Nobody names it again."""
    to = tmp_path / "to"
    lowwater.restore(archive.uri, to)
    with lowwater.open(to) as db:
        db.put("b", "new", b"n")
        db.ship()
        expected = db.root()
    again = tmp_path / "again"
    assert lowwater.restore(archive.uri, again, full=True).root == expected


def test_a_seq_and_all_of_it(archive: Archive, tmp_path: Path) -> None:
    to = str(tmp_path / "to")
    done = run_json("restore", archive.uri, to, "--at", str(archive.early_seq), "--full")
    assert done["root"] == archive.early_root
    assert done["is_clone"]
    assert done["pages_away"] == 0
    assert run("get", to, "b", "k0007").stdout == "early"
    text = run("restore", archive.uri, str(tmp_path / "clone"), "--clone")
    assert text.exit_code == 0
    assert "is a clone as of seq" in text.stdout
    assert "The archive ends with seq" in text.stdout


def test_a_plan_writes_nothing(archive: Archive, tmp_path: Path) -> None:
    to = tmp_path / "to"
    found = run_json("restore", archive.uri, str(to), "--plan")
    assert (found["seq"], found["seq_last"]) == (archive.seq, archive.seq)
    assert found["checkpoint_seq"] > 0
    assert 0 < found["bytes"] <= found["full_bytes"]
    assert not to.exists()
    assert "nothing was written" in run("restore", archive.uri, str(to), "--plan").stdout


def test_errors_name_the_archive_and_what_to_do(archive: Archive, tmp_path: Path) -> None:
    missing = run("restore", f"file://{tmp_path}/nothing", str(tmp_path / "to"))
    assert missing.exit_code == 2
    assert f"{tmp_path}/nothing" in missing.stderr
    assert "hint:" in missing.stderr
    beyond = run("restore", archive.uri, str(tmp_path / "to"), "--at", str(10**9))
    assert beyond.exit_code == 2
    assert f"its last one is {archive.seq}" in beyond.stderr
    over = run("restore", archive.uri, str(tmp_path / "original"))
    assert over.exit_code == 2
    assert "nothing is ever written over" in over.stderr
    assert not (tmp_path / "to").exists()


def test_a_clone_whose_archive_is_gone_says_which_it_needs(archive: Archive, tmp_path: Path) -> None:
    to = tmp_path / "to"
    lowwater.restore(archive.uri, to, clone=True)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(LowwaterError) as caught, lowwater.open(to) as db:
        list(db.scan("b"))
    assert f"{tmp_path}/store" in str(caught.value)


def test_commands_find_a_log_that_was_restored_elsewhere(archive: Archive, tmp_path: Path) -> None:
    """By what the directory has recorded: nobody names the configuration of the restore again."""
    config = tmp_path / "lowwater.toml"
    config.write_text(f'[wal]\ndir = "{tmp_path}/fast"\n')
    copy = str(tmp_path / "copy")
    assert run("--config", str(config), "restore", archive.uri, copy).exit_code == 0
    assert not (tmp_path / "copy" / "wal").exists()
    for command in (["ls", copy], ["root", copy], ["check", copy], ["log", "inspect", f"{tmp_path}/fast"]):
        assert run(*command).exit_code == 0, command
