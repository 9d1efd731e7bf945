"""The catalogue: what is recorded as shipped, by whom, as of when, and that crashes change nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.engine_model import small_limits
from tests.engine.test_engine import CREATE, Node

import lowwater
from lowwater import CreateBucket, Put, Refusal
from lowwater.chaos.disk import SimulatedCrash
from lowwater.chaos.survival import SURVIVALS
from lowwater.engine.checkpoint.checkpoints import read_file
from lowwater.engine.format.blocks import NO_HASH, hash_of
from lowwater.engine.format.entries import Control, decode_body
from lowwater.engine.format.format import HEADER_BYTES, Kind, SegmentHeader
from lowwater.engine.log.chain import checkpoint_entry, seal_entry
from lowwater.engine.log.directory import read_trailer
from lowwater.engine.state import catalogue as catalogue_module
from lowwater.engine.state.catalogue import (
    Catalogue,
    CheckpointDescriptor,
    Fork,
    ListHead,
    Record,
    SegmentDescriptor,
    checkpoint_shipped_entry,
    describe_checkpoint,
    describe_segment,
    fork_entry,
    record_of,
    segment_shipped_entry,
)
from lowwater.engine.state.check_pages import check_state
from lowwater.engine.testing.engine import feed
from lowwater.errors import Corrupt, InputError, InvalidEntry, LogDivergence, NewerVersion

H = [bytes([number]) * 32 for number in range(8)]
CLUSTER = bytes(range(16))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue_module, "CHUNK_RECORDS", 8)
    monkeypatch.setattr(catalogue_module, "RUN_RECORDS", 2)


def segment(number: int, **fields: Any) -> SegmentDescriptor:
    """One of a thousand seqs that was recorded 500 behind its end."""
    first = number * 1000 + 1
    made = SegmentDescriptor(
        1,
        first,
        first + 900,
        hash_of(b"%d" % number),
        5000,
        4000,
        1024,
        1,
        9,
        first,
        first + 900,
        first + 1400,
    )
    return made._replace(**fields)


def checkpoint(seq: int, recorded_seq: int) -> CheckpointDescriptor:
    return CheckpointDescriptor(seq, seq, hash_of(b"c%d" % seq), 300, H[1], H[2], recorded_seq)


def filled(count: int) -> Catalogue:
    made = Catalogue()
    for number in range(count):
        made.add(segment(number))
    return made


# ---------------------------------------------------------------------------- the lists


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=150)
@given(st.integers(0, 70), st.integers(0, 70), st.integers(0, 75_000), st.data())
def test_it_is_the_list_of_what_was_recorded(count: int, known: int, seq: int, data: st.DataObject) -> None:
    """However it is divided into chunks, stored, and read again from a store of objects."""
    model = [segment(number) for number in range(count)]
    made = filled(count)
    assert list(made.segments) == model
    assert [made.segments[index] for index in range(-count, count)] == model * 2
    assert made.hwm == (model[-1].last if model else 0)
    assert made.hwm_at(seq) == max((each.last for each in model if each.recorded_seq <= seq), default=0)
    assert made.segment_of(seq) == next((each for each in model if each.first <= seq <= each.last), None)
    assert list(made.segments_from(seq)) == [each for each in model if each.last >= seq]
    assert made.segment_from_time(seq) == next((each for each in model if each.time_max_us >= seq), None)
    assert made.seqs_after(seq) == [each.recorded_seq for each in model if each.recorded_seq > seq]
    heads = made.heads(seq)
    before = [each for each in model if each.recorded_seq <= seq]
    assert heads["segments"].record_count == len(before)
    assert len(heads["segments"].runs) < 4
    assert len(heads["segments"].rest) < 2
    objects = dict(made.objects(heads))
    assert all(hash_of(content) == name for name, content in objects.items())
    body = cbor2.loads(cbor2.dumps(made.body(seq), canonical=True))
    read = Catalogue.from_body(body, objects.__getitem__)
    assert list(read.segments) == before
    assert read.body() == made.body(seq)
    assert list(made.damage()) == []
    # What a store has that knows an older one is all but what came since.
    older = made.heads(model[min(known, count - 1)].recorded_seq if model else 0)
    had = dict(made.objects(older))
    more = dict(made.objects(heads, older))
    if older["segments"].record_count <= len(before):
        assert Catalogue.from_body(body, {**had, **more}.__getitem__).body() == made.body(seq)
        assert had.keys().isdisjoint(more)


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=50)
@given(st.lists(st.integers(1, 20), max_size=5))
def test_what_is_stored_is_what_changed(parts: list[int]) -> None:
    """A flush writes the chunks that are new, and the one that is not finished: never all of them."""
    made = Catalogue()
    stored: dict[bytes, bytes] = {}
    for part in parts:
        for _ in range(part):
            made.add(segment(len(made.segments)))
        changed = made.freeze()
        assert len(changed) <= part // 8 + 2
        assert made.freeze() == {}
        stored |= changed
        again = Catalogue()
        again.load(stored)
        assert list(again.segments) == list(made.segments)
        assert again.freeze() == {}
        again.add(segment(len(made.segments)))
        assert list(again.segments)[:-1] == list(made.segments)


def test_a_hundred_thousand_segments_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody decodes all of them: to look one up takes a few chunks, to load them the last one."""
    made = filled(100_000)
    stored = made.freeze()
    decoded = 0
    real = catalogue_module.decode_chunk

    def decode(*args: Any) -> Any:
        nonlocal decoded
        decoded += 1
        return real(*args)

    monkeypatch.setattr(catalogue_module, "decode_chunk", decode)
    again = Catalogue()
    again.load(stored)
    assert (decoded, len(again.segments), again.hwm) == (1, 100_000, made.hwm)
    found = again.segment_of(54_321_500)
    assert found == segment(54_321)
    assert decoded < 12
    again.add(segment(100_000))
    assert len(again.freeze()) == 1
    head = again.heads()["segments"]
    assert (len(head.chunks), len(head.runs), len(head.rest)) == (97, 10, 33)
    assert sum(map(len, again.freeze().values())) < 200_000


