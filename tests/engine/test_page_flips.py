"""One flipped bit in the file with all pages, wherever it is: right answers, or typed errors.

Always true of what is tested here: the file is closed when it is damaged, and each bit is the only one. Every
answer is compared with a model, before and after further writes, in a process of its own: what ends that, or
hangs it, is a failure like a wrong answer.

`PAGE_FLIPS=1000` flips as many as have to hold once.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.asked import Asked, in_a_child, prefixes_of, value_or_none

import lowwater
from lowwater.engine.log.chain import create_entry
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.pages.lmdb_file import (
    BRANCH,
    LEAF,
    META_PAGES,
    NODE,
    PAGE_HEAD,
)
from lowwater.engine.seams.real import RealFiles
from lowwater.errors import LowwaterError

FLIPS = int(os.environ.get("PAGE_FLIPS", "60"))
SEED = 20_261_119
KEYS = 2400
BUCKET = "b"

Model = dict[str, bytes]


def key_of(number: int) -> str:
    # Long, so that the tree has levels, and with folders, so that a list has something to join.
    return f"{number % 7}/{'long' * 25}/{number:06}"


def make(path: str) -> tuple[Model, str]:
    """A closed database whose log no longer has its beginning, what it holds, and its root."""
    rng = random.Random(SEED)
    seams = Seams(files=RealFiles(), owner="test")
    settings = {"page_keys": 4, "inline_bytes_max": 65536, "segment_bytes": 65536, "block_bytes": 4096}
    entry = create_entry(rng.randbytes(16), rng.randbytes(16), settings)
    Log.open(f"{path}/wal", options=LogOptions(), seams=seams, create=entry).close()
    model: Model = {}
    with lowwater.open(path) as db:
        db.create_bucket(BUCKET)
        for number in rng.sample(range(KEYS), KEYS):
            key, value = key_of(number), rng.randbytes(rng.choice((20, 300, 1500)))
            db.put(BUCKET, key, value)
            model[key] = value
            if number % 500 == 0:
                db.flush()
        for key in rng.sample(sorted(model), KEYS // 6):
            db.delete(BUCKET, key)
            del model[key]
        db.snapshot("before")
        for key in rng.sample(sorted(model), KEYS // 6):
            model[key] = rng.randbytes(40)
            db.put(BUCKET, key, model[key])
        root = db.root()
    return model, root


def forget_beginning(path: str) -> None:
    """As a purge does."""
    sealed = sorted(name for name in os.listdir(f"{path}/wal") if name.startswith("segment-"))
    for name in sealed[:3]:
        os.unlink(f"{path}/wal/{name}")


# ---------------------------------------------------------------------------- where bits are flipped


def parts_of(data: bytes, page: int) -> Iterator[range]:
    """The bytes of a page of a tree that mean something."""
    _, _, _, lower, upper = PAGE_HEAD.unpack_from(data, page * 4096)
    yield range(page * 4096, page * 4096 + lower)
    yield range(page * 4096 + upper, page * 4096 + 4096)


def used_pages(path: str) -> dict[int, list[int]]:
    """The pages of all trees that are in use, by their kind, found without what is tested here."""
    data = Path(path).read_bytes()
    metas = [struct.unpack_from("<48s48sQQ", data, page * 4096 + 40) for page in range(META_PAGES)]
    free, main, _, _ = max(metas, key=lambda meta: meta[3])
    found: dict[int, list[int]] = {BRANCH: [], LEAF: []}

    def walk(page: int) -> None:
        if page == 2**64 - 1:
            return
        _, _, kind, lower, _ = PAGE_HEAD.unpack_from(data, page * 4096)
        found[kind].append(page)
        for place in struct.unpack_from(f"<{(lower - 16) // 2}H", data, page * 4096 + 16):
            at = page * 4096 + place
            first, second, flags, key_bytes = NODE.unpack_from(data, at)
            if kind == BRANCH:
                walk(first | second << 16 | flags << 32)
            elif flags == 2:
                walk(struct.unpack_from("<Q", data, at + 8 + key_bytes + 40)[0])

    walk(struct.unpack_from("<Q", free, 40)[0])
    walk(struct.unpack_from("<Q", main, 40)[0])
    return found


def places(path: str, count: int) -> list[tuple[str, int]]:
    """Half in used leaves, a quarter in inner and meta pages, the rest anywhere: (where, which bit)."""
    rng = random.Random(SEED)
    data = Path(path).read_bytes()
    pages = used_pages(path)
    assert len(pages[LEAF]) > 100
    assert len(pages[BRANCH]) > 3
    leaves = [part for page in pages[LEAF] for part in parts_of(data, page)]
    inner = [part for page in pages[BRANCH] for part in parts_of(data, page)]
    metas = [range(page * 4096, page * 4096 + 152) for page in range(META_PAGES)]

    def in_one_of(parts: list[range]) -> int:
        (part,) = rng.choices(parts, [len(part) for part in parts])
        return rng.choice(part)

    found = []
    for number in range(count):
        if number % 4 < 2:
            where, byte = "leaf", in_one_of(leaves)
        elif number % 4 == 2:
            where, byte = ("inner", in_one_of(inner)) if number % 8 == 2 else ("meta", in_one_of(metas))
        else:
            where, byte = "anywhere", rng.randrange(len(data))
        found.append((where, byte * 8 + rng.randrange(8)))
    return found


def flip(path: str, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


# ---------------------------------------------------------------------------- what is asked


def ask_all(path: str, model: Model, root: str | None, asked: Asked) -> None:
    """Open, ask for everything, and close."""
    try:
        db = lowwater.open(path, create=False)
    except LowwaterError as error:
        asked.detected.append(f"open: {type(error).__name__}: {error}")
        if "rebuild-pages" not in error.hint and not isinstance(error, lowwater.errors.NewerVersion):
            asked.wrong.append(f"open: the hint does not help: {error.hint}")
        return
    try:
        for number in range(KEYS):
            key = key_of(number)
            asked.ask("get", lambda key=key: value_or_none(db, BUCKET, key), model.get(key))  # type: ignore[misc]
        rows = [(key, model[key]) for key in sorted(model)]
        asked.ask("scan", lambda: [(each.key, each.value) for each in db.scan(BUCKET)], rows)
        part = [(key, value) for key, value in rows if key.startswith("3/")]
        asked.ask("scan of a part", lambda: [(e.key, e.value) for e in db.scan(BUCKET, "3/")], part)
        asked.ask("list", lambda: prefixes_of(db, BUCKET), sorted({key[:2] for key in model}))
        if root is not None:
            asked.ask("root", db.root, root)
        for finding in db.check():
            asked.detected.append(f"check: {finding.what}")
    finally:
        try:
            db.close()
        except LowwaterError as error:
            asked.detected.append(f"close: {type(error).__name__}: {error}")


def write_more(path: str, model: Model, asked: Asked) -> Model:
    """What LMDB believes when it replaces and deletes is more than what it believes when it reads."""
    rng = random.Random(SEED)
    model = dict(model)
    try:
        with lowwater.open(path, create=False) as db:
            for key in rng.sample(sorted(model), len(model) // 3):
                value = rng.randbytes(rng.choice((10, 900)))
                db.put(BUCKET, key, value)
                model[key] = value
            for key in rng.sample(sorted(model), len(model) // 5):
                db.delete(BUCKET, key)
                del model[key]
            db.flush()
    except LowwaterError as error:
        asked.detected.append(f"write: {type(error).__name__}: {error}")
    return model


def child(path: str, model: Model, root: str) -> dict[str, Any]:
    asked = Asked()
    ask_all(path, model, root, asked)
    if not any(each.startswith("open") for each in asked.detected):
        # Without an acknowledged write that is lost, whatever was refused on the way.
        before = len(asked.detected)
        model = write_more(path, model, asked)
        if not any(each.startswith("write") for each in asked.detected[before:]):
            ask_all(path, model, None, asked)
    return asked.told()


# ---------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Model, str]:
    path = str(tmp_path_factory.mktemp("flips") / "data")
    os.mkdir(path)
    model, root = make(path)
    return path, model, root


@pytest.mark.long
@pytest.mark.timeout(12 * 3600)
@pytest.mark.parametrize("is_purged", [True, False])
def test_a_flipped_bit_in_a_closed_file_gives_right_answers_or_typed_errors(
    made: tuple[str, Model, str], tmp_path: Path, is_purged: bool
) -> None:
    """LMDB believes its file. Where the log is whole, pages are made again from it, and nobody notices."""
    source, model, root = made
    damaged = str(tmp_path / "damaged")
    missed = []
    counts: Counter[tuple[str, str]] = Counter()
    for where, bit in places(f"{source}/pages/data.mdb", FLIPS if is_purged else FLIPS // 4):
        shutil.copytree(source, damaged)
        if is_purged:
            forget_beginning(damaged)
        flip(f"{damaged}/pages/data.mdb", bit)
        found = in_a_child(partial(child, damaged, model, root))
        made_again = any(name.startswith("pages.damaged") for name in os.listdir(damaged))
        if found["wrong"]:
            missed.append(f"bit {bit} ({where}): {found}")
            counts[where, "wrong"] += 1
        elif made_again:
            counts[where, "made again"] += 1
        else:
            counts[where, "detected" if found["detected"] else "unused"] += 1
        shutil.rmtree(damaged)
    print(f"{'purged' if is_purged else 'whole'}: {sorted(counts.items())}")
    if path := os.environ.get("PAGE_FLIPS_REPORT"):
        with open(path, "a") as file:
            file.write(f"{is_purged} {sorted(counts.items())}\n" + "".join(f"  {each}\n" for each in missed))
    assert missed == []
