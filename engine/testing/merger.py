"""A worker without a process: the same bytes, asked and answered where the test runs."""

from __future__ import annotations

from collections.abc import Sequence

from lowwater.engine.merge_messages import NoAnswer, Request, answer


class LocalMerger:
    """It does what the worker does, in one thread, so a simulation can have it too."""

    is_usable = True

    def __init__(self) -> None:
        self._body = bytearray()
        self.asked = 0

    def put(self, offset: int, parts: Sequence[bytes]) -> int:
        assert offset == (len(self._body) if offset else 0), "a body is written front to back"
        del self._body[offset:]
        self._body += b"".join(parts)
        return len(self._body)

    def ask(self, request: Request) -> tuple[bytes, bytes]:
        assert request.body_bytes == len(self._body)
        self.asked += 1
        header, parts = answer(Request.unpack(request.pack()), bytes(self._body))
        return header, b"".join(parts)

    def succeeded(self) -> None:
        pass

    def failed(self, error: Exception) -> NoAnswer:
        raise AssertionError("a sound worker gives a sound answer") from error

    def rest(self) -> None:
        self._body.clear()

    def close(self) -> None:
        pass
