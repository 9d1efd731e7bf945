"""A disk that forgets what was not synced, and that fails when it is told to.

Always true:
  - what a program reads is the cache; a power loss leaves what is durable, and of the rest any part that
    a disk could have kept;
  - a file's bytes and size become durable by a sync of that file, a name by a sync of its directory, and
    neither by anything else;
  - once a crash point was reached every operation raises SimulatedCrash until `crash` is called, and no
    handle works in a later life than its own;
  - the same calls, faults and seeds give the same `trace`, in every process.

A crash makes choices in a fixed order (names first, then files by name), so its outcome depends on the
random generator that it is given and on nothing else.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from blake3 import blake3

from lowwater.chaos.clock import VirtualClock
from lowwater.chaos.survival import Change, Survival, apply_change, lose_power, surviving_names
from lowwater.engine.seams.memory import ROOM_BYTES
from lowwater.engine.seams.seams import SyncMode, write_all

MutatingKind = Literal[
    "create",
    "write",
    "sync",
    "truncate",
    "rename",
    "link",
    "remove",
    "sync_directory",
    "lock",
    "make_directory",
]
ReadingKind = Literal["open", "read", "size", "list", "room"]

T = TypeVar("T")


class SimulatedCrash(BaseException):
    """The program ends here. Not an Exception: nothing that handles errors may handle this."""


class Operation(NamedTuple):
    """What a fault schedule sees. Mutating and reading operations are numbered apart, both from 1."""

    number: int
    kind: MutatingKind | ReadingKind
    path: str
    offset: int
    size: int
    new_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with one operation; several fields may be set.

    `error` is an errno. A failed sync behaves as on Linux: what it should have made durable stays in the
    cache and counts as clean, so a later sync succeeds and does not write it. Nothing of it has
    reached the disk, or, given `landed`, the sectors that this generator picks.
    `taken_bytes` is how much of a write goes in, before the error if there is one.
    `slow_s` passes on the virtual clock; `gate` holds the calling thread until it is set.
    `flip_bit` is the bit that is wrong in what a read returns, modulo its length; the disk stays right.
    """

    error: int = 0
    taken_bytes: int | None = None
    slow_s: float = 0.0
    gate: threading.Event | None = None
    flip_bit: int | None = None
    landed: random.Random | None = None


NO_FAULT = Fault()

# As the real sequential file has it.
BLOCK_BYTES = 4096


class NameChange(NamedTuple):
    """`old` goes, `new` comes: a creation or a link has no `old`, a removal no `new`."""

    old: str
    new: str
    inode: FaultyInode


class FaultyInode:
    __slots__ = ("cache", "changes", "durable", "locked_by", "unsynced")

    def __init__(self) -> None:
        self.cache = bytearray()
        self.durable = bytearray()
        self.unsynced: list[Change] = []
        # How many changes there ever were. It tells a sync that took its time which ones it covers.
        self.changes = 0
        self.locked_by: FaultyFile | None = None

    def change(self, change: Change) -> None:
        apply_change(self.cache, change)
        self.unsynced.append(change)
        self.changes += 1


def _apply_name(names: dict[str, FaultyInode], change: NameChange) -> None:
    """A rename or a removal needs its file under the old name. A new name replaces what is there."""
    if change.old:
        if names.get(change.old) is not change.inode:
            return
        del names[change.old]
    if change.new:
        names[change.new] = change.inode


def _os_error(number: int, path: str) -> OSError:
    """The subclass that fits, as the operating system's own errors have it."""
    return OSError(number, os.strerror(number), path)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


