"""What the commands on archives share: opening the store, and how a scrub is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from lowwater.cli.log.findings import exit_by, finding_as_json, print_findings
from lowwater.cli.output import number, print_json, progress_bar, size
from lowwater.config import Config
from lowwater.engine.format.format import SEQ_MAX
from lowwater.engine.log.check import Finding
from lowwater.tiering.checking import open_to_read
from lowwater.tiering.scrub import Scrub
from lowwater.tiering.store import Store


@contextmanager
def opened_store(ctx: click.Context, uri: str) -> Iterator[Store]:
    """The store at a URI, to read, with what the configuration says of stores."""
    store = open_to_read(uri, Config.load(ctx.find_root().obj).tier)
    try:
        yield store
    finally:
        store.close()


def run_scrub(ctx: click.Context, store: Store, scrub: Scrub, *, as_json: bool) -> None:
    """Scrub with a progress bar, tell what was found, and exit by it."""
    findings: list[Finding] = []
    # How much a range comes to is known at its end.
    with progress_bar("scrubbing", lambda: None if scrub.seqs else scrub.stored_bytes) as advance:
        for step in scrub.steps():
            if isinstance(step, Finding):
                findings.append(step)
            else:
                advance(step.bytes_done)
    tell_scrub(ctx, store, scrub, findings, as_json=as_json)


def tell_scrub(
    ctx: click.Context, store: Store, scrub: Scrub, findings: list[Finding], *, as_json: bool
) -> None:
    """What was found, and the exit code."""
    counts = {
        severity: sum(finding.severity == severity for finding in findings)
        for severity in ("error", "warning", "note")
    }
    if as_json:
        print_json(_as_json(store, scrub, findings, sound=not counts["error"]))
    else:
        if findings:
            print_findings(findings, base=store.uri)
        told = ", ".join(_counted(count, severity) for severity, count in counts.items() if count)
        verdict = "damaged" if counts["error"] else "sound"
        looked = f"{number(scrub.objects)} objects, {size(scrub.stored_bytes)}"
        hwm = "nothing is recorded" if scrub.manifest is None else f"up to seq {scrub.manifest.hwm}"
        if scrub.seqs is not None:
            hwm = f"from seq {scrub.seqs[0]}" + (f" to {scrub.seqs[1]}" if scrub.seqs[1] < SEQ_MAX else " on")
        click.echo(f"{verdict}: {looked}, {hwm}" + (f"; {told}" if told else ""))
    exit_by(ctx, findings)


def _counted(count: int, severity: str) -> str:
    return f"{number(count)} {severity}{'' if count == 1 else 's'}"


def _as_json(store: Store, scrub: Scrub, findings: list[Finding], *, sound: bool) -> dict[str, Any]:
    manifest = scrub.manifest
    return {
        "uri": store.uri,
        "deep": scrub.deep,
        "sound": sound,
        "cluster_id": None if scrub.cluster_id is None else scrub.cluster_id.hex(),
        "epoch": None if manifest is None else manifest.epoch,
        "hwm": None if manifest is None else manifest.hwm,
        "manifest": None if manifest is None else manifest.name,
        **({} if scrub.seqs is None else {"seq_first": scrub.seqs[0], "seq_last": scrub.seqs[1]}),
        "objects": scrub.objects,
        "stored_bytes": scrub.stored_bytes,
        "bytes_read": scrub.bytes_read,
        "findings": [finding_as_json(finding) for finding in findings],
    }
