"""Metrics: counted on the hot path with plain numbers, turned into Prometheus' form when somebody looks.

Always true:
  - one `CollectorRegistry` an engine, never the global one, so two engines in one process do not mix;
  - counters and histograms are written by one thread at a time (for the log, by whoever has the lead);
    a scrape may read them at any moment, and then lags by one observation at most;
  - this module knows nothing of the engine: what must be asked for, the engine gives as functions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from threading import Lock

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# From a write into the page cache to a disk that has stalled.
LATENCY_BOUNDS_SECONDS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)

# From a flush of a few pages to a recovery over hours of log.
DURATION_BOUNDS_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 25.0, 60.0, 150.0, 600.0, 3600.0),
)

Gauge = Callable[[], float]


class Histogram:
    """Durations in seconds, by bucket. prometheus-client's own takes a lock and 2 µs an observation."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.sum += seconds * times

    def family(self, name: str, documentation: str) -> Metric:
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self.counts), strict=True))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self.sum)


def _nothing() -> float:
    return 0


# Of a log: what is read at each scrape, and what it says.
LOG_GAUGES = {
    # Its name is the reference plan's. It falls when segments are purged, so it is no counter.
    "storage_wal_segments_total": "Segments in the log directory.",
    "storage_wal_size_bytes": "Bytes of all segments.",
    "storage_current_seq": "The last seq of the log.",
    "lowwater_wal_cache_bytes": "Bytes of the live tail kept in memory.",
    "lowwater_wal_queue_bytes": "Bytes that wait to be written.",
}


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
        """Set where the gauges are read, at each scrape."""
        self._segments = segments
        self._size_bytes = size_bytes
        self._current_seq = current_seq
        self._cache_bytes = cache_bytes
        self._queue_bytes = queue_bytes

    def batches_written(self, count: int, frames: int, size: int, seconds: float) -> None:
        """Count group commits that went to the disk in one call."""
        self.frames_written += frames
        self.bytes_written += size
        self.commit_duration.observe(seconds / count, count)

    def appends_durable(self, latencies_s: Sequence[float]) -> None:
        """Count the appends that one group commit made durable, by how long each had waited."""
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
        readings = (
            self._segments, self._size_bytes, self._current_seq, self._cache_bytes, self._queue_bytes,
        )  # fmt: skip
        for (gauge, documentation), read in zip(LOG_GAUGES.items(), readings, strict=True):
            yield GaugeMetricFamily(gauge, documentation, value=read())

    # The registry compares names through this, and refuses a second log.
    describe = collect


