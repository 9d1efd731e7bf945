"""`lowwater checkpoints`: the checkpoints that lie in a database's directory."""

from __future__ import annotations

from typing import Any

import click

from lowwater.cli.database.opened import log_directory, opened_to_write
from lowwater.cli.log.dump import Seq
from lowwater.cli.output import (
    LocalPath,
    json_option,
    new_table,
    number,
    print_json,
    print_table,
    size,
    time,
    values_option,
)
from lowwater.cli.rows import print_rows
from lowwater.engine.checkpoint.checkpoints import Checkpoints, StoredCheckpoint
from lowwater.engine.log.check import require_log
from lowwater.engine.seams.real import RealFiles
from lowwater.errors import InputError, NotFound


@click.command()
@click.argument("path", type=LocalPath())
@click.option("--make", is_flag=True, help="Make one first, of what is there now.")
@click.option("--rows", "with_rows", is_flag=True, help="Print the rows of the newest one, a line each.")
@click.option("--seq", type=Seq(), help="With --rows: of the one of this seq.")
@values_option
@json_option
@click.pass_context
def checkpoints(
    ctx: click.Context, path: str, make: bool, with_rows: bool, seq: int | None, values: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """List the checkpoints of a database, the newest first: seq, time, size and root.

    With --rows it prints what a checkpoint holds: each key with its seq, its time and its value. For a large
    value it prints where the log has it. Every hash on the way is compared. With --json each row is a line.

    The directory may be open elsewhere; nothing is changed. With --make it must not be open elsewhere, and
    one more checkpoint is made.

    `lowwater check` verifies every byte of them.
    """
    if not with_rows and (seq is not None or values is not None):
        raise InputError("--seq and --values are for rows", hint="give --rows too")
    if make:
        with opened_to_write(ctx, path) as db:
            db.checkpoint()
    require_log(RealFiles(), log_directory(ctx, path))
    found = Checkpoints(RealFiles(), path).complete
    if with_rows:
        print_rows(_chosen(found, path, seq).rows(), values=values, as_json=as_json)
    elif as_json:
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


def _chosen(found: list[StoredCheckpoint], path: str, seq: int | None) -> StoredCheckpoint:
    chosen = next((each for each in found if seq in (None, each.seq)), None)
    if chosen is None:
        what = "no checkpoint" if seq is None else f"no checkpoint of seq {seq}"
        raise NotFound(f"there is {what} here", path=path, hint="see which there are: `lowwater checkpoints`")
    return chosen


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
