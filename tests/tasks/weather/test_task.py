"""The weather task: the simulated human, the predictor with its Monte Carlo passes, and what each part trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import prepare_weather, rows_of, temperatures, write_record
from torch import Tensor

from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import HandOff, roll_out
from seqdefer.errors import CheckpointError, OptionError
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.progress import Silent
from seqdefer.report.panels import is_harmless
from seqdefer.tasks.weather import forecaster
from seqdefer.tasks.weather import task as weather_task
from seqdefer.tasks.weather.data import STEP, Cleaning, Series, make_windows, read_series, split_windows
from seqdefer.tasks.weather.forecaster import (
    N_OBSERVED,
    Forecaster,
    ForecasterOptions,
    WeatherPredictor,
    train_forecaster,
    window_facts,
)
from seqdefer.tasks.weather.task import (
    ENTRY,
    PUBLISHED_WINDOWS,
    ShortRecordWarning,
    SimulatedHuman,
    WeatherOptions,
    WeatherTask,
    gaussian_of,
    prepare,
)
from seqdefer.types import Examples, Proposal, Sequences

WEEK = 7 * 144  # observations


# -- the simulated human -------------------------------------------------------------------------------------------


def test_errors_are_standard_normal() -> None:
    """Check moments and tails of 240,000 numbers, for ids ten minutes apart as in a record."""
    drawn = gaussian_of(26_000_000 + 10 * torch.arange(40_000), seed=0, length=6).numpy()
    assert drawn.shape == (40_000, 6)
    moments = [(drawn**power).mean() for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.03)
    for z, share in ((1, 0.3173), (2, 0.0455), (3, 0.0027)):
        assert (np.abs(drawn) > z).mean() == pytest.approx(share, abs=0.002)
    assert np.allclose(np.corrcoef(drawn.T), np.eye(6), atol=0.02)  # positions are independent


def test_errors_depend_on_seed_example_and_position() -> None:
    ids = torch.tensor([5, 7, 100, 2**40, -30])
    together = gaussian_of(ids, seed=3, length=6)
    assert together.isfinite().all()
    assert together.unique().numel() == together.numel()
    for row, one in enumerate(ids):
        assert torch.equal(gaussian_of(one[None], seed=3, length=6)[0], together[row])
    assert not (gaussian_of(ids, seed=4, length=6) == together).any()


def test_errors_of_neighbours_are_independent() -> None:
    """Magnitudes too: no two errors share an underlying random number."""
    drawn = gaussian_of(torch.arange(40_000), seed=0, length=6).numpy()
    one, following = drawn[:-1].flatten(), drawn[1:].flatten()
    for first in (one, np.abs(one)):
        for second in (following, np.abs(following)):
            assert np.corrcoef(first, second)[0, 1] == pytest.approx(0, abs=0.01)


def test_errors_of_two_seeds_are_independent() -> None:
    one, other = (gaussian_of(torch.arange(20_000), seed, 2).flatten().numpy() for seed in (0, 1))
    assert np.corrcoef(one, other)[0, 1] == pytest.approx(0, abs=0.02)


def make_examples(n: int = 8) -> Examples:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.cat([10 * torch.rand(n, 12, generator=generator), torch.rand(n, 2, generator=generator)], 1)
    return Examples(inputs, 10 * torch.rand(n, 6, generator=generator), 1000 + 10 * torch.arange(n))


@pytest.mark.parametrize("noise", [0.0, 0.1, 2.0])
def test_the_human_adds_an_error_to_the_truth(noise: float, weather: WeatherTask) -> None:
    examples, human = make_examples(), SimulatedHuman(noise, seed=5)
    truth = examples.targets + noise * gaussian_of(examples.ids, 5, 6).float()
    state = human.start(examples)
    rows = torch.tensor([6, 0, 3])
    for position in range(6):
        named, state = human.next(state, rows)
        assert torch.equal(named, truth[rows, position])
        again, _ = human.next(human.select(state, rows), torch.arange(3))
        assert torch.equal(again, named)
        state = human.append(state, torch.zeros(len(examples)))
    prefixes = Sequences(torch.full((8, 6), 99.0), torch.arange(8).clamp(max=6))
    completed = human.complete(examples, prefixes, weather.spec).tokens
    kept = prefixes.mask()
    assert (completed[kept] == 99.0).all()
    assert torch.equal(completed[~kept], truth[~kept])


# -- the predictor -------------------------------------------------------------------------------------------------


def make_predictor(*, passes: int = 5, facts: bool = True, seed: int = 0, hidden: int = 7) -> WeatherPredictor:
    torch.manual_seed(2)
    model = Forecaster(hidden, dropout=0.3)
    model.mean.fill_(5.0)
    model.scale.fill_(3.0)
    return WeatherPredictor(model, passes=passes, facts=facts, seed=seed)


@torch.no_grad()
def along(predictor: WeatherPredictor, examples: Examples, tokens: Tensor) -> list[Proposal]:
    """Return the proposals at every position while `tokens` (B, 6) are appended."""
    state, _ = predictor.start(examples.inputs)
    proposals = []
    for position in range(6):
        proposals.append(predictor.propose(state))
        state = predictor.append(state, tokens[:, position])
    return proposals


@torch.no_grad()
def test_forecasts_equal_the_network_without_dropout() -> None:
    """The first pass is the network without dropout, fed with the tokens written."""
    predictor, examples = make_predictor(), make_examples()
    model = predictor.model
    standard = model.standardise(examples.targets)
    expected = model(model.standardise(examples.inputs[:, :N_OBSERVED]), standard) * 3.0 + 5.0
    proposed = torch.stack([one.tokens for one in along(predictor, examples, examples.targets)], 1)
    torch.testing.assert_close(proposed, expected)


@torch.no_grad()
def test_variance_equals_single_passes() -> None:
    predictor, examples = make_predictor(passes=5), make_examples()
    model, forecasts = predictor.model, torch.zeros(5, 8, 6)
    observed = model.standardise(examples.inputs[:, :N_OBSERVED])
    for number in range(5):
        into, out = predictor.encoder_mask[1 + number], predictor.decoder_mask[1 + number]
        for row in range(8):
            hidden, memory = model.encode(observed[row : row + 1])
            hidden = hidden * into
            last = observed[row : row + 1, -1]
            for position in range(6):
                hidden, memory = model.decoder(last[:, None], (hidden, memory))
                forecasts[number, row, position] = model.head(hidden * out) * 3.0 + 5.0
                last = model.standardise(examples.targets[row : row + 1, position])
    mean = forecasts.sum(0) / 5
    expected = ((forecasts - mean) ** 2).sum(0) / 4
    got = torch.stack([one.uncertainty for one in along(predictor, examples, examples.targets)], 1)
    assert (got > 0).all()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)


def test_masks_of_passes_are_fixed_and_distinct() -> None:
    predictor, again, other = make_predictor(passes=50), make_predictor(passes=50), make_predictor(passes=50, seed=1)
    for mask in (predictor.encoder_mask, predictor.decoder_mask):
        assert mask.shape == (51, 7)
        assert torch.equal(mask[0], torch.ones(7))  # the pass without dropout
        assert set(mask[1:].unique().tolist()) == {0.0, float(torch.tensor(1.0) / torch.tensor(0.7))}
        assert float(mask[1:].mean()) == pytest.approx(1.0, abs=0.1)  # forecasts keep their size
        assert len(mask[1:].unique(dim=0)) > 25
    assert torch.equal(predictor.encoder_mask, again.encoder_mask)
    assert not torch.equal(predictor.encoder_mask, predictor.decoder_mask)
    assert not torch.equal(predictor.encoder_mask, other.encoder_mask)


@pytest.mark.parametrize(("facts", "context", "features"), [(True, 14 + 58, 7 + 4), (False, 14, 7)])
def test_what_rejectors_see(facts: bool, context: int, features: int) -> None:
    predictor, examples = make_predictor(facts=facts), make_examples()
    state, told = predictor.start(examples.inputs)
    proposal = predictor.propose(state)
    assert told.shape == (8, context)
    assert proposal.features.shape == (8, features)
    if facts:
        assert torch.equal(told[:, 14:], window_facts(examples.inputs))
        plain = make_predictor(facts=False)
        assert torch.equal(plain.start(examples.inputs)[1], told[:, :14])
        assert torch.equal(plain.propose(plain.start(examples.inputs)[0]).features, proposal.features[:, :7])


def test_features_of_the_prefix_are_in_degrees() -> None:
    predictor, examples = make_predictor(), make_examples()
    first, second = along(predictor, examples, examples.targets)[:2]
    last = examples.inputs[:, N_OBSERVED - 1]
    zero = torch.zeros(8)
    torch.testing.assert_close(first.features[:, 7:], stack(zero, first.tokens - last), atol=1e-5, rtol=1e-4)
    surprise, step = examples.targets[:, 0] - first.tokens, second.tokens - examples.targets[:, 0]
    torch.testing.assert_close(second.features[:, 7:], stack(surprise, step), atol=1e-5, rtol=1e-4)


def stack(surprise: Tensor, step: Tensor) -> Tensor:
    return torch.stack([surprise, step, surprise.abs(), step.abs()], 1)


def test_window_facts_by_hand() -> None:
    observed = [0.0, 1, 3, 2, 2, 2, 5, 5, 4, 6, 6, 7]
    day, year = 0.25, 0.5
    facts = window_facts(torch.tensor([[*observed, day, year]]))[0].tolist()
    steps = [1, 2, -1, 0, 0, 3, 0, -1, 2, 0, 1]
    turns = [1, -3, 1, 0, 3, -3, -1, 3, -2, 1]
    assert len(facts) == 58
    assert facts[:11] == steps
    assert facts[11:22] == [abs(step) for step in steps]
    assert facts[22:32] == turns
    assert facts[32:44] == [value - 7 for value in observed]
    assert facts[44:47] == pytest.approx([math.log(11 / 11), math.log(3), math.log(18 / 10)], abs=1e-6)
    mean = 43 / 12
    spread = math.sqrt(sum((value - mean) ** 2 for value in observed) / 11)
    step_spread = math.sqrt(sum((step - 7 / 11) ** 2 for step in steps) / 10)
    assert facts[47:52] == pytest.approx([spread, step_spread, 1.0, mean, 7.0], rel=1e-5)
    assert facts[52:] == pytest.approx([1, 0, 0, -1, 0, -1], abs=1e-5)


def test_facts_of_a_constant_window_are_finite() -> None:
    assert window_facts(torch.full((1, 14), 0.5)).isfinite().all()


def test_fingerprints_tell_predictors_apart() -> None:
    plain = make_predictor()
    assert not any(weight.requires_grad for weight in plain.model.parameters())
    others = [make_predictor(passes=6), make_predictor(facts=False), make_predictor(seed=1), make_predictor(hidden=8)]
    assert make_predictor().fingerprint == plain.fingerprint
    assert len({plain.fingerprint, *(other.fingerprint for other in others)}) == 5


# -- losses --------------------------------------------------------------------------------------------------------


def test_the_loss_of_a_sequence_is_the_sum_over_its_tokens(weather: WeatherTask) -> None:
    examples = make_examples()
    tokens = examples.targets + torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    before = [Sequences(tokens, torch.full((8,), j)) for j in range(6)]
    by_token = [weather.token_loss(examples, before[j], tokens[:, j]) for j in range(6)]
    total = weather.sequence_loss(examples, Sequences(tokens, torch.full((8,), 6)))
    torch.testing.assert_close(torch.stack(by_token, 1).sum(1), total)
    torch.testing.assert_close(by_token[2], (tokens[:, 2] - examples.targets[:, 2]) ** 2)
    assert torch.equal(weather.token_cost(examples, before[2], tokens[:, 2]), by_token[2])


# -- preparing -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_hand_offs_lose_the_error_of_the_prefix_and_that_of_the_expert(weather: WeatherTask) -> None:
    """The paper's l(y, y_<j) + c_j before the query cost, position by position."""
    examples = weather.split("test").select(torch.arange(4))
    drafted = draft(weather.predictor, examples, weather.spec)
    table, _ = hand_off_table(weather, examples, drafted)
    truth, own = examples.targets.double(), drafted.sequences.tokens.double()
    human = truth + weather.options.noise * gaussian_of(examples.ids, weather.options.split_seed, 6)
    for kept in range(7):
        prefix = sum((truth[:, j] - own[:, j]) ** 2 for j in range(kept)) + torch.zeros(4)
        rest = sum((truth[:, j] - human[:, j]) ** 2 for j in range(kept, 6)) + torch.zeros(4)
        torch.testing.assert_close(table.loss[:, kept].double(), (prefix + rest).double(), rtol=1e-4, atol=1e-5)
        assert table.deferred[:, kept].tolist() == [6 - kept] * 4


