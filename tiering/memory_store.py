"""Objects in memory, for tests and simulations: gone with the process."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

from lowwater.tiering.checksums import Checksum
from lowwater.tiering.store import FoundObject, Handle, Part, at, counted, missing


class MemoryObjects:
    """What the handles of one place share. Always true: `_names` are the keys of `data`, sorted."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self._names: list[str] = []
        self._mutex = threading.Lock()

    def add(self, name: str, data: bytes) -> bool:
        with self._mutex:
            if name in self.data:
                return False
            self.data[name] = data
            insort(self._names, name)
            return True

    def replace(self, name: str, data: bytes) -> None:
        with self._mutex:
            if name not in self.data:
                insort(self._names, name)
            self.data[name] = data

    def remove(self, name: str) -> None:
        with self._mutex:
            if self.data.pop(name, None) is not None:
                del self._names[bisect_left(self._names, name)]

    def next(self, prefix: str, start_after: str) -> FoundObject | None:
        """The first object of the list."""
        with self._mutex:
            place = max(bisect_left(self._names, prefix), bisect_right(self._names, start_after))
            if place == len(self._names) or not self._names[place].startswith(prefix):
                return None
            name = self._names[place]
            return FoundObject(name, len(self.data[name]))


class MemoryStore(Handle):
    def __init__(
        self, uri: str = "memory://", *, objects: MemoryObjects | None = None, read_only: bool = False
    ) -> None:
        super().__init__(uri, read_only=read_only)
        self.objects = MemoryObjects() if objects is None else objects

    def write(self, name: str, parts: Iterable[Part], *, size: int | None) -> bool:
        self._check(name, writing=True)
        if name in self.objects.data:
            return False
        return self.objects.add(name, b"".join(counted(parts, size, at(self.uri, name))))

    def replace(self, name: str, parts: Iterable[Part], *, size: int | None) -> None:
        self._check(name, writing=True)
        self.objects.replace(name, b"".join(counted(parts, size, at(self.uri, name))))

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return self._get(name)[start:end]

    def stat(self, name: str) -> FoundObject:
        return FoundObject(name, len(self._get(name)))

    def checksum(self, name: str) -> Checksum:
        return Checksum(self.stat(name).size)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[FoundObject]:
        self._check_open()
        return self._list(prefix, start_after)

    def copy(self, source: str, target: str) -> bool:
        self._check(target, writing=True)
        return self.objects.add(target, self._get(source))

    def delete(self, name: str) -> None:
        self._check(name, writing=True)
        self.objects.remove(name)

    def _list(self, prefix: str, start_after: str) -> Iterator[FoundObject]:
        while (found := self.objects.next(prefix, start_after)) is not None:
            yield found
            start_after = found.name

    def _get(self, name: str) -> bytes:
        self._check(name)
        data = self.objects.data.get(name)
        if data is None:
            raise missing(self.uri, name)
        return data
