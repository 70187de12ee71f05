"""Reading temperature records, cutting windows, splitting without leaks."""

from __future__ import annotations

import gzip
import tracemalloc
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqdefer.errors import DataError, OptionError
from seqdefer.tasks.weather import data
from seqdefer.tasks.weather.data import (
    SPLIT_PERCENT,
    STEP,
    WEEK,
    Cleaning,
    Series,
    SplitMethod,
    WeatherSplits,
    Windows,
    make_windows,
    read_series,
    split_windows,
)

JENA_2020 = Path(__file__).parents[4] / "shared" / "data" / "jena" / "jena_2020.csv.gz"
START = datetime(2020, 2, 28, 23, 40)
FOUR_WEEKS = list(range(0, 4 * WEEK, STEP))
ISO = "%Y-%m-%d %H:%M:%S"


def write_csv(path: Path, temperatures: list[str], **options: str) -> Path:
    """Write a record with a row every 10 minutes from START."""
    layout, delimiter = options.get("layout", ISO), options.get("delimiter", ",")
    rows = [options.get("header", f"date{delimiter}p (mbar){delimiter}T (degC)")]
    for row, temperature in enumerate(temperatures):
        time = (START + timedelta(minutes=STEP * row)).strftime(layout)
        rows.append(delimiter.join([time, "990.1", temperature]))
    path.write_bytes(("\n".join(rows) + "\n").encode(options.get("encoding", "utf-8")))
    return path


def series_of(minutes: list[int]) -> Series:
    """Return a record whose temperature is its row number, so that windows show their rows."""
    times = np.array(minutes, dtype=np.int64)
    gaps = int((np.diff(times) != STEP).sum())
    return Series(times, np.arange(len(times), dtype=np.float64), "made", "0", Cleaning(len(times), 0, 0, 0, gaps))


def parts_of(splits: WeatherSplits) -> list[Windows]:
    return [getattr(splits, name) for name in SPLIT_PERCENT]


def times_in(windows: Windows) -> set[int]:
    """Return every time stamp in any of the windows."""
    n_steps = windows.inputs.shape[1] + windows.targets.shape[1]
    return {int(first) + STEP * step for first in windows.first_minutes for step in range(n_steps)}


# --- reading ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "%Y-%m-%dT%H:%M:%S"},
        {"layout": "%d.%m.%Y %H:%M:%S", "header": "Date Time,p (mbar),T (degC)"},
        {"layout": "%d.%m.%Y %H:%M:%S", "header": '"Date Time","p (mbar)","T (degC)"'},
        {"header": "Timestamp,P2m,T2m"},
        {"header": " DATETIME , Pressure , Temperature "},
        {"header": "\n\ndate,p,temp"},
        {"delimiter": ";"},
        {"encoding": "utf-8-sig"},
        {"encoding": "utf-8", "header": "date,PAR (\u00b5mol/m\u00b2/s),T (degC)"},
        {"encoding": "latin-1", "header": "date,PAR (\u00b5mol/m\u00b2/s),T (degC)"},
    ],
)
def test_every_layout_reads_the_same(tmp_path: Path, options: dict[str, str]) -> None:
    path = write_csv(tmp_path / "record.csv", ["1.5", "-2", "3e0", "4"], **options)
    series = read_series(path)
    first = int((START - datetime(1970, 1, 1)).total_seconds()) // 60
    assert series.minutes.tolist() == [first + STEP * row for row in range(4)]
    assert series.celsius.tolist() == [1.5, -2.0, 3.0, 4.0]
    assert [array.dtype.name for array in (series.minutes, series.celsius)] == ["int64", "float64"]
    assert series.cleaning == Cleaning(rows=4, missing=0, duplicates=0, between=0, gaps=0)
    assert series.name == "record.csv"
    assert series.fingerprint == read_series(write_csv(tmp_path / "other.csv", ["1.5", "-2", "3", "4"])).fingerprint


def test_gzip_is_detected_by_content(tmp_path: Path) -> None:
    plain = write_csv(tmp_path / "plain.gz", ["1", "2"])
    packed = tmp_path / "packed.csv"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_series(packed).fingerprint == read_series(plain).fingerprint


