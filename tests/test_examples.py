"""Examples are read before documentation, and copied: they have to run, and to show what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.long
def test_the_history_of_a_shop_tells_what_the_bad_deploy_did(tmp_path: Path) -> None:
    """It set half of the prices to zero and deleted ten: all three questions have to show that."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "spark_history.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [re.split(r" *\| *", line.strip("| ")) for line in done.stdout.splitlines() if "|" in line]
    changed = {what: int(count) for what, count, *_ in rows if what in ("deleted", "set to zero", "new")}
    assert changed["set to zero"] == 150
    assert changed["deleted"] == 10
    assert "Before the deploy there were 300 prices, after it 290; to be put back:" in done.stdout
    hottest = [row for row in rows if len(row) == 4 and row[0].startswith("2026-03-")]
    assert len(hottest) == 6
    plots = sorted((tmp_path / "spark_history").glob("*.png"))
    assert [plot.name for plot in plots] == ["changed.png", "deploy.png", "hottest.png"]
    for plot in plots:
        assert plot.read_bytes().startswith(PNG)
        assert plot.stat().st_size > 5_000
