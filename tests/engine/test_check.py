"""engine/log/check.py: each kind of damage is found, and told with where it is and what to do."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowwater.engine.format.entries import Control, Put
from lowwater.engine.format.format import (
    FRAME_BYTES,
    HEADER_BYTES,
    TRAILER_BYTES,
    Extras,
    Kind,
    SegmentHeader,
    encode_frames,
    encode_payload,
    frame_checksum,
)
from lowwater.engine.log.chain import create_entry, seal_entry, settings_entry
from lowwater.engine.log.check import (
    Finding,
    Progress,
    check_directory,
    check_directory_steps,
    check_segment,
    require_log,
)
from lowwater.engine.log.compress import compress_segment
from lowwater.engine.log.describe import describe_segment
from lowwater.engine.log.directory import HINT, Hint, read_hint, read_sealed, segment_name, write_hint
from lowwater.engine.log.log import Log, LogOptions
from lowwater.engine.log.scan import scan_frames
from lowwater.engine.seams.real import RealFiles
from lowwater.engine.testing.damage import current_path, flip, make_log, read, seqs_of, truncate, write
from lowwater.errors import Corrupt, NotFound, NotLowwater

FILES = RealFiles()


@pytest.fixture
def directory(tmp_path: Path) -> str:
    path = str(tmp_path / "log")
    make_log(path)
    return path


def sealed(directory: str) -> list[str]:
    return sorted(f"{directory}/{name}" for name in os.listdir(directory) if name.startswith("segment-"))


def found(directory: str, what: str, *, where: str | None = None) -> Finding:
    """The finding that says so. Whatever is found has a place and a hint."""
    findings = list(check_directory(FILES, directory))
    for finding in findings:
        assert finding.where.startswith(directory), finding
        assert finding.hint, finding
    fitting = [finding for finding in findings if what in finding.what and where in (None, finding.where)]
    assert fitting, findings
    return fitting[0]


def body_end(path: str) -> int:
    """Where the frames of an unsealed segment end."""
    file = FILES.open(path)
    try:
        return scan_frames(file, SegmentHeader.decode(file.read_at(0, HEADER_BYTES)), stop=file.size()).end
    finally:
        file.close()


# ---------------------------------------------------------------------------- sound logs


def test_a_sound_log_has_no_findings(directory: str) -> None:
    """A check that cries wolf is switched off."""
    assert list(check_directory(FILES, directory)) == []
    for path in sealed(directory):
        assert list(check_segment(FILES, path)) == []
    assert list(check_segment(FILES, current_path(directory))) == []


def test_progress_counts_every_file_and_every_entry_once(directory: str) -> None:
    """The command line tells from it how much was checked."""
    steps = list(check_directory_steps(FILES, directory))
    assert all(isinstance(step, Progress) for step in steps)
    assert len(steps) == len(sealed(directory)) + 1
    assert sum(step.frames for step in steps if isinstance(step, Progress)) == 151


def test_checking_changes_nothing(directory: str) -> None:
    """People check what they want to understand, and before they repair it."""
    flip(sealed(directory)[1], 500)
    before = {name: read(f"{directory}/{name}") for name in os.listdir(directory)}
    list(check_directory(FILES, directory))
    assert {name: read(f"{directory}/{name}") for name in os.listdir(directory)} == before


def test_an_open_log_is_checked_up_to_what_is_durable(directory: str) -> None:
    """`Log.check` runs beside the writer."""
    with Log.open(directory) as log:
        log.append(Put("users", "new", b"value"))
        assert list(log.check()) == []


def test_a_log_that_another_process_writes_has_no_findings(tmp_path: Path) -> None:
    """Segments are rotated, sealed and renamed while they are read."""
    directory = str(tmp_path / "log")
    make_log(directory, entries=1)
    with subprocess.Popen(
        [sys.executable, "-c", _WRITE_UNTIL_KILLED, directory],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(8):
            findings = [item for item in check_directory(FILES, directory) if item.severity == "error"]
            assert findings == []
        writer.kill()
    assert [item for item in check_directory(FILES, directory) if item.severity == "error"] == []


_WRITE_UNTIL_KILLED = """
import sys
from lowwater.engine.format.entries import Put
from lowwater.engine.log.log import Log

