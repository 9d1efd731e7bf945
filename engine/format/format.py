"""The bytes of the log: frames, payloads, segment headers, footers' fixed parts and trailers.

Always true:
  - everything is little-endian, and nothing here depends on clock, process, platform or dictionary order;
  - equal entries give equal bytes: an encoder has no freedom;
  - magic, version and checksum are three checks, made in that order, with three different errors;
  - an unknown kind, an unknown flag and a newer version are "upgrade", never ignored and never "corrupt".

`docs/FORMAT.md` has the same tables for people; a test ties the two. This module knows nothing of files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from operator import add
from typing import NamedTuple

import cbor2

from lowwater.engine.seams.checksum import crc32
from lowwater.engine.seams.interrupts import is_of_handler
from lowwater.errors import Corrupt, InvalidEntry, NewerVersion, NotLowwater

VERSION_MAJOR = 1
VERSION_MINOR = 0

HEADER_MAGIC = b"LWSEG\r\n\x1a"
TRAILER_MAGIC = b"LWEND\r\n\x1a"

SEQ_MAX = 2**64 - 1
# Others have times as signed numbers, Arrow among them.
TIME_US_MAX = 2**63 - 1
KEY_BYTES_MAX = 1024
BUCKET_BYTES_MAX = 255
METADATA_BYTES_MAX = 2**16 - 1

# What is written between two syncs. A crash can tear one batch and no more, so recovery tells a torn
# write from damage by it; it can therefore not be a setting. A frame and a group fit into a batch.
BATCH_BYTES_MAX = 32 * 2**20
ENTRY_BYTES_DEFAULT = 16 * 2**20
SEGMENT_BYTES_DEFAULT = 100_000_000
SEGMENT_BYTES_MIN = 4096
# Positions are u32, and a segment may exceed its size by the batch that filled it.
SEGMENT_BYTES_MAX = 2**31
BLOCK_BYTES_DEFAULT = 256 * 1024
BLOCK_BYTES_MIN = 1024
BLOCK_BYTES_MAX = 16 * 2**20


class Kind(IntEnum):
    """What an entry is. A frame's kind is its first payload byte."""

    CREATE_BUCKET = 1
    DELETE_BUCKET = 2
    PUT = 3
    DELETE = 4
    COPY = 5
    APPEND = 6
    BEGIN = 16
    COMMIT = 17
    ABORT = 18
    CREATE = 32
    FORK = 33
    SETTINGS = 34
    HORIZON = 35
    PIN = 36
    UNPIN = 37
    PRUNE = 38
    NOOP = 39
    SEAL = 40
    SEGMENT_SHIPPED = 41
    CHECKPOINT = 42
    CHECKPOINT_SHIPPED = 43
    COMPACTED = 44
    RELEASED = 45
    SESSION_OPEN = 80
    SESSION_KEEP = 81
    SESSION_CLOSE = 82


# Names by code, for decoding without a dictionary look-up.
KIND_NAMES: list[str | None] = [None] * 256
for _kind in Kind:
    KIND_NAMES[_kind] = _kind.name.lower()
KIND_CODES: dict[str, Kind] = {kind.name.lower(): kind for kind in Kind}


class Flag(IntEnum):
    """Which optional groups follow the fixed part, in this order, and two facts about the frame."""

    TXN = 1  # u64 transaction, u64 seq of its frame before this one
    GROUP = 2  # u64 last seq of the group
    SESSION = 4  # u64 session, u64 request number
    REQUEST_HASH = 8  # 16 bytes of BLAKE3 of the canonical request
    STREAM_OFFSET = 16  # u64 offset of the message in its stream
    BEFORE = 32  # u32 length, before-image
    REFUSED = 256  # the entry had no effect; the value is a u16 code
    VALUE_REF = 512  # the value is a VALUE_REF instead of the bytes themselves


FLAGS_KNOWN = sum(Flag)
_GROUP_BITS = 31  # the groups of fixed size
GROUP_BYTES: tuple[int, ...] = tuple(
    sum(size for bit, size in ((1, 16), (2, 8), (4, 16), (8, 16), (16, 8)) if flags & bit)
    for flags in range(_GROUP_BITS + 1)
)


# In the header of a segment whose changes say what was there before. The bit below it is not used: there are
# files with it that stand for a version to come.
SEGMENT_FLAG_BEFORE_IMAGES = 2


