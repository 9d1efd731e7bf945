"""What the reference documents ask of uploads: the bytes are the same, and memory does not grow with them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import lowwater
from lowwater.tiering.names import WAL
from lowwater.tiering.open_store import open_store
from lowwater.tiering.testing.s3_server import S3Server

MIB = 2**20


def value(number: int) -> bytes:
    return random.Random(number).randbytes(MIB)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_100_mb_of_frames_are_in_a_memory_store_as_they_were_written(
    tmp_path: Path, compression: str
) -> None:
    """Byte by byte where they are stored as they are, and value by value in whatever form."""
    uri = f"memory://{tmp_path.name}"
    config = {"wal": {"compression": compression, "rotate_max_bytes": "16 MiB"}}
    with lowwater.open(tmp_path / "data", tier=uri, config=config) as db:
        db.create_bucket("b")
        for number in range(100):
            db.put("b", f"{number:03}", value(number))
        db.ship()
        root = db.root()
        here = {
            path.name.removesuffix(".log"): path.read_bytes()
            for path in (tmp_path / "data" / "wal").glob("segment-*")
        }
    store = open_store(uri)
    there = {found.name.rpartition("/")[2].rpartition("-")[0]: found.name for found in store.list(WAL)}
    assert there.keys() <= here.keys()
    assert sum(len(here[name]) for name in there) > 100 * MIB
    if compression == "none":
        assert all(store.read(stored) == here[name] for name, stored in there.items())
    lowwater.restore(uri, tmp_path / "restored")
    with lowwater.open(tmp_path / "restored", tier=uri) as restored:
        assert all(restored.get("b", f"{number:03}").value == value(number) for number in range(100))
        assert restored.root() == root


SHIP = """
import json, random, sys, threading
import psutil
import lowwater

directory, tier, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
options = {**config["tier"], "uri": tier + "-small"}
with lowwater.open(directory + "-small", config={**config, "tier": options}) as db:
    db.create_bucket("b")
    for number in range(64):
        db.put("b", f"{number}", random.randbytes(2**20))
    db.ship()

def rss():
    return psutil.Process().memory_info().rss

with lowwater.open(directory, config={**config, "tier": {**config["tier"], "uri": tier}}) as db:
    ended = threading.Event()
    before = highest = rss()
    def look():
        global highest
        while not ended.wait(0.01):
            highest = max(highest, rss())
    looking = threading.Thread(target=look)
    looking.start()
    hwm = db.ship()
    ended.set()
    looking.join()
    sent = db.metrics().get_sample_value("lowwater_uploader_bytes_uploaded_total")
    print(hwm, int(sent), highest - before)
"""


@pytest.mark.long
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_gib_is_uploaded_in_64_mib_of_memory(tmp_path: Path, s3_server: S3Server, compression: str) -> None:
    """One object of a gigabyte, to a real server, beside a process that has uploaded a little before."""

    config = {
        "wal": {"rotate_max_bytes": "1900 MiB", "sync_mode": "none", "compression": compression},
        "engine": {"pool_bytes_max": "16 MiB", "checkpoint_entry_interval_s": "none"},
        "tier": {"options": s3_server.options},
    }
    with lowwater.open(tmp_path / "data", config={"wal": config["wal"]}) as db:
        db.create_bucket("b")
        for number in range(1024):
            db.put("b", f"{number:04}", value(number))
        last = db.marks().durable
    uri = s3_server.uri(f"large/{compression}-{tmp_path.name}")
    done = subprocess.run(
        [sys.executable, "-c", SHIP, str(tmp_path / "data"), uri, json.dumps(config)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hwm, sent, grown = map(int, done.stdout.split())
    assert hwm >= last
    assert sent > 2**30
    assert grown <= 64 * MIB
    store = open_store(uri, options=s3_server.options, read_only=True)
    assert max(found.size for found in store.list(WAL)) > 2**30
