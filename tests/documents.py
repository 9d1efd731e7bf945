"""The blocks of a page of the documentation, and running them as a reader would.

A page's blocks run in order, in one directory that was empty:

  - `sh` in bash, which ends at the first command that fails. What it exports, and `cd`, hold for the next.
  - `python` in one process a page: later blocks have the names of those before. What it left open is closed
    by its end.
  - `toml` is a configuration: it has to load, and stands in `lowwater.toml` for the blocks after it.
  - `text` is what is shown to be read. Nothing else may be in a fence, and code in no other place.

Buckets that a page names are those of a real S3 server on this machine, which the environment leads to.

Comments that no reader sees say what is special about the next block:

  - `<!-- before: command -->` has bash do what a reader has done by then;
  - `<!-- exit: 65 -->` is the exit code that the block is there to show;
  - `<!-- not run: reason -->` is for what cannot run in a test.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lowwater.tiering.testing.s3_server import S3Server

LANGUAGES = ("sh", "python", "toml", "text")
MARKER = re.compile(r"<!-- (before|exit|not run)\b:?(.*?)-->", re.DOTALL)
FENCE = re.compile(r"( *)(`{3,}|~{3,})(.*)")
COMMAND = re.compile(
    r"^ *(\$ |lowwater |pip |make |export |spark-submit |python |import |from \w+ import )", re.MULTILINE
)
BUCKET = re.compile(r"\bs3://([a-z0-9][a-z0-9.-]*)")

# Blocks come as lines of JSON. What they print goes where this process' output goes, and the answers apart.
PYTHON = """
import json, os, sys, traceback
answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
names = {"__name__": "__main__"}
for line in sys.stdin:
    page, text = json.loads(line)
    try:
        exec(compile(text, page, "exec"), names)
        done = 0
    except BaseException:
        traceback.print_exc()
        done = 1
    sys.stdout.flush()
    sys.stderr.flush()
    print(done, file=answers)
