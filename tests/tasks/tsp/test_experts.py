"""The experts of the traveling salesman task: tensors in and out, time limits, Ctrl-C and bad input."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import EntryPoint

import pytest
import torch
from tours import is_tour, near_draft

from seqdefer.errors import ContractError, InputError, OptionError
from seqdefer.interfaces import DraftExpert, Expert
from seqdefer.tasks.tsp import experts
from seqdefer.tasks.tsp.completions import Stop
from seqdefer.tasks.tsp.experts import TourExpert, UnprovenTourWarning, in_parallel, make_expert
from seqdefer.testing import check_expert
from seqdefer.types import Examples, Sequences, SequenceSpec

PACKAGES = {"gurobi": "gurobipy", "highs": "highspy", "search": "numba"}
EXACT = ["gurobi", "highs"]
each_expert = pytest.mark.parametrize("name", PACKAGES)
each_exact = pytest.mark.parametrize("name", EXACT)


def make(name: str, **options: float) -> TourExpert:
    pytest.importorskip(PACKAGES[name], reason="needs the extra tsp")
    return make_expert(name, **options)  # type: ignore[arg-type,return-value]


def instances(n: int, n_cities: int, seed: int = 0) -> Examples:
    cities = torch.randn(n, n_cities, 2, generator=torch.Generator().manual_seed(seed))
    return Examples(cities, torch.full((n, n_cities), -1), torch.arange(n))  # experts must not use the targets


def near_drafts(examples: Examples) -> Sequences:
    tokens = torch.stack([torch.from_numpy(near_draft(cities.numpy())) for cities in examples.inputs])
    return Sequences(tokens, torch.full((len(tokens),), examples.inputs.shape[1]))


# -- right ---------------------------------------------------------------------------------------------------------


@each_expert
def test_contract(name: str) -> None:
    expert, examples = make(name), instances(3, 12)
    assert isinstance(expert, DraftExpert)
    check_expert(expert, examples, SequenceSpec(12), drafts=near_drafts(examples))


@each_expert
def test_rows_are_independent(name: str) -> None:
    examples, spec = instances(4, 16), SequenceSpec(16)
    drafts, kept = near_drafts(examples), torch.arange(0, 17, 4)
    many, _ = make(name, n_threads=2).hand_offs(examples, drafts, kept, spec)
    one = [make(name, n_threads=1).hand_offs(examples.select(row), drafts.select(row), kept, spec)[0].tokens
           for row in torch.arange(4).split(1)]  # fmt: skip
    assert torch.equal(many.tokens, torch.cat(one))


def test_tokens_past_the_prefix_are_ignored() -> None:
    examples, spec = instances(3, 20), SequenceSpec(20)
    prefixes = near_drafts(examples).truncate(torch.tensor([0, 3, 5]))
    junk = Sequences(torch.where(prefixes.mask(), prefixes.tokens, -1), prefixes.lengths)
    tours, same = (make("search").complete(examples, each, spec).tokens for each in (prefixes, junk))
    assert torch.equal(tours, same)


def test_no_rows() -> None:
    examples, spec, expert = instances(0, 12), SequenceSpec(12), make("search")
    nothing = Sequences(torch.zeros(0, 12, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    assert expert.complete(examples, nothing, spec).tokens.shape == (0, 12)
    handed, runs = expert.hand_offs(examples, nothing, torch.arange(13), spec)
    assert (handed.tokens.shape, runs) == ((0, 12), 0)


def test_fingerprints_name_all_settings() -> None:
    names = [
        make("gurobi").fingerprint,
        make("gurobi", time_limit=1).fingerprint,
        make("highs").fingerprint,
        make("search").fingerprint,
        make("search", effort=1).fingerprint,
        make("search", seed=1).fingerprint,
    ]
    assert len(set(names)) == 6
    assert all(name.startswith("tsp-") for name in names)
    assert make("gurobi", n_threads=1).fingerprint == names[0]


# -- time, and Ctrl-C ----------------------------------------------------------------------------------------------


@each_exact
def test_unproven_tours_are_counted_in_one_warning(name: str) -> None:
    expert, examples, spec = make(name, time_limit=1e-9), instances(3, 30), SequenceSpec(30)
    with pytest.warns(UnprovenTourWarning, match=r"of 93 tours may not be the shortest") as said:
        handed, _ = expert.hand_offs(examples, near_drafts(examples), torch.arange(31), spec)
    assert len(said) == 1
    assert is_tour(handed.tokens).all()
    counted = expert.unproven
    assert counted > 3
    with pytest.warns(UnprovenTourWarning, match=r"3 of 3 tours"):
        expert.complete(examples, near_drafts(examples).truncate(torch.zeros(3, dtype=torch.long)), spec)
    assert expert.unproven == counted + 3


LONG_SOLVE = """
import torch
from seqdefer.tasks.tsp.data import gaussian_instances
from seqdefer.tasks.tsp.experts import make_expert
from seqdefer.types import Examples, Sequences, SequenceSpec

