"""What is planned on the driver: which manifest, which parts, and every bad input as one error."""

from __future__ import annotations

import pickle
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.spark.fed import Fed, random_archive

import lowwater
from lowwater.engine.log.log import Log
from lowwater.engine.seams.real import RealClock
from lowwater.errors import (
    Corrupt,
    InvalidConfig,
    LimitExceeded,
    LowwaterError,
    NewerVersion,
    NotFound,
    NotLowwater,
    StoreDenied,
    StoreMissing,
    VersionGone,
)
from lowwater.spark import plan
from lowwater.spark.entry_columns import COLUMNS
from lowwater.spark.options import parse
from lowwater.spark.pinned_archive import BaseCheckpoint
from lowwater.spark.plan import Pinned, PlanSelection, creation_of, parts, piece_bytes, pin, seq_of
from lowwater.spark.segments import raw_batches
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.names import checkpoint_name
from lowwater.tiering.open_store import open_store
from lowwater.tiering.testing.s3_server import S3Server


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Fed:
    return random_archive(tmp_path_factory.mktemp("plan") / "archive", seed=1)


def frames_of(found: list[plan.Part]) -> list[tuple[str, int, int]]:
    return [(each.name, each.frame_first, each.frame_stop) for part in found for each in part.pieces]


def test_what_is_pinned_is_what_the_engine_says(archive: Fed) -> None:
    """High-water mark, segments and checkpoints are those of the log's own catalogue."""
    pinned = pin(archive.uri)
    catalogue = archive.engine.catalogue
    assert pinned.hwm == archive.engine.counted_hwm
    assert list(pinned.segments) == list(catalogue.segments)
    assert list(pinned.checkpoints) == list(catalogue.checkpoints)
    assert pinned.cluster_id == b"c" * 16
    assert creation_of(pinned).salt == b"s" * 16
    assert creation_of(pinned).settings.inline_bytes_max == 32


def test_parts_hold_each_frame_once_and_in_order(archive: Fed) -> None:
    """A frame that two tasks read is a row twice, and one that none reads is a hole."""
    pinned = pin(archive.uri)
    for part_bytes in (1, 3000, 10_000, 10**9):
        found = parts(pinned, part_bytes=part_bytes)
        covered: dict[str, list[tuple[int, int]]] = {}
        for name, first, stop in frames_of(found):
            assert first < stop
            covered.setdefault(name, []).append((first, stop))
        assert list(covered) == [pinned.name_of(segment) for segment in pinned.segments]
        for segment in pinned.segments:
            ranges = covered[pinned.name_of(segment)]
            assert ranges[0][0] == 0
            assert ranges[-1][1] == segment.frame_count
            assert all(stop == first for (_, stop), (first, _) in pairwise(ranges))


def test_parts_are_of_about_one_size(archive: Fed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest task decides when a stage ends."""
    monkeypatch.setattr(plan, "PART_BYTES_MIN", 1000)
    pinned = pin(archive.uri)
    for count in (2, 3, 7):
        sizes = [sum(map(piece_bytes, part.pieces)) for part in parts(pinned, tasks_min=count)]
        assert len(sizes) == count
        assert max(sizes) < 1.5 * sum(sizes) / count


def test_a_small_archive_is_one_task(archive: Fed) -> None:
    """A task costs more than reading a mebibyte."""
    assert len(parts(pin(archive.uri), tasks_min=64)) == 1


def test_segments_outside_of_the_selection_are_not_in_any_part(archive: Fed) -> None:
    """That is what makes a day of a year cheap."""
    pinned = pin(archive.uri)
    middle = pinned.segments[len(pinned.segments) // 2]
    found = parts(pinned, PlanSelection(seq_first=middle.first, seq_last=middle.last))
    assert [name for name, _, _ in frames_of(found)] == [pinned.name_of(middle)]
    found = parts(pinned, PlanSelection(time_min_us=middle.time_min_us, time_max_us=middle.time_max_us))
    names = {name for name, _, _ in frames_of(found)}
    assert pinned.name_of(middle) in names
    for segment in pinned.segments:
        overlaps = segment.time_min_us <= middle.time_max_us and segment.time_max_us >= middle.time_min_us
        assert (pinned.name_of(segment) in names) == overlaps
    assert parts(pinned, PlanSelection(seq_first=5, seq_last=4)) == []


def test_the_seq_of_a_moment_is_the_last_entry_that_is_not_later(archive: Fed) -> None:
    """The same rule as the engine's."""
    from datetime import UTC, datetime, timedelta

    pinned = pin(archive.uri)
    entries = [entry for entry in archive.engine.log() if entry.seq <= pinned.hwm]
    assert seq_of(pinned, None) == pinned.hwm
    assert seq_of(pinned, 7) == 7
    for entry in entries[::97]:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=entry.time_us)
        assert seq_of(pinned, moment) == max(each.seq for each in entries if each.time_us <= entry.time_us)


