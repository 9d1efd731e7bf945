"""`lowwater serve-metrics`: what a directory, and its archive, look like from outside, for Prometheus."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from wsgiref.simple_server import WSGIServer

import click
from prometheus_client import CollectorRegistry, start_http_server

from lowwater.cli.database.opened import log_directory
from lowwater.cli.output import LocalPath, json_option, print_json
from lowwater.config import Config
from lowwater.engine.database.origin import read_origin
from lowwater.engine.log.check import require_log
from lowwater.engine.seams.real import RealClock, RealFiles, ThreadRunner
from lowwater.errors import InputError
from lowwater.recovery.restored_opening import with_origin
from lowwater.tiering.checking import open_to_read
from lowwater.tiering.observed import ObservedDirectory
from lowwater.tiering.store import Store
from lowwater.tiering.store_uri import parse_uri

# Next to those that exporters of databases have by custom.
PORT = 9717


class _Stopped(BaseException):
    """SIGTERM or Ctrl-C."""


@click.command()
@click.argument("path", metavar="DIR", type=LocalPath())
@click.option("--tier", "uri", help="Its archive, where the configuration does not say.")
@click.option(
    "--address", default="127.0.0.1", show_default=True, help="Whom to listen for; 0.0.0.0 for all."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0 takes one that is free."
)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1, 86_400),
    default=15.0,
    show_default=True,
    help="Look at most so often, in seconds.",
)
@json_option
@click.pass_context
def serve_metrics(
    ctx: click.Context, path: str, uri: str | None, address: str, port: int, interval_s: float, as_json: bool
) -> None:
    """Serve metrics of a database at http://ADDRESS:PORT/metrics, until SIGTERM or Ctrl-C: the last seq, what
    log, pages, checkpoints and cache take of the disk, and, where its archive is known, how far that is
    behind.

    The directory may be open elsewhere; nothing is changed. Latencies and the buffer pool are known only to
    the process that has the directory open. It can serve them itself: docs/operating/metrics.md says how.
    """
    with _until_stopped():
        files, runner = RealFiles(), ThreadRunner()
        directory = log_directory(ctx, path)
        require_log(files, directory)
        open_store = _store_opener(ctx, path, uri)
        observed = ObservedDirectory(
            path, directory, files=files, clock=RealClock(), interval_s=interval_s, open_store=open_store
        )
        registry = CollectorRegistry()
        registry.register(observed)
        server = _listening(address, port, registry)
        task = None if open_store is None else runner.start("observe-archive", observed.step)
        try:
            host = f"[{address}]" if ":" in address else address
            url = f"http://{host}:{server.server_port}/metrics"
            if as_json:
                print_json({"path": path, "url": url})
            else:
                click.echo(f"serving {url}")
            _sleep_for_ever()
        finally:
            server.shutdown()
            server.server_close()
            if task is not None:
                task.stop()
            observed.close()


def _store_opener(ctx: click.Context, path: str, uri: str | None) -> Callable[[], Store] | None:
    """What is wrong with the URI is told now, and what is wrong with a server while it serves."""
    config = Config.load(ctx.find_root().obj)
    origin = read_origin(RealFiles(), path)
    # What a clone only reads from is its parent's.
    is_its_own = origin is not None and (not origin.is_clone or bool(origin.ships_to))
    if uri is None and config.tier.store_uri() is None and origin is not None and is_its_own:
        config = with_origin(config, origin)
    wanted = uri or config.tier.store_uri()
    if wanted is None:
        return None
    parse_uri(wanted, dict(config.tier.options) if wanted == config.tier.store_uri() else {})
    return lambda: open_to_read(wanted, config.tier)


def _listening(address: str, port: int, registry: CollectorRegistry) -> WSGIServer:
    try:
        return start_http_server(port, address, registry)[0]
    except OSError as error:
        raise InputError(
            f"{address}:{port} cannot be listened on: {error.strerror or error}",
            hint="give another --port, 0 for one that is free, or another --address",
        ) from error


@contextmanager
def _until_stopped() -> Iterator[None]:
    """To be stopped is the way that it ends, and no error."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        # Once: what is closed then is closed to its end.
        for each in former:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped

    former = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for each in former:
        signal.signal(each, stop)
    try:
        yield
    except _Stopped:
        pass
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _sleep_for_ever() -> None:
    never = threading.Event()
    while not never.wait(1.0):
        pass  # a signal that another thread was given is looked at here
