"""engine/database/locks.py: who gets a lock, who waits, who is the victim, and that nobody is forgotten."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from types import FrameType
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lowwater.engine.database import locks
from lowwater.engine.database.locks import (
    COMPATIBLE,
    JOINED,
    MODES,
    LockManager,
    LockTable,
    Mode,
    Resource,
    Waiting,
)
from lowwater.engine.seams.real import RealClock
from lowwater.errors import Closed, Deadlock, LockTimeout, RetryError


class Owner(NamedTuple):
    name: str
    started: int


A, B, C, D, E = OWNERS = [Owner(name, started) for started, name in enumerate("ABCDE")]
KEY: Resource = ("b", "k")
OTHER: Resource = ("b", "other")
BUCKET: Resource = ("b", None)


def granted(table: LockTable, owner: Owner, resource: Resource, mode: Mode) -> None:
    assert table.request(owner, resource, mode) is None


def waits(table: LockTable, owner: Owner, resource: Resource, mode: Mode) -> Waiting:
    waiting = table.request(owner, resource, mode)
    assert waiting is not None
    assert waiting.state == "waiting"
    return waiting


def is_sound(table: LockTable) -> bool:
    return list(table.check()) == []


def is_empty(table: LockTable) -> bool:
    return not table._owners and not table._locks and table.held == 0


# ------------------------------------------------------------------ the modes


def test_the_modes_are_compatible_as_in_every_textbook() -> None:
    """Gray's table: an error here would let two writers in, or refuse two readers."""
    drawn = """
              IS  IX  S   SIX X
        IS    +   +   +   +   -
        IX    +   +   -   -   -
        S     +   -   +   -   -
        SIX   +   -   -   -   -
        X     -   -   -   -   -
    """
    head, *rows = [line.split() for line in drawn.strip().splitlines()]
    table = {row[0]: {mode for mode, sign in zip(head, row[1:], strict=True) if sign == "+"} for row in rows}
    assert table == COMPATIBLE
    for one, other in itertools.product(MODES, MODES):
        assert (one in COMPATIBLE[other]) == (other in COMPATIBLE[one])


def test_an_upgrade_joins_what_is_held_with_what_is_wanted() -> None:
    """Intentions to write and a shared lock make SIX, not X: readers of single keys still get in."""
    assert JOINED["IX"]["S"] == JOINED["S"]["IX"] == "SIX"
    assert JOINED["IS"]["S"] == "S"
    assert JOINED["IS"]["IX"] == "IX"
    assert JOINED["SIX"]["IX"] == "SIX"
    for one, other in itertools.product(MODES, MODES):
        assert JOINED[one][one] == one
        assert JOINED[one][other] == JOINED[other][one]
        assert JOINED[one]["X"] == "X"


@pytest.mark.parametrize("one", MODES)
@pytest.mark.parametrize("other", MODES)
def test_a_bucket_is_granted_to_two_exactly_when_their_modes_are_compatible(one: Mode, other: Mode) -> None:
    """The table is not only right, it is what is looked at."""
    table = LockTable()
    granted(table, A, BUCKET, one)
    waiting = table.request(B, BUCKET, other)
    assert (waiting is None) == (other in COMPATIBLE[one])
    settled = table.release_all(A)
    assert settled == ([] if waiting is None else [waiting])
    assert table.holds(B, BUCKET) == other


# ------------------------------------------------------------------ buckets and keys


def test_a_key_brings_the_intention_on_its_bucket() -> None:
    """Whoever wants the whole bucket sees it without looking at each key."""
    table = LockTable()
    granted(table, A, KEY, "S")
    assert table.holds(A, BUCKET) == "IS"
    granted(table, A, OTHER, "X")
    assert table.holds(A, BUCKET) == "IX"
    waiting = waits(table, B, BUCKET, "S")
    assert table.release_all(A) == [waiting]
    assert table.release_all(B) == []
    assert is_empty(table)


def test_a_lock_on_the_bucket_makes_locks_on_its_keys_needless() -> None:
    """A transaction that rewrites a bucket must not pay for each key."""
    table = LockTable()
    granted(table, A, BUCKET, "S")
    granted(table, A, KEY, "S")
    assert table.held == 1
    granted(table, A, KEY, "X")
    assert (table.holds(A, BUCKET), table.holds(A, KEY)) == ("SIX", "X")
    granted(table, A, BUCKET, "X")
    granted(table, A, OTHER, "X")
    assert table.held == 2


