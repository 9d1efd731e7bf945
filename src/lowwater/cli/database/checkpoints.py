"""`lowwater checkpoints`: the checkpoints that lie in a database's directory."""

from __future__ import annotations

from typing import Any

import click

from lowwater.cli.database.opened import log_directory, opened_to_write
from lowwater.cli.output import LocalPath, json_option, new_table, number, print_json, print_table, size, time
from lowwater.engine.check import require_log
from lowwater.engine.checkpoints import Checkpoints, StoredCheckpoint
from lowwater.engine.real import RealFiles


@click.command()
@click.argument("path", type=LocalPath())
@click.option("--make", is_flag=True, help="Make one first, of what is there now.")
@json_option
@click.pass_context
def checkpoints(ctx: click.Context, path: str, make: bool, as_json: bool) -> None:
    """List the checkpoints of a database, the newest first: seq, time, size and root.

    The directory may be open elsewhere; nothing is changed. With --make it must not be, and one more is made.

    `lowwater check` verifies every byte of them.
    """
    if make:
        with opened_to_write(ctx, path) as db:
            db.checkpoint()
    require_log(RealFiles(), log_directory(ctx, path))
    found = Checkpoints(RealFiles(), path).complete
    if as_json:
        print_json({"path": path, "checkpoints": [_as_json(each) for each in found]})
    elif not found:
        click.echo("no checkpoints")
    else:
        table = new_table("seq", "time", "keys", "size", "root", right=("seq", "keys", "size"))
        for each in found:
            index = each.index
            table.add_row(
                number(index.seq),
                time(index.time_us, timespec="seconds"),
                number(index.row_count),
                size(sum(index.packs.values())),
                each.root,
            )
        print_table(table)


def _as_json(stored: StoredCheckpoint) -> dict[str, Any]:
    index = stored.index
    return {
        "id": stored.id,
        "seq": index.seq,
        "time_us": index.time_us,
        "root": stored.root,
        "control_hash": index.control_hash.hex(),
        "base_seq": index.base_seq,
        "rows": index.row_count,
        "blocks": index.block_count,
        "packs": len(index.packs),
        "pack_bytes": sum(index.packs.values()),
        "path": stored.path,
    }
