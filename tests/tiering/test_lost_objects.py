"""An archive that loses what was shipped, below a database that is open: it is told, and filled again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from tests.tiering.shipping import FedMachine, archived, objects_of, shared, tier_options
from tests.tiering.test_shipper import fill, new_machine

from lowwater.chaos.failing_store import StoreFault
from lowwater.engine.format.entries import CreateBucket, Put
from lowwater.engine.seams.failpoints import registry
from lowwater.errors import DataError, LowwaterError, StoreUnavailable
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.names import CHECKPOINTS, CLUSTER, WAL, checkpoint_name
from lowwater.tiering.objects import encode_cluster
from lowwater.tiering.scrub import Scrub


def wipe(objects: MemoryObjects, _: dict[str, bytes]) -> None:
    for name in [*objects.data]:
        objects.remove(name)


def roll_back(objects: MemoryObjects, before: dict[str, bytes]) -> None:
    for name in [*objects.data]:
        if name not in before:
            objects.remove(name)


def lose_the_name(objects: MemoryObjects, _: dict[str, bytes]) -> None:
    objects.remove(CLUSTER)


@pytest.mark.parametrize("lose", [wipe, roll_back, lose_the_name])
def test_an_archive_that_is_another_one_is_told_and_filled_again(lose: Callable[..., None]) -> None:
    """All that was shipped is here still, so all of it is there again, and goes on from there."""
    machine = new_machine()
    fill(machine, 0, 100)
    machine.db.ship()
    before = objects_of(machine.server)
    fill(machine, 100, 100)
    machine.db.ship()
    whole = objects_of(machine.server)
    lose(machine.server.objects, before)
    told = []
    for _ in range(150):
        machine.later(1)
        status = machine.db.shipping()
        if status.alarm is not None:
            told.append(status.alarm.what)
    assert any("has lost what this database has shipped" in each for each in told)
    status = machine.db.shipping()
    assert (status.state, status.alarm, status.error) == ("idle", None, None)
    assert shared(objects_of(machine.server)) == shared(whole)
    fill(machine, 200, 50)
    machine.db.ship()
    catalogue, _ = archived(machine.server)
    assert catalogue.hwm == machine.db.counted_hwm
    machine.db.close()


def test_a_segment_that_is_gone_is_uploaded_again_before_it_is_purged() -> None:
    """Nobody else would have it."""
    machine = new_machine()
    fill(machine, 0, 300)
    machine.db.ship()
    machine.db.flush()
    whole = objects_of(machine.server)
    gone = [name for name in whole if name.startswith(WAL)][1:3]
    for name in gone:
        machine.server.objects.remove(name)
    purged = machine.db.purge(machine.db.purgeable_seq())
    assert purged > 0
    assert shared(objects_of(machine.server)) == shared(whole)
    archived(machine.server)
    machine.db.close()


def test_nothing_is_purged_that_the_store_cannot_be_asked_for() -> None:
    machine = new_machine()
    fill(machine, 0, 300)
    machine.db.ship()
    machine.db.flush()
    machine.server.down = True
    with pytest.raises(StoreUnavailable):
        machine.db.purge(machine.db.purgeable_seq())
    assert machine.db.marks().purged == 0
    machine.server.down = False
    assert machine.db.purge(machine.db.purgeable_seq()) > 0
    machine.db.close()


def test_nothing_is_purged_while_another_object_is_in_its_place() -> None:
    machine = new_machine()
    fill(machine, 0, 300)
    machine.db.ship()
    machine.db.flush()
    name = min(name for name in objects_of(machine.server) if name.startswith(WAL))
    machine.server.objects.data[name] = b"something else" * 50
    with pytest.raises(DataError, match="no segment"):
        machine.db.purge(machine.db.purgeable_seq())
    assert machine.db.marks().purged == 0
    machine.db.close()


def test_a_segment_that_is_gone_is_found_sooner_or_later() -> None:
    """One of all is asked for now and then. Where it is not here any more, the alarm stays."""
    machine = new_machine(options=tier_options())
    fill(machine, 0, 300)
    machine.db.ship()
    machine.db.flush()
    segments = sorted(name for name in objects_of(machine.server) if name.startswith(WAL))
    data = machine.server.objects.data[segments[0]]
    machine.server.objects.remove(segments[0])
    waited = 0
    while segments[0] not in machine.server.objects.data:
        machine.later(30)
        waited += 30
        assert waited < 30 * 50 * len(segments)
    assert machine.server.objects.data[segments[0]] == data
    machine.db.purge(machine.db.purgeable_seq())
    machine.server.objects.remove(segments[0])
    alarm: Any = None
    while alarm is None:
        machine.later(30)
        alarm = machine.db.shipping().alarm
        waited += 30
        assert waited < 30 * 100 * len(segments)
    assert segments[0] in str(alarm.where)
    machine.server.objects.add(segments[0], data)
    machine.later(100)
    assert machine.db.shipping().alarm is None
    machine.db.close()


def test_a_roll_back_is_seen_though_something_was_published_since() -> None:
    """What was published then lies above a gap, and may lead to what is in it."""
    machine = new_machine()
    fill(machine, 0, 100)
    machine.db.ship()
    before = objects_of(machine.server)
    for number in range(100, 200, 25):
        fill(machine, number, 25)
        machine.db.ship()
    roll_back(machine.server.objects, before)
    fill(machine, 200, 100)
    machine.db.ship()
    alarms = 0
    for _ in range(200):
        machine.later(1)
        alarms += machine.db.shipping().alarm is not None
    assert alarms >= 30
    assert machine.db.shipping().alarm is None
    catalogue, _ = archived(machine.server)
    assert catalogue.hwm == machine.db.counted_hwm
    machine.db.close()


def test_nothing_is_purged_before_what_was_lost_is_back() -> None:
    """However often it is asked for: segments alone are no archive."""
    machine = new_machine()
    fill(machine, 0, 300)
    machine.db.ship()
    machine.db.flush()
    for name in [*machine.server.objects.data]:
        if not name.startswith(WAL):
            machine.server.objects.remove(name)
    machine.server.fault = lambda each: StoreFault(error="denied") if each.kind == "write" else None
    for _ in range(3):
        with pytest.raises(DataError):
            machine.db.purge(machine.db.purgeable_seq())
        assert machine.db.shipping().alarm is not None
        machine.later(20)
    assert machine.db.marks().purged == 0
    machine.server.fault = None
    machine.later(400)
    assert machine.db.purge(machine.db.purgeable_seq()) > 0
    assert machine.db.shipping().alarm is None
    archived(machine.server)
    machine.db.close()


def test_what_was_uploaded_before_a_loss_does_not_count_after_it() -> None:
    """The loss is noticed between what an upload saw and what it says."""
    machine = new_machine()
    fill(machine, 0, 200)
    machine.db.ship()
    machine.db.flush()
    lost: list[str] = []

    def lose() -> None:
        if not lost:
            lost.extend(machine.server.objects.data)
            wipe(machine.server.objects, {})
            with pytest.raises(DataError):
                machine.db.purge(machine.db.purgeable_seq())

    fill(machine, 200, 60)
    with registry["ship.after_upload"].armed(lose), suppress(LowwaterError):
        machine.db.ship()
    assert lost
    while machine.db.shipping().regions[0].hwm < machine.db.marks().hwm:
        machine.later(1)
    archived(machine.server)
    machine.db.close()


def test_a_purge_that_is_refused_for_what_lies_in_the_store_is_an_alarm() -> None:
    machine = new_machine()
    fill(machine, 0, 300)
    machine.db.ship()
    machine.db.flush()
    name = max(name for name in objects_of(machine.server) if name.startswith(WAL))
    right = machine.server.objects.data[name]
    machine.server.objects.data[name] = b"something else" * 50
    for _ in range(3):
        with pytest.raises(DataError):
            machine.db.purge(machine.db.purgeable_seq())
        machine.later(20)
        alarm = machine.db.shipping().alarm
        assert alarm is not None
        assert name in str(alarm.where)
    machine.server.objects.data[name] = right
    assert machine.db.purge(machine.db.purgeable_seq()) > 0
    assert machine.db.shipping().alarm is None
    machine.db.close()


@pytest.mark.parametrize("is_wiped", [False, True])
def test_the_alarm_of_a_purge_ends_with_what_it_was_about(*, is_wiped: bool) -> None:
    """There may be nothing to purge any more: somebody has made room, or purges by hand."""
    machine = new_machine()
    fill(machine, 0, 300)
    machine.db.ship()
    machine.db.flush()
    name = max(name for name in objects_of(machine.server) if name.startswith(WAL))
    right = machine.server.objects.data[name]
    if is_wiped:
        wipe(machine.server.objects, {})
    else:
        machine.server.objects.data[name] = b"something else" * 50
    with pytest.raises(DataError):
        machine.db.purge(machine.db.purgeable_seq())
    assert machine.db.shipping().alarm is not None
    if not is_wiped:
        machine.later(100)
        machine.server.down = True
        machine.later(100)
        alarm = machine.db.shipping().alarm
        assert alarm is not None
        assert name in str(alarm.where)
        machine.server.down = False
        machine.server.objects.data[name] = right
    machine.later(200)
    status = machine.db.shipping()
    assert (status.state, status.alarm) == ("idle", None)
    assert machine.server.objects.data[name] == right
    assert machine.db.marks().purged == 0
    machine.db.close()


def test_nothing_is_purged_for_an_archive_that_is_anothers_by_now() -> None:
    other = new_machine()
    fill(other, 0, 300)
    other.db.ship()
    machine = new_machine()
    fill(machine, 0, 300)
    machine.db.ship()
    machine.db.flush()
    wipe(machine.server.objects, {})
    for name, data in objects_of(other.server).items():
        machine.server.objects.add(name, data if name != CLUSTER else encode_cluster(b"other" * 3 + b"."))
    with pytest.raises(DataError, match="of the cluster"):
        machine.db.purge(machine.db.purgeable_seq())
    assert machine.db.marks().purged == 0
    assert machine.db.shipping().alarm is not None
    for each in (machine, other):
        each.db.close()


def test_what_is_neither_here_nor_there_keeps_nothing_else_from_an_archive() -> None:
    """Of checkpoints the last ones are kept here, and the log has what was in the others."""
    machine = new_machine()
    for number in range(0, 400, 80):
        fill(machine, number, 80)
        machine.db.checkpoint()
        machine.db.ship()
    kept = {each.seq for each in machine.db.checkpoints()}
    shipped = list(machine.db.catalogue.checkpoints)
    assert len(shipped) > len(kept)
    wipe(machine.server.objects, {})
    machine.later(200)
    status = machine.db.shipping()
    assert (status.state, status.alarm, status.error) == ("idle", None, None)
    there = {each.name for each in MemoryStore(objects=machine.server.objects).list(CHECKPOINTS)}
    assert there == {checkpoint_name(each) for each in shipped if each.seq in kept}
    fill(machine, 400, 80)
    machine.db.checkpoint()
    machine.db.ship()
    scrub = Scrub(MemoryStore(objects=machine.server.objects), deep=True)
    told = [(each.severity, each.what) for each in scrub.findings() if each.severity != "note"]
    assert told == [("warning", "the checkpoint is gone")] * (len(shipped) - len(kept))
    machine.db.close()


def test_what_was_in_a_checkpoint_that_is_nowhere_is_read_from_the_log() -> None:
    """Nor is it an alarm, which nobody could end: it is told of once."""
    machine = new_machine(options=tier_options(shipping={"scrub_interval_s": 600.0}))
    had = {}
    for number in range(0, 400, 80):
        fill(machine, number, 80)
        machine.db.checkpoint()
        machine.db.ship()
        machine.db.put("b", "00000", b"%d" % number)
        had[machine.db.marks().applied] = (b"%d" % number, number + 80)
    machine.db.ship()
    wipe(machine.server.objects, {})
    machine.later(200)
    machine.db.move_horizon(machine.db.marks().applied)
    machine.db.flush()
    for seq, (value, count) in had.items():
        assert machine.db.get("b", "00000", at=seq).value == value
        assert len([*machine.db.scan("b", at=seq)]) == count
    errors = machine.db.metrics().get_sample_value("storage_s3_shipping_errors_total")
    for _ in range(150):
        machine.idle(600.0)
    status = machine.db.shipping()
    assert (status.state, status.alarm) == ("idle", None)
    told = machine.db.metrics().get_sample_value("storage_s3_shipping_errors_total") - errors
    assert told == len(machine.db.catalogue.checkpoints) - len(machine.db.checkpoints())
    machine.db.close()


def test_a_fed_engine_fills_an_archive_though_some_of_its_checkpoints_are_nowhere() -> None:
    """Other replicas have a while to bring them; then it goes on without."""
    machine = FedMachine(options=tier_options())
    machine.open()
    machine.order.engines.append(machine.db)
    machine.order.order(CreateBucket("b"))
    for number in range(5):
        for each in range(80):
            machine.order.order(Put("b", f"{number}{each:03}", bytes(700)))
        machine.db.create_checkpoint()
        machine.later(40)
        machine.db.ship(timeout=60)
    assert len(machine.db.checkpoints()) < len(machine.db.catalogue.checkpoints)
    wipe(machine.server.objects, {})
    machine.later(150)
    status = machine.db.shipping()
    assert status.alarm is not None
    assert "another replica may have it" in str(status.alarm.hint)
    machine.later(600)
    status = machine.db.shipping()
    assert (status.state, status.alarm, status.regions[0].hwm) == ("idle", None, status.hwm)
    seq = machine.order.order(Put("b", "new", b"x"))
    assert machine.db.ship(timeout=100) >= seq
    machine.db.close()
