"""The traveling salesman task end to end: labels against brute force, the command, resuming, and bad input."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import EntryPoint
from io import StringIO
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Capture, content, fails_with
from small_runs import FITS, found_in
from torch import Tensor
from tours import is_tour

from seqdefer import cli
from seqdefer.engine.drafts import draft
from seqdefer.errors import MissingExtraError
from seqdefer.evaluation.results import Results, load_results
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.progress import Silent
from seqdefer.rejectors.checkpoints import load_rejector
from seqdefer.rejectors.losses import hand_off_grid
from seqdefer.tasks.tsp import task as module
from seqdefer.tasks.tsp.data import gaussian_instances, normalise
from seqdefer.tasks.tsp.experts import TourExpert, UnprovenTourWarning, make_expert
from seqdefer.tasks.tsp.pointer import PointerNet, TourPredictor, save_pointer
from seqdefer.tasks.tsp.task import (
    PREDICTORS,
    PUBLISHED_ALPHA,
    TSPOptions,
    TSPTask,
    greedy_tours,
    load_predictor,
    own_tours,
    prepare,
    shipped_pointer,
)
from seqdefer.tasks.tsp.tours import percent_over, tour_lengths
from seqdefer.testing import check_task
from seqdefer.types import Sequences

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
PACKAGES = {"gurobi": "gurobipy", "highs": "highspy", "search": "numba"}
each_expert = pytest.mark.parametrize("name", PACKAGES)


def need(expert: str) -> None:
    pytest.importorskip(PACKAGES[expert], reason="needs the extra tsp")


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save an untrained predictor, whose tours leave much to improve."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("poor")
    save_pointer(PointerNet(6), folder, {})
    return folder


def make_task(expert: str, predictor: Path, folder: Path, *, n: int = 5, cities: int = 7, **options: Any) -> TSPTask:
    need(expert)
    chosen = TSPOptions(
        cities=cities, expert=expert, predictor=str(predictor), train=n, validation=n, test=n, **options
    )
    return prepare(chosen, folder, CPU, Silent())


# -- against brute force -------------------------------------------------------------------------------------------


def losses_by_brute_force(cities: Tensor, tour: Tensor) -> list[float]:
    """Return, for every prefix of a tour, how many per cent its best completion is longer than the best tour."""
    n = len(cities)
    everything = torch.tensor(list(permutations(range(n))))
    lengths = tour_lengths(cities.expand(len(everything), -1, -1), everything)
    shortest = [float(lengths[(everything[:, :kept] == tour[:kept]).all(1)].min()) for kept in range(n + 1)]
    return [100 * (length / shortest[0] - 1) for length in shortest]


@each_expert
def test_labels_are_those_of_brute_force(name: str, poor: Path, tmp_path: Path) -> None:
    task = make_task(name, poor, tmp_path)
    examples = task.split("test")
    drafted = draft(task.predictor, examples, task.spec)
    table, calls = hand_off_table(task, examples, drafted)
    expected = [losses_by_brute_force(*pair) for pair in zip(examples.inputs, drafted.sequences.tokens, strict=True)]
    torch.testing.assert_close(table.loss, torch.tensor(expected), rtol=1e-4, atol=1e-3)
    assert table.loss.mean() > 1  # otherwise the test would prove nothing
    assert (table.loss[:, :2] == 0).all(), "one city kept is no constraint: a tour may begin anywhere"
    assert (table.loss.diff(dim=1) > -1e-4).all(), "a longer prefix leaves fewer tours to choose from"
    own = task.sequence_loss(examples, drafted.sequences)
    assert torch.equal(table.loss[:, -1], own)
    assert torch.equal(own, percent_over(examples.inputs, drafted.sequences.tokens, examples.targets))
    assert torch.equal(table.deferred, torch.arange(7, -1, -1).expand(5, -1))
    plain, naive = hand_off_table(task, examples, drafted, shortcut=False)
    torch.testing.assert_close(plain.loss, table.loss, rtol=0, atol=1e-4)
    assert torch.equal(plain.deferred, table.deferred)
    assert calls.made < naive.made == 5 * 7
    assert calls.made + calls.saved == 5 * 7


def test_contract(poor: Path, tmp_path: Path) -> None:
    """Regression: the ids of all parts began at 0, so examples of different parts shared ids."""
    check_task(make_task("search", poor, tmp_path, n=3, cities=6), n=2)


def test_the_loss_is_relative_to_the_experts_tour(poor: Path, tmp_path: Path) -> None:
    task = make_task("search", poor, tmp_path)
    examples = task.split("train")
    tours = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(row)) for row in range(5)])
    loss = task.sequence_loss(examples, Sequences(tours, torch.full((5,), 7)))
    longer, best = (tour_lengths(examples.inputs, each) for each in (tours, examples.targets))
    torch.testing.assert_close(loss.double(), 100 * (longer - best) / best, rtol=1e-5, atol=1e-5)
    assert (loss > 0).all()
    assert (task.sequence_loss(examples, Sequences(examples.targets.flip(1), torch.full((5,), 7))) == 0).all()


def test_the_papers_cost_of_a_city_is_in_per_cent_of_a_tour(tmp_path: Path) -> None:
    """alpha_L = 0.01 in units of length, of which a shortest tour has 23.7 on average."""
    need("search")
    cities = gaussian_instances(200, 50, 0, "validation")
    tours = own_tours(make_expert("search"), cities, tmp_path, Silent(), "own tours")
    mean = float(tour_lengths(cities, tours).mean())
    assert mean == pytest.approx(23.7, abs=0.4)  # four standard errors
    assert PUBLISHED_ALPHA / 50 / 100 * mean == pytest.approx(0.01, rel=0.02)


# -- the expert's own tours ----------------------------------------------------------------------------------------


def test_own_tours_are_written_batch_by_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spy: Callable[[Any, str], list[Any]]
) -> None:
    need("search")
    monkeypatch.setattr(module, "SOLVE_BATCH", 4)
    cities, expert = gaussian_instances(10, 8, seed=1), make_expert("search")
    solved = spy(module, "_solve")
    tours = own_tours(expert, cities, tmp_path, Silent(), "solve")
    assert [len(call[1]) for call in solved] == [4, 4, 2]
    assert is_tour(tours).all()
    assert torch.equal(own_tours(expert, cities, tmp_path, Silent(), "solve"), tours)
    assert len(solved) == 3
    next(tmp_path.iterdir()).write_bytes(b"damaged")
    assert torch.equal(own_tours(expert, cities, tmp_path, Silent(), "solve"), tours)
    assert len(solved) == 4
    assert torch.equal(own_tours(expert, cities[:8], tmp_path, Silent(), "solve"), tours[:8])
    assert len(solved) == 4, "the first instances are the same"
    own_tours(make_expert("search", effort=1), cities, tmp_path, Silent(), "solve")
    assert len(solved) == 7, "another expert has other tours"


# -- the command ---------------------------------------------------------------------------------------------------

SIZES = ["--cities", "8", "--train", "40", "--validation", "20", "--test", "20", "--seeds", "2", "--instances", "10"]
SMALL = [*SIZES, "--expert", "search", "--device", "cpu", "--quiet"]
FITTED = ("WholeModelEmbed", "OneTimeModel", "OneTimeCost")


def run(*arguments: str | Path) -> int:
    return cli.main([str(argument) for argument in ("run", "tsp", *arguments)])


def finished(folder: Path, *options: str) -> Path:
    need("search")
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert run(*SMALL, *options, "--out", folder) == 0
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a complete run. Do not change it."""
    return finished(tmp_path_factory.mktemp("done") / "run")


