"""Uploads of segments that are under way, or wait for somebody who has time for them.

Always true:
  - of each segment and region there is one upload at a time;
  - what is wrong with one segment is kept with it, and what is wrong with a store with that: neither makes
    the others wait, and no success elsewhere ends its wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lowwater.engine.log.directory import Segment
from lowwater.engine.log.log import Seams
from lowwater.engine.state.catalogue import SegmentDescriptor
from lowwater.errors import Corrupt, DataError, DiskFailed, InternalError, LowwaterError, NotFound
from lowwater.logging import get_logger
from lowwater.metrics import TierMetrics
from lowwater.tiering.backoff import Backoff
from lowwater.tiering.names import segment_name
from lowwater.tiering.region import Region
from lowwater.tiering.store import at
from lowwater.tiering.uploads import describe_file, upload_segment

_logger = get_logger("shipping")


def is_alarm(error: LowwaterError) -> bool:
    """Whether waiting does not help: somebody has to repair something."""
    return isinstance(error, DataError | DiskFailed | InternalError | NotFound)


class Stopping(Exception):
    """An upload is given up: the shipper is being stopped."""


class _Job(NamedTuple):
    number: int
    """The number of the region."""
    wanted: WantedUpload


@dataclass(slots=True)
class WantedUpload:
    """A segment that is to be shipped, from when it was described until it is recorded."""

    segment: SegmentDescriptor
    local: Segment
    # The regions of which an upload is under way, or waits for somebody.
    under_way: set[int] = field(default_factory=set)
    # What is wrong with this segment here, or with what a region has in its place.
    troubles: dict[int, Backoff] = field(default_factory=dict)


class UploadQueue:
    """`failed` is told what goes wrong, and whose wait that makes longer. `is_over` gives up what is under
    way."""

    def __init__(
        self,
        seams: Seams,
        metrics: TierMetrics,
        *,
        part_bytes: int,
        failed: Callable[[Backoff, LowwaterError], None],
        is_over: Callable[[], bool],
    ) -> None:
        self._seams = seams
        self._metrics = metrics
        self._part_bytes = part_bytes
        self._failed = failed
        self._is_over = is_over
        self.regions: Sequence[Region] = ()
        self._lock = threading.Lock()
        self._wanted: dict[int, WantedUpload] = {}
        self._jobs: deque[_Job] = deque()
        self.memory_bytes = 0

    def passing(self, size: int) -> None:
        """A part goes out; where it is of no bytes, one is only looked at."""
        if self._is_over():
            raise Stopping
        if size:
            self._metrics.passed(size)

    def want(self, local: Segment) -> WantedUpload:
        """Queue a segment for upload to the regions that count and lack it."""
        wanted = self._wanted.get(local.seq_first)
        if wanted is None:
            wanted = WantedUpload(self._describe(local), local)
        with self._lock:
            self._wanted[local.seq_first] = wanted
            for number, region in enumerate(self.regions):
                trouble = wanted.troubles.get(number, region.uploads)
                waits = max(trouble.wait_s, region.uploads.wait_s) > 0 or number in wanted.under_way
                if (
                    region.counts
                    and region.archive is not None
                    and not waits
                    and not region.has(wanted.segment)
                ):
                    wanted.under_way.add(number)
                    self._jobs.append(_Job(number, wanted))
        return wanted

    def _describe(self, local: Segment) -> SegmentDescriptor:
        segment = describe_file(self._seams.files, local.path)
        here = (local.seq_first, local.seq_last, local.segment_hash)
        if (segment.first, segment.last, segment.hash) != here:
            raise Corrupt("this is another segment than the log has", path=local.path, seq=local.seq_first)
        return segment

    def first(self) -> WantedUpload | None:
        """The first segment that is not recorded."""
        with self._lock:
            return self._wanted[min(self._wanted)] if self._wanted else None

    def find(self, seq_first: int) -> WantedUpload | None:
        return self._wanted.get(seq_first)

    def forget(self, seq: int) -> None:
        """What ends at `seq` or below is recorded."""
        with self._lock:
            self._wanted = {first: each for first, each in self._wanted.items() if each.segment.last > seq}

    def troubles_of(self, number: int) -> list[Backoff]:
        with self._lock:
            return [each.troubles[number] for each in self._wanted.values() if number in each.troubles]

    def step(self) -> bool:
        """Upload one object that waits for it. False where there is none."""
        with self._lock:
            if not self._jobs:
                return False
            job = self._jobs.popleft()
        try:
            if self.regions[job.number].uploads.wait_s == 0:
                self._run(job)
        finally:
            with self._lock:
                job.wanted.under_way.discard(job.number)
        return True

    def _run(self, job: _Job) -> None:
        region, segment, path = self.regions[job.number], job.wanted.segment, job.wanted.local.path
        losses = region.losses
        try:
            self.upload(region, segment, path)
        except Stopping:
            raise
        except LowwaterError as error:
            self._failed(self._trouble_of(job) if is_alarm(error) else region.uploads, error)
        except OSError as error:
            failure = DiskFailed(f"the segment cannot be read: {error}", path=path)
            self._failed(self._trouble_of(job), failure)
        except Exception as error:  # noqa: BLE001 — a bug must be seen, and not end a thread in silence
            self._failed(self._trouble_of(job), InternalError(f"an upload: {error!r}", path=path))
        else:
            region.uploads.succeeded()
            region.note(segment, losses)

    def _trouble_of(self, job: _Job) -> Backoff:
        with self._lock:
            backoff = Backoff(self._seams.clock, self._seams.randomness)
            return job.wanted.troubles.setdefault(job.number, backoff)

    def upload(self, region: Region, segment: SegmentDescriptor, path: str) -> None:
        """Upload a segment that is here to a region."""
        began_s = self._seams.clock.monotonic()
        with self._lock:
            self.memory_bytes += self._part_bytes
        try:
            uploaded = upload_segment(
                region.store,
                self._seams.files,
                path,
                segment,
                part_bytes=self._part_bytes,
                passing=self.passing,
                known=region.known,
            )
        finally:
            with self._lock:
                self.memory_bytes -= self._part_bytes
        self._metrics.uploaded(made=uploaded.made)
        _logger.info(
            "uploaded" if uploaded.made else "was there already",
            object=at(region.store.uri, segment_name(segment)),
            path=path,
            seq_first=segment.first,
            seq_last=segment.last,
            bytes=uploaded.size,
            duration_s=round(self._seams.clock.monotonic() - began_s, 3),
        )
