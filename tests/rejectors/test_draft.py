"""Networks that score whole drafts: what they compute, and that rows do not mix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from networks import DRAFT_NETWORKS, drafted, make
from torch import Tensor, nn

from seqdefer.rejectors import draft
from seqdefer.rejectors.draft import OUTPUT_RULES, DraftMLP, DraftTransformer
from seqdefer.rejectors.token import MLPRejector
from seqdefer.types import Draft

each_network = pytest.mark.parametrize("kind", DRAFT_NETWORKS)
each_rule = pytest.mark.parametrize("rule", OUTPUT_RULES)
each_grid = pytest.mark.parametrize("hand_offs", [(), (0, 1, 2, 5), (0, 1, 2, 3, 4, 5)])


@pytest.mark.parametrize("kind", [MLPRejector, DraftMLP])
@pytest.mark.parametrize("layers", [1, 3])
def test_hidden_layers_and_units(kind: Any, layers: int) -> None:
    body = make(kind, layers=layers, units=7).body
    linear = [module for module in body if isinstance(module, nn.Linear)]
    assert [module.out_features for module in linear] == [7] * layers + [1]
    assert [module.p for module in body if isinstance(module, nn.Dropout)] == [0.5] * layers


@torch.no_grad()
def test_the_perceptron_reads_the_context_and_all_steps_in_one_row() -> None:
    """Row by row: encoder state, then each step's state and confidence; ReLU; scores as they are, without bounds."""
    network = make(DraftMLP, layers=1, units=8, has_entropy=False, hand_offs=(0, 1, 2, 3, 4, 5))
    (first, last), plain = [module for module in network.body if isinstance(module, nn.Linear)], drafted()
    last.weight *= 1e6
    whole = (plain.sequences.lengths == 5).nonzero().squeeze(1)  # no hand-off is past the end
    assert len(whole) > 1
    for row in whole.tolist():
        steps = torch.cat([plain.features[row], plain.uncertainty[row].clamp(min=1e-12).log()[:, None]], 1)
        steps = ((steps - network.step_mean) / network.step_scale).clamp(-10, 10)
        context = ((plain.context[row] - network.context_mean) / network.context_scale).clamp(-10, 10)
        inputs = torch.cat([context, *steps])
        hidden = [
            max(0.0, float(inputs @ weight + bias)) for weight, bias in zip(first.weight, first.bias, strict=True)
        ]
        expected = last.weight @ torch.tensor(hidden) + last.bias
        torch.testing.assert_close(network.score(plain)[row], expected, rtol=1e-4, atol=1.0)
        assert expected.abs().max() > 1e4


@each_network
@each_rule
@each_grid
def test_scores_ignore_padding(kind: Any, rule: str, hand_offs: tuple[int, ...]) -> None:
    network, plain = make(kind, hand_offs=hand_offs, rule=rule), drafted()
    mask = plain.sequences.mask()
    spoilt = replace(
        plain,
        features=plain.features.masked_fill(~mask[..., None], torch.nan),
        uncertainty=plain.uncertainty.masked_fill(~mask, torch.nan),
    )
    scores = network.score(plain)
    assert scores.shape == ((10, len(hand_offs)) if hand_offs else (10,))
    assert not scores.isnan().any()
    assert not mask.all()
    assert torch.equal(network.score(spoilt), scores)
    assert not torch.equal(network.score(replace(plain, features=plain.features + 1)), scores)


