"""Several writes in one call: whatever becomes of one, the file holds what the plain way would have."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lowwater.engine.seams import posix_aio
from lowwater.engine.seams.posix_aio import WRITES_MAX, Requests
from lowwater.engine.seams.real import RealFiles, SequentialFile
from lowwater.engine.seams.seams import write_all

Writes = Sequence[tuple[int, int, int]]
Write = Callable[[Requests, int, Writes], list[int]]


def open_file(path: Path, *, create: bool = True) -> SequentialFile:
    file = RealFiles().open(str(path), create=create, write=True, sequential=True)
    if not isinstance(file, SequentialFile):
        pytest.skip("no direct writes on this file system")
    return file


def asks(file: SequentialFile) -> bool:
    """Whether several writes go to the C library in one call."""
    return file._requests is not None


@pytest.fixture
def asking(tmp_path: Path) -> SequentialFile:
    """A file that has written several parts in one call, with a byte in it."""
    file = open_file(tmp_path / "a")
    file.write_each(0, [b"!"], "fdatasync")
    if not asks(file):
        pytest.skip("not with this C library")
    return file


def parts_of(rng: random.Random, count: int = 12, most: int = 30_000) -> list[bytes]:
    return [rng.randbytes(rng.randint(1, most)) for _ in range(count)]


def content(path: Path) -> bytes:
    return path.read_bytes().rstrip(b"\0")


# ---------------------------------------------------------------------------- what goes wrong with a request


def failing(code: int, at: int, write: Write = Requests.write) -> Write:
    """One request is refused with this number; those behind it are written."""

    def faulty(requests: Requests, address: int, writes: Writes) -> list[int]:
        good = [*writes[:at], *writes[at + 1 :]]
        results = write(requests, address, good) if good else []
        return [*results[:at], -code, *results[at:]] if at < len(writes) else results

    return faulty


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_error_is_raised_and_what_comes_before_it_is_there(
    asking: SequentialFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, at: int
) -> None:
    """Nobody is told of any of them. What lies behind it is for recovery, which cuts it off."""
    parts = [b"%02d" % number * 3000 for number in range(10)]
    monkeypatch.setattr(Requests, "write", failing(code, at))
    with pytest.raises(OSError, match="Errno") as caught:
        asking.write_each(1, parts, "fdatasync")
    assert caught.value.errno == code
    assert content(tmp_path / "a").startswith(b"!" + b"".join(parts[:at]))
    asking.close()


@pytest.mark.parametrize(
    "code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EAGAIN, errno.EINTR, errno.ECANCELED]
)
@pytest.mark.parametrize("at", [0, 1, 5])
def test_what_the_library_cannot_do_goes_the_plain_way(
    asking: SequentialFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, at: int
) -> None:
    """An old file system, a request that was never begun: no error, the same bytes."""
    parts = parts_of(random.Random(at))
    monkeypatch.setattr(Requests, "write", failing(code, at))
    asking.write_each(1, parts, "fsync")
    asking.write_each(1 + sum(map(len, parts)), parts, "fsync")
    assert content(tmp_path / "a") == b"!" + b"".join(parts) * 2
    asking.close()


@pytest.mark.parametrize("seed", range(20))
def test_short_writes_are_finished(
    asking: SequentialFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A request that took a part of its bytes, where those behind it were written or were not."""
    rng = random.Random(seed)
    write: Write = Requests.write

    def short(requests: Requests, address: int, writes: Writes) -> list[int]:
        at = rng.randrange(len(writes) + 1)
        if at == len(writes):
            return write(requests, address, writes)
        place, size, offset = writes[at]
        taken = rng.randrange(0, size, 512) // 4096 * 4096
        behind = list(writes[at + 1 :]) if rng.random() < 0.5 else []
        cut = [*writes[:at], *([(place, taken, offset)] if taken else []), *behind]
        if cut:
            write(requests, address, cut)
        rest = [size for _, size, _ in behind] or [-errno.ECANCELED] * (len(writes) - at - 1)
        return [*(size for _, size, _ in writes[:at]), taken, *rest]

    monkeypatch.setattr(Requests, "write", short)
    held = b"!"
    for _ in range(10):
        parts = parts_of(rng, rng.randint(1, 20), 9000)
        asking.write_each(len(held), parts, "fdatasync")
        held += b"".join(parts)
        assert content(tmp_path / "a") == held.rstrip(b"\0")
    asking.close()


