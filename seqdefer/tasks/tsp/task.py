"""The traveling salesman task: instances, a pointer network, a solver, and tours measured against the solver's own.

A token is a city. The loss of a tour is how many per cent longer it is than the expert's own tour through the same
cities, which is the target of an example. The expert cannot name the next city, only complete a tour: no token-level
deferral.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path

import torch
from torch import Tensor

from seqdefer.errors import CheckpointError, OptionError
from seqdefer.hyperparameters import ATTENTION, Hyperparameters, published_perceptron
from seqdefer.interfaces import PredictorTraining, Served, SplitName, Task, TaskEntry
from seqdefer.progress import Meter
from seqdefer.storage.files import fingerprint, read_tensors, write_tensors
from seqdefer.tasks.common.options import option
from seqdefer.tasks.tsp.codec import TourCodec
from seqdefer.tasks.tsp.data import gaussian_instances, make_splits
from seqdefer.tasks.tsp.drawing import TourDrawing, draw_gallery
from seqdefer.tasks.tsp.exact import TIME_LIMIT
from seqdefer.tasks.tsp.experts import TourExpert, make_expert
from seqdefer.tasks.tsp.pointer import PointerNet, TourPredictor, load_pointer, save_pointer
from seqdefer.tasks.tsp.reinforce import TrainingOptions, sample_tours, train
from seqdefer.tasks.tsp.rl4co import RL4COPredictor, load_rl4co
from seqdefer.tasks.tsp.search import EFFORT
from seqdefer.tasks.tsp.tours import percent_over
from seqdefer.types import Examples, Rollout, Sequences, SequenceSpec

RL4CO = "rl4co:"  # before the folder of a policy of RL4CO
AT_ONCE = 256  # instances solved between two writes
JUDGED = 500  # instances that tell how good a trained predictor is


@dataclass(frozen=True)
class TSPOptions:
    """What can be chosen about the task; the fields are its command-line options."""

    data: str | None = option(
        None,
        "cities to use instead of Gaussian ones: a TSPLIB .tsp file or a folder of them, or a CSV of coordinates",
        is_path=True,
    )
    cities: int = option(50, "cities of an instance")
    expert: str = option("gurobi", "who completes tours: gurobi or highs (exact), search (nearly exact, much faster)")
    predictor: str | None = option(
        None, "folder of a pointer network, or rl4co:FOLDER for a policy of RL4CO (the shipped one)", is_path=True
    )
    facts: bool = option(
        True, "features: the decoder's state and what the partial tour shows, instead of the paper's node embeddings"
    )
    train: int = option(2400, "instances to fit rejectors on")
    validation: int = option(400, "instances to stop and choose with")
    test: int = option(500, "instances to report on")
    effort: int | None = option(None, f"perturbations a city for --expert search ({EFFORT})")
    time_limit: float | None = option(
        None, f"seconds a solve may take before an exact expert gives its best tour ({TIME_LIMIT:g})"
    )
    seed: int = option(0, "seed of the instances")

    def without_test(self) -> TSPOptions:
        return replace(self, test=1)  # the fewest there can be: they take solving, and a share of one's own instances


class TSPTask(Task):
    name = "tsp"
    loss_unit = "% over the expert's tour"
    predictor: TourPredictor | RL4COPredictor
    expert: TourExpert

    def __init__(
        self,
        options: TSPOptions,
        source: str,
        parts: Mapping[SplitName, Examples],
        predictor: TourPredictor | RL4COPredictor,
        expert: TourExpert,
    ) -> None:
        self.options, self.source, self.parts = options, source, parts
        self.predictor, self.expert = predictor, expert
        self.spec = SequenceSpec(length=parts["test"].inputs.shape[1])
        self.codec = TourCodec(self.spec.length)
        self.is_papers = options.data is None and self.spec.length == 50

    def split(self, name: SplitName) -> Examples:
        return self.parts[name]

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        return percent_over(examples.inputs, sequences.tokens, examples.targets)

    def describe(self) -> dict[str, str]:
        unproven = f", {self.expert.unproven} tours not proven shortest" if self.expert.unproven else ""
        return {
            "data": self.source,
            "instances": ", ".join(f"{name} {len(part)}" for name, part in self.parts.items()),
            "predictor": f"{self.predictor.summary} ({self.predictor.fingerprint})",
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
    """The checkpoint that comes with the package: `seqdefer train-predictor tsp` with its defaults made it."""
    with as_file(files("seqdefer.tasks.tsp") / "pointer-50") as folder:
        return load_pointer(folder, device)


def load_predictor(options: TSPOptions, device: torch.device) -> TourPredictor | RL4COPredictor:
    name = options.predictor
    if name is not None and name.startswith(RL4CO):
        return load_rl4co(Path(name.removeprefix(RL4CO)), device, options.facts)
    model = shipped_pointer(device) if name is None else load_pointer(Path(name), device)
    return TourPredictor(model, options.facts)


def own_tours(expert: TourExpert, cities: Tensor, folder: Path, meter: Meter, stage: str) -> Tensor:
    """The expert's own tours, int64 (n, N). Kept in `folder` as they are made, and found again there."""
    spec, tours = SequenceSpec(cities.shape[1]), []
    with meter.stage(stage, len(cities)) as advance:
        for part in cities.split(AT_ONCE):
            path = folder / f"{fingerprint(expert.fingerprint, part)}.safetensors"
            found = _read_tours(path)
            if found is None:
                before = expert.unproven
                solved = _solve(expert, part, spec)
                found = solved, torch.tensor(expert.unproven - before)
                write_tensors(path, {"tours": found[0], "unproven": found[1]})
            else:
                expert.unproven += int(found[1])
            tours.append(found[0])
            advance(len(part))
    return torch.cat(tours)


