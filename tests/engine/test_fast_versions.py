"""The compiled merge keeps the versions that Python keeps, byte for byte, and leaves the unusual to it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.engine.compiled import blocks_left, needs_compiled
from tests.engine.test_fast import (
    Given,
    World,
    change_at_random,
    check_merged,
    given_small,
    merge_range,
    merge_step_by_step,
    record_of,
    sealed,
    with_page,
    without_compiled,
)

from lowwater.engine.database.core import EngineOptions
from lowwater.engine.database.opening import open_with
from lowwater.engine.flush import flush
from lowwater.engine.format import fast
from lowwater.engine.format import page as page_format
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.format.fast import MergedRange
from lowwater.engine.format.format import U32, U64, Extras, Kind
from lowwater.engine.format.page import TOMBSTONE, UNSTAMPED, DataPage, encode_page
from lowwater.engine.format.records import Record, seq_of
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.engine.state.ranges import Older, add_older

MIB = 2**20


class VersionedWorld(World):
    """Versions that somebody needs, down to a floor that may be anywhere."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        if rng.random() < 0.5:
            self.pool = self.pool[:: rng.choice((2, 10, 30))]

    def changes(self) -> tuple[dict[bytes, Record], Older]:
        """Several flushes' worth of records, as the state keeps them while somebody needs older ones."""
        rng = self.rng
        found: dict[bytes, Record] = {}
        older: Older = {}
        for _ in range(rng.choice((1, 1, 2, 6))):
            for key, record in self.records().items():
                before = found.get(key)
                if before is None or seq_of(before) < seq_of(record):
                    if before is not None and rng.random() < 0.9:
                        add_older(older, key, before)
                    found[key] = record
        return found, older

    def floor(self) -> int:
        """Above all, below all, in between, and at the seq of some row."""
        rng = self.rng
        seqs = [
            seq for data, key in zip(self.stored, self.page_keys, strict=True) for seq in seqs_of(data, key)
        ]
        near = max(0, rng.choice(seqs or [0]) + rng.choice((-1, 0, 0, 1)))
        return rng.choice((0, near, near, near, rng.randrange(self.seq + 1), self.seq, self.seq + 9))


def seqs_of(data: bytes, key: bytes) -> array[int]:
    return page_format.decode_page(data, key).seqs


def rows_of(data: bytes, key: bytes) -> list[tuple[bytes, int, int]]:
    page = page_format.decode_page(data, key)
    return [*zip(page.keys, page.seqs, page.flags, strict=True)]


@needs_compiled
@pytest.mark.parametrize("seed", range(80))
def test_versions_are_merged_as_page_after_page_is(seed: int) -> None:
    """Wherever the floor is."""
    world = VersionedWorld(random.Random(seed))
    for _ in range(10):
        records, older = world.changes()
        given = world.given(records, floor=world.floor())
        world.adopt(given, check_merged(given, older))


@pytest.mark.parametrize("seed", range(20))
def test_pages_do_not_depend_on_how_many_changes_python_merges_at_once(seed: int) -> None:
    """The worker merges more of them at once than a flush does, and compiled code all."""
    world = VersionedWorld(random.Random(seed))
    for _ in range(10):
        records, older = world.changes()
        given = world.given(records, floor=world.floor())
        made = merge_step_by_step(given, older, at_once=1000)
        for at_once in (1, 7):
            assert merge_step_by_step(given, older, at_once=at_once) == made
        world.adopt(given, made)


