"""`lowwater compact-local`: the page file without its free room."""

from __future__ import annotations

import os

import click

from lowwater.cli.database.opened import log_directory
from lowwater.cli.output import LocalPath, end_on_sigterm, json_option, print_json, size
from lowwater.engine.database.opening import PAGES_DIRECTORY
from lowwater.engine.log.check import require_log
from lowwater.engine.pages.compact import Room, compact, room_of
from lowwater.engine.seams.real import RealFiles


@click.command("compact-local")
@click.argument("path", type=LocalPath())
@click.option("--yes", is_flag=True, help="Do it. Without this, say what there is to gain.")
@json_option
@click.pass_context
def compact_local(ctx: click.Context, path: str, yes: bool, as_json: bool) -> None:
    """Write the file with all pages again without its free room, and give that room back to the disk.

    The copy is read back and compared before it takes the place of the file, in a step that no crash halves.
    Meanwhile the disk has to have room for both. The log stays as it is.

    With --yes the directory must not be open elsewhere. Without it nothing is changed.
    """
    end_on_sigterm(ctx)
    files = RealFiles()
    log = log_directory(ctx, path)
    require_log(files, log)
    pages = f"{path}/{PAGES_DIRECTORY}"
    after: Room | None = None
    if yes:
        before, after = compact(files, pages, log, f"compact-local, process {os.getpid()}")
    else:
        before = room_of(pages)
    if as_json:
        print_json(
            {
                "path": path,
                "pages": before.pages,
                "before_bytes": before.size_bytes,
                "used_bytes": before.used_bytes,
                "after_bytes": None if after is None else after.size_bytes,
                "written": yes,
            }
        )
    elif after is not None:
        click.echo(f"{before.pages:,} pages: {size(before.size_bytes)} before, {size(after.size_bytes)} now")
    else:
        used = size(before.used_bytes)
        click.echo(f"{before.pages:,} pages: {size(before.size_bytes)}, of which {used} are in use")
        click.echo(f"nothing was changed: --yes writes them again, and needs {used} more meanwhile")
