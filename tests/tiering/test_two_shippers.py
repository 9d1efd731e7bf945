"""Several engines that ship one log: the same objects, whoever of them does it, and whenever it stops."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tiering.shipping import (
    FedMachine,
    Order,
    TieredMachine,
    archived,
    but_states,
    objects_of,
    shared,
    tier_options,
)

from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.failing_store import FaultyStore, StoreFault, StoreOperation
from lowwater.engine.format.entries import CreateBucket, Delete, Put, Write
from lowwater.engine.log.chain import checkpoint_entry
from lowwater.engine.seams.real import RealRandomness
from lowwater.tiering.folder_store import FolderStore
from lowwater.tiering.memory_store import MemoryStore
from lowwater.tiering.names import CHECKPOINTS
from lowwater.tiering.open_store import open_store
from lowwater.tiering.store import Store
from lowwater.tiering.testing.s3_server import S3Server
from lowwater.tiering.tiered_opening import open_tiered


def fed(order: Order, server: FaultyStore, seed: int) -> FedMachine:
    machine = FedMachine(servers=[server], order=order, seed=seed)
    machine.open()
    order.engines.append(machine.db)
    order.deliver(machine.db)
    return machine


def fill(order: Order, first: int, count: int) -> None:
    rng = random.Random(first)
    for number in range(first, first + count):
        order.order(Put("b", f"{number:04}", rng.randbytes(1800)))


class Pair:
    """Two engines with one log and one store."""

    def __init__(self) -> None:
        self.order = Order()
        self.server = FaultyStore()
        self.machines = [fed(self.order, self.server, seed) for seed in (1, 2)]
        self.order.order(CreateBucket("b"))
        fill(self.order, 0, 75)

    def idle(self, which: int) -> None:
        machine = self.machines[which]
        for _ in range(15):
            machine.idle(1.0)

    def close(self) -> None:
        for machine in self.machines:
            machine.db.close()


def undisturbed() -> tuple[int, dict[str, bytes]]:
    """How many operations one shipper makes, and what is in the store then."""
    pair = Pair()
    before = pair.server.operations
    pair.idle(0)
    objects = objects_of(pair.server)
    count = pair.server.operations - before
    pair.idle(1)
    assert objects_of(pair.server) == objects, "the second one had nothing to add"
    pair.close()
    return count, objects


def test_two_shippers_stopped_and_resumed_at_every_operation_make_the_same_objects() -> None:
    """One is stopped before each operation on the store in turn while the other does all its work, and goes
    on from there as if nothing had been."""
    count, objects = undisturbed()
    assert count >= 15
    for number in range(1, count + 1):
        pair = Pair()
        at = pair.server.operations + number

        def schedule(operation: StoreOperation, pair: Pair = pair, at: int = at) -> StoreFault | None:
            if operation.number == at:
                pair.server.fault = None
                pair.idle(1)
            return None

        pair.server.fault = schedule
        pair.idle(0)
        pair.idle(1)
        assert shared(objects_of(pair.server)) == shared(objects), f"stopped at operation {number} of {count}"
        catalogue, _ = archived(pair.server)
        for machine in pair.machines:
            machine.idle(15.0)
            assert machine.db.catalogue.hwm == catalogue.hwm
            assert machine.db.counted_hwm == catalogue.hwm
            assert list(machine.db.check()) == []
        pair.close()


def test_a_shipper_that_dies_at_any_operation_is_replaced_by_the_other() -> None:
    """Without its knowing anything of what the first one had done."""
    count, objects = undisturbed()
    for number in range(1, count + 1, 2):
        pair = Pair()
        pair.server.crash_at(pair.server.operations + number, after=bool(number % 4 == 1))
        with pytest.raises(SimulatedCrash):
            pair.idle(0)
        pair.order.engines.remove(pair.machines[0].db)
        pair.idle(1)
        assert shared(objects_of(pair.server)) == shared(objects)
        archived(pair.server)
        pair.machines[1].db.close()


def history() -> list[tuple[int, Any]]:
    """What an engine was fed, with all that it had ordered itself."""
    order = Order()
    machine = fed(order, FaultyStore(), 1)
    rng = random.Random(4)
    order.order(CreateBucket("b"))
    for number in range(6):
        fill(order, number * 100, 60)
        order.order(Write([Put("b", f"{number}", rng.randbytes(300)), Delete("b", f"{number * 100:04}")]))
        if number % 2:
            order.order(checkpoint_entry(machine.db._state.checkpoint_seq))
        machine.later(20)
    machine.db.close()
    return order.entries


def test_two_engines_that_are_fed_the_same_ship_the_same_whatever_happens_to_one() -> None:
    """One is undisturbed, the other one crashes and is opened again all the time; its store has faults."""
    entries = history()

    def run(disturb: Callable[[FedMachine, int], None]) -> dict[str, bytes]:
        order = Order()
        order.entries = []
        server = FaultyStore()
        machine = FedMachine(servers=[server], order=order, seed=9)
        machine.open()
        order.propose = lambda _: None  # type: ignore[method-assign]
        for number, (seq, entry) in enumerate(entries):
            if seq > machine.db.marks().applied:
                machine.db.apply_log_entry(seq, entry)
            if number % 7 == 0:
                machine.db.sync()
                machine.db.update_low_water_mark(machine.db.marks().durable)
                machine.idle(1.0)
            disturb(machine, number)
            applied = machine.db.marks().applied
            for again, repeated in entries[: number + 1]:
                if again > applied:
                    machine.db.apply_log_entry(again, repeated)
        machine.db.sync()
        machine.db.update_low_water_mark(machine.db.marks().durable)
        server.fault = None
        for _ in range(10):
            machine.idle(60.0)
        assert machine.db.counted_hwm == machine.db.marks().hwm > 0
        archived(server)
        machine.db.close()
        return objects_of(server)

    rng = random.Random(11)

    def crash(machine: FedMachine, number: int) -> None:
        if number % 23 == 22:
            machine.crash("random", rng)
            machine.open()
        if number % 50 == 10:
            machine.server.fault = lambda _: (
                StoreFault(error="timed_out", after=True) if rng.random() < 0.3 else None
            )

    objects = run(lambda *_: None)
    assert sum(name.startswith(CHECKPOINTS) for name in objects) >= 2
    # A life that ends between a manifest and its state leaves that one out: the next state says as much.
    assert but_states(objects) == but_states(run(crash))


def test_a_replica_has_what_another_recorded_however_many_checkpoints_came_since() -> None:
    """The store of the one is away while the other ships one checkpoint after the other. Then it has to have
    each of them: no manifest is skipped."""
    order = Order()
    servers = [FaultyStore(), FaultyStore()]
    machines = [fed(order, server, seed) for seed, server in enumerate(servers, 1)]
    order.order(CreateBucket("b"))
    fill(order, 0, 40)
    for machine in machines:
        machine.later(15)
    servers[1].fault = lambda _: StoreFault(error="timed_out")
    recorded: list[int] = []
    for number in range(1, 6):
        fill(order, number * 100, 40)
        order.order(checkpoint_entry(machines[0].db._state.checkpoint_seq))
        for _ in range(20):
            for machine in machines:
                machine.idle(1.0)
        recorded.append(machines[0].db.catalogue.checkpoint_seq)
    assert len(set(recorded) - {0}) == 5
    for machine in machines:
        assert machine.db._checkpointer.made == 5
    assert len(machines[0].db.checkpoints()) <= 3, "what was shipped is thinned out"
    machines[1].crash("random", random.Random(3))
    order.engines.remove(machines[1].db)
    order.engines.append(machines[1].open())
    servers[1].fault = None
    for _ in range(90):
        for machine in machines:
            machine.idle(1.0)
    assert machines[1].db.counted_hwm == machines[0].db.counted_hwm >= recorded[-1]
    assert machines[1].db.shipping().alarm is None
    here, there = map(objects_of, servers)
    assert sum(name.startswith(CHECKPOINTS) for name in here) == 5
    assert here == there
    order.order(checkpoint_entry(machines[0].db._state.checkpoint_seq))
    for machine in machines:
        machine.later(30)
        assert len(machine.db.checkpoints()) <= 3
        assert list(machine.db.check()) == []
        archived(machine.server)
        machine.db.close()


def equal_archives(tmp_path: Path, other: Store) -> None:
    """Of two regions of one database: what is there after it was shipped several times."""
    folder = FolderStore(str(tmp_path / "archive"))
    db = open_tiered(str(tmp_path / "db"), [folder, other], tier_options(replicate_sync=True))
    db.create_bucket("b")
    for number in range(100):
        db.put("b", f"{number}", random.Random(number).randbytes(number * 10))
        if number % 30 == 0:
            db.ship()
    db.ship()
    here = {found.name: folder.read(found.name) for found in folder.list()}
    there = {found.name: other.read(found.name) for found in other.list()}
    assert len(here) >= 12
    assert shared(here) == shared(there)
    db.close()


def test_an_archive_in_a_folder_and_one_in_memory_are_equal(tmp_path: Path) -> None:
    """Object for object: names and bytes are the log's."""
    equal_archives(tmp_path, MemoryStore())


