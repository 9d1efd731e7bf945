"""Uploads that a network changes on their way to real servers, by the public names: nothing counts as
shipped, and nothing is purged, that the store has not as it was written.

All is shipped, and purged here, then the directory is lost: what was acknowledged is back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from tests.tiering.proxy import Answer, Proxy, Request, keep_conditions, proxied
from tests.tiering.servers import MotoServer, Served
from tests.tiering.whole_cycle import BUCKET, Life

from lowwater.errors import LowwaterError, StoreCorrupt
from lowwater.tiering.open_store import open_store
from lowwater.tiering.store import Store
from lowwater.tiering.testing.s3_server import S3Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

# The others are in test_verified_writes.py, on a store in memory.
NAMES = ("wal/", "checkpoints/", "data/packs/")
# The one says the MD5 of an object that came in parts, the other that of the MD5s of its parts.
KINDS = ("rclone", "moto")


@pytest.fixture(scope="module")
def servers(s3_server: S3Server) -> Iterator[Callable[[str], Served]]:
    with ExitStack() as running:
        yield cache(lambda kind: s3_server if kind == "rclone" else running.enter_context(MotoServer()))


@pytest.fixture(params=KINDS)
def proxy(request: pytest.FixtureRequest, servers: Callable[[str], Served]) -> Iterator[Proxy]:
    with proxied(servers(request.param)) as proxy:
        yield proxy


class Flips:
    """Every upload of the objects below a folder gets there with another bit, while it is on."""

    def __init__(self, names: str) -> None:
        self.names = names
        self.count = 0
        self.is_on = True

    def __call__(self, request: Request) -> Answer | None:
        is_upload = request.method in ("PUT", "POST") and bool(request.size)
        if not self.is_on or not is_upload or self.names not in unquote(request.path):
            return None
        self.count += 1
        return Answer(flip_sent=request.size * 4)


def eagerly_purging(life: Life) -> dict[str, Any]:
    return {**life.config, "retention": {"age_max_s": 0, "check_interval_s": 0.1}}


def flipped_segment(store: Store) -> tuple[str, bytes]:
    """Put other bytes in the place of the first segment, of the right size and with the right ends. Its name,
    and what it had."""
    name = min(each.name for each in store.list("wal/"))
    right = store.read(name)
    wrong = bytearray(right)
    wrong[len(wrong) // 2] ^= 1
    store.replace(name, [wrong], size=len(wrong))
    return name, right


@pytest.mark.parametrize("names", NAMES)
def test_what_was_acknowledged_is_back_whatever_the_network_changed(
    names: str, proxy: Proxy, tmp_path: Path
) -> None:
    life = Life(tmp_path, proxy)
    life.config = eagerly_purging(life)
    flips = Flips(f"/first/{names}")
    proxy.rule = flips
    with life.open("first") as db:
        db.create_bucket(BUCKET)
        life.write(db, keys=1000)
        db.checkpoint()
        while not flips.count:
            with pytest.raises(LowwaterError):
                db.ship(timeout=1)
        if names == "wal/":
            assert (db.marks().purged, db.marks().hwm) == (0, 0)
        flips.is_on = False
        life.write(db)
        db.checkpoint()
        db.ship(timeout=120)
        assert db.shipping().alarm is None
        root = db.root()
    assert life.errors_in(life.uri) == []
    assert life.restore("second", full=True).root == root
    with life.open("second") as db:
        life.require_all(db)


def test_large_objects_are_sent_again_in_parts(proxy: Proxy, tmp_path: Path) -> None:
    """Each part is a request; what the server says of the whole is compared."""
    life = Life(tmp_path, proxy)
    life.config = {**life.config, "wal": {"rotate_max_bytes": "32 MiB", "entry_bytes_max": "16 MiB"}}
    flips = Flips("/first/wal/")
    left = [2]

    def rule(request: Request) -> Answer | None:
        answer = flips(request) if request.size >= 2**20 and left[0] else None
        left[0] -= answer is not None
        return answer

    proxy.rule = rule
    with life.open("first") as db:
        db.create_bucket(BUCKET)
        life.write(db, large_bytes=12_000_000)
        db.ship(timeout=120)
        root = db.root()
    assert flips.count == 2
    assert life.errors_in(life.uri) == []
    assert life.restore("second", clone=True, full=True).root == root


@pytest.mark.parametrize("is_large", [False, True])
def test_what_was_changed_and_never_answered_is_sent_again(
    is_large: bool, s3_server: S3Server, tmp_path: Path
) -> None:
    """The call that is made again below finds an object: its own."""
    with proxied(s3_server) as proxy:
        life = Life(tmp_path, proxy)
        life.config = {**life.config, "wal": {"rotate_max_bytes": "32 MiB", "entry_bytes_max": "16 MiB"}}
        keep = keep_conditions(s3_server)
        changed: list[str] = []
        unanswered: list[str] = []

        def rule(request: Request) -> Answer | None:
            if "/first/wal/" in unquote(request.path):
                if request.method == "PUT" and request.size and not changed:
                    changed.append(request.path)
                    unanswered.extend(() if is_large else changed)
                    return Answer(
                        forward=not is_large, flip_sent=request.size * 4, raw=None if is_large else b""
                    )
                if is_large and request.method == "POST" and "uploadId" in request.query and not unanswered:
                    unanswered.append(request.path)
                    return Answer(forward=True, raw=b"")
            return keep(request)

        proxy.rule = rule
        with life.open("first") as db:
            db.create_bucket(BUCKET)
            life.write(db, **({"large_bytes": 12_000_000} if is_large else {}))
            db.ship(timeout=120)
            assert db.shipping().alarm is None
            root = db.root()
        assert changed
        assert unanswered
        assert life.errors_in(life.uri) == []
        assert life.restore("second", clone=True, full=True).root == root


def test_a_segment_that_is_flipped_under_an_open_database_is_not_purged(proxy: Proxy, tmp_path: Path) -> None:
    """It was seen to be right a moment ago; the store has another ETag for it since."""
    life = Life(tmp_path, proxy)
    with life.open("first") as db:
        db.create_bucket(BUCKET)
        life.write(db, keys=1000)
        db.ship()
        life.write(db)
        db.ship()
        db.flush()
        store: Store = open_store(life.uri)
        name, right = flipped_segment(store)
        with pytest.raises(StoreCorrupt):
            db.purge(db.purgeable_seq())
        assert db.marks().purged == 0
        store.replace(name, [right], size=len(right))
        assert db.purge(db.purgeable_seq()) > 0
        life.require_all(db)
        store.close()


def test_nothing_is_purged_for_an_object_with_other_bytes(proxy: Proxy, tmp_path: Path) -> None:
    """Somebody has put one there that has the right size, and the right ends."""
    life = Life(tmp_path, proxy)
    with life.open("first") as db:
        db.create_bucket(BUCKET)
        life.write(db, keys=1000)
        db.ship()
    store: Store = open_store(life.uri)
    name, right = flipped_segment(store)
    with life.open("first") as db:
        life.write(db)
        db.ship(timeout=60)
        db.flush()
        with pytest.raises(StoreCorrupt) as caught:
            db.purge(db.purgeable_seq())
        assert name in str(caught.value.path)
        assert db.marks().purged == 0
        assert db.shipping().alarm is not None
        store.replace(name, [right], size=len(right))
        assert db.purge(db.purgeable_seq()) > 0
        assert db.shipping().alarm is None
        life.require_all(db)
    store.close()
