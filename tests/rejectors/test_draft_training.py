"""Fitting draft rejectors (whole, once, cost): what they minimise, and that they learn what inputs show."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles import proposal_after, rows_of
from torch import Tensor, nn

from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.budgets.sweeps import hand_off_sweep
from seqdefer.engine.drafts import draft
from seqdefer.errors import OptionError
from seqdefer.evaluation.curves import Ends, curve_of, improvement, optimal_once, random_curve
from seqdefer.hyperparameters import Settings
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.methods.plans import scored_hand_offs
from seqdefer.rejectors import draft_training
from seqdefer.rejectors.draft import DraftMLP, DraftNetwork
from seqdefer.rejectors.draft_training import fit_cost, fit_once, fit_whole
from seqdefer.rejectors.losses import one_time_loss, query_costs
from seqdefer.rejectors.training import History
from seqdefer.testing import ToyTask
from seqdefer.types import Draft, HandOffTable, Sequences
from tests.rejectors.test_training import QUICK

LENGTH = 3


def visible_drafts(n: int, seed: int) -> tuple[Draft, HandOffTable, Tensor]:
    """Return drafts whose context shows the best hand-off among noise, their table and the best hand-offs."""
    generator = torch.Generator().manual_seed(seed)
    best = torch.randint(LENGTH + 1, (n,), generator=generator)
    context = torch.cat([nn.functional.one_hot(best, LENGTH + 1).float(), torch.randn(n, 2, generator=generator)], 1)
    noise = torch.rand(n, LENGTH, 3, generator=generator)
    sequences = Sequences(torch.zeros(n, LENGTH, dtype=torch.long), torch.full((n,), LENGTH))
    loss = 2.0 - 2.0 * nn.functional.one_hot(best, LENGTH + 1).float()
    deferred = torch.arange(LENGTH, -1, -1).expand(n, LENGTH + 1)
    return Draft(context, sequences, noise[..., :2], noise[..., 2], None), HandOffTable(loss, deferred), best


@pytest.mark.parametrize("psi", ["cross_entropy", "mean_absolute_error"])
def test_one_time_rejectors_learn_what_inputs_show(psi: str) -> None:
    train, validation, test = (visible_drafts(400, seed) for seed in range(3))
    grid = torch.arange(LENGTH + 1)
    rejector, _ = fit_once(train[:2], validation[:2], grid, QUICK, alpha=0.1, psi=psi, fingerprint="x", seed=0)
    scores = rejector.score(test[0])
    assert float((scores.argmax(1) == test[2]).float().mean()) > 0.95
    total = test[1].loss + query_costs(test[1].deferred, 0.1, LENGTH)
    assert float(one_time_loss(scores, total)) < 1.1 * float(total.amin(1).mean()) + 0.05
    ends, optimal = Ends.of(test[1]), optimal_once(test[1])
    scored = ScoredHandOffs.of(scores, LENGTH, hand_offs=grid, rule="odds")
    curve = curve_of(hand_off_sweep(scored, test[1]), ends)
    # A threshold in the middle does what the oracle does with as many tokens; past it no one-time method can.
    assert float(curve.at(optimal.deferred[-2])) < 0.1 * ends.predictor_loss.mean()
    assert rejector.notes == {"grid": grid.tolist(), "alpha": 0.1, "psi": psi}
    assert rejector.predictor == "x"


def test_a_grid_of_few_hand_offs_learns_the_best_among_them() -> None:
    train, validation, test = (visible_drafts(400, seed) for seed in range(3))
    grid = torch.tensor([0, 2, LENGTH])
    rejector, _ = fit_once(train[:2], validation[:2], grid, QUICK, alpha=0.1, fingerprint="x", seed=0)
    allowed = (test[2][:, None] == grid).any(1)
    assert rejector.score(test[0]).shape == (400, 3)
    chosen = grid[rejector.score(test[0]).argmax(1)]
    assert float((chosen == test[2])[allowed].float().mean()) > 0.95


@pytest.mark.parametrize(("alpha", "kept"), [(100.0, LENGTH), (0.0, None)])
def test_a_dear_expert_is_not_used(alpha: float, kept: int | None) -> None:
    train, validation, test = (visible_drafts(300, seed) for seed in range(3))
    grid = torch.arange(LENGTH + 1)
    rejector, _ = fit_once(train[:2], validation[:2], grid, QUICK, alpha=alpha, fingerprint="x", seed=0)
    chosen = rejector.score(test[0]).argmax(1)
    assert float((chosen == (test[2] if kept is None else kept)).float().mean()) > 0.95


def test_whole_rejectors_learn_where_the_expert_is_better() -> None:
    def labelled(seed: int) -> tuple[Draft, HandOffTable]:
        drafted, table, best = visible_drafts(300, seed)
        wins = best < 2  # the context shows this, too
        table.loss[:, 0], table.loss[:, -1] = torch.where(wins, 0.0, 1.0), torch.where(wins, 1.0, 0.0)
        table.loss[::7, 0] = table.loss[::7, -1]  # a draw is no win
        return drafted, table

    train, validation, test = (labelled(seed) for seed in range(3))
    rejector, _ = fit_whole(train, validation, QUICK, fingerprint="x", seed=0)
    scores = rejector.score(test[0])
    sure = torch.arange(300) % 7 != 0
    assert float(((scores > 0) == (test[1].loss[:, 0] < test[1].loss[:, -1]))[sure].float().mean()) > 0.95
    ends = Ends.of(test[1])
    curve = curve_of(hand_off_sweep(ScoredHandOffs.of(scores, LENGTH), test[1]), ends)
    assert improvement(curve, random_curve(ends)) > 25


def test_statistics_of_drafts_leave_padding_out() -> None:
    task = ToyTask(n=30)
    labelled = []
    for name in ("train", "validation"):
        examples = task.split(name)  # type: ignore[arg-type]
        drafted = draft(task.predictor, examples, task.spec)
        labelled.append((drafted, hand_off_table(task, examples, drafted)[0]))
    rejector, _ = fit_whole(*labelled, replace(QUICK, epochs=1), fingerprint="x", seed=0)
    drafted = labelled[0][0]
    mask = drafted.sequences.mask()
    assert not mask.all()
    torch.testing.assert_close(rejector.step_mean[:3], drafted.features[mask].mean(0))
    first = [proposal_after(task, one, []).features[0] for one in rows_of(task.split("train"))]
    torch.testing.assert_close(drafted.features[:, 0], torch.stack(first))


# -- attention, and the estimates of OneTimeCost -------------------------------------------------------------------


SPIKES = 6  # tokens of a draft
GRID = torch.arange(SPIKES + 1)
DRAFT_SETTINGS = {
    "draft_mlp": replace(QUICK, units=48, layers=2, epochs=25, least_steps=24),
    "draft_transformer": replace(QUICK, architecture="draft_transformer", units=16, learning_rate=5e-3, epochs=20),
}
each_by_draft = pytest.mark.parametrize("settings", DRAFT_SETTINGS.values(), ids=DRAFT_SETTINGS)


def spiking_drafts(n: int, seed: int, noise: float = 0.3) -> tuple[Draft, HandOffTable, Tensor]:
    """Return drafts of different lengths; one feature spikes where it is best to hand off, or nowhere."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(SPIKES - 2, SPIKES + 1, (n,), generator=generator)
    best = (torch.rand(n, generator=generator) * (lengths + 1)).long()
    kept = torch.minimum(GRID, lengths[:, None])  # past the end of a draft nothing is left to hand off
    features = noise * torch.randn(n, SPIKES, 2, generator=generator)
    spiking = (best < lengths).nonzero().squeeze(1)
    features[spiking, best[spiking], 0] += 2.0
    loss = torch.where(kept == best[:, None], 0.0, 1.0) + 0.1 * torch.rand(n, 1, generator=generator)
    drafted = Draft(
        torch.randn(n, 2, generator=generator),
        Sequences(torch.zeros(n, SPIKES, dtype=torch.long), lengths),
        features,
        torch.rand(n, SPIKES, generator=generator),
        None,
    )
    return drafted, HandOffTable(loss, lengths[:, None] - kept), best


