"""Every metric of cold reads moves, is documented, and says what happened."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry
from tests.test_metrics import scraped
from tests.tiering.archived import Archived, CountingStore, name_of, seqs_in, ship

from lowwater.engine.format.entries import Put
from lowwater.engine.log.log import Log, LogOptions
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.state.catalogue import Catalogue
from lowwater.metrics import COLD_COUNTERS, COLD_DURATIONS, COLD_GAUGES, ColdMetrics
from lowwater.tiering.block_cache import UNIT_BYTES, BlockCache

DOCUMENT = Path(__file__).parents[2] / "docs" / "operating" / "metrics.md"


def test_every_metric_moves_and_is_documented() -> None:
    """From a workload, not by hand: scans, points, a cache that is too small and damaged."""
    registry = CollectorRegistry()
    store, catalogue = CountingStore(), Catalogue()
    archived = Archived(store, catalogue)
    archived.metrics = ColdMetrics(registry)
    names = [*COLD_COUNTERS, *COLD_GAUGES, *(f"{name}_count" for name in COLD_DURATIONS)]
    assert [scraped(registry)[name] for name in names] == [0] * len(names)
    with Log.open(None, options=LogOptions(segment_bytes=2**20, compression="none", ring_bytes_max=0)) as log:
        for number in range(60):
            log.append(Put("b", f"k{number}", bytes(50_000)))
        log.seal()
        ship(log, store, catalogue)
    files = MemoryFiles()
    cold = archived.cold(cache=BlockCache(files, "cache", 6 * UNIT_BYTES))
    chunks = list(cold.chunks_after(0, catalogue.hwm))
    read = sum(chunk.end - chunk.start for chunk in chunks)
    assert seqs_in(iter(chunks))[-1] == catalogue.hwm
    samples = scraped(registry)
    assert samples["lowwater_cold_bytes_read_total"] == read
    assert samples["lowwater_cold_bytes_fetched_total"] == store.fetched_bytes
    assert samples["lowwater_cold_range_requests_total"] == len(store.requests)
    assert samples["lowwater_cold_query_duration_seconds_count"] >= len(chunks)
    assert samples["lowwater_cold_cache_evictions_total"] > 0
    assert samples["lowwater_cold_cache_misses_total"] > 0
    assert 0 < samples["lowwater_cold_cache_bytes"] <= 6 * UNIT_BYTES

    last = catalogue.segments[-1]
    archived.cold(cache=BlockCache(files, "cache", 6 * UNIT_BYTES)).segment(last).kinds()
    assert scraped(registry)["lowwater_cold_cache_hits_total"] > 0
    for inode in files._inodes.values():
        inode.data[-1] ^= 1
    archived.cold(cache=BlockCache(files, "cache", 6 * UNIT_BYTES)).segment(last).kinds()
    assert scraped(registry)["lowwater_cold_cache_damaged_total"] > 0
    archived.fetcher.read_whole(name_of(last), store.stat(name_of(last)).size)
    samples = scraped(registry)
    assert samples["lowwater_cold_full_reads_total"] == 1
    documented = DOCUMENT.read_text()
    for name in names:
        assert samples[name] > 0 or name.endswith("evictions_total"), name
        assert f"| `{name.removesuffix('_count')}` |" in documented
    for text in (*COLD_DURATIONS.values(), *COLD_COUNTERS.values(), *COLD_GAUGES.values()):
        assert f"| {text} |" in documented
