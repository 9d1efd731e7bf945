"""What tests of Spark share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.spark.fake_java import fake_java

# What Spark's own scripts call.
TOOLS = ("bash", "cat", "dirname", "env", "ls", "nice", "rm", "sh", "uname")


@pytest.fixture
def hidden_java(tmp_path: Path) -> dict[str, str]:
    """An environment whose only Java is too old, in PATH and in JAVA_HOME."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tools / tool).symlink_to(found)
    old = fake_java(tmp_path / "old" / "bin", "1.8.0_402")
    return {"PATH": f"{old.parent}:{tools}", "JAVA_HOME": str(tmp_path / "old")}