def test_damage_in_a_chunk_is_told() -> None:
    """Whoever cannot read a descriptor does not begin at 0."""
    made = filled(1100)
    stored = made.freeze()
    key, value = next(iter(stored.items()))
    for position in (0, 3, 4, 700, len(value) - 1):
        damaged = bytearray(value)
        damaged[position] ^= 16
        with pytest.raises(Corrupt):
            Catalogue().load({**stored, key: bytes(damaged)})
    without_first = {name: each for name, each in stored.items() if name != key}
    with pytest.raises(Corrupt):
        Catalogue().load(without_first)
    with pytest.raises(Corrupt):
        Catalogue().load({**stored, b"catalogue:x": b""})
    heads = made.heads()
    objects = dict(made.objects(heads))
    body = made.body()
    for name in objects:
        flipped = {**objects, name: objects[name][:-1] + b"\0"}
        with pytest.raises(Corrupt):
            Catalogue.from_body(body, flipped.__getitem__)
    swapped = {**body, "checkpoints": body["segments"]}
    with pytest.raises(Corrupt):
        Catalogue.from_body(swapped, objects.__getitem__)
    for wrong in ({}, {**body, "forks": None}, {**body, "forks": {"chunks": [], "runs": [b"1"], "rest": []}}):
        with pytest.raises(Corrupt):
            Catalogue.from_body(wrong, objects.__getitem__)
    newer = cbor2.dumps({"list": "segments", "version": 2, "records": []})
    with pytest.raises(NewerVersion):
        catalogue_module.decode_chunk("segments", SegmentDescriptor, newer)


def test_the_epoch_of_an_entry_is_that_of_the_fork_before_it() -> None:
    made = Catalogue()
    assert made.epoch_at(5) == 1
    for epoch, seq in ((3, 10), (7, 20)):
        made.add(Fork(CLUSTER, epoch, 1, seq - 1, NO_HASH, NO_HASH, seq))
    assert [made.epoch_at(seq) for seq in (9, 10, 19, 20, 99)] == [1, 3, 3, 7, 7]


def test_lists_that_are_out_of_order_are_found() -> None:
    made = Catalogue()
    made.add(segment(3))
    made.add(segment(2))
    assert len(list(made.damage())) == 2


# ---------------------------------------------------------------------------- in a fed engine


