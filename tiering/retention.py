"""Retention: segments that are shipped leave the local disk, by age, by size, and where room is short.

Always true:
  - only what `Core.purgeable_seq` allows is removed, the oldest first; the newest complete segment and the
    one that is being written stay;
  - the limit of size counts everything, not only what may go: so it may not be reached;
  - where room is short, what can be fetched again goes first, and segments only where that was not enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowwater.engine.database.core import Core
from lowwater.engine.seams.seams import Task
from lowwater.errors import LowwaterError
from lowwater.logging import get_logger
from lowwater.metrics import TierMetrics

_logger = get_logger("retention")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionOptions:
    """None keeps what the other does not remove."""

    check_interval_s: float = 300.0
    age_max_s: float | None = 86_400.0
    bytes_max: int | None = 10 * 2**30


class Retention:
    def __init__(
        self, core: Core, options: RetentionOptions, metrics: TierMetrics, *, give_way: Callable[[], None]
    ) -> None:
        self._core = core
        self._options = options
        self._metrics = metrics
        self._task: Task | None = None
        self._give_way = give_way

    def start(self) -> None:
        self._task = self._core.seams.runner.start("tier-retention", self.step)

    def wake(self) -> None:
        if self._task is not None:
            self._task.wake()

    @property
    def may_purge(self) -> bool:
        """Whether there is anything that can go, now or once it is shipped."""
        return len(self._core.complete_segments()) > 1

    def stop(self) -> None:
        if self._task is not None:
            self._task.stop()

    def step(self) -> float | None:
        try:
            self.purge()
        except LowwaterError as error:
            _logger.warning("segments were not purged", path=self._core.directory, error=str(error))
        return self._options.check_interval_s

    def purge(self) -> int:
        """Remove what has to go. Returns the seq up to which entries are gone."""
        core = self._core
        seq = self._due_seq()
        before = core.complete_segments()
        if not seq or not before or before[0].seq_last > seq:
            return core.marks().purged
        began_s = core.seams.clock.monotonic()
        purged = core.purge(seq)
        gone = [each for each in before if each.seq_last <= purged]
        if gone:
            size = sum(each.body_bytes for each in gone)
            self._metrics.purged(len(gone), size)
            _logger.info(
                "purged",
                path=core.directory,
                segments=len(gone),
                seq_last=purged,
                bytes=size,
                duration_s=round(core.seams.clock.monotonic() - began_s, 3),
            )
        return purged

    def _due_seq(self) -> int:
        """Up to where segments are too old, or too many, or in the way."""
        core, options = self._core, self._options
        allowed_seq = core.purgeable_seq()
        if core.space.is_tight:
            self._give_way()
            if core.space.is_tight:
                return allowed_seq
        if not allowed_seq:
            return 0
        segments = core.complete_segments()
        seq = 0
        if options.age_max_s is not None:
            oldest_us = core.seams.clock.now_us() - int(options.age_max_s * 1_000_000)
            for segment in segments:
                if segment.time_last_us > oldest_us:
                    break
                seq = segment.seq_last
        if options.bytes_max is not None:
            size = core.opened_bytes + sum(each.body_bytes for each in segments)
            for segment in segments:
                if size <= options.bytes_max:
                    break
                size -= segment.body_bytes
                seq = max(seq, segment.seq_last)
        return min(seq, allowed_seq)
