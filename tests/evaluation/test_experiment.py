"""The main job from end to end: its files, and its figures against those of the methods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import WithExpert, completing
from small_runs import FITTED, OPTIMAL, TINY, run_toy

from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.evaluation import experiment
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.oracle import beam_outcomes
from seqdefer.evaluation.results import Results, load_results
from seqdefer.methods.registry import all_methods
from seqdefer.progress import Clock, Progress
from seqdefer.rejectors.checkpoints import load_rejector
from seqdefer.rejectors.draft import DraftNetwork
from seqdefer.rejectors.losses import rule_of_thumb
from seqdefer.tasks.weather.task import WeatherTask
from seqdefer.testing import ToyTask

CHOW = {"ChowMean", "ChowSum", "ChowQuantile0.0", "ChowQuantile0.4", "ChowQuantile0.8", "ChowQuantile1.0"}
WHOLE = {"Random", "OptimalFree", "OptimalWhole", "WholeModelEmbed", *CHOW}
ONCE = {"OptimalOneTime", "OneTimeModel", "OneTimeCost", "OneTimeScore"}
TOKEN = {"OptimalToken", "MyopicToken", "TokenwiseModel", "TokenwiseScore"}


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Sequences of different lengths, with an entropy."""
    return run_toy(ToyTask(n=40), tmp_path_factory.mktemp("toy"))


@pytest.fixture(params=["weather", "toy"])
def results(request: pytest.FixtureRequest, finished: Path, toy_run: Results) -> Results:
    return load_results(finished) if request.param == "weather" else toy_run


def test_files_of_a_run(finished: Path) -> None:
    files = {path.name for path in finished.iterdir() if path.is_file()} - {"card.png"}  # where matplotlib is installed
    assert files == {"results.json", "report.html", "examples.html"}
    rejectors = {path.name for path in (finished / "rejectors").iterdir()}
    assert rejectors == {f"{name}-seed{seed}" for name in FITTED for seed in (0, 1)}
    assert len(list(finished.glob("predictor-*"))) == 1
    assert not list(finished.rglob(".*"))  # no temporary files


def test_results_name_the_methods_that_apply(finished: Path, toy_run: Results) -> None:
    weather = load_results(finished)
    assert set(weather.summary) == WHOLE | ONCE | TOKEN  # real numbers have no entropy
    assert set(toy_run.summary) == WHOLE | ONCE | TOKEN | {"OneTimeEntropy", "TokenwiseEntropy"}
    assert {name for name, one in all_methods().items() if not one.runs_when_named} <= set(toy_run.summary)
    for found in (weather, toy_run):
        for seed in found.seeds:
            assert set(seed.methods) == set(found.summary)
        for name, one in found.summary.items():
            assert one.granularity == ("whole" if name in WHOLE else "token" if "Token" in name else "once")


def test_curves_run_from_the_predictor_alone_to_the_expert_alone(results: Results) -> None:
    """All methods of a seed share two ends; oracles only the last x, for they need not spend a budget."""
    for seed in results.seeds:
        first, last = seed.methods["Random"].curve
        assert first[0] == 0.0
        for name, method in seed.methods.items():
            xs = [x for x, _ in method.curve]
            assert xs == sorted(xs)
            assert xs[-1] == pytest.approx(last[0])
            if not name.startswith("Optimal"):
                assert method.curve[0] == pytest.approx(first)
                assert method.curve[-1] == pytest.approx(last)


def test_the_ends_are_those_of_the_test_instances(weather: WeatherTask, finished: Path) -> None:
    """Recompute the two models alone on the instances that each seed draws, which are disjoint."""
    results, examples = load_results(finished), weather.split("test")
    drawn = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))[:30]
    state, _ = weather.predictor.start(examples.inputs[drawn])
    alone = []
    for _ in range(6):
        alone.append(weather.predictor.propose(state).tokens)
        state = weather.predictor.append(state, alone[-1])
    error = (torch.stack(alone, 1) - examples.targets[drawn]).square().sum(1)
    read = weather.expert.start(examples.select(drawn)).values
    expert = (read - examples.targets[drawn]).square().sum(1)
    for seed, rows in zip(results.seeds, (slice(0, 15), slice(15, 30)), strict=True):
        (zero, first), (length, last) = seed.methods["Random"].curve
        assert (zero, length) == (0.0, 6.0)
        assert first == pytest.approx(float(error[rows].mean()), rel=1e-5)
        assert last == pytest.approx(float(expert[rows].mean()), rel=1e-5)


def test_areas_are_those_of_the_stored_curves(results: Results) -> None:
    for seed in results.seeds:
        for method in seed.methods.values():
            area = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in zip(method.curve, method.curve[1:]))  # noqa: B905
            random = seed.methods["Random"].audc
            assert method.audc == pytest.approx(area)
            assert method.improvement == pytest.approx(100 * (1 - method.audc / random))


