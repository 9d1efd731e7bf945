"""Another S3 server than rclone: `moto`'s, in a process of its own. It keeps conditions, which rclone does
not, and says of every upload that it began in 2010."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType
from typing import Any, Self

import boto3
from botocore.exceptions import ClientError

from lowwater.tiering.testing.s3_server import ACCESS_KEY_ID, BUCKET, SECRET_ACCESS_KEY, S3Server

# It ends with whoever holds the other end of its standard input.
SCRIPT = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()
"""


def boto_client(endpoint: str) -> Any:
    """Another client of S3 than ours."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        region_name="us-east-1",
    )


def pending_uploads(server: S3Server | MotoServer, prefix: str) -> list[str]:
    """The keys of uploads that are begun, and not completed, below a prefix."""
    try:
        found = boto_client(server.endpoint).list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchUpload":
            raise
        return []  # so rclone says that there was never any
    return sorted(each["Key"] for each in found if each["Key"].startswith(prefix))


class MotoServer:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()
        assert self.endpoint.startswith("http://"), "moto did not start"
        boto_client(self.endpoint).create_bucket(Bucket=BUCKET)

    @property
    def options(self) -> dict[str, str]:
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        }

    def uri(self, prefix: str = "") -> str:
        return f"s3://{BUCKET}/{prefix}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
