"""tiering/cold.py and tiering/remote_segment.py: what was shipped is read where it lies."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path

import pytest
from tests.tiering.archived import Archived, CountingStore, Request, name_of, seqs_in, ship

from lowwater.chaos.clock import SeededRandomness, VirtualClock
from lowwater.chaos.runner import StepRunner
from lowwater.engine.format.entries import Put
from lowwater.engine.format.records import VALUE_PLACE
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.log.ring import Chunk
from lowwater.engine.log.values import ValueReader, segments_of
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.seams.real import ThreadRunner
from lowwater.engine.state.catalogue import Catalogue
from lowwater.errors import Busy, Corrupt, DataError, LowwaterError, NewerVersion
from lowwater.tiering.block_cache import UNIT_BYTES, BlockCache
from lowwater.tiering.remote_segment import RemoteSegment, SegmentReading
from lowwater.tiering.store import at as at_name

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
COMPRESSIONS = ["none", "zstd"]


def small_log(compression: str, *, count: int = 60, holes: bool = False) -> tuple[Log, VirtualClock]:
    """A log in memory of many small segments; time goes by, and seqs may have holes."""
    clock = VirtualClock()
    seams = Seams(files=MemoryFiles(), clock=clock, randomness=SeededRandomness(1), runner=StepRunner(clock))
    options = LogOptions(
        segment_bytes=8192,
        block_bytes=1024,
        compression=compression,
        ring_bytes_max=0,  # type: ignore[arg-type]
    )
    log = Log.open("log", options=options, seams=seams)
    rng = random.Random(count)
    for number in range(2, count + 2):
        clock.advance(1)
        value = rng.randbytes(rng.choice([0, 10, 500, 3000]))
        payload = Put("b", f"k{number % 7}", value).encode(clock.now_us())
        log.append_payloads([payload], seqs=[number * 10 if holes else number])
    return log, clock


class Shipped:
    def __init__(self, log: Log, clock: VirtualClock) -> None:
        self.log = log
        self.clock = clock
        self.store = CountingStore()
        self.catalogue = Catalogue()
        self.archived = Archived(self.store, self.catalogue)
        log.seal()
        ship(log, self.store, self.catalogue)
        self.entries = list(log.read())


@pytest.fixture(params=[(c, h) for c in COMPRESSIONS for h in (False, True)], ids=str)
def shipped(request: pytest.FixtureRequest) -> Iterator[Shipped]:
    compression, holes = request.param
    log, clock = small_log(compression, holes=holes)
    yield Shipped(log, clock)
    log.close()


# ---------------------------------------------------------------------------- how little is fetched


class Large:
    """10,000 entries of 10 KiB in one segment."""

    def __init__(self, directory: Path, compression: str) -> None:
        options = LogOptions(
            segment_bytes=2**28,
            compression=compression,
            sync_mode="none",
            ring_bytes_max=0,  # type: ignore[arg-type]
        )
        rng = random.Random(7)
        with Log.open(directory, options=options) as log:
            for first in range(0, 10_000, 500):
                log.append(*[Put("b", f"k{n}", rng.randbytes(10 * 1024)) for n in range(first, first + 500)])
            log.seal()
            self.store = CountingStore()
            self.catalogue = Catalogue()
            ship(log, self.store, self.catalogue)
        self.archived = Archived(self.store, self.catalogue)
        (self.descriptor,) = self.catalogue.segments
        self.stored_bytes = self.store.stat(name_of(self.descriptor)).size


@pytest.fixture(scope="module", params=COMPRESSIONS)
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Large:
    return Large(tmp_path_factory.mktemp("large") / "log", request.param)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["told", "stops"])
def test_a_tenth_of_a_segment_costs_at_most_15_percent_of_its_bytes(large: Large, how: str) -> None:
    """Whether the reader says where it ends, or simply stops."""
    cold = large.archived.cold(runner=ThreadRunner())
    if how == "told":
        assert seqs_in(cold.chunks_after(999, 2000)) == list(range(1000, 2001))
    else:
        chunks = cold.chunks_after(999, large.descriptor.last)
        seen: list[int] = []
        while not seen or seen[-1] < 2000:
            seen += seqs_in(islice(chunks, 1))
        assert seen[:1001] == list(range(1000, 2001))
    large.archived.fetcher.close()
    assert large.store.fetched_bytes <= 0.15 * large.stored_bytes
    assert len(large.store.requests) <= 20


@pytest.mark.slow
def test_a_cold_value_costs_three_requests_and_one_where_the_footer_is_known(large: Large) -> None:
    """Latency is what a store has most of."""
    cold = large.archived.cold()
    segment = cold.segment(large.descriptor)
    found = segment.frame_of(5000)
    assert found is not None
    offset, frame = found
    value = frame[-10 * 1024 :]

    cold = large.archived.cold()
    assert cold.value(large.descriptor.first, offset, len(value)) == value
    assert len(large.store.requests) <= 3
    assert all(request.size <= 4 * UNIT_BYTES for request in large.store.requests)
    large.store.requests.clear()
    elsewhere = offset + 3000 * (len(frame))
    assert cold.frame_seq(large.descriptor.first, offset) == 5000
    assert not large.store.requests
    cold.value(large.descriptor.first, elsewhere, len(value))
    assert len(large.store.requests) == 1


@pytest.mark.slow
def test_a_key_is_found_by_its_hash_without_reading_the_segment(large: Large) -> None:
    """Reads below the horizon go this way."""
    cold = large.archived.cold()
    frames = list(cold.segment(large.descriptor).frames_of_key(b"b", b"k4711"))
    assert len(frames) == 1
    assert int.from_bytes(frames[0][1][:8], "little") == 4713
    assert list(cold.segment(large.descriptor).frames_of_key(b"b", b"no such key")) == []
    assert len(large.store.requests) <= 4
    assert large.store.fetched_bytes <= 0.02 * large.stored_bytes


@pytest.mark.slow
def test_a_scan_makes_few_large_requests(large: Large) -> None:
    """4 MiB each, once it is known that somebody reads on."""
    cold = large.archived.cold(runner=ThreadRunner())
    assert seqs_in(cold.chunks_after(0, large.descriptor.last)) == list(range(1, 10_003))
    large.archived.fetcher.close()
    assert large.store.fetched_bytes <= 1.03 * large.stored_bytes
    assert len(large.store.requests) <= large.stored_bytes / 2**20
    assert max(request.size for request in large.store.requests) >= 3.5 * 2**20
    large.store.requests.clear()
    reading = SegmentReading()
    reading.used_bytes = 2**26
    segment = large.archived.cold().segment(large.descriptor)
    assert seqs_in(segment.chunks_after(0, large.descriptor.last, reading)) == list(range(1, 10_003))
    assert len(large.store.requests) <= 8 + large.stored_bytes / (3 * 2**20)


# ---------------------------------------------------------------------------- the same entries


def test_every_start_and_end_gives_the_entries_between(shipped: Shipped) -> None:
    """Of raw and compressed segments, with and without holes in the seqs."""
    cold = shipped.archived.cold()
    seqs = [entry.seq for entry in shipped.entries]
    assert len(shipped.catalogue.segments) > 5
    for start in range(0, seqs[-1] + 2, 3):
        for stop in (start + 1, start + 35, seqs[-1]):
            chunks = list(cold.chunks_after(start, stop))
            read = seqs_in(iter(chunks))
            wanted = [seq for seq in seqs if seq > start]
            assert read == wanted[: len(read)]
            assert not wanted or read[-1] >= min(stop, seqs[-1])
            assert all(a.seq_last == b.seq_before for a, b in pairwise(chunks))


def test_entries_are_those_of_the_log(shipped: Shipped) -> None:
    """Not their seqs only."""
    from lowwater.engine.log.reader import entries_of

    cold = shipped.archived.cold()
    assert list(entries_of(cold.chunks_after(0, 10**9), 0, None, "")) == shipped.entries


def test_every_time_begins_where_the_log_says(shipped: Shipped) -> None:
    """A start by time that lies only in the store."""
    cold = shipped.archived.cold()
    times = sorted({entry.time_us for entry in shipped.entries})
    for time_us in [0, *times, *(time + 1 for time in times)]:
        before = [entry.seq for entry in shipped.entries if entry.time_us < time_us]
        assert cold.seq_before_time(time_us) == (before[-1] if before else 0), time_us


def test_frames_and_keys_are_found(shipped: Shipped) -> None:
    """By seq and by the index of keys, with the newest first."""
    cold = shipped.archived.cold()
    by_key: dict[str, list[int]] = {}
    for descriptor in shipped.catalogue.segments:
        segment = cold.segment(descriptor)
        inside = [e for e in shipped.entries if descriptor.first <= e.seq <= descriptor.last]
        for seq in range(descriptor.first, descriptor.last + 1):
            found = segment.frame_of(seq)
            assert (found is not None) == any(entry.seq == seq for entry in inside)
            assert found is None or int.from_bytes(found[1][:8], "little") == seq
        for number in range(8):
            seqs = [int.from_bytes(f[:8], "little") for _, f in segment.frames_of_key(b"b", b"k%d" % number)]
            assert seqs == [e.seq for e in reversed(inside) if e.key == f"k{number}"]
            by_key.setdefault(f"k{number}", []).extend(seqs)
        assert sum(segment.kinds().values()) == descriptor.frame_count
    assert any(by_key.values())


# ---------------------------------------------------------------------------- damage


def error_of(read: Callable[[], object], wanted: object) -> LowwaterError | None:
    """The error that says that something is damaged; without one, the answer has to be right."""
    try:
        assert read() == wanted
    except (DataError, NewerVersion) as error:
        return error
    return None


def frames_in(chunks: Iterator[Chunk]) -> bytes:
    return b"".join(chunk.data[chunk.start : chunk.end] for chunk in chunks)


def found_by_key(segment: RemoteSegment, number: int) -> list[tuple[int, bytes]]:
    return list(segment.frames_of_key(b"b", b"k%d" % number))


@pytest.mark.long
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_flipped_byte_that_is_read_is_found(compression: str) -> None:
    """Never returned: the error names the object and an offset, or the answer is right all the same."""
    log, clock = small_log(compression, count=9)
    shipped = Shipped(log, clock)
    descriptor = next(iter(shipped.catalogue.segments))
    name = name_of(descriptor)
    stored = shipped.store.objects.data[name]
    frames = frames_in(shipped.archived.cold().chunks_after(0, descriptor.last))
    keys = [found_by_key(shipped.archived.cold().segment(descriptor), number) for number in range(7)]
    before_last = shipped.archived.cold().seq_before_time(descriptor.time_max_us)
    found = Counter[str]()

    def unless_found(what: str, read: Callable[[], object], wanted: object) -> None:
        error = error_of(read, wanted)
        if error is not None:
            found[what] += 1
            assert error.path == at_name(shipped.store.uri, name)
            assert error.offset is not None

    for at in range(len(stored)):
        flipped = bytes([stored[at] ^ 1 << at % 8])
        shipped.store.objects.data[name] = stored[:at] + flipped + stored[at + 1 :]
        cold = shipped.archived.cold()
        segment = cold.segment(descriptor)
        unless_found("scan", lambda cold=cold: frames_in(cold.chunks_after(0, descriptor.last)), frames)
        unless_found("keys", lambda segment=segment: [found_by_key(segment, n) for n in range(7)], keys)
        unless_found("time", lambda cold=cold: cold.seq_before_time(descriptor.time_max_us), before_last)
    # All of a raw segment is under some hash that a scan compares; of a compressed one, all but what a
    # decompressor does not look at, and the stored hash, which is for those who read the whole object.
    assert found["scan"] >= len(stored) - (0 if compression == "none" else 200)
    assert found["keys"] > 0
    log.close()


def test_damage_on_the_way_heals(shipped: Shipped) -> None:
    """What came wrong once is forgotten, also from the cache on disk, and fetched again."""
    rng = random.Random(3)
    cache = BlockCache(MemoryFiles(), "cache", 2**24)
    seqs = [entry.seq for entry in shipped.entries]
    damaged: set[tuple[str, int]] = set()

    def flip_once(request: Request, data: bytes) -> bytes:
        if (request.name, request.start) in damaged or not data:
            return data
        damaged.add((request.name, request.start))
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]

    shipped.store.change = flip_once
    for _ in range(3):
        cold = shipped.archived.cold(cache=cache)
        assert seqs_in(cold.chunks_after(0, 10**9)) == seqs
    assert damaged
    shipped.store.change = lambda _, data: data
    cold = shipped.archived.cold(cache=cache)
    assert seqs_in(cold.chunks_after(0, 10**9)) == seqs
    assert not [request for request in shipped.store.requests if request.kind == "read"]


def test_another_segment_under_the_name_is_not_accepted(shipped: Shipped) -> None:
    """Sound in itself, and not what the log says."""
    first, second, *_ = shipped.catalogue.segments
    shipped.store.objects.data[name_of(first)] = shipped.store.objects.data[name_of(second)]
    with pytest.raises(DataError) as raised:
        list(shipped.archived.cold().chunks_after(0, 10**9))
    assert name_of(first) in str(raised.value)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_segment_that_differs_in_its_content_alone_is_not_accepted(compression: str) -> None:
    """Of the same seqs, times and sizes, and sound: another history's. Only the hash tells."""
    lives = []
    for content in (b"a", b"b"):
        clock = VirtualClock()
        seams = Seams(
            files=MemoryFiles(), clock=clock, randomness=SeededRandomness(1), runner=StepRunner(clock)
        )
        options = LogOptions(segment_bytes=8192, compression=compression)  # type: ignore[arg-type]
        with Log.open("log", options=options, seams=seams) as log:
            for number in range(20):
                log.append(Put("b", f"k{number}", content * 1000))
            lives.append(Shipped(log, clock))
    mine, others = lives
    first, other = next(iter(mine.catalogue.segments)), next(iter(others.catalogue.segments))
    assert first._replace(hash=b"") == other._replace(hash=b"")
    mine.store.objects.data[name_of(first)] = others.store.objects.data[name_of(other)]
    with pytest.raises(Corrupt) as raised:
        list(mine.archived.cold().chunks_after(0, 10**9))
    assert name_of(first) in str(raised.value)


