"""Rows of the pronouncing pair say what their states say, and write what the interleaved loop writes."""

from __future__ import annotations

import pytest
import torch
from thresholds import between

from seqdefer.budgets.policies import Threshold
from seqdefer.engine.interleaved import roll_out
from seqdefer.engine.pace import FixedPace, Pace
from seqdefer.engine.speculative import run_all, speculative_loop
from seqdefer.rejectors.confidence import Confidence
from seqdefer.tasks.pronounce.data import END, LETTERS
from seqdefer.tasks.pronounce.model import PronounceExpert, PronouncePredictor, Pronouncer
from seqdefer.types import Examples, SequenceSpec


@pytest.mark.parametrize("at_once", [1, 4, 12])
@pytest.mark.parametrize("ahead", [1, 3, 8, None])
def test_speculation_writes_what_the_interleaved_loop_writes(ahead: int | None, at_once: int) -> None:
    torch.manual_seed(0)
    predictor, expert = PronouncePredictor(Pronouncer(16, 8)), PronounceExpert(Pronouncer(24, 8))
    letters = torch.randint(1, len(LETTERS), (12, 9))
    for row, length in enumerate(torch.randint(1, 10, (12,)).tolist()):
        letters[row, length:] = 0
    examples = Examples(letters, torch.zeros(12, 10, dtype=torch.long), torch.arange(12))
    spec = SequenceSpec(10, END)
    alone = roll_out(predictor, expert, examples, Threshold(Confidence(), 9e9), spec)
    for threshold in (-9e9, *(between(alone.scores, share) for share in (0.43, 0.81)), 9e9):
        policy = Threshold(Confidence(), threshold)
        expected = roll_out(predictor, expert, examples, policy, spec)
        pace = Pace() if ahead is None else FixedPace(ahead)
        found = run_all(speculative_loop(predictor, expert, policy, spec, pace), examples, at_once)
        assert torch.equal(found.sequences.tokens, expected.sequences.tokens)
        assert torch.equal(found.authors, expected.authors)
        assert torch.allclose(found.scores, expected.scores, atol=1e-5)
