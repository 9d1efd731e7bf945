"""The files of a log directory: their names, what is known of each segment, and the hint.

    current.log                       the segment that is being written, preallocated with zeros
    sealing-<first>-<last>.log        a complete segment, synced, whose footer is being built
    segment-<first>-<last>.log        a sealed segment: immutable
    spare.log                         zeros for the next current.log; worthless after a crash
    owner                             who orders the entries of the log
    hint                              a position that is known to be durable; may be old, may be missing
    lock                              held by the process that writes here; holds its pid

Always true: the list of segments is made from the names and the files themselves, and from nothing else.
"""

from __future__ import annotations

import errno
import os
import re
from array import array
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

import cbor2

from lowwater.engine.format import format
from lowwater.engine.format.format import SegmentHeader, SegmentTrailer
from lowwater.engine.log.footer import FooterBuilder, footer_steps
from lowwater.engine.seams.checksum import crc32
from lowwater.engine.seams.interrupts import is_of_handler
from lowwater.engine.seams.seams import Files, Readable, ReadDenied, SyncMode, write_all
from lowwater.errors import (
    AlreadyExists,
    Corrupt,
    DirectoryNotWritable,
    DiskFailed,
    DiskFull,
    InputError,
    LowwaterError,
    NotFound,
    NotLowwater,
    NotReadable,
    without_secrets,
)

# Where the directory of a log is, in that of a database.
LOG_DIRECTORY = "wal"

CURRENT = "current.log"
SPARE = "spare.log"
HINT = "hint"
HINT_TEMPORARY = "hint.tmp"
# Where it cannot be read.
HINT_HINT = (
    "run `lowwater log verify` on the segments: where nothing else is found, a copy of the directory opens "
    "without this file"
)
STRANGER_HINT = "find out what wrote it: no log needs it"
LOCK = "lock"
OWNER = "owner"
OWNER_TEMPORARY = "owner.tmp"

_NUMBERED = re.compile(r"(segment|sealing)-(\d{20})-(\d{20})\.log")


def segment_name(seq_first: int, seq_last: int, *, sealed: bool = True) -> str:
    return f"{'segment' if sealed else 'sealing'}-{seq_first:020}-{seq_last:020}.log"


@dataclass(slots=True)
class Segment:
    """A complete segment: sealed, or waiting for its footer."""

    path: str
    header: SegmentHeader
    seq_first: int
    seq_last: int
    body_bytes: int
    time_last_us: int
    segment_hash: bytes
    sealed: bool
    forks: bool = False  # known to who checks it: its first frame is a `fork` that was not refused
    # Only until it is sealed; then they are in its footer.
    positions: array[int] | None = None
    block_hashes: Sequence[bytes] | None = None
    builder: FooterBuilder | None = None


@dataclass(frozen=True, slots=True)
class DirectoryNames:
    """What lies in a log directory, by name."""

    numbered: list[tuple[int, int, bool, str]]
    """(first seq, last seq, sealed, name), in order."""
    has_current: bool
    leftovers: list[str]
    strangers: list[str]


def read_names(files: Files, directory: str) -> DirectoryNames:
    numbered = []
    leftovers = []
    strangers = []
    has_current = False
    for name in files.list(directory):
        if match := _NUMBERED.fullmatch(name):
            numbered.append((int(match[2]), int(match[3]), match[1] == "segment", name))
        elif name == CURRENT:
            has_current = True
        elif name in (SPARE, HINT_TEMPORARY, OWNER_TEMPORARY):
            leftovers.append(name)
        elif name not in (HINT, LOCK, OWNER):
            strangers.append(name)
    return DirectoryNames(sorted(numbered), has_current, leftovers, strangers)


@contextmanager
def typed_errors(path: str, doing: str) -> Generator[None, None, None]:
    """What the operating system raises inside the block becomes one of our errors."""
    try:
        yield
    except LowwaterError as error:
        if error.path is None:
            error.path = path
        raise
    except OSError as error:
        if is_of_handler(error):
            raise  # a TimeoutError is an OSError too
        raise _typed_error(error, path, doing) from error


