"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from lowwater.tiering.testing.s3_server import S3Server

# How long an example takes says more about the machine than about the code.
settings.register_profile("lowwater", deadline=None, print_blob=True)
settings.load_profile("lowwater")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `root` need rights that only root has."""
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs to run as root"))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server for all tests of a worker: each takes a prefix of its own."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server