def test_an_archive_in_a_folder_and_one_on_s3_are_equal(tmp_path: Path, s3_server: S3Server) -> None:
    """A real server, and many small objects."""
    uri = s3_server.uri(f"equal/{RealRandomness().token(8).hex()}")
    equal_archives(tmp_path, open_store(uri, options=s3_server.options))


def trace(seed: int) -> tuple[str, str, str]:
    """A run of everything at once, from a seed."""
    rng = random.Random(seed)
    server = FaultyStore()
    machine = TieredMachine(
        seed=seed,
        servers=[server],
        options=tier_options(retention={"age_max_s": 20.0, "check_interval_s": 5.0}),
    )
    server.fault = lambda operation: (
        StoreFault(error="timed_out", after=rng.random() < 0.5)
        if operation.kind != "list" and rng.random() < 0.1
        else None
    )
    machine.open()
    machine.db.create_bucket("b")
    for number in range(6):
        for key in range(30):
            machine.db.put("b", f"{key}", rng.randbytes(rng.randrange(2000)))
        if number % 2:
            machine.db.flush()
        machine.later(rng.randrange(30))
        marks = machine.db.marks()
        assert list(marks) == sorted(marks, reverse=True)
        if rng.random() < 0.4:
            machine.crash("random", rng)
            machine.open()
    root = machine.db.root()
    machine.db.close()
    return server.trace, machine.files.trace, root


@pytest.mark.parametrize("seed", range(3))
def test_one_seed_gives_one_run(seed: int) -> None:
    """In one thread, with crashes, faults and purging."""
    assert trace(seed) == trace(seed)


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(4))
def test_many_seeds(chunk: int) -> None:
    """Invariants at every look, nothing that was acknowledged lost."""
    for seed in range(100 + chunk, 180, 4):
        trace(seed)
