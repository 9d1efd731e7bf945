"""Repair of a damaged log, into a copy.

Always true:
  - not a byte of the source changes, and no process has it open meanwhile;
  - the copy is written under another name, checked as any log is, made durable, and given its name at
    last: there is a whole, sound copy, or none;
  - what is not in the copy is told: which entries are lost, and which are there but follow on nothing.

`source.py` looks into the files, `plan.py` decides what is kept, `losses.py` counts what is not.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from lowwater.engine.log.check import Finding, Progress, check_directory_steps
from lowwater.engine.log.directory import CURRENT, LOCK, typed_errors
from lowwater.engine.log.footer import footer_steps
from lowwater.engine.log.repair.damaged_log import load_source, open_candidate
from lowwater.engine.log.repair.kept import KeptSegment, LogCut, Planner, RepairPlan
from lowwater.engine.log.repair.losses import Losses, Unconnected, find_losses
from lowwater.engine.log.scan import READ_BYTES, scan_frames
from lowwater.engine.log.walk import is_directory
from lowwater.engine.seams.seams import File, Files, write_all
from lowwater.errors import Corrupt, DirectoryLocked, DirectoryNotWritable, InputError

__all__ = ["Cut", "KeptSegment", "RepairReport", "Unconnected", "repair_log", "repair_steps"]

TEMPORARY_SUFFIX = ".repairing"


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What was kept, and what was not."""

    source: str
    target: str
    written: bool
    """Not in a dry run, nor where there was nothing to keep."""
    kept: list[KeptSegment]
    cut: LogCut | None
    torn_bytes: int
    losses: Losses = field(default_factory=Losses)

    @property
    def is_whole(self) -> bool:
        """Whether everything that was ever acknowledged is in the copy, as far as the source can tell."""
        return bool(self.kept) and self.cut is None and not self.losses.lost and not self.losses.unconnected

    @property
    def seq_first(self) -> int | None:
        return self.kept[0].seq_first if self.kept else None

    @property
    def seq_last(self) -> int | None:
        return self.kept[-1].seq_last if self.kept else None

    @property
    def frames(self) -> int:
        return sum(kept.frames for kept in self.kept)

    @property
    def body_bytes(self) -> int:
        return sum(kept.body_bytes for kept in self.kept)


def repair_log(files: Files, source: str, target: str, *, dry_run: bool = False) -> RepairReport:
    """Write what is good of the log in `source` to `target`, which must not exist or be empty."""
    steps = repair_steps(files, source, target, dry_run=dry_run)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            report: RepairReport = end.value
            return report


def repair_steps(
    files: Files, source: str, target: str, *, dry_run: bool = False
) -> Generator[Progress, None, RepairReport]:
    """`repair_log` with progress: the source is read once, the copy written once and checked once."""
    source, target = source.rstrip("/") or "/", target.rstrip("/") or "/"
    temporary = target + TEMPORARY_SUFFIX
    _check_paths(files, source, target, temporary)
    lock = _lock_source(files, source)
    try:
        found = load_source(files, source)
        planner = Planner(files, found)
        for candidate in planner.steps():
            yield Progress(candidate.file_bytes)
        plan = planner.plan
        losses = find_losses(files, found, plan)
        yield Progress(sum(candidate.file_bytes for candidate in plan.unused))
        written = not dry_run and bool(plan.kept)
        if written:
            with typed_errors(target, "write the copy"):
                yield from _write_copy(files, plan, target, temporary)
    finally:
        if lock is not None:
            lock.close()
    return RepairReport(source, target, written, plan.kept, plan.cut, plan.torn_bytes, losses)


# ---------------------------------------------------------------------------- what is refused


def _check_paths(files: Files, source: str, target: str, temporary: str) -> None:
    absolute = {path: os.path.abspath(path) for path in (source, target, temporary)}

    def lies_in(path: str, directory: str) -> bool:
        return os.path.commonpath([absolute[path], absolute[directory]]) == absolute[directory]

    if lies_in(target, source) or lies_in(source, target) or lies_in(source, temporary):
        raise InputError(
            "the copy would lie in what is to be repaired, or the other way round",
            path=target,
            hint="give a directory elsewhere, on another disk if this one is failing",
        )
    with typed_errors(target, "write the copy"):
        try:
            names = files.list(target)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            names = ["the file itself"]
    if names:
        hint = "give a directory that does not exist yet: repair never writes over anything"
        raise InputError("there is something at the target already", path=target, hint=hint)


