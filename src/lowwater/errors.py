"""Every error that Lowwater raises on purpose, in one tree, by what the caller must do.

    LowwaterError
    ├── RetryError               try again: nothing is wrong with the request or the data
    │   ├── Busy                     a queue stayed full for longer than the caller would wait
    │   ├── Conflict                 somebody else has written first: run the transaction again
    │   ├── DiskFull                 no room is left for this: nothing was written
    │   ├── Deadlock                 a transaction was chosen to end a deadlock: start it again
    │   ├── LockTimeout              a lock was not free in time: nothing was done
    │   ├── StoreUnavailable         the object store did not answer, or not in time: it may have happened
    │   │   └── UploadGone               ... because somebody removed the upload that was under way
    │   └── TimedOut                 the answer did not come in time; the work may still happen
    ├── InputError               change the request (or the configuration): nothing was written
    │   ├── InvalidEntry             a name, key, value, metadata or limit that no log accepts
    │   ├── OutOfOrderSeq            a seq that is not above the last one
    │   │   └── RepeatedSeq          ... because the log already holds exactly this entry
    │   ├── InvalidConfig            an unknown key or a value that is out of range
    │   ├── ConditionFailed          what the write depends on is not so
    │   ├── AlreadyExists            there is a bucket, a snapshot or a directory of this name
    │   ├── NotEmpty                 a bucket that holds keys is not deleted
    │   ├── TransactionEnded         it was committed or aborted before
    │   ├── LimitExceeded            more than is taken at once
    │   ├── ArchivedOnly             it was shipped and purged, and nobody has said where the store is
    │   ├── VersionGone              this version was dropped, or has not been written yet
    │   ├── NotFound                 there is no such database, archive, file, object, bucket, key or seq
    │   ├── DirectoryLocked          another process has this directory open
    │   ├── StoreMissing             there is no such bucket, container or folder
    │   ├── OtherCluster             the archive belongs to another cluster
    │   │   └── DatabaseMissing          ... and the directory has no database: it was lost, or is another one
    │   ├── NewerVersion             written by a newer Lowwater: upgrade this one
    │   └── OlderVersion             written by an older Lowwater, in a form that is not read any more
    ├── DeniedError              give the permission that is missing: nothing was written
    │   ├── NotReadable              a file or a directory cannot be read: whether it is sound is not known
    │   ├── DirectoryNotWritable     the directory can be read, but not written
    │   ├── StoreDenied              the object store knows these credentials not, or refuses them this
    │   └── StoreReadOnly            the object store can be read, but not written
    ├── DataError                repair or restore the data: what is stored cannot be trusted
    │   ├── NotLowwater              the file is of another format (wrong magic, or empty)
    │   ├── Corrupt                  a checksum, an order or a link of the chain does not hold
    │   │   └── PagesDamaged             ... of pages, which are made again of the log and the archive
    │   ├── StoreCorrupt             the object store does not hold what it said that it took
    │   └── LogDivergence            the same seq arrived with other content
    ├── ReopenError              close this handle, deal with the cause, open again
    │   ├── DiskFailed               the file system answered with an error
    │   ├── Fenced                   somebody else goes on with this log: nothing here counts any more
    │   ├── LogPoisoned              a write or a sync failed: durability can no longer be promised
    │   │   └── OutOfSpace           ... because there was no room
    │   └── Closed                   this handle was closed
    └── InternalError            a bug in Lowwater: please report it

A class says what to do; the fields say where: `path`, `seq`, `offset` (bytes into the file).
`hint` is the next step in words, and `exit_code` is what the command line returns.
"""

from __future__ import annotations

import os
import re
from typing import Any, ClassVar


def without_secrets(uri: str) -> str:
    """Return the URI of a store as it may be shown. What stands before an @ or after a ? may be a secret."""
    place, mark, _ = uri.partition("?")
    place = re.sub(r"//[^/]*@", "//…@", place)
    return f"{place}?…" if mark else place


class LowwaterError(Exception):
    """The root of the tree. Catch it to catch everything that Lowwater raises on purpose."""

    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        seq: int | None = None,
        offset: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = os.fspath(path) if path is not None else None
        self.seq = seq
        self.offset = offset
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        fields = (("path", self.path), ("seq", self.seq), ("offset", self.offset))
        where = ", ".join(f"{name} {value}" for name, value in fields if value is not None)
        return f"{self.message} ({where})" if where else self.message

    def as_dict(self) -> dict[str, Any]:
        """Return the error as the command line prints it under `--json`."""
        return {
            "error": type(self).__name__,
            "message": self.message,
            "path": self.path,
            "seq": self.seq,
            "offset": self.offset,
            "hint": self.hint,
        }


class RetryError(LowwaterError):
    """Try again: nothing is wrong with the request or the data."""

    exit_code = 75


class Busy(RetryError):
    default_hint = "writes arrive faster than the disk takes them: slow down, or raise wal.queue_bytes_max"


