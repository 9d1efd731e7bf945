"""tiering/whole_reads.py: no range is ever asked for, and what is kept has a bound."""

from __future__ import annotations

from typing import Any

import pytest

from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.testing.store import Place, StoreConformance, put
from lowwater.tiering.whole_reads import WholeReads


class NoRanges(MemoryStore):
    """A server that has never heard of ranges, and counts."""

    reads = 0

    def read(self, name: str, *given: Any) -> bytes:
        assert not given, "a range was asked for"
        self.reads += 1
        return super().read(name)


class TestWholeReads(StoreConformance):
    @pytest.fixture
    def place(self) -> Place:
        objects = MemoryObjects()
        return lambda: WholeReads(NoRanges(objects=objects))


def test_what_was_read_last_is_kept_and_no_more() -> None:
    """Two readers of two segments must not fetch them for each range in turn; ten may."""
    server = NoRanges()
    store = WholeReads(server, bytes_max=25_000)
    for number in range(3):
        put(store, f"{number}", bytes([number]) * 10_000)
    for start in range(0, 10_000, 1000):
        for number in range(2):
            assert store.read(f"{number}", start, start + 1000) == bytes([number]) * 1000
    assert server.reads == 2
    for start in range(0, 10_000, 1000):
        for number in range(3):
            store.read(f"{number}", start, start + 500)
    assert server.reads >= 2 + 30 - 2
    put(store, "large", bytes(100_000))
    before = server.reads
    for start in range(0, 100_000, 1000):
        assert store.read("large", start, start + 1000) == bytes(1000)
    assert server.reads == before + 1
