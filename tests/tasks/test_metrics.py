"""Metrics of texts: by name they equal their packages, and functions are checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from seqdefer.errors import DataError, MissingExtraError, OptionError
from seqdefer.tasks.common import metrics
from seqdefer.tasks.common.metrics import METRIC_NAMES, Metric, get_metric

PREDICTION, REFERENCE = "the cat sat on a mat", "the black cat sat down on the mat"


def by_sacrebleu(name: str) -> float:
    package = pytest.importorskip("sacrebleu")
    return 100 - float(getattr(package, f"sentence_{name}")(PREDICTION, [REFERENCE]).score)


def by_rouge(name: str) -> float:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer([name])
    return 100 * (1 - float(scorer.score(REFERENCE, PREDICTION)[name].fmeasure))


def by_jiwer(name: str) -> float:
    return 100 * float(getattr(pytest.importorskip("jiwer"), name)(REFERENCE, PREDICTION))


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("bleu", by_sacrebleu),
        ("chrf", by_sacrebleu),
        ("rouge2", by_rouge),
        ("rougeL", by_rouge),
        ("cer", by_jiwer),
        ("wer", by_jiwer),
    ],
)
def test_metrics_by_name_equal_their_packages(name: str, oracle: Callable[[str], float]) -> None:
    expected = oracle(name)
    (loss,) = get_metric(name).losses([PREDICTION], [REFERENCE], [""])
    assert loss == pytest.approx(expected, rel=1e-5)
    assert get_metric(name).losses([REFERENCE], [REFERENCE], [""]) == [pytest.approx(0, abs=1e-9)]


def test_exact_match_ignores_white_space_alone() -> None:
    assert get_metric("exact_match").losses([" a  b", "a b."], ["a b"] * 2, ["", ""]) == [0.0, 100.0]


def test_functions_see_prediction_reference_and_input() -> None:
    def seen(prediction: str, reference: str, text: str) -> float:
        assert (prediction, reference, text) == ("p", "r", "t")
        return 0.25

    metric = Metric(seen)
    assert metric.losses(["p"], ["r"], ["t"]) == [75.0]
    assert (metric.unit, metric.max_loss) == ("100 x (1 - seen)", 100.0)
    error = Metric(seen, "mistakes", lower_is_better=True)
    assert (error.losses(["p"], ["r"], ["t"]), error.unit, error.max_loss) == ([25.0], "100 x mistakes", None)
    assert Metric(lambda *_: 30.0, best=40).losses(["p"], ["r"], ["t"]) == [25.0]
    assert metric.key != Metric(seen).key  # nobody knows what a function depends on
    assert get_metric("wer").key == get_metric("wer").key


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan, math.inf])
def test_scores_out_of_range(value: float) -> None:
    with pytest.raises(DataError, match=r"it must be between 0 and 1: say Metric\(function, best=...\)"):
        Metric(lambda *_: value, "odd").losses(["p"], ["r"], ["t"])


def test_functions_of_other_arguments_are_refused_before_labelling() -> None:
    def alike(prediction: str, reference: str) -> float:
        return float(prediction == reference)

    with pytest.raises(OptionError, match=r"metric 'alike' does not take three arguments: \(prediction, reference"):
        Metric(alike)  # type: ignore[arg-type]


def test_what_is_no_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="unknown metric 'rogue'; available: bleu, cer, chrf"):
        get_metric("rogue")
    with pytest.raises(OptionError, match="metric 3 is not a function"):
        Metric(3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"best score .* is 0; it must be above 0"):
        Metric(lambda *_: 0.0, best=0)

    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(metrics, "import_module", absent)
    with pytest.raises(MissingExtraError, match=r"the metric chrf needs the package 'sacrebleu'.*\[metrics\]"):
        get_metric("chrf")
    assert "rouge1" in METRIC_NAMES


def fails(prediction: str, reference: str, text: str) -> float:
    raise ZeroDivisionError("no words")


@pytest.mark.parametrize("function", [fails, lambda *_: None, lambda *_: "much", lambda *_: [0.5], lambda *_: 10**400])
def test_functions_that_fail_say_on_what(function: Any) -> None:
    with pytest.raises(DataError, match=r"metric 'mine' failed on the prediction 'p': .*\(prediction, reference, in"):
        Metric(function, "mine").losses(["p"], ["r"], ["t"])


def test_losses_are_finite() -> None:
    with pytest.raises(DataError, match="it must be 0 or more"):
        Metric(lambda *_: 1e307, lower_is_better=True).losses(["p"], ["r"], ["t"])
    for best in (math.inf, "much"):
        with pytest.raises(OptionError, match="it must be above 0"):
            Metric(lambda *_: 1.0, best=best)  # type: ignore[arg-type]