def _lock_source(files: Files, source: str) -> File | None:
    """Keep others from writing to the log meanwhile. Its lock file keeps the bytes that it has."""
    directory = source
    if not is_directory(files, source):
        directory, _, name = source.rpartition("/")
        if name != CURRENT and not name.startswith("sealing-"):
            return None  # what is sealed does not change
    path = f"{directory}/{LOCK}" if directory else LOCK
    with typed_errors(path, "lock the log"):
        try:
            file = files.open(path)
        except FileNotFoundError:
            return None  # nobody has ever opened it
        try:
            owner = file.read_at(0, 256).decode(errors="replace")
        finally:
            file.close()
        try:
            return files.lock(path, owner)
        except BlockingIOError as error:
            raise DirectoryLocked(
                f"this log is open: {owner.strip() or 'its owner is not known'}",
                path=source,
                hint="stop that process first: what it writes meanwhile would look like damage",
            ) from error
        except OSError as error:
            if error.errno == errno.EROFS:
                return None  # nobody can write here
            if error.errno in (errno.EACCES, errno.EPERM):
                raise DirectoryNotWritable(
                    "cannot tell whether a process has this log open",
                    path=path,
                    hint="repair as the owner of the files, or repair a copy of them",
                ) from error
            raise


# ---------------------------------------------------------------------------- writing


def _write_copy(files: Files, plan: RepairPlan, target: str, temporary: str) -> Iterator[Progress]:
    files.make_directory(temporary)
    lock = _lock_copy(files, temporary)
    try:
        _remove_files(files, temporary)
        try:
            for kept in plan.kept:
                _write_segment(files, kept, f"{temporary}/{kept.name}")
                yield Progress(kept.body_bytes)
            files.sync_directory(temporary)
            yield from _check_copy(files, temporary)
            files.rename(temporary, target)
        except BaseException:
            try:
                _remove_files(files, temporary)
            except OSError:
                pass  # the next repair removes them
            raise
        files.sync_directory(os.path.dirname(os.path.abspath(target)))
    finally:
        lock.close()


def _lock_copy(files: Files, temporary: str) -> File:
    try:
        return files.lock(f"{temporary}/{LOCK}", f"repair, process {os.getpid()}")
    except BlockingIOError as error:
        hint = "wait for it, or give another target"
        raise DirectoryLocked("another repair is writing this copy", path=temporary, hint=hint) from error


def _remove_files(files: Files, temporary: str) -> None:
    """What a repair wrote that did not come to its end. The empty directory serves the next."""
    for name in files.list(temporary):
        if name == CURRENT or name.startswith("segment-"):
            files.remove(f"{temporary}/{name}")
        elif name != LOCK:
            raise InputError(
                f"{name!r} is not what a repair has left behind",
                path=temporary,
                hint="look into it, or give another target",
            )


def _write_segment(files: Files, kept: KeptSegment, path: str) -> None:
    out = files.open(path, create=True)
    try:
        with open_candidate(files, kept.candidate) as file:
            end = kept.trailer.file_bytes if kept.footer_is_good and kept.trailer else kept.body_bytes
            for offset in range(0, end, READ_BYTES):
                write_all(out, offset, [file.read_at(offset, min(READ_BYTES, end - offset))])
        if kept.trailer is not None and not kept.footer_is_good:
            _write_footer(out, kept)
        out.sync("fsync")
    finally:
        out.close()


def _write_footer(out: File, kept: KeptSegment) -> None:
    header = kept.candidate.header
    assert header is not None
    assert kept.trailer is not None
    scan = scan_frames(out, header, stop=kept.body_bytes)
    if scan.end != kept.body_bytes:
        raise _unstable(kept.candidate.path)
    steps = footer_steps(out, scan.positions, scan.end, block_bytes=header.block_bytes)
    footer = b""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            footer, trailer = end.value
            break
    if trailer != kept.trailer:
        raise _unstable(kept.candidate.path)
    write_all(out, kept.body_bytes, [footer, trailer.encode()])


def _check_copy(files: Files, temporary: str) -> Iterator[Progress]:
    for step in check_directory_steps(files, temporary):
        if isinstance(step, Finding):
            raise _unstable(step.where)
        yield step


def _unstable(path: str) -> Corrupt:
    return Corrupt(
        "the copy is not what was read before",
        path=path,
        hint="the disk gives other bytes each time, or somebody writes to it: copy the files to another "
        "disk first, and repair that",
    )
