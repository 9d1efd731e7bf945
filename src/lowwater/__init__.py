"""Lowwater: a storage engine whose history lives in object storage. Today: its log.

import lowwater

with lowwater.Log.open("data/wal") as log:
    log.append(lowwater.Put("photos", "cat.jpg", b"..."))
    for entry in log.read("earliest"):
        print(entry.seq, entry.kind, entry.key)
"""

from __future__ import annotations

from importlib.metadata import version

from lowwater import errors
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
from lowwater.engine.session import Session
from lowwater.engine.sessions import RequestId
from lowwater.engine.transactions import Savepoint, Transaction
from lowwater.recovery.opening import open_directory as open
from lowwater.recovery.restore import Restored, restore
from lowwater.tiering.checking import check
from lowwater.tiering.opening import Engine

__version__ = version("lowwater")

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
    "restore",
]
