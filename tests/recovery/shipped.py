"""Databases that ship, and what a restore of them has to be. All in one thread, but for what a test opens."""

from __future__ import annotations

import random
from typing import Any

from lowwater.chaos.clock import SeededRandomness, VirtualClock
from lowwater.chaos.disk import FaultyFiles
from lowwater.chaos.runner import StepRunner
from lowwater.engine.database.core import EngineOptions
from lowwater.engine.log.log import LogOptions, Seams
from lowwater.engine.pages.memory_pages import MemoryPages
from lowwater.tiering.ship_checkpoints import CheckpointShipper
from lowwater.tiering.store import Store
from lowwater.tiering.tiered_opening import open_tiered

QUIET = EngineOptions(transaction_age_max_s=None, checkpoint_interval_s=None)
SMALL = LogOptions(segment_bytes=16_384, block_bytes=4096, segment_age_max_s=1e6)


class Place:
    """A disk, a clock and a runner, of which each life gets a new one."""

    def __init__(self, seed: int = 0) -> None:
        self.clock = VirtualClock()
        self.files = FaultyFiles(clock=self.clock)
        self.pages = MemoryPages(self.files)
        self.randomness = SeededRandomness(seed)
        self.runner = StepRunner(self.clock)
        self.rng = random.Random(f"steps {seed}")

    def idle(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.runner.run_until_idle(self.rng)

    def seams(self) -> Seams:
        self.runner = StepRunner(self.clock)
        return Seams(
            files=self.files,
            clock=self.clock,
            randomness=self.randomness,
            runner=self.runner,
            owner=f"life {self.files.life}",
        )


def ship(db: Any, place: Place) -> None:
    """All that is durable now, with its manifests."""
    db._log.sync()
    target = db.marks().durable
    for _ in range(100):
        db.propose_seal()
        place.idle(1.0)
        if db.failure is not None:
            raise db.failure
        if db.counted_hwm >= target:
            return
    raise AssertionError(f"it was not shipped: {db.shipping()}")


def checkpoint(db: Any, place: Place, store: Store) -> None:
    """Make one, and ship it."""
    id_ = db.checkpoint()
    ship(db, place)
    shipper = CheckpointShipper(db, store)
    while shipper.advance() is not None:
        place.idle()
    assert db.catalogue.checkpoints.last.id == id_
    place.idle(1.0)


def opened(place: Place, store: Store, path: str = "db", **given: Any) -> Any:
    return open_tiered(
        path,
        [store],
        log_options=given.pop("log_options", SMALL),
        options=QUIET,
        seams=place.seams(),
        store=given.pop("pages", place.pages),
        **given,
    )


def content(db: Any) -> dict[str, list[Any]]:
    return {bucket: list(db.scan(bucket)) for bucket in db.buckets()}
