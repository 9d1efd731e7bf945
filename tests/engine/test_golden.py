"""The golden files: what was written once must be written again, and read to the same entries for ever.

Always true: the files under tests/golden/ are those of the released format. Where one of these tests fails,
the code has changed the format, and files in the field have not.
"""

from __future__ import annotations

import importlib.util
import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zstandard
from blake3 import blake3

from lowwater.engine.format import format
from lowwater.engine.format.entries import Entry, decode_frames
from lowwater.engine.log.check import check_directory, check_segment
from lowwater.engine.log.compress import CompressedSegment, compress_segment, open_segment_file
from lowwater.engine.log.directory import Hint, read_hint, require_hint
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.log.reader import SealedReader
from lowwater.engine.log.scan import scan_frames
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.seams.real import RealFiles
from lowwater.engine.seams.seams import File
from lowwater.errors import Corrupt, NewerVersion, NotFound, NotLowwater

GOLDEN = Path(__file__).parent.parent / "golden"
FORMAT_MD = GOLDEN.parent.parent / "docs" / "FORMAT.md"


def _load_make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _load_make()
MADE: dict[str, bytes] = make.make()
FILES = sorted(path.removesuffix(".json") for path in MADE if path.endswith(".json"))
HINTS = [path for path in FILES if path.endswith("/hint")]
SEGMENTS = [path for path in FILES if path not in HINTS]
EXPECTED: dict[str, Any] = {path: json.loads((GOLDEN / f"{path}.json").read_bytes()) for path in FILES}
READABLE = [path for path in SEGMENTS if "entries" in EXPECTED[path]]
SEALED = [path for path in READABLE if "segment_hash" in EXPECTED[path]]
UNSEALED = [path for path in READABLE if path not in SEALED]
REFUSED = [path for path in SEGMENTS if path not in READABLE]
REFUSED_SEALED = [path for path in REFUSED if not path.endswith("/current.log")]
REFUSED_CURRENT = [path for path in REFUSED if path not in REFUSED_SEALED]
ERRORS: dict[str, type[Exception]] = {
    "newer version": NewerVersion,
    "corrupt": Corrupt,
    "not a segment": NotLowwater,
}


def short(path: str) -> str:
    """The name of a test, without its zeros."""
    return re.sub(r"-0{10,}", "-", path)


def open_golden(path: str) -> File:
    return open_segment_file(RealFiles(), str(GOLDEN / path))


def plain(entry: Entry) -> dict[str, Any]:
    """An entry as it stands in a .json file."""
    fields = {name: getattr(entry, name) for name in Entry._fields if name not in ("extras", "txn")}
    extras = entry.extras
    if extras is not None:
        fields |= {name: value for name, value in extras._asdict().items() if value is not None}
        if extras.txn is None:
            del fields["txn_seq_before"]
        if extras.session is None:
            del fields["request"]
        if extras.value_ref is not None:
            fields["value_ref"] = extras.value_ref._asdict()
    assert entry.txn == (extras.txn if extras is not None else None)
    found: dict[str, Any] = json.loads(json.dumps(fields, default=bytes.hex))
    return found


