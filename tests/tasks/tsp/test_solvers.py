"""Gurobi and HiGHS return shortest completions: against brute force and against the plain model of all edges."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import cache
from itertools import permutations

import numpy as np
import pytest

from seqdefer.errors import InputError, OptionError
from seqdefer.tasks.tsp import solvers
from seqdefer.tasks.tsp.exact import Constraint, ExactSolver, HandOffs, Solution, canonical
from seqdefer.tasks.tsp.solvers import Gurobi, Highs, solve_cold

PACKAGES = {Gurobi: "gurobipy", Highs: "highspy"}
NOTHING = np.zeros(0, dtype=np.int64)
each_solver = pytest.mark.parametrize("kind", [Gurobi, Highs])


def make(kind: type[ExactSolver], **options: float) -> ExactSolver:
    pytest.importorskip(PACKAGES[kind], reason="needs the extra tsp")
    return kind(**options)


def random_cities(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 2))


def random_draft(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(1000 + seed).permutation(n)


def near_draft(cities: np.ndarray) -> np.ndarray:
    """Return a nearest-neighbour tour from the last city, as good as a weak predictor's."""
    left, draft = set(range(len(cities) - 1)), [len(cities) - 1]
    while left:
        draft.append(min(left, key=lambda city: float(np.linalg.norm(cities[city] - cities[draft[-1]]))))
        left.remove(draft[-1])
    return np.array(draft)


def length_of(cities: np.ndarray, tours: np.ndarray) -> np.ndarray:
    """Return lengths of tours (..., N)."""
    return np.linalg.norm(cities[tours] - cities[np.roll(tours, -1, -1)], axis=-1).sum(-1)


@cache
def orders(n: int) -> np.ndarray:
    return np.array(list(permutations(range(n))), dtype=np.int64)


def shortest(cities: np.ndarray, prefix: np.ndarray) -> float:
    """Return the shortest length over all orders of the other cities."""
    prefix = prefix if len(prefix) else np.array([0])
    left = np.setdiff1d(np.arange(len(cities)), prefix)
    others = left[orders(len(left))]
    tours = np.hstack([np.tile(prefix, (len(others), 1)), others])
    return float(length_of(cities, tours).min())


def check_tour(solution: Solution, cities: np.ndarray, prefix: np.ndarray) -> None:
    assert sorted(solution.tour.tolist()) == list(range(len(cities)))
    assert solution.tour[: len(prefix)].tolist() == prefix.tolist()
    assert solution.length == pytest.approx(float(length_of(cities, solution.tour)))
    assert solution.bound <= solution.length


# -- right ---------------------------------------------------------------------------------------------------------


@each_solver
@pytest.mark.parametrize("n_enumerate", [0, 4])
@pytest.mark.parametrize("n", [4, 5, 7, 8, 9])
def test_brute_force_for_every_prefix(kind: type[ExactSolver], n: int, n_enumerate: int) -> None:
    cities, draft, solver = random_cities(n), random_draft(n), make(kind, n_enumerate=n_enumerate)
    best = np.array([shortest(cities, draft[:kept]) for kept in range(n + 1)])
    for kept in range(n + 1):
        solution = solver.complete(cities, draft[:kept])
        check_tour(solution, cities, draft[:kept])
        assert solution.is_optimal
        assert solution.length == pytest.approx(best[kept])
    handed = solver.hand_offs(cities, draft, np.arange(n + 1))
    assert length_of(cities, handed.tours) == pytest.approx(best)


@each_solver
@pytest.mark.parametrize("seed", range(3))
def test_contraction_equals_the_full_model(kind: type[ExactSolver], seed: int) -> None:
    make(Gurobi)
    cities, draft, solver = random_cities(13, seed), random_draft(13, seed), make(kind, n_enumerate=0)
    for kept in range(14):
        full = solve_cold(cities, draft[:kept])
        assert full[:kept].tolist() == draft[:kept].tolist()
        assert solver.complete(cities, draft[:kept]).length == pytest.approx(float(length_of(cities, full)))


