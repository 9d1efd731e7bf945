"""Spark over a shipped archive against Parquet of the same rows: `python -m bench.spark --help`.

Always true: all contenders run in one session, one after the other, round after round; the Parquet files hold
exactly the rows that our source gives, as Spark itself wrote them; the raw archive holds the same entries,
written again, because how an archive is stored is what a log's entries say; and before anything is timed
each has run WARM_ROUNDS times, and has given as many rows as the others.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from blake3 import blake3
from rich.console import Console

if not __package__:
    # Started as `python bench/spark.py`: Python then searches bench/ itself, not the folder above.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lowwater
import lowwater.spark
from bench import machine, report, run
from bench.payloads import BUCKET, KEY_BYTES, VALUE_BYTES
from lowwater.spark.entry_columns import MAIN_COLUMNS

BATCH = 10_000
WARM_ROUNDS = 3
DELETED_SHARE = 0.05
# What an entry takes in all archives and Parquet files together, and in the database that makes them.
BYTES_AN_ENTRY = 1500
STATE = ("bucket", "key", "seq", "time", "metadata", "value")


@dataclass(frozen=True)
class Asked:
    """One way of one contender to do a workload's work."""

    name: str
    label: str
    configuration: str
    run: Callable[[], object]


class Data:
    """The same entries as an archive of each form, and as Parquet of each form."""

    def __init__(self, folder: Path, entries: int, keys: int) -> None:
        self.entries = entries
        self._keys = keys
        self._folder = folder
        self.uri = f"file://{folder}/archive"
        self.raw_uri = f"file://{folder}/archive-raw"
        self.parquet = f"file://{folder}/parquet"
        self.parquet_zstd = f"file://{folder}/parquet-zstd"

    def make(self, spark: Any, console: Console) -> bool:
        """Make what is not there: whether there was anything to make."""
        made = [
            self._made(console, "archive", lambda: self._write(self.uri, "zstd")),
            self._made(console, "archive-raw", lambda: self._write(self.raw_uri, "none")),
            self._made(console, "parquet", lambda: self._copy(spark, self.parquet, "snappy")),
            self._made(console, "parquet-zstd", lambda: self._copy(spark, self.parquet_zstd, "zstd")),
        ]
        return any(made)

    def _made(self, console: Console, name: str, make: Callable[[], None]) -> bool:
        complete = self._folder / f"{name}.complete"
        if complete.exists():
            return False
        shutil.rmtree(self._folder / name, ignore_errors=True)
        with console.status(f"making {name} of {self.entries:,} entries"):
            make()
        complete.touch()
        return True

    def _copy(self, spark: Any, to: str, compression: str) -> None:
        entries = spark.read.format("lowwater").load(self.uri)
        entries.write.option("compression", compression).parquet(to)

    def _write(self, uri: str, compression: str) -> None:
        rng = random.Random(self.entries)
        database = self._folder / "database"
        shutil.rmtree(database, ignore_errors=True)
        with lowwater.open(database, tier=uri, config={"wal": {"compression": compression}}) as db:
            db.create_bucket(BUCKET)
            live: set[str] = set()
            for start in range(0, self.entries, BATCH):
                count = min(BATCH, self.entries - start)
                filler = rng.randbytes(VALUE_BYTES * count)
                items = [
                    (
                        key(rng.randrange(self._keys)),
                        filler[number * VALUE_BYTES : (number + 1) * VALUE_BYTES],
                    )
                    for number in range(count)
                ]
                deleted = [] if not live else rng.sample(sorted(live), int(DELETED_SHARE * count))
                db.put_many(BUCKET, items[len(deleted) :])
                if deleted:
                    db.write([lowwater.Delete(BUCKET, key) for key in deleted])
                live = {key for key, _ in items[len(deleted) :]}
            db.ship()
        shutil.rmtree(database)


