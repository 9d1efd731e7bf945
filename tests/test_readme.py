"""What the README shows must run as it stands."""

import re
from pathlib import Path

import pytest
from tests.documents import blocks_of, run_page

import lowwater

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_readme_has_its_twenty_lines() -> None:
    """A README without an example would make the next test pass for nothing."""
    assert len(BLOCKS) == 3


@pytest.mark.parametrize(
    ("block", "shown", "hidden"),
    [
        (BLOCKS[0], "['2026/'] b'1000'\n2026/99.jpg", "cat.jpg"),
        (BLOCKS[1], "b'200'\nb'2'", "100"),
        (BLOCKS[2], "999.jpg", "1001.jpg"),
    ],
    ids=["database", "sessions", "log"],
)
def test_the_lines_of_the_readme_run(
    block: str,
    shown: str,
    hidden: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A newcomer copies them first of all, and runs them again, with one more line or none."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        exec(compile(block, "README.md", "exec"), {})
        assert shown in (printed := capsys.readouterr().out)
        assert hidden not in printed


@pytest.mark.slow
def test_everything_that_the_readme_shows_runs_in_its_order(tmp_path: Path) -> None:
    """As somebody types it who goes down the page."""
    blocks = blocks_of("README.md", TEXT)
    assert [block.not_run for block in blocks if block.not_run] == [
        "it is for a clone, and the tests are in one that is installed"
    ]
    printed = run_page(blocks, tmp_path)
    assert "whole: nothing that was acknowledged is missing" in printed


def test_the_readme_says_how_far_it_is() -> None:
    """Before anybody installs it: what it is for, its status, where it runs, and what is not there."""
    head = TEXT[: TEXT.index("\n## Install")]
    for named in ("It is for", "alpha", lowwater.__version__, "Linux", "CPython 3.11", "**not** here yet"):
        assert named in head
    for missing in ("delete_range", "stream", "refresh"):
        assert not hasattr(lowwater.Database, missing), (
            f"{missing} is here, and the README says that it is not"
        )


def test_files_that_the_readme_names_exist() -> None:
    """A dead link is the first thing that a visitor meets."""
    names = re.findall(r"\]\(([^)#]+)\)", TEXT) + re.findall(r"`((?:engine|docs)/[\w./]+)`", TEXT)
    missing = [name for name in names if not (ROOT / name).exists()]
    assert not missing