def test_windows_line_ends_and_decimal_commas(tmp_path: Path) -> None:
    path = tmp_path / "record.csv"
    path.write_bytes(b"date;T (degC)\r\n2020-01-01 00:00;1,5\r\n\r\n2020-01-01 00:10;-2,25\r\n")
    assert read_series(path).celsius.tolist() == [1.5, -2.25]


def test_missing_values_are_dropped_counted_and_leave_gaps(tmp_path: Path) -> None:
    bad = ["-9999", "-999.0", "", "NaN", "n/a", "inf", "100.1"]
    cells = ["-100", "100", *[cell for value in bad for cell in (value, "3", "4")]]
    series = read_series(write_csv(tmp_path / "record.csv", cells))
    assert series.celsius.tolist() == [-100.0, 100.0] + [3.0, 4.0] * len(bad)
    assert series.cleaning == Cleaning(rows=len(cells), missing=7, duplicates=0, between=0, gaps=7)


def test_a_truncated_row_has_no_temperature(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "record.csv", ["1", "2"])
    path.write_text(path.read_text() + "2020-02-29 00:00:00,990\n")
    assert read_series(path).cleaning.missing == 1


def test_rows_are_sorted_and_the_first_of_equal_time_stamps_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "record.csv"
    minutes_and_cells = ["30,3", "10,1", "20,nan", "20,2", "10,9", "00,0", "20,8"]
    path.write_text("date,temp\n" + "".join(f"2020-01-01 00:{row}\n" for row in minutes_and_cells))
    series = read_series(path)
    assert series.celsius.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert series.cleaning == Cleaning(rows=7, missing=1, duplicates=2, between=0, gaps=0)


@pytest.mark.parametrize(("step", "phase"), [(1, 0), (2, 0), (5, 0), (5, 3)])
def test_denser_records_are_thinned(tmp_path: Path, step: int, phase: int) -> None:
    times = [datetime(2020, 1, 1) + timedelta(minutes=phase + step * row) for row in range(60 // step)]
    path = tmp_path / "record.csv"
    path.write_text("date,temp\n" + "".join(f"{time:{ISO}},{time.minute}\n" for time in times))
    series = read_series(path)
    assert series.celsius.tolist() == [float(phase + STEP * row) for row in range(6)]
    assert series.cleaning.between == len(times) - 6
    assert series.cleaning.gaps == 0


def test_a_clock_that_was_adjusted_loses_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "record.csv"
    path.write_text("date,temp\n" + "".join(f"2020-01-01 00:{minute:02},{minute}\n" for minute in (0, 10, 20, 33, 43)))
    series = read_series(path)
    assert series.celsius.tolist() == [0.0, 10.0, 20.0, 33.0, 43.0]
    assert series.cleaning == Cleaning(rows=5, missing=0, duplicates=0, between=0, gaps=1)


@pytest.mark.parametrize("step", [3, 15, 60])
def test_other_steps_are_refused(tmp_path: Path, step: int) -> None:
    times = [datetime(2020, 1, 1) + timedelta(minutes=step * row) for row in range(9)]
    path = tmp_path / "record.csv"
    path.write_text("date,temp\n" + "".join(f"{time:{ISO}},1\n" for time in times))
    with pytest.raises(DataError, match=rf"record\.csv has an observation every {step} minutes.*1, 2 or 5"):
        read_series(path)


def test_the_temperature_column_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "record.csv"
    path.write_text("date,inside,temp\n2020-01-01 00:00,20,1\n2020-01-01 00:10,21,2\n")
    assert read_series(path, column="Inside").celsius.tolist() == [20.0, 21.0]
    assert read_series(path).celsius.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        (
            "date,p,wind\n",
            None,
            r"no temperature column: looked for 'T \(degC\)', .*; the columns are: 'date', 'p', 'wind'; choose one",
        ),
        (
            "date,p,temp\n",
            "tmp",
            r"looked for 'tmp'; the columns are: 'date', 'p', 'temp'; choose one with --column$",
        ),
        (
            "p,temp\n",
            None,
            r"no time column: looked for 'Date Time', .*; the columns are: 'p', 'temp'; give a file with ",
        ),
        ("date,temp\n", None, r"only 0 of 0 rows have a temperature"),
        (
            "date,temp\n2020-01-01 00:00,280\n2020-01-01 00:10,281\n",
            None,
            r"only 0 of 2 rows .* 'temp'.*convert the unit",
        ),
        (
            "date,temp\n2020-01-01 00:00,1\n\nyesterday,2\n",
            None,
            r"record\.csv, line 4: cannot read the time 'yesterday'",
        ),
        ("date,temp\n2020-02-30 00:00,1\n", None, r"line 2: cannot read the time '2020-02-30 00:00'"),
        (f"date,temp\n{'x' * 140000},1\n", None, r"line 2: not a CSV file"),
        ("PK\x03\x04", None, r"is a zip archive: unpack it"),
        ('date,"a\nb",\x1b[31m\n', None, r"the columns are: 'date', 'a\\nb', '\\x1b\[31m'; choose one with --column$"),
        (f"{','.join('abcdefghijklm')}\n", None, r"'i', 'j' and 3 more; "),
        (f"date,temp\n{'x' * 1000},1\n", None, r"cannot read the time 'x{39}…';"),
    ],
)
def test_unreadable_records(tmp_path: Path, text: str, column: str | None, message: str) -> None:
    path = tmp_path / "record.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read_series(path, column)
    assert "\n" not in str(caught.value)


