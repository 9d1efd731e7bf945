"""S3 as a store, against a real server: the suite, and what another client sees."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiering.proxy import Answer, Proxy, Request, Rule, keep_conditions, proxied
from tests.tiering.servers import boto_client, pending_uploads

from lowwater.chaos.clock import SeededRandomness
from lowwater.config import TierConfig
from lowwater.engine.seams.real import RealClock, RealRandomness
from lowwater.errors import (
    Closed,
    InvalidConfig,
    LowwaterError,
    StoreCorrupt,
    StoreDenied,
    StoreMissing,
    StoreReadOnly,
    StoreUnavailable,
)
from lowwater.tiering.open_store import open_store
from lowwater.tiering.opendal_store import OpenDalStore
from lowwater.tiering.store import Store
from lowwater.tiering.testing.s3_server import BUCKET, SECRET_ACCESS_KEY, S3Server
from lowwater.tiering.testing.store import LARGE_BYTES, Place, StoreConformance, names, pattern, put


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    with proxied(s3_server) as proxy:
        yield proxy


@pytest.fixture
def prefix() -> str:
    return f"test/{RealRandomness().token(8).hex()}"


@pytest.fixture
def client(s3_server: S3Server) -> Any:
    return boto_client(s3_server.endpoint)


@pytest.fixture
def opened(s3_server: S3Server, prefix: str) -> Callable[..., OpenDalStore]:
    def open_it(**options: Any) -> OpenDalStore:
        store = open_store(s3_server.uri(prefix), options=s3_server.options, **options)
        assert isinstance(store, OpenDalStore)
        return store

    return open_it


class TestS3Store(StoreConformance):
    @pytest.fixture
    def place(self, opened: Callable[..., OpenDalStore]) -> Place:
        return opened


class TestS3StoreThatKeepsConditions(StoreConformance):
    """As S3 itself: it refuses to write over an object."""

    @pytest.fixture
    def place(self, proxy: Proxy, s3_server: S3Server, prefix: str) -> Place:
        proxy.rule = keep_conditions(s3_server)

        def opened() -> Store:
            store = open_store(proxy.server.uri(prefix), options=proxy.options)
            assert isinstance(store, OpenDalStore)
            assert store.refuses_to_overwrite
            return store

        return opened


def test_what_the_server_does_not_refuse_this_side_looks_for(
    opened: Callable[..., OpenDalStore], client: Any, prefix: str
) -> None:
    """rclone accepts the condition and writes over the object."""
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/x", Body=b"1")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/x", Body=b"2", IfNoneMatch="*")
    store = opened()
    assert not store.refuses_to_overwrite
    assert put(store, "x", b"3") is False
    assert store.read("x") == b"2"


class TestS3StoreWithoutRanges(StoreConformance):
    """It answers as the others do."""

    @pytest.fixture
    def place(self, s3_server: S3Server, prefix: str) -> Place:
        config = TierConfig(ranged_reads=False)
        return lambda: open_store(s3_server.uri(prefix), options=s3_server.options, config=config)


def test_without_ranges_an_object_is_asked_for_once_and_as_a_whole(proxy: Proxy, prefix: str) -> None:
    """Whatever is wanted of it; and again where it turned out wrong."""
    config = TierConfig(ranged_reads=False)
    store = open_store(proxy.server.uri(prefix), options=proxy.options, config=config)
    data = pattern(1_000_000)
    put(store, "a", data)
    proxy.requests.clear()
    proxy.rule = lambda request: Answer(flip=8 * 500) if request.method == "GET" else None
    assert store.read("a", 999_000) == data[999_000:]
    wrong = store.read("a", 400, 600)
    assert wrong != data[400:600]
    assert len(wrong) == 200
    assert len(proxy.requests) == 1
    proxy.rule = None
    assert store.read("a", 400, 600) == data[400:600]
    assert store.read("a", 0, 100) == data[:100]
    assert store.read("a", 600, 2_000_000) == data[600:]
    assert [request.method for request in proxy.requests] == ["GET", "GET"]


def test_a_copy_is_made_by_the_server(proxy: Proxy, prefix: str) -> None:
    """No byte of it comes here and goes back."""
    store = open_store(proxy.server.uri(prefix), options=proxy.options)
    data = pattern(LARGE_BYTES)
    store.write("a", [data], size=len(data))
    proxy.requests.clear()
    assert store.copy("a", "b") is True
    sent = [request for request in proxy.requests if request.method != "HEAD"]
    assert [(request.method, request.size) for request in sent] == [("PUT", 0)]
    assert store.read("b") == data


@pytest.mark.parametrize("status", [405, 501])
def test_where_the_server_copies_nothing_the_bytes_pass_through_here(
    proxy: Proxy, prefix: str, status: int
) -> None:
    """A copy of what was asked for is wanted, whoever makes it. It is asked once."""
    store = open_store(proxy.server.uri(prefix), options=proxy.options)
    data = pattern(1_000_000)
    put(store, "a", data)
    answers: list[Request] = []

    def refuse(request: Request) -> Answer | None:
        is_copy = request.method == "PUT" and not request.size
        if is_copy:
            answers.append(request)
        return Answer(status, "NotImplemented", "We do not do this") if is_copy else None

    proxy.rule = refuse
    assert store.copy("a", "b") is True
    assert store.copy("a", "c") is True
    assert store.read("b") == store.read("c") == data
    assert len(answers) == 1


def test_a_copy_that_was_not_made_is_found_out(proxy: Proxy, prefix: str) -> None:
    """Who removes the other one because of it loses both."""
    store = open_store(proxy.server.uri(prefix), options=proxy.options)
    put(store, "a", b"0123456789")
    done = b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>"
    proxy.rule = lambda r: Answer(200, content=done) if r.method == "PUT" and not r.size else None
    with pytest.raises(StoreCorrupt, match="copied"):
        store.copy("a", "b")


def test_another_client_reads_and_lists_what_was_written(
    opened: Callable[..., OpenDalStore], client: Any, prefix: str
) -> None:
    """Plain objects under plain names, whatever way they were sent."""
    store = opened()
    data = pattern(LARGE_BYTES)
    put(store, "small/ü", b"small")
    store.write("large", [data[:1], data[1:]], size=len(data))
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["Contents"]
    assert {found["Key"]: found["Size"] for found in listed} == {
        f"{prefix}/small/ü": 5,
        f"{prefix}/large": len(data),
    }
    assert client.get_object(Bucket=BUCKET, Key=f"{prefix}/large")["Body"].read() == data
    assert client.get_object(Bucket=BUCKET, Key=f"{prefix}/small/ü")["Body"].read() == b"small"
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/theirs", Body=b"theirs")
    assert store.read("theirs") == b"theirs"


def test_a_write_that_fails_half_way_leaves_no_upload(
    opened: Callable[..., OpenDalStore], s3_server: S3Server, prefix: str
) -> None:
    """Its parts would be paid for, for ever."""
    store = opened()

    def parts() -> Iterator[bytes]:
        for _ in range(6):
            yield bytes(5_000_000)
        assert pending_uploads(s3_server, prefix) == [f"{prefix}/a"]
        raise OSError(5, "the disk failed")

    with pytest.raises(OSError, match="the disk failed"):
        store.write("a", parts(), size=40_000_000)
    assert pending_uploads(s3_server, prefix) == []


def test_a_list_of_many_objects_comes_in_pages(
    proxy: Proxy, client: Any, prefix: str, s3_server: S3Server
) -> None:
    """Each when it is asked for."""
    folder = s3_server.data / BUCKET / prefix / "many"
    folder.mkdir(parents=True)
    for number in range(2500):
        (folder / f"{number:05}").write_bytes(b"")
    store = open_store(proxy.server.uri(prefix), options=proxy.options)
    proxy.requests.clear()
    listing = store.list()
    assert next(listing).name == "many/00000"
    assert len(proxy.requests) <= 2
    assert len(list(listing)) == 2499
    assert names(store.list("many/", "many/02498")) == ["many/02499"]


def test_a_range_costs_one_request(proxy: Proxy, prefix: str) -> None:
    """Cold reads are counted in requests."""
    store = open_store(proxy.server.uri(prefix), options=proxy.options)
    put(store, "a", bytes(10_000))
    proxy.requests.clear()
    assert len(store.read("a", 5000, 6000)) == 1000
    assert len(store.read("a")) == 10_000
    assert store.stat("a").size == 10_000
    assert [request.method for request in proxy.requests] == ["GET", "GET", "HEAD"]


# ---- what goes wrong


def failing(method: str, answer: Answer, *, times: int) -> Rule:
    left = [answer] * times
    return lambda request: left.pop() if request.method == method and left else None


SLOW_DOWN = Answer(503, "SlowDown", "Please reduce your request rate")
TROUBLES = [
    SLOW_DOWN,
    Answer(500, "InternalError", "We encountered an internal error"),
    Answer(429, "TooMany"),
]


class Sleeper:
    """Records what was to be waited, and does not wait."""

    def __init__(self) -> None:
        self.delays: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.delays.append(seconds)


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper()


@pytest.fixture
def behind(proxy: Proxy, prefix: str, sleeper: Sleeper) -> OpenDalStore:
    """A store behind the proxy, with something in it."""
    store = open_store(
        proxy.server.uri(prefix), options=proxy.options, sleep=sleeper, randomness=SeededRandomness(1)
    )
    assert isinstance(store, OpenDalStore)
    put(store, "there", b"0123456789")
    return store


CALLS: dict[str, Callable[[Store], object]] = {
    "PUT": lambda store: put(store, "new", b"x"),
    "GET": lambda store: store.read("there"),
    "HEAD": lambda store: store.stat("there"),
    "DELETE": lambda store: store.delete("there"),
}


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("status", [405, 411, 414, 415, 501, 505])
def test_what_the_server_never_does_is_not_asked_again(
    proxy: Proxy, behind: OpenDalStore, sleeper: Sleeper, method: str, status: int
) -> None:
    """Neither the network nor time will change it: the server, or what stands before it, has to."""
    proxy.rule = failing(method, Answer(status, "NotImplemented", "We do not do this"), times=100)
    with pytest.raises(InvalidConfig, match="cannot be used so") as caught:
        CALLS[method](behind)
    assert "docs/operating/stores.md" in caught.value.hint
    assert sleeper.delays == []


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda answer: answer.code)
def test_what_may_pass_is_tried_again_a_little_later_each_time(
    proxy: Proxy, behind: OpenDalStore, sleeper: Sleeper, method: str, trouble: Answer
) -> None:
    """And counted."""
    proxy.rule = failing(method, trouble, times=4)
    CALLS[method](behind)
    assert behind.retries.repeated == 4
    assert behind.retries.failed == 0
    assert [0.05 * 2**n <= delay <= 0.1 * 2**n for n, delay in enumerate(sleeper.delays)] == [True] * 4
    assert len(set(sleeper.delays)) == 4


@pytest.mark.parametrize("method", CALLS)
def test_what_does_not_pass_is_an_error_after_a_while(
    proxy: Proxy, behind: OpenDalStore, sleeper: Sleeper, method: str
) -> None:
    """It says where, what and what to do, and gives no secret away."""
    proxy.rule = failing(method, SLOW_DOWN, times=100)
    with pytest.raises(StoreUnavailable) as caught:
        CALLS[method](behind)
    check_error(caught.value, behind.uri)
    assert len(sleeper.delays) == 4
    assert behind.retries.failed == 1


def check_error(error: LowwaterError, uri: str) -> None:
    assert error.hint
    assert error.path is not None
    assert error.path.startswith(uri)
    shown = "".join(traceback.format_exception(error)) + repr(error) + str(error.as_dict())
    for secret in (SECRET_ACCESS_KEY, WRONG, "Signature=", "<unknown>", "authorization"):
        assert secret not in shown


WRONG = "wrong-wrong-wrong-wrong"


@pytest.mark.parametrize(
    ("options", "uri", "error", "said"),
    [
        ({"access_key_id": WRONG}, "s3://lowwater/x", StoreDenied, "InvalidAccessKeyId"),
        ({"secret_access_key": WRONG}, "s3://lowwater/x", StoreDenied, "SignatureDoesNotMatch"),
        ({}, "s3://not-there/x", StoreMissing, "no such bucket"),
        ({"endpoint": "http://127.0.0.1:1"}, "s3://lowwater/x", StoreUnavailable, "refused"),
    ],
    ids=["access key", "secret key", "bucket", "endpoint"],
)
def test_a_store_that_cannot_be_used_is_known_when_it_is_opened(
    s3_server: S3Server,
    sleeper: Sleeper,
    options: dict[str, str],
    uri: str,
    error: type[LowwaterError],
    said: str,
) -> None:
    """Not hours later, when the first segment is sealed. It was the real server that said so."""
    for read_only in (False, True):
        with pytest.raises(error, match=said) as caught:
            open_store(uri, options={**s3_server.options, **options}, sleep=sleeper, read_only=read_only)
        check_error(caught.value, uri)


def test_a_clock_that_is_wrong_is_named(proxy: Proxy, prefix: str) -> None:
    """S3 only says that it denies."""
    skewed = "The difference between the request time and the current time is too large."
    proxy.rule = lambda request: Answer(403, "RequestTimeTooSkewed", skewed)
    with pytest.raises(StoreDenied, match="clock") as caught:
        open_store(proxy.server.uri(prefix), options=proxy.options)
    assert "clock" in (caught.value.hint or "")
    check_error(caught.value, proxy.server.uri(prefix))


def test_a_store_that_may_only_be_read_is_opened_so(proxy: Proxy, behind: OpenDalStore, prefix: str) -> None:
    """Restoring needs no more."""
    denied = Answer(403, "AccessDenied", "Access Denied")
    proxy.rule = lambda request: denied if request.method in ("PUT", "POST", "DELETE") else None
    store = open_store(proxy.server.uri(prefix), options=proxy.options)
    assert names(store.list()) == ["there"]
    assert store.read("there", 3, 5) == b"34"
    for call in (lambda: put(store, "new", b""), lambda: store.delete("there")):
        with pytest.raises(StoreReadOnly) as caught:
            call()
        check_error(caught.value, store.uri)


def test_opening_to_read_writes_nothing(s3_server: S3Server, tmp_path: Path, sleeper: Sleeper) -> None:
    """The real server refuses all writes here; it answers them with errors of its own."""
    with S3Server(tmp_path, arguments=["--read-only"]) as server:
        store = open_store(server.uri("p"), options=server.options, read_only=True)
        assert list(store.list()) == []
        with pytest.raises(StoreReadOnly):
            put(store, "a", b"")
        with pytest.raises(StoreUnavailable):
            open_store(server.uri("p"), options=server.options, sleep=sleeper)


def test_who_may_not_delete_leaves_no_object_that_is_listed(
    proxy: Proxy, s3_server: S3Server, prefix: str
) -> None:
    """Buckets that lock their objects are good archives."""
    denied = Answer(403, "AccessDenied", "Access Denied")
    keeping = keep_conditions(s3_server)
    proxy.rule = lambda r: denied if r.method == "DELETE" else keeping(r)
    for _ in range(2):
        store = open_store(proxy.server.uri(prefix), options=proxy.options)
        assert isinstance(store, OpenDalStore)
        assert store.refuses_to_overwrite
        assert list(store.list()) == []
    assert put(store, "a", b"x")


def test_an_answer_that_is_cut_off_is_no_answer(proxy: Proxy, behind: OpenDalStore) -> None:
    """Nobody gets half an object for a whole one."""
    for start, end in ((0, None), (2, 9), (2, 100)):
        proxy.rule = failing("GET", Answer(cut=3), times=2)
        assert behind.read("there", start, end) == b"0123456789"[start:end]
    assert behind.retries.repeated >= 4


def test_a_write_whose_answer_is_lost_is_there(
    proxy: Proxy, s3_server: S3Server, behind: OpenDalStore
) -> None:
    """With a condition, the second attempt finds the first."""
    proxy.rule = failing("PUT", Answer(500, "InternalError", forward=True), times=1)
    assert put(behind, "new", b"x") is True
    assert behind.read("new") == b"x"
    behind.refuses_to_overwrite = True
    lost = failing("PUT", Answer(500, "InternalError", forward=True), times=1)
    keeping = keep_conditions(s3_server)
    proxy.rule = lambda request: lost(request) or keeping(request)
    assert put(behind, "newer", b"y") in (True, False)
    assert behind.read("newer") == b"y"


def test_parts_that_fail_are_sent_again(proxy: Proxy, behind: OpenDalStore) -> None:
    """A large object is not begun again for one of its parts."""
    failed = []

    def rule(request: Request) -> Answer | None:
        if "partNumber=2" in request.query and not failed:
            failed.append(request)
            return SLOW_DOWN
        return None

    proxy.rule = rule
    data = pattern(LARGE_BYTES)
    assert behind.write("large", [data], size=len(data))
    assert failed
    assert behind.read("large") == data


def test_a_server_that_hangs_is_timed_out(proxy: Proxy, prefix: str, sleeper: Sleeper) -> None:
    """By every call, and nothing waits for ever."""
    config = TierConfig(uri=proxy.server.uri(prefix), options=proxy.options, timeout_ms=300, attempts_max=2)
    store = open_store(config=config, sleep=sleeper)
    gate = threading.Event()
    proxy.rule = lambda request: Answer(hang=gate)
    try:
        for call in (*CALLS.values(), lambda store: list(store.list())):
            with pytest.raises(StoreUnavailable, match="timeout"):
                call(store)
        with pytest.raises(StoreUnavailable):
            store.write("large", [bytes(LARGE_BYTES)], size=LARGE_BYTES)
    finally:
        gate.set()


def test_a_program_that_ends_right_after_a_list_ends_well(s3_server: S3Server, prefix: str) -> None:
    """OpenDAL's thread that brought the list may still be in the interpreter: ended there, it takes the
    process with it by SIGABRT, one time in five. Here it stays so long that this is always so."""
    program = f"""
