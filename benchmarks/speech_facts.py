"""What each input of a speech rejector is worth: TokenwiseModel fitted without it, on the same labels.

    python -m benchmarks.speech_facts models/tiny models/small fit/manifest.jsonl test/manifest.jsonl --out facts.json

The labels hold states and facts, and are made once; what a variant does not see is set to zero. With `--shown facts`
they hold facts alone, and `--folder` may be that of `seqdefer run speech`, whose labels it takes. A row is five fits:
seeds set initial weights, batches and the 100 test clips. Several processes share the work if each takes a part
(`--part 1/5` to `--part 5/5`) with the same `--folder`, after `--label` has made the labels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqdefer import __version__
from seqdefer.budgets import token_sweeps
from seqdefer.environment import choose_device, machine
from seqdefer.evaluation.curves import Ends, curve_of, improvement, random_curve
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import experiment_settings
from seqdefer.hyperparameters import INPUTS, Input
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
WORD = ("rarity", "begins_word", "is_digit", "is_capital", "is_mark", "is_end", "repeats")
READING = ("alike", "rival")
UNCERTAINTY = "uncertainty, nothing learned"


@dataclass(frozen=True)
class Variant:
    """What a rejector sees: facts about the token by name, facts about the clip, states of the predictor, and of
    `inputs` its confidence and entropy."""

    facts: tuple[str, ...] = tuple(FACTS)
    clip: bool = True
    states: bool = False
    inputs: tuple[Input, ...] = INPUTS

    @classmethod
    def without(cls, *names: str) -> Variant:
        return cls(tuple(one for one in FACTS if one not in names))


VARIANTS: dict[str, Variant | None] = {
    "all facts": Variant(),
    UNCERTAINTY: None,
    "confidence and entropy": Variant((), clip=False),
    "states": Variant((), clip=False, states=True, inputs=("states",)),
    "states and all facts": Variant(states=True),
    "without confidence": Variant(inputs=("states", "entropy")),
    "without entropy": Variant(inputs=("states", "confidence")),
    "without facts about the clip": Variant(clip=False),
    "without facts about the sound": Variant.without(*SOUND),
    "without facts about the word": Variant.without(*WORD),
    "without what reads alike": Variant.without(*READING),
    **{f"without {name}": Variant.without(name) for name in FACTS},
}


def needs_states(name: str) -> bool:
    variant = VARIANTS[name]
    return variant is not None and variant.states


class PartlyShown:
    """Decision trees that show some columns of proposals and contexts, and zeros elsewhere."""

    def __init__(self, trees: Any, variant: Variant) -> None:
        n_states, n_context = trees.nodes.features.shape[1] - len(FACTS), trees.context.shape[1] - CLIP_FACTS
        shown = [variant.states] * n_states + [name in variant.facts for name in FACTS]
        in_context = [variant.states] * n_context + [variant.clip] * CLIP_FACTS
        self._trees, self._shown = trees, torch.tensor(shown, device=trees.device)
        self.context = trees.context * torch.tensor(in_context, device=trees.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trees, name)

    def __len__(self) -> int:
        return len(self._trees)

    def proposal(self, nodes: Tensor) -> Proposal:
        proposal: Proposal = self._trees.proposal(nodes)
        return replace(proposal, features=proposal.features * self._shown)


def show(part: Any, variant: Variant) -> Any:
    """Return labelled data of which rejectors see what a variant does."""
    return type(part)(
        part.examples, part.draft, part.table, lambda kind: PartlyShown(part.trees_of(kind), variant)
    )  # fmt: skip


def gain(experiment: Experiment, variant: Variant | None, seed: int) -> float:
    """Return the % over Random of a variant on the test clips of a seed."""
    splits, rows = experiment.splits, experiment.splits.rows(seed)
    rejector: Any = Confidence("uncertainty")
    test: LabelledData = splits.test
    if variant is not None:
        settings = replace(experiment.settings, token=replace(experiment.settings.token, inputs=variant.inputs))
        train, validation, test = (show(part, variant) for part in (splits.train, splits.validation, splits.test))
        context = FitContext(experiment.task, settings, experiment.grid, train, validation, seed)
        rejector = tokenwise_model.fit(context).run(lambda _: None)[0]
    ends = Ends.of(test.table.select(rows))
    return improvement(curve_of(deferral_of(rejector).sweep(test, rows), ends), random_curve(ends))


def prepare(options: argparse.Namespace) -> Experiment:
    """Return an experiment whose training and validation data are labelled."""
    entry, device, clock = load_task("speech"), choose_device(options.device), Clock()
    train, validation = options.fitted
    chosen = replace(
        entry.presets["paper"], predictor=options.predictor, expert=options.expert, train=options.train,
        test=options.test, train_clips=train, validation_clips=validation, test_clips=options.seeds * options.instances,
        length=options.length, shown=options.shown, keep_states=device.type == "cpu",
    )  # fmt: skip
    task = entry.prepare(chosen, options.folder, device, clock)
    settings = replace(experiment_settings(entry, "paper"), seeds=options.seeds, instances=options.instances)
    experiment = Experiment(task, replace(settings, methods=("TokenwiseModel",)), options.folder, clock)
    for part in (experiment.splits.train, experiment.splits.validation):
        part.trees_of(experiment.settings.tree_kind)
    return experiment


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predictor", help="the small model: a folder, or a name on the Hub")
    parser.add_argument("expert", help="the large model")
    parser.add_argument("train", help="clips to fit on: a manifest, or the folder of one")
    parser.add_argument("test", help="clips to report on")
    words = "clips to fit on and to stop by (800 200)"
    parser.add_argument("--fitted", nargs=2, type=int, default=[800, 200], metavar="N", help=words)
    parser.add_argument("--seeds", type=int, default=5, help="fits of each variant (5)")
    parser.add_argument("--instances", type=int, default=100, help="test clips of each fit (100)")
    parser.add_argument("--length", type=int, default=64, help="maximum number of tokens to write (64)")
    words = "labels with states too, or those that `seqdefer run` makes, and no variant that needs states (both)"
    parser.add_argument("--shown", choices=("both", "facts"), default="both", help=words)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="only these variants (all)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto: a GPU if there is one (auto)")
    parser.add_argument("--folder", type=Path, default=Path("runs/speech-facts"), help="labels are kept here")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth seed, from the Ith on (1/1)")
    words = f"thresholds of a curve; fewer are faster ({token_sweeps.N_THRESHOLDS})"
    parser.add_argument("--thresholds", type=int, default=token_sweeps.N_THRESHOLDS, metavar="N", help=words)
    parser.add_argument("--label", action="store_true", help="make the labels, and stop")
    parser.add_argument("--out", type=Path, default=Path("facts.json"), help="the file to write (facts.json)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    experiment = prepare(options)
    if options.label:
        return
    number, total = map(int, options.part.split("/"))
    token_sweeps.N_THRESHOLDS = options.thresholds
    wanted = [name for name in options.variants or VARIANTS if options.shown == "both" or not needs_states(name)]
    gains: dict[str, list[float]] = {}
    made: dict[str, Any] = {"version": __version__, "machine": machine(experiment.task.predictor.device)}
    made |= {"task": experiment.task.describe(), "instances": options.instances, "gains": gains}
    for seed in range(options.seeds)[number - 1 :: total]:
        for name in wanted:
            gains.setdefault(name, []).append(gain(experiment, VARIANTS[name], seed))
            print(f"seed {seed}: {name}: {gains[name][-1]:.2f}", file=sys.stderr, flush=True)
            write_json(options.out, made)  # what is done stays if the rest is stopped


if __name__ == "__main__":
    main()
