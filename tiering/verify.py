"""Whether an object of an archive is what its name says: one function for every type.

Always true: every byte of the object is covered, by the hash in its name or by a hash or checksum that this
leads to; memory is bounded by a few blocks for segments and packs. What catalogues and manifests say of an
object is for others to compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from blake3 import blake3

from lowwater.engine.format.blocks import require
from lowwater.engine.format.ckpt import PACK_HEADER, PACK_MAGIC, decode_named
from lowwater.engine.format.format import HEADER_BYTES, SegmentHeader
from lowwater.engine.log.compress import ZSTD_MAGIC, CompressedSegment, verify_stored
from lowwater.engine.log.directory import read_trailer
from lowwater.engine.log.footer import hash_blocks, segment_hash
from lowwater.engine.seams.seams import File, SyncMode
from lowwater.engine.state.catalogue import SegmentDescriptor, decode_any_chunk, describe_segment
from lowwater.errors import Corrupt, LowwaterError, NotLowwater
from lowwater.tiering.names import ObjectName, parse, short
from lowwater.tiering.objects import (
    HINT,
    decode_cluster,
    decode_epoch,
    decode_manifest,
    decode_state,
    require_hash,
)
from lowwater.tiering.store import Store, at

READ_BYTES = 2**22
# What is read at once of an object of which only the ends are wanted.
ENDS_BYTES = 2**16
# Objects that are decoded as a whole: larger ones are none of ours.
SMALL_BYTES_MAX = 256 * 2**20


class ObjectBytes(Protocol):
    def read_at(self, offset: int, size: int) -> bytes: ...

    def size(self) -> int: ...


class ObjectFile:
    """An object of a store as a file to read from, mostly front to back. Not for several threads at once.

    `first_bytes` is what the first request asks for, and one that does not go on where the last one ended;
    others ask for twice as much as the one before."""

    def __init__(
        self, store: Store, name: str, size: int | None = None, *, first_bytes: int = READ_BYTES
    ) -> None:
        self._store = store
        self.name = name
        self._size = store.stat(name).size if size is None else size
        self._start = 0
        self._window = b""
        self._first_bytes = self._next_bytes = first_bytes

    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self._size)
        if offset >= end:
            return b""
        window_end = self._start + len(self._window)
        if not self._start <= offset or end > window_end:
            goes_on = self._start < offset <= window_end
            self._next_bytes = min(2 * self._next_bytes, READ_BYTES) if goes_on else self._first_bytes
            until = max(end, min(offset + self._next_bytes, self._size))
            self._start, self._window = offset, self._fetch(offset, until)
        return self._window[offset - self._start : end - self._start]

    def _fetch(self, start: int, end: int) -> bytes:
        """All of it: what is read of a file is short at its end only, and who reads relies on that."""
        data = self._store.read(self.name, start, end)
        if len(data) != end - start:
            raise Corrupt("less of the object came than it has", path=self.name, offset=start + len(data))
        return data

    def close(self) -> None:
        self._window = b""

    def write_at(self, offset: int, buffers: object, sync: SyncMode = "none") -> int:
        raise OSError("objects never change")

    def write_each(self, offset: int, parts: object, sync: SyncMode) -> None:
        raise OSError("objects never change")

    def sync(self, mode: SyncMode) -> None:
        raise OSError("objects never change")

    def truncate(self, size: int) -> None:
        raise OSError("objects never change")


class ObjectEnds(ObjectFile):
    """An object of which little is read besides its two ends: one request for each, and few bytes."""

    def __init__(self, store: Store, name: str, size: int | None = None) -> None:
        super().__init__(store, name, size)
        self._ends: dict[int, bytes] = {}

    def read_at(self, offset: int, size: int) -> bytes:
        whole = self.size()
        end = min(offset + size, whole)
        for start in (0, max(0, whole - ENDS_BYTES)):
            if start <= offset and end <= start + ENDS_BYTES:
                if start not in self._ends:
                    self._ends[start] = self._fetch(start, min(start + ENDS_BYTES, whole))
                return self._ends[start][offset - start : end - start] if offset < end else b""
        return self._fetch(offset, end) if offset < end else b""


def verify_object(name: str, reader: ObjectBytes, *, uri: str = "") -> None:
    """Raise where the object is not what its name says: `Corrupt`, `NotLowwater` or `NewerVersion`, with its
    name."""
    try:
        found = parse(name)
        if found is None:
            raise NotLowwater(
                "no object of an archive has this name", hint="find out what wrote it: no reader needs it"
            )
        if found.type == "segment":
            verify_segment(found, reader)
        elif found.type == "pack":
            _verify_pack(found, reader)
        else:
            _verify_small(name, found, reader)
    except LowwaterError as error:
        if error.path is None:
            error.path = at(uri, name) if uri else name
        raise


def _verify_small(name: str, found: ObjectName, reader: ObjectBytes) -> None:
    size = reader.size()
    if size > SMALL_BYTES_MAX:
        raise Corrupt(f"the object has {size:,} bytes: none of this type is so large", hint=HINT)
    data = reader.read_at(0, size)
    if len(data) != size:
        raise Corrupt("the object is shorter than it was", hint=HINT)
    if found.type == "checkpoint":
        decode_named(data, name.rpartition("/")[2])
        return
    if found.type == "cluster":
        decode_cluster(data)
        return
    if found.type == "state":
        if decode_state(data).number != found.seq:
            raise Corrupt("this state has another number than its name says", hint=HINT)
        return
    require_hash(data, found.hash, found.type)
    if found.type == "chunk":
        decode_any_chunk(data)
    elif found.type == "epoch":
        if decode_epoch(data).epoch != found.epoch:
            raise Corrupt("this claim is of another epoch than its name says", hint=HINT)
    else:
        manifest = decode_manifest(data)
        if (manifest.epoch, manifest.seq) != (found.epoch, found.seq):
            raise Corrupt("this manifest is of another entry than its name says", hint=HINT)


def _verify_pack(found: ObjectName, reader: ObjectBytes) -> None:
    require(reader.read_at(0, PACK_HEADER.size), PACK_MAGIC, "pack", PACK_HEADER.size)
    hasher = blake3()
    for data in _parts(reader, 0, reader.size()):
        hasher.update(data)
    if hasher.hexdigest() != found.hash:
        raise Corrupt("the hash of this pack does not match its name", hint=HINT)


def _parts(reader: ObjectBytes, start: int, end: int) -> Iterator[bytes]:
    while start < end:
        data = reader.read_at(start, min(READ_BYTES, end - start))
        if not data:
            raise Corrupt("the object is shorter than it was", offset=start, hint=HINT)
        yield data
        start += len(data)


# ---------------------------------------------------------------------------- segments


def open_segment(reader: ObjectBytes) -> File:
    """A segment's raw bytes, however it is stored."""
    file: File = reader  # type: ignore[assignment]
    return CompressedSegment(file) if reader.read_at(0, len(ZSTD_MAGIC)) == ZSTD_MAGIC else file