def _typed_error(error: OSError, path: str, doing: str) -> LowwaterError:
    if isinstance(error, FileNotFoundError):
        return NotFound(f"cannot {doing}: there is nothing there", path=path, hint="check the path")
    if isinstance(error, NotADirectoryError):
        return NotFound(f"cannot {doing}: this is not a directory", path=path, hint="check the path")
    if isinstance(error, IsADirectoryError):
        what = f"cannot {doing}: there is something else than a file"
        return NotLowwater(what, path=error.filename or path)
    if isinstance(error, ReadDenied):
        return NotReadable(f"cannot {doing}: permission denied", path=error.filename or path)
    if isinstance(error, FileExistsError):
        return AlreadyExists(f"cannot {doing}: a file is in the way", path=path, hint="give another path")
    reason = error.strerror or str(error)
    if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
        return InputError(f"cannot {doing}: {reason.lower()}", path=path, hint="check the path")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"cannot {doing}: the disk is full", path=path)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DirectoryNotWritable(f"cannot {doing}: {reason.lower()}", path=path)
    return DiskFailed(f"cannot {doing}: {reason.lower()}", path=path)


def local_path(given: object) -> str:
    """The path of a directory that a caller gave. Not the URI of a store: it would become a directory of a
    strange name, with its secrets."""
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path or not _is_encodable(path):
        raise InputError(f"{given!r:.80} is no directory", hint="give the path of a directory as text")
    if "://" in path:
        raise InputError(
            "this is the URI of a store, and no directory",
            path=without_secrets(path),
            hint="give the path of a directory on this machine; a store is given as tier=",
        )
    return path


def _is_encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


# ---------------------------------------------------------------------------- sealed segments


def cluster_id_in(files: Files, directory: str, seq: int) -> bytes | None:
    """Whose log it was at an entry, by the header of the complete segment that has it, or of the first after
    it; None where there is none."""
    with typed_errors(directory, "read the log"):
        for _, seq_last, _, name in read_names(files, directory).numbered:
            if seq <= seq_last:
                file = files.open(f"{directory}/{name}")
                try:
                    return SegmentHeader.decode(file.read_at(0, format.HEADER_BYTES)).cluster_id
                finally:
                    file.close()
    return None


def read_trailer(file: Readable, size: int) -> SegmentTrailer:
    """Finds the footer from the end of a sealed segment, whose header is there."""
    if not size:
        raise NotLowwater("the file is empty")
    if size < format.HEADER_BYTES + format.TRAILER_BYTES:
        raise Corrupt(
            f"the segment was cut off: {size} bytes are left of it",
            hint="restore this segment, or run `lowwater log repair` into a copy",
        )
    try:
        trailer = SegmentTrailer.decode(file.read_at(size - format.TRAILER_BYTES, format.TRAILER_BYTES))
    except LowwaterError as error:
        error.offset = size - format.TRAILER_BYTES
        raise
    if trailer.file_bytes != size:
        raise Corrupt(f"the segment was {trailer.file_bytes:,} bytes long and is {size:,} now")
    return trailer


def read_sealed(files: Files, path: str) -> tuple[SegmentHeader, SegmentTrailer]:
    """Header and trailer of a sealed segment, each checked, and against each other."""
    with typed_errors(path, "read the segment"):
        file = files.open(path)
        try:
            header = SegmentHeader.decode(file.read_at(0, format.HEADER_BYTES))
            trailer = read_trailer(file, file.size())
        finally:
            file.close()
        if header.seq_first != trailer.seq_first:
            raise Corrupt("header and trailer of the segment name different first seqs")
        return header, trailer


def load_sealed(files: Files, directory: str, seq_first: int, seq_last: int, name: str) -> Segment:
    path = f"{directory}/{name}"
    header, trailer = read_sealed(files, path)
    if (trailer.seq_first, trailer.seq_last) != (seq_first, seq_last):
        raise Corrupt(
            f"the segment holds the seqs {trailer.seq_first} to {trailer.seq_last}, its name says otherwise",
            path=path,
        )
    return sealed_segment(path, header, trailer)


def sealed_segment(path: str, header: SegmentHeader, trailer: SegmentTrailer) -> Segment:
    return Segment(
        path=path,
        header=header,
        seq_first=trailer.seq_first,
        seq_last=trailer.seq_last,
        body_bytes=trailer.body_bytes,
        time_last_us=trailer.time_max_us,
        segment_hash=trailer.segment_hash,
        sealed=True,
    )


