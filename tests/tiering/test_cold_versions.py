"""tiering/cold_versions.py: what was read at a seq is what a read there gives, from the store alone."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.engine_model import small_limits
from tests.engine.test_checkpoint_transactions import Orderer, Version, Written, written_of
from tests.engine.test_engine import CREATE, Node, Pair
from tests.tiering.archived import Archived, CountingStore, ship

from lowwater import Abort, Begin, Commit, Copy, CreateBucket, Delete, Put, Write
from lowwater.engine.checkpoint.checkpoints import StoredCheckpoint, read_file
from lowwater.engine.format.ckpt import pack_name
from lowwater.engine.format.entries import Control
from lowwater.engine.format.format import Kind
from lowwater.engine.format.keys import after_prefix, encode_key
from lowwater.engine.log.chain import checkpoint_entry, seal_entry
from lowwater.engine.seams.checksum import crc32
from lowwater.engine.state.catalogue import Catalogue, CheckpointDescriptor
from lowwater.engine.testing.engine import feed
from lowwater.errors import DataError, NewerVersion, VersionGone
from lowwater.tiering.cold_versions import ColdVersions
from lowwater.tiering.names import CHECKPOINTS, pack_object_name

COUNT = 250


def ship_checkpoint(stored: StoredCheckpoint, node: Node, store: CountingStore, catalogue: Catalogue) -> None:
    data = read_file(node.files, stored.path)
    store.write(f"{CHECKPOINTS}{stored.path.rpartition('/')[2]}", [data], size=len(data))
    for pack, size in stored.index.packs.items():
        pack_data = read_file(node.files, f"{stored.packs_directory}/{pack_name(pack)}")
        assert len(pack_data) == size
        store.write(pack_object_name(pack), [pack_data], size=size)
    index = stored.index
    catalogue.add(
        CheckpointDescriptor(
            index.seq, index.time_us, stored.file_hash, len(data), index.root, index.control_hash
        )
    )


class Lived(NamedTuple):
    node: Node
    written: Written
    archived: Archived
    seq_last: int
    names: list[tuple[str, str]]

    def versions(self, *, with_log: bool = False) -> ColdVersions:
        cold = self.archived.cold()
        log = None
        if with_log:
            log = self.node.engine._log
            log.set_cold_source(cold)
        return ColdVersions(self.archived.fetcher, cold, self.archived.catalogue, log=log)


@cache
def lived(seed: int, *, shipped_share: float = 1.0) -> Lived:
    """A history of everything that an engine knows; its checkpoints and segments are in the store."""
    with small_limits(range_pages=3, group_bytes=4000, read_bytes=600):
        rng = random.Random(f"cold {seed}")
        node = Node(sync_interval_ms=0)
        engine = node.open()
        store, catalogue = CountingStore(), Catalogue()
        pairs: list[Pair] = [(1, CREATE), (2, CreateBucket("b"))]
        feed(engine, pairs)
        orderer = Orderer(engine, rng)
        for _ in range(COUNT):
            seq, entry = orderer.next()
            outcome = engine.apply_log_entry(seq, entry)
            if isinstance(entry, Control) and entry.kind == Kind.CHECKPOINT and not outcome.refused:
                engine.wait_for_checkpoint(seq)
                if rng.random() < 0.5:
                    ship_checkpoint(engine.checkpoints()[0], node, store, catalogue)
        engine.sync()
        count = len(engine._log.wal.store.segments)
        ship(engine._log, store, catalogue, int(count * shipped_share))
        hwm = catalogue.hwm
        kept = Catalogue()
        for record in (*catalogue.segments, *(each for each in catalogue.checkpoints if each.seq <= hwm)):
            kept.add(record)
        written = written_of(engine)
        names = [*written.versions, ("b", "never"), ("never", "k00"), ("", "never")]
        return Lived(node, written, Archived(store, kept), engine.marks().applied, names)


def require(versions: ColdVersions, written: Written, name: tuple[str, str], seq: int) -> None:
    found = versions.at(*name, seq)
    expected = written.at(name, seq)
    if found is not None:
        assert expected == Version(found.seq, found.time_us, found.value), (name, seq)
        assert (found.bucket, found.key) == name
    else:
        assert expected is None, (name, seq)


@pytest.fixture(autouse=True)
def _small_limits() -> Iterator[None]:
    with small_limits(range_pages=3, group_bytes=4000, read_bytes=600):
        yield


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 11), data=st.data())
def test_a_read_at_any_shipped_seq_is_what_the_log_says(seed: int, data: st.DataObject) -> None:
    """Transactions, groups, copies, deletions, buckets, savepoints and refusals, below any checkpoint."""
    life = lived(seed)
    versions = life.versions()
    hwm = life.archived.catalogue.hwm
    for _ in range(10):
        name = data.draw(st.sampled_from(life.names))
        require(versions, life.written, name, data.draw(st.integers(1, hwm)))
    with pytest.raises(VersionGone):
        versions.at("b", "k00", hwm + 1)


def require_scan(
    versions: ColdVersions, written: Written, bucket: str, low: bytes, high: bytes, seq: int
) -> int:
    rows = {
        encode_key(name.encode(), key.encode()): (key, *version)
        for (name, key), version in written.rows(seq).items()
        if name == bucket
    }
    expected = [row for encoded, row in sorted(rows.items()) if low <= encoded < high]
    found = [(each.key, each.seq, each.time_us, each.value) for each in versions.scan(bucket, low, high, seq)]
    assert found == expected, (bucket, low, high, seq)
    return len(found)


@pytest.mark.parametrize("seed", range(4))
def test_a_scan_at_any_shipped_seq_is_what_the_log_says(seed: int) -> None:
    """Of whole buckets, of a part, and of the buckets' own records; above a checkpoint and below all."""
    life = lived(seed)
    versions = life.versions()
    hwm = life.archived.catalogue.hwm
    rng = random.Random(f"scans {seed}")
    found = 0
    for seq in [hwm, *(rng.randint(1, hwm) for _ in range(12))]:
        for bucket in ("b", "c", "never"):
            low = encode_key(bucket.encode(), b"")
            found += require_scan(versions, life.written, bucket, low, after_prefix(low), seq)
            part = encode_key(bucket.encode(), b"k%02d" % rng.randrange(60))
            require_scan(versions, life.written, bucket, part, after_prefix(part[:-1]), seq)
        require_scan(versions, life.written, "", b"\0", b"\1", seq)
    assert found > 20


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 112))
def test_every_key_at_many_seqs_is_what_the_log_says(seed: int) -> None:
    """Also right at the entries that end something: commits, checkpoints, the last of a group."""
    life = lived(seed)
    versions = life.versions()
    seqs = {each.seq for found in life.written.versions.values() for each in found}
    seqs |= {seq - 1 for seq in seqs} | {end for end in life.written.ends.values() if end is not None}
    seqs |= {each.seq for each in life.archived.catalogue.checkpoints}
    hwm = life.archived.catalogue.hwm
    rng = random.Random(seed)
    some = sorted(seq for seq in seqs if 0 < seq <= hwm)
    for name in life.names:
        for seq in rng.sample(some, min(25, len(some))):
            require(versions, life.written, name, seq)
    lived.cache_clear()


