"""`lowwater put`: one value, from standard input."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

import click

from lowwater.cli.database.opened import log_directory, opened_to_write
from lowwater.cli.log.dump import Seq
from lowwater.cli.output import LocalPath, json_option, print_json
from lowwater.config import Config
from lowwater.engine.database.database import Database
from lowwater.engine.database.opening import configured, open_with
from lowwater.engine.format import format
from lowwater.engine.log.directory import typed_errors
from lowwater.engine.log.log import Seams
from lowwater.engine.log.recover import has_begun
from lowwater.engine.pages.memory_pages import MemoryPages
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.seams.real import RealFiles


class Pair(click.ParamType[tuple[str, str]]):
    """A name and its value."""

    name = "name=value"

    def convert(
        self, value: str | tuple[str, str], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, text = value.partition("=")
        if not name or not equals:
            self.fail(f"{value!r} is no NAME=VALUE", param, ctx)
        return name, text


@click.command()
@click.argument("path", type=LocalPath())
@click.argument("bucket")
@click.argument("key")
@click.argument("source", type=click.File("rb"), default="-")
@click.option("--metadata", type=Pair(), multiple=True, help="May be repeated.")
@click.option("--if-absent", is_flag=True, help="Only where there is no such key.")
@click.option(
    "--if-seq", type=Seq(), help="Only where the newest version has this seq; 0: where there is none."
)
@click.option("--ship", is_flag=True, help="End only when the value is in the object store as well.")
@click.option(
    "--create",
    is_flag=True,
    help="Make the database and the bucket, where they are missing; no database where its archive has a "
    "history, or the value is refused.",
)
@json_option
@click.pass_context
def put(
    ctx: click.Context, path: str, bucket: str, key: str, source: BinaryIO,
    metadata: tuple[tuple[str, str], ...], if_absent: bool, if_seq: int | None, ship: bool, create: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Store a value from a file, or from standard input, and print its seq once it is durable.

    Where the database has an object store, the value is durable on this disk alone. It is shipped by whoever
    opens the database for longer, or with --ship, which prints the seq first.

    The directory must not be open elsewhere. Opening it finishes what a crash has left undone.
    """
    # One byte more than any entry takes is enough to be refused, whatever else there is to read.
    with typed_errors(getattr(source, "name", "-"), "read the value"):
        value = source.read(format.PAYLOAD_BYTES_MAX + 1)

    def write(db: Database) -> int:
        if create:
            db.create_bucket(bucket, exist_ok=True)
        return db.put(bucket, key, value, dict(metadata) or None, if_absent=if_absent, if_seq=if_seq)

    if create and not has_begun(RealFiles(), log_directory(ctx, path)):
        _rehearse(Config.load(ctx.find_root().obj), path, write, ship=ship)
    with opened_to_write(ctx, path, create=create) as db:
        if ship:
            db.shipping()  # refused without a store, before anything is written
        seq = write(db)
        if as_json:
            print_json({"bucket": bucket, "key": key, "seq": seq, "value_bytes": len(value)})
        else:
            click.echo(seq)
        if ship:
            db.ship()


def _rehearse(config: Config, path: str, write: Callable[[Database], int], *, ship: bool) -> None:
    """Write to a new database in memory: what that refuses makes no directory."""
    settings = configured(path, config)
    with open_with(
        path,
        log_options=settings.log_options,
        options=settings.options,
        seams=Seams(files=MemoryFiles()),
        store=MemoryPages(),
    ) as db:
        if ship and config.tier.store_uri() is None:
            db.shipping()
        write(db)
