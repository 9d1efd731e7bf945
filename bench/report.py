"""What the rounds amount to: medians, ratios, targets, tables and a picture.

Always true: a ratio is taken inside one round, between measurements seconds apart, and only then is the
median over rounds taken. Machines drift by more than what is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

# The factor that a workload's yardstick may vary by between rounds: beyond it its figures decide nothing.
NOISE_MAX = 1.4

VERDICT_STYLES = {"met": "green", "missed": "bold red"}

Round = Mapping[str, Any]  # what one child answered
Spread = dict[str, float]  # median, min and max over the rounds, and how many there were


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    title: str
    unit: str
    divisor: float = 1.0
    baselines: tuple[str, ...] = ()
    # Who is known to be steady on a quiet machine.
    yardstick: str = ""
    # More columns of its table: metric, title, decimal places.
    columns: tuple[tuple[str, str, int], ...] = ()


_LOG_WORKLOADS = (
    Workload(
        name="batches",
        title="Appending batches of 100 entries with values of 100 B, each batch synced",
        unit="batches/s",
        baselines=("raw", "rocksdb"),
        yardstick="raw",
    ),
    Workload(
        name="single",
        title="Appending single entries of 100 B, each synced before it is acknowledged",
        unit="entries/s",
        baselines=("ours-thread",),
        yardstick="raw",
        columns=(("p99_over_raw_ms", "p99 - raw's", 3),),
    ),
    Workload(
        name="read",
        title="Reading back values of 10 to 600 B (144 on average), on one core, page cache warm",
        unit="entries/s",
        baselines=("sqlite",),
        yardstick="sqlite",
    ),
    Workload(
        name="open",
        title="Opening an unsealed segment",
        unit="MB/s",
        divisor=1e6,
        baselines=("raw",),
        yardstick="raw",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bar that the project has set itself: at least this much, or at most."""

    what: str
    workload: str
    contender: str
    metric: str
    bar: float
    at_most: bool = False
    # The median of the rounds decides, or the worst of them.
    worst: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """What is measured, what is expected of it, and which ratios (workload, metric, title) are drawn."""

    name: str
    workloads: tuple[Workload, ...]
    targets: tuple[Target, ...]
    panels: tuple[tuple[str, str, str], ...]
    # Printed above the tables: what holds for all of them.
    notes: tuple[str, ...] = ()
    # Why no figure of this run decides anything.
    undecided: str = ""


_LOG_TARGETS = (
    Target(
        what="batches, pipelined ÷ raw loop",
        workload="batches",
        contender="ours-pipelined",
        metric="ratio_to_raw",
        bar=0.8,
    ),
    Target(
        what="batches, waiting for each ÷ raw loop",
        workload="batches",
        contender="ours-waiting",
        metric="ratio_to_raw",
        bar=0.55,
    ),
    Target(
        what="batches, waiting for each ÷ RocksDB",
        workload="batches",
        contender="ours-waiting",
        metric="ratio_to_rocksdb",
        bar=1.2,
    ),
    Target(
        what="batches, pipelined ÷ RocksDB",
        workload="batches",
        contender="ours-pipelined",
        metric="ratio_to_rocksdb",
        bar=1.2,
    ),
    Target(
        what="single entries, 64 threads ÷ one",
        workload="single",
        contender="ours-threads",
        metric="ratio_to_ours-thread",
        bar=3,
    ),
    Target(
        what="single entries, 64 asyncio tasks ÷ one thread",
        workload="single",
        contender="ours-tasks",
        metric="ratio_to_ours-thread",
        bar=8,
    ),
    Target(
        what="single entries, 64 futures ÷ one thread",
        workload="single",
        contender="ours-futures",
        metric="ratio_to_ours-thread",
        bar=8,
    ),
    Target(
        what="single entries, p99 above the raw loop's, ms",
        workload="single",
        contender="ours-thread",
        metric="p99_over_raw_ms",
        bar=0.15,
        at_most=True,
    ),
    Target(
        what="reading one by one, entries/s",
        workload="read",
        contender="ours-entries",
        metric="rate",
        bar=800_000,
    ),
    Target(
        what="reading vectorised, entries/s",
        workload="read",
        contender="ours-columns",
        metric="rate",
        bar=5_000_000,
    ),
    Target(
        what="opening, values of 100 B, MB/s",
        workload="open",
        contender="ours-100",
        metric="rate",
        bar=250,
    ),
    Target(
        what="opening, values of 1 KiB, MB/s",
        workload="open",
        contender="ours-1024",
        metric="rate",
        bar=250,
    ),
)

