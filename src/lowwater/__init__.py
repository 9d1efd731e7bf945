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
from lowwater.engine.check import Finding
from lowwater.engine.database import Database
from lowwater.engine.entries import CreateBucket, Delete, DeleteBucket, Entry, Put
from lowwater.engine.log import Log, LogOptions
from lowwater.engine.opening import open_embedded as open
from lowwater.engine.records import Head, Marks, Object, Page
from lowwater.engine.transactions import Savepoint, Transaction

__version__ = version("lowwater")

__all__ = [
    "CreateBucket",
    "Database",
    "Delete",
    "DeleteBucket",
    "Entry",
    "Finding",
    "Head",
    "Log",
    "LogOptions",
    "Marks",
    "Object",
    "Page",
    "Put",
    "Savepoint",
    "Transaction",
    "__version__",
    "errors",
    "open",
]
