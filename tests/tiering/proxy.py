"""Stands between a client and a real server, for what the server never does by itself: refusing, failing,
cutting off, hanging, lying, flipping bits, keeping a condition. All else goes through as it came."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from tests.tiering.servers import Served

from lowwater.tiering.testing.s3_server import S3Server


class Request(NamedTuple):
    method: str
    path: str
    query: str
    condition: bool
    """Whether it must not write over an object."""
    size: int = 0
    """How many bytes came with it."""

    @property
    def is_list(self) -> bool:
        """Of objects, in S3's language or in Google's."""
        return self.method == "GET" and ("list-type=2" in self.query or self.path.endswith("/o"))


class Answer(NamedTuple):
    """An answer of its own, of which the server never hears; or, with `through`, the server's. `forward` asks
    the server first, and throws its answer away."""

    status: int = 200
    code: str = ""
    message: str = ""
    forward: bool = False
    through: bool = False
    content: bytes | None = None
    """What stands in the place of an error of S3."""
    raw: bytes | None = None
    """All that goes out before the connection ends."""
    cut: int | None = None
    """How many bytes of the server's body get through before the connection ends."""
    short: int | None = None
    """How many of them get through, as if there were no more."""
    flip: int | None = None
    """The bit of the server's body that is another one."""
    flip_sent: int | None = None
    """The bit of what came with the request that is another one for the server."""
    delay_s: float = 0.0
    hang: threading.Event | None = None

    @property
    def is_servers(self) -> bool:
        given = (self.cut, self.short, self.flip, self.flip_sent)
        return self.through or any(each is not None for each in given)


Rule = Callable[[Request], Answer | None]


class Proxy:
    def __init__(self, server: Served) -> None:
        self.server = server
        self.rule: Rule | None = None
        self.requests: list[Request] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _do(self) -> None:
                proxy.handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do  # noqa: N815

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def options(self) -> dict[str, str]:
        return {**self.server.options, "endpoint": self.endpoint}

    def uri(self, prefix: str = "") -> str:
        return self.server.uri(prefix)

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def handle(self, client: BaseHTTPRequestHandler) -> None:
        body = client.rfile.read(int(client.headers.get("Content-Length") or 0))
        parts = urlsplit(client.path)
        condition = client.headers.get("If-None-Match") == "*"
        request = Request(client.command, parts.path, parts.query, condition, len(body))
        self.requests.append(request)
        answer = (self.rule(request) if self.rule is not None else None) or Answer(through=True)
        if answer.hang is not None:
            answer.hang.wait()
        if answer.delay_s:
            time.sleep(answer.delay_s)
        if answer.forward or answer.is_servers:
            if answer.flip_sent is not None:
                body = flipped(body, answer.flip_sent)
            status, headers, content = self._forward(client, body)
        if answer.raw is not None:
            client.wfile.write(answer.raw)
            client.close_connection = True
            return
        if not answer.is_servers:
            status, headers, content = answer.status, *_own(answer)
        if answer.flip is not None:
            content = flipped(content, answer.flip)
        if answer.short is not None:
            content = content[: answer.short]
            headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        if client.command == "HEAD" and not answer.is_servers:
            content = b""
        client.send_response_only(status)
        for name, value in headers:
            client.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            client.send_header("Content-Length", str(len(content)))
        client.end_headers()
        try:
            client.wfile.write(content[: answer.cut])
        except OSError:
            pass  # it has given up waiting
        client.close_connection = answer.cut is not None

    def _forward(
        self, client: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = HTTPConnection(urlsplit(self.server.endpoint).netloc, timeout=120)
        try:
            connection.putrequest(client.command, client.path, skip_host=True, skip_accept_encoding=True)
            for name, value in client.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            content = answer.read()
            kept = [
                (n, v) for n, v in answer.getheaders() if n.lower() not in ("transfer-encoding", "connection")
            ]
            return answer.status, kept, content
        finally:
            connection.close()


def keep_conditions(server: S3Server) -> Rule:
    """As S3 does, and rclone does not."""

    def rule(request: Request) -> Answer | None:
        data = server.data / unquote(request.path).lstrip("/")
        if request.condition and data.is_file():
            return Answer(412, "PreconditionFailed", "At least one of the preconditions did not hold")
        return None

    return rule


def flipped(data: bytes, bit: int) -> bytes:
    """The same with one bit another one, wherever that number falls."""
    if not data:
        return data
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(changed)


def _own(answer: Answer) -> tuple[list[tuple[str, str]], bytes]:
    if answer.content is not None:
        return [("Content-Type", "text/html")], answer.content
    text = f"<Error><Code>{answer.code}</Code><Message>{answer.message}</Message></Error>"
    return [("Content-Type", "application/xml")], text.encode()


@contextmanager
def proxied(server: Served) -> Iterator[Proxy]:
    proxy = Proxy(server)
    try:
        yield proxy
    finally:
        proxy.stop()
