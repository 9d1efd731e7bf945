"""Recovery time against log length and state size: `python -m bench.recovery --help`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if not __package__:
    # Started as `python bench/recovery.py`: Python then searches bench/ itself, not the folder above.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import engine_ours, machine, run

STATES = (0, 100_000, 1_000_000)
LOGS = (100_000, 300_000, 1_000_000)

Point = dict[str, Any]


def measure(state: int, log_records: int, rounds: int, scratch: Path, runner: run.Runner) -> Point:
    """Make one crash, and recover from copies of it."""
    directory = scratch / f"{state}-{log_records}"
    directory.mkdir()
    spec = {
        "workload": "recovery",
        "contender": engine_ours.RECOVERY.name,
        "directory": os.fspath(directory),
        "seconds": 0,
        "warmup_seconds": 0,
        "keys": state,
        "log_records": log_records,
    }
    point: Point = {"state": state, "log_records": log_records, "seconds": []}
    answers = [runner.run({"phase": "prepare", **spec})]
    for _ in range(rounds):
        if answers[-1]["status"] != "ok" or runner.stopped_by:
            break
        answers.append(runner.run({"phase": "measure", **spec}))
        if answers[-1]["status"] == "ok":
            point["seconds"].append(answers[-1]["seconds"])
    shutil.rmtree(directory, ignore_errors=True)
    return {**point, **{key: answers[-1].get(key, "") for key in ("status", "reason", "trace")}}


def print_points(console: Console, points: list[Point]) -> None:
    title = "Recovery: opening after a crash"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for heading in ("keys in pages", "records in the log only", "seconds (min..max)", "records/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        times = point["seconds"]
        middle = median(times) if times else 0
        table.add_row(
            f"{point['state']:,}",
            f"{point['log_records']:,}",
            f"{middle:.2f} ({min(times):.2f}..{max(times):.2f})" if times else point["reason"],
            f"{point['log_records'] / middle:,.0f}" if times else "",
        )
    console.print(table)
    console.print(f"  {engine_ours.RECOVERY.configuration}", style="dim", highlight=False)


def draw(points: list[Point], described: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for state in sorted({point["state"] for point in points}):
        line = [point for point in points if point["state"] == state and point["seconds"]]
        lengths = [point["log_records"] / 1000 for point in line]
        axis.plot(
            lengths,
            [median(point["seconds"]) for point in line],
            marker="o",
            label=f"{state:,} keys in pages",
        )
    axis.set_xlabel("records in the log only, thousands")
    axis.set_ylabel("seconds until open")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        f"{described['cpu']}, {described['cores']} cores, {described['filesystem']}, "
        f"Python {described['python']}",
        fontsize=8,
        color="#666666",
    )
    figure.savefig(path, dpi=150)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--state",
    "states",
    type=click.IntRange(0),
    multiple=True,
    default=STATES,
    show_default=True,
    help="Keys in pages, behind a checkpoint. Repeatable.",
)
@click.option(
    "--log",
    "logs",
    type=click.IntRange(1),
    multiple=True,
    default=LOGS,
    show_default=True,
    help="Records that only the log has. Repeatable.",
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True)
@run.output_options("recovery", drawn="them")
def main(
    *,
    states: tuple[int, ...],
    logs: tuple[int, ...],
    rounds: int,
    directory: Path,
    json_path: Path,
    picture: Path | None,
) -> None:
    """Measure how long our engine takes to open after a crash, by the length of the log that it has to
    apply again and by the size of the state that it need not look at."""
    if reason := engine_ours.missing():
        click.echo(f"our engine cannot be measured: {reason}", err=True)
        sys.exit(2)
    console = run.wide_console()
    run.check_outputs(json_path, picture)
    run.check_directory(directory, 1000 * (max(states) + 2 * max(logs)) + (2 << 30), console)
    described = machine.describe(directory)
    runner = run.Runner()
    with tempfile.TemporaryDirectory(prefix="recovery-", dir=directory.resolve()) as scratch:
        points = [
            measure(state, log_records, rounds, Path(scratch), runner)
            for state in states
            for log_records in logs
            if not runner.stopped_by
        ]
    run.exit_if_stopped(runner, console)
    print_points(console, points)
    finished = {
        "benchmark": "recovery",
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": described,
        "settings": {"rounds": rounds},
        "points": points,
    }
    json_path.write_text(json.dumps(finished, indent=1) + "\n")
    console.print(f"\nall figures in {json_path}", highlight=False)
    if picture is not None:
        draw(points, described, picture)
        console.print(f"picture in {picture}", highlight=False)
    run.check_source(described)
    if any(point["status"] != "ok" for point in points):
        raise click.ClickException(f"failed at some point. Traces in {json_path}")


if __name__ == "__main__":
    main()
