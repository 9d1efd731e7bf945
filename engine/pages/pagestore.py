"""The interface through which the engine keeps pages: bytes by key, changed in transactions.

Always true of a store:
  - what `write` was given is there as a whole once it returns, whatever happens to the process or the
    power, and as a whole or not at all when it does not return;
  - a write that failed is the last one: all later ones raise, reads go on, and show the state before it.
    After the store was opened again it has that state or the one after it, and nothing in between;
  - no read keeps anything open between two calls, so no reader ever keeps old pages from being reused;
  - every error is one of `lowwater.errors`, and no database's own.

`lmdb_store.py` keeps pages in LMDB, `memory_pages.py` in memory for tests and simulations, and
`testing/pagestore.py` is what both have to pass.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from lowwater.errors import LogPoisoned, OutOfSpace

# What LMDB takes.
KEY_BYTES_MAX = 511

_HINT = "pages cannot be written, reads go on: {}, then close and open again. Nothing acknowledged is lost"


class PageStore(Protocol):
    """Any number of threads may read at any time. Writes wait for each other."""

    path: str

    def read_meta(self) -> dict[bytes, bytes]:
        """All of what was written as meta, as of one transaction."""
        ...

    def page_keys(self) -> Iterator[bytes]:
        """The keys of all pages, in order. It reads in runs: of keys that come or go while it is read it
        may have either, all others come exactly once."""
        ...

    def page_sizes(self) -> Iterator[tuple[bytes, int]]:
        """Yield the key and the size in bytes of each page, in order, without reading the pages. It reads in
        runs: it may or may not have keys that come or go meanwhile; all others come exactly once."""
        ...

    def get(self, key: bytes) -> bytes | None:
        """One page, or None where there is none."""
        ...

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the pages of several keys, as of one transaction; None for each key that has none."""
        ...

    def write(
        self,
        puts: Sequence[tuple[bytes, bytes]],
        deletes: Sequence[bytes],
        meta: Mapping[bytes, bytes | None],
    ) -> None:
        """One transaction, durable once this returns: pages go, then pages come, and meta changes, where
        None takes a key out. Pages that are given in the order of their keys are written faster.
        Deleting what is not there changes nothing."""
        ...

    on_full: Callable[[], object]
    """Called where the disk has no room for a transaction, which is tried once more then."""

    owns_lock: Callable[[], bool]
    """Whether this thread is inside a call, with a lock that others may wait for: a signal handler asks."""

    has_sums: bool
    """Whether the keys of its pages were compared with those that were written, when it was opened."""

    def damage(self) -> list[str]:
        """What is wrong with what the store itself has put around pages, looked at without trusting it."""
        ...

    def size_bytes(self) -> int:
        """What the store takes of the disk. It never falls while it is open."""
        ...

    def used_bytes(self) -> int:
        """What of that is in use. The rest is reused before the store grows."""
        ...

    def close(self) -> None:
        """Waits for reads and a write that are under way. All calls but this one raise Closed afterwards."""
        ...


def check_write(
    puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes], meta: Mapping[bytes, bytes | None]
) -> None:
    """Keys are made by the engine, so a key that no store takes is a bug, found before anything is written.
    So is a key that comes twice: the first page would be written for nothing."""
    put = [key for key, _ in puts]
    for keys in (put, deletes, meta):
        lengths = set(map(len, keys))
        assert not lengths or 0 < min(lengths) <= max(lengths) <= KEY_BYTES_MAX, (
            "a key of this length cannot be stored"
        )
    assert len(set(put)) == len(put), "a page is written twice in one transaction"


# What says that there is no room.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_failure(number: int, path: str) -> LogPoisoned:
    """The error of the write that failed with this errno (0: it is not known), and of all after it."""
    if number in FULL:
        return OutOfSpace(
            "the disk is full: a group of pages was not written",
            path=path,
            hint=_HINT.format("free some space"),
        )
    reason = f": {os.strerror(number).lower()}" if number > 0 else ""
    return LogPoisoned(
        f"a group of pages could not be written{reason}",
        path=path,
        hint=_HINT.format("look into the system's log for the disk"),
    )
