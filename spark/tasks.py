"""Functions that run in tasks: each is given one item, and yields record batches.

Always true:
  - one item is one task, in the order given, and comes to it pickled: nothing that has to do with it stands
    in the session's configuration, in a plan that is printed, or in an event log;
  - pandas is not needed.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from lowwater.errors import LowwaterError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")

# Of a remote session it is not known.
CORES_UNKNOWN = 8
HINT_MARK = "hint: "


@contextmanager
def hinted() -> Generator[None, None, None]:
    """Errors cross to the JVM as text: what to do has to be in it."""
    try:
        yield
    except LowwaterError as error:
        note = f"{HINT_MARK}{error.hint}"
        if error.hint and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


@cache
def settle() -> None:
    """At the beginning of a worker's first task, where all that it needs is imported. Spark collects garbage
    after each task, by looking at all objects there are: tens of milliseconds for those of the modules, which
    live as long as the worker."""
    gc.freeze()


def is_remote(spark: SparkSession) -> bool:
    """Whether this is a session of Spark Connect, which has no context, no RDDs, and no status."""
    return ".connect." in type(spark).__module__


def cores_of(spark: SparkSession) -> int:
    """How many tasks run at the same time, as far as it is known."""
    return CORES_UNKNOWN if is_remote(spark) else int(spark.sparkContext.defaultParallelism)


def run_tasks(
    spark: SparkSession, items: Sequence[T], function: Callable[[T], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """What `function` yields for each item. It has to be a function of a module."""
    packed = [pickle.dumps(item, pickle.HIGHEST_PROTOCOL) for item in items]

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle()
        with hinted():
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from function(pickle.loads(packed[number]))

    return map_batches(spark.range(0, len(items), 1, max(1, len(items))), run, schema)


def map_batches(frame: DataFrame, function: Any, schema: str) -> DataFrame:
    """`frame.mapInArrow`, which asks for pandas on the driver without a need for it."""
    from pyspark.sql.classic.dataframe import DataFrame as ClassicFrame

    if not isinstance(frame, ClassicFrame):
        return frame.mapInArrow(function, schema)
    from pyspark.sql.udf import UserDefinedFunction
    from pyspark.util import PythonEvalType

    mapped = UserDefinedFunction(function, schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column = mapped(*[frame[name] for name in frame.columns])
    made = frame._jdf.mapInArrow(column._jc, False, None)
    return ClassicFrame(made, frame.sparkSession)