def test_a_part_is_small_and_shows_no_secret(archive: Fed) -> None:
    """It is sent to executors, and its repr ends up in logs."""
    pinned = pin(archive.uri)
    place = plan.PartPlace(pinned.place.uri, {"secret_access_key": "hunter2"})
    (part,) = parts(Pinned(place, *[getattr(pinned, name) for name in list(pinned.__dataclass_fields__)[1:]]))
    assert "hunter2" not in repr(part)
    assert pickle.loads(pickle.dumps(part)) == part
    assert len(pickle.dumps(part)) < 1000 + 400 * len(pinned.segments)


def test_a_manifest_that_was_pinned_is_not_read_again(archive: Fed) -> None:
    """A stream asks each time whether there is something new."""
    pinned = pin(archive.uri)
    assert pin(archive.uri, known=pinned) is pinned


def test_a_directory_is_read_as_far_as_it_is_sealed(tmp_path: Path) -> None:
    """A database that ships nowhere has a history too."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        with pytest.raises(NotFound, match="sealed yet"):
            pin(str(tmp_path / "data"))
        db._log.seal()
        seq = db.put("b", "later", b"")
        # Its footer is written in the background.
        while not list((tmp_path / "data" / "wal").glob("segment-*.log")):
            time.sleep(0.001)
        pinned = pin(str(tmp_path / "data"))
        assert pinned.hwm < seq
        assert pinned.segments[0].first == 1
        assert pin(str(tmp_path / "data" / "wal")) == pinned


def test_a_directory_without_one_of_its_segments_is_an_error(tmp_path: Path) -> None:
    """Fewer rows would be an answer that is wrong."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        for _ in range(3):
            db.put("b", "k", b"")
            db._log.seal()
    names = sorted((tmp_path / "data" / "wal").glob("segment-*.log"))
    names[1].unlink()
    with pytest.raises(Corrupt, match="the one before it ends") as caught:
        pin(str(tmp_path / "data"))
    assert caught.value.path == str(names[2])


# ---------------------------------------------------------------------------- bad input


def error_of(error: type[LowwaterError], uri: Path | str, words: str, **options: str) -> LowwaterError:
    def ask() -> None:
        found = parse({"path": str(uri), **options})
        found.selection(pin(found.uri, found.store))

    with pytest.raises(error, match=words) as caught:
        ask()
    assert caught.value.hint
    return caught.value


def test_what_is_no_archive_is_one_error_that_names_it(tmp_path: Path, archive: Fed) -> None:
    """The first thing that everybody gets wrong is the path."""
    error_of(InvalidConfig, "", "which archive")
    error_of(InvalidConfig, "s4://bucket/prefix", "unknown scheme")
    error = error_of(StoreMissing, tmp_path / "nowhere", "no such folder")
    assert error.path == f"file://{tmp_path}/nowhere"
    error = error_of(NotFound, tmp_path, "no archive here")
    assert error.path == f"file://{tmp_path}"
    error_of(InvalidConfig, archive.uri, "a folder takes no options", **{"store.region": "x"})


def test_an_archive_to_which_nothing_was_shipped_is_an_error(tmp_path: Path) -> None:
    """It is not an empty table: somebody waits for rows."""
    with lowwater.open(tmp_path / "data", tier=str(tmp_path / "archive")) as db:
        db.ship()
    for manifest in (tmp_path / "archive" / "manifest").glob("*/*.cbor"):
        manifest.unlink()
    shutil.rmtree(tmp_path / "archive" / "states")
    error = error_of(NotFound, tmp_path / "archive", "nothing was shipped")
    assert error.path == f"file://{tmp_path}/archive"


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda data: b"hello", Corrupt, "not CBOR|no archive"),
        (lambda data: data.replace(b"archive", b"chivear"), NotLowwater, "no archive"),
        (lambda data: data.replace(b"version\x01", b"version\x02"), NewerVersion, "version 2"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), Corrupt, "does not match|not CBOR"),
    ],
)
def test_a_foreign_a_newer_and_a_damaged_archive_are_three_errors(
    tmp_path: Path, change: Any, kind: type[LowwaterError], words: str
) -> None:
    """Each asks for something else."""
    with lowwater.open(tmp_path / "data", tier=str(tmp_path / "archive")) as db:
        db.create_bucket("b")
        db.ship()
    cluster = tmp_path / "archive" / "cluster.cbor"
    cluster.write_bytes(change(cluster.read_bytes()))
    error = error_of(kind, tmp_path / "archive", words)
    assert error.path == f"file://{tmp_path}/archive/cluster.cbor"


def test_a_part_of_the_catalogue_that_is_gone_is_named(tmp_path: Path) -> None:
    """Without it nobody knows what there is to read."""
    with lowwater.open(tmp_path / "data", tier=str(tmp_path / "archive")) as db:
        db.create_bucket("b")
        for _ in range(70):
            db._log.seal()
            db.put("b", "k", b"")
        db.ship()
    chunks = list((tmp_path / "archive" / "manifest" / "chunks").iterdir())
    assert chunks
    for chunk in chunks:
        chunk.unlink()
    error = error_of(Corrupt, tmp_path / "archive", "part of the catalogue is gone")
    assert error.path in {f"file://{chunk}" for chunk in chunks}


