"""Archives: names, manifests, what a reader follows, and that no damage goes unseen."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.engine_model import CLUSTER_ID
from tests.tiering.lines import StepStore, begun, restored

from lowwater.chaos.failing_store import FaultyStore, StoreFault, StoreOperation
from lowwater.engine.format.blocks import NO_HASH, hash_of
from lowwater.engine.log.compress import compress_segment
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.state import catalogue
from lowwater.engine.state.catalogue import Catalogue, CheckpointDescriptor, Fork, SegmentDescriptor
from lowwater.errors import (
    Corrupt,
    DataError,
    LowwaterError,
    NewerVersion,
    NotFound,
    NotLowwater,
    OtherCluster,
)
from lowwater.tiering import names, objects
from lowwater.tiering.archive import Archive, open_archive
from lowwater.tiering.memory_store import MemoryObjects, MemoryStore
from lowwater.tiering.objects import EpochClaim, decode_epoch, decode_manifest, manifest_of
from lowwater.tiering.verify import ObjectFile, verify_object

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden_archive"
ARCHIVE_MD = (ROOT / "docs" / "ARCHIVE.md").read_text()


def golden() -> MemoryObjects:
    made = MemoryObjects()
    for path in sorted((GOLDEN / "archive").rglob("*")):
        if path.is_file():
            made.add(str(path.relative_to(GOLDEN / "archive")), path.read_bytes())
    return made


# ---------------------------------------------------------------------------- the document


def table(heading: str, number: int = 0) -> list[list[str]]:
    """The cells of a table below a heading."""
    section = re.split(rf"^#+ {heading}$", ARCHIVE_MD, flags=re.M)[1]
    section = re.split(r"^#", section, flags=re.M)[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, flags=re.M)
    return [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in tables[number].splitlines()[2:]]


def column(heading: str, number: int = 0) -> list[str]:
    return [row[0] for row in table(heading, number)]


def test_the_document_has_the_fields_that_the_code_has() -> None:
    assert tuple(column("Whose it is")) == objects.FIELDS["archive"]
    assert tuple(column("Manifests")) == objects.FIELDS["manifest"]
    assert tuple(column("Epochs")) == objects.FIELDS["epoch"]
    assert tuple(column("States")) == objects.FIELDS["state"]
    for number, made in enumerate((SegmentDescriptor, CheckpointDescriptor, Fork)):
        assert tuple(column("Records", number)) == made._fields
    head = catalogue.ListHead([], [], [])
    assert column("Chunks and runs") == list(head.to_body())
    chunk = cbor2.loads(catalogue.encode_chunk("segments", []))
    assert sorted(column("Chunks and runs", 1)) == sorted(chunk)
    text = " ".join(ARCHIVE_MD.split())
    assert (
        f"**chunks** of {catalogue.CHUNK_RECORDS:,}; what is left into **runs** of {catalogue.RUN_RECORDS}"
        in text
    )
    assert f"at most {catalogue.CHUNK_RECORDS // catalogue.RUN_RECORDS - 1} |" in text
    assert f"at most {catalogue.RUN_RECORDS - 1}, each" in text


def test_the_document_has_the_names_that_the_code_has() -> None:
    """Each is what the golden archive has an object of."""
    parts = {"<epoch>": r"\d{10}", "<hash:16>": "[0-9a-f]{16}", "<hash>": "[0-9a-f]{64}"}
    parts |= dict.fromkeys(("<first>", "<last>", "<seq>", "<number>"), r"\d{20}")
    found = {}
    for name, kind, *_ in table("Names"):
        pattern = re.escape(name)
        for part, expression in parts.items():
            pattern = pattern.replace(re.escape(part), expression)
        found[kind] = re.compile(pattern)
    seen = set()
    for name in golden().data:
        parsed = names.parse(name)
        assert parsed is not None
        assert found[parsed.type].fullmatch(name)
        seen.add(parsed.type)
    assert seen == found.keys()


# ---------------------------------------------------------------------------- golden objects


def test_the_golden_archive_is_what_it_was() -> None:
    """And what the code still writes: a byte that differs is another format."""
    expected = json.loads((GOLDEN / "expected.json").read_text())
    held = golden()
    archive = open_archive(MemoryStore(objects=held))
    assert archive.cluster_id.hex() == expected["cluster_id"]
    newest = archive.newest()
    assert newest is not None
    assert (newest.name, newest.hwm) == (expected["newest"], expected["hwm"])
    assert newest.encode() == held.data[newest.name]
    read = archive.catalogue_of(newest)
    assert [names.segment_name(each) for each in read.segments] == expected["segments"]
    assert [names.checkpoint_name(each) for each in read.checkpoints] == expected["checkpoints"]
    assert [each.epoch for each in read.forks] == expected["forks"]
    assert manifest_of(read, archive.cluster_id, newest.seq) == newest
    assert (
        dict(read.objects(newest.heads)).items()
        <= {hash_of(data): data for name, data in held.data.items() if name.startswith(names.CHUNKS)}.items()
    )
    for name, data in held.data.items():
        if name.startswith(names.EPOCHS):
            claim = decode_epoch(data)
            assert (claim.encode(), claim.name, claim.owner) == (data, name, "golden")
        verify_object(name, ObjectFile(archive.store, name))


def test_what_is_made_today_is_the_golden_archive() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("golden_archive_make", GOLDEN / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.made()
    for name, data in golden().data.items():
        if not name.startswith(names.WAL):
            assert made.data[name] == data, name
        assert name in made.data


# ---------------------------------------------------------------------------- damage


def bad(name: str, data: bytes) -> None:
    """One flipped or missing byte is told, as what it is, and with the object's name."""
    store = MemoryStore("memory://a", objects=MemoryObjects())
    store.objects.data[name] = data
    with pytest.raises((DataError, NewerVersion)) as caught:
        verify_object(name, ObjectFile(store, name, len(data)), uri=store.uri)
    assert caught.value.path is not None
    assert caught.value.path.endswith(name)


