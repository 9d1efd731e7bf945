"""Several writes in one call, each synced before the next begins: Linux' io_uring with linked requests.

Between two writes there is no thread of Python's to wake and no lock of the interpreter to get: the disk
goes from one to the next. An older Linux, a container that forbids it, another system have no ring.

Always true:
  - when `write` returns, no request of its is under way; requests after one that failed, or that wrote less
    than all, were not begun;
  - where a signal handler's exception ends `write` instead, `wait` says when that holds;
  - the kernel does not wait for a request when the process ends, as it does for a write: whoever must not
    meet one needs something that lives as long as the request, which has the file open (`real.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import sys
from collections.abc import Sequence

# Where these numbers and the layouts below were looked up.
_MACHINES = ("x86_64", "aarch64", "riscv64")
_SETUP, _ENTER = 425, 426
_ENTRIES = 16
_GETEVENTS = 1
_SINGLE_MMAP = 1
_SQES_OFFSET = 0x1000_0000
_OP_WRITE = 23
_LINK = 4
# struct io_uring_params: ten words of what is asked for, then ten for each queue of where it is.
_PARAMS_BYTES = 120
_PARAMS = struct.Struct("<30I")
# struct io_uring_sqe: op, flags, priority, file, offset, address, length, flags of the write, number, unused.
_REQUEST = struct.Struct("<BBHiQQIIQ24x")
# struct io_uring_cqe: number, result, flags.
_COMPLETION = struct.Struct("<QiI")
_U32 = 0xFFFF_FFFF


class Ring:
    """A queue of writes to one file. One thread at a time uses it."""

    writes_max = _ENTRIES

    def __init__(self, fd: int) -> None:
        """Raises OSError where there is no such thing."""
        self._file_fd = fd
        self._ring_fd = -1
        if not sys.platform.startswith("linux") or os.uname().machine not in _MACHINES:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        params = ctypes.create_string_buffer(_PARAMS_BYTES)
        ring_fd = self._call(_SETUP, _ENTRIES, params)
        try:
            asked = _PARAMS.unpack(params)
            entries, completions, features = asked[0], asked[1], asked[5]
            submit_offsets, complete_offsets = asked[10:20], asked[20:30]
            if not features & _SINGLE_MMAP:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            submit_bytes = submit_offsets[6] + entries * 4
            complete_bytes = complete_offsets[5] + completions * _COMPLETION.size
            self._queues = mmap.mmap(ring_fd, max(submit_bytes, complete_bytes))
            self._requests = mmap.mmap(ring_fd, entries * _REQUEST.size, offset=_SQES_OFFSET)
        except BaseException:
            os.close(ring_fd)
            raise
        words = self._words = memoryview(self._queues).cast("I")
        self._submit_head = submit_offsets[0] // 4
        self._submit_tail = submit_offsets[1] // 4
        self._submit_mask = words[submit_offsets[2] // 4]
        self._complete_head = complete_offsets[0] // 4
        self._complete_tail = complete_offsets[1] // 4
        self._complete_mask = words[complete_offsets[2] // 4]
        self._completions_offset = complete_offsets[5]
        for index in range(entries):
            words[submit_offsets[6] // 4 + index] = index
        self._ring_fd = ring_fd

    def _call(self, number: int, *arguments: object) -> int:
        result = int(self._syscall(number, *arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    def write(self, address: int, writes: Sequence[tuple[int, int, int]], flags: int) -> list[int]:
        """Write (place after `address`, size, place in the file) one after the other. Returns how many bytes
        each has written, or the number of its error, negative."""
        count = len(writes)
        assert 0 < count <= self.writes_max, "more writes than the ring has room for"
        words, first = self._words, self._words[self._submit_tail]
        assert first == words[self._complete_head], "a write was interrupted, and nobody has waited for it"
        for index, (place, size, offset) in enumerate(writes):
            _REQUEST.pack_into(
                self._requests,
                (first + index & self._submit_mask) * _REQUEST.size,
                _OP_WRITE,
                _LINK if index < count - 1 else 0,
                0,
                self._file_fd,
                offset,
                address + place,
                size,
                flags,
                index,
            )
        words[self._submit_tail] = first + count & _U32
        try:
            self._call(_ENTER, self._ring_fd, count, count, _GETEVENTS, None, 0)
        except OSError as error:
            # A signal, or no memory for all requests: those that were taken go on.
            if error.errno not in (errno.EINTR, errno.EAGAIN, errno.ENOMEM):
                raise
        taken = self._wait_for_taken() - first & _U32
        results = [-errno.ECANCELED] * count
        for at in range(taken):
            place = self._completions_offset + (first + at & self._complete_mask) * _COMPLETION.size
            index, result, _ = _COMPLETION.unpack_from(self._queues, place)
            results[index] = result
        self.wait()
        return results

    def wait(self) -> None:
        """Return once nothing is under way."""
        self._words[self._complete_head] = self._wait_for_taken()

    def _wait_for_taken(self) -> int:
        """Wait for all requests that the kernel has taken: how many these ever were."""
        words = self._words
        # The others are taken back: as a chain of its own they would not be held up by an error before them.
        taken: int = words[self._submit_head]
        words[self._submit_tail] = taken
        # Each request completes once, so the two queues count alike.
        while missing := taken - words[self._complete_tail] & _U32:
            with contextlib.suppress(InterruptedError):
                self._call(_ENTER, self._ring_fd, 0, missing, _GETEVENTS, None, 0)
        return taken

    def close(self) -> None:
        if self._ring_fd >= 0:
            self.wait()
            self.abandon()

    def abandon(self) -> None:
        """Close it whatever is under way: a forked child's, which is another process's as well."""
        ring_fd, self._ring_fd = self._ring_fd, -1
        if ring_fd >= 0:
            self._words.release()
            self._queues.close()
            self._requests.close()
            os.close(ring_fd)
