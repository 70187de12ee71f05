"""The traveling salesman task: a pointer network writes tours, a solver completes them.

A token is a city. The target of an example is the expert's own tour; the loss of a tour is its excess length over that
tour in per cent. The expert completes tours but cannot name the next city, so there is no token-level deferral.

Another package can offer predictors by entry points (`--predictor NAME:FOLDER`, see examples/seqdefer-rl4co):

    [project.entry-points."seqdefer.tsp.predictors"]
    NAME = "my_package:load_predictor"    # load_predictor(folder, device, facts) returns a Predictor
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqdefer.errors import MissingExtraError, OptionError, unknown
from seqdefer.hyperparameters import ATTENTION, published_perceptron
from seqdefer.interfaces import Expert, Predictor, PredictorTraining, Served, SplitName, Task, TaskEntry
from seqdefer.progress import Meter
from seqdefer.recipes import Recipe, published
from seqdefer.registry import find_plugins
from seqdefer.storage.files import fingerprint
from seqdefer.storage.made_once import tensors_made_once
from seqdefer.tasks.tsp.codec import TourCodec
from seqdefer.tasks.tsp.data import gaussian_instances, make_splits
from seqdefer.tasks.tsp.drawing import TourDrawing, draw_gallery
from seqdefer.tasks.tsp.experts import make_expert
from seqdefer.tasks.tsp.options import TSPOptions
from seqdefer.tasks.tsp.pointer import PointerNet, TourPredictor, load_pointer, save_pointer
from seqdefer.tasks.tsp.reinforce import TrainingOptions, sample_tours, train
from seqdefer.tasks.tsp.tours import percent_over
from seqdefer.types import Examples, Rollout, Sequences, SequenceSpec

PREDICTORS = "seqdefer.tsp.predictors"
SOLVE_BATCH = 256  # instances solved between two writes
# The paper's cost of a deferred city is 0.01, without a unit; we read units of length. A shortest tour of 50 Gaussian
# cities is 23.7 long.
PUBLISHED_ALPHA = 100 * (0.01 * 50) / 23.7  # alpha_1, in % of the expert's tour
N_EVALUATION = 500  # instances that a trained predictor is measured on


class TSPTask(Task):
    name = "tsp"
    loss_unit = "% over the expert's tour"
    more_test_data = "raise --test"
    predictor: Predictor[Any]
    expert: Expert

    def __init__(
        self,
        options: TSPOptions,
        source: str,
        parts: Mapping[SplitName, Examples],
        predictor: Predictor[Any],
        expert: Expert,
    ) -> None:
        self.options, self.source, self.parts = options, source, parts
        self.predictor, self.expert = predictor, expert
        self.spec = SequenceSpec(length=parts["test"].inputs.shape[1])
        self.codec = TourCodec(self.spec.length)
        self.has_published_figures = options.data is None and self.spec.length == 50

    def split(self, name: SplitName) -> Examples:
        return self.parts[name]

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        return percent_over(examples.inputs, sequences.tokens, examples.targets)

    def describe(self) -> dict[str, str]:
        summary = getattr(self.predictor, "summary", type(self.predictor).__name__)
        unproven = f", {self.expert.unproven} tours not proven shortest" if self.expert.unproven else ""
        return {
            "data": self.source,
            "instances": ", ".join(f"{name} {len(part)}" for name, part in self.parts.items()),
            "predictor": f"{summary} ({self.predictor.fingerprint})",
            "expert": f"{self.expert.fingerprint}{unproven}",
        }

    def draw(self, examples: Examples, rollouts: Mapping[float, Rollout]) -> str:
        drawings = []
        for row in range(len(examples)):
            for budget, rollout in rollouts.items():
                tour = rollout.sequences.tokens[row : row + 1].cpu()
                over = percent_over(examples.inputs[row : row + 1], tour, examples.targets[row : row + 1])
                authors = rollout.by_expert[row].cpu()
                drawings.append(
                    TourDrawing(
                        examples.inputs[row], tour[0], authors, examples.targets[row], float(over), budget,
                        f"instance {row + 1}",
                    )
                )  # fmt: skip
        return draw_gallery(drawings, columns=len(rollouts))


def shipped_pointer(device: torch.device) -> PointerNet:
    """Load the checkpoint of the package, made by `seqdefer train-predictor tsp` with its defaults."""
    with as_file(files("seqdefer.tasks.tsp") / "pointer-50") as folder:
        return load_pointer(folder, device)


def load_predictor(options: TSPOptions, device: torch.device) -> Predictor[Any]:
    """Load the predictor of `--predictor`: the shipped one, a folder, or a plug-in's."""
    name = options.predictor
    if name is None:
        return TourPredictor(shipped_pointer(device), options.facts)
    plugin, colon, folder = name.partition(":")
    points = find_plugins(PREDICTORS) if colon else {}
    if plugin in points:
        predictor: Predictor[Any] = points[plugin].load()(Path(folder), device, options.facts)
        return predictor
    if colon and len(plugin) > 1 and not Path(name).exists():  # one letter is a drive of Windows
        if plugin != "rl4co":
            raise unknown("predictor plug-in", plugin, points)
        install = f"{shlex.quote(sys.executable or 'python')} -m pip install ./examples/seqdefer-rl4co"
        raise MissingExtraError(
            f"--predictor {name} needs the package 'seqdefer-rl4co'; install it from a clone of seqdefer: {install}"
        )
    return TourPredictor(load_pointer(Path(name), device), options.facts)