def test_a_request_for_a_key_goes_on_from_its_bucket_to_its_key() -> None:
    """It may have to wait in both places, and is granted only once."""
    table = LockTable()
    granted(table, A, BUCKET, "X")
    second = waits(table, B, KEY, "X")
    third = waits(table, C, KEY, "X")
    assert table.release_all(A) == [second]
    assert third.state == "waiting"
    assert table.release_all(B) == [third]
    assert table.waits == 2


def test_a_request_that_fails_takes_its_intention_along() -> None:
    """Else a time-out on one key would keep readers of the bucket away until the end of the transaction."""
    table = LockTable()
    granted(table, A, KEY, "S")
    waits(table, B, KEY, "X")
    assert table.holds(B, BUCKET) == "IX"
    shared = waits(table, C, BUCKET, "S")
    assert [each.state for each in table.cancel(B, timed_out=True)] == ["timed_out", "granted"]
    assert shared.state == "granted"
    assert table.holds(B, BUCKET) is None
    assert table.timeouts == 1


def test_a_try_never_stands_in_a_queue() -> None:
    """Asking without waiting must not make a victim of somebody else."""
    table = LockTable()
    granted(table, A, KEY, "X")
    granted(table, B, OTHER, "X")
    waits(table, B, KEY, "X")
    refused = table.request(A, OTHER, "X", wait=False)
    assert refused is not None
    assert (refused.state, refused.others) == ("timed_out", [])
    assert (table.deadlocks, table.timeouts, table.waits) == (0, 1, 1)
    assert table.request(C, KEY, "S", wait=False) is not None
    assert table.holds(C, BUCKET) is None
    assert is_sound(table)


# ------------------------------------------------------------------ queues


def test_readers_do_not_overtake_a_writer_who_waits() -> None:
    """A stream of readers would keep it waiting for ever."""
    table = LockTable()
    granted(table, A, KEY, "S")
    writer = waits(table, B, KEY, "X")
    readers = [waits(table, C, KEY, "S"), waits(table, D, KEY, "S")]
    assert table.release_all(A) == [writer]
    assert table.release_all(B) == readers


def test_whoever_is_compatible_with_all_before_it_joins() -> None:
    """Waiting behind somebody whom it does not disturb would help nobody."""
    table = LockTable()
    granted(table, A, BUCKET, "IX")
    waits(table, B, BUCKET, "S")
    granted(table, C, BUCKET, "IS")
    writer = waits(table, D, BUCKET, "IX")
    # Nor does it overtake later, when the queue is looked at again.
    assert table.release_all(C) == []
    assert writer.state == "waiting"


def test_whoever_waits_behind_one_that_must_go_on_waiting_may_be_granted() -> None:
    """When the writer before both gives up, the second is free, and nothing else would wake it."""
    table = LockTable()
    granted(table, A, BUCKET, "IX")
    writer = waits(table, B, BUCKET, "X")
    shared = waits(table, C, BUCKET, "S")
    intention = waits(table, D, BUCKET, "IS")
    assert table.cancel(B) == [writer, intention]
    assert shared.state == "waiting"


def test_an_upgrade_comes_before_new_requests() -> None:
    """Behind them it would wait for those who wait for it."""
    table = LockTable()
    granted(table, A, KEY, "S")
    granted(table, B, KEY, "S")
    new = waits(table, C, KEY, "X")
    upgrade = waits(table, A, KEY, "X")
    assert table.release_all(B) == [upgrade]
    assert table.holds(A, KEY) == "X"
    assert new.state == "waiting"


# ------------------------------------------------------------------ savepoints


def test_a_roll_back_to_a_savepoint_gives_back_what_was_taken_since() -> None:
    """Upgrades fall back to what was held, and whoever waited for the difference goes on."""
    table = LockTable()
    granted(table, A, KEY, "S")
    savepoint = table.savepoint(A)
    granted(table, A, KEY, "X")
    granted(table, A, OTHER, "X")
    reader = waits(table, B, KEY, "S")
    assert table.release_since(A, savepoint) == [reader]
    assert (table.holds(A, KEY), table.holds(A, OTHER), table.holds(A, BUCKET)) == ("S", None, "IS")
    assert table.held == 4
    table.release_since(A, 0)
    table.release_all(B)
    assert is_empty(table)


# ------------------------------------------------------------------ deadlocks


