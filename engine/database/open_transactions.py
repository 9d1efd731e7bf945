"""What open transactions keep from others, and who gives it back where their owners do not.

Always true:
  - what a transaction holds (a snapshot, locks, entries in the log without an end) is given back once: by its
    owner, or in the background where nobody has its handle any more, or where it is open for too long;
  - a collector of garbage takes no lock: it runs in any thread, in the middle of anything;
  - nothing is given back while the owner is about to commit, or to write to the log.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import ref

from lowwater.engine.database.spill import Spill
from lowwater.logging import get_logger

if TYPE_CHECKING:
    from lowwater.engine.database.database import Database
    from lowwater.engine.database.transactions import Transaction

_logger = get_logger("transactions")

# How often one looks, while there are any.
LOOK_AFTER_S = 1.0


class Held:
    """What one transaction holds. It does not know its handle, so that one can be forgotten."""

    def __init__(self, database: Database, started: int, handle: Transaction) -> None:
        self.started = started  # the younger gives way
        self._handle = ref(handle)
        self.began_s = database.seams.clock.monotonic()
        # By whoever ends it, and by its owner while nobody else may.
        self.using = threading.RLock()
        self.ended = self.was_too_old = False
        self.why, self.hint = "this transaction has ended", "begin another one"
        self._database = database
        self._pin = database._pin(None)
        self.snapshot_seq = self._pin.seq
        self.spill = Spill(database, self.snapshot_seq)
        database._open_transactions.add(self)

    @property
    def is_forgotten(self) -> bool:
        """Whether nobody has the handle any more. No `__del__` says so, which could be interrupted."""
        return self._handle() is None

    def end(self, *, committed: bool = False) -> None:
        with self.using:
            database = self._database
            if not self.ended:
                self.ended = True
                if committed:
                    database.measured.transactions_committed += 1
                else:
                    database.measured.transactions_aborted += 1
            self._give_back()

    def _give_back(self) -> None:
        """Where an interrupt cuts it short, the background does it again."""
        database = self._database
        try:
            self.spill.end()
        finally:
            database._state.unpin(self._pin)
            database._locks.release_all(self)
        database._open_transactions.discard(self)


class OpenTransactions:
    """The transactions of a database that are open."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._age_max_s = database.options.transaction_age_max_s
        self._held: dict[Held, None] = {}
        self._is_looking = False
        self._was_empty = False
        self._task = database.seams.runner.start("engine-transactions", self._step)

    def add(self, held: Held) -> None:
        self._held[held] = None
        if not self._is_looking:
            self._task.wake()

    def discard(self, held: Held) -> None:
        self._held.pop(held, None)

    def stop(self) -> None:
        self._task.stop()

    def _step(self) -> float | None:
        self._is_looking = True  # said by nobody else: who was to wake this may be interrupted before
        now_s = self._database.seams.clock.monotonic()
        for held in list(self._held):
            age_s = now_s - held.began_s
            is_too_old = self._age_max_s is not None and age_s >= self._age_max_s
            if held.ended:
                self._end_again(held)
            elif held.is_forgotten or is_too_old:
                self._end(held, age_s)
        is_empty = not self._held
        # Short ones come and go: to be woken for each would cost more than to look once a while.
        if is_empty and self._was_empty:
            self._was_empty = self._is_looking = False
            # One may have come before that was said, and woken nobody.
            return 0 if self._held else None
        self._was_empty = is_empty
        return LOOK_AFTER_S

    def _end_again(self, held: Held) -> None:
        """What an interrupt has left of its end."""
        if held.using.acquire(blocking=False):
            try:
                held.end()
            finally:
                held.using.release()

    def _end(self, held: Held, age_s: float) -> None:
        if not held.using.acquire(blocking=False):
            return  # its owner is about to end it
        try:
            if held.ended:
                return
            held.was_too_old = not held.is_forgotten
            held.why = f"this transaction was aborted: it was open for more than {self._age_max_s or 0:g} s"
            held.hint = "begin another one; engine.transaction_age_max_s says how long one may be open"
            held.end()
        except Exception as error:  # noqa: BLE001 — one that cannot be ended must not keep the others open
            _logger.warning("a transaction was not aborted", path=self._database.directory, error=str(error))
        else:
            _logger.warning(
                "a transaction was aborted",
                path=self._database.directory,
                reason="it was open for too long" if held.was_too_old else "nobody has its handle any more",
                open_s=round(age_s, 3),
            )
        finally:
            held.using.release()
