"""Lists that lie: whoever asks for one gets the archive's newest state, or is told that something is wrong.

Always true of what is tested here: every object is there and sound, and each request for one is answered as
it should be. Lists alone are empty, end too early, lack names, are old, or say names twice; of everything, or
of one folder. When they tell the truth again, everything goes on, and nothing that counted is gone.

`LIST_LIES=200` tells as many as have to be seen through once.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.asked import Asked, in_a_child
from tests.recovery.everything import BUCKET, Everything, ask_all, close, scanned
from tests.tiering.proxy import Answer, Request, proxied

import lowwater
from lowwater.engine.database.core import EngineOptions
from lowwater.errors import Fenced, LowwaterError
from lowwater.recovery.restore import restore_with
from lowwater.tiering.folder_store import FolderStore
from lowwater.tiering.names import EPOCHS, MANIFESTS, WAL, parse
from lowwater.tiering.scrub import Scrub
from lowwater.tiering.store import FoundObject
from lowwater.tiering.testing.s3_server import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server
from lowwater.tiering.tiered_opening import open_tiered

COUNT = int(os.environ.get("LIST_LIES", "40"))
SEED = 20_261_122
NEW = "0/new"
# A store that lies may keep a shipper waiting; one that does not answers within this, however busy it is.
WAITS_S = 3.0
SHIPS_WITHIN_S = 300.0

ABOUT = {"everything": "", "claims": EPOCHS, "manifests": MANIFESTS, "segments": WAL}


class Case(NamedTuple):
    number: int
    asked: str
    lie: str
    about: str

    def __str__(self) -> str:
        return f"{self.asked}-{self.lie}-{self.about}-{self.number}"


class LyingStore(FolderStore):
    """A real folder, whose lists lie once they are told to. `old` is a list as it was once."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory), uri=f"file://{directory}")
        self.case: Case | None = None
        self.old: set[str] = set()

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[FoundObject]:
        found = list(super().list(prefix, start_after))
        if self.case is None:
            return iter(found)
        about = ABOUT[self.case.about]
        theirs = [each for each in found if each.name.startswith(about)]
        told = {each.name for each in self._told(theirs)}
        kept = [each for each in found if not each.name.startswith(about) or each.name in told]
        twice = {each.name for each in theirs} if self.case.lie == "twice" else set()
        return iter([each for each in kept for _ in range(1 + (each.name in twice))])

    def _told(self, found: list[FoundObject]) -> list[FoundObject]:
        assert self.case is not None
        # How many there are differs a little from run to run, and what is left out must not.
        lie, turn = self.case.lie, (self.case.number + self.case.number // DRAWN) % 3
        if lie == "nothing":
            return []
        if lie == "cut":
            return found[: len(found) * (turn + 1) // 4]
        if lie == "without the newest":
            # The newest of each folder, which is the last of its names.
            last = {each.name.rpartition("/")[0]: each.name for each in found}
            return [each for each in found if each.name not in last.values()]
        if lie == "with holes":
            return [each for at, each in enumerate(reversed(found)) if at % 3 != turn][::-1]
        if lie == "old":
            return [each for each in found if each.name in self.old]
        return found


LIES = ("nothing", "cut", "without the newest", "with holes", "old", "twice")
ASKED = ("restore", "open", "ship", "scrub", "fence")
# So many differ in more than in where a list is cut.
DRAWN = len(ASKED) * len(LIES) * len(ABOUT)


def cases(count: int) -> list[Case]:
    """Every lie about everything that is asked, in an order that a share of them has some of each of."""
    rng = random.Random(SEED)
    drawn = list(itertools.product(ASKED, LIES, ABOUT))
    rng.shuffle(drawn)
    return [Case(number, *drawn[number % len(drawn)]) for number in range(count)]


# ---------------------------------------------------------------------------- what is asked


class Believers:
    def __init__(self, everything: Everything, case: Case) -> None:
        everything.bring("archived")
        self.place, self.data, self.archive = everything.place, everything.data, everything.archive
        self.expected = everything.expected["archived"].copy()
        self.case = case
        self.asked = Asked()

    def run(self) -> dict[str, Any]:
        getattr(self, f"_{self.case.asked}")()
        return self.asked.told()

    def store(self, *, lies: bool) -> LyingStore:
        """The archive: what is old then is half of what is here now."""
        store = LyingStore(self.archive)
        if lies:
            self.begin(store)
        return store

    def begin(self, store: LyingStore) -> None:
        names = sorted(str(e.relative_to(self.archive)) for e in self.archive.rglob("*") if e.is_file())
        parsed = {name: parse(name) for name in names}
        seq = self.expected.then_seq
        claims = [name for name, each in parsed.items() if each is not None and each.type == "epoch"]
        store.old = {n for n, e in parsed.items() if e is None or e.seq <= seq} - set(claims[-1:])
        store.case = self.case

    def restored(self, to: str, *, lies: bool) -> lowwater.Database | None:
        with_store = self.store(lies=lies)
        try:
            restore_with(with_store, str(self.place / to))
        except LowwaterError as error:
            self.asked.detected.append(f"restore: {type(error).__name__}: {error}")
            return None
        finally:
            with_store.close()
        try:
            return lowwater.open(self.place / to)
        except LowwaterError as error:
            # Whoever was told of no error relies on what was restored.
            self.asked.wrong.append(f"what was restored does not open: {type(error).__name__}: {error}")
            return None

    def opened(self, *, lies: bool) -> tuple[lowwater.Database, LyingStore] | None:
        store = self.store(lies=lies)
        options = EngineOptions(checkpoint_interval_s=None)
        try:
            return open_tiered(str(self.data), [store], options=options, create=False), store
        except LowwaterError as error:
            self.asked.detected.append(f"open: {type(error).__name__}: {error}")
            return None

    def require_restored(self, what: str) -> None:
        """That an honest list leads to everything."""
        before = len(self.asked.detected)
        db = self.restored(f"honest {what}", lies=False)
        if db is None:
            self.asked.wrong.append(f"it cannot be restored any more: {self.asked.detected[-1]}")
            return
        self.ask_now(db)
        if len(self.asked.detected) > before:
            self.asked.wrong.append(f"what was restored is not whole: {self.asked.detected[before]}")

    def ask_now(self, db: lowwater.Database) -> None:
        self.asked.ask("scan", lambda: scanned(db), sorted(self.expected.now.items()))
        close(db, self.asked)

    def put(self, db: lowwater.Database, key: str) -> None:
        db.put(BUCKET, key, key.encode())
        self.expected.now[key] = key.encode()

    # ---- one each

    def _restore(self) -> None:
        db = self.restored("to", lies=True)
        if self.asked.wrong:
            return
        if db is None:
            db = self.restored("to", lies=False)
            if db is None:
                self.asked.wrong.append(f"the directory is wedged: {self.asked.detected[-1]}")
                return
        ask_all(db, self.expected, self.asked, older=True)
        close(db, self.asked)

    def _open(self) -> None:
        found = self.opened(lies=True)
        if found is not None:
            db, _ = found
            ask_all(db, self.expected, self.asked, older=True)
            self.put(db, NEW)
            self.asked.call("ship", lambda: db.ship(timeout=WAITS_S), 0)
            close(db, self.asked)
        self._go_on()

    def _ship(self) -> None:
        found = self.opened(lies=False)
        assert found is not None
        db, store = found
        db.ship(timeout=SHIPS_WITHIN_S)
        self.begin(store)
        self.put(db, NEW)
        self.asked.call("ship", lambda: db.ship(timeout=WAITS_S), 0)
        store.case = None
        close(db, self.asked)
        self._go_on()

    def _go_on(self) -> None:
        """The same directory with lists that do not lie."""
        found = self.opened(lies=False)
        if found is None:
            self.asked.wrong.append(f"it does not open again: {self.asked.detected[-1]}")
            return
        db, _ = found
        self.put(db, "0/newer")
        try:
            db.ship(timeout=SHIPS_WITHIN_S)
        except LowwaterError as error:
            self.asked.wrong.append(f"it ships no more: {type(error).__name__}: {error}")
        self.ask_now(db)
        self.require_restored("afterwards")

    def _scrub(self) -> None:
        store = self.store(lies=True)
        try:
            scrub = Scrub(store)
            findings = list(scrub.findings())
        except LowwaterError as error:
            self.asked.detected.append(f"scrub: {type(error).__name__}: {error}")
            return
        finally:
            store.close()
        wrong = [f"{each.where}: {each.what}" for each in findings if each.severity != "note"]
        if wrong:
            self.asked.wrong.append(f"a sound archive is called damaged: {wrong[0]}")
        newest = max(parsed.seq for e in self.archive.glob("manifest/0*/*") if (parsed := parse(_name(e))))
        if scrub.manifest is None or scrub.manifest.seq != newest:
            self.asked.wrong.append("an older state is called sound")

    def _fence(self) -> None:
        found = self.opened(lies=False)
        assert found is not None
        db, store = found
        # So that its claim is there before that of the other one, however busy this machine is.
        self.put(db, NEW)
        db.ship(timeout=SHIPS_WITHIN_S)
        other = self.restored("other", lies=False)
        assert other is not None
        self.put(other, "0/other")
        other.ship(timeout=SHIPS_WITHIN_S)
        other.close()
        # What it lacks that is old is what the other one has written.
        self.begin(store)
        store.old = {name for name in store.old if self.is_ours(name, db.epoch)}
        db.put(BUCKET, NEW, b"of a line that has ended")
        try:
            db.ship(timeout=SHIPS_WITHIN_S)
        except LowwaterError as error:
            self.asked.detected.append(f"ship: {type(error).__name__}: {error}")
        else:
            self.asked.wrong.append("what was shipped counts for nobody, and it was not said")
        store.case = None
        try:
            db.put(BUCKET, NEW, b"of a line that has ended")
            db.ship(timeout=SHIPS_WITHIN_S)
        except Fenced:
            pass
        else:
            self.asked.wrong.append("it ships although somebody else goes on with the log")
        close(db, self.asked)
        self.require_restored("afterwards")

    def is_ours(self, name: str, epoch: int) -> bool:
        parsed = parse(name)
        return parsed is None or parsed.epoch <= epoch


def _name(path: Path) -> str:
    return "/".join(path.parts[-3:])


# ---------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    return Everything(tmp_path_factory.mktemp("lists"))


def believed(everything: Everything, case: Case) -> dict[str, Any]:
    return Believers(everything, case).run()


@pytest.mark.long
@pytest.mark.parametrize("case", cases(COUNT), ids=str)
def test_a_list_that_lies_is_seen_through_or_told(everything: Everything, case: Case) -> None:
    """A list says what is there, and never what is not: that is known of a request for it alone."""
    found = in_a_child(partial(believed, everything, case))
    if path := os.environ.get("DAMAGE_REPORT"):
        with open(path, "a") as file:
            file.write(f"{case}\t{found}\n")
    assert found["wrong"] == []


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["restore", "ship", "scrub"])
def test_a_list_that_does_not_lie_is_believed(everything: Everything, asked: str) -> None:
    """Else errors would prove nothing."""
    case = Case(0, asked, "none", "everything")
    assert in_a_child(partial(believed, everything, case)) == {"wrong": [], "detected": []}


def html(_: Request) -> bytes:
    return b"<!DOCTYPE html><html><body>" + escape("Sign in & go on").encode() + b"</body></html>"


def no_names(_: Request) -> bytes:
    return b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'


def nothing(_: Request) -> bytes:
    return b""


@pytest.mark.long
@pytest.mark.parametrize("asked", ["restore", "check"])
@pytest.mark.parametrize("answer", [html, no_names, nothing])
def test_an_answer_of_a_server_that_is_no_list_is_not_believed(
    everything: Everything,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    answer: Callable[[Request], bytes],
) -> None:
    """The page of a portal comes with 200, whatever was asked for."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    everything.bring("archived")
    served = everything.place / "s3"
    (served / "buckets" / "lowwater").mkdir(parents=True)
    everything.archive.rename(served / "buckets" / "lowwater" / "archive")

    def rule(request: Request) -> Answer | None:
        if "list-type=2" not in request.query:
            return None
        body = answer(request)
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return Answer(raw=head.encode() + body)

    expected = everything.expected["archived"]
    with S3Server(served) as server, proxied(server) as proxy:
        proxy.rule = rule
        uri = f"{server.uri('archive')}?endpoint={proxy.endpoint}&region=us-east-1"
        config: dict[str, Any] = {"tier": {"attempts_max": 2}}
        to = everything.place / "to"
        try:
            if asked == "restore":
                lowwater.restore(uri, to, clone=True, config=config)
            else:
                findings = list(lowwater.check(uri, config=config))
        except LowwaterError:
            assert asked == "check" or not (to / "origin").exists()
            return
        if asked == "check":
            # Every object that it has to have was asked for by its name.
            assert [each.what for each in findings if each.severity != "note"] == []
            assert [each for each in findings if "the store's list lacks" in each.what]
            return
        with lowwater.open(to) as db:
            assert scanned(db) == sorted(expected.now.items())
