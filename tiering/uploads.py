"""One sealed segment, from the local disk into a store.

Always true:
  - every byte of the body is compared with the segment's hash, and of the footer with its own, before it goes
    out; where one does not match, no object appears;
  - memory is a few pieces, whatever the segment's size, besides what the store takes for itself;
  - an object that is there is kept. It counts when its two ends say that it is this segment, and every byte
    was verified: by the store's checksum where this process would send the same bytes, else by reading it,
    for another version of zstd may have compressed them differently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from blake3 import blake3

from lowwater.engine.format import format
from lowwater.engine.format.format import Compression
from lowwater.engine.log.compress import compressed_pieces
from lowwater.engine.log.directory import read_sealed, read_trailer, typed_errors
from lowwater.engine.log.verified import VerifiedBlocks
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.seams.seams import File, Files
from lowwater.engine.state.catalogue import SegmentDescriptor, describe_segment
from lowwater.errors import Corrupt, LowwaterError, NotFound, StoreCorrupt
from lowwater.tiering.names import parse, segment_name
from lowwater.tiering.store import Store, at
from lowwater.tiering.verified_writes import KnownObjects, Passing, has_sound, pass_through, write_measured
from lowwater.tiering.verify import ObjectFile, describe_object

READ_BYTES = 2**20

BEFORE_UPLOAD = Failpoint("ship.before_upload")
AFTER_UPLOAD = Failpoint("ship.after_upload")


class Uploaded(NamedTuple):
    """`made` is False where the object was there. `size` is what it takes in the store."""

    made: bool
    size: int


class VerifiedFile:
    """A sealed segment whose bytes were compared with its hashes before they are given away."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._blocks = VerifiedBlocks(file)
        self._size = file.size()
        trailer = read_trailer(file, self._size)
        self._body_bytes = trailer.body_bytes
        self.segment_hash = trailer.segment_hash
        hasher = blake3()
        footer_end = self._size - format.TRAILER_BYTES
        for start in range(self._body_bytes, footer_end, READ_BYTES):
            hasher.update(file.read_at(start, min(READ_BYTES, footer_end - start)))
        if hasher.digest() != trailer.footer_hash:
            raise Corrupt("the hash of the footer does not match", offset=self._body_bytes)

    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self._size)
        body_end = min(end, self._body_bytes)
        data = self._blocks.read(offset, body_end) if offset < body_end else b""
        if end > body_end:
            data += self._file.read_at(max(offset, body_end), end - max(offset, body_end))
        return data

    def close(self) -> None:
        self._file.close()


def describe_file(files: Files, path: str) -> SegmentDescriptor:
    """A sealed segment of the log directory."""
    return describe_segment(*read_sealed(files, path))


def upload_segment(
    store: Store,
    files: Files,
    path: str,
    segment: SegmentDescriptor,
    *,
    part_bytes: int,
    passing: Passing,
    known: KnownObjects | None = None,
) -> Uploaded:
    """Upload the segment at `path` to the store, unless it is there. Raise DataError for what is wrong with
    the file, or with an object that is there in its place, and one of STORE_ERRORS for the rest. `known` is
    as for `write_verified`."""
    name, known = segment_name(segment), KnownObjects() if known is None else known
    if has_segment(store, files, path, segment, part_bytes=part_bytes, passing=passing, known=known):
        return Uploaded(False, store.stat(name).size)
    BEFORE_UPLOAD()
    with typed_errors(path, "read the segment"):
        file = VerifiedFile(files.open(path))
        try:
            if file.segment_hash != segment.hash:
                raise Corrupt("this is another segment than the log has", seq=segment.first)
            made = write_measured(
                store, name, lambda: _parts(file, segment, part_bytes), known=known, passing=passing
            )
        finally:
            file.close()
    AFTER_UPLOAD()
    if made is not None:
        return Uploaded(True, made)
    found = find_segment(store, segment)
    if found is None:
        raise StoreCorrupt("the store said that it has the object, and has it not", path=at(store.uri, name))
    return Uploaded(False, found)


def has_segment(
    store: Store,
    files: Files,
    path: str | None,
    segment: SegmentDescriptor,
    *,
    part_bytes: int,
    passing: Passing,
    known: KnownObjects,
) -> bool:
    """Whether the segment's object is there: `has_sound`, and its two ends say that it is this segment. What
    is at `path` may spare reading all of it."""
    name = segment_name(segment)
    if name in known.unsound or find_segment(store, segment) is None:
        return False

    def parts() -> Iterator[bytes]:
        assert path is not None
        with typed_errors(path, "read the segment"):
            file = VerifiedFile(files.open(path))
            try:
                yield from _parts(file, segment, part_bytes)[0]
            finally:
                file.close()

    return has_sound(store, name, None if path is None else parts, known=known, passing=passing)


def _parts(
    file: VerifiedFile, segment: SegmentDescriptor, part_bytes: int
) -> tuple[Iterator[bytes], int | None]:
    """What goes out, and how much it is where that is known."""
    if segment.compression == Compression.NONE:
        return (file.read_at(start, part_bytes) for start in range(0, segment.size, part_bytes)), segment.size
    # What is small goes out at once, and the store is told how much it is.
    pieces = compressed_pieces(file)
    begun: deque[bytes] = deque()
    size = 0
    for piece in pieces:
        begun.append(piece)
        size += len(piece)
        if size > part_bytes:
            break
    else:
        return iter(begun), size

    def all_of_them() -> Iterator[bytes]:
        while begun:
            yield begun.popleft()
        yield from pieces

    return all_of_them(), None


def find_segment(store: Store, segment: SegmentDescriptor) -> int | None:
    """The size of the segment's object, whose ends were compared; None where there is none."""
    name = segment_name(segment)
    size = _size_of(store, name)
    if size is None:
        return None
    found = parse(name)
    assert found is not None
    described, why = None, ""
    try:
        _, described = describe_object(found, ObjectFile(store, name, size))
    except (Corrupt, StoreCorrupt) as error:
        why = f": {error}"
    except LowwaterError as error:
        error.path = error.path or at(store.uri, name)
        raise
    if described is None or described._replace(recorded_seq=0) != segment._replace(recorded_seq=0):
        raise StoreCorrupt(
            f"an object of this name is there, and it is not the segment{why}",
            path=at(store.uri, name),
            seq=segment.first,
            hint="no shipper leaves that: find out what wrote it, keep a copy of it "
            "elsewhere, and move it away; shipping then goes on",
        )
    return size


def _size_of(store: Store, name: str) -> int | None:
    try:
        return store.stat(name).size
    except NotFound:
        return None


def copy_object(
    source: Store, target: Store, name: str, *, part_bytes: int, passing: Passing, known: KnownObjects
) -> bool:
    """Copy an object, which has to be sound, from one store to another, as it is stored. Return False where
    that name is taken."""
    has_sound(source, name, None, known=KnownObjects(), passing=passing)
    return pass_through(source, name, target, name, part_bytes=part_bytes, known=known, passing=passing)
