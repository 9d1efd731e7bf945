"""Pages that were lost or are damaged come back, of the log and of its archive, and nothing is deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lowwater
from lowwater.errors import ArchivedOnly, Corrupt, DirectoryLocked, LowwaterError, NotFound, PagesDamaged
from lowwater.recovery.rebuild import rebuild_pages

CONFIG = {"wal": {"rotate_max_bytes": 65536}, "engine": {"checkpoint_interval_s": None}}
Content = tuple[list[Any], str]


def content(db: lowwater.Database) -> Content:
    return list(db.scan("b")), db.root()


def put(db: lowwater.Database, round_: int) -> None:
    for number in range(600):
        db.put("b", f"{number * 7 % 600:04}", f"{round_}.{number}".encode() * 40)


def ship_and_purge(db: lowwater.Database) -> None:
    db.flush()
    db.ship(timeout=600)
    db.purge(db.marks().hwm)
    assert db.marks().purged > 0


@pytest.fixture
def uri(tmp_path: Path) -> str:
    os.mkdir(tmp_path / "archive")
    return f"file://{tmp_path}/archive"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "data")


def make(path: str, uri: str, *, with_checkpoint: bool) -> Content:
    """A closed database whose log has lost its beginning here, with a tail that was not shipped. Purged more
    than the checkpoint needs, where there is one."""
    with lowwater.open(path, tier=uri, config=CONFIG) as db:
        db.create_bucket("b")
        put(db, 1)
        if with_checkpoint:
            db.checkpoint()
            db.ship(timeout=600)
        put(db, 2)
        ship_and_purge(db)
        put(db, 3)
        for number in range(100, 200):
            db.delete("b", f"{number:04}")
        expected = content(db)
    assert segments_of(path)[0] > "segment-00000000000000000002"
    return expected


def segments_of(path: str) -> list[str]:
    return sorted(name for name in os.listdir(f"{path}/wal") if name.startswith("segment-"))


def lose(path: str) -> None:
    shutil.rmtree(f"{path}/pages")


def lose_data(path: str) -> None:
    os.unlink(f"{path}/pages/data.mdb")


def cut(path: str) -> None:
    os.truncate(f"{path}/pages/data.mdb", 100_000)


def zero(path: str) -> None:
    data = f"{path}/pages/data.mdb"
    size = os.path.getsize(data)
    os.truncate(data, 8192)
    os.truncate(data, size)


@pytest.mark.parametrize(
    ("damage", "with_checkpoint"),
    [
        (lose, True),
        (cut, False),
        pytest.param(lose_data, True, marks=pytest.mark.slow),
        pytest.param(zero, False, marks=pytest.mark.slow),
        *(pytest.param(each, False, marks=pytest.mark.long) for each in (lose, lose_data)),
        *(pytest.param(each, True, marks=pytest.mark.long) for each in (cut, zero)),
    ],
)
def test_pages_of_a_purged_log_come_back_by_themselves(
    path: str, uri: str, with_checkpoint: bool, damage: Callable[[str], None]
) -> None:
    """Archive and local log have everything, so nobody has to do anything."""
    expected = make(path, uri, with_checkpoint=with_checkpoint)
    damage(path)
    with lowwater.open(path, tier=uri, config=CONFIG) as db:
        assert content(db) == expected
        assert list(db.check()) == []
        db.put("b", "new", b"and it goes on")
        ship_and_purge(db)
    kept = [name for name in os.listdir(path) if name.startswith("pages.damaged")]
    assert len(kept) == (damage is not lose)
    with lowwater.open(path, tier=uri, config=CONFIG) as db:
        assert db.get("b", "new").value == b"and it goes on"


def test_the_command_makes_pages_again_and_keeps_those_that_were_there(path: str, uri: str) -> None:
    """For damage in the content of a page, which is found when that is read."""
    expected = make(path, uri, with_checkpoint=True)
    before = Path(path, "pages", "data.mdb").read_bytes()
    done = rebuild_pages(path, tier=uri)
    assert done.checkpoint_seq > 0
    assert done.pages > 0
    assert done.kept_as == f"{path}/pages.damaged-1"
    assert Path(done.kept_as, "data.mdb").read_bytes() == before
    again = rebuild_pages(path, tier=uri)
    assert again.kept_as == f"{path}/pages.damaged-2"
    assert again.segments_fetched == 0
    with lowwater.open(path, tier=uri, config=CONFIG) as db:
        assert content(db) == expected


def test_a_whole_log_needs_no_archive(path: str) -> None:
    """Pages are a cache of it."""
    with lowwater.open(path, config=CONFIG) as db:
        db.create_bucket("b")
        put(db, 1)
        expected = content(db)
    done = rebuild_pages(path)
    assert (done.checkpoint_seq, done.uri) == (0, None)
    with lowwater.open(path, config=CONFIG) as db:
        assert content(db) == expected


def test_without_its_archive_a_purged_log_is_refused_and_nothing_changes(path: str, uri: str) -> None:
    """The next one who tries has to find what there is."""
    make(path, uri, with_checkpoint=True)
    with pytest.raises(ArchivedOnly) as caught:
        rebuild_pages(path)
    assert "--tier" in caught.value.hint
    lose(path)
    with pytest.raises(PagesDamaged) as damaged:
        lowwater.open(path)
    assert "lowwater rebuild-pages" in damaged.value.hint
    shutil.rmtree(uri.removeprefix("file://"))
    os.mkdir(uri.removeprefix("file://"))
    with pytest.raises(LowwaterError) as failed:
        lowwater.open(path, tier=uri, config=CONFIG)
    assert failed.value.hint


def test_an_archive_of_another_history_is_not_believed(tmp_path: Path, path: str, uri: str) -> None:
    """Its pages would be somebody else's."""
    make(path, uri, with_checkpoint=True)
    os.mkdir(tmp_path / "other")
    make(str(tmp_path / "others-data"), f"file://{tmp_path}/other", with_checkpoint=True)
    before = sorted(os.listdir(path))
    with pytest.raises(Corrupt, match="not the history of this log"):
        rebuild_pages(path, tier=f"file://{tmp_path}/other")
    assert sorted(os.listdir(path)) == before


def test_a_database_that_is_open_is_left_alone(path: str) -> None:
    """Its pages are in use."""
    with lowwater.open(path, config=CONFIG) as db:
        db.create_bucket("b")
        with pytest.raises(DirectoryLocked):
            rebuild_pages(path)


def test_a_directory_without_a_log_is_told_as_such(tmp_path: Path) -> None:
    """Nothing is made there."""
    with pytest.raises(NotFound):
        rebuild_pages(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_clone_gets_its_pages_back_from_its_parent(tmp_path: Path, path: str, uri: str) -> None:
    """It ships nowhere, and most of what it has lies with its parent."""
    make(path, uri, with_checkpoint=True)
    clone = str(tmp_path / "clone")
    lowwater.restore(uri, clone, clone=True)
    with lowwater.open(clone) as db:
        put(db, 4)
        expected = content(db)
    lose(clone)
    with lowwater.open(clone) as db:
        assert content(db) == expected
