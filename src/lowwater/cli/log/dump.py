"""`lowwater log dump`: the entries of a log, as lines or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from lowwater.cli.log.findings import exit_by, finding_as_json
from lowwater.cli.log.source import Source, opened_source
from lowwater.cli.output import (
    LIMIT,
    VALUES,
    chosen_values,
    in_base64,
    json_option,
    time,
    values_option,
    visible,
    write_lines,
)
from lowwater.engine.format.before_images import BeforeImage
from lowwater.engine.format.entries import Entry, decode_body
from lowwater.engine.format.format import KIND_CODES, SEQ_MAX
from lowwater.engine.log.chain import FIRST_CONTROL_KIND
from lowwater.engine.log.check import Finding
from lowwater.engine.log.dump import Selection, dump_entries
from lowwater.errors import Corrupt, NewerVersion

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NUMBER_DIGITS_MAX = 100


def is_number(text: str) -> bool:
    """Whether it is a number that `int` takes: of thousands of digits it takes none."""
    return text.isdecimal() and len(text) <= NUMBER_DIGITS_MAX


class Seq(click.ParamType[int]):
    """A place in the log."""

    name = "seq"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if not is_number(text) or int(text) > SEQ_MAX:
            self.fail(f"{text!r:.80} is no seq: give a whole number from 0 to {SEQ_MAX}", param, ctx)
        return int(text)


class Time(click.ParamType[int]):
    """A time as people write it, in microseconds since 1970."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value)
        if is_number(text):
            return min(int(text), SEQ_MAX)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            self.fail(
                f"{text!r:.80} is no time: give 2026-01-31, 2026-01-31T12:00:00Z, or microseconds since 1970",
                param,
                ctx,
            )
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return max(0, (moment - _EPOCH) // timedelta(microseconds=1))


class Moment(click.ParamType[int | datetime]):
    """A seq, or a time as people write it."""

    name = "seq or time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | datetime:
        text = str(value)
        if is_number(text) and int(text) <= SEQ_MAX:
            return int(text)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            self.fail(
                f"{text!r:.80} is no moment: give a seq, 2026-01-31, or 2026-01-31T12:00:00Z", param, ctx
            )
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


@click.command()
@click.argument("path", type=click.Path())
@click.option("--from", "seq_first", type=Seq(), default=0, help="The lowest seq.")
@click.option("--to", "seq_last", type=Seq(), default=SEQ_MAX, help="The highest seq.")
@click.option("--since", type=Time(), default=0, help="No entries before this time; without a zone, UTC.")
@click.option("--until", type=Time(), default=SEQ_MAX + 1, help="No entries at or after this time.")
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(list(KIND_CODES)),
    multiple=True,
    metavar="KIND",
    help="Only entries of this kind (put, delete, append, create ...). May be repeated.",
)
@click.option("--bucket", help="Only entries of this bucket; of a stream, its topic.")
@click.option("--key", help="Only what was done to this key. Quick with --bucket, by the key index.")
@click.option("--prefix", help="Only entries whose key begins with this.")
@click.option("--limit", type=LIMIT, metavar="N", help="End after so many entries.")
@values_option
@click.option(
    "--salvage", is_flag=True, help="Go on after damage with the next whole entry, and tell what was skipped."
)
@json_option
@click.pass_context
def dump(
    ctx: click.Context, path: str, seq_first: int, seq_last: int, since: int, until: int,
    kinds: tuple[str, ...], bucket: str | None, key: str | None, prefix: str | None, limit: int | None,
    values: str | None, salvage: bool, as_json: bool,
) -> None:  # fmt: skip
    """Print the entries of a log, or of one segment, in their order.

    The first damage that is met ends the dump with an error, after all entries before it; with --salvage it
    goes on. With --json each entry is a line of JSON.
    """
    if key is not None and prefix is not None:
        raise click.UsageError("--key and --prefix exclude each other.")
    selection = Selection(
        seq_first=seq_first,
        seq_last=seq_last,
        time_first_us=since,
        time_stop_us=until,
        kinds=frozenset(int(KIND_CODES[kind]) for kind in kinds),
        bucket=bucket,
        key=key,
        key_prefix=prefix,
    )
    print_entries(ctx, path, selection, limit=limit, values=values, as_json=as_json, salvage=salvage)


def print_entries(
    ctx: click.Context,
    path: str,
    selection: Selection,
    *,
    limit: int | None,
    values: str | None,
    as_json: bool,
    salvage: bool = False,
) -> None:
    """The wanted entries, as lines."""
    shown = chosen_values(values, as_json=as_json)
    findings: list[Finding] = []
    with opened_source(ctx, path) as source:
        lines = _lines(
            dump_entries(source.files, source.path, selection, salvage=salvage),
            findings,
            source,
            limit=limit,
            as_json=as_json,
            values=shown,
        )
        write_lines(lines)
    exit_by(ctx, findings)


