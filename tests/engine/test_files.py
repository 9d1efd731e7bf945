"""The three implementations of Files behave alike, and the real one does what only it can do."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from lowwater.chaos.disk import FaultyFiles
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.seams.real import BLOCK_BYTES, STAGING_BYTES, RealFile, RealFiles, SequentialFile
from lowwater.engine.seams.seams import Files, SyncMode, write_all
from lowwater.engine.testing.files import FilesConformance, Place

LOCK_AND_WAIT = """
import sys
from lowwater.engine.seams.real import RealFiles

lock = RealFiles().lock(sys.argv[1], "the other process")
print("locked", flush=True)
sys.stdin.read()
"""


class TestRealFiles(FilesConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return RealFiles(), str(tmp_path)


class TrimmedFile(SequentialFile):
    """One that takes back the zeros behind a write: `sequential` allows them, the suite does not."""

    __slots__ = ()

    def write_at(self, offset: int, buffers: Sequence[bytes], sync: SyncMode = "none") -> int:
        size = self.size()
        count = super().write_at(offset, buffers, sync)
        if count:
            os.ftruncate(self._fd, max(size, offset + count))
        return count

    def write_each(self, offset: int, parts: Sequence[bytes], sync: SyncMode) -> None:
        size = self.size()
        super().write_each(offset, parts, sync)
        if parts:
            os.ftruncate(self._fd, max(size, offset + sum(map(len, parts))))


class TrimmedFiles(RealFiles):
    def open(
        self, path: str, *, write: bool = False, create: bool = False, sequential: bool = False
    ) -> RealFile:
        file = super().open(path, write=write, create=create, sequential=True)
        if isinstance(file, SequentialFile):
            file.__class__ = TrimmedFile
        return file


class TestSequentialFiles(FilesConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return TrimmedFiles(), str(tmp_path)

    def test_a_write_lands_at_its_offset_and_nowhere_else(self, place: Place) -> None:
        """Of a sequential file this holds where nothing but zeros follows."""
        files, directory = place
        file = files.open(f"{directory}/a", create=True)
        file.write_at(0, [b"012", bytes(7)])
        assert file.write_at(3, [b"ab", b"", b"c"]) == 3
        assert file.read_at(0, 100) == b"012abc" + bytes(4)
        assert file.size() == 10

    def test_rename_replaces_and_open_handles_go_on(self, place: Place) -> None:
        """The same, where each write begins at the end of the one before it."""
        files, directory = place
        old = files.open(f"{directory}/old", create=True)
        new = files.open(f"{directory}/new", create=True)
        old.write_at(0, [b"from old"])
        new.write_at(0, [b"from new"])
        files.rename(f"{directory}/old", f"{directory}/new")
        assert new.read_at(0, 10) == b"from new"
        old.write_at(8, [b" on"])
        assert files.open(f"{directory}/new").read_at(0, 20) == b"from old on"


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


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("faults", ["none", "short", "einval", "enospc"])
def test_a_sequential_file_holds_what_a_plain_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: str, seed: int
) -> None:
    """However its writes fall on blocks, are cut short or refused: what it holds, and zeros behind that."""
    rng = random.Random(f"{faults} {seed}")
    pwritev = os.pwritev

    def faulty(fd: int, buffers: Sequence[bytes], offset: int, flags: int = 0) -> int:
        if faults == "einval" and len(buffers) == 1 and isinstance(buffers[0], memoryview):
            raise OSError(errno.EINVAL, "no direct writes here")
        if faults == "enospc" and rng.random() < 0.2:
            raise OSError(errno.ENOSPC, "no room")
        if faults == "short" and rng.random() < 0.5:
            data = b"".join(buffers)
            aligned = isinstance(buffers[0], memoryview)
            count = len(data) // 2 // 512 * 512 if aligned else -(-len(data) // 2)
            # A direct write needs aligned memory: an aligned part of the same.
            if count:
                return pwritev(fd, [memoryview(buffers[0])[:count]] if aligned else [data[:count]], offset)
        return pwritev(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "pwritev", faulty)
    files, path = RealFiles(), str(tmp_path / "a")
    file = files.open(path, create=True, sequential=True)
    reader = files.open(path)
    held = bytearray()
    zeroed = 0
    most = STAGING_BYTES - 2 * BLOCK_BYTES
    for _ in range(30):
        action = rng.random()
        if action < 0.75:
            sizes = (0, 1, rng.randrange(600), rng.randrange(9000), BLOCK_BYTES, most + rng.randrange(-1, 2))
            data = rng.randbytes(rng.choices(sizes, (1, 1, 5, 5, 2, 1))[0])
            middle = rng.randrange(len(data) + 1)
            modes: list[SyncMode] = ["none", "fdatasync", "fsync"]
            try:
                parts = [data[:middle], data[middle:]]
                if rng.random() < 0.3:
                    file.write_each(len(held), parts, rng.choice(modes))
                else:
                    write_all(file, len(held), parts, rng.choice(modes))
                held += data
            except OSError:
                file.truncate(len(held))
        elif action < 0.85 and faults != "enospc":
            start = max(zeroed, len(held))
            zeroed = start + rng.randrange(1, 20_000)
            write_all(file, start, [bytes(zeroed - start)])
        elif action < 0.95:
            file.close()
            file = files.open(path, write=True, sequential=True)
        else:
            del held[rng.randrange(len(held) + 1) :]
            file.truncate(len(held))
            zeroed = 0
        for reads in (file, reader):
            found = reads.read_at(0, reads.size())
            assert found[: len(held)] == held
            assert not any(found[len(held) :])
    file.close()


@pytest.mark.slow
def test_readers_see_what_went_past_the_page_cache(tmp_path: Path) -> None:
    """What is durable is read through the cache, while the next write replaces its last block."""
    files, path = RealFiles(), str(tmp_path / "a")
    writer = files.open(path, create=True, sequential=True)
    durable_bytes = 0
    wrong: list[object] = []

    def read() -> None:
        reader = files.open(path)
        while durable_bytes < 400_000 and not wrong:
            end = durable_bytes
            start = max(0, end // 10 * 10 - 9000)
            data = reader.read_at(start, end - start)
            if data != (b"0123456789" * 1000)[: end - start]:
                wrong.append((start, end, data))
        reader.close()

    thread = threading.Thread(target=read)
    thread.start()
    while durable_bytes < 400_000:
        write_all(writer, durable_bytes, [b"0123456789" * 37], "fdatasync")
        durable_bytes += 370
    thread.join()
    writer.close()
    assert wrong == []