# Of a database or a fed engine: what each is called and what it says.
ENGINE_DURATIONS = {
    "storage_recovery_duration_seconds": "Opening: from the first frame that was applied again to the last.",
    "storage_checkpoint_creation_duration_seconds": "Making a checkpoint: from its turn until it is durable.",
    "lowwater_flush_duration_seconds": "One group of ranges: merging, encoding and writing their pages.",
    "lowwater_flush_write_duration_seconds": "Of that, the page store's transaction and its sync.",
}
ENGINE_COUNTERS = {
    "storage_buffer_pool_evictions_total": "Clean pages that made room for others.",
    "lowwater_pool_page_hits_total": "Reads of a page that was in memory.",
    "lowwater_pool_page_misses_total": "Reads of a page that had to be fetched and decoded.",
    "lowwater_pages_read_total": "Pages fetched from the page store, by flushes too.",
    "lowwater_pages_written_total": "Pages written to the page store.",
    "lowwater_pages_deleted_total": "Pages that were joined with the one before.",
    "lowwater_pages_left_total": "Pages that left for a reference to a block in the archive.",
    "lowwater_pages_brought_total": "Pages that were read from the archive, where they had left to.",
    "lowwater_pages_brought_bytes_total": "What was read for that.",
    "lowwater_pages_brought_failures_total": "Such reads that failed.",
    "lowwater_flush_groups_total": "Transactions of the page store.",
    "lowwater_recovery_frames_total": "Frames that opening applied again.",
    "lowwater_transactions_begun_total": "Transactions begun; of a fed engine, by an entry.",
    "lowwater_transactions_committed_total": "Transactions that took effect, or had nothing to write.",
    "lowwater_transactions_aborted_total": "Transactions that ended without effect.",
    "lowwater_transactions_conflicts_total": "Times that somebody else had written first.",
    "lowwater_lock_waits_total": "Requests for a lock that had to wait.",
    "lowwater_lock_timeouts_total": "Requests for a lock that waited in vain.",
    "lowwater_lock_deadlocks_total": "Circles of waiting transactions, of which one each was refused.",
}
ENGINE_GAUGES = {
    "storage_orchestrator_lwm": "The lowest durable seq of all voting members, as far as it counts here.",
    "storage_s3_hwm": "Up to here all entries are in the object store; without one, the last purged.",
    "storage_buffer_pool_size_bytes": "Memory of the pool: changes, clean pages and ready objects.",
    "storage_buffer_pool_hit_rate": "Of the reads of a page so far, the share that found it in memory.",
    "storage_hot_tier_size_bytes": "What log, pages, checkpoints and the cache take of the local disk.",
    "lowwater_pool_limit_bytes": "What the pool may take.",
    "lowwater_pool_dirty_bytes": "Changes that are in no page yet.",
    "lowwater_pool_clean_bytes": "Clean pages.",
    "lowwater_pool_objects_bytes": "Ready objects.",
    "lowwater_pages_used_bytes": "What of the page store is in use.",
    "lowwater_pages_size_bytes": "What the page store takes of the disk.",
    "lowwater_checkpoints_size_bytes": "What checkpoints and their packs take of the disk.",
    "lowwater_pages_awaited": "Pages in the archive that changes in memory wait for.",
    "lowwater_redo_lag_seqs": "How many seqs opening would have to apply again after a crash.",
    "lowwater_dirty_age_seconds": "How long the oldest change that is in no page has been in memory.",
    "lowwater_recovery_left_seqs": "While opening: how many seqs are left to be applied again.",
}


def engine_durations() -> dict[str, Histogram]:
    return {name: Histogram(DURATION_BOUNDS_SECONDS) for name in ENGINE_DURATIONS}


class EngineMetrics(Collector):
    """What a database or a fed engine measures besides its log. A registry takes one of these."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        durations: Mapping[str, Histogram],
        readings: Mapping[str, Gauge],
    ) -> None:
        assert durations.keys() == ENGINE_DURATIONS.keys()
        assert readings.keys() == ENGINE_COUNTERS.keys() | ENGINE_GAUGES.keys()
        self._durations = durations
        self._readings = readings
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        for name, documentation in ENGINE_DURATIONS.items():
            yield self._durations[name].family(name, documentation)
        for name, documentation in ENGINE_COUNTERS.items():
            counted = self._readings[name]()
            yield CounterMetricFamily(name.removesuffix("_total"), documentation, value=counted)
        for name, documentation in ENGINE_GAUGES.items():
            yield GaugeMetricFamily(name, documentation, value=self._readings[name]())

    # The registry compares names through this, and refuses a second engine.
    describe = collect


# Of what reads from the object store: what each is called and what it says.
COLD_DURATIONS = {
    "lowwater_cold_query_duration_seconds": "What a reader waited for what is only in the object store.",
}
COLD_COUNTERS = {
    "lowwater_cold_bytes_read_total": "Bytes of entries, values and versions given to readers.",
    "lowwater_cold_bytes_fetched_total": "Bytes fetched from the object store for that.",
    "lowwater_cold_range_requests_total": "Requests for parts of objects.",
    "lowwater_cold_full_reads_total": "Requests for whole objects.",
    "lowwater_cold_cache_hits_total": "Units of 256 KiB that the cache on disk had.",
    "lowwater_cold_cache_misses_total": "Units that it did not have.",
    "lowwater_cold_cache_evictions_total": "Units that made room for others.",
    "lowwater_cold_cache_damaged_total": "Units that were damaged on disk, and were fetched again.",
}
COLD_GAUGES = {
    "lowwater_cold_cache_bytes": "What the cache takes of the disk.",
}


class ColdMetrics(Collector):
    """What reading from the object store measures. Many threads read: the counting is done under a lock."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._lock = Lock()
        self._duration = Histogram()
        self._counts = dict.fromkeys(COLD_COUNTERS, 0)
        self.watch(cache_bytes=_nothing, cache_evictions=_nothing, cache_damaged=_nothing)
        if registry is not None:
            registry.register(self)

    def watch(self, *, cache_bytes: Gauge, cache_evictions: Gauge, cache_damaged: Gauge) -> None:
        """Set where what the cache counts is read, at each scrape."""
        self._readings = {
            "lowwater_cold_cache_bytes": cache_bytes,
            "lowwater_cold_cache_evictions_total": cache_evictions,
            "lowwater_cold_cache_damaged_total": cache_damaged,
        }

    def queried(self, seconds: float) -> None:
        with self._lock:
            self._duration.observe(seconds)

    def used(self, size: int) -> None:
        with self._lock:
            self._counts["lowwater_cold_bytes_read_total"] += size

    def fetched(self, size: int, *, is_range: bool) -> None:
        name = "lowwater_cold_range_requests_total" if is_range else "lowwater_cold_full_reads_total"
        with self._lock:
            self._counts["lowwater_cold_bytes_fetched_total"] += size
            self._counts[name] += 1

    def looked_up(self, *, hits: int, misses: int) -> None:
        """Count what was found in the cache on disk, and what was not."""
        with self._lock:
            self._counts["lowwater_cold_cache_hits_total"] += hits
            self._counts["lowwater_cold_cache_misses_total"] += misses

    def collect(self) -> Iterator[Metric]:
        for name, documentation in COLD_DURATIONS.items():
            yield self._duration.family(name, documentation)
        for name, documentation in COLD_COUNTERS.items():
            counted = self._readings[name]() if name in self._readings else self._counts[name]
            yield CounterMetricFamily(name.removesuffix("_total"), documentation, value=counted)
        for name, documentation in COLD_GAUGES.items():
            yield GaugeMetricFamily(name, documentation, value=self._readings[name]())

    # The registry compares names through this, and refuses a second one.
    describe = collect


