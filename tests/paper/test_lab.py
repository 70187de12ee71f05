"""Cells: each equals what an experiment of its own measures, is found again by all it depends on, and by nothing else.

Also the toy tasks and the tiny plan that stand in for the paper's, here and in the tests of the command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import completing
from runs import FITS, FITTED, OPTIMAL, TINY
from torch import Tensor

from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.budgets.sweeps import hand_off_sweep
from seqdefer.errors import ContractError, DataError, OptionError
from seqdefer.evaluation import experiment, splits
from seqdefer.evaluation.curves import Curve, Ends, curve_of, improvement, random_curve
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import experiment_settings
from seqdefer.hyperparameters import Hyperparameters
from seqdefer.interfaces import SplitName, Task, TaskEntry
from seqdefer.labels import jobs
from seqdefer.labels.trees import DecisionTrees
from seqdefer.methods.registry import all_methods, get_method
from seqdefer.paper import lab as lab_module
from seqdefer.paper import plan, reproduce, studies
from seqdefer.paper.lab import USUAL, Lab, Variant
from seqdefer.paper.plan import Plan, TaskPlan, settings_of
from seqdefer.progress import Clock
from seqdefer.registry import load_task
from seqdefer.rejectors.checkpoints import load_rejector
from seqdefer.rejectors.confidence import DraftConfidence
from seqdefer.rejectors.draft import DraftNetwork
from seqdefer.rejectors.losses import rule_of_thumb
from seqdefer.storage.shards import DamagedShardWarning
from seqdefer.testing import ToyTask
from seqdefer.testing.fakes import ToyPredictor, ToyState
from seqdefer.types import Examples, Proposal, Sequences, SequenceSpec

SEEDS, RESAMPLES = 2, 30
Spy = Callable[[Any, str], list[tuple[Any, ...]]]


# -- toys ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToyOptions:
    n: int = 40
    length: int = 3
    seed: int = 0
    test_seed: int = 0  # other than 0: other test data, everything else as it was
    slips: int = 5  # of 8 tokens, where the predictor may stray
    blind: bool = False  # rejectors see no features
    by_token: bool = True  # else the expert only completes


class Toy(ToyTask):
    def __init__(self, name: str, options: ToyOptions) -> None:
        super().__init__(options.n, options.length, seed=options.seed)
        self.name, self.options = name, options
        if options.blind:
            self.predictor = Blind(self)
        self.predictor.fingerprint += f"-{options.slips}"
        if not options.by_token:
            self.expert = completing(Toy(name, replace(options, by_token=True)))  # type: ignore[assignment]

    def split(self, name: SplitName) -> Examples:
        if name == "test" and self.options.test_seed:
            return ToyTask(self.n, self.spec.length, seed=self.options.test_seed).split(name)
        return super().split(name)

    def stray(self, state: ToyState, often: int, salt: int) -> Tensor:
        return super().stray(state, self.options.slips if salt == PREDICTORS_SALT else often, salt)


PREDICTORS_SALT = 5


class Blind(ToyPredictor):
    def __init__(self, task: ToyTask) -> None:
        super().__init__(task)
        self.fingerprint += "-blind"

    def propose(self, state: ToyState) -> Proposal:
        proposal = super().propose(state)
        return replace(proposal, features=torch.zeros_like(proposal.features))


def toy_entry(name: str, **options: Any) -> TaskEntry:
    def prepare(chosen: ToyOptions, *_: Any) -> Task:
        return Toy(name, chosen)

    return TaskEntry(name, f"the toy {name}", {"tiny": ToyOptions(**options)}, prepare)


# One task whose expert names tokens, which the ablation is made on, and one whose expert only completes.
ENTRIES = {"spell": toy_entry("spell"), "solve": toy_entry("solve", length=4, by_token=False)}
LEARNING = {"instances": 12, "token": TINY.token, "once": TINY.once, "cost": TINY.cost, "resamples": RESAMPLES}
PLAN = Plan(
    seeds=SEEDS,
    tasks={
        "spell": TaskPlan("tiny", {}, LEARNING, hand_offs=(2, 3), inputs={"blind": {"blind": True}, "own": {}}),
        "solve": TaskPlan("tiny", {}, LEARNING, hand_offs=(2, 3)),
    },
    times=(0.0, 1.0, 4.0),
    text="spell",
)
SETTINGS = settings_of(ENTRIES["spell"], PLAN.tasks["spell"], SEEDS)


def install(patch: pytest.MonkeyPatch) -> None:
    """Puts the tiny plan beside the paper's, and its toys in the place of all tasks."""
    patch.setitem(plan.PLANS, "tiny", PLAN)
    patch.setattr(reproduce, "load_task", ENTRIES.__getitem__)
    patch.setattr(studies, "RESAMPLES", RESAMPLES)


