"""`lowwater.open` and `lowwater.Engine`: a directory, and the object store that its history lives in.

Always true:
  - without a tier nothing here is in the way, and no store is imported;
  - a database that is there opens whether or not its store answers: what was shipped is in its log, and
    `shipping()` tells what is wrong with the store. One that has never shipped is refused with what is wrong,
    unless the store is merely down. A folder that is not there is a store that is down;
  - a database is made where its stores have answered, and none has a history (`beginning.py`);
  - a folder is made for an archive that begins, and never where one was before: an empty one in the place of
    what is not mounted would be taken for it;
  - what reads from the store is in place before the first entry is applied again.

A new part of the tier plugs in at `TierParts`: it has the stores, the engine once that is there, and an end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from lowwater.engine.database import engine as fed
from lowwater.engine.database.core import Core, EngineOptions
from lowwater.engine.database.database import Database
from lowwater.engine.database.opening import configured, open_embedded, open_with, require_log_of_pages
from lowwater.engine.database.orchestrator import Orchestrator
from lowwater.engine.database.origin import require_restored
from lowwater.engine.database.redo import Progress
from lowwater.engine.database.space import kept_free_bytes
from lowwater.engine.database.tier import ShippingStatus
from lowwater.engine.format.entries import Writable
from lowwater.engine.log.check import no_log, require_log
from lowwater.engine.log.directory import LOG_DIRECTORY
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.log.recover import has_begun
from lowwater.engine.pages.pagestore import PageStore
from lowwater.engine.seams.real import RealFiles, RealRandomness
from lowwater.engine.state.catalogue import Catalogue, CheckpointDescriptor, SegmentDescriptor
from lowwater.errors import InputError, StoreMissing, StoreUnavailable
from lowwater.metrics import ColdMetrics, StoreMetrics, TierMetrics
from lowwater.tiering.beginning import ArchivePlace, begin_archive, may_be_made, places_of, require_no_history
from lowwater.tiering.block_cache import BlockCache
from lowwater.tiering.cold import ColdLog
from lowwater.tiering.cold_versions import ColdVersions
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.late_store import LateStore
from lowwater.tiering.lineage import Lineage, OpenParent, parents_opener
from lowwater.tiering.measured_store import MeasuredStore
from lowwater.tiering.names import segment_name
from lowwater.tiering.open_store import open_store
from lowwater.tiering.remote_checkpoint import read_objects
from lowwater.tiering.retention import Retention, RetentionOptions
from lowwater.tiering.shipped_blocks import ArchivedBlocks
from lowwater.tiering.shipper import Shipper, ShippingOptions
from lowwater.tiering.store import Store

if TYPE_CHECKING:
    from lowwater.config import Config, TierConfig

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | None

# What waits in the segment that is being written is shipped at the latest when it is so old.
SEAL_AFTER_S = 10.0
# A checkpoint is ordered after so long, or so much log: from there on a restore has to replay.
CHECKPOINT_AFTER = {"checkpoint_entry_interval_s": 300.0, "checkpoint_entry_bytes": 256 * 2**20}
CACHE_DIRECTORY = "cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class TierOptions:
    """How the tier of this process works. With `replicate_sync` the marks wait for all stores."""

    shipping: ShippingOptions = field(default_factory=ShippingOptions)
    retention: RetentionOptions = field(default_factory=RetentionOptions)
    replicate_sync: bool = False
    cache_bytes_max: int = 2**30

    @classmethod
    def from_config(cls, config: Config) -> TierOptions:
        shipping, retention = config.shipping, config.retention
        return cls(
            shipping=ShippingOptions(
                interval_s=shipping.interval_s,
                batch_segments_max=shipping.batch_segments_max,
                batch_bytes_max=shipping.batch_bytes_max,
                uploads_at_once=shipping.uploads_at_once,
                scrub_interval_s=config.tier.scrub_sample_interval_s,
            ),
            retention=RetentionOptions(
                check_interval_s=retention.check_interval_s,
                age_max_s=retention.age_max_s,
                bytes_max=retention.bytes_max,
            ),
            replicate_sync=config.tier.replication == "sync",
            cache_bytes_max=config.tier.cache_bytes_max,
        )


class TierParts:
    """Fulfils `Tier`: all that works between an engine and its stores. `path` is the engine's directory."""

    def __init__(
        self,
        path: str,
        stores: Sequence[Store],
        options: TierOptions,
        seams: Seams,
        open_parent: OpenParent | None = None,
        *,
        disk_reserve_bytes: int,
    ) -> None:
        assert stores, "a tier has a store"
        self._store_metrics = StoreMetrics()
        self._first = stores[0]
        self._stores = stores = [MeasuredStore(each, seams.clock, self._store_metrics) for each in stores]
        # What is read may lie with a parent, what is shipped is this log's own.
        self._read_from = Lineage(
            stores[0], open_parent or parents_opener(stores[0].uri), parent=options.shipping.parent
        )
        self._options = options
        self._metrics = ColdMetrics()
        self._cache = cache = BlockCache(
            seams.files,
            f"{path}/{CACHE_DIRECTORY}",
            options.cache_bytes_max,
            kept_free_bytes=kept_free_bytes(disk_reserve_bytes),
        )
        self.fetcher = Fetcher(
            self._read_from, clock=seams.clock, cache=cache, metrics=self._metrics, runner=seams.runner
        )
        self.blocks = ArchivedBlocks(self.fetcher)
        self._registry: CollectorRegistry | None = None
        self._tier_metrics = TierMetrics()
        self.shipper: Shipper | None = None
        self.retention: Retention | None = None

    def cold(self, catalogue: Catalogue) -> ColdLog:
        return ColdLog(self.fetcher, catalogue, segment_name)

    @property
    def cache_bytes(self) -> int:
        return self._cache.bytes

    def older_versions(self, log: Log, catalogue: Catalogue) -> ColdVersions:
        cold = log.cold_source
        assert isinstance(cold, ColdLog), "what is attached was opened with the same store"
        return ColdVersions(self.fetcher, cold, catalogue, log=log)

    def attach(self, core: Core, *, is_begun: bool = False) -> None:
        """To an engine that has just been opened; begin in the background. Raises what makes this store none
        that this engine could ever ship to, unless its archive was begun a moment ago."""
        if isinstance(self._first, LateStore) and core.catalogue.hwm <= self.own_after:
            self._first.makes = True  # nothing of this log is in any archive: one may begin
        self._registry = registry = core.registry
        self._tier_metrics = metrics = TierMetrics(registry)
        registry.register(self._metrics)
        registry.register(self._store_metrics)
        self.retention = Retention(core, self._options.retention, metrics, give_way=self._cache.give_way)
        self.shipper = Shipper(
            core,
            self._stores,
            options=self._options.shipping,
            replicate_sync=self._options.replicate_sync,
            metrics=metrics,
            on_counted=self.retention.wake,
            make_room=self.retention.wake,
        )
        core.attach_tier(self)
        self.shipper.look(refuses=not is_begun)
        self.shipper.start()
        self.retention.start()

    def ship(self, timeout_s: float | None) -> int:
        assert self.shipper is not None
        return self.shipper.ship(timeout_s)

    def status(self) -> ShippingStatus:
        assert self.shipper is not None
        return self.shipper.status()

    @property
    def own_after(self) -> int:
        parent = self._options.shipping.parent
        return 0 if parent is None else parent.seq

    def read_checkpoint(self, checkpoint: CheckpointDescriptor) -> tuple[bytes, Callable[[bytes], bytes]]:
        return read_objects(self._read_from, checkpoint)

    def require_shipped(self, segments: Sequence[SegmentDescriptor]) -> None:
        assert self.shipper is not None
        self.shipper.require_shipped(segments)

    def checkpoints_needed(self) -> list[int]:
        assert self.shipper is not None
        return self.shipper.checkpoints_needed()

    def make_room(self) -> bool:
        self._cache.give_way()
        if self.shipper is None or self.retention is None:
            return False
        self.shipper.make_room()
        return self.retention.may_purge

    def finish(self) -> None:
        if self.shipper is not None:
            self.shipper.finish()

    def stop(self) -> None:
        if self.shipper is not None:
            self.shipper.stop()
        if self.retention is not None:
            self.retention.stop()

    def close(self) -> None:
        if self._registry is not None:
            # It serves one open database after the other.
            self._registry.unregister(self._tier_metrics)
            self._registry.unregister(self._metrics)
            self._registry.unregister(self._store_metrics)
            self._registry = None
        self.fetcher.close()
        self._read_from.close()
        for store in self._stores[1:]:
            store.close()


