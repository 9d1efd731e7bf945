"""Ways in which the log was broken once, and must not be again."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections import deque
from pathlib import Path

import pytest
from blake3 import blake3
from prometheus_client import CollectorRegistry

from lowwater.chaos.disk import Fault, FaultyFiles, Operation
from lowwater.engine.format.entries import Control, Delete, Put, encode_put
from lowwater.engine.format.format import Kind
from lowwater.engine.log import footer
from lowwater.engine.log import segment_store as store
from lowwater.engine.log.chain import settings_entry
from lowwater.engine.log.check import check_directory
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.log.pieces import Piece
from lowwater.engine.log.scan import is_frame
from lowwater.engine.log.tickets import AppendFuture, Ticket
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.seams.real import RealClock, RealFiles, RealRandomness
from lowwater.errors import Closed, Corrupt, InputError, InvalidConfig, InvalidEntry, LogPoisoned


def put(number: int) -> Put:
    return Put("bucket", f"key-{number}", b"value")


def test_a_forked_child_can_neither_append_nor_close_nor_read(tmp_path: Path) -> None:
    """It shares the file and the lock with its parent, and would write over the parent's entries."""
    log = Log.open(tmp_path / "log")
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        told = b""
        for attempt in (lambda: log.append(put(1)), lambda: list(log.read()), log.sync):
            try:
                attempt()
            except LogPoisoned:
                told += b"refused "
        log.close()
        os.write(write_end, told)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 100) == b"refused refused refused "
    os.close(read_end)
    os.close(write_end)
    assert log.append(put(2)) == 2
    log.close()
    with Log.open(tmp_path / "log") as log:
        assert [entry.key for entry in log.read(2)] == ["key-2"]


def test_closing_waits_for_a_write_that_is_under_way() -> None:
    """Else the next owner's entries and the late write would meet in one file."""
    files = FaultyFiles()
    log = Log.open("log", seams=Seams(files=files), options=LogOptions(sync_mode="fdatasync"))
    gate, inside = threading.Event(), threading.Event()

    def stall(operation: Operation) -> Fault | None:
        if operation.kind == "write" and operation.path.endswith("current.log"):
            inside.set()
            return Fault(gate=gate)
        return None

    files.fault = stall
    appender = threading.Thread(target=log.append, args=(put(1),))
    appender.start()
    assert inside.wait(30)
    closer = threading.Thread(target=log.close)
    closer.start()
    with pytest.raises(InputError):
        Log.open("log", seams=Seams(files=files))
    gate.set()
    appender.join(30)
    closer.join(30)
    files.fault = None
    with Log.open("log", seams=Seams(files=files)) as log:
        assert [entry.key for entry in log.read(2)] == ["key-1"]


def test_a_loss_that_nobody_was_told_of_is_told_by_close() -> None:
    """With ack="memory" there is no waiter to get the error."""
    files = FaultyFiles()
    log = Log.open("log", seams=Seams(files=files), options=LogOptions(sync_interval_ms=3_600_000))
    log.append(put(1), ack="memory")
    files.fault = lambda operation: Fault(error=errno.EIO) if operation.kind == "write" else None
    with pytest.raises(LogPoisoned):
        log.close()


def test_a_failed_sync_of_zeros_poisons_the_log_when_entries_were_in_it() -> None:
    """With sync mode `none` that sync carries entries, and the one after it would succeed without them."""
    files = FaultyFiles()
    options = LogOptions(sync_mode="none", segment_bytes=64 * 2**20)
    log = Log.open("log", seams=Seams(files=files), options=options)
    files.fault = lambda operation: Fault(error=errno.ENOSPC) if operation.kind == "sync" else None
    entries = [Put("bucket", f"key-{number}", bytes(2**20)) for number in range(20)]
    with pytest.raises(LogPoisoned):
        log.append(*entries)


def test_an_unreadable_hint_is_not_a_missing_one(tmp_path: Path) -> None:
    """No crash leaves one, and without it damage among acknowledged entries could pass for a torn write."""
    with Log.open(tmp_path / "log") as log:
        log.append(put(1))
    hint = tmp_path / "log" / "hint"
    data = bytearray(hint.read_bytes())
    data[-1] ^= 1
    hint.write_bytes(data)
    with pytest.raises(Corrupt, match="hint"):
        Log.open(tmp_path / "log")
    assert [finding.what for finding in check_directory(RealFiles(), str(tmp_path / "log"))]
    hint.unlink()
    with Log.open(tmp_path / "log") as log:
        assert log.seq_last == 2