LOG = Benchmark(
    name="log",
    workloads=_LOG_WORKLOADS,
    targets=_LOG_TARGETS,
    panels=(
        ("batches", "ratio_to_raw", "100 × 100 B per synced batch, ÷ raw write + fdatasync loop"),
        ("single", "ratio_to_ours-thread", "single synced entries, ÷ one blocking thread"),
    ),
)


_SHIPPING_WORKLOADS = (
    Workload(
        name="ship",
        title="A log of 64 KiB values, uploaded to an S3 server on this machine",
        unit="MB/s",
        divisor=1e6,
        baselines=("raw", "raw-checked"),
        yardstick="raw",
    ),
    Workload(
        name="writers",
        title="Durable puts, 100 × 100 B a batch, beside shipping",
        unit="puts/s",
        baselines=("ours-alone",),
        yardstick="ours-alone",
        columns=(("shipped_share", "shipped meanwhile", 2), ("lag_s", "behind by, s", 2)),
    ),
    Workload(
        name="shipmemory",
        title="Shipping a log, and reading it back",
        unit="MB/s",
        divisor=1e6,
        columns=(("shipping_mib", "memory grew shipping, MiB", 1), ("reading_mib", "reading, MiB", 1)),
    ),
    Workload(
        name="coldrange",
        title="Reading 1,000 of 10,000 entries of 10 KiB from the store",
        unit="MB/s",
        divisor=1e6,
        columns=(("share", "share fetched", 3), ("requests", "requests", 0)),
    ),
    Workload(
        name="coldpoint",
        title="Reading single values of 10 KiB from the store",
        unit="gets/s",
        columns=(("requests", "requests, first", 0), ("requests_cached", "requests, others", 0)),
    ),
    Workload(
        name="cycle",
        title="A cycle of 10 MB: from durable here until it counts as shipped",
        unit="MB/s",
        divisor=1e6,
        baselines=("raw",),
        yardstick="raw",
    ),
    Workload(
        name="newreader",
        title="From making a reader to its first entry",
        unit="readers/s",
        baselines=("ours-hot",),
        yardstick="ours-hot",
    ),
    Workload(
        name="follow",
        title="A reader that follows the log beside a writer",
        unit="entries/s",
        columns=(("hit_share", "found in memory", 4),),
    ),
)

# What the reference documents claim.
_CLAIMS = tuple(
    Target(what=what, workload=workload, contender=contender, metric=metric, bar=bar, at_most=at_most)
    for what, workload, contender, metric, bar, at_most in (
        ("a cycle of 10 MB, p50, ms", "cycle", "ours", "p50_ms", 500, True),
        ("until a reader's first entry, from memory, p50, ms", "newreader", "ours-hot", "p50_ms", 2, True),
        (
            "until a reader's first entry, from the store, p50, ms",
            "newreader",
            "ours-cold",
            "p50_ms",
            50,
            True,
        ),
        (
            "of what a reader that follows asks for, found in memory",
            "follow",
            "ours",
            "hit_share",
            0.95,
            False,
        ),
    )
)

