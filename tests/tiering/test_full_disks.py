"""A small disk with a tier: what was read from the store gives way to what is written."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import lowwater
from lowwater.engine.database.database import Database
from lowwater.errors import NotFound

MIB = 2**20
RESERVE = 16 * MIB
VALUE_BYTES = 500_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 120 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def cached_bytes(disk: Path) -> int:
    """Files come and go meanwhile."""
    size = 0
    for each in (disk / "data" / "cache").iterdir():
        with suppress(FileNotFoundError):
            size += each.stat().st_size
    return size


def take_all_but(disk: Path, left_bytes: int) -> None:
    """Somebody else writes, beside a database that goes on by itself."""
    with open(disk / "other", "wb", buffering=0) as file, suppress(OSError):
        while free_bytes(disk) > left_bytes:
            file.write(bytes(64 * 1024))


def opened(disk: Path, tmp_path: Path, **engine: Any) -> Database:
    return lowwater.open(
        disk / "data",
        tier=f"file://{tmp_path}/archive",
        config={"engine": {"disk_reserve_bytes": RESERVE, **engine}, "wal": {"rotate_max_bytes": 8 * MIB}},
    )


def filled(db: Database, rng: random.Random) -> int:
    """More history than the disk holds, all of it shipped and purged. Returns the last seq."""
    db.create_bucket("b")
    for number in range(300):
        db.put("b", f"k{number % 10}", rng.randbytes(VALUE_BYTES))
        if number % 30 == 29:
            db.ship()
            db.flush()
            db.purge(db.purgeable_seq())
    return db.marks().purged


def read_all(db: Database, last: int) -> None:
    for seq in range(2, last):
        try:
            db.get("b", f"k{seq % 10}", at=seq)
        except NotFound:
            pass  # it came later


@pytest.mark.slow
@pytest.mark.root
def test_reading_old_values_takes_no_room_from_writes(disk: Path, tmp_path: Path) -> None:
    """What can be fetched again must not keep out what nobody else has, now or after opening again."""
    rng = random.Random(1)
    with opened(disk, tmp_path) as db:
        last = filled(db, rng)
        read_all(db, last)
        cached = cached_bytes(disk)
        assert cached > 10 * MIB
        assert free_bytes(disk) > RESERVE
        for _ in range(5):
            db.put("b", "now", rng.randbytes(VALUE_BYTES))
        # Somebody else takes all but the reserve: what is cached goes, and writes go on.
        take_all_but(disk, RESERVE // 2)
        # The room that the cache had is what they are in.
        number = 0
        while cached_bytes(disk) >= cached:
            db.put("b", f"more {number % 20}", b"x" * 10_000)
            number += 1
        read_all(db, last)
        db.put("b", "after", b"1")
    os.unlink(disk / "other")
    with opened(disk, tmp_path) as db:
        read_all(db, last)
        take_all_but(disk, RESERVE // 2)
    # A former life's cache gives way when it is opened.
    with opened(disk, tmp_path) as db:
        db.put("b", "again", b"1")
        assert db.get("b", "after").value == b"1"
        assert list(db.check()) == []


@pytest.mark.slow
@pytest.mark.root
def test_pages_that_have_no_room_get_that_of_the_cache(disk: Path, tmp_path: Path) -> None:
    """Somebody else has taken the reserve as well, since the file system was asked last."""
    rng = random.Random(2)
    with opened(disk, tmp_path, checkpoint_interval_s=None) as db:
        last = filled(db, rng)
        read_all(db, last)
        db.put_many("b", [(f"{number:05}", b"x" * 200) for number in range(20_000)])
        take_all_but(disk, MIB // 4)
        db.flush()
        # Whether a write is refused until then depends on when the file system was asked last.
        os.unlink(disk / "other")
        db.put("b", "after", b"1")
        assert list(db.check()) == []
    with opened(disk, tmp_path) as db:
        assert db.get("b", "after").value == b"1"
        assert len(list(db.scan("b"))) == 20_000 + 10 + 1
