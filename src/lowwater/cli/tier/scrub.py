"""`lowwater scrub`: whether an archive has all that it should have, and what to do where it has not."""

from __future__ import annotations

import click

from lowwater.cli.output import end_on_sigterm, json_option
from lowwater.cli.tier.opened import opened_store, run_scrub
from lowwater.tiering.scrub import Scrub


@click.command()
@click.argument("uri")
@click.option("--deep", is_flag=True, help="Read and verify every byte, instead of names, sizes and ends.")
@json_option
@click.pass_context
def scrub(ctx: click.Context, uri: str, deep: bool, as_json: bool) -> None:
    """Compare an archive with what its newest manifest says that it has: list, catalogue, chain and sizes,
    and with --deep the hash of every byte. Nothing is changed, and a shipper may be at work.

    Each finding names an object and says what to do; docs/operating/archives.md has them all. The exit code
    is 0 where there is no error, 65 where data is damaged or missing, 75 where the store did not answer, and
    77 where it refuses this.
    """
    end_on_sigterm(ctx)
    with opened_store(ctx, uri) as store:
        run_scrub(ctx, store, Scrub(store, deep=deep), as_json=as_json)
