"""The file with all pages, written again without its free room.

Always true:
  - nothing is copied by LMDB before all that it follows was looked at: it copies what it is told to;
  - nothing is replaced by a copy that was not made durable, read back, and found to hold the same;
  - while the pages are written again the log's lock is held, so nobody writes to either.
"""

from __future__ import annotations

import errno
import os
from itertools import zip_longest
from typing import NamedTuple

from lowwater.engine.log.check import require_log
from lowwater.engine.log.directory import typed_errors
from lowwater.engine.log.wal import lock_directory
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.engine.seams.seams import Files
from lowwater.engine.seams.swap import COMPACTING, DATA, drop, finish_swap, swap
from lowwater.errors import Corrupt, DiskFull, PagesDamaged

MARGIN_BYTES = 2**24


class Room(NamedTuple):
    """What a page directory takes of the disk, and what of that is in use."""

    size_bytes: int
    used_bytes: int
    pages: int


def room_of(path: str) -> Room:
    """How much there is to gain."""
    store = LmdbPages.open(path, read_only=True)
    try:
        return Room(store.size_bytes(), store.used_bytes(), sum(1 for _ in store.page_keys()))
    finally:
        store.close()


def compact(files: Files, path: str, log: str, owner: str) -> tuple[Room, Room]:
    """Write the pages of the directory `path` again, without free room: what there was, and what there is.
    Raises DirectoryLocked while a process has the database of this log open."""
    require_log(files, log)
    path = os.path.realpath(path)
    lock = lock_directory(files, log, owner)
    try:
        with typed_errors(path, "write the pages again"):
            finish_swap(files, path)
            before = room_of(path)
            _require_room(path, before.used_bytes)
            try:
                _copy(files, path, path + COMPACTING)
            except BaseException:
                drop(files, path + COMPACTING)
                raise
            swap(files, path)
        return before, room_of(path)
    finally:
        lock.close()


def _require_sound(store: LmdbPages) -> None:
    if found := store.damage():
        raise PagesDamaged(f"the file with all pages is damaged: {found[0]}", path=f"{store.path}/{DATA}")


def _require_room(path: str, wanted_bytes: int) -> None:
    disk = os.statvfs(path)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < wanted_bytes + MARGIN_BYTES:
        raise DiskFull(
            f"the copy takes {wanted_bytes:,} bytes, and the disk has {free_bytes:,}",
            path=path,
            hint="free some space: nothing was changed. Pages can also be made again from the "
            "log where that is whole: copy the directory to another disk without them, and open it there",
        )


def _copy(files: Files, path: str, target: str) -> None:
    """A compact copy that is durable, holds the same, and belongs to whom the pages belong."""
    files.make_directory(target)
    source = LmdbPages.open(path, read_only=True)
    try:
        _require_sound(source)
        source.copy_to(target)
        data = files.open(f"{target}/{DATA}", write=True)
        try:
            data.sync("fsync")
        finally:
            data.close()
        for name in ("", f"/{DATA}"):
            _give_same_access(path + name, target + name)
        files.sync_directory(target)
        _require_equal(source, target)
    finally:
        source.close()


def _give_same_access(path: str, target: str) -> None:
    wanted, found = os.stat(path), os.stat(target)
    if (wanted.st_uid, wanted.st_gid) != (found.st_uid, found.st_gid):
        try:
            os.chown(target, wanted.st_uid, wanted.st_gid)
        except PermissionError as error:
            raise PermissionError(errno.EPERM, "only its owner, or root, can give it back", path) from error
    os.chmod(target, wanted.st_mode & 0o7777)


def _require_equal(source: LmdbPages, target: str) -> None:
    copy = LmdbPages.open(target, read_only=True)
    try:
        _require_sound(copy)
        for one, other in zip_longest(source.rows(), copy.rows()):
            if one != other:
                raise Corrupt(
                    "what was copied is not what is there", path=target, hint="try again: nothing was changed"
                )
    finally:
        copy.close()
