"""A point of an archive: what a restore to a seq, or a time, begins with, and what it has to fetch.

Always true:
  - only what the newest manifest reaches counts, and the segments that follow it in its epoch; but for a
    checkpoint somebody has built since of what it reaches, which can be compared with it;
  - the point is the last entry that is not after what was asked for. Of a group that is not complete there
    the entries before it are meant, since none of it took effect;
  - what the log did not record as shipped by then lies in the local log afterwards, so that everything which
    the restored log says of the archive is enough to read the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lowwater.engine.format import format
from lowwater.engine.format.blocks import NO_HASH
from lowwater.engine.format.entries import decode_payload
from lowwater.engine.log.chain import Creation
from lowwater.engine.state.catalogue import Catalogue, CheckpointDescriptor, SegmentDescriptor
from lowwater.errors import DataError, NotFound
from lowwater.logging import get_logger
from lowwater.tiering import shipped_log
from lowwater.tiering.archive import Archive
from lowwater.tiering.built_checkpoints import built_checkpoints, pass_over
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.names import segment_name
from lowwater.tiering.objects import Manifest
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint
from lowwater.tiering.remote_segment import RemoteSegment
from lowwater.tiering.shipped_log import Moment, shown_time
from lowwater.tiering.store import Store

_logger = get_logger("restore")


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

    @property
    def checkpoint_seq(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.seq


def reach(archive: Archive, at: Moment = None) -> Reached:
    """All that can be restored. For a moment, what an older manifest reaches will do where the newest one
    cannot be read."""
    manifest = archive.newest() if at is None else archive.newest_readable()
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
    return shipped_log.seq_of(reached.all, fetcher, segment_name, uri, at)


def point_of(
    reached: Reached, store: Store, fetcher: Fetcher, seq: int, *, checkpoint_max: int = format.SEQ_MAX
) -> Point:
    """What restoring to `seq` needs. Of checkpoints those up to `checkpoint_max` count: a restore that is
    gone on with has begun with one."""
    newest = min(seq, checkpoint_max)
    checkpoint = _built(reached, store, fetcher, newest) or _recorded(reached.recorded, fetcher, newest)
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


def _recorded(recorded: Catalogue, fetcher: Fetcher, seq: int) -> CheckpointDescriptor | None:
    """The newest checkpoint up to `seq` whose index can be read."""
    while (found := recorded.checkpoint_not_above(seq)) is not None:
        remote = RemoteCheckpoint(fetcher, found)
        error = remote.why_lost()
        if error is None:
            return found
        _logger.error("a checkpoint of the archive is lost", object=remote.path, error=str(error))
        seq = found.seq - 1
    return None


def _built(reached: Reached, store: Store, fetcher: Fetcher, seq: int) -> CheckpointDescriptor | None:
    """The newest checkpoint that is listed and no manifest names, if it is newer than those and of this log:
    an entry asks for it, and it says of what was shipped by then the same as the manifest."""
    recorded = reached.recorded
    if reached.manifest is None:
        return None
    newest = recorded.checkpoint_not_above(seq)
    above = 0 if newest is None else newest.seq
    for found in built_checkpoints(store, above, min(seq, recorded.hwm), reached.manifest.cluster_id):
        if not _is_asked_for(recorded, fetcher, found):
            continue
        remote = RemoteCheckpoint(fetcher, found)
        expected = catalogue_as_of(recorded, found.seq)
        if remote.index.control_body.get("catalogue") != (expected.body() if expected else None):
            continue
        try:
            # What a restore begins with. That a list is damaged must not end it: the log has everything.
            for _ in remote.columns():
                pass
        except (DataError, NotFound) as error:
            pass_over(remote.name, error)
            continue
        return found
    return None


def _is_asked_for(recorded: Catalogue, fetcher: Fetcher, checkpoint: CheckpointDescriptor) -> bool:
    segment = recorded.segment_of(checkpoint.seq)
    if segment is None:
        return False
    frame = RemoteSegment(fetcher, segment_name(segment), segment).frame_of(checkpoint.seq)
    if frame is None:
        return False
    entry = decode_payload(checkpoint.seq, frame[1][format.FRAME_BYTES :])
    return entry.kind == "checkpoint" and entry.refused is None and entry.time_us == checkpoint.time_us


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


def creation_in(reached: Reached, fetcher: Fetcher) -> Creation:
    """What the first entry of the log says."""
    return shipped_log.creation_in(reached.all, fetcher, segment_name)


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
