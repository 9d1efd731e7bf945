"""The writer: who waits, who leads, what one sync covers, and what ends a segment."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path

import pytest

import lowwater
from lowwater.chaos.clock import SeededRandomness, VirtualClock
from lowwater.chaos.disk import Fault, FaultyFiles, Operation
from lowwater.chaos.runner import StepRunner
from lowwater.chaos.workload import Machine
from lowwater.engine.format.entries import Delete, Put
from lowwater.engine.log import tickets
from lowwater.engine.log.chain import settings_entry
from lowwater.engine.log.directory import CURRENT
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.log.wal import Wal
from lowwater.engine.seams.real import RealFiles
from lowwater.errors import Busy, Closed, InputError, NotFound


class Disk:
    """A disk whose syncs of the current segment a test can hold up, and count."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.stuck = threading.Event()
        self.syncs = 0
        self.files = FaultyFiles(fault=self._fault)

    def _fault(self, operation: Operation) -> Fault | None:
        if operation.kind != "sync" or not operation.path.endswith(CURRENT):
            return None
        self.syncs += 1
        if not self.gate.is_set():
            self.stuck.set()
        return Fault(gate=self.gate)

    def stall(self) -> None:
        self.stuck.clear()
        self.gate.clear()

    def open(self, **options: object) -> Log:
        return Log.open("log", options=LogOptions(**options), seams=Seams(files=self.files))  # type: ignore[arg-type]


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.gate.set()


def put(size: int = 10) -> Put:
    return Put("b", "k", bytes(size))


def in_thread(call: Callable[[], object]) -> Future[object]:
    """The call's outcome, from a thread of its own."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the future carries it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def until(condition: Callable[[], bool]) -> None:
    """Give way to other threads until something that must happen has happened."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.001)


# ---------------------------------------------------------------------------- waiting and leading


def test_nobody_is_told_before_the_sync_that_covers_him(disk: Disk) -> None:
    """All three ways to wait, while the disk stands still."""
    log = disk.open()
    disk.stall()
    blocked = in_thread(lambda: log.append(put()))
    disk.stuck.wait()
    futures = [log.submit(put()) for _ in range(5)]
    others = [in_thread(lambda: log.append(put())) for _ in range(5)]

    async def append_some() -> list[int]:
        return await asyncio.gather(*[log.append_async(put()) for _ in range(5)])

    coroutines = in_thread(lambda: asyncio.run(append_some()))
    until(lambda: log.seq_last == 17)
    assert log.seq_durable == 1
    assert not any(f.done() for f in (blocked, *futures, *others, coroutines))
    assert [entry.seq for entry in log.read()] == [1]
    assert log.append(put(), ack="memory") == 18
    disk.gate.set()
    seqs = [blocked.result(), *[f.result() for f in futures], *[f.result() for f in others]]
    seqs += coroutines.result()  # type: ignore[arg-type]
    assert sorted(seqs) == list(range(2, 18))  # type: ignore[type-var]
    log.close()


def test_all_that_wait_go_out_in_one_sync(disk: Disk) -> None:
    """Group commit: a disk takes as long for one entry as for a thousand."""
    log = disk.open()
    disk.stall()
    first = in_thread(lambda: log.append(put()))
    disk.stuck.wait()
    futures = [log.submit(put()) for _ in range(500)]
    syncs = disk.syncs
    disk.gate.set()
    first.result()
    wait_for(futures)
    assert disk.syncs - syncs == 1
    log.close()


def test_a_batch_is_bounded_and_nothing_is_out_of_order(disk: Disk) -> None:
    """What a crash can tear is one batch."""
    log = disk.open(batch_bytes_max=1000)
    disk.stall()
    first = in_thread(lambda: log.append(put()))
    disk.stuck.wait()
    syncs = disk.syncs
    futures = [log.submit(put(400)) for _ in range(20)]
    disk.gate.set()
    first.result()
    wait_for(futures)
    assert disk.syncs - syncs == 10
    assert [future.result() for future in futures] == list(range(3, 23))
    log.close()


