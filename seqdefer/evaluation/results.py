"""The typed record of a run, and its round trip through `results.json`.

    results = load_results("runs/weather")
    results.summary["TokenwiseModel"].improvement_mean

Nothing here is measured: `curves.py` does that. `summarise` only averages what the seeds already hold. A number that is
not finite never gets in or out, so that a file that exists can be drawn, compared and parsed by any JSON reader.
"""

from __future__ import annotations

import json
import numbers
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from seqdefer.errors import DataError, InputError
from seqdefer.storage.files import write_json

FORMAT = 1
FILE_NAME = "results.json"
LARGEST = 1e100  # of a number: no result comes near, and squares of what is below still fit a float
DEEPEST = 20  # levels of a setting

# `types.Granularity` and the references; spelled out, because importing `types` would import torch to draw a line.
Block = Literal["whole", "once", "token", "reference"]
Point = tuple[float, float]  # mean number of deferred tokens per sequence, mean loss
Record = TypeVar("Record")


@dataclass(frozen=True)
class MethodResult:
    """One method on one seed. `improvement` is in % of the AUDC of Random."""

    granularity: Block
    audc: float
    improvement: float
    curve: tuple[Point, ...]


@dataclass(frozen=True)
class SeedResult:
    seed: int
    methods: Mapping[str, MethodResult]


@dataclass(frozen=True)
class Summary:
    """One method over the seeds: mean and sample standard deviation."""

    granularity: Block
    audc_mean: float
    audc_std: float
    improvement_mean: float
    improvement_std: float


@dataclass(frozen=True)
class Comparison:
    """`method` minus `against` in points of % improvement, with its paired 95 % bootstrap interval."""

    method: str
    against: str
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class PaperFigure:
    """What the paper prints for a method; None where it prints nothing."""

    audc: float | None
    audc_std: float | None
    improvement: float
    improvement_std: float | None


@dataclass(frozen=True)
class Units:
    loss: str = "loss"
    deferred: str = "tokens per sequence"


@dataclass(frozen=True)
class ExpertCalls:
    made: int = 0
    saved: int = 0


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from: enough to run it again, and to see whether it was the same data and models."""

    version: str = ""
    command: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    expert_calls: ExpertCalls = field(default_factory=ExpertCalls)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """Everything a run leaves in `results.json`; `length` is L, the longest sequence of the task."""

    task: str
    preset: str
    length: int
    seeds: tuple[SeedResult, ...]
    summary: Mapping[str, Summary]
    comparisons: tuple[Comparison, ...] = ()
    paper: Mapping[str, PaperFigure] = field(default_factory=dict)
    units: Units = field(default_factory=Units)
    notes: tuple[str, ...] = ()
    provenance: Provenance = field(default_factory=Provenance)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and finite numbers; a `DataError` names the first value that is none of these."""
        return to_plain(self)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The reverse of `to_json`; a `DataError` names the first field that is missing or wrong."""
        decoded: Self = from_plain(cls, value)
        if decoded.length < 1:
            raise DataError(f"field 'length' is {decoded.length}; it must be at least 1")
        return decoded


def summarise(seeds: Sequence[SeedResult]) -> dict[str, Summary]:
    """Mean and sample standard deviation (0 for one seed) of each method, over the seeds that ran it."""
    rows: dict[str, list[MethodResult]] = {}
    for seed in seeds:
        for name, result in seed.methods.items():
            rows.setdefault(name, []).append(result)
    return {name: _summarise_method(results) for name, results in rows.items()}


def _summarise_method(results: Sequence[MethodResult]) -> Summary:
    audc = mean_and_std([result.audc for result in results])
    return Summary(results[0].granularity, *audc, *mean_and_std([result.improvement for result in results]))


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def save_results(results: Results, directory: Path | str) -> Path:
    return write_json(Path(directory) / FILE_NAME, results.to_json())


def load_results(path: Path | str) -> Results:
    """Reads a run's directory, or its `results.json` itself."""
    file = _find_file(Path(path))
    return _told_of(file, Results.from_json, _read_plain(file))


def read_record(kind: type[Record], file: Path) -> Record:
    """The record in a JSON file, every field of the type it should be."""
    return _told_of(file, partial(from_plain, kind), _read_plain(file))


def _read_plain(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise DataError(f"{file} is nested too deeply to be the results of a run") from error


def _told_of(file: Path, decode: Callable[[Any], Record], value: Any) -> Record:
    """Errors of `decode` name the file."""
    try:
        return decode(value)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error


def _find_file(path: Path) -> Path:
    if not path.exists():
        raise InputError(f"{path} does not exist; give the directory that 'seqdefer run TASK --out DIR' wrote")
    file = path / FILE_NAME if path.is_dir() else path
    if not file.exists():
        raise InputError(f"{path} holds no {FILE_NAME}; make it with: seqdefer run TASK --out {path}")
    return file


def _refuse_constant(name: str) -> float:
    """Python's reader takes NaN and Infinity, which are not JSON."""
    raise ValueError(f"{name} is not a number")


# --- records to plain values -----------------------------------------------------------------------------------------


def to_plain(record: Any) -> dict[str, Any]:
    """A frozen dataclass as plain dicts, lists, strings and finite numbers, with the number of the format."""
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
    """Takes numpy's scalars too: they register with `numbers`."""
    if isinstance(value, numbers.Integral):
        return int(_sane(int(value), where))
    if not isinstance(value, numbers.Real):
        raise DataError(f"field {_place(where)} is a {type(value).__name__}, which JSON cannot hold")
    return _sane(float(value), where)


# --- plain values to records -----------------------------------------------------------------------------------------


def from_plain(kind: type[Record], value: Any) -> Record:
    """The reverse of `to_plain`."""
    found = value.get("format", "absent") if isinstance(value, dict) else "absent"
    if found != FORMAT:
        raise DataError(f"field 'format' is {_shown(found)}; this version of seqdefer reads format {FORMAT}")
    decoded: Record = _decode(kind, value, "")
    return decoded


def _decode(kind: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type `kind`: a record, a container of what follows, or a scalar."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return _decode_any(value, where, DEEPEST)
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
        raise DataError(f"field {_place(where)} is nested more than {DEEPEST} levels deep")
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
    if not abs(value) < LARGEST:  # nor is NaN
        raise DataError(f"field {_place(where)} is {_shown(value)}; every number must be finite and below {LARGEST:g}")
    return value


def _shown(value: Any) -> str:
    """A value for a message, however large or deep what the file holds."""
    if value and isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value)[:40]


def _place(where: str) -> str:
    """A field for a message: its name may hold anything, and its end tells most."""
    return repr(where if len(where) <= 200 else f"…{where[-199:]}")


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
