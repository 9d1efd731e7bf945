"""engine/log/repair: a copy holds what is good and nothing else, and the report says what is missing."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowwater.engine.format.entries import Entry, Put
from lowwater.engine.format.format import FRAME_BYTES, HEADER_BYTES, TRAILER_BYTES
from lowwater.engine.log.chain import settings_entry
from lowwater.engine.log.check import check_directory
from lowwater.engine.log.compress import compress_segment
from lowwater.engine.log.directory import HINT, Hint, read_sealed, segment_name, write_hint
from lowwater.engine.log.log import Log, LogOptions
from lowwater.engine.log.repair import RepairReport, repair_log
from lowwater.engine.seams.real import RealFile, RealFiles
from lowwater.engine.testing.damage import (
    current_path,
    flip,
    make_log,
    read,
    sealed_paths,
    seqs_of,
    truncate,
    write,
)
from lowwater.errors import (
    Corrupt,
    DirectoryLocked,
    DirectoryNotWritable,
    DiskFull,
    InputError,
    NewerVersion,
    NotFound,
    NotLowwater,
)

FILES = RealFiles()
ENTRIES = 151


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = str(tmp_path / "source")
    make_log(path)
    return path


@pytest.fixture
def target(tmp_path: Path) -> str:
    return str(tmp_path / "target")


def entries_of(directory: str) -> list[Entry]:
    """Opening the copy, as its owner will."""
    with Log.open(directory, create=False) as log:
        return list(log.read())


def contents(directory: str) -> dict[str, bytes]:
    return {name: read(f"{directory}/{name}") for name in sorted(os.listdir(directory))}


def repaired(source: str, target: str, original: list[Entry]) -> RepairReport:
    """Repair, and hold the copy to what is always true of one."""
    before = contents(source) if os.path.isdir(source) else {}
    planned = repair_log(FILES, source, target, dry_run=True)
    assert not os.path.exists(target)
    report = repair_log(FILES, source, target)
    if before:
        assert contents(source) == before, "the source was changed"
    assert (planned.kept, planned.cut, planned.losses) == (report.kept, report.cut, report.losses)
    assert report.written
    assert HINT not in os.listdir(target)
    assert list(check_directory(FILES, target)) == []
    held = entries_of(target)
    assert held == original[: len(held)], "the copy is not the beginning of the log"
    assert (report.seq_first, report.seq_last) == (held[0].seq, held[-1].seq)
    assert report.frames == len(held)
    assert report.is_whole == (len(held) == len(original))
    assert list(check_directory(FILES, target)) == []
    return report


@pytest.fixture
def original(source: str, tmp_path: Path) -> list[Entry]:
    copy = str(tmp_path / "original")
    shutil.copytree(source, copy)
    return entries_of(copy)


# ---------------------------------------------------------------------------- nothing is lost


def test_a_sound_log_is_copied_byte_for_byte(source: str, target: str, original: list[Entry]) -> None:
    """Repair is no way to change a log."""
    report = repaired(source, target, original)
    assert report.is_whole
    assert [kept.done for kept in report.kept] == [()] * len(report.kept)
    for path in sealed_paths(source):
        assert read(path) == read(f"{target}/{path.rpartition('/')[2]}")


@pytest.mark.parametrize("offset", [-20, -TRAILER_BYTES - 10, -1])
def test_a_damaged_footer_or_trailer_is_built_again(
    source: str, target: str, original: list[Entry], offset: int
) -> None:
    """All that is in it follows from the frames."""
    path = sealed_paths(source)[1]
    whole = read(path)
    flip(path, offset)
    report = repaired(source, target, original)
    assert report.is_whole
    assert [kept.done for kept in report.kept if kept.done] == [("footer built again",)]
    assert read(f"{target}/{path.rpartition('/')[2]}") == whole


def test_a_missing_footer_is_built_again(source: str, target: str, original: list[Entry]) -> None:
    """A copy that was interrupted ends anywhere, also just after the frames."""
    path = sealed_paths(source)[1]
    whole = read(path)
    body_bytes = read_sealed(FILES, path)[1].body_bytes
    for size in (body_bytes, body_bytes + 100):
        write(path, whole)
        truncate(path, size)
        shutil.rmtree(target, ignore_errors=True)
        assert repaired(source, target, original).is_whole
        assert read(f"{target}/{path.rpartition('/')[2]}") == whole


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("offset", [0, 10, 20, 60, HEADER_BYTES - 1])
def test_a_damaged_header_is_put_back_where_it_can_be_proved(
    source: str, target: str, original: list[Entry], number: int, offset: int
) -> None:
    """The segment before it and its own first frame tell all that was in it."""
    path = sealed_paths(source)[number]
    whole = read(path)
    flip(path, offset)
    report = repaired(source, target, original)
    assert report.is_whole
    assert ("header put back",) in [kept.done for kept in report.kept]
    assert read(f"{target}/{path.rpartition('/')[2]}") == whole


def test_a_header_of_which_nothing_is_left_is_proved_by_the_footer(
    source: str, target: str, original: list[Entry]
) -> None:
    """The hash of the first block covers it."""
    path = sealed_paths(source)[1]
    whole = read(path)
    write(path, bytes(HEADER_BYTES) + whole[HEADER_BYTES:])
    assert repaired(source, target, original).is_whole
    assert read(f"{target}/{path.rpartition('/')[2]}") == whole


def test_a_header_without_a_footer_is_proved_by_the_segment_after_it(
    source: str, target: str, original: list[Entry]
) -> None:
    """Which names the hash of what it follows."""
    path = sealed_paths(source)[1]
    whole = read(path)
    write(path, bytes(HEADER_BYTES) + whole[HEADER_BYTES:-300])
    report = repaired(source, target, original)
    assert report.is_whole
    assert ("header put back", "footer built again") in [kept.done for kept in report.kept]
    assert read(f"{target}/{path.rpartition('/')[2]}") == whole


def test_a_damaged_header_of_the_current_segment_is_proved_by_its_checksum(
    source: str, target: str, original: list[Entry]
) -> None:
    """It has no footer and nothing after it, but its own checksum is still there."""
    flip(current_path(source), 40)
    assert repaired(source, target, original).is_whole


@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_lost_name_is_restored(source: str, target: str, original: list[Entry], number: int) -> None:
    """As a file system check leaves it in lost+found."""
    path = sealed_paths(source)[number]
    os.rename(path, f"{source}/#131077")
    report = repaired(source, target, original)
    assert report.is_whole
    assert ("renamed",) in [kept.done for kept in report.kept]


def test_swapped_names_are_set_right(source: str, target: str, original: list[Entry]) -> None:
    """What is in a segment says which it is."""
    first, second = sealed_paths(source)[1:3]
    os.rename(first, f"{source}/x")
    os.rename(second, first)
    os.rename(f"{source}/x", second)
    assert repaired(source, target, original).is_whole


def test_the_current_segment_is_known_by_any_name(source: str, target: str, original: list[Entry]) -> None:
    """It links to the segment before it."""
    os.rename(current_path(source), f"{source}/old.log")
    assert repaired(source, target, original).is_whole


def test_a_segment_from_the_archive_fills_the_place_of_a_missing_one(
    source: str, target: str, original: list[Entry]
) -> None:
    """Putting it there is all that an operator has to do."""
    path = sealed_paths(source)[1]
    whole = read(path)
    file = FILES.open(path)
    parts: list[bytes] = []
    compress_segment(file, parts.append)
    file.close()
    os.remove(path)
    write(f"{source}/from-the-archive.zst", b"".join(parts))
    report = repaired(source, target, original)
    assert report.is_whole
    assert ("decompressed",) in [kept.done for kept in report.kept]
    assert read(f"{target}/{path.rpartition('/')[2]}") == whole


def test_of_two_copies_the_better_one_is_kept(source: str, target: str, original: list[Entry]) -> None:
    """One of them may be the reason for the repair."""
    path = sealed_paths(source)[1]
    shutil.copy(path, f"{source}/backup")
    flip(path, 500)
    report = repaired(source, target, original)
    assert report.is_whole
    assert report.losses.left_out == [(path, "nothing in it is missing in the copy")]


def test_a_segment_that_waits_for_its_footer_is_sealed(
    source: str, target: str, original: list[Entry]
) -> None:
    """A crash may leave it so."""
    path = sealed_paths(source)[-1]
    whole = read(path)
    os.rename(path, f"{source}/{segment_name(*seqs_of(path), sealed=False)}")
    truncate(f"{source}/{segment_name(*seqs_of(path), sealed=False)}", read_sealed_body(path, whole))
    report = repaired(source, target, original)
    assert ("sealed",) in [kept.done for kept in report.kept]
    assert read(f"{target}/{path.rpartition('/')[2]}") == whole


def read_sealed_body(path: str, whole: bytes) -> int:
    write(path + ".copy", whole)
    body_bytes = read_sealed(FILES, path + ".copy")[1].body_bytes
    os.remove(path + ".copy")
    return body_bytes


def test_a_log_with_changed_settings_is_whole(tmp_path: Path, target: str) -> None:
    """Segments that are cut by other settings follow on one another where an entry says so."""
    source = str(tmp_path / "source")
    with Log.open(source, options=LogOptions(segment_bytes=4096, block_bytes=1024)) as log:
        log.append(settings_entry({"segment_bytes": 8192, "block_bytes": 2048}))
        for number in range(200):
            log.append(Put("users", f"{number}", bytes(100)))
    flip(sealed_paths(source)[1], 70)
    assert repair_log(FILES, source, target).is_whole
    assert list(check_directory(FILES, target)) == []


def test_a_log_that_was_purged_keeps_its_beginning(source: str, target: str) -> None:
    """It begins where its first segment does; nobody can say from the files what was before."""
    os.remove(sealed_paths(source)[0])
    report = repair_log(FILES, source, target)
    assert report.is_whole
    assert report.seq_first == seqs_of(sealed_paths(source)[0])[0]
    assert list(check_directory(FILES, target)) == []


# ---------------------------------------------------------------------------- something is lost


def test_the_log_ends_before_the_first_damaged_frame(source: str, target: str, original: list[Entry]) -> None:
    """What comes after a gap cannot be replayed as if there were none."""
    path = sealed_paths(source)[1]
    first, last = seqs_of(path)
    flip(path, 1500)
    report = repaired(source, target, original)
    assert report.cut is not None
    assert report.cut.path == path
    assert report.seq_last is not None
    assert first < report.seq_last < last
    assert report.losses.lost == [(report.seq_last + 1, report.seq_last + 1)]
    assert report.losses.unconnected[0].seq_first == report.seq_last + 2
    assert report.losses.unconnected[-1].seq_last == ENTRIES
    assert sum(run.frames for run in report.losses.unconnected) == ENTRIES - report.seq_last - 1
    assert sealed_paths(target) == [f"{target}/{segment_name(*seqs_of(sealed_paths(source)[0]))}"]


def test_damage_in_the_first_frame_of_a_segment_leaves_no_current_segment(
    source: str, target: str, original: list[Entry]
) -> None:
    """A segment without a frame is none."""
    path = sealed_paths(source)[1]
    flip(path, HEADER_BYTES + FRAME_BYTES + 3)
    report = repair_log(FILES, source, target)
    assert report.seq_last == seqs_of(path)[0] - 1
    assert sorted(os.listdir(target)) == ["lock", segment_name(*seqs_of(sealed_paths(source)[0]))]
    with Log.open(target) as log:
        assert log.append(Put("users", "next", b"")) == report.seq_last + 1
    assert list(check_directory(FILES, target)) == []


def test_a_missing_segment_ends_the_log_and_is_told_as_a_gap(
    source: str, target: str, original: list[Entry]
) -> None:
    """The seqs of the gap are lost for certain; what follows is there and follows on nothing."""
    path = sealed_paths(source)[1]
    first, last = seqs_of(path)
    os.remove(path)
    report = repaired(source, target, original)
    assert report.seq_last == first - 1
    assert report.losses.lost == [(first, last)]
    assert report.losses.unconnected[0].seq_first == last + 1


def test_a_truncated_segment_ends_the_log(source: str, target: str, original: list[Entry]) -> None:
    """Its name tells how much is lost."""
    path = sealed_paths(source)[-1]
    truncate(path, 1000)
    report = repaired(source, target, original)
    assert report.losses.lost == [((report.seq_last or 0) + 1, seqs_of(path)[1])]


def test_a_header_that_nothing_proves_is_not_invented(
    source: str, target: str, original: list[Entry]
) -> None:
    """Its frames may be those of another log."""
    path = current_path(source)
    write(path, bytes(HEADER_BYTES) + read(path)[HEADER_BYTES:])
    report = repaired(source, target, original)
    assert report.seq_last == seqs_of(sealed_paths(source)[-1])[1]
    (run,) = report.losses.unconnected
    assert (run.path, run.seq_last) == (path, ENTRIES)


def test_a_header_is_not_put_back_before_frames_of_another_log(
    source: str, target: str, original: list[Entry], tmp_path: Path
) -> None:
    """Everything fits, the seqs too, and the hashes say no."""
    other = str(tmp_path / "other")
    make_log(other)
    path = sealed_paths(source)[1]
    theirs = bytearray(read(next(name for name in sealed_paths(other) if seqs_of(name) == seqs_of(path))))
    theirs[:HEADER_BYTES] = bytes(HEADER_BYTES)
    write(path, bytes(theirs))
    report = repaired(source, target, original)
    assert report.seq_last == seqs_of(path)[0] - 1
    assert report.cut is not None


def test_a_segment_of_another_history_ends_the_log(
    source: str, target: str, original: list[Entry], tmp_path: Path
) -> None:
    """It is sound by itself, and the hash that it follows is not there."""
    other = str(tmp_path / "other")
    make_log(other)
    path = sealed_paths(source)[2]
    shutil.copy(next(name for name in sealed_paths(other) if seqs_of(name) == seqs_of(path)), path)
    report = repaired(source, target, original)
    assert report.cut is not None
    assert "another history" in report.cut.what
    assert report.seq_last == seqs_of(path)[0] - 1


def test_a_file_of_another_log_is_left_out(
    source: str, target: str, original: list[Entry], tmp_path: Path
) -> None:
    """Somebody kept it here. It is no part of this log, and no loss."""
    other = str(tmp_path / "other")
    make_log(other, entries=400)
    shutil.copy(sealed_paths(other)[-1], f"{source}/theirs.bak")
    write(f"{source}/notes.txt", b"do not delete")
    report = repaired(source, target, original)
    assert report.is_whole
    assert sorted(why for _, why in report.losses.left_out) == [
        "it belongs to another log",
        "it is no segment",
    ]


def test_a_torn_write_is_removed_and_is_no_loss(source: str, target: str, original: list[Entry]) -> None:
    """Nothing in it was acknowledged."""
    os.remove(f"{source}/{HINT}")
    path = current_path(source)
    data = read(path).rstrip(b"\0")
    write(path, data + bytes(64) + b"\x99torn" * 20 + bytes(1000))
    report = repaired(source, target, original)
    assert report.is_whole
    assert report.torn_bytes > 0


def test_what_the_hint_vouches_for_is_lost_when_it_is_not_there(
    source: str, target: str, original: list[Entry]
) -> None:
    """An end that is missing leaves no other trace."""
    os.remove(current_path(source))
    report = repaired(source, target, original)
    last = seqs_of(sealed_paths(source)[-1])[1]
    assert report.losses.lost == [(last + 1, ENTRIES)]
    assert not report.is_whole


def test_a_copy_carries_no_hint_that_would_keep_it_from_opening(source: str, target: str) -> None:
    """The old hint vouches for entries that the copy does not have."""
    write_hint(FILES, source, Hint(1, 1000, 10**6, "fsync"), durable=True)
    report = repair_log(FILES, source, target)
    assert report.losses.lost == [(ENTRIES + 1, 10**6)]
    with Log.open(target) as log:
        assert log.seq_last == ENTRIES


def test_a_log_without_a_beginning_is_not_written(source: str, target: str) -> None:
    """Whether to go on without it is for its owner to say: by moving the file away."""
    path = sealed_paths(source)[0]
    write(path, bytes(300) + read(path)[300:])
    report = repair_log(FILES, source, target)
    assert not report.written
    assert not report.kept
    assert not report.is_whole
    assert report.losses.unconnected[-1].seq_last == ENTRIES
    assert not os.path.exists(target)
    os.remove(path)
    assert repair_log(FILES, source, target).written


def test_any_damage_leaves_a_sound_copy(source: str, target: str, original: list[Entry]) -> None:
    """Wherever it is, and whatever it is: the copy opens, and is the beginning of the log."""
    chooser = random.Random(11)
    names = sorted(os.listdir(source))
    for round_number in range(60):
        damaged = f"{source}-{round_number}"
        shutil.copytree(source, damaged)
        for _ in range(chooser.randint(1, 3)):
            path = f"{damaged}/{chooser.choice([name for name in names if name.endswith('.log')])}"
            if not os.path.exists(path) or not os.path.getsize(path):
                continue
            size = os.path.getsize(path)
            match chooser.randrange(6):
                case 0:
                    os.remove(path)
                case 1:
                    truncate(path, chooser.randrange(size))
                case 2:
                    data = bytearray(read(path))
                    start = chooser.randrange(size)
                    data[start : start + 512] = bytes(len(data[start : start + 512]))
                    write(path, bytes(data))
                case _:
                    flip(path, chooser.randrange(size), 1 << chooser.randrange(8))
        report = repair_log(FILES, damaged, target)
        if report.written:
            assert list(check_directory(FILES, target)) == [], (round_number, report)
            held = entries_of(target)
            first = held[0].seq
            assert held == original[first - 1 : first - 1 + len(held)], round_number
            assert not report.is_whole or held[-1].seq == ENTRIES, (round_number, report)
            shutil.rmtree(target)
        shutil.rmtree(damaged)


# ---------------------------------------------------------------------------- bad disks


class BadSectorFile(RealFile):
    bad: range = range(0)

    def read_at(self, offset: int, size: int) -> bytes:
        if offset < self.bad.stop and self.bad.start < offset + size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_at(offset, size)


class BadSectorFiles(RealFiles):
    def __init__(self, path: str, bad: range) -> None:
        self._path, self._bad = path, bad

    def open(
        self, path: str, *, write: bool = False, create: bool = False, sequential: bool = False
    ) -> RealFile:
        file = super().open(path, write=write, create=create)
        if path != self._path:
            return file
        bad = BadSectorFile(os.dup(file._fd))
        bad.bad = self._bad
        file.close()
        return bad


def test_a_sector_that_cannot_be_read_is_damage_and_no_failure(tmp_path: Path, target: str) -> None:
    """A disk that is failing is the reason for most repairs."""
    source = str(tmp_path / "source")
    make_log(source, entries=400, segment_bytes=16384)
    path = sealed_paths(source)[1]
    report = repair_log(BadSectorFiles(path, range(8192, 12288)), source, target)
    assert report.cut is not None
    assert report.cut.path == path
    assert report.seq_last is not None
    assert report.seq_last > seqs_of(path)[0]
    assert any(run.path == path for run in report.losses.unconnected)
    assert list(check_directory(FILES, target)) == []


# ---------------------------------------------------------------------------- one segment


def test_a_single_segment_becomes_a_log_of_its_own(source: str, target: str) -> None:
    """Raw or compressed: what is in it can then be opened and read."""
    path = sealed_paths(source)[1]
    flip(path, -20)
    report = repair_log(FILES, path, target)
    assert report.is_whole
    assert (report.seq_first, report.seq_last) == seqs_of(path)
    assert entries_of(target)[0].seq == seqs_of(path)[0]


# ---------------------------------------------------------------------------- what is refused


def test_a_target_that_holds_anything_is_refused(source: str, target: str) -> None:
    """It may be the only good copy."""
    FILES.make_directory(target)
    write(f"{target}/precious", b"1")
    with pytest.raises(InputError, match="something at the target") as caught:
        repair_log(FILES, source, target)
    assert caught.value.hint
    assert os.listdir(target) == ["precious"]
    os.remove(f"{target}/precious")
    assert repair_log(FILES, source, target).written, "an empty directory is no obstacle"
    with pytest.raises(InputError, match="something at the target"):
        repair_log(FILES, source, f"{source}/lock/../../target/current.log")


@pytest.mark.parametrize("where", ["", "/copy", "/../source"])
def test_a_target_in_the_source_is_refused(source: str, where: str) -> None:
    """The copy would be part of the next repair."""
    before = contents(source)
    with pytest.raises(InputError, match="would lie in"):
        repair_log(FILES, source, source + where)
    assert contents(source) == before


def test_a_source_with_the_name_of_a_copy_under_way_is_refused(source: str, target: str) -> None:
    """What is left of a former repair is removed first: never the source."""
    os.rename(source, f"{target}.repairing")
    with pytest.raises(InputError, match="would lie in"):
        repair_log(FILES, f"{target}.repairing", target)
    assert len(contents(f"{target}.repairing")) > 3


def test_a_log_that_a_process_has_open_is_refused(source: str, target: str) -> None:
    """What it writes meanwhile would look like damage."""
    with Log.open(source):
        with pytest.raises(DirectoryLocked, match=f"process {os.getpid()}") as caught:
            repair_log(FILES, source, target)
        assert "stop that process" in caught.value.hint
        with pytest.raises(DirectoryLocked):
            repair_log(FILES, current_path(source), target)
        assert repair_log(FILES, sealed_paths(source)[0], target).written, "a sealed segment never changes"
    shutil.rmtree(target)
    assert repair_log(FILES, source, target).written


@pytest.mark.parametrize(("number", "is_refused"), [(errno.EACCES, True), (errno.EROFS, False)])
def test_a_lock_that_cannot_be_taken_is_refused_unless_nobody_can_write(
    source: str, target: str, number: int, is_refused: bool
) -> None:
    """A read-only file system is a good place to repair from; another's files may be in use."""

    class NoLockFiles(RealFiles):
        def lock(self, path: str, owner: str) -> RealFile:
            if path.startswith(source):
                raise OSError(number, os.strerror(number))
            return super().lock(path, owner)

    if is_refused:
        with pytest.raises(DirectoryNotWritable, match="cannot tell whether a process has") as caught:
            repair_log(NoLockFiles(), source, target)
        assert "copy" in caught.value.hint
    else:
        assert repair_log(NoLockFiles(), source, target).is_whole


