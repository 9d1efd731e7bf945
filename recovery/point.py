"""A point of an archive: what a restore to a seq, or a time, begins with, and what it has to fetch.

Always true:
  - only what the newest manifest reaches counts, and the segments that follow it in its epoch;
  - the point is the last entry that is not after what was asked for. Of a group that is not complete there
    the entries before it are meant, since none of it took effect;
  - what the log did not record as shipped by then lies in the local log afterwards, so that everything which
    the restored log says of the archive is enough to read the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from lowwater.engine import format
from lowwater.engine.blocks import NO_HASH
from lowwater.engine.catalogue import Catalogue, CheckpointDescriptor, SegmentDescriptor
from lowwater.engine.chain import Creation
from lowwater.engine.moments import require_seq, time_us_of
from lowwater.engine.recover import creation_of
from lowwater.errors import Corrupt, LowwaterError, NotFound, VersionGone
from lowwater.tiering.archive import Archive
from lowwater.tiering.cold import ColdLog
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.names import segment_name
from lowwater.tiering.objects import Manifest
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint
from lowwater.tiering.remote_segment import RemoteSegment

Moment = int | datetime | None
"""A seq, a time, or None for the newest."""


class Reached(NamedTuple):
    """All that counts in an archive."""

    manifest: Manifest | None
    recorded: Catalogue
    """As the newest manifest has it."""
    all: Catalogue
    """With the segments beyond it."""

    @property
    def seq_last(self) -> int:
        return self.all.hwm

    @property
    def epoch(self) -> int:
        return 1 if self.manifest is None else self.manifest.epoch


class Point(NamedTuple):
    seq: int
    checkpoint: CheckpointDescriptor | None
    """The newest that is not above it; None where all is made of the log."""
    segments: list[SegmentDescriptor]
    """What the local log begins with: the last of them may end above the point."""
    before: SegmentDescriptor | None
    """The one before these."""


def reach(archive: Archive) -> Reached:
    manifest = archive.newest()
    recorded = Catalogue() if manifest is None else archive.catalogue_of(manifest)
    complete = catalogue_as_of(recorded, format.SEQ_MAX)
    for segment in archive.segments_after(manifest, recorded):
        # Nothing has recorded it: the number only has to rise.
        last = complete.segments.last
        number = segment.last + 1 if last is None else max(last.recorded_seq, segment.last) + 1
        complete.add(segment._replace(recorded_seq=number))
    if not complete.hwm:
        raise NotFound(
            "nothing was shipped to this archive yet",
            path=archive.store.uri,
            hint="check bucket and prefix: `lowwater tier ls` lists what is there",
        )
    return Reached(manifest, recorded, complete)


def seq_of(reached: Reached, fetcher: Fetcher, uri: str, at: Moment) -> int:
    """The seq that is meant."""
    last = reached.seq_last
    if at is None:
        return last
    if isinstance(at, datetime):
        time_us = time_us_of(at)
        before = ColdLog(fetcher, reached.all, segment_name).seq_before_time(time_us + 1)
        if not before:
            raise VersionGone(
                f"the archive begins after {at.isoformat()}", path=uri, hint="give a later time, or a seq"
            )
        return before
    require_seq(at)
    if at > last:
        ended = shown_time(time_of(reached, last))
        raise VersionGone(
            f"seq {at} is not in the archive: its last one is {last}, of {ended}",
            path=uri,
            seq=at,
            hint="give a lower seq, or none for the newest. What was written after that was not shipped",
        )
    first = reached.all.segments[0].first
    if at < first:
        raise VersionGone(
            f"the archive begins with seq {first}", path=uri, seq=at, hint=f"give {first} or a higher seq"
        )
    return at


def time_of(reached: Reached, seq: int) -> int:
    """The time of the last entry of a segment that ends there."""
    found = reached.all.segment_of(seq)
    return 0 if found is None else found.time_max_us


def shown_time(time_us: int) -> str:
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)
    except OverflowError:
        return f"{time_us} us"
    return moment.isoformat().replace("+00:00", "Z")


def point_of(reached: Reached, fetcher: Fetcher, seq: int) -> Point:
    """What restoring to `seq` needs."""
    checkpoint = reached.recorded.checkpoint_not_above(seq)
    redo_seq = 1
    if checkpoint is not None:
        redo_seq = checkpoint.seq + 1
        for row in RemoteCheckpoint(fetcher, checkpoint).index.control_body.get("transactions", ()):
            redo_seq = min(redo_seq, row[0])
    first = min(redo_seq, reached.recorded.hwm_at(seq) + 1, seq)
    segments = [*_between(reached.all, first, seq)]
    if not segments:
        # A hole between two segments.
        segments = [reached.all.segments[reached.all.segments.count_to(_first, seq) - 1]]
    before = reached.all.segments.count_to(_first, segments[0].first) - 2
    return Point(seq, checkpoint, segments, reached.all.segments[before] if before >= 0 else None)


def _between(catalogue: Catalogue, first: int, last: int) -> Iterator[SegmentDescriptor]:
    for segment in catalogue.segments_from(first):
        if segment.first > last:
            return
        yield segment


def _first(segment: SegmentDescriptor) -> int:
    return segment.first


def catalogue_as_of(catalogue: Catalogue, seq: int) -> Catalogue:
    heads = catalogue.heads(seq)
    chunks = dict(catalogue.objects(heads))
    return Catalogue.from_body(catalogue.body(seq), chunks.__getitem__)


class _Body:
    """The body of a shipped segment, as a file."""

    def __init__(self, segment: RemoteSegment) -> None:
        self._segment = segment

    def read_at(self, offset: int, size: int) -> bytes:
        return self._segment.read(offset, min(offset + size, self._segment.descriptor.body_bytes))

    def size(self) -> int:
        return self._segment.descriptor.body_bytes


def creation_in(reached: Reached, fetcher: Fetcher) -> Creation:
    """What the first entry of the log says."""
    first = reached.all.segments[0]
    segment = RemoteSegment(fetcher, segment_name(first), first)
    header = segment.header()
    where = fetcher.where(segment.name)
    if header.seq_before:
        raise VersionGone(
            "the archive does not have the beginning of the log any more", path=where, seq=header.seq_first
        )
    try:
        return creation_of(_Body(segment), header)
    except LowwaterError as error:
        raise Corrupt(f"the first entry of the log cannot be read: {error.message}", path=where) from error


def parent_segment(reached: Reached) -> bytes:
    """The hash of the last segment of the newest manifest."""
    return NO_HASH if reached.manifest is None else reached.recorded.hash_last


def missing_after(reached: Reached, seq: int) -> str:
    """What a person has to know of the entries that are not there."""
    last = reached.all.segments.last
    assert last is not None
    until = f"The archive ends with seq {last.last}, of {shown_time(last.time_max_us)}"
    beyond = len(reached.all.segments) - len(reached.recorded.segments)
    if beyond:
        until += f", {beyond} segments beyond its newest manifest"
    if seq < last.last:
        return f"{until}: what lies between was left out, as asked."
    return f"{until}: what was written after that was not shipped, and how much it was is not known here."
