"""`lowwater.open`: a directory becomes a database.

Always true: the log's lock is taken first and let go last, so pages and log belong to one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from lowwater.engine.database import Database, EngineOptions, open_database
from lowwater.engine.lmdb_store import LmdbPages
from lowwater.engine.log import Log, LogOptions, Seams
from lowwater.engine.pagestore import PageStore
from lowwater.engine.real import RealFiles
from lowwater.engine.replay import Progress
from lowwater.errors import InputError

if TYPE_CHECKING:
    from lowwater.config import Config

LOG_DIRECTORY = "wal"
PAGES_DIRECTORY = "pages"


def open_embedded(
    directory: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
    create: bool = True,
    registry: CollectorRegistry | None = None,
    progress: Progress | None = None,
) -> Database:
    """Open the database in `directory`, or make one there.

    `config` is a TOML file, a mapping or a `Config`; `create=False` refuses a directory without a database.
    `progress` is told how far recovery is: (the seq applied, the last one).
    """
    from lowwater.config import Config  # pydantic takes longer to import than all the rest

    path = os.fspath(directory) if isinstance(directory, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise InputError(f"{directory!r} is no directory", hint="give the path of a directory as text")
    loaded = Config.load(config)
    return open_with(
        path,
        log_options=LogOptions.from_config(loaded.wal),
        options=EngineOptions(
            pool_bytes_max=loaded.engine.pool_bytes_max,
            checkpoint_interval_s=loaded.engine.checkpoint_interval_s,
        ),
        log_directory=os.fspath(loaded.wal.dir) if loaded.wal.dir is not None else None,
        create=create,
        registry=registry,
        progress=progress,
    )


def open_with(
    path: str,
    *,
    log_options: LogOptions | None = None,
    options: EngineOptions | None = None,
    seams: Seams | None = None,
    store: PageStore | None = None,
    log_directory: str | None = None,
    create: bool = True,
    registry: CollectorRegistry | None = None,
    progress: Progress | None = None,
) -> Database:
    """The same with everything that a test, or a simulation, puts in its place."""
    seams = seams or Seams(files=RealFiles(), owner=f"process {os.getpid()}")
    log = Log.open(
        log_directory or f"{path}/{LOG_DIRECTORY}",
        options=log_options or LogOptions(),
        registry=registry,
        seams=seams,
        create=create,
    )
    try:
        if store is None:
            store = LmdbPages.open(f"{path}/{PAGES_DIRECTORY}")
        try:
            return open_database(
                log, store, seams=seams, options=options or EngineOptions(), progress=progress
            )
        except BaseException:
            store.close()
            raise
    except BaseException:
        log.close()
        raise
