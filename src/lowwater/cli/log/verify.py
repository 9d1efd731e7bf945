"""`lowwater log verify`: check every byte of a log."""

from __future__ import annotations

import click

from lowwater.cli.log.findings import exit_by, finding_as_json, print_findings, total_bytes
from lowwater.cli.output import json_option, number, print_json, progress_bar, size
from lowwater.engine.check import Finding, check_directory_steps, check_segment_steps, require_log
from lowwater.engine.directory import typed_errors
from lowwater.engine.real import RealFiles
from lowwater.engine.walk import is_directory


@click.command()
@click.argument("path", type=click.Path())
@json_option
@click.pass_context
def verify(ctx: click.Context, path: str, as_json: bool) -> None:
    """Check every byte of a log, or of one segment.

    Frames, order, the chain of segments, footers and hashes. Nothing is changed.
    """
    files = RealFiles()
    if is_directory(files, path):
        require_log(files, path)
        steps = check_directory_steps(files, path)
    else:
        with typed_errors(path, "read the segment"):
            files.open(path).close()  # what is not there is no damage
        steps = check_segment_steps(files, path)
    findings: list[Finding] = []
    segments = entries = bytes_done = 0
    with progress_bar("verifying", lambda: total_bytes(path)) as advance:
        for step in steps:
            if isinstance(step, Finding):
                findings.append(step)
            else:
                segments += 1
                entries += step.frames
                bytes_done += step.bytes_done
                advance(step.bytes_done)
    errors = sum(finding.severity == "error" for finding in findings)
    if as_json:
        print_json(
            {
                "path": path,
                "sound": not errors,
                "segments": segments,
                "entries": entries,
                "bytes": bytes_done,
                "findings": [finding_as_json(finding) for finding in findings],
            }
        )
    else:
        if findings:
            print_findings(findings)
        verdict = "sound" if not errors else f"damaged: {errors} {'error' if errors == 1 else 'errors'}"
        amount = f"{number(segments)} segments, {number(entries)} entries, {size(bytes_done)}"
        click.echo(f"{verdict}: {amount}" if not errors else f"{verdict} in {amount} that could be read")
    exit_by(ctx, findings)
