"""A power loss takes all that it can take, and nothing that was synced.

Each test looks for both: that nothing impossible happens in any of many seeds, and that everything
possible happens in some. A disk that is kind would let every bug pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lowwater.chaos.disk import FaultyFiles
from lowwater.chaos.survival import SURVIVALS, Survival
from lowwater.engine.seams.seams import SyncMode

SEEDS = range(300)
SECTOR = 512


def synced_file(files: FaultyFiles, path: str, data: bytes) -> None:
    file = files.open(path, create=True)
    file.write_at(0, [data])
    file.sync("fdatasync")
    files.sync_directory("")


def content(files: FaultyFiles, path: str) -> bytes:
    file = files.open(path)
    return file.read_at(0, file.size())


def contents(files: FaultyFiles) -> dict[str, bytes]:
    return {path: content(files, path) for path in files.list("")}


def outcomes(prepare: Callable[[FaultyFiles], None], mode: Survival) -> list[dict[str, bytes]]:
    """What is left after a crash with each of the seeds."""
    left = []
    for seed in SEEDS:
        files = FaultyFiles()
        prepare(files)
        files.crash(random.Random(seed), mode)
        left.append(contents(files))
    return left


@pytest.mark.parametrize("mode", SURVIVALS)
@pytest.mark.parametrize("sync", ["fsync", "fdatasync"])
def test_what_was_synced_survives_every_crash(mode: Survival, sync: SyncMode) -> None:
    """The size too: fdatasync leaves out times, not what is needed to read the data."""

    def prepare(files: FaultyFiles) -> None:
        file = files.open("a", create=True)
        file.write_at(0, [b"x" * 3000])
        file.truncate(2000)
        file.write_at(5000, [b"y"])
        file.sync(sync)
        files.sync_directory("")

    assert all(left == {"a": b"x" * 2000 + bytes(3000) + b"y"} for left in outcomes(prepare, mode))


def test_what_was_not_synced_vanishes() -> None:
    """Reading it back before the crash proves nothing: that came from the cache."""
    files = FaultyFiles()
    synced_file(files, "a", b"old")
    files.open("a", write=True).write_at(0, [b"newer"])
    assert content(files, "a") == b"newer"
    files.crash(random.Random(0), "lose")
    assert content(files, "a") == b"old"


def test_sync_mode_none_makes_nothing_durable() -> None:
    """Whoever chooses it chooses that."""
    files = FaultyFiles()
    file = files.open("a", create=True)
    file.write_at(0, [b"gone"])
    file.sync("none")
    files.sync_directory("")
    files.crash(random.Random(0), "lose")
    assert content(files, "a") == b""


def test_a_sync_covers_its_own_file_only() -> None:
    """On some real file systems it does more, and programs that rely on it lose data on others."""
    files = FaultyFiles()
    synced_file(files, "a", b"old")
    synced_file(files, "b", b"old")
    for path in ("a", "b"):
        files.open(path, write=True).write_at(0, [b"new"])
    files.open("b").sync("fsync")
    files.crash(random.Random(0), "lose")
    assert contents(files) == {"a": b"old", "b": b"new"}


def test_kill_9_keeps_all_and_a_later_power_loss_takes_it() -> None:
    """A restarted program that relies on what it finds has to sync it first."""
    files = FaultyFiles()
    synced_file(files, "a", b"old")
    files.open("a", write=True).write_at(0, [b"new"])
    files.open("b", create=True)
    files.crash(random.Random(0), "keep")
    assert contents(files) == {"a": b"new", "b": b""}
    files.crash(random.Random(0), "lose")
    assert contents(files) == {"a": b"old"}


def test_each_sector_survives_or_vanishes_by_itself() -> None:
    """A frame may be there without the one before it, and a file without the one written before it."""

    def prepare(files: FaultyFiles) -> None:
        for path in ("a", "b"):
            synced_file(files, path, bytes(4 * SECTOR))  # filled with zeros first, as the log does
        for path in ("a", "b"):
            for sector in range(4):
                files.open(path, write=True).write_at(sector * SECTOR, [b"x" * SECTOR])

    patterns = []
    for left in outcomes(prepare, "random"):
        data = left["a"] + left["b"]
        sectors = [data[start : start + SECTOR] for start in range(0, len(data), SECTOR)]
        assert all(sector in (bytes(SECTOR), b"x" * SECTOR) for sector in sectors)
        patterns.append([sector != bytes(SECTOR) for sector in sectors])
    assert [True] * 8 in patterns
    assert [False] * 8 in patterns
    assert any(not first and second for first, second, *_ in patterns), "never reordered within a file"
    assert any(not any(p[:4]) and all(p[4:]) for p in patterns), "never reordered between files"
    assert any(0 < sum(p[:4]) < 4 for p in patterns), "never torn"


def test_one_write_tears_only_between_sectors() -> None:
    """A write that is not aligned covers parts of sectors; each part is there or not, as a whole."""

    def prepare(files: FaultyFiles) -> None:
        synced_file(files, "a", bytes(2000))
        files.open("a", write=True).write_at(300, [b"x" * 1000])

    pieces = [(300, 512), (512, 1024), (1024, 1300)]
    seen = set()
    for left in outcomes(prepare, "random"):
        there = tuple(left["a"][start] != 0 for start, _ in pieces)
        expected = bytearray(2000)
        for (start, stop), survived in zip(pieces, there, strict=True):
            expected[start:stop] = (b"x" if survived else b"\0") * (stop - start)
        assert left["a"] == expected
        seen.add(there)
    assert len(seen) == 8


def test_a_sector_never_has_a_later_write_without_an_earlier_one() -> None:
    """It reaches the disk as a whole: one of the versions that it had in the cache."""

    def prepare(files: FaultyFiles) -> None:
        synced_file(files, "a", b"." * 30)
        file = files.open("a", write=True)
        file.write_at(0, [b"a" * 10])
        file.write_at(5, [b"b" * 10])
        file.write_at(20, [b"c" * 10])

    legal = {
        b"." * 30,
        b"a" * 10 + b"." * 20,
        b"a" * 5 + b"b" * 10 + b"." * 15,
        b"a" * 5 + b"b" * 10 + b"." * 5 + b"c" * 10,
    }
    assert {left["a"] for left in outcomes(prepare, "random")} == legal


def test_a_size_may_survive_without_its_bytes_and_the_other_way_round() -> None:
    """Then the bytes are zeros, or cut off: a scan meets both."""

    def prepare(files: FaultyFiles) -> None:
        synced_file(files, "a", b"")
        files.open("a", write=True).write_at(0, [b"x" * 100])
        files.open("a", write=True).write_at(100, [b"y" * 1000])

    left = [outcome["a"] for outcome in outcomes(prepare, "random")]
    assert {len(data) for data in left} == {0, 100, 1100}
    assert bytes(1100) in left
    assert bytes(100) in left
    assert b"x" * 100 in left
    assert b"x" * 100 + b"y" * 1000 in left


def test_a_truncation_may_be_lost_and_then_the_end_is_back() -> None:
    """A torn tail that was cut off, but not synced, can return."""

    def prepare(files: FaultyFiles) -> None:
        synced_file(files, "a", b"x" * 2000)
        files.open("a", write=True).truncate(600)
        files.open("a", write=True).write_at(600, [b"y" * 1000])

    left = [outcome["a"] for outcome in outcomes(prepare, "random")]
    assert b"x" * 2000 in left
    assert b"x" * 600 in left
    assert b"x" * 600 + b"y" * 1000 in left
    assert any(len(data) == 1600 and bytes(500) in data for data in left)
    assert not any(len(data) == 2000 and b"y" in data for data in left), "two histories were mixed"
    assert not any(len(data) == 1600 and b"x" in data[600:] for data in left), "cut bytes came back"


def test_torn_cuts_the_last_write_at_a_sector_and_keeps_the_rest() -> None:
    """The crash that a log expects. It always takes something, so that a test can rely on it."""

    def prepare(files: FaultyFiles) -> None:
        synced_file(files, "a", b"")
        file = files.open("a", write=True)
        file.write_at(0, [b"x" * 700])
        file.write_at(700, [b"y" * 2000])

    kept = set()
    sizes = set()
    for left in outcomes(prepare, "torn"):
        data = left["a"]
        body = data.rstrip(b"\0")
        assert body.startswith(b"x" * 700)
        kept.add(len(body))
        sizes.add(len(data))
    assert kept == {700, 1024, 1536, 2048, 2560}
    assert sizes == {700, 1024, 1536, 2048, 2560, 2700}


def test_prefix_keeps_the_first_changes_of_each_file() -> None:
    """With a journal, a later change never survives an earlier one."""

    def prepare(files: FaultyFiles) -> None:
        synced_file(files, "a", b"")
        file = files.open("a", write=True)
        for letter in (b"x", b"y", b"z"):
            file.write_at(file.size(), [letter * SECTOR])

    bodies = {left["a"].rstrip(b"\0") for left in outcomes(prepare, "prefix")}
    whole = b"x" * SECTOR + b"y" * SECTOR + b"z" * SECTOR
    assert bodies == {whole[:size] for size in (0, SECTOR, 2 * SECTOR, 3 * SECTOR)}


def test_a_created_file_vanishes_without_a_sync_of_its_directory() -> None:
    """Its data was synced, and nobody can find it."""
    files = FaultyFiles()
    file = files.open("a", create=True)
    file.write_at(0, [b"data"])
    file.sync("fsync")
    files.crash(random.Random(0), "lose")
    assert files.list("") == []


def test_a_synced_name_does_not_make_its_file_durable() -> None:
    """Else a program would get away with renaming what it never synced."""
    files = FaultyFiles()
    files.open("a", create=True).write_at(0, [b"data"])
    files.sync_directory("")
    files.crash(random.Random(0), "lose")
    assert contents(files) == {"a": b""}


def test_a_lost_rename_leaves_both_files_where_they_were() -> None:
    """The old name, and under the new one what it was to replace."""
    files = FaultyFiles()
    synced_file(files, "old", b"from old")
    synced_file(files, "new", b"from new")
    files.rename("old", "new")
    files.crash(random.Random(0), "lose")
    assert contents(files) == {"old": b"from old", "new": b"from new"}


def test_a_synced_rename_stays() -> None:
    """And takes all that happened in that directory before."""
    files = FaultyFiles()
    synced_file(files, "a", b"data")
    files.rename("a", "b")
    files.rename("b", "c")
    files.sync_directory("")
    files.crash(random.Random(0), "lose")
    assert contents(files) == {"c": b"data"}


def test_a_removed_file_may_come_back() -> None:
    """A purge that was not synced is undone, so reopening meets old segments again."""
    files = FaultyFiles()
    synced_file(files, "a", b"data")
    files.remove("a")
    files.crash(random.Random(0), "lose")
    assert contents(files) == {"a": b"data"}


def test_changed_names_survive_in_any_combination() -> None:
    """Each by itself, as far as its file is there to be renamed."""

    def prepare(files: FaultyFiles) -> None:
        synced_file(files, "a", b"1")
        synced_file(files, "b", b"2")
        files.rename("a", "a2")
        files.rename("b", "b2")
        files.rename("b2", "b3")

    names = {tuple(left) for left in outcomes(prepare, "random")}
    assert names == {(a, b) for a in ("a", "a2") for b in ("b", "b2", "b3")}


def test_a_name_that_is_given_again_too_early_can_destroy_the_first_file() -> None:
    """Moving a file away and another into its place needs a sync of the directory in between."""

    def prepare(files: FaultyFiles) -> None:
        synced_file(files, "current", b"1")
        synced_file(files, "spare", b"2")
        files.rename("current", "segment")
        files.rename("spare", "current")

    left = outcomes(prepare, "random")
    assert {"current": b"2"} in left
    assert {"current": b"2", "segment": b"1"} in left
    assert all(b"1" in outcome.values() for outcome in outcomes(prepare, "prefix"))


def test_a_rename_moves_the_file_that_it_was_for_or_none() -> None:
    """Where that one never got the old name, whatever else has it must stay."""

    def prepare(files: FaultyFiles) -> None:
        synced_file(files, "a", b"1")
        synced_file(files, "b", b"2")
        files.rename("a", "c")
        files.rename("b", "a")
        files.rename("a", "d")

    left = outcomes(prepare, "random")
    assert {"a": b"1", "b": b"2"} in left
    assert {"c": b"1", "d": b"2"} in left
    assert not any(list(outcome.values()).count(b"2") != 1 for outcome in left)
    assert not any(outcome.get("d") == b"1" for outcome in left)


def test_what_a_crash_took_does_not_come_back() -> None:
    """Later syncs write what was written in this life."""
    files = FaultyFiles()
    synced_file(files, "a", b"old")
    files.open("a", write=True).write_at(0, [b"new"])
    files.rename("a", "b")
    files.crash(random.Random(0), "lose")
    files.open("a").sync("fsync")
    files.sync_directory("")
    files.crash(random.Random(0), "lose")
    assert contents(files) == {"a": b"old"}


def test_prefix_keeps_the_first_changes_of_names() -> None:
    """As a journal does: never a later one without an earlier one, even of other files."""

    def prepare(files: FaultyFiles) -> None:
        for path in ("a", "b", "c"):
            files.open(path, create=True)

    names = {"".join(left) for left in outcomes(prepare, "prefix")}
    assert names == {"", "a", "ab", "abc"}


def test_a_directory_is_synced_by_itself_and_a_rename_brings_its_file_along() -> None:
    """A file moved into a synced directory must not hang on a name that was never durable."""
    files = FaultyFiles()
    files.make_directory("x")
    files.make_directory("y")
    files.open("x/moved", create=True)
    files.open("x/stays", create=True)
    files.rename("x/moved", "y/moved")
    files.sync_directory("y")
    files.crash(random.Random(0), "lose")
    assert files.list("x") == []
    assert files.list("y") == ["moved"]


def test_names_keep_their_order_while_another_directory_is_synced() -> None:
    """A creation and a rename that were made durable the wrong way round leave the wrong name."""
    files = FaultyFiles()
    files.make_directory("x")
    files.make_directory("y")
    files.open("x/a", create=True)
    files.rename("x/a", "x/b")
    files.sync_directory("y")
    files.sync_directory("x")
    files.crash(random.Random(0), "lose")
    assert files.list("x") == ["b"]


def test_losing_all_agrees_with_a_model_that_copies_whole_files() -> None:
    """The disk applies single changes; the model takes a copy at each sync. Nothing may tell them apart."""
    for seed in range(100):
        rng = random.Random(seed)
        files = FaultyFiles()
        stored: dict[int, bytes] = {}
        names: dict[str, int] = {}
        stored_names: dict[str, int] = {}
        for number in range(200):
            path, other = rng.choice("abc"), rng.choice("abc")
            if path not in names:
                files.open(path, create=True)
                names[path] = number
                stored[number] = b""
            file = files.open(path, write=True)
            action = rng.randrange(7)
            if action < 3:
                file.write_at(rng.randrange(2000), [rng.randbytes(rng.randrange(1000))])
            elif action == 3:
                file.truncate(rng.randrange(2000))
            elif action == 4:
                file.sync("fdatasync")
                stored[names[path]] = content(files, path)
            elif action == 5 and path != other:
                files.rename(path, other)
                names[other] = names.pop(path)
            elif action == 6:
                files.sync_directory("")
                stored_names = dict(names)
        files.crash(rng, "lose")
        assert contents(files) == {path: stored[number] for path, number in stored_names.items()}