def _read_tours(path: Path) -> tuple[Tensor, Tensor] | None:
    """Tours, and how many of them are unproven."""
    if path.is_file():
        with suppress(CheckpointError, KeyError):  # a damaged file is made again
            found = read_tensors(path)
            return found["tours"], found["unproven"]
    return None


def _solve(expert: TourExpert, cities: Tensor, spec: SequenceSpec) -> Tensor:
    n = len(cities)
    nothing = Sequences(torch.zeros(n, spec.length, dtype=torch.long), torch.zeros(n, dtype=torch.long))
    return expert.complete(Examples(cities, nothing.tokens, torch.arange(n)), nothing, spec).tokens


def load_pair(options: TSPOptions, device: torch.device) -> tuple[TourPredictor | RL4COPredictor, TourExpert]:
    if options.effort is not None and options.expert != "search":
        raise OptionError(f"--effort is for --expert search; {options.expert} needs none")
    if options.time_limit is not None and options.expert == "search":
        raise OptionError("--time-limit is for --expert gurobi or highs; the search takes --effort")
    expert = make_expert(options.expert, effort=options.effort, time_limit=options.time_limit)
    return load_predictor(options, device), expert


def serve(options: TSPOptions, folder: Path, device: torch.device, meter: Meter) -> Served:
    """The pair alone, for cities of users' own."""
    return Served(*load_pair(options, device), SequenceSpec(options.cities), TourCodec(options.cities))


def prepare(options: TSPOptions, folder: Path, device: torch.device, meter: Meter) -> TSPTask:
    predictor, expert = load_pair(options, device)
    with meter.stage("read the cities", 1) as advance:
        splits = make_splits(options)
        advance(1)
    parts: dict[SplitName, Examples] = {}
    first = 0  # id of a part: no two examples share one
    for name, cities in splits.parts.items():
        tours = own_tours(expert, cities, folder / "tours", meter, f"the expert's own tours ({name})")
        parts[name] = Examples(cities, tours, torch.arange(first, first + len(cities)))
        first += len(cities)
    return TSPTask(options, splits.source, parts, predictor, expert)


# -- seqdefer train-predictor tsp ----------------------------------------------------------------------------------


def train_predictor(options: TrainingOptions, folder: Path, device: torch.device, meter: Meter) -> dict[str, str]:
    """Trains a pointer network, keeps it in `folder`, and measures it against the local search on fresh instances."""
    expert = make_expert("search")  # what is missing is told before the training
    cities = gaussian_instances(options.instances, options.cities, options.seed, "predictor")
    with meter.stage("train the predictor", options.epochs * len(cities)) as advance:
        model = train(cities, options, device, folder, advance)
    judged = gaussian_instances(JUDGED, options.cities, options.seed, "validation")
    best = own_tours(expert, judged, folder / "tours", meter, "the expert's own tours")
    gap = float(percent_over(judged, greedy_tours(model, judged, device), best).mean())
    save_pointer(model, folder, {"options": asdict(options), "gap": round(gap, 3), "judged": JUDGED})
    return {
        "predictor": str(folder),
        "gap": f"{gap:.2f} % over the local search, mean of {JUDGED} fresh instances of {options.cities} cities",
        "use it": f"seqdefer run tsp --cities {options.cities} --predictor {folder}",
    }


@torch.no_grad()
def greedy_tours(model: PointerNet, cities: Tensor, device: torch.device) -> Tensor:
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
    hyperparameters=Hyperparameters(once=ATTENTION, cost=ATTENTION, published_once=published_perceptron(samples=2400)),
    training=PredictorTraining(TrainingOptions(), train_predictor),
    serve=serve,
)
