"""Damage to any file of a closed directory but that with the pages: right answers, or typed errors.

Always true of what is tested here: one file is damaged, and no archive. `check` has called an error whatever
keeps the directory from being opened, and whatever a read of it runs into; where it goes on to call it an
error, or the damage is gone, all other answers are right. Nothing that was acknowledged is lost in silence,
before and after further writes. Each case runs in a process of its own.

`FILE_FLIPS=1000` flips as many bits as have to hold once, and makes a fourth as many damages of other kinds.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from tests.asked import Asked, in_a_child
from tests.recovery.everything import BUCKET, KEYS, Everything, Expected, ask_all, close, key_of, report

from lowwater.cli.root import root
from lowwater.errors import DataError, LowwaterError, NotFound

FLIPS = int(os.environ.get("FILE_FLIPS", "24"))
SEED = 20_261_120
KINDS = ("alone", "purged", "restored", "continued", "clone")


class Case(NamedTuple):
    number: int
    kind: str
    """Of directory."""
    file: str
    damage: str
    place: float
    """Where in the file, of what has been written of it; and which bit."""
    bit: int


def class_of(name: str) -> str:
    """What a file is: flips are shared out among these, however many files there are of each."""
    part, _, last = name.rpartition("/")
    return (
        "segment"
        if last.startswith("segment-")
        else part
        if part in ("cache", "packs", "checkpoints")
        else name
    )


def files_of(folder: Path) -> dict[str, list[str]]:
    """The files of a directory by what they are, but for that with the pages, which has its own test."""
    found: dict[str, list[str]] = {}
    for each in sorted(folder.rglob("*")):
        name = str(each.relative_to(folder))
        if each.is_file() and name != "pages/data.mdb":
            found.setdefault(class_of(name), []).append(name)
    return found


def cases(everything: Everything, flips: int) -> Iterator[Case]:
    """Random names are in the cache alone: which of its files is drawn follows from their sizes."""
    rng = random.Random(SEED)
    others = ["cut", "longer", "gone", "swapped"]
    for number in range(flips + flips // 4):
        kind = rng.choice(KINDS)
        damage = "flip" if number % 5 < 4 else others[number // 5 % len(others)]
        files = files_of(everything.kept / kind / "data")
        what = rng.choice(sorted(files))
        file = rng.choice(
            sorted(
                files[what], key=lambda name: ((everything.kept / kind / "data" / name).stat().st_size, name)
            )
        )
        yield Case(number, kind, file, damage, rng.random(), rng.randrange(8))


def do_damage(everything: Everything, case: Case) -> None:
    path = everything.data / case.file
    data = path.read_bytes()
    # Most of a file that is being written is zeros, which nobody has written.
    size = len(data.rstrip(b"\0")) if case.bit < 6 else len(data)
    at = int(size * case.place)
    if case.damage == "flip":
        changed = bytearray(data or b"\0")
        changed[at] ^= 1 << case.bit
        path.write_bytes(changed)
    elif case.damage == "cut":
        path.write_bytes(data[:at])
    elif case.damage == "longer":
        path.write_bytes(data + random.Random(case.number).randbytes(1 + int(case.place * 5000)))
    elif case.damage == "gone":
        path.unlink()
    else:
        swap(everything, case, path)


def swap(everything: Everything, case: Case, path: Path) -> None:
    """With another of its kind; where it is the only one, the one of another directory comes to its place."""
    own = files_of(everything.data)[class_of(case.file)]
    others = [everything.data / each for each in own if each != case.file]
    if others:
        other = others[int(case.place * len(others))]
        data = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return
    foreign = [everything.kept / kind / "data" / case.file for kind in KINDS if kind != case.kind]
    foreign = [each for each in foreign if each.exists()]
    if foreign:
        path.write_bytes(foreign[int(case.place * len(foreign))].read_bytes())


# ---------------------------------------------------------------------------- what is asked


def checked(data: Path) -> tuple[int, str]:
    """The exit code of the command, and what it says of errors."""
    result = CliRunner().invoke(root, ["check", str(data), "--json"], prog_name="lowwater")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    if not result.stdout:
        return result.exit_code, result.stderr
    found = json.loads(result.stdout)["findings"]
    errors = [f"{each['path']}: {each['what']}" for each in found if each["severity"] == "error"]
    return result.exit_code, "; ".join(errors)


def child(everything: Everything, case: Case) -> dict[str, Any]:
    """What was seen: `told` is whether `check` has called it an error, `refused` and `read` whether opening
    and reading ran into it, `after` whether `check` does so afterwards."""
    asked = Asked()
    expected = everything.expected[case.kind].copy()
    code, errors = checked(everything.data)
    # A log of one file is no log without it, and then nobody takes the directory for a database.
    is_none = code == NotFound.exit_code and case.damage == "gone"
    if code not in (0, DataError.exit_code) and not is_none:
        asked.wrong.append(f"check ends with {code}: {errors}")
    told: dict[str, Any] = {"told": code != 0, "refused": False, "read": False, "after": False}
    try:
        db = everything.open(case.kind)
    except LowwaterError as error:
        asked.detected.append(f"open: {type(error).__name__}: {error}")
        told["refused"] = True
        if not error.hint:
            asked.wrong.append(f"open: no hint: {error}")
        if code == 0 or is_none is not isinstance(error, NotFound):
            asked.wrong.append(f"open refuses what check has found sound: {type(error).__name__}: {error}")
        return asked.told() | told
    ask_all(db, expected, asked, older=case.kind != "alone")
    asked.call("check", lambda: list(db.check()), [])
    close(db, asked)
    told["read"] = bool(asked.detected)
    if told["read"] and code == 0:
        asked.wrong.append(f"check has found sound what reading runs into: {asked.detected[0]}")
    told["after"] = checked(everything.data)[0] != 0
    if told["after"] and code == 0:
        asked.wrong.append(f"opening has damaged what check has found sound: {checked(everything.data)}")
    write_more(everything, case, expected, asked)
    return asked.told() | told


def write_more(everything: Everything, case: Case, expected: Expected, asked: Asked) -> None:
    """Without an acknowledged write that is lost, whatever was refused on the way."""
    rng = random.Random(case.number)
    detected, older = len(asked.detected), case.kind != "alone"
    try:
        with everything.open(case.kind) as db:
            for number in rng.sample(range(KEYS), KEYS // 5):
                value = rng.randbytes(rng.choice((10, 900)))
                db.put(BUCKET, key_of(number), value)
                expected.now[key_of(number)] = value
            db.delete(BUCKET, key_of(number))
            del expected.now[key_of(number)]
            db.flush()
            expected.root = db.root()
    except LowwaterError as error:
        asked.detected.append(f"write: {type(error).__name__}: {error}")
        return
    db = asked.call("open again", lambda: everything.open(case.kind), None)
    if db is None:
        asked.wrong.append(f"it does not open again: {asked.detected[-1]}")
        return
    ask_all(db, expected, asked, older=older)
    close(db, asked)
    assert len(asked.detected) >= detected


# ---------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    return Everything(tmp_path_factory.mktemp("files"))


def is_known(everything: Everything, case: Case) -> bool:
    """What is not seen today, and has a test of its own below."""
    return case.damage == "gone" and (case.file == "origin" or case.file == first_segment(everything, case))


def first_segment(everything: Everything, case: Case) -> str | None:
    """Of the log that nothing was ever purged from."""
    segments = files_of(everything.kept / case.kind / "data").get("segment", [])
    return segments[0] if case.kind == "alone" else None


def asked_in_a_child(everything: Everything, case: Case) -> dict[str, Any]:
    everything.bring(case.kind)
    do_damage(everything, case)
    return in_a_child(partial(child, everything, case))


@pytest.mark.long
@pytest.mark.timeout(12 * 3600)
def test_damage_to_any_other_file_gives_right_answers_or_typed_errors(everything: Everything) -> None:
    """What a disk, a copy that broke off or a person with a shell does to what is not the pages."""
    counts: Counter[tuple[str, str]] = Counter()
    missed = []
    for case in cases(everything, FLIPS):
        if is_known(everything, case):
            counts[case.damage, "known"] += 1
            continue
        found = asked_in_a_child(everything, case)
        if found["wrong"]:
            missed.append(f"{case}: {found}")
        counts[case.damage, outcome_of(found)] += 1
    report("files", counts, missed)
    assert missed == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["restored", "continued", "clone"])
@pytest.mark.xfail(
    strict=True,
    reason="A directory without the record of its archive is taken for one that never had an archive: check "
    "calls it sound, it opens, reads of what is away fail, and its log begins where the local files do.",
)
def test_a_directory_that_lost_the_record_of_its_archive_is_not_called_sound(
    everything: Everything, kind: str
) -> None:
    """Pages lead to blocks that nobody can find any more."""
    found = asked_in_a_child(everything, Case(0, kind, "origin", "gone", 0.0, 0))
    assert found["wrong"] == []


@pytest.mark.long
@pytest.mark.xfail(
    strict=True,
    reason="A log whose first segment is gone is read from its second one on without an error: nothing "
    "tells it from one that was pruned, although check does.",
)
def test_a_log_that_has_lost_its_first_segment_is_not_read_as_if_it_began_later(
    everything: Everything,
) -> None:
    """Whoever replays from the earliest entry takes what is left for all there ever was."""
    case = Case(0, "alone", "", "gone", 0.0, 0)
    first = first_segment(everything, case)
    assert first is not None
    found = asked_in_a_child(everything, case._replace(file=first))
    assert found["wrong"] == []


def outcome_of(found: dict[str, Any]) -> str:
    if found["wrong"]:
        return "wrong"
    if found["refused"]:
        return "refused"
    if found["read"]:
        return "told by reads"
    if not found["told"]:
        return "unused"
    return "told by check alone" if found["after"] else "mended"


@pytest.mark.parametrize(
    "kind", [*KINDS[1:2], *(pytest.param(k, marks=pytest.mark.long) for k in KINDS if k != KINDS[1])]
)
def test_an_undamaged_directory_answers_everything(everything: Everything, kind: str) -> None:
    """Else what was answered by errors would prove nothing."""
    case = Case(0, kind, "", "", 0.0, 0)
    everything.bring(kind)
    found = in_a_child(partial(child, everything, case))
    assert (found["wrong"], found["detected"], found["told"]) == ([], [], False)
