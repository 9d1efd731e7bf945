"""Building the checkpoint of a seq from an archive alone, on as many machines as it needs.

Always true:
  - what is written is what an engine writes: the same blocks, packs, lists and index under the same names,
    byte by byte. Where the archive has recorded a checkpoint of this seq, and it is another one, that is
    corruption, and no index is written;
  - an index is there only when all of its packs are. What is there already is compared and kept, so a build
    that was stopped is simply done again;
  - rows and blocks stay in tasks; only what describes blocks comes to the driver, in tables of Arrow, some
    150 bytes of each. Rows are sorted by Spark, which spills, and divided by its samples of their keys,
    however they are spread.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import pyarrow as pa

from lowwater.engine.checkpoint.checkpoints import StoredCheckpoint
from lowwater.engine.checkpoint.content import list_boundaries, lists_of
from lowwater.engine.checkpoint.packing import Described, Packed, Packing
from lowwater.engine.format.blocks import HASH_BYTES, NO_HASH, encode_list, hash_of, root_of
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.ckpt import Checkpoint, ListEntry, encode_checkpoint, pack_header
from lowwater.engine.format.entries import decode_payload
from lowwater.engine.format.format import FRAME_BYTES, Kind
from lowwater.engine.format.moments import require_seq
from lowwater.engine.log.chain import Creation
from lowwater.engine.seams.real import RealClock
from lowwater.engine.state.catalogue import CheckpointDescriptor, describe_checkpoint
from lowwater.errors import Corrupt, InvalidEntry, StoreCorrupt
from lowwater.spark.control import due_at
from lowwater.spark.cutting import BLOCK_TYPES, cut_fragments, cut_part, described_in
from lowwater.spark.entry_columns import as_arrow, schema_of
from lowwater.spark.jobs import Progress, errors_of_tasks
from lowwater.spark.pinned_archive import BaseCheckpoint, PinnedArchive, Readers, StoreOptions, WantedParts
from lowwater.spark.plan import (
    PART_BYTES,
    PartPlace,
    Pinned,
    Verify,
    creation_of,
    open_own,
    open_place,
    seq_of,
)
from lowwater.spark.reading import CONTENT_COLUMNS, CONTENT_TYPES, checkpoint_content, newest_content
from lowwater.spark.tasks import cores_of, map_batches
from lowwater.tiering.built_checkpoints import built_checkpoints
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.names import checkpoint_name, pack_object_name, segment_name
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint
from lowwater.tiering.remote_segment import RemoteSegment
from lowwater.tiering.shipped_log import Moment
from lowwater.tiering.store import Store, at
from lowwater.tiering.verified_writes import write_verified

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")

PACK_TYPES = {"pack": "bigint", "hash": "binary", "size": "bigint", "made": "boolean"}
_PACK_SCHEMA = as_arrow(PACK_TYPES)
# So many descriptions of blocks are objects at once.
DESCRIBED_ROWS = 4096
# So many frames, or rows of a base, make one range of keys.
RANGE_ROWS = 500_000


class Built(NamedTuple):
    """A checkpoint that is in the archive now. `packs_written` of its packs were not there before."""

    seq: int
    id: str
    name: str
    root: str
    control_hash: str
    base_seq: int
    rows: int
    blocks: int
    packs: int
    packs_written: int


def _nobody(_what: str, _done: int, _total: int) -> None:
    """Nobody looks."""


def build_checkpoint(
    spark: SparkSession,
    uri: str,
    at: int | None = None,
    *,
    from_segments: bool = False,
    verify: Verify = "strict",
    options: StoreOptions = None,
    part_bytes: int = PART_BYTES,
    progress: Progress | None = None,
) -> Built:
    """Build the checkpoint that the entry `at` asks for, or the newest such entry that was shipped, and write
    it below the archive's `checkpoints/` and `data/packs/`, where a restore finds it.

    The build begins with the newest shipped checkpoint before, and reads only the log above it.
    `from_segments` trusts no checkpoint, and reads the whole log.
    """
    archive = PinnedArchive.open(spark, uri, options, verify, part_bytes)
    if archive.pinned.place.is_log:
        raise InvalidEntry(
            "this is the directory of a log, and no archive",
            path=archive.pinned.place.uri,
            hint="a database makes checkpoints itself, with `db.checkpoint()`",
        )
    seq = _entry_of(archive, at)
    store = open_own(archive.pinned.place, read_only=False)
    builder = _Builder(archive, store, creation_of(archive.pinned), from_segments, progress or _nobody)
    try:
        with errors_of_tasks("the checkpoint"):
            return builder.build(seq)
    finally:
        builder.close()


def root_as_of(
    spark: SparkSession,
    uri: str,
    at: Moment = None,
    *,
    from_segments: bool = False,
    verify: Verify = "strict",
    options: StoreOptions = None,
    part_bytes: int = PART_BYTES,
) -> str:
    """Return the root of the content as of a seq or a time, or of all that was shipped, as `db.root(seq)`
    does. Nothing is written."""
    archive = PinnedArchive.open(spark, uri, options, verify, part_bytes)
    store = open_place(archive.pinned.place)
    builder = _Builder(archive, store, creation_of(archive.pinned), from_segments, _nobody)
    try:
        with errors_of_tasks("the root"):
            return builder.root(archive.seq(at))
    finally:
        builder.close()


def _entry_of(archive: PinnedArchive, moment: int | None) -> int:
    """The seq of a checkpoint entry that counts."""
    pinned = archive.pinned
    if moment is not None:
        require_seq(moment)
        seq_of(pinned, moment)
    newest = _newest_entry(pinned, pinned.hwm if moment is None else moment)
    if newest and moment in (None, newest):
        return newest
    if moment is None:
        what = "no checkpoint entry was shipped yet"
    else:
        what = f"seq {moment} is no checkpoint entry"
        what += f": the one before it is {newest}" if newest else ", and there is none before it"
    raise InvalidEntry(
        what,
        path=pinned.place.uri,
        seq=moment,
        hint="order one with `db.checkpoint()`, and ship it; `lowwater log` lists entries",
    )


def _newest_entry(pinned: Pinned, seq: int) -> int:
    """The last checkpoint entry up to a seq, which ends its segment; 0 for none."""
    store = open_place(pinned.place)
    try:
        fetcher = Fetcher(store, clock=RealClock())
        for each in reversed(pinned.segments):
            segment = RemoteSegment(fetcher, pinned.name_of(each), each)
            if each.last <= seq and Kind.CHECKPOINT in segment.kinds():
                found = segment.frame_of(each.last)
                assert found is not None
                entry = decode_payload(each.last, found[1][FRAME_BYTES:])
                if entry.kind == "checkpoint" and entry.refused is None:
                    return int(each.last)
        return 0
    finally:
        store.close()


class _Builder:
    def __init__(
        self,
        archive: PinnedArchive,
        store: Store,
        creation: Creation,
        from_segments: bool,
        progress: Progress,
    ) -> None:
        assert creation.settings.page_keys is not None
        assert creation.settings.inline_bytes_max is not None
        self._archive = archive
        self._spark = archive.spark
        self._pinned = archive.pinned
        self._creation = creation
        self._from_segments = from_segments
        self._progress = progress
        self._boundaries = Boundaries(creation.salt, creation.settings.page_keys)
        self._lists = list_boundaries(creation.salt, creation.settings.page_keys)
        self._inline_bytes_max = creation.settings.inline_bytes_max
        self._store = store
        # What the archive of a clone does not have lies with its parent.
        self._source = open_place(self._pinned.place)
        self._fetcher = Fetcher(self._source, clock=RealClock())

    def close(self) -> None:
        self._source.close()
        self._store.close()

    def root(self, seq: int) -> str:
        with self._blocks(seq, self._begin(seq)) as blocks:
            described = self._describe(blocks)
        parts = lists_of((each.listed for each in in_order(described)), self._lists.is_boundary)
        return root_of(hash_of(encode_list(part)) for part in parts).hex()

    def _begin(self, seq: int) -> BaseCheckpoint | None:
        """The newest shipped checkpoint up to a seq."""
        known = [each for each in self._pinned.checkpoints if each.seq <= seq and not self._from_segments]
        return BaseCheckpoint.of(self._fetcher, known)

    def build(self, seq: int) -> Built:
        # One of this very seq is what is to be made.
        begun_with = self._begin(seq - 1)
        self._progress("control", 0, 1)
        due = due_at(self._archive, seq, self._creation, begun_with)
        self._progress("control", 1, 1)
        base = self._base(due.base_seq) if due.base_seq else None
        with self._blocks(seq, begun_with) as blocks:
            described = self._describe(blocks)
            packs = self._write_packs(blocks, described, base)
        written = sum(made for _, made in packs)
        packing = self._packing(base, _Known([each for each, _ in packs], self._store))
        lists, all_packs = packed(packing, described)
        index = Checkpoint(
            seq=seq,
            time_us=due.time_us,
            cluster_id=self._cluster_id(seq),
            base_seq=due.base_seq,
            base_hash=NO_HASH if base is None else base.file_hash,
            row_count=packing.row_count,
            block_count=packing.block_count,
            lists=lists,
            packs=all_packs,
            control=due.control,
        )
        data = encode_checkpoint(index)
        found = describe_checkpoint(data)
        self._require_same(found)
        self._progress("index", 0, 1)
        keep(self._store, checkpoint_name(found), data)
        self._progress("index", 1, 1)
        return Built(
            seq=seq,
            id=found.id,
            name=checkpoint_name(found),
            root=index.root.hex(),
            control_hash=index.control_hash.hex(),
            base_seq=index.base_seq,
            rows=index.row_count,
            blocks=index.block_count,
            packs=len(all_packs),
            packs_written=written,
        )

    def _require_same(self, built: CheckpointDescriptor) -> None:
        """Raise Corrupt where another checkpoint was recorded of this seq."""
        for each in self._pinned.checkpoints:
            if each.seq == built.seq and each._replace(recorded_seq=0) != built:
                raise Corrupt(
                    f"the archive has the root {each.root.hex()}, and its log makes {built.root.hex()}",
                    path=at(self._store.uri, checkpoint_name(each)),
                    seq=built.seq,
                    hint="run `lowwater scrub --deep`: the log or the checkpoint is not what was written",
                )

    def _cluster_id(self, seq: int) -> bytes:
        found = self._archive.pinned.catalogue().segment_of(seq)
        assert found is not None
        return RemoteSegment(self._fetcher, segment_name(found), found).header().cluster_id

    def _base(self, seq: int) -> StoredCheckpoint:
        """The checkpoint of which blocks are kept. One that was never shipped is built first: its blocks lie
        in packs of its own."""
        for each in self._pinned.checkpoints:
            if each.seq == seq:
                return RemoteCheckpoint(self._fetcher, each)
        if self._built(seq) is None:
            self.build(seq)
        found = self._built(seq)
        assert found is not None
        return RemoteCheckpoint(self._fetcher, found)

    def _built(self, seq: int) -> CheckpointDescriptor | None:
        return next(built_checkpoints(self._source, seq - 1, seq, self._cluster_id(seq)), None)

    # ------------------------------------------------------------------ blocks

    @contextmanager
    def _blocks(self, seq: int, base: BaseCheckpoint | None) -> Iterator[DataFrame]:
        """All blocks, on the disks of executors."""
        from pyspark import StorageLevel

        readers = Readers(
            partial(newest_content, inline_bytes_max=self._inline_bytes_max),
            checkpoint_content,
            CONTENT_TYPES,
        )
        rows = self._archive.newest(WantedParts(CONTENT_COLUMNS, buckets=True), seq, base, readers)
        in_order = rows.repartitionByRange(self._ranges(seq, base), "ekey").sortWithinPartitions("ekey")
        schema = schema_of(BLOCK_TYPES, tuple(BLOCK_TYPES))
        pieces = map_batches(in_order, partial(cut_part, boundaries=self._boundaries), schema)
        pieces = pieces.persist(StorageLevel.DISK_ONLY)
        edges = pieces.filter("not is_block").repartition(1).sortWithinPartitions("key")
        whole = map_batches(edges, partial(cut_fragments, boundaries=self._boundaries), schema)
        blocks = pieces.filter("is_block").unionByName(whole).drop("is_block")
        blocks = blocks.persist(StorageLevel.DISK_ONLY)
        try:
            yield blocks
        finally:
            blocks.unpersist()
            pieces.unpersist()

    def _ranges(self, seq: int, base: BaseCheckpoint | None) -> int:
        frames = sum(each.frame_count for each in self._pinned.segments if each.first <= seq)
        if base is not None:
            above = [each for each in self._pinned.segments if base.descriptor.seq < each.first <= seq]
            frames = sum(each.frame_count for each in above) + base.remote.index.row_count
        return max(cores_of(self._spark), -(-frames // RANGE_ROWS))

    def _describe(self, blocks: DataFrame) -> pa.Table:
        """What describes each block, in the order of their keys."""
        self._progress("blocks", 0, 1)
        described = blocks.drop("data").toArrow().sort_by("key")
        self._progress("blocks", len(described), len(described))
        return described

    # ------------------------------------------------------------------ packs

    def _packing(self, base: StoredCheckpoint | None, sink: _Sink) -> Packing:
        return Packing(partial(_write_to, sink), base, self._lists.is_boundary)

    def _write_packs(
        self, blocks: DataFrame, described: pa.Table, base: StoredCheckpoint | None
    ) -> list[tuple[bytes, bool]]:
        """Write the packs of blocks, in tasks: their hashes, in order, and whether they were not there."""
        layout = _Layout()
        packed(self._packing(base, layout), described)
        sizes = layout.sizes
        if not sizes:
            return []
        placed = self._spark.createDataFrame(layout.placed())
        count = min(len(sizes), 4 * cores_of(self._spark))
        divided = blocks.join(placed, "key").repartition(count, "pack").sortWithinPartitions("pack", "key")
        written = map_batches(
            divided,
            partial(write_packs, place=self._pinned.place),
            schema_of(PACK_TYPES, tuple(PACK_TYPES)),
        )
        self._progress("packs", 0, len(sizes))
        rows = written.toArrow().sort_by("pack").to_pylist()
        self._progress("packs", len(rows), len(sizes))
        assert [row["pack"] for row in rows] == list(range(len(sizes)))
        assert [row["size"] for row in rows] == sizes
        return [(row["hash"], row["made"]) for row in rows]


# ---------------------------------------------------------------------------- packing


def in_order(described: pa.Table) -> Iterator[Described]:
    """What a table describes, some of it at once: as objects of Python it takes many times as much."""
    for batch in described.to_batches(max_chunksize=DESCRIBED_ROWS):
        yield from (each for _, each in described_in(batch))


def packed(packing: Packing, described: pa.Table) -> tuple[list[ListEntry], dict[bytes, int]]:
    """Put all blocks into packs: the entries of their lists, and all packs, with their sizes."""
    for each in in_order(described):
        exhaust(packing.add(each))
    return exhaust(packing.finish())


def exhaust(steps: Generator[None, None, T]) -> T:
    """What a generator returns that gives others time in between."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found


