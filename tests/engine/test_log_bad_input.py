"""Whatever is given to a log that no log can take is one typed error, and nothing has happened."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowwater.engine.format import format
from lowwater.engine.format.entries import Control, CreateBucket, Delete, DeleteBucket, Put
from lowwater.engine.format.format import Extras, Kind, ValueRef
from lowwater.engine.log.chain import create_entry, seal_entry, settings_entry
from lowwater.engine.log.log import Log, LogOptions
from lowwater.errors import (
    Corrupt,
    DataError,
    DirectoryLocked,
    InputError,
    InvalidConfig,
    InvalidEntry,
    LogDivergence,
    LowwaterError,
    NewerVersion,
    NotFound,
    NotLowwater,
    OutOfOrderSeq,
    RepeatedSeq,
)

GOOD = Put("b", "k", b"v").encode(1)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """A log of three entries, the last of which has seq 10; it must be whole when the test is over."""
    log = Log.open(tmp_path / "log")
    log.append(Put("b", "first", b"1"))
    log.append_payloads([GOOD], seqs=[10])
    yield log
    seq = log.append(Put("b", "afterwards", b"2"))
    assert [entry.seq for entry in log.read()] == [1, 2, 10, seq]
    assert list(log.check()) == []
    log.close()
    with Log.open(tmp_path / "log", create=False) as log:
        assert log.seq_last == seq


@pytest.mark.parametrize(
    ("seqs", "error"),
    [
        ([-1], InvalidEntry),
        ([0], InvalidEntry),
        ([2**64], InvalidEntry),
        ([True], InvalidEntry),
        ([11.0], InvalidEntry),
        (["11"], InvalidEntry),
        ([None], InvalidEntry),
        ([11, 12], InvalidEntry),
        ([], InvalidEntry),
        ([10], RepeatedSeq),
        ([9], OutOfOrderSeq),
        ([2], LogDivergence),
    ],
)
def test_a_seq_that_is_none_or_does_not_rise_is_refused(
    log: Log, seqs: list[Any], error: type[Exception]
) -> None:
    """A log whose seqs do not rise cannot be read from a seq on."""
    for append in (log.append_payloads, log.submit_payloads):
        with pytest.raises(error) as raised:
            append([GOOD], seqs=seqs)
        assert type(raised.value) is error
        assert log.seq_last == 10


@pytest.mark.parametrize("seqs", [[11, 11], [12, 11], [11, 12, 12], [11, 10]])
def test_of_seqs_that_repeat_or_fall_within_one_call_nothing_is_written(log: Log, seqs: list[int]) -> None:
    """The first of them would have been fine, and all or nothing is easier to go on from."""
    with pytest.raises(OutOfOrderSeq):
        log.append_payloads([GOOD] * len(seqs), seqs=seqs)
    assert log.seq_last == 10


def test_the_last_seq_of_all_can_be_used_and_nothing_comes_after_it(tmp_path: Path) -> None:
    """Beyond it numbers would wrap around, and history would begin again."""
    with Log.open(tmp_path / "log") as log:
        assert log.append_payloads([GOOD], seqs=[2**64 - 1]) == 2**64 - 1
        for append in (
            lambda: log.append(Put("b", "k", b"")),
            log.seal,
            lambda: log.append_group(Delete("b", "k")),
        ):
            with pytest.raises(OutOfOrderSeq):
                append()
        assert [entry.seq for entry in log.read(2**64 - 1)] == [2**64 - 1]
        assert list(log.check()) == []
    with Log.open(tmp_path / "log") as log:
        assert log.seq_last == 2**64 - 1


LONE_SURROGATE = "\ud800"

BAD_ENTRIES = [
    Put("b", "", b""),
    Put("b", "k" * 1025, b""),
    Put("b", "ü" * 513, b""),
    Put("b", LONE_SURROGATE, b""),
    Put("b", b"bytes", b""),
    Put("b", None, b""),
    Put("b", 5, b""),
    Put("", "k", b""),
    Put("b" * 256, "k", b""),
    Put(LONE_SURROGATE, "k", b""),
    Put(b"b", "k", b""),
    Put("b", "k", "text"),
    Put("b", "k", None),
    Put("b", "k", 7),
    Put("b", "k", [1, 2]),
    Put("b", "k", b"", {"n": 1}),
    Put("b", "k", b"", {1: "n"}),
    Put("b", "k", b"", {"n": b"bytes"}),
    Put("b", "k", b"", {"n": LONE_SURROGATE}),
    Put("b", "k", b"", {"n": "x" * 2**16}),
    Put("b", "k", b"", origin=-1),
    Put("b", "k", b"", origin=2**64),
    Delete("b", ""),
    Delete("", "k"),
    Delete("b", LONE_SURROGATE),
    CreateBucket(""),
    CreateBucket("b" * 256),
    DeleteBucket(LONE_SURROGATE),
    create_entry(bytes(16), bytes(16)),
    Control(Kind.FORK, {"cluster_id": bytes(16), "epoch": 2}),
    Control(Kind.SETTINGS, {"segment_bytes": 1}),
    Control(Kind.SETTINGS, {"segment_bytes": "many"}),
]


@pytest.mark.parametrize("entry", BAD_ENTRIES, ids=lambda entry: repr(entry)[:60])
def test_an_entry_that_no_log_accepts_is_refused(log: Log, entry: Any) -> None:
    """Whatever was good in the same call is not written either, and no waiter hangs."""
    good = Put("b", "good", b"")
    for append in (log.append, log.submit):
        with pytest.raises(InvalidEntry):
            append(good, entry)
    with pytest.raises(InvalidEntry):
        log.append(good, entry, ack="memory")
    assert log.seq_last == 10


def test_settings_that_this_version_does_not_know_are_refused_as_newer(log: Log) -> None:
    """A node that ignored them would cut other segments than the rest of its cluster."""
    with pytest.raises(NewerVersion):
        log.append(Control(Kind.SETTINGS, {"colour": 1}))


@pytest.mark.parametrize("entry", [seal_entry(1), settings_entry({}), create_entry(bytes(16), bytes(16))])
def test_a_group_takes_no_control_entries(log: Log, entry: Control) -> None:
    """They end segments, and a group lies in one."""
    with pytest.raises(InputError):
        log.append_group(Put("b", "k", b""), entry)
    assert log.seq_last == 10


def test_an_empty_append_is_refused(log: Log) -> None:
    """There is no seq to return."""
    for append in (log.append, log.append_group, log.submit, lambda: log.append_payloads([])):
        with pytest.raises(InvalidEntry):
            append()


def test_values_over_the_limit_are_refused_and_those_at_it_are_not(tmp_path: Path) -> None:
    """The limit is of the payload: what a frame holds besides its own head."""
    overhead = len(Put("b", "k", b"").encode(1))
    with Log.open(tmp_path / "log", options=LogOptions(entry_bytes_max=5000)) as log:
        seq = log.append(Put("b", "k", bytes(5000 - overhead)))
        for size in (5001 - overhead, 100_000):
            with pytest.raises(InvalidEntry):
                log.append(Put("b", "k", bytes(size)))
        assert log.seq_last == seq
        assert list(log.check()) == []


def test_a_default_log_takes_16_mib_an_entry_and_no_more(tmp_path: Path) -> None:
    """The limit that the documentation states."""
    with Log.open(tmp_path / "log") as log:
        log.append(Put("b", "k", bytes(16 * 2**20 - 100)))
        with pytest.raises(InvalidEntry):
            log.append(Put("b", "k", bytes(16 * 2**20)))
        with pytest.raises(InvalidEntry):
            log.append(Put("b", "k", bytes(32 * 2**20)))
        with pytest.raises(InvalidEntry):
            log.append(*[Put("b", "k", bytes(12 * 2**20))] * 3)
        with pytest.raises(InvalidEntry):
            log.append_group(*[Put("b", "k", bytes(12 * 2**20))] * 3)
        assert list(log.check()) == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        GOOD[:1],
        GOOD[:24],
        b"\x63" + GOOD[1:],  # a kind that does not exist
        GOOD[:1] + b"\x00\x80" + GOOD[3:],  # a flag that does not exist
        GOOD[:1] + b"\x02\x00" + GOOD[3:],  # a group that does not name its end
        b"\x06" + GOOD[1:],  # a message without an offset
    ],
)
def test_a_payload_that_is_none_is_refused(log: Log, payload: bytes) -> None:
    """Whoever encodes for himself can get it wrong, and the segment would be unreadable for good."""
    for payloads in ([payload], [GOOD, payload], [payload, GOOD]):
        with pytest.raises(LowwaterError):
            log.append_payloads(payloads)
        assert log.seq_last == 10


def payload_of(kind: Kind, bucket: bytes = b"", key: bytes = b"", value: bytes = b"", **more: Any) -> bytes:
    metadata = format.encode_metadata(more.pop("metadata", None))
    extras = Extras(**more) if more else format.NO_EXTRAS
    return format.encode_payload(kind, bucket, key, metadata, value, time_us=1, extras=extras)


REFERENCE = ValueRef(1, 1, bytes(32))


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (payload_of(Kind.DELETE, b"b", b"k", b"v"), "value"),
        (payload_of(Kind.DELETE, b"b", b"k", metadata={"a": "b"}), "metadata"),
        (payload_of(Kind.DELETE, b"b", b"k", metadata={"a": "b"}, refused=1), "metadata"),
        (payload_of(Kind.CREATE_BUCKET, b"b", b"k"), "key"),
        (payload_of(Kind.DELETE_BUCKET, b"b", b"k"), "key"),
        (payload_of(Kind.CREATE_BUCKET, b"b", value=b"v"), "value"),
        (payload_of(Kind.DELETE_BUCKET, b"b", value=b"v"), "value"),
        (payload_of(Kind.BEGIN, b"b"), "bucket"),
        (payload_of(Kind.COMMIT, b"", b"k"), "key"),
        (payload_of(Kind.NOOP, b"b"), "bucket"),
        (payload_of(Kind.SEAL, b"", b"k"), "key"),
        (payload_of(Kind.PUT, b"b", b"k", value_ref=REFERENCE), "reference"),
        (payload_of(Kind.APPEND, b"b", value_ref=REFERENCE, stream_offset=0), "reference"),
        (payload_of(Kind.NOOP, value_ref=REFERENCE), "reference"),
        (payload_of(Kind.PUT, b"b", b"k", stream_offset=0), "offset"),
        (payload_of(Kind.NOOP, stream_offset=0), "offset"),
        (payload_of(Kind.CREATE, refused=1), "refusal"),
        (GOOD[:16] + b"\x80" + GOOD[17:], "2\\^63"),
    ],
)
def test_a_payload_with_parts_that_its_kind_does_not_have_is_refused(
    log: Log, payload: bytes, what: str
) -> None:
    """Readers may refuse it, and then nobody can read past it."""
    with pytest.raises(InvalidEntry, match=what) as raised:
        log.append_payloads([GOOD, payload])
    assert raised.value.hint
    assert log.seq_last == 10


def test_a_payload_with_all_parts_that_its_kind_has_is_taken() -> None:
    """What is refused where it is not allowed is needed where it is."""
    payloads = [
        payload_of(Kind.CREATE_BUCKET, b"b"),
        payload_of(Kind.COPY, b"b", b"k", value_ref=REFERENCE, metadata={"a": "b"}),
        payload_of(Kind.DELETE, b"b", b"k"),
        payload_of(Kind.DELETE, b"b", b"k", refused=1),
        payload_of(Kind.DELETE, b"b", b"k", before=b"v"),
        payload_of(Kind.APPEND, b"b", b"k", b"v", stream_offset=0),
        payload_of(Kind.APPEND, b"b", refused=1),
        payload_of(Kind.BEGIN, session=1),
        payload_of(Kind.NOOP, refused=1),
        GOOD[:9] + b"\xff" * 7 + b"\x7f" + GOOD[17:],
    ]
    with Log.open(None) as log:
        assert log.append_payloads(payloads) == 11
        assert list(log.check()) == []


@pytest.mark.parametrize("size", [128, 200, 319, 320, -192, -1, 1, 192], ids=str)
def test_a_segment_that_was_cut_off_or_added_to_is_damage_and_no_strange_file(
    closed: Path, size: int
) -> None:
    """Its header is ours: to check the path, as for a file of somebody else, would lead nowhere."""
    for path in (sealed(closed)[0], sealed(closed)[1]):
        data = path.read_bytes()
        path.write_bytes(data + bytes(size) if size in (1, 192) else data[:size])
        error = refused(closed, Corrupt)
        assert error.path == str(path)
        assert "restore" in error.hint
        path.write_bytes(data)


@pytest.mark.parametrize(
    "options",
    [
        {"sync_mode": "sometimes"},
        {"batch_bytes_max": 0},
        {"batch_bytes_max": 33 * 2**20},
        {"queue_bytes_max": 0},
        {"ring_bytes_max": -1},
        {"entry_bytes_max": 2**30},
        {"sync_interval_ms": -1},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    """Each limit is one that something else rests on."""
    with pytest.raises(InvalidConfig):
        LogOptions(**options)


def test_a_log_is_not_made_with_settings_that_no_segment_can_have(tmp_path: Path) -> None:
    """And the directory is as good as before."""
    with pytest.raises(InvalidEntry):
        Log.open(tmp_path / "log", options=LogOptions(segment_bytes=10))
    with Log.open(tmp_path / "log") as log:
        assert log.seq_last == 1


@pytest.mark.parametrize("start", [-1, 2**64, True, 1.5, "first", None, b"1"])
def test_a_start_that_is_none_is_refused(log: Log, start: Any) -> None:
    """Reading from somewhere else than what was meant skips entries without a word."""
    with pytest.raises(InputError):
        next(log.read(start), None)


# ---------------------------------------------------------------------------- directories and files


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}


def refused(directory: Path, error: type[LowwaterError], **arguments: Any) -> LowwaterError:
    """Opening raises this error, changes nothing, and leaves the directory unlocked."""
    before = contents(directory) if directory.is_dir() else None
    for _ in range(2):
        with pytest.raises(error) as raised:
            Log.open(directory, **arguments)
        assert type(raised.value) is error
        assert raised.value.path is not None
        assert raised.value.hint
    if before is not None:
        assert contents(directory) == before
    return raised.value


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """The directory of a log with two sealed segments and a current one."""
    directory = tmp_path / "log"
    with Log.open(directory) as log:
        log.append(Put("b", "k", b"1"))
        log.seal()
        log.append(Put("b", "k", b"2"))
        log.seal()
        log.append(Put("b", "k", b"3"))
    return directory


def sealed(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*"))


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """Somebody has given the path of a segment."""
    path = tmp_path / "file"
    path.write_bytes(b"something")
    for create in (True, False):
        with pytest.raises(LowwaterError) as raised:
            Log.open(path, create=create)
        assert isinstance(raised.value, InputError)
    assert path.read_bytes() == b"something"


@pytest.mark.parametrize("path", ["", b"bytes", 5])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    """An empty path would be the current directory."""
    with pytest.raises((InputError, TypeError)):
        Log.open(path)


@pytest.mark.parametrize("made", [False, True])
def test_create_false_makes_nothing(tmp_path: Path, made: bool) -> None:
    """A misspelt path must not become a second, empty log."""
    directory = tmp_path / "log"
    if made:
        directory.mkdir()
    with pytest.raises(NotFound):
        Log.open(directory, create=False)
    assert list(tmp_path.rglob("*")) == ([directory] if made else [])


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", NotLowwater),
        (b"x", NotLowwater),
        (b"PK\x03\x04" * 1000, NotLowwater),
        (bytes(5000), NotLowwater),
    ],
    ids=["empty", "one byte", "zip", "zeros"],
)
def test_a_segment_that_is_none_is_refused(
    closed: Path, content: bytes, error: type[LowwaterError], number: int
) -> None:
    """It had entries: a log without them must not go on as if there had been none."""
    sealed(closed)[number].write_bytes(content)
    assert refused(closed, error).path == str(sealed(closed)[number])


def test_a_current_file_of_another_format_is_refused(closed: Path) -> None:
    """Opening removes what a crash left of a segment, and must not remove somebody's photographs."""
    (closed / "current.log").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(1000))
    (closed / "hint").unlink()
    assert refused(closed, NotLowwater).path == str(closed / "current.log")


