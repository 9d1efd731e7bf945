"""Who may touch which key while a transaction is open: shared and exclusive locks, waiting, deadlocks.

Always true:
  - no two owners hold modes on one resource that are not compatible;
  - whoever holds a lock on a key holds an intention, or more, on its bucket;
  - a request that could be granted does not wait. It could be when its mode is compatible with what all
    others hold and with what all before it in the queue wait for; upgrades stand before all new requests;
  - nobody waits in a circle. Such a circle closes at the moment somebody starts to wait, goes through that
    request, and is cut by taking the youngest owner in it out of its queue: the victim;
  - a resource that nobody holds and nobody waits for leaves no trace, and neither does an owner.

This only makes refusals rare: apply decides what is correct, and never waits. `LockTable` is the whole of
it, without clock, thread or randomness: the same calls in the same order give the same answers.
`LockManager` lets threads wait for them. Locks are held until their owner gives all of them back, or those
since a savepoint (two-phase locking, and a strict one).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Literal, ParamSpec, Protocol

from lowwater.engine.log.check import Finding
from lowwater.engine.seams.interrupts import busy
from lowwater.engine.seams.seams import Clock
from lowwater.errors import Closed, Deadlock, InternalError, LockTimeout

P = ParamSpec("P")

Mode = Literal["IS", "IX", "S", "SIX", "X"]
State = Literal["waiting", "granted", "victim", "timed_out", "cancelled"]
# A bucket and a key, or a bucket and None for the bucket itself.
Resource = tuple[str, str | None]

# Weakest first. A bucket takes each of them, a key only S and X.
MODES: tuple[Mode, ...] = ("IS", "IX", "S", "SIX", "X")
COMPATIBLE: dict[Mode, frozenset[Mode]] = {
    "IS": frozenset(("IS", "IX", "S", "SIX")),
    "IX": frozenset(("IS", "IX")),
    "S": frozenset(("IS", "S")),
    "SIX": frozenset(("IS",)),
    "X": frozenset(),
}
# The weakest mode that is as strong as both: what is held after an upgrade.
JOINED: dict[Mode, dict[Mode, Mode]] = {
    one: {
        other: next(mode for mode in MODES if COMPATIBLE[mode] <= COMPATIBLE[one] & COMPATIBLE[other])
        for other in MODES
    }
    for one in MODES
}
# What a lock on a key needs on its bucket, and which locks on keys a bucket's lock makes needless.
INTENTION: dict[Mode, Mode] = {"S": "IS", "X": "IX"}
COVERED_KEYS: dict[Mode | None, tuple[Mode, ...]] = {"S": ("S",), "SIX": ("S",), "X": ("S", "X")}


class Owner(Hashable, Protocol):
    """Whoever holds locks: a transaction, as a rule. It waits for one request at a time."""

    @property
    def started(self) -> int:
        """Rises from one owner to the next: of two, the one with the greater number is younger."""
        ...


class Waiting:
    """A request that was not granted at once. `state` tells what has become of it."""

    __slots__ = ("at", "mode", "others", "owned", "owner", "resource", "savepoint", "serial", "state",
                 "target", "upgrade")  # fmt: skip

    def __init__(self, owned: Owned, resource: Resource, mode: Mode, savepoint: int = 0) -> None:
        self.owner = owned.owner
        self.resource = resource
        self.mode: Mode = mode
        self.state: State = "waiting"
        # Other requests that were settled when this one came, by a deadlock that it closed.
        self.others: list[Waiting] = []
        self.owned = owned
        # What its owner held before; what the request took on its way goes back when it fails.
        self.savepoint = savepoint
        # The queue it stands in, that of the bucket before that of the key, and the mode it will hold.
        self.at = resource
        self.target: Mode = mode
        self.upgrade = False
        self.serial = 0


class Owned:
    """An owner, and what it holds. This is what counts: the holders of a resource only repeat it."""

    __slots__ = ("held", "owner", "serial", "undo", "victim", "waiting")

    def __init__(self, owner: Owner, serial: int) -> None:
        self.owner = owner
        self.serial = serial
        self.held: dict[Resource, Mode] = {}
        # Each grant with the mode that was held before it. A savepoint is a length of this list.
        self.undo: list[tuple[Resource, Mode | None]] = []
        self.waiting: Waiting | None = None
        # It gets no more locks before it has given all back: it has been told to start again.
        self.victim = False


class Lock:
    """A resource that somebody holds or waits for."""

    __slots__ = ("holders", "queue")

    def __init__(self) -> None:
        # By mode, so that a bucket with a thousand writers is as quickly asked as one with two.
        self.holders: dict[Mode, dict[Owned, None]] = {}
        # Upgrades, then new requests, each in the order of their coming.
        self.queue: list[Waiting] = []

    def admits(self, owned: Owned, target: Mode) -> bool:
        """Whether the mode is compatible with what all others hold."""
        compatible = COMPATIBLE[target]
        for mode, holders in self.holders.items():
            if mode not in compatible and (len(holders) > 1 or owned not in holders):
                return False
        return True

    def first_ready(self) -> Waiting | None:
        """The first in the queue that may have what it waits for."""
        before: set[Mode] = set()
        for waiting in self.queue:
            if before <= COMPATIBLE[waiting.target] and self.admits(waiting.owned, waiting.target):
                return waiting
            if waiting.target == "X":
                return None
            before.add(waiting.target)
        return None

    def blockers(self, waiting: Waiting) -> Iterator[Owned]:
        """Yield the owners for whom a request in this queue waits."""
        compatible = COMPATIBLE[waiting.target]
        for mode, holders in self.holders.items():
            if mode not in compatible:
                for holder in holders:
                    if holder is not waiting.owned:
                        yield holder
        for earlier in self.queue:
            if earlier is waiting:
                return
            if earlier.target not in compatible:
                yield earlier.owned


class LockTable:
    """The locks as a state machine. Each call returns at once, and whoever calls it tells those who wait:
    `cancel`, `release_since` and `release_all` return the requests that they settled, and a `Waiting` that
    `request` returns has them in `others`. One caller at a time.

    A call that an interrupt cut short is put right by the next one. What it had settled is then in no
    list: the requests' `state` tells."""

    def __init__(self) -> None:
        self._owners: dict[Owner, Owned] = {}
        self._locks: dict[Resource, Lock] = {}
        self._serial = 0
        # A call that finds this true comes after one that was interrupted.
        self._changing = False
        # Locks held now; and requests that had to wait, owners chosen as victims, requests out of time.
        self.held = 0
        self.waits = 0
        self.deadlocks = 0
        self.timeouts = 0

    def request(self, owner: Owner, resource: Resource, mode: Mode, *, wait: bool = True) -> Waiting | None:
        """None: it is granted. Otherwise a `Waiting`, which may be settled by now; with `wait` false, or an
        owner that is a victim, it always is. A lock on a key takes the intention on its bucket first."""
        self._begin()
        owned = self._owners.get(owner)
        if owned is None:
            self._serial += 1
            owned = self._owners[owner] = Owned(owner, self._serial)
        assert owned.waiting is None, "an owner waits for one request at a time"
        waiting: Waiting | None = None
        if owned.victim:
            waiting = Waiting(owned, resource, mode)
            waiting.state = "victim"
        else:
            savepoint = len(owned.undo)
            above = (resource[0], None)
            if resource[1] is None:
                at, needed = resource, mode
            elif mode in COVERED_KEYS.get(owned.held.get(above), ()):
                self._changing = False
                return None
            else:
                at, needed = above, INTENTION[mode]
            granted = self._take(owned, at, needed)
            if granted and at is not resource:
                at, needed = resource, mode
                granted = self._take(owned, at, needed)
            if not granted:
                waiting = Waiting(owned, resource, mode, savepoint)
                self._start_waiting(waiting, at, needed, wait)
        self._changing = False
        return waiting

    def cancel(self, owner: Owner, *, timed_out: bool = False) -> list[Waiting]:
        """Withdraw the request for which the owner waits, if it does."""
        self._begin()
        settled: list[Waiting] = []
        owned = self._owners.get(owner)
        if owned is not None and owned.waiting is not None:
            if timed_out:
                self.timeouts += 1
            changed: dict[Resource, None] = {}
            self._withdraw(owned.waiting, "timed_out" if timed_out else "cancelled", changed, settled)
            self._run(changed, settled)
            self._forget_if_idle(owned)
        self._changing = False
        return settled

    def savepoint(self, owner: Owner) -> int:
        """What `release_since` takes, to come back to what the owner holds now."""
        owned = self._owners.get(owner)
        return len(owned.undo) if owned is not None else 0

    def release_since(self, owner: Owner, savepoint: int) -> list[Waiting]:
        """Give back the locks taken since the savepoint; upgrades fall back to what was held then."""
        self._begin()
        settled: list[Waiting] = []
        owned = self._owners.get(owner)
        if owned is not None:
            changed: dict[Resource, None] = {}
            if owned.waiting is not None:
                self._withdraw(owned.waiting, "cancelled", changed, settled)
            self._undo(owned, savepoint, changed)
            self._run(changed, settled)
            self._forget_if_idle(owned)
        self._changing = False
        return settled

    def release_all(self, owner: Owner) -> list[Waiting]:
        """Give back every lock. A request for which the owner still waits is cancelled."""
        self._begin()
        settled: list[Waiting] = []
        owned = self._owners.get(owner)
        if owned is not None:
            changed: dict[Resource, None] = {}
            if owned.waiting is not None:
                self._withdraw(owned.waiting, "cancelled", changed, settled)
            for resource, mode in owned.held.items():
                self._drop(owned, resource, mode, changed)
            self.held -= len(owned.held)
            del self._owners[owner]
            if changed:
                self._run(changed, settled)
        self._changing = False
        return settled

    def holds(self, owner: Owner, resource: Resource) -> Mode | None:
        """The mode that the owner holds on exactly this resource."""
        owned = self._owners.get(owner)
        return owned.held.get(resource) if owned is not None else None

    # -------------------------------------------------------------- steps of a call

    def _begin(self) -> None:
        if self._changing:
            self._mend()
        self._changing = True

    def _start_waiting(self, waiting: Waiting, at: Resource, needed: Mode, wait: bool) -> None:
        changed: dict[Resource, None] = {}
        settled: list[Waiting] = []
        if wait:
            self.waits += 1
            self._enqueue(waiting, at, needed, changed, settled)
        else:
            self.timeouts += 1
            waiting.state = "timed_out"
            self._undo(waiting.owned, waiting.savepoint, changed)
        self._run(changed, settled)
        self._forget_if_idle(waiting.owned)
        waiting.others = [other for other in settled if other is not waiting]

    def _take(self, owned: Owned, resource: Resource, mode: Mode) -> bool:
        """Grant it, if it need not wait."""
        had = owned.held.get(resource)
        if had is not None:
            mode = JOINED[had][mode]
            if mode == had:
                return True
        lock = self._locks.get(resource)
        if lock is None:
            lock = self._locks[resource] = Lock()
        else:
            if not lock.admits(owned, mode):
                return False
            compatible = COMPATIBLE[mode]
            for earlier in lock.queue:
                if had is not None and not earlier.upgrade:
                    break
                if earlier.target not in compatible:
                    return False
        self._grant(owned, lock, resource, had, mode)
        return True

    def _grant(self, owned: Owned, lock: Lock, resource: Resource, had: Mode | None, mode: Mode) -> None:
        # In this order, an interrupt leaves at most a step to undo that undoes nothing.
        owned.undo.append((resource, had))
        owned.held[resource] = mode
        if had is None:
            self.held += 1
        else:
            others = lock.holders[had]
            del others[owned]
            if not others:
                del lock.holders[had]
        holders = lock.holders.get(mode)
        if holders is None:
            lock.holders[mode] = {owned: None}
        else:
            holders[owned] = None

    def _drop(self, owned: Owned, resource: Resource, mode: Mode, changed: dict[Resource, None]) -> None:
        """Take an owner from the holders of a resource."""
        lock = self._locks[resource]
        holders = lock.holders[mode]
        if len(holders) > 1:
            del holders[owned]
        else:
            assert owned in holders, "a lock is given back by its holder"
            del lock.holders[mode]
        if lock.queue:
            changed[resource] = None
        elif not lock.holders:
            del self._locks[resource]

    def _undo(self, owned: Owned, savepoint: int, changed: dict[Resource, None]) -> None:
        undo = owned.undo
        while len(undo) > savepoint:
            resource, before = undo[-1]
            now = owned.held.get(resource)
            if now is not None and now != before:
                self._drop(owned, resource, now, changed)
                if before is None:
                    del owned.held[resource]
                    self.held -= 1
                else:
                    owned.held[resource] = before
                    lock = self._locks.setdefault(resource, Lock())
                    lock.holders.setdefault(before, {})[owned] = None
            undo.pop()

    def _enqueue(
        self,
        waiting: Waiting,
        at: Resource,
        mode: Mode,
        changed: dict[Resource, None],
        settled: list[Waiting],
    ) -> None:
        """Start to wait at a resource, and cut each circle that this closes."""
        owned = waiting.owned
        had = owned.held.get(at)
        target = mode if had is None else JOINED[had][mode]
        self._serial += 1
        # In one statement: an interrupt between them would leave the bucket's mode to be held on the key.
        waiting.at, waiting.target, waiting.upgrade, waiting.serial = (
            at,
            target,
            had is not None,
            self._serial,
        )
        owned.waiting = waiting
        self._stand_in_queue(waiting)
        self._cut_circles(waiting, changed, settled)

    def _stand_in_queue(self, waiting: Waiting) -> None:
        queue = self._locks[waiting.at].queue
        index = len(queue)
        if waiting.upgrade:
            index = next((place for place, other in enumerate(queue) if not other.upgrade), index)
        queue.insert(index, waiting)

    def _withdraw(
        self, waiting: Waiting, state: State, changed: dict[Resource, None], settled: list[Waiting]
    ) -> None:
        """Take a request out of its queue, and give back what it has taken on its way."""
        owned = waiting.owned
        waiting.state = state
        if state == "victim":
            owned.victim = True
        settled.append(waiting)
        owned.waiting = None
        lock = self._locks[waiting.at]
        lock.queue.remove(waiting)
        if lock.queue:
            changed[waiting.at] = None
        elif not lock.holders:
            del self._locks[waiting.at]
        self._undo(owned, waiting.savepoint, changed)

    def _run(self, changed: dict[Resource, None], settled: list[Waiting]) -> None:
        """Grant all that can be granted now that these resources have changed."""
        while changed:
            at = next(iter(changed))
            lock = self._locks.get(at)
            waiting = lock.first_ready() if lock is not None else None
            if lock is None or waiting is None:
                del changed[at]
                continue
            owned = waiting.owned
            lock.queue.remove(waiting)
            self._grant(owned, lock, at, owned.held.get(at), waiting.target)
            if at == waiting.resource or self._take(owned, waiting.resource, waiting.mode):
                waiting.state = "granted"
                settled.append(waiting)
                owned.waiting = None
            else:
                # It has the bucket, and waits again for the key.
                self._enqueue(waiting, waiting.resource, waiting.mode, changed, settled)

    def _forget_if_idle(self, owned: Owned) -> None:
        if not owned.held and owned.waiting is None and not owned.victim:
            self._owners.pop(owned.owner, None)

    # -------------------------------------------------------------- deadlocks

    def _cut_circles(self, waiting: Waiting, changed: dict[Resource, None], settled: list[Waiting]) -> None:
        while circle := self._circle(waiting):
            victim = max(circle, key=lambda each: (each.owner.started, each.owned.serial))
            self.deadlocks += 1
            self._withdraw(victim, "victim", changed, settled)
            if victim is waiting:
                return

    def _circle(self, start: Waiting) -> list[Waiting]:
        """A shortest circle of requests that wait for one another, through this one; empty without one.
        The shortest, since whoever merely stands in a queue between two that block each other is no cause."""
        locks = self._locks
        # Most who wait hold nothing that others wait for, and are seen here to close no circle.
        if not any(locks[resource].queue for resource in start.owned.held):
            return []
        came_from: dict[Waiting, Waiting] = {}
        reached = [start]
        for waiting in reached:
            for blocker in locks[waiting.at].blockers(waiting):
                further = blocker.waiting
                if further is start:
                    circle = [waiting]
                    while circle[-1] is not start:
                        circle.append(came_from[circle[-1]])
                    return circle
                if further is not None and further not in came_from:
                    came_from[further] = waiting
                    reached.append(further)
        return []

    # -------------------------------------------------------------- after an interrupt, and checking

    def _mend(self) -> None:
        """Make everything anew from what the owners hold and wait for, and go on from there. Cut short by
        another interrupt, it is done again."""
        self._locks = {}
        queued: list[Waiting] = []
        for owned in list(self._owners.values()):
            for resource, mode in owned.held.items():
                self._locks.setdefault(resource, Lock()).holders.setdefault(mode, {})[owned] = None
            waiting = owned.waiting
            if waiting is not None and waiting.state == "waiting":
                queued.append(waiting)
            elif waiting is not None:
                owned.victim = owned.victim or waiting.state == "victim"
                owned.waiting = None
            self._forget_if_idle(owned)
        self.held = sum(len(owned.held) for owned in self._owners.values())
        queued.sort(key=lambda waiting: waiting.serial)
        for waiting in queued:
            # It may hold already what it stands here for, if it was on its way: it is granted again.
            self._locks.setdefault(waiting.at, Lock())
            self._stand_in_queue(waiting)
        changed = {waiting.at: None for waiting in queued}
        settled: list[Waiting] = []
        for waiting in queued:
            if waiting.state == "waiting":
                self._cut_circles(waiting, changed, settled)
        self._run(changed, settled)

    def check(self) -> Iterator[Finding]:
        """Every finding about what should always be true. It changes nothing but what an interrupt left."""
        self._begin()
        self._changing = False
        for resource, lock in self._locks.items():
            for what in self._faults(resource, lock):
                yield Finding("error", what, f"lock on {name_of(resource)}", hint=InternalError.default_hint)
        for owned in self._owners.values():
            for what in self._owner_faults(owned):
                yield Finding("error", what, f"locks of {owned.owner!r}", hint=InternalError.default_hint)
        if self.held != sum(len(owned.held) for owned in self._owners.values()):
            what = "the number of locks that are held is not what is counted"
            yield Finding("error", what, "locks", hint=InternalError.default_hint)

    def _faults(self, resource: Resource, lock: Lock) -> Iterator[str]:
        if not lock.holders and not lock.queue:
            yield "nobody holds it and nobody waits for it, and it is kept"
        for mode, holders in lock.holders.items():
            if not holders:
                yield f"it has a place for holders of {mode}, and no holder"
            if not all(lock.admits(owned, mode) for owned in holders):
                yield f"others hold what is not compatible with {mode}"
            if any(owned.held.get(resource) != mode for owned in holders):
                yield f"a holder of {mode} does not know of it"
        if lock.queue != sorted(lock.queue, key=lambda each: (not each.upgrade, each.serial)):
            yield "its queue is out of order"
        if lock.first_ready() is not None:
            yield "a request waits that could be granted"
        for waiting in lock.queue:
            if waiting.state != "waiting" or waiting.at != resource or waiting.owned.waiting is not waiting:
                yield "a request in its queue does not wait there"

    def _owner_faults(self, owned: Owned) -> Iterator[str]:
        for resource, mode in owned.held.items():
            lock = self._locks.get(resource)
            if lock is None or owned not in lock.holders.get(mode, ()):
                yield f"it holds {mode} on {name_of(resource)}, which does not know of it"
            above = owned.held.get((resource[0], None))
            intention = INTENTION.get(mode)
            if resource[1] is not None and (
                intention is None or above is None or JOINED[above][intention] != above
            ):
                yield f"it holds {mode} on {name_of(resource)} without the intention on the bucket"
        waiting = owned.waiting
        if waiting is not None:
            at = self._locks.get(waiting.at)
            if at is None or waiting not in at.queue:
                yield "it waits in no queue"
            elif self._circle(waiting):
                yield "it waits in a circle"
        elif not owned.held and not owned.victim:
            yield "it holds nothing, waits for nothing, and is kept"


