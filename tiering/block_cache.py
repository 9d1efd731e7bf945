"""Pieces of stored objects on the local disk, so that they need not be fetched again.

    <directory>/<object>-<number>     one unit: a head with a checksum, then its bytes

Always true:
  - what comes out is what went in, or nothing: each unit has a checksum over its bytes, its object and its
    number. So nothing is ever synced: a unit that a crash has torn is found, and fetched again;
  - the units take no more than `bytes_max`; what a former life left counts as full until it is read;
  - nor more than is free: as soon as others need it, units make room, all of them if that has to be;
  - no call raises because of the disk: without room, or with a damaged disk, there is no cache;
  - a unit that was read once, as a scan reads it, makes room before one that was read again.
"""

from __future__ import annotations

import re
import struct
import threading
from collections import OrderedDict
from typing import NamedTuple

from lowwater.engine.seams.checksum import crc32
from lowwater.engine.seams.seams import Files, write_all

UNIT_BYTES = 2**18
OBJECT_BYTES = 16
# So much of the cache is for units that were read again.
PROVEN_SHARE = 0.8

_MAGIC = b"LWUNIT\r\n"
_HEAD = struct.Struct("<8sI16sII")  # magic, checksum of all that follows it, object, number, bytes
_CHECKED_AT = 12
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{8})")

assert _HEAD.size == 36


class UnitKey(NamedTuple):
    """A unit: `object` stands for a name and a size in a store."""

    object: bytes
    number: int

    @property
    def name(self) -> str:
        return f"{self.object.hex()}-{self.number:08x}"


class BlockCache:
    """Units in a directory of their own, which belongs to one process at a time."""

    def __init__(self, files: Files, directory: str, bytes_max: int, *, kept_free_bytes: int = 0) -> None:
        """So many bytes of the disk stay free, as far as units can do for that."""
        self._files = files
        self._directory = directory
        self._bytes_max = bytes_max
        self._kept_free_bytes = kept_free_bytes
        self._lock = threading.Lock()
        # The units with their sizes, the one that was read last at the end.
        self._new: OrderedDict[UnitKey, int] = OrderedDict()
        self._proven: OrderedDict[UnitKey, int] = OrderedDict()
        self._proven_bytes = 0
        self.bytes = 0
        self.damaged = 0
        self.evicted = 0
        self.unwritten = 0
        try:
            files.make_directory(directory)
            names = files.list(directory)
        except OSError:
            self._bytes_max = 0
            return
        for name in names:
            if match := _NAME.fullmatch(name):
                self._new[UnitKey(bytes.fromhex(match[1]), int(match[2], 16))] = _HEAD.size + UNIT_BYTES
        self.bytes = sum(self._new.values())
        with self._lock:
            victims, _ = self._make_room(0)
        self._remove(victims)

    def get(self, key: UnitKey, *, promote: bool = True) -> bytes | None:
        """The unit, or None. `promote` says that it was not read in passing."""
        with self._lock:
            if key not in self._new and key not in self._proven:
                return None
        data = self._read(key)
        with self._lock:
            if data is None:
                self._drop(key)
                return None
            self._resize(key, _HEAD.size + len(data))
            if key in self._proven:
                self._proven.move_to_end(key)
            elif key in self._new and promote:
                size = self._new.pop(key)
                self._proven[key] = size
                self._proven_bytes += size
                while self._proven_bytes > self._bytes_max * PROVEN_SHARE and len(self._proven) > 1:
                    oldest, size = self._proven.popitem(last=False)
                    self._proven_bytes -= size
                    self._new[oldest] = size
        return data

    def put(self, key: UnitKey, data: bytes) -> None:
        assert len(data) <= UNIT_BYTES
        size = _HEAD.size + len(data)
        with self._lock:
            if size > self._bytes_max or key in self._new or key in self._proven:
                return
            victims, is_room = self._make_room(size)
            self.bytes += size
        self._remove(victims)
        is_written = is_room and self._write(key, data)
        with self._lock:
            if is_written:
                self._new[key] = size
            else:
                self.bytes -= size
                self.unwritten += 1

    def forget(self, object_key: bytes) -> None:
        """Drop all units of an object: what was read of it was wrong."""
        with self._lock:
            gone = [key for units in (self._new, self._proven) for key in units if key.object == object_key]
            for key in gone:
                self._drop(key)
        self._remove(gone)

    def give_way(self) -> None:
        """Drop all units: somebody needs the room who cannot fetch again what he has."""
        with self._lock:
            victims = [*self._new, *self._proven]
            for victim in victims:
                self._drop(victim)
            self.evicted += len(victims)
        self._remove(victims)

    # ------------------------------------------------------------------ with the lock

    def _make_room(self, size: int) -> tuple[list[UnitKey], bool]:
        """Who has to go for a unit of this size, and whether there is room for it then."""
        victims = []
        missing_bytes = self._missing_bytes(size)
        while self._new or self._proven:
            if self.bytes + size <= self._bytes_max and missing_bytes <= 0:
                break
            units = self._new or self._proven
            victim, victim_bytes = next(iter(units.items()))
            missing_bytes -= victim_bytes
            self._drop(victim)
            self.evicted += 1
            victims.append(victim)
        return victims, missing_bytes <= 0

    def _missing_bytes(self, size: int) -> int:
        """Return how much is missing of the room that has to stay free behind a unit of this size."""
        if not self._kept_free_bytes:
            return 0
        try:
            return self._kept_free_bytes + size - self._files.room(self._directory)
        except OSError:
            return 0  # writing it will tell

    def _drop(self, key: UnitKey) -> None:
        if key in self._new:
            self.bytes -= self._new.pop(key)
        elif key in self._proven:
            size = self._proven.pop(key)
            self.bytes -= size
            self._proven_bytes -= size

    def _resize(self, key: UnitKey, size: int) -> None:
        """What was left by a former life is as large as it turns out to be."""
        if key in self._new:
            self.bytes += size - self._new[key]
            self._new[key] = size

    # ------------------------------------------------------------------ files

    def _path(self, key: UnitKey) -> str:
        return f"{self._directory}/{key.name}"

    def _read(self, key: UnitKey) -> bytes | None:
        try:
            file = self._files.open(self._path(key))
            try:
                stored = file.read_at(0, _HEAD.size + UNIT_BYTES)
            finally:
                file.close()
        except FileNotFoundError:
            return None  # it has just made room for another
        except OSError:
            stored = b""
        if len(stored) >= _HEAD.size:
            magic, checksum, object_key, number, length = _HEAD.unpack_from(stored)
            data = stored[_HEAD.size :]
            sound = (magic, object_key, number, length) == (_MAGIC, *key, len(data))
            if sound and crc32(data, crc32(stored[_CHECKED_AT : _HEAD.size])) == checksum:
                return data
        self.damaged += 1
        self._remove([key])
        return None

    def _write(self, key: UnitKey, data: bytes) -> bool:
        head = _HEAD.pack(_MAGIC, 0, *key, len(data))[_CHECKED_AT:]
        checksum = crc32(data, crc32(head))
        try:
            file = self._files.open(self._path(key), create=True)
            try:
                write_all(file, 0, [_MAGIC + checksum.to_bytes(4, "little") + head, data])
            finally:
                file.close()
        except FileExistsError:
            return False  # somebody is about to remove it
        except OSError:
            self._remove([key])
            return False
        return True

    def _remove(self, keys: list[UnitKey]) -> None:
        for key in keys:
            try:
                self._files.remove(self._path(key))
            except OSError:
                pass  # a unit that stays is read or replaced by the next life
