"""`lowwater tier status`: how far an archive goes, and how far a directory is ahead of it."""

from __future__ import annotations

from typing import Any

import click

from lowwater.cli.output import json_option, number, print_json, size, time
from lowwater.cli.tier.opened import opened_store
from lowwater.config import Config
from lowwater.engine.database.origin import log_directory_of
from lowwater.engine.seams.real import RealFiles
from lowwater.errors import InvalidConfig
from lowwater.tiering.checking import is_archive
from lowwater.tiering.status import ArchiveStatus, Lag, archive_status, lag_of


@click.command()
@click.argument("place", metavar="DIR|URI")
@click.option("--tier", "uri", help="Of a directory: its archive, where the configuration does not say.")
@json_option
@click.pass_context
def status(ctx: click.Context, place: str, uri: str | None, as_json: bool) -> None:
    """Show whose archive it is, its epochs, up to which seq everything is shipped (the high-water mark), its
    newest manifest and checkpoint; and for the directory of a database, how much is not shipped yet.

    The directory may be open elsewhere. The lag in seconds is the time between the last entry that is
    recorded as shipped and the last one of the log.
    """
    config = Config.load(ctx.find_root().obj)
    log: str | None = None
    if is_archive(place):
        if uri is not None:
            raise click.UsageError("--tier belongs to a directory, and this is an archive already.")
        uri = place
    else:
        log = log_directory_of(RealFiles(), place, config.wal.dir)
        uri = uri or config.tier.store_uri()
        if uri is None:
            raise InvalidConfig(
                "it is not known where the archive of this directory is",
                path=place,
                hint="give --tier URI, or a configuration with tier.uri by --config",
            )
    with opened_store(ctx, uri) as store:
        found = archive_status(store)
    lag = None if log is None else lag_of(RealFiles(), log, found)
    if as_json:
        print_json(_as_json(found) | {"lag": None if lag is None else lag._asdict()})
    else:
        _print(found, lag)


def _as_json(found: ArchiveStatus) -> dict[str, Any]:
    checkpoint = found.checkpoint
    document = found._asdict() | {"cluster_id": found.cluster_id.hex()}
    document["checkpoint"] = checkpoint and {
        "id": checkpoint.id,
        "seq": checkpoint.seq,
        "time_us": checkpoint.time_us,
        "root": checkpoint.root.hex(),
    }
    return document


def _print(found: ArchiveStatus, lag: Lag | None) -> None:
    epochs = ", ".join(map(str, found.epochs)) or "none"
    rows = [("archive", found.uri), ("cluster", found.cluster_id.hex()), ("epochs", epochs)]
    if found.epoch_claimed is not None and found.epoch_claimed > (found.epoch or 0):
        rows.append(("claimed", f"epoch {found.epoch_claimed}, in which nothing is published yet"))
    rows.append(("shipped", f"up to seq {found.hwm}" if found.segments else "nothing is recorded yet"))
    if found.segments:
        entries = f"{number(found.entries)} entries, {size(found.raw_bytes)} before compression"
        rows.append(("segments", f"{number(found.segments)}, {entries}"))
        rows.append(("last entry", time(found.time_us)))
    if found.manifest is not None:
        rows.append(("manifest", found.manifest))
    if found.checkpoint is not None:
        rows.append(("checkpoints", f"{number(found.checkpoints)}, the newest of seq {found.checkpoint.seq}"))
        rows.append(("root", found.checkpoint.root.hex()))
    if found.segments_beyond:
        beyond = f"{number(found.segments_beyond)} segments, up to seq {found.seq_beyond}"
        rows.append(("not recorded", f"{beyond}: a restore goes on with them"))
    if lag is not None:
        rows.append(("log", f"up to seq {lag.seq_last}"))
        behind = f"{number(lag.entries)} entries, {size(lag.body_bytes)}, {lag.lag_us / 1e6:,.1f} s"
        rows.append(("lag", behind if lag.entries else "none: everything is shipped"))
    for name, text in rows:
        click.echo(f"{name:<13} {text}")
