"""Checkpoints: networks by kind, what is saved and loaded, and damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from networks import DRAFT_NETWORKS, TASK, TOKEN_NETWORKS, drafted, make, proposals, score_along
from torch import Tensor, nn

from seqdefer import cli, registry
from seqdefer.errors import CheckpointError, OptionError
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import experiment_settings
from seqdefer.hyperparameters import ATTENTION
from seqdefer.rejectors.checkpoints import draft_networks, load_rejector, token_networks
from seqdefer.rejectors.draft import OUTPUT_RULES, DraftMLP, DraftNetwork, DraftTransformer
from seqdefer.rejectors.token import LSTMRejector, MLPRejector, TokenNetwork
from seqdefer.storage import made_once
from seqdefer.tasks.weather.task import ENTRY
from seqdefer.testing import ToyTask

each_network = pytest.mark.parametrize("kind", [*TOKEN_NETWORKS, *DRAFT_NETWORKS])


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *((kind, {}) for kind in TOKEN_NETWORKS),
        *((kind, {"hand_offs": (0, 2, 5), "rule": rule}) for kind in DRAFT_NETWORKS for rule in OUTPUT_RULES),
        *((kind, {}) for kind in DRAFT_NETWORKS),
    ],
)
def test_a_loaded_network_equals_the_saved_one(kind: Any, sizes: dict[str, Any], tmp_path: Path) -> None:
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


def test_a_checkpoint_without_a_rule_decides_by_odds(tmp_path: Path) -> None:
    network = make(DraftMLP, hand_offs=(0, 2, 5))
    folder = network.save_pretrained(tmp_path)
    drop("rule")(folder)
    loaded = load_rejector(folder, TASK.predictor)
    assert loaded.sizes == network.sizes
    assert isinstance(loaded, DraftMLP)
    assert torch.equal(loaded.score(drafted()), network.score(drafted()))


@pytest.mark.parametrize(("change", "words"), [({"rule": "luck"}, "decision rule"), ({"units": 20}, "multiple of 16")])
def test_impossible_sizes_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    """The message once did not name the folder."""
    folder = make(DraftTransformer, hand_offs=(0, 2, 5)).save_pretrained(tmp_path)
    edit(**change)(folder)
    with pytest.raises(CheckpointError, match=f"{tmp_path.name} holds an incomplete rejector: .*{words}"):
        load_rejector(folder)


def test_a_class_loads_its_own_kind_only(tmp_path: Path) -> None:
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
    load_rejector(tmp_path)  # no predictor to compare with


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


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
    "weights not there": remove("model.safetensors"),
    "a tensor not there": drop_a_tensor,
    "config not there": remove("config.json"),
    "config not an object": overwrite("config.json", "[]"),
    "unknown kind": edit(kind="transformer"),
    "kind not a name": edit(kind=["lstm"]),
    "sizes not there": drop("units"),
    "other sizes": edit(units=9),
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


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no rejector in .*nowhere.*; fit one with: seqdefer fit TASK"):
        load_rejector(tmp_path / "nowhere")


def test_a_checkpoint_is_never_a_mix_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving over another checkpoint, stopped between the two files, once left new weights under an old config."""
    folder = make(LSTMRejector, seed=0).save_pretrained(tmp_path)

    def stop(path: Path, value: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(made_once, "write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        make(LSTMRejector, seed=1).save_pretrained(folder)
    with pytest.raises(CheckpointError):
        load_rejector(folder)


# -- rules, and networks of others ---------------------------------------------------------------------------------


def test_networks_are_found_by_kind() -> None:
    assert list(token_networks())[:2] == ["lstm", "mlp"]  # others may be added
    assert list(draft_networks())[:2] == ["draft_mlp", "draft_transformer"]


@pytest.fixture
def new_networks() -> Iterator[tuple[type[TokenNetwork], type[DraftNetwork], type[DraftNetwork]]]:
    """Networks of another package: each is known while its class has a `kind`."""

    class LinearToken(TokenNetwork):
        kind = "linear"

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.body = nn.Linear(self.sizes.step, 1)

        def start(self, context: Tensor) -> Tensor:
            return context[:, :0]

        def forward(self, state: Tensor, position: int, steps: Tensor) -> tuple[Tensor, Tensor]:
            return self.body(steps).squeeze(1), state

    class LinearDraft(DraftNetwork):
        kind = "draft_linear"
        defaults = replace(ATTENTION, architecture="draft_linear", units=3, epochs=2)
        cost_defaults = replace(defaults, epochs=1)

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.body = nn.Linear(self.sizes.step, self.sizes.outputs)

        def outputs(self, context: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
            scores: Tensor = self.body(steps.sum(1))
            return scores

    class SmallTransformer(DraftTransformer):
        kind = "draft_small"  # it inherits its defaults

    yield LinearToken, LinearDraft, SmallTransformer
    for new in (LinearToken, LinearDraft, SmallTransformer):
        del new.kind


def test_a_new_network_is_found_fitted_saved_and_loaded(new_networks: Any, tmp_path: Path) -> None:
    linear_token, linear_draft, _ = new_networks
    assert token_networks()["linear"] is linear_token
    assert draft_networks()["draft_linear"] is linear_draft
    settings = experiment_settings(ENTRY, "paper", "draft_linear", "linear")
    settings = replace(settings, token=replace(settings.token, epochs=1), seeds=1, instances=10, resamples=2)
    Experiment(TASK, settings, tmp_path).run()
    kinds = {"WholeModelEmbed": linear_draft, "OneTimeCost": linear_draft, "TokenwiseModel": linear_token}
    for method, kind in kinds.items():
        assert type(load_rejector(tmp_path / "rejectors" / f"{method}-seed0", TASK.predictor)) is kind


def test_commands_know_a_new_network(new_networks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for option, available in (("", "linear, lstm, mlp"), ("draft-", "draft_linear, draft_mlp, draft_small, draft_tra")):
        assert cli.main(["run", "weather", f"--{option}architecture", "nowhere"]) == 2
        assert f"architecture 'nowhere'; available: {available}" in capsys.readouterr().err


def test_a_new_draft_network_gets_its_own_defaults(new_networks: Any) -> None:
    """Any architecture but draft_mlp once got the transformer's."""
    _, linear_draft, _ = new_networks
    settings = experiment_settings(ENTRY, "paper", "draft_linear")
    assert (settings.once, settings.cost) == (linear_draft.defaults, linear_draft.cost_defaults)
    small = experiment_settings(ENTRY, "paper", "draft_small")
    assert small.once == small.cost == replace(ATTENTION, architecture="draft_small")


def test_a_network_of_another_package_enters_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_network.py").write_text(
        "from seqdefer.rejectors.draft import DraftMLP\nclass Plugin(DraftMLP):\n    kind = 'draft_plugin'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("plugin", "plugin_network:Plugin", "seqdefer.networks")
    monkeypatch.setattr(registry, "installed", lambda group: [point] if group == point.group else [])
    found = draft_networks()["draft_plugin"]
    try:
        loaded = load_rejector(make(found, hand_offs=(0, 5)).save_pretrained(tmp_path / "rejector"))
        assert type(loaded) is found
    finally:
        del found.kind
    assert draft_networks()["draft_mlp"] is DraftMLP  # an inherited kind once replaced its parent's class
