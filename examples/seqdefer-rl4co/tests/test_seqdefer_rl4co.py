"""Policies of RL4CO as predictors: RL4CO's own greedy tours and log probabilities, step by step and from any prefix."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqdefer.errors import CheckpointError, OptionError
from seqdefer.storage.files import read_tensors, write_json, write_tensors
from seqdefer.tasks.tsp import task as tsp
from seqdefer.tasks.tsp.pointer import PointerNet, TourPredictor, step_facts
from seqdefer.testing import check_predictor
from seqdefer.types import Sequences, SequenceSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # RL4CO's dependencies deprecate parts of each other
    zoo = pytest.importorskip("rl4co.models.zoo", reason="needs RL4CO: pip install ./examples/seqdefer-rl4co")
    from rl4co.envs import TSPEnv
    from rl4co.models.common.constructive.nonautoregressive import NonAutoregressivePolicy
    from rl4co.models.zoo.polynet.policy import PolyNetPolicy
    from seqdefer_rl4co import RL4COPredictor, load_predictor, save_policy
    from seqdefer_rl4co.predictor import into_unit_square
    from tensordict import TensorDict
torch.set_num_threads(1)  # the tensors are tiny

SMALL = {"embed_dim": 16, "num_heads": 2, "feedforward_hidden": 16, "num_encoder_layers": 2}
POMO = {**SMALL, "normalization": "instance", "use_graph_context": False}  # as POMO builds its policy
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("AttentionModelPolicy", SMALL),
    "pomo": ("AttentionModelPolicy", POMO),
    "pointer": ("PointerNetworkPolicy", {"embed_dim": 16, "hidden_dim": 16}),
    "symnco": ("SymNCOPolicy", {"embed_dim": 16, "num_heads": 2, "feedforward_hidden": 16}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, seed: int = 0, **more: Any) -> Any:
    """Return a policy with random weights."""
    name, arguments = KINDS[kind]
    torch.manual_seed(seed)
    policy = getattr(zoo, name)(**{**arguments, **more}).eval()
    if kind == "pointer":  # otherwise all cities would be about equally likely
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(4)
    if kind == "pomo":
        policy.test_decode_type = "multistart_greedy"  # as POMO sets it
    return policy


def make_cities(n: int = 5, size: int = 9, seed: int = 1) -> Tensor:
    return torch.randn(n, size, 2, generator=torch.Generator().manual_seed(seed))


def make_tours(n: int = 5, size: int = 9, seed: int = 2) -> Tensor:
    return torch.rand(n, size, generator=torch.Generator().manual_seed(seed)).argsort(1)


@torch.no_grad()
def run_policy(policy: Any, cities: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return RL4CO's own tours (B, N) and log likelihoods (B,)."""
    env = TSPEnv(generator_params={"num_loc": cities.shape[1]})
    out = policy(env.reset(TensorDict({"locs": cities}, batch_size=[len(cities)])), env, phase="test", **options)
    return out["actions"], out["log_likelihood"]


