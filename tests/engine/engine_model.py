"""A model of the database, and a driver that holds a database to it on a disk that forgets.

Always true:
  - a `Model` is dictionaries of versions and nothing else. It shares no code with the engine: its root is
    written from the description in `docs/CHECKPOINT.md`;
  - a `Driver` runs a database in one thread, from one seed. It knows what every call must return before it
    makes it, and what a call that a crash interrupts may have done.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from struct import pack
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import cbor2
import pytest
from blake3 import blake3
from tests.engine.images import check_images
from tests.engine.transaction_model import TransactionCalls, TransactionChances

from lowwater.chaos.clock import SeededRandomness, VirtualClock
from lowwater.chaos.disk import FaultyFiles, SimulatedCrash
from lowwater.chaos.runner import StepRunner
from lowwater.chaos.survival import SURVIVALS, Survival
from lowwater.engine.checkpoint import leaving
from lowwater.engine.checkpoint.checkpoints import StoredCheckpoint
from lowwater.engine.database import redo as replay
from lowwater.engine.database import transactions
from lowwater.engine.database.database import Database, EngineOptions
from lowwater.engine.database.opening import open_with
from lowwater.engine.database.upkeep import KEEP_AS_IT_IS, VersionPolicy
from lowwater.engine.flush import flush
from lowwater.engine.format import page as page_format
from lowwater.engine.format.ckpt import pack_name
from lowwater.engine.format.entries import Delete, Put, decode_body
from lowwater.engine.format.page import decode_page
from lowwater.engine.format.records import Head, Object, Page, is_transactional, transaction_of
from lowwater.engine.format.references import decode_reference, is_reference
from lowwater.engine.log.chain import create_entry
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.pages.memory_pages import MemoryPages
from lowwater.engine.state import away, state
from lowwater.engine.state.ranges import records_in
from lowwater.engine.state.transaction_table import ids_in
from lowwater.errors import (
    AlreadyExists,
    ConditionFailed,
    InputError,
    LowwaterError,
    NotEmpty,
    NotFound,
    RetryError,
    VersionGone,
)

T = TypeVar("T")

CLUSTER_ID = bytes(range(16))
SALT = bytes(range(16, 32))
PAGE_KEYS = 4
INLINE_BYTES_MAX = 256
DIRECTORY = "db"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


# ---------------------------------------------------------------------------- the model


class Version(NamedTuple):
    """`value` is None where the key, or the bucket, was deleted."""

    seq: int
    time_us: int
    value: bytes | None
    metadata: dict[str, str] | None = None


Objects = list[Object]
Names = list[str]
Scan = tuple[int, Iterator[Object], Objects]
"""The seq as of which it is, what is left of it, and what must be left"""

Effect = tuple[str, Any, Any, Any, Any]
"""(what, bucket or name, key, value or seq, metadata)"""


class Unit(NamedTuple):
    """What happens as a whole or not at all: one entry, or a group."""

    seq: int  # the last one
    time_us: int
    effects: list[Effect]


def encoded(bucket: str, key: str) -> bytes:
    name = bucket.encode()
    return bytes([len(name)]) + name + key.encode()


@dataclass
class SessionModel:
    ttl_us: int
    expires_us: int
    acknowledged: int = 0
    results: dict[int, int] = field(default_factory=dict)

    def request(self, unit: Unit, number: int, acknowledged: int) -> None:
        self.expires_us = unit.time_us + self.ttl_us
        self.acknowledged = max(self.acknowledged, acknowledged)
        self.results[number] = unit.seq
        self.results = {each: seq for each, seq in self.results.items() if each > self.acknowledged}

    @property
    def highest(self) -> int:
        return max(self.results, default=self.acknowledged)


class Model:
    def __init__(self, *, salt: bytes = SALT, page_keys: int = PAGE_KEYS) -> None:
        self.applied = 0
        self.time_us = 0
        self.horizon: int | None = None
        self.snapshots: dict[str, int] = {}
        self.expires_us: dict[str, int] = {}
        self.sessions: dict[int, SessionModel] = {}
        self.times: list[tuple[int, int]] = []
        self.checkpoint_seq = 0
        self.checkpoint_root = ""
        # What the engine keeps for checkpoints that are not made yet.
        self.due: Callable[[], list[int]] = list
        self.pins: Counter[int] = Counter()
        self.open_floors: list[int] = []  # of transactions that are in the log and have not ended
        self.buckets: dict[str, list[Version]] = {}
        self.keys: dict[str, dict[str, list[Version]]] = {}
        self._salt = blake3(salt).digest()
        self._page_keys = page_keys
        self._hashes: dict[bytes, int] = {}

    # ------------------------------------------------------------------ entries

    def apply(self, unit: Unit) -> None:
        assert unit.seq > self.applied
        for what, name, key, value, metadata in unit.effects:
            if what == "bucket":
                self._add(self.buckets.setdefault(name, []), Version(unit.seq, unit.time_us, value))
            elif what == "key":
                versions = self.keys.setdefault(name, {}).setdefault(key, [])
                self._add(versions, Version(unit.seq, unit.time_us, value, metadata or None))
            elif what == "horizon":
                self.horizon = None if value is None else max(value, self.horizon or 0)
            elif what == "pin":
                self.snapshots[name] = value
                if metadata is not None:
                    self.expires_us[name] = unit.time_us + metadata
            elif what == "unpin":
                del self.snapshots[name]
                self.expires_us.pop(name, None)
            elif what == "session":
                self.sessions[unit.seq] = SessionModel(value, unit.time_us + value)
            elif what == "session_close":
                del self.sessions[name]
            elif what == "request":
                self.sessions[name].request(unit, key, value)
            elif what == "checkpoint":
                self.checkpoint_seq = unit.seq
            else:
                assert what in ("create", "nothing"), what
        self.applied = unit.seq
        self.time_us = unit.time_us
        self.times.append((unit.time_us, unit.seq))
        if self.checkpoint_seq == unit.seq:
            self.checkpoint_root = self.root()

    def note(self, applied: int, time_us: int) -> None:
        """Entries without an effect."""
        if applied > self.applied:
            self.times.append((time_us, applied))
        self.applied, self.time_us = applied, time_us

    def forget_after(self, seq: int) -> None:
        """The loss of such entries."""
        while self.times[-1][1] > seq:
            self.times.pop()
        self.applied, self.time_us = seq, self.times[-1][0]

    def _add(self, versions: list[Version], version: Version) -> None:
        if versions and versions[-1].seq == version.seq:
            versions.pop()  # of several writes to a key in a group the last survives
        versions.append(version)
        if len(versions) > 40:
            floor = self.floor
            del versions[: max(0, bisect_right(versions, floor, key=lambda each: each.seq) - 1)]

    # ------------------------------------------------------------------ what can be read

    @property
    def floor_kept(self) -> int:
        """What the log itself keeps, whatever this process reads."""
        floors = [self.applied, *self.snapshots.values(), *self.open_floors]
        return min(floors if self.horizon is None else [*floors, self.horizon])

    @property
    def floor(self) -> int:
        return min([self.floor_kept, *self.pins, *self.due()])

    def seq_at(self, time_us: int) -> int:
        """The last seq that is not after a time; 0 where there is none."""
        index = bisect_right(self.times, (time_us, 2**64))
        return self.times[index - 1][1] if index else 0

    def can_read(self, at: int | None) -> bool:
        return at is None or self.floor <= at <= self.applied

    def has_bucket(self, bucket: str, at: int | None = None) -> bool:
        return _at(self.buckets.get(bucket, ()), at) is not None

    def get(self, bucket: str, key: str, at: int | None = None) -> Object | None:
        found = _at(self.keys.get(bucket, {}).get(key, ()), at)
        return None if found is None else _object(bucket, key, found)

    def live(self, bucket: str, prefix: str = "", at: int | None = None) -> Objects:
        found = []
        for key, versions in sorted(self.keys.get(bucket, {}).items()):
            if key.startswith(prefix) and (version := _at(versions, at)) is not None:
                found.append(_object(bucket, key, version))
        return found

    def list(
        self,
        bucket: str,
        prefix: str,
        delimiter: str | None,
        start_after: str | None,
        limit: int,
        at: int | None,
    ) -> Page:
        objects: list[Head] = []
        prefixes: list[str] = []
        last = None
        for found in self.live(bucket, prefix, at):
            key = found.key
            if start_after is not None and key <= start_after:
                continue
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key[: end + len(delimiter)] if delimiter and end >= 0 else key
            if end >= 0 and name in (*prefixes[-1:], start_after):
                continue
            if len(objects) + len(prefixes) == limit:
                return Page(objects, prefixes, last)
            last = name
            if end >= 0:
                prefixes.append(name)
            else:
                objects.append(_head(found))
        return Page(objects, prefixes, None)

    def bucket_names(self, at: int | None = None) -> Names:
        return sorted(bucket for bucket in self.buckets if self.has_bucket(bucket, at))

    # ------------------------------------------------------------------ the root

    def root(self, at: int | None = None) -> str:
        """The description: rows, cut into blocks at boundaries, and lists of blocks at rarer ones."""
        rows: list[Row] = []
        for bucket in self.bucket_names(at):
            version = _at(self.buckets[bucket], at)
            assert version is not None
            rows.append((b"\0" + bucket.encode(), version, 4))
            for found in self.live(bucket, at=at):
                version = _at(self.keys[bucket][found.key], at)
                assert version is not None
                rows.append((encoded(bucket, found.key), version, 0))
        blocks: list[list[Row]] = []
        before = b""
        for row in sorted(rows, key=lambda row: row[0]):
            key = row[0]
            if not blocks or (self.is_boundary(key, self._page_keys) and key[:500] != before[:500]):
                blocks.append([])
            blocks[-1].append(row)
            before = key
        lists: list[list[list[Row]]] = []
        for block in blocks:
            if not lists or self.is_boundary(block[0][0], self._page_keys * 256):
                lists.append([])
            lists[-1].append(block)
        return blake3(b"".join(blake3(_list(each)).digest() for each in lists)).hexdigest()

    def is_boundary(self, key: bytes, every: int) -> bool:
        key = key[:500]
        number = self._hashes.get(key)
        if number is None:
            number = int.from_bytes(blake3(key, key=self._salt).digest(8), "little")
            self._hashes[key] = number
        return number < 2**64 // every


def _at(versions: Sequence[Version], at: int | None) -> Version | None:
    """The newest version not above `at`; None where that is a deletion."""
    index = len(versions) if at is None else bisect_right(versions, at, key=lambda each: each.seq)
    return versions[index - 1] if index and versions[index - 1].value is not None else None


def _object(bucket: str, key: str, version: Version) -> Object:
    assert version.value is not None
    return Object(bucket, key, version.value, version.metadata, version.seq, version.time_us)


def _head(found: Object) -> Head:
    return Head(found.bucket, found.key, len(found.value), found.metadata, found.seq, found.time_us)


Row = tuple[bytes, Version, int]
"""encoded key, version, flags"""


def _block(rows: list[Row]) -> bytes:
    """A block of rows, as docs/CHECKPOINT.md describes it."""
    keys, metadata, values, flags = [], [], [], b""
    for key, version, flag in rows:
        assert version.value is not None
        keys.append(key)
        metadata.append(cbor2.dumps(version.metadata, canonical=True) if version.metadata else b"")
        if len(version.value) > INLINE_BYTES_MAX:
            flag |= 2
            values.append(pack("<Q", len(version.value)) + blake3(version.value).digest())
        else:
            values.append(version.value)
        flags += bytes([flag])
    sizes = [len(b"".join(parts)) for parts in (keys, metadata, values)]
    head = pack("<8sHHIIII4x", b"LWBLK\r\n\x1a", 1, 0, len(rows), *sizes)
    seqs = b"".join(pack("<Q", version.seq) for _, version, _ in rows)
    times = b"".join(pack("<Q", version.time_us) for _, version, _ in rows)
    ends = _ends(keys) + (_ends(metadata) if sizes[1] else b"") + _ends(values)
    return head + seqs + times + ends + flags + b"".join([*keys, *metadata, *values])


def _list(blocks: list[list[Row]]) -> bytes:
    """A list of blocks, likewise."""
    keys = [rows[0][0][:500] for rows in blocks]
    data = [_block(rows) for rows in blocks]
    head = pack("<8sHHII4x", b"LWLST\r\n\x1a", 1, 0, len(blocks), len(b"".join(keys)))
    hashes = b"".join(blake3(each).digest() for each in data)
    counts = b"".join(pack("<I", len(rows)) for rows in blocks)
    sizes = b"".join(pack("<I", len(each)) for each in data)
    return head + hashes + counts + sizes + _ends(keys) + b"".join(keys)


def _ends(parts: list[bytes]) -> bytes:
    return b"".join(pack("<I", end) for end in accumulate(map(len, parts)))


# ---------------------------------------------------------------------------- the machine


@contextmanager
def small_limits(
    *, range_pages: int = 6, changes_max: int = 12, group_bytes: int = 20_000, read_bytes: int = 4096
) -> Iterator[None]:
    """What takes a big database otherwise: ranges that divide, groups that are not everything, runs of a
    log that end inside a segment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "RANGE_PAGES", range_pages)
        patch.setattr(flush, "RANGE_PAGES", range_pages)
        patch.setattr(flush, "CHANGES_MAX", changes_max)
        patch.setattr(flush, "GROUP_BYTES", group_bytes)
        patch.setattr(flush, "MERGED_AT_ONCE", 3)
        patch.setattr(flush, "PARTS_MAX", 3)
        patch.setattr(flush, "PART_CHANGES_MIN", 4)
        patch.setattr(flush, "SWEEP_ABOVE_BYTES", 2000)
        patch.setattr(transactions, "SPILL_ABOVE_BYTES", 700)
        patch.setattr(transactions, "PIECE_BYTES", 300)
        patch.setattr(replay, "READ_BYTES", read_bytes)
        patch.setattr(away, "RETURNING_BYTES_MIN", 4000)
        patch.setattr(leaving, "RUN_PAGES", 5)
        yield