@pytest.fixture
def results(done: Path) -> Results:
    return load_results(done)


@pytest.mark.slow
def test_files_of_a_run(done: Path) -> None:
    files = {path.name for path in done.iterdir() if path.is_file()} - {"card.png"}  # where matplotlib is installed
    assert files == {"results.json", "report.html", "examples.html"}
    assert {path.name for path in (done / "rejectors").iterdir()} == {
        f"{name}-seed{seed}" for name in FITTED for seed in (0, 1)
    }
    assert [len(list((done / name).iterdir())) for name in ("tours", "labels")] == [3, 6]  # and a manifest each
    assert not list(done.rglob(".*"))


def test_there_are_no_token_methods(results: Results) -> None:
    assert not [name for name in results.summary if "Token" in name]
    assert {"OneTimeModel", "OneTimeCost", "OneTimeScore", "OneTimeEntropy", "ChowSum"} <= set(results.summary)
    for seed in results.seeds:
        for name, method in seed.methods.items():
            if name == "OptimalFree":
                continue  # what no policy reaches
            oracle = "OptimalWhole" if method.granularity == "whole" else "OptimalOneTime"
            assert seed.methods[oracle].audc <= method.audc + 1e-6, name


def test_curves_run_from_the_predictors_gap_to_zero(results: Results) -> None:
    """Recompute the gap from the seeds alone."""
    cities = gaussian_instances(20, 8, seed=0, stream="test")
    drawn = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    tours = greedy_tours(shipped_pointer(CPU), cities, CPU)
    gaps = torch.tensor([losses_by_brute_force(*pair)[-1] for pair in zip(cities, tours, strict=True)])[drawn]
    for seed, part in zip(results.seeds, gaps.split(10), strict=True):
        (zero, first), (length, last) = seed.methods["Random"].curve
        assert (zero, length, last) == (0, 8, 0)
        assert first == pytest.approx(float(part.mean()), rel=1e-4)
        assert first > 0


