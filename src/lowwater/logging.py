"""Structured logging: an event and its fields.

Always true: the library says nothing below WARNING until somebody asks, and never touches the logging of the
program that it is embedded in. Its loggers are the standard library's, all below `lowwater`, so that program
sees and tunes them as it does any other. Only the command line calls `configure`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from structlog.stdlib import BoundLogger, ProcessorFormatter
from structlog.typing import EventDict, WrappedLogger

ROOT = "lowwater"
LEVELS = ("debug", "info", "warning", "error")

_as_text = structlog.processors.LogfmtRenderer(key_order=["event"], drop_missing=True)


class LogEvent(dict[str, Any]):
    """An event that reads well where the host program's own handlers print it."""

    def __str__(self) -> str:
        fields = dict(self)
        event = fields.pop("event")
        return f"{event} {_as_text(None, '', fields)}" if fields else str(event)


def _readable(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return LogEvent(event)


def get_logger(name: str) -> BoundLogger:
    """The logger `lowwater.<name>`: `get_logger("wal").info("rotated", segment=path, bytes=size)`."""
    logger: BoundLogger = structlog.wrap_logger(
        logging.getLogger(f"{ROOT}.{name}"),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            _readable,
            ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=BoundLogger,
    )
    return logger


def configure(level: str, *, json: bool) -> None:
    """Send events to standard error, as lines for people or as JSON. For the command line alone."""
    renderer = structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=False)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        ProcessorFormatter(
            processors=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                ProcessorFormatter.remove_processors_meta,
                renderer,
            ]
        )
    )
    logger = logging.getLogger(ROOT)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