def test_nobody_can_open_the_source_while_it_is_repaired(source: str, target: str) -> None:
    """Its lock is held, and keeps the bytes that it had."""
    steps = repair_steps_of(source, target)
    next(steps)
    with pytest.raises(DirectoryLocked):
        Log.open(source)
    for _ in steps:
        pass
    Log.open(source).close()


def repair_steps_of(source: str, target: str) -> Iterator[Any]:
    from lowwater.engine.log.repair import repair_steps

    return repair_steps(FILES, source, target)


def test_what_is_no_log_is_refused(tmp_path: Path, target: str) -> None:
    """Each wrong path has its own error."""
    empty = str(tmp_path / "empty")
    FILES.make_directory(empty)
    with pytest.raises(NotFound, match="there is no log here"):
        repair_log(FILES, empty, target)
    with pytest.raises(NotFound, match="there is nothing there"):
        repair_log(FILES, str(tmp_path / "missing"), target)
    write(f"{empty}/text", b"hello")
    with pytest.raises(NotLowwater):
        repair_log(FILES, f"{empty}/text", target)
    assert not os.path.exists(target)


@pytest.mark.parametrize("name", ["future-minor", "future-major", "future-kind", "future-flag"])
def test_a_newer_format_is_refused_not_cut(target: str, name: str) -> None:
    """What this version does not know is no damage."""
    golden = str(Path(__file__).parents[1] / "golden" / name)
    with pytest.raises(NewerVersion) as caught:
        repair_log(FILES, golden, target)
    assert "upgrade" in caught.value.hint
    assert not os.path.exists(target)


