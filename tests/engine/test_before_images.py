"""Before-images: what a change says of what was there, where it is decided, and when a log is asked for it.

What `check_images` compares, it takes from the entries alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from tests.engine.engine_model import Archive, ArchiveDown
from tests.engine.images import check_images
from tests.engine.test_away import leave
from tests.engine.test_engine import WITH_IMAGES, Node

import lowwater
from lowwater import Copy, CreateBucket, Delete, Outcome, Put, Refusal, Write
from lowwater.engine.database import transactions
from lowwater.engine.database.core import EngineOptions
from lowwater.engine.database.database import Database
from lowwater.engine.database.opening import open_with
from lowwater.engine.format import format
from lowwater.engine.format.before_images import BeforeImage, bytes_without_image, decode_image, with_image
from lowwater.engine.format.entries import Begin, Commit, Entry, decode_payload
from lowwater.engine.format.format import Extras, Kind, SegmentHeader
from lowwater.engine.log.chain import Create, settings_entry
from lowwater.engine.log.log import Log, LogOptions, Seams
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.testing.engine import CLUSTER_ID, SALT, feed
from lowwater.errors import Corrupt, InvalidEntry, LogDivergence, NewerVersion

NOTHING = BeforeImage()
LARGE = bytes(range(256)) * 9
QUIET = EngineOptions(checkpoint_interval_s=None)
ON = {"wal": {"before_images": True}}
OFF = {"wal": {"before_images": False}}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "data")


@pytest.fixture
def archive() -> Archive:
    return Archive()


@pytest.fixture
def db(path: str, archive: Archive) -> Iterator[Database]:
    options = LogOptions(before_images=True)
    with open_with(path, blocks=archive, options=QUIET, log_options=options) as opened:
        opened.create_bucket("b")
        yield opened


def image_at(db: Any, seq: int) -> BeforeImage | None:
    entry: Entry = next(iter(db.log(seq)))
    assert entry.seq == seq
    return entry.before


def image_of(found: Any) -> BeforeImage:
    """Of what a read returned."""
    value = found.value
    is_large = len(value) > 256
    digest = blake3(value).digest() if is_large else None
    return BeforeImage(
        found.seq, found.time_us, found.metadata, None if is_large else value, len(value), digest
    )


# ---------------------------------------------------------------------------- which changes say what


def test_every_call_that_changes_a_key_says_what_was_there(db: Database) -> None:
    """One that did not would be a hole in a feed."""
    assert image_at(db, db.put("b", "k", b"1", {"m": "n"})) == NOTHING
    calls = [
        lambda: db.put("b", "k", b""),
        lambda: db.put("b", "k", b"3", if_seq=db.get("b", "k").seq),
        lambda: db.put_many("b", [("k", LARGE)]),
        lambda: db.write([Put("b", "k", b"5", {"a": "b"})]),
        lambda: db.copy("b", "other", "b", "k"),
        lambda: db.session().put("b", "k", b"7"),
        lambda: db.session().write([Put("b", "k", b"8")]),
        lambda: db.delete("b", "k"),
    ]
    db.put("b", "other", b"o", {"o": "o"})
    for call in calls:
        before = db.get("b", "k")
        assert image_at(db, call()) == image_of(before)
    assert image_at(db, db.put("b", "k", b"again")) == NOTHING
    assert check_images(db.log()) == 11


def test_what_changes_no_key_says_nothing(db: Database) -> None:
    """Images are of keys."""
    db.create_bucket("c")
    db.delete_bucket("c")
    db.snapshot("s")
    db.checkpoint()
    assert [entry.kind for entry in db.log() if entry.before is not None] == []
    assert check_images(db.log()) == 0


def test_puts_of_one_call_see_those_before_them(db: Database) -> None:
    """Each is a change of its own, though nobody has applied the one before when it is encoded."""
    db.put("b", "k", b"0")
    last = db.put_many("b", [("k", b"1"), ("z", b""), ("k", LARGE), ("k", b"3"), ("z", b"4")])
    images = [entry.before for entry in db.log(last - 4)]
    values = [None if image is None else image.value for image in images]
    assert values == [b"0", None, b"1", None, b""]
    assert [image and image.seq for image in images] == [last - 5, 0, last - 4, last - 2, last - 3]
    assert check_images(db.log()) == 6


def test_a_group_says_what_was_there_before_it(db: Database) -> None:
    """Of two changes of a key in it the last survives, and has superseded that."""
    seq = db.put("b", "k", b"0")
    last = db.write([Put("b", "k", b"1"), Delete("b", "k"), Put("b", "k", b"2"), Put("b", "new", b"")])
    assert [entry.before and entry.before.seq for entry in db.log(last - 3)] == [seq, seq, seq, 0]
    assert image_at(db, db.put("b", "k", b"3")) == BeforeImage(
        last, db.get("b", "new").time_us, None, b"2", 1
    )
    assert check_images(db.log()) == 6


def test_a_transaction_says_what_was_committed_before_it(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones and large ones: never what it has written itself, nor what others have not committed."""
    seq = db.put("b", "k", b"0")
    with db.transaction() as small:
        small.put("b", "k", b"1")
        small.put("b", "k", b"2")
    assert small.seq is not None
    image = image_at(db, small.seq)
    assert (image and image.seq, image and image.value) == (seq, b"0")
    monkeypatch.setattr(transactions, "SPILL_ABOVE_BYTES", 200)
    monkeypatch.setattr(transactions, "PIECE_BYTES", 100)
    with db.transaction() as other, db.transaction() as large:
        other.put("b", "not yet", b"x" * 300)
        for number in range(5):
            large.put("b", "k", b"%d" % number * 50)
            save = large.savepoint()
            large.put("b", "k", b"taken back" * 20)
            large.rollback_to(save)
    frames = [entry for entry in db.log() if entry.txn is not None and entry.key == "k"]
    assert len(frames) > 5
    assert {entry.before.seq for entry in frames if entry.before is not None} == {small.seq}
    image = image_at(db, db.put("b", "k", b""))
    assert (image and image.seq, image and image.value) == (large.seq, b"4" * 50)
    assert check_images(db.log()) > 10