@needs_compiled
def test_what_is_merged_at_random_has_all_kinds_of_versions() -> None:
    """Or the test above says less than it seems to."""
    kinds = dict.fromkeys(
        ("versions", "needed deletions", "gone below", "swept", "lists", "single", "held", "references"), 0
    )
    for seed in range(30):
        world = VersionedWorld(random.Random(seed))
        for _ in range(10):
            records, older = world.changes()
            given = world.given(records, floor=world.floor())
            before = {row for data, key in zip(given[3], given[2], strict=True) for row in rows_of(data, key)}
            made = check_merged(given, older)
            after = {row for _, parts in made[2] for key, data in parts for row in rows_of(data, key)}
            kinds["versions"] += len(after) - len({key for key, _, _ in after})
            kinds["needed deletions"] += sum(flags & TOMBSTONE for _, _, flags in after)
            kinds["references"] += any(flags & page_format.REFERENCE for _, _, flags in after)
            kinds["lists"] += sum(isinstance(held, list) for held in older.values())
            kinds["single"] += sum(isinstance(held, bytes) for held in older.values())
            touched = {index for index, _ in made[2]}
            for index, (data, key) in enumerate(zip(given[3], given[2], strict=True)):
                gone = {row for row in rows_of(data, key) if row not in after} if index in touched else set()
                kinds["swept"] += any(row[0] not in records for row in gone)
                kinds["gone below"] += any(row[0] in records for row in gone)
                seq = page_format.decode_page(data, key).seq
                mine = [key for key in older if index in touched and key in {row[0] for row in before}]
                kinds["held"] += any(
                    seq_of(records[each]) > seq >= seqs[0] for each in mine if (seqs := seqs_in(older, each))
                )
            world.adopt(given, made)
    assert min(kinds.values()) > 20, kinds


def seqs_in(older: Older, key: bytes) -> list[int]:
    held = older[key]
    return [seq_of(record) for record in (held if isinstance(held, list) else [held])]


KEY = b"\1bmb"


def given_versions(
    page_versions: list[tuple[int, int]], *, page_seq: int = 50, floor: int = 0, rows_after: int = 1
) -> Given:
    """A page with versions of one key, as pairs of seq and flags, and one more key behind it."""
    _, low, page_keys, stored, rules = given_small()
    count = len(page_versions)
    page = DataPage(
        page_seq,
        [KEY] * count + [b"\1bmz"] * rows_after,
        array("Q", [*(seq for seq, _ in page_versions), *range(9, 9 - rows_after, -1)]),
        array("Q", range(count + rows_after)),
        bytearray([*(flags for _, flags in page_versions), *bytes(rows_after)]),
        [b""] * (count + rows_after),
        [b"" if flags else b"old" for _, flags in page_versions] + [b"z"] * rows_after,
    )
    changed = {b"\1bmc": record_of(150, b"\1bmc", b"new")}
    stored = [stored[0], encode_page(page, page_keys[1])]
    return changed, low, page_keys, stored, rules._replace(floor=floor)


def versions_made(given: Given, older: Older | None = None) -> list[tuple[int, int]]:
    """What is left of the key."""
    rows = [
        row for _, parts in check_merged(given, older)[2] for key, data in parts for row in rows_of(data, key)
    ]
    return [(seq, flags) for key, seq, flags in rows if key == KEY]


@needs_compiled
def test_of_each_key_what_is_older_than_its_newest_version_at_the_floor_goes() -> None:
    """Whether the rows are new or were there, and whether there is a change of the key."""
    held = [(40, 0), (30, TOMBSTONE), (20, 0)]
    for floor, left in ((0, 3), (20, 3), (29, 3), (30, 2), (39, 2), (40, 1), (100, 1)):
        given = given_versions(held, floor=floor)
        assert versions_made(given) == held[:left]
        given[0][KEY] = record_of(120, KEY, b"new")
        assert versions_made(given) == [(120, 0), *held[:left]]
        assert versions_made(given, {KEY: record_of(110, KEY)}) == [(120, 0), (110, 0), *held[:left]]
    for floor, left in ((109, 2), (110, 2), (119, 2), (120, 1), (121, 1)):
        given = given_versions(held, floor=floor)
        given[0][KEY] = record_of(120, KEY, b"new")
        older: Older = {KEY: [record_of(105, KEY), record_of(110, KEY, kind=Kind.DELETE)]}
        expected = [(120, 0), (110, TOMBSTONE)][:left] + ([(105, 0)] if floor < 110 else [])
        assert versions_made(given, older) == expected


