"""`lowwater.open` for directories that were restored, and for all others.

Always true:
  - what a restored directory lacks is read from the archive that it was made from. That is recorded there, so
    nobody has to name it again, but for its credentials;
  - a log that was restored to go on is in an epoch of its own before anything is appended: whoever went on
    with the archive meanwhile is seen, and this one stops with `Fenced`;
  - a clone writes nothing to the archive of its parent. It ships to one of its own, where one is named, and
    that is recorded before the first object is there.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from lowwater.engine.checkpoint.checkpoints import Checkpoints
from lowwater.engine.database.core import Core, EngineOptions
from lowwater.engine.database.database import Database
from lowwater.engine.database.opening import PAGES_DIRECTORY, configured, open_with
from lowwater.engine.database.origin import ORIGIN, Origin, log_directory_of, read_origin, write_origin
from lowwater.engine.database.reads import Reads
from lowwater.engine.database.redo import Progress
from lowwater.engine.database.space import kept_free_bytes
from lowwater.engine.database.tier import ShippingStatus
from lowwater.engine.format import format
from lowwater.engine.log.chain import seal_entry
from lowwater.engine.log.directory import LOG_DIRECTORY
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.log.recover import has_begun
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.engine.pages.pagestore import PageStore
from lowwater.engine.seams.real import RealFiles
from lowwater.engine.state.catalogue import (
    Catalogue,
    CheckpointDescriptor,
    Fork,
    SegmentDescriptor,
    fork_entry,
)
from lowwater.engine.state.meta import meta_of
from lowwater.errors import (
    DatabaseMissing,
    Fenced,
    InputError,
    InvalidConfig,
    LowwaterError,
    NotFound,
    PagesDamaged,
)
from lowwater.logging import get_logger
from lowwater.metrics import ColdMetrics, StoreMetrics
from lowwater.recovery.arguments import ConfigSource, place_options
from lowwater.recovery.missing import OnMissing, explain, half_restored, is_first, require_known, restore_here
from lowwater.recovery.warming import Warming
from lowwater.tiering import tiered_opening as opening
from lowwater.tiering.archive import open_archive
from lowwater.tiering.beginning import require_writable
from lowwater.tiering.block_cache import BlockCache
from lowwater.tiering.cold import ColdLog
from lowwater.tiering.cold_versions import ColdVersions
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.lineage import Lineage, OpenParent, parents_opener
from lowwater.tiering.measured_store import MeasuredStore
from lowwater.tiering.names import segment_name
from lowwater.tiering.objects import Parent
from lowwater.tiering.remote_checkpoint import read_objects
from lowwater.tiering.shipped_blocks import ArchivedBlocks
from lowwater.tiering.store import Store
from lowwater.tiering.store_uri import parse_uri
from lowwater.tiering.tiered_opening import CACHE_DIRECTORY, TierOptions

if TYPE_CHECKING:
    from lowwater.config import Config


_logger = get_logger("recovery")


class ParentTier:
    """Fulfils `Tier` for who only reads from an archive: what a clone, and a restore, has of its parent."""

    def __init__(
        self,
        path: str,
        store: Store,
        seams: Seams,
        *,
        cache_bytes_max: int | None = None,
        disk_reserve_bytes: int = 0,
        open_parent: OpenParent | None = None,
    ) -> None:
        store_metrics = StoreMetrics()
        measured = MeasuredStore(store, seams.clock, store_metrics)
        self._store = store = Lineage(measured, open_parent or parents_opener(store.uri))
        self._cache = cache = None
        if cache_bytes_max is not None:
            self._cache = cache = BlockCache(
                seams.files,
                f"{path}/{CACHE_DIRECTORY}",
                cache_bytes_max,
                kept_free_bytes=kept_free_bytes(disk_reserve_bytes),
            )
        metrics = ColdMetrics()
        self.fetcher = Fetcher(store, clock=seams.clock, cache=cache, metrics=metrics, runner=seams.runner)
        self.blocks = ArchivedBlocks(self.fetcher)
        self._metrics = (metrics, store_metrics)
        self._registry: CollectorRegistry | None = None

    def measure(self, registry: CollectorRegistry) -> None:
        """Show what it measures, until it is closed: a registry serves one database after the other."""
        self._registry = registry
        for each in self._metrics:
            registry.register(each)

    def cold(self, catalogue: Catalogue) -> ColdLog:
        return ColdLog(self.fetcher, catalogue, segment_name)

    @property
    def cache_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.bytes

    def older_versions(self, log: Log, catalogue: Catalogue) -> ColdVersions:
        cold = log.cold_source
        assert isinstance(cold, ColdLog), "what is attached was opened with the same store"
        return ColdVersions(self.fetcher, cold, catalogue, log=log)

    def ship(self, timeout_s: float | None) -> int:
        raise self._ships_nowhere()

    def status(self) -> ShippingStatus:
        raise self._ships_nowhere()

    def _ships_nowhere(self) -> InputError:
        return InputError(
            "this clone ships nothing: the archive that it was made from belongs to its parent",
            path=self._store.uri,
            hint="open it with tier=, and a prefix of its own",
        )

    @property
    def own_after(self) -> int:
        return format.SEQ_MAX

    def read_checkpoint(self, checkpoint: CheckpointDescriptor) -> tuple[bytes, Callable[[bytes], bytes]]:
        return read_objects(self._store, checkpoint)

    def require_shipped(self, segments: Sequence[SegmentDescriptor]) -> None:
        """Nothing is purged here that somebody else has not said to be shipped."""

    def checkpoints_needed(self) -> list[int]:
        return []

    def finish(self) -> None:
        """Nothing of it is shipped."""

    def make_room(self) -> bool:
        """Nothing here is a copy of what the archive has, but for the cache."""
        if self._cache is not None:
            self._cache.give_way()
        return False

    def stop(self) -> None:
        self.fetcher.close()

    def close(self) -> None:
        if self._registry is not None:
            for each in self._metrics:
                self._registry.unregister(each)
            self._registry = None
        self._store.close()


# ---------------------------------------------------------------------------- opening


def open_directory(
    directory: str | os.PathLike[str],
    *,
    tier: str | None = None,
    config: ConfigSource | Config = None,
    create: bool = True,
    on_missing: OnMissing = "refuse",
    registry: CollectorRegistry | None = None,
    progress: Progress | None = None,
) -> Database:
    """Open the database in `directory`, or make one there: `lowwater.open`.

    `tier` is the URI of the object store that its history goes to, as `s3://bucket/prefix`; without it, what
    the configuration says. `config` is a TOML file, a mapping or a `Config`. `create=False` refuses a
    directory without a database. `progress` is told how far recovery is: (the seq applied, the last one).

    Where there is no database in `directory`, the archive is asked before anything is made. If the archive
    has a history, the directory was lost, or is another one: this raises `DatabaseMissing`, with the command
    that restores it. `on_missing="restore"` restores what was shipped, and opens that; whoever else writes to
    the archive is fenced then. An archive that does not answer is an error, since nobody knows what it has.

    A directory that was restored knows its archive. It goes on with the archive, or, as a clone, reads from
    it.
    """
    from lowwater.config import Config

    require_known(on_missing)
    loaded = Config.load(config)

    def open_it() -> Database:
        return _open_directory(
            directory,
            loaded,
            tier=tier,
            create=create,
            on_missing=on_missing,
            source=config,
            registry=registry,
            progress=progress,
        )

    try:
        return open_it()
    except PagesDamaged as damaged:
        # Here, because it needs to know how to open an archive.
        from lowwater.recovery.rebuild import rebuild_pages

        try:
            done = rebuild_pages(directory, tier=tier, config=loaded)
        except LowwaterError as error:
            damaged.hint += f". That was tried: {error.message}; {error.hint}"
            raise damaged from error
        _logger.warning(
            "the pages are lost or damaged, and are made again",
            error=str(damaged),
            kept_as=done.kept_as,
            checkpoint_seq=done.checkpoint_seq,
            segments_fetched=done.segments_fetched,
        )
    return open_it()


def _open_directory(
    directory: str | os.PathLike[str],
    loaded: Config,
    *,
    tier: str | None,
    create: bool,
    on_missing: OnMissing,
    source: ConfigSource | Config,
    registry: CollectorRegistry | None,
    progress: Progress | None,
) -> Database:
    settings = configured(directory, loaded)
    named = tier or loaded.tier.store_uri()
    origin = read_origin(RealFiles(), settings.path)
    if origin is None:
        begun = half_restored(settings, loaded.tier, tier) if on_missing == "restore" else None
        if begun is not None:
            loaded = with_origin(loaded, begun) if named is None else loaded
        else:
            try:
                return opening.open_directory(
                    directory, tier=tier, config=loaded, create=create, registry=registry, progress=progress
                )
            except DatabaseMissing as error:
                explain(error, settings, tier, loaded.tier, source)
                if on_missing == "refuse" or not is_first(error, tier, loaded.tier):
                    raise
                require_writable(tier, loaded.tier)
        origin = restore_here(settings, tier or str(loaded.tier.store_uri()), loaded)
    loaded = with_origin(loaded, origin) if named is None else loaded
    uri = tier or loaded.tier.store_uri()
    assert uri is not None
    log_directory = log_directory_of(RealFiles(), settings.path, settings.log_directory)
    require_log_of(origin, settings.path, log_directory)
    place = parse_uri(uri, dict(loaded.tier.options) if uri == loaded.tier.store_uri() else {})
    stores = opening.open_stores(tier, loaded.tier)
    try:
        return open_restored(
            settings.path,
            origin,
            stores,
            TierOptions.from_config(loaded),
            log_options=settings.log_options,
            options=settings.options,
            log_directory=log_directory,
            registry=registry,
            progress=progress,
            open_parent=opening.opener_of(tier, loaded.tier),
            ships_options=place_options(place.options),
        )
    except LowwaterError as error:
        if named is None and not error.hint:
            error.hint = f"this directory was restored from {origin.uri}: name it with its options as tier="
        raise


def require_log_of(origin: Origin, path: str, log_directory: str) -> None:
    """Raises where the log of a directory that was restored is gone: nothing can go on with the rest."""
    if has_begun(RealFiles(), log_directory):
        return
    arguments = [origin.uri, "NEW", *(["--clone", "--at", str(origin.seq)] if origin.is_clone else [])]
    raise NotFound(
        "this directory was restored, and its log is gone",
        path=log_directory,
        hint=f"bring it back, or restore again: `{shlex.join(['lowwater', 'restore', *arguments])}`",
    )


def with_origin(config: Config, origin: Origin) -> Config:
    """The configuration with the archive that a directory was restored from, or, as a clone, ships to."""
    recorded = {"uri": origin.uri, "options": dict(origin.options)}
    if origin.ships_to:
        recorded = {"uri": origin.ships_to, "options": dict(origin.ships_options)}
    return config.model_copy(update={"tier": config.tier.model_copy(update=recorded)})


def open_restored(
    path: str,
    origin: Origin,
    stores: list[Store],
    tier_options: TierOptions | None = None,
    *,
    log_options: LogOptions | None = None,
    options: EngineOptions | None = None,
    seams: Seams | None = None,
    store: PageStore | None = None,
    log_directory: str | None = None,
    registry: CollectorRegistry | None = None,
    progress: Progress | None = None,
    open_parent: OpenParent | None = None,
    ships_options: Mapping[str, str] = {},
) -> Database:
    """Open a directory that was restored, with all the parts that a test, or a simulation, replaces. The
    stores are the database's from now on."""
    seams = seams or Seams(files=RealFiles(), owner=f"process {os.getpid()}")
    tier_options = tier_options or TierOptions()
    try:
        ships = not origin.is_clone or stores[0].uri != origin.uri
        if origin.is_clone and not ships and origin.ships_to:
            raise InvalidConfig(
                f"this clone ships to {origin.ships_to}, and {origin.uri} is its parent's archive",
                path=path,
                hint="leave the tier out",
            )
        if origin.is_clone and ships:
            origin = note_where_it_ships(path, origin, stores[0], seams, ships_options)
            cloned_from = Parent(origin.uri, dict(origin.options), origin.parent_id, origin.seq)
            shipping = replace(tier_options.shipping, parent=cloned_from)
            tier_options = replace(tier_options, shipping=shipping)
        elif not origin.is_clone and not origin.is_continued:
            origin = go_on(
                path, origin, stores[0], seams=seams, log_options=log_options, log_directory=log_directory
            )
    except BaseException:
        for each in stores:
            each.close()
        raise
    if ships:
        database = opening.open_tiered(
            path,
            stores,
            tier_options,
            log_options=log_options,
            options=options,
            seams=seams,
            store=store,
            log_directory=log_directory,
            create=False,
            registry=registry,
            progress=progress,
            open_parent=open_parent,
        )
    else:
        parent = ParentTier(
            path,
            stores[0],
            seams,
            cache_bytes_max=tier_options.cache_bytes_max,
            disk_reserve_bytes=(options or EngineOptions()).disk_reserve_bytes,
            open_parent=open_parent,
        )
        try:
            database = open_with(
                path,
                log_options=log_options,
                options=options,
                seams=seams,
                store=store,
                log_directory=log_directory,
                create=False,
                registry=registry,
                blocks=parent.blocks,
                cold=parent.cold,
                progress=progress,
            )
        except BaseException:
            parent.stop()
            parent.close()
            raise
        parent.measure(database.registry)
        database.attach_tier(parent)
    warm(database, path, origin, seams)
    return database


