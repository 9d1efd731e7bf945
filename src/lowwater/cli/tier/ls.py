"""`lowwater tier ls`: the objects of an archive."""

from __future__ import annotations

from typing import Any

import click

from lowwater.cli.output import json_option, new_table, number, print_json, print_table, size, visible
from lowwater.cli.tier.opened import opened_store
from lowwater.errors import NotFound
from lowwater.tiering.names import ObjectName, parse
from lowwater.tiering.store import FoundObject

TYPES = ("cluster", "epoch", "state", "segment", "manifest", "chunk", "checkpoint", "pack", "other")


@click.command()
@click.argument("uri")
@click.option("--type", "kinds", type=click.Choice(TYPES), multiple=True, help="Only these. May be repeated.")
@click.option("--long", "as_list", is_flag=True, help="Every object, with its name and size.")
@json_option
@click.pass_context
def ls(ctx: click.Context, uri: str, kinds: tuple[str, ...], as_list: bool, as_json: bool) -> None:
    """List the objects of an archive by type, with their sizes in the store.

    That an object is listed is no proof that it counts, or that it is sound: `lowwater scrub` tells that.
    """
    listed: list[tuple[FoundObject, str, ObjectName | None]] = []
    totals: dict[str, list[int]] = {}
    with opened_store(ctx, uri) as store:
        is_empty = True
        for found in store.list():
            is_empty = False
            parsed = parse(found.name)
            kind: str = "other" if parsed is None else parsed.type
            if kinds and kind not in kinds:
                continue
            total = totals.setdefault(kind, [0, 0])
            total[0] += 1
            total[1] += found.size
            if as_list:
                listed.append((found, kind, parsed))
        if is_empty:
            raise NotFound("there is nothing here", path=store.uri, hint="check bucket and prefix")
        if as_json:
            print_json(_as_json(store.uri, totals, listed if as_list else None))
            return
    if as_list:
        table = new_table("type", "size", "name", right=("size",))
        for found, kind, _ in listed:
            table.add_row(kind, number(found.size), visible(found.name))
    else:
        table = new_table("type", "objects", "size", right=("objects", "size"))
        for kind in filter(totals.__contains__, TYPES):
            table.add_row(kind, number(totals[kind][0]), size(totals[kind][1]))
    print_table(table)


def _as_json(
    uri: str, totals: dict[str, list[int]], listed: list[tuple[FoundObject, str, ObjectName | None]] | None
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "uri": uri,
        "types": {
            kind: {"objects": totals[kind][0], "stored_bytes": totals[kind][1]}
            for kind in TYPES
            if kind in totals
        },
    }
    if listed is not None:
        document["objects"] = [_object_as_json(*each) for each in listed]
    return document


def _object_as_json(found: FoundObject, kind: str, parsed: ObjectName | None) -> dict[str, Any]:
    """What its name says; null where it says nothing of the kind."""
    return {
        "name": found.name,
        "type": kind,
        "stored_bytes": found.size,
        "epoch": None if parsed is None else parsed.epoch or None,
        "seq": None if parsed is None else parsed.seq or None,
        "seq_last": None if parsed is None else parsed.seq_last or None,
        "hash": None if parsed is None else parsed.hash or None,
    }