def open_lab(folder: Path, task: Task | None = None, **settings: Any) -> Lab:
    chosen = replace(SETTINGS, **settings)
    return Lab(ENTRIES["spell"], task or Toy("spell", ToyOptions()), chosen, folder, Clock())


def cells_of(folder: Path) -> set[Path]:
    return set(folder.rglob("cells/*.safetensors"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab with the cells of all methods. Nobody may change its folder."""
    lab = open_lab(tmp_path_factory.mktemp("lab"))
    for seed in range(SEEDS):
        lab.oracles(seed)
    return lab


# -- what is in a cell ---------------------------------------------------------------------------------------------


def judged_by(lab: Lab, rejector: Any, grid: Tensor) -> float:
    """% improvement of a one-time rejector on validation data, from its scores."""
    part = Experiment(lab.task, lab.settings, lab.folder).splits.validation
    ends, scores = Ends.of(part.table), rejector.score(part.draft)
    scored = ScoredHandOffs.of(scores, int(grid[-1]), hand_offs=grid, rule="odds")
    return improvement(curve_of(hand_off_sweep(scored, part.table), ends), random_curve(ends))


@pytest.mark.parametrize("variant", [USUAL, Variant(hand_offs=2), Variant(times=4.0)], ids=lambda one: one.name)
def test_the_validation_figure_is_that_of_the_fitted_rejector(variant: Variant, tmp_path: Path) -> None:
    lab = open_lab(tmp_path)
    cell = lab.cell(variant, "OneTimeModel", 1)
    rejector = load_rejector(tmp_path / "rejectors" / f"usual-{variant.name}" / "OneTimeModel-seed1")
    assert isinstance(rejector, DraftNetwork)
    grid = torch.tensor(rejector.notes["grid"])
    assert grid.tolist() == ([0, 3] if variant.hand_offs == 2 else [0, 1, 2, 3])
    assert rejector.notes["alpha"] == lab.alpha(variant)
    assert cell.validation == judged_by(lab, rejector, grid)


def test_methods_by_token_have_no_validation_figure(filled: Lab) -> None:
    for method in filled.methods:
        is_by_token = method.startswith("Tokenwise")
        assert (filled.cell(USUAL, method, 0).validation is None) is is_by_token


def test_kept_cells_are_those_that_were_made(filled: Lab) -> None:
    """Through a file and back: the same curves and ends, bit by bit."""
    slow = Experiment(filled.task, filled.settings, filled.folder, splits=filled.splits, variant="usual-")
    again = open_lab(filled.folder)
    for seed in range(SEEDS):
        rejectors = slow.fit(filled.splits.train, filled.splits.validation, seed)
        made, kept = slow.sweep(seed, rejectors), again.run(seed, {name: (USUAL, name) for name in again.methods})
        assert list(kept.sweeps) == list(made.sweeps)
        for name, sweep in made.sweeps.items():
            assert curve_of(kept.sweeps[name], kept.ends).points == curve_of(sweep, made.ends).points
        for name, curve in slow.oracles(seed, made).items():
            assert again.oracles(seed)[name].points == curve.points


def test_methods_are_those_that_apply(tmp_path: Path) -> None:
    assert open_lab(tmp_path / "one").methods == list(all_methods())
    only_completes = open_lab(tmp_path / "other", Toy("solve", ToyOptions(by_token=False)))
    assert only_completes.methods == [name for name in all_methods() if not name.startswith("Tokenwise")]
    assert set(only_completes.oracles(0)) == {"OptimalWhole", "OptimalOneTime"}


def without_entropy(proposal: Proposal) -> Proposal:
    return replace(proposal, entropy=None)


def test_without_an_entropy_there_are_no_methods_by_entropy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Toy("spell", ToyOptions())
    propose = task.predictor.propose
    monkeypatch.setattr(task.predictor, "propose", lambda state: without_entropy(propose(state)))
    assert open_lab(tmp_path, task).methods == [name for name in all_methods() if not name.endswith("Entropy")]


# -- facts ---------------------------------------------------------------------------------------------------------


def gains(lab: Lab) -> np.ndarray[Any, Any]:
    """How much better the expert alone does than the predictor alone, example by example."""
    task, examples = lab.task, lab.task.split("train")
    table = jobs.hand_off_table(task, examples, jobs.draft(task.predictor, examples, task.spec))[0]
    return np.asarray((table.loss[:, -1] - table.loss[:, 0]).double())


@pytest.mark.parametrize("slips", [5, 2, 0])
def test_alpha_is_counted_in_what_the_expert_gains(slips: int, tmp_path: Path) -> None:
    """By the median where nothing else is said, which is 0 for a good predictor; then by the mean; then plainly."""
    lab = open_lab(tmp_path, Toy("spell", ToyOptions(slips=slips)))
    gained = gains(lab)
    assert lab.facts.rule == lab.alpha(USUAL) == max(0.0, float(np.median(gained)))
    assert lab.facts.gain == pytest.approx(gained.mean())
    assert (lab.facts.rule > 0, lab.facts.gain > 0) == (slips == 5, slips > 0)
    assert lab.unit == pytest.approx(gained.mean() if slips else 1.0)
    for times in (0.0, 0.5, 16.0):
        assert lab.alpha(Variant(times=times)) == pytest.approx(times * lab.unit)
    assert lab.cell(USUAL, "OneTimeModel", 0).validation is not None


def test_facts_are_kept(filled: Lab, spy: Spy) -> None:
    labelled = spy(jobs, "hand_off_table")
    again = open_lab(filled.folder)
    assert again.facts == filled.facts
    assert again.facts.rule == rule_of_thumb(filled.splits.train.table)
    assert again.facts.calls == filled.splits.calls
    assert labelled == []


# -- found again, or not -------------------------------------------------------------------------------------------


def test_cells_that_are_there_are_neither_labelled_nor_fitted_nor_loaded_for(filled: Lab, spy: Spy) -> None:
    work = [spy(module, name) for name, module in FITS.items()] + [spy(experiment, "load_rejector")]
    work += [spy(jobs, "draft"), spy(jobs, "hand_off_table"), spy(splits, "enumerate_trees")]
    before = cells_of(filled.folder)
    again = open_lab(filled.folder)
    for seed in range(SEEDS):
        again.run(seed, {name: (USUAL, name) for name in again.methods})
        again.oracles(seed)
    assert not any(work)
    assert cells_of(filled.folder) == before


def test_a_cell_needs_its_own_rejector_alone(tmp_path: Path, spy: Spy) -> None:
    fits = {name: spy(module, name) for name, module in FITS.items()}
    lab = open_lab(tmp_path)
    lab.cell(USUAL, "ChowMean", 0)
    lab.cell(USUAL, "OneTimeScore", 0)
    assert not any(fits.values())
    lab.cell(USUAL, "OneTimeCost", 0)
    assert {name: len(calls) for name, calls in fits.items() if calls} == {"fit_cost": 1}


def renamed(task: Toy, **fields: Any) -> Toy:
    for name, value in fields.items():
        setattr(task, name, value)
    return task


class OtherLosses(Toy):
    def loss_key(self, examples: Examples) -> str:
        return "counted in another way"


class NamedExpert(Toy):
    def __init__(self, name: str, options: ToyOptions) -> None:
        super().__init__(name, options)
        self.expert.fingerprint = "somebody else"


class Described(Toy):
    def describe(self) -> dict[str, str]:
        return {**super().describe(), "expert": "who has no name, but can be described"}


class Shorter(Toy):
    """The same data and models, but fewer tokens may be written."""

    def __init__(self, name: str, options: ToyOptions) -> None:
        super().__init__(name, options)
        self.spec = SequenceSpec(2, self.spec.end)

    def split(self, name: SplitName) -> Examples:
        return Toy(self.name, self.options).split(name)

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        return super().sequence_loss(replace(examples, targets=examples.targets[:, :2]), sequences)


OPTIONS = ToyOptions()
OTHER_TASKS = {
    "data": Toy("spell", replace(OPTIONS, seed=1)),
    "fewer examples": Toy("spell", replace(OPTIONS, n=39)),
    "test data": Toy("spell", replace(OPTIONS, test_seed=9)),
    "predictor": Toy("spell", replace(OPTIONS, slips=4)),
    "what rejectors see": Toy("spell", replace(OPTIONS, blind=True)),
    "name": Toy("spelt", OPTIONS),
    "loss unit": renamed(Toy("spell", OPTIONS), loss_unit="%"),
    "token rule": renamed(Toy("spell", OPTIONS), token_rule="other"),
    "losses": OtherLosses("spell", OPTIONS),
    "expert": NamedExpert("spell", OPTIONS),
    "description of the expert": Described("spell", OPTIONS),
    "length": Shorter("spell", OPTIONS),
}
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "instances": {"instances": 11},
    "rollouts": {"rollouts": 9},
    "once": {"once": replace(TINY.once, epochs=2)},
    "psi": {"psi": "mean_absolute_error"},
    "phi": {"phi": "square"},
    "strategy": {"strategy": "free"},
    "price": {"price": 0.5},
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Variant, str, int]]:
    """Which cells were made, from then on."""
    made: list[tuple[Variant, str, int]] = []
    measure = Lab._measure

    def noted(lab: Lab, *cell: Any) -> Any:
        made.append(cell)
        return measure(lab, *cell)

    monkeypatch.setattr(Lab, "_measure", noted)
    return made


@pytest.mark.parametrize("change", OTHER_TASKS)
def test_another_task_has_other_cells(change: str, tmp_path: Path, measured: list[Any]) -> None:
    """In the same folder, too."""
    one, other = open_lab(tmp_path), open_lab(tmp_path, OTHER_TASKS[change])
    one.cell(USUAL, "ChowSum", 0)
    one.ends(0)
    before = len(cells_of(tmp_path))
    other.cell(USUAL, "ChowSum", 0)
    other.ends(0)
    assert measured == [(USUAL, "ChowSum", 0)] * 2
    assert len(cells_of(tmp_path)) == 2 * before == 6  # facts, ends, the cell


@pytest.mark.parametrize("change", OTHER_SETTINGS)
def test_other_settings_have_other_cells(change: str, tmp_path: Path, measured: list[Any]) -> None:
    for settings in ({}, OTHER_SETTINGS[change], {}, OTHER_SETTINGS[change]):
        open_lab(tmp_path, **settings).cell(USUAL, "OneTimeModel", 0)
    assert measured == [(USUAL, "OneTimeModel", 0)] * 2


def test_what_a_cell_does_not_depend_on_makes_no_other(tmp_path: Path, measured: list[Any]) -> None:
    """More seeds use the cells of fewer; how often a bootstrap draws is nothing to a cell."""
    cells = {seeds: open_lab(tmp_path, seeds=seeds, resamples=seeds).cell(USUAL, "OneTimeModel", 0) for seeds in (1, 3)}
    assert measured == [(USUAL, "OneTimeModel", 0)]
    assert cells[1].validation == cells[3].validation
    open_lab(tmp_path, seeds=3).cell(USUAL, "OneTimeModel", 2)
    fresh = open_lab(tmp_path / "fresh", seeds=3)
    for seed in (0, 2):
        points = [curve_of(lab.cell(USUAL, "OneTimeModel", seed).sweep, lab.ends(seed)).points
                  for lab in (fresh, open_lab(tmp_path, seeds=3))]  # fmt: skip
        assert points[0] == points[1]


def test_variants_have_cells_and_rejectors_of_their_own(tmp_path: Path, measured: list[Any]) -> None:
    lab = open_lab(tmp_path)
    variants = [USUAL, Variant(hand_offs=2), Variant(hand_offs=3), Variant(times=1.0), Variant(times=0.0)]
    for variant in [*variants, *variants]:
        lab.cell(variant, "OneTimeModel", 0)
    assert measured == [(variant, "OneTimeModel", 0) for variant in variants]
    kept = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.glob("rejectors/*/*/config.json")}
    assert kept == {f"rejectors/usual-{variant.name}/OneTimeModel-seed0" for variant in variants}


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[:-7],
    "no file of ours": lambda _: b'{"a": 1}' * 9,
    "other fields": lambda content: content.replace(b"validation", b"valedation"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cell_is_made_again(damage: str, tmp_path: Path, measured: list[Any], spy: Spy) -> None:
    made = open_lab(tmp_path).cell(USUAL, "OneTimeModel", 0)
    (path,) = (path for path in cells_of(tmp_path) if b"validation" in path.read_bytes())
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    fits = spy(FITS["fit_once"], "fit_once")
    with pytest.warns(DamagedShardWarning, match=f"{path.name} is damaged: .*; it is removed and made again"):
        again = open_lab(tmp_path).cell(USUAL, "OneTimeModel", 0)
    assert len(measured) == 2
    assert fits == []  # its rejector was whole
    assert again.validation == made.validation
    assert open_lab(tmp_path).cell(USUAL, "OneTimeModel", 0).validation == made.validation
    assert len(measured) == 2


def test_nothing_is_made_where_the_test_data_are_too_few(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the test split has 40 examples, 4 seeds x 12 instances need more"):
        open_lab(tmp_path, seeds=4)
    assert not list(tmp_path.iterdir())


# -- oracles -------------------------------------------------------------------------------------------------------


def is_below(oracle: Curve, curve: Curve) -> bool:
    return bool((oracle.at(curve.deferred) <= curve.loss + 1e-9).all())


def test_no_method_beats_its_oracle_at_any_budget(filled: Lab) -> None:
    for seed in range(SEEDS):
        oracles, ends = filled.oracles(seed), filled.ends(seed)
        for name in filled.methods:
            oracle = oracles[OPTIMAL[get_method(name).granularity]]
            assert is_below(oracle, curve_of(filled.cell(USUAL, name, seed).sweep, ends)), name
        assert is_below(oracles["OptimalOneTime"], oracles["OptimalWhole"])
        assert is_below(oracles["OptimalToken"], oracles["OptimalOneTime"])


def finds_nothing(trees: DecisionTrees, rows: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.full((len(rows), 1), torch.inf), torch.zeros(len(rows), 1)


def test_an_oracle_that_was_searched_for_knows_what_the_methods_of_now_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long sequences: what the search does not find, a method may. Under other settings methods reach other outcomes,
    and the oracle of the old ones, found again, was beaten."""
    monkeypatch.setattr(experiment, "beam_outcomes", finds_nothing)
    task = Toy("spell", ToyOptions(n=16, length=13))
    for units in (2, 8, 4):
        lab = open_lab(tmp_path, task, seeds=1, token=replace(TINY.token, units=units))
        reached = lab.run(0, {name: (USUAL, name) for name in lab.methods})
        oracle = lab.oracles(0)["OptimalToken"]
        assert oracle.points == Experiment(task, lab.settings, tmp_path).oracles(0, reached)["OptimalToken"].points
        for name, sweep in reached.sweeps.items():
            assert is_below(oracle, curve_of(sweep, reached.ends)), name


# -- nothing leaks -------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_cells_choose_nothing_with_test_data(tmp_path: Path) -> None:
    variants = [USUAL, Variant(hand_offs=2), Variant(times=4.0)]
    found = []
    for name, options in {"one": OPTIONS, "other": replace(OPTIONS, test_seed=9)}.items():
        lab = open_lab(tmp_path / name, Toy("spell", options))
        cells = {(variant, method): lab.cell(variant, method, 0) for variant in variants for method in FITTED[1:3]}
        cells[USUAL, "TokenwiseModel"] = lab.cell(USUAL, "TokenwiseModel", 0)
        judged = {key: cell.validation for key, cell in cells.items()}
        areas = [curve_of(cell.sweep, lab.ends(0)).area for cell in cells.values()]
        found.append((contents(tmp_path / name / "rejectors"), judged, lab.facts.rule, lab.unit, areas))
    assert found[0][:-1] == found[1][:-1]
    assert len(found[0][0]) == 2 * (len(variants) * 2 + 1)  # config and weights
    assert found[0][-1] != found[1][-1]


def test_variants_are_not_judged_by_test_data(tmp_path: Path) -> None:
    lab = open_lab(tmp_path)
    rejectors = {"OneTimeScore": DraftConfidence(range(lab.task.spec.length + 1))}
    assert lab_module._judged(lab.splits.validation, "OneTimeScore", rejectors) < 100
    with pytest.raises(ContractError, match="TestData"):
        lab_module._judged(lab.splits.test, "OneTimeScore", rejectors)  # type: ignore[arg-type]


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot place 9 hand-offs"):
        open_lab(tmp_path).cell(Variant(hand_offs=9), "OneTimeModel", 0)


# -- plans ---------------------------------------------------------------------------------------------------------

planned = pytest.mark.parametrize(
    ("preset", "name"), [(preset, name) for preset in ("paper", "quick") for name in plan.PLANS[preset].tasks]
)


@planned
def test_plans_name_tasks_and_options_that_exist(preset: str, name: str) -> None:
    entry, task = load_task(name), plan.PLANS[preset].tasks[name]
    options = replace(entry.presets[task.preset], **task.options)  # unknown ones, or out of range, raise
    for changes in task.inputs.values():
        replace(options, **changes)
    assert plan.PLANS[preset].tasks[plan.PLANS[preset].text].inputs


@planned
def test_a_plan_does_what_a_run_does(preset: str, name: str) -> None:
    """With the seeds of the reproduction."""
    entry, task = load_task(name), plan.PLANS[preset].tasks[name]
    assert settings_of(entry, task, 4) == replace(experiment_settings(entry, task.preset), seeds=4, **task.settings)


@planned
def test_cells_of_the_ablation_differ_in_what_is_ablated_alone(preset: str, name: str) -> None:
    """The paper's hyperparameters for both architectures; not longer than the preset would fit."""
    entry, task = load_task(name), plan.PLANS[preset].tasks[name]
    usual = settings_of(entry, task, 2)
    assert isinstance(entry.hyperparameters, Hyperparameters)
    papers = entry.hyperparameters.published_token or usual.token
    for architecture in plan.ARCHITECTURES:
        for strategy in plan.ABLATED:
            chosen = plan.ablated_settings(entry, usual, architecture, strategy)
            assert (chosen.token.architecture, chosen.strategy) == (architecture, strategy)
            assert chosen.token.epochs <= usual.token.epochs
            same = replace(chosen.token, architecture=papers.architecture, epochs=papers.epochs)
            assert same == papers
            assert replace(chosen, token=usual.token, strategy=usual.strategy) == usual