@needs_compiled
def test_a_deletion_stays_while_it_is_above_the_floor() -> None:
    """Somebody reads what it hides; below the floor it hides nothing."""
    given = given_versions([(40, 0)], floor=119)
    given[0][KEY] = record_of(120, KEY, kind=Kind.DELETE)
    assert versions_made(given) == [(120, TOMBSTONE), (40, 0)]
    assert versions_made((*given[:4], given[4]._replace(floor=120))) == []
    held = [(40, TOMBSTONE), (30, 0)]
    assert versions_made(given_versions(held, floor=39)) == held
    assert versions_made(given_versions(held, floor=40)) == []
    given = given_versions(held, floor=40)
    given[0][KEY] = record_of(120, KEY, b"new")
    assert versions_made(given) == [(120, 0)]


@needs_compiled
def test_of_several_records_of_one_seq_the_last_survives() -> None:
    """A group wrote them. What the page has of that seq goes too."""
    given = given_versions([(40, 0)], floor=10)
    given[0][KEY] = record_of(120, KEY, b"last")
    older: Older = {KEY: [record_of(110, KEY), record_of(120, KEY, kind=Kind.DELETE)]}
    assert versions_made(given, older) == [(120, 0), (110, 0), (40, 0)]
    given = given_versions([(60, 0), (45, 0)], page_seq=50, floor=10)
    given[0][KEY] = record_of(60, KEY, kind=Kind.DELETE)
    assert versions_made(given) == [(60, TOMBSTONE), (45, 0)]


@needs_compiled
def test_what_the_page_holds_is_not_taken_again() -> None:
    """Redo brings it, and the page may have dropped some of it since."""
    given = given_versions([(50, 0)], floor=10)
    older: Older = {KEY: [record_of(seq, KEY, kind=Kind.DELETE) for seq in (20, 30, 50)]}
    given[0][KEY] = record_of(51, KEY)
    assert versions_made(given, older) == [(51, 0), (50, 0)]
    given[0][KEY] = record_of(50, KEY)
    older = {KEY: [record_of(seq, KEY, kind=Kind.DELETE) for seq in (20, 30, 40)]}
    assert versions_made(given, older) == [(50, 0)]


@needs_compiled
def test_rows_that_are_newer_than_what_their_page_claims_come_again() -> None:
    """A page that was made from a checkpoint may have such."""
    for floor in (0, 60, 69, 70, 75, 80, 90, 200):
        given = given_versions([(80, 0), (70, TOMBSTONE), (60, 0)], page_seq=50, floor=floor)
        given[0][KEY] = record_of(80, KEY)
        versions_made(given, {KEY: record_of(70, KEY, kind=Kind.DELETE)})
        given[0][KEY] = record_of(70, KEY)
        versions_made(given)
        versions_made(given, {KEY: record_of(65, KEY)})


@needs_compiled
def test_a_key_with_versions_begins_a_page_once() -> None:
    """With all of them, and with the keys that share its first bytes."""
    rng = random.Random(1)
    long = b"\1b" + b"x" * 498
    keys = [b"\1b" + rng.randbytes(9) for _ in range(50)] + [long + b"%03d" % number for number in range(20)]
    records, older = {}, {}
    for number, key in enumerate(keys):
        records[key] = record_of(900 + number, key, kind=rng.choice((Kind.PUT, Kind.DELETE)))
        older[key] = [record_of(seq, key) for seq in range(1, rng.randrange(2, 5))]
    for page_keys in (1, 2, 8):
        for floor in (0, 2, 930):
            rules = flush.Rules(999, floor, 64, Boundaries(b"salt", page_keys))
            check_merged((records, b"", [], [], rules), older)


# ---------------------------------------------------------------------------- what is left to Python


