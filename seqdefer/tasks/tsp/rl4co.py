"""Policies of RL4CO as predictors: what its constructive policies for the TSP have learned writes the tours here.

    predictor = RL4COPredictor(model.policy)                 # of AttentionModel, POMO, SymNCO, PolyNet, PointerNetwork
    save_rl4co(model.policy, folder, {"embed_dim": 128})     # then: seqdefer run tsp --predictor rl4co:FOLDER

`propose` is RL4CO's greedy decoding, and any city may be appended, not only the proposed one. A policy is walked with
its own encoder and decoder, one step at a time; RL4CO's environment is not needed (making one reseeds torch).

RL4CO's trainer writes .ckpt files. They are pickles that hold the environment and the policy as Python objects: even
`torch.load(weights_only=True)` refuses them, and they are not read here. Who trusts such a file loads it with RL4CO,
`AttentionModel.load_from_checkpoint(path, load_baseline=False, weights_only=False)`, and writes the policy with
`save_rl4co`, as safetensors and JSON.
"""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from seqdefer.errors import CheckpointError, OptionError, missing_extra, unknown
from seqdefer.interfaces import Predictor
from seqdefer.storage.files import fingerprint, read_json, read_weights, write_json, write_tensors
from seqdefer.tasks.tsp.pointer import step_facts
from seqdefer.tasks.tsp.tours import distances
from seqdefer.types import Proposal

Scale = Literal["unit", "none"]
First = Literal["auto", "policy", "zero"]
Part = TypeVar("Part")

KIND = "tsp_rl4co"
SAVED = ("AttentionModelPolicy", "PointerNetworkPolicy", "SymNCOPolicy")  # classes a folder may name
LARGEST = 4096  # of sizes: beyond, a file is damaged, or a number has too many digits
FITTING = "AttentionModelPolicy (that of AttentionModel and POMO), SymNCOPolicy, PolyNetPolicy, PointerNetworkPolicy"


@dataclass(frozen=True)
class PartialTour:
    """The cities so far."""

    visited: Tensor  # bool (B, N)
    first: Tensor  # int64 (B,), -1 before the first city
    last: Tensor  # int64 (B,), -1 before the first city
    written: int  # cities visited: as many in every row

    @classmethod
    def empty(cls, cities: Tensor) -> PartialTour:
        nowhere = torch.full((len(cities),), -1, device=cities.device)
        return cls(torch.zeros(cities.shape[:2], dtype=torch.bool, device=cities.device), nowhere, nowhere, 0)

    def append(self, tokens: Tensor) -> PartialTour:
        first = self.first if self.written else tokens
        return PartialTour(self.visited.scatter(1, tokens[:, None], True), first, tokens, self.written + 1)


@dataclass(frozen=True)
class PolicyState:
    """A partial tour and the decoder that has read it."""

    cities: Tensor  # (B, N, 2) as given
    distances: Tensor  # (B, N, N) as given
    tour: PartialTour
    nodes: Tensor  # (B, N, H) the encoder's embeddings
    memory: Any  # what the policy's own decoder goes on from
    log_probs: Tensor  # (B, N) of the next city


