"""Why the paper's recipe gains less on tours here than in the paper: one change of the recipe at a time.

    python -m benchmarks.tsp_as_published --folder runs/tsp-as-published --out docs/results/tsp-as-published.json
    python tools/generate.py    # the page docs/tsp-as-published.md

Data: 2,400 training, 400 validation and 5 x 100 test instances of 50 Gaussian cities (seed 0), every hand-off of their
drafts completed by the local search. A row is five fits: seeds 0 to 4 set initial weights, batches and the 100 test
instances. Everything is chosen by validation data. The bundled predictor writes the drafts; `--predictor` adds others:

    seqdefer train-predictor tsp --epochs 2 --out runs/short
    seqdefer train-predictor tsp --epochs 30 --hidden 128 --out runs/long
    python examples/seqdefer-rl4co/train_pointer.py --out runs/rl4co --gap 13
    ... --predictor short=runs/short --predictor long=runs/long --predictor RL4CO=rl4co:runs/rl4co

`--exact` judges the rows again by Gurobi's completions of the test drafts, `--large` adds 24,000 training instances.
Labels and fits are kept in the folder, so a stopped run continues. About 20 minutes on one core that is otherwise idle;
each predictor takes 5 more, `--exact` 3 and `--large` 25. Results do not depend on the number of threads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from seqdefer import __version__
from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.budgets.sweeps import StepSweep, hand_off_sweep, switch_sweep
from seqdefer.engine.drafts import draft
from seqdefer.environment import machine
from seqdefer.evaluation.curves import (
    Curve,
    Ends,
    Run,
    curve_of,
    improvement,
    optimal_once,
    paired_bootstrap,
    random_curve,
)
from seqdefer.evaluation.splits import Splits
from seqdefer.progress import Clock
from seqdefer.registry import load_task
from seqdefer.rejectors.base import MAX_DEVIATIONS, Sizes, perceptron
from seqdefer.rejectors.losses import get_psi, hand_off_grid, one_time_surrogate, query_costs, rule_of_thumb
from seqdefer.rejectors.training import fit, network_sizes
from seqdefer.storage.files import fingerprint, write_json
from seqdefer.storage.made_once import tensors_made_once
from seqdefer.tasks.tsp.pointer import TourPredictor
from seqdefer.tasks.tsp.task import TSPOptions, prepare, shipped_pointer
from seqdefer.tasks.tsp.tours import tour_lengths
from seqdefer.types import Draft, Examples, HandOffTable, SequenceSpec

SEEDS, INSTANCES, LENGTH = 5, 100, 50
BASELINE = "published"
RECIPE = load_task("tsp").recipes["published"]
PAPER_ALPHA_LENGTH = 0.01 * LENGTH  # the paper's alpha_1 in units of tour length
Parts = Mapping[str, tuple[Examples, Draft, HandOffTable]]  # train, validation, test


# -- networks: as DraftMLP, on rows that are standardised once, which makes a fit several times faster -----


class SharedPerceptron(nn.Module):
    """One perceptron for all steps: it scores a hand-off by the context and the step there, no deferral by the context
    and the mean step; each hand-off has a bias of its own."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.body = sizes, perceptron(sizes.context + sizes.step, sizes, 1)
        self.bias = nn.Parameter(torch.zeros(sizes.outputs))

    def forward(self, rows: Tensor) -> Tensor:
        context, steps = rows[:, None, : self.sizes.context], rows[:, self.sizes.context :].unflatten(1, (LENGTH, -1))
        seen = torch.cat([steps, steps.mean(1, keepdim=True)], 1)[:, torch.tensor(self.sizes.hand_offs)]  # (B, J, S)
        scores: Tensor = self.body(torch.cat([context.expand(-1, seen.shape[1], -1), seen], 2)).squeeze(2)
        return scores + self.bias


