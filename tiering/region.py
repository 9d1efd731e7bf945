"""One object store that a log is shipped to, and how much of the log's catalogue it has.

Always true:
  - the manifests of the catalogue's entries are published in their order, none is skipped, and each when all
    that it records is in this store. What is missing is brought: from the local disk, or from another region;
  - `hwm` is that of the newest manifest which was read back here. It counts once nobody was seen to have
    claimed a higher epoch after that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TypeVar

from lowwater.engine.catalogue import Catalogue, CheckpointDescriptor, Record, RecordList, SegmentDescriptor
from lowwater.engine.ckpt import decode_checkpoint
from lowwater.engine.failpoints import Failpoint
from lowwater.engine.log import Seams
from lowwater.errors import Fenced, NotFound, StoreCorrupt
from lowwater.tiering.archive import Archive, open_archive, seq_published
from lowwater.tiering.backoff import Backoff
from lowwater.tiering.names import EPOCHS, checkpoint_name, pack_object_name, segment_name
from lowwater.tiering.objects import Parent
from lowwater.tiering.store import Store, at, read_small
from lowwater.tiering.uploads import Passing, copy_object, find_segment

BEFORE_MANIFEST = Failpoint("ship.before_manifest")
AFTER_MANIFEST = Failpoint("ship.after_manifest")

R = TypeVar("R", bound=Record)
UploadLocal = Callable[[SegmentDescriptor], bool]
"""Has a segment that the log directory holds uploaded; False where it holds it no longer."""


class Region:
    """`counts` says whether the high-water mark waits for it."""

    def __init__(
        self,
        store: Store,
        *,
        counts: bool,
        seams: Seams,
        part_bytes: int,
        passing: Passing,
        parent: Parent | None = None,
    ) -> None:
        """`parent` is that of a clone, whose archive begins where it was cloned."""
        self.store = store
        self._parent = parent
        self.counts = counts
        self.backoff = Backoff(seams.clock, seams.randomness)
        # Of uploads, where it is the store that fails.
        self.uploads = Backoff(seams.clock, seams.randomness)
        self._part_bytes = part_bytes
        self._passing = passing
        self.archive: Archive | None = None
        self.published_seq = 0
        self.hwm = 0
        self.counted = False
        # What was uploaded in this life, or seen to be there, and is in no manifest yet. Uploads add to it.
        self._present: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def connect(self, catalogue: Catalogue, cluster_id: bytes, epoch: int) -> None:
        """Find out what is there. Raises OtherCluster, and Fenced where others have gone on without us."""
        archive = open_archive(self.store, cluster_id, create=True, parent=self._parent)
        newest = archive.newest()
        if newest is not None:
            # Another replica may have applied, and published, more than this one.
            is_ahead = newest.epoch == epoch and newest.seq > catalogue.recorded_seq
            if newest.epoch > epoch or not (is_ahead or archive.is_past(catalogue, newest)):
                raise Fenced(
                    "the archive goes on where this log does not", path=at(self.store.uri, newest.name)
                )
            self.published_seq, self.hwm = seq_published(catalogue, newest), newest.hwm
        elif self._parent is not None:
            self.published_seq = self._parent.seq
        self.archive = archive
        self.counted = False

    def has(self, segment: SegmentDescriptor) -> bool:
        return (segment.epoch, segment.first) in self._present

    def note(self, segment: SegmentDescriptor) -> None:
        """That a segment is there."""
        with self._lock:
            self._present.add((segment.epoch, segment.first))

    def is_behind(self, catalogue: Catalogue, seq_durable: int) -> bool:
        seqs = catalogue.seqs_after(self.published_seq)
        return bool(seqs) and seqs[0] <= seq_durable

    def publish_next(
        self,
        catalogue: Catalogue,
        seq_durable: int,
        *,
        upload_local: UploadLocal,
        upload_checkpoint: Callable[[CheckpointDescriptor], bool],
        others: Callable[[], Iterator[Store]],
    ) -> bool:
        """Publish the manifest of the next entry that has none here. False where there is no such entry."""
        assert self.archive is not None
        seq = next(iter(catalogue.seqs_after(self.published_seq)), 0)
        if not seq or seq > seq_durable:
            return False
        for segment in _recorded_at(catalogue.segments, seq):
            is_there = self.has(segment) or find_segment(self.store, segment) is not None
            if not (is_there or upload_local(segment)):
                self._copy(segment_name(segment), others)
        for checkpoint in _recorded_at(catalogue.checkpoints, seq):
            if not (self._has_object(checkpoint_name(checkpoint)) or upload_checkpoint(checkpoint)):
                self._bring_checkpoint(checkpoint, others)
        BEFORE_MANIFEST()
        manifest = self.archive.publish(catalogue, seq)
        AFTER_MANIFEST()
        self.published_seq, self.hwm = manifest.seq, manifest.hwm
        self.counted = False
        with self._lock:
            self._present = {each for each in self._present if each[1] > manifest.hwm}
        return True

    def require_epoch(self, epoch: int) -> None:
        """After what was read back: raise Fenced where somebody has claimed a higher epoch."""
        assert self.archive is not None
        self.archive.require_epoch(epoch)
        self.counted = True

    def copy_epochs(self, primary: Store) -> None:
        """Who has claimed to write is known in every region, so that each can be restored from alone."""
        for found in primary.list(EPOCHS):
            copy_object(primary, self.store, found.name, part_bytes=self._part_bytes, passing=self._passing)

    def _bring_checkpoint(
        self, checkpoint: CheckpointDescriptor, others: Callable[[], Iterator[Store]]
    ) -> None:
        """The store that it was shipped to has all of it."""
        name = checkpoint_name(checkpoint)
        for source in others():
            if not _has(source, name):
                continue
            index = decode_checkpoint(read_small(source, name, checkpoint.size))
            for pack in index.packs:
                self._copy(pack_object_name(pack), lambda source=source: iter([source]))  # type: ignore[misc]
            self._copy(name, lambda source=source: iter([source]))  # type: ignore[misc]
            return
        raise self._missing(name)

    def _copy(self, name: str, others: Callable[[], Iterator[Store]]) -> None:
        if self._has_object(name):
            return
        for source in others():
            if _has(source, name):
                copy_object(source, self.store, name, part_bytes=self._part_bytes, passing=self._passing)
                return
        raise self._missing(name)

    def _has_object(self, name: str) -> bool:
        return _has(self.store, name)

    def _missing(self, name: str) -> StoreCorrupt:
        return StoreCorrupt(
            "the log says that this object is in the store, and it is not",
            path=at(self.store.uri, name),
            hint="somebody has removed it: bring it back from a copy of the archive; shipping waits for it",
        )


def _has(store: Store, name: str) -> bool:
    try:
        store.stat(name)
    except NotFound:
        return False
    return True


def _recorded_at(records: RecordList[R], seq: int) -> Iterator[R]:
    """What the entry `seq` has recorded, in one of the catalogue's lists."""
    count = records.count_to(attrgetter("recorded_seq"), seq)
    if count and records[count - 1].recorded_seq == seq:
        yield records[count - 1]