class RL4COPredictor(Predictor[PolicyState]):
    """A frozen copy of a constructive policy of RL4CO for the TSP, greedy.

    `scale="unit"` shows it every instance moved and scaled into the unit square, its sides in proportion: that is where
    RL4CO trains unless told otherwise. `"none"` shows the cities as they are, for a policy trained on such cities.

    `first` says who takes the first city. `"policy"`: the policy. `"zero"`: city 0 is taken for certain, as RL4CO's
    multi-start decoding takes its first start; a policy trained with multiple starts (POMO) has never learned to choose
    the first city, and a tour may begin anywhere. `"auto"`: "zero" where the policy decodes with multiple starts.

    Context: the mean of the nodes' embeddings, and the encoder's last state where it has one (a pointer network).
    Features with `facts`: the decoder's state (a pointer network) or the embedding of the proposed city (attention has
    no state), and what the partial tour itself shows, in the units of the instance (`pointer.step_facts`). Without: the
    embedding of the proposed city, as in the paper."""

    def __init__(self, policy: Any, facts: bool = True, scale: Scale = "unit", first: First = "auto") -> None:
        _check_choice("scale", scale, get_args(Scale))
        _check_choice("first", first, get_args(First))
        steps = _steps_of(policy)
        # A copy, so that neither training nor `policy(..., phase="train")` changes what a rejector was fitted for.
        self.policy: Any = deepcopy(policy).float().eval().requires_grad_(False)
        self.steps = steps(self.policy)
        self.facts, self.scale = facts, scale
        self.first = first if first != "auto" else "zero" if _is_multistart(policy) else "policy"
        self.device = next(self.policy.parameters()).device
        self.fingerprint = fingerprint(_name_of(self.policy), self.facts, self.scale, self.first)

    @property
    def summary(self) -> str:
        """For people: what it is, and its fingerprint."""
        return f"{type(self.policy).__name__} of RL4CO ({self.fingerprint})"

    def start(self, inputs: Tensor) -> tuple[PolicyState, Tensor]:
        cities, tour = inputs.float(), PartialTour.empty(inputs)
        seen = into_unit_square(cities) if self.scale == "unit" else cities
        nodes, context, memory = self.steps.read(seen)
        log_probs, memory = self.steps.point(memory, tour)
        if self.first == "zero":
            log_probs = torch.full_like(log_probs, -torch.inf).index_fill(1, torch.zeros_like(tour.first[:1]), 0.0)
        return PolicyState(cities, distances(cities), tour, nodes, memory, log_probs), context

    def propose(self, state: PolicyState) -> Proposal:
        tour = state.tour
        log_probs = state.log_probs.masked_fill(tour.visited, -torch.inf)
        tokens = log_probs.argmax(1)
        surest = log_probs.gather(1, tokens[:, None]).squeeze(1)
        entropy = -torch.where(log_probs.isfinite(), log_probs.exp() * log_probs, 0.0).sum(1)
        if self.facts:
            facts = step_facts(state.cities, state.distances, tour.visited, tour.first, tour.last, tokens)
            features = torch.cat([self.steps.glance(state, tokens), facts], 1)
        else:
            features = node_of(state.nodes, tokens)
        return Proposal(tokens, features, (-surest).clamp(min=0), entropy.clamp(min=0))

    def append(self, state: PolicyState, tokens: Tensor) -> PolicyState:
        tour = state.tour.append(tokens)
        if tour.written == state.cities.shape[1]:  # nothing is left to point at
            return replace(state, tour=tour)
        log_probs, memory = self.steps.point(state.memory, tour)
        return replace(state, tour=tour, memory=memory, log_probs=log_probs)

    def select(self, state: PolicyState, rows: Tensor) -> PolicyState:
        return take(state, rows)


def into_unit_square(cities: Tensor) -> Tensor:
    """Each instance (B, N, 2) with its corner at 0 and its longer side 1."""
    corner = cities - cities.amin(1, keepdim=True)
    side = corner.amax((1, 2), keepdim=True)
    return corner / torch.where(side > 0, side, 1.0)


def node_of(nodes: Tensor, tokens: Tensor) -> Tensor:
    """(B, N, H), (B,) -> (B, H)"""
    return nodes[torch.arange(len(tokens), device=tokens.device), tokens]


def take(part: Part, rows: Tensor) -> Part:
    """`rows` of every tensor in a dataclass of tensors; a number holds for all rows."""
    if isinstance(part, Tensor):
        return part[rows]  # type: ignore[return-value]
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{field.name: take(getattr(part, field.name), rows) for field in fields(part)})
    if isinstance(part, int | float):
        return part
    raise OptionError(f"the policy's decoder keeps a {type(part).__name__}, whose rows cannot be selected")


# -- how the policies decode ---------------------------------------------------------------------------------------


class Steps(ABC):
    """A policy's own encoder and decoder, one step at a time."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    @abstractmethod
    def read(self, cities: Tensor) -> tuple[Tensor, Tensor, Any]:
        """The nodes' embeddings (B, N, H), the context (B, C), and the memory before the first step."""

    @abstractmethod
    def point(self, memory: Any, tour: PartialTour) -> tuple[Tensor, Any]:
        """Log probabilities (B, N) of the city after `tour`, and the memory for the step after it."""

    @abstractmethod
    def glance(self, state: PolicyState, tokens: Tensor) -> Tensor:
        """What the decoder knows as it goes on to `tokens`. (B, H)"""


@dataclass(frozen=True)
class Attention:
    """The memory of an attention model: it does not change along a tour."""

    cities: Tensor  # (B, N, 2) as the policy sees them
    cache: Any  # RL4CO's dataclass of keys and values, all (B, ...)


