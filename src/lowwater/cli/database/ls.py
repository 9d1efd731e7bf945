"""`lowwater ls`: the buckets of a database, or the keys of a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from itertools import islice

import click

from lowwater.cli.database.opened import opened
from lowwater.cli.log.dump import Moment
from lowwater.cli.output import LIMIT, LocalPath, json_option, size, standard_output, time, visible
from lowwater.engine.database.reads import Reads
from lowwater.engine.format.records import Head


@click.command()
@click.argument("path", type=LocalPath())
@click.argument("bucket", required=False)
@click.argument("prefix", default="")
@click.option("--delimiter", help="Show keys that have this after the prefix as one, up to it.")
@click.option("--at", type=Moment(), help="As of this seq or time, where versions go back so far.")
@click.option("--limit", type=LIMIT, metavar="N", help="End after so many.")
@json_option
@click.pass_context
def ls(
    ctx: click.Context, path: str, bucket: str | None, prefix: str, delimiter: str | None,
    at: int | datetime | None, limit: int | None, as_json: bool,
) -> None:  # fmt: skip
    """List the buckets, or the keys of a bucket that begin with PREFIX: seq, time, size and key.

    With --json each is a line of JSON.

    The directory must not be open elsewhere. Opening it finishes what a crash has left undone.
    """
    out = standard_output()
    with opened(ctx, path) as db:
        if bucket is None:
            names = db.buckets(at)
            lines = (json.dumps({"bucket": name}) if as_json else visible(name) for name in names)
        else:
            # One moment for all pages.
            seq = db.seq_at(at) if isinstance(at, datetime) else at
            found = _found(db, bucket, prefix, delimiter, seq)
            lines = (_as_json(each) if as_json else _as_text(each) for each in found)
        for line in islice(lines, limit):
            out.write(line + "\n")
        out.flush()


def _found(
    db: Reads, bucket: str, prefix: str, delimiter: str | None, at: int | None
) -> Iterator[Head | str]:
    """Keys and prefixes, page by page, those of a page in one order."""
    start_after: str | None = None
    while True:
        page = db.list(bucket, prefix, delimiter, start_after, at=at)
        found: list[Head | str] = [*page.objects, *page.prefixes]
        yield from sorted(found, key=lambda each: each if isinstance(each, str) else each.key)
        if page.next is None:
            return
        start_after = page.next


def _as_json(found: Head | str) -> str:
    if isinstance(found, str):
        return json.dumps({"prefix": found})
    return json.dumps(
        {
            "key": found.key,
            "seq": found.seq,
            "time_us": found.time_us,
            "value_bytes": found.size_bytes,
            "metadata": found.metadata or {},
        }
    )


def _as_text(found: Head | str) -> str:
    if isinstance(found, str):
        return f"{'':>12}  {'':20}  {'':>10}  {visible(found)}"
    return (
        f"{found.seq:>12}  {time(found.time_us, timespec='seconds'):20}  "
        f"{size(found.size_bytes):>10}  {visible(found.key)}"
    )
