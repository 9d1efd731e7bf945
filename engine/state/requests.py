"""Requests: what an orchestrator gives an engine, the frames that they become, and recognising them again.

Always true:
  - a frame is an outcome. Of the request it holds enough to tell whether another one is the same: all of it,
    or `request_hash` where the outcome does not show what was asked (a copy, a condition, a refusal);
  - equal requests with equal outcomes give equal payloads, whoever encodes them.

`docs/FORMAT.md` says what the hash is taken over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import cbor2
from blake3 import blake3

from lowwater.engine.format import format
from lowwater.engine.format.before_images import with_image
from lowwater.engine.format.blocks import HASH_BYTES
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
    Write,
    as_bytes,
    decode_payload,
)
from lowwater.engine.format.format import BUCKET_BYTES_MAX, KEY_BYTES_MAX, Extras, Kind, ValueRef
from lowwater.engine.format.request_id import RequestId, as_request_id
from lowwater.engine.log.chain import Create
from lowwater.engine.state.catalogue import (
    RECORDED,
    CheckpointDescriptor,
    Fork,
    SegmentDescriptor,
    bytes_in,
    numbers_in,
)
from lowwater.engine.state.keeping import PER_KEY_MAX
from lowwater.engine.state.sessions import SESSION_KINDS, TTL_US_MAX
from lowwater.errors import InvalidEntry

Single = Create | CreateBucket | DeleteBucket | Put | Delete | Copy | Begin | Commit | Abort | Control
Request = Single | Write

# Of how many keys and ranges a commit may say that its transaction has read them.
READS_MAX = 10_000
# Control entries that an engine takes. The others belong to parts that this version does not have.
CONTROL_KINDS = SESSION_KINDS | {
    Kind.SETTINGS, Kind.HORIZON, Kind.PIN, Kind.UNPIN, Kind.NOOP, Kind.SEAL, Kind.CHECKPOINT, *RECORDED,
}  # fmt: skip


def require_control(entry: Any) -> None:
    """Raise InvalidEntry for what is no control entry, or a wrong one."""
    if not isinstance(entry, Control):
        raise InvalidEntry(f"{entry!r:.80} is no control entry", hint="propose a Control")
    members_of(entry)


def members_of(request: Request) -> Sequence[Single]:
    """The entries of a request, each with a seq of its own. Raises InvalidEntry for what no engine takes."""
    members: Sequence[Any]
    kinds: tuple[type, ...] = (*_KINDS, Control)
    hint = (
        "give Put, Delete, Copy, Write, Begin, Commit, Abort, CreateBucket, DeleteBucket, Control or Create"
    )
    if isinstance(request, Write):
        try:
            members = list(request.entries)
        except TypeError:
            raise InvalidEntry("a Write takes a list", hint="give Write([Put(...), ...])") from None
        if not members:
            raise InvalidEntry("a Write without entries has no seq", hint="give at least one entry")
        kinds, hint = (Put, Delete, Copy), "give Put, Delete or Copy"
        members = _members_in_session(members, request.session)
    else:
        members = [request]
    for member in members:
        if type(member) not in kinds:
            raise InvalidEntry(f"{type(member).__name__} cannot stand here", hint=hint)
        _require_valid(member)
        if isinstance(request, Write) and member.txn:
            raise InvalidEntry(
                "a Write is a transaction of its own", hint="give its entries one by one, each with the txn"
            )
    return members


def _members_in_session(members: Sequence[Any], session: Any) -> Sequence[Any]:
    """The last frame of a group names the request, as its seq is the group's."""
    if any(getattr(member, "session", None) is not None for member in members):
        raise InvalidEntry("a group is one request of a session", hint="give session to the Write")
    if session is None or not isinstance(members[-1], Put | Delete | Copy):
        return members
    return [*members[:-1], members[-1]._replace(session=session)]


def session_of(members: Sequence[Single]) -> RequestId | None:
    """Which request of a session this is, if it is one."""
    last = members[-1]
    return None if isinstance(last, Create) or last.session is None else as_request_id(last.session)


