"""The training loop: which epoch it keeps, and in which steps it learns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from seqdefer.errors import OptionError
from seqdefer.hyperparameters import Settings
from seqdefer.rejectors.training import History, fit

QUICK = Settings(
    learning_rate=1e-2, patience=5, architecture="draft_mlp", layers=1, units=16, dropout=0.0, epochs=30,
    weight_decay=0.0, samples=0, batch_size=64,
)  # fmt: skip


def follow(
    validation: list[float], *, patience: int = 3, delta: float = 0.1, warm_up: int = 0
) -> tuple[nn.Linear, History, list[Tensor]]:
    """Fit a network with scripted validation losses; return it, its history and its weights after each epoch."""
    torch.manual_seed(0)
    network, script, weights = nn.Linear(2, 1), iter(validation), []

    def scripted() -> Tensor:
        weights.append(network.weight.detach().clone())
        return torch.tensor(next(script))

    settings = replace(QUICK, patience=patience, delta=delta, epochs=len(validation), batch_size=4)
    data = torch.randn(12, 2)
    loss = lambda rows: network(data[rows]).square().mean()  # noqa: E731
    history = fit(network, 12, loss, scripted, settings, seed=0, warm_up=warm_up)
    return network, history, weights


@pytest.mark.parametrize(
    ("validation", "best", "epochs"),
    [
        ([5.0, 4.0, 3.0, 2.0, 1.0], 4, 5),  # better to the last
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0, 4),  # never better than after the first epoch: that one, not the start
        ([5.0, 1.0, 2.0, 3.0, 0.0], 4, 5),  # better again just before patience ends
        ([5.0, 1.0, 2.0, 3.0, 4.0, 0.0], 1, 5),  # patience ends before it gets better
        ([5.0, 1.0, 2.0, 0.5, 2.0, 2.0, 2.0, 0.0], 3, 7),  # patience starts anew
        ([1.0, 0.95, 0.91, 0.92], 0, 4),  # none is better by delta
        ([1.0, 0.95, 0.91, 0.85, 0.8], 3, 5),  # in sum they are: delta counts from the best, not from the last
        ([math.nan, 2.0, 1.0, math.nan], 2, 4),  # not a number is not better
        ([2.0, math.nan, math.nan, math.nan, 1.0], 0, 4),
    ],
)
def test_the_best_epoch_is_kept(validation: list[float], best: int, epochs: int) -> None:
    network, history, weights = follow(validation)
    assert len(weights) == len(history.training) == len(history.validation) == epochs
    assert history.best == best
    assert torch.equal(network.weight.detach(), weights[best])
    assert not any(torch.equal(weights[best], other) for epoch, other in enumerate(weights) if epoch != best)
    assert not network.training


def test_delta_is_in_the_units_of_the_loss() -> None:
    """In per cent, the paper's delta asks for a hundredth of the improvement."""
    validation = [1.0, 0.99, 0.98, 0.97, 0.96, 0.95]
    assert follow(validation)[1].best == 0
    assert follow([100 * loss for loss in validation])[1].best == 5


@pytest.mark.parametrize(
    ("validation", "warm_up", "best", "epochs"),
    [
        ([1.0, 2.0, 5.0, 4.0, 6.0, 6.0, 6.0, 0.0], 2, 3, 7),  # the best of the later epochs, patience from there
        ([1.0, 2.0, 3.0, 4.0], 1, 1, 4),
        ([1.0, 2.0, 3.0], 5, 2, 3),  # there are no later ones: the last
    ],
)
def test_epochs_of_the_warm_up_are_not_kept(validation: list[float], warm_up: int, best: int, epochs: int) -> None:
    network, history, weights = follow(validation, warm_up=warm_up)
    assert (history.best, len(history.validation)) == (best, epochs)
    assert torch.equal(network.weight.detach(), weights[best])


def test_validation_losses_that_are_never_finite_are_an_error() -> None:
    """It once returned the initial weights, as if they were those of the first epoch."""
    with pytest.raises(OptionError, match="validation loss"):
        follow([math.nan, math.nan, math.inf])


