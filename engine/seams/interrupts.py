"""Interrupts: what a signal handler raises in the main thread, in the middle of anything, or somebody in any
thread; and calls that a handler makes while the same thread is inside the engine.

Always true:
  - what is compiled is not interrupted: an interrupt comes when it returns, and may take its result away.
    Python looks for signals where a function begins, a loop goes back, or a call has returned, and nowhere
    else: statements without a call between them are not interrupted either;
  - an interrupt is no failure: nothing is known to be wrong, and whoever is interrupted mends what it has
    left, or leaves it such that the next one can go on with it;
  - where nothing is raised, all that it costs is a look at who has a lock, and a thread for what is done once
    in a while.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable, Container
from types import CodeType, FrameType
from typing import ParamSpec, TypeVar

from lowwater.errors import Busy, LowwaterError

P = ParamSpec("P")
T = TypeVar("T")

# Who is interrupted so often while it mends is not interrupted, it fails.
TRIES_MAX = 100
# What a file system says of a call that it does not know, and that is made in another way then.
_HARMLESS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EINTR)

# Whose locks a handler may meet.
_OURS = ("lowwater.engine.", "lowwater.tiering.", "lowwater.recovery.")


def to_the_end(step: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call what may be repeated until it has come to its end, and raise then the last interrupt that came."""
    interrupt: BaseException | None = None
    for _ in range(TRIES_MAX):
        try:
            step(*args, **kwargs)
        except BaseException as error:
            if not is_interrupt(error):
                raise
            interrupt = error
        else:
            break
    if interrupt is not None:
        raise interrupt


def is_interrupt(error: BaseException) -> bool:
    """Whether this was raised into the code from outside, and no failure of this package's was under way."""
    if isinstance(error, Exception) and not is_of_handler(error):
        return False
    seen = {id(error)}
    context = error.__context__
    while context is not None and id(context) not in seen:
        seen.add(id(context))
        if isinstance(context, Exception) and _was_caught_here(context) and not is_of_handler(context):
            return isinstance(context, OSError) and context.errno in _HARMLESS
        context = context.__context__
    return True


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler has raised it, or what this package has made this error of."""
    traceback = error.__traceback__
    while traceback is not None:
        if _is_handler(traceback.tb_frame):
            return True
        traceback = traceback.tb_next
    return isinstance(error, LowwaterError) and error.__cause__ is not None and is_of_handler(error.__cause__)


def _is_handler(frame: FrameType) -> bool:
    """Whether this is a signal handler: it is given the frame that it has interrupted, which calls it."""
    caller = frame.f_back
    if caller is None:
        return False
    for given in frame.f_locals.values():
        if given is caller or (type(given) is tuple and any(each is caller for each in given)):
            return True
    return False


def _was_caught_here(error: Exception) -> bool:
    """Whether it is this package that was dealing with it: a caller may be in the middle of another one."""
    traceback = error.__traceback__
    name = "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__", ""))
    return name.startswith("lowwater.")


def count_below(codes: Container[CodeType], end: CodeType) -> int:
    """How many calls of these functions this thread is inside, above one of `end`."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not end:
        count += frame.f_code in codes
        frame = frame.f_back
    return count


def is_in_handler() -> bool:
    """Whether a signal handler calls, which has interrupted this package in the middle of something."""
    if threading.get_ident() != threading.main_thread().ident:
        return False
    frame: FrameType | None = sys._getframe(1)
    handles = False
    while frame is not None:
        if handles and str(frame.f_globals.get("__name__", "")).startswith(_OURS):
            return True
        handles = handles or _is_handler(frame)
        frame = frame.f_back
    return False


def busy(path: str) -> Busy:
    """For a call that would wait for the very thread that makes it."""
    return Busy(
        "this thread is inside another call, which a signal handler has interrupted",
        path=path,
        hint="have the handler set a flag, or raise, and make the call after that; close() can be called",
    )
