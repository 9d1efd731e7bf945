"""A folder as a store: it passes the suite on real and on faulty files, and a power loss leaves it sound."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lowwater.chaos.clock import SeededRandomness
from lowwater.chaos.disk import Fault, FaultyFiles, SimulatedCrash
from lowwater.chaos.survival import SURVIVALS
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.errors import InvalidConfig, StoreMissing, StoreReadOnly, StoreUnavailable
from lowwater.tiering.folder_store import FolderStore
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.open_store import open_store
from lowwater.tiering.store_uri import parse_uri
from lowwater.tiering.testing.store import Place, StoreConformance, names, put


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def place(self) -> Place:
        objects = MemoryObjects()
        return lambda: MemoryStore(objects=objects)


class TestFolderStore(StoreConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return lambda: FolderStore(str(tmp_path / "store"))


class TestFolderOnFaultyFiles(StoreConformance):
    @pytest.fixture
    def place(self) -> Place:
        files = FaultyFiles()
        randomness = SeededRandomness(1)
        return lambda: FolderStore("/store", files=files, randomness=randomness)


class TestFolderInMemory(StoreConformance):
    @pytest.fixture
    def place(self) -> Place:
        files = MemoryFiles()
        randomness = SeededRandomness(1)
        return lambda: FolderStore("/store", files=files, randomness=randomness)


def half_written(files: FaultyFiles) -> list[str]:
    return [name for name in files.list("/store/.tmp") if not name.endswith(".lock")]


def test_a_crash_at_any_operation_leaves_whole_objects_and_no_trace() -> None:
    """Whatever the power loss takes: what was acknowledged is there, what was not is there whole or not."""
    data = b"0123456789" * 200
    total = 0
    for mode in SURVIVALS:
        for seed in range(4):
            number = 1
            while True:
                files = FaultyFiles()
                files.make_directory("/store")
                randomness = SeededRandomness(seed)
                files.crash_at(files.operations + number, after=bool(seed % 2))
                acknowledged = []
                try:
                    store = FolderStore("/store", files=files, randomness=randomness)
                    for name in ("wal/1/a", "wal/1/b", "c"):
                        store.write(name, [data[:700], data[700:]], size=len(data))
                        acknowledged.append(name)
                    store.delete("c")
                    acknowledged.remove("c")
                    break
                except SimulatedCrash:
                    pass
                files.crash(random.Random(f"{mode} {seed} {number}"), mode)
                total += 1
                store = FolderStore("/store", files=files, randomness=randomness)
                assert half_written(files) == []
                found = names(store.list())
                assert set(acknowledged) - {"c"} <= set(found) <= {"wal/1/a", "wal/1/b", "c"}
                assert {store.read(name) for name in found} <= {data}
                for name in ("wal/1/a", "wal/1/b", "c"):
                    assert put(store, name, data) is (name not in found)
                # What a write found there is as durable as what it made.
                files.crash(random.Random(0), "lose")
                store = FolderStore("/store", files=files, randomness=randomness)
                assert names(store.list()) == ["c", "wal/1/a", "wal/1/b"]
                number += 1
    assert total > 200


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fails_is_a_store_that_does_not_answer(error: int) -> None:
    """Any of its operations may; nothing half is left, and the next write succeeds."""
    for kind in ("lock", "create", "write", "sync", "link", "sync_directory", "make_directory"):
        files = FaultyFiles()
        files.make_directory("/store")
        store = FolderStore("/store", files=files, randomness=SeededRandomness(1))
        left = [Fault(error=error)]
        files.fault = lambda op, kind=kind, left=left: left.pop() if op.kind == kind and left else None
        with pytest.raises(StoreUnavailable, match="a/b") as caught:
            put(store, "a/b", b"x")
        assert caught.value.hint
        assert half_written(files) == []
        put(store, "a/b", b"x")
        assert store.read("a/b") == b"x"


def test_where_there_are_no_links_a_rename_does_it() -> None:
    """Some shares have none."""
    files = FaultyFiles(fault=lambda op: Fault(error=errno.EOPNOTSUPP) if op.kind == "link" else None)
    store = FolderStore("/store", files=files, randomness=SeededRandomness(1))
    assert put(store, "a", b"first")
    assert not put(store, "a", b"second")
    assert store.read("a") == b"first"
    assert half_written(files) == []
    store.close()
    assert files.list("/store/.tmp") == []


def test_opening_leaves_alone_what_another_process_is_writing(tmp_path: Path) -> None:
    """Two shippers have one folder open; only what a crash left is removed."""
    uri = str(tmp_path)
    writer = open_store(uri)
    (tmp_path / ".tmp" / "left-1").write_bytes(b"half")

    def parts() -> Iterator[bytes]:
        yield b"one"
        assert len(list((tmp_path / ".tmp").iterdir())) == 3
        open_store(uri)
        assert len(list((tmp_path / ".tmp").iterdir())) == 2
        yield b"two"

    assert writer.write("a", parts(), size=6)
    assert writer.read("a") == b"onetwo"
    writer.close()
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_what_a_crash_left_beside_an_object_is_removed_and_not_written(tmp_path: Path) -> None:
    """After the link the two are one file: who empties the one empties the object."""
    store = open_store(str(tmp_path))
    put(store, "a", b"kept")
    os.link(tmp_path / "a", tmp_path / ".tmp" / "left-1")
    assert open_store(str(tmp_path)).read("a") == b"kept"
    assert not (tmp_path / ".tmp" / "left-1").exists()


@pytest.mark.parametrize("scheme", ["file", "shared_fs"])
def test_what_somebody_has_removed_in_a_folder_is_made_again(tmp_path: Path, scheme: str) -> None:
    """By the next write, also of a store that is open; and what is being written is left alone again."""
    uri = f"{scheme}://{tmp_path}"
    store = open_store(uri)
    for kept in (False, True):
        assert put(store, "a/b", b"one")
        for each in tmp_path.iterdir():
            shutil.rmtree(each)
        if kept or scheme == "shared_fs":
            (tmp_path / "something").write_bytes(b"")
        if kept:
            (tmp_path / ".tmp").mkdir()  # as whoever opens it makes it
            with suppress(StoreUnavailable):
                put(store, "a/b", b"one")
        assert put(store, "a/c", b"two")
        assert store.read("a/c") == b"two"

        def parts() -> Iterator[bytes]:
            yield b"thr"
            open_store(uri).close()
            yield b"ee"

        assert store.write("a/d", parts(), size=5)
        (tmp_path / "something").unlink(missing_ok=True)
        store.delete("a/b")
        store.delete("a/c")
        store.delete("a/d")


def test_a_folder_that_is_gone_is_not_made_by_a_store_that_is_open(tmp_path: Path) -> None:
    """Below a mount point the history would go to the disk of this machine."""
    for scheme in ("file", "shared_fs"):
        folder = tmp_path / scheme
        folder.mkdir()
        store = open_store(f"{scheme}://{folder}")
        assert put(store, "a/b", b"one")
        shutil.rmtree(folder)
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                put(store, "c/d", b"two")
        assert not folder.exists()
        folder.mkdir()
        if scheme == "file":
            assert put(store, "c/d", b"two")
        for _ in range(3):
            if scheme == "shared_fs":
                with pytest.raises(StoreUnavailable, match="empty") as caught:
                    put(store, "c/d", b"two")
                assert "mounted" in str(caught.value.hint)
        assert store.uri.startswith(scheme)
        assert list(folder.iterdir()) if scheme == "file" else not list(folder.iterdir())


def test_a_share_that_is_not_mounted_is_no_empty_store(tmp_path: Path) -> None:
    """Its mount point is a path like any other, or not there."""
    for uri, options in ((f"shared_fs://{tmp_path}/x", {}), (f"file://{tmp_path}/x", {"read_only": True})):
        with pytest.raises(StoreMissing, match="no such folder") as caught:
            open_store(uri, **options)  # type: ignore[arg-type]
        assert caught.value.path == uri
        assert not (tmp_path / "x").exists()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreMissing):
        open_store(str(tmp_path / "file"))
    (tmp_path / "x").mkdir()
    assert put(open_store(f"shared_fs://{tmp_path}/x"), "a", b"x")


def test_a_folder_that_may_not_be_written_is_opened_to_be_read() -> None:
    """As root may write everywhere, the file system says no here."""

    class ReadOnlyFiles(FaultyFiles):
        def make_directory(self, directory: str) -> None:
            raise OSError(errno.EROFS, "Read-only file system", directory)

    files = ReadOnlyFiles()
    FaultyFiles.make_directory(files, "/store")
    files.open("/store/a", create=True).write_at(0, [b"x"])
    store = FolderStore("/store", files=files)
    assert store.read("a") == b"x"
    for call in (lambda: put(store, "b", b""), lambda: store.delete("a"), lambda: store.copy("a", "b")):
        with pytest.raises(StoreReadOnly):
            call()


def test_a_memory_with_a_name_is_one_place(tmp_path: Path) -> None:
    """Who restores in the process that shipped finds what it shipped."""
    put(open_store("memory://one-place"), "a", b"x")
    assert open_store("memory://one-place", read_only=True).read("a") == b"x"
    assert list(open_store("memory://another").list()) == []
    put(open_store("memory://"), "a", b"x")
    assert list(open_store("memory://").list()) == []


SECRET = "do-not-show-this"


@pytest.mark.parametrize(
    ("uri", "options", "said"),
    [
        (f"s4://bucket/x?secret_access_key={SECRET}", {}, "nearest known one is s3"),
        (f"s3://key:{SECRET}@bucket/x", {}, "credentials in front of its @"),
        (f"s3://bucket/x?secret_acces_key={SECRET}", {}, "nearest known option is secret_access_key"),
        ("s3://bucket", {"buckett": SECRET}, "nearest known option is"),
        ("s3:///x", {}, "names no bucket"),
        ("s3://bucket/../x", {}, "leads through"),
        ("file://relative/x", {}, "no absolute path"),
        ("", {}, "no store"),
        ("/tmp/x", {"secret": SECRET}, "takes no options"),
        (f"memory://x?secret={SECRET}", {}, "takes no options"),
        (None, {}, "no store is configured"),
    ],
)
def test_a_uri_that_cannot_be_meant_is_refused(uri: str | None, options: dict[str, str], said: str) -> None:
    """With what to write instead, and without what it should not show."""
    with pytest.raises(InvalidConfig) as caught:
        open_store(uri, options=options)
    shown = f"{caught.value} {caught.value.hint} {caught.value!r}"
    assert said in shown
    assert SECRET not in shown


def test_a_place_shows_no_secret() -> None:
    """Not in its repr, not in its URI."""
    place = parse_uri(
        f"s3://bucket/a//b/?secret_access_key={SECRET}&endpoint=http://h:1", {"session_token": SECRET}
    )
    assert place.uri == "s3://bucket/a/b"
    assert place.options == {
        "secret_access_key": SECRET,
        "session_token": SECRET,
        "endpoint": "http://h:1",
        "region": place.options["region"],
    }
    assert SECRET not in repr(place)
    assert parse_uri("gs://b/x").uri == "gcs://b/x"
    assert parse_uri("az://c/x").uri == "azblob://c/x"


@pytest.mark.parametrize(
    "uri", ["s3:bucket/prefix", "S3:/bucket", "gs:b", "file:/x", "memory:", "a\0b", "\ud800"]
)
def test_what_is_meant_as_a_uri_is_not_taken_for_a_folder(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history would go to this disk, and nobody would notice before the disk is lost."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidConfig):
        open_store(uri)
    assert not list(tmp_path.iterdir())
