"""tiering/shipper.py: what is sealed gets into the store, in order, whatever happens."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3
from tests.engine.engine_model import CLUSTER_ID
from tests.tiering.shipping import (
    TieredMachine,
    archived,
    but_states,
    manifests_of,
    objects_of,
    shared,
    tier_options,
)

from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.failing_store import FaultyStore, StoreFault, StoreOperation
from lowwater.engine.format.entries import CreateBucket, Put, decode_payload
from lowwater.errors import (
    Corrupt,
    Fenced,
    InputError,
    OtherCluster,
    StoreCorrupt,
    StoreDenied,
    StoreUnavailable,
    TimedOut,
)
from lowwater.tiering.archive import open_archive
from lowwater.tiering.names import MANIFESTS
from lowwater.tiering.region import LOOK_AGAIN_S


def values_in(frames: list[tuple[int, bytes]]) -> dict[str, bytes]:
    found = {}
    for seq, payload in frames:
        entry = decode_payload(seq, payload)
        if entry.kind == "put":
            found[entry.key] = entry.value
    return found


def fill(machine: TieredMachine, first: int, count: int, size: int = 700) -> dict[str, bytes]:
    rng = random.Random(first)
    written = {f"{number:05}": rng.randbytes(size) for number in range(first, first + count)}
    for key, value in written.items():
        machine.db.put("b", key, value)
    return written


def new_machine(**named: Any) -> TieredMachine:
    machine = TieredMachine(**named)
    machine.open()
    machine.db.create_bucket("b")
    return machine


def test_what_was_written_is_in_the_store_when_ship_returns() -> None:
    """And recorded, and published, and it counts."""
    machine = new_machine()
    written = fill(machine, 0, 300)
    durable = machine.db.marks().durable
    hwm = machine.db.ship()
    assert hwm >= durable
    catalogue, frames = archived(machine.server)
    assert values_in(frames) == written
    assert len(catalogue.segments) >= 3
    assert catalogue.hwm == hwm == machine.db.marks().hwm == machine.db.counted_hwm
    assert manifests_of(machine.server) == machine.db.catalogue.seqs_after(0)
    assert machine.db.shipping().state == "idle"
    assert list(machine.db.check()) == []
    machine.db.close()


def test_ship_returns_once_the_checkpoint_is_there_too() -> None:
    """A restore right after it begins with that, and does not read the whole log."""
    machine = new_machine()
    fill(machine, 0, 300)
    machine.db.checkpoint()
    hwm = machine.db.ship()
    seq = machine.db.checkpoints()[0].seq
    catalogue, _ = archived(machine.server)
    assert catalogue.checkpoint_seq == seq <= hwm
    assert manifests_of(machine.server) == machine.db.catalogue.seqs_after(0)
    operations = machine.server.operations
    assert machine.db.ship() == hwm
    assert machine.server.operations == operations, "nothing is left to do"
    machine.db.close()


def test_ship_raises_what_is_in_the_way_of_a_checkpoint_and_so_does_an_alarm_later() -> None:
    """It is tried again, later each time, and counted; nobody waits for ever."""
    machine = new_machine()
    fill(machine, 0, 100)
    machine.db.checkpoint()
    machine.server.fault = lambda operation: (
        StoreFault(error="timed_out") if operation.name.startswith("data/") else None
    )
    with pytest.raises(StoreUnavailable, match="no answer came in time"):
        machine.db.ship()
    status = machine.db.shipping()
    assert status.state == "failing"
    assert status.failures
    assert "no answer came in time" in (status.error or "")
    assert machine.db.counted_hwm > 100, "the log went on"
    with pytest.raises(StoreUnavailable):
        machine.db.ship(timeout=1)
    machine.server.fault = None
    machine.later(70)
    assert machine.db.shipping().error is None
    assert archived(machine.server)[0].checkpoint_seq
    machine.db.close()


def test_an_upload_that_somebody_removed_is_no_failure() -> None:
    """It is begun again at once, with all of its parts."""
    machine = new_machine()
    written = fill(machine, 0, 300)
    machine.db.checkpoint()
    seen: set[str] = set()

    def gone_once(operation: StoreOperation) -> StoreFault | None:
        if operation.kind != "write" or not operation.name.startswith(("wal/", "data/")):
            return None
        if operation.name in seen:
            return None
        seen.add(operation.name)
        return StoreFault(error="gone")

    machine.server.fault = gone_once
    machine.db.ship()
    assert len(seen) >= 4
    assert machine.db.shipping().error is None
    assert values_in(archived(machine.server)[1]) == written
    machine.db.close()


def test_shipping_does_not_feed_itself() -> None:
    """What it writes is no reason to seal: an idle database stays idle, but for a few questions now and then,
    whether all that it has shipped is still there."""
    machine = new_machine()
    fill(machine, 0, 3)
    machine.later(60)
    before = objects_of(machine.server)
    assert machine.db.counted_hwm > 4
    operations = machine.server.operations
    machine.later(3600)
    assert objects_of(machine.server) == before
    assert machine.server.operations - operations <= 5 * 3600 / LOOK_AGAIN_S
    assert machine.db.ship() == machine.db.counted_hwm
    machine.db.close()


def test_an_idle_tail_is_shipped_by_age() -> None:
    """So little is missing in the store, however little is written."""
    machine = new_machine()
    machine.later(60)
    fill(machine, 0, 1)
    machine.later(8)
    assert values_in(archived(machine.server)[1]) == {}
    machine.later(15)
    assert len(values_in(archived(machine.server)[1])) == 1
    machine.db.close()


def test_nothing_is_claimed_where_nothing_is_shipped() -> None:
    """Opening and closing leaves no trace in the store."""
    machine = new_machine()
    machine.db.ship()
    machine.db.close()
    machine.open().close()  # what closing has sealed
    before = objects_of(machine.server)
    for _ in range(3):
        machine.open()
        machine.later(60)
        assert machine.db.shipping().epoch == 0
        machine.db.close()
    assert objects_of(machine.server) == before


def test_marks_count_again_in_the_next_life_without_an_upload() -> None:
    """What was published once is found there; so what it covers may be purged."""
    machine = new_machine()
    fill(machine, 0, 100)
    hwm = machine.db.ship()
    machine.db.close()
    machine.open()
    assert machine.db.counted_hwm == 0
    machine.later(2)
    assert machine.db.counted_hwm >= hwm
    machine.db.close()


def test_a_raw_segment_is_the_local_file() -> None:
    """Nothing is decoded to be shipped."""
    machine = TieredMachine()
    machine.log_options = replace(machine.log_options, compression="none")
    machine.open()
    machine.db.create_bucket("b")
    fill(machine, 0, 200)
    machine.db.ship()
    local = {name[8:-4]: data for name, data in machine.wal_segments().items()}
    stored = {
        name.rpartition("/")[2][8:-21]: data
        for name, data in objects_of(machine.server).items()
        if name.startswith("wal/")
    }
    assert len(stored) >= 2
    assert local.items() >= stored.items()
    machine.db.close()


# ------------------------------------------------------------------ crashes and faults


def life(machine: TieredMachine, number: int) -> None:
    """Some entries, shipped twice, with what time brings between."""
    machine.open()
    if not machine.db.buckets():
        machine.db.create_bucket("b")
    fill(machine, number * 100, 60)
    machine.db.ship()
    fill(machine, number * 100 + 60, 3)
    machine.later(15)


def operations_of_a_life() -> int:
    machine = TieredMachine()
    life(machine, 0)
    return machine.server.operations


def finish(machine: TieredMachine, acknowledged: dict[str, bytes]) -> None:
    """After anything: it ships by itself, and a reader finds all of it."""
    machine.open()
    machine.db.create_bucket("b") if not machine.db.buckets() else None
    acknowledged |= fill(machine, 90_000, 2)
    machine.later(200)
    status = machine.db.shipping()
    assert status.state == "idle", status
    assert machine.db.counted_hwm == machine.db.marks().hwm
    assert machine.db.opened_us is None, "something waits"
    _, frames = archived(machine.server)
    assert values_in(frames).items() >= acknowledged.items()
    assert list(machine.db.check()) == []
    machine.db.close()


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_operation_of_the_store_is_made_up_for(after: bool) -> None:
    """No object that a reader would take wrongly is left, and shipping goes on by itself."""
    count = operations_of_a_life()
    assert count >= 20
    for number in range(1, count + 1):
        machine = TieredMachine(seed=number)
        machine.server.crash_at(number, after=after)
        with pytest.raises(SimulatedCrash):
            life(machine, 0)
        archived_before = (
            archived(machine.server)[0].hwm if "cluster.cbor" in objects_of(machine.server) else 0
        )
        mode = ("lose", "keep", "random")[number % 3]
        machine.crash(mode if mode in ("keep", "random") else "random", random.Random(number))
        finish(machine, {})
        assert machine.server.objects.data
        assert archived(machine.server)[0].hwm >= archived_before


@pytest.mark.parametrize(
    "name",
    [
        *(
            "ship.before_claim",
            "ship.before_fork",
            "ship.after_fork",
            "ship.before_upload",
            "ship.after_upload",
        ),
        *("ship.before_record", "ship.after_record", "ship.before_manifest", "ship.after_manifest"),
        "ship.before_count",
    ],
)
def test_a_crash_at_each_failure_point_is_made_up_for(name: str) -> None:
    """The steps of an upload, by name."""
    from lowwater.engine.seams.failpoints import registry

    for nth in (1, 2, 3):
        machine = TieredMachine(seed=nth)
        left = nth

        def crash() -> None:
            nonlocal left
            left -= 1
            if not left:
                raise SimulatedCrash(name)

        reached = True
        with registry[name].armed(crash):
            try:
                life(machine, 0)
                reached = False
            except SimulatedCrash:
                pass
        assert reached or nth > 1, "the point was not reached"
        machine.crash("random", random.Random(nth))
        finish(machine, {})


@pytest.mark.parametrize("seed", range(6))
def test_a_store_with_faults_gets_everything_in_the_end(seed: int) -> None:
    """Errors before and after the effect, late arrivals, partial uploads, stale lists."""
    from lowwater.chaos.failing_store import random_faults

    rng = random.Random(seed)
    machine = TieredMachine(seed=seed)
    machine.server.fault = lambda operation: None if operation.kind == "list" else faults(operation)
    faults = random_faults(rng, chance=0.2)
    acknowledged = {}
    machine.open()
    machine.db.create_bucket("b")
    for number in range(4):
        acknowledged |= fill(machine, number * 100, 50)
        machine.later(30)
    assert machine.db.shipping().failures >= 0
    machine.server.fault = None
    machine.server.arrive()
    machine.later(300)
    machine.db.close()
    finish(machine, acknowledged)


def test_an_outage_of_any_length_holds_up_no_writer() -> None:
    """Writes go on, lag is reported, and after it everything is shipped."""
    machine = new_machine()
    fill(machine, 0, 100)
    machine.db.ship()
    machine.server.down = True
    written = {}
    lag_before = machine.db.shipping().lag_seconds
    for number in range(20):
        written |= fill(machine, 1000 + number * 50, 50)
        machine.later(60)
    status = machine.db.shipping()
    assert status.state == "failing"
    assert status.failures >= 5
    assert status.error is not None
    assert 0 <= (status.retry_in_s or 0) <= 60
    assert status.lag_bytes > 20 * 50 * 700
    assert status.lag_seconds > 1000 > lag_before
    with pytest.raises(StoreUnavailable):
        machine.db.ship()
    machine.server.down = False
    machine.later(120)
    assert values_in(archived(machine.server)[1]).items() >= written.items()
    assert machine.db.shipping().state == "idle"
    assert machine.db.shipping().lag_bytes == 0
    machine.db.close()


def test_a_database_opens_and_writes_while_its_store_is_down() -> None:
    """Also one that was never shipped; it is shipped when the store is there."""
    machine = TieredMachine()
    machine.server.down = True
    machine.open()
    machine.db.create_bucket("b")
    written = fill(machine, 0, 50)
    machine.later(60)
    assert machine.db.shipping().state in ("waiting", "failing")
    machine.server.down = False
    machine.later(100)
    assert values_in(archived(machine.server)[1]) == written
    machine.db.close()


def test_what_is_wrong_with_a_store_is_told_before_anything_was_shipped_there() -> None:
    """And where something was, the database opens all the same."""
    machine = TieredMachine()
    denied = StoreFault(error="denied")
    machine.server.fault = lambda _: denied
    with pytest.raises(StoreDenied):
        machine.open()
    machine.server.fault = None
    machine.open()
    machine.db.create_bucket("b")
    machine.db.ship()
    machine.db.close()
    machine.server.fault = lambda _: denied
    machine.open()
    fill(machine, 0, 10)
    machine.later(30)
    status = machine.db.shipping()
    assert status.state == "failing"
    assert "refuses" in str(status.error)
    with pytest.raises(StoreDenied):
        machine.db.ship(timeout=5)
    machine.server.fault = None
    machine.later(100)
    assert machine.db.shipping().state == "idle"
    machine.db.close()


def test_the_prefix_of_another_cluster_is_refused() -> None:
    """Nothing is written there."""
    from lowwater.tiering.objects import encode_cluster

    machine = TieredMachine()
    machine.server.objects.add("cluster.cbor", encode_cluster(bytes(16)))
    with pytest.raises(OtherCluster) as caught:
        machine.open()
    assert "memory://" in str(caught.value)
    assert list(objects_of(machine.server)) == ["cluster.cbor"]


def test_ship_gives_up_in_time() -> None:
    """With the store's error where that is the reason, and TimedOut where none answers for it."""
    machine = new_machine()
    fill(machine, 0, 10)
    machine.server.down = True
    with pytest.raises(StoreUnavailable):
        machine.db.ship(timeout=0.5)
    machine.server.down = False
    machine.db.ship(timeout=5)
    machine.db.close()
    with pytest.raises(InputError):
        TieredMachine.open(machine).ship(timeout="soon")  # type: ignore[arg-type]