def sealed(node: Node) -> list[tuple[SegmentHeader, SegmentDescriptor]]:
    """The segments of a node, described by their files."""
    node.engine.sync()
    node.engine._wal.store.seal_all()
    paths = [each.path for each in node.engine._wal.store.segments]
    found = []
    for path in paths:
        file = node.files.open(path)
        header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
        found.append((header, describe_segment(header, read_trailer(file, file.size()))))
        file.close()
    return found


def shipped_entry(node: Node, number: int) -> Control:
    header, described = sealed(node)[number]
    return segment_shipped_entry(header.seq_before, header.hash_before, described)


def with_segments(node: Node, count: int, *, seq: int = 2) -> int:
    """Segments of a put and a seal each, and the last seq."""
    feed(node.engine, [(1, CREATE), (2, CreateBucket("b"))])
    for number in range(count):
        first = node.engine._wal.chain.seq_first or seq + 1
        feed(node.engine, [(seq + 1, Put("b", f"{number}", b"v")), (seq + 2, seal_entry(first))])
        seq += 2
    return seq


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    made.open()
    yield made
    made.engine.close()


def test_a_segment_is_recorded_once_and_in_order(node: Node) -> None:
    """Proposals come twice, late, and from those who know less."""
    seq = with_segments(node, 3)
    engine = node.engine
    entries = [shipped_entry(node, number) for number in range(3)]
    assert engine.apply_log_entry(seq + 1, entries[1]).refused is Refusal.OUT_OF_DATE
    assert engine.apply_log_entry(seq + 2, entries[0]).refused is None
    assert engine.apply_log_entry(seq + 3, entries[0]).refused is Refusal.OUT_OF_DATE
    assert engine.apply_log_entry(seq + 4, entries[1]).refused is None
    assert engine.apply_log_entry(seq + 5, entries[2]).refused is None
    assert [each.recorded_seq for each in engine.catalogue.segments] == [seq + 2, seq + 4, seq + 5]
    # Delivered again, each has the outcome that it had.
    assert engine.apply_log_entry(seq + 3, entries[0]).refused is Refusal.OUT_OF_DATE
    assert engine.apply_log_entry(seq + 4, entries[1]).refused is None
    assert len(engine.catalogue.segments) == 3
    engine.sync()
    assert engine.marks().hwm == engine.get_s3_high_water_mark() == sealed(node)[2][1].last == 8
    assert list(engine.check()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"before": 1},
        {"hash_before": H[1]},
        {"first": 0},
        {"first": 99},
        {"last": 99},
        {"epoch": 2},
        {"epoch": 0},
    ],
)
def test_what_rests_on_what_is_not_so_is_refused(node: Node, wrong: dict[str, Any]) -> None:
    seq = with_segments(node, 1)
    entry = shipped_entry(node, 0)
    assert entry.body is not None
    asked = entry._replace(body={**entry.body, **wrong})
    assert node.engine.apply_log_entry(seq + 1, asked).refused is Refusal.OUT_OF_DATE
    assert not node.engine.catalogue
    assert node.engine.apply_log_entry(seq + 2, entry).refused is None


def test_the_segment_that_is_being_written_is_not_recorded(node: Node) -> None:
    """Whoever says so has another log."""
    seq = with_segments(node, 1)
    feed(node.engine, [(seq + 1, Put("b", "k", b"v"))])
    asked = shipped_entry(node, 0)
    feed(node.engine, [(seq + 2, asked)])
    described = sealed(node)[0][1]
    after = described._replace(first=seq + 1, last=seq + 1)
    asked = segment_shipped_entry(described.last, described.hash, after)
    assert node.engine.apply_log_entry(seq + 3, asked).refused is Refusal.OUT_OF_DATE


@pytest.mark.parametrize("wrong", [{"hash": H[5]}, {"last": 3}])
def test_a_segment_with_another_hash_stops_the_engine(node: Node, wrong: dict[str, Any]) -> None:
    """Replicas that disagree have diverged, and know at once."""
    seq = with_segments(node, 1)
    entry = shipped_entry(node, 0)
    assert entry.body is not None
    with pytest.raises(LogDivergence):
        node.engine.apply_log_entry(seq + 1, entry._replace(body={**entry.body, **wrong}))
    with pytest.raises(LogDivergence):
        node.engine.apply_log_entry(seq + 1, entry)


