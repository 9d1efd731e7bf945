"""engine/pages/compact.py and engine/seams/swap.py: the page file written again, whatever fails meanwhile."""

from __future__ import annotations

import itertools
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowwater
from lowwater.engine.pages import compact as compact_module
from lowwater.engine.pages.compact import compact, room_of
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.engine.seams.real import RealFile, RealFiles
from lowwater.engine.seams.swap import COMPACT, COMPACTING, REPLACED, finish_swap
from lowwater.errors import Corrupt, DirectoryLocked, DiskFull, LowwaterError, NotFound


class Crash(BaseException):
    """The process ended here."""


class Crashing(RealFiles):
    """Ends before one of the operations, the first of which has the number 1, and stays dead."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0

    def _count(self) -> None:
        self.count += 1
        if self.at is not None and self.count >= self.at:
            raise Crash

    def open(
        self, path: str, *, write: bool = False, create: bool = False, sequential: bool = False
    ) -> RealFile:
        if write:
            self._count()
        return super().open(path, write=write, create=create, sequential=sequential)

    def make_directory(self, directory: str) -> None:
        self._count()
        super().make_directory(directory)

    def rename(self, old: str, new: str) -> None:
        self._count()
        super().rename(old, new)

    def remove(self, path: str) -> None:
        self._count()
        super().remove(path)

    def sync_directory(self, directory: str) -> None:
        self._count()
        super().sync_directory(directory)


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A database whose page file is mostly free room."""
    path = str(tmp_path / "data")
    with lowwater.open(path) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"{number:05}", b"v" * 100) for number in range(5000)])
        db.flush()
        db.write([lowwater.Delete("b", f"{number:05}") for number in range(0, 5000, 2)])
    return path


def run(path: str, files: RealFiles | None = None) -> None:
    compact(files or RealFiles(), f"{path}/pages", f"{path}/wal", "a test")


def content(path: str) -> list[tuple[bytes, bytes, bytes]]:
    store = LmdbPages.open(path, read_only=True)
    try:
        return list(store.rows())
    finally:
        store.close()


def names(path: str) -> set[str]:
    return set(os.listdir(path))


def test_a_compact_file_holds_the_same(data: str) -> None:
    """Every table of it, and none of the room that was free."""
    before = content(f"{data}/pages")
    assert {table for table, _, _ in before} == {b"pages", b"meta"}
    size = os.path.getsize(f"{data}/pages/data.mdb")
    run(data)
    assert content(f"{data}/pages") == before
    assert os.path.getsize(f"{data}/pages/data.mdb") < size * 0.8
    assert names(data) == {"pages", "wal"}
    copied = LmdbPages.open(f"{data}/pages", read_only=True)
    assert copied.damage() == []
    copied.close()
    room = room_of(f"{data}/pages")
    assert room.size_bytes == room.used_bytes
    with lowwater.open(data) as db:
        db.put("b", "00000", b"and it can be written")
        assert list(db.check()) == []


def test_a_crash_at_any_operation_leaves_a_whole_store(data: str) -> None:
    """Before, between or after the renames: who opens it finds all, and nothing lies about."""
    before = content(f"{data}/pages")
    seen: set[frozenset[str]] = set()
    for at in itertools.count(1):
        files = Crashing(at)
        try:
            run(data, files)
        except Crash:
            pass
        else:
            break
        seen.add(frozenset(names(data) - {"wal"}))
        store = LmdbPages.open(f"{data}/pages")
        store.close()
        assert content(f"{data}/pages") == before, f"after a crash at operation {at}"
        assert names(data) == {"pages", "wal"}, f"after a crash at operation {at}"
    assert at > 8
    with lowwater.open(data) as db:
        assert list(db.check()) == []
    one = "pages"
    assert {frozenset({one}), frozenset({one, one + COMPACTING})} < seen
    assert frozenset({one + COMPACT, one + REPLACED}) in seen, "no crash came between the renames"


def test_a_crash_while_a_swap_is_finished_is_finished_too(data: str) -> None:
    """Machines crash again while they recover."""
    before = content(f"{data}/pages")
    for at in itertools.count(1):
        if not os.path.exists(f"{data}/pages{COMPACT}"):
            os.rename(f"{data}/pages", f"{data}/pages{COMPACT}")
        os.makedirs(f"{data}/pages{COMPACTING}", exist_ok=True)
        Path(data, f"pages{COMPACTING}", "data.mdb").write_bytes(b"half a copy")
        try:
            finish_swap(Crashing(at), f"{data}/pages")
        except Crash:
            finish_swap(RealFiles(), f"{data}/pages")
            assert content(f"{data}/pages") == before
            assert names(data) == {"pages", "wal"}
        else:
            break
    assert at > 2


def test_a_copy_is_dropped_where_the_pages_are_there(data: str) -> None:
    """They may have been written since: the copy is of the past."""
    os.makedirs(f"{data}/pages{COMPACT}")
    Path(data, f"pages{COMPACT}", "data.mdb").write_bytes(Path(data, "pages", "data.mdb").read_bytes())
    with lowwater.open(data) as db:
        db.put("b", "new", b"1")
    assert names(data) == {"pages", "wal"}
    with lowwater.open(data) as db:
        assert db.get("b", "new").value == b"1"


def test_looking_at_it_finishes_nothing(data: str) -> None:
    """A tool may look at evidence, or come between the renames of a compaction that is under way."""
    os.rename(f"{data}/pages", f"{data}/pages{COMPACT}")
    with pytest.raises(NotFound):
        LmdbPages.open(f"{data}/pages", read_only=True)
    assert names(data) == {f"pages{COMPACT}", "wal"}