def test_many_threads_get_seqs_that_are_each_their_own(tmp_path: Path) -> None:
    """And each finds its entry under it."""
    log = Log.open(tmp_path / "log", options=LogOptions(segment_bytes=65_536))

    def append(thread: int) -> list[int]:
        return [log.append(Put("b", f"{thread}/{n}", bytes(n))) for n in range(200)]

    threads = [in_thread(lambda thread=thread: append(thread)) for thread in range(8)]
    seqs = [thread.result() for thread in threads]
    entries = {entry.seq: entry for entry in log.read()}
    for thread, mine in enumerate(seqs):
        assert mine == sorted(mine)  # type: ignore[call-overload]
        assert [entries[seq].key for seq in mine] == [f"{thread}/{n}" for n in range(200)]  # type: ignore[attr-defined]
    assert len(entries) == 1601
    assert list(log.check()) == []
    log.close()


@pytest.mark.parametrize("at_once", [1, 3, tickets.WOKEN_AT_ONCE])
def test_threads_that_wait_wake_one_another(
    at_once: int, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tickets, "WOKEN_AT_ONCE", at_once)
    log = disk.open()
    disk.stall()
    leader = in_thread(lambda: log.append(put()))
    disk.stuck.wait()
    others = [in_thread(lambda: log.append(put())) for _ in range(30)]
    until(lambda: log.seq_last == 32)
    disk.gate.set()
    seqs = [each.result(timeout=60) for each in (leader, *others)]
    assert sorted(seqs) == list(range(2, 33))  # type: ignore[type-var]
    log.close()


def test_who_is_interrupted_before_it_wakes_another_does_so_when_it_leaves(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tickets, "WOKEN_AT_ONCE", 1)
    log = disk.open()
    disk.stall()
    leader = in_thread(lambda: log.append(put()))
    disk.stuck.wait()
    others = [in_thread(lambda: log.append(put())) for _ in range(10)]
    until(lambda: log.seq_last == 12)
    interrupted: list[tickets.Ticket] = []

    def wake_next(ticket: tickets.Ticket) -> None:
        if ticket.next is not None and not interrupted:
            interrupted.append(ticket)
            raise KeyboardInterrupt
        tickets.wake_next(ticket)

    monkeypatch.setattr("lowwater.engine.log.wal.wake_next", wake_next)
    disk.gate.set()
    assert leader.result(timeout=60) == 2
    errors = [each.exception(timeout=60) for each in others]
    assert [type(error) for error in errors if error is not None] == [KeyboardInterrupt]
    log.close()


