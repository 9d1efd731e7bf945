"""Packing: which blocks go into which pack, and where lists and their blocks lie then.

Always true:
  - blocks that are not in the base come in the order of their keys, each with its places right behind it; a
    pack ends with the block that brings it to PACK_BYTES. Lists come likewise, in packs of their own;
  - that depends on the blocks and the base alone, and not on who packs: a replica that has their bytes, or
    somebody who knows no more than their sizes and hashes;
  - in memory are the pack that is being filled, one of lists, and a few hundred bytes for each list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lowwater.engine.checkpoint.checkpoints import StoredCheckpoint
from lowwater.engine.checkpoint.content import AnyBlock, AwayBlock, Block, IsBoundary, KnownBlocks
from lowwater.engine.format.blocks import (
    HASH_BYTES,
    NO_HASH,
    Listed,
    Location,
    encode_list,
    encode_locations,
    encode_places,
    hash_of,
    places_hash_of,
)
from lowwater.engine.format.ckpt import PACK_BYTES, ListEntry, pack_header

# After so many lists others may run.
LISTS_AT_ONCE = 16


class Described(NamedTuple):
    """A block whose bytes are elsewhere, with its places."""

    listed: Listed
    places_hash: bytes
    places_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.listed.block_bytes + self.places_bytes


Packed = bytes | Described
"""What stands in a pack: bytes, or a block and its places that whoever writes it has to find."""
WritePack = Callable[[list[bytes]], Generator[None, None, bytes]]
WriteDescribed = Callable[[list[Packed]], Generator[None, None, bytes]]
"""Writes a pack, and returns its hash."""


@dataclass(slots=True)
class _Pack:
    """One that is being filled. Its hash is known when it is full."""

    parts: list[Packed] = field(default_factory=lambda: [pack_header()])
    size_bytes: int = len(pack_header())
    hash: bytes = b""

    def add(self, *parts: Packed) -> int:
        """Returns the offset at which they begin."""
        assert not self.hash, "a pack that is written is full"
        offset = self.size_bytes
        self.parts += parts
        self.size_bytes += sum(map(_bytes_of, parts))
        return offset


def _bytes_of(part: Packed) -> int:
    return part.size_bytes if isinstance(part, Described) else len(part)


@dataclass(slots=True)
class _Packed:
    """Where a block will lie once its pack has a hash."""

    pack: _Pack
    offset: int
    places_hash: bytes
    places_bytes: int

    def location(self) -> Location:
        assert self.pack.hash
        return Location(self.pack.hash, self.offset, self.places_hash, self.places_bytes)


@dataclass(slots=True)
class _List:
    """A list and where its blocks lie. Once that is known, its entry and the packs take the place of both."""

    blocks: list[Listed]
    places: list[Location | _Packed]
    packs: list[bytes] = field(default_factory=list)
    entry: ListEntry | None = None
    pack: _Pack | None = None


class Packing:
    """Puts blocks that are not in the base into packs, in the order of their keys, and lists behind them."""

    def __init__(
        self,
        write_pack: WritePack | WriteDescribed,
        base: StoredCheckpoint | None,
        begins_list: IsBoundary,
    ) -> None:
        """Give a `WriteDescribed` where `Described` blocks come."""
        self._write_pack: Any = write_pack
        self._begins_list = begins_list
        self._base_packs = {} if base is None else base.index.packs
        self._base_blocks = _Cursor(iter(()) if base is None else base.blocks())
        self._base_lists = {} if base is None else {each.list_hash: each for each in base.index.lists}
        self._data = _Pack()
        self._listed = _Pack()
        self._open = _List([], [])
        # Lists that wait for packs of their blocks, and then for their own, in order.
        self._waiting: deque[_List] = deque()
        self._placed: list[_List] = []
        self._sizes: dict[bytes, int] = {}
        self.row_count = 0
        self.block_count = 0
        self.rows_written = 0

    def add(self, block: AnyBlock | Described) -> Generator[None, None, None]:
        listed = block.listed
        if self._open.blocks and self._begins_list(listed.key):
            self._end_list()
        where: Location | _Packed | None
        if isinstance(block, KnownBlocks):
            where = block.location
        else:
            where = self._base_blocks.find(listed)
            if where is None:
                where = self._pack(block.read() if isinstance(block, AwayBlock) else block)
        self._open.blocks.append(listed)
        self._open.places.append(where)
        self.row_count += listed.row_count
        self.block_count += 1
        if self._data.size_bytes >= PACK_BYTES:
            yield from self._write_data()

    def _pack(self, block: Block | Described) -> _Packed:
        self.rows_written += block.listed.row_count
        if isinstance(block, Described):
            return _Packed(self._data, self._data.add(block), block.places_hash, block.places_bytes)
        if not block.places:
            return _Packed(self._data, self._data.add(block.data), NO_HASH, 0)
        places = encode_places(block.places)
        return _Packed(self._data, self._data.add(block.data, places), hash_of(places), len(places))

    def _end_list(self) -> None:
        self._waiting.append(self._open)
        self._open = _List([], [])

    def _write_data(self) -> Generator[None, None, None]:
        yield from self._write(self._data)
        self._data = _Pack()
        yield from self._place_lists()

    def _write(self, pack: _Pack) -> Generator[None, None, None]:
        pack.hash = yield from self._write_pack(pack.parts)
        assert len(pack.hash) == HASH_BYTES
        self._sizes[pack.hash] = pack.size_bytes
        pack.parts = []

    def _place_lists(self) -> Generator[None, None, None]:
        """The lists all of whose blocks lie somewhere, as far as they come without a gap."""
        while self._waiting:
            each = self._waiting[0]
            if any(isinstance(place, _Packed) and not place.pack.hash for place in each.places):
                return
            self._waiting.popleft()
            self._place_list(each)
            self._placed.append(each)
            if self._listed.size_bytes >= PACK_BYTES:
                yield from self._write(self._listed)
                self._listed = _Pack()
            yield

    def _place_list(self, each: _List) -> None:
        locations = [place.location() if isinstance(place, _Packed) else place for place in each.places]
        blocks, each.blocks, each.places = each.blocks, [], []
        each.packs = list(dict.fromkeys(location.pack for location in locations))
        data = encode_list(blocks)
        list_hash = hash_of(data)
        each.entry = self._base_lists.get(list_hash)
        if each.entry is not None:
            return
        located = encode_locations(locations)
        each.pack = self._listed
        each.entry = ListEntry(
            blocks[0].key,
            list_hash,
            len(data),
            hash_of(located),
            len(located),
            places_hash_of(locations),
            b"",
            self._listed.add(data, located),
        )

    def finish(self) -> Generator[None, None, tuple[list[ListEntry], dict[bytes, int]]]:
        """The entries of all lists, and all packs that they lead to, with their sizes."""
        if self._open.blocks:
            self._end_list()
        if len(self._data.parts) > 1:
            yield from self._write(self._data)
        yield from self._place_lists()
        assert not self._waiting
        if len(self._listed.parts) > 1:
            yield from self._write(self._listed)
        lists: list[ListEntry] = []
        packs: dict[bytes, int] = {}
        for number, each in enumerate(self._placed):
            assert each.entry is not None
            entry = each.entry if each.pack is None else each.entry._replace(pack=each.pack.hash)
            lists.append(entry)
            for pack in (*each.packs, entry.pack):
                packs.setdefault(pack, self._size_of(pack))
            if number % LISTS_AT_ONCE == 0:
                yield
        return lists, packs

    @property
    def bytes_written(self) -> int:
        """The size of all packs that were written."""
        return sum(self._sizes.values())

    def _size_of(self, pack: bytes) -> int:
        size = self._sizes.get(pack)
        return self._base_packs[pack] if size is None else size


class _Cursor:
    """The blocks of the base, asked for in the order of their keys."""

    def __init__(self, blocks: Iterator[KnownBlocks]) -> None:
        self._blocks = blocks
        self._current = next(blocks, None)

    def find(self, listed: Listed) -> Location | None:
        """Where the base has this very block."""
        while self._current is not None and self._current.listed.key < listed.key:
            self._current = next(self._blocks, None)
        if self._current is None or self._current.listed != listed:
            return None
        return self._current.location
