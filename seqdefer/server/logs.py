"""Logs on stderr, as lines for people or as JSON: time, level, message, and the ID of the request.

    with logs_on_stderr("json", "info"):
        serve(...)

One line of the logger `seqdefer.access` describes each request. Inputs and outputs are never logged; the message of an
unexpected exception is, as it was raised.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from seqdefer.errors import one_line

LEVELS = ("debug", "info", "warning", "error")
PROBES = ("/live", "/ready", "/health", "/metrics")  # logged at level debug where all is well
PATH_LETTERS = 200
LATE_WRITE = "socket.send() raised exception."  # asyncio's message where a client leaves while a turn is written

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)  # of the request that this task works for
access = logging.getLogger("seqdefer.access")


def log_access(scope: Mapping[str, Any], status: int, seconds: float, key: str | None = None) -> None:
    """Log one request. The path is as the client encoded it, so it cannot forge a line, and without its query."""
    path = scope["raw_path"].decode("latin-1")[:PATH_LETTERS]
    client = scope.get("client") or ("-", 0)
    fields = {"method": scope["method"][:20], "path": path, "status": status, "ms": round(1000 * seconds, 1)}
    fields |= {"client": client[0]} | ({} if key is None else {"key": key})
    level = logging.DEBUG if scope["path"] in PROBES and status < 400 else logging.INFO
    access.log(level, "%s %s %d", fields["method"], path, status, extra={"fields": fields})


@contextmanager
def logs_on_stderr(form: str, level: str) -> Iterator[None]:
    """Write the logs of this package from `level` on, and warnings of others, until the block ends."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATS[form]())
    handler.addFilter(lambda record: record.msg != LATE_WRITE)
    root, own = logging.getLogger(), logging.getLogger("seqdefer")
    before = own.level
    root.addHandler(handler)
    own.setLevel(level.upper())
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        own.setLevel(before)
        root.removeHandler(handler)


class HumanFormatter(logging.Formatter):
    """`2026-11-18T06:02:44.123Z INFO GET /v1/models 200 ms=0.4 client=127.0.0.1 id=5f2c...`"""

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in _fields(record).items() if name not in ("method", "path", "status")}
        words = [_time(record), record.levelname, one_line(record.getMessage())]
        line = " ".join([*words, *(f"{name}={value}" for name, value in fields.items())])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JSONFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, then what is known about the request, then a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        head = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        entry = {**head, "message": record.getMessage(), **_fields(record)}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


FORMATS: dict[str, type[logging.Formatter]] = {"human": HumanFormatter, "json": JSONFormatter}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found = request_id.get()
    return {**getattr(record, "fields", {}), **({} if found is None else {"request_id": found})}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
