"""A store whose calls are counted for Prometheus: how many, how long, how many bytes, and what failed.

Always true: it answers as the store does. An object that is missing is an answer, and no failure; calls that
are made again below this count as one, and each repetition by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from lowwater.engine.seams.seams import Clock
from lowwater.errors import NotFound
from lowwater.metrics import StoreMetrics
from lowwater.tiering.checksums import Checksum, Hashing
from lowwater.tiering.store import FoundObject, Part, Store

T = TypeVar("T")


class MeasuredStore:
    """Fulfils `Store`. The store is its own from now on."""

    def __init__(self, store: Store, clock: Clock, metrics: StoreMetrics) -> None:
        self.uri = store.uri
        self._store = store
        self._clock = clock
        self._metrics = metrics
        metrics.watch(lambda: getattr(store, "calls_repeated", 0))

    @property
    def hashing(self) -> Hashing | None:
        return self._store.hashing

    def write(self, name: str, parts: Iterable[Part], *, size: int | None) -> bool | None:
        return self._written(parts, lambda passing: self._store.write(name, passing, size=size))

    def replace(self, name: str, parts: Iterable[Part], *, size: int | None) -> None:
        self._written(parts, lambda passing: self._store.replace(name, passing, size=size))

    def _written(self, parts: Iterable[Part], write: Callable[[Iterator[Part]], T]) -> T:
        written = 0

        def counted() -> Iterator[Part]:
            nonlocal written
            for part in parts:
                written += len(part)
                yield part

        try:
            return self._call(lambda: write(counted()))
        finally:
            self._metrics.passed(written=written)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        data = self._call(lambda: self._store.read(name, start, end))
        self._metrics.passed(read=len(data))
        return data

    def stat(self, name: str) -> FoundObject:
        return self._call(lambda: self._store.stat(name))

    def checksum(self, name: str) -> Checksum:
        return self._call(lambda: self._store.checksum(name))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[FoundObject]:
        # Who asks for the first object waits for a page of them; the others are there by then, mostly.
        found = self._store.list(prefix, start_after)
        first = self._call(lambda: next(found, None))
        if first is not None:
            yield first
            yield from found

    def copy(self, source: str, target: str) -> bool:
        return self._call(lambda: self._store.copy(source, target))

    def delete(self, name: str) -> None:
        self._call(lambda: self._store.delete(name))

    def close(self) -> None:
        self._store.close()

    def _call(self, call: Callable[[], T]) -> T:
        began_s = self._clock.monotonic()
        failed = True
        try:
            answer = call()
            failed = False
        except NotFound:
            failed = False
            raise
        finally:
            self._metrics.called(self._clock.monotonic() - began_s, failed=failed)
        return answer
