"""Object stores that nobody here wrote, each in a process of its own, beside `rclone serve s3`.

    with MotoServer() as server:
        store = open_store(server.uri("prefix"), options=server.options)

Always true: a server answers once the block is entered, and ends with whoever holds the other end of its
standard input, even where that is killed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import boto3
import pytest
from botocore.exceptions import ClientError

from lowwater.tiering.store import Store
from lowwater.tiering.testing.s3_server import (
    ACCESS_KEY_ID,
    BUCKET,
    SCRIPT,
    SECRET_ACCESS_KEY,
    S3Server,
    options_of,
)

MOTO_SCRIPT = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()
"""

# It gives `null` for the type of what came without one, which no client of Google's reads, and falls over an
# object of no bytes. Both are mended here, or nothing else of it could be looked at.
GCS_SCRIPT = """
import sys
from gcp_storage_emulator import server
from gcp_storage_emulator.handlers import objects

type_of = objects._content_type_from_request
objects._content_type_from_request = lambda request, default=None: (
    type_of(request, default) or "application/octet-stream"
)
data_of = server.Request.data.fget
server.Request.data = property(
    lambda request: b"" if (data := data_of(request)) is None and request.method == "POST" else data
)

running = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket=sys.argv[1])
running.start()
while not running._api._httpd:
    pass
print("http://127.0.0.1:{}".format(running._api._httpd.server_address[1]), flush=True)
sys.stdin.read()
running.stop()
"""


class Served(Protocol):
    """What a proxy and a store need to know of a server."""

    endpoint: str

    @property
    def options(self) -> dict[str, str]: ...

    def uri(self, prefix: str = "") -> str: ...


class _Process:
    """A server whose address is found by `said` in what it prints."""

    def __init__(
        self, command: Sequence[str], *, said: str = r"(http://\S+)", env: Mapping[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(env or {})},
            # Ctrl-C reaches who uses it, and must find it there while that tidies up.
            start_new_session=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(said, line):
                self.endpoint = found[1]
                return
        self.stop()
        raise AssertionError(f"{command[0]} did not start")

    @property
    def options(self) -> dict[str, str]:
        return options_of(self.endpoint)

    def uri(self, prefix: str = "") -> str:
        return f"s3://{BUCKET}/{prefix}"

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class MotoServer(_Process):
    """It keeps conditions, which rclone does not, and says of every upload that it began in 2010."""

    def __init__(self) -> None:
        super().__init__([sys.executable, "-c", MOTO_SCRIPT])
        boto_client(self.endpoint).create_bucket(Bucket=BUCKET)


class S3sServer(_Process):
    """`s3s-fs`, in Rust, over a folder."""

    def __init__(self, directory: Path) -> None:
        (directory / BUCKET).mkdir(parents=True)
        program = s3s_fs()
        assert program is not None, "look before"
        keys = ("--access-key", ACCESS_KEY_ID, "--secret-key", SECRET_ACCESS_KEY)
        super().__init__(
            ["sh", "-c", SCRIPT, "sh", program, "--host", "127.0.0.1", "--port", "0", *keys, str(directory)],
            said=r"(http://127\.0\.0\.1:\d+)",
            env={"RUST_LOG": "info"},
        )


class GcsServer(_Process):
    """`gcp-storage-emulator`, in memory."""

    def __init__(self) -> None:
        super().__init__([sys.executable, "-c", GCS_SCRIPT, BUCKET])

    @property
    def options(self) -> dict[str, str]:
        return {
            "endpoint": self.endpoint,
            "allow_anonymous": "true",
            "disable_vm_metadata": "true",
            "disable_config_load": "true",
        }

    def uri(self, prefix: str = "") -> str:
        return f"gcs://{BUCKET}/{prefix}"


KINDS = ("rclone", "moto", "s3s-fs", "gcs")


def started(kind: str, directory: Path) -> S3Server | MotoServer | S3sServer | GcsServer:
    """One of KINDS, with its data in a new directory where it has them on a disk."""
    match kind:
        case "rclone":
            return S3Server(directory)
        case "moto":
            return MotoServer()
        case "gcs":
            return GcsServer()
    assert kind == "s3s-fs", kind
    if s3s_fs() is None:
        pytest.skip(
            "NOT TESTED: there is no s3s-fs here; where there is a Rust toolchain, `make .venv/s3s` builds it"
        )
    return S3sServer(directory)


def s3s_fs() -> str | None:
    """The program: the one of this environment, or the first on the path."""
    beside = Path(sys.executable).parent / "s3s-fs"
    return str(beside) if beside.exists() else shutil.which("s3s-fs")


def boto_client(endpoint: str) -> Any:
    """Another client of S3 than ours."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        region_name="us-east-1",
    )


def write_until_swept(store: Store, server: Served, prefix: str) -> None:
    """Writing removes what is pending below a prefix, and old enough for this store."""
    while pending_uploads(server, prefix):
        store.delete("cluster.cbor")
        store.write("cluster.cbor", [b"."], size=1)


def pending_uploads(server: Served, prefix: str) -> list[str]:
    """The keys of uploads that are begun, and not completed, below a prefix."""
    try:
        found = boto_client(server.endpoint).list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchUpload":
            raise
        return []  # so rclone says that there was never any
    return sorted(each["Key"] for each in found if each["Key"].startswith(prefix))
