"""What leaves the local disk, and what happens when it is full (tiering/retention.py, database/space.py)."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.tiering.shipping import TieredMachine, archived, tier_options
from tests.tiering.test_shipper import fill, new_machine, values_in

from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.failing_store import StoreFault
from lowwater.errors import DiskFull, RetryError


def contents(db: Any) -> dict[str, bytes]:
    return {found.key: found.value for found in db.scan("b")}


def machine_with(**retention: Any) -> TieredMachine:
    return new_machine(options=tier_options(retention={"check_interval_s": 5.0, **retention}))


def test_shipped_segments_go_by_age() -> None:
    """And every reader goes on: entries, values, the root, the next life."""
    machine = machine_with(age_max_s=100.0)
    written = fill(machine, 0, 200)
    large = {"large": random.Random(1).randbytes(30_000)}
    machine.db.put("b", "large", large["large"])
    machine.db.ship()
    machine.db.flush()
    root = machine.db.root()
    entries = list(machine.db.log())
    machine.later(50)
    assert machine.db.marks().purged == 0
    fill(machine, 0, 1)
    machine.db.delete("b", "00000")
    machine.db.put("b", "00000", written["00000"])
    machine.db.ship()
    machine.db.flush()
    machine.later(80)
    purged = machine.db.marks().purged
    assert purged > 150
    assert machine.db._log.seq_before_first == purged
    assert contents(machine.db) == written | large
    assert list(machine.db.log())[: len(entries)] == entries
    assert list(machine.db.check()) == []
    metrics = machine.db.metrics()
    assert metrics.get_sample_value("lowwater_retention_purged_segments_total") >= 2
    assert metrics.get_sample_value("lowwater_retention_purged_bytes_total") > 100_000
    machine.db.close()
    machine.open()
    assert machine.db.marks().purged == purged
    assert contents(machine.db) == written | large
    assert list(machine.db.log())[: len(entries)] == entries
    assert list(machine.db.check()) == []
    assert root
    machine.db.close()


def test_shipped_segments_go_by_size_which_counts_everything() -> None:
    """Also what may not go yet: then more of the rest goes."""
    machine = machine_with(bytes_max=150_000)
    fill(machine, 0, 500)
    machine.db.ship()
    machine.db.flush()
    machine.later(10)
    segments = machine.db.complete_segments()
    assert machine.db.marks().purged > 0
    assert sum(each.body_bytes for each in segments) + machine.db.opened_bytes <= 150_000
    machine.db.close()


def test_nothing_goes_that_does_not_count() -> None:
    """Recorded as shipped, and seen in no manifest: a copy of this directory may have recorded that."""
    machine = machine_with(age_max_s=0.0)
    fill(machine, 0, 200)
    machine.db.flush()
    server = machine.server
    server.fault = lambda each: (
        StoreFault(error="unavailable")
        if each.kind == "write" and each.name.startswith("manifest/")
        else None
    )
    machine.later(60)
    assert machine.db.marks().hwm > 0
    assert machine.db.counted_hwm == 0
    assert machine.db.marks().purged == 0
    server.fault = None
    machine.later(100)
    assert machine.db.marks().purged > 0
    machine.db.close()


def test_nothing_goes_that_redo_needs() -> None:
    """Pages that were not written yet are made of it."""
    machine = machine_with(age_max_s=0.0)
    written = fill(machine, 0, 200)
    machine.db.ship()
    machine.later(60)
    assert machine.db.marks().purged == 0
    machine.crash("random", random.Random(1))
    machine.open()
    assert contents(machine.db) == written
    machine.db.flush()
    machine.later(60)
    assert machine.db.marks().purged > 0
    machine.db.close()


def test_nothing_goes_that_an_open_transaction_needs() -> None:
    """Its writes may have to be taken back one by one."""
    machine = machine_with(age_max_s=0.0)
    fill(machine, 0, 100)
    txn = machine.db.transaction()
    for number in range(400):
        txn.put("b", f"t{number}", bytes(1000))
    assert machine.db._state.transactions.open, "it was not large enough to be in the log"
    begun = min(machine.db._state.transactions.open)
    fill(machine, 100, 200)
    machine.db.ship()
    machine.db.flush()
    machine.later(30)
    assert machine.db.marks().purged < begun
    txn.abort()
    machine.db.ship()
    machine.db.flush()
    machine.later(30)
    assert machine.db.marks().purged > begun
    machine.db.close()


def test_a_reader_goes_on_while_segments_are_purged_under_it() -> None:
    """From the files to the store, without a gap or a repetition."""
    machine = machine_with(age_max_s=0.0)
    fill(machine, 0, 400)
    machine.db.ship()
    expected = [entry.seq for entry in machine.db.log()]
    reader = iter(machine.db.log())
    seen = [next(reader).seq for _ in range(20)]
    machine.db.flush()
    machine.later(10)
    assert machine.db.marks().purged > 100
    seen += [entry.seq for entry in reader]
    assert seen[: len(expected)] == expected
    assert len(set(seen)) == len(seen)
    moment = datetime.fromtimestamp(0, UTC)
    assert next(iter(machine.db.log(moment))).seq == 1
    machine.db.close()


def purging_life(machine: TieredMachine) -> None:
    machine.open()
    machine.db.create_bucket("b")
    fill(machine, 0, 300)
    machine.db.ship()
    machine.db.flush()
    machine.later(10)
    assert machine.db.marks().purged > 100


def test_a_crash_at_any_operation_of_a_purge_leaves_a_log_that_opens() -> None:
    """The beginning of what is left says what came before it."""
    options = tier_options(retention={"age_max_s": 0.0, "check_interval_s": 5.0})
    machine = TieredMachine(options=options)
    operations: list[int] = []
    machine.files.fault = lambda each: (
        operations.append(each.number) if each.kind == "remove" and "/segment-" in each.path else None
    )
    purging_life(machine)
    assert len(operations) >= 2
    for number in range(operations[0], operations[-1] + 2):
        for after in (False, True):
            machine = TieredMachine(options=options)
            machine.files.crash_at(number, after=after)
            with pytest.raises(SimulatedCrash):
                purging_life(machine)
            machine.crash("random", random.Random(number))
            machine.open()
            assert len(contents(machine.db)) == 300
            assert list(machine.db.check()) == []
            assert [entry.seq for entry in machine.db.log()][:100] == list(range(1, 101))
            machine.later(20)
            assert machine.db.marks().purged > 100
            machine.db.close()


# ------------------------------------------------------------------ room on the disk


RESERVE = 300_000


def full_machine() -> tuple[TieredMachine, dict[str, bytes]]:
    """Filled until writes are refused, while the store is down."""
    machine = TieredMachine(
        options=tier_options(retention={"check_interval_s": 3600.0}), disk_reserve_bytes=RESERVE
    )
    machine.open()
    machine.db.create_bucket("b")
    machine.db.ship()
    machine.server.down = True
    machine.files.free_bytes = RESERVE + 1_500_000
    machine.clock.advance(2)  # it was asked when there was no limit
    written: dict[str, bytes] = {}
    refused = 0
    # What is in memory first gets into pages, which is room that was kept back for them.
    while refused < 2:
        count = len(written)
        try:
            while True:
                written |= fill(machine, len(written), 1)
        except DiskFull as error:
            refusal = error
        assert isinstance(refusal, RetryError)
        assert "free" in refusal.hint
        refused = refused + 1 if len(written) == count else 0
        machine.idle(2.0)
    return machine, written


def test_a_full_disk_refuses_writes_and_poisons_nothing() -> None:
    """Reads go on, a reserve is left, and writes go on by themselves when there is room."""
    machine, written = full_machine()
    assert machine.db.failure is None
    free = machine.files.free_bytes
    assert free is not None
    assert free > RESERVE / 2
    assert contents(machine.db) == written
    for _ in range(3):
        with pytest.raises(DiskFull):
            machine.db.put("b", "no", b"")
        with pytest.raises(DiskFull):
            machine.db.delete("b", "00001")
        with pytest.raises(DiskFull):
            machine.db.put_many("b", [("no", b"")])
    machine.files.free_bytes = free + 10_000_000
    machine.db.put("b", "more", b"1")
    assert machine.db.get("b", "more").value == b"1"
    assert list(machine.db.check()) == []
    machine.db.close()


def test_after_an_outage_a_full_disk_empties_itself() -> None:
    """What fills it is shipped and purged from the reserve, without anybody's help."""
    machine, written = full_machine()
    machine.later(120)
    with pytest.raises(DiskFull):
        machine.db.put("b", "no", b"")
    machine.server.down = False
    machine.later(120)
    with pytest.raises(DiskFull):
        pass_or_full(machine)
    machine.later(30)
    assert machine.db.marks().purged > 100
    written |= fill(machine, 20_000, 50)
    assert contents(machine.db) == written
    machine.db.ship()
    assert values_in(archived(machine.server)[1]).items() >= written.items()
    assert list(machine.db.check()) == []
    machine.db.close()