class Conflict(RetryError):
    default_hint = "run the transaction again: it will see what the other one has written"


class DiskFull(RetryError):
    default_hint = (
        "free some space and try again: nothing was written, and nothing that was acknowledged is lost"
    )


class Deadlock(RetryError):
    default_hint = "transactions waited for each other in a circle: roll this one back and start it again"


class LockTimeout(RetryError):
    default_hint = "another transaction holds it: try again, or roll back, or wait for longer"


class StoreUnavailable(RetryError):
    default_hint = "look at the network, the endpoint and the state of the store; calling again is safe"


class UploadGone(StoreUnavailable):
    default_hint = "look at the lifecycle rules of the bucket; calling again is safe"


class TimedOut(RetryError):
    default_hint = "the work may still happen: read before you repeat it"


class InputError(LowwaterError):
    """Change the request: nothing was written."""

    exit_code = 2


class InvalidEntry(InputError):
    pass


class OutOfOrderSeq(InputError):
    default_hint = "seqs must rise: read `last_seq` and continue above it"


class RepeatedSeq(OutOfOrderSeq):
    default_hint = "the log holds exactly this entry already: nothing is left to do"


class InvalidConfig(InputError):
    pass


class ConditionFailed(InputError):
    default_hint = "read the key again, and decide by what it holds now"


class AlreadyExists(InputError):
    pass


class NotEmpty(InputError):
    default_hint = "only an empty bucket can go: list() says which keys are in it"


class TransactionEnded(InputError):
    pass


class LimitExceeded(InputError):
    pass


class ArchivedOnly(InputError):
    pass


class VersionGone(InputError):
    default_hint = (
        "versions are kept for snapshots and running scans, and back to where move_horizon was told"
    )


class NotFound(InputError):
    pass


class DirectoryLocked(InputError):
    default_hint = "stop the process that has it open, or choose another directory"


class StoreMissing(InputError):
    default_hint = "make it first, or correct the URI: Lowwater makes no buckets"


class OtherCluster(InputError):
    default_hint = (
        "give a prefix of its own to each cluster, or the one that this log was shipped to; "
        "`lowwater restore URI DIR` makes a directory of what is in an archive"
    )


class DatabaseMissing(OtherCluster):
    default_hint = (
        "`lowwater restore URI DIR` makes the directory again; a new database needs a prefix of its own"
    )


class NewerVersion(InputError):
    default_hint = "upgrade Lowwater on this machine: pip install --upgrade lowwater"


class OlderVersion(InputError):
    pass


class DeniedError(LowwaterError):
    """Give the permission that is missing: nothing was written, and nothing is known to be wrong."""

    exit_code = 77


class NotReadable(DeniedError):
    default_hint = "give this user permission to read it, or run this as the user whose it is"


class DirectoryNotWritable(DeniedError):
    default_hint = "give this user write permission, or open it with the read-only tools"


class StoreDenied(DeniedError):
    default_hint = (
        "check the credentials, and what they allow below the prefix: list and read, and to ship write"
    )


class StoreReadOnly(DeniedError):
    default_hint = "open it with credentials that may write, or use the read-only tools"


class DataError(LowwaterError):
    """Repair or restore the data: what is stored cannot be trusted."""

    exit_code = 65


class NotLowwater(DataError):
    default_hint = "check the path: this is not a file that Lowwater wrote"


class Corrupt(DataError):
    default_hint = (
        "run `lowwater log verify` on the directory, then `lowwater log repair` into a copy, or restore"
    )


class PagesDamaged(Corrupt):
    default_hint = "`lowwater rebuild-pages DIR` makes them again from log and archive, and deletes nothing"


class StoreCorrupt(DataError):
    default_hint = (
        "keep a copy of that object, write it again, and do not trust the store where this comes back"
    )


class LogDivergence(DataError):
    default_hint = (
        "two writers have given one seq to two entries: stop both, and find out which history is right"
    )


class ReopenError(LowwaterError):
    """Close this handle, deal with the cause, open again."""

    exit_code = 74


class DiskFailed(ReopenError):
    default_hint = "look into the system's log for the disk: the files were not changed"


class Fenced(ReopenError):
    default_hint = (
        "a copy of this directory, or a restored one, writes to the same archive: find out which is to go "
        "on, stop the other one, and restore it from the archive"
    )


class LogPoisoned(ReopenError):
    default_hint = "writes are refused, reads go on: deal with the cause, then close and open the log again"


class OutOfSpace(LogPoisoned):
    default_hint = "free some space, then close and open the log again: nothing that was acknowledged is lost"


class Closed(ReopenError):
    default_hint = "it was closed: open it again"


# Whatever an object store may answer with, for `except`.
STORE_ERRORS = (StoreUnavailable, StoreDenied, StoreMissing, StoreReadOnly, StoreCorrupt)


class InternalError(LowwaterError):
    """A bug in Lowwater."""

    exit_code = 70
    default_hint = "this is a bug in Lowwater: please report it with this message"