def test_the_youngest_in_a_circle_is_the_victim() -> None:
    """It has the least to lose, and the oldest always gets through."""
    table = LockTable()
    for owner, resource in ((A, ("b", "1")), (B, ("b", "2")), (C, ("b", "3"))):
        granted(table, owner, resource, "X")
    second = waits(table, B, ("b", "3"), "X")
    third = waits(table, C, ("b", "1"), "X")
    first = waits(table, A, ("b", "2"), "X")
    assert third.state == "victim"
    assert first.others == [third]
    assert (first.state, second.state, table.deadlocks) == ("waiting", "waiting", 1)
    assert table.release_all(C) == [second]
    assert table.release_all(B) == [first]


def test_two_upgrades_of_one_key_are_a_deadlock() -> None:
    """Each waits for the other's shared lock."""
    table = LockTable()
    granted(table, A, KEY, "S")
    granted(table, B, KEY, "S")
    first = waits(table, A, KEY, "X")
    second = table.request(B, KEY, "X")
    assert second is not None
    assert (first.state, second.state) == ("waiting", "victim")
    assert table.release_all(B) == [first]


def test_a_circle_may_go_through_a_place_in_a_queue() -> None:
    """A reader behind a writer waits for it as much as for a holder."""
    table = LockTable()
    granted(table, A, OTHER, "X")
    granted(table, C, KEY, "S")
    writer = waits(table, B, KEY, "X")
    waits(table, C, OTHER, "X")
    reader = table.request(A, KEY, "S")
    assert reader is not None
    # C holds the key, and waits for A: it is the youngest of the three.
    assert table.deadlocks == 1
    assert (writer.state, reader.state) == ("waiting", "waiting")
    assert table.release_all(C) == [writer]
    assert table.release_all(B) == [reader]


def test_who_merely_stands_in_a_queue_is_no_victim_of_a_shorter_circle() -> None:
    """It would be sent away for nothing: the two others block each other without it."""
    table = LockTable()
    granted(table, A, KEY, "X")
    granted(table, B, OTHER, "X")
    bystander = waits(table, E, KEY, "X")
    waits(table, A, OTHER, "X")
    closing = table.request(B, KEY, "X")
    assert closing is not None
    assert (closing.state, bystander.state) == ("victim", "waiting")


def test_every_circle_that_a_request_closes_is_cut() -> None:
    """A writer may wait for several readers, each of which waits for it."""
    table = LockTable()
    granted(table, A, OTHER, "X")
    readers = []
    for owner in (B, C):
        granted(table, owner, KEY, "S")
        readers.append(waits(table, owner, OTHER, "S"))
    writer = waits(table, A, KEY, "X")
    assert [reader.state for reader in readers] == ["victim", "victim"]
    assert (writer.others, table.deadlocks) == (readers, 2)
    assert is_sound(table)


def test_a_victim_gets_nothing_before_it_has_given_all_back() -> None:
    """Else it would close the same circle again."""
    table = LockTable()
    granted(table, A, KEY, "S")
    granted(table, B, KEY, "S")
    waits(table, A, KEY, "X")
    for resource in (KEY, OTHER):
        refused = table.request(B, resource, "X")
        assert refused is not None
        assert refused.state == "victim"
    assert table.deadlocks == 1
    table.release_all(B)
    granted(table, B, OTHER, "X")


def test_a_victim_lets_through_who_waited_behind_it() -> None:
    """Its place in the queue may be all that they waited for."""
    table = LockTable()
    granted(table, A, KEY, "S")
    granted(table, B, OTHER, "X")
    waits(table, A, OTHER, "S")
    behind: list[Waiting] = []
    closing = table.request(B, KEY, "X")
    assert closing is not None
    assert closing.state == "victim"
    table.release_all(B)
    granted(table, E, OTHER, "S")
    writer = waits(table, D, KEY, "X")
    behind.append(waits(table, C, KEY, "S"))
    waiting = table.request(E, KEY, "S")
    assert waiting is not None
    upgrade = table.request(A, OTHER, "X")  # waits for E, which waits behind D, which waits for A
    assert upgrade is not None
    assert (waiting.state, writer.state) == ("victim", "waiting")
    assert table.release_all(E) == [upgrade]
    assert table.cancel(D) == [writer, *behind]
    assert is_sound(table)


# ------------------------------------------------------------------ against a model