def test_a_small_file_cannot_take_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 600 kB once took 3.5 GB: every cell was a text in memory until all rows were read. This one is smaller,
    and so are the parts in which it is read; in one part it takes 16 MiB."""
    monkeypatch.setattr(data, "ROWS_AT_ONCE", 4096)
    rows = b"2020-01-01 00:00,1\n2020-01-01 00:10,2\n" * 50_000
    (tmp_path / "record.csv.gz").write_bytes(gzip.compress(b"\n" * 100_000 + b"date,temp\n" + rows))
    tracemalloc.start()
    try:
        assert read_series(tmp_path / "record.csv.gz").cleaning.rows == 100_000
        assert tracemalloc.get_traced_memory()[1] < 9 * 2**20
    finally:
        tracemalloc.stop()


def test_records_larger_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_FILE_MIB", 1)
    (tmp_path / "record.csv.gz").write_bytes(gzip.compress(b"date,temp\n" + b"2020-01-01 00:00,1\n" * 60_000))
    message = r"record.csv.gz is larger than 1 MiB; give fewer years, or allow more with SEQDEFER_MAX_DATA_MIB=N"
    with pytest.raises(DataError, match=message):
        read_series(tmp_path / "record.csv.gz")


def test_rows_of_many_parts_are_joined_and_errors_name_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.csv"
    text = "\ndate;temp\n" + "".join(f"2020-01-01 0{row // 6}:{row % 6}0;{row},5\n" for row in range(30))
    path.write_text(text)
    whole = read_series(path)
    monkeypatch.setattr(data, "ROWS_AT_ONCE", 7)
    assert read_series(path).celsius.tolist() == whole.celsius.tolist() == [row + 0.5 for row in range(30)]
    path.write_text(text + "long ago;1\n")
    with pytest.raises(DataError, match=r"record.csv, line 33: cannot read the time 'long ago'"):
        read_series(path)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*absent\.csv: No such file"):
        read_series(tmp_path / "absent.csv")
    whole = gzip.compress(b"date,temp\n" * 100)
    for damaged in (whole[:-12], whole[:12] + bytes(8) + whole[20:], whole[:3]):
        (tmp_path / "cut.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"cannot read .*cut\.gz( after line \d+)?: "):
            read_series(tmp_path / "cut.gz")


# --- windows ---


@st.composite
def gappy_series(draw: st.DrawFn) -> Series:
    """Mostly 10-minute steps, with others, some of which add up to a multiple of 10 minutes."""
    start = draw(st.integers(-100, 100))
    steps = draw(st.lists(st.sampled_from([10, 10, 10, 10, 10, 10, 5, 15, 20, 100]), min_size=1, max_size=60))
    return series_of((start + np.cumsum([0, *steps])).tolist())


@settings(deadline=None)
@given(gappy_series(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_windows_equal_brute_force(series: Series, n_in: int, n_out: int, stride: int) -> None:
    expected = []
    for start in range(len(series) - n_in - n_out + 1):
        times = series.minutes[start : start + n_in + n_out].tolist()
        last_input = times[n_in - 1]
        if all(b - a == 10 for a, b in pairwise(times)) and (last_input // 10) % stride == 0:
            expected.append((start, last_input))
    if not expected:
        with pytest.raises(DataError):
            make_windows(series, n_in=n_in, n_out=n_out, stride=stride)
        return
    windows = make_windows(series, n_in=n_in, n_out=n_out, stride=stride)
    rows = np.concatenate([windows.inputs, windows.targets], axis=1)
    assert rows.tolist() == [list(range(start, start + n_in + n_out)) for start, _ in expected]
    assert windows.minutes.tolist() == [last_input for _, last_input in expected]


def test_shapes_and_ends_of_windows() -> None:
    windows = make_windows(series_of(list(range(0, 300, 10))))
    assert (windows.inputs.shape, windows.targets.shape, len(windows)) == ((13, 12), (13, 6), 13)
    arrays = (windows.inputs, windows.targets, windows.minutes)
    assert [array.dtype.name for array in arrays] == ["float32", "float32", "int64"]
    assert windows.minutes[0] == 110
    assert (windows.first_minutes[0], windows.last_minutes[0]) == (0, 170)
    assert windows.select(np.array([3, 1])).minutes.tolist() == [140, 120]
    assert windows.select(windows.minutes > 200).inputs.shape == (3, 12)


def test_windows_that_cannot_be_made() -> None:
    with pytest.raises(
        DataError,
        match=r"made: 17 rows, 0 gaps and no window of 18 rows .*12 in, 6 out\); give a longer record",
    ):
        make_windows(series_of(list(range(0, 170, 10))))
    with pytest.raises(DataError, match=r"20 rows, 1 gaps and no window"):
        make_windows(series_of([*range(0, 100, 10), *range(200, 300, 10)]))
    with pytest.raises(DataError, match=r"no window .*; give a smaller --stride"):
        make_windows(series_of(list(range(10, 310, 10))), stride=1000)
    for wrong in ({"n_in": 0}, {"n_out": 0}, {"stride": 0}):
        with pytest.raises(OptionError, match="must be at least 1"):
            make_windows(series_of(list(range(0, 300, 10))), **wrong)


# --- splits ---


@st.composite
def records(draw: st.DrawFn) -> Windows:
    """Windows of a record of some weeks, with gaps, thinned for speed."""
    n_weeks = draw(st.integers(8, 45))
    start = draw(st.integers(0, WEEK // STEP)) * STEP
    holes = draw(st.lists(st.tuples(st.integers(0, n_weeks * WEEK), st.integers(0, WEEK)), max_size=3))
    minutes = np.arange(start, start + n_weeks * WEEK, STEP)
    for at, width in holes:
        minutes = minutes[(minutes < start + at) | (minutes >= start + at + width)]
    return make_windows(series_of(minutes.tolist()), stride=draw(st.sampled_from([7, 36, 50])))


@settings(max_examples=40, deadline=None)
@given(records(), st.sampled_from(["weeks", "chronological"]), st.integers(0, 9))
def test_no_time_stamp_is_in_two_parts(windows: Windows, how: SplitMethod, seed: int) -> None:
    parts = parts_of(split_windows(windows, how, seed))
    seen = [times_in(part) for part in parts]
    assert all(seen)
    assert sum(map(len, seen)) == len(set().union(*seen))
    kept = np.concatenate([part.minutes for part in parts])
    assert len(np.unique(kept)) == len(kept)
    straddling = np.isin(windows.minutes, kept, invert=True)
    if how == "weeks":
        assert (windows.first_minutes // WEEK != windows.last_minutes // WEEK)[straddling].all()
    else:
        assert all(older.last_minutes.max() < newer.first_minutes.min() for older, newer in pairwise(parts))
        assert straddling.sum() <= 3 * 18


@settings(deadline=None)
@given(st.integers(4, 500), st.integers(0, 5))
def test_every_block_has_its_share_of_weeks(n_weeks: int, seed: int) -> None:
    assigned = data._assign_weeks(n_weeks, np.random.default_rng(seed))
    counts = np.bincount(assigned, minlength=4)
    assert len(assigned) == n_weeks
    assert (counts >= 1).all()
    assert np.abs(counts - n_weeks * np.array(list(SPLIT_PERCENT.values())) / 100).max() <= 1
    for start in range(0, n_weeks - 78, 13):  # a stretch of 78 weeks holds at least one whole block (20 to 39 weeks)
        assert set(assigned[start : start + 78].tolist()) == {0, 1, 2, 3}


def test_twenty_weeks_are_seven_seven_two_four() -> None:
    assigned = data._assign_weeks(60, np.random.default_rng(0)).reshape(3, 20)
    assert [np.bincount(block).tolist() for block in assigned] == [[7, 7, 2, 4]] * 3
    assert np.bincount(data._assign_weeks(4, np.random.default_rng(0))).tolist() == [1, 1, 1, 1]


def test_the_seed_decides_the_weeks_and_nothing_else() -> None:
    windows = make_windows(series_of(list(range(0, 30 * WEEK, STEP))), stride=36)
    again, same, other = (split_windows(windows, "weeks", seed).test.minutes for seed in (1, 1, 2))
    assert np.array_equal(again, same)
    assert not np.array_equal(again, other)
    first, second = (split_windows(windows, "chronological", seed).test.minutes for seed in (1, 2))
    assert np.array_equal(first, second)


def test_chronological_shares_are_of_the_windows() -> None:
    windows = make_windows(series_of([*range(0, 10_000, STEP), *range(10**6, 10**6 + 10_000, STEP)]))
    borders = [int(part.first_minutes.min()) for part in parts_of(split_windows(windows, "chronological", 0))]
    assert borders == [int(windows.first_minutes[len(windows) * percent // 100]) for percent in (0, 35, 70, 80)]


@pytest.mark.parametrize("how", get_args(SplitMethod))
def test_adjacent_parts_share_no_time_stamp(how: SplitMethod) -> None:
    seen = [times_in(part) for part in parts_of(split_windows(make_windows(series_of(FOUR_WEEKS)), how, 0))]
    assert sum(map(len, seen)) == len(set().union(*seen)) == len(FOUR_WEEKS)


def test_records_too_short_to_split() -> None:
    days = make_windows(series_of(list(range(0, 2 * WEEK, STEP))))
    with pytest.raises(DataError, match=r"lie in 2 weeks; .* at least 4, .*longer record.*--split chronological"):
        split_windows(days, "weeks", 0)
    assert len(split_windows(days.select(np.arange(180)), "chronological", 0).validation) > 0
    with pytest.raises(DataError, match=r"100 windows are too few .* left for validation; at least 180"):
        split_windows(days.select(np.arange(100)), "chronological", 0)
    with pytest.raises(OptionError, match=r"unknown split 'months'; available: chronological, weeks"):
        split_windows(days, "months", 0)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 400))
def test_windows_are_spread_evenly(size: int, n: int) -> None:
    windows = make_windows(series_of(list(range(0, STEP * (size + 17), STEP))))
    kept = windows.spread(n)
    rows = (kept.minutes - windows.minutes[0]) // STEP
    assert len(kept) == min(n, size)
    assert rows[0] == 0
    steps = np.diff([*rows, size])
    assert (steps >= 1).all()
    assert steps.max() - steps.min() <= 1
    assert np.array_equal(kept.targets, windows.targets[rows])


# --- real data ---


@pytest.mark.skipif(not JENA_2020.exists(), reason=f"{JENA_2020} is not on this machine")
def test_jena_2020() -> None:
    series = read_series(JENA_2020)
    assert series.cleaning == Cleaning(rows=52_696, missing=0, duplicates=1, between=0, gaps=1)
    assert np.diff(series.minutes).max() == 100
    windows = make_windows(series)
    assert len(windows) == 52_695 - 2 * 17
    for how in get_args(SplitMethod):
        shares = [len(part) / len(windows) for part in parts_of(split_windows(windows, how, seed=0))]
        assert np.allclose(shares, [0.35, 0.35, 0.1, 0.2], atol=0.03)
