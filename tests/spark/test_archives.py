"""What the random archives hold: a test that compares nothing would pass with all of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.spark.archives import archives

from lowwater.engine.format import format
from lowwater.engine.format.format import Flag
from lowwater.spark.plan import parts, pin
from lowwater.spark.segments import raw_batches

COLUMNS = ("seq", "kind", "flags", "refused", "txn", "previous", "group_last", "value_seq", "session")


def test_the_archives_have_all_that_an_archive_can_have(tmp_path: Path) -> None:
    """Each kind of entry and each of its parts, segments of either form, forks, bases, and holes."""
    seen: Counter[str] = Counter()
    with archives(tmp_path, range(6)) as made:
        for each in made:
            pinned = pin(each.uri)
            rows = [
                row
                for part in parts(pinned)
                for batch in raw_batches(part, COLUMNS)
                for row in batch.to_pylist()
            ]
            for row in rows:
                seen[row["kind"]] += 1
                seen["refused"] += row["refused"] is not None
                seen["session"] += row["session"] is not None
                seen["group"] += row["group_last"] is not None
                seen["value elsewhere"] += row["value_seq"] is not None
                seen["roll-back"] += row["kind"] == "abort" and bool(row["flags"] & Flag.TXN)
            seqs = [row["seq"] for row in rows]
            seen["holes"] += seqs != list(range(seqs[0], seqs[-1] + 1))
            for segment in pinned.segments:
                seen[f"compression {segment.compression}"] += 1
            seen["checkpoints"] += len(each.checkpoints)
            assert len(each.answers) >= 8
            assert len({answer.root for answer in each.answers}) > 5
            assert any(answer.objects for answer in each.answers)
            assert each.answers[-1].seq <= pinned.hwm
    for kind in format.Kind:
        if kind.name.lower() in (
            "create_bucket", "delete_bucket", "put", "delete", "copy", "begin", "commit", "abort",
            "create", "fork", "horizon", "pin", "unpin", "seal", "segment_shipped", "checkpoint",
            "checkpoint_shipped", "session_open", "session_close",
        ):  # fmt: skip
            assert seen[kind.name.lower()], kind
    for what in ("refused", "session", "group", "value elsewhere", "holes", "checkpoints"):
        assert seen[what], what
    assert seen["compression 0"]
    assert seen["compression 1"]


def test_a_seed_gives_the_same_archive_again(tmp_path: Path) -> None:
    """Whoever sees a failure can see it again."""
    for seed in (1, 2):
        again = range(seed, seed + 1)
        with (
            archives(tmp_path / "one", again, steps=120) as (one,),
            archives(tmp_path / "two", again, steps=120) as (two,),
        ):
            assert one.answers == two.answers
            names = [sorted(path.name for path in each.folder.rglob("*.log")) for each in (one, two)]
            assert names[0] == names[1]