def test_a_registry_serves_one_open_log_after_the_other() -> None:
    """A program that reopens its log goes on with the registry that it exports."""
    registry = CollectorRegistry()
    for _ in range(2):
        with Log.open(None, registry=registry), pytest.raises(InputError, match="registry"):
            Log.open(None, registry=registry)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"x" * 24,
        bytearray(encode_put("b", "k", b"", time_us=0)),
        encode_put("b", "k", b"", time_us=0)[:-1],
        encode_put("b", "k", b"", time_us=0)[:-1] + b"\xff",
        bytes([Kind.PUT]) + bytes(24),
        bytes([Kind.APPEND]) + bytes(2) + b"\1" + bytes(21) + b"t",
    ],
)
def test_payloads_that_no_reader_would_accept_are_refused(payload: bytes) -> None:
    """Once it is in a segment nobody can read past it."""
    with Log.open(None) as log:
        with pytest.raises(InvalidEntry):
            log.append_payloads([payload])
        assert log.append(put(1)) == 2
        assert not list(log.check())


@pytest.mark.parametrize(
    "entry", ["x", 1, Put("b", "k", b"", origin="x"), Control(Kind.NOOP, {"a": object()})]
)  # type: ignore[arg-type]
def test_what_is_no_entry_is_a_typed_error(entry: object) -> None:
    """A traceback out of struct or CBOR tells a user nothing."""
    with Log.open(None) as log:
        with pytest.raises(InvalidEntry):
            log.append(entry)  # type: ignore[arg-type]
        assert log.append(put(1)) == 2


def test_settings_that_never_change_are_refused_however_they_come() -> None:
    """The engine's pages would differ from those of a replica that took them from `create`."""
    with pytest.raises(InvalidEntry):
        settings_entry({"page_keys": 128})
    with Log.open(None) as log, pytest.raises(InvalidEntry):
        log.append(Control(Kind.SETTINGS, {"page_keys": 128}))


@pytest.mark.parametrize("options", [{"compression": "lz4"}, {"segment_age_max_s": 0}])
def test_options_out_of_range_are_told_before_anything_opens(options: dict[str, object]) -> None:
    """They used to fail later, or spin a thread."""
    with pytest.raises(InvalidConfig):
        LogOptions(**options)  # type: ignore[arg-type]


def test_data_that_looks_like_frames_everywhere_is_judged_in_seconds(tmp_path: Path) -> None:
    """An image mask of zeros and ones matches the beginning of a frame at every byte."""
    rng = random.Random(1)
    value = bytes(rng.choices((0, 1, 3), k=2**20))
    log = Log.open(tmp_path / "log", options=LogOptions(sync_mode="fdatasync", segment_bytes=2**30))
    for number in range(45):
        log.append(Put("bucket", f"key-{number}", value))
    log.close()
    current = tmp_path / "log" / "current.log"
    (tmp_path / "log" / "hint").unlink()
    with current.open("r+b") as file:
        file.seek(2**20)
        file.write(b"\xff")
    with pytest.raises(Corrupt):
        Log.open(tmp_path / "log")


def test_reopening_after_a_kill_keeps_what_it_writes_again(tmp_path: Path) -> None:
    """Repair rewrites what lies above the hint, from wherever that ends, in parts: a write that zeroes the
    rest of its last block would take acknowledged entries with it."""
    with Log.open(tmp_path / "log", options=LogOptions(sync_mode="fdatasync")) as log:
        log.append(put(1))
    hint = (tmp_path / "log" / "hint").read_bytes()
    log = Log.open(tmp_path / "log", options=LogOptions(sync_mode="fdatasync"))
    for number in range(2, 50):
        log.append(Put("bucket", f"key-{number}", bytes([number]) * 70_001))
    shutil.copytree(tmp_path / "log", tmp_path / "killed", ignore=shutil.ignore_patterns("hint*"))
    log.close()
    (tmp_path / "killed" / "hint").write_bytes(hint)
    for _ in range(2):
        with Log.open(tmp_path / "killed") as log:
            assert [entry.key for entry in log.read(2)] == [f"key-{number}" for number in range(1, 50)]
            assert not list(log.check())


def test_a_forked_child_does_not_keep_the_log_locked(tmp_path: Path) -> None:
    """The lock is shared with it: a worker that lives on would keep everybody out."""
    log = Log.open(tmp_path / "log")
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    with pytest.raises(InputError):
        Log.open(tmp_path / "log")
    log.close()
    Log.open(tmp_path / "log").close()
    os.close(write_end)
    os.waitpid(child, 0)
    os.close(read_end)