_SHIPPING_TARGETS = (
    *_CLAIMS,
    Target(
        what="shipping, read back ÷ raw upload",
        workload="ship",
        contender="ours",
        metric="ratio_to_raw",
        bar=0.45,
    ),
    Target(
        what="shipping, compared by the store's checksum ÷ raw upload",
        workload="ship",
        contender="ours-checked",
        metric="ratio_to_raw-checked",
        bar=0.8,
    ),
    Target(
        what="writers beside shipping ÷ alone",
        workload="writers",
        contender="ours-shipping",
        metric="ratio_to_ours-alone",
        bar=0.75,
    ),
    *(
        Target(
            what=f"memory for {what} {form}, worst round, MiB",
            workload="shipmemory",
            contender=contender,
            metric=metric,
            bar=64,
            at_most=True,
            worst=True,
        )
        for contender, form in (("ours-one", "one segment"), ("ours-many", "many segments"))
        for metric, what in (("shipping_mib", "shipping"), ("reading_mib", "reading back"))
    ),
    *(
        target
        for contender, form in (("ours", "zstd"), ("ours-raw", "as it is"))
        for target in (
            Target(
                what=f"share fetched for a tenth of a segment, {form}",
                workload="coldrange",
                contender=contender,
                metric="share",
                bar=0.15,
                at_most=True,
                worst=True,
            ),
            Target(
                what=f"requests of the first cold read, {form}",
                workload="coldpoint",
                contender=contender,
                metric="requests",
                bar=3,
                at_most=True,
                worst=True,
            ),
            Target(
                what=f"requests of those after it, {form}",
                workload="coldpoint",
                contender=contender,
                metric="requests_cached",
                bar=1,
                at_most=True,
                worst=True,
            ),
        )
    ),
)

SHIPPING = Benchmark(
    name="shipping",
    workloads=_SHIPPING_WORKLOADS,
    targets=_SHIPPING_TARGETS,
    panels=(
        ("ship", "ratio_to_raw", "shipping, ÷ OpenDAL alone"),
        ("writers", "ratio_to_ours-alone", "durable puts beside shipping, ÷ without"),
    ),
    notes=("each measurement has an S3 server of its own (rclone), on the same cores and the same disk",),
)


SPARK = Benchmark(
    name="spark",
    workloads=(
        Workload(
            name="columns",
            title="All columns of an archive's entries, values of 100 B",
            unit="M rows/s",
            divisor=1e6,
            baselines=("parquet", "parquet-zstd"),
            yardstick="parquet",
        ),
        Workload(
            name="projected",
            title="Seq and key of them",
            unit="M rows/s",
            divisor=1e6,
            baselines=("parquet", "parquet-zstd"),
            yardstick="parquet",
        ),
        Workload(
            name="state",
            title="The state as of a seq, four entries a key",
            unit="M entries/s",
            divisor=1e6,
            baselines=("parquet", "struct"),
            yardstick="parquet",
        ),
        Workload(
            name="export",
            title="Writing all entries as Parquet",
            unit="M rows/s",
            divisor=1e6,
            baselines=("parquet",),
            yardstick="parquet",
        ),
    ),
    targets=tuple(
        Target(what=what, workload=workload, contender="ours", metric=f"ratio_to_{other}", bar=bar)
        for what, workload, other, bar in (
            ("all columns, verified ÷ Parquet", "columns", "parquet", 0.55),
            ("seq and key, verified ÷ Parquet", "projected", "parquet", 0.55),
            ("state as of a seq ÷ Parquet tuned the same way", "state", "parquet", 0.7),
            ("state as of a seq ÷ Parquet with max(struct)", "state", "struct", 1.8),
            ("export ÷ Parquet → Parquet", "export", "parquet", 1.3),
        )
    ),
    panels=(
        ("columns", "ratio_to_parquet", "all columns of 8 M entries, ÷ Parquet of the same rows"),
        ("projected", "ratio_to_parquet", "seq and key of them, ÷ Parquet"),
        ("state", "ratio_to_parquet", "state as of a seq, 2 M entries, ÷ Parquet tuned the same way"),
        ("export", "ratio_to_parquet", "export of 2 M entries, ÷ Parquet → Parquet"),
    ),
)


def summarise(rounds: Mapping[str, Sequence[Round]], workload: Workload) -> dict[str, dict[str, Spread]]:
    """Contender → metric → spread. A contender without a single good round has no metrics."""
    return {name: _metrics(answers, rounds, workload) for name, answers in rounds.items()}


