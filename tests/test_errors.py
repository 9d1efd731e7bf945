"""src/lowwater/errors.py, and what becomes of an error, a warning and an interrupt at the command line."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from lowwater import errors
from lowwater import logging as lowwater_logging
from lowwater.cli.output import json_option
from lowwater.cli.root import COMMANDS, Root, root
from lowwater.errors import Corrupt, DiskFull, LowwaterError

CLASSES = {
    name: cls
    for name, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, LowwaterError) and cls.__module__ == errors.__name__
}


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    """People choose what to catch from the drawing."""
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^([ │├└─]{4,})([A-Z]\w+)", line)
        if not found:
            continue
        column, name = found.start(2), found[2]
        above = [(left, parent) for left, parent in above if left < column]
        drawn[name] = above[-1][1] if above else "Exception"
        above.append((column, name))
    assert drawn == {name: cls.__bases__[0].__name__ for name, cls in CLASSES.items()}


def test_what_the_caller_must_do_decides_the_exit_code() -> None:
    """A script tells by the code whether to try again."""
    codes = {name: cls.exit_code for name, cls in CLASSES.items() if cls.__bases__[0] is LowwaterError}
    assert codes == {
        "RetryError": 75,
        "InputError": 2,
        "DeniedError": 77,
        "DataError": 65,
        "ReopenError": 74,
        "InternalError": 70,
    }
    for cls in CLASSES.values():
        for base in cls.__bases__:
            assert base in (Exception, LowwaterError) or cls.exit_code == base.exit_code  # type: ignore[attr-defined]


def test_an_error_says_what_where_and_what_next() -> None:
    """Fields for programs, one sentence for people."""
    error = Corrupt("the checksum does not hold", path=Path("wal/current.log"), seq=7, offset=64)
    assert str(error) == "the checksum does not hold (path wal/current.log, seq 7, offset 64)"
    assert error.as_dict() == {
        "error": "Corrupt",
        "message": "the checksum does not hold",
        "path": "wal/current.log",
        "seq": 7,
        "offset": 64,
        "hint": Corrupt.default_hint,
    }
    assert LowwaterError("no", hint="wait").hint == "wait"


# ------------------------------------------------------------------ at the command line


def run(callback: Callable[[], None], *arguments: str) -> Result:
    """Run a command under the options that all commands share."""

    @json_option
    def command(as_json: bool) -> None:
        callback()

    class OneCommand(Root):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            return click.command("do")(command)

    group = OneCommand(callback=root.callback, params=root.params)
    return CliRunner().invoke(group, arguments or ("do",), prog_name="lowwater")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command line sets up the logging of the whole process."""
    logger = logging.getLogger("lowwater")
    before = (logger.handlers, logger.propagate, logger.level)
    yield
    logger.handlers, logger.propagate, logger.level = before


def raising(error: BaseException) -> Callable[[], None]:
    def callback() -> None:
        raise error

    return callback


def test_an_expected_error_is_a_line_a_hint_and_an_exit_code() -> None:
    """A traceback says nothing to an operator."""
    result = run(raising(DiskFull("no room", path="wal")))
    assert result.exit_code == 75
    assert result.stdout == ""
    assert result.stderr == f"error: no room (path wal)\nhint: {DiskFull.default_hint}\n"


def test_an_error_without_a_hint_prints_none() -> None:
    """An empty line says less than no line."""
    assert run(raising(LowwaterError("no"))).stderr == "error: no\n"


def test_an_expected_error_is_json_under_json() -> None:
    """Whoever reads the results by program reads the errors so too."""
    error = DiskFull("no room", path="wal", seq=3)
    result = run(raising(error), "do", "--json")
    assert result.exit_code == 75
    assert json.loads(result.stderr) == error.as_dict()


def test_an_unexpected_error_keeps_its_traceback() -> None:
    """It is a bug, and its report needs the place."""
    assert isinstance(run(raising(ZeroDivisionError())).exception, ZeroDivisionError)


def test_an_interrupt_is_one_line() -> None:
    """Ctrl-C on a long verify is no failure to explain."""
    result = run(raising(KeyboardInterrupt()))
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_a_wrong_argument_is_an_input_error() -> None:
    """The same code as for all that the caller must change."""
    for arguments in (
        ("--config", "missing.toml", "do"),
        ("--log-level", "loud", "do"),
        ("do", "--nonsense"),
    ):
        result = run(lambda: None, *arguments)
        assert result.exit_code == errors.InputError.exit_code
        assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["get", "--json"],
        ["ls", "--nonsense", "--json"],
        ["log", "dump", "--json", "data", "--limit", "0"],
        ["tier", "verify", "data", "--json"],
        ["nosuch", "--json"],
        ["--config", "/nonexistent", "ls", "data", "--json"],
        ["--nosuch", "ls", "data", "--json"],
    ],
)
def test_a_wrong_call_is_json_under_json(arguments: list[str]) -> None:
    """The contract is for all errors, and a wrong call is the first that a program's author meets."""
    result = CliRunner().invoke(root, arguments, prog_name="lowwater")
    assert result.exit_code == 2
    assert result.stdout == ""
    error = json.loads(result.stderr)
    assert error["error"] == "InputError"
    assert "--help` says" in error["hint"]