BUCKETS = ("b", "c")
RESOURCES: list[Resource] = [(bucket, key) for bucket in BUCKETS for key in (None, "k", "l")]


class Request:
    """A request of the model."""

    def __init__(self, owner: Owner, resource: Resource, mode: Mode, mark: int) -> None:
        self.owner, self.resource, self.mode, self.mark = owner, resource, mode, mark
        self.at, self.target, self.upgrade, self.arrival = resource, mode, False, 0

    def place(self) -> tuple[bool, int]:
        return (not self.upgrade, self.arrival)


class Model:
    """The same rules said another way: grants are a list for each owner, and everything else is looked for
    anew at each step. Victims come from the table; that each was one of the right ones is asserted."""

    def __init__(self) -> None:
        self.grants: dict[Owner, list[tuple[Resource, Mode]]] = {owner: [] for owner in OWNERS}
        self.requests: dict[Owner, Request] = {}
        self.victims: set[Owner] = set()
        self.arrivals = 0

    def held(self, owner: Owner, resource: Resource) -> Mode | None:
        return next((mode for at, mode in reversed(self.grants[owner]) if at == resource), None)

    def blockers(self, request: Request) -> set[Owner]:
        found = set()
        for owner in OWNERS:
            if owner == request.owner:
                continue
            mode = self.held(owner, request.at)
            other = self.requests.get(owner)
            if mode is not None and request.target not in COMPATIBLE[mode]:
                found.add(owner)
            stands_before = other is not None and other.at == request.at and other.place() < request.place()
            if other is not None and stands_before and request.target not in COMPATIBLE[other.target]:
                found.add(owner)
        return found

    def circles(self, start: Owner) -> list[tuple[Owner, ...]]:
        """Every circle through an owner, the shortest first."""
        found = []
        for count in range(len(OWNERS)):
            for rest in itertools.permutations([owner for owner in self.requests if owner != start], count):
                circle = (start, *rest)
                steps = zip(circle, (*rest, start), strict=True)
                if all(after in self.blockers(self.requests[before]) for before, after in steps):
                    found.append(circle)
        return found

    def request(self, owner: Owner, resource: Resource, mode: Mode, wait: bool, told: list[Owner]) -> None:
        bucket, key = resource
        if owner in self.victims:
            return
        above = self.held(owner, (bucket, None))
        if key is not None and (above == "X" or (mode == "S" and above in ("S", "SIX"))):
            return
        self.arrivals += 1
        request = Request(owner, resource, mode, len(self.grants[owner]))
        request.arrival = self.arrivals
        if key is not None:
            self.stand(request, (bucket, None), "IX" if mode == "X" else "IS")
        else:
            self.stand(request, resource, mode)
        self.advance(request, told, wait)
        self.run(told)

    def stand(self, request: Request, at: Resource, mode: Mode) -> None:
        had = self.held(request.owner, at)
        request.at, request.upgrade = at, had is not None
        request.target = mode if had is None else JOINED[had][mode]

    def advance(self, request: Request, told: list[Owner], wait: bool = True) -> None:
        """Grant as much of it as can be; queue it where it cannot."""
        owner = request.owner
        while not self.blockers(request) or self.held(owner, request.at) == request.target:
            self.requests.pop(owner, None)
            if self.held(owner, request.at) != request.target:
                self.grants[owner].append((request.at, request.target))
            if request.at == request.resource:
                return
            self.stand(request, request.resource, request.mode)
            self.arrivals += 1
            request.arrival = self.arrivals
        if not wait:
            del self.grants[owner][request.mark :]
            return
        if owner in self.requests:
            return
        self.requests[owner] = request
        while owner in self.requests and (circles := self.circles(owner)):
            assert told, f"nobody was chosen to cut {circles}"
            victim = told.pop(0)
            shortest = [circle for circle in circles if len(circle) == len(circles[0])]
            assert victim in [max(circle, key=lambda each: each.started) for circle in shortest]
            self.withdraw(victim)
            self.victims.add(victim)

    def withdraw(self, owner: Owner) -> None:
        request = self.requests.pop(owner, None)
        if request is not None:
            del self.grants[owner][request.mark :]

    def run(self, told: list[Owner]) -> None:
        while ready := [each for each in self.requests.values() if not self.blockers(each)]:
            self.advance(min(ready, key=Request.place), told)
        assert not told, f"{told} were chosen without a circle"