def build(kind: str, sizes: Sizes) -> nn.Module:
    """Build the paper's perceptron, or a variant: see `Row.network`."""
    if kind == "shared":
        return SharedPerceptron(sizes)
    body = perceptron(sizes.context + LENGTH * sizes.step, sizes, sizes.outputs)
    if kind == "tanh":
        return nn.Sequential(*(nn.Tanh() if isinstance(each, nn.ReLU) else each for each in body))
    if kind == "zero head":
        for parameter in body[-1].parameters():
            nn.init.zeros_(parameter)
    return body


# -- what a rejector sees ------------------------------------------------------------


def raw_scores(examples: Examples, drafted: Draft) -> Draft:
    """Add -log p itself to the states; the package's input `confidence` is its logarithm."""
    return replace(drafted, features=torch.cat([drafted.features, drafted.uncertainty[..., None]], 2))


def coordinates(examples: Examples, drafted: Draft) -> Draft:
    """Show the coordinates of the city for its embedding."""
    tokens = drafted.sequences.tokens[..., None].expand(-1, -1, 2)
    return replace(drafted, features=examples.inputs.gather(1, tokens))


def decoder_states(examples: Examples, drafted: Draft) -> Draft:
    """Show the state of the bundled predictor's decoder for the embedding."""
    model = shipped_pointer(torch.device("cpu"))
    walked = draft(TourPredictor(model, facts=True), examples, SequenceSpec(LENGTH))
    return replace(drafted, features=walked.features[..., : model.hidden])


def step_facts(examples: Examples, drafted: Draft) -> Draft:
    """Show the package's facts of a partial tour for the embedding."""
    model = shipped_pointer(torch.device("cpu"))
    walked = draft(TourPredictor(model, facts=True), examples, SequenceSpec(LENGTH))
    return replace(drafted, features=walked.features[..., model.hidden :])


SEEN: Mapping[str, Callable[[Examples, Draft], Draft]] = {
    one.__name__: one for one in (raw_scores, coordinates, decoder_states, step_facts)
}


def as_rows(sizes: Sizes, drafts: Mapping[str, Draft], scaling: str) -> dict[str, Tensor]:
    """Return all that a perceptron sees of each draft in one row, standardised with the statistics of `train`: of a
    feature over all steps, as the package does, or of a feature at each position."""
    seen = {name: (one.context, sizes.step_inputs(one)) for name, one in drafts.items()}
    context, steps = seen["train"]
    over = (0,) if scaling == "position" else (0, 1)
    scales = [(each.mean(dims), each.std(dims)) for each, dims in ((context, (0,)), (steps, over))]
    rows = {}
    for name, both in seen.items():
        scaled = both if scaling == "none" else [_scaled(one, *scale) for one, scale in zip(both, scales, strict=True)]
        rows[name] = torch.cat([one.flatten(1) for one in scaled], 1)
    return rows


def _scaled(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return ((values - mean) / torch.where(std > 1e-6, std, 1.0)).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)


# -- rows ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """A way to fit OneTimeModel: the published recipe with some changes."""

    name: str
    group: str
    alpha: float | None = RECIPE.alpha  # None: the rule of thumb
    hand_offs: int = RECIPE.hand_offs or LENGTH + 1
    psi: str = RECIPE.psi
    seen: str = ""  # of SEEN; "" is the embedding of the city at each step
    in_length: bool = False  # losses and alpha in units of tour length, not in % of the expert's tour
    network: Literal["", "tanh", "zero head", "shared"] = ""  # "" is the paper's perceptron
    scaling: Literal["feature", "position", "none"] = "feature"
    stop_by: Literal["loss", "curve"] = "loss"
    data: str = "bundled"  # the predictor, or "large"
    changes: Mapping[str, Any] = field(default_factory=dict)  # of Settings

    def on(self, data: str) -> Row:
        return replace(self, name=f"{self.name}: {data}", group="predictors" if data != "large" else "data", data=data)


def _published(name: str, **changes: Any) -> Row:
    return Row(name=name, group="one change", **changes)


def _thumb(name: str, **changes: Any) -> Row:
    return Row(name=f"thumb, {name}" if name else "thumb", group="rule of thumb", alpha=None, **changes)


