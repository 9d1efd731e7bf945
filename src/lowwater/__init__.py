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
    from lowwater.engine.checkpoint.checkpoints import CheckpointRow, read_checkpoint
    from lowwater.engine.database.database import Database
    from lowwater.engine.database.orchestrator import Orchestrator, Outcome, StorageEngine
    from lowwater.engine.database.session import Session
    from lowwater.engine.database.transactions import Savepoint, Transaction
    from lowwater.engine.format.entries import (
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
    from lowwater.engine.format.records import Head, Marks, Object, Page
    from lowwater.engine.format.request_id import RequestId
    from lowwater.engine.log.arrow import read_segment
    from lowwater.engine.log.chain import Create, checkpoint_entry
    from lowwater.engine.log.check import Finding
    from lowwater.engine.log.log import Log, LogOptions
    from lowwater.engine.state.decide import Refusal
    from lowwater.engine.state.keeping import Snapshot
    from lowwater.recovery.restore import Restored, restore
    from lowwater.recovery.restored_opening import open_directory as open
    from lowwater.tiering.checking import check
    from lowwater.tiering.tiered_opening import Engine

__version__ = version("lowwater")

# By name, the module that has it, and what it is called there. Nothing is loaded before it is asked for: each
# process that Spark starts imports this package, and needs little of it.
_PUBLIC = {
    "Abort": ("engine.format.entries", "Abort"),
    "Begin": ("engine.format.entries", "Begin"),
    "CheckpointRow": ("engine.checkpoint.checkpoints", "CheckpointRow"),
    "Commit": ("engine.format.entries", "Commit"),
    "Copy": ("engine.format.entries", "Copy"),
    "Create": ("engine.log.chain", "Create"),
    "CreateBucket": ("engine.format.entries", "CreateBucket"),
    "Database": ("engine.database.database", "Database"),
    "Delete": ("engine.format.entries", "Delete"),
    "DeleteBucket": ("engine.format.entries", "DeleteBucket"),
    "Engine": ("tiering.tiered_opening", "Engine"),
    "Entry": ("engine.format.entries", "Entry"),
    "Finding": ("engine.log.check", "Finding"),
    "Head": ("engine.format.records", "Head"),
    "Log": ("engine.log.log", "Log"),
    "LogOptions": ("engine.log.log", "LogOptions"),
    "Marks": ("engine.format.records", "Marks"),
    "Object": ("engine.format.records", "Object"),
    "Orchestrator": ("engine.database.orchestrator", "Orchestrator"),
    "Outcome": ("engine.database.orchestrator", "Outcome"),
    "Page": ("engine.format.records", "Page"),
    "Put": ("engine.format.entries", "Put"),
    "Refusal": ("engine.state.decide", "Refusal"),
    "RequestId": ("engine.format.request_id", "RequestId"),
    "Restored": ("recovery.restore", "Restored"),
    "Savepoint": ("engine.database.transactions", "Savepoint"),
    "Session": ("engine.database.session", "Session"),
    "Snapshot": ("engine.state.keeping", "Snapshot"),
    "StorageEngine": ("engine.database.orchestrator", "StorageEngine"),
    "Transaction": ("engine.database.transactions", "Transaction"),
    "Write": ("engine.format.entries", "Write"),
    "check": ("tiering.checking", "check"),
    "checkpoint_entry": ("engine.log.chain", "checkpoint_entry"),
    "open": ("recovery.restored_opening", "open_directory"),
    "read_checkpoint": ("engine.checkpoint.checkpoints", "read_checkpoint"),
    "read_segment": ("engine.log.arrow", "read_segment"),
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