@pytest.mark.parametrize(
    "kind", ["cluster", "epoch", "state", "segment", "manifest", "chunk", "checkpoint", "pack"]
)
def test_every_flipped_byte_is_found(kind: str) -> None:
    """In objects of every type, in raw and in compressed segments, in their zeros too."""
    rng = random.Random(kind)
    count = 0
    for name, data in golden().data.items():
        parsed = names.parse(name)
        if parsed is None or parsed.type != kind:
            continue
        for position in range(len(data)):
            flipped = bytearray(data)
            flipped[position] ^= 1 << rng.randrange(8)
            bad(name, bytes(flipped))
            count += 1
        for cut in (b"", data[: len(data) // 2], data[:-1], data + b"\0"):
            bad(name, cut)
    assert count >= 90


def test_a_compressed_segment_is_verified_as_the_raw_one_is() -> None:
    """Also where it is damaged inside, and its last hash is right: of other bytes."""
    held = golden()
    raw_name = max(name for name in held.data if name.startswith(names.WAL))
    raw = held.data[raw_name]
    assert raw[:5] == b"LWSEG"
    damaged = bytearray(raw)
    damaged[300] ^= 1
    for content, is_good in ((raw, True), (bytes(damaged), False)):
        file = MemoryFiles().open("raw", write=True, create=True)
        file.write_at(0, [content])
        parts: list[bytes] = []
        compress_segment(file, parts.append)
        if is_good:
            store = MemoryStore(objects=held)
            store.objects.data[raw_name] = b"".join(parts)
            verify_object(raw_name, ObjectFile(store, raw_name))
        else:
            bad(raw_name, b"".join(parts))


def test_an_object_under_another_name_is_found() -> None:
    """A copy that went wrong."""
    held = golden()
    by_type: dict[str, list[str]] = {}
    for name in held.data:
        parsed = names.parse(name)
        assert parsed is not None
        by_type.setdefault(parsed.type, []).append(name)
    for name in held.data:
        for other in held.data:
            if name != other:
                bad(name, held.data[other])
    bad("what/ever", b"")


# ---------------------------------------------------------------------------- opening


def test_an_archive_belongs_to_one_cluster() -> None:
    store = MemoryStore()
    with pytest.raises(NotFound, match="no archive"):
        open_archive(store)
    open_archive(store, CLUSTER_ID, create=True)
    open_archive(store, CLUSTER_ID, create=True)
    assert open_archive(store).cluster_id == CLUSTER_ID
    for create in (True, False):
        with pytest.raises(OtherCluster):
            open_archive(store, bytes(16), create=create)
    store.objects.data[names.CLUSTER] = b"\xff"
    with pytest.raises(Corrupt, match=r"cluster\.cbor"):
        open_archive(store)
    newer = cbor2.dumps({"lowwater": "archive", "version": 2})
    store.objects.data[names.CLUSTER] = newer
    with pytest.raises(NewerVersion):
        open_archive(store)
    store.objects.data[names.CLUSTER] = cbor2.dumps({"lowwater": "manifest", "version": 1})
    with pytest.raises(NotLowwater):
        open_archive(store)


def with_manifests(seqs: list[tuple[int, int]]) -> tuple[Archive, StepStore]:
    store = StepStore(MemoryObjects())
    archive = open_archive(store, CLUSTER_ID, create=True)
    for epoch, seq in seqs:
        manifest = objects.Manifest(CLUSTER_ID, epoch, seq, 0, Catalogue().heads())
        store.objects.add(manifest.name, manifest.encode())
        claim = EpochClaim(CLUSTER_ID, epoch, 1, NO_HASH, seq.to_bytes(16, "big"), "")
        store.objects.add(claim.name, claim.encode())
    store.operations = 0
    return archive, store


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 10**6) | st.integers(1, 3), st.integers(1, 2**64 - 1) | st.integers(1, 999)),
        max_size=40,
        unique=True,
    ),
    st.integers(1, 5),
)
def test_the_newest_manifest_is_found(seqs: list[tuple[int, int]], page: int) -> None:
    """However many there are, and however few a list gives at once."""
    archive, store = with_manifests(seqs)
    store.objects.add(names.chunk_name(NO_HASH), b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "LISTED_AT_ONCE", page)
        newest = archive.newest()
        assert (None if newest is None else (newest.epoch, newest.seq)) == max(seqs, default=None)
        epochs = {epoch for epoch, _ in seqs}
        assert names.listed_epoch(store) == max(epochs, default=0)
    for epoch in (0, 2, 500):
        above = {parsed.epoch for parsed in map(names.parse, names.epochs_above(store, epoch)) if parsed}
        assert above == {each for each in epochs if each > epoch}


