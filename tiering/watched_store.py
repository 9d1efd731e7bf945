"""A store as something that reads a lot of it sees it: counted, and able to stop.

Always true: nothing is written through it; once it was stopped, no read begins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from lowwater.errors import Closed
from lowwater.tiering.checksums import Checksum, Hashing
from lowwater.tiering.store import FoundObject, Store


class WatchedStore:
    """Counts what is read. `stopped` is set when nobody waits for the answers any more."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.uri = store.uri
        self.bytes = self.requests = 0
        self.stopped = False
        self._lock = threading.Lock()

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        if self.stopped:
            raise Closed("the scrub was stopped")
        data = self._store.read(name, start, end)
        with self._lock:
            self.bytes += len(data)
            self.requests += 1
        return data

    def stat(self, name: str) -> FoundObject:
        return self._store.stat(name)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[FoundObject]:
        return self._store.list(prefix, start_after)

    @property
    def hashing(self) -> Hashing | None:
        return self._store.hashing

    def checksum(self, name: str) -> Checksum:
        return self._store.checksum(name)

    def replace(self, *_: object, **__: object) -> None:
        raise AssertionError("a scrub writes nothing")

    def write(self, *_: object, **__: object) -> bool:
        raise AssertionError("a scrub writes nothing")

    def copy(self, source: str, target: str) -> bool:
        raise AssertionError("a scrub writes nothing")

    def delete(self, name: str) -> None:
        raise AssertionError("a scrub removes nothing")

    def close(self) -> None: ...
