"""Whoever appends faster than the disk writes waits: the writer's memory stays under its bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

QUEUE_BYTES_MAX = 48 * 2**20
MARGIN_BYTES = 32 * 2**20

# A disk that stands still in its sync, appenders that do not, and the highest memory meanwhile.
STALLED = """
import asyncio, json, sys, threading
import psutil
from lowwater.engine.format.entries import Put
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.seams.real import RealFile, RealFiles
from lowwater.errors import Busy

directory, value_bytes, threads, queue_bytes_max = sys.argv[1], *map(int, sys.argv[2:])
gate = threading.Event()
gate.set()
stuck = threading.Event()

class SlowFile(RealFile):
    def write_at(self, offset, buffers, sync="none"):
        if not gate.is_set():
            stuck.set()
            gate.wait()
        return super().write_at(offset, buffers, sync)

class SlowFiles(RealFiles):
    def open(self, path, *, write=False, create=False, sequential=False):
        file = super().open(path, write=write, create=create)
        slow = SlowFile(file._fd)
        file._fd = -1
        return slow

def rss():
    return psutil.Process().memory_info().rss

options = LogOptions(queue_bytes_max=queue_bytes_max, ring_bytes_max=0, segment_bytes=2**24)
log = Log.open(directory, options=options, seams=Seams(files=SlowFiles()))
value = b"v" * value_bytes
for _ in range(3):
    log.append(Put("b", "k", value))  # what the first time costs is no queue

attempts = [0] * threads
refused = 0
stop = threading.Event()

def append(number):
    global refused
    while not stop.is_set():
        attempts[number] += 1
        try:
            if number % 3 == 0:
                log.append(Put("b", "k", value), timeout_s=None)
            elif number % 3 == 1:
                log.submit(Put("b", "k", value))
            else:
                log.append(Put("b", "k", value), ack="memory", timeout_s=0.05)
        except Busy:
            refused += 1

async def append_in_loop():
    tasks = [asyncio.create_task(log.append_async(Put("b", "k", value))) for _ in range(50)]
    await asyncio.gather(*tasks)

gate.clear()
before = rss()
workers = [threading.Thread(target=append, args=(number,)) for number in range(threads)]
loop = threading.Thread(target=lambda: asyncio.run(append_in_loop()))
for worker in [*workers, loop]:
    worker.start()
stuck.wait()
highest = before
pause = threading.Event()
# Until nobody gets any further but those who are refused, again and again.
while refused < 200:
    highest = max(highest, rss())
    pause.wait(0.001)
grown = max(highest, rss()) - before
queued = log.seq_last - log.seq_durable
stop.set()
gate.set()
for worker in [*workers, loop]:
    worker.join()
log.sync()
accepted = sum(attempts) - refused + 50 + 4
log.close()
with Log.open(directory, options=LogOptions(ring_bytes_max=0)) as log:
    written = sum(1 for _ in log.read())
    findings = len(list(log.check()))
print(json.dumps(dict(
    grown=grown, queued=queued, refused=refused, accepted=accepted, written=written, findings=findings)))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("value_bytes", "threads"),
    [(1000, 12), (100_000, 12), (2**20, 60)],
    ids=["small", "large", "many of 1 MiB"],
)
def test_a_stalled_disk_holds_up_appenders_and_not_memory(
    tmp_path: Path, value_bytes: int, threads: int
) -> None:
    """Without back-pressure a slow disk kills the process, and with it what was queued."""
    done = subprocess.run(
        [
            sys.executable, "-c", STALLED,
            str(tmp_path / "log"), str(value_bytes), str(threads), str(QUEUE_BYTES_MAX),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["grown"] < QUEUE_BYTES_MAX + MARGIN_BYTES, found
    assert found["refused"] > 0
    assert found["queued"] > 3
    assert found["accepted"] == found["written"]
    assert found["findings"] == 0
