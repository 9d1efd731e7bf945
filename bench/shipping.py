"""Shipping against a raw upload, and what it costs its writers: `python -m bench.shipping --help`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

if not __package__:
    # Started as `python bench/shipping.py`: Python then searches bench/ itself, not the folder above.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import report, run
from bench.claims_jobs import CLAIMS
from bench.shipping_jobs import CONTENDERS


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    help="How often each is measured.  [default: 3; quick: 1]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.5, 600),
    help="How long writers write.  [default: 10; quick: 2]",
)
@click.option("--mib", type=click.IntRange(16, 1024), help="How much is shipped.  [default: 1024; quick: 64]")
@click.option("--quick", is_flag=True, help="A smoke run in about a minute. Its figures mean little.")
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Only this workload (ship, writers, shipmemory, coldrange, coldpoint, cycle, newreader, "
    "follow) or contender, and the baselines of its ratios. Repeatable.",
)
@run.output_options("shipping")
def main(
    *,
    rounds: int | None,
    seconds: float | None,
    mib: int | None,
    quick: bool,
    only: tuple[str, ...],
    directory: Path,
    json_path: Path,
    picture: Path | None,
) -> None:
    """Measure shipping to a real S3 server on this machine against a raw upload of the same bytes, the
    memory that it takes, writers beside it, what reading back fetches, how long a cycle of 10 MB and the
    first entry of a reader take, and how often one that follows finds the log in memory.

    Prints tables of medians and of ratios within a round, and writes all figures as JSON. A full run takes
    about ten minutes; leave the machine alone meanwhile."""
    rounds = rounds or (1 if quick else 3)
    settings: dict[str, Any] = {
        "rounds": rounds,
        "quick": quick,
        "seconds": seconds or (2.0 if quick else 10.0),
        "warmup_seconds": 0.5 if quick else 2.0,
        "ship_bytes": (mib or (64 if quick else 1024)) << 20,
    }
    run.run(
        report.SHIPPING,
        run.choose(report.SHIPPING, CONTENDERS | CLAIMS, only),
        settings,
        directory=directory,
        needed_bytes=6 * settings["ship_bytes"] + (4 << 30),
        json_path=json_path,
        picture=picture,
    )


if __name__ == "__main__":
    main()
