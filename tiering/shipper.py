"""The shipper: sealed segments and checkpoints go to the object store, the log records them, and manifests
say so there.

Always true:
  - a segment is recorded when every region that counts has it, and in the order of the log: the high-water
    mark is the end of an unbroken chain. What cannot be shipped stops it and raises an alarm;
  - nothing is uploaded before this owner has claimed an epoch, where it orders the log's entries itself;
  - a mark counts when the manifest with its entry was read back, and nobody was seen to claim a higher epoch
    after that. Who was outrun stops, and its database with it;
  - no writer ever waits for anything here, and no lock that a writer takes is held while a store works;
  - all of it can be done again from the beginning, after a crash at any line: names and bytes are the log's.

Work is done in steps: one looks around, records and publishes; others upload, each one object, of the log or
of a checkpoint. Who waits in `ship` lends a hand, so that nothing depends on there being threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from lowwater.engine.database.core import Core
from lowwater.engine.database.database import Database
from lowwater.engine.database.tier import Alarm, RegionStatus, ShippingState, ShippingStatus
from lowwater.engine.format.blocks import NO_HASH
from lowwater.engine.log.directory import Segment, read_sealed
from lowwater.engine.log.tickets import again
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.seams.seams import Task
from lowwater.engine.seams.waiting import Condition
from lowwater.engine.state.catalogue import CheckpointDescriptor, SegmentDescriptor, segment_shipped_entry
from lowwater.errors import (
    Closed,
    Corrupt,
    DiskFailed,
    Fenced,
    InternalError,
    LowwaterError,
    RetryError,
    TimedOut,
)
from lowwater.logging import get_logger
from lowwater.metrics import TierMetrics
from lowwater.tiering.backoff import Backoff
from lowwater.tiering.names import checkpoint_name, segment_name
from lowwater.tiering.objects import Parent
from lowwater.tiering.region import LOOK_AGAIN_S, Region
from lowwater.tiering.scrub_samples import SampleScrub
from lowwater.tiering.ship_checkpoints import CheckpointShipper, bring_checkpoint
from lowwater.tiering.store import Store, at
from lowwater.tiering.upload_queue import Stopping, UploadQueue, is_alarm
from lowwater.tiering.uploads import has_segment

_logger = get_logger("shipping")

BEFORE_CLAIM = Failpoint("ship.before_claim")
BEFORE_FORK = Failpoint("ship.before_fork")
AFTER_FORK = Failpoint("ship.after_fork")
BEFORE_RECORD = Failpoint("ship.before_record")
AFTER_RECORD = Failpoint("ship.after_record")
BEFORE_COUNT = Failpoint("ship.before_count")

# Who orders entries may not have come to it yet.
PROPOSE_AGAIN_S = 1.0
# How long other replicas have to bring a checkpoint that is not here: each looks once in LOOK_AGAIN_S.
WAIT_FOR_OTHERS_S = 5 * LOOK_AGAIN_S
# How long closing may take for a checkpoint that is not shipped yet.
FINISH_S = 10.0
# How long who waits sleeps at most, before it looks around.
LOOK_AFTER_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ShippingOptions:
    """How this process ships. Nothing here changes a byte that is shared."""

    interval_s: float = 10.0
    batch_segments_max: int = 100
    batch_bytes_max: int = 2**30
    uploads_at_once: int = 2
    # What is read and given to a store at once; the store makes its parts of that.
    part_bytes: int = 2**20
    # How often one object of what was shipped is looked at again; None for never.
    scrub_interval_s: float | None = None
    # Of the manifest that a restore began with, whose own entry its log lacks.
    follows: bytes = NO_HASH
    # Of a clone.
    parent: Parent | None = None


class Shipper:
    """`stores` are the regions, the first of which is where the log is read from; with `replicate_sync` the
    others count as it does."""

    def __init__(
        self,
        core: Core,
        stores: Sequence[Store],
        *,
        options: ShippingOptions,
        replicate_sync: bool = False,
        metrics: TierMetrics | None = None,
        on_counted: Callable[[], None] = lambda: None,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._core = core
        self._options = options
        self._metrics = metrics or TierMetrics(core.registry)
        self._on_counted = on_counted
        self._make_room = make_room
        seams = core.seams
        self._files, self._clock = seams.files, seams.clock
        self._queue = UploadQueue(
            seams,
            self._metrics,
            part_bytes=options.part_bytes,
            failed=self._failed,
            is_over=lambda: self._is_over,
        )
        self._queue.regions = self._regions = [
            Region(
                store,
                counts=replicate_sync or not number,
                seams=seams,
                part_bytes=options.part_bytes,
                passing=self._queue.passing,
                parent=options.parent,
            )
            for number, store in enumerate(stores)
        ]
        # A log whose entries somebody else orders is never in another epoch than its other replicas.
        self._claims = isinstance(core, Database)
        self._has_claimed = not self._claims
        # Since when regions, by their URIs, lack a checkpoint that is not here.
        self._waiting_since_s: dict[str, float] = {}
        self._lock = threading.RLock()
        self._has_news = Condition(self._lock)
        self._stepping = threading.Lock()
        self._is_stopping = False
        self._stopped_by: LowwaterError | None = None
        # Of what is wrong with the log here, or with the answer of who orders its entries.
        self._trouble = self._new_backoff()
        self._proposed: tuple[int, float] = (0, 0.0)
        # What a clone ships is whole in its own archive, its parent's checkpoints are not.
        parent = options.parent
        self._checkpoints = CheckpointShipper(
            core,
            stores[0],
            own_after=0 if parent is None else parent.seq,
            passing=self._require_not_over,
            known=self._regions[0].known,
        )
        self._shipping_checkpoint = threading.Lock()
        # Of what a purge has asked a store for in vain, and the segment that it was about.
        self._purge_trouble = self._new_backoff()
        self._refused: SegmentDescriptor | None = None
        # Of what is wrong with a checkpoint here, or with the store where it goes.
        self._checkpoint_trouble = self._new_backoff()
        self._scrub = None
        if options.scrub_interval_s is not None:
            self._scrub = SampleScrub(
                core,
                self._regions,
                interval_s=options.scrub_interval_s,
                metrics=self._metrics,
                upload_local=self._upload_local,
            )
        self._tasks: list[Task] = []
        self._background = 0
        """The thread that steps by itself. In a simulation it is everybody's."""
        self._metrics.watch(
            {
                "storage_s3_shipping_lag_bytes": lambda: self.lag()[0],
                "storage_s3_shipping_lag_seconds": lambda: self.lag()[1],
                "lowwater_uploader_memory_bytes": lambda: self._queue.memory_bytes,
                "lowwater_shipping_alarm": lambda: self._alarmed is not None,
                "lowwater_shipping_failures": self._failures,
                "lowwater_disk_left_bytes": self._disk_left,
            }
        )

    def look(self, *, refuses: bool = True) -> None:
        """Before anything is shipped there: find out whether this log could be. Raises what a caller has to
        correct, if it `refuses`. Where the log says that it was shipped before, all this is told later."""
        if self._core.catalogue.hwm or not self._core.cluster_id.strip(b"\0"):
            return
        region = self._regions[0]
        try:
            self._connect(region)
        except LowwaterError as error:
            if refuses and not isinstance(error, RetryError | Fenced):
                raise
            self._failed(region.backoff, error)

    def start(self) -> None:
        """Begin, in the background."""
        runner = self._core.seams.runner
        self._tasks.append(runner.start("tier-shipper", self._background_step))
        for number in range(self._options.uploads_at_once):
            self._tasks.append(runner.start(f"tier-upload-{number}", self.upload_step))
        self._tasks.append(runner.start("tier-checkpoints", self.checkpoint_step))
        if self._scrub is not None:
            self._scrub.start()
        self._core.call_when_sealed(self.wake)

    def wake(self) -> None:
        if self._tasks:
            self._tasks[0].wake()

    # ------------------------------------------------------------------ the step that looks around

    def _background_step(self) -> float | None:
        self._background = threading.get_ident()
        return self.step()

    def step(self) -> float | None:
        """Look what there is to do, and do what is not uploading. How long until there may be more."""
        with self._stepping:
            if self._is_over:
                return None
            began_s = self._clock.monotonic()
            try:
                wait_s = self._advance()
            except Stopping:
                return None
            self._metrics.cycled(self._clock.monotonic() - began_s)
        with self._lock:
            self._has_news.notify_all()
        return wait_s

    @property
    def _is_over(self) -> bool:
        return self._is_stopping or self._stopped_by is not None

    def _advance(self) -> float | None:
        core = self._core
        if core.failure is not None and not isinstance(core.failure, Fenced):
            # The log takes nothing any more: what was shipped could not be recorded.
            return self._options.interval_s
        if not core.cluster_id.strip(b"\0"):
            return self._options.interval_s  # a fed log without its first entry
        for region in self._regions:
            self._reach(region)
        if self._regions[0].archive is not None and not self._is_over:
            self._try(self._trouble, self._ship)
        for region in self._regions:
            if region.is_to_be_looked_at and not self._is_over:
                self._try(region.looking, self._look_again, region)
            if region.archive is not None and self._may_claim and not self._is_over:
                self._try(region.backoff, self._publish, region)
        if (refusal := self._purge_trouble.error) is not None:
            self._try(self._purge_trouble, partial(self._ask_again, refusal))
        if not self._is_over:
            self._count()
        return self._wait_s()

    def _try(self, backoff: Backoff, do: Callable[..., None], *arguments: Region) -> None:
        """Call `do`, unless it failed a short while ago."""
        if backoff.wait_s > 0 or self._is_over:
            return
        try:
            do(*arguments)
        except LowwaterError as error:
            self._failed(backoff, error)
        except OSError as error:
            self._failed(backoff, DiskFailed(f"shipping ran into {error}", path=self._core.directory))
        except Stopping:
            raise
        except Exception as error:  # noqa: BLE001 — a bug must be seen, and not end a thread in silence
            self._failed(backoff, InternalError(f"shipping: {error!r}", path=self._core.directory))
        else:
            if backoff.error is not None:
                _logger.info("shipping goes on", path=self._core.directory)
            backoff.succeeded()

    def _failed(self, backoff: Backoff, error: LowwaterError) -> None:
        if isinstance(error, Fenced):
            self._stopped_by = error
            self._core.stop_writing(error)
            _logger.error("fenced", path=self._core.directory, error=str(error))
            return
        if isinstance(error, Closed) and self._is_stopping:
            raise Stopping
        self._metrics.failed()
        is_news = backoff.error is None or str(backoff.error) != str(error)
        backoff.failed(error)
        needs_repair = is_alarm(error)
        if is_news:
            log = _logger.error if needs_repair else _logger.warning
            log(
                "shipping cannot go on" if needs_repair else "shipping failed, and is tried again",
                path=self._core.directory,
                error=str(error),
                hint=error.hint,
            )

    def _wait_s(self) -> float | None:
        if self._is_over:
            return None
        others = (self._purge_trouble, self._checkpoint_trouble)  # who tries those again is somebody else
        waits = [each.wait_s for each in self._backoffs() if each.error is not None and each not in others]
        if self._proposed[0] > self._core.catalogue.hwm:
            waits.append(PROPOSE_AGAIN_S)
        return max(min([self._options.interval_s, *waits]), 0.001)

    def _reach(self, region: Region) -> None:
        """Find out what is there, unless it is known: that says nothing of what has failed there since."""
        if region.archive is None:
            self._try(region.backoff, self._connect, region)

    def _connect(self, region: Region) -> None:
        core = self._core
        region.connect(core.catalogue, core.cluster_id, core.epoch)

    # ------------------------------------------------------------------ segments

    def _ship(self) -> None:
        """Queue complete segments for upload, and record those that are there."""
        core = self._core
        hwm, lwm = core.catalogue.hwm, core.marks().lwm
        self._queue.forget(hwm)
        budget_bytes = self._options.batch_bytes_max
        seq, segment_hash = hwm, core.catalogue.hash_last
        for local in core.complete_segments(hwm)[: self._options.batch_segments_max]:
            if not local.sealed or local.seq_last > lwm or budget_bytes <= 0:
                break
            if (local.header.seq_before, local.header.hash_before) != (seq, segment_hash):
                raise Corrupt(
                    f"the segment after seq {seq} is not here",
                    seq=seq + 1,
                    path=local.path,
                    hint="nothing is shipped over a gap: restore the segment, or this node from the archive",
                )
            self._claim()
            budget_bytes -= self._queue.want(local).segment.size
            seq, segment_hash = local.seq_last, local.segment_hash
        for task in self._tasks[1:]:
            task.wake()
        while self._record():
            pass

    def _record(self) -> bool:
        """Record the next segment, once all regions that count have it. Return False where there is none, or
        where it is not recorded yet."""
        core = self._core
        catalogue = core.catalogue
        wanted = self._queue.first()
        if wanted is None or not all(region.has(wanted.segment) for region in self._regions if region.counts):
            return False
        segment, header = wanted.segment, wanted.local.header
        if (header.seq_before, header.hash_before) != (catalogue.hwm, catalogue.hash_last):
            return False  # somebody else has recorded it
        now_s = self._clock.monotonic()
        if self._proposed[0] == segment.last and now_s < self._proposed[1] + PROPOSE_AGAIN_S:
            return False
        BEFORE_RECORD()
        core.propose_control(segment_shipped_entry(catalogue.hwm, catalogue.hash_last, segment))
        AFTER_RECORD()
        self._proposed = (segment.last, now_s)
        if catalogue.hwm < segment.last:
            return False
        self._queue.forget(segment.last)
        _logger.info(
            "shipped",
            path=wanted.local.path,
            seq_first=segment.first,
            seq_last=segment.last,
            bytes=segment.size,
            lag_seconds=round(max(0, self._clock.now_us() - segment.time_max_us) / 1e6, 3),
        )
        return True

    def checkpoint_step(self) -> float | None:
        """Upload one object of a checkpoint, or record one that is there, where the log is shipped so far."""
        if self._is_over:
            return None
        # Somebody else may be at it, for as long as an upload takes.
        if not self._shipping_checkpoint.acquire(blocking=False):
            return self._options.interval_s
        try:
            return self._advance_checkpoint()
        except Stopping:
            return None
        finally:
            self._shipping_checkpoint.release()

    def _require_not_over(self) -> None:
        if self._is_over:
            raise Stopping

    def _advance_checkpoint(self) -> float:
        checkpoints, trouble = self._checkpoints, self._checkpoint_trouble
        if trouble.wait_s > 0:
            return trouble.wait_s
        shipped = checkpoints.shipped
        waits: list[float | None] = []

        def advance() -> None:
            # Before its first upload the log has to be claimed, and for nothing it is not.
            if checkpoints.has_work and self._may_upload():
                waits.append(checkpoints.advance())

        self._try(trouble, advance)
        if checkpoints.shipped > shipped:
            self.wake()  # the entry that says so has a manifest too
        if trouble.error is not None:
            return trouble.wait_s
        return next((wait_s for wait_s in waits if wait_s is not None), self._options.interval_s)

    def _may_upload(self) -> bool:
        """Whether the first store can be reached, and this owner may write there."""
        with self._stepping:
            region = self._regions[0]
            if not self._is_over:
                self._reach(region)
            if region.archive is not None and not self._is_over:
                self._try(self._trouble, self._claim)
            return region.archive is not None and self._has_claimed and not self._is_over

    @property
    def _may_claim(self) -> bool:
        """Whether this owner has claimed an epoch, or can: it does so in the first region."""
        return self._has_claimed or self._regions[0].archive is not None

    def _claim(self) -> None:
        """Before the first upload: be the one who goes on with this log."""
        if self._has_claimed:
            return
        core, region = self._core, self._regions[0]
        assert isinstance(core, Database)
        assert region.archive is not None
        BEFORE_CLAIM()
        claim = region.archive.claim(
            core.catalogue,
            core.epoch,
            token=core.seams.randomness.token,
            owner=core.seams.owner,
            follows=self._options.follows,
        )
        BEFORE_FORK()
        core.fork(claim.epoch, parent_segment=claim.parent_segment, parent_manifest=claim.parent_manifest)
        AFTER_FORK()
        self._has_claimed = True
        _logger.info("claimed", path=core.directory, uri=region.store.uri, epoch=claim.epoch)

    def upload_step(self) -> float | None:
        """Upload one object that waits for it."""
        if self._is_over:
            return None
        try:
            if not self._queue.step():
                return None
        except Stopping:
            return None
        with self._lock:
            self._has_news.notify_all()
        self.wake()
        return 0

    # ------------------------------------------------------------------ manifests, and what counts

    def _publish(self, region: Region) -> None:
        core = self._core
        while region.is_behind(core.catalogue, core.marks().durable):
            if self._is_over:
                raise Stopping
            self._claim()
            began_s = self._clock.monotonic()

            def upload_checkpoint(checkpoint: CheckpointDescriptor) -> bool:
                if core.is_checkpoint_due(checkpoint.seq):
                    raise TimedOut(
                        "another replica has recorded a checkpoint that is still being made here",
                        seq=checkpoint.seq,
                        path=core.directory,
                        hint="nothing is to be done: it is shipped once it is made",
                    )
                return bring_checkpoint(core, region.store, checkpoint, known=region.known)

            def others() -> Iterator[Store]:
                return (each.store for each in self._regions if each is not region)

            def go_without(checkpoint: CheckpointDescriptor) -> None:
                name = checkpoint_name(checkpoint)
                if not self._claims:
                    self._wait_for_others(region, name)
                self._metrics.failed()
                _logger.error(
                    "a checkpoint is neither here nor in the archive any more",
                    object=at(region.store.uri, name),
                    seq=checkpoint.seq,
                )

            manifest = region.publish_next(
                core.catalogue,
                core.marks().durable,
                upload_local=partial(self._upload_local, region),
                upload_checkpoint=upload_checkpoint,
                others=others,
                go_without=go_without,
            )
            duration_s = self._clock.monotonic() - began_s
            self._metrics.published(duration_s)
            if manifest is not None:
                _logger.info(
                    "published",
                    object=at(region.store.uri, manifest.name),
                    seq=manifest.seq,
                    hwm=manifest.hwm,
                    bytes=len(manifest.encode()),
                    duration_s=round(duration_s, 3),
                )
        self._waiting_since_s.pop(region.store.uri, None)
        if not region.counted:
            if region is not self._regions[0]:
                region.copy_epochs(self._regions[0].store)
            BEFORE_COUNT()
            try:
                region.require_epoch(core.epoch)
            except Fenced:
                if self._has_claimed:
                    raise
                # A life before may have ended between its claim and the entry that says so. This is found out
                # as before an upload: by whose manifest is the newest.
                self._claim()
                region.require_epoch(core.epoch)

    def _wait_for_others(self, region: Region, name: str) -> None:
        """Another replica may have a checkpoint that is not here, and bring it. All that a region lacks are
        waited for together, or one that lacks many would be filled again long after. Who brings one later
        does no harm: its name and bytes are the log's."""
        now_s = self._clock.monotonic()
        since_s = self._waiting_since_s.setdefault(region.store.uri, now_s)
        if now_s < since_s + WAIT_FOR_OTHERS_S:
            error = region.missing(name)
            error.hint = (
                f"another replica may have it, and bring it: after {WAIT_FOR_OTHERS_S:g} s it is gone without"
            )
            raise error

    def _upload_local(self, region: Region, segment: SegmentDescriptor) -> bool:
        """Upload a segment to a region. Return False where the segment is not here any more."""
        local = self._local(segment)
        if local is None:
            return False
        self._queue.upload(region, segment, local.path)
        return True

    def _local(self, segment: SegmentDescriptor) -> Segment | None:
        """The file that has it; None where it is not here any more."""
        local = next(iter(self._core.complete_segments(segment.first - 1)), None)
        return None if local is None or local.segment_hash != segment.hash or not local.sealed else local

    # ------------------------------------------------------------------ what was shipped, and may be gone

    def _look_again(self, region: Region) -> None:
        lost = region.look_again(self._core.catalogue)
        if lost is not None:
            self._bring_back(region, lost)

    def require_shipped(self, segments: Sequence[SegmentDescriptor]) -> None:
        """Before they are removed here: every region that counts is asked for each of them."""
        asked: SegmentDescriptor | None = None
        try:
            for region in self._regions if segments else ():
                if not region.counts:
                    continue
                asked = segments[-1]
                # What is found to be lost is lost for who publishes, too: not while it does.
                with self._stepping:
                    region.require_as_left()
                    region.require_reaches(asked.last)
                for asked in segments:
                    if self._is_stopping:
                        raise Stopping
                    if not region.is_parents(asked):
                        self._bring_back(region, asked)
        except Stopping:
            raise Closed("the database is being closed", path=self._core.directory) from None
        except LowwaterError as error:
            if is_alarm(error):
                self._refused = asked
                self._failed(self._purge_trouble, error)
            raise
        self._purge_trouble.succeeded()

    def _ask_again(self, refusal: LowwaterError) -> None:
        """For the segment that a purge was refused for: the next purge may be long after it was repaired, or
        never come. What else it would find, it says then."""
        refused = self._refused
        assert refused is not None
        try:
            for region in self._regions:
                if region.counts:
                    region.require_as_left()
                    region.require_reaches(refused.last)
                    if not region.is_parents(refused):
                        self._bring_back(region, refused)
        except LowwaterError as error:
            # A store that does not answer says nothing of what was wrong.
            raise error if is_alarm(error) else again(refusal) from None

    def _bring_back(self, region: Region, segment: SegmentDescriptor) -> None:
        """Upload a segment again, if the region has lost it. Raises StoreCorrupt where it has another one."""
        local = self._local(segment)
        if has_segment(
            region.store,
            self._files,
            None if local is None else local.path,
            segment,
            part_bytes=self._options.part_bytes,
            passing=self._queue.passing,
            known=region.known,
        ):
            return
        name = segment_name(segment)
        self._metrics.failed()
        _logger.error("the store has lost a segment that was shipped", path=region.store.uri, name=name)
        if not self._upload_local(region, segment):
            raise region.missing(name)
        _logger.info("the segment was uploaded again", path=region.store.uri, name=name)

    def _count(self) -> None:
        counting = [region for region in self._regions if region.counts]
        if not all(region.counted for region in counting):
            return
        before = self._core.counted_hwm
        if self._core.mark_counts(min(region.hwm for region in counting)) > before:
            self._on_counted()
            for task in self._tasks[-1:]:
                task.wake()  # checkpoints of what is shipped can follow

    def checkpoints_needed(self) -> list[int]:
        """Return the seqs of the checkpoints that shipping needs: the one that is shipped next, and those
        that are recorded, but that no manifest of ours tells of. A store is known to have all of the
        others."""
        core = self._core
        published_seq = max(region.published_seq for region in self._regions)
        recorded = core.catalogue.checkpoints
        count = recorded.count_to(attrgetter("recorded_seq"), published_seq)
        return [core.ships_seq, *(each.seq for each in recorded.between(count, len(recorded)))]

    # ------------------------------------------------------------------ who waits

    def ship(self, timeout_s: float | None) -> int:
        return self._wait_until_shipped(timeout_s, is_patient=timeout_s is not None)

    def _wait_until_shipped(self, timeout_s: float | None, *, is_patient: bool) -> int:
        """Who is patient lets a store that does not answer be tried again."""
        left_s = timeout_s
        attempts = {id(each): each.total for each in self._backoffs()}
        for backoff in self._backoffs():
            backoff.forget_wait()
        target = self._target()
        checkpoint_seq = max((each.seq for each in self._core.checkpoints()), default=0)
        sealed_at_s: float | None = None
        was_told = False
        while True:
            self._require_going_on()
            began_s = self._clock.monotonic()
            if sealed_at_s is None or began_s >= sealed_at_s + PROPOSE_AGAIN_S:
                sealed_at_s = began_s
                self._seal_below(target)
            self._core.finish_sealing()
            was_helped = self._help(wakes=not was_told)
            was_told = False
            if not was_helped:
                wait_s = LOOK_AFTER_S if left_s is None else min(left_s, LOOK_AFTER_S)
                with self._lock:
                    was_told = self._has_news.wait(wait_s)
                    if not was_told:
                        # In a simulation time stands still while somebody sleeps.
                        began_s = min(began_s, self._clock.monotonic() - wait_s)
            self._require_going_on()
            has_log = self._core.counted_hwm >= target
            if has_log and self._has_checkpoint(checkpoint_seq):
                return self._core.counted_hwm
            # What is wrong with a checkpoint is told once the log is safe.
            error = self._error_since(attempts, log_alone=not has_log)
            if error is not None and not (is_patient and isinstance(error, RetryError)):
                raise again(error)
            if left_s is not None:
                left_s -= self._clock.monotonic() - began_s
                if left_s <= 0:
                    if error is not None:
                        raise again(error)
                    raise TimedOut(f"not all was shipped within {timeout_s:g} s", path=self._core.directory)

    def finish(self) -> None:
        """Before the end: ship the checkpoint that was made last, for so long at most. What is in the way of
        it is said in the log; the next life does it then. Who is fed leaves it to the other replicas: perhaps
        nobody orders its entries any more."""
        made_seq = max((each.seq for each in self._core.checkpoints()), default=0)
        is_in_the_way = any(each.error is not None for each in self._backoffs(counting=True))
        is_able = self._claims and not self._is_over and self._core.failure is None
        if not is_able or is_in_the_way or self._has_checkpoint(made_seq):
            return
        try:
            self._wait_until_shipped(FINISH_S, is_patient=False)
        except LowwaterError as error:
            _logger.warning("closed before its checkpoint was shipped", error=str(error))

    def _target(self) -> int:
        """The last seq that has to be shipped: what is durable, without a tail that shipping itself wrote."""
        core = self._core
        if core.opened_us is not None:
            return core.marks().durable
        complete = core.complete_segments()
        return min(complete[-1].seq_last, core.marks().durable) if complete else 0

    def _has_checkpoint(self, seq: int) -> bool:
        """Whether the checkpoint that was made of `seq`, or a later one, is where all have to be that count,
        and a manifest says so. One that is not here any more was passed over."""
        core = self._core
        recorded = core.catalogue.checkpoints.last
        recorded_seq = 0 if recorded is None else recorded.seq
        if recorded_seq < seq and any(recorded_seq < each.seq <= seq for each in core.checkpoints()):
            return False
        published_seq = min(region.published_seq for region in self._regions if region.counts)
        return recorded is None or published_seq >= recorded.recorded_seq

    def _seal_below(self, target: int) -> None:
        complete = self._core.complete_segments()
        if (complete[-1].seq_last if complete else 0) < target:
            self._core.propose_seal()

    def _help(self, *, wakes: bool) -> bool:
        """Do what there is to do. False where others are doing it, or nothing can be done now: who waits for
        a store that does not answer must be able to give up. `wakes` those others: who has just been told
        something by them must not, or each would keep the other one busy until all is shipped."""
        if self._background not in (0, threading.get_ident()):
            for task in self._tasks if wakes else ():
                task.wake()
            return False
        before = self._progress()
        self.step()
        while self.upload_step() == 0:
            pass
        self.step()
        while self.checkpoint_step() == 0:
            pass
        self.step()
        return self._progress() != before

    def _progress(self) -> tuple[object, ...]:
        seqs = [region.published_seq for region in self._regions]
        catalogue = self._core.catalogue
        sent = self._checkpoints.bytes_written
        return catalogue.recorded_seq, self._core.counted_hwm, self._core.marks().durable, sent, *seqs

    def _require_going_on(self) -> None:
        if self._stopped_by is not None:
            raise again(self._stopped_by)
        if self._is_stopping:
            raise Closed("the database is being closed", path=self._core.directory)
        failure = self._core.failure
        if failure is not None:
            raise again(failure)

    def _new_backoff(self) -> Backoff:
        seams = self._core.seams
        return Backoff(seams.clock, seams.randomness)

    def _backoffs(self, *, counting: bool = False) -> list[Backoff]:
        """All of them, or those that `ship` waits for."""
        found = [self._trouble, self._checkpoint_trouble]
        for number, region in enumerate(self._regions):
            if region.counts or not counting:
                found += [region.backoff, region.uploads, *self._queue.troubles_of(number)]
            if not counting:
                found.append(region.looking)
        return found if counting else [*found, self._purge_trouble]

    @property
    def _alarmed(self) -> LowwaterError | None:
        errors = [each.error for each in self._backoffs() if each.error is not None]
        if self._scrub is not None and (damage := self._scrub.alarm) is not None:
            errors.append(damage)
        return next((error for error in errors if is_alarm(error)), None)

    def _error_since(self, attempts: Mapping[int, int], *, log_alone: bool) -> LowwaterError | None:
        """What went wrong with what `ship` waits for, since so many attempts had failed."""
        errors = [
            each.error
            for each in self._backoffs(counting=True)
            if each.error is not None
            and each.total > attempts.get(id(each), 0)
            and not (log_alone and each is self._checkpoint_trouble)
        ]
        return min(errors, key=lambda error: isinstance(error, RetryError), default=None)

    # ------------------------------------------------------------------ how it goes

    def lag(self) -> tuple[int, float]:
        """What is not shipped and recorded yet: its bytes, and how old it is, in seconds."""
        core = self._core
        hwm = core.catalogue.hwm
        behind = core.complete_segments(hwm)
        size = sum(each.body_bytes for each in behind)
        opened_us = core.opened_us
        if opened_us is not None:
            size += core.opened_bytes
        since_us = opened_us
        if behind:
            since_us = self._time_first_us(behind[0])
        return size, 0.0 if since_us is None else max(0.0, (self._clock.now_us() - since_us) / 1e6)

    def _time_first_us(self, local: Segment) -> int:
        wanted = self._queue.find(local.seq_first)
        if wanted is not None:
            return wanted.segment.time_min_us
        try:
            return read_sealed(self._files, local.path)[1].time_min_us if local.sealed else local.time_last_us
        except LowwaterError:
            return local.time_last_us

    def _failures(self) -> int:
        return max(each.failures for each in self._backoffs())

    def _disk_left(self) -> float:
        try:
            return float(self._core.space.left_bytes())
        except LowwaterError:
            return 0.0

    def status(self) -> ShippingStatus:
        core, primary = self._core, self._regions[0]
        errors = [each for each in self._backoffs(counting=True) if each.error is not None]
        failing = errors[0] if errors else None
        error = self._stopped_by or (failing.error if failing is not None else None)
        alarmed = self._stopped_by or self._alarmed
        lag_bytes, lag_seconds = self.lag()
        state: ShippingState = "idle" if not core.complete_segments(core.catalogue.hwm) else "working"
        if primary.archive is None:
            state = "waiting"
        if failing is not None:
            state = "failing"
        if alarmed is not None:
            state = "stopped"
        return ShippingStatus(
            state=state,
            uri=primary.store.uri,
            epoch=core.epoch if self._has_claimed else 0,
            hwm=core.marks().hwm,
            counted_hwm=core.counted_hwm,
            lag_bytes=lag_bytes,
            lag_seconds=lag_seconds,
            error=None if error is None else str(error),
            failures=self._failures(),
            retry_in_s=None if failing is None else failing.wait_s,
            alarm=None
            if alarmed is None
            else Alarm(alarmed.message, alarmed.path, alarmed.seq, alarmed.hint),
            regions=tuple(
                RegionStatus(
                    each.store.uri,
                    each.hwm,
                    each.counts,
                    str(error) if (error := each.backoff.error or each.uploads.error) is not None else None,
                )
                for each in self._regions
            ),
        )

    def make_room(self) -> None:
        self._make_room()
        self.wake()

    def stop(self) -> None:
        """Return once nothing of it runs any more."""
        self._is_stopping = True
        with self._lock:
            self._has_news.notify_all()
        if self._scrub is not None:
            self._scrub.stop()
        for task in self._tasks:
            task.stop()
