"""`lowwater.check`: whether a database, or an archive, is as it should be.

Always true: nothing is changed; findings come as they are found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lowwater.engine.database.check_database import check_database
from lowwater.engine.database.origin import log_directory_of
from lowwater.engine.log.check import Finding
from lowwater.engine.log.directory import local_path
from lowwater.engine.seams.real import RealFiles
from lowwater.tiering.names import CLUSTER, MANIFESTS
from lowwater.tiering.open_store import open_store
from lowwater.tiering.scrub import Scrub
from lowwater.tiering.store import Store

if TYPE_CHECKING:
    from lowwater.config import TierConfig

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | None


def check(path_or_uri: str | os.PathLike[str], *, config: ConfigSource = None) -> Iterator[Finding]:
    """Yield every finding about the database in a directory, or about an archive, and read every byte of it.
    An archive is given by its URI, or as the folder that it is in. Raise NotFound where there is neither.

    An error means that data cannot be trusted, or is gone. A warning means that something is there which
    should not be. A note is no fault."""
    from lowwater.config import Config  # pydantic takes longer to import than all the rest

    loaded = Config.load(config)
    place = path_or_uri if isinstance(path_or_uri, str) and "://" in path_or_uri else local_path(path_or_uri)
    if not is_archive(place):
        log = log_directory_of(RealFiles(), place, loaded.wal.dir)
        yield from check_database(RealFiles(), place, log)
        return
    store = open_to_read(place, loaded.tier)
    try:
        yield from Scrub(store, deep=True).findings()
    finally:
        store.close()


def is_archive(place: str) -> bool:
    """Whether this is the URI of a store, or a folder with an archive in it."""
    if "://" in place:
        return True
    return any(os.path.exists(f"{place}/{name}") for name in (CLUSTER, MANIFESTS))


def open_to_read(uri: str, config: TierConfig) -> Store:
    """Open a store for reading alone. The configuration's options are for its own URI."""
    return open_store(None if uri == config.store_uri() else uri, config=config, read_only=True)
