"""`kill -9` of a process that writes, again and again on one directory: no acknowledged entry is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest

from lowwater.engine.log.log import Log, LogOptions

# A warm interpreter that forks a writer for every line that it is sent: the number of the life. It says
# "forked <pid>" and, once that one is dead, "dead". Between the two the writer says "<first seq> <key> ..."
# after each acknowledgement. Lines are shorter than a pipe's atomic write, so they never mix.
SERVER = """
import dataclasses, os, random, sys, threading
from zlib import crc32
from lowwater.engine.log import columns
from lowwater.engine.format.entries import Put
from lowwater.engine.log.log import Log, LogOptions
from lowwater.engine.seams.real import RealFile, SequentialFile

directory, mode = sys.argv[1:]

def value_of(key):
    return key.encode() * (crc32(key.encode()) % 97)

runs = []
for kind in (RealFile, SequentialFile):
    def write_each(file, offset, parts, sync, original=kind.write_each):
        runs.append(len(parts))
        original(file, offset, parts, sync)
    kind.write_each = write_each

def say(text):
    os.write(1, (text + "\\n").encode())

def write(log, life, thread, way):
    rng = random.Random(f"{life}/{thread}")
    for serial in range(10**9):
        keys = [f"{life}/{thread}/{serial}/{n}" for n in range(rng.choice((1, 1, 1, 3, 8)))]
        puts = [Put("b", key, value_of(key)) for key in keys]
        def acknowledge(seq, keys=keys):
            say(" ".join([str(seq - len(keys) + 1), *keys]))
        if way == "group":
            acknowledge(log.append_group(*puts))
        elif way == "future":
            future = log.submit(*puts)
            future.add_done_callback(lambda done, a=acknowledge: done.exception() or a(done.result()))
        elif way == "memory":
            log.append(*puts, ack="memory")
            if serial % 10 == 0:
                log.sync()
        else:
            acknowledge(log.append(*puts))
        if rng.random() < 0.01 and mode == "mixed":
            log.seal()
        if serial == 2000 and mode == "runs" and not runs:
            say("0 nothing-was-written-in-a-run")

def live(life):
    options = LogOptions(
        segment_bytes=131072, block_bytes=8192, queue_bytes_max=65536,
        sync_mode=("fsync", "fdatasync", "none")[life % 3], sync_interval_ms=5 * (life % 2),
    )
    ways = ["blocking", "blocking", "group", "future", "memory"]
    if mode == "runs":
        # Batches of a few entries, and always many that wait: the writer thread writes several in one call.
        options = dataclasses.replace(
            options, sync_mode=("fsync", "fdatasync")[life % 2], sync_interval_ms=0, batch_bytes_max=1500
        )
        ways = ["future", "future"]
    log = Log.open(directory, options=options)
    for number, way in enumerate(ways):
        threading.Thread(target=write, args=(log, life, number, way)).start()

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        live(int(line))
        threading.Event().wait()
    say(f"forked {pid}")
    os.waitpid(pid, 0)
    say("dead")
"""


def value_of(key: str) -> bytes:
    return key.encode() * (crc32(key.encode()) % 97)


class Killer:
    """Lives of a writing process, and what their directory must hold afterwards."""

    def __init__(self, directory: str, mode: str = "mixed") -> None:
        self.directory = directory
        self.mode = mode
        self.rng = random.Random(9)
        self.held: dict[int, str] = {}
        self.acknowledged = 0

    def live_and_die(self, server: subprocess.Popen[str], life: int) -> dict[int, str]:
        """One life, ended after so many acknowledgements, which may be none: what was promised in it."""
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{life}\n")
        server.stdin.flush()
        pid = int(server.stdout.readline().split()[1])
        promised: dict[int, str] = {}
        wanted = self.rng.choice((0, 1, self.rng.randrange(300)))
        lines = 0
        while True:
            if lines == wanted:
                os.kill(pid, signal.SIGKILL)
            line = server.stdout.readline()
            if line == "dead\n":
                return promised
            lines += 1
            seq, *keys = line.split()
            promised.update(enumerate(keys, int(seq)))

    def verify(self, promised: dict[int, str], *, whole: bool) -> None:
        before = max(self.held, default=0)
        with Log.open(self.directory, options=LogOptions(ring_bytes_max=0)) as log:
            last = before
            for entry in log.read(1 if whole else before + 1):
                if entry.seq > before:
                    assert entry.seq == last + 1, "the log gives seqs without holes"
                    last = entry.seq
                    self.held[entry.seq] = entry.key
                assert self.held[entry.seq] == entry.key, "an entry changed that was there before"
                if entry.kind == "put":
                    assert entry.value == value_of(entry.key)
            assert log.seq_last == last
            if whole:
                assert list(log.check()) == []
        for seq, key in promised.items():
            assert self.held.get(seq) == key, f"seq {seq} was acknowledged as {key}"
        self.acknowledged += len(promised)

    def run(self, kills: int) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", SERVER, self.directory, self.mode],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            for life in range(1, kills + 1):
                promised = self.live_and_die(server, life)
                self.verify(promised, whole=life % 20 == 0 or life == kills)
        keys = [key for key in self.held.values() if key]
        assert len(keys) == len(set(keys)), "an entry is there twice"
        assert self.acknowledged > kills


@pytest.mark.long
def test_nothing_acknowledged_is_lost_in_200_kills(tmp_path: Path) -> None:
    """The crash that happens most often: the kernel goes on and the process does not."""
    Killer(str(tmp_path / "log")).run(200)


@pytest.mark.long
def test_nothing_acknowledged_is_lost_where_batches_are_written_in_runs(tmp_path: Path) -> None:
    """A thread of the C library's is within a write, with others behind it, when the process ends."""
    Killer(str(tmp_path / "log"), "runs").run(30)
