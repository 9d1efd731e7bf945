"""Entries: what a program writes to the log and what it reads back.

Always true: `decode_frames` returns entries only from whole frames whose bytes were verified, by it or by
its caller; an entry is immutable and holds its own copy of its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import cbor2

from lowwater.engine.format import format
from lowwater.engine.format.before_images import BeforeImage, decode_image
from lowwater.engine.format.format import BUCKET_BYTES_MAX, KEY_BYTES_MAX, Extras, Flag, Kind, ValueRef
from lowwater.engine.format.request_id import RequestId
from lowwater.engine.seams.checksum import crc32
from lowwater.engine.seams.interrupts import is_of_handler
from lowwater.errors import Corrupt, InvalidEntry, NewerVersion

_FRAME_FIXED_BYTES = format.FRAME_FIXED_BYTES
_FIXED_BYTES = format.FIXED_BYTES
_new = tuple.__new__


class Entry(NamedTuple):
    """One entry of the log. `extras` is None unless the frame has optional groups."""

    seq: int
    kind: str
    bucket: str
    key: str
    value: bytes
    metadata: dict[str, str] | None
    time_us: int
    origin: int
    txn: int | None = None
    extras: Extras | None = None

    @property
    def refused(self) -> int | None:
        """Why this entry had no effect, or None when it had its effect."""
        return None if self.extras is None else self.extras.refused

    @property
    def before(self) -> BeforeImage | None:
        """What the key had before this change; None where the log was not asked to keep that."""
        image = None if self.extras is None else self.extras.before
        if image is None:
            return None
        try:
            return decode_image(image)
        except (Corrupt, NewerVersion) as error:
            error.seq = self.seq
            raise


def decode_frames(data: bytes, start: int, end: int, *, verify: bool) -> Iterator[Entry]:
    """Yield the entries of the whole frames in `data[start:end]`.

    `verify` compares every frame's checksum. Leave it out only for bytes that were verified otherwise.
    """
    unpack = format.FRAME_FIXED.unpack_from
    names = format.KIND_NAMES
    view = memoryview(data)
    position = start
    seq = None
    try:
        while position < end:
            if end - position < _FRAME_FIXED_BYTES:
                raise Corrupt("a frame is cut short")
            (
                seq, length, checksum, kind, flags, bucket_len, key_len, metadata_len, time_us, origin,
            ) = unpack(data, position)  # fmt: skip
            frame_end = position + 16 + length
            bucket_start = position + _FRAME_FIXED_BYTES
            if frame_end > end:
                raise Corrupt("a frame is longer than what is left")
            if verify and checksum != crc32(
                view[position + 16 : frame_end], crc32(view[position : position + 12])
            ):
                raise Corrupt("a frame's checksum does not match")
            extras = None
            txn = None
            name = names[kind]
            if flags or name is None:
                if length < _FIXED_BYTES:
                    raise Corrupt("a frame is too short for an entry")
                format.check_kind_and_flags(kind, flags)
                extras, bucket_start = format.decode_extras(flags, data, bucket_start, frame_end)
                txn = extras.txn
            key_start = bucket_start + bucket_len
            metadata_start = key_start + key_len
            value_start = metadata_start + metadata_len
            if value_start > frame_end:
                raise Corrupt("the lengths inside a frame exceed it")
            value = data[value_start:frame_end]
            if flags & _VALUE_FLAGS:
                extras, value = _decode_value_flags(flags, extras, value)
            yield _new(
                Entry,
                (
                    seq,
                    name,
                    data[bucket_start:key_start].decode(),
                    data[key_start:metadata_start].decode(),
                    value,
                    format.decode_metadata(data[metadata_start:value_start]) if metadata_len else None,
                    time_us,
                    origin,
                    txn,
                    extras,
                ),
            )
            position = frame_end
    except UnicodeDecodeError as error:
        raise Corrupt("a bucket or key is not UTF-8", seq=seq, offset=position) from error
    except (Corrupt, NewerVersion) as error:
        if error.offset is None:
            error.seq, error.offset = seq, position
        raise


_VALUE_FLAGS = int(Flag.REFUSED | Flag.VALUE_REF)


def _decode_value_flags(flags: int, extras: Extras | None, value: bytes) -> tuple[Extras, bytes]:
    assert extras is not None
    if flags & _VALUE_FLAGS == _VALUE_FLAGS:
        raise Corrupt("an entry is refused and has a value")
    if flags & Flag.REFUSED:
        if len(value) != format.U16.size:
            raise Corrupt("a refused entry does not carry a code of two bytes")
        return extras._replace(refused=format.U16.unpack(value)[0]), b""
    if len(value) != format.VALUE_REF.size:
        raise Corrupt("a reference to a value has the wrong size")
    return extras._replace(value_ref=ValueRef(*format.VALUE_REF.unpack(value))), b""


def decode_payload(seq: int, payload: bytes) -> Entry:
    """Return the entry of a payload, as it stands in memory. Nothing is verified."""
    frame = format.FRAME.pack(seq, len(payload), 0) + payload
    return next(decode_frames(frame, 0, len(frame), verify=False))


# ---------------------------------------------------------------------------- what a program writes


class Writable(Protocol):
    """Anything that can be appended: it knows its payload, given the time at which it is ordered."""

    def encode(self, time_us: int) -> bytes: ...


def encode_put(
    bucket: str,
    key: str,
    value: bytes,
    *,
    metadata: Mapping[str, str] | None = None,
    time_us: int,
    origin: int = 0,
) -> bytes:
    """The payload of a put."""
    bucket_bytes = format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
    key_bytes = format.encode_name(key, "key", KEY_BYTES_MAX)
    if type(value) is not bytes:
        value = as_bytes(value)
    metadata_bytes = format.encode_metadata(metadata)
    return format.encode_payload(
        Kind.PUT, bucket_bytes, key_bytes, metadata_bytes, value, time_us=time_us, origin=origin
    )


def as_bytes(value: Any) -> bytes:
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, bytes):
        return value
    raise InvalidEntry(
        f"a value is bytes, not {type(value).__name__}", hint="encode it first, for example text.encode()"
    )


def check_payload(payload: bytes) -> None:
    """Raise InvalidEntry unless readers of all kinds will accept this payload. It is for payloads that
    somebody else has made: what `encode` gives needs no check."""
    if type(payload) is not bytes:
        raise InvalidEntry(
            f"a payload is bytes, not {type(payload).__name__}", hint="give what encode() returns"
        )
    if len(payload) < format.FIXED_BYTES:
        raise InvalidEntry("a payload is too short to be one", hint="give what encode() returns")
    kind, flags, bucket_len, key_len, metadata_len, time_us, _ = format.FIXED.unpack_from(payload)
    try:
        entry = decode_payload(1, payload)
    except (Corrupt, NewerVersion) as error:
        raise InvalidEntry(f"no reader would accept this: {error.message}") from error
    if bucket_len > BUCKET_BYTES_MAX or key_len > KEY_BYTES_MAX:
        raise InvalidEntry(
            f"a bucket has at most {BUCKET_BYTES_MAX} bytes, a key {KEY_BYTES_MAX:,}", hint="shorten the name"
        )
    if kind < Kind.BEGIN and not bucket_len:
        raise InvalidEntry("a bucket cannot be empty", hint="give the bucket at least one character")
    if kind in (Kind.PUT, Kind.DELETE, Kind.COPY) and not key_len:
        raise InvalidEntry("a key cannot be empty", hint="give the key at least one character")
    if kind == Kind.APPEND and not flags & (Flag.STREAM_OFFSET | Flag.REFUSED):
        raise InvalidEntry("a message needs its offset in its stream")
    if time_us > format.TIME_US_MAX:
        raise InvalidEntry("a time is below 2^63 microseconds", hint="give the time in microseconds")
    for forbidden, what in (
        (kind >= Kind.BEGIN and bucket_len, "bucket"),
        ((kind >= Kind.BEGIN or kind in _BUCKET_KINDS) and key_len, "key"),
        (kind in _VALUELESS_KINDS and entry.value, "value"),
        (kind == Kind.DELETE and metadata_len, "metadata"),
        (kind != Kind.COPY and flags & Flag.VALUE_REF, "reference to a value"),
        (kind != Kind.APPEND and flags & Flag.STREAM_OFFSET, "offset in a stream"),
        (kind == Kind.CREATE and flags & Flag.REFUSED, "refusal"),
    ):
        if forbidden:
            raise InvalidEntry(f"a {entry.kind} entry has no {what}", hint="leave it out")


_BUCKET_KINDS = frozenset({Kind.CREATE_BUCKET, Kind.DELETE_BUCKET})
_VALUELESS_KINDS = _BUCKET_KINDS | {Kind.DELETE}


# Of all of these: `time_us` is the proposer's clock, for an engine that is fed (`lowwater.Engine`). Databases
# and logs order entries themselves, and give them their own time. Conditions are for such an engine as well:
# `if_seq` is the seq that the newest version must have (0: there must be none), `if_absent` means `if_seq=0`.
# `txn` is the seq of the `Begin` of the transaction that an entry belongs to. Conditions are then about what
# the transaction sees, where its own versions have the seqs of their entries.
# So is `session`, by which a request that comes again is recognised: (session, number), or a `RequestId`.
RequestOf = RequestId | tuple[int, int] | tuple[int, int, int | None]


class Put(NamedTuple):
    """Store `value` under `key`."""

    bucket: str
    key: str
    value: bytes
    metadata: Mapping[str, str] | None = None
    origin: int = 0
    if_absent: bool = False
    if_seq: int | None = None
    time_us: int = 0
    txn: int = 0
    session: RequestOf | None = None

    def encode(self, time_us: int) -> bytes:
        if self.if_absent or self.if_seq is not None:
            raise _conditional()
        if self.session is not None:
            raise _sessionful()
        if self.txn:
            raise _transactional()
        return encode_put(
            self.bucket, self.key, self.value, metadata=self.metadata, time_us=time_us, origin=self.origin
        )


class Delete(NamedTuple):
    """Remove `key`."""

    bucket: str
    key: str
    origin: int = 0
    if_seq: int | None = None
    time_us: int = 0
    txn: int = 0
    session: RequestOf | None = None

    def encode(self, time_us: int) -> bytes:
        if self.if_seq is not None:
            raise _conditional()
        if self.session is not None:
            raise _sessionful()
        if self.txn:
            raise _transactional()
        bucket = format.encode_name(self.bucket, "bucket", BUCKET_BYTES_MAX)
        key = format.encode_name(self.key, "key", KEY_BYTES_MAX)
        return format.encode_payload(Kind.DELETE, bucket, key, b"", b"", time_us=time_us, origin=self.origin)


class Copy(NamedTuple):
    """Store what `key` has under `to_key` too. Conditions are about `to_key`."""

    bucket: str
    key: str
    to_bucket: str
    to_key: str
    origin: int = 0
    if_absent: bool = False
    if_seq: int | None = None
    time_us: int = 0
    txn: int = 0
    session: RequestOf | None = None


class Write(NamedTuple):
    """Write all of these or none. Conditions, and what is copied, are about what is there before the first of
    them. The n members have the n seqs that end at the one that the engine is given."""

    entries: Sequence[Put | Delete | Copy]
    session: RequestOf | None = None


class Begin(NamedTuple):
    """Begin a transaction, whose name is the seq of this entry. It reads as of `snapshot_seq`, whose versions
    have to be kept, or as of the entry before this one."""

    snapshot_seq: int | None = None
    origin: int = 0
    time_us: int = 0
    session: RequestOf | None = None


class Commit(NamedTuple):
    """Commit a transaction: its versions get the seq and the time of this entry. The commit is refused, and
    so becomes an abort, where the transaction is doomed, or where others have written since its snapshot what
    it has read. `keys` are pairs of bucket and key that it has read. `ranges` are buckets, each with the
    first key and the key at which the range ends; None there means all from the first key on."""

    txn: int
    keys: Sequence[tuple[str, str]] = ()
    ranges: Sequence[tuple[str, str, str | None]] = ()
    origin: int = 0
    time_us: int = 0
    session: RequestOf | None = None


class Abort(NamedTuple):
    """Undo a transaction. With `savepoint_seq`, undo only what it has done after that entry of its own, or
    after its `Begin`."""

    txn: int
    savepoint_seq: int | None = None
    origin: int = 0
    time_us: int = 0
    session: RequestOf | None = None


class CreateBucket(NamedTuple):
    """Makes a bucket. It is refused where there is one."""

    bucket: str
    origin: int = 0
    time_us: int = 0
    session: RequestOf | None = None

    def encode(self, time_us: int) -> bytes:
        if self.session is not None:
            raise _sessionful()
        return _encode_bucket_entry(Kind.CREATE_BUCKET, self.bucket, time_us, self.origin)


class DeleteBucket(NamedTuple):
    """Removes a bucket. It is refused where that holds keys."""

    bucket: str
    origin: int = 0
    time_us: int = 0
    session: RequestOf | None = None

    def encode(self, time_us: int) -> bytes:
        if self.session is not None:
            raise _sessionful()
        return _encode_bucket_entry(Kind.DELETE_BUCKET, self.bucket, time_us, self.origin)


def _sessionful() -> InvalidEntry:
    return InvalidEntry(
        "nobody knows sessions here", hint="use session() of a database, or apply_log_entry() of an engine"
    )


def _conditional() -> InvalidEntry:
    return InvalidEntry(
        "nobody decides a condition here", hint="use put() of a database, or apply_log_entry() of an engine"
    )


def _transactional() -> InvalidEntry:
    return InvalidEntry(
        "nobody decides about a transaction here",
        hint="use transaction() of a database, or apply_log_entry() of an engine",
    )


def _encode_bucket_entry(kind: Kind, bucket: str, time_us: int, origin: int) -> bytes:
    name = format.encode_name(bucket, "bucket", BUCKET_BYTES_MAX)
    return format.encode_payload(kind, name, b"", b"", b"", time_us=time_us, origin=origin)


class Control(NamedTuple):
    """A control entry: its body is canonical CBOR, or nothing."""

    kind: Kind
    body: Mapping[str, Any] | None = None
    origin: int = 0
    time_us: int = 0
    session: RequestOf | None = None

    @property
    def encoded_body(self) -> bytes:
        try:
            return b"" if not self.body else cbor2.dumps(dict(self.body), canonical=True)
        except cbor2.CBOREncodeError as error:
            raise InvalidEntry(f"this body cannot be encoded: {error}") from error

    def encode(self, time_us: int) -> bytes:
        if self.session is not None:
            raise _sessionful()
        value = self.encoded_body
        return format.encode_payload(self.kind, b"", b"", b"", value, time_us=time_us, origin=self.origin)


def decode_body(entry: Entry) -> dict[str, Any]:
    """Return the body of a control entry."""
    try:
        body = cbor2.loads(entry.value) if entry.value else {}
    except Exception as error:  # cbor2 raises whatever its decoding of hostile bytes runs into
        if is_of_handler(error):
            raise
        raise Corrupt(f"the body of a {entry.kind} entry is not CBOR", seq=entry.seq) from error
    if not isinstance(body, dict):
        raise Corrupt(f"the body of a {entry.kind} entry is not a map", seq=entry.seq)
    return body