def check_link(header: SegmentHeader, before: Segment | None, path: str) -> None:
    """Raises Corrupt where a segment does not follow the one before it."""
    if before is None:
        return
    if header.seq_before != before.seq_last:
        raise Corrupt(
            f"the segment follows seq {header.seq_before}, but the one before it ends with {before.seq_last}",
            path=path,
            seq=header.seq_first,
            hint="a segment is missing or does not belong here: restore it, or repair into a copy",
        )
    if header.hash_before != before.segment_hash:
        raise Corrupt(
            "the segment follows another history: its link to the segment before it does not match",
            path=path,
            seq=header.seq_first,
        )
    if header.time_before_us != before.time_last_us:
        raise Corrupt("the segment names another time for the end of the one before it", path=path)


def seal_steps(files: Files, segment: Segment) -> Generator[None, None, None]:
    """Give a complete segment its footer, durably. Repeatable after a crash at any line."""
    assert not segment.sealed
    assert segment.positions is not None
    file = files.open(segment.path, write=True)
    try:
        footer, trailer = yield from footer_steps(
            file,
            segment.positions,
            segment.body_bytes,
            block_bytes=segment.header.block_bytes,
            block_hashes=segment.block_hashes,
            builder=segment.builder,
        )
        assert trailer.segment_hash == segment.segment_hash
        assert (trailer.seq_first, trailer.seq_last) == (segment.seq_first, segment.seq_last)
        write_all(file, segment.body_bytes, [footer, trailer.encode()])
        file.truncate(trailer.file_bytes)
        yield
        file.sync("fsync")
    finally:
        file.close()


# ---------------------------------------------------------------------------- the hint


@dataclass(frozen=True, slots=True)
class Hint:
    """A position that was durable when the hint was written. It can be old; it cannot be wrong."""

    segment_seq_first: int
    durable_bytes: int
    durable_seq: int
    sync_mode: SyncMode

    def encode(self) -> bytes:
        body: bytes = cbor2.dumps(
            [self.segment_seq_first, self.durable_bytes, self.durable_seq, self.sync_mode], canonical=True
        )
        return _HINT_MAGIC + format.U32.pack(crc32(body)) + body

    @classmethod
    def decode(cls, data: bytes) -> Hint | None:
        """None for anything that `encode` has not made."""
        start = len(_HINT_MAGIC) + format.U32.size
        body = data[start:]
        if data[: len(_HINT_MAGIC)] != _HINT_MAGIC or len(data) < start:
            return None
        if format.U32.unpack_from(data, len(_HINT_MAGIC))[0] != crc32(body):
            return None
        try:
            fields = cbor2.loads(body)
        except Exception:  # noqa: BLE001 - cbor2 raises whatever its decoding of hostile bytes runs into
            return None
        if type(fields) is not list or len(fields) != 4 or fields[3] not in get_args(SyncMode):
            return None
        if any(type(number) is not int or not 0 <= number <= format.SEQ_MAX for number in fields[:3]):
            return None
        return cls(*fields)


_HINT_MAGIC = b"LWHINT\r\n"


def write_hint(files: Files, directory: str, hint: Hint, *, durable: bool) -> None:
    """Replace the hint. Its name becomes durable with the next sync of the directory, or with this one."""
    temporary = f"{directory}/{HINT_TEMPORARY}"
    if HINT_TEMPORARY in files.list(directory):
        files.remove(temporary)
    file = files.open(temporary, create=True)
    try:
        write_all(file, 0, [hint.encode()])
        file.sync("fsync")
    finally:
        file.close()
    files.rename(temporary, f"{directory}/{HINT}")
    if durable:
        files.sync_directory(directory)


def read_hint(files: Files, directory: str) -> Hint | None:
    """The hint, or None where there is none or it cannot be read."""
    return look_at_hint(files, directory)[0]


def look_at_hint(files: Files, directory: str) -> tuple[Hint | None, bool]:
    """The hint, or None where there is none or it cannot be read; and whether the latter is so."""
    try:
        file = files.open(f"{directory}/{HINT}")
    except FileNotFoundError:
        return None, False
    try:
        hint = Hint.decode(file.read_at(0, 4096))
    finally:
        file.close()
    return hint, hint is None


def require_hint(files: Files, directory: str) -> Hint | None:
    """The hint, or None where there is none. No crash leaves one that cannot be read, and without it damage
    could pass for a torn write."""
    hint, is_damaged = look_at_hint(files, directory)
    if is_damaged:
        raise Corrupt(
            "the hint cannot be read",
            path=f"{directory}/{HINT}",
            hint=HINT_HINT,
        )
    return hint
