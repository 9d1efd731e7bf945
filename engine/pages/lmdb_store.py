"""Pages in LMDB: a directory with `data.mdb`, which has all of them, and `lock.mdb`, LMDB's own.

Always true:
  - LMDB trusts what it maps, so it follows nothing that was not looked at: when it is opened, all of the
    file but the content of large values (`lmdb_file.py`), and, before a page or a row of the meta is replaced
    or deleted, the way to it once more;
  - the keys of all pages, and the meta, are those that were written last: sums of both change with each
    transaction, and are compared when it is opened. The content of a page has a checksum of its own;
  - the directory has its name only once the store in it is whole and durable, so a directory without a
    store is damage, and never a beginning;
  - a read transaction lives within one call, behind the gate; LMDB's map is replaced only while the gate
    is shut and nobody is behind it. LMDB does not check that: a reader of the old map reads unmapped memory;
  - the file holds every page that LMDB counts, so no read runs beyond its end, which would be a SIGBUS;
  - nothing here depends on who else has the store open, except that only one process may write: the lock
    of the log's directory sees to that. LMDB's own locks cover readers in other processes.

What this cannot do: what rots after it was looked at, while it is open, LMDB follows. A bad sector under the
map ends the process with SIGBUS, and a flipped bit in an inner page may do as well. It gives no wrong answer:
readers ask for pages by keys that were compared, and a page under another key is corrupt.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import lmdb

from lowwater.engine.log.directory import typed_errors
from lowwater.engine.pages.lmdb_file import (
    SUM_MASK,
    Damage,
    FoundPages,
    NotOne,
    Overtaken,
    check_file,
    check_values,
    pages_limit,
    read_roots,
    sum_of,
    sum_of_rows,
)
from lowwater.engine.pages.pagestore import FULL, check_write, write_failure
from lowwater.engine.seams.real import RealFiles
from lowwater.engine.seams.swap import DATA, LOCK, finish_swap
from lowwater.engine.seams.waiting import Condition
from lowwater.errors import (
    Busy,
    Closed,
    DirectoryLocked,
    DirectoryNotWritable,
    DiskFailed,
    InternalError,
    LogPoisoned,
    LowwaterError,
    NewerVersion,
    NotFound,
    NotLowwater,
    OutOfSpace,
    PagesDamaged,
)

T = TypeVar("T")

NEW = ".new"
# Stands in the unnamed database, beside the names of the others.
FORMAT_KEY = b"lowwater.pages"
FORMAT = b"2"
# Without sums. It gets them with its first transaction.
FORMAT_BEFORE = b"1"
# The sum of the keys of all pages, and that of the meta's rows.
SUMS_KEY = b"lowwater.sums"
SUMS = struct.Struct("<QQ")
PAGES, META = b"pages", b"meta"
NAMES = (PAGES, META)

READERS_MAX = 126
# The rest of LMDB's reader slots are for tools in other processes.
READERS_HERE_MAX = 100
MAP_BYTES_INITIAL = 64 * 2**20
GROWTH_BYTES_MIN = 64 * 2**20
MAP_BYTES_MAX = 2**40
# How often a reader that others overtake begins again.
OVERTAKEN_MAX = 10
# A run of keys takes well below a millisecond.
RUN_KEYS = 1000
RUN_ROWS = 64

# Below that a disk counts as full.
MARGIN_BYTES = 2**20


class Gate:
    """Many pass at a time, or one alone. It costs a reader two uncontended locks. Who passes is known by a
    token of its own, which it may give back twice, and without having passed: an interrupt leaves nobody
    inside."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.RLock()  # a signal handler may read too
        self.owns_lock: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        self._condition = Condition(self._lock)
        self._inside: set[object] = set()
        self._waiting = 0
        self._shut = False
        self.closed = False

    def enter(self, token: object) -> None:
        with self._lock:
            while self._shut or self.closed or len(self._inside) >= READERS_HERE_MAX:
                if self.closed:
                    raise Closed("the page store is closed", path=self._path)
                self._wait()
            self._inside.add(token)

    def leave(self, token: object) -> None:
        with self._lock:
            self._inside.discard(token)
            if self._waiting:
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody is behind the gate while the block runs. Only one thread at a time may ask for that."""
        with self._lock:
            assert not self._shut, "two threads shut the gate"
            self._shut = True
            try:
                while self._inside:
                    self._wait()
            except BaseException:
                self._shut = False
                self._condition.notify_all()
                raise
        try:
            yield
        finally:
            with self._lock:
                self._shut = False
                self._condition.notify_all()

    def _wait(self) -> None:
        self._waiting += 1
        try:
            self._condition.wait()
        finally:
            self._waiting -= 1


class LmdbPages:
    """Use `LmdbPages.open`."""

    def __init__(self, path: str, *, read_only: bool, map_bytes: int, map_bytes_max: int) -> None:
        self.path = path
        self.read_only = read_only
        self._map_bytes_max = map_bytes_max
        self._gate = Gate(path)
        self.owns_lock = self._gate.owns_lock
        # Held by who writes or replaces the map; taken before the gate is shut.
        self._writing = threading.Lock()
        self._failure: LogPoisoned | None = None
        self.on_full: Callable[[], object] = lambda: False
        self._generation = 0
        # Whether its keys and its meta were compared with those that were written: not in the format before.
        self.has_sums = False
        self._sums = (0, 0)
        self._file = RealFiles().open(f"{path}/{DATA}")
        try:
            with self._seen():
                pages_limit(self._file, read_roots(self._file))
            self._environment = _open_environment(path, read_only=read_only, map_bytes=map_bytes)
            self._begin: Callable[..., Any] = self._environment.begin
            try:
                self._require_sound()
                # Slots of readers that were killed keep pages from being reused.
                self._environment.reader_check()
            except BaseException:
                self._environment.close()
                raise
        except BaseException:
            self._file.close()
            raise

    @classmethod
    def open(
        cls,
        path: str,
        *,
        read_only: bool = False,
        map_bytes: int = MAP_BYTES_INITIAL,
        map_bytes_max: int = MAP_BYTES_MAX,
    ) -> LmdbPages:
        """Open the store in this directory, or make one where there is none. `read_only` is for tools,
        also beside a running engine: it makes nothing, and raises NotFound where there is nothing.
        The map begins with room for `map_bytes`, or for what is there, and grows up to `map_bytes_max`."""
        path = os.path.abspath(path)
        with typed_errors(path, "open the page store"):
            if not read_only:
                finish_swap(RealFiles(), os.path.realpath(path))
            if not os.path.isdir(path) or (not read_only and not os.listdir(path)):
                if read_only:
                    raise NotFound("there is no page store", path=path)
                _create(path)
            data = f"{path}/{DATA}"
            if not os.path.exists(data) or not os.path.getsize(data):
                raise PagesDamaged("the file with all pages is missing or empty", path=data)
            used = os.path.getsize(data)
            wanted = max(used, min(map_bytes, map_bytes_max))
            with _translated(path, "open the page store"):
                return cls(path, read_only=read_only, map_bytes=wanted, map_bytes_max=map_bytes_max)

    # ------------------------------------------------------------------------ reading

    def get(self, key: bytes) -> bytes | None:
        gate, token = self._gate, object()
        try:
            gate.enter(token)
            transaction: lmdb.Transaction[bytes] = self._begin(self._pages)
            try:
                return transaction.get(key)
            finally:
                transaction.abort()
        except lmdb.Error as error:
            failure = error
        finally:
            try:
                gate.leave(token)
            except BaseException:
                gate.leave(token)
                raise
        return self._again(failure, lambda transaction: transaction.get(key, db=self._pages))

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        def read(transaction: lmdb.Transaction[bytes]) -> list[bytes | None]:
            get, pages = transaction.get, self._pages
            return [get(key, None, pages) for key in keys]

        return self._read(read)

    def page_keys(self) -> Iterator[bytes]:
        last = b""

        def run(transaction: lmdb.Transaction[bytes]) -> list[bytes]:
            cursor = transaction.cursor(self._pages)
            return list(islice(cursor.iternext(True, False), RUN_KEYS)) if _is_after(cursor, last) else []

        while keys := self._read(run):
            yield from keys
            last = keys[-1]

    def page_sizes(self) -> Iterator[tuple[bytes, int]]:
        last = b""

        def run(transaction: lmdb.Transaction[Any]) -> list[tuple[bytes, int]]:
            cursor = transaction.cursor(self._pages)
            if not _is_after(cursor, last):
                return []
            return [(bytes(key), len(page)) for key, page in islice(cursor.iternext(), RUN_KEYS)]

        while sizes := self._read(run, views=True):
            yield from sizes
            last = sizes[-1][0]

    def rows(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Everything that is in the store: table, key and value, in order."""
        for table, database in zip(NAMES, self._databases, strict=True):
            last = b""
            while found := self._read(partial(_run, database, last)):
                yield from ((table, key, value) for key, value in found)
                last = found[-1][0]

    def damage(self) -> list[str]:
        """What is wrong with the file, as of one transaction: nothing of it is given to LMDB for that."""
        try:
            with typed_errors(self.path, "read the file with all pages"):
                self._found(headers=True)
        except Damage as damage:
            return [str(damage)]
        return []

    def copy_to(self, directory: str) -> None:
        """All of it without free room, into an empty directory. It is not durable there yet."""
        with _translated(directory, "copy the pages"):
            target: Any = os.fsencode(directory)
            self._read(lambda _: self._environment.copy(target, compact=True))

    def read_meta(self) -> dict[bytes, bytes]:
        return self._read(lambda transaction: dict(transaction.cursor(self._meta)))

    def size_bytes(self) -> int:
        with typed_errors(self.path, "measure the page store"):
            return self._read(lambda _: os.path.getsize(f"{self.path}/{DATA}"))

    def used_bytes(self) -> int:
        """Return the size of all of LMDB's pages that are not free, except for the list of the free ones."""

        def read(transaction: lmdb.Transaction[bytes]) -> int:
            stats = [transaction.stat(), *map(transaction.stat, self._databases)]
            pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
            return (pages + 2) * stats[0]["psize"]

        return self._read(read)

    def _read(self, action: Callable[[lmdb.Transaction[Any]], T], *, views: bool = False) -> T:
        """`views` gives views into the map instead of bytes: they end with the transaction."""
        try:
            return self._read_once(action, views=views)
        except lmdb.Error as error:
            failure = error
        return self._again(failure, action, views=views)

    def _read_once(self, action: Callable[[lmdb.Transaction[Any]], T], *, views: bool) -> T:
        gate, token = self._gate, object()
        try:
            gate.enter(token)
            transaction = self._begin(buffers=views)
            try:
                return action(transaction)
            finally:
                transaction.abort()
        finally:
            try:
                gate.leave(token)
            except BaseException:
                gate.leave(token)
                raise

    def _again(
        self, failure: lmdb.Error, action: Callable[[lmdb.Transaction[Any]], T], *, views: bool = False
    ) -> T:
        """Deal with the failure of a read, where that is possible, and read again."""
        with _translated(self.path, "read pages"):
            while True:
                generation = self._generation
                if isinstance(failure, lmdb.MapResizedError):
                    self._adopt_map(generation)
                elif isinstance(failure, lmdb.PanicError) and self._failure is not None:
                    self._revive(generation)
                elif isinstance(failure, lmdb.ReadersFullError):
                    self._clear_dead_readers()
                else:
                    raise failure
                try:
                    return self._read_once(action, views=views)
                except lmdb.Error as error:
                    # Each of these can happen again only after somebody did something again.
                    if type(error) is type(failure) and generation == self._generation:
                        raise
                    failure = error

    # ------------------------------------------------------------------------ writing

    def write(
        self,
        puts: Sequence[tuple[bytes, bytes]],
        deletes: Sequence[bytes],
        meta: Mapping[bytes, bytes | None],
    ) -> None:
        check_write(puts, deletes, meta)
        if self.read_only:
            raise DirectoryNotWritable("the page store was opened for reading", path=self.path)
        no_room = 0
        with self._writing:
            while True:
                if self._gate.closed:
                    raise Closed("the page store is closed", path=self.path)
                if self._failure is not None:
                    raise self._failure
                try:
                    self._transact(puts, deletes, meta)
                except lmdb.MapFullError:
                    self._grow()
                except lmdb.MapResizedError:
                    with _translated(self.path, "write pages"), self._gate.alone():
                        self._set_map(0)
                except (lmdb.Error, OSError) as error:
                    number = _number(error)
                    if number == errno.EIO and self._is_full(puts):
                        number = errno.ENOSPC
                    if number in FULL and not no_room:
                        no_room = number
                        self.on_full()
                        continue
                    # The environment may take nothing any more: that is no cause.
                    self._failure = write_failure(no_room or number, self.path)
                    raise self._failure from error
                except Damage as damage:
                    raise self._damaged(damage) from damage
                else:
                    return

    def _transact(
        self,
        puts: Sequence[tuple[bytes, bytes]],
        deletes: Sequence[bytes],
        meta: Mapping[bytes, bytes | None],
    ) -> None:
        with self._environment.begin(db=self._pages, write=True) as transaction:
            sums = self._sums_after(transaction, puts, deletes, meta)
            for key in deletes:
                transaction.delete(key)
            if puts:
                transaction.cursor().putmulti(puts)
            for key, value in meta.items():
                if value is None:
                    transaction.delete(key, db=self._meta)
                else:
                    transaction.put(key, value, db=self._meta)
            transaction.put(SUMS_KEY, SUMS.pack(*sums), db=self._main)
            if not self.has_sums:
                transaction.put(FORMAT_KEY, FORMAT, db=self._main)
        self._sums = sums
        self.has_sums = True
        self._fill_file()

    def _sums_after(
        self,
        transaction: lmdb.Transaction[bytes],
        puts: Sequence[tuple[bytes, bytes]],
        deletes: Sequence[bytes],
        meta: Mapping[bytes, bytes | None],
    ) -> tuple[int, int]:
        """The sums as they are after a write that has begun. It finds out which keys are there, by what LMDB
        is about to follow."""
        put = [key for key, _ in puts]
        there = check_values(self._file, transaction.id() - 1, {PAGES: [*put, *deletes], META: list(meta)})
        key_sum, meta_sum = self._sums
        key_sum += sum_of(key for key in put if not there[PAGES][key])
        key_sum -= sum_of(key for key in set(deletes).difference(put) if there[PAGES][key])
        before = {key: transaction.get(key, db=self._meta) or b"" for key in meta if there[META][key]}
        after = {key: value for key, value in meta.items() if value is not None}
        meta_sum += sum_of_rows(after) - sum_of_rows(before)
        return key_sum & SUM_MASK, meta_sum & SUM_MASK

    def _is_full(self, puts: Sequence[tuple[bytes, bytes]]) -> bool:
        """LMDB reports the first write that was cut short for want of room as EIO."""
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize < sum(len(page) for _, page in puts) + MARGIN_BYTES

    def _fill_file(self) -> None:
        """LMDB does not write pages at the end that a transaction took and gave back. A hole stands for
        them, so that a file that is too short was cut."""
        wanted = self._counted_bytes()
        if os.path.getsize(f"{self.path}/{DATA}") < wanted:
            os.truncate(f"{self.path}/{DATA}", wanted)

    def _grow(self) -> None:
        now = self._environment.info()["map_size"]
        wanted = min(now + _growth(now), self._map_bytes_max)
        if wanted <= now:
            raise OutOfSpace(
                f"the pages have reached their limit of {self._map_bytes_max:,} bytes",
                path=self.path,
                hint="raise it: this group was not written, a smaller one may still fit",
            )
        with self._gate.alone():
            try:
                self._set_map(wanted)
            except lmdb.Error as error:
                # Not enough address space, most likely. The old map is gone.
                self._failure = write_failure(_number(error), self.path)
                self._reopen(now)
                raise self._failure from error

    def _adopt_map(self, generation: int) -> None:
        """Another process has written beyond the map that this one has."""
        with self._writing, self._gate.alone():
            if generation == self._generation and not self._gate.closed:
                self._set_map(0)

    def _revive(self, generation: int) -> None:
        """LMDB refuses reads too when it could not write its root. The file is whole: open it again."""
        with self._writing, self._gate.alone():
            if generation == self._generation and not self._gate.closed:
                self._reopen(self._environment.info()["map_size"])

    def _reopen(self, map_bytes: int) -> None:
        self._environment.close()
        with _translated(self.path, "open the page store again"):
            self._environment = _open_environment(self.path, read_only=True, map_bytes=map_bytes)
            self._open_databases()
        self._generation += 1

    def _clear_dead_readers(self) -> None:
        token = object()
        try:
            self._gate.enter(token)
            self._environment.reader_check()
        finally:
            self._gate.leave(token)

    def _set_map(self, size: int) -> None:
        self._environment.set_mapsize(size)
        self._generation += 1

    # ------------------------------------------------------------------------ opening and closing

    def close(self) -> None:
        with self._writing:
            if not self._gate.closed:
                with self._gate.alone():
                    self._gate.closed = True
                    self._environment.close()
                    self._file.close()

    def _open_databases(self) -> None:
        environment = self._environment
        self._main = environment.open_db()
        self._databases = [environment.open_db(name, create=False) for name in NAMES]
        self._pages, self._meta = self._databases
        self._begin = environment.begin

    def _counted_bytes(self) -> int:
        page_bytes: int = self._environment.stat()["psize"]
        return (self._environment.info()["last_pgno"] + 1) * page_bytes

    def _require_sound(self) -> None:
        """Raise unless LMDB can follow the file, and it has the keys and the meta that were written last."""
        with self._seen():
            found = self._found()
            stored = found.values.get(FORMAT_KEY)
            if stored is None and not found.trees:
                raise NotLowwater("this is an LMDB database, but not one of Lowwater", path=self.path)
            if stored is not None and stored not in (FORMAT, FORMAT_BEFORE):
                raise NewerVersion(
                    f"the page store has format {stored!r}, and not {FORMAT!r}", path=self.path
                )
            if stored is None or sorted(found.trees) != sorted(NAMES):
                raise Damage("the tree of trees has lost one, or what it says of them")
            self._open_databases()
            with self._environment.begin(db=self._meta) as transaction:
                sums = transaction.get(SUMS_KEY, db=self._main)
                meta_sum = sum_of_rows(dict(transaction.cursor()))
            self.has_sums = stored == FORMAT
            self._sums = (found.key_sums[PAGES], meta_sum)
            if self.has_sums:
                if found.values.get(SUMS_KEY, b"")[:8] != SUMS.pack(*self._sums)[:8]:
                    raise Damage("the keys of its pages are not those that were written")
                # Another process may have written since: the meta is as new as this.
                if sums is None or sums[8:] != SUMS.pack(*self._sums)[8:]:
                    raise Damage("its meta is not what was written")
        # Short is a file whose writer died between a commit and `_fill_file`: nothing is missing.
        if not self.read_only:
            self._fill_file()

    def _found(self, *, headers: bool = False) -> FoundPages:
        """What a transaction sees, which nobody changes while it lasts."""

        def check(transaction: lmdb.Transaction[Any]) -> FoundPages:
            return check_file(self._file, read_roots(self._file, transaction.id()), headers=headers)

        for _ in range(OVERTAKEN_MAX):
            try:
                return self._read(check)
            except Overtaken:
                continue  # two others ended before its roots were read
        return self._read(check)

    @contextmanager
    def _seen(self) -> Iterator[None]:
        try:
            yield
        except NotOne as error:
            raise NotLowwater(
                f"the file with all pages is not one of LMDB: {error}",
                path=f"{self.path}/{DATA}",
                hint=PagesDamaged.default_hint,
            ) from error
        except Damage as damage:
            raise self._damaged(damage) from damage

    def _damaged(self, damage: Damage) -> PagesDamaged:
        return PagesDamaged(f"the file with all pages is damaged: {damage}", path=f"{self.path}/{DATA}")