# ---------------------------------------------------------------------------- crashes of the repair


class StopFiles(RealFiles):
    """Counts what changes something, and stops at one of them. Remembers what was not synced."""

    def __init__(self, stop_at: int = 0, error: Callable[[], BaseException] | None = None) -> None:
        self.stop_at = stop_at
        self.error = error or KeyboardInterrupt
        self.operations = 0
        self.unsynced: set[str] = set()
        self.renamed_unsynced: set[str] | None = None

    def count(self) -> None:
        self.operations += 1
        if self.operations == self.stop_at:
            raise self.error()

    def open(
        self, path: str, *, write: bool = False, create: bool = False, sequential: bool = False
    ) -> RealFile:
        if not create:
            return super().open(path, write=write)
        self.count()
        self.unsynced.add(path.rpartition("/")[0])
        file = super().open(path, create=True)
        stop_file = StopFile(os.dup(file._fd))
        stop_file.files, stop_file.path = self, path
        file.close()
        return stop_file

    def rename(self, old: str, new: str) -> None:
        self.count()
        self.renamed_unsynced = {path for path in self.unsynced if path.startswith(old)}
        super().rename(old, new)
        self.unsynced.add(new.rpartition("/")[0])

    def sync_directory(self, directory: str) -> None:
        self.count()
        super().sync_directory(directory)
        self.unsynced.discard(directory)


