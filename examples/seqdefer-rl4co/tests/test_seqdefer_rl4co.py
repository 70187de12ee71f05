"""Policies of RL4CO as predictors: its own greedy tours and log probabilities, step by step and from any prefix."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqdefer.errors import CheckpointError, MissingExtraError, OptionError
from seqdefer.storage.files import read_tensors, write_json, write_tensors
from seqdefer.tasks.tsp import rl4co as adapter
from seqdefer.tasks.tsp.pointer import PointerNet, TourPredictor
from seqdefer.tasks.tsp.rl4co import RL4COPredictor, into_unit_square, load_rl4co, save_rl4co
from seqdefer.tasks.tsp.tours import is_tour
from seqdefer.testing import check_predictor
from seqdefer.types import Sequences, SequenceSpec

threads = torch.get_num_threads()
with warnings.catch_warnings():
    # RL4CO loads TorchRL, Lightning, matplotlib and more: what they deprecate among themselves is not ours to mend.
    warnings.simplefilter("ignore")
    try:
        from rl4co.envs import TSPEnv
        from rl4co.models import zoo
        from rl4co.models.zoo.polynet.policy import PolyNetPolicy
        from tensordict import TensorDict
    except ImportError:
        zoo = None
torch.set_num_threads(threads)  # compiled code that RL4CO loads sets it

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _needs_rl4co(request: pytest.FixtureRequest) -> None:
    if zoo is None and "no_rl4co" not in request.fixturenames:
        pytest.skip("needs the extra rl4co")


SMALL = {"embed_dim": 16, "num_heads": 2, "feedforward_hidden": 16, "num_encoder_layers": 2}
POMO = {**SMALL, "normalization": "instance", "use_graph_context": False}  # as POMO makes its policy
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("AttentionModelPolicy", SMALL),
    "pomo": ("AttentionModelPolicy", POMO),
    "pointer": ("PointerNetworkPolicy", {"embed_dim": 16, "hidden_dim": 16}),
    "symnco": ("SymNCOPolicy", {"embed_dim": 16, "num_heads": 2, "feedforward_hidden": 16}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, seed: int = 0, **more: Any) -> Any:
    """A policy with random weights."""
    name, arguments = KINDS[kind]
    torch.manual_seed(seed)
    policy = getattr(zoo, name)(**{**arguments, **more}).eval()
    if kind == "pointer":  # its cities would be nearly equally likely
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(4)
    if kind == "pomo":
        policy.test_decode_type = "multistart_greedy"  # as POMO marks its policy
    return policy


def some_cities(n: int = 5, size: int = 9, seed: int = 1) -> Tensor:
    return torch.randn(n, size, 2, generator=torch.Generator().manual_seed(seed))


def some_tours(n: int = 5, size: int = 9, seed: int = 2) -> Tensor:
    return torch.rand(n, size, generator=torch.Generator().manual_seed(seed)).argsort(1)


def environment(cities: Tensor) -> tuple[TSPEnv, Any]:
    env = TSPEnv(generator_params={"num_loc": cities.shape[1]})
    return env, env.reset(TensorDict({"locs": cities}, batch_size=[len(cities)]))


@torch.no_grad()
def ask(policy: Any, cities: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """RL4CO's own tours (B, N) and sums of log probabilities (B,)."""
    env, start = environment(cities)
    out = policy(start, env, phase="test", **options)
    return out["actions"], out["log_likelihood"]


def evaluate(policy: Any, cities: Tensor, tours: Tensor) -> Tensor:
    """RL4CO's log likelihood of tours that it did not write itself. (B,)"""
    is_pointer = isinstance(policy, zoo.PointerNetworkPolicy)
    return ask(policy, cities, **({"eval_tours": tours} if is_pointer else {"actions": tours}))[1]


