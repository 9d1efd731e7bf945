"""`lowwater root`: the fingerprint of a database's content."""

from __future__ import annotations

from datetime import datetime

import click

from lowwater.cli.database.opened import opened
from lowwater.cli.log.dump import Moment
from lowwater.cli.output import LocalPath, json_option, print_json


@click.command()
@click.argument("path", type=LocalPath())
@click.option("--at", type=Moment(), help="As of this seq or time, where versions go back so far.")
@json_option
@click.pass_context
def root(ctx: click.Context, path: str, at: int | datetime | None, as_json: bool) -> None:
    """Print the root: 64 characters that are the same where buckets, keys, versions and values are the same.

    The directory must not be open elsewhere. Opening it finishes what a crash has left undone.
    """
    with opened(ctx, path) as db:
        seq = db.marks().applied if at is None else db.seq_at(at) if isinstance(at, datetime) else at
        found = db.root(seq)
    if as_json:
        print_json({"root": found, "seq": seq})
    else:
        click.echo(found)