class _InterruptedDeque(deque[Piece]):
    """Ctrl-C comes when a call returns."""

    interrupt = False

    def popleft(self) -> Piece:
        piece = super().popleft()
        if self.interrupt and threading.current_thread() is threading.main_thread():
            self.interrupt = False
            raise KeyboardInterrupt
        return piece


def test_an_interrupt_while_a_batch_is_taken_leaves_nobody_waiting() -> None:
    """What was neither in the queue nor in flight was settled by nobody, and its threads waited for ever."""
    log = Log.open(None)
    queue = _InterruptedDeque()
    log.wal._queue = queue
    queue.interrupt = True
    ticket = Ticket(0)
    ticket.future = AppendFuture()
    log.wal._enqueue(log._build([put(1)]), ticket, None)  # somebody's, in front of ours
    with pytest.raises(KeyboardInterrupt):
        log.append(put(2))
    assert ticket.future.result(60) == 2
    assert log.append(put(3)) == 4
    assert [entry.seq for entry in log.read()] == [1, 2, 3, 4]
    log.close()


def test_an_interrupt_after_the_lead_was_handed_over_leaves_the_next_leader_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing must still wait for that leader's write."""
    log = Log.open(None)
    hand_over = log.wal._hand_over

    def interrupted(_: Ticket | None = None) -> None:
        hand_over()
        log.wal._leading = True  # another thread takes it as soon as the lock is free
        raise KeyboardInterrupt

    monkeypatch.setattr(log.wal, "_hand_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.append(put(1))
    assert log.wal.failure is None
    assert log.wal._leading
    log.wal._leading = False
    log.close()


def test_an_interrupted_close_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the directory stays locked until the process ends."""
    log = Log.open(tmp_path / "log")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(log.wal._writer, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log.close()
    with pytest.raises(Closed):
        log.append(put(1))
    log.close()
    Log.open(tmp_path / "log").close()


def test_a_file_that_shrinks_under_a_search_has_no_frame_there() -> None:
    """Another process may cut it off between the question for its size and the read."""

    class Shorter:
        def read_at(self, offset: int, size: int) -> bytes:
            return bytes(10)

    assert not is_frame(Shorter(), 100, 1000)


@pytest.mark.parametrize("way", ["threads", "plain", "reopened", "behind"])
def test_a_footer_is_the_same_however_it_was_built(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the segment was written, in windows as they came, or from the file at the end."""

    class Still(RealClock):
        def now_us(self) -> int:
            return 1_700_000_000_000_000

    class Fixed(RealRandomness):
        def token(self, size: int) -> bytes:
            return bytes(range(size))

    def hashes(way: str) -> list[str]:
        files = MemoryFiles()
        seams = Seams(files=files, clock=Still(), randomness=Fixed())
        log = Log.open("log", seams=seams, options=LogOptions(segment_bytes=3 * 2**20))
        with monkeypatch.context() as patch:
            if way == "plain":
                patch.setattr(store, "vectorised", lambda: None)
                patch.setattr(footer, "vectorised", lambda: None)
            elif way == "behind":
                patch.setattr(store.SegmentStore, "_read_step", _only_at_the_end)
            rng = random.Random(7)
            for number in range(90):
                entries: list[Put | Delete] = [
                    Put("bucket", f"key-{rng.randrange(99)}", rng.randbytes(rng.randrange(3000)))
                    for _ in range(50)
                ]
                entries.append(Delete("bucket", f"key-{number}"))
                log.append(*entries)
                if way == "reopened" and number == 20:
                    log.close()
                    log = Log.open("log", seams=seams)
            log.seal()
            log.close()
        names = [name for name in files.list("log") if name.startswith("segment-")]
        assert len(names) > 1
        return [blake3(read_whole(files, f"log/{name}")).hexdigest() for name in names]

    assert hashes(way) == hashes("threads")


_read_step = store.SegmentStore._read_step


def _only_at_the_end(self: store.SegmentStore, least_bytes: int = store.READ_BYTES) -> bool:
    return least_bytes == 1 and _read_step(self, least_bytes)


def read_whole(files: MemoryFiles, path: str) -> bytes:
    file = files.open(path)
    return file.read_at(0, file.size())


def test_closing_a_failed_log_leaves_no_file_open(tmp_path: Path) -> None:
    """A spare was half made when the disk failed: its file stayed open as long as somebody held the log."""
    log = Log.open(tmp_path / "log")
    log.append(put(1))
    store = log.wal.store
    log.wal._housekeeper.stop()
    store._job = store._prepare_spare(2**22)
    next(store._job)
    log.wal._poison(OSError(5, "broken"))
    log.close()
    held = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not [path for path in held if path.startswith(str(tmp_path))]