class StopFile(RealFile):
    files: StopFiles
    path: str

    def write_at(self, offset: int, buffers: Any, sync: Any = "none") -> int:
        self.files.count()
        self.files.unsynced.add(self.path)
        return super().write_at(offset, buffers, sync)

    def sync(self, mode: Any) -> None:
        self.files.count()
        super().sync(mode)
        self.files.unsynced.discard(self.path)


StopFile.__slots__ = ()  # type: ignore[attr-defined]


def test_wherever_a_repair_stops_there_is_a_whole_copy_or_none(source: str, target: str) -> None:
    """And the next repair is not disturbed by what the last has left."""
    flip(sealed_paths(source)[1], 1500)
    flip(sealed_paths(source)[0], -20)
    before = contents(source)
    counting = StopFiles()
    report = repair_log(counting, source, target)
    whole = contents(target)
    shutil.rmtree(target)
    for number in range(1, counting.operations + 1):
        with pytest.raises(KeyboardInterrupt):
            repair_log(StopFiles(number), source, target)
        assert contents(source) == before
        if os.path.exists(target):
            assert contents(target).keys() == whole.keys(), number
            assert list(check_directory(FILES, target)) == []
            shutil.rmtree(target)
        else:
            left = os.listdir(f"{target}.repairing") if os.path.exists(f"{target}.repairing") else []
            assert set(left) <= {"lock"}, "what was written takes no room"
    again = repair_log(FILES, source, target)
    assert again.kept == report.kept
    assert {name: data for name, data in contents(target).items() if name != "lock"} == {
        name: data for name, data in whole.items() if name != "lock"
    }