@needs_compiled
def test_older_records_that_are_unusual_are_left_to_python() -> None:
    """As newer ones are; and such as do not belong to what was given, or are in another order."""
    given = given_versions([(40, 0)])
    given[0][KEY] = record_of(120, KEY)
    usual = record_of(110, KEY)
    check_merged(given, {KEY: usual})
    odd: list[Any] = [
        None, "text", bytearray(usual), (usual,), [None], [usual, None], [[usual]], usual[:-1], b"",
        record_of(110, KEY, extras=Extras(txn=9)), record_of(110, KEY, extras=Extras(refused=3)),
        record_of(121, KEY), record_of(201, KEY), [record_of(110, KEY), record_of(109, KEY)],
        record_of(110, b"\1bmbx"),
    ]  # fmt: skip
    for each in odd:
        older = {KEY: each}
        before = {key: held[:] if isinstance(held, list) else held for key, held in older.items()}
        assert merge_range(given, older) is None
        assert older == before
    for key in (b"\1ba", b"\1bz", b"\1bmbb"):
        assert merge_range(given, {key: record_of(110, key)}) is None
    assert merge_range(given, {"key": usual}) is None  # type: ignore[dict-item]
    check_merged(given, {KEY: []})


@needs_compiled
def test_a_page_whose_versions_are_damaged_is_left_to_python() -> None:
    """However right its checksum is."""
    given = given_versions([(40, 0), (30, TOMBSTONE), (20, 0)], rows_after=2)
    page, key = given[3][1], given[2][1]
    check_merged(given)
    row_ends = 48 + 16 * 5 + 4 * 2
    assert [U32.unpack_from(page, row_ends + at)[0] for at in (0, 4)] == [3, 5]
    for at, numbers in (
        (24, (0, 1, 3, 4, 5, 6, 2**31, 2**32 - 1)),
        (28, (0, 1, 2, 3, 4, 6, 2**31, 2**32 - 1)),
        (row_ends, (0, 5, 6, 2**31, 2**32 - 1)),
        (row_ends + 4, (0, 2, 3, 4, 6, 2**31, 2**32 - 1)),
    ):
        for number in numbers:
            changed = sealed(page[:at] + U32.pack(number) + page[at + 4 :], key)
            assert merge_range(with_page(given, changed)) is None, (at, number)
    for row, seqs in (
        (0, (0, 30, 29)),
        (1, (40, 41, 20, 19)),
        (2, (30, 31, 2**64 - 1)),
        (3, (8, 7)),
        (4, (9, 10)),
    ):
        at = 48 + 8 * row
        for seq in seqs:
            changed = sealed(page[:at] + U64.pack(seq) + page[at + 8 :], key)
            assert merge_range(with_page(given, changed)) is None, (row, seq)
    # A row that is left out, and has no bytes that would be missed.
    short = given_versions([(40, 0), (30, TOMBSTONE), (20, TOMBSTONE)], rows_after=0)[3][1]
    at = 48 + 16 * 3 + 4
    assert U32.unpack_from(short, at) == (3,)
    assert merge_range(with_page(given, sealed(short[:at] + U32.pack(2) + short[at + 4 :], key))) is None
    flags = row_ends + 8 + 4 * 5
    for row in range(5):
        for flag in (UNSTAMPED, UNSTAMPED | TOMBSTONE, 16, 128):
            changed = sealed(page[: flags + row] + bytes((flag,)) + page[flags + row + 1 :], key)
            assert merge_range(with_page(given, changed)) is None
    for at, _ in pairwise(range(len(page))):
        assert merge_range(with_page(given, page[:at])) is None
        flipped = page[:at] + bytes((page[at] ^ 1,)) + page[at + 1 :]
        assert merge_range(with_page(given, flipped)) is None


@needs_compiled
def test_any_bytes_in_a_page_are_refused_or_merged_within_it() -> None:
    """Nothing is read or written beyond it: sanitizers see that, and a page that is made is a page."""
    rng = random.Random(9)
    given = given_versions([(40, 0), (30, TOMBSTONE), (20, 0)], rows_after=2, floor=30)
    given[0][KEY] = record_of(120, KEY)
    page, key = given[3][1], given[2][1]
    merged = 0
    for _ in range(5000):
        changed = bytearray(page)
        for _ in range(rng.choice((1, 1, 2, 5))):
            changed[rng.randrange(16, len(page))] = rng.choice((0, 1, 2, 3, 4, 5, 8, 255, rng.randrange(256)))
        found = merge_range(with_page(given, sealed(bytes(changed), key)), {KEY: record_of(110, KEY)})
        if found is not None:
            merged += 1
            for _, parts in found[2]:
                for page_key, data in parts:
                    assert sealed(data, page_key) == data
    assert merged > 100


