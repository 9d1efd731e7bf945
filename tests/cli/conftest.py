"""What the tests of the command line share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command line sets up the logging of the whole process."""
    logger = logging.getLogger("lowwater")
    before = (logger.handlers, logger.propagate, logger.level)
    yield
    logger.handlers, logger.propagate, logger.level = before
