"""What a database counts where nothing else keeps a count."""

from __future__ import annotations

from lowwater.metrics import Histogram, engine_durations


class Measured:
    def __init__(self) -> None:
        self.durations = engine_durations()
        self.frames_redone = 0
        self.left_seqs = 0
        self.transactions_begun = 0
        self.transactions_committed = 0
        self.transactions_aborted = 0
        self.conflicts = 0

    @property
    def recovery_duration(self) -> Histogram:
        return self.durations["storage_recovery_duration_seconds"]

    @property
    def checkpoint_duration(self) -> Histogram:
        return self.durations["storage_checkpoint_creation_duration_seconds"]

    @property
    def flush_duration(self) -> Histogram:
        return self.durations["lowwater_flush_duration_seconds"]

    @property
    def flush_write_duration(self) -> Histogram:
        return self.durations["lowwater_flush_write_duration_seconds"]