@pytest.fixture(scope="module")
def spiking() -> list[tuple[Draft, HandOffTable, Tensor]]:
    return [spiking_drafts(n, seed) for seed, n in enumerate((1500, 200, 200))]


@pytest.mark.slow
@each_by_draft
def test_hand_offs_are_learned_from_the_step_that_shows_them(
    settings: Settings, spiking: list[tuple[Draft, HandOffTable, Tensor]]
) -> None:
    train, validation, test = spiking
    once, _ = fit_once(train[:2], validation[:2], GRID, settings, alpha=0.05, fingerprint="x", seed=0)
    cost, _ = fit_cost(train[:2], validation[:2], GRID, settings, fingerprint="x", seed=0)
    lengths = test[0].sequences.lengths
    for rejector, setting in ((once, 0.0), (cost, 0.05)):
        kept = torch.from_numpy(scored_hand_offs(rejector, test[0], SPIKES).kept(setting))
        assert float((torch.minimum(kept, lengths) == test[2]).float().mean()) > 0.9, rejector.rule
    assert (once.kind, cost.kind) == (settings.architecture,) * 2
    assert (once.rule, cost.rule) == ("odds", "cost")
    assert cost.notes == {"grid": GRID.tolist()}


@pytest.mark.slow
@each_by_draft
def test_estimates_approach_the_conditional_mean(settings: Settings) -> None:
    """Two kinds of examples that inputs tell apart, with a known mean loss of each and much noise."""
    means = torch.tensor([[1.0, 2.0, 5.0, 4.0], [3.0, 3.0, 0.0, 4.0]])

    def labelled(n: int, seed: int) -> tuple[Draft, HandOffTable, Tensor]:
        drafted, table, _ = visible_drafts(n, seed)
        kinds = torch.arange(n) % 2
        noise = torch.randn(n, LENGTH + 1, generator=torch.Generator().manual_seed(seed))
        features = kinds[:, None, None].float().expand_as(drafted.features)
        drafted = replace(drafted, context=nn.functional.one_hot(kinds, 2).float(), features=features)
        return drafted, HandOffTable(means[kinds] + noise, table.deferred), kinds

    train, validation, test = labelled(4000, 0), labelled(500, 1), labelled(50, 2)
    settings = replace(settings, epochs=8, learning_rate=3e-3)
    rejector, history = fit_cost(train[:2], validation[:2], torch.arange(LENGTH + 1), settings, fingerprint="x", seed=0)
    estimates = -rejector.score(test[0])
    assert float((estimates - means[test[2]]).abs().mean()) < 0.12
    error = -rejector.score(validation[0]) - validation[1].loss
    unit = train[1].loss.std(0).mean()
    assert history.validation[history.best] == pytest.approx(float((error / unit).square().mean()), rel=1e-4)