def test_a_missing_or_short_object_is_damage_and_named(shipped: Shipped) -> None:
    """NotFound would be taken for a key that is not there."""
    first, second, *_ = shipped.catalogue.segments
    stored = shipped.store.objects.data.pop(name_of(second))
    cold = shipped.archived.cold()
    chunks = cold.chunks_after(0, 10**9)
    seen: list[int] = []
    with pytest.raises(Corrupt) as raised:
        seen.extend(chunk.seq_last for chunk in chunks)
    assert name_of(second) in str(raised.value)
    assert seen[-1] == first.last
    for cut in (0, 1, 100, len(stored) // 2, len(stored) - 1):
        shipped.store.objects.data[name_of(second)] = stored[:cut]
        with pytest.raises((DataError, NewerVersion)) as any_raised:
            list(shipped.archived.cold().chunks_after(first.last, 10**9))
        assert name_of(second) in str(any_raised.value)


# ---------------------------------------------------------------------------- errors of the store


def test_after_any_error_of_the_store_a_reader_goes_on_where_it_stood(shipped: Shipped) -> None:
    """Whichever request fails: no entry is lost, none comes twice."""
    seqs = [entry.seq for entry in shipped.entries]
    shipped.log.purge(shipped.catalogue.hwm)
    for failing in range(1, 12):
        cold = shipped.archived.cold()
        shipped.log.set_cold_source(cold)
        count = 0

        def fail(_: Request, failing: int = failing) -> None:
            nonlocal count
            count += 1
            if count % failing == 0:
                raise Busy("the store has no time")

        shipped.store.before = fail
        seen: list[int] = []
        failures = 0
        while not seen or seen[-1] < seqs[-1]:
            try:
                entries = shipped.log.read(seen[-1] + 1 if seen else "earliest")
                seen.extend(entry.seq for entry in entries)
            except Busy:
                failures += 1
                assert failures < 500
                if failing <= 2 and failures > 3:
                    shipped.store.before = lambda _: None
        shipped.store.before = lambda _: None
        assert seen == seqs
        assert failures or count < failing


def test_sixteen_readers_of_one_cold_block_make_one_request(shipped: Shipped) -> None:
    """The others wait for it; and they all learn of it when it fails."""
    descriptor = next(iter(shipped.catalogue.segments))
    found = shipped.archived.cold().segment(descriptor).frame_of(descriptor.last)
    assert found is not None
    offset, frame = found
    cold = shipped.archived.cold()
    cold.segment(descriptor).kinds()
    cold._fetcher.forget(name_of(descriptor), shipped.store.stat(name_of(descriptor)).size)
    shipped.store.requests.clear()
    arrived = threading.Semaphore(0)
    go = threading.Event()
    fails = True

    def wait(_: Request) -> None:
        go.wait(60)
        if fails:
            raise Busy("no time")

    shipped.store.before = wait

    def read() -> int:
        arrived.release()
        return cold.frame_seq(descriptor.first, offset)

    for fails in (True, False):
        go.clear()
        with ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(read) for _ in range(16)]
            for _ in futures:
                arrived.acquire()
            # One has the flight; the others are about to look for it, and none can have finished.
            while not cold._fetcher._flights:
                pass
            go.set()
            results = [future.exception() or future.result() for future in futures]
        if not fails:
            assert results == [descriptor.last] * 16
            assert len(shipped.store.requests) == 1
        else:
            assert all(isinstance(result, Busy) for result in results)
    assert int.from_bytes(frame[:8], "little") == descriptor.last


