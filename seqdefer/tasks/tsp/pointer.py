"""The TSP predictor: a pointer network (Vinyals et al.), an LSTM that reads the cities and an LSTM that points at them.

It reads the cities by their angle around the center, so its tour does not depend on the order in which they are listed.
`propose` is greedy. `seqdefer.tasks.tsp.reinforce` trains the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seqdefer.errors import CheckpointError
from seqdefer.interfaces import Predictor
from seqdefer.storage.files import fingerprint, read_json, read_weights
from seqdefer.storage.made_once import CONFIG, WEIGHTS, save_network
from seqdefer.tasks.tsp.tours import distances
from seqdefer.types import BatchRecord, Proposal

KIND = "tsp_pointer"
MAX_HIDDEN = 4096  # units; a checkpoint with more is damaged
LOGIT_CLIP = 10.0  # bound of the logits, so that training can reach every city (Bello et al.)


class PointerNet(nn.Module):
    """Encoder and decoder over cities (B, N, 2)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.embed = nn.Linear(2, hidden)
        self.encoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.decoder = nn.LSTMCell(hidden, hidden)
        self.begin = nn.Parameter(torch.zeros(hidden))
        self.glimpse_key, self.pointer_key = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.glimpse_query, self.pointer_query = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.glimpse, self.pointer = nn.Linear(hidden, 1, bias=False), nn.Linear(hidden, 1, bias=False)

    def encode(self, cities: Tensor) -> EncodedCities:
        """Read all cities."""
        centred = cities - cities.mean(1, keepdim=True)
        order = torch.atan2(centred[..., 1], centred[..., 0]).argsort(dim=1, stable=True)  # (B, N)
        ordered = cities.gather(1, order[..., None].expand(-1, -1, 2))
        states, (hidden, memory) = self.encoder(self.embed(ordered))
        back = order.argsort(1)[..., None].expand_as(states)
        nodes = states.gather(1, back)  # in the order of `cities`
        return EncodedCities(
            self.embed(cities), nodes, self.glimpse_key(nodes), self.pointer_key(nodes), hidden[0], memory[0]
        )

    def read(self, inputs: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the decoder's hidden and memory (B, H) after one more input (B, H)."""
        state: tuple[Tensor, Tensor] = self.decoder(inputs, (hidden, memory))
        return state

    def point(self, encoded: EncodedCities, hidden: Tensor, visited: Tensor) -> Tensor:
        """Return log probabilities of the next city, -inf where `visited` (bool (B, N)). (B, N)"""
        seen = torch.tanh(encoded.glimpse_keys + self.glimpse_query(hidden)[:, None])
        weights = self.glimpse(seen).squeeze(2).masked_fill(visited, -torch.inf).softmax(1)  # (B, N)
        glimpse = torch.bmm(weights[:, None], encoded.nodes).squeeze(1)
        aimed = torch.tanh(encoded.pointer_keys + self.pointer_query(glimpse + hidden)[:, None])
        logits = LOGIT_CLIP * torch.tanh(self.pointer(aimed).squeeze(2))
        return logits.masked_fill(visited, -torch.inf).log_softmax(1)


@dataclass(frozen=True)
class EncodedCities(BatchRecord):
    """The encoder's output, constant along a tour."""

    embedded: Tensor  # (B, N, H) coordinates
    nodes: Tensor  # (B, N, H) the encoder's states
    glimpse_keys: Tensor  # (B, N, H)
    pointer_keys: Tensor  # (B, N, H)
    hidden: Tensor  # (B, H) after the last city
    memory: Tensor  # (B, H)


@dataclass(frozen=True)
class TourState(BatchRecord):
    """A partial tour and the decoder that has read it."""

    cities: Tensor  # (B, N, 2)
    distances: Tensor  # (B, N, N)
    encoded: EncodedCities
    hidden: Tensor  # (B, H)
    memory: Tensor  # (B, H)
    log_probs: Tensor  # (B, N) of the next city
    visited: Tensor  # bool (B, N)
    first: Tensor  # int64 (B,), -1 before the first city
    last: Tensor  # int64 (B,), -1 before the first city


class TourPredictor(Predictor[TourState]):
    """A frozen PointerNet, greedy.

    The context is the mean node embedding and the encoder's last state. With `facts`, features are the decoder's state
    and `step_facts`; without, the embedding of the proposed city, as in the paper."""

    def __init__(self, model: PointerNet, facts: bool = True) -> None:
        self.model, self.facts = model.eval().requires_grad_(False), facts
        self.device = model.begin.device
        self.batch_size = 512 if self.device.type == "cpu" else 4096  # as many N x N tables as a cache holds
        self.summary = f"pointer network of {model.hidden}"
        self.fingerprint = fingerprint(*model.state_dict().values(), facts)
        self.writer = fingerprint(*model.state_dict().values())

    def start(self, inputs: Tensor) -> tuple[TourState, Tensor]:
        cities = inputs.float()
        encoded = self.model.encode(cities)
        context = torch.cat([encoded.nodes.mean(1), encoded.hidden], 1)
        begin = self.model.begin.expand(len(cities), -1)
        hidden, memory = self.model.read(begin, encoded.hidden, encoded.memory)
        visited = torch.zeros(cities.shape[:2], dtype=torch.bool, device=cities.device)
        nowhere = torch.full((len(cities),), -1, device=cities.device)
        log_probs = self.model.point(encoded, hidden, visited)
        return (
            TourState(cities, distances(cities), encoded, hidden, memory, log_probs, visited, nowhere, nowhere),
            context,
        )

    def propose(self, state: TourState) -> Proposal:
        surest, tokens = state.log_probs.max(1)
        known = torch.where(state.visited, 0.0, state.log_probs)
        entropy = -(known.exp() * known).masked_fill(state.visited, 0.0).sum(1)
        if self.facts:
            facts = step_facts(state.cities, state.distances, state.visited, state.first, state.last, tokens)
            features = torch.cat([state.hidden, facts], 1)
        else:
            features = state.encoded.nodes[torch.arange(len(tokens), device=tokens.device), tokens]
        return Proposal(tokens, features, -surest, entropy.clamp(min=0))

    def append(self, state: TourState, tokens: Tensor) -> TourState:
        rows = torch.arange(len(tokens), device=tokens.device)
        visited = state.visited.clone()
        visited[rows, tokens] = True
        hidden, memory = self.model.read(state.encoded.embedded[rows, tokens], state.hidden, state.memory)
        # After the last city there is nothing to point at; an unmasked row keeps the numbers finite.
        log_probs = self.model.point(state.encoded, hidden, visited & ~visited.all(1, keepdim=True))
        first = torch.where(state.first < 0, tokens, state.first)
        return TourState(
            state.cities, state.distances, state.encoded, hidden, memory, log_probs, visited, first, tokens
        )


def save_pointer(model: PointerNet, folder: Path, notes: Mapping[str, Any]) -> None:
    """Write a checkpoint. `notes` say how it was made."""
    save_network(model, folder, {"kind": KIND, "hidden": model.hidden, "notes": dict(notes)})


def load_pointer(folder: Path, device: torch.device) -> PointerNet:
    """Read the checkpoint in `folder`."""
    path, train = folder / CONFIG, "train one with: seqdefer train-predictor tsp"
    if not path.is_file():
        raise CheckpointError(f"no pointer network in {folder}: it has no {CONFIG}; {train} --out {folder}")
    config = read_json(path)
    hidden = config.get("hidden") if isinstance(config, dict) and config.get("kind") == KIND else None
    if type(hidden) is not int or not 1 <= hidden <= MAX_HIDDEN:  # JSON's true is an int to Python
        raise CheckpointError(f"{path} does not describe a pointer network; {train}")
    model = PointerNet(hidden)
    read_weights(model, folder / WEIGHTS)
    if not all(bool(weights.isfinite().all()) for weights in model.parameters()):
        raise CheckpointError(f"{folder / WEIGHTS} is damaged: not all weights are finite; {train}")
    return model.to(device).eval()


def step_facts(
    cities: Tensor, distances: Tensor, visited: Tensor, first: Tensor, last: Tensor, tokens: Tensor
) -> Tensor:
    """Return facts of a partial tour that is about to go on to `tokens`. (B, 11)

    Step length (0 for the first city), distance to the nearest unvisited city and the regret against it, rank of the
    proposed city by distance, mean distance to the unvisited, distances of the current and of the proposed city to the
    start, coordinates, spread of the unvisited cities (mean distance to the nearest other one), and their share."""
    rows = torch.arange(len(tokens), device=tokens.device)
    here = torch.where(last < 0, tokens, last)
    start = torch.where(first < 0, tokens, first)
    free = ~visited
    away = distances[rows, here]  # (B, N)
    step, nearest = away[rows, tokens], away.masked_fill(visited, torch.inf).amin(1)
    rank = ((away < step[:, None]) & free).sum(1)
    mean = (away * free).sum(1) / free.sum(1)
    ends = distances[rows, start]
    # Unvisited cities, and the two ends that the rest of the tour must join.
    is_open = free.clone()
    is_open[rows, here] = is_open[rows, start] = True
    apart = distances + torch.diag_embed(torch.full_like(away, torch.inf))
    apart = apart.masked_fill(~is_open[:, None], torch.inf).amin(2)  # (B, N) to the nearest open city
    spread = torch.where(free & apart.isfinite(), apart, 0.0).sum(1) / free.sum(1)
    facts = [
        step, nearest, step - nearest, rank / free.shape[1], mean, ends[rows, here], ends[rows, tokens],
        cities[rows, tokens, 0], cities[rows, tokens, 1], spread, free.sum(1) / free.shape[1],
    ]  # fmt: skip
    return torch.stack(facts, 1)
