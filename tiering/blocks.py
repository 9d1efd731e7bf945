"""Blocks of checkpoints in an object store: where pages come from that have left."""

from __future__ import annotations

from lowwater.tiering.names import pack_object_name
from lowwater.tiering.store import Store


class StoreBlocks:
    """A `BlockSource` (engine/away.py) that asks the store for each block. It keeps nothing."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read_block(self, pack: bytes, offset: int, size: int, block_hash: bytes) -> bytes:
        return self._store.read(pack_object_name(pack), offset, offset + size)
