"""Small logs, and ways to damage their files. For tests of whatever has to notice.

Always true: a log from `make_log` has several sealed segments of some dozen entries, of most kinds, and a
current segment; it is closed, and sound.
"""

from __future__ import annotations

from typing import NamedTuple

from lowwater.engine.format import format
from lowwater.engine.format.entries import CreateBucket, Delete, Put, Writable
from lowwater.engine.format.format import BUCKET_BYTES_MAX, Extras, Kind
from lowwater.engine.log.directory import CURRENT, segment_name
from lowwater.engine.log.log import Log, LogOptions
from lowwater.engine.seams.real import RealFiles
from lowwater.engine.seams.seams import write_all

SEGMENT_BYTES = 4096
BLOCK_BYTES = 1024
VALUE_BYTES = 60


class Message(NamedTuple):
    """A message of a stream, as the engine will write them."""

    topic: str
    offset: int
    message: bytes

    def encode(self, time_us: int) -> bytes:
        topic = format.encode_name(self.topic, "topic", BUCKET_BYTES_MAX)
        extras = Extras(stream_offset=self.offset)
        return format.encode_payload(
            Kind.APPEND, topic, b"", b"", self.message, time_us=time_us, extras=extras
        )


def make_log(directory: str, *, entries: int = 150, segment_bytes: int = SEGMENT_BYTES) -> list[str]:
    """A log with so many entries after its first. Returns the paths of its sealed segments."""
    options = LogOptions(segment_bytes=segment_bytes, block_bytes=BLOCK_BYTES)
    with Log.open(directory, options=options) as log:
        for number in range(entries):
            log.append(_entry(number))
    return sealed_paths(directory)


def _entry(number: int) -> Writable:
    if number == 0:
        return CreateBucket("users")
    if number % 10 == 4:
        return Message("news", number // 10, b"message %d" % number)
    if number % 10 == 7:
        return Delete("users", f"user-{number - 1:04}")
    return Put("users", f"user-{number:04}", b"%d " % number * (VALUE_BYTES // 4), {"number": str(number)})


def sealed_paths(directory: str) -> list[str]:
    names = RealFiles().list(directory)
    return [f"{directory}/{name}" for name in names if name.startswith("segment-")]


def current_path(directory: str) -> str:
    return f"{directory}/{CURRENT}"


def seqs_of(path: str) -> tuple[int, int]:
    """First and last seq, from the name of a sealed segment."""
    _, first, last = path.rpartition("/")[2].removesuffix(".log").split("-")
    assert path.endswith(segment_name(int(first), int(last)))
    return int(first), int(last)


def read(path: str) -> bytes:
    file = RealFiles().open(path)
    try:
        return file.read_at(0, file.size())
    finally:
        file.close()


def write(path: str, data: bytes) -> None:
    """Put other bytes in the place of a file's, or make it."""
    files = RealFiles()
    try:
        file = files.open(path, write=True)
    except FileNotFoundError:
        file = files.open(path, create=True)
    try:
        file.truncate(0)
        write_all(file, 0, [data])
    finally:
        file.close()


def flip(path: str, offset: int, mask: int = 1) -> None:
    """Let a byte rot; a negative offset counts from the end."""
    data = bytearray(read(path))
    data[offset] ^= mask
    write(path, bytes(data))


def truncate(path: str, size: int) -> None:
    write(path, read(path)[:size])
