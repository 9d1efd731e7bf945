"""Databases that ship to one archive, as a shipper would have it, each store operation a step of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.engine.engine_model import CLUSTER_ID, DIRECTORY, Machine

from lowwater.engine.format.blocks import NO_HASH
from lowwater.engine.format.format import HEADER_BYTES, SegmentHeader
from lowwater.engine.log.directory import read_trailer, segment_name
from lowwater.engine.state.catalogue import SegmentDescriptor, describe_segment, segment_shipped_entry
from lowwater.errors import Fenced
from lowwater.tiering import names
from lowwater.tiering.archive import open_archive
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.store import FoundObject, Part


class StepStore(MemoryStore):
    """Asks before each operation. A list is one: it is what was there when it was asked for."""

    def __init__(self, objects: MemoryObjects, before: Callable[[], None] = lambda: None) -> None:
        super().__init__(objects=objects)
        self.before = before
        self.operations = 0

    def _step(self) -> None:
        self.before()
        self.operations += 1

    def write(self, name: str, parts: Iterable[Part], *, size: int) -> bool:
        self._step()
        return super().write(name, parts, size=size)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self._step()
        return super().read(name, start, end)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[FoundObject]:
        self._step()
        return iter([*super().list(prefix, start_after)])


class Line:
    """A database that goes on writing, and ships. It ends when it is fenced."""

    def __init__(self, objects: MemoryObjects, name: str, *, seed: int = 0) -> None:
        self.name = name
        self.machine = Machine(seed=seed)
        self.store = StepStore(objects)
        self.epoch = 0
        self.follows = NO_HASH
        self.rounds = 2
        self.fenced: Fenced | None = None

    @property
    def db(self) -> Any:
        return self.machine.db

    def live(self, rounds: int | None = None) -> None:
        """Claim where that was not done yet, then write and ship."""
        try:
            archive = open_archive(self.store, CLUSTER_ID, create=True)
            if not self.epoch:
                self.claim(archive)
            for number in range(self.rounds if rounds is None else rounds):
                self.db.put("b", f"{self.name} {number}", b"v" * 100)
                self.db._log.seal()
                self.ship(archive)
        except Fenced as error:
            self.fenced = error

    def claim(self, archive: Any) -> None:
        claim = archive.claim(
            self.db.catalogue,
            self.db._wal.chain.epoch,
            token=self.machine.randomness.token,
            owner=self.name,
            follows=self.follows,
        )
        self.db.fork(claim.epoch, parent_segment=claim.parent_segment, parent_manifest=claim.parent_manifest)
        self.epoch = claim.epoch
        archive.require_epoch(self.epoch)
        self.db.mark_counts(claim.hwm)

    def ship(self, archive: Any) -> None:
        for header, described, data in self.segments():
            if described.last > self.db.catalogue.hwm:
                self.store.write(names.segment_name(described), [data], size=len(data))
                entry = segment_shipped_entry(header.seq_before, header.hash_before, described)
                assert self.db.propose_control(entry) is not None
        for seq in archive.unpublished(self.db.catalogue):
            manifest = archive.publish(self.db.catalogue, seq)
            archive.require_epoch(self.epoch)
            self.db.mark_counts(manifest.hwm)

    def segments(self) -> list[tuple[SegmentHeader, SegmentDescriptor, bytes]]:
        self.db._log.sync()
        self.db._wal.store.seal_all()
        found = []
        for segment in self.db._wal.store.segments:
            file = self.machine.files.open(segment.path)
            header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
            described = describe_segment(header, read_trailer(file, file.size()))
            found.append((header, described, file.read_at(0, file.size())))
            file.close()
        return found


def begun(objects: MemoryObjects, name: str = "first") -> Line:
    """A database that has something, and has shipped nothing."""
    line = Line(objects, name)
    line.machine.open()
    line.db.create_bucket("b")
    line.db.put("b", "k", b"v")
    return line


def restored(objects: MemoryObjects, name: str = "restored") -> Line:
    """A directory that was made from the archive alone, up to the high-water mark of its newest manifest."""
    archive = open_archive(MemoryStore(objects=objects), CLUSTER_ID)
    newest = archive.newest()
    assert newest is not None
    line = Line(objects, name, seed=7)
    files = line.machine.files
    files.make_directory(f"{DIRECTORY}/wal")
    for described in archive.catalogue_of(newest).segments:
        data = archive.store.read(names.segment_name(described))
        path = f"{DIRECTORY}/wal/{segment_name(described.first, described.last)}"
        file = files.open(path, write=True, create=True)
        file.write_at(0, [data], "fsync")
        file.close()
    files.sync_directory(f"{DIRECTORY}/wal")
    line.machine.open()
    line.follows = newest.hash
    return line


class Turns:
    """Lines that take turns: one runs at a time, and stops before its next operation on the store."""

    def __init__(self, lines: list[Line]) -> None:
        self._turns = [_Turn(line) for line in lines]

    def run(self, number: int, operations: int | None = None) -> None:
        """Have a line make so many operations, or all that it wants to."""
        turn = self._turns[number]
        while operations is None or operations > 0:
            if turn.ended:
                return
            turn.go.release()
            turn.stopped.acquire()
            operations = None if operations is None else operations - 1

    def finish(self) -> None:
        for number, turn in enumerate(self._turns):
            self.run(number)
            turn.thread.join()
            if turn.error is not None:
                raise turn.error


class _Turn:
    def __init__(self, line: Line) -> None:
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.ended = False
        self.error: BaseException | None = None
        self._line = line
        line.store.before = self._before
        self._begun = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.stopped.acquire()

    def _before(self) -> None:
        self.stopped.release()
        self.go.acquire()

    def _run(self) -> None:
        try:
            self._line.live()
        except BaseException as error:  # noqa: BLE001 — told by `finish`
            self.error = error
        self.ended = True
        self.stopped.release()
