"""Where a data directory was made from that was restored, and whether that has ended.

    restoring     what is being made here; nobody opens the directory
    origin        the same record once all of it is here, for as long as the directory lives

Always true: the record is durable before anything else lies in the directory, and one name becomes the other
by a rename, so a directory is either being restored or was restored. It holds no secret: of the options of a
store only those that say where it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import cbor2

from lowwater.engine.format import format
from lowwater.engine.format.blocks import NO_HASH
from lowwater.engine.log.directory import LOG_DIRECTORY, read_names, typed_errors
from lowwater.engine.seams.checksum import crc32
from lowwater.engine.seams.seams import Files, write_all
from lowwater.errors import Corrupt, NewerVersion, NotFound

RESTORING = "restoring"
ORIGIN = "origin"
TEMPORARY = "origin.tmp"
VERSION = 2
# What older ones read too: all but a log that stands elsewhere.
VERSION_WITHIN = 1

_MAGIC = b"LWORIG\r\n"
_BYTES_MAX = 2**20


class Origin(NamedTuple):
    """What a directory is made from. `seq` is its last entry that is the archive's: the last one that counts
    up to `wanted_seq`."""

    uri: str
    options: Mapping[str, str]
    parent_id: bytes
    """The cluster that the archive is of."""
    cluster_id: bytes
    """The cluster of the directory: another one where it is a clone."""
    epoch: int
    """The epoch of the archive's newest manifest."""
    wanted_seq: int
    seq: int
    checkpoint_seq: int
    checkpoint_hash: bytes
    parent_manifest: bytes
    parent_segment: bytes
    """The hash of the last segment of the archive's newest manifest."""
    is_continued: bool = False
    """Whether the log goes on in an epoch of its own."""
    ships_to: str = ""
    """The archive that a clone ships to. It has what the clone's directory lacks; its parent's archive has
    the rest of its history."""
    ships_options: Mapping[str, str] = {}
    is_whole: bool = False
    """Whether every page was brought here once."""
    log_directory: str = ""
    """Where the log was put; empty where it is in the directory."""

    @property
    def is_clone(self) -> bool:
        return self.cluster_id != self.parent_id

    def is_same(self, other: Origin) -> bool:
        """Whether both make the same of the same archive. A clone has a new id each time."""
        mine, others = ((each.uri, each.parent_id, each.is_clone, each.wanted_seq) for each in (self, other))
        return mine == others

    def encode(self) -> bytes:
        fields = self._asdict()
        if not self.log_directory:
            del fields["log_directory"]
        body: bytes = cbor2.dumps(
            {
                **fields,
                "options": dict(self.options),
                "ships_options": dict(self.ships_options),
                "version": VERSION if self.log_directory else VERSION_WITHIN,
            },
            canonical=True,
        )
        return _MAGIC + format.U32.pack(crc32(body)) + body


def decode_origin(data: bytes) -> Origin:
    start = len(_MAGIC) + format.U32.size
    body = data[start:]
    hint = "restore into another directory, and keep this one until you know that nothing in it is missed"
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : start] != format.U32.pack(crc32(body)):
        raise Corrupt("the record of what this directory was restored from is damaged", hint=hint)
    try:
        fields: Any = cbor2.loads(body)
        if fields.pop("version") > VERSION:
            raise NewerVersion("this directory was restored by a newer Lowwater")
        origin = Origin(**fields)
        assert len(origin.parent_manifest) == len(origin.parent_segment) == len(NO_HASH)
    except NewerVersion:
        raise
    except Exception as error:  # cbor2 raises whatever its decoding of hostile bytes runs into
        raise Corrupt("the record of what this directory was restored from is damaged", hint=hint) from error
    return origin


def read_origin(files: Files, directory: str, name: str = ORIGIN) -> Origin | None:
    """The record of this name, None where there is none."""
    path = f"{directory}/{name}"
    with typed_errors(path, "read what this directory was restored from"):
        try:
            file = files.open(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return decode_origin(file.read_at(0, _BYTES_MAX))
        finally:
            file.close()


def log_directory_of(files: Files, directory: str, configured: str | os.PathLike[str] | None) -> str:
    """Where the log of a database is: where the configuration says, or where a restore has put it, or in the
    directory. Raises NotFound where the first two do not agree, and there is no log where the first says."""
    origin = read_origin(files, directory)
    recorded = "" if origin is None else origin.log_directory
    within = f"{directory}/{LOG_DIRECTORY}"
    if configured is None:
        return recorded or within
    path = os.fspath(configured)
    if origin is None or _has_log(files, path):
        return path
    if recorded:
        raise NotFound(
            "the log of this directory is not where the configuration says",
            path=path,
            hint=f"it was restored into {recorded}: set wal.dir to where it is now",
        )
    return within  # as it was restored, without such a configuration


def _has_log(files: Files, directory: str) -> bool:
    with typed_errors(directory, "look for the log"):
        try:
            names = read_names(files, directory)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return names.has_current or bool(names.numbered)


def write_origin(files: Files, directory: str, name: str, origin: Origin) -> None:
    """Durably, in the place of the one before."""
    path = f"{directory}/{name}"
    with typed_errors(path, "note what this directory is restored from"):
        temporary = f"{directory}/{TEMPORARY}"
        if TEMPORARY in files.list(directory):
            files.remove(temporary)
        file = files.open(temporary, create=True)
        try:
            write_all(file, 0, [origin.encode()])
            file.sync("fsync")
        finally:
            file.close()
        files.rename(temporary, path)
        files.sync_directory(directory)


def require_restored(files: Files, directory: str) -> None:
    """Raises where a restore into this directory has not ended."""
    with typed_errors(directory, "look into the directory"):
        try:
            names = files.list(directory)
        except (FileNotFoundError, NotADirectoryError):
            return
    if RESTORING in names:
        raise NotFound(
            "there is no database here yet: a restore into this directory has not ended",
            path=directory,
            hint="run the same restore again: it goes on where it was",
        )
