"""Timing loops: how a call is repeated, and what is counted.

Always true of every loop:
  - the warm-up is not counted, and neither is what the caller prepared before;
  - the garbage collector has run, and does not look again at what was prepared, for all contenders alike;
  - a rate is what was finished inside the measured time, divided by that time.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import TypeVar

from bench import machine

Result = dict[str, float | None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One measurement in one process. What a benchmark does not use is 0."""

    workload: str
    contender: str
    directory: Path
    seconds: float
    warmup_seconds: float
    # Of the log's benchmark.
    distinct_batches: int = 0
    read_entries: int = 0
    open_bytes: int = 0
    # Of the engine's.
    keys: int = 0
    memory_bytes: int = 0
    log_records: int = 0
    # Of shipping's.
    ship_bytes: int = 0


JOB_SETTINGS = {field.name for field in fields(Job)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Somebody who takes part in a workload.

    `configuration` is printed under the table. `prepare` fills the directory named `data` once a run;
    without it, every measurement starts with an empty directory."""

    name: str
    label: str
    run: Callable[[Job], Result]
    configuration: str
    prepare: Callable[[Job], None] | None = None
    data: str = ""


class Meter:
    """What a measurement took, from when the meter was made."""

    def __init__(self, job: Job) -> None:
        self._disk = machine.disk_of(job.directory)
        self._flushes = machine.flushes(self._disk)
        self._cpu = time.process_time()

    def result(self, count: int, seconds: float, latencies: array[float] | None = None) -> Result:
        cpu = time.process_time() - self._cpu
        flushes = machine.flushes(self._disk)
        result: Result = {"count": count, "seconds": seconds, "rate": count / seconds, "cpu": cpu / seconds}
        if flushes is not None and self._flushes is not None and count:
            result["flushes_each"] = (flushes - self._flushes) / count
        if latencies:
            ordered = sorted(latencies)
            result["p50_ms"] = ordered[len(ordered) // 2] * 1e3
            result["p99_ms"] = ordered[len(ordered) * 99 // 100] * 1e3
            result["max_ms"] = ordered[-1] * 1e3
        return result


def _settle() -> None:
    gc.collect()
    gc.freeze()


def calls(job: Job, call: Callable[[int], object]) -> Result:
    """One thread calls again and again, and waits for each."""
    _settle()
    now = time.perf_counter
    number = 0
    last = now()
    warm = last + job.warmup_seconds
    while last < warm:
        call(number)
        number += 1
        last = now()
    latencies = array("d")
    meter = Meter(job)
    start = last = now()
    end = start + job.seconds
    while last < end:
        call(number)
        number += 1
        before, last = last, now()
        latencies.append(last - before)
    return meter.result(len(latencies), last - start, latencies)


def batches(job: Job, call: Callable[[int], object], count: int, size: int) -> Result:
    """One thread calls `count` times, each for `size` units, and waits for each. There is no warm-up."""
    _settle()
    now = time.perf_counter
    latencies = array("d")
    meter = Meter(job)
    start = last = now()
    for number in range(count):
        call(number)
        before, last = last, now()
        latencies.append(last - before)
    return _of_units(meter.result(count, last - start, latencies), size)


def beside(
    job: Job, call: Callable[[int], object], count: int, size: int, background: Callable[[], object]
) -> Result:
    """`count` threads call, each for `size` units, while `background` runs. A call counts if it ends after
    `background` began, however long after its end: a writer that it held up is what is looked for."""
    _settle()
    now = time.perf_counter
    latencies = [array("d") for _ in range(count)]
    start = float("inf")
    done = False

    def work(number: int) -> None:
        mine = latencies[number]
        last = now()
        while not done:
            call(number)
            number += count
            before, last = last, now()
            if last > start:
                mine.append(last - before)

    with ThreadPoolExecutor(count) as pool:
        workers = [pool.submit(work, number) for number in range(count)]
        try:
            time.sleep(job.warmup_seconds)
            meter = Meter(job)
            start = now()
            background()
            seconds = now() - start
        finally:
            done = True
        for worker in workers:
            worker.result()
    merged = array("d", chain.from_iterable(latencies))
    return _of_units(meter.result(len(merged), seconds, merged), size)


def _of_units(result: Result, size: int) -> Result:
    """Its rate in units, of which each call had `size`; the latencies and flushes stay a call's."""
    assert result["rate"] is not None
    return {**result, "rate": result["rate"] * size}


def futures(job: Job, submit: Callable[[int], Future[int]], outstanding: int) -> Result:
    """One thread submits, with up to `outstanding` answers still to come."""
    _settle()
    now = time.perf_counter
    waiting: deque[Future[int]] = deque()
    number = finished = 0

    def until(end: float) -> None:
        nonlocal number, finished
        while now() < end:
            waiting.append(submit(number))
            number += 1
            if len(waiting) == outstanding:
                waiting.popleft().result()
                finished += 1
            while waiting and waiting[0].done():
                waiting.popleft().result()
                finished += 1

    until(now() + job.warmup_seconds)
    finished = 0
    meter = Meter(job)
    start = now()
    until(start + job.seconds)
    result = meter.result(finished, now() - start)
    for future in waiting:
        future.result()
    return result


def threads(job: Job, call: Callable[[int], object], count: int) -> Result:
    """`count` threads call, and each waits for its own."""
    _settle()
    now = time.perf_counter
    start = end = 0.0
    latencies = [array("d") for _ in range(count)]

    def set_times() -> None:
        nonlocal start, end
        start = now() + job.warmup_seconds
        end = start + job.seconds

    def work(number: int) -> None:
        mine = latencies[number]
        barrier.wait()
        last = now()
        while last < end:
            call(number)
            number += count
            before, last = last, now()
            if start < last <= end:
                mine.append(last - before)

    barrier = threading.Barrier(count + 1, action=set_times)
    with ThreadPoolExecutor(count) as pool:
        workers = [pool.submit(work, number) for number in range(count)]
        barrier.wait()
        time.sleep(max(0.0, start - now()))
        meter = Meter(job)
        for worker in workers:
            worker.result()
    merged = array("d", chain.from_iterable(latencies))
    return meter.result(len(merged), job.seconds, merged)


def tasks(job: Job, call: Callable[[int], Awaitable[object]], count: int) -> Result:
    """`count` asyncio tasks in one thread call, and each waits for its own."""
    _settle()
    now = time.perf_counter
    latencies = array("d")

    async def work(number: int, start: float, end: float) -> None:
        last = now()
        while last < end:
            await call(number)
            number += count
            before, last = last, now()
            if start < last <= end:
                latencies.append(last - before)

    async def measure() -> Result:
        start = now() + job.warmup_seconds
        end = start + job.seconds
        workers = [asyncio.create_task(work(number, start, end)) for number in range(count)]
        await asyncio.sleep(start - now())
        meter = Meter(job)
        await asyncio.gather(*workers)
        return meter.result(len(latencies), job.seconds, latencies)

    return asyncio.run(measure())


def passes(job: Job, one_pass: Callable[[], int]) -> Result:
    """Whole passes over prepared data, each returning how many entries it saw. One goes ahead, uncounted."""
    _settle()
    now = time.perf_counter
    one_pass()
    seen = 0
    meter = Meter(job)
    start = last = now()
    while last < start + job.seconds:
        seen += one_pass()
        last = now()
    return meter.result(seen, last - start)


def each(call: Callable[[T], object], arguments: Iterator[T], seconds: float) -> Result:
    """Calls one by one for so long: how long one takes, in microseconds. There are at least a thousand."""
    now = time.perf_counter
    latencies = array("d")
    last = now()
    end = last + seconds
    while last < end or len(latencies) < 1000:
        argument = next(arguments)
        start = now()
        call(argument)
        last = now()
        latencies.append(last - start)
    ordered = sorted(latencies)
    shares = (("p50_us", 500), ("p99_us", 990), ("p999_us", 999))
    return {name: ordered[len(ordered) * share // 1000] * 1e6 for name, share in shares}


def once(job: Job, call: Callable[[], int]) -> Result:
    """One call, cold or warm as the directory is, returning how many units it dealt with."""
    _settle()
    meter = Meter(job)
    start = time.perf_counter()
    done = call()
    return meter.result(done, time.perf_counter() - start)
