"""Temperature records every 10 minutes: reading, windows, and splits without leaks.

A record is a CSV file, plain or gzip, with a column of times and one of degrees Celsius. A window is `n_in`
observations and the `n_out` that follow; no window crosses a gap. Parts of a split share no time stamp:

    series = read_series(Path("jena_2020.csv.gz"))
    splits = split_windows(make_windows(series), how="weeks", seed=0)
    splits.train.inputs, splits.train.targets  # float32 (n, 12), (n, 6)
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from seqdefer.errors import DataError, OptionError, unknown
from seqdefer.storage.files import fingerprint
from seqdefer.storage.user_files import SizeLimit, decode_rows, join_quoted, quote, read_rows
from seqdefer.tasks.common.proportions import divide_by_remainder

Minutes = NDArray[np.int64]
Reals = NDArray[np.float64]
SplitMethod = Literal["weeks", "chronological"]

MAX_FILE_MIB = 128  # unpacked; the eight years of Jena have 41
ROWS_AT_ONCE = 2**16  # that are texts in memory
MAX_CELL = 64  # characters of a time or a number
STEP = 10  # minutes
WEEK = 7 * 24 * 60  # minutes
BLOCK_WEEKS = 20  # weeks are assigned to parts within blocks, so that every part sees every season
SPLIT_PERCENT = {"predictor": 35, "train": 35, "validation": 10, "test": 20}

TIME_COLUMNS = ("Date Time", "date", "Timestamp", "datetime", "time")
TEMPERATURE_COLUMNS = ("T (degC)", "T2m", "temperature", "temp", "air_temperature", "T")
# No weather station has measured values outside: they are codes for "missing" (-9999), or not in Celsius.
MIN_CELSIUS, MAX_CELSIUS = -100.0, 100.0

_DAY_FIRST = re.compile(r"\d\d\.\d\d\.\d{4} \d\d:\d\d(:\d\d)?", re.ASCII)
_YEAR_FIRST = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?", re.ASCII)


@dataclass(frozen=True)
class Cleaning:
    """Counts of the rows that reading dropped, for provenance."""

    rows: int  # in the file, without header and empty lines
    missing: int  # dropped: not a number, or out of range
    duplicates: int  # dropped: the time stamp occurred before
    between: int  # dropped: off the 10-minute grid of a denser record
    gaps: int  # places where the next observation is not 10 minutes later


@dataclass(frozen=True)
class Series:
    """A cleaned temperature record."""

    minutes: Minutes  # (n,) since 1970-01-01 00:00, the record's local time, strictly increasing
    celsius: Reals  # (n,)
    name: str
    fingerprint: str  # of minutes and temperatures, whatever the layout of the file
    cleaning: Cleaning

    def __len__(self) -> int:
        return len(self.minutes)


@dataclass(frozen=True)
class Windows:
    """Observations and the targets that follow them."""

    inputs: NDArray[np.float32]  # (n, n_in)
    targets: NDArray[np.float32]  # (n, n_out)
    minutes: Minutes  # (n,) time of the last observation

    def __len__(self) -> int:
        return len(self.minutes)

    @property
    def first_minutes(self) -> Minutes:
        """Return the time of the first observation. (n,)"""
        return np.asarray(self.minutes - STEP * (self.inputs.shape[1] - 1))

    @property
    def last_minutes(self) -> Minutes:
        """Return the time of the last target. (n,)"""
        return np.asarray(self.minutes + STEP * self.targets.shape[1])

    def select(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Windows:
        """Return the windows at `rows`: indices, or a mask (n,)."""
        return Windows(self.inputs[rows], self.targets[rows], self.minutes[rows])

    def spread(self, n: int) -> Windows:
        """Return at most `n` windows, evenly spread over these."""
        return self if len(self) <= n else self.select(np.arange(n) * len(self) // n)


@dataclass(frozen=True)
class WeatherSplits:
    """Four parts that share no time stamp. The predictor is fitted on `predictor`, rejectors on `train`."""

    predictor: Windows
    train: Windows
    validation: Windows
    test: Windows


# --- reading ---


def read_series(path: Path, column: str | None = None) -> Series:
    """Read the record in a CSV file, plain or gzip. `column` names the temperature column if it is not a known one.

    Rows are sorted. Rows without a temperature, and all but the first of equal time stamps, are dropped. Denser
    records are thinned to 10 minutes. A time that cannot be parsed is an error.
    """
    return _parse(read_rows(path, SizeLimit(path.name, MAX_FILE_MIB, "give fewer years")), path.name, column)


def parse_series(content: bytes, name: str, column: str | None = None) -> Series:
    """Parse the content of a CSV file. `name` is the file's name in messages and in the result."""
    return _parse(decode_rows(io.BytesIO(content)), name, column)


