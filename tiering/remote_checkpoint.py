"""A shipped checkpoint, read where it lies.

Always true: the index is compared with the hash that the log's catalogue has, and everything else with the
hashes that lead to it from there; what is wrong is forgotten and fetched once more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TypeVar

from lowwater.engine.checkpoint.checkpoints import CheckpointRow, StoredCheckpoint
from lowwater.engine.checkpoint.content import KnownBlocks
from lowwater.engine.format.blocks import HINT as REMOVE_HINT
from lowwater.engine.format.blocks import KnownColumns, hash_of
from lowwater.engine.format.ckpt import Checkpoint, ListEntry, decode_named
from lowwater.engine.format.keys import encode_key, page_key
from lowwater.engine.state.catalogue import CheckpointDescriptor
from lowwater.errors import Corrupt, DataError, LowwaterError, NotFound
from lowwater.tiering.fetcher import FETCH_BYTES, Fetcher
from lowwater.tiering.names import PACKS, checkpoint_name, pack_object_name
from lowwater.tiering.store import Store, at, read_small


def read_objects(store: Store, descriptor: CheckpointDescriptor) -> tuple[bytes, Callable[[bytes], bytes]]:
    """The index of a checkpoint, and what reads its packs, as they lie in the store."""

    def read(name: str, expected: bytes, bytes_max: int) -> bytes:
        data = read_small(store, name, bytes_max)
        if hash_of(data) != expected:
            raise Corrupt("this object is not what its name says", path=at(store.uri, name))
        return data

    index = read(checkpoint_name(descriptor), descriptor.hash, descriptor.size)
    return index, lambda pack: read(pack_object_name(pack), pack, PACK_BYTES_MAX)


# Offsets in it have 32 bits.
PACK_BYTES_MAX = 2**32
# What is read of lists at once, more or less.
LOAD_BYTES = FETCH_BYTES // 2

T = TypeVar("T")

_list_key = attrgetter("key")


def _block_key(known: KnownBlocks) -> bytes:
    return known.listed.key


def _end_of(entry: ListEntry) -> int:
    return entry.offset + entry.list_bytes + entry.locations_bytes


class RemoteCheckpoint(StoredCheckpoint):
    """A checkpoint of the catalogue. It may be read by several threads at once."""

    def __init__(self, fetcher: Fetcher, descriptor: CheckpointDescriptor) -> None:
        self.name = checkpoint_name(descriptor)
        self.path = fetcher.where(self.name)
        self.packs_directory = fetcher.where(PACKS.rstrip("/"))
        self.seq = descriptor.seq
        self._descriptor = descriptor
        self._fetcher = fetcher
        self._index: Checkpoint | None = None

    @property
    def index(self) -> Checkpoint:
        # Two threads may both read it, and find the same.
        if self._index is None:
            size = self._descriptor.size
            self._index = self._fetcher.twice(self.name, lambda: size, self._read_index)
        return self._index

    def why_lost(self) -> LowwaterError | None:
        """What is wrong with its index; None where that can be read. That one is lost must end no restore and
        no read: the checkpoint before it, or the log, has everything."""
        try:
            self.index  # noqa: B018 — read and compared
        except (DataError, NotFound) as error:
            if error.path != self.path:
                raise  # all of a parent's archive is
            return error
        return None

    def _read_index(self) -> Checkpoint:
        data = self._fetcher.read_whole(self.name, self._descriptor.size)
        index = decode_named(data, self.name.rpartition("/")[2])
        if hash_of(data) != self._descriptor.hash:
            raise Corrupt("the checkpoint is another one than the catalogue has", seq=self.seq)
        return index

    @property
    def file_hash(self) -> bytes:
        return self._descriptor.hash

    def read_packed(self, pack: bytes, offset: int, size: int) -> bytes:
        name, pack_bytes = self._pack(pack)
        if offset + size > pack_bytes:
            raise Corrupt(
                "a block is said to lie beyond the end of its pack", offset=offset, hint=REMOVE_HINT
            )
        return self._fetcher.read(name, pack_bytes, offset, offset + size)

    def _pack(self, pack: bytes) -> tuple[str, int]:
        """What a pack is called in the store, and its size."""
        if pack not in self.index.packs:
            raise Corrupt("a checkpoint names a pack that it does not have", path=self.path, seq=self.seq)
        return pack_object_name(pack), self.index.packs[pack]

    def blocks(self) -> Iterator[KnownBlocks]:
        """All of them, in order. Lists that lie behind one another come in one request."""
        return chain.from_iterable(self._of_each_list(self.blocks_of))

    def columns(self) -> Iterator[KnownColumns]:
        return self._of_each_list(self.columns_of)

    def _of_each_list(self, read: Callable[[ListEntry], T]) -> Iterator[T]:
        lists = self.index.lists
        loaded: tuple[bytes, int] = (b"", 0)
        for number, entry in enumerate(lists):
            end = _end_of(entry)
            if loaded[0] != entry.pack or end > loaded[1]:
                until = end
                for after in lists[number + 1 :]:
                    if after.pack != entry.pack or after.offset != until or until - entry.offset > LOAD_BYTES:
                        break
                    until = _end_of(after)
                name, pack_bytes = self._pack(entry.pack)
                self._fetcher.load(name, pack_bytes, entry.offset, min(until, pack_bytes))
                loaded = entry.pack, until
            yield self._twice(entry.pack, partial(read, entry))

    def row(self, bucket: bytes, key: bytes) -> CheckpointRow | None:
        """The row of a key, by its list and its block: a request each, where they are not known."""
        wanted = encode_key(bucket, key)
        begins = page_key(wanted)
        lists = self.index.lists
        number = bisect_right(lists, begins, key=_list_key)
        if not number:
            return None
        entry = lists[number - 1]
        blocks = self._twice(entry.pack, lambda: self.blocks_of(entry))
        number = bisect_right(blocks, begins, key=_block_key)
        if not number:
            return None
        known = blocks[number - 1]
        rows = self._twice(known.location.pack, lambda: list(self.rows_of(known)))
        name = bucket.decode(), key.decode()
        return next((row for row in rows if (row.bucket, row.key) == name), None)

    def rows_between(self, low: bytes, high: bytes) -> Iterator[CheckpointRow]:
        """The rows whose encoded keys are from `low` to below `high`, in order."""
        begins = page_key(low)
        lists = self.index.lists
        start = max(0, bisect_right(lists, begins, key=_list_key) - 1)
        for entry in lists[start:]:
            if entry.key >= high:
                return
            blocks = self._twice(entry.pack, lambda entry=entry: self.blocks_of(entry))  # type: ignore[misc]
            first = max(0, bisect_right(blocks, begins, key=_block_key) - 1)
            for known in blocks[first:]:
                if known.listed.key >= high:
                    return
                rows = self._twice(known.location.pack, lambda known=known: list(self.rows_of(known)))  # type: ignore[misc]
                for row in rows:
                    if low <= encode_key(row.bucket.encode(), row.key.encode()) < high:
                        yield row

    def _twice(self, pack: bytes, read: Callable[[], T]) -> T:
        name, pack_bytes = self._pack(pack)
        return self._fetcher.twice(name, lambda: pack_bytes, read)
