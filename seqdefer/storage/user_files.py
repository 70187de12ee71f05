"""Files that users bring: plain or gzip, read within size limits, with errors that name the file and the line.

    content = read_bytes(Path("map.tsp.gz"), SizeLimit("map.tsp.gz", 16, "give fewer cities"))
    for number, line in read_lines(Path("news.jsonl.gz"), kind="JSONL"):
        record = parse_record(line, f"news.jsonl.gz, line {number}")

The content decides whether a file is gzip, not its name. Limits count unpacked bytes and apply while unpacking, so a
small file that unpacks to gigabytes ends in a DataError. They are chosen so that what is parsed stays within about a
gigabyte of memory; SEQDEFER_MAX_DATA_MIB and SEQDEFER_MAX_LINE_MIB set others. Parsers of tasks build on this module.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from seqdefer.errors import DataError, FormatError, OptionError

DATA_VARIABLE, LINE_VARIABLE = "SEQDEFER_MAX_DATA_MIB", "SEQDEFER_MAX_LINE_MIB"
MAX_LINE_MIB = 16
MAX_TEXT_MIB = 1024  # all lines together; XSum has 500
MAX_QUOTED, MAX_NAMES = 40, 10  # letters of a text and names of a list, in messages
_MIB = 2**20
_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".gz", ".zip", ".txt", ".csv")
_TABLES = {".csv": "read_csv", ".tsv": "read_table", ".parquet": "read_parquet", ".xlsx": "read_excel"}  # of pandas
_READ_ERRORS = (OSError, EOFError, ValueError, zlib.error)  # ValueError: a null byte in the path


def looks_like_file(path: Path) -> bool:
    """Whether a name that may also be a dataset's stands for a file: it exists, or is written like one."""
    # os.path.exists: unlike Path.exists, it does not raise on bad paths, which fail when they are opened
    is_path = path.is_absolute() or str(path).startswith((".", "~")) or path.suffix.lower() in _FILE_SUFFIXES
    return is_path or "\0" in str(path) or os.path.exists(path)