@torch.no_grad()
def walk(predictor: RL4COPredictor, cities: Tensor, path: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return proposals (B, N) and log probabilities (B, N, N) along `path`, or along the proposals."""
    state, _ = predictor.start(cities)
    tokens, log_probs = [], []
    for position in range(cities.shape[1]):
        tokens.append(predictor.propose(state).tokens)
        log_probs.append(state.log_probs)
        state = predictor.append(state, tokens[-1] if path is None else path[:, position])
    assert state.tour.visited.all()
    return torch.stack(tokens, 1), torch.stack(log_probs, 1)


def steps_of(log_probs: Tensor, tours: Tensor) -> Tensor:
    return log_probs.gather(2, tours[..., None]).squeeze(2)


# -- equal to RL4CO ------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("size", [6, 12])
def test_greedy_tours(kind: str, size: int) -> None:
    policy, cities = make(kind), make_cities(n=8, size=size)
    tours, log_likelihood = run_policy(policy, cities, decode_type="greedy")
    own, log_probs = walk(RL4COPredictor(policy, scale="none", first="policy"), cities)
    assert torch.equal(own, tours)
    best = log_probs[:, :-1].topk(2, 2).values  # near ties would prove nothing
    assert (best[..., 0] - best[..., 1]).median() > 0.02
    torch.testing.assert_close(steps_of(log_probs, own).sum(1), log_likelihood, rtol=1e-4, atol=1e-5)


@each_kind
def test_prefixes_of_another_author(kind: str) -> None:
    """The log likelihood of foreign tours, and of every one of their steps where RL4CO returns them."""
    policy, cities, tours = make(kind), make_cities(), make_tours()
    _, log_probs = walk(RL4COPredictor(policy, scale="none", first="policy"), cities, tours)
    given = {"eval_tours" if kind == "pointer" else "actions": tours}
    expected = run_policy(policy, cities, **given)[1]
    torch.testing.assert_close(steps_of(log_probs, tours).sum(1), expected, rtol=1e-4, atol=1e-5)
    if kind != "pointer":
        steps = run_policy(policy, cities, **given, return_sum_log_likelihood=False)[1]
        torch.testing.assert_close(steps_of(log_probs, tours), steps, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "policy",
    [
        lambda: make("attention", temperature=0.5, tanh_clipping=3.0, mask_inner=False),
        lambda: make("pointer", mask_logits=False, mask_inner=False, tanh_clipping=0),
        lambda: PolyNetPolicy(k=4, embed_dim=16, num_heads=2, feedforward_hidden=16).eval(),
    ],
)
def test_settings_of_policies(policy: Callable[[], Any]) -> None:
    made, cities = policy(), make_cities()
    tours, _ = run_policy(made, cities, decode_type="greedy")
    assert torch.equal(walk(RL4COPredictor(made, scale="none"), cities)[0], tours)


def test_pomo_starts_at_city_0() -> None:
    """RL4CO's multi-start decoding returns all tours from city 0 first."""
    policy, cities = make("pomo"), make_cities()
    tours, _ = run_policy(policy, cities, decode_type="multistart_greedy")
    predictor = RL4COPredictor(policy, scale="none")
    assert torch.equal(walk(predictor, cities)[0], tours[: len(cities)])
    proposal = predictor.propose(predictor.start(cities)[0])
    assert not proposal.uncertainty.any()
    assert RL4COPredictor(training_module().policy).first == "zero"


def test_unit_square() -> None:
    policy, cities = make("attention"), make_cities()
    inside = into_unit_square(cities)
    assert inside.amin() == 0
    assert torch.equal(inside.amax((1, 2)), torch.ones(len(cities)))
    sides = (cities.amax(1) - cities.amin(1)).amax(1, keepdim=True)
    torch.testing.assert_close(inside[:, 0] - inside[:, 1], (cities[:, 0] - cities[:, 1]) / sides)
    tours = walk(RL4COPredictor(policy), cities)[0]
    assert torch.equal(tours, walk(RL4COPredictor(policy, scale="none"), inside)[0])
    assert torch.equal(tours, walk(RL4COPredictor(policy), 4 * cities + 8)[0])
    assert not into_unit_square(torch.full((1, 4, 2), 3.0)).any()


# -- a predictor like any other ------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("facts", [True, False])
def test_contract(kind: str, facts: bool) -> None:
    predictor, cities = RL4COPredictor(make(kind), facts=facts), make_cities(n=3, size=7)
    check_predictor(predictor, cities, SequenceSpec(7))
    others = Sequences(make_tours(n=3, size=7), torch.full((3,), 7))
    check_predictor(predictor, cities, SequenceSpec(7), paths=others)


@each_kind
@torch.no_grad()
def test_facts_are_in_the_units_of_the_instance(kind: str) -> None:
    ours, theirs = TourPredictor(PointerNet(4)), RL4COPredictor(make(kind))
    cities, tours = make_cities(), make_tours()
    left, right = ours.start(cities)[0], theirs.start(cities)[0]
    for position in range(4):
        left, right = ours.append(left, tours[:, position]), theirs.append(right, tours[:, position])
    proposal = theirs.propose(right)
    facts = step_facts(left.cities, left.distances, left.visited, left.first, left.last, proposal.tokens)
    assert torch.equal(proposal.features[:, -11:], facts)
    assert proposal.features.shape[1] == 16 + 11


def test_the_policy_is_copied() -> None:
    policy, cities = make("attention").train(), make_cities()
    state = torch.get_rng_state()
    predictor = RL4COPredictor(policy)
    before = walk(predictor, cities)[1]
    assert torch.equal(torch.get_rng_state(), state)
    assert policy.training
    assert all(weight.requires_grad for weight in policy.parameters())
    torch.nn.init.zeros_(next(policy.parameters()))
    assert torch.equal(walk(predictor, cities)[1], before)


def test_fingerprints() -> None:
    policies = [make("attention", **more) for more in ({}, {"seed": 1}, {"num_heads": 1}, {"tanh_clipping": 5.0})]
    options: list[dict[str, Any]] = [{"facts": False}, {"scale": "none"}, {"first": "zero"}]
    predictors = [*map(RL4COPredictor, policies), *(RL4COPredictor(policies[0], **one) for one in options)]
    assert len({predictor.fingerprint for predictor in predictors}) == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_kind
def test_on_a_gpu(kind: str) -> None:
    policy, cities = make(kind), make_cities()
    tours, expected = walk(RL4COPredictor(policy), cities)
    _, log_probs = walk(RL4COPredictor(policy.cuda()), cities.cuda(), tours.cuda())
    torch.testing.assert_close(log_probs.cpu(), expected, rtol=1e-3, atol=1e-3)


def training_module() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Attribute '.*' is an instance of `nn.Module`")  # Lightning's
        return zoo.POMO(TSPEnv(), policy_kwargs=SMALL)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (lambda: zoo.AttentionModelPolicy(env_name="cvrp", embed_dim=16, num_heads=2), "made for 'cvrp'"),
        (lambda: zoo.MDAMPolicy(embed_dim=16, num_heads=2), "overrides `forward`"),
        (lambda: NonAutoregressivePolicy(torch.nn.Linear(2, 2)), "city by city"),
        (lambda: "AttentionModelPolicy", "made for None"),
        (training_module, "give its .policy"),
    ],
)
def test_unsupported_policies(policy: Callable[[], Any], reason: str) -> None:
    with pytest.raises(OptionError, match=rf"{reason}.*; available: AttentionModelPolicy"):
        RL4COPredictor(policy())


