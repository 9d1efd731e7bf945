"""Whole lives of an archive: no shipped write is lost, and every restore is what was written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tests.chaos.lives import ACTIONS, live

from lowwater.engine.database import core
from lowwater.engine.database.core import Core
from lowwater.errors import LowwaterError
from lowwater.recovery import point, restore
from lowwater.tiering import archive, shipper
from lowwater.tiering.archive import Archive
from lowwater.tiering.region import Region
from lowwater.tiering.shipper import Shipper
from lowwater.tiering.upload_queue import UploadQueue, WantedUpload

# More of them in `make chaos`.
SEEDS = int(os.environ.get("LIVES", "50"))
CHUNKS = 4
# So many make the same trace in each of four processes.
TRACED = int(os.environ.get("LIVES_TRACED", "4"))


def run(seeds: Iterable[int], actions: int = ACTIONS) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += live(seed, actions).seen
    return seen


def test_a_few_lives_lose_nothing() -> None:
    """The fast part of what comes next."""
    run(range(3), 50)


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_many_lives_lose_nothing(chunk: int) -> None:
    """Invariants after every action, promises at every restore; and all that can happen did."""
    seen = run(range(chunk, SEEDS, CHUNKS))
    for what in (
        "restores", "restores that crashed", "restores that failed", "clones", "crashes", "zombies",
        "zombies that were fenced", "fenced", "scrubs", "refused in an outage", "ship()", "left",
        "entries read from the store", "large values read from the store", "read below what is kept",
        "faults: write", "faults: read", "faults: list", "faults: stat", "checkpoint_shipped",
    ):  # fmt: skip
        assert seen[what] >= 2, f"{what} was hardly ever seen"


@pytest.mark.long
def test_one_seed_gives_one_trace_in_four_processes() -> None:
    """Whatever the order of sets and dictionaries: a failure that cannot be repeated helps nobody."""
    program = f"from tests.chaos.lives import digest\nprint(digest(range({TRACED}), {ACTIONS}))"
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for hash_seed in ("0", "1", "42", "random")
    ]
    digests = {process.communicate()[0].splitlines()[-1] for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert len(digests) == 1
    assert len(digests.pop()) == 64


# ---------------------------------------------------------------------------- a checker that never failed


def purge_what_does_not_count(patch: pytest.MonkeyPatch) -> None:
    """Only pages and transactions are looked at."""

    def purgeable_seq(self: Core) -> int:
        bounds = [self.marks().durable, self._flusher.flushed_redo_seq - 1]
        return max(0, min([*bounds, *(txn - 1 for txn in self._state.transactions.open)]))

    patch.setattr(core.Core, "purgeable_seq", purgeable_seq)


def purge_what_redo_needs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(core.Core, "purgeable_seq", lambda self: self.counted_hwm)


def do_not_read_manifests_back(patch: pytest.MonkeyPatch) -> None:
    """What the store says that it took is believed."""

    def publish(self: Archive, catalogue: Any, seq: int) -> Any:
        manifest = archive.manifest_of(catalogue, self.cluster_id, seq)
        for chunk_hash, data in catalogue.objects(manifest.heads, self._known()):
            self._write(archive.chunk_name(chunk_hash), data)
        self._write(manifest.name, manifest.encode())
        self._published = manifest.heads
        return manifest

    patch.setattr(Archive, "publish", publish)


def step_over_a_gap(patch: pytest.MonkeyPatch) -> None:
    """Where two segments wait, the second one is recorded, and the first one never."""

    def first(self: UploadQueue) -> WantedUpload | None:
        waiting = sorted(self._wanted)
        return self._wanted[waiting[min(1, len(waiting) - 1)]] if waiting else None

    def record(self: Shipper) -> bool:
        catalogue, wanted = self._core.catalogue, self._queue.first()
        if wanted is None or wanted.segment.last <= catalogue.hwm:
            return False
        if not all(region.has(wanted.segment) for region in self._regions):
            return False
        entry = shipper.segment_shipped_entry(catalogue.hwm, catalogue.hash_last, wanted.segment)
        self._core.propose_control(entry)
        self._queue.forget(wanted.segment.last)
        return catalogue.hwm >= wanted.segment.last

    patch.setattr(UploadQueue, "first", first)
    patch.setattr(Shipper, "_record", record)


def record_what_was_not_uploaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Region, "has", lambda *_: True)


def leave_out_the_last_segment(patch: pytest.MonkeyPatch) -> None:
    """Of a restore to the newest there is."""
    real = point.reach

    def reach(archive: Archive, at: Any = None) -> Any:
        reached = real(archive, at)
        if len(reached.all.segments) < 2:
            return reached
        return reached._replace(
            all=point.catalogue_as_of(reached.all, reached.all.segments[-1].recorded_seq - 1)
        )

    patch.setattr(restore, "reach", reach)


def do_not_look_for_rivals(patch: pytest.MonkeyPatch) -> None:
    """After a manifest was read back, it counts."""
    patch.setattr(Archive, "require_epoch", lambda *_: None)
    patch.setattr(Archive, "_require_ours", lambda *_: None)


@pytest.mark.long
@pytest.mark.parametrize(
    "mutant",
    [
        purge_what_does_not_count,
        purge_what_redo_needs,
        do_not_read_manifests_back,
        step_over_a_gap,
        record_what_was_not_uploaded,
        leave_out_the_last_segment,
        do_not_look_for_rivals,
    ],
)
def test_the_lives_themselves_find_what_is_done_wrong(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checker that has never failed proves nothing."""
    mutant(monkeypatch)
    with pytest.raises((AssertionError, LowwaterError, RuntimeError)):
        run(range(100))