def _parse(lines: Iterator[str], name: str, column: str | None) -> Series:
    column, parts = _read_table(lines, name, column)
    numbers = [(_minutes_of(part, name), np.array([_number(cell) for cell in part.temperatures])) for part in parts]
    minutes, celsius = (np.concatenate(column) for column in zip(*numbers, strict=True))
    rows = len(minutes)

    plausible = (celsius >= MIN_CELSIUS) & (celsius <= MAX_CELSIUS)  # False for NaN as well
    minutes, celsius = minutes[plausible], celsius[plausible]
    present = len(minutes)
    minutes, first = np.unique(minutes, return_index=True)  # sorts, and keeps the first of equals
    celsius = celsius[first]
    if len(minutes) < 2:
        raise DataError(
            f"{name}: only {len(minutes)} of {rows} rows have a temperature between {MIN_CELSIUS:g} and"
            f" {MAX_CELSIUS:g} degrees Celsius in column {quote(column)}; at least 2 are needed: choose"
            " another column with --column, or convert the unit"
        )
    distinct = len(minutes)
    on_step = _on_step(minutes, name)
    minutes, celsius = minutes[on_step], celsius[on_step]

    cleaning = Cleaning(
        rows=rows,
        missing=rows - present,
        duplicates=present - distinct,
        between=distinct - len(minutes),
        gaps=int((np.diff(minutes) != STEP).sum()),
    )
    content_name = fingerprint(minutes.astype("<i8").tobytes(), celsius.astype("<f8").tobytes())
    return Series(minutes, celsius, name, content_name, cleaning)


@dataclass(frozen=True)
class _Rows:
    """Times and temperatures of some rows as text, with the line each row ends on."""

    times: list[str] = field(default_factory=list)
    temperatures: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


def _read_table(lines: Iterator[str], name: str, column: str | None) -> tuple[str, Iterator[_Rows]]:
    """Return the name of the temperature column, and all rows in parts: numbers take a tenth of their texts' memory."""
    n_blank, head = next(((n, line) for n, line in enumerate(lines) if line.strip()), (0, ""))
    delimiter = ";" if head.count(";") > head.count(",") else ","
    reader = csv.reader(chain(repeat("\n", n_blank), [head], lines), delimiter=delimiter)
    header = [cell.strip() for cell in next(_rows(reader, name), [])]
    time = _find_column(header, TIME_COLUMNS, "time", name)
    temperature = _find_column(header, (column,) if column else TEMPERATURE_COLUMNS, "temperature", name)
    return header[temperature], _parts(reader, name, time, temperature, decimal="," if delimiter == ";" else ".")


def _rows(reader: Any, name: str) -> Iterator[list[str]]:
    try:
        yield from filter(None, reader)
    except csv.Error as error:
        raise DataError(f"{name}, line {reader.line_num}: not a CSV file ({error})") from error


def _parts(reader: Any, name: str, time: int, temperature: int, decimal: str) -> Iterator[_Rows]:
    part = _Rows()
    for row in _rows(reader, name):
        n = len(row)
        part.times.append(row[time].strip()[:MAX_CELL] if time < n else "")
        part.temperatures.append(row[temperature][:MAX_CELL].replace(decimal, ".") if temperature < n else "")
        part.lines.append(reader.line_num)
        if len(part.lines) == ROWS_AT_ONCE:
            yield part
            part = _Rows()
    yield part


def _find_column(header: Sequence[str], wanted: Iterable[str], kind: str, name: str) -> int:
    folded = [cell.casefold() for cell in header]
    for candidate in wanted:
        if candidate.casefold() in folded:
            return folded.index(candidate.casefold())
    raise DataError(
        f"{name} has no {kind} column: looked for {join_quoted(wanted)}; the columns are: {join_quoted(header)}"
        + ("; choose one with --column" if kind == "temperature" else "; give a file with a column of times")
    )


def _minutes_of(part: _Rows, name: str) -> Minutes:
    try:
        stamps = [_year_first(time) for time in part.times]
        return np.array(stamps, dtype="datetime64[m]").astype(np.int64)
    except ValueError:
        bad = next(row for row, time in enumerate(part.times) if not _is_time(time))
        raise DataError(
            f"{name}, line {part.lines[bad]}: cannot read the time {quote(part.times[bad])};"
            " write yyyy-mm-dd HH:MM:SS or dd.mm.yyyy HH:MM:SS"
        ) from None


def _year_first(time: str) -> str:
    # numpy would also accept "now" or a bare year.
    if _YEAR_FIRST.fullmatch(time):
        return time
    if _DAY_FIRST.fullmatch(time):
        return f"{time[6:10]}-{time[3:5]}-{time[:2]}T{time[11:]}"
    raise ValueError(time)