@pytest.mark.parametrize("seed", [200, 201, 202])
def test_what_is_not_shipped_yet_comes_from_the_local_log(seed: int) -> None:
    """Shipping lags, and segments that were shipped are purged."""
    life = lived(seed, shipped_share=0.6)
    hwm = life.archived.catalogue.hwm
    assert hwm < life.seq_last
    versions = life.versions(with_log=True)
    rng = random.Random(seed)
    for purge in (False, True):
        if purge:
            life.node.engine._log.purge(hwm)
        for name in life.names:
            for seq in (rng.randint(1, hwm), rng.randint(hwm, life.seq_last), life.seq_last):
                require(versions, life.written, name, seq)


def transactional_entries() -> Generator[Any, int, None]:
    """Transactions that end, and are rolled back in part, before and after what others do; each entry with a
    seal or a checkpoint behind it, so that everything lies across segments."""
    yield Put("b", "a", b"plain")
    yield Put("b", "d", b"d" * 400)
    first = yield Begin()
    yield Put("b", "a", b"1", txn=first)
    kept = yield Put("b", "c", b"2", txn=first)
    yield Put("b", "a", b"undone", txn=first)
    undo = yield Abort(first, kept)
    yield Put("b", "d", b"3" * 400, txn=first)
    second = yield Begin()
    yield Put("b", "e", b"4", txn=second)
    yield Abort(first, undo)
    yield Put("b", "f", b"5", txn=first)
    yield Delete("b", "plain")
    yield Commit(first)
    third = yield Begin()
    begun = yield Put("b", "a", b"6", {"m": "n"}, txn=third)
    yield Delete("b", "d", txn=third)
    yield Put("b", "f", b"undone twice", txn=third)
    yield Abort(third, begun)
    yield Put("b", "f", b"7" * 300, txn=third)
    yield Put("b", "e", b"dooms the second")
    yield Commit(second)
    yield Write([Put("b", "g", b"8"), Copy("b", "d", "b", "h"), Put("b", "g", b"9" * 500)])
    yield Commit(third)
    fourth = yield Begin()
    yield Put("b", "a", b"never", txn=fourth)
    yield Abort(fourth)
    fifth = yield Begin()
    yield Put("b", "g", b"never", txn=fifth)
    yield Copy("b", "f", "b", "i")
    yield Delete("b", "f")