def test_who_is_late_to_wait_wakes_another_all_the_same(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its append is done already, and whom it has to wake is still being found out."""
    monkeypatch.setattr(tickets, "WOKEN_AT_ONCE", 1)
    log = disk.open()
    disk.stall()
    late_seq = 4
    has_left = threading.Event()
    wait_or_lead = Wal._wait_or_lead

    def wait_late(wal: Wal, ticket: tickets.Ticket) -> None:
        if ticket.seq_last == late_seq:
            until(lambda: ticket.done)
        wait_or_lead(wal, ticket)
        if ticket.seq_last == late_seq:
            has_left.set()

    class SlowLoop(asyncio.SelectorEventLoop):
        def __hash__(self) -> int:
            has_left.wait(0.2)
            return super().__hash__()

    monkeypatch.setattr(Wal, "_wait_or_lead", wait_late)
    appended = [in_thread(lambda: log.append(put()))]
    disk.stuck.wait()
    # The second leads when the first is done; the third is late, and has to wake the fourth.
    for seq in range(3, 8):
        appended.append(in_thread(lambda: log.append(put())))
        until(lambda seq=seq: log.seq_last == seq)  # type: ignore[misc]
    # Until it is known whose loop this is, nobody is woken.
    loop = SlowLoop()
    appended.append(in_thread(lambda: loop.run_until_complete(log.append_async(put()))))
    until(lambda: log.seq_last == 8)
    disk.gate.set()
    assert [each.result(timeout=60) for each in appended] == list(range(2, 9))
    loop.close()
    log.close()


def test_a_callback_of_a_future_may_append(disk: Disk) -> None:
    """It runs in the thread that resolved it: if that still led, it would wait for itself."""
    log = disk.open()
    done: Future[int] = Future()

    def again(future: Future[int]) -> None:
        seq = future.result()
        if seq < 30:
            log.submit(put()).add_done_callback(again)
            assert log.append(put()) > seq
        else:
            done.set_result(seq)

    log.submit(put()).add_done_callback(again)
    assert done.result() >= 30
    log.close()


def test_a_callback_that_raises_harms_nobody(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """It is somebody else's code."""
    log = disk.open()

    def fail(_: Future[int]) -> None:
        raise ValueError("mine")

    disk.stall()
    futures = [log.submit(put()) for _ in range(3)]
    disk.stuck.wait()
    futures[0].add_done_callback(fail)
    disk.gate.set()
    assert [future.result() for future in futures] == [2, 3, 4]
    assert log.append(put()) == 5
    log.close()


def test_coroutines_append_and_a_cancelled_one_harms_nobody(disk: Disk) -> None:
    """The entry of a cancelled append may still be written."""
    log = disk.open()

    async def run() -> None:
        assert await log.append_async(put(), put()) == 3
        disk.stall()
        tasks = [asyncio.create_task(log.append_async(put())) for _ in range(10)]
        await asyncio.to_thread(disk.stuck.wait)
        await asyncio.sleep(0)
        tasks[3].cancel()
        disk.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[3], asyncio.CancelledError)
        assert [r for r in results if isinstance(r, int)] == [4, 5, 6, 8, 9, 10, 11, 12, 13]
        assert await log.append_payloads_async([put().encode(1)], seqs=[100]) == 100
        with pytest.raises(InputError):
            await log.append_payloads_async([put().encode(1)], seqs=[99])

    asyncio.run(run())
    log.close()


def test_an_event_loop_that_was_closed_harms_nobody(disk: Disk) -> None:
    """The program that ran it gave up waiting, and its entries are durable all the same."""
    log = disk.open()
    disk.stall()

    async def give_up() -> None:
        task = asyncio.ensure_future(log.append_async(put()))
        await asyncio.sleep(0)
        await asyncio.to_thread(disk.stuck.wait)
        task.cancel()

    asyncio.run(give_up())
    disk.gate.set()
    assert log.append(put()) == 3
    log.close()


def test_memory_acknowledgements_wait_for_the_interval_and_no_longer() -> None:
    """`sync_interval_ms` says how much a crash may take."""
    machine = Machine(LogOptions(sync_interval_ms=100))
    machine.open()
    machine.append_in_memory(machine.put(1))
    machine.idle(0.05)
    assert (machine.log.seq_last, machine.log.seq_durable) == (2, 1)
    machine.idle(0.06)
    assert machine.log.seq_durable == 2
    machine.append_in_memory(machine.put(1))
    machine.append_in_memory(machine.put(1))
    machine.append(machine.put(1))
    assert machine.log.seq_durable == 5, "whoever waits takes all before him along"
    machine.append_in_memory(machine.put(1))
    assert machine.log.sync() == 6
    assert machine.log.sync() == 6


TEN_MINUTES = {"wal": {"fsync_interval_ms": "10 min"}}


def syncs_of(log: Log) -> float:
    return log.registry.get_sample_value("storage_wal_write_duration_seconds_count") or 0


@pytest.mark.parametrize("way", ["append", "submit", "coroutine"])
def test_a_durable_append_waits_for_others_to_join_its_sync(tmp_path: Path, way: str) -> None:
    """`wal.fsync_interval_ms` says how long. Opening a log waits for nobody, and `sync` ends the waiting."""
    with Log.open(tmp_path / "log", config=TEN_MINUTES) as log:
        syncs = syncs_of(log)

        def append() -> None:
            if way == "append":
                log.append(put())
            elif way == "submit":
                log.submit(put()).result()
            else:
                asyncio.run(log.append_async(put()))

        waiting = []
        for number in range(5):
            waiting.append(in_thread(append))
            until(lambda number=number: log.seq_last == 2 + number)
        assert log.seq_durable == 1
        assert log.sync() == 6
        for each in waiting:
            each.result()
        assert syncs_of(log) == syncs + 1


