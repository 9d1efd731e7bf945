"""Transactions: reads as of one moment, and writes that take effect together or not at all.

Always true:
  - a transaction reads the state as of its snapshot and its own writes on top, whatever others do;
  - nothing of it is seen by others before its commit. While it is small, nothing of it is in the log either:
    its commit is one atomic group, and an abort has nothing to undo. What it writes beyond that goes to the
    log before (`spill.py`), and its commit is an entry;
  - the first to commit wins: a commit is refused when a key that it writes has a version newer than the
    snapshot, and with `serializable` also when a key or range that it has read has one. That is decided in
    the moment of the commit; locks only make it rare;
  - a transaction belongs to the thread that uses it, and to nobody after its end;
  - what was read after somebody else has ended it (it was open for too long) is not returned: nobody keeps
    the versions that it needs.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from lowwater.engine.database.listing import LIMIT_DEFAULT, Listing, as_text
from lowwater.engine.database.open_transactions import Held
from lowwater.engine.format import format
from lowwater.engine.format.before_images import image_bytes
from lowwater.engine.format.entries import Delete, Put, as_bytes
from lowwater.engine.format.keys import after_prefix, encode_key
from lowwater.engine.format.records import Object, Page, PlaceReader, Unread
from lowwater.engine.state.decide import TXN_BYTES_MAX, TXN_ENTRIES_MAX
from lowwater.errors import Closed, Conflict, InputError, LimitExceeded, NotFound, TransactionEnded

if TYPE_CHECKING:
    from lowwater.engine.database.database import Database

Isolation = Literal["snapshot", "serializable"]

# Up to here, or to a quarter of the pool, a transaction is in memory, and its commit one group, which fits
# into a batch. Then it goes to the log, piece by piece. Each entry has its frame around it.
SPILL_ABOVE_BYTES = 8 * 2**20
PIECE_BYTES = 2**20
ENTRY_OVERHEAD_BYTES = 100
READ_RANGES_MAX = 10_000
READ_KEYS_MAX = 1_000_000
# Locks only make refusals rare, and are in memory: a very large transaction goes on without.
LOCKS_MAX = 100_000


class Savepoint:
    """A place to go back to within a transaction."""

    __slots__ = ("_locks", "_transaction", "_write_count")

    def __init__(self, transaction: Transaction, write_count: int, locks: int) -> None:
        self._transaction = transaction
        self._write_count = write_count
        self._locks = locks


class Transaction:
    """A transaction of a database. Begin one with `Database.transaction`."""

    def __init__(
        self, database: Database, *, started: int, isolation: Isolation, lock_timeout_s: float | None
    ) -> None:
        self._held = Held(database, started, self)
        self._database = database
        self._isolation = isolation
        self._lock_timeout_s = lock_timeout_s
        self._thread = threading.get_ident()
        self._writes: dict[bytes, Put | Delete] = {}
        self._written_keys: list[bytes] = []  # those of `_writes`, in order
        # Each write that is not in the log, with what it replaced, for going back to a savepoint.
        self._undo: list[tuple[bytes, Put | Delete, Put | Delete | None]] = []
        self._bytes = 0  # of those
        self._all_bytes = 0
        self._bytes_max = min(SPILL_ABOVE_BYTES, database.options.pool_bytes_max // 4)
        self._read_keys: dict[bytes, None] = {}  # in the order of reading
        self._read_ranges: list[tuple[str, bytes, bytes]] = []
        self.seq: int | None = None
        self.snapshot_seq = self._held.snapshot_seq
        self._spill = self._held.spill

    # ------------------------------------------------------------------ reading

    def get(self, bucket: str, key: str) -> Object:
        """Return what the key holds for this transaction. Raise NotFound where there is nothing."""
        self._require_use()
        # A bucket that somebody has deleted since is still there for this transaction.
        encoded = encode_key(
            format.encode_name(bucket, "bucket", format.BUCKET_BYTES_MAX),
            format.encode_name(key, "key", format.KEY_BYTES_MAX),
        )
        own = self._writes.get(encoded)
        found = _as_object(own) if own is not None else self._read(encoded, bucket, key)
        if self._held.ended:
            self._require_use()
        if found is None:
            self._database._prefix(bucket)
            raise NotFound(f"there is no {key!r} in the bucket {bucket!r}")
        return found

    def _read(self, encoded: bytes, bucket: str, key: str) -> Object | None:
        state = self._database._state
        found = state.away.call(
            lambda: state.at(encoded, bucket, key, self.snapshot_seq, viewer=self._spill.txn)
        )
        if self._isolation == "serializable" and not self._is_own(encoded, found):
            if len(self._read_keys) == READ_KEYS_MAX:
                raise LimitExceeded("a serializable transaction has read too many keys", hint="divide it")
            self._read_keys[encoded] = None
        return found

    def _is_own(self, encoded: bytes, found: Object | None) -> bool:
        """Whether that was read of what this has written itself, and is in the log already: it says nothing
        of what others do, also where it is taken back later."""
        if not self._spill.txn or found is not None:
            return found is not None and not found.seq
        state = self._database._state
        return state.away.call(lambda: state.is_own(encoded, self.snapshot_seq, self._spill.txn))

    def scan(self, bucket: str, prefix: str = "") -> Iterator[Object]:
        """Return the objects of a bucket as this transaction sees them, in the order of their keys. Its own
        writes while the scan runs may or may not be among them."""
        self._require_use()
        low = encode_key(
            format.encode_name(bucket, "bucket", format.BUCKET_BYTES_MAX), as_text(prefix, "prefix")
        )
        high = after_prefix(low)
        self._note_range(bucket, low, high)
        return self._while_open(self._merge(bucket, low, high))

    def list(
        self,
        bucket: str,
        prefix: str = "",
        delimiter: str | None = None,
        start_after: str | None = None,
        limit: int = LIMIT_DEFAULT,
    ) -> Page:
        """Return one page of the keys as this transaction sees them, in the form of `Database.list`. What the
        transaction has written itself has no seq and no time yet."""
        self._require_use()
        listing = Listing(bucket, prefix, delimiter, start_after, limit)
        self._note_range(bucket, listing.low, listing.high)
        return listing.page(lambda low, high: self._merge(bucket, low, high, Unread))

    def _note_range(self, bucket: str, low: bytes, high: bytes) -> None:
        """What a serializable commit rests on: that nothing in it has changed."""
        if self._isolation == "serializable" and low < high:
            if len(self._read_ranges) == READ_RANGES_MAX:
                raise LimitExceeded("a serializable transaction has scanned too often", hint="divide it")
            self._read_ranges.append((bucket, low, high))

    def _while_open(self, found: Iterator[Object]) -> Iterator[Object]:
        """Nobody keeps the versions of a transaction that has ended."""
        self._require_use()
        for each in found:
            self._require_use()
            yield each
        self._require_use()

    def _merge(
        self, bucket: str, low: bytes, high: bytes, reader: PlaceReader | None = None
    ) -> Iterator[Object]:
        own_keys = self._written_keys[
            bisect_left(self._written_keys, low) : bisect_left(self._written_keys, high)
        ]
        # They may go to the log while the scan runs, where it has come by already.
        own = iter([(key, self._writes[key]) for key in own_keys])
        end = (high, None)
        own_key, entry = next(own, end)
        skip = 1 + len(bucket.encode())
        state = self._database._state
        for found in state.scan(bucket, low, high, self.snapshot_seq, reader, self._spill.txn):
            encoded = low[:skip] + found.key.encode()
            while own_key < encoded:
                if entry is not None and (mine := _as_object(entry)) is not None:
                    yield mine
                own_key, entry = next(own, end)
            if own_key != encoded:
                yield found
        while entry is not None:
            if (mine := _as_object(entry)) is not None:
                yield mine
            own_key, entry = next(own, end)

    # ------------------------------------------------------------------ writing

    def put(self, bucket: str, key: str, value: bytes, metadata: Mapping[str, str] | None = None) -> None:
        """Store a value, when the transaction commits."""
        # Both are the caller's, who may change them before the commit.
        entry = Put(
            bucket, key, as_bytes(value), dict(metadata) if isinstance(metadata, Mapping) else metadata
        )
        self._write(entry, len(entry.encode(0)))

    def delete(self, bucket: str, key: str) -> None:
        """Remove a key, when the transaction commits. Raise NotFound where there is none."""
        self.get(bucket, key)
        entry = Delete(bucket, key)
        self._write(entry, len(entry.encode(0)))

    def _write(self, entry: Put | Delete, size: int) -> None:
        self._require_use()
        encoded = self._encode(entry.bucket, entry.key)
        size += ENTRY_OVERHEAD_BYTES
        if self._all_bytes + size > TXN_BYTES_MAX or self._write_count == TXN_ENTRIES_MAX:
            raise LimitExceeded(
                f"a transaction writes at most {TXN_BYTES_MAX:,} bytes and {TXN_ENTRIES_MAX:,} entries",
                hint="commit, and go on in another one",
            )
        if self._write_count < LOCKS_MAX:
            locks = self._database._locks
            try:
                locks.acquire(self._held, (entry.bucket, entry.key), "X", timeout_s=self._lock_timeout_s)
            except Closed:
                self._require_use()
                raise
            if self._held.ended:
                locks.release_all(self._held)
                self._require_use()
        # A key that somebody has written since the snapshot dooms the commit: better told now.
        state = self._database._state
        state.away.call(lambda: self._require_unchanged(encoded))
        if self._database._wal.chain.settings.before_images:
            # What others write to the key before the commit refuses that: its image is this one.
            size += state.away.call(lambda: image_bytes(state, encoded))
        if self._undo and self._bytes + size > format.BATCH_BYTES_MAX - PIECE_BYTES:
            self._spill_writes()  # with this one they would be too large for one batch
        self._undo.append((encoded, entry, self._writes.get(encoded)))
        if encoded not in self._writes:
            insort(self._written_keys, encoded)
        self._writes[encoded] = entry
        self._bytes += size
        self._all_bytes += size
        if self._bytes > (min(PIECE_BYTES, self._bytes_max) if self._spill.txn else self._bytes_max):
            self._spill_writes()

    @property
    def _write_count(self) -> int:
        """How many writes there were that were not taken back."""
        return self._spill.count + len(self._undo)

    def _spill_writes(self) -> None:
        """Put what was written into the log, all of it in its order: savepoints lie between."""
        if self._undo:
            with self._held.using:
                self._require_use()
                self._database._apart(self._spill_all)

    def _spill_all(self) -> None:
        self._spill.write([entry for _, entry, _ in self._undo])
        self._forget_writes()

    def _forget_writes(self) -> None:
        self._writes, self._written_keys, self._undo, self._bytes = {}, [], [], 0

    def savepoint(self) -> Savepoint:
        """Return a place to go back to with `rollback_to`."""
        self._require_use()
        return Savepoint(self, self._write_count, self._database._locks.savepoint(self._held))

    def rollback_to(self, savepoint: Savepoint) -> None:
        """Take back what was written since the savepoint. The savepoint stays, and can be used again."""
        self._require_use()
        if not isinstance(savepoint, Savepoint) or savepoint._transaction is not self:
            raise InputError("this savepoint belongs to another transaction")
        count = savepoint._write_count
        if count > self._write_count:
            raise InputError("this savepoint was taken back by a roll-back to an earlier one")
        if count < self._spill.count:
            with self._held.using:
                self._require_use()
                self._database._apart(lambda: self._roll_back_spilled(count))
        while self._write_count > count:
            encoded, _, before = self._undo.pop()
            if before is None:
                del self._writes[encoded]
                del self._written_keys[bisect_left(self._written_keys, encoded)]
            else:
                self._writes[encoded] = before
        self._database._locks.release_since(self._held, savepoint._locks)

    def _roll_back_spilled(self, count: int) -> None:
        self._spill.roll_back(count)
        self._forget_writes()

    # ------------------------------------------------------------------ ending

    def commit(self) -> int | None:
        """Make all writes take effect, and return their seq; None where there were none. Raise Conflict,
        without effect, if somebody else was first."""
        with self._held.using:
            self._require_use()
            committed = False
            try:
                if self._spill.txn:
                    self._spill_writes()
                    self.seq = self._spill.commit(self._decide)
                elif self._writes or self._isolation == "serializable":
                    self.seq = self._database._commit_transaction(
                        [self._writes[key] for key in self._written_keys], self._decide
                    )
                committed = True
                return self.seq
            finally:
                self._held.end(committed=committed)

    def abort(self) -> None:
        """End the transaction without effect."""
        self._require_use()
        self._held.end()

    def _decide(self) -> None:
        """With the state's lock: raise Conflict unless the transaction can take effect now. What is in the
        log already was decided when it got there, and who came between has doomed it."""
        for encoded in self._writes:
            self._require_unchanged(encoded)
        for encoded in self._read_keys:
            self._require_unchanged(encoded)
        state = self._database._state
        for bucket, low, high in self._read_ranges:
            if state.changed_since(low, high, self.snapshot_seq, self._spill.txn):
                self._database.measured.conflicts += 1
                raise Conflict(f"keys of the bucket {bucket!r} have changed since they were read")

    def _require_unchanged(self, encoded: bytes) -> None:
        newest = self._database._state.newest_seq(encoded, self._spill.txn, above=self.snapshot_seq)
        if newest > self.snapshot_seq:
            self._database.measured.conflicts += 1
            raise Conflict(
                "a key was written since this transaction began", seq=newest, path=self._database.directory
            )

    # ------------------------------------------------------------------ using it

    def _require_use(self) -> None:
        if self._held.ended:
            raise TransactionEnded(self._held.why, hint=self._held.hint)
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
        if error is not None:
            self._held.end()
        elif not self._held.ended or self._held.was_too_old:
            self.commit()


def _as_object(entry: Put | Delete) -> Object | None:
    """A write that is not committed has no seq and no time yet."""
    if isinstance(entry, Delete):
        return None
    metadata = dict(entry.metadata) if entry.metadata else None
    return Object(entry.bucket, entry.key, entry.value, metadata, 0, 0)
