"""Gurobi and HiGHS return shortest completions: against brute force and against the plain model of all edges.

What holds of every solver of tours is tested of the local search, too."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from tours import Floats, Ints, check_tours, lengths_of, near_draft, random_instance, shortest

from seqdefer.errors import InputError, OptionError
from seqdefer.tasks.tsp import solvers
from seqdefer.tasks.tsp.completions import HandOffs, Stop, TourSolver
from seqdefer.tasks.tsp.programs import Constraint
from seqdefer.tasks.tsp.search import LocalSearch
from seqdefer.tasks.tsp.solvers import Gurobi, Highs, solve_cold

Kind = type[Gurobi] | type[Highs] | type[LocalSearch]
PACKAGES: dict[Kind, str] = {Gurobi: "gurobipy", Highs: "highspy", LocalSearch: "numba"}
NOTHING = np.zeros(0, dtype=np.int64)
each_solver = pytest.mark.parametrize("kind", PACKAGES)
each_exact = pytest.mark.parametrize("kind", [Gurobi, Highs])


def make(kind: Kind, **options: float) -> TourSolver:
    for package in (PACKAGES[kind], "numba"):
        pytest.importorskip(package, reason="needs the extra tsp")
    return kind(**options)  # type: ignore[arg-type]


class NoSearch(LocalSearch):
    """A search that finds nothing: every proof begins from the draft, so the programs do all the work."""

    def hand_offs(self, cities: Floats, draft: Ints, kept: Ints, *, stop: Stop | None = None) -> HandOffs:
        return HandOffs(np.tile(draft, (len(kept), 1)), 0)


def complete(solver: TourSolver, cities: Floats, prefix: Ints) -> Ints:
    return solver.hand_offs(cities, solver.fill(cities, prefix), np.array([len(prefix)])).tours[0]


# -- right ---------------------------------------------------------------------------------------------------------


@each_exact
@pytest.mark.parametrize("n", [4, 5, 7, 8, 9])
def test_brute_force_for_every_prefix(kind: Kind, n: int) -> None:
    (cities, draft), kept, solver = random_instance(n), np.arange(n + 1), make(kind)
    best = shortest(cities, draft, kept)
    handed = solver.hand_offs(cities, draft, kept)
    check_tours(cities, draft, kept, handed.tours)
    assert lengths_of(cities, handed.tours).tolist() == pytest.approx(best)
    assert handed.unproven == 0
    alone = [complete(solver, cities, draft[:k]) for k in kept]
    assert lengths_of(cities, np.stack(alone)).tolist() == pytest.approx(best)


@each_exact
@pytest.mark.parametrize("searched", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_contraction_equals_the_full_model(kind: Kind, searched: bool, seed: int) -> None:
    (cities, draft), kept, solver = random_instance(13, seed), np.arange(14), make(kind)
    make(Gurobi)
    if not searched:
        solver.search = NoSearch()
    full = np.stack([solve_cold(cities, draft[:k]) for k in kept])
    check_tours(cities, draft, kept, full)
    alone = np.stack([complete(solver, cities, draft[:k]) for k in kept])
    assert lengths_of(cities, alone) == pytest.approx(lengths_of(cities, full))


@each_exact
@pytest.mark.parametrize("is_near", [True, False])
def test_hand_offs_equal_complete(kind: Kind, is_near: bool) -> None:
    (cities, draft), kept, solver = random_instance(22, seed=5), np.arange(23), make(kind)
    draft = near_draft(cities) if is_near else draft
    handed = solver.hand_offs(cities, draft, kept)
    check_tours(cities, draft, kept, handed.tours)
    alone = np.stack([complete(solver, cities, draft[:k]) for k in kept])
    assert lengths_of(cities, handed.tours) == pytest.approx(lengths_of(cities, alone))
    assert handed.unproven == 0
    assert handed.tours[-1].tolist() == draft.tolist()


@each_exact
def test_a_subset_of_hand_offs_equals_all(kind: Kind) -> None:
    (cities, draft), solver = random_instance(18, seed=2), make(kind)
    kept = np.array([2, 3, 7, 16])
    some, every = solver.hand_offs(cities, draft, kept), solver.hand_offs(cities, draft, np.arange(19))
    assert lengths_of(cities, some.tours) == pytest.approx(lengths_of(cities, every.tours)[kept])
    assert some.runs <= 4


@each_solver
def test_draft_that_is_the_shortest_tour_needs_one_run(kind: Kind) -> None:
    """The tour without a prefix agrees with the draft, in either direction."""
    (cities, _), solver = random_instance(20), make(kind)
    tour = complete(solver, cities, NOTHING)
    for draft in (tour, np.roll(tour, 7), tour[::-1]):
        handed = solver.hand_offs(cities, draft, np.arange(21))
        assert handed.runs == 1
        assert (handed.tours[2:] == draft).all()


@each_solver
def test_no_run_where_nothing_remains(kind: Kind) -> None:
    cities, draft = random_instance(12)
    handed = make(kind).hand_offs(cities, draft, np.array([11, 12]))
    assert handed.runs == 0
    assert (handed.tours == draft).all()


@each_exact
def test_one_city_kept_rotates_the_free_tour(kind: Kind) -> None:
    (cities, _), solver = random_instance(15), make(kind)
    free = complete(solver, cities, NOTHING)
    for city in range(15):
        turned = complete(solver, cities, np.array([city]))
        assert turned.tolist() == np.roll(free, -int(np.flatnonzero(free == city)[0])).tolist()


@pytest.mark.parametrize("seed", range(2))
def test_solvers_agree_on_fifty_cities(seed: int) -> None:
    cities, _ = random_instance(50, seed)
    draft, kept = near_draft(cities), np.arange(0, 51, 3)
    handed = [make(kind).hand_offs(cities, draft, kept) for kind in (Gurobi, Highs, LocalSearch)]
    gurobi, highs, search = (lengths_of(cities, each.tours) for each in handed)
    assert gurobi == pytest.approx(highs, rel=1e-7)
    cold = [solve_cold(cities, draft[:k]) for k in kept[:6]]
    assert gurobi[:6] == pytest.approx(lengths_of(cities, np.array(cold)), rel=1e-7)
    gaps = search / gurobi - 1
    assert gaps.min() > -1e-7
    assert gaps.mean() < 1e-3


@each_exact
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_unit_of_length_does_not_matter(kind: Kind, scale: float) -> None:
    (cities, draft), solver = random_instance(14), make(kind)
    small, large = (solver.hand_offs(factor * cities + 3 * factor, draft, np.arange(15)) for factor in (1.0, scale))
    assert (small.tours == large.tours).all()


@each_exact
@pytest.mark.parametrize(
    "cities",
    [
        np.stack([np.arange(12.0), np.zeros(12)], 1),  # on a line: many tours are the shortest
        np.stack(np.divmod(np.arange(16.0), 4), 1),  # a grid: the same
        np.repeat(random_instance(5)[0], 3, axis=0),  # three cities in each place
        np.zeros((9, 2)),
    ],
    ids=["line", "grid", "doubles", "point"],
)
def test_ties(kind: Kind, cities: Floats) -> None:
    make(Gurobi)
    draft, kept = np.random.default_rng(0).permutation(len(cities)), np.arange(len(cities) + 1)
    handed = make(kind).hand_offs(cities, draft, kept)
    full = np.array([solve_cold(cities, draft[:k]) for k in kept])
    assert lengths_of(cities, handed.tours) == pytest.approx(lengths_of(cities, full))


# -- time ----------------------------------------------------------------------------------------------------------


@each_exact
def test_the_time_limit_keeps_the_best_tours(kind: Kind) -> None:
    cities, _ = random_instance(40)
    draft, kept = near_draft(cities), np.arange(41)
    handed = make(kind, time_limit=1e-9).hand_offs(cities, draft, kept)
    assert 0 < handed.unproven < 41
    check_tours(cities, draft, kept, handed.tours)
    searched = make(LocalSearch).hand_offs(cities, draft, kept)
    assert (lengths_of(cities, handed.tours) <= lengths_of(cities, searched.tours) + 1e-9).all()


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


@each_exact
def test_stop_ends_the_search(kind: Kind) -> None:
    (cities, draft), stop, solver = random_instance(50), np.ones(1, np.bool_), make(kind)
    begun = time.monotonic()
    handed = solver.hand_offs(cities, draft, np.arange(51), stop=stop)
    assert time.monotonic() - begun < 60
    assert handed.unproven


# -- what is not there ---------------------------------------------------------------------------------------------


def is_licensed() -> bool:
    """Return whether Gurobi has a licence for large models."""
    try:
        complete(make(Gurobi), random_instance(70)[0], NOTHING)
    except OptionError:
        return False
    return True


def test_too_large_for_the_licence() -> None:
    if is_licensed():
        pytest.skip("Gurobi has a licence here, so nothing is too large")
    with pytest.raises(OptionError, match=r"70 cities have 2,415 edges.*2,000 variables.*highs, search") as raised:
        complete(make(Gurobi), random_instance(70)[0], NOTHING)
    assert type(raised.value.__cause__).__name__ == "GurobiError"


def test_other_errors_of_gurobi(monkeypatch: pytest.MonkeyPatch) -> None:
    solver = make(Gurobi)
    import gurobipy

    def refuse() -> None:
        raise gurobipy.GurobiError(10009, "No Gurobi license found")

    monkeypatch.setattr(solvers, "_environment", refuse)
    with pytest.raises(InputError, match=r"No Gurobi license found.*highs, search"):
        complete(solver, random_instance(12)[0], NOTHING)


def test_import_is_light() -> None:
    code = "import sys, seqdefer.tasks.tsp.solvers; print({'torch', 'gurobipy', 'highspy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


@each_exact
def test_nothing_is_printed(kind: Kind, capfd: pytest.CaptureFixture[str]) -> None:
    make(kind).hand_offs(*random_instance(30), np.arange(5))
    assert capfd.readouterr() == ("", "")