def test_summaries_are_means_over_the_seeds(results: Results) -> None:
    for name, one in results.summary.items():
        audc = [seed.methods[name].audc for seed in results.seeds]
        improved = [seed.methods[name].improvement for seed in results.seeds]
        assert (one.audc_mean, one.audc_std) == pytest.approx((np.mean(audc), np.std(audc, ddof=1)))
        assert (one.improvement_mean, one.improvement_std) == pytest.approx(
            (np.mean(improved), np.std(improved, ddof=1))
        )


def test_headroom_is_the_share_of_what_a_free_expert_gives(results: Results) -> None:
    for name in results.summary:
        shares = [
            100 * seed.methods[name].improvement / seed.methods["OptimalFree"].improvement for seed in results.seeds
        ]
        assert results.headroom(name) == pytest.approx((np.mean(shares), np.std(shares, ddof=1)))
    assert results.headroom("Random") == (0.0, 0.0)
    assert results.headroom("OptimalFree") == pytest.approx((100.0, 0.0))
    first = {name: one for name, one in results.seeds[0].methods.items() if name != "OptimalFree"}
    older = replace(results, seeds=(replace(results.seeds[0], methods=first), *results.seeds[1:]))
    assert older.headroom("TokenwiseModel") is None


def test_no_method_beats_its_oracle_in_any_seed(results: Results) -> None:
    for seed in results.seeds:
        area = {name: method.audc for name, method in seed.methods.items()}
        for name, method in seed.methods.items():
            if name != "OptimalFree":  # nobody's: it has the expert's loss for nothing
                assert area[OPTIMAL[method.granularity]] <= area[name] + 1e-9, name
        assert area["OptimalToken"] <= area["OptimalOneTime"] <= area["OptimalWhole"] <= area["Random"]


def test_comparisons_are_differences_of_the_summary(results: Results) -> None:
    assert {(one.method, one.against) for one in results.comparisons} >= {
        ("OneTimeModel", "WholeModelEmbed"), ("TokenwiseModel", "OneTimeModel"), ("TokenwiseModel", "ChowMean"),
    }  # fmt: skip
    for one in results.comparisons:
        means = [results.summary[name].improvement_mean for name in (one.method, one.against)]
        assert one.difference == pytest.approx(means[0] - means[1])
        assert one.low <= one.high
        assert (one.method, one.against) != ("OneTimeModel", "TokenwiseScore")  # not with a finer granularity


def test_provenance(finished: Path, weather: WeatherTask) -> None:
    found = load_results(finished).provenance
    assert weather.series.fingerprint in found.data["data"]
    assert weather.predictor.fingerprint in found.models["predictor"]
    assert found.seeds == (0, 1)
    n = found.settings["task"]["train_windows"] + len(weather.split("validation")) + 2 * 15
    assert found.expert_calls.made == n + 6 * n  # a completion for each table's row, then a token for each position
    assert found.expert_calls.made + found.expert_calls.saved == 6 * n + (2**6 - 1) * n
    assert {"label hand-offs", "label decisions", *(f"fit {name}" for name in FITTED)} <= set(found.seconds)
    assert found.settings["instances"] == 15
    assert found.settings["task"]["stride"] == 12


def test_stored_rejectors_load_and_name_their_fit(finished: Path, weather: WeatherTask) -> None:
    for name in FITTED:
        rejector = load_rejector(finished / "rejectors" / f"{name}-seed1", weather.predictor)
        assert rejector.notes["method"] == name
        assert rejector.notes["task"] == "weather"
        assert len(rejector.notes["history"]["validation"]) == (2 if name == "TokenwiseModel" else 3)


def test_alpha_is_the_rule_of_thumb_unless_given(tmp_path: Path) -> None:
    task = ToyTask(n=40, length=3)
    run_toy(task, tmp_path / "ruled", seeds=1)
    run_toy(task, tmp_path / "given", seeds=1, alpha=0.7, hand_offs=3)
    ruled, given = (
        load_rejector(tmp_path / name / "rejectors" / "OneTimeModel-seed0").notes for name in ("ruled", "given")
    )
    table = Experiment(task, TINY, tmp_path).splits.train.table
    assert ruled["alpha"] == rule_of_thumb(table)
    assert ruled["grid"] == [0, 1, 2, 3]
    assert (given["alpha"], given["grid"]) == (0.7, [0, 2, 3])


def test_an_expert_that_only_completes_has_no_token_level_methods(tmp_path: Path) -> None:
    results = run_toy(WithExpert(completing, n=30, length=4), tmp_path, instances=10)
    assert set(results.summary) == WHOLE | ONCE | {"OneTimeEntropy"}
    assert {one.method for one in results.comparisons} == {"OneTimeModel", "OneTimeCost"}
    assert not list((tmp_path / "rejectors").glob("Token*"))
    plain = run_toy(ToyTask(n=30, length=4), tmp_path / "plain", instances=10)
    for name in ("Random", "OptimalOneTime", "OneTimeScore", "ChowSum"):  # the same expert, called another way
        assert plain.summary[name] == results.summary[name]