def name_of(resource: Resource) -> str:
    bucket, key = resource
    return f"bucket {bucket!r}" if key is None else f"key {key!r} of bucket {bucket!r}"


class LockManager:
    """Lets threads wait for the locks of a `LockTable`, whose counters may be read at any time."""

    def __init__(self, clock: Clock) -> None:
        self.table = LockTable()
        self._clock = clock
        self._mutex = threading.RLock()
        # What the thread of each request sleeps on, until whoever settles the request releases it.
        self._turns: dict[Waiting, threading.Lock] = {}

    def acquire(
        self, owner: Owner, resource: Resource, mode: Mode, *, timeout_s: float | None = None
    ) -> None:
        """Return with the lock held. `timeout_s` 0 does not wait. Raises LockTimeout, and the owner holds
        what it held before; Deadlock, and it must give back all; Closed, when another thread has given
        back its locks while it waited. Busy to a signal handler that has interrupted another call here."""
        if self._mutex._is_owned():  # type: ignore[attr-defined]
            raise busy("locks")
        try:
            with self._mutex:
                wait = timeout_s is None or timeout_s > 0
                waiting = self.table.request(owner, resource, mode, wait=wait)
                if waiting is None:
                    return
                turn = self._turns[waiting] = threading.Lock()
                turn.acquire()
                self._wake((waiting, *waiting.others))
            if waiting.state == "waiting":
                self._sleep(waiting, turn, timeout_s)
        except BaseException:
            # An interrupt, wherever it struck: no request may stay that nobody waits for.
            self._settle(self.table.cancel, owner)
            raise
        if waiting.state == "victim":
            raise Deadlock(f"chosen to end a deadlock, on the way to {name_of(resource)}")
        if waiting.state == "timed_out":
            raise LockTimeout(f"{name_of(resource)} was not free within {timeout_s} s")
        if waiting.state == "cancelled":
            raise Closed(f"the locks were given back while their owner waited for {name_of(resource)}")

    def savepoint(self, owner: Owner) -> int:
        """What `release_since` takes, to come back to what the owner holds now."""
        with self._mutex:
            return self.table.savepoint(owner)

    def release_since(self, owner: Owner, savepoint: int) -> None:
        """Give back the locks taken since the savepoint; upgrades fall back to what was held then."""
        self._settle(self.table.release_since, owner, savepoint)

    def release_all(self, owner: Owner) -> None:
        """Give back every lock of the owner."""
        self._settle(self.table.release_all, owner)

    def check(self) -> Iterator[Finding]:
        """Every finding about what should always be true."""
        with self._mutex:
            findings = list(self.table.check())
        yield from findings

    def _sleep(self, waiting: Waiting, turn: threading.Lock, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else self._clock.monotonic() + timeout_s
        while waiting.state == "waiting":
            if deadline is None:
                turn.acquire()
                continue
            left_s = deadline - self._clock.monotonic()
            if left_s > 0:
                turn.acquire(timeout=min(left_s, threading.TIMEOUT_MAX))
                continue
            with self._mutex:
                if waiting.state == "waiting":
                    self._wake(self.table.cancel(waiting.owner, timed_out=True))

    def _settle(self, call: Callable[P, list[Waiting]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call the table and wake those whose requests it settled. An interrupt may come, but not before
        this was done, nor with threads left asleep by it: nobody else would wake them."""
        try:
            with self._mutex:
                self._wake(call(*args, **kwargs))
        except BaseException:
            with self._mutex:
                call(*args, **kwargs)
                self._wake(list(self._turns))
            raise

    def _wake(self, requests: Iterable[Waiting]) -> None:
        """Wake the threads of those that are settled. Harmless when it is done again."""
        for waiting in requests:
            turn = self._turns.get(waiting)
            if turn is not None and waiting.state != "waiting":
                if turn.locked():
                    turn.release()
                del self._turns[waiting]
