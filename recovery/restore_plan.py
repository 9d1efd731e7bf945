"""What a restore would do: objects, bytes and requests. It reads little, and writes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lowwater.engine.log.log import Seams
from lowwater.recovery.arguments import ConfigSource, real_seams, store_of
from lowwater.recovery.point import missing_after, point_of, reach, seq_of
from lowwater.tiering.archive import open_archive
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint
from lowwater.tiering.shipped_log import Moment
from lowwater.tiering.store import Store

if TYPE_CHECKING:
    from lowwater.config import Config


class RestorePlan(NamedTuple):
    """What a restore would do. `objects`, `bytes` and `requests` are what comes before it can be read, and
    `full_bytes` what there is to fetch, but for large values that lie in older segments: these come too, from
    the first on that has one, so at most `values_bytes_max` more. Which one that is the pages tell, once they
    are here. Bytes are those of raw segments: most are stored in fewer."""

    uri: str
    seq: int
    epoch: int
    checkpoint_seq: int
    log_from: int
    log_segments: int
    objects: int
    bytes: int
    requests: int
    full_objects: int
    full_bytes: int
    values_objects_max: int
    values_bytes_max: int
    seq_last: int
    missing: str


def plan(
    tier: str,
    at: Moment = None,
    *,
    config: ConfigSource | Config = None,
) -> RestorePlan:
    """What `restore` would fetch. It reads manifests, the ends of segments that are in none yet, and the
    index of a checkpoint; nothing is written."""
    store, _ = store_of(tier, config)
    try:
        return plan_with(store, at, seams=real_seams())
    finally:
        store.close()


def plan_with(store: Store, at: Moment, *, seams: Seams) -> RestorePlan:
    archive = open_archive(store)
    fetcher = Fetcher(store, clock=seams.clock)
    reached = reach(archive, at)
    point = point_of(reached, store, fetcher, seq_of(reached, fetcher, store.uri, at))
    log_bytes = sum(each.size for each in point.segments)
    objects, early_bytes = len(point.segments) + 1, log_bytes
    full_objects, full_bytes = objects, early_bytes
    if point.checkpoint is not None:
        index = RemoteCheckpoint(fetcher, point.checkpoint).index
        lists_bytes = sum(each.list_bytes + each.locations_bytes for each in index.lists)
        list_packs = {each.pack for each in index.lists}
        objects += 1 + len(list_packs)
        early_bytes += point.checkpoint.size + lists_bytes
        full_objects += 1 + len(index.packs)
        full_bytes += point.checkpoint.size + sum(index.packs.values())
    first = point.segments[0].first
    older = [each.size for each in reached.all.segments if each.first < first]
    return RestorePlan(
        uri=store.uri,
        seq=point.seq,
        epoch=reached.epoch,
        checkpoint_seq=0 if point.checkpoint is None else point.checkpoint.seq,
        log_from=point.segments[0].first,
        log_segments=len(point.segments),
        objects=objects,
        bytes=early_bytes,
        requests=2 * objects,
        full_objects=full_objects,
        full_bytes=full_bytes,
        values_objects_max=len(older),
        values_bytes_max=sum(older),
        seq_last=reached.seq_last,
        missing=missing_after(reached, point.seq),
    )
