"""The part of a transaction that is in the log before its commit: what did not fit into one group.

Always true:
  - it begins with a `begin`, and each write after it is a frame of its own; nobody else sees them, and nobody
    waits for them before the commit;
  - what is written was decided under the state's lock in the moment in which it got its seq: a frame here is
    never a refused one;
  - while its end is not in the log, a crash ends it: opening again appends its abort;
  - `write`, `roll_back` and the end are called where no interrupt comes: what is in the log is known here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lowwater.engine.format.entries import Abort, Begin, Commit, Delete, Put
from lowwater.engine.log.chain import Chain
from lowwater.engine.state.decide import OPEN_MAX, ROLLBACKS_MAX, conflicts, encoded
from lowwater.engine.state.requests import encode_outcome
from lowwater.engine.state.transaction_table import TransactionRow
from lowwater.errors import Conflict, LimitExceeded, LowwaterError

if TYPE_CHECKING:
    from lowwater.engine.database.database import Database


class Spill:
    def __init__(self, database: Database, snapshot_seq: int) -> None:
        self._database = database
        self._snapshot_seq = snapshot_seq
        self.txn = 0  # 0 before the first write
        self.count = 0  # of writes, without those that were taken back
        # The number of the first write of each run, and its seq: seqs of a run have no holes.
        self._runs: list[tuple[int, int]] = []
        self._has_ended = False

    def write(self, entries: Sequence[Put | Delete]) -> None:
        """Put these into the log, in their order. Raises Conflict, and writes nothing, where one of them
        cannot be committed any more."""

        def encode(chain: Chain, time_us: int) -> list[bytes]:
            payloads = []
            seq, txn = chain.seq_last, self.txn
            if not txn:
                seq = txn = seq + 1
                payloads.append(encode_outcome(Begin(self._snapshot_seq), time_us))
            before = self._row().seq_last if self.txn else txn
            for entry in entries:
                payloads.append(encode_outcome(entry._replace(txn=txn), time_us, txn_seq_before=before))
                seq = before = seq + 1
            return payloads

        def decide() -> None:
            self._decide(entries)

        ticket = self._database._queue(encode, (), None, decide)
        seq_first = ticket.seq_last - len(entries) + 1
        self.txn = self.txn or seq_first - 1
        self._runs.append((self.count, seq_first))
        self.count += len(entries)

    def _decide(self, entries: Sequence[Put | Delete]) -> None:
        state = self._database._state
        if self.txn:
            self._require_undoomed()
        elif len(state.transactions.open) >= OPEN_MAX:
            raise LimitExceeded(
                f"there are {OPEN_MAX:,} large transactions open", hint="wait for some to end"
            )
        for entry in entries:
            self._database._prefix(entry.bucket)
            if conflicts(state, encoded(state, entry.bucket, entry.key), self._snapshot_seq, self.txn):
                raise self._conflict()

    def _row(self) -> TransactionRow:
        return self._database._state.transactions.open[self.txn]

    def _require_undoomed(self) -> None:
        if self._row().doomed:
            raise self._conflict()

    def _conflict(self) -> Conflict:
        self._database.measured.conflicts += 1
        return Conflict("a key was written since this transaction began", path=self._database.directory)

    def roll_back(self, count: int) -> None:
        """Take back all writes but the first `count`."""
        if len(self._row().undone) >= ROLLBACKS_MAX:
            raise LimitExceeded("a large transaction was rolled back too often", hint="abort it")
        savepoint_seq = self._seq_after(count)

        def encode(_: Chain, time_us: int) -> list[bytes]:
            return [self._encode_end(Abort(self.txn, savepoint_seq), time_us)]

        self._database._queue(encode, (), None, may_use_reserve=True)
        while self._runs and self._runs[-1][0] >= count:
            self._runs.pop()
        self.count = count

    def _seq_after(self, count: int) -> int:
        """The seq of the last of the first `count` writes, or of the `begin`."""
        if not count:
            return self.txn
        number, seq_first = self._runs[bisect_right(self._runs, count - 1, key=_number) - 1]
        return seq_first + count - 1 - number

    def commit(self, decide: Callable[[], None]) -> int:
        """Make all that the transaction has written into the log take effect, and return its seq. `decide`
        may raise to refuse that."""

        def encode(_: Chain, time_us: int) -> list[bytes]:
            self._has_ended = True
            return [self._encode_end(Commit(self.txn), time_us)]

        def check() -> None:
            self._require_undoomed()
            decide()

        return self._database._write_apart(encode, (), None, check)

    def end(self) -> None:
        """Abort it, unless it was committed. Nobody waits for that: where it does not get into the log,
        opening again sees to it."""
        if self.txn and not self._has_ended:
            self._database._apart(self._abort)

    def _abort(self) -> None:
        self._has_ended = True
        try:
            self._database._queue(
                lambda _, time_us: [self._encode_end(Abort(self.txn), time_us)],
                (),
                None,
                may_use_reserve=True,
            )
        except LowwaterError:
            pass  # the log takes nothing any more, and has told others

    def _encode_end(self, entry: Commit | Abort, time_us: int) -> bytes:
        return encode_outcome(entry, time_us, txn_seq_before=self._row().seq_last)


def _number(run: tuple[int, int]) -> int:
    return run[0]


def abort_losers(database: Database) -> int:
    """After a crash: end the transactions that it ended. Returns how many there were."""
    losers = list(database._state.transactions.open.values())
    if losers:

        def encode(_: Chain, time_us: int) -> list[bytes]:
            return [encode_outcome(Abort(row.txn), time_us, txn_seq_before=row.seq_last) for row in losers]

        database._write(encode, (), None, may_use_reserve=True)
    return len(losers)
