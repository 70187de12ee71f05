"""Cells: each equals what a separate experiment measures, and its name depends on all that it depends on, only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import FITS
from torch import Tensor
from toy_studies import SEEDS, Spy, Toy, ToyOptions, cells_of, open_lab

from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.budgets.sweeps import hand_off_sweep
from seqdefer.errors import ContractError, DataError
from seqdefer.evaluation import experiment
from seqdefer.evaluation.curves import Curve, Ends, curve_of, improvement, random_curve
from seqdefer.evaluation.experiment import Experiment
from seqdefer.interfaces import SplitName
from seqdefer.labels import jobs
from seqdefer.labels.trees import DecisionTrees
from seqdefer.methods.registry import all_methods, get_method, usual_methods
from seqdefer.paper import lab as lab_module
from seqdefer.paper.lab import DEFAULT_VARIANT as DEFAULT
from seqdefer.paper.lab import Lab, Variant
from seqdefer.rejectors.checkpoints import load_rejector
from seqdefer.rejectors.confidence import DraftConfidence
from seqdefer.rejectors.draft import DraftNetwork
from seqdefer.storage.shards import DamagedShardWarning
from seqdefer.types import Examples, Sequences, SequenceSpec
from tests.evaluation.test_experiment import OPTIMAL, TINY


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab with the cells of all methods. Read only."""
    lab = open_lab(tmp_path_factory.mktemp("lab"))
    for seed in range(SEEDS):
        lab.oracles(seed)
    return lab


# -- contents of a cell -------------------------------------------------------------------------------------------


def validation_improvement(lab: Lab, rejector: Any, grid: Tensor) -> float:
    """Return the % improvement of a one-time rejector on validation data, from its scores."""
    part = Experiment(lab.task, lab.settings, lab.folder).splits.validation
    ends, scores = Ends.of(part.table), rejector.score(part.draft)
    scored = ScoredHandOffs.of(scores, int(grid[-1]), hand_offs=grid, rule="odds")
    return improvement(curve_of(hand_off_sweep(scored, part.table), ends), random_curve(ends))


@pytest.mark.parametrize("variant", [DEFAULT, Variant(hand_offs=2), Variant(times=4.0)], ids=lambda one: one.name)
def test_validation_figure_comes_from_the_fitted_rejector(variant: Variant, tmp_path: Path) -> None:
    lab = open_lab(tmp_path)
    cell = lab.cell(variant, "OneTimeModel", 1)
    rejector = load_rejector(tmp_path / "rejectors" / f"ours-{variant.name}" / "OneTimeModel-seed1")
    assert isinstance(rejector, DraftNetwork)
    grid = torch.tensor(rejector.notes["grid"])
    assert grid.tolist() == ([0, 3] if variant.hand_offs == 2 else [0, 1, 2, 3])
    assert rejector.notes["alpha"] == lab.alpha(variant)
    assert cell.validation == validation_improvement(lab, rejector, grid)


def test_token_methods_have_no_validation_figure(filled: Lab) -> None:
    for method in filled.methods:
        is_by_token = method.startswith("Tokenwise")
        assert (filled.cell(DEFAULT, method, 0).validation is None) is is_by_token


def test_stored_cells_equal_measured_ones(filled: Lab) -> None:
    """A cell read from its file has the same curves and ends, bit by bit."""
    slow = Experiment(filled.task, filled.settings, filled.folder, splits=filled.splits, variant="ours-")
    again = open_lab(filled.folder)
    for seed in range(SEEDS):
        rejectors = slow.fit(filled.splits.train, filled.splits.validation, seed)
        made, kept = slow.sweep(seed, rejectors), again.run(seed, {name: (DEFAULT, name) for name in again.methods})
        assert list(kept.sweeps) == list(made.sweeps)
        for name, sweep in made.sweeps.items():
            assert curve_of(kept.sweeps[name], kept.ends).points == curve_of(sweep, made.ends).points
        for name, curve in slow.oracles(seed, made).items():
            assert again.oracles(seed)[name].points == curve.points


def test_the_published_recipe_runs_no_method_of_ours(tmp_path: Path) -> None:
    lab = open_lab(tmp_path, recipe="published")
    ours = {name for name, one in all_methods().items() if one.is_ours}
    assert "OneTimeCost" in ours
    assert lab.methods == [name for name in usual_methods() if name not in ours]


def test_each_recipe_keeps_the_machine_that_measured_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe in ("published", "ours"):
        monkeypatch.setattr(lab_module, "machine", lambda _, recipe=recipe: {"device": recipe})
        open_lab(tmp_path, recipe=recipe).cell(DEFAULT, "ChowMean", 0)
    monkeypatch.setattr(lab_module, "machine", lambda _: {"device": "a third"})
    for recipe in ("published", "ours"):
        assert open_lab(tmp_path, recipe=recipe).machine == {"device": recipe}


