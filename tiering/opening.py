"""`lowwater.open` and `lowwater.Engine`: a directory, and the object store that its history lives in.

Always true:
  - without a tier nothing here is in the way, and no store is imported;
  - a database that has shipped before opens whether or not its store answers: what was shipped is in its
    log, and `shipping()` tells what is wrong with the store. One that has never shipped is refused with what
    is wrong, unless the store is merely down. A folder that is not there is a store that is down;
  - a folder is made for an archive that begins, and never where one was before: an empty one in the place of
    what is not mounted would be taken for it;
  - what reads from the store is in place before the first entry is applied again.

A new part of the tier plugs in at `TierParts`: it has the stores, the engine once that is there, and an end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from lowwater.engine import engine as fed
from lowwater.engine.catalogue import Catalogue, CheckpointDescriptor
from lowwater.engine.check import require_log
from lowwater.engine.core import Core, EngineOptions
from lowwater.engine.database import Database
from lowwater.engine.directory import LOG_DIRECTORY
from lowwater.engine.log import Log, LogOptions, Seams
from lowwater.engine.opening import Settings, configured, open_embedded, open_with
from lowwater.engine.orchestrator import Orchestrator
from lowwater.engine.pagestore import PageStore
from lowwater.engine.real import RealFiles
from lowwater.engine.replay import Progress
from lowwater.engine.space import kept_free_bytes
from lowwater.engine.tier import ShippingStatus
from lowwater.errors import InputError, InvalidConfig, NotFound, StoreMissing, StoreUnavailable
from lowwater.metrics import ColdMetrics, StoreMetrics, TierMetrics
from lowwater.tiering.block_cache import BlockCache
from lowwater.tiering.blocks import ArchivedBlocks
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
from lowwater.tiering.shipper import Shipper, ShippingOptions
from lowwater.tiering.store import Store
from lowwater.tiering.store_uri import parse_uri

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

    def older_versions(self, log: Log, catalogue: Catalogue) -> ColdVersions:
        cold = log.cold_source
        assert isinstance(cold, ColdLog), "what is attached was opened with the same store"
        return ColdVersions(self.fetcher, cold, catalogue, log=log)

    def attach(self, core: Core) -> None:
        """To an engine that has just been opened; begin in the background. Raises what makes this store none
        that this engine could ever ship to."""
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
        self.shipper.look()
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
    stores = open_stores(tier, loaded.tier, is_new=_is_new(settings))
    if not stores:
        return open_embedded(directory, config=loaded, create=create, registry=registry, progress=progress)
    return open_tiered(
        settings.path,
        stores,
        TierOptions.from_config(loaded),
        log_options=settings.log_options,
        options=with_checkpoints(settings.options, loaded),
        log_directory=settings.log_directory,
        create=create,
        registry=registry,
        progress=progress,
        open_parent=opener_of(tier, loaded.tier),
    )


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
    create: bool = True,
    registry: CollectorRegistry | None = None,
    progress: Progress | None = None,
    open_parent: OpenParent | None = None,
) -> Database:
    """The same with everything that a test, or a simulation, puts in its place. The stores are the database's
    from now on."""
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
    _attach(parts, database)
    return database


class Engine(fed.Engine):
    __doc__ = fed.Engine.__doc__

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
        shipped. The last five, and stores in the place of a URI, are what a test, or a simulation, puts in
        their place."""
        from lowwater.config import Config

        loaded = Config.load(config)
        stores: Sequence[Store]
        if tier is None or isinstance(tier, str):
            stores = open_stores(tier, loaded.tier, is_new=_is_new(configured(data, loaded)))
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
            settings = configured(data, loaded)
            parts = TierParts(
                settings.path,
                stores,
                tier_options or TierOptions.from_config(loaded),
                seams,
                disk_reserve_bytes=(options or settings.options).disk_reserve_bytes,
            )
            log_options = sealing(log_options or LogOptions.from_config(loaded.wal))
            options = options or with_checkpoints(configured(data, loaded).options, loaded)
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


def _attach(parts: TierParts, core: Core) -> None:
    try:
        parts.attach(core)
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


def _is_new(settings: Settings) -> bool:
    """Whether there is no log yet."""
    try:
        require_log(RealFiles(), settings.log_directory or f"{settings.path}/{LOG_DIRECTORY}")
    except NotFound:
        return True
    return False


def with_checkpoints(options: EngineOptions, config: Config) -> EngineOptions:
    """What nobody has set otherwise, be it to none, is ordered from time to time."""
    unset = {
        name: CHECKPOINT_AFTER[name] for name in CHECKPOINT_AFTER.keys() - config.engine.model_fields_set
    }
    return replace(options, **unset)  # type: ignore[arg-type]


def open_stores(tier: str | None, config: TierConfig, *, is_new: bool = False) -> list[Store]:
    """The store of a URI, or of the configuration, and its regions. None of them where nothing is shipped.
    `is_new` says that the database is still to be made."""
    if tier is not None and (not isinstance(tier, str) or not tier):
        raise InvalidConfig(f"the tier is {tier!r:.80}", hint="give a URI, as s3://bucket/prefix")
    uri = tier or config.store_uri()
    if uri is None:
        return []
    is_configured = tier is None or tier == config.store_uri()
    options = dict(config.options) if is_configured else {}
    # Of what was shipped there has to be an archive: where its folder is missing, it is not mounted.
    stores = [_late(uri, None if is_configured else uri, config, options, is_new=is_new, makes=False)]
    stores += [_late(each, each, config, {}, is_new=is_new, makes=True) for each in config.regions]
    return stores


def _late(
    uri: str, named: str | None, config: TierConfig, options: dict[str, str], *, is_new: bool, makes: bool
) -> Store:
    """What is wrong with the URI is told now, and what is wrong with a server, or a folder, when it is asked.
    `named` is the URI where it is not that of the configuration."""
    place = parse_uri(uri, options)
    is_folder = place.kind in ("file", "shared_fs")
    if place.kind == "memory" or (is_folder and is_new):
        return open_store(named, config=config)

    def open_it(makes: bool) -> Store:
        # What lies below a file system that is not mounted is not made here.
        has_parent = is_folder and os.path.isdir(os.path.dirname(place.path))
        try:
            return open_store(named, config=config, make=makes and has_parent)
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
