"""Making checkpoints: in the background, in short steps, of a seq that stays readable until it is done.

Always true:
  - every byte that is written is a function of the log: of the rows as of the checkpoint's seq, and of its
    base, which the log names. What is in memory, when pages were flushed, and how often it was begun changes
    nothing;
  - all changes up to the seq are in pages before the first is read, so no change in memory is looked at;
  - a checkpoint is due until it is durable under its name; one that cannot be made is given up, and that is
    said. The one after it, which needs its blocks, has to be a full one;
  - where a page is needed that is away and does not come, it stays due, and is begun again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from lowwater.engine.blocks import (
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
from lowwater.engine.checkpoints import Checkpoints, StoredCheckpoint
from lowwater.engine.ckpt import PACK_BYTES, Checkpoint, ListEntry, encode_checkpoint, pack_header
from lowwater.engine.content import AnyBlock, AwayBlock, Block, IsBoundary, Known, blocks_at
from lowwater.engine.due import Due
from lowwater.engine.state import State
from lowwater.errors import DiskFull, InternalError, LowwaterError, NotFound, ReopenError, RetryError
from lowwater.logging import get_logger

_logger = get_logger("checkpoint")

# How many blocks are looked at before others may run.
BLOCKS_AT_ONCE = 16
FAILURES_MAX = 16
_HINT = "the database goes on without it: deal with the cause, and make another checkpoint"


class MustWait(Exception):
    """What a checkpoint needs is away, and did not come: it stays due."""

    def __init__(self, error: LowwaterError) -> None:
        super().__init__(error)
        self.error = error


class Checkpointer:
    def __init__(
        self,
        state: State,
        checkpoints: Checkpoints,
        *,
        flush_to: Callable[[int], bool],
        begins_list: Callable[[], IsBoundary],
        cluster_id: Callable[[int], bytes],
    ) -> None:
        """`flush_to(seq)` does a step towards having everything up to there in pages; False when it is."""
        self._state = state
        self._checkpoints = checkpoints
        self._flush_to = flush_to
        self._begins_list = begins_list
        self._cluster_id = cluster_id
        self._job: Generator[None, None, None] | None = None
        self._due: Due | None = None
        self.is_closed = False
        # Why the last ones were given up, by seq.
        self.failures: dict[int, LowwaterError] = {}
        self.made = 0
        self.rows_written = 0

    def step(self) -> bool:
        """One short piece of work. False where there is none."""
        if self.is_closed:
            return False
        due = next(iter(self._state.checkpoints_due), None)
        if due is None or due != self._due:
            self.stop()
            self._due = due
        if due is None:
            return False
        if self._job is None:
            try:
                if self._flush_to(due.seq):
                    return True
            except MustWait as wait:
                if isinstance(wait.error, RetryError):
                    raise
                self._give_up(due, wait.error)
                return True
            self._job = self._make(due)
        try:
            next(self._job)
        except StopIteration:
            self._end(due)
        except DiskFull as error:
            self._give_up(due, error)
        except RetryError as error:
            self.stop()
            raise MustWait(error) from error
        except LowwaterError as error:
            self._give_up(due, error)
        except Exception as error:  # noqa: BLE001 — the database goes on without this checkpoint
            failure = InternalError(f"a checkpoint could not be made: {error!r}", seq=due.seq)
            failure.__cause__ = error
            self._give_up(due, failure)
        return True

    def close(self) -> None:
        """Write nothing more: what is under way is begun again in the next life."""
        self.is_closed = True
        self.stop()

    def stop(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None

    def _end(self, due: Due) -> None:
        self._job = self._due = None
        self._state.remove_due(due.seq)

    def _give_up(self, due: Due, error: LowwaterError) -> None:
        if self._checkpoints.of(due.seq) is not None:
            _logger.warning("old checkpoints were not removed", error=str(error))
            self._end(due)
            return
        _logger.warning("a checkpoint was given up", seq=due.seq, error=str(error))
        if isinstance(error, ReopenError | DiskFull):
            error.hint = _HINT
        while len(self.failures) >= FAILURES_MAX:
            del self.failures[next(iter(self.failures))]
        self.failures[due.seq] = error
        self._end(due)
        try:
            for _ in self._thin_out():
                pass  # what was written for it takes room that others need
        except LowwaterError:
            pass  # the next one that is made tries again

    # ------------------------------------------------------------------ one checkpoint

    def _make(self, due: Due) -> Generator[None, None, None]:
        if self._checkpoints.of(due.seq) is None:
            base = None
            if due.base_seq:
                base = self._checkpoints.of(due.base_seq)
                if base is None:
                    raise NotFound(
                        f"the checkpoint of {due.base_seq}, of which this one needs the blocks, is not here",
                        seq=due.seq,
                        hint="make a full checkpoint",
                    )
            self._checkpoints.begin()
            packing = _Packing(self._checkpoints, base, self._begins_list())
            for count, each in enumerate(blocks_at(self._state, due.seq, base=base, with_changes=False)):
                if each is not None:
                    yield from packing.add(each)
                if each is None or count % BLOCKS_AT_ONCE == 0:
                    yield
            lists, packs = yield from packing.finish()
            self.rows_written += packing.rows_written
            index = Checkpoint(
                seq=due.seq,
                time_us=due.time_us,
                cluster_id=self._cluster_id(due.seq),
                base_seq=due.base_seq,
                base_hash=NO_HASH if base is None else base.file_hash,
                row_count=packing.row_count,
                block_count=packing.block_count,
                lists=lists,
                packs=packs,
                control=due.control,
            )
            yield from self._checkpoints.write_index(due.seq, encode_checkpoint(index))
            self.made += 1
        yield from self._thin_out()

    def _thin_out(self) -> Generator[None, None, None]:
        """Remove what neither a reader nor a checkpoint to come needs."""
        needed = [due.base_seq for due in self._state.checkpoints_due]
        return self._checkpoints.thin_out([*needed, self._state.base_seq])


# ---------------------------------------------------------------------------- packs


@dataclass(slots=True)
class _Pack:
    """One that is being filled. Its hash is known when it is full."""

    parts: list[bytes] = field(default_factory=lambda: [pack_header()])
    size_bytes: int = len(pack_header())
    hash: bytes = b""

    def add(self, *parts: bytes) -> int:
        """Returns the offset at which they begin."""
        assert not self.hash, "a pack that is written is full"
        offset = self.size_bytes
        self.parts += parts
        self.size_bytes += sum(map(len, parts))
        return offset


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


class _Packing:
    """Puts blocks that are not in the base into packs, in the order of their keys, and lists behind them."""

    def __init__(
        self, checkpoints: Checkpoints, base: StoredCheckpoint | None, begins_list: IsBoundary
    ) -> None:
        self._checkpoints = checkpoints
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

    def add(self, block: AnyBlock) -> Generator[None, None, None]:
        listed = block.listed
        if self._open.blocks and self._begins_list(listed.key):
            self._end_list()
        where: Location | _Packed | None
        if isinstance(block, Known):
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

    def _pack(self, block: Block) -> _Packed:
        self.rows_written += block.listed.row_count
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
        pack.hash = yield from self._checkpoints.write_pack(pack.parts)
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
            if number % BLOCKS_AT_ONCE == 0:
                yield
        return lists, packs

    def _size_of(self, pack: bytes) -> int:
        size = self._sizes.get(pack)
        return self._base_packs[pack] if size is None else size


class _Cursor:
    """The blocks of the base, asked for in the order of their keys."""

    def __init__(self, blocks: Iterator[Known]) -> None:
        self._blocks = blocks
        self._current = next(blocks, None)

    def find(self, listed: Listed) -> Location | None:
        """Where the base has this very block."""
        while self._current is not None and self._current.listed.key < listed.key:
            self._current = next(self._blocks, None)
        if self._current is None or self._current.listed != listed:
            return None
        return self._current.location
