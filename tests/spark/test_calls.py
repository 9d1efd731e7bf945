"""What is wrong with a call is told by that call, before a task runs: there is no session here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lowwater
from lowwater.errors import InputError, InvalidConfig, InvalidEntry, VersionGone
from lowwater.spark.audit import look_in_spark
from lowwater.spark.building import build_checkpoint, root_as_of
from lowwater.spark.counting import count
from lowwater.spark.export import export_parquet
from lowwater.spark.frames import changes, log_frame, state_as_of, versions
from lowwater.spark.options import parse
from lowwater.spark.plan import pin

FRAMES = (log_frame, state_as_of, versions, changes)
NOBODY: Any = None


@pytest.fixture
def archive(tmp_path: Path) -> str:
    uri = f"file://{tmp_path}/archive"
    with lowwater.open(tmp_path / "data", tier=uri) as db:
        db.create_bucket("b")
        db.ship()
    return uri


@pytest.mark.parametrize("read", [*FRAMES, build_checkpoint, root_as_of])
def test_a_way_of_reading_that_there_is_not_is_an_error(archive: str, read: Callable[..., Any]) -> None:
    """Whoever writes `Deep` must not get `strict` for it."""
    with pytest.raises(InvalidConfig, match="verify is 'Deep'"):
        read(NOBODY, archive, verify="Deep")
    for part_bytes in (0, -1, 1.5):
        with pytest.raises(InvalidConfig, match="part_bytes is"):
            read(NOBODY, archive, part_bytes=part_bytes)


@pytest.mark.parametrize("read", FRAMES)
def test_a_bucket_or_a_prefix_is_text(archive: str, read: Callable[..., Any]) -> None:
    """Bytes would fail in a task."""
    for name in ("bucket", "prefix"):
        with pytest.raises(InvalidEntry, match=f"{name} is b'x'"):
            read(NOBODY, archive, **{name: b"x"})


@pytest.mark.parametrize("read", [log_frame, state_as_of, versions])
def test_columns_are_named_once_and_some_are(archive: str, read: Callable[..., Any]) -> None:
    """Of no columns a frame had no rows, and of one that came twice Spark gave up with a hundred lines."""
    with pytest.raises(InvalidConfig, match="no column is named"):
        read(NOBODY, archive, columns=[])
    with pytest.raises(InvalidConfig, match="seq is named 2 times"):
        read(NOBODY, archive, columns=["seq", "key", "seq"])
    with pytest.raises(InvalidConfig, match="no column 'kye'"):
        read(NOBODY, archive, columns=["kye"])


@pytest.mark.parametrize("read", [*FRAMES, build_checkpoint, root_as_of, count])
def test_the_memory_of_this_process_is_no_place_that_tasks_can_read(read: Callable[..., Any]) -> None:
    """They would say that all of it is missing."""
    with pytest.raises(InvalidConfig, match="the memory of one process"):
        read(NOBODY, "memory://spark")


def test_nothing_is_audited_in_memory_or_exported_there(archive: str) -> None:
    """What tasks write there would be gone when they end, and a manifest would name it."""
    with pytest.raises(InvalidConfig, match="the memory of one process"):
        look_in_spark(NOBODY, "memory://spark")
    with pytest.raises(InvalidConfig, match="the memory of one process"):
        export_parquet(NOBODY, archive, "memory://spark")


def test_kinds_are_some_that_there_are(archive: str, tmp_path: Path) -> None:
    """The same error from every call; of no kinds there were no rows."""
    calls: list[Callable[..., Any]] = [
        lambda kinds: log_frame(NOBODY, archive, kinds=kinds),
        lambda kinds: export_parquet(NOBODY, archive, str(tmp_path / "to"), kinds=kinds),
        lambda kinds: parse({"path": archive, "kinds": ",".join(kinds)}),
    ]
    for call in calls:
        with pytest.raises(InvalidConfig, match="there is no kind 'putt'") as caught:
            call(["put", "putt"])
        assert "the nearest one is put" in caught.value.hint
        with pytest.raises(InvalidConfig, match="no kind is named"):
            call([])


def test_an_export_that_cannot_be_is_not_begun(archive: str, tmp_path: Path) -> None:
    """A run is planned before its tasks find out."""
    wrong: dict[str, Any]
    for wrong in (
        {"compression": "lzo9"},
        {"columns": []},
        {"bucket": b"b"},
        {"verify": "all"},
        {"part_bytes": 0},
    ):
        with pytest.raises(InputError):
            export_parquet(NOBODY, archive, str(tmp_path / "to"), **wrong)
    assert not (tmp_path / "to").exists()


def test_what_was_purged_is_not_passed_over(tmp_path: Path) -> None:
    """A range that begins before the log does is no shorter range, and what was there before a change is
    unknown, not nothing."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        for _ in range(3):
            db.put("b", "k", b"")
            db._log.seal()
    min((tmp_path / "data" / "wal").glob("segment-*.log")).unlink()
    uri = str(tmp_path / "data")
    for read in (log_frame, versions, changes):
        with pytest.raises(VersionGone, match="begins with seq"):
            read(NOBODY, uri, start=1)
    with pytest.raises(VersionGone, match="begins with seq"):
        changes(NOBODY, uri)
    pinned = pin(uri)
    for bound in ("start", "end"):
        with pytest.raises(VersionGone, match=f"{bound} is seq 1, and the first one there"):
            parse({"path": uri, bound: "1"}).selection(pinned)
    parse({"path": uri, "end": "1", "fail_on_data_loss": "false"}).selection(pinned)