def test_a_database_without_a_tier_says_so() -> None:
    """An answer of 0 would look like one that has shipped nothing."""
    from tests.engine.engine_model import Machine

    machine = Machine()
    db = machine.open()
    with pytest.raises(InputError, match="no object store"):
        db.ship()
    with pytest.raises(InputError, match="no object store"):
        db.shipping()
    db.close()


# ------------------------------------------------------------------ what is never stepped over


def first_unshipped(machine: TieredMachine) -> str:
    return str(machine.db.complete_segments(machine.db.catalogue.hwm)[0].path)


@pytest.mark.parametrize("place", ["body", "footer"])
def test_a_bad_byte_stops_the_high_water_mark_and_raises_an_alarm(place: str) -> None:
    """What follows is not recorded either, until the segment is whole again."""
    machine = new_machine()
    hwm = machine.db.ship()
    machine.server.down = True
    written = fill(machine, 0, 300)
    machine.later(20)
    segments = machine.db.complete_segments(hwm)
    assert len(segments) >= 3
    path = segments[0].path
    offset = 1000 if place == "body" else segments[0].body_bytes + 100
    machine.files.flip_byte(path, offset, 1)
    machine.server.down = False
    machine.later(200)
    status = machine.db.shipping()
    assert status.state == "stopped"
    assert status.alarm is not None
    assert status.alarm.where == path
    assert status.alarm.hint
    assert machine.db.marks().hwm == hwm
    with pytest.raises(Corrupt):
        machine.db.ship(timeout=5)
    assert machine.db.put("b", "more", b"") > 0
    machine.files.flip_byte(path, offset, 1)
    machine.later(200)
    assert machine.db.shipping().alarm is None
    assert values_in(archived(machine.server)[1]).items() >= written.items()
    machine.db.close()


