"""Warming: what a restore has left in the archive comes here, in the background.

Always true: it reads pages as anybody else does, so it is in nobody's way, and may stop anywhere; what does
not come is asked for again, and later each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from prometheus_client import CollectorRegistry, Gauge

from lowwater.engine.checkpoint.leaving import Leaving
from lowwater.errors import Closed, LowwaterError
from lowwater.logging import get_logger

_logger = get_logger("restore")

# How many pages come before others may run.
RUN_PAGES = 128
AGAIN_S = 1.0
AGAIN_S_MAX = 60.0


# The metric, and what it says.
PAGES_AWAY = (
    "lowwater_restore_pages_away",
    "Pages that a restore has still to bring here, while it is open.",
)


class Warming:
    """Brings the pages that are away. `total` counts those that were away when it began, `done` those that it
    has brought."""

    def __init__(
        self, leaving: Leaving, registry: CollectorRegistry, *, ended: Callable[[], None] = lambda: None
    ) -> None:
        self._leaving = leaving
        self._ended = ended
        self._away: Iterator[bytes] | None = None
        self._run: list[bytes] = []
        self._again_s = AGAIN_S
        self.total = self.done = 0
        self.is_over = False
        self._registry = registry
        self._gauge = Gauge(*PAGES_AWAY, registry=registry)
        self._gauge.set_function(lambda: self.total - self.done)

    def close(self) -> None:
        """Show nothing any more: a registry serves one database after the other."""
        self._registry.unregister(self._gauge)

    def step(self) -> float | None:
        """A `Step`: a few pages. What is in the way is said in the log, and tried again."""
        try:
            more = self.advance()
        except Closed:
            return None
        except LowwaterError as error:
            _logger.warning("pages of the archive do not come", error=str(error))
            wait_s, self._again_s = self._again_s, min(2 * self._again_s, AGAIN_S_MAX)
            return wait_s
        self._again_s = AGAIN_S
        return 0 if more else None

    def advance(self) -> bool:
        """Bring a few pages, and raise what is in the way. Return False where nothing is left."""
        if self.is_over:
            return False
        if self._away is None:
            self.total = self.done + sum(1 for _ in self._leaving.away())
            self._away = self._leaving.away()
        if not self._run:
            self._run = [*islice(self._away, RUN_PAGES)]
        if not self._run:
            self.is_over = True
            self._ended()
            return False
        self._leaving.bring(self._run)
        self.done += len(self._run)
        self._run = []
        return True
