"""`lowwater check` and `lowwater.open`: what one refuses, the other has called an error."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

import lowwater
from lowwater.cli.root import root
from lowwater.errors import DeniedError, LowwaterError, NotReadable

NOBODY = 65534
# Few segments, and more than one.
SMALL = {"wal": {"rotate_max_bytes": 262_144}}


def checked(path: Path) -> int:
    """The exit code of the command."""
    result = CliRunner().invoke(root, ["check", str(path)], prog_name="lowwater")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code


def opens(path: Path) -> bool:
    try:
        lowwater.open(path, create=False).close()
    except LowwaterError:
        return False
    return True


def made(path: Path, kind: str) -> Path:
    """A database: one that has all it needs, one that has purged what was shipped, or a clone."""
    archive = None if kind == "alone" else f"file://{path}-archive"
    with lowwater.open(path / "data", tier=archive, config=SMALL) as db:
        db.create_bucket("b")
        for number in range(3):
            db.put_many("b", [(f"k{key}", b"%d %d" % (key, number) * 200) for key in range(200)])
        db.checkpoint()
        db.flush()
        if archive is not None:
            db.ship()
            assert db.purge(db.purgeable_seq())
    if kind == "clone":
        lowwater.restore(archive, path / "clone", clone=True)
        with lowwater.open(path / "clone") as clone:
            clone.put("b", "own", b"1" * 2000)
        return path / "clone"
    return path / "data"


def files_of(path: Path) -> list[Path]:
    return sorted(each.relative_to(path) for each in path.rglob("*") if each.is_file())


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: list[Callable[[Path], object]] = [
    Path.unlink,
    emptied,
    lambda path: path.write_bytes(b"garbage " * 700),
    lambda path: os.truncate(path, path.stat().st_size // 2),
    as_directory,
    as_fifo,
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alone", "purged", "clone"])
def test_what_is_found_sound_opens(tmp_path: Path, kind: str) -> None:
    """An operator checks a directory before it is put to work, and not again."""
    whole = made(tmp_path, kind)
    tried = tmp_path / "tried"
    wrong = []
    for name in files_of(whole):
        for number, damage in enumerate(DAMAGES):
            shutil.copytree(whole, tried)
            damage(tried / name)
            code = checked(tried)
            if code not in (0, 65) or (code == 0 and not opens(tried)):
                wrong.append((str(name), number, code))
            shutil.rmtree(tried)
    for name in sorted(each for each in whole.iterdir() if each.is_dir()):
        shutil.copytree(whole, tried)
        shutil.rmtree(tried / name.relative_to(whole))
        if (code := checked(tried)) == 0 and not opens(tried):
            wrong.append((str(name), -1, code))
        shutil.rmtree(tried)
    assert wrong == []
    assert checked(whole) == 0


@pytest.mark.parametrize(
    ("name", "damage"),
    [("wal/owner", emptied), ("wal/owner", as_fifo), ("wal/lock", as_fifo)],
)
def test_what_keeps_a_database_from_opening_is_an_error(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    """These lie in no log, and hold no page: they were not looked at."""
    path = made(tmp_path, "alone")
    damage(path / name)
    (found,) = [each for each in lowwater.check(path) if each.severity == "error"]
    assert found.where == str(path / name)
    assert found.hint
    assert checked(path) == 65
    assert not opens(path)


def test_lost_pages_are_an_error_until_they_are_made_again(tmp_path: Path) -> None:
    """The whole log is here: opening makes them, and nothing is wrong any more."""
    path = made(tmp_path, "alone")
    (path / "pages" / "data.mdb").unlink()
    (found,) = [each for each in lowwater.check(path) if each.severity == "error"]
    assert "rebuild-pages" in found.hint
    assert checked(path) == 65
    assert opens(path)
    assert checked(path) == 0


# ---------------------------------------------------------------------------- permission


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything: then as another user, who may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A place that other users may look into, which pytest's own is not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_what_may_not_be_read_is_not_called_damaged(shared: Path) -> None:
    """Whoever restores for want of a permission loses what was there. A script tells by the exit code."""
    path = made(shared, "alone")
    assert checked(path) == 0
    for each in [path, *path.rglob("*")]:
        each.chmod(0o777 if each.is_dir() else 0o666)
    with as_nobody():
        assert checked(path) == 0
        assert opens(path)
    for name in [Path(), Path("wal"), Path("pages"), *files_of(path)]:
        mode = (path / name).stat().st_mode
        (path / name).chmod(0)
        with as_nobody():
            code = checked(path)
            assert code in (0, DeniedError.exit_code), name
            if code:
                with pytest.raises(NotReadable) as caught:
                    list(lowwater.check(path))
                assert caught.value.hint
                # Who opens it reads neither checkpoints nor all of the log.
                assert not opens(path) or name.parts[0] in ("checkpoints", "packs", "wal")
            else:
                assert opens(path), name
        (path / name).chmod(mode)
    assert checked(path) == 0