POOLED: Mapping[str, Any] = {"inputs": ("confidence",)}  # of the embeddings, their mean alone: it is in the context
THUMB, THUMB_POOLED = _thumb(""), _thumb("pooled", changes=POOLED)
THUMB_TANH = _thumb("tanh", network="tanh")
ROWS: tuple[Row, ...] = (
    _published(BASELINE),
    THUMB,
    _published("pooled", changes=POOLED),
    THUMB_POOLED,
    _published("tanh", network="tanh"),
    THUMB_TANH,
    _thumb("not standardised", scaling="none"),
    _thumb("coordinates", seen="coordinates"),
    _thumb("facts", seen="step_facts"),
    Row(name="alpha 6, pooled", group="alpha", alpha=6.0, changes=POOLED),
    Row(name="alpha 9, pooled", group="alpha", alpha=9.0, changes=POOLED),
    Row(name="alpha 9, tanh", group="alpha", alpha=9.0, network="tanh"),
    _published("facts", seen="step_facts"),
    _published("tanh, facts", network="tanh", seen="step_facts"),
    _published("decoder states", seen="decoder_states"),
    _published("raw log scores", seen="raw_scores", changes={"inputs": ("states",)}),
    _published("not standardised", scaling="none"),
    _published("standardised by position", scaling="position"),
    _published("zero head", network="zero head"),
    _published("learning rate 5e-3", changes={"learning_rate": 5e-3}),
    _published("batches of 32", changes={"batch_size": 32}),
    _published("weight decay 0.5", changes={"weight_decay": 0.5}),
    _published("stopped by the curve", stop_by="curve"),
    _published("11 hand-offs", hand_offs=11),
    _published("mean absolute error", psi="mean_absolute_error"),
    _published("units of length", in_length=True, alpha=PAPER_ALPHA_LENGTH),
    _thumb("shared by the steps", network="shared"),
    _thumb("tanh, facts", network="tanh", seen="step_facts"),
    _thumb("tanh, pooled", network="tanh", changes=POOLED),
    _thumb("64 units, pooled", changes={"units": 64, **POOLED}),
    _thumb("11 hand-offs", hand_offs=11),
    _thumb("learning rate 1e-4", changes={"learning_rate": 1e-4}),
    _thumb("stopped by the curve, pooled", stop_by="curve", changes=POOLED),
)
# Picked by the improvement on validation data: among rows, for each seed, or among the five fits of one row.
CHOICES: Mapping[str, Sequence[str]] = {
    "alpha by validation, pooled": ("pooled", "alpha 6, pooled", "alpha 9, pooled", "thumb, pooled"),
    "alpha by validation, tanh": ("tanh", "alpha 9, tanh", "thumb, tanh"),
    "best of five fits: published": (BASELINE,),
    "best of five fits: thumb": ("thumb",),
    "best of five fits: thumb, tanh": ("thumb, tanh",),
    "best of five fits: thumb, pooled": ("thumb, pooled",),
}
ON_OTHER_PREDICTORS = (ROWS[0], THUMB, THUMB_POOLED, THUMB_TANH)


# -- one fit ------------------------------------------------------------


@dataclass(frozen=True)
class Fitted:
    """The outcome of a fit: scores of all test instances, and what else a page says about it."""

    scores: Tensor  # (n, J)
    numbers: Mapping[str, float]


def fit_row(row: Row, seed: int, parts: Parts, folder: Path) -> Fitted:
    """Fit a row, or find it in the folder."""
    name = fingerprint(asdict(row), seed, __version__, *(parts[one][2].loss for one in parts))
    found = tensors_made_once(folder / f"{name}.safetensors", partial(_fit, row, seed, parts))
    keys = json.loads(bytes(found["keys"].tolist()).decode())
    return Fitted(found["scores"], dict(zip(keys, found["numbers"].tolist(), strict=True)))


