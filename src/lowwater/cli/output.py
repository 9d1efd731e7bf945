"""What all commands share: the option `--json`, and how an error looks."""

from __future__ import annotations

import json

import click

from lowwater.errors import LowwaterError

JSON_KEY = "lowwater.json"


def _remember(ctx: click.Context, _param: click.Parameter, as_json: bool) -> bool:
    ctx.meta[JSON_KEY] = as_json
    return as_json


# Eager, so that what is wrong with the other arguments is told as JSON too.
json_option = click.option(
    "--json", "as_json", is_flag=True, is_eager=True, callback=_remember, help="Print JSON, errors too."
)


def print_error(ctx: click.Context, error: LowwaterError) -> None:
    """On standard error, so that standard output holds results and nothing else."""
    if ctx.meta.get(JSON_KEY):
        click.echo(json.dumps(error.as_dict()), err=True)
        return
    click.echo(f"error: {error}", err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)
