"""The log against a raw write loop, RocksDB, LMDB, SQLite and SlateDB: `python -m bench.log --help`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

if not __package__:
    # Started as `python bench/log.py`: Python then searches bench/ itself, not the folder above.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import report, run
from bench.child import LOG


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    help="How often each is measured.  [default: 5; quick: 1]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.05, 600),
    help="How long each measurement takes.  [default: 3; quick: 0.3]",
)
@click.option("--quick", is_flag=True, help="A smoke run in less than a minute. Its figures mean little.")
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Only this workload (batches, single, read, open) or contender (ours, raw, rocksdb, lmdb, sqlite, "
    "slatedb, or one variant such as ours-pipelined), and the baselines of its ratios. Repeatable.",
)
@run.output_options("log")
def main(
    *,
    rounds: int | None,
    seconds: float | None,
    quick: bool,
    only: tuple[str, ...],
    directory: Path,
    json_path: Path,
    picture: Path | None,
) -> None:
    """Measure the log against a raw write + fdatasync loop and against its peers.

    Prints tables of medians and of ratios within a round, and writes all figures as JSON. A full run takes
    about fifteen minutes; leave the machine alone meanwhile."""
    if not hasattr(os, "fdatasync"):
        raise click.ClickException("this system has no fdatasync, which the raw loop needs: run it on Linux")
    rounds = rounds or (1 if quick else 5)
    settings: dict[str, Any] = {
        "rounds": rounds,
        "quick": quick,
        "seconds": seconds or (0.3 if quick else 3.0),
        "warmup_seconds": 0.1 if quick else 0.5,
        "distinct_batches": 200 if quick else 2000,
        "read_entries": 300_000 if quick else 1_000_000,
        "open_bytes": (64 << 20) if quick else (1 << 30),
    }
    run.run(
        report.LOG,
        run.choose(report.LOG, LOG, only),
        settings,
        directory=directory,
        needed_bytes=6 * settings["open_bytes"] + (2 << 30),
        json_path=json_path,
        picture=picture,
    )


if __name__ == "__main__":
    main()