def test_finding_the_newest_takes_few_requests() -> None:
    archive, store = with_manifests([(3, seq * 100) for seq in range(1, 20_001)])
    newest = archive.newest()
    assert newest is not None
    assert newest.seq == 2_000_000
    assert store.operations < 40


def test_two_manifests_of_one_entry_are_no_archive_to_trust() -> None:
    archive, store = with_manifests([(1, 5)])
    other = objects.Manifest(CLUSTER_ID, 1, 5, 7, Catalogue().heads())
    store.objects.add(other.name, other.encode())
    with pytest.raises(Corrupt, match="two logs"):
        archive.newest()


def test_a_manifest_of_another_cluster_or_entry_is_not_taken() -> None:
    archive, store = with_manifests([])
    strange = objects.Manifest(bytes(16), 1, 5, 7, Catalogue().heads())
    store.objects.add(strange.name, strange.encode())
    with pytest.raises(OtherCluster):
        archive.newest()
    store.objects.remove(strange.name)
    moved = objects.Manifest(CLUSTER_ID, 1, 5, 7, Catalogue().heads())
    store.objects.add(names.manifest_name(2, 5, moved.hash), moved.encode())
    with pytest.raises(Corrupt, match="another entry"):
        archive.newest()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_hostile_bytes_are_told(data: bytes) -> None:
    """Whatever they decode to."""
    for decode in (decode_manifest, decode_epoch, objects.decode_cluster, catalogue.decode_any_chunk):
        with pytest.raises(LowwaterError):
            decode(data)


def test_fields_out_of_range_are_told() -> None:
    body: dict[str, Any] = cbor2.loads(objects.Manifest(CLUSTER_ID, 1, 5, 7, Catalogue().heads()).encode())
    for name, values in {
        "epoch": (0, -1, 2**64, "1", None, True),
        "seq": (0, b""),
        "hwm": (-1, 1.5),
        "cluster_id": (b"", "x" * 16),
        "segments": (
            None,
            {},
            {"chunks": [b"1"], "runs": [], "rest": []},
            {"chunks": [], "runs": [], "rest": [1]},
        ),
    }.items():
        for value in values:
            with pytest.raises(Corrupt):
                decode_manifest(cbor2.dumps({**body, name: value}))


# ---------------------------------------------------------------------------- beyond the newest manifest


def test_segments_that_follow_the_newest_manifest_are_found() -> None:
    """They were shipped, and then everything else was lost."""
    line = begun(MemoryObjects())
    line.live(1)
    archive = open_archive(line.store, CLUSTER_ID)
    newest = archive.newest()
    assert newest is not None
    read = archive.catalogue_of(newest)
    assert list(archive.segments_after(newest, read)) == []
    for number in range(3):
        line.db.put("b", f"more {number}", b"v")
        line.db._log.seal()
    more = [(each, data) for _, each, data in line.segments() if each.last > read.hwm]
    assert len(more) == 3
    for each, data in more[1:]:
        line.store.write(names.segment_name(each), [data], size=len(data))
    assert list(archive.segments_after(newest, read)) == [], "the one between is missing"
    each, data = more[0]
    line.store.write(names.segment_name(each), [data], size=len(data))
    assert list(archive.segments_after(newest, read)) == [each for each, _ in more]
    # Another log that went on from the same place has shipped too: nobody knows which is right.
    other = begun(MemoryObjects())
    other.live(1)
    other.db.put("b", "something else", b"v")
    other.db._log.seal()
    stranger = next((each, data) for _, each, data in other.segments() if each.last > read.hwm)
    line.store.write(names.segment_name(stranger[0]), [stranger[1]], size=len(stranger[1]))
    assert list(archive.segments_after(newest, read)) == []
    for each_line in (line, other):
        each_line.db.close()