import time
from asyncio.selector_events import BaseSelectorEventLoop
from lowwater.tiering.open_store import open_store

wake = BaseSelectorEventLoop._write_to_self
def wake_slowly(loop):
    wake(loop)
    time.sleep(0.3)

store = open_store({s3_server.uri(prefix)!r}, options={s3_server.options!r}, read_only=True)
BaseSelectorEventLoop._write_to_self = wake_slowly
print(list(store.list()))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Even when that is killed: tests must not leave servers behind."""
    script = (
        "import sys; from lowwater.testing_server import S3Server\n"
        "server = S3Server(sys.argv[1]); print(server.endpoint, flush=True); sys.stdin.read()"
    ).replace("lowwater.testing_server", "lowwater.tiering.testing.s3_server")
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        host, port = child.stdout.readline().strip().removeprefix("http://").split(":")
        socket.create_connection((host, int(port))).close()
        child.kill()
    deadline = RealClock().monotonic() + 300
    while RealClock().monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except ConnectionError:
            return  # refused, or reset while it ends
    raise AssertionError("the server outlived its owner")


def test_a_forked_child_is_refused(opened: Callable[..., OpenDalStore], s3_server: S3Server) -> None:
    """The threads that would ask for it stayed with the parent: it would wait for ever."""
    store = opened()
    store.write("a", [b"a"], size=1)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(60)
            for call in (lambda: store.read("a"), lambda: list(store.list()), opened):
                with pytest.raises(Closed, match="forked") as caught:
                    call()
                assert "spawn" in caught.value.hint
            store.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.read("a") == b"a"
