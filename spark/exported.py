"""A folder, or a place in a store, that rows were exported to: what is in it, and how far a run has come.

    bucket=photos/0000000001-00000.parquet     rows; the folder is that of a partition, where there are any
    _lowwater/0000000001.plan.json             what the first run exports, task by task
    _lowwater/0000000001/00000.json            the files of a task that is done
    _lowwater/0000000001.json                  the files of the run: it counts from here on
    _SUCCESS                                   no run is under way

Always true:
  - a run counts when its manifest is there, and with it all of its files: there is no half;
  - a run that was killed is finished by the next call, from its plan, with the tasks that were not done;
  - of what counts nothing is ever written again;
  - runs follow one another in one log, without a gap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lowwater.errors import Corrupt, InvalidConfig, NewerVersion, NotFound
from lowwater.spark.parquet_files import ParquetFile
from lowwater.spark.plan import open_own, store_place
from lowwater.tiering.store import Store, at

DIRECTORY = "_lowwater/"
SUCCESS = "_SUCCESS"
VERSION = 1


class Run(NamedTuple):
    """A run that counts."""

    number: int
    wanted: dict[str, Any]
    """What was exported, in the words of the call: it may not be mixed with anything else."""
    cluster_id: str
    seq_first: int
    seq_last: int
    segment: str
    """The hash of the segment with the last entry: what goes on from another one is another log."""
    rows: int
    files: list[ParquetFile]


class ExportPlan(NamedTuple):
    """A run that does not count yet."""

    number: int
    wanted: dict[str, Any]
    cluster_id: str
    seq_first: int
    seq_last: int
    segment: str
    parts: list[list[list[int]]]
    """The pieces of each task: first seq of the segment, first frame, frame to stop before."""


class Target:
    """Where rows are exported to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.uri = store.uri
        names = [found.name for found in store.list(DIRECTORY)]
        if not names:
            stranger = next((found.name for found in store.list() if not found.name.startswith(".")), None)
            if stranger is not None:
                raise InvalidConfig(
                    "something else is here, and no export",
                    path=at(store.uri, stranger),
                    hint="give an export a folder of its own",
                )
        numbers = {_number(name) for name in names}
        self._numbers = sorted(number for number in numbers if number and _manifest(number) in names)
        self.last = self._run(self._numbers[-1]) if self._numbers else None
        self.next_number = 1 if self.last is None else self.last.number + 1
        self._is_planned = _planned(self.next_number) in names

    # ------------------------------------------------------------------ reading

    def _json(self, name: str) -> dict[str, Any]:
        try:
            document = json.loads(self._store.read(name))
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Corrupt(
                "what was noted of this export cannot be read",
                path=at(self.uri, name),
                hint="export into another folder",
            )
        if document.get("version") != VERSION:
            raise NewerVersion("this export was made by a newer Lowwater", path=at(self.uri, name))
        del document["version"]
        found: dict[str, Any] = document
        return found

    def runs(self) -> Iterator[Run]:
        """All that count, in order."""
        return map(self._run, self._numbers)

    def _run(self, number: int) -> Run:
        document = self._json(_manifest(number))
        files = [ParquetFile(**file) for file in document.pop("files")]
        return Run(**document, files=files)

    def plan(self) -> ExportPlan | None:
        """What a run that was stopped had begun to do."""
        return ExportPlan(**self._json(_planned(self.next_number))) if self._is_planned else None

    def done(self) -> dict[int, list[ParquetFile]]:
        """The tasks of that run that are done, with their files."""
        prefix = _receipts(self.next_number)
        return {
            int(found.name.removeprefix(prefix).removesuffix(".json")): [
                ParquetFile(**file) for file in self._json(found.name)["files"]
            ]
            for found in self._store.list(prefix)
        }

    # ------------------------------------------------------------------ writing

    def begin(self, plan: ExportPlan) -> ExportPlan:
        """Note what this run does. Where somebody else was faster, theirs counts."""
        self._store.delete(SUCCESS)
        if not self._write(_planned(plan.number), plan._asdict()):
            self._is_planned = True
            other = self.plan()
            assert other is not None
            return other
        return plan

    def publish(self, run: Run) -> Run:
        """Make a run count. Return the one that does: this one, or that of another call which was faster."""
        document = run._asdict()
        document["files"] = [file._asdict() for file in run.files]
        if not self._write(_manifest(run.number), document):
            run = self._run(run.number)
        self._remove_leftovers(run)
        self.tidy(run.number)
        return run

    def clean(self) -> None:
        """Remove what a call has left that was stopped when its run counted, if only by another call."""
        if self.last is not None:
            self._remove_leftovers(self.last)

    def tidy(self, run: int) -> None:
        """Say that no run is under way, and remove what this one, which counts, needs no more."""
        for found in list(self._store.list(_receipts(run))):
            self._store.delete(found.name)
        self._store.write(SUCCESS, [b""], size=0)

    def _remove_leftovers(self, run: Run) -> None:
        """The files of attempts that came to nothing: all that the run, which counts, does not name. Tasks of
        the log leave none: theirs have one name, whoever writes them."""
        if run.wanted["what"] == "log":
            return
        wanted = {file.name for file in run.files}
        for found in list(self._store.list()):
            if found.name.rpartition("/")[2].startswith(f"{run.number:010}-") and found.name not in wanted:
                self._store.delete(found.name)

    def _write(self, name: str, document: Mapping[str, Any]) -> bool:
        data = json.dumps({"version": VERSION, **document}).encode()
        return bool(self._store.write(name, [data], size=len(data)))


def note_done(store: Store, run: int, task: int, files: list[ParquetFile]) -> None:
    """What a task leaves when its files are there."""
    document = {"version": VERSION, "files": [file._asdict() for file in files]}
    data = json.dumps(document).encode()
    store.write(f"{_receipts(run)}{task:05}.json", [data], size=len(data))


def stem(run: int, task: int, attempt: str = "") -> str:
    """What the files of a task are called."""
    return f"{run:010}-{task:05}{attempt}"


def _manifest(number: int) -> str:
    return f"{DIRECTORY}{number:010}.json"


def _planned(number: int) -> str:
    return f"{DIRECTORY}{number:010}.plan.json"


def _receipts(number: int) -> str:
    return f"{DIRECTORY}{number:010}/"


def _number(name: str) -> int:
    digits = name.removeprefix(DIRECTORY)[:10]
    return int(digits) if digits.isdecimal() else 0


def exported_files(to: str, options: Mapping[str, str] | None = None) -> list[str]:
    """Return the Parquet files that count, below `to`: all of each run that was finished, and no others."""
    return [file.name for run in runs_in(to, options) for file in run.files]


def runs_in(to: str, options: Mapping[str, str] | None = None) -> list[Run]:
    store = open_own(store_place(to, options))
    try:
        runs = list(Target(store).runs())
    finally:
        store.close()
    if not runs:
        raise NotFound("nothing was exported to here yet", path=to, hint="`export_parquet` does")
    return runs