def open_directory(
    directory: str | os.PathLike[str],
    *,
    tier: str | None = None,
    config: ConfigSource | Config = None,
    create: bool = True,
    registry: CollectorRegistry | None = None,
    progress: Progress | None = None,
) -> Database:
    """Open the database in `directory`, or make one there.

    `tier` is the URI of the object store that its history goes to, as `s3://bucket/prefix`; without it, what
    the configuration says. `config` is a TOML file, a mapping or a `Config`; `create=False` refuses a
    directory without a database. `progress` is told how far recovery is: (the seq applied, the last one).
    """
    from lowwater.config import Config  # pydantic takes longer to import than all the rest

    loaded = Config.load(config)
    settings = configured(directory, loaded)
    files, log_directory = RealFiles(), settings.log_path
    require_restored(files, settings.path)
    is_new = not has_begun(files, log_directory)
    cluster_id = None
    if is_new:
        cluster_id = require_no_history(settings.path, tier, loaded.tier)
        require_log_of_pages(files, settings.path, log_directory)
        if not create:
            raise no_log(log_directory)
    stores = open_stores(tier, loaded.tier, is_new=is_new)
    if not stores:
        return open_embedded(directory, config=loaded, create=create, registry=registry, progress=progress)
    log_options = sealing(settings.log_options)
    first: bool | Writable = create
    if is_new:
        try:
            first = begin_archive(stores, cluster_id, log_options, RealRandomness())
        except BaseException:
            for each in stores:
                each.close()
            raise
    was_there = os.path.exists(settings.path)
    try:
        return open_tiered(
            settings.path,
            stores,
            TierOptions.from_config(loaded),
            log_options=log_options,
            options=with_checkpoints(settings.options, loaded),
            log_directory=settings.log_directory,
            create=first,
            registry=registry,
            progress=progress,
            open_parent=opener_of(tier, loaded.tier),
        )
    except BaseException:
        if is_new:
            # The place of the cache comes first; where nothing came after it, nothing stays.
            for empty in (f"{settings.path}/{CACHE_DIRECTORY}", *([] if was_there else [settings.path])):
                with suppress(OSError):
                    os.rmdir(empty)
        raise