class AgainstTheModel(RuleBasedStateMachine):
    """Random calls, and after each of them the table is where the model is."""

    owners = st.sampled_from(OWNERS)

    def __init__(self) -> None:
        super().__init__()
        self.table = LockTable()
        self.model = Model()
        self.tokens: dict[Owner, Waiting] = {}
        self.savepoints: dict[Owner, list[tuple[int, int]]] = {owner: [] for owner in OWNERS}

    def victims(self, settled: list[Waiting]) -> list[Owner]:
        return [OWNERS[each.owner.started] for each in settled if each.state == "victim"]

    @rule(
        owner=owners,
        resource=st.sampled_from(RESOURCES),
        write=st.booleans(),
        mode=st.sampled_from(MODES),
        wait=st.sampled_from((True, True, True, False)),
    )
    def request(self, owner: Owner, resource: Resource, write: bool, mode: Mode, wait: bool) -> None:
        if resource[1] is not None:
            mode = "X" if write else "S"
        self.ask(owner, resource, mode, wait)

    def ask(self, owner: Owner, resource: Resource, mode: Mode, wait: bool = True) -> None:
        if owner in self.model.requests:
            return
        was_victim = owner in self.model.victims
        waiting = self.table.request(owner, resource, mode, wait=wait)
        told = self.victims(waiting.others) if waiting is not None else []
        if waiting is not None:
            self.tokens[owner] = waiting
            if waiting.state == "victim" and not was_victim:
                told.append(owner)
        self.model.request(owner, resource, mode, wait, told)

    @rule(owner=owners, key=st.sampled_from("kl"), write=st.booleans())
    def touch(self, owner: Owner, key: str, write: bool) -> None:
        """The most frequent of all requests, so that there is some contention."""
        self.ask(owner, ("b", key), "X" if write else "S")

    @rule(owner=owners, timed_out=st.booleans())
    def cancel(self, owner: Owner, timed_out: bool) -> None:
        told = self.victims(self.table.cancel(owner, timed_out=timed_out))
        self.model.withdraw(owner)
        self.model.run(told)

    @rule(owner=owners)
    def savepoint(self, owner: Owner) -> None:
        if owner not in self.model.requests:
            mark = len(self.model.grants[owner])
            self.savepoints[owner].append((self.table.savepoint(owner), mark))

    @rule(owner=owners, which=st.integers(0, 3))
    def release_since(self, owner: Owner, which: int) -> None:
        if which >= len(self.savepoints[owner]):
            return
        savepoint, mark = self.savepoints[owner][which]
        del self.savepoints[owner][which + 1 :]
        told = self.victims(self.table.release_since(owner, savepoint))
        self.model.withdraw(owner)
        del self.model.grants[owner][mark:]
        self.model.run(told)

    @rule(owner=owners)
    def release_all(self, owner: Owner) -> None:
        told = self.victims(self.table.release_all(owner))
        self.model.withdraw(owner)
        self.model.grants[owner] = []
        self.model.victims.discard(owner)
        self.savepoints[owner] = []
        self.model.run(told)

    @invariant()
    def they_agree(self) -> None:
        for owner in OWNERS:
            for resource in RESOURCES:
                assert self.table.holds(owner, resource) == self.model.held(owner, resource)
            token = self.tokens.get(owner)
            waiting = token is not None and token.state == "waiting"
            assert waiting == (owner in self.model.requests)
            assert not (owner in self.model.requests and self.model.circles(owner))
        assert list(self.table.check()) == []

    @invariant()
    def nobody_holds_what_is_not_compatible(self) -> None:
        for one, other in itertools.combinations(OWNERS, 2):
            for resource in RESOURCES:
                mine, theirs = self.table.holds(one, resource), self.table.holds(other, resource)
                assert mine is None or theirs is None or theirs in COMPATIBLE[mine]

    def teardown(self) -> None:
        for owner in OWNERS:
            self.release_all(owner)
        assert is_empty(self.table)


AgainstTheModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestAgainstTheModel = AgainstTheModel.TestCase


# ------------------------------------------------------------------ interrupts


