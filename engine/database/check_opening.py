"""What keeps a database from being opened, and lies neither in its log, nor in its pages, nor in checkpoints.

Always true: checking changes nothing. What `open` refuses, `check` calls an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lowwater.engine.database.opening import PAGES_DIRECTORY
from lowwater.engine.database.origin import ORIGIN, read_origin, require_restored
from lowwater.engine.log.check import Finding
from lowwater.engine.log.describe import describe_log
from lowwater.engine.log.directory import LOCK, OWNER, typed_errors
from lowwater.engine.log.ownership import read_owner
from lowwater.engine.seams.seams import Files
from lowwater.engine.seams.swap import COMPACT, DATA
from lowwater.engine.seams.swap import LOCK as PAGES_LOCK
from lowwater.errors import LowwaterError, PagesDamaged


def check_opening(files: Files, directory: str, log: str) -> Iterator[Finding]:
    """Every finding about whose a data directory is, and where it comes from; the log is in `log`."""

    def owner() -> None:
        with typed_errors(f"{log}/{OWNER}", "look who orders the entries of the log"):
            read_owner(files, log)

    def lock(path: str) -> None:
        with typed_errors(path, "look at the lock"):
            try:
                files.open(path).close()
            except (FileNotFoundError, NotADirectoryError):
                pass  # whoever opens the database makes it

    pages = f"{directory}/{PAGES_DIRECTORY}"
    looks: list[tuple[str, Callable[[], object]]] = [
        (directory, lambda: require_restored(files, directory)),
        (f"{directory}/{ORIGIN}", lambda: read_origin(files, directory)),
        (f"{log}/{OWNER}", owner),
        (f"{log}/{LOCK}", lambda: lock(f"{log}/{LOCK}")),
        (f"{pages}/{PAGES_LOCK}", lambda: lock(f"{pages}/{PAGES_LOCK}")),
    ]
    for path, look in looks:
        try:
            look()
        except LowwaterError as error:
            yield Finding.of(error, path)
    try:
        yield from _missing_pages(files, pages, log)
    except LowwaterError as error:
        yield Finding.of(error, pages)


def _missing_pages(files: Files, path: str, log: str) -> Iterator[Finding]:
    """Pages are made where there are none, if the log has all that they are made of."""
    with typed_errors(path, "look for the pages"):
        try:
            names = files.list(path)
        except FileNotFoundError:
            names = []
            if _has(files, path + COMPACT):
                return  # they are about to take the place of those that were there
    if DATA in names:
        return
    if names:
        return  # whoever looks into them says it
    first = next(iter(describe_log(files, log).segments), None)
    if first is not None and first.header is not None and first.header.seq_before:
        what = "there are no pages, and the log's beginning is not here"
        yield Finding("error", what, path, None, None, PagesDamaged.default_hint)


def _has(files: Files, path: str) -> bool:
    try:
        return DATA in files.list(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
