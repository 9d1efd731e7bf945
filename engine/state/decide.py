"""Deciding: whether a request has an effect, from what was applied before it.

Always true:
  - a decision is a function of the entries applied before, and of nothing else: not of what is flushed,
    cached, pinned or durable here. So every replica decides alike, and a frame says what was decided;
  - of two that write a key, the first to commit wins. A write inside a transaction is refused, and dooms it,
    where the key has a version above its snapshot, or one of another transaction that may still commit; a
    write outside of all commits at once, and dooms the transaction that has written the key before;
  - limits are the same everywhere, and never settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

from lowwater.engine.format import format
from lowwater.engine.format.entries import (
    Abort,
    Begin,
    Commit,
    Control,
    Copy,
    CreateBucket,
    Delete,
    DeleteBucket,
    Put,
)
from lowwater.engine.format.format import KEY_BYTES_MAX, Kind
from lowwater.engine.format.keys import after_prefix, bucket_range, encode_key
from lowwater.engine.format.request_id import RequestId
from lowwater.engine.log.chain import Chain
from lowwater.engine.state import sessions
from lowwater.engine.state.catalogue import RECORDED
from lowwater.engine.state.requests import Single, condition_of, session_of
from lowwater.engine.state.sessions import Sessions
from lowwater.engine.state.state import State
from lowwater.engine.state.transaction_table import DOOMING_CODES, TransactionRow

# Of transactions. One may be larger by the entry that makes it so large.
OPEN_MAX = 1000
TXN_BYTES_MAX = 4 * 2**30
TXN_ENTRIES_MAX = 10_000_000
ROLLBACKS_MAX = 10_000


class Refusal(IntEnum):
    """Why an entry had no effect: the code in its frame. A code is never used for anything else."""

    NO_BUCKET = 1
    NO_KEY = 2
    BUCKET_EXISTS = 3
    BUCKET_NOT_EMPTY = 4
    CONDITION_FAILED = 5
    VERSION_GONE = 6
    NAME_EXISTS = 7
    NO_SNAPSHOT = 8
    OUT_OF_DATE = 9
    TOO_LARGE = 10
    NO_SESSION = sessions.NO_SESSION
    REPEATED = sessions.REPEATED
    REQUEST_FORGOTTEN = sessions.REQUEST_FORGOTTEN
    TOO_MANY_SESSIONS = 23
    TOO_MANY_RESULTS = sessions.TOO_MANY_RESULTS
    NO_TRANSACTION = 30
    CONFLICT = 31
    DOOMED = 32
    TRANSACTION_TOO_LARGE = 33
    TOO_MANY_TRANSACTIONS = 34
    NO_SAVEPOINT = 35


assert {Refusal.CONFLICT, Refusal.TRANSACTION_TOO_LARGE} == DOOMING_CODES


def decide(state: State, chain: Chain, members: Sequence[Single], *, group: bool) -> Refusal | None:
    """With the state's lock: why the request is refused; None where it has its effect. The members of a group
    are decided by what is there before the first of them: one that is refused refuses all."""
    request = session_of(members)
    if request is not None and (refusal := _decide_request(state.sessions, request)) is not None:
        return refusal
    for member in members:
        refusal = _decide_one(state, chain, member, group=group)
        if refusal is not None:
            return refusal
    return None


def _decide_one(state: State, chain: Chain, member: Single, *, group: bool) -> Refusal | None:
    if isinstance(member, Put | Delete | Copy):
        row = None
        if member.txn:
            row = state.transactions.open.get(member.txn)
            if row is None:
                return Refusal.NO_TRANSACTION
            if (refusal := why_no_more(row)) is not None:
                return refusal
        return _decide_data(state, member, row, group=group)
    if isinstance(member, Begin):
        return _decide_begin(state, member)
    if isinstance(member, Commit | Abort):
        row = state.transactions.open.get(member.txn)
        if row is None:
            return Refusal.NO_TRANSACTION
        return (
            _decide_commit(state, member, row) if isinstance(member, Commit) else _decide_abort(member, row)
        )
    if isinstance(member, CreateBucket):
        return Refusal.BUCKET_EXISTS if member.bucket in state.buckets else None
    if isinstance(member, DeleteBucket):
        prefix = state.prefixes.get(member.bucket)
        if prefix is None:
            return Refusal.NO_BUCKET
        return Refusal.BUCKET_NOT_EMPTY if is_in_use(state, member.bucket) else None
    return _decide_control(state, chain, member) if isinstance(member, Control) else None


def _decide_request(table: Sessions, request: RequestId) -> Refusal | None:
    """Why a request is not looked at; None where it is a new one."""
    session = table.sessions.get(request.session)
    if session is None:
        return Refusal.NO_SESSION
    if session.result(request.number) is not None:
        return Refusal.REPEATED
    if request.number <= session.acknowledged:
        return Refusal.REQUEST_FORGOTTEN
    return Refusal.TOO_MANY_RESULTS if table.result_count >= sessions.RESULTS_TOTAL_MAX else None


def _decide_data(
    state: State, member: Put | Delete | Copy, row: TransactionRow | None, *, group: bool
) -> Refusal | None:
    """`row` is that of the transaction that the entry belongs to."""
    if isinstance(member, Copy) and member.bucket not in state.prefixes:
        return Refusal.NO_BUCKET
    bucket, key = (
        (member.to_bucket, member.to_key) if isinstance(member, Copy) else (member.bucket, member.key)
    )
    if bucket not in state.prefixes:
        return Refusal.NO_BUCKET
    if row is not None and conflicts(state, encoded(state, bucket, key), row.snapshot_seq, row.txn):
        return Refusal.CONFLICT
    condition = condition_of(member)
    if condition is not None and _live_seq(state, bucket, key, row) != condition:
        return Refusal.CONDITION_FAILED
    # A group may delete what may not be there: it says what is to be, not what was.
    needs_key = isinstance(member, Copy) or (isinstance(member, Delete) and not group)
    if needs_key and not _live_seq(state, member.bucket, member.key, row):
        return Refusal.NO_KEY
    return None


def encoded(state: State, bucket: str, key: str) -> bytes:
    return state.prefixes[bucket] + format.encode_name(key, "key", KEY_BYTES_MAX)


def _live_seq(state: State, bucket: str, key: str, row: TransactionRow | None) -> int:
    name = encoded(state, bucket, key)
    if row is None:
        return state.live_seq(name)
    return state.live_seq(name, seq=row.snapshot_seq, viewer=row.txn)


def is_in_use(state: State, bucket: str) -> bool:
    """Whether the bucket holds something, or may when a transaction commits."""
    low, high = state.prefixes[bucket], after_prefix(state.prefixes[bucket])
    return state.first(bucket, low, high) is not None or state.is_held(low, high)


# ---------------------------------------------------------------------------- transactions


def conflicts(state: State, key: bytes, snapshot_seq: int, txn: int) -> bool:
    """Whether the transaction may not write the key."""
    if state.newest_seq(key, txn, above=snapshot_seq) > snapshot_seq:
        return True
    if len(state.transactions.open) == 1 and txn in state.transactions.open:
        return False
    held_by = state.holder(key)
    return held_by is not None and held_by.txn != txn


def why_no_more(row: TransactionRow) -> Refusal | None:
    """Why a transaction can write nothing more."""
    if row.doomed:
        return Refusal.DOOMED
    is_full = row.entries >= TXN_ENTRIES_MAX or row.size_bytes >= TXN_BYTES_MAX
    return Refusal.TRANSACTION_TOO_LARGE if is_full else None


def _decide_begin(state: State, member: Begin) -> Refusal | None:
    if len(state.transactions.open) >= OPEN_MAX:
        return Refusal.TOO_MANY_TRANSACTIONS
    snapshot_seq = member.snapshot_seq
    if snapshot_seq is None:
        return None
    is_kept = state.floor_kept(state.applied) <= snapshot_seq <= state.applied
    if is_kept and state.keeping.can_pin(snapshot_seq, state.applied, state.snapshots):
        return None
    return Refusal.VERSION_GONE


def _decide_commit(state: State, member: Commit, row: TransactionRow) -> Refusal | None:
    if row.doomed:
        return Refusal.DOOMED
    keys = (_read_key(bucket, key) for bucket, key in member.keys)
    ranges = (_read_range(*each) for each in member.ranges)
    if has_changed(state, keys, ranges, row.snapshot_seq, row.txn):
        return Refusal.CONFLICT
    return None


def has_changed(
    state: State, keys: Iterable[bytes], ranges: Iterable[tuple[bytes, bytes]], seq: int, txn: int
) -> bool:
    """Whether others have changed since `seq` what a transaction has read."""
    return any(state.newest_seq(key, txn, above=seq) > seq for key in keys) or any(
        state.changed_since(low, high, seq, txn) for low, high in ranges
    )


def _read_key(bucket: str, key: str) -> bytes:
    return encode_key(bucket.encode(), key.encode())


def _read_range(bucket: str, first: str, end: str | None) -> tuple[bytes, bytes]:
    low, high = bucket_range(bucket.encode())
    return _read_key(bucket, first), high if end is None else max(low, _read_key(bucket, end))


def _decide_abort(member: Abort, row: TransactionRow) -> Refusal | None:
    savepoint_seq = member.savepoint_seq
    if savepoint_seq is None:
        return None
    if not row.txn <= savepoint_seq <= row.seq_last or row.has_undone(savepoint_seq):
        return Refusal.NO_SAVEPOINT
    return Refusal.TRANSACTION_TOO_LARGE if len(row.undone) >= ROLLBACKS_MAX else None


def _decide_control(state: State, chain: Chain, member: Control) -> Refusal | None:
    body = dict(member.body or {})
    kind = member.kind
    if kind == Kind.SEAL:
        # A seal that was proposed twice, or too late, must not end another segment.
        is_current = chain.body_bytes and chain.seq_first == body["seq_first"]
        return None if is_current else Refusal.OUT_OF_DATE
    if kind in sessions.SESSION_KINDS:
        return _decide_session(state.sessions, kind, body)
    if kind == Kind.CHECKPOINT:
        # One that was proposed twice is made once.
        return None if body["before"] == state.checkpoint_seq else Refusal.OUT_OF_DATE
    if kind in RECORDED:
        return None if _can_record(state, chain, kind, body) else Refusal.OUT_OF_DATE
    if kind == Kind.UNPIN:
        if body["name"] not in state.snapshots:
            return Refusal.NO_SNAPSHOT
        # One that ends a snapshot must not drop another one of its name.
        ends_it = "expires_us" in body
        is_due = body.get("expires_us") == state.keeping.expires_us.get(body["name"])
        return Refusal.OUT_OF_DATE if ends_it and not is_due else None
    if kind == Kind.PIN and body["name"] in state.snapshots:
        return Refusal.NAME_EXISTS
    if kind == Kind.HORIZON and "before" in body and body["before"] != state.horizon:
        return Refusal.OUT_OF_DATE
    seq = body.get("seq") if kind in (Kind.PIN, Kind.HORIZON) else None
    # Not by what is pinned here: other replicas pin something else.
    if seq is not None and not state.floor_kept(state.applied) <= seq <= state.applied:
        return Refusal.VERSION_GONE
    if kind == Kind.PIN and not state.keeping.can_pin(body["seq"], state.applied, state.snapshots):
        return Refusal.VERSION_GONE
    return None


def _can_record(state: State, chain: Chain, kind: Kind, body: dict[str, Any]) -> bool:
    """Whether an entry of the catalogue rests on what is so."""
    catalogue = state.catalogue
    if kind == Kind.FORK:
        if chain.body_bytes or body["seq"] != chain.seq_last:
            return False
        return bool(body["parent_epoch"] == chain.epoch < body["epoch"])
    if kind == Kind.CHECKPOINT_SHIPPED:
        if body["before"] != catalogue.checkpoint_seq:
            return False
        # What leads from it to the newest entry is in the store too.
        return bool(body["before"] < body["seq"] <= min(state.checkpoint_seq, catalogue.hwm))
    before = catalogue.segments.last
    # Of the segment that is being written nothing is recorded.
    complete_seq = chain.seq_first - 1 if chain.body_bytes else chain.seq_last
    if (body["before"], body["hash_before"]) != (catalogue.hwm, catalogue.hash_last):
        return False
    if not catalogue.hwm < body["first"] <= body["last"] <= complete_seq:
        return False
    return (1 if before is None else before.epoch) <= int(body["epoch"]) <= chain.epoch


def _decide_session(table: Sessions, kind: Kind, body: dict[str, Any]) -> Refusal | None:
    if kind == Kind.SESSION_OPEN:
        return Refusal.TOO_MANY_SESSIONS if len(table.sessions) >= sessions.SESSIONS_MAX else None
    session = table.sessions.get(body["session"])
    if session is None:
        return Refusal.NO_SESSION
    # One that ends an idle session must not end one that has been used since.
    return Refusal.OUT_OF_DATE if body.get("seq", session.seq) != session.seq else None