# ---------------------------------------------------------------------------- memory


@needs_compiled
def test_versions_leave_nothing_in_memory() -> None:
    """Whether they are merged or left to Python."""
    given = given_versions([(40, 0), (30, TOMBSTONE), (20, 0)], floor=35)
    given[0][KEY] = record_of(120, KEY, b"v" * 600)
    older: Older = {
        KEY: [record_of(seq, KEY, b"v" * 600) for seq in (100, 110)],
        b"\1bmc": record_of(60, b"\1bmc"),
    }
    wrong: Any = {KEY: [record_of(110, KEY), None]}
    calls: list[Callable[[], object]] = [
        lambda: merge_range(given, older),
        lambda: merge_range(given, wrong),
        lambda: merge_range(with_page(given, b"damaged"), older),
    ]
    assert [call() is None for call in calls] == [False, True, True]
    for call in calls:
        assert blocks_left(call) < 50


# ---------------------------------------------------------------------------- all of it


@pytest.mark.long
@needs_compiled
@pytest.mark.parametrize("needs", ["snapshots", "a horizon", "scans"])
def test_an_engine_that_keeps_versions_has_the_same_pages_without_compiled_code(
    needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What anybody may still read is in them, and memory counts what left it, to the byte."""
    monkeypatch.setattr("lowwater.engine.seams.real.RealClock.now_us", lambda _: 1_700_000_000_000_000)
    monkeypatch.setattr("lowwater.engine.seams.real.RealRandomness.token", lambda _, size: b"t" * size)
    found = []
    merged: list[tuple[bool, MergedRange | None]] = []

    def noted(*given: Any) -> MergedRange | None:
        merged.append((bool(given[1]), fast.merge_range(*given)))
        return merged[-1][1]

    for name in ("compiled", "pure"):
        with monkeypatch.context() as patch:
            patch.setattr(flush, "merge_range", noted)
            if name == "pure":
                without_compiled(patch)
            options = EngineOptions(pool_bytes_max=64 * MIB, checkpoint_interval_s=None)
            with open_with(str(tmp_path / name), options=options) as db:
                rng = random.Random(7)
                db.create_bucket("b")
                db.put_many("b", [(f"{number:05}", b"") for number in range(0, 3000, 7)])
                db.flush()
                scans: list[Any] = []
                seen: list[object] = []
                for turn in range(5):
                    if needs == "snapshots":
                        db.snapshot(f"{turn}")
                        if turn > 2:
                            db.drop_snapshot(f"{turn - 2}")
                    elif needs == "a horizon":
                        db.move_horizon(db.marks().applied - (500 if turn else 0))
                    else:
                        scans.append(db.scan("b"))
                        next(scans[-1])
                        if turn > 2:
                            seen.append([*scans.pop(0)])
                    change_at_random(db, rng)
                    if needs == "snapshots":
                        db.snapshot(f"{turn} later")
                    change_at_random(db, rng)
                    db.flush()
                    assert db._state.dirty_bytes == 0
                seen += [[*scan] for scan in scans]
                for each, _ in db.snapshots().values():
                    seen.append([*db.scan("b", at=each)])
                root = db.root()
                assert list(db.check()) == []
        store = LmdbPages.open(str(tmp_path / name / "pages"), read_only=True)
        rows = [row for row in store.rows() if row[0] == b"pages"]
        store.close()
        found.append((root, seen, rows))
    assert sum(has_older and made is not None for has_older, made in merged) > 3
    assert found[0] == found[1]
    assert len(found[0][2]) > 20


@needs_compiled
def test_what_compiled_code_leaves_is_merged_here_and_counted_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush, "merge_range", fast._nothing)
    with open_with(str(tmp_path), options=EngineOptions(checkpoint_interval_s=None)) as db:
        db.create_bucket("b")
        for _ in range(3):
            db.snapshot(f"{db.marks().applied}")
            db.put_many("b", [(f"{number:05}", b"v" * 20) for number in range(3000)])
        db.flush()
        assert db._state.dirty_bytes == 0
        assert list(db.check()) == []
