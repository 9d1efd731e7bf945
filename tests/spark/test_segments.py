"""What tasks read: each column of each entry as the engine says it, whatever spares reading."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.spark.fed import Fed, random_archive

import lowwater
from lowwater.engine.format import format
from lowwater.engine.format.entries import Entry, decode_body
from lowwater.engine.format.format import Extras, Kind
from lowwater.engine.log.vectors import Frames
from lowwater.errors import (
    Corrupt,
    DataError,
    InvalidConfig,
    LimitExceeded,
    LowwaterError,
    NewerVersion,
)
from lowwater.spark import entry_columns as columns
from lowwater.spark import segments
from lowwater.spark.entry_columns import COLUMNS, MAIN_COLUMNS
from lowwater.spark.plan import EVERYTHING, Part, Pinned, PlanSelection, Verify, creation_of, parts, pin
from lowwater.spark.segments import raw_batches
from lowwater.tiering.remote_segment import RemoteSegment

WITHOUT_PLACE = [name for name in COLUMNS if name not in ("segment", "position", "frame_length", "payload")]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Fed:
    """Of an odd seed, whose log has before-images."""
    return random_archive(tmp_path_factory.mktemp("segments") / "archive", seed=5)


@pytest.fixture(scope="module")
def entries(archive: Fed) -> list[Entry]:
    return [entry for entry in archive.engine.log() if entry.seq <= archive.engine.counted_hwm]


def row_of(entry: Entry) -> dict[str, Any]:
    """What the columns have to say of an entry of the engine."""
    extras = entry.extras or format.NO_EXTRAS
    flags = format._encode_extras(extras, b"")[0] if entry.extras else 0
    reference = extras.value_ref
    image = entry.before
    is_there = image is not None and image.seq > 0
    aborts = entry.kind == "abort" and entry.refused is None
    return {
        "seq": entry.seq,
        "kind": entry.kind,
        "bucket": entry.bucket,
        "key": entry.key,
        "metadata": entry.metadata,
        "value": None if reference else entry.value,
        "time": entry.time_us,
        "origin": entry.origin,
        "txn": entry.txn,
        "kind_code": int(format.KIND_CODES[entry.kind]),
        "flags": flags,
        "refused": extras.refused,
        "previous": None if extras.txn is None else extras.txn_seq_before,
        "group_last": extras.group_seq_last,
        "session": extras.session,
        "request": None if extras.session is None else extras.request,
        "savepoint": decode_body(entry).get("savepoint") if aborts else None,
        "request_hash": extras.request_hash,
        "stream_offset": extras.stream_offset,
        "before": extras.before,
        "before_seq": None if image is None else image.seq,
        "before_time": image.time_us if is_there else None,
        "before_metadata": None if image is None else image.metadata,
        "before_value": None if image is None else image.value,
        "before_value_length": image.value_bytes if is_there else None,
        "before_value_hash": None if image is None else image.blake3,
        "value_length": reference.length if reference else len(entry.value),
        "value_seq": reference.seq if reference else None,
        "value_hash": reference.blake3 if reference else None,
        "metadata_bytes": format.encode_metadata(entry.metadata),
        "time_us": entry.time_us,
    }


def rows_in(found: Sequence[Part], columns: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for part in found:
        for batch in raw_batches(part, columns):
            assert batch.schema.names == list(columns)
            batch.validate(full=True)
            made = {name: batch.column(place) for place, name in enumerate(columns)}
            for name in {"time", "before_time"} & made.keys():
                made[name] = made[name].cast("int64")
            lists = {name: column.to_pylist() for name, column in made.items()}
            for name in {"metadata", "before_metadata"} & lists.keys():
                lists[name] = [None if each is None else dict(each) for each in lists[name]]
            rows += [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    return rows


def read(
    pinned: Pinned, columns: Sequence[str], selection: PlanSelection = EVERYTHING, verify: Verify = "strict"
) -> list[dict[str, Any]]:
    return rows_in(parts(pinned, selection, verify=verify, part_bytes=20_000), columns)


@pytest.fixture(params=["whole", "small"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything at once, or batches, requests and searches on every frame."""
    if request.param == "small":
        monkeypatch.setattr(segments, "BATCH_BYTES", 500)
        monkeypatch.setattr(segments, "READ_BYTES_OF_FOLDER", 4096)
        monkeypatch.setattr(segments, "STRETCH_FRAMES", 7)
        monkeypatch.setattr(segments, "SEARCH_BYTES_MIN", 0)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("verify", ["strict", "deep", "none"])
