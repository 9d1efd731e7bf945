"""`lowwater history`: what was done to a key, from the log on this disk."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import click

from lowwater.cli.database.opened import log_directory
from lowwater.cli.log.dump import Moment, print_entries
from lowwater.cli.output import LIMIT, LocalPath, end_on_sigterm, json_option
from lowwater.engine.format.moments import time_us_of
from lowwater.engine.log.dump import Selection


@click.command()
@click.argument("path", type=LocalPath())
@click.argument("bucket")
@click.argument("key")
@click.option("--at", type=Moment(), help="Up to this seq or time.")
@click.option("--limit", type=LIMIT, metavar="N", help="End after so many entries.")
@click.option(
    "--values",
    type=click.Choice(["none", "utf8", "hex", "base64"]),
    help="How to show values. The default is none, their size alone; in JSON it is base64.",
)
@json_option
@click.pass_context
def history(
    ctx: click.Context, path: str, bucket: str, key: str, at: int | datetime | None, limit: int | None,
    values: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Print the log's entries of one key, the oldest first.

    What was shipped and purged is not among them: `lowwater log dump URI --bucket B --key K` shows the
    entries that an archive has.

    The directory may be open elsewhere; nothing is changed. With --json each entry is a line of JSON.
    """
    end_on_sigterm(ctx)
    selection = Selection(bucket=bucket, key=key)
    if isinstance(at, datetime):
        selection = replace(selection, time_stop_us=time_us_of(at) + 1)
    elif at is not None:
        selection = replace(selection, seq_last=at)
    print_entries(ctx, log_directory(ctx, path), selection, limit=limit, values=values, as_json=as_json)
