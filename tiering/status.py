"""How far an archive goes, and how far a database is ahead of it.

Always true: everything follows from what the store and the directory hold at one moment. No clock is asked: a
lag in seconds is a distance between entries.
"""

from __future__ import annotations

from typing import NamedTuple

from lowwater.engine.log.describe import LogDescription, describe_log
from lowwater.engine.seams.seams import Files
from lowwater.engine.state.catalogue import Catalogue, CheckpointDescriptor
from lowwater.errors import OtherCluster
from lowwater.tiering.archive import open_archive
from lowwater.tiering.store import Store


class ArchiveStatus(NamedTuple):
    """None stands for what is not there yet. Sizes are those of the raw segments."""

    uri: str
    cluster_id: bytes
    epoch: int | None
    """The epoch of the newest manifest."""
    epoch_claimed: int | None
    """The highest claimed epoch. Where it is above `epoch`, nothing was published in it yet."""
    epochs: list[int]
    """The epochs that the log went through."""
    manifest: str | None
    hwm: int
    time_us: int | None
    """The time of the last entry that is recorded as shipped."""
    segments: int
    entries: int
    raw_bytes: int
    checkpoints: int
    checkpoint: CheckpointDescriptor | None
    segments_beyond: int
    """Shipped, and not recorded yet: a restore goes on with them."""
    seq_beyond: int | None


class Lag(NamedTuple):
    """What a directory has, and the archive has not recorded."""

    seq_last: int
    entries: int
    body_bytes: int
    lag_us: int


def archive_status(store: Store) -> ArchiveStatus:
    """NotFound where there is no archive, and Corrupt where it cannot be read so far."""
    archive = open_archive(store)
    manifest = archive.newest()
    catalogue = Catalogue() if manifest is None else archive.catalogue_of(manifest)
    beyond = list(archive.segments_after(manifest, catalogue))
    last = catalogue.segments.last
    return ArchiveStatus(
        uri=store.uri,
        cluster_id=archive.cluster_id,
        epoch=None if manifest is None else manifest.epoch,
        epoch_claimed=archive.newest_epoch() or None,
        epochs=[1, *(fork.epoch for fork in catalogue.forks)] if manifest is not None else [],
        manifest=None if manifest is None else manifest.name,
        hwm=catalogue.hwm,
        time_us=None if last is None else last.time_max_us,
        segments=len(catalogue.segments),
        entries=sum(segment.frame_count for segment in catalogue.segments),
        raw_bytes=sum(segment.size for segment in catalogue.segments),
        checkpoints=len(catalogue.checkpoints),
        checkpoint=catalogue.checkpoints.last,
        segments_beyond=len(beyond),
        seq_beyond=beyond[-1].last if beyond else None,
    )


def lag_of(files: Files, log_directory: str, status: ArchiveStatus) -> Lag:
    """How far the log in a directory is ahead. It may be open elsewhere: what is written there and not synced
    yet may be counted. OtherCluster where the archive is not of this log."""
    log = describe_log(files, log_directory)
    if log.cluster_id is not None and log.cluster_id != status.cluster_id:
        raise OtherCluster(
            f"the archive is of the cluster {status.cluster_id.hex()}, and the log of {log.cluster_id.hex()}",
            path=status.uri,
        )
    return _lag(log, status)


def _lag(log: LogDescription, status: ArchiveStatus) -> Lag:
    entries = body_bytes = 0
    time_us = status.time_us
    time_last_us = time_us or 0
    for segment in log.segments:
        # Segments are shipped whole, so each is on one side.
        if segment.seq_last is None or segment.seq_last <= status.hwm:
            continue
        entries += segment.frames or 0
        body_bytes += segment.body_bytes or 0
        if time_us is None:
            time_us = segment.time_first_us
        time_last_us = max(time_last_us, segment.time_last_us or 0)
    lag_us = time_last_us - time_us if time_us is not None else 0
    return Lag(log.seq_last or 0, entries, body_bytes, lag_us)