def test_without_the_library_the_bytes_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another C library, or a process that was forked from one that has used it."""

    def refuse() -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(posix_aio, "_library", refuse)
    file = open_file(tmp_path / "a")
    parts = parts_of(random.Random(1), 40)
    file.write_each(0, parts, "fdatasync")
    assert not asks(file)
    file.close()
    assert content(tmp_path / "a") == b"".join(parts)


@pytest.mark.parametrize(
    "answer", ["", None, "another 1.2", OSError(errno.EINVAL, "no"), ValueError("what?")]
)
def test_another_library_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | Exception | None
) -> None:
    """musl has the function, with the same structure, and its headers have the name of the question. A thread
    for each request writes there: zeros behind one batch would fall on the beginning of the next."""

    def confstr(_: str) -> str | None:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(os, "confstr", confstr)
    file = open_file(tmp_path / "a")
    parts = parts_of(random.Random(1))
    file.write_each(0, parts, "fdatasync")
    assert not asks(file)
    file.close()
    assert content(tmp_path / "a") == b"".join(parts).rstrip(b"\0")


def test_no_memory_goes_before_the_library_has_let_go_of_it(
    asking: SequentialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread looks at a request again after it has written what became of it, with a lock held: who has
    seen that at the first look gets that lock once."""
    requests = asking._requests
    assert requests is not None
    begin, suspend = requests._begin, requests._suspend
    calls: list[str] = []

    def begin_and_end(mode: int, pointers: object, count: int, event: object) -> int:
        begin(mode, pointers, count, event)
        while any(requests._outcome(index)[0] == errno.EINPROGRESS for index in range(count)):
            time.sleep(0.001)
        calls.append("ended")
        return 0

    def count(*arguments: object) -> int:
        calls.append("locked")
        result: int = suspend(*arguments)
        return result

    monkeypatch.setattr(requests, "_begin", begin_and_end)
    monkeypatch.setattr(requests, "_suspend", count)
    asking.write_each(1, [b"a" * 9000, b"b" * 9000], "fdatasync")
    assert calls == ["ended", "locked"]
    asking.close()
    assert calls == ["ended", "locked"], "nothing was begun since"


