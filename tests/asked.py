"""What tests of damage share: questions whose answers are compared, in a process of its own.

Always true: an answer is right, or a typed error with a hint. What ends the process, or hangs it, is a
failure like a wrong answer.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import lowwater
from lowwater.errors import LowwaterError, NotFound

T = TypeVar("T")

# Nothing here takes so long, on whatever machine.
HANGS_AFTER_S = 600


class Asked:
    """Answers that were compared: how many were typed errors, and all that were wrong."""

    def __init__(self) -> None:
        self.detected: list[str] = []
        self.wrong: list[str] = []

    def ask(self, what: str, call: Callable[[], object], expected: object) -> None:
        found = self.call(what, call, default=expected)
        if found != expected:
            self.wrong.append(f"{what}: another answer")

    def call(self, what: str, call: Callable[[], T], default: T) -> T:
        """What is answered, or the default after an error."""
        try:
            return call()
        except LowwaterError as error:
            self.detected.append(f"{what}: {type(error).__name__}: {error}")
            if not error.hint:
                self.wrong.append(f"{what}: no hint: {type(error).__name__}: {error}")
        except Exception:  # noqa: BLE001 — whatever it is, it is no answer
            self.wrong.append(f"{what}: {traceback.format_exc()[-900:]}")
        return default

    def told(self) -> dict[str, Any]:
        return {"wrong": self.wrong[:3], "detected": self.detected[:3]}


def value_or_none(db: lowwater.Database, bucket: str, key: str, at: int | None = None) -> bytes | None:
    try:
        return db.get(bucket, key, at=at).value
    except NotFound:
        return None


def prefixes_of(db: lowwater.Database, bucket: str) -> list[str]:
    """All that lists join at the first slash, a few a page."""
    found: list[str] = []
    after = None
    while True:
        page = db.list(bucket, "", "/", after, 3)
        found += page.prefixes
        after = page.next
        if after is None:
            return found


def in_a_child(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What this returns, or how the process ended that it ran in. It is one that never opened a store: a
    forked process has none of the threads that the stores of its parent lean on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lowwater", "pytest", "tests.recovery.everything"])
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(writing, run))
    process.start()
    writing.close()
    try:
        found: dict[str, Any] = reading.recv()
    except EOFError:
        process.join()
        assert process.exitcode is not None
        return {"wrong": [f"ended by {_ended(process.exitcode)}"], "detected": []}
    process.join()
    return found


def _answer(writing: Connection, run: Callable[[], dict[str, Any]]) -> None:
    signal.alarm(HANGS_AFTER_S)
    try:
        found = run()
    except Exception:  # noqa: BLE001 — whatever it is, it is no answer
        found = {"wrong": [traceback.format_exc()[-900:]], "detected": []}
    writing.send(found)
    # As it is: what a failure has left open may not wait for anybody.
    os._exit(0)


def _ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
