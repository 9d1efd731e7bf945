"""The database for coroutines: its calls for keys, each in a thread of a small pool.

Always true: a call that was cancelled may still take effect, as its thread goes on; a scan keeps its snapshot
until it ends or is closed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251 — callers' calls, no background work
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from lowwater.engine.format.moments import At
from lowwater.engine.format.records import Object
from lowwater.errors import Closed

if TYPE_CHECKING:
    from lowwater.engine.database.database import Database

P = ParamSpec("P")
T = TypeVar("T")

# As many writers can share one sync.
THREADS = 32
SCAN_RUN = 256


class AsyncDatabase:
    """The calls of `Database` that programs make most, awaitable, as `db.aio()` returns them. Transactions
    stay with threads: call a function that uses one, or anything else, with `run`."""

    def __init__(self, database: Database, *, threads: int = THREADS) -> None:
        self._database = database
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lowwater-aio")
        self.put = self._awaitable(database.put)
        self.put_many = self._awaitable(database.put_many)
        self.get = self._awaitable(database.get)
        self.read = self._awaitable(database.read)
        self.head = self._awaitable(database.head)
        self.read_range = self._awaitable(database.read_range)
        self.delete = self._awaitable(database.delete)
        self.copy = self._awaitable(database.copy)
        self.write = self._awaitable(database.write)
        self.list = self._awaitable(database.list)
        self.buckets = self._awaitable(database.buckets)
        self.create_bucket = self._awaitable(database.create_bucket)
        self.delete_bucket = self._awaitable(database.delete_bucket)
        self.snapshot = self._awaitable(database.snapshot)
        self.drop_snapshot = self._awaitable(database.drop_snapshot)
        self.flush = self._awaitable(database.flush)
        self.checkpoint = self._awaitable(database.checkpoint)
        self.root = self._awaitable(database.root)

    def _awaitable(self, call: Callable[P, T]) -> Callable[P, asyncio.Future[T]]:
        def awaitable(*args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
            return self._in_thread(partial(call, *args, **kwargs))

        awaitable.__doc__ = call.__doc__
        return awaitable

    async def run(self, work: Callable[[Database], T]) -> T:
        """Call `work(database)` in a thread: `await db.run(transfer)` for what a transaction does."""
        return await self._in_thread(partial(work, self._database))

    def _in_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        try:
            return loop.run_in_executor(self._pool, call)
        except RuntimeError:  # all that a pool says of its end
            raise Closed("this database was closed", path=self._database.directory) from None

    async def scan(
        self,
        bucket: str,
        prefix: str = "",
        *,
        start_after: str | None = None,
        at: At | None = None,
        wait_s: float | None = None,
    ) -> AsyncIterator[Object]:
        """Yield the objects of a bucket in the order of their keys, all as of one moment."""
        scan = partial(self._database.scan, bucket, prefix, start_after=start_after, at=at, wait_s=wait_s)
        found: Any = await self._in_thread(scan)
        in_use = threading.Lock()
        try:
            while run := await self._in_thread(partial(_take, found, in_use)):
                for each in run:
                    yield each
        finally:
            # After a cancellation a thread may still be in it, and that one lets it go.
            if in_use.acquire(blocking=False):
                try:
                    found.close()
                finally:
                    in_use.release()

    async def close(self) -> None:
        """Close the database, once what is under way has ended."""
        await asyncio.to_thread(self._pool.shutdown)
        await asyncio.to_thread(self._database.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _take(found: Iterator[Object], in_use: threading.Lock) -> Sequence[Object]:
    with in_use:
        return list(islice(found, SCAN_RUN))
