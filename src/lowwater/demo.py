"""`make demo`: what is built so far, on the real parts, in under a minute.

A process writes and is killed with SIGKILL; nothing that it acknowledged may be missing. Two logs that got
the same entries in different batches must have the same bytes. A flipped byte must be found. A database whose
pages are destroyed must come back from its log, with the same root.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pyarrow.compute
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import lowwater
from lowwater.engine import columns
from lowwater.engine.chain import create_entry
from lowwater.engine.check import check_directory, check_segment
from lowwater.engine.entries import Put, encode_put
from lowwater.engine.log import Log, LogOptions
from lowwater.engine.real import RealFiles

ENTRIES = 200_000
OPTIONS = LogOptions(sync_mode="fdatasync", segment_bytes=8_000_000)
WRITER_LIFE_S = 2.0
START_US = 1_700_000_000_000_000


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--writer"]:
        return _write_until_killed(Path(arguments[1]))
    console = Console(highlight=False)
    directory = Path(tempfile.mkdtemp(prefix="lowwater-demo-"))
    table = Table("what", "figure", "holds")
    try:
        holds = [
            _survives_a_kill(console, directory / "killed", table),
            _reads_what_was_written(console, directory / "log", table),
            _same_entries_same_bytes(directory / "one", directory / "two", table),
            _finds_a_flipped_byte(directory / "log", directory / "flipped.log", table),
            _comes_back_without_its_pages(console, directory / "database", table),
        ]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    console.print(table)
    if not all(holds):
        console.print("[red]demo failed: see the table.[/red]")
        return 1
    console.print(
        "demo passed: a killed writer lost nothing that it had acknowledged, the same entries gave the same "
        "bytes whatever their batches, a flipped byte was found, and a database that had lost its pages came "
        "back from its log with the same root."
    )
    return 0


def _write_until_killed(directory: Path) -> int:
    """The process that is going to be killed: prints each seq once it is durable."""
    with Log.open(directory, options=OPTIONS) as log:
        while True:
            payloads = [
                encode_put("demo", f"key-{log.seq_last + 1 + n}", b"x" * 100, time_us=0) for n in range(20)
            ]
            sys.stdout.write(f"{log.append_payloads(payloads)}\n")
            sys.stdout.flush()


def _survives_a_kill(console: Console, directory: Path, table: Table) -> bool:
    with console.status("a process writes, and is killed"):
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
    started_s = time.perf_counter()
    with Log.open(directory) as log:
        opened_s = time.perf_counter() - started_s
        seqs = [entry.seq for entry in log.read()]
        sound = not list(log.check())
    holds = seqs == list(range(1, len(seqs) + 1)) and seqs[-1] >= acknowledged and sound
    table.add_row("acknowledged before kill -9", f"{acknowledged:,}", "")
    table.add_row("found after it", f"{seqs[-1]:,} (opened in {opened_s * 1000:.0f} ms)", _mark(holds))
    return holds


def _reads_what_was_written(console: Console, directory: Path, table: Table) -> bool:
    rates = []
    with Log.open(directory, options=OPTIONS) as log, Progress(console=console, transient=True) as progress:
        task = progress.add_task("appending", total=ENTRIES)
        started_s = time.perf_counter()
        for batch in _batches(_payloads(ENTRIES), 100):
            log.append_payloads(batch)
            progress.advance(task, len(batch))
        rates.append(ENTRIES / (time.perf_counter() - started_s))
        log.seal()
        started_s = time.perf_counter()
        one_by_one = sum(1 for entry in log.read() if entry.kind == "put")
        rates.append(ENTRIES / (time.perf_counter() - started_s))
        sound = not list(log.check())
    _count_puts(directory)  # the first call loads Arrow's functions
    started_s = time.perf_counter()
    vectorised = _count_puts(directory)
    rates.append(ENTRIES / (time.perf_counter() - started_s))
    holds = one_by_one == vectorised == ENTRIES and sound
    table.add_row("durable appends, 100 a sync", f"{rates[0]:,.0f} entries/s", "")
    table.add_row("read one by one", f"{rates[1]:,.0f} entries/s", _mark(one_by_one == ENTRIES))
    table.add_row("read as Arrow columns", f"{rates[2]:,.0f} entries/s", _mark(vectorised == ENTRIES))
    table.add_row("check of all of it", "sound" if sound else "findings", _mark(sound))
    return holds


def _count_puts(directory: Path) -> int:
    puts = 0
    for path in sorted(directory.glob("segment-*.log")):
        file = RealFiles().open(os.fspath(path))
        for batch in columns.read_batches(file, columns=["seq", "kind", "key", "value"]):
            puts += pyarrow.compute.sum(pyarrow.compute.equal(batch.column("kind"), "put")).as_py()
        file.close()
    return puts


def _same_entries_same_bytes(one: Path, two: Path, table: Table) -> bool:
    """Two replicas: the same entries, other batches, one of them closed and opened all the time."""
    create = _Encoded(create_entry(b"demo" * 4, b"salt" * 4, {"segment_bytes": 1_000_000}).encode(START_US))
    with Log.open(one, options=OPTIONS, create=create) as log:
        for batch in _batches(_payloads(20_000), 1_000):
            log.append_payloads(batch)
    for position, part in enumerate(_batches(_payloads(20_000), 4_000)):
        with Log.open(two, options=OPTIONS, create=create) as log:
            for batch in _batches(iter(part), 7 + position):
                log.append_payloads(batch)
    hashes = [
        [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in sorted(log.glob("segment-*"))]
        for log in (one, two)
    ]
    holds = len(hashes[0]) > 1 and hashes[0] == hashes[1]
    table.add_row("two histories of one log", f"{len(hashes[0])} segments, byte for byte", _mark(holds))
    return holds


class _Encoded(NamedTuple):
    """An entry whose time was decided elsewhere, as a replica gets it."""

    payload: bytes

    def encode(self, time_us: int) -> bytes:
        return self.payload


def _finds_a_flipped_byte(directory: Path, copy: Path, table: Table) -> bool:
    sealed = min(directory.glob("segment-*.log"))
    data = bytearray(sealed.read_bytes())
    data[len(data) // 3] ^= 1
    copy.write_bytes(data)
    findings = list(check_segment(RealFiles(), os.fspath(copy)))
    holds = bool(findings) and not list(check_directory(RealFiles(), os.fspath(directory)))
    where = f"at offset {findings[0].offset:,}: {findings[0].what}" if findings else "not found"
    table.add_row("one flipped bit", where, _mark(holds))
    return holds


def _comes_back_without_its_pages(console: Console, directory: Path, table: Table) -> bool:
    config = {"engine": {"pool_bytes_max": "32 MiB"}, "wal": {"sync_mode": "fdatasync"}}
    with (
        lowwater.open(directory, config=config) as db,
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task("putting", total=ENTRIES)
        db.create_bucket("demo")
        started_s = time.perf_counter()
        for start in range(0, ENTRIES, 100):
            # In an order that has nothing to do with that of the keys.
            numbers = [number * 7919 % ENTRIES for number in range(start, start + 100)]
            db.put_many("demo", [(f"{number:06}", b"%020d" % number * 5) for number in numbers])
            progress.advance(task, 100)
        table.add_row("durable puts, 100 a sync", f"{ENTRIES / (time.perf_counter() - started_s):,.0f}/s", "")
        for number in range(100):
            with db.transaction() as txn:
                txn.put("demo", f"{number:06}", txn.get("demo", f"{number + 1:06}").value)
                txn.delete("demo", f"{ENTRIES - 1 - number:06}")
        started_s = time.perf_counter()
        found = sum(1 for _ in db.scan("demo"))
        table.add_row("scanned", f"{found / (time.perf_counter() - started_s):,.0f} objects/s", "")
        before = db.root()
    shutil.rmtree(directory / "pages")
    started_s = time.perf_counter()
    with console.status("the pages are gone: they are made again from the log"):
        db = lowwater.open(directory, config=config)
    opened_s = time.perf_counter() - started_s
    with db:
        after = db.root()
        sound = not list(db.check())
    table.add_row("pages made again from the log", f"in {opened_s:.1f} s", _mark(sound))
    table.add_row("root before and after", f"{before[:16]}… {after[:16]}…", _mark(before == after))
    return found == ENTRIES - 100 and before == after and sound


def _payloads(count: int) -> Iterator[bytes]:
    return (
        Put("demo", f"key-{number % 5000:05}", b"%020d" % number * 5).encode(START_US + number)
        for number in range(count)
    )


def _batches(payloads: Iterator[bytes], size: int) -> Iterator[list[bytes]]:
    while batch := list(islice(payloads, size)):
        yield batch


def _mark(holds: bool) -> str:
    return "[green]yes[/green]" if holds else "[red]NO[/red]"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
