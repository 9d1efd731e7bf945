"""A worker without a process: the same bytes, asked and answered where the test runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lowwater.engine.merge_messages import SLOTS, NoAnswer, Request, answer


class LocalMerger:
    """It does what the worker does, in one thread, so a simulation can have it too."""

    is_usable = True

    def __init__(self) -> None:
        self._bodies = [bytearray() for _ in range(SLOTS)]
        self._requests: deque[Request] = deque()
        self.asked = 0

    def put(self, slot: int, offset: int, parts: Sequence[bytes]) -> int:
        assert all(request.slot != slot for request in self._requests), "a slot that is in use"
        body = self._bodies[slot]
        assert offset == (len(body) if offset else 0), "a body is written front to back"
        del body[offset:]
        body += b"".join(parts)
        return len(body)

    def ask(self, request: Request) -> None:
        assert request.body_bytes == len(self._bodies[request.slot])
        self.asked += 1
        self._requests.append(request)

    def answer(self) -> tuple[bytes, bytes]:
        request = self._requests.popleft()
        header, parts = answer(Request.unpack(request.pack()), bytes(self._bodies[request.slot]))
        return header, b"".join(parts)

    def succeeded(self) -> None:
        pass

    def failed(self, error: Exception) -> NoAnswer:
        raise AssertionError("a sound worker gives a sound answer") from error

    def rest(self) -> None:
        self._requests.clear()
        for body in self._bodies:
            body.clear()

    def close(self) -> None:
        pass
