"""Whatever is called, in whatever order, and whatever crashes: the database answers as its model does."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.engine.engine_model import (
    BUCKETS,
    KEYS,
    PREFIXES,
    SIZES,
    Driver,
    Machine,
    check_structure,
    encoded,
    run_by_chance,
    small_limits,
)
from tests.engine.transaction_model import Written

from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.survival import SURVIVALS, Survival
from lowwater.engine.format.entries import Delete, Put
from lowwater.engine.format.page import DataPage
from lowwater.engine.pages import merging
from lowwater.engine.state.ranges import Range
from lowwater.errors import LowwaterError

# `MODEL_STEPS=1000000 pytest tests/engine/test_engine_model.py -k chance` goes on for some minutes.
STEPS = int(os.environ.get("MODEL_STEPS", "160000"))
STEPS_EACH = 2000
CHUNKS = 4


@pytest.fixture(autouse=True)
def _small_limits() -> Iterator[None]:
    with small_limits():
        yield


def run(seed: int, steps: int) -> Counter[str]:
    try:
        driver = run_by_chance(seed, steps)
    except BaseException as error:
        error.add_note(f"to repeat: run_by_chance({seed}, {steps})")
        raise
    driver.close()
    return driver.seen + Counter(crashes=driver.crashes)


def run_all(seeds: Iterable[int], steps: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += run(seed, steps)
    return seen


def test_a_database_answers_as_its_model_does() -> None:
    """The fast part of what comes next."""
    assert run_all(range(3), 300)["before-images"] > 10


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_calls_by_chance_are_answered_as_by_the_model(chunk: int) -> None:
    """Small pages, pools and groups on a disk that crashes: every path that a large database takes."""
    seen = run_all(range(1000 + chunk, 1000 + max(CHUNKS, STEPS // STEPS_EACH), CHUNKS), STEPS_EACH)
    for what in (
        "written", "found", "scans", "pages", "crashes", "NotFound", "AlreadyExists", "ConditionFailed",
        "NotEmpty", "VersionGone", "repeated", "ended", "found at a time",
        "spilled", "committed", "committed large", "aborted", "doomed",
        "Conflict at a commit", "rolled back in the log", "scans in transactions",
        "left", "came back", "refused in an outage", "before-images",
    ):  # fmt: skip
        assert seen[what] > 10, f"{what} was hardly ever seen"
    assert seen["ranges, at most"] > STEPS_EACH // 300, "ranges were never divided"


# ---------------------------------------------------------------------------- hypothesis

buckets = st.sampled_from(BUCKETS)
keys = st.sampled_from(KEYS) | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
sizes = st.sampled_from(SIZES)
metadata = st.none() | st.dictionaries(st.text("abü", max_size=3), st.text("xyz", max_size=4), max_size=2)
prefixes = st.sampled_from(PREFIXES)
# How far back from the last seq a read goes.
back = st.none() | st.integers(-1, 60)


class DatabaseCalls(RuleBasedStateMachine):
    """One rule for each call. Crashes come where they were announced, or at once."""

    def __init__(self) -> None:
        super().__init__()
        self.driver: Any = None

    @initialize(seed=st.integers(0, 3), pool=st.sampled_from((12_000, 60_000, 2**20)))
    def begin(self, seed: int, pool: int) -> None:
        self.driver = Driver(Machine(seed=seed, pool_bytes_max=pool))
        self.driver.open()
        for bucket in BUCKETS[:2]:
            self.driver.create_bucket(bucket)

    def at(self, back: int | None) -> int | None:
        return None if back is None else max(0, self.driver.model.applied - back)

    @rule(bucket=buckets)
    def create_bucket(self, bucket: str) -> None:
        self.driver.guarded(lambda: self.driver.create_bucket(bucket))

    @rule(bucket=buckets)
    def delete_bucket(self, bucket: str) -> None:
        self.driver.guarded(lambda: self.driver.delete_bucket(bucket))

    @rule(bucket=buckets, key=keys, size=sizes, metadata=metadata)
    def put(self, bucket: str, key: str, size: int, metadata: dict[str, str] | None) -> None:
        value = self.driver.value(size)
        self.driver.guarded(lambda: self.driver.put(bucket, key, value, metadata))

    @rule(bucket=buckets, key=keys, size=sizes, condition=st.sampled_from(("absent", "same", "other")))
    def put_if(self, bucket: str, key: str, size: int, condition: str) -> None:
        found = self.driver.model.get(bucket, key)
        seq = found.seq if found is not None else 0
        conditions: dict[str, dict[str, Any]] = {
            "absent": {"if_absent": True},
            "same": {"if_seq": seq},
            "other": {"if_seq": seq + 1},
        }
        value = self.driver.value(size)
        self.driver.guarded(lambda: self.driver.put(bucket, key, value, **conditions[condition]))

    @rule(bucket=buckets, items=st.lists(st.tuples(keys, sizes), min_size=1, max_size=12))
    def put_many(self, bucket: str, items: list[tuple[str, int]]) -> None:
        pairs = [(key, self.driver.value(size)) for key, size in items]
        self.driver.guarded(lambda: self.driver.put_many(bucket, pairs))

    @rule(bucket=buckets, key=keys)
    def delete(self, bucket: str, key: str) -> None:
        self.driver.guarded(lambda: self.driver.delete(bucket, key))

    @rule(bucket=buckets, number=st.integers(0, 99), many=st.booleans())
    def delete_what_is_there(self, bucket: str, number: int, many: bool) -> None:
        live = self.driver.model.live(bucket)
        for found in live if many else live[number : number + 1]:
            self.driver.guarded(lambda key=found.key: self.driver.delete(bucket, key))

    @rule(bucket=buckets, key=keys, to_bucket=buckets, to_key=keys, number=st.integers(0, 99))
    def copy(self, bucket: str, key: str, to_bucket: str, to_key: str, number: int) -> None:
        live = self.driver.model.live(bucket)
        key = live[number].key if number < len(live) else key
        self.driver.guarded(lambda: self.driver.copy(bucket, key, to_bucket, to_key))

    @rule(members=st.lists(st.tuples(buckets, keys, sizes | st.none(), metadata), min_size=1, max_size=8))
    def write(self, members: list[tuple[str, str, int | None, dict[str, str] | None]]) -> None:
        entries: list[Put | Delete] = [
            Delete(bucket, key) if size is None else Put(bucket, key, self.driver.value(size), metadata)
            for bucket, key, size, metadata in members
        ]
        self.driver.guarded(lambda: self.driver.write(entries))

    @rule(bucket=buckets, key=keys, back=back, number=st.integers(0, 99), head=st.booleans())
    def get(self, bucket: str, key: str, back: int | None, number: int, head: bool) -> None:
        live = self.driver.model.live(bucket)
        key = live[number].key if number < len(live) else key
        self.driver.guarded(lambda: self.driver.get(bucket, key, self.at(back), head=head))

    @rule(
        bucket=buckets,
        prefix=prefixes,
        delimiter=st.sampled_from((None, "/", "1", "//")),
        after=st.none() | keys,
        limit=st.sampled_from((1, 3, 1000)),
        back=back,
    )
    def list_keys(
        self, bucket: str, prefix: str, delimiter: str | None, after: str | None, limit: int, back: int | None
    ) -> None:
        self.driver.guarded(lambda: self.driver.list(bucket, prefix, delimiter, after, limit, self.at(back)))

    @rule(bucket=buckets, prefix=prefixes, after=st.none() | keys, back=back)
    def open_scan(self, bucket: str, prefix: str, after: str | None, back: int | None) -> None:
        self.driver.guarded(lambda: self.driver.open_scan(bucket, prefix, after, self.at(back)))

    @precondition(lambda self: self.driver is not None and self.driver.scans)
    @rule(number=st.integers(0, 3), count=st.none() | st.integers(1, 20))
    def advance_scan(self, number: int, count: int | None) -> None:
        self.driver.guarded(lambda: self.driver.advance_scan(number, count))

    @precondition(lambda self: self.driver is not None and self.driver.scans)
    @rule(number=st.integers(0, 3))
    def abandon_scan(self, number: int) -> None:
        self.driver.abandon_scan(number)

    @rule(name=st.sampled_from("xy"), drop=st.booleans())
    def snapshot(self, name: str, drop: bool) -> None:
        call = self.driver.drop_snapshot if drop else self.driver.snapshot
        self.driver.guarded(lambda: call(name))

    @rule(name=st.sampled_from("xy"), ttl_s=st.sampled_from((0.5, 100.0)))
    def snapshot_that_ends(self, name: str, ttl_s: float) -> None:
        self.driver.guarded(lambda: self.driver.snapshot(name, ttl_s))

    @rule(ttl_s=st.sampled_from((0.5, 100.0)))
    def open_session(self, ttl_s: float) -> None:
        self.driver.guarded(lambda: self.driver.open_session(ttl_s))

    @rule(number=st.integers(0, 3), distance=st.integers(-4, 2), bucket=buckets, key=keys, size=sizes)
    def request(self, number: int, distance: int, bucket: str, key: str, size: int) -> None:
        sessions = self.driver.model.sessions
        if sessions:
            session_id = sorted(sessions)[number % len(sessions)]
            request = max(1, sessions[session_id].highest + distance)
            items = [(key, self.driver.value(size))] * (1 + number // 2)
            self.driver.guarded(lambda: self.driver.request(session_id, request, 0, bucket, items))

    @rule(bucket=buckets, key=keys, number=st.integers(0), offset_us=st.sampled_from((-1, 0, 1)))
    def get_at_time(self, bucket: str, key: str, number: int, offset_us: int) -> None:
        times = self.driver.model.times
        time_us = times[-1 - number % len(times)][0] + offset_us
        self.driver.guarded(lambda: self.driver.get_at_time(bucket, key, time_us))

    @rule(back=back)
    def move_horizon(self, back: int | None) -> None:
        self.driver.guarded(lambda: self.driver.move_horizon(self.at(back)))

    @rule(back=back)
    def root(self, back: int | None) -> None:
        self.driver.guarded(lambda: self.driver.root(self.at(back)))

    @rule(serializable=st.booleans())
    def begin_transaction(self, serializable: bool) -> None:
        if len(self.driver.txns) < 3:
            self.driver.guarded(lambda: self.driver.begin(serializable=serializable))

    @precondition(lambda self: self.driver is not None and self.driver.txns)
    @rule(
        number=st.integers(0, 2),
        bucket=buckets,
        writes=st.lists(st.tuples(keys, sizes | st.none()), min_size=1, max_size=20),
    )
    def write_in_transaction(self, number: int, bucket: str, writes: list[tuple[str, int | None]]) -> None:
        opened = self.driver.txns[number % len(self.driver.txns)]
        for key, size in writes:
            written = Written((bucket, key), None if size is None else self.driver.value(size))
            if opened in self.driver.txns:
                self.driver.guarded(lambda written=written: self.driver.txn_write(opened, written))

    @precondition(lambda self: self.driver is not None and self.driver.txns)
    @rule(
        number=st.integers(0, 2),
        what=st.sampled_from(("savepoint", "rollback", "commit", "abort", "get", "scan")),
        bucket=buckets,
        key=keys,
        prefix=prefixes,
    )
    def use_transaction(self, number: int, what: str, bucket: str, key: str, prefix: str) -> None:
        driver = self.driver
        opened = driver.txns[number % len(driver.txns)]
        calls: dict[str, Any] = {
            "savepoint": lambda: driver.savepoint(opened),
            "rollback": lambda: driver.rollback_to(opened, number),
            "commit": lambda: driver.commit(opened),
            "abort": lambda: driver.abort(opened),
            "get": lambda: driver.txn_get(opened, (bucket, key)),
            "scan": lambda: driver.txn_scan(opened, bucket, prefix),
        }
        driver.guarded(calls[what])

    @rule()
    def flush(self) -> None:
        self.driver.guarded(self.driver.flush)

    @rule(seed=st.integers(0, 9), share=st.sampled_from((0.3, 1)), checkpoint=st.booleans())
    def pages_leave(self, seed: int, share: float, checkpoint: bool) -> None:
        if checkpoint:
            self.driver.guarded(self.driver.checkpoint)
        rng = random.Random(seed)
        self.driver.guarded(lambda: self.driver.pages_leave(lambda _: rng.random() < share))

    @rule(
        calls=st.lists(
            st.tuples(st.sampled_from(("get", "put", "put_if", "delete", "flush", "step")), buckets, keys),
            min_size=1,
            max_size=8,
        )
    )
    def store_down_for_a_while(self, calls: list[tuple[str, str, str]]) -> None:
        driver = self.driver
        for what, bucket, key in calls:
            made: dict[str, Any] = {
                "get": lambda bucket=bucket, key=key: driver.get(bucket, key),
                "put": lambda bucket=bucket, key=key: driver.put(bucket, key, driver.value(20)),
                "put_if": lambda bucket=bucket, key=key: driver.put(
                    bucket, key, driver.value(20), if_absent=True
                ),
                "delete": lambda bucket=bucket, key=key: driver.delete(bucket, key),
                "flush": driver.flush,
                "step": lambda: (driver.machine.step(5), driver.absorb()),
            }
            driver.in_outage(made[what])

    @rule(count=st.sampled_from((1, 2, 5, 20)))
    def step(self, count: int) -> None:
        self.driver.guarded(lambda: self.driver.machine.step(count))
        self.driver.guarded(self.driver.absorb)

    @rule(seconds=st.sampled_from((0.0, 0.000001, 1.0)), offset_us=st.sampled_from((0, -1000, 1000)))
    def idle(self, seconds: float, offset_us: int) -> None:
        self.driver.machine.clock.wall_offset_us = offset_us
        self.driver.guarded(lambda: self.driver.machine.idle(seconds))
        self.driver.guarded(self.driver.absorb)

    @rule()
    def reopen(self) -> None:
        self.driver.guarded(self.driver.reopen)

    @rule(mode=st.sampled_from(SURVIVALS))
    def crash(self, mode: Survival) -> None:
        self.driver.recover(mode)

    @rule(operations=st.integers(1, 30), after=st.booleans())
    def crash_soon(self, operations: int, after: bool) -> None:
        files = self.driver.machine.files
        files.crash_at(files.operations + operations, after=after)

    @rule()
    def compare(self) -> None:
        self.driver.guarded(self.driver.compare)

    def teardown(self) -> None:
        if self.driver is not None:
            self.driver.machine.files._crash_number = None
            if self.driver.pending:
                return  # an assertion has failed inside a call
            try:
                self.driver.compare()
            except SimulatedCrash:
                return


TestHypothesis = DatabaseCalls.TestCase
TestHypothesis.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# ---------------------------------------------------------------------------- what it found, by itself


def opened(*, pool_bytes_max: int = 2**20) -> Driver:
    driver = Driver(Machine(pool_bytes_max=pool_bytes_max))
    driver.open()
    driver.create_bucket("a")
    return driver


def flush_pages(driver: Driver) -> None:
    """And have memory let go of what is in pages now."""
    driver.flush()
    driver.machine.idle()


def test_a_page_that_becomes_empty_is_not_given_to_one_that_was_flushed_later() -> None:
    """A page's seq says that it has all changes of its keys up to there. Where the keys of the next page
    became its own, changes that were in memory only were taken for done by redo: an acknowledged put was
    gone after a crash."""
    driver = opened()
    names = [f"{n:03}" for n in range(200)]
    driver.put_many("a", [(name, b"") for name in names])
    flush_pages(driver)
    driver.put("a", "000", b"more")
    flush_pages(driver)  # after which the ranges are divided
    first = next(
        each.layout.keys
        for each in driver.db._state.map.ranges[1:]
        if len(each.layout.keys) > 1 and each.low > encoded("a", names[0])
    )
    emptied = [name for name in names if first[0] <= encoded("a", name) < first[1]]
    assert emptied
    for name in emptied:
        driver.delete("a", name)
    flush_pages(driver)
    driver.put("a", emptied[-1], b"acknowledged")
    # Later than that, and flushed before it: the neighbours.
    neighbour = next(name for name in reversed(names) if encoded("a", name) < first[0])
    driver.put("a", neighbour, b"later")
    _flush_range_of(driver, encoded("a", neighbour))
    driver.recover("lose", again=0)
    flush_pages(driver)
    driver.get("a", emptied[-1])
    driver.compare()


def _flush_range_of(driver: Driver, key: bytes) -> None:
    """Only the range with this key."""
    db = driver.db
    for _ in db._flusher._flush(db._flusher._freeze([db._state.map.find(key)])):
        pass


def test_a_horizon_is_not_moved_to_where_only_a_running_scan_keeps_versions() -> None:
    """A crash ends the scan. What redo does not know of it does not keep, and reads there would be wrong."""
    driver = opened()
    driver.put("a", "k", b"1")
    driver.open_scan("a")
    for number in range(5):
        driver.put("a", "k", b"%d" % number)
    driver.move_horizon(driver.model.applied - 3)
    assert driver.seen["VersionGone"] == 1
    driver.recover("lose", again=0)
    driver.get("a", "k", driver.model.applied - 1)


def test_versions_of_a_snapshot_are_kept_after_reopening() -> None:
    driver = opened()
    driver.put("a", "k", b"1")
    driver.snapshot("x")
    at = driver.model.applied - 1
    driver.reopen()
    driver.put("a", "k", b"2")
    driver.put("a", "k", b"3")
    driver.get("a", "k", at)
    driver.get("a", "k", driver.model.applied - 1)
    flush_pages(driver)
    driver.get("a", "k", driver.model.applied - 1)


def test_redo_keeps_what_a_horizon_needs_that_came_after_others() -> None:
    """Redo repeats entries on versions from its own beginning on. Halfway through them it may not drop what
    the last one still needs: here a snapshot, which redo does not see being made, kept them in between."""
    driver = opened()
    driver.put("a", "other", b"never flushed until the end")
    driver.put("a", "k", b"1")
    driver.snapshot("x")
    kept = driver.model.applied - 1
    flush_pages(driver)
    driver.put("a", "other", b"dirty from here on")
    driver.move_horizon(None)
    driver.put("a", "k", b"2")
    many = [(f"{n:02}", driver.value(900)) for n in range(30)]
    driver.put_many("a", many)
    driver.move_horizon(kept)
    driver.drop_snapshot("x")
    db = driver.db
    db._flusher._choose = lambda: None
    for _ in db._flusher._flush(db._flusher._freeze([])):  # the meta alone goes on
        pass
    driver.get("a", "k", kept)
    driver.machine.pool_bytes_max = 12_000  # redo has to flush
    driver.recover("lose", again=0)
    driver.get("a", "k", kept)


def test_pages_that_are_read_while_a_group_is_written_count_once() -> None:
    """Otherwise the pool loses room for pages with each, and none is left in the end."""
    driver = opened()
    driver.put_many("a", [(f"{n:03}", b"x") for n in range(100)])
    driver.reopen()
    driver.put("a", "000", b"y")
    db = driver.db
    db._flusher.want(db._state.applied)
    while not db._flusher.groups:
        db._flusher.step()
    for n in range(100):
        driver.get("a", f"{n:03}")
    while db._flusher.step() is not None:
        pass
    check_structure(db, driver.machine.pages)


def test_a_large_value_far_into_a_segment_can_be_copied() -> None:
    """Where a frame lies is looked up, and the log is read in runs: the first may hold nothing of it."""
    driver = opened()
    driver.put_many("a", [(f"{n}", driver.value(300)) for n in range(40)])
    driver.copy("a", "39", "a", "copy")
    driver.reopen()
    driver.copy("a", "copy", "a", "copy of it")
    driver.recover("lose", again=0)
    driver.compare()


@pytest.mark.parametrize("size", range(250, 330, 3))
def test_values_around_the_inline_limit_are_flushed(size: int) -> None:
    driver = opened()
    driver.put("a", "k", driver.value(size))
    driver.put_many("a", [("l" * 40, driver.value(size)), ("m", b"")])
    flush_pages(driver)
    driver.reopen()
    driver.compare()


def test_layouts_that_are_no_longer_in_force_leave_memory() -> None:
    """A pool that is never full never looks through its queue."""
    driver = opened()
    driver.put_many("a", [(f"{n:03}", b"x") for n in range(100)])
    for _ in range(200):
        driver.put_many("a", [(f"{n:03}", b"x") for n in range(0, 100, 10)])
        flush_pages(driver)
    queue = driver.db._state.clean._queue
    in_force = sum(len(each.layout.keys) for each in driver.db._state.map.ranges)
    assert len(queue) < 4 * in_force + 2000


def test_the_model_itself_finds_a_page_that_claims_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that has never failed proves nothing."""
    real = merging.merge

    def claims_more(*arguments: Any, **named: Any) -> list[tuple[bytes, DataPage]]:
        merged = real(*arguments, **named)
        for _, page in merged:
            page.seq += 3
        return merged

    monkeypatch.setattr(merging, "merge", claims_more)
    with pytest.raises((AssertionError, LowwaterError, pytest.fail.Exception)):
        run_all(range(20), 300)


