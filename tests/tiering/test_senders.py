"""Several senders of the same objects at once, on real S3 servers: any replica may ship anything."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.tiering.proxy import Answer, Request, proxied
from tests.tiering.servers import MotoServer, boto_client, pending_uploads, write_until_swept
from tests.tiering.shipping import Order

import lowwater
from lowwater.engine.format.entries import CreateBucket, Put
from lowwater.engine.log.chain import checkpoint_entry
from lowwater.engine.log.log import LogOptions
from lowwater.engine.seams.real import RealFiles, RealRandomness
from lowwater.errors import StoreDenied, StoreUnavailable, UploadGone
from lowwater.tiering.names import segment_name
from lowwater.tiering.open_store import open_store
from lowwater.tiering.opendal_store import OpenDalStore, StoreLimits
from lowwater.tiering.s3_client import NotTrusted, S3Client, usable_client
from lowwater.tiering.store import Store
from lowwater.tiering.store_uri import parse_uri
from lowwater.tiering.testing.s3_server import ACCESS_KEY_ID, BUCKET, SECRET_ACCESS_KEY, S3Server
from lowwater.tiering.uploads import describe_file, upload_segment
from lowwater.tiering.verified_writes import write_verified
from lowwater.tiering.verify import ObjectFile, open_segment

# As many as have to hold once: `make chaos` runs 200.
ROUNDS = int(os.environ.get("SENDER_ROUNDS", "12"))
PACK = "data/packs/" + "ab" * 32 + ".pack"
PACK_BYTES = 11_000_000
PART_BYTES = 5 * 2**20

Server = S3Server | MotoServer


@pytest.fixture(scope="module")
def moto_server() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture(params=["rclone", pytest.param("moto", marks=pytest.mark.long)])
def server(request: pytest.FixtureRequest, s3_server: S3Server) -> Server:
    return s3_server if request.param == "rclone" else request.getfixturevalue("moto_server")


@pytest.fixture
def prefix() -> str:
    return f"senders/{RealRandomness().token(8).hex()}"


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two sealed segments, each of which goes out in several parts."""
    directory = tmp_path_factory.mktemp("log")
    with lowwater.Log.open(directory, options=LogOptions(segment_bytes=8_000_000)) as log:
        for number in range(36):
            log.append(Put("b", f"{number}", random.Random(number).randbytes(500_000)))
        log.seal()
    return sorted(directory.glob("segment-*"))[:2]


def leave_upload(server: Server, key: str) -> str:
    """Begin an upload and send a part of it, as a sender that is killed then, or that is slow."""
    client = boto_client(server.endpoint)
    upload: str = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=1, Body=b"x" * PART_BYTES)
    return upload


def send_all(store: Store, paths: Iterable[Path]) -> None:
    """What a shipper does with a pack and with segments."""
    files = RealFiles()
    data = random.Random(7).randbytes(PACK_BYTES)
    write_verified(store, PACK, lambda: [data], size=len(data))
    for path in paths:
        segment = describe_file(files, str(path))
        upload_segment(store, files, str(path), segment, part_bytes=2**20, passing=lambda _: None)


def require_all(store: Store, paths: Iterable[Path]) -> None:
    assert store.read(PACK) == random.Random(7).randbytes(PACK_BYTES)
    for path in paths:
        segment = describe_file(RealFiles(), str(path))
        name = segment_name(segment)
        file = open_segment(ObjectFile(store, name, store.stat(name).size))
        assert file.read_at(0, segment.size + 1) == path.read_bytes()


def opened(server: Server, prefix: str, **limits: Any) -> OpenDalStore:
    return OpenDalStore(parse_uri(server.uri(prefix), server.options), limits=StoreLimits(**limits))


# ---- processes

SENDER = """
import json, sys
from pathlib import Path
sys.path[:0] = json.loads(sys.argv[3])
from tests.tiering.test_senders import send_all
from lowwater.tiering.open_store import open_store

options, paths = json.loads(sys.argv[1]), [Path(path) for path in json.loads(sys.argv[2])]
print("ready", flush=True)
for line in sys.stdin:
    store = open_store(line.strip(), options=options)
    send_all(store, paths)
    store.close()
    print("sent", flush=True)
"""


