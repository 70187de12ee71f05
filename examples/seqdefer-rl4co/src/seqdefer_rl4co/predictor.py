"""The predictor: a constructive policy of RL4CO, decoded greedily, one city at a time and from any prefix.

The policy's own encoder and decoder do the work. RL4CO's environment is not used: creating one reseeds torch.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from rl4co.models.common.constructive import AutoregressivePolicy, ConstructivePolicy
from rl4co.models.zoo import PointerNetworkPolicy, SymNCOPolicy
from rl4co.utils.decoding import process_logits
from tensordict import TensorDict
from torch import Tensor, nn

from seqdefer.errors import OptionError, unknown
from seqdefer.interfaces import Predictor
from seqdefer.storage.files import fingerprint
from seqdefer.tasks.tsp.pointer import step_facts
from seqdefer.tasks.tsp.tours import distances
from seqdefer.types import Proposal

Scale = Literal["unit", "none"]
First = Literal["auto", "policy", "zero"]
Part = TypeVar("Part")

SUPPORTED = "AttentionModelPolicy (of AttentionModel and POMO), SymNCOPolicy, PolyNetPolicy, PointerNetworkPolicy"


@dataclass(frozen=True)
class PartialTour:
    """The cities visited so far."""

    visited: Tensor  # bool (B, N)
    first: Tensor  # int64 (B,), -1 before the first city
    last: Tensor  # int64 (B,), -1 before the first city
    written: int  # cities visited, the same in every row

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
    cache: Any  # what the policy's decoder continues from
    log_probs: Tensor  # (B, N) of the next city


class RL4COPredictor(Predictor[PolicyState]):
    """A frozen copy of a constructive TSP policy of RL4CO, greedy.

    scale  "unit" moves and scales every instance into the unit square, where RL4CO trains by default; "none" does not
    first  "policy" lets the policy choose the first city; "zero" starts at city 0, as RL4CO's multi-start decoding
           does, because a policy trained so (POMO) never learned to choose; "auto" detects which applies
    facts  features are the decoder's state and `step_facts` in the units of the instance; without, the embedding of
           the proposed city, as in the paper"""

    def __init__(self, policy: Any, facts: bool = True, scale: Scale = "unit", first: First = "auto") -> None:
        for kind, value, available in (("scale", scale, get_args(Scale)), ("first", first, get_args(First))):
            if value not in available:
                raise unknown(kind, value, available)
        decoder = _decoder_for(policy)
        # A copy: later training, or `policy(..., phase="train")`, must not change what a rejector was fitted for.
        self.policy: Any = deepcopy(policy).float().eval().requires_grad_(False)
        self.decoder = decoder(self.policy)
        self.facts, self.scale = facts, scale
        multistart = "multistart" in getattr(policy, "test_decode_type", "")  # set by POMO
        self.first = first if first != "auto" else "zero" if multistart else "policy"
        self.device = next(self.policy.parameters()).device
        self.summary = f"{type(policy).__name__} of RL4CO"
        self.fingerprint = fingerprint(name_of(self.policy), self.facts, self.scale, self.first)

    def start(self, inputs: Tensor) -> tuple[PolicyState, Tensor]:
        cities, tour = inputs.float(), PartialTour.empty(inputs)
        nodes, context, cache = self.decoder.encode(into_unit_square(cities) if self.scale == "unit" else cities)
        log_probs, cache = self.decoder.point(cache, tour)
        if self.first == "zero":
            log_probs = torch.full_like(log_probs, -torch.inf).index_fill(1, torch.zeros_like(tour.first[:1]), 0.0)
        return PolicyState(cities, distances(cities), tour, nodes, cache, log_probs), context

    def propose(self, state: PolicyState) -> Proposal:
        tour = state.tour
        log_probs = state.log_probs.masked_fill(tour.visited, -torch.inf)
        tokens = log_probs.argmax(1)
        surest = log_probs.gather(1, tokens[:, None]).squeeze(1)
        entropy = -torch.where(log_probs.isfinite(), log_probs.exp() * log_probs, 0.0).sum(1)
        if self.facts:
            facts = step_facts(state.cities, state.distances, tour.visited, tour.first, tour.last, tokens)
            features = torch.cat([self.decoder.state_features(state, tokens), facts], 1)
        else:
            features = pick(state.nodes, tokens)
        return Proposal(tokens, features, (-surest).clamp(min=0), entropy.clamp(min=0))

    def append(self, state: PolicyState, tokens: Tensor) -> PolicyState:
        tour = state.tour.append(tokens)
        if tour.written == state.cities.shape[1]:
            return replace(state, tour=tour)
        log_probs, cache = self.decoder.point(state.cache, tour)
        return replace(state, tour=tour, cache=cache, log_probs=log_probs)

    def select(self, state: PolicyState, rows: Tensor) -> PolicyState:
        return select_rows(state, rows)


def into_unit_square(cities: Tensor) -> Tensor:
    """Move each instance (B, N, 2) to the origin and scale its longer side to 1."""
    moved = cities - cities.amin(1, keepdim=True)
    side = moved.amax((1, 2), keepdim=True)
    return moved / torch.where(side > 0, side, 1.0)


def pick(nodes: Tensor, tokens: Tensor) -> Tensor:
    """(B, N, H), (B,) -> (B, H)"""
    return nodes[torch.arange(len(tokens), device=tokens.device), tokens]


def select_rows(part: Part, rows: Tensor) -> Part:
    """Select `rows` of every tensor in nested dataclasses; numbers hold for all rows."""
    if isinstance(part, Tensor):
        return part[rows]  # type: ignore[return-value]
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{field.name: select_rows(getattr(part, field.name), rows) for field in fields(part)})
    if isinstance(part, int | float):
        return part
    raise OptionError(f"cannot select rows of a {type(part).__name__}, which the policy's decoder caches")


def name_of(policy: nn.Module) -> str:
    """Return a fingerprint of the weights and of the settings that they do not show (heads, clipping, temperature)."""
    numbers = [
        (name, type(module).__name__, {k: v for k, v in sorted(vars(module).items()) if _is_setting(k, v)})
        for name, module in policy.named_modules()
        if not type(module).__module__.startswith("torch.")
    ]
    weights = policy.state_dict()
    return fingerprint(numbers, list(weights), *weights.values())


def _is_setting(name: str, value: object) -> bool:
    return isinstance(value, bool | int | float) and not name.startswith("_") and name != "training"


# -- decoding, one step at a time ----------------------------------------------------------------------------------
#
# encode          cities (B, N, 2) -> node embeddings (B, N, H), context (B, C), cache before the first step
# point           log probabilities (B, N) of the city after a partial tour, and the cache for the next step
# state_features  the decoder's view of going on to `tokens` (B, H)


@dataclass(frozen=True)
class AttentionCache:
    """The cache of an attention model; it does not change along a tour."""

    cities: Tensor  # (B, N, 2) as the policy sees them
    keys: Any  # RL4CO's dataclass of keys and values, all (B, ...)


class AttentionDecoder:
    """RL4CO's common autoregressive loop: the decoder sees the environment's state at every step."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def encode(self, cities: Tensor) -> tuple[Tensor, Tensor, Any]:
        observation = self._observe(cities, PartialTour.empty(cities))
        nodes, _ = self.policy.encoder(observation)
        _, _, keys = self.policy.decoder.pre_decoder_hook(observation, None, nodes, 0)
        return nodes, nodes.mean(1), AttentionCache(cities, keys)

    def point(self, cache: AttentionCache, tour: PartialTour) -> tuple[Tensor, AttentionCache]:
        logits, mask = self.policy.decoder(self._observe(cache.cities, tour), cache.keys, 0)
        settings = {name: getattr(self.policy, name) for name in ("temperature", "tanh_clipping", "mask_logits")}
        log_probs: Tensor = process_logits(logits, mask, **settings)
        return log_probs, cache

    def state_features(self, state: PolicyState, tokens: Tensor) -> Tensor:
        return pick(state.nodes, tokens)

    @staticmethod
    def _observe(cities: Tensor, tour: PartialTour) -> Any:
        """Return what RL4CO's TSPEnv shows of a partial tour."""
        step = torch.full((len(cities), 1), tour.written, device=cities.device)
        nodes = {"first_node": tour.first.clamp(min=0), "current_node": tour.last.clamp(min=0)}
        masks = {"action_mask": ~tour.visited, "done": tour.visited.all(1, keepdim=True)}
        return TensorDict({"locs": cities, "i": step, **nodes, **masks}, batch_size=[len(cities)])


