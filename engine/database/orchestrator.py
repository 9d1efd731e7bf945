"""The two sides of an engine that is fed: what an orchestrator calls, and what an engine asks of it.

Always true: an orchestrator gives each entry its seq, which rises and is never given again; it may deliver an
entry as often as it likes, and begins again after a crash at any seq not above the engine's `durable`.

`testing/engine.py` and `testing/orchestrator.py` have the suites that every one of them passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from lowwater.engine.format.records import Marks, Object
from lowwater.engine.state.decide import Refusal
from lowwater.engine.state.requests import Request


class Outcome(NamedTuple):
    """What became of an entry. `refused` says why it had no effect, and is None where it had its effect. It
    is None as well for an entry that was purged here, of which nothing is known any more."""

    seq: int
    refused: Refusal | None


class StorageEngine(Protocol):
    """An engine as its orchestrator sees it."""

    def apply_log_entry(self, seq: int, entry: Request) -> Outcome:
        """Apply an entry, and return once it is applied. It is durable after `sync`, or soon. A repetition
        returns the same outcome and changes nothing. Raise LogDivergence for another entry under an applied
        seq, and for a seq below the last one that was never given."""
        ...

    def sync(self) -> int:
        """Wait until everything that was applied is durable, and return the last durable seq."""
        ...

    def update_low_water_mark(self, lwm: int) -> int:
        """Set the lowest durable seq of all voting members. Return the mark, which never falls."""
        ...

    def read(self, bucket: str, key: str, seq: int) -> Object:
        """Return the newest version of a key that is not above `seq`, once it is durable. Raise NotFound
        where there is none."""
        ...

    def get_s3_high_water_mark(self) -> int:
        """Return the seq up to which every entry is in the object store."""
        ...

    def create_checkpoint(self) -> str:
        """Ask the orchestrator for a checkpoint entry, and return the checkpoint's id once it is durable
        here. Raise InputError where no orchestrator was named."""
        ...

    def wait_for_checkpoint(self, seq: int) -> str:
        """Return the id of the checkpoint that the applied entry `seq` asked for, once it is durable here."""
        ...

    def marks(self) -> Marks: ...

    def root(self, seq: int | None = None) -> str:
        """Return the fingerprint of the content as of `seq`, or now."""
        ...

    def close(self) -> None: ...


class Orchestrator(Protocol):
    """Whoever orders entries, as an engine sees it."""

    def get_low_water_mark(self) -> int:
        """Return the lowest durable seq of all voting members, as far as it is known."""
        ...

    def fetch_log_entries(self, seq_first: int, seq_last: int) -> Iterable[tuple[int, Request]]:
        """Return the entries from `seq_first` to `seq_last`, each with its seq, in order."""
        ...

    def propose(self, entry: Request) -> None:
        """Order an entry that the engine itself wants, and deliver it as it is. This is best effort: the
        engine asks again until it has seen the entry applied."""
        ...