def own_tours(expert: Expert, cities: Tensor, folder: Path, meter: Meter, stage: str) -> Tensor:
    """Return the expert's own tours, int64 (n, N). They are written to `folder` batch by batch and found again."""
    tours = []
    with meter.stage(stage, len(cities)) as advance:
        for part in cities.split(SOLVE_BATCH):
            before = expert.unproven
            path = folder / f"{fingerprint(expert.fingerprint, part)}.safetensors"
            found = tensors_made_once(path, partial(_solve, expert, part))
            expert.unproven = before + int(found["unproven"])
            tours.append(found["tours"])
            advance(len(part))
    return torch.cat(tours)


def _solve(expert: Expert, cities: Tensor) -> dict[str, Tensor]:
    """Return tours through all cities, and how many are not proven shortest."""
    n, n_cities, before = *cities.shape[:2], expert.unproven
    empty = Sequences(torch.zeros(n, n_cities, dtype=torch.long), torch.zeros(n, dtype=torch.long))
    examples = Examples(cities, empty.tokens, torch.arange(n))
    tours = expert.complete(examples, empty, SequenceSpec(n_cities)).tokens
    return {"tours": tours, "unproven": torch.tensor(expert.unproven - before)}


def load_pair(options: TSPOptions, device: torch.device) -> tuple[Predictor[Any], Expert]:
    if options.effort is not None and options.expert != "search":
        raise OptionError(f"--effort applies to --expert search, not to {options.expert}; omit it")
    if options.time_limit is not None and options.expert not in ("gurobi", "highs"):
        raise OptionError(f"--time-limit applies to --expert gurobi or highs, not to {options.expert}; omit it")
    expert = make_expert(options.expert, effort=options.effort, time_limit=options.time_limit)
    return load_predictor(options, device), expert


def serve(options: TSPOptions, folder: Path, device: torch.device, meter: Meter) -> Served:
    """Return the pair without data, for cities that users provide."""
    return Served(*load_pair(options, device), SequenceSpec(options.cities), TourCodec(options.cities))


def prepare(options: TSPOptions, folder: Path, device: torch.device, meter: Meter) -> TSPTask:
    predictor, expert = load_pair(options, device)
    with meter.stage("read the cities", 1) as advance:
        splits = make_splits(options)
        advance(1)
    parts: dict[SplitName, Examples] = {}
    first = 0  # id of the first example of a part: ids are unique across parts
    for name, cities in splits.parts.items():
        tours = own_tours(expert, cities, folder / "tours", meter, f"the expert's own tours ({name})")
        parts[name] = Examples(cities, tours, torch.arange(first, first + len(cities)))
        first += len(cities)
    return TSPTask(options, splits.source, parts, predictor, expert)


# -- seqdefer train-predictor tsp ----------------------------------------------------------------------------------


def train_predictor(options: TrainingOptions, folder: Path, device: torch.device, meter: Meter) -> dict[str, str]:
    """Train a pointer network, save it in `folder`, and measure it against the local search on fresh instances."""
    expert = make_expert("search")  # first, so that a missing package fails before the training
    cities = gaussian_instances(options.instances, options.cities, options.seed, "predictor")
    with meter.stage("train the predictor", options.epochs * len(cities)) as advance:
        model = train(cities, options, device, folder, advance)
    fresh = gaussian_instances(N_EVALUATION, options.cities, options.seed, "validation")
    best = own_tours(expert, fresh, folder / "tours", meter, "the expert's own tours")
    gap = float(percent_over(fresh, greedy_tours(model, fresh, device), best).mean())
    save_pointer(model, folder, {"options": asdict(options), "gap": round(gap, 3), "judged": N_EVALUATION})
    return {
        "predictor": str(folder),
        "gap": f"{gap:.2f} % over the local search, mean of {N_EVALUATION} fresh instances of {options.cities} cities",
        "use it": f"seqdefer run tsp --cities {options.cities} --predictor {folder}",
    }


@torch.no_grad()
def greedy_tours(model: PointerNet, cities: Tensor, device: torch.device) -> Tensor:
    """Return the network's greedy tours, int64 (n, N), on the CPU."""
    return sample_tours(model, model.encode(cities.to(device)), generator=None)[0].cpu()


ENTRY = TaskEntry(
    name="tsp",
    summary="the shortest tour through 50 cities; the expert is a solver that completes the predictor's tour",
    presets={
        "quick": TSPOptions(expert="search", train=1000, validation=200, test=300),
        "paper": TSPOptions(),
        "large": TSPOptions(expert="search", train=24_000, validation=2400),
    },
    prepare=prepare,
    recipes={
        "ours": Recipe(once=ATTENTION, cost=ATTENTION),
        "published": published(
            once=published_perceptron(samples=2400), options={"facts": False}, hand_offs=45, alpha=PUBLISHED_ALPHA
        ),
    },
    training=PredictorTraining(TrainingOptions(), train_predictor),
    serve=serve,
)
