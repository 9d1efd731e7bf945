"""Streams whose process is killed: each entry is in the sink exactly once all the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.spark.fed import random_archive
from tests.spark.test_stream import sunk, told

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
# STREAM_KILLS=20 is a run of minutes.
KILLS = int(os.environ.get("STREAM_KILLS", "2"))


def batches(folder: Path, log: str = "commits") -> int:
    """How many batches Spark has begun (`offsets`) or ended. It keeps the last hundred of each log."""
    found = (folder / "checkpoint" / log).glob("[0-9]*")
    return max((int(path.name) + 1 for path in found if path.name.isdecimal()), default=0)


def kill(process: subprocess.Popen[bytes]) -> None:
    """The driver, its JVM, and their Python workers."""
    try:
        driver = psutil.Process(process.pid)
        family = [driver, *driver.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def test_a_stream_that_is_killed_loses_nothing_and_repeats_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Exactly once, however often: offsets, batches and the sink's log agree after any kill."""
    draw = random.Random("kills")
    fed = random_archive(tmp_path / "archive", seed=13, steps=max(800, 200 * KILLS))
    command = [sys.executable, "-m", "tests.spark.stream_process", fed.uri, str(tmp_path)]
    kills = lives = 0
    while True:
        lives += 1
        output = tmp_path / f"life {lives}"
        with output.open("wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
        try:
            if kills < KILLS:
                # Some milliseconds into a batch, or after one, which is where the next one begins.
                log = draw.choice(["offsets", "commits"])
                wanted = batches(tmp_path) + draw.randrange(1, 4)
                while process.poll() is None and batches(tmp_path, log) < wanted:
                    time.sleep(0.002)
                time.sleep(draw.random() * 0.2)
                kill(process)
            process.wait()
        finally:
            kill(process)
        assert process.returncode in (0, -signal.SIGKILL), output.read_text()
        if process.returncode:
            kills += 1
        elif kills == KILLS:
            break
        else:
            # It was done before it could be killed.
            fed.step(100)
            fed.ship()
    assert sunk(spark, tmp_path) == told(fed)
    print(f"{kills} kills, {lives} lives, {batches(tmp_path)} batches, {len(told(fed))} entries")
