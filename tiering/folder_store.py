"""A folder as an object store, also on a file system that several machines share.

Always true:
  - an object is written under a name of its own in `.tmp`, synced, and then linked to its name: that is
    there with all its bytes or not at all, after a power loss too, and who comes second finds it taken;
  - before a write says that an object is there, its name is durable, whoever has made it;
  - `.tmp` holds a lock for each process that writes, and what that is writing begins with the name of the
    lock; what belongs to no lock that is held was left by a crash, and opening the store removes it. It is
    only removed, never written: a crash after the link leaves an object with two names;
  - once it was opened, the folder itself is never made: where it is gone, or a share's is empty, nothing may
    be mounted there. What somebody has removed in it is made again by the next write.

Where a file system has no hard links, a rename takes their place, and two writers of one name at the same
moment can both say that they made it: names come from content, so they wrote the same bytes.
"""

from __future__ import annotations

import errno
import re
import threading
from bisect import insort
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from lowwater.engine.seams.real import RealFiles, RealRandomness
from lowwater.engine.seams.seams import File, Files, Randomness, write_all
from lowwater.errors import (
    InvalidEntry,
    LowwaterError,
    StoreDenied,
    StoreMissing,
    StoreReadOnly,
    StoreUnavailable,
)
from lowwater.tiering.checksums import Checksum
from lowwater.tiering.store import FoundObject, Handle, Part, at, counted, missing
from lowwater.tiering.verified_writes import pass_through

TEMPORARY = ".tmp"
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
# What a file system answers when a name is a file here and a folder there.
NO_PATH = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EEXIST)