def captured_squares(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> tuple[DraftNetwork, Draft, Callable[[Tensor, Tensor], Tensor], Tensor]:
    """Return the network, drafts, loss function and labels that `fit_cost` starts with."""
    noted: list[Any] = []

    def note(network: DraftNetwork, train: Draft, _: Draft, labels: Any, loss_of: Any, *rest: Any) -> History:
        context, steps, mask = network.draft_inputs(train)
        network.standardise(context, steps[mask])
        noted.extend([network, train, loss_of, labels[0]])
        return History()

    monkeypatch.setattr(draft_training, "_fit_draft", note)
    train = spiking_drafts(12, 0)[:2]
    fit_cost(train, train, GRID, settings, fingerprint="x", seed=0)
    network, drafted, loss_of, losses = noted
    return network, drafted, loss_of, losses


@each_by_draft
def test_regression_squares_errors_of_possible_hand_offs(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    network, drafted, loss_of, losses = captured_squares(monkeypatch, settings)
    scores, total = network.eval().score(drafted), 0.0
    unit = float(losses.std(0).mean())
    for row, length in enumerate(drafted.sequences.lengths.tolist()):
        for kept in GRID.tolist():
            if kept < length or kept == SPIKES:
                total += ((-float(scores[row, kept]) - float(losses[row, kept])) / unit) ** 2
    assert float(loss_of(scores, losses)) == pytest.approx(total / losses.numel(), rel=1e-4)


@each_by_draft
def test_regression_has_the_gradient_of_finite_differences(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check in double precision, through attention, masks and impossible hand-offs."""
    network, drafted, loss_of, losses = captured_squares(monkeypatch, settings)
    network.double().train()
    context, steps, mask = network.draft_inputs(drafted)
    assert not mask.all()

    def loss() -> Tensor:
        return loss_of(network(context.double(), steps.double(), mask), losses.double())

    loss().backward()
    for name, weights in network.named_parameters():
        assert weights.grad is not None, name
        place = int(weights.grad.abs().argmax())
        flat, slope = weights.data.view(-1), float(weights.grad.view(-1)[place])
        start = float(flat[place])
        flat[place] = start + 1e-5
        up = loss().item()
        flat[place] = start - 1e-5
        down = loss().item()
        flat[place] = start
        assert (up - down) / 2e-5 == pytest.approx(slope, rel=1e-4, abs=1e-8), name
        assert slope or "in_proj_bias" in name, name


def fit_any(method: str, settings: Settings, **how: Any) -> DraftNetwork:
    train, validation = spiking_drafts(60, 0)[:2], spiking_drafts(30, 1)[:2]
    common = {"fingerprint": "x", "seed": 0, **how}
    if method == "whole":
        return fit_whole(train, validation, settings, **common)[0]
    if method == "once":
        return fit_once(train, validation, GRID, settings, alpha=0.1, **common)[0]
    return fit_cost(train, validation, GRID, settings, **common)[0]


each_method = pytest.mark.parametrize("method", ["whole", "once", "cost"])


@each_method
@each_by_draft
def test_the_same_seed_fits_the_same_weights_by_any_method(method: str, settings: Settings) -> None:
    settings = replace(settings, epochs=2, dropout=0.2)

    def weights(seed: int) -> dict[str, Tensor]:
        torch.rand(3)  # earlier draws do not matter
        return fit_any(method, settings, seed=seed).state_dict()

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@each_method
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_network_works_on_a_device_and_comes_back(
    method: str, device: str, spy: Callable[[Any, str], list[tuple[Any, ...]]]
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    moved = spy(DraftMLP, "to")
    network = fit_any(method, replace(QUICK, epochs=1), device=torch.device(device))
    assert [str(where) for _, where in moved] == [device]
    assert {str(tensor.device) for tensor in network.state_dict().values()} == {"cpu"}
    assert network.score(spiking_drafts(5, 2)[0]).device.type == "cpu"
    assert not network.training


def test_nan_estimates_are_an_error() -> None:
    """A diverged network scored NaN, which once counted as an error of 0: the best epoch of all."""
    with pytest.raises(OptionError, match="the validation loss was nan"):
        fit_any("cost", replace(QUICK, learning_rate=1e30, clip_norm=1e30, epochs=3))


@each_method
def test_token_networks_do_not_score_drafts(method: str) -> None:
    with pytest.raises(OptionError, match="unknown draft architecture 'lstm'; available: draft_mlp, draft_transformer"):
        fit_any(method, replace(QUICK, architecture="lstm"))


def test_one_example_is_enough_to_estimate() -> None:
    """A single example has no spread to divide by."""
    one = spiking_drafts(1, 0)[:2]
    rejector, history = fit_cost(one, one, GRID, replace(QUICK, epochs=2), fingerprint="x", seed=0)
    assert all(map(math.isfinite, history.validation))
    assert rejector.score(one[0]).shape == (1, SPIKES + 1)