def key(number: int) -> str:
    """Of the form of the other benchmarks' keys: 16 random bytes in hex, the same for a number each time."""
    return blake3(number.to_bytes(8, "little")).hexdigest(KEY_BYTES // 2)


# ---------------------------------------------------------------------------- what is asked


def consume(frame: Any) -> None:
    """All rows and all columns of a frame, for nobody."""
    frame.write.format("noop").mode("overwrite").save()


def scans(spark: Any, data: Data) -> dict[str, list[Asked]]:
    def ours(uri: str, columns: str = "", verify: str = "strict") -> Callable[[], None]:
        def run() -> None:
            source = spark.read.format("lowwater").option("verify", verify)
            consume((source.schema(columns) if columns else source).load(uri))

        return run

    def parquet(path: str, *columns: str) -> Callable[[], None]:
        return lambda: consume(spark.read.parquet(path).select(*(columns or "*")))

    narrow = "seq bigint, key string"
    return {
        "columns": [
            Asked("parquet", "Parquet", "as Spark writes it: snappy", parquet(data.parquet)),
            Asked("parquet-zstd", "Parquet, zstd", "written with zstd", parquet(data.parquet_zstd)),
            Asked("ours", "Lowwater", "zstd, the hash of every block compared (strict)", ours(data.uri)),
            Asked("ours-unverified", "Lowwater, unverified", "verify none", ours(data.uri, verify="none")),
            Asked(
                "ours-raw", "Lowwater, raw archive", 'wal.compression = "none", strict', ours(data.raw_uri)
            ),
        ],
        "projected": [
            Asked("parquet", "Parquet", "select seq, key", parquet(data.parquet, "seq", "key")),
            Asked("parquet-zstd", "Parquet, zstd", "the same", parquet(data.parquet_zstd, "seq", "key")),
            Asked("ours", "Lowwater", f"strict, schema {narrow}", ours(data.uri, narrow)),
            Asked("ours-raw", "Lowwater, raw archive", "the same", ours(data.raw_uri, narrow)),
        ],
    }


def states(spark: Any, data: Data, scratch: Path) -> dict[str, list[Asked]]:
    def state(uri: str) -> Callable[[], None]:
        return lambda: consume(lowwater.spark.state_as_of(spark, uri))

    def export(uri: str) -> Callable[[], None]:
        return lambda: into(scratch, lambda to: lowwater.spark.export_parquet(spark, uri, f"file://{to}"))

    return {
        "state": [
            Asked(
                "parquet",
                "Parquet, tuned",
                "max(seq) of a narrow scan, broadcast semi-join, values read for the newest only",
                lambda: consume(tuned_state(spark.read.parquet(data.parquet))),
            ),
            Asked(
                "struct",
                "Parquet, max(struct)",
                "group by bucket and key, max(struct(seq, …))",
                lambda: consume(struct_state(spark.read.parquet(data.parquet))),
            ),
            Asked(
                "ours",
                "Lowwater",
                "state_as_of of the newest seq, strict; no checkpoint in the archive",
                state(data.uri),
            ),
            Asked("ours-raw", "Lowwater, raw archive", "the same", state(data.raw_uri)),
        ],
        "export": [
            Asked(
                "parquet",
                "Parquet → Parquet",
                "read.parquet, write.parquet: all columns, snappy",
                lambda: into(
                    scratch, lambda to: spark.read.parquet(data.parquet).write.parquet(f"file://{to}")
                ),
            ),
            Asked(
                "ours",
                "Lowwater → Parquet",
                "export_parquet of the log, strict, snappy",
                export(data.uri),
            ),
            Asked("ours-raw", "raw Lowwater → Parquet", "the same of the raw archive", export(data.raw_uri)),
        ],
    }


def tuned_state(entries: Any) -> Any:
    from pyspark.sql import functions as F  # noqa: N812 — as everybody calls it

    data = entries.filter("kind in ('put', 'delete', 'copy')")
    newest = data.groupBy("bucket", "key").agg(F.max("seq").alias("seq")).select("seq")
    winners = data.join(F.broadcast(newest), "seq", "left_semi")
    return winners.filter("kind != 'delete'").select(*STATE)


def struct_state(entries: Any) -> Any:
    """As it is usually written. Maps cannot be compared, so it goes without metadata."""
    from pyspark.sql import functions as F  # noqa: N812

    data = entries.filter("kind in ('put', 'delete', 'copy')")
    newest = data.groupBy("bucket", "key").agg(F.max(F.struct("seq", "time", "kind", "value")).alias("it"))
    return newest.filter("it.kind != 'delete'").select("bucket", "key", "it.seq", "it.time", "it.value")


def into(scratch: Path, write: Callable[[Path], object]) -> None:
    to = scratch / "exported"
    write(to)
    shutil.rmtree(to)


def check_equal(spark: Any, big: Data, small: Data) -> None:
    """Contenders that give different rows have no ratio."""

    def fingerprint(frame: Any, columns: tuple[str, ...]) -> Any:
        hashed = ", ".join(name for name in columns if name != "metadata")
        return frame.selectExpr("count(1)", f"sum(xxhash64({hashed}) % 1000000007)").first()

    def require_same(frames: list[Any], columns: tuple[str, ...], what: str) -> None:
        found = [fingerprint(each, columns) for each in frames]
        if len(set(found)) != 1:
            raise click.ClickException(f"{what} differ: {found}")

    for data in (big, small):
        ours, raw = (spark.read.format("lowwater").load(uri) for uri in (data.uri, data.raw_uri))
        parquet = [spark.read.parquet(path) for path in (data.parquet, data.parquet_zstd)]
        require_same([ours, *parquet], MAIN_COLUMNS, f"the rows of {data.uri}")
        # It was written at another time, and what an engine records of itself stands elsewhere in the log.
        entries = [each.filter("kind in ('put', 'delete')") for each in (ours, raw)]
        columns = ("kind", "bucket", "key", "value")
        require_same(entries, columns, f"the entries of {data.uri} and {data.raw_uri}")
    of_all = [
        lowwater.spark.state_as_of(spark, small.uri),
        tuned_state(spark.read.parquet(small.parquet)),
        struct_state(spark.read.parquet(small.parquet)),
    ]
    require_same(of_all, ("bucket", "key", "seq", "time", "value"), "the states")


# ---------------------------------------------------------------------------- measuring


@contextmanager
def session(scratch: Path) -> Iterator[Any]:
    spark = lowwater.spark.session(
        config={
            "spark.driver.memory": "4g",
            "spark.sql.shuffle.partitions": 2 * (os.cpu_count() or 1),
            "spark.local.dir": scratch / "spark",
            "spark.sql.warehouse.dir": scratch / "warehouse",
        }
    )
    try:
        yield spark
    finally:
        spark.stop()


def measure(
    asked: dict[str, list[Asked]], entries: dict[str, int], rounds: int, console: Console
) -> dict[str, dict[str, list[run.Answer]]]:
    results: dict[str, dict[str, list[run.Answer]]] = {}
    for workload, part in asked.items():
        answers = results[workload] = {each.name: [] for each in part}
        # The first times a JVM does something it does it slowly.
        for _ in range(WARM_ROUNDS):
            for each in part:
                each.run()
        for number in range(rounds):
            for each in part:
                began_s = time.perf_counter()
                each.run()
                seconds = time.perf_counter() - began_s
                answers[each.name].append({"status": "ok", "rate": entries[workload] / seconds})
                if not console.is_terminal:
                    console.print(f"{workload} {number + 1}/{rounds} · {each.label}: {seconds:.2f} s")
    return results


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option("--scan-entries", type=click.IntRange(1000), default=8_000_000, show_default=True)
@click.option("--state-entries", type=click.IntRange(1000), default=2_000_000, show_default=True)
@click.option(
    "--only",
    type=click.Choice([each.name for each in report.SPARK.workloads]),
    multiple=True,
    help="Only this workload. Repeatable.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where archives and Parquet files are made, and found again by the next run. Without it they are "
    "removed at the end.",
)
@click.option("--prepare", is_flag=True, help="Make what --data lacks, compare the rows, and end.")
@run.output_options("spark")
def main(
    *,
    rounds: int,
    scan_entries: int,
    state_entries: int,
    only: tuple[str, ...],
    data: Path | None,
    prepare: bool,
    directory: Path,
    json_path: Path,
    picture: Path | None,
) -> None:
    """Measure Spark over a shipped archive against Parquet of the same rows, in one session.

    Prints tables of medians and of ratios within a round, and writes all figures as JSON. A full run takes
    about five minutes, most of it to make the data; leave the machine alone meanwhile."""
    console = run.wide_console()
    run.check_outputs(json_path, picture)
    run.check_directory(directory, BYTES_AN_ENTRY * (scan_entries + state_entries) + (2 << 30), console)
    described = machine.describe(directory)
    with tempfile.TemporaryDirectory(prefix="spark-", dir=directory.resolve()) as name:
        scratch = Path(name)
        folder = (data or scratch / "data").resolve()
        big = Data(folder / f"scans {scan_entries}", scan_entries, scan_entries)
        small = Data(folder / f"states {state_entries}", state_entries, state_entries // 4)
        with session(scratch) as spark:
            made = [each.make(spark, console) for each in (big, small)]
            if any(made) or prepare:
                check_equal(spark, big, small)
            if prepare:
                return
            asked = scans(spark, big) | states(spark, small, scratch)
            asked = {name: part for name, part in asked.items() if not only or name in only}
            entries = {"columns": big.entries, "projected": big.entries}
            entries |= {"state": small.entries, "export": small.entries}
            results = measure(asked, entries, rounds, console)
    settings = {"rounds": rounds, "scan_entries": scan_entries, "state_entries": state_entries}
    workloads = [each for each in report.SPARK.workloads if each.name in asked]
    chosen: Any = [(each, asked[each.name]) for each in workloads]
    finished = run.assemble(report.SPARK, chosen, results, settings, described)
    report.print_report(console, report.SPARK, finished)
    json_path.write_text(json.dumps(finished, indent=1) + "\n")
    console.print(f"\nall figures in {json_path}", highlight=False)
    if picture is not None:
        report.draw(report.SPARK, finished, picture)
        console.print(f"picture in {picture}", highlight=False)
    run.check_source(described)


if __name__ == "__main__":
    main()
