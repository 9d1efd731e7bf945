"""LMDB's file is looked at before LMDB follows it: what is sound passes, and what is not does not."""

from __future__ import annotations

import os
import random
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowwater
from lowwater.engine.format import fast
from lowwater.engine.pages import lmdb_file, lmdb_store
from lowwater.engine.pages.lmdb_file import (
    PAGE_HEAD,
    Damage,
    FoundPages,
    check_file,
    check_values,
    read_roots,
    sum_of,
)
from lowwater.engine.pages.lmdb_store import FORMAT, FORMAT_BEFORE, FORMAT_KEY, LmdbPages
from lowwater.engine.seams.real import RealFile, RealFiles
from lowwater.errors import Corrupt, PagesDamaged

GOLDEN = Path(__file__).parent.parent / "golden_pages"
OLD_ROOT = "a6cdaac204a6cd061bd36cbbd623f90a400a47ef2c836ff3ef75e2d0800427ed"

Writes = Iterator[tuple[list[tuple[bytes, bytes]], list[bytes], dict[bytes, bytes | None]]]
both = pytest.mark.parametrize("is_compiled", [True, False])


@pytest.fixture
def compiled(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> bool:
    if is_compiled and not fast.IS_COMPILED:
        pytest.skip("nothing is compiled here")
    if not is_compiled:
        monkeypatch.setattr(fast, "check_tree", lambda *_: None)
    return is_compiled


def writes(seed: int, count: int) -> Writes:
    """Such that trees grow levels, shrink, and lose pages again."""
    rng = random.Random(seed)
    names = [b"%s%04d" % (b"k" * rng.choice((2, 90, 480)), number) for number in range(3000)]
    for number in range(count):
        chosen = sorted(rng.sample(names, rng.choice((1, 20, 300))))
        puts = [(key, rng.randbytes(rng.choice((0, 100, 1900, 2030, 2040, 4080, 9000)))) for key in chosen]
        deletes = rng.sample(names, rng.choice((0, 5, 800)))
        meta: dict[bytes, bytes | None] = {
            b"m%d" % rng.randrange(60): rng.choice((None, b"", rng.randbytes(3000)))
        }
        yield puts, deletes, meta if number % 3 else {}


def looked_at(path: str, *, headers: bool = True) -> FoundPages:
    file = RealFiles().open(f"{path}/data.mdb")
    try:
        return check_file(file, read_roots(file), headers=headers)
    finally:
        file.close()


@both
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("compiled")
def test_whatever_lmdb_writes_passes(tmp_path: Path, seed: int) -> None:
    """What is sound and refused would be a database that does not open."""
    path = str(tmp_path / "pages")
    pages = LmdbPages.open(path)
    for number, write in enumerate(writes(seed, 60)):
        pages.write(*write)
        assert pages.damage() == []
        if number % 10 == 9:
            keys = list(pages.page_keys())
            assert looked_at(path).key_sums[b"pages"] == sum_of(keys)
            pages.close()
            pages = LmdbPages.open(path)
    pages.close()


@both
@pytest.mark.usefixtures("compiled")
def test_of_wanted_keys_it_is_known_which_are_there(tmp_path: Path) -> None:
    """The sums of what was written rest on it."""
    path = str(tmp_path / "pages")
    pages = LmdbPages.open(path)
    for write in writes(1, 20):
        pages.write(*write)
    keys = list(pages.page_keys())
    rng = random.Random(1)
    wanted = [*rng.sample(keys, 220), b"", b"a", keys[0] + b"\0", keys[-1] + b"\0"]
    file = RealFiles().open(f"{path}/data.mdb")
    found = check_values(file, read_roots(file).txn, {b"pages": wanted, b"meta": [b"none"]})
    assert found[b"pages"] == {key: key in keys for key in wanted}
    assert found[b"meta"] == {b"none": False}
    file.close()
    pages.close()


def flipped(data: bytes, bit: int) -> bytes:
    place = bit // 8
    return data[:place] + bytes([data[place] ^ 1 << bit % 8]) + data[place + 1 :]


def verdict(path: str) -> object:
    try:
        found = looked_at(path)
    except Damage:
        return "damaged"
    return found.roots, found.trees, found.values, found.key_sums


@pytest.mark.skipif(not fast.IS_COMPILED, reason="nothing is compiled here")
@pytest.mark.slow
def test_compiled_or_not_the_same_files_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that passes here and not there would be a database that opens on one machine only."""
    path = str(tmp_path / "pages")
    pages = LmdbPages.open(path)
    for write in writes(2, 12):
        pages.write(*write)
    pages.close()
    data = Path(path, "data.mdb").read_bytes()
    trees = [
        page
        for page in range(2, len(data) // 4096)
        if PAGE_HEAD.unpack_from(data, page * 4096)[0] == page
        and PAGE_HEAD.unpack_from(data, page * 4096)[2] in (1, 2)
    ]
    rng = random.Random(3)
    verdicts = set()
    for number in range(600):
        start = rng.choice((0, 1, *[rng.choice(trees) for _ in range(20)])) * 4096
        # Most of what goes wrong is at the beginning: the header, and where the entries lie.
        bit = (start + rng.randrange(64 if number % 2 else 4096)) * 8 + rng.randrange(8)
        Path(path, "data.mdb").write_bytes(flipped(data, bit))
        compiled = verdict(path)
        with monkeypatch.context() as patch:
            patch.setattr(fast, "check_tree", lambda *_: None)
            assert verdict(path) == compiled, f"bit {bit}"
        verdicts.add(compiled == "damaged")
    assert verdicts == {True, False}


def test_compiled_code_is_given_anything(tmp_path: Path) -> None:
    """It says no, or that it is used wrongly, and never more."""
    if not fast.IS_COMPILED:
        pytest.skip("nothing is compiled here")
    data = tmp_path / "data"
    data.write_bytes(random.Random(1).randbytes(3 * 4096))
    with open(data, "rb") as file:
        for arguments in (
            (file.fileno(), 4096, 3, None, 2, 1, None, False),
            (file.fileno(), 4096, 3, bytearray(1), 2, 1, None, False),
            (file.fileno(), 4096, 2**64 - 1, None, 2**63, 1, None, False),
            (file.fileno(), 4096, 3, None, 2, 0, None, False),
            (file.fileno(), 4096, 3, None, 2, 33, None, False),
            (file.fileno(), 0, 3, None, 2, 1, None, False),
            (file.fileno(), 2**40, 3, None, 2, 1, [b"a"], True),
            (-1, 4096, 3, None, 2, 1, [], True),
        ):
            assert fast.check_tree(*arguments) is None
        with pytest.raises(TypeError):
            fast.check_tree(file.fileno(), 4096, 3, None, 2, 1, ["a"], False)
        with pytest.raises(TypeError):
            fast.check_tree()
        with pytest.raises(OverflowError):
            fast.check_tree(file.fileno(), 4096, -1, None, 2, 1, None, False)


@pytest.mark.parametrize("place", [89, 90, 92])
@pytest.mark.parametrize("page", [0, 1])
def test_what_lmdb_itself_refuses_is_damage_too(tmp_path: Path, page: int, place: int) -> None:
    """The kind of a tree, in either of its roots: of it a person would be told to check the path."""
    path = str(tmp_path / "pages")
    pages = LmdbPages.open(path)
    for write in writes(1, 3):
        pages.write(*write)
    pages.close()
    data = Path(path, "data.mdb").read_bytes()
    Path(path, "data.mdb").write_bytes(flipped(data, (page * 4096 + place) * 8 + 4))
    with pytest.raises(PagesDamaged) as caught:
        LmdbPages.open(path)
    assert "rebuild-pages" in caught.value.hint


# ---------------------------------------------------------------------------- what LMDB believes to write


def value_pages(path: str) -> list[int]:
    """Where large values begin."""
    data = Path(path, "data.mdb").read_bytes()
    return [
        page
        for page in range(2, len(data) // 4096)
        if PAGE_HEAD.unpack_from(data, page * 4096)[::2][:2] == (page, 4)
    ]


@both
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("field", [0, 10, 12])
@pytest.mark.parametrize("deletes", [True, False])
def test_a_value_whose_pages_are_not_what_they_were_is_neither_replaced_nor_deleted(
    tmp_path: Path, field: int, deletes: bool
) -> None:
    """LMDB frees what their header says: pages of others would be written over."""
    path = str(tmp_path / "pages")
    pages = LmdbPages.open(path)
    pages.write([(b"%d" % number, bytes([number]) * 9000) for number in range(9)], [], {b"m": b"1"})
    (page,) = [each for each in value_pages(path) if pages_begin_with(path, each, b"\4")]
    pages.close()
    with open(f"{path}/data.mdb", "r+b") as file:
        file.seek(page * 4096 + field)
        (before,) = file.read(1)
        file.seek(page * 4096 + field)
        file.write(bytes([before ^ 16]))
    pages = LmdbPages.open(path)
    assert pages.damage() != []
    with pytest.raises(PagesDamaged) as caught:
        pages.write([] if deletes else [(b"4", b"new")], [b"4"] if deletes else [], {b"m": b"2"})
    assert "rebuild-pages" in caught.value.hint
    pages.write([(b"5", b"others can be written")], [], {})
    assert pages.read_meta() == {b"m": b"1"}
    try:
        assert pages.get(b"4") == b"\4" * 9000
    except PagesDamaged:
        assert field == 10  # LMDB looks at the kind itself
    pages.close()


def pages_begin_with(path: str, page: int, data: bytes) -> bool:
    return Path(path, "data.mdb").read_bytes()[page * 4096 + 16 :].startswith(data)


# ---------------------------------------------------------------------------- an open database


def leaf_keys(path: str) -> list[int]:
    """Where the last byte of keys in used leaves of pages lies."""
    found = []

    class Walk(lmdb_file._Walk):
        def _leaf(self, page: int, *rest: object) -> None:
            data = rest[0]
            assert isinstance(data, bytes)
            for at, key in self._nodes(page, data, lmdb_file.LEAF):
                found.append(page * 4096 + at + 8 + len(key) - 1)

    file = RealFiles().open(f"{path}/data.mdb")
    roots = read_roots(file)
    tree = check_file(file, roots).trees[b"pages"]
    Walk(file, 4096, 2**40, None).walk(tree)
    file.close()
    return found


def test_check_on_an_open_database_looks_at_the_file_under_it(tmp_path: Path) -> None:
    """Else it would believe LMDB, and give no error though keys are lost."""
    path = str(tmp_path / "data")
    with lowwater.open(path) as db:
        db.create_bucket("b")
        for number in range(3000):
            db.put("b", f"{number:05}", bytes(300))
        db.flush()
        assert list(db.check()) == []
        rng = random.Random(4)
        for place in rng.sample(leaf_keys(f"{path}/pages"), 12):
            with open(f"{path}/pages/data.mdb", "r+b") as file:
                file.seek(place)
                (byte,) = file.read(1)
                file.seek(place)
                file.write(bytes([byte ^ 1]))
                file.flush()
                assert any(each.severity == "error" for each in db.check()), place
                file.seek(place)
                file.write(bytes([byte]))
        assert list(db.check()) == []


def test_who_looks_at_the_file_is_not_confused_by_who_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two transactions later, other roots stand in the place of those that are looked for."""
    pages = LmdbPages.open(str(tmp_path / "pages"))
    times = iter(range(3))

    def overtaken(file: RealFile, txn: int | None = None) -> lmdb_file.Roots:
        if next(times, None) is not None:
            pages.write([(b"a", bytes(9000))], [], {})
            pages.write([], [b"a"], {b"m": b"1"})
        return lmdb_file.read_roots(file, txn)

    monkeypatch.setattr(lmdb_store, "read_roots", overtaken)
    assert pages.damage() == []
    assert next(times, None) is None
    pages.close()


# ---------------------------------------------------------------------------- the format before


@pytest.fixture
def old(tmp_path: Path) -> str:
    with tarfile.open(GOLDEN / "format-1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return str(tmp_path / "data")


def format_of(path: str) -> bytes:
    return looked_at(f"{path}/pages").values[FORMAT_KEY]


@pytest.mark.parametrize("is_purged", [False, True])
def test_a_directory_without_sums_opens_and_gets_them(old: str, is_purged: bool) -> None:
    """Directories of today open without hands, and are as safe as others afterwards."""
    if is_purged:
        (first,) = [name for name in os.listdir(f"{old}/wal") if name.startswith("segment-")]
        os.unlink(f"{old}/wal/{first}")
    assert format_of(old) == FORMAT_BEFORE
    with lowwater.open(old) as db:
        assert db.root() == OLD_ROOT
        assert db.get("b", "0299").value == b"299" * 20
        assert db.get("b", "0301").value == b"301" * 40
        assert [each for each in db.check() if each.severity == "error"] == []
        db.put("b", "new", b"1")
        db.flush()
    assert format_of(old) == FORMAT
    with lowwater.open(old) as db:
        assert db.get("b", "new").value == b"1"


def test_a_key_that_is_not_what_it_was_is_found_without_sums_too(old: str) -> None:
    """A page begins where the salt says that one may."""
    (first,) = [name for name in os.listdir(f"{old}/wal") if name.startswith("segment-")]
    os.unlink(f"{old}/wal/{first}")
    place = leaf_keys(f"{old}/pages")[-1]
    data = Path(old, "pages", "data.mdb")
    whole = data.read_bytes()
    data.write_bytes(flipped(whole, place * 8))
    shutil.rmtree(f"{old}/cache", ignore_errors=True)
    with pytest.raises(Corrupt) as caught:
        lowwater.open(old)
    assert "rebuild-pages" in caught.value.hint