def test_requests_that_the_library_did_not_take_are_written_all_the_same(
    asking: SequentialFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short of memory or of threads it takes the first of them, or none."""
    assert asking._requests is not None
    begin = asking._requests._begin
    taken = iter([2, 0])

    def fewer(mode: int, requests: object, count: int, event: object) -> int:
        count = next(taken)
        if count:
            begin(mode, requests, count, event)
        return -1

    monkeypatch.setattr(asking._requests, "_begin", fewer)
    parts = parts_of(random.Random(1), 10)
    asking.write_each(1, parts, "fdatasync")
    assert content(tmp_path / "a") == b"!" + b"".join(parts)
    assert next(taken, None) is None
    asking.close()


# ---------------------------------------------------------------------------- real limits


TOO_LARGE = """
import errno, resource, sys
from lowwater.engine.seams.real import RealFiles

file = RealFiles().open(sys.argv[1], create=True, sequential=True)
file.write_each(0, [b"a" * 10_000], "fdatasync")
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    file.write_each(10_000, [bytes([98 + number]) * 10_000 for number in range(9)], "fdatasync")
except OSError as error:
    print(errno.errorcode[error.errno], file._requests is not None, flush=True)
"""


def test_a_limit_of_the_size_ends_a_run_of_writes_in_its_middle(tmp_path: Path) -> None:
    """What comes before it is whole."""
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
    """The same for a disk: what comes before is there. Smaller parts behind it may have found room."""
    place = mount(tmp_path / "image", 8)
    file = open_file(place / "a")
    parts = parts_of(random.Random(3), 400, 60_000)
    with pytest.raises(OSError, match="Errno") as caught:
        file.write_each(0, parts, "fdatasync")
    assert caught.value.errno == errno.ENOSPC
    file.close()
    written = content(place / "a")
    whole = 0
    while written.startswith(parts[whole], at := sum(map(len, parts[:whole]))):
        whole += 1
    assert at > 2**20
    assert len(written) <= at + sum(map(len, parts[whole : whole + WRITES_MAX]))


WRITE_AND_TELL = """
import sys
from lowwater.engine.seams.real import RealFiles

files = RealFiles()
lock = files.lock(sys.argv[1] + "/lock", "the writer")
file = files.open(sys.argv[1] + "/a", write=True, sequential=True)
file.write_each(0, [b"0"], "fdatasync")
print(file._requests is not None, flush=True)
sys.stdin.readline()
file.write_each(1, [b"1" * 9_000, b"2" * 9_000, b"3" * 9_000], "fdatasync")
"""


@pytest.mark.root
def test_who_takes_over_from_a_killed_process_waits_for_its_write(
    tmp_path: Path, mount: Callable[[Path, int], Path]
) -> None:
    """Else a request that is still under way lands on what the next process has written: its thread has the
    process's files, and with them the lock, for as long as the write takes."""
    below = mount(tmp_path / "image", 40)
    place = mount(below / "image", 20)
    path = place / "a"
    path.write_bytes(bytes(2**20))
    subprocess.run(["sync", "-f", place, below], check=True)
    files = RealFiles()
    taken_over = threading.Event()

    def take_over() -> None:
        while not taken_over.is_set():
            with contextlib.suppress(BlockingIOError):
                files.lock(str(place / "lock"), "the next").close()
                taken_over.set()
            time.sleep(0.01)

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
            pytest.skip("not with this C library")
        subprocess.run(["sync", "-f", place, below], check=True)
        subprocess.run(["fsfreeze", "-f", below], check=True)
        waiting = threading.Thread(target=take_over)
        try:
            writer.stdin.write("\n")
            writer.stdin.flush()
            while not _is_writing(writer.pid):
                assert writer.poll() is None
            writer.kill()
            waiting.start()
            assert not taken_over.wait(0.5), "it did not wait"
        finally:
            subprocess.run(["fsfreeze", "-u", below], check=True)
        waiting.join()
    assert content(path) == b"0" + b"1" * 9_000


def _is_writing(pid: int) -> bool:
    """Whether a thread of it waits for the disk."""
    for status in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if status.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False


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


def test_signals_disturb_no_write(asking: SequentialFile, tmp_path: Path) -> None:
    """They end the wait for a completion, not the request."""
    seen: list[int] = []
    rng = random.Random(2)
    held = b"!"
    with Interrupting(lambda number, _: seen.append(number)):
        while len(seen) < 200:
            parts = parts_of(rng, 16, 9000)
            asking.write_each(len(held), parts, "fdatasync")
            held += b"".join(parts)
            if len(held) > 4_000_000:
                asking.truncate(1)
                held = b"!"
    assert asks(asking)
    asking.close()
    assert content(tmp_path / "a") == held.rstrip(b"\0")


class LeftError(Exception):
    pass


@pytest.mark.long
def test_an_exception_out_of_a_signal_handler_leaves_a_file_that_can_be_written(
    asking: SequentialFile, tmp_path: Path
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
                asking.write_each(len(held), parts, "fdatasync")
                armed = False
            except LeftError:
                left += 1
                # What was being written may be there; what is written now must be.
                if round_number % 2:
                    write_all(asking, len(held), [b"".join(parts)], "fdatasync")
                else:
                    asking.write_each(len(held), parts, "fdatasync")
            held += b"".join(parts)
            assert asking.read_at(0, len(held)) == held
            if len(held) > 2_000_000:
                asking.truncate(1)
                held = b"!"
    assert left > 20
    asking.close()
    assert content(tmp_path / "a") == held.rstrip(b"\0")


# ---------------------------------------------------------------------------- what a process has


def _anonymous_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_nothing_stays_of_files_that_were_closed(asking: SequentialFile, tmp_path: Path) -> None:
    """A log opens one for each of its segments, for years."""

    def cycle(count: int) -> None:
        for _ in range(count):
            file = open_file(tmp_path / "b", create=False)
            file.write_each(0, [b"x" * 5000] * 5, "fdatasync")
            assert asks(file)
            file.close()
            file.close()

    open_file(tmp_path / "b").close()
    cycle(50)
    fds, memory = len(os.listdir("/proc/self/fd")), _anonymous_kib()
    cycle(300)
    assert len(os.listdir("/proc/self/fd")) == fds
    assert _anonymous_kib() < memory + 4096, "of 300 buffers of a MiB, some are left"
    asking.close()


FORK = """
import os, sys
from lowwater.engine.seams.real import RealFiles

def write(path):
    file = RealFiles().open(path, create=True, write=True, sequential=True)
    file.write_each(0, [b"1" * 9_000, b"2" * 9_000], "fdatasync")
    return file

parents = write(sys.argv[1] + "/a")
number = os.getpid()
pid = os.fork()
if pid == 0:
    os.getpid = lambda: number  # as in a namespace of processes that begins with it
    # What it has of its parent's it can close, and its own files it can write.
    parents.close()
    own = write(sys.argv[1] + "/b")
    assert own._requests is None
    own.close()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
parents.write_each(18_000, [b"3" * 9_000, b"4" * 9_000], "fdatasync")
"""


def test_a_forked_child_does_without(tmp_path: Path) -> None:
    """It has no thread that would write for it, which the C library does not know: it would wait for ever."""
    outcome = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert outcome.stdout == "0\n"
    assert content(tmp_path / "a") == b"".join(digit * 9_000 for digit in (b"1", b"2", b"3", b"4"))
    assert content(tmp_path / "b") == b"1" * 9_000 + b"2" * 9_000


def test_a_run_is_longer_than_one_call(asking: SequentialFile, tmp_path: Path) -> None:
    """What does not go into one goes into the next."""
    parts = [b"%05d" % number for number in range(3 * WRITES_MAX + 1)]
    asking.write_each(1, parts, "fdatasync")
    assert content(tmp_path / "a") == b"!" + b"".join(parts)
    asking.close()