def test_provenance(results: Results) -> None:
    provenance = results.provenance
    assert provenance.data["data"] == "Gaussian instances of 8 cities, seed 0"
    assert provenance.data["instances"] == "train 40, validation 20, test 20"
    assert provenance.models["expert"] == make_expert("search").fingerprint
    assert provenance.expert_calls.made + provenance.expert_calls.saved == 80 * 8
    assert 0 < provenance.expert_calls.made < 80 * 8 / 2
    assert provenance.settings["task"]["cities"] == 8


def test_the_report_draws_tours(done: Path) -> None:
    """Three instances at four budgets each: the larger the budget, the earlier the expert takes over."""
    page = (done / "report.html").read_text()
    drawings = re.findall(r'<svg [^>]*class="tour">.*?</svg>', page)
    assert len(drawings) == 12
    for drawing in drawings:
        assert len(re.findall(r'class="tour-(?:predictor|expert)-city"', drawing)) == 8
        assert drawing.count('class="tour-road"') == 1
    deferred = [int(count) for count in re.findall(r"expert wrote (\d+) of 8 cities", page)]
    over = [float(value) for value in re.findall(r"<b>([\d.]+)\s%</b> over the expert", page)]
    assert [drawing.count('class="tour-expert-city"') for drawing in drawings] == deferred
    assert len(over) == 12
    assert max(deferred) > 0
    for row in range(0, 12, 4):
        assert all(one <= two for one, two in pairwise(deferred[row : row + 4]))
        assert all(one >= two for one, two in pairwise(over[row : row + 4]))
    assert (done / "examples.html").read_text() in page
    assert "<img" not in page


def test_a_resumed_run_does_not_call_the_expert(
    done: Path, tmp_path: Path, spy: Callable[[Any, str], list[Any]]
) -> None:
    """Except for the tours that the report draws."""
    folder = tmp_path / "copy"
    shutil.copytree(done, folder)
    (folder / "results.json").unlink()
    labelled, solved = spy(TourExpert, "hand_offs"), spy(module, "_solve")
    fits = [spy(FITS[name], name) for name in ("fit_whole", "fit_once", "fit_cost")]
    finished(folder)
    assert (labelled, solved, fits) == ([], [], [[], [], []])
    assert found_in(folder) == found_in(done)
    changed = [name for name, value in content(done).items() if content(folder)[name] != value]
    assert set(changed) <= {"results.json", "report.html"}


