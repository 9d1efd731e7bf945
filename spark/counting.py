"""`count`: how much an archive has, without reading it.

Always true: seqs, times, entries and bytes come from the manifest, and kinds from the footers of segments, of
each of which a few hundred bytes are read; no frame is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from lowwater.engine.format.format import Kind
from lowwater.engine.state.catalogue import SegmentDescriptor
from lowwater.spark.jobs import Progress, grouped, run_job
from lowwater.spark.plan import PartPlace, pin
from lowwater.spark.segments import fetcher_of
from lowwater.spark.tasks import cores_of
from lowwater.tiering.remote_segment import RemoteSegment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What a footer costs, in bytes of other work.
FOOTER_BYTES = 2**20


class Count(NamedTuple):
    """How much an archive has. `bytes` are those of frames, before compression. Refused entries are counted
    too."""

    uri: str
    cluster_id: str
    entries: int
    kinds: dict[str, int]
    bytes: int
    segments: int
    checkpoints: int
    seq_first: int
    seq_last: int
    time_first_us: int
    time_last_us: int


def count(
    spark: SparkSession,
    uri: str,
    *,
    options: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Count:
    """Count the entries of an archive, or of the sealed segments of a log directory, by kind."""
    pinned = pin(uri, options)
    named = [(pinned.name_of(segment), segment) for segment in pinned.segments]
    groups = grouped(named, lambda _: FOOTER_BYTES, 2 * cores_of(spark))
    kinds: Counter[int] = Counter()
    for found in run_job(
        spark, partial(_kinds, pinned.place), groups, what="the footers of segments", progress=progress
    ):
        kinds.update(found)
    return Count(
        pinned.place.uri,
        pinned.cluster_id.hex(),
        sum(segment.frame_count for segment in pinned.segments),
        {Kind(kind).name.lower(): kinds[kind] for kind in sorted(kinds)},
        sum(segment.body_bytes for segment in pinned.segments),
        len(pinned.segments),
        len(pinned.checkpoints),
        pinned.seq_first,
        pinned.hwm,
        pinned.segments[0].time_min_us,
        pinned.segments[-1].time_max_us,
    )


def _kinds(place: PartPlace, segments: list[tuple[str, SegmentDescriptor]]) -> Counter[int]:
    """One task."""
    fetcher = fetcher_of(place)
    kinds: Counter[int] = Counter()
    for name, segment in segments:
        kinds.update(RemoteSegment(fetcher, name, segment).kinds())
    return kinds