def test_a_missing_local_segment_stops_it_too() -> None:
    machine = new_machine()
    hwm = machine.db.ship()
    machine.server.down = True
    fill(machine, 0, 300)
    machine.later(20)
    path = first_unshipped(machine)
    machine.files.rename(path, path + ".away")
    machine.server.down = False
    machine.later(100)
    assert machine.db.shipping().state == "stopped"
    assert machine.db.marks().hwm == hwm
    machine.files.rename(path + ".away", path)
    machine.later(200)
    assert machine.db.shipping().state == "idle"
    assert machine.db.marks().hwm > hwm
    machine.db.close()


def test_a_store_that_lies_about_success_raises_an_alarm() -> None:
    """What it says that it took is looked at."""
    machine = new_machine()
    machine.db.ship()

    def lie(operation: StoreOperation) -> StoreFault | None:
        return (
            StoreFault(lost=True) if operation.kind == "write" and operation.name.startswith("wal/") else None
        )

    machine.server.fault = lie
    hwm = machine.db.marks().hwm
    fill(machine, 0, 10)
    machine.later(60)
    assert machine.db.shipping().state == "stopped"
    assert machine.db.marks().hwm == hwm
    machine.server.fault = None
    machine.later(200)
    assert machine.db.shipping().state == "idle"
    assert machine.db.marks().hwm > hwm
    machine.db.close()


