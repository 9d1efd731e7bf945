"""Several writes in one call: whatever becomes of one, the file holds what the plain way would have."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lowwater.engine.entries import Put
from lowwater.engine.log import Log, Seams
from lowwater.engine.real import RealFile, RealFiles, SequentialFile
from lowwater.engine.seams import write_all
from lowwater.engine.uring import Ring

Write = Callable[[Ring, int, Sequence[tuple[int, int, int]], int], list[int]]


def open_file(path: Path, *, create: bool = True) -> SequentialFile:
    file = RealFiles().open(str(path), create=create, write=True, sequential=True)
    if not isinstance(file, SequentialFile):
        pytest.skip("no direct writes on this file system")
    return file


def links(file: SequentialFile) -> bool:
    return isinstance(file._ring, Ring)


@pytest.fixture
def ringed(tmp_path: Path) -> SequentialFile:
    """A file that has a ring, with a byte in it."""
    file = open_file(tmp_path / "a")
    file.write_each(0, [b"!"], "fdatasync")
    if not links(file):
        pytest.skip("no io_uring here")
    return file


def parts_of(rng: random.Random, count: int = 12, most: int = 30_000) -> list[bytes]:
    return [rng.randbytes(rng.randint(1, most)) for _ in range(count)]


def content(path: Path) -> bytes:
    return path.read_bytes().rstrip(b"\0")


# ---------------------------------------------------------------------------- what goes wrong with a request


def failing(code: int, at: int, write: Write = Ring.write) -> Write:
    """The kernel refuses the request with this number, and cancels those behind it."""

    def faulty(ring: Ring, address: int, writes: Sequence[tuple[int, int, int]], flags: int) -> list[int]:
        good = write(ring, address, writes[:at], flags) if writes[:at] else []
        if len(writes) <= at:
            return good
        return [*good, -code, *[-errno.ECANCELED] * (len(writes) - at - 1)]

    return faulty


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_error_is_raised_and_nothing_is_written_behind_it(
    ringed: SequentialFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, at: int
) -> None:
    """Whoever counts on a batch counts on all before it: a gap would be one that nobody sees."""
    parts = [b"%02d" % number * 3000 for number in range(10)]
    monkeypatch.setattr(Ring, "write", failing(code, at))
    with pytest.raises(OSError, match="Errno") as caught:
        ringed.write_each(1, parts, "fdatasync")
    assert caught.value.errno == code
    assert content(tmp_path / "a") == b"!" + b"".join(parts[:at])
    ringed.close()


@pytest.mark.parametrize(
    "code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EAGAIN, errno.EINTR, errno.ECANCELED]
)
@pytest.mark.parametrize("at", [0, 1, 5])
def test_what_the_ring_cannot_do_goes_the_plain_way(
    ringed: SequentialFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, at: int
) -> None:
    """An old file system, a request that was never begun: no error, the same bytes."""
    parts = parts_of(random.Random(at))
    monkeypatch.setattr(Ring, "write", failing(code, at))
    ringed.write_each(1, parts, "fsync")
    ringed.write_each(1 + sum(map(len, parts)), parts, "fsync")
    assert content(tmp_path / "a") == b"!" + b"".join(parts) * 2
    ringed.close()


@pytest.mark.parametrize("seed", range(20))
def test_short_writes_are_finished(
    ringed: SequentialFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A request that took a part of its bytes: the chain ends there, and goes on behind it."""
    rng = random.Random(seed)
    write: Write = Ring.write

    def short(ring: Ring, address: int, writes: Sequence[tuple[int, int, int]], flags: int) -> list[int]:
        at = rng.randrange(len(writes) + 1)
        if at == len(writes):
            return write(ring, address, writes, flags)
        place, size, offset = writes[at]
        taken = rng.randrange(0, size, 512)
        cut = [*writes[:at], (place, taken, offset)] if taken else writes[:at]
        results = write(ring, address, cut, flags) if cut else []
        return [*results, 0, *[-errno.ECANCELED] * len(writes)][: len(writes)]

    monkeypatch.setattr(Ring, "write", short)
    held = b"!"
    for _ in range(10):
        parts = parts_of(rng, rng.randint(1, 20), 9000)
        ringed.write_each(len(held), parts, "fdatasync")
        held += b"".join(parts)
        assert content(tmp_path / "a") == held.rstrip(b"\0")
    ringed.close()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.ENOMEM, errno.EMFILE])