def test_bounds_beyond_the_archive_are_errors(archive: Fed) -> None:
    """The rows that are missing would not be missed."""
    hwm = pin(archive.uri).hwm
    assert error_of(VersionGone, archive.uri, "start is seq", start=str(hwm + 1)).seq == hwm + 1
    assert error_of(VersionGone, archive.uri, "end is seq", end=str(hwm + 1)).seq == hwm + 1
    error_of(InvalidConfig, archive.uri, "above end", start="10", end="9")
    error_of(InvalidConfig, archive.uri, "above end", start="2026-01-02T00:00Z", end="2026-01-01T00:00Z")
    error_of(InvalidConfig, archive.uri, "2\\^63-1", end=str(2**63))
    error_of(InvalidConfig, archive.uri, "without its zone", start="2026-01-02T00:00")
    error_of(InvalidConfig, archive.uri, "start is 'noon'", start="noon")


def test_an_option_that_is_none_names_the_nearest(archive: Fed) -> None:
    """A misspelt bound that is ignored reads all."""
    assert "kinds" in error_of(InvalidConfig, archive.uri, "no option 'kind'", kind="put").hint
    assert "put" in error_of(InvalidConfig, archive.uri, "no kind 'putt'", kinds="putt").hint
    assert "strict" in error_of(InvalidConfig, archive.uri, "verify is 'yes'", verify="yes").hint
    error_of(InvalidConfig, archive.uri, "partition_bytes is '0'", partition_bytes="0")
    error_of(InvalidConfig, archive.uri, "fail_on_data_loss is 'no'", fail_on_data_loss="no")


def test_seqs_that_spark_has_no_number_for_are_an_error(tmp_path: Path) -> None:
    """A number that turns negative is worse than none."""
    with Log.open(str(tmp_path / "wal")) as log:
        log.append_payloads([lowwater.CreateBucket("b").encode(0)], seqs=[2**63])
        log.seal()
    with pytest.raises(LimitExceeded, match="2\\^63-1"):
        pin(str(tmp_path / "wal"))


def test_an_s3_server_says_what_is_wrong_by_one_error(s3_server: S3Server) -> None:
    """Keys, buckets and endpoints are typed by hand too. No secret is in what is said."""
    options = {f"store.{name}": value for name, value in s3_server.options.items()}
    error_of(NotFound, s3_server.uri("nothing-here"), "no archive here", **options)
    wrong = {**options, "store.secret_access_key": "hunter2-hunter2-hunter2"}
    error = error_of(StoreDenied, s3_server.uri("nothing-here"), "signature", **wrong)
    assert "hunter2" not in f"{error} {error.hint}"
    error_of(StoreMissing, "s3://no-such-bucket/prefix", "no such bucket", **options)
    error_of(InvalidConfig, s3_server.uri("x"), "no option endpint", **{"store.endpint": "x"})


def test_an_archive_in_s3_reads_as_its_folder(archive: Fed, s3_server: S3Server) -> None:
    """By ranged requests, with credentials that are given as options."""
    uri = s3_server.uri("spark-plan")
    store = open_store(uri, options=s3_server.options)
    folder = Path(archive.uri.removeprefix("file://"))
    for path in folder.rglob("*"):
        if path.is_file() and ".tmp" not in path.parts:
            data = path.read_bytes()
            store.write(str(path.relative_to(folder)), [data], size=len(data))
    store.close()
    found = {}
    for where, options in ((archive.uri, {}), (uri, s3_server.options)):
        planned = parts(pin(where, options), verify="deep", part_bytes=20_000)
        found[where] = [
            row for part in planned for batch in raw_batches(part, COLUMNS) for row in batch.to_pylist()
        ]
    assert found[uri] == found[archive.uri]
    assert len(found[uri]) > 400


def test_a_state_begins_with_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    """One that is lost costs time: the one before it, or the log, has everything."""
    (tmp_path / "archive").mkdir()
    with lowwater.open(tmp_path / "db", tier=f"file://{tmp_path}/archive") as db:
        db.create_bucket("b")
        for number in range(3):
            db.put("b", f"{number}", b"x")
            db.checkpoint()
            db.ship()
    pinned = pin(str(tmp_path / "archive"))
    known = pinned.checkpoints
    store = open_store(str(tmp_path / "archive"))
    for count in (len(known), len(known) - 1, 0):
        for each in known[count:]:
            store.delete(checkpoint_name(each))
        base = BaseCheckpoint.of(Fetcher(store, clock=RealClock()), known)
        assert (None if base is None else base.descriptor) == (known[count - 1] if count else None)
    store.close()
