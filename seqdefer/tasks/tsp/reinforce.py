"""Train the pointer network: REINFORCE with the mean of several sampled tours of an instance as the baseline.

Instances are rotated and mirrored at random each time they are seen, which does not change tour lengths. Every epoch
has its own random generator and ends with a checkpoint, so resumed training equals uninterrupted training. Such a
checkpoint is unfinished work to go on with, unlike what `storage/made_once.py` finds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from seqdefer.errors import CheckpointError, OptionError
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.storage.files import fingerprint, read_tensors, write_tensors
from seqdefer.tasks.common.options import check_ranges, option
from seqdefer.tasks.tsp.pointer import MAX_HIDDEN, EncodedCities, PointerNet
from seqdefer.tasks.tsp.tours import tour_lengths

OPTION_RANGES = {
    "cities": (4, 10_000), "instances": (1, 10**7), "hidden": (1, MAX_HIDDEN), "epochs": (1, 10_000),
    "samples": (2, 10_000), "batch_size": (1, 10**6), "seed": (0, 2**63 - 1),
}  # fmt: skip


@dataclass(frozen=True)
class TrainingOptions:
    """Options of `seqdefer train-predictor tsp`. The defaults made the shipped checkpoint."""

    cities: int = option(50, "cities of an instance")
    instances: int = option(10_000, "training instances")
    hidden: int = option(64, "size of the network")
    epochs: int = option(8, "passes over the instances")
    samples: int = option(8, "tours sampled for each instance; their mean is the baseline")
    batch_size: int = option(128, "instances per step")
    learning_rate: float = option(1e-3, "peak learning rate: it rises over the first 5 % of the steps, then falls to 0")
    clip_norm: float = option(1.0, "largest norm of the gradient")
    seed: int = option(0, "seed of instances, weights and samples")

    def __post_init__(self) -> None:
        check_ranges(self, OPTION_RANGES)
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) <= 1e6:
                flag = "--" + name.replace("_", "-")
                raise OptionError(f"{flag} is {getattr(self, name)}; it must be above 0, and at most 1e6")


def sample_tours(model: PointerNet, encoded: EncodedCities, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Sample one tour per row and return its log probability; greedy without a generator. (B, N), (B,)"""
    n, size, _ = encoded.nodes.shape
    rows = torch.arange(n, device=encoded.nodes.device)
    visited = torch.zeros(n, size, dtype=torch.bool, device=rows.device)
    inputs, hidden, memory = model.begin.expand(n, -1), encoded.hidden, encoded.memory
    tours, total = [], torch.zeros(n, device=rows.device)
    for _ in range(size):
        hidden, memory = model.read(inputs, hidden, memory)
        log_probs = model.point(encoded, hidden, visited)
        if generator is None:
            city = log_probs.argmax(1)
        else:
            city = torch.multinomial(log_probs.detach().exp(), 1, generator=generator).squeeze(1)
        total = total + log_probs[rows, city]
        visited = visited.scatter(1, city[:, None], True)
        inputs = encoded.embedded[rows, city]
        tours.append(city)
    return torch.stack(tours, 1), total


def rotate(cities: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate each instance by its own angle and mirror half of them. (B, N, 2)"""
    angle = 2 * math.pi * torch.rand(len(cities), generator=generator, device=cities.device)
    mirror = (torch.rand(len(cities), generator=generator, device=cities.device) < 0.5) * 2.0 - 1.0
    cos, sin = angle.cos(), angle.sin()
    rotation = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)  # (B, 2, 2)
    rotation = torch.stack([rotation[:, 0], rotation[:, 1] * mirror[:, None]], 1)
    return cities @ rotation


def schedule(share: float) -> float:
    """Return the learning rate after a share (0..1) of all steps: up over the first 5 %, then down along a cosine."""
    return min(share / 0.05, 1.0) * 0.5 * (1 + math.cos(math.pi * share))


class PointerTraining:
    """A network with its optimiser, trained epoch by epoch."""

    def __init__(self, cities: Tensor, options: TrainingOptions, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        self.options, self.device, self.cities = options, device, cities.to(device)
        self.name = fingerprint(asdict(options), cities)
        self.model = PointerNet(options.hidden).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=options.learning_rate)
        self.steps = math.ceil(len(cities) / options.batch_size)  # of an epoch
        self.epoch = 0

    def run_epoch(self, progress: Progress = NO_PROGRESS) -> float:
        """Train one epoch; return the mean length of the sampled tours."""
        seed = int(fingerprint(self.options.seed, self.epoch), 16) % 2**63
        generator = torch.Generator(self.device).manual_seed(seed)
        order = torch.randperm(len(self.cities), generator=generator, device=self.device)
        total = 0.0
        for step, rows in enumerate(order.split(self.options.batch_size), self.epoch * self.steps):
            self.optimizer.param_groups[0]["lr"] = self.options.learning_rate * schedule(
                step / (self.options.epochs * self.steps)
            )
            lengths, log_probs = self._sample(rotate(self.cities[rows], generator), generator)
            loss = ((lengths - lengths.mean(1, keepdim=True)) * log_probs).mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip_norm)
            self.optimizer.step()
            total += float(lengths.mean()) * len(rows)
            progress(len(rows))
        self.epoch += 1
        return total / len(self.cities)

    def _sample(self, cities: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return lengths and log probabilities of several tours of each instance. (B, samples) each"""
        encoded = self.model.encode(cities)
        each = torch.arange(len(cities), device=self.device).repeat_interleave(self.options.samples)
        tours, log_probs = sample_tours(self.model, encoded.select(each), generator)
        lengths = tour_lengths(cities[each], tours).float()
        return lengths.view(-1, self.options.samples), log_probs.view(-1, self.options.samples)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.named_parameters():
            yield f"weight/{name}", tensor.data
            for moment in ("exp_avg", "exp_avg_sq"):
                yield f"{moment}/{name}", self.optimizer.state[tensor][moment]

    def save(self, path: Path) -> None:
        """Write weights, Adam's moments and the epoch."""
        write_tensors(path, dict(self._tensors()) | {"epoch": torch.tensor(self.epoch)}, {"made_by": self.name})

    def resume(self, path: Path) -> None:
        """Continue from what `save` wrote. Raise CheckpointError if other options made it."""
        found = read_tensors(path)
        if _made_by(path) != self.name:
            raise CheckpointError(f"{path} was made with other options; choose another folder with --out, or remove it")
        self.epoch = int(found["epoch"])
        for parameter in self.model.parameters():  # Adam creates its moments at the first step
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(self.epoch * self.steps)), **moments}
        for name, tensor in self._tensors():
            tensor.copy_(found[name])


def _made_by(path: Path) -> str | None:
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        return (file.metadata() or {}).get("made_by")


def train(
    cities: Tensor,
    options: TrainingOptions,
    device: torch.device,
    folder: Path,
    progress: Progress = NO_PROGRESS,
) -> PointerNet:
    """Train on `cities` (n, N, 2), resuming from `folder`. `progress` is called with numbers of instances."""
    training, path = PointerTraining(cities, options, device), folder / "training.safetensors"
    if path.is_file():
        training.resume(path)
        progress(training.epoch * len(cities))
    while training.epoch < options.epochs:
        training.run_epoch(progress)
        training.save(path)
    return training.model.eval()
