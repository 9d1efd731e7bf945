"""What the engine's benchmark does to every store alike: the same records, in the same order and loops.

Always true: records are made before anything is timed, in the form that the store takes them; and what is
read back is checked before it is timed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, Literal, Protocol

from bench import loops, payloads
from bench.loops import Job, Result

BATCH = payloads.BATCH_ENTRIES
LOAD_BATCH = 10_000
VALUES_DISTINCT = 10_000

PUT1K_KEYS_MAX = 200_000
PUT1K_BYTES = 1000
OVERWRITES = 2
HOT_KEYS = 10_000
# `uniform` reads what surely fits: so much of the memory limit for each record of 132 bytes.
FITTING_BYTES = 256
# `large` reads a sample of what it holds, which alone touches more than the memory limit's worth of pages.
LARGE_TIMES = 10
LARGE_SAMPLE = 200_000

Purpose = Literal["load", "write", "read"]


class Store(Protocol):
    """One that takes part. Keys and records are in its own form, which `key` and `record` make.

    `load` need not be durable before `close`, and `close` leaves the store tidied up for reading. `gets`
    reads key after key; `scan` gives what has a prefix, in order, as rows of key, value, metadata, seq and
    time."""

    def __init__(self, job: Job, purpose: Purpose) -> None: ...
    def key(self, text: str) -> Any: ...
    def record(self, key: Any, value: bytes, seq: int) -> Any: ...
    def load(self, records: list[Any]) -> object: ...
    def put(self, records: list[Any]) -> object: ...
    def get(self, key: Any) -> bytes: ...
    def gets(self, keys: list[Any]) -> None: ...
    def scan(self, prefix: str) -> list[Any]: ...
    def close(self) -> None: ...


def records(
    store: Store, keys: Iterable[Any], value_bytes: int = payloads.VALUE_BYTES, first: int = 1
) -> Iterator[Any]:
    """A record for each key, the first one with the seq `first`. Values repeat, but far apart."""
    values = payloads.values(value_bytes, VALUES_DISTINCT)
    for seq, key in enumerate(keys, first):
        yield store.record(key, values[seq % VALUES_DISTINCT], seq)


def parts(flat: Iterable[Any], size: int = BATCH) -> Iterator[list[Any]]:
    remaining = iter(flat)
    while part := list(islice(remaining, size)):
        yield part


def _load(kind: type[Store], job: Job, keys: Iterable[str], value_bytes: int = payloads.VALUE_BYTES) -> None:
    store = kind(job, "load")
    for part in parts(records(store, map(store.key, keys), value_bytes), LOAD_BATCH):
        store.load(part)
    store.close()


# ---------------------------------------------------------------------------- writing


def _put(job: Job, store: Store, flat: Iterable[Any]) -> Result:
    batches = list(parts(flat))
    # What opening and loading left to write back is not to be paid for by the first batches.
    os.sync()
    return loops.batches(job, lambda number: store.put(batches[number]), len(batches), BATCH)


def put(kind: type[Store], job: Job) -> Result:
    store = kind(job, "write")
    return _put(job, store, records(store, map(store.key, payloads.keys(job.keys))))


def overwrite(kind: type[Store], job: Job) -> Result:
    _load(kind, job, payloads.keys(job.keys))
    store = kind(job, "write")
    source = random.Random(payloads.SEED)
    keys = list(map(store.key, payloads.keys(job.keys)))
    orders = (source.sample(keys, len(keys)) for _ in range(OVERWRITES))
    return _put(job, store, records(store, chain.from_iterable(orders), first=job.keys + 1))


def put1k(kind: type[Store], job: Job) -> Result:
    count = min(job.keys, PUT1K_KEYS_MAX)
    _load(kind, job, payloads.keys(count), PUT1K_BYTES)
    store = kind(job, "write")
    keys = list(map(store.key, payloads.keys(count)))
    picked = random.Random(payloads.SEED).choices(keys, k=OVERWRITES * count)
    return _put(job, store, records(store, picked, PUT1K_BYTES, first=count + 1))


# ---------------------------------------------------------------------------- reading


def _fitting(job: Job) -> int:
    return min(job.keys, job.memory_bytes // FITTING_BYTES)


def _large(job: Job) -> int:
    return LARGE_TIMES * job.memory_bytes // (payloads.KEY_BYTES + payloads.VALUE_BYTES)


def prepare_hot(kind: type[Store], job: Job) -> None:
    _load(kind, job, payloads.keys(job.keys))


def prepare_uniform(kind: type[Store], job: Job) -> None:
    _load(kind, job, payloads.keys(_fitting(job)))


def prepare_large(kind: type[Store], job: Job) -> None:
    _load(kind, job, payloads.keys(_large(job)))


def hot(kind: type[Store], job: Job) -> Result:
    return _gets(kind, job, job.keys, job.keys // HOT_KEYS, warm=True)


def uniform(kind: type[Store], job: Job) -> Result:
    return _gets(kind, job, _fitting(job), 1, warm=True)


def large(kind: type[Store], job: Job) -> Result:
    return _gets(kind, job, _large(job), _large(job) // LARGE_SAMPLE, warm=False)


def _gets(kind: type[Store], job: Job, count: int, step: int, *, warm: bool) -> Result:
    """Of `count` keys, get each `step`th, in random order again and again."""
    store = kind(job, "read")
    keys = [store.key(text) for text in islice(payloads.keys(count), 0, None, max(1, step))]
    random.Random(payloads.SEED).shuffle(keys)
    for key in keys[:100]:
        assert len(store.get(key)) == payloads.VALUE_BYTES
    chunks = list(parts(keys, HOT_KEYS))
    # Twice: a cache that resists scans keeps only what is asked for again.
    for chunk in chunks * 2 if warm else ():
        store.gets(chunk)
    turns = cycle(chunks)

    def one_pass() -> int:
        chunk = next(turns)
        store.gets(chunk)
        return len(chunk)

    # Apart: to look at the clock for each would slow the others down.
    return loops.passes(job, one_pass) | loops.each(store.get, cycle(keys), job.seconds / 4)


def _prefixes(job: Job, rows: int) -> list[str]:
    return [f"{group:07d}/" for group in range(max(1, job.keys // rows))]


def prepare_scan(kind: type[Store], job: Job, *, rows: int) -> None:
    """Each prefix has `rows` keys of the usual length, which arrive in random order."""
    prefixes = _prefixes(job, rows)
    turns = cycle(prefixes)
    _load(kind, job, (next(turns) + text[8:] for text in payloads.keys(rows * len(prefixes))))


def scan(kind: type[Store], job: Job, *, rows: int) -> Result:
    store = kind(job, "read")
    prefixes = _prefixes(job, rows)
    random.Random(payloads.SEED).shuffle(prefixes)
    for prefix in prefixes * 2:
        assert len(store.scan(prefix)) == rows
    turns = cycle(prefixes)
    return loops.passes(job, lambda: len(store.scan(next(turns))))


# ---------------------------------------------------------------------------- by workload

Run = Callable[[type[Store], Job], Result]
Prepare = Callable[[type[Store], Job], None]

WRITING: dict[str, Run] = {"put": put, "overwrite": overwrite, "put1k": put1k}
READING: dict[str, tuple[Prepare, Run]] = {
    "hot": (prepare_hot, hot),
    "uniform": (prepare_uniform, uniform),
    "large": (prepare_large, large),
}
SCANNING: dict[str, tuple[Prepare, Run]] = {
    f"scan{rows}": (partial(prepare_scan, rows=rows), partial(scan, rows=rows)) for rows in (1000, 100)
}