"""
LOAD = "import sys; from lowwater.config import Config; Config.load(sys.argv[1])"
# However the block ends, the environment that it has made is that of the next one.
SHELL = """
set -euo pipefail
trap 'code=$?; env -0 > "$SHELL_STATE"; exit $code' EXIT
. "$SHELL_BLOCK"
"""


@dataclass
class Block:
    page: str
    line: int  # of its first line of code, from 1
    language: str
    text: str
    exit_code: int = 0
    not_run: str | None = None

    @property
    def is_run(self) -> bool:
        return self.language != "text" and self.not_run is None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


class BadPage(AssertionError):
    """A page that nobody can run exactly."""


class BlockFailed(AssertionError):
    def __init__(self, block: Block, what: str, output: str) -> None:
        super().__init__(f"{block.where}: the block {what}\n\n{block.text}\nIts output:\n{output}")


def blocks_of(page: str, markdown: str) -> list[Block]:
    """All blocks of a page, with what its comments have a test do before them."""
    found: list[Block] = []
    exit_code: int | None = None
    not_run: str | None = None
    lines = iter(enumerate(markdown.splitlines(), 1))
    blank_before = True
    for number, line in lines:
        if (marked := re.match(r" *(<!--.*)", line)) is not None:
            comment = marked[1]
            while "-->" not in comment:
                comment += "\n" + next(lines, (0, "-->"))[1]
            if (marker := MARKER.match(comment)) is None:
                continue
            kind, text = marker[1], marker[2].strip()
            if not text:
                raise BadPage(f"{page}:{number}: {kind!r} says nothing")
            if kind == "before":
                found.append(Block(page, number, "sh", text + "\n"))
            elif kind == "exit":
                exit_code = int(text)
            else:
                not_run = text
            blank_before = True
        elif (fence := FENCE.fullmatch(line)) is not None:
            block = Block(page, number + 1, fence[3], _fenced(page, number, fence, lines))
            if block.language not in LANGUAGES:
                raise BadPage(f"{page}:{number}: {block.language!r} is none of {', '.join(LANGUAGES)}")
            if block.language == "text" and (exit_code is not None or not_run is not None):
                raise BadPage(f"{page}:{number}: a block of text has a marker, and is never run")
            if block.language == "text" and (command := COMMAND.search(block.text)):
                raise BadPage(f"{page}:{number}: {command[1]!r} begins a command, and this is text")
            block.exit_code, block.not_run = exit_code or 0, not_run
            found.append(block)
            exit_code = not_run = None
            blank_before = True
        elif line.strip():
            if blank_before and line.startswith("    "):
                raise BadPage(f"{page}:{number}: code without a fence, which says no language")
            if exit_code is not None or not_run is not None:
                raise BadPage(f"{page}:{number}: a marker has to stand right above its block")
            blank_before = False
        else:
            blank_before = True
    if exit_code is not None or not_run is not None:
        raise BadPage(f"{page}: a marker is the last thing, with no block below it")
    return found


def _fenced(page: str, number: int, fence: re.Match[str], lines: Iterator[tuple[int, str]]) -> str:
    indent, ticks = len(fence[1]), fence[2]
    text = ""
    for _, line in lines:
        if line.strip() == ticks:
            return text
        text += line[min(indent, len(line) - len(line.lstrip(" "))) :] + "\n"
    raise BadPage(f"{page}:{number}: the fence has no end")


def run_page(blocks: list[Block], directory: Path) -> str:
    """Run them below `directory`, and return all that they printed. Raises BlockFailed."""
    running = [block for block in blocks if block.is_run]
    work, home = directory / "work", directory / "home"
    work.mkdir()
    home.mkdir()
    with ExitStack() as stack:
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(home),
            "PWD": str(work),
            "LANG": "C.UTF-8",
            "PYTHONWARNINGS": "error",
        }
        if buckets := sorted({name for block in running for name in BUCKET.findall(block.text)}):
            server = stack.enter_context(S3Server(directory / "s3", buckets=buckets))
            environment |= {
                "AWS_ENDPOINT_URL": server.endpoint,
                "AWS_REGION": server.options["region"],
                "AWS_ACCESS_KEY_ID": server.options["access_key_id"],
                "AWS_SECRET_ACCESS_KEY": server.options["secret_access_key"],
            }
        page = _Page(directory, environment)
        stack.callback(page.kill)
        output = "".join(page.run(block) for block in running)
        page.end()
        return output


class _Page:
    """The shell and the Python of one reader."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self.environment = environment
        self.python: subprocess.Popen[bytes] | None = None
        self.last: Block | None = None

    def run(self, block: Block) -> str:
        run = {"sh": self._run_shell, "python": self._run_python, "toml": self._run_toml}[block.language]
        code, output = run(block)
        if code != block.exit_code:
            raise BlockFailed(block, f"ended with {code} instead of {block.exit_code}", output)
        return output

    def end(self) -> None:
        """Python ends as it does when a reader leaves it."""
        if self.python is None or self.last is None:
            return
        assert self.python.stdin is not None
        self.python.stdin.close()
        if code := self.python.wait():
            raise BlockFailed(
                self.last, f"was the last one of a Python that ended with {code}", self._said(0)
            )

    def kill(self) -> None:
        if self.python is not None:
            with self.python, self.answers:
                self.python.kill()

    def _run_shell(self, block: Block) -> tuple[int, str]:
        script, state = self.directory / "block.sh", self.directory / "environment"
        script.write_text(block.text)
        code, output = self._run(["bash", "-c", SHELL], SHELL_BLOCK=str(script), SHELL_STATE=str(state))
        variables = dict(each.split("=", 1) for each in state.read_text().split("\0") if each)
        self.environment = {
            name: value for name, value in variables.items() if name not in ("SHELL_BLOCK", "SHELL_STATE")
        }
        return code, output

    def _run_toml(self, block: Block) -> tuple[int, str]:
        Path(self.environment["PWD"], "lowwater.toml").write_text(block.text)
        return self._run([sys.executable, "-c", LOAD, "lowwater.toml"])

    def _run(self, command: list[str], **variables: str) -> tuple[int, str]:
        done = subprocess.run(
            command,
            cwd=self.environment["PWD"],
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return done.returncode, done.stdout.decode("utf-8", "replace")

    def _run_python(self, block: Block) -> tuple[int, str]:
        if self.python is None:
            self._start_python()
        assert self.python is not None
        assert self.python.stdin is not None
        self.last = block
        before = self.said.stat().st_size
        # Blank lines above it, so that a traceback has the lines of the page.
        text = "\n" * (block.line - 1) + block.text
        self.python.stdin.write(json.dumps([block.page, text]).encode() + b"\n")
        self.python.stdin.flush()
        answer = self.answers.readline()
        return int(answer) if answer else self.python.wait(), self._said(before)

    def _start_python(self) -> None:
        self.said = self.directory / "python.txt"
        answers, to = os.pipe()
        self.answers = os.fdopen(answers)
        with self.said.open("wb") as said:
            self.python = subprocess.Popen(
                [sys.executable, "-c", PYTHON, str(to)],
                cwd=self.environment["PWD"],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                pass_fds=[to],
            )
        os.close(to)

    def _said(self, offset: int) -> str:
        return self.said.read_bytes()[offset:].decode("utf-8", "replace")