@each_solver
@pytest.mark.parametrize("make_draft", [near_draft, lambda cities: random_draft(len(cities))])
def test_hand_offs_equal_complete_and_never_fall(kind: type[ExactSolver], make_draft: object) -> None:
    cities, solver = random_cities(22, seed=5), make(kind)
    draft = make_draft(cities)  # type: ignore[operator]
    handed = solver.hand_offs(cities, draft, np.arange(23))
    lengths = length_of(cities, handed.tours)
    alone = [solver.complete(cities, draft[:kept]) for kept in range(23)]
    assert lengths == pytest.approx(np.array([solution.length for solution in alone]))
    assert (np.diff(lengths) > -1e-9).all()
    assert handed.unproven == 0
    for kept, tour in enumerate(handed.tours):
        assert sorted(tour.tolist()) == list(range(22))
        assert tour[:kept].tolist() == draft[:kept].tolist()
    assert handed.tours[0].tolist() == canonical(handed.tours[0]).tolist()
    assert handed.tours[-1].tolist() == draft.tolist()


@each_solver
def test_a_subset_of_hand_offs_equals_all(kind: type[ExactSolver]) -> None:
    cities, draft, solver = random_cities(18, seed=2), random_draft(18), make(kind)
    kept = np.array([2, 3, 7, 16])
    some, every = solver.hand_offs(cities, draft, kept), solver.hand_offs(cities, draft, np.arange(19))
    assert length_of(cities, some.tours) == pytest.approx(length_of(cities, every.tours)[kept])
    assert some.runs <= 4


@each_solver
def test_draft_that_is_the_shortest_tour_needs_one_run(kind: type[ExactSolver]) -> None:
    cities, solver = random_cities(20), make(kind)
    tour = solver.complete(cities, NOTHING).tour
    for draft in (tour, np.roll(tour, 7), tour[::-1]):
        handed = solver.hand_offs(cities, draft, np.arange(21))
        assert handed.runs == 1
        assert (handed.tours[2:] == draft).all()


@each_solver
def test_one_city_kept_rotates_the_free_tour(kind: type[ExactSolver]) -> None:
    cities, solver = random_cities(15), make(kind)
    free = solver.complete(cities, NOTHING).tour
    for city in range(15):
        turned = solver.complete(cities, np.array([city])).tour
        assert turned.tolist() == np.roll(free, -int(np.flatnonzero(free == city)[0])).tolist()


@pytest.mark.parametrize("seed", range(2))
def test_solvers_agree_on_fifty_cities(seed: int) -> None:
    cities = random_cities(50, seed)
    draft, kept = near_draft(cities), np.arange(0, 51, 3)
    handed = [make(kind).hand_offs(cities, draft, kept) for kind in (Gurobi, Highs)]
    lengths = [length_of(cities, each.tours) for each in handed]
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-7)
    cold = [solve_cold(cities, draft[:k]) for k in kept[:6]]
    assert lengths[0][:6] == pytest.approx(length_of(cities, np.array(cold)), rel=1e-7)


@each_solver
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_unit_of_length_does_not_matter(kind: type[ExactSolver], scale: float) -> None:
    cities, draft, solver = random_cities(14), random_draft(14), make(kind, n_enumerate=0)
    small, large = (solver.hand_offs(factor * cities + 3 * factor, draft, np.arange(15)) for factor in (1.0, scale))
    assert (small.tours == large.tours).all()


@each_solver
@pytest.mark.parametrize(
    "cities",
    [
        np.stack([np.arange(12.0), np.zeros(12)], 1),  # on a line: many tours are the shortest
        np.stack(np.divmod(np.arange(16.0), 4), 1),  # a grid: the same
        np.repeat(random_cities(5), 3, axis=0),  # three cities in each place
        np.zeros((9, 2)),
    ],
    ids=["line", "grid", "doubles", "point"],
)
def test_ties(kind: type[ExactSolver], cities: np.ndarray) -> None:
    n = len(cities)
    draft = random_draft(n)
    handed = make(kind, n_enumerate=0).hand_offs(cities, draft, np.arange(n + 1))
    lengths = length_of(cities, handed.tours)
    make(Gurobi)
    assert lengths == pytest.approx([float(length_of(cities, solve_cold(cities, draft[:k]))) for k in range(n + 1)])


# -- time ----------------------------------------------------------------------------------------------------------


