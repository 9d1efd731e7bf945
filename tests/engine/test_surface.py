"""What callers do to a database that nobody has asked them to do."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import lowwater
from lowwater.engine.database.database import Database
from lowwater.errors import InputError, InternalError, InvalidEntry, LowwaterError, NotFound, TransactionEnded

WRONG: list[Any] = [
    None,
    True,
    -1,
    2**64,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\0",
    "\ud800",
    "x" * 2000,
    b"x",
    bytearray(b"x"),
    [],
    [1],
    {"a": 1},
    {1: "a"},
    {"a": "\ud800"},
    (),
    object(),
    iter([]),
    datetime(9999, 12, 31),  # noqa: DTZ001
    datetime(9999, 12, 31, tzinfo=timezone(timedelta(hours=-12))),
    timedelta.max,
    timedelta(-1),
    lowwater.Put("b", "k", 5),  # type: ignore[arg-type]
    [lowwater.Put("b", "k", b"", [1])],
    [lowwater.Delete("b", "")],  # type: ignore[arg-type]
]
RIGHT = {
    "bucket": "b",
    "key": "k",
    "value": b"v",
    "to_bucket": "b",
    "to_key": "k2",
    "prefix": "",
    "seq": 3,
    "start": 0,
    "length": 1,
    "name": "s",
    "items": [("a", b"v")],
    "entries": [lowwater.Put("b", "k", b"v")],
    "lwm": 0,
}


# What the parts of an engine, and who ships for it, call of each other.
INSIDE = (
    *(
        "attach_tier",
        "before_close",
        "begin_upkeep",
        "call_when_sealed",
        "complete_segments",
        "finish_sealing",
        "propose_seal",
    ),
    *("purge", "purgeable_seq", "seal_by_age", "stop_writing"),
)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    with lowwater.open(tmp_path / "data") as opened:
        opened.create_bucket("b")
        opened.put("b", "k", b"v" * 3000)
        yield opened


def calls_of(handle: object) -> Iterator[tuple[str, list[inspect.Parameter]]]:
    for name, _ in inspect.getmembers(type(handle), inspect.isfunction):
        if not name.startswith("_") and name not in ("close", *INSIDE):
            yield name, list(inspect.signature(getattr(handle, name)).parameters.values())


def call(handle: object, name: str, arguments: dict[str, Any]) -> None:
    try:
        result = getattr(handle, name)(**arguments)
        if isinstance(result, Iterator):
            list(islice(result, 3))
    except InternalError:
        raise
    except LowwaterError:
        pass


@pytest.mark.parametrize("what", ["database", "session", "transaction", "serializable"])
def test_what_is_wrong_with_arguments_is_told_in_types(db: Database, what: str) -> None:
    """Every argument of every call, and the database stays usable."""

    def begin() -> Any:
        if what == "database":
            return db
        if what == "session":
            return db.session()
        return db.transaction("serializable" if what == "serializable" else "snapshot", lock_timeout_s=0)

    for name, parameters in calls_of(begin()):
        needed = {each.name: RIGHT.get(each.name) for each in parameters if each.default is each.empty}
        for parameter in parameters:
            for wrong in WRONG:
                handle = begin()
                call(handle, name, {**needed, parameter.name: wrong})
                if isinstance(handle, lowwater.Transaction):
                    handle.__exit__(InputError, None, None)
    db.put("b", "k", b"after")
    assert db.get("b", "k").value == b"after"
    assert list(db.check()) == []


@pytest.mark.parametrize("wrong", [each for each in WRONG if each is not None and each != -1])
def test_a_wait_is_a_number_of_seconds(db: Database, tmp_path: Path, wrong: Any) -> None:
    """It is told at once, and not by whoever waits first."""
    if wrong == 1.5:
        return
    with pytest.raises(InputError):
        db.transaction(lock_timeout_s=wrong)
    with pytest.raises(InputError):
        db.put("b", "k", b"v", timeout_s=wrong)
    with lowwater.Log.open(tmp_path / "log") as log, pytest.raises(InputError):
        log.append(lowwater.Put("b", "k", b"v"), timeout_s=wrong)


def test_a_number_is_not_a_value(db: Database) -> None:
    """bytes(5) are five zeros."""
    with db.transaction() as txn, pytest.raises(InvalidEntry, match="a value is bytes"):
        txn.put("b", "k", 5)  # type: ignore[arg-type]


def test_what_a_transaction_was_given_is_its_own(db: Database) -> None:
    """Whatever the caller does to it before the commit."""
    value, metadata = bytearray(b"before"), {"when": "before"}
    with db.transaction() as txn:
        txn.put("b", "k", value, metadata)
        value[:] = b"behind"
        metadata["when"] = "behind"
    found = db.get("b", "k")
    assert (found.value, found.metadata) == (b"before", {"when": "before"})


def test_a_scan_ends_with_its_transaction(db: Database) -> None:
    """Nobody keeps the versions that it would read."""
    db.put("b", "l", b"")
    txn = db.transaction()
    begun, not_begun = txn.scan("b"), txn.scan("b")
    assert next(begun).key == "k"
    txn.abort()
    for scan in (begun, not_begun):
        with pytest.raises(TransactionEnded):
            next(scan)


def test_a_transaction_reads_a_bucket_that_was_deleted_since(db: Database) -> None:
    """It reads as of its snapshot, with get as with scan."""
    db.create_bucket("gone")
    db.put("gone", "k", b"v")
    with db.transaction() as txn:
        db.delete("gone", "k")
        db.delete_bucket("gone")
        assert [found.key for found in txn.scan("gone")] == ["k"]
        assert txn.get("gone", "k").value == b"v"
        with pytest.raises(NotFound, match="no bucket"):
            txn.get("never", "k")
