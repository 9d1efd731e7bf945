"""Decoded pages in memory, under a byte limit.

Always true: a page here is as the page store has it, or newer and about to be there; taking one out loses
nothing. Pages that were read since the last round stay for another one, and a scan only adds to the room that
there is: what is read once does not push out what is read again and again.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable

from lowwater.engine.format.page import DataPage
from lowwater.engine.state.ranges import Layout

# What a page costs besides its bytes, and each of its rows, by its place among the keys and its tag.
PAGE_OVERHEAD_BYTES = 600
ROW_OVERHEAD_BYTES = 5
STALE_MAX = 1000


def page_bytes(page: DataPage) -> int:
    return page.size_bytes + len(page) * ROW_OVERHEAD_BYTES + PAGE_OVERHEAD_BYTES


class CleanPages:
    def __init__(self) -> None:
        self._queue: deque[tuple[Layout, int]] = deque()
        self._stale = 0  # at most so many of these are of layouts that are no longer in force
        self._lock = threading.RLock()  # a signal handler may call too
        self.owns_lock: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        self.bytes = 0
        self.bytes_max = 0
        self.evictions = 0

    def add(self, layout: Layout, index: int, page: DataPage) -> None:
        """Keep a page that was read from the store."""
        with self._lock:
            if layout.pages[index] is None:
                self._add(layout, index, page)
                if self.bytes > self.bytes_max:
                    self._thin()

    def add_to_room(self, layout: Layout, index: int, page: DataPage) -> None:
        """Keep a page that was read from the store, if nothing has to go for it."""
        with self._lock:
            if layout.pages[index] is None and self.bytes + page_bytes(page) <= self.bytes_max:
                self._add(layout, index, page)

    def _add(self, layout: Layout, index: int, page: DataPage) -> None:
        layout.pages[index] = page
        layout.sizes[index] = size = page_bytes(page)
        self._queue.append((layout, index))
        self.bytes += size

    def adopt(self, layout: Layout) -> None:
        """A layout whose pages are in the store now: so many stay in memory as fit."""
        with self._lock:
            for index, page in enumerate(layout.pages):
                if page is None or layout.sizes[index]:
                    continue  # not here, or read, and counted, since the layout came into force
                if self.bytes < self.bytes_max:
                    self._add(layout, index, page)
                else:
                    layout.pages[index] = None

    def forget(self, layout: Layout) -> None:
        """A layout that is no longer in force."""
        with self._lock:
            self.bytes -= sum(layout.sizes)
            self._stale += len(layout.sizes)
            layout.sizes = array("Q", bytes(8 * len(layout.keys)))
            layout.pages = [None] * len(layout.keys)
            if self._stale > STALE_MAX and 2 * self._stale > len(self._queue):
                # Who never runs out of room never thins out, and would keep all layouts that there ever were.
                self._queue = deque(each for each in self._queue if each[0].sizes[each[1]])
                self._stale = 0

    def _thin(self) -> None:
        """With the lock: take pages out, the ones longest here first, until they fit."""
        rounds = 2 * len(self._queue)
        while self.bytes > self.bytes_max and rounds and self._queue:
            rounds -= 1
            layout, index = self._queue.popleft()
            if not layout.sizes[index]:
                continue
            if layout.used[index]:
                layout.used[index] = 0
                self._queue.append((layout, index))
            else:
                layout.pages[index] = None
                self.evictions += 1
                self.bytes -= layout.sizes[index]
                layout.sizes[index] = 0

    def limit(self, bytes_max: int) -> None:
        """Change how much there may be."""
        with self._lock:
            self.bytes_max = bytes_max
            if self.bytes > bytes_max:
                self._thin()