def test_a_link_to_another_disk_stays_one(data: str, tmp_path: Path) -> None:
    """Pages are often kept elsewhere than the log."""
    (tmp_path / "disk").mkdir()
    os.rename(f"{data}/pages", tmp_path / "disk" / "elsewhere")
    os.symlink(tmp_path / "disk" / "elsewhere", f"{data}/pages")
    before = content(f"{data}/pages")
    run(data)
    assert os.path.islink(f"{data}/pages")
    assert names(str(tmp_path / "disk")) == {"elsewhere"}
    assert content(f"{data}/pages") == before
    os.rename(tmp_path / "disk" / "elsewhere", tmp_path / "disk" / f"elsewhere{COMPACT}")
    with lowwater.open(data) as db:
        assert db.redone <= 1
    assert content(f"{data}/pages") == before


def test_the_mode_of_the_files_stays(data: str) -> None:
    """A service must be able to open what an administrator compacted."""
    os.chmod(f"{data}/pages", 0o750)
    os.chmod(f"{data}/pages/data.mdb", 0o640)
    run(data)
    assert stat.S_IMODE(os.stat(f"{data}/pages").st_mode) == 0o750
    assert stat.S_IMODE(os.stat(f"{data}/pages/data.mdb").st_mode) == 0o640


@pytest.mark.root
def test_the_owner_of_the_files_stays(data: str) -> None:
    """The same for the user."""
    for name in ("", "/data.mdb"):
        os.chown(f"{data}/pages{name}", 4242, 4243)
    run(data)
    for name in ("", "/data.mdb"):
        found = os.stat(f"{data}/pages{name}")
        assert (found.st_uid, found.st_gid) == (4242, 4243)


def test_an_open_database_is_not_compacted(data: str) -> None:
    """In this process or in another one."""
    with lowwater.open(data), pytest.raises(DirectoryLocked) as caught:
        run(data)
    assert caught.value.hint
    script = (
        "import sys, lowwater; db = lowwater.open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, data]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(DirectoryLocked):
            run(data)
        other.communicate()
    run(data)


def test_a_tool_in_another_process_keeps_what_it_has_open(data: str) -> None:
    """Its map is of the file that was replaced; who opens the store afterwards has the new one."""
    before = content(f"{data}/pages")
    script = (
        "import sys; from lowwater.engine.pages.lmdb_store import LmdbPages\n"
        "store = LmdbPages.open(sys.argv[1], read_only=True)\n"
        "for line in sys.stdin: print(len(list(store.rows())), flush=True)"
    )
    command = [sys.executable, "-c", script, f"{data}/pages"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tool:
        assert tool.stdin is not None
        assert tool.stdout is not None

        def ask() -> int:
            assert tool.stdin is not None
            assert tool.stdout is not None
            tool.stdin.write("\n")
            tool.stdin.flush()
            return int(tool.stdout.readline())

        assert ask() == len(before)
        run(data)
        assert ask() == len(before)
        with lowwater.open(data) as db:
            db.put_many("b", [(f"more {number}", b"m" * 100) for number in range(3000)])
            db.flush()
            assert list(db.check()) == []
        assert ask() == len(before)
        tool.stdin.close()
    assert len(content(f"{data}/pages")) > len(before)


def test_a_damaged_file_is_not_copied(data: str) -> None:
    """LMDB would copy what it does not understand, or end the process."""
    path = Path(data, "pages", "data.mdb")
    held = path.read_bytes()
    path.write_bytes(held[:8192] + bytes(len(held) - 8192))
    with pytest.raises(LowwaterError):
        run(data)
    assert names(data) == {"pages", "wal"}
    assert path.read_bytes() == held[:8192] + bytes(len(held) - 8192)


def test_a_copy_that_differs_is_not_used(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may answer with something else than was written."""
    before = content(f"{data}/pages")

    def differs(store: LmdbPages) -> Iterator[tuple[bytes, bytes, bytes]]:
        yield from [(b"pages", b"k", store.path.encode())]

    monkeypatch.setattr(LmdbPages, "rows", differs)
    with pytest.raises(Corrupt, match="not what is there"):
        run(data)
    monkeypatch.undo()
    assert names(data) == {"pages", "wal"}
    assert content(f"{data}/pages") == before


def test_a_disk_without_room_for_the_copy_is_told_first(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a copy would fill the disk of whatever else runs there."""
    monkeypatch.setattr(compact_module, "MARGIN_BYTES", 2**62)
    with pytest.raises(DiskFull, match="the disk has") as caught:
        run(data)
    assert "nothing was changed" in caught.value.hint
    assert names(data) == {"pages", "wal"}


@pytest.mark.root
def test_a_disk_that_fills_up_leaves_the_pages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else writes to it too."""
    place = tmp_path / "mount"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", place]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    monkeypatch.setattr(compact_module, "MARGIN_BYTES", -(2**40))
    try:
        path = str(place / "data")
        config = {"wal": {"rotate_max_bytes": "1 MiB"}, "engine": {"disk_reserve_bytes": 0}}
        with lowwater.open(path, config=config) as db:
            db.create_bucket("b")
            db.put_many("b", [(f"{number:05}", b"v" * 100) for number in range(10_000)])
        before = content(f"{path}/pages")
        disk = os.statvfs(place)
        (place / "ballast").write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - 2**19)))
        with pytest.raises(LowwaterError) as caught:
            run(path)
        assert caught.value.hint
        assert names(path) == {"pages", "wal"}
        assert content(f"{path}/pages") == before
    finally:
        subprocess.run(["umount", place], check=True)
