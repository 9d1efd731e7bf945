"""Rows of pages, of checkpoints and of manifests, as lines for people or as lines of JSON.

Always true: memory does not grow with the rows, and what is good is written before an error ends it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from lowwater.cli.output import VALUES, chosen_values, in_base64, time, visible, write_lines
from lowwater.engine.checkpoint.checkpoints import CheckpointRow
from lowwater.engine.pages.page_list import PageRow


def print_rows(rows: Iterator[PageRow | CheckpointRow], *, values: str | None, as_json: bool) -> None:
    write_lines(map(row_writer(values=values, as_json=as_json), rows))


def row_writer(*, values: str | None, as_json: bool) -> Callable[[PageRow | CheckpointRow], str]:
    """What makes a line of a row."""
    shown = chosen_values(values, as_json=as_json)
    if as_json:
        return lambda row: json.dumps(_as_json(row, with_value=shown != "none"))
    return lambda row: _as_text(row, values=shown)


def _as_json(row: PageRow | CheckpointRow, *, with_value: bool) -> dict[str, Any]:
    """`docs/operating/page-tools.md` promises these fields."""
    document: dict[str, Any] = {"bucket": row.bucket, "key": row.key, "what": _what(row), "seq": row.seq}
    document["time_us"] = row.time_us
    if isinstance(row, PageRow) and row.txn is not None:
        document["txn"] = row.txn
    if row.metadata:
        document["metadata"] = row.metadata
    document["value_bytes"] = row.value_bytes
    if row.value_hash is not None:
        document["blake3"] = row.value_hash.hex()
    if row.place is not None:
        document["place"] = {"segment_first": row.place[0], "offset": row.place[1]}
    if row.value is not None and with_value:
        document["value"] = in_base64(row.value)
    return document


def _what(row: PageRow | CheckpointRow) -> str:
    if not row.bucket:
        return "bucket"
    return "deletion" if isinstance(row, PageRow) and row.is_deletion else "value"


def _as_text(row: PageRow | CheckpointRow, *, values: str) -> str:
    what = _what(row)
    when = f"txn={row.txn}" if isinstance(row, PageRow) and row.txn is not None else time(row.time_us)
    name = row.key if what == "bucket" else f"{row.bucket}/{row.key}"
    parts = [f"{row.seq:>10}  {when:<27}  {what:<8}", visible(name)]
    if row.metadata:
        parts.append(visible(json.dumps(row.metadata, ensure_ascii=False)))
    if row.place is not None:
        parts.append(f"{row.value_bytes} B in segment {row.place[0]} at {row.place[1]}")
    elif row.value is not None and what == "value":
        parts.append(VALUES[values](row.value))
    return "  ".join(parts)
