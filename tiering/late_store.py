"""A store that is opened by whoever calls it first: opening one asks its server, or the file system that its
folder is on, and a database has to open while that is away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from lowwater.errors import Closed
from lowwater.tiering.checksums import Checksum, Hashing
from lowwater.tiering.store import FoundObject, Part, Store


class LateStore:
    """Always true: one call at a time opens it; one that fails is the error of that call, and of no other.

    `makes` says whether an archive may begin there: it is what `open_it` is called with."""

    def __init__(self, uri: str, open_it: Callable[[bool], Store], *, makes: bool) -> None:
        self.uri = uri
        self.makes = makes
        self._open_it = open_it
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._closed = False

    def _opened(self) -> Store:
        if self._store is not None:
            return self._store
        with self._lock:
            if self._closed:
                raise Closed(f"{self.uri} was closed")
            if self._store is None:
                self._store = self._open_it(self.makes)
            return self._store

    @property
    def calls_repeated(self) -> int:
        return getattr(self._store, "calls_repeated", 0)

    @property
    def hashing(self) -> Hashing | None:
        return self._opened().hashing

    def write(self, name: str, parts: Iterable[Part], *, size: int | None) -> bool | None:
        return self._opened().write(name, parts, size=size)

    def replace(self, name: str, parts: Iterable[Part], *, size: int | None) -> None:
        self._opened().replace(name, parts, size=size)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return self._opened().read(name, start, end)

    def stat(self, name: str) -> FoundObject:
        return self._opened().stat(name)

    def checksum(self, name: str) -> Checksum:
        return self._opened().checksum(name)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[FoundObject]:
        return self._opened().list(prefix, start_after)

    def copy(self, source: str, target: str) -> bool:
        return self._opened().copy(source, target)

    def delete(self, name: str) -> None:
        self._opened().delete(name)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._store is not None:
                self._store.close()
