"""`lowwater spark root`: the fingerprint of an archive's content."""

from __future__ import annotations

from datetime import datetime

import click

from lowwater.cli.log.dump import Moment
from lowwater.cli.output import json_option, print_json
from lowwater.cli.spark.opened import opened_session, spark_options, store_options


@click.command()
@click.argument("uri")
@click.option("--at", type=Moment(), help="As of this seq or time; without it, the newest that was shipped.")
@click.option("--from-segments", is_flag=True, help="Believe no checkpoint: read all of the log.")
@spark_options
@json_option
@click.pass_context
def root(
    ctx: click.Context,
    uri: str,
    at: int | datetime | None,
    from_segments: bool,
    master: str | None,
    settings: tuple[tuple[str, str], ...],
    as_json: bool,
) -> None:
    """Print the root of what the archive at URI holds. It is the one that `lowwater root` prints of a
    database whose content is the same."""
    with opened_session(ctx, master, settings) as spark:
        from lowwater.spark.building import root_as_of
        from lowwater.spark.plan import pin, seq_of

        options = store_options(ctx, uri)
        seq = seq_of(pin(uri, options), at)
        found = root_as_of(spark, uri, seq, from_segments=from_segments, options=options)
    if as_json:
        print_json({"root": found, "seq": seq})
    else:
        click.echo(found)
