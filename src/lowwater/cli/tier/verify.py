"""`lowwater tier verify`: every byte of a part of an archive."""

from __future__ import annotations

import click

from lowwater.cli.log.dump import Seq
from lowwater.cli.log.findings import exit_by, finding_as_json, print_findings
from lowwater.cli.output import json_option, print_json
from lowwater.cli.tier.opened import opened_store, run_scrub
from lowwater.engine.format.format import SEQ_MAX
from lowwater.engine.log.check import Finding
from lowwater.errors import DataError, NewerVersion
from lowwater.tiering.scrub import Scrub
from lowwater.tiering.store import Store
from lowwater.tiering.verify import ObjectFile, verify_object


@click.command()
@click.argument("uri")
@click.argument("name", required=False)
@click.option("--from", "seq_first", type=Seq(), help="Segments, checkpoints and manifests from this seq on.")
@click.option("--to", "seq_last", type=Seq(), help="... and up to this seq.")
@json_option
@click.pass_context
def verify(
    ctx: click.Context, uri: str, name: str | None, seq_first: int | None, seq_last: int | None, as_json: bool
) -> None:
    """Verify every byte of one object, by its NAME as `lowwater tier ls --long` shows it, or of all objects
    of a range of seqs.

    A range is compared with the catalogue, as a scrub does. A single object is compared with what its name
    says.
    """
    is_range = seq_first is not None or seq_last is not None
    if is_range == (name is not None):
        raise click.UsageError("Give either NAME or a range: --from, --to or both.")
    with opened_store(ctx, uri) as store:
        if name is not None:
            _verify_one(ctx, store, name, as_json=as_json)
            return
        seqs = (seq_first or 0, SEQ_MAX if seq_last is None else seq_last)
        if seqs[0] > seqs[1]:
            raise click.UsageError("--from is above --to.")
        run_scrub(ctx, store, Scrub(store, deep=True, seqs=seqs), as_json=as_json)


def _verify_one(ctx: click.Context, store: Store, name: str, *, as_json: bool) -> None:
    file = ObjectFile(store, name)  # NotFound where there is none
    findings: list[Finding] = []
    try:
        verify_object(name, file, uri=store.uri)
    except (DataError, NewerVersion) as error:
        findings.append(Finding.of(error, name))
    if as_json:
        print_json(
            {
                "uri": store.uri,
                "name": name,
                "stored_bytes": file.size(),
                "sound": not findings,
                "findings": [finding_as_json(finding) for finding in findings],
            }
        )
    else:
        if findings:
            print_findings(findings, base=store.uri)
        click.echo("damaged: 1 error" if findings else "sound")
    exit_by(ctx, findings)
