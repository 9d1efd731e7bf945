"""Named places at which a test can make the program fail.

Every point registers itself when its module is imported, so a test that walks `registry` covers a
new point on the day that it is added. A point that nobody armed costs one call and one comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

registry: dict[str, Failpoint] = {}


class Failpoint:
    """Call it where a crash would be interesting: `BEFORE_SYNC = Failpoint("wal.before_sync")`."""

    __slots__ = ("action", "name")

    def __init__(self, name: str) -> None:
        assert name not in registry, f"two failure points are called {name}"
        self.name = name
        self.action: Callable[[], None] | None = None
        registry[name] = self

    def __call__(self) -> None:
        if self.action is not None:
            self.action()

    @contextmanager
    def armed(self, action: Callable[[], None]) -> Iterator[None]:
        """While the block runs, reaching this point calls `action`, which may raise."""
        self.action = action
        try:
            yield
        finally:
            self.action = None
