"""The memory of an engine, as the system counts it: a pool and a fixed cost, however much is stored.

`LOWWATER_MEMORY_STATE=2GiB pytest -s -k memory_engine` measures with more, and prints what it found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowwater.config import parse_bytes
from lowwater.engine.format.fast import IS_COMPILED

MIB = 2**20
POOL_BYTES = 64 * MIB
CACHE_BYTES = 4 * MIB
# The interpreter with its modules and the log's buffers have 36 MiB of it. The rest is for one group of a
# flush, and for what Python's allocator cannot give back.
FIXED_BYTES = 64 * MIB

# One phase of a life, with the highest anonymous memory meanwhile.
CHILD = '''
import json, math, os, random, sys, threading
from lowwater.engine.database.core import EngineOptions
from lowwater.engine.log.log import LogOptions
from lowwater.engine.database.opening import open_with

path, phase = sys.argv[1:3]
state_bytes, value_bytes, pool_bytes, cache_bytes = map(int, sys.argv[3:])
count = state_bytes // value_bytes
step = int(count * 0.618) | 1  # keys come in an order that is none, without a list of them
while math.gcd(step, count) > 1:
    step += 2
highest = {"RssAnon": 0, "RssFile": 0}
db = None

def sizes(pid):
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            name, _, size = line.partition(":")
            if name in ("RssAnon", "RssFile"):
                yield name, int(size.split()[0]) * 1024

def look():
    for name, size in sizes("self"):
        highest[name] = max(highest[name], size)

ended = threading.Event()

def watch():
    while not ended.wait(0.005):
        look()

class Packs:
    """The blocks of checkpoints, where they lie here."""

    def read_block(self, pack, offset, size, block_hash):
        with open(f"{path}/packs/{pack.hex()}.pack", "rb") as file:
            file.seek(offset)
            return file.read(size)

look()
bare = highest["RssAnon"]
threading.Thread(target=watch, daemon=True).start()
db = open_with(
    path,
    options=EngineOptions(pool_bytes_max=pool_bytes, checkpoint_interval_s=None),
    log_options=LogOptions(ring_bytes_max=cache_bytes),
    blocks=Packs(),
)
rng = random.Random(1)
value = rng.randbytes(value_bytes)

def put(numbers):
    numbers = list(numbers)
    for start in range(0, len(numbers), 100):
        db.put_many("b", [(f"{number:012}", value) for number in numbers[start : start + 100]])

if phase == "write":
    db.create_bucket("b")
    for start in range(0, count, 10_000):
        put(number * step % count for number in range(start, min(start + 10_000, count)))
    for _ in range(0, count // 4, 10_000):
        put(rng.randrange(count) for _ in range(10_000))
elif phase == "mix":
    for _ in range(3):  # what was memory for changes becomes memory for pages, and changes come again
        put(rng.randrange(count) for _ in range(50_000))
        db.flush()
        for _ in range(20_000):
            db.get("b", f"{rng.randrange(count):012}")
elif phase == "read":
    assert sum(1 for _ in db.scan("b")) == count
    for _ in range(100_000):
        db.get("b", f"{rng.randrange(count):012}")
    assert sum(1 for _ in db.scan("b")) == count
    db.root()
elif phase == "leave":
    db.checkpoint()
    assert db.leaving.leave(db.checkpoints()[0]) > 1000
elif phase == "crash":
    while db._state.dirty_bytes < 0.5 * pool_bytes or db._flusher.groups < 1:
        put(rng.randrange(count) for _ in range(1000))
if phase == "recover":
    assert db.redone > 1000
redone = db.redone
if phase != "crash":
    db.close()
ended.set()
look()
print(json.dumps(dict(highest, bare=bare, redone=redone)), flush=True)
os._exit(0)
'''


def live(path: Path, phase: str, state_bytes: int, value_bytes: int, is_compiled: bool) -> dict[str, Any]:
    done = subprocess.run(
        [
            sys.executable, "-c", CHILD, str(path), phase,
            str(state_bytes), str(value_bytes), str(POOL_BYTES), str(CACHE_BYTES),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PURE_PYTHON": "" if is_compiled else "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    mib = {name: round(size / MIB) for name, size in found.items() if name != "redone"}
    print(f"{phase}, values of {value_bytes}: {mib}, redone {found['redone']:,}")
    return found


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "is_compiled",
    [
        pytest.param(True, marks=pytest.mark.skipif(not IS_COMPILED, reason="nothing is compiled here")),
        False,
    ],
    ids=["compiled", "step by step"],
)
@pytest.mark.parametrize(
    ("value_bytes", "state_bytes", "phases"),
    [
        (1000, 256 * MIB, ("write", "read", "mix", "crash", "recover")),
        # Without "mix": Python's allocator keeps the memory of small changes, which docs/PERFORMANCE.md says.
        (200, 64 * MIB, ("write", "read", "crash", "recover")),
        # All pages are in the archive, and come back; then again, with changes that wait for them.
        (200, 64 * MIB, ("write", "leave", "read", "leave", "crash", "recover")),
    ],
    ids=["by reference", "inline", "away"],
)
def test_memory_stays_below_the_pool_and_a_fixed_cost(
    tmp_path: Path, value_bytes: int, state_bytes: int, phases: tuple[str, ...], is_compiled: bool
) -> None:
    """Writing, reading, and recovering from a crash, each in a process of its own."""
    state_bytes = parse_bytes(os.environ.get("LOWWATER_MEMORY_STATE", state_bytes))
    allowed = POOL_BYTES * 5 // 4 + CACHE_BYTES + FIXED_BYTES
    for phase in phases:
        found = live(tmp_path / "data", phase, state_bytes, value_bytes, is_compiled)
        assert found["RssAnon"] < allowed, f"{phase}: {found}"
        if phase == "recover":
            assert found["redone"] > 1000
