"""The networks: what they compute, that rows do not mix, and what happens to their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from seqdefer.engine.drafts import draft
from seqdefer.errors import CheckpointError, InputError, OptionError
from seqdefer.rejectors.base import HEAD_SIZE, LARGEST, NETWORKS, RULES, Sizes, step_inputs
from seqdefer.rejectors.checkpoints import load_rejector
from seqdefer.rejectors.draft import DraftMLP, DraftNetwork, DraftTransformer, draft_inputs
from seqdefer.rejectors.token import LSTMRejector, MLPRejector, TokenNetwork
from seqdefer.storage import files
from seqdefer.testing import ToyTask
from seqdefer.types import Draft, Proposal

TASK = ToyTask(n=10)
SIZES = Sizes(context=2, features=3, length=5, has_entropy=True, layers=2, units=4, dropout=0.5)
BY_TOKEN = [LSTMRejector, MLPRejector]
BY_DRAFT = [DraftMLP, DraftTransformer]
each_network = pytest.mark.parametrize("kind", [*BY_TOKEN, *BY_DRAFT])
each_by_token = pytest.mark.parametrize("kind", BY_TOKEN)
each_by_draft = pytest.mark.parametrize("kind", BY_DRAFT)
each_rule = pytest.mark.parametrize("rule", RULES)


def make(kind: Any, seed: int = 0, **sizes: Any) -> Any:
    """A network with random weights and statistics, ready to score."""
    torch.manual_seed(seed)
    chosen = replace(SIZES, **{"units": 2 * HEAD_SIZE if kind is DraftTransformer else SIZES.units, **sizes})
    network = kind(chosen, TASK.predictor.fingerprint, {"made": "up"}).eval()
    network.standardise(torch.randn(20, network.sizes.context), 1 + torch.randn(20, network.step_size))
    if chosen.rule == "cost":
        network.standardise_losses(torch.rand(20, chosen.outputs))
    return network


def proposals(n: int, seed: int) -> Proposal:
    generator = torch.Generator().manual_seed(seed)
    random = [torch.rand(n, 3, generator=generator), *(torch.rand(n, generator=generator) for _ in range(2))]
    return Proposal(torch.zeros(n), *random)


def drafted() -> Draft:
    return draft(TASK.predictor, TASK.split("test"), TASK.spec)


@torch.no_grad()
def score_along(network: TokenNetwork, context: Tensor, steps: list[Proposal]) -> Tensor:
    """(B, positions)"""
    state, scores = network.start(context), []
    for position, proposal in enumerate(steps):
        score, state = network.score(state, position, proposal)
        scores.append(score)
    return torch.stack(scores, 1)


# -- what they compute ---------------------------------------------------------------------------------------------


def test_what_a_network_sees_of_a_step() -> None:
    features, uncertainty, entropy = torch.rand(4, 3), torch.tensor([0.0, 1e-9, 1.0, 50.0]), torch.rand(4)
    seen = step_inputs(features, uncertainty, entropy)
    assert seen.shape == (4, 5)
    assert torch.equal(seen[:, :3], features)
    torch.testing.assert_close(seen[1:, 3], uncertainty[1:].log())
    assert seen[0].isfinite().all()  # a model that is certain has an uncertainty of 0
    assert torch.equal(seen[:, 4], entropy)
    assert step_inputs(features, uncertainty, None).shape == (4, 4)


def test_the_lstm_is_an_lstm_that_starts_from_the_context() -> None:
    network = make(LSTMRejector, layers=3)
    context, steps = torch.randn(6, 2), [proposals(6, seed) for seed in range(5)]
    sizes = network.sizes
    oracle = nn.LSTM(network.step_size, sizes.units, num_layers=3, batch_first=True)
    for layer, cell in enumerate(network.cells):
        for name, value in cell.named_parameters():
            getattr(oracle, f"{name}_l{layer}").data.copy_(value.data)
    begun = torch.tanh(network.begin(standard(context, network.context_mean, network.context_scale)))
    hidden, memory = begun.view(6, 3, 2, sizes.units).permute(2, 1, 0, 3).contiguous()
    seen = [step_inputs(one.features, one.uncertainty, one.entropy) for one in steps]
    inputs = standard(torch.stack(seen, 1), network.step_mean, network.step_scale)
    expected = network.head(oracle(inputs, (hidden, memory))[0]).squeeze(2)
    torch.testing.assert_close(score_along(network, context, steps), expected.detach())


def standard(values: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return ((values - mean) / scale).clamp(-LARGEST, LARGEST)


def test_the_mlp_knows_context_step_and_position() -> None:
    network, steps = make(MLPRejector), [proposals(4, 0)] * 5
    scores = score_along(network, torch.randn(4, 2), steps)
    assert scores.unique().numel() == scores.numel()  # the same step at five positions, four contexts


@pytest.mark.parametrize("kind", [MLPRejector, DraftMLP])
@pytest.mark.parametrize("layers", [1, 3])
def test_hidden_layers_and_units(kind: Any, layers: int) -> None:
    body = make(kind, layers=layers, units=7).body
    linear = [module for module in body if isinstance(module, nn.Linear)]
    assert [module.out_features for module in linear] == [7] * layers + [1]
    assert [module.p for module in body if isinstance(module, nn.Dropout)] == [0.5] * layers


@each_by_token
def test_selecting_rows_commutes_with_scoring(kind: Any) -> None:
    network, rows = make(kind), torch.tensor([4, 0, 0, 5])
    context, steps = torch.randn(6, 2), [proposals(6, seed) for seed in range(5)]
    expected = score_along(network, context, steps)[rows]
    for leave in range(5):
        state, scores = network.start(context), []
        for position, proposal in enumerate(steps):
            if position == leave:
                state = network.select(state, rows)
            score, state = network.score(state, position, proposal if position < leave else proposal.select(rows))
            scores.append(score[rows] if position < leave else score)
        torch.testing.assert_close(torch.stack(scores, 1), expected)


@each_by_token
def test_a_score_is_a_function_of_the_prefix(kind: Any) -> None:
    """What comes later changes nothing, and the LSTM remembers what came before."""
    network, context = make(kind), torch.randn(6, 2)
    steps, others = [proposals(6, seed) for seed in range(4)], [proposals(6, seed) for seed in range(10, 14)]
    plain = score_along(network, context, steps)
    assert torch.equal(score_along(network, context, [*steps[:2], *others[2:]])[:, :2], plain[:, :2])
    changed = score_along(network, context, [others[0], *steps[1:]])[:, 1:]
    assert torch.equal(changed, plain[:, 1:]) == (kind is MLPRejector)


GRIDS = pytest.mark.parametrize("hand_offs", [(), (0, 1, 2, 5), (0, 1, 2, 3, 4, 5)])


@each_by_draft
@each_rule
@GRIDS
def test_draft_scores_ignore_what_stands_past_the_end(kind: Any, rule: str, hand_offs: tuple[int, ...]) -> None:
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


@each_by_draft
@each_rule
@GRIDS
def test_a_batch_of_drafts_is_scored_row_by_row(
    kind: Any, rule: str, hand_offs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, plain = make(kind, hand_offs=hand_offs, rule=rule), drafted()
    scores = network.score(plain)
    alone = torch.cat([network.score(plain.select(torch.tensor([row]))) for row in range(10)])
    torch.testing.assert_close(alone, scores)
    rows = torch.tensor([3, 3, 1])
    torch.testing.assert_close(network.score(plain.select(rows)), scores[rows])
    monkeypatch.setattr(networks, "SCORED_AT_ONCE", 3)
    torch.testing.assert_close(network.score(plain), scores)


@torch.no_grad()
def raw_outputs(network: Any, plain: Draft) -> Tensor:
    context, steps, mask = draft_inputs(plain)
    seen = torch.where(mask[..., None], network._steps(steps), 0.0)
    return network.outputs(network._context(context), seen, mask)  # type: ignore[no-any-return]


@each_by_draft
def test_odds_of_ended_hand_offs_are_those_of_no_deferral(kind: Any) -> None:
    """A softmax gives the hand-offs past a draft's end nothing, and what they had to the last."""
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


