"""A database with everything in it, its archive, and directories made of that: what damage is tried on.

Always true: all of it is closed, and follows from a seed but for times, ids and what is named by them. Each
directory is a folder with `data` and, but for one, the `archive` that it knows by the place where it was
made: a copy works there and nowhere else.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.asked import Asked, prefixes_of, value_or_none

import lowwater
from lowwater.engine.log.chain import create_entry
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.seams.real import RealFiles

BUCKET = "b"
KEYS = 150
SETTINGS = {"page_keys": 8, "inline_bytes_max": 200, "segment_bytes": 65_536, "block_bytes": 4096}
ENGINE = {"checkpoint_interval_s": None}
RAW: dict[str, Any] = {"engine": ENGINE, "wal": {"sync_mode": "none"}}
COMPRESSED: dict[str, Any] = {"engine": ENGINE, "wal": {"sync_mode": "none", "compression": "zstd"}}
# A catalogue has chunks from 64 segments on.
SEGMENTS = 70

Model = dict[str, bytes]
# What an entry of the log is recognised by.
Line = tuple[int, str, str, bytes]


def key_of(number: int) -> str:
    return f"{number % 5}/{number:04}"


@dataclass
class Expected:
    """What is in a database: now, as of a snapshot, and as of a seq that only its archive knows."""

    now: Model = field(default_factory=dict)
    then: Model = field(default_factory=dict)
    older: Model = field(default_factory=dict)
    then_seq: int = 0
    older_seq: int = 0
    root: str = ""
    lines: list[Line] = field(default_factory=list)

    def copy(self) -> Expected:
        return Expected(
            dict(self.now), self.then, self.older, self.then_seq, self.older_seq, self.root, self.lines
        )

    def close(self, db: lowwater.Database) -> None:
        """What a database holds is written down before it is closed."""
        assert {each.key: each.value for each in db.scan(BUCKET)} == self.now
        self.root = db.root()
        self.lines = lines_of(db, db.marks().applied)
        db.close()


def lines_of(db: lowwater.Database, seq_last: int) -> list[Line]:
    """What opening appends lies above."""
    return [(e.seq, e.kind, e.key, e.value) for e in db.log() if e.seq <= seq_last]


def ask_all(db: lowwater.Database, expected: Expected, asked: Asked, *, older: bool) -> None:
    """Ask an open database for everything. `older` is for those that have an archive."""
    for number in range(KEYS + 10):
        key = key_of(number)
        asked.ask("get", lambda key=key: value_or_none(db, BUCKET, key), expected.now.get(key))  # type: ignore[misc]
    asked.ask("scan", lambda: scanned(db), sorted(expected.now.items()))
    asked.ask("list", lambda: prefixes_of(db, BUCKET), sorted({key[:2] for key in expected.now}))
    asked.ask("root", db.root, expected.root)
    asked.ask("scan of then", lambda: scanned(db, expected.then_seq), sorted(expected.then.items()))
    if older:
        asked.ask("older scan", lambda: scanned(db, expected.older_seq), sorted(expected.older.items()))
        for number in range(0, KEYS, 29):
            key, value = key_of(number), expected.older.get(key_of(number))
            asked.ask(
                "older get",
                lambda key=key: value_or_none(db, BUCKET, key, expected.older_seq),  # type: ignore[misc]
                value,
            )
    asked.ask("log", lambda: lines_of(db, expected.lines[-1][0]), expected.lines)


def scanned(db: lowwater.Database, at: int | None = None) -> list[tuple[str, bytes]]:
    return [(each.key, each.value) for each in db.scan(BUCKET, at=at)]


def close(db: lowwater.Database, asked: Asked) -> None:
    asked.call("close", db.close, None)


# ---------------------------------------------------------------------------- making it


def report(what: str, counts: Counter[tuple[str, str]], missed: list[str]) -> None:
    """Print what came of all cases, and keep it where DAMAGE_REPORT says."""
    told = f"{what} {sorted(counts.items())}\n"
    print(told, end="")
    if path := os.environ.get("DAMAGE_REPORT"):
        with open(path, "a") as file:
            file.write(told + "".join(f"  {each}\n" for each in missed))


def _begin(path: Path) -> None:
    rng = random.Random(1)
    seams = Seams(files=RealFiles(), owner="test")
    path.mkdir()
    entry = create_entry(rng.randbytes(16), rng.randbytes(16), SETTINGS)
    Log.open(str(path / "wal"), options=LogOptions(), seams=seams, create=entry).close()


def _fill(db: lowwater.Database, expected: Expected, rng: random.Random, *, ships: bool) -> None:
    """Raw segments, a checkpoint, and a session."""

    def put(number: int) -> None:
        key, value = key_of(number), rng.randbytes(rng.choice((20, 150, 400, 1500)))
        db.put(BUCKET, key, value, {"n": str(number)} if number % 3 else None)
        expected.now[key] = value

    db.create_bucket(BUCKET)
    for number in rng.sample(range(KEYS), KEYS):
        put(number)
    db.checkpoint()
    if ships:
        db.ship(timeout=600)
    for number in rng.sample(range(KEYS), KEYS // 5):
        db.delete(BUCKET, key_of(number))
        del expected.now[key_of(number)]
    expected.older_seq, expected.older = db.marks().applied, dict(expected.now)
    for number in rng.sample(range(KEYS), KEYS // 4):
        put(number)
    expected.then_seq, expected.then = db.snapshot("then"), dict(expected.now)
    session = db.session()
    with db.transaction() as txn:
        for number in rng.sample(range(KEYS), 5):
            value = rng.randbytes(900)
            txn.put(BUCKET, key_of(number), value)
            expected.now[key_of(number)] = value
    session.put(BUCKET, key_of(KEYS), b"of a session" * 30)
    expected.now[key_of(KEYS)] = b"of a session" * 30
    db.flush()
    for number in rng.sample(range(KEYS), KEYS // 4):
        put(number)
    db.checkpoint()
    for number in rng.sample(range(KEYS), 7):
        put(number)


def _fill_more(db: lowwater.Database, expected: Expected, rng: random.Random) -> None:
    """Compressed segments, many of them, and another checkpoint that rests on the one before."""
    for number in range(SEGMENTS):
        key, value = key_of(rng.randrange(KEYS)), b"%d " % number * rng.choice((10, 400))
        db.put(BUCKET, key, value)
        expected.now[key] = value
        db.propose_seal()
    db.checkpoint()
    db.ship(timeout=600)
    for number in rng.sample(range(KEYS), 20):
        key, value = key_of(number), b"tail %d " % number * 60
        db.put(BUCKET, key, value)
        expected.now[key] = value
    db.ship(timeout=600)


class Everything:
    """Directories of six kinds. `place` is where a copy of one works; `kept` has them as they were made. The
    one that is `archived` has shipped all that it has, and purged what it could."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "place"
        self.kept = folder / "kept"
        self.data, self.archive = self.place / "data", self.place / "archive"
        self.uri = f"file://{self.archive}"
        self.expected: dict[str, Expected] = {}
        self.kept.mkdir(parents=True)
        self._make_alone()
        self._make_purged()
        self._make_restored("restored", clone=False, goes_on=False)
        self._make_restored("continued", clone=False, goes_on=True)
        self._make_restored("clone", clone=True, goes_on=True)

    def tier_of(self, kind: str) -> str | None:
        """What has to be named to open it: what was restored knows its archive."""
        return self.uri if kind in ("archived", "purged") else None

    def bring(self, kind: str) -> None:
        """A copy of a directory of this kind, and of its archive, to where they work."""
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.kept / kind, self.place)

    def open(self, kind: str) -> lowwater.Database:
        return lowwater.open(self.data, tier=self.tier_of(kind), create=False, config=RAW)

    def _keep(self, kind: str, expected: Expected) -> None:
        self.place.rename(self.kept / kind)
        self.expected[kind] = expected

    def _make_alone(self) -> None:
        expected = Expected()
        self.place.mkdir()
        _begin(self.data)
        db = lowwater.open(self.data, config=RAW)
        _fill(db, expected, random.Random(2), ships=False)
        db.put(BUCKET, "0/last", b"last")
        expected.now["0/last"] = b"last"
        expected.close(db)
        self._keep("alone", expected)

    def _make_purged(self) -> None:
        """Of two lives, with what old reads leave in the cache, and a tail that is in the log alone."""
        expected, rng = Expected(), random.Random(3)
        self.place.mkdir()
        _begin(self.data)
        with lowwater.open(self.data, tier=self.uri, config=RAW) as db:
            _fill(db, expected, rng, ships=True)
        with lowwater.open(self.data, tier=self.uri, config=COMPRESSED) as db:
            _fill_more(db, expected, rng)
            db.flush()
            assert db.purge(db.purgeable_seq()) > expected.older_seq
            assert dict(scanned(db, expected.older_seq)) == expected.older
            expected.root, expected.lines = db.root(), lines_of(db, db.marks().hwm)
        shutil.copytree(self.place, self.kept / "archived")
        self.expected["archived"] = expected.copy()
        db = lowwater.open(self.data, tier=self.uri, config=COMPRESSED)
        db.put(BUCKET, "0/last", b"last")
        expected.now["0/last"] = b"last"
        expected.close(db)
        self._keep("purged", expected)

    def _make_restored(self, kind: str, *, clone: bool, goes_on: bool) -> None:
        expected = self.expected["archived"].copy()
        self.place.mkdir()
        shutil.copytree(self.kept / "archived" / "archive", self.archive)
        done = lowwater.restore(self.uri, self.data, clone=clone, config=RAW)
        if goes_on:
            db = lowwater.open(self.data, config=RAW)
            for number in range(0, KEYS, 20):
                db.put(BUCKET, key_of(number), b"goes on" * 50)
                expected.now[key_of(number)] = b"goes on" * 50
            expected.close(db)
        else:
            shutil.copytree(self.place, self.kept / "looked-into")
            expected.close(lowwater.open(self.data, config=RAW))
            shutil.rmtree(self.place)
            (self.kept / "looked-into").rename(self.place)
            expected.lines = [each for each in expected.lines if each[0] <= done.seq]
        self._keep(kind, expected)
