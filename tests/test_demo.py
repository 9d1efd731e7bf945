"""`make demo` is the first thing that a newcomer runs."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "lowwater.demo"]


def start(scratch: Path) -> subprocess.Popen[str]:
    """In a home and a temporary folder of its own, so that whatever it leaves is seen."""
    environment = {**os.environ, "TMPDIR": str(scratch), "HOME": str(scratch)}
    environment.pop("XDG_CACHE_HOME", None)
    return subprocess.Popen(
        COMMAND,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def descendants(demo: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(demo.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.long
def test_the_demo_proves_what_it_says_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A NO in a table, a minute of silence or a folder full of segments would be a poor first impression."""
    demo = start(tmp_path)
    printed, errors = demo.communicate()
    assert demo.returncode == 0, printed + errors
    assert errors == ""
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if "│" in line
    ]
    assert [row for row in rows if len(row) == 3 and row[2] == "NO"] == []
    assert sum(len(row) == 3 and row[2] == "yes" for row in rows) == 13
    steps = re.findall(r"^ *[\d.]+ s  step (\d+) of (\d+): \S", printed, re.MULTILINE)
    assert steps
    assert steps == [(str(step), str(len(steps))) for step in range(1, len(steps) + 1)]
    assert "had the same root" in printed
    assert re.search(r"^demo passed: [^\0]+\.\n\Z", printed, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stage", "signum"),
    [
        ("database", signal.SIGINT),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                *((stage, signal.SIGINT) for stage in ("killed", "restored", "full", "spark")),
                *((stage, signal.SIGTERM) for stage in ("killed", "database", "restored", "full", "spark")),
            ]
        ),
    ],
)
def test_a_demo_that_is_stopped_leaves_nothing_behind(
    tmp_path: Path, stage: str, signum: signal.Signals
) -> None:
    """No process, no folder, no traceback, at whatever it is when somebody has seen enough."""
    demo = start(tmp_path)
    while not any(tmp_path.glob(f"lowwater-demo-*/{stage}")):
        assert demo.poll() is None
        time.sleep(0.02)
    started = descendants(demo)
    assert started
    # As from a terminal, where the whole group gets it; and twice, as from somebody in a hurry.
    for _ in range(2):
        os.killpg(demo.pid, signum)
    printed, errors = demo.communicate()
    assert demo.returncode == 128 + signum, printed + errors
    assert errors == f"demo stopped by {signum.name}: nothing is left behind.\n"
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []
    assert list(tmp_path.iterdir()) == []