class FolderStore(Handle):
    def __init__(
        self,
        directory: str,
        *,
        uri: str | None = None,
        read_only: bool = False,
        make: bool = True,
        files: Files | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        """`make` makes the folder where there is none: not below a mount point, where an empty folder means
        that nothing is mounted."""
        super().__init__(uri or f"file://{directory}", read_only=read_only)
        self._directory = directory.rstrip("/") or "/"
        self._files = files or RealFiles()
        self._randomness = randomness or RealRandomness()
        self._mutex = threading.Lock()
        self._lock: File | None = None
        self._writer = ""
        self._written = 0
        # Directories that are known to be there, durably.
        self._made: set[str] = set()
        self._is_shared = self.uri.startswith("shared_fs:")
        with self._translated(""):
            self._open(make=make and not read_only)

    def write(self, name: str, parts: Iterable[Part], *, size: int | None) -> bool:
        self._check(name, writing=True)
        path = f"{self._directory}/{name}"
        parent = path.rpartition("/")[0]
        made = False
        with self._translated(name, writing=True):
            there = self._size(path) is not None
            if not there:
                self._make_below(parent)
        if not there:
            made = self._write(name, path, counted(parts, size, at(self.uri, name)))
        with self._translated(name, writing=True):
            self._files.sync_directory(parent)
        return made

    def replace(self, name: str, parts: Iterable[Part], *, size: int | None) -> None:
        self._check(name, writing=True)
        path = f"{self._directory}/{name}"
        parent = path.rpartition("/")[0]
        with self._translated(name, writing=True):
            self._make_below(parent)
        self._write(name, path, counted(parts, size, at(self.uri, name)), over=True)
        with self._translated(name, writing=True):
            self._files.sync_directory(parent)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self._check(name)
        with self._translated(name):
            file = self._files.open(f"{self._directory}/{name}")
            try:
                return file.read_at(start, max(0, (file.size() if end is None else end) - start))
            finally:
                file.close()

    def stat(self, name: str) -> FoundObject:
        self._check(name)
        with self._translated(name):
            size = self._size(f"{self._directory}/{name}")
        if size is None:
            raise missing(self.uri, name)
        return FoundObject(name, size)

    def checksum(self, name: str) -> Checksum:
        return Checksum(self.stat(name).size)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[FoundObject]:
        self._check_open()
        return self._list("", prefix, start_after)

    def copy(self, source: str, target: str) -> bool:
        """Its bytes, and not another link to them: what spoils one must not spoil the other."""
        self._check(source)
        self._check(target, writing=True)
        return pass_through(self, source, self, target)

    def delete(self, name: str) -> None:
        self._check(name, writing=True)
        path = f"{self._directory}/{name}"
        with self._translated(name), suppress(FileNotFoundError, NotADirectoryError):
            self._files.remove(path)
            self._files.sync_directory(path.rpartition("/")[0])

    def close(self) -> None:
        super().close()
        with self._mutex:
            lock, self._lock = self._lock, None
            if lock is not None:
                with suppress(OSError):  # the next one that opens the store does it
                    self._files.remove(self._lock_path())
                lock.close()

    def _open(self, *, make: bool) -> None:
        temporary = f"{self._directory}/{TEMPORARY}"
        if not make:
            self._files.list(self._directory)
        if self.read_only:
            return
        try:
            self._make_directory(self._directory)
            self._make_directory(temporary)
        except PermissionError:
            self._files.list(self._directory)
            self.read_only = True
            return
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            self._files.list(self._directory)
            self.read_only = True
            return
        left: dict[str, list[str]] = {}
        for name in self._files.list(temporary):
            left.setdefault(re.split(r"[.-]", name)[0], []).append(name)
        for writer, names in left.items():
            self._remove_left(f"{temporary}/{writer}.lock", [f"{temporary}/{name}" for name in names])

    def _remove_left(self, lock_path: str, paths: Iterable[str]) -> None:
        try:
            lock = self._files.lock(lock_path, "")
        except BlockingIOError:
            return  # it lives
        try:
            # The lock last, or what is left of the rest would be without one.
            for path in (*(path for path in paths if path != lock_path), lock_path):
                with suppress(FileNotFoundError):  # somebody else is opening the store
                    self._files.remove(path)
        finally:
            lock.close()

    def _begin(self, parent: str) -> tuple[str, File]:
        """A new file in `.tmp`. Where somebody has removed that, it is made again, and `parent` too."""
        try:
            temporary = self._temporary_path()
            return temporary, self._files.open(temporary, create=True)
        except FileNotFoundError:
            self._made.clear()
            self._drop_lost_lock()
        self._make_below(f"{self._directory}/{TEMPORARY}")
        self._make_below(parent)
        temporary = self._temporary_path()
        return temporary, self._files.open(temporary, create=True)

    def _drop_lost_lock(self) -> None:
        """A lock whose file was removed keeps nobody from taking what is written below it for left over."""
        with self._mutex:
            names: list[str] = []
            with suppress(FileNotFoundError, NotADirectoryError):
                names = self._files.list(f"{self._directory}/{TEMPORARY}")
            if self._lock is not None and f"{self._writer}.lock" not in names:
                self._lock.close()
                self._lock = None

    def _temporary_path(self) -> str:
        """A new name, below the lock of this handle, which is taken for its first write."""
        with self._mutex:
            if self._lock is None:
                self._writer = self._randomness.token(12).hex()
                self._lock = self._files.lock(self._lock_path(), "")
            self._written += 1
            return f"{self._directory}/{TEMPORARY}/{self._writer}-{self._written}"

    def _lock_path(self) -> str:
        return f"{self._directory}/{TEMPORARY}/{self._writer}.lock"

    def _write(self, name: str, path: str, parts: Iterable[Part], *, over: bool = False) -> bool:
        with self._translated(name, writing=True):
            temporary, file = self._begin(path.rpartition("/")[0])
        try:
            offset = 0
            for part in parts:  # whose own errors are not the store's
                with self._translated(name, writing=True):
                    write_all(file, offset, [part])  # type: ignore[list-item]  # all buffers will do
                offset += len(part)
            with self._translated(name, writing=True):
                file.sync("fsync")
                if not over:
                    return self._show(temporary, path)
                self._files.rename(temporary, path)
                return True
        finally:
            # Where this fails, the next one that opens the store does it.
            with suppress(OSError):
                self._files.remove(temporary)
            file.close()

    def _show(self, temporary: str, path: str) -> bool:
        try:
            self._files.link(temporary, path)
            return True
        except FileExistsError:
            if self._size(path) is None:
                raise
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
        if self._size(path) is not None:
            return False
        self._files.rename(temporary, path)
        return True

    def _list(self, directory: str, prefix: str, start_after: str) -> Iterator[FoundObject]:
        """Depth first, a folder where its name with a slash stands: so the whole is sorted."""
        with self._translated(directory):
            try:
                names = self._files.list(f"{self._directory}/{directory}".rstrip("/"))
            except (FileNotFoundError, NotADirectoryError):
                if not directory:
                    raise
                return
        folders: list[str] = []
        for name in names:
            whole = directory + name
            while folders and folders[0] < whole:
                yield from self._list(folders.pop(0), prefix, start_after)
            folder = f"{whole}/"
            may_hold = (prefix.startswith(folder) or folder.startswith(prefix)) and (
                start_after < folder or start_after.startswith(folder)
            )
            is_asked_for = whole.startswith(prefix) and whole > start_after
            if (not directory and name.startswith(".")) or not (may_hold or is_asked_for):
                continue
            with self._translated(whole):
                size = self._size(f"{self._directory}/{whole}")
            if size is not None:
                if is_asked_for:
                    yield FoundObject(whole, size)
            elif may_hold:
                insort(folders, folder)
        for folder in folders:
            yield from self._list(folder, prefix, start_after)

    def _size(self, path: str) -> int | None:
        """None where there is no such file; a folder is none."""
        try:
            self._files.list(path)
            return None
        except (FileNotFoundError, NotADirectoryError):
            pass
        try:
            file = self._files.open(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return file.size()
        finally:
            file.close()

    def _make_below(self, directory: str) -> None:
        """Make a folder in the store's own, or that one durable."""
        if directory not in self._made:
            names = self._files.list(self._directory)
            if self._is_shared and not names:
                raise StoreUnavailable(
                    "the folder is empty, and was not when it was opened",
                    path=self.uri,
                    hint="look whether the share is mounted. Where the archive is to begin anew there, open "
                    "the database again",
                )
        self._make_directory(directory)

    def _make_directory(self, directory: str) -> None:
        if directory not in self._made:
            self._files.make_directory(directory)
            self._made.add(directory)

    @contextmanager
    def _translated(self, name: str, *, writing: bool = False) -> Iterator[None]:
        """Our errors in the place of the operating system's."""
        try:
            yield
        except OSError as error:
            self._made.clear()  # nothing is known of the folders any more
            if writing and isinstance(error, FileNotFoundError):
                with suppress(OSError):
                    self._drop_lost_lock()
            raise self._error(error, name, writing) from error

    def _error(self, error: OSError, name: str, writing: bool) -> LowwaterError:
        path = at(self.uri, name) if name else self.uri
        match error:
            case FileNotFoundError() | NotADirectoryError() | FileExistsError() if not name:
                return StoreMissing(
                    "there is no such folder", path=path, hint="check the path, and that it is mounted"
                )
            case FileNotFoundError() if writing:
                return StoreUnavailable(
                    "somebody removes folders there",
                    path=path,
                    hint="look whether the folder is there, and mounted: what is missing in it is made again",
                )
            case FileNotFoundError():
                return missing(self.uri, name)
            case PermissionError():
                return StoreDenied(
                    f"the file system refuses it: {error.strerror}",
                    path=path,
                    hint="give this user the right to read and write the folder",
                )
        if error.errno == errno.EROFS:
            return StoreReadOnly("the file system is mounted read-only", path=path)
        if error.errno in NO_PATH and name and not writing:
            return missing(self.uri, name)
        if error.errno in NO_PATH and name:
            return InvalidEntry(
                f"the folder cannot hold this name: {error.strerror}",
                path=path,
                hint="another object is in its way",
            )
        hint = (
            "make room there; calling again is safe" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
        )
        return StoreUnavailable(f"the file system answered: {error.strerror}", path=path, hint=hint)
