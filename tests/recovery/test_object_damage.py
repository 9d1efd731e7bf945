"""Damage to an object of an archive, whichever it is: right answers, or typed errors, whoever comes there.

Always true of what is tested here: one object is flipped, cut off, another's, or gone. Restores, clones,
reads of what a directory has purged, and shipping give what a model gives, or say what is wrong; a scrub that
reads every byte says it too. Each case runs in a process of its own.

`OBJECT_DAMAGES=400` tries as many as have to hold once; each tenth lies with a real S3 server.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from tests.asked import Asked, in_a_child, value_or_none
from tests.recovery.everything import (
    BUCKET,
    ENGINE,
    Everything,
    Expected,
    ask_all,
    close,
    report,
    scanned,
)

import lowwater
from lowwater.cli.root import root
from lowwater.errors import DataError, NotFound
from lowwater.tiering.names import parse
from lowwater.tiering.testing.s3_server import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

COUNT = int(os.environ.get("OBJECT_DAMAGES", "20"))
SEED = 20_261_121
S3_EVERY = 10
DAMAGES = ("flip", "flip", "cut", "swapped", "gone")
# Nothing waits for a store that is there.
CONFIG: dict[str, Any] = {"engine": ENGINE, "wal": {"sync_mode": "none"}, "tier": {"attempts_max": 2}}
SHIPS_WITHIN_S = 60.0
# What is put where it was shipped before.
NEW = "0/new"


class Case(NamedTuple):
    number: int
    name: str
    damage: str
    other: str
    """Whose bytes it gets where it is swapped."""
    place: float
    bit: int


def objects_of(archive: Path) -> dict[str, list[str]]:
    """The names of all objects by type."""
    found: dict[str, list[str]] = {}
    for each in sorted(archive.rglob("*")):
        name = str(each.relative_to(archive))
        if each.is_file() and (parsed := parse(name)) is not None:
            found.setdefault(parsed.type, []).append(name)
    return found


def cases(archive: Path, count: int) -> Iterator[Case]:
    """Each type as often as any other, and the newest of a type as often as all others of it."""
    rng = random.Random(SEED)
    objects = objects_of(archive)
    assert len(objects) == 8, "an archive with objects of all types"
    for number in range(count):
        names = objects[rng.choice(sorted(objects))]
        at = rng.choice((len(names) - 1, rng.randrange(len(names))))
        other = rng.choice([each for each in names if each != names[at]] or objects["manifest"])
        yield Case(number, names[at], rng.choice(DAMAGES), other, rng.random(), rng.randrange(8))


def do_damage(archive: Path, case: Case) -> None:
    path = archive / case.name
    data = bytearray(path.read_bytes())
    at = int(len(data) * case.place)
    if case.damage == "flip":
        data[at] ^= 1 << case.bit
        path.write_bytes(data)
    elif case.damage == "cut":
        path.write_bytes(data[:at])
    elif case.damage == "swapped":
        other = archive / case.other
        path.write_bytes(other.read_bytes())
        if parse(case.name).type == parse(case.other).type:  # type: ignore[union-attr]
            other.write_bytes(data)
    else:
        path.unlink()


# ---------------------------------------------------------------------------- what is asked


class Visitors:
    """All that come to a damaged archive."""

    def __init__(self, everything: Everything, case: Case, uri: str) -> None:
        self.data, self.place, self.uri, self.case = everything.data, everything.place, uri, case
        self.expected: Expected = everything.expected["archived"]
        self.asked = Asked()
        self.scrubbed = False

    def all(self) -> dict[str, Any]:
        self.scrub()
        self.verify()
        scrubbed = len(self.asked.detected)
        self.clone()
        self.restore_older()
        shipped = self.go_on()
        self.restore(shipped)
        return self.asked.told() | {"scrubbed": self.scrubbed, "read": len(self.asked.detected) > scrubbed}

    def command(self, *arguments: str) -> int:
        result = CliRunner().invoke(root, [*arguments], prog_name="lowwater")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code

    def scrub(self) -> None:
        """What is found is an object, and the one that is damaged among them."""
        findings = self.asked.call("scrub", lambda: list(lowwater.check(self.uri)), None)
        if findings is None:
            self.scrubbed = True
        else:
            place = self.uri.partition("?")[0].rstrip("/")
            found = [each.where for each in findings if each.severity != "note"]
            self.scrubbed = any(fnmatch(f"{place}/{self.case.name}", each) for each in found)
        code = self.command("scrub", self.uri)
        if code not in (0, DataError.exit_code, NotFound.exit_code):
            self.asked.wrong.append(f"scrub ends with {code}")

    def verify(self) -> None:
        expected = NotFound.exit_code if self.case.damage == "gone" else DataError.exit_code
        for name, code_expected in ((self.case.name, expected), (None, None)):
            arguments = ("--from", "1", "--to", "1000") if name is None else (name,)
            code = self.command("tier", "verify", self.uri, *arguments)
            if code not in (code_expected, *((0, 65, 2) if code_expected is None else ())):
                self.asked.wrong.append(f"tier verify {arguments} ends with {code}")

    def opened(self, what: str, data: Path, tier: str | None) -> lowwater.Database | None:
        return self.asked.call(
            f"open {what}", lambda: lowwater.open(data, tier=tier, create=False, config=CONFIG), None
        )

    def made(self, what: str, **given: Any) -> lowwater.Database | None:
        """What a restore makes, opened."""
        to = self.place / what
        if (
            self.asked.call(what, lambda: lowwater.restore(self.uri, to, config=CONFIG, **given), None)
            is None
        ):
            return None
        return self.opened(what, to, None)

    def clone(self) -> None:
        if (db := self.made("clone", clone=True)) is not None:
            ask_all(db, self.expected, self.asked, older=True)
            close(db, self.asked)

    def restore_older(self) -> None:
        if (db := self.made("older", at=self.expected.older_seq)) is not None:
            self.asked.ask("restored scan", lambda: scanned(db), sorted(self.expected.older.items()))
            close(db, self.asked)

    def go_on(self) -> bool:
        """The directory that shipped it: whether it could ship one more."""
        if (db := self.opened("what shipped", self.data, self.uri)) is None:
            return False
        ask_all(db, self.expected, self.asked, older=True)
        db.put(BUCKET, NEW, b"new")
        shipped = self.asked.call("ship", lambda: db.ship(timeout=SHIPS_WITHIN_S), 0)
        self.asked.ask("get", lambda: value_or_none(db, BUCKET, NEW), b"new")
        close(db, self.asked)
        return shipped > 0

    def restore(self, shipped: bool) -> None:
        expected = self.expected.copy()
        if (db := self.made("restore", full=True)) is None:
            return
        new = self.asked.call("get", lambda: value_or_none(db, BUCKET, NEW), None)
        if new is None and shipped:
            self.asked.wrong.append("what was shipped is not restored")
        elif new is not None:
            expected.now[NEW] = new
            expected.root = self.asked.call("root", db.root, expected.root)
        ask_all(db, expected, self.asked, older=True)
        close(db, self.asked)


# ---------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    return Everything(tmp_path_factory.mktemp("objects"))


def visited(everything: Everything, case: Case, *, on_s3: bool) -> dict[str, Any]:
    """What the visitors say of the archive with this damage, in its folder or with a real S3 server."""
    everything.bring("archived")
    if case.damage:
        do_damage(everything.archive, case)
    if not on_s3:
        return in_a_child(partial(visit, everything, case, everything.uri))
    served = everything.place / "s3"
    (served / "buckets" / "lowwater").mkdir(parents=True)
    # Before the server is there, which looks into its folder once.
    everything.archive.rename(served / "buckets" / "lowwater" / "archive")
    with S3Server(served) as server:
        uri = f"{server.uri('archive')}?endpoint={server.endpoint}&region=us-east-1"
        return in_a_child(partial(visit, everything, case, uri))


def visit(everything: Everything, case: Case, uri: str) -> dict[str, Any]:
    # No directory records the credentials.
    os.environ["AWS_ACCESS_KEY_ID"] = ACCESS_KEY_ID
    os.environ["AWS_SECRET_ACCESS_KEY"] = SECRET_ACCESS_KEY
    return Visitors(everything, case, uri).all()


@pytest.mark.long
@pytest.mark.timeout(12 * 3600)
def test_damage_to_any_object_gives_right_answers_or_typed_errors(
    everything: Everything,
) -> None:
    """What a bucket loses, or is given in its place."""
    archive = everything.kept / "archived" / "archive"
    newest = objects_of(archive)["state"][-1]
    counts: Counter[tuple[str, str]] = Counter()
    missed = []
    for case in cases(archive, COUNT):
        found = visited(everything, case, on_s3=case.number % S3_EVERY == 0)
        # Where that is gone, the one before it is the newest, and lists have what it has named.
        if not found.get("scrubbed") and (case.damage, case.name) != ("gone", newest):
            found["wrong"].append("no scrub finds it")
        if found["wrong"]:
            missed.append(f"{case}: {found}")
        kind = parse(case.name)
        assert kind is not None
        told = "wrong" if found["wrong"] else "told" if found["read"] else "right"
        counts[f"{kind.type} {case.damage}", told] += 1
    report("objects", counts, missed)
    assert missed == []


@pytest.mark.slow
@pytest.mark.parametrize("is_on_s3", [False, pytest.param(True, marks=pytest.mark.long)])
def test_an_undamaged_archive_answers_everything(everything: Everything, is_on_s3: bool) -> None:
    """Else what was answered by errors would prove nothing."""
    case = Case(-1, "cluster.cbor", "", "", 0.0, 0)
    found = visited(everything, case, on_s3=is_on_s3)
    assert found["detected"] == []
    assert not found["scrubbed"]
    assert [each for each in found["wrong"] if not each.startswith("tier verify")] == []