@pytest.mark.parametrize(
    ("name", "value"),
    [("hash", b"short"), ("hash_before", None), ("last", "7"), ("size", -1), ("first", None)],
)
def test_an_entry_that_makes_no_sense_is_not_taken(node: Node, name: str, value: Any) -> None:
    seq = with_segments(node, 1)
    entry = shipped_entry(node, 0)
    with pytest.raises(InvalidEntry):
        node.engine.apply_log_entry(seq + 1, entry._replace(body={**(entry.body or {}), name: value}))
    assert node.engine.apply_log_entry(seq + 1, entry).refused is None


def test_a_fork_is_refused_but_where_it_says_that_it_stands(node: Node) -> None:
    seq = with_segments(node, 1)
    fork = Fork(CREATE.cluster_id, 2, 1, seq, NO_HASH, NO_HASH)
    for wrong in ({"parent_epoch": 2}, {"seq": seq - 1}, {"epoch": 1}):
        feed_refused(node, seq + 1, fork_entry(fork._replace(**wrong)))
        seq += 1
        first = node.engine._wal.chain.seq_first
        feed(node.engine, [(seq + 1, seal_entry(first))])
        seq += 1
        fork = fork._replace(seq=seq)
    feed(node.engine, [(seq + 1, fork_entry(fork)), (seq + 2, Put("b", "after", b"v"))])
    feed_refused(node, seq + 3, fork_entry(fork._replace(epoch=3, parent_epoch=2, seq=seq + 2)))
    assert node.engine.catalogue.forks.last == fork._replace(recorded_seq=seq + 1)
    assert node.engine.catalogue.epoch_at(seq + 2) == 2
    feed(node.engine, [(seq + 4, seal_entry(seq + 1))])
    assert sealed(node)[-1][0].epoch == 2
    node.restart()
    assert node.engine.catalogue.epoch_at(seq) == 1
    assert list(node.engine.check()) == []


@pytest.mark.parametrize("flushed", ["before", "after", "never"])
def test_a_fork_may_name_another_owner(node: Node, flushed: str) -> None:
    """As a clone does. What was made before it is the parent's, and stays good."""
    seq = with_segments(node, 1)
    feed(node.engine, [(seq + 1, Put("b", "k", b"v")), (seq + 2, checkpoint_entry(0))])
    node.engine.wait_for_checkpoint(seq + 2)
    if flushed == "before":
        node.engine.flush()
    feed(node.engine, [(seq + 3, fork_entry(Fork(H[7][:16], 2, 1, seq + 2, NO_HASH, NO_HASH)))])
    feed(node.engine, [(seq + 4, Put("b", "k", b"w")), (seq + 5, checkpoint_entry(seq + 2))])
    if flushed == "after":
        node.engine.flush()
    node.engine.sync()
    for reopen in (node.crash, node.restart):
        reopen()
        assert list(node.engine.check()) == []
        node.engine.wait_for_checkpoint(seq + 5)
        ids = [each.index.cluster_id for each in node.engine.checkpoints()]
        assert ids == [H[7][:16], CREATE.cluster_id]


def feed_refused(node: Node, seq: int, entry: Control) -> None:
    assert node.engine.apply_log_entry(seq, entry).refused is Refusal.OUT_OF_DATE


def test_control_entries_of_shipping_are_no_news(node: Node) -> None:
    """Or shipping would feed itself for ever."""
    seq = with_segments(node, 1)
    feed(node.engine, [(seq + 1, checkpoint_entry(0)), (seq + 2, shipped_entry(node, 0))])
    feed(node.engine, [(seq + 3, shipped_entry(node, 1)), (seq + 4, Control(Kind.NOOP))])
    assert not node.engine._has_news
    node.engine.sync()
    assert node.engine._wal.store.opened_us is None
    feed(node.engine, [(seq + 5, Put("b", "k", b"v"))])
    node.engine.sync()
    assert node.engine._has_news
    assert node.engine._wal.store.opened_us is not None


# ---------------------------------------------------------------------------- shipped checkpoints


def index_of(node: Node) -> bytes:
    return read_file(node.files, node.engine.checkpoints()[0].path)