def opener_of(tier: str | None, config: TierConfig) -> OpenParent:
    """Who opens the parent of what `open_stores` opens."""
    uri = tier or config.store_uri()
    return parents_opener(uri, dict(config.options) if uri == config.store_uri() else {}, config)


def open_tiered(
    path: str,
    stores: Sequence[Store],
    tier_options: TierOptions | None = None,
    *,
    log_options: LogOptions | None = None,
    options: EngineOptions | None = None,
    seams: Seams | None = None,
    store: PageStore | None = None,
    log_directory: str | None = None,
    create: bool | Writable = True,
    registry: CollectorRegistry | None = None,
    progress: Progress | None = None,
    open_parent: OpenParent | None = None,
) -> Database:
    """Open a database with these stores, and with all the parts that a test, or a simulation, replaces. The
    stores are the database's from now on."""
    seams = seams or _real_seams()
    if not create:
        require_log(seams.files, log_directory or f"{path}/{LOG_DIRECTORY}")
    parts = TierParts(
        path,
        stores,
        tier_options or TierOptions(),
        seams,
        open_parent,
        disk_reserve_bytes=(options or EngineOptions()).disk_reserve_bytes,
    )
    try:
        database = open_with(
            path,
            log_options=sealing(log_options),
            options=options,
            seams=seams,
            store=store,
            log_directory=log_directory,
            create=create,
            registry=registry,
            blocks=parts.blocks,
            cold=parts.cold,
            progress=progress,
        )
    except BaseException:
        parts.close()
        raise
    _attach(parts, database, is_begun=not isinstance(create, bool))
    return database


