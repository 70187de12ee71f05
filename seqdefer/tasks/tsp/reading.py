"""Files of cities: TSPLIB (.tsp) and CSV, plain or gzip.

    data = read_cities("berlin52.tsp")
    data.instances[0].cities  # float64 (52, 2)

An invalid file raises a DataError that names the file and the line.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seqdefer.errors import DataError
from seqdefer.storage.user_files import SizeLimit, join_quoted, quote, read_bytes

Reals = NDArray[np.float64]

MIN_CITIES = 4  # all tours of three cities are equal
MAX_COORDINATE = 1e100  # squares must not overflow
MAX_FILE_MIB = 16  # unpacked, all files together: about 400,000 cities


@dataclass(frozen=True)
class Instance:
    """The cities of one instance in a file."""

    label: str  # its name in messages
    cities: Reals  # (N, 2)
    lines: Sequence[int]  # (N,) line of each city


@dataclass(frozen=True)
class CityData:
    """The instances in a file or a folder."""

    name: str
    instances: Sequence[Instance]


def read_cities(path: Path | str) -> CityData:
    """Read a file or a folder. All coordinates are finite, and every instance has enough cities.

    TSPLIB  a file with TYPE: TSP and EDGE_WEIGHT_TYPE: EUC_2D is one instance, its cities ordered by number
    folder  its TSPLIB files (*.tsp, *.tsp.gz), sorted by name
    CSV     one city per row. Two columns, x and y, are one instance; with a header, a column `instance` separates
            instances, and other columns are ignored. Delimiters are commas, semicolons, tabs or spaces; lines that
            begin with # are comments
    Files may be gzip, whatever their names."""
    if not str(path):
        raise DataError("--data is empty; give a TSPLIB or CSV file, or a folder of TSPLIB files")
    path = Path(path)
    # os.path.isdir does not raise: an unreadable path is reported when it is opened
    source = _read_folder(path) if os.path.isdir(path) else CityData(path.name, _read_file(path, _limit(path.name)))
    for instance in source.instances:
        if len(instance.cities) < MIN_CITIES:
            raise DataError(
                f"{instance.label}: {count_cities(len(instance.cities))}; a tour needs at least {MIN_CITIES}"
            )
    return source


def _read_folder(folder: Path) -> CityData:
    name = folder.resolve().name or str(folder)
    try:
        paths = sorted(path for path in folder.iterdir() if _is_tsplib_name(path.name) and path.is_file())
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error.strerror}") from error
    if not paths:
        raise DataError(f"the folder {folder} has no TSPLIB files (*.tsp or *.tsp.gz)")
    limit = _limit(str(folder))
    return CityData(name, [instance for path in paths for instance in _read_file(path, limit)])


def _limit(name: str) -> SizeLimit:
    return SizeLimit(name, MAX_FILE_MIB, "give fewer cities, or fewer instances")


def _is_tsplib_name(name: str) -> bool:
    return name.lower().removesuffix(".gz").endswith(".tsp") and not name.startswith(".")  # such as macOS's ._x.tsp


def _read_file(path: Path, limit: SizeLimit) -> list[Instance]:
    name = path.name
    lines = list(io.StringIO(_decode(read_bytes(path, limit), name), newline=None))
    if not any(line.strip() for line in lines):
        raise DataError(f"{name} is empty; give a TSPLIB or CSV file of coordinates")
    if _is_tsplib_name(name) or any(_KEYWORD.fullmatch(line.strip()) for line in lines[:50]):
        return [_parse_tsplib([line.strip() for line in lines], name)]
    return _parse_csv(lines, name)


def _decode(content: bytes, name: str) -> str:
    if b"\x00" in content:
        raise DataError(f"{name} is not a text file; give a TSPLIB or CSV file (UTF-8)")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:  # old files have comments in latin-1
        return content.decode("latin-1")


# --- numbers and words -----------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE)


def _coordinate(cell: str, name: str, line: int) -> float:
    """Parse a coordinate. Stricter than `float`, which accepts 1_000 and digits of other scripts."""
    if not _NUMBER.fullmatch(cell):
        what = "is not finite" if _NOT_FINITE.fullmatch(cell) else "is not a number"
        raise DataError(f"{name}, line {line}: the coordinate {quote(cell)} {what}")
    value = float(cell)
    if abs(value) > MAX_COORDINATE:
        raise DataError(f"{name}, line {line}: the coordinate {quote(cell)} is beyond ±{MAX_COORDINATE:g}")
    return value


def count_cities(n_cities: int) -> str:
    return "1 city" if n_cities == 1 else f"{n_cities} cities"


# --- TSPLIB ----------------------------------------------------------------------------------------------------------

_COORDINATES = "NODE_COORD_SECTION"
_KEYWORD = re.compile(r"(NAME|TYPE|COMMENT|DIMENSION|EDGE_WEIGHT_TYPE)\s*:.*|[A-Z_]+_SECTION\s*:?")
_HEADER = re.compile(r"(?P<key>[A-Za-z][A-Za-z_0-9]*)\s*(:\s*(?P<value>.*))?")
# The values supported: a symmetric problem in the plane.
_SUPPORTED = {"TYPE": "TSP", "EDGE_WEIGHT_TYPE": "EUC_2D", "NODE_COORD_TYPE": "TWOD_COORDS"}
_REQUIRED = ("TYPE", "DIMENSION", "EDGE_WEIGHT_TYPE")


def _parse_tsplib(lines: Sequence[str], name: str) -> Instance:
    header: dict[str, str] = {}
    cities: dict[int, tuple[float, float, int]] = {}  # by number: x, y, line
    in_coordinates = False
    for number, line in enumerate(lines, start=1):
        if line.upper() == "EOF":
            break
        if in_coordinates and line[:1] and not line[0].isalpha() and line[0] != "#":
            _add_city(cities, line, name, number)
        elif line and not line.startswith("#"):
            key, value = _header_line(line, name, number)
            in_coordinates = key == _COORDINATES
            header[key] = value
    _check_header(header, name)
    dimension = header["DIMENSION"]
    if dimension != str(len(cities)):
        raise DataError(
            f"{name}: DIMENSION is {quote(dimension)}, but the {_COORDINATES} has {count_cities(len(cities))};"
            " the file is truncated, or its header is wrong"
        )
    ordered = [cities[number] for number in sorted(cities)]
    return Instance(name, np.array([(x, y) for x, y, _ in ordered]), [line for _, _, line in ordered])


def _header_line(line: str, name: str, number: int) -> tuple[str, str]:
    """Parse a keyword and its value; refuse unsupported ones."""
    found = _HEADER.fullmatch(line)
    if found is None:
        raise DataError(f"{name}, line {number}: cannot read {quote(line)}; write 'KEYWORD : value' or 'number x y'")
    key, value = found["key"].upper(), (found["value"] or "").strip()
    if key.endswith("_SECTION") and key != _COORDINATES:
        raise DataError(f"{name}, line {number}: {quote(key)} is not supported; only {_COORDINATES} is")
    if not key.endswith("_SECTION") and found["value"] is None:
        raise DataError(f"{name}, line {number}: cannot read {quote(line)}; write 'KEYWORD : value' or 'number x y'")
    word = (value.split() or [""])[0]  # some files add the author
    if key in _SUPPORTED and word.upper() != _SUPPORTED[key]:
        raise DataError(
            f"{name}, line {number}: {key} is {quote(word)}; supported is {_SUPPORTED[key]}: a symmetric problem with"
            " Euclidean distances in the plane"
        )
    return key, value


def _add_city(cities: dict[int, tuple[float, float, int]], line: str, name: str, number: int) -> None:
    cells = line.split()
    if len(cells) != 3:
        raise DataError(f"{name}, line {number}: expected a number, x and y, not {quote(line)}")
    if not re.fullmatch(r"[+-]?\d{1,18}", cells[0], re.ASCII):
        raise DataError(f"{name}, line {number}: the city's number is {quote(cells[0])}, not a whole number")
    index = int(cells[0])
    if index in cities:
        raise DataError(f"{name}, line {number}: city {index} is already on line {cities[index][2]}")
    cities[index] = (_coordinate(cells[1], name, number), _coordinate(cells[2], name, number), number)


def _check_header(header: Mapping[str, str], name: str) -> None:
    missing = [key for key in (*_REQUIRED, _COORDINATES) if key not in header]
    if missing:
        raise DataError(f"{name} has no {' and no '.join(missing)}; give a complete TSPLIB file")


# --- CSV -------------------------------------------------------------------------------------------------------------


def _parse_csv(lines: Sequence[str], name: str) -> list[Instance]:
    """Parse instances: rows with the same value in the column `instance`, in any order, or all rows without one."""
    rows = _csv_rows(lines, name)
    head = next(rows, None)
    if head is None:
        raise DataError(f"{name} has only comments; give rows of x and y")
    columns = _columns(head[1], name)
    groups: dict[str, tuple[list[tuple[float, float]], list[int]]] = {}  # cities, lines
    for number, row in rows if columns.has_header else chain([head], rows):
        cells = [row[place] if place < len(row) else "" for place in columns.places]
        if "" in cells:
            raise DataError(f"{name}, line {number}: a cell is empty or missing; the row is {join_quoted(row)}")
        cities, at = groups.setdefault(cells[0] if columns.has_instance else "", ([], []))
        cities.append((_coordinate(cells[-2], name, number), _coordinate(cells[-1], name, number)))
        at.append(number)
    if not groups:
        raise DataError(f"{name} has a header and no rows; give rows of x and y")
    return [
        Instance(f"{name}, instance {quote(key)}" if columns.has_instance else name, np.array(cities), at)
        for key, (cities, at) in groups.items()
    ]


def _csv_rows(lines: Sequence[str], name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not empty, with their line numbers."""
    plain = ["" if line.startswith("#") else line for line in lines]
    head = next((line for line in plain if line.strip()), "")
    delimiter = next((mark for mark in ";\t," if mark in head), " ")
    if delimiter == " ":  # several count as one
        plain = [" ".join(line.split()) for line in plain]
    reader = csv.reader(plain, delimiter=delimiter, skipinitialspace=True)
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):  # with semicolons, a comma is the decimal point
                yield reader.line_num, [cell.replace(",", ".") for cell in cells] if delimiter == ";" else cells
    except csv.Error as error:
        raise DataError(f"{name}, line {reader.line_num}: not a CSV file ({error})") from error


@dataclass(frozen=True)
class _Columns:
    places: Sequence[int]  # of the instance, if any, of x and of y
    has_header: bool
    has_instance: bool


def _columns(first: Sequence[str], name: str) -> _Columns:
    if all(_NUMBER.fullmatch(cell) or _NOT_FINITE.fullmatch(cell) for cell in first):
        if len(first) != 2:
            raise DataError(f"{name} has {len(first)} columns and no header; begin with a line such as 'instance,x,y'")
        return _Columns((0, 1), has_header=False, has_instance=False)
    folded = [cell.casefold() for cell in first]
    has_instance = "instance" in folded
    wanted = ("instance", "x", "y") if has_instance else ("x", "y")
    if not set(wanted) <= set(folded):
        raise DataError(f"{name} has no columns 'x' and 'y'; its first line is {join_quoted(first)}")
    return _Columns([folded.index(column) for column in wanted], has_header=True, has_instance=has_instance)