@each_by_draft
def test_ended_hand_offs_have_no_estimate(kind: Any) -> None:
    grid = (0, 1, 3, 5)
    network, plain = make(kind, hand_offs=grid, rule="cost"), drafted()
    scores = network.score(plain)
    for row, length in enumerate(plain.sequences.lengths.tolist()):
        assert [score == -torch.inf for score in scores[row].tolist()] == [kept >= length for kept in grid[:-1]] + [
            False
        ]
        assert scores[row].isfinite().sum() == 1 + sum(kept < length for kept in grid[:-1])


def test_outputs_past_the_end_have_no_part_in_an_estimate() -> None:
    """Where two hand-offs are past the end of a draft, the second has nothing to tell."""
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


@each_by_draft
def test_a_network_that_knows_nothing_estimates_the_mean_losses(kind: Any) -> None:
    network, plain = make(kind, hand_offs=(0, 1, 3, 5), rule="cost"), drafted()
    losses = torch.rand(50, 4) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    network.standardise_losses(losses)
    last = network.head if kind is DraftTransformer else network.body[-1]
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    whole = plain.select((plain.sequences.lengths == 5).nonzero().squeeze(1))
    torch.testing.assert_close(-network.score(whole), losses.mean(0).expand(len(whole), -1))


def test_the_transformer_reads_a_hand_off_where_its_token_stands() -> None:
    """With the attention silenced, an output depends on its own token alone; the last and the whole on the context."""
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