@each_network
@each_rule
@each_grid
def test_a_batch_of_drafts_is_scored_row_by_row(
    kind: Any, rule: str, hand_offs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, plain = make(kind, hand_offs=hand_offs, rule=rule), drafted()
    scores = network.score(plain)
    alone = torch.cat([network.score(plain.select(torch.tensor([row]))) for row in range(10)])
    torch.testing.assert_close(alone, scores)
    rows = torch.tensor([3, 3, 1])
    torch.testing.assert_close(network.score(plain.select(rows)), scores[rows])
    monkeypatch.setattr(draft, "SCORING_BATCH", 3)
    torch.testing.assert_close(network.score(plain), scores)


@torch.no_grad()
def raw_outputs(network: Any, plain: Draft) -> Tensor:
    context, steps, mask = network.draft_inputs(plain)
    seen = torch.where(mask[..., None], network._steps(steps), 0.0)
    return network.outputs(network._context(context), seen, mask)  # type: ignore[no-any-return]


@each_network
def test_odds_of_ended_hand_offs_are_those_of_no_deferral(kind: Any) -> None:
    """The softmax of hand-offs past a draft's end is 0, and no deferral gets their share."""
    grid = (0, 1, 3, 5)
    network, plain = make(kind, hand_offs=grid), drafted()
    raw, merged = (values.softmax(1) for values in (raw_outputs(network, plain), network.score(plain)))
    is_some_ended = False
    for row, length in enumerate(plain.sequences.lengths.tolist()):
        ended = [column for column, kept in enumerate(grid[:-1]) if kept >= length]
        is_some_ended |= bool(ended)
        expected = raw[row].clone()
        expected[-1] += expected[ended].sum()
        expected[ended] = 0.0
        torch.testing.assert_close(merged[row], expected)
    assert is_some_ended


@each_network
def test_ended_hand_offs_have_no_estimate(kind: Any) -> None:
    grid = (0, 1, 3, 5)
    network, plain = make(kind, hand_offs=grid, rule="cost"), drafted()
    scores = network.score(plain)
    for row, length in enumerate(plain.sequences.lengths.tolist()):
        assert (scores[row] == -torch.inf).tolist() == [*(kept >= length for kept in grid[:-1]), False]
        assert not scores[row].isnan().any()


def test_outputs_past_the_end_have_no_part_in_an_estimate() -> None:
    """Where two hand-offs are past the end of a draft, the output of the second counts for nothing."""
    network, plain = make(DraftMLP, hand_offs=(0, 1, 3, 5), rule="cost"), drafted()
    short = plain.select((plain.sequences.lengths == 1).nonzero().squeeze(1))
    assert len(short)
    scores = network.score(short)
    network.body[-1].bias.data[2] += 1.0
    assert torch.equal(network.score(short), scores)
    network.body[-1].bias.data[0] += 1.0
    assert not torch.equal(network.score(short), scores)


def test_nothing_attends_to_places_past_the_end() -> None:
    network, plain = make(DraftTransformer, hand_offs=tuple(range(6))), drafted()
    short = plain.select((plain.sequences.lengths == 2).nonzero().squeeze(1))
    assert len(short)
    before = raw_outputs(network, short)
    network.places.data[2:5] += torch.randn(3, network.sizes.units)  # the last is the context's
    changed = (raw_outputs(network, short) - before).abs().amax(0) > 1e-5
    assert changed.tolist() == [False, False, True, True, True, False]


@each_network
def test_a_network_without_weights_estimates_the_mean_losses(kind: Any) -> None:
    network, plain = make(kind, hand_offs=(0, 1, 3, 5), rule="cost"), drafted()
    losses = torch.rand(50, 4) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    network.standardise_losses(losses)
    last = network.head if kind is DraftTransformer else network.body[-1]
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    whole = plain.select((plain.sequences.lengths == 5).nonzero().squeeze(1))
    torch.testing.assert_close(-network.score(whole), losses.mean(0).expand(len(whole), -1))


def test_the_transformer_reads_a_hand_off_where_its_token_stands() -> None:
    """Without attention, an output depends on its own token; no deferral and whole deferral on the context."""
    network = make(DraftTransformer, hand_offs=tuple(range(6)), layers=1)
    nn.init.zeros_(network.body.layers[0].self_attn.out_proj.weight)
    whole = make(DraftTransformer, layers=1)
    whole.load_state_dict(network.state_dict())
    plain = drafted()
    assert torch.equal(raw_outputs(network, plain)[:, -1:], raw_outputs(whole, plain))
    for place in range(5):
        features = plain.features.clone()
        features[:, place] += 1.0
        changed = raw_outputs(network, replace(plain, features=features)) != raw_outputs(network, plain)
        seen = plain.sequences.lengths > place
        assert changed[seen].any(0).tolist() == [column == place for column in range(6)]
        assert not changed[~seen].any()
    changed = raw_outputs(network, replace(plain, context=plain.context + 1)) != raw_outputs(network, plain)
    assert changed.any(0).tolist() == [False] * 5 + [True]


def test_the_transformer_attends_to_other_tokens_and_sees_positions() -> None:
    network, plain = make(DraftTransformer, hand_offs=tuple(range(6))), drafted()
    features = plain.features.clone()
    features[:, 0] += 1.0
    moved = raw_outputs(network, replace(plain, features=features)) - raw_outputs(network, plain)
    longest = plain.sequences.lengths == 5
    assert bool((moved[longest].abs() > 1e-6).all())
    moved = raw_outputs(network, replace(plain, context=plain.context + 1)) - raw_outputs(network, plain)
    assert bool((moved[longest].abs() > 1e-6).all())  # to the context, too
    same = replace(plain, features=plain.features[:, :1].expand_as(plain.features).clone(),
                   uncertainty=plain.uncertainty[:, :1].expand_as(plain.uncertainty).clone(),
                   entropy=plain.entropy[:, :1].expand_as(plain.entropy).clone())  # type: ignore[index, union-attr]  # fmt: skip
    assert raw_outputs(network, same)[0].unique().numel() == 6
