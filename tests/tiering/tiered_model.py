"""The model of the engine, over a database that ships: segments are purged, and what they held is read from
the store.

Always true:
  - every call is answered as without a store. What shipping writes into the log has no effect that a caller
    could see, so the model only follows its number;
  - a `TieredModel` forgets nothing: it can be made again as of any seq, which is what a restore has to be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from tests.engine.engine_model import (
    BUCKETS,
    DIRECTORY,
    POOLS,
    SALT,
    Chance,
    Driver,
    Model,
    Unit,
    Version,
    tiny,
)
from tests.tiering.shipping import TieredMachine, tier_options

from lowwater.chaos.failing_store import FaultyStore
from lowwater.engine.database.core import EngineOptions
from lowwater.engine.database.database import Database
from lowwater.engine.format.format import Compression
from lowwater.engine.log.chain import create_entry
from lowwater.engine.log.log import Log, LogOptions
from lowwater.errors import DataError, LowwaterError, NewerVersion, RetryError, VersionGone
from lowwater.tiering.tiered_opening import TierOptions, open_tiered

# What the tier has written into the log.
SHIPPING = ("seal", "segment_shipped", "checkpoint_shipped", "fork")

# What a store may answer, or make of what it answers. A version is looked at before a hash is.
SPOILT = (RetryError, DataError, NewerVersion)


class TieredModel(Model):
    """With `history`: every entry, or what several have done together, and what has no effect."""

    def __init__(self, *, salt: bytes = SALT, page_keys: int = 4) -> None:
        super().__init__(salt=salt, page_keys=page_keys)
        self.history: list[Unit] = []
        # A restore has no versions below its checkpoint.
        self.pages_from = 0
        self.tells_older = False
        self._is_replaying = False

    def apply(self, unit: Unit) -> None:
        super().apply(unit)
        self.history.append(unit)

    def note(self, applied: int, time_us: int) -> None:
        if applied > self.applied:
            self.history.append(Unit(applied, time_us, []))
        super().note(applied, time_us)

    def forget_after(self, seq: int) -> None:
        while self.history[-1].seq > seq:
            assert not self.history.pop().effects, "something with an effect was lost"
        super().forget_after(seq)

    def root(self, at: int | None = None) -> str:
        return "" if self._is_replaying else super().root(at)

    def as_of(self, seq: int, time_us: int) -> Self:
        """Another one that knows the entries up to here. `time_us` is that of the last one."""
        other = type(self)(salt=SALT, page_keys=self._page_keys)
        other._is_replaying = True
        for unit in self.history:
            if unit.seq > seq:
                break
            if unit.effects:
                other.apply(unit)
            else:
                other.note(unit.seq, unit.time_us)
        other.note(seq, time_us)
        other._is_replaying = False
        if other.checkpoint_seq:
            other.checkpoint_root = other.root(other.checkpoint_seq)
        return other

    def _add(self, versions: list[Version], version: Version) -> None:
        if versions and versions[-1].seq == version.seq:
            versions.pop()
        versions.append(version)

    @property
    def floor(self) -> int:
        return max(super().floor, self.pages_from)

    def can_read(self, at: int | None) -> bool:
        return super().can_read(at) or (self.tells_older and at is not None and 0 < at <= self.applied)


@dataclass
class SmallMachine(TieredMachine):
    """Of a size at which everything happens soon."""

    compression: str = "zstd"
    # Called between two steps of the background.
    after_step: Callable[[], None] = lambda: None

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if not self.runner.run_one(self.rng):
                break
            self.after_step()

    def idle(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        for _ in range(20_000):
            if not self.runner.run_one(self.rng):
                return
            self.after_step()
        self.runner.run_until_idle(self.rng, limit=1)  # says who never rests

    def open_log(self) -> Log:
        create = create_entry(
            bytes(range(16)),
            SALT,
            {
                "segment_bytes": self.log_options.segment_bytes,
                "block_bytes": self.log_options.block_bytes,
                "compression": Compression[self.compression.upper()].value,
                "page_keys": self.page_keys,
            },
        )
        options = replace(self.log_options, segment_age_max_s=None)
        return Log.open(f"{DIRECTORY}/wal", options=options, seams=self.seams(), create=create)

    def engine_options(self) -> EngineOptions:
        return tiny(
            EngineOptions(checkpoint_interval_s=self.checkpoint_interval_s, disk_reserve_bytes=0),
            self.pool_bytes_max,
        )

    def open(self) -> Database:
        self.open_log().close()  # makes it where there is none
        self.pages.reopen()
        self.connect()
        self.db = None
        self.db = open_tiered(
            DIRECTORY,
            self.clients,
            self.options,
            log_options=self.log_options,
            options=self.engine_options(),
            seams=self.seams(),
            store=self.pages,
            create=False,
        )
        db: Database = self.db
        return db

    def connect(self) -> None:
        self.clients = [server.open(f"{self.seed} life {self.files.life}") for server in self.servers]


class TieredDriver(Driver):
    """Calls of a database that ships. The first of its servers is the one that is read from."""

    model: TieredModel

    def __init__(self, machine: SmallMachine) -> None:
        super().__init__(machine)
        self.model = TieredModel(page_keys=machine.page_keys)
        self.counted = 0
        # What a restore has not brought here.
        self.restored_seq = 0
        machine.after_step = self.look

    @property
    def server(self) -> FaultyStore:
        machine = self.machine
        assert isinstance(machine, SmallMachine)
        return machine.server

    @contextmanager
    def calm(self) -> Iterator[None]:
        """While the driver itself looks at something, nothing fails."""
        server = self.server
        fault, down = server.fault, server.down
        server.fault, server.down = None, False
        try:
            yield
        finally:
            server.fault, server.down = fault, down

    # ------------------------------------------------------------------ what shipping writes

    def guarded(self, call: Callable[[], object]) -> None:
        """What the background has written comes before the call, and what a crash has left before that."""
        super().guarded(call)
        self.absorb()

    def absorb(self) -> None:
        with self.calm():
            super().absorb()
        self.look()

    def look(self) -> None:
        """What is always true of the marks: their order, and that nothing leaves the disk which does not
        count as shipped. In the next life that has to be found out again."""
        marks = self.db.marks()
        assert list(marks) == sorted(marks, reverse=True), f"the marks are in disorder: {marks}"
        self.counted = max(self.counted, self.db.counted_hwm)
        assert marks.purged <= max(self.counted, self.restored_seq), (
            "what was purged did not count as shipped"
        )
        self.seen["purged, at most"] = max(self.seen["purged, at most"], marks.purged)
        self.seen["shipped, at most"] = max(self.seen["shipped, at most"], marks.hwm)

    def _absorb(self, entry: Any) -> None:
        if entry.kind in SHIPPING:
            self.model.note(entry.seq, entry.time_us)
            self.seen[entry.kind] += 1
        elif entry.kind == "checkpoint":
            self.model.apply(Unit(entry.seq, entry.time_us, [("checkpoint", None, None, None, None)]))
        else:
            super()._absorb(entry)

    def recover(self, *arguments: Any, **named: Any) -> None:
        super().recover(*arguments, **named)
        self.server._crash_number = None

    # ------------------------------------------------------------------ calls

    def checkpoint(self) -> None:
        db, model = self.db, self.model
        if not db._has_news and db._comes(model.checkpoint_seq):
            last = next(unit.seq for unit in reversed(model.history) if unit.effects)
            assert last == model.checkpoint_seq, "something has happened since the last checkpoint"
            assert int(db.checkpoint().partition("-")[0]) == model.checkpoint_seq
        else:
            self._commit(
                self._units(("checkpoint", None, None, None, None)),
                lambda: int(db.checkpoint().partition("-")[0]),
            )
        self.compare_checkpoint()

    def ship(self) -> None:
        """All that is durable, and perhaps more."""
        durable = self.db._log.seq_last
        is_news = self.db.opened_us is not None
        hwm = self.db.ship()
        assert hwm == self.db.counted_hwm
        assert hwm >= durable or not is_news, "something was not shipped"
        self.seen["ship()"] += 1

    def purge(self) -> None:
        """Everything that may go, at once. The root stays."""
        root = self.db.root()
        self.db.flush()
        self.db.purge(self.db.purgeable_seq())
        assert self.db.root() == root

    def pages_leave(self, wants: Callable[[bytes], bool]) -> None:
        """Pages that are blocks of a checkpoint that is in the store."""
        shipped = self.db.catalogue.checkpoints.last
        here = [each for each in self.db.checkpoints() if shipped is not None and each.id == shipped.id]
        if here:
            root = self.db.root()
            self.seen["left"] += self.db.leaving.leave(here[0], wants)
            self.seen["away, at most"] = max(self.seen["away, at most"], len(list(self.db.leaving.away())))
            assert self.db.root() == root

    def get(self, bucket: str, key: str, at: int | None = None, *, head: bool = False) -> None:
        self._or_gone(at, lambda: super(TieredDriver, self).get(bucket, key, at, head=head))
        found = self.model.get(bucket, key, at) if self.model.can_read(at) else None
        if found is not None and len(found.value) > 256 and found.seq <= self.db.marks().purged and not head:
            self.seen["large values read from the store"] += 1

    def _or_gone(self, at: int | None, read: Callable[[], None]) -> None:
        """What is older than what is kept here is read from the archive, which may not have it yet. It is
        right, or refused."""
        model = self.model
        if model.can_read(at) or (at is not None and at > model.applied):
            return read()
        model.tells_older = True
        try:
            read()
            self.seen["read below what is kept"] += 1
        except VersionGone:
            self.seen["VersionGone"] += 1
        finally:
            model.tells_older = False
        return None

    def get_at_time(self, bucket: str, key: str, time_us: int) -> None:
        seq = self.model.seq_at(time_us)
        self._or_gone(seq or None, lambda: super(TieredDriver, self).get_at_time(bucket, key, time_us))

    def list(self, bucket: str, *arguments: Any, **named: Any) -> None:
        at = named.get("at", arguments[4] if len(arguments) > 4 else None)
        self._or_gone(at, lambda: super(TieredDriver, self).list(bucket, *arguments, **named))

    def open_scan(
        self, bucket: str, prefix: str = "", start_after: str | None = None, at: int | None = None
    ) -> None:
        def read() -> None:
            if not self.model.tells_older:
                return super(TieredDriver, self).open_scan(bucket, prefix, start_after, at)
            # Nothing is pinned.
            expected = [
                found
                for found in self.model.live(bucket, prefix, at)
                if start_after is None or found.key > start_after
            ]
            assert [*self.db.scan(bucket, prefix, start_after=start_after, at=at)] == expected
            return None

        self._or_gone(at, read)

    def root(self, at: int | None = None) -> None:
        self._or_gone(at, lambda: super(TieredDriver, self).root(at))

    def read_log(self, start: int, count: int) -> None:
        """Entries from wherever they are."""
        seqs = []
        for entry in self.db.log(start):
            seqs.append(entry.seq)
            if len(seqs) == count:
                break
        last = min(start + count - 1, self.db.marks().durable)
        assert seqs == list(range(start, last + 1)), "the log has a gap, or a repetition"
        if start <= self.db.marks().purged:
            self.seen["entries read from the store"] += 1

    def in_outage(self, call: Callable[[], object]) -> None:
        """As before, of a real store."""
        server = self.server
        server.down = True
        applied = self.model.applied
        try:
            self.guarded(call)
        except LowwaterError as error:
            self.refused_by_the_store(error, applied)
        finally:
            server.down = False

    def refused_by_the_store(self, error: LowwaterError, applied: int) -> None:
        """It has to be what a store may answer, or has spoilt on the way, and nothing has happened."""
        if not isinstance(error, SPOILT):
            raise error
        self.seen["refused in an outage"] += 1
        with self.calm():
            if self.db is None:
                self.recover()  # more has to be read than fits into memory
                return
            self.absorb()
            assert self.db.failure is None, "an outage ended the writing"
            assert self.db.marks().applied == self.model.applied >= applied
            self.pending = []


class TieredChance(Chance):
    """The same calls, and what a tier adds."""

    WEIGHTS: ClassVar[dict[str, float]] = Chance.WEIGHTS | {
        "ship": 2, "purge": 3, "read_log": 3, "idle": 4, "time": 2, "checkpoint": 1,
        "pages_leave": 10, "pages_come": 3,
    }  # fmt: skip

    driver: TieredDriver

    def at(self) -> int:
        applied = self.driver.model.applied
        return self.rng.randint(1, applied) if self.rng.random() < 0.15 else super().at()

    def ship(self) -> None:
        self.driver.ship()

    def purge(self) -> None:
        self.driver.purge()

    def read_log(self) -> None:
        last = self.driver.model.applied
        start = self.rng.randint(1, last)
        self.driver.read_log(start, self.rng.choice((1, 5, 40)))

    def pages_leave(self) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            self.driver.checkpoint()
            self.driver.ship()
            self.driver.machine.idle(1.0)
            self.driver.absorb()
        share = rng.choice((0.2, 0.8, 1))
        self.driver.pages_leave(lambda _: rng.random() < share)

    def time(self) -> None:
        """Enough of it for segments to be sealed and shipped by themselves."""
        for _ in range(12):
            self.driver.machine.idle(1.0)
            self.driver.absorb()


def options_for(rng: random.Random) -> TierOptions:
    return tier_options(
        shipping={
            "interval_s": rng.choice((1.0, 10.0)),
            "part_bytes": rng.choice((3000, 2**20)),
            "uploads_at_once": rng.choice((1, 3)),
        },
        retention={
            "age_max_s": rng.choice((None, 0.0, 5.0)),
            "bytes_max": rng.choice((None, 0, 30_000)),
            "check_interval_s": rng.choice((1.0, 10.0)),
        },
    )


def machine_for(seed: int, server: FaultyStore, **given: Any) -> SmallMachine:
    """Of sizes that depend on the seed."""
    rng = random.Random(f"sizes {seed}")
    return SmallMachine(
        seed=seed,
        servers=[server],
        options=options_for(rng),
        pool_bytes_max=POOLS[rng.choice(list(POOLS))],
        checkpoint_interval_s=rng.choice((None, 1.0, 10.0)),
        page_keys=rng.choice((2, 4, 4, 16)),
        compression=rng.choice(("none", "zstd")),
        **given,
    )


def log_options_for(seed: int) -> LogOptions:
    rng = random.Random(f"log {seed}")
    return LogOptions(
        segment_bytes=rng.choice((4096, 16_384, 65_536)),
        block_bytes=4096,
        batch_bytes_max=rng.choice((1000, 2**20)),
        ring_bytes_max=rng.choice((0, 2**20)),
        segment_age_max_s=rng.choice((2.0, 10.0)),
    )


def driver_for(seed: int) -> TieredDriver:
    machine = machine_for(seed, FaultyStore())
    machine.log_options = log_options_for(seed)
    driver = TieredDriver(machine)
    driver.open()
    return driver


def run_by_chance(seed: int, steps: int) -> TieredDriver:
    """All of it from one seed. The driver is left open."""
    driver = driver_for(seed)
    for bucket in BUCKETS[:2]:
        driver.create_bucket(bucket)
    TieredChance(driver, random.Random(f"calls {seed}")).run(steps)
    driver.machine.files._crash_number = None
    driver.compare()
    assert list(driver.db.check()) == []
    return driver
