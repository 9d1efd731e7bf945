"""The control part of a checkpoint, from an archive: the engine's state, given the few entries that matter.

Always true:
  - what the entries make is decided by `engine/state/` (`state.py`, `sessions.py`), and by nobody else;
  - entries that make no difference to it never leave their task: of data only what concerns transactions
    that are open at the checkpoint, without values, and of requests those that their sessions remember;
  - the catalogue is that of the archive's manifest, as of the checkpoint's seq.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import merge
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from lowwater.engine.format import format
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.format import Kind
from lowwater.engine.format.request_id import NUMBER_MAX, request_of_word
from lowwater.engine.log.chain import Creation
from lowwater.engine.pages.memory_pages import MemoryPages
from lowwater.engine.state.catalogue import Catalogue
from lowwater.engine.state.due import Due
from lowwater.engine.state.sessions import SESSION_KINDS, rows_of_control
from lowwater.engine.state.state import State
from lowwater.engine.state.transaction_table import TransactionRow
from lowwater.spark.entry_columns import arrow_schema, as_arrow, schema_of
from lowwater.spark.pinned_archive import BaseCheckpoint, PinnedArchive
from lowwater.spark.plan import Part, PlanSelection
from lowwater.spark.reading import seq_first_of
from lowwater.spark.replay import END_COLUMNS, ROLLED_BACK, ends_of, needed, numbers, one_batch, there
from lowwater.spark.segments import raw_batches
from lowwater.spark.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_VERSIONS = (Kind.HORIZON, Kind.PIN, Kind.UNPIN, Kind.CHECKPOINT)
_PLAIN = frozenset({*_VERSIONS, *SESSION_KINDS})
_WANTED = frozenset(kind.name.lower() for kind in (*_PLAIN, Kind.BEGIN, Kind.COMMIT, Kind.ABORT))
_DATA_KIND_LAST = int(Kind.COPY)

# What an item that is handed on is.
ENTRY, REQUEST, BEGUN, ENDED = range(4)
ITEM_TYPES = {
    "seq": "bigint",
    "what": "int",
    "payload": "binary",
    "time_us": "bigint",
    "session": "bigint",
    "request": "bigint",
    "code": "int",
    "txn": "bigint",
}
ITEM_SCHEMA = schema_of(ITEM_TYPES, tuple(ITEM_TYPES))
_ITEMS = as_arrow(ITEM_TYPES)


class Item(NamedTuple):
    seq: int
    what: int
    payload: bytes | None = None
    time_us: int = 0
    session: int = 0
    request: int = 0
    code: int = 0
    txn: int = 0


# ---------------------------------------------------------------------------- in tasks


def control_items(part: Part) -> Iterator[pa.RecordBatch]:
    """What a part has of entries that change the control part, and of transactions that go on in others."""
    columns = needed(END_COLUMNS, ("payload",))
    narrowed = replace(part, selection=part.selection._replace(kinds=_WANTED))
    frames = one_batch(raw_batches(narrowed, columns), arrow_schema(columns))
    items: list[Item] = []
    kinds = numbers(frames.column("kind_code"))
    effective = ~there(frames.column("refused"))
    plain = np.flatnonzero(effective & np.isin(kinds, [int(kind) for kind in _PLAIN]))
    seqs, payloads = numbers(frames.column("seq")), frames.column("payload")
    items += [Item(int(seqs[row]), ENTRY, payloads[row].as_py()) for row in plain.tolist()]
    ends = ends_of(frames)
    final = ends.where(ends.what != ROLLED_BACK)
    if len(frames):
        foreign = final.where(final.txn < seq_first_of(part))
        pairs = zip(foreign.seq.tolist(), foreign.txn.tolist(), strict=True)
        items += [Item(seq, ENDED, txn=txn) for seq, txn in pairs]
    begun = np.flatnonzero(effective & (kinds == int(Kind.BEGIN)) & ~np.isin(seqs, final.txn))
    items += [Item(int(seqs[row]), BEGUN, payloads[row].as_py()) for row in begun.tolist()]
    yield from _batches(items)


_REQUEST_COLUMNS = ("seq", "time_us", "session", "request", "refused")


def request_items(part: Part) -> Iterator[pa.RecordBatch]:
    """The requests in a part that their sessions remember at its end, and each session's last one."""
    found = []
    for batch in raw_batches(part, _REQUEST_COLUMNS):
        mask = there(batch.column("session"))
        if mask.any():
            found.append([numbers(batch.column(name))[mask] for name in _REQUEST_COLUMNS])
    if not found:
        return
    seq, time_us, session, request, code = map(np.concatenate, zip(*found, strict=True))
    number = request & NUMBER_MAX
    acknowledged = np.maximum(number - 1 - (request >> 48), 0)
    names, of = np.unique(session, return_inverse=True)
    highest = np.zeros(len(names), np.int64)
    np.maximum.at(highest, of, acknowledged)
    last = np.zeros(len(names), np.int64)
    last[of] = np.arange(len(of))
    keeps = (number > highest[of]) | (acknowledged == highest[of])
    keeps[last] = True
    rows = np.flatnonzero(keeps)
    columns = [each[rows].tolist() for each in (seq, time_us, session, request, code)]
    yield from _batches([Item(a, REQUEST, None, b, c, d, e) for a, b, c, d, e in zip(*columns, strict=True)])


