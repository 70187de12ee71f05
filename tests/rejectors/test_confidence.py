"""The confidence baselines against the formulas of the paper's appendix, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from seqdefer.engine.drafts import draft
from seqdefer.errors import OptionError
from seqdefer.interfaces import DraftRejector
from seqdefer.methods.plans import scored_hand_offs
from seqdefer.rejectors.confidence import ChowMean, ChowQuantile, ChowSum, Confidence, DraftConfidence, Measure
from seqdefer.tasks.weather.task import WeatherTask
from seqdefer.testing import ToyTask
from seqdefer.types import Draft, Sequences


def make_draft(lengths: list[int], seed: int = 0) -> Draft:
    """Return random uncertainties, with values past the ends that would spoil any score they entered."""
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
    """Return a quantile, with straight lines between the ordered values."""
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


@pytest.mark.parametrize("level", [-0.1, 1.1, float("nan")])
def test_quantile_levels_out_of_range(level: float) -> None:
    with pytest.raises(OptionError, match="it must be from 0 to 1"):
        ChowQuantile(level)


def test_token_scores_are_the_predictors_own() -> None:
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
    with pytest.raises(OptionError, match="no entropy"):
        DraftConfidence((0, 6), "entropy").score(drafted)
    state, context = weather.predictor.start(examples.inputs)
    rejector = Confidence("entropy")
    with pytest.raises(OptionError, match="no entropy"):
        rejector.score(rejector.start(context), 0, weather.predictor.propose(state))


@pytest.mark.parametrize("grid", [(0, 6), (0, 3, 6), (1, 6), (0, 1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("measure", ["uncertainty", "entropy"])
def test_one_time_confidence_hands_off_before_the_least_certain_token(grid: tuple[int, ...], measure: Measure) -> None:
    """OneTimeScore and OneTimeEntropy: argmax of -log p or H over the allowed hand-offs within the draft."""
    drafted = make_draft([6, 2, 3, 4, 5, 6, 6, 2])
    values = getattr(drafted, measure)
    scored = scored_hand_offs(DraftConfidence(grid, measure), drafted, 6)
    for row, length in enumerate(drafted.sequences.lengths.tolist()):
        best = max((kept for kept in grid[:-1] if kept < length), key=lambda k: (float(values[row, k]), -k))
        score = float(values[row, best])
        for threshold, expected in ((score - 1e-6, best), (score, best), (score + 1e-6, 6)):
            assert scored.kept(threshold)[row] == expected
