"""What steers the rollouts that token-level rejectors learn from, and the coins that judge them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.rejectors.token_training import STRATEGIES, Coins, Steering, Strategy, teacher_probability


def test_the_schedule_of_the_teacher() -> None:
    """Five warm-up epochs with the teacher, then 0.95 of the last each epoch, down to 0.5."""
    probabilities = [teacher_probability(epoch) for epoch in range(60)]
    assert probabilities[:5] == [1.0] * 5
    assert probabilities[5:18] == pytest.approx([0.95**k for k in range(1, 14)])
    assert probabilities[18:] == [0.5] * 42
    assert 0.95**13 > 0.5 > 0.95**14


def steer(strategy: Strategy, epoch: int = 0, n: int = 4000) -> tuple[Tensor, Tensor, Tensor]:
    """What a strategy decides, and what the rejector and hindsight would."""
    generator = torch.Generator().manual_seed(0)
    scores, loss, cost = (torch.randn(n, generator=generator) for _ in range(3))
    cost[::10] = loss[::10]
    steering = Steering(strategy, seed=0)
    steering.before_epoch(epoch)
    return steering.decide(scores, steering.thresholds(n), loss, cost), scores >= 0, loss >= cost


def test_free_follows_the_rejector() -> None:
    decided, rejector, _ = steer("free", epoch=30)
    assert torch.equal(decided, rejector)


def test_teacher_follows_hindsight() -> None:
    decided, _, hindsight = steer("teacher", epoch=30)
    assert torch.equal(decided, hindsight)


def test_scheduled_tosses_a_coin_for_each_token() -> None:
    for epoch in (0, 4):
        decided, _, hindsight = steer("scheduled", epoch)
        assert torch.equal(decided, hindsight)
    for epoch in (8, 40):
        decided, rejector, hindsight = steer("scheduled", epoch)
        differ = rejector != hindsight
        assert torch.equal(decided[~differ], rejector[~differ])
        taught = float((decided == hindsight)[differ].float().mean())
        assert taught == pytest.approx(teacher_probability(epoch), abs=0.04)


def test_explore_draws_thresholds_from_recent_scores() -> None:
    steering = Steering("explore", seed=0)
    assert steering.thresholds(5).tolist() == [0.0] * 5  # nothing was scored yet
    scores = torch.linspace(-3, 5, 800)
    plain = steering.decide(scores, torch.zeros(800), torch.zeros(800), torch.zeros(800))
    assert torch.equal(plain, scores >= 0)
    steering.before_epoch(1)
    thresholds = steering.thresholds(2000)
    assert set(thresholds.tolist()) <= set(scores.tolist())
    assert float(thresholds.mean()) == pytest.approx(1.0, abs=0.2)  # spread like the scores
    assert thresholds.unique().numel() > 50
    own = torch.tensor([2.0, -1.0])
    assert steering.decide(torch.tensor([1.0, 1.0]), own, torch.zeros(2), torch.zeros(2)).tolist() == [False, True]


def test_steering_is_the_same_for_the_same_seed() -> None:
    for strategy in STRATEGIES:
        assert torch.equal(steer(strategy, 20)[0], steer(strategy, 20)[0])


def toss(coins: Coins, n: int, length: int) -> tuple[Tensor, Tensor]:
    """Shares (n,), and the decisions (n, L) at all positions of n sequences that do not end."""
    shares, blank = coins.thresholds(n), torch.zeros(n)
    return shares, torch.stack([coins.decide(blank, shares, blank, blank) for _ in range(length)], 1)


def test_coins_decide_the_same_each_time_whatever_is_scored() -> None:
    coins, blank = Coins(3), torch.zeros(50)
    shares, decided = toss(coins, 50, 20)
    again = coins.thresholds(50)
    scored = [coins.decide(torch.randn(50) * 100, again, blank + 1, blank) for _ in range(20)]
    assert torch.equal(again, shares)
    assert torch.equal(torch.stack(scored, 1), decided)
    assert torch.equal(toss(Coins(3), 50, 20)[1], decided)
    assert not torch.equal(toss(Coins(4), 50, 20)[1], decided)


def test_coins_defer_every_share_alike() -> None:
    shares, decided = toss(Coins(0), 400, 200)
    torch.testing.assert_close(shares.sort().values, (torch.arange(400) + 0.5) / 400)
    assert not torch.equal(shares, shares.sort().values)  # which sequence defers how much is drawn
    torch.testing.assert_close(decided.float().mean(1), shares, atol=0.15, rtol=0)
    assert float(decided.float().mean()) == pytest.approx(0.5, abs=0.01)


def test_unknown_strategy() -> None:
    with pytest.raises(OptionError, match="unknown training strategy 'luck'; available: explore, free"):
        Steering("luck", 0)  # type: ignore[arg-type]