# ---------------------------------------------------------------------------- store, then local


def test_a_log_that_begins_above_is_read_from_the_store_on(shipped: Shipped) -> None:
    """As after a restore: a directory that has the newest segments only."""
    seqs = [entry.seq for entry in shipped.entries]
    purged = shipped.log.purge(seqs[-1])
    shipped.log.close()
    files = shipped.log.wal.files
    seams = Seams(files=files, clock=shipped.clock, runner=StepRunner(shipped.clock))
    with Log.open("log", options=LogOptions(ring_bytes_max=0), seams=seams) as log:
        assert log.seq_before_first == purged == shipped.catalogue.segments[-2].last
        log.set_cold_source(shipped.archived.cold())
        assert [entry.seq for entry in log.read()] == seqs
        for start in [1, *seqs, *(seq + 1 for seq in seqs)]:
            assert [entry.seq for entry in log.read(start)] == [seq for seq in seqs if seq >= start]
        for entry in shipped.entries:
            at = EPOCH + timedelta(microseconds=entry.time_us)
            wanted = [each.seq for each in shipped.entries if each.time_us >= entry.time_us]
            assert [each.seq for each in log.read(at)] == wanted
            assert log.payload_at(entry.seq) is not None
            assert log.seq_at_us(entry.time_us) == max(
                each.seq for each in shipped.entries if each.time_us <= entry.time_us
            )
        assert log.payload_at(seqs[-1] + 5) is None
        assert [entry.seq for entry in log.read("latest")] == []
        assert log.append(Put("b", "k", b"v")) == seqs[-1] + 1
        assert [entry.seq for entry in log.read()] == [*seqs, seqs[-1] + 1]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("seed", range(25))
