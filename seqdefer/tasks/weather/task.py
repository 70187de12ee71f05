"""Multi-step weather prediction: two hours of temperature in (12 observations), the next hour out (6), in Celsius.

The predictor is an LSTM encoder-decoder with dropout, trained on its own part of the record. The expert is a simulated
human who reads the true temperature with a Gaussian error. A token is a temperature. Token loss and cost are squared
errors; the sequence loss is their sum over the hour.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.interfaces import NextTokenExpert, SplitName, Task, TaskEntry
from seqdefer.progress import Meter
from seqdefer.recipes import Recipe, published
from seqdefer.report.markup import NBSP, number
from seqdefer.storage.files import fingerprint
from seqdefer.tasks.common.options import check_ranges, option
from seqdefer.tasks.common.token_drawing import TokenExample, draw_tokens, drawings_of
from seqdefer.tasks.weather.data import Series, SplitMethod, Windows, make_windows, read_series, split_windows
from seqdefer.tasks.weather.forecaster import ForecasterOptions, WeatherPredictor, load_or_train
from seqdefer.tasks.weather.sources import default_series, official_jena_series
from seqdefer.types import BatchRecord, Examples, Rollout, Sequences, SequenceSpec

YEAR = 365.2425 * 24 * 60  # minutes
DAY = 24 * 60
DOWNLOADED_RECORDS = ("mast", "jena")
OPTION_RANGES = {
    "stride": (1, 10_080),
    "hidden": (1, 4096),
    "epochs": (1, 10_000),
    "passes": (2, 1000),
    "split_seed": (0, 2**63 - 1),
}
MAX_NOISE = 1000.0  # degrees
PUBLISHED_WINDOWS = 70_080  # training samples in the paper's table of hyperparameters


class ShortRecordWarning(UserWarning):
    """The record has fewer training windows than the paper trains on."""


@dataclass(frozen=True)
class WeatherOptions:
    """Options of the weather task."""

    usual_options: ClassVar = ("data", "column", "split", "noise", "train_windows")
    data: str = option(
        "mast",
        "a CSV file (plain or gzip) with a time and a temperature column; or 'jena' to download the official 2009-2016 "
        "record; or 'mast', a met-mast record downloaded once with pip",
    )
    column: str | None = option(None, "name of the temperature column, if it is not a common one")
    split: SplitMethod = option(  # noqa: RUF009, it returns a field
        "weeks", "'weeks' splits by whole weeks, at random; 'chronological' is the harder test"
    )
    stride: int = option(1, "10-minute steps between windows; 6 makes hourly windows")
    train_windows: int | None = option(
        None, "at most this many windows to fit rejectors on, spread evenly over their part of the record (all)"
    )
    noise: float = option(
        0.1, "standard deviation of the expert's error in degrees Celsius; a good thermometer has 0.1"
    )
    facts: bool = option(True, "give rejectors features of the window in addition to the predictor's states")
    hidden: int = option(32, "units of the predictor's LSTM")
    epochs: int = option(30, "epochs of training the predictor")
    passes: int = option(10, "Monte Carlo dropout passes behind each variance")
    split_seed: int = option(0, "seed of the split, the predictor and the expert's errors")

    def __post_init__(self) -> None:
        check_ranges(self, OPTION_RANGES)
        if self.train_windows is not None and self.train_windows < 1:
            raise OptionError(f"--train-windows is {self.train_windows}; it must be at least 1")
        if not 0 <= self.noise <= MAX_NOISE:
            raise OptionError(f"--noise is {self.noise}; it must be between 0 and {MAX_NOISE:g} degrees")
        if self.column is not None and self.data in DOWNLOADED_RECORDS:
            raise OptionError(
                f"--column is {self.column!r}, but the column of the record {self.data!r} is fixed; omit it, or give a "
                "file with --data"
            )


class SimulatedHuman(NextTokenExpert["_Reading"]):
    """Truth plus Gaussian noise. The noise is a function of (seed, example, position), so answers are repeatable."""

    reads_prefix = False

    def __init__(self, noise: float, seed: int) -> None:
        self.noise, self.seed = noise, seed

    def start(self, examples: Examples) -> _Reading:
        errors = gaussian_of(examples.ids, self.seed, examples.targets.shape[1]).to(examples.targets)
        return _Reading(examples.targets + self.noise * errors, torch.zeros_like(examples.ids))

    def next(self, state: _Reading, rows: Tensor) -> tuple[Tensor, _Reading]:
        return state.values[rows, state.positions[rows]], state

    def append(self, state: _Reading, tokens: Tensor) -> _Reading:
        return _Reading(state.values, state.positions + 1)

    def join(self, states: Sequence[_Reading]) -> _Reading:
        return _Reading.join(states)


@dataclass(frozen=True)
class _Reading(BatchRecord):
    values: Tensor  # (B, L)
    positions: Tensor  # int64 (B,)


def gaussian_of(ids: Tensor, seed: int, length: int) -> Tensor:
    """Return standard normals that depend on (seed, id, position) alone, not on the batch. float64 (n, length)"""
    base = ids.cpu().numpy().astype(np.uint64)[:, None] * np.uint64(2 * length)
    counters = base + np.arange(2 * length, dtype=np.uint64)[None, :]
    uniform = (_mix(counters + _mix(np.full((1, 1), seed, np.uint64))) >> np.uint64(11)).astype(np.float64) / 2.0**53
    radius = np.sqrt(-2.0 * np.log(1.0 - uniform[:, :length]))  # Box-Muller; 1 - u is never 0
    return torch.from_numpy(radius * np.cos(2 * math.pi * uniform[:, length:]))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers by a bijection (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


class WeatherTask(Task):
    name = "weather"
    spec = SequenceSpec(length=6)
    loss_unit = "squared error of the hour (°C²)"
    has_published_figures = True

    def __init__(
        self,
        options: WeatherOptions,
        series: Series,
        parts: Mapping[SplitName, Examples],
        predictor: WeatherPredictor,
    ) -> None:
        self.options, self.series, self.parts = options, series, parts
        self.predictor, self.expert = predictor, SimulatedHuman(options.noise, options.split_seed)

    def split(self, name: SplitName) -> Examples:
        return self.parts[name]

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        return (tokens - examples.targets.gather(1, prefixes.lengths[:, None]).squeeze(1)).square()

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        return (sequences.tokens - examples.targets).square().sum(1)

    def describe(self) -> dict[str, str]:
        cleaned = ", ".join(f"{count} {what}" for what, count in asdict(self.series.cleaning).items())
        return {
            "data": f"{self.series.name} ({self.series.fingerprint}): {cleaned}",
            "windows": ", ".join(f"{name} {len(part)}" for name, part in self.parts.items()),
            "predictor": f"LSTM encoder-decoder of {self.options.hidden} ({self.predictor.fingerprint})",
            "expert": f"truth plus Gaussian noise of {self.options.noise} °C",
        }

    def draw(self, examples: Examples, rollouts: Mapping[float, Rollout]) -> str:
        drawings = drawings_of(self, examples, rollouts, _readings, lambda loss: f"{number(loss, 2)}{NBSP}°C²")
        drawn = []
        for row, drawing in enumerate(drawings):
            minutes = round(float(examples.inputs[row, -2]) * DAY)
            seen, truth = (
                "  ".join(_readings(part[row].tolist())) for part in (examples.inputs[:, :-2], examples.targets)
            )
            source = f"{minutes // 60 % 24:02d}:{minutes % 60:02d}, after {seen} °C"
            drawn.append(TokenExample(source, truth, drawing))
        return draw_tokens(drawn, separator="  ", legend=["°C, every ten minutes of the hour that follows"])


def _readings(values: Sequence[float]) -> list[str]:
    return [number(value, 1) for value in values]


def to_examples(windows: Windows) -> Examples:
    """Return examples whose inputs are 12 temperatures, then the last one's time of day and of year, each in [0, 1)."""
    day, year = (windows.minutes % DAY) / DAY, (windows.minutes % YEAR) / YEAR
    inputs = np.concatenate([windows.inputs, day[:, None], year[:, None]], 1).astype(np.float32)
    return Examples(torch.from_numpy(inputs), torch.from_numpy(windows.targets), torch.from_numpy(windows.minutes))