def test_gradients_are_clipped() -> None:
    network = nn.Linear(3, 1)
    norms: list[float] = []

    def after_epoch(_: int) -> None:
        norms.append(float(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]).norm()))

    def steep(rows: Tensor) -> Tensor:
        return 1e3 * network(torch.ones(len(rows), 3)).sum()

    settings = replace(QUICK, epochs=2, clip_norm=0.5, patience=9)
    fit(network, 8, steep, lambda: torch.zeros(()), settings, seed=0, progress=after_epoch)
    assert norms == pytest.approx([0.5, 0.5], rel=1e-4)


def test_weight_decay_shrinks_weights_whatever_the_gradient() -> None:
    """Decoupled, as in AdamW: each step multiplies by 1 - learning rate x decay. As a term of the loss, with Adam, the
    step would not depend on the decay."""
    network = nn.Linear(3, 2, bias=False)
    before = network.weight.detach().clone()
    settings = replace(QUICK, epochs=2, weight_decay=0.5, batch_size=16, patience=9)
    losses = iter([2.0, 1.0])
    fit(network, 64, lambda _: 0 * network.weight.sum(), lambda: torch.tensor(next(losses)), settings, seed=0)
    shrunk = (1 - settings.learning_rate * settings.weight_decay) ** (2 * 64 // 16)  # eight steps
    torch.testing.assert_close(network.weight.detach(), before * shrunk)


def test_every_epoch_sees_every_example_once_in_the_order_of_the_seed() -> None:
    def orders(seed: int) -> list[list[int]]:
        seen: list[list[int]] = []
        network = nn.Linear(1, 1)

        def loss(rows: Tensor) -> Tensor:
            seen[-1].extend(rows.tolist())
            return network(torch.ones(len(rows), 1)).mean()

        settings = replace(QUICK, epochs=3, batch_size=4, patience=9)
        fit(network, 10, loss, lambda: torch.zeros(()), settings, seed=seed, before_epoch=lambda _: seen.append([]))
        return seen

    first = orders(0)
    assert [sorted(epoch) for epoch in first] == [list(range(10))] * 3
    assert first[0] != first[1]
    assert orders(0) == first
    assert orders(1) != first


def test_the_training_loss_is_the_mean_over_examples() -> None:
    """It is weighted by batch size: the last batch may be small."""
    network, values = nn.Linear(1, 1), torch.arange(10.0)
    settings = replace(QUICK, epochs=1, batch_size=4)
    history = fit(network, 10, lambda rows: values[rows].mean() + 0 * network(torch.ones(1, 1)).sum(),
                  lambda: torch.zeros(()), settings, seed=0)  # fmt: skip
    assert history.training == pytest.approx([4.5])


def test_dropout_is_on_in_training_and_off_in_validation() -> None:
    network, modes = nn.Linear(1, 1), []

    def loss(rows: Tensor) -> Tensor:
        modes.append(network.training)
        return network(torch.ones(1, 1)).sum()

    def validation() -> Tensor:
        modes.append(network.training)
        assert not torch.is_grad_enabled()
        return torch.zeros(())

    fit(network, 4, loss, validation, replace(QUICK, epochs=2), seed=0)
    assert modes == [True, False, True, False]


@pytest.mark.parametrize(
    ("least_steps", "expected"),
    [(16, [10] + [20] * 16 + [256] * 25), (32, [10] + [16] * 20 + [200] * 32), (1, [10, 256, 64] + [256] * 25)],
)
def test_small_data_is_cut_into_smaller_batches(least_steps: int, expected: list[int]) -> None:
    sizes: list[int] = []
    network = nn.Linear(1, 1)

    def loss(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return network(torch.ones(1, 1)).sum()

    settings = replace(QUICK, epochs=1, batch_size=256, least_steps=least_steps)
    for n in (10, 320, 6400):
        fit(network, n, loss, lambda: torch.zeros(()), settings, seed=0)
    assert sizes == expected