class Sender:
    def __init__(self, server: Server, segments: list[Path]) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                SENDER,
                json.dumps(server.options),
                json.dumps([str(path) for path in segments]),
                json.dumps(sys.path),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == "ready"

    def begin(self, uri: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{uri}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> None:
        self.process.communicate()


@pytest.mark.long
def test_three_processes_send_the_same_and_one_of_them_is_killed_now_and_then(
    server: Server, segments: list[Path], prefix: str
) -> None:
    """No error, every object whole, and nothing pending but what a killed one has left."""
    senders = [Sender(server, segments) for _ in range(3)]
    rng = random.Random(ROUNDS)
    left = 0
    for number in range(ROUNDS):
        uri = f"{server.uri(prefix)}/{number}"
        for sender in senders:
            sender.begin(uri)
        killed = rng.randrange(3) if number % 4 == 3 else None
        if killed is not None:
            threading.Event().wait(rng.random() / 4)  # into whatever it is at
            senders[killed].kill()
        for position, sender in enumerate(senders):
            assert position == killed or sender.answer() == "sent"
        store = open_store(uri, options=server.options)
        require_all(store, segments)
        found = pending_uploads(server, f"{prefix}/{number}/")
        assert killed is not None or found == []
        assert len(found) <= 1, "one sender has one upload under way"
        left += len(found)
        store.close()
        if killed is not None:
            senders[killed] = Sender(server, segments)
    for sender in senders:
        sender.end()
    if isinstance(server, MotoServer):
        return  # which says of all that they began in 2010: nothing may be removed there
    for number in range(ROUNDS):
        # An archive removes what was left of its own objects, and nobody else's.
        hasty = opened(server, f"{prefix}/{number}", upload_age_max_s=1.0)
        write_until_swept(hasty, server, f"{prefix}/{number}/")
        hasty.close()


@pytest.mark.slow
def test_three_threads_send_the_same(server: Server, segments: list[Path], prefix: str) -> None:
    """One program with three nodes in it, say."""
    for number in range(max(2, ROUNDS // 3)):
        stores = [opened(server, f"{prefix}/{number}") for _ in range(3)]
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(send_all, stores, [segments] * 3))
        require_all(stores[0], segments)
        assert pending_uploads(server, prefix) == []


# ---- engines


class Once(Order):
    """Orders entries for engines whose threads propose at any time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        super().__init__()

    def order(self, entry: Any) -> int:
        with self.lock:
            return super().order(entry)


@pytest.mark.slow
def test_three_engines_ship_one_log_at_once(server: Server, tmp_path: Path, prefix: str) -> None:
    """Segments, packs and manifests: all of them send all of it, and the archive can be restored."""
    order = Once()
    config = {
        "tier": {"uri": server.uri(prefix), "options": server.options},
        "shipping": {"interval_s": 0.05},
    }
    engines = [lowwater.Engine(tmp_path / name, None, config, order) for name in ("one", "two", "three")]
    for engine in engines:
        with order.lock:
            order.engines.append(engine)
            order.deliver(engine)
    order.order(CreateBucket("b"))
    rng = random.Random(5)
    for number in range(400):
        order.order(Put("b", f"{number:04}", rng.randbytes(rng.choice([100, 60_000]))))
        if number % 130 == 129:
            with order.lock:
                order.order(checkpoint_entry(engines[0]._state.checkpoint_seq))
    targets = [engine.ship(timeout=300) for engine in engines]
    assert min(targets) > 400
    roots = {engine.root(400) for engine in engines}
    assert len(roots) == 1
    assert [engine.shipping().error for engine in engines] == [None] * 3
    for engine in engines:
        engine.close()
    assert pending_uploads(server, prefix) == []
    restored = lowwater.restore(
        server.uri(prefix), tmp_path / "restored", 400, config=config, clone=True, full=True
    )
    assert restored.seq == 400
    with lowwater.open(tmp_path / "restored", config={}) as db:
        assert {db.root()} == roots


# ---- whose upload may be removed


def test_an_upload_that_is_under_way_is_nobodys_to_remove(server: Server, prefix: str) -> None:
    """Another sender of the same object is ready first: this one goes on with its parts all the same."""
    upload = leave_upload(server, f"{prefix}/{PACK}")
    store = opened(server, prefix)
    assert store.write(PACK, [bytes(PACK_BYTES)], size=PACK_BYTES)
    assert not store.write(PACK, [bytes(PACK_BYTES)], size=PACK_BYTES)
    assert pending_uploads(server, prefix) == [f"{prefix}/{PACK}"]
    boto_client(server.endpoint).upload_part(
        Bucket=BUCKET, Key=f"{prefix}/{PACK}", UploadId=upload, PartNumber=2, Body=b"y"
    )


def test_what_a_killed_process_left_goes_when_it_is_old_by_the_stores_clock(
    s3_server: S3Server, prefix: str
) -> None:
    """And not before. Its object is never sent again: somebody has taken it on."""
    leave_upload(s3_server, f"{prefix}/{PACK}")
    patient = opened(s3_server, prefix)
    assert patient.write("a", [b"."], size=1)
    assert pending_uploads(s3_server, prefix) == [f"{prefix}/{PACK}"]
    hasty = opened(s3_server, prefix, upload_age_max_s=1.0)
    write_until_swept(hasty, s3_server, prefix)
    other = leave_upload(s3_server, f"elsewhere/{prefix}")
    assert other
    hasty.write("c", [b"."], size=1)
    assert pending_uploads(s3_server, f"elsewhere/{prefix}") == [f"elsewhere/{prefix}"]


def test_a_store_that_does_not_know_when_uploads_began_keeps_them(
    moto_server: MotoServer, prefix: str
) -> None:
    """It says that all began in 2010: everybody's uploads would be removed while they are sent."""
    leave_upload(moto_server, f"{prefix}/{PACK}")
    store = opened(moto_server, prefix)
    store.write("a", [b"."], size=1)
    assert pending_uploads(moto_server, prefix) == [f"{prefix}/{PACK}"]


@pytest.mark.parametrize("below", ["", "teams/"], ids=["a bucket", "a prefix"])
def test_only_uploads_of_the_archive_go(s3_server: S3Server, below: str) -> None:
    """What else lies in there belongs to somebody else, though it be another archive."""
    mark = RealRandomness().token(4).hex()
    theirs = [f"{below}theirs-{mark}", f"{below}{mark}/{PACK}"]
    ours = f"{below}data/packs/" + RealRandomness().token(32).hex() + ".pack"
    for each in [*theirs, ours]:
        leave_upload(s3_server, each)
    store = opened(s3_server, below, upload_age_max_s=1.0)
    write_until_swept(store, s3_server, ours)
    assert [pending_uploads(s3_server, each) for each in theirs] == [[each] for each in theirs]
    store.delete("cluster.cbor")


def removing(server: S3Server, times: int) -> Callable[[Request], Answer | None]:
    """A rule: so many uploads are removed by somebody when their second part comes."""
    left = [True] * times

    def rule(request: Request) -> Answer | None:
        if request.method == "PUT" and "partNumber=2" in request.query and left:
            left.pop()
            upload = request.query.partition("uploadId=")[2].partition("&")[0]
            bucket, _, key = request.path.lstrip("/").partition("/")
            boto_client(server.endpoint).abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload)
        return None

    return rule


@pytest.mark.slow
def test_an_upload_that_somebody_removed_is_begun_again(
    s3_server: S3Server, segments: list[Path], prefix: str
) -> None:
    """A rule of the bucket does that as well."""
    with proxied(s3_server) as proxy:
        proxy.rule = removing(s3_server, 3)
        store = open_store(s3_server.uri(prefix), options=proxy.options)
        send_all(store, segments)
        require_all(store, segments)
        proxy.rule = removing(s3_server, 1)
        with pytest.raises(UploadGone, match="somebody has removed the upload"):
            store.write("b", iter([bytes(PACK_BYTES)]), size=PACK_BYTES)
    assert pending_uploads(s3_server, prefix) == []


def test_an_upload_whose_end_was_not_answered_has_made_its_object(s3_server: S3Server, prefix: str) -> None:
    """The second try finds no upload any more, for it is an object now."""
    with proxied(s3_server) as proxy:
        lost = [Answer(500, "InternalError", "lost", forward=True)]
        proxy.rule = lambda request: (
            lost.pop() if request.method == "POST" and "uploadId" in request.query and lost else None
        )
        store = open_store(s3_server.uri(prefix), options=proxy.options)
        data = random.Random(1).randbytes(PACK_BYTES)
        write_verified(store, PACK, lambda: [data], size=len(data))
        assert not lost
        assert store.read(PACK) == data


# ---- answers that are none


CUT = Answer(raw=b"HTTP/1.1 200 OK\r\n")


def once(answer: Answer, method: str, words: str) -> Callable[[Request], Answer | None]:
    """A rule: the first request of that kind gets this answer."""
    left = [answer]

    def rule(request: Request) -> Answer | None:
        return left.pop() if left and request.method == method and words in request.query else None

    return rule


@pytest.mark.parametrize(
    "answer",
    [
        CUT,
        Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        Answer(raw=b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n<?xml version='1.0'?>" + b" " * 2000),
        Answer(raw=b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b" " * 2000 + b"<Error a='b'></Error>"),
        Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n<html>hello</html>"),
    ],
    ids=["cut", "empty", "cut after its head", "an error after blanks", "HTML"],
)
def test_only_what_says_that_an_object_is_complete_makes_it_so(
    s3_server: S3Server, prefix: str, answer: Answer
) -> None:
    """The request may never have come there. Whoever believed it would purge what nobody has."""
    data = random.Random(2).randbytes(PACK_BYTES)
    with proxied(s3_server) as proxy:
        proxy.rule = once(answer, "POST", "uploadId")
        store = open_store(s3_server.uri(prefix), options=proxy.options)
        write_verified(store, PACK, lambda: [data], size=len(data))
        assert store.read(PACK) == data
    assert pending_uploads(s3_server, prefix) == []


@pytest.mark.parametrize("answer", [CUT, Answer(412, "PreconditionFailed")], ids=["cut", "412"])
def test_a_part_whose_answer_was_none_is_sent_again(s3_server: S3Server, prefix: str, answer: Answer) -> None:
    """That part, and no other: the object must not have a hole."""
    data = random.Random(3).randbytes(PACK_BYTES)
    with proxied(s3_server) as proxy:
        proxy.rule = once(answer, "PUT", "partNumber=2")
        store = open_store(s3_server.uri(prefix), options=proxy.options)
        write_verified(store, PACK, lambda: [data], size=len(data))
        assert store.read(PACK) == data
        assert not [request for request in proxy.requests if "partNumber=0" in request.query]
    assert pending_uploads(s3_server, prefix) == []


def test_a_list_that_makes_no_sense_removes_nothing_and_is_no_error(s3_server: S3Server, prefix: str) -> None:
    """It is asked for beside a write that has nothing to do with it."""
    upload = "<Upload><Key>k</Key><UploadId>1</UploadId><Initiated>{}</Initiated></Upload>"
    for initiated in ("2020-01-01T00:00:00", "soon", ""):
        body = f"<ListMultipartUploadsResult>{upload.format(initiated)}</ListMultipartUploadsResult>".encode()
        head = b"HTTP/1.1 200 OK\r\nDate: Thu, 19 Nov 2026 20:00:00 -0000\r\nConnection: close\r\n\r\n"
        with proxied(s3_server) as proxy:
            proxy.rule = once(Answer(raw=head + body), "GET", "uploads")
            store = open_store(s3_server.uri(f"{prefix}/{initiated}"), options=proxy.options)
            assert store.write("a", [b"."], size=1)


def test_no_error_shows_a_key(s3_server: S3Server, prefix: str) -> None:
    """Some servers repeat what they were sent."""
    with proxied(s3_server) as proxy:
        proxy.rule = lambda request: (
            Answer(403, "AccessDenied", f"{SECRET_ACCESS_KEY} of {ACCESS_KEY_ID}")
            if request.method == "POST"
            else None
        )
        store = open_store(s3_server.uri(prefix), options=proxy.options)
        with pytest.raises(StoreDenied) as caught:
            store.write(PACK, [bytes(PACK_BYTES)], size=PACK_BYTES)
    assert SECRET_ACCESS_KEY not in str(caught.value)
    assert ACCESS_KEY_ID not in str(caught.value)


# ---- whose uploads go which way

KEYS = {"access_key_id": "a", "secret_access_key": "b", "region": "r", "endpoint": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("options", "environment", "is_usable"),
    [
        (KEYS, {}, True),
        (KEYS, {"AWS_ENDPOINT": "http://other"}, True),
        ({**KEYS, "endpoint": ""}, {"AWS_ENDPOINT": "http://other"}, False),
        ({**KEYS, "endpoint": ""}, {"AWS_S3_ENDPOINT": "http://other"}, False),
        ({**KEYS, "endpoint": "https://s3.amazonaws.com"}, {}, False),
        ({**KEYS, "endpoint": "http://[::1"}, {}, False),
        ({**KEYS, "endpoint": "http://u:p@host"}, {}, False),
        ({**KEYS, "region": ""}, {}, False),
        ({**KEYS, "region": ""}, {"AWS_REGION": "r"}, True),
        ({**KEYS, "secret_access_key": ""}, {"AWS_SECRET_ACCESS_KEY": "c"}, False),
        ({**KEYS, "server_side_encryption": "aws:kms"}, {}, False),
        (KEYS, {"ALL_PROXY": "http://127.0.0.1:1"}, False),
        (KEYS, {"http_proxy": "http://127.0.0.1:1"}, False),
        (KEYS, {"http_proxy": "http://127.0.0.1:1", "no_proxy": "127.0.0.1"}, True),
    ],
)
def test_parts_are_sent_by_ids_only_where_that_does_what_opendal_would(
    options: dict[str, str], environment: dict[str, str], is_usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else large objects would go to another place than small ones, or not at all."""
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given = {name: value for name, value in options.items() if value}
    assert (usable_client(given, "b", "", uri="s3://b", timeout_s=1) is not None) == is_usable


def test_a_server_that_only_opendal_trusts_gets_its_parts_from_it(
    s3_server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slim image has no authorities, and OpenDAL brings its own."""

    def refuse(*_: object, **__: object) -> None:
        raise NotTrusted("unable to get local issuer certificate")

    monkeypatch.setattr(S3Client, "send", refuse)
    store = open_store(s3_server.uri(prefix), options=s3_server.options)
    data = random.Random(4).randbytes(PACK_BYTES)
    write_verified(store, PACK, lambda: [data], size=len(data))
    assert store.read(PACK) == data


@pytest.mark.parametrize("refused", [("PUT",), ("POST",), ("PUT", "DELETE")], ids=["part", "end", "abort"])
def test_a_server_that_is_not_trusted_in_the_middle_of_an_upload_ends_it(
    refused: tuple[str, ...], s3_server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of several behind an address. What is left of the parts must not become the object."""
    data = random.Random(5).randbytes(PACK_BYTES)
    store = open_store(s3_server.uri(prefix), options=s3_server.options)
    sends = S3Client.send

    def refuse(client: S3Client, connection: Any, method: str, name: Any, query: Any, *rest: Any) -> None:
        if method in refused and "uploadId" in query:
            raise NotTrusted("unable to get local issuer certificate")
        sends(client, connection, method, name, query, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(S3Client, "send", refuse)
        with pytest.raises(StoreUnavailable, match="local issuer certificate"):
            store.write(PACK, [data], size=len(data))
    assert [found.name for found in store.list()] == []
    write_verified(store, PACK, lambda: [data], size=len(data))
    assert store.read(PACK) == data


def test_an_upload_takes_a_part_for_each_connection_and_two_more(s3_server: S3Server, prefix: str) -> None:
    """Whatever its size: several objects are sent at once."""
    store = opened(s3_server, prefix)
    tracemalloc.start()
    try:
        store.write(PACK, (bytes(2**20) for _ in range(60)), size=60 * 2**20)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < (2 + 2.5) * PART_BYTES
