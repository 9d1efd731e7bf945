"""The worker: a process that merges changes into pages for a flusher, and remembers nothing.

Always true:
  - it opens no file and writes none: what it is given lies in memory that it shares with its parent, and what
    it makes goes there;
  - it ends with its parent, however that ends: the socket between them closes, or it finds itself with
    another parent. It also ends when it was not asked for a while.

`merge_process.py` starts it, with no more of the package than it imports here.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

from lowwater.engine.merge_messages import REQUEST, Request, answer, write_parts

IDLE_S = 60.0
LOOK_AFTER_S = 5.0


def main() -> None:
    """Arguments: the number of the socket, those of the shared memory, the parent's process id."""
    socket_fd, parent_pid = int(sys.argv[1]), int(sys.argv[3])
    memory_fds = [int(number) for number in sys.argv[2].split(",")]
    # Ctrl-C is for the program that the user sees. A socket that is closed is an error, not a signal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # There are no cycles here, and a walk through a hundred thousand keys is for nothing.
    gc.disable()
    with socket.socket(fileno=socket_fd) as connection:
        connection.settimeout(LOOK_AFTER_S)
        try:
            while (header := _next_header(connection, parent_pid)) is not None:
                request = Request.unpack(header)
                memory_fd = memory_fds[request.slot]
                answered, parts = answer(request, os.pread(memory_fd, request.body_bytes, 0))
                write_parts(memory_fd, request.body_bytes, parts)
                del parts
                connection.sendall(answered)
        except OSError:
            pass  # nobody is there any more


def _next_header(connection: socket.socket, parent_pid: int) -> bytes | None:
    idle_s = 0.0
    header = b""
    while len(header) < REQUEST.size:
        try:
            data = connection.recv(REQUEST.size - len(header))
        except TimeoutError:
            idle_s += LOOK_AFTER_S
            if os.getppid() != parent_pid or idle_s >= IDLE_S:
                return None
            continue
        if not data:
            return None
        header += data
    return header


if __name__ == "__main__":
    main()