def test_a_full_batch_of_durable_appends_waits_for_no_more(tmp_path: Path) -> None:
    """Group commit by time and size: whichever comes first."""
    config = {"wal": {"fsync_interval_ms": "10 min", "fsync_max_batch_bytes": 5000}}
    with Log.open(tmp_path / "log", config=config) as log:
        waiting = []
        for number in range(4):
            waiting.append(in_thread(lambda: log.append(put(1500))))
            until(lambda number=number: log.seq_last >= 2 + number)
        for each in waiting[:3]:
            each.result()
        assert log.seq_durable >= 4
        log.close()
        waiting[3].result()
    with Log.open(tmp_path / "log") as log:
        assert log.seq_durable == 5


def test_a_durable_append_that_nobody_joins_goes_out_when_its_time_has_come(tmp_path: Path) -> None:
    """By itself, once and again, and from several threads."""
    with Log.open(tmp_path / "log", config={"wal": {"fsync_interval_ms": 5}}) as log:
        assert log.append(put()) == 2
        threads = [in_thread(lambda: [log.append(put()) for _ in range(20)]) for _ in range(4)]
        for each in threads:
            each.result()
        assert log.append(put()) == 83


def test_an_interrupt_while_others_may_join_loses_nothing(tmp_path: Path) -> None:
    """Nothing is being written then: the log goes on, and the entry is written by somebody else."""
    with Log.open(tmp_path / "log", config=TEN_MINUTES) as log:
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            main = threading.main_thread().ident
            assert main is not None

            def interrupt_main() -> None:
                until(lambda: log.wal._gathering)
                signal.pthread_kill(main, signal.SIGINT)

            thread = in_thread(interrupt_main)
            with pytest.raises(KeyboardInterrupt):
                log.append(put())
            thread.result()
        finally:
            signal.signal(signal.SIGINT, previous)
        assert log.sync() == 2
        assert [entry.kind for entry in log.read()] == ["create", "put"]


def test_an_answer_that_rests_on_a_waiting_write_ends_the_waiting(tmp_path: Path) -> None:
    """A reader waits for no writer to come, nor does what the database writes for itself."""
    with lowwater.open(tmp_path / "db", config=TEN_MINUTES) as db:
        done = in_thread(lambda: db.create_bucket("b"))
        until(lambda: db.marks().applied >= 2)
        assert list(db.buckets()) == ["b"]
        done.result()
        done = in_thread(lambda: db.put("b", "k", b"v"))
        until(lambda: db.marks().applied >= 3)
        assert db.marks().durable == 2
        assert db.get("b", "k").value == b"v"
        done.result()
        db.checkpoint()


def test_a_full_batch_of_memory_acknowledgements_does_not_wait_for_the_interval() -> None:
    """Bytes in memory are bytes that a crash takes."""
    machine = Machine(LogOptions(sync_interval_ms=3_600_000, batch_bytes_max=5000))
    machine.open()
    for _ in range(6):
        machine.append_in_memory(machine.put(1000))
        machine.idle()
    assert machine.log.seq_durable >= 5


