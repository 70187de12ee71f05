"""Frozen dataclasses as JSON files, and back, with every field checked against its type.

    write_json(path, to_plain(record))
    record = read_record(Kind, path)

A number that is not finite never gets in or out, so that a file that exists can be parsed by any JSON reader.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from seqdefer.errors import DataError, InputError

FORMAT = 1
MAX_NUMBER = 1e100  # no result comes near, and squares of what is below still fit a float
MAX_DEPTH = 20  # of untyped settings
Record = TypeVar("Record")


def read_record(kind: type[Record], file: Path) -> Record:
    """Read a record from a JSON file, and check the type of every field."""
    return name_file(file, partial(from_plain, kind), read_plain(file))


def read_plain(file: Path) -> Any:
    """Read strict JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise DataError(f"{file} is nested too deeply") from error


def name_file(file: Path, decode: Callable[[Any], Record], value: Any) -> Record:
    """Decode a value; errors name the file."""
    try:
        return decode(value)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error


def _refuse_constant(name: str) -> float:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is not a number")


# --- records to plain values -----------------------------------------------------------------------------------------


def to_plain(record: Any) -> dict[str, Any]:
    """Return a frozen dataclass as plain dicts, lists, strings and finite numbers, with the format number."""
    return {"format": FORMAT, **_plain(record, "")}


def _plain(value: Any, where: str) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name), _join(where, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, _join(where, str(key))) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    if value is None or isinstance(value, str | bool):
        return value
    return _plain_number(value, where)


def _plain_number(value: Any, where: str) -> int | float:
    """Accept numpy scalars too: they register with `numbers`."""
    if isinstance(value, numbers.Integral):
        return int(_sane(int(value), where))
    if not isinstance(value, numbers.Real):
        raise DataError(f"field {_place(where)} is a {type(value).__name__}, which JSON cannot hold")
    return _sane(float(value), where)


# --- plain values to records -----------------------------------------------------------------------------------------


def from_plain(kind: type[Record], value: Any) -> Record:
    """Return the record that `to_plain` was given."""
    found = value.get("format", "absent") if isinstance(value, dict) else "absent"
    if found != FORMAT:
        raise DataError(f"field 'format' is {_shown(found)}; this version of seqdefer reads format {FORMAT}")
    decoded: Record = _decode(kind, value, "")
    return decoded


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Decode `value` as the annotated type `kind`: a record, a container, or a scalar."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return _decode_any(value, where, MAX_DEPTH)
    if is_dataclass(kind):
        return _decode_record(kind, value, where)
    if origin is Mapping:
        items = _expect(dict, "an object", value, where).items()
        return {key: _decode(arguments[1], inner, _join(where, key)) for key, inner in items}
    if origin is tuple:
        return _decode_tuple(arguments, value, where)
    if origin is Literal:
        return _decode_choice(arguments, value, where)
    if type(None) in arguments:  # X | None
        return None if value is None else _decode(arguments[0], value, where)
    return _decode_scalar(kind, value, where)


def _decode_any(value: Any, where: str, levels: int) -> Any:
    if isinstance(value, dict | list) and levels == 0:
        raise DataError(f"field {_place(where)} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        return {key: _decode_any(inner, _join(where, key), levels - 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_decode_any(inner, f"{where}[{index}]", levels - 1) for index, inner in enumerate(value)]
    return value if value is None or isinstance(value, str) else _sane(value, where)


def _decode_record(kind: Any, value: Any, where: str) -> Any:
    record = _expect(dict, "an object", value, where)
    hints = _hints(kind)
    arguments = {}
    for item in fields(kind):
        if item.name in record:
            arguments[item.name] = _decode(hints[item.name], record[item.name], _join(where, item.name))
        elif item.default is MISSING and item.default_factory is MISSING:
            raise DataError(f"field {_place(_join(where, item.name))} is missing")
    return kind(**arguments)


def _decode_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    items = _expect(list, "a list", value, where)
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(items)
    if len(items) != len(arguments):
        raise DataError(f"field {_place(where)} must have {len(arguments)} values, not {len(items)}")
    pairs = zip(arguments, items, strict=True)
    return tuple(_decode(kind, item, f"{where}[{index}]") for index, (kind, item) in enumerate(pairs))


def _decode_choice(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value not in choices:
        raise DataError(f"field {_place(where)} is {_shown(value)}; available: {', '.join(choices)}")
    return value


def _decode_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is str:
        return _expect(str, "a string", value, where)
    if kind is bool:
        return _expect(bool, "true or false", value, where)
    if isinstance(value, bool):  # a bool is an int to Python, and a mistake here
        raise DataError(f"field {_place(where)} must be a number, not {value!r}")
    if kind is int:
        return _sane(_expect(int, "a whole number", value, where), where)
    return float(_sane(_expect((int, float), "a number", value, where), where))


def _expect(kind: Any, words: str, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise DataError(f"field {_place(where or 'results')} must be {words}, not {_shown(value)}")
    return value


def _sane(value: float, where: str) -> float:
    if not abs(value) < MAX_NUMBER:  # NaN included
        raise DataError(
            f"field {_place(where)} is {_shown(value)}; every number must be finite and below {MAX_NUMBER:g}"
        )
    return value


def _shown(value: Any) -> str:
    """Return a value for a message, however large or deep it is."""
    if value and isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value)[:40]


def _place(where: str) -> str:
    """Return a field for a message: its name may hold anything, and its end tells most."""
    return repr(where if len(where) <= 200 else f"…{where[-199:]}")


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
