"""Writes the golden checkpoints: a few of one small log, and beside them what a reader must make of them.

Always true: what stands in `expected.json` is what was asked for, never what a reader of ours made of the
bytes; the root comes from the state. Nothing here asks for time or chance: running it again changes no file.

Run it as `python tests/golden_checkpoints/make.py` after a deliberate change of the format, and look at the
difference: whoever has checkpoints of the released format has these.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

from lowwater.chaos.clock import SeededRandomness, VirtualClock
from lowwater.chaos.runner import StepRunner
from lowwater.engine.database.core import EngineOptions
from lowwater.engine.database.engine import FedEngine
from lowwater.engine.format.entries import Control, Copy, CreateBucket, Delete, Put, Write
from lowwater.engine.format.format import Kind
from lowwater.engine.log.chain import Create, checkpoint_entry
from lowwater.engine.log.log import LogOptions, Seams
from lowwater.engine.pages.memory_pages import MemoryPages
from lowwater.engine.seams.memory import MemoryFiles
from lowwater.engine.state.decide import Refusal

HERE = Path(__file__).parent
DIRECTORIES = ("checkpoints", "packs")
CLUSTER_ID = bytes(range(0x10, 0x20))
SALT = bytes(range(0x80, 0x90))
TIME_US = 1_700_000_000_000_000
LARGE = bytes(range(256)) * 2
LONG = "long/" + "x" * 500

ENTRIES: list[tuple[int, Any]] = [
    (1, Create(CLUSTER_ID, SALT, {"page_keys": 4})),
    (2, CreateBucket("photos", time_us=TIME_US)),
    (3, CreateBucket("ü", time_us=TIME_US + 1)),
    *((10 + n, Put("photos", f"{n:03}.jpg", b"%d" % n, time_us=TIME_US + n)) for n in range(40)),
    (60, Put("photos", "large.bin", LARGE, {"type": "binary"}, time_us=TIME_US + 60)),
    (61, Copy("photos", "large.bin", "ü", "copy")),
    (62, Put("ü", "named", b"", {"b": "2", "a": "ü"})),
    (63, Put("ü", LONG + "1", b"1")),
    (64, Put("ü", LONG + "2", b"2")),
    (65, Control(Kind.SESSION_OPEN, {"ttl_us": 1_000}, time_us=TIME_US + 65)),
    (66, Control(Kind.SESSION_OPEN, {"ttl_us": 2_000})),
    (67, Put("ü", "once", b"1", session=(66, 2))),
    (68, Put("ü", "once", b"2", session=(66, 1))),
    (69, Put("ü", "once", b"3", if_absent=True, session=(65, 4))),
    (70, checkpoint_entry(0)),
    (71, Delete("photos", "007.jpg", session=(66, 3, 1))),
    (73, Write([Put("photos", "008.jpg", b"new"), Put("photos", "zz", b"")])),
    (74, Control(Kind.PIN, {"name": "kept", "seq": 73})),
    (80, checkpoint_entry(70)),
    (81, Delete("photos", "008.jpg")),
    (82, checkpoint_entry(80, full=True)),
]
# What has no effect on keys, and is a result of its session all the same.
REFUSED = {69: Refusal.CONDITION_FAILED}


def made() -> tuple[dict[str, bytes], Any]:
    """The files by their names, and what is expected of them."""
    files, clock = MemoryFiles(), VirtualClock()
    files.make_directory("data")
    engine = FedEngine(
        "data",
        log_options=LogOptions(),
        options=EngineOptions(checkpoint_interval_s=None),
        store=MemoryPages(),
        seams=Seams(files=files, clock=clock, randomness=SeededRandomness(0), runner=StepRunner(clock)),
    )
    found: dict[str, bytes] = {}
    expected: dict[str, Any] = {}
    state = State()
    for seq, entry in ENTRIES:
        refused = engine.apply_log_entry(seq, entry).refused
        assert refused is REFUSED.get(seq)
        state.apply(seq, entry)
        if not isinstance(entry, Control) or entry.kind != Kind.CHECKPOINT:
            continue
        name = f"checkpoint-{engine.wait_for_checkpoint(seq)}.ckpt"
        expected[name] = {"root": engine.root(seq), **state.expected(seq)}
        for directory in DIRECTORIES:
            for each in files.list(f"data/{directory}"):
                file = files.open(f"data/{directory}/{each}")
                found[f"{directory}/{each}"] = file.read_at(0, file.size())
                file.close()
    engine.close()
    return found, expected


class State:
    """What the entries make of buckets and keys, in the plainest way."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], tuple[int, int, bytes, dict[str, str]]] = {}
        self.snapshots: dict[str, int] = {}
        # By id: seq, time, time to live, up to where it is acknowledged, and (seq, code) by number.
        self.sessions: dict[int, tuple[list[int], dict[int, tuple[int, int]]]] = {}
        self.time_us = 0

    def apply(self, seq: int, entry: Any) -> None:
        if isinstance(entry, Write):
            for each in entry.entries:
                self.apply(seq, each)
            return
        self.time_us = max(self.time_us, entry.time_us)
        if getattr(entry, "session", None) is not None:
            self._request(seq, *entry.session)
        if seq in REFUSED:
            return
        if isinstance(entry, CreateBucket):
            self.rows["", entry.bucket] = seq, self.time_us, b"", {}
        elif isinstance(entry, Put):
            self.rows[entry.bucket, entry.key] = seq, self.time_us, entry.value, dict(entry.metadata or {})
        elif isinstance(entry, Copy):
            found = self.rows[entry.bucket, entry.key]
            self.rows[entry.to_bucket, entry.to_key] = seq, self.time_us, *found[2:]
        elif isinstance(entry, Delete):
            del self.rows[entry.bucket, entry.key]
        elif isinstance(entry, Control) and entry.kind == Kind.PIN:
            assert entry.body is not None
            self.snapshots[entry.body["name"]] = entry.body["seq"]
        elif isinstance(entry, Control) and entry.kind == Kind.SESSION_OPEN:
            assert entry.body is not None
            self.sessions[seq] = [seq, self.time_us, entry.body["ttl_us"], 0], {}

    def _request(self, seq: int, session: int, number: int, acknowledged: int = 0) -> None:
        row, results = self.sessions[session]
        row[0], row[1], row[3] = seq, self.time_us, max(row[3], acknowledged)
        results[number] = seq, int(REFUSED.get(seq, 0))
        for each in [each for each in results if each <= row[3]]:
            del results[each]

    def _sessions(self) -> list[list[Any]]:
        found: list[list[Any]] = []
        for session, (row, results) in sorted(self.sessions.items()):
            numbers = sorted(results)
            seqs, codes = ([results[each][column] for each in numbers] for column in (0, 1))
            found.append([session, *row, numbers, seqs, codes])
        return found

    def expected(self, seq: int) -> dict[str, Any]:
        rows = []
        for (bucket, key), (version, time_us, value, metadata) in sorted(
            self.rows.items(), key=lambda row: (len(row[0][0].encode()), row[0])
        ):
            row = {"bucket": bucket, "key": key, "seq": version, "time_us": time_us, "metadata": metadata}
            if len(value) > 256:
                row |= {"value_bytes": len(value), "value_hash": blake3(value).hexdigest()}
            else:
                row |= {"value": value.hex()}
            rows.append(row)
        return {
            "seq": seq,
            "time_us": self.time_us,
            "control": {
                "horizon": None,
                "snapshots": dict(self.snapshots),
                "expires_us": {},
                "per_key_max": None,
                "exact_from": 0,
                "sessions": self._sessions(),
            },
            "rows": rows,
        }


def main() -> None:
    found, expected = made()
    for directory in DIRECTORIES:
        (HERE / directory).mkdir(exist_ok=True)
        for path in (HERE / directory).iterdir():
            if f"{directory}/{path.name}" not in found:
                path.unlink()
    for name, data in found.items():
        (HERE / name).write_bytes(data)
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
