"""Reads as of a time, and reads of what is still to come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import lowwater
from lowwater import Create, CreateBucket, Database, Engine, Put
from lowwater.chaos.clock import VirtualClock
from lowwater.engine.database.opening import open_with
from lowwater.engine.format.moments import duration_us, time_us_of
from lowwater.engine.log.log import LogOptions, Seams
from lowwater.errors import Closed, InputError, LogDivergence, NotFound, TimedOut, VersionGone

START = datetime(2026, 1, 31, 12, tzinfo=UTC)
BEFORE = timedelta(microseconds=1)


class Clock(VirtualClock):
    def set(self, moment: datetime) -> None:
        self.wall_offset_us += time_us_of(moment) - self.now_us()


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.set(START)
    return clock


@pytest.fixture
def db(tmp_path: Path, clock: Clock) -> Iterator[Database]:
    options = LogOptions(segment_bytes=4096, block_bytes=1024)
    with open_with(str(tmp_path / "data"), log_options=options, seams=Seams(clock=clock)) as db:
        yield db


def write_minutes(db: Database, clock: Clock, minutes: int = 30) -> list[int]:
    """A version a minute, over several segments."""
    db.create_bucket("b")
    db.move_horizon(2)
    seqs = []
    for minute in range(minutes):
        clock.set(START + timedelta(minutes=minute + 1))
        seqs.append(db.put("b", "k", b"%d" % minute, {"pad": "x" * 250}))
    return seqs


def test_a_time_stands_for_the_last_entry_that_is_not_later(db: Database, clock: Clock) -> None:
    """In segments that are sealed, in the current one, and between two entries."""
    seqs = write_minutes(db, clock)
    assert db._wal.store.segment_count > 2
    db.flush()
    for minute, seq in enumerate(seqs):
        moment = START + timedelta(minutes=minute + 1)
        for at in (moment, moment + timedelta(seconds=59), moment.astimezone(timezone(timedelta(hours=-7)))):
            assert db.seq_at(at) == seq
            found = db.get("b", "k", at)
            assert (found.seq, found.value) == (seq, b"%d" % minute)
            assert db.head("b", "k", at).seq == seq
            assert [each.seq for each in db.scan("b", at=at)] == [seq]
            assert db.list("b", at=at).objects[0].seq == seq
        assert db.root(moment) == db.root(seq)
        assert db.seq_at(moment - BEFORE) == seq - 1


def test_a_time_that_has_not_come_shows_what_is_there_now(db: Database, clock: Clock) -> None:
    """Nothing in the log is later."""
    seqs = write_minutes(db, clock)
    assert db.get("b", "k", START + timedelta(days=1)).seq == seqs[-1]


def test_what_was_before_the_first_entry_is_gone(db: Database, clock: Clock) -> None:
    write_minutes(db, clock, 3)
    with pytest.raises(VersionGone):
        db.get("b", "k", START - BEFORE)
    with pytest.raises(VersionGone):
        db.seq_at(datetime(1950, 1, 1, tzinfo=UTC))
    assert db.buckets(START) == ["b"]
    with pytest.raises(NotFound):
        db.get("b", "k", START + timedelta(seconds=59))


def test_a_time_below_the_horizon_is_gone(db: Database, clock: Clock) -> None:
    seqs = write_minutes(db, clock, 10)
    db.move_horizon(seqs[5])
    assert db.get("b", "k", START + timedelta(minutes=6)).seq == seqs[5]
    with pytest.raises(VersionGone):
        db.get("b", "k", START + timedelta(minutes=5))


def test_a_time_without_a_zone_is_refused(db: Database) -> None:
    db.create_bucket("b")
    for call in (db.get, db.head):
        with pytest.raises(InputError) as caught:
            call("b", "k", START.replace(tzinfo=None))
        assert "zone" in caught.value.message
    for wrong in ("2026-01-31", 1.5, -1, True, 2**64):
        with pytest.raises(InputError):
            db.get("b", "k", wrong)  # type: ignore[arg-type]


def test_times_are_exact_to_the_microsecond() -> None:
    """A float is not, at this distance from 1970."""
    for microsecond in range(0, 1_000_000, 9973):
        moment = START.replace(microsecond=microsecond)
        assert time_us_of(moment) == int(START.timestamp()) * 1_000_000 + microsecond


@pytest.mark.parametrize("wrong", [0, -1, "1", True, float("nan"), float("inf"), timedelta(0), 10**30])
def test_a_duration_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError):
        duration_us(wrong, "time to live")


def test_a_time_of_entries_that_are_not_durable_makes_them_so(tmp_path: Path) -> None:
    """An answer rests on all entries that are not later."""
    with Engine(tmp_path / "data", log_options=LogOptions(sync_interval_ms=3_600_000)) as engine:
        engine.apply_log_entry(1, Create(bytes(16), bytes(16)))
        engine.apply_log_entry(2, CreateBucket("b", time_us=time_us_of(START)))
        for minute in range(5):
            time_us = time_us_of(START + timedelta(minutes=minute))
            engine.apply_log_entry(3 + minute, Put("b", "k", b"%d" % minute, time_us=time_us))
        assert engine.marks().durable < 7
        assert engine.seq_at(START + timedelta(minutes=2)) == 5
        assert engine.marks().durable >= 5


# ---------------------------------------------------------------------------- what is still to come


def test_a_seq_that_is_to_come_fails_unless_one_waits(db: Database) -> None:
    db.create_bucket("b")
    seq = db.put("b", "k", b"v")
    with pytest.raises(VersionGone):
        db.get("b", "k", seq + 1)
    for call in (
        lambda: db.get("b", "k", seq + 1, wait_s=0),
        lambda: db.head("b", "k", seq + 1, wait_s=0),
        lambda: db.read("b", "k", seq + 1, wait_s=0.01),
        lambda: db.scan("b", at=seq + 1, wait_s=0),
        lambda: db.list("b", at=seq + 1, wait_s=0),
        lambda: db.root(seq + 1, wait_s=0),
    ):
        with pytest.raises(TimedOut):
            call()
    for wrong in (-1, "1", True, float("nan")):
        with pytest.raises(InputError):
            db.get("b", "k", seq + 1, wait_s=wrong)  # type: ignore[arg-type]
    assert db.get("b", "k", seq, wait_s=0).seq == seq


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 — looked at by the test
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def until_waiting(db: Any, readers: int) -> None:
    while db._waiting_readers < readers:
        time.sleep(0.001)


def test_a_read_waits_until_its_seq_is_applied(tmp_path: Path) -> None:
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        seq = db.put("b", "k", b"0")
        waiting = [in_thread(lambda at=seq + n: db.get("b", "k", at, wait_s=60)) for n in (1, 2, 3)]
        until_waiting(db, 3)
        for n in (1, 2, 3):
            assert db.put("b", "k", b"%d" % n) == seq + n
        for n, (thread, results) in zip((1, 2, 3), waiting, strict=True):
            thread.join()
            assert (results[0].seq, results[0].value) == (seq + n, b"%d" % n)


def test_a_read_that_waited_is_given_its_seq_however_late_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        seq = db.put("b", "k", b"0")
        waiting = [in_thread(lambda at=seq + n: db.get("b", "k", at, wait_s=60)) for n in (1, 2, 3)]
        until_waiting(db, 3)
        with monkeypatch.context() as late:
            late.setattr(db._applied_more, "notify_all", lambda: None)
            for n in range(1, 6):
                db.put("b", "k", b"%d" % n)
            db.flush()
        db.put("b", "k", b"the last")
        for n, (thread, results) in zip((1, 2, 3), waiting, strict=True):
            thread.join()
            assert (results[0].seq, results[0].value) == (seq + n, b"%d" % n)
        assert not db._state._pins, "nobody waits any more"
        assert not db._state.keeps_older


def test_a_fed_engine_lets_readers_wait(tmp_path: Path) -> None:
    """What a session reads after its own write, on another replica."""
    with Engine(tmp_path / "data") as engine:
        engine.apply_log_entry(1, Create(bytes(16), bytes(16)))
        engine.apply_log_entry(2, CreateBucket("b"))
        thread, results = in_thread(lambda: engine.read("b", "k", 10, wait_s=60).value)
        until_waiting(engine, 1)
        engine.apply_log_entry(10, Put("b", "k", b"v"))
        thread.join()
        assert results == [b"v"]


def test_closing_ends_a_wait(tmp_path: Path) -> None:
    db = lowwater.open(tmp_path / "data")
    db.create_bucket("b")
    thread, results = in_thread(lambda: db.get("b", "k", 100, wait_s=3600))
    until_waiting(db, 1)
    db.close()
    thread.join()
    assert type(results[0]) is Closed


def test_a_failure_ends_a_wait(tmp_path: Path) -> None:
    """Nothing will be applied any more."""
    with Engine(tmp_path / "data") as engine:
        engine.apply_log_entry(1, Create(bytes(16), bytes(16)))
        engine.apply_log_entry(2, CreateBucket("b"))
        thread, results = in_thread(lambda: engine.read("b", "k", 10, wait_s=3600))
        until_waiting(engine, 1)
        with pytest.raises(LogDivergence):
            engine.apply_log_entry(2, CreateBucket("other"))
        thread.join()
        assert type(results[0]) is LogDivergence