def test_publishing_writes_what_is_new_and_no_more() -> None:
    """A chunk or a run when it is whole: not all of them, and not one that is there."""
    line = begun(MemoryObjects())
    for number in range(130):
        line.db.put("b", f"{number}", b"v")
        line.db._log.seal()
    written: list[str] = []
    real = line.store.write

    def write(name: str, parts: Any, *, size: int) -> bool:
        written.append(name)
        return real(name, parts, size=size)

    line.store.write = write  # type: ignore[method-assign]
    line.live(1)
    assert line.fenced is None
    chunks = [name for name in written if name.startswith(names.CHUNKS)]
    assert len(chunks) == len(set(chunks)) == 2
    manifests = [name for name in written if names.parse(name).type == "manifest"]  # type: ignore[union-attr]
    assert len(manifests) == len(line.db.catalogue.segments)
    assert manifests == sorted(manifests)
    assert max(len(line.store.objects.data[name]) for name in manifests) < 8000
    line.db.close()


def test_a_damaged_segment_beyond_the_newest_manifest_ends_the_chain() -> None:
    """Nothing has rested on it; what is before it is good."""
    line = begun(MemoryObjects())
    line.live(1)
    archive = open_archive(line.store, CLUSTER_ID)
    newest = archive.newest()
    assert newest is not None
    read = archive.catalogue_of(newest)
    for number in range(3):
        line.db.put("b", f"more {number}", b"v")
        line.db._log.seal()
    more = [(each, data) for _, each, data in line.segments() if each.last > read.hwm]
    for number, (each, data) in enumerate(more):
        data = data[:-50] if number == 1 else data
        line.store.write(names.segment_name(each), [data], size=len(data))
    assert list(archive.segments_after(newest, read)) == [more[0][0]]
    line.db.close()


def test_a_restored_log_publishes_entries_below_those_that_its_parent_published() -> None:
    """It has lost its parent's last entries, and gives their seqs to others: the epoch tells them apart."""
    objects = MemoryObjects()
    first = begun(objects)
    for number in range(3):
        first.db.put("b", f"{number}", b"v")
        first.db._log.seal()
    first.live(0)
    first.ship(open_archive(first.store, CLUSTER_ID))
    parent = open_archive(first.store, CLUSTER_ID).newest()
    assert parent is not None
    second = restored(objects)
    second.live(0)
    archive = open_archive(second.store, CLUSTER_ID)
    second.ship(archive)
    held = [parsed for parsed in map(names.parse, objects.data) if parsed and parsed.epoch == second.epoch]
    expected = second.db.catalogue.seqs_after(second.db.catalogue.forks[-1].recorded_seq)
    assert expected[0] <= parent.seq, "otherwise this test tests nothing"
    assert sorted(each.seq for each in held if each.type == "manifest") == expected
    assert archive.unpublished(second.db.catalogue) == []
    for line in (first, second):
        line.db.close()


@pytest.mark.parametrize("spoilt", [StoreFault(flip_bit=1), StoreFault(short_bytes=3)])
def test_a_segment_that_is_damaged_on_the_way_is_read_again(spoilt: StoreFault) -> None:
    """Else a restore would end before it, and nobody would know; what is cut short is no traceback."""
    server = FaultyStore()
    line = begun(server.objects)
    line.live(1)
    archive = open_archive(server.open(), CLUSTER_ID)
    newest = archive.newest()
    assert newest is not None
    read = archive.catalogue_of(newest)
    line.db.put("b", "more", b"v")
    line.db._log.seal()
    more = [(each, data) for _, each, data in line.segments() if each.last > read.hwm]
    for each, data in more:
        line.store.write(names.segment_name(each), [data], size=len(data))
    reads = 0

    def spoil(operation: StoreOperation) -> StoreFault | None:
        nonlocal reads
        reads += operation.kind == "read"
        return spoilt if reads == 1 else None

    server.fault = spoil
    assert list(archive.segments_after(newest, read)) == [each for each, _ in more]
    assert reads > 1
    line.db.close()
