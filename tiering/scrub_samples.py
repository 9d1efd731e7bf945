"""What was shipped long ago is looked at again: one object now and then, every byte of it, as a scrub would.

Always true:
  - an object is looked at twice before it is called damaged: the network may have changed what came;
  - what is damaged or gone is written again where its bytes are here, and else is an alarm, until it was seen
    to be whole again. Not so a checkpoint that is gone: it is told of once, for the log has what was in it;
  - of the time no more than SHARE goes into it, so of the bandwidth neither;
  - a store that does not answer is no damage: it is asked again when the next object is due;
  - once it was stopped, no read begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lowwater.engine.database.core import Core
from lowwater.engine.log.check import Finding
from lowwater.engine.seams.seams import Task
from lowwater.engine.state.catalogue import SegmentDescriptor
from lowwater.errors import InternalError, LowwaterError, NotFound, StoreCorrupt
from lowwater.logging import get_logger
from lowwater.metrics import TierMetrics
from lowwater.tiering.names import checkpoint_name, chunk_name, pack_object_name, segment_name
from lowwater.tiering.objects import manifest_of
from lowwater.tiering.region import Region
from lowwater.tiering.scrub_objects import (
    Item,
    KnownOfArchive,
    Looker,
    SeenObject,
    WantedCheckpoint,
    WantedObject,
    WantedSegment,
)
from lowwater.tiering.ship_checkpoints import bring_checkpoint, bring_object
from lowwater.tiering.store import at, is_there
from lowwater.tiering.upload_queue import Stopping
from lowwater.tiering.verified_writes import write_verified
from lowwater.tiering.watched_store import WatchedStore

_logger = get_logger("archive")

SHARE = 0.01


class Sample(NamedTuple):
    """An object that is to be looked at: what it has to be, with the size that it has in the store, and how
    it is written again, which is False where its bytes are not here. Of a pack also the checkpoint that
    needs it."""

    region: Region
    name: str
    want: Callable[[int | None], Item]
    fill: Callable[[], bool]
    checkpoint: str = ""


class SampleScrub:
    """`upload_local` has a segment that is here uploaded, and says whether it is here."""

    def __init__(
        self,
        core: Core,
        regions: Sequence[Region],
        *,
        interval_s: float,
        metrics: TierMetrics,
        upload_local: Callable[[Region, SegmentDescriptor], bool],
    ) -> None:
        self._core = core
        self._regions = regions
        self._interval_s = interval_s
        self._metrics = metrics
        self._upload_local = upload_local
        self._clock, self._randomness = core.seams.clock, core.seams.randomness
        # Not all of many nodes at the same moment.
        self._due_s = self._clock.monotonic() + interval_s * (0.5 + self._drawn(2**16) / 2**17)
        # What is wrong, by its name; looked at in turns with what is drawn.
        self._damaged: dict[str, tuple[Sample, StoreCorrupt]] = {}
        self._is_turn_of_damaged = False
        # Names of checkpoints that are gone, and were told of.
        self._gone: set[str] = set()
        self._reading: WatchedStore | None = None
        self._is_stopping = False
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._core.seams.runner.start("tier-scrub", self.step)

    def stop(self) -> None:
        """Return once nothing of it runs any more."""
        self._is_stopping = True
        if (reading := self._reading) is not None:
            reading.stopped = True
        if self._task is not None:
            self._task.stop()

    @property
    def alarm(self) -> LowwaterError | None:
        return next((error for _, error in [*self._damaged.values()]), None)

    def step(self) -> float | None:
        """Look at one object, where one is due. How long until the next one is."""
        if self._is_stopping:
            return None
        began_s = self._clock.monotonic()
        if began_s < self._due_s:
            return self._due_s - began_s
        try:
            sample = self._next()
            if sample is not None:
                self._look_at(sample)
        except Stopping:
            return None
        except LowwaterError as error:
            self._not_looked(error)
        except Exception as error:  # noqa: BLE001 — a bug must be seen, and not end a thread in silence
            self._not_looked(InternalError(f"looking at the archive: {error!r}", path=self._core.directory))
        now_s = self._clock.monotonic()
        wait_s = max(self._interval_s, (now_s - began_s) / SHARE)
        self._due_s = now_s + wait_s
        return None if self._is_stopping else wait_s

    def _not_looked(self, error: LowwaterError) -> None:
        if not self._is_stopping:
            _logger.warning("nothing could be looked at", path=self._core.directory, error=str(error))

    # ------------------------------------------------------------------ looking

    def _look_at(self, sample: Sample) -> None:
        name, known = sample.name, sample.region.known
        seen = self._look(sample)
        if seen.finding is not None:
            known.doubt(name)  # at once: nothing may be purged because of it meanwhile
            seen = self._look(sample)
        finding = seen.finding
        if finding is None:
            known.trust(name)
            self._gone.discard(name)
            if self._damaged.pop(name, None) is not None:
                _logger.info("an object is whole again", object=at(sample.region.store.uri, name))
            return
        if isinstance(seen.item, WantedCheckpoint) and seen.item.listed is None:
            self._damaged.pop(name, None)
            self._checkpoint_is_gone(sample, finding)
            return
        if sample.checkpoint and not is_there(sample.region.store, sample.checkpoint):
            # Where nobody has the pack, its checkpoint is taken away, so that restores pass it over. Others
            # that need it are drawn, too.
            self._damaged.pop(name, None)
            return
        self._metrics.failed()
        _logger.error("an object of the archive is damaged", object=finding.where, error=finding.what)
        error = StoreCorrupt(finding.what, path=finding.where, seq=finding.seq, hint=finding.hint)
        self._damaged[name] = sample, error
        if sample.fill():
            del self._damaged[name]
            _logger.info("the object was uploaded again", object=finding.where)

    def _checkpoint_is_gone(self, sample: Sample, finding: Finding) -> None:
        """No alarm, which nobody could end where no node has it any more: the segments are looked at too."""
        if sample.fill():
            _logger.info("the object was uploaded again", object=finding.where)
        elif sample.name not in self._gone:
            self._gone.add(sample.name)
            self._metrics.failed()
            _logger.warning("a checkpoint of the archive is gone", object=finding.where, seq=finding.seq)

    def _look(self, sample: Sample) -> SeenObject:
        store = self._reading = WatchedStore(sample.region.store)
        store.stopped = self._is_stopping
        try:
            size = store.stat(sample.name).size
        except NotFound:
            size = None
        return Looker(store, KnownOfArchive(deep=True)).look(sample.want(size))

    # ------------------------------------------------------------------ drawing

    def _next(self) -> Sample | None:
        self._is_turn_of_damaged = not self._is_turn_of_damaged
        if self._is_turn_of_damaged and self._damaged:
            # The one after the one before.
            name = next(iter(self._damaged))
            self._damaged[name] = self._damaged.pop(name)
            return self._damaged[name][0]
        regions = [each for each in self._regions if each.archive is not None]
        if not regions:
            return None
        region = regions[self._drawn(len(regions))]
        # Segments are most of what there is, and the rest leads to them.
        draws = [self._draw_segment, self._draw_segment, self._draw_checkpoint, self._draw_manifest]
        first = self._drawn(len(draws))
        return next((found for draw in draws[first:] + draws[:first] if (found := draw(region))), None)

    def _draw_segment(self, region: Region) -> Sample | None:
        segment = region.draw(self._core.catalogue.segments)
        if segment is None:
            return None
        name = segment_name(segment)
        return Sample(
            region,
            name,
            lambda size: WantedSegment(name, size, segment, None, None),
            lambda: self._upload_local(region, segment),
        )

    def _draw_checkpoint(self, region: Region) -> Sample | None:
        """Its index, or where that is sound one of its packs."""
        checkpoint = region.draw(self._core.catalogue.checkpoints)
        if checkpoint is None:
            return None
        name = checkpoint_name(checkpoint)
        index = Sample(
            region,
            name,
            lambda size: WantedCheckpoint(name, size, checkpoint, None),
            # With its packs: an index is there only when they are.
            lambda: bring_checkpoint(self._core, region.store, checkpoint, known=region.known),
        )
        packs = list(getattr(self._look(index).result, "packs", {}).items())
        if not packs:
            return index
        pack, pack_bytes = packs[self._drawn(len(packs))]
        pack_name = pack_object_name(pack)
        return Sample(
            region,
            pack_name,
            lambda size: WantedObject(pack_name, size, pack_bytes),
            lambda: bring_object(self._core, region.store, pack_name, known=region.known),
            name,
        )

    def _draw_manifest(self, region: Region) -> Sample | None:
        """One of all, or a part of the catalogue that it reaches. All of it can be made here."""
        core, manifest = self._core, region.newest
        catalogue = core.catalogue
        if manifest is None or manifest_of(catalogue, core.cluster_id, manifest.seq) != manifest:
            return None  # another replica's, or a parent's: it has what is not here
        if self._drawn(2):  # the newest is what restores begin with
            of_segments = bool(self._drawn(2))
            older = region.draw(catalogue.segments) if of_segments else region.draw(catalogue.checkpoints)
            if older is not None:
                manifest = manifest_of(catalogue, core.cluster_id, older.recorded_seq)
        objects = [(manifest.name, manifest.encode())]
        objects += [(chunk_name(each), data) for each, data in catalogue.objects(manifest.heads)]
        name, data = objects[self._drawn(len(objects))]

        def fill() -> bool:
            write_verified(region.store, name, lambda: [data], size=len(data), known=region.known)
            return True

        return Sample(region, name, lambda size: WantedObject(name, size, len(data)), fill)

    def _drawn(self, count: int) -> int:
        return int.from_bytes(self._randomness.token(6), "little") % count
