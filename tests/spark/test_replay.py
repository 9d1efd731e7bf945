"""What entries make of keys: the same as the engine, however the log is divided into parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.spark.fed import Fed, random_archive

from lowwater.engine.format.entries import Copy, CreateBucket, Put
from lowwater.spark import plan, reading, segments
from lowwater.spark.plan import EVERYTHING, Part, Pinned, PlanSelection, parts, pin, shares
from lowwater.spark.reading import ReadStretch, Segments
from lowwater.spark.replay import COUNT_COLUMNS, ENDS, NO_ENDS, Ends, ends_of, joined, needed, thinned
from lowwater.spark.segments import fetcher_of
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint

COLUMNS = ("bucket", "key", "seq", "time", "kind", "metadata", "value", "txn", "frame")


def divided(pinned: Pinned, selection: PlanSelection = EVERYTHING, pieces: int = 1) -> list[Part]:
    """Parts of one piece each, cut wherever that may be."""
    found = []
    for part in parts(pinned, selection):
        for piece in part.pieces:
            step = max(1, (piece.frame_stop - piece.frame_first) // pieces)
            for start in range(piece.frame_first, piece.frame_stop, step):
                stop = min(start + step, piece.frame_stop)
                cut = piece._replace(frame_first=start, frame_stop=stop)
                found.append(Part(part.place, (cut,), part.selection, part.verify))
    return found


def crossing(found: list[Part]) -> Ends:
    ends = NO_ENDS
    for part in found:
        for batch in reading.crossing_ends(part):
            ends = joined(ends, Ends.from_batch(batch))
    return ends


def stretches(pinned: Pinned, at: int, pieces: int, **narrowed: Any) -> list[ReadStretch]:
    found = divided(pinned, PlanSelection(seq_last=at, **narrowed), pieces)
    ends = crossing(found)
    return [ReadStretch(part, at, COLUMNS, ends=ends) for part in found]


def segments_of(pinned: Pinned) -> Segments:
    return Segments(pinned.place, tuple((pinned.name_of(each), each) for each in pinned.segments))


def rows_of(batches: Any) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def state(pinned: Pinned, at: int, pieces: int, **narrowed: Any) -> list[tuple[Any, ...]]:
    """As tasks and Spark would make it together."""
    newest: dict[Any, int] = {}
    found = stretches(pinned, at, pieces, **narrowed)
    for stretch in found:
        for row in rows_of(reading.newest_keys(stretch)):
            name = row["bucket"], row["key"]
            newest[name] = max(newest.get(name, 0), row["frame"])
    winners, segments = set(newest.values()), segments_of(pinned)
    objects = [row for each in found for row in rows_of(reading.newest_objects(each, segments))]
    return sorted(
        map(as_object, [row for row in objects if row["frame"] in winners]), key=lambda row: row[:2]
    )


def as_object(row: dict[str, Any]) -> tuple[Any, ...]:
    time_us = int(row["time"].timestamp() * 1_000_000 + 0.5)
    metadata = None if row["metadata"] is None else dict(row["metadata"])
    return row["bucket"], row["key"], row["value"], metadata, row["seq"], time_us


def state_of_shares(pinned: Pinned, at: int, **narrowed: Any) -> list[tuple[Any, ...]]:
    """As tasks make it that each have some of the keys."""
    whole = shares(pinned, PlanSelection(pinned.seq_first, at, **narrowed), verify="strict", part_bytes=10**9)
    segments = segments_of(pinned)
    found = [reading.newest_objects(ReadStretch(part, at, COLUMNS), segments) for part in whole]
    return sorted((as_object(row) for each in found for row in rows_of(each)), key=lambda row: row[:2])


@pytest.mark.parametrize("thinned_bytes", [0, 10**9])
def test_the_state_of_shares_of_the_keys_is_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thinned_bytes: int
) -> None:
    """Without what cannot be the newest any more, of which there may be more than memory."""
    monkeypatch.setattr(plan, "PART_BYTES_MIN", 0)
    monkeypatch.setattr(reading, "PART_BYTES", thinned_bytes)
    monkeypatch.setattr(segments, "BATCH_BYTES", 500)
    fed = random_archive(tmp_path / "archive", 5, steps=300)
    pinned = pin(fed.uri)
    for at in sorted(fed.random.sample(range(fed.first, pinned.hwm + 1), 20)):
        assert state_of_shares(pinned, at) == fed.state(at), at
        narrowed = [row for row in fed.state(at) if row[0] == "b" and row[1].startswith("k")]
        assert state_of_shares(pinned, at, bucket="b", prefix="k") == narrowed, at
    fed.close()


def test_a_key_that_is_written_often_takes_no_more_memory(tmp_path: Path) -> None:
    """All of it is in one share."""
    fed = Fed(tmp_path / "archive", 1)
    fed.order(CreateBucket("b"))
    for number in range(2000):
        fed.order(Put("b", "k" if number % 10 else f"k{number}", b"v"))
    fed.ship()
    (part,) = parts(pin(fed.uri))
    columns = needed(COUNT_COLUMNS, ("bucket", "key"))
    batches = [slice_ for batch in segments.raw_batches(part, columns) for slice_ in sliced(batch, 100)]
    bytes_max = 10 * max(batch.nbytes for batch in batches)
    left = pa.Table.from_batches(thinned(iter(batches), bytes_max))
    assert left.num_rows < 1300
    assert newest_rows(left) == newest_rows(pa.Table.from_batches(batches))
    fed.close()


def test_there_are_no_shares_of_more_than_a_task_can_hold(tmp_path: Path) -> None:
    """However large parts may be: a key that only transactions write takes all that was written."""
    fed = random_archive(tmp_path / "archive", 1, steps=40)
    pinned = pin(fed.uri)
    (segment, *_) = pinned.segments
    for body_bytes, count in ((2**19, 1), (2**28, 2), (2**29, 4), (2**29 + 2**20, 0), (2**31, 0)):
        larger = replace(pinned, segments=[segment._replace(body_bytes=body_bytes)])
        assert len(shares(larger, EVERYTHING, verify="strict", part_bytes=2**40)) == count
    fed.close()


def newest_rows(frames: pa.Table) -> dict[str, int]:
    return dict(zip(frames["key"].to_pylist(), frames["seq"].to_pylist(), strict=True))


def sliced(batch: Any, rows: int) -> list[Any]:
    return [batch.slice(start, rows) for start in range(0, len(batch), rows)]


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_state_as_of_any_seq_is_the_engines(tmp_path: Path, pieces: int) -> None:
    """Holes, groups that the seq cuts through, transactions that are open there: none of it counts."""
    fed = random_archive(tmp_path / "archive", pieces, steps=300)
    pinned = pin(fed.uri)
    for at in sorted(fed.random.sample(range(fed.first, pinned.hwm + 1), 20)):
        assert state(pinned, at, pieces) == fed.state(at), at
    fed.close()


@pytest.mark.long
@given(st.integers(0, 10**9), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_of_any_history_the_state_is_the_engines(tmp_path_factory: Any, seed: int, pieces: int) -> None:
    fed = random_archive(tmp_path_factory.mktemp("random") / "archive", seed, steps=160)
    pinned = pin(fed.uri)
    for at in fed.random.sample(range(fed.first, pinned.hwm + 1), 3):
        assert state(pinned, at, pieces) == fed.state(at), at
    fed.close()


def test_a_bucket_and_a_prefix_narrow_what_is_read(tmp_path: Path) -> None:
    """The ends of transactions have no bucket, and count all the same."""
    fed = random_archive(tmp_path / "archive", 7, steps=300)
    pinned = pin(fed.uri)
    for at in (pinned.hwm // 2, pinned.hwm):
        expected = [row for row in fed.state(at) if row[0] == "b" and row[1].startswith("k1")]
        assert expected
        assert state(pinned, at, 2, bucket="b", prefix="k1") == expected
    fed.close()


def test_all_versions_are_those_that_reads_at_seqs_return(tmp_path: Path) -> None:
    """Each has the seq and the time of what made it, and of several in one the last survives."""
    fed = random_archive(tmp_path / "archive", 11, steps=200)
    pinned = pin(fed.uri)
    segments = segments_of(pinned)
    found = stretches(pinned, pinned.hwm, 1)
    rows = [row for each in found for row in rows_of(reading.versions(each, segments))]
    survivors: dict[Any, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["frame"]):
        survivors[row["bucket"], row["key"], row["seq"]] = row
    seen: dict[Any, list[dict[str, Any]]] = {}
    for (bucket, key, _), row in survivors.items():
        seen.setdefault((bucket, key), []).append(row)
    checked = 0
    for (bucket, key), versions in seen.items():
        if not key:
            continue
        for version in versions:
            if version["seq"] <= fed.first:
                continue
            there = {row[:2]: row for row in fed.state(version["seq"])}.get((bucket, key))
            assert (there is None) == version["kind"].startswith("delete"), version
            assert there is None or there == as_object(version)
            checked += 1
    assert checked > 50
    fed.close()


def test_roll_backs_undo_what_lies_between_also_across_parts(tmp_path: Path) -> None:
    """Of a transaction with nested roll-backs each frame is a part of its own."""
    from lowwater.engine.format.entries import Abort, Begin, Commit, CreateBucket, Put

    fed = Fed(tmp_path / "archive", 1)
    fed.order(CreateBucket("a"))
    fed.order(Begin())
    txn = fed.seq
    points = []
    for number in range(6):
        fed.order(Put("a", f"k{number}", b"%d" % number, txn=txn))
        points.append(fed.seq)
    fed.order(Abort(txn, savepoint_seq=points[3]))
    fed.order(Put("a", "k4", b"again", txn=txn))
    fed.order(Abort(txn, savepoint_seq=points[1]))
    fed.order(Put("a", "k5", b"last", txn=txn))
    fed.order(Commit(txn))
    committed = fed.seq
    fed.ship()
    pinned = pin(fed.uri)
    for pieces in (1, 100):
        assert state(pinned, committed - 1, pieces) == []
        found = state(pinned, committed, pieces)
        assert found == fed.state(committed)
        assert [(row[1], row[2], row[4]) for row in found] == [
            ("k0", b"0", committed),
            ("k1", b"1", committed),
            ("k5", b"last", committed),
        ]
    fed.close()


def test_ends_of_what_is_not_open_are_none(tmp_path: Path) -> None:
    """A commit that is repeated is refused, and must not take the transaction back."""
    from lowwater.engine.format.entries import Begin, Commit, CreateBucket, Put

    fed = Fed(tmp_path / "archive", 1)
    fed.order(CreateBucket("a"))
    fed.order(Begin())
    txn = fed.seq
    fed.order(Put("a", "k", b"v", txn=txn))
    fed.order(Commit(txn))
    assert fed.order(Commit(txn)).refused is not None
    fed.ship()
    pinned = pin(fed.uri)
    assert state(pinned, pinned.hwm, 1) == fed.state(pinned.hwm) != []
    [part] = parts(pinned, PlanSelection(kinds=ENDS))
    frames = reading.one_batch(
        reading.raw_batches(part, reading.END_COLUMNS), reading.arrow_schema(reading.END_COLUMNS)
    )
    assert len(frames) == 2
    assert ends_of(frames).txn.tolist() == [txn]
    fed.close()


def test_a_copy_of_a_large_value_that_is_another_one_there_is_damage(tmp_path: Path) -> None:
    """Its frame has the hash, and what stands where it refers to has to be that."""
    from lowwater.engine.format.entries import Copy, CreateBucket, Put
    from lowwater.errors import Corrupt

    fed = Fed(tmp_path / "archive", 1)
    fed.order(CreateBucket("a"))
    fed.order(Put("a", "k", b"v" * 1000))
    put = fed.seq
    fed.order(Copy("a", "k", "a", "copied"))
    fed.ship()
    pinned = pin(fed.uri)
    lookup = reading.Lookup(segments_of(pinned))
    assert [row[2] for row in state(pinned, pinned.hwm, 1)] == [b"v" * 1000] * 2
    with pytest.raises(Corrupt, match=str(put)):
        lookup.value(put, 1000, b"h" * 32)
    with pytest.raises(Corrupt, match="no entry"):
        lookup.value(10**9, 1000, b"h" * 32)
    fed.close()


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_copies_of_a_large_value_are_handed_on_a_few_at_once(
    tmp_path: Path, from_checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take a few bytes of the log each, and their values may be far more than there is memory."""
    fed = Fed(tmp_path / "archive", 1, segment_bytes=65_536)
    fed.order(CreateBucket("a"))
    fed.order(Put("a", "k", bytes(5000)))
    for number in range(40):
        fed.order(Copy("a", "k", "a", f"copy {number:02}"))
    fed.checkpoint()
    pinned = pin(fed.uri)
    monkeypatch.setattr(reading, "VALUE_BYTES", 20_000)
    if from_checkpoint:
        lists = len(RemoteCheckpoint(fetcher_of(pinned.place), pinned.checkpoints[-1]).index.lists)
        columns = ("bucket", "key", "seq", "value")
        slice_ = reading.Slice(pinned.place, pinned.checkpoints[-1], 0, lists, None, None, columns)
        batches = list(reading.checkpoint_objects(slice_, segments_of(pinned)))
    else:
        found = stretches(pinned, pinned.hwm, 1)
        batches = [batch for each in found for batch in reading.newest_objects(each, segments_of(pinned))]
    assert sum(map(len, batches)) == 41
    assert max(map(len, batches)) == 4
    assert all(row["value"] == bytes(5000) for row in rows_of(batches))
    fed.close()