@dataclass(frozen=True)
class Concerned:
    """A part, and the transactions of which all frames are wanted; or the keys of which those outside are."""

    part: Part
    txns: frozenset[int]
    keys: frozenset[tuple[str, str]]


_CONCERNED_COLUMNS = (
    "seq", "txn", "kind_code", "refused", "bucket", "key", "value_seq", "value_length", "payload",
)  # fmt: skip


def concerned_items(concerned: Concerned) -> Iterator[pa.RecordBatch]:
    for batch in raw_batches(concerned.part, _CONCERNED_COLUMNS):
        txns = numbers(batch.column("txn"))
        if concerned.keys:
            data = (txns == 0) & (numbers(batch.column("kind_code")) <= _DATA_KIND_LAST)
            mask = data & ~there(batch.column("refused"))
        else:
            mask = np.isin(txns, list(concerned.txns))
        rows = batch.filter(pa.array(mask)) if mask.any() else batch.slice(0, 0)
        items = []
        for row in rows.to_pylist():
            if concerned.keys and (row["bucket"], row["key"]) not in concerned.keys:
                continue
            payload = row["payload"]
            if row["value_seq"] is None and row["refused"] is None and row["kind_code"] <= _DATA_KIND_LAST:
                payload = payload[: len(payload) - row["value_length"]]
            items.append(Item(row["seq"], ENTRY, payload, txn=row["txn"] or 0))
        yield from _batches(items)


