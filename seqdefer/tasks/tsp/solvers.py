"""The solvers behind the exact experts: Gurobi and HiGHS, each as a linear relaxation and an integer program.

`seqdefer.tasks.tsp.exact` has the algorithm. Both solvers use one thread, because rows are solved in parallel. Neither
package is imported before it is needed.

    solved = Gurobi().hand_offs(cities, draft, kept)    # (N, 2), (N,), (J,)
    solved.tours                                        # (J, N)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from seqdefer.errors import InputError, OptionError, import_extra
from seqdefer.tasks.tsp.completions import Floats, Ints
from seqdefer.tasks.tsp.exact import ExactSolver, canonical, walk
from seqdefer.tasks.tsp.programs import (
    LENGTH_TOLERANCE,
    Constraint,
    Deadline,
    Geometry,
    Program,
    Relaxation,
    RelaxedSolution,
)

EXTRA = "tsp"
PACKAGES = {"gurobi": "gurobipy", "highs": "highspy"}  # required by each expert
SIZE_LIMIT_EXCEEDED = 10010  # Gurobi's error code for a model too large for the licence
LP_TOLERANCE = 1e-9  # tight, because the bounds decide which edges are removed


def load(package: str, expert: str) -> Any:
    """Import a package of the extra, or raise an error that names the install command and the alternatives."""
    return import_extra(package, EXTRA, f"the expert {expert!r}", _alternatives(expert))


def _alternatives(expert: str) -> str:
    others = [name for name in (*PACKAGES, "search") if name != expert]
    return f"use another expert: {', '.join(others)}"


# -- Gurobi --------------------------------------------------------------------------------------------------------


class Gurobi(ExactSolver):
    """Gurobi. Its bundled licence allows up to 2,000 edges: 63 cities."""

    name = "gurobi"

    def relaxation(self, costs: Floats, rows: Sequence[Constraint]) -> Relaxation:
        return _GurobiRelaxation(costs, rows)

    def solve_program(self, program: Program, deadline: Deadline) -> tuple[Floats | None, bool]:
        with _gurobi_errors(program.geometry.n):
            model, columns = _gurobi_model(program.costs, program.rows(), "B")
            try:
                model.ObjCon = program.offset
                model.Params.Cutoff = program.cutoff
                model.Params.BestObjStop = program.floor + LENGTH_TOLERANCE
                model.Params.Presolve = 0  # the program is small already
                model.Params.Heuristics = 0.0  # a good tour is known
                model.Params.TimeLimit = deadline.seconds_left
                _optimize(model, columns, program, deadline)
                values = np.array(model.getAttr("X", columns)) if model.SolCount else None
                grb = _grb()
                return values, model.Status in {grb.OPTIMAL, grb.INFEASIBLE, grb.CUTOFF, grb.USER_OBJ_LIMIT}
            finally:
                model.dispose()


def _grb() -> Any:
    return load("gurobipy", "gurobi").GRB


def _optimize(model: Any, columns: list[Any], program: Program, deadline: Deadline) -> None:
    """Solve, cutting the subtours of every solution that Gurobi finds."""
    at, linear = _grb().Callback, load("gurobipy", "gurobi").LinExpr

    def callback(model: Any, where: int) -> None:
        if where == at.MIPSOL:
            for row in program.cuts(np.array(model.cbGetSolution(columns))):
                model.cbLazy(_sum(linear, columns, row) <= row.bound)
        elif where == at.MIPNODE and not deadline.seconds_left:
            model.terminate()

    model.Params.LazyConstraints = 1
    model.Params.MIPGap = 0.0
    _run(model, callback, [at.MIPSOL, at.MIPNODE])


def _run(model: Any, *callback: Any) -> None:
    """Solve without `optimize`, which takes over Ctrl-C and keeps it if two threads solve at once."""
    model.optimizeAsync(*callback)
    model.sync()


def _sum(linear: Any, columns: list[Any], row: Constraint) -> Any:
    return linear([1.0] * len(row.columns), [columns[column] for column in row.columns.tolist()])


def _gurobi_model(costs: Floats, rows: Sequence[Constraint], kind: str) -> tuple[Any, list[Any]]:
    gurobi = load("gurobipy", "gurobi")
    model = gurobi.Model(env=_environment())
    columns = list(model.addVars(len(costs), ub=1.0, obj=costs.tolist(), vtype=kind).values())
    _add_rows(model, columns, rows)
    return model, columns


def _add_rows(model: Any, columns: list[Any], rows: Sequence[Constraint]) -> None:
    linear = load("gurobipy", "gurobi").LinExpr
    for row in rows:
        model.addLConstr(_sum(linear, columns, row), "=" if row.is_equal else "<", row.bound)


_thread_local = threading.local()


def _environment() -> Any:
    """Return this thread's Gurobi environment, created once because that requests the licence."""
    if not hasattr(_thread_local, "environment"):
        environment = load("gurobipy", "gurobi").Env(empty=True)
        environment.setParam("OutputFlag", 0)
        environment.setParam("Threads", 1)
        environment.start()
        _thread_local.environment = environment
    return _thread_local.environment


