"""tiering/block_cache.py: what comes out is what went in, or nothing; and never an error."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from lowwater.chaos.clock import VirtualClock
from lowwater.chaos.disk import Fault, FaultyFiles, Operation
from lowwater.chaos.survival import SURVIVALS
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.tiering.block_cache import UNIT_BYTES, BlockCache, UnitKey

OBJECT = bytes(range(16))
SLOT = UNIT_BYTES + 36


def key(number: int) -> UnitKey:
    return UnitKey(OBJECT, number)


def data(number: int, size: int = UNIT_BYTES) -> bytes:
    return random.Random(number).randbytes(size)


def held_bytes(files: MemoryFiles) -> int:
    return sum(len(inode.data) for inode in files._inodes.values())


def test_units_come_back_also_in_the_next_life() -> None:
    """Whole ones, and the shorter one at an object's end."""
    files = MemoryFiles()
    cache = BlockCache(files, "cache", 10 * SLOT)
    cache.put(key(0), data(0))
    cache.put(key(1), data(1, 100))
    cache.put(UnitKey(bytes(16), 0), b"")
    for each in (cache, BlockCache(files, "cache", 10 * SLOT)):
        assert each.get(key(0)) == data(0)
        assert each.get(key(1)) == data(1, 100)
        assert each.get(UnitKey(bytes(16), 0)) == b""
        assert each.get(key(2)) is None
        assert each.bytes == held_bytes(files)
        assert each.damaged == 0


def test_the_cache_never_takes_more_than_it_may() -> None:
    """Whatever is put, read, forgotten and left by a former life."""
    files = MemoryFiles()
    rng = random.Random(1)
    limit = 5 * SLOT
    for life in range(6):
        limit = (5 if life < 4 else 2) * SLOT
        cache = BlockCache(files, "cache", limit)
        for _ in range(200):
            number = rng.randrange(12)
            action = rng.choice(["put", "put", "get", "forget"])
            if action == "put":
                cache.put(key(number), data(number))
            elif action == "get":
                assert cache.get(key(number), promote=rng.random() < 0.5) in (None, data(number))
            elif rng.random() < 0.05:
                cache.forget(OBJECT)
            assert cache.bytes <= limit
            assert held_bytes(files) <= limit
        assert cache.evicted


def test_every_flipped_byte_is_found_and_the_unit_forgotten() -> None:
    """Damage on the disk is a miss."""
    files = MemoryFiles()
    cache = BlockCache(files, "cache", 10 * SLOT)
    size = 300
    for at in range(36 + size):
        cache.put(key(0), data(0, size))
        inode = files._inodes[f"cache/{key(0).name}"]
        inode.data[at] ^= 1 << at % 8
        assert cache.get(key(0)) is None
        assert f"cache/{key(0).name}" not in files._inodes
    assert cache.damaged == 36 + size
    assert cache.bytes == 0


def test_a_unit_under_the_name_of_another_is_not_taken_for_it() -> None:
    """Its checksum is right: a rename by hand, or a directory put together from two."""
    files = MemoryFiles()
    cache = BlockCache(files, "cache", 10 * SLOT)
    cache.put(key(0), data(0))
    files.rename(f"cache/{key(0).name}", f"cache/{key(1).name}")
    assert BlockCache(files, "cache", 10 * SLOT).get(key(1)) is None


@pytest.mark.parametrize("survival", SURVIVALS, ids=lambda s: getattr(s, "__name__", str(s)))
@pytest.mark.parametrize("seed", range(4))
def test_after_a_crash_a_unit_is_whole_or_gone(survival: object, seed: int) -> None:
    """Nothing is ever synced."""
    files = FaultyFiles(clock=VirtualClock())
    cache = BlockCache(files, "cache", 4 * SLOT)
    for number in range(8):
        cache.put(key(number), data(number))
    files.crash(random.Random(seed), survival)  # type: ignore[arg-type]
    cache = BlockCache(files, "cache", 4 * SLOT)
    for number in range(8):
        assert cache.get(key(number)) in (None, data(number))
    cache.put(key(9), data(9))
    assert cache.get(key(9)) == data(9)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("kind", ["create", "write", "open", "read", "list", "make_directory", "remove"])
