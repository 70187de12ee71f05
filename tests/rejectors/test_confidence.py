"""The confidence baselines against the formulas of the paper's appendix, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracles import rows_of
from torch import Tensor

from seqdefer.engine.drafts import draft
from seqdefer.errors import OptionError
from seqdefer.evaluation.curves import once_confidence_sweep
from seqdefer.interfaces import DraftRejector
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.rejectors.confidence import CHOW, ChowMean, ChowQuantile, ChowSum, Confidence, confidence_of
from seqdefer.rejectors.losses import hand_off_grid
from seqdefer.tasks.weather.task import WeatherTask
from seqdefer.testing import ToyTask
from seqdefer.types import Draft, Sequences


def make_draft(lengths: list[int], seed: int = 0) -> Draft:
    """Random uncertainties; past the ends stand values that would spoil any score they got into."""
    generator = torch.Generator().manual_seed(seed)
    n, longest = len(lengths), 6
    sequences = Sequences(torch.zeros(n, longest, dtype=torch.long), torch.tensor(lengths))
    past = ~sequences.mask()
    uncertainty, entropy = (torch.rand(n, longest, generator=generator).masked_fill(past, 1e6) for _ in range(2))
    return Draft(torch.zeros(n, 1), sequences, torch.zeros(n, longest, 1), uncertainty, entropy)


def by_hand(drafted: Draft, formula: Callable[[list[float]], float]) -> Tensor:
    rows = zip(drafted.uncertainty.tolist(), drafted.sequences.lengths.tolist(), strict=True)
    return torch.tensor([formula(row[:length]) for row, length in rows])


def quantile(values: list[float], level: float) -> float:
    """With straight lines between the ordered values."""
    ordered, place = sorted(values), level * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


FORMULAS: list[tuple[DraftRejector, Callable[[list[float]], float]]] = [
    (ChowSum(), sum),
    (ChowMean(), lambda values: sum(values) / len(values)),
    (ChowQuantile(0.0), min),
    (ChowQuantile(1.0), max),
    (ChowQuantile(0.4), lambda values: quantile(values, 0.4)),
    (ChowQuantile(0.8), lambda values: quantile(values, 0.8)),
]


@pytest.mark.parametrize(("rejector", "formula"), FORMULAS)
def test_whole_scores_are_the_papers(rejector: DraftRejector, formula: Callable[[list[float]], float]) -> None:
    drafted = make_draft([1, 2, 3, 4, 5, 6, 6, 1])
    torch.testing.assert_close(rejector.score(drafted), by_hand(drafted, formula))


def test_the_names_are_the_papers() -> None:
    quantiles = ["ChowQuantile0.0", "ChowQuantile0.4", "ChowQuantile0.8", "ChowQuantile1.0"]
    assert sorted(CHOW) == sorted(["ChowMean", "ChowSum", *quantiles])
    drafted = make_draft([2, 5, 6])
    for name in quantiles:
        level = float(name.removeprefix("ChowQuantile"))
        torch.testing.assert_close(CHOW[name].score(drafted), ChowQuantile(level).score(drafted))
    torch.testing.assert_close(CHOW["ChowMean"].score(drafted), ChowMean().score(drafted))
    torch.testing.assert_close(CHOW["ChowSum"].score(drafted), ChowSum().score(drafted))


@pytest.mark.parametrize("level", [-0.1, 1.1, float("nan")])
def test_quantile_levels_out_of_range(level: float) -> None:
    with pytest.raises(OptionError, match="it must be from 0 to 1"):
        ChowQuantile(level)


def test_token_scores_are_what_the_predictor_says() -> None:
    task = ToyTask(n=6)
    examples = task.split("test")
    state, context = task.predictor.start(examples.inputs)
    proposal = task.predictor.propose(state)
    for measure, expected in (("uncertainty", proposal.uncertainty), ("entropy", proposal.entropy)):
        rejector = Confidence(measure)  # type: ignore[arg-type]
        memory = rejector.start(context)
        score, memory = rejector.score(memory, 0, proposal)
        assert torch.equal(score, expected)
        rows = torch.tensor([3, 3, 0])
        assert torch.equal(rejector.score(rejector.select(memory, rows), 0, proposal.select(rows))[0], score[rows])


def test_real_numbers_have_no_entropy(weather: WeatherTask) -> None:
    examples = weather.split("test").select(torch.arange(3))
    drafted = draft(weather.predictor, examples, weather.spec)
    assert torch.equal(confidence_of(drafted, "uncertainty"), drafted.uncertainty)
    with pytest.raises(OptionError, match="no entropy"):
        confidence_of(drafted, "entropy")
    state, context = weather.predictor.start(examples.inputs)
    rejector = Confidence("entropy")
    with pytest.raises(OptionError, match="no entropy"):
        rejector.score(rejector.start(context), 0, weather.predictor.propose(state))


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("measure", ["uncertainty", "entropy"])
def test_one_time_confidence_hands_off_before_the_least_sure_token(size: int, measure: str) -> None:
    """OneTimeScore and OneTimeEntropy: j = argmax of -log p or H over the allowed hand-offs within the draft."""
    task = ToyTask(n=20)
    examples = task.split("test")
    drafted = draft(task.predictor, examples, task.spec)
    table, _ = hand_off_table(task, examples, drafted)
    grid = hand_off_grid(task.spec.length, size)
    values = confidence_of(drafted, measure)  # type: ignore[arg-type]
    swept = once_confidence_sweep(values, drafted.sequences.lengths, grid, table)
    for row, _ in enumerate(rows_of(examples)):
        inside = [k for k in grid[:-1].tolist() if k < drafted.sequences.lengths[row]]
        best = max(inside, key=lambda k: (float(values[row, k]), -k))
        assert swept.scores[row] == float(values[row, best])
        assert (swept.start[0] + swept.change[0])[row] == float(table.deferred[row, best])
        assert (swept.start[1] + swept.change[1])[row] == float(table.loss[row, best])
    assert np.array_equal(swept.start[1], table.loss[:, -1].double().numpy())
