"""Checkpoints built from an archive alone: the engine's own files, and a restore begins with them."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.recovery.shipped import Place
from tests.shares import shares
from tests.spark.archives import archive_of
from tests.spark.fed import BUCKETS, Fed, random_archive

from lowwater.engine.format.ckpt import decode_checkpoint
from lowwater.engine.format.entries import CreateBucket, Put
from lowwater.errors import Corrupt, InvalidEntry, StoreCorrupt, VersionGone
from lowwater.recovery.restore import restore_with
from lowwater.recovery.restored_opening import open_to_read
from lowwater.spark import building, plan
from lowwater.spark.building import build_checkpoint, root_as_of
from lowwater.tiering.built_checkpoints import built_checkpoints
from lowwater.tiering.folder_store import FolderStore
from lowwater.tiering.names import checkpoint_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

SEEDS = int(os.environ.get("SPARK_ARCHIVES", "3"))
PART_BYTES = 16_384


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of them, though archives are tiny."""
    monkeypatch.setattr(plan, "PART_BYTES_MIN", 8192)


def files_in(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if not name.startswith(".tmp")}


def lose(folder: Path, fed: Fed, seq: int) -> int:
    """Remove what one shipped checkpoint alone has: how many packs."""
    shipped = list(fed.engine.catalogue.checkpoints)
    packs = {
        each.seq: set(decode_checkpoint((folder / checkpoint_name(each)).read_bytes()).packs)
        for each in shipped
    }
    [lost] = [each for each in shipped if each.seq == seq]
    others: set[bytes] = set().union(*(packs[each.seq] for each in shipped if each is not lost))
    (folder / checkpoint_name(lost)).unlink()
    own = packs[seq] - others
    for pack in own:
        (folder / "data" / "packs" / f"{pack.hex()}.pack").unlink()
    return len(own)


