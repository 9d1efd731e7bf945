"""Errors of tasks, of which Spark hands on nothing but the text."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError

from lowwater.errors import Corrupt, LowwaterError, NotFound
from lowwater.spark.jobs import errors_of_tasks, given_up
from lowwater.spark.tasks import hinted


def told(error: BaseException) -> Exception:
    """As a worker tells it."""
    text = "".join(traceback.format_exception(error))
    return RuntimeError(
        f"Job aborted: An exception was thrown from the Python worker:\n{text}\n\tat java.lang"
    )


def test_what_a_task_has_raised_is_raised_and_not_what_it_came_from() -> None:
    """An object that has to be there and is not is damage, and ends a command with another code."""
    try:
        try:
            raise NotFound("there is no such object")
        except NotFound as missing:
            raise Corrupt("the object is not in the store", path="file:///a/wal/x.log") from missing
    except Corrupt as error:
        found = given_up(told(error), "rows")
    assert type(found) is Corrupt
    assert (found.message, found.path) == ("the object is not in the store", "file:///a/wal/x.log")


def test_what_is_no_error_of_ours_says_what_spark_says() -> None:
    """And where Python has no Lowwater, what to do about it."""
    found = given_up(told(ModuleNotFoundError("No module named 'lowwater'")), "rows")
    assert type(found) is LowwaterError
    assert found.message == "Spark has given up rows: ModuleNotFoundError: No module named 'lowwater'"
    assert "PYSPARK_PYTHON" in found.hint
    assert "memory" in given_up(told(MemoryError("no room")), "rows").hint


def test_what_to_do_about_it_comes_too() -> None:
    """In a task it is a note, since an error has only its text on the way."""
    try:
        with hinted():
            raise Corrupt("a block is damaged", path="x.log", hint="run `lowwater scrub`")
    except Corrupt as error:
        found = given_up(told(error), "rows")
    assert (found.message, found.path) == ("a block is damaged", "x.log")
    assert found.hint == "run `lowwater scrub`"


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("two (and more) are wrong", {}),
        ("one is wrong", {"path": "s3://b/a (copy)/x, seq.log", "seq": 3, "offset": 0}),
        ("one is wrong", {"seq": 2**63}),
        ("one is wrong", {"offset": 7}),
        ("one (of them) is wrong", {"path": "x", "offset": 7}),
    ],
)
def test_an_error_has_its_fields_again(message: str, where: dict[str, Any]) -> None:
    """Who asks for JSON gets them one by one."""
    raised = Corrupt(message, **where)
    found = given_up(told(raised), "rows")
    assert found.as_dict() == raised.as_dict()
    assert str(found) == str(raised)


def test_a_jvm_that_has_ended_is_one_error() -> None:
    """Whatever was asked of it first, and while that was given up."""
    for lost in (Py4JNetworkError("Answer from Java side is empty"), ConnectionRefusedError(111, "refused")):
        with (
            pytest.raises(LowwaterError, match="Spark has ended in the middle of rows"),
            errors_of_tasks("rows"),
        ):
            raise lost
    with pytest.raises(ZeroDivisionError), errors_of_tasks("rows"):
        raise ZeroDivisionError
