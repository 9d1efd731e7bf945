"""A log that somebody else orders is not appended to."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.engine.engine_model import Machine
from tests.engine.test_engine import CREATE, Node

import lowwater
from lowwater import CreateBucket, Engine, Log, Put
from lowwater.chaos.disk import SimulatedCrash
from lowwater.cli.root import root
from lowwater.engine.database.opening import open_with
from lowwater.engine.log.log import LogOptions
from lowwater.engine.log.ownership import read_owner
from lowwater.engine.seams.real import RealFiles
from lowwater.engine.testing.engine import HISTORY, feed
from lowwater.errors import Corrupt, InputError, LogDivergence


def frames(path: Path) -> list[Any]:
    with Log.open(path / "wal") as log:
        return list(log.read())


def test_a_log_that_is_fed_is_no_database(tmp_path: Path) -> None:
    """One entry of its own, and the next one that is delivered would be a divergence."""
    path = tmp_path / "data"
    with Engine(path) as engine:
        feed(engine, HISTORY)
    before = frames(path)
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            # Its background would append at once.
            open_with(str(path), log_options=LogOptions(segment_age_max_s=1e-6))
        assert "orchestrator" in caught.value.message
        assert f"{path}/wal/owner" in caught.value.hint
        shutil.rmtree(path / "pages", ignore_errors=True)
    assert frames(path) == before
    with Engine(path) as engine:
        assert engine.apply_log_entry(50, Put("b", "k", b"")) == (50, None)


def test_a_database_is_not_fed(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with lowwater.open(path) as db:
        db.create_bucket("b")
    with pytest.raises(InputError) as caught:
        Engine(path)
    assert "lowwater.open" in caught.value.hint
    with lowwater.open(path) as db:
        assert db.buckets() == ["b"]


def test_a_log_can_be_taken_over(tmp_path: Path) -> None:
    """As the hint says, when nobody feeds it any more. Then it is not fed again."""
    path = tmp_path / "data"
    with Engine(path) as engine:
        feed(engine, HISTORY)
        engine.sync()
    os.remove(path / "wal" / "owner")
    with lowwater.open(path) as db:
        db.put("b", "own", b"")
    with pytest.raises(InputError):
        Engine(path)


def test_a_log_without_the_mark_belongs_to_who_opens_it(tmp_path: Path) -> None:
    """Copies, and logs that were written by hand, may have none."""
    path = tmp_path / "data"
    with Log.open(path / "wal") as log:
        log.append(CreateBucket("b"))
    assert read_owner(RealFiles(), f"{path}/wal") is None
    with lowwater.open(path) as db:
        assert db.buckets() == ["b"]
    assert read_owner(RealFiles(), f"{path}/wal") == "embedded"


def test_an_empty_log_belongs_to_nobody(tmp_path: Path) -> None:
    """Nothing was ordered yet."""
    path = tmp_path / "data"
    Engine(path).close()
    with lowwater.open(path) as db:
        db.create_bucket("b")
    with pytest.raises(InputError):
        Engine(path)


def test_a_mark_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """It is not taken for either."""
    path = tmp_path / "data"
    lowwater.open(path).close()
    (path / "wal" / "owner").write_bytes(b"emb")
    for open_it in (lowwater.open, Engine):
        with pytest.raises(Corrupt):
            open_it(path)


def test_the_mark_is_durable_before_the_first_entry() -> None:
    """A crash anywhere leaves a log that is marked, or one without entries."""
    marked = 0
    for number in range(1, 40):
        node = Node()
        node.files.crash_at(number, after=bool(number % 2))
        try:
            node.open()
            feed(node.engine, [(1, CREATE), (2, CreateBucket("b"))])
            node.engine.sync()
            node.engine.close()
        except SimulatedCrash:
            pass
        node.files.crash(random.Random(number), "lose")
        node.files._crash_number = None
        node.pages.crash()
        machine = Machine()
        machine.files, machine.pages = node.files, node.pages
        try:
            with open_with("node", seams=machine.seams(), store=machine.pages) as db:
                assert db.buckets() == []
        except InputError:
            marked += 1
        else:
            continue
        node.open()
        feed(node.engine, [(1, CREATE), (2, CreateBucket("b"))])
        node.engine.close()
    assert 5 < marked < 35


def test_what_was_fed_after_a_take_over_is_a_divergence(tmp_path: Path) -> None:
    """The reason for all of it."""
    path = tmp_path / "data"
    with Engine(path) as engine:
        feed(engine, HISTORY)
    os.remove(path / "wal" / "owner")
    with lowwater.open(path) as db:
        db.put("b", "own", b"")
    os.remove(path / "wal" / "owner")
    with Engine(path) as engine, pytest.raises(LogDivergence):
        engine.apply_log_entry(44, Put("b", "theirs", b""))


def test_commands_that_read_look_into_a_log_that_is_fed(tmp_path: Path) -> None:
    """And those that write do not touch it."""
    path = tmp_path / "data"
    with Engine(path) as engine:
        feed(engine, HISTORY)
        fingerprint = engine.root()
    before = frames(path)

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(root, list(arguments), input=b"")

    assert run("get", str(path), "b", "a").stdout_bytes == b"3"
    assert [line.split()[-1] for line in run("ls", str(path), "b").stdout.splitlines()] == [
        "a", "copy", "x", "y",
    ]  # fmt: skip
    assert run("root", str(path)).stdout.strip() == fingerprint
    assert run("check", str(path)).exit_code == 0
    put = run("put", str(path), "b", "k")
    assert put.exit_code == 2
    assert "orchestrator" in put.stderr
    assert frames(path) == before
