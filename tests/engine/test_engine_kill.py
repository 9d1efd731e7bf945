"""`kill -9` of a process with a database under a mixed load: nothing acknowledged is lost, and all agrees."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from lowwater import Database, Entry
from lowwater.engine.database.database import EngineOptions
from lowwater.engine.database.opening import open_with
from lowwater.engine.format.entries import decode_body
from lowwater.engine.log.log import LogOptions

# As many as have to hold once: `make chaos` runs 200.
KILLS = int(os.environ.get("KILLS", "80"))

# A warm interpreter that forks a life for every line it is sent: the number of the life. A life opens the
# database and lets threads write, each to keys of its own. It says "intend <thread> <serial>" before a write
# and "done <thread> <serial> <seq>" after its acknowledgement. What a write does follows from life, thread
# and serial, so the test knows it too. Lines are shorter than a pipe's atomic write, so they never mix.
SERVER = """
import os, sys, threading, time
from lowwater import Delete, Put
from lowwater.engine.database.database import EngineOptions
from lowwater.engine.log.log import LogOptions
from lowwater.engine.database.opening import open_with
from lowwater.errors import NotFound
sys.path.insert(0, sys.argv[2])
from engine_kill_load import THREADS, log_options, options, write_of

def say(text):
    os.write(1, (text + "\\n").encode())

def work(db, life, thread):
    for serial in range(10**9):
        way, changes = write_of(life, thread, serial)
        say(f"intend {thread} {serial}")
        if way == "group":
            seq = db.write([
                Delete("b", key) if value is None else Put("b", key, value) for key, value in changes
            ])
        elif way == "many":
            seq = db.put_many("b", changes)
        elif way in ("transaction", "aborted"):
            seq = transact(db, changes, way)
        else:
            (key, value), = changes
            if value is None:
                try:
                    seq = db.delete("b", key)
                except NotFound:
                    seq = 0
            elif way == "conditional":
                try:
                    now = db.head("b", key).seq
                except NotFound:
                    now = 0
                seq = db.put("b", key, value, {"serial": str(serial)}, if_seq=now)
            else:
                seq = db.put("b", key, value)
        say(f"done {thread} {serial} {seq}")

def make_checkpoints(db):
    while True:
        db.checkpoint()
        time.sleep(0.02)

def transact(db, changes, way):
    # Larger than a quarter of the pool: it is in the log before its end.
    txn = db.transaction()
    for number, (key, value) in enumerate(changes):
        if number == len(changes) // 2:
            savepoint = txn.savepoint()
            for key_undone, _ in changes[::3]:
                txn.put("b", key_undone, bytes(4000))
            txn.rollback_to(savepoint)
        txn.put("b", key, value)
    if way == "aborted":
        txn.abort()
        return 0
    return txn.commit()

def live(life):
    db = open_with(sys.argv[1], log_options=log_options(life), options=options(life))
    if not db.buckets():
        db.create_bucket("b")
    for thread in range(THREADS):
        threading.Thread(target=work, args=(db, life, thread)).start()
    if life % 2:
        threading.Thread(target=make_checkpoints, args=(db,)).start()

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            live(int(line))
        except BaseException as error:
            say(f"failed {error!r}")
        threading.Event().wait()
    say(f"forked {pid}")
    os.waitpid(pid, 0)
    say("dead")
