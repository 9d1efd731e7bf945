"""Transactions: reads as of one moment, and writes that take effect together or not at all.

Always true:
  - a transaction reads the state as of its snapshot and its own writes on top, whatever others do;
  - nothing of it is in the log, or seen by others, before its commit, which is one atomic group: so an abort
    has nothing to undo, after a crash neither;
  - the first to commit wins: a commit is refused when a key that it writes has a version newer than the
    snapshot, and with `serializable` also when a key or range that it has read has one. That is decided in
    the moment of the commit; locks only make it rare;
  - a transaction belongs to the thread that uses it, and to nobody after its end.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from lowwater.engine import format
from lowwater.engine.entries import Delete, Put
from lowwater.engine.pages import after_prefix, encode_key
from lowwater.engine.records import Object
from lowwater.errors import Conflict, InputError, LimitExceeded, NotFound, TransactionEnded

if TYPE_CHECKING:
    from lowwater.engine.database import Database

Isolation = Literal["snapshot", "serializable"]

# A commit is one group, and a group fits into a batch. Each entry has its frame around it.
BYTES_MAX = format.BATCH_BYTES_MAX - 2**20
ENTRY_OVERHEAD_BYTES = 100
READ_RANGES_MAX = 10_000


class Savepoint:
    """Where to go back to within a transaction."""

    __slots__ = ("_locks", "_transaction", "_undo_count")

    def __init__(self, transaction: Transaction, undo_count: int, locks: int) -> None:
        self._transaction = transaction
        self._undo_count = undo_count
        self._locks = locks


class Transaction:
    """Use `Database.transaction`."""

    def __init__(
        self, database: Database, *, started: int, isolation: Isolation, lock_timeout_s: float | None
    ) -> None:
        self.started = started  # the younger gives way
        self._database = database
        self._isolation = isolation
        self._lock_timeout_s = lock_timeout_s
        self._thread = threading.get_ident()
        self._writes: dict[bytes, Put | Delete] = {}
        self._written_keys: list[bytes] = []  # those of `_writes`, in order
        # What each write replaced, for going back to a savepoint.
        self._undo: list[tuple[bytes, Put | Delete | None]] = []
        self._bytes = 0
        self._read_keys: set[bytes] = set()
        self._read_ranges: list[tuple[str, bytes, bytes]] = []
        self._ended = False
        self.seq: int | None = None
        self.snapshot_seq = database._pin(None)

    # ------------------------------------------------------------------ reading

    def get(self, bucket: str, key: str) -> Object:
        """What the key holds for this transaction. Raises NotFound."""
        self._require_use()
        encoded = self._encode(bucket, key)
        own = self._writes.get(encoded)
        found = _as_object(own) if own is not None else self._read(encoded, bucket, key)
        if found is None:
            raise NotFound(f"there is no {key!r} in the bucket {bucket!r}")
        return found

    def _read(self, encoded: bytes, bucket: str, key: str) -> Object | None:
        if self._isolation == "serializable":
            self._read_keys.add(encoded)
        return self._database._state.at(encoded, bucket, key, self.snapshot_seq)

    def scan(self, bucket: str, prefix: str = "") -> Iterator[Object]:
        """The objects of a bucket as this transaction sees them, in order. Its own writes while the scan
        runs may or may not be among them."""
        self._require_use()
        low = encode_key(bucket.encode(), format.encode_name(prefix, "prefix", 1024, empty_allowed=True))
        high = after_prefix(low)
        if self._isolation == "serializable":
            if len(self._read_ranges) == READ_RANGES_MAX:
                raise LimitExceeded("a serializable transaction has scanned too often", hint="divide it")
            self._read_ranges.append((bucket, low, high))
        return self._merge(bucket, low, high)

    def _merge(self, bucket: str, low: bytes, high: bytes) -> Iterator[Object]:
        own_keys = self._written_keys[
            bisect_left(self._written_keys, low) : bisect_left(self._written_keys, high)
        ]
        own = iter(own_keys)
        next_own = next(own, None)
        skip = 1 + len(bucket.encode())
        for found in self._database._state.scan(bucket, low, high, self.snapshot_seq):
            encoded = low[:skip] + found.key.encode()
            while next_own is not None and next_own < encoded:
                if (mine := self._own(next_own)) is not None:
                    yield mine
                next_own = next(own, None)
            if next_own == encoded:
                if (mine := self._own(next_own)) is not None:
                    yield mine
                next_own = next(own, None)
            else:
                yield found
        while next_own is not None:
            if (mine := self._own(next_own)) is not None:
                yield mine
            next_own = next(own, None)

    def _own(self, encoded: bytes) -> Object | None:
        entry = self._writes.get(encoded)
        return None if entry is None else _as_object(entry)

    # ------------------------------------------------------------------ writing

    def put(self, bucket: str, key: str, value: bytes, metadata: Mapping[str, str] | None = None) -> None:
        """Store a value, when the transaction commits."""
        entry = Put(bucket, key, value if type(value) is bytes else bytes(value), metadata)
        self._write(entry, len(entry.encode(0)))

    def delete(self, bucket: str, key: str) -> None:
        """Remove a key, when the transaction commits. Raises NotFound where there is none."""
        self.get(bucket, key)
        entry = Delete(bucket, key)
        self._write(entry, len(entry.encode(0)))

    def _write(self, entry: Put | Delete, size: int) -> None:
        self._require_use()
        encoded = self._encode(entry.bucket, entry.key)
        size += ENTRY_OVERHEAD_BYTES
        if self._bytes + size > BYTES_MAX:
            raise LimitExceeded(
                f"a transaction writes at most {BYTES_MAX:,} bytes", hint="commit, and go on in another one"
            )
        locks = self._database._locks
        locks.acquire(self, (entry.bucket, entry.key), "X", timeout_s=self._lock_timeout_s)
        # A key that somebody has written since the snapshot dooms the commit: better told now.
        self._require_unchanged(encoded)
        self._undo.append((encoded, self._writes.get(encoded)))
        if encoded not in self._writes:
            insort(self._written_keys, encoded)
        self._writes[encoded] = entry
        self._bytes += size

    def savepoint(self) -> Savepoint:
        """A place to go back to with `rollback_to`."""
        self._require_use()
        return Savepoint(self, len(self._undo), self._database._locks.savepoint(self))

    def rollback_to(self, savepoint: Savepoint) -> None:
        """Take back what was written since the savepoint, which stays where it is."""
        self._require_use()
        if savepoint._transaction is not self:
            raise InputError("this savepoint belongs to another transaction")
        if savepoint._undo_count > len(self._undo):
            raise InputError("this savepoint was taken back by a roll-back to an earlier one")
        while len(self._undo) > savepoint._undo_count:
            encoded, before = self._undo.pop()
            if before is None:
                del self._writes[encoded]
                del self._written_keys[bisect_left(self._written_keys, encoded)]
            else:
                self._writes[encoded] = before
        self._database._locks.release_since(self, savepoint._locks)

    # ------------------------------------------------------------------ ending

    def commit(self) -> int | None:
        """Have all writes take effect, and return their seq; None where there were none. Raises Conflict,
        and has no effect, where somebody else was first."""
        self._require_use()
        try:
            if self._writes or self._isolation == "serializable":
                self.seq = self._database._commit_transaction(
                    [self._writes[key] for key in self._written_keys], self._decide
                )
            return self.seq
        finally:
            self._end()

    def abort(self) -> None:
        """End it without effect."""
        self._require_use()
        self._end()

    def _decide(self) -> None:
        """With the state's lock: raise Conflict unless the transaction can take effect now."""
        for encoded in self._writes:
            self._require_unchanged(encoded)
        for encoded in self._read_keys:
            self._require_unchanged(encoded)
        state = self._database._state
        for bucket, low, high in self._read_ranges:
            if state.changed_since(low, high, self.snapshot_seq):
                raise Conflict(f"keys of the bucket {bucket!r} have changed since they were read")

    def _require_unchanged(self, encoded: bytes) -> None:
        newest = self._database._state.newest_seq(encoded)
        if newest > self.snapshot_seq:
            raise Conflict(
                "a key was written since this transaction began", seq=newest, path=self._database.directory
            )

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._database._state.unpin(self.snapshot_seq)
        self._database._locks.release_all(self)

    # ------------------------------------------------------------------ using it

    def _require_use(self) -> None:
        if self._ended:
            raise TransactionEnded("this transaction has ended", hint="begin another one")
        if threading.get_ident() != self._thread:
            raise InputError(
                "this transaction belongs to another thread", hint="begin one in each thread that needs one"
            )
        self._database._require_open()

    def _encode(self, bucket: str, key: str) -> bytes:
        prefix = self._database._prefix(bucket)
        return prefix + format.encode_name(key, "key", format.KEY_BYTES_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ended:
            return
        if error is None:
            self.commit()
        else:
            self._end()


def _as_object(entry: Put | Delete) -> Object | None:
    """A write that is not committed has no seq and no time yet."""
    if isinstance(entry, Delete):
        return None
    metadata = dict(entry.metadata) if entry.metadata else None
    return Object(entry.bucket, entry.key, entry.value, metadata, 0, 0)