@contextmanager
def _gurobi_errors(n: int) -> Iterator[None]:
    """Translate Gurobi's errors."""
    gurobi = load("gurobipy", "gurobi")
    try:
        yield
    except gurobi.GurobiError as error:
        if error.errno == SIZE_LIMIT_EXCEEDED:
            raise OptionError(
                f"{n} cities have {n * (n - 1) // 2:,} edges, and Gurobi's bundled licence allows 2,000 variables (63 "
                f"cities); get a licence, or {_alternatives('gurobi')}"
            ) from error
        raise InputError(f"Gurobi failed: {error} (code {error.errno}); or {_alternatives('gurobi')}") from error


class _GurobiRelaxation(Relaxation):
    def __init__(self, costs: Floats, rows: Sequence[Constraint]) -> None:
        self.n = len(rows)
        with _gurobi_errors(self.n):
            self.model, self.columns = _gurobi_model(costs, rows, "C")
            self.model.Params.Method = 1  # dual simplex, warm after new bounds and rows
            self.model.Params.OptimalityTol = self.model.Params.FeasibilityTol = LP_TOLERANCE
            self.bounds = {"LB": np.zeros(len(costs)), "UB": np.ones(len(costs))}

    def restrict(self, lower: Floats, upper: Floats) -> None:
        for name, values in (("LB", lower), ("UB", upper)):
            changed = np.flatnonzero(values != self.bounds[name])  # few; setting all costs more than solving
            self.model.setAttr(name, [self.columns[column] for column in changed.tolist()], values[changed].tolist())
            self.bounds[name] = values

    def add(self, rows: Sequence[Constraint]) -> None:
        _add_rows(self.model, self.columns, rows)

    def solve(self, seconds: float) -> RelaxedSolution | None:
        with _gurobi_errors(self.n):
            self.model.Params.TimeLimit = seconds
            _run(self.model)
        if self.model.Status != _grb().OPTIMAL:
            return None
        values, reduced = (np.array(self.model.getAttr(name, self.columns)) for name in ("X", "RC"))
        return RelaxedSolution(values, reduced, self.model.ObjVal)

    def close(self) -> None:
        self.model.dispose()


def solve_cold(cities: Floats, prefix: Ints) -> Ints:
    """Return the shortest completion by the plain model: all edges, the prefix fixed, lazy subtour cuts, no start.

    The reference for tests and benchmarks."""
    geometry = Geometry(cities)
    lower = np.zeros(len(geometry.costs))
    lower[geometry.edges[prefix[:-1], prefix[1:]]] = 1.0
    everything = Program(geometry, np.arange(len(lower)), np.zeros(0, dtype=np.int64), np.inf, 0.0, [])
    with _gurobi_errors(geometry.n):
        model, columns = _gurobi_model(geometry.costs, geometry.degree_rows(), "B")
        try:
            model.setAttr("LB", columns, lower.tolist())
            _optimize(model, columns, everything, Deadline(np.inf, None))
            chosen = everything.chosen(np.array(model.getAttr("X", columns)))
        finally:
            model.dispose()
    return walk(geometry, chosen, prefix) if len(prefix) else canonical(walk(geometry, chosen, np.zeros(1, np.int64)))


