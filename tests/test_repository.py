"""The repository itself: the links, the names that only one module may use, and what gets into a wheel."""

from __future__ import annotations

import ast
import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lowwater"

# Folders that hold Python, but belong to no installation.
OUTSIDE = {"bench", "tests"}
LAYERS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in OUTSIDE)
FUTURE_LAYERS = {"engine", "tiering", "recovery", "raft", "spark", "chaos"}


def sources(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_bytes(), path)


def test_every_folder_at_the_top_is_linked_and_imports_by_its_name() -> None:
    """A folder without its link is missing from every installation, and no other test may notice."""
    assert "engine" in LAYERS
    for name in LAYERS:
        link = PACKAGE / name
        assert link.is_symlink(), f"add it: ln -s ../../{name} src/lowwater/{name}"
        assert os.readlink(link) == f"../../{name}", "a relative link works in every clone"
        module = importlib.import_module(f"lowwater.{name}")
        assert Path(module.__file__ or "").resolve() == ROOT / name / "__init__.py"


def test_every_link_leads_to_a_folder_at_the_top() -> None:
    """A link to nothing breaks the wheel, not the checkout."""
    links = sorted(path.name for path in PACKAGE.iterdir() if path.is_symlink())
    assert links == LAYERS


def test_no_module_is_imported_by_the_name_of_its_folder() -> None:
    """`import engine` makes a second module of the same file, with classes that equal no others."""
    for path, tree in sources(*LAYERS, "src", "tests", "bench"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno} imports relatively"
                names = [node.module or ""]
            else:
                continue
            for name in names:
                assert name.split(".")[0] not in FUTURE_LAYERS, f"{path}:{node.lineno} imports bare {name}"


def _ours() -> Iterator[tuple[Path, ast.Module]]:
    for path, tree in sources(*LAYERS):
        if "testing" not in path.parts and path.name != "__init__.py":
            yield path, tree
    for path in sorted(PACKAGE.glob("*.py")):
        if path.name != "__init__.py":
            yield path.relative_to(ROOT), ast.parse(path.read_bytes(), path)


def test_no_file_name_stands_in_two_folders() -> None:
    """The command line's files are named after commands."""
    by_name: dict[str, list[str]] = {}
    for path, _ in _ours():
        by_name.setdefault(path.name, []).append(str(path))
    assert len(by_name) > 150
    assert [paths for paths in by_name.values() if len(paths) > 1] == []


def test_no_class_name_stands_in_two_modules() -> None:
    by_name: dict[str, list[str]] = {}
    for path, tree in _ours():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                by_name.setdefault(node.name, []).append(str(path))
    assert len(by_name) > 400
    assert {name: paths for name, paths in by_name.items() if len(paths) > 1} == {}


def test_no_docstring_begins_as_a_riddle() -> None:
    """An editor shows a docstring on hover, alone: nobody sees the one above that it leans on."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    riddles = re.compile(r"(The same|Of|That|Those|Have)\b")
    found = [
        f"{path}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}: {text.splitlines()[0]}"
        for path, tree in sources(*LAYERS, "src")
        for node in ast.walk(tree)
        if isinstance(node, documented) and riddles.match(text := ast.get_docstring(node) or "")
    ]
    assert not found, "\n".join(["say what it does or returns:", *found])


def test_the_engine_opens_no_file_by_itself() -> None:
    """A file that is opened past the seams is one that the crash tests cannot lose."""
    for path, tree in sources("engine"):
        if path == Path("engine/seams/real.py"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "open", f"{path}:{node.lineno} calls open(): take Files"
            if isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names}
                assert not names & {"open", "Path"}, f"{path}:{node.lineno} imports {names}: take Files"


def test_lint_refuses_each_name_that_has_an_owner() -> None:
    """A ban that does not bite, for a slip in its name, is worse than none."""
    banned = {
        "import time\ntime.time()\n": "time.time",
        "from time import monotonic\nmonotonic()\n": "time.monotonic",
        "import time\ntime.perf_counter()\n": "time.perf_counter",
        "import random\n": "random",
        "from random import Random\n": "random",
        "import uuid\nuuid.uuid4()\n": "uuid.uuid4",
        "import os\nos.urandom(1)\n": "os.urandom",
        "import secrets\n": "secrets",
        "import threading\nthreading.Thread()\n": "threading.Thread",
        **{f"import {name}\n": name for name in FUTURE_LAYERS},
        **{f"from {name} import x\n": name for name in FUTURE_LAYERS},
    }
    ruff = Path(sys.executable).parent / "ruff"
    command: list[str | Path] = [
        ruff,
        "check",
        "--no-cache",
        "--config",
        ROOT / "pyproject.toml",
        "--select",
        "TID251",
    ]
    for code, name in banned.items():
        for path, refused in (("engine/log/wal.py", True), ("engine/seams/real.py", False)):
            done = subprocess.run(
                [*command, "--stdin-filename", ROOT / path, "-"],
                input=code,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (done.returncode != 0) == refused, f"{path}, {name}: {done.stdout}{done.stderr}"


def test_every_test_runs_in_one_of_the_targets() -> None:
    """A test that no target runs says nothing; one of `make check` alone is missing from `make test`."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    tiers = dict(re.findall(r"^(FAST|SLOW|LONG) := (.+)$", makefile, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    options = project["tool"]["pytest"]["ini_options"]
    assert "-m" not in options["addopts"], "that leaves some out without a word"
    names = [marker.split(":")[0] for marker in options["markers"]]
    for marks in itertools.product((False, True), repeat=len(names)):
        marked = dict(zip(names, marks, strict=True))
        # These expressions of pytest are Python's.
        runs = {tier: eval(expression, {}, marked) for tier, expression in tiers.items()}
        assert sum(runs.values()) == 1, f"{marked} is in none of them, or in several"
    recipes = {
        name: makefile.split(f"\n{name}: ")[1].split("\n\n")[0] for name in ("check", "test", "test-long")
    }
    for name, run in (("check", ["FAST"]), ("test", ["FAST", "SLOW"]), ("test-long", ["LONG"])):
        assert re.findall(r"\$\(PYTEST\) [^\"]*-m \"\$\((\w+)\)\"$", recipes[name], re.MULTILINE) == run


