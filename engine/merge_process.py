"""The worker as its flusher sees it: another process that merges, where there is one.

Always true:
  - nothing depends on it: whatever is wrong (it does not start, dies, hangs, answers nonsense), `answer`
    raises NoAnswer, and who asks merges by itself. The worker is ended then, and after some such turns no
    other is begun;
  - it is begun when it is asked for the first time, and again when it had gone because nobody asked;
  - answers come in the order of the requests. A request that a worker left behind is asked again of the next;
  - it has no file of ours open but those that they share: every other is closed when it begins;
  - a forked child of this process has no part in it, and does not keep it alive.

What they share is memory without a name (`memfd_create`). Where the system has no such, there is no worker.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Sequence

from lowwater import errors
from lowwater.engine.merge_messages import ANSWER, SLOTS, NoAnswer, Request, answer_bytes, write_parts
from lowwater.logging import get_logger

_logger = get_logger("engine")

# How long a worker may take for a range, which takes it a tenth of a second.
ANSWER_WITHIN_S = 20.0
# After so many failures in a row there is no worker any more.
FAILURES_MAX = 3

# It imports a few modules of the package, and not the package, which would cost it 15 MiB.
_BEGIN = """
import sys, types
package = types.ModuleType("lowwater")
package.__path__ = [sys.argv.pop(1)]
sys.path[:] = sys.argv[4:]
sys.modules["lowwater"] = package
from lowwater.engine.merge_worker import main
main()
"""


class MergeProcess:
    """One worker, for one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._memory_fds: list[int] = []
        # What is asked, and not answered yet; and whether the worker has answered anything.
        self._asked: deque[Request] = deque()
        self._has_answered = False
        self._failures = 0 if can_begin() else FAILURES_MAX
        _processes.add(self)

    @property
    def is_usable(self) -> bool:
        return self._failures < FAILURES_MAX

    @property
    def pid(self) -> int | None:
        """The process that is there, if one is."""
        return self._process.pid if self._process is not None else None

    # ------------------------------------------------------------------ asking

    def put(self, slot: int, offset: int, parts: Sequence[bytes]) -> int:
        """Write a part of a request's body; where it ends."""
        self._require_usable()
        try:
            while len(self._memory_fds) < SLOTS:
                self._memory_fds.append(os.memfd_create("lowwater-merge", os.MFD_CLOEXEC))
            return write_parts(self._memory_fds[slot], offset, parts)
        except OSError as error:
            raise self.failed(error) from error

    def ask(self, request: Request) -> None:
        """Have the worker begin with what was put, once it has answered what it was asked before."""
        self._require_usable()
        self._asked.append(request)
        if self._socket is not None:
            with contextlib.suppress(OSError):  # which is seen to when the answer is wanted
                self._socket.sendall(request.pack())
        elif len(self._asked) == 1:
            try:
                self._begin()
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                self._asked.pop()
                raise self.failed(error) from error

    def answer(self) -> tuple[bytes, bytes]:
        """The answer to the first request that has none yet: header and body."""
        self._require_usable()
        request = self._asked[0]
        try:
            header = self._receive()
            size = answer_bytes(header)
            memory_fd = self._memory_fds[request.slot]
            if size > os.fstat(memory_fd).st_size - request.body_bytes:
                raise NoAnswer("an answer says that it is larger than it is")
            body = os.pread(memory_fd, size, request.body_bytes)
        except (OSError, RuntimeError, subprocess.SubprocessError, NoAnswer) as error:
            raise self.failed(error) from error
        finally:
            self._asked.popleft()
        return header, body

    def _require_usable(self) -> None:
        if not self.is_usable:
            raise NoAnswer("there is no process that merges")

    def succeeded(self) -> None:
        """The answer was good."""
        self._failures = 0

    def failed(self, error: Exception) -> NoAnswer:
        """There was no answer, or it was none: this one is not asked again."""
        self._failures += 1
        self._end()
        _logger.debug(
            "merging in this process: the one for it failed",
            error=str(error),
            tries_left=FAILURES_MAX - self._failures,
        )
        return NoAnswer(str(error))

    def rest(self) -> None:
        """Nothing is asked for now: what was said goes."""
        if self._asked:
            # Nobody waits for that any more, and it would come before what is asked for next.
            self._asked.clear()
            self._end()
        for fd in self._memory_fds:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)

    def _receive(self) -> bytes:
        if self._socket is not None:
            try:
                return self._next_header()
            except (BrokenPipeError, ConnectionResetError):
                if not self._has_answered:
                    raise
                # It has gone because nobody asked. What was put is still there.
                self._end()
        self._begin()
        return self._next_header()

    def _next_header(self) -> bytes:
        connection = self._socket
        assert connection is not None
        header = b""
        while len(header) < ANSWER.size:
            more = connection.recv(ANSWER.size - len(header))
            if not more:
                raise ConnectionResetError("the worker has ended")
            header += more
        self._has_answered = True
        return header

    # ------------------------------------------------------------------ beginning and ending

    def _begin(self) -> None:
        """With all that is asked, and not answered."""
        ours, its = socket.socketpair()
        with its:
            # Whatever becomes of the call below, it is closed.
            self._socket = ours
            ours.settimeout(ANSWER_WITHIN_S)
            package = os.path.dirname(os.path.abspath(errors.__file__))
            self._process = subprocess.Popen(
                [
                    sys.executable, "-I", "-c", _BEGIN, package,
                    str(its.fileno()), ",".join(map(str, self._memory_fds)), str(os.getpid()),
                    *filter(None, sys.path),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(its.fileno(), *self._memory_fds),
                # Out of the terminal's reach, and of a signal to this process and those of its group.
                start_new_session=True,
            )  # fmt: skip
        _logger.debug("a process that merges has begun", pid=self._process.pid)
        ours.sendall(b"".join(request.pack() for request in self._asked))

    def _end(self) -> None:
        self._has_answered = False
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """The worker is gone when this returns."""
        self._failures = FAILURES_MAX
        self._end()
        self._close_memory()
        _processes.discard(self)

    def _close_memory(self) -> None:
        while self._memory_fds:
            os.close(self._memory_fds.pop())

    def forked(self) -> None:
        """In a child of the process that began it: the worker belongs to the other."""
        self._failures = FAILURES_MAX
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # nobody's to wait for here
        self._close_memory()


def can_begin() -> bool:
    """Whether a worker could be begun here. What runs Python may not be one that can be called so: a frozen
    program would begin itself once more, and a server with Python in it a server."""
    name = os.path.basename(sys.executable or "").lower()
    return hasattr(os, "memfd_create") and name.startswith("python") and not getattr(sys, "frozen", False)


_processes: weakref.WeakSet[MergeProcess] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for process in list(_processes):
        process.forked()


os.register_at_fork(after_in_child=_leave_to_parent)