def test_a_checkpoint_is_recorded_when_its_log_is_there(node: Node) -> None:
    seq = with_segments(node, 1)
    feed(node.engine, [(seq + 1, checkpoint_entry(0))])
    node.engine.wait_for_checkpoint(seq + 1)
    described = describe_checkpoint(index_of(node))
    assert described.seq == seq + 1
    assert described.id == node.engine.checkpoints()[0].id
    assert described.root.hex() == node.engine.root(seq + 1)
    entry = checkpoint_shipped_entry(0, described)
    feed_refused(node, seq + 2, entry)  # its log is not there
    feed(node.engine, [(seq + 3, shipped_entry(node, 0)), (seq + 4, shipped_entry(node, 1))])
    feed_refused(node, seq + 5, checkpoint_shipped_entry(3, described))
    feed_refused(node, seq + 6, checkpoint_shipped_entry(0, described._replace(seq=seq + 2)))
    feed(node.engine, [(seq + 7, entry)])
    feed_refused(node, seq + 8, entry)
    assert node.engine.catalogue.checkpoint_not_above(seq + 9) == described._replace(recorded_seq=seq + 7)
    assert node.engine.catalogue.checkpoint_not_above(seq) is None
    assert node.engine.catalogue.seqs_after(seq + 3) == [seq + 4, seq + 7]


def test_the_base_of_a_checkpoint_is_the_last_that_was_shipped(node: Node) -> None:
    """Every replica can get that one, also who has lost its disk; until then it is the last that was asked
    for. It stays here."""
    seq = with_segments(node, 1)

    def made(entry: Control) -> tuple[int, int]:
        nonlocal seq
        seq += 2
        feed(node.engine, [(seq - 1, Put("b", f"{seq}", b"v")), (seq, entry)])
        node.engine.wait_for_checkpoint(seq)
        found = node.engine.checkpoints()[0].index
        return found.seq, found.base_seq

    first, base = made(checkpoint_entry(0))
    assert base == 0
    second, base = made(node.engine._next_checkpoint_entry())
    assert base == first
    described = describe_checkpoint(index_of(node))
    for number in range(3):
        feed(node.engine, [(seq + 1, shipped_entry(node, number))])
        seq += 1
    feed(node.engine, [(seq + 1, checkpoint_shipped_entry(0, described))])
    seq += 1
    for _ in range(4):
        entry = node.engine._next_checkpoint_entry()
        assert not (entry.body or {}).get("full")
        _, base = made(entry)
        assert base == second
    assert second in [each.seq for each in node.engine.checkpoints()]
    _, base = made(checkpoint_entry(node.engine._state.checkpoint_seq, full=True))
    assert base == 0
    node.restart()
    _, base = made(node.engine._next_checkpoint_entry())
    assert base == second
    assert list(node.engine.check()) == []


def test_the_control_part_has_the_catalogue(node: Node) -> None:
    """A restore begins with it."""
    seq = with_segments(node, 2)
    feed(node.engine, [(seq + 1, checkpoint_entry(0))])
    node.engine.wait_for_checkpoint(seq + 1)
    assert "catalogue" not in node.engine.checkpoints()[0].index.control_body
    feed(node.engine, [(seq + 2, shipped_entry(node, 0)), (seq + 3, shipped_entry(node, 1))])
    feed(node.engine, [(seq + 4, checkpoint_entry(seq + 1))])
    feed(node.engine, [(seq + 5, shipped_entry(node, 2))])
    node.engine.wait_for_checkpoint(seq + 4)
    control = node.engine.checkpoints()[0].index.control_body
    assert control["catalogue"] == node.engine.catalogue.body(seq + 4)
    read = Catalogue.from_body(control["catalogue"], {}.__getitem__)
    assert list(read.segments) == list(node.engine.catalogue.segments)[:2]


# ---------------------------------------------------------------------------- crashes and histories


