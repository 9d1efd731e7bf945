"""What the README shows must run as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


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
    """A newcomer copies them first of all."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})
    assert shown in (printed := capsys.readouterr().out)
    assert hidden not in printed


def test_files_that_the_readme_names_exist() -> None:
    """A dead link is the first thing that a visitor meets."""
    text = (ROOT / "README.md").read_text()
    names = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r"`((?:engine|docs)/[\w./]+)`", text)
    missing = [name for name in names if not (ROOT / name).exists()]
    assert not missing
