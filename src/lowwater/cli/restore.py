"""`lowwater restore`: a database from its archive alone."""

from __future__ import annotations

from datetime import datetime

import click

import lowwater
from lowwater.cli.log.dump import Moment
from lowwater.cli.output import LocalPath, end_on_sigterm, json_option, print_json, progress_bars, size, time
from lowwater.recovery.restore import Restored
from lowwater.recovery.restore_plan import RestorePlan, plan

WHAT = {
    "references": "pages, as references",
    "log": "the log above them",
    "pages": "pages",
    "values": "the log with large values",
}


@click.command()
@click.argument("uri")
@click.argument("directory", type=LocalPath())
@click.option("--at", type=Moment(), help="As of this seq or time; without it, the newest that was shipped.")
@click.option("--clone", is_flag=True, help="A database of its own, also of the newest.")
@click.option("--full", is_flag=True, help="Wait until all of it is here, and verified.")
@click.option("--plan", "only_plan", is_flag=True, help="Say what there is to fetch, and write nothing.")
@json_option
@click.pass_context
def restore(
    ctx: click.Context,
    uri: str,
    directory: str,
    *,
    at: int | datetime | None,
    clone: bool,
    full: bool,
    only_plan: bool,
    as_json: bool,
) -> None:
    """Make a database in DIRECTORY, which has to be new, from the archive at URI.

    Without --at and --clone the database goes on with the archive: opening it to write claims the archive,
    and whoever wrote there before is refused from then on. Make sure that nobody does.

    The database can be opened as soon as this ends, and reads what is not here yet from the archive. A
    restore that was stopped goes on when the same is called again.
    """
    end_on_sigterm(ctx)
    config = ctx.find_root().obj
    if only_plan:
        _print_plan(plan(uri, at, config=config), as_json=as_json)
        return
    with progress_bars(WHAT) as progress:
        done = lowwater.restore(uri, directory, at, clone=clone, full=full, config=config, progress=progress)
    _print_done(done, as_json=as_json)


def _print_plan(found: RestorePlan, *, as_json: bool) -> None:
    if as_json:
        print_json(found._asdict())
        return
    base = f"the checkpoint of seq {found.checkpoint_seq:,}" if found.checkpoint_seq else "the log alone"
    click.echo(f"a restore of {found.uri} to seq {found.seq:,}, from {base}")
    click.echo(
        f"  before the first read: at most {size(found.bytes)} of {found.objects:,} objects, "
        f"about {found.requests:,} requests"
    )
    click.echo(f"  all of it: at most {size(found.full_bytes)} of {found.full_objects:,} objects")
    if found.values_objects_max:
        older = f"{size(found.values_bytes_max)} of {found.values_objects_max:,} older segments"
        click.echo(f"  and, where large values lie in them: at most {older}")
    click.echo(f"  {found.missing}")
    click.echo("nothing was written")


def _print_done(done: Restored, *, as_json: bool) -> None:
    if as_json:
        print_json({**done._asdict(), "cluster_id": done.cluster_id.hex()})
        return
    kind = "a clone" if done.is_clone else "the database"
    click.echo(f"{done.path} is {kind} as of seq {done.seq:,}, {time(done.time_us)}")
    if done.root is not None:
        click.echo(f"  root {done.root}")
    click.echo(f"  {size(done.bytes)} came in {done.requests:,} requests")
    if done.pages_away:
        click.echo(
            f"  {done.pages_away:,} pages come from {done.uri} when they are needed, or while it is open"
        )
    click.echo(f"  {done.missing}")