class Compression(IntEnum):
    """How a segment is to be stored in the archive. The local file is never compressed."""

    NONE = 0
    ZSTD = 1


FRAME = struct.Struct("<QII")
FRAME_CHECKED_HEAD = struct.Struct("<QI")  # seq and length: what the checksum covers besides the payload
FIXED = struct.Struct("<BHHHHQQ")
FRAME_FIXED = struct.Struct("<QIIBHHHHQQ")
HEADER = struct.Struct("<8sHHIQQ32s16sQQIB3xQ12xI")
TRAILER = struct.Struct("<8sHHIQQQQQQIIIIII32s32s36xI")
VALUE_REF = struct.Struct("<QQ32s")
KIND_COUNT = struct.Struct("<II")
STREAM_HEAD = struct.Struct("<HQI")
U16 = struct.Struct("<H")
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
PAIR = struct.Struct("<QQ")

FRAME_BYTES = FRAME.size
FIXED_BYTES = FIXED.size
FRAME_FIXED_BYTES = FRAME_FIXED.size
HEADER_BYTES = HEADER.size
TRAILER_BYTES = TRAILER.size
TIME_SLICE = slice(9, 17)  # of a payload: time_us
FOOTER_ALIGNMENT_BYTES = 64

assert FRAME_BYTES == 16
assert FIXED_BYTES == 25
assert FRAME_FIXED_BYTES == FRAME_BYTES + FIXED_BYTES
assert HEADER_BYTES == 128
assert TRAILER_BYTES == 192
assert VALUE_REF.size == 48
assert FLAGS_KNOWN < 2**16

PAYLOAD_BYTES_MAX = BATCH_BYTES_MAX - FRAME_BYTES

_pack_frame = FRAME.pack
_pack_frame_head = FRAME_CHECKED_HEAD.pack
_pack_u32 = U32.pack
_pack_fixed = FIXED.pack


# ---------------------------------------------------------------------------- payloads


class ValueRef(NamedTuple):
    """A copied value that is too large to be written twice: where its bytes are."""

    length: int
    seq: int
    blake3: bytes


class Extras(NamedTuple):
    """What the optional groups of a frame say. Most frames have none."""

    txn: int | None = None
    txn_seq_before: int = 0
    group_seq_last: int | None = None
    session: int | None = None
    request: int = 0
    request_hash: bytes | None = None
    stream_offset: int | None = None
    before: bytes | None = None
    refused: int | None = None
    value_ref: ValueRef | None = None


NO_EXTRAS = Extras()


def encode_name(text: str, what: str, bytes_max: int, *, empty_allowed: bool = False) -> bytes:
    """A bucket or key as it stands in a frame."""
    if not isinstance(text, str):
        raise InvalidEntry(f"a {what} is text, not {type(text).__name__}", hint=f"give the {what} as str")
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidEntry(
            f"this {what} cannot be written as UTF-8: {text!r:.80}",
            hint=f"a {what} may hold any Unicode text, but no lone surrogates",
        ) from error
    if len(data) > bytes_max:
        raise InvalidEntry(
            f"this {what} has {len(data):,} bytes as UTF-8; at most {bytes_max:,} are allowed",
            hint=f"shorten the {what}",
        )
    if not data and not empty_allowed:
        raise InvalidEntry(f"a {what} cannot be empty", hint=f"give the {what} at least one character")
    return data


def encode_metadata(metadata: Mapping[str, str] | None) -> bytes:
    """Canonical CBOR of a map from text to text; nothing at all for an empty one."""
    if not metadata:
        return b""
    if not isinstance(metadata, Mapping):
        raise InvalidEntry(f"metadata is a mapping, not {type(metadata).__name__}", hint="give a dict")
    for name, text in metadata.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidEntry(
                f"metadata maps text to text; {name!r:.80} maps to {type(text).__name__}",
                hint="convert names and values to str",
            )
    try:
        data = cbor2.dumps(dict(metadata), canonical=True)
    except (UnicodeEncodeError, cbor2.CBOREncodeError) as error:
        raise InvalidEntry(
            "this metadata cannot be written as UTF-8", hint="remove lone surrogates"
        ) from error
    if len(data) > METADATA_BYTES_MAX:
        raise InvalidEntry(
            f"this metadata has {len(data):,} bytes when encoded; at most {METADATA_BYTES_MAX:,} are allowed",
            hint="keep large things in the value",
        )
    return data


