"""Restores that begin with a checkpoint that is listed in the archive, and that no manifest names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.recovery.shipped import Place
from tests.spark.fed import BUCKETS, Fed

from lowwater.engine.format.blocks import hash_of
from lowwater.engine.format.ckpt import decode_checkpoint, encode_checkpoint, name_of
from lowwater.engine.format.entries import CreateBucket, Put
from lowwater.engine.state.catalogue import describe_checkpoint
from lowwater.recovery.restore import restore_with
from lowwater.recovery.restored_opening import open_to_read
from lowwater.tiering.built_checkpoints import built_checkpoints
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.folder_store import FolderStore
from lowwater.tiering.remote_checkpoint import RemoteCheckpoint
from lowwater.tiering.scrub import Scrub
from lowwater.tiering.ship_checkpoints import bring_checkpoint


def unnamed(folder: Path, seed: int = 3, steps: int = 150) -> tuple[Fed, int, Path]:
    """An archive with the objects of a checkpoint, of which the log never says that they were shipped."""
    fed = Fed(folder, seed)
    for bucket in BUCKETS:
        fed.order(CreateBucket(bucket))
    fed.step(steps)
    seq = fed.checkpoint(shipped=False)
    fed.order(Put(BUCKETS[0], "tail", b"above"))
    fed.ship()
    [stored] = [each for each in fed.engine.checkpoints() if each.seq == seq]
    described = describe_checkpoint(stored.read_index())
    assert bring_checkpoint(fed.engine, fed.store, described)
    assert not fed.engine.catalogue.checkpoint_seq
    [index] = (folder / "checkpoints").iterdir()
    return fed, seq, index


def restored(folder: Path, at: int | None = None) -> tuple[int, str, list[Any]]:
    """With which checkpoint a restore begins, and the root and content of what it makes."""
    place = Place(1)
    store = FolderStore(str(folder))
    done = restore_with(store, "to", at, seams=place.seams(), pages=place.pages)
    place.pages.reopen()
    core: Any = open_to_read("to", FolderStore(str(folder)), seams=place.seams(), pages=place.pages)
    assert list(core.check(away=True)) == []
    found = [tuple(each) for bucket in BUCKETS if bucket in core.buckets() for each in core.scan(bucket)]
    root = core.root()
    core.close()
    return done.checkpoint_seq, root, sorted(found, key=lambda each: each[:2])


def test_a_restore_begins_with_one_that_no_manifest_names(tmp_path: Path) -> None:
    """Somebody has built it, or the shipper came no further: it is verified, so it is as good as any."""
    fed, seq, _ = unnamed(tmp_path / "archive")
    hwm = fed.engine.counted_hwm
    checkpoint_seq, root, content = restored(tmp_path / "archive")
    assert checkpoint_seq == seq
    assert content == fed.state(hwm)
    assert root == fed.engine.root(hwm)
    fed.close()


def test_a_restore_to_a_seq_below_it_does_without(tmp_path: Path) -> None:
    fed, seq, _ = unnamed(tmp_path / "archive")
    checkpoint_seq, _, content = restored(tmp_path / "archive", seq - 1)
    assert checkpoint_seq == 0
    assert content == fed.state(seq - 1)
    fed.close()


def test_one_that_is_damaged_is_passed_over(tmp_path: Path) -> None:
    """The log has everything: an index with another byte, or without a pack, must not end a restore."""
    fed, seq, index = unnamed(tmp_path / "archive")
    hwm = fed.engine.counted_hwm
    good = index.read_bytes()
    index.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert restored(tmp_path / "archive")[0] == 0
    index.write_bytes(good)
    assert restored(tmp_path / "archive")[0] == seq
    next((tmp_path / "archive" / "data" / "packs").iterdir()).unlink()
    checkpoint_seq, _, content = restored(tmp_path / "archive")
    assert checkpoint_seq == 0
    assert content == fed.state(hwm)
    fed.close()


def test_one_of_another_log_is_passed_over(tmp_path: Path) -> None:
    """Of another cluster, or of a log that says something else of what was shipped by then."""
    fed, seq, index = unnamed(tmp_path / "archive")
    other, other_seq, other_index = unnamed(tmp_path / "other", seed=4, steps=60)
    store = FolderStore(str(tmp_path / "archive"))
    assert [each.seq for each in built_checkpoints(store, 0, 10**9, b"c" * 16)] == [seq]
    assert [each.seq for each in built_checkpoints(store, seq, 10**9, b"c" * 16)] == []
    assert [each.seq for each in built_checkpoints(store, 0, 10**9, b"d" * 16)] == []
    index.unlink()
    for name in ("checkpoints", "data/packs"):
        for path in (tmp_path / "other" / name).iterdir():
            (tmp_path / "archive" / name / path.name).write_bytes(path.read_bytes())
    assert [each.seq for each in built_checkpoints(store, 0, 10**9, b"c" * 16)] == [other_seq]
    assert other_seq <= fed.engine.counted_hwm
    assert restored(tmp_path / "archive")[0] == 0
    for each in (fed, other):
        each.close()
    assert other_index.exists()


def test_one_with_a_damaged_list_is_passed_over_and_a_scrub_names_it(tmp_path: Path) -> None:
    """Its packs have the right sizes, so only reading them tells. The log has everything."""
    fed, seq, _ = unnamed(tmp_path / "archive")
    hwm = fed.engine.counted_hwm
    [store] = [FolderStore(str(tmp_path / "archive"))]
    [described] = built_checkpoints(store, 0, seq, b"c" * 16)
    remote = RemoteCheckpoint(Fetcher(store, clock=fed.clock), described)
    entry = remote.index.lists[0]
    pack = tmp_path / "archive" / "data" / "packs" / f"{entry.pack.hex()}.pack"
    good = pack.read_bytes()
    for at in (entry.offset, entry.offset + entry.list_bytes + entry.locations_bytes - 1):
        pack.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        checkpoint_seq, root, content = restored(tmp_path / "archive")
        assert checkpoint_seq == 0
        assert content == fed.state(hwm)
        assert root == fed.engine.root(hwm)
        [found] = [
            each for each in Scrub(store, deep=True, at_once=1).findings() if each.severity == "warning"
        ]
        assert found.where is not None
        assert pack.name in found.where
        assert "restore" in found.hint
    pack.write_bytes(good)
    assert restored(tmp_path / "archive")[0] == seq
    fed.close()


def test_of_two_of_one_seq_neither_counts(tmp_path: Path) -> None:
    """Each is what its name says, and only one can be what the log says."""
    fed, seq, index = unnamed(tmp_path / "archive")
    hwm = fed.engine.counted_hwm
    other = encode_checkpoint(replace(decode_checkpoint(index.read_bytes()), row_count=1))
    index.with_name(name_of(seq, hash_of(other))).write_bytes(other)
    checkpoint_seq, _, content = restored(tmp_path / "archive")
    assert checkpoint_seq == 0
    assert content == fed.state(hwm)
    fed.close()
