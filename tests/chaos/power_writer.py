"""What writes to a database whose device will lose its power. What each thread does follows from its number,
so the test knows it too.

Always true:
  - each thread has keys of its own, makes one change after the other, and says of each that it was
    acknowledged before it makes the next. So its keys show all that was acknowledged, and at most one change
    more;
  - a line that is said is shorter than a pipe's atomic write, so that lines never mix.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import lowwater
from lowwater.engine.database.database import Database
from lowwater.errors import LowwaterError, NotFound

BUCKET = "b"
THREADS = 3
KEYS = 300

Changes = list[tuple[str, bytes | None]]


def change_of(seed: int, life: int, thread: int, serial: int) -> tuple[str, Changes]:
    """How it is made, and what it changes: keys with values, None for a deletion."""
    rng = random.Random(f"{seed}/{life}/{thread}/{serial}")
    way = rng.choice(
        ("put", "put", "put", "if", "delete", "many", "group", "large", "transaction", "aborted")
    )

    def key() -> str:
        return f"{thread}/{rng.randrange(KEYS):03}"

    def value(size: int) -> bytes:
        return f"{seed}/{life}/{thread}/{serial}/".encode() + rng.randbytes(size)

    if way == "delete":
        return way, [(key(), None)]
    if way == "large":
        return way, [(key(), value(rng.choice((5_000, 30_000, 90_000))))]
    if way == "many":
        return way, [(key(), value(100)) for _ in range(40)]
    if way == "group":
        return way, [(key(), None if rng.random() < 0.3 else value(50)) for _ in range(rng.randint(1, 12))]
    if way in ("transaction", "aborted"):
        return way, [(key(), value(rng.choice((50, 200, 6_000)))) for _ in range(20)]
    return way, [(key(), value(rng.randrange(400)))]


def make(db: Database, way: str, changes: Changes) -> int:
    """Returns the seq that was given, or 0 where nothing was changed."""
    if way in ("transaction", "aborted"):
        txn = db.transaction()
        for number, (key, value) in enumerate(changes):
            if number == len(changes) // 2:
                savepoint = txn.savepoint()
                txn.put(BUCKET, key, b"undone")
                txn.rollback_to(savepoint)
            assert value is not None
            txn.put(BUCKET, key, value)
        if way == "aborted":
            txn.abort()
            return 0
        return txn.commit() or 0
    if way == "many":
        return db.put_many(BUCKET, [(key, value) for key, value in changes if value is not None])
    if way == "group":
        return db.write(
            [
                lowwater.Delete(BUCKET, key) if value is None else lowwater.Put(BUCKET, key, value)
                for key, value in changes
            ]
        )
    ((key, value),) = changes
    if way == "delete":
        try:
            return db.delete(BUCKET, key)
        except NotFound:
            return 0
    assert value is not None
    if way == "if":
        try:
            seq = db.head(BUCKET, key).seq
        except NotFound:
            seq = 0
        return db.put(BUCKET, key, value, {"way": way}, if_seq=seq)
    return db.put(BUCKET, key, value)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def work(db: Database, seed: int, life: int, thread: int) -> None:
    for serial in range(10**9):
        say("done", thread, serial, make(db, *change_of(seed, life, thread, serial)))


def upkeep(db: Database, seed: int, life: int, *, ships: bool) -> None:
    """What goes on beside: pages, checkpoints, segments that end, are shipped, and leave."""
    rng = random.Random(f"{seed}/{life}/upkeep")
    while True:
        time.sleep(rng.choice((0, 0.01, 0.05)))
        way = rng.choice(("flush", "checkpoint", "ship", "ship", "purge"))
        if way == "flush":
            db.flush()
        elif way == "checkpoint":
            db.checkpoint()
        elif ships and way == "ship":
            say("shipped", db.ship())
        elif ships:
            db.purge(db.purgeable_seq())


def write_back(path: str, seed: int, life: int) -> None:
    """What the kernel does of its own accord at any moment: it writes what some file holds, and flushes
    nothing. It waits for longer than a life is."""
    rng = random.Random(f"{seed}/{life}/write back")
    while True:
        time.sleep(rng.choice((0, 0.002, 0.02)))
        names = [f"{folder}/{name}" for folder, _, names in os.walk(path) for name in names]
        try:
            fd = os.open(rng.choice(names), os.O_RDONLY)
        except FileNotFoundError:
            continue
        except (OSError, IndexError):
            return  # the device has gone
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def live(path: str, seed: int, life: int, threads: int, tier: str | None, config: dict[str, Any]) -> None:
    """Goes on until it is killed. A thread whose disk has gone ends with what a caller of the database sees,
    which has to be an error of its own."""

    def until_it_fails(call: Callable[..., None], *arguments: object, **named: object) -> None:
        try:
            call(*arguments, **named)
        except LowwaterError as error:
            say("typed", type(error).__name__)
        except Exception as error:  # noqa: BLE001 — whatever it is, it has to be known
            say("untyped", repr(error)[:200])

    def begin() -> None:
        db = lowwater.open(path, tier=tier, config=config)
        db.create_bucket(BUCKET, exist_ok=True)
        say("open")
        for thread in range(threads):
            start(work, db, seed, life, thread)
        threading.Thread(target=write_back, args=(path, seed, life), daemon=True).start()
        start(upkeep, db, seed, life, ships=tier is not None)

    def start(*arguments: Any, **named: Any) -> None:
        threading.Thread(target=until_it_fails, args=arguments, kwargs=named, daemon=True).start()

    until_it_fails(begin)
    os.read(0, 1)  # nothing comes before it is killed, unless the test itself has ended
    os._exit(1)


def main() -> None:
    """A warm interpreter that forks a life for each line it is sent, in a group of processes of its own."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            live(**json.loads(line))
        say("forked", pid)
        os.waitpid(pid, 0)
        say("dead")


if __name__ == "__main__":
    main()
