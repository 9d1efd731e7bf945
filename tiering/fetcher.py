"""Ranges of stored objects, fetched once: units in memory, units on disk, requests to the store.

Always true:
  - whoever wants what somebody else is fetching waits for it: of each unit there is one request at a time;
  - nothing is trusted here. What was read is verified by the caller, who knows its hash, and forgotten where
    it is wrong: a unit that came damaged over the network must not stay;
  - memory: MEMORY_BYTES of units, and FETCH_BYTES for each call that is under way;
  - in one thread nothing waits: what is read ahead in the background is read by a step, and where that step
    has not run yet, by whoever comes first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from blake3 import blake3

from lowwater.engine.log.tickets import again
from lowwater.engine.seams.interrupts import to_the_end
from lowwater.engine.seams.seams import Clock, Runner, Task
from lowwater.engine.seams.waiting import Event
from lowwater.errors import Corrupt, DataError, LowwaterError, NewerVersion, NotFound
from lowwater.logging import get_logger
from lowwater.metrics import ColdMetrics
from lowwater.tiering.block_cache import OBJECT_BYTES, UNIT_BYTES, BlockCache, UnitKey
from lowwater.tiering.store import Store, at, read_small

_logger = get_logger("cold")

FETCH_UNITS = 16
FETCH_BYTES = FETCH_UNITS * UNIT_BYTES
MEMORY_BYTES = 12 * 2**20
PIECES_BYTES = 8 * 2**20
# So many ranges may wait to be read ahead; a reader that finds no room reads for itself.
AHEAD_MAX = 2

HINT = "run `lowwater scrub` on the archive: it says which objects are damaged, and what to do"

K = TypeVar("K")
T = TypeVar("T")


class BytesInMemory(Generic[K]):
    """The newest bytes of what was read, by key, up to a size."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._items: OrderedDict[K, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> bytes | None:
        with self._lock:
            found = self._items.get(key)
            if found is not None:
                self._items.move_to_end(key)
            return found

    def put(self, key: K, data: bytes) -> None:
        with self._lock:
            former = self._items.pop(key, b"")
            self._items[key] = data
            self._bytes += len(data) - len(former)
            while self._bytes > self._bytes_max:
                self._bytes -= len(self._items.popitem(last=False)[1])

    def forget(self, keys: Iterator[K]) -> None:
        with self._lock:
            for key in keys:
                self._bytes -= len(self._items.pop(key, b""))

    def held(self) -> list[K]:
        with self._lock:
            return list(self._items)


class _Flight:
    """Units that a thread is fetching."""

    def __init__(self) -> None:
        self.done = Event()
        self.units: dict[int, bytes] = {}
        self.error: LowwaterError | None = None


