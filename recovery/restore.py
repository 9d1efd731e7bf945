"""Restore: a directory made from an archive alone, as of its newest entry, a seq, or a time.

Always true:
  - nothing that was there is written over: the directory is new, or a restore of the very same began it;
  - what is being made is noted durably before anything else, so it is gone on with, after whatever ended it;
    one rename says that all of it is here, and until then nobody opens the directory;
  - first come references to the pages of a checkpoint, then the log above it. What they lead to is read when
    somebody asks for it, each block compared with the hash that leads to it, from the checkpoint's index on;
  - the archive is not changed: whoever opens a directory that goes on claims an epoch then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from lowwater.engine.database.opening import PAGES_DIRECTORY
from lowwater.engine.database.origin import ORIGIN, RESTORING, TEMPORARY, Origin, read_origin, write_origin
from lowwater.engine.format import format
from lowwater.engine.format.blocks import NO_HASH
from lowwater.engine.format.references import REFERENCE_BYTES
from lowwater.engine.log.chain import CLUSTER_ID_BYTES
from lowwater.engine.log.directory import LOCK, LOG_DIRECTORY, local_path, typed_errors
from lowwater.engine.log.log import Seams
from lowwater.engine.log.wal import lock_directory
from lowwater.engine.pages.lmdb_store import LmdbPages
from lowwater.engine.pages.pagestore import PageStore
from lowwater.engine.seams.failpoints import Failpoint
from lowwater.engine.seams.seams import File, Files
from lowwater.engine.state.catalogue import SegmentDescriptor
from lowwater.engine.state.meta import META_KEY
from lowwater.errors import AlreadyExists, Corrupt, DirectoryLocked
from lowwater.logging import get_logger
from lowwater.recovery import segment_files as segments
from lowwater.recovery.arguments import ConfigSource, real_seams, store_of
from lowwater.recovery.point import (
    Point,
    Reached,
    missing_after,
    parent_segment,
    point_of,
    reach,
    seq_of,
)
from lowwater.recovery.reference_pages import install_checkpoint
from lowwater.recovery.restored_opening import append_fork, open_log, open_to_read
from lowwater.recovery.warming import Warming
from lowwater.tiering.archive import open_archive
from lowwater.tiering.checksums import Checksum, Hashing
from lowwater.tiering.fetcher import Fetcher
from lowwater.tiering.shipped_log import Moment
from lowwater.tiering.store import FoundObject, Part, Store

if TYPE_CHECKING:
    from lowwater.config import Config

_logger = get_logger("restore")

AFTER_NOTE = Failpoint("restore.after_note")
BEFORE_PAGES = Failpoint("restore.before_pages")
AFTER_PAGES = Failpoint("restore.after_pages")
BEFORE_FORK = Failpoint("restore.before_fork")
BEFORE_END = Failpoint("restore.before_end")

# What a file system has at its top when it is new, as that on the disk in the place of a lost one.
LOST_FOUND = "lost+found"

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


class Restored(NamedTuple):
    """The result of a restore. `root` is the fingerprint of the content. It is known where all of the content
    is here, or where it is as of a checkpoint; else it is None."""

    uri: str
    path: str
    cluster_id: bytes
    is_clone: bool
    epoch: int
    seq: int
    time_us: int
    checkpoint_seq: int
    root: str | None
    pages_away: int
    was_resumed: bool
    bytes: int
    requests: int
    missing: str


def _nobody(_what: str, _done: int, _total: int) -> None:
    """Nobody looks."""


def restore(
    tier: str,
    to: str | os.PathLike[str],
    at: Moment = None,
    *,
    clone: bool = False,
    full: bool = False,
    config: ConfigSource | Config = None,
    progress: Progress | None = None,
) -> Restored:
    """Make a database in the directory `to` from the archive at `tier`, and return what was done.

    Without `at` the database is as of the newest entry that was shipped, and goes on with the archive:
    opening it claims the archive, and whoever wrote there before is fenced. With `at`, a seq or a time, or as
    a `clone`, it is a database of its own, and the archive stays as it is.

    `full` waits until all of the content is here, and verified. Without it the database can be opened at
    once, and reads what it lacks from the archive. `to` has to be new. A restore that was stopped goes on
    when it is called again. `progress` is told what is done. The log is put where `wal.dir` of the
    configuration says, which is recorded in the directory.
    """
    from lowwater.config import Config  # pydantic takes longer to import than all the rest

    path = local_path(to)
    loaded = Config.load(config)
    store, options = store_of(tier, loaded)
    try:
        return restore_with(
            store,
            path,
            at,
            options=options,
            clone=clone,
            full=full,
            progress=progress or _nobody,
            log_directory=None if loaded.wal.dir is None else os.path.abspath(loaded.wal.dir),
            fetched_at_once=loaded.shipping.uploads_at_once,
        )
    finally:
        store.close()


class _Counting:
    """A store that counts what it is asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.uri = store.uri
        self.requests = self.bytes = 0
        self._lock = threading.Lock()

    def _count(self, size: int = 0) -> None:
        with self._lock:
            self.requests += 1
            self.bytes += size

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        data = self._store.read(name, start, end)
        self._count(len(data))
        return data

    def stat(self, name: str) -> FoundObject:
        self._count()
        return self._store.stat(name)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[FoundObject]:
        self._count()
        return self._store.list(prefix, start_after)

    @property
    def hashing(self) -> Hashing | None:
        return self._store.hashing

    def checksum(self, name: str) -> Checksum:
        self.requests += 1
        return self._store.checksum(name)

    def write(self, name: str, parts: Iterable[Part], *, size: int | None) -> bool:
        raise AssertionError("a restore does not change the archive")

    def replace(self, name: str, parts: Iterable[Part], *, size: int | None) -> None:
        raise AssertionError("a restore does not change the archive")

    def copy(self, source: str, target: str) -> bool:
        raise AssertionError("a restore does not change the archive")

    def delete(self, name: str) -> None:
        raise AssertionError("a restore does not change the archive")

    def close(self) -> None:
        """Whose the store is closes it."""