class AttentionSteps(Steps):
    """The common loop of RL4CO's autoregressive policies: a decoder that is shown the environment's state anew."""

    def read(self, cities: Tensor) -> tuple[Tensor, Tensor, Any]:
        observation = self._observe(cities, PartialTour.empty(cities))
        nodes, _ = self.policy.encoder(observation)
        if not isinstance(nodes, Tensor):
            raise _refusal(self.policy, "its encoder gives no embeddings of the cities")
        _, _, cache = self.policy.decoder.pre_decoder_hook(observation, None, nodes, 0)
        return nodes, nodes.mean(1), Attention(cities, cache)

    def point(self, memory: Attention, tour: PartialTour) -> tuple[Tensor, Attention]:
        logits, mask = self.policy.decoder(self._observe(memory.cities, tour), memory.cache, 0)
        log_probs: Tensor = _load("rl4co.utils.decoding").process_logits(
            logits, mask,
            temperature=self.policy.temperature, tanh_clipping=self.policy.tanh_clipping,
            mask_logits=self.policy.mask_logits,
        )  # fmt: skip
        return log_probs, memory

    def glance(self, state: PolicyState, tokens: Tensor) -> Tensor:
        return node_of(state.nodes, tokens)

    @staticmethod
    def _observe(cities: Tensor, tour: PartialTour) -> Any:
        """What RL4CO's TSPEnv shows of a partial tour."""
        observation = {
            "locs": cities,
            "first_node": tour.first.clamp(min=0),
            "current_node": tour.last.clamp(min=0),
            "i": torch.full((len(cities), 1), tour.written, device=cities.device),
            "action_mask": ~tour.visited,
            "done": tour.visited.all(1, keepdim=True),
        }
        return _load("tensordict").TensorDict(observation, batch_size=[len(cities)])


@dataclass(frozen=True)
class Recurrence:
    """The memory of a pointer network."""

    embedded: Tensor  # (B, N, H) coordinates
    nodes: Tensor  # (B, N, H) the encoder's states
    hidden: Tensor  # (B, H)
    cell: Tensor  # (B, H)


class PointerSteps(Steps):
    """PointerNetworkPolicy has a loop of its own, without an environment: an LSTM that reads the city taken last."""

    def read(self, cities: Tensor) -> tuple[Tensor, Tensor, Any]:
        embedded = cities @ self.policy.embedding  # (B, N, H)
        # The policy begins with zeros; its trainable init_hx and init_cx stay unused.
        zero = torch.zeros_like(embedded[None, :, 0])
        states, (hidden, cell) = self.policy.encoder(embedded.transpose(0, 1), (zero, zero))
        nodes = states.transpose(0, 1)
        context = torch.cat([nodes.mean(1), hidden[-1]], 1)
        return nodes, context, Recurrence(embedded, nodes, hidden[-1], cell[-1])

    def point(self, memory: Recurrence, tour: PartialTour) -> tuple[Tensor, Recurrence]:
        begin = self.policy.decoder_in_0.expand(len(tour.last), -1)
        city = node_of(memory.embedded, tour.last) if tour.written else begin
        (hidden, cell), log_probs, _ = self.policy.decoder.recurrence(
            city, (memory.hidden, memory.cell), ~tour.visited, None, tour.written, memory.nodes.transpose(0, 1)
        )
        return log_probs, replace(memory, hidden=hidden, cell=cell)

    def glance(self, state: PolicyState, tokens: Tensor) -> Tensor:
        hidden: Tensor = state.memory.hidden
        return hidden


def _steps_of(policy: Any) -> type[Steps]:
    """How to walk a policy, or an error for what cannot be walked."""
    constructive, zoo = _load("rl4co.models.common.constructive"), _load("rl4co.models.zoo")
    if not isinstance(policy, nn.Module):
        raise _refusal(policy, "it is no policy at all")
    if isinstance(getattr(policy, "policy", None), nn.Module):
        raise _refusal(policy, "it is a training module; give its .policy")
    environment = getattr(policy, "env_name", None)
    if getattr(environment, "name", environment) != "tsp":
        raise _refusal(policy, f"it is made for {getattr(environment, 'name', environment)!r}, not for 'tsp'")
    if isinstance(policy, zoo.PointerNetworkPolicy):
        return PointerSteps
    if not isinstance(policy, constructive.AutoregressivePolicy):
        raise _refusal(policy, "it does not write a tour city by city")
    # SymNCO's forward only projects the embeddings after the common loop.
    if type(policy).forward not in (constructive.ConstructivePolicy.forward, zoo.SymNCOPolicy.forward):
        raise _refusal(policy, "it has a forward of its own, whose steps are not known")
    return AttentionSteps


def _refusal(policy: object, why: str) -> OptionError:
    return OptionError(f"{type(policy).__name__} cannot be a TSP predictor: {why}; available: {FITTING}")


def _check_choice(kind: str, value: str, available: tuple[str, ...]) -> None:
    if value not in available:
        raise unknown(kind, value, available)


def _is_multistart(policy: Any) -> bool:
    """POMO marks its policy so."""
    return "multistart" in getattr(policy, "test_decode_type", "")


def _name_of(policy: nn.Module) -> str:
    """A fingerprint of the weights and of the numbers that they do not show (heads, clipping, temperature)."""
    numbers = [
        (name, type(module).__name__, {k: v for k, v in sorted(vars(module).items()) if _is_setting(k, v)})
        for name, module in policy.named_modules()
        if not type(module).__module__.startswith("torch.")
    ]
    weights = policy.state_dict()
    return fingerprint(numbers, list(weights), *weights.values())


