"""What the commands on a database share: opening it, and where its log stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

import lowwater
from lowwater.cli.output import end_on_sigterm
from lowwater.config import Config
from lowwater.engine.database import Database
from lowwater.engine.opening import LOG_DIRECTORY
from lowwater.errors import NotFound


@contextmanager
def opened(ctx: click.Context, path: str, *, create: bool = False) -> Iterator[Database]:
    """The database in a directory, with the configuration that the command line was given."""
    end_on_sigterm(ctx)
    try:
        db = lowwater.open(path, config=ctx.find_root().obj, create=create)
    except NotFound as error:
        if create:
            raise
        raise NotFound("there is no database here", path=path, hint="check the path") from error
    with db:
        yield db


def log_directory(ctx: click.Context, path: str) -> str:
    configured = Config.load(ctx.find_root().obj).wal.dir
    return f"{path}/{LOG_DIRECTORY}" if configured is None else str(configured)