def script() -> list[tuple[int, Any]]:
    """Puts, seals and checkpoints, and what ships them. It is made with an engine, since the hashes are those
    of its segments."""
    rng = random.Random(3)
    node = Node()
    node.open()
    pairs: list[tuple[int, Any]] = []

    def put(entry: Any) -> None:
        seq = len(pairs) + 1
        node.engine.apply_log_entry(seq, entry)
        pairs.append((seq, entry))

    put(CREATE)
    put(CreateBucket("b"))
    while len(pairs) < 170:
        roll = rng.random()
        state = node.engine._state
        if roll < 0.5:
            put(Put("b", f"{rng.randrange(60):02}", rng.randbytes(100)))
        elif roll < 0.6:
            put(seal_entry(node.engine._wal.chain.seq_first))
        elif roll < 0.65:
            put(checkpoint_entry(state.checkpoint_seq))
            node.engine.wait_for_checkpoint(state.checkpoint_seq)
        elif roll < 0.95:
            found = sealed(node)
            missing = [each for each in found if each[1].last > node.engine.catalogue.hwm]
            if missing or rng.random() < 0.2:
                header, described = (missing or found)[0]
                entry = segment_shipped_entry(header.seq_before, header.hash_before, described)
                put(entry)
                if rng.random() < 0.2:
                    put(entry)
        elif node.engine.checkpoints():
            put(
                checkpoint_shipped_entry(
                    node.engine.catalogue.checkpoint_seq, describe_checkpoint(index_of(node))
                )
            )
    seq_first = node.engine._wal.chain.seq_first
    if seq_first:
        put(seal_entry(seq_first))
    put(fork_entry(Fork(CREATE.cluster_id, 2, 1, len(pairs), H[1], H[2])))
    put(Put("b", "last", b"v"))
    node.engine.close()
    return pairs


def run(node: Node, pairs: list[tuple[int, Any]], rng: random.Random) -> None:
    for seq, entry in pairs:
        node.engine.apply_log_entry(seq, entry)
        if seq % 9 == 0:
            node.engine.sync()
        node.step(rng.choice((0, 0, 1, 3)))
        if seq % 20 == 0:
            node.engine.flush()


def recorded(node: Node) -> list[list[Record]]:
    found = node.engine.catalogue
    return [list(found.segments), list(found.checkpoints), list(found.forks)]


