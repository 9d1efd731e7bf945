"""Transactions of the model: what an open one sees, and what may become of it.

Always true:
  - whether a write is in the log already is the engine's choice (`spill.py`), which the model looks up; what
    follows from it is not: every read and every outcome is computed here, from versions and writes alone;
  - frames of open transactions have no effect, so the model only follows their number.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest

from lowwater.errors import Conflict, LockTimeout, LowwaterError, NotFound

Name = tuple[str, str]
"""bucket, key"""


class Written(NamedTuple):
    """`value` is None for a deletion."""

    name: Name
    value: bytes | None
    metadata: dict[str, str] | None = None


class OpenTransaction:
    def __init__(self, transaction: Any, snapshot: int, *, serializable: bool) -> None:
        self.transaction = transaction
        self.snapshot = snapshot
        self.serializable = serializable
        self.writes: list[Written] = []
        self.savepoints: list[tuple[Any, int]] = []
        self.read_keys: set[Name] = set()
        self.read_ranges: set[tuple[str, str]] = set()
        self.floor: int | None = None
        self.doomed = False
        self.locked: set[Name] = set()
        self.ever_locked: set[Name] = set()

    @property
    def spilled(self) -> list[Written]:
        return self.writes[: self.transaction._spill.count]

    @property
    def unspilled(self) -> list[Written]:
        return self.writes[self.transaction._spill.count :]

    def overlay(self) -> dict[Name, Written]:
        return {each.name: each for each in self.writes}


class TransactionCalls:
    """The part of the driver. It ends with the process: what is open then is aborted."""

    model: Any
    machine: Any
    seen: Counter[str]
    pending: list[Any]
    db: Any
    _units: Any
    absorb: Any
    txns: list[OpenTransaction]

    def begin(self, *, serializable: bool = False) -> OpenTransaction:
        self.absorb()
        transaction = self.db.transaction("serializable" if serializable else "snapshot", lock_timeout_s=0)
        opened = OpenTransaction(transaction, self.model.applied, serializable=serializable)
        assert transaction.snapshot_seq == opened.snapshot
        self.model.pins[opened.snapshot] += 1
        self.txns.append(opened)
        return opened

    def _newest(self, name: Name) -> int:
        versions = self.model.keys.get(name[0], {}).get(name[1], ())
        return versions[-1].seq if versions else 0

    def _changed(self, opened: OpenTransaction, names: Any) -> bool:
        return any(self._newest(name) > opened.snapshot for name in names)

    def _read_changed(self, opened: OpenTransaction) -> bool:
        if not opened.serializable:
            return False
        return self._changed(opened, opened.read_keys) or any(
            self._newest((bucket, key)) > opened.snapshot
            for bucket, prefix in opened.read_ranges
            for key in self.model.keys.get(bucket, {})
            if key.startswith(prefix)
        )

    def _may_fail(self, opened: OpenTransaction, writes: list[Written]) -> tuple[type[LowwaterError], ...]:
        """What putting these into the log, or committing, may raise now."""
        errors: list[type[LowwaterError]] = []
        if opened.doomed or self._changed(opened, [each.name for each in writes]):
            errors.append(Conflict)
        if any(not self.model.has_bucket(each.name[0]) for each in writes):
            errors.append(NotFound)
        return tuple(errors)

    def follow(self, opened: OpenTransaction, call: Callable[[], Any]) -> Any:
        """A call of a transaction. It may have put frames into the log, which nobody waited for."""
        self.absorb()
        floor = max(opened.snapshot, self.model.floor_kept)
        was_spilled = bool(opened.transaction._spill.txn)
        try:
            return call()
        finally:
            if not self.machine.files._crashed:
                if opened.transaction._spill.txn and not was_spilled and opened in self.txns:
                    opened.floor = floor
                    self.model.open_floors.append(floor)
                    self.seen["spilled"] += 1
                self.model.note(self.db.marks().applied, self.db._log.chain.time_us)

    def txn_write(self, opened: OpenTransaction, written: Written) -> None:
        bucket, key = written.name
        transaction = opened.transaction

        def call() -> None:
            if written.value is None:
                transaction.delete(bucket, key)
            else:
                transaction.put(bucket, key, written.value, written.metadata)

        expected: list[type[LowwaterError]] = []
        has_bucket = self.model.has_bucket(bucket)
        if not has_bucket or (written.value is None and self._view(opened, written.name) is None):
            expected = [NotFound]
        elif any(written.name in other.locked for other in self.txns if other is not opened):
            expected = [LockTimeout]
        elif self._changed(opened, [written.name]):
            expected = [Conflict]
        if written.value is None and self.model.has_bucket(bucket) and written.name not in opened.overlay():
            opened.read_keys.add(written.name)
        if expected:
            with pytest.raises((expected[0], LockTimeout)) as caught:
                self.follow(opened, call)
            if caught.type is not expected[0]:
                self._require_locked(opened, written.name)
            self.seen[f"{caught.type.__name__} in a transaction"] += 1
            if caught.type is Conflict:
                opened.ever_locked.add(written.name)
            return
        may_fail = self._may_fail(opened, [*opened.unspilled, written])
        try:
            self.follow(opened, call)
        except LockTimeout:
            self._require_locked(opened, written.name)
            return
        except LowwaterError as error:
            # It was to go to the log with those before it.
            if type(error) not in may_fail:
                raise
            self.seen["Conflict in a spill"] += 1
        opened.locked.add(written.name)
        opened.ever_locked.add(written.name)
        opened.writes.append(written)
        assert len(opened.writes) == transaction._write_count
        if written.name in [each.name for each in opened.spilled]:
            self.seen["written to the log early"] += 1

    def _require_locked(self, opened: OpenTransaction, name: Name) -> None:
        """A lock may be held longer than the write that took it counts."""
        assert any(name in other.ever_locked for other in self.txns if other is not opened)

    def txn_get(self, opened: OpenTransaction, name: Name) -> None:
        if not self.model.has_bucket(name[0]):
            return
        if name not in opened.overlay():
            opened.read_keys.add(name)
        found = self._view(opened, name)
        if found is None:
            with pytest.raises(NotFound):
                opened.transaction.get(*name)
            return
        got = opened.transaction.get(*name)
        assert (got.value, got.metadata or None, got.seq) == found

    def _view(self, opened: OpenTransaction, name: Name) -> tuple[bytes, dict[str, str] | None, int] | None:
        own = opened.overlay().get(name)
        if own is not None:
            return None if own.value is None else (own.value, own.metadata or None, 0)
        found = self.model.get(*name, opened.snapshot)
        return None if found is None else (found.value, found.metadata or None, found.seq)

    def txn_scan(self, opened: OpenTransaction, bucket: str, prefix: str) -> None:
        if not self.model.has_bucket(bucket):
            return
        opened.read_ranges.add((bucket, prefix))
        expected = {found.key: found.value for found in self.model.live(bucket, prefix, opened.snapshot)}
        for name, own in opened.overlay().items():
            if name[0] == bucket and name[1].startswith(prefix):
                if own.value is None:
                    expected.pop(name[1], None)
                else:
                    expected[name[1]] = own.value
        got = [(found.key, found.value) for found in opened.transaction.scan(bucket, prefix)]
        assert got == sorted(expected.items())
        self.seen["scans in transactions"] += 1

    def savepoint(self, opened: OpenTransaction) -> None:
        opened.savepoints.append((opened.transaction.savepoint(), len(opened.writes)))

    def rollback_to(self, opened: OpenTransaction, index: int) -> None:
        if not opened.savepoints:
            return
        index %= len(opened.savepoints)
        savepoint, count = opened.savepoints[index]
        if count < len(opened.spilled):
            self.seen["rolled back in the log"] += 1
        self.follow(opened, lambda: opened.transaction.rollback_to(savepoint))
        del opened.savepoints[index + 1 :]
        del opened.writes[count:]
        opened.locked = {each.name for each in opened.writes}

    def commit(self, opened: OpenTransaction) -> None:
        transaction = opened.transaction
        model = self.model
        self.absorb()
        is_spilled = bool(transaction._spill.txn)
        may_fail = self._may_fail(opened, opened.unspilled)
        if self._read_changed(opened):
            may_fail = (*may_fail, Conflict)
        last = opened.overlay()
        effects = [
            ("key", each.name[0], each.name[1], each.value, each.metadata)
            for each in sorted(last.values(), key=lambda each: each.name)
        ]
        if may_fail:
            with pytest.raises(may_fail) as caught:
                self.follow(opened, transaction.commit)
            self.seen[f"{caught.type.__name__} at a commit"] += 1
        else:
            time_us = max(self.machine.clock.now_us(), model.time_us)
            frames = len(opened.unspilled) + 1 if is_spilled else len(last)
            unit = type(self)._unit(model.applied + frames, time_us, effects)
            self.pending = [unit] if effects or is_spilled else []
            seq = transaction.commit()
            for each in self.pending:
                model.apply(each)
                self.acked = each.seq
                assert seq == each.seq
            if self.pending and not is_spilled:
                self._doom(effects)
            self.pending = []
            self.seen["committed large" if is_spilled else "committed"] += 1
        self._forget(opened)

    acked: int
    _unit: Any

    def abort(self, opened: OpenTransaction) -> None:
        self.follow(opened, opened.transaction.abort)
        self.seen["aborted"] += 1
        self._forget(opened)

    def _forget(self, opened: OpenTransaction) -> None:
        self.txns.remove(opened)
        self.model.pins[opened.snapshot] -= 1
        self.model.pins = +self.model.pins
        if opened.floor is not None:
            self.model.open_floors.remove(opened.floor)

    lost_transactions: bool

    def _forget_all(self) -> None:
        self.lost_transactions = self.lost_transactions or bool(self.txns) or self.acked < self.model.applied
        self.txns = []
        self.model.open_floors.clear()

    def _doom(self, effects: list[Any]) -> None:
        """Somebody else has written these keys."""
        names = {(effect[1], effect[2]) for effect in effects if effect[0] == "key"}
        for opened in self.txns:
            if not opened.doomed and any(each.name in names for each in opened.spilled):
                opened.doomed = True
                self.seen["doomed"] += 1

    def is_held(self, bucket: str) -> bool:
        return any(
            each.name[0] == bucket for opened in self.txns if not opened.doomed for each in opened.spilled
        )


class TransactionChances:
    """The part of the calls by chance."""

    WEIGHTS_IN_TRANSACTIONS: ClassVar[dict[str, int]] = {
        "txn_begin": 5, "txn_put": 30, "txn_delete": 8, "txn_get": 8, "txn_scan": 3, "txn_savepoint": 8,
        "txn_rollback": 9, "txn_commit": 4, "txn_abort": 2, "txn_run": 9,
        "txn_overtaken": 1,
    }  # fmt: skip

    driver: Any
    rng: random.Random
    bucket: Callable[[], str]
    key: Callable[[], str]
    value: Callable[[], bytes]
    metadata: Callable[[], dict[str, str] | None]

    def _txn(self) -> Any:
        return self.rng.choice(self.driver.txns) if self.driver.txns else None

    def txn_begin(self) -> None:
        if len(self.driver.txns) < 3:
            self.driver.begin(serializable=self.rng.random() < 0.3)

    def txn_put(self) -> None:
        written = Written((self.bucket(), self.key()), self.value(), self.metadata())
        if (opened := self._txn()) is not None:
            self.driver.txn_write(opened, written)

    def txn_run(self) -> None:
        """Many writes by one: larger than the pool."""
        opened = self._txn()
        name = self.rng.choice("01234")  # keys that few others write
        for number in range(self.rng.choice((10, 60))):
            key = f"{name}/own/{number}" if self.rng.random() < 0.9 else self.key()
            written = Written((self.bucket(), key), self.value())
            if opened is not None and opened in self.driver.txns:
                self.driver.txn_write(opened, written)
                if self.rng.random() < 0.3:
                    self.driver.machine.step()
                    self.driver.absorb()

    def txn_delete(self) -> None:
        opened = self._txn()
        if opened is None:
            return
        bucket = self.bucket()
        keys = [name[1] for name in opened.overlay() if name[0] == bucket]
        keys += [found.key for found in self.driver.model.live(bucket)][:20]
        self.driver.txn_write(opened, Written((bucket, self.rng.choice(keys or ["0"])), None))

    def txn_get(self) -> None:
        name = (self.bucket(), self.key())
        if (opened := self._txn()) is not None:
            own = [*opened.overlay()]
            self.driver.txn_get(opened, self.rng.choice([name, *own]))

    def txn_scan(self) -> None:
        bucket, prefix = self.bucket(), self.rng.choice(("", "a", "a/", "0"))
        if (opened := self._txn()) is not None:
            self.driver.txn_scan(opened, bucket, prefix)

    def txn_savepoint(self) -> None:
        if (opened := self._txn()) is not None:
            self.driver.savepoint(opened)

    def txn_rollback(self) -> None:
        if (opened := self._txn()) is not None:
            self.driver.rollback_to(opened, self.rng.randrange(8))

    def txn_commit(self) -> None:
        if (opened := self._txn()) is not None:
            self.driver.commit(opened)

    def txn_overtaken(self) -> None:
        """What it has read is written by somebody else before it commits."""
        self.txn_begin()
        if (opened := self._txn()) is not None:
            name = (self.bucket(), self.key())
            self.driver.txn_get(opened, name)
            self.driver.put(*name, self.value())
            if opened in self.driver.txns:
                self.driver.commit(opened)

    def txn_abort(self) -> None:
        if (opened := self._txn()) is not None:
            self.driver.abort(opened)