# ---------------------------------------------------------------------------- making it


def restore_with(
    store: Store,
    path: str,
    at: Moment = None,
    *,
    options: Mapping[str, str] | None = None,
    clone: bool = False,
    full: bool = False,
    progress: Progress = _nobody,
    seams: Seams | None = None,
    pages: PageStore | None = None,
    log_directory: str | None = None,
    fetched_at_once: int = 1,
) -> Restored:
    """Restore from `store`, with all the parts that a test, or a simulation, replaces. The store stays the
    caller's. With `fetched_at_once` above 1, segments are fetched by threads."""
    return _Restore(
        store,
        path,
        options or {},
        seams or real_seams(),
        pages,
        progress,
        log_directory or "",
        fetched_at_once,
    ).run(at, clone=clone or at is not None, full=full)


def in_the_way(files: Files, path: str) -> str | None:
    """What lies in a directory that keeps a restore from beginning there; None where nothing does."""
    with typed_errors(path, "look into the directory"):
        try:
            names = files.list(path)
        except FileNotFoundError:
            return None
        others = set(names) - {LOG_DIRECTORY, TEMPORARY, LOST_FOUND}
        if LOG_DIRECTORY in names:
            others |= set(files.list(f"{path}/{LOG_DIRECTORY}")) - {LOCK}
    return min(others, default=None)