def describe_object(found: ObjectName, reader: ObjectBytes) -> tuple[SegmentHeader, SegmentDescriptor]:
    """What the two ends of a segment say, which is compared with its name. Its blocks are not looked at."""
    file = open_segment(reader)
    header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
    described = describe_segment(header, read_trailer(file, file.size()))
    if described.size != file.size():
        raise Corrupt("the segment has another size than its trailer says", hint=HINT)
    of_name = (found.epoch, found.seq, found.seq_last, found.hash)
    if of_name != (described.epoch, described.first, described.last, short(described.hash)):
        raise Corrupt("this is another segment than its name says", hint=HINT)
    return header, described


def verify_segment(found: ObjectName, reader: ObjectBytes) -> SegmentDescriptor:
    """Every byte of a segment: its blocks by their hashes, those by the segment's, which the name has."""
    if reader.read_at(0, len(ZSTD_MAGIC)) == ZSTD_MAGIC:
        verify_stored(reader)  # type: ignore[arg-type]
    _, described = describe_object(found, reader)
    file = open_segment(reader)
    trailer = read_trailer(file, file.size())
    sections = trailer.section_offsets()
    footer_hash = blake3()
    for data in _parts(file, trailer.body_bytes, sections.end):
        footer_hash.update(data)
    if footer_hash.digest() != trailer.footer_hash:
        raise Corrupt("the footer's hash does not match", offset=trailer.body_bytes, hint=HINT)
    hashes = b"".join(_parts(file, sections.block_hashes, sections.kinds))
    held = [hashes[start : start + 32] for start in range(0, len(hashes), 32)]
    if segment_hash(held) != described.hash:
        raise Corrupt("the hash of the block hashes does not match", offset=sections.block_hashes, hint=HINT)
    if len(held) != -(-described.body_bytes // described.block_bytes):
        raise Corrupt("the segment has hashes of another number of blocks", hint=HINT)
    for number, expected in enumerate(held):
        offset = number * described.block_bytes
        block = file.read_at(offset, min(described.block_bytes, described.body_bytes - offset))
        if hash_blocks(block, described.block_bytes) != [expected]:
            raise Corrupt("a block's hash does not match", offset=offset, hint=HINT)
    return described
