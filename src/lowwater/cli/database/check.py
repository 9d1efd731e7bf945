"""`lowwater check`: every byte of a database, its log, its pages and its checkpoints; or of an archive."""

from __future__ import annotations

import click

from lowwater.cli.log.findings import exit_by, finding_as_json, print_findings
from lowwater.cli.output import end_on_sigterm, json_option, print_json
from lowwater.errors import without_secrets
from lowwater.tiering.checking import check as check_it


@click.command()
@click.argument("path", type=click.Path())
@json_option
@click.pass_context
def check(ctx: click.Context, path: str, as_json: bool) -> None:
    """Check every byte of a database: its log, its pages, the large values that pages refer to, and its
    checkpoints. For an archive, given by its URI, check what `lowwater scrub --deep` checks.

    The directory may be open elsewhere; nothing is changed. The exit code is 0 when all is well, 65 when data
    is damaged or missing, and 77 when something may not be read: nothing is known of that then. What is found
    sound opens.
    """
    end_on_sigterm(ctx)
    findings = list(check_it(path, config=ctx.find_root().obj))
    errors = sum(finding.severity == "error" for finding in findings)
    if as_json:
        print_json(
            {
                "path": without_secrets(path),
                "sound": not errors,
                "findings": [finding_as_json(each) for each in findings],
            }
        )
    else:
        if findings:
            print_findings(findings)
        click.echo("sound" if not errors else f"damaged: {errors} {'error' if errors == 1 else 'errors'}")
    exit_by(ctx, findings)
