"""`lowwater rebuild-pages`: pages that were lost, or are damaged, from the log and the archive."""

from __future__ import annotations

import click

from lowwater.cli.output import LocalPath, end_on_sigterm, json_option, print_json
from lowwater.recovery.rebuild import rebuild_pages as rebuild


@click.command("rebuild-pages")
@click.argument("path", type=LocalPath())
@click.option("--tier", help="The archive; without it, what the configuration says, or the directory.")
@json_option
@click.pass_context
def rebuild_pages(ctx: click.Context, path: str, *, tier: str | None, as_json: bool) -> None:
    """Make the pages of the database in PATH again: all of what they hold is in the log and its archive.

    Where the log here begins with its first entry, nothing else is needed. Otherwise pages become references
    to the newest checkpoint of the archive, above which the log is applied. What of that log is no longer
    here is brought back first. The next opening does the rest.

    The directory must not be open elsewhere. Nothing is deleted: pages that are there are kept beside.
    """
    end_on_sigterm(ctx)
    done = rebuild(path, tier=tier, config=ctx.find_root().obj)
    if as_json:
        print_json(done._asdict())
        return
    if done.kept_as is not None:
        click.echo(f"the pages that were there are {done.kept_as} now")
    if done.segments_fetched:
        click.echo(f"{done.segments_fetched:,} segments of the log came back from {done.uri}")
    if done.checkpoint_seq:
        click.echo(
            f"{done.pages:,} pages come from the checkpoint of seq {done.checkpoint_seq:,} in {done.uri}"
        )
    click.echo(
        "the next opening applies the log that is above it"
        if done.checkpoint_seq
        else "the next opening makes all pages from the log"
    )