class Fetcher:
    """Reads objects of one store."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        cache: BlockCache | None = None,
        metrics: ColdMetrics | None = None,
        runner: Runner | None = None,
    ) -> None:
        """With a `runner`, sequential readers are read ahead for in the background."""
        self._store = store
        self._clock = clock
        self._cache = cache
        self.metrics = metrics or ColdMetrics()
        if cache is not None:
            self.metrics.watch(
                cache_bytes=lambda: cache.bytes,
                cache_evictions=lambda: cache.evicted,
                cache_damaged=lambda: cache.damaged,
            )
        self._lock = threading.Lock()
        self._memory: BytesInMemory[UnitKey] = BytesInMemory(MEMORY_BYTES)
        # What the callers have verified, and want to look at again without reading it.
        self.pieces: BytesInMemory[tuple[str, int]] = BytesInMemory(PIECES_BYTES)
        self._flights: dict[UnitKey, _Flight] = {}
        self._ahead: deque[tuple[str, int, int, int]] = deque()
        self._task: Task | None = None
        if runner is not None:
            self._task = runner.start("cold-ahead", self._ahead_step)

    def where(self, name: str) -> str:
        """An object, as errors name it."""
        return at(self._store.uri, name)

    @contextmanager
    def query(self) -> Generator[None, None, None]:
        """Around what somebody waits for."""
        started_s = self._clock.monotonic()
        try:
            yield
        finally:
            self.metrics.queried(self._clock.monotonic() - started_s)

    # ------------------------------------------------------------------ reading

    def size_of(self, name: str) -> int:
        """The size that an object has in the store."""
        with self._named(name):
            return self._store.stat(name).size

    def read_whole(self, name: str, size: int) -> bytes:
        """An object of which all is wanted, and which is not kept here."""
        began_s = self._clock.monotonic()
        with self._named(name):
            data = read_small(self._store, name, size)
        self._fetched(name, 0, len(data), began_s, is_range=False)
        if len(data) != size:
            raise Corrupt(
                f"the object has {len(data):,} bytes instead of {size:,}", path=self.where(name), hint=HINT
            )
        return data

    def read(
        self,
        name: str,
        size: int,
        start: int,
        end: int,
        *,
        sequential: bool = False,
        passing: bool = False,
    ) -> bytes:
        """The bytes from `start` to below `end` of an object of this size. What is `passing` is asked for by
        one request, and kept nowhere."""
        assert 0 <= start <= end <= size
        if start == end:
            return b""
        if passing:
            return self._request(name, size, start, end)
        first, last = start // UNIT_BYTES, -(-end // UNIT_BYTES)
        parts: list[bytes] = []
        for unit in range(first, last, FETCH_UNITS):
            parts += self._units(name, size, unit, min(unit + FETCH_UNITS, last), sequential=sequential)
        parts[-1] = parts[-1][: end - (last - 1) * UNIT_BYTES]
        parts[0] = parts[0][start - first * UNIT_BYTES :]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def load(self, name: str, size: int, start: int, end: int) -> None:
        """Bring what is about to be read into memory, by as few requests as possible."""
        first, last = start // UNIT_BYTES, -(-end // UNIT_BYTES)
        for unit in range(first, last, FETCH_UNITS):
            self._units(name, size, unit, min(unit + FETCH_UNITS, last), sequential=True)

    def load_ahead(self, name: str, size: int, start: int, end: int) -> None:
        """Bring a range into memory in the background, where a task there has time for it."""
        if self._task is None or start >= end:
            return
        wanted = (name, size, start, min(end, start + FETCH_BYTES))
        with self._lock:
            # Whoever asks for this has read what was asked for before: that would be fetched in vain.
            for each in [each for each in self._ahead if each[0] == name]:
                self._ahead.remove(each)
            if len(self._ahead) >= AHEAD_MAX:
                return
            self._ahead.append(wanted)
        self._task.wake()

    def _ahead_step(self) -> float | None:
        with self._lock:
            if not self._ahead:
                return None
            wanted = self._ahead.popleft()
        try:
            self.load(*wanted)
        except LowwaterError:
            pass  # who reads there finds out for itself
        return 0

    def forget(self, name: str, size: int) -> None:
        """Drop what is known of an object: something of it was wrong."""
        object_key = self._object_key(name, size)
        self._memory.forget(key for key in self._memory.held() if key.object == object_key)
        self.pieces.forget(key for key in self.pieces.held() if key[0] == name)
        if self._cache is not None:
            self._cache.forget(object_key)

    def twice(self, name: str, stored_bytes: Callable[[], int], read: Callable[[], T]) -> T:
        """What `read` makes of an object and verifies. Where it is wrong, what is kept of the object is
        forgotten and all of it is fetched again: what is wrong then is wrong in the store."""
        try:
            try:
                return read()
            except (DataError, NewerVersion):
                self.forget(name, stored_bytes())
                return read()
        except (DataError, NewerVersion) as error:
            if error.path is None:
                error.path = self.where(name)
            if error.offset is None:
                error.offset = 0  # it is about the object as a whole
            if isinstance(error, DataError):
                error.hint = HINT
            raise

    def close(self) -> None:
        if self._task is not None:
            self._task.stop()

    # ------------------------------------------------------------------ units

    def _object_key(self, name: str, size: int) -> bytes:
        # The same name may stand for other stored bytes: in another store, or compressed by another zstd.
        return blake3(f"{self._store.uri}\0{name}\0{size}".encode()).digest(OBJECT_BYTES)

    def _units(self, name: str, size: int, first: int, last: int, *, sequential: bool) -> list[bytes]:
        """The units from `first` to below `last`: from memory, from those who fetch them, or fetched here."""
        object_key = self._object_key(name, size)
        found: dict[int, bytes] = {}
        while True:
            mine: list[int] = []
            others: dict[int, _Flight] = {}
            own = _Flight()
            try:
                with self._lock:
                    for index in range(first, last):
                        key = UnitKey(object_key, index)
                        if index in found:
                            continue
                        if (data := self._memory.get(key)) is not None:
                            found[index] = data
                        elif (flight := self._flights.get(key)) is not None:
                            others[index] = flight
                        else:
                            mine.append(index)
                    self._flights.update({UnitKey(object_key, index): own for index in mine})
                if mine:
                    own.units = self._fetch(name, size, object_key, mine, sequential=sequential)
                    found |= own.units
                    self._land(own, object_key, mine)
            except BaseException as error:
                own.error = error if isinstance(error, LowwaterError) else None
                try:
                    self._land(own, object_key, mine)
                except BaseException:
                    to_the_end(self._land, own, object_key, mine)
                    raise
                raise
            for index, flight in others.items():
                flight.done.wait()
                if flight.error is not None:
                    raise again(flight.error)
                if index in flight.units:
                    found[index] = flight.units[index]
            if len(found) == last - first:
                return [found[index] for index in range(first, last)]

    def _land(self, flight: _Flight, object_key: bytes, wanted: list[int]) -> None:
        """Nobody has to wait for these units any more. It may be repeated."""
        with self._lock:
            for index, data in flight.units.items():
                self._memory.put(UnitKey(object_key, index), data)
            for index in wanted:
                key = UnitKey(object_key, index)
                if self._flights.get(key) is flight:
                    del self._flights[key]
        flight.done.set()

    def _fetch(
        self, name: str, size: int, object_key: bytes, wanted: list[int], *, sequential: bool
    ) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        if self._cache is not None:
            for index in wanted:
                data = self._cache.get(UnitKey(object_key, index), promote=not sequential)
                if data is not None and len(data) == min(UNIT_BYTES, size - index * UNIT_BYTES):
                    found[index] = data
        missing = [index for index in wanted if index not in found]
        self.metrics.looked_up(hits=len(found), misses=len(missing))
        for run in _runs(missing):
            start = run.start * UNIT_BYTES
            end = min(run.stop * UNIT_BYTES, size)
            data = self._request(name, size, start, end)
            for index in run:
                at = index * UNIT_BYTES - start
                unit = data[at : at + UNIT_BYTES]
                found[index] = unit
                if self._cache is not None:
                    self._cache.put(UnitKey(object_key, index), unit)
        return found

    def _request(self, name: str, size: int, start: int, end: int) -> bytes:
        began_s = self._clock.monotonic()
        with self._named(name):
            data = self._store.read(name, start, end)
        self._fetched(name, start, len(data), began_s, is_range=end - start < size)
        if len(data) != end - start:
            raise Corrupt(
                "the object ends before a part that it has to have",
                path=self.where(name),
                offset=start + len(data),
                hint=HINT,
            )
        return data

    def _fetched(self, name: str, start: int, size: int, began_s: float, *, is_range: bool) -> None:
        self.metrics.fetched(size, is_range=is_range)
        duration_s = self._clock.monotonic() - began_s
        _logger.debug(
            "fetched", object=self.where(name), offset=start, bytes=size, duration_s=round(duration_s, 3)
        )

    @contextmanager
    def _named(self, name: str) -> Generator[None, None, None]:
        """NotFound is for keys: an object that has to be there and is not, is damage."""
        try:
            yield
        except NotFound as error:
            raise Corrupt("the object is not in the store", path=self.where(name), hint=HINT) from error


def _runs(indexes: list[int]) -> Iterator[range]:
    """The numbers as ranges of those that follow one another."""
    start = 0
    for stop in range(1, len(indexes) + 1):
        if stop == len(indexes) or indexes[stop] != indexes[stop - 1] + 1:
            yield range(indexes[start], indexes[stop - 1] + 1)
            start = stop