def test_an_object_that_is_no_such_segment_is_no_reason_to_go_on() -> None:
    """A cut one of a store that lied: kept by no means as if it were the segment. It is this sender's own, so
    it is sent again."""
    machine = new_machine()
    machine.db.ship()

    def cut(operation: StoreOperation) -> StoreFault | None:
        is_segment = operation.kind == "write" and operation.name.startswith("wal/")
        return (
            StoreFault(kept_bytes=operation.size - 3, error="timed_out", after=True) if is_segment else None
        )

    machine.server.fault = cut
    hwm = machine.db.marks().hwm
    fill(machine, 0, 10)
    machine.later(60)
    assert machine.db.marks().hwm == hwm
    machine.server.fault = None
    machine.later(60)
    assert machine.db.shipping().state == "idle"
    assert machine.db.marks().hwm > hwm
    archived(machine.server)
    machine.db.close()


# ------------------------------------------------------------------ two that go on


def test_a_copied_directory_stops_with_fenced() -> None:
    """The one that ships later finds that it was outrun: its writes are refused, and reads go on."""
    machine = new_machine()
    fill(machine, 0, 50)
    machine.db.ship()
    machine.db.close()
    other = TieredMachine(servers=machine.servers, seed=1)
    other.files, other.pages = clone(machine)
    machine.open()
    fill(machine, 100, 10)
    machine.db.ship()
    other.open()
    other.later(30)
    assert other.db.shipping().state == "stopped"
    with pytest.raises(Fenced):
        other.db.put("b", "x", b"")
    with pytest.raises(Fenced):
        other.db.ship()
    assert other.db.get("b", "00001").value
    fill(machine, 200, 10)
    machine.db.ship()
    machine.db.close()
    other.db.close()
    assert "00205" in values_in(archived(machine.server)[1])


