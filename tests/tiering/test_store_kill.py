"""`kill -9` of a process that uploads, at every step: what is there afterwards is whole, or is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiering.servers import write_until_swept

from lowwater.engine.seams.real import RealRandomness
from lowwater.errors import NotFound
from lowwater.tiering.open_store import open_store
from lowwater.tiering.opendal_store import OpenDalStore, StoreLimits
from lowwater.tiering.store import Store
from lowwater.tiering.store_uri import parse_uri
from lowwater.tiering.testing.s3_server import S3Server
from lowwater.tiering.testing.store import names
from lowwater.tiering.verified_writes import write_verified

# Forks one uploader for each line, and kills it where the line says: "<after so many parts> <object>". The
# uploader waits there, so the kill falls between two parts, and the sending of those before goes on. After
# the last part it does not wait: the kill then falls into the end of the upload, some microseconds later.
SERVER = """
import json, os, signal, sys, time
from lowwater.tiering.open_store import open_store

uri, options, parts = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])

def upload(stop, name, channel):
    def data():
        for number in range(parts):
            if number == stop:
                os.write(channel, b".")
                time.sleep(3600)
            yield bytes([number]) * 3_000_000
        os.write(channel, b".")
    open_store(uri, options=options).write(name, data(), size=parts * 3_000_000)

for line in sys.stdin:
    stop, delay_us, name = line.split()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            upload(int(stop), name, write_end)
        finally:
            os._exit(0)
    os.close(write_end)
    os.read(read_end, 1)
    os.close(read_end)
    time.sleep(int(delay_us) / 1e6)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""
PARTS = 8
SIZE = PARTS * 3_000_000


def whole() -> Iterator[bytes]:
    return (bytes([number]) * 3_000_000 for number in range(PARTS))


def kill_everywhere(uri: str, options: dict[str, str], opened: Callable[[], Store]) -> int:
    """Returns how many uploads had come to their end before the kill."""
    import json

    steps = [(step, 0) for step in range(PARTS + 1)] * 2
    steps += [
        (PARTS, delay_us) for delay_us in (200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 400_000)
    ]
    complete = 0
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, uri, json.dumps(options), str(PARTS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for number, (step, delay_us) in enumerate(steps):
            name = f"data/packs/{number:064x}.pack"
            server.stdin.write(f"{step} {delay_us} {name}\n")
            server.stdin.flush()
            assert server.stdout.readline() == "dead\n"
            store = opened()
            # A server may still be at work on what it was sent: what one answer has, the next one has too.
            try:
                found = store.stat(name)
            except NotFound:
                is_there = False
            else:
                is_there = True
                complete += 1
                assert found.size == SIZE
                assert store.read(name) == b"".join(whole())
            listed = {found.name: found.size for found in store.list(name)}
            assert listed[name] == SIZE if is_there else listed in ({}, {name: SIZE})
            # The next process goes on.
            write_verified(store, name, whole, size=SIZE)
            assert store.read(name, SIZE - 10) == bytes([PARTS - 1]) * 10
            store.close()
    assert complete < len(steps)
    return complete


@pytest.mark.long
def test_a_folder_holds_whole_objects_only(tmp_path: Path) -> None:
    """And nothing of what was killed is left once it was opened again."""
    uri = str(tmp_path / "store")
    kill_everywhere(uri, {}, lambda: open_store(uri))
    assert os.listdir(tmp_path / "store" / ".tmp") == []
    assert len(names(open_store(uri).list())) == 2 * (PARTS + 1) + 9


@pytest.mark.long
def test_an_s3_server_holds_whole_objects_only(s3_server: S3Server) -> None:
    """And the parts of uploads that nobody completes go when they are old."""
    prefix = f"kill/{RealRandomness().token(8).hex()}"
    uri = s3_server.uri(prefix)
    kill_everywhere(uri, s3_server.options, lambda: open_store(uri, options=s3_server.options))
    hasty = OpenDalStore(parse_uri(uri, s3_server.options), limits=StoreLimits(upload_age_max_s=1.0))
    write_until_swept(hasty, s3_server, prefix)
