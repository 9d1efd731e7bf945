"""A page store that is made of a checkpoint's references: opened at once, and read as it is needed."""

from __future__ import annotations

import random
import shutil
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from tests.engine.engine_model import Archive, ArchiveDown

from lowwater.engine.checkpoint.checkpoints import StoredCheckpoint
from lowwater.engine.checkpoint.install import install_references, meta_of_checkpoint
from lowwater.engine.database.core import EngineOptions
from lowwater.engine.database.opening import open_with
from lowwater.engine.format.blocks import NO_HASH, KnownColumns
from lowwater.engine.format.ckpt import Checkpoint
from lowwater.engine.format.references import is_reference
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.errors import AlreadyExists, Corrupt, NotFound, VersionGone

LARGE = bytes(range(256)) * 9
QUIET = EngineOptions(checkpoint_interval_s=None)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "data")


def install(db: Any, stored: StoredCheckpoint, store: Any, archive: Archive) -> int:
    archive.ship(stored)
    creation = db._log.creation
    return install_references(
        store,
        stored.index,
        stored.columns(),
        archive,
        salt=creation.salt,
        page_keys=creation.settings.page_keys,
        inline_bytes_max=creation.settings.inline_bytes_max,
    )


def objects(db: Any) -> dict[str, bytes]:
    return {each.key: each.value for each in db.scan("b")}


def copy_log(path: str, to: Path) -> None:
    """As it is while it is open: a hint that is just being written is not there a moment later."""
    shutil.copytree(f"{path}/wal", to / "wal", ignore=shutil.ignore_patterns("hint*", "lock"))


def restored(path: str, to: Path, archive: Archive, db: Any, stored: StoredCheckpoint) -> str:
    """A directory with the log, and pages made of the checkpoint."""
    copy_log(path, to)
    store = LmdbPages.open(str(to / "pages"))
    try:
        assert install(db, stored, store, archive) > 10
    finally:
        store.close()
    return str(to)


def test_an_engine_opens_on_references_and_its_log_and_reads_what_it_is_asked_for(
    path: str, tmp_path: Path
) -> None:
    """The tail above the checkpoint is applied without reading a block; so are the writes after that."""
    archive = Archive()
    with open_with(path, options=QUIET) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"k{number:06}", b"%d" % number) for number in range(5000)])
        db.put("b", "k003000large", LARGE)
        before = db.marks().applied
        db.put("b", "k004000", b"second")
        db.checkpoint()
        stored = db.checkpoints()[0]
        for number in range(0, 5000, 7):
            db.put("b", f"k{number:06}", b"tail %d" % number)
        for number in range(1, 5000, 500):
            db.delete("b", f"k{number:06}")
        db._log.sync()
        expected = objects(db)
        to = restored(path, tmp_path / "restored", archive, db, stored)
    blocks_of_buckets = archive.reads
    assert blocks_of_buckets == 1
    with open_with(to, blocks=archive, options=QUIET) as db:
        assert archive.reads == blocks_of_buckets, "opening reads nothing"
        db.put("b", "k001234", expected["k001234"])
        db.delete("b", "new") if db.put("b", "new", b"1") else None
        assert archive.reads == blocks_of_buckets, "what is in memory decides"
        assert db.get("b", "k003000large").value == LARGE
        assert archive.reads == blocks_of_buckets + 1
        with pytest.raises(VersionGone):
            db.get("b", "k004000", before)
        assert objects(db) == expected
        db.flush()
        assert objects(db) == expected
        gone = list(db.leaving.away())
        assert db.leaving.bring(gone) == len(gone)
        assert list(db.check()) == []
    archive.is_down = True
    with open_with(to, options=QUIET) as db:
        assert objects(db) == expected, "all of it is here"
        with pytest.raises(VersionGone):
            db.get("b", "k004000", before)


def test_the_root_of_what_was_installed_is_the_checkpoints(path: str, tmp_path: Path) -> None:
    """Without a block being read: the references have the hashes."""
    archive = Archive()
    with open_with(path, options=QUIET) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"k{number:06}", b"%d" % number) for number in range(5000)])
        db.checkpoint()
        stored = db.checkpoints()[0]
        to = restored(path, tmp_path / "restored", archive, db, stored)
        reads = archive.reads
        root = db.root()
    with open_with(to, blocks=archive, options=QUIET) as db:
        assert db.root() == root == stored.root
        assert archive.reads == reads