class _Sink(Protocol):
    """What takes packs, and tells their hashes: those of blocks by what describes them, those of lists by
    their bytes."""

    def blocks(self, blocks: Sequence[Described]) -> bytes: ...

    def lists(self, data: bytes) -> bytes: ...


def _write_to(sink: _Sink, parts: list[Packed]) -> Generator[None, None, bytes]:
    yield
    blocks = [part for part in parts if isinstance(part, Described)]
    return sink.blocks(blocks) if blocks else sink.lists(b"".join(_bytes_among(parts)))


def _bytes_among(parts: Iterable[Packed]) -> Iterator[bytes]:
    return (part for part in parts if isinstance(part, bytes))


class _Layout:
    """Notes which blocks make a pack, before anything is written."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._placed: list[pa.Table] = []

    def blocks(self, blocks: Sequence[Described]) -> bytes:
        number = len(self.sizes)
        self.sizes.append(len(pack_header()) + sum(each.size_bytes for each in blocks))
        keys = pa.array([each.listed.key for each in blocks], pa.binary())
        numbers = pa.repeat(pa.scalar(number, pa.int64()), len(blocks))
        self._placed.append(pa.table({"key": keys, "pack": numbers}))
        return number.to_bytes(HASH_BYTES, "big")

    def lists(self, data: bytes) -> bytes:
        return hash_of(data)

    def placed(self) -> pa.Table:
        """The key of each block, and the number of its pack."""
        return pa.concat_tables(self._placed)


class _Known:
    """Knows the hashes of the packs of blocks, which are there; writes those of lists."""

    def __init__(self, hashes: Sequence[bytes], store: Store) -> None:
        self._hashes = iter(hashes)
        self._store = store

    def blocks(self, blocks: Sequence[Described]) -> bytes:
        return next(self._hashes)

    def lists(self, data: bytes) -> bytes:
        pack = hash_of(data)
        keep(self._store, pack_object_name(pack), data)
        return pack


# ---------------------------------------------------------------------------- writing


def keep(store: Store, name: str, data: bytes) -> bool:
    """Write an object, and return whether it was not there. Raise StoreCorrupt where other bytes were."""
    made = write_verified(store, name, lambda: [data], size=len(data))
    if not made and hash_of(store.read(name)) != hash_of(data):
        raise StoreCorrupt(
            "the store has other bytes under this name",
            path=at(store.uri, name),
            hint="run `lowwater scrub`: this object is damaged",
        )
    return made


_stores: dict[object, Store] = {}


def write_packs(batches: Iterator[pa.RecordBatch], place: PartPlace) -> Iterator[pa.RecordBatch]:
    """Blocks in order, with the numbers of their packs."""
    store = _stores.get(place.known_as)
    if store is None:
        store = _stores[place.known_as] = open_own(place, read_only=False)
    current, parts = -1, [pack_header()]
    for batch in batches:
        numbers, data = batch.column("pack").to_pylist(), batch.column("data").to_pylist()
        for number, block in zip(numbers, data, strict=True):
            if number != current and current >= 0:
                yield _written(store, current, parts)
                parts = [pack_header()]
            current = number
            parts.append(block)
    if current >= 0:
        yield _written(store, current, parts)


def _written(store: Store, number: int, parts: list[bytes]) -> pa.RecordBatch:
    data = b"".join(parts)
    pack = hash_of(data)
    made = keep(store, pack_object_name(pack), data)
    columns = [[number], [pack], [len(data)], [made]]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _PACK_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_PACK_SCHEMA)
