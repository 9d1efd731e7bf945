"""The audit in Spark finds what a scrub finds, object for object and word for word."""

from __future__ import annotations

import random
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark.archives import archive_of
from tests.tiering.whole_archive import types_in, whole_archive

from lowwater.errors import NotFound, StoreMissing
from lowwater.spark.audit import look_in_spark, verify
from lowwater.spark.jobs import grouped
from lowwater.tiering.memory_store import MemoryObjects
from lowwater.tiering.names import STATES
from lowwater.tiering.open_store import open_store
from lowwater.tiering.scrub import Scrub

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


@pytest.fixture
def archive(tmp_path: Path) -> dict[str, bytes]:
    """Objects raw and compressed, and what a fenced line left; in `tmp_path/archive`."""
    return laid_out(tmp_path, 12)


@pytest.fixture
def large_archive(tmp_path: Path) -> dict[str, bytes]:
    """One with objects of all types: chunks are there from 64 segments on."""
    return laid_out(tmp_path, 80)


def laid_out(tmp_path: Path, segment_count: int) -> dict[str, bytes]:
    objects = whole_archive(segment_count)
    for name, data in objects.data.items():
        path = tmp_path / "archive" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return objects.data


def scrubbed(uri: str, **named: Any) -> set[tuple[Any, ...]]:
    store = open_store(uri, read_only=True)
    try:
        return set(Scrub(store, **{"deep": True, **named}).findings())
    finally:
        store.close()


def audited(spark: SparkSession, uri: str, **named: Any) -> set[tuple[Any, ...]]:
    return {tuple(row) for row in verify(spark, uri, **named).collect()}


@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_archive_gives_what_a_scrub_gives(
    spark: SparkSession, archive: dict[str, bytes], tmp_path: Path, deep: bool
) -> None:
    uri = f"file://{tmp_path}/archive"
    found = audited(spark, uri, deep=deep)
    assert found == scrubbed(uri, deep=deep)
    assert {each[0] for each in found} == {"note"}


def test_progress_and_what_was_read_are_told(
    spark: SparkSession, archive: dict[str, bytes], tmp_path: Path
) -> None:
    told: list[tuple[str, int, int]] = []
    store = open_store(str(tmp_path / "archive"), read_only=True)
    look = look_in_spark(spark, store.uri, progress=lambda *how: told.append(how))
    scrub = Scrub(store, deep=True, look=look)
    assert [each.severity for each in scrub.findings()] == ["note"]
    assert scrub.bytes_read >= sum(map(len, archive.values()))
    assert {what for what, _, _ in told} >= {"segments", "packs", "blocks of checkpoints"}
    assert all(told[-1][1:] == (count, count) for count in [told[-1][2]])


@pytest.mark.long
def test_every_object_that_is_gone_is_found_in_the_words_of_a_scrub(
    spark: SparkSession, archive: dict[str, bytes], tmp_path: Path
) -> None:
    """Each in turn, all but the newest state, without which the one before it is the newest."""
    check_gone(spark, archive, list(archive), tmp_path)


def test_a_chunk_that_is_gone_is_found_in_the_words_of_a_scrub(
    spark: SparkSession, large_archive: dict[str, bytes], tmp_path: Path
) -> None:
    """The small archive has none."""
    chunks = [name for name in large_archive if name.startswith("manifest/chunks/")]
    assert chunks
    check_gone(spark, large_archive, chunks, tmp_path)


def check_gone(spark: SparkSession, archive: dict[str, bytes], names: list[str], tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/archive"
    unreached = {each[2] for each in scrubbed(uri)}
    newest = max(name for name in archive if name.startswith(STATES))
    for name in names:
        path = tmp_path / "archive" / name
        path.unlink()
        found = audited(spark, uri)
        assert found == scrubbed(uri), name
        told = [each for each in found if each[0] != "note"]
        if f"{uri}/{name}" in unreached or name == newest:
            assert told == [], name
        else:
            assert any(fnmatch(f"{uri}/{name}", each[2]) for each in told), (name, told)
        path.write_bytes(archive[name])


@pytest.mark.long
def test_flipped_bytes_in_twenty_objects_of_every_type_are_found(
    spark: SparkSession, large_archive: dict[str, bytes], tmp_path: Path
) -> None:
    """All of them at once where that can be, and in the words of a scrub."""
    rng = random.Random(7)
    uri = f"file://{tmp_path}/archive"
    unreached = {each[2] for each in scrubbed(uri)}
    objects = MemoryObjects()
    objects.data.update(large_archive)
    types = types_in(objects)
    assert len(types) == 8
    chosen = [rng.choice(names) for names in types.values()]
    rest = [name for name in large_archive if name not in chosen]
    chosen += rng.sample(rest, 20 - len(chosen))
    for name in chosen:
        data = bytearray(large_archive[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path = tmp_path / "archive" / name
        path.write_bytes(data)
        found = audited(spark, uri)
        assert found == scrubbed(uri), name
        is_minor = f"{uri}/{name}" in unreached or name.startswith(STATES)
        severity = "warning" if is_minor else "error"
        assert any(fnmatch(f"{uri}/{name}", each[2]) and each[0] == severity for each in found), name
        path.write_bytes(large_archive[name])


def test_damage_everywhere_at_once_is_what_a_scrub_says(
    spark: SparkSession, archive: dict[str, bytes], tmp_path: Path
) -> None:
    """Segments and packs: what leads to the rest stays readable."""
    rng = random.Random(8)
    uri = f"file://{tmp_path}/archive"
    damaged = rng.sample([name for name in archive if name.startswith(("wal/", "data/"))], 8)
    for name in damaged:
        data = bytearray(archive[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / "archive" / name).write_bytes(data)
    found = audited(spark, uri)
    assert found == scrubbed(uri)
    assert {f"{uri}/{name}" for name in damaged} <= {each[2] for each in found}


def test_where_there_is_no_archive_it_says_so_before_a_task_runs(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="no archive"):
        verify(spark, str(tmp_path / "empty"))
    with pytest.raises(StoreMissing):
        verify(spark, str(tmp_path / "nothing"))


def test_objects_are_grouped_by_their_bytes() -> None:
    sizes = [2**20] * 100
    groups = grouped(sizes, int, tasks_min=4)
    assert [len(group) for group in groups] == [25] * 4
    assert [len(group) for group in grouped([2**30] * 3, int, 1)] == [1, 1, 1]
    assert len(grouped([1] * 1000, int, tasks_min=16)) == 1, "tasks that do nothing cost more than they do"
    assert [size for group in grouped([5, 2**28, 7], int, 2) for size in group] == [5, 2**28, 7]


@pytest.mark.parametrize("seed", [1, 2])
def test_random_archives_are_found_to_be_as_a_scrub_finds_them(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    """Of an embedded database that was lost and restored, and of a fed engine; then with a flipped byte."""
    archive = archive_of(tmp_path / "archive", seed)
    archive.close()
    assert audited(spark, archive.uri) == scrubbed(archive.uri)
    rng = random.Random(seed)
    path = rng.choice(sorted(path for path in archive.folder.rglob("*.log") if path.is_file()))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1
    path.write_bytes(data)
    found = audited(spark, archive.uri)
    assert found == scrubbed(archive.uri)
    assert any(path.name in each[2] for each in found)