def decode_metadata(data: bytes) -> dict[str, str]:
    """The inverse of `encode_metadata`, for at least one byte."""
    try:
        metadata = cbor2.loads(data)
    except Exception as error:  # cbor2 raises whatever its decoding of hostile bytes runs into
        if is_of_handler(error):
            raise
        raise Corrupt("metadata is not CBOR") from error
    if not isinstance(metadata, dict):
        raise Corrupt("metadata is not a map")
    for name, text in metadata.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise Corrupt("metadata does not map text to text")
    return metadata


def encode_payload(
    kind: int,
    bucket: bytes,
    key: bytes,
    metadata: bytes,
    value: bytes,
    *,
    time_us: int,
    origin: int = 0,
    extras: Extras = NO_EXTRAS,
) -> bytes:
    """A frame's payload. Names and metadata come from `encode_name` and `encode_metadata`."""
    if not 0 <= time_us <= TIME_US_MAX or not 0 <= origin <= SEQ_MAX:
        raise InvalidEntry(
            "a time is below 2^63 and an origin below 2^64, and neither below 0",
            hint="give 0 where there is none",
        )
    if extras is NO_EXTRAS:
        fixed = _pack_fixed(kind, 0, len(bucket), len(key), len(metadata), time_us, origin)
        payload = b"".join((fixed, bucket, key, metadata, value))
    else:
        flags, groups, value = _encode_extras(extras, value)
        fixed = _pack_fixed(kind, flags, len(bucket), len(key), len(metadata), time_us, origin)
        payload = b"".join((fixed, groups, bucket, key, metadata, value))
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise InvalidEntry(
            f"this entry has {len(payload):,} bytes; a frame holds at most {PAYLOAD_BYTES_MAX:,}",
            hint="split the value",
        )
    return payload


def _encode_extras(extras: Extras, value: bytes) -> tuple[int, bytes, bytes]:
    flags = 0
    groups = []
    if extras.txn is not None:
        flags |= Flag.TXN
        groups.append(PAIR.pack(extras.txn, extras.txn_seq_before))
    if extras.group_seq_last is not None:
        flags |= Flag.GROUP
        groups.append(U64.pack(extras.group_seq_last))
    if extras.session is not None:
        flags |= Flag.SESSION
        groups.append(PAIR.pack(extras.session, extras.request))
    if extras.request_hash is not None:
        assert len(extras.request_hash) == 16
        flags |= Flag.REQUEST_HASH
        groups.append(extras.request_hash)
    if extras.stream_offset is not None:
        flags |= Flag.STREAM_OFFSET
        groups.append(U64.pack(extras.stream_offset))
    if extras.before is not None:
        flags |= Flag.BEFORE
        groups.append(U32.pack(len(extras.before)))
        groups.append(extras.before)
    if extras.refused is not None:
        assert not value, "a refused entry carries a code and no value"
        assert extras.value_ref is None
        flags |= Flag.REFUSED
        value = U16.pack(extras.refused)
    elif extras.value_ref is not None:
        assert not value, "a value is either here or referred to"
        flags |= Flag.VALUE_REF
        value = VALUE_REF.pack(*extras.value_ref)
    return flags, b"".join(groups), value


def decode_extras(flags: int, data: bytes, start: int, end: int) -> tuple[Extras, int]:
    """The optional groups that begin at `start`, and where the bucket begins."""
    position = start
    group_bytes = GROUP_BYTES[flags & _GROUP_BITS] + (4 if flags & Flag.BEFORE else 0)
    if start + group_bytes > end:
        raise Corrupt("a frame ends inside its optional groups")
    txn = group_seq_last = session = stream_offset = request_hash = before = None
    txn_seq_before = request = 0
    if flags & Flag.TXN:
        txn, txn_seq_before = PAIR.unpack_from(data, position)
        position += 16
    if flags & Flag.GROUP:
        (group_seq_last,) = U64.unpack_from(data, position)
        position += 8
    if flags & Flag.SESSION:
        session, request = PAIR.unpack_from(data, position)
        position += 16
    if flags & Flag.REQUEST_HASH:
        request_hash = bytes(data[position : position + 16])
        position += 16
    if flags & Flag.STREAM_OFFSET:
        (stream_offset,) = U64.unpack_from(data, position)
        position += 8
    if flags & Flag.BEFORE:
        (length,) = U32.unpack_from(data, position)
        position += 4
        if position + length > end:
            raise Corrupt("a frame ends inside its before-image")
        before = bytes(data[position : position + length])
        position += length
    extras = Extras(
        txn, txn_seq_before, group_seq_last, session, request, request_hash, stream_offset, before
    )
    return extras, position