class FaultyFile:
    """An open file of a FaultyFiles, in one life of it."""

    def __init__(
        self, files: FaultyFiles, inode: FaultyInode, path: str, *, writable: bool, sequential: bool = False
    ) -> None:
        self._files = files
        self._inode = inode
        self._path = path
        self._writable = writable
        self._sequential = sequential
        self._life = files.life
        self._closed = False

    def read_at(self, offset: int, size: int) -> bytes:
        def effect(fault: Fault) -> bytes:
            data = self._inode.cache[offset : offset + size]
            if fault.flip_bit is not None and data:
                place, bit = divmod(fault.flip_bit % (len(data) * 8), 8)
                data[place] ^= 1 << bit
            return bytes(data)

        self._check_open()
        return self._files.perform("read", self._path, effect, offset=offset, size=size, life=self._life)

    def write_at(self, offset: int, buffers: Sequence[bytes], sync: SyncMode = "none") -> int:
        data = b"".join(buffers)

        def effect(fault: Fault) -> int:
            count = 0 if fault.error else len(data)
            if fault.taken_bytes is not None:
                count = min(len(data), fault.taken_bytes)
            growth = offset + count - len(self._inode.cache)
            free = self._files.free_bytes
            if free is not None and growth > max(0, free) and count:
                count = max(0, count - (growth - max(0, free)))
                if count == 0:
                    raise _os_error(errno.ENOSPC, self._path)
            if count:
                self._inode.change(self._as_written(offset, data[:count], whole=count == len(data)))
            if fault.error:
                raise _os_error(fault.error, self._path)
            return count

        self._check_open(writing=True)
        count = self._files.perform("write", self._path, effect, offset=offset, data=data, life=self._life)
        self.sync(sync)
        return count

    def write_each(self, offset: int, parts: Sequence[bytes], sync: SyncMode) -> None:
        """As where the system has them all at once: those behind one that failed are written too."""
        failure: OSError | None = None
        for part in parts:
            try:
                write_all(self, offset, [part], sync)
            except OSError as error:
                failure = failure or error
            offset += len(part)
        if failure is not None:
            raise failure

    def _as_written(self, offset: int, data: bytes, *, whole: bool) -> Change:
        """What a write puts on the disk: of a sequential file whole blocks, what stands before the data in
        its first one again, and zeros behind it."""
        padding = -(offset + len(data)) % BLOCK_BYTES
        free = self._files.free_bytes
        growth = offset + len(data) + padding - len(self._inode.cache)
        if not self._sequential or not whole or (free is not None and growth > free):
            return Change(offset, data)
        start = offset - offset % BLOCK_BYTES
        before = bytes(self._inode.cache[start:offset]).ljust(offset - start, b"\0")
        return Change(start, before + data + bytes(padding))

    def sync(self, mode: SyncMode) -> None:
        # Only what was written when it began: a sync may be slow, and others may write meanwhile.
        changes_covered = self._inode.changes

        def effect(fault: Fault) -> None:
            inode = self._inode
            count = max(0, len(inode.unsynced) - (inode.changes - changes_covered))
            covered = inode.unsynced[:count]
            del inode.unsynced[:count]
            if fault.error:
                if fault.landed is not None:
                    lose_power(inode.durable, covered, "random", fault.landed)
                raise _os_error(fault.error, self._path)
            for change in covered:
                apply_change(inode.durable, change)

        self._check_open()
        if mode != "none":
            self._files.perform("sync", self._path, effect, life=self._life)

    def truncate(self, size: int) -> None:
        def effect(_: Fault) -> None:
            free = self._files.free_bytes
            if free is not None and size - len(self._inode.cache) > max(0, free):
                raise _os_error(errno.ENOSPC, self._path)
            self._inode.change(Change(size, None))

        self._check_open(writing=True)
        self._files.perform("truncate", self._path, effect, offset=size, life=self._life)

    def size(self) -> int:
        self._check_open()
        return self._files.perform("size", self._path, lambda _: len(self._inode.cache), life=self._life)

    def close(self) -> None:
        """Never fails: a crashed program's clean-up runs through here, and must change nothing."""
        self._closed = True
        if self._inode.locked_by is self and self._files.is_alive(self._life):
            self._inode.locked_by = None

    def _check_open(self, *, writing: bool = False) -> None:
        if self._closed or (writing and not self._writable):
            raise _os_error(errno.EBADF, self._path)


