"""engine/database/space.py: what is kept back of the disk, on each file system that a database lies on."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowwater
from lowwater.errors import DiskFull

SHARED_MEMORY = Path("/dev/shm")
APART_BYTES = 2**30


def room(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Directories on two file systems: the one with less room first."""
    if not SHARED_MEMORY.is_dir() or SHARED_MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("NOT TESTED: there is no second file system here")
    other = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
    try:
        small, large = sorted((tmp_path, other), key=room)
        if room(large) - room(small) < 2 * APART_BYTES:
            pytest.skip("NOT TESTED: the two file systems here have the same room")
        yield small, large
    finally:
        shutil.rmtree(other)


def test_the_reserve_is_kept_on_both_file_systems(disks: tuple[Path, Path]) -> None:
    """With `wal.dir` on a disk of its own the pages' disk was never looked at: flushing ran into its end, and
    the log was poisoned."""
    small, large = disks
    engine = {"disk_reserve_bytes": (room(small) + room(large)) // 2}
    for number, (data, log) in enumerate(((small, large), (large, small))):
        config = {"wal": {"dir": str(log / f"log-{number}")}, "engine": engine}
        with lowwater.open(data / f"db-{number}", config=config) as db:
            with pytest.raises(DiskFull) as caught:
                db.create_bucket("b")
            assert str(caught.value.path).startswith(str(small)), "it names the disk that is full"
            assert db.failure is None
    config = {"wal": {"dir": str(large / "log")}, "engine": engine}
    with lowwater.open(large / "db", config=config) as db:
        db.create_bucket("b")