@pytest.mark.slow
@pytest.mark.parametrize(("ci", "code", "said"), [("", 0, "NOT TESTED: Docker's"), ("true", 1, "1 failed")])
def test_what_needs_docker_is_skipped_aloud_and_fails_in_ci(
    tmp_path: Path, ci: str, code: int, said: str
) -> None:
    """A machine without its engine is no fault of the code; one that must have it does not pass without."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import subprocess, pytest\n"
        "@pytest.mark.docker\n"
        "def test_it(): subprocess.run(['docker', 'info'], check=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PATH": "", "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["", "false"], ids=["with a compiler", "without"])
def test_a_wheel_from_a_source_distribution_holds_the_modules_behind_the_links(
    tmp_path: Path, compiler: str
) -> None:
    """Other build back ends drop them without a word. Without a compiler nothing is missing but speed."""
    if not compiler and not shutil.which("cc"):
        pytest.skip("there is no C compiler here")
    environment = {**os.environ, **({"CC": compiler} if compiler else {})}
    clone = tmp_path / "clone"
    leave_out = shutil.ignore_patterns(
        ".*", "build", "dist", "*.egg-info", "*.so", "__pycache__", "tests", "bench"
    )
    shutil.copytree(ROOT, clone, symlinks=True, ignore=leave_out)

    def build(directory: Path, kind: str) -> Path:
        script = f"import sys, setuptools.build_meta as build; build.build_{kind}(sys.argv[1])"
        command = [sys.executable, "-c", script, str(tmp_path)]
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (built,) = tmp_path.glob("*.tar.gz" if kind == "sdist" else "*.whl")
        return built

    with tarfile.open(build(clone, "sdist")) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path / "unpacked")  # Python 3.11.2 knows no filter
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build(unpacked, "wheel")) as wheel:
        held = {name for name in wheel.namelist() if name.startswith("lowwater/")}
    loops = "lowwater/engine/format/_fast."
    compiled = {name for name in held if name.startswith(loops) and name.endswith(".so")}
    assert bool(compiled) == (compiler != "false")

    expected = {"lowwater/py.typed", *(f"lowwater/{path.name}" for path in PACKAGE.glob("*.py"))}
    expected.add("lowwater/spark/log4j2.properties")
    for folder in (*(ROOT / name for name in LAYERS), PACKAGE / "cli"):
        expected |= {f"lowwater/{path.relative_to(folder.parent)}" for path in folder.rglob("*.py")}
    assert held - compiled == expected


def test_importing_it_does_not_take_what_only_configurations_need() -> None:
    """pydantic takes longer to import than all the rest, and OpenDAL is for those who have a store."""
    script = "import lowwater, sys; print([name for name in ('pydantic', 'opendal') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT / "src"
    )
    assert done.stdout.strip() == "[]"