def tiny(options: EngineOptions, pool_bytes_max: int) -> EngineOptions:
    """A pool of a few pages, below what is sensible and allowed."""
    object.__setattr__(options, "pool_bytes_max", pool_bytes_max)
    return options


class ArchiveDown(RetryError):
    """What a store says that cannot be reached."""


class Archive:
    """Packs of checkpoints as an object store would have them, which nothing here removes. It can be down."""

    def __init__(self) -> None:
        self.packs: dict[bytes, bytes] = {}
        self.is_down = False
        self.reads = 0

    def ship(self, stored: StoredCheckpoint) -> None:
        for name, size in stored.index.packs.items():
            if name not in self.packs:
                self.packs[name] = stored.read_packed(name, 0, size)

    def read_block(self, pack: bytes, offset: int, size: int, block_hash: bytes) -> bytes:
        if self.is_down:
            raise ArchiveDown("the archive is down")
        if pack not in self.packs:
            raise NotFound("there is no such pack")
        self.reads += 1
        return self.packs[pack][offset : offset + size]

    def damaged(self, pack: bytes) -> str:
        return f"packs/{pack_name(pack)}"


@dataclass
class Machine:
    """A database and everything under it. `open` begins a life of the program, `crash` ends it."""

    seed: int = 0
    pool_bytes_max: int = 2**20
    checkpoint_interval_s: float | None = None
    log_options: LogOptions = field(
        default_factory=lambda: LogOptions(segment_bytes=16_384, block_bytes=4096)
    )
    page_keys: int = PAGE_KEYS
    clock: VirtualClock = field(default_factory=VirtualClock)
    versions: VersionPolicy = KEEP_AS_IT_IS
    archive: Archive = field(default_factory=Archive)

    def __post_init__(self) -> None:
        self.files = FaultyFiles(clock=self.clock)
        self.pages = MemoryPages(self.files)
        self.randomness = SeededRandomness(self.seed)
        self.rng = random.Random(f"steps {self.seed}")
        self.runner = StepRunner(self.clock)
        self.db: Any = None

    def seams(self) -> Seams:
        self.runner = StepRunner(self.clock)
        return Seams(
            files=self.files,
            clock=self.clock,
            randomness=self.randomness,
            runner=self.runner,
            owner=f"life {self.files.life}",
        )

    def open_log(self) -> Log:
        options = self.log_options
        settings = {
            "segment_bytes": options.segment_bytes,
            "block_bytes": options.block_bytes,
            "page_keys": self.page_keys,
            **({"before_images": 1} if options.before_images else {}),
        }
        create = create_entry(CLUSTER_ID, SALT, settings)
        return Log.open(f"{DIRECTORY}/wal", options=options, seams=self.seams(), create=create)

    def open(self) -> Database:
        self.open_log().close()  # makes it where there is none
        options = EngineOptions(checkpoint_interval_s=self.checkpoint_interval_s, versions=self.versions)
        self.pages.reopen()
        self.db = None
        self.db = open_with(
            DIRECTORY,
            log_options=self.log_options,
            options=tiny(options, self.pool_bytes_max),
            seams=self.seams(),
            store=self.pages,
            create=False,
            blocks=self.archive,
        )
        db: Database = self.db
        return db

    def crash(self, mode: Survival, rng: random.Random) -> None:
        self.files.crash(rng, mode)
        self.pages.crash()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if not self.runner.run_one(self.rng):
                break

    def idle(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.runner.run_until_idle(self.rng)

    def wal_segments(self) -> dict[str, bytes]:
        """All segments by name."""
        contents = {}
        for name in self.files.list(f"{DIRECTORY}/wal"):
            if name.startswith("segment-"):
                file = self.files.open(f"{DIRECTORY}/wal/{name}")
                contents[name] = file.read_at(0, file.size())
                file.close()
        return contents


def page_of(db: Any, key: bytes, data: bytes) -> page_format.DataPage:
    """A page as the store has it, or as its reference says."""
    if not is_reference(data):
        return decode_page(data, key)
    found: page_format.DataPage = db._state.away.read(key, data)
    assert found.seq == decode_reference(data, key).page_seq
    return found


def check_structure(db: Any, store: MemoryPages, seen: Counter[str] | None = None) -> None:
    """What is always true between two calls, whatever was done: ranges, pages, and what is counted."""
    inside = db._state
    lows, ranges = inside.map.view
    assert lows == sorted(set(lows))
    assert lows[0] == b"\0"
    overhead = state.RECORD_OVERHEAD_BYTES
    dirty_bytes = clean_bytes = 0
    keys: list[bytes] = []
    for each, low, high in zip(ranges, lows, [*lows[1:], None], strict=True):
        layout = each.layout
        assert each.low == low
        assert all(low <= key and (high is None or key < high) for key in (*layout.keys, *each.dirty))
        assert bool(each.dirty) == bool(each.rec_seq)
        assert (each.frozen is not None) or not each.frozen_older
        for records, older in ((each.dirty, each.older), (each.frozen or {}, each.frozen_older)):
            every = [*records.values(), *(record for held in older.values() for record in records_in(held))]
            dirty_bytes += sum(len(record) + overhead for record in every)
            assert set(older) <= set(records)
            txns = each.txns if records is each.dirty else each.frozen_txns
            assert {transaction_of(record) for record in every if is_transactional(record)} <= txns
            assert txns <= set(inside.transactions.rows)
        keys += layout.keys
        clean_bytes += sum(layout.sizes)
        assert all(page is not None for page, size in zip(layout.pages, layout.sizes, strict=True) if size)
    assert keys == sorted(set(keys))
    if seen is not None:
        seen["pages, at most"] = max(seen["pages, at most"], len(keys))
        seen["ranges, at most"] = max(seen["ranges, at most"], len(lows))
    assert inside.dirty_bytes == dirty_bytes, "changes are counted wrongly"
    assert inside.clean.bytes == clean_bytes, "pages in memory are counted wrongly"
    if any(each.frozen is not None for each in ranges):
        return  # a group is between its layouts and the store
    unstamped = {key: ids_in(page_of(db, key, data)) for key, data in store._pages.items()}
    assert inside.transactions.unstamped == {key: ids for key, ids in unstamped.items() if ids}
    unstored = db._flusher._unstored
    assert [key for key in keys if key not in unstored] == sorted(store._pages)
    for key in sorted(store._pages):
        page = page_of(db, key, store._pages[key])
        assert page.keys, "an empty page"
        assert page.keys == sorted(page.keys)
        assert page.seq <= db._wal.durable_seq, "a page got ahead of the log"
        for found in page.keys:
            assert found >= key
            assert found[:500] == key or not inside.boundaries.is_boundary(found), "a page was not cut"


# ---------------------------------------------------------------------------- the driver


class Driver(TransactionCalls):
    """Calls of a database, each compared with the model."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.model = Model(page_keys=machine.page_keys)
        self.rng = random.Random(f"crashes {machine.seed}")
        self.pending: list[Unit] = []
        self.txns = []
        self.acked = 0  # frames of transactions above it may be lost
        self.lost_transactions = False
        self.scans: list[Scan] = []
        self.serial = 0
        self.crashes = 0
        self.seen: Counter[str] = Counter()

    @property
    def db(self) -> Any:
        return self.machine.db

    # ------------------------------------------------------------------ lives

    def open(self) -> None:
        self.machine.open()
        self._know_due()
        self._compare_marks()

    def _know_due(self) -> None:
        inside = self.db._state
        self.model.due = lambda: [due.seq for due in inside.checkpoints_due]

    def close(self) -> None:
        for _, scan, _ in self.scans:
            scan.close()  # type: ignore[attr-defined]
        self.scans, self.model.pins = [], Counter()
        self._forget_all()
        self.machine.db.close()

    def reopen(self) -> None:
        self.close()
        self.open()

    def recover(self, mode: Survival | None = None, *, again: float = 0.3) -> None:
        """The program is gone: open again, and find what was acknowledged, and perhaps more of what was
        under way, from its beginning on."""
        self.crashes += 1
        self.scans, self.model.pins = [], Counter()
        self._forget_all()
        rng, files = self.rng, self.machine.files
        while True:
            self.machine.crash(rng.choice(SURVIVALS) if mode is None else mode, rng)
            if rng.random() < again:
                files.crash_at(files.operations + rng.randint(1, 12), after=rng.random() < 0.5)
            try:
                self.machine.open()
                break
            except SimulatedCrash:
                continue
        files._crash_number = None
        self._know_due()
        self._compare_marks()

    def _compare_marks(self) -> None:
        """Also after a crash: `pending` is what may have come through."""
        model, db = self.model, self.db
        if self.acked < model.applied:
            db._log.sync()  # frames of transactions, for which nobody has waited
        marks = db.marks()
        if model.applied == 0:
            assert marks.applied == 1
            model.apply(Unit(1, db._log.chain.time_us, [("create", None, None, None, None)]))
        if self.lost_transactions:
            self.lost_transactions = False
            self._recount()
        else:
            for unit in self.pending:
                if unit.seq <= marks.applied:
                    model.apply(unit)
        self.pending = []
        self.absorb()
        self.acked = model.applied
        assert marks.applied == model.applied, "something acknowledged was lost, or a group was divided"
        assert marks.committed == marks.durable == marks.applied
        assert 0 <= marks.purged <= marks.hwm <= marks.lwm <= marks.durable
        assert db._log.chain.time_us == model.time_us
        assert {name: found.seq for name, found in db.snapshots().items()} == model.snapshots
        assert {name: found.expires_us for name, found in db.snapshots().items() if found.expires_us} == (
            model.expires_us
        )
        assert sorted(db._state.sessions.sessions) == sorted(model.sessions)
        assert db.buckets() == model.bucket_names()

    def absorb(self) -> None:
        """Entries that the database itself has written: what was over has ended."""
        model = self.model
        if self.db.marks().applied == model.applied:
            return
        for entry in self.db.log(model.applied + 1):
            self._absorb(entry)
        self.acked = max(self.acked, model.applied)

    def _absorb(self, entry: Any) -> None:
        model = self.model
        body = decode_body(entry)
        if entry.kind == "unpin":
            effect: Effect = ("unpin", body["name"], None, None, None)
            expires_us = model.expires_us[body["name"]]
        else:
            assert entry.kind == "session_close", f"nobody has written this {entry.kind}"
            effect = ("session_close", body["session"], None, None, None)
            expires_us = model.sessions[body["session"]].expires_us
        assert entry.time_us >= expires_us, "it ended too early"
        model.apply(Unit(entry.seq, entry.time_us, [effect]))
        self.seen["ended"] += 1

    def _recount(self) -> None:
        """The entries behind what was acknowledged, where transactions were open that have ended with the
        process: what a crash has left of them and of what was pending, and what opening has appended."""
        model = self.model
        units = {unit.seq: unit for unit in self.pending}
        pending = {
            seq for unit in self.pending for seq in range(unit.seq - len(unit.effects) + 1, unit.seq + 1)
        }
        model.forget_after(min(self.acked, model.applied))
        for entry in self.db.log(model.applied + 1):
            is_of_transaction = entry.txn is not None or entry.kind == "begin"
            # The database may have ended by itself, under this seq, what somebody was about to end.
            effects = units[entry.seq].effects if entry.seq in units else ()
            was_asked_for = bool(effects) and effects[-1][0] == entry.kind
            if entry.seq in units and (
                was_asked_for or entry.kind not in ("begin", "abort", "unpin", "session_close")
            ):
                model.apply(units[entry.seq])
            elif is_of_transaction or (entry.seq in pending and entry.kind not in ("unpin", "session_close")):
                model.note(entry.seq, entry.time_us)
            else:
                self._absorb(entry)
        model.note(model.applied, self.db._log.chain.time_us)

    # ------------------------------------------------------------------ calls

    _unit = Unit

    def _units(self, *effects: Effect) -> list[Unit]:
        """An entry for each effect."""
        time_us = max(self.machine.clock.now_us(), self.model.time_us)
        return [Unit(seq, time_us, [effect]) for seq, effect in enumerate(effects, self.model.applied + 1)]

    def _commit(self, units: list[Unit], call: Callable[[], int], offset: int = 0) -> None:
        self.pending = units
        seq = call()
        for unit in units:
            self.model.apply(unit)
            self._doom(unit.effects)
        self.pending = []
        self.acked = units[-1].seq
        assert seq + offset == units[-1].seq
        self.seen["written"] += 1

    def _refused(self, error: type[LowwaterError], call: Callable[[], object]) -> None:
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
        self.seen[error.__name__] += 1

    def value(self, size: int) -> bytes:
        """A value that no other is equal to, where it is long enough."""
        self.serial += 1
        part = b"%d " % self.serial
        return (part * (size // len(part) + 1))[:size]

    def create_bucket(self, bucket: str) -> None:
        def call() -> int:
            return int(self.db.create_bucket(bucket))

        if self.model.has_bucket(bucket):
            self._refused(AlreadyExists, call)
        else:
            self._commit(self._units(("bucket", bucket, None, b"", None)), call)

    def delete_bucket(self, bucket: str) -> None:
        def call() -> int:
            return int(self.db.delete_bucket(bucket))

        if not self.model.has_bucket(bucket):
            self._refused(NotFound, call)
        elif self.model.live(bucket) or self.is_held(bucket):
            self._refused(NotEmpty, call)
        else:
            self._commit(self._units(("bucket", bucket, None, None, None)), call)

    def put(
        self, bucket: str, key: str, value: bytes, metadata: dict[str, str] | None = None, **condition: Any
    ) -> None:
        def call() -> int:
            return int(self.db.put(bucket, key, value, metadata, **condition))

        if not self.model.has_bucket(bucket):
            return self._refused(NotFound, call)
        if condition:
            found = self.model.get(bucket, key)
            if (found.seq if found else 0) != condition.get("if_seq", 0):
                return self._refused(ConditionFailed, call)
        return self._commit(self._units(("key", bucket, key, value, metadata)), call)

    def put_many(self, bucket: str, items: list[tuple[str, bytes]]) -> None:
        def call() -> int:
            return int(self.db.put_many(bucket, items))

        if self.model.has_bucket(bucket):
            self._commit(self._units(*[("key", bucket, key, value, None) for key, value in items]), call)
        else:
            self._refused(NotFound, call)

    def delete(self, bucket: str, key: str) -> None:
        def call() -> int:
            return int(self.db.delete(bucket, key))

        if self.model.has_bucket(bucket) and self.model.get(bucket, key) is not None:
            self._commit(self._units(("key", bucket, key, None, None)), call)
        else:
            self._refused(NotFound, call)

    def copy(self, bucket: str, key: str, to_bucket: str, to_key: str) -> None:
        def call() -> int:
            return int(self.db.copy(bucket, key, to_bucket, to_key))

        found = self.model.get(bucket, key) if self.model.has_bucket(bucket) else None
        if found is not None and self.model.has_bucket(to_bucket):
            self._commit(self._units(("key", to_bucket, to_key, found.value, found.metadata)), call)
        else:
            self._refused(NotFound, call)

    def write(self, entries: list[Put | Delete]) -> None:
        def call() -> int:
            return int(self.db.write(entries))

        if all(self.model.has_bucket(entry.bucket) for entry in entries):
            effects: list[Effect] = [
                ("key", entry.bucket, entry.key, entry.value, entry.metadata)
                if isinstance(entry, Put)
                else ("key", entry.bucket, entry.key, None, None)
                for entry in entries
            ]
            last = self._units(*effects)[-1]
            self._commit([Unit(last.seq, last.time_us, effects)], call)
        else:
            self._refused(NotFound, call)

    def snapshot(self, name: str, ttl_s: float | None = None) -> None:
        def call() -> int:
            return int(self.db.snapshot(name, ttl_s))

        if name in self.model.snapshots:
            self._refused(AlreadyExists, call)
        else:
            ttl_us = None if ttl_s is None else round(ttl_s * 1_000_000)
            self._commit(self._units(("pin", name, None, self.model.applied, ttl_us)), call, 1)

    def drop_snapshot(self, name: str) -> None:
        def call() -> int:
            return int(self.db.drop_snapshot(name))

        if name in self.model.snapshots:
            self._commit(self._units(("unpin", name, None, None, None)), call)
        else:
            self._refused(NotFound, call)

    def move_horizon(self, seq: int | None) -> None:
        def call() -> int:
            return int(self.db.move_horizon(seq))

        if seq is None or self.model.floor_kept <= seq <= self.model.applied:
            self._commit(self._units(("horizon", None, None, seq, None)), call)
        else:
            self._refused(VersionGone, call)

    # ------------------------------------------------------------------ sessions

    def open_session(self, ttl_s: float) -> None:
        def call() -> int:
            return int(self.db.session(ttl=ttl_s).id)

        self._commit(self._units(("session", None, None, round(ttl_s * 1_000_000), None)), call)

    def close_session(self, session_id: int) -> None:
        def call() -> int:
            self.db.session(session_id).close()
            return int(self.db.marks().applied)

        if session_id in self.model.sessions:
            self._commit(self._units(("session_close", session_id, None, None, None)), call)
        else:
            self._refused(NotFound, call)

    def request(
        self, session_id: int, number: int, acknowledged: int, bucket: str, items: list[tuple[str, bytes]]
    ) -> None:
        """One put, or several as a group, under a number that may have come before."""

        def call() -> int:
            session = self.db.session(session_id)
            if acknowledged:
                session.acknowledge(acknowledged)
            if len(items) == 1:
                return int(session.put(bucket, *items[0], request=number))
            return int(session.write([Put(bucket, *item) for item in items], request=number))

        session = self.model.sessions.get(session_id)
        if session is None:
            return self._refused(NotFound, call)
        if number in session.results:
            assert call() == session.results[number]
            self.seen["repeated"] += 1
            return None
        if number <= session.acknowledged:
            return self._refused(InputError, call)
        if not self.model.has_bucket(bucket):
            return self._refused(NotFound, call)
        told = min(max(session.acknowledged, acknowledged), number - 1)
        effects: list[Effect] = [("key", bucket, key, value, None) for key, value in items]
        last = self._units(*effects)[-1]
        effects.append(("request", session_id, number, told, None))
        return self._commit([Unit(last.seq, last.time_us, effects)], call)

    # ------------------------------------------------------------------ reads

    def get_at_time(self, bucket: str, key: str, time_us: int) -> None:
        moment = EPOCH + timedelta(microseconds=time_us)
        seq = self.model.seq_at(time_us)
        if not seq or not self.model.can_read(seq):
            return self._refused(VersionGone, lambda: self.db.get(bucket, key, moment))
        assert self.db.seq_at(moment) == seq
        found = self.model.get(bucket, key, seq)
        if found is None:
            return self._refused(NotFound, lambda: self.db.get(bucket, key, moment))
        assert self.db.get(bucket, key, moment) == found
        assert (
            self.db.read_range(bucket, key, len(found.value) // 3, 300, seq)
            == (found.value[len(found.value) // 3 :][:300])
        )
        self.seen["found at a time"] += 1
        return None

    def get(self, bucket: str, key: str, at: int | None = None, *, head: bool = False) -> None:
        if not self.model.can_read(at):
            return self._refused(VersionGone, lambda: self.db.get(bucket, key, at))
        found = self.model.get(bucket, key, at)
        if found is None:
            return self._refused(NotFound, lambda: self.db.get(bucket, key, at))
        if head:
            assert self.db.head(bucket, key, at) == _head(found)
        elif at is not None and at % 2:
            assert self.db.read(bucket, key, at) == found
        else:
            assert self.db.get(bucket, key, at) == found
        self.seen["found"] += 1
        return None

    def list(
        self,
        bucket: str,
        prefix: str = "",
        delimiter: str | None = None,
        start_after: str | None = None,
        limit: int = 1000,
        at: int | None = None,
    ) -> None:
        """Page after page, to the end."""

        def page() -> Any:
            return self.db.list(bucket, prefix, delimiter, start_after, limit, at)

        if at is None and not self.model.has_bucket(bucket):
            return self._refused(NotFound, page)
        if not self.model.can_read(at):
            return self._refused(VersionGone, page)
        while True:
            found = page()
            assert found == self.model.list(bucket, prefix, delimiter, start_after, limit, at)
            if found.next is None:
                return None
            start_after = found.next
            self.seen["pages"] += 1

    def open_scan(
        self, bucket: str, prefix: str = "", start_after: str | None = None, at: int | None = None
    ) -> None:
        """A scan that goes on while other things happen."""

        def call() -> Any:
            return self.db.scan(bucket, prefix, start_after=start_after, at=at)

        if at is None and not self.model.has_bucket(bucket):
            return self._refused(NotFound, call)
        if not self.model.can_read(at):
            return self._refused(VersionGone, call)
        pinned = self.model.applied if at is None else at
        expected = [
            found
            for found in self.model.live(bucket, prefix, pinned)
            if start_after is None or found.key > start_after
        ]
        self.scans.append((pinned, call(), expected))
        self.model.pins[pinned] += 1
        if len(self.scans) > 4:
            self.advance_scan(0, None)
        return None

    def advance_scan(self, index: int, count: int | None) -> None:
        """So many objects of a scan, or all that are left; it ends when it has no more."""
        if not self.scans:
            return
        _, scan, expected = self.scans[index % len(self.scans)]
        count = len(expected) + 1 if count is None else count
        found: Objects = []
        ended = False
        while len(found) < count and not ended:
            each = next(scan, None)
            ended = each is None
            if each is not None:
                found.append(each)
        assert found == expected[: len(found)]
        del expected[: len(found)]
        if ended:
            assert not expected
            self._forget_scan(index)
            self.seen["scans"] += 1

    def abandon_scan(self, index: int) -> None:
        """Also one that never began."""
        if self.scans:
            self.scans[index % len(self.scans)][1].close()  # type: ignore[attr-defined]
            self._forget_scan(index)

    def _forget_scan(self, index: int) -> None:
        pinned = self.scans.pop(index % len(self.scans))[0]
        self.model.pins[pinned] -= 1
        self.model.pins = +self.model.pins

    def root(self, at: int | None = None) -> None:
        if self.model.can_read(at):
            assert self.db.root(at) == self.model.root(at)
        else:
            self._refused(VersionGone, lambda: self.db.root(at))

    def flush(self) -> None:
        assert self.db.flush() == self.model.applied
        assert self.db._flusher.is_flushed(self.model.applied)

    def checkpoint(self) -> None:
        """Made of what is there now; where nothing has happened since the last one, that one."""

        def call() -> int:
            return int(self.db.checkpoint().partition("-")[0])

        if self.model.applied == self.model.checkpoint_seq:
            assert call() == self.model.checkpoint_seq
        else:
            self._commit(self._units(("checkpoint", None, None, None, None)), call)
        self.compare_checkpoint()

    def compare_checkpoint(self) -> None:
        """The last one that was asked for, where it is made already."""
        newest = next(iter(self.db.checkpoints()), None)
        if newest is None or newest.seq != self.model.checkpoint_seq:
            return
        assert newest.root == self.model.checkpoint_root
        assert len(list(newest.rows())) == newest.index.row_count
        self.seen["checkpoints"] += 1

    def pages_leave(self, wants: Callable[[bytes], bool]) -> None:
        """Pages that are blocks of the newest checkpoint, and among those that are wanted to leave."""
        newest = next(iter(self.db.checkpoints()), None)
        if newest is not None:
            self.machine.archive.ship(newest)
            self.seen["left"] += self.db.leaving.leave(newest, wants)
            self.seen["away, at most"] = max(self.seen["away, at most"], len(list(self.db.leaving.away())))

    def in_outage(self, call: Callable[[], object]) -> None:
        """A call while the archive is down: it is answered as ever, or refused, and then had no effect."""
        archive = self.machine.archive
        archive.is_down = True
        applied = self.model.applied
        try:
            self.guarded(call)
        except ArchiveDown:
            self.seen["refused in an outage"] += 1
            archive.is_down = False
            if self.db is None:
                self.recover()  # more has to be read than fits into memory
            else:
                assert self.db._failure is None, "an outage ended the writing"
                assert self.db.marks().applied == self.model.applied >= applied
                self.pending = []
        finally:
            archive.is_down = False

    def compare(self) -> None:
        """Everything that can be read now."""
        self._compare_marks()
        for bucket in self.model.bucket_names():
            assert list(self.db.scan(bucket)) == self.model.live(bucket)
        self.root()
        for session_id, session in self.model.sessions.items():
            assert self.db.session(session_id).results() == session.results
        self.compare_checkpoint()
        check_structure(self.db, self.machine.pages, self.seen)

    # ------------------------------------------------------------------ chance

    def guarded(self, call: Callable[[], object]) -> None:
        """A call that a crash may end."""
        try:
            call()
        except SimulatedCrash:
            self.recover()


BUCKETS = ("a", "bb", "ü" * 3)
LONG = "long/" + "x" * 500
KEYS = (
    *(f"{'abcde'[n % 5]}/{n % 7}/{n}" for n in range(70)),
    *(f"{n:02}" for n in range(30)),
    *(f"ü{n}\U0010ffff" for n in range(5)),
    *(f"{LONG}{n}" for n in range(4)),
    "a", "a/", "a//", "z" * 1024,
)  # fmt: skip
PREFIXES = ("", "", "a", "a/", "a/1", "a/1/", "b/", "ü", "0", "1", "long", "zz", "nothing", "\U0010ffff")
SIZES = (0, 5, 5, 20, 20, 60, 60, 200, 255, 256, 257, 280, 320, 1000, 3000)


class Chance(TransactionChances):
    """Draws calls for a driver from one seed."""

    WEIGHTS: ClassVar[dict[str, float]] = {
        "put": 30, "put_many": 10, "put_ascending": 1, "put_if": 6, "delete": 14, "copy": 6, "write": 8,
        "get": 14, "get_at": 10,
        "list": 5, "open_scan": 4, "advance_scan": 8, "abandon_scan": 1, "create_bucket": 8,
        "delete_bucket": 2, "empty_bucket": 1, "snapshot": 2, "drop_snapshot": 2, "move_horizon": 2,
        "root": 1, "flush": 1, "checkpoint": 2, "step": 40, "idle": 2, "advance": 6, "reopen": 1, "crash": 1,
        "crash_soon": 2, "compare": 1, "delete_run": 4, "snapshot_that_ends": 2, "get_at_time": 6,
        "open_session": 1, "close_session": 0.3, "request": 10, "pages_leave": 8, "pages_come": 1,
        "store_down_for_a_while": 2,
    }  # fmt: skip
    # Of what is called while the store is down: what either happens, or does not.
    IN_OUTAGE = (
        "put", "put", "put_many", "put_if", "delete", "copy", "write", "get", "get", "get_at", "list",
        "delete_bucket", "snapshot", "root", "flush", "step", "step", "step", "advance", "request", "reopen",
        "crash", "crash_soon", "get_at_time",
    )  # fmt: skip

    def __init__(self, driver: Driver, rng: random.Random) -> None:
        self.driver = driver
        self.rng = rng
        weights = self.WEIGHTS
        if rng.random() < 0.6:
            often = rng.choice((1, 4))
            weights = weights | {
                name: weight * often for name, weight in self.WEIGHTS_IN_TRANSACTIONS.items()
            }
        if rng.random() < 0.2:
            weights = weights | {"put_ascending": 20}
        self.names = list(weights)
        rare = rng.choice((0.1, 1, 3))  # some databases live long
        self.weights = [
            weight * (rare if "crash" in name or name == "reopen" else 1) for name, weight in weights.items()
        ]
        self.keys = rng.sample(KEYS, rng.choice((20, len(KEYS))))
        self.next_number = 0

    def run(self, steps: int) -> None:
        for name in self.rng.choices(self.names, self.weights, k=steps):
            self.driver.guarded(getattr(self, name))

    def at(self) -> int:
        model = self.driver.model
        if self.rng.random() < 0.1:
            return self.rng.choice((max(0, model.floor - 1), model.applied + 1))
        return self.rng.randint(model.floor, model.applied)

    def maybe_at(self) -> int | None:
        return self.at() if self.rng.random() < 0.4 else None

    def bucket(self) -> str:
        return self.rng.choice(BUCKETS[: 2 + (self.rng.random() < 0.1)])

    def key(self) -> str:
        return self.rng.choice(self.keys)

    def held(self) -> tuple[str, str]:
        """Often a key that is there."""
        bucket = self.bucket()
        live = self.driver.model.live(bucket) if self.rng.random() < 0.8 else []
        return bucket, self.rng.choice(live).key if live else self.key()

    def value(self) -> bytes:
        return self.driver.value(self.rng.choice(SIZES))

    def metadata(self) -> dict[str, str] | None:
        return self.rng.choice((None, None, None, {}, {"n": "1"}, {"bb": "ü", "a": "x" * 40}))

    def create_bucket(self) -> None:
        self.driver.create_bucket(self.bucket())

    def delete_bucket(self) -> None:
        self.driver.delete_bucket(self.bucket())

    def empty_bucket(self) -> None:
        bucket = self.bucket()
        for found in self.driver.model.live(bucket):
            self.driver.delete(bucket, found.key)
        self.driver.delete_bucket(bucket)

    def put(self) -> None:
        self.driver.put(self.bucket(), self.key(), self.value(), self.metadata())

    def put_many(self) -> None:
        items = [(self.key(), self.value()) for _ in range(self.rng.choice((1, 3, 10)))]
        self.driver.put_many(self.bucket(), items)

    def put_ascending(self) -> None:
        """Keys above all others, of which there are not ever more."""
        numbers = range(self.next_number, self.next_number + self.rng.choice((20, 40)))
        self.next_number = numbers.stop % 100
        items = [(f"\U0010ffff{number:03}", self.value()) for number in numbers]
        self.driver.put_many(self.bucket(), items)

    def put_if(self) -> None:
        bucket, key = self.bucket(), self.key()
        found = self.driver.model.get(bucket, key)
        condition: dict[str, Any] = {"if_absent": True}
        if self.rng.random() < 0.6:
            seq = found.seq if found is not None else 0
            condition = {"if_seq": self.rng.choice((seq, seq, 0, seq + 1))}
        self.driver.put(bucket, key, self.value(), self.metadata(), **condition)

    def delete(self) -> None:
        self.driver.delete(*self.held())

    def delete_run(self) -> None:
        """Keys side by side: pages become empty."""
        bucket, first = self.held()
        live = [found.key for found in self.driver.model.live(bucket) if found.key >= first]
        for key in live[: self.rng.choice((4, 12))]:
            self.driver.delete(bucket, key)

    def copy(self) -> None:
        self.driver.copy(*self.held(), self.bucket(), self.key())

    def write(self) -> None:
        entries: list[Put | Delete] = []
        keys = [self.key() for _ in range(self.rng.choice((1, 2, 4)))]
        for _ in range(self.rng.choice((1, 2, 5, 9))):
            if self.rng.random() < 0.7:
                entries.append(Put(self.bucket(), self.rng.choice(keys), self.value(), self.metadata()))
            else:
                entries.append(Delete(self.bucket(), self.rng.choice(keys)))
        self.driver.write(entries)

    def get(self) -> None:
        self.driver.get(*self.held(), head=self.rng.random() < 0.2)

    def get_at(self) -> None:
        self.driver.get(*self.held(), self.at(), head=self.rng.random() < 0.2)

    def list(self) -> None:
        rng = self.rng
        after = rng.choice((None, None, self.key(), rng.choice(PREFIXES)))
        delimiter = rng.choice((None, "/", "/", "1"))
        limit = rng.choice((1, 2, 7, 1000))
        self.driver.list(self.bucket(), rng.choice(PREFIXES), delimiter, after, limit, self.maybe_at())

    def open_scan(self) -> None:
        after = self.rng.choice((None, None, self.key()))
        self.driver.open_scan(self.bucket(), self.rng.choice(PREFIXES), after, self.maybe_at())

    def advance_scan(self) -> None:
        self.driver.advance_scan(self.rng.randrange(4), self.rng.choice((1, 3, 10, None)))

    def abandon_scan(self) -> None:
        self.driver.abandon_scan(self.rng.randrange(4))

    def snapshot(self) -> None:
        self.driver.snapshot(self.rng.choice("xyz"))

    def drop_snapshot(self) -> None:
        self.driver.drop_snapshot(self.rng.choice("xyz"))

    def snapshot_that_ends(self) -> None:
        self.driver.snapshot(self.rng.choice("xyz"), self.rng.choice((0.02, 1, 20)))

    def open_session(self) -> None:
        if len(self.driver.model.sessions) < 5:
            self.driver.open_session(self.rng.choice((0.02, 20, 3600)))

    def session(self) -> int:
        sessions = list(self.driver.model.sessions)
        return self.rng.choice(sessions) if sessions and self.rng.random() < 0.97 else 1

    def close_session(self) -> None:
        self.driver.close_session(self.session())

    def request(self) -> None:
        rng, session_id = self.rng, self.session()
        session = self.driver.model.sessions.get(session_id)
        if session is None:
            number = acknowledged = 1
        else:
            number = max(1, session.highest + rng.choice((-6, -2, -1, 0, 0, 1, 1, 1, 2, 5)))
            acknowledged = rng.choice((0, 0, max(0, session.highest - rng.randrange(8))))
            if number > session.highest:
                acknowledged = min(acknowledged, session.highest)
        items = [(self.key(), self.value()) for _ in range(rng.choice((1, 1, 3)))]
        self.driver.request(session_id, number, acknowledged, self.bucket(), items)

    def get_at_time(self) -> None:
        times = self.driver.model.times
        time_us, _ = self.rng.choice(times[-60:] if self.rng.random() < 0.8 else times)
        self.driver.get_at_time(*self.held(), time_us + self.rng.choice((-1, 0, 0, 1)))

    def move_horizon(self) -> None:
        self.driver.move_horizon(self.at() if self.rng.random() < 0.6 else None)

    def root(self) -> None:
        self.driver.root(self.maybe_at())

    def flush(self) -> None:
        self.driver.flush()

    def checkpoint(self) -> None:
        self.driver.checkpoint()

    def pages_leave(self) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            self.driver.checkpoint()
        share = rng.choice((0.2, 0.8, 1))
        self.driver.pages_leave(lambda _: rng.random() < share)

    def pages_come(self) -> None:
        keys = [key for key in self.driver.db.leaving.away() if self.rng.random() < 0.3]
        # A flush that was under way may bring some of them.
        assert self.driver.db.leaving.bring(keys) <= len(keys)
        assert not {*keys} & {*self.driver.db.leaving.away()}
        self.driver.seen["came back"] += len(keys)

    def store_down_for_a_while(self) -> None:
        for name in self.rng.choices(self.IN_OUTAGE, k=self.rng.choice((3, 10, 30))):
            self.driver.in_outage(getattr(self, name))

    def step(self) -> None:
        self.driver.machine.step(self.rng.choice((1, 2, 5)))
        self.driver.absorb()

    def idle(self) -> None:
        self.driver.machine.idle(self.rng.choice((0, 0.5, 3)))
        self.driver.absorb()

    def advance(self) -> None:
        clock = self.driver.machine.clock
        if self.rng.random() < 0.2:
            clock.wall_offset_us = self.rng.choice((0, -1_000_000, 5_000_000))
        clock.advance(self.rng.choice((0.000001, 0.01)))

    def reopen(self) -> None:
        self.driver.reopen()

    def crash(self) -> None:
        self.driver.recover()

    def crash_soon(self) -> None:
        files = self.driver.machine.files
        files.crash_at(files.operations + self.rng.randint(1, 30), after=self.rng.random() < 0.5)

    def compare(self) -> None:
        self.driver.compare()


PoolSize = Literal["few pages", "small", "enough"]
POOLS: dict[PoolSize, int] = {"few pages": 12_000, "small": 60_000, "enough": 2**20}


def driver_for(seed: int) -> Driver:
    """A database whose sizes depend on the seed, open."""
    rng = random.Random(f"sizes {seed}")
    machine = Machine(
        seed=seed,
        pool_bytes_max=POOLS[rng.choice(list(POOLS))],
        checkpoint_interval_s=rng.choice((None, 1.0, 10.0)),
        log_options=LogOptions(
            segment_bytes=rng.choice((4096, 16_384, 200_000)),
            block_bytes=4096,
            batch_bytes_max=rng.choice((1000, 2**20)),
            ring_bytes_max=rng.choice((0, 2**20)),
            before_images=seed % 3 == 1,
        ),
        page_keys=rng.choice((2, 4, 4, 16)),
    )
    driver = Driver(machine)
    driver.open()
    return driver


def run_by_chance(seed: int, steps: int) -> Driver:
    """All of it from one seed. The driver is left open."""
    driver = driver_for(seed)
    for bucket in BUCKETS[:2]:
        driver.create_bucket(bucket)
    Chance(driver, random.Random(f"calls {seed}")).run(steps)
    driver.machine.files._crash_number = None
    driver.compare()
    driver.seen["before-images"] += check_images(driver.db.log())
    assert list(driver.db.check()) == []
    return driver
