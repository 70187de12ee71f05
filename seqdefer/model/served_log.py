"""The log of what was served: a line of JSON for each input that was written to its end, with numbers and no texts.

    log = ServedLog(Path("served.jsonl"), max_mib=64)
    log.write(row)                                     # on disk, as far as the system is concerned, when this returns
    rows, n_skipped = read_served(Path("served.jsonl"), rejector="5f2c...")

FILE, and FILE.1 with the lines before it, have at most `max_mib` together. A process that is killed loses no line but
the one that it was writing; what is left of that is skipped.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from seqdefer.budgets.served import ServedInput
from seqdefer.errors import DataError, InputError, OptionError
from seqdefer.storage.records import from_plain, to_plain

MIB = 1024**2

log = logging.getLogger("seqdefer.server")


class ServedLog:
    """Appends to a file, which is rotated when it is half of `max_mib`."""

    def __init__(self, path: Path, max_mib: int) -> None:
        if max_mib < 1:
            raise OptionError(f"--served-log-mib is {max_mib}; it must be at least 1")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file() and not _ends_with_line(path):
                with path.open("a") as file:  # after a process that was killed
                    file.write("\n")
            self._handler = _Rotating(path, maxBytes=max_mib * MIB // 2, backupCount=1, encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            reason = getattr(error, "strerror", None) or error
            raise OptionError(f"cannot write {path}: {reason}; choose another file with --served-log") from error
        self._handler.setFormatter(logging.Formatter("%(message)s"))

    def write(self, row: ServedInput) -> None:
        """Append a line, and hand it to the system. A full disk is logged, and fails no request."""
        self._handler.emit(logging.makeLogRecord({"msg": json.dumps(to_plain(row), separators=(",", ":"))}))

    def close(self) -> None:
        with suppress(OSError):  # a full disk, which was logged when the line was written
            self._handler.close()


class _Rotating(RotatingFileHandler):
    """A handler whose own failures are logged in one line."""

    def handleError(self, record: logging.LogRecord) -> None:
        log.error("cannot write the log of what is served to %s: %s", self.baseFilename, sys.exc_info()[1])


def read_served(path: Path, rejector: str, *, most: int) -> tuple[list[ServedInput], int]:
    """Read the newest inputs that were served with a rejector, oldest first, and count the lines that are not whole."""
    rows, n_skipped, n_others = deque[ServedInput](maxlen=most), 0, 0
    if not path.is_file():
        raise InputError(f"there is no log {path}; it is written by: seqdefer serve DIR --served-log {path}")
    for file in (path.with_name(f"{path.name}.1"), path):
        for number, line in _lines(file):
            try:
                plain = json.loads(line)
            except (ValueError, RecursionError):
                n_skipped += 1
                continue
            try:
                row = from_plain(ServedInput, plain)
            except DataError as error:
                raise DataError(f"{file}, line {number} is not of a log of seqdefer serve: {error}") from error
            n_others += row.rejector != rejector
            if row.rejector == rejector:
                rows.append(row)
    if len(rows) < 2:
        others = f", and {n_others} that another rejector decided" if n_others else ""
        raise InputError(f"{path} has {len(rows)} inputs of this model{others}; at least 2 are needed")
    return list(rows), n_skipped


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers; none of a file that is missing."""
    if file.is_file():
        with file.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _ends_with_line(path: Path) -> bool:
    """Whether a file ends with a whole line, or is empty."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")
