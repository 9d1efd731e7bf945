"""Runs of measurements: whose turn it is, what they answered, and where that goes.

Always true:
  - every measurement has a process of its own, on an empty directory (or one that was prepared before);
  - contenders take turns, A B C A B C …, so that a slow minute of the machine hits all of them;
  - between two measurements the file system has written everything back;
  - whatever ends the run, its temporary directory is removed and no process of it is left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import machine, report
from bench.loops import JOB_SETTINGS, Contender
from bench.report import Benchmark, Workload

ROOT = Path(__file__).resolve().parents[1]
CHILD_SECONDS_MAX = 600

F = TypeVar("F", bound=Callable[..., Any])
Answer = dict[str, Any]
Chosen = list[tuple[Workload, list[Contender]]]


class Runner:
    """Runs one child at a time, and ends it when the run is to stop."""

    def __init__(self) -> None:
        self.stopped_by = 0
        self._child: subprocess.Popen[str] | None = None
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._stop)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        # Only a note and a kill: the loop sees the note, and cleans up where nothing can interrupt it.
        self.stopped_by = signum
        self._kill()

    def _kill(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.kill()

    def run(self, spec: dict[str, Any]) -> Answer:
        # A session of its own: Ctrl-C reaches this process only.
        self._child = child = subprocess.Popen(
            [sys.executable, "-m", "bench.child", json.dumps(spec)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if self.stopped_by:
            self._kill()
        try:
            output, errors = child.communicate(timeout=CHILD_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._kill()
            child.communicate()
            return {"status": "failed", "reason": f"took longer than {CHILD_SECONDS_MAX} s"}
        try:
            answer: Answer = json.loads(output)
        except ValueError:
            last = errors.strip().rpartition("\n")[2] or "it printed nothing"
            return {"status": "failed", "reason": f"its process ended with code {child.returncode}: {last}"}
        if answer["status"] == "failed":
            answer["trace"] = errors
        return answer


def choose(benchmark: Benchmark, contenders: Mapping[str, list[Contender]], only: tuple[str, ...]) -> Chosen:
    """The workloads and contenders that `--only` names, and the baselines that their ratios need."""
    known = {each.name for part in contenders.values() for each in part} | set(contenders)

    def names(pattern: str, name: str) -> bool:
        return name == pattern or name.startswith(pattern + "-")

    for pattern in only:
        if not any(names(pattern, name) for name in known):
            listed = ", ".join(sorted(known))
            raise click.BadParameter(f"{pattern!r} is none of: {listed}", param_hint="--only")
    possible = [each for each in benchmark.workloads if each.name in contenders]
    workloads = [each for each in possible if each.name in only] or possible
    patterns = [pattern for pattern in only if pattern not in contenders]
    chosen = []
    for workload in workloads:
        part = contenders[workload.name]
        if patterns:
            wanted = {each.name for each in part if any(names(pattern, each.name) for pattern in patterns)}
            if wanted:
                wanted |= {*workload.baselines, "raw"}
            part = [each for each in part if each.name in wanted]
        if part:
            chosen.append((workload, part))
    if not chosen:
        listed = ", ".join(patterns)
        raise click.BadParameter(f"{listed} does not take part in that workload", param_hint="--only")
    return chosen


def measure_all(
    chosen: Chosen,
    scratch: Path,
    rounds: int,
    settings: dict[str, Any],
    runner: Runner,
    console: Console,
) -> dict[str, dict[str, list[Answer]]]:
    """Workload → contender → its answer in each round. Ends early where the runner was stopped."""
    results: dict[str, dict[str, list[Answer]]] = {}
    prepared: dict[str, Answer] = {}
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with progress:
        bar = progress.add_task("", total=rounds * sum(len(part) for _, part in chosen))
        for workload, part in chosen:
            answers = results[workload.name] = {each.name: [] for each in part}
            for number in range(rounds):
                for contender in part:
                    where = f"{workload.name} {number + 1}/{rounds} · {contender.label}"
                    progress.update(bar, description=where)
                    answer = _measure(workload, contender, scratch, settings, runner, prepared)
                    if runner.stopped_by:
                        return results
                    answers[contender.name].append(answer)
                    progress.advance(bar)
                    if not console.is_terminal:
                        console.print(f"{where}: {_outcome(workload, answer)}", highlight=False, markup=False)
            # What this workload prepared is of no use to the next one, and may be gigabytes.
            shutil.rmtree(scratch / workload.name, ignore_errors=True)
    return results


def _measure(
    workload: Workload,
    contender: Contender,
    scratch: Path,
    settings: dict[str, Any],
    runner: Runner,
    prepared: dict[str, Answer],
) -> Answer:
    directory = scratch / workload.name / (contender.data or "run")
    directory.mkdir(parents=True, exist_ok=True)
    spec = {
        "workload": workload.name,
        "contender": contender.name,
        "directory": os.fspath(directory),
        **{key: value for key, value in settings.items() if key in JOB_SETTINGS},
    }
    if contender.prepare is not None:
        key = f"{workload.name}/{contender.data}"
        if key not in prepared:
            prepared[key] = runner.run({"phase": "prepare", **spec})
        if prepared[key]["status"] != "ok":
            return prepared[key]
    # Write back what others have left, and what removing their files has left to do.
    os.sync()
    answer = runner.run({"phase": "measure", **spec})
    if contender.prepare is None:
        shutil.rmtree(directory, ignore_errors=True)
    return answer


def _outcome(workload: Workload, answer: Answer) -> str:
    if answer["status"] != "ok":
        return f"{answer['status']} ({answer['reason']})"
    return f"{answer['rate'] / workload.divisor:,.0f} {workload.unit}"


def assemble(
    benchmark: Benchmark,
    chosen: Chosen,
    results: dict[str, dict[str, list[Answer]]],
    settings: dict[str, Any],
    described: dict[str, Any],
) -> dict[str, Any]:
    workloads: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    for workload, part in chosen:
        rounds = results[workload.name]
        metrics[workload.name] = report.summarise(rounds, workload)
        workloads[workload.name] = {
            each.name: {
                "label": each.label,
                "configuration": each.configuration,
                **_status(rounds[each.name]),
                "unit": workload.unit,
                "metrics": metrics[workload.name][each.name],
                "rounds": rounds[each.name],
            }
            for each in part
        }
    return {
        "benchmark": benchmark.name,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": described,
        "settings": settings,
        "notes": benchmark.notes,
        "workloads": workloads,
        "targets": report.judge(benchmark, metrics, settings["rounds"]),
    }


def _status(answers: list[Answer]) -> dict[str, str]:
    """One bad round is told, even where the others were good."""
    for answer in answers:
        if answer["status"] != "ok":
            return {"status": answer["status"], "reason": answer["reason"]}
    return {"status": "ok", "reason": ""}


def output_options(name: str, *, drawn: str = "the ratios") -> Callable[[F], F]:
    """Where a benchmark works, and where its figures go."""
    options = (
        click.option(
            "--dir",
            "directory",
            type=click.Path(path_type=Path, file_okay=False),
            default=Path("build/bench"),
            show_default=True,
            help="Where temporary data goes: on the disk that is to be measured.",
        ),
        click.option(
            "--json",
            "json_path",
            type=click.Path(path_type=Path, dir_okay=False),
            default=Path(f"build/bench/{name}.json"),
            show_default=True,
            help="Where all figures go.",
        ),
        click.option(
            "--picture", type=click.Path(path_type=Path, dir_okay=False), help=f"Draw {drawn} as PNG."
        ),
    )

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def check_outputs(json_path: Path, picture: Path | None) -> None:
    """Better now than after a quarter of an hour."""
    for hint, path in (("--json", json_path), ("--picture", picture)):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"cannot make {path.parent}: {error.strerror}"
            raise click.BadParameter(message, param_hint=hint) from error
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise click.BadParameter(f"no permission to write {path}", param_hint=hint)
    if picture is not None and find_spec("matplotlib") is None:
        raise click.ClickException("--picture needs matplotlib: pip install 'lowwater[bench]'")


def check_directory(directory: Path, needed_bytes: int, console: Console) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"cannot make {directory}: {error.strerror}", param_hint="--dir") from error
    if not os.access(directory, os.W_OK):
        raise click.BadParameter(f"no permission to write in {directory}", param_hint="--dir")
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise click.BadParameter(
            f"{directory} has {free / 1e9:.1f} GB free, and {needed_bytes / 1e9:.1f} GB are needed",
            param_hint="--dir",
        )
    filesystem = machine.filesystem_of(directory)
    if filesystem in ("tmpfs", "ramfs"):
        console.print(
            f"{directory} is in memory ({filesystem}): syncing costs nothing there, and the figures say "
            "nothing about a disk. Give a directory on one with --dir.",
            style="bold red",
        )


def takes_part(chosen: Chosen, prefix: str = "ours") -> bool:
    return any(each.name.startswith(prefix) for _, part in chosen for each in part)


def run(
    benchmark: Benchmark,
    chosen: Chosen,
    settings: dict[str, Any],
    *,
    directory: Path,
    needed_bytes: int,
    json_path: Path,
    picture: Path | None,
) -> None:
    """Measure, print and write all that was chosen. Ends the process where something failed."""
    console = wide_console()
    check_outputs(json_path, picture)
    check_directory(directory, needed_bytes, console)
    runner = Runner()
    described = machine.describe(directory)
    load = os.getloadavg()[0]
    if load > 0.5:
        console.print(f"the machine is not idle (load {load:.1f}): expect wide ranges", style="yellow")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{benchmark.name}-", dir=directory.resolve()) as scratch:
        results = measure_all(chosen, Path(scratch), settings["rounds"], settings, runner, console)
    exit_if_stopped(runner, console)

    finished = assemble(benchmark, chosen, results, settings, described)
    report.print_report(console, benchmark, finished)
    json_path.write_text(json.dumps(finished, indent=1) + "\n")
    console.print(f"\n{time.monotonic() - started:.0f} s; all figures in {json_path}", highlight=False)
    if picture is not None:
        report.draw(benchmark, finished, picture)
        console.print(f"picture in {picture}", highlight=False)
    if takes_part(chosen):
        check_source(described)
    failed = [
        f"{workload}/{name}"
        for workload, part in finished["workloads"].items()
        for name, each in part.items()
        if each["status"] == "failed"
    ]
    if failed:
        raise click.ClickException(f"failed in some round: {', '.join(failed)}. Traces in {json_path}")


def wide_console() -> Console:
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=140)


def exit_if_stopped(runner: Runner, console: Console) -> None:
    if runner.stopped_by:
        name = signal.Signals(runner.stopped_by).name
        console.print(f"stopped by {name}: nothing is left behind", style="yellow")
        sys.exit(128 + runner.stopped_by)


def check_source(described: Mapping[str, Any]) -> None:
    if described["source_hash"] != machine.source_hash():
        raise click.ClickException(
            "Lowwater's source changed during the run: its figures mix versions. Repeat."
        )