def test_who_waits_for_a_future_is_woken_also_where_a_callback_of_it_exits(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    log = disk.open()
    disk.stall()
    future = log.submit(put())
    disk.stuck.wait()
    waiting = in_thread(future.result)
    until(lambda: bool(future._sleepers))  # type: ignore[attr-defined]
    future.add_done_callback(lambda _: sys.exit())
    disk.gate.set()
    assert waiting.result(timeout=60) == 2
    log.close()


@pytest.mark.parametrize("way", ["submit", "memory"])
def test_who_is_interrupted_before_it_wakes_the_writer_does_so_when_it_leaves(
    way: str, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = disk.open()
    writer = log._wal._writer
    wake = writer.wake
    wakes: list[int] = []

    def interrupted() -> None:
        wakes.append(1)
        if len(wakes) == 1:
            raise KeyboardInterrupt
        wake()

    monkeypatch.setattr(writer, "wake", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.submit(put()) if way == "submit" else log.append(put(), ack="memory")
    # It was given the lead: nobody else wakes it.
    assert log.submit(put()).result(timeout=60) == 3
    log.close()


@pytest.mark.parametrize("raised", [SystemExit(1), asyncio.CancelledError(), ValueError("no")])
def test_the_writer_outlives_what_a_callback_raises(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    """Else whoever submits next would wait for ever."""
    reported: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: reported.append(arguments.exc_value))

    def leave(_: object) -> None:
        raise raised

    log = disk.open()
    disk.stall()
    first = log.submit(put())
    disk.stuck.wait()
    first.add_done_callback(leave)
    disk.gate.set()
    assert first.result(60) == 2
    assert log.submit(put()).result(60) == 3
    log.close()
    assert reported == ([] if isinstance(raised, Exception) else [raised])


def test_an_interrupted_sync_before_a_new_segment_does_no_harm(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it waited behind stays in the queue: the first batch of a segment goes alone also where that comes
    before it."""
    log = disk.open(batch_bytes_max=1000, segment_bytes=65_536)
    disk.stall()
    futures = [log.submit(put())]
    disk.stuck.wait()
    while not log.wal._queue or not log.wal._queue[-1].ends_segment:
        futures.append(log.submit(put(300)))

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(log.wal, "_wait_or_lead", interrupt)
        with pytest.raises(KeyboardInterrupt):
            log.sync()
    futures += [log.submit(put(300)) for _ in range(10)]
    disk.gate.set()
    assert [future.result() for future in futures] == list(range(2, len(futures) + 2))
    log.close()
    with disk.open() as log:
        assert [entry.seq for entry in log.read()] == list(range(1, len(futures) + 2))


# ---------------------------------------------------------------------------- back-pressure


def test_whoever_appends_to_a_full_queue_waits_or_is_told(disk: Disk) -> None:
    """Memory is bounded whatever the disk does; nothing is dropped."""
    log = disk.open(queue_bytes_max=10_000)
    disk.stall()
    first = in_thread(lambda: log.append(put()))
    disk.stuck.wait()
    appended = 5
    for _ in range(appended):
        log.submit(put(1000), timeout_s=0)
    for call in (
        lambda: log.submit(put(1000), timeout_s=0),
        lambda: log.append(put(1000), timeout_s=0.01),
        lambda: log.append(put(1000), ack="memory", timeout_s=0),
        lambda: log.append_group(put(1000), put(1000), timeout_s=0),
        lambda: log.append_payloads([put(1000).encode(1)], timeout_s=0),
    ):
        with pytest.raises(Busy):
            call()
    waiting = [
        in_thread(lambda: log.append(put(1000))),
        in_thread(lambda: log.submit(put(1000)).result()),
        in_thread(lambda: log.append(put(1000), ack="memory")),
        in_thread(lambda: asyncio.run(log.append_async(put(1000)))),
        in_thread(lambda: log.append(put(50_000))),  # more than the queue takes: it goes alone
    ]
    assert log.wal._queued_bytes <= 10_000
    disk.gate.set()
    first.result()
    seqs = [future.result() for future in waiting]
    assert sorted(seqs) == list(range(appended + 3, appended + 8))  # type: ignore[type-var]
    assert log.sync() == appended + 7
    assert list(log.check()) == []
    log.close()


def test_a_full_queue_in_one_thread_is_written_by_whoever_appends() -> None:
    """A simulation has no thread that would make room."""
    machine = Machine(LogOptions(queue_bytes_max=3000))
    machine.open()
    for _ in range(50):
        machine.submit(machine.put(700))
        machine.append_in_memory(machine.put(700))
    machine.sync()
    machine.oracle.verify(machine.log)


# ---------------------------------------------------------------------------- closing


def test_closing_writes_what_was_queued(disk: Disk) -> None:
    """Also what nobody waits for."""
    log = disk.open(sync_interval_ms=3_600_000)
    log.append(put(), ack="memory")
    log.close()
    log.close()
    for call in (lambda: log.append(put()), lambda: log.submit(put()), log.sync, log.seal):
        with pytest.raises(Closed):
            call()
    with disk.open() as log:
        assert log.seq_last == 2


@pytest.mark.parametrize("round_", range(20))
def test_an_append_that_meets_a_close_is_durable_or_refused(round_: int, tmp_path: Path) -> None:
    """It never hangs, and never claims what is not so."""
    directory = tmp_path / "log"
    log = Log.open(directory, options=LogOptions(queue_bytes_max=20_000, segment_bytes=65_536))
    started = threading.Barrier(5)

    def append(number: int) -> list[int]:
        seqs = []
        started.wait()
        try:
            while True:
                if number % 4 == 0:
                    seqs.append(log.append(put(100)))
                elif number % 4 == 1:
                    seqs.append(log.submit(put(1000)).result())
                elif number % 4 == 2:
                    seqs.append(log.append(put(100), ack="memory"))
                else:
                    seqs.append(asyncio.run(log.append_async(put(2000))))
        except Closed:
            return seqs

    threads = [in_thread(lambda n=number: append(n)) for number in range(4)]
    started.wait()
    for _ in range(round_):
        log.append(put())
    log.close()
    promised = [seq for thread in threads for seq in thread.result(timeout=60)]  # type: ignore[attr-defined]
    with Log.open(directory) as log:
        held = {entry.seq for entry in log.read()}
        assert held >= set(promised)
        assert list(log.check()) == []


CTRL_C = """
import ctypes, random, sys, threading
from lowwater.engine.log import tickets
from lowwater.engine.format.entries import Put
from lowwater.engine.log.log import Log, LogOptions
from lowwater.errors import LowwaterError

tickets.WOKEN_AT_ONCE = 2
rng = random.Random(int(sys.argv[2]))
raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
interrupted = poisoned = 0
for round_ in range(40):
    log = Log.open(sys.argv[1], options=LogOptions(segment_bytes=65536, queue_bytes_max=4000))
    promised = []
    def append():
        try:
            while True:
                promised.append(log.append(Put("b", "k", bytes(rng.randrange(1000)))))
        except (KeyboardInterrupt, LowwaterError):
            pass
    threads = [threading.Thread(target=append) for _ in range(int(sys.argv[3]))]
    for thread in threads:
        thread.start()
    victim = threads[round_ % len(threads)]
    while len(promised) < rng.randrange(50):
        pass
    interrupted += raise_in(ctypes.c_ulong(victim.ident), ctypes.py_object(KeyboardInterrupt))
    victim.join()
    # The others go on, and nobody waits for the thread that has left.
    try:
        log.append(Put("b", "after", b""))
    except LowwaterError:
        poisoned += 1
    log.close()
    for thread in threads:
        thread.join()
    with Log.open(sys.argv[1]) as log:
        held = {entry.seq for entry in log.read()}
        assert held.issuperset(promised)
print("interrupted", interrupted, "poisoned", poisoned)
"""


@pytest.mark.parametrize(("seed", "threads"), [(1, 4), (2, 4), (3, 16)])
def test_ctrl_c_in_an_appending_thread_leaves_nobody_waiting(seed: int, threads: int, tmp_path: Path) -> None:
    """It can come while the thread leads, waits, was just given the lead, or has to wake another."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", CTRL_C, str(tmp_path / "log"), str(seed), str(threads)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "interrupted 40 poisoned 0\n"


SIGINT = """
import os, signal, sys, threading
from lowwater.engine.format.entries import Put
from lowwater.engine.log.log import Log
from lowwater.chaos.disk import Fault, FaultyFiles
from lowwater.engine.log.log import Seams

gate = threading.Event()
stuck = threading.Event()
def fault(operation):
    if operation.kind == "sync" and operation.path.endswith("current.log") and not gate.is_set():
        stuck.set()
        return Fault(gate=gate)
files = FaultyFiles()
log = Log.open("log", seams=Seams(files=files))
files.fault = fault
leader = threading.Thread(target=log.append, args=(Put("b", "k", b"1"),))
leader.start()
stuck.wait()
interrupted = threading.Event()
def once(*_):
    if not interrupted.is_set():
        interrupted.set()
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, once)
def interrupt():
    while log.seq_last < 3:
        pass
    # A signal that comes just before a thread begins to wait does not wake it: that is Python's affair.
    while not interrupted.wait(0.01):
        os.kill(os.getpid(), signal.SIGINT)
interrupting = threading.Thread(target=interrupt)
interrupting.start()
try:
    log.append(Put("b", "k", b"2"))
except KeyboardInterrupt:
    print("interrupted")
interrupting.join()
gate.set()
leader.join()
print(log.append(Put("b", "k", b"3")), [entry.seq for entry in log.read()])
log.close()
"""


def test_ctrl_c_while_waiting_for_another_leader_leaves_the_log_usable() -> None:
    """The entry was queued, so it is written; only nobody waits for it any more."""
    done = subprocess.run(
        [sys.executable, "-c", SIGINT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "interrupted\n4 [1, 2, 3, 4]\n"


# ---------------------------------------------------------------------------- segments


def segments_of(log: Log) -> list[tuple[int, int]]:
    return [(segment.seq_first, segment.seq_last) for segment in log.wal.store.segments]


def test_a_segment_ends_after_the_frame_that_fills_it(tmp_path: Path) -> None:
    """However the frames came: one call of ten, or ten calls."""
    for name, calls in (("one", [10]), ("ten", [1] * 10), ("some", [3, 4, 3])):
        with Log.open(tmp_path / name, options=LogOptions(segment_bytes=4096)) as log:
            for count in calls:
                log.append(*[put(1000)] * count)
            assert segments_of(log) == [(1, 5), (6, 9)]


def test_a_group_lies_in_one_segment_also_where_it_fills_it(tmp_path: Path) -> None:
    """All or nothing, and a segment is what is shipped."""
    with Log.open(tmp_path / "log", options=LogOptions(segment_bytes=4096)) as log:
        log.append(put(1000), put(1000))
        log.append_group(*[put(1000)] * 9, Delete("b", "k"))
        log.append(put())
        assert segments_of(log) == [(1, 13)]
        groups = [entry.extras.group_seq_last for entry in log.read(4) if entry.extras]
        assert groups == [13] * 10
        assert list(log.check()) == []


def test_sealing_ends_a_segment_and_an_empty_one_cannot_end(tmp_path: Path) -> None:
    """A seal of nothing would be a segment of nothing but itself, again and again."""
    with Log.open(tmp_path / "log") as log:
        assert log.seal() == 2
        with pytest.raises(NotFound):
            log.seal()
        log.append(put())
        assert log.seal() == 4
        assert segments_of(log) == [(1, 2), (3, 4)]
        assert list(log.check()) == []


def test_a_change_of_settings_holds_from_the_next_segment_on(tmp_path: Path) -> None:
    """What shapes a segment is in force from its first frame to its last."""
    with Log.open(tmp_path / "log", options=LogOptions(segment_bytes=65_536)) as log:
        log.append(put())
        log.append(settings_entry({"segment_bytes": 4096, "block_bytes": 1024}))
        log.append(*[put(1000)] * 5)
        segments = log.wal.store.segments
        assert segments_of(log) == [(1, 3), (4, 7)]
        assert [s.header.segment_bytes for s in segments] == [65_536, 4096]
        assert [s.header.block_bytes for s in segments] == [256 * 1024, 1024]
    with Log.open(tmp_path / "log", options=LogOptions(segment_bytes=2**20)) as log:
        assert log.chain.settings.segment_bytes == 4096
        assert list(log.check()) == []


def test_seqs_may_have_holes_and_times_never_fall(tmp_path: Path) -> None:
    """An orchestrator's positions are its own business."""
    with Log.open(tmp_path / "log", options=LogOptions(segment_bytes=4096)) as log:
        start = log.chain.time_us
        seqs = [5, 6, 1000, 2**40, 2**63, 2**64 - 10]
        log.append_payloads(
            [Put("b", "k", bytes(900)).encode(start + time) for time in (50, 40, 60, 10, 20, 70)], seqs=seqs
        )
        entries = list(log.read(2))
        assert [entry.seq for entry in entries] == seqs
        assert [entry.time_us - start for entry in entries] == [50, 50, 60, 60, 60, 70]
        assert list(log.check()) == []


def test_what_is_old_is_sealed_and_what_is_idle_is_not() -> None:
    """So that it is shipped. A log of nothing but seals would ship seals for ever."""
    clock = VirtualClock()
    machine = Machine(LogOptions(segment_age_max_s=60))
    machine.clock = clock
    machine.files = FaultyFiles(clock=clock)
    machine.open()
    machine.append(machine.put(1))
    machine.idle(59)
    assert segments_of(machine.log) == []
    machine.idle(2)
    assert segments_of(machine.log) == [(1, 3)]
    for _ in range(10):
        machine.idle(61)
    assert segments_of(machine.log) == [(1, 3)]
    machine.oracle.entries.clear()
    machine.log.append(Put("b", "k", b""))
    for _ in range(3):
        machine.idle(61)
    assert segments_of(machine.log) == [(1, 3), (4, 5)]
    machine.close()


def test_a_log_in_memory_is_a_log() -> None:
    """For tests, and for state that nobody wants to keep."""
    with Log.open(None) as log:
        log.append(put())
        log.seal()
        assert [entry.kind for entry in log.read()] == ["create", "put", "seal"]
        assert list(log.check()) == []


def test_a_simulation_and_a_program_write_the_same_bytes(tmp_path: Path) -> None:
    """What the simulation finds out must hold for the real thing."""
    contents = []
    for files, directory in ((FaultyFiles(), "log"), (None, str(tmp_path / "log"))):
        clock = VirtualClock()
        seams = Seams(clock=clock, randomness=SeededRandomness(1))
        if files is not None:
            seams = Seams(files=files, clock=clock, randomness=SeededRandomness(1), runner=StepRunner(clock))
        log = Log.open(directory, options=LogOptions(segment_bytes=4096), seams=seams)
        for number in range(20):
            clock.advance(1)
            log.append(Put("b", f"k{number}", bytes(number * 50)))
        log.seal()
        log.close()
        names = [name for name in seams.files.list(directory) if name.startswith("segment")]
        contents.append([(name, seams.files.open(f"{directory}/{name}").read_at(0, 10**6)) for name in names])
    assert contents[0] == contents[1]
    assert len(contents[0]) > 2


def test_no_footer_is_begun_before_the_name_of_its_segment_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss may take the name back. What is in the current segment then ends with its last frame."""
    path, crashed = tmp_path / "log", tmp_path / "crashed"
    sync = RealFiles.sync_directory

    def syncing(files: RealFiles, directory: str) -> None:
        if not (path / CURRENT).exists() and not crashed.exists():
            sealer = threading.Thread(target=log.wal.store.seal_all)
            sealer.start()
            sealer.join(0.5)
            shutil.copytree(path, crashed)
            (complete,) = (
                each for each in crashed.iterdir() if each.name.startswith(("sealing-", "segment-"))
            )
            complete.rename(crashed / CURRENT)
        sync(files, directory)

    with Log.open(path) as log:
        log.append(Put("b", "k", b"."))
        monkeypatch.setattr(RealFiles, "sync_directory", syncing)
        log.seal()
        last = log.seq_last
    assert crashed.exists()
    with Log.open(crashed) as log:
        assert log.seq_last == last
        assert list(log.check()) == []
