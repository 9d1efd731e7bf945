"""Metrics: counted on the hot path with plain numbers, turned into Prometheus' form when somebody looks.

Always true:
  - one `CollectorRegistry` an engine, never the global one, so two engines in one process do not mix;
  - counters and histograms are written by one thread at a time (for the log, by whoever has the lead);
    a scrape may read them at any moment, and then lags by one observation at most;
  - this module knows nothing of the engine: what must be asked for, the engine gives as functions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# From a write into the page cache to a disk that has stalled.
LATENCY_BOUNDS_SECONDS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)

Gauge = Callable[[], float]


class Histogram:
    """Durations in seconds, by bucket. prometheus-client's own takes a lock and 2 µs an observation."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_SECONDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += 1
        self.sum += seconds

    def family(self, name: str, documentation: str) -> Metric:
        bounds = [*map(floatToGoString, LATENCY_BOUNDS_SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self.counts), strict=True))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self.sum)


def _nothing() -> float:
    return 0


class LogMetrics(Collector):
    """What one log measures. A registry takes one of these: the names would meet."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.append_latency = Histogram()
        self.commit_duration = Histogram()
        self.bytes_written = 0
        self.frames_written = 0
        self.rotations = 0
        self.watch(
            segments=_nothing,
            size_bytes=_nothing,
            current_seq=_nothing,
            cache_bytes=_nothing,
            queue_bytes=_nothing,
        )
        registry.register(self)

    def watch(
        self,
        *,
        segments: Gauge,
        size_bytes: Gauge,
        current_seq: Gauge,
        cache_bytes: Gauge,
        queue_bytes: Gauge,
    ) -> None:
        """Where to read the gauges, at each scrape."""
        self._segments = segments
        self._size_bytes = size_bytes
        self._current_seq = current_seq
        self._cache_bytes = cache_bytes
        self._queue_bytes = queue_bytes

    def batch_written(self, frames: int, size: int, seconds: float) -> None:
        """One group commit."""
        self.frames_written += frames
        self.bytes_written += size
        self.commit_duration.observe(seconds)

    def appends_durable(self, latencies_s: Sequence[float]) -> None:
        """The appends that one group commit made durable, and how long each had waited."""
        observe = self.append_latency.observe
        for latency_s in latencies_s:
            observe(latency_s)

    def collect(self) -> Iterator[Metric]:
        yield self.commit_duration.family(
            "storage_wal_write_duration_seconds", "One group commit: the write and the sync."
        )
        yield self.append_latency.family(
            "lowwater_wal_append_latency_seconds", "From an append to its entry being durable."
        )
        yield self.commit_duration.family(
            "lowwater_wal_fsync_duration_seconds", "The same: write and sync are one call."
        )
        for counter, documentation, total in (
            ("lowwater_wal_bytes_written", "Bytes of frames written.", self.bytes_written),
            ("lowwater_wal_frames_written", "Frames written.", self.frames_written),
            ("lowwater_wal_rotations", "Segments sealed.", self.rotations),
        ):
            yield CounterMetricFamily(counter, documentation, value=total)
        for gauge, documentation, read in (
            # Its name is the reference plan's. It falls when segments are purged, so it is no counter.
            ("storage_wal_segments_total", "Segments in the log directory.", self._segments),
            ("storage_wal_size_bytes", "Bytes of all segments.", self._size_bytes),
            ("storage_current_seq", "The last seq of the log.", self._current_seq),
            ("lowwater_wal_cache_bytes", "Bytes of the live tail kept in memory.", self._cache_bytes),
            ("lowwater_wal_queue_bytes", "Bytes that wait to be written.", self._queue_bytes),
        ):
            yield GaugeMetricFamily(gauge, documentation, value=read())

    # The registry compares names through this, and refuses a second log.
    describe = collect


def text(registry: CollectorRegistry) -> str:
    """All metrics of a registry, as Prometheus scrapes them."""
    return generate_latest(registry).decode()