def clone(machine: TieredMachine) -> Any:
    """A copy of the directory."""
    held = (machine.clock, machine.files._mutex, machine.pages._mutex)
    memo: dict[int, Any] = {id(each): each for each in held} | {id(machine.files._trace): blake3()}
    return copy.deepcopy((machine.files, machine.pages), memo)


# ------------------------------------------------------------------ regions


def test_with_sync_replication_the_mark_waits_for_both() -> None:
    """And both have the same objects."""
    servers = [FaultyStore(uri="memory://one"), FaultyStore(uri="memory://two")]
    machine = new_machine(servers=servers, options=tier_options(replicate_sync=True))
    fill(machine, 0, 200)
    hwm = machine.db.ship()
    assert but_states(objects_of(servers[0])) == but_states(objects_of(servers[1]))
    servers[1].down = True
    fill(machine, 300, 50)
    machine.later(60)
    assert machine.db.marks().hwm == hwm
    with pytest.raises(StoreUnavailable):
        machine.db.ship()
    servers[1].down = False
    machine.later(120)
    assert machine.db.counted_hwm > hwm
    assert but_states(objects_of(servers[0])) == but_states(objects_of(servers[1]))
    archived(servers[1])
    machine.db.close()


def test_with_async_replication_a_region_that_is_down_holds_up_nothing_and_catches_up() -> None:
    """Also when it comes back after what it lacks was purged here: from the first store."""
    servers = [FaultyStore(uri="memory://one"), FaultyStore(uri="memory://two")]
    machine = new_machine(servers=servers, options=tier_options(retention={"age_max_s": 1.0}))
    fill(machine, 0, 200)
    machine.db.ship()
    servers[1].down = True
    fill(machine, 300, 200)
    hwm = machine.db.ship()
    assert machine.db.counted_hwm == hwm
    machine.db.flush()
    machine.later(400)
    assert machine.db.marks().purged > 0
    regions = machine.db.shipping().regions
    assert regions[1].error is not None
    assert regions[1].hwm < hwm
    servers[1].down = False
    machine.later(200)
    assert shared(objects_of(servers[0])) == shared(objects_of(servers[1]))
    assert but_states(objects_of(servers[0])) == but_states(objects_of(servers[1]))
    archived(servers[1])
    machine.db.close()