def test_the_transformer_attends_to_other_tokens_and_knows_places() -> None:
    network, plain = make(DraftTransformer, hand_offs=tuple(range(6))), drafted()
    features = plain.features.clone()
    features[:, 0] += 1.0
    moved = raw_outputs(network, replace(plain, features=features)) - raw_outputs(network, plain)
    longest = plain.sequences.lengths == 5
    assert bool((moved[longest].abs() > 1e-6).all())
    same = replace(plain, features=plain.features[:, :1].expand_as(plain.features).clone(),
                   uncertainty=plain.uncertainty[:, :1].expand_as(plain.uncertainty).clone(),
                   entropy=plain.entropy[:, :1].expand_as(plain.entropy).clone())  # type: ignore[index, union-attr]  # fmt: skip
    assert raw_outputs(network, same)[0].unique().numel() == 6


def test_units_that_make_no_heads() -> None:
    with pytest.raises(OptionError, match="20 units; a transformer needs a multiple of 16"):
        make(DraftTransformer, units=20)


@each_by_draft
def test_rules_are_known_by_name(kind: Any) -> None:
    with pytest.raises(OptionError, match="unknown decision rule 'luck'; available: cost, odds"):
        make(kind, rule="luck")


@each_network
def test_scores_do_not_depend_on_units_of_the_inputs(kind: Any) -> None:
    """Mean and scale come from the training inputs, a column that never changes is left alone, outliers are cut."""
    network = make(kind)
    steps = torch.randn(50, network.step_size)
    steps[:, 1] = 3.0
    network.standardise(torch.randn(50, 2) * 100, steps)
    seen = network._steps(steps)
    varied = torch.arange(network.step_size) != 1
    torch.testing.assert_close(seen.mean(0), torch.zeros(network.step_size), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.std(0)[varied], torch.ones(int(varied.sum())))
    assert seen[:, 1].tolist() == [0.0] * 50
    assert network._steps(torch.full((1, network.step_size), 1e9)).max() == LARGEST
    assert network._context(torch.full((1, 2), -1e9)).min() == -LARGEST


def test_one_example_has_no_spread() -> None:
    network = make(MLPRejector)
    network.standardise(torch.ones(1, 2), torch.ones(1, network.step_size))
    assert network.context_scale.tolist() == [1.0, 1.0]


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *((kind, {}) for kind in BY_TOKEN),
        *((kind, {"hand_offs": (0, 2, 5), "rule": rule}) for kind in BY_DRAFT for rule in RULES),
        *((kind, {}) for kind in BY_DRAFT),
    ],
)
def test_what_is_saved_is_what_is_loaded(kind: Any, sizes: dict[str, Any], tmp_path: Path) -> None:
    network = make(kind, **sizes)
    assert network.save_pretrained(tmp_path / "rejector") == tmp_path / "rejector"
    loaded = load_rejector(tmp_path / "rejector", TASK.predictor)
    assert type(loaded) is kind
    assert (loaded.sizes, loaded.predictor, loaded.notes) == (network.sizes, network.predictor, {"made": "up"})
    assert not loaded.training  # no dropout
    for name, value in network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    if isinstance(loaded, DraftNetwork):
        assert torch.equal(loaded.score(drafted()), network.score(drafted()))
    else:
        context, steps = torch.randn(6, 2), [proposals(6, seed) for seed in range(5)]
        assert torch.equal(score_along(loaded, context, steps), score_along(network, context, steps))
    assert sorted(path.name for path in (tmp_path / "rejector").iterdir()) == ["config.json", "model.safetensors"]


def test_a_checkpoint_from_before_there_were_rules(tmp_path: Path) -> None:
    network = make(DraftMLP, hand_offs=(0, 2, 5))
    folder = network.save_pretrained(tmp_path)
    drop("rule")(folder)
    loaded = load_rejector(folder, TASK.predictor)
    assert loaded.sizes == network.sizes
    assert isinstance(loaded, DraftMLP)
    assert torch.equal(loaded.score(drafted()), network.score(drafted()))