def scenario(table: LockTable, call: Callable[[Callable[[], object], Callable[[], object]], None]) -> None:
    """Waits in both places, upgrades, a deadlock, a time-out and a savepoint. `call` is given a call of the
    table, and what the manager does when an interrupt has cut it short."""
    tokens: list[Waiting] = []

    def request(owner: Owner, resource: Resource, mode: Mode) -> None:
        def step() -> None:
            waiting = table.request(owner, resource, mode)
            if waiting is not None:
                tokens.append(waiting)

        if not any(token.owner == owner and token.state == "waiting" for token in tokens):
            call(step, lambda: table.cancel(owner))

    def repeat(step: Callable[[], object]) -> None:
        call(step, step)

    request(A, KEY, "S")
    request(B, KEY, "S")
    request(D, ("c", None), "X")
    request(C, ("c", "k"), "X")
    request(E, ("c", "k"), "X")
    repeat(lambda: table.release_all(D))
    request(A, KEY, "X")
    request(D, KEY, "X")
    request(B, KEY, "X")
    savepoint = table.savepoint(A)
    request(A, OTHER, "X")
    repeat(lambda: table.release_since(A, savepoint))
    repeat(lambda: table.cancel(D))
    repeat(lambda: table.release_all(B))
    repeat(lambda: table.release_all(C))
    for owner in OWNERS:
        repeat(lambda owner=owner: table.release_all(owner))  # type: ignore[misc]
    assert is_sound(table)
    assert is_empty(table)
    assert all(token.state != "waiting" for token in tokens)


def test_an_interrupt_at_any_line_leaves_no_ghost_and_forgets_nobody() -> None:
    """It may strike in the middle of a change. What the manager does then is enough: a request is withdrawn,
    a release is done again."""
    traced = {
        value.__code__
        for cls in (LockTable, locks.Lock, locks.Owned, Waiting)
        for value in vars(cls).values()
        if hasattr(value, "__code__")
    }
    before = sys.gettrace()

    def run(strike_at: int) -> bool:
        lines = 0
        table = LockTable()

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal lines
            if frame.f_code not in traced:
                return None
            if event == "line":
                lines += 1
                if lines == strike_at:
                    raise KeyboardInterrupt
            return trace

        def call(step: Callable[[], object], after_interrupt: Callable[[], object]) -> None:
            sys.settrace(trace)
            try:
                step()
            except KeyboardInterrupt:
                sys.settrace(before)
                after_interrupt()
                assert is_sound(table)
            finally:
                sys.settrace(before)

        scenario(table, call)
        return lines >= strike_at

    strikes = next(at for at in itertools.count(1) if not run(at))
    assert strikes > 300


def test_a_thread_that_is_interrupted_while_it_waits_leaves_no_request_behind() -> None:
    """A ghost in the queue would keep all behind it waiting for ever."""
    manager = LockManager(RealClock())
    manager.acquire(A, KEY, "S")
    main = threading.get_ident()

    def interrupt() -> None:
        until(lambda: manager.table.waits == 1)
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    # A shell starts what runs in the background so that it ignores this signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            manager.acquire(B, KEY, "X")
        helper.join()
    finally:
        signal.signal(signal.SIGINT, before)
    manager.acquire(C, KEY, "S", timeout_s=0)
    assert manager.table.holds(B, BUCKET) is None
    assert list(manager.check()) == []


# ------------------------------------------------------------------ threads


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Asking:
    """A thread that asks for one lock, and how that ended."""

    def __init__(self, manager: LockManager, owner: Owner, resource: Resource, mode: Mode) -> None:
        self.error: BaseException | None = None
        waits = manager.table.waits

        def ask() -> None:
            try:
                manager.acquire(owner, resource, mode)
            except RetryError as error:
                self.error = error
            except Closed as error:
                self.error = error

        self.thread = threading.Thread(target=ask, daemon=True)
        self.thread.start()
        until(lambda: manager.table.waits > waits or not self.thread.is_alive())

    def join(self) -> BaseException | None:
        self.thread.join(120)
        assert not self.thread.is_alive()
        return self.error


def test_a_thread_sleeps_until_the_lock_is_free() -> None:
    """The blocking side of the same table."""
    manager = LockManager(RealClock())
    manager.acquire(A, KEY, "X")
    asking = Asking(manager, B, KEY, "X")
    assert asking.thread.is_alive()
    savepoint = manager.savepoint(A)
    manager.release_since(A, savepoint)
    assert asking.thread.is_alive()
    manager.release_all(A)
    assert asking.join() is None
    assert manager.table.holds(B, KEY) == "X"


