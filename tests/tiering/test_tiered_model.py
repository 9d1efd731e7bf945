"""The engine's model holds while it ships: pages leave and come back, and segments are purged, at random."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from tests.engine.engine_model import small_limits
from tests.shares import shares
from tests.tiering.tiered_model import run_by_chance

# `TIERED_STEPS=160000 pytest tests/tiering/test_tiered_model.py` goes on for some minutes.
STEPS = int(os.environ.get("TIERED_STEPS", "20000"))
STEPS_EACH = 1000
CHUNKS = 4


@pytest.fixture(autouse=True)
def _small_limits() -> Iterator[None]:
    with small_limits():
        yield


def run_all(seeds: Iterable[int], steps: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            driver = run_by_chance(seed, steps)
        except BaseException as error:
            error.add_note(f"to repeat: tests.tiering.tiered_model.run_by_chance({seed}, {steps})")
            raise
        driver.close()
        seen += driver.seen + Counter(crashes=driver.crashes)
    return seen


def test_a_database_that_ships_answers_as_its_model_does() -> None:
    """The fast part of what comes next."""
    run_all(range(3), 200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", shares(CHUNKS))
def test_calls_by_chance_are_answered_as_without_a_store(chunk: int) -> None:
    """Everything that an engine's model knows, unchanged; the root is looked at whenever something leaves."""
    seen = run_all(range(1000 + chunk, 1000 + max(CHUNKS, STEPS // STEPS_EACH), CHUNKS), STEPS_EACH)
    for what in (
        "written", "found", "scans", "pages", "crashes", "NotFound", "VersionGone", "repeated", "ended",
        "spilled", "left", "came back", "refused in an outage", "segment_shipped", "checkpoint_shipped",
        "fork", "ship()", "entries read from the store", "large values read from the store",
        "read below what is kept",
    ):  # fmt: skip
        assert seen[what] > 4, f"{what} was hardly ever seen"
    assert seen["purged, at most"] > STEPS // CHUNKS // 4, "hardly anything was ever purged"
