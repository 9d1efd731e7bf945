"""What is counted for things in memory is what they take: the limit of the pool rests on it."""

from __future__ import annotations

import ctypes
import gc
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest

from lowwater.engine.format import format
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.format import Kind
from lowwater.engine.format.keys import encode_key
from lowwater.engine.format.page import DataPage, decode_page, encode_page
from lowwater.engine.format.records import make_record
from lowwater.engine.pages.memory_pages import MemoryPages
from lowwater.engine.seams.trim import Trimmer, _malloc_trim
from lowwater.engine.state.cleanpages import page_bytes
from lowwater.engine.state.state import State


@contextmanager
def allocated() -> Iterator[Callable[[], int]]:
    """Yields what tells how many bytes were allocated in the block and are still in use."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]

    def so_far() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    try:
        yield so_far
    finally:
        tracemalloc.stop()


def is_honest(counted: float, taken: float) -> bool:
    """Not less than what it takes, and not so much that a good part of the pool would lie idle."""
    return taken <= counted <= 1.6 * taken


def new_state() -> State:
    return State(
        MemoryPages(),
        Boundaries(bytes(16), 64),
        inline_bytes_max=256,
        place_reader=lambda place: b"",
        pool_bytes_max=2**26,
        now_s=lambda: 0.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [30_000, 45_000])
@pytest.mark.parametrize("value_bytes", [10, 200, 1000])
def test_changes_count_for_what_they_take(count: int, value_bytes: int) -> None:
    """Whatever size the dictionary has that they are in."""
    state = new_state()
    rng = Random(1)
    value = bytes(value_bytes)
    with allocated() as so_far:
        for seq in range(1, count + 1):
            name = b"%012d" % rng.randrange(10**12)
            payload = format.FIXED.pack(Kind.PUT, 0, 1, len(name), 0, 0, 0) + b"b" + name + value
            state.apply_puts([encode_key(b"b", name)], [make_record(seq, payload)], seq)
        assert is_honest(state.dirty_bytes, so_far())


@pytest.mark.parametrize("rows", [16, 64, 200])
@pytest.mark.parametrize("value_bytes", [10, 100, 250])
def test_pages_count_for_what_they_take(rows: int, value_bytes: int) -> None:
    """Also after a point read has looked for a key, and a scan at all rows."""
    keys = sorted(encode_key(b"b", b"%012d" % number) for number in Random(1).sample(range(10**12), rows))
    numbers = array("Q", range(1, rows + 1))
    values = [bytes([number % 256]) * value_bytes for number in range(rows)]
    page = DataPage(rows, keys, numbers, numbers, bytearray(rows), [b""] * rows, values)
    data = encode_page(page, keys[0])
    with allocated() as so_far:
        # So many that what other threads and the interpreter allocate meanwhile, some KiB, is a trifle.
        pages = [decode_page(bytes(bytearray(data)), keys[0]) for _ in range(100_000 // rows)]
        counted = sum(map(page_bytes, pages))
        assert is_honest(counted, so_far())
        for each in pages:
            each.row(each.find(keys[rows // 2]))
            assert len(each.values) == len(each.keys) == rows
        assert is_honest(counted, so_far())


def test_ready_objects_count_for_what_they_take() -> None:
    """With their share of what remembers which keys were asked for."""
    state = new_state()
    value = bytes(100)
    for seq in range(1, 10_001):
        name = b"%012d" % seq
        payload = format.FIXED.pack(Kind.PUT, 0, 1, len(name), 0, 0, 0) + b"b" + name + value
        state.apply_puts([encode_key(b"b", name)], [make_record(seq, payload)], seq)
    with allocated() as so_far:
        for _ in range(2):
            for seq in range(1, 10_001):
                state.newest(encode_key(b"b", b"%012d" % seq), "b", f"{seq:012}", 10_000)
        assert len(state._ready_new) == 10_000
        assert is_honest(state.ready_bytes, so_far())


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not this C library")
def test_memory_is_given_back_when_enough_was_freed() -> None:
    """Each call costs milliseconds: so not after every flush."""
    trimmer = Trimmer(100, 40)
    for _ in range(3):
        trimmer.freed(30)
    assert trimmer.trims == 0
    trimmer.freed(30)
    assert trimmer.trims == 1
    trimmer.freed(39)
    trimmer.rest()
    assert trimmer.trims == 1
    trimmer.freed(1)
    trimmer.rest()
    trimmer.rest()
    assert trimmer.trims == 2
    trimmer.freed(99)
    assert trimmer.trims == 2


@pytest.mark.parametrize("library", [object(), None], ids=["another one", "none"])
def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch, library: object) -> None:
    """Alpine Linux has one that gives memory back by itself."""

    def load(_name: None) -> object:
        if library is None:
            raise OSError
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    _malloc_trim.cache_clear()
    try:
        trimmer = Trimmer(1, 1)
        trimmer.freed(2)
        assert trimmer.trims == 0
    finally:
        _malloc_trim.cache_clear()
