"""Constants of the theory in closed form, bad arguments, and the documentation page.

test_theory_token.py, test_theory_once.py and test_theory_estimation.py check the paper's statements by enumeration on
small discrete distributions; where a printed form is wrong, they have a counterexample. Constants of a single loss
(gamma, Gamma, rho, convexity) are in test_losses.py.
"""

from __future__ import annotations

import doctest
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import BEST_MARGIN, CROSS_ENTROPY, LOGISTIC, ROUNDING, each_phi, some, value_of, xlogx

from seqdefer.errors import OptionError
from seqdefer.paper import theory
from seqdefer.paper.theory import (
    Assumptions,
    best_margin,
    bound_within,
    calibration_gap,
    corollary_token,
    estimation_bound_once,
    estimation_bound_token,
    excess_risk_bound,
    linear_complexity,
    linear_rademacher,
    lipschitz_within,
    one_time_offset,
    one_time_transform,
    token_transform,
)
from seqdefer.rejectors.losses import PHIS, PSIS, Phi
from tests.test_docs import ROOT, run_blocks

PAGE = ROOT / "docs" / "theory.md"

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = Assumptions(n=1000, most_loss=2.0, most_cost=0.5, limit=1.5, delta=0.1)

GAP: dict[str, Callable[[float], float]] = {
    "logistic": lambda a: (xlogx(1 + a) + xlogx(1 - a)) / 2,
    "exponential": lambda a: 1 - math.sqrt(1 - a * a),
    "square": lambda a: a * a,
    "squared_hinge": lambda a: a * a,
}
LIPSCHITZ: dict[str, Callable[[float], float]] = {
    "logistic": lambda m: 1 / (1 + math.exp(-m)),
    "exponential": math.exp,
    "square": lambda m: 2 * (1 + m),
    "squared_hinge": lambda m: 2 * (1 + m),
}
BOUND: dict[str, Callable[[float], float]] = {
    "logistic": lambda m: m + math.log1p(math.exp(-m)),
    "exponential": math.exp,
    "square": lambda m: (1 + m) ** 2,
    "squared_hinge": lambda m: (1 + m) ** 2,
}


# Constants of the losses


@each_phi
def test_best_margin_in_closed_form(phi: Phi) -> None:
    chances = np.array([1e-6, 0.1, 0.3, 0.5, 0.77, 1 - 1e-6])
    np.testing.assert_allclose(best_margin(phi, chances), BEST_MARGIN[phi.name](chances), atol=1e-9)
    assert (np.sign(best_margin(phi, [0.0, 1.0])) == [-1, 1]).all()


@each_phi
@some
@given(st.floats(0, 1))
def test_calibration_gap_in_closed_form_and_inverse_to_gamma(phi: Phi, advantage: float) -> None:
    gap = calibration_gap(phi, advantage)
    assert gap == pytest.approx(GAP[phi.name](advantage), abs=1e-7)  # (1 + a) / 2 may round to 1
    assert token_transform(phi)(gap) == pytest.approx(advantage, abs=1e-4)  # Gamma's slope at 0 and at 1 is infinite


@each_phi
@given(st.floats(0, 12))
def test_constants_within_a_limit(phi: Phi, limit: float) -> None:
    rho, largest = lipschitz_within(phi, limit), bound_within(phi, limit)
    assert rho == pytest.approx(LIPSCHITZ[phi.name](limit))
    assert largest == pytest.approx(BOUND[phi.name](limit))
    margins = np.linspace(-limit, limit, 101)
    values = value_of(phi, margins)
    assert values.max() <= largest * (1 + ROUNDING)
    assert (abs(np.diff(values)) <= rho * np.diff(margins) * (1 + 1e-9) + ROUNDING).all()


def transforms() -> list[Any]:
    one_time = [pytest.param(one_time_transform(psi, 4), id=psi.name) for psi in PSIS.values()]
    return [*(pytest.param(token_transform(phi), id=phi.name) for phi in PHIS.values()), *one_time]


@pytest.mark.parametrize("transform", transforms())
@given(st.floats(0, 3), st.floats(0, 3), st.floats(0, 1))
def test_transform_is_nondecreasing_concave_and_0_at_0(
    transform: Callable[[float], float], a: float, b: float, share: float
) -> None:
    low, high = sorted((a, b))
    assert transform(0.0) == 0
    assert transform(low) <= transform(high) <= 1
    assert transform(share * a + (1 - share) * b) >= share * transform(a) + (1 - share) * transform(b) - ROUNDING
    assert transform(1e-12) < 1e-5  # continuity at 0, on which consistency rests


# Bad arguments


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n is 0; give at least one example"),
        ({"most_loss": -1.0}, "most_loss is -1.0; it must be a finite number, 0 or more"),
        ({"limit": math.inf}, "limit is inf"),
        ({"most_cost": math.nan, "delta": 1.0}, "most_cost is nan.*; delta is 1.0; it must be strictly between"),
    ],
    ids=str,
)
def test_impossible_assumptions(values: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        replace(PLAIN, **values)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimation_bound_token(LOGISTIC, PLAIN, []), "0 complexities; give one per position, at least 1"),
        (lambda: estimation_bound_once(CROSS_ENTROPY, PLAIN, [0.1]), "1 complexities.*at least 2"),
        (lambda: estimation_bound_token(LOGISTIC, PLAIN, [0.1, -0.1]), "complexity 1 is -0.1"),
        (lambda: corollary_token(LOGISTIC, PLAIN, [0.1], approximation=-1.0), "approximation is -1.0"),
        (lambda: corollary_token(LOGISTIC, PLAIN, [0.1], least_cost=9.0), "at most the weight, 2.5, or None"),
        (lambda: excess_risk_bound(token_transform(LOGISTIC), math.nan, 1.0), "excess is nan"),
        (lambda: one_time_transform(CROSS_ENTROPY, 1), "1 hand-offs; a choice needs at least 2"),
        (lambda: one_time_offset([1.0]), "1 hand-offs"),
        (lambda: best_margin(LOGISTIC, [0.5, 1.5]), "within"),
        (lambda: lipschitz_within(LOGISTIC, -1.0), "limit is -1.0"),
        (lambda: linear_rademacher([[1.0]], 1.0, draws=1), "draws is 1; a standard error needs at least 2"),
        (lambda: linear_rademacher([1.0, 2.0], 1.0), "one row per example"),
        (lambda: linear_complexity(1.0, 1.0, 0), "n is 0"),
    ],
)
def test_impossible_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()


def test_no_weight_no_excess_risk() -> None:
    assert excess_risk_bound(token_transform(LOGISTIC), 0.3, 0.0) == 0


# Documentation


def test_examples_run() -> None:
    assert doctest.testmod(theory).failed == 0
    run_blocks(PAGE)


def test_page_names_tests_and_functions_that_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    files = [*(ROOT / "tests" / "paper").glob("test_theory*.py"), ROOT / "tests" / "rejectors" / "test_losses.py"]
    tests = "".join(file.read_text(encoding="utf-8") for file in files)
    named = re.findall(r"`(test_\w+)`", text)
    assert len(named) > 15
    assert [name for name in named if f"def {name}(" not in tests] == []
    public = [name for name, value in vars(theory).items() if getattr(value, "__module__", "") == theory.__name__]
    assert [name for name in public if not name.startswith("_") and f"`{name}`" not in text] == []