def _fit(row: Row, seed: int, parts: Parts) -> dict[str, Tensor]:
    """Fit as `fit_once` does."""
    drafts = {name: SEEN[row.seen](examples, one) if row.seen else one for name, (examples, one, _) in parts.items()}
    tables = {name: _in_length(*part) if row.in_length else part[2] for name, part in parts.items()}
    alpha = rule_of_thumb(tables["train"]) if row.alpha is None else row.alpha
    grid, settings, psi = hand_off_grid(LENGTH, row.hand_offs), replace(RECIPE.once, **row.changes), get_psi(row.psi)
    first = drafts["train"]
    sizes = network_sizes(
        first.context, first.features, first.entropy, LENGTH, settings, hand_offs=tuple(grid.tolist())
    )
    rows = as_rows(sizes, drafts, row.scaling)
    totals = {name: (one.loss + query_costs(one.deferred, alpha, LENGTH))[:, grid] for name, one in tables.items()}
    torch.manual_seed(seed)
    network = build(row.network, sizes)

    def batch_loss(some: Tensor) -> Tensor:
        return one_time_surrogate(network(rows["train"][some]), totals["train"][some], psi)

    def validation_loss() -> Tensor:
        scores = network(rows["validation"])
        if row.stop_by == "curve":
            return torch.tensor(_curves(scores, grid, parts["validation"][2])[0].area)
        return one_time_surrogate(scores, totals["validation"], psi)

    history = fit(network, len(first), batch_loss, validation_loss, settings, seed=seed)
    with torch.no_grad():
        scores = {name: network(each) for name, each in rows.items()}
        alive = live_units(network, rows["train"]) if isinstance(network, nn.Sequential) else float("nan")
    numbers = {
        "alpha": alpha, "inputs": rows["train"].shape[1], "epochs": len(history.training), "alive": alive,
    }  # fmt: skip
    for name in ("train", "validation"):
        numbers[name] = improvement(*_curves(scores[name], grid, parts[name][2]))
        numbers[f"{name}_explained"] = explained(scores[name], totals[name], row.psi)
    kept = grid[scores["test"][:, :-1].argmax(1)].double()
    numbers |= {"kept": float(kept.mean()), "kept_std": float(kept.std())}
    keys = torch.tensor(list(json.dumps(list(numbers)).encode()), dtype=torch.uint8)
    values = torch.tensor(list(numbers.values()), dtype=torch.float64)
    return {"scores": scores["test"], "numbers": values, "keys": keys}


def live_units(network: nn.Sequential, rows: Tensor) -> int:
    """Count the hidden units that are not 0 for every one of the rows."""
    return int((network[:2](rows) != 0).any(0).sum())


def explained(scores: Tensor, totals: Tensor, psi: str) -> float:
    """Return how many % lower the surrogate is than with the best scores that are the same for every instance.

    Below 0, the instances' own scores do harm. Cross entropy alone has the best constant in closed form."""
    if psi != "cross_entropy":
        return float("nan")
    weights = (totals.amax(1, keepdim=True) - totals).mean(0)
    constant = (weights / weights.sum()).clamp(min=1e-12).log().expand_as(totals)
    reached, same = (float(one_time_surrogate(each, totals, get_psi(psi))) for each in (scores, constant))
    return 100 * (1 - reached / same)


def _in_length(examples: Examples, _: Draft, table: HandOffTable) -> HandOffTable:
    """Return the losses in units of length: from % over the expert's tour to the length over it."""
    lengths = tour_lengths(examples.inputs, examples.targets).float()
    return HandOffTable(table.loss / 100 * lengths[:, None], table.deferred)


def _curves(scores: Tensor, grid: Tensor, table: HandOffTable) -> tuple[Curve, Curve]:
    """Return the deferral curve of scores, and Random's."""
    ends = Ends.of(table)
    return curve_of(_sweep(scores, grid, table), ends), random_curve(ends)


def _sweep(scores: Tensor, grid: Tensor, table: HandOffTable) -> StepSweep:
    return hand_off_sweep(ScoredHandOffs.of(scores, LENGTH, hand_offs=grid, rule="odds"), table)