def note_where_it_ships(
    path: str, origin: Origin, store: Store, seams: Seams, options: Mapping[str, str]
) -> Origin:
    """Before a clone ships to a store of its own: what is purged here will be there."""
    noted = origin._replace(ships_to=store.uri, ships_options=dict(options))
    if noted != origin:
        write_origin(seams.files, path, ORIGIN, noted)
    return noted


def open_to_read(
    path: str,
    store: Store,
    *,
    seams: Seams | None = None,
    pages: PageStore | None = None,
    log_directory: str | None = None,
) -> Reads:
    """What was restored, without going on with its log: nothing is appended to it."""
    seams = seams or Seams(files=RealFiles(), owner=f"process {os.getpid()}")
    parent = ParentTier(path, store, seams)
    log = open_log(path, seams, log_directory=log_directory)
    try:
        opened = LmdbPages.open(f"{path}/{PAGES_DIRECTORY}") if pages is None else pages
        try:
            meta = meta_of(log, opened)
            assert meta is not None, "a log that was restored has its first entry, or pages"
            core = Reads(
                log,
                opened,
                meta,
                seams=seams,
                options=EngineOptions(),
                checkpoints=Checkpoints(seams.files, path, owned=True),
                blocks=parent.blocks,
                cold=parent.cold,
            )
        except BaseException:
            opened.close()
            raise
    except BaseException:
        log.close()
        raise
    core.attach_tier(parent)
    return core