def _lines(
    entries: Iterator[Entry | Finding],
    findings: list[Finding],
    source: Source,
    *,
    limit: int | None,
    as_json: bool,
    values: str,
) -> Iterator[str]:
    count = 0
    for item in entries:
        if isinstance(item, Finding):
            findings += source.named([item])
            _tell(findings[-1], as_json=as_json)
            continue
        if as_json:
            yield json.dumps(entry_as_json(item, with_value=values != "none"))
        else:
            yield entry_as_text(item, values=values)
        count += 1
        if count == limit:
            return


def _tell(finding: Finding, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(finding_as_json(finding)), err=True)
        return
    fields = (("path", finding.where), ("seq", finding.seq), ("offset", finding.offset))
    where = ", ".join(f"{name} {value}" for name, value in fields if value is not None)
    click.echo(f"damaged: {visible(finding.what)} ({visible(where)})", err=True)


# ---------------------------------------------------------------------------- entries


def entry_as_json(entry: Entry, *, with_value: bool) -> dict[str, Any]:
    """The fields that an entry has; `docs/operating/log-tools.md` promises them."""
    document: dict[str, Any] = {"seq": entry.seq, "kind": entry.kind, "time_us": entry.time_us}
    if entry.bucket:
        document["bucket"] = entry.bucket
    if entry.key or entry.kind in _WITH_KEY:
        document["key"] = entry.key
    if entry.metadata:
        document["metadata"] = entry.metadata
    if entry.origin:
        document["origin"] = entry.origin
    extras = entry.extras
    if extras is not None:
        for name, value in extras._asdict().items():
            if value is None or (name == "txn_seq_before" and extras.txn is None):
                continue
            if name == "request" and extras.session is None:
                continue
            document[name] = _plain(value, name)
    if (image := _image_of(entry)) is not None:
        document["before_image"] = _image_as_json(image, with_value=with_value)
    if (body := _body(entry)) is not None:
        document["body"] = body
    document["value_bytes"] = len(entry.value)
    if with_value:
        document["value"] = in_base64(entry.value)
    return document


_WITH_KEY = ("put", "delete", "copy", "append")


def _plain(value: Any, name: str) -> Any:
    if name == "value_ref":
        return value._asdict() | {"blake3": value.blake3.hex()}
    if isinstance(value, bytes):
        return in_base64(value) if name == "before" else value.hex()
    return value


def _image_of(entry: Entry) -> BeforeImage | None:
    """What the key had before; None where the frame does not say so, or in a way that is not known."""
    try:
        return entry.before
    except (Corrupt, NewerVersion):
        return None


def _image_as_json(image: BeforeImage, *, with_value: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"seq": image.seq}
    if image.seq:
        document |= {"time_us": image.time_us, "value_bytes": image.value_bytes}
    if image.metadata:
        document["metadata"] = image.metadata
    if image.blake3 is not None:
        document["blake3"] = image.blake3.hex()
    if with_value and image.value is not None:
        document["value"] = in_base64(image.value)
    return document


def _image_as_text(image: BeforeImage, *, values: str) -> str:
    if not image.seq:
        return "before=nothing"
    parts = [f"before={image.seq}"]
    if image.metadata:
        parts.append(visible(json.dumps(image.metadata, ensure_ascii=False)))
    if image.value is None:
        parts.append(f"{image.value_bytes} B")
    elif image.value:
        parts.append(VALUES[values](image.value))
    return "  ".join(parts)


def _body(entry: Entry) -> Any:
    """What a control entry says, with bytes as hex; None where it says nothing that can be read."""
    if KIND_CODES[entry.kind] < FIRST_CONTROL_KIND or not entry.value:
        return None
    try:
        return _jsonable(decode_body(entry))
    except Corrupt:
        return None


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def entry_as_text(entry: Entry, *, values: str) -> str:
    """One line: seq, time, kind, what it is about, and the rest by name."""
    parts = [f"{entry.seq:>10}  {time(entry.time_us)}  {entry.kind:<13}"]
    if entry.bucket:
        parts.append(visible(f"{entry.bucket}/{entry.key}" if entry.key else entry.bucket))
    document = entry_as_json(entry, with_value=False)
    for name in ("origin", *_TOLD):
        if name in document:
            value = document[name]
            parts.append(f"{name}={value if isinstance(value, int | str) else json.dumps(value)}")
    if (image := _image_of(entry)) is not None:
        parts.append(_image_as_text(image, values=values))
    elif "before" in document:
        parts.append(f"before={document['before']}")
    if entry.metadata:
        parts.append(visible(json.dumps(entry.metadata, ensure_ascii=False)))
    if "body" in document:
        parts.append(visible(json.dumps(document["body"], ensure_ascii=False)))
    elif entry.value:
        parts.append(VALUES[values](entry.value))
    return "  ".join(parts).rstrip()


_TOLD = (
    "txn", "txn_seq_before", "group_seq_last", "session", "request", "request_hash", "stream_offset",
    "refused", "value_ref",
)  # fmt: skip