def test_every_order_of_purging_shipping_writing_and_reading_gives_each_entry_once(
    seed: int, compression: str
) -> None:
    """Step by step: several readers, each at its own place, while segments go away under them."""
    rng = random.Random(seed)
    log, clock = small_log(compression, count=30)
    store = CountingStore()
    catalogue = Catalogue()
    archived = Archived(store, catalogue)
    log.set_cold_source(archived.cold(runner=StepRunner(clock)))
    readers: list[tuple[Iterator[object], list[int], int]] = []
    crossed = 0
    for _ in range(120):
        action = rng.choice(["read", "read", "read", "open", "write", "ship", "purge"])
        if action == "open":
            start = rng.randint(1, log.seq_durable)
            readers.append((log.read(start), [], start))
        elif action == "write":
            for _ in range(rng.randint(1, 8)):
                log.append(Put("b", "k", rng.randbytes(700)))
        elif action == "ship":
            ship(log, store, catalogue, rng.randint(1, 3))
        elif action == "purge" and catalogue.hwm:
            before = log.seq_before_first
            log.purge(rng.randint(before, catalogue.hwm))
            crossed += log.seq_before_first > before
        elif readers:
            reader, seen, _ = rng.choice(readers)
            seen += [entry.seq for entry in islice(reader, rng.randint(1, 12))]  # type: ignore[attr-defined]
    for reader, seen, start in readers:
        seen += [entry.seq for entry in reader]  # type: ignore[attr-defined]
        assert seen == list(range(start, start + len(seen)))
        assert seen
    log.set_cold_source(archived.cold())
    assert [entry.seq for entry in log.read()] == list(range(1, log.seq_durable + 1))
    log.close()