def _require_valid(member: Single) -> None:
    """What encoding does not find out."""
    if not isinstance(member, Create) and member.session is not None:
        as_request_id(member.session)
        if isinstance(member, Control) and member.kind in SESSION_KINDS:
            raise InvalidEntry("an entry about a session is no request of one", hint="leave session out")
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
    if isinstance(member, Put | Delete | Copy | Commit | Abort):
        least = 1 if isinstance(member, Commit | Abort) else 0
        if not _is_number(member.txn) or not least <= member.txn <= format.SEQ_MAX:
            raise InvalidEntry(f"txn is {member.txn!r:.80}", hint="give the seq of the transaction's Begin")
    if isinstance(member, Begin) and not _is_seq_or_none(member.snapshot_seq):
        raise InvalidEntry(f"snapshot_seq is {member.snapshot_seq!r:.80}", hint="give a seq, or None for now")
    if isinstance(member, Abort) and not _is_seq_or_none(member.savepoint_seq):
        raise InvalidEntry(f"savepoint_seq is {member.savepoint_seq!r:.80}", hint="give a seq, or None")
    if isinstance(member, Commit):
        _require_valid_reads(member)
    if isinstance(member, Put) and member.metadata is not None:
        format.encode_metadata(_mapping(member.metadata, "metadata"))
    if isinstance(member, Create):
        _mapping(member.settings, "settings")
    if isinstance(member, Copy):
        format.encode_name(member.bucket, "bucket", BUCKET_BYTES_MAX)
        format.encode_name(member.key, "key", KEY_BYTES_MAX)
    if isinstance(member, Control):
        _require_valid_control(member)


def _require_valid_reads(member: Commit) -> None:
    try:
        keys, ranges = [(*each,) for each in member.keys], [(*each,) for each in member.ranges]
        for bucket, key in keys:
            format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
            format.encode_name(key, "key", KEY_BYTES_MAX)
        for bucket, first, end in ranges:
            format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
            for each in (first, end) if end is not None else (first,):
                format.encode_name(each, "key", KEY_BYTES_MAX, empty_allowed=True)
    except (TypeError, ValueError) as error:
        raise InvalidEntry(
            f"this is not what a transaction has read: {error}",
            hint="give pairs of bucket and key, and ranges of bucket, first key and end",
        ) from error
    if len(keys) + len(ranges) > READS_MAX:
        raise InvalidEntry(
            f"a commit names {len(keys) + len(ranges):,} keys and ranges; at most {READS_MAX:,} are allowed",
            hint="name ranges instead of keys",
        )


def _is_seq_or_none(value: Any) -> bool:
    return value is None or (_is_number(value) and 0 <= value <= format.SEQ_MAX)


def _require_valid_control(member: Control) -> None:
    if member.kind not in CONTROL_KINDS:
        raise InvalidEntry(
            f"an engine takes no entries of kind {member.kind!r:.80}", hint="use the class of that entry"
        )
    body = _mapping(member.body or {}, "the body")
    kind = Kind(member.kind)
    if kind in (Kind.PIN, Kind.UNPIN):
        format.encode_name(body.get("name", ""), "snapshot", 255)
    if kind == Kind.CHECKPOINT and not isinstance(body.get("full", False), bool):
        raise InvalidEntry("`full` of a checkpoint entry is a truth value", hint="use checkpoint_entry()")
    for name, (highest, optional, nothing) in _NUMBERS.get(kind, {}).items():
        if name not in body and optional:
            continue
        value = body.get(name)
        if value is None and nothing and name in body:
            continue
        if not _is_number(value) or not 0 <= value <= highest:
            raise InvalidEntry(
                f"a {kind.name.lower()} entry needs a {name}, and it has {value!r:.80}",
                hint=f"give {name} in its body",
            )
    for name, size in _BYTES.get(kind, {}).items():
        if type(body.get(name)) is not bytes or len(body[name]) != size:
            raise InvalidEntry(
                f"a {kind.name.lower()} entry needs a {name} of {size} bytes", hint=f"give {name} in its body"
            )
    if kind == Kind.HORIZON and not body.keys() & {"seq", "per_key_max"}:
        raise InvalidEntry("a horizon entry needs a seq", hint="give seq, or per_key_max, in its body")
    if kind == Kind.HORIZON and body.get("per_key_max") == 0:
        raise InvalidEntry("of each key one version at least is kept", hint="give per_key_max from 1 up")


# The whole numbers in the bodies of control entries: the highest, whether it may be missing, and whether it
# may be null.
_NUMBERS: dict[Kind, dict[str, tuple[int, bool, bool]]] = {
    Kind.SEAL: {"seq_first": (format.SEQ_MAX, False, False)},
    Kind.CHECKPOINT: {"before": (format.SEQ_MAX, False, False)},
    Kind.SEGMENT_SHIPPED: dict.fromkeys(
        ("before", *numbers_in(SegmentDescriptor)), (format.SEQ_MAX, False, False)
    ),
    Kind.CHECKPOINT_SHIPPED: dict.fromkeys(
        ("before", *numbers_in(CheckpointDescriptor)), (format.SEQ_MAX, False, False)
    ),
    Kind.FORK: dict.fromkeys(numbers_in(Fork), (format.SEQ_MAX, False, False)),
    Kind.PIN: {"seq": (format.SEQ_MAX, False, False), "expires_us": (format.TIME_US_MAX, True, False)},
    Kind.UNPIN: {"expires_us": (format.TIME_US_MAX, True, False)},
    Kind.SESSION_OPEN: {"ttl_us": (TTL_US_MAX, False, False)},
    Kind.SESSION_KEEP: {"session": (format.SEQ_MAX, False, False)},
    Kind.SESSION_CLOSE: {
        "session": (format.SEQ_MAX, False, False),
        "seq": (format.SEQ_MAX, True, False),
    },
    Kind.HORIZON: {
        "seq": (format.SEQ_MAX, True, True),
        "before": (format.SEQ_MAX, True, True),
        "per_key_max": (PER_KEY_MAX, True, True),
    },
}


