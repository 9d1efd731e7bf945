"""`lowwater log`: looking into the files of a log, and repairing them into a copy."""

from __future__ import annotations

import click

from lowwater.cli.log.dump import dump
from lowwater.cli.log.inspect import inspect
from lowwater.cli.log.repair import repair
from lowwater.cli.log.verify import verify
from lowwater.cli.output import end_on_sigterm


@click.group()
@click.pass_context
def log(ctx: click.Context) -> None:
    """Look into a log, verify it, repair it into a copy.

    All of these take a log directory or a single segment (.log or .log.zst); all but repair also the URI of
    an archive, or of a segment in it. None changes what it reads, and all but repair work while another
    process has the log open.

    They exit with 0 when all is well, 65 when data is damaged or missing, 74 when the disk failed, 75 when
    the disk is full or the store of an archive does not answer, 77 when something may not be read or written,
    and 2 when the call was wrong.
    """
    end_on_sigterm(ctx)


for _command in (inspect, dump, verify, repair):
    log.add_command(_command)