def _metrics(
    answers: Sequence[Round], rounds: Mapping[str, Sequence[Round]], workload: Workload
) -> dict[str, Spread]:
    found: dict[str, list[float]] = {}
    for number, answer in enumerate(answers):
        if answer["status"] != "ok":
            continue
        found.setdefault("rate", []).append(answer["rate"] / workload.divisor)
        shown = (key for key, _, _ in workload.columns if key != "p99_over_raw_ms")
        for key in ("p50_ms", "p99_ms", "max_ms", "flushes_each", "cpu", *shown):
            if key in answer:
                found.setdefault(key, []).append(answer[key])
        for name in {*workload.baselines, "raw"} & rounds.keys():
            other = rounds[name][number] if number < len(rounds[name]) else {"status": "missing"}
            if other["status"] != "ok":
                continue
            found.setdefault(f"ratio_to_{name}", []).append(answer["rate"] / other["rate"])
            if name == "raw" and "p99_ms" in answer and "p99_ms" in other:
                found.setdefault("p99_over_raw_ms", []).append(answer["p99_ms"] - other["p99_ms"])
    return {key: _spread(values) for key, values in found.items()}


def _spread(values: Sequence[float]) -> Spread:
    return {"median": median(values), "min": min(values), "max": max(values), "rounds": len(values)}


def judge(
    benchmark: Benchmark, summary: Mapping[str, Mapping[str, Mapping[str, Spread]]], rounds: int
) -> list[dict[str, Any]]:
    """Each target with what was measured for it, and the verdict: none where the figures carry none."""
    verdicts = []
    workloads = {each.name: each for each in benchmark.workloads}
    for target in benchmark.targets:
        part = summary.get(target.workload, {})
        spread = part.get(target.contender, {}).get(target.metric)
        if spread is None:
            verdict = "not measured"
        elif benchmark.undecided:
            verdict = f"undecided: {benchmark.undecided}"
        elif spread["rounds"] < rounds:
            verdict = f"undecided: {spread['rounds']:.0f} of {rounds} rounds"
        elif is_noisy(part, workloads[target.workload]):
            verdict = "undecided: noisy machine"
        else:
            worst = "max" if target.at_most else "min"
            measured = spread[worst if target.worst else "median"]
            met = measured <= target.bar if target.at_most else measured >= target.bar
            verdict = "met" if met else "missed"
        verdicts.append(
            {
                "what": target.what,
                "sign": "≤" if target.at_most else "≥",
                "bar": target.bar,
                "measured": spread,
                "verdict": verdict,
            }
        )
    return verdicts


def is_noisy(part: Mapping[str, Mapping[str, Spread]], workload: Workload) -> bool:
    rate = part.get(workload.yardstick, {}).get("rate")
    return rate is not None and rate["max"] > NOISE_MAX * rate["min"]


def print_report(console: Console, benchmark: Benchmark, report: Mapping[str, Any]) -> None:
    rounds = report["settings"]["rounds"]
    for note in benchmark.notes:
        console.print(f"  {note}", style="dim", highlight=False)
    for workload in benchmark.workloads:
        if part := report["workloads"].get(workload.name):
            _print_workload(console, workload, part, rounds)
            _warn_of_noise(console, workload, part)
    if report["targets"]:
        _print_targets(console, report["targets"])


