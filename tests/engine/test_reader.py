"""Reading: one ordered stream over sealed segments, unsealed ones, the active file and the live tail."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import pytest
from tests.engine.log_frames import frames_from

from lowwater.chaos.disk import Fault, FaultyFiles, Operation
from lowwater.chaos.workload import Machine
from lowwater.engine.format.entries import Entry, Put
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.log.reader import SealedReader, place_of
from lowwater.engine.log.ring import Chunk
from lowwater.engine.seams.real import RealFile, RealFiles
from lowwater.errors import Corrupt, NotFound

SMALL = LogOptions(segment_bytes=4096, block_bytes=1024)


def put(number: int = 0, size: int = 100) -> Put:
    return Put("b", f"k{number}", bytes(size))


def seqs_of(entries: Iterator[Entry]) -> list[int]:
    return [entry.seq for entry in entries]


@pytest.fixture(params=["ring", "files", "reopened"])
def holes(request: pytest.FixtureRequest) -> Machine:
    """A log with holes and times, in all the states that a segment goes through: read from memory where the
    ring has it, or from files, or by another life."""
    machine = Machine(LogOptions(segment_bytes=4096, block_bytes=1024, ring_bytes_max=2**20))
    if request.param != "ring":
        machine.options = LogOptions(segment_bytes=4096, block_bytes=1024, ring_bytes_max=0)
    machine.open()
    for number in range(60):
        machine.clock.advance(10)
        machine.append_with_holes(number % 7 + 1, machine.put(150), machine.put(10))
        if number < 30:
            machine.idle()  # footers for the first half only
    assert len({segment.sealed for segment in machine.log.wal.store.segments}) == (2 if request.param else 1)
    if request.param == "reopened":
        machine.crash("keep", random.Random(1))
        machine.open()
    return machine


def test_reading_begins_at_any_seq_also_in_a_hole(holes: Machine) -> None:
    """Whoever knows where he was must not know which seqs exist."""
    seqs = sorted(holes.oracle.entries)
    for start in range(seqs[-1] + 3):
        expected = seqs[bisect_left(seqs, start) :]
        assert seqs_of(holes.log.read(start)) == expected, start
    assert seqs_of(holes.log.read("earliest")) == seqs
    assert seqs_of(holes.log.read("latest")) == []
    assert list(holes.log.read(2**64 - 1)) == []
    assert list(holes.log.read()) == [holes.oracle.entries[seq] for seq in seqs]


def test_reading_begins_at_any_time(holes: Machine) -> None:
    """All entries at or after it, and none before."""
    entries = [holes.oracle.entries[seq] for seq in sorted(holes.oracle.entries)]
    epoch = datetime.fromtimestamp(0, UTC)
    for entry in entries:
        for offset_us in (-1, 0, 1):
            time_us = entry.time_us + offset_us
            start = epoch + timedelta(microseconds=time_us)
            assert seqs_of(holes.log.read(start)) == [e.seq for e in entries if e.time_us >= time_us]
    assert seqs_of(holes.log.read(epoch)) == [entry.seq for entry in entries]
    assert seqs_of(holes.log.read(datetime(2200, 1, 1, tzinfo=UTC))) == []


def test_a_payload_is_found_by_its_seq_and_a_hole_is_none(holes: Machine) -> None:
    """How a repeated delivery is told from a different one."""
    for seq in range(1, max(holes.oracle.entries) + 2):
        assert (holes.log.payload_at(seq) is not None) == (seq in holes.oracle.entries)


def test_a_frame_is_located_by_its_seq_in_whatever_state_its_segment_is(holes: Machine) -> None:
    """What a copy refers to is where the page says that it is, for ever."""
    log = holes.log
    log.sync()
    frames = frames_from(log, holes.files, 0)
    places = {frame.seq: (frame.segment_first, frame.offset) for frame in frames}
    assert set(places) == set(holes.oracle.entries)
    for seq in range(max(places) + 3):
        assert place_of(log.wal, seq) == places.get(seq)


@pytest.mark.parametrize("seal", [False, True], ids=["current", "sealed"])
def test_locating_a_frame_reads_little_of_a_long_segment(tmp_path: Path, seal: bool) -> None:
    """Each copy of a large value does it."""
    read = 0

    class CountingFile(RealFile):
        def read_at(self, offset: int, size: int) -> bytes:
            nonlocal read
            data = super().read_at(offset, size)
            read += len(data)
            return data

    with Log.open(tmp_path / "log") as log:
        log.append(*[put(number) for number in range(20_000)])
        if seal:
            log.seal()
            log.wal.store.seal_all()
        real = log.wal.files

        class CountingFiles(RealFiles):
            def open(
                self, path: str, *, write: bool = False, create: bool = False, sequential: bool = False
            ) -> RealFile:
                file = RealFiles.open(self, path)
                counting = CountingFile(file._fd)
                file._fd = -1
                return counting

        log.wal.files = CountingFiles()
        assert place_of(log.wal, 10_000) is not None
        log.wal.files = real
    assert 0 < read < 8192


def test_a_reader_that_was_begun_ends_with_what_was_durable_then(tmp_path: Path) -> None:
    """Without `follow` it must end, however fast others append."""
    with Log.open(tmp_path / "log", options=SMALL) as log:
        log.append(put())
        reader = log.read()
        log.append(*[put(size=500)] * 20)
        assert seqs_of(reader) == [1, 2]


def test_a_reader_loses_nothing_while_its_segment_is_sealed_under_it(tmp_path: Path) -> None:
    """The file gets a footer and another name; the entries do not move."""
    with Log.open(tmp_path / "log", options=LogOptions(ring_bytes_max=0, segment_bytes=2**22)) as log:
        for _ in range(300):
            log.append(put(size=10_000))
        reader = log.read()
        first = list(islice(reader, 5))
        log.seal()
        log.append(put())
        until_sealed(log)
        assert [entry.seq for entry in first] + seqs_of(reader) == list(range(1, 302))


def until_sealed(log: Log) -> None:
    pause = threading.Event()
    while not all(segment.sealed for segment in log.wal.store.segments):
        pause.wait(0.001)


def test_a_segment_can_be_opened_at_any_moment_of_its_sealing() -> None:
    """Its name and what the writer knows of it change together: a reader in between found nothing there."""
    gate, stuck = threading.Event(), threading.Event()

    def fault_of(operation: Operation) -> Fault | None:
        if operation.kind == "sync_directory" and armed:
            stuck.set()
            return Fault(gate=gate)
        return None

    armed = False
    files = FaultyFiles(fault=fault_of)
    log = Log.open("log", options=LogOptions(segment_bytes=4096, ring_bytes_max=0), seams=Seams(files=files))
    renamed = threading.Event()

    def watch(operation: Operation) -> Fault | None:
        nonlocal armed
        if operation.kind == "rename" and "sealing" in operation.path:
            armed = True
            renamed.set()
        return fault_of(operation)

    files.fault = watch
    appending = threading.Thread(target=lambda: log.append(*[put(size=1000)] * 5))
    appending.start()
    renamed.wait()
    stuck.wait()
    # The sixth lies in the next segment: it may be durable by then.
    seqs = seqs_of(log.read())
    assert seqs in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
    gate.set()
    appending.join()
    log.close()


# ---------------------------------------------------------------------------- following


def follow(log: Log, start: int | str, count: int) -> Future[list[int]]:
    """The first `count` entries from there, in a thread."""
    future: Future[list[int]] = Future()
    begun = threading.Event()

    def run() -> None:
        try:
            reader = log.read(start, follow=True)  # type: ignore[arg-type]
            begun.set()
            future.set_result([entry.seq for entry in islice(reader, count)])
        except BaseException as error:  # noqa: BLE001 - the future carries it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    begun.wait()
    return future


@pytest.mark.parametrize("ring_bytes_max", [0, 3000, 2**26])
def test_sixteen_readers_see_every_entry_once_while_writers_rotate(
    tmp_path: Path, ring_bytes_max: int
) -> None:
    """From the ring where they keep up, from files where they do not, without a seam between the two."""
    options = LogOptions(segment_bytes=32_768, block_bytes=4096, ring_bytes_max=ring_bytes_max)
    log = Log.open(tmp_path / "log", options=options)
    readers = [follow(log, 1 + 20 * number, 2401 - 20 * number) for number in range(14)]
    readers += [follow(log, "earliest", 2401), follow(log, 0, 2401)]

    def write(number: int) -> None:
        rng = random.Random(number)
        for _ in range(300):
            if rng.random() < 0.5:
                log.append(put(size=rng.randrange(400)), put())
            else:
                log.append_group(put(size=rng.randrange(400)), put())

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    for number, reader in enumerate(readers):
        seqs = reader.result(timeout=60)
        assert seqs == list(range(seqs[0], 2402)), number
    assert len(log.wal.store.segments) > 5
    log.close()


def test_a_reader_never_sees_what_a_crash_could_take_back() -> None:
    """Neither in the file, where it stands already, nor in the ring."""
    gate, stuck = threading.Event(), threading.Event()

    def fault_of(operation: Operation) -> Fault | None:
        if operation.kind == "sync" and operation.path.endswith("current.log"):
            stuck.set()
            return Fault(gate=gate)
        return None

    files = FaultyFiles()
    log = Log.open("log", seams=Seams(files=files))
    files.fault = fault_of
    following = follow(log, 1, 2)
    future = log.submit(put())
    stuck.wait()
    assert seqs_of(log.read()) == [1]
    assert log.payload_at(2) is None
    assert not following.done()
    gate.set()
    assert future.result() == 2
    assert following.result() == [1, 2]
    assert seqs_of(log.read()) == [1, 2]
    log.close()


def test_following_from_the_latest_sees_what_comes_and_not_what_was(tmp_path: Path) -> None:
    """The start is taken when reading is asked for, not when it begins."""
    with Log.open(tmp_path / "log") as log:
        log.append(put())
        reader = log.read("latest", follow=True)
        log.append(put(), put())
        assert [entry.seq for entry in islice(reader, 2)] == [3, 4]


@pytest.mark.parametrize("round_", range(10))
def test_following_ends_when_the_log_closes_and_not_before_its_last_entry(
    tmp_path: Path, round_: int
) -> None:
    """Closing writes what was queued; a reader that ended before that would have missed it."""
    log = Log.open(tmp_path / "log", options=LogOptions(sync_interval_ms=3_600_000))
    seen: list[int] = []
    readers = [threading.Thread(target=lambda: seen.extend(seqs_of(log.read(follow=True)))) for _ in range(2)]
    for reader in readers:
        reader.start()
    log.append(put())
    for _ in range(round_ + 1):
        log.append(put(), ack="memory")
    log.close()
    for reader in readers:
        reader.join(60)
        assert not reader.is_alive()
    assert sorted(seen) == sorted([*range(1, 4 + round_)] * 2)


def test_a_slow_reader_goes_on_from_files_where_the_ring_has_lost_its_place(tmp_path: Path) -> None:
    """It never holds up a writer, and never skips."""
    options = LogOptions(segment_bytes=8192, ring_bytes_max=2000)
    with Log.open(tmp_path / "log", options=options) as log:
        reader = log.read(1, follow=True)
        seen = [next(reader).seq]
        for number in range(50):
            for _ in range(5):
                log.append(put(number, 300))
            seen += [entry.seq for entry in islice(reader, 3)]
        assert log.wal.ring.bytes <= 2000 + 1000
        seen += [entry.seq for entry in islice(reader, 251 - len(seen))]
        assert seen == list(range(1, 252))


# ---------------------------------------------------------------------------- colder sources


def purge(log: Log, count: int) -> list[Chunk]:
    """Remove the first segments as retention does, and keep what was in them."""
    chunks = []
    for segment in log.wal.store.segments[:count]:
        file = log.wal.files.open(segment.path)
        chunks += SealedReader(file).chunks_after(0)
        file.close()
    assert log.purge(chunks[-1].seq_last) == chunks[-1].seq_last
    return chunks


class Archive:
    def __init__(self, chunks: list[Chunk]) -> None:
        self.all = chunks
        self.asked: list[tuple[int, int]] = []

    def chunks_after(self, seq: int, seq_stop: int) -> Iterator[Chunk]:
        self.asked.append((seq, seq_stop))
        return (chunk for chunk in self.all if seq < chunk.seq_last and chunk.seq_before < seq_stop)

    def seq_before_time(self, _time_us: int) -> int | None:
        return 0


@pytest.fixture
def purged(tmp_path: Path) -> Iterator[tuple[Log, list[Chunk]]]:
    """A log of 41 entries whose first three segments are gone."""
    directory = tmp_path / "log"
    with Log.open(directory, options=SMALL) as log:
        for number in range(40):
            log.append(put(number, 500))
    log = Log.open(directory, options=LogOptions(ring_bytes_max=0))
    chunks = purge(log, 3)
    log.close()
    with Log.open(directory, options=LogOptions(ring_bytes_max=0)) as log:
        yield log, chunks


def test_without_its_early_segments_a_log_opens_and_says_where_it_begins(
    purged: tuple[Log, list[Chunk]],
) -> None:
    """They were shipped and purged; "earliest" is what is left."""
    log, chunks = purged
    oldest = chunks[-1].seq_last + 1
    assert log.seq_first == oldest
    assert seqs_of(log.read()) == list(range(oldest, 42))
    assert seqs_of(log.read(oldest)) == list(range(oldest, 42))
    for start in (1, oldest - 1):
        with pytest.raises(NotFound) as raised:
            next(log.read(start))
        assert raised.value.seq == start
        assert str(oldest) in raised.value.hint
    assert log.payload_at(1) is None
    assert log.payload_at(oldest) is not None
    assert list(log.check()) == []
    assert log.append(put()) == 42


def test_a_colder_source_comes_before_the_directory_without_a_seam(purged: tuple[Log, list[Chunk]]) -> None:
    """Tiering brings one: the reader must not notice."""
    log, chunks = purged
    archive = Archive(chunks)
    log.set_cold_source(archive)
    for start in (0, 1, 2, 5, chunks[-1].seq_last, chunks[-1].seq_last + 1, 30):
        assert seqs_of(log.read(start)) == list(range(max(start, 1), 42))
    assert seqs_of(log.read()) == list(range(1, 42))
    assert seqs_of(log.read(datetime(2001, 1, 1, tzinfo=UTC))) == list(range(1, 42))
    assert archive.asked[0] == (0, chunks[-1].seq_last)
    asked = len(archive.asked)
    assert seqs_of(log.read(35)) == list(range(35, 42))
    assert len(archive.asked) == asked, "what is here is not fetched"


@pytest.mark.parametrize("missing", [0, 1, -1])
def test_a_gap_in_a_colder_source_is_an_error(purged: tuple[Log, list[Chunk]], missing: int) -> None:
    """Holes are legal, so only the links between chunks tell a gap."""
    log, chunks = purged
    del chunks[missing]
    log.set_cold_source(Archive(chunks))
    with pytest.raises((Corrupt, NotFound)):
        seqs_of(log.read())


def test_a_colder_source_that_repeats_itself_is_an_error(purged: tuple[Log, list[Chunk]]) -> None:
    """Twice is as wrong as never."""
    log, chunks = purged
    log.set_cold_source(Archive([*chunks, chunks[-1]]))
    with pytest.raises(Corrupt):
        seqs_of(log.read())


# ---------------------------------------------------------------------------- memory

READ_MUCH = """
import sys
import psutil
from lowwater.engine.format.entries import Put
from lowwater.engine.log.log import Log, LogOptions

def rss():
    return psutil.Process().memory_info().rss

with Log.open(sys.argv[1], options=LogOptions(ring_bytes_max=0, sync_mode="none")) as log:
    for _ in range(200):
        log.append(*[Put("b", "k", bytes(10_000))] * 100)
with Log.open(sys.argv[1], options=LogOptions(ring_bytes_max=0)) as log:
    sum(1 for _ in zip(log.read(), range(1000)))
    before = highest = rss()
    for number, entry in enumerate(log.read()):
        if number % 500 == 0:
            highest = max(highest, rss())
    print(number, highest - before)
"""


@pytest.mark.long
def test_reading_takes_no_more_memory_for_200_mb(tmp_path: Path) -> None:
    """A reader's memory is one chunk."""
    done = subprocess.run(
        [sys.executable, "-c", READ_MUCH, str(tmp_path / "log")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    number, grown = map(int, done.stdout.split())
    assert number == 20_000
    assert grown < 32 * 2**20
