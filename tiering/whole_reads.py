"""A store of which no ranges are asked for: objects come whole, and ranges are cut out of them here.

Always true:
  - a request is for an object as a whole; so its size is what one costs, in traffic and in memory;
  - the objects that were read last are kept, up to `bytes_max`, and the newest one however large it is;
  - who asks again for what he was given has found it wrong: then all of it is asked for again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lowwater.tiering.checksums import Checksum, Hashing
from lowwater.tiering.store import FoundObject, Part, Store

BYTES_MAX = 128 * 2**20


@dataclass(slots=True)
class _Kept:
    data: bytes
    given: list[tuple[int, int]] = field(default_factory=list)


class WholeReads:
    """Fulfils `Store`. The store is its own from now on."""

    def __init__(self, store: Store, *, bytes_max: int = BYTES_MAX) -> None:
        self.uri = store.uri
        self._store = store
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.uri}>"

    @property
    def calls_repeated(self) -> int:
        return getattr(self._store, "calls_repeated", 0)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        if start == 0 and end is None:
            return self._store.read(name)
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None:
                stop = len(kept.data) if end is None else end
                if not any(first <= start and stop <= last for first, last in kept.given):
                    kept.given.append((start, stop))
                    self._kept.move_to_end(name)
                    return kept.data[start:stop]
        data = self._store.read(name)
        with self._lock:
            self._forget(name)
            self._kept[name] = _Kept(data, [(start, len(data) if end is None else end)])
            self._bytes += len(data)
            while self._bytes > self._bytes_max and len(self._kept) > 1:
                self._forget(next(iter(self._kept)))
        return data[start:end]

    def _forget(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._bytes -= len(kept.data)

    @property
    def hashing(self) -> Hashing | None:
        return self._store.hashing

    def write(self, name: str, parts: Iterable[Part], *, size: int | None) -> bool | None:
        return self._store.write(name, parts, size=size)

    def replace(self, name: str, parts: Iterable[Part], *, size: int | None) -> None:
        self._store.replace(name, parts, size=size)
        with self._lock:
            self._forget(name)

    def stat(self, name: str) -> FoundObject:
        return self._store.stat(name)

    def checksum(self, name: str) -> Checksum:
        return self._store.checksum(name)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[FoundObject]:
        return self._store.list(prefix, start_after)

    def copy(self, source: str, target: str) -> bool:
        return self._store.copy(source, target)

    def delete(self, name: str) -> None:
        self._store.delete(name)
        with self._lock:
            self._forget(name)

    def close(self) -> None:
        self._store.close()
        with self._lock:
            self._kept.clear()
            self._bytes = 0
