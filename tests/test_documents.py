"""Whatever the documentation shows to be typed runs as it stands: `documents.py` says how."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.documents import BadPage, Block, BlockFailed, blocks_of, run_page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
BLOCKS = {page: blocks_of(page, markdown) for page, markdown in PAGES.items()}

# What a page has to print, where that it ends well says too little.
SHOWN = {
    "docs/operating/log-tools.md": ["skipped 58 bytes after seq 3"],
    "docs/operating/recovering.md": ["the segment does not end with its trailer", "footer built again"],
    "docs/operating/spark.md": ["index 1 1"],
}

# Every block that no test runs, by its page and the reason that stands there.
NOT_RUN = [
    ("docs/operating/spark.md", "no package index has Lowwater yet"),
    ("docs/operating/spark.md", "it needs a Spark Connect server on another machine"),
]
NOT_RUN_MAX = 10

# Of a page that is not slow. A command takes a third of a second, nearly all of it to start Python.
COMMANDS_MAX = 4


def marks_of(blocks: list[Block]) -> list[pytest.MarkDecorator]:
    run = "".join(block.text for block in blocks if block.is_run)
    if "spark" in run:
        return [pytest.mark.long]
    return [pytest.mark.slow] if run.count("lowwater ") > COMMANDS_MAX else []


def pages_to_run() -> list[object]:
    return [
        pytest.param(page, marks=marks_of(blocks), id=page)
        for page, blocks in BLOCKS.items()
        if any(block.is_run for block in blocks)
    ]


@pytest.mark.parametrize("page", pages_to_run())
def test_every_block_of_a_page_runs_in_order(page: str, tmp_path: Path) -> None:
    """Readers copy before they read."""
    printed = run_page(BLOCKS[page], tmp_path)
    for shown in SHOWN.get(page, []):
        assert shown in printed


def test_blocks_that_are_not_run_are_few_and_known() -> None:
    """A marker is quicker written than a block is mended."""
    found = [(page, block.not_run) for page, blocks in BLOCKS.items() for block in blocks if block.not_run]
    assert found == NOT_RUN
    assert len(NOT_RUN) <= NOT_RUN_MAX


# ---------------------------------------------------------------------------- what they are

TEXTS = PAGES | {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "CHANGELOG.md", ROOT / "README.md", *sorted(ROOT.glob("*/README.md"))]
}
LINE_MAX = 120


def without_fences(markdown: str) -> list[str]:
    return re.sub(r"^ *```.*?^ *```$", "", markdown, flags=re.DOTALL | re.MULTILINE).splitlines()


def anchors_of(markdown: str) -> set[str]:
    headings = [line.lstrip("# ") for line in without_fences(markdown) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_decision_has_a_number_of_its_own() -> None:
    """Others name it by that."""
    decisions = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    numbers = [path.name[:4] for path in decisions]
    assert len(numbers) == len(set(numbers))
    headings = [re.match(r"# (\d+)[.:] ", path.read_text()) for path in decisions]
    assert [int(found[1]) if found else None for found in headings] == [int(number) for number in numbers]


def test_prose_fits_into_a_window() -> None:
    """A table's row, a link and a command cannot be broken; a sentence can."""
    long = [
        f"{page}: {line[:60]}"
        for page, text in TEXTS.items()
        for line in without_fences(text)
        if len(line) > LINE_MAX and not line.startswith("|") and " " in line.strip()
    ]
    assert long == []


def test_links_between_pages_lead_somewhere() -> None:
    """A heading is quickly renamed."""
    dead = []
    for page, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            if target.startswith("http"):
                continue
            found = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
            name = str(found.relative_to(ROOT))
            if not found.exists() or (anchor and anchor not in anchors_of(TEXTS[name])):
                dead.append(f"{page}: {target}")
    assert dead == []


# ---------------------------------------------------------------------------- what runs them


def run(markdown: str, directory: Path) -> str:
    return run_page(blocks_of("page.md", markdown), directory)


FAILING = """
# A page

```sh
echo first
```

```sh
echo second
false
echo third
```
"""


def test_a_command_that_fails_is_told_with_page_block_and_output(tmp_path: Path) -> None:
    """Also where it is not the last one of its block."""
    with pytest.raises(BlockFailed) as failed:
        run(FAILING, tmp_path)
    told = str(failed.value)
    assert told.startswith("page.md:9: the block ended with 1 instead of 0")
    assert "echo second\nfalse\n" in told
    assert told.endswith("Its output:\nsecond\n")


def test_a_python_block_that_raises_is_told_with_the_line_of_the_page(tmp_path: Path) -> None:
    """The traceback leads there."""
    with pytest.raises(BlockFailed, match=r'File "page.md", line 6, in <module>\n(.*\n)*AssertionError'):
        run("```python\na = 1\n```\n\n```python\nassert a == 2\n```\n", tmp_path)


def test_a_configuration_that_does_not_load_fails(tmp_path: Path) -> None:
    """Its keys are compared with those that there are."""
    with pytest.raises(BlockFailed, match=r"unknown key wal\.sync_mod "):
        run('```toml\n[wal]\nsync_mod = "none"\n```\n', tmp_path)


def test_python_that_ends_badly_fails_after_the_last_block(tmp_path: Path) -> None:
    """What a block leaves behind may break only when the interpreter goes."""
    with pytest.raises(BlockFailed, match="ended with 3"):
        run("```python\nimport atexit, os\n_ = atexit.register(os._exit, 3)\n```\n", tmp_path)


def test_blocks_go_on_where_the_one_before_ended(tmp_path: Path) -> None:
    """Directory, environment, configuration and names stay, as they do for a reader."""
    page = """
<!-- before: mkdir below -->

```sh
export GREETING='hello
there'
cd below
```

```toml
[wal]
sync_mode = "none"
```

1. A list, with a block in it:

   ```python
   from pathlib import Path
   here = Path("lowwater.toml").read_text()
   if here:
       print(here)
   ```

```python
print(len(here))
```

<!-- exit: 3 -->

```sh
echo "$GREETING"; exit 3
```

<!-- not run: it would fail -->

```sh
false
```

```text
nothing to run
```
"""
    assert run(page, tmp_path) == '[wal]\nsync_mode = "none"\n\n25\nhello\nthere\n'
    assert (tmp_path / "work" / "below" / "lowwater.toml").exists()


def test_an_exit_code_that_does_not_come_fails(tmp_path: Path) -> None:
    """A block that shows an error has to show it."""
    with pytest.raises(BlockFailed, match="ended with 0 instead of 65"):
        run("<!-- exit: 65 -->\n```sh\ntrue\n```\n", tmp_path)


@pytest.mark.parametrize(
    ("page", "what"),
    [
        ("```\nls\n```\n", "'' is none of"),
        ("```bash\nls\n```\n", "'bash' is none of"),
        ("```text\nThen:\nlowwater check data\n```\n", "begins a command"),
        ("```sh\nls\n", "has no end"),
        ("Type this:\n\n    lowwater check data\n", "without a fence"),
        ("<!-- not run -->\n```sh\nls\n```\n", "says nothing"),
        ("<!-- exit: 1 -->\n\nText.\n\n```sh\nls\n```\n", "right above"),
        ("<!-- not run: late -->\n```text\nls\n```\n", "never run"),
        ("```sh\nls\n```\n<!-- exit: 1 -->\n", "no block below"),
    ],
)
def test_a_page_that_cannot_be_run_exactly_is_refused(page: str, what: str) -> None:
    """A block that no test sees is one that goes wrong unseen."""
    with pytest.raises(BadPage, match=what):
        blocks_of("page.md", page)
