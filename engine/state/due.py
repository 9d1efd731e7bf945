"""A checkpoint that an entry of the log asks for, until it is durable here.

Always true: it says all that the entry decided and that may have changed since, so the checkpoint can be made
later, and after a restart: the page store's meta holds it from the first flush after the entry on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Who orders more waits. Redo does not: a log that is applied from its beginning, without the checkpoints that
# were made then, asks for all of them, and nobody waits for the old ones.
DUE_MAX = 8


class Due(NamedTuple):
    seq: int
    time_us: int
    base_seq: int
    """The seq of the checkpoint whose blocks need not be written again; 0 for none."""
    control: bytes


def as_stored(due: list[Due]) -> list[list[Any]]:
    return [list(each) for each in due]


def from_stored(stored: list[list[Any]]) -> list[Due]:
    return [Due(*each) for each in stored]
