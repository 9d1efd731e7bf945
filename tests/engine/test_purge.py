"""Purging: the oldest segments go, one by one; a crash leaves a log without a gap."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lowwater.chaos.clock import SeededRandomness, VirtualClock
from lowwater.chaos.disk import FaultyFiles, SimulatedCrash
from lowwater.chaos.runner import StepRunner
from lowwater.chaos.survival import SURVIVALS
from lowwater.engine.format.entries import Put
from lowwater.engine.log.check import Finding, check_directory_steps
from lowwater.engine.log.directory import read_names
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.seams.real import RealFiles
from lowwater.errors import Closed, LowwaterError


def open_log(files: FaultyFiles) -> Log:
    clock = VirtualClock()
    seams = Seams(
        files=files,
        clock=clock,
        randomness=SeededRandomness(1),
        runner=StepRunner(clock),
        owner=f"life {files.life}",
    )
    return Log.open("log", options=LogOptions(segment_bytes=4096, ring_bytes_max=0), seams=seams)


def filled() -> tuple[FaultyFiles, Log]:
    files = FaultyFiles(clock=VirtualClock())
    log = open_log(files)
    for number in range(40):
        log.append(Put("b", f"k{number}", bytes(1000)))
    log.wal.store.seal_all()
    return files, log


def test_what_is_purged_is_gone_and_the_rest_is_not() -> None:
    """Whole segments only, and never the newest sealed one, whose hash the next segment names."""
    _, log = filled()
    lasts = [segment.seq_last for segment in log.wal.store.segments]
    for seq in (0, lasts[0] - 1):
        assert log.purge(seq) == 0
    assert log.purge(lasts[0]) == lasts[0]
    assert log.purge(lasts[2] + 1) == lasts[2]
    assert log.purge(lasts[0]) == lasts[2]
    assert [entry.seq for entry in log.read()] == list(range(lasts[2] + 1, 42))
    assert log.purge(10**9) == lasts[-2]
    assert list(log.check()) == []
    assert log.append(Put("b", "k", b"")) == 42
    log.seal()
    assert log.purge(10**9) == lasts[-1]
    assert list(log.check()) == []
    log.close()


def test_a_log_without_sealed_segments_purges_nothing() -> None:
    """There is only the current one."""
    log = open_log(FaultyFiles(clock=VirtualClock()))
    assert log.purge(10**9) == 0
    log.close()


@pytest.mark.parametrize("survival", SURVIVALS, ids=str)
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_operation_of_a_purge_leaves_no_gap(survival: object, after: bool) -> None:
    """A removal that was not synced may come back; a newer segment must not be gone then."""
    for number in range(1, 30):
        files, log = filled()
        files.crash_at(files.operations + number, after=after)
        try:
            log.purge(log.wal.store.segments[-2].seq_last)
            ended = True
        except SimulatedCrash:
            ended = False
        files.crash(random.Random(number), survival)  # type: ignore[arg-type]
        with open_log(files) as log:
            first = log.seq_first
            assert [entry.seq for entry in log.read()] == list(range(first, 42))
            assert list(log.check()) == []
            assert log.append(Put("b", "k", b"")) == 42
        if ended:
            assert number > 5
            return
    raise AssertionError("the purge never ended")


@pytest.mark.parametrize("removed", range(1, 5))
def test_what_is_purged_while_somebody_checks_is_not_missing(removed: int) -> None:
    """Retention removes segments whenever it wants; one that is missing in the middle is still told."""
    files, log = filled()
    segments = list(log.wal.store.segments)
    steps = check_directory_steps(files, "log", names=read_names(files, "log"), current=None)
    first = next(steps)  # it has begun with the names of all
    log.purge(segments[removed].seq_last)
    assert [each for each in (first, *steps) if isinstance(each, Finding)] == []
    steps = check_directory_steps(files, "log", names=read_names(files, "log"), current=None)
    next(steps)
    files.remove(segments[removed + 3].path)
    assert [each.where for each in steps if isinstance(each, Finding)][:1] == [segments[removed + 3].path]


def four_segments(path: Path) -> tuple[Log, list[int]]:
    """A log on the disk, and the last seq of each of its segments."""
    log = Log.open(path, options=LogOptions(segment_bytes=65536))
    lasts = []
    for number in range(4):
        log.append(Put("b", f"k{number}", b"."))
        log.seal()
        lasts.append(log.seq_last)
    log.wal.store.seal_all()
    return log, lasts


def when_one_is_removed(monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    """Before the first removal."""
    remove, calls = RealFiles.remove, [call]

    def removing(files: RealFiles, path: str) -> None:
        if calls:
            calls.pop()()
        remove(files, path)

    monkeypatch.setattr(RealFiles, "remove", removing)


def test_two_that_purge_at_once_leave_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As retention and a caller do. Who is killed in between would find a log that cannot be opened."""
    log, lasts = four_segments(tmp_path)
    before = sorted(os.listdir(tmp_path))
    other = threading.Thread(target=log.purge, args=(lasts[2],))

    def purge_more() -> None:
        other.start()
        other.join(0.5)
        assert sorted(os.listdir(tmp_path)) == before

    when_one_is_removed(monkeypatch, purge_more)
    log.purge(lasts[0])
    other.join()
    log.close()
    with Log.open(tmp_path) as log:
        assert [entry.seq for entry in log.read()] == [lasts[2] + 1, lasts[3]]


def test_what_could_not_be_removed_goes_before_what_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else there would be a gap behind it."""
    log, lasts = four_segments(tmp_path)
    first, *others = sorted(name for name in os.listdir(tmp_path) if name.startswith("segment-"))

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    when_one_is_removed(monkeypatch, fail)
    with pytest.raises(LowwaterError):
        log.purge(lasts[0])
    when_one_is_removed(monkeypatch, fail)
    with pytest.raises(LowwaterError):
        log.purge(lasts[1])
    assert {first, *others} <= set(os.listdir(tmp_path))
    log.purge(lasts[2])
    assert [name for name in os.listdir(tmp_path) if name.startswith("segment-")] == others[-1:]
    log.close()


def test_a_log_that_is_closed_purges_nothing(tmp_path: Path) -> None:
    """Its directory may be another process's by now."""
    log, lasts = four_segments(tmp_path)
    log.close()
    before = os.listdir(tmp_path)
    with pytest.raises(Closed):
        log.purge(lasts[2])
    assert os.listdir(tmp_path) == before