def test_every_column_of_every_entry_is_what_the_engine_says(
    archive: Fed, entries: list[Entry], verify: Verify
) -> None:
    """One history: that which the engine replays, and that which Spark does."""
    expected = [row_of(entry) for entry in entries]
    assert {flag.name for flag in format.Flag if any(row["flags"] & flag for row in expected)} >= {
        "TXN", "GROUP", "SESSION", "REQUEST_HASH", "BEFORE", "REFUSED", "VALUE_REF"
    }  # fmt: skip
    for name in ("before_value", "before_metadata", "before_value_hash"):
        assert sum(row[name] is not None for row in expected) > 5, name
    assert [row["before_seq"] for row in expected].count(0) > 5
    assert read(pin(archive.uri), WITHOUT_PLACE, verify=verify) == expected
    # Each alone, so that none needs another.
    for name in WITHOUT_PLACE:
        assert read(pin(archive.uri), [name], verify=verify) == [{name: row[name]} for row in expected]


@pytest.mark.parametrize(
    ("before", "error"),
    [
        (bytes(18), Corrupt),
        (struct.pack("<QQHB", 1, 2, 1, 0), Corrupt),
        (struct.pack("<QQHB", 1, 2, 0, 1) + bytes(39), Corrupt),
        (struct.pack("<QQHB", 1, 2, 0, 2), NewerVersion),
        (struct.pack("<QQHB", 2**63, 2, 0, 0), LimitExceeded),
    ],
)
def test_what_is_no_before_image_fails_who_asks_for_it(before: bytes, error: type[Exception]) -> None:
    """And nobody else: the log hands on what it does not know."""
    payload = format.encode_payload(Kind.PUT, b"b", b"k", b"", b"v", time_us=1, extras=Extras(before=before))
    frames = format.encode_frames((1,), (payload,), (len(payload),))
    batch = columns.FrameBatch(Frames(frames, np.zeros(1, np.int64)), 0, 1)
    assert columns._MAKERS["value"](batch).to_pylist() == [b"v"]
    assert columns._MAKERS["before"](batch).to_pylist() == [before]
    with pytest.raises(error):
        columns._MAKERS["before_seq"](batch)


def selections(entries: list[Entry], count: int) -> list[PlanSelection]:
    draw = random.Random("selections")
    made = []
    for _ in range(count):
        fields: dict[str, Any] = {}
        bounds = sorted(draw.sample(range(len(entries)), 2))
        if draw.random() < 0.4:
            fields["seq_first"] = entries[bounds[0]].seq + draw.randrange(2)
        if draw.random() < 0.4:
            fields["seq_last"] = entries[bounds[1]].seq
        if draw.random() < 0.3:
            fields["time_min_us"] = entries[bounds[0]].time_us + draw.randrange(2)
        if draw.random() < 0.3:
            fields["time_max_us"] = entries[bounds[1]].time_us - draw.randrange(2)
        if draw.random() < 0.3:
            fields["kinds"] = frozenset(draw.sample(["put", "copy", "commit", "noop", "nothing", "none"], 2))
        some = draw.choice([entry for entry in entries if entry.key])
        if draw.random() < 0.4:
            fields["bucket"] = draw.choice([some.bucket, "b", ""])
        if draw.random() < 0.4:
            fields["key"] = draw.choice([some.key, some.key, ""])
        elif draw.random() < 0.4:
            fields["prefix"] = some.key[: draw.randrange(4)]
        if draw.random() < 0.3:
            fields["share"] = draw.randrange(3), 3
        made.append(PlanSelection(**fields))
    return made


def is_in(entry: Entry, wanted: PlanSelection) -> bool:
    return (
        wanted.seq_first <= entry.seq <= wanted.seq_last
        and wanted.time_min_us <= entry.time_us <= wanted.time_max_us
        and (wanted.kinds is None or entry.kind in wanted.kinds)
        and (wanted.bucket is None or entry.bucket == wanted.bucket)
        and (wanted.key is None or entry.key == wanted.key)
        and (wanted.prefix is None or entry.key.startswith(wanted.prefix))
        and (wanted.share is None or is_in_share(entry, *wanted.share))
    )


