"""Where the log that a command looks into lies: in a directory, in a file, or in an archive."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import click

from lowwater.cli.log.findings import total_bytes
from lowwater.config import Config
from lowwater.engine.log.check import Finding
from lowwater.engine.seams.real import RealFiles
from lowwater.engine.seams.seams import Files
from lowwater.errors import LowwaterError, without_secrets
from lowwater.tiering.archive_files import ArchiveFiles
from lowwater.tiering.checking import is_archive, open_to_read
from lowwater.tiering.lineage import Lineage, parents_opener

# The URI of an archive, and the name of a segment in it.
_SEGMENT = re.compile(r"(?P<uri>[^?]*?)/(?P<name>wal/\d{10}/segment-[^/?]*\.log)(?P<options>\?.*)?")


@dataclass(frozen=True)
class Source:
    """`files` and `path` are what the functions on logs take; `shown` is the path as it was given, without
    secrets, and `base` the archive, whose objects are named in findings as they are called there."""

    files: Files
    path: str
    shown: str
    total_bytes: Callable[[], int]
    where: Callable[[str], str] = str
    base: str = ""

    def named(self, findings: Sequence[Finding]) -> list[Finding]:
        return [each._replace(where=self.where(each.where)) for each in findings]


@contextmanager
def opened_source(ctx: click.Context, path: str) -> Iterator[Source]:
    """What PATH stands for. Errors inside the block name objects where they have named files."""
    if not is_archive(path):
        yield Source(RealFiles(), path, path, lambda: total_bytes(path))
        return
    single = _SEGMENT.fullmatch(path)
    uri = path if single is None else single["uri"] + (single["options"] or "")
    config = Config.load(ctx.find_root().obj).tier
    store = Lineage(open_to_read(uri, config), parents_opener(uri, {}, config))
    try:
        files = ArchiveFiles(store, listed=single is None)
        source = Source(
            files,
            files.directory,
            without_secrets(path),
            lambda: files.raw_bytes,
            files.where,
            files.directory,
        )
        if single is not None:
            name = single["name"]
            source = replace(
                source,
                path=f"{files.directory}/{name}",
                total_bytes=lambda: store.stat(name).size,
            )
        try:
            yield source
        except LowwaterError as error:
            if error.path is not None:
                error.path = files.where(error.path)
            raise
    finally:
        store.close()