def test_every_interleaving_of_one_purge_and_one_read_gives_each_entry_once() -> None:
    """All places at which the purge can come, and all it can take."""
    for entries_before in range(0, 26, 1):
        log, clock = small_log("none", count=25)
        shipped = Shipped(log, clock)
        log.set_cold_source(shipped.archived.cold())
        ends = [descriptor.last for descriptor in shipped.catalogue.segments]
        reader = log.read()
        seen = [entry.seq for entry in islice(reader, entries_before)]
        for end in ends:
            log.purge(end)
            seen += [entry.seq for entry in islice(reader, 1)]
        seen += [entry.seq for entry in reader]
        assert seen == [entry.seq for entry in shipped.entries]
        log.close()


@pytest.mark.slow
def test_threads_that_read_while_segments_are_purged_see_each_entry_once(tmp_path: Path) -> None:
    """Real threads, real files: writers, a shipper that purges, and readers from the first entry on."""
    store = CountingStore()
    catalogue = Catalogue()
    archived = Archived(store, catalogue)
    options = LogOptions(segment_bytes=65536, ring_bytes_max=20_000, sync_mode="none")
    cache = BlockCache(MemoryFiles(), "cache", 2**20)
    total = 6000
    errors: list[BaseException] = []
    with Log.open(tmp_path / "log", options=options) as log:
        log.set_cold_source(archived.cold(cache=cache, runner=ThreadRunner()))
        done = threading.Event()

        def guarded(call: object) -> None:
            try:
                call()  # type: ignore[operator]
            except BaseException as error:  # noqa: BLE001 - told at the end
                errors.append(error)
                done.set()

        def write() -> None:
            rng = random.Random(1)
            while log.seq_last < total:
                log.append(*[Put("b", f"k{n}", rng.randbytes(500)) for n in range(20)])

        def ship_and_purge() -> None:
            while not done.is_set():
                ship(log, store, catalogue, 2)
                if catalogue.hwm:
                    log.purge(catalogue.hwm)

        seen: list[list[int]] = [[] for _ in range(4)]

        def read(number: int) -> None:
            for entry in log.read(follow=True):
                seen[number].append(entry.seq)
                if entry.seq >= total or done.is_set():
                    return

        threads = [
            threading.Thread(target=guarded, args=(call,))
            for call in (write, *(lambda number=number: read(number) for number in range(4)))
        ]
        shipper = threading.Thread(target=guarded, args=(ship_and_purge,))
        for thread in (*threads, shipper):
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        shipper.join()
        archived.fetcher.close()
        assert not errors, errors
        assert log.seq_before_first > 0
        for each in seen:
            assert each == list(range(1, total + 1))


