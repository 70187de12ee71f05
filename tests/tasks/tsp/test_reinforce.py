"""Training the pointer network: its gradient is that of the expected length, and resuming changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqdefer.errors import CheckpointError, OptionError
from seqdefer.storage.files import fingerprint
from seqdefer.tasks.tsp import reinforce
from seqdefer.tasks.tsp.data import gaussian_instances
from seqdefer.tasks.tsp.pointer import PointerNet
from seqdefer.tasks.tsp.reinforce import PointerTraining, TrainingOptions, rotate, sample_tours, schedule, train
from seqdefer.tasks.tsp.task import greedy_tours
from seqdefer.tasks.tsp.tours import distances, tour_lengths

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
TINY = TrainingOptions(cities=6, instances=20, hidden=4, epochs=3, samples=3, batch_size=8)
TOURS = torch.tensor(list(permutations(range(4))))  # (24, 4)


def make_net(hidden: int = 3) -> PointerNet:
    """Return a float64 network, for finite differences, whose tours differ in probability."""
    torch.manual_seed(5)
    net = PointerNet(hidden).double()
    with torch.no_grad():
        for layer in (net.embed, net.pointer, net.pointer_key):
            layer.weight.mul_(4)
        net.begin.normal_()
    return net


def four_cities() -> Tensor:
    return torch.randn(1, 4, 2, generator=torch.Generator().manual_seed(1)).double()


def log_probs_of(net: PointerNet, cities: Tensor, tours: Tensor) -> Tensor:
    """Return log probabilities of tours (M, N) of one instance (1, N, 2), step by step. (M,)"""
    encoded = net.encode(cities).select(torch.zeros(len(tours), dtype=torch.long))
    rows, visited = torch.arange(len(tours)), torch.zeros(tours.shape, dtype=torch.bool)
    inputs, hidden, memory = net.begin.expand(len(tours), -1), encoded.hidden, encoded.memory
    total = torch.zeros(len(tours), dtype=cities.dtype)
    for city in tours.unbind(1):
        hidden, memory = net.read(inputs, hidden, memory)
        total = total + net.point(encoded, hidden, visited)[rows, city]
        visited = visited.scatter(1, city[:, None], True)
        inputs = encoded.embedded[rows, city]
    return total


def expected_length(net: PointerNet, cities: Tensor) -> Tensor:
    """Return the sum of probability times length over all tours."""
    return log_probs_of(net, cities, TOURS).exp() @ tour_lengths(cities.expand(24, -1, -1), TOURS)


@pytest.fixture(scope="module")
def slopes() -> list[Tensor]:
    """The gradient of the expected length by finite differences."""
    net, cities, step, found = make_net(), four_cities(), 1e-5, []
    with torch.no_grad():
        for weights in net.parameters():
            slope = torch.zeros_like(weights)
            for place in range(weights.numel()):
                value = float(weights.view(-1)[place])
                ends = []
                for shifted in (value + step, value - step):
                    weights.view(-1)[place] = shifted
                    ends.append(float(expected_length(net, cities)))
                weights.view(-1)[place] = value
                slope.view(-1)[place] = (ends[0] - ends[1]) / (2 * step)
            found.append(slope)
    return found


# -- the gradient --------------------------------------------------------------------------------------------------


def test_tours_have_probabilities() -> None:
    with torch.no_grad():
        probabilities = log_probs_of(make_net(), four_cities(), TOURS).exp()
    assert float(probabilities.sum()) == pytest.approx(1)
    assert float(probabilities.max() / probabilities.min()) > 3  # otherwise the tests below would prove little


@torch.no_grad()
def test_tours_are_sampled_with_their_probabilities() -> None:
    """Check the frequencies of 20,000 samples, and the log probability returned with each."""
    net, cities, n = make_net(), four_cities(), 20_000
    encoded = net.encode(cities).select(torch.zeros(n, dtype=torch.long))
    tours, told = sample_tours(net, encoded, torch.Generator().manual_seed(0))
    expected = log_probs_of(net, cities, TOURS)
    which = (tours[:, None] == TOURS).all(2).long().argmax(1)
    assert torch.equal(TOURS[which], tours)
    torch.testing.assert_close(told, expected[which])
    counts = torch.bincount(which, minlength=24)
    chi = float(((counts - n * expected.exp()) ** 2 / (n * expected.exp())).sum())
    assert chi < 50  # 23 degrees of freedom: passed by one in a thousand


@torch.no_grad()
def test_greedy_takes_the_likeliest_city_at_every_step() -> None:
    net, cities = make_net(), four_cities()
    tour, told = sample_tours(net, net.encode(cities), None)
    torch.testing.assert_close(told, log_probs_of(net, cities, tour))
    assert torch.equal(tour, greedy_tours(net.float(), cities.float(), CPU))


@pytest.mark.parametrize("samples", [2, 3])
def test_the_gradient_is_that_of_the_expected_length(samples: int, slopes: list[Tensor]) -> None:
    """Up to a factor: the mean of K tours includes the tour itself, so with g = grad log p and lengths l

        E (l_1 - (l_1 + ... + l_K) / K) g_1 = (1 - 1/K) E l_1 g_1 - (K - 1)/K E l_2 E g_1 = (K - 1)/K grad E l,

    as E g = 0 and tours are drawn independently. Here the expectation is taken over all draws of K tours, not sampled:
    each is a row of a batch, and its derivatives by the log probabilities are what training computes."""
    net, cities = make_net(), four_cities()
    draws = torch.tensor(list(product(range(24), repeat=samples)))  # (24^K, K)
    lengths = tour_lengths(cities.expand(24, -1, -1), TOURS)
    log_probs = log_probs_of(net, cities, TOURS)
    leaves = log_probs.detach()[draws].requires_grad_()
    training = PointerTraining(cities.float(), replace(TINY, cities=4, instances=1, samples=samples, epochs=1), CPU)
    training._sample = lambda *_: (lengths[draws], leaves)  # type: ignore[method-assign]
    training.run_epoch()
    assert leaves.grad is not None
    weights = log_probs.detach()[draws].sum(1).exp()  # probability of the draw
    by_tour = torch.zeros(24, dtype=torch.float64)
    by_tour.index_add_(0, draws.flatten(), (len(draws) * leaves.grad * weights[:, None]).flatten())
    (log_probs @ by_tour).backward()
    largest = max(float(slope.abs().max()) for slope in slopes)
    for (name, parameter), slope in zip(net.named_parameters(), slopes, strict=True):
        assert parameter.grad is not None
        expected = (samples - 1) / samples * slope
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-6 * largest, msg=name)
    assert largest > 0.01


def test_a_step_follows_the_gradient_of_the_tours_it_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recompute one epoch of one batch: rotated cities, K tours each, the surrogate, clipping."""
    options = replace(TINY, epochs=1, instances=5, clip_norm=1e-3)
    cities = gaussian_instances(5, 6, seed=0)
    training, seen = PointerTraining(cities, options, CPU), []

    def watch(*arguments: Any) -> tuple[Tensor, Tensor]:
        seen.append((arguments[1].nodes.detach(), *sample_tours(*arguments)))
        return seen[-1][1:]

    monkeypatch.setattr(reinforce, "sample_tours", watch)
    mean = training.run_epoch()
    ((nodes, tours, log_probs),) = seen
    got = {name: parameter.grad for name, parameter in training.model.named_parameters()}
    torch.manual_seed(options.seed)
    net = PointerNet(options.hidden)
    # The lengths of turned cities are those of the cities; which instance is which, the encoder's states tell apart.
    assert len(nodes.unique(dim=0)) == 5
    assert all(torch.equal(nodes[3 * row], nodes[3 * row + other]) for row in range(5) for other in range(3))
    order, turned = drawn_by(options, cities)
    lengths = tour_lengths(cities[order].repeat_interleave(3, 0), tours).view(5, 3)
    assert mean == pytest.approx(float(lengths.mean()), rel=1e-5)
    again = torch.stack([log_probs_of(net, turned[row][None], tours[3 * row : 3 * row + 3]) for row in range(5)])
    torch.testing.assert_close(again.flatten(), log_probs, rtol=1e-4, atol=1e-5)
    ((lengths - lengths.mean(1, keepdim=True)).float() * again).mean().backward()
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
    assert norm > 2e-3, "there was nothing to clip"
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(got[name], parameter.grad * 1e-3 / norm, rtol=1e-3, atol=1e-7)