def warm(core: Core, path: str, origin: Origin, seams: Seams) -> None:
    """Bring what is away, in the background, unless that has been done once."""
    if origin.is_whole:
        return

    def ended() -> None:
        write_origin(seams.files, path, ORIGIN, origin._replace(is_whole=True))

    warming = Warming(core.leaving, core.registry, ended=ended)
    task = seams.runner.start("restore-warming", warming.step)

    def stop() -> None:
        task.stop()
        warming.close()

    core.before_close(stop)


# ---------------------------------------------------------------------------- a line that goes on


def go_on(
    path: str,
    origin: Origin,
    store: Store,
    *,
    seams: Seams,
    log_options: LogOptions | None = None,
    log_directory: str | None = None,
) -> Origin:
    """Claim an epoch for a log that was restored, and append the `fork` that says so. Raises Fenced where the
    archive has gone on since."""
    with open_log(path, seams, log_options, log_directory) as log:
        # Above it the fork is there already, and a crash came before that was noted. Below it the log is
        # where the archive's newest fork was not shipped yet, but for its manifest.
        if log.chain.epoch <= origin.epoch:
            try:
                claim = open_archive(store, origin.parent_id).claim(
                    Catalogue(),
                    origin.epoch,
                    token=seams.randomness.token,
                    owner=seams.owner,
                    follows=origin.parent_manifest,
                )
            except Fenced as error:
                error.hint = "the archive has gone on since this was restored: restore again, or make a clone"
                raise
            append_fork(log, origin.cluster_id, claim.epoch, claim.parent_segment, claim.parent_manifest)
    origin = origin._replace(is_continued=True)
    write_origin(seams.files, path, ORIGIN, origin)
    return origin


def append_fork(
    log: Log, cluster_id: bytes, epoch: int, parent_segment: bytes, parent_manifest: bytes
) -> None:
    chain = log.chain
    entries = [seal_entry(chain.seq_first)] if chain.body_bytes else []
    seq = chain.seq_last + len(entries)
    fork = Fork(cluster_id, epoch, chain.epoch, seq, parent_segment, parent_manifest)
    log.append(*entries, fork_entry(fork))


def open_log(
    path: str, seams: Seams, log_options: LogOptions | None = None, log_directory: str | None = None
) -> Log:
    directory = log_directory or f"{path}/{LOG_DIRECTORY}"
    return Log.open(directory, options=log_options or LogOptions(), seams=seams, create=False)