def expected_entries(path: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = EXPECTED[path]["entries"]
    return entries


# ---------------------------------------------------------------------------- writing


def test_writing_the_golden_files_again_gives_the_same_bytes() -> None:
    """The format is what these files are, whatever the code says."""
    assert sorted(MADE) == sorted(
        path.relative_to(GOLDEN).as_posix()
        for path in GOLDEN.glob("*/*")
        if path.parent.name != "__pycache__"
    )
    for path, data in MADE.items():
        assert (GOLDEN / path).read_bytes() == data, f"{path} is written differently now"


def test_the_golden_files_are_small() -> None:
    """They are part of every clone."""
    sizes = [len(data) for data in MADE.values()]
    assert max(sizes) < 64 * 1024
    assert sum(sizes) < 300 * 1024


def test_the_worked_example_is_the_minimal_segment() -> None:
    """Who reads the document byte by byte must not be misled by it."""
    text = FORMAT_MD.read_text(encoding="utf-8")
    (path,) = (path for path in SEGMENTS if path.startswith(make.EXAMPLE_CASE))
    data = (GOLDEN / path).read_bytes()
    assert make.with_example(text, data) == text, "run tests/golden/make.py"
    assert path in text
    shown = text.partition("<!-- example")[2].partition("```text\n")[2].partition("```")[0]
    lines = [line for line in shown.splitlines() if not line.startswith(" ")]
    assert b"".join(bytes.fromhex(line[5:52]) for line in lines) == data
    offsets = [int(line[:3], 16) for line in lines]
    assert offsets == sorted(set(offsets))


def test_the_golden_files_hold_every_kind_every_flag_and_a_chain() -> None:
    """A kind or flag that is added needs its golden file."""
    entries = [entry for path in READABLE for entry in expected_entries(path)]
    assert {entry["kind"] for entry in entries} == set(format.KIND_CODES)
    for name in format.Extras._fields:
        assert any(name in entry for entry in entries), name
    assert max(entry["seq"] for entry in entries) == format.SEQ_MAX
    assert len([path for path in SEALED if path.startswith("chain/")]) == 3
    assert {EXPECTED[path]["error"] for path in REFUSED} == set(ERRORS)
    assert len(REFUSED) == 15


@pytest.mark.parametrize("batches", ["one by one", "all at once"])
def test_batching_changes_no_golden_byte(batches: str) -> None:
    """The same entries give the same segments, however they arrived."""
    for case in ("chain", "many-blocks", "kinds"):
        specs = make.CASES[case]()
        files = MemoryFiles()
        options = LogOptions(batch_bytes_max=1 if batches == "one by one" else 2**20)
        entry = make.create_entry(make.CLUSTER_ID, make.SALT, _settings_of(specs[0]))
        with Log.open("log", options=options, seams=seams_of(files), create=entry) as log:
            runs = [[spec] for spec in specs[1:]] if batches == "one by one" else [specs[1:]]
            for run in runs:
                log.append_payloads([make.encode(spec) for spec in run], seqs=[spec["seq"] for spec in run])
        for path in SEALED:
            if path.startswith(f"{case}/"):
                assert make.read_whole(files, f"log/{path.partition('/')[2]}") == MADE[path]


def _settings_of(spec: dict[str, Any]) -> dict[str, int]:
    settings: dict[str, int] = make.cbor2.loads(spec["value"])["settings"]
    return settings


# ---------------------------------------------------------------------------- reading


def sealed_entries(path: str) -> Iterator[Entry]:
    reader = SealedReader(open_golden(path))
    for chunk in reader.chunks_after(0):
        yield from decode_frames(chunk.data, chunk.start, chunk.end, verify=not chunk.verified)


@pytest.mark.parametrize("path", SEALED, ids=short)
def test_a_golden_segment_reads_to_its_entries(path: str) -> None:
    """Verified by its blocks, raw or compressed."""
    assert [plain(entry) for entry in sealed_entries(path)] == expected_entries(path)


@pytest.mark.parametrize("path", SEALED, ids=short)
def test_a_golden_segment_reads_to_its_entries_by_frame_checksums_alone(path: str) -> None:
    """The way of tools that cannot trust a footer."""
    file = open_golden(path)
    reader = SealedReader(file)
    end = reader.trailer.body_bytes
    data = file.read_at(0, end)
    entries = list(decode_frames(data, format.HEADER_BYTES, end, verify=True))
    assert [plain(entry) for entry in entries] == expected_entries(path)
    scan = scan_frames(file, reader.header, stop=end)
    assert (scan.complete, scan.problem, scan.end, scan.positions) == (True, None, end, reader.positions)


@pytest.mark.parametrize("path", SEALED, ids=short)
def test_a_golden_segment_is_sound(path: str) -> None:
    """The check computes the footer again from the frames."""
    assert list(check_segment(RealFiles(), str(GOLDEN / path))) == []


@pytest.mark.parametrize("path", READABLE, ids=short)
def test_a_golden_header_says_what_it_is_expected_to_say(path: str) -> None:
    """Chain, owner and settings are in it."""
    header = format.SegmentHeader.decode(open_golden(path).read_at(0, format.HEADER_BYTES))
    expected = {"before_images": 0, **EXPECTED[path]["header"]}
    assert json.loads(json.dumps(header._asdict(), default=bytes.hex)) == expected


@pytest.mark.parametrize("path", [path for path in READABLE if "images" in EXPECTED[path]], ids=short)
def test_golden_before_images_say_what_was_there(path: str) -> None:
    """Others follow a log by them, without a state."""
    data = open_golden(path).read_at(0, SealedReader(open_golden(path)).trailer.body_bytes)
    found = {
        str(entry.seq): json.loads(json.dumps(_image(entry), default=bytes.hex))
        for entry in decode_frames(data, format.HEADER_BYTES, len(data), verify=True)
        if entry.before is not None
    }
    assert found == EXPECTED[path]["images"]
    assert len(found) > 5


def _image(entry: Entry) -> dict[str, Any] | None:
    assert entry.before is not None
    if not entry.before.seq:
        return None
    return {
        name: value for name, value in entry.before._asdict().items() if name != "blake3" or value is not None
    }


@pytest.mark.parametrize("path", SEALED, ids=short)
def test_a_golden_footer_finds_every_key_and_message(path: str) -> None:
    """The indexes are read by others, from ranges of the file: here by hand, as docs/FORMAT.md has it."""
    file = open_golden(path)
    trailer = SealedReader(file).trailer
    sections = trailer.section_offsets()

    def numbers(start: int, count: int) -> list[int]:
        data = file.read_at(start, 4 * count)
        return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]

    entries = expected_entries(path)
    effective = [
        (frame, entry) for frame, entry in enumerate(entries) if entry["bucket"] and "refused" not in entry
    ]
    keys = [
        (make.crc32((entry["bucket"] + entry["key"]).encode()), frame)
        for frame, entry in effective
        if entry["kind"] != "append"
    ]
    key_hashes = numbers(sections.key_hashes, trailer.key_count)
    key_frames = numbers(sections.key_frames, trailer.key_count)
    assert list(zip(key_hashes, key_frames, strict=True)) == sorted(keys)

    kinds = file.read_at(sections.kinds, sections.streams - sections.kinds)
    codes = sorted({int(format.KIND_CODES[entry["kind"]]) for entry in entries})
    counts = [sum(entry["kind"] == format.KIND_NAMES[code] for entry in entries) for code in codes]
    assert list(format.KIND_COUNT.iter_unpack(kinds)) == list(zip(codes, counts, strict=True))

    streams: dict[bytes, list[tuple[int, int]]] = {}
    for frame, entry in effective:
        if entry["kind"] == "append":
            streams.setdefault(entry["bucket"].encode(), []).append((entry["stream_offset"], frame))
    runs = list(runs_of(file.read_at(sections.streams, sections.end - sections.streams)))
    assert [name for name, _ in runs] == sorted(name for name, _ in runs)
    assert len(runs) == trailer.stream_count
    for name, messages in streams.items():
        assert [message for of, run in runs if of == name for message in run] == messages
    assert {name for name, _ in runs} == set(streams)

    assert trailer.segment_hash.hex() == EXPECTED[path]["segment_hash"]
    block_bytes = SealedReader(file).header.block_bytes
    body = file.read_at(0, trailer.body_bytes)
    hashes = [
        blake3(body[start : start + block_bytes]).digest() for start in range(0, len(body), block_bytes)
    ]
    assert blake3(b"".join(hashes)).digest() == trailer.segment_hash