@pytest.mark.parametrize("size", [5, 51])
def test_hand_offs_of_fifty_cities(size: int, tmp_path: Path) -> None:
    sizes = ["--cities", "50", "--train", "6", "--validation", "4", "--test", "4", "--seeds", "1", "--instances", "4"]
    few = ["--methods", "OneTimeModel,OneTimeScore", "--effort", "0"]
    finished(tmp_path, *sizes, *few, "--hand-offs", str(size), "--draft-architecture", "draft_mlp")
    notes = load_rejector(tmp_path / "rejectors" / "OneTimeModel-seed0").notes
    assert notes["grid"] == hand_off_grid(50, size).tolist()
    assert {"OneTimeModel", "OneTimeScore"} <= set(load_results(tmp_path).summary)


# -- files of cities -----------------------------------------------------------------------------------------------


def tsplib(cities: Tensor) -> str:
    rows = "\n".join(f"{number} {x} {y}" for number, (x, y) in enumerate(cities.tolist(), 1))
    head = f"NAME : made\nTYPE : TSP\nDIMENSION : {len(cities)}\nEDGE_WEIGHT_TYPE : EUC_2D"
    return f"{head}\nNODE_COORD_SECTION\n{rows}\nEOF\n"


def test_data_from_files(tmp_path: Path) -> None:
    """A folder; tests of the data read maps and tables."""
    given, path = gaussian_instances(80, 8, seed=4), tmp_path / "folder"
    path.mkdir()
    for number, cities in enumerate(given):
        (path / f"{number}.tsp").write_text(tsplib(cities))
    finished(tmp_path / "out", "--data", str(path), "--methods", "ChowMean")
    source = "80 instances of 8 cities in folder, split by seed 0"
    provenance = load_results(tmp_path / "out").provenance
    assert provenance.data == {"data": source, "instances": "train 40, validation 20, test 20"}
    options = TSPOptions(data=str(path), cities=8, expert="search", train=40, validation=20, test=20)
    parts = prepare(options, tmp_path / "out", CPU, Silent()).parts
    shown = torch.cat([part.inputs for part in parts.values()])
    nearest = (shown.flatten(1)[:, None] - normalise(given).flatten(1)).norm(dim=2).min(1)
    assert nearest.values.max() < 1e-5
    assert nearest.indices.sort().values.tolist() == list(range(80))


# -- bad input --------------------------------------------------------------------------------------------------


def refused(capsys: Capture, out: Path, *arguments: str | Path) -> str:
    """Run a command that must fail with one line and no results."""
    line = fails_with(capsys, "run", "tsp", *SMALL, *arguments, "--out", out)
    names = set(content(out)) if out.is_dir() else set()
    assert all(re.fullmatch(r"(tours|labels)/[0-9a-f]+\.safetensors", name) for name in names), names
    assert names or not out.exists()
    return line


