"""The blocks of shipped checkpoints, looked at as a restore would read them.

Always true: a list of blocks that was looked at for one checkpoint is not looked at again for the next one,
which mostly has the same; a block is taken only with its hash; memory is bounded, whatever the size of packs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple

from lowwater.engine.catalogue import CheckpointDescriptor
from lowwater.engine.check_checkpoints import why_misplaced
from lowwater.engine.checkpoints import CheckpointRow
from lowwater.engine.ckpt import Checkpoint, ListEntry
from lowwater.engine.content import Known, list_boundaries
from lowwater.engine.format import HEADER_BYTES, SegmentHeader
from lowwater.engine.pages import Boundaries, encode_key
from lowwater.engine.real import RealClock
from lowwater.engine.recover import creation_of
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.names import segment_name
from lowwater.tiering.reached import WRONG, Line
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint
from lowwater.tiering.store import Store
from lowwater.tiering.verify import ObjectEnds, open_segment


class _Looked(NamedTuple):
    """What is known of a list of blocks."""

    rows: int
    blocks: int
    first_key: bytes
    last_key: bytes


class CheckpointChecker:
    """Of one archive. `sound` are the packs that are there and good: others were told already."""

    def __init__(self, store: Store, line: Line, sound: set[bytes]) -> None:
        self._store = store
        self._line = line
        self._sound = sound
        self._fetcher = Fetcher(store, clock=RealClock())
        self._looked: dict[ListEntry, _Looked] = {}
        self._boundaries = self._read_boundaries()

    def _read_boundaries(self) -> tuple[Boundaries, Boundaries] | None:
        """Where blocks and lists begin, by the log's first entry; None where that cannot be read."""
        first = next(iter(self._line.segments), None)
        if first is None:
            return None
        try:
            file = open_segment(ObjectEnds(self._store, segment_name(first)))
            header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
            if header.seq_before:
                return None
            creation = creation_of(file, header)
            page_keys = creation.settings.page_keys
        except WRONG:
            return None  # the segment was told already, or is in another archive
        assert page_keys is not None
        return Boundaries(creation.salt, page_keys), list_boundaries(creation.salt, page_keys)

    def check(self, descriptor: CheckpointDescriptor, index: Checkpoint) -> Iterator[str]:
        """What is wrong with the blocks of a checkpoint."""
        if not self._sound.issuperset(index.packs):
            return
        stored = RemoteCheckpoint(self._fetcher, descriptor)
        rows = blocks = 0
        last_key = b""
        try:
            for entry in index.lists:
                looked = self._looked.get(entry)
                if looked is None:
                    looked = yield from self._look(stored, entry, is_first=not blocks)
                    self._looked[entry] = looked
                if not last_key < looked.first_key:
                    yield "a list of blocks is out of order"
                rows, blocks, last_key = rows + looked.rows, blocks + looked.blocks, looked.last_key
        except WRONG as error:
            yield str(error)
            return
        if (rows, blocks) != (index.row_count, index.block_count):
            yield "the checkpoint holds other counts than it says"

    def _look(
        self, stored: RemoteCheckpoint, entry: ListEntry, *, is_first: bool
    ) -> Generator[str, None, _Looked]:
        rows = blocks = 0
        first_key = last_key = b""
        for known in stored.blocks_of(entry):
            found = list(stored.rows_of(known))
            keys = [encode_key(row.bucket.encode(), row.key.encode()) for row in found]
            why = self._why_misplaced(known, keys, last_key, is_first=is_first and not blocks)
            if not blocks and known.listed.key != entry.key:
                why = "does not begin where its list does"
            if why:
                yield f"a block {why}"
            for row in found:
                if row.place is not None and not self._is_place(row):
                    yield f"the large value of seq {row.seq} lies in no segment of the catalogue"
            rows, blocks, first_key, last_key = rows + len(keys), blocks + 1, first_key or keys[0], keys[-1]
        return _Looked(rows, blocks, first_key, last_key)

    def _why_misplaced(self, known: Known, keys: list[bytes], last_key: bytes, *, is_first: bool) -> str:
        if self._boundaries is None:
            return ""
        begins_block, begins_list = (each.is_boundary for each in self._boundaries)
        if not is_first and begins_list(known.listed.key) != (not last_key):
            return "lies in another list than the one where it belongs"
        return why_misplaced(known.listed, keys, last_key, begins_block, is_first=is_first)

    def _is_place(self, row: CheckpointRow) -> bool:
        """Whether there is a segment that begins with this seq, and reaches so far."""
        assert row.place is not None
        if not self._line.whole:
            return True
        segment_first, offset = row.place
        segment = self._line.catalogue.segment_of(segment_first)
        return segment is not None and segment.first == segment_first and offset < segment.body_bytes
