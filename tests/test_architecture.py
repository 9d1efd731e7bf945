"""docs/ARCHITECTURE.md is a map of what is there: its walks, its rooms, and the index of decisions."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import lowwater

ROOT = Path(__file__).resolve().parent.parent
MAP = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
DECISIONS = ROOT / "docs" / "decisions"
SOURCES = [
    path
    for folder in ("engine", "tiering", "recovery", "spark", "chaos", "src/lowwater")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def named_in(walk: str) -> list[str]:
    """The functions that a walk names, in order."""
    text = MAP.partition(f"### {walk}\n")[2].partition("\n#")[0]
    assert text, f"there is no walk called {walk}"
    return re.findall(r"`(_?[A-Za-z]\w*(?:\.\w+)?)`", text)


def everything() -> set[str]:
    """All functions, classes and methods, as `Class.method`."""
    found = set()
    for path in SOURCES:
        for node in ast.parse(path.read_bytes(), path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            if isinstance(node, ast.ClassDef):
                found |= {
                    f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)
                }
    return found


def test_a_put_passes_what_its_walk_names_in_that_order(tmp_path: Path) -> None:
    passed: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("lowwater."):
            passed.append(frame.f_code.co_qualname)

    with lowwater.open(tmp_path / "db") as db:
        db.create_bucket("b")
        sys.setprofile(note)
        try:
            db.put("b", "k", b"value")
        finally:
            sys.setprofile(None)
    wanted = [name for name in named_in('`db.put("b", "k", value)`') if name != "State"]
    assert len(wanted) > 8
    left = iter(passed)
    for name in wanted:
        assert any(each == name for each in left), f"{name} was not passed after what stands before it"


@pytest.mark.parametrize("walk", re.findall(r"^### (.*)$", MAP, re.MULTILINE))
def test_every_walk_names_what_there_is(walk: str) -> None:
    known = everything() | {"redo_seq"}
    assert named_in(walk), "it names nothing"
    assert [name for name in named_in(walk) if name not in known] == []


def test_the_map_shows_every_room() -> None:
    shown = {path.rstrip("/") for path in re.findall(r"^\| `([\w/]+/)` \|", MAP, re.MULTILINE)}
    rooms = {
        f"engine/{path.name}"
        for path in (ROOT / "engine").iterdir()
        if (path / "__init__.py").exists() and path.name != "testing"
    }
    assert rooms == {path for path in shown if path.startswith("engine/")}
    assert all((ROOT / path).is_dir() for path in shown)


def test_the_index_of_decisions_is_whole() -> None:
    index = (DECISIONS / "README.md").read_text()
    for path in DECISIONS.glob("0*.md"):
        title = path.read_text().partition("\n")[0].removeprefix(f"# {path.name[:4]}: ")
        assert f"[{path.name[:4]}]({path.name}) | {title}" in index
