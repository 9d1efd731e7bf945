"""Pages that live in memory, on a disk that fails when a simulation wants it to.

Always true:
  - a transaction is one operation of the disk, which counts it, may fail it, and may end the program
    before or after it takes effect; a read is one operation of those that change nothing;
  - what a failed transaction left is found out when the store is opened again, and not before: the fault's
    own random generator decides it when the fault happens, so a run depends on its seed alone.

The object stands for the medium and for the open store on it: `crash` and `reopen` begin a new life.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from lowwater.engine.pages.pagestore import check_write, write_failure
from lowwater.errors import Closed, DiskFailed, LowwaterError

T = TypeVar("T")
Transaction = tuple[list[tuple[bytes, bytes]], list[bytes], dict[bytes, bytes | None]]

# Few, so that a simulation sees changes between two runs.
RUN_KEYS = 64


class PageFault(Protocol):
    """The part of a fault of `lowwater.chaos.disk` that means something here. A failed transaction has not
    reached the disk; with `landed`, that generator decides."""

    @property
    def error(self) -> int: ...
    @property
    def flip_bit(self) -> int | None: ...
    @property
    def landed(self) -> Any: ...


class Disk(Protocol):
    """The part of FaultyFiles that is used here."""

    life: int

    def perform(
        self,
        kind: Literal["sync", "read"],
        path: str,
        effect: Callable[[PageFault], T],
        *,
        data: bytes = b"",
        life: int | None = None,
    ) -> T: ...


class NoFault:
    error = 0
    flip_bit = None
    landed = None


class SoundDisk:
    """A disk on which nothing goes wrong."""

    life = 1

    def perform(
        self,
        kind: Literal["sync", "read"],
        path: str,
        effect: Callable[[PageFault], T],
        *,
        data: bytes = b"",
        life: int | None = None,
    ) -> T:
        return effect(NoFault())


class MemoryPages:
    def __init__(self, disk: Disk | None = None, *, path: str = "pages") -> None:
        self.path = path
        self.has_sums = True
        self._disk: Disk = SoundDisk() if disk is None else disk
        self._life = self._disk.life
        self._mutex = threading.RLock()  # a signal handler may call too
        self.owns_lock: Callable[[], bool] = self._mutex._is_owned  # type: ignore[attr-defined]
        self._pages: dict[bytes, bytes] = {}
        self._meta: dict[bytes, bytes] = {}
        self._keys: list[bytes] | None = []
        self._size_bytes = 0
        self._landed: Transaction | None = None
        self._failure: LowwaterError | None = None
        self._closed = False
        self.on_full: Callable[[], object] = lambda: False

    def read_meta(self) -> dict[bytes, bytes]:
        return self._read(lambda _: dict(self._meta))

    def page_keys(self) -> Iterator[bytes]:
        last = b""

        def run(_: PageFault) -> list[bytes]:
            if self._keys is None:
                self._keys = sorted(self._pages)
            start = bisect_right(self._keys, last)
            return self._keys[start : start + RUN_KEYS]

        while keys := self._read(run):
            yield from keys
            last = keys[-1]

    def page_sizes(self) -> Iterator[tuple[bytes, int]]:
        for key in self.page_keys():
            data = self._pages.get(key)
            if data is not None:
                yield key, len(data)

    def get(self, key: bytes) -> bytes | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        def effect(fault: PageFault) -> list[bytes | None]:
            pages = [self._pages.get(key) for key in keys]
            if fault.flip_bit is not None:
                pages = [page and _flipped(page, fault.flip_bit) for page in pages]
            return pages

        return self._read(effect)

    def write(
        self,
        puts: Sequence[tuple[bytes, bytes]],
        deletes: Sequence[bytes],
        meta: Mapping[bytes, bytes | None],
    ) -> None:
        check_write(puts, deletes, meta)
        transaction: Transaction = (list(puts), list(deletes), dict(meta))

        def effect(fault: PageFault) -> None:
            with self._mutex:
                self._check_open()
                if self._failure is not None:
                    raise self._failure
                if fault.error:
                    if fault.landed is not None and fault.landed.random() < 0.5:
                        self._landed = transaction
                    self._failure = write_failure(fault.error, self.path)
                    # The disk keeps a record of what failed, by the number.
                    raise OSError(fault.error, "a fault")
                self._apply(transaction)

        with self._mutex:
            self._check_open()
            if self._failure is not None:
                raise self._failure
        try:
            self._disk.perform("sync", self.path, effect, data=_flat(transaction), life=self._life)
        except OSError as error:
            raise write_failure(error.errno or 0, self.path) from error

    def damage(self) -> list[str]:
        return self._read(lambda _: [])

    def size_bytes(self) -> int:
        return self._read(lambda _: self._size_bytes)

    def used_bytes(self) -> int:
        return self._read(lambda _: self._used_bytes())

    def close(self) -> None:
        with self._mutex:
            self._closed = True

    def crash(self) -> None:
        """The program has ended, wherever it was: the next one finds the whole transactions."""
        self.reopen()

    def reopen(self) -> None:
        """Begin a new life of the store, after a close, a failure or a crash."""
        with self._mutex:
            if self._landed is not None:
                self._apply(self._landed)
            self._landed = None
            self._failure = None
            self._closed = False
            self._life = self._disk.life

    def _read(self, effect: Callable[[PageFault], T]) -> T:
        def locked(fault: PageFault) -> T:
            with self._mutex:
                self._check_open()
                return effect(fault)

        try:
            return self._disk.perform("read", self.path, locked, life=self._life)
        except OSError as error:
            raise DiskFailed("pages cannot be read", path=self.path) from error

    def _apply(self, transaction: Transaction) -> None:
        puts, deletes, meta = transaction
        count = len(self._pages)
        for key in deletes:
            self._pages.pop(key, None)
        deleted = count - len(self._pages)
        self._pages.update(puts)
        if deleted or len(self._pages) != count:
            self._keys = None
        for key, value in meta.items():
            if value is None:
                self._meta.pop(key, None)
            else:
                self._meta[key] = value
        self._size_bytes = max(self._size_bytes, self._used_bytes())

    def _used_bytes(self) -> int:
        tables = (self._pages, self._meta)
        return sum(len(key) + len(value) for table in tables for key, value in table.items())

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the page store is closed", path=self.path)


def _flipped(page: bytes, flip_bit: int) -> bytes:
    data = bytearray(page)
    place, bit = divmod(flip_bit % (len(data) * 8), 8)
    data[place] ^= 1 << bit
    return bytes(data)


def _flat(transaction: Transaction) -> bytes:
    """The transaction as bytes, for the disk's trace."""
    puts, deletes, meta = transaction
    parts = [part for put in puts for part in put] + deletes
    for key, value in meta.items():
        parts += (key, b"\0" if value is None else b"\1" + value)
    lengths = struct.pack(f"<{len(parts) + 2}I", len(puts), len(deletes), *map(len, parts))
    return lengths + b"".join(parts)
