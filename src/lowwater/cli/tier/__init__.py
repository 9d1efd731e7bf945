"""`lowwater tier`: looking into an archive."""

from __future__ import annotations

import click

from lowwater.cli.output import end_on_sigterm
from lowwater.cli.tier.dump import dump
from lowwater.cli.tier.ls import ls
from lowwater.cli.tier.status import status
from lowwater.cli.tier.verify import verify


@click.group()
@click.pass_context
def tier(ctx: click.Context) -> None:
    """Look into an archive: how far it goes, what is in it, whether a part of it is sound.

    An archive is given by its URI (s3://bucket/prefix, gcs://, azblob://, shared_fs:///path, a folder). None
    of these commands writes to it. `lowwater scrub` looks at all of it.

    They exit with 0 when all is well, 65 when data is damaged or missing, 75 when the store does not answer,
    77 when it refuses this, and 2 when the call was wrong.
    """
    end_on_sigterm(ctx)


for _command in (status, ls, dump, verify):
    tier.add_command(_command)