@each_solver
def test_the_time_limit_keeps_the_best_tour(kind: type[ExactSolver]) -> None:
    cities, solver = random_cities(40), make(kind, time_limit=1e-9)
    best = make(kind).complete(cities, NOTHING)
    solution = solver.complete(cities, NOTHING)
    check_tour(solution, cities, NOTHING)
    assert not solution.is_optimal
    assert best.length <= solution.length + 1e-9
    started = solver.complete(cities, NOTHING, start=np.roll(best.tour, 3))
    assert started.tour.tolist() == best.tour.tolist(), "never worse than the start"
    assert not started.is_optimal


@each_solver
def test_the_time_limit_in_hand_offs(kind: type[ExactSolver]) -> None:
    cities = random_cities(40)
    draft = near_draft(cities)
    handed = make(kind, time_limit=1e-9).hand_offs(cities, draft, np.arange(41))
    lengths = length_of(cities, handed.tours)
    assert 0 < handed.unproven < 41
    assert (np.diff(lengths) > -1e-9).all(), "what completes a longer prefix completes the shorter ones"
    for kept, tour in enumerate(handed.tours):
        assert sorted(tour.tolist()) == list(range(40))
        assert tour[:kept].tolist() == draft[:kept].tolist()


def test_each_prefix_has_its_own_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: HiGHS sums the time of all runs, so a relaxation reused for many prefixes hit the limit at once."""
    pytest.importorskip("highspy", reason="needs the extra tsp")
    given: list[float] = []
    relaxation = Highs().relaxation(np.ones(3), [Constraint(np.array([0, 1]), 1.0, is_equal=True)])
    assert isinstance(relaxation, solvers._HighsRelaxation)
    plain = relaxation.highs

    class Worked:
        """A Highs that has run for an hour."""

        def __getattr__(self, name: str) -> object:
            return getattr(plain, name)

        def getRunTime(self) -> float:
            return 3600.0

        def setOptionValue(self, name: str, value: float) -> None:
            given.append(value)
            plain.setOptionValue(name, value)

    monkeypatch.setattr(relaxation, "highs", Worked())
    assert relaxation.solve(5.0) is not None
    assert given == [3605.0]


@each_solver
def test_stop_ends_the_search(kind: type[ExactSolver]) -> None:
    cities, stop, solver = random_cities(50), np.ones(1, np.bool_), make(kind)
    begun = time.monotonic()
    handed = solver.hand_offs(cities, random_draft(50), np.arange(51), stop=stop)
    assert time.monotonic() - begun < 60
    assert handed.unproven


# -- what is not there ---------------------------------------------------------------------------------------------


def is_licensed() -> bool:
    """Return whether Gurobi has a licence for large models."""
    try:
        make(Gurobi).complete(random_cities(70), NOTHING)
    except OptionError:
        return False
    return True


def test_too_large_for_the_licence() -> None:
    if is_licensed():
        pytest.skip("Gurobi has a licence here, so nothing is too large")
    with pytest.raises(OptionError, match=r"70 cities have 2,415 edges.*2,000 variables.*highs, search") as raised:
        make(Gurobi).complete(random_cities(70), NOTHING)
    assert type(raised.value.__cause__).__name__ == "GurobiError"


def test_other_errors_of_gurobi(monkeypatch: pytest.MonkeyPatch) -> None:
    solver = make(Gurobi)
    import gurobipy

    def refuse() -> None:
        raise gurobipy.GurobiError(10009, "No Gurobi license found")

    monkeypatch.setattr(solvers, "_environment", refuse)
    with pytest.raises(InputError, match=r"No Gurobi license found.*highs, search"):
        solver.complete(random_cities(12), NOTHING)


def test_import_is_light() -> None:
    code = "import sys, seqdefer.tasks.tsp.solvers; print({'torch', 'gurobipy', 'highspy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


@each_solver
def test_nothing_is_printed(kind: type[ExactSolver], capfd: pytest.CaptureFixture[str]) -> None:
    handed = make(kind, n_enumerate=0).hand_offs(random_cities(30), random_draft(30), np.arange(5))
    assert isinstance(handed, HandOffs)
    assert capfd.readouterr() == ("", "")
