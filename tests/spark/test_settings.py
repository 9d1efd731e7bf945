"""How a store is called: what the driver is told reaches every task."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from pyspark.sql.types import LongType, StructField, StructType
from tests.tiering.proxy import Answer, Proxy, proxied

import lowwater
from lowwater.errors import InvalidConfig, NotFound, StoreUnavailable
from lowwater.spark.export import read_exported
from lowwater.spark.plan import Part, open_place, parts, pin
from lowwater.spark.source import LowwaterSource
from lowwater.tiering.testing.s3_server import S3Server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    path = tmp_path_factory.mktemp("settings")
    with S3Server(path / "s3") as server:
        tier = {"uri": server.uri("prefix"), "options": server.options}
        with lowwater.open(path / "db", config={"tier": tier}) as db:
            db.create_bucket("b")
            db.put("b", "k", b"value")
            db.ship()
        yield server


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    with proxied(server) as proxy:
        yield proxy


def asked_of_a_task(proxy: Proxy, read: Callable[[], object], answer: Answer) -> int:
    """How often a task asks for a segment before it gives up."""
    proxy.rule = lambda request: answer if "/wal/" in unquote(request.path) else None
    proxy.requests.clear()
    with pytest.raises(StoreUnavailable):
        read()
    return sum("/wal/" in unquote(each.path) for each in proxy.requests)


def read_part(packed: bytes) -> bytes:
    """As a process elsewhere does."""
    part: Part = pickle.loads(packed)
    store = open_place(part.place)
    try:
        return store.read(part.pieces[0].name)
    finally:
        store.close()


def test_options_of_a_reader_reach_its_tasks(proxy: Proxy) -> None:
    """A store that hangs is given up after the time that was asked for, as often as was asked for."""
    options = {f"store.{name}": value for name, value in proxy.options.items()}
    options |= {"path": proxy.uri("prefix"), "tier.timeout_ms": "300", "tier.attempts_max": "2"}
    reader = LowwaterSource(options).reader(StructType([StructField("seq", LongType())]))
    packed = pickle.dumps((reader, reader.partitions()))

    def read() -> None:
        found, partitions = pickle.loads(packed)
        for each in partitions:
            list(found.read(each))

    ended = threading.Event()
    try:
        assert asked_of_a_task(proxy, read, Answer(hang=ended)) == 2
    finally:
        ended.set()


def test_what_the_drivers_environment_says_reaches_tasks(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors have an environment of their own."""
    monkeypatch.setenv("LOWWATER_TIER__ATTEMPTS_MAX", "1")
    pinned = pin(proxy.uri("prefix"), proxy.options)
    (part,) = parts(pinned)
    packed = pickle.dumps(part)
    monkeypatch.delenv("LOWWATER_TIER__ATTEMPTS_MAX")
    unavailable = Answer(503, "SlowDown", "Please reduce your request rate.")
    assert asked_of_a_task(proxy, lambda: read_part(packed), unavailable) == 1
    # And an option wins over both.
    monkeypatch.setenv("LOWWATER_TIER__ATTEMPTS_MAX", "1")
    proxy.rule = None
    (part,) = parts(pin(proxy.uri("prefix"), {**proxy.options, "tier.attempts_max": "3"}))
    packed = pickle.dumps(part)
    assert asked_of_a_task(proxy, lambda: read_part(packed), unavailable) == 3


def test_a_setting_that_there_is_not_is_an_error(tmp_path: Path) -> None:
    """With the nearest one, and before anything is read."""
    with pytest.raises(InvalidConfig) as caught:
        pin(str(tmp_path), {"tier.timeout": "1"})
    assert "tier.timeout_ms" in caught.value.hint
    with pytest.raises(InvalidConfig, match="timeout_ms"):
        pin(str(tmp_path), {"tier.timeout_ms": "soon"})
    with pytest.raises(InvalidConfig, match="no name of an option"):
        pin(str(tmp_path), {1: "x"})  # type: ignore[dict-item]
    with pytest.raises(NotFound, match="nothing was exported"):
        read_exported(None, f"file://{tmp_path}", {"tier.timeout_ms": "7000"})  # type: ignore[arg-type]
