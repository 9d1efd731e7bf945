"""What errors and findings advise, wherever it stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import lowwater

ROOT = Path(__file__).parent.parent
FOLDERS = ("engine", "tiering", "recovery", "spark", "src/lowwater")
SOURCES = sorted({path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")})

# What nobody is told to do with a file, an object or a directory.
DESTROYS = re.compile(r"\b(remove|delete|discard|wipe|erase|overwrite|truncate|unlink|rm|drop|reset)\b")
MOVES = re.compile(r"\b(move|rename)\b")
COPIES = re.compile(r"\b(copy|copies)\b")
# Words that are no advice about data.
ALLOWED = {
    "give some, as put, delete, copy, or leave it out",
    "remove lone surrogates",
}
# Which argument the hint is.
FIELDS = {"Finding": 5, "self._wrong": 2}


def texts(node: ast.AST) -> Iterator[str]:
    """The texts that an expression may give, those in braces left out."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.value
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)
    elif not isinstance(node, ast.Name | ast.Attribute):
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def hints_in(source: str, *, all_of_it: bool = False) -> Iterator[str]:
    """What is given as a hint, stands in a name that says so, or is a finding's last field."""
    for node in ast.walk(ast.parse(source)):
        given: list[ast.expr | None] = []
        if isinstance(node, ast.keyword):
            given = [node.value] if node.arg == "hint" else []
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = any(re.search("hint|_RESTORE", ast.unparse(each), re.IGNORECASE) for each in targets)
            given = [node.value] if named or all_of_it else []
        elif isinstance(node, ast.Return):
            given = [node.value] if all_of_it else []
        elif isinstance(node, ast.Call) and (field := FIELDS.get(ast.unparse(node.func))):
            given = [*node.args[field:]]
        for each in given:
            if each is not None:
                yield from texts(each)


def why_not(hint: str) -> str | None:
    if hint in ALLOWED:
        return None
    if found := DESTROYS.search(hint):
        return f"it says {found[0]!r}"
    moves, copies = MOVES.search(hint), COPIES.search(hint)
    if moves and not (copies and copies.start() < moves.start()):
        return "it moves what was not copied"
    return None


def test_no_hint_destroys() -> None:
    """Whoever follows one is in trouble already, and what it took away may be all that was left."""
    wrong = [
        f"{path.relative_to(ROOT)}: {why}: {hint}"
        for path in SOURCES
        for hint in hints_in(path.read_text(), all_of_it=path.name == "remedies.py")
        if (why := why_not(hint))
    ]
    assert wrong == []


def test_the_walk_finds_hints() -> None:
    """A walk that has never found any proves nothing."""
    found = [hint for path in SOURCES for hint in hints_in(path.read_text())]
    assert len(found) > 300
    assert lowwater.errors.Corrupt.default_hint in found
    source = 'raise E("x", hint=f"remove {it}" if a else "look at it, and move it away")'
    whys = [why_not(hint) for hint in hints_in(source)]
    assert whys == ["it says 'remove'", "it moves what was not copied"]
    assert why_not("keep a copy of it elsewhere, then move it away") is None
    assert [*hints_in('Finding("error", what, path, None, None, "delete it")')] == ["delete it"]
