"""Pages that were lost, or are damaged, made again: of the log alone, or of the archive and the log.

Always true:
  - nothing is deleted: pages that were there keep lying beside, under another name;
  - the archive is not changed, and believed only as far as it is the same history as the log that is here:
    segments of both have the same hashes, each of which rests on all before it;
  - pages get their name once they are whole. What ends this early leaves none, or those that were there, and
    calling it again goes on.

| | the log's beginning | the archive's checkpoint | decision |
|---|---|---|---|
| A | here | | no pages: the next opening builds them |
| B | purged | a checkpoint | references to its blocks, above which the log is applied |
| C | purged | none, or one below what is here | the same, once the segments between came back |
| D | purged | no archive, or of another history | refuse |
"""

from __future__ import annotations

import os
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from lowwater.engine.database.opening import PAGES_DIRECTORY, configured, is_unused
from lowwater.engine.database.origin import read_origin, require_restored
from lowwater.engine.log.check import require_log
from lowwater.engine.log.directory import typed_errors
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.log.wal import lock_directory
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.engine.seams.seams import Files
from lowwater.engine.seams.swap import drop, finish_swap, set_aside
from lowwater.engine.state.catalogue import Catalogue
from lowwater.errors import ArchivedOnly, Corrupt
from lowwater.recovery import segment_files as segments
from lowwater.recovery.arguments import ConfigSource, real_seams, store_of
from lowwater.recovery.point import Point, Reached, point_of, reach
from lowwater.recovery.reference_pages import install_checkpoint
from lowwater.recovery.restored_opening import with_origin
from lowwater.tiering.archive import open_archive
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.store import Store

if TYPE_CHECKING:
    from lowwater.config import Config

REBUILDING = ".rebuilding"


class Rebuilt(NamedTuple):
    """What was done. `kept_as` is where the pages lie that were there, and `checkpoint_seq` 0 where all of
    them are made of the log when the database is opened."""

    path: str
    kept_as: str | None
    checkpoint_seq: int
    pages: int
    segments_fetched: int
    uri: str | None


def rebuild_pages(
    directory: str | os.PathLike[str],
    *,
    tier: str | None = None,
    config: ConfigSource | Config = None,
) -> Rebuilt:
    """Make the pages of the database in `directory` again, which nobody may have open. `tier` is the URI of
    its archive; without it, what the configuration says, or what the directory was restored from."""
    from lowwater.config import Config  # pydantic takes longer to import than all the rest

    loaded = Config.load(config)
    settings = configured(directory, loaded)
    seams = real_seams()
    origin = read_origin(seams.files, settings.path)
    if tier is None and loaded.tier.store_uri() is None and origin is not None:
        loaded = with_origin(loaded, origin)
    uri = tier or loaded.tier.store_uri()
    store = None if uri is None else store_of(uri, loaded)[0]
    try:
        at_once = loaded.shipping.uploads_at_once
        return rebuild_with(settings.path, settings.log_path, store, seams, fetched_at_once=at_once)
    finally:
        if store is not None:
            store.close()


def rebuild_with(
    path: str, log_directory: str, store: Store | None, seams: Seams, *, fetched_at_once: int = 1
) -> Rebuilt:
    """Make the pages of a database again, given the store itself, which stays the caller's. With
    `fetched_at_once` above 1, segments are fetched by threads."""
    files = seams.files
    require_restored(files, path)
    require_log(files, log_directory)
    plan = None
    with Log.open(log_directory, options=LogOptions(), seams=seams, create=False) as log:
        if log.creation is None:
            if store is None:
                raise ArchivedOnly(
                    "the log's beginning was shipped and purged, and pages are made of all of it",
                    path=log_directory,
                    hint="name the archive: --tier URI, or the configuration",
                )
            plan = _plan(log, store, seams)
        seq_first = log.seq_before_first + 1
    lock = lock_directory(files, log_directory, seams.owner)
    try:
        with typed_errors(path, "make the pages again"):
            return _rebuild(files, path, log_directory, seq_first, store, plan, fetched_at_once)
    finally:
        lock.close()


class _Plan(NamedTuple):
    reached: Reached
    point: Point
    fetcher: Fetcher


def _plan(log: Log, store: Store, seams: Seams) -> _Plan:
    reached = reach(open_archive(store))
    agreed = _agreed(reached.all, log)
    if not agreed:
        raise Corrupt(
            f"what is at {store.uri} is not the history of this log",
            path=log.directory,
            hint="name the archive that this log was shipped to",
        )
    fetcher = Fetcher(store, clock=seams.clock)
    return _Plan(reached, point_of(reached, store, fetcher, agreed), fetcher)


def _agreed(archive: Catalogue, log: Log) -> int:
    """The last seq up to which the log that is here is that of the archive; 0 where it is another one."""
    with log.wal.lock:
        here = {each.seq_first: each for each in log.wal.store.segments}
        current = log.wal.store.current
    headers = [each.header for each in here.values()]
    if current is not None:
        headers.append(current.header)
    first = min(headers, key=attrgetter("seq_first"))
    agreed = 0
    for segment in archive.segments_from(first.seq_before):
        if (segment.last, segment.hash) == (first.seq_before, first.hash_before):
            agreed = segment.last
        mine = here.get(segment.first)
        if mine is not None:
            if (mine.seq_last, mine.segment_hash) != (segment.last, segment.hash):
                break
            agreed = segment.last
    return min(agreed, log.seq_durable)


def _rebuild(
    files: Files,
    path: str,
    log_directory: str,
    seq_first: int,
    store: Store | None,
    plan: _Plan | None,
    fetched_at_once: int,
) -> Rebuilt:
    pages = f"{path}/{PAGES_DIRECTORY}"
    made = pages + REBUILDING
    finish_swap(files, os.path.realpath(pages))
    drop(files, made)
    fetched = count = 0
    checkpoint = None
    if plan is not None:
        assert store is not None
        missing = [each for each in plan.point.segments if each.last < seq_first]
        # The newest first, so that the log has no gap, whenever this ends.
        segments.begin(files, log_directory)
        segments.fetch_all(
            store, files, log_directory, reversed(missing), lambda _: None, at_once=fetched_at_once
        )
        fetched = len(missing)
        checkpoint = plan.point.checkpoint
        if checkpoint is not None:
            count = _install(made, plan)
    kept_as = None
    if is_unused(pages):
        drop(files, pages)
    elif PAGES_DIRECTORY in files.list(path):
        kept_as = set_aside(files, pages)
    if checkpoint is not None:
        files.rename(made, pages)
        files.sync_directory(path)
    return Rebuilt(
        path=path,
        kept_as=kept_as,
        checkpoint_seq=0 if checkpoint is None else checkpoint.seq,
        pages=count,
        segments_fetched=fetched,
        uri=None if plan is None or store is None else store.uri,
    )


def _install(path: str, plan: _Plan) -> int:
    """A page store of references to the blocks of the checkpoint; how many there are."""
    assert plan.point.checkpoint is not None
    store = LmdbPages.open(path)
    try:
        return install_checkpoint(
            store, plan.reached, plan.fetcher, plan.point.checkpoint, lambda _done, _total: None
        )
    finally:
        store.close()