class FaultyFiles:
    """Files in memory with a cache, a disk behind it, and faults on demand.

    `fault` is asked before every operation. `operations` counts what can change the disk, and crash
    points are among these; `reads` counts the rest. `free_bytes` is what is left of the capacity, or
    None without a limit; a file takes its size, so a pre-zeroed one can be overwritten on a full disk.
    """

    preallocate = True

    def __init__(
        self,
        *,
        fault: Callable[[Operation], Fault | None] | None = None,
        clock: VirtualClock | None = None,
        free_bytes: int | None = None,
    ) -> None:
        self.fault = fault
        self.operations = 0
        self.reads = 0
        self.life = 1
        self._clock = clock
        self._mutex = threading.RLock()
        self._names: dict[str, FaultyInode] = {}
        self._durable_names: dict[str, FaultyInode] = {}
        self._unsynced_names: list[NameChange] = []
        self._directories = {"": None}
        self._capacity_bytes = free_bytes
        self._crashed = False
        self._crash_number: int | None = None
        self._crash_after = False
        self._trace = blake3()

    def open(
        self, path: str, *, write: bool = False, create: bool = False, sequential: bool = False
    ) -> FaultyFile:
        def effect(_: Fault) -> FaultyFile:
            if not create:
                return FaultyFile(
                    self, self._inode(path), path, writable=write, sequential=sequential and write
                )
            if path in self._names or path in self._directories:
                raise _os_error(errno.EEXIST, path)
            return FaultyFile(self, self._create(path), path, writable=True, sequential=sequential)

        return self.perform("create" if create else "open", path, effect)

    def list(self, directory: str) -> list[str]:
        def effect(_: Fault) -> list[str]:
            parent = self._directory(directory)
            paths = [*self._names, *self._directories]
            return sorted(path.rpartition("/")[2] for path in paths if path and _parent(path) == parent)

        return self.perform("list", directory, effect)

    def make_directory(self, directory: str) -> None:
        def effect(_: Fault) -> None:
            path = directory.rstrip("/")
            missing: list[str] = []
            while path not in self._directories:
                if path in self._names:
                    raise _os_error(errno.EEXIST, path)
                missing.append(path)
                path = _parent(path)
            self._directories.update(dict.fromkeys(missing))

        self.perform("make_directory", directory, effect)

    def rename(self, old: str, new: str) -> None:
        def effect(_: Fault) -> None:
            inode = self._inode(old)
            self._directory(_parent(new))
            if new in self._directories:
                raise _os_error(errno.EISDIR, new)
            self._change_name(NameChange(old, new, inode))

        self.perform("rename", old, effect, new_path=new)

    def link(self, old: str, new: str) -> None:
        def effect(_: Fault) -> None:
            inode = self._inode(old)
            self._directory(_parent(new))
            if new in self._names or new in self._directories:
                raise _os_error(errno.EEXIST, new)
            self._change_name(NameChange("", new, inode))

        self.perform("link", old, effect, new_path=new)

    def remove(self, path: str) -> None:
        self.perform("remove", path, lambda _: self._change_name(NameChange(path, "", self._inode(path))))

    def sync_directory(self, directory: str) -> None:
        def effect(_: Fault) -> None:
            parent = self._directory(directory)
            later: list[NameChange] = []
            synced: list[NameChange] = []
            # Backwards, because a rename into this directory takes along what led to its old name.
            needed: set[str] = set()
            for change in reversed(self._unsynced_names):
                paths = [path for path in (change.old, change.new) if path]
                if any(_parent(path) == parent or path in needed for path in paths):
                    needed.update(paths)
                    synced.append(change)
                else:
                    later.append(change)
            for change in reversed(synced):
                _apply_name(self._durable_names, change)
            self._unsynced_names = later[::-1]

        self.perform("sync_directory", directory, effect)

    def lock(self, path: str, owner: str) -> FaultyFile:
        def effect(_: Fault) -> FaultyFile:
            inode = self._names.get(path) or self._create(path)
            if inode.locked_by is not None:
                raise BlockingIOError(errno.EAGAIN, "locked by another process", path)
            inode.locked_by = FaultyFile(self, inode, path, writable=True)
            inode.change(Change(0, None))
            if owner:
                inode.change(Change(0, owner.encode()))
            return inode.locked_by

        return self.perform("lock", path, effect)

    def room(self, directory: str) -> int:
        def effect(_: Fault) -> int:
            self._directory(directory)
            free_bytes = self.free_bytes
            return ROOM_BYTES if free_bytes is None else max(0, free_bytes)

        return self.perform("room", directory, effect)

    @property
    def free_bytes(self) -> int | None:
        if self._capacity_bytes is None:
            return None
        with self._mutex:
            return self._capacity_bytes - self._used_bytes()

    @free_bytes.setter
    def free_bytes(self, free_bytes: int | None) -> None:
        with self._mutex:
            self._capacity_bytes = None if free_bytes is None else self._used_bytes() + free_bytes

    @property
    def trace(self) -> str:
        """A hash over all operations so far: kind, path, offset, bytes, outcome."""
        with self._mutex:
            return self._trace.hexdigest()

    def crash_at(self, number: int, *, after: bool = False) -> None:
        """End the program at this operation: before it takes effect, or just after."""
        assert number > self.operations, f"operation {number} is in the past"
        self._crash_number = number
        self._crash_after = after

    def crash(self, rng: random.Random, mode: Survival = "random") -> None:
        """End this life, whether or not a crash point was reached, and start the next one with what
        survived. Locks are free, open handles are dead."""
        with self._mutex:
            if mode != "keep":
                self._lose_power(rng, mode)
            for inode in self._names.values():
                inode.locked_by = None
            self.life += 1
            self._crashed = False
            self._crash_number = None
            self._trace.update(f"crash\0{mode}\n".encode())

    def flip_byte(self, path: str, offset: int, mask: int) -> None:
        """Let a stored byte rot."""
        assert 0 < mask < 256, "this mask flips nothing"
        with self._mutex:
            inode = self._inode(path)
            assert not inode.unsynced, "a byte that was not synced is not stored yet: sync the file first"
            inode.durable[offset] ^= mask
            inode.cache[offset] ^= mask

    def is_alive(self, life: int) -> bool:
        return life == self.life and not self._crashed

    def perform(
        self,
        kind: MutatingKind | ReadingKind,
        path: str,
        effect: Callable[[Fault], T],
        *,
        offset: int = 0,
        size: int = 0,
        data: bytes = b"",
        new_path: str = "",
        life: int | None = None,
    ) -> T:
        """One operation: count it, ask for a fault, let it happen, record it. Crashes happen here."""
        size = size or len(data)
        with self._mutex:
            life = self.life if life is None else life
            self._check_alive(life)
            reading = kind in ("read", "size", "open", "list", "room")
            if reading:
                self.reads += 1
            else:
                self.operations += 1
            number = self.reads if reading else self.operations
            operation = Operation(number, kind, path, offset, size, new_path)
            crashing = not reading and number == self._crash_number
            fault = (self.fault(operation) if self.fault is not None else None) or NO_FAULT
            if fault.slow_s:
                assert self._clock is not None, "a slow disk needs a clock"
                self._clock.advance(fault.slow_s)
        if fault.gate is not None:
            fault.gate.wait()  # outside the mutex: others go on while this one is stuck
        with self._mutex:
            self._check_alive(life)
            if not crashing or self._crash_after:
                try:
                    if fault.error and kind not in ("write", "sync"):
                        raise _os_error(fault.error, path)
                    result = effect(fault)
                except OSError as error:
                    self._record(operation, data, error.errno)
                    if not crashing:
                        raise
                else:
                    self._record(operation, data, result)
                    if not crashing:
                        return result
            self._crashed = True
            self._trace.update(f"crashed at {number}\n".encode())
            raise SimulatedCrash(f"at operation {number}: {kind} {path}")

    def _record(self, operation: Operation, data: bytes, outcome: object) -> None:
        self._trace.update("\0".join(map(str, operation)).encode())
        if data:
            self._trace.update(data)
        if isinstance(outcome, bytes):
            self._trace.update(b"\0%d\n" % len(outcome))
            self._trace.update(outcome)
        elif isinstance(outcome, FaultyFile):
            self._trace.update(b"\0opened\n")
        else:
            self._trace.update(f"\0{outcome}\n".encode())

    def _check_alive(self, life: int) -> None:
        if not self.is_alive(life):
            raise SimulatedCrash("this program has crashed already")

    def _lose_power(self, rng: random.Random, mode: Survival) -> None:
        for change in surviving_names(self._unsynced_names, mode, rng):
            _apply_name(self._durable_names, change)
        for path in sorted(self._durable_names):
            inode = self._durable_names[path]
            lose_power(inode.durable, inode.unsynced, mode, rng)
            inode.cache = bytearray(inode.durable)
            inode.unsynced = []
        self._names = dict(self._durable_names)
        self._unsynced_names = []

    def _used_bytes(self) -> int:
        """A file with two names takes its room once."""
        return sum(len(inode.cache) for inode in {id(i): i for i in self._names.values()}.values())

    def _inode(self, path: str) -> FaultyInode:
        inode = self._names.get(path)
        if inode is None:
            raise _os_error(errno.EISDIR if path in self._directories else errno.ENOENT, path)
        return inode

    def _directory(self, directory: str) -> str:
        path = directory.rstrip("/")
        if path not in self._directories:
            raise _os_error(errno.ENOTDIR if path in self._names else errno.ENOENT, directory)
        return path

    def _create(self, path: str) -> FaultyInode:
        self._directory(_parent(path))
        inode = FaultyInode()
        self._change_name(NameChange("", path, inode))
        return inode

    def _change_name(self, change: NameChange) -> None:
        _apply_name(self._names, change)
        self._unsynced_names.append(change)
