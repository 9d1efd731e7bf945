"""`lowwater log repair`: what is good of a damaged log, as a log of its own."""

from __future__ import annotations

import os
from typing import Any

import click

from lowwater.cli.log.findings import total_bytes
from lowwater.cli.output import (
    LocalPath,
    json_option,
    new_table,
    number,
    print_json,
    print_table,
    progress_bar,
    size,
    visible,
)
from lowwater.engine.log.repair import RepairReport, repair_steps
from lowwater.engine.seams.real import RealFiles
from lowwater.errors import DataError


@click.command()
@click.argument("source", metavar="SRC", type=LocalPath())
@click.argument("target", metavar="DST", type=LocalPath())
@click.option("--dry-run", is_flag=True, help="Say what would be kept and lost; write nothing.")
@json_option
@click.pass_context
def repair(ctx: click.Context, source: str, target: str, dry_run: bool, as_json: bool) -> None:
    """Write what is good of the log SRC to DST. SRC is not changed.

    Footers are built again, headers where they can be proved, and names that were lost are restored. At the
    first entry that is damaged or missing the copy ends: what comes after it is listed, and left out.

    Exits with 65 when the copy lacks entries. Before you use such a copy, read docs/operating/recovering.md.
    """
    # A link must not make SRC and DST look like different directories.
    steps = repair_steps(RealFiles(), os.path.realpath(source), os.path.realpath(target), dry_run=dry_run)
    report: RepairReport
    passes = 1 if dry_run else 3
    with progress_bar("repairing", lambda: passes * total_bytes(source)) as advance:
        while True:
            try:
                advance(next(steps).bytes_done)
            except StopIteration as end:
                report = end.value
                break
    if as_json:
        print_json(_as_json(report))
    else:
        _print(report, dry_run=dry_run)
    if not report.is_whole:
        ctx.exit(DataError.exit_code)


def _as_json(report: RepairReport) -> dict[str, Any]:
    return {
        "source": report.source,
        "target": report.target,
        "written": report.written,
        "whole": report.is_whole,
        "seq_first": report.seq_first,
        "seq_last": report.seq_last,
        "entries": report.frames,
        "body_bytes": report.body_bytes,
        "torn_bytes": report.torn_bytes,
        "segments": [
            {
                "path": kept.candidate.path,
                "name": kept.name,
                "seq_first": kept.seq_first,
                "seq_last": kept.seq_last,
                "entries": kept.frames,
                "done": list(kept.done),
            }
            for kept in report.kept
        ],
        "cut": None
        if report.cut is None
        else {"path": report.cut.path, "offset": report.cut.offset, "what": report.cut.what},
        "lost": [{"seq_first": first, "seq_last": last} for first, last in report.losses.lost],
        "unconnected": [
            {"path": run.path, "seq_first": run.seq_first, "seq_last": run.seq_last, "entries": run.frames}
            for run in report.losses.unconnected
        ],
        "left_out": [{"path": path, "why": why} for path, why in report.losses.left_out],
    }


def _print(report: RepairReport, *, dry_run: bool) -> None:
    if report.kept:
        table = new_table(
            "from", "to", "first seq", "last seq", "entries", "done",
            right=("first seq", "last seq", "entries"),
        )  # fmt: skip
        for kept in report.kept:
            table.add_row(
                visible(kept.candidate.name),
                kept.name,
                str(kept.seq_first),
                str(kept.seq_last),
                number(kept.frames),
                ", ".join(kept.done) or "copied as it is",
            )
        print_table(table)
    if report.cut is not None:
        at = f", offset {report.cut.offset:,}" if report.cut.offset is not None else ""
        click.echo(f"cut: {visible(report.cut.what)} ({visible(report.cut.path)}{at})")
    for first, last in report.losses.lost:
        click.echo(f"lost: seq {first}" if first == last else f"lost: entries from seq {first} to {last}")
    for run in report.losses.unconnected:
        click.echo(
            f"not connected: {run.frames:,} whole entries, seq {run.seq_first} to {run.seq_last}, "
            f"in {visible(run.path)}"
        )
    for path, why in report.losses.left_out:
        click.echo(f"left out: {visible(path)}: {why}")
    if report.torn_bytes:
        click.echo(f"torn write removed: {report.torn_bytes:,} bytes, in which nothing was acknowledged")
    if not report.kept:
        click.echo("nothing of this log can be kept: nothing was written")
        return
    verb = "would keep" if dry_run else "kept"
    seqs = f"seq {report.seq_first} to {report.seq_last}"
    where = "" if dry_run else f", in {visible(report.target)}"
    click.echo(f"{verb}: {number(report.frames)} entries, {seqs}, {size(report.body_bytes)}{where}")
    if report.is_whole:
        click.echo("whole: nothing that was acknowledged is missing, as far as these files can tell")
    else:
        click.echo("INCOMPLETE: read docs/operating/recovering.md before you use the copy")