def runs_of(data: bytes) -> Iterator[tuple[bytes, list[tuple[int, int]]]]:
    """The streams of a footer: (name, (offset, frame) of each message)."""
    at = 0
    while at < len(data):
        length, offset_first, count = format.STREAM_HEAD.unpack_from(data, at)
        at += format.STREAM_HEAD.size
        name, frames = data[at : at + length], array("I", data[at + length : at + length + 4 * count])
        yield name, list(zip(range(offset_first, offset_first + count), frames, strict=True))
        at += length + 4 * count


def test_offsets_that_are_not_dense_give_a_stream_for_each_run() -> None:
    """A segment that could not be sealed would stop its log for ever."""
    offsets = [("b", 5), ("a", 0), ("b", 6), ("b", 9), ("a", 1), ("b", 2), ("b", 3)]
    messages = [
        make.entry(2 + at, "append", bucket=name, stream_offset=offset)
        for at, (name, offset) in enumerate(offsets)
    ]
    ((name, data),) = make.write_log([make.create(), *messages, make.seal(9, 1)]).items()
    files = MemoryFiles()
    files.open(name, create=True).write_at(0, [data])
    assert list(check_segment(files, name)) == []
    trailer = SealedReader(files.open(name)).trailer
    sections = trailer.section_offsets()
    assert list(runs_of(data[sections.streams : sections.end])) == [
        (b"a", [(0, 2), (1, 5)]),
        (b"b", [(5, 1), (6, 3)]),
        (b"b", [(9, 4)]),
        (b"b", [(2, 6), (3, 7)]),
    ]
    assert trailer.stream_count == 4