def test_a_transaction_counts_the_images_of_its_writes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commit is one group, which has to fit into a batch with them."""
    monkeypatch.setattr(transactions, "SPILL_ABOVE_BYTES", 20_000)
    for config, is_large in ((OFF, False), (ON, True)):
        with lowwater.open(path, config=config) as db:
            db.create_bucket("b", exist_ok=True)
            db.put_many("b", [(f"k{number}", bytes(250)) for number in range(60)])
            with db.transaction() as txn:
                for number in range(60):
                    txn.put("b", f"k{number}", b"")
                assert bool(txn._spill.txn) == is_large


def test_an_entry_that_is_as_large_as_allowed_is_so_whatever_was_there(path: str) -> None:
    """What can be written must not depend on what it replaces."""
    options = LogOptions(before_images=True, entry_bytes_max=100_000)
    with open_with(path, log_options=options) as db:
        db.create_bucket("b")
        most = options.entry_bytes_max - format.FIXED_BYTES - len("bk")
        db.put("b", "k", bytes(300), {"m": "n" * 1000})
        for write in (
            lambda size: db.put("b", "k", bytes(size)),
            lambda size: db.put_many("b", [("k", bytes(size))]),
        ):
            write(most)
            db.put("b", "k", b"", {"m": "n" * 1000})
            write(most)
            with pytest.raises(InvalidEntry, match=f"{options.entry_bytes_max + 1:,} bytes"):
                write(most + 1)
        assert check_images(db.log()) == 7


# ---------------------------------------------------------------------------- where it has to be read


def test_a_page_that_is_away_is_brought_before_the_change_is_ordered(db: Database, archive: Archive) -> None:
    """And where it does not come, nothing is written."""
    db.put_many("b", [(f"k{number:04}", b"%d" % number) for number in range(2000)])
    found = db.get("b", "k1000")
    leave(db, archive)
    assert list(db.leaving.away())
    archive.is_down = True
    marks = db.marks()
    for change in (
        lambda: db.put("b", "k1000", b"new"),
        lambda: db.put_many("b", [("k1000", b"new")]),
        lambda: db.write([Put("b", "k1000", b"new")]),
    ):
        with pytest.raises(ArchiveDown):
            change()
    assert db.marks() == marks
    archive.is_down = False
    reads = archive.reads
    assert image_at(db, db.put("b", "k1000", b"new")) == image_of(found)
    assert archive.reads == reads + 1
    assert check_images(db.log()) == 2001


def test_the_value_of_a_large_one_is_not_read(db: Database, path: str) -> None:
    """Its length and hash say which it was; the log has the bytes already."""
    db.put("b", "k", LARGE)
    found = db.get("b", "k")
    db.flush()
    current = Path(path, "wal", "current.log")
    data = bytearray(current.read_bytes())
    at = data.index(LARGE)
    data[at] ^= 1
    current.write_bytes(data)
    with pytest.raises(Corrupt):
        db.get("b", "k")
    seq = db.put("b", "k", b"new")
    data[at] ^= 1
    current.write_bytes(data[: at + len(LARGE)] + current.read_bytes()[at + len(LARGE) :])
    assert image_at(db, seq) == image_of(found)


# ---------------------------------------------------------------------------- engines that are fed


def test_redelivered_changes_are_those_that_are_there() -> None:
    """The key has another version by then: what its frame says is what was found first."""
    node = Node()
    pairs: list[Any] = [
        (1, WITH_IMAGES),
        (2, CreateBucket("b")),
        (3, Put("b", "k", b"1")),
        (4, Put("b", "k", b"2")),
        (7, Write([Put("b", "k", b"3"), Delete("b", "k"), Copy("b", "k", "b", "l")])),
        (8, Begin()),
        (9, Put("b", "l", b"4", txn=8)),
        (10, Commit(8)),
        (11, Put("b", "l", LARGE)),
        (12, Delete("b", "l")),
    ]
    engine = node.open()
    assert feed(engine, pairs) == feed(engine, pairs) == [Outcome(seq, None) for seq, _ in pairs]
    assert feed(node.restart(), pairs[2:]) == [Outcome(seq, None) for seq, _ in pairs[2:]]
    assert check_images(node.engine.log()) == 8
    with pytest.raises(LogDivergence):
        node.engine.apply_log_entry(4, Put("b", "k", b"other"))


def test_a_group_that_does_not_fit_with_its_images_is_refused(path: str) -> None:
    """By the log alone: so it is on every replica, and no entry makes an engine stop."""
    settings = {"before_images": 1, "inline_bytes_max": 65_536, "page_keys": 4}
    values = [bytes([number]) * 65_536 for number in range(256)]
    group = Write([Put("b", f"k{number}", value) for number, value in enumerate(values)])
    entries: list[Any] = [
        (1, Create(CLUSTER_ID, SALT, settings)),
        (2, CreateBucket("b")),
        (258, group),
        (514, group),
        (515, Put("b", "k1", b"")),
    ]
    outcomes = [Outcome(seq, Refusal.TOO_LARGE if seq == 514 else None) for seq, _ in entries]
    with lowwater.Engine(path) as engine:
        assert feed(engine, entries) == outcomes
        assert feed(engine, entries) == outcomes
        assert engine.get("b", "k0").seq == 258
        engine.sync()
        assert check_images(engine.log()) == 257
        too_large = Write([*group.entries, *group.entries, *group.entries])
        with pytest.raises(InvalidEntry):
            engine.apply_log_entry(2000, too_large)


# ---------------------------------------------------------------------------- the setting


def header_flags(path: Path) -> int:
    found: int = struct.unpack_from("<I", path.read_bytes(), 12)[0]
    return found


def test_a_log_says_nothing_unless_it_is_asked(path: str) -> None:
    """A feed has to know from which seq on it can rely on it: that is an entry."""
    wal = Path(path, "wal")
    with lowwater.open(path) as db:
        db.create_bucket("b")
        db.put("b", "k", b"1")
        assert image_at(db, db.put("b", "k", b"2")) is None
    assert header_flags(wal / "current.log") == 0
    for config in (ON, ON, None):
        with lowwater.open(path, config=config) as db:
            assert image_at(db, db.put("b", "k", b"3")) is not None
            assert [entry.kind for entry in db.log()].count("settings") == 1
    assert header_flags(wal / "current.log") == format.SEGMENT_FLAG_BEFORE_IMAGES
    with lowwater.open(path, config=OFF) as db:
        assert image_at(db, db.put("b", "k", b"4")) is None
        assert check_images(db.log()) == 3
        assert list(db.check()) == []
    assert header_flags(wal / "current.log") == 0


def test_a_new_log_may_begin_with_it(path: str) -> None:
    """Its first entry says so, and nothing else of it changes."""
    with lowwater.open(path, config=ON) as db:
        db.create_bucket("b")
        assert image_at(db, db.put("b", "k", b"1")) == NOTHING
        assert [entry.kind for entry in db.log()] == ["create", "create_bucket", "put"]


def test_a_log_whose_first_segment_is_gone_still_knows() -> None:
    """Every header says it: a log may begin anywhere."""
    files = MemoryFiles()
    with Log.open("log", seams=Seams(files=files)) as log:
        log.append(settings_entry({"before_images": 1}))
        log.append(Put("b", "k", b"v"))
        assert log.chain.settings.before_images == 1
    (first,) = [name for name in files.list("log") if name.startswith("segment-")]
    files.remove(f"log/{first}")
    with Log.open("log", seams=Seams(files=files)) as log:
        assert (log.creation, log.chain.settings.before_images) == (None, 1)
        log.append(settings_entry({"before_images": 0}))
        assert log.chain.settings.before_images == 0
        log.append(Put("b", "k", b"v"))
        assert not list(log.check())


def test_a_header_that_contradicts_the_log_is_corrupt() -> None:
    """The flag is as much part of the chain as the sizes are."""
    files = MemoryFiles()
    with Log.open("log", seams=Seams(files=files)) as log:
        log.seal()
        log.append(Put("b", "k", b"v"))
    file = files.open("log/current.log", write=True)
    header = SegmentHeader.decode(file.read_at(0, format.HEADER_BYTES))
    file.write_at(0, [header._replace(before_images=1).encode()])
    with pytest.raises(Corrupt, match="other settings"):
        Log.open("log", seams=Seams(files=files))


# ---------------------------------------------------------------------------- the bytes


@pytest.mark.parametrize("groups", [*product((False, True), repeat=5)])
def test_an_image_stands_behind_all_other_groups(groups: tuple[bool, ...]) -> None:
    """It is put into payloads that are encoded already."""
    txn, group, session, request_hash, refused = groups
    extras = Extras(
        txn=7 if txn else None,
        txn_seq_before=5 if txn else 0,
        group_seq_last=9 if group else None,
        session=3 if session else None,
        request=4 if session else 0,
        request_hash=bytes(range(16)) if request_hash else None,
        refused=8 if refused else None,
    )

    def encoded(extras: Extras) -> bytes:
        value = b"" if refused else b"value"
        return format.encode_payload(Kind.PUT, b"b", b"k", b"", value, time_us=1, extras=extras)

    for image in (b"", b"image", bytes(300)):
        made = with_image(encoded(extras), image)
        assert made == encoded(extras._replace(before=image))
        assert bytes_without_image(made) == len(encoded(extras)) == bytes_without_image(encoded(extras))


def image(seq: int = 9, *, metadata: bytes = b"", form: int = 0, rest: bytes = b"value") -> bytes:
    return struct.pack("<QQHB", seq, 5, len(metadata), form) + metadata + rest


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (image()[:18], Corrupt),
        (image(metadata=b"\xa1\x61a\x61b")[:20], Corrupt),
        (image(metadata=b"\xa1\x61a\x01"), Corrupt),
        (image(0), Corrupt),
        (image(form=1, rest=bytes(39)), Corrupt),
        (image(form=1, rest=bytes(41)), Corrupt),
        (image(form=2), NewerVersion),
    ],
)
def test_what_is_no_image_is_told_with_its_seq(data: bytes, error: type[Exception]) -> None:
    """A group of that kind may be of a log that no engine has written."""
    entry = decode_payload(77, with_image(Put("b", "k", b"v").encode(0), data))
    assert (entry.value, entry.extras and entry.extras.before) == (b"v", data)
    with pytest.raises(error) as caught:
        _ = entry.before
    assert caught.value.seq == 77  # type: ignore[attr-defined]


def test_images_are_read_as_they_are_described() -> None:
    """docs/FORMAT.md, by hand."""
    assert decode_image(b"") == NOTHING
    assert decode_image(image(metadata=b"\xa1\x61a\x61b")) == BeforeImage(9, 5, {"a": "b"}, b"value", 5)
    assert decode_image(image(rest=b"")) == BeforeImage(9, 5, None, b"", 0)
    reference = struct.pack("<Q", 3) + bytes(32)
    assert decode_image(image(form=1, rest=reference)) == BeforeImage(9, 5, None, None, 3, bytes(32))
