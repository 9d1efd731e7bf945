"""The blocks of shipped checkpoints, looked at as a restore would read them.

Always true: a list of blocks that was looked at for one checkpoint is not looked at again for the next one,
which mostly has the same; a block is taken only with its hash; memory is bounded, whatever the size of packs;
what was found out about lists adds up in the same way, whoever looked at them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lowwater.engine.checkpoint.check_checkpoints import why_misplaced
from lowwater.engine.checkpoint.checkpoints import CheckpointRow
from lowwater.engine.checkpoint.content import KnownBlocks, list_boundaries
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.ckpt import Checkpoint, ListEntry
from lowwater.engine.format.format import HEADER_BYTES, SegmentHeader
from lowwater.engine.format.keys import encode_key
from lowwater.engine.log.recover import creation_of
from lowwater.engine.seams.real import RealClock
from lowwater.engine.state.catalogue import CheckpointDescriptor
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.names import segment_name
from lowwater.tiering.reached import WRONG, Line
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint
from lowwater.tiering.store import Store
from lowwater.tiering.verify import ObjectEnds, open_segment


class Looked(NamedTuple):
    """What is known of a list of blocks. `wrong` are its faults, `error` why it could not be read on."""

    wrong: list[str]
    error: str | None = None
    rows: int = 0
    blocks: int = 0
    first_key: bytes = b""
    last_key: bytes = b""


class CheckpointChecker:
    """Checks the checkpoints of one archive. Several threads may share it."""

    def __init__(self, store: Store, line: Line) -> None:
        self._store = store
        self._line = line
        self._fetcher = Fetcher(store, clock=RealClock())
        self._stored: dict[CheckpointDescriptor, RemoteCheckpoint] = {}
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

    def look(self, descriptor: CheckpointDescriptor, entry: ListEntry, *, is_first: bool) -> Looked:
        """At one list, and all its blocks. `is_first` says that it is the first of its checkpoint."""
        # Two threads may both make one, which is no harm.
        stored = self._stored.setdefault(descriptor, RemoteCheckpoint(self._fetcher, descriptor))
        wrong: list[str] = []
        rows = blocks = 0
        first_key = last_key = b""
        try:
            for known in stored.blocks_of(entry):
                found = list(stored.rows_of(known))
                keys = [encode_key(row.bucket.encode(), row.key.encode()) for row in found]
                why = self._why_misplaced(known, keys, last_key, is_first=is_first and not blocks)
                if not blocks and known.listed.key != entry.key:
                    why = "does not begin where its list does"
                if why:
                    wrong.append(f"a block {why}")
                wrong += (
                    f"the large value of seq {row.seq} lies in no segment of the catalogue"
                    for row in found
                    if row.place is not None and not self._is_place(row)
                )
                rows, blocks, first_key, last_key = (
                    rows + len(keys),
                    blocks + 1,
                    first_key or keys[0],
                    keys[-1],
                )
        except WRONG as error:
            return Looked(wrong, str(error))
        return Looked(wrong, None, rows, blocks, first_key, last_key)

    def _why_misplaced(
        self, known: KnownBlocks, keys: list[bytes], last_key: bytes, *, is_first: bool
    ) -> str:
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


def add_up(index: Checkpoint, looked: Iterable[Looked], told: set[ListEntry]) -> Iterator[str]:
    """What is wrong with the blocks of a checkpoint, of whose lists this is known. What is wrong with a list
    is told once, however many checkpoints have it."""
    rows = blocks = 0
    last_key = b""
    for entry, found in zip(index.lists, looked, strict=True):
        if entry not in told:
            yield from found.wrong
        if found.error is not None:
            yield found.error
            return
        told.add(entry)
        if not last_key < found.first_key:
            yield "a list of blocks is out of order"
        rows, blocks, last_key = rows + found.rows, blocks + found.blocks, found.last_key
    if (rows, blocks) != (index.row_count, index.block_count):
        yield "the checkpoint holds other counts than it says"