def files_of(case: str) -> MemoryFiles:
    """The files of a golden folder as a log's directory."""
    files = MemoryFiles()
    files.make_directory("log")
    for path, data in MADE.items():
        if path.startswith(f"{case}/") and not path.endswith(".json"):
            files.open(f"log/{path.partition('/')[2]}", create=True).write_at(0, [data])
    return files


def seams_of(files: MemoryFiles) -> Seams:
    return Seams(
        files=files, clock=make._Clock(), randomness=make._Randomness(), runner=make._Runner(), owner=""
    )


@pytest.mark.parametrize(
    "case",
    [
        "minimal",
        "kinds",
        "big-seqs",
        "chain",
        "holes",
        "stream-gaps",
        "refused-control",
        "current",
        "current-no-frames",
        "current-no-header",
        "sealing",
        "sealing-half-footer",
    ],
)
def test_a_golden_directory_is_a_sound_log(case: str) -> None:
    """Segments, their chain and what is not sealed yet, also where that holds nothing."""
    files = files_of(case)
    assert list(check_directory(files, "log")) == []
    with Log.open("log", seams=seams_of(files), create=False) as log:
        entries = [plain(entry) for entry in log.read("earliest")]
        assert log.torn_bytes == 0
        if case == "refused-control":
            assert (log.chain.cluster_id, log.chain.epoch) == (make.CLUSTER_ID, 1)
    expected = [entry for path in READABLE if path.startswith(f"{case}/") for entry in expected_entries(path)]
    assert entries == expected


@pytest.mark.parametrize("path", REFUSED_CURRENT, ids=short)
def test_a_golden_current_log_that_is_refused_is_not_opened(path: str) -> None:
    """Nothing of it is a torn write, and not a byte is changed. On its own it is refused too, also where in
    its directory it holds nothing."""
    error = ERRORS[EXPECTED[path]["error"]]
    findings = list(check_segment(RealFiles(), str(GOLDEN / path)))
    assert [finding.severity for finding in findings] == ["error"]
    if EXPECTED[path].get("holds_nothing"):
        with pytest.raises(error):
            format.SegmentHeader.decode(MADE[path][: format.HEADER_BYTES])
        return
    files = files_of(path.partition("/")[0])
    assert [finding.severity for finding in check_directory(files, "log")] == ["error"]
    with pytest.raises(error):
        Log.open("log", seams=seams_of(files), create=False)
    assert make.read_whole(files, "log/current.log") == MADE[path]


@pytest.mark.parametrize("path", HINTS, ids=short)
def test_a_golden_hint_is_read_or_is_damage(path: str) -> None:
    """A reader goes on without one that is damaged, a writer does not begin."""
    directory = str(GOLDEN / path.partition("/")[0])
    if "error" in EXPECTED[path]:
        assert read_hint(RealFiles(), directory) is None
        with pytest.raises(ERRORS[EXPECTED[path]["error"]]):
            require_hint(RealFiles(), directory)
    else:
        assert require_hint(RealFiles(), directory) == Hint(**EXPECTED[path]["hint"])


@pytest.mark.parametrize("path", UNSEALED, ids=short)
def test_an_unsealed_golden_segment_reads_to_its_entries(path: str) -> None:
    """Also where a crash has torn its last write, or left half of a group."""
    file = open_golden(path)
    header = format.SegmentHeader.decode(file.read_at(0, format.HEADER_BYTES))
    scan = scan_frames(file, header, stop=file.size())
    entries = list(decode_frames(file.read_at(0, scan.end), format.HEADER_BYTES, scan.end, verify=True))
    assert [plain(entry) for entry in entries] == expected_entries(path)
    assert (scan.problem is not None) == path.startswith(
        ("current-torn/", "current-half-group/", "sealing-half-footer/")
    )
    assert scan.complete == path.startswith("sealing")


