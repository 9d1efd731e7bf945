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
from lowwater.engine.chain import Create
from lowwater.engine.check import Finding
from lowwater.engine.database import Database
from lowwater.engine.decide import Refusal
from lowwater.engine.engine import Engine
from lowwater.engine.entries import Copy, CreateBucket, Delete, DeleteBucket, Entry, Put, Write
from lowwater.engine.log import Log, LogOptions
from lowwater.engine.opening import open_embedded as open
from lowwater.engine.orchestrator import Orchestrator, Outcome, StorageEngine
from lowwater.engine.records import Head, Marks, Object, Page
from lowwater.engine.transactions import Savepoint, Transaction

__version__ = version("lowwater")

__all__ = [
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
    "Savepoint",
    "StorageEngine",
    "Transaction",
    "Write",
    "__version__",
    "errors",
    "open",
]