def is_in_share(entry: Entry, number: int, count: int) -> bool:
    """What names no key of the database is in all of them."""
    hashed = zlib.crc32(f"{entry.bucket}{entry.key}".encode())
    return format.KIND_CODES[entry.kind] > format.Kind.COPY or hashed * count >> 32 == number


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("verify", ["strict", "none"])
def test_a_selection_gives_the_entries_that_fulfil_it(
    archive: Fed, entries: list[Entry], verify: Verify
) -> None:
    """Refused ones too, which no index knows: a filter means the same wherever it is evaluated."""
    pinned = pin(archive.uri)
    seen = 0
    for selection in selections(entries, 120):
        expected = [row_of(entry) for entry in entries if is_in(entry, selection)]
        assert read(pinned, WITHOUT_PLACE, selection, verify) == expected, selection
        seen += len(expected) > 0
    assert seen > 40


def test_a_key_of_an_archive_without_refusals_is_found_by_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key of millions must not cost reading them all."""
    with lowwater.open(tmp_path / "data", tier=str(tmp_path / "archive")) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"k{number}", bytes(1000)) for number in range(3000)])
        db.ship()
        expected = [entry.seq for entry in db.log() if entry.key == "k7"]
    pinned = pin(str(tmp_path / "archive"))
    read_bytes: list[int] = []
    plain = segments.RemoteSegment.read_blocks

    def counted(self: Any, start: int, end: int, **options: Any) -> tuple[int, bytes]:
        read_bytes.append(end - start)
        return plain(self, start, end, **options)

    monkeypatch.setattr(segments.RemoteSegment, "read_blocks", counted)
    assert [row["seq"] for row in read(pinned, ["seq"], PlanSelection(bucket="b", key="k7"))] == expected
    assert sum(read_bytes) < 10_000
    read_bytes.clear()
    assert read(pinned, ["seq"], PlanSelection(kinds=frozenset({"abort"}))) == []
    assert not read_bytes


def test_a_range_of_a_segment_reads_no_more_than_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks that share a segment would else read all of it twice."""
    with lowwater.open(tmp_path / "data", tier=str(tmp_path / "archive")) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"k{number}", random.Random(number).randbytes(1000)) for number in range(4000)])
        db.ship()
    pinned = pin(str(tmp_path / "archive"))
    found = parts(pinned, part_bytes=10**6)
    assert len(found) >= 4
    assert len(pinned.segments) < len(found)
    fetcher = segments.fetcher_of(pinned.place)
    store = fetcher._store
    fetched: list[int] = []
    plain = store.read

    def counted(name: str, start: int = 0, end: int | None = None) -> bytes:
        data = plain(name, start, end)
        fetched.append(len(data))
        return data

    monkeypatch.setattr(store, "read", counted)
    for part in found:
        fetched.clear()
        assert list(raw_batches(part, ["seq"]))
        # Its million, the blocks at both ends, and the footer.
        assert sum(fetched) < 2_200_000


def test_values_that_are_elsewhere_are_found_there(archive: Fed) -> None:
    """A copy of a large value says which frame has the bytes."""
    rows = read(pin(archive.uri), ["seq", "value", "value_seq", "value_length", "value_hash"])
    values = {row["seq"]: row["value"] for row in rows}
    copies = [row for row in rows if row["value_seq"] is not None]
    assert copies
    from blake3 import blake3

    for row in copies:
        assert row["value"] is None
        found = values[row["value_seq"]]
        assert (len(found), blake3(found).digest()) == (row["value_length"], row["value_hash"])


def test_places_lead_to_the_frames(archive: Fed) -> None:
    """A checkpoint says by them where a large value lies."""
    pinned = pin(archive.uri)
    rows = read(pinned, ["seq", "segment", "position", "frame_length", "payload"])

    fetcher = segments.fetcher_of(pinned.place)
    by_first = {each.first: RemoteSegment(fetcher, pinned.name_of(each), each) for each in pinned.segments}
    for row in rows[::50]:
        frame = by_first[row["segment"]].frame_at(row["position"])
        assert (int.from_bytes(frame[:8], "little"), len(frame)) == (row["seq"], row["frame_length"])
        assert frame[format.FRAME_BYTES :] == row["payload"]


def test_a_log_directory_reads_as_its_archive(tmp_path: Path) -> None:
    """The bytes are the same, and so are the rows."""
    with lowwater.open(tmp_path / "data", tier=str(tmp_path / "archive")) as db:
        db.create_bucket("b")
        for number in range(50):
            db.put("b", f"k{number}", b"v" * number * 20, metadata={"n": str(number % 3)})
        db.ship()
    archive = read(pin(str(tmp_path / "archive")), list(COLUMNS))
    local = read(pin(str(tmp_path / "data")), list(COLUMNS))
    assert archive == local[: len(archive)]