@pytest.mark.long
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("mode", SURVIVALS)
def test_a_crash_at_any_operation_leaves_the_catalogue_as_the_log_has_it(mode: Any) -> None:
    """Redo records nothing twice, and forgets nothing; what follows is delivered again."""
    pairs = script()
    with small_limits():
        whole = Node(pool_bytes_max=10_000)
        whole.open()
        first = whole.files.operations
        run(whole, pairs, random.Random(1))
        last = whole.files.operations  # the root reads, too
        expected, body, root = recorded(whole), whole.engine.catalogue.body(), whole.engine.root()
        control = whole.engine._state.control_part()
        assert len(expected[0]) > 10
        assert len(expected[1]) >= 2
        segments = whole.segments()
        redone = 0
        for number in range(first + 1, last, 1 + (last - first) // 60):
            node = Node(pool_bytes_max=10_000)
            node.open()
            node.files.crash_at(number, after=bool(number % 2))
            with pytest.raises(SimulatedCrash):
                run(node, pairs, random.Random(1))
            node.crash(mode, number)
            node.files._crash_number = None
            redone += node.engine.redone
            durable = node.engine.marks().durable
            assert [seq for each in recorded(node) for seq in seqs(each)] == [
                seq for each in expected for seq in seqs(each) if seq <= durable
            ], f"after a crash at operation {number}"
            run(node, [pair for pair in pairs if pair[0] > max(0, durable - 3)], random.Random(2))
            assert recorded(node) == expected, f"after a crash at operation {number}"
            assert (node.engine.catalogue.body(), node.engine.root()) == (body, root)
            assert node.engine._state.control_part() == control
            assert list(node.engine.check()) == []
            assert node.segments() == segments
        assert redone > 100, "nothing was ever redone"


def seqs(records: list[Record]) -> list[int]:
    return [each.recorded_seq for each in records]


def test_the_stored_catalogue_is_checked(node: Node) -> None:
    """By `check`, and by who opens."""
    seq = with_segments(node, 2)
    feed(node.engine, [(seq + 1, shipped_entry(node, 0)), (seq + 2, shipped_entry(node, 1))])
    node.engine.flush()
    assert list(check_state(node.pages, "pages", lambda: seq + 2)) == []
    assert any("catalogue" in each.what for each in check_state(node.pages, "pages", lambda: seq + 1))
    stored = node.pages.read_meta()
    key = next(name for name in stored if name.startswith(b"catalogue:"))
    node.pages.write([], [], {key: stored[key][:-1] + b"\xff"})
    assert [each.severity for each in node.engine.check() if "catalogue" in each.what] == ["error"]
    node.engine._fail(RuntimeError("nothing more is written"))
    with pytest.raises(Corrupt, match="catalogue"):
        node.crash()
    node.pages.reopen()
    node.pages.write([], [], {key: stored[key]})
    node.open()
    assert node.engine.catalogue.recorded_seq == seq + 2


# ---------------------------------------------------------------------------- in a database


def ship_all(db: Any) -> list[int | None]:
    """What a shipper would propose, of all that is sealed."""
    db._log.sync()
    found = []
    for segment in db._wal.store.segments:
        while not db._wal.store.is_sealed(segment.seq_first):
            time.sleep(0.001)
        file = db._seams.files.open(segment.path)
        header = SegmentHeader.decode(file.read_at(0, HEADER_BYTES))
        described = describe_segment(header, read_trailer(file, file.size()))
        file.close()
        entry = segment_shipped_entry(header.seq_before, header.hash_before, described)
        found.append(db.propose_control(entry))
    return found


def test_a_database_orders_what_it_is_asked_for_and_keeps_it(tmp_path: Path) -> None:
    """It returns where the entry is once that is durable; None for one that would have no effect, which
    leaves no trace."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        seq = db.put("b", "k", b"v")
        db._log.seal()
        assert ship_all(db) == [seq + 2]
        assert ship_all(db) == [None]
        marks = db.marks()
        assert (marks.hwm, marks.lwm, marks.durable, marks.purged) == (seq + 1, seq + 1, seq + 2, 0)
        assert list(db.check()) == []
        with pytest.raises(InvalidEntry):
            db.propose_control(Control(Kind.SEGMENT_SHIPPED, {}))
    with lowwater.open(tmp_path / "data") as db:
        assert db.marks().hwm == seq + 1
        assert db.catalogue.hwm == seq + 1


def test_a_mark_counts_when_it_is_said_and_no_further_than_it_is_durable(tmp_path: Path) -> None:
    """Purging goes by it. Each life finds out by itself."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        assert db.mark_counts(10) == db.counted_hwm == 0
        db._log.seal()
        ship_all(db)
        hwm = db.marks().hwm
        assert db.counted_hwm == 0
        assert db.mark_counts(hwm + 5) == hwm
        assert db.mark_counts(0) == db.counted_hwm == hwm
        with pytest.raises(InputError):
            db.mark_counts(-1)
    with lowwater.open(tmp_path / "data") as db:
        assert db.counted_hwm == 0


def test_a_database_goes_on_in_another_epoch(tmp_path: Path) -> None:
    """The fork is the first frame of its segment, whatever was being written."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
        before = db.put("b", "k", b"v")
        fork = db.fork(3, parent_segment=H[1], parent_manifest=H[2])
        assert fork == before + 2
        assert db.fork(5, parent_segment=H[1], parent_manifest=H[2]) == fork + 2
        with pytest.raises(InvalidEntry):
            db.fork(5, parent_segment=H[1], parent_manifest=H[2])
        db.put("b", "k", b"w")
        entries = [(each.kind, decode_body(each)) for each in db.log(fork - 1) if each.kind != "put"]
        assert [kind for kind, _ in entries] == ["seal", "fork", "seal", "fork"]
        assert entries[1][1] == {
            "cluster_id": db._wal.chain.cluster_id,
            "epoch": 3,
            "parent_epoch": 1,
            "seq": fork - 1,
            "parent_segment": H[1],
            "parent_manifest": H[2],
        }
        assert [each.epoch for each in db.catalogue.forks] == [3, 5]
        assert list(db.check()) == []
    with lowwater.open(tmp_path / "data") as db:
        assert db.get("b", "k").value == b"w"
        assert [each.epoch for each in db.catalogue.forks] == [3, 5]
        db._log.seal()
        assert None not in ship_all(db)
        assert [each.epoch for each in db.catalogue.segments] == [1, 3, 5]
        assert list(db.check()) == []


def test_what_an_entry_says_is_what_is_recorded() -> None:
    described = segment(3, recorded_seq=0)
    entry = segment_shipped_entry(7, H[1], described)
    assert record_of(entry.kind, 9, entry.body or {}) == described._replace(recorded_seq=9)
    with pytest.raises(Corrupt):
        record_of(Kind.FORK, 9, {})


def test_a_head_without_records_is_empty() -> None:
    assert ListHead([], [], []).record_count == 0
    assert not Catalogue()
    assert Catalogue().body() == {
        name: {"chunks": [], "runs": [], "rest": []} for name in Catalogue().heads()
    }
