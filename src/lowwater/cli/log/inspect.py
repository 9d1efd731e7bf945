"""`lowwater log inspect`: what a log, or one segment, consists of."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from lowwater.cli.log.findings import exit_by, finding_as_json, print_findings
from lowwater.cli.log.source import Source, opened_source
from lowwater.cli.output import json_option, new_table, number, print_json, print_table, size, time, visible
from lowwater.engine.format.format import Compression
from lowwater.engine.log.check import Finding
from lowwater.engine.log.describe import LogDescription, SegmentDescription, describe_log, describe_segment
from lowwater.engine.log.walk import is_directory


@click.command()
@click.argument("path", type=click.Path())
@json_option
@click.pass_context
def inspect(ctx: click.Context, path: str, as_json: bool) -> None:
    """Show what a log, or one segment, consists of.

    Of sealed segments only the ends are read, so this is quick however large the log is; to know whether it
    is sound, use verify. What cannot be read is listed below what can.
    """
    with opened_source(ctx, path) as source:
        findings = _inspect(source, as_json=as_json)
    if findings and not as_json:
        print_findings(findings, base=source.base)
    exit_by(ctx, findings)


def _inspect(source: Source, *, as_json: bool) -> list[Finding]:
    if is_directory(source.files, source.path):
        log = describe_log(source.files, source.path)
        log.path, log.findings = source.shown, source.named(log.findings)
        if as_json:
            print_json(_log_as_json(log))
        else:
            _print_log(log)
        return log.findings
    segment = describe_segment(source.files, source.path)
    segment.findings = source.named(segment.findings)
    segment.path = source.shown
    if as_json:
        print_json(_segment_as_json(segment, alone=True))
    else:
        _print_segment(segment)
    return segment.findings


# ---------------------------------------------------------------------------- JSON


def _log_as_json(log: LogDescription) -> dict[str, Any]:
    settings = None
    if log.settings is not None:
        settings = log.settings._asdict() | {"compression": _compression(log.settings.compression)}
    return {
        "path": log.path,
        "cluster_id": None if log.cluster_id is None else log.cluster_id.hex(),
        "epoch": log.epoch,
        "settings": settings,
        "seq_first": log.seq_first,
        "seq_last": log.seq_last,
        "entries": log.frames,
        "body_bytes": log.body_bytes,
        "hint": None if log.hint is None else asdict(log.hint),
        "segments": [_segment_as_json(segment) for segment in log.segments],
        "findings": [finding_as_json(finding) for finding in log.findings],
    }


def _segment_as_json(segment: SegmentDescription, *, alone: bool = False) -> dict[str, Any]:
    document: dict[str, Any] = {
        "path" if alone else "name": segment.path if alone else segment.name,
        "state": segment.state,
        "seq_first": segment.seq_first,
        "seq_last": segment.seq_last,
        "entries": segment.frames,
        "file_bytes": segment.file_bytes,
        "body_bytes": segment.body_bytes,
        "time_first_us": segment.time_first_us,
        "time_last_us": segment.time_last_us,
        "epoch": None if segment.header is None else segment.header.epoch,
        "hash": None if segment.segment_hash is None else segment.segment_hash.hex(),
        "follows": segment.follows,
        "torn_bytes": segment.torn_bytes,
    }
    if alone:
        document["compressed_bytes"] = segment.compressed_bytes
        document["header"] = _fields(segment.header)
        document["trailer"] = _fields(segment.trailer)
        document["keys"] = segment.keys
        document["kinds"] = segment.kinds
        document["streams"] = [asdict(stream) for stream in segment.streams]
        document["findings"] = [finding_as_json(finding) for finding in segment.findings]
    return document


def _fields(record: Any) -> dict[str, Any] | None:
    """A header or trailer, its bytes as hex."""
    if record is None:
        return None
    return {
        name: value.hex() if isinstance(value, bytes) else value for name, value in record._asdict().items()
    }


# ---------------------------------------------------------------------------- tables


def _print_log(log: LogDescription) -> None:
    if log.cluster_id is not None:
        click.echo(f"cluster   {log.cluster_id.hex()}, epoch {log.epoch}")
    if log.settings is not None:
        settings = log.settings
        pages = "the first entry is no longer here"
        if settings.page_keys is not None:
            pages = f"{settings.page_keys} keys a page, values inline up to {size(settings.inline_bytes_max)}"
        click.echo(
            f"settings  segments of {size(settings.segment_bytes)}, blocks of {size(settings.block_bytes)}, "
            f"{_compression(settings.compression)} in the archive, {pages}"
            f"{', before-images' if settings.before_images else ''}"
        )
    if log.seq_first is not None and log.seq_last is not None:
        click.echo(
            f"entries   {number(log.frames)}, seq {log.seq_first} to {log.seq_last}, {size(log.body_bytes)}"
        )
    if log.hint is not None:
        click.echo(f"hint      durable up to seq {log.hint.durable_seq}, sync mode {log.hint.sync_mode}")
    table = new_table(
        "segment", "state", "first seq", "last seq", "entries", "size", "from", "to", "epoch", "hash",
        "chain",
        right=("first seq", "last seq", "entries", "size", "epoch"),
    )  # fmt: skip
    for segment in log.segments:
        table.add_row(
            visible(segment.name),
            segment.state if not segment.torn_bytes else f"{segment.state}, torn",
            _plain(segment.seq_first),
            _plain(segment.seq_last),
            number(segment.frames),
            size(segment.body_bytes),
            time(segment.time_first_us, timespec="seconds"),
            time(segment.time_last_us, timespec="seconds"),
            "" if segment.header is None else str(segment.header.epoch),
            "" if segment.segment_hash is None else segment.segment_hash.hex()[:12],
            _CHAIN[segment.follows],
        )
    print_table(table)


_CHAIN = {True: "follows", False: "BROKEN", None: ""}


def _plain(seq: int | None) -> str:
    """A seq without separators, as it is given to other commands."""
    return "" if seq is None else str(seq)


def _print_segment(segment: SegmentDescription) -> None:
    header, trailer = segment.header, segment.trailer
    rows: list[tuple[str, str]] = [("file", visible(segment.path)), ("state", segment.state)]
    if segment.compressed_bytes is not None:
        rows.append(("compressed", f"{number(segment.compressed_bytes)} bytes"))
    body = number(segment.body_bytes) or "?"
    rows.append(("size", f"{number(segment.file_bytes)} bytes, {body} of them header and frames"))
    if segment.torn_bytes:
        rows.append(("torn", f"{number(segment.torn_bytes)} bytes of a last write that is not complete"))
    rows.append(("seqs", f"{_plain(segment.seq_first)} to {_plain(segment.seq_last)}"))
    rows.append(("entries", number(segment.frames)))
    rows.append(("times", f"{time(segment.time_first_us)} to {time(segment.time_last_us)}"))
    if header is not None:
        rows.append(("cluster", f"{header.cluster_id.hex()}, epoch {header.epoch}"))
        rows.append(("follows seq", f"{header.seq_before}, with the hash {header.hash_before.hex()}"))
        rows.append(("cut at", f"{size(header.segment_bytes)}, in blocks of {size(header.block_bytes)}"))
        rows.append(("archive", f"{_compression(header.compression)}"))
        if header.before_images:
            rows.append(("changes", "say what their keys had before"))
    if segment.segment_hash is not None:
        rows.append(("hash", segment.segment_hash.hex()))
    if trailer is not None:
        footer_bytes = trailer.file_bytes - trailer.body_bytes
        rows.append(("footer", f"{number(footer_bytes)} bytes, {trailer.block_count} blocks"))
        rows.append(("footer hash", trailer.footer_hash.hex()))
    rows.append(("key index", f"{number(segment.keys) or '?'} entries"))
    for name, text in rows:
        click.echo(f"{name:<12}  {text}")
    if segment.kinds:
        table = new_table("kind", "entries", right=("entries",))
        for kind, count in segment.kinds.items():
            table.add_row(kind, number(count))
        print_table(table)
    if segment.streams:
        table = new_table("stream", "first offset", "messages", right=("first offset", "messages"))
        for stream in segment.streams:
            table.add_row(visible(stream.topic), number(stream.offset_first), number(stream.messages))
        print_table(table)


def _compression(code: int) -> str:
    return Compression(code).name.lower()