class Engine(fed.FedEngine):
    __doc__ = fed.FedEngine.__doc__

    def __init__(
        self,
        data: str | os.PathLike[str],
        tier: str | Sequence[Store] | None = None,
        config: ConfigSource | Config = None,
        orchestrator: Orchestrator | None = None,
        *,
        registry: CollectorRegistry | None = None,
        progress: Progress | None = None,
        log_options: LogOptions | None = None,
        options: EngineOptions | None = None,
        seams: Seams | None = None,
        store: PageStore | None = None,
        tier_options: TierOptions | None = None,
    ) -> None:
        """Open the engine in the directory `data`, or make one there. `tier` is the URI of its object store.
        `orchestrator` is told what the engine itself wants to have ordered; without one, nothing can be
        shipped. The last five parameters, and stores in the place of a URI, are for tests and simulations."""
        from lowwater.config import Config

        loaded = Config.load(config)
        settings = configured(data, loaded)
        stores: Sequence[Store]
        if tier is None or isinstance(tier, str):
            is_new = not has_begun(RealFiles(), settings.log_path)
            stores = open_stores(tier, loaded.tier, is_new=is_new)
        else:
            stores = tier
        parts = None
        if stores:
            if orchestrator is None:
                raise InputError(
                    "an engine ships what its log says was shipped, and nobody was named who orders entries",
                    hint="give an orchestrator, or leave the tier out",
                )
            seams = seams or _real_seams()
            parts = TierParts(
                settings.path,
                stores,
                tier_options or TierOptions.from_config(loaded),
                seams,
                disk_reserve_bytes=(options or settings.options).disk_reserve_bytes,
            )
            log_options = sealing(log_options or LogOptions.from_config(loaded.wal))
            options = options or with_checkpoints(settings.options, loaded)
        try:
            super().__init__(
                data,
                None,
                loaded,
                orchestrator,
                registry=registry,
                progress=progress,
                log_options=log_options,
                options=options,
                seams=seams,
                store=store,
                blocks=None if parts is None else parts.blocks,
                cold=None if parts is None else parts.cold,
            )
        except BaseException:
            if parts is not None:
                parts.close()
            raise
        if parts is not None:
            _attach(parts, self)


def _attach(parts: TierParts, core: Core, *, is_begun: bool = False) -> None:
    try:
        parts.attach(core, is_begun=is_begun)
    except BaseException:
        core.close()
        raise


def _real_seams() -> Seams:
    return Seams(files=RealFiles(), owner=f"process {os.getpid()}")


def sealing(options: LogOptions | None) -> LogOptions:
    """What nobody has set otherwise is sealed by age, so that little is missing in the store."""
    options = options or LogOptions()
    return (
        options if options.segment_age_max_s is not None else replace(options, segment_age_max_s=SEAL_AFTER_S)
    )


def with_checkpoints(options: EngineOptions, config: Config) -> EngineOptions:
    """What nobody has set otherwise, be it to none, is ordered from time to time."""
    unset = {
        name: CHECKPOINT_AFTER[name] for name in CHECKPOINT_AFTER.keys() - config.engine.model_fields_set
    }
    return replace(options, **unset)  # type: ignore[arg-type]


def open_stores(tier: str | None, config: TierConfig, *, is_new: bool = False) -> list[Store]:
    """Return the store of a URI, or of the configuration, and its regions; none where nothing is shipped.
    `is_new` says that the database is still to be made."""
    # Of what was shipped there has to be an archive: where its folder is missing, it is not mounted.
    return [
        _late(each, config, is_new=is_new, makes=number > 0)
        for number, each in enumerate(places_of(tier, config))
    ]


def _late(where: ArchivePlace, config: TierConfig, *, is_new: bool, makes: bool) -> Store:
    """What is wrong with the URI is told before, and what is wrong with a server, or a folder, when it is
    asked."""
    place, named = where
    is_folder = place.kind in ("file", "shared_fs")
    if place.kind == "memory":
        return open_store(named, config=config)
    if is_folder and is_new:
        return open_store(named, config=config, make=may_be_made(place))

    def open_it(makes: bool) -> Store:
        try:
            return open_store(named, config=config, make=makes and may_be_made(place))
        except StoreMissing as error:
            if not is_folder:
                raise
            raise StoreUnavailable(
                f"the folder is away: {error.message}",
                path=place.uri,
                hint="mount it, and shipping goes on by itself, or correct the path; make the folder where "
                "an archive is to begin anew",
            ) from error

    return LateStore(place.uri, open_it, makes=makes)
