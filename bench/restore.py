"""Time to the first read, and to all of it, after a restore: `python -m bench.restore --help`."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if not __package__:
    # Started as `python bench/restore.py`: Python then searches bench/ itself, not the folder above.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lowwater
from bench import machine, run

KEYS = (10_000, 100_000, 1_000_000)
VALUE_BYTES = 100
BATCH = 10_000
# What the issue asks for: of the slowest first read against the fastest, in seconds, and of all of it.
FACTOR_MAX, FIRST_S_MAX, FULL_S_MAX = 2.0, 3.0, 60.0

Point = dict[str, Any]


def key(number: int) -> str:
    return f"key {number * 2_654_435_761 % 2**32:010}"


def prepare(directory: Path, uri: str, keys: int, tail: int) -> str:
    """An archive with a checkpoint of so many keys, and a tail above it. Returns the root of its content."""
    filler = bytes(VALUE_BYTES - 10)
    with lowwater.open(directory, tier=uri) as db:
        db.create_bucket("b")
        for start in range(0, keys, BATCH):
            numbers = range(start, min(start + BATCH, keys))
            db.put_many("b", [(key(number), b"%010d" % number + filler) for number in numbers])
        db.checkpoint()
        db.ship()
        db.put_many("b", [(key(number * keys // tail), b"%010d" % number + filler) for number in range(tail)])
        db.ship()
        return db.root()


class Archive:
    """One that was prepared, and what was measured with it."""

    def __init__(self, keys: int, tail: int, directory: Path) -> None:
        self._keys = keys
        self._directory = directory
        self._uri = f"file://{directory}/store"
        self._root = prepare(directory / "original", self._uri, keys, tail)
        shutil.rmtree(directory / "original")
        self.point: Point = {"keys": keys, "tail": tail, "restored": [], "first_read": [], "full": []}

    def measure(self) -> None:
        point, to = self.point, self._directory / "clone"
        # Whoever restores has a new process, without the objects that writing the archives has left.
        gc.collect()
        gc.freeze()
        os.sync()
        began_s = time.perf_counter()
        done = lowwater.restore(self._uri, to, clone=True)
        point["restored"].append(time.perf_counter() - began_s)
        with lowwater.open(to) as db:
            assert len(db.get("b", key(self._keys // 2 + 1)).value) == VALUE_BYTES
            point["first_read"].append(time.perf_counter() - began_s)
        point |= {"bytes": done.bytes, "requests": done.requests, "pages": done.pages_away}
        shutil.rmtree(to)
        os.sync()
        began_s = time.perf_counter()
        done = lowwater.restore(self._uri, to, clone=True, full=True)
        point["full"].append(time.perf_counter() - began_s)
        point["full_bytes"] = done.bytes
        if done.root != self._root:
            raise click.ClickException(f"the root of {self._keys:,} restored keys is another one")
        shutil.rmtree(to)


def print_points(console: Console, points: list[Point]) -> None:
    tail = f"{points[0]['tail']:,} entries above the checkpoint"
    title = f"Restore from a folder: {VALUE_BYTES} bytes a value, {tail}"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for heading in ("keys", "first read, s (min..max)", "MiB for that", "all of it, s (min..max)", "MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        table.add_row(
            f"{point['keys']:,}",
            _times(point["first_read"]),
            f"{point['bytes'] / 2**20:.1f}",
            _times(point["full"]),
            f"{point['full_bytes'] / 2**20:.1f}",
        )
    console.print(table)
    first = [median(point["first_read"]) for point in points]
    verdict = max(first) / min(first) <= FACTOR_MAX and max(first) < FIRST_S_MAX
    console.print(
        f"  first read: factor {max(first) / min(first):.2f} of at most {FACTOR_MAX:.0f}, "
        f"{max(first):.2f} s of at most {FIRST_S_MAX:.0f} s: {'holds' if verdict else 'DOES NOT HOLD'}"
    )
    full_s = max(median(point["full"]) for point in points)
    console.print(
        f"  all of it: {full_s:.1f} s of at most {FULL_S_MAX:.0f} s: "
        f"{'holds' if full_s < FULL_S_MAX else 'DOES NOT HOLD'}"
    )


def _times(seconds: list[float]) -> str:
    return f"{median(seconds):.2f} ({min(seconds):.2f}..{max(seconds):.2f})"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--keys",
    "counts",
    type=click.IntRange(1000),
    multiple=True,
    default=KEYS,
    show_default=True,
    help="Keys in the checkpoint. Repeatable.",
)
@click.option("--tail", type=click.IntRange(1), default=10_000, show_default=True, help="Entries above it.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True)
@run.output_options("restore", drawn="them")
def main(
    *, counts: tuple[int, ...], tail: int, rounds: int, directory: Path, json_path: Path, picture: Path | None
) -> None:
    """Measure how long it takes until a database that was restored from its archive alone answers a read, and
    until all of it is here and verified, by how much there is."""
    console = run.wide_console()
    run.check_outputs(json_path, picture)
    run.check_directory(directory, 3000 * sum(counts) + (1 << 30), console)
    described = machine.describe(directory)
    with tempfile.TemporaryDirectory(prefix="restore-", dir=directory.resolve()) as scratch:
        archives = [Archive(count, tail, Path(scratch) / str(count)) for count in sorted(counts)]
        for _ in range(rounds):
            for archive in archives:
                archive.measure()
    points = [archive.point for archive in archives]
    print_points(console, points)
    finished = {
        "benchmark": "restore",
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": described,
        "settings": {"rounds": rounds, "tail": tail, "value_bytes": VALUE_BYTES},
        "points": points,
    }
    json_path.write_text(json.dumps(finished, indent=1) + "\n")
    console.print(f"\nall figures in {json_path}", highlight=False)
    run.check_source(described)


if __name__ == "__main__":
    main()