def drawn_by(options: TrainingOptions, cities: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order of the first epoch and its rotated cities."""
    seed = int(fingerprint(options.seed, 0), 16) % 2**63
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(cities), generator=generator)
    return order, rotate(cities[order], generator)


# -- what is shown, and how fast -----------------------------------------------------------------------------------


def test_rotation_keeps_distances() -> None:
    cities = gaussian_instances(400, 7, seed=3)
    turned = rotate(cities, torch.Generator().manual_seed(0))
    torch.testing.assert_close(distances(turned), distances(cities), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(turned.norm(dim=2), cities.norm(dim=2), rtol=1e-4, atol=1e-5)
    assert not torch.equal(turned, rotate(cities, torch.Generator().manual_seed(1)))
    assert torch.equal(turned, rotate(cities, torch.Generator().manual_seed(0)))


def test_half_are_mirrored_and_angles_are_uniform() -> None:
    cities = gaussian_instances(4000, 4, seed=3)
    turned = rotate(cities, torch.Generator().manual_seed(0))
    before, after = ((each[:, 0, 0] * each[:, 1, 1] - each[:, 0, 1] * each[:, 1, 0]) for each in (cities, turned))
    assert float((before.sign() != after.sign()).double().mean()) == pytest.approx(0.5, abs=0.03)
    kept = before.sign() == after.sign()
    for some in (kept, ~kept):
        angles = [torch.atan2(each[some, 0, 1], each[some, 0, 0]) for each in (cities, turned)]
        turns = (angles[1] - angles[0]) % (2 * math.pi)
        quarters = torch.histc(turns, 4, 0, 2 * math.pi) / len(turns)
        torch.testing.assert_close(quarters, torch.full((4,), 0.25), rtol=0, atol=0.04)


def test_the_learning_rate_rises_then_falls_to_zero() -> None:
    rates = [schedule(step / 1000) for step in range(1001)]
    top = rates.index(max(rates))
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0, abs=1e-12)
    assert top == 50
    assert max(rates) > 0.99
    assert all(one < two for one, two in pairwise(rates[: top + 1]))
    assert all(one > two for one, two in pairwise(rates[top:]))
    assert schedule(0.025) == pytest.approx(0.5 * 0.5 * (1 + math.cos(math.pi * 0.025)))


# -- training ------------------------------------------------------------------------------------------------------


def weights_of(net: PointerNet) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def test_training_makes_tours_shorter(tmp_path: Path) -> None:
    """Compared with the initial network on unseen instances."""
    options = TrainingOptions(
        cities=8, instances=512, hidden=16, epochs=6, samples=4, batch_size=32, learning_rate=5e-3
    )
    cities, fresh = gaussian_instances(512, 8, seed=0), gaussian_instances(300, 8, seed=0, stream="test")
    torch.manual_seed(0)
    untrained = PointerNet(16)
    trained = train(cities, options, CPU, tmp_path)
    before, after = (float(tour_lengths(fresh, greedy_tours(net, fresh, CPU)).mean()) for net in (untrained, trained))
    assert after < 0.85 * before
    assert not trained.training


@pytest.mark.parametrize("stop", [1, 2])
def test_resumed_training_equals_uninterrupted_training(stop: int, tmp_path: Path) -> None:
    cities = gaussian_instances(20, 6, seed=0)
    whole = train(cities, TINY, CPU, tmp_path / "whole")
    done: list[int] = []

    class Stopped(Exception):
        pass

    def advance(instances: int) -> None:
        done.append(instances)
        if sum(done) > 20 * stop:  # in the middle of an epoch
            raise Stopped

    with pytest.raises(Stopped):
        train(cities, TINY, CPU, tmp_path / "stopped", advance)
    torch.manual_seed(99)  # another process
    told: list[int] = []
    resumed = train(cities, TINY, CPU, tmp_path / "stopped", told.append)
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert (told[0], sum(told)) == (20 * stop, 60)
    files = [(tmp_path / name / "training.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert files[0] == files[1]


def test_finished_training_is_found_again(tmp_path: Path, spy: Callable[[Any, str], list[Any]]) -> None:
    cities = gaussian_instances(20, 6, seed=0)
    first = train(cities, TINY, CPU, tmp_path)
    epochs = spy(PointerTraining, "run_epoch")
    assert torch.equal(weights_of(train(cities, TINY, CPU, tmp_path)), weights_of(first))
    assert epochs == []


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"epochs": 4}, {"hidden": 5}, {"samples": 4}, {"learning_rate": 2e-3}, {"batch_size": 9}],
    ids=str,
)
def test_training_with_other_options_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    cities, kept = gaussian_instances(20, 6, seed=0), tmp_path / "training.safetensors"
    train(cities, replace(TINY, epochs=1), CPU, tmp_path)
    before = kept.read_bytes()
    with pytest.raises(CheckpointError, match="other options; choose another folder with --out") as caught:
        train(cities, replace(TINY, **{"epochs": 1, **other}), CPU, tmp_path)
    assert "\n" not in str(caught.value)
    assert kept.read_bytes() == before
    with pytest.raises(CheckpointError, match="other options"):
        train(gaussian_instances(20, 6, seed=1), replace(TINY, epochs=1), CPU, tmp_path)


def test_damaged_training_is_refused(tmp_path: Path) -> None:
    cities, kept = gaussian_instances(20, 6, seed=0), tmp_path / "training.safetensors"
    train(cities, replace(TINY, epochs=1), CPU, tmp_path)
    kept.write_bytes(kept.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="cannot read") as caught:
        train(cities, replace(TINY, epochs=1), CPU, tmp_path)
    assert "\n" not in str(caught.value)


def test_seeds_make_the_network(tmp_path: Path) -> None:
    """Weights depend on the seed, not on the global random state."""
    cities = gaussian_instances(20, 6, seed=0)
    torch.manual_seed(1)
    one = train(cities, TINY, CPU, tmp_path / "one")
    torch.manual_seed(2)
    again = train(cities, TINY, CPU, tmp_path / "again")
    assert torch.equal(weights_of(one), weights_of(again))
    begun = [PointerTraining(cities, replace(TINY, seed=seed), CPU) for seed in (0, 1)]
    assert not torch.equal(weights_of(begun[0].model), weights_of(begun[1].model))
    lengths = [training.run_epoch() for training in begun]
    assert lengths[0] != lengths[1]


def test_every_instance_is_seen_once_an_epoch_in_another_order() -> None:
    cities = gaussian_instances(20, 6, seed=0)
    training = PointerTraining(cities, TINY, CPU)
    shown = list(shown_in(training, epochs=2))
    for epoch in shown:
        torch.testing.assert_close(epoch.sort().values, distances(cities).sum((1, 2)).sort().values, rtol=1e-4, atol=0)
    assert not torch.allclose(shown[0], shown[1])


def shown_in(training: PointerTraining, epochs: int) -> Iterator[Tensor]:
    """Yield the sum of distances of every instance shown, which rotation does not change."""
    sample, seen = training._sample, []

    def watch(cities: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        seen.append(distances(cities).sum((1, 2)))
        return sample(cities, generator)

    training._sample = watch  # type: ignore[method-assign]
    for _ in range(epochs):
        seen.clear()
        training.run_epoch()
        yield torch.cat(seen)


@pytest.mark.parametrize(
    "wrong",
    [{"cities": 3}, {"instances": 0}, {"hidden": 0}, {"hidden": 10**9}, {"epochs": 0}, {"samples": 1},
     {"batch_size": 0}, {"seed": -1}, {"seed": 2**64}, {"instances": 10**13}, {"learning_rate": 0.0},
     {"learning_rate": math.nan}, {"learning_rate": math.inf}, {"learning_rate": 1e300}, {"clip_norm": -1.0}],
    ids=str,
)  # fmt: skip
def test_options_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"--{next(iter(wrong)).replace('_', '-')} is "):
        replace(TrainingOptions(), **wrong)
