"""What stands before all commands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import lowwater
from lowwater.engine.format.fast import IS_COMPILED

LOOPS = (
    "loops compiled"
    if IS_COMPILED
    else f"loops not compiled: {'PURE_PYTHON is set' if os.environ.get('PURE_PYTHON') else 'it was built'}"
)


@pytest.mark.parametrize(
    ("pure", "loops"),
    [("", LOOPS), ("1", "loops not compiled: PURE_PYTHON is set")],
    ids=["as it is", "pure"],
)
def test_the_version_says_whether_loops_are_compiled(pure: str, loops: str) -> None:
    """Nothing but speed depends on it, so nobody would notice."""
    environment = {**os.environ, **({"PURE_PYTHON": pure} if pure else {})}
    command = [sys.executable, "-m", "lowwater", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith(f"lowwater {lowwater.__version__} ({loops}")
    assert done.stdout.endswith(")\n")
