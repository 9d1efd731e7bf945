"""What a log says, by the rules of the model: entry after entry, with no part of the engine."""

from __future__ import annotations

from typing import Any

from tests.engine.engine_model import Effect, Model, Unit


class Replayed:
    """A model that is told the entries of a log."""

    def __init__(self) -> None:
        self.model = Model()
        self._values: dict[int, bytes] = {}
        self._group: list[Effect] = []
        self._open: dict[int, list[tuple[int, Effect]]] = {}

    def add(self, entry: Any) -> None:
        if entry.refused is not None:
            self.model.note(entry.seq, entry.time_us)
            return
        effects = self._effects(entry)
        if entry.txn is not None and entry.kind not in ("commit", "abort"):
            self._open.setdefault(entry.txn, []).extend((entry.seq, each) for each in effects)
            effects = []
        elif entry.kind == "commit":
            effects = [each for _, each in self._open.pop(entry.txn, [])]
        elif entry.kind == "abort":
            body = entry.body if hasattr(entry, "body") else {}
            assert "savepoint" not in (body or {}), "the workload of these tests has no savepoints"
            self._open.pop(entry.txn, None)
        group_last = None if entry.extras is None else entry.extras.group_seq_last
        if group_last is not None:
            self._group += effects
            if entry.seq < group_last:
                return
            effects, self._group = self._group, []
        if effects:
            self.model.apply(Unit(entry.seq, entry.time_us, effects))
        else:
            self.model.note(entry.seq, entry.time_us)

    def _effects(self, entry: Any) -> list[Effect]:
        value = entry.value
        if entry.kind == "create_bucket":
            return [("bucket", entry.bucket, None, b"", None)]
        if entry.kind == "delete_bucket":
            return [("bucket", entry.bucket, None, None, None)]
        if entry.kind in ("put", "copy"):
            if entry.extras is not None and entry.extras.value_ref is not None:
                value = self._values[entry.extras.value_ref[1]]
            self._values[entry.seq] = value
            return [("key", entry.bucket, entry.key, value, entry.metadata)]
        if entry.kind == "delete":
            return [("key", entry.bucket, entry.key, None, None)]
        return []