def _batches(items: list[Item]) -> Iterator[pa.RecordBatch]:
    if items:
        columns = [
            pa.array(column, field.type)
            for column, field in zip(zip(*items, strict=True), _ITEMS, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=_ITEMS)


# ---------------------------------------------------------------------------- on the driver


def due_at(archive: PinnedArchive, seq: int, creation: Creation, base: BaseCheckpoint | None) -> Due:
    """What the checkpoint entry `seq` asks for, with the control part as of it. What was up to `base` is
    known from there."""
    begin = archive.pinned.seq_first if base is None else base.descriptor.seq + 1
    parts = archive.parts(PlanSelection(begin, seq))
    kinds = archive.kinds(archive.pinned.seq_first, seq)
    items = _collect(run_tasks(archive.spark, parts, control_items, ITEM_SCHEMA))
    if Kind.SESSION_OPEN in kinds:
        items += _collect(run_tasks(archive.spark, parts, request_items, ITEM_SCHEMA))
    ended = {each.txn for each in items if each.what == ENDED}
    begun = [each for each in items if each.what == BEGUN and each.seq not in ended]
    opened = {each.seq for each in begun} | {txn for txn in (base.opened if base else ()) if txn not in ended}
    entries = [each for each in items if each.what in (ENTRY, REQUEST)] + begun
    state = _state(archive, seq, creation, base, opened)
    frames = _frames_of_open(archive, seq, opened)
    for each in merge(sorted(entries), sorted(frames)):
        if each.what == REQUEST:
            request = request_of_word(each.session, each.request)
            state.sessions.take(each.seq, each.time_us, request, each.code)
        else:
            assert each.payload is not None
            state.apply(each.seq, each.payload, 1, 0)
    due = state.checkpoints_due[-1]
    assert due.seq == seq
    return due


def _collect(frame: DataFrame) -> list[Item]:
    return [Item(*row.values()) for row in frame.toArrow().to_pylist()]


def _frames_of_open(archive: PinnedArchive, seq: int, opened: set[int]) -> list[Item]:
    """All frames of transactions that are open at the checkpoint, and what others have written to their keys
    since: whoever did has doomed them."""
    if not opened:
        return []
    parts = archive.parts(PlanSelection(min(opened), seq))
    txns = frozenset(opened)
    inside = [Concerned(part, txns, frozenset()) for part in parts]
    frames = _collect(run_tasks(archive.spark, inside, concerned_items, ITEM_SCHEMA))
    keys = frozenset(filter(None, (_name_of(each.payload) for each in frames)))
    if not keys:
        return frames
    outside = [Concerned(part, txns, keys) for part in parts]
    return frames + _collect(run_tasks(archive.spark, outside, concerned_items, ITEM_SCHEMA))


def _name_of(payload: bytes | None) -> tuple[str, str] | None:
    assert payload is not None
    kind, flags, bucket_len, key_len, *_ = format.FIXED.unpack_from(payload)
    if kind > _DATA_KIND_LAST:
        return None
    _, start = format.decode_extras(flags, payload, format.FIXED_BYTES, len(payload))
    middle = start + bucket_len
    return payload[start:middle].decode(), payload[middle : middle + key_len].decode()


def _state(
    archive: PinnedArchive, seq: int, creation: Creation, base: BaseCheckpoint | None, opened: set[int]
) -> State:
    settings = creation.settings
    assert settings.page_keys is not None
    assert settings.inline_bytes_max is not None
    state = State(
        MemoryPages(),
        Boundaries(creation.salt, settings.page_keys),
        inline_bytes_max=settings.inline_bytes_max,
        place_reader=_no_value,
        pool_bytes_max=2**62,
        now_s=lambda: 0.0,
    )
    state.locate = lambda _: (1, 0)
    if base is not None:
        body = base.remote.index.control_body
        state.horizon, state.snapshots = body["horizon"], dict(body["snapshots"])
        state.keeping.from_meta(body)
        state.sessions.load(rows_of_control(body.get("sessions", ())))
        state.checkpoint_seq = state.versions_seq = base.descriptor.seq
        for txn, snapshot_seq, _, doomed, _ in body.get("transactions", ()):
            if txn in opened:
                # Of its frames the log tells the rest, but for what others have done to it.
                state.transactions.put(TransactionRow(txn, snapshot_seq, snapshot_seq, txn, doomed=doomed))
        state.decide_keeping()
    state.catalogue = catalogue_as_of(archive, seq)
    return state


def _no_value(_: bytes) -> Any:
    raise AssertionError("nothing is read here")


def catalogue_as_of(archive: PinnedArchive, seq: int) -> Catalogue:
    catalogue = Catalogue()
    for records in (archive.pinned.segments, archive.pinned.checkpoints, archive.pinned.forks):
        for record in records:
            if record.recorded_seq <= seq:
                catalogue.add(record)
    return catalogue
