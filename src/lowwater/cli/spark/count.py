"""`lowwater spark count`: how much an archive has."""

from __future__ import annotations

import click

from lowwater.cli.output import (
    json_option,
    new_table,
    number,
    print_json,
    print_table,
    progress_bars,
    size,
    time,
)
from lowwater.cli.spark.opened import opened_session, spark_options, store_options


@click.command()
@click.argument("uri")
@spark_options
@json_option
@click.pass_context
def count(
    ctx: click.Context, uri: str, master: str | None, settings: tuple[tuple[str, str], ...], as_json: bool
) -> None:
    """Count the entries of the archive at URI by kind, from its manifest and the footers of its segments: no
    entry is read."""
    with opened_session(ctx, master, settings) as spark:
        from lowwater.spark.counting import count

        with progress_bars() as progress:
            found = count(spark, uri, options=store_options(ctx, uri), progress=progress)
    if as_json:
        print_json(found._asdict())
        return
    table = new_table("kind", "entries", right=("entries",))
    for kind, entries in sorted(found.kinds.items(), key=lambda item: -item[1]):
        table.add_row(kind, number(entries))
    print_table(table)
    click.echo(
        f"{number(found.entries)} entries, {size(found.bytes)} in {number(found.segments)} segments, "
        f"{number(found.checkpoints)} checkpoints"
    )
    click.echo(f"seq {found.seq_first} to {found.seq_last}")
    click.echo(f"{time(found.time_first_us)} to {time(found.time_last_us)}")
