"""Stores that nobody here wrote: the suite of stores, and a whole cycle, against each of them.

`CANNOT` says what each of these servers cannot do, in the words of docs/operating/stores.md. Such a test has
to fail, and by a typed error or an assertion: a server that learns it is noticed.

Everything here needs `make test-long`; s3s-fs is skipped where nobody has built it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from hashlib import md5
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from tests.tiering.servers import KINDS, Served, boto_client, started
from tests.tiering.whole_cycle import Life, whole_cycle

import lowwater
from lowwater.engine.seams.real import RealRandomness
from lowwater.errors import LowwaterError, StoreDenied
from lowwater.tiering.open_store import open_store
from lowwater.tiering.opendal_store import OpenDalStore
from lowwater.tiering.testing.s3_server import BUCKET
from lowwater.tiering.testing.store import LARGE_BYTES, Place, StoreConformance

pytestmark = pytest.mark.long

STORES_MD = Path(__file__).resolve().parents[2] / "docs" / "operating" / "stores.md"

Servers = Callable[[str], Served]

# By server and test (and its parameters, where not all of them fail).
NO_PARTS = "uploads in parts are answered by 501: an object has to be smaller than `tier.part_bytes`"
NO_END = "a range beyond the end of an object, or of an empty one, is answered by 206 and no range"
CANNOT = {
    ("s3s-fs", "test_the_beginning_of_a_name_is_no_object"): (
        "where the first words of an object's name are asked for as an object, it answers 500 instead of 404"
    ),
    ("gcs", "test_an_object_whose_size_is_not_known_before_is_streamed"): NO_PARTS,
    ("gcs", "test_an_object_may_be_larger_than_a_part"): NO_PARTS,
    ("gcs", "test_an_object_is_written_over_where_that_is_asked_for"): NO_PARTS,
    ("gcs", f"test_a_checksum_is_that_of_the_bytes_or_says_nothing[{LARGE_BYTES}]"): NO_PARTS,
    ("gcs", "test_parts_that_fail_leave_nothing"): NO_PARTS,
    ("gcs", f"test_parts_that_come_to_another_size_leave_nothing[-1-{LARGE_BYTES}]"): NO_PARTS,
    ("gcs", f"test_parts_that_come_to_another_size_leave_nothing[1-{LARGE_BYTES}]"): NO_PARTS,
    ("gcs", "test_an_object_may_be_empty"): NO_END,
    **{
        ("gcs", f"test_a_range_ends_where_the_object_does[{given}-]"): NO_END
        for given in ("10-None", "10-11", "500-501", "500-None")
    },
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Each is started when it is asked for, and once."""
    with ExitStack() as running:
        yield cache(lambda kind: running.enter_context(started(kind, tmp_path_factory.mktemp(kind))))


class OtherStore(StoreConformance):
    kind: str

    @pytest.fixture
    def place(self, servers: Servers, request: pytest.FixtureRequest) -> Place:
        server, node = servers(self.kind), request.node
        reason = CANNOT.get((self.kind, node.name)) or CANNOT.get((self.kind, node.originalname))
        if reason is not None:
            raises = (LowwaterError, AssertionError)
            node.add_marker(pytest.mark.xfail(strict=True, raises=raises, reason=reason))
        uri = server.uri(f"suite/{RealRandomness().token(8).hex()}")
        # What fails here fails every time.
        return lambda: open_store(uri, options=server.options, sleep=lambda _: None)


class TestMoto(OtherStore):
    kind = "moto"


class TestS3s(OtherStore):
    kind = "s3s-fs"


class TestGcs(OtherStore):
    kind = "gcs"


def documented() -> dict[str, list[str]]:
    """The rows of the table in STORES_MD, by the server."""
    rows = [line.strip("| ").split(" | ") for line in STORES_MD.read_text("utf-8").splitlines()]
    names = {"rclone serve s3": "rclone", "moto": "moto", "s3s-fs": "s3s-fs", "gcp-storage-emulator": "gcs"}
    found = {row[0].split("`")[1]: row[1:] for row in rows if len(row) == 5 and row[0].startswith("`")}
    assert found.keys() == names.keys()
    return {names[name]: row for name, row in found.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_server_cannot_do_stands_in_the_documents(kind: str) -> None:
    """Both ways: neither says more than the other."""
    said = documented()[kind][-1]
    reasons = {reason for (server, _), reason in CANNOT.items() if server == kind}
    for reason in reasons:
        assert reason in said
    assert len(said.split("; ")) == max(1, len(reasons)) + (kind == "gcs")  # whose types are mended
    assert bool(reasons) != (said == "nothing that is needed")


@pytest.mark.parametrize("kind", KINDS)
def test_whether_a_name_that_is_taken_is_kept_is_found_out(kind: str, servers: Servers) -> None:
    """By trying, since a server that does not may say that it does."""
    server = servers(kind)
    store = open_store(server.uri("probed"), options=server.options)
    assert isinstance(store, OpenDalStore)
    assert store.refuses_to_overwrite == (documented()[kind][0] == "yes")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gcs"])
def test_whether_a_body_is_compared_with_its_md5(kind: str, servers: Servers) -> None:
    """What changes on its way is refused by who compares it."""
    other = b64encode(md5(b"other", usedforsecurity=False).digest()).decode()
    client = boto_client(servers(kind).endpoint)
    refused = False
    try:
        client.put_object(Bucket=BUCKET, Key="md5/x", Body=b"these", ContentMD5=other)
    except ClientError as error:
        refused = error.response["Error"]["Code"] == "BadDigest"
    assert refused == (documented()[kind][1] == "yes")


@pytest.mark.parametrize("kind", KINDS)
def test_a_database_lives_with_it_from_the_first_write_to_a_clone(
    kind: str, servers: Servers, tmp_path: Path
) -> None:
    """Whatever a store of the suite does, this is what it is for."""
    # Above a part, so that segments go out in several, where the server can take them.
    large_bytes = 2_000_000 if kind == "gcs" else 7_000_000
    whole_cycle(Life(tmp_path, servers(kind)), large_bytes=large_bytes)


@pytest.mark.xfail(
    strict=True,
    raises=StoreDenied,
    reason="A directory that was restored remembers its archive's endpoint and region, and not that it is "
    "read without keys: a clone of a public bucket, without a tier of its own, cannot be read.",
)
def test_a_clone_of_an_archive_that_anybody_may_read_needs_no_keys(servers: Servers, tmp_path: Path) -> None:
    """Public buckets are read by machines that have none."""
    life = Life(tmp_path, servers("gcs"))
    with life.open("first") as db:
        db.create_bucket("b")
        life.write(db)
        db.checkpoint()
        db.ship()
    life.restore("clone", clone=True)
    with lowwater.open(tmp_path / "clone", config=life.config) as db:
        life.require_all(db)
