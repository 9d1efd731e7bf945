"""`lowwater spark verify`: `lowwater scrub`, done by Spark."""

from __future__ import annotations

import click

from lowwater.cli.output import json_option, progress_bars
from lowwater.cli.spark.opened import opened_session, spark_options, store_options
from lowwater.cli.tier.opened import opened_store, tell_scrub
from lowwater.tiering.scrub import Scrub


@click.command()
@click.argument("uri")
@click.option("--shallow", is_flag=True, help="Names, sizes and the ends of segments, not every byte.")
@spark_options
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    uri: str,
    shallow: bool,
    master: str | None,
    settings: tuple[tuple[str, str], ...],
    as_json: bool,
) -> None:
    """Audit the archive at URI: every byte of every object, on as many machines as Spark has.

    It finds, says and exits as `lowwater scrub --deep` does; docs/operating/archives.md has the findings.
    """
    with opened_store(ctx, uri) as store, opened_session(ctx, master, settings) as spark:
        from lowwater.spark.audit import look_in_spark

        with progress_bars() as progress:
            look = look_in_spark(spark, uri, store_options(ctx, uri), progress)
            scrub = Scrub(store, deep=not shallow, look=look)
            findings = list(scrub.findings())
        tell_scrub(ctx, store, scrub, findings, as_json=as_json)