def _is_time(time: str) -> bool:
    try:
        np.datetime64(_year_first(time))
    except ValueError:
        return False
    return True


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def _on_step(minutes: Minutes, name: str) -> NDArray[np.bool_]:
    """Return which rows to keep to thin a denser record to 10-minute steps."""
    steps, counts = np.unique(np.diff(minutes), return_counts=True)
    step = int(steps[counts.argmax()])
    if STEP % step != 0:
        raise DataError(
            f"{name} has an observation every {step} minutes; the task needs steps of {STEP} minutes: give a record"
            f" of {STEP} minutes, or of 1, 2 or 5, which is thinned"
        )
    if step == STEP:  # whatever the phase, even if the logger's clock was adjusted
        return np.ones(len(minutes), dtype=np.bool_)
    phase = np.bincount(minutes % STEP).argmax()
    return np.asarray(minutes % STEP == phase)


# --- windows ---


def make_windows(series: Series, *, n_in: int = 12, n_out: int = 6, stride: int = 1) -> Windows:
    """Return every window without a gap, oldest first.

    `stride` counts 10-minute steps of absolute time: with 6, every window's last observation is at the full hour.
    """
    if min(n_in, n_out, stride) < 1:
        raise OptionError(f"n_in, n_out and stride must be at least 1, not {n_in}, {n_out} and {stride}")
    length = n_in + n_out
    runs = np.cumsum(np.diff(series.minutes, prepend=series.minutes[:1]) != STEP)  # (n,) index of the gapless run
    last_input = series.minutes[n_in - 1 : len(series) - n_out]  # (n - length + 1,)
    whole = runs[length - 1 :] == runs[: len(last_input)]
    rows = np.flatnonzero(whole & (last_input // STEP % stride == 0))
    if len(rows) == 0:
        hint = "a smaller --stride" if whole.any() else "a longer record, or one with fewer gaps"
        raise DataError(
            f"{series.name}: {len(series)} rows, {series.cleaning.gaps} gaps and no window of {length} rows without a"
            f" gap ({n_in} in, {n_out} out); give {hint}"
        )
    cut = np.lib.stride_tricks.sliding_window_view(series.celsius.astype(np.float32), length)[rows]  # (n, length)
    return Windows(cut[:, :n_in].copy(), cut[:, n_in:].copy(), last_input[rows])


# --- splits ---


def split_windows(windows: Windows, how: SplitMethod, seed: int) -> WeatherSplits:
    """Split windows into four parts by `SPLIT_PERCENT`. Windows that straddle a border are dropped.

    weeks          whole weeks are assigned at random, block by block, so that every part sees every season
    chronological  the oldest windows go to the predictor, the newest to the test; `seed` is ignored

    Both number the stretches of time between borders, then assign each stretch to a part.
    """
    if how == "weeks":
        first, last = windows.first_minutes // WEEK, windows.last_minutes // WEEK
    elif how == "chronological":
        borders = _borders(windows)
        first = np.searchsorted(borders, windows.first_minutes, side="right")
        last = np.searchsorted(borders, windows.last_minutes, side="right")
    else:
        raise unknown("split", how, get_args(SplitMethod))
    whole = first == last
    stretches, stretch = np.unique(first[whole], return_inverse=True)
    part_of = _assign_weeks(len(stretches), np.random.default_rng(seed)) if how == "weeks" else stretches
    rows = np.flatnonzero(whole)
    parts = [windows.select(rows[part_of[stretch] == part]) for part in range(len(SPLIT_PERCENT))]
    _check_parts(parts, windows)
    return WeatherSplits(*parts)


def _borders(windows: Windows) -> Minutes:
    """Return where parts 2 to 4 begin, counted in windows, so that a long gap cannot swallow a part."""
    starts = np.sort(windows.first_minutes)
    before = np.cumsum(list(SPLIT_PERCENT.values()))[:-1] * len(starts) // 100
    return np.asarray(starts[before])


def _assign_weeks(n_weeks: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return the part of each week. (n_weeks,)"""
    if n_weeks < len(SPLIT_PERCENT):
        raise DataError(
            f"the windows lie in {n_weeks} weeks; a split by weeks needs at least {len(SPLIT_PERCENT)}, one for each"
            " part: give a longer record, or --split chronological"
        )
    n_blocks = max(1, n_weeks // BLOCK_WEEKS)
    ends = [n_weeks * block // n_blocks for block in range(n_blocks + 1)]
    # A block gets what is due up to its end minus what was assigned before, so that rounding errors do not add up.
    counts = np.diff([[*divide_by_remainder(end, SPLIT_PERCENT).values()] for end in ends], axis=0)  # (n_blocks, parts)
    parts = np.arange(len(SPLIT_PERCENT))
    return np.concatenate([generator.permutation(np.repeat(parts, count)) for count in counts])


def _check_parts(parts: Sequence[Windows], windows: Windows) -> None:
    empty = [name for name, part in zip(SPLIT_PERCENT, parts, strict=True) if len(part) == 0]
    if empty:
        length = windows.inputs.shape[1] + windows.targets.shape[1]
        needed = 100 * length // min(SPLIT_PERCENT.values())
        raise DataError(
            f"{len(windows)} windows are too few to split: none is left for {', '.join(empty)}; at least {needed} of"
            " stride 1 are needed: give a longer record, or a smaller --stride"
        )
