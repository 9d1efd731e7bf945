"""Offsets of a stream: which comes next, and an archive that is not the same any more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.spark.fed import Fed, random_archive

import lowwater
from lowwater.errors import LogDivergence, OtherCluster, VersionGone
from lowwater.spark.following import Follower, Offset
from lowwater.spark.options import parse
from lowwater.spark.plan import Part, pin
from lowwater.spark.segments import raw_batches


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Fed:
    return random_archive(tmp_path_factory.mktemp("following") / "archive", seed=6)


def follower(uri: str | Path, **options: str) -> Follower:
    return Follower(parse({"path": str(uri), **options}))


def offset(found: Offset) -> dict[str, Any]:
    """As Spark keeps it."""
    made: dict[str, Any] = json.loads(json.dumps(found._asdict()))
    return made


def seqs_in(parts: list[Part]) -> list[int]:
    return [seq for part in parts for batch in raw_batches(part, ["seq"]) for seq in batch[0].to_pylist()]


def batches_of(stream: Follower) -> list[list[int]]:
    found = []
    start = offset(stream.initial())
    while (end := offset(stream.latest(start))) != start:
        assert end["seq"] > start["seq"]
        found.append(seqs_in(stream.parts(start, end)))
        start = end
    return found


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"batch_segments_max": "1"},
        {"batch_segments_max": "3"},
        {"batch_bytes_max": "20000"},
        {"batch_entries_max": "100", "partition_bytes": "3000"},
    ],
)
def test_batches_are_all_entries_once_and_end_with_segments(archive: Fed, limits: dict[str, str]) -> None:
    """Whatever limits there are."""
    hwm = archive.engine.counted_hwm
    found = batches_of(follower(archive.uri, **limits))
    assert [seq for batch in found for seq in batch] == [e.seq for e in archive.engine.log() if e.seq <= hwm]
    ends = {segment.last for segment in pin(archive.uri).segments}
    assert {batch[-1] for batch in found} <= ends
    if "batch_segments_max" in limits:
        assert len(found) == -(-len(ends) // int(limits["batch_segments_max"]))
    if "batch_entries_max" in limits:
        assert all(len(batch) <= 100 for batch in found)
    assert (len(found) == 1) == (not limits)


def test_an_unlimited_batch_goes_to_the_end(archive: Fed) -> None:
    """`Trigger.Once` wants all there is."""
    stream = follower(archive.uri, batch_segments_max="1")
    end = stream.latest(offset(stream.initial()), unlimited=True)
    assert end == stream.newest()


def test_bounds_may_lie_within_a_segment(archive: Fed) -> None:
    """They are those of the batch reader."""
    entries = [e.seq for e in archive.engine.log() if e.seq <= archive.engine.counted_hwm]
    first, last = entries[40], entries[-40]
    found = batches_of(follower(archive.uri, start=str(first), end=str(last), batch_segments_max="2"))
    assert [seq for batch in found for seq in batch] == entries[40:-39]
    assert batches_of(follower(archive.uri, start="latest")) == []
    with pytest.raises(VersionGone, match="start is seq"):
        follower(archive.uri, start=str(entries[-1] + 1)).initial()


def test_a_stream_begins_at_a_time(archive: Fed) -> None:
    """With the first entry that is not earlier."""
    from tests.spark.moments import moment

    entries = [e for e in archive.engine.log() if e.seq <= archive.engine.counted_hwm]
    middle = entries[len(entries) // 2].time_us
    found = batches_of(follower(archive.uri, start=moment(middle).isoformat(), batch_segments_max="1"))
    assert [seq for batch in found for seq in batch] == [e.seq for e in entries if e.time_us >= middle]


def test_what_is_shipped_later_comes_in_later_batches(tmp_path: Path) -> None:
    """And what lies between two offsets stays what it was."""
    fed = random_archive(tmp_path / "archive", seed=7, steps=80)
    stream = follower(fed.uri)
    start = offset(stream.initial())
    middle = offset(stream.latest(start))
    before = seqs_in(stream.parts(start, middle))
    fed.step(60)
    fed.ship()
    end = offset(stream.latest(middle))
    assert end["seq"] == fed.engine.counted_hwm
    assert seqs_in(follower(fed.uri).parts(start, middle)) == before
    after = seqs_in(stream.parts(middle, end))
    assert before + after == [e.seq for e in fed.engine.log() if e.seq <= end["seq"]]
    assert offset(stream.latest(end)) == end
    assert stream.parts(end, end) == []


def test_what_is_there_now_is_an_end_for_who_wants_no_more(tmp_path: Path) -> None:
    """`availableNow` ends, however much is shipped meanwhile."""
    fed = random_archive(tmp_path / "archive", seed=8, steps=80)
    stream = follower(fed.uri, batch_segments_max="2")
    stream.stop_at_newest()
    hwm = fed.engine.counted_hwm
    fed.step(60)
    fed.ship()
    found = batches_of(stream)
    assert found[-1][-1] == hwm


def test_a_first_batch_that_was_stopped_is_the_same_when_it_is_done_again(tmp_path: Path) -> None:
    """Spark asks again where the stream begins, and `latest` is elsewhere by then."""
    fed = random_archive(tmp_path / "archive", seed=8, steps=80)
    start = offset(follower(fed.uri, start="latest").initial())
    fed.step(60)
    fed.ship()
    stream = follower(fed.uri, start="latest")
    end = offset(stream.latest(start))
    first = seqs_in(stream.parts(start, end))
    assert first
    fed.step(60)
    fed.ship()
    stream = follower(fed.uri, start="latest")
    again = offset(stream.initial())
    assert again["seq"] > end["seq"]
    assert seqs_in(stream.parts(again, end)) == first
    after = offset(stream.latest(end))
    assert first + seqs_in(stream.parts(end, after)) == [
        e.seq for e in fed.engine.log() if start["seq"] < e.seq <= fed.engine.counted_hwm
    ]


# ---------------------------------------------------------------------------- not the same any more


def test_a_high_water_mark_that_went_backwards_is_an_error(tmp_path: Path) -> None:
    """Spark does not order offsets: it would store the lower one, and read again what it has read."""
    fed = random_archive(tmp_path / "archive", seed=9, steps=80)
    shutil.copytree(tmp_path / "archive", tmp_path / "older")
    fed.step(60)
    fed.ship()
    stream = follower(fed.uri)
    start = offset(stream.initial())
    end = offset(stream.latest(start))
    shutil.rmtree(tmp_path / "archive")
    shutil.copytree(tmp_path / "older", tmp_path / "archive")
    for ask in (lambda: stream.latest(end), lambda: stream.parts(start, end)):
        with pytest.raises(LogDivergence, match="ends with seq") as caught:
            ask()
        assert caught.value.path is not None
        assert caught.value.path.startswith(f"file://{tmp_path}/archive/manifest/")
        assert "checkpoint location" in caught.value.hint


def test_an_archive_of_another_cluster_is_an_error(tmp_path: Path) -> None:
    """Its seqs mean nothing here."""
    for name in ("one", "two"):
        with lowwater.open(tmp_path / name, tier=str(tmp_path / f"{name} archive")) as db:
            db.create_bucket("b")
            db.ship()
    end = offset(follower(tmp_path / "one archive").newest())
    with pytest.raises(OtherCluster, match="has read that of"):
        follower(tmp_path / "two archive").latest(end)


def test_an_archive_that_goes_on_from_an_older_state_is_an_error(tmp_path: Path) -> None:
    """The same cluster, and the same seqs, with other entries."""
    archive = tmp_path / "archive"
    with lowwater.open(tmp_path / "one", tier=str(archive)) as db:
        db.create_bucket("b")
        db.ship()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shutil.copytree(archive, tmp_path / "older")
    with lowwater.open(tmp_path / "one", tier=str(archive)) as db:
        for number in range(3):
            db.put("b", "k", b"one %d" % number)
            db.ship()
    end = offset(follower(archive).newest())
    assert follower(archive).latest(end) == Offset(**end)
    shutil.rmtree(archive)
    shutil.copytree(tmp_path / "older", archive)
    with lowwater.open(tmp_path / "two", tier=str(archive)) as db:
        for number in range(30):
            db.put("b", "k", b"two %d" % number)
        db.ship()
    with pytest.raises(LogDivergence, match="another segment"):
        follower(archive).latest(end)


def test_a_restored_line_goes_on_for_its_streams(tmp_path: Path) -> None:
    """A database that lost its disk, and came back from the archive, is the same log in another epoch."""
    archive = tmp_path / "archive"
    with lowwater.open(tmp_path / "one", tier=str(archive)) as db:
        db.create_bucket("b")
        for number in range(30):
            db.put("b", f"k{number}", b"")
        db.ship()
    stream = follower(archive)
    start = offset(stream.initial())
    end = offset(stream.latest(start))
    before = seqs_in(stream.parts(start, end))
    lowwater.restore(str(archive), tmp_path / "two")
    with lowwater.open(tmp_path / "two", tier=str(archive)) as db:
        for number in range(30):
            db.put("b", f"k{number}", b"again")
        db.ship()
        expected = [entry.seq for entry in db.log(1) if entry.seq <= pin(str(archive)).hwm]
    last = offset(stream.latest(end))
    after = seqs_in(stream.parts(end, last))
    assert before + after == expected
    assert pin(str(archive)).epoch > 2


def test_entries_that_are_gone_are_an_error_or_passed_over(tmp_path: Path) -> None:
    """A log directory may have been purged."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        for _ in range(4):
            db.put("b", "k", b"")
            db._log.seal()
    names = sorted((tmp_path / "data" / "wal").glob("segment-*.log"))
    stream = follower(tmp_path / "data", batch_segments_max="1")
    start = offset(stream.initial())
    middle = offset(stream.latest(start))
    names[0].unlink()
    again = offset(stream.initial())
    with pytest.raises(VersionGone, match="are gone"):
        stream.parts(again, middle)
    # What it has read may go.
    assert stream.latest(middle).seq > middle["seq"]
    with pytest.raises(VersionGone, match="are gone"):
        stream.latest(start)
    assert follower(tmp_path / "data", fail_on_data_loss="false").latest(start).seq > middle["seq"]
    names[1].unlink()
    with pytest.raises(VersionGone, match="are gone"):
        stream.latest(middle)
    with pytest.raises(VersionGone, match="start is seq 1"):
        follower(tmp_path / "data", start="1").initial()
