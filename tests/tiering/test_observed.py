"""tiering/observed.py: what cannot be read is left out, said, and no reason to show nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import lowwater
from lowwater.engine.seams.real import RealClock, RealFiles
from lowwater.engine.testing.damage import flip
from lowwater.metrics import text
from lowwater.tiering.checking import open_to_read
from lowwater.tiering.observed import ObservedDirectory


class Clock(RealClock):
    """A clock that is put forward by hand."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return self.ahead_s

    def now_us(self) -> int:
        return super().now_us() + int(self.ahead_s * 1e6)


class Observer:
    """Everything is looked at again at each call."""

    def __init__(self, data: Path, archive: Path | None) -> None:
        self.clock = Clock()
        self.registry = CollectorRegistry()
        open_store = None
        if archive is not None:
            tier = lowwater.config.Config.load(None).tier
            open_store = lambda: open_to_read(archive.as_uri(), tier)  # noqa: E731
        self.observed = ObservedDirectory(
            str(data),
            f"{data}/wal",
            files=RealFiles(),
            clock=self.clock,
            interval_s=10,
            open_store=open_store,
        )
        self.registry.register(self.observed)

    def look(self, later_s: float = 10) -> dict[str, float]:
        self.clock.ahead_s += later_s
        if self.observed._open_store is not None:
            self.observed.step()
        return self.scrape()

    def scrape(self) -> dict[str, float]:
        return {
            sample.name + sample.labels.get("part", ""): sample.value
            for family in text_string_to_metric_families(text(self.registry))
            for sample in family.samples
        }


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A directory that has shipped all that it has, and its archive."""
    data, archive = tmp_path / "data", tmp_path / "archive"
    with lowwater.open(data, tier=archive.as_uri()) as db:
        db.create_bucket("b")
        db.put("b", "k", b"v" * 1000)
        db.ship()
    return data, archive


@pytest.fixture
def observer(places: tuple[Path, Path]) -> Iterator[Observer]:
    found = Observer(*places)
    yield found
    found.observed.close()


def test_the_lag_grows_while_the_archive_is_away(places: tuple[Path, Path], observer: Observer) -> None:
    """That is when somebody has to see it."""
    data, archive = places
    before = observer.look()
    assert before["storage_s3_shipping_lag_seconds"] == before["storage_s3_shipping_lag_bytes"] == 0
    archive.rename(archive.with_name("away"))
    with lowwater.open(data) as db:
        db.put("b", "k", b"w" * 1000)
    away = observer.look()
    assert away["lowwater_observedarchive"] == 0
    assert away["storage_s3_hwm"] == before["storage_s3_hwm"]
    assert away["storage_s3_shipping_lag_bytes"] > 1000
    later = observer.look(100)
    assert later["storage_s3_shipping_lag_seconds"] >= away["storage_s3_shipping_lag_seconds"] + 100
    archive.with_name("away").rename(archive)
    with lowwater.open(data, tier=archive.as_uri()) as db:
        db.ship()
    back = observer.look()
    assert back["lowwater_observedarchive"] == 1
    assert back["storage_s3_hwm"] > before["storage_s3_hwm"]
    assert back["storage_s3_shipping_lag_bytes"] == back["storage_s3_shipping_lag_seconds"] == 0


def test_the_archive_of_another_database_says_nothing_of_this_one(
    tmp_path: Path, places: tuple[Path, Path]
) -> None:
    """A wrong URI must not look like a good lag."""
    with lowwater.open(tmp_path / "other") as db:
        db.create_bucket("b")
    observer = Observer(tmp_path / "other", places[1])
    samples = observer.look()
    observer.observed.close()
    assert samples["lowwater_observedarchive"] == 0
    assert not any(name.startswith("storage_s3") for name in samples)


def _damage(path: Path) -> None:
    flip(path, 20)


@pytest.mark.parametrize(
    ("part", "spoil", "shown"),
    [
        ("log", lambda data: _damage(data / "wal" / "current.log"), "lowwater_pages_size_bytes"),
        (
            "pages",
            lambda data: (data / "pages").rename(data / "gone") and (data / "pages").write_text(""),
            "storage_current_seq",
        ),
        ("checkpoints", lambda data: (data / "packs").symlink_to(data / "packs"), "storage_current_seq"),
        (
            "cache",
            lambda data: (data / "cache").rename(data / "gone") and (data / "cache").write_text(""),
            "storage_current_seq",
        ),
    ],
)
def test_a_part_that_cannot_be_read_is_left_out(
    places: tuple[Path, Path], part: str, spoil: Callable[[Path], object], shown: str
) -> None:
    """And the others are there."""
    data, _ = places
    observer = Observer(data, None)
    assert observer.look()[f"lowwater_observed{part}"] == 1
    spoil(data)
    samples = observer.look()
    assert samples[f"lowwater_observed{part}"] == 0
    assert shown in samples
    assert "storage_hot_tier_size_bytes" not in samples


def test_files_are_looked_at_once_in_an_interval(places: tuple[Path, Path]) -> None:
    """However many scrape it: a look reads the segment that is being written."""
    data, _ = places
    observer = Observer(data, None)
    first = observer.look()
    with lowwater.open(data) as db:
        db.put("b", "k", b"w")
    assert observer.scrape() == first
    assert observer.look(9) == first
    assert observer.look(1)["storage_current_seq"] > first["storage_current_seq"]