def pass_or_full(machine: TieredMachine) -> None:
    """A write that is refused asks for room; one that is not shows that there is some already."""
    machine.db.put("b", "asked", b"")
    machine.db.delete("b", "asked")
    raise DiskFull("there was room already")


def test_a_full_disk_can_be_opened_checkpointed_and_shipped() -> None:
    """That is what the reserve is for."""
    machine, written = full_machine()
    machine.crash("random", random.Random(3))
    machine.files.free_bytes = RESERVE - 100_000
    machine.open()
    machine.files.free_bytes = RESERVE - 100_000
    assert contents(machine.db) == written
    with pytest.raises(DiskFull):
        machine.db.put("b", "no", b"")
    # The content is as large as what is left of the reserve.
    machine.files.free_bytes = RESERVE + 1_500_000
    assert machine.db.checkpoint()
    machine.files.free_bytes = RESERVE - 50_000
    machine.server.down = False
    assert machine.db.ship() > 0
    assert values_in(archived(machine.server)[1]) == written
    machine.db.close()


def test_without_a_reserve_what_was_shipped_makes_room_all_the_same() -> None:
    """The disk is then written until it is full, and it need not come to that."""
    machine = TieredMachine(
        options=tier_options(retention={"check_interval_s": 3600.0}), disk_reserve_bytes=0
    )
    machine.open()
    machine.db.create_bucket("b")
    written = fill(machine, 0, 300)
    machine.db.ship()
    machine.later(5)
    assert machine.db.marks().purged == 0
    machine.files.free_bytes = 10_000_000
    machine.clock.advance(2)  # it was asked when there was no limit
    written |= fill(machine, 300, 1)
    machine.later(30)
    assert machine.db.marks().purged > 100
    assert contents(machine.db) == written
    machine.db.close()


def test_the_file_system_is_asked_rarely_while_there_is_room() -> None:
    """It costs as much as a write does."""
    machine = TieredMachine(disk_reserve_bytes=RESERVE)
    machine.open()
    machine.db.create_bucket("b")
    asked: list[Any] = []
    machine.files.fault = lambda each: asked.append(each) if each.kind == "room" else None
    fill(machine, 0, 500)
    assert len(asked) < 10
    machine.db.close()


def test_a_copy_of_what_was_purged_since_is_redone() -> None:
    """The pages are older than the entry that says where the value is now."""
    machine = machine_with(age_max_s=None)
    large = random.Random(1).randbytes(3000)
    machine.db.put("b", "large", large)
    machine.db.propose_seal()
    machine.db.flush()
    machine.db.copy("b", "large", "b", "copy")
    machine.db.ship()
    assert machine.db.purge(machine.db.purgeable_seq()) > 2
    machine.crash("random", random.Random(1))
    machine.open()
    assert contents(machine.db) == {"large": large, "copy": large}
    assert list(machine.db.check()) == []
    machine.db.close()