@pytest.mark.parametrize("shipped", [(), (0,), (5, 9), tuple(range(0, 40, 3)), tuple(range(40))], ids=str)
def test_transactions_across_checkpoints_and_segments(shipped: tuple[int, ...]) -> None:
    """At every seq, whatever entries a checkpoint comes after: a roll-back takes what it is to take, from
    both sides of the checkpoint, and a version is there from its commit on."""
    node = Node(sync_interval_ms=0)
    engine = node.open()
    store, catalogue = CountingStore(), Catalogue()
    feed(engine, [(1, CREATE), (2, CreateBucket("b")), (3, Put("b", "plain", b"x"))])
    entries = transactional_entries()
    seq = 3
    sent: Any = None
    try:
        for number in range(1000):
            entry = entries.send(sent)
            seq += len(entry.entries) if isinstance(entry, Write) else 1
            outcome = engine.apply_log_entry(seq, entry)
            assert outcome.refused is None or (isinstance(entry, Commit) and outcome.refused), entry
            sent, seq = seq, seq + 1
            if number in shipped:
                engine.apply_log_entry(seq, checkpoint_entry(engine._state.checkpoint_seq))
                engine.wait_for_checkpoint(seq)
                ship_checkpoint(engine.checkpoints()[0], node, store, catalogue)
            else:
                engine.apply_log_entry(seq, seal_entry(engine._wal.chain.seq_first))
    except StopIteration:
        pass
    engine.sync()
    ship(engine._log, store, catalogue)
    written = written_of(engine)
    archived = Archived(store, catalogue)
    names = [("b", key) for key in "acdefghi"] + [("", "b"), ("b", "plain")]
    cold = archived.cold()
    versions = ColdVersions(archived.fetcher, cold, catalogue)
    for at in (*range(catalogue.hwm, 0, -1), *range(1, catalogue.hwm + 1)):
        for name in names:
            require(versions, written, name, at)
    assert written.at(("b", "a"), catalogue.hwm).value == b"6"  # type: ignore[union-attr]
    found = versions.at("b", "a", catalogue.hwm)
    assert found is not None
    assert found.metadata == {"m": "n"}


