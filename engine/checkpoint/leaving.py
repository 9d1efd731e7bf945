"""Pages leave: where a page is a block of a checkpoint that is in the archive, a reference takes its place.

Always true:
  - a page leaves only where it is that block, row by row, by its hash, once it was rid of the versions that
    nobody can read any more. So everything that can be read of its keys can be read of the block;
  - nothing of its keys is in memory then, and nothing in it waits for a transaction to end. What is written
    afterwards stays in memory until the page is back: it is no part of the reference;
  - the entries by which it was decided what nobody can read are durable before, as with a flush;
  - pages with the buckets' own records stay: opening needs them, and reads nothing from afar.

Pages that keep older versions, for a snapshot or the horizon, stay until these are let go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice

from lowwater.engine.checkpoint.content import Base, KnownBlocks
from lowwater.engine.format.page import REFERENCE, decode_page
from lowwater.engine.format.records import VALUE_PLACE
from lowwater.engine.format.references import (
    REFERENCE_BYTES,
    encode_reference,
    is_block,
    is_reference,
    reference_to,
)
from lowwater.engine.pages.merging import swept
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.state.state import State
from lowwater.errors import LowwaterError

BEFORE_LEAVE = Failpoint("pages.before_leave")
AFTER_LEAVE = Failpoint("pages.after_leave")

# How many pages leave in one transaction.
RUN_PAGES = 64
# The page keys from here on have no bucket's own record.
FIRST_KEY = b"\1"


def _always(_: bytes) -> bool:
    return True


class Leaving:
    """What a database, and a fed engine, offer of this as `leaving`."""

    def __init__(
        self,
        state: State,
        *,
        alone: Callable[[], AbstractContextManager[None]],
        make_durable: Callable[[int], None],
        put_back: Callable[[], None],
    ) -> None:
        """Nothing is flushed within `alone()`. `put_back` puts pages that were read into the store again."""
        self._state = state
        self._alone = alone
        self._make_durable = make_durable
        self._put_back = put_back

    def leave(self, checkpoint: Base, wants: Callable[[bytes], bool] = _always) -> int:
        """Put references in the place of pages that are blocks of this checkpoint. All of its packs must be
        where blocks are read. `wants` chooses by page key. Return how many pages left."""
        away = self._state.away
        before = away.left
        blocks = checkpoint.blocks()
        wanted = (each for each in blocks if each.listed.key >= FIRST_KEY and wants(each.listed.key))
        while run := list(islice(wanted, RUN_PAGES)):
            with self._alone():
                self._leave(run, checkpoint.seq)
        return away.left - before

    def _leave(self, run: Sequence[KnownBlocks], checkpoint_seq: int) -> None:
        """Alone: a group under way would put back what it has read before."""
        state = self._state
        with state.lock:
            seq = state.applied
            floor = min(state.floor_for(seq), state.transactions.floor_at(seq))
            run = [known for known in run if _is_at_rest(state, known.listed.key)]
        if not run:
            return
        self._make_durable(seq)
        puts: list[tuple[bytes, bytes]] = []
        stored = state.store.get_many([known.listed.key for known in run])
        for (listed, location), data in zip(run, stored, strict=True):
            if data is None or is_reference(data):
                continue
            try:
                page = swept(decode_page(data, listed.key), floor)
            except LowwaterError:
                continue  # `check` tells of it
            if is_block(page, listed, location):
                reference = reference_to(listed, location, page_seq=page.seq, checkpoint_seq=checkpoint_seq)
                puts.append((listed.key, encode_reference(reference, listed.key)))
        if puts:
            BEFORE_LEAVE()
            state.store.write(puts, [], {})
            AFTER_LEAVE()
        state.away.left += len(puts)

    def away(self) -> Iterator[bytes]:
        """The page keys of the pages that are away, in order."""
        store = self._state.store
        for key, size in store.page_sizes():
            if size == REFERENCE_BYTES and (data := store.get(key)) is not None and is_reference(data):
                yield key

    def oldest_segment(self) -> int | None:
        """The first seq of the oldest segment in which a large value of a page lies that is here; None for
        none. What is only in memory is not looked at."""
        store = self._state.store
        oldest: int | None = None
        for key in store.page_keys():
            data = store.get(key)
            if data is None or is_reference(data):
                continue
            page = decode_page(data, key)
            for flags, value in zip(page.flags, page.values, strict=True):
                if flags & REFERENCE:
                    first = int(VALUE_PLACE.unpack(value)[0])
                    oldest = first if oldest is None else min(oldest, first)
        return oldest

    def bring(self, keys: Iterable[bytes]) -> int:
        """Bring back the pages of these page keys that are away. Return how many were. Raise what is in the
        way of one; those before it are here, or will be."""
        state = self._state
        count = 0
        for key in keys:
            data = state.store.get(key)
            if data is None or not is_reference(data):
                continue
            page = state.away.read(key, data)
            while not state.away.give_back(key, data, page):
                self._put_back_alone()
            count += 1
        self._put_back_alone()
        return count

    def _put_back_alone(self) -> None:
        with self._alone():
            self._put_back()


def _is_at_rest(state: State, key: bytes) -> bool:
    """With the lock: whether a page begins at this key, of which nothing is in memory alone."""
    place = state.map.find(key)
    layout = place.layout
    index = layout.index(key)
    if index < 0 or layout.keys[index] != key or key in state.transactions.unstamped:
        return False
    end = layout.keys[index + 1] if index + 1 < len(layout.keys) else state.map.high_of(place.low)
    return not place.changed_keys(key, end)
