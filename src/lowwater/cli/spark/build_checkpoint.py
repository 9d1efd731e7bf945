"""`lowwater spark build-checkpoint`: a checkpoint from an archive alone."""

from __future__ import annotations

import click

from lowwater.cli.log.dump import Seq
from lowwater.cli.output import json_option, number, print_json, progress_bars
from lowwater.cli.spark.opened import opened_session, spark_options, store_options

WHAT = {"control": "the control part", "index": "the index"}


@click.command("build-checkpoint")
@click.argument("uri")
@click.option("--at", type=Seq(), help="The seq of a `checkpoint` entry; without it, of the newest shipped.")
@click.option("--from-segments", is_flag=True, help="Believe no earlier checkpoint: read all of the log.")
@spark_options
@json_option
@click.pass_context
def build_checkpoint(
    ctx: click.Context,
    uri: str,
    at: int | None,
    from_segments: bool,
    master: str | None,
    settings: tuple[tuple[str, str], ...],
    as_json: bool,
) -> None:
    """Build the checkpoint that an entry asks for, from the segments of the archive at URI, and write it
    there: the very bytes that the database would have shipped, with the same root. A restore begins with it.

    Doing it again writes nothing.
    """
    with opened_session(ctx, master, settings) as spark:
        from lowwater.spark.building import build_checkpoint

        with progress_bars(WHAT) as progress:
            built = build_checkpoint(
                spark,
                uri,
                at,
                from_segments=from_segments,
                options=store_options(ctx, uri),
                progress=progress,
            )
    if as_json:
        print_json(built._asdict())
        return
    click.echo(f"the checkpoint of seq {built.seq} is {built.name}")
    click.echo(f"  root {built.root}")
    click.echo(
        f"  {number(built.rows)} rows in {number(built.blocks)} blocks; {number(built.packs_written)} of "
        f"{number(built.packs)} packs were written"
    )