def test_training_facts_are_those_of_the_fitted_network(tmp_path: Path) -> None:
    lab = open_lab(tmp_path)
    for method in ("OneTimeModel", "TokenwiseModel"):
        rejector = load_rejector_of(lab, method)
        history = rejector.notes["history"]
        best = int(np.argmin(history["validation"]))
        facts = {"epochs": len(history["training"]), "best_epoch": best + 1}
        if method == "TokenwiseModel":
            facts.update(by_teacher=0, by_closed_trees=0)  # it explores complete trees
        assert lab.cell(DEFAULT, method, 0).training == facts
    assert lab.cell(DEFAULT, "ChowSum", 0).training == {}


def load_rejector_of(lab: Lab, method: str) -> Any:
    lab.cell(DEFAULT, method, 0)
    return load_rejector(lab.folder / "rejectors" / "ours-" / f"{method}-seed0")


def test_methods_apply_to_the_task(tmp_path: Path) -> None:
    assert open_lab(tmp_path / "one").methods == usual_methods()
    only_completes = open_lab(tmp_path / "other", Toy("solve", ToyOptions(by_token=False)))
    assert only_completes.methods == [name for name in usual_methods() if not name.startswith("Tokenwise")]
    assert set(only_completes.oracles(0)) == {"OptimalFree", "OptimalWhole", "OptimalOneTime"}


# -- facts ---------------------------------------------------------------------------------------------------------


def gains(lab: Lab) -> np.ndarray[Any, Any]:
    """Return the gain of the expert alone over the predictor alone, by example."""
    task, examples = lab.task, lab.task.split("train")
    table = jobs.hand_off_table(task, examples, jobs.draft(task.predictor, examples, task.spec))[0]
    return np.asarray((table.loss[:, -1] - table.loss[:, 0]).double())


@pytest.mark.parametrize("slips", [5, 2, 0])
def test_alpha_is_in_units_of_the_mean_gain(slips: int, tmp_path: Path) -> None:
    """The default is the median gain, 0 for a good predictor. The unit is the mean gain, or 1 where there is none."""
    lab = open_lab(tmp_path, Toy("spell", ToyOptions(slips=slips)))
    gained = gains(lab)
    assert lab.facts.rule == lab.alpha(DEFAULT) == max(0.0, float(np.median(gained)))
    assert lab.facts.gain == pytest.approx(gained.mean())
    assert (lab.facts.rule > 0, lab.facts.gain > 0) == (slips == 5, slips > 0)
    assert lab.unit == pytest.approx(gained.mean() if slips else 1.0)
    for times in (0.0, 0.5, 16.0):
        assert lab.alpha(Variant(times=times)) == pytest.approx(times * lab.unit)
    assert lab.cell(DEFAULT, "OneTimeModel", 0).validation is not None


def test_size_and_alpha_are_those_of_the_variant_then_of_the_recipe(tmp_path: Path) -> None:
    ours, published = (open_lab(tmp_path, recipe=recipe) for recipe in ("ours", "published"))
    assert (ours.size(DEFAULT), ours.alpha(DEFAULT)) == (ours.n_positions, ours.facts.rule) == (4, ours.facts.rule)
    assert (published.size(DEFAULT), published.alpha(DEFAULT)) == (3, 0.5)
    for lab in (ours, published):
        assert [lab.size(Variant(hand_offs=size)) for size in (2, 3, 4)] == [2, 3, 4]
        assert lab.alpha(Variant(times=4.0)) == 4 * lab.unit
        assert lab.alpha(Variant(hand_offs=2)) == lab.alpha(DEFAULT)


def test_a_multiple_that_is_the_rule_of_thumb_has_no_rounding_error(tmp_path: Path) -> None:
    """The rule of thumb as a multiple of the mean gain came out an ulp off: it was measured twice, once unmarked."""
    lab = open_lab(tmp_path, recipe="published")
    for rule, gain in ((1.7, 4.9), (0.3, 1.1), (2.3, 0.7), (13.7, 5.3)):
        lab.__dict__["facts"] = replace(lab.facts, rule=rule, gain=gain)
        assert lab.alpha(Variant(times=rule / gain)) == rule
        assert lab.alpha(Variant(times=0.5 / gain)) == 0.5
    assert any(rule / gain * gain != rule for rule, gain in ((1.7, 4.9), (0.3, 1.1), (2.3, 0.7), (13.7, 5.3)))


# -- names of cells -----------------------------------------------------------------------------------------------


def renamed(task: Toy, **fields: Any) -> Toy:
    for name, value in fields.items():
        setattr(task, name, value)
    return task


class Shorter(Toy):
    """The same data and models, with a smaller maximum length."""

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
    "losses": renamed(Toy("spell", OPTIONS), loss_key=lambda _: "another loss"),
    "expert": Toy("spell", replace(OPTIONS, expert="another expert")),
    "description of the expert": renamed(Toy("spell", OPTIONS), describe=lambda: {"expert": "without a fingerprint"}),
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
    "hand-offs": {"hand_offs": 3},
    "recipe": {"recipe": "published"},
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Variant, str, int]]:
    """The cells that are measured from now on."""
    made: list[tuple[Variant, str, int]] = []
    measure = Lab._measure

    def noted(lab: Lab, *cell: Any) -> Any:
        made.append(cell)
        return measure(lab, *cell)

    monkeypatch.setattr(Lab, "_measure", noted)
    return made


