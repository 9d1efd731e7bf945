"""docs/operating/spark.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark.fed import random_archive

from lowwater.spark.columns import COLUMNS, MAIN_COLUMNS
from lowwater.spark.options import _NAMES, OPTIONS, Options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = (Path(__file__).parents[2] / "docs" / "operating" / "spark.md").read_text()


def rows_after(mark: str) -> list[list[str]]:
    """The cells of the first table after a line."""
    lines = PAGE[PAGE.index(mark) :].splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    found = []
    for line in lines[begin + 1 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_the_table_of_options_is_that_of_the_code() -> None:
    """An option that is documented wrong is worse than one that is not there."""
    shown = [
        (name.strip("`"), default.strip("`"), meaning)
        for name, default, meaning in rows_after("<!-- options")
    ]
    assert shown == [tuple(option) for option in OPTIONS]
    fields = {"path": "uri"}
    assert all(fields.get(name, name) in Options.__dataclass_fields__ for name in _NAMES)


def test_the_table_of_columns_is_that_of_the_code() -> None:
    """With the types that a schema has to have."""
    shown = []
    for names, kind, _ in rows_after("## Columns"):
        shown += [(name.strip("` "), kind.strip("`")) for name in names.split(",")]
    assert shown == [(name, COLUMNS[name]) for name in MAIN_COLUMNS]
    for name, kind in COLUMNS.items():
        if f"`{name} " in PAGE:
            assert f"`{name} {kind}`" in PAGE


@pytest.mark.slow
def test_every_block_of_python_runs(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other, as somebody types them who reads on: later ones have the names of those before."""
    fed = random_archive(tmp_path / "archive", seed=1, steps=60)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    blocks = [block for block in blocks if ".remote(" not in block]
    assert len(blocks) == 8
    names: dict[str, Any] = {}
    try:
        for block in blocks:
            for shown, here in {
                "s3://bucket/prefix": fed.uri,
                "/exports": str(tmp_path / "exports"),
                '"entries/"': f'"{tmp_path}/entries"',
                '"checkpoint/"': f'"{tmp_path}/checkpoint"',
                'master="local[*]"': "",  # there is a session
                "datetime(2026, 1, 31, 14, 5, tzinfo=UTC)": "datetime.now(UTC)",
            }.items():
                block = block.replace(shown, here)
            exec(compile(block, block, "exec"), names)
        assert names["rows"].count() == names["entries"].count() > 60
        assert names["built"].seq == fed.engine.catalogue.checkpoint_seq
        assert "index 1 1" in capsys.readouterr().out
    finally:
        if "query" in names:
            names["query"].stop()
        fed.close()