@pytest.mark.long
@pytest.mark.parametrize("seed", shares(SEEDS))
def test_what_is_built_is_what_the_engine_shipped_byte_by_byte(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    """Index and packs, with and without a checkpoint to begin with."""
    fed = random_archive(tmp_path / "archive", seed)
    shipped = [each.seq for each in fed.engine.catalogue.checkpoints]
    assert len(shipped) > 1
    lost = 0
    for seq, from_segments in [(shipped[-1], False), (shipped[-1], True), (shipped[0], True)]:
        folder = tmp_path / f"copy-{seq}-{from_segments}"
        shutil.copytree(tmp_path / "archive", folder)
        expected = files_in(folder)
        lost += lose(folder, fed, seq)
        built = build_checkpoint(
            spark, f"file://{folder}", seq, from_segments=from_segments, part_bytes=PART_BYTES
        )
        assert built.root == fed.engine.root(seq)
        found = files_in(folder)
        assert {name: found[name] for name in expected} == expected
        # A base that was never shipped was built too.
        assert {name.split("-")[0] for name in found.keys() - expected.keys()} <= {"checkpoints/checkpoint"}
        shutil.rmtree(folder)
    assert lost
    fed.close()


@pytest.mark.parametrize("seed", shares(SEEDS))
def test_roots_as_of_any_seq_are_the_engines(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    made = archive_of(tmp_path / "archive", seed)
    hwm = plan.pin(made.uri).hwm
    answers = [answer for answer in made.answers if answer.seq <= hwm]
    count = 10 if SEEDS > 3 else 3
    for number, answer in enumerate(answers[:: max(1, len(answers) // count)]):
        found = root_as_of(spark, made.uri, answer.seq, from_segments=bool(number % 2), part_bytes=PART_BYTES)
        assert found == answer.root, answer.seq
    made.close()


def test_what_is_there_is_kept_and_compared(spark: SparkSession, tmp_path: Path) -> None:
    """A build that was stopped is done again; an object that is not what its name says is told."""
    fed = random_archive(tmp_path / "archive", 5)
    seq = fed.engine.catalogue.checkpoint_seq
    before = files_in(tmp_path / "archive")
    told: list[tuple[str, int, int]] = []
    built = build_checkpoint(spark, fed.uri, progress=lambda *each: told.append(each), part_bytes=PART_BYTES)
    assert built.seq == seq
    assert not built.packs_written
    assert files_in(tmp_path / "archive") == before
    assert {what for what, done, total in told if done == total} == {"control", "blocks", "packs", "index"}
    index = tmp_path / "archive" / built.name
    index.write_bytes(index.read_bytes()[:-1] + b"!")
    with pytest.raises(StoreCorrupt, match="other bytes"):
        build_checkpoint(spark, fed.uri, from_segments=True, part_bytes=PART_BYTES)
    fed.close()


def test_only_a_checkpoint_entry_that_was_shipped_can_be_built(spark: SparkSession, tmp_path: Path) -> None:
    fed = random_archive(tmp_path / "archive", 5, steps=100)
    newest = fed.engine.catalogue.checkpoint_seq
    with pytest.raises(InvalidEntry, match=f"seq {newest + 1} is no checkpoint entry.*is {newest}"):
        build_checkpoint(spark, fed.uri, newest + 1)
    with pytest.raises(VersionGone, match="is not in the archive"):
        build_checkpoint(spark, fed.uri, 10**6)
    fed.close()


def content(core: Any) -> list[Any]:
    found = []
    for bucket in BUCKETS:
        if bucket in core.buckets():
            found += [tuple(each) for each in core.scan(bucket)]
    return found


def test_a_restore_begins_with_a_checkpoint_that_was_built(spark: SparkSession, tmp_path: Path) -> None:
    """The engine gave it up, so no manifest names it: a listing does. One that is damaged is passed over."""
    archive = tmp_path / "archive"
    fed = Fed(archive, 3)
    for bucket in BUCKETS:
        fed.order(CreateBucket(bucket))
    fed.step(150)
    seq = fed.checkpoint(shipped=False)
    fed.order(Put(BUCKETS[0], "tail", b"above"))
    fed.ship()
    expected, root = content(fed.engine), fed.engine.root()
    for folder in ("checkpoints", "data"):
        shutil.rmtree(archive / folder, ignore_errors=True)
    assert not plan.pin(fed.uri).checkpoints
    built = build_checkpoint(spark, fed.uri, part_bytes=PART_BYTES)
    assert (built.seq, built.root) == (seq, fed.engine.root(seq))
    for damaged, checkpoint_seq in [(False, seq), (True, 0)]:
        if damaged:
            index = archive / built.name
            index.write_bytes(index.read_bytes()[:-1] + b"!")
        place = Place(1)
        done = restore_with(FolderStore(str(archive)), "to", seams=place.seams(), pages=place.pages)
        assert done.checkpoint_seq == checkpoint_seq
        place.pages.reopen()
        core: Any = open_to_read("to", FolderStore(str(archive)), seams=place.seams(), pages=place.pages)
        assert core.root() == root
        assert content(core) == expected
        assert list(core.check(away=True)) == []
        core.close()
    fed.close()


@pytest.mark.long
def test_a_build_that_was_stopped_counts_for_nobody_and_is_done_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all packs there and no index, and then by two at once: the same files, each of them whole."""
    archive = tmp_path / "archive"
    fed = random_archive(archive, 5, steps=100)
    seq = fed.engine.catalogue.checkpoint_seq
    expected = files_in(archive)
    assert lose(archive, fed, seq)
    store = FolderStore(str(archive), read_only=True)

    def stopped(*_: Any) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(building, "encode_checkpoint", stopped)
        with pytest.raises(KeyboardInterrupt):
            build_checkpoint(spark, fed.uri, seq, part_bytes=PART_BYTES)
    left = set(expected) - set(files_in(archive))
    assert len(left) == 1
    assert left.pop().startswith("checkpoints/")
    assert list(built_checkpoints(store, seq - 1, seq, b"c" * 16)) == []
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(build_checkpoint, spark, fed.uri, seq, part_bytes=PART_BYTES) for _ in range(2)]
        both = [call.result() for call in calls]
    assert both[0] == both[1]
    assert not both[0].packs_written
    assert files_in(archive) == expected
    assert [each.seq for each in built_checkpoints(store, seq - 1, seq, b"c" * 16)] == [seq]
    fed.close()


def test_damage_that_a_task_finds_is_the_error_that_it_is(spark: SparkSession, tmp_path: Path) -> None:
    """And not forty lines of Spark's around it."""
    fed = random_archive(tmp_path / "archive", 5, steps=80)
    pinned = plan.pin(fed.uri)
    damaged = tmp_path / "archive" / pinned.name_of(pinned.segments[-2])
    data = bytearray(damaged.read_bytes())
    data[len(data) // 3] ^= 4
    damaged.write_bytes(data)
    for call in (root_as_of, build_checkpoint):
        with pytest.raises(Corrupt) as caught:
            call(spark, fed.uri, from_segments=True)
        assert caught.value.path == f"file://{damaged}"
        assert "scrub" in caught.value.hint
    fed.close()