class SizeLimit:
    """Counts unpacked bytes of one file, or of several that are read together."""

    def __init__(self, name: str, max_mib: int, advice: str) -> None:
        self.max_mib, self.n_bytes = _set_limit(DATA_VARIABLE, max_mib), 0
        self._max_bytes = self.max_mib * _MIB
        self._name, self._advice = name, f"{advice}, or allow more with {DATA_VARIABLE}=N"

    @property
    def most(self) -> int:
        """Bytes to read in order to see whether there are too many."""
        return self._max_bytes - self.n_bytes + 1

    def count(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        if self.n_bytes > self._max_bytes:
            check_size(self.n_bytes, self.max_mib, self._name, self._advice)


def _set_limit(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    if not value:
        return default
    if not (value.isdecimal() and int(value)):
        raise OptionError(f"{variable} is {value!r:.40}; it must be a number of MiB, 1 or more")
    return int(value)


def check_size(n_bytes: int, max_mib: int, name: str, advice: str) -> None:
    if n_bytes > max_mib * _MIB:
        raise DataError(f"{name} is larger than {max_mib} MiB; {advice}")


def read_bytes(path: Path, limit: SizeLimit) -> bytes:
    """Return the content of a file, unpacked if it is gzip."""
    try:
        with path.open("rb") as file:
            content: bytes = _unpack(file, path.name).read(limit.most)
    except _READ_ERRORS as error:
        raise DataError(f"cannot read {path}: {_reason(error)}") from error
    limit.count(len(content))
    return content


def read_lines(path: Path, *, kind: str, max_mib: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 text that are not blank, stripped, with their numbers; read each when it is needed.

    `kind` says in errors what to give instead, such as "a JSONL file". `max_mib` limits all lines together.
    """
    suffix = path.with_suffix("").suffix if path.suffix.lower() == ".gz" else path.suffix
    if (reader := _TABLES.get(suffix.lower())) is not None:
        converted = f"pandas.{reader}({str(path)!r}).to_json('FILE.jsonl', orient='records', lines=True)"
        raise FormatError(
            f"{path.name} is a table, which is not read; give {kind}, plain or gzip: {converted} converts it, and fit "
            "in Python takes the DataFrame itself"
        )
    limit = SizeLimit(path.name, MAX_TEXT_MIB if max_mib is None else max_mib, "give fewer lines")
    is_empty = True
    for number, raw in _raw_lines(path, limit, f"; give {kind}, plain or gzip"):
        if line := _decode(raw, f"{path.name}, line {number}").strip():
            is_empty = False
            yield number, line
    if is_empty:
        raise DataError(f"{path.name} is empty; give {kind}, plain or gzip")


def read_rows(path: Path, limit: SizeLimit) -> Iterator[str]:
    """Yield the lines of a text with their ends, in UTF-8 or else latin-1; read each when it is needed."""
    return decode_rows(raw for _, raw in _raw_lines(path, limit))


def decode_rows(raws: Iterable[bytes]) -> Iterator[str]:
    """Decode lines, each in UTF-8 or else latin-1."""
    for raw in raws:
        try:
            line = raw.decode().removeprefix("\ufeff")  # four times as fast as utf-8-sig
        except UnicodeDecodeError:
            line = raw.decode("latin-1")
        # Lines of old systems end with a carriage return alone.
        yield from io.StringIO(line, newline="") if "\r" in line[:-2] else (line,)


def _raw_lines(path: Path, limit: SizeLimit, advice: str = "") -> Iterator[tuple[int, bytes]]:
    number, max_line_mib = 0, _set_limit(LINE_VARIABLE, MAX_LINE_MIB)
    most = max_line_mib * _MIB
    try:
        with path.open("rb") as file:
            readline = _unpack(file, path.name).readline
            while raw := readline(most + 1):
                number += 1
                if len(raw) > most:
                    shorter = f"give shorter lines, or allow longer ones with {LINE_VARIABLE}=N"
                    check_size(len(raw), max_line_mib, f"{path.name}, line {number},", shorter)
                limit.count(len(raw))
                yield number, raw
    except _READ_ERRORS as error:
        after = f" after line {number}" if number else ""
        raise DataError(f"cannot read {path}{after}: {_reason(error)}{advice}") from error


def _unpack(file: io.BufferedReader, name: str) -> io.BufferedReader | gzip.GzipFile:
    unpacked = gzip.GzipFile(fileobj=file) if file.peek(2).startswith(b"\x1f\x8b") else file
    if unpacked.peek(4).startswith(b"PK\x03\x04"):
        raise DataError(f"{name} is a zip archive: unpack it and give the file inside")
    return unpacked


def _reason(error: Exception) -> object:
    return getattr(error, "strerror", None) or error


def _decode(raw: bytes, place: str) -> str:
    try:
        return raw.decode("utf-8-sig")  # some editors begin a file with a byte-order mark
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 (byte {raw[error.start]:#04x}); save the file as UTF-8") from error


# --- JSON lines ------------------------------------------------------------------------------------------------------

_JSON_KINDS = {
    type(None): "null",
    bool: "true or false",
    str: "a text",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def parse_inputs(lines: Iterable[tuple[int, str]], path: Path, field: str) -> list[Any]:
    """Return the inputs on lines of `path`: a field of JSON objects (*.jsonl, *.ndjson), else the lines themselves."""
    return [parse_input(line, path, number, field) for number, line in lines]


def parse_input(line: str, path: Path, number: int, field: str) -> Any:
    """Return the input on one line of `path`."""
    if not {".jsonl", ".ndjson"} & {*path.suffixes}:
        return line
    place = f"{path.name}, line {number}"
    return get_field(parse_record(line, place), field, place, "choose one with --field")


def parse_record(line: str, place: str) -> dict[str, Any]:
    """Return the JSON object on a line. `place` names the line in errors."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise DataError(f"{place}: not JSON ({reason}); write one object a line, not {quote(line)}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: {json_kind(record)}, not a JSON object; write one object a line, not {quote(line)}")
    return record


def get_field(record: Mapping[str, Any], field: str, place: str, advice: str) -> Any:
    if field not in record:
        raise DataError(f"{place}: there is no {quote(field)}; the fields are: {join_quoted(record)}; {advice}")
    return record[field]


def check_text(value: object, field: str, place: str) -> str:
    """Return the value of a field that must be a text."""
    if not isinstance(value, str):
        raise DataError(f"{place}: {quote(field)} is {json_kind(value)}, not a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        bad = f"\\u{ord(value[error.start]):04x}"
        raise DataError(f"{place}: {quote(field)} holds {bad}, which is not a character; remove it") from error
    return value


def check_filled(value: object, field: str, place: str) -> str:
    """Return the value of a field that must be a text with more than white space."""
    text = check_text(value, field, place)
    if not text.strip():
        raise DataError(f"{place}: {quote(field)} is empty; fill it in, or remove the line")
    return text


def check_id(value: object, number: int, place: str) -> str:
    """Return the id of a record as a text; a record without one gets its number."""
    if value is None:
        return str(number)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{place}: the id is {json_kind(value)}; it must be a text or a whole number")
    return str(value)


def json_kind(value: object) -> str:
    """Return what JSON calls the type of a value."""
    if isinstance(value, float) and value != value:
        return "missing (nan)"  # as pandas has it
    return _JSON_KINDS.get(type(value), type(value).__name__)


# --- messages --------------------------------------------------------------------------------------------------------


def quote(text: str) -> str:
    """Return a text of a file for a message: shortened, with line ends and escape sequences spelt out."""
    return repr(text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 1]}…")


def join_quoted(names: Iterable[str]) -> str:
    """Return names of a file, quoted, for a message."""
    return join_some(quote(str(name)) for name in names) or "none"  # columns of a DataFrame may be numbers


def join_some(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are, for a message."""
    all_names = list(names)
    more = f" and {len(all_names) - MAX_NAMES} more" if len(all_names) > MAX_NAMES else ""
    return ", ".join(all_names[:MAX_NAMES]) + more
