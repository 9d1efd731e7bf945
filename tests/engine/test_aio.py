"""engine/database/aio.py: the same database, awaited."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import lowwater
from lowwater.engine.database.database import Database
from lowwater.engine.format.records import Object
from lowwater.errors import Closed, NotFound


def test_coroutines_write_read_and_scan(tmp_path: Path) -> None:
    """What a coroutine was told is durable is there for everybody."""

    async def main() -> list[str]:
        async with lowwater.open(tmp_path / "data").aio() as db:
            await db.create_bucket("b")
            await asyncio.gather(*[db.put("b", f"{number:04}", b"x" * 10) for number in range(600)])
            assert (await db.get("b", "0007")).value == b"x" * 10
            with pytest.raises(NotFound):
                await db.get("b", "nothing")
            assert (await db.list("b", limit=2)).next == "0001"
            return [each.key async for each in db.scan("b")]

    assert asyncio.run(main()) == [f"{number:04}" for number in range(600)]
    with lowwater.open(tmp_path / "data") as db:
        assert len(list(db.scan("b"))) == 600


def test_a_transaction_runs_as_a_function(tmp_path: Path) -> None:
    """It belongs to one thread, which a coroutine does not have."""

    def add(db: Database) -> None:
        with db.transaction() as txn:
            txn.put("b", "n", b"1")

    async def main() -> bytes:
        async with lowwater.open(tmp_path / "data").aio() as db:
            await db.create_bucket("b")
            await db.run(add)
            return (await db.get("b", "n")).value

    assert asyncio.run(main()) == b"1"


def test_a_scan_that_is_left_lets_its_snapshot_go(tmp_path: Path) -> None:
    """Or versions would be kept for ever."""

    async def main() -> None:
        database = lowwater.open(tmp_path / "data")
        async with database.aio() as db:
            await db.create_bucket("b")
            await db.put_many("b", [(f"{number:04}", b"") for number in range(1000)])
            scan = db.scan("b")
            assert (await anext(scan)).key == "0000"
            assert database._state._pins
            await scan.aclose()  # type: ignore[attr-defined]
            assert not database._state._pins
        with pytest.raises(Closed):
            database.get("b", "0000")

    asyncio.run(main())


def test_what_is_awaited_after_the_end_is_told(tmp_path: Path) -> None:
    """In the error that all calls of a closed database have."""

    async def main() -> None:
        db = lowwater.open(tmp_path / "data").aio()
        await db.create_bucket("b")
        await db.close()
        await db.close()
        for again in (lambda: db.get("b", "k"), lambda: db.run(Database.root), lambda: anext(db.scan("b"))):
            with pytest.raises(Closed):
                await again()

    asyncio.run(main())


def test_a_scan_that_is_cancelled_in_its_thread_ends_as_cancelled(tmp_path: Path) -> None:
    """The thread is still in it, and its moment is let go when it comes out."""

    async def main() -> None:
        database = lowwater.open(tmp_path / "data")
        async with database.aio() as db:
            await db.create_bucket("b")
            await db.put_many("b", [(f"{number:04}", b"x") for number in range(2000)])
            scan = db.scan("b")
            await anext(scan)
            rows = scan.ag_frame.f_locals["found"]._lists

            async def drain(rows: AsyncIterator[Object]) -> None:
                async for _ in rows:
                    pass

            with database._state.lock:
                task = asyncio.create_task(drain(scan))
                while not rows.gi_running:
                    await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            del rows, scan, task
            while database._state._pins:
                gc.collect()
                await asyncio.sleep(0.001)

    asyncio.run(main())
