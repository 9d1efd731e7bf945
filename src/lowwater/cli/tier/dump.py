"""`lowwater tier dump`: the rows of a manifest, or of a checkpoint, of an archive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from lowwater.cli.output import json_option, number, time, values_option, write_lines
from lowwater.cli.rows import print_rows
from lowwater.cli.tier.opened import opened_store
from lowwater.engine.format.ckpt import decode_named
from lowwater.engine.seams.real import RealClock
from lowwater.engine.state.catalogue import (
    Catalogue,
    CheckpointDescriptor,
    Fork,
    SegmentDescriptor,
    describe_checkpoint,
)
from lowwater.errors import InputError, LowwaterError
from lowwater.tiering.archive import open_archive
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.names import checkpoint_name, parse, segment_name
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint
from lowwater.tiering.store import Store, at, read_small


@click.command()
@click.argument("uri")
@click.argument("name")
@values_option
@json_option
@click.pass_context
def dump(ctx: click.Context, uri: str, name: str, values: str | None, as_json: bool) -> None:
    """Print the rows of a manifest or of a checkpoint, by its NAME as `lowwater tier ls --long` shows it. The
    rows of a manifest are the segments, checkpoints and forks that it reaches, those of a checkpoint its
    keys.

    Everything is compared with the hashes that lead to it. What is damaged ends the dump with an error, after
    all rows before it. With --json each row is a line of JSON. For segments, use `lowwater log dump`.
    """
    with opened_store(ctx, uri) as store:
        found = parse(name)
        kind = "other" if found is None else found.type
        if kind == "manifest":
            write_lines(_lines(_catalogue(store, name), as_json=as_json))
        elif kind == "checkpoint":
            fetcher = Fetcher(store, clock=RealClock())
            print_rows(_checkpoint(fetcher, store, name).rows(), values=values, as_json=as_json)
        else:
            hint = "give the name of a manifest or a checkpoint: `lowwater tier ls --long` lists them"
            if kind == "segment":
                hint = f"its entries are for `lowwater log dump {at(store.uri, name)}`"
            raise InputError("this object has no rows", path=at(store.uri, name), hint=hint)


def _catalogue(store: Store, name: str) -> Catalogue:
    archive = open_archive(store)
    return archive.catalogue_of(archive.read_manifest(name))


def _checkpoint(fetcher: Fetcher, store: Store, name: str) -> RemoteCheckpoint:
    data = read_small(store, name)
    try:
        decode_named(data, name.rpartition("/")[2])
        return RemoteCheckpoint(fetcher, describe_checkpoint(data))
    except LowwaterError as error:
        error.path = at(store.uri, name)
        raise


def _lines(catalogue: Catalogue, *, as_json: bool) -> Iterator[str]:
    for kind, records in (
        ("segment", catalogue.segments),
        ("checkpoint", catalogue.checkpoints),
        ("fork", catalogue.forks),
    ):
        for record in records:
            if as_json:
                yield json.dumps(_as_json(kind, record))
            else:
                yield f"{record.recorded_seq:>10}  {kind:<10}  {_as_text(record)}"


def _as_json(kind: str, record: SegmentDescriptor | CheckpointDescriptor | Fork) -> dict[str, Any]:
    """`docs/ARCHIVE.md` has the fields."""
    fields = {
        field: value.hex() if isinstance(value, bytes) else value for field, value in record._asdict().items()
    }
    return {"type": kind, "name": _name_of(record), **fields}


def _name_of(record: SegmentDescriptor | CheckpointDescriptor | Fork) -> str | None:
    if isinstance(record, SegmentDescriptor):
        return segment_name(record)
    return checkpoint_name(record) if isinstance(record, CheckpointDescriptor) else None


def _as_text(record: SegmentDescriptor | CheckpointDescriptor | Fork) -> str:
    if isinstance(record, Fork):
        return f"epoch {record.parent_epoch} to {record.epoch}, after seq {record.seq}"
    last_us = record.time_max_us if isinstance(record, SegmentDescriptor) else record.time_us
    return f"{_name_of(record)}  {number(record.size)} B  {time(last_us)}"