cities = gaussian_instances(2000, 50, 0)
drafts = torch.arange(50).repeat(2000, 1)
examples = Examples(cities, drafts, torch.arange(2000))
whole = Sequences(drafts, torch.full((2000,), 50))
print("begins", flush=True)
make_expert("{name}").hand_offs(examples, whole, torch.arange(51), SequenceSpec(50))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of this kind are not there")
@each_exact
def test_ctrl_c_ends_it(name: str) -> None:
    """Regression: Gurobi's `optimize` took over Ctrl-C and lost it in one case of four."""
    program = [sys.executable, "-c", LONG_SOLVE.replace("{name}", name)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"begins\n"
            for _ in range(20):
                child.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(3)
                    break
        finally:
            child.kill()
    assert child.returncode not in (0, -signal.SIGKILL)


def test_error_in_one_row_is_not_lost() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def work(row: int, stop: Stop) -> int:
        if row == 1:
            raise InputError("row 1")
        end = time.monotonic() + 60
        while not stop[0]:
            assert time.monotonic() < end, "the others must stop"
        return row

    with ThreadPoolExecutor(2) as pool, pytest.raises(InputError, match="row 1"):
        in_parallel(pool, work, 50)


# -- bad input -----------------------------------------------------------------------------------------------------


def question(tokens: list[int], kept: int, *, n_cities: int = 5) -> tuple[Examples, Sequences, SequenceSpec]:
    """Return two rows, of which the second is the one under test."""
    rows = torch.tensor([list(range(n_cities)), tokens])
    return instances(2, n_cities), Sequences(rows, torch.tensor([2, kept])), SequenceSpec(n_cities)


@pytest.mark.parametrize(
    ("tokens", "kept", "says"),
    [
        ([3, 1, 3, 0, 0], 3, r"row 1: city 3 is visited twice; a tour"),
        ([3, 1, 2, 0, 1], 5, r"row 1: city 1 is visited twice and city 4 never"),
        ([3, 5, 0, 0, 0], 2, r"row 1: city 5 at position 1; the cities are 0 to 4"),
        ([-1, 0, 0, 0, 0], 1, r"row 1: city -1 at position 0"),
        ([0, 1, 2, 3, 4], 6, r"row 1: kept is 6; it must be between 0 and 5"),
    ],
)
def test_bad_prefix(tokens: list[int], kept: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make("search").complete(*question(tokens, kept))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_coordinates(value: float) -> None:
    examples, prefixes, spec = question([0, 1, 2, 3, 4], 2)
    examples.inputs[1, 3, 0] = value
    with pytest.raises(InputError, match=rf"row 1: city 3 is at \({value}, .*\); coordinates must be finite"):
        make("search").complete(examples, prefixes, spec)


def test_too_few_cities() -> None:
    with pytest.raises(InputError, match=r"3 cities; a tour needs at least 4"):
        make("search").complete(*question([0, 1, 2], 1, n_cities=3))


def test_bad_shapes() -> None:
    expert, (examples, prefixes, spec) = make("search"), question([0, 1, 2, 3, 4], 2)
    with pytest.raises(InputError, match=r"shape \(2, 5, 2\); 6 cities need"):
        expert.complete(examples, prefixes, SequenceSpec(6))
    with pytest.raises(InputError, match=r"2 instances and 1 prefixes"):
        expert.complete(examples, prefixes.select(torch.tensor([0])), spec)


@pytest.mark.parametrize("kept", [[], [2, 2], [3, 1], [-1, 2], [0, 6]])
def test_bad_kept(kept: list[int]) -> None:
    examples = instances(2, 5)
    with pytest.raises(InputError, match="must rise"):
        make("search").hand_offs(examples, near_drafts(examples), torch.tensor(kept, dtype=torch.long), SequenceSpec(5))


def test_incomplete_draft() -> None:
    examples, drafts, spec = question([0, 1, 2, 3, 4], 5)
    with pytest.raises(InputError, match=r"row 0: the draft has 2 cities; it must visit all 5"):
        make("search").hand_offs(examples, drafts, torch.arange(6), spec)


def test_unknown_expert() -> None:
    with pytest.raises(OptionError, match=r"unknown expert 'gurboi'; available: gurobi, highs, search"):
        make_expert("gurboi")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("gurobi", {"time_limit": 0.0}, "--time-limit"),
        ("highs", {"time_limit": float("nan")}, "--time-limit"),
        ("search", {"effort": -1}, "--effort"),
        ("highs", {"n_threads": 0}, "threads"),
        ("search", {"seed": -1}, "seed is -1"),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, float], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        make(name, **options)


class InOrderExpert(Expert):
    """An expert that ignores the prefix."""

    fingerprint = "in-order"

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        return Sequences(torch.arange(spec.length).repeat(len(examples), 1), torch.full((len(examples),), spec.length))


def test_an_expert_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"tsp.mine": EntryPoint("tsp.mine", f"{__name__}:InOrderExpert", experts.EXPERTS)}
    monkeypatch.setattr(experts, "find_plugins", lambda group: points if group == experts.EXPERTS else {})
    assert isinstance(make_expert("mine"), InOrderExpert)
    with pytest.raises(OptionError, match=r"unknown expert 'yours'; available: gurobi, highs, mine, search"):
        make_expert("yours")
    monkeypatch.setattr(InOrderExpert, "fingerprint", "")
    with pytest.raises(ContractError, match="the expert plug-in 'mine' has no fingerprint"):
        make_expert("mine")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_results_are_on_the_device_of_the_prefixes() -> None:
    examples, prefixes, spec = question([0, 1, 2, 3, 4], 2)
    prefixes = Sequences(prefixes.tokens.cuda(), prefixes.lengths.cuda())
    assert make("highs").complete(examples.to("cuda"), prefixes, spec).tokens.is_cuda
