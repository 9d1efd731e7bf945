"""The interfaces through which clock, randomness, threads and files enter the engine.

Always true of the code behind this line:
  - it never asks the operating system for time, randomness, a thread or a file except through these;
  - background work is a `step`, a function that does a bounded piece of work and returns; a thread calls
    it in production, a simulation calls it itself. So a whole engine can run in one thread, from one seed.

`real.py` has the implementations for production, `memory.py` files that live in memory, and
`lowwater.chaos` those that lose, tear and reorder what was not synced. One test suite holds for all files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

T = TypeVar("T")

SyncMode = Literal["fsync", "fdatasync", "none"]

# A step returns the seconds until it wants to be called again: 0 for "there is more to do now",
# None for "not before I am woken".
Step = Callable[[], float | None]


class ReadDenied(PermissionError):
    """It is reading that is not allowed, and not writing."""


class Clock(Protocol):
    def now_us(self) -> int:
        """Wall-clock time in microseconds since 1970. It may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back, for durations."""
        ...


class Randomness(Protocol):
    def token(self, size: int) -> bytes:
        """`size` unpredictable bytes."""
        ...


class Task(Protocol):
    def wake(self) -> None:
        """Ask for the step to be called soon."""
        ...

    def stop(self) -> None:
        """Return once the step is not running and will not be called again."""
        ...


class Runner(Protocol):
    """Calls background steps."""

    def start(self, name: str, step: Step) -> Task: ...

    def apart(self, call: Callable[[], T]) -> T:
        """Call `call` where no signal handler does, and return what it returns. An interrupt is raised once
        it has ended. The caller holds no lock that it needs."""
        ...

    def start_call(self, name: str, call: Callable[[], object]) -> None:
        """Call `call` in the background. The program does not end before it has returned."""
        ...


class Readable(Protocol):
    """What is read by place, wherever it lies."""

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; fewer only at the end."""
        ...

    def size(self) -> int: ...


class File(Protocol):
    """An open file. All of it raises OSError, as the operating system does."""

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; fewer only at the end of the file."""
        ...

    def write_at(self, offset: int, buffers: Sequence[bytes], sync: SyncMode = "none") -> int:
        """Write the buffers one after the other. Returns how many bytes went in, which may be fewer
        than were given: `write_all` goes on from there. With a sync mode, what went in survives a power
        loss once this returns; it says nothing of other writes to the file."""
        ...

    def write_each(self, offset: int, parts: Sequence[bytes], sync: SyncMode) -> None:
        """Write the parts one after the other, each whole, and with a sync mode synced before the next one
        begins. After an error those before it are in the file, and of the others it is not known."""
        ...

    def sync(self, mode: SyncMode) -> None:
        """What was written to this file survives a power loss once this returns.
        After it has raised, nothing is known of what was written since the last one that returned."""
        ...

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class Files(Protocol):
    """A file system, by the few calls that the engine makes of it."""

    preallocate: bool
    """Whether overwriting synced zeros is faster than letting a file grow."""

    def open(self, path: str, *, write: bool = False, create: bool = False, sequential: bool = False) -> File:
        """`create` makes a new file and fails with FileExistsError where one is. `sequential` says that it is
        written front to back, and that nothing but zeros is ever kept beyond the end of a write: each may
        put zeros there, up to the next multiple of 4,096 bytes. So it is not for writing in the middle."""
        ...

    def list(self, directory: str) -> list[str]:
        """The names in a directory, sorted."""
        ...

    def make_directory(self, directory: str) -> None:
        """Make it, and its parents, durably. No error where it is already, and files can be made in it."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Atomic; replaces `new`. Durable after `sync_directory`."""
        ...

    def link(self, old: str, new: str) -> None:
        """Give a file a second name; FileExistsError where there is a file of it already. Durable after
        `sync_directory`. Another OSError where the file system knows no such links."""
        ...

    def remove(self, path: str) -> None:
        """Durable after `sync_directory`."""
        ...

    def sync_directory(self, directory: str) -> None: ...

    def room(self, directory: str) -> int:
        """How many bytes may still be written to the file system that the directory is on."""
        ...

    def lock(self, path: str, owner: str) -> File:
        """Take the lock file and write `owner` into it; held until the file is closed or the process
        ends. BlockingIOError where somebody else has it."""
        ...


def write_all(file: File, offset: int, buffers: Sequence[bytes], sync: SyncMode = "none") -> None:
    """Write every byte of the buffers at `offset`, whatever number of calls that takes."""
    total = sum(map(len, buffers))
    written = file.write_at(offset, buffers, sync)
    if written == total:
        return
    rest = memoryview(b"".join(buffers))
    while written < total:
        count = file.write_at(offset + written, [bytes(rest[written:])], sync)
        assert count > 0, "a file system took no bytes and raised no error"
        written += count


def write_in_turn(file: File, offset: int, parts: Sequence[bytes], sync: SyncMode) -> None:
    """`write_each`, by a call for each."""
    for part in parts:
        write_all(file, offset, [part], sync)
        offset += len(part)
