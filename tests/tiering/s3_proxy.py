"""Stands between a client and the real S3 server, for what the server never does by itself: refusing,
failing, cutting off, hanging, keeping a condition. All else goes through as it came."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from lowwater.tiering.testing.s3_server import S3Server


class Request(NamedTuple):
    method: str
    path: str
    query: str
    condition: bool
    """Whether it must not write over an object."""


class Answer(NamedTuple):
    """`cut` is how many bytes of the body get through before the connection ends; `forward` asks the real
    server first, and throws its answer away; `raw` is all that goes out before the connection ends."""

    status: int = 200
    code: str = ""
    message: str = ""
    forward: bool = False
    cut: int | None = None
    hang: threading.Event | None = None
    raw: bytes | None = None


Rule = Callable[[Request], Answer | None]


class S3Proxy:
    def __init__(self, server: S3Server) -> None:
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

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def keep_conditions(self, request: Request) -> Answer | None:
        """A rule: as S3 does, and rclone does not."""
        data = self.server.data / unquote(request.path).lstrip("/")
        if request.condition and data.is_file():
            return Answer(412, "PreconditionFailed", "At least one of the preconditions did not hold")
        return None

    def handle(self, client: BaseHTTPRequestHandler) -> None:
        body = client.rfile.read(int(client.headers.get("Content-Length") or 0))
        parts = urlsplit(client.path)
        request = Request(client.command, parts.path, parts.query, client.headers.get("If-None-Match") == "*")
        self.requests.append(request)
        answer = self.rule(request) if self.rule is not None else None
        if answer is not None and answer.hang is not None:
            answer.hang.wait()
        if answer is not None and answer.raw is not None:
            client.wfile.write(answer.raw)
            client.close_connection = True
            return
        if answer is None or answer.forward or answer.cut is not None:
            status, headers, content = self._forward(client, body)
        if answer is not None and answer.cut is None:
            text = f"<Error><Code>{answer.code}</Code><Message>{answer.message}</Message></Error>"
            status, headers = answer.status, [("Content-Type", "application/xml")]
            content = b"" if request.method == "HEAD" else text.encode()
        client.send_response_only(status)
        for name, value in headers:
            client.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            client.send_header("Content-Length", str(len(content)))
        client.end_headers()
        cut = answer.cut if answer is not None else None
        try:
            client.wfile.write(content[:cut])
        except OSError:
            pass  # it has given up waiting
        client.close_connection = cut is not None

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


@contextmanager
def proxied(server: S3Server) -> Iterator[S3Proxy]:
    proxy = S3Proxy(server)
    try:
        yield proxy
    finally:
        proxy.stop()