# The hashes and ids in them, with their sizes.
_BYTES: dict[Kind, dict[str, int]] = {
    Kind.SEGMENT_SHIPPED: {"hash_before": HASH_BYTES, **bytes_in(SegmentDescriptor)},
    Kind.CHECKPOINT_SHIPPED: bytes_in(CheckpointDescriptor),
    Kind.FORK: bytes_in(Fork),
}


def _mapping(given: Any, what: str) -> dict[Any, Any]:
    if not isinstance(given, Mapping):
        raise InvalidEntry(f"{what} maps names to values, and {given!r:.80} does not", hint="give a dict")
    return dict(given)


def _is_number(value: Any) -> TypeGuard[int]:
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
    Begin: Kind.BEGIN,
    Commit: Kind.COMMIT,
    Abort: Kind.ABORT,
}


def txn_of(member: Single) -> int:
    """The transaction that an entry belongs to, 0 for none. A `Begin` is none yet."""
    return member.txn if isinstance(member, Put | Delete | Copy | Commit | Abort) else 0


def _body_of(member: Begin | Abort) -> dict[str, int]:
    name, seq = (
        ("snapshot", member.snapshot_seq)
        if isinstance(member, Begin)
        else ("savepoint", member.savepoint_seq)
    )
    return {} if seq is None else {name: seq}


def request_hash(member: Single) -> bytes:
    """16 bytes for all of a request but its time, origin, group and session: the frame has those."""
    bucket, key = _names(member)
    metadata: dict[str, str] = {}
    content: Any = None
    if isinstance(member, Put):
        metadata = dict(member.metadata or {})
        content = as_bytes(member.value)
    elif isinstance(member, Copy):
        content = [member.bucket, member.key]
    elif isinstance(member, Commit):
        content = [[list(each) for each in member.keys], [list(each) for each in member.ranges]]
    elif isinstance(member, Begin | Abort):
        content = _body_of(member)
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
    txn_seq_before: int = 0,
) -> bytes:
    """The payload of what became of a request. `copied` is what a copy found, `txn_seq_before` the seq of its
    transaction's frame before this one."""
    needs_hash = refused is not None or isinstance(member, Copy) or condition_of(member) is not None
    session = session_of([member])
    if isinstance(member, Commit):
        needs_hash = needs_hash or bool(member.keys or member.ranges)
    txn = txn_of(member)
    if (
        group_seq_last is None
        and not needs_hash
        and session is None
        and not txn
        and not isinstance(member, Begin)
    ):
        assert not isinstance(member, Copy | Commit | Abort)
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
        elif isinstance(member, Control):
            value = member.encoded_body
        elif isinstance(member, Begin | Abort) and (body := _body_of(member)):
            value = cbor2.dumps(body, canonical=True)
    is_nameless = isinstance(member, Control | Begin | Commit | Abort)
    return format.encode_payload(
        kind_of(member),
        format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX, empty_allowed=is_nameless),
        format.encode_name(
            key, "key", KEY_BYTES_MAX, empty_allowed=not isinstance(member, Put | Delete | Copy)
        ),
        metadata,
        value,
        time_us=time_us,
        origin=member.origin,
        extras=Extras(
            txn=txn or None,
            txn_seq_before=txn_seq_before,
            group_seq_last=group_seq_last,
            session=None if session is None else session.session,
            request=0 if session is None else session.word,
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
        member,
        entry.time_us,
        group_seq_last=group_seq_last,
        refused=entry.refused,
        copied=copied,
        txn_seq_before=0 if entry.extras is None else entry.extras.txn_seq_before,
    )
    if entry.extras is not None and entry.extras.before is not None:
        # What was there then, too.
        again = with_image(again, entry.extras.before)
    return again == held


def group_of(seq: int, payload: bytes) -> int | None:
    """The last seq of the group that a frame belongs to."""
    extras = decode_payload(seq, payload).extras
    return None if extras is None else extras.group_seq_last
