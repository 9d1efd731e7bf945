"""`lowwater get`: one value, to standard output."""

from __future__ import annotations

import base64
import sys
from datetime import datetime

import click

from lowwater.cli.database.opened import opened
from lowwater.cli.log.dump import Moment
from lowwater.cli.output import LocalPath, json_option, print_json


@click.command()
@click.argument("path", type=LocalPath())
@click.argument("bucket")
@click.argument("key")
@click.option("--at", type=Moment(), help="As of this seq or time, where versions go back so far.")
@json_option
@click.pass_context
def get(
    ctx: click.Context, path: str, bucket: str, key: str, at: int | datetime | None, as_json: bool
) -> None:
    """Write the value of a key to standard output, byte for byte.

    With --json it prints the seq, time and metadata as well, and the value as base64.

    The directory must not be open elsewhere. Opening it finishes what a crash has left undone.
    """
    with opened(ctx, path) as db:
        found = db.get(bucket, key, at)
    if as_json:
        print_json(
            {
                "bucket": found.bucket,
                "key": found.key,
                "seq": found.seq,
                "time_us": found.time_us,
                "metadata": found.metadata or {},
                "value_bytes": len(found.value),
                "value": base64.b64encode(found.value).decode(),
            }
        )
    else:
        sys.stdout.buffer.write(found.value)
        sys.stdout.buffer.flush()
