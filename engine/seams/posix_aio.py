"""Several writes in one call, one after the other: the C library's asynchronous requests (`lio_listio`).

A thread of the C library's writes to a file one request after the other, in the order in which they came.
Between two of them there is no thread of Python's to wake and no lock of the interpreter to get: the disk
goes from one to the next. Other C libraries than GNU's have other structures, and need not keep an order:
there the writes are a call each.

Always true:
  - when `write` returns, no request of its is under way, and each has told what became of it;
  - the same where a signal handler's exception ends it; where a second one does, `wait` says when that holds;
  - a request is begun whether or not those before it went well;
  - a process that is killed keeps its files and locks until the request that is under way has ended, as with
    any write. No other is begun.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from typing import Any

WRITES_MAX = 16
_NOWAIT = 1
_OP_WRITE = 1
_NO_SIGNAL = 1
# struct aiocb where a pointer has 64 bits: file, operation, priority, address, length, how to tell, error,
# result, place in the file. What is left out is the library's own.
_REQUEST = struct.Struct("=iii4xQQ12xi48x8x8xi4xqq32x")
_OUTCOME = struct.Struct("=i4xq")
_OUTCOME_OFFSET = 112
assert _REQUEST.size == 168, "GNU's is as large"


class _Process:
    """A forked child of a process that has used it has no thread that would do what it asks for, or what its
    parent has asked for, and the library does not know that. A child's number can be its parent's."""

    is_used = False
    is_forked = False


def _forbid_in_child() -> None:
    _Process.is_forked = _Process.is_used


os.register_at_fork(after_in_child=_forbid_in_child)


def _is_gnu() -> bool:
    """Others may know this question's name, the function and the structure, and write in any order: of two
    writes that share a block, the earlier one would take away what the later one has put there."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError):
        return False


def _library() -> Any:
    """Raises OSError where there is no such thing."""
    if _is_gnu() and struct.calcsize("P") == 8 and not _Process.is_forked:
        for name in (None, "librt.so.1"):  # of its own until 2.34
            library = ctypes.CDLL(name, use_errno=True)
            if hasattr(library, "lio_listio"):
                return library
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


class Requests:
    """The writes to one file. One thread at a time uses it."""

    def __init__(self, fd: int) -> None:
        """`fd` is one whose writes sync themselves. Raises OSError where there is no such thing."""
        self._fd = fd
        library = _library()
        _Process.is_used = True
        self._begin = library.lio_listio
        self._suspend = library.aio_suspend
        self._requests = ctypes.create_string_buffer(WRITES_MAX * _REQUEST.size)
        first = ctypes.addressof(self._requests)
        self._list = (ctypes.c_void_p * WRITES_MAX)(*range(first, first + len(self._requests), _REQUEST.size))
        self._may_be_under_way = False

    def write(self, address: int, writes: Sequence[tuple[int, int, int]]) -> list[int]:
        """Write (place after `address`, size, place in the file) one after the other. Returns how many bytes
        each has written, or the number of its error, negative."""
        assert 0 < len(writes) <= WRITES_MAX, "more writes than there is room for"
        for index, (place, size, offset) in enumerate(writes):
            _REQUEST.pack_into(
                self._requests, index * _REQUEST.size,
                self._fd, _OP_WRITE, 0, address + place, size, _NO_SIGNAL, errno.ECANCELED, -1, offset,
            )  # fmt: skip
        self._may_be_under_way = True
        try:
            # What it returns says whether all were begun; each knows that itself.
            self._begin(_NOWAIT, self._list, len(writes), None)
            self.wait()
        finally:
            self.wait()  # the memory that they write from may go with whoever gets the exception
        outcomes = [self._outcome(index) for index in range(len(writes))]
        return [-code if code else written for code, written in outcomes]

    def wait(self) -> None:
        """Return once nothing is under way."""
        if not self._may_be_under_way or _Process.is_forked:
            return
        # From the last on, which is the last to end: all of them are waited for at once.
        for index in reversed(range(WRITES_MAX)):
            while self._outcome(index)[0] == errno.EINPROGRESS:
                # Also returns when a signal comes.
                self._suspend(ctypes.byref(self._list, index * ctypes.sizeof(ctypes.c_void_p)), 1, None)
        # The library's thread looks once more at a request that has ended, under the lock that this takes: it
        # does not wait for anything else, as all of them have.
        self._suspend(self._list, 1, None)
        self._may_be_under_way = False

    def _outcome(self, index: int) -> tuple[int, int]:
        code, written = _OUTCOME.unpack_from(self._requests, index * _REQUEST.size + _OUTCOME_OFFSET)
        return code, written
