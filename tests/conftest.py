"""What all tests share."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from lowwater.tiering.testing.s3_server import S3Server, forget_other_servers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

forget_other_servers()

# How long an example takes says more about the machine than about the code.
settings.register_profile("lowwater", deadline=None, print_blob=True)
settings.load_profile("lowwater")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Some need rights that only root has, and some Docker's engine, which CI has to have."""
    skipped = {}
    if os.geteuid() != 0:
        skipped["root"] = "NOT TESTED: needs to run as root"
    asked = os.environ.get("CI") != "true" and any(item.get_closest_marker("docker") for item in items)
    if asked and not _docker_runs():
        skipped["docker"] = "NOT TESTED: Docker's engine does not run here"
    for item in items:
        # One worker has the session: each JVM takes seconds to start, and a gigabyte.
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))
        for name, reason in skipped.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was not tested here, a line for each reason: one may hold for hundreds of tests."""
    skipped = terminalreporter.stats.get("skipped", [])
    for reason, count in sorted(Counter(_reason(report) for report in skipped).items()):
        terminalreporter.write_line(f"skipped {count}: {reason}")


def _reason(report: pytest.TestReport) -> str:
    assert isinstance(report.longrepr, tuple)
    return report.longrepr[2].removeprefix("Skipped: ")


def _docker_runs() -> bool:
    try:
        return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server for all tests of a worker: each takes a prefix of its own."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session for all tests of a worker: a JVM takes seconds to start. Two tasks at once, and no more of
    them than tiny archives need. Never stop it."""
    import lowwater.spark

    scratch = tmp_path_factory.mktemp("spark")
    running = lowwater.spark.session(
        master="local[2]",
        config={
            "spark.sql.shuffle.partitions": 2,
            "spark.default.parallelism": 2,
            "spark.driver.memory": "1g",
            "spark.local.dir": scratch / "local",
            "spark.sql.warehouse.dir": scratch / "warehouse",
        },
        app_name="lowwater tests",
    )
    yield running
    running.stop()
