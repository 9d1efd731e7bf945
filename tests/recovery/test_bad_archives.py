"""What is wrong with an archive, a directory or a wish is said, with what to do about it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.recovery.shipped import Place, checkpoint, opened, ship

import lowwater
from lowwater.engine.database.origin import RESTORING
from lowwater.errors import (
    AlreadyExists,
    Corrupt,
    DirectoryLocked,
    InputError,
    InvalidConfig,
    LowwaterError,
    NotFound,
    VersionGone,
)
from lowwater.recovery.restore import restore_with
from lowwater.recovery.restore_plan import plan_with
from lowwater.recovery.restored_opening import open_to_read
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore

URI = "memory://named"


@pytest.fixture
def objects() -> MemoryObjects:
    found, place = MemoryObjects(), Place()
    store = MemoryStore(URI, objects=found)
    db: Any = opened(place, store)
    db.create_bucket("b")
    for number in range(200):
        db.put("b", f"k{number:04}", b"%d" % number * (300 if number % 9 == 0 else 1))
    checkpoint(db, place, MemoryStore(URI, objects=found))
    for number in range(0, 200, 7):
        db.put("b", f"k{number:04}", b"tail %d" % number * 50)
    ship(db, place)
    db.close()
    return found


def restore(objects: MemoryObjects, place: Place | None = None, at: Any = None, **given: Any) -> Any:
    place = place or Place(1)
    place.pages.reopen()
    store = MemoryStore(given.pop("uri", URI), objects=objects)
    return restore_with(store, "to", at, seams=place.seams(), pages=place.pages, **given)


def names(objects: MemoryObjects, prefix: str) -> list[str]:
    return sorted(name for name in objects.data if name.startswith(prefix))


def flipped(objects: MemoryObjects, name: str, offset: int) -> None:
    data = bytearray(objects.data[name])
    data[offset] ^= 0x10
    objects.data[name] = bytes(data)


def test_an_empty_store_is_no_archive() -> None:
    with pytest.raises(NotFound, match="no archive") as caught:
        restore(MemoryObjects())
    assert caught.value.path == URI
    assert caught.value.hint


def test_an_archive_to_which_nothing_was_shipped_yet(objects: MemoryObjects) -> None:
    for name in [*objects.data]:
        if name != "cluster.cbor":
            objects.remove(name)
    with pytest.raises(NotFound, match="nothing was shipped"):
        restore(objects)


@pytest.mark.parametrize("prefix", ["manifest/chunks/", "data/packs/", "wal/"])
def test_an_object_that_is_missing_is_named(objects: MemoryObjects, prefix: str) -> None:
    """By its whole URI; the restore goes on once the object is there again."""
    seen = 0
    for name in names(objects, prefix):
        data = objects.data[name]
        objects.remove(name)
        place = Place(1)
        error = _trouble(objects, place)
        if error is not None:
            assert isinstance(error, Corrupt | NotFound), error
            assert name in str(error.path)
            assert str(error.path).startswith(URI), error.path
            assert error.hint
            seen += 1
        objects.add(name, data)
        if _is_begun(place):
            restore(objects, place, full=True)
            _read_all(objects, place)
    assert seen or prefix == "manifest/chunks/"


def _trouble(objects: MemoryObjects, place: Place) -> LowwaterError | None:
    """What a restore, or reading what it made, runs into."""
    try:
        restore(objects, place, full=True)
        _read_all(objects, place)
    except LowwaterError as error:
        return error
    return None


def _is_begun(place: Place) -> bool:
    try:
        return RESTORING in place.files.list("to")
    except FileNotFoundError:
        return False


def _read_all(objects: MemoryObjects, place: Place) -> None:
    place.pages.reopen()
    store = MemoryStore(URI, objects=objects)
    core: Any = open_to_read("to", store, seams=place.seams(), pages=place.pages)
    try:
        assert len(list(core.scan("b"))) == 200
    finally:
        core.close()


@pytest.mark.parametrize("prefix", ["cluster", "manifest/", "data/packs/", "wal/"])
def test_an_object_with_a_flipped_byte_is_named(objects: MemoryObjects, prefix: str) -> None:
    """Or does not matter, because nothing of it is needed."""
    seen = 0
    for name in names(objects, prefix):
        data = objects.data[name]
        for offset in (3, len(data) // 2, len(data) - 2):
            flipped(objects, name, offset)
            error = _trouble(objects, Place(1))
            if error is not None:
                assert str(error.path).startswith(URI), f"{error!r} {error.path}"
                assert name in str(error.path)
                seen += 1
            objects.data[name] = data
    assert seen


@pytest.mark.parametrize("damage", ["gone", "flipped", "empty"])
def test_a_checkpoint_whose_index_is_lost_is_made_of_the_log(
    objects: MemoryObjects, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has everything. Who restores is told."""
    [name] = names(objects, "checkpoints/")
    if damage == "flipped":
        flipped(objects, name, len(objects.data[name]) // 2)
    else:
        objects.remove(name)
    if damage == "empty":
        objects.add(name, b"")
    place = Place(1)
    made = restore(objects, place, full=True)
    assert made.checkpoint_seq == 0
    _read_all(objects, place)
    told = [record.getMessage() for record in caplog.records if record.name == "lowwater.restore"]
    assert any("lost" in each and name in each for each in told)


@pytest.mark.parametrize("lost_first", [True, False])
def test_a_restore_goes_on_with_the_checkpoint_that_it_has_begun_with(
    objects: MemoryObjects, lost_first: bool
) -> None:
    """Whether that is lost meanwhile, or comes back."""
    [name] = names(objects, "checkpoints/")
    data = objects.data[name]
    segment = names(objects, "wal/")[-1]
    kept = objects.data[segment]
    objects.remove(segment)
    if lost_first:
        objects.remove(name)
    place = Place(1)
    with pytest.raises((Corrupt, NotFound)):
        restore(objects, place, full=True)
    assert _is_begun(place)
    objects.add(segment, kept)
    if lost_first:
        objects.add(name, data)
        assert restore(objects, place, full=True).checkpoint_seq == 0
    else:
        objects.remove(name)
        with pytest.raises(Corrupt, match="has begun with the checkpoint"):
            restore(objects, place, full=True)
        objects.add(name, data)
        assert restore(objects, place, full=True).checkpoint_seq
    _read_all(objects, place)


def test_a_seq_that_was_never_written(objects: MemoryObjects) -> None:
    with pytest.raises(VersionGone, match="is not in the archive: its last one is") as caught:
        restore(objects, at=10**9)
    assert caught.value.path == URI
    with pytest.raises(InputError):
        restore(objects, at=-1)
    with pytest.raises(InputError):
        restore(objects, at="yesterday")
    with pytest.raises(VersionGone):
        restore(objects, at=0)


def test_a_time_before_the_first_entry(objects: MemoryObjects) -> None:
    with pytest.raises(VersionGone, match="begins after"):
        restore(objects, at=datetime(1980, 1, 1, tzinfo=UTC))


def test_the_future_is_the_newest(objects: MemoryObjects) -> None:
    newest = restore(objects, at=datetime(2999, 1, 1, tzinfo=UTC)).seq
    assert newest == restore(objects, Place(2)).seq


def test_nothing_is_written_over(objects: MemoryObjects, tmp_path: Path) -> None:
    place = Place(1)
    restore(objects, place)
    with pytest.raises(AlreadyExists, match="restored before"):
        restore(objects, place)
    for make in (_a_file, _a_database, _a_log):
        target = tmp_path / make.__name__
        make(target)
        before = sorted(str(each) for each in target.rglob("*"))
        with pytest.raises(AlreadyExists) as caught:
            restore_with(MemoryStore(URI, objects=objects), str(target))
        assert caught.value.path == str(target)
        assert sorted(str(each) for each in target.rglob("*")) == before


def _a_file(target: Path) -> None:
    target.mkdir()
    (target / "mine").write_text("mine")


def _a_database(target: Path) -> None:
    with lowwater.open(target) as db:
        db.create_bucket("b")


def _a_log(target: Path) -> None:
    with lowwater.Log.open(target / "wal"):
        pass


def test_a_file_is_no_directory_to_restore_into(objects: MemoryObjects, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LowwaterError) as caught:
        restore_with(MemoryStore(URI, objects=objects), str(tmp_path / "file"))
    assert not isinstance(caught.value, Corrupt)


class _Stopped(Exception):
    pass


def test_another_restore_that_was_begun_there_is_told(objects: MemoryObjects) -> None:
    """Only the very same goes on."""

    def stop(_what: str, _done: int, _total: int) -> None:
        raise _Stopped

    place = Place(1)
    with pytest.raises(_Stopped):
        restore(objects, place, at=150, progress=stop)
    wrong: list[dict[str, Any]] = [{}, {"at": 149}, {"at": 150, "uri": "memory://other"}]
    for given in wrong:
        with pytest.raises(AlreadyExists, match="was begun here"):
            restore(objects, place, **given)
    assert restore(objects, place, at=150).was_resumed


def test_two_at_once_in_one_directory(objects: MemoryObjects, tmp_path: Path) -> None:
    """The second one is told, and disturbs nothing; so is who opens it."""
    store = MemoryStore(URI, objects=objects)
    target = str(tmp_path / "to")
    tried = 0

    def meanwhile(_what: str, _done: int, _total: int) -> None:
        nonlocal tried
        tried += 1
        with pytest.raises(DirectoryLocked, match="somebody else works"):
            restore_with(store, target)
        with pytest.raises(NotFound, match="has not ended"):
            lowwater.open(target)

    assert restore_with(store, target, progress=meanwhile).seq
    assert tried


def test_secrets_are_in_no_error_and_no_record(tmp_path: Path) -> None:
    uri = "s3://bucket/prefix?endpoint=http://127.0.0.1:1&access_key_id=SECRETSECRETSECR&secret_access_key=SECRET"
    config = {"tier": {"attempts_max": 1, "timeout_ms": 500}}
    with pytest.raises(LowwaterError) as caught:
        lowwater.restore(uri, tmp_path / "to", config=config)
    assert "SECRET" not in f"{caught.value} {caught.value.hint} {caught.value.as_dict()}"
    with pytest.raises(InvalidConfig):
        lowwater.restore("", tmp_path / "to")
    with pytest.raises(InputError):
        lowwater.restore(str(tmp_path / "store"), "")
    assert not (tmp_path / "to").exists()


def test_a_plan_reads_little_and_writes_nothing(objects: MemoryObjects) -> None:
    before = dict(objects.data)
    place = Place(1)
    found = plan_with(MemoryStore(URI, objects=objects), None, seams=place.seams())
    assert found.checkpoint_seq
    assert 0 < found.bytes < found.full_bytes
    assert objects.data == before
    assert place.files.operations == 0
    done = restore(objects, place)
    assert done.seq == found.seq
    assert done.checkpoint_seq == found.checkpoint_seq
    small = sum(len(data) for name, data in objects.data.items() if not name.startswith(("wal/", "data/")))
    full = restore(objects, Place(2), full=True)
    assert found.values_objects_max
    assert found.full_bytes < full.bytes <= found.full_bytes + found.values_bytes_max + 2 * small
