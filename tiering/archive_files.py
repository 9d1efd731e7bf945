"""The log of an archive as a directory of files: what looks into logs looks into archives too.

Always true:
  - nothing can be written; sealed segments are all there is, under the names that they have locally, in the
    order of the newest manifest, then those that a restore would go on with;
  - a segment reads as its raw bytes, however it is stored, and no more of it is read than is asked for, but
    for what lies next to it; memory is a few blocks;
  - an object that is gone is damage here, and not a file that somebody has just purged.
"""

from __future__ import annotations

import errno
import os

from lowwater.engine.log.directory import segment_name as local_name
from lowwater.engine.seams.seams import File
from lowwater.engine.state.catalogue import Catalogue
from lowwater.errors import Corrupt, NotFound
from lowwater.tiering.archive import open_archive
from lowwater.tiering.names import WAL, segment_name
from lowwater.tiering.remedies import HINTS
from lowwater.tiering.store import Store, at
from lowwater.tiering.verify import ObjectFile, open_segment

# The first read of a file takes so much, and each that goes on where the last one ended twice as much.
FIRST_BYTES = 2**16


class ArchiveFiles:
    """Fulfils `Files` for those who only read. The log is the directory `directory`; an object of it is also
    found by its own name below the URI, and then read as it is stored."""

    preallocate = False

    def __init__(self, store: Store, *, listed: bool = True) -> None:
        """`listed` reads the catalogue. For one segment by its name it is not needed."""
        self._store = store
        self.directory = store.uri.rstrip("/")
        self._objects: dict[str, str] = {}
        self.raw_bytes = 0
        if listed:
            self._read_catalogue()

    def _read_catalogue(self) -> None:
        archive = open_archive(self._store)
        manifest = archive.newest()
        catalogue = Catalogue() if manifest is None else archive.catalogue_of(manifest)
        for each in (*catalogue.segments, *archive.segments_after(manifest, catalogue)):
            self._objects[local_name(each.first, each.last)] = segment_name(each)
            self.raw_bytes += each.size

    def where(self, path: str) -> str:
        """What errors and findings should say instead of a path: the object."""
        name = self._objects.get(path.removeprefix(f"{self.directory}/"))
        return path if name is None else at(self._store.uri, name)

    # ------------------------------------------------------------------ Files

    def list(self, directory: str) -> list[str]:
        if directory.rstrip("/") != self.directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
        return sorted(self._objects)

    def open(self, path: str, *, write: bool = False, create: bool = False, sequential: bool = False) -> File:
        if write or create:
            raise self._never(path)
        name = path.removeprefix(f"{self.directory}/")
        if name.startswith(WAL):
            file: File = ObjectFile(self._store, name, first_bytes=FIRST_BYTES)
            return file
        if name not in self._objects:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        try:
            return open_segment(ObjectFile(self._store, self._objects[name], first_bytes=FIRST_BYTES))
        except NotFound:
            hint = HINTS["segment"]
            raise Corrupt("the segment is gone from the archive", path=self.where(path), hint=hint) from None

    def _never(self, path: str) -> OSError:
        return OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def make_directory(self, directory: str) -> None:
        raise self._never(directory)

    def rename(self, old: str, new: str) -> None:
        raise self._never(old)

    def link(self, old: str, new: str) -> None:
        raise self._never(new)

    def remove(self, path: str) -> None:
        raise self._never(path)

    def sync_directory(self, directory: str) -> None:
        raise self._never(directory)

    def room(self, directory: str) -> int:
        return 0

    def lock(self, path: str, owner: str) -> File:
        raise self._never(path)
