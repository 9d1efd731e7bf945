"""What a power loss leaves of that which was not synced.

Always true:
  - a sector of 512 bytes is old or new, never a mixture, and it goes through its versions in order: what
    is left of it is the durable one, or the one after some first part of its un-synced writes;
  - bytes that were never written, inside a size that survived, are zeros;
  - the outcome depends on the changes, the mode and the random generator, and on nothing else.
"""

from __future__ import annotations

import random
from typing import Literal, NamedTuple, TypeVar

SECTOR_BYTES = 512

#   lose     nothing is left;
#   keep     all is, as after kill -9: in the cache, so that a later power loss can still take it;
#   random   any subset of the changed names; of each file any of its sizes, and of each sector any of
#            the versions that it went through;
#   torn     all names; each file loses the end of its last write, from some sector on;
#   prefix   the first so many changed names, and of each file the first so many changes, the next one
#            torn, as a file system with a journal leaves it.
Survival = Literal["lose", "keep", "random", "torn", "prefix"]
SURVIVALS: tuple[Survival, ...] = ("lose", "keep", "random", "torn", "prefix")

# With one probability for all, a whole file would hardly ever survive or vanish.
CHANCES = (0.0, 0.25, 0.5, 0.75, 1.0)

T = TypeVar("T")


class Change(NamedTuple):
    """A write at `offset`, or, without data, a truncation to `offset`."""

    offset: int
    data: bytes | None


def apply_change(content: bytearray, change: Change) -> None:
    offset, data = change
    if offset > len(content):
        content.extend(bytes(offset - len(content)))
    if data is None:
        del content[offset:]
    else:
        content[offset : offset + len(data)] = data


def surviving_names(changes: list[T], mode: Survival, rng: random.Random) -> list[T]:
    """Which un-synced changes of names a power loss leaves, in their order."""
    if mode == "lose":
        return []
    if mode == "prefix":
        return changes[: rng.randint(0, len(changes))]
    if mode == "random":
        chance = rng.choice(CHANCES)
        return [change for change in changes if rng.random() < chance]
    return changes


def lose_power(durable: bytearray, changes: list[Change], mode: Survival, rng: random.Random) -> None:
    """Apply to a file's durable content what survives of its un-synced changes."""
    if not changes or mode == "lose":
        return
    if mode == "random":
        _survive_by_sector(durable, changes, rng)
        return
    assert mode in ("torn", "prefix"), f"{mode} is no power loss"
    whole = len(changes) - 1 if mode == "torn" else rng.randint(0, len(changes))
    for change in changes[:whole]:
        apply_change(durable, change)
    if whole < len(changes):
        _tear(durable, changes[whole], rng)


def _tear(durable: bytearray, change: Change, rng: random.Random) -> None:
    """Apply some first sectors of a write, never all; of a truncation apply nothing."""
    offset, data = change
    if data is None:
        return
    first = offset // SECTOR_BYTES
    sectors_kept = rng.randrange((offset + len(data) - 1) // SECTOR_BYTES - first + 1)
    if sectors_kept:
        apply_change(durable, Change(offset, data[: (first + sectors_kept) * SECTOR_BYTES - offset]))
    if rng.random() < 0.5 and offset + len(data) > len(durable):
        apply_change(durable, Change(offset + len(data), None))  # the size got there before the bytes


def _survive_by_sector(durable: bytearray, changes: list[Change], rng: random.Random) -> None:
    """Each sector goes through its versions in order and stops at any of them; so does the size."""
    chance = rng.choice(CHANCES)
    sized = rng.choice((0, len(changes), rng.randint(0, len(changes))))
    size = len(durable)
    for offset, data in changes[:sized]:
        size = offset if data is None else max(size, offset + len(data))
    stopped: set[int] = set()  # only ever asked for membership: its order must not decide anything
    lost_from: int | None = None
    for number, (offset, data) in enumerate(changes):
        if data is None:
            # A truncation frees the sectors behind it. Where it is lost the file still has the old
            # ones, and what was written there afterwards went to others that nobody finds.
            if number < sized:
                del durable[offset:]
            elif lost_from is None or offset < lost_from:
                lost_from = offset
            continue
        start, end = offset, offset + len(data)
        while start < end:
            sector = start // SECTOR_BYTES
            stop = min(end, (sector + 1) * SECTOR_BYTES)
            if sector not in stopped:
                if rng.random() < chance and (lost_from is None or stop <= lost_from):
                    apply_change(durable, Change(start, data[start - offset : stop - offset]))
                else:
                    stopped.add(sector)
            start = stop
    apply_change(durable, Change(size, None))