BAD_OPTIONS: dict[str, tuple[list[str], str]] = {
    "three cities": (["--cities", "3"], "--cities is 3; it must be at least 4"),
    "effort too large": (["--effort", str(2**70)], f"--effort is {2**70}; it must be between 0 and 1000000"),
    "time without end": (["--expert", "highs", "--time-limit", "inf"], "--time-limit is inf"),
    "no such predictor": (["--predictor", "nowhere"], "no pointer network in nowhere"),
    "no such plug-in": (["--predictor", "mine:folder"], "unknown predictor plug-in 'mine'; available:"),
    "no such data": (["--data", "nowhere.tsp"], "cannot read nowhere.tsp"),
    "past the licence": (
        ["--cities", "70", "--expert", "gurobi"],
        "70 cities have 2,415 edges, and Gurobi's bundled licence allows 2,000 variables (63 cities); get a licence, or"
        " use another expert: highs, search",
    ),
    "a method by token": (
        ["--methods", "TokenwiseModel"],
        "method 'TokenwiseModel' does not apply to task 'tsp': its expert completes sequences and names no next token",
    ),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options(options: list[str], message: str, tmp_path: Path, capsys: Capture) -> None:
    need(options[options.index("--expert") + 1] if options[-1] in PACKAGES else "search")
    assert message in refused(capsys, tmp_path / "out", *options)


@pytest.mark.parametrize(
    ("package", "needs", "end"),
    [
        ("gurobipy", "the expert 'gurobi'", "or use another expert: highs, search"),
        ("numba", "an expert for tours", "'seqdefer[tsp]'"),
    ],
)
def test_a_package_that_is_not_installed(
    package: str, needs: str, end: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("gurobi")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "seqdefer.tasks.tsp.compiled", raising=False)
    line = refused(capsys, tmp_path / "out", "--expert", "gurobi")
    assert f"{needs} needs the package '{package}'; install it with: " in line
    assert line.endswith(end)
    assert not (tmp_path / "out").exists()


def test_the_plug_in_of_rl4co_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_plugins", lambda group: {})
    says = r"rl4co:mine needs the package 'seqdefer-rl4co'; .*-m pip install \./examples/seqdefer-rl4co$"
    with pytest.raises(MissingExtraError, match=says):
        load_predictor(TSPOptions(predictor="rl4co:mine"), CPU)


def test_a_predictor_of_a_plug_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed plug-in gets folder, device and facts; a folder with a colon in its name is still a folder."""
    point = EntryPoint("fake", "builtins:tuple", PREDICTORS)
    monkeypatch.setattr(EntryPoint, "load", lambda self: lambda *arguments: arguments)
    monkeypatch.setattr(module, "find_plugins", lambda group: {"fake": point} if group == PREDICTORS else {})
    found = load_predictor(TSPOptions(predictor="fake:a:b", facts=False), CPU)
    assert found == (Path("a:b"), CPU, False)  # type: ignore[comparison-overlap]
    monkeypatch.chdir(tmp_path)
    save_pointer(PointerNet(6), Path("mine:2"), {})
    assert isinstance(load_predictor(TSPOptions(predictor="mine:2"), CPU), TourPredictor)


def test_the_time_limit_is_reported(tmp_path: Path) -> None:
    """The best tours are used, and the provenance counts those without a proof."""
    need("highs")
    sizes = ["--cities", "30", "--train", "4", "--validation", "3", "--test", "3", "--seeds", "1", "--instances", "3"]
    with pytest.warns(UnprovenTourWarning, match="may not be the shortest: the time limit was reached"):
        finished(tmp_path, *sizes, "--expert", "highs", "--time-limit", "1e-9", "--methods", "ChowMean")
    expert = load_results(tmp_path).provenance.models["expert"]
    provenance = re.fullmatch(r"tsp-highs-1 time_limit=1e-09, (\d+) tours not proven shortest", expert)
    assert provenance is not None
    assert int(provenance[1]) > 10
    for seed in load_results(tmp_path).seeds:
        assert all(y >= 0 for method in seed.methods.values() for _, y in method.curve)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path: Path) -> None:
    need("search")
    options = TSPOptions(cities=7, expert="search", train=4, validation=4, test=4)
    tasks = [prepare(options, tmp_path, torch.device(device), Silent()) for device in ("cpu", "cuda")]
    check_task(tasks[1])
    tables = []
    for task in tasks:
        examples = task.split("test")
        tables.append(hand_off_table(task, examples, draft(task.predictor, examples, task.spec))[0].loss)
    torch.testing.assert_close(*tables, rtol=1e-4, atol=1e-4)
    finished(tmp_path / "out", "--methods", "OneTimeCost", "--device", "cuda")
    assert (tmp_path / "out" / "report.html").read_text().count('class="tour"') == 12
