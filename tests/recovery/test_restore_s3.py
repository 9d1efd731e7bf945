"""A restore from a real S3 server, and what it remembers of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import lowwater
from lowwater.engine.database.origin import ORIGIN
from lowwater.tiering.testing.s3_server import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server


@pytest.mark.slow
def test_a_restore_from_s3_is_opened_again_without_naming_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint is recorded, the credentials are not: those come from the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    with S3Server(tmp_path / "s3") as server:
        uri = f"{server.uri('prefix')}?endpoint={server.endpoint}"
        with lowwater.open(tmp_path / "original", tier=uri) as db:
            db.create_bucket("b")
            db.put_many("b", [(f"k{number:04}", b"%d" % number) for number in range(2000)])
            db.checkpoint()
            db.ship()
            db.put("b", "k0007", b"tail" * 1000)
            db.ship()
            root = db.root()
        secret = f"{uri}&access_key_id={ACCESS_KEY_ID}&secret_access_key={SECRET_ACCESS_KEY}"
        assert lowwater.restore(secret, tmp_path / "full", clone=True, full=True).root == root
        done = lowwater.restore(secret, tmp_path / "to", clone=True)
        assert done.pages_away > 10
        recorded = (tmp_path / "to" / ORIGIN).read_bytes()
        assert server.endpoint.encode() in recorded
        assert SECRET_ACCESS_KEY.encode() not in recorded
        assert ACCESS_KEY_ID.encode() not in recorded
        with lowwater.open(tmp_path / "to") as db:
            assert db.root() == root
            assert db.get("b", "k0007").value == b"tail" * 1000
        again = lowwater.restore(secret, tmp_path / "line")
        assert not again.is_clone
        with lowwater.open(tmp_path / "line") as db:
            db.put("b", "new", b"n")
            db.ship()
