"""Having a range's changes merged by another process: what of it is sent, and when it is worth the way.

Always true:
  - what comes back is what `Flusher` would have made itself, or nothing does. It is decided for a range as a
    whole, and by what lies in it: old versions, rows of transactions and limits are merged here;
  - ranges are answered in the order in which they were asked for, and no more than `SLOTS` wait for that.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from itertools import islice
from typing import Protocol

from lowwater.engine.merge_messages import SLOTS, Garbage, NoAnswer, Part, Request, read_answer
from lowwater.engine.pages import Page, stored_bytes
from lowwater.engine.ranges import Layout, Range
from lowwater.engine.references import is_reference
from lowwater.engine.state import State
from lowwater.errors import LowwaterError

# A range with fewer changes is not worth it, nor one with fewer for each of its pages: all of them go.
CHANGES_MIN = 512
CHANGES_A_PAGE_MIN = 2
# What goes to the worker at once: a share of the pool, but not more, nor less. It has it three times over.
BYTES_SHARE = 8
BYTES_MAX = 32 * 2**20
BYTES_MIN = 2 * 2**20
# How many records and pages are handed over before others may run, which costs a wait for the interpreter.
RECORDS_AT_ONCE = 512
PAGES_AT_ONCE = 16


class Merger(Protocol):
    """Who merges, by the bytes of `merge_messages.py`. All of it raises NoAnswer where nobody does."""

    @property
    def is_usable(self) -> bool: ...

    def put(self, slot: int, offset: int, parts: list[bytes]) -> int:
        """Write a part of a request's body; where it ends."""
        ...

    def ask(self, request: Request) -> None:
        """Have what was put answered, after what was asked for before."""
        ...

    def answer(self) -> tuple[bytes, bytes]:
        """The answer to the first request that has none yet: header and body."""
        ...

    def succeeded(self) -> None:
        """The answer was good."""
        ...

    def failed(self, error: Exception) -> NoAnswer:
        """The answer was none."""
        ...

    def rest(self) -> None:
        """Nothing is asked for now, and no answer is wanted."""
        ...

    def close(self) -> None: ...


class Aside:
    """What a flusher has merged by others."""

    def __init__(self, merger: Merger, state: State) -> None:
        self.merger = merger
        self._state = state
        self._bytes_max = min(BYTES_MAX, max(BYTES_MIN, state.pool_bytes_max // BYTES_SHARE))
        # What was asked for, and not answered; and whether there is anything in the shared memory.
        self._asked: deque[Range] = deque()
        self._slot = 0
        self._is_resting = True
        self.pages = self.failures = 0

    def takes(self, each: Range) -> bool:
        """Whether the frozen changes of this range are to go there."""
        frozen = each.frozen
        assert frozen is not None
        return (
            self.merger.is_usable
            and not each.frozen_older
            and not each.frozen_txns
            and len(frozen) >= CHANGES_MIN
            and len(frozen) >= CHANGES_A_PAGE_MIN * len(each.layout.keys)
        )

    @property
    def has_room(self) -> bool:
        """Whether more can be asked for before something is answered."""
        return len(self._asked) < SLOTS

    def ask(
        self, each: Range, frozen_seq: int, floor: int, unstored: Mapping[bytes, Page]
    ) -> Generator[None, None, int]:
        """Ask for what becomes of the pages of a range. How large its records are; 0 if nobody was asked."""
        assert self.has_room
        self._is_resting = False
        try:
            request = yield from self._put(each, frozen_seq, floor, unstored)
            if request is not None:
                self.merger.ask(request)
                self._asked.append(each)
                self._slot = (self._slot + 1) % SLOTS
                return request.records_bytes
        except NoAnswer:
            self.failures += 1
        return 0

    def answer(self, each: Range) -> Generator[None, None, list[Part] | None]:
        """What becomes of the pages of a range; None where nobody was asked, or could say it."""
        if not self._asked or self._asked[0] is not each:
            return None
        self._asked.popleft()
        if not self.merger.is_usable:
            return None
        parts: list[Part] = []
        try:
            answer = self.merger.answer()
            try:
                for part in read_answer(*answer, each.layout.keys, each.low):
                    if part is None:
                        yield
                    else:
                        parts.append(part)
            except (Garbage, LowwaterError) as error:
                raise self.merger.failed(error) from error
        except NoAnswer:
            self.failures += 1
            return None
        self.merger.succeeded()
        self.pages += sum(len(made) for _, made in parts)
        return parts

    def rest(self) -> None:
        """There is nothing to flush, or what was asked for is not wanted any more."""
        if not self._is_resting:
            self._is_resting = True
            self._asked.clear()
            self.merger.rest()

    def _put(
        self, each: Range, frozen_seq: int, floor: int, unstored: Mapping[bytes, Page]
    ) -> Generator[None, None, Request | None]:
        """Hand over what a range has. None where that is too much."""
        state, merger, slot = self._state, self.merger, self._slot
        layout = each.layout
        assert each.frozen is not None
        offset = 0
        sizes = array("I")
        records = iter(each.frozen.values())
        while part := list(islice(records, RECORDS_AT_ONCE)):
            sizes.extend(map(len, part))
            offset = merger.put(slot, offset, part)
            if offset > self._bytes_max:
                return None
            yield
        records_bytes = offset
        page_sizes = array("I")
        for start in range(0, len(layout.keys), PAGES_AT_ONCE):
            indexes = range(start, min(start + PAGES_AT_ONCE, len(layout.keys)))
            stored = stored_pages(state, layout, indexes, unstored)
            if any(map(is_reference, stored)):
                return None  # pages that are away are seen to where they can be waited for
            page_sizes.extend(map(len, stored))
            offset = merger.put(slot, offset, stored)
            if offset > self._bytes_max:
                return None
            yield
        names = [each.low, *layout.keys, state.boundaries.salt]
        key_sizes = array("I", map(len, layout.keys))
        merger.put(
            slot, offset, [sizes.tobytes(), page_sizes.tobytes(), key_sizes.tobytes(), b"".join(names)]
        )
        return Request(
            slot=slot,
            frozen_seq=frozen_seq,
            rec_seq=each.frozen_rec_seq,
            floor=floor,
            records_bytes=records_bytes,
            record_count=len(sizes),
            page_count=len(page_sizes),
            pages_bytes=offset - records_bytes,
            names_bytes=sum(map(len, names)),
            low_bytes=len(each.low),
            inline_bytes_max=state.inline_bytes_max,
            page_keys=state.boundaries.page_keys,
        )


def stored_pages(
    state: State, layout: Layout, indexes: Sequence[int], unstored: Mapping[bytes, Page]
) -> list[bytes]:
    """The bytes of some pages, from memory or from the store."""
    keys = [layout.keys[index] for index in indexes]
    pages = [layout.pages[index] or unstored.get(key) for index, key in zip(indexes, keys, strict=True)]
    wanted = [key for key, page in zip(keys, pages, strict=True) if page is None]
    state.pages_read += len(wanted)
    fetched = iter(state.store.get_many(wanted) if wanted else ())
    # One that is missing is seen to be no page by who merges, here in the end.
    return [
        (next(fetched) or b"") if page is None else stored_bytes(page, key)
        for key, page in zip(keys, pages, strict=True)
    ]
