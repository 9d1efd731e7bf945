"""An archive, pinned, and what tasks have to read of it for versions and states.

Always true:
  - a part of the log is given the ends of all transactions that go on in others, and nothing else of them;
  - a state that begins with a checkpoint is the one that the whole log makes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from lowwater.engine.format.entries import decode_payload
from lowwater.engine.format.format import FRAME_BYTES, Kind
from lowwater.engine.format.keys import KEY_END, after_prefix, encode_key
from lowwater.engine.format.moments import require_seq, time_us_of
from lowwater.engine.seams.real import RealClock
from lowwater.engine.state.catalogue import CheckpointDescriptor
from lowwater.engine.state.state import LOWEST
from lowwater.errors import InvalidEntry, VersionGone
from lowwater.logging import get_logger
from lowwater.spark.entry_columns import schema_of
from lowwater.spark.jobs import errors_of_tasks
from lowwater.spark.plan import (
    Part,
    Pinned,
    PlanSelection,
    Verify,
    open_place,
    parts,
    pin,
    require_reading,
    seq_of,
    shares,
)
from lowwater.spark.reading import (
    VERSION_COLUMNS,
    ReadStretch,
    Segments,
    Slice,
    checkpoint_keys,
    checkpoint_objects,
    crossing_ends,
    newest_keys,
    newest_objects,
)
from lowwater.spark.reading import versions as read_versions
from lowwater.spark.replay import ENDS_SCHEMA, FROM_THE_BEGINNING, NO_ENDS, Ends, Since
from lowwater.spark.tasks import cores_of, run_tasks
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint
from lowwater.tiering.remote_segment import RemoteSegment
from lowwater.tiering.shipped_log import Moment

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_logger = get_logger("spark")

StoreOptions = Mapping[str, str] | None

# Of so many segments the driver looks itself which kinds of entries they have: that takes less than a job.
LOOKED_INTO_MAX = 64
# So many winners are sent to all tasks; more of them are shuffled.
BROADCAST_ROWS = 4_000_000
# A row of a checkpoint costs as much as so many frames.
ROW_COST = 4


class Readers(NamedTuple):
    """The functions that read the newest versions: of a stretch of the log, and of a slice of a
    checkpoint."""

    stretch: Callable[..., Iterator[pa.RecordBatch]]
    slice: Callable[..., Iterator[pa.RecordBatch]]
    types: Mapping[str, str]


KEYS = Readers(newest_keys, checkpoint_keys, VERSION_COLUMNS)
OBJECTS = Readers(newest_objects, checkpoint_objects, VERSION_COLUMNS)


class WantedParts(NamedTuple):
    """Which versions are wanted, and what of them."""

    columns: tuple[str, ...]
    bucket: str | None = None
    prefix: str | None = None
    buckets: bool = False
    """In a state: the records of buckets too. Among versions they always are."""


class BaseCheckpoint(NamedTuple):
    """A checkpoint to begin with, and what was open there."""

    remote: RemoteCheckpoint
    descriptor: CheckpointDescriptor
    opened: tuple[int, ...]

    @classmethod
    def of(cls, fetcher: Fetcher, known: Sequence[CheckpointDescriptor]) -> BaseCheckpoint | None:
        """The last of these whose index can be read."""
        for descriptor in reversed(known):
            remote = RemoteCheckpoint(fetcher, descriptor)
            error = remote.why_lost()
            if error is None:
                opened = remote.index.control_body.get("transactions", ())
                return cls(remote, descriptor, tuple(row[0] for row in opened))
            _logger.warning("a checkpoint of the archive is lost", object=remote.path, error=str(error))
        return None

    @property
    def since(self) -> Since:
        return Since(self.descriptor.seq, self.opened)


class PinnedArchive(NamedTuple):
    """A pinned archive, and how it is read."""

    spark: SparkSession
    pinned: Pinned
    verify: Verify
    part_bytes: int

    @classmethod
    def open(
        cls, spark: SparkSession, uri: str, options: StoreOptions, verify: Verify, part_bytes: int
    ) -> PinnedArchive:
        require_reading(verify, part_bytes)
        return cls(spark, pin(uri, options), verify, part_bytes)

    # ------------------------------------------------------------------ moments

    def seq(self, moment: Moment) -> int:
        return seq_of(self.pinned, moment)

    def range(self, start: Moment, end: Moment) -> tuple[int, int]:
        """The first and the last seq that are meant. Between two times, or since one, there may be nothing:
        then the first is the one after the last."""
        last = self.seq(end)
        first = self._start(start)
        begins, ends, above = f"seq {first}", f"seq {last}", first > last
        if isinstance(start, datetime) and not isinstance(end, int):
            begins, ends, above = f"{start}", f"{end}", end is not None and start > end
        if above:
            raise InvalidEntry(
                f"the range begins at {begins} and ends at {ends}",
                path=self.pinned.place.uri,
                seq=first,
                hint="give a start that is not after the end",
            )
        return first, last

    def _start(self, start: Moment) -> int:
        if start is None:
            return self.pinned.seq_first
        if isinstance(start, datetime):
            time_us = time_us_of(start)
            if time_us <= self.pinned.segments[0].time_min_us:
                return self.pinned.seq_first
            return self.seq(start - timedelta(microseconds=1)) + 1
        require_seq(start)
        if start > self.pinned.hwm or 0 < start <= self.pinned.seq_before:
            return self.seq(start)  # which says what is wrong
        return max(start, self.pinned.seq_first)

    # ------------------------------------------------------------------ what is read

    def parts(self, selection: PlanSelection) -> list[Part]:
        return parts(
            self.pinned,
            selection,
            verify=self.verify,
            part_bytes=self.part_bytes,
            tasks_min=2 * cores_of(self.spark),
        )

    def stretches(
        self, wanted: WantedParts, first: int, at: int, since: Since = FROM_THE_BEGINNING
    ) -> list[ReadStretch]:
        """What is to be read for all versions of seqs from `first` to `at`; since a checkpoint, for all up to
        `at` that it does not have."""
        kinds = self.kinds(first, at)
        has_ends = bool(kinds & {Kind.COMMIT, Kind.ABORT})
        begin = min([self._group_begin(first), *since.opened])
        found = self._parts_of(wanted, begin, at)
        ends = self._crossing(found, begin) if has_ends else NO_ENDS
        above = 0 if since.seq else first - 1
        if above:
            # What has ended in the range has its frames before it, where it began there.
            begun = ends.txn[ends.seq > above]
            if len(begun) and int(begun.min()) < begin:
                begin = int(begun.min())
                found = self._parts_of(wanted, begin, at)
                ends = self._crossing(found, begin)
        return [
            ReadStretch(part, at, wanted.columns, above, self._of_part(ends, part), since, wanted.buckets)
            for part in found
        ]

    def _group_begin(self, seq: int) -> int:
        """Where the group begins that an entry belongs to: it itself where it is of none. What a group has
        made is as of its last seq."""
        found = self.pinned.catalogue().segment_of(seq)
        if found is None or seq <= found.first:
            return seq
        store = open_place(self.pinned.place)
        try:
            fetcher = Fetcher(store, clock=RealClock())
            segment = RemoteSegment(fetcher, self.pinned.name_of(found), found)

            def group_of(frame: int) -> int | None:
                (position,) = segment.positions(frame, frame + 1)
                data = segment.frame_at(position)
                extras = decode_payload(seq, data[FRAME_BYTES:]).extras
                return None if extras is None else extras.group_seq_last

            frame = segment.frame_after(seq - 1)
            group = group_of(frame)
            if group is None:
                return seq
            # Its frames lie beside one another.
            return segment.seq_at(bisect_left(range(frame), True, key=lambda each: group_of(each) == group))
        finally:
            store.close()

    def _parts_of(self, wanted: WantedParts, first: int, at: int) -> list[Part]:
        return (
            self.parts(PlanSelection(first, at, bucket=wanted.bucket, prefix=wanted.prefix))
            if first <= at
            else []
        )

    def kinds(self, first: int, last: int) -> frozenset[int]:
        """The kinds of entries in a range, or more."""
        among = [each for each in self.pinned.segments if each.last >= first and each.first <= last]
        if len(among) > LOOKED_INTO_MAX:
            return frozenset(map(int, Kind))
        store = open_place(self.pinned.place)
        try:
            fetcher = Fetcher(store, clock=RealClock())
            found: set[int] = set()
            for each in among:
                found.update(RemoteSegment(fetcher, self.pinned.name_of(each), each).kinds())
            return frozenset(found)
        finally:
            store.close()

    def _crossing(self, wanted: list[Part], first: int) -> Ends:
        """The ends of transactions that began in another part, or before the range."""
        if not wanted or (len(wanted) == 1 and first <= self.pinned.seq_first):
            return NO_ENDS
        with errors_of_tasks("the ends of transactions"):
            table = run_tasks(self.spark, wanted, crossing_ends, ENDS_SCHEMA).toArrow()
        batches = table.combine_chunks().to_batches()
        return Ends.from_batch(batches[0]) if batches else NO_ENDS

    def _of_part(self, ends: Ends, part: Part) -> Ends:
        """Return those ends, from the beginning of a part on, whose transactions began no later than its
        end."""
        if not len(ends):
            return ends
        first, last = part.pieces[0].segment.first, part.pieces[-1].segment.last
        return ends.where((ends.txn <= last) & (ends.seq >= first))

    def segments(self) -> Segments:
        return Segments(
            self.pinned.place, tuple((self.pinned.name_of(each), each) for each in self.pinned.segments)
        )

    # ------------------------------------------------------------------ versions

    def versions(self, wanted: WantedParts, first: int, last: int) -> DataFrame:
        from pyspark.sql import Window
        from pyspark.sql import functions as F  # noqa: N812

        stretches = self.stretches(wanted, first, last)
        read = self._with_segments(read_versions, wanted.columns)
        found = run_tasks(self.spark, stretches, read, schema_of(VERSION_COLUMNS, wanted.columns))
        if len(stretches) < 2:
            return found
        # Of a transaction, or a group, that is in several parts each gives what survives there.
        frames = Window.partitionBy("bucket", "key").orderBy("frame")
        superseded = F.coalesce(F.lead("seq").over(frames) == F.col("seq"), F.lit(False))
        return found.withColumn("superseded", superseded).filter("not superseded").drop("superseded")

    def state(self, wanted: WantedParts, at: int) -> DataFrame:
        """The newest version of each key as of `at`."""
        return self.newest(wanted, at, self.base(at), OBJECTS)

    def newest(
        self, wanted: WantedParts, at: int, base: BaseCheckpoint | None, readers: Readers
    ) -> DataFrame:
        """Return the newest version of each key as of `at`, as `readers` read it. Of a short log each task
        reads all, for its share of the keys. Else keys are compared without their values, which are read for
        the winners only."""
        from pyspark.sql import functions as F  # noqa: N812

        if base is None:
            selection = PlanSelection(self.pinned.seq_first, at, bucket=wanted.bucket, prefix=wanted.prefix)
            whole = shares(self.pinned, selection, verify=self.verify, part_bytes=self.part_bytes)
            if whole:
                # Each has all frames of its keys, so what it finds is theirs.
                stretches = [ReadStretch(part, at, wanted.columns, buckets=wanted.buckets) for part in whole]
                return self._union(stretches, [], readers, wanted.columns)
        since = FROM_THE_BEGINNING if base is None else base.since
        first = self.pinned.seq_first if base is None else since.seq + 1
        stretches = self.stretches(wanted, first, at, since)
        slices = [] if base is None else self._slices(base, wanted)
        found = self._union(stretches, slices, readers, wanted.columns)
        if len(stretches) + len(slices) < 2:
            return found
        keys = self._union(stretches, slices, KEYS, ("bucket", "key", "frame"))
        winners = keys.groupBy("bucket", "key").agg(F.max("frame").alias("frame")).select("frame")
        rows = sum(piece.frame_stop - piece.frame_first for each in stretches for piece in each.part.pieces)
        if base is not None:
            rows += base.remote.index.row_count
        if rows <= BROADCAST_ROWS:
            winners = F.broadcast(winners)
        return found.join(winners, "frame", "left_semi")

    def _union(
        self, stretches: list[ReadStretch], slices: list[Slice], readers: Readers, columns: tuple[str, ...]
    ) -> DataFrame:
        schema = schema_of(readers.types, columns)
        read = self._with_segments(readers.stretch, columns)
        found = run_tasks(self.spark, stretches, read, schema)
        if not slices:
            return found
        read = self._with_segments(readers.slice, columns)
        return found.unionByName(run_tasks(self.spark, slices, read, schema))

    def _with_segments(self, read: Callable[..., Iterator[pa.RecordBatch]], columns: Sequence[str]) -> Any:
        """Who reads values may have to look them up. All tasks are given the same: of a long log the segments
        are too many to be in each item."""
        return partial(read, segments=self.segments()) if "value" in columns else read

    # ------------------------------------------------------------------ checkpoints

    def base(self, at: int) -> BaseCheckpoint | None:
        """The checkpoint to begin with, where that takes less than the log up to it."""
        known = [each for each in self.pinned.checkpoints if each.seq <= at]
        store = open_place(self.pinned.place)
        try:
            fetcher = Fetcher(store, clock=RealClock())
            base = BaseCheckpoint.of(fetcher, known)
            if base is not None:
                seq = base.descriptor.seq
                frames = sum(each.frame_count for each in self.pinned.segments if each.last <= seq)
                if base.remote.index.row_count * ROW_COST <= frames:
                    return base
            self._require_beginning(fetcher)
            return None
        finally:
            store.close()

    def require_beginning(self) -> None:
        """Raise VersionGone where something is missing before the first segment: a directory may be
        purged."""
        store = open_place(self.pinned.place)
        try:
            self._require_beginning(Fetcher(store, clock=RealClock()))
        finally:
            store.close()

    def _require_beginning(self, fetcher: Fetcher) -> None:
        first = self.pinned.segments[0]
        segment = RemoteSegment(fetcher, self.pinned.name_of(first), first)
        if segment.header().seq_before:
            raise VersionGone(
                f"the log that is here begins with seq {first.first}, and not with its first entry",
                path=self.pinned.where(segment.name),
                seq=first.first,
                hint="read the archive, which has all of it",
            )

    def _slices(self, base: BaseCheckpoint, wanted: WantedParts) -> list[Slice]:
        """The lists of a checkpoint that may have wanted keys, in as many slices as there are tasks."""
        low, high = LOWEST, KEY_END
        if wanted.bucket is not None:
            low = encode_key(wanted.bucket.encode(), (wanted.prefix or "").encode())
            high = after_prefix(low)
        keys = [entry.key for entry in base.remote.index.lists]
        begin, stop = max(0, bisect_right(keys, low) - 1), bisect_left(keys, high)
        if wanted.bucket is not None and wanted.buckets:
            begin = 0  # the bucket's own record is among the first
        step = max(1, -(-(stop - begin) // (2 * cores_of(self.spark))))
        return [
            Slice(
                self.pinned.place,
                base.descriptor,
                number,
                min(number + step, stop),
                wanted.bucket,
                wanted.prefix,
                wanted.columns,
                wanted.buckets,
            )
            for number in range(begin, stop, step)
        ]
