"""What the commands on a database share: opening it, and where its log stands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import click

import lowwater
from lowwater.cli.output import end_on_sigterm
from lowwater.config import Config
from lowwater.engine.database.database import Database
from lowwater.engine.database.origin import ORIGIN, RESTORING, log_directory_of, read_origin
from lowwater.engine.database.reads import Reads
from lowwater.engine.log.directory import typed_errors
from lowwater.engine.log.ownership import read_owner
from lowwater.engine.log.recover import has_begun
from lowwater.engine.seams.real import RealFiles
from lowwater.errors import NotFound
from lowwater.recovery.restored_opening import open_to_read, require_log_of, with_origin
from lowwater.tiering.open_store import open_store

_MISSING = "check the path; `lowwater put --create` makes a database, and the bucket"


@contextmanager
def opened_to_write(
    ctx: click.Context, path: str, *, create: bool = False, config: Config | None = None
) -> Iterator[Database]:
    """Open the database in a directory, with the configuration of the command line, or with another one."""
    end_on_sigterm(ctx)
    try:
        db = lowwater.open(path, config=config or ctx.find_root().obj, create=create)
    except NotFound as error:
        # Of what was restored, or was to be, the error says more.
        if create or any(os.path.exists(f"{path}/{name}") for name in (ORIGIN, RESTORING)):
            raise
        raise NotFound("there is no database here", path=path, hint=_MISSING) from error
    with db:
        yield db


@contextmanager
def opened(ctx: click.Context, path: str) -> Iterator[Reads]:
    """Open a database to read, also one that an orchestrator feeds: to its log nothing is appended."""
    origin = read_origin(RealFiles(), path)
    if origin is not None and not origin.is_clone and not origin.is_continued:
        # To open it as a database is to go on with the archive, and to fence whoever writes there.
        config = Config.load(ctx.find_root().obj)
        if config.tier.store_uri() is None:
            config = with_origin(config, origin)
        directory = log_directory(ctx, path)
        require_log_of(origin, path, directory)
        end_on_sigterm(ctx)
        store = open_store(config=config.tier)
        with open_to_read(path, store, log_directory=directory) as core:
            yield core
        return
    directory = log_directory(ctx, path)
    with typed_errors(directory, "open the log"):
        owner = read_owner(RealFiles(), directory)
    if owner == "fed":
        end_on_sigterm(ctx)
        with lowwater.Engine(path, config=ctx.find_root().obj) as engine:
            yield engine
    else:
        # Where there is no log, the error says how the configuration was named.
        is_here = has_begun(RealFiles(), directory)
        unset = _without_settings(Config.load(ctx.find_root().obj)) if is_here else None
        with opened_to_write(ctx, path, config=unset) as db:
            yield db


def _without_settings(config: Config) -> Config:
    """Who only reads changes no setting of a log."""
    given = config.model_dump(exclude_unset=True)
    for key in ("rotate_max_bytes", "compression", "before_images"):
        given.get("wal", {}).pop(key, None)
    return Config.load(Config(**given))


def log_directory(ctx: click.Context, path: str) -> str:
    return log_directory_of(RealFiles(), path, Config.load(ctx.find_root().obj).wal.dir)
