"""The real clock, randomness, threads and files. This module alone touches them.

Always true: a directory that `make_directory` made is durable; a lock ends with its process.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from lowwater.engine.seams.posix_aio import WRITES_MAX, Requests
from lowwater.engine.seams.seams import ReadDenied, Step, SyncMode, write_in_turn

T = TypeVar("T")

# Linux takes at most this many buffers in one call (IOV_MAX).
BUFFERS_PER_CALL = 1024
# How long background steps run, one after the other, before others get the interpreter: about as long as the
# disk takes for a small write, when a writer does without it. To sleep and wake takes almost as long again.
TURN_S = 1e-4
# To write and sync in one call, where the system knows how.
WRITE_SYNC_FLAGS: dict[SyncMode, int] = (
    {"fdatasync": os.RWF_DSYNC, "fsync": os.RWF_SYNC} if hasattr(os, "RWF_DSYNC") else {}
)
# The same for all writes of a descriptor.
_OPEN_SYNC_FLAGS: dict[SyncMode, int] = (
    {"fdatasync": os.O_DSYNC, "fsync": os.O_SYNC} if hasattr(os, "O_DIRECT") else {}
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
    """One thread that calls one step. An exception ends the thread, and `error` keeps it; an interrupt, which
    somebody has raised in the thread, does not: what it has cut short is called again."""

    def __init__(self, name: str, step: Step) -> None:
        self._step = step
        # Free once somebody has woken the thread. A lock and no event: a signal handler may come while an
        # event is being set, and would wait for that when it sets it too.
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self._stopping = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"lowwater-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._call_steps()
                return
            except Exception as error:
                self.error = error
                raise
            except BaseException as error:  # noqa: BLE001 — raised in this thread by somebody else
                self.error = error

    def _call_steps(self) -> None:
        now_s = time.thread_time
        began_s = now_s()
        while not self._stopping:
            delay = self._step()
            if delay != 0:
                self._sleep(delay)
            elif now_s() - began_s < TURN_S:
                continue
            else:
                time.sleep(0)  # let a thread run that waits for the interpreter
            began_s = now_s()

    def _sleep(self, delay_s: float | None) -> None:
        timeout_s = -1.0 if delay_s is None else min(max(delay_s, 0.0), threading.TIMEOUT_MAX)
        self._asleep.acquire(timeout=timeout_s)

    def wake(self) -> None:
        if self._asleep.locked():
            with contextlib.suppress(RuntimeError):  # somebody else was faster
                self._asleep.release()

    def stop(self) -> None:
        self._stopping = True
        self.wake()
        if threading.get_ident() != self._thread.ident:
            self._thread.join()


class ThreadRunner:
    """A thread for each step."""

    def start(self, name: str, step: Step) -> ThreadTask:
        return ThreadTask(name, step)

    def apart(self, call: Callable[[], T]) -> T:
        if threading.get_ident() != threading.main_thread().ident:
            return call()
        results: list[T] = []
        errors: list[BaseException] = []
        running = threading.Lock()
        running.acquire()

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:  # noqa: BLE001 — raised again below, in the caller's thread
                errors.append(error)
            finally:
                running.release()

        interrupt: BaseException | None = None
        try:
            # Compiled: where an interrupt comes, it runs already.
            _thread.start_new_thread(run, ())
        except RuntimeError:
            return call()  # there are too many threads, or the program ends
        except BaseException as error:  # noqa: BLE001 — raised again below
            interrupt = error
        while not results and not errors:
            try:
                running.acquire()
            except BaseException as error:  # noqa: BLE001 — likewise
                interrupt = error
        if interrupt is not None:
            raise interrupt
        if errors:
            raise errors[0]
        return results[0]

    def start_call(self, name: str, call: Callable[[], object]) -> None:
        threading.Thread(target=call, name=f"lowwater-{name}", daemon=False).start()


class RealFile:
    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

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

    Always true: `_staging` begins with what stands in the file between the last block boundary and `_end`,
    which is where the last write ended; -1 when that is not known.
    """

    __slots__ = ("_direct_fd", "_end", "_map", "_requests", "_requests_fd", "_requests_sync", "_staging")

    def __init__(self, fd: int, direct_fd: int) -> None:
        super().__init__(fd)
        self._direct_fd = direct_fd
        self._end = -1
        self._map = mmap.mmap(-1, STAGING_BYTES)
        self._staging = memoryview(self._map)
        # For several writes in one call, all synced in this way.
        self._requests: Requests | None = None
        self._requests_fd = -1
        self._requests_sync: SyncMode = "none"

    def write_at(self, offset: int, buffers: Sequence[bytes], sync: SyncMode = "none") -> int:
        data = buffers[0] if len(buffers) == 1 else b"".join(buffers)
        size = len(data)
        if self._requests is not None:
            self._requests.wait()  # an exception may have ended a write before its time
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
            done = self._write_in_one_call(offset, parts, sync)
            if not done:
                write_in_turn(self, offset, parts, sync)
                return
            offset += sum(map(len, parts[:done]))
            parts = parts[done:]

    def _write_in_one_call(self, offset: int, parts: Sequence[bytes], sync: SyncMode) -> int:
        """Write and sync as many parts as go into one call. Returns how many of them are whole, from the
        first on: behind one that is not, others may be."""
        requests = self._requests_for(sync)
        if requests is None:
            return 0
        requests.wait()
        staging = self._staging
        start = offset % BLOCK_BYTES
        if start and self._end != offset:
            staging[:start] = os.pread(self._fd, start, offset - start).ljust(start, b"\0")
        self._end = -1  # until these have ended well
        writes = []
        slot = 0  # where the blocks of a part begin, the first with what stands before it in the file
        for part in parts[:WRITES_MAX]:
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
        results = requests.write(address, writes)
        errors = {-result for result in results if result < 0}
        if failed := errors.difference(_NOT_HERE, _NOT_BEGUN):
            # Whatever became of the others: a sync tells of what was lost once, and not again.
            code = min(failed)
            raise OSError(code, os.strerror(code))
        if not errors.isdisjoint(_NOT_HERE):
            self._close_direct()
        for done, (result, (_, size, _)) in enumerate(zip(results, writes, strict=True)):
            if result != size:
                # Also where not all of it went in: the plain way writes the rest or tells why not.
                return done
        staging[:start] = staging[slot : slot + start]
        self._end = offset
        return len(writes)

    def _requests_for(self, sync: SyncMode) -> Requests | None:
        flag = _OPEN_SYNC_FLAGS.get(sync)
        if flag is None or self._direct_fd < 0:
            return None
        if sync != self._requests_sync:
            self._close_requests()
            self._requests_sync = sync
            # The same file, whatever its name is now.
            with contextlib.suppress(OSError):
                again = os.open(
                    f"/proc/self/fd/{self._direct_fd}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT | flag
                )
                self._requests_fd = again
                self._requests = Requests(again)
        return self._requests

    def truncate(self, size: int) -> None:
        self._end = -1
        super().truncate(size)

    def close(self) -> None:
        self._close_direct()
        super().close()

    def _close_requests(self) -> None:
        if self._requests is not None:
            self._requests.wait()
            self._requests = None
        fd, self._requests_fd = self._requests_fd, -1
        if fd >= 0:
            os.close(fd)

    def _close_direct(self) -> None:
        self._close_requests()
        fd, self._direct_fd = self._direct_fd, -1
        if fd >= 0:
            os.close(fd)


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


def _open_file(path: str, flags: int) -> int:
    try:
        fd = os.open(path, flags, 0o644)
    except PermissionError as error:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            raise ReadDenied(error.errno, error.strerror, path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise IsADirectoryError(errno.EISDIR, "it is no file", path)
    return fd


class RealFiles:
    preallocate = True

    def open(
        self, path: str, *, write: bool = False, create: bool = False, sequential: bool = False
    ) -> RealFile:
        # Who opens a FIFO waits for somebody to open its other end, but for this flag.
        flags = os.O_CLOEXEC | os.O_NONBLOCK | (os.O_RDWR if write or create else os.O_RDONLY)
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        fd = _open_file(path, flags)
        if sequential and flags & os.O_RDWR and hasattr(os, "O_DIRECT") and WRITE_SYNC_FLAGS:
            with contextlib.suppress(OSError):  # not on this file system
                return SequentialFile(fd, os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT))
        return RealFile(fd)

    def list(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except PermissionError as error:
            raise ReadDenied(error.errno, error.strerror, directory) from error

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

    def room(self, directory: str) -> int:
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize

    def lock(self, path: str, owner: str) -> RealFile:
        fd = _open_file(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK)
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