@pytest.mark.parametrize("width", [1, 8])
def test_long_sequences_have_an_oracle_that_was_searched_for(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees grow lazily. Even with a narrow beam, no method beats the oracle: it includes what every method reaches."""
    monkeypatch.setattr(experiment, "beam_outcomes", partial(beam_outcomes, width=width))
    results = run_toy(ToyTask(n=30, length=13), tmp_path)
    for seed in results.seeds:
        area = {name: method.audc for name, method in seed.methods.items()}
        assert area["OptimalToken"] == min(area.values())
        assert area["OptimalToken"] < area["OptimalOneTime"]
    assert any("OptimalToken is the best found by a beam" in note and "a bound" in note for note in results.notes)
    assert "search for the oracle" in results.provenance.seconds


def test_the_oracle_of_short_sequences_is_exact(toy_run: Results) -> None:
    assert not any("beam" in note for note in toy_run.notes)
    assert "search for the oracle" not in toy_run.provenance.seconds


def test_the_curve_of_one_time_cost_is_that_of_its_rejector(tmp_path: Path) -> None:
    """Recompute every price from the files of the run: the hand-offs it leads to are points of the curve."""
    task = ToyTask(n=40)
    results, experiment_ = run_toy(task, tmp_path), Experiment(task, TINY, tmp_path)
    test = experiment_.splits.test
    for seed in (0, 1):
        rows = torch.arange(15) + 15 * seed
        rejector = load_rejector(tmp_path / "rejectors" / f"OneTimeCost-seed{seed}", task.predictor)
        assert isinstance(rejector, DraftNetwork)
        assert rejector.sizes.rule == "cost"
        drafted, table = test.draft.select(rows), test.table.select(rows)
        curve = {(round(x, 6), round(y, 6)) for x, y in results.seeds[seed].methods["OneTimeCost"].curve}
        most = float(table.deferred[:, 0].double().mean())
        for price in (torch.inf, 1.0, 0.3, 0.1, 0.0, -0.1, -torch.inf):
            scored = ScoredHandOffs.of(
                rejector.score(drafted), task.spec.length, hand_offs=experiment_.grid, rule="cost",
                lengths=drafted.sequences.lengths,
            )  # fmt: skip
            kept = torch.from_numpy(scored.kept(price))[:, None]
            x, y = (float(part.gather(1, kept).double().mean()) for part in (table.deferred, table.loss))
            assert (round(x, 6), round(y, 6)) in curve or x > most


def test_one_time_cost_is_compared_with_what_defers_no_finer(results: Results) -> None:
    against = {one.against for one in results.comparisons if one.method == "OneTimeCost"}
    assert against >= {"OneTimeModel", "OneTimeScore", "WholeModelEmbed", "ChowSum"}
    assert not against & {"TokenwiseModel", "OneTimeCost"}
    assert any(note.startswith("OneTimeCost") for note in results.notes)


class Bars:
    """A meter that notes what every stage was said to take, and took."""

    def __init__(self) -> None:
        self.stages: dict[str, tuple[int, list[int]]] = {}

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Progress]:
        assert name not in self.stages
        self.stages[name] = total, []
        yield self.stages[name][1].append


def test_notes_describe_the_methods_that_ran_and_bars_are_filled(tmp_path: Path) -> None:
    bars, settings = Bars(), replace(TINY, seeds=1, methods=("ChowMean", "OneTimeCost"))
    notes = Experiment(ToyTask(n=40), settings, tmp_path, clock=Clock(bars)).run().notes
    assert [note.split()[0] for note in notes] == ["OneTimeCost"]
    assert {"bootstrap", "fit OneTimeCost (seed 0)", "label hand-offs (test)"} <= set(bars.stages)
    for total, steps in bars.stages.values():
        assert sum(steps) == total


@pytest.mark.parametrize("is_papers", [True, False])
def test_the_papers_figures_stand_beside_the_papers_task_alone(is_papers: bool, tmp_path: Path) -> None:
    task = ToyTask(n=40)
    task.name, task.has_published_figures = "tsp", is_papers
    results = run_toy(task, tmp_path, seeds=1, methods=("ChowMean",))
    assert bool(results.paper) is is_papers
    assert any("The paper's figures" in note for note in results.notes) is is_papers


def test_attention_over_drafts_from_end_to_end(tmp_path: Path) -> None:
    small = replace(TINY.cost, architecture="draft_transformer", units=16, epochs=2)
    results = run_toy(ToyTask(n=30), tmp_path, seeds=1, once=small, cost=small)
    assert set(results.summary) >= ONCE
    for name in ("WholeModelEmbed", "OneTimeModel", "OneTimeCost"):
        assert load_rejector(tmp_path / "rejectors" / f"{name}-seed0").kind == "draft_transformer"