def _print_workload(
    console: Console, workload: Workload, part: Mapping[str, Mapping[str, Any]], rounds: int
) -> None:
    table = Table(title=workload.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    timed = any("p50_ms" in each["metrics"] for each in part.values())
    table.add_column("", no_wrap=True)
    table.add_column(workload.unit, justify="right", no_wrap=True)
    for name in workload.baselines:
        table.add_column(f"÷ {part[name]['label'] if name in part else name}", justify="right", no_wrap=True)
    columns = [("p50_ms", "p50 ms", 3), ("p99_ms", "p99 ms", 3)] if timed else []
    columns.extend(workload.columns)
    if timed:
        columns.append(("flushes_each", "flushes each", 2))
    columns.append(("cpu", "cores used", 2))
    for _, title, _ in columns:
        table.add_column(title, justify="right")
    for name, each in part.items():
        metrics = each["metrics"]
        label = Text(each["label"], "bold" if name.startswith("ours") else "")
        if "rate" not in metrics:
            table.add_row(label, Text("failed" if each["status"] == "failed" else "not available", "yellow"))
            continue
        if metrics["rate"]["rounds"] < rounds:
            label.append(f" ({metrics['rate']['rounds']:.0f} of {rounds} rounds)", "yellow")
        table.add_row(
            label,
            _number(metrics["rate"]["median"]),
            *(_spread_text(metrics.get(f"ratio_to_{other}")) for other in workload.baselines),
            *(f"{metrics[key]['median']:.{places}f}" if key in metrics else "" for key, _, places in columns),
        )
    console.print()
    console.print(table)
    for each in part.values():
        line = Text(f"  {each['label']}: {each['configuration']}", "dim")
        if each["status"] != "ok":
            line.append(f" — {each['status']}: {each['reason']}", "yellow")
        console.print(line)


def _warn_of_noise(console: Console, workload: Workload, part: Mapping[str, Mapping[str, Any]]) -> None:
    if is_noisy({name: each["metrics"] for name, each in part.items()}, workload):
        yardstick = part[workload.yardstick]
        rate = yardstick["metrics"]["rate"]
        console.print(
            f"  Even '{yardstick['label']}' went from {_number(rate['min'])} to {_number(rate['max'])}: "
            "something else used this machine. Repeat the run when it is quiet.",
            style="bold yellow",
        )


def _print_targets(console: Console, targets: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="Targets", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    table.add_column("bar", justify="right")
    table.add_column("measured (min..max)", justify="right", no_wrap=True)
    table.add_column("")
    for each in targets:
        verdict = each["verdict"]
        bar = f"{each['sign']} {_number(each['bar'])}"
        table.add_row(
            each["what"],
            bar,
            _spread_text(each["measured"]),
            Text(verdict, VERDICT_STYLES.get(verdict, "yellow")),
        )
    console.print()
    console.print(table)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spread_text(spread: Spread | None) -> str:
    if spread is None:
        return ""
    form = "{:,.0f}" if spread["median"] >= 100 else "{:.2f}"
    if spread["min"] == spread["max"]:
        return form.format(spread["median"])
    return f"{form} ({form}..{form})".format(spread["median"], spread["min"], spread["max"])


def draw(benchmark: Benchmark, report: Mapping[str, Any], path: Path) -> None:
    """Bars of ratios with their range over the rounds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = []
    for workload, metric, title in benchmark.panels:
        part = report["workloads"].get(workload, {})
        bars = [
            (name, each["label"], each["metrics"][metric])
            for name, each in part.items()
            if metric in each["metrics"]
        ]
        if bars:
            drawn.append((title, bars[::-1]))
    if not drawn:
        return
    heights = [len(bars) + 1.5 for _, bars in drawn]
    figure = Figure(figsize=(9, 0.36 * sum(heights) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(drawn), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, (title, bars) in zip(axes, drawn, strict=True):
        middles = [spread["median"] for _, _, spread in bars]
        errors = [
            [middle - spread["min"] for middle, (_, _, spread) in zip(middles, bars, strict=True)],
            [spread["max"] - middle for middle, (_, _, spread) in zip(middles, bars, strict=True)],
        ]
        colours = ["#1f6f8b" if name.startswith("ours") else "#b8b8b8" for name, _, _ in bars]
        labels = [label for _, label, _ in bars]
        axis.barh(labels, middles, xerr=errors, color=colours, ecolor="#444444", capsize=2)
        for row, (_, _, spread) in enumerate(bars):
            axis.annotate(
                f"{spread['median']:.2f}",
                (spread["max"], row),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
        axis.axvline(1, color="#444444", linewidth=0.8, linestyle="--")
        axis.set_title(title, loc="left", fontsize=10)
        axis.margins(x=0.08)
        axis.spines[["top", "right"]].set_visible(False)
    machine = report["machine"]
    figure.supxlabel(
        f"medians of {report['settings']['rounds']} rounds, whiskers min..max · {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['filesystem']}, Python {machine['python']}",
        fontsize=8,
        color="#666666",
    )
    figure.savefig(path, dpi=150)
