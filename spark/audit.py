"""`verify`: an audit of a whole archive, done by Spark's executors.

Always true:
  - it is `lowwater scrub` (`tiering/scrub.py`): the same objects are looked at, and the same findings come
    in the same order and words. Only who looks at an object is another;
  - objects that follow one another are a task, about as many bytes in each; one that is damaged or gone is a
    finding, and the rest goes on;
  - the driver holds the names of all objects, the findings, and the indexes of checkpoints, and no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from lowwater.spark.jobs import Progress, grouped, run_job
from lowwater.spark.plan import PartPlace, open_own, store_place
from lowwater.spark.tasks import cores_of
from lowwater.tiering.names import parse
from lowwater.tiering.scrub import Scrub
from lowwater.tiering.scrub_objects import (
    Item,
    KnownOfArchive,
    Look,
    SeenObject,
    WantedCheckpoint,
    WantedList,
    WantedObject,
    WantedSegment,
    WantedState,
    look_with_threads,
)
from lowwater.tiering.watched_store import WatchedStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FINDINGS = "severity string, what string, where string, seq bigint, offset bigint, hint string"

# In each task, so that requests overlap with hashing.
AT_ONCE = 2
# What an object costs of which little or nothing is read.
GLANCE_BYTES = 2**18


def verify(
    spark: SparkSession,
    uri: str,
    *,
    options: Mapping[str, str] | None = None,
    deep: bool = True,
    progress: Progress | None = None,
) -> DataFrame:
    """Return every finding about the archive at `uri`. No finding means that it is sound; notes are no fault.

    With `deep` every byte is read and verified; without it names, sizes, the catalogue and the ends of
    segments. The columns are severity (error, warning, note), what, where, seq, offset and hint."""
    store = open_own(store_place(uri, options))
    try:
        scrub = Scrub(store, deep=deep, look=look_in_spark(spark, uri, options, progress))
        rows = [tuple(finding) for finding in scrub.findings()]
    finally:
        store.close()
    return spark.createDataFrame(rows, FINDINGS)


def look_in_spark(
    spark: SparkSession,
    uri: str,
    options: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Look:
    """For a `Scrub`: who looks at the objects of the store at `uri`."""
    place = store_place(uri, options)

    def look(store: WatchedStore, known: KnownOfArchive, items: list[Item]) -> Iterator[SeenObject]:
        groups = grouped(items, partial(_cost, known.deep), 2 * cores_of(spark))
        done = run_job(
            spark,
            partial(_look_at, place, known),
            groups,
            what=_what(items[0]),
            progress=progress,
        )
        store.bytes += sum(each.bytes for each in done)
        store.requests += sum(each.requests for each in done)
        return chain.from_iterable(each.seen for each in done)

    return look


class _AuditLook(NamedTuple):
    seen: list[SeenObject]
    bytes: int
    requests: int


def _look_at(place: PartPlace, known: KnownOfArchive, items: list[Item]) -> _AuditLook:
    """One task."""
    opened = open_own(place)
    try:
        store = WatchedStore(opened)
        seen = list(look_with_threads(AT_ONCE)(store, known, items))
        return _AuditLook(seen, store.bytes, store.requests)
    finally:
        opened.close()


def _cost(deep: bool, item: Item) -> int:
    if item.listed is None or (not deep and not isinstance(item, WantedCheckpoint)):
        return GLANCE_BYTES
    return max(GLANCE_BYTES, item.listed)


def _what(item: Item) -> str:
    """What all items of one call have in common, for people."""
    if isinstance(item, WantedSegment):
        return "segments"
    if isinstance(item, WantedState):
        return "states"
    if isinstance(item, WantedList):
        return "blocks of checkpoints"
    if isinstance(item, WantedCheckpoint):
        return "checkpoints"
    if not isinstance(item, WantedObject):
        return "objects that nothing reaches"
    found = parse(item.name)
    return "packs" if found is not None and found.type == "pack" else "manifests"