@dataclass(frozen=True)
class PointerCache:
    """The recurrent state of a pointer network."""

    embedded: Tensor  # (B, N, H) coordinates
    nodes: Tensor  # (B, N, H) the encoder's states
    hidden: Tensor  # (B, H)
    cell: Tensor  # (B, H)


class PointerDecoder:
    """PointerNetworkPolicy's own loop, without an environment: an LSTM that reads the last city."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def encode(self, cities: Tensor) -> tuple[Tensor, Tensor, Any]:
        embedded = cities @ self.policy.embedding  # (B, N, H)
        zero = torch.zeros_like(embedded[None, :, 0])  # as in the policy, which ignores its trainable init_hx, init_cx
        states, (hidden, cell) = self.policy.encoder(embedded.transpose(0, 1), (zero, zero))
        nodes = states.transpose(0, 1)
        context = torch.cat([nodes.mean(1), hidden[-1]], 1)
        return nodes, context, PointerCache(embedded, nodes, hidden[-1], cell[-1])

    def point(self, cache: PointerCache, tour: PartialTour) -> tuple[Tensor, PointerCache]:
        begin = self.policy.decoder_in_0.expand(len(tour.last), -1)
        city = pick(cache.embedded, tour.last) if tour.written else begin
        (hidden, cell), log_probs, _ = self.policy.decoder.recurrence(
            city, (cache.hidden, cache.cell), ~tour.visited, None, tour.written, cache.nodes.transpose(0, 1)
        )
        return log_probs, replace(cache, hidden=hidden, cell=cell)

    def state_features(self, state: PolicyState, tokens: Tensor) -> Tensor:
        hidden: Tensor = state.cache.hidden
        return hidden


def _decoder_for(policy: Any) -> type[AttentionDecoder | PointerDecoder]:
    environment = getattr(policy, "env_name", None)
    environment = getattr(environment, "name", environment)
    if isinstance(getattr(policy, "policy", None), nn.Module):
        raise _refusal(policy, "it is a training module; give its .policy")
    if environment != "tsp":
        raise _refusal(policy, f"it is made for {environment!r}, not for 'tsp'")
    if isinstance(policy, PointerNetworkPolicy):
        return PointerDecoder
    if not isinstance(policy, AutoregressivePolicy):
        raise _refusal(policy, "it does not write a tour city by city")
    # SymNCO's forward only projects the embeddings after the common loop.
    if type(policy).forward not in (ConstructivePolicy.forward, SymNCOPolicy.forward):
        raise _refusal(policy, "it overrides `forward`, so its steps are unknown")
    return AttentionDecoder


def _refusal(policy: object, reason: str) -> OptionError:
    return OptionError(f"{type(policy).__name__} cannot be a TSP predictor: {reason}; available: {SUPPORTED}")
