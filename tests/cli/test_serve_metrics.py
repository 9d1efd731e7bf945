"""`lowwater serve-metrics`: what it serves is what the open database says of itself, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from tests.test_metrics import scraped

import lowwater
from lowwater.cli.root import root
from lowwater.tiering.observed import GAUGES

AWAY_S = 60
COMMAND = [sys.executable, "-m", "lowwater", "serve-metrics"]


@contextmanager
def serving(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and where it serves."""
    command = [*COMMAND, *map(str, arguments), "--port", "0", "--interval", "0.1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = ""
            while not told.rstrip().endswith("}"):
                line = process.stdout.readline()
                assert line, process.stderr and process.stderr.read()
                told += line
            yield process, json.loads(told)["url"]
        finally:
            process.kill()


def samples_at(url: str) -> dict[str, float]:
    with urlopen(url, timeout=AWAY_S) as answer:
        text = answer.read().decode()
    return {
        sample.name + sample.labels.get("part", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_what_the_open_database_says_of_itself(tmp_path: Path, number: signal.Signals) -> None:
    """A dashboard works with the one as with the other; and to be stopped is no error."""
    data, archive = tmp_path / "data", (tmp_path / "archive").as_uri()
    with (
        lowwater.open(data, tier=archive, config={"wal": {"rotate_max_bytes": "1 MiB"}}) as db,
        serving(data, "--tier", archive) as (process, url),
    ):
        db.create_bucket("b")
        db.put_many("b", [(f"{number:05}", b"v" * 1000) for number in range(3000)])
        db.checkpoint()
        hwm = db.ship()
        db.flush()
        # The database goes on by itself for a while: what shipping has recorded goes into pages, too.
        inside, outside = scraped(db.metrics()), samples_at(url)
        while outside.get("storage_s3_hwm") != hwm or any(outside[name] != inside[name] for name in GAUGES):
            inside, outside = scraped(db.metrics()), samples_at(url)
        assert outside["storage_current_seq"] == db.marks().durable
        assert outside["storage_s3_shipping_lag_bytes"] == 0
        parts = ("log", "pages", "checkpoints", "cache", "archive")
        assert {outside[f"lowwater_observed{part}"] for part in parts} == {1}
        process.send_signal(number)
        assert process.wait(AWAY_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        with pytest.raises(URLError):
            samples_at(url)


def test_without_an_archive_there_is_no_lag(tmp_path: Path) -> None:
    """A mark of nothing would look like one."""
    with lowwater.open(tmp_path / "data") as db:
        db.create_bucket("b")
    with serving(tmp_path / "data") as (_, url):
        samples = samples_at(url)
    assert samples["storage_current_seq"] == 2
    assert not any(name.startswith("storage_s3") for name in samples)
    assert "lowwater_observedarchive" not in samples


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    """With what to do about it."""
    lowwater.open(tmp_path / "data").close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(root, ["serve-metrics", str(tmp_path / "data"), "--port", str(port)])
    assert result.exit_code == 2
    assert f"127.0.0.1:{port} cannot be listened on" in result.stderr
    assert "hint: give another --port" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tier", "nonsense://x"], "nonsense"),
        (["--address", "not an address"], "cannot be listened on"),
        (["--port", "70000"], "70000"),
        (["--interval", "0"], "interval"),
    ],
)
def test_a_wrong_call_is_told(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Before anything is served."""
    lowwater.open(tmp_path / "data").close()
    result = CliRunner().invoke(root, ["serve-metrics", str(tmp_path / "data"), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_directory_without_a_database_is_told(tmp_path: Path) -> None:
    """Nothing is made there."""
    result = CliRunner().invoke(root, ["serve-metrics", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "there is nothing there" in result.stderr
    assert list(tmp_path.iterdir()) == []