def test_no_error_of_the_disk_reaches_anybody(kind: str, number: int) -> None:
    """The cache goes without; and is used again when the disk is well."""
    sick = True

    def fault(operation: Operation) -> Fault | None:
        return Fault(error=number) if sick and operation.kind == kind else None

    files = FaultyFiles(fault=fault, clock=VirtualClock())
    cache = BlockCache(files, "cache", 2 * SLOT)
    for each in range(6):
        cache.put(key(each), data(each))
        assert cache.get(key(each)) in (None, data(each))
    sick = False
    for each in range(10, 16):
        cache.put(key(each), data(each))
        assert cache.get(key(each)) in (None, data(each))
    if kind not in ("list", "make_directory"):
        assert cache.get(key(15)) == data(15)


def test_a_full_disk_keeps_what_is_there() -> None:
    """And half a unit does not stay behind."""
    files = FaultyFiles(clock=VirtualClock(), free_bytes=3 * SLOT + 100)
    cache = BlockCache(files, "cache", 100 * SLOT)
    for number in range(6):
        cache.put(key(number), data(number))
    assert [cache.get(key(number)) == data(number) for number in range(6)] == [True] * 3 + [False] * 3
    assert cache.unwritten == 3
    assert len(files.list("cache")) == 3
    assert cache.bytes == 3 * SLOT


def test_a_scan_does_not_push_out_what_is_read_again() -> None:
    """A hundred times the cache's size goes by; what was read twice stays."""
    cache = BlockCache(MemoryFiles(), "cache", 10 * SLOT)
    hot = range(4)
    for number in hot:
        cache.put(key(number), data(number))
        assert cache.get(key(number)) is not None
    for number in range(100, 1100):
        cache.put(key(number), b"")
        cache.put(key(number + 10_000), data(1))
        cache.get(key(number), promote=False)
    assert all(cache.get(key(number)) == data(number) for number in hot)


def test_no_room_is_no_cache() -> None:
    """0 turns it off."""
    files = MemoryFiles()
    cache = BlockCache(files, "cache", 0)
    cache.put(key(0), data(0))
    assert cache.get(key(0)) is None
    assert not held_bytes(files)


def test_threads_that_put_read_and_evict_see_whole_units_only() -> None:
    """Many readers share one cache."""
    from concurrent.futures import ThreadPoolExecutor

    cache = BlockCache(MemoryFiles(), "cache", 3 * SLOT)

    def work(seed: int) -> Callable[[], None] | None:
        rng = random.Random(seed)
        for _ in range(300):
            number = rng.randrange(8)
            cache.put(key(number), data(number))
            assert cache.get(key(number)) in (None, data(number))
        return None

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert 0 <= cache.bytes <= 3 * SLOT


def test_units_leave_room_to_those_who_need_it() -> None:
    """What is fetched again costs a request; what cannot be written is refused."""
    files = FaultyFiles()
    free_bytes = files.free_bytes = 8 * SLOT
    cache = BlockCache(files, "cache", 100 * SLOT, kept_free_bytes=4 * SLOT)
    for number in range(10):
        cache.put(key(number), data(number))
        assert files.room("cache") >= 4 * SLOT
    assert cache.get(key(9)) == data(9)
    assert cache.get(key(0)) is None
    # Others have taken what there was: as many units go as that takes, and none comes.
    files.free_bytes = 2 * SLOT
    cache.put(key(10), data(10))
    assert files.room("cache") >= 4 * SLOT
    files.free_bytes = SLOT
    cache.put(key(11), data(11))
    assert cache.get(key(11)) is None
    assert cache.bytes == 0
    files.free_bytes = free_bytes
    cache.put(key(12), data(12))
    assert cache.get(key(12)) == data(12)
    cache.give_way()
    assert cache.get(key(12)) is None
    assert cache.bytes == 0
    assert files.list("cache") == []


def test_a_former_lifes_units_make_room_when_the_cache_is_opened() -> None:
    """Else the log could not be opened."""
    files = FaultyFiles()
    cache = BlockCache(files, "cache", 100 * SLOT)
    for number in range(10):
        cache.put(key(number), data(number))
    files.free_bytes = SLOT
    BlockCache(files, "cache", 100 * SLOT, kept_free_bytes=4 * SLOT)
    assert files.room("cache") >= 4 * SLOT
    assert len(files.list("cache")) in (6, 7)
