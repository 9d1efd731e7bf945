"""The files of a log in order, for tools that read a directory which another process may be writing to.

Always true: nothing is locked and nothing is changed. The current segment comes last, and what was found of
it counts only when the walk ends there: if a sealed segment comes after it, the log was rotated while it
was being read, and it comes once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from lowwater.engine.format import format
from lowwater.engine.format.format import SegmentHeader
from lowwater.engine.log.compress import open_segment_file
from lowwater.engine.log.directory import (
    CURRENT,
    DirectoryNames,
    Hint,
    Segment,
    read_names,
    segment_name,
    typed_errors,
)
from lowwater.engine.log.recover import Current, inspect_current
from lowwater.engine.log.scan import scan_frames
from lowwater.engine.seams.seams import File, Files
from lowwater.errors import DataError

State = Literal["sealed", "sealing", "current"]

# How often a log may rotate in front of us before we take what we have.
_ROUNDS_MAX = 100


class WalkPlace(NamedTuple):
    """A file of a log, as its name has it; the current segment's name tells no seqs."""

    path: str
    state: State
    seq_first: int = 0
    seq_last: int = 0

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def steady_names(files: Files, directory: str) -> DirectoryNames:
    """The names, listed until two listings agree: a file that is renamed meanwhile may be in one twice, or
    not at all."""
    names = read_names(files, directory)
    for _ in range(_ROUNDS_MAX):
        again = read_names(files, directory)
        if again == names:
            break
        names = again
    return names


def numbered_places(names: DirectoryNames, directory: str) -> list[WalkPlace]:
    return [
        WalkPlace(f"{directory}/{name}", "sealed" if sealed else "sealing", seq_first, seq_last)
        for seq_first, seq_last, sealed, name in names.numbered
    ]


def walk(files: Files, directory: str) -> Iterator[WalkPlace]:
    """The segments in the order of their names, then the current one."""
    seen: set[tuple[int, int]] = set()
    for _ in range(_ROUNDS_MAX):
        with typed_errors(directory, "read the log directory"):
            names = steady_names(files, directory)
        places = [
            place
            for place in numbered_places(names, directory)
            if (place.seq_first, place.seq_last) not in seen
        ]
        if seen and not places:
            return
        yield from places
        seen.update((place.seq_first, place.seq_last) for place in places)
        seen.add((0, 0))
        if names.has_current:
            yield WalkPlace(f"{directory}/{CURRENT}", "current")


def open_place(files: Files, place: WalkPlace) -> tuple[File, WalkPlace]:
    """The file, and its place: a segment that waited for its footer may have got it, and another name."""
    try:
        return files.open(place.path), place
    except FileNotFoundError:
        if place.state != "sealing":
            raise
    directory = place.path.rpartition("/")[0]
    path = f"{directory}/{segment_name(place.seq_first, place.seq_last)}"
    return files.open(path), place._replace(path=path, state="sealed")


def judge_current(file: File, path: str, before: Segment | None, hint: Hint | None) -> Current | None:
    """`inspect_current` for a file that may grow meanwhile: what was written behind the place where the scan
    stopped looks like damage, until one looks again."""
    floor = hint.durable_seq if hint is not None else 0
    for _ in range(_ROUNDS_MAX):
        try:
            return inspect_current(file, path, before, hint, floor)
        except DataError as error:
            if not _goes_on(file, error.offset or 0):
                raise
    return inspect_current(file, path, before, hint, floor)


def _goes_on(file: File, offset: int) -> bool:
    try:
        header = SegmentHeader.decode(file.read_at(0, format.HEADER_BYTES))
    except DataError:
        return False
    return scan_frames(file, header, stop=file.size()).end > offset


def is_directory(files: Files, path: str) -> bool:
    """Whether a path is a directory, and so a log's; anything else is taken for a segment."""
    with typed_errors(path, "look into it"):
        try:
            files.list(path)
        except (NotADirectoryError, FileNotFoundError):
            return False
    return True


def open_single(files: Files, path: str) -> tuple[File, WalkPlace]:
    """A segment on its own, compressed or not. A file that was renamed tells by its end what it is."""
    file = open_segment_file(files, path)
    name = path.rpartition("/")[2]
    state: State = "sealed"
    if name == CURRENT:
        state = "current"
    elif name.startswith("sealing-"):
        state = "sealing"
    elif not name.startswith("segment-"):
        end = file.read_at(max(0, file.size() - format.TRAILER_BYTES), len(format.TRAILER_MAGIC))
        state = "sealed" if end == format.TRAILER_MAGIC else "current"
    return file, WalkPlace(path, state)
