"""The report draws promised budgets: a band up to the bound, and a dot for what unseen inputs spent."""

from __future__ import annotations

import re
from dataclasses import replace

from fake_report import fake_results

from seqdefer.evaluation.results import PromiseCheck, PromisedBudget, Results
from seqdefer.report.html import render_report
from seqdefer.report.promise_figure import HEIGHT, TOP, promise_section

BUDGETS = (
    PromisedBudget(0.0, 0.0, 0.0, 0.0, 0.0),
    PromisedBudget(0.5, 0.48, 0.4, 0.52, 0.03),
    PromisedBudget(1.0, 1.0, 0.9, 0.95, 0.01),
)


def test_the_band_and_the_dots_are_the_numbers() -> None:
    results = replace(fake_results(1), promise=PromiseCheck("TokenwiseModel", 0.9, 60, 61, BUDGETS))
    html = str(promise_section(results))
    base, top = 282, TOP
    assert HEIGHT - base == 48

    def height(share: float) -> float:
        return round(base - share * (base - top), 1)

    band = re.search(r'd="(M[^"]*Z)"', html)
    assert band is not None
    assert [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", band[1])] == [
        height(share) for share in (0, 0, 0.48, 1, 0)
    ]
    assert [float(y) for y in re.findall(r'cy="([\d.]+)"', html)] == [height(one.spent) for one in BUDGETS]
    assert "above the budget at 1 of 3 budgets" in html
    assert "the other 61 inputs spent" in html
    assert "52.0" in html
    assert html in render_report(results)


def test_runs_without_a_check_have_no_section() -> None:
    assert promise_section(fake_results(1)) == ""
    assert "Promised and spent" not in render_report(fake_results(1))


def test_checks_survive_a_file() -> None:
    results = replace(fake_results(1), promise=PromiseCheck("TokenwiseModel", 0.9, 60, 61, BUDGETS))
    assert Results.from_json(results.to_json()).promise == results.promise
