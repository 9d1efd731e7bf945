"""What all commands share: the option `--json`, how an error looks, tables, units, and progress.

Always true: results go to standard output and all else to standard error; under `--json` both are JSON.
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import Any, TextIO

import click
from rich import box
from rich.console import Console
from rich.table import Table

from lowwater.errors import LowwaterError, without_secrets

JSON_KEY = "lowwater.json"
TABLE_WIDTH_MAX = 1000
LINES_AT_ONCE = 200
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _remember(ctx: click.Context, _param: click.Parameter, as_json: bool) -> bool:
    ctx.meta[JSON_KEY] = as_json
    return as_json


# Eager, so that what is wrong with the other arguments is told as JSON too.
json_option = click.option(
    "--json", "as_json", is_flag=True, is_eager=True, callback=_remember, help="Print JSON, errors too."
)


class _Limit(click.IntRange):
    """How much to show, from 1 up; no walk of Python's takes a number above this."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return min(int(super().convert(value, param, ctx)), sys.maxsize)


LIMIT = _Limit(1)


class LocalPath(click.Path):
    """A path on this machine. A URI in its place would be taken for a strange directory, and shown with the
    secrets in it."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        if "://" in str(value):
            self.fail(
                f"{without_secrets(str(value))} is the URI of a store, and no path on this machine.",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


def print_error(ctx: click.Context, error: LowwaterError) -> None:
    """On standard error, so that standard output holds results and nothing else."""
    if ctx.meta.get(JSON_KEY):
        click.echo(json.dumps(error.as_dict()), err=True)
        return
    click.echo(f"error: {error}", err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)


# ---------------------------------------------------------------------------- results


def standard_output() -> TextIO:
    """For text from a log, which may hold letters that the terminal's encoding does not have."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return sys.stdout


def print_json(document: dict[str, Any]) -> None:
    """The one document of a command under `--json`."""
    click.echo(json.dumps(document, indent=2))


def print_table(table: Table) -> None:
    """In a file or a pipe a table is as wide as it must be, so that nothing of it is cut off."""
    out = standard_output()
    console = Console(file=out, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(file=out, highlight=False, markup=False, emoji=False, width=TABLE_WIDTH_MAX)
    console.print(table)


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table with these columns; those in `right` hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def size(value: int | None) -> str:
    """Bytes as people read them. JSON has the number."""
    if value is None:
        return ""
    amount, units = float(value), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def time(value_us: int | None, *, timespec: str = "microseconds") -> str:
    """A time of the log as ISO 8601, or as the number where the calendar ends before it."""
    if value_us is None:
        return ""
    try:
        moment = _EPOCH + timedelta(microseconds=value_us)
    except OverflowError:
        return f"{value_us} us"
    return moment.isoformat(timespec=timespec).replace("+00:00", "Z")


def visible(text: str) -> str:
    """Text from a log as one line that cannot steer a terminal: what does not print is escaped."""
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        letter if letter.isprintable() and letter != "\\" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def write_lines(lines: Iterator[str]) -> None:
    """Write many lines at once, and what is good also when an error follows it."""
    out = standard_output()
    held: list[str] = []
    try:
        for line in lines:
            held.append(line)
            if len(held) >= LINES_AT_ONCE or len(line) > 2**16:
                out.write("\n".join(held) + "\n")
                held = []
    finally:
        if held:
            out.write("\n".join(held) + "\n")
        out.flush()


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# How values are shown, by what `--values` says.
VALUES: dict[str, Callable[[bytes], str]] = {
    "none": lambda value: f"{len(value)} B",
    "utf8": lambda value: visible(value.decode(errors="backslashreplace")),
    "hex": bytes.hex,
    "base64": in_base64,
}

values_option = click.option(
    "--values",
    type=click.Choice(list(VALUES)),
    help="How to show values. The default is none, their size alone; in JSON it is base64.",
)


def chosen_values(values: str | None, *, as_json: bool) -> str:
    """The key of `VALUES` that the option, or its default, means."""
    if as_json and values not in (None, "none", "base64"):
        raise click.UsageError("In JSON values are base64: leave --values out, or give none.")
    return values or ("base64" if as_json else "none")


# ---------------------------------------------------------------------------- long work


@contextmanager
def progress_bar(what: str, total_bytes: Callable[[], int | None]) -> Iterator[Callable[[int], None]]:
    """Yields what is called with each number of bytes done. The bar is on standard error, and only where
    that is a terminal; `total_bytes` is not asked otherwise."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total_bytes())
        yield lambda count: progress.advance(task, count)


@contextmanager
def progress_bars(names: Mapping[str, str] | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Yields what is called with a thing that is done, how much of it, and how much there is (0 where nobody
    knows): a bar for each, on standard error, where that is a terminal. `names` is what to call them."""
    if not sys.stderr.isatty():
        yield lambda _what, _done, _total: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task((names or {}).get(what, what), total=total or None)
            bars.update(tasks[what], completed=done, total=total or None)

        yield progress


def end_on_sigterm(ctx: click.Context) -> None:
    """Make SIGTERM end the command as Ctrl-C does: what it opened is closed, what it began is removed."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is threading.main_thread():
        former = signal.signal(signal.SIGTERM, stop)
        ctx.call_on_close(lambda: signal.signal(signal.SIGTERM, former))
