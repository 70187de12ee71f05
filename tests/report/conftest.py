"""One made-up run and its page, which no test may change."""

from __future__ import annotations

import pytest
from fake_report import fake_results

from seqdefer.evaluation.results import Results
from seqdefer.report.html import render_report
from seqdefer.report.panels import Panel


@pytest.fixture(scope="module")
def results() -> Results:
    return fake_results()


@pytest.fixture(scope="module")
def page(results: Results) -> str:
    return render_report(results, panels=[Panel("Examples", "<p class='example'>one example</p>")])