def test_the_victim_hears_of_it_whoever_closes_the_circle() -> None:
    """The thread of the youngest may have slept long before."""
    manager = LockManager(RealClock())
    manager.acquire(A, KEY, "X")
    manager.acquire(B, OTHER, "X")
    young = Asking(manager, B, KEY, "X")
    old = Asking(manager, A, OTHER, "X")
    assert isinstance(young.join(), Deadlock)
    with pytest.raises(Deadlock):
        manager.acquire(B, OTHER, "S")
    manager.release_all(B)
    assert old.join() is None


def test_a_thread_whose_owner_gave_all_back_is_told() -> None:
    """A session that expires is rolled back by another thread."""
    manager = LockManager(RealClock())
    manager.acquire(A, KEY, "X")
    asking = Asking(manager, B, KEY, "X")
    manager.release_all(B)
    assert isinstance(asking.join(), Closed)


def test_a_deadline_is_by_the_clock_that_was_given() -> None:
    """A test of an hour takes no hour."""

    class Clock(RealClock):
        def __init__(self) -> None:
            self.times: Iterator[float] = iter((100.0, 3700.5))

        def monotonic(self) -> float:
            return next(self.times)

    manager = LockManager(Clock())
    manager.acquire(A, KEY, "X")
    with pytest.raises(LockTimeout, match=r"key 'k' of bucket 'b' was not free within 3600 s"):
        manager.acquire(B, KEY, "X", timeout_s=3600)
    with pytest.raises(LockTimeout):
        manager.acquire(B, KEY, "X", timeout_s=0)
    manager.release_all(A)
    assert is_empty(manager.table)
    assert manager.table.timeouts == 2
    assert not manager._turns


def test_a_short_wait_ends_in_time() -> None:
    """With the real clock, and nobody to wake it."""
    manager = LockManager(RealClock())
    manager.acquire(A, KEY, "X")
    with pytest.raises(LockTimeout):
        manager.acquire(B, KEY, "X", timeout_s=0.02)
    manager.acquire(A, OTHER, "X", timeout_s=float("inf"))
    assert list(manager.check()) == []


@pytest.mark.slow
def test_sixteen_threads_lose_no_update_and_never_hang() -> None:
    """Transfers between accounts under every mix of upgrades, deadlocks, time-outs, tries and savepoints."""
    manager = LockManager(RealClock())
    accounts = dict.fromkeys(range(8), 100)
    started = itertools.count()
    done = [0] * 16
    failures: list[BaseException] = []
    end = time.monotonic() + 2

    def enough() -> bool:
        """On a machine with few cores some threads wait for long before they get through once."""
        return bool(failures) or (min(done) > 0 and manager.table.deadlocks > 0 and manager.table.waits > 0)

    def transfer(random: Random, owner: Owner) -> None:
        one, other = random.sample(range(8), 2)
        kind = random.random()
        if kind < 0.1:
            manager.acquire(owner, BUCKET, "S", timeout_s=random.choice((None, 0, 0.01)))
            assert sum(accounts.values()) == 800
            if kind < 0.05:
                return
        timeout_s = random.choice((None, None, 1.0, 0.001, 0))
        if kind < 0.4:
            manager.acquire(owner, ("b", str(one)), "S", timeout_s=timeout_s)
        savepoint = manager.savepoint(owner)
        if kind > 0.9:
            manager.acquire(owner, ("b", str(other)), "S", timeout_s=timeout_s)
            manager.release_since(owner, savepoint)
        manager.acquire(owner, ("b", str(one)), "X", timeout_s=timeout_s)
        manager.acquire(owner, ("b", str(other)), "X", timeout_s=timeout_s)
        mine, theirs = accounts[one], accounts[other]
        if random.random() < 0.3:
            time.sleep(0)
        accounts[one], accounts[other] = mine - 1, theirs + 1

    def work(number: int) -> None:
        random = Random(number)
        try:
            while time.monotonic() < end or not enough():
                owner = Owner(str(number), next(started))
                try:
                    transfer(random, owner)
                    done[number] += 1
                except (Deadlock, LockTimeout):
                    pass
                finally:
                    manager.release_all(owner)
        except BaseException as error:
            failures.append(error)
            raise

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(16)]
        for thread in threads:
            thread.start()
        while time.monotonic() < end or not enough():
            time.sleep(0.1)
            assert list(manager.check()) == []
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert sum(accounts.values()) == 800
    assert is_empty(manager.table)
    assert not manager._turns
    print(sum(done), "transactions,", vars(manager.table))
