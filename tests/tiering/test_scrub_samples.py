"""tiering/scrub_samples.py: what was shipped long ago is looked at again, now and then."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tests.tiering.shipping import (
    FedMachine,
    TieredMachine,
    archived,
    objects_of,
    shared,
    tier_options,
)
from tests.tiering.test_shipper import fill, new_machine

from lowwater.chaos.clock import VirtualClock
from lowwater.chaos.failing_store import FaultyStore, StoreFault, StoreOperation
from lowwater.engine.format.ckpt import decode_checkpoint
from lowwater.engine.format.entries import CreateBucket, Put
from lowwater.tiering.memory_store import MemoryStore
from lowwater.tiering.names import WAL, checkpoint_name, pack_object_name
from lowwater.tiering.scrub import Scrub

EVERY_S = 600.0
KINDS = ("wal/", "data/packs/", "checkpoints/", "manifest/")


def scrubbed_machine(**named: Any) -> TieredMachine:
    """With everything shipped, a checkpoint too."""
    machine = new_machine(options=tier_options(shipping={"scrub_interval_s": EVERY_S}), **named)
    fill(machine, 0, 300)
    machine.db.checkpoint()
    machine.db.ship()
    machine.db.flush()
    machine.later(20)
    return machine


def let_pass(machine: Any, looks: int) -> None:
    """Time in which so many objects are looked at."""
    for _ in range(looks):
        machine.idle(EVERY_S)


def reads_of(machine: Any) -> list[StoreOperation]:
    """Of those that are drawn; whose archive it is, is looked at more often."""
    read: list[StoreOperation] = []
    machine.server.fault = lambda each: (
        read.append(each) if each.kind == "read" and each.name.startswith(KINDS) else None
    )
    return read


def test_every_object_is_read_sooner_or_later_and_few_at_a_time() -> None:
    machine = scrubbed_machine()
    read = reads_of(machine)
    let_pass(machine, 1)
    assert len({each.name for each in read}) <= 2, "a checkpoint's index leads to its packs"
    let_pass(machine, 300)
    sent = {name for name in objects_of(machine.server) if name.startswith(KINDS)}
    assert sent <= {each.name for each in read}
    assert {kind for kind in KINDS for each in read if each.name.startswith(kind)} == set(KINDS)
    assert machine.db.shipping().alarm is None
    machine.db.close()


@pytest.mark.parametrize("names", ["wal/", "manifest/"])
@pytest.mark.parametrize("loss", ["flipped", "gone"])
def test_what_is_damaged_is_written_again_from_what_is_here(names: str, loss: str) -> None:
    """And told in the log of events, and counted."""
    machine = scrubbed_machine()
    whole = objects_of(machine.server)
    name = max(each for each in whole if each.startswith(names))
    if loss == "gone":
        machine.server.objects.remove(name)
    else:
        machine.server.flip_byte(name, len(whole[name]) // 2, 1)
    errors = machine.db.metrics().get_sample_value("storage_s3_shipping_errors_total")
    let_pass(machine, 120)
    assert shared(objects_of(machine.server)) == shared(whole)
    assert machine.db.metrics().get_sample_value("storage_s3_shipping_errors_total") > errors
    assert machine.db.shipping().alarm is None
    machine.db.close()


def test_manifests_that_others_have_followed_are_written_again() -> None:
    """A scrub of the archive calls them lost, and all of them can be made here."""
    machine = scrubbed_machine()
    whole = objects_of(machine.server)
    manifests = sorted(name for name in whole if name.startswith("manifest/0"))
    assert len(manifests) > 3
    for name in manifests[1:-1]:
        machine.server.objects.remove(name)
    machine.server.flip_byte(manifests[0], 20, 1)
    let_pass(machine, 400)
    assert shared(objects_of(machine.server)) == shared(whole)
    assert machine.db.shipping().alarm is None
    machine.db.close()


def test_what_is_damaged_and_not_here_any_more_is_an_alarm_until_it_is_whole() -> None:
    """It stays, also when the database has nothing else to do."""
    machine = scrubbed_machine()
    assert machine.db.purge(machine.db.purgeable_seq()) > 0
    name = min(each for each in objects_of(machine.server) if each.startswith(WAL))
    place = len(machine.server.objects.data[name]) // 2
    machine.server.flip_byte(name, place, 1)
    spoiled = machine.server.objects.data[name]
    let_pass(machine, 120)
    status = machine.db.shipping()
    assert status.state == "stopped"
    assert status.alarm is not None
    assert name in str(status.alarm.where)
    assert machine.db.metrics().get_sample_value("lowwater_shipping_alarm") == 1
    assert machine.server.objects.data[name] == spoiled
    fill(machine, 300, 10)
    machine.db.ship()
    machine.server.flip_byte(name, place, 1)
    let_pass(machine, 3)
    assert machine.db.shipping().alarm is None
    archived(machine.server)
    machine.db.close()


def test_the_alarm_about_a_pack_ends_with_the_checkpoints_that_need_it() -> None:
    """Where nobody has it any more, nothing else can end it: restores pass over checkpoints that are gone."""
    machine = new_machine(options=tier_options(shipping={"scrub_interval_s": EVERY_S}))
    for number in range(0, 400, 80):
        fill(machine, number, 80)
        machine.db.checkpoint()
        machine.db.ship()
    data = machine.server.objects.data
    kept = {each.seq for each in machine.db.checkpoints()}
    packs: dict[str, set[str]] = {}
    needed: set[str] = set()
    for each in machine.db.catalogue.checkpoints:
        index = checkpoint_name(each)
        for pack in map(pack_object_name, decode_checkpoint(data[index]).packs):
            packs.setdefault(pack, set()).add(index)
            needed |= {pack} if each.seq in kept else set()
    lost = min(packs.keys() - needed)
    machine.server.objects.remove(lost)
    alarm: Any = None
    while alarm is None:
        let_pass(machine, 1)
        alarm = machine.db.shipping().alarm
    assert lost in str(alarm.where)
    for index in packs[lost]:
        machine.server.objects.remove(index)
    let_pass(machine, 20)
    assert machine.db.shipping().alarm is None
    scrub = Scrub(MemoryStore(objects=machine.server.objects), deep=True, at_once=1)
    assert {each.severity for each in scrub.findings()} <= {"note", "warning"}
    machine.db.close()


def test_what_was_damaged_on_its_way_is_read_once_more() -> None:
    machine = scrubbed_machine()
    flipped: set[str] = set()

    def flip_first(operation: StoreOperation) -> StoreFault | None:
        if operation.kind != "read" or operation.name in flipped or not operation.name.startswith(KINDS):
            return None
        flipped.add(operation.name)
        return StoreFault(flip_bit=1000)

    errors = machine.db.metrics().get_sample_value("storage_s3_shipping_errors_total")
    machine.server.fault = flip_first
    let_pass(machine, 40)
    assert flipped
    assert machine.db.shipping().alarm is None
    assert machine.db.metrics().get_sample_value("storage_s3_shipping_errors_total") == errors
    machine.db.close()


def test_a_store_that_is_down_is_no_damage() -> None:
    machine = scrubbed_machine()
    machine.server.down = True
    let_pass(machine, 5)
    alarm = machine.db.shipping().alarm
    assert alarm is None
    machine.server.down = False
    read = reads_of(machine)
    let_pass(machine, 10)
    assert read
    machine.db.close()


def test_a_slow_store_is_read_less_often() -> None:
    """No more than a hundredth of the time goes into it."""
    clock = VirtualClock()
    machine = scrubbed_machine(clock=clock, servers=[FaultyStore(clock=clock)])
    times: list[float] = []

    def slow(operation: StoreOperation) -> StoreFault | None:
        if operation.kind != "read" or not operation.name.startswith(("wal/", "data/", "manifest/0")):
            return None
        times.append(clock.monotonic())
        return StoreFault(slow_s=60)

    machine.server.fault = slow
    let_pass(machine, 200)
    machine.server.fault = None
    assert times
    between = [later - earlier for earlier, later in pairwise(times)]
    assert max(between) >= 6000
    assert all(each >= 6000 or each < 300 for each in between)
    machine.db.close()


def test_nothing_is_read_once_it_was_switched_off_or_closed() -> None:
    machine = new_machine()
    fill(machine, 0, 300)
    machine.db.ship()
    machine.later(20)
    read = reads_of(machine)
    for _ in range(20):
        machine.idle(EVERY_S)
    assert [each for each in read if each.name.startswith(WAL)] == []
    machine.db.close()
    scrubbed = scrubbed_machine()
    read = reads_of(scrubbed)
    scrubbed.db.close()
    read.clear()
    let_pass(scrubbed, 20)
    assert read == []


def test_a_replica_that_is_fed_looks_as_well() -> None:
    """It ships, and may be the one that is asked for what is there."""
    machine = FedMachine(options=tier_options(shipping={"scrub_interval_s": EVERY_S}))
    machine.open()
    machine.order.engines.append(machine.db)
    machine.order.order(CreateBucket("b"))
    for number in range(200):
        machine.order.order(Put("b", f"{number:03}", bytes(700)))
    machine.db.ship()
    machine.later(20)
    read = reads_of(machine)
    let_pass(machine, 20)
    assert any(each.name.startswith(WAL) for each in read)
    machine.db.close()