@pytest.mark.parametrize("content", [b"", bytes(100_000)], ids=["empty", "zeros"])
def test_an_empty_current_file_is_what_a_crash_leaves_unless_it_is_known_to_have_held_more(
    closed: Path, content: bytes
) -> None:
    """With the hint it is a loss; without it, the moment before a segment's first sync."""
    current = closed / "current.log"
    was = current.read_bytes()
    current.write_bytes(content)
    refused(closed, Corrupt)
    current.write_bytes(was)
    with Log.open(closed) as log:
        assert log.append(Put("b", "k", b"4")) == 7
    for name in ("hint", "current.log"):
        (closed / name).unlink()
    current.write_bytes(content)
    with Log.open(closed) as log:
        assert log.seq_last == 5
        assert log.append(Put("b", "k", b"5")) == 6
        assert list(log.check()) == []


@pytest.mark.parametrize("name", ["segment", "current"])
def test_a_newer_version_is_refused_as_such(closed: Path, name: str) -> None:
    """Upgrading helps, repairing would destroy."""
    path = sealed(closed)[0] if name == "segment" else closed / "current.log"
    data = bytearray(path.read_bytes())
    data[8:10] = (format.VERSION_MAJOR + 1).to_bytes(2, "little")
    data[124:128] = format.crc32(bytes(data[:124])).to_bytes(4, "little")
    path.write_bytes(data)
    assert "upgrade" in refused(closed, NewerVersion).hint.lower()