def test_histories_hold_what_is_to_be_read() -> None:
    """Else the tests above prove little."""
    lives = [lived(seed) for seed in range(12)]
    checkpoints = [each for life in lives for each in life.archived.catalogue.checkpoints]
    assert len(checkpoints) > 20
    opened = copied = undone = 0
    for life in lives:
        versions = life.versions()
        for each in life.archived.catalogue.checkpoints:
            looking = versions._look("b", "k00", each.seq)
            opened += len(looking.opened)
            undone += sum(bool(row.undone) for row in looking.opened.values())
        for entry in life.node.engine.log():
            copied += entry.extras is not None and entry.extras.value_ref is not None
    assert opened > 20
    assert undone > 3
    assert copied > 10


def test_every_flipped_byte_of_what_is_read_is_found() -> None:
    """In indexes, packs and segments: a typed error, or the right answer."""
    life = lived(3)
    rng = random.Random(1)
    store = life.archived.store
    hwm = life.archived.catalogue.hwm
    found = 0
    for name in [*store.objects.data] * 12:
        sound = store.objects.data[name]
        at = rng.randrange(len(sound))
        store.objects.data[name] = sound[:at] + bytes([sound[at] ^ 1 << rng.randrange(8)]) + sound[at + 1 :]
        versions = life.versions()
        for key in rng.sample(life.names, 6):
            try:
                require(versions, life.written, key, rng.randint(1, hwm))
            except (DataError, NewerVersion) as error:
                found += 1
                where = str(error)
                assert name in where, where
        store.objects.data[name] = sound
    assert found > 20


def test_a_cold_version_costs_few_requests() -> None:
    """The index, its list and its block; then nothing for their neighbours."""
    node = Node(sync_interval_ms=0)
    engine = node.open()
    feed(engine, [(1, CREATE), (2, CreateBucket("b"))])
    for number in range(3000):
        engine.apply_log_entry(number + 3, Put("b", f"k{number:04}", b"v" * 100))
    engine.apply_log_entry(3003, checkpoint_entry(0))
    engine.wait_for_checkpoint(3003)
    store, catalogue = CountingStore(), Catalogue()
    ship_checkpoint(engine.checkpoints()[0], node, store, catalogue)
    ship(engine._log, store, catalogue)
    archived = Archived(store, catalogue)
    cold = archived.cold()
    versions = ColdVersions(archived.fetcher, cold, catalogue)
    found = versions.at("b", "k1234", 3003)
    assert found is not None
    assert found.value == b"v" * 100
    assert len(store.requests) <= 4
    store.requests.clear()
    assert versions.at("b", "k1235", 3003) is not None
    assert not store.requests


def test_a_key_with_the_checksum_of_another_is_not_taken_for_it() -> None:
    """The key index has 32 bits of a key, and nothing else."""
    seen: dict[int, str] = {}
    twins: tuple[str, str] | None = None
    for number in range(10**6):
        key = f"{number * 2654435761 % 2**32:x}-{number}"
        other = seen.setdefault(crc32(b"b" + key.encode()), key)
        if other != key:
            twins = (other, key)
            break
    assert twins is not None
    node = Node(sync_interval_ms=0)
    engine = node.open()
    entries = [Put("b", twins[0], b"one"), Put("b", twins[1], b"two"), Delete("b", twins[1])]
    feed(engine, [(1, CREATE), (2, CreateBucket("b")), *enumerate(entries, 3)])
    engine.apply_log_entry(6, seal_entry(engine._wal.chain.seq_first))
    engine.sync()
    store, catalogue = CountingStore(), Catalogue()
    ship(engine._log, store, catalogue)
    archived = Archived(store, catalogue)
    cold = archived.cold()
    versions = ColdVersions(archived.fetcher, cold, catalogue)
    written = written_of(engine)
    for key in twins:
        for seq in range(1, 7):
            require(versions, written, ("b", key), seq)