# Of what ships to the object store, and purges: what each is called and what it says.
TIER_DURATIONS = {
    "lowwater_uploader_cycle_duration_seconds": "One look at what there is to ship, and what it led to.",
    "lowwater_metadata_put_latency_seconds": "Publishing a manifest, and reading it back.",
}
TIER_COUNTERS = {
    "storage_s3_shipped_segments_total": "Segments that this process has brought into the store.",
    "storage_s3_shipping_errors_total": "Attempts that failed, for whatever reason.",
    "lowwater_uploader_errors_total": "The same.",
    "lowwater_uploader_bytes_uploaded_total": "Bytes of segments given to the store, in all regions.",
    "lowwater_uploader_objects_created_total": "Objects of segments that were not there before.",
    "lowwater_metadata_descriptor_writes_total": "Manifests published.",
    "lowwater_retention_purged_segments_total": "Segments removed from the local disk.",
    "lowwater_retention_purged_bytes_total": "Their bytes.",
}
TIER_GAUGES = {
    "storage_s3_shipping_lag_bytes": "Bytes of log that are not in the store and recorded yet.",
    "storage_s3_shipping_lag_seconds": "How old the oldest entry of them is; 0 where there is none.",
    "lowwater_uploader_memory_bytes": "What uploads hold for the store now.",
    "lowwater_shipping_alarm": "1 where something has to be repaired before shipping goes on.",
    "lowwater_shipping_failures": "Attempts that failed since the last one that did not.",
    "lowwater_disk_left_bytes": "What may be written before writes are refused.",
}
# Sizes of parts.
CHUNK_BOUNDS_BYTES = tuple(float(2**power) for power in range(12, 31, 2))


