"""src/lowwater/metrics.py: what is counted is what Prometheus scrapes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from lowwater.metrics import LATENCY_BOUNDS_SECONDS, Histogram, LogMetrics, text

ROOT = Path(__file__).parent.parent
HISTOGRAMS = {
    "storage_wal_write_duration_seconds": "commit_duration",
    "lowwater_wal_append_latency_seconds": "append_latency",
    "lowwater_wal_fsync_duration_seconds": "commit_duration",
}
COUNTERS = {
    "lowwater_wal_bytes_written_total": "bytes_written",
    "lowwater_wal_frames_written_total": "frames_written",
    "lowwater_wal_rotations_total": "rotations",
}
GAUGES = {
    "storage_wal_segments_total": "segments",
    "storage_wal_size_bytes": "size_bytes",
    "storage_current_seq": "current_seq",
    "lowwater_wal_cache_bytes": "cache_bytes",
    "lowwater_wal_queue_bytes": "queue_bytes",
}


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    """The samples by name, as a scraper sees them; a bucket has its bound behind its name."""
    return {
        sample.name + sample.labels.get("le", ""): sample.value
        for family in text_string_to_metric_families(text(registry))
        for sample in family.samples
    }


def test_every_metric_is_there_before_anything_has_happened() -> None:
    """A rate over a series that begins with its first event misses that event."""
    registry = CollectorRegistry()
    LogMetrics(registry)
    samples = scraped(registry)
    assert {*COUNTERS, *GAUGES, *(f"{name}_count" for name in HISTOGRAMS)} <= set(samples)
    assert set(samples.values()) == {0}


@pytest.mark.parametrize(("name", "attribute"), COUNTERS.items())
def test_every_counter_moves(name: str, attribute: str) -> None:
    """A counter that is declared and never shown misleads."""
    registry = CollectorRegistry()
    metrics = LogMetrics(registry)
    setattr(metrics, attribute, getattr(metrics, attribute) + 3)
    assert scraped(registry)[name] == 3


@pytest.mark.parametrize(("name", "attribute"), HISTOGRAMS.items())
def test_every_histogram_moves(name: str, attribute: str) -> None:
    """Each shows its own observations and no other's."""
    registry = CollectorRegistry()
    metrics = LogMetrics(registry)
    getattr(metrics, attribute).observe(0.25)
    samples = scraped(registry)
    assert {other: samples[f"{other}_count"] for other in HISTOGRAMS} == {
        other: float(HISTOGRAMS[other] == attribute) for other in HISTOGRAMS
    }
    assert samples[f"{name}_sum"] == 0.25


@pytest.mark.parametrize(("name", "attribute"), GAUGES.items())
def test_every_gauge_is_read_at_each_scrape(name: str, attribute: str) -> None:
    """Nobody needs to remember to set a gauge."""
    registry = CollectorRegistry()
    values = dict.fromkeys(GAUGES.values(), 0)
    LogMetrics(registry).watch(**{key: lambda key=key: values[key] for key in values})
    values[attribute] = 7
    assert scraped(registry)[name] == 7
    values[attribute] = 5
    assert scraped(registry)[name] == 5


def test_a_group_commit_moves_what_it_touches() -> None:
    """The writer reports once for each batch, not once for each entry."""
    registry = CollectorRegistry()
    metrics = LogMetrics(registry)
    metrics.batches_written(2, 3, 400, 0.5)
    metrics.appends_durable([0.5, 0.75])
    samples = scraped(registry)
    assert samples["lowwater_wal_frames_written_total"] == 3
    assert samples["lowwater_wal_bytes_written_total"] == 400
    assert samples["storage_wal_write_duration_seconds_sum"] == 0.5
    assert samples["lowwater_wal_fsync_duration_seconds_sum"] == 0.5
    assert samples["lowwater_wal_append_latency_seconds_sum"] == 1.25
    assert samples["lowwater_wal_append_latency_seconds_count"] == 2


def test_a_histogram_counts_a_duration_in_each_bucket_that_reaches_it() -> None:
    """A bucket's bound belongs to it, as Prometheus has it; what is beyond all bounds is in +Inf alone."""
    registry = CollectorRegistry()
    metrics = LogMetrics(registry)
    for seconds in (0.0, 0.001, 0.0011, 60.0):
        metrics.commit_duration.observe(seconds)
    samples = scraped(registry)
    bucket = "lowwater_wal_fsync_duration_seconds_bucket"
    assert samples[f"{bucket}1e-05"] == 1
    assert samples[f"{bucket}0.001"] == 2
    assert samples[f"{bucket}0.0025"] == 3
    assert samples[f"{bucket}10.0"] == 3
    assert samples[f"{bucket}+Inf"] == 4


def test_the_bounds_rise() -> None:
    """The search for a bucket is a bisection."""
    assert sorted(set(LATENCY_BOUNDS_SECONDS)) == list(LATENCY_BOUNDS_SECONDS)
    assert len(Histogram().counts) == len(LATENCY_BOUNDS_SECONDS) + 1


def test_two_engines_in_one_process_count_apart() -> None:
    """One registry an engine."""
    first, second = CollectorRegistry(), CollectorRegistry()
    LogMetrics(first).rotations += 1
    LogMetrics(second)
    assert scraped(first)["lowwater_wal_rotations_total"] == 1
    assert scraped(second)["lowwater_wal_rotations_total"] == 0


def test_a_registry_takes_one_log() -> None:
    """The series of two would be one series with two values."""
    registry = CollectorRegistry()
    LogMetrics(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        LogMetrics(registry)


# ---------------------------------------------------------------------------- events


def events_in(source: str) -> Iterator[tuple[str, str, set[str]]]:
    """Logger, event and fields of what a module logs, by the calls in it."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    loggers = [
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "get_logger"
        and isinstance(call.args[0], ast.Constant)
    ]
    for call in calls:
        if loggers and call.args and re.fullmatch(r"_logger\.\w+|log|tell", ast.unparse(call.func)):
            for event in ast.walk(call.args[0]):
                if isinstance(event, ast.Constant) and isinstance(event.value, str):
                    fields = {str(each.arg) for each in call.keywords}
                    yield f"lowwater.{loggers[0]}", event.value, fields


def test_every_event_stands_in_the_documents_with_its_fields() -> None:
    """Who watches a log searches for what the page says."""
    page = (ROOT / "docs" / "operating" / "metrics.md").read_text()
    rows = [
        set(re.findall(r"`([^`]+)`", line)) for line in page.splitlines() if line.startswith("| `lowwater.")
    ]
    folders = ("engine", "tiering", "recovery", "spark", "src/lowwater")
    found = [
        (logger, event, fields)
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for logger, event, fields in events_in(path.read_text())
    ]
    assert len(found) > 40
    ours = {"duration_s"}
    missing = [
        (logger, event, sorted(fields))
        for logger, event, fields in found
        if not any({logger, event, *fields - ours} <= row for row in rows)
    ]
    assert missing == []
    written = {event for _, event, _ in found}
    assert [sorted(row) for row in rows if "lowwater.config" not in row and not row & written] == []
