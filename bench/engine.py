"""The engine against RocksDB, LMDB and SQLite: `python -m bench.engine --help`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

if not __package__:
    # Started as `python bench/engine.py`: Python then searches bench/ itself, not the folder above.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import engine_jobs, engine_ours, engine_peers, run
from bench.child import ENGINE
from bench.report import Benchmark, Target, Workload

# The bars are for so many keys, and decide nothing with fewer.
KEYS = 1_000_000
MIB = 1 << 20
PEERS = ("rocksdb", "lmdb", "sqlite")
_STALLS = (("max_ms", "max ms", 1),)

# Of single gets.
_LATENCIES = (("p50_us", "p50 µs", 1), ("p99_us", "p99 µs", 1), ("p999_us", "p999 µs", 1))

WORKLOADS = (
    Workload(
        name="put",
        title="Durable puts of fresh random keys, 100 × 100 B in each synced batch",
        unit="puts/s",
        baselines=PEERS,
        yardstick="rocksdb",
        columns=_STALLS,
    ),
    Workload(
        name="overwrite",
        title=f"Overwriting all of them {engine_jobs.OVERWRITES} times in random order, in the same batches",
        unit="puts/s",
        baselines=PEERS,
        yardstick="rocksdb",
        columns=_STALLS,
    ),
    Workload(
        name="put1k",
        title=f"Values of {engine_jobs.PUT1K_BYTES} B under random updates of "
        f"{engine_jobs.PUT1K_KEYS_MAX:,} keys, in the same batches",
        unit="puts/s",
        baselines=PEERS,
        yardstick="rocksdb",
        columns=_STALLS,
    ),
    Workload(
        name="hot",
        title=f"Gets of {engine_jobs.HOT_KEYS:,} hot keys",
        unit="gets/s",
        baselines=PEERS,
        yardstick="rocksdb",
        columns=_LATENCIES,
    ),
    Workload(
        name="uniform",
        title="Gets uniformly over what fits in the memory limit",
        unit="gets/s",
        baselines=PEERS,
        yardstick="rocksdb",
        columns=_LATENCIES,
    ),
    Workload(
        name="scan1000",
        title="Prefix scans of 1,000 rows, all five columns",
        unit="rows/s",
        baselines=("sqlite",),
        yardstick="sqlite",
    ),
    Workload(
        name="scan100",
        title="Prefix scans of 100 rows, all five columns",
        unit="rows/s",
        baselines=("sqlite",),
        yardstick="sqlite",
    ),
    Workload(
        name="mixed",
        title="Writers beside a checkpoint of as many dirty keys: how long one waits",
        unit="puts/s",
        baselines=("ours-quiet",),
        yardstick="ours-quiet",
        columns=_STALLS,
    ),
    Workload(name="redo", title="Recovery: redo of what no page has", unit="records/s"),
    Workload(
        name="large",
        title=f"Gets uniformly over {engine_jobs.LARGE_TIMES} times the memory limit",
        unit="gets/s",
        baselines=PEERS,
        yardstick="rocksdb",
        columns=_LATENCIES,
    ),
)


def _ratio(what: str, workload: str, peer: str, bar: float) -> Target:
    return Target(
        what=f"{what} ÷ {peer}", workload=workload, contender="ours", metric=f"ratio_to_{peer}", bar=bar
    )


TARGETS_256 = (
    _ratio("durable puts", "put", "rocksdb", 1.0),
    _ratio("durable puts", "put", "lmdb", 4),
    _ratio("durable puts", "put", "sqlite", 4),
    _ratio("overwriting", "overwrite", "rocksdb", 0.85),
    _ratio("values of 1 KB", "put1k", "rocksdb", 0.8),
    _ratio("hot gets", "hot", "rocksdb", 1.5),
    _ratio("uniform gets", "uniform", "rocksdb", 0.8),
    _ratio("scans of 1,000 rows", "scan1000", "sqlite", 1.2),
    _ratio("scans of 100 rows", "scan100", "sqlite", 1.2),
    Target(
        what="longest wait of a writer beside a checkpoint, worst round, ms",
        workload="mixed",
        contender="ours-checkpoint",
        metric="max_ms",
        bar=50,
        at_most=True,
        worst=True,
    ),
    Target(what="redo, records/s", workload="redo", contender="ours", metric="rate", bar=400_000),
)
TARGETS_64 = (
    _ratio("durable puts, 64 MiB", "put", "rocksdb", 0.65),
    _ratio("overwriting, 64 MiB", "overwrite", "rocksdb", 0.65),
)
TARGETS = {256: TARGETS_256, 64: TARGETS_64}


def benchmark(memory: int, keys: int, *, only_peers: bool) -> Benchmark:
    return Benchmark(
        name="engine",
        workloads=WORKLOADS,
        targets=() if only_peers else TARGETS.get(memory, ()),
        panels=tuple(
            (each.name, f"ratio_to_{each.baselines[0]}", f"{each.title}, ÷ {each.baselines[0]}")
            for each in WORKLOADS
            if each.baselines and each.name != "mixed"
        ),
        notes=(
            f"{keys:,} keys, a memory limit of {memory} MiB each",
            *(() if only_peers or engine_ours.missing() else (engine_ours.how_it_runs(),)),
            *engine_peers.NOTES,
        ),
        undecided=f"needs {KEYS:,} keys" if keys < KEYS else "",
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--rounds", type=click.IntRange(1, 1000), default=5, show_default=True, help="How often each is measured."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.05, 600),
    default=3.0,
    show_default=True,
    help="How long gets and scans are measured. Writes take as long as they take.",
)
@click.option(
    "--keys",
    type=click.IntRange(10_000, 100_000_000),
    default=KEYS,
    show_default=True,
    help="How many keys. With fewer than the default no bar is judged.",
)
@click.option(
    "--memory",
    type=click.IntRange(8, 65536),
    default=256,
    show_default=True,
    metavar="MIB",
    help="The memory limit of each, in MiB. There are bars for 256 and for 64.",
)
@click.option(
    "--large", is_flag=True, help="Also get from 10 times the memory limit: gigabytes, and minutes."
)
@click.option("--only-peers", is_flag=True, help="Leave our engine out.")
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Only this workload (put, overwrite, put1k, hot, uniform, scan1000, scan100, mixed, redo, large) or "
    "contender (ours, rocksdb, lmdb, sqlite), and the baselines of its ratios. Repeatable.",
)
@run.output_options("engine")
def main(
    *,
    rounds: int,
    seconds: float,
    keys: int,
    memory: int,
    large: bool,
    only_peers: bool,
    only: tuple[str, ...],
    directory: Path,
    json_path: Path,
    picture: Path | None,
) -> None:
    """Measure the engine against RocksDB, LMDB and SQLite, with the same records, batches and syncing.

    Prints tables of medians and of ratios within a round, judges the bars that the project has set itself,
    and writes all figures as JSON. Leave the machine alone meanwhile."""
    contenders = ENGINE
    if only_peers:
        peers = {name: [each for each in part if each.name in PEERS] for name, part in ENGINE.items()}
        contenders = {name: part for name, part in peers.items() if part}
    if not large and "large" not in only:
        contenders = {name: part for name, part in contenders.items() if name != "large"}
    measured = benchmark(memory, keys, only_peers=only_peers)
    chosen = run.choose(measured, contenders, only)
    if run.takes_part(chosen):
        exit_without_ours("; --only-peers measures the others alone")
    settings: dict[str, Any] = {
        "rounds": rounds,
        "seconds": seconds,
        "warmup_seconds": min(0.5, seconds),
        "keys": keys,
        "memory_bytes": memory * MIB,
    }
    # Each of four stores has the data of a workload at the same time, with room for what it rewrites.
    needed_bytes = 4 * 1000 * keys
    if any(each.name == "large" for each, _ in chosen):
        needed_bytes += 4 * 4 * engine_jobs.LARGE_TIMES * memory * MIB
    run.run(
        measured,
        chosen,
        settings,
        directory=directory,
        needed_bytes=needed_bytes + (2 << 30),
        json_path=json_path,
        picture=picture,
    )


def exit_without_ours(hint: str = "") -> None:
    if reason := engine_ours.missing():
        click.echo(f"our engine cannot be measured: {reason}{hint}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
