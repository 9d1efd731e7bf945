"""What a database measures besides its log: where the numbers come from, and how recovery is reported.

Always true:
  - reading a number takes no lock of the state, so a scrape holds nobody up;
  - what several threads count may miss a few where they count at the same moment; nothing depends on it;
  - a scrape while the database is closed raises nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lowwater.errors import LowwaterError
from lowwater.logging import get_logger
from lowwater.metrics import EngineMetrics, Gauge

if TYPE_CHECKING:
    from lowwater.engine.database.core import Core
    from lowwater.engine.database.redo import Progress

_logger = get_logger("engine")

# Of a recovery that takes long, a word from time to time.
TOLD_EVERY_S = 5.0


class Recovering:
    """One recovery as it goes on: for the metrics, the log of events, and whoever wants to know."""

    def __init__(self, core: Core, redo_seq: int, progress: Progress | None) -> None:
        self._core = core
        self._progress = progress
        self._seq_first = redo_seq
        self._seq_last = core._log.seq_durable
        self._began_s = self._told_s = core._now_s()
        core.measured.left_seqs = max(0, self._seq_last + 1 - redo_seq)

    def applied(self, frames: int, seq: int) -> None:
        """So many frames, up to this seq."""
        measured, seq_last = self._core.measured, self._seq_last
        measured.frames_redone += frames
        measured.left_seqs = seq_last - seq
        if self._progress is not None:
            self._progress(seq, seq_last)
        now_s = self._core._now_s()
        if now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            _logger.info(
                "recovering",
                path=self._core.directory,
                seq=seq,
                seq_last=seq_last,
                frames=measured.frames_redone,
                duration_s=round(now_s - self._began_s, 3),
            )

    def done(self) -> None:
        measured = self._core.measured
        measured.left_seqs = 0
        duration_s = self._core._now_s() - self._began_s
        measured.recovery_duration.observe(duration_s)
        if measured.frames_redone:
            _logger.info(
                "recovered",
                path=self._core.directory,
                seq_first=self._seq_first,
                seq_last=self._seq_last,
                frames=measured.frames_redone,
                pages_written=self._core._flusher.pages_written,
                duration_s=round(duration_s, 3),
            )


def watch(core: Core) -> EngineMetrics:
    """Put the metrics of a database, or of a fed engine, into its log's registry."""
    return EngineMetrics(core.registry, durations=core.measured.durations, readings=_readings(core))


def _readings(core: Core) -> dict[str, Gauge]:
    state, flusher, measured, store = core._state, core._flusher, core.measured, core._store
    used_bytes, size_bytes = _last_known(store.used_bytes), _last_known(store.size_bytes)
    checkpoints_bytes = _last_known(core.checkpoints_bytes)

    def lock_counts(name: str) -> Gauge:
        def read() -> float:
            locks = getattr(core, "_locks", None)  # a fed engine has none: its orchestrator orders
            return 0 if locks is None else float(getattr(locks.table, name))

        return read

    def hit_rate() -> float:
        reads = state.page_hits + state.page_misses
        return state.page_hits / reads if reads else 0.0

    def pool_bytes() -> float:
        return state.dirty_bytes + state.clean.bytes + state.ready_bytes

    return {
        "storage_orchestrator_lwm": lambda: core.marks().lwm,
        "storage_s3_hwm": lambda: core.marks().hwm,
        "storage_buffer_pool_size_bytes": pool_bytes,
        "storage_buffer_pool_hit_rate": hit_rate,
        "storage_buffer_pool_evictions_total": lambda: state.clean.evictions,
        "storage_hot_tier_size_bytes": lambda: (
            core._wal.store.bytes_total + size_bytes() + checkpoints_bytes() + core.cache_bytes
        ),
        "lowwater_pool_limit_bytes": lambda: state.pool_bytes_max,
        "lowwater_pool_dirty_bytes": lambda: state.dirty_bytes,
        "lowwater_pool_clean_bytes": lambda: state.clean.bytes,
        "lowwater_pool_objects_bytes": lambda: state.ready_bytes,
        "lowwater_pool_page_hits_total": lambda: state.page_hits,
        "lowwater_pool_page_misses_total": lambda: state.page_misses,
        "lowwater_pages_read_total": lambda: state.pages_read,
        "lowwater_pages_written_total": lambda: flusher.pages_written,
        "lowwater_pages_left_total": lambda: state.away.left,
        "lowwater_pages_brought_total": lambda: state.away.reads,
        "lowwater_pages_brought_bytes_total": lambda: state.away.read_bytes,
        "lowwater_pages_brought_failures_total": lambda: state.away.failures,
        "lowwater_pages_awaited": lambda: len(flusher.awaited),
        "lowwater_pages_deleted_total": lambda: flusher.pages_deleted,
        "lowwater_pages_used_bytes": used_bytes,
        "lowwater_pages_size_bytes": size_bytes,
        "lowwater_checkpoints_size_bytes": checkpoints_bytes,
        "lowwater_flush_groups_total": lambda: flusher.groups,
        "lowwater_redo_lag_seqs": lambda: max(0, state.applied + 1 - flusher.flushed_redo_seq),
        "lowwater_dirty_age_seconds": lambda: _dirty_age_s(core),
        "lowwater_recovery_frames_total": lambda: measured.frames_redone,
        "lowwater_recovery_left_seqs": lambda: measured.left_seqs,
        "lowwater_transactions_begun_total": lambda: measured.transactions_begun,
        "lowwater_transactions_committed_total": lambda: measured.transactions_committed,
        "lowwater_transactions_aborted_total": lambda: measured.transactions_aborted,
        "lowwater_transactions_conflicts_total": lambda: measured.conflicts,
        "lowwater_lock_waits_total": lock_counts("waits"),
        "lowwater_lock_timeouts_total": lock_counts("timeouts"),
        "lowwater_lock_deadlocks_total": lock_counts("deadlocks"),
    }


def _last_known(read: Callable[[], int]) -> Gauge:
    """What was read last, where it cannot be read any more."""
    known = 0

    def ask() -> float:
        nonlocal known
        try:
            known = read()
        except LowwaterError:
            pass
        return known

    return ask


def _dirty_age_s(core: Core) -> float:
    since_s = [each.dirty_since_s() for each in core._state.map.ranges]
    oldest_s = min((each for each in since_s if each is not None), default=None)
    return 0.0 if oldest_s is None else max(0.0, core._now_s() - oldest_s)
