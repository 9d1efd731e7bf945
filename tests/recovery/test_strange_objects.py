"""An archive in which something else stands in the place of an object: told in types, whoever comes there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import lowwater
from lowwater.cli.root import root
from lowwater.errors import LowwaterError
from lowwater.tiering.names import parse


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


STRANGE: dict[str, Callable[[Path], object]] = {
    "nothing": Path.unlink,
    "no byte": lambda path: os.truncate(path, 0),
    "the beginning": lambda path: os.truncate(path, 20),
    "half of it": lambda path: os.truncate(path, path.stat().st_size // 2),
    "all but a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "100 GiB": lambda path: os.truncate(path, 100 * 2**30),
    "a directory": directory,
    "a FIFO": fifo,
}


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A database that has purged what it shipped, its archive beside it, and a seq that is only there."""
    place, seq = tmp_path_factory.mktemp("archived"), 0
    config = {"wal": {"rotate_max_bytes": 65_536}}
    with lowwater.open(place / "db", tier=f"file://{place}/archive", config=config) as db:
        db.create_bucket("b")
        for number in range(3):
            for key in range(150):
                db.put("b", f"k{key}", b"%d %d " % (key, number) * (500 if key % 7 == 0 else 100))
            seq = seq or db.marks().applied
        db.checkpoint()
        db.ship()
        db.put("b", "later", b"x" * 500)
        db.ship()
        db.flush()
        assert db.purge(db.purgeable_seq()) > seq
    yield place, seq
    shutil.rmtree(place)


def one_of_each(archive: Path) -> list[str]:
    """The newest object of each type, and all packs: one has rows, another lists of them."""
    names = sorted(str(each.relative_to(archive)) for each in archive.rglob("*") if each.is_file())
    found = {each: name for name in names if (each := parse(name)) is not None}
    newest = {each.type: name for each, name in found.items()}
    assert {"cluster", "epoch", "manifest", "segment", "checkpoint", "pack"} <= newest.keys()
    return sorted({*newest.values(), *(name for each, name in found.items() if each.type == "pack")})


def restored(uri: str, to: Path, seq: int | None) -> None:
    lowwater.restore(uri, to, at=seq, full=True)


def read(data: Path, uri: str, seq: int) -> None:
    """What only the archive has."""
    with lowwater.open(data, tier=uri) as db:
        for call in (lambda: db.get("b", "k7", at=seq), lambda: list(db.scan("b", at=seq)), db.root):
            with contextlib.suppress(LowwaterError):
                call()


@pytest.mark.slow
@pytest.mark.parametrize("strange", STRANGE)
def test_what_stands_in_the_place_of_an_object_is_told_in_types(
    tmp_path: Path, archived: tuple[Path, int], strange: str
) -> None:
    """Neither an assert, nor all memory, nor a wait for ever."""
    place, seq = archived
    uri = f"file://{tmp_path}/archive"
    for name in one_of_each(place / "archive"):
        shutil.copytree(place / "archive", tmp_path / "archive")
        shutil.copytree(place / "db", tmp_path / "db")
        STRANGE[strange](tmp_path / "archive" / name)
        calls: list[Callable[[], object]] = [
            lambda: list(lowwater.check(uri)),
            lambda: restored(uri, tmp_path / "to", None),
            lambda: restored(uri, tmp_path / "then", seq),
            lambda: read(tmp_path / "db", uri, seq),
        ]
        for call in calls:
            with contextlib.suppress(LowwaterError):
                call()
        result = CliRunner().invoke(root, ["tier", "status", uri], prog_name="lowwater")
        assert result.exception is None or isinstance(result.exception, SystemExit), name
        for each in tmp_path.iterdir():
            shutil.rmtree(each)