def test_every_command_can_be_imported_and_has_help() -> None:
    """A name in the list without its file would only be noticed by whoever calls it."""
    for name in COMMANDS:
        result = CliRunner().invoke(root, [name, "--help"])
        assert result.exit_code == 0, result.output


def lowwater(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lowwater", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_a_reader_that_goes_away_is_no_error() -> None:
    """`lowwater log dump | head` ends without a word."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "lowwater", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.stderr == ""


def test_it_refuses_to_run_without_its_asserts() -> None:
    """Under `python -O` the checks on our own bugs would be gone."""
    done = lowwater("--version", PYTHONOPTIMIZE="1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: lowwater does not run under python -O\nhint: ")


def test_it_says_what_to_install_where_the_command_lines_packages_are_missing(tmp_path: Path) -> None:
    """The library is useful without them, and `lowwater` is installed with it."""
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError('', name='click')")
    done = lowwater("--version", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "pip install 'lowwater[cli]'" in done.stderr


@pytest.mark.parametrize("package", ["pyspark", "pyarrow", "numpy"])
def test_spark_says_what_to_install_where_its_packages_are_missing(package: str) -> None:
    """Whoever has installed the library alone has none of them."""
    script = f"""
import sys
sys.modules[{package!r}] = None
import lowwater.spark
try:
    lowwater.spark.session
except lowwater.errors.InputError as error:
    print(error.message, error.hint)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    wanted = f"lowwater.spark needs {package}, which is not installed pip install 'lowwater[spark]'"
    assert done.stdout.strip() == wanted


@pytest.mark.parametrize("package", ["pyarrow", "numpy"])
def test_columns_say_what_to_install_where_their_packages_are_missing(package: str) -> None:
    """Nothing else of the library needs them."""
    script = f"""
import sys
sys.modules[{package!r}] = None
import lowwater
try:
    lowwater.read_segment("current.log")
except lowwater.errors.InputError as error:
    print(error.message, error.hint)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    wanted = f"lowwater.read_segment needs {package}, which is not installed pip install 'lowwater[arrow]'"
    assert done.stdout.strip() == wanted


def test_it_says_its_version() -> None:
    """The first question of every report."""
    done = lowwater("--version")
    assert re.fullmatch(r"lowwater \d+\.\d+\.\d+ \(loops (not )?compiled.*\)\n", done.stdout)


# ------------------------------------------------------------------ what is not an error


def say(*, configure: str = "") -> subprocess.CompletedProcess[str]:
    script = f"""
from lowwater import logging
{configure}
log = logging.get_logger("wal")
log.info("rotated", bytes=7)
log.warning("slow", seconds=2, path="a b")
"""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_a_library_says_nothing_below_a_warning() -> None:
    """It is a guest in somebody else's program."""
    done = say()
    assert (done.stdout, done.stderr) == ("", 'slow seconds=2 path="a b"\n')


def test_the_host_program_sees_events_as_the_standard_librarys(caplog: pytest.LogCaptureFixture) -> None:
    """Its own handlers, filters and levels apply."""
    with caplog.at_level("INFO", logger="lowwater.wal"):
        lowwater_logging.get_logger("wal").info("rotated", bytes=7)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("lowwater.wal", "rotated bytes=7")
    ]


def test_the_command_line_logs_json_with_fields() -> None:
    """One event a line, for whoever collects them."""
    done = say(configure="logging.configure('info', json=True)")
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [event.pop("timestamp")[-1] for event in events] == ["Z", "Z"]
    assert events == [
        {"event": "rotated", "bytes": 7, "level": "info", "logger": "lowwater.wal"},
        {"event": "slow", "seconds": 2, "path": "a b", "level": "warning", "logger": "lowwater.wal"},
    ]


def test_the_command_line_logs_lines_from_the_level_that_was_asked_for() -> None:
    """Debugging output is there when wanted, and only then."""
    done = say(configure="logging.configure('warning', json=False)")
    assert "rotated" not in done.stderr
    assert "slow" in done.stderr
    assert "seconds=2" in done.stderr