@pytest.mark.parametrize("path", READABLE, ids=short)
def test_a_golden_segment_reads_to_the_same_columns(path: str) -> None:
    """Spark reads columns, and must find what others find."""
    pytest.importorskip("numpy")
    pytest.importorskip("pyarrow")
    from lowwater.engine.log.columns import read_columns

    if path.startswith(("current-torn/", "current-half-group/", "sealing-half-footer/")):
        with pytest.raises(Corrupt):
            read_columns(open_golden(path))
        return
    if not expected_entries(path):
        with pytest.raises(NotFound):
            read_columns(open_golden(path))
        return
    rows = read_columns(open_golden(path)).to_pylist()
    expected = expected_entries(path)
    assert len(rows) == len(expected)
    for row, entry in zip(rows, expected, strict=True):
        for name in ("seq", "kind", "bucket", "key", "origin"):
            assert row[name] == entry[name]
        assert row["txn"] == entry.get("txn")
        metadata = format.decode_metadata(row["metadata"]) if row["metadata"] else None
        assert metadata == entry["metadata"]
        if "refused" not in entry and "value_ref" not in entry:
            assert row["value"].hex() == entry["value"]
        assert (row["time"].timestamp() * 1_000_000) == pytest.approx(entry["time_us"], abs=1)


# ---------------------------------------------------------------------------- compressed


COMPRESSED = [("compressed", "many-blocks"), ("compressed-one-block", "minimal")]


def stored_and_raw(case: str, raw_case: str) -> tuple[bytes, bytes]:
    (stored,) = (data for path, data in MADE.items() if path.startswith(f"{case}/") and path.endswith(".zst"))
    (raw,) = (
        data for path, data in MADE.items() if path.startswith(f"{raw_case}/") and path.endswith(".log")
    )
    return stored, raw


@pytest.mark.parametrize(("case", "raw_case"), COMPRESSED)
def test_the_golden_compressed_segment_decompresses_to_the_raw_one(case: str, raw_case: str) -> None:
    """With any zstd, without a look at the table."""
    stored, raw = stored_and_raw(case, raw_case)
    assert make.decompress(stored) == raw
    file = CompressedSegment(make.file_of(stored))
    assert file.read_at(0, file.size()) == raw


@pytest.mark.skipif(zstandard.ZSTD_VERSION != (1, 5, 7), reason="another zstd may compress to other bytes")
@pytest.mark.parametrize(
    ("raw_case", "expected"),
    [("many-blocks", "112d1f4b5651026a"), ("minimal", "069ee12d0fe91d8e")],
)
def test_the_same_zstd_always_gives_the_same_bytes(raw_case: str, expected: str) -> None:
    """Uploading twice is harmless, but sending the same bytes twice is cheaper to find out. The golden files
    are from when all was compressed at one level."""
    _, raw = stored_and_raw("compressed", raw_case)
    parts: list[bytes] = []
    compress_segment(make.file_of(raw), parts.append)
    assert blake3(b"".join(parts)).hexdigest(8) == expected


# ---------------------------------------------------------------------------- refused


@pytest.mark.parametrize("path", REFUSED_SEALED, ids=short)
def test_a_golden_segment_that_cannot_be_read_says_why(path: str) -> None:
    """ "Upgrade" for what comes from a newer version, "damaged" for what is damaged, and never half of it."""
    error = ERRORS[EXPECTED[path]["error"]]
    with pytest.raises(error) as caught:
        list(sealed_entries(path))
    findings = list(check_segment(RealFiles(), str(GOLDEN / path)))
    assert findings
    assert all(finding.severity == "error" for finding in findings)
    if error is NewerVersion:
        assert "pip install --upgrade lowwater" in caught.value.hint
        assert caught.value.exit_code == 2
        assert EXPECTED[path]["why"].replace("segment flag 0x1", "0x1").replace("entry flag ", "") in str(
            caught.value
        )
        assert any("upgrade" in finding.hint for finding in findings)


@pytest.mark.parametrize("path", [path for path in REFUSED if path.startswith("future-")], ids=short)
def test_a_log_that_a_newer_version_was_writing_is_not_opened(path: str) -> None:
    """Going on behind it could contradict what it says, and nothing of it is a torn write."""
    files = MemoryFiles()
    files.make_directory("log")
    files.open("log/current.log", create=True).write_at(0, [MADE[path]])
    with pytest.raises(NewerVersion):
        Log.open("log", seams=seams_of(files), create=False)
    assert make.read_whole(files, "log/current.log") == MADE[path]