with Log.open(sys.argv[1]) as log:
    log.append(Put("users", "ready", b"yes"))
    print("ready", flush=True)
    for number in range(200_000):
        log.append(*[Put("users", f"user-{number}-{item}", bytes(100)) for item in range(10)])
"""


# ---------------------------------------------------------------------------- a flipped byte


def test_a_flipped_byte_in_a_header_is_found(directory: str) -> None:
    """The header is what links a segment to the log."""
    path = sealed(directory)[1]
    flip(path, 20)
    finding = found(directory, "header's checksum", where=path)
    assert finding.severity == "error"
    assert finding.offset == 0


def test_a_flipped_byte_in_a_frame_is_found_with_its_place(directory: str) -> None:
    """The seq before it tells what is good; the offset, where to look."""
    path = sealed(directory)[1]
    flip(path, HEADER_BYTES + FRAME_BYTES + 30)
    finding = found(directory, "frame's checksum", where=path)
    assert finding.offset == HEADER_BYTES
    assert finding.seq == seqs_of(path)[0] - 1
    block = found(directory, "a block's hash", where=path)
    assert block.offset == 0


def test_a_flipped_byte_in_the_footer_is_found(directory: str) -> None:
    """A reader would look for keys in the wrong place."""
    path = sealed(directory)[0]
    flip(path, -TRAILER_BYTES - 10)
    finding = found(directory, "the footer's hash", where=path)
    assert finding.offset == read_sealed(FILES, path)[1].body_bytes


def test_a_flipped_byte_in_the_padding_is_found(directory: str) -> None:
    """No byte of a sealed segment is free to change."""
    path = next(path for path in sealed(directory) if read_sealed(FILES, path)[1].body_bytes % 64)
    flip(path, read_sealed(FILES, path)[1].body_bytes)
    found(directory, "the footer's hash", where=path)


def test_a_flipped_byte_in_the_trailer_is_found(directory: str) -> None:
    """Without its trailer a segment has no end."""
    path = sealed(directory)[2]
    flip(path, -20)
    finding = found(directory, "trailer's checksum", where=path)
    assert finding.offset == os.path.getsize(path) - TRAILER_BYTES


def test_a_flipped_byte_in_the_current_segment_is_found(directory: str) -> None:
    """Below the hint nothing can be a torn write."""
    path = current_path(directory)
    flip(path, HEADER_BYTES + FRAME_BYTES + 30)
    assert found(directory, "", where=path).offset == HEADER_BYTES
    flip(path, HEADER_BYTES + FRAME_BYTES + 30)
    flip(path, 20)
    found(directory, "header", where=path)


def test_any_flipped_byte_of_any_file_is_found(directory: str) -> None:
    """Tests above know where things are; damage does not."""
    chooser = random.Random(7)
    for path in sealed(directory):
        for _ in range(25):
            offset, mask = chooser.randrange(os.path.getsize(path)), 1 << chooser.randrange(8)
            flip(path, offset, mask)
            assert list(check_directory(FILES, directory)), (path, offset, mask)
            assert list(check_segment(FILES, path)), (path, offset, mask)
            flip(path, offset, mask)
    assert list(check_directory(FILES, directory)) == []


# ---------------------------------------------------------------------------- files


def test_a_truncated_segment_is_found(directory: str) -> None:
    """Wherever it ends: inside a frame, or just after one."""
    path = sealed(directory)[1]
    whole = read(path)
    header_end = read_sealed(FILES, path)[1].body_bytes
    for size in (0, 50, HEADER_BYTES, 1000, header_end, len(whole) - 1):
        truncate(path, size)
        assert any(item.severity == "error" for item in check_directory(FILES, directory)), size
        found(directory, "", where=path)
        write(path, whole)


def test_a_missing_segment_is_found_at_the_one_after_it(directory: str) -> None:
    """The gap has no file of its own that could tell."""
    paths = sealed(directory)
    os.remove(paths[1])
    finding = found(directory, "the segment follows seq", where=paths[2])
    assert finding.seq == seqs_of(paths[2])[0]


def test_a_missing_segment_is_found_also_after_a_damaged_one(directory: str) -> None:
    """Damage must not hide a gap: its trailer still tells where it ended."""
    paths = sealed(directory)
    flip(paths[0], 1500)
    os.remove(paths[1])
    found(directory, "a frame's checksum", where=paths[0])
    found(directory, "the segment follows seq", where=paths[2])


def test_a_missing_end_is_found_by_the_hint(directory: str) -> None:
    """Nothing comes after the end of a log that could miss it."""
    os.remove(current_path(directory))
    finding = found(directory, "the log was durable up to seq 151", where=directory)
    assert finding.seq == seqs_of(sealed(directory)[-1])[1]


def test_a_hint_ahead_of_the_log_is_found(directory: str) -> None:
    """An older copy of the files was put in their place."""
    hint = read_hint(FILES, directory)
    assert hint is not None
    write_hint(FILES, directory, Hint(hint.segment_seq_first, hint.durable_bytes, 999, "fsync"), durable=True)
    finding = found(directory, "the log was durable up to seq 999", where=directory)
    assert finding.seq == 151


def test_swapped_names_are_found(directory: str) -> None:
    """What is in a segment says which it is."""
    first, second = sealed(directory)[:2]
    os.rename(first, f"{directory}/x")
    os.rename(second, first)
    os.rename(f"{directory}/x", second)
    found(directory, "its name says otherwise", where=first)
    found(directory, "its name says otherwise", where=second)


def test_a_segment_of_another_log_is_found(directory: str, tmp_path: Path) -> None:
    """It may be sound by itself; the chain knows that it does not belong here."""
    other = str(tmp_path / "other")
    make_log(other)
    path = sealed(directory)[1]
    theirs = next(name for name in sealed(other) if seqs_of(name) == seqs_of(path))
    shutil.copy(theirs, path)
    assert list(check_segment(FILES, path)) == []
    finding = found(directory, "another history", where=path)
    assert finding.seq == seqs_of(path)[0]


def test_a_stranger_is_a_warning(directory: str) -> None:
    """It does no harm, and somebody may miss it."""
    write(f"{directory}/notes.txt", b"do not delete")
    finding = found(directory, "does not belong", where=f"{directory}/notes.txt")
    assert finding.severity == "warning"


def test_a_file_that_only_has_the_name_of_the_current_segment_is_found(tmp_path: Path) -> None:
    """Opening this directory must not take it for the rest of a crash, and remove it."""
    directory = str(tmp_path / "log")
    FILES.make_directory(directory)
    write(current_path(directory), b"somebody else's log\n" * 100)
    finding = found(directory, "is none", where=current_path(directory))
    assert finding.severity == "error"
    with pytest.raises(Exception, match="is none"):
        Log.open(directory)
    assert read(current_path(directory)).startswith(b"somebody")


# ---------------------------------------------------------------------------- rules of the log


def test_a_segment_that_is_cut_by_other_settings_is_found(directory: str) -> None:
    """Its own hashes hold: only the chain of settings tells."""
    path = current_path(directory)
    data = read(path)
    header = SegmentHeader.decode(data[:HEADER_BYTES])._replace(segment_bytes=8192)
    write(path, header.encode() + data[HEADER_BYTES:])
    finding = found(directory, "cut by other settings", where=path)
    assert finding.seq == header.seq_first


def change_header(path: str, **changes: object) -> None:
    """Another header, and a checksum over it that is right."""
    data = read(path)
    header = SegmentHeader.decode(data[:HEADER_BYTES])._replace(**changes)  # type: ignore[arg-type]
    write(path, header.encode() + data[HEADER_BYTES:])


CREATE = create_entry(bytes(range(16)), bytes(16))
FORK = Control(Kind.FORK, {"cluster_id": bytes(16), "epoch": 2})
OTHERS = [{"cluster_id": b"\1" * 16}, {"epoch": 9}, {"block_bytes": 2048}]


@pytest.mark.parametrize("changes", OTHERS, ids=lambda changes: next(iter(changes)))
@pytest.mark.parametrize("first", ["create", "fork"])
def test_a_header_that_contradicts_its_first_entry_is_found(
    tmp_path: Path, first: str, changes: dict[str, object]
) -> None:
    """Two owners of one segment: readers of the header and of the entries would be in different clusters."""
    directory = str(tmp_path / "log")
    with Log.open(directory, create=CREATE) as log:
        if first == "fork":
            log.seal()
            log.append(FORK)
    assert list(check_directory(FILES, directory)) == []
    change_header(current_path(directory), **changes)
    what = "cut by other settings" if first == "fork" and "block_bytes" in changes else "different clusters"
    found(directory, what, where=current_path(directory))
    with pytest.raises(Corrupt, match=what):
        Log.open(directory)


@pytest.mark.parametrize("changes", OTHERS[:2], ids=lambda changes: next(iter(changes)))
def test_a_refused_fork_does_not_hide_a_change_of_owner(tmp_path: Path, changes: dict[str, object]) -> None:
    """It sets nothing, so what the header says comes from nowhere."""
    directory = str(tmp_path / "log")
    refused = encode_payload(Kind.FORK, b"", b"", b"", b"", time_us=0, extras=Extras(refused=1))
    with Log.open(directory, create=CREATE) as log:
        log.seal()
        log.append_payloads([refused])
    assert list(check_directory(FILES, directory)) == []
    change_header(current_path(directory), **changes)
    found(directory, "another cluster or epoch", where=current_path(directory))
    with pytest.raises(Corrupt, match="another cluster or epoch"):
        Log.open(directory)
    # The same in a segment that is complete, where nothing but the check looks at all of them.
    seal = seal_entry(3).encode(2**51)
    end = body_end(current_path(directory))
    data = read(current_path(directory))[:end] + encode_frames([4], [seal], [len(seal)])
    os.remove(current_path(directory))
    write(f"{directory}/{segment_name(3, 4, sealed=False)}", data)
    found(directory, "another cluster or epoch")


def test_a_fork_whose_epoch_does_not_rise_is_found(tmp_path: Path) -> None:
    """Two owners of one epoch could not be told apart."""
    directory = str(tmp_path / "log")
    with Log.open(directory, create=CREATE) as log:
        log.seal()
        log.append(FORK)
        assert log.chain.epoch == 2
    path = current_path(directory)
    payload = Control(Kind.FORK, {"cluster_id": bytes(16), "epoch": 1}).encode(2**51)
    frame = encode_frames([3], [payload], [len(payload)])
    header = SegmentHeader.decode(read(path)[:HEADER_BYTES])._replace(epoch=1)
    write(path, header.encode() + frame + bytes(4096))
    found(directory, "epoch does not rise", where=path)
    with pytest.raises(Corrupt, match="epoch does not rise"):
        Log.open(directory)


PUT = Put("b", "k", b"v", {"a": "b"}).encode(0)
# Bucket and key are 41 and 42 bytes after the beginning of the frame, metadata from 43 on.
UNREADABLE = [
    (PUT[:25] + b"\xff" + PUT[26:], "not UTF-8"),
    (PUT[:26] + b"\xff" + PUT[27:], "not UTF-8"),
    (PUT[:27] + b"\xff" + PUT[28:], "not CBOR"),
    (PUT[:27] + b"\x83" + PUT[28:], "metadata is not"),
    (PUT[:2] + b"\1" + PUT[3:], "code of two bytes"),
]


@pytest.mark.parametrize(("payload", "what"), UNREADABLE)
def test_an_entry_that_cannot_be_decoded_is_found_with_its_place(
    tmp_path: Path, payload: bytes, what: str
) -> None:
    """Its checksum is right, and nobody can read past it: in a sealed segment, and in one that is open."""
    directory = str(tmp_path / "log")
    good = Put("b", "k", bytes(2**19)).encode(0)
    with Log.open(directory) as log:
        log.append_payloads([good, good, payload, PUT, payload, PUT], trusted=True)
        assert [finding.seq for finding in log.check()] == [4, 6]
        log.append_payloads([seal_entry(1).encode(0)])
        log.append_payloads([payload], trusted=True)
    places = []
    for finding in check_directory(FILES, directory):
        assert what in finding.what
        assert finding.hint
        assert finding.offset is not None
        assert read(finding.where)[finding.offset :][:8] == (finding.seq or 0).to_bytes(8, "little")
        places.append((finding.where, finding.seq))
    (path,) = sealed(directory)
    assert places == [(path, 4), (path, 6), (current_path(directory), 9)]


def test_settings_that_were_changed_in_the_log_are_no_finding(tmp_path: Path) -> None:
    """The chain goes from one setting to the next by the entry that changed it."""
    directory = str(tmp_path / "log")
    with Log.open(directory, options=LogOptions(segment_bytes=4096, block_bytes=1024)) as log:
        log.append(settings_entry({"segment_bytes": 8192}))
        for number in range(100):
            log.append(Put("users", f"{number}", bytes(100)))
    assert list(check_directory(FILES, directory)) == []


def test_a_footer_that_is_not_the_one_of_its_frames_is_found(directory: str) -> None:
    """Both may be whole, and not belong together."""
    first, second = sealed(directory)[:2]
    body = read(first)[: read_sealed(FILES, first)[1].body_bytes]
    ending = read(second)[read_sealed(FILES, second)[1].body_bytes :]
    write(first, body + ending)
    findings = list(check_directory(FILES, directory))
    assert any(item.where == first and item.severity == "error" for item in findings), findings


def test_a_frame_after_the_end_of_its_segment_is_found(directory: str) -> None:
    """It would be read here, and not be where every replica has it."""
    path = current_path(directory)
    end = body_end(path)
    payloads = [seal_entry(1).encode(2**51), Put("users", "late", b"").encode(2**51)]
    frames = encode_frames([152, 153], payloads, [len(payload) for payload in payloads])
    data = read(path)
    write(path, data[:end] + frames + data[end + len(frames) :])
    finding = found(directory, "follows the one that ends its segment", where=path)
    assert finding.seq == 152


def test_a_segment_that_waits_for_its_footer_and_is_cut_short_is_found(directory: str) -> None:
    """It has its name because it was complete."""
    path = sealed(directory)[-1]
    body = read(path)[: read_sealed(FILES, path)[1].body_bytes]
    sealing = f"{directory}/{segment_name(*seqs_of(path), sealed=False)}"
    os.remove(path)
    write(sealing, body[:-50])
    finding = found(directory, "not complete", where=sealing)
    assert finding.seq == seqs_of(path)[1] - 1


def test_a_segment_that_waits_for_its_footer_is_no_finding(directory: str) -> None:
    """A crash may leave it so; the next opening seals it."""
    path = sealed(directory)[-1]
    body = read(path)[: read_sealed(FILES, path)[1].body_bytes]
    os.remove(path)
    write(f"{directory}/{segment_name(*seqs_of(path), sealed=False)}", body)
    assert list(check_directory(FILES, directory)) == []


def test_a_torn_tail_is_a_warning(directory: str) -> None:
    """No acknowledged entry is in it: opening goes on without it."""
    path = current_path(directory)
    end = body_end(path)
    data = bytearray(read(path))
    payload = bytes(25) + b"half"
    torn = (152).to_bytes(8, "little") + len(payload).to_bytes(4, "little")
    data[end : end + 30] = (torn + (frame_checksum(152, payload) ^ 1).to_bytes(4, "little") + payload)[:30]
    write(path, bytes(data))
    finding = found(directory, "not complete", where=path)
    assert finding == Finding("warning", finding.what, path, 151, end, finding.hint)
    with Log.open(directory) as log:
        assert log.seq_last == 151
    assert list(check_directory(FILES, directory)) == []


def test_all_that_is_wrong_is_found_not_the_first_thing_only(directory: str) -> None:
    """Whoever restores segments wants the whole list."""
    paths = sealed(directory)
    flip(paths[0], 300)
    flip(paths[2], 300)
    write(f"{directory}/notes.txt", b"")
    places = {finding.where for finding in check_directory(FILES, directory)}
    assert places >= {paths[0], paths[2], f"{directory}/notes.txt"}
    assert paths[1] not in places


# ---------------------------------------------------------------------------- on their own


def test_a_compressed_segment_is_checked_like_a_raw_one(directory: str) -> None:
    """It is what lies in the archive."""
    path = sealed(directory)[1]
    file = FILES.open(path)
    parts: list[bytes] = []
    compress_segment(file, parts.append)
    file.close()
    compressed = f"{path}.zst"
    write(compressed, b"".join(parts))
    assert list(check_segment(FILES, compressed)) == []
    chooser = random.Random(3)
    for _ in range(40):
        offset = chooser.randrange(os.path.getsize(compressed))
        flip(compressed, offset)
        assert list(check_segment(FILES, compressed)), offset
        flip(compressed, offset)


def test_what_is_no_segment_is_told_so(tmp_path: Path) -> None:
    """A wrong path is the most common damage of all."""
    text = str(tmp_path / "text.log")
    write(text, b"2026-01-01 INFO started\n" * 50)
    (finding,) = check_segment(FILES, text)
    assert "no segment header" in finding.what
    assert finding.hint
    write(text, b"")
    (finding,) = check_segment(FILES, text)
    assert finding.what == "the file is empty"
    (finding,) = check_segment(FILES, str(tmp_path / "missing.log"))
    assert "there is nothing there" in finding.what


def test_a_strange_file_is_not_said_to_be_cut_off(tmp_path: Path) -> None:
    """Only what has the header of a segment can have lost its trailer."""
    path = f"{tmp_path}/{segment_name(1, 2)}"
    for size in (0, 1, 200, 5000):
        write(path, b"x" * size)
        for findings in (list(check_segment(FILES, path)), describe_segment(FILES, path).findings):
            assert [finding.hint for finding in findings] == [NotLowwater.default_hint], size


def test_a_directory_without_a_log_is_told_so(tmp_path: Path) -> None:
    """An empty answer would pass for a sound log."""
    with pytest.raises(NotFound, match="there is no log here"):
        require_log(FILES, str(tmp_path))
    with pytest.raises(NotFound, match="there is nothing there"):
        require_log(FILES, str(tmp_path / "missing"))


def test_a_hint_that_is_written_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    """It was not there when it was asked for, and is by now."""

    class Late(RealFiles):
        def open(self, path: str, **named: Any) -> Any:
            if path.endswith(f"/{HINT}"):
                Path(path).write_bytes(b"being written")
                raise FileNotFoundError(path)
            return super().open(path, **named)

    (tmp_path / "wal").mkdir()
    found = list(check_directory(Late(), f"{tmp_path}/wal"))
    assert not any("hint" in each.what for each in found)