@pytest.mark.parametrize(("change", "words"), [({"rule": "luck"}, "decision rule"), ({"units": 20}, "multiple of 16")])
def test_a_draft_network_that_cannot_be(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    """The message once did not say which folder."""
    folder = make(DraftTransformer, hand_offs=(0, 2, 5)).save_pretrained(tmp_path)
    edit(**change)(folder)
    with pytest.raises(CheckpointError, match=f"{tmp_path.name} does not hold a whole rejector: .*{words}"):
        load_rejector(folder)


def test_a_kind_loads_its_own_kind_alone(tmp_path: Path) -> None:
    make(LSTMRejector).save_pretrained(tmp_path)
    assert isinstance(LSTMRejector.from_pretrained(tmp_path, TASK.predictor), LSTMRejector)
    with pytest.raises(CheckpointError, match="holds a 'lstm' rejector, not a 'mlp' one"):
        MLPRejector.from_pretrained(tmp_path)


@each_network
def test_another_predictor_is_refused(kind: Any, tmp_path: Path) -> None:
    make(kind).save_pretrained(tmp_path)
    other = ToyTask(n=2, seed=1).predictor
    with pytest.raises(CheckpointError, match=r"was fitted for predictor toy-.*, not for toy-") as caught:
        load_rejector(tmp_path, other)
    assert other.fingerprint in str(caught.value)
    load_rejector(tmp_path)  # nobody asked


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def drop_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["head.weight"]
    safetensors.torch.save_file(tensors, path)


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def drop(key: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(
            json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != key})
        )

    return change


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "weights cut short": truncate,
    "weights empty": empty,
    "weights not there": remove("model.safetensors"),
    "a tensor not there": drop_a_tensor,
    "config not there": remove("config.json"),
    "config cut short": overwrite("config.json", '{"kind": "ls'),
    "config not an object": overwrite("config.json", "[]"),
    "config not text": lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00") and None,
    "unknown kind": edit(kind="transformer"),
    "kind not there": drop("kind"),
    "kind not a name": edit(kind=["lstm"]),
    "sizes not there": drop("units"),
    "notes not there": drop("notes"),
    "other sizes": edit(units=9),
    "sizes that are text": edit(units="many"),
    "sizes below 0": edit(units=-1),
    "dropout above 1": edit(dropout=7.0),
    "notes not an object": edit(notes="none"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_refused_in_one_line(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = make(LSTMRejector).save_pretrained(tmp_path / "rejector")
    damage(folder)
    with pytest.raises((CheckpointError, OptionError)) as caught:
        load_rejector(folder, TASK.predictor)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message or "unknown rejector kind" in message


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no rejector in .*nowhere.*; fit one with: seqdefer run TASK"):
        load_rejector(tmp_path / "nowhere")


class NoSpace(OSError):
    pass


def fail_after(n_bytes: int) -> Callable[..., None]:
    """Writes a part of the file, then fails, as a full disk does."""

    def write(tensors: Any, path: str, metadata: Any = None) -> None:
        Path(path).write_bytes(b"x" * n_bytes)
        raise NoSpace

    return write


def test_failing_to_save_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors.torch, "save_file", fail_after(100))
    with pytest.raises(NoSpace):
        make(LSTMRejector).save_pretrained(tmp_path / "rejector")
    assert list((tmp_path / "rejector").iterdir()) == []


def test_a_checkpoint_is_never_made_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving over another one, stopped between the two files, once left the new weights under the old name."""
    folder = make(LSTMRejector, seed=0).save_pretrained(tmp_path)

    def stop(path: Path, value: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(networks, "write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        make(LSTMRejector, seed=1).save_pretrained(folder)
    with pytest.raises(CheckpointError):
        load_rejector(folder)


@pytest.mark.parametrize("error", [NoSpace, KeyboardInterrupt])
def test_what_is_written_aside_appears_whole_or_not_at_all(error: type[BaseException], tmp_path: Path) -> None:
    path = files.write_text(tmp_path / "file.txt", "old")

    def half(aside: Path) -> None:
        aside.write_text("ne")
        raise error

    with pytest.raises(error):
        files.write_aside(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_all_networks_are_known_by_kind() -> None:
    assert {kind: network.kind for kind, network in NETWORKS.items()} == {kind: kind for kind in NETWORKS}
    assert set(NETWORKS.values()) == {LSTMRejector, MLPRejector, DraftMLP, DraftTransformer}
    assert issubclass(CheckpointError, InputError)
