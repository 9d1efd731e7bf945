"""The real clock, randomness, threads and files. This module alone touches them.

Always true: a directory that `make_directory` made is durable; a lock ends with its process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Literal

from lowwater.engine.seams import Step, SyncMode, write_in_turn
from lowwater.engine.uring import Ring

# Linux takes at most this many buffers in one call (IOV_MAX).
BUFFERS_PER_CALL = 1024
# To write and sync in one call, where the system knows how.
WRITE_SYNC_FLAGS: dict[SyncMode, int] = (
    {"fdatasync": os.RWF_DSYNC, "fsync": os.RWF_SYNC} if hasattr(os, "RWF_DSYNC") else {}
)


# A file system that does not know what is asked of it.
_NOT_HERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# A write that has not been tried.
_NOT_BEGUN = (errno.ECANCELED, errno.EAGAIN, errno.EINTR)
# What a direct write must be aligned to on every disk there is, and how much of it goes out in one call.
BLOCK_BYTES = 4096
STAGING_BYTES = 2**20 + 2 * BLOCK_BYTES


class RealClock:
    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        return time.perf_counter()


def sleep(seconds: float) -> None:
    """For calls that wait by themselves. Background work returns its delay from a step."""
    time.sleep(seconds)


class RealRandomness:
    def token(self, size: int) -> bytes:
        return secrets.token_bytes(size)


class ThreadTask:
    """One thread that calls one step. An exception ends the thread; `error` keeps it."""

    def __init__(self, name: str, step: Step) -> None:
        self._step = step
        self._wake = threading.Event()
        self._stopping = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"lowwater-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping:
                delay = self._step()
                if delay == 0:
                    time.sleep(0)  # let a thread run that waits for the interpreter
                else:
                    self._wake.wait(delay)
                    self._wake.clear()
        except BaseException as error:
            self.error = error
            raise

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


class ThreadRunner:
    """A thread for each step."""

    has_processes = True

    def start(self, name: str, step: Step) -> ThreadTask:
        return ThreadTask(name, step)


class RealFile:
    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read_at(self, offset: int, size: int) -> bytes:
        data = os.pread(self._fd, size, offset)
        if len(data) == size or not data:
            return data
        parts = [data]
        got = len(data)
        while got < size and (data := os.pread(self._fd, size - got, offset + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def write_at(self, offset: int, buffers: Sequence[bytes], sync: SyncMode = "none") -> int:
        if sync == "none":
            return os.pwritev(self._fd, buffers[:BUFFERS_PER_CALL], offset)
        flag = WRITE_SYNC_FLAGS.get(sync)
        if flag is not None:
            # One call, and one release of the interpreter for both: a thread that waits for it works on
            # while the disk does.
            try:
                return os.pwritev(self._fd, buffers[:BUFFERS_PER_CALL], offset, flag)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
        written = os.pwritev(self._fd, buffers[:BUFFERS_PER_CALL], offset)
        self.sync(sync)
        return written

    def write_each(self, offset: int, parts: Sequence[bytes], sync: SyncMode) -> None:
        write_in_turn(self, offset, parts, sync)

    def sync(self, mode: SyncMode) -> None:
        if self._fd < 0:
            # The calls below would raise ValueError for this number, as none of the others does.
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if mode == "fdatasync":
            os.fdatasync(self._fd)
        elif mode == "fsync":
            os.fsync(self._fd)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        # The number is forgotten first: once it is closed, another thread's file may get it.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class SequentialFile(RealFile):
    """A file that is written front to back, past the page cache: no copy into it, no pages to find for it,
    and where the disk can, no flush of all its cache for a few blocks.

    Always true:
      - `_staging` begins with what stands in the file between the last block boundary and `_end`, which is
        where the last write ended; -1 when that is not known;
      - while a ring can have writes under way, which outlive the process, there is a lock on the file. It
        belongs to what has the file open, which includes them. `settle` waits for it.
    """

    __slots__ = ("__weakref__", "_direct_fd", "_end", "_map", "_ring", "_staging")

    def __init__(self, fd: int, direct_fd: int) -> None:
        super().__init__(fd)
        self._direct_fd = direct_fd
        self._end = -1
        self._map = mmap.mmap(-1, STAGING_BYTES)
        self._staging = memoryview(self._map)
        self._ring: Ring | Literal[False] | None = None  # False where there can be none
        _sequential_files.add(self)

    def write_at(self, offset: int, buffers: Sequence[bytes], sync: SyncMode = "none") -> int:
        data = buffers[0] if len(buffers) == 1 else b"".join(buffers)
        size = len(data)
        if self._ring:
            self._ring.wait()  # an exception may have ended a write before its time
        end_before, self._end = self._end, -1  # until this write has ended well
        if self._direct_fd < 0 or not 0 < size <= STAGING_BYTES - 2 * BLOCK_BYTES:
            return super().write_at(offset, buffers, sync)
        staging = self._staging
        start = offset % BLOCK_BYTES
        base = offset - start
        end = start + size
        padding = -end % BLOCK_BYTES
        if start and end_before != offset:
            staging[:start] = os.pread(self._fd, start, base).ljust(start, b"\0")
        staging[start:end] = data
        staging[end : end + padding] = bytes(padding)
        try:
            written = os.pwritev(
                self._direct_fd, [staging[: end + padding]], base, WRITE_SYNC_FLAGS.get(sync, 0)
            )
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            # Not on this file system.
            self._close_direct()
            return super().write_at(offset, buffers, sync)
        if written <= start:
            # Nothing new went in. The plain way tells why.
            return super().write_at(offset, buffers, sync)
        if written < end:
            return written - start
        rest = (offset + size) % BLOCK_BYTES
        staging[:rest] = staging[end - rest : end]
        self._end = offset + size
        return size

    def write_each(self, offset: int, parts: Sequence[bytes], sync: SyncMode) -> None:
        while parts:
            done = self._write_linked(offset, parts, sync)
            if not done:
                write_in_turn(self, offset, parts, sync)
                return
            offset += sum(map(len, parts[:done]))
            parts = parts[done:]

    def _write_linked(self, offset: int, parts: Sequence[bytes], sync: SyncMode) -> int:
        """Write and sync as many parts as go into one call. Returns how many that are."""
        ring = self._linking(sync)
        if ring is None:
            return 0
        ring.wait()
        staging = self._staging
        start = offset % BLOCK_BYTES
        if start and self._end != offset:
            staging[:start] = os.pread(self._fd, start, offset - start).ljust(start, b"\0")
        self._end = -1  # until these have ended well
        writes = []
        slot = 0  # where the blocks of a part begin, the first with what stands before it in the file
        for part in parts[: ring.writes_max]:
            size = len(part)
            end = slot + start + size
            padding = -end % BLOCK_BYTES
            next_slot = end + padding
            if next_slot + BLOCK_BYTES > STAGING_BYTES:
                break
            staging[slot + start : end] = part
            staging[end:next_slot] = bytes(padding)
            writes.append((slot, next_slot - slot, offset - start))
            offset += size
            start = offset % BLOCK_BYTES
            staging[next_slot : next_slot + start] = staging[end - start : end]
            slot = next_slot
        if not writes:
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        results = ring.write(address, writes, WRITE_SYNC_FLAGS[sync])
        for done, (result, (_, size, _)) in enumerate(zip(results, writes, strict=True)):
            if result == size:
                continue
            if -result in _NOT_HERE:
                self._close_ring()
            elif result < 0 and -result not in _NOT_BEGUN:
                raise OSError(-result, os.strerror(-result))
            # Also where not all of it went in: the plain way writes the rest or tells why not.
            return done
        staging[:start] = staging[slot : slot + start]
        self._end = offset
        return len(writes)

    def _linking(self, sync: SyncMode) -> Ring | None:
        if self._direct_fd < 0 or sync not in WRITE_SYNC_FLAGS:
            return None
        if self._ring is None:
            self._ring = False
            with contextlib.suppress(OSError):
                fcntl.flock(self._direct_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._ring = Ring(self._direct_fd)
        return self._ring or None

    def truncate(self, size: int) -> None:
        self._end = -1
        super().truncate(size)

    def close(self) -> None:
        self._close_direct()
        super().close()

    def _close_ring(self) -> None:
        if self._ring:
            self._ring.close()
            fcntl.flock(self._direct_fd, fcntl.LOCK_UN)
        self._ring = False

    def _close_direct(self) -> None:
        self._close_ring()
        fd, self._direct_fd = self._direct_fd, -1
        if fd >= 0:
            os.close(fd)

    def abandon(self) -> None:
        """In a forked child: the lock and the ring are the parent's, and must not outlive it."""
        if self._ring:
            self._ring.abandon()
        self._ring = False
        self.close()