def _run(database: Any, after: bytes, transaction: lmdb.Transaction[bytes]) -> list[tuple[bytes, bytes]]:
    cursor = transaction.cursor(database)
    return list(islice(cursor.iternext(True, True), RUN_ROWS)) if _is_after(cursor, after) else []


def _is_after(cursor: Any, after: bytes) -> bool:
    """Set the cursor to the first key above `after`. False where there is none."""
    found: bool = cursor.set_range(after) if after else cursor.first()
    if found and cursor.key() == after:
        found = cursor.next()
    return found


def _growth(now: int) -> int:
    """In whole pages of any machine."""
    return max(GROWTH_BYTES_MIN, now // 4) // 65536 * 65536


def _open_environment(path: str, *, read_only: bool, map_bytes: int) -> lmdb.Environment:
    return lmdb.open(
        os.fsencode(path),  # of a text it would take UTF-8 alone
        map_size=map_bytes,
        readonly=read_only,
        create=False,
        sync=True,
        metasync=True,
        writemap=False,
        readahead=False,
        max_dbs=8,
        max_readers=READERS_MAX,
        # Nobody writes where there is no lock file, and a tool must not make one.
        lock=not read_only or os.path.exists(f"{path}/{LOCK}"),
        # LMDB 0.9's format, whatever the environment variables say.
        lib_version=0,
    )


def _create(path: str) -> None:
    """Make an empty store beside its place, durably, and then move it there."""
    files = RealFiles()
    new = path + NEW
    if os.path.exists(new):
        for name in (DATA, LOCK):
            if os.path.exists(f"{new}/{name}"):
                files.remove(f"{new}/{name}")
    files.make_directory(new)
    with _translated(new, "make the page store"):
        environment = _open_environment(new, read_only=False, map_bytes=MAP_BYTES_INITIAL)
        try:
            with environment.begin(write=True) as transaction:
                for table in NAMES:
                    environment.open_db(table, txn=transaction)
                transaction.put(FORMAT_KEY, FORMAT)
                transaction.put(SUMS_KEY, SUMS.pack(0, 0))
        finally:
            environment.close()
    files.sync_directory(new)
    files.rename(new, path)
    files.sync_directory(os.path.dirname(path))


# ---------------------------------------------------------------------------- errors


def _number(error: lmdb.Error | OSError) -> int:
    """The errno, or 0: LMDB's own codes are negative."""
    number = error.errno if isinstance(error, OSError) else error.code
    return max(0, number or 0)


@contextmanager
def _translated(path: str, doing: str) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise _typed(error, path, doing) from error


def _typed(error: lmdb.Error, path: str, doing: str) -> LowwaterError:
    number = _number(error)
    where: dict[str, Any] = {"path": path}
    if "already open in this process" in str(error):
        hint = "this process has it open: share that store, or close it first"
        return DirectoryLocked(f"cannot {doing}: it is open already", hint=hint, **where)
    if isinstance(error, lmdb.VersionMismatchError):
        return NewerVersion(f"cannot {doing}: its file is of another version of LMDB", **where)
    if isinstance(
        error,
        (
            lmdb.InvalidError,
            lmdb.CorruptedError,
            lmdb.PageNotFoundError,
            lmdb.NotFoundError,
            lmdb.BadTxnError,
        ),
    ):
        return PagesDamaged(f"cannot {doing}: LMDB found damage ({error})", **where)
    if isinstance(error, lmdb.ReadersFullError):
        hint = "too many processes read this page store: end some of them"
        return Busy(f"cannot {doing}: all {READERS_MAX} reader slots are taken", hint=hint, **where)
    if isinstance(error, lmdb.DiskError):
        return write_failure(number, path)
    if number == errno.ENOENT:
        return NotFound(f"cannot {doing}: there is nothing there", **where)
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DirectoryNotWritable(
            f"cannot {doing}: {os.strerror(number).lower()}",
            hint="run as the user that owns it; readers in other processes need to write lock.mdb too",
            **where,
        )
    if number:
        hint = "look into the system's log for the disk, and at the limits of this process"
        return DiskFailed(f"cannot {doing}: {os.strerror(number).lower()}", hint=hint, **where)
    return InternalError(f"cannot {doing}: {error}", **where)
