"""One whole life of a database before a store, by the public names: written, shipped with checkpoints, lost,
restored, scrubbed, cloned. What was written is known, so every answer is compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from tests.tiering.servers import Served

import lowwater
from lowwater.engine.seams.real import RealRandomness
from lowwater.errors import LowwaterError

BUCKET = "b"
T = TypeVar("T")


class Life:
    def __init__(self, directory: Path, server: Served, *, seed: int = 1) -> None:
        self.place = f"life/{RealRandomness().token(8).hex()}"
        self.rng = random.Random(seed)
        self.written: dict[str, bytes] = {}
        self.config = {
            # What fails is to fail soon.
            "tier": {"timeout_ms": 2000, "attempts_max": 3},
            "shipping": {"interval_s": 0.2},
            "wal": {"rotate_max_bytes": "256 KiB", "entry_bytes_max": "16 MiB"},
            "engine": {"disk_reserve_bytes": 0, "pool_bytes_max": "16 MiB"},
        }

        self._at(directory, server)

    def _at(self, directory: Path, server: Served) -> None:
        self.directory = directory
        self.uri, self.clones_uri = (
            f"{server.uri(f'{self.place}/{name}')}?{urlencode(server.options)}" for name in ("first", "clone")
        )

    def through(self, server: Served, directory: Path) -> Life:
        """The same, as it is reached in another way, and with other directories."""
        other = copy(self)
        other._at(directory, server)
        return other

    def open(self, name: str) -> Any:
        return lowwater.open(self.directory / name, tier=self.uri, config=self.config)

    def restored(self, name: str) -> Any:
        """A clone without a tier of its own, all of which is here."""
        return lowwater.open(self.directory / name, config=self.config)

    def write(self, db: Any, *, keys: int = 300, large_bytes: int = 0) -> None:
        """Small values, some of them again, and a large one."""
        drawn = [f"k{self.rng.randrange(2000):05}" for _ in range(keys)]
        items = {key: self.rng.randbytes(self.rng.choice((10, 100, 2000))) for key in drawn}
        if large_bytes:
            items[f"large {self.rng.randrange(1000)}"] = self.rng.randbytes(large_bytes)
        db.put_many(BUCKET, list(items.items()))
        self.written.update(items)

    def require_all(self, db: Any) -> None:
        """Every key, by a scan and by itself."""
        assert {found.key: found.value for found in db.scan(BUCKET)} == self.written
        for key in self.rng.sample(sorted(self.written), 20):
            assert db.get(BUCKET, key).value == self.written[key]

    def restore(self, name: str, **options: Any) -> Any:
        return lowwater.restore(self.uri, self.directory / name, config=self.config, **options)

    def errors_in(self, place: str) -> list[str]:
        """What a check of the archive, or of a directory, says is wrong."""
        findings = lowwater.check(place, config=self.config)
        return [str(found) for found in findings if found.severity == "error"]


def whole_cycle(life: Life, *, large_bytes: int) -> None:
    with life.open("first") as db:
        db.create_bucket(BUCKET)
        life.write(db, large_bytes=large_bytes)
        db.checkpoint()
        db.ship()
        life.write(db)
        db.checkpoint()
        db.ship()
        life.write(db, large_bytes=large_bytes)
        hwm = db.ship()
        assert hwm == db.marks().hwm
        root = db.root()
    assert (found := life.errors_in(life.uri)) == [], found

    # The directory is lost.
    assert life.restore("second", full=True).root == root
    with life.open("second") as db:
        life.require_all(db)
        life.write(db, large_bytes=large_bytes)
        db.checkpoint()
        assert db.ship() > hwm
        root = db.root()
    assert (found := life.errors_in(life.uri)) == [], found

    assert life.restore("clone", clone=True).is_clone
    with lowwater.open(life.directory / "clone", tier=life.clones_uri, config=life.config) as db:
        assert db.root() == root
        life.require_all(db)
        life.write(db)
        db.checkpoint()
        db.ship()
        assert list(db.check()) == [], list(db.check())
    assert (found := life.errors_in(life.clones_uri)) == [], found


def typed(call: Callable[[], T], *, times: int) -> T | None:
    """What `call` returns, which may fail as often by one of our errors, and by no other. None where it never
    came to an end."""
    for _ in range(times):
        try:
            return call()
        except LowwaterError:
            pass
    return None