def test_without_a_ring_the_bytes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """An old kernel, a container that forbids it, a limit that is reached."""

    def refuse(ring: Ring, number: int, *arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Ring, "_call", refuse)
    file = open_file(tmp_path / "a")
    parts = parts_of(random.Random(code), 40)
    file.write_each(0, parts, "fdatasync")
    assert not links(file)
    file.close()
    assert content(tmp_path / "a") == b"".join(parts)


def test_requests_that_the_kernel_did_not_take_are_written_all_the_same(
    ringed: SequentialFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short of memory it takes the first of them, which are a chain of their own."""
    call = Ring._call
    taken: list[int] = []

    def fewer(ring: Ring, number: int, *arguments: object) -> int:
        fd, submitting, waiting, *others = arguments
        assert isinstance(submitting, int)
        if submitting > 2:
            taken.append(submitting)
            if len(taken) == 2:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            submitting, waiting = 2, 0
        return call(ring, number, fd, submitting, waiting, *others)

    monkeypatch.setattr(Ring, "_call", fewer)
    parts = parts_of(random.Random(1), 10)
    ringed.write_each(1, parts, "fdatasync")
    assert content(tmp_path / "a") == b"!" + b"".join(parts)
    assert len(taken) == 2
    ringed.close()


# ---------------------------------------------------------------------------- real limits


TOO_LARGE = """
import errno, resource, sys
from lowwater.engine.real import RealFiles

file = RealFiles().open(sys.argv[1], create=True, sequential=True)
file.write_each(0, [b"a" * 10_000], "fdatasync")
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    file.write_each(10_000, [bytes([98 + number]) * 10_000 for number in range(9)], "fdatasync")
except OSError as error:
    print(errno.errorcode[error.errno], bool(file._ring), flush=True)
"""


def test_a_limit_of_the_size_ends_a_run_of_writes_in_its_middle(tmp_path: Path) -> None:
    """What comes before it is whole, and nothing comes after it."""
    outcome = subprocess.run(
        [sys.executable, "-c", TOO_LARGE, str(tmp_path / "a")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert outcome.stdout.split()[0] == "EFBIG"
    written = content(tmp_path / "a")
    expected = b"".join(bytes([97 + number]) * 10_000 for number in range(10))
    assert 40_000 <= len(written) <= 50_000
    assert expected.startswith(written)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[Path, int], Path]]:
    """Makes file systems in files."""
    mounted: list[Path] = []

    def make(image: Path, mebibytes: int) -> Path:
        with image.open("wb") as file:
            for _ in range(mebibytes):
                file.write(bytes(2**20))
        place = tmp_path / f"mounted {len(mounted)}"
        place.mkdir()
        for command in (["mkfs.ext4", "-qF", image], ["mount", "-o", "loop", image, place]):
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("mounting is not allowed here")
        mounted.append(place)
        return place

    yield make
    for place in reversed(mounted):
        subprocess.run(["umount", place], check=True)


@pytest.mark.root
def test_a_full_disk_ends_a_run_of_writes_in_its_middle(
    tmp_path: Path, mount: Callable[[Path, int], Path]
) -> None:
    """The same for a disk: what was written before it is there, and nothing behind it."""
    place = mount(tmp_path / "image", 8)
    file = open_file(place / "a")
    parts = parts_of(random.Random(3), 400, 60_000)
    with pytest.raises(OSError, match="Errno") as caught:
        file.write_each(0, parts, "fdatasync")
    assert caught.value.errno == errno.ENOSPC
    file.close()
    written = content(place / "a")
    assert len(written) > 2**20
    assert b"".join(parts).startswith(written)


WRITE_AND_TELL = """
import sys
from lowwater.engine.real import RealFiles

files = RealFiles()
lock = files.lock(sys.argv[1] + "/lock", "the writer")
file = files.open(sys.argv[1] + "/a", write=True, sequential=True)
file.write_each(0, [b"0"], "fdatasync")
print(bool(file._ring), flush=True)
sys.stdin.readline()
file.write_each(1, [b"1" * 9_000, b"2" * 9_000, b"3" * 9_000], "fdatasync")
"""


@pytest.mark.root
def test_who_takes_over_from_a_killed_process_waits_for_its_write(
    tmp_path: Path, mount: Callable[[Path, int], Path]
) -> None:
    """The kernel ends the process, and with it its lock, while a request is under way: it would land on what
    the next process has written."""
    below = mount(tmp_path / "image", 40)
    place = mount(below / "image", 20)
    path = place / "a"
    path.write_bytes(bytes(2**20))
    subprocess.run(["sync", "-f", place, below], check=True)
    files = RealFiles()
    settled = threading.Event()

    def settle() -> None:
        files.settle(str(path))
        settled.set()

    with subprocess.Popen(
        [sys.executable, "-c", WRITE_AND_TELL, str(place)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        if writer.stdout.readline() != "True\n":
            writer.kill()
            pytest.skip("no io_uring here")
        subprocess.run(["sync", "-f", place, below], check=True)
        subprocess.run(["fsfreeze", "-f", below], check=True)
        waiting = threading.Thread(target=settle)
        try:
            writer.stdin.write("\n")
            writer.stdin.flush()
            while "io_uring" not in Path(f"/proc/{writer.pid}/wchan").read_text() + _wait_of(writer.pid):
                assert writer.poll() is None
            writer.kill()
            writer.wait()
            waiting.start()
            free = files.lock(str(place / "lock"), "the next")
            free.close()
            assert not settled.wait(0.5), "it did not wait"
        finally:
            subprocess.run(["fsfreeze", "-u", below], check=True)
        waiting.join()
    assert content(path) == b"0" + b"1" * 9_000


def _wait_of(pid: int) -> str:
    """What a process waits for in the kernel."""
    number = Path(f"/proc/{pid}/syscall").read_text().split()[0]
    return "io_uring" if number == "426" else ""


class Recording(RealFiles):
    """What was done with which file, in this order."""

    def __init__(self, interrupted: bool) -> None:
        self.interrupted = interrupted
        self.calls: list[tuple[str, str]] = []

    def lock(self, path: str, owner: str) -> RealFile:
        self.calls.append(("lock", os.path.basename(path)))
        return super().lock(path, owner)

    def settle(self, path: str) -> None:
        self.calls.append(("settle", os.path.basename(path)))
        if self.interrupted:
            raise KeyboardInterrupt
        super().settle(path)

    def open(
        self, path: str, *, write: bool = False, create: bool = False, sequential: bool = False
    ) -> RealFile:
        self.calls.append(("open", os.path.basename(path)))
        return super().open(path, write=write, create=create, sequential=sequential)


def test_opening_a_log_waits_between_the_lock_and_the_first_look(tmp_path: Path) -> None:
    """Earlier another process may begin writes, later they would be missed. Ctrl-C ends the wait, and leaves
    no lock."""
    with Log.open(str(tmp_path / "log")) as log:
        log.append(Put("b", "k", b"v"))
    for interrupted in (True, False):
        files = Recording(interrupted)
        try:
            Log.open(str(tmp_path / "log"), seams=Seams(files=files)).close()
        except KeyboardInterrupt:
            assert interrupted
        assert files.calls[:2] == [("lock", "lock"), ("settle", "current.log")]
        assert (len(files.calls) == 2) == interrupted


# ---------------------------------------------------------------------------- signals


class Interrupting:
    """Signals at short intervals while it is entered."""

    def __init__(self, handler: Callable[[int, object], None]) -> None:
        self.handler = handler

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGALRM, self.handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


def test_signals_disturb_no_write(ringed: SequentialFile, tmp_path: Path) -> None:
    """They end the wait for a completion, not the request."""
    seen: list[int] = []
    rng = random.Random(2)
    held = b"!"
    with Interrupting(lambda number, _: seen.append(number)):
        while len(seen) < 200:
            parts = parts_of(rng, 16, 9000)
            ringed.write_each(len(held), parts, "fdatasync")
            held += b"".join(parts)
            if len(held) > 4_000_000:
                ringed.truncate(1)
                held = b"!"
    assert links(ringed)
    ringed.close()
    assert content(tmp_path / "a") == held.rstrip(b"\0")


class LeftError(Exception):
    pass


def test_an_exception_out_of_a_signal_handler_leaves_a_file_that_can_be_written(
    ringed: SequentialFile, tmp_path: Path
) -> None:
    """As Ctrl-C does in the main thread: a request that is still under way must not meet the buffer's next
    use, nor outlive the file."""
    rng = random.Random(4)
    held = b"!"
    left = 0
    armed = False

    def leave(number: int, frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise LeftError

    with Interrupting(leave):
        for round_number in range(400):
            parts = parts_of(rng, 16, 9000)
            try:
                armed = True
                ringed.write_each(len(held), parts, "fdatasync")
                armed = False
            except LeftError:
                left += 1
                # What was being written may be there; what is written now must be.
                if round_number % 2:
                    write_all(ringed, len(held), [b"".join(parts)], "fdatasync")
                else:
                    ringed.write_each(len(held), parts, "fdatasync")
            held += b"".join(parts)
            assert ringed.read_at(0, len(held)) == held
            if len(held) > 2_000_000:
                ringed.truncate(1)
                held = b"!"
    assert left > 20
    ringed.close()
    assert content(tmp_path / "a") == held.rstrip(b"\0")


# ---------------------------------------------------------------------------- what a process has


def _anonymous_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_nothing_stays_of_files_that_were_closed(ringed: SequentialFile, tmp_path: Path) -> None:
    """A log opens one for each of its segments, for years."""

    def cycle(count: int) -> None:
        for _ in range(count):
            file = open_file(tmp_path / "b", create=False)
            file.write_each(0, [b"x" * 5000] * 5, "fdatasync")
            assert links(file)
            file.close()
            file.close()

    open_file(tmp_path / "b").close()
    cycle(50)
    fds, maps, memory = len(os.listdir("/proc/self/fd")), _ring_maps(), _anonymous_kib()
    cycle(300)
    assert len(os.listdir("/proc/self/fd")) == fds
    assert _ring_maps() == maps
    assert _anonymous_kib() < memory + 4096, "of 300 buffers of a MiB, some are left"
    ringed.close()
    assert _ring_maps() == maps - 2


def _ring_maps() -> int:
    return Path("/proc/self/maps").read_text().count("[io_uring]")


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_forked_child_neither_writes_nor_keeps_what_its_parent_has(
    ringed: SequentialFile, tmp_path: Path
) -> None:
    """Its copy of the lock would outlive the parent, and hold up for ever who comes after that."""
    told, tell = os.pipe()
    go, let_go = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        os.close(let_go)
        try:
            ringed.write_each(1, [b"child"], "fdatasync")
        except OSError:
            os.write(tell, b"refused")
        os.write(tell, b"!")
        os.read(go, 1)
        os._exit(0)
    os.close(tell)
    with os.fdopen(told, "rb") as answers:
        heard = answers.read(1)
        ringed.write_each(1, [b"par", b"ent"], "fdatasync")
        assert _is_locked(tmp_path / "a")
        ringed.close()
        assert not _is_locked(tmp_path / "a")
        os.close(let_go)
        heard += answers.read()
    os.waitpid(pid, 0)
    os.close(go)
    assert heard == b"refused!"
    assert content(tmp_path / "a") == b"!parent"


def test_a_run_is_longer_than_a_ring(ringed: SequentialFile, tmp_path: Path) -> None:
    """And its numbers go round: the counters of both queues are of 32 bits."""
    parts = [b"%05d" % number for number in range(3 * Ring.writes_max + 1)]
    ringed.write_each(1, parts, "fdatasync")
    assert content(tmp_path / "a") == b"!" + b"".join(parts)
    ringed.close()