_sequential_files: weakref.WeakSet[SequentialFile] = weakref.WeakSet()


def _abandon_in_child() -> None:
    for file in list(_sequential_files):
        file.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)


class LockFile(RealFile):
    """A file with a lock on it, which ends with `close` even where a forked child has the file open too. The
    child's `close` leaves the lock to the process that took it."""

    __slots__ = ("_pid",)

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._pid = os.getpid()

    def close(self) -> None:
        if self._fd >= 0 and self._pid == os.getpid():
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        super().close()


def _require_writable(directory: str) -> None:
    """Who may write the files that are there, and make none, would find out at the next segment."""
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        read_only = os.statvfs(directory).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number), directory)


class RealFiles:
    preallocate = True

    def open(
        self, path: str, *, write: bool = False, create: bool = False, sequential: bool = False
    ) -> RealFile:
        flags = os.O_CLOEXEC | (os.O_RDWR if write or create else os.O_RDONLY)
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        fd = os.open(path, flags, 0o644)
        if sequential and flags & os.O_RDWR and hasattr(os, "O_DIRECT") and WRITE_SYNC_FLAGS:
            with contextlib.suppress(OSError):  # not on this file system
                return SequentialFile(fd, os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT))
        return RealFile(fd)

    def list(self, directory: str) -> list[str]:
        return sorted(os.listdir(directory))

    def make_directory(self, directory: str) -> None:
        parent = os.path.dirname(os.path.abspath(directory))
        if os.path.isdir(directory):
            # Who made it may have crashed before it was durable. Some may not look into the parent.
            with contextlib.suppress(PermissionError):
                self.sync_directory(parent)
            _require_writable(directory)
            return
        self.make_directory(parent)
        try:
            os.mkdir(directory)
        except FileExistsError:
            if not os.path.isdir(directory):
                raise
        self.sync_directory(parent)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def link(self, old: str, new: str) -> None:
        os.link(old, new)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def sync_directory(self, directory: str) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def settle(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
            finally:
                os.close(fd)

    def room(self, directory: str) -> int:
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize

    def lock(self, path: str, owner: str) -> RealFile:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, owner.encode(), 0)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise BlockingIOError(error.errno, "locked by another process", path) from error
            raise
        return LockFile(fd)
