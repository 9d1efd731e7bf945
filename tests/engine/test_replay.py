"""engine/database/redo.py: reading the log while it is opened."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from tests.engine.log_frames import frames_in

import lowwater
from lowwater.chaos.clock import VirtualClock
from lowwater.chaos.disk import Fault, FaultyFiles, Operation
from lowwater.chaos.runner import StepRunner
from lowwater.engine.database.opening import open_with
from lowwater.engine.database.redo import parts_from
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.errors import Corrupt, DiskFailed

SMALL_SEGMENTS = LogOptions(segment_bytes=65536, block_bytes=4096)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


def filled(files: FaultyFiles, runner: StepRunner, clock: VirtualClock) -> Log:
    log = Log.open(
        "wal",
        options=SMALL_SEGMENTS,
        seams=Seams(files=files, clock=clock, runner=runner),
    )
    for number in range(200):
        log.append(lowwater.Put("b", f"{number}", bytes(1000)))
    return log


def test_redo_finds_segments_that_are_sealed_meanwhile(files: FaultyFiles) -> None:
    """A crash leaves segments unsealed. They get their names while redo is at those before."""
    clock = VirtualClock()
    runner = StepRunner(clock)
    log = filled(files, runner, clock)
    unsealed = [segment for segment in log.wal.store.segments if not segment.sealed]
    assert unsealed
    read = parts_from(log, files, 1, 0)
    seqs = [frame.seq for frame in frames_in(next(read))]
    runner.run_until_idle(random.Random(1))
    assert all(segment.sealed for segment in log.wal.store.segments)
    for parts in read:
        seqs += [frame.seq for frame in frames_in(parts)]
    assert seqs == list(range(1, log.seq_durable + 1))
    log.close()


@pytest.mark.parametrize("kind", ["open", "read"])
def test_a_disk_that_fails_under_redo_is_told(files: FaultyFiles, kind: str) -> None:
    """In an error of ours, with the path."""
    clock = VirtualClock()
    log = filled(files, StepRunner(clock), clock)

    def fault(operation: Operation) -> Fault | None:
        return Fault(error=errno.EIO) if operation.kind == kind else None

    files.fault = fault
    with pytest.raises(DiskFailed) as caught:
        list(parts_from(log, files, 1, 0))
    assert caught.value.path is not None
    files.fault = None
    log.close()


def test_a_value_whose_segment_is_gone_is_damage_and_not_absent(tmp_path: Path) -> None:
    """Who asks for a key takes NotFound for an answer."""
    path = str(tmp_path / "data")
    with open_with(path, log_options=SMALL_SEGMENTS) as db:
        db.create_bucket("b")
        for number in range(20):
            db.put("b", f"{number}", bytes(10_000))
    with open_with(path, log_options=SMALL_SEGMENTS) as db:
        for segment in (tmp_path / "data" / "wal").glob("segment-*.log"):
            segment.unlink()
        for read in (
            lambda: db.get("b", "0"),
            lambda: db.read_range("b", "0", 1, 2),
            lambda: list(db.scan("b")),
        ):
            with pytest.raises(Corrupt, match="large value") as caught:
                read()
            assert caught.value.path is not None
        assert db.head("b", "0").size_bytes == 10_000
