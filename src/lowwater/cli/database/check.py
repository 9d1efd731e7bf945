"""`lowwater check`: every byte of a database, its log, its pages and its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click

from lowwater.cli.database.opened import log_directory
from lowwater.cli.log.findings import exit_by, finding_as_json, print_findings
from lowwater.cli.output import end_on_sigterm, json_option, print_json
from lowwater.engine.check import Finding, check_directory, require_log
from lowwater.engine.check_checkpoints import check_checkpoints
from lowwater.engine.check_pages import check_pages
from lowwater.engine.compact import PAGES_HINT, damage_of
from lowwater.engine.content import list_boundaries
from lowwater.engine.describe import describe_log
from lowwater.engine.directory import cluster_id_in
from lowwater.engine.lmdb_store import LmdbPages
from lowwater.engine.opening import PAGES_DIRECTORY
from lowwater.engine.pages import Boundaries
from lowwater.engine.real import RealFiles
from lowwater.engine.replay import read_meta
from lowwater.engine.swap import DATA
from lowwater.engine.values import ValueReader, segments_in
from lowwater.errors import LowwaterError, NotFound


@click.command()
@click.argument("path", type=click.Path())
@json_option
@click.pass_context
def check(ctx: click.Context, path: str, as_json: bool) -> None:
    """Check every byte of a database: its log, its pages, the large values that pages refer to, and its
    checkpoints.

    The directory may be open elsewhere; nothing is changed. The exit code is 0 when all is well, and 65 when
    data is damaged or missing. What is wrong with pages alone costs nothing: they are made from the log.
    """
    end_on_sigterm(ctx)
    log = log_directory(ctx, path)
    require_log(RealFiles(), log)
    findings = [*check_directory(RealFiles(), log), *_of_pages(path, log)]
    errors = sum(finding.severity == "error" for finding in findings)
    if as_json:
        print_json(
            {"path": path, "sound": not errors, "findings": [finding_as_json(each) for each in findings]}
        )
    else:
        if findings:
            print_findings(findings)
        click.echo("sound" if not errors else f"damaged: {errors} {'error' if errors == 1 else 'errors'}")
    exit_by(ctx, findings)


def _of_pages(directory: str, log: str) -> Iterator[Finding]:
    """What is wrong with pages, and with the checkpoints that were made of them."""
    files = RealFiles()
    path = f"{directory}/{PAGES_DIRECTORY}"
    if not os.path.isdir(path):
        return  # they are made when the database is opened
    try:
        # LMDB trusts what it maps, and could end this process where the file is damaged.
        damage = damage_of(files, path)
        if damage:
            yield from (Finding("error", why, f"{path}/{DATA}", None, None, PAGES_HINT) for why in damage)
            return
        store = LmdbPages.open(path, read_only=True)
    except NotFound:
        return  # they are made when the database is opened
    except LowwaterError as error:
        yield Finding.of(error, path)
        return
    values = ValueReader(segments_in(files, log), log)
    try:
        meta = read_meta(store.read_meta(), path)
        if meta is not None:
            cluster_id = meta.cluster_id
            yield from check_pages(
                store,
                path,
                boundaries=Boundaries(meta.salt, meta.page_keys),
                seq_durable=lambda: max(
                    (each.seq_last or 0 for each in describe_log(files, log).segments), default=0
                ),
                read_value=values.read,
            )
            yield from check_checkpoints(
                files,
                directory,
                cluster_id_at=lambda seq: cluster_id_in(files, log, seq) or cluster_id,
                begins_block=Boundaries(meta.salt, meta.page_keys).is_boundary,
                begins_list=list_boundaries(meta.salt, meta.page_keys).is_boundary,
            )
    except LowwaterError as error:
        yield Finding.of(error, path)
    finally:
        values.close()
        store.close()
