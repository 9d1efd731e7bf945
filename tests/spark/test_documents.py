"""docs/operating/spark.md says what the code does."""

from __future__ import annotations

from pathlib import Path

from lowwater.spark.entry_columns import COLUMNS, MAIN_COLUMNS
from lowwater.spark.options import _NAMES, OPTIONS, Options

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
