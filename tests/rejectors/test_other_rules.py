"""Scores of other people's rules, against the rules as they are written."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.labels.pair_statistics import compare_distributions
from seqdefer.rejectors.other_rules import READ_FIRST_SCORES, ChowToken, ReadFirstRule, RollbackRule
from seqdefer.types import PairStatistics, Proposal

Literal = Callable[[list[float], list[float], int, float], bool]  # q, p, v, alpha -> whether to defer


def total_variation(q: list[float], p: list[float]) -> float:
    return sum(max(0.0, y - x) for x, y in zip(q, p, strict=True))


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


LITERAL: dict[str, Literal] = {
    "Diff": lambda q, p, v, alpha: max(q) < max(p) - alpha,
    "OPT": lambda q, p, v, alpha: max(q) < max(p) - alpha * total_variation(q, p),
    "Token1": lambda q, p, v, alpha: q[v] < max(p) - alpha,
    "Token2": lambda q, p, v, alpha: p[v] < max(p) - alpha,
    "Token3": lambda q, p, v, alpha: p[v] < (1 - alpha) * max(p),
    "Typical": lambda q, p, v, alpha: p[v] <= min(alpha**2, alpha * math.exp(-entropy(p))),  # alpha is delta
}


def distributions(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return log q and log p of all kinds: flat and sharp, alike and different."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = torch.rand(n, 1, generator=generator) * 6
    q = torch.randn(n, 6, generator=generator, dtype=torch.double) * sharpness
    p = q * torch.rand(n, 1, generator=generator).round() + torch.randn(n, 6, generator=generator) * sharpness / 2
    return q.log_softmax(1), p.log_softmax(1)


def proposal_of(log_q: Tensor, log_p: Tensor) -> Proposal:
    tokens = torch.stack([log_q.argmax(1), log_p.argmax(1)], 1)
    uncertainty = -log_q.amax(1)
    pair = compare_distributions(log_q, log_p, tokens)
    return Proposal(tokens[:, 0], torch.zeros(len(tokens), 0), uncertainty, pair=pair)


@pytest.mark.parametrize("name", READ_FIRST_SCORES)
def test_a_threshold_on_the_score_is_the_rule(name: str) -> None:
    """For a grid of alphas; those within rounding of a score decide either way."""
    log_q, log_p = distributions(300)
    proposal = proposal_of(log_q, log_p)
    scores, _ = ReadFirstRule(name).score(torch.zeros(300, 0), 0, proposal)
    decided = 0
    for alpha in torch.linspace(-1.2, 1.2, 97).tolist():
        if name == "Typical" and alpha <= 0:
            continue
        threshold = -alpha if name == "Typical" else math.nextafter(alpha, math.inf)
        for row in range(300):
            if abs(float(scores[row]) - threshold) < 1e-5:
                continue
            q, p = log_q[row].exp().tolist(), log_p[row].exp().tolist()
            rule = LITERAL[name](q, p, int(proposal.tokens[row]), alpha)
            assert rule == (float(scores[row]) >= threshold)
            decided += rule
    assert 0 < decided < 97 * 300


def test_chow_is_its_rule_and_orders_positions_as_uncertainty_does() -> None:
    log_q, log_p = distributions(300)
    proposal = proposal_of(log_q, log_p)
    scores, _ = ChowToken().score(torch.zeros(300, 0), 0, proposal)
    for alpha in torch.linspace(0, 1, 53).tolist():
        for row in range(300):
            if abs(float(scores[row]) - alpha) > 1e-9:
                assert (float(log_q[row].exp().max()) < 1 - alpha) == (float(scores[row]) > alpha)
    assert torch.equal(scores.argsort(), proposal.uncertainty.argsort())


def test_opt_never_defers_where_both_distributions_are_one() -> None:
    """TV = 0: the condition is max q < max p, which is false whatever alpha."""
    log_q, _ = distributions(5)
    proposal = proposal_of(log_q, log_q)
    scores, _ = ReadFirstRule("OPT").score(torch.zeros(5, 0), 0, proposal)
    assert scores.tolist() == [-math.inf] * 5
    assert not any(LITERAL["OPT"](row, row, 0, alpha) for row in log_q.exp().tolist() for alpha in (-9.0, 0.0, 9.0))


def test_the_difference_of_the_largest_probabilities_is_at_most_the_distance() -> None:
    """So OPT's alpha need not be swept beyond -1 and 1."""
    for log_q, log_p in zip(*distributions(500, seed=1), strict=True):
        q, p = log_q.exp().tolist(), log_p.exp().tolist()
        assert abs(max(p) - max(q)) <= total_variation(q, p) + 1e-12


def test_token1_is_diff_where_the_predictor_is_greedy() -> None:
    proposal = proposal_of(*distributions(200))
    diff, token1 = (ReadFirstRule(name).score(torch.zeros(200, 0), 0, proposal)[0] for name in ("Diff", "Token1"))
    assert torch.equal(diff, token1)
    assert proposal.pair is not None
    forced = PairStatistics(**{**vars(proposal.pair), "q_v": proposal.pair.q_v / 2})
    assert bool((READ_FIRST_SCORES["Token1"](forced) > READ_FIRST_SCORES["Diff"](forced)).all())


def test_rules_that_read_first_say_what_they_miss() -> None:
    proposal = Proposal(torch.zeros(2), torch.zeros(2, 0), torch.ones(2))
    with pytest.raises(OptionError, match="this rejector reads first"):
        ReadFirstRule("Diff").score(torch.zeros(2, 0), 0, proposal)
    with pytest.raises(OptionError, match="unknown rule that reads first 'Token4'; available: Diff, OPT, Token1"):
        ReadFirstRule("Token4")
    with pytest.raises(OptionError, match="rho is 0"):
        RollbackRule(0)
