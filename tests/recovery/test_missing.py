"""A directory that was lost, and an archive that has its history: what is told, what is left, and done.

Always true of what is tested here: a refusal leaves what there was before, to the byte; the command that it
shows does what it says.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from prometheus_client import CollectorRegistry
from tests.tiering.proxy import Answer, Request, proxied

import lowwater
from lowwater.chaos.disk import SimulatedCrash
from lowwater.cli.root import root
from lowwater.engine.database.origin import ORIGIN, RESTORING
from lowwater.engine.seams.failpoints import registry
from lowwater.errors import (
    AlreadyExists,
    Corrupt,
    DatabaseMissing,
    DirectoryLocked,
    InputError,
    InvalidConfig,
    LowwaterError,
    NotFound,
    OtherCluster,
    StoreDenied,
    StoreMissing,
    StoreReadOnly,
    StoreUnavailable,
)
from lowwater.tiering.testing.s3_server import S3Server

QUICK = {"timeout_ms": 300, "attempts_max": 1}


def tree_of(folder: Path) -> dict[str, bytes | None] | None:
    if not folder.exists():
        return None
    # LMDB's table of readers is no data.
    paths = sorted(each for each in folder.rglob("*") if each.name != "lock.mdb")
    return {str(each.relative_to(folder)): each.read_bytes() if each.is_file() else None for each in paths}


def refused(
    kind: type[LowwaterError], directory: Path, *, open_it: Callable[..., Any] = lowwater.open, **given: Any
) -> LowwaterError:
    """Opening is refused, with a hint, and leaves all as it was."""
    before = tree_of(directory)
    with pytest.raises(kind) as caught:
        open_it(directory, **given)
    assert tree_of(directory) == before
    assert caught.value.hint
    return caught.value


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    result = CliRunner().invoke(root, list(arguments), prog_name="lowwater", input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def follow(hint: str, *, to: Path | None = None) -> None:
    """Type the command that a hint shows."""
    found = re.search(r"`(lowwater [^`]*)`", hint)
    assert found, hint
    program, *arguments = shlex.split(found[1])
    assert program == "lowwater"
    result = run(*(str(to) if each == "NEW" and to else each for each in arguments))
    assert result.exit_code == 0, result.stderr


def make(directory: Path, tier: str, **given: Any) -> str:
    """A database that has shipped: its root."""
    with lowwater.open(directory, tier=tier, **given) as db:
        db.create_bucket("b")
        db.put_many("b", [(f"k{number:03}", b"%d" % number) for number in range(100)])
        db.checkpoint()
        db.put("b", "large", bytes(100_000))
        db.ship(timeout=120)
        return db.root()


@pytest.fixture
def lost(tmp_path: Path) -> tuple[Path, str, str]:
    """A directory that is gone, its archive, and the root of what was shipped."""
    tier = f"file://{tmp_path}/archive"
    expected = make(tmp_path / "db", tier)
    shutil.rmtree(tmp_path / "db")
    return tmp_path / "db", tier, expected


# ---------------------------------------------------------------------------- refused


def test_a_lost_directory_is_told_with_the_commands_that_bring_it_back(lost: tuple[Path, str, str]) -> None:
    """It was OtherCluster, and an empty database that was in the way of the restore."""
    directory, tier, expected = lost
    error = refused(DatabaseMissing, directory, tier=tier)
    assert isinstance(error, OtherCluster)
    assert isinstance(error, InputError)
    assert str(directory) in error.message
    assert f"lowwater restore {tier} {directory}" in error.hint
    assert f'lowwater.open({str(directory)!r}, ..., on_missing="restore")' in error.hint
    follow(error.hint)
    with lowwater.open(directory, tier=tier) as db:
        assert db.root() == expected


def test_whoever_makes_no_database_is_told_the_same(lost: tuple[Path, str, str]) -> None:
    """That there is none is half of what they have to know."""
    directory, tier, _ = lost
    for create in (True, False):
        assert "restore" in refused(DatabaseMissing, directory, tier=tier, create=create).hint
    directory.mkdir()
    refused(DatabaseMissing, directory, tier=tier)
    (directory / "lost+found").mkdir()
    follow(refused(DatabaseMissing, directory, tier=tier).hint)


def test_the_archive_is_asked_however_it_is_named(
    lost: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a mapping, in a file, in the environment."""
    directory, tier, _ = lost
    refused(DatabaseMissing, directory, config={"tier": {"uri": tier}})
    file = tmp_path / "a file.toml"
    file.write_text(f'[tier]\nuri = "{tier}"\n[wal]\ndir = "{tmp_path}/elsewhere"\n')
    error = refused(DatabaseMissing, directory, config=file)
    assert f"--config '{file}'" in error.hint
    assert not (tmp_path / "elsewhere").exists()
    follow(error.hint)
    assert (tmp_path / "elsewhere").exists()
    with lowwater.open(directory, config=file) as db:
        assert db.get("b", "k007").value == b"7"
    shutil.rmtree(directory)
    monkeypatch.setenv("LOWWATER_TIER__URI", tier)
    follow(refused(DatabaseMissing, directory).hint)
    monkeypatch.delenv("LOWWATER_TIER__URI")
    with lowwater.open(directory) as db:
        assert db.get("b", "k007").value == b"7"