# ---------------------------------------------------------------------------- values


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_large_values_come_from_the_store_when_their_segment_is_gone(compression: str) -> None:
    """Whole, in parts, and by the seq of their frame, also where they lie across blocks."""
    log, clock = small_log(compression, count=40)
    shipped = Shipped(log, clock)
    values = ValueReader(segments_of(log, log.wal.files), "log", lambda: log.cold_source)
    cold = shipped.archived.cold()
    places = []
    for descriptor in shipped.catalogue.segments:
        for entry in shipped.entries:
            if (
                entry.kind == "put"
                and len(entry.value) >= 500
                and descriptor.first <= entry.seq <= descriptor.last
            ):
                found = cold.segment(descriptor).frame_of(entry.seq)
                assert found is not None
                place = VALUE_PLACE.pack(descriptor.first, found[0], len(entry.value), bytes(32))
                places.append((place, entry))
    assert len(places) > 10
    local = [values.read(place) for place, _ in places]
    assert local == [entry.value for _, entry in places]
    log.purge(log.seq_durable)
    values.forget_before(log.seq_durable)
    with pytest.raises(Corrupt):
        values.read(places[0][0])
    log.set_cold_source(cold)
    for place, entry in places:
        assert values.read(place) == entry.value
        assert values.read_range(place, 100, 333) == entry.value[100:333]
        assert values.read_range(place, 7, 7) == b""
        assert values.frame_seq(place) == entry.seq
    values.close()
    log.close()


