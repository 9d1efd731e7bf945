"""The first level of the command line: the options for all commands, and what becomes of their errors.

Always true: an error that Lowwater expects ends as a line, a hint and its exit code, never as a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

import lowwater
from lowwater import logging
from lowwater.cli.output import JSON_KEY, LocalPath, print_error
from lowwater.engine.format.fast import IS_COMPILED, WHY_NOT_COMPILED
from lowwater.errors import InputError, LowwaterError

# Where each command is: `compact-local` is the object `compact_local` in that module.
COMMANDS = {
    "log": "lowwater.cli.log",
    "scrub": "lowwater.cli.tier.scrub",
    "tier": "lowwater.cli.tier",
    "compact-local": "lowwater.cli.database.compact_local",
    "rebuild-pages": "lowwater.cli.database.rebuild_pages",
    "serve-metrics": "lowwater.cli.database.serve_metrics",
    "restore": "lowwater.cli.restore",
    "spark": "lowwater.cli.spark",
    **{
        name: f"lowwater.cli.database.{name}"
        for name in ("check", "checkpoints", "get", "history", "ls", "pages", "put", "root")
    },
}

INTERRUPTED = 130


class Root(click.Group):
    """Imports a command when it is called, so that none pays for the packages of another."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name.replace("-", "_"))
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Whether a call is wrong is found out before its options are read.
        ctx.meta[JSON_KEY] = "--json" in (args[: args.index("--")] if "--" in args else args)
        with _errors_as_told(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _errors_as_told(ctx):
            result = super().invoke(ctx)
            # What is still buffered must meet a closed pipe here, where click ends quietly.
            sys.stdout.flush()
            return result


@contextmanager
def _errors_as_told(ctx: click.Context) -> Iterator[None]:
    try:
        yield
    except LowwaterError as error:
        print_error(ctx, error)
        ctx.exit(error.exit_code)
    except click.UsageError as error:
        if not ctx.meta[JSON_KEY]:
            raise
        called = error.ctx.command_path if error.ctx else ctx.command_path
        wrong = InputError(error.format_message(), hint=f"`{called} --help` says how to call it")
        print_error(ctx, wrong)
        ctx.exit(wrong.exit_code)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        ctx.exit(INTERRUPTED)


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        loops = "loops compiled" if IS_COMPILED else f"loops not compiled: {WHY_NOT_COMPILED}"
        click.echo(f"lowwater {lowwater.__version__} ({loops})")
        ctx.exit()


@click.command(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version, and whether loops are compiled.",
)
@click.option("--config", type=LocalPath(exists=True, dir_okay=False), help="The configuration, a TOML file.")
@click.option(
    "--log-level",
    type=click.Choice(logging.LEVELS),
    default="warning",
    show_default=True,
    help="What to log.",
)
@click.option("--json-logs", is_flag=True, help="Log as JSON, one event a line.")
@click.pass_context
def root(ctx: click.Context, config: str | None, log_level: str, json_logs: bool) -> None:
    """Lowwater: a storage engine whose history is one durable, checksummed log."""
    logging.configure(log_level, json=json_logs)
    # A command that needs the configuration passes this to `Config.load`.
    ctx.obj = config
