"""A restore without a checkpoint fetches segments some at a time ahead, and is else as it was."""

from __future__ import annotations

import threading
from pathlib import Path
from urllib.parse import unquote

import pytest
from tests.tiering.proxy import Answer, Request, proxied

import lowwater
from lowwater.errors import Corrupt
from lowwater.tiering.testing.s3_server import S3Server

SEGMENTS = 7
AT_ONCE = 3
CONFIG = {"shipping": {"uploads_at_once": AT_ONCE}}
ENTRIES = [(f"k{number}", b"%d" % number * 1000) for number in range(SEGMENTS)]


def ship(path: Path, uri: str, config: dict[str, object]) -> None:
    """A segment for each entry, and no checkpoint."""
    config = {"engine": {"checkpoint_entry_interval_s": "none"}, **config}
    with lowwater.open(path, tier=uri, config=config) as db:
        db.create_bucket("b")
        for key, value in ENTRIES:
            db.put("b", key, value)
            db.ship()


def content(path: Path) -> list[tuple[str, bytes]]:
    with lowwater.open(path) as db:
        return [(each.key, each.value) for each in db.scan("b")]


class Held:
    """Has requests for segments wait until so many of them are under way."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._are_enough = threading.Event()
        self._now = 0
        self.most = 0
        self.is_on = True

    def __call__(self, request: Request) -> Answer | None:
        if not self.is_on or request.method != "GET" or "/wal/" not in unquote(request.path):
            return None
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            if self._now == self._count:
                self._are_enough.set()
        if not self._are_enough.wait(25):  # below the time-out of a request
            self.is_on = False  # they will never come
        with self._lock:
            self._now -= 1
        return None


@pytest.mark.slow
def test_segments_are_fetched_as_many_at_once_as_the_setting_says(tmp_path: Path) -> None:
    """One after the other, a restore of a long log waits for the store most of its time."""
    with S3Server(tmp_path / "s3") as server, proxied(server) as proxy:
        tier: dict[str, object] = {"uri": server.uri("prefix"), "options": server.options}
        ship(tmp_path / "original", server.uri("prefix"), {"tier": tier})
        proxy.rule = held = Held(AT_ONCE)
        tier["options"] = proxy.options
        done = lowwater.restore(
            server.uri("prefix"), tmp_path / "to", clone=True, config={"tier": tier, **CONFIG}
        )
        assert done.checkpoint_seq == 0
        assert held.most == AT_ONCE
    assert content(tmp_path / "to") == ENTRIES


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "archive").mkdir()
    ship(tmp_path / "original", f"file://{tmp_path}/archive", {})
    return tmp_path / "archive"


def segments_of(directory: Path) -> list[Path]:
    return sorted(directory.rglob("segment-*.log"))


def test_no_more_wait_on_the_disk_than_are_fetched_and_names_come_in_order(
    tmp_path: Path, archive: Path
) -> None:
    """What fetches ahead must not fill a disk with what has no use yet, nor leave a gap where it ends."""
    wal = tmp_path / "to" / "wal"
    here = threading.get_ident()
    expected = [each.name.rpartition("-")[0] + ".log" for each in segments_of(archive)]  # without the hash
    most, told = 0, []

    def progress(what: str, done: int, total: int) -> None:
        nonlocal most
        assert threading.get_ident() == here
        if what == "log":
            told.append((done, total))
        most = max(most, len(list(wal.glob("*.tmp"))))
        names = [each.name for each in segments_of(wal)]
        assert names == expected[: len(names)]

    lowwater.restore(f"file://{archive}", tmp_path / "to", config=CONFIG, progress=progress)
    assert most <= AT_ONCE
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    assert content(tmp_path / "to") == ENTRIES


@pytest.mark.parametrize("number", [0, 2, SEGMENTS - 1])
def test_a_fault_of_one_ends_it_and_what_came_before_stays(
    tmp_path: Path, archive: Path, number: int
) -> None:
    """With the error of that one, and going on where it was once the object is mended."""
    damaged = segments_of(archive)[number]
    sound = damaged.read_bytes()
    damaged.write_bytes(sound[:100] + bytes([sound[100] ^ 1]) + sound[101:])
    with pytest.raises(Corrupt) as caught:
        lowwater.restore(f"file://{archive}", tmp_path / "to", config=CONFIG)
    assert caught.value.path is not None
    assert caught.value.path.endswith(damaged.name)
    assert len(segments_of(tmp_path / "to" / "wal")) == number
    damaged.write_bytes(sound)
    assert lowwater.restore(f"file://{archive}", tmp_path / "to", config=CONFIG).was_resumed
    assert content(tmp_path / "to") == ENTRIES


def test_who_interrupts_it_leaves_no_thread_and_it_goes_on(tmp_path: Path, archive: Path) -> None:
    """Ctrl-C, or a handler of SIGTERM that raises."""

    def progress(what: str, done: int, total: int) -> None:
        if what == "log" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lowwater.restore(f"file://{archive}", tmp_path / "to", config=CONFIG, progress=progress)
    assert not [each for each in threading.enumerate() if each.name.startswith("lowwater-restore")]
    assert 0 < len(segments_of(tmp_path / "to" / "wal")) < len(segments_of(archive))
    assert lowwater.restore(f"file://{archive}", tmp_path / "to", config=CONFIG).was_resumed
    assert not list((tmp_path / "to" / "wal").glob("*.tmp"))
    assert content(tmp_path / "to") == ENTRIES
