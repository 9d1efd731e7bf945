"""How findings look, in tables and as JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from lowwater.cli.output import new_table, number, print_table, visible
from lowwater.engine.log.check import Finding
from lowwater.errors import DataError


def finding_as_json(finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity,
        "what": finding.what,
        "path": finding.where,
        "seq": finding.seq,
        "offset": finding.offset,
        "hint": finding.hint,
    }


def print_findings(findings: Sequence[Finding], *, base: str = "") -> None:
    """`base` is the archive that they are about: objects are shown with all of the name below it."""
    table = new_table("severity", "file", "seq", "offset", "what, and what to do", right=("seq", "offset"))
    for finding in findings:
        table.add_row(
            finding.severity,
            visible(_short(finding.where, base)),
            number(finding.seq),
            number(finding.offset),
            visible(finding.what) + (f"\n{visible(finding.hint)}" if finding.hint else ""),
        )
    print_table(table)


def _short(where: str, base: str) -> str:
    if base and where.startswith(f"{base.rstrip('/')}/"):
        return where[len(base.rstrip("/")) + 1 :]
    return where if where == base else os.path.basename(where)


def exit_by(ctx: click.Context, findings: Sequence[Finding]) -> None:
    """Data that is damaged is no failure of the command, but whoever called it must know."""
    if any(finding.severity == "error" for finding in findings):
        ctx.exit(DataError.exit_code)


def total_bytes(path: str) -> int:
    """What there is to read, for a progress bar: about that much, where somebody writes to it."""
    paths = [path]
    if os.path.isdir(path):
        paths = [entry.path for entry in os.scandir(path) if entry.name.endswith((".log", ".zst"))]
    total = 0
    for path in paths:
        try:
            total += os.path.getsize(path)
        except OSError:
            pass  # what is wrong with it is told when it is read
    return total
