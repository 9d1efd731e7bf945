"""Requests: what an orchestrator gives an engine, the frames that they become, and recognising them again.

Always true:
  - a frame is an outcome. Of the request it holds enough to tell whether another one is the same: all of it,
    or `request_hash` where the outcome does not show what was asked (a copy, a condition, a refusal);
  - equal requests with equal outcomes give equal payloads, whoever encodes them.

`docs/FORMAT.md` says what the hash is taken over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cbor2
from blake3 import blake3

from lowwater.engine import format
from lowwater.engine.chain import Create
from lowwater.engine.entries import (
    Control,
    Copy,
    CreateBucket,
    Delete,
    DeleteBucket,
    Put,
    Write,
    as_bytes,
    decode_payload,
)
from lowwater.engine.format import BUCKET_BYTES_MAX, KEY_BYTES_MAX, Extras, Kind, ValueRef
from lowwater.errors import InvalidEntry

Single = Create | CreateBucket | DeleteBucket | Put | Delete | Copy | Control
Request = Single | Write

# Control entries that an engine takes. The others belong to parts that this version does not have.
CONTROL_KINDS = frozenset({Kind.SETTINGS, Kind.HORIZON, Kind.PIN, Kind.UNPIN, Kind.NOOP, Kind.SEAL})


def members_of(request: Request) -> Sequence[Single]:
    """The entries of a request, each with a seq of its own. Raises InvalidEntry for what no engine takes."""
    members: Sequence[Any]
    kinds: tuple[type, ...] = (Create, CreateBucket, DeleteBucket, Put, Delete, Copy, Control)
    hint = "give Create, CreateBucket, DeleteBucket, Put, Delete, Copy, Control or Write"
    if isinstance(request, Write):
        try:
            members = list(request.entries)
        except TypeError:
            raise InvalidEntry("a Write takes a list", hint="give Write([Put(...), ...])") from None
        if not members:
            raise InvalidEntry("a Write without entries has no seq", hint="give at least one entry")
        kinds, hint = (Put, Delete, Copy), "give Put, Delete or Copy"
    else:
        members = [request]
    for member in members:
        if type(member) not in kinds:
            raise InvalidEntry(f"{type(member).__name__} cannot stand here", hint=hint)
        _require_valid(member)
    return members


def _require_valid(member: Single) -> None:
    """What encoding does not find out."""
    for number, most in ((member.origin, format.SEQ_MAX), (member.time_us, format.TIME_US_MAX)):
        if not _is_number(number) or not 0 <= number <= most:
            raise InvalidEntry(
                "a time is below 2^63 and an origin below 2^64, and neither below 0",
                hint="give 0 where there is none",
            )
    if isinstance(member, Put | Delete | Copy):
        if_seq = member.if_seq
        if if_seq is not None and (not _is_number(if_seq) or not 0 <= if_seq <= format.SEQ_MAX):
            raise InvalidEntry(f"if_seq is {if_seq!r:.80}", hint="give the seq of a version, or 0 for none")
        if not isinstance(member, Delete) and member.if_absent and if_seq:
            raise InvalidEntry("a key that is absent has no seq", hint="give if_absent or if_seq, not both")
    if isinstance(member, Put) and member.metadata is not None:
        format.encode_metadata(_mapping(member.metadata, "metadata"))
    if isinstance(member, Create):
        _mapping(member.settings, "settings")
    if isinstance(member, Copy):
        format.encode_name(member.bucket, "bucket", BUCKET_BYTES_MAX)
        format.encode_name(member.key, "key", KEY_BYTES_MAX)
    if isinstance(member, Control):
        _require_valid_control(member)


def _require_valid_control(member: Control) -> None:
    if member.kind not in CONTROL_KINDS:
        raise InvalidEntry(
            f"an engine takes no entries of kind {member.kind!r:.80}", hint="use the class of that entry"
        )
    body = _mapping(member.body or {}, "the body")
    kind = Kind(member.kind)
    if kind in (Kind.PIN, Kind.UNPIN):
        format.encode_name(body.get("name", ""), "snapshot", 255)
    if kind in (Kind.PIN, Kind.HORIZON, Kind.SEAL):
        name = "seq_first" if kind == Kind.SEAL else "seq"
        seq = body.get(name)
        if seq is None and kind == Kind.HORIZON and name in body:
            return  # keep what snapshots need, and no more
        if seq is None or not _is_number(seq) or not 0 <= seq <= format.SEQ_MAX:
            raise InvalidEntry(f"a {kind.name.lower()} entry needs a {name}", hint=f"give {name} in its body")


def _mapping(given: Any, what: str) -> dict[Any, Any]:
    if not isinstance(given, Mapping):
        raise InvalidEntry(f"{what} maps names to values, and {given!r:.80} does not", hint="give a dict")
    return dict(given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# ---------------------------------------------------------------------------- frames


def condition_of(member: Single) -> int | None:
    """The seq that the newest version has to have, 0 for none; None where there is no condition."""
    if isinstance(member, Delete):
        return member.if_seq
    if isinstance(member, Put | Copy):
        return 0 if member.if_absent else member.if_seq
    return None


def kind_of(member: Single) -> Kind:
    return member.kind if isinstance(member, Control) else _KINDS[type(member)]


_KINDS: dict[type, Kind] = {
    Create: Kind.CREATE,
    CreateBucket: Kind.CREATE_BUCKET,
    DeleteBucket: Kind.DELETE_BUCKET,
    Put: Kind.PUT,
    Delete: Kind.DELETE,
    Copy: Kind.COPY,
}


def request_hash(member: Single) -> bytes:
    """16 bytes that stand for all of a request but its time, origin and group: those are in the frame."""
    bucket, key = _names(member)
    metadata: dict[str, str] = {}
    content: Any = None
    if isinstance(member, Put):
        metadata = dict(member.metadata or {})
        content = as_bytes(member.value)
    elif isinstance(member, Copy):
        content = [member.bucket, member.key]
    elif isinstance(member, Control):
        content = dict(member.body or {})
    request = [int(kind_of(member)), bucket, key, metadata, content, condition_of(member)]
    return blake3(cbor2.dumps(request, canonical=True)).digest(16)


def _names(member: Single) -> tuple[str, str]:
    """The bucket and the key that the frame names."""
    if isinstance(member, Copy):
        return member.to_bucket, member.to_key
    if isinstance(member, Put | Delete):
        return member.bucket, member.key
    return (member.bucket, "") if isinstance(member, CreateBucket | DeleteBucket) else ("", "")


def encode_outcome(
    member: Single,
    time_us: int,
    *,
    group_seq_last: int | None = None,
    refused: int | None = None,
    copied: Copied | None = None,
) -> bytes:
    """The payload of what became of a request. `copied` is what a copy found."""
    needs_hash = refused is not None or isinstance(member, Copy) or condition_of(member) is not None
    if group_seq_last is None and not needs_hash:
        assert not isinstance(member, Copy)
        return member.encode(time_us)
    bucket, key = _names(member)
    metadata, value, value_ref = b"", b"", None
    if refused is None:
        if isinstance(member, Copy):
            assert copied is not None
            metadata, value, value_ref = copied
        elif isinstance(member, Put):
            metadata = format.encode_metadata(dict(member.metadata)) if member.metadata else b""
            value = as_bytes(member.value)
    return format.encode_payload(
        kind_of(member),
        format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX, empty_allowed=isinstance(member, Control)),
        format.encode_name(
            key, "key", KEY_BYTES_MAX, empty_allowed=not isinstance(member, Put | Delete | Copy)
        ),
        metadata,
        value,
        time_us=time_us,
        origin=member.origin,
        extras=Extras(
            group_seq_last=group_seq_last,
            request_hash=request_hash(member) if needs_hash else None,
            refused=refused,
            value_ref=value_ref,
        ),
    )


# The metadata as a frame holds it, and the value or where it is.
Copied = tuple[bytes, bytes, ValueRef | None]


def is_same_request(member: Single, seq: int, held: bytes, group_seq_last: int | None) -> bool:
    """Whether the frame with this payload is what became of the request."""
    entry = decode_payload(seq, held)
    # Its time was raised where it lay below that of the entry before it.
    if member.time_us > entry.time_us:
        return False
    copied: Copied | None = None
    if isinstance(member, Copy) and entry.refused is None:
        value_ref = None if entry.extras is None else entry.extras.value_ref
        # What was found then: the hash says whether it was looked for in the same place.
        copied = (format.encode_metadata(entry.metadata), entry.value, value_ref)
    again = encode_outcome(
        member, entry.time_us, group_seq_last=group_seq_last, refused=entry.refused, copied=copied
    )
    return again == held


def group_of(seq: int, payload: bytes) -> int | None:
    """The last seq of the group that a frame belongs to."""
    extras = decode_payload(seq, payload).extras
    return None if extras is None else extras.group_seq_last
