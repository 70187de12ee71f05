"""Other people's rules and TokenwiseReader as methods: where they run, where they are refused, how BiLD chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles import WithExpert, completing
from small_runs import TINY
from toy_pair import LetterCodec

from seqdefer.errors import OptionError
from seqdefer.evaluation.areas import to_compare
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.interfaces import TaskEntry
from seqdefer.methods import bild
from seqdefer.methods.base import FitContext
from seqdefer.methods.registry import all_methods, fittable_methods, get_method, methods_for, require_applicable
from seqdefer.model.fitting import fit_model
from seqdefer.rejectors.checkpoints import Rejector
from seqdefer.rejectors.other_rules import RollbackRule
from seqdefer.testing import ToyTask

OTHERS = ("Chow", "Diff", "OPT", "Token1", "Token2", "Token3", "Typical", "BiLD")
READ_FIRST = (*OTHERS[1:], "TokenwiseReader")


def test_other_peoples_rules_say_whose_they_are_and_ours_that_they_are_ours() -> None:
    assert {name for name, one in all_methods().items() if one.source} == set(OTHERS)
    assert {name for name, one in all_methods().items() if one.reads_first} == set(READ_FIRST)
    assert all(not one.is_ours or not one.source for one in all_methods().values())
    assert get_method("TokenwiseReader").is_ours


@pytest.mark.parametrize("recipe", ["ours", "published"])
def test_they_run_where_they_are_named(recipe: str) -> None:
    every = ExperimentSettings(recipe=recipe)
    assert not any(every.wants(name) for name in (*OTHERS, "TokenwiseReader"))
    assert every.wants("TokenwiseModel")
    assert ExperimentSettings(recipe=recipe, methods=("OPT",)).wants("OPT")


def test_learned_methods_are_compared_with_them_and_not_they_with_others(tmp_path: Path) -> None:
    settings = replace(TINY, seeds=1, methods=("TokenwiseModel", "TokenwiseReader", "BiLD", "Token2"))
    experiment = Experiment(ToyTask(n=20, length=4), settings, tmp_path)
    run = experiment.sweep(0, experiment.fit(experiment.splits.train, experiment.splits.validation, 0))
    pairs = to_compare(run)
    assert {first for first, _ in pairs} == {"TokenwiseModel", "TokenwiseReader"}
    assert ("TokenwiseModel", "BiLD") in pairs


def test_a_run_without_them_makes_the_labels_it_always_made(tmp_path: Path) -> None:
    task = ToyTask(n=8, length=4)
    plain = Experiment(task, replace(TINY, methods=("TokenwiseModel", "Chow")), tmp_path)
    reading = Experiment(task, replace(TINY, methods=("TokenwiseModel", "Diff")), tmp_path)
    assert (plain.splits.reads_first, reading.splits.reads_first) == (False, True)


def test_a_fit_to_serve_is_refused_with_what_can_be_fitted(tmp_path: Path) -> None:
    class Served(ToyTask):
        codec = LetterCodec()

    entry = TaskEntry("toy", "", {}, lambda *_: Served(n=8), serve=lambda *_: None)  # type: ignore[arg-type,return-value]
    for name in READ_FIRST:
        with pytest.raises(OptionError, match=f"^method '{name}' cannot be fitted .* TokenwiseModel.*, Chow$"):
            fit_model(entry, None, TINY, tmp_path, method=name)
    assert set(fittable_methods()) == set(all_methods()) - set(READ_FIRST)


def test_a_pair_without_probabilities_cannot_run_them() -> None:
    task = ToyTask(n=4)
    assert set(READ_FIRST) <= set(methods_for(task))
    task.predictor.with_log_probs = lambda: None  # type: ignore[assignment,method-assign,return-value]
    assert not set(READ_FIRST) & set(methods_for(task))
    with pytest.raises(OptionError, match="'OPT' does not apply to task 'toy': it reads first, and the two models do"):
        require_applicable(task, ["OPT"])
    with pytest.raises(OptionError, match="names no next token"):
        require_applicable(WithExpert(completing, n=4), ["OPT"])


def test_bild_takes_the_best_rho_of_the_validation_data(
    experiment: Experiment, rejectors: dict[str, Rejector], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, splits = rejectors["BiLD"], experiment.splits
    assert isinstance(rule, RollbackRule)
    context = FitContext(experiment.task, experiment.settings, torch.tensor([0, 4]), splits.train, splits.validation)
    areas = bild.rho_areas(context)
    assert set(areas) == set(bild.RHOS)
    assert areas[rule.rho] == min(areas.values())
    monkeypatch.setattr(bild, "RHOS", (0.5,))
    chosen, _ = bild.fit(context).run(lambda _: None)
    assert isinstance(chosen, RollbackRule)
    assert chosen.rho == 0.5
    assert "rho = 0.5, chosen from 0.5 on validation data" in bild.note(context)