def check_kind_and_flags(kind: int, flags: int) -> None:
    if KIND_NAMES[kind] is None:
        raise NewerVersion(f"entries of kind {kind} are not known to this version")
    if flags & ~FLAGS_KNOWN:
        raise NewerVersion(f"the entry flags {flags & ~FLAGS_KNOWN:#x} are not known to this version")


# ---------------------------------------------------------------------------- frames


def encode_frames(seqs: Iterable[int], payloads: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """The frames of `payloads` one after the other; `sizes` are the lengths of the payloads."""
    if len(payloads) == 1:
        head = _pack_frame_head(next(iter(seqs)), sizes[0])
        return head + _pack_u32(crc32(payloads[0], crc32(head))) + payloads[0]
    heads = list(map(_pack_frame_head, seqs, sizes))
    parts = [b""] * (3 * len(heads))
    parts[0::3] = heads
    parts[1::3] = map(_pack_u32, map(crc32, payloads, map(crc32, heads)))
    parts[2::3] = payloads
    return b"".join(parts)


def encode_each_frame(seqs: Sequence[int], payloads: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
    """Return the frame of each payload as a `bytes` of its own, for callers that keep them. `sizes` are the
    lengths of the payloads."""
    checksums = map(crc32, payloads, map(crc32, map(_pack_frame_head, seqs, sizes)))
    return list(map(add, map(_pack_frame, seqs, sizes, checksums), payloads))


def frame_checksum(seq: int, payload: bytes) -> int:
    return crc32(payload, crc32(_pack_frame_head(seq, len(payload))))


# ---------------------------------------------------------------------------- header and trailer


class SegmentHeader(NamedTuple):
    """The first 128 bytes of a segment: who wrote it, what it follows, and how it was cut."""

    seq_first: int
    seq_before: int
    hash_before: bytes
    cluster_id: bytes
    epoch: int
    segment_bytes: int
    block_bytes: int
    compression: int
    time_before_us: int
    before_images: int = 0  # in the flags

    def encode(self) -> bytes:
        assert len(self.hash_before) == 32
        assert len(self.cluster_id) == 16
        assert self.seq_first > self.seq_before
        return self._encode(VERSION_MINOR)

    def _encode(self, version_minor: int) -> bytes:
        *numbers, before_images = self
        flags = SEGMENT_FLAG_BEFORE_IMAGES if before_images else 0
        fields = (HEADER_MAGIC, VERSION_MAJOR, version_minor, flags, *numbers, 0)
        data = HEADER.pack(*fields)[: -U32.size]
        return data + U32.pack(crc32(data))

    @classmethod
    def decode(cls, data: bytes) -> SegmentHeader:
        data = bytes(data[:HEADER_BYTES])
        _check_magic_and_version(data, HEADER_MAGIC, HEADER_BYTES, "segment header")
        if crc32(data[: -U32.size]) != U32.unpack_from(data, HEADER_BYTES - U32.size)[0]:
            raise Corrupt("the segment header's checksum does not match", offset=0)
        _magic, _major, version_minor, flags, *fields, _crc = HEADER.unpack(data)
        if flags & ~SEGMENT_FLAG_BEFORE_IMAGES:
            raise NewerVersion(f"the segment flags {flags:#x} are not known to this version")
        header = cls(*fields)
        if flags:
            header = header._replace(before_images=1)
        if header.seq_first <= header.seq_before:
            raise Corrupt(
                "the segment header says that it begins before the segment that it follows", offset=0
            )
        if not header.epoch:
            raise Corrupt("the segment header has the epoch 0", offset=0)
        if not BLOCK_BYTES_MIN <= header.block_bytes <= BLOCK_BYTES_MAX:
            raise Corrupt(f"the segment header has a block size of {header.block_bytes}", offset=0)
        if header.compression > max(Compression):
            raise NewerVersion(f"the compression {header.compression} is not known to this version")
        if not SEGMENT_BYTES_MIN <= header.segment_bytes <= SEGMENT_BYTES_MAX:
            raise Corrupt(f"the segment header has a segment size of {header.segment_bytes}", offset=0)
        if header._encode(version_minor) != data:
            raise Corrupt("the segment header has bytes set that must be zero", offset=0)
        return header


class SegmentTrailer(NamedTuple):
    """The last 192 bytes of a sealed segment: where its footer is, and what it and the body hash to."""

    file_bytes: int
    body_bytes: int
    seq_first: int
    seq_last: int
    time_min_us: int
    time_max_us: int
    frame_count: int
    key_count: int
    block_count: int
    kind_count: int
    stream_count: int
    stream_bytes: int
    segment_hash: bytes
    footer_hash: bytes

    def encode(self) -> bytes:
        return self._encode(VERSION_MINOR)

    def _encode(self, version_minor: int) -> bytes:
        fields = (TRAILER_MAGIC, VERSION_MAJOR, version_minor, 0, *self, 0)
        data = TRAILER.pack(*fields)[: -U32.size]
        return data + U32.pack(crc32(data))

    @classmethod
    def decode(cls, data: bytes) -> SegmentTrailer:
        """The trailer from the last bytes of a file."""
        data = bytes(data[-TRAILER_BYTES:])
        if data[: len(TRAILER_MAGIC)] != TRAILER_MAGIC:
            raise Corrupt(
                "the segment does not end with its trailer: it was cut off, or something was added to it",
                hint="restore this segment, or run `lowwater log repair` into a copy",
            )
        _check_magic_and_version(data, TRAILER_MAGIC, TRAILER_BYTES, "segment trailer")
        if crc32(data[: -U32.size]) != U32.unpack_from(data, TRAILER_BYTES - U32.size)[0]:
            raise Corrupt("the segment trailer's checksum does not match")
        _magic, _major, version_minor, flags, *fields, _crc = TRAILER.unpack(data)
        if flags:
            raise NewerVersion(f"the segment trailer's flags {flags:#x} are not known to this version")
        trailer = cls(*fields)
        if trailer._encode(version_minor) != data:
            raise Corrupt("the segment trailer has bytes set that must be zero")
        sections = trailer.section_offsets()
        if sections.end + TRAILER_BYTES != trailer.file_bytes:
            raise Corrupt("the segment trailer's counts do not add up to the size of its file")
        if not trailer.frame_count or trailer.body_bytes < HEADER_BYTES:
            raise Corrupt("the segment trailer describes a segment without frames")
        return trailer

    def section_offsets(self) -> FooterSections:
        """Where each section of the footer begins in the file."""
        positions = align_footer(self.body_bytes)
        key_hashes = positions + 4 * self.frame_count
        key_frames = key_hashes + 4 * self.key_count
        block_hashes = key_frames + 4 * self.key_count
        kinds = block_hashes + 32 * self.block_count
        streams = kinds + KIND_COUNT.size * self.kind_count
        return FooterSections(
            positions, key_hashes, key_frames, block_hashes, kinds, streams, streams + self.stream_bytes
        )


class FooterSections(NamedTuple):
    """File offsets of the footer's sections, in their order; `end` is where the trailer begins."""

    positions: int
    key_hashes: int
    key_frames: int
    block_hashes: int
    kinds: int
    streams: int
    end: int


def align_footer(body_bytes: int) -> int:
    """Where the footer's first section begins: at the next multiple of 64."""
    return -(-body_bytes // FOOTER_ALIGNMENT_BYTES) * FOOTER_ALIGNMENT_BYTES


def _check_magic_and_version(data: bytes, magic: bytes, size: int, what: str) -> None:
    if not data:
        raise NotLowwater("the file is empty")
    if data[: len(magic)] != magic:
        raise NotLowwater(f"there is no {what} here")
    if len(data) < size:
        raise Corrupt(f"the {what} is cut short: {len(data)} of {size} bytes")
    major, minor = struct.unpack_from("<HH", data, len(magic))
    if (major, minor) > (VERSION_MAJOR, VERSION_MINOR):
        raise NewerVersion(
            f"this {what} has format version {major}.{minor}; "
            f"this Lowwater reads up to {VERSION_MAJOR}.{VERSION_MINOR}"
        )
    if major < VERSION_MAJOR:
        raise Corrupt(f"the {what} has format version {major}.{minor}, which never existed")