def test_transactions_that_were_open_go_on(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their writes are in no block: redo begins with the first of them, and repeats what others wrote."""
    from lowwater.engine.database import transactions

    monkeypatch.setattr(transactions, "SPILL_ABOVE_BYTES", 500)
    archive = Archive()
    with open_with(path, options=QUIET) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"k{number:06}", b"%d" % number) for number in range(3000)])
        txn = db.transaction()
        for number in range(0, 3000, 150):
            txn.put("b", f"k{number:06}", b"of the transaction" * 5)
        for times in range(3):
            db.put("b", "k002001", b"written %d" % times)
        db.put("b", "k002002", LARGE)
        db.delete("b", "k002003")
        db.put("b", "k002004", b"gone soon")
        db.delete("b", "k002004")
        db.checkpoint()
        stored = db.checkpoints()[0]
        assert stored.index.control_body["transactions"]
        for number in range(1, 3000, 150):
            txn.put("b", f"k{number:06}", b"of the transaction" * 5)
        txn.commit()
        db.put("b", "k002005", b"later")
        expected, root = objects(db), db.root()
        to = restored(path, tmp_path / "restored", archive, db, stored)
    for flushes in (False, True):
        with open_with(to, blocks=archive, options=QUIET) as db:
            if flushes:
                db.flush()
            assert objects(db) == expected
            assert db.root() == root
            assert list(db.check(away=True)) == []


def test_a_store_that_is_being_made_is_not_opened_and_made_to_the_end_later(
    path: str, tmp_path: Path
) -> None:
    """Whatever ended it: a store that is half there must not look like one that is small."""
    archive = Archive()
    with open_with(path, options=QUIET) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"k{number:06}", b"%d" % number) for number in range(3000)])
        db.checkpoint()
        stored = db.checkpoints()[0]
        archive.ship(stored)
        copy_log(path, tmp_path / "restored")
        store = LmdbPages.open(str(tmp_path / "restored" / "pages"))
        archive.is_down = True
        with pytest.raises(ArchiveDown):
            install(db, stored, store, archive)
        archive.is_down = False
        store.close()
        with pytest.raises(Corrupt, match="did not end"):
            open_with(str(tmp_path / "restored"), blocks=archive)
        store = LmdbPages.open(str(tmp_path / "restored" / "pages"))
        db.put("b", "more", b"1")
        db.checkpoint()
        with pytest.raises(AlreadyExists):
            install(db, db.checkpoints()[0], store, archive)
        install(db, stored, store, archive)
        with pytest.raises(AlreadyExists):
            install(db, stored, store, archive)
        store.close()
    with open_with(str(tmp_path / "restored"), blocks=archive) as db:
        assert len(objects(db)) == 3000
        with pytest.raises(NotFound):
            db.get("b", "more")


def test_a_million_keys_worth_of_references_takes_few_transactions_and_no_block(tmp_path: Path) -> None:
    """How long a restore takes until the first read does not depend on how much there is."""
    rng = random.Random(1)
    count = 1_000_000 // 64

    def lists() -> Iterator[KnownColumns]:
        for first in range(0, count, 125):
            numbers = range(first, first + 125)
            keys = [b"\1bk%09d" % (number * 64) for number in numbers]
            listed = (
                keys,
                [blake3(key).digest() for key in keys],
                array("I", [64] * 125),
                array("I", [8000] * 125),
            )
            offsets = array("I", [number * 8000 for number in numbers])
            packs = [rng.randbytes(32) for _ in numbers]
            yield listed, (packs, offsets, [NO_HASH] * 125, array("I", [0] * 125))

    checkpoint = Checkpoint(
        seq=9,
        time_us=1,
        cluster_id=bytes(16),
        base_seq=0,
        base_hash=NO_HASH,
        row_count=10**6,
        block_count=count,
        lists=[],
        packs={},
        control=_control(),
    )
    archive = Archive()
    store = LmdbPages.open(str(tmp_path / "pages"))
    writes = 0
    write = store.write

    def counting(*args: Any) -> None:
        nonlocal writes
        writes += 1
        write(*args)

    store.write = counting  # type: ignore[method-assign]
    given = {"salt": b"salt", "page_keys": 64, "inline_bytes_max": 256}
    assert install_references(store, checkpoint, lists(), archive, **given) == count  # type: ignore[arg-type]
    assert writes < 8
    assert archive.reads == 0
    assert sum(1 for _ in store.page_keys()) == count
    data = store.get(b"\1bk%09d" % 640)
    assert data is not None
    assert is_reference(data)
    store.close()


def _control() -> bytes:
    import cbor2

    body = {
        "horizon": None,
        "snapshots": {},
        "expires_us": {},
        "per_key_max": None,
        "exact_from": 0,
    }
    data: bytes = cbor2.dumps(body, canonical=True)
    return data


def test_a_control_part_that_says_too_little_is_corrupt() -> None:
    checkpoint = Checkpoint(
        seq=9, time_us=1, cluster_id=bytes(16), base_seq=0, base_hash=NO_HASH, row_count=0, block_count=0,
        lists=[], packs={}, control=b"\xa0",
    )  # fmt: skip
    with pytest.raises(Corrupt):
        meta_of_checkpoint(checkpoint, salt=b"", page_keys=4, inline_bytes_max=9)