class _Restore:
    def __init__(
        self,
        store: Store,
        path: str,
        options: Mapping[str, str],
        seams: Seams,
        pages: PageStore | None,
        progress: Progress,
        log_elsewhere: str,
        fetched_at_once: int,
    ) -> None:
        """`log_elsewhere` is where the log is put; empty for in the directory."""
        self._store = _Counting(store)
        self._path = path
        self._log_elsewhere = log_elsewhere
        self._log_directory = log_elsewhere or f"{path}/{LOG_DIRECTORY}"
        self._options = options
        self._seams = seams
        self._files: Files = seams.files
        self._pages = pages
        self._progress = progress
        self._fetched_at_once = fetched_at_once

    def run(self, at: Moment, *, clone: bool, full: bool) -> Restored:
        began_s = self._seams.clock.monotonic()
        archive = open_archive(self._store)
        fetcher = Fetcher(self._store, clock=self._seams.clock)
        reached = reach(archive, at)
        wanted = seq_of(reached, fetcher, self._store.uri, at)
        self._go_on_with_log()
        lock = self._take()
        try:
            begun = read_origin(self._files, self._path, RESTORING)
            if begun is not None:
                self._require_same(begun, archive.cluster_id, at, wanted, clone=clone)
                wanted = begun.wanted_seq
            checkpoint_max = format.SEQ_MAX if begun is None else begun.checkpoint_seq
            point = point_of(reached, self._store, fetcher, wanted, checkpoint_max=checkpoint_max)
            if begun is not None and point.checkpoint_seq != begun.checkpoint_seq:
                raise Corrupt(
                    f"this restore has begun with the checkpoint of {begun.checkpoint_seq}, which is lost",
                    path=self._store.uri,
                    seq=begun.checkpoint_seq,
                    hint="bring it back from another copy of the archive, or restore into a new directory",
                )
            origin = begun
            if origin is None:
                origin = self._origin(archive.cluster_id, reached, point, clone=clone)
                write_origin(self._files, self._path, RESTORING, origin)
            AFTER_NOTE()
            away = 0 if point.checkpoint is None else self._install(reached, fetcher, point)
            self._fetch_log(fetcher, point)
        finally:
            lock.close()
        origin, time_us = self._end_log(origin)
        root = self._root_of(point, origin.seq)
        if full:
            root, away = self._bring_all(reached, origin, point, root), 0
        self._end()
        _logger.info(
            "restored",
            uri=self._store.uri,
            path=self._path,
            seq=origin.seq,
            checkpoint_seq=origin.checkpoint_seq,
            pages_away=away,
            bytes=self._store.bytes,
            requests=self._store.requests,
            duration_s=round(self._seams.clock.monotonic() - began_s, 3),
        )
        return Restored(
            uri=self._store.uri,
            path=self._path,
            cluster_id=origin.cluster_id,
            is_clone=origin.is_clone,
            epoch=origin.epoch,
            seq=origin.seq,
            time_us=time_us,
            checkpoint_seq=origin.checkpoint_seq,
            root=root,
            pages_away=away,
            was_resumed=begun is not None,
            bytes=self._store.bytes,
            requests=self._store.requests,
            missing=missing_after(reached, wanted),
        )

    # ------------------------------------------------------------------ the directory

    def _go_on_with_log(self) -> None:
        """Put the log where a restore that was begun has put it."""
        begun = read_origin(self._files, self._path, RESTORING)
        if begun is None or begun.log_directory == self._log_elsewhere:
            return
        if self._log_elsewhere:
            raise AlreadyExists(
                "a restore was begun here that puts the log elsewhere, and has not ended",
                path=self._path,
                hint=f"run it again with wal.dir = {begun.log_directory or self._path + '/' + LOG_DIRECTORY}",
            )
        self._log_elsewhere = self._log_directory = begun.log_directory

    def _take(self) -> File:
        """Be the only one who makes something there."""
        files, path = self._files, self._path
        with typed_errors(path, "restore into this directory"):
            self._require_ours()
            files.make_directory(path)
            files.make_directory(self._log_directory)
            try:
                lock = lock_directory(files, self._log_directory, self._seams.owner)
            except DirectoryLocked as error:
                raise DirectoryLocked(
                    f"somebody else works in this directory: {error.message}",
                    path=path,
                    hint="wait for its end, or restore into another directory",
                ) from error
            try:
                self._require_ours()
                segments.begin(files, self._log_directory)
            except BaseException:
                lock.close()
                raise
        return lock

    def _require_ours(self) -> None:
        """Raise AlreadyExists unless the directory is new, or a restore has begun it."""
        try:
            names = self._files.list(self._path)
        except FileNotFoundError:
            names = []
        if RESTORING in names:
            return
        if ORIGIN in names:
            raise AlreadyExists(
                "this directory was restored before, and is a database now",
                path=self._path,
                hint="open it, or restore into a new directory",
            )
        if self._log_elsewhere:
            self._require_new_log()
        found = in_the_way(self._files, self._path)
        if found is not None:
            raise AlreadyExists(
                f"there is something in this directory already: {found}",
                path=self._path,
                hint="restore into a new directory: nothing is ever written over",
            )

    def _require_new_log(self) -> None:
        with typed_errors(self._log_directory, "restore the log into this directory"):
            try:
                names = set(self._files.list(self._log_directory)) - {LOCK, LOST_FOUND}
            except FileNotFoundError:
                return
        if names:
            raise AlreadyExists(
                f"there is something in the directory for the log already: {min(names)}",
                path=self._log_directory,
                hint="name a new directory as wal.dir: nothing is ever written over",
            )

    def _require_same(self, begun: Origin, parent_id: bytes, at: Moment, wanted: int, *, clone: bool) -> None:
        expected = begun._replace(wanted_seq=wanted if at is not None else begun.wanted_seq)
        is_same = (
            begun.uri == self._store.uri
            and begun.parent_id == parent_id
            and begun.is_clone == clone
            and begun.is_same(expected)
        )
        if not is_same:
            raise AlreadyExists(
                f"a restore of {begun.uri} to seq {begun.wanted_seq} was begun here, and has not ended",
                path=self._path,
                hint="run that again, or restore into a new directory",
            )

    def _origin(self, parent_id: bytes, reached: Reached, point: Point, *, clone: bool) -> Origin:
        checkpoint = point.checkpoint
        return Origin(
            uri=self._store.uri,
            options=dict(self._options),
            parent_id=parent_id,
            cluster_id=self._seams.randomness.token(CLUSTER_ID_BYTES) if clone else parent_id,
            epoch=reached.epoch,
            wanted_seq=point.seq,
            seq=point.seq,
            checkpoint_seq=point.checkpoint_seq,
            checkpoint_hash=NO_HASH if checkpoint is None else checkpoint.hash,
            parent_manifest=NO_HASH if reached.manifest is None else reached.manifest.hash,
            parent_segment=parent_segment(reached),
            log_directory=self._log_elsewhere,
        )

    # ------------------------------------------------------------------ pages

    def _install(self, reached: Reached, fetcher: Fetcher, point: Point) -> int:
        """References to the blocks of the checkpoint, where they are not there yet: how many there are."""
        assert point.checkpoint is not None
        BEFORE_PAGES()
        pages = self._open_pages()
        try:
            if META_KEY in pages.read_meta():
                return sum(size == REFERENCE_BYTES for _, size in pages.page_sizes())
            count = install_checkpoint(
                pages, reached, fetcher, point.checkpoint, partial(self._progress, "references")
            )
        finally:
            self._close_pages(pages)
        AFTER_PAGES()
        return count

    def _open_pages(self) -> PageStore:
        if self._pages is not None:
            return self._pages
        return LmdbPages.open(f"{self._path}/{PAGES_DIRECTORY}")

    def _close_pages(self, pages: PageStore) -> None:
        if self._pages is None:
            pages.close()

    # ------------------------------------------------------------------ the log

    def _fetch_log(self, fetcher: Fetcher, point: Point) -> None:
        """What lies in the log directory is whole, and in order, whenever this ends: the first comes last."""
        done = 0
        total = sum(each.size for each in point.segments)

        def passing(size: int) -> None:
            nonlocal done
            done += size
            self._progress("log", min(done, total), total)

        whole = [each for each in point.segments if each.last <= point.seq]
        cut_off = [each for each in point.segments if each.last > point.seq]
        self._fetch_whole(whole, passing)
        for segment in cut_off:
            has_begun = segments.fetch_beginning(
                fetcher, self._files, self._log_directory, segment, point.seq, passing
            )
            if not has_begun and not whole and point.before is not None:
                self._fetch_whole([point.before], passing)

    def _fetch_whole(self, wanted: Iterable[SegmentDescriptor], passing: segments.Passing) -> None:
        segments.fetch_all(
            self._store,
            self._files,
            self._log_directory,
            wanted,
            passing,
            at_once=self._fetched_at_once,
        )

    def _end_log(self, origin: Origin) -> tuple[Origin, int]:
        """Make the log end where it has to. Return the origin, with the entry of the archive that this is,
        and its time. A clone goes on above it as a cluster of its own."""
        with open_log(self._path, self._seams, log_directory=self._log_directory) as log:
            chain = log.chain
            if origin.is_clone and chain.cluster_id == origin.cluster_id:
                return origin, next(log.read(origin.seq)).time_us
            # It is above it where a crash has left the seal that comes before a `fork`, and not that.
            if chain.seq_last < origin.seq:
                origin = origin._replace(seq=chain.seq_last)
                write_origin(self._files, self._path, RESTORING, origin)
            if origin.is_clone:
                BEFORE_FORK()
                append_fork(
                    log, origin.cluster_id, chain.epoch + 1, origin.parent_segment, origin.parent_manifest
                )
            return origin, chain.time_us

    def _end(self) -> None:
        """Say that all is here."""
        BEFORE_END()
        with typed_errors(self._path, "end the restore"):
            self._files.rename(f"{self._path}/{RESTORING}", f"{self._path}/{ORIGIN}")
            self._files.sync_directory(self._path)

    # ------------------------------------------------------------------ what was made

    def _root_of(self, point: Point, seq: int) -> str | None:
        """The root that the archive knows of this very seq."""
        checkpoint = point.checkpoint
        return checkpoint.root.hex() if checkpoint is not None and checkpoint.seq == seq else None

    def _bring_all(self, reached: Reached, origin: Origin, point: Point, archive_root: str | None) -> str:
        """Bring all of the content here, and return its root. Raise Corrupt where the archive has another."""
        core = open_to_read(
            self._path,
            self._store,
            seams=self._seams,
            pages=self._pages,
            log_directory=self._log_directory,
        )
        try:
            warming = Warming(core.leaving, core.registry)
            while warming.advance():
                self._progress("pages", warming.done, warming.total)
            core.flush()
            root = core.root()
            oldest = core.leaving.oldest_segment()
        finally:
            core.close()
        if archive_root is not None and root != archive_root:
            raise Corrupt(
                f"what was restored has the root {root}, and the archive says {archive_root}",
                path=self._path,
                seq=origin.seq,
            )
        if oldest is not None:
            self._fetch_values(reached, point, oldest)
        write_origin(self._files, self._path, RESTORING, origin._replace(is_whole=True))
        return root

    def _fetch_values(self, reached: Reached, point: Point, oldest: int) -> None:
        """Large values lie in the log: have it here from the first of them on. The newest segments come
        first, so that it has no gap, whenever this ends."""
        lock = self._take()
        try:
            first = point.segments[0].first
            older = [each for each in reached.all.segments_from(oldest) if each.first < first]
            total, done = sum(each.size for each in older), 0

            def passing(size: int) -> None:
                nonlocal done
                done += size
                self._progress("values", min(done, total), total)

            self._fetch_whole(reversed(older), passing)
        finally:
            lock.close()