def test_a_killed_repair_leaves_no_copy_and_does_not_disturb_the_next(source: str, target: str) -> None:
    """Nothing runs after kill -9: what it has written stays until then."""
    with subprocess.Popen(
        [sys.executable, "-c", _REPAIR_AND_HANG, source, target],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(DirectoryLocked):
            repair_log(FILES, source, target)
        child.kill()
    assert not os.path.exists(target)
    assert len(os.listdir(f"{target}.repairing")) > 1
    assert repair_log(FILES, source, target).is_whole
    assert not os.path.exists(f"{target}.repairing")


_REPAIR_AND_HANG = """
import sys
from lowwater.engine.seams.real import RealFiles
from lowwater.engine.log.repair import repair_log

class HangingFiles(RealFiles):
    def rename(self, old, new):
        print("about to rename", flush=True)
        sys.stdin.read()
        import time
        time.sleep(60)

repair_log(HangingFiles(), sys.argv[1], sys.argv[2])
"""


def test_everything_is_durable_before_the_copy_has_its_name(source: str, target: str) -> None:
    """A copy with a name is one that a power loss leaves whole."""
    files = StopFiles()
    repair_log(files, source, target)
    assert files.renamed_unsynced == set()
    assert files.unsynced == set()


def test_a_full_disk_is_told_and_leaves_no_room_taken(source: str, target: str) -> None:
    """The target is often the last disk that has any room."""
    files = StopFiles(6, lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(DiskFull):
        repair_log(files, source, target)
    assert not os.path.exists(target)
    assert set(os.listdir(f"{target}.repairing")) <= {"lock"}


def test_files_that_are_not_of_a_repair_are_never_removed(source: str, target: str) -> None:
    """Even in a directory that has the name of one under way."""
    FILES.make_directory(f"{target}.repairing")
    write(f"{target}.repairing/precious", b"1")
    with pytest.raises(InputError, match="precious"):
        repair_log(FILES, source, target)
    assert read(f"{target}.repairing/precious") == b"1"


def test_a_disk_that_gives_other_bytes_each_time_is_told(source: str, target: str) -> None:
    """The copy is checked before it gets its name."""

    class FickleFile(RealFile):
        reads = 0
        good = 10**6

        def read_at(self, offset: int, size: int) -> bytes:
            data = bytearray(super().read_at(offset, size))
            FickleFile.reads += 1
            if FickleFile.reads > FickleFile.good and len(data) > 3000:
                data[2000] ^= 1
            return bytes(data)

    class FickleFiles(RealFiles):
        def open(
            self, path: str, *, write: bool = False, create: bool = False, sequential: bool = False
        ) -> RealFile:
            file = super().open(path, write=write, create=create)
            if not path.startswith(source) or write:
                return file
            fickle = FickleFile(os.dup(file._fd))
            file.close()
            return fickle

    repair_log(FickleFiles(), source, target, dry_run=True)
    FickleFile.good, FickleFile.reads = FickleFile.reads, 0
    with pytest.raises(Corrupt, match="not what was read before") as caught:
        repair_log(FickleFiles(), source, target)
    assert "another" in caught.value.hint
    assert not os.path.exists(target)
