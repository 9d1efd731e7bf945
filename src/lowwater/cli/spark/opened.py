"""What the commands that use Spark share: their options, and a session that keeps quiet.

Always true: nothing of Spark or Java is written to standard output, and to standard error only with
`--log-level debug` or `info`; a session that was started here is stopped here.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from lowwater.config import Config
from lowwater.errors import InvalidConfig, LowwaterError
from lowwater.extras import require_extra

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Setting(click.ParamType[tuple[str, str]]):
    """A setting of Spark."""

    name = "key=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not equals or not key.startswith("spark."):
            self.fail(f"{value!r} is no setting of Spark: give spark.name=value", param, ctx)
        return key, text


def spark_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--master` and `--conf`, which are for `opened_session`."""
    command = click.option(
        "--conf", "settings", type=Setting(), multiple=True, help="A setting of Spark. May be repeated."
    )(command)
    return click.option(
        "--master", metavar="URL", help="Where Spark runs, as spark://host:7077; without it, on all cores."
    )(command)


@contextmanager
def opened_session(
    ctx: click.Context, master: str | None, settings: tuple[tuple[str, str], ...]
) -> Iterator[SparkSession]:
    require_extra("this command", "spark")
    from pyspark.sql import SparkSession

    import lowwater.spark
    from lowwater.spark.jobs import errors_of_tasks

    if SparkSession.getActiveSession() is not None:
        yield lowwater.spark.session(master=master, config=dict(settings))
        return
    wants_log = ctx.find_root().params.get("log_level") in ("debug", "info")
    with tempfile.TemporaryFile() as log:
        try:
            with _written_to(None if wants_log else log.fileno()):
                spark = lowwater.spark.session(master=master, config=dict(settings))
        except LowwaterError:
            raise
        except Exception as error:
            raise _not_started(error, log) from error
    with errors_of_tasks("the work"), _quiet_logging(quiet=not wants_log):
        try:
            yield spark
        finally:
            with warnings.catch_warnings():
                # That the JVM is gone, which the error says, or whoever killed both knows.
                warnings.simplefilter("ignore", RuntimeWarning)
                spark.stop()


@contextmanager
def _quiet_logging(*, quiet: bool) -> Iterator[None]:
    """Py4J tells the root logger what it raises, too, and has it write to standard error."""
    root, handler = logging.getLogger(), logging.NullHandler()
    if quiet:
        root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


@contextmanager
def _written_to(descriptor: int | None) -> Iterator[None]:
    """Make processes that are started meanwhile write to a descriptor, for as long as they live. The JVM
    keeps the descriptors that it was started with, and Python's workers have theirs from it."""
    if descriptor is None:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    try:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        yield
    finally:
        for number, own in enumerate(kept, 1):
            os.dup2(own, number)
            os.close(own)


_REASONS = (r"\w(Exception|Error): ", r"^Invalid |^Unrecognized ", r"Exception|Error")


def _first(pattern: str, lines: list[str]) -> str:
    return next((line for line in lines if re.search(pattern, line)), "")


def _not_started(error: Exception, log: Any) -> LowwaterError:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    # What was thrown comes behind a line of the log that says that something was; the JVM says it plainly.
    why = next(filter(None, (_first(pattern, lines) for pattern in _REASONS)), "")
    reason = why or next(iter(str(error).splitlines()), type(error).__name__)
    return InvalidConfig(
        f"Spark did not start: {reason.strip():.300}",
        hint="look at --master and --conf; `lowwater --log-level info spark …` shows what Spark says",
    )


def store_options(ctx: click.Context, uri: str) -> Mapping[str, str] | None:
    """What the configuration says of the store at this URI, if that is its own, and how stores are called."""
    from lowwater.spark.plan import SETTINGS, SETTINGS_PREFIX

    tier = Config.load(ctx.find_root().obj).tier
    options = dict(tier.options) if uri == tier.store_uri() else {}
    changed = tier.model_dump(include=set(SETTINGS), exclude_defaults=True)
    return options | {f"{SETTINGS_PREFIX}{name}": str(value) for name, value in changed.items()}