def test_a_place_that_holds_no_value_is_damage(shipped: Shipped) -> None:
    """A wrong reference must not return other bytes of the segment."""
    cold = shipped.archived.cold()
    first = next(iter(shipped.catalogue.segments))
    for segment_first, offset, length in (
        (first.first + 1, 128, 10),
        (first.first, 128, 2**20),
        (first.first, first.body_bytes, 10),
        (first.first, 0, 10),
        (10**12, 128, 10),
    ):
        with pytest.raises(DataError):
            cold.value(segment_first, offset, length)


# ---------------------------------------------------------------------------- memory

READ_A_GIB = """
import sys
import psutil
from lowwater.engine.state.catalogue import SegmentDescriptor
from lowwater.engine.format.entries import decode_frames
from lowwater.engine.seams.real import RealClock, RealFiles, ThreadRunner
from lowwater.tiering.block_cache import BlockCache
from lowwater.tiering.cold import ColdLog
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.memory_store import MemoryStore
from lowwater.tiering.store import FoundObject

path, cache_directory, *fields = sys.argv[1:]
fields = [bytes.fromhex(field[1:]) if field[0] == "h" else int(field) for field in fields]
descriptor = SegmentDescriptor(*fields)

class FileStore(MemoryStore):
    def read(self, name, start=0, end=None):
        with open(path, "rb") as file:
            file.seek(start)
            return file.read() if end is None else file.read(end - start)

    def stat(self, name):
        import os
        return FoundObject(name, os.stat(path).st_size)

class One:
    hwm = descriptor.last
    def segments_from(self, seq):
        return iter([descriptor])
    def segment_of(self, seq):
        return descriptor

def rss():
    return psutil.Process().memory_info().rss

cache = BlockCache(RealFiles(), cache_directory, 2**31) if cache_directory else None
fetcher = Fetcher(FileStore(), clock=RealClock(), cache=cache, runner=ThreadRunner())
cold = ColdLog(fetcher, One(), lambda _: "segment")
list(zip(cold.chunks_after(0, 3), range(1)))
before = highest = rss()
total = 0
for _ in range(2 if cache is not None else 1):
    for chunk in cold.chunks_after(0, descriptor.last):
        for entry in decode_frames(chunk.data, chunk.start, chunk.end, verify=False):
            total += len(entry.value)
            highest = max(highest, rss())
fetcher.close()
print(total, highest - before)
"""


@pytest.mark.long
@pytest.mark.parametrize(("compression", "cached"), [("none", True), ("none", False), ("zstd", False)])
def test_a_gib_is_read_back_in_64_mib_of_memory(tmp_path: Path, compression: str, cached: bool) -> None:
    """One object of a gigabyte, entries of a megabyte in it, with and without the cache on disk."""
    import subprocess
    import sys

    options = LogOptions(segment_bytes=2**31, compression=compression, sync_mode="none", ring_bytes_max=0)  # type: ignore[arg-type]
    block = random.Random(5).randbytes(2**20)
    with Log.open(tmp_path / "log", options=options) as log:
        for number in range(1024):
            log.append(Put("b", f"k{number}", number.to_bytes(4, "little") + block))
        log.seal()
        log.wal.store.seal_all()
        (segment,) = log.wal.store.segments
        path = segment.path
    from lowwater.engine.format.format import HEADER_BYTES, SegmentHeader
    from lowwater.engine.log.compress import compress_segment
    from lowwater.engine.log.directory import read_trailer
    from lowwater.engine.seams.real import RealFiles

    file = RealFiles().open(path)
    header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
    trailer = read_trailer(file, file.size())
    if compression == "zstd":
        with open(tmp_path / "stored", "wb") as stored:
            compress_segment(file, stored.write)
        os.unlink(path)
        path = str(tmp_path / "stored")
    file.close()
    fields = (
        1, trailer.seq_first, trailer.seq_last, trailer.segment_hash, trailer.file_bytes, trailer.body_bytes,
        header.block_bytes, header.compression, trailer.frame_count, trailer.time_min_us, trailer.time_max_us,
    )  # fmt: skip
    arguments = [f"h{field.hex()}" if isinstance(field, bytes) else str(field) for field in fields]
    done = subprocess.run(
        [sys.executable, "-c", READ_A_GIB, path, str(tmp_path / "cache") if cached else "", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    total, grown = map(int, done.stdout.split())
    assert total >= 2**30
    print("grown", grown / 2**20)
    assert grown <= 64 * 2**20
