"""`lowwater spark export`: an archive as Parquet."""

from __future__ import annotations

from datetime import datetime

import click

from lowwater.cli.log.dump import Moment
from lowwater.cli.output import json_option, number, print_json, progress_bars, size
from lowwater.cli.spark.opened import opened_session, spark_options, store_options
from lowwater.engine.format.format import KIND_CODES


@click.command()
@click.argument("uri")
@click.argument("to")
@click.option(
    "--what",
    type=click.Choice(["log", "changes", "versions", "state"]),
    default="log",
    show_default=True,
    help="One row an entry, a change with what was before it, a version, or a live key.",
)
@click.option("--at", type=Moment(), help="Up to this seq or time; a state as of it. Without it, the newest.")
@click.option("--partition-by", type=click.Choice(["bucket", "day"]), help="A folder for each.")
@click.option("--bucket", help="Only rows of this bucket.")
@click.option("--prefix", help="Only rows whose key begins with this.")
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(list(KIND_CODES)),
    multiple=True,
    metavar="KIND",
    help="Of the log: only entries of this kind. May be repeated.",
)
@click.option(
    "--column", "columns", multiple=True, metavar="NAME", help="Of the log: this column. May be repeated."
)
@click.option(
    "--compression", type=click.Choice(["snappy", "zstd", "none"]), default="snappy", show_default=True
)
@spark_options
@json_option
@click.pass_context
def export(
    ctx: click.Context, uri: str, to: str, what: str, at: int | datetime | None, partition_by: str | None,
    bucket: str | None, prefix: str | None, kinds: tuple[str, ...], columns: tuple[str, ...],
    compression: str, master: str | None, settings: tuple[tuple[str, str], ...], as_json: bool,
) -> None:  # fmt: skip
    """Export the archive at URI as Parquet, into the folder or the URI of a store TO, which is for this
    export alone.

    Called again, it finishes what was stopped, and exports what has come since: each row is there once.
    Readers may take all files while _SUCCESS is there. Run one call at a time.
    """
    with opened_session(ctx, master, settings) as spark:
        from lowwater.spark.export import export_parquet

        with progress_bars() as progress:
            done = export_parquet(
                spark,
                uri,
                to,
                what=what,  # type: ignore[arg-type]
                at=at,
                partition_by=partition_by,  # type: ignore[arg-type]
                bucket=bucket,
                prefix=prefix,
                kinds=kinds or None,
                columns=columns or None,
                compression=compression,
                options=store_options(ctx, uri),
                to_options=store_options(ctx, to),
                progress=progress,
            )
    if as_json:
        print_json(done._asdict())
    elif done.seq_first > done.seq_last:
        click.echo(f"nothing is new: {done.to} has all up to seq {done.seq_last}")
    else:
        seqs = (
            f"as of seq {done.seq_last}" if what == "state" else f"of seq {done.seq_first} to {done.seq_last}"
        )
        click.echo(f"{done.to} has {what} {seqs} now")
        click.echo(f"  {number(done.rows)} rows in {number(done.files)} files, {size(done.bytes)}")
