"""`lowwater.open`: a directory becomes a database.

Always true: the log's lock is taken first and let go last, so pages and log belong to one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry

from lowwater.engine.checkpoint.checkpoints import Checkpoints
from lowwater.engine.database.core import ColdOf
from lowwater.engine.database.database import Database, EngineOptions, open_database
from lowwater.engine.database.origin import require_restored
from lowwater.engine.database.redo import Progress
from lowwater.engine.database.upkeep import VersionPolicy
from lowwater.engine.format.entries import Writable
from lowwater.engine.log.directory import LOG_DIRECTORY, local_path, typed_errors
from lowwater.engine.log.log import Log, LogOptions, Seams, wanted_settings
from lowwater.engine.log.ownership import Owner, claim, require_owner
from lowwater.engine.log.recover import has_begun
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.engine.pages.pagestore import PageStore
from lowwater.engine.seams.real import RealFiles
from lowwater.engine.seams.seams import Files
from lowwater.engine.seams.swap import DATA, set_aside
from lowwater.engine.state.away import BlockSource
from lowwater.errors import Corrupt, LowwaterError, PagesDamaged
from lowwater.logging import get_logger

if TYPE_CHECKING:
    from lowwater.config import Config

_logger = get_logger("engine")

T = TypeVar("T")

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
    settings = configured(directory, config)
    return open_with(
        settings.path,
        log_options=settings.log_options,
        options=settings.options,
        log_directory=settings.log_directory,
        create=create,
        registry=registry,
        progress=progress,
    )


class Settings(NamedTuple):
    """A directory, and what the configuration says of it."""

    path: str
    log_options: LogOptions
    options: EngineOptions
    log_directory: str | None

    @property
    def log_path(self) -> str:
        """Where the log is, or will be."""
        return self.log_directory or f"{self.path}/{LOG_DIRECTORY}"


def configured(
    directory: str | os.PathLike[str], config: str | os.PathLike[str] | Mapping[str, Any] | Config | None
) -> Settings:
    from lowwater.config import Config  # pydantic takes longer to import than all the rest

    path = local_path(directory)
    loaded = Config.load(config)
    return Settings(
        path,
        LogOptions.from_config(loaded.wal),
        EngineOptions(
            pool_bytes_max=loaded.engine.pool_bytes_max,
            checkpoint_interval_s=loaded.engine.checkpoint_interval_s,
            versions=VersionPolicy(
                age_max_s=loaded.versions.age_max_s,
                seqs_max=loaded.versions.seqs_max,
                per_key_max=loaded.versions.per_key_max,
            ),
            checkpoint_entry_interval_s=loaded.engine.checkpoint_entry_interval_s,
            checkpoint_entry_bytes=loaded.engine.checkpoint_entry_bytes,
            checkpoint_entry_age_max_s=loaded.engine.checkpoint_entry_age_max_s,
            transaction_age_max_s=loaded.engine.transaction_age_max_s,
            disk_reserve_bytes=loaded.engine.disk_reserve_bytes,
        ),
        os.fspath(loaded.wal.dir) if loaded.wal.dir is not None else None,
    )


def open_with(
    path: str,
    *,
    log_options: LogOptions | None = None,
    options: EngineOptions | None = None,
    seams: Seams | None = None,
    store: PageStore | None = None,
    log_directory: str | None = None,
    create: bool | Writable = True,
    registry: CollectorRegistry | None = None,
    blocks: BlockSource | None = None,
    cold: ColdOf | None = None,
    progress: Progress | None = None,
) -> Database:
    """Open the database in `path`, with whatever a test, or a simulation, puts in place of its parts."""

    def begin(log: Log, pages: PageStore, found: Seams) -> Database:
        return open_database(
            log,
            pages,
            seams=found,
            options=options or EngineOptions(),
            checkpoints=Checkpoints(found.files, path, owned=True),
            blocks=blocks,
            cold=cold,
            progress=progress,
        )

    wanted = log_options or LogOptions()
    database = open_parts(
        path,
        begin,
        # A log that seals by age appends by itself, past the state.
        log_options=replace(wanted, segment_age_max_s=None),
        seams=seams,
        store=store,
        log_directory=log_directory,
        create=create,
        registry=registry,
        owner="embedded",
    )
    try:
        database.begin_upkeep(wanted)
        if wanted.segment_age_max_s is not None:
            database.seal_by_age(wanted.segment_age_max_s)
    except BaseException:
        database.close()
        raise
    return database


def open_parts(
    path: str,
    begin: Callable[[Log, PageStore, Seams], T],
    *,
    log_options: LogOptions | None,
    seams: Seams | None,
    store: PageStore | None,
    log_directory: str | None,
    create: bool | Writable | None,
    registry: CollectorRegistry | None,
    owner: Owner,
) -> T:
    """Open the log and the pages, and give them to `begin`, whose they are unless it raises. `owner` is who
    orders the entries. `create` is that of `Log.open`."""
    seams = seams or Seams(files=RealFiles(), owner=f"process {os.getpid()}")
    log_directory = log_directory or f"{path}/{LOG_DIRECTORY}"
    require_restored(seams.files, path)
    if store is None:
        require_log_of_pages(seams.files, path, log_directory)
    require_owner(seams.files, log_directory, owner)
    log = Log.open(
        log_directory,
        options=log_options or LogOptions(),
        registry=registry,
        seams=seams,
        create=create,
    )
    try:
        claim(seams.files, log_directory, owner)
        if owner == "fed" and not log.chain.is_empty:
            _tell_of_unused(log, log_options)
        if store is None:
            store = _open_pages(seams.files, path, log)
        try:
            return begin(log, store, seams)
        except BaseException:
            store.close()
            raise
    except BaseException:
        log.close()
        raise


def require_log_of_pages(files: Files, path: str, log_directory: str) -> None:
    """Raises where pages are here, and no log: a new one would not be theirs."""
    pages = f"{path}/{PAGES_DIRECTORY}"
    if not has_begun(files, log_directory) and DATA in _names(files, pages) and not is_unused(pages):
        raise Corrupt(
            "there are pages in this directory, and their log is gone",
            path=log_directory,
            hint="name its place as wal.dir if it is elsewhere, bring it back, or restore the archive into "
            "a new directory: `lowwater restore URI DIR`",
        )


def is_unused(pages: str) -> bool:
    """Whether there is a page store to which nothing was ever written: opening makes one before there is an
    entry."""
    try:
        store = LmdbPages.open(pages, read_only=True)
    except LowwaterError:
        return False
    try:
        return not store.read_meta() and next(store.page_keys(), None) is None
    finally:
        store.close()


def _names(files: Files, directory: str) -> list[str]:
    with typed_errors(directory, "look into the directory"):
        try:
            return files.list(directory)
        except FileNotFoundError:
            return []


def _tell_of_unused(log: Log, options: LogOptions | None) -> None:
    """Who is fed changes no setting: an entry that nobody has ordered would be in no other replica."""
    change = None if options is None else wanted_settings(log.chain, options)
    if change is not None:
        _logger.warning(
            "a log that is fed keeps its settings, the configured ones are not used",
            path=log.directory,
            configured=change.body,
        )


def _open_pages(files: Files, path: str, log: Log) -> PageStore:
    """The pages of a directory. Those that are damaged give way to none where the log, being whole, has
    everything that they had: nothing is deleted."""
    pages = f"{path}/{PAGES_DIRECTORY}"
    try:
        return LmdbPages.open(pages)
    except PagesDamaged as error:
        if log.creation is None:
            raise
        _logger.warning(
            "the pages are damaged, and are made again from the log",
            error=str(error),
            kept_as=set_aside(files, pages),
        )
    return LmdbPages.open(pages)
