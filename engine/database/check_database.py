"""Integrity of a database's directory: its log, its pages, the large values they refer to, its checkpoints.

Always true: checking changes nothing, and goes on after a finding. The directory may be open elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowwater.engine.checkpoint.check_checkpoints import check_checkpoints
from lowwater.engine.checkpoint.content import list_boundaries
from lowwater.engine.database.check_opening import check_opening
from lowwater.engine.database.opening import PAGES_DIRECTORY
from lowwater.engine.format.boundaries import Boundaries
from lowwater.engine.log.check import Finding, check_directory, require_log
from lowwater.engine.log.describe import describe_log
from lowwater.engine.log.directory import cluster_id_in
from lowwater.engine.log.values import ValueReader, segments_in
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.engine.seams.seams import Files
from lowwater.engine.state.catalogue import Catalogue
from lowwater.engine.state.check_pages import check_pages
from lowwater.engine.state.meta import decode_meta
from lowwater.errors import LowwaterError, NotFound


def check_database(files: Files, directory: str, log: str) -> Iterator[Finding]:
    """Every finding about the database in a directory, whose log is in `log`. Without a log, NotFound."""
    require_log(files, log)
    yield from check_opening(files, directory, log)
    yield from check_directory(files, log)
    yield from _of_pages(files, directory, log)


def _of_pages(files: Files, directory: str, log: str) -> Iterator[Finding]:
    """What is wrong with pages, and with the checkpoints that were made of them."""
    path = f"{directory}/{PAGES_DIRECTORY}"
    try:
        files.list(path)
    except (FileNotFoundError, NotADirectoryError):
        return  # they are made when the database is opened
    try:
        store = LmdbPages.open(path, read_only=True)
    except NotFound:
        return  # they are made when the database is opened
    except LowwaterError as error:
        yield Finding.of(error, path)
        return
    catalogue = Catalogue()
    values = ValueReader(
        segments_in(files, log), log, is_shipped=lambda seq: catalogue.segment_of(seq) is not None
    )
    try:
        catalogue.load(store.read_meta())
        meta = decode_meta(store.read_meta(), path)
        if meta is not None:
            cluster_id = meta.cluster_id
            yield from check_pages(
                store,
                path,
                boundaries=Boundaries(meta.salt, meta.page_keys),
                seq_durable=lambda: max(
                    (each.seq_last or 0 for each in describe_log(files, log).segments), default=0
                ),
                read_value=values.read,
            )
            yield from check_checkpoints(
                files,
                directory,
                cluster_id_at=lambda seq: cluster_id_in(files, log, seq) or cluster_id,
                begins_block=Boundaries(meta.salt, meta.page_keys).is_boundary,
                begins_list=list_boundaries(meta.salt, meta.page_keys).is_boundary,
            )
    except LowwaterError as error:
        yield Finding.of(error, path)
    finally:
        values.close()
        store.close()
