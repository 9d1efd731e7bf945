"""One object store that a log is shipped to, and how much of the log's catalogue it has.

Always true:
  - the manifests of the catalogue's entries are published in their order, none is skipped, and each when all
    that it records is in this store. What is missing is brought: from the local disk, or from another region.
    A checkpoint that nobody has any more is gone without, below a fed engine after a time in which its other
    replicas could have brought it: the log has what was in it;
  - `hwm` is that of the newest manifest which was read back here. It counts once nobody was seen to have
    claimed a higher epoch after that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NoReturn, TypeVar

from lowwater.engine.format.ckpt import decode_checkpoint
from lowwater.engine.log.log import Seams
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.state.catalogue import (
    Catalogue,
    CheckpointDescriptor,
    Record,
    RecordList,
    SegmentDescriptor,
)
from lowwater.errors import Fenced, NotFound, OtherCluster, StoreCorrupt
from lowwater.tiering.archive import Archive, open_archive, seq_published
from lowwater.tiering.backoff import Backoff
from lowwater.tiering.names import (
    CLUSTER,
    EPOCHS,
    checkpoint_name,
    pack_object_name,
    segment_name,
    state_name,
)
from lowwater.tiering.objects import Manifest, Parent
from lowwater.tiering.store import Store, at, is_there, read_small
from lowwater.tiering.uploads import copy_object, find_segment
from lowwater.tiering.verified_writes import KnownObjects, Passing, has_sound

BEFORE_MANIFEST = Failpoint("ship.before_manifest")
AFTER_MANIFEST = Failpoint("ship.after_manifest")

# How often it is looked whether what was shipped is still there.
LOOK_AGAIN_S = 60.0
# So many states before the newest are asked for at most.
LOOK_BACK = 1000

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
        self._clock, self._randomness = seams.clock, seams.randomness
        self._owner = seams.owner
        self._looked_s = seams.clock.monotonic()
        self._looked_number = 0
        # What is wrong with what was shipped there.
        self.looking = Backoff(seams.clock, seams.randomness)
        self._missing: SegmentDescriptor | None = None
        # The first state that was found to be gone: what was shipped from there on has to come there again.
        self._lost_from = 0
        self._part_bytes = part_bytes
        self._passing = passing
        self.known = KnownObjects()
        self.archive: Archive | None = None
        self.published_seq = 0
        self.hwm = 0
        # The newest manifest that is there.
        self.newest: Manifest | None = None
        self.counted = False
        # What was uploaded in this life, or seen to be there, and is in no manifest yet. Uploads add to it.
        self._present: set[tuple[int, int]] = set()
        self.losses = 0
        """How often the archive was found to be another one: what was seen there before counts no more."""
        self._lock = threading.Lock()

    def connect(self, catalogue: Catalogue, cluster_id: bytes, epoch: int) -> None:
        """Find out what is there. Raises OtherCluster, and Fenced where others have gone on without us."""
        archive = open_archive(self.store, cluster_id, create=True, parent=self._parent, known=self.known)
        archive.bring_newest(catalogue)
        if self._lost_from:
            archive.bring_claims(catalogue.forks, token=self._randomness.token, owner=self._owner)
        newest = archive.newest()
        if newest is not None:
            # Another replica may have applied, and published, more than this one.
            is_ahead = newest.epoch == epoch and newest.seq > catalogue.recorded_seq
            if newest.epoch > epoch or not (is_ahead or archive.is_past(catalogue, newest)):
                raise Fenced(
                    "the archive goes on where this log does not", path=at(self.store.uri, newest.name)
                )
            self.published_seq, self.hwm = seq_published(catalogue, newest), newest.hwm
            self.newest = newest
            if self._lost_from:
                # What is above the gap may lead to what is in it.
                archive.forget()
                kept = next((each for each in archive.states.down_from(self._lost_from - 1)), None)
                self.published_seq = 0 if kept is None else min(self.published_seq, kept.place[1])
                self.hwm = 0
        elif self._parent is not None:
            self.published_seq = self._parent.seq
        self.archive = archive
        if self._lost_from:
            archive.states.fill(cluster_id, self._lost_from)
        self.counted = False
        self._lost_from, self._looked_number = 0, archive.states.number

    @property
    def is_to_be_looked_at(self) -> bool:
        return self.archive is not None and self._clock.monotonic() >= self._looked_s + LOOK_AGAIN_S

    def require_as_left(self) -> None:
        """Raise StoreCorrupt where the archive is another one than it was, by whose it is and by the states
        since the last look. Then it is looked at from the beginning, and filled again."""
        archive = self.archive
        if archive is None:
            return
        # Once: who ships may be writing the next one.
        newest, seen = archive.states.number, archive.states.seen
        try:
            open_archive(self.store, archive.cluster_id)
            for number in range(max(1, self._looked_number, newest - LOOK_BACK), newest):
                if not is_there(self.store, state_name(number)):
                    self._lose(number, state_name(number))
            if seen is not None and archive.states.read(seen.number) != seen:
                self._lose(seen.number, state_name(seen.number))
            self._looked_number = newest
        except OtherCluster as error:
            self._lose(1, CLUSTER, f": {error.message}")
        except NotFound as error:
            self._lose(max(1, newest), error.path or CLUSTER)

    def require_reaches(self, seq: int) -> None:
        """Raise StoreCorrupt where the archive was found to be another one than it was, and what it has lost
        up to here is not all back."""
        if self.archive is None or self.hwm < seq:
            raise StoreCorrupt(
                "what the archive has lost is not all back there",
                path=self.store.uri,
                seq=seq,
                hint="nothing of it is removed here before; look at what else is told of the archive",
            )

    def _lose(self, number: int, name: str, why: str = "") -> NoReturn:
        """`number` is of the first state that is not what it was."""
        with self._lock:
            self._present.clear()
            self.losses += 1
        self.known.forget()
        self.archive, self.counted, self.published_seq, self.hwm = None, False, 0, 0
        self.newest, self._looked_number, self._lost_from = None, 0, number
        raise StoreCorrupt(
            f"the archive has lost what this database has shipped there{why}",
            path=name if "://" in name else at(self.store.uri, name),
            hint="find out who has removed it, or put another one there. What is here is uploaded again; the "
            "rest has to come from another copy",
        )

    def look_again(self, catalogue: Catalogue) -> SegmentDescriptor | None:
        """Whether what was left there is there still: what `require_as_left` asks for, and one segment of all
        that count. The segment is returned where it is gone, and asked for first until it is back."""
        self._looked_s = self._clock.monotonic()
        self.require_as_left()
        sample = self._missing or self.draw(catalogue.segments)
        self._missing = None
        if sample is not None and not is_there(self.store, segment_name(sample)):
            self._missing = sample
        return self._missing

    def draw(self, records: RecordList[R]) -> R | None:
        """One of those that were shipped there, as its newest manifest says."""
        first = 0 if self._parent is None else self._parent.seq
        begin, end = (
            records.count_to(attrgetter("recorded_seq"), seq) for seq in (first, self.published_seq)
        )
        if end <= begin:
            return None
        return records[begin + int.from_bytes(self._randomness.token(6), "little") % (end - begin)]

    def is_parents(self, segment: SegmentDescriptor) -> bool:
        """Whether it lies in the archive that this one is a clone of."""
        return self._parent is not None and segment.recorded_seq <= self._parent.seq

    def has(self, segment: SegmentDescriptor) -> bool:
        return (segment.epoch, segment.first) in self._present

    def note(self, segment: SegmentDescriptor, losses: int) -> None:
        """Note that a segment was seen to be there, unless something was lost since the count `losses`."""
        with self._lock:
            if losses == self.losses:
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
        go_without: Callable[[CheckpointDescriptor], None],
    ) -> Manifest | None:
        """Publish the manifest of the next entry that has none here. None where there is no such entry.
        `go_without` a checkpoint that nobody has may raise."""
        assert self.archive is not None
        seq = next(iter(catalogue.seqs_after(self.published_seq)), 0)
        if not seq or seq > seq_durable:
            return None
        for segment in _recorded_at(catalogue.segments, seq):
            if not (self.has(segment) or upload_local(segment)):
                name = segment_name(segment)
                if name not in self.known.unsound:
                    find_segment(self.store, segment)
                self._copy(name, others)
        for checkpoint in _recorded_at(catalogue.checkpoints, seq):
            is_there = self._has_sound(checkpoint_name(checkpoint)) or upload_checkpoint(checkpoint)
            if not (is_there or self._bring_checkpoint(checkpoint, others)):
                go_without(checkpoint)
        BEFORE_MANIFEST()
        manifest = self.archive.publish(catalogue, seq)
        AFTER_MANIFEST()
        self.newest = manifest
        self.published_seq, self.hwm = manifest.seq, manifest.hwm
        self.counted = False
        with self._lock:
            self._present = {each for each in self._present if each[1] > manifest.hwm}
        return manifest

    def require_epoch(self, epoch: int) -> None:
        """After what was read back: raise Fenced where somebody has claimed a higher epoch. A life before may
        have ended before a state named its last manifest, or may have been of an older version."""
        assert self.archive is not None
        if self.newest is not None:
            self.archive.have_count(self.newest, epoch)
        self.archive.require_epoch(epoch)
        self.counted = True

    def copy_epochs(self, primary: Store) -> None:
        """Who has claimed to write is known in every region, so that each can be restored from alone."""
        for found in primary.list(EPOCHS):
            self._copy(found.name, lambda: iter([primary]))

    def _bring_checkpoint(
        self, checkpoint: CheckpointDescriptor, others: Callable[[], Iterator[Store]]
    ) -> bool:
        """Whether one of the others had it: the store that it was shipped to has all of it."""
        name = checkpoint_name(checkpoint)
        for source in others():
            if not is_there(source, name):
                continue
            index = decode_checkpoint(read_small(source, name, checkpoint.size))
            for pack in index.packs:
                self._copy(pack_object_name(pack), lambda source=source: iter([source]))  # type: ignore[misc]
            self._copy(name, lambda source=source: iter([source]))  # type: ignore[misc]
            return True
        return False

    def _copy(self, name: str, others: Callable[[], Iterator[Store]]) -> None:
        if self._has_sound(name):
            return
        for source in others():
            if is_there(source, name):
                copy_object(
                    source,
                    self.store,
                    name,
                    part_bytes=self._part_bytes,
                    passing=self._passing,
                    known=self.known,
                )
                return
        raise self.missing(name)

    def _has_sound(self, name: str) -> bool:
        return has_sound(self.store, name, None, known=self.known, passing=self._passing)

    def missing(self, name: str) -> StoreCorrupt:
        return StoreCorrupt(
            "the log says that this object is in the store, and it is not",
            path=at(self.store.uri, name),
            hint="somebody has removed it: bring it back from a copy of the archive; shipping waits for it",
        )


def _recorded_at(records: RecordList[R], seq: int) -> Iterator[R]:
    """What the entry `seq` has recorded, in one of the catalogue's lists."""
    count = records.count_to(attrgetter("recorded_seq"), seq)
    if count and records[count - 1].recorded_seq == seq:
        yield records[count - 1]
