"""Whole segments as columns: what the row reader says, without a loop over rows."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lowwater
from lowwater.chaos.workload import CLUSTER_ID, SALT
from lowwater.engine.format import format
from lowwater.engine.format.entries import Entry, Put
from lowwater.engine.format.format import Extras, Kind, ValueRef, encode_metadata, encode_payload
from lowwater.engine.log import columns, footer
from lowwater.engine.log.chain import create_entry
from lowwater.engine.log.columns import COLUMNS, read_columns
from lowwater.engine.log.compress import compress_segment
from lowwater.engine.log.footer import footer_steps
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.log.scan import scan_frames
from lowwater.engine.log.vectors import crc32_many
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.seams.real import RealFiles
from lowwater.errors import (
    Corrupt,
    DataError,
    InputError,
    InvalidEntry,
    LowwaterError,
    NewerVersion,
    NotFound,
    NotLowwater,
)

pa = pytest.importorskip("pyarrow")
np = pytest.importorskip("numpy")

U64 = st.integers(0, 2**64 - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
KINDS = st.sampled_from(
    [Kind.PUT, Kind.PUT, Kind.DELETE, Kind.COPY, Kind.BEGIN, Kind.COMMIT, Kind.NOOP, Kind.PIN]
)


@st.composite
def extras(draw: st.DrawFn) -> Extras:
    """Any optional groups, except that of an atomic group, which concerns its neighbours."""
    if draw(st.booleans()):
        return format.NO_EXTRAS
    fields: dict[str, Any] = {}
    if draw(st.booleans()):
        fields |= {"txn": draw(U64), "txn_seq_before": draw(U64)}
    if draw(st.booleans()):
        fields |= {"session": draw(U64), "request": draw(U64)}
    if draw(st.booleans()):
        fields["request_hash"] = draw(st.binary(min_size=16, max_size=16))
    if draw(st.booleans()):
        fields["before"] = draw(st.binary(max_size=50))
    match draw(st.sampled_from(("value", "refused", "reference"))):
        case "refused":
            fields["refused"] = draw(st.integers(0, 2**16 - 1))
        case "reference":
            fields["value_ref"] = ValueRef(draw(U64), draw(U64), draw(st.binary(min_size=32, max_size=32)))
    return Extras(**fields)


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    kind = draw(KINDS)
    more = draw(extras())
    bare = more.refused is not None or more.value_ref is not None
    data = kind < Kind.CREATE
    return encode_payload(
        kind,
        draw(NAMES).encode()[:255].decode(errors="ignore").encode() if data else b"",
        draw(NAMES).encode() * draw(st.sampled_from((1, 1, 3))) if data else b"",
        encode_metadata(draw(st.dictionaries(NAMES, NAMES, max_size=3))),
        b"" if bare else draw(st.one_of(st.just(b""), st.binary(max_size=300))),
        time_us=draw(st.integers(0, 2**50)),
        origin=draw(U64),
        extras=more,
    )


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[int], list[bytes]]]:
    """Calls of one segment: entries, groups and the messages of two streams, with holes between them."""
    seq = 1
    calls = []
    offsets = {"topic": draw(st.integers(0, 5)), "thème": 0}
    for _ in range(draw(st.integers(1, 25))):
        seq += draw(st.sampled_from((1, 1, 2, 2**33)))
        roll = draw(st.sampled_from("eeegm"))
        if roll == "e":
            batch = [draw(payloads())]
        elif roll == "g":
            count = draw(st.integers(1, 4))
            more = Extras(group_seq_last=seq + count - 1, txn=draw(st.one_of(st.none(), U64)))
            batch = [
                encode_payload(Kind.PUT, b"b", b"k%d" % n, b"", b"v" * n, time_us=0, extras=more)
                for n in range(count)
            ]
        else:
            topic = draw(st.sampled_from(sorted(offsets)))
            more = Extras(stream_offset=offsets[topic], txn=draw(st.one_of(st.none(), U64)))
            offsets[topic] += 1
            batch = [encode_payload(Kind.APPEND, topic.encode(), b"", b"", b"m", time_us=0, extras=more)]
        calls.append((list(range(seq, seq + len(batch))), batch))
        seq += len(batch) - 1
    return calls


def as_row(entry: Entry) -> dict[str, Any]:
    """What the columns say of an entry that the row reader gave."""
    value, flags = entry.value, 0
    if entry.extras is not None:
        flags, _, value = format._encode_extras(entry.extras, entry.value)
    return {
        "seq": entry.seq,
        "kind": entry.kind,
        "bucket": entry.bucket,
        "key": entry.key,
        "metadata": encode_metadata(entry.metadata),
        "value": value,
        "time": datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=entry.time_us),
        "origin": entry.origin,
        "txn": entry.txn,
        "flags": flags,
    }


def written(calls: list[tuple[list[int], list[bytes]]]) -> tuple[MemoryFiles, Log]:
    files = MemoryFiles()
    options = LogOptions(block_bytes=1024)
    log = Log.open("log", options=options, seams=Seams(files=files))
    for seqs, batch in calls:
        # Trusted, since no writer would make some of these: parts that a kind does not have.
        log.append_payloads(batch, seqs=seqs, trusted=True)
    return files, log


def rows_of(files: MemoryFiles, path: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_columns(files.open(path)).to_pylist()
    return rows


@pytest.mark.parametrize("window_bytes", [1, 300, 2**23])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(calls=histories())
def test_columns_are_the_rows(
    monkeypatch: pytest.MonkeyPatch, window_bytes: int, calls: list[tuple[list[int], list[bytes]]]
) -> None:
    """Spark reads the columns, recovery reads the rows: one history. Sealed and unsealed, in any windows."""
    monkeypatch.setattr(columns, "VECTOR_WINDOW_BYTES", window_bytes)
    monkeypatch.setattr(footer, "VECTOR_WINDOW_BYTES", window_bytes)
    files, log = written(calls)
    expected = [as_row(entry) for entry in log.read()]
    assert rows_of(files, "log/current.log") == expected
    log.seal()
    log.close()
    expected = [as_row(entry) for entry in log.read()]
    (segment,) = log.wal.store.segments
    assert rows_of(files, segment.path) == expected


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(calls=histories(), window_bytes=st.sampled_from((1, 200, 5000)))
def test_both_builders_make_the_same_footer(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[list[int], list[bytes]]], window_bytes: int
) -> None:
    """A replica without numpy must ship the same bytes as one with it."""
    files, log = written(calls)
    log.close()
    file = files.open("log/current.log")
    header = format.SegmentHeader.decode(file.read_at(0, format.HEADER_BYTES))
    scan = scan_frames(file, header, stop=file.size())
    made = []
    for plain, size in ((True, 2**15), (True, window_bytes), (False, 2**23), (False, window_bytes)):
        monkeypatch.setattr(footer, "PLAIN_WINDOW_BYTES", size)
        monkeypatch.setattr(footer, "VECTOR_WINDOW_BYTES", size)
        steps = footer_steps(file, scan.positions, scan.end, block_bytes=header.block_bytes, plain=plain)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            made.append(end.value)
    assert all(other == made[0] for other in made[1:])


@given(st.lists(st.binary(max_size=100)))
def test_many_checksums_at_once_are_those_that_zlib_makes(slices: list[bytes]) -> None:
    """Two bytes a step, with tables: easy to get wrong for odd lengths."""
    data = b"".join(slices) + b"tail"
    lengths = np.array([len(part) for part in slices], np.int64)
    starts = np.cumsum(lengths) - lengths
    assert crc32_many(data, starts, lengths).tolist() == [format.crc32(part) for part in slices]


def test_only_the_columns_that_were_asked_for_are_made(tmp_path: Path) -> None:
    """In their order; an unknown one is an error that names the others."""
    files, log = written([([2], [Put("b", "k", b"v").encode(1)])])
    table = read_columns(files.open("log/current.log"), columns=["key", "seq"])
    assert table.column_names == ["key", "seq"]
    assert read_columns(files.open("log/current.log")).column_names == list(COLUMNS)
    with pytest.raises(InvalidEntry):
        read_columns(files.open("log/current.log"), columns=["colour"])
    log.close()


@pytest.mark.parametrize("stored", ["current", "sealed", "compressed"])
def test_a_file_of_a_log_is_read_as_columns(tmp_path: Path, stored: str) -> None:
    """By its path, whatever it is stored as."""
    with lowwater.Log.open(tmp_path) as log:
        for number in range(200):
            log.append(Put("b", f"k{number:03}", bytes(number)))
        if stored != "current":
            log.seal()
        rows = [as_row(entry) for entry in log.read()]
    (path,) = tmp_path.glob("current.log" if stored == "current" else "segment-*")
    if stored == "compressed":
        with (tmp_path / "stored").open("wb") as file:
            compress_segment(RealFiles().open(str(path)), file.write)
        path = tmp_path / "stored"
    read = [row for batch in lowwater.read_segment(path) for row in batch.to_pylist()]
    assert read == rows
    (batch,) = lowwater.read_segment(str(path), columns=["key", "seq"])
    assert batch.schema.names == ["key", "seq"]


def test_what_is_no_segment_is_told_by_the_call(tmp_path: Path) -> None:
    """Before the first row is asked for."""
    with lowwater.Log.open(tmp_path / "log") as log:
        log.append(Put("b", "k", b"v"))
    with pytest.raises(NotFound):
        lowwater.read_segment(tmp_path / "gone")
    with pytest.raises(NotLowwater):
        lowwater.read_segment(tmp_path)
    with pytest.raises(InputError):
        lowwater.read_segment("s3://bucket/segment")
    with pytest.raises(InvalidEntry):
        lowwater.read_segment(tmp_path / "log" / "current.log", columns=["colour"])
    (tmp_path / "text").write_text("no segment" * 100)
    with pytest.raises(DataError):
        lowwater.read_segment(tmp_path / "text")


def test_a_segment_without_entries_has_no_columns() -> None:
    """A header alone is what a crash leaves."""
    files = MemoryFiles()
    header = format.SegmentHeader(1, 0, bytes(32), bytes(16), 1, 4096, 1024, 0, 0).encode()
    files.make_directory("log")
    file = files.open("log/current.log", create=True)
    file.write_at(0, [header, bytes(5000)])
    with pytest.raises(NotFound):
        read_columns(file)


@pytest.mark.parametrize("sealed", [True, False])
def test_any_flipped_byte_is_an_error_or_changes_nothing(sealed: bool) -> None:
    """A column with one wrong value among millions is worse than no column."""
    calls = [([seq], [Put("b", f"k{seq}", b"v" * 20).encode(1)]) for seq in range(2, 30)]
    files, log = written(calls)
    if sealed:
        log.seal()
    log.close()
    path = log.wal.store.segments[0].path if sealed else "log/current.log"
    file = files.open(path, write=True)
    good = read_columns(file)
    size = file.size() if sealed else log.chain.body_bytes
    flips = found = 0
    for offset in range(0, size, 3):
        byte = file.read_at(offset, 1)
        file.write_at(offset, [bytes([byte[0] ^ 1 << offset % 8])])
        flips += 1
        try:
            assert read_columns(file).equals(good), offset
        except (LowwaterError, NewerVersion):
            found += 1
        file.write_at(offset, [byte])
    assert found == flips


@pytest.mark.parametrize(("offset", "error"), [(200, Corrupt), (-100, Corrupt)])
def test_damage_in_body_and_footer_is_corrupt(offset: int, error: type[Exception]) -> None:
    """With the place in the file, so that somebody can look."""
    files, log = written([([seq], [Put("b", "k", b"v" * 100).encode(1)]) for seq in range(2, 30)])
    log.seal()
    log.close()
    file = files.open(log.wal.store.segments[0].path, write=True)
    place = offset % file.size()
    byte = file.read_at(place, 1)
    file.write_at(place, [bytes([byte[0] ^ 255])])
    with pytest.raises(error) as raised:
        read_columns(file)
    assert raised.value.offset is not None  # type: ignore[attr-defined]


WITHOUT_NUMPY = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "pyarrow"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nothing())
from lowwater.chaos.clock import SeededRandomness, VirtualClock
from lowwater.engine.format.entries import Put
from lowwater.engine.log.log import Log, Seams
with Log.open(sys.argv[1], seams=Seams(clock=VirtualClock(), randomness=SeededRandomness(1))) as log:
    for number in range(100):
        log.append(Put("b", f"k{number % 7}", bytes(number)))
    log.seal()
    assert len(list(log.read())) == 102
    assert list(log.check()) == []
assert "numpy" not in sys.modules
"""


def test_the_engine_works_without_numpy_and_makes_the_same_bytes(tmp_path: Path) -> None:
    """An embedded log should not drag a hundred megabytes along."""
    from lowwater.chaos.clock import SeededRandomness, VirtualClock

    subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY, str(tmp_path / "without")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    with Log.open(
        tmp_path / "with", seams=Seams(clock=VirtualClock(), randomness=SeededRandomness(1))
    ) as log:
        for number in range(100):
            log.append(Put("b", f"k{number % 7}", bytes(number)))
        log.seal()
    (mine,) = (tmp_path / "with").glob("segment-*")
    (other,) = (tmp_path / "without").glob("segment-*")
    assert mine.name == other.name
    assert mine.read_bytes() == other.read_bytes()


def test_create_is_a_row_like_any_other() -> None:
    """Its value is what restores the settings of a log."""
    files = MemoryFiles()
    with Log.open("log", seams=Seams(files=files), create=create_entry(CLUSTER_ID, SALT)) as log:
        (row,) = rows_of(files, "log/current.log")
        (entry,) = log.read()
    assert row == as_row(entry)
    assert row["kind"] == "create"
