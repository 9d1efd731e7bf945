"""Several writes in one call, each synced before the next begins: Linux' io_uring with linked requests.

Between two writes there is no thread of Python's to wake and no lock of the interpreter to get: the disk
goes from one to the next. An older Linux, a container that forbids it, another system have no ring.

Always true: when `write` returns, no request of its is under way; requests after one that failed, or that
wrote less than all, were not begun.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys
from collections.abc import Sequence

# The same on every machine that Linux runs on, but Alpha.
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
        if not sys.platform.startswith("linux"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        params = ctypes.create_string_buffer(_PARAMS_BYTES)
        ring_fd = self._call(_SETUP, _ENTRIES, params)
        try:
            words = _PARAMS.unpack(params)
            entries, completions, features = words[0], words[1], words[5]
            submit_offsets, complete_offsets = words[10:20], words[20:30]
            if not features & _SINGLE_MMAP:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            submit_bytes = submit_offsets[6] + entries * 4
            complete_bytes = complete_offsets[5] + completions * _COMPLETION.size
            self._queues = mmap.mmap(ring_fd, max(submit_bytes, complete_bytes))
            self._requests = mmap.mmap(ring_fd, entries * _REQUEST.size, offset=_SQES_OFFSET)
        except BaseException:
            os.close(ring_fd)
            raise
        self._words = memoryview(self._queues).cast("I")
        self._submit_tail = submit_offsets[1] // 4
        self._submit_mask = self._words[submit_offsets[2] // 4]
        self._complete_head = complete_offsets[0] // 4
        self._complete_tail = complete_offsets[1] // 4
        self._complete_mask = self._words[complete_offsets[2] // 4]
        self._completions_offset = complete_offsets[5]
        for index in range(entries):
            self._words[submit_offsets[6] // 4 + index] = index
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
        words, tail = self._words, self._words[self._submit_tail]
        for index, (place, size, offset) in enumerate(writes):
            _REQUEST.pack_into(
                self._requests,
                (tail + index & self._submit_mask) * _REQUEST.size,
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
        head = words[self._complete_head]
        words[self._submit_tail] = tail + count & _U32
        submitted = 0
        while (done := words[self._complete_tail] - head & _U32) < count:
            try:
                submitted += self._call(
                    _ENTER, self._ring_fd, count - submitted, count - done, _GETEVENTS, None, 0
                )
            except InterruptedError:
                pass  # by a signal: what was submitted goes on
        results = [0] * count
        for index in range(count):
            place = self._completions_offset + (head + index & self._complete_mask) * _COMPLETION.size
            number, result, _ = _COMPLETION.unpack_from(self._queues, place)
            results[number] = result
        words[self._complete_head] = head + count & _U32
        return results

    def close(self) -> None:
        ring_fd, self._ring_fd = self._ring_fd, -1
        if ring_fd >= 0:
            self._words.release()
            self._queues.close()
            self._requests.close()
            os.close(ring_fd)
