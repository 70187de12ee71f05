"""What each input of a speech rejector is worth: TokenwiseModel fitted without it, on the same labels.

    python -m benchmarks.speech_facts --predictor models/tiny --expert models/small --train fit --test test --out facts.json

Labels are made once, with facts and states; what a variant does not see is set to zero. `--part 1/4` takes every fourth
variant, for several processes that share `--folder`; `--label` only makes the labels.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqdefer.environment import choose_device, machine
from seqdefer.evaluation.curves import Ends, Run, curve_of, improvement, random_curve
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import experiment_settings
from seqdefer.hyperparameters import Input
from seqdefer.labels.labelled import LabelledData
from seqdefer.methods import tokenwise_model
from seqdefer.methods.base import FitContext
from seqdefer.methods.deferral import deferral_of
from seqdefer.progress import Clock
from seqdefer.registry import load_task
from seqdefer.rejectors.confidence import Confidence
from seqdefer.storage.files import write_json
from seqdefer.tasks.speech.features import FACTS
from seqdefer.types import Proposal

CLIP_FACTS = 5  # of `SpeechFacts.of_inputs`, the last columns of the context
SOUND = ("sharpness", "spread", "place", "level")
WORD = ("rarity", "begins_word", "is_digit", "is_capital", "is_end", "repeats")
ALL: tuple[Input, ...] = ("states", "confidence", "entropy")


@dataclass(frozen=True)
class Variant:
    """What a rejector sees: facts about the token by name, facts about the clip, states of the predictor, and of
    `inputs` its confidence and entropy."""

    facts: tuple[str, ...] = tuple(FACTS)
    clip: bool = True
    states: bool = False
    inputs: tuple[Input, ...] = ALL


def variants() -> dict[str, Variant]:
    """Return what is compared, by name; the first is what the recipe shows."""
    without = {f"without {name}": Variant(tuple(one for one in FACTS if one != name)) for name in FACTS}
    return {
        "all facts": Variant(),
        "states alone": Variant((), False, True, ("states",)),
        "facts and states": Variant(states=True),
        "confidence and entropy alone": Variant((), False, False),
        "without confidence": Variant(inputs=("states", "entropy")),
        "without entropy": Variant(inputs=("states", "confidence")),
        "without facts about the clip": Variant(clip=False),
        "without facts about the sound": Variant(tuple(one for one in FACTS if one not in SOUND)),
        "without facts about the word": Variant(tuple(one for one in FACTS if one not in WORD)),
        **without,
    }


class _PartlyShown:
    """Decision trees whose proposals and contexts hide some columns."""

    def __init__(self, trees: Any, variant: Variant) -> None:
        self._trees = trees
        n_states = trees.nodes.features.shape[1] - len(FACTS)
        is_seen = [variant.states] * n_states + [name in variant.facts for name in FACTS]
        self._seen = torch.tensor(is_seen, device=trees.nodes.features.device)
        n_context = trees.context.shape[1] - CLIP_FACTS
        seen = torch.tensor([variant.states] * n_context + [variant.clip] * CLIP_FACTS, device=trees.context.device)
        self.context = trees.context * seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trees, name)

    def __len__(self) -> int:
        return len(self._trees)

    def proposal(self, nodes: Tensor) -> Proposal:
        proposal: Proposal = self._trees.proposal(nodes)
        return replace(proposal, features=proposal.features * self._seen)


def shown(part: Any, variant: Variant) -> Any:
    """Return labelled data of which rejectors see a part."""
    make: Callable[[Any], Any] = lambda kind: _PartlyShown(part.trees_of(kind), variant)  # noqa: E731
    return type(part)(part.examples, part.draft, part.table, make)


def measure(experiment: Experiment, variant: Variant | None, seed: int) -> float:
    """Return the % over Random of a variant on a seed's test clips; of plain confidence for None."""
    splits = experiment.splits
    test: LabelledData = splits.test
    rows = splits.rows(seed)
    if variant is None:
        rejector: Any = Confidence("uncertainty")
    else:
        settings = replace(experiment.settings, token=replace(experiment.settings.token, inputs=variant.inputs))
        train, validation, test = (shown(part, variant) for part in (splits.train, splits.validation, splits.test))
        context = FitContext(experiment.task, settings, experiment.grid, train, validation, seed)
        rejector = tokenwise_model.fit(context).run(lambda _: None)[0]
    run = Run(Ends.of(test.table.select(rows)), {"it": deferral_of(rejector).sweep(test, rows)})
    return improvement(curve_of(run.sweeps["it"], run.ends), random_curve(run.ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("predictor", "expert", "train", "test"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--clips", nargs=3, type=int, default=[800, 200, 500], metavar=("TRAIN", "VALIDATION", "TEST"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, default=Path("runs/speech-facts"))
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--label", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("facts.json"))
    chosen = parser.parse_args()
    entry, begun = load_task("speech"), time.perf_counter()
    train, validation, test = chosen.clips
    options = replace(
        entry.presets["paper"], predictor=chosen.predictor, expert=chosen.expert, train=chosen.train, test=chosen.test,
        train_clips=train, validation_clips=validation, test_clips=test, shown="both", keep_states=False,
        length=chosen.length,
    )  # fmt: skip
    device, clock = choose_device(chosen.device), Clock()
    task = entry.prepare(options, chosen.folder, device, clock)
    settings = replace(
        experiment_settings(entry, "paper"), seeds=chosen.seeds, instances=chosen.instances,
        methods=("TokenwiseModel",),
    )  # fmt: skip
    experiment = Experiment(task, settings, chosen.folder, clock)
    for part in (experiment.splits.train, experiment.splits.validation):
        part.trees_of("closed")
    print(f"{time.perf_counter() - begun:.0f} s: labelled", file=sys.stderr)
    if chosen.label:
        return
    number, total = map(int, chosen.part.split("/"))
    wanted = list({"plain confidence": None, **variants()}.items())[number - 1 :: total]
    found: dict[str, list[float]] = {}
    for seed in range(chosen.seeds):
        for name, variant in wanted:
            found.setdefault(name, []).append(measure(experiment, variant, seed))
            print(f"{time.perf_counter() - begun:.0f} s: {name}, seed {seed}: {found[name][-1]:.2f}", file=sys.stderr)
            write_json(chosen.out, {"machine": machine(device), "settings": vars(chosen) | {"folder": "", "out": ""}, "improvement": found})


if __name__ == "__main__":
    main()
