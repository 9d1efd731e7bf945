"""`lowwater pages`: what pages a database has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import click

from lowwater.cli.output import (
    LIMIT,
    LocalPath,
    end_on_sigterm,
    json_option,
    new_table,
    number,
    print_json,
    print_table,
    size,
    standard_output,
    values_option,
    visible,
    write_lines,
)
from lowwater.cli.rows import row_writer
from lowwater.engine.database.opening import PAGES_DIRECTORY
from lowwater.engine.format import format
from lowwater.engine.format.format import BUCKET_BYTES_MAX, KEY_BYTES_MAX
from lowwater.engine.format.keys import KEY_END, after_prefix, bucket_range, decode_key, encode_key
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.engine.pages.page_list import PageInfo, PageRow, Summary, list_pages, list_rows
from lowwater.errors import Corrupt, DataError, InputError

COLUMNS = ("first key", "last key", "keys", "rows", "deleted", "large", "bytes", "seq")


@click.command()
@click.argument("path", type=LocalPath())
@click.option("--bucket", help="Only pages that may hold keys of this bucket.")
@click.option("--key", help="Of the bucket: only the page that a key belongs to.")
@click.option("--prefix", help="Of the bucket: only pages that may hold keys that begin so.")
@click.option("--summary", is_flag=True, help="All of them together, with how many rows and bytes they have.")
@click.option("--rows", "with_rows", is_flag=True, help="The rows of these pages instead, a line each.")
@values_option
@click.option("--limit", type=LIMIT, metavar="N", help="End after so many pages.")
@json_option
@click.pass_context
def pages(
    ctx: click.Context, path: str, bucket: str | None, key: str | None, prefix: str | None, summary: bool,
    with_rows: bool, values: str | None, limit: int | None, as_json: bool,
) -> None:  # fmt: skip
    """List the pages that are stored: from which key to which, how many keys and rows (versions of keys),
    deletions and references to large values among them, how many bytes, and the seq up to which they hold
    every change. What is in memory only, or in the log, is not in them yet.

    With --rows it prints what is in these pages: each version of each key, with its seq, its time and its
    value. With --json each page, or row, is a line of JSON. Exits with 65 where a page cannot be read.

    The directory may be open elsewhere; nothing is changed. Where the file itself may be damaged, run
    `lowwater check` first.
    """
    end_on_sigterm(ctx)
    low, high = _range(bucket, key, prefix)
    if with_rows and summary:
        raise InputError("--rows and --summary were given", hint="give one of the two")
    if with_rows:
        line_of = row_writer(values=values, as_json=as_json)
    elif values is not None:
        raise InputError("only rows have values", hint="give --rows too")
    store = LmdbPages.open(f"{path}/{PAGES_DIRECTORY}", read_only=True)
    total = Summary()
    table = new_table(*COLUMNS, right=COLUMNS[2:])
    out = standard_output()
    try:
        if with_rows:
            rows = islice(list_rows(store, low, high), limit)
            write_lines(_row_lines(rows, total, line_of, as_json=as_json))
        else:
            for page in islice(list_pages(store, low, high), limit):
                total.add(page)
                if as_json and not summary:
                    out.write(json.dumps(_as_json(page)) + "\n")
                elif not summary:
                    table.add_row(*_as_row(page))
    finally:
        store.close()
    if summary:
        _print_summary(path, total, as_json=as_json)
    elif not (as_json or with_rows):
        print_table(table)
    if total.damaged:
        ctx.exit(DataError.exit_code)


def _row_lines(
    pages: Iterable[PageInfo | Iterator[PageRow]],
    total: Summary,
    line_of: Callable[[PageRow], str],
    *,
    as_json: bool,
) -> Iterator[str]:
    for each in pages:
        if not isinstance(each, PageInfo):
            yield from map(line_of, each)
            continue
        total.add(each)
        if as_json:
            yield json.dumps(_as_json(each))
        else:
            what = each.problem or f"{each.rows} rows, in the archive"
            yield f"the page from {_shown(each.low)}: {visible(what)}"


def _range(bucket: str | None, key: str | None, prefix: str | None) -> tuple[bytes, bytes]:
    if bucket is None:
        if key is not None or prefix is not None:
            raise InputError("a key without its bucket says nothing", hint="give --bucket too")
        return b"", KEY_END
    if key is not None and prefix is not None:
        raise InputError("--key and --prefix were given", hint="give one of the two")
    name = format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
    if key is not None:
        encoded = encode_key(name, format.encode_name(key, "key", KEY_BYTES_MAX))
        return encoded, encoded + b"\0"
    if prefix:
        low = encode_key(name, format.encode_name(prefix, "prefix", KEY_BYTES_MAX))
        return low, after_prefix(low)
    return bucket_range(name)


def _names(encoded: bytes) -> tuple[str, str]:
    """Bucket and key. A page key may end inside a letter, and the first one has no key."""
    try:
        bucket, key = decode_key(encoded)
    except Corrupt:
        return "", ""
    return bucket.decode(errors="replace"), key.decode(errors="replace")


def _shown(encoded: bytes) -> str:
    bucket, key = _names(encoded)
    return visible(f"{bucket}/{key}")


def _as_row(page: PageInfo) -> tuple[str, ...]:
    if page.problem is not None:
        return _shown(page.low), visible(page.problem), "", "", "", "", number(page.bytes), ""
    return (
        _shown(page.key_first),
        "in the archive" if page.is_away else _shown(page.key_last),
        number(page.keys),
        number(page.rows),
        number(page.deleted),
        number(page.large),
        number(page.bytes),
        str(page.seq),
    )


def _as_json(page: PageInfo) -> dict[str, Any]:
    bucket, key_first = _names(page.key_first)
    bucket_last, key_last = _names(page.key_last)
    return {
        "page_key": page.low.hex(),
        "bucket_first": bucket,
        "key_first": key_first,
        "bucket_last": bucket_last,
        "key_last": key_last,
        "keys": page.keys,
        "rows": page.rows,
        "deleted": page.deleted,
        "large": page.large,
        "buckets": page.buckets,
        "bytes": page.bytes,
        "seq": page.seq,
        "away": page.is_away,
        "problem": page.problem,
    }


def _print_summary(path: str, total: Summary, *, as_json: bool) -> None:
    if as_json:
        fields = {name: value for name, value in vars(total).items() if not name.startswith("by_")}
        histograms = {
            name: [{"from": floor, "pages": count} for floor, count in sorted(histogram.items())]
            for name, histogram in (("by_rows", total.by_rows), ("by_bytes", total.by_bytes))
        }
        print_json({"path": path, **fields, **histograms})
        return
    click.echo(
        f"{number(total.pages)} pages, {size(total.bytes)}: {number(total.keys)} keys, "
        f"{number(total.rows)} rows, {number(total.deleted)} of them deletions and "
        f"{number(total.large)} references to large values; seq {total.seq_first} to {total.seq_last}"
    )
    if total.away:
        click.echo(f"in the archive: {number(total.away)} pages, of which there are references here")
    if total.damaged:
        click.echo(f"damaged: {number(total.damaged)} pages cannot be read")
    for what, histogram, show in (("rows", total.by_rows, number), ("bytes", total.by_bytes, size)):
        table = new_table(f"{what}, from", "pages", "", right=(f"{what}, from", "pages"))
        most = max(histogram.values(), default=1)
        for floor, count in sorted(histogram.items()):
            table.add_row(show(floor), number(count), "█" * max(1, count * 40 // most))
        print_table(table)
