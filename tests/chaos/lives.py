"""An archive and all who work with it, in one thread and from one seed: an engine that writes, ships, purges,
crashes, loses its directory and is restored; the old process, which may live on and write; clones of any
moment; and a store that fails.

Always true:
  - a `World` has one store, one clock, and any number of directories. Each has a driver, which knows what
    every call must return, and what was promised of it: what counts as shipped;
  - whatever is restored is what one of the directories had, up to a seq, and all that was promised by any of
    them lies below it;
  - who is told that it was outrun was outrun: an engine that is alone never is;
  - the same seed gives the same trace, in every process.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from blake3 import blake3
from tests.engine.engine_model import BUCKETS, DIRECTORY, EPOCH, check_structure, small_limits
from tests.tiering.shipping import archived
from tests.tiering.tiered_model import (
    SPOILT,
    SmallMachine,
    TieredChance,
    TieredDriver,
    log_options_for,
    machine_for,
)

from lowwater.chaos.clock import VirtualClock
from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.failing_store import FaultyStore, StoreFault, StoreOperation, random_faults
from lowwater.chaos.survival import SURVIVALS
from lowwater.engine.database.database import Database
from lowwater.engine.database.origin import ORIGIN, read_origin
from lowwater.errors import Fenced, LowwaterError, OtherCluster, RetryError
from lowwater.recovery.point import reach
from lowwater.recovery.restore import Restored, restore_with
from lowwater.recovery.restored_opening import open_log, open_restored
from lowwater.tiering.archive import open_archive
from lowwater.tiering.memory_store import MemoryStore
from lowwater.tiering.names import MANIFESTS, parse
from lowwater.tiering.objects import decode_manifest
from lowwater.tiering.tiered_opening import open_tiered

ACTIONS = 100


@dataclass
class Directory(SmallMachine):
    """A directory that may have been restored."""

    def open(self) -> Database:
        origin = read_origin(self.files, DIRECTORY)
        if origin is None:
            return super().open()
        self.pages.reopen()
        self.connect()
        self.db = None
        self.db = open_restored(
            DIRECTORY,
            origin,
            [*self.clients],
            self.options,
            log_options=self.log_options,
            options=self.engine_options(),
            seams=self.seams(),
            store=self.pages,
        )
        db: Database = self.db
        return db


class Life(TieredDriver):
    """The driver of one directory, from when it was made to when nobody uses it any more."""

    def __init__(self, world: World, machine: Directory) -> None:
        super().__init__(machine)
        self.world = world
        self.is_clone = False
        # Whether somebody else could have gone on with the archive while this one was alive.
        self.has_rival = False
        self.recorded = 0
        self.fenced = False

    @contextmanager
    def calm(self) -> Iterator[None]:
        server, files = self.server, self.machine.files
        numbers = server._crash_number, files._crash_number
        server._crash_number = files._crash_number = None
        try:
            with super().calm():
                yield
        finally:
            server._crash_number, files._crash_number = numbers

    def look(self) -> None:
        """And of each mark that counts: there is a manifest that has it."""
        if self.is_clone:
            marks = self.db.marks()
            assert list(marks) == sorted(marks, reverse=True)
            return
        before = self.counted
        super().look()
        if self.counted > before:
            assert self.counted <= self.world.hwm_in_store(), "a mark counts, and no manifest says so"
        if not self.has_rival and self.world.epoch_in_store() == self.db.epoch:
            # A restore follows the chain, though no manifest counts yet that says so.
            self.recorded = max(self.recorded, self.db.marks().hwm)
        self.world.owners.setdefault(self.db.epoch, self)

    def recover(self, *arguments: Any, **named: Any) -> None:
        try:
            super().recover(*arguments, **named)
        except LowwaterError as error:
            # Pages that opening needs may be in the store.
            self.world.require_excused(self, error)
            self.seen["could not be opened"] += 1
            with self.calm():
                super().recover(*arguments, **named)

    def refused_by_the_store(self, error: LowwaterError, applied: int) -> None:
        self.world.require_excused(self, error)
        if self.db is not None and isinstance(self.db.failure, Fenced):
            self.world.require_excused(self, self.db.failure)
            self.fenced = True
            self.pending = []
            with self.calm():
                self.absorb()
            return
        for number in reversed(range(len(self.scans))):
            self.abandon_scan(number)  # a scan that met it has ended
        super().refused_by_the_store(error, applied)

    def compare_contents(self) -> None:
        """What can be read, also of one that may not write any more."""
        with self.calm():
            for bucket in self.model.bucket_names():
                assert list(self.db.scan(bucket)) == self.model.live(bucket)
            self.root()


class Calls(TieredChance):
    WEIGHTS: ClassVar[dict[str, float]] = TieredChance.WEIGHTS | {
        "crash": 0, "reopen": 0, "crash_soon": 0,
        "compare": 0.3, "store_down_for_a_while": 0, "root": 0.3,
    }  # fmt: skip
    # What either happens or does not, whatever the store does.
    IN_TROUBLE: ClassVar[tuple[str, ...]] = (
        *(name for name in TieredChance.IN_OUTAGE if name not in ("reopen", "crash", "crash_soon")),
        *("ship", "ship", "purge", "read_log", "time", "time", "idle", "idle", "pages_leave", "checkpoint"),
        *("open_scan", "advance_scan", "pages_come"),
    )


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(f"world {seed}")
        self.clock = VirtualClock()
        self.server = FaultyStore(clock=self.clock, page_size=self.rng.choice((3, 1000)))
        self.seen: Counter[str] = Counter()
        self.weather = "calm"
        self.lives: list[Life] = []
        self.owners: dict[int, Life] = {}
        self.zombies: list[Life] = []
        self.trace = blake3()
        self.log_options = log_options_for(seed)
        self._manifests: dict[str, int] = {}
        self.line = Life(self, self.directory())
        self.lives.append(self.line)
        self.line.open()
        self.calls = Calls(self.line, self.rng)
        for bucket in BUCKETS[:2]:
            self.line.create_bucket(bucket)

    def directory(self) -> Directory:
        number = self.seed * 1000 + len(self.lives) + self.seen["directories"]
        self.seen["directories"] += 1
        small = machine_for(number, self.server)
        machine = Directory(
            seed=number,
            servers=[self.server],
            options=small.options,
            pool_bytes_max=small.pool_bytes_max,
            checkpoint_interval_s=small.checkpoint_interval_s,
            page_keys=4,
            compression="zstd" if self.seed % 3 else "none",
            clock=self.clock,
        )
        machine.log_options = self.log_options
        return machine

    # ------------------------------------------------------------------ what the store has

    def hwm_in_store(self) -> int:
        """The highest mark of a manifest that is in the store."""
        data = self.server.objects.data
        for name in data.keys() - self._manifests.keys():
            found = parse(name)
            is_manifest = found is not None and found.type == "manifest"
            self._manifests[name] = decode_manifest(data[name]).hwm if is_manifest else 0
        return max((hwm for name, hwm in self._manifests.items() if name in data), default=0)

    def epoch_in_store(self) -> int:
        """That of the newest manifest."""
        names = (parse(name) for name in self.server.objects.data if name.startswith(MANIFESTS))
        return max((name.epoch for name in names if name is not None and name.type == "manifest"), default=0)

    def require_excused(self, life: Life, error: LowwaterError) -> None:
        """That something is to blame for this error."""
        if isinstance(error, Fenced):
            assert life.has_rival, f"nobody else was there: {error}"
            self.seen["fenced"] += 1
        elif self.weather == "calm" or not isinstance(
            error, SPOILT if self.weather == "lying" else RetryError
        ):
            raise error

    # ------------------------------------------------------------------ weather

    def change_weather(self) -> None:
        self.weather = self.rng.choice(("calm", "calm", "rough", "rough", "down", "lying"))
        self.server.down = self.weather == "down"
        self.server.fault = None
        if self.weather in ("rough", "lying"):
            schedule = random_faults(
                self.rng, chance=self.rng.choice((0.03, 0.15)), lies=self.weather == "lying"
            )
            self.server.fault = lambda operation: self._fault(schedule(operation), operation)

    def _fault(self, fault: StoreFault | None, operation: StoreOperation) -> StoreFault | None:
        if fault is None or (fault.stale and not fault.error):
            return None  # no store that the archive can live in has lists of long ago
        if fault.kept_bytes is not None:
            return StoreFault(lost=True)  # what is cut for good, a person has to repair
        self.seen[f"faults: {operation.kind}"] += 1
        if self.rng.random() < 0.2:
            self.clock.advance(self.rng.choice((0.1, 5.0)))
        return fault

    # ------------------------------------------------------------------ what happens

    WEIGHTS: ClassVar[dict[str, float]] = {
        "call": 60, "time": 8, "change_weather": 8, "crash": 5, "crash_soon": 4, "crash_at_the_store": 3,
        "reopen": 2, "lose": 4, "zombie": 12, "clone": 3, "empty": 0.5, "scrub": 1, "ship": 5,
    }  # fmt: skip

    def run(self, actions: int = ACTIONS) -> None:
        names, weights = list(self.WEIGHTS), list(self.WEIGHTS.values())
        for name in self.rng.choices(names, weights, k=actions):
            getattr(self, name)()
            self.seen["actions"] += 1
            if self.line.fenced:
                self.seen["lines that were outrun"] += 1
                self.restore()
            self.look()
        self.end()

    def look(self) -> None:
        """After every action: what is always true."""
        for life in (self.line, *self.zombies):
            life.look()
        with self.line.calm():
            findings = [each for each in self.line.db.check() if each.severity != "note"]
            assert findings == [], findings
            check_structure(self.line.db, self.line.machine.pages, self.line.seen)

    def attempt(self, life: Life, call: Callable[[], object]) -> None:
        """A call that a crash may end, or the store refuse, or a rival."""
        applied = life.model.applied
        try:
            life.guarded(call)
        except LowwaterError as error:
            life.refused_by_the_store(error, applied)

    def work(self, life: Life, calls: Calls, count: int) -> None:
        rng = self.rng
        for _ in range(count):
            if life.fenced:
                return
            if self.weather == "calm" and not life.has_rival:
                (name,) = rng.choices(calls.names, calls.weights)
            else:
                name = rng.choice(calls.IN_TROUBLE)
            self.seen["calls"] += 1
            self.attempt(life, getattr(calls, name))

    def call(self) -> None:
        self.work(self.line, self.calls, self.rng.choice((1, 3, 8)))

    def time(self) -> None:
        for _ in range(self.rng.choice((1, 5, 30))):
            self.attempt(self.line, lambda: self.line.machine.idle(1.0))

    def ship(self) -> None:
        self.attempt(self.line, self.line.ship)

    def crash(self) -> None:
        self.line.recover()

    def reopen(self) -> None:
        self.attempt(self.line, self.line.reopen)
        if self.line.db is None or self.line.db._closed:
            self.line.recover()

    def crash_soon(self) -> None:
        files = self.line.machine.files
        files.crash_at(files.operations + self.rng.randint(1, 30), after=self.rng.random() < 0.5)

    def crash_at_the_store(self) -> None:
        """Whoever makes the operation ends there."""
        number = self.server.operations + self.rng.randint(1, 12)
        self.server.crash_at(number, after=self.rng.random() < 0.5)

    # ------------------------------------------------------------------ restores

    def lose(self) -> None:
        """The directory is gone, or its process is only out of sight."""
        if self.rng.random() < 0.5 and not self.line.fenced:
            self.zombies.append(self.line)
            self.seen["zombies"] += 1
        self.restore()

    def restore(self) -> None:
        if not self.hwm_in_store():
            with self.line.calm():
                self.line.absorb()
                self.line.ship()
                self.line.absorb()
        for zombie in self.zombies:
            zombie.has_rival = True
        while True:
            life = self._restored_line()
            if life is not None:
                break
        self.line = life
        self.calls = Calls(life, self.rng)

    def _restored_line(self) -> Life | None:
        """A line that was restored, and goes on. None where somebody else has gone on meanwhile."""
        life = Life(self, self.directory())
        life.has_rival = bool(self.zombies)
        done = self._restore(life, None, full=self.rng.random() < 0.2)
        self.seen["restores"] += 1
        self._require_promises(life, done)
        life.model.pages_from = done.checkpoint_seq
        life.acked, life.lost_transactions, life.restored_seq = done.seq, True, done.seq
        if self.zombies and self.rng.random() < 0.5:
            self.zombie()
        self.lives.append(life)
        if not self._open(life):
            return None
        life.compare_contents()
        return life

    def _restore(self, life: Life, at: Any, **given: Any) -> Restored:
        """One that goes on after crashes, and after what the store does. Its model is made."""
        machine, rng = life.machine, self.rng
        assert isinstance(machine, Directory)
        attempts = 0
        done: Restored | None
        while True:
            attempts += 1
            self.seen["attempts to restore"] += 1
            machine.connect()
            if rng.random() < 0.3 and attempts < 5:
                machine.files.crash_at(
                    machine.files.operations + rng.randint(1, 60), after=rng.random() < 0.5
                )
            try:
                if attempts < 6:
                    done = self._restore_once(machine, at, **given)
                else:
                    with life.calm():
                        done = self._restore_once(machine, at, **given)
                break
            except SimulatedCrash:
                self.seen["restores that crashed"] += 1
                self._crash(machine)
                if self._has_ended(machine):
                    done = None
                    break
            except LowwaterError as error:
                if attempts > 5:
                    raise
                self.require_excused(life, error)
                self.seen["restores that failed"] += 1
                machine.pages.reopen()
        machine.files._crash_number = None
        if done is None:
            done = self._as_noted(machine)
        source = self.owners[done.epoch]
        assert done.seq <= source.model.applied, "it has more than was ever written"
        life.model = source.model.as_of(done.seq, done.time_us)
        return done

    def _has_ended(self, machine: Directory) -> bool:
        """Also where whoever began it did not live to be told."""
        try:
            return ORIGIN in machine.files.list(DIRECTORY)
        except FileNotFoundError:
            return False

    def _as_noted(self, machine: Directory) -> Restored:
        origin = read_origin(machine.files, DIRECTORY)
        assert origin is not None
        with open_log(DIRECTORY, machine.seams()) as log:
            time_us = next(log.read(origin.seq)).time_us
        fields = {name: getattr(origin, name) for name in ("uri", "cluster_id", "is_clone", "epoch", "seq")}
        return Restored(
            **fields,
            path=DIRECTORY,
            time_us=time_us,
            checkpoint_seq=origin.checkpoint_seq,
            root=None,
            pages_away=0,
            was_resumed=True,
            bytes=0,
            requests=0,
            missing="",
        )

    def _restore_once(self, machine: Directory, at: Any, **given: Any) -> Restored:
        return restore_with(
            machine.clients[0], DIRECTORY, at, seams=machine.seams(), pages=machine.pages, **given
        )

    def _crash(self, machine: Directory) -> None:
        machine.crash(self.rng.choice(SURVIVALS), self.rng)
        machine.pages.reopen()

    def _open(self, life: Life) -> bool:
        """The first time. False where it was outrun."""
        try:
            life.open()
        except SimulatedCrash:
            return self._open_again(life)
        except Fenced:
            self._require_outrun(life)
            return False
        except LowwaterError as error:
            self.require_excused(life, error)
            return self._open_again(life)
        return True

    def _open_again(self, life: Life) -> bool:
        try:
            with life.calm():
                life.recover(again=0)
        except Fenced:
            self._require_outrun(life)
            return False
        return True

    def _require_outrun(self, life: Life) -> None:
        assert life.has_rival, "nobody else was there"
        self.seen["restores that were outrun"] += 1

    def _require_promises(self, life: Life, done: Restored) -> None:
        """All that counted as shipped for anybody is there, and is what that one had written."""
        for each in self.lives:
            # Where what is read is spoilt again and again, a restore may end where what counts does.
            is_sure = not each.has_rival and self.weather != "lying"
            promised = max(each.counted, each.recorded) if is_sure else each.counted
            assert done.seq >= promised, f"seq {promised} was shipped, and the restore ends with {done.seq}"
            mine, others = (
                [unit for unit in model.history if unit.effects and unit.seq <= promised]
                for model in (life.model, each.model)
            )
            assert mine == others, "the archive has another line than the one that was promised"

    def clone(self) -> None:
        """As of a seq, or a time: a database of its own, which changes nothing there."""
        if not self.hwm_in_store():
            return
        rng = self.rng
        life = Life(self, self.directory())
        life.is_clone = True
        before, has_late = set(self.server.objects.data), bool(self.server._late)
        with self.line.calm():
            last = self._restore_last()
        at: Any = rng.randint(1, last)
        times = [unit for unit in self.line.model.history if unit.seq <= min(last, self.line.counted)]
        if rng.random() < 0.3 and times:
            at = EPOCH + timedelta(microseconds=rng.choice(times).time_us)
        done = self._restore(life, at, full=rng.random() < 0.3)
        if isinstance(at, int):
            assert done.seq <= at
            held = [unit.seq for unit in life.model.history if unit.effects]
            assert done.seq == at or not held or held[-1] <= done.seq
        self.seen["clones"] += 1
        life.model.pages_from = done.checkpoint_seq
        life.acked, life.lost_transactions = done.seq, True
        try:
            life.open()
        except (SimulatedCrash, LowwaterError) as error:
            if isinstance(error, LowwaterError):
                self.require_excused(life, error)
            with life.calm():
                life.recover(again=0)
        if done.root is not None:
            assert done.root == life.model.root(done.seq)
        life.compare_contents()
        calls = Calls(life, rng)
        for _ in range(rng.choice((0, 5, 20))):
            name = rng.choice([name for name in calls.IN_TROUBLE if name not in ("ship", "pages_leave")])
            self.attempt(life, getattr(calls, name))
        life.recover()
        life.compare_contents()
        with life.calm():
            assert [each for each in life.db.check() if each.severity != "note"] == []
            life.close()
        self._forget(life)
        assert has_late or set(self.server.objects.data) == before, "a clone has written to the archive"

    def _restore_last(self) -> int:
        """The last seq that a restore could be to."""
        return reach(open_archive(MemoryStore(objects=self.server.objects))).seq_last

    # ------------------------------------------------------------------ the others

    def zombie(self) -> None:
        """A process that was given up, and does not know of it."""
        if not self.zombies:
            return
        rng = self.rng
        life = rng.choice(self.zombies)
        calls = Calls(life, rng)
        what = rng.random()
        if what < 0.5:
            self.work(life, calls, rng.choice((1, 5)))
        elif what < 0.7:
            self.attempt(life, life.ship)
        elif what < 0.85:
            for _ in range(15):
                self.attempt(life, lambda: life.machine.idle(1.0))
        else:
            life.recover()
            life.fenced = False
        if life.fenced:
            self.seen["zombies that were fenced"] += 1
            life.compare_contents()
            if rng.random() < 0.5:
                life.recover()
                life.fenced = False
                with life.calm():
                    life.compare()
            if rng.random() < 0.5:
                self.zombies.remove(life)
                self._forget(life)
        if life in self.zombies:
            # It may have been faster than who goes on: one of the two is told so.
            self.line.has_rival = True

    def empty(self) -> None:
        """A new directory, and the archive of another database."""
        if self.weather != "calm" or not self.hwm_in_store():
            return
        machine = self.directory()
        before = dict(self.server.objects.data)
        self.server._crash_number = None
        try:
            machine.connect()
            open_tiered(
                DIRECTORY,
                machine.clients,
                machine.options,
                log_options=machine.log_options,
                options=machine.engine_options(),
                seams=machine.seams(),
                store=machine.pages,
            )
        except OtherCluster:
            self.seen["others that were refused"] += 1
        else:
            raise AssertionError("a new database took the archive of another one for its own")
        assert self.server.objects.data == before

    def scrub(self) -> None:
        with self.line.calm():
            archived(self.server, lies=True)
            self.seen["scrubs"] += 1

    def _forget(self, life: Life) -> None:
        """Its trace stays."""
        machine = life.machine
        self.trace.update(machine.files.trace.encode())
        self.seen["crashes"] += life.crashes
        self.seen["operations of files"] += machine.files.operations
        for name, count in life.seen.items():
            if "at most" not in name:
                self.seen[name] += count

    # ------------------------------------------------------------------ the end

    def end(self) -> None:
        """The weather clears up, everything is shipped, and restored once more."""
        self.weather = "calm"
        self.server.fault, self.server.down, self.server._crash_number = None, False, None
        self.line.machine.files._crash_number = None
        self.server.arrive()
        for _ in range(3):
            self.attempt(self.line, lambda: self.line.machine.idle(60.0))
            self.attempt(self.line, self.line.ship)
            if not self.line.fenced:
                break
            self.restore()
        line = self.line
        line.compare()
        assert line.db.shipping().state == "idle", line.db.shipping()
        root = line.db.root()
        line.close()
        archived(self.server, lies=True)
        last = Life(self, self.directory())
        last.has_rival = line.has_rival
        done = self._restore(last, None, full=True)
        self._require_promises(last, done)
        assert done.root == root, "the root of what was restored is another one"
        self.trace.update(root.encode() + self.server.trace.encode())
        for life in (*{id(each): each for each in (line, *self.zombies)}.values(), last):
            self._forget(life)
        self.seen["operations of the store"] = self.server.operations


def live(seed: int, actions: int = ACTIONS) -> World:
    """All of it from one seed."""
    with small_limits():
        try:
            world = World(seed)
            world.run(actions)
        except BaseException as error:
            error.add_note(f"to repeat: python -m tests.chaos.lives {seed} {actions}")
            raise
    return world


def digest(seeds: Iterable[int], actions: int = ACTIONS) -> str:
    """One hash over the traces of many."""
    return blake3(b"".join(live(seed, actions).trace.digest() for seed in seeds)).hexdigest()


if __name__ == "__main__":
    made = live(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else ACTIONS)
    for what, count in sorted(made.seen.items()):
        sys.stdout.write(f"{count:10,}  {what}\n")
    sys.stdout.write(f"trace {made.trace.hexdigest()}\n")