def load_series(options: WeatherOptions) -> Series:
    if options.data == "mast":
        return default_series()
    if options.data == "jena":
        return official_jena_series()
    return read_series(Path(options.data), options.column)


def prepare(options: WeatherOptions, folder: Path, device: torch.device, meter: Meter) -> WeatherTask:
    with meter.stage("read the record", 1) as advance:
        series = load_series(options)
        advance(1)
    splits = split_windows(make_windows(series, stride=options.stride), options.split, options.split_seed)
    parts: dict[SplitName, Examples] = {
        "train": to_examples(_training_windows(splits.train, options, series)),
        "validation": to_examples(splits.validation),
        "test": to_examples(splits.test),
    }
    training = to_examples(splits.predictor)
    wanted = ForecasterOptions(options.hidden, options.epochs, options.split_seed)
    name = fingerprint(asdict(wanted), training.inputs, training.targets)
    model = load_or_train(folder / f"predictor-{name}", training, wanted, device, meter)
    predictor = WeatherPredictor(model, passes=options.passes, facts=options.facts)
    return WeatherTask(options, series, parts, predictor)


def _training_windows(windows: Windows, options: WeatherOptions, series: Series) -> Windows:
    """Return the windows that rejectors are fitted on; warn where the record lacks the paper's count."""
    wanted = options.train_windows
    if wanted is None:
        return windows
    if len(windows) < wanted == PUBLISHED_WINDOWS:
        warnings.warn(
            f"{series.name} has {len(windows):,} training windows ({len(series):,} rows, --stride {options.stride}), "
            f"fewer than the {wanted:,} of the paper; all of them are used: give a longer record for more, such "
            "as the paper's eight years (--data jena)",
            ShortRecordWarning,
            stacklevel=3,
        )
    return windows.spread(wanted)


ENTRY = TaskEntry(
    name="weather",
    summary="forecast the next hour of temperature; the expert is a person with a thermometer",
    presets={
        "quick": WeatherOptions(stride=3, train_windows=6000, epochs=12),
        "paper": WeatherOptions(),
        "paper-size": WeatherOptions(train_windows=PUBLISHED_WINDOWS),
    },
    prepare=prepare,
    recipes={"ours": Recipe(), "published": published(options={"facts": False})},
)