def _uncontinued(run: Run, name: str) -> float:
    """Return the improvement by an area that ends where all tours are handed off, against the whole of Random's."""
    curve, random = curve_of(run.sweeps[name], run.ends), random_curve(run.ends)
    return improvement(Curve(curve.deferred[:-1], curve.loss[:-1]), random)


def test_rows(seed: int) -> Tensor:
    return torch.arange(INSTANCES) + seed * INSTANCES


# -- references: how much the place and the order of hand-offs give, each without learning ----


def references(parts: Parts) -> dict[str, Any]:
    """Return what needs no fit: whole deferral by ChowMean, the best place that is the same for all tours, and both.

    Places are chosen by validation data. `loss_by_kept` is the mean training loss after every fifth city."""
    best = {order: _best_place(parts["validation"], order) for order in ("random", "chow")}
    test = parts["test"]
    found = {
        "ChowMean": [fixed_place(test, test_rows(seed), 0, "chow") for seed in range(SEEDS)],
        "one place": [fixed_place(test, test_rows(seed), best["random"], "random") for seed in range(SEEDS)],
        "one place, by ChowMean": [fixed_place(test, test_rows(seed), best["chow"], "chow") for seed in range(SEEDS)],
        "OptimalOneTime": [_optimal(test[2].select(test_rows(seed))) for seed in range(SEEDS)],
    }
    return {
        "improvement": {name: _spread(values) for name, values in found.items()},
        "places": best,
        "gap": float(test[2].loss[:, -1].mean()),
        "loss_by_kept": parts["train"][2].loss.mean(0)[::5].tolist(),
    }


def _best_place(part: tuple[Examples, Draft, HandOffTable], order: str) -> int:
    every = torch.arange(len(part[1]))
    return int(np.argmax([fixed_place(part, every, place, order) for place in range(LENGTH)]))


def fixed_place(part: tuple[Examples, Draft, HandOffTable], rows: Tensor, place: int, order: str) -> float:
    """Return the improvement of handing all tours off at one place, the least certain first or in random order."""
    table, uncertainty = part[2].select(rows), part[1].uncertainty[rows].mean(1)
    scores = uncertainty if order == "chow" else torch.zeros_like(uncertainty)  # all at once: a straight line
    keep, defer = ((table.deferred[:, kept], table.loss[:, kept]) for kept in (-1, place))
    ends = Ends.of(table)
    return improvement(curve_of(switch_sweep(scores, keep, defer), ends), random_curve(ends))


