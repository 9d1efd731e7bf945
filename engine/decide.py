"""Deciding: whether a request has an effect, from what was applied before it.

Always true: a decision is a function of the entries applied before, and of nothing else: not of what is
flushed, cached, pinned or durable here. So every replica decides alike, and a frame says what was decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from lowwater.engine import format
from lowwater.engine.chain import Chain
from lowwater.engine.entries import Control, Copy, CreateBucket, Delete, DeleteBucket, Put
from lowwater.engine.format import KEY_BYTES_MAX, Kind
from lowwater.engine.pages import after_prefix
from lowwater.engine.requests import Single, condition_of
from lowwater.engine.state import State


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


def decide(state: State, chain: Chain, members: Sequence[Single], *, group: bool) -> Refusal | None:
    """With the state's lock: why the request is refused; None where it has its effect. The members of a group
    are decided by what is there before the first of them: one that is refused refuses all."""
    for member in members:
        refusal = _decide_one(state, chain, member, group=group)
        if refusal is not None:
            return refusal
    return None


def _decide_one(state: State, chain: Chain, member: Single, *, group: bool) -> Refusal | None:
    if isinstance(member, Put):
        return _decide_target(state, member, member.bucket, member.key)
    if isinstance(member, Delete):
        refusal = _decide_target(state, member, member.bucket, member.key)
        # A group may delete what may not be there: it says what is to be, not what was.
        if refusal is None and not group and not _live_seq(state, member.bucket, member.key):
            return Refusal.NO_KEY
        return refusal
    if isinstance(member, Copy):
        if member.bucket not in state.prefixes:
            return Refusal.NO_BUCKET
        refusal = _decide_target(state, member, member.to_bucket, member.to_key)
        if refusal is None and not _live_seq(state, member.bucket, member.key):
            return Refusal.NO_KEY
        return refusal
    if isinstance(member, CreateBucket):
        return Refusal.BUCKET_EXISTS if member.bucket in state.buckets else None
    if isinstance(member, DeleteBucket):
        prefix = state.prefixes.get(member.bucket)
        if prefix is None:
            return Refusal.NO_BUCKET
        holds = next(state.scan(member.bucket, prefix, after_prefix(prefix)), None)
        return None if holds is None else Refusal.BUCKET_NOT_EMPTY
    return _decide_control(state, chain, member) if isinstance(member, Control) else None


def _decide_target(state: State, member: Single, bucket: str, key: str) -> Refusal | None:
    if bucket not in state.prefixes:
        return Refusal.NO_BUCKET
    condition = condition_of(member)
    if condition is not None and _live_seq(state, bucket, key) != condition:
        return Refusal.CONDITION_FAILED
    return None


def _live_seq(state: State, bucket: str, key: str) -> int:
    return state.live_seq(state.prefixes[bucket] + format.encode_name(key, "key", KEY_BYTES_MAX))


def _decide_control(state: State, chain: Chain, member: Control) -> Refusal | None:
    body = dict(member.body or {})
    kind = member.kind
    if kind == Kind.SEAL:
        # A seal that was proposed twice, or too late, must not end another segment.
        is_current = chain.body_bytes and chain.seq_first == body["seq_first"]
        return None if is_current else Refusal.OUT_OF_DATE
    if kind == Kind.UNPIN:
        return None if body["name"] in state.snapshots else Refusal.NO_SNAPSHOT
    if kind == Kind.PIN and body["name"] in state.snapshots:
        return Refusal.NAME_EXISTS
    seq = body["seq"] if kind in (Kind.PIN, Kind.HORIZON) else None
    # Not by what is pinned here: other replicas pin something else.
    if seq is not None and not state.floor_kept(state.applied) <= seq <= state.applied:
        return Refusal.VERSION_GONE
    return None
