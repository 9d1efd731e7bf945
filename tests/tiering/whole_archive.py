"""An archive with objects of every type, made by databases: several epochs, one of them of a line that was
fenced, checkpoints that rest on each other, raw and compressed segments, small and large values."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.engine.engine_model import CLUSTER_ID
from tests.tiering.lines import Line, begun, restored

from lowwater.engine.checkpoint.checkpoints import StoredCheckpoint, read_file
from lowwater.engine.log.compress import compress_segment
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.state.catalogue import checkpoint_shipped_entry, describe_checkpoint
from lowwater.tiering import names
from lowwater.tiering.archive import open_archive
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore


def copy_of(objects: dict[str, bytes]) -> MemoryObjects:
    made = MemoryObjects()
    for name, data in objects.items():
        made.add(name, data)
    return made


def store_of(objects: MemoryObjects) -> MemoryStore:
    return MemoryStore("memory://archive", objects=objects)


def put(line: Line, name: str, count: int, value: bytes = b"v" * 50) -> None:
    for number in range(count):
        line.db.put("b", f"{name} {number:03}", value)


def ship(line: Line) -> None:
    archive = open_archive(line.store, CLUSTER_ID, create=True)
    if not line.epoch:
        line.claim(archive)
    line.ship(archive)


def ship_checkpoint(line: Line) -> StoredCheckpoint:
    """A checkpoint, its packs, its index, then the entry and its manifest."""
    line.db.checkpoint()
    ship(line)
    stored: StoredCheckpoint = line.db.checkpoints()[0]
    for pack in stored.index.packs:
        name = names.pack_object_name(pack)
        data = read_file(line.machine.files, f"{stored.packs_directory}/{name.rpartition('/')[2]}")
        line.store.write(name, [data], size=len(data))
    index = read_file(line.machine.files, stored.path)
    described = describe_checkpoint(index)
    line.store.write(names.checkpoint_name(described), [index], size=len(index))
    before = line.db.catalogue.checkpoint_seq
    assert line.db.propose_control(checkpoint_shipped_entry(before, described)) is not None
    ship(line)
    return stored


def compress(objects: MemoryObjects, name: str) -> None:
    """As the archive may have it: the name stays, since it is that of the raw bytes."""
    file = MemoryFiles().open("raw", write=True, create=True)
    file.write_at(0, [objects.data[name]])
    parts: list[bytes] = []
    compress_segment(file, parts.append)
    objects.data[name] = b"".join(parts)


def segments(objects: MemoryObjects) -> list[str]:
    return [found.name for found in MemoryStore(objects=objects).list(names.WAL)]


def made(segment_count: int) -> MemoryObjects:
    """The first line ships, is restored elsewhere, goes on once more, and is fenced; the second one goes on
    until it has `segment_count` segments."""
    objects = MemoryObjects()
    first = begun(objects)
    put(first, "a", 30)
    put(first, "large", 2, b"large" * 400)
    ship_checkpoint(first)
    put(first, "a", 3, b"w" * 50)
    put(first, "z", 9)
    base = ship_checkpoint(first)
    assert base.index.base_seq
    second = restored(objects)
    ship(second)
    put(first, "fenced", 5)
    fence(first)
    put(second, "b", 10)
    ship_checkpoint(second)
    for number in range(segment_count - len(second.db.catalogue.segments) - 1):
        second.db.put("b", f"c {number}", b"v")
        second.db._log.seal()
    ship(second)
    ship_checkpoint(second)
    for each in (first, second):
        each.db.close()
    for name in segments(objects)[::3]:
        compress(objects, name)
    return objects


def fence(line: Line) -> None:
    """It ships once more, and is told then."""
    line.rounds = 1
    line.live()
    assert line.fenced is not None


@cache
def _whole(segment_count: int) -> dict[str, bytes]:
    return made(segment_count).data


def whole_archive(segment_count: int = 80) -> MemoryObjects:
    """A copy of one that is made once."""
    return copy_of(_whole(segment_count))


def types_in(objects: MemoryObjects) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in objects.data:
        parsed: Any = names.parse(name)
        found.setdefault(parsed.type, []).append(name)
    return found