# -- HiGHS ---------------------------------------------------------------------------------------------------------


class Highs(ExactSolver):
    """HiGHS, which is free. It has no lazy constraints, so subtours are cut between integer programs."""

    name = "highs"

    def relaxation(self, costs: Floats, rows: Sequence[Constraint]) -> Relaxation:
        return _HighsRelaxation(costs, rows)

    def solve_program(self, program: Program, deadline: Deadline) -> tuple[Floats | None, bool]:
        highs, highspy = _highs_model(program.costs, program.rows()), load("highspy", self.name)
        columns = np.arange(len(program.columns), dtype=np.int32)
        highs.changeColsIntegrality(len(columns), columns, np.full(len(columns), highspy.HighsVarType.kInteger))
        _set_options(highs, QUICK_PROOF | {"objective_bound": program.cutoff - program.offset})
        statuses = highspy.HighsModelStatus
        while True:
            highs.setOptionValue("time_limit", highs.getRunTime() + deadline.seconds_left)  # sums all runs
            highs.run()
            status, values = highs.getModelStatus(), _highs_values(highs)
            if values is None:
                return None, status in {statuses.kInfeasible, statuses.kObjectiveBound}
            cuts = program.cuts(values)
            if not cuts:
                return values, status == statuses.kOptimal
            if status != statuses.kOptimal:
                return None, False
            _add_highs_rows(highs, cuts)


# A good tour is known: HiGHS only has to prove that none is better.
QUICK_PROOF: dict[str, Any] = {
    "mip_rel_gap": 0.0,
    "mip_heuristic_effort": 0.0,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_detect_symmetry": False,
}


def _set_options(highs: Any, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        highs.setOptionValue(name, value)


def _highs_values(highs: Any) -> Floats | None:
    """Return the best solution so far, if any."""
    if highs.getInfo().primal_solution_status != load("highspy", "highs").SolutionStatus.kSolutionStatusFeasible:
        return None
    return np.array(highs.getSolution().col_value)


def _highs_model(costs: Floats, rows: Sequence[Constraint]) -> Any:
    highs = load("highspy", "highs").Highs()
    _set_options(highs, {"output_flag": False, "threads": 1})
    n, nothing = len(costs), np.zeros(0, dtype=np.int32)
    highs.addCols(n, costs, np.zeros(n), np.ones(n), 0, np.zeros(n, dtype=np.int32), nothing, np.zeros(0))
    _add_highs_rows(highs, rows)
    return highs


def _add_highs_rows(highs: Any, rows: Sequence[Constraint]) -> None:
    columns = np.concatenate([row.columns for row in rows]).astype(np.int32)
    starts = np.cumsum([0, *(len(row.columns) for row in rows)])[:-1].astype(np.int32)
    upper = np.array([row.bound for row in rows])
    lower = np.where([row.is_equal for row in rows], upper, -np.inf)
    highs.addRows(len(rows), lower, upper, len(columns), starts, columns, np.ones(len(columns)))


class _HighsRelaxation(Relaxation):
    def __init__(self, costs: Floats, rows: Sequence[Constraint]) -> None:
        self.highs = _highs_model(costs, rows)
        self.columns = np.arange(len(costs), dtype=np.int32)
        _set_options(
            self.highs, {"primal_feasibility_tolerance": LP_TOLERANCE, "dual_feasibility_tolerance": LP_TOLERANCE}
        )
        self.statuses = load("highspy", "highs").HighsModelStatus

    def restrict(self, lower: Floats, upper: Floats) -> None:
        self.highs.changeColsBounds(len(self.columns), self.columns, lower, upper)

    def add(self, rows: Sequence[Constraint]) -> None:
        _add_highs_rows(self.highs, rows)

    def solve(self, seconds: float) -> RelaxedSolution | None:
        self.highs.setOptionValue("time_limit", self.highs.getRunTime() + seconds)
        self.highs.run()
        if self.highs.getModelStatus() != self.statuses.kOptimal:
            return None
        solution = self.highs.getSolution()
        return RelaxedSolution(
            np.array(solution.col_value), np.array(solution.col_dual), self.highs.getObjectiveValue()
        )

    def close(self) -> None:
        self.highs.clear()
