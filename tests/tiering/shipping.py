"""A database or a fed engine with its stores, under everything that a simulation decides."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.engine.engine_model import CLUSTER_ID, DIRECTORY, SALT, Machine

from lowwater import Engine
from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.failing_store import FaultyStore, FaultyStoreClient
from lowwater.chaos.survival import Survival
from lowwater.engine.database.core import EngineOptions
from lowwater.engine.database.database import Database
from lowwater.engine.database.orchestrator import Request
from lowwater.engine.format.entries import Control
from lowwater.engine.format.format import Compression
from lowwater.engine.log.chain import Create, create_entry
from lowwater.engine.log.log import Log, LogOptions
from lowwater.engine.log.scan import scan_frames
from lowwater.engine.state.catalogue import Catalogue
from lowwater.engine.state.requests import members_of
from lowwater.tiering.archive import open_archive
from lowwater.tiering.memory_store import MemoryStore
from lowwater.tiering.names import EPOCHS, STATES, parse, segment_name
from lowwater.tiering.retention import RetentionOptions
from lowwater.tiering.scrub import Scrub
from lowwater.tiering.shipper import ShippingOptions
from lowwater.tiering.tiered_opening import TierOptions, open_tiered
from lowwater.tiering.verify import ObjectFile, open_segment

SETTINGS = {"segment_bytes": 65_536, "block_bytes": 4096}
LOG_OPTIONS = LogOptions(segment_bytes=65_536, block_bytes=4096, segment_age_max_s=10.0)


def tier_options(**named: Any) -> TierOptions:
    """One upload at a time, small parts, nothing purged unless the test says so."""
    shipping = {"uploads_at_once": 1, "part_bytes": 10_000, **named.pop("shipping", {})}
    retention = {"age_max_s": None, "bytes_max": None, **named.pop("retention", {})}
    return TierOptions(
        shipping=ShippingOptions(**shipping),
        retention=RetentionOptions(**retention),
        cache_bytes_max=2**24,
        **named,
    )


@dataclass
class TieredMachine(Machine):
    """An embedded database whose history goes to `servers`, the first of which is read from."""

    servers: Sequence[FaultyStore] = field(default_factory=lambda: [FaultyStore()])
    options: TierOptions = field(default_factory=tier_options)
    disk_reserve_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.log_options = LOG_OPTIONS
        self.clients: list[FaultyStoreClient] = []

    @property
    def server(self) -> FaultyStore:
        return self.servers[0]

    def open_log(self) -> Log:
        compression = Compression[self.log_options.compression.upper()].value
        create = create_entry(CLUSTER_ID, SALT, SETTINGS | {"compression": compression})
        options = replace(self.log_options, segment_age_max_s=None)
        return Log.open(f"{DIRECTORY}/wal", options=options, seams=self.seams(), create=create)

    def open(self) -> Database:
        self.open_log().close()  # makes it where there is none
        self.pages.reopen()
        self.db = None
        self.clients = [server.open(f"life {self.files.life}") for server in self.servers]
        self.db = open_tiered(
            DIRECTORY,
            self.clients,
            self.options,
            log_options=self.log_options,
            options=EngineOptions(
                pool_bytes_max=2**20,
                checkpoint_interval_s=self.checkpoint_interval_s,
                disk_reserve_bytes=self.disk_reserve_bytes,
            ),
            seams=self.seams(),
            store=self.pages,
            create=False,
        )
        db: Database = self.db
        return db

    def crash(self, mode: Survival, rng: random.Random) -> None:
        super().crash(mode, rng)
        for client in self.clients:
            client.crash()

    def later(self, seconds: float) -> None:
        """Let time pass, second by second, and everything happen that it brings."""
        for _ in range(int(seconds)):
            self.idle(1.0)


def shared(objects: dict[str, bytes]) -> dict[str, bytes]:
    """What is a function of the log."""
    return {name: data for name, data in but_states(objects).items() if not name.startswith(EPOCHS)}


def but_states(objects: dict[str, bytes]) -> dict[str, bytes]:
    """What all regions have alike: a claim is in the states of the one that it was made in."""
    return {name: data for name, data in objects.items() if not name.startswith(STATES)}


def objects_of(server: FaultyStore) -> dict[str, bytes]:
    return dict(server.objects.data)


def archived(server: FaultyStore, *, lies: bool = False) -> tuple[Catalogue, list[tuple[int, bytes]]]:
    """What a reader finds: every object is sound, the segments follow one another, and their frames. Of a
    store that lies a state may have been passed over, which is never written over."""
    store = MemoryStore(objects=server.objects)
    if not server.objects.data:
        return Catalogue(), []
    wrong = [
        each
        for each in Scrub(store, deep=True, at_once=1).findings()
        if each.severity != "note"
        and not (lies and each.severity == "warning" and f"/{STATES}" in each.where)
    ]
    assert wrong == [], wrong
    archive = open_archive(store)
    newest = archive.newest()
    if newest is None:
        return Catalogue(), []
    catalogue = archive.catalogue_of(newest)
    frames: list[tuple[int, bytes]] = []
    seq, segment_hash = 0, bytes(32)
    for segment in catalogue.segments:
        file = open_segment(ObjectFile(store, segment_name(segment)))
        data = file.read_at(0, file.size())
        assert len(data) == segment.size
        scan = scan_frames(file, _header(data), stop=segment.body_bytes)
        header = _header(data)
        assert (header.seq_before, header.hash_before) == (seq, segment_hash), "a gap in the archive"
        frames += [_frame(data, position) for position in scan.positions]
        seq, segment_hash = segment.last, segment.hash
    return catalogue, frames


def _header(data: bytes) -> Any:
    from lowwater.engine.format.format import HEADER_BYTES, SegmentHeader

    return SegmentHeader.decode(data[:HEADER_BYTES])


def _frame(data: bytes, position: int) -> tuple[int, bytes]:
    from lowwater.engine.format.format import FRAME, FRAME_BYTES

    seq, length, _ = FRAME.unpack_from(data, position)
    return seq, data[position + FRAME_BYTES : position + FRAME_BYTES + length]


def manifests_of(server: FaultyStore) -> list[int]:
    """The seqs of all manifests."""
    found = [parse(name) for name in sorted(server.objects.data)]
    return [each.seq for each in found if each is not None and each.type == "manifest"]


class Order:
    """Who orders entries for any number of engines, in one thread: each gets every entry at once."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, Request]] = []
        self.engines: list[Engine] = []
        self.proposals = 0
        self.order(Create(CLUSTER_ID, SALT, settings=SETTINGS))

    def order(self, entry: Request) -> int:
        seq = (self.entries[-1][0] if self.entries else 0) + len(members_of(entry))
        self.entries.append((seq, entry))
        for engine in self.engines:
            self.deliver(engine)
        return seq

    def deliver(self, engine: Engine) -> None:
        """Everything that it has not applied yet, and the low-water mark."""
        applied = engine.marks().applied
        for seq, entry in [each for each in self.entries if each[0] > applied]:
            if seq > engine.marks().applied:
                engine.apply_log_entry(seq, entry)
        engine.sync()
        for each in self.engines:
            each.update_low_water_mark(min(other.marks().durable for other in self.engines))

    # ---- as an engine sees it

    def get_low_water_mark(self) -> int:
        return 0

    def fetch_log_entries(self, seq_first: int, seq_last: int) -> Iterable[tuple[int, Request]]:
        return [each for each in self.entries if seq_first <= each[0] <= seq_last]

    def propose(self, entry: Request) -> None:
        self.proposals += 1
        assert isinstance(entry, Control)
        self.order(entry)


@dataclass
class FedMachine(TieredMachine):
    """A fed engine."""

    order: Order = field(default_factory=Order)

    def open(self) -> Any:
        self.pages.reopen()
        self.clients = [server.open(f"life {self.files.life}") for server in self.servers]
        self.db = Engine(
            DIRECTORY,
            self.clients,
            orchestrator=self.order,
            log_options=self.log_options,
            options=EngineOptions(pool_bytes_max=2**20, checkpoint_interval_s=None, disk_reserve_bytes=0),
            seams=self.seams(),
            store=self.pages,
            tier_options=self.options,
        )
        return self.db


def crashes(machine: TieredMachine, number: int, *, after: bool) -> None:
    """Have the program end at an operation of its first store, counted from now."""
    machine.server.crash_at(machine.server.operations + number, after=after)


__all__ = ["SimulatedCrash"]