def test_the_model_itself_finds_a_change_that_left_memory_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Range.freeze

    def freeze(self: Range) -> None:
        real(self)
        assert self.frozen is not None
        if len(self.frozen) > 3:
            self.frozen.pop(random.Random(1).choice(sorted(self.frozen)))

    monkeypatch.setattr(Range, "freeze", freeze)
    with pytest.raises((AssertionError, LowwaterError, pytest.fail.Exception)):
        run_all(range(20), 300)


@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "stored"])
@pytest.mark.parametrize("crash", ["before", "between", "after"])
def test_keys_in_ascending_order_divide_the_range_that_they_come_to(crash: str, in_memory: bool) -> None:
    """It has pages, and all that come are merged into the last one of them: at once, if they lie in one
    range. What was deleted above the last page's keys stays deleted."""
    driver = opened()
    names = [f"{n:03}" for n in range(300)]
    driver.put_many("a", [(name, b"") for name in names[:160]])
    flush_pages(driver)
    for name in names[150:160]:
        driver.delete("a", name)
    flush_pages(driver)
    if not in_memory:
        driver.reopen()
    db = driver.db
    before = [each.low for each in db._state.map.ranges]
    driver.put_many("a", [(name, b"again") for name in names[155:]])
    with db._state.lock:
        db._flusher._choose_ranges()
    after = [each.low for each in db._state.map.ranges]
    divided_at = sorted({*after} - {*before})
    assert len(divided_at) > 1
    assert min(divided_at) > encoded("a", names[149])
    assert sum(bool(each.dirty) for each in db._state.map.ranges) > 2
    if crash == "before":
        driver.recover("lose", again=0)
    _flush_range_of(driver, encoded("a", names[155]))
    check_structure(driver.db, driver.machine.pages)
    if crash == "between":
        driver.recover("lose", again=0)
    flush_pages(driver)
    if crash == "after":
        driver.recover("lose", again=0)
    driver.checkpoint()
    driver.compare()
    assert list(driver.db.check()) == []