def test_a_clone_has_the_history_of_its_parent(tmp_path: Path) -> None:
    """Its own archive holds only what it has written."""
    with lowwater.open(tmp_path / "one", tier=str(tmp_path / "archive")) as db:
        db.create_bucket("b")
        for number in range(20):
            db.put("b", f"k{number}", b"one")
        at = db.put("b", "last", b"one")
        db.put("b", "later", b"one")
        db.ship()
    lowwater.restore(str(tmp_path / "archive"), tmp_path / "two", at=at)
    with lowwater.open(tmp_path / "two", tier=str(tmp_path / "clone")) as db:
        db.put("b", "last", b"two")
        db.ship()
        expected = [(entry.seq, entry.key, entry.value) for entry in db.log(1)]
    pinned = pin(str(tmp_path / "clone"))
    assert creation_of(pinned).cluster_id == pin(str(tmp_path / "archive")).cluster_id != pinned.cluster_id
    rows = read(pinned, ["seq", "key", "value"])
    assert [tuple(row.values()) for row in rows] == [row for row in expected if row[0] <= pinned.hwm]
    assert {("last", b"one"), ("last", b"two")} < {(row["key"], row["value"]) for row in rows}


# ---------------------------------------------------------------------------- damage


def copy_of(archive: Fed, to: Path) -> Path:
    import shutil

    shutil.copytree(archive.uri.removeprefix("file://"), to)
    return to


def test_a_segment_that_is_gone_is_named(archive: Fed, tmp_path: Path) -> None:
    """Its rows must not merely be missing."""
    folder = copy_of(archive, tmp_path / "archive")
    pinned = pin(str(folder))
    name = pinned.name_of(pinned.segments[3])
    (folder / name).unlink()
    with pytest.raises(Corrupt, match="not in the store") as caught:
        read(pinned, ["seq"])
    assert caught.value.path == f"file://{folder}/{name}"


def test_every_flipped_byte_is_found_or_in_no_row(archive: Fed, tmp_path: Path, entries: list[Entry]) -> None:
    """An error that names the object, and never another row than the engine's."""
    folder = copy_of(archive, tmp_path / "archive")
    pinned = pin(str(folder))
    expected = [row_of(entry) for entry in entries]
    draw = random.Random("flips")
    caught = 0
    for _ in range(150):
        segment = draw.choice(pinned.segments)
        path = folder / pinned.name_of(segment)
        data = path.read_bytes()
        place = draw.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
        segments._fetchers.clear()
        try:
            assert read(pinned, WITHOUT_PLACE) == expected
        except LowwaterError as error:
            told = error
        else:
            told = None
        if told is not None:
            assert isinstance(told, DataError)
            assert told.path == f"file://{path}"
            assert "scrub" in told.hint
            caught += 1
        path.write_bytes(data)
    # What is left is the hash of a segment's compressed bytes.
    assert caught > 140


def test_deep_finds_what_no_hash_can(tmp_path: Path) -> None:
    """A writer that went wrong has written good hashes over it."""
    from lowwater.engine.log.log import Log

    with Log.open(str(tmp_path / "wal")) as log:
        bad = format.encode_payload(3, b"b", b"k", b"\xff\xff", b"v", time_us=0)
        log.append_payloads([bad], trusted=True)
        log.seal()
    pinned = pin(str(tmp_path / "wal"))
    assert len(read(pinned, ["seq", "key"])) == 3
    with pytest.raises(Corrupt, match="metadata"):
        read(pinned, ["seq", "key"], verify="deep")
    with pytest.raises(Corrupt, match="metadata") as caught:
        read(pinned, MAIN_COLUMNS)
    assert "log verify" in caught.value.hint
    assert caught.value.path == f"file://{tmp_path}/wal/{pinned.name_of(pinned.segments[0])}"


def test_a_column_that_is_none_names_the_nearest(archive: Fed) -> None:
    """A schema is typed by hand."""
    with pytest.raises(InvalidConfig, match="no column 'kye'") as caught:
        read(pin(archive.uri), ["seq", "kye"])
    assert "key" in caught.value.hint


def test_memory_is_bounded_by_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of 128 MB must not take 128 MB in every task."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        db.put_many("b", [(f"k{number}", bytes(100_000)) for number in range(300)])
        db._log.seal()
    monkeypatch.setattr(segments, "READ_BYTES_OF_FOLDER", 2**20)
    monkeypatch.setattr(segments, "BATCH_BYTES", 2**20)
    import tracemalloc

    (part,) = parts(pin(str(tmp_path / "data")))
    tracemalloc.start()
    for batch in raw_batches(part, list(MAIN_COLUMNS)):
        assert batch.nbytes < 1.3 * 2**20
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * 2**20