class TierMetrics(Collector):
    """What shipping measures. Several threads upload: the counting is done under a lock."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._lock = Lock()
        self._durations = {name: Histogram(DURATION_BOUNDS_SECONDS) for name in TIER_DURATIONS}
        self._chunks = Histogram(CHUNK_BOUNDS_BYTES)
        self._counts = dict.fromkeys(TIER_COUNTERS, 0)
        self._readings: dict[str, Gauge] = dict.fromkeys(TIER_GAUGES, _nothing)
        if registry is not None:
            registry.register(self)

    def watch(self, readings: Mapping[str, Gauge]) -> None:
        """Set where the gauges are read, at each scrape."""
        assert readings.keys() == TIER_GAUGES.keys()
        self._readings = dict(readings)

    def cycled(self, seconds: float) -> None:
        with self._lock:
            self._durations["lowwater_uploader_cycle_duration_seconds"].observe(seconds)

    def published(self, seconds: float) -> None:
        """Count a manifest that was published, and how long that took."""
        with self._lock:
            self._durations["lowwater_metadata_put_latency_seconds"].observe(seconds)
            self._counts["lowwater_metadata_descriptor_writes_total"] += 1

    def passed(self, size: int) -> None:
        """Count a part that was uploaded, and its size."""
        with self._lock:
            self._chunks.observe(size)
            self._counts["lowwater_uploader_bytes_uploaded_total"] += size

    def uploaded(self, *, made: bool) -> None:
        with self._lock:
            self._counts["storage_s3_shipped_segments_total"] += 1
            self._counts["lowwater_uploader_objects_created_total"] += made

    def failed(self) -> None:
        with self._lock:
            self._counts["storage_s3_shipping_errors_total"] += 1
            self._counts["lowwater_uploader_errors_total"] += 1

    def purged(self, segments: int, size: int) -> None:
        with self._lock:
            self._counts["lowwater_retention_purged_segments_total"] += segments
            self._counts["lowwater_retention_purged_bytes_total"] += size

    def collect(self) -> Iterator[Metric]:
        for name, documentation in TIER_DURATIONS.items():
            yield self._durations[name].family(name, documentation)
        yield self._chunks.family(
            "lowwater_uploader_chunk_bytes", "Sizes of the pieces that were given to the store."
        )
        for name, documentation in TIER_COUNTERS.items():
            yield CounterMetricFamily(name.removesuffix("_total"), documentation, value=self._counts[name])
        for name, documentation in TIER_GAUGES.items():
            yield GaugeMetricFamily(name, documentation, value=self._readings[name]())

    # The registry compares names through this, and refuses a second one.
    describe = collect


# Of calls to object stores, whoever makes them: what each is called and what it says.
STORE_DURATIONS = {
    "lowwater_store_request_duration_seconds": "A call to an object store, with all that is repeated of it.",
}
STORE_COUNTERS = {
    "lowwater_store_failures_total": "Calls that failed in the end. An object that is missing is no failure.",
    "lowwater_store_repeated_total": "Requests made again because the store did not answer, or was busy.",
    "lowwater_store_bytes_read_total": "Bytes that stores have given.",
    "lowwater_store_bytes_written_total": "Bytes that were given to stores.",
}


class StoreMetrics(Collector):
    """What calls to the stores of a database measure. Many threads call: counting is done under a lock."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._lock = Lock()
        self._duration = Histogram(DURATION_BOUNDS_SECONDS)
        self._counts = dict.fromkeys(STORE_COUNTERS, 0)
        self._repeated: list[Gauge] = []
        if registry is not None:
            registry.register(self)

    def watch(self, repeated: Gauge) -> None:
        """Add where a store says how many requests it has repeated."""
        self._repeated.append(repeated)

    def called(self, seconds: float, *, failed: bool) -> None:
        with self._lock:
            self._duration.observe(seconds)
            self._counts["lowwater_store_failures_total"] += failed

    def passed(self, *, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self._counts["lowwater_store_bytes_read_total"] += read
            self._counts["lowwater_store_bytes_written_total"] += written

    def collect(self) -> Iterator[Metric]:
        for name, documentation in STORE_DURATIONS.items():
            yield self._duration.family(name, documentation)
        counts = self._counts | {"lowwater_store_repeated_total": sum(each() for each in self._repeated)}
        for name, documentation in STORE_COUNTERS.items():
            yield CounterMetricFamily(name.removesuffix("_total"), documentation, value=counts[name])

    # The registry compares names through this, and refuses a second one.
    describe = collect


def text(registry: CollectorRegistry) -> str:
    """Return all metrics of a registry, as Prometheus scrapes them."""
    return generate_latest(registry).decode()