def test_windows_are_the_record(weather: WeatherTask) -> None:
    celsius = temperatures()
    start = int(np.datetime64("2021-01-07T00:00", "m").astype(np.int64))
    for name in ("train", "validation", "test"):
        examples = weather.split(name)  # type: ignore[arg-type]
        assert len(examples) > 50
        for one in rows_of(examples)[:5]:
            last = (int(one.ids) - start) // 10
            window = torch.from_numpy(celsius[last - 11 : last + 7].astype(np.float32))
            assert torch.equal(one.inputs[0, :12], window[:12])
            assert torch.equal(one.targets[0], window[12:])
            minutes = int(one.ids)
            assert float(one.inputs[0, 12]) == pytest.approx(minutes % 1440 / 1440)
            days = (minutes - start) / 1440 + 6  # since new year
            assert float(one.inputs[0, 13]) == pytest.approx(days / 365.2425, abs=0.002)


def test_training_makes_the_predictor_better(record: Path, tmp_path: Path) -> None:
    def error(epochs: int) -> float:
        task = prepare_weather(record, tmp_path, epochs=epochs, hidden=16, stride=1)
        examples = task.split("test")
        tokens = torch.stack([one.tokens for one in along(task.predictor, examples, examples.targets)], 1)
        return float((tokens - examples.targets).square().mean())

    trained = error(12)
    assert trained < 0.5 * error(1)
    assert trained < 1.0  # the record itself spreads by about 5 degrees