@torch.no_grad()
def walk(predictor: RL4COPredictor, cities: Tensor, path: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Proposals (B, N) and log probabilities (B, N, N) along `path`, or along the proposals."""
    state, _ = predictor.start(cities)
    tokens, log_probs = [], []
    for position in range(cities.shape[1]):
        tokens.append(predictor.propose(state).tokens)
        log_probs.append(state.log_probs)
        state = predictor.append(state, tokens[-1] if path is None else path[:, position])
    return torch.stack(tokens, 1), torch.stack(log_probs, 1)


def sums(log_probs: Tensor, tours: Tensor) -> Tensor:
    return log_probs.gather(2, tours[..., None]).squeeze(2).sum(1)


# -- the same as RL4CO ---------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("size", [6, 9, 12])
def test_greedy_tours_are_rl4cos(kind: str, size: int) -> None:
    policy, cities = make(kind), some_cities(n=8, size=size)
    tours, log_likelihood = ask(policy, cities, decode_type="greedy")
    predictor = RL4COPredictor(policy, scale="none", first="policy")
    own, log_probs = walk(predictor, cities)
    assert torch.equal(own, tours)
    assert is_tour(own).all()
    best = log_probs[:, :-1].topk(2, 2).values  # where two cities were equally likely, the tours would prove nothing
    assert (best[..., 0] - best[..., 1]).median() > 0.02
    torch.testing.assert_close(sums(log_probs, own), log_likelihood, rtol=1e-4, atol=1e-5)


@each_kind
def test_steps_have_rl4cos_log_probabilities(kind: str) -> None:
    """Each step of the uncertainty, not only their sum; RL4CO gives the steps of its common loop alone."""
    policy, cities = make(kind), some_cities()
    predictor = RL4COPredictor(policy, scale="none", first="policy")
    tours, log_probs = walk(predictor, cities)
    if kind != "pointer":
        steps = ask(policy, cities, decode_type="greedy", return_sum_log_likelihood=False)[1]
        torch.testing.assert_close(log_probs.gather(2, tours[..., None]).squeeze(2), steps, rtol=1e-4, atol=1e-5)
    total = torch.where(log_probs.isfinite(), log_probs.exp(), 0.0).sum(2)
    torch.testing.assert_close(total, torch.ones_like(total))


@each_kind
def test_a_prefix_of_another_author(kind: str) -> None:
    policy, cities, tours = make(kind), some_cities(), some_tours()
    predictor = RL4COPredictor(policy, scale="none", first="policy")
    _, log_probs = walk(predictor, cities, tours)
    torch.testing.assert_close(sums(log_probs, tours), evaluate(policy, cities, tours), rtol=1e-4, atol=1e-5)


@each_kind
@torch.no_grad()
def test_going_on_from_a_prefix(kind: str) -> None:
    """What is proposed after a prefix is the city that RL4CO finds likeliest among all that could follow it."""
    policy, cities, tours, kept = make(kind), some_cities(n=1, size=6), some_tours(n=1, size=6), 3
    predictor = RL4COPredictor(policy, scale="none", first="policy")
    state, _ = predictor.start(cities)
    for position in range(kept):
        state = predictor.append(state, tours[:, position])
    left = tours[0, kept:]
    candidates = torch.stack([torch.cat([tours[0, :kept], left.roll(-shift)]) for shift in range(len(left))])
    likelihood = torch.stack([policy_step(policy, cities, tour, kept) for tour in candidates])
    assert predictor.propose(state).tokens.tolist() == [int(candidates[likelihood.argmax(), kept])]
    torch.testing.assert_close(state.log_probs[0, candidates[:, kept]], likelihood, rtol=1e-4, atol=1e-4)


def policy_step(policy: Any, cities: Tensor, tour: Tensor, position: int) -> Tensor:
    """log p of one step of a tour, in RL4CO's words."""
    env, start = environment(cities)
    if isinstance(policy, zoo.PointerNetworkPolicy):
        embedded = (cities @ policy.embedding).transpose(0, 1).contiguous()
        return policy._inner(embedded, "greedy", tour[None])[0][0, position]
    out = policy(start, env, phase="test", actions=tour[None], return_sum_log_likelihood=False)
    return out["log_likelihood"][0, position]


def test_clipping_temperature_and_masks_are_kept() -> None:
    policy, cities = make("attention", temperature=0.5, tanh_clipping=3.0, mask_inner=False), some_cities()
    tours, log_likelihood = ask(policy, cities, decode_type="greedy")
    own, log_probs = walk(RL4COPredictor(policy, scale="none"), cities)
    assert torch.equal(own, tours)
    torch.testing.assert_close(sums(log_probs, own), log_likelihood, rtol=1e-4, atol=1e-5)


def test_pointer_network_without_masked_logits() -> None:
    """Its probabilities then leave a share to cities that were visited; the tour is a tour all the same."""
    policy, cities = make("pointer", mask_logits=False, mask_inner=False, tanh_clipping=0), some_cities()
    tours, _ = ask(policy, cities, decode_type="greedy")
    assert torch.equal(walk(RL4COPredictor(policy, scale="none"), cities)[0], tours)


def test_polynet_walks_its_first_strategy() -> None:
    torch.manual_seed(0)
    policy = PolyNetPolicy(k=4, embed_dim=16, num_heads=2, feedforward_hidden=16).eval()
    cities = some_cities()
    tours, _ = ask(policy, cities, decode_type="greedy")
    assert torch.equal(walk(RL4COPredictor(policy, scale="none"), cities)[0], tours)


# -- the first city, and where the cities lie ----------------------------------------------------------------------


def test_pomo_begins_with_city_0() -> None:
    """RL4CO's multi-start decoding gives all tours from city 0 first, then all from city 1, and so on."""
    policy, cities = make("pomo"), some_cities()
    tours, _ = ask(policy, cities, decode_type="multistart_greedy")
    predictor = RL4COPredictor(policy, scale="none")
    assert predictor.first == "zero"
    own, _ = walk(predictor, cities)
    assert torch.equal(own, tours[: len(cities)])
    assert (own[:, 0] == 0).all()
    proposal = predictor.propose(predictor.start(cities)[0])
    assert not proposal.uncertainty.any()
    assert proposal.entropy is not None
    assert not proposal.entropy.any()


@pytest.mark.parametrize("kind", ["attention", "pointer"])
def test_city_0_on_request(kind: str) -> None:
    policy, cities = make(kind), some_cities()
    assert RL4COPredictor(policy).first == "policy"
    own, _ = walk(RL4COPredictor(policy, scale="none", first="zero"), cities)
    assert (own[:, 0] == 0).all()
    free = RL4COPredictor(policy, scale="none", first="policy")
    assert torch.equal(walk(free, cities, own)[0][:, 1:], own[:, 1:])


@each_kind
def test_unit_square_is_what_the_policy_sees(kind: str) -> None:
    policy, cities = make(kind), some_cities()
    inside = into_unit_square(cities)
    assert inside.amin() == 0
    assert torch.equal(inside.amax((1, 2)), torch.ones(len(cities)))
    torch.testing.assert_close(inside[:, 0] - inside[:, 1], (cities[:, 0] - cities[:, 1]) / sides(cities))
    seen = walk(RL4COPredictor(policy), cities)
    given = walk(RL4COPredictor(policy, scale="none"), inside)
    assert torch.equal(seen[0], given[0])
    moved = walk(RL4COPredictor(policy), 4 * cities + 8)
    assert torch.equal(seen[0], moved[0])


def sides(cities: Tensor) -> Tensor:
    return (cities.amax(1) - cities.amin(1)).amax(1, keepdim=True)


def test_cities_all_in_one_place_stay_finite() -> None:
    assert not into_unit_square(torch.full((1, 4, 2), 3.0)).any()


# -- a predictor like any other ------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("facts", [True, False])
def test_contract(kind: str, facts: bool) -> None:
    predictor, cities = RL4COPredictor(make(kind), facts=facts), some_cities(n=3, size=7)
    check_predictor(predictor, cities, SequenceSpec(7))
    others = Sequences(some_tours(n=3, size=7), torch.full((3,), 7))
    check_predictor(predictor, cities, SequenceSpec(7), paths=others)


@each_kind
@torch.no_grad()
def test_facts_are_those_of_our_own_network(kind: str) -> None:
    """In the units of the instance, whatever the policy sees."""
    ours, theirs = TourPredictor(PointerNet(4)), RL4COPredictor(make(kind))
    cities, tours = some_cities(), some_tours()
    left, right = ours.start(cities)[0], theirs.start(cities)[0]
    for position in range(4):
        left, right = ours.append(left, tours[:, position]), theirs.append(right, tours[:, position])
    said = theirs.propose(right)
    facts = adapter.step_facts(left.cities, left.distances, left.visited, left.first, left.last, said.tokens)
    assert torch.equal(said.features[:, -11:], facts)
    assert said.features.shape[1] == 16 + 11


def test_a_whole_tour_may_be_read() -> None:
    for kind in KINDS:
        predictor, cities, tours = RL4COPredictor(make(kind)), some_cities(), some_tours()
        state, _ = predictor.start(cities)
        for position in range(cities.shape[1]):
            state = predictor.append(state, tours[:, position])
        assert state.tour.visited.all()


def test_the_policy_itself_stays_as_it_was() -> None:
    policy = make("attention").train()
    RL4COPredictor(policy)
    assert policy.training
    assert all(weight.requires_grad for weight in policy.parameters())


def test_what_happens_to_the_policy_later_does_not_matter() -> None:
    policy, cities = make("attention"), some_cities()
    predictor = RL4COPredictor(policy)
    before = walk(predictor, cities)[1]
    torch.nn.init.zeros_(next(policy.parameters()))
    assert torch.equal(walk(predictor, cities)[1], before)


def test_random_numbers_and_threads_are_left_alone() -> None:
    state, count = torch.get_rng_state(), torch.get_num_threads()
    predictor = RL4COPredictor(make("attention"))
    torch.set_rng_state(state)
    walk(predictor, some_cities())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == count


def test_fingerprint_names_all_that_matters() -> None:
    base = RL4COPredictor(make("attention"))
    assert RL4COPredictor(make("attention")).fingerprint == base.fingerprint
    others = [
        RL4COPredictor(make("attention", seed=1)),
        RL4COPredictor(make("attention", num_heads=1)),  # the same weights
        RL4COPredictor(make("attention", temperature=2.0)),
        RL4COPredictor(make("attention", tanh_clipping=5.0)),
        RL4COPredictor(make("attention"), facts=False),
        RL4COPredictor(make("attention"), scale="none"),
        RL4COPredictor(make("attention"), first="zero"),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)
    assert base.fingerprint in base.summary


@pytest.mark.gpu
@each_kind
def test_on_a_gpu(kind: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    policy, cities = make(kind), some_cities()
    tours, expected = walk(RL4COPredictor(policy), cities)
    predictor = RL4COPredictor(policy.cuda())
    assert predictor.device.type == "cuda"
    _, log_probs = walk(predictor, cities.cuda(), tours.cuda())
    torch.testing.assert_close(log_probs.cpu(), expected, rtol=1e-3, atol=1e-3)


# -- what cannot be a predictor ------------------------------------------------------------------------------------


def refused() -> dict[str, tuple[Callable[[], Any], str]]:
    tiny = {"embed_dim": 16, "num_heads": 2}
    return {
        "another environment": (lambda: zoo.AttentionModelPolicy(env_name="cvrp", **tiny), "made for 'cvrp'"),
        "improvement": (lambda: zoo.DACTPolicy(embed_dim=64, num_heads=4, env_name="tsp_kopt"), "made for 'tsp_kopt'"),
        "a forward of its own": (lambda: zoo.MDAMPolicy(**tiny), "a forward of its own"),
        "a heat map": (heat_map, "city by city"),
        "no RL4CO": (lambda: torch.nn.Linear(2, 2), "made for None"),
        "no module": (lambda: "AttentionModelPolicy", "no policy at all"),
        "a training module": (training_module, "give its .policy"),
    }


def heat_map() -> Any:
    from rl4co.models.common.constructive.nonautoregressive import NonAutoregressivePolicy

    return NonAutoregressivePolicy(torch.nn.Linear(2, 2))


def training_module() -> Any:
    with warnings.catch_warnings():
        # Lightning's: RL4CO keeps the environment and the policy among the hyperparameters.
        warnings.filterwarnings("ignore", message="Attribute '.*' is an instance of `nn.Module`")
        return zoo.POMO(TSPEnv(), policy_kwargs=SMALL)


@pytest.mark.parametrize("name", refused())
def test_refused(name: str) -> None:
    policy, why = refused()[name]
    with pytest.raises(OptionError, match=why) as caught:
        RL4COPredictor(policy())
    assert "available: AttentionModelPolicy" in str(caught.value)


def test_unknown_choices() -> None:
    with pytest.raises(OptionError, match="unknown scale 'square'; available: none, unit"):
        RL4COPredictor(make("attention"), scale="square")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="unknown first '3'; available: auto, policy, zero"):
        RL4COPredictor(make("attention"), first="3")  # type: ignore[arg-type]


def test_pomo_marks_its_policy() -> None:
    assert RL4COPredictor(training_module().policy).first == "zero"


# -- on disk -------------------------------------------------------------------------------------------------------


@each_kind
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    policy, cities = make(kind), some_cities()
    saved = save_rl4co(policy, tmp_path, KINDS[kind][1])
    loaded = load_rl4co(tmp_path)
    assert loaded.fingerprint == saved.fingerprint == RL4COPredictor(policy).fingerprint
    assert loaded.first == ("zero" if kind == "pomo" else "policy")
    assert torch.equal(walk(loaded, cities)[1], walk(saved, cities)[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert load_rl4co(tmp_path, facts=False).facts is False


def test_scale_is_saved(tmp_path: Path) -> None:
    save_rl4co(make("pointer"), tmp_path, KINDS["pointer"][1], scale="none", first="zero")
    loaded = load_rl4co(tmp_path, torch.device("cpu"))
    assert (loaded.scale, loaded.first) == ("none", "zero")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({**SMALL, "num_heads": 1}, "setting that the weights do not show"),
        ({**SMALL, "temperature": 2.0}, "setting that the weights do not show"),
        ({**SMALL, "num_encoder_layers": 1}, "is not this policy: Error.* in loading state_dict"),
        ({**SMALL, "num_head": 2}, "unknown argument of AttentionModelPolicy 'num_head'; available: .*num_heads"),
        ({**SMALL, "num_heads": 3}, "fails: AssertionError"),
        ({**SMALL, "decoder": torch.nn.Linear(2, 2)}, "must be plain"),
    ],
)
def test_arguments_that_do_not_make_the_policy(arguments: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=why):
        save_rl4co(make("attention"), tmp_path / "folder", arguments)
    assert not list(tmp_path.iterdir())


def test_classes_that_are_not_on_the_list_are_not_saved(tmp_path: Path) -> None:
    policy = PolyNetPolicy(k=4, embed_dim=16, num_heads=2, feedforward_hidden=16)
    with pytest.raises(OptionError, match="unknown policy 'PolyNetPolicy'; available: AttentionModelPolicy, "):
        save_rl4co(policy, tmp_path)


def test_a_checkpoint_of_the_trainer_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"last\.ckpt is a file: .* pickle, .*\.save_rl4co"):
        load_rl4co(path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no policy of RL4CO in .*nowhere: it has no config.json"):
        load_rl4co(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "tsp_pointer"}, "does not describe a policy of RL4CO"),
        ({"arguments": []}, "does not describe a policy of RL4CO"),
        ({"policy": "DACTPolicy"}, "unknown policy 'DACTPolicy'"),
        ({"policy": "os.system"}, "unknown policy 'os.system'"),
        ({"arguments": {"embed_dim": -1}}, "fails"),
        ({"arguments": {"embed_dim": 10**12}}, "too large"),
        ({"arguments": {"embed_dim": 32, "num_heads": 2}}, "is damaged"),
        ({"arguments": {**SMALL, "env_name": "cvrp"}}, "is damaged|made for 'cvrp'"),
        ({"arguments": {**SMALL, "shell": "ls"}}, "unknown argument of AttentionModelPolicy 'shell'"),
        ({"scale": "square"}, "unknown scale 'square'"),
        ({"first": "last"}, "unknown first 'last'"),
    ],
)
def test_odd_files(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    save_rl4co(make("attention"), tmp_path, SMALL)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", {**config, **change})
    with pytest.raises(CheckpointError, match=why):
        load_rl4co(tmp_path)


def test_damaged_weights(tmp_path: Path) -> None:
    save_rl4co(make("pointer"), tmp_path, KINDS["pointer"][1])
    weights = read_tensors(tmp_path / "model.safetensors")
    write_tensors(tmp_path / "model.safetensors", {name: weights[name] for name in list(weights)[1:]})
    with pytest.raises(CheckpointError, match=r"is damaged: .*Missing key"):
        load_rl4co(tmp_path)


# -- without RL4CO -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_rl4co(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "rl4co"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rl4co", None)


@pytest.mark.usefixtures("no_rl4co")
def test_missing_extra(tmp_path: Path) -> None:
    config = {"kind": adapter.KIND, "policy": "PointerNetworkPolicy", "arguments": {}, "scale": "unit", "first": "zero"}
    write_json(tmp_path / "config.json", config)
    uses: list[Callable[[], Any]] = [lambda: load_rl4co(tmp_path), lambda: RL4COPredictor(torch.nn.Linear(2, 2))]
    for use in uses:
        with pytest.raises(MissingExtraError, match=r"needs the package 'rl4co'; .*pip install 'seqdefer\[rl4co\]'"):
            use()


@pytest.mark.usefixtures("no_rl4co")
def test_loading_the_module_does_not_load_rl4co() -> None:
    code = "import sys, seqdefer.tasks.tsp.rl4co; print(sorted({'rl4co', 'torchrl', 'lightning'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