# ---------------------------------------------------------------------------- positions


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Pinned:
    """An archive of one segment, raw, so that a flipped byte is found by hashes alone."""
    folder = tmp_path_factory.mktemp("positions")
    with lowwater.open(
        folder / "data", tier=str(folder / "archive"), config={"wal": {"compression": "none"}}
    ) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"k{number}", b"value" * (number % 50)) for number in range(3000)])
        db.ship()
    return pin(str(folder / "archive"))


def whole(pinned: Pinned, columns: Sequence[str], verify: Verify = "strict") -> list[dict[str, Any]]:
    segments._fetchers.clear()
    return rows_in(parts(pinned, verify=verify), columns)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("verify", ["strict", "deep"])
def test_positions_that_are_told_wrong_give_no_other_rows(large: Pinned, verify: Verify) -> None:
    """The footer of a segment is believed only where it has its hash."""
    expected = whole(large, WITHOUT_PLACE)
    assert len(expected) > 3000
    (segment,) = large.segments
    path = Path(large.place.uri.removeprefix("file://")) / large.name_of(segment)
    data = path.read_bytes()
    draw = random.Random("positions")
    start = format.align_footer(segment.body_bytes)
    for frame in (0, 1, segment.frame_count - 1, *draw.sample(range(segment.frame_count), 9)):
        place = start + 4 * frame + draw.randrange(4)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
        with pytest.raises(Corrupt, match="footer's hash") as caught:
            whole(large, WITHOUT_PLACE, verify)
        assert caught.value.path == f"file://{path}"
        assert "scrub" in caught.value.hint
    path.write_bytes(data)
    assert whole(large, WITHOUT_PLACE, verify) == expected


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("verify", ["strict", "deep"])
def test_damage_in_the_index_of_keys_is_an_error_for_who_reads_all_frames(
    large: Pinned, verify: Verify
) -> None:
    """No row needs it, and who looks a key up later does."""
    expected = whole(large, WITHOUT_PLACE)
    (segment,) = large.segments
    path = Path(large.place.uri.removeprefix("file://")) / large.name_of(segment)
    data = path.read_bytes()
    draw = random.Random("index")
    index = format.align_footer(segment.body_bytes) + 4 * segment.frame_count
    for place in (index, *(draw.randrange(index, index + 8 * 3000) for _ in range(5))):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
        with pytest.raises(Corrupt, match="footer's hash") as caught:
            whole(large, ["seq"], verify)
        assert caught.value.path == f"file://{path}"
        assert "scrub" in caught.value.hint
        assert whole(large, WITHOUT_PLACE, "none") == expected
    path.write_bytes(data)
    assert whole(large, WITHOUT_PLACE, verify) == expected


@pytest.mark.usefixtures("sizes")
def test_a_footer_that_was_damaged_on_the_way_heals(large: Pinned, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is asked for again."""
    expected = whole(large, WITHOUT_PLACE)
    (segment,) = large.segments
    segments._fetchers.clear()
    store = segments.fetcher_of(large.place)._store
    plain, damaged = store.read, 0

    def read(name: str, start: int = 0, end: int | None = None) -> bytes:
        nonlocal damaged
        found = bytearray(plain(name, start, end))
        place = segment.body_bytes + 4 * segment.frame_count + 5000
        if start <= place < start + len(found) and not damaged:
            found[place - start] ^= 1
            damaged += 1
        return bytes(found)

    monkeypatch.setattr(store, "read", read)
    assert rows_in(parts(large), WITHOUT_PLACE) == expected
    assert damaged == 1


def test_a_key_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    """Beside keys that are only ASCII, which are not looked at one by one."""
    from lowwater.engine.log.log import Log

    for name, keys in (("bad", [b"k", b"\xff"]), ("split", [b"\xc3", b"\xbc"])):
        with Log.open(str(tmp_path / name)) as log:
            frames = [
                format.encode_payload(3 + place, b"b", key, b"", b"v", time_us=0)
                for place, key in enumerate(keys)
            ]
            log.append_payloads(frames, trusted=True)
            log.seal()
        with pytest.raises(Corrupt, match="UTF-8"):
            read(pin(str(tmp_path / name)), ["key"])
