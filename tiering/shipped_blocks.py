"""The blocks of shipped checkpoints, for pages that have left."""

from __future__ import annotations

from lowwater.errors import Corrupt
from lowwater.tiering.fetcher import HINT, Fetcher
from lowwater.tiering.names import pack_object_name


class ArchivedBlocks:
    """Fulfils `BlockSource`: what comes is compared with its hash by whoever asked."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        # Packs never change.
        self._sizes: dict[bytes, int] = {}

    def read_block(self, pack: bytes, offset: int, size: int, block_hash: bytes) -> bytes:
        name = pack_object_name(pack)
        with self._fetcher.query():
            pack_bytes = self._sizes.get(pack)
            if pack_bytes is None:
                pack_bytes = self._sizes[pack] = self._fetcher.size_of(name)
            if offset + size > pack_bytes:
                del self._sizes[pack]  # it may come back from a copy
                raise Corrupt(
                    f"a pack of {pack_bytes:,} bytes ends before a block that it holds",
                    path=self._fetcher.where(name),
                    offset=offset,
                    hint=HINT,
                )
            data = self._fetcher.read(name, pack_bytes, offset, offset + size)
        self._fetcher.metrics.used(len(data))
        return data

    def damaged(self, pack: bytes) -> str:
        name = pack_object_name(pack)
        if pack in self._sizes:
            self._fetcher.forget(name, self._sizes[pack])
        return self._fetcher.where(name)
