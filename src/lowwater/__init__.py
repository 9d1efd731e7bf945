"""Lowwater: an embedded database whose history is a log, and lives in object storage.

import lowwater

with lowwater.open("data/", tier="s3://bucket/prefix") as db:
    db.create_bucket("photos", exist_ok=True)
    db.put("photos", "cat.jpg", b"...")
    for entry in db.log("earliest"):
        print(entry.seq, entry.kind, entry.key)
    db.ship()

`lowwater.Log` is the log on its own, `lowwater.Engine` the database for who orders entries elsewhere.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lowwater import errors

if TYPE_CHECKING:
    from lowwater.engine.arrow import read_segment
    from lowwater.engine.chain import Create, checkpoint_entry
    from lowwater.engine.check import Finding
    from lowwater.engine.checkpoints import CheckpointRow, read_checkpoint
    from lowwater.engine.database import Database
    from lowwater.engine.decide import Refusal
    from lowwater.engine.entries import (
        Abort,
        Begin,
        Commit,
        Copy,
        CreateBucket,
        Delete,
        DeleteBucket,
        Entry,
        Put,
        Write,
    )
    from lowwater.engine.keeping import Snapshot
    from lowwater.engine.log import Log, LogOptions
    from lowwater.engine.orchestrator import Orchestrator, Outcome, StorageEngine
    from lowwater.engine.records import Head, Marks, Object, Page
    from lowwater.engine.request_id import RequestId
    from lowwater.engine.session import Session
    from lowwater.engine.transactions import Savepoint, Transaction
    from lowwater.recovery.opening import open_directory as open
    from lowwater.recovery.restore import Restored, restore
    from lowwater.tiering.checking import check
    from lowwater.tiering.opening import Engine

__version__ = version("lowwater")

# By name, the module that has it, and what it is called there. Nothing is loaded before it is asked for: each
# process that Spark starts imports this package, and needs little of it.
_PUBLIC = {
    "Abort": ("engine.entries", "Abort"),
    "Begin": ("engine.entries", "Begin"),
    "CheckpointRow": ("engine.checkpoints", "CheckpointRow"),
    "Commit": ("engine.entries", "Commit"),
    "Copy": ("engine.entries", "Copy"),
    "Create": ("engine.chain", "Create"),
    "CreateBucket": ("engine.entries", "CreateBucket"),
    "Database": ("engine.database", "Database"),
    "Delete": ("engine.entries", "Delete"),
    "DeleteBucket": ("engine.entries", "DeleteBucket"),
    "Engine": ("tiering.opening", "Engine"),
    "Entry": ("engine.entries", "Entry"),
    "Finding": ("engine.check", "Finding"),
    "Head": ("engine.records", "Head"),
    "Log": ("engine.log", "Log"),
    "LogOptions": ("engine.log", "LogOptions"),
    "Marks": ("engine.records", "Marks"),
    "Object": ("engine.records", "Object"),
    "Orchestrator": ("engine.orchestrator", "Orchestrator"),
    "Outcome": ("engine.orchestrator", "Outcome"),
    "Page": ("engine.records", "Page"),
    "Put": ("engine.entries", "Put"),
    "Refusal": ("engine.decide", "Refusal"),
    "RequestId": ("engine.request_id", "RequestId"),
    "Restored": ("recovery.restore", "Restored"),
    "Savepoint": ("engine.transactions", "Savepoint"),
    "Session": ("engine.session", "Session"),
    "Snapshot": ("engine.keeping", "Snapshot"),
    "StorageEngine": ("engine.orchestrator", "StorageEngine"),
    "Transaction": ("engine.transactions", "Transaction"),
    "Write": ("engine.entries", "Write"),
    "check": ("tiering.checking", "check"),
    "checkpoint_entry": ("engine.chain", "checkpoint_entry"),
    "open": ("recovery.opening", "open_directory"),
    "read_checkpoint": ("engine.checkpoints", "read_checkpoint"),
    "read_segment": ("engine.arrow", "read_segment"),
    "restore": ("recovery.restore", "restore"),
}
# They were there when everything was loaded at once.
_LAYERS = ("engine", "recovery", "tiering")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        module, attribute = _PUBLIC[name]
        found = globals()[name] = getattr(import_module(f"{__name__}.{module}"), attribute)
        return found
    if name in _LAYERS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Abort",
    "Begin",
    "CheckpointRow",
    "Commit",
    "Copy",
    "Create",
    "CreateBucket",
    "Database",
    "Delete",
    "DeleteBucket",
    "Engine",
    "Entry",
    "Finding",
    "Head",
    "Log",
    "LogOptions",
    "Marks",
    "Object",
    "Orchestrator",
    "Outcome",
    "Page",
    "Put",
    "Refusal",
    "RequestId",
    "Restored",
    "Savepoint",
    "Session",
    "Snapshot",
    "StorageEngine",
    "Transaction",
    "Write",
    "__version__",
    "check",
    "checkpoint_entry",
    "errors",
    "open",
    "read_checkpoint",
    "read_segment",
    "restore",
]