def _is_setting(name: str, value: object) -> bool:
    return isinstance(value, bool | int | float) and not name.startswith("_") and name != "training"


def _load(module: str) -> Any:
    """A module of RL4CO or of what it needs, or an error that says how to get it."""
    threads = torch.get_num_threads()
    try:
        return import_module(module)
    except ImportError as error:
        raise missing_extra("rl4co", "rl4co", "a policy of RL4CO as predictor") from error
    finally:
        if torch.get_num_threads() != threads:  # compiled code that RL4CO loads sets it to the number of cores
            torch.set_num_threads(threads)


# -- on disk -------------------------------------------------------------------------------------------------------


def save_rl4co(
    policy: Any,
    folder: Path,
    arguments: Mapping[str, Any] | None = None,
    *,
    scale: Scale = "unit",
    first: First = "auto",
) -> RL4COPredictor:
    """Writes a policy for `load_rl4co`: its weights, its class, and `arguments`, what its constructor was given.

    Arguments that do not make this policy again are refused before anything is written. POMO gives its policy
    {"num_encoder_layers": 6, "normalization": "instance", "use_graph_context": False} unless told otherwise."""
    predictor = RL4COPredictor(policy, scale=scale, first=first)
    name, given = type(policy).__name__, dict(arguments or {})
    again = _build(name, given)
    try:
        again.load_state_dict(predictor.policy.state_dict())
    except RuntimeError as error:  # its message takes many lines
        raise OptionError(f"{name}(**{given}) is not this policy: {' '.join(str(error).split())}") from error
    if _name_of(again) != _name_of(predictor.policy):
        differ = "heads, clipping, temperature or another setting that the weights do not show differ"
        raise OptionError(f"{name}(**{given}) is not this policy: {differ}; give what its constructor was given")
    (folder / "config.json").unlink(missing_ok=True)  # written last: where it exists, the checkpoint is whole
    write_tensors(folder / "model.safetensors", predictor.policy.state_dict())
    config = {"kind": KIND, "policy": name, "arguments": given, "scale": predictor.scale, "first": predictor.first}
    write_json(folder / "config.json", config)
    return predictor


def load_rl4co(folder: Path, device: torch.device | None = None, facts: bool = True) -> RL4COPredictor:
    """The predictor that `save_rl4co` wrote."""
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file: a .ckpt of RL4CO is a pickle, which could run any code, and is not read here; if you "
            "trust it, load it with RL4CO and write its policy into a folder with seqdefer.tasks.tsp.rl4co.save_rl4co"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"no policy of RL4CO in {folder}: it has no config.json; write one with seqdefer.tasks.tsp.rl4co.save_rl4co"
        )
    config = read_json(folder / "config.json")
    wanted = {"kind": str, "policy": str, "arguments": dict, "scale": str, "first": str}
    is_ours = isinstance(config, dict) and all(isinstance(config.get(key), kind) for key, kind in wanted.items())
    if not is_ours or config["kind"] != KIND:
        raise CheckpointError(f"{folder / 'config.json'} does not describe a policy of RL4CO; write it again")
    try:
        policy = _build(config["policy"], config["arguments"])
        read_weights(policy, folder / "model.safetensors")
        return RL4COPredictor(policy.to(device or "cpu"), facts, config["scale"], config["first"])
    except OptionError as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be used: {error}") from error


def _build(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """A policy with random weights. Plain data in, so a file cannot make it run anything but its constructor."""
    _check_choice("policy", name, SAVED)
    kind = getattr(_load("rl4co.models.zoo"), name)
    known = _arguments_of(kind)
    for argument, value in arguments.items():
        if argument not in known:  # RL4CO would say so in its log and go on
            raise unknown(f"argument of {name}", argument, known)
        if isinstance(value, int) and value > LARGEST:
            raise OptionError(f"{name}({argument}={value}) is too large; at most {LARGEST}")
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise OptionError(f"arguments of {name} must be plain numbers, texts and such, to be kept: {error}") from error
    try:
        policy: nn.Module = kind(**arguments)
    except Exception as error:  # whatever RL4CO and torch make of sizes that do not fit
        raise OptionError(f"{name}(**{dict(arguments)}) fails: {type(error).__name__}: {error}") from error
    return policy


def _arguments_of(kind: type) -> set[str]:
    """What a policy's constructor takes, and those that it hands on to."""
    makers = [base for base in kind.__mro__ if base.__module__.startswith("rl4co.models.zoo.")]
    parameters = [parameter for maker in makers for parameter in inspect.signature(maker).parameters.values()]
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