def weights_of(task: WeatherTask) -> dict[str, Tensor]:
    return task.predictor.model.state_dict()


def changed_record(path: Path, task: WeatherTask, part: str) -> Path:
    """Write the record with the weeks of one part ten degrees warmer."""
    celsius, weeks = temperatures(), len(temperatures()) // WEEK
    start = int(np.datetime64("2021-01-07T00:00", "m").astype(np.int64))
    used = {name: {(int(one) - start) // 10 // WEEK for one in ids.ids} for name, ids in task.parts.items()}
    used["predictor"] = set(range(weeks)) - set.union(*used.values())  # type: ignore[index]
    for week in used[part]:  # type: ignore[index]
        celsius[week * WEEK : (week + 1) * WEEK] += 10
    return write_record(path, celsius)


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_the_predictor_learns_from_its_own_part_alone(part: str, weather: WeatherTask, tmp_path: Path) -> None:
    """Weights and normalisation do not depend on the temperatures of other parts."""
    task = prepare_weather(changed_record(tmp_path / "changed.csv", weather, part), tmp_path)
    assert not torch.equal(task.parts[part].targets, weather.parts[part].targets)  # type: ignore[index]
    assert task.predictor.fingerprint == weather.predictor.fingerprint
    assert all(torch.equal(value, weights_of(weather)[name]) for name, value in weights_of(task).items())


def test_the_predictor_learns_from_its_own_part(weather: WeatherTask, tmp_path: Path) -> None:
    task = prepare_weather(changed_record(tmp_path / "changed.csv", weather, "predictor"), tmp_path)
    assert float(weights_of(task)["mean"] - weights_of(weather)["mean"]) == pytest.approx(10, abs=0.01)
    assert float(weights_of(task)["scale"]) == pytest.approx(float(weights_of(weather)["scale"]), rel=1e-4)


def test_a_predictor_is_found_again(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spy: Callable[[Any, str], list[Any]]
) -> None:
    trained = spy(forecaster, "train_forecaster")
    first = prepare_weather(record, tmp_path)
    again = prepare_weather(record, tmp_path)
    assert len(trained) == 1
    assert again.predictor.fingerprint == first.predictor.fingerprint
    assert all(torch.equal(value, weights_of(first)[name]) for name, value in weights_of(again).items())
    prepare_weather(record, tmp_path, hidden=5)
    prepare_weather(record, tmp_path, split_seed=1)
    assert len(trained) == 3
    assert len(list(tmp_path.glob("predictor-*"))) == 3


def test_a_damaged_predictor_is_refused_in_one_line(record: Path, tmp_path: Path) -> None:
    prepare_weather(record, tmp_path)
    (weights,) = tmp_path.glob("predictor-*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=weights.parent.name) as caught:
        prepare_weather(record, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [{"stride": 0}, {"hidden": 0}, {"epochs": 0}, {"passes": 1}, {"split_seed": -1}, {"train_windows": 0},
     {"noise": -0.1}, {"noise": math.nan}, {"noise": math.inf}],
)  # fmt: skip
def test_options_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"--{next(iter(wrong)).replace('_', '-')} is "):
        replace(WeatherOptions(), **wrong)
    WeatherOptions(stride=1, hidden=1, epochs=1, passes=2, split_seed=0, noise=0)


# -- the paper's number of training windows ------------------------------------------------------------------------


def write_eight_years(path: Path) -> Path:
    """Write a record like the paper's: 2009 to 2016, 420,551 rows in its layout, with gaps and repeated rows."""
    minutes = np.arange(np.datetime64("2009-01-01T00:10"), np.datetime64("2017-01-01T00:10"), np.timedelta64(10, "m"))
    kept = np.ones(len(minutes), dtype=bool)
    for day in ("2010-05-03", "2014-09-24", "2016-10-25"):  # 181 rows each
        kept &= (minutes < np.datetime64(f"{day}T07:00")) | (minutes >= np.datetime64(f"{day}T07:00") + 10 * 181)
    rows = minutes[kept]
    rows = np.concatenate([rows, rows[5_000 : 5_000 + 420_551 - len(rows)]])
    lines = (
        f"{at[8:10]}.{at[5:7]}.{at[:4]} {at[11:16]}:00,{row % 144 / 10}" for row, at in enumerate(rows.astype(str))
    )
    path.write_text("\n".join(["Date Time,T (degC)", *lines]) + "\n")
    return path


def test_eight_years_have_the_papers_training_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training part alone has 70,080; the others, and the data of the predictor, are those of the preset paper."""
    record = write_eight_years(tmp_path / "eight_years.csv")
    options = {name: replace(ENTRY.presets[name], data=str(record)) for name in ("paper", "paper-size")}
    trained_on = []

    def untrained(folder: Path, examples: Examples, *_: Any) -> Forecaster:
        trained_on.append(len(examples))
        return Forecaster(2, 0.1)

    monkeypatch.setattr(weather_task, "load_or_train", untrained)
    series = read_series(record)
    assert series.cleaning.rows == 420_551
    monkeypatch.setattr(weather_task, "load_series", lambda _: series)
    paper, sized = (prepare(one, tmp_path, torch.device("cpu"), Silent()) for one in options.values())
    assert len(sized.split("train")) == PUBLISHED_WINDOWS == 70_080
    assert len(paper.split("train")) > 140_000
    assert torch.isin(sized.split("train").ids, paper.split("train").ids).all()
    for part in ("validation", "test"):
        assert torch.equal(sized.split(part).ids, paper.split(part).ids)
    assert trained_on[0] == trained_on[1]
    assert "train 70080" in sized.describe()["windows"]


def test_hourly_windows_of_eight_years_are_the_papers_count_before_splitting() -> None:
    """8 x 365 x 24: the count of the whole record, of which a split leaves a part for training."""
    minutes = np.arange(0, 8 * 365 * 24 * 60 + 17 * STEP, STEP)
    series = Series(minutes, np.zeros(len(minutes)), "eight years", "", Cleaning(len(minutes), 0, 0, 0, 0))
    windows = make_windows(series, stride=6)
    assert len(windows) == PUBLISHED_WINDOWS
    assert 24_000 < len(split_windows(windows, "weeks", 0).train) < 25_000


def test_a_short_record_says_how_many_windows_it_has(record: Path, tmp_path: Path, weather: WeatherTask) -> None:
    n = len(weather.split("train"))
    with pytest.warns(ShortRecordWarning, match=rf"has {n} training windows .*fewer than the 70,080 .*--data jena"):
        task = prepare_weather(record, tmp_path, train_windows=PUBLISHED_WINDOWS)
    assert torch.equal(task.split("train").ids, weather.split("train").ids)
    assert len(prepare_weather(record, tmp_path, train_windows=n).split("train")) == n  # enough: no warning
    assert len(prepare_weather(record, tmp_path, train_windows=5).split("train")) == 5


def test_presets_change_sizes_alone() -> None:
    """How rejectors are made is the business of recipes."""
    defaults = WeatherOptions()
    for options in ENTRY.presets.values():
        assert options == replace(
            defaults, stride=options.stride, epochs=options.epochs, train_windows=options.train_windows
        )


def test_the_scale_is_the_spread_of_the_observations() -> None:
    """Also where temperatures hardly change."""
    inputs = 5 + 0.1 * torch.randn(8, 14, generator=torch.Generator().manual_seed(0))
    examples = Examples(inputs, inputs[:, :6], torch.arange(8))
    model = train_forecaster(examples, ForecasterOptions(hidden=2, epochs=1), torch.device("cpu"))
    torch.testing.assert_close(model.scale, inputs[:, :12].std())


def test_the_task_describes_itself(weather: WeatherTask) -> None:
    described = weather.describe()
    assert weather.series.fingerprint in described["data"]
    assert weather.predictor.fingerprint in described["predictor"]
    assert f"test {len(weather.split('test'))}" in described["windows"]
    assert "0.1" in described["expert"]


# -- drawing -------------------------------------------------------------------------------------------------------


def test_examples_show_degrees_and_their_authors(record: Path, tmp_path: Path) -> None:
    task = prepare_weather(record, tmp_path)
    examples = task.split("test").select(torch.arange(2))
    policy = HandOff(torch.tensor([6, 2]))
    drawn = task.draw(examples, {0.5: roll_out(task.predictor, task.expert, examples, policy, task.spec)})
    assert is_harmless(drawn)
    assert [drawn.count(f'class="tokens-{author}"') - 1 for author in ("predictor", "expert")] == [8, 4]  # 1: legend
    truth = "  ".join(f"{value:.1f}" for value in examples.targets[1].tolist()).replace("-", "\N{MINUS SIGN}")
    assert truth in drawn
    assert "4 of 6 by the expert" in drawn
