"""What Prometheus can know of a directory that another process may have open: sizes, seqs, and how far its
archive is behind.

Always true:
  - nothing is opened, locked or changed: files are looked at, and the archive is read;
  - a name says what it says of an open database; what could not be read is left out, and
    `lowwater_observed` says so;
  - a scrape waits for no store: the archive is asked in the background. While it does not answer, the lag is
    that to the mark that was seen last, and goes on growing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lowwater.engine.checkpoint.checkpoints import Checkpoints
from lowwater.engine.database.opening import PAGES_DIRECTORY
from lowwater.engine.log.describe import LogDescription, describe_log
from lowwater.engine.log.directory import typed_errors
from lowwater.engine.seams.seams import Clock, Files
from lowwater.engine.seams.swap import DATA
from lowwater.errors import Corrupt, LowwaterError, OtherCluster
from lowwater.logging import get_logger
from lowwater.metrics import COLD_GAUGES, ENGINE_GAUGES, LOG_GAUGES, TIER_GAUGES
from lowwater.tiering.archive import open_archive
from lowwater.tiering.store import Store
from lowwater.tiering.tiered_opening import CACHE_DIRECTORY

_logger = get_logger("observed")

# The metric, and what it says.
OBSERVED = ("lowwater_observed", "1 where the part could be read at the last look, 0 where not.")
# A segment that is begun while it is looked at seems damaged. What is so each time is.
LOOKS_MAX = 3
# What is shown of a directory, of those of an open database.
GAUGES = (
    "storage_current_seq",
    "storage_wal_segments_total",
    "storage_wal_size_bytes",
    "lowwater_pages_size_bytes",
    "lowwater_checkpoints_size_bytes",
    "lowwater_cold_cache_bytes",
    "storage_hot_tier_size_bytes",
    "storage_s3_hwm",
    "storage_s3_shipping_lag_bytes",
    "storage_s3_shipping_lag_seconds",
)
_DOCUMENTATION = LOG_GAUGES | ENGINE_GAUGES | COLD_GAUGES | TIER_GAUGES


class ObservedDirectory(Collector):
    """Give it to a registry. `step` asks the archive, where there is one."""

    def __init__(
        self,
        path: str,
        log_directory: str,
        *,
        files: Files,
        clock: Clock,
        interval_s: float,
        open_store: Callable[[], Store] | None = None,
    ) -> None:
        """It looks once in `interval_s` at most, however often somebody asks."""
        self._path = path
        self._log_directory = log_directory
        self._files = files
        self._clock = clock
        self._interval_s = interval_s
        self._open_store = open_store
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._looked_at_s: float | None = None
        self._log: LogDescription | None = None
        self._sizes: dict[str, int] = {}
        # By part; what is missing there was not looked at yet.
        self._errors: dict[str, LowwaterError | None] = {}
        self._checkpoints = Checkpoints(files, path)
        # That was seen last.
        self._hwm: int | None = None

    def describe(self) -> Iterator[Metric]:
        """Nothing: who registers it does not have it look."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            self._look()
            values = {**self._sizes, **self._of_log(), **self._of_archive()}
            errors = dict(self._errors)
        for name in GAUGES:
            if name in values:
                yield GaugeMetricFamily(name, _DOCUMENTATION[name], value=values[name])
        observed = GaugeMetricFamily(*OBSERVED, labels=["part"])
        for part, error in errors.items():
            observed.add_metric([part], error is None)
        yield observed

    # ------------------------------------------------------------------ the directory

    def _look(self) -> None:
        """With the lock: look at the files, unless that was a moment ago."""
        now_s = self._clock.monotonic()
        if self._looked_at_s is not None and now_s - self._looked_at_s < self._interval_s:
            return
        self._looked_at_s = now_s
        self._log = None
        self._sizes = {}
        self._try("log", self._look_at_log)
        self._try("pages", self._look_at_pages)
        self._try("checkpoints", self._look_at_checkpoints)
        self._try("cache", self._look_at_cache)
        parts = ("lowwater_pages_size_bytes", "lowwater_checkpoints_size_bytes", "lowwater_cold_cache_bytes")
        if self._log is not None and all(part in self._sizes for part in parts):
            sizes = (self._sizes[part] for part in parts)
            self._sizes["storage_hot_tier_size_bytes"] = self._log.body_bytes + sum(sizes)

    def _try(self, part: str, look: Callable[[], None]) -> None:
        error: LowwaterError | None = None
        try:
            look()
        except LowwaterError as failure:
            error = failure
        before = self._errors.get(part)
        if error is not None and str(error) != str(before):
            _logger.warning("a part cannot be read", part=part, error=str(error), hint=error.hint)
        elif error is None and before is not None:
            _logger.warning("a part can be read again", part=part)
        self._errors[part] = error

    def _look_at_log(self) -> None:
        for _ in range(LOOKS_MAX):
            found = describe_log(self._files, self._log_directory)
            errors = [each for each in found.findings if each.severity == "error"]
            if not errors:
                self._log = found
                return
        wrong = errors[0]
        raise Corrupt(wrong.what, path=wrong.where, seq=wrong.seq, hint=wrong.hint)

    def _look_at_pages(self) -> None:
        directory = f"{self._path}/{PAGES_DIRECTORY}"
        with typed_errors(directory, "measure the pages"):
            try:
                self._sizes["lowwater_pages_size_bytes"] = os.path.getsize(f"{directory}/{DATA}")
            except FileNotFoundError:
                self._sizes["lowwater_pages_size_bytes"] = 0  # nothing was opened there yet

    def _look_at_checkpoints(self) -> None:
        self._sizes["lowwater_checkpoints_size_bytes"] = self._checkpoints.size_bytes()

    def _look_at_cache(self) -> None:
        directory = f"{self._path}/{CACHE_DIRECTORY}"
        size = 0
        with typed_errors(directory, "measure the cache"):
            try:
                entries = list(os.scandir(directory))
            except FileNotFoundError:
                entries = []  # nothing was read from an archive
            for entry in entries:
                try:
                    size += entry.stat().st_size
                except FileNotFoundError:
                    pass  # it has just made room for another
        self._sizes["lowwater_cold_cache_bytes"] = size

    def _of_log(self) -> dict[str, float]:
        log = self._log
        if log is None:
            return {}
        return {
            "storage_current_seq": log.seq_last or 0,
            "storage_wal_segments_total": len(log.segments),
            "storage_wal_size_bytes": log.body_bytes,
        }

    # ------------------------------------------------------------------ the archive

    def _of_archive(self) -> dict[str, float]:
        if self._hwm is None:
            return {}
        values: dict[str, float] = {"storage_s3_hwm": self._hwm}
        if self._log is not None:
            behind = [
                each for each in self._log.segments if (each.seq_last or 0) > self._hwm and each.has_news
            ]
            since_us = next((each.time_first_us for each in behind if each.time_first_us is not None), None)
            age_s = 0.0 if since_us is None else max(0.0, (self._clock.now_us() - since_us) / 1e6)
            values["storage_s3_shipping_lag_bytes"] = sum(each.body_bytes or 0 for each in behind)
            values["storage_s3_shipping_lag_seconds"] = age_s
        return values

    def step(self) -> float:
        """A `Step`: ask the archive."""
        with self._lock:
            self._look()
        self._try("archive", self._look_at_archive)
        return self._interval_s

    def _look_at_archive(self) -> None:
        assert self._open_store is not None
        if self._store is None:
            self._store = self._open_store()
        archive = open_archive(self._store)
        log = self._log
        if log is not None and log.cluster_id not in (None, archive.cluster_id):
            raise OtherCluster(
                f"the archive is of the cluster {archive.cluster_id.hex()}, and the log of another one",
                path=self._store.uri,
            )
        newest = archive.newest()
        with self._lock:
            self._hwm = 0 if newest is None else newest.hwm

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
