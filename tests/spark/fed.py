"""Random archives in a folder: an engine that is fed with everything that entries can be, and what it says.

Seqs have holes, transactions lie open beside one another, roll back, are doomed, abort, and lose; segments
are small; some checkpoints are shipped, with and without a base; and the engine stays open, to be asked.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from lowwater.chaos.clock import SeededRandomness, VirtualClock
from lowwater.chaos.disk import FaultyFiles
from lowwater.chaos.runner import StepRunner
from lowwater.engine.database.core import EngineOptions
from lowwater.engine.format.entries import (
    Abort,
    Begin,
    Commit,
    Control,
    Copy,
    CreateBucket,
    Delete,
    DeleteBucket,
    Put,
    Write,
)
from lowwater.engine.format.format import Kind
from lowwater.engine.log.chain import Create
from lowwater.engine.log.log import LogOptions, Seams
from lowwater.engine.pages.memory_pages import MemoryPages
from lowwater.engine.state.requests import members_of
from lowwater.tiering.folder_store import FolderStore
from lowwater.tiering.ship_checkpoints import CheckpointShipper
from lowwater.tiering.tiered_opening import Engine

BUCKETS = ("a", "b", "bücket")


class Fed:
    """An engine, its orchestrator, and its archive in `folder`."""

    def __init__(self, folder: Path, seed: int, *, page_keys: int = 4, segment_bytes: int = 8192) -> None:
        self.random = random.Random(f"archive {seed}")
        self.uri = f"file://{folder}"
        self.clock = VirtualClock()
        self.files = FaultyFiles(clock=self.clock)
        self.runner = StepRunner(self.clock)
        self.wanted: list[Control] = []
        self.ships_checkpoints = True
        self.seq = 0
        self.time_us = 1_700_000_000_000_000
        self.engine: Any = Engine(
            "db",
            [FolderStore(str(folder))],
            orchestrator=self,
            log_options=LogOptions(segment_age_max_s=1e6),
            options=EngineOptions(checkpoint_interval_s=None),
            seams=Seams(
                files=self.files,
                clock=self.clock,
                randomness=SeededRandomness(seed),
                runner=self.runner,
                owner="test",
            ),
            store=MemoryPages(self.files),
        )
        self.store = FolderStore(str(folder))
        settings = {"segment_bytes": segment_bytes, "block_bytes": 4096, "page_keys": page_keys}
        settings["inline_bytes_max"] = 32
        if seed % 2:
            settings["before_images"] = 1
        self.order(Create(b"c" * 16, b"s" * 16, settings=settings))
        self.order(Control(Kind.HORIZON, {"seq": self.seq}))
        self.first = self.seq
        self.open: list[int] = []
        self.saves: dict[int, list[int]] = {}
        self.sessions: list[list[int]] = []

    # ------------------------------------------------------------------ as the engine sees it

    def get_low_water_mark(self) -> int:
        return 0

    def fetch_log_entries(self, seq_first: int, seq_last: int) -> Any:
        raise NotImplementedError

    def propose(self, entry: Any) -> None:
        if entry.kind != Kind.CHECKPOINT_SHIPPED or self.ships_checkpoints:
            self.wanted.append(entry)

    # ------------------------------------------------------------------ ordering

    def order(self, entry: Any) -> Any:
        if self.random.random() < 0.1:
            self.seq += self.random.randrange(1, 9)
        self.seq += len(members_of(entry))
        return self.engine.apply_log_entry(self.seq, entry)

    def drain(self) -> None:
        self.engine.sync()
        self.engine.update_low_water_mark(self.engine.marks().durable)
        for _ in range(200):
            self.clock.advance(1.0)
            self.runner.run_until_idle(self.random)
            if not self.wanted:
                return
            wanted, self.wanted = self.wanted, []
            for entry in wanted:
                self.order(entry)
            self.engine.sync()
            self.engine.update_low_water_mark(self.engine.marks().durable)

    def ship(self) -> int:
        """All that is there now."""
        target = self.engine.marks().applied
        for _ in range(100):
            self.engine.propose_seal()
            self.drain()
            if self.engine.counted_hwm >= target:
                return int(self.engine.counted_hwm)
        raise AssertionError(f"it was not shipped: {self.engine.shipping()}")

    def checkpoint(self, *, shipped: bool = True) -> int:
        """Make one, and ship it, or have the log never say that it was. Returns its seq."""
        self.ships_checkpoints = shipped
        self.order(self.engine._next_checkpoint_entry())
        seq = self.seq
        self.drain()
        self.engine.wait_for_checkpoint(seq)
        self.ship()
        if shipped:
            shipper = CheckpointShipper(self.engine, self.store)
            while shipper.advance() is not None:
                self.drain()
            assert self.engine.catalogue.checkpoint_seq == seq
            self.drain()
        return seq

    # ------------------------------------------------------------------ anything

    def value(self) -> bytes:
        size = self.random.choice((0, 3, 10, 32, 33, 100, 1000, 3000))
        return self.random.randbytes(4)[: min(4, size)] + bytes(max(0, size - 4))

    def key(self) -> str:
        number = self.random.randrange(80)
        return f"k{number}" if number % 10 else f"{'ü' * 260}{number}"

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.time_us += self.random.randrange(3) * 500_000
            self._step()

    def _data(self, txn: int = 0, session: Any = None) -> Any:
        draw = self.random
        common = {"txn": txn, "time_us": self.time_us, "session": session}
        bucket = draw.choice(BUCKETS)
        what = draw.random()
        if what < 0.6:
            metadata = {"n": str(draw.randrange(5)), "é": "x"} if draw.random() < 0.3 else None
            return Put(bucket, self.key(), self.value(), metadata, if_absent=draw.random() < 0.05, **common)
        if what < 0.8:
            return Delete(bucket, self.key(), **common)
        return Copy(bucket, self.key(), draw.choice(BUCKETS), self.key(), **common)

    def _step(self) -> None:
        draw, what = self.random, self.random.random()
        txn = draw.choice(self.open) if self.open and draw.random() < 0.7 else 0
        if what < 0.5:
            outcome = self.order(self._data(txn))
            if txn and outcome.refused is None:
                self.saves[txn].append(self.seq)
        elif what < 0.6:
            self.order(Write([self._data() for _ in range(draw.randrange(1, 6))]))
        elif what < 0.7 and len(self.open) < 6:
            if self.order(Begin(time_us=self.time_us)).refused is None:
                self.open.append(self.seq)
                self.saves[self.seq] = [self.seq]
        elif what < 0.78 and txn:
            self.order(Commit(txn, time_us=self.time_us))
            self.open.remove(txn)
            if draw.random() < 0.2:
                self.order(Commit(txn, time_us=self.time_us))
        elif what < 0.8 and txn:
            self.order(Abort(txn, time_us=self.time_us))
            self.open.remove(txn)
        elif what < 0.86 and txn:
            outcome = self.order(Abort(txn, savepoint_seq=draw.choice(self.saves[txn]), time_us=self.time_us))
            if outcome.refused is None:
                self.saves[txn].append(self.seq)
        elif what < 0.92:
            bucket = draw.choice(BUCKETS)
            self.order(
                CreateBucket(bucket, time_us=self.time_us)
                if draw.random() < 0.7
                else DeleteBucket(bucket, time_us=self.time_us)
            )
        elif what < 0.93:
            for bucket in BUCKETS[:1]:
                for found in list(self.engine.scan(bucket)) if bucket in self.engine.buckets() else []:
                    self.order(Delete(bucket, found.key, time_us=self.time_us))
                self.order(DeleteBucket(bucket, time_us=self.time_us))
        elif what < 0.98:
            self._session_step()
        else:
            self.order(Control(Kind.NOOP, time_us=self.time_us))

    def _session_step(self) -> None:
        draw = self.random
        if not self.sessions or draw.random() < 0.1:
            self.order(Control(Kind.SESSION_OPEN, {"ttl_us": 10**12}, time_us=self.time_us))
            self.sessions.append([self.seq, 0])
            return
        session = draw.choice(self.sessions)
        if draw.random() < 0.05:
            self.order(Control(Kind.SESSION_CLOSE, {"session": session[0]}, time_us=self.time_us))
            self.sessions.remove(session)
            return
        session[1] += draw.random() < 0.8
        number = max(1, session[1])
        self.order(self._data(session=(session[0], number, max(0, number - draw.randrange(1, 5)))))

    # ------------------------------------------------------------------ what it says

    def state(self, seq: int) -> list[tuple[Any, ...]]:
        """All objects as of a seq, in order."""
        found = []
        for bucket in BUCKETS:
            try:
                found += [tuple(each) for each in self.engine.scan(bucket, at=seq)]
            except Exception as error:
                if type(error).__name__ != "NotFound":
                    raise
        return sorted(found, key=lambda each: each[:2])

    def close(self) -> None:
        self.engine.close()


def random_archive(folder: Path, seed: int, steps: int = 400) -> Fed:
    """One with three checkpoints or so, in the middle of everything."""
    fed = Fed(folder, seed)
    for bucket in BUCKETS:
        fed.order(CreateBucket(bucket))
    for number in range(3):
        fed.step(steps // 4)
        fed.checkpoint(shipped=fed.random.random() < 0.8 or number == 1)
    fed.step(steps // 4)
    fed.ship()
    return fed
