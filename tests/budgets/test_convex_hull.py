"""Lower hulls: against the definition by all triples of points, and as the answer to what is cheapest at a price."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdefer.budgets.convex_hull import Floats, first_vertices, hull_edges, priced_steps

Point = tuple[int, int]
seeds = st.integers(0, 2**32 - 1)


def random_points(seed: int) -> tuple[Floats, Floats]:
    """Rows of few distinct whole numbers, so that points repeat, share an x and lie on lines; some are padding."""
    random = np.random.default_rng(seed)
    shape = (int(random.integers(1, 6)), int(random.integers(1, 9)))
    x, y = (random.integers(0, int(random.integers(1, 8)), shape).astype(np.float64) for _ in range(2))
    padding = random.random(shape) < random.choice([0.0, 0.3])
    padding[np.arange(shape[0]), random.integers(0, shape[1], shape[0])] = False  # one point a row at least
    return x, np.where(padding, random.choice([np.inf, -np.inf]), y)


def points_of(x: Floats, y: Floats, row: int) -> list[Point]:
    return [(int(a), int(b)) for a, b in zip(x[row], y[row], strict=True) if np.isfinite(b)]


def slow_hull(points: list[Point]) -> list[Point]:
    """The lowest point of each x that lies strictly below every line from a point on its left to one on its right."""
    lowest = sorted({(x, min(b for a, b in points if a == x)) for x, _ in points})
    return [
        (x, y)
        for x, y in lowest
        if all((y - y0) * (x1 - x0) < (y1 - y0) * (x - x0) for x0, y0 in lowest for x1, y1 in lowest if x0 < x < x1)
    ]


def chains(x: Floats, y: Floats) -> list[list[Point]]:
    """The vertices of every row, from its edges."""
    first = first_vertices(x, y)
    found = [[(int(x[row, point]), int(y[row, point]))] for row, point in enumerate(first)]
    for rows, here, there in hull_edges(x, y):
        assert len(set(rows.tolist())) == len(rows)
        for row, start, end in zip(rows, here, there, strict=True):
            assert found[row][-1] == (int(x[row, start]), int(y[row, start]))
            found[row].append((int(x[row, end]), int(y[row, end])))
    return found


@given(seeds)
def test_hulls_equal_the_definition(seed: int) -> None:
    x, y = random_points(seed)
    assert chains(x, y) == [slow_hull(points_of(x, y, row)) for row in range(len(x))]


@given(seeds)
def test_slopes_rise_strictly_along_a_row(seed: int) -> None:
    for chain in chains(*random_points(seed)):
        slopes = [Fraction(y1 - y0, x1 - x0) for (x0, y0), (x1, y1) in pairwise(chain)]
        assert all(one < other for one, other in pairwise(slopes))


@given(seeds)
def test_at_any_price_the_steps_up_to_it_lead_to_the_cheapest_point(seed: int) -> None:
    """Prices at which points of a row are equally dear, and between them; at equal cost the most x is taken."""
    x, y = random_points(seed)
    prices, rows, here, there = priced_steps(x, y)
    for row in range(len(x)):
        points = points_of(x, y, row)
        ties = {Fraction(y0 - y1, x1 - x0) for x0, y0 in points for x1, y1 in points if x0 < x1} | {Fraction(0)}
        between = [(one + other) / 2 for one in ties for other in ties]
        for price in {*ties, *between, max(ties) + 1, min(ties) - 1}:
            at = first_vertices(x, y)[row]
            # Quotients of small whole numbers are equal as floats just where they are equal.
            for step in np.flatnonzero((rows == row) & (prices >= float(price))):
                assert here[step] == at
                at = there[step]
            expected = min(points, key=lambda point: (point[1] + price * point[0], -point[0]))
            assert (x[row, at], y[row, at]) == expected


@pytest.mark.parametrize("on_a_line", [False, True])
def test_prices_of_a_row_never_rise(on_a_line: bool) -> None:
    """Along points on a line rounding made some rise; steps would then have been taken out of their order."""
    random = np.random.default_rng(0)
    x = np.sort(random.integers(0, 50, (5000, 6)), 1).astype(np.float64)
    slope, start = random.normal(size=(2, 5000, 1))
    prices, rows, _, _ = priced_steps(x, slope * x + 10 * start if on_a_line else random.random(x.shape))
    order = np.argsort(rows, kind="stable")  # a row's steps stay in their order
    is_same_row = np.diff(rows[order]) == 0
    assert is_same_row.sum() > 500
    assert (np.diff(prices[order])[is_same_row] <= 0).all()


def test_rows_that_have_no_edge() -> None:
    """One point, copies of it, points above it, padding beside it."""
    x = np.array([[2.0, 2.0, 2.0], [5.0, 0.0, 9.0], [1.0, 1.0, 1.0]])
    y = np.array([[3.0, 3.0, 3.0], [1.0, np.inf, np.inf], [7.0, 4.0, 6.0]])
    assert list(hull_edges(x, y)) == []
    assert first_vertices(x, y).tolist() == [0, 0, 1]
    assert [len(part) for part in priced_steps(x, y)] == [0, 0, 0, 0]


def test_padding_may_stand_anywhere() -> None:
    """Also where it would be the leftmost, and with an x that is no number at all."""
    x, y = np.array([[np.nan, 3.0, -9.0, 1.0]]), np.array([[np.inf, 0.0, np.inf, 4.0]])
    assert chains(x, y) == [[(1, 4), (3, 0)]]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_only_the_ends_of_a_line_are_vertices(order: list[int]) -> None:
    x = np.array([[0.0, 1.0, 2.0, 3.0]])[:, order]
    assert chains(x, 9 - 3 * x) == [[(0, 9), (3, 0)]]
