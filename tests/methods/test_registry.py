"""All methods by name: their order, and methods of other packages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import TINY

from seqdefer import registry as plugins
from seqdefer.errors import ContractError, OptionError
from seqdefer.evaluation.experiment import Experiment
from seqdefer.methods import registry, whole_model
from seqdefer.methods.base import Fit, FitContext, Method
from seqdefer.methods.registry import all_methods, get_method
from seqdefer.rejectors.confidence import ChowMean
from seqdefer.testing import ToyTask

TASK = ToyTask(n=30, length=4)


def test_methods_are_listed_from_coarse_to_fine() -> None:
    known = [
        "ChowMean", "ChowSum", "ChowQuantile0.0", "ChowQuantile0.4", "ChowQuantile0.8", "ChowQuantile1.0",
        "WholeModelEmbed", "OneTimeModel", "OneTimeCost", "OneTimeScore", "OneTimeEntropy", "TokenwiseModel",
        "TokenwiseScore", "TokenwiseEntropy",
    ]  # fmt: skip
    methods = {name: one for name, one in all_methods().items() if name in known}  # others may be added
    assert list(methods) == known
    granularities = [one.granularity for one in methods.values()]
    assert granularities == ["whole"] * 7 + ["once"] * 4 + ["token"] * 3
    assert {name for name, one in methods.items() if one.is_learned} == {
        "WholeModelEmbed", "OneTimeModel", "OneTimeCost", "TokenwiseModel",
    }  # fmt: skip
    assert {name for name, one in methods.items() if one.needs_entropy} == {"OneTimeEntropy", "TokenwiseEntropy"}


def test_methods_are_found_by_name_and_others_refused_with_those_that_are() -> None:
    for name, method in all_methods().items():
        assert get_method(name) is method
    known = ", ".join(sorted(all_methods()))
    with pytest.raises(OptionError, match=f"^unknown method 'OneTimeLuck'; available: {known} "):
        get_method("OneTimeLuck")


def test_a_method_of_another_package_enters_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is fitted, swept and compared in a run like the others."""

    def fit(context: FitContext) -> Fit:
        rule = ChowMean()
        rule.predictor = context.task.predictor.fingerprint
        return Fit(lambda _: (rule, None))

    def load_plugins(group: str) -> dict[str, Any]:
        return {"mine": Method("Mine", "whole", fit)} if group == "seqdefer.methods" else plugins.load_plugins(group)

    monkeypatch.setattr(registry, "load_plugins", load_plugins)
    all_methods.cache_clear()
    try:
        results = Experiment(TASK, replace(TINY, seeds=1, methods=("ChowMean", "Mine")), tmp_path).run()
    finally:
        monkeypatch.undo()
        all_methods.cache_clear()
    assert results.summary["Mine"] == results.summary["ChowMean"]
    assert "Mine" not in all_methods()


def test_a_name_that_two_packages_use_is_refused() -> None:
    """Another package's plug-in once replaced a built-in silently."""
    with pytest.raises(ContractError, match="two packages, seqdefer and other, define the method 'Mine'; uninstall"):
        plugins.by_name("method", [("Mine", "seqdefer", 1), ("Mine", "other", 2)])
    assert plugins.by_name("network", [("gru", "mine", 1), ("gru", "mine", 2)]) == {"gru": 2}


def test_a_plugin_does_not_replace_a_built_in_method(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"mine": get_method("ChowMean")}
    monkeypatch.setattr(registry, "load_plugins", lambda _: same)
    all_methods.cache_clear()
    try:
        with pytest.raises(ContractError, match=r"seqdefer and \?, define the method 'ChowMean'"):
            all_methods()
    finally:
        monkeypatch.undo()
        all_methods.cache_clear()


def test_a_file_that_lists_no_methods_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`METHOD = Method(...)` was once ignored without a word."""
    monkeypatch.delattr(whole_model, "METHODS")
    monkeypatch.setattr(whole_model, "METHOD", get_method("ChowMean"), raising=False)
    all_methods.cache_clear()
    try:
        with pytest.raises(ContractError, match="whole_model defines a method, but no METHODS: list its records"):
            all_methods()
    finally:
        monkeypatch.undo()
        all_methods.cache_clear()
