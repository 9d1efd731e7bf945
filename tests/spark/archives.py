"""Random archives from a seed, in a folder, and what the engine said of each moment while it made them.

Always true:
  - engine, shipper and folder store are the real ones; only clock, disk and threads are simulated, so a seed
    gives the same archive again, bit for bit;
  - most answers of an embedded database were given when their seq was the newest one: they depend neither on
    versions that are kept, nor on reading an archive. The others are of seqs in the middle of anything.

`archive_of(folder, seed)` makes either an embedded database, whose life has all that a program can do with
one, or a fed engine (`fed.py`), whose seqs have holes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
from tests.recovery.shipped import QUIET, Place, checkpoint, opened, ship
from tests.spark.fed import random_archive

from lowwater import Delete, Put, Transaction
from lowwater.engine.database import transactions
from lowwater.engine.database.origin import read_origin
from lowwater.engine.format.format import Compression
from lowwater.engine.format.records import Object
from lowwater.engine.log.chain import create_entry
from lowwater.engine.log.log import Log, LogOptions
from lowwater.errors import Fenced, InputError, NotFound, RetryError, VersionGone
from lowwater.recovery.restore import restore_with
from lowwater.recovery.restored_opening import open_restored
from lowwater.tiering.folder_store import FolderStore

CLUSTER_ID = bytes(range(16))
SALT = bytes(range(16, 32))
BUCKETS = ("a", "b", "bücket", "rare")


class Answer(NamedTuple):
    """What the engine says as of a seq."""

    seq: int
    root: str
    objects: list[Object]  # by bucket and key

    @property
    def state(self) -> list[tuple[Any, ...]]:
        return [tuple(each) for each in self.objects]


class RandomArchive(Protocol):
    """What tests see of an archive. The engine is open until `close`."""

    uri: str
    folder: Path
    answers: list[Answer]  # by seq
    checkpoints: list[int]  # that were shipped

    def close(self) -> None: ...


def archive_of(folder: Path, seed: int, *, steps: int = 300) -> RandomArchive:
    """Two of three are embedded databases."""
    made = FedArchive(folder, seed, steps) if seed % 3 == 2 else EmbeddedArchive(folder, seed, steps)
    assert made.answers
    return made


@contextlib.contextmanager
def archives(scratch: Path, seeds: range, *, steps: int = 300) -> Iterator[list[RandomArchive]]:
    made = [archive_of(scratch / f"archive {seed}", seed, steps=steps) for seed in seeds]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def answer_of(engine: Any, at: int | None = None) -> Answer:
    seq = engine.marks().applied if at is None else at
    objects = [found for bucket in sorted(engine.buckets(at)) for found in engine.scan(bucket, at=at)]
    return Answer(seq, engine.root(at), sorted(objects, key=lambda each: each[:2]))


class FedArchive:
    def __init__(self, folder: Path, seed: int, steps: int) -> None:
        self.folder = folder
        self._fed = random_archive(folder, seed, steps)
        self.uri = self._fed.uri
        hwm = self._fed.engine.counted_hwm
        rng = random.Random(f"asked {seed}")
        # Its horizon is its first seq, so it can be asked afterwards, of seqs that are holes too.
        seqs = sorted({*rng.sample(range(self._fed.first, hwm), 19), hwm})
        self.answers = [answer_of(self._fed.engine, seq) for seq in seqs]
        self.checkpoints = [each.seq for each in self._fed.engine.catalogue.checkpoints]

    def close(self) -> None:
        self._fed.close()


class EmbeddedArchive:
    """A database that was lost once, restored, and has gone on, while the first line wrote a little more."""

    def __init__(self, folder: Path, seed: int, steps: int) -> None:
        self.folder = folder
        self.uri = f"file://{folder}"
        self.answers: list[Answer] = []
        self._rng = rng = random.Random(f"embedded archive {seed}")
        self._store = FolderStore(str(folder))
        self._place = Place(seed)
        self._options = LogOptions(
            segment_bytes=rng.choice((16_384, 40_000)),
            block_bytes=4096,
            segment_age_max_s=1e6,
            compression=rng.choice(("none", "zstd")),
        )
        self._open_transactions: list[tuple[Transaction, list[Any]]] = []
        self._sessions: list[Any] = []
        self._snapshots: list[str] = []
        with _small_transactions():
            self._make(seed, steps)

    def _make(self, seed: int, steps: int) -> None:
        self._create()
        self._db = self._opened()
        if self._rng.random() < 0.6:
            self._db.move_horizon(1)
        for bucket in BUCKETS[:3]:
            self._db.create_bucket(bucket)
        for turn in range(4):
            self._steps(steps // 4)
            if turn == 2:
                self._lose_and_restore(seed)
            self._checkpoint(shipped=turn == 1 or self._rng.random() < 0.7)
        self._steps(5)
        self._end_transactions()
        ship(self._db, self._place)
        hwm = self._db.counted_hwm
        seqs = {each.seq for each in self.answers}
        for seq in self._rng.sample(range(2, hwm), 8):
            # Of some nobody can tell any more: between the horizon and what this database came from.
            with contextlib.suppress(VersionGone):
                if seq not in seqs:
                    self.answers.append(answer_of(self._db, seq))
        self.answers = sorted(each for each in self.answers if each.seq <= hwm)
        self.checkpoints = [each.seq for each in self._db.catalogue.checkpoints]

    def close(self) -> None:
        self._db.close()

    # ------------------------------------------------------------------ its lives

    def _create(self) -> None:
        settings = {
            "segment_bytes": self._options.segment_bytes,
            "block_bytes": self._options.block_bytes,
            "compression": Compression[self._options.compression.upper()].value,
            "page_keys": self._rng.choice((4, 16)),
            "inline_bytes_max": 256,
        }
        create = create_entry(CLUSTER_ID, SALT, settings)
        seams = self._place.seams()
        Log.open("db/wal", options=self._options, seams=seams, create=create).close()

    def _opened(self) -> Any:
        return opened(self._place, self._store, log_options=self._options, create=False)

    def _lose_and_restore(self, seed: int) -> None:
        """What the first line writes afterwards is in the folder too, and counts for nobody."""
        self._end_transactions()
        ship(self._db, self._place)
        first, its_place = self._db, self._place
        self._place = Place(seed + 10**6)
        store = FolderStore(str(self.folder))
        restore_with(store, "to", seams=self._place.seams(), pages=self._place.pages)
        origin = read_origin(self._place.files, "to")
        assert origin is not None
        seams = self._place.seams()
        self._place.pages.reopen()
        self._db = open_restored(
            "to",
            origin,
            [store],
            log_options=self._options,
            options=QUIET,
            seams=seams,
            store=self._place.pages,
        )
        ship(self._db, self._place)
        first.create_bucket("fenced")
        first.put("fenced", "key", bytes(2000))
        with pytest.raises(Fenced):
            ship(first, its_place)
        first.close()
        self._store = store
        self._sessions = []

    def _checkpoint(self, *, shipped: bool) -> None:
        if shipped:
            checkpoint(self._db, self._place, self._store)
        else:
            self._db.checkpoint()

    # ------------------------------------------------------------------ anything

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._place.clock.advance(self._rng.choice((0.0, 0.001, 7.0, 3000.0)))
            try:
                self._step()
            except (InputError, RetryError):
                pass  # a condition, a lock, a bucket that is not there: nothing was written, or a refusal
            seq = self._db.marks().applied
            if self._rng.random() < 20 / 300 and seq not in {each.seq for each in self.answers}:
                self.answers.append(answer_of(self._db))

    def _step(self) -> None:
        draw: list[tuple[float, Callable[[], object]]] = [
            (30, self._put),
            (10, lambda: self._db.delete(self._bucket(), self._key())),
            (7, lambda: self._db.copy(self._bucket(), self._key(), self._bucket(), self._key())),
            (8, self._group),
            (8, self._condition),
            (22, self._in_transaction),
            (3, lambda: self._db.create_bucket(self._rng.choice(BUCKETS))),
            (2, lambda: self._db.delete_bucket(self._rng.choice(BUCKETS))),
            (2, self._empty_a_bucket),
            (5, self._in_session),
            (2, self._snapshot),
            (1, lambda: self._db.move_horizon(self._db.marks().applied - self._rng.randrange(40))),
        ]
        ((_, step),) = self._rng.choices(draw, [weight for weight, _ in draw])
        step()

    def _bucket(self) -> str:
        return self._rng.choices(BUCKETS, (6, 4, 2, 1))[0]

    def _key(self) -> str:
        number = self._rng.randrange(60)
        return f"dir{number % 3}/k{number}" if number % 10 else f"{'ü' * 260}{number}"

    def _value(self) -> bytes:
        size = self._rng.choice((0, 3, 10, 100, 256, 257, 1000, 5000, 20_000))
        return self._rng.randbytes(min(16, size)) + bytes(max(0, size - 16))

    def _metadata(self) -> dict[str, str] | None:
        return {"n": str(self._rng.randrange(5)), "é": "x"} if self._rng.random() < 0.3 else None

    def _put(self) -> None:
        self._db.put(self._bucket(), self._key(), self._value(), self._metadata())

    def _entry(self) -> Put | Delete:
        if self._rng.random() < 0.25:
            return Delete(self._bucket(), self._key())
        return Put(self._bucket(), self._key(), self._value()[:300], self._metadata())

    def _group(self) -> None:
        self._db.write([self._entry() for _ in range(self._rng.randrange(1, 6))])

    def _condition(self) -> None:
        bucket, key = self._bucket(), self._key()
        if self._rng.random() < 0.5:
            self._db.put(bucket, key, self._value(), if_absent=True)
        else:
            try:
                seq = self._db.head(bucket, key).seq
            except NotFound:
                seq = 0
            self._db.put(bucket, key, self._value(), if_seq=seq + self._rng.randrange(2))

    def _empty_a_bucket(self) -> None:
        bucket = self._rng.choice(BUCKETS)
        self._db.write([Delete(bucket, found.key) for found in self._db.scan(bucket)])
        self._db.delete_bucket(bucket)
        if self._rng.random() < 0.5:
            self._db.create_bucket(bucket)

    def _in_session(self) -> None:
        """Refusals of requests are frames."""
        if not self._sessions or self._rng.random() < 0.1:
            self._sessions.append(self._db.session(ttl=10**7))
        session = self._rng.choice(self._sessions)
        what = self._rng.random()
        if what < 0.4:
            session.put(self._bucket(), self._key(), self._value(), if_absent=True)
        elif what < 0.7:
            session.delete(self._bucket(), self._key())
        elif what < 0.9:
            session.write([self._entry() for _ in range(self._rng.randrange(1, 4))])
        else:
            self._sessions.remove(session)
            session.close()

    def _snapshot(self) -> None:
        if self._snapshots and self._rng.random() < 0.5:
            self._db.drop_snapshot(self._snapshots.pop(0))
        else:
            name = f"snapshot {self._db.marks().applied}"
            self._db.snapshot(name)
            self._snapshots.append(name)

    def _in_transaction(self) -> None:
        rng = self._rng
        if not self._open_transactions or (len(self._open_transactions) < 4 and rng.random() < 0.2):
            isolation = rng.choice(("snapshot", "serializable"))
            self._open_transactions.append((self._db.transaction(isolation, lock_timeout_s=0), []))
        number = rng.randrange(len(self._open_transactions))
        transaction, savepoints = self._open_transactions[number]
        what = rng.random()
        try:
            if what < 0.5:
                for _ in range(rng.randrange(1, 5)):
                    entry = self._entry()
                    if isinstance(entry, Put):
                        transaction.put(entry.bucket, entry.key, entry.value, entry.metadata)
                    else:
                        transaction.delete(entry.bucket, entry.key)
            elif what < 0.65:
                savepoints.append(transaction.savepoint())
            elif what < 0.78 and savepoints:
                del savepoints[rng.randrange(len(savepoints)) + 1 :]
                transaction.rollback_to(savepoints[-1])
            elif what < 0.92:
                self._open_transactions.pop(number)
                transaction.commit()
            elif what < 0.95:
                self._open_transactions.pop(number)
                transaction.abort()
        except RetryError:
            if (transaction, savepoints) in self._open_transactions:
                self._open_transactions.remove((transaction, savepoints))
            transaction.abort()

    def _end_transactions(self) -> None:
        for transaction, _ in self._open_transactions:
            transaction.abort()
        self._open_transactions = []


@contextlib.contextmanager
def _small_transactions() -> Iterator[None]:
    """Large ones go to the log before they commit; large is a few hundred bytes here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transactions, "SPILL_ABOVE_BYTES", 700)
        patch.setattr(transactions, "PIECE_BYTES", 300)
        yield
