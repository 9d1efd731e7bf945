"""How many versions of a key are kept, and when snapshots end: log state, and the same on every replica.

Always true, where a limit of n versions a key is in force:
  - of each key there are its n newest versions, and for each snapshot the newest that is not above its seq;
  - a read at s, not below the floor, is refused as `VersionGone` where the key has n versions above s or
    more: what is asked for is dropped, or may be by another replica. Otherwise fewer than n are newer than
    the wanted one, so it was never dropped. Whether a version is still here decides nothing: replicas that
    flush at other times answer alike;
  - a read at a snapshot's seq is exempt, and so is one at a seq that this process has pinned since that was
    the newest. So a snapshot is of the newest seq, or of that of another snapshot, while there is a limit;
  - `exact_from` is the seq at which a limit was last raised or lifted. What the lower one has dropped is not
    known any more, so below it only snapshots are read.

The records of buckets have no limit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

from lowwater.engine.format.page import UNSTAMPED, DataPage
from lowwater.engine.format.records import Record, seq_of
from lowwater.errors import VersionGone

PER_KEY_MAX = 2**32
BUCKET_BYTE = 0  # what the encoded keys of the buckets' own records begin with


class Snapshot(NamedTuple):
    """A named snapshot: the seq that it shows, and when it ends (None: when it is dropped by hand)."""

    seq: int
    expires_us: int | None


class Pin:
    """A moment that somebody reads, for as long as this object is held. An interrupt may come before it is
    given back."""

    __slots__ = ("__weakref__", "seq")

    def __init__(self, seq: int) -> None:
        self.seq = seq


Pins = dict[ref[Pin], int]
"""The pins that are held, with their seqs. A pin that nobody holds any more leaves without a lock, and
without anything that could be interrupted."""


def add_pin(pins: Pins, pin: Pin) -> None:
    pins[ref(pin, pins.pop)] = pin.seq


class Keeping:
    def __init__(self) -> None:
        self.expires_us: dict[str, int] = {}  # of the snapshots that end by themselves
        self.per_key_max: int | None = None
        self.exact_from = 0
        # What this process has pinned since it was the newest, or a snapshot's.
        self.exact_pins: Pins = {}

    def to_meta(self) -> dict[str, Any]:
        return {
            "expires_us": dict(sorted(self.expires_us.items())),
            "per_key_max": self.per_key_max,
            "exact_from": self.exact_from,
        }

    def from_meta(self, stored: Mapping[str, Any]) -> None:
        self.expires_us = dict(stored["expires_us"])
        self.per_key_max = stored["per_key_max"]
        self.exact_from = stored["exact_from"]

    # ------------------------------------------------------------------ entries

    def limit(self, per_key_max: int | None, seq: int) -> None:
        """What a horizon entry says at `seq`."""
        before, self.per_key_max = self.per_key_max, per_key_max
        if before is not None and (per_key_max is None or per_key_max > before):
            self.exact_from = seq

    def can_pin(self, seq: int, applied: int, snapshots: Mapping[str, int]) -> bool:
        """Whether every replica still has all that is to be read at `seq`."""
        if seq == applied or seq in snapshots.values():
            return True
        return self.per_key_max is None and seq >= self.exact_from

    # ------------------------------------------------------------------ reading

    def is_exact(self, seq: int, applied: int, snapshots: Mapping[str, int]) -> bool:
        """Whether no limit has taken anything of what is read at `seq`."""
        return seq >= applied or seq in self.exact_pins.values() or seq in snapshots.values()

    def require_kept(
        self, key: bytes, records: Sequence[Record], page: DataPage | None, row: int, seq: int
    ) -> None:
        """Raise VersionGone where a key has as many versions above `seq` as are kept. `row` is the first one
        of the key in its page, or -1. A version may be in memory and in the page."""
        assert self.per_key_max is not None
        if key[0] == BUCKET_BYTE:
            return
        above = {each for each in map(seq_of, records) if each > seq}
        if page is not None and row >= 0:
            above.update(each for each in page.seqs[row : row + page.versions(row)] if each > seq)
        if len(above) >= self.per_key_max:
            raise self._gone(seq)

    def require_few(self, key: bytes, seqs: Iterable[int], seq: int) -> None:
        """Raise VersionGone where a key has as many versions above `seq` as are kept. `seqs` are those of its
        versions that count."""
        assert self.per_key_max is not None
        if key[0] != BUCKET_BYTE and len({each for each in seqs if each > seq}) >= self.per_key_max:
            raise self._gone(seq)

    def require_rows_kept(self, page: DataPage, start: int, stop: int, seq: int) -> None:
        """Raise VersionGone where a key in a page's rows from `start` to below `stop` has as many versions
        above `seq` as are kept."""
        assert self.per_key_max is not None
        rows = zip(page.keys[start:stop], page.seqs[start:stop], strict=True)
        above = Counter(key for key, each in rows if each > seq and key[0] != BUCKET_BYTE)
        if above and max(above.values()) >= self.per_key_max:
            raise self._gone(seq)

    def _gone(self, seq: int) -> VersionGone:
        return VersionGone(
            f"a key has had {self.per_key_max} versions since seq {seq}, and no more are kept",
            seq=seq,
            hint="read at a later seq; snapshots keep what they show",
        )


def limited(page: DataPage, per_key_max: int, needed: Sequence[int]) -> DataPage:
    """The page without what the limit takes. `needed` are the seqs, in order, of snapshots and of what is
    being read."""
    keep: list[bool] = []
    key_before: bytes | None = None
    count = seq_above = 0
    for key, seq, flags in zip(page.keys, page.seqs, page.flags, strict=True):
        if key != key_before:
            key_before, count = key, 0
        # What a transaction has written may never count.
        if flags & UNSTAMPED or key[0] == BUCKET_BYTE:
            keep.append(True)
            continue
        count += 1
        at = bisect_left(needed, seq)
        keep.append(count <= per_key_max or (at < len(needed) and needed[at] < seq_above))
        seq_above = seq
    return page.only(keep)
