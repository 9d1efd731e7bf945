"""The three implementations of Files behave alike, and the real one does what only it can do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lowwater.chaos.disk import FaultyFiles
from lowwater.engine.memory import MemoryFiles
from lowwater.engine.real import RealFiles
from lowwater.engine.seams import Files, SyncMode, write_all
from lowwater.engine.testing.files import FilesConformance, Place

LOCK_AND_WAIT = """
import sys
from lowwater.engine.real import RealFiles

lock = RealFiles().lock(sys.argv[1], "the other process")
print("locked", flush=True)
sys.stdin.read()
"""


class TestRealFiles(FilesConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return RealFiles(), str(tmp_path)


class TestMemoryFiles(FilesConformance):
    @pytest.fixture
    def place(self) -> Place:
        files = MemoryFiles()
        files.make_directory("log")
        return files, "log"


class TestFaultyFiles(FilesConformance):
    @pytest.fixture
    def place(self) -> Place:
        files = FaultyFiles()
        files.make_directory("log")
        return files, "log"


def test_a_lock_excludes_another_process_until_that_is_killed(tmp_path: Path) -> None:
    """A lock that outlives its process would need somebody to remove it by hand after each crash."""
    path = str(tmp_path / "lock")
    files = RealFiles()
    with subprocess.Popen(
        [sys.executable, "-c", LOCK_AND_WAIT, path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        with pytest.raises(BlockingIOError):
            files.lock(path, "me")
        assert files.open(path).read_at(0, 100) == b"the other process"
        child.kill()
        child.wait()
        files.lock(path, "me").close()
    assert files.open(path).read_at(0, 100) == b"me"


@pytest.mark.parametrize(
    ("mode", "calls"), [("fsync", ["fsync"]), ("fdatasync", ["fdatasync"]), ("none", [])]
)
def test_each_sync_mode_makes_the_call_that_it_is_named_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: SyncMode, calls: list[str]
) -> None:
    """Nothing else would show a missing sync before the power fails."""
    file = RealFiles().open(str(tmp_path / "a"), create=True)
    made: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: made.append("fsync"))
    monkeypatch.setattr(os, "fdatasync", lambda fd: made.append("fdatasync"))
    file.sync(mode)
    file.close()
    assert made == calls


def test_making_a_directory_syncs_every_parent_that_got_a_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power loss takes a whole log whose files were all synced. The first that is there already may
    have been made a moment ago by somebody who crashed before it was durable."""
    synced: list[str] = []
    monkeypatch.setattr(RealFiles, "sync_directory", lambda self, directory: synced.append(directory))
    RealFiles().make_directory(str(tmp_path / "a" / "b"))
    assert synced == [str(tmp_path.parent), str(tmp_path), str(tmp_path / "a")]


@pytest.mark.parametrize("implementation", [RealFiles, MemoryFiles, FaultyFiles])
def test_a_file_can_grow_while_other_threads_read_it(
    tmp_path: Path, implementation: type[RealFiles] | type[MemoryFiles] | type[FaultyFiles]
) -> None:
    """The writer appends while readers follow it. They may see some first part of a write, nothing else."""
    files: Files = implementation()
    files.make_directory(str(tmp_path))
    path = str(tmp_path / "a")
    writer = files.open(path, create=True)
    done = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        reader = files.open(path)
        try:
            while not done.is_set():
                near_the_end = max(0, reader.size() // 10 * 10 - 20)
                data = reader.read_at(near_the_end, 1000)
                if not (b"0123456789" * (len(data) // 10 + 1)).startswith(data):
                    wrong.append(data)
        except (OSError, BufferError) as error:
            wrong.append(error)
        reader.close()

    readers = [threading.Thread(target=read) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in readers:
            thread.start()
        for number in range(10_000):
            write_all(writer, number * 10, [b"01234", b"56789"])
    finally:
        done.set()
        for thread in readers:
            thread.join()
        sys.setswitchinterval(interval)
    writer.close()
    assert wrong == []