"""

# What both sides know.
LOAD = '''
import random
from lowwater.engine.database.database import EngineOptions
from lowwater.engine.log.log import LogOptions

THREADS = 4
KEYS = 3000

def write_of(life, thread, serial):
    """The way of a write and its changes: keys with values, None for a deletion."""
    rng = random.Random(f"{life}/{thread}/{serial}")
    ways = ("put", "put", "conditional", "delete", "many", "many", "group", "large")
    way = rng.choice((*ways, *ways, "transaction", "aborted"))
    def key():
        return f"{thread}/{rng.randrange(KEYS):05}"
    def value(size):
        return f"{life}/{thread}/{serial}/".encode() + rng.randbytes(size)
    if way == "delete":
        return way, [(key(), None)]
    if way == "large":
        return way, [(key(), value(rng.choice((300, 5000, 60000))))]
    if way == "many":
        return way, [(key(), value(200)) for _ in range(100)]
    if way in ("transaction", "aborted"):
        return way, [(key(), value(rng.choice((50, 200, 6000)))) for _ in range(150)]
    if way == "group":
        return way, [(key(), None if rng.random() < 0.3 else value(50)) for _ in range(rng.randint(1, 12))]
    return way, [(key(), value(rng.randrange(120)))]

def log_options(life):
    mode = ("fsync", "fdatasync", "none")[life % 3]
    return LogOptions(segment_bytes=2**20, block_bytes=16384, sync_mode=mode)

def options(life):
    return EngineOptions(pool_bytes_max=2**20, checkpoint_interval_s=(None, 0.002)[life % 2])
'''

Changes = list[tuple[str, bytes | None]]
UNDER_WAY = -1


class Killer:
    """Lives of a database, and what its directory must hold afterwards."""

    def __init__(self, place: Path, seed: int = 11) -> None:
        self.directory = str(place / "data")
        self.place = place
        (place / "engine_kill_load.py").write_text(LOAD)
        load: dict[str, Any] = {}
        exec(LOAD, load)
        self.write_of: Callable[[int, int, int], tuple[str, Changes]] = load["write_of"]
        self.rng = random.Random(seed)
        # The state as the log's entries make it, up to `replayed`.
        self.state: dict[str, tuple[int, bytes]] = {}
        # All changes that ever came into effect, with the hashes of values: what checkpoints must show.
        self.history: list[tuple[str, int, bytes | None]] = []
        self.replayed = 0
        # What transactions that have not ended have written.
        self.open: dict[int, list[Entry]] = {}
        self.ended_in_the_log: Counter[str] = Counter()
        self.pid = 0
        self.acknowledged = 0
        self.lives_that_flushed = 0
        self.checkpoints_seen: set[int] = set()

    def live_and_die(self, server: subprocess.Popen[str], life: int) -> dict[int, list[tuple[int, int]]]:
        """One life, ended after so many acknowledgements, which may be none; what each thread was promised:
        pairs of serial and seq, of which the last one may have been under way."""
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{life}\n")
        server.stdin.flush()
        self.pid = pid = int(server.stdout.readline().split()[1])
        promised: dict[int, list[tuple[int, int]]] = {}
        intended: dict[int, int] = {}
        wanted = self.rng.choice((0, 1, self.rng.randrange(300), self.rng.randrange(300)))
        done = 0
        killed = False
        while True:
            if done >= wanted and not killed:
                os.kill(pid, signal.SIGKILL)
                killed = True
            line = server.stdout.readline()
            if line == "dead\n":
                break
            word, *numbers = line.split()
            assert word in ("intend", "done"), line
            thread, serial = int(numbers[0]), int(numbers[1])
            if word == "intend":
                intended[thread] = serial
                continue
            done += 1
            promised.setdefault(thread, []).append((serial, int(numbers[2])))
            del intended[thread]
        for thread, serial in intended.items():
            promised.setdefault(thread, []).append((serial, UNDER_WAY))
        return promised

    def replay(self, db: Database) -> dict[tuple[str, bytes | None], int]:
        """Bring the model up to what the log holds: the new changes, with the seqs of their versions."""
        new: dict[tuple[str, bytes | None], int] = {}
        for entry in db.log(self.replayed + 1):
            assert entry.seq == self.replayed + 1, "the log gives seqs without holes"
            self.replayed = entry.seq
            if (end := self.end_of_transaction(entry)) is not None:
                self.ended_in_the_log[end] += 1
            for change in self.effects(entry, self.open):
                seq = entry.seq if entry.kind == "commit" else self.version_seq(entry)
                value = bytes(change.value) if change.kind == "put" else None
                new[change.key, value] = seq
                if value is None:
                    self.state.pop(change.key, None)
                    self.history.append((change.key, seq, None))
                else:
                    self.state[change.key] = (seq, value)
                    self.history.append((change.key, seq, blake3(value).digest()))
        return new

    @staticmethod
    def end_of_transaction(entry: Entry) -> str | None:
        if entry.kind == "abort":
            return "abort" if decode_body(entry).get("savepoint") is None else "rollback"
        return "commit" if entry.kind == "commit" else None

    @staticmethod
    def effects(entry: Entry, pending: dict[int, list[Entry]]) -> list[Entry]:
        """The puts and deletes that others see from this entry on. `pending` has those of transactions that
        have not ended."""
        assert entry.refused is None, "an embedded database refuses before"
        if entry.kind == "begin":
            pending[entry.seq] = []
        elif entry.txn is None:
            return [entry] if entry.kind in ("put", "delete") else []
        elif entry.kind == "commit":
            return pending.pop(entry.txn)
        elif entry.kind != "abort":
            pending[entry.txn].append(entry)
        elif (savepoint := decode_body(entry).get("savepoint")) is not None:
            pending[entry.txn] = [each for each in pending[entry.txn] if each.seq <= savepoint]
        else:
            del pending[entry.txn]
        return []

    @staticmethod
    def version_seq(entry: Entry) -> int:
        group = entry.extras.group_seq_last if entry.extras is not None else None
        return entry.seq if group is None else group

    def verify(self, life: int, promised: dict[int, list[tuple[int, int]]], *, whole: bool) -> None:
        # With a larger pool than before: its size must not matter.
        options = EngineOptions(pool_bytes_max=2 ** self.rng.choice((20, 24)), checkpoint_interval_s=None)
        with open_with(self.directory, log_options=LogOptions(), options=options) as db:
            before = self.replayed
            new = self.replay(db)
            assert not self.open, "opening has ended what a crash has left"
            self.lives_that_flushed += db.redone < self.replayed - before
            self.require_promises(life, promised, new)
            held = {found.key: (found.seq, found.value) for found in db.scan("b")} if db.buckets() else {}
            assert held == self.state, "a scan shows something else than the log"
            for key in self.rng.sample(sorted(self.state), min(20, len(self.state))):
                assert db.get("b", key).value == self.state[key][1]
            if db.checkpoints():
                self.require_rows(db)
            if whole:
                assert list(db.check()) == []
                root = db.root()
                seq = db.marks().applied
        if whole:
            self.require_same_root(root, seq)

    def require_rows(self, db: Database) -> None:
        """The newest checkpoint holds what the log says as of its seq."""
        stored = db.checkpoints()[0]
        self.checkpoints_seen.add(stored.seq)
        expected: dict[str, tuple[int, bytes]] = {}
        for key, seq, value_hash in self.history:
            if seq > stored.seq:
                break
            if value_hash is None:
                expected.pop(key, None)
            else:
                expected[key] = seq, value_hash
        rows = {row.key: row for row in stored.rows() if row.bucket}
        assert rows.keys() == expected.keys()
        for key, (seq, value_hash) in expected.items():
            row = rows[key]
            assert row.seq == seq
            assert (row.value_hash or blake3(row.value).digest()) == value_hash

    def require_promises(
        self,
        life: int,
        promised: dict[int, list[tuple[int, int]]],
        new: dict[tuple[str, bytes | None], int],
    ) -> None:
        for thread, writes in promised.items():
            for serial, seq in writes:
                way, changes = self.write_of(life, thread, serial)
                if seq == UNDER_WAY:
                    there = [change in new for change in changes if change[1] is not None]
                    assert way not in ("group", "transaction") or all(there) or not any(there), (
                        "half a group survived"
                    )
                elif seq:  # otherwise there was nothing to delete
                    assert all(change in new for change in changes), (
                        f"write {serial} of thread {thread} was acknowledged as {seq}"
                    )
                    assert new[changes[-1]] >= seq
                    self.acknowledged += 1

    def require_same_root(self, root: str, seq: int) -> None:
        """A database from the same log, and no pages, has the same content."""
        fresh = str(self.place / "fresh")
        os.mkdir(fresh)
        shutil.copytree(f"{self.directory}/wal", f"{fresh}/wal")
        options = EngineOptions(pool_bytes_max=2**24)
        with open_with(fresh, log_options=LogOptions(), options=options) as db:
            assert db.redone == seq
            assert db.root() == root
        shutil.rmtree(fresh)

    def run(self, kills: int, *, whole_every: int) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", SERVER, self.directory, str(self.place)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            try:
                for life in range(1, kills + 1):
                    promised = self.live_and_die(server, life)
                    self.pid = 0
                    self.verify(life, promised, whole=life % whole_every == 0 or life == kills)
            finally:
                # Otherwise a test that failed would wait for a life that goes on for ever.
                server.kill()
                if self.pid:
                    os.kill(self.pid, signal.SIGKILL)
        assert self.acknowledged > 20 * kills
        if kills > 40:  # of a few lives it is chance how far each comes
            assert self.lives_that_flushed > kills // 20, "pages were to be flushed all the time"
            assert len(self.checkpoints_seen) > kills // 20, "checkpoints were to be made all the time"
        assert min(self.ended_in_the_log[kind] for kind in ("commit", "abort", "rollback")) > kills // 10


@pytest.mark.long
@pytest.mark.parametrize("directory", range(4))
def test_nothing_acknowledged_is_lost_in_many_kills(directory: int, tmp_path: Path) -> None:
    """The crash that happens most often: the kernel goes on and the process does not. Each life is compared
    with the whole log, so four directories with a fourth of the lives each take a fourth of the time."""
    Killer(tmp_path, seed=directory).run(KILLS // 4, whole_every=12)