# -- on disk -------------------------------------------------------------------------------------------------------


@each_kind
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    cities, saved = make_cities(), save_policy(make(kind), tmp_path, KINDS[kind][1], scale="none")
    loaded = load_predictor(tmp_path)
    assert loaded.fingerprint == saved.fingerprint
    assert (loaded.scale, loaded.first) == ("none", "zero" if kind == "pomo" else "policy")
    assert torch.equal(walk(loaded, cities)[1], walk(saved, cities)[1])


def test_the_command_line_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("rl4co", "seqdefer_rl4co:load_predictor", tsp.PREDICTORS)
    monkeypatch.setattr(tsp, "find_plugins", lambda group: {"rl4co": point} if group == tsp.PREDICTORS else {})
    saved = save_policy(make("attention"), tmp_path, SMALL)
    found = tsp.load_predictor(tsp.TSPOptions(predictor=f"rl4co:{tmp_path}"), torch.device("cpu"))
    assert found.fingerprint == saved.fingerprint


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({**SMALL, "num_heads": 1}, "setting that the weights do not show"),
        ({**SMALL, "num_encoder_layers": 1}, "is not this policy: Error.* in loading state_dict"),
        ({**SMALL, "num_heads": 3}, "fails: AssertionError"),
        ({**SMALL, "decoder": torch.nn.Linear(2, 2)}, "fails: TypeError: .* not JSON serializable"),
    ],
)
def test_arguments_of_another_policy(arguments: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=reason):
        save_policy(make("attention"), tmp_path / "folder", arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arguments": []}, "does not describe a policy of RL4CO"),
        ({"policy": "os.system"}, "unknown policy 'os.system'"),
        ({"arguments": {"embed_dim": -1}}, "fails"),
        ({"arguments": {"embed_dim": 10**12}}, "too large"),
        ({"arguments": {"embed_dim": 32, "num_heads": 2}}, "is damaged"),
        ({"scale": "square"}, "unknown scale 'square'; available: none, unit"),
        ({"first": "last"}, "unknown first 'last'; available: auto, policy, zero"),
    ],
)
def test_configs_that_cannot_be_used(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    save_policy(make("attention"), tmp_path, SMALL)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", {**config, **change})
    with pytest.raises(CheckpointError, match=reason):
        load_predictor(tmp_path)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no policy of RL4CO in .*: it has no config.json"):
        load_predictor(tmp_path)
    (tmp_path / "last.ckpt").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"last\.ckpt is a file: .* pickles, .*save_policy"):
        load_predictor(tmp_path / "last.ckpt")
    save_policy(make("pointer"), tmp_path, KINDS["pointer"][1])
    weights = read_tensors(tmp_path / "model.safetensors")
    write_tensors(tmp_path / "model.safetensors", {name: weights[name] for name in list(weights)[1:]})
    with pytest.raises(CheckpointError, match=r"is damaged: .*Missing key"):
        load_predictor(tmp_path)
