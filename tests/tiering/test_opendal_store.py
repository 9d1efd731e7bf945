"""S3 as a store, against a real server: the suite, and what another client sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import boto3
import pytest

from lowwater.engine.real import RealRandomness
from lowwater.tiering.open_store import open_store
from lowwater.tiering.opendal_store import OpenDalStore
from lowwater.tiering.testing.s3_server import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server
from lowwater.tiering.testing.store import Place, StoreConformance


@pytest.fixture
def prefix() -> str:
    return f"test/{RealRandomness().token(8).hex()}"


@pytest.fixture
def client(s3_server: S3Server) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=s3_server.endpoint,
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        region_name="us-east-1",
    )


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