def test_a_region_waits_for_a_claim_while_the_first_is_down() -> None:
    """It is claimed in the first. Nobody takes the second for broken until then."""
    servers = [FaultyStore(uri="memory://one"), FaultyStore(uri="memory://two")]
    machine = new_machine(servers=servers)
    servers[1].down = True
    fill(machine, 0, 200)
    machine.db.ship()
    machine.db.close()
    servers[0].down, servers[1].down = True, False
    machine.open()
    machine.later(30)
    status = machine.db.shipping()
    assert [each.error is None for each in status.regions] == [False, True]
    assert status.alarm is None
    servers[0].down = False
    machine.later(200)
    assert shared(objects_of(servers[0])) == shared(objects_of(servers[1]))
    machine.db.close()


def test_a_region_that_answers_and_takes_nothing_is_asked_less_and_less_often() -> None:
    """That it can be reached says nothing of what it refuses."""
    machine = new_machine()
    fill(machine, 0, 50)
    machine.db.ship()
    asked: list[str] = []

    def refuse(operation: StoreOperation) -> StoreFault | None:
        if operation.kind != "write" or not operation.name.startswith(MANIFESTS):
            return None
        asked.append(operation.name)
        return StoreFault(error="unavailable")

    machine.server.fault = refuse
    fill(machine, 50, 50)
    machine.later(600)
    assert machine.db.shipping().failures >= 8
    assert len(asked) < 30
    machine.server.fault = None
    machine.later(120)
    assert machine.db.shipping().error is None
    archived(machine.server)
    machine.db.close()


def test_a_bad_timeout_and_time_outs_are_typed() -> None:
    """What waits for an orchestrator that never answers ends."""
    from tests.tiering.shipping import FedMachine

    machine = FedMachine()
    engine = machine.open()
    machine.order.engines.append(engine)
    machine.order.deliver(engine)
    machine.order.order(CreateBucket("b"))
    machine.order.order(Put("b", "k", b"v"))
    machine.order.engines.clear()  # nobody delivers any more
    with pytest.raises(TimedOut):
        engine.ship(timeout=0.3)
    engine.close()


def test_who_ended_between_its_claim_and_the_fork_is_no_rival_of_its_next_life() -> None:
    """Also where that has nothing to upload: it took its own claim for somebody else's, in each life anew."""
    machine = new_machine()
    written = fill(machine, 0, 50)
    machine.db.ship()
    machine.later(30)
    catalogue, epoch = machine.db.catalogue, machine.db.epoch
    client = machine.server.open("the life that ended")
    claim = open_archive(client, CLUSTER_ID).claim(catalogue, epoch, token=machine.randomness.token)
    machine.db.close()
    machine.open()
    machine.later(5)
    assert machine.db.failure is None
    assert machine.db.counted_hwm == machine.db.marks().hwm > 0
    assert machine.db.epoch > claim.epoch
    written |= fill(machine, 100, 10)
    machine.db.ship()
    assert values_in(archived(machine.server)[1]) == written
    machine.db.close()


@pytest.mark.parametrize("what", ["epochs/", "manifest/0"])
def test_a_claim_or_a_manifest_that_was_taken_and_lost_is_missed(what: str) -> None:
    """Who does not see a claim goes on beside it, and nobody finds what no manifest reaches."""
    machine = new_machine()
    written = fill(machine, 0, 50)
    machine.server.fault = lambda each: (
        StoreFault(lost=True) if each.kind == "write" and each.name.startswith(what) else None
    )
    with pytest.raises(StoreCorrupt):
        machine.db.ship()
    assert machine.db.counted_hwm == 0
    assert machine.db.shipping().state == "stopped"
    machine.server.fault = None
    machine.later(60)
    assert machine.db.shipping().state == "idle"
    machine.db.ship()
    assert values_in(archived(machine.server)[1]) == written
    machine.db.close()
