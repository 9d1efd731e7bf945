"""A log whose segments were shipped by hand, and a store that counts what is asked of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lowwater.engine.format.format import HEADER_BYTES, SegmentHeader
from lowwater.engine.log.compress import compress_segment
from lowwater.engine.log.directory import read_trailer
from lowwater.engine.log.log import Log
from lowwater.engine.seams.real import RealClock
from lowwater.engine.seams.seams import Runner
from lowwater.engine.state.catalogue import Catalogue, SegmentDescriptor
from lowwater.metrics import ColdMetrics
from lowwater.tiering.block_cache import BlockCache
from lowwater.tiering.cold import ColdLog
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.memory_store import MemoryStore
from lowwater.tiering.store import FoundObject


class Request(NamedTuple):
    kind: str
    name: str
    start: int
    size: int


class CountingStore(MemoryStore):
    """Counts requests. `before` is called with each, and may raise or wait; `change` gives another answer."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.before: Callable[[Request], None] = lambda _: None
        self.change: Callable[[Request, bytes], bytes] = lambda _, data: data
        self._count_lock = threading.Lock()

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self.before(Request("read", name, start, -1))
        data = super().read(name, start, end)
        request = Request("read", name, start, len(data))
        with self._count_lock:
            self.requests.append(request)
        return self.change(request, data)

    def stat(self, name: str) -> FoundObject:
        self.before(Request("stat", name, 0, -1))
        found = super().stat(name)
        with self._count_lock:
            self.requests.append(Request("stat", name, 0, 0))
        return found

    @property
    def fetched_bytes(self) -> int:
        return sum(request.size for request in self.requests)


def name_of(descriptor: SegmentDescriptor) -> str:
    return f"wal/{descriptor.epoch}/segment-{descriptor.first:020}-{descriptor.last:020}"


def describe(path: Path | str, log: Log) -> tuple[SegmentDescriptor, bytes, bytes]:
    """(descriptor, raw bytes, compressed bytes) of a sealed segment."""
    file = log.wal.files.open(str(path))
    try:
        raw = file.read_at(0, file.size())
        header = SegmentHeader.decode(raw[:HEADER_BYTES])
        trailer = read_trailer(file, len(raw))
        parts: list[bytes] = []
        compress_segment(file, parts.append)
    finally:
        file.close()
    descriptor = SegmentDescriptor(
        epoch=header.epoch,
        first=trailer.seq_first,
        last=trailer.seq_last,
        hash=trailer.segment_hash,
        size=trailer.file_bytes,
        body_bytes=trailer.body_bytes,
        block_bytes=header.block_bytes,
        compression=header.compression,
        frame_count=trailer.frame_count,
        time_min_us=trailer.time_min_us,
        time_max_us=trailer.time_max_us,
    )
    return descriptor, raw, b"".join(parts)


def ship(log: Log, store: MemoryStore, catalogue: Catalogue, count: int | None = None) -> None:
    """Ship the sealed segments that the catalogue has not, or `count` of them."""
    log.wal.store.seal_all()
    for segment in list(log.wal.store.segments):
        if segment.seq_first <= catalogue.hwm or not segment.sealed:
            continue
        if count is not None and not (count := count - 1) + 1:
            return
        descriptor, raw, compressed = describe(segment.path, log)
        data = compressed if descriptor.compression else raw
        store.write(name_of(descriptor), [data], size=len(data))
        catalogue.add(descriptor)


class Archived:
    """What reads a store, made anew as often as a test wants."""

    def __init__(self, store: CountingStore, catalogue: Catalogue) -> None:
        self.store = store
        self.catalogue = catalogue
        self.metrics = ColdMetrics()

    def cold(self, *, cache: BlockCache | None = None, runner: Runner | None = None) -> ColdLog:
        self.fetcher = Fetcher(
            self.store, clock=RealClock(), cache=cache, metrics=self.metrics, runner=runner
        )
        self.store.requests.clear()
        return ColdLog(self.fetcher, self.catalogue, name_of)


def seqs_in(chunks: Iterator[object]) -> list[int]:
    from lowwater.engine.format.entries import decode_frames

    return [
        entry.seq
        for chunk in chunks
        for entry in decode_frames(chunk.data, chunk.start, chunk.end, verify=True)  # type: ignore[attr-defined]
    ]