def test_no_command_makes_a_database_beside_a_history(
    lost: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that needs it advise to make it."""
    directory, tier, _ = lost
    monkeypatch.setenv("LOWWATER_TIER__URI", tier)
    path = str(directory)
    for arguments in (["put", path, "b", "k", "--create"], ["put", path, "b", "k"], ["get", path, "b", "k"]):
        result = run(*arguments, stdin=b"v")
        assert result.exit_code == 2
        assert f"lowwater restore {tier} {path}" in result.stderr
        assert "--create" not in result.stderr
        assert not directory.exists()
    monkeypatch.delenv("LOWWATER_TIER__URI")
    file = directory.parent / "lowwater.toml"
    file.write_text(f'[tier]\nuri = "{tier}"\n')
    follow(run("--config", str(file), "get", path, "b", "k").stderr)
    assert run("get", path, "b", "k007").stdout == "7"


def test_what_lies_in_the_directory_is_named_and_left_alone(lost: tuple[Path, str, str]) -> None:
    """A restore would refuse it, so the command names another directory."""
    directory, tier, expected = lost
    directory.mkdir()
    (directory / "notes.txt").write_text("mine")
    error = refused(DatabaseMissing, directory, tier=tier)
    assert "notes.txt" in error.hint
    assert "notes.txt" in refused(AlreadyExists, directory, tier=tier, on_missing="restore").message
    follow(error.hint, to=directory / "new")
    with lowwater.open(directory / "new") as db:
        assert db.root() == expected


def test_a_database_without_its_log_is_refused(lost: tuple[Path, str, str], tmp_path: Path) -> None:
    """With an archive, without one, and where it was restored: nothing is begun beside its pages."""
    directory, tier, expected = lost
    for given in ({}, {"tier": tier}):
        with lowwater.open(tmp_path / "other") as db:
            db.create_bucket("b")
        shutil.rmtree(tmp_path / "other" / "wal")
        for on_missing in ("refuse", "restore"):
            error = refused(LowwaterError, tmp_path / "other", on_missing=on_missing, **given)
            assert given == {} or isinstance(error, AlreadyExists | DatabaseMissing)
        shutil.rmtree(tmp_path / "other")
    with lowwater.open(directory) as db:
        db.create_bucket("b")
    shutil.rmtree(directory / "wal")
    assert "log is gone" in refused(Corrupt, directory).message
    shutil.rmtree(directory)
    lowwater.restore(tier, directory)
    shutil.rmtree(directory / "wal")
    for on_missing in ("refuse", "restore"):
        error = refused(NotFound, directory, tier=tier, on_missing=on_missing)
    assert error.hint in run("get", str(directory), "b", "k").stderr
    follow(error.hint, to=tmp_path / "again")
    with lowwater.open(tmp_path / "again") as db:
        assert db.root() == expected


def test_a_word_that_is_none_and_a_restore_from_nowhere_are_refused(tmp_path: Path) -> None:
    """An empty database in the place of a lost one is what nobody asked for."""
    for given in ({"on_missing": "ignore"}, {"on_missing": "restore"}):
        refused(InvalidConfig, tmp_path / "db", **given)
    lowwater.open(tmp_path / "db").close()
    lowwater.open(tmp_path / "db", on_missing="restore").close()


def test_what_is_wrong_with_the_call_or_the_directory_makes_nothing(tmp_path: Path) -> None:
    """A registry that another log uses, and a file where the pages go."""
    used = CollectorRegistry()
    with lowwater.open(tmp_path / "one", registry=used):
        refused(InputError, tmp_path / "db", registry=used)
        refused(InputError, tmp_path / "db", registry=used, tier=f"file://{tmp_path}/archive")
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "pages").write_text("a file")
    refused(NotFound, tmp_path / "db")


# ---------------------------------------------------------------------------- restored


def test_a_lost_directory_is_restored_and_goes_on(lost: tuple[Path, str, str]) -> None:
    """As often as it is lost; one that is there is opened, whatever was asked for."""
    directory, tier, expected = lost
    for number in range(2):
        with lowwater.open(directory, tier=tier, on_missing="restore", create=bool(number)) as db:
            assert number or db.root() == expected
            db.put("b", "new", b"%d" % number)
            db.ship(timeout=120)
        with lowwater.open(directory, tier=tier, on_missing="restore") as db:
            assert db.get("b", "new").value == b"%d" % number
        shutil.rmtree(directory)


def test_what_ends_it_early_is_gone_on_with(lost: tuple[Path, str, str]) -> None:
    """At each named point: who only opens is told, and who restores goes on."""
    directory, tier, expected = lost
    points = sorted(
        name for name in registry if name.startswith("restore.") and name != "restore.before_fork"
    )
    assert len(points) > 5
    for name in points:

        def end(name: str = name) -> None:
            raise SimulatedCrash(name)

        with registry[name].armed(end), pytest.raises(SimulatedCrash):
            lowwater.open(directory, tier=tier, on_missing="restore")
        assert (directory / RESTORING).exists()
        assert "has not ended" in refused(NotFound, directory, tier=tier).message
        assert "has not ended" in run("get", str(directory), "b", "k").stderr
        with lowwater.open(directory, on_missing="restore") as db:  # it is noted there from where
            assert db.root() == expected
        assert (directory / ORIGIN).exists()
        shutil.rmtree(directory)


def test_another_restore_that_was_begun_there_is_not_gone_on_with(lost: tuple[Path, str, str]) -> None:
    """A clone as of some seq is not what was lost."""
    directory, tier, _ = lost

    def end() -> None:
        raise SimulatedCrash("here")

    with registry["restore.after_note"].armed(end), pytest.raises(SimulatedCrash):
        lowwater.restore(tier, directory, 5)
    assert "seq 5" in refused(AlreadyExists, directory, tier=tier, on_missing="restore").message
    lowwater.restore(tier, directory, 5)
    with lowwater.open(directory) as db:
        assert db.marks().applied < 20


OPEN = """
import sys
import lowwater
try:
    db = lowwater.open(sys.argv[1], tier=sys.argv[2], on_missing=sys.argv[3])
except lowwater.errors.LowwaterError as error:
    print(type(error).__name__)
else:
    print("opened", len(db.buckets()), flush=True)
    sys.stdin.read()
    db.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_history", [True, False])
def test_of_two_at_once_one_has_the_database(tmp_path: Path, *, has_history: bool) -> None:
    """The other one is told, and nothing is lost by it."""
    tier = f"file://{tmp_path}/archive"
    directory = tmp_path / "db"
    if has_history:
        make(directory, tier)
        shutil.rmtree(directory)
    command = [sys.executable, "-c", OPEN, str(directory), tier, "restore"]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    told = []
    for each in processes:
        assert each.stdout is not None
        told.append(each.stdout.readline().strip())
    for each in processes:
        each.communicate()
    assert told.count(f"opened {int(has_history)}") == 1
    assert {*told} <= {f"opened {int(has_history)}", "DirectoryLocked", "NotFound", "OtherCluster"}
    with lowwater.open(directory, tier=tier) as db:
        assert len(db.buckets()) == has_history
        db.create_bucket("more")
        db.ship(timeout=120)


def test_who_has_it_open_is_not_disturbed(lost: tuple[Path, str, str]) -> None:
    """By another process that finds it, restored and open."""
    directory, tier, _ = lost
    with lowwater.open(directory, tier=tier, on_missing="restore") as db:
        for on_missing in ("refuse", "restore"):
            with pytest.raises(DirectoryLocked):
                lowwater.open(directory, tier=tier, on_missing=on_missing)  # type: ignore[arg-type]
        db.put("b", "k", b"v")
        db.ship(timeout=120)


# ---------------------------------------------------------------------------- begun


def test_an_archive_without_a_history_is_begun_with(tmp_path: Path) -> None:
    """Its directory was lost before anything was shipped: nothing is wedged by that."""
    tier = f"file://{tmp_path}/archive"
    for number in range(3):
        with lowwater.open(tmp_path / "db", tier=tier, on_missing="restore") as db:
            db.create_bucket("b")
            assert next(each.seq for each in db.log()) == 1
        if number < 2:
            shutil.rmtree(tmp_path / "db")
    refused(NotFound, tmp_path / "other", tier=tier, create=False)
    with lowwater.open(tmp_path / "db", tier=tier) as db:
        db.ship(timeout=120)
    assert [each for each in lowwater.check(tier) if each.severity == "error"] == []
    refused(DatabaseMissing, tmp_path / "other", tier=tier)


@pytest.mark.parametrize("name", ["begin.before_archive", "begin.after_archive"])
def test_a_beginning_that_is_ended_early_is_begun_again(tmp_path: Path, name: str) -> None:
    """Nothing is here before the archive is there."""
    tier = f"file://{tmp_path}/archive"

    def end() -> None:
        raise SimulatedCrash(name)

    with registry[name].armed(end), pytest.raises(SimulatedCrash):
        lowwater.open(tmp_path / "db", tier=tier)
    assert not (tmp_path / "db").exists()
    make(tmp_path / "db", tier)


@pytest.mark.parametrize("first", [bytes(4096), b"LW"])
def test_a_log_whose_first_entry_was_not_written_is_none(tmp_path: Path, first: bytes) -> None:
    """What a crash leaves between the file and its first entry. Others may have begun the archive since."""
    tier = f"file://{tmp_path}/archive"
    (tmp_path / "db" / "wal").mkdir(parents=True)
    (tmp_path / "db" / "wal" / "current.log").write_bytes(first)
    lowwater.open(tmp_path / "other", tier=tier).close()
    with lowwater.open(tmp_path / "db", tier=tier) as db:
        db.create_bucket("b")
        db.ship(timeout=120)
    shutil.rmtree(tmp_path / "db")
    (tmp_path / "db" / "wal").mkdir(parents=True)
    (tmp_path / "db" / "wal" / "current.log").write_bytes(first)
    refused(DatabaseMissing, tmp_path / "db", tier=tier)


def test_a_damaged_log_is_no_missing_one(tmp_path: Path) -> None:
    """What was written there is not begun anew."""
    tier = f"file://{tmp_path}/archive"
    with lowwater.open(tmp_path / "db", tier=tier) as db:
        db.create_bucket("b")
    current = tmp_path / "db" / "wal" / "current.log"
    data = bytearray(current.read_bytes())
    data[70] ^= 1
    current.write_bytes(data)
    refused(Corrupt, tmp_path / "db", tier=tier)


def test_two_that_begin_one_archive_are_told_apart(tmp_path: Path) -> None:
    """Both may open, as copies of one directory may: who ships first goes on."""
    tier = f"file://{tmp_path}/archive"
    with lowwater.open(tmp_path / "one", tier=tier) as one, lowwater.open(tmp_path / "two", tier=tier) as two:
        one.create_bucket("b")
        one.ship(timeout=120)
        two.create_bucket("other")
        with pytest.raises(lowwater.errors.Fenced):
            two.ship(timeout=120)
    lowwater.restore(tier, tmp_path / "again", clone=True)
    with lowwater.open(tmp_path / "again") as db:
        assert db.buckets() == ["b"]


def test_the_archive_of_a_clone_that_has_shipped_nothing_is_not_begun_with(
    lost: tuple[Path, str, str], tmp_path: Path
) -> None:
    """Its history is its parent's."""
    directory, tier, _ = lost
    lowwater.restore(tier, directory, clone=True)
    own = f"file://{tmp_path}/own"
    lowwater.open(directory, tier=own).close()
    shutil.rmtree(directory)
    refused(DatabaseMissing, directory, tier=own)


def test_a_history_without_its_owner_is_not_begun_with(lost: tuple[Path, str, str], tmp_path: Path) -> None:
    """Whoever wrote there may still live."""
    directory, tier, _ = lost
    (tmp_path / "archive" / "cluster.cbor").rename(tmp_path / "kept")
    for on_missing in ("refuse", "restore"):
        refused(Corrupt, directory, tier=tier, on_missing=on_missing)
    assert not (tmp_path / "archive" / "cluster.cbor").exists()


class Orders:
    """Orders nothing but what it is told to feed."""

    def get_low_water_mark(self) -> int:
        return 0

    def fetch_log_entries(self, seq_first: int, seq_last: int) -> Iterator[Any]:
        return iter(())

    def propose(self, entry: object) -> None:
        """Best effort."""


def test_an_engine_that_is_fed_begins_beside_the_history_that_it_will_have(
    lost: tuple[Path, str, str],
) -> None:
    """A replica that has lost its disk gets an empty directory, and all entries again."""
    directory, tier, _ = lost
    with lowwater.Engine(directory, tier=tier, orchestrator=Orders()) as engine:
        engine.apply_log_entry(1, lowwater.Create(b"c" * 16, b"s" * 16))
        engine.apply_log_entry(2, lowwater.CreateBucket("b"))
        assert engine.buckets() == ["b"]


# ---------------------------------------------------------------------------- stores that cannot be asked


def test_a_folder_that_is_away_is_no_empty_archive(tmp_path: Path) -> None:
    """A new database is refused, and one that is there opens, which asks for nothing."""
    share = tmp_path / "share"
    share.mkdir()
    tier = f"file://{share}/archive"
    expected = make(tmp_path / "db", tier)
    share.rename(tmp_path / "unmounted")
    for on_missing in ("refuse", "restore"):
        assert "mount" in refused(StoreMissing, tmp_path / "new", tier=tier, on_missing=on_missing).hint
        with lowwater.open(tmp_path / "db", tier=tier, on_missing=on_missing) as db:  # type: ignore[arg-type]
            assert db.root() == expected
    refused(StoreMissing, tmp_path / "new", tier=tier, create=False)
    for kind in (lowwater.open, lowwater.Engine):
        refused(StoreMissing, tmp_path / "new", open_it=kind, tier=tier)
    assert not share.exists()


def test_a_network_that_is_down_makes_nothing(tmp_path: Path) -> None:
    """Nobody listens, or nobody answers."""
    keys = "access_key_id=x&secret_access_key=very-secret&region=us-east-1"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (1, silent.getsockname()[1]):
            tier = f"s3://bucket/prefix?endpoint=http://127.0.0.1:{port}&{keys}"
            for given in ({}, {"on_missing": "restore"}, {"create": False}):
                error = refused(StoreUnavailable, tmp_path / "db", tier=tier, config={"tier": QUICK}, **given)
                assert "there is no database" in error.hint
                assert "very-secret" not in f"{error} {error.hint}"


@pytest.mark.slow
def test_a_lost_directory_comes_back_from_s3(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command names the endpoint, and no secret; those come from where they always do."""
    options = s3_server.options
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret_access_key"])
    uri = s3_server.uri("missing/one")
    config = {"tier": {"uri": uri, "options": options}}
    with lowwater.open(tmp_path / "db", config=config) as db:
        db.create_bucket("b")
        db.put("b", "k", b"v")
        db.ship(timeout=120)
        expected = db.root()
    shutil.rmtree(tmp_path / "db")
    error = refused(DatabaseMissing, tmp_path / "db", config=config)
    assert options["secret_access_key"] not in f"{error} {error.hint}"
    assert s3_server.endpoint in error.hint
    follow(error.hint)
    with lowwater.open(tmp_path / "db", config=config) as db:
        assert db.root() == expected
    shutil.rmtree(tmp_path / "db")
    with lowwater.open(tmp_path / "db", config=config, on_missing="restore") as db:
        assert db.root() == expected
    wrong = {"tier": {"uri": uri, "options": {**options, "secret_access_key": "wrong-secret-key-wrong"}}}
    for given in ({}, {"on_missing": "restore"}):
        error = refused(StoreDenied, tmp_path / "new", config=wrong, **given)
        assert "wrong-secret" not in f"{error} {error.hint}"
    refused(
        StoreMissing, tmp_path / "new", config={"tier": {"uri": "s3://no-such-bucket/x", "options": options}}
    )


@pytest.mark.slow
def test_a_network_that_fails_on_the_way_makes_nothing(s3_server: S3Server, tmp_path: Path) -> None:
    """At each request, by an error, by silence, or by a list of nothing where there is a history."""
    uri = s3_server.uri("missing/faults")
    make(tmp_path / "db", uri, config=_config(uri, s3_server.options))
    shutil.rmtree(tmp_path / "db")
    with proxied(s3_server) as proxy:
        hang = threading.Event()
        try:
            seen: list[Request] = []
            proxy.rule = seen.append
            refused(DatabaseMissing, tmp_path / "db", config=_config(uri, proxy.options))
            assert 2 <= len(seen) <= 10
            assert {each.method for each in seen} <= {"GET", "HEAD"}, "who only asks writes nothing"
            for number in range(len(seen)):
                for answer in (Answer(503, "SlowDown"), Answer(hang=hang)):
                    left = [number]

                    def rule(_: Request, answer: Answer = answer, left: list[int] = left) -> Answer | None:
                        left[0] -= 1
                        return answer if left[0] < 0 else None

                    proxy.rule = rule
                    refused(LowwaterError, tmp_path / "db", config=_config(uri, proxy.options))
                    refused(
                        LowwaterError,
                        tmp_path / "db",
                        config=_config(uri, proxy.options),
                        on_missing="restore",
                    )
            nothing = (
                b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'
            )
            proxy.rule = lambda request: Answer(content=nothing) if request.is_list else None
            error = refused(LowwaterError, tmp_path / "db", config=_config(uri, proxy.options))
            assert not isinstance(error, NotFound)
        finally:
            hang.set()


def _config(uri: str, options: dict[str, str]) -> dict[str, Any]:
    return {"tier": {"uri": uri, "options": options, **QUICK, "timeout_ms": 2000}}


@pytest.mark.slow
def test_an_archive_that_cannot_be_written_makes_nothing(s3_server: S3Server, tmp_path: Path) -> None:
    """A public one, or with credentials that only read: it can be cloned, and not gone on with."""

    def reads_only(request: Request) -> Answer | None:
        return None if request.method in ("GET", "HEAD") else Answer(403, "AccessDenied")

    uri = s3_server.uri("missing/public")
    make(tmp_path / "db", uri, config=_config(uri, s3_server.options))
    shutil.rmtree(tmp_path / "db")
    with proxied(s3_server) as proxy:
        proxy.rule = reads_only
        config = _config(uri, proxy.options)
        refused(DatabaseMissing, tmp_path / "db", config=config)
        refused(StoreReadOnly, tmp_path / "db", config=config, on_missing="restore")
        refused(StoreReadOnly, tmp_path / "db", config=_config(s3_server.uri("missing/new"), proxy.options))
        lowwater.restore(uri, tmp_path / "db", clone=True, config=config)
        with lowwater.open(tmp_path / "db", config=config) as db:
            assert db.get("b", "k007").value == b"7"


# ---------------------------------------------------------------------------- regions


def test_a_history_in_any_region_is_one(lost: tuple[Path, str, str], tmp_path: Path) -> None:
    """Where the first store is lost as well, a copy has it, and says how to go on with that."""
    directory, tier, expected = lost
    for number in range(2):
        first = f"file://{tmp_path}/first {number}"
        for on_missing in ("refuse", "restore"):
            config = {"tier": {"regions": [f"file://{tmp_path}/empty", tier]}}
            error = refused(DatabaseMissing, directory, tier=first, config=config, on_missing=on_missing)
            assert tier in error.hint
            assert "first one" in error.hint
        if not number:
            lowwater.open(tmp_path / "other", tier=f"file://{tmp_path}/first 1").close()
    assert not (tmp_path / "empty").exists()
    follow(error.hint)
    with lowwater.open(directory, tier=tier) as db:
        assert db.root() == expected


def test_all_regions_are_asked_before_anything_is_made(tmp_path: Path) -> None:
    """One that does not answer may have the history; two that begin two clusters are one too many."""
    first, second = f"file://{tmp_path}/first", f"file://{tmp_path}/second"
    config = {"tier": {"regions": [f"file://{tmp_path}/away/archive"]}}
    refused(StoreMissing, tmp_path / "db", tier=first, config=config)
    assert not (tmp_path / "first").exists()
    lowwater.open(tmp_path / "one", tier=first).close()
    lowwater.open(tmp_path / "two", tier=second).close()
    error = refused(OtherCluster, tmp_path / "db", tier=first, config={"tier": {"regions": [second]}})
    assert first in error.message
    assert second in error.message


def test_regions_belong_to_the_tier_wherever_that_is_named(tmp_path: Path) -> None:
    """By the argument, by what the directory was restored from; where it is named nowhere, that is told."""
    tier, region = f"file://{tmp_path}/archive", f"file://{tmp_path}/region"
    config = {"tier": {"regions": [region], "replication": "sync"}}
    expected = make(tmp_path / "db", tier, config=config)
    for uri in (tier, region):
        assert lowwater.restore(uri, tmp_path / f"copy of {uri[-6:]}", clone=True, full=True).root == expected
    lowwater.restore(tier, tmp_path / "again")
    with lowwater.open(tmp_path / "again", config=config) as db:
        db.put("b", "more", b"1")
        db.ship(timeout=120)
        expected = db.root()
    assert lowwater.restore(region, tmp_path / "third", clone=True, full=True).root == expected
    assert "no uri" in refused(InvalidConfig, tmp_path / "new", config=config).message


# ---------------------------------------------------------------------------- the command that makes one


@pytest.mark.parametrize(
    "arguments",
    [
        ["b", "k", "--if-seq", "5"],
        ["", "k"],
        ["b", "k" * 2000],
        ["b", "k", "--ship"],
        ["b", "k", "--metadata", "a=" + "x" * 70_000],
    ],
)
def test_a_value_that_is_refused_makes_no_database(tmp_path: Path, arguments: list[str]) -> None:
    """It was there, empty, and in the way of a restore."""
    path = str(tmp_path / "db")
    result = run("put", path, *arguments, "--create", stdin=b"v")
    assert result.exit_code == 2, result.stderr
    assert not os.path.exists(path)
    assert run("put", path, "b", "k", "--create", "--if-absent", stdin=b"v").exit_code == 0
    assert run("get", path, "b", "k").stdout == "v"


def test_a_value_that_is_too_large_makes_no_database(tmp_path: Path) -> None:
    """By what the configuration allows."""
    config = tmp_path / "lowwater.toml"
    config.write_text('[wal]\nentry_bytes_max = "1 KiB"\n')
    path = str(tmp_path / "db")
    result = run("--config", str(config), "put", path, "b", "k", "--create", stdin=bytes(2000))
    assert result.exit_code == 2, result.stderr
    assert not os.path.exists(path)
