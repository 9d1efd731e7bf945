"""Parts of values: what comes back, how much of the log is read for it, and that damage is found."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowwater import Database
from lowwater.engine.database.opening import open_with
from lowwater.engine.log.log import LogOptions, Seams
from lowwater.engine.seams.real import RealFiles
from lowwater.engine.testing.damage import flip
from lowwater.errors import ConditionFailed, Corrupt, InputError, NotFound

VALUE = random.Random(7).randbytes(200_000)
BLOCK_BYTES = 1024
OPTIONS = LogOptions(segment_bytes=250_000, block_bytes=BLOCK_BYTES, ring_bytes_max=0)


class CountingFile:
    """A file that counts what is read of it."""

    def __init__(self, file: Any, files: CountingFiles) -> None:
        self._file = file
        self._files = files

    def read_at(self, offset: int, size: int) -> bytes:
        data: bytes = self._file.read_at(offset, size)
        self._files.read_bytes += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class CountingFiles(RealFiles):
    read_bytes = 0

    def open(self, *arguments: Any, **named: Any) -> Any:
        return CountingFile(super().open(*arguments, **named), self)


@pytest.fixture
def files() -> CountingFiles:
    return CountingFiles()


@pytest.fixture
def db(tmp_path: Path, files: CountingFiles) -> Iterator[Database]:
    with open_with(str(tmp_path / "data"), log_options=OPTIONS, seams=Seams(files=files)) as db:
        db.create_bucket("b")
        yield db


def until_sealed(db: Database) -> None:
    while not db._wal.store.segments[-1].sealed:
        time.sleep(0.001)


def ranges() -> Iterator[tuple[int, int]]:
    rng = random.Random(3)
    yield from ((0, 0), (0, 1), (0, 10**9), (len(VALUE), 5), (len(VALUE) - 1, 5), (BLOCK_BYTES, BLOCK_BYTES))
    yield from ((rng.randrange(len(VALUE)), rng.choice((1, 100, 5000, 10**6))) for _ in range(50))


def assert_ranges(db: Database, key: str = "k", at: int | None = None) -> None:
    for start, length in ranges():
        assert db.read_range("b", key, start, length, at) == VALUE[start : start + length]


def test_a_range_is_that_part_of_the_value(db: Database) -> None:
    """In memory, in the current segment, in a sealed one, of a copy, and of an old version."""
    seq = db.put("b", "k", VALUE, {"m": "n"})
    db.copy("b", "k", "b", "copy")
    db.put("b", "small", VALUE[:100])
    assert_ranges(db)
    assert_ranges(db, "copy")
    db.flush()
    assert_ranges(db)
    assert_ranges(db, "copy")
    snapshot = db.snapshot("before")
    db.put("b", "k", b"new")
    db._log.seal()
    db.put("b", "other", bytes(300_000))
    db.flush()
    assert_ranges(db, "k", snapshot)
    assert seq < snapshot
    assert_ranges(db, "copy")
    assert db.read_range("b", "k", 1, 100) == b"ew"
    assert db.read_range("b", "small", 90, 100) == VALUE[90:100]


def test_a_range_of_a_sealed_segment_reads_the_blocks_around_it(db: Database, files: CountingFiles) -> None:
    """Not 200,000 bytes for one, and the hashes once."""
    db.put("b", "k", VALUE)
    db._log.seal()
    db.flush()
    until_sealed(db)
    db.read_range("b", "k", 0, 1)
    before = files.read_bytes
    assert db.read_range("b", "k", 100_000, 10) == VALUE[100_000:100_010]
    assert files.read_bytes - before <= 3 * BLOCK_BYTES  # one with the head of the frame, and perhaps two


def test_a_head_reads_nothing_of_a_large_value(db: Database, files: CountingFiles) -> None:
    """Nor does a listing, a condition, or a deletion."""
    db.put("b", "k", VALUE)
    db.flush()
    before = files.read_bytes
    assert db.head("b", "k").size_bytes == len(VALUE)
    assert db.list("b").objects[0].size_bytes == len(VALUE)
    db.put("b", "k2", b"", if_absent=True)
    db.delete("b", "k2")
    with pytest.raises(ConditionFailed):
        db.put("b", "k", b"", if_absent=True)
    assert files.read_bytes == before
    db.copy("b", "k", "b", "copy")
    assert db.head("b", "copy").size_bytes == len(VALUE)
    assert db.get("b", "copy").value == VALUE


def test_a_range_that_makes_no_sense_is_refused(db: Database) -> None:
    db.put("b", "k", b"12345")
    assert db.read_range("b", "k", 5, 3) == b""
    for start, length in ((6, 1), (-1, 1), (0, -1), (True, 1), (0, "1"), (1.5, 1)):
        with pytest.raises(InputError):
            db.read_range("b", "k", start, length)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        db.read_range("b", "nothing", 0, 1)
    with pytest.raises(NotFound):
        db.read_range("nothing", "k", 0, 1)


def test_damage_inside_a_range_is_found_and_outside_it_is_not_looked_for(tmp_path: Path) -> None:
    """Every block has a hash of its own."""
    path = tmp_path / "data"
    with open_with(str(path), log_options=OPTIONS) as db:
        db.create_bucket("b")
        db.put("b", "k", VALUE)
        db._log.seal()
    (segment,) = path.glob("wal/segment-*.log")
    at = segment.read_bytes().index(VALUE[100_000:100_050])
    flip(segment, at)
    with open_with(str(path), log_options=OPTIONS) as db:
        assert db.read_range("b", "k", 0, 90_000) == VALUE[:90_000]
        assert db.read_range("b", "k", 110_000, 90_000) == VALUE[110_000:]
        for start, length in ((100_000, 1), (0, 10**6), (99_999, 2)):
            with pytest.raises(Corrupt):
                db.read_range("b", "k", start, length)


def test_damage_in_the_hashes_is_found(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with open_with(str(path), log_options=OPTIONS) as db:
        db.create_bucket("b")
        db.put("b", "k", VALUE)
        db._log.seal()
    (segment,) = path.glob("wal/segment-*.log")
    with open_with(str(path), log_options=OPTIONS) as db:
        trailer_at = segment.stat().st_size - 192
        flip(segment, trailer_at - 100)
        with pytest.raises(Corrupt):
            db.read_range("b", "k", 0, 1)


def test_damage_in_the_current_segment_is_found(tmp_path: Path) -> None:
    """There the frame's checksum is all there is: a part is refused for damage anywhere in it."""
    path = tmp_path / "data"
    with open_with(str(path), log_options=OPTIONS) as db:
        db.create_bucket("b")
        db.put("b", "k", VALUE)
        db.flush()
        current = path / "wal" / "current.log"
        flip(current, current.read_bytes().index(VALUE[100_000:100_050]))
        with pytest.raises(Corrupt):
            db.read_range("b", "k", 0, 1)


def test_a_segment_that_is_sealed_meanwhile_is_read_by_blocks(db: Database) -> None:
    """The file stays open, and its footer comes later."""
    db.put("b", "k", VALUE)
    db.flush()
    assert db.read_range("b", "k", 7, 7) == VALUE[7:14]
    assert not db._values._blocks
    db._log.seal()
    until_sealed(db)
    assert_ranges(db)
    assert db._values._blocks