def test_a_missing_segment_in_the_middle_is_refused(closed: Path) -> None:
    """Early ones may be missing, because they were shipped and purged; these may not."""
    sealed(closed)[1].unlink()
    refused(closed, Corrupt)


def test_a_missing_current_file_is_refused_where_it_held_durable_entries(closed: Path) -> None:
    """Else their seqs would be given to others."""
    (closed / "current.log").unlink()
    refused(closed, Corrupt)


def test_a_log_that_has_lost_what_its_caller_knows_to_be_durable_is_refused(closed: Path) -> None:
    """LMDB's position is durable too, and a log behind it is not the log that it belongs to."""
    with Log.open(closed, durable_seq=6) as log:
        assert log.seq_last == 6
    refused(closed, Corrupt, durable_seq=7)
    assert "durable up to seq 7" in str(refused(closed, Corrupt, durable_seq=7))


def test_a_flipped_bit_in_the_current_file_is_refused_and_not_cut_off(closed: Path) -> None:
    """A torn write lies above everything that is known to be durable. This does not."""
    path = closed / "current.log"
    data = bytearray(path.read_bytes())
    data[format.HEADER_BYTES + 20] ^= 1
    path.write_bytes(data)
    assert isinstance(refused(closed, Corrupt), DataError)


def test_a_second_log_on_a_directory_is_refused_and_the_first_goes_on(log: Log) -> None:
    """Two writers would give one seq to two entries."""
    for _ in range(2):
        with pytest.raises(DirectoryLocked) as raised:
            Log.open(log.directory)
        assert str(os.getpid()) in str(raised.value)


def test_a_second_process_is_told_who_has_the_directory(log: Log) -> None:
    """So that somebody can find out whether that one may be stopped."""
    code = """
import sys
from lowwater.engine.log.log import Log
from lowwater.errors import DirectoryLocked
try:
    Log.open(sys.argv[1])
except DirectoryLocked as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, log.directory],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"process {os.getpid()}" in done.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_to_write_is_refused(closed: Path) -> None:
    """The read-only tools are for these."""
    from lowwater.errors import DirectoryNotWritable

    for path in closed.iterdir():
        path.chmod(0o400)
    closed.chmod(0o500)
    try:
        refused(closed, DirectoryNotWritable)
    finally:
        closed.chmod(0o700)


def test_strangers_in_the_directory_are_left_alone(closed: Path) -> None:
    """Somebody's notes are none of our business; `check` mentions them."""
    (closed / "notes.txt").write_text("mine")
    with Log.open(closed) as log:
        log.append(Put("b", "k", b""))
        findings = list(log.check())
        assert [(finding.severity, Path(finding.where).name) for finding in findings] == [
            ("warning", "notes.txt")
        ]
    assert (closed / "notes.txt").read_text() == "mine"
