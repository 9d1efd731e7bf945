"""What all tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

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
