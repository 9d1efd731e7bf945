"""The blocks of shipped checkpoints, for pages that have left."""

from __future__ import annotations

from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.names import pack_object_name


class ArchivedBlocks:
    """Fulfils `BlockSource`: what comes is compared with its hash by whoever asked."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def read_block(self, pack: bytes, offset: int, size: int, block_hash: bytes) -> bytes:
        name = pack_object_name(pack)
        with self._fetcher.query():
            data = self._fetcher.read(name, self._fetcher.size_of(name), offset, offset + size)
        self._fetcher.metrics.used(len(data))
        return data
