"""Files that live in memory, for logs that nobody wants to keep.

Always true: it behaves as a file system does that never crashes. A removed or replaced file stays
readable for whoever has it open.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from lowwater.engine.seams.seams import SyncMode, write_in_turn

# Nobody knows how much memory there is left; it is not this that ends first.
ROOM_BYTES = 2**62


class Inode:
    __slots__ = ("data", "locked")

    def __init__(self) -> None:
        self.data = bytearray()
        self.locked = False


def _error(number: int, path: str) -> OSError:
    """The subclass that fits the number, as the operating system's own errors have it."""
    return OSError(number, os.strerror(number), path)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


class MemoryFile:
    def __init__(self, inode: Inode, path: str, *, write: bool, holds_lock: bool = False) -> None:
        self._inode = inode
        self._path = path
        self._write = write
        self._holds_lock = holds_lock
        self._closed = False

    def read_at(self, offset: int, size: int) -> bytes:
        self._check_open()
        # A copy of a copy: with a memoryview between them, another thread could not grow the file.
        return bytes(self._inode.data[offset : offset + size])

    def write_at(self, offset: int, buffers: Sequence[bytes], sync: SyncMode = "none") -> int:
        self._check_open(writing=True)
        joined = b"".join(buffers)
        data = self._inode.data
        if joined and offset > len(data):
            data.extend(bytes(offset - len(data)))
        data[offset : offset + len(joined)] = joined
        return len(joined)

    def write_each(self, offset: int, parts: Sequence[bytes], sync: SyncMode) -> None:
        write_in_turn(self, offset, parts, sync)

    def sync(self, mode: SyncMode) -> None:
        self._check_open()

    def truncate(self, size: int) -> None:
        self._check_open(writing=True)
        data = self._inode.data
        if size < len(data):
            del data[size:]
        else:
            data.extend(bytes(size - len(data)))

    def size(self) -> int:
        self._check_open()
        return len(self._inode.data)

    def close(self) -> None:
        self._closed = True
        if self._holds_lock:
            self._inode.locked = False
            self._holds_lock = False

    def _check_open(self, *, writing: bool = False) -> None:
        if self._closed or (writing and not self._write):
            raise _error(errno.EBADF, self._path)


class MemoryFiles:
    preallocate = False

    def __init__(self) -> None:
        self._inodes: dict[str, Inode] = {}
        self._directories = {"": None}

    def open(
        self, path: str, *, write: bool = False, create: bool = False, sequential: bool = False
    ) -> MemoryFile:
        inode = self._inodes.get(path)
        if create:
            if inode is not None or path in self._directories:
                raise _error(errno.EEXIST, path)
            inode = self._create(path)
        elif inode is None:
            raise _error(errno.ENOENT, path)
        return MemoryFile(inode, path, write=write or create)

    def list(self, directory: str) -> list[str]:
        parent = self._existing(directory)
        paths = [*self._inodes, *self._directories]
        return sorted(path.rpartition("/")[2] for path in paths if path and _parent(path) == parent)

    def make_directory(self, directory: str) -> None:
        path = directory.rstrip("/")
        missing: list[str] = []
        while path not in self._directories:
            if path in self._inodes:
                raise _error(errno.EEXIST, path)
            missing.append(path)
            path = _parent(path)
        self._directories.update(dict.fromkeys(missing))

    def rename(self, old: str, new: str) -> None:
        if old not in self._inodes:
            raise _error(errno.ENOENT, old)
        self._existing(_parent(new))
        if new in self._directories:
            raise _error(errno.EISDIR, new)
        self._inodes[new] = self._inodes.pop(old)

    def link(self, old: str, new: str) -> None:
        if old not in self._inodes:
            raise _error(errno.ENOENT, old)
        self._existing(_parent(new))
        if new in self._inodes or new in self._directories:
            raise _error(errno.EEXIST, new)
        self._inodes[new] = self._inodes[old]

    def remove(self, path: str) -> None:
        if self._inodes.pop(path, None) is None:
            raise _error(errno.ENOENT, path)

    def sync_directory(self, directory: str) -> None:
        self._existing(directory)

    def room(self, directory: str) -> int:
        self._existing(directory)
        return ROOM_BYTES

    def lock(self, path: str, owner: str) -> MemoryFile:
        inode = self._inodes.get(path) or self._create(path)
        if inode.locked:
            raise BlockingIOError(errno.EAGAIN, "locked by another process", path)
        inode.locked = True
        inode.data[:] = owner.encode()
        return MemoryFile(inode, path, write=True, holds_lock=True)

    def _create(self, path: str) -> Inode:
        self._existing(_parent(path))
        inode = self._inodes[path] = Inode()
        return inode

    def _existing(self, directory: str) -> str:
        path = directory.rstrip("/")
        if path not in self._directories:
            raise _error(errno.ENOENT, directory)
        return path