@pytest.mark.parametrize("change", OTHER_TASKS)
def test_another_task_has_other_cells(change: str, tmp_path: Path, measured: list[Any]) -> None:
    """Even in the same folder."""
    one, other = open_lab(tmp_path), open_lab(tmp_path, OTHER_TASKS[change])
    one.cell(DEFAULT, "ChowSum", 0)
    one.ends(0)
    before = len(cells_of(tmp_path))
    other.cell(DEFAULT, "ChowSum", 0)
    other.ends(0)
    assert measured == [(DEFAULT, "ChowSum", 0)] * 2
    assert len(cells_of(tmp_path)) == 2 * before == 6  # facts, ends, the cell


@pytest.mark.parametrize("change", OTHER_SETTINGS)
def test_other_settings_have_other_cells(change: str, tmp_path: Path, measured: list[Any]) -> None:
    for settings in ({}, OTHER_SETTINGS[change], {}, OTHER_SETTINGS[change]):
        open_lab(tmp_path, **settings).cell(DEFAULT, "OneTimeModel", 0)
    assert measured == [(DEFAULT, "OneTimeModel", 0)] * 2


def test_variants_have_their_own_cells_and_rejectors(tmp_path: Path, measured: list[Any]) -> None:
    lab = open_lab(tmp_path)
    variants = [DEFAULT, Variant(hand_offs=2), Variant(hand_offs=3), Variant(times=1.0), Variant(times=0.0)]
    variants += [Variant(psi="mean_absolute_error"), Variant(hand_offs=2, times=1.0)]
    for variant in [*variants, *variants]:
        lab.cell(variant, "OneTimeModel", 0)
    assert measured == [(variant, "OneTimeModel", 0) for variant in variants]
    kept = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.glob("rejectors/*/*/config.json")}
    assert kept == {f"rejectors/ours-{variant.name}/OneTimeModel-seed0" for variant in variants}


@pytest.mark.parametrize("change", [lambda content: content[:-7], lambda content: content.replace(b"vali", b"vale")])
def test_a_damaged_cell_is_measured_again(
    change: Callable[[bytes], bytes], tmp_path: Path, measured: list[Any], spy: Spy
) -> None:
    made = open_lab(tmp_path).cell(DEFAULT, "OneTimeModel", 0)
    (path,) = (path for path in cells_of(tmp_path) if b"validation" in path.read_bytes())
    path.write_bytes(change(path.read_bytes()))
    fits = spy(FITS["fit_once"], "fit_once")
    with pytest.warns(DamagedShardWarning, match=f"{path.name} is damaged: .*; it is removed and made again"):
        again = open_lab(tmp_path).cell(DEFAULT, "OneTimeModel", 0)
    assert len(measured) == 2
    assert fits == []  # its rejector is intact
    assert again.validation == made.validation
    assert open_lab(tmp_path).cell(DEFAULT, "OneTimeModel", 0).validation == made.validation
    assert len(measured) == 2


def test_too_few_test_examples_fail_before_any_work(tmp_path: Path) -> None:
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
            assert is_below(oracle, curve_of(filled.cell(DEFAULT, name, seed).sweep, ends)), name
        assert is_below(oracles["OptimalOneTime"], oracles["OptimalWhole"])
        assert is_below(oracles["OptimalToken"], oracles["OptimalOneTime"])


def finds_nothing(trees: DecisionTrees, rows: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.full((len(rows), 1), torch.inf), torch.zeros(len(rows), 1)


@pytest.mark.slow
def test_a_searched_oracle_counts_the_outcomes_of_current_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On long sequences a method may beat the search. Under new settings, a stored oracle of old ones was beaten."""
    monkeypatch.setattr(experiment, "beam_outcomes", finds_nothing)
    task = Toy("spell", ToyOptions(n=16, length=13))
    for units in (2, 8, 4):
        lab = open_lab(tmp_path, task, seeds=1, token=replace(TINY.token, units=units))
        reached = lab.run(0, {name: (DEFAULT, name) for name in lab.methods})
        oracle = lab.oracles(0)["OptimalToken"]
        assert oracle.points == Experiment(task, lab.settings, tmp_path).oracles(0, reached)["OptimalToken"].points
        for name, sweep in reached.sweeps.items():
            assert is_below(oracle, curve_of(sweep, reached.ends)), name


# -- no leaks -----------------------------------------------------------------------------------------------------


def test_test_data_cannot_judge_variants(tmp_path: Path) -> None:
    lab = open_lab(tmp_path)
    rejectors = {"OneTimeScore": DraftConfidence(range(lab.task.spec.length + 1))}
    assert lab_module._validation_improvement(lab.splits.validation, "OneTimeScore", rejectors) < 100
    with pytest.raises(ContractError, match="TestData"):
        lab_module._validation_improvement(lab.splits.test, "OneTimeScore", rejectors)  # type: ignore[arg-type]