def _optimal(table: HandOffTable) -> float:
    return improvement(optimal_once(table), random_curve(Ends.of(table)))


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None where a row has no such number."""
    mean = float(np.mean(values))
    return None if np.isnan(mean) else mean


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1)), "seeds": list(values)}


# -- the table ------------------------------------------------------------


class Study:
    """All rows over the data of one expert."""

    def __init__(self, folder: Path, predictors: Mapping[str, str | None]) -> None:
        self.folder, self.predictors = folder, predictors
        self.parts: dict[str, Parts] = {}
        self.fits: dict[str, list[Fitted]] = {}
        self.rows: dict[str, Row] = {}

    def data(self, name: str) -> Parts:
        """Return the labelled splits of a predictor. `large` has more training data of the bundled one."""
        if name not in self.parts:
            self.parts[name] = labelled(
                self.folder, predictor=self.predictors.get(name), train=24_000 if name == "large" else 2400
            )
        return self.parts[name]

    def add(self, row: Row) -> None:
        self.rows[row.name] = row
        self.fits[row.name] = [
            fit_row(row, seed, self.data(row.data), self.folder / "fits") for seed in range(SEEDS)
        ]  # fmt: skip

    def choose(self, name: str, among: Sequence[str]) -> None:
        """Add what validation data picks: one of several rows for each seed, or one of the fits of a single row."""
        if len(among) == 1:
            row, fits = self.rows[among[0]], self.fits[among[0]]
            best = max(range(SEEDS), key=lambda seed: fits[seed].numbers["validation"])
            chosen = [fits[best]] * SEEDS
        else:
            chosen = [max((self.fits[each][seed] for each in among), key=lambda one: one.numbers["validation"])
                      for seed in range(SEEDS)]  # fmt: skip
            row = self.rows[among[0]]
        self.rows[name], self.fits[name] = replace(row, name=name, group="choices"), chosen

    def describe(self, name: str, test: HandOffTable | None = None) -> dict[str, Any]:
        """Return a row of the table: improvement over Random, and the difference from the published recipe."""
        row, fits = self.rows[name], self.fits[name]
        base = BASELINE if row.data in ("bundled", "large") else ROWS[0].on(row.data).name
        table = self.data(row.data)["test"][2] if test is None else test
        runs = []
        for seed in range(SEEDS):
            part = table.select(test_rows(seed))
            sweeps = {each: self._sweep(each, seed, part) for each in {name, base}}
            runs.append(Run(Ends.of(part), sweeps))
        reached = [float(run.improvements(name, np.ones((1, INSTANCES)))[0]) for run in runs]
        cut = [_uncontinued(run, name) for run in runs]
        interval = paired_bootstrap(runs, name, base)
        means = {key: _mean([one.numbers[key] for one in fits]) for key in fits[0].numbers}
        return {
            "name": name, "group": row.group, "data": row.data, "improvement": _spread(reached),
            "difference": asdict(interval), "uncontinued": _spread(cut),
            "constant": sum(bool((one.scores.std(0) < 1e-6).all()) for one in fits), **means,
        }  # fmt: skip

    def _sweep(self, name: str, seed: int, table: HandOffTable) -> StepSweep:
        scores = self.fits[name][seed].scores[test_rows(seed)]
        return _sweep(scores, hand_off_grid(LENGTH, scores.shape[1]), table)


def labelled(folder: Path, *, predictor: str | None = None, train: int = 2400, expert: str = "search") -> Parts:
    """Label the splits, or find them in the folder."""
    options = TSPOptions(
        expert=expert, facts=False, predictor=predictor, train=train, validation=400, test=SEEDS * INSTANCES
    )
    task = prepare(options, folder, torch.device("cpu"), Clock())
    splits = Splits(task, folder, seeds=SEEDS, instances=INSTANCES, by_token=False)
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    return {name: (part.examples, part.draft, part.table) for name, part in parts.items()}


def exact_test(folder: Path) -> HandOffTable:
    """Return the hand-offs of the test drafts by the exact expert."""
    options = TSPOptions(expert="gurobi", facts=False, train=1, validation=1, test=SEEDS * INSTANCES)
    task = prepare(options, folder, torch.device("cpu"), Clock())
    return Splits(task, folder, seeds=SEEDS, instances=INSTANCES, by_token=False).test.table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="labels and fits are kept here")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--predictor", action="append", default=[], metavar="NAME=PREDICTOR", help="one more predictor")
    parser.add_argument("--exact", action="store_true", help="judge the rows by the exact expert too")
    parser.add_argument("--large", action="store_true", help="add rows with ten times the training data")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    study = Study(options.folder, dict(one.split("=", 1) for one in options.predictor))
    rows = [*ROWS, *(row.on(name) for name in study.predictors for row in ON_OTHER_PREDICTORS)]
    if options.large:
        rows += [row.on("large") for row in (THUMB_POOLED, THUMB_TANH, THUMB)]
    written: dict[str, Any] = {"version": __version__, "machine": machine(torch.device("cpu")), "seeds": SEEDS}
    written["references"] = {name: references(study.data(name)) for name in ("bundled", *study.predictors)}
    for done, row in enumerate(rows, 1):
        study.add(row)
        print(f"{done} of {len(rows)}: {row.name}", file=sys.stderr, flush=True)
    for name, among in CHOICES.items():
        study.choose(name, among)
    written["rows"] = [study.describe(name) for name in study.rows]
    if options.exact:
        table = exact_test(options.folder)
        written["exact"] = [study.describe(name, table) for name, row in study.rows.items() if row.data == "bundled"]
    write_json(options.out, written)


if __name__ == "__main__":
    main()
