"""`lowwater log verify`: check every byte of a log."""

from __future__ import annotations

from collections.abc import Iterator

import click

from lowwater.cli.log.findings import exit_by, finding_as_json, print_findings
from lowwater.cli.log.source import Source, opened_source
from lowwater.cli.output import json_option, number, print_json, progress_bar, size
from lowwater.engine.log.check import Finding, Step, check_directory_steps, check_segment_steps, require_log
from lowwater.engine.log.directory import typed_errors
from lowwater.engine.log.walk import is_directory


@click.command()
@click.argument("path", type=click.Path())
@json_option
@click.pass_context
def verify(ctx: click.Context, path: str, as_json: bool) -> None:
    """Check every byte of a log, or of one segment.

    It checks frames, order, the chain of segments, footers and hashes. Nothing is changed. Of an archive it
    checks what the segments hold; `lowwater scrub` checks what else the archive has.
    """
    findings: list[Finding] = []
    segments = entries = bytes_done = 0
    with opened_source(ctx, path) as source:
        with progress_bar("verifying", source.total_bytes) as advance:
            for step in _steps(source):
                if isinstance(step, Finding):
                    findings.append(step)
                else:
                    segments += 1
                    entries += step.frames
                    bytes_done += step.bytes_done
                    advance(step.bytes_done)
        findings = source.named(findings)
    errors = sum(finding.severity == "error" for finding in findings)
    if as_json:
        print_json(
            {
                "path": source.shown,
                "sound": not errors,
                "segments": segments,
                "entries": entries,
                "bytes": bytes_done,
                "findings": [finding_as_json(finding) for finding in findings],
            }
        )
    else:
        if findings:
            print_findings(findings, base=source.base)
        verdict = "sound" if not errors else f"damaged: {errors} {'error' if errors == 1 else 'errors'}"
        amount = f"{number(segments)} segments, {number(entries)} entries, {size(bytes_done)}"
        click.echo(f"{verdict}: {amount}" if not errors else f"{verdict} in {amount} that could be read")
    exit_by(ctx, findings)


def _steps(source: Source) -> Iterator[Step]:
    files, path = source.files, source.path
    if is_directory(files, path):
        require_log(files, path)
        return check_directory_steps(files, path)
    with typed_errors(path, "read the segment"):
        files.open(path).close()  # what is not there is no damage
    return check_segment_steps(files, path)
