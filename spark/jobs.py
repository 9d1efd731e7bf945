"""Work that is done in Spark's executors item by item, and whose results the driver wants.

Always true:
  - results come in the order of their items, and each item's once, however often Spark has tried;
  - what is wrong with the data or the store comes back as the error that it is, with its fields: Spark does
    not try it again, and wraps it into nothing;
  - whoever waits can be interrupted: the tasks are cancelled then.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait  # noqa: TID251 — the caller waits for it
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lowwater import errors
from lowwater.errors import LowwaterError
from lowwater.spark.tasks import HINT_MARK, is_remote, run_tasks

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")

Progress = Callable[[str, int, int], None]
"""Called with what is done, and how many of how many tasks are."""

POLL_S = 0.2
TASK_BYTES = 128 * 2**20
# Smaller tasks cost more than they do.
TASK_BYTES_MIN = 2**22

_groups = count(1)


def grouped(items: Sequence[T], bytes_of: Callable[[T], int], tasks_min: int) -> list[list[T]]:
    """Items that follow one another, about as many bytes in each group: at most TASK_BYTES where an item is
    not larger, and less where fewer than `tasks_min` groups would come out."""
    total = sum(map(bytes_of, items))
    limit = max(TASK_BYTES_MIN, min(TASK_BYTES, -(-total // tasks_min)))
    groups: list[list[T]] = []
    room = 0
    for item in items:
        size = bytes_of(item)
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= size
    return groups


def run_job(
    spark: SparkSession,
    work: Callable[[T], R],
    items: Sequence[T],
    *,
    what: str,
    progress: Progress | None = None,
) -> list[R]:
    """`work(item)` of each, in a task of its own. Both have to be picklable."""
    if not items:
        return []
    tell = progress or (lambda _what, _done, _total: None)
    tell(what, 0, len(items))
    guarded = partial(_guarded, work)
    if is_remote(spark):
        results = waited_for(spark, partial(_collect_remotely, spark, guarded, items), what, len(items), tell)
    else:
        results = waited_for(spark, partial(_collect, spark, guarded, items), what, len(items), tell)
    for result in results:
        if isinstance(result, _Failed):
            raise result.error
    tell(what, len(items), len(items))
    return results


class _Failed(NamedTuple):
    error: LowwaterError


def _guarded(work: Callable[[Any], Any], item: Any) -> Any:
    try:
        return work(item)
    except LowwaterError as error:
        return _Failed(error)


def _collect(spark: SparkSession, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    # Each task gets its own items, where `run_tasks` sends all of them to each: here they may be many.
    found: list[Any] = spark.sparkContext.parallelize(items, len(items)).map(work).collect()
    return found


def _collect_remotely(spark: SparkSession, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    numbered = list(enumerate(items))
    rows = run_tasks(spark, numbered, partial(_packed, work), "number bigint, result binary").collect()
    # By whom they were pickled is known: by the tasks that were just started.
    return [pickle.loads(row["result"]) for row in sorted(rows, key=lambda row: row["number"])]


def _packed(work: Callable[[Any], Any], item: tuple[int, Any]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    number, what = item
    result = pickle.dumps(work(what))
    yield pa.record_batch({"number": pa.array([number]), "result": pa.array([result], pa.binary())})


def waited_for(spark: SparkSession, collect: Callable[[], R], what: str, tasks: int, progress: Progress) -> R:
    """What `collect` returns, which is an action of Spark. It is called in a thread, so that this one can
    tell how far it is, and be interrupted."""
    group = f"lowwater-{next(_groups)}"

    def collect_in_group() -> R:
        # It belongs to the thread in which it is set.
        if is_remote(spark):
            spark.addTag(group)
        else:
            spark.sparkContext.setJobGroup(group, f"lowwater: {what}", interruptOnCancel=True)
        return collect()

    pool = ThreadPoolExecutor(1, thread_name_prefix="lowwater-spark")
    with errors_of_tasks(what):
        try:
            future: Future[R] = pool.submit(collect_in_group)
            while not wait([future], POLL_S).done:
                if not is_remote(spark):
                    progress(what, min(tasks, sum(_done(spark, group))), tasks)
            return future.result()
        except BaseException:
            if is_remote(spark):
                spark.interruptTag(group)
            else:
                spark.sparkContext.cancelJobGroup(group)
            raise
        finally:
            pool.shutdown(wait=False)


def _done(spark: SparkSession, group: str) -> Iterator[int]:
    """The tasks that are done of each stage."""
    tracker = spark.sparkContext.statusTracker()
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        for stage in info.stageIds if info is not None else ():
            found = tracker.getStageInfo(stage)
            if found is not None:
                yield found.numCompletedTasks


def _jvm_is_gone(error: Exception) -> bool:
    # Stores raise errors of ours, so it is the JVM that a connection was to.
    if isinstance(error, ConnectionError) or type(error).__name__ == "Py4JNetworkError":
        return True
    # A call that was answered with nothing: what Java has raised would come with a trace.
    return type(error).__name__ == "Py4JError" and "Trace:" not in str(error)


_RAISED = re.compile(rf"lowwater\.errors\.(\w+): (.*)(?:\n{HINT_MARK}(.*))?")


@contextmanager
def errors_of_tasks(what: str) -> Iterator[None]:
    """Around what has Spark do something: what a task has raised is raised here as the error that it was."""
    try:
        yield
    except Exception as error:
        if _jvm_is_gone(error):
            raise LowwaterError(
                f"Spark has ended in the middle of {what}",
                hint="its JVM was killed: where memory ran out, use fewer cores or less of it",
            ) from error
        if type(error).__module__.split(".")[0] not in ("py4j", "pyspark"):
            raise
        raise given_up(error, what) from error


def given_up(error: BaseException, what: str) -> LowwaterError:
    """The error for work that Spark has given up: ours, where a task has raised one, of which Spark keeps
    nothing but the text."""
    raised = _RAISED.findall(str(error))
    if raised:
        # Python tells what an error came from before the error itself.
        name, message, hint = raised[-1]
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, LowwaterError):
            return _as_raised(kind, message.strip(), hint.strip() or None)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if "Exception" in line or "Error" in line] or lines
    reason = (reasons or [type(error).__name__])[-1]
    hint = "its log has the rest; where workers run out of memory, give them more, or fewer cores"
    if "No module named 'lowwater" in reason:
        hint = "have PYSPARK_PYTHON name a Python, on every machine, that has `lowwater[spark]`"
    return LowwaterError(f"Spark has given up {what}: {reason:.300}", hint=hint)


_PLACED = re.compile(r"(.*) \((?:path (.*?))?(?:(?:, )?seq (\d+))?(?:(?:, )?offset (\d+))?\)")


def _as_raised(kind: type[LowwaterError], text: str, hint: str | None) -> LowwaterError:
    """An error from its text, with the fields that it had."""
    placed = _PLACED.fullmatch(text)
    if placed is None:
        return kind(text, hint=hint)
    message, path, seq, offset = placed.groups()
    return kind(
        message,
        path=path,
        seq=None if seq is None else int(seq),
        offset=None if offset is None else int(offset),
        hint=hint,
    )
