"""The main job from end to end: what it leaves behind, that it goes on where it was stopped, that nothing leaks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import WithExpert, completing
from torch import Tensor

from seqdefer import experiment
from seqdefer.baselines import CHOW
from seqdefer.engine import HandOff, draft, roll_out
from seqdefer.environment import Clock, choose_device
from seqdefer.errors import DataError, OptionError
from seqdefer.experiment import (
    Experiment,
    find_tasks,
    load_task,
    run_task,
)
from seqdefer.interfaces import SplitName, Task, TaskEntry
from seqdefer.losses import rule_of_thumb
from seqdefer.oracle import beam_outcomes
from seqdefer.policies import (
    Threshold,
    choose_by_cost,
    choose_hand_off,
    cost_price_for,
    once_threshold_for,
    sweep_thresholds,
    threshold_for,
)
from seqdefer.rejectors import DRAFT_NETWORKS, DraftNetwork, Sizes, load_rejector
from seqdefer.results import Results, load_results
from seqdefer.settings import ExperimentSettings, experiment_settings
from seqdefer.showing import BUDGETS
from seqdefer.tasks.weather import ENTRY, WeatherOptions, WeatherTask
from seqdefer.testing import FunctionExpert, ToyTask
from seqdefer.training import BY_FACTS, PERCEPTRON, PRESETS, TRANSFORMER, Settings
from seqdefer.types import Examples, Rollout, Sequences

TINY = ExperimentSettings(
    seeds=2,
    instances=15,
    token=Settings(1e-2, 5, "lstm", 1, 4, 0.1, 2, 0.0, 0, batch_size=64),
    once=Settings(1e-2, 5, "draft_mlp", 1, 4, 0.1, 3, 0.0, 0, batch_size=64),
    cost=Settings(1e-2, 5, "draft_mlp", 1, 4, 0.1, 3, 0.0, 0, batch_size=64),
    resamples=30,
)
FITTED = ("WholeModelEmbed", "OneTimeModel", "OneTimeCost", "TokenwiseModel")
OPTIMAL = {"whole": "OptimalWhole", "once": "OptimalOneTime", "token": "OptimalToken"}
WHOLE = {"Random", "OptimalWhole", "WholeModelEmbed", *CHOW}
ONCE = {"OptimalOneTime", "OneTimeModel", "OneTimeCost", "OneTimeScore"}
TOKEN = {"OptimalToken", "TokenwiseModel", "TokenwiseScore"}


def run_weather(record: Path, folder: Path, meter: Any = None) -> Results:
    options = WeatherOptions(data=str(record), stride=12, hidden=4, epochs=2, passes=3)
    return run_task(ENTRY, options, TINY, folder, preset="custom", device="cpu", meter=meter)


def run_toy(task: Task, folder: Path, **settings: Any) -> Results:
    return Experiment(task, replace(TINY, **settings), folder).run()


@pytest.fixture(scope="module")
def finished(record: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run from end to end. Nobody may change it."""
    folder = tmp_path_factory.mktemp("finished")
    run_weather(record, folder)
    return folder


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Sequences of different lengths, with an entropy."""
    return run_toy(ToyTask(n=40), tmp_path_factory.mktemp("toy"))


@pytest.fixture(params=["weather", "toy"])
def results(request: pytest.FixtureRequest, finished: Path, toy_run: Results) -> Results:
    return load_results(finished) if request.param == "weather" else toy_run


def without_seconds(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    del found["provenance"]["seconds"]
    return found


# -- what it leaves behind -----------------------------------------------------------------------------------------


def test_files_of_a_run(finished: Path) -> None:
    assert {path.name for path in finished.iterdir() if path.is_file()} == {"results.json", "report.html"}
    rejectors = {path.name for path in (finished / "rejectors").iterdir()}
    assert rejectors == {f"{name}-seed{seed}" for name in FITTED for seed in (0, 1)}
    assert len(list(finished.glob("predictor-*"))) == 1
    assert not list(finished.rglob(".*"))  # nothing written aside was left


def test_names_are_the_papers_and_those_that_apply(finished: Path, toy_run: Results) -> None:
    weather = load_results(finished)
    assert set(weather.summary) == WHOLE | ONCE | TOKEN  # real numbers have no entropy
    assert set(toy_run.summary) == WHOLE | ONCE | TOKEN | {"OneTimeEntropy", "TokenwiseEntropy"}
    for found in (weather, toy_run):
        for seed in found.seeds:
            assert set(seed.methods) == set(found.summary)
        for name, one in found.summary.items():
            assert one.granularity == ("whole" if name in WHOLE else "token" if "Token" in name else "once")


def test_curves_run_from_the_predictor_alone_to_the_expert_alone(results: Results) -> None:
    """The same two ends for all methods of a seed, the oracles' last loss excepted: they need not spend a budget."""
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
    """Recomputed here: the two writers alone on the instances that each seed drew, which are disjoint."""
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


def test_no_method_beats_its_oracle_in_any_seed(results: Results) -> None:
    for seed in results.seeds:
        area = {name: method.audc for name, method in seed.methods.items()}
        for name, method in seed.methods.items():
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
    told = load_results(finished).provenance
    assert weather.series.fingerprint in told.data["data"]
    assert weather.predictor.fingerprint in told.models["predictor"]
    assert told.seeds == (0, 1)
    n = len(weather.split("train")) + len(weather.split("validation")) + 2 * 15
    assert told.expert_calls.made == n + 6 * n  # a completion for each table's row, then a token for each position
    assert told.expert_calls.made + told.expert_calls.saved == 6 * n + (2**6 - 1) * n
    assert {"label hand-offs", "label decisions", *(f"fit {name}" for name in FITTED)} <= set(told.seconds)
    assert told.settings["instances"] == 15
    assert told.settings["task"]["stride"] == 12


def test_rejectors_can_be_loaded_and_say_what_made_them(finished: Path, weather: WeatherTask) -> None:
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
    for name in ("Random", "OptimalOneTime", "OneTimeScore", "ChowSum"):  # the same expert, asked in another way
        assert plain.summary[name] == results.summary[name]


@pytest.mark.parametrize("width", [1, 8])
def test_long_sequences_have_an_oracle_that_was_searched_for(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their trees grow lazily. However narrow the beam, the oracle knows what every method reached."""
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


# -- stopping and going on -----------------------------------------------------------------------------------------


def weights_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_a_run_again_from_nothing_is_the_same(finished: Path, record: Path, tmp_path: Path) -> None:
    run_weather(record, tmp_path)
    assert without_seconds(tmp_path) == without_seconds(finished)
    assert weights_of(tmp_path) == weights_of(finished)


def test_a_run_goes_on_from_the_rejectors_it_finds(
    finished: Path, record: Path, tmp_path: Path, spy: Callable[[Any, str], list[Any]]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    (folder / "results.json").unlink()
    shutil.rmtree(folder / "rejectors" / "OneTimeModel-seed1")
    (folder / "rejectors" / "TokenwiseModel-seed0" / "model.safetensors").write_bytes(b"damaged")
    (folder / "rejectors" / "WholeModelEmbed-seed0" / "config.json").write_text('{"kind": "of the future"}')
    fits = [spy(experiment, name) for name in ("fit_whole", "fit_once", "fit_token")]
    run_weather(record, folder)
    assert [len(calls) for calls in fits] == [1, 1, 1]
    assert without_seconds(folder) == without_seconds(finished)
    assert weights_of(folder) == weights_of(finished)


class Stops:
    """A meter that is interrupted in the middle of a stage, as by Ctrl-C."""

    def __init__(self, stage: str, after: int) -> None:
        self.name, self.after = stage, after

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        seen = 0

        def advance(steps: int) -> None:
            nonlocal seen
            seen += steps
            if name == self.name and seen >= self.after:
                raise KeyboardInterrupt

        yield advance


@pytest.mark.parametrize(
    ("stage", "finished_before"),
    [("train the predictor", 0), ("fit OneTimeModel (seed 0)", 1), ("fit TokenwiseModel (seed 1)", 7)],
)
def test_an_interrupted_run_goes_on_where_it_was(
    stage: str, finished_before: int, finished: Path, record: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_weather(record, tmp_path, Stops(stage, after=1))
    assert not (tmp_path / "results.json").exists()
    assert len(list(tmp_path.glob("rejectors/*/config.json"))) == finished_before
    run_weather(record, tmp_path)
    assert without_seconds(tmp_path) == without_seconds(finished)
    assert weights_of(tmp_path) == weights_of(finished)


class OtherCosts(ToyTask):
    """The same sequences and losses, but an expert whose tokens cost more."""

    def token_cost(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        return super().token_cost(examples, prefixes, tokens) + 0.5


@pytest.mark.parametrize(
    ("task", "settings", "refitted"),
    [
        (ToyTask(n=40, length=3), {}, []),
        (ToyTask(n=40, length=3), {"alpha": 0.3}, ["OneTimeModel"]),
        (ToyTask(n=40, length=3), {"hand_offs": 2}, ["OneTimeModel", "OneTimeCost"]),
        (ToyTask(n=40, length=3), {"phi": "square"}, ["TokenwiseModel"]),
        (ToyTask(n=40, length=3), {"strategy": "free"}, ["TokenwiseModel"]),
        (ToyTask(n=40, length=3), {"once": replace(TINY.once, units=5)}, ["OneTimeModel", "WholeModelEmbed"]),
        (ToyTask(n=40, length=3), {"cost": replace(TINY.cost, units=5)}, ["OneTimeCost"]),
        (ToyTask(n=39, length=3), {}, [*FITTED]),
        (ToyTask(n=40, length=3, seed=1), {}, [*FITTED]),
        (OtherCosts(n=40, length=3), {}, ["TokenwiseModel"]),
    ],
)
def test_only_the_same_recipe_is_found_again(
    task: ToyTask, settings: dict[str, Any], refitted: list[str], tmp_path: Path
) -> None:
    """Another cost of the expert's tokens once found the rejector that was fitted for the old one."""
    run_toy(ToyTask(n=40, length=3), tmp_path, seeds=1)
    clock = Clock()
    Experiment(task, replace(TINY, seeds=1, **settings), tmp_path, clock).run()
    fitted = [stage.removeprefix("fit ") for stage in clock.seconds if stage.startswith("fit ")]
    assert sorted(fitted) == sorted(refitted)


# -- nothing leaks -------------------------------------------------------------------------------------------------


class OtherTest(ToyTask):
    """The toy with another test split."""

    def split(self, name: SplitName) -> Examples:
        return (
            ToyTask(self.n, self.spec.length, self.vocabulary, seed=9).split(name)
            if name == "test"
            else super().split(name)
        )


def test_nothing_is_fitted_or_chosen_on_test_data(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    first, second = run_toy(ToyTask(n=40, length=3), one), run_toy(OtherTest(n=40, length=3), other)
    assert first.summary["ChowSum"] != second.summary["ChowSum"]
    assert weights_of(one) == weights_of(other)


def test_seeds_draw_disjoint_instances_and_other_weights(tmp_path: Path) -> None:
    task = ToyTask(n=40, length=3)
    rows = Experiment(task, TINY, tmp_path).splits.test_rows()
    assert len(rows) == len(rows.unique()) == 30
    results = run_toy(task, tmp_path)
    assert results.seeds[0].methods["ChowSum"] != results.seeds[1].methods["ChowSum"]
    weights = weights_of(tmp_path)
    assert (
        weights["rejectors/OneTimeModel-seed0/model.safetensors"]
        != weights["rejectors/OneTimeModel-seed1/model.safetensors"]
    )


# -- what can be chosen --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"seeds": 0}, {"instances": 0}, {"resamples": -1}, {"alpha": float("nan")}, {"alpha": float("inf")},
     {"alpha": -1.0}, {"phi": "hinge"}, {"psi": "squared"}, {"strategy": "luck"}],
)  # fmt: skip
def test_settings_are_checked_before_anything_is_done(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=str(next(iter(wrong.values())))):
        replace(TINY, **wrong)


@pytest.mark.parametrize("hand_offs", [-1, 0, 1, 7])
def test_hand_offs_out_of_range(hand_offs: int, tmp_path: Path) -> None:
    """0 once meant all of them."""
    with pytest.raises(OptionError, match="choose from 2 to 6"):
        Experiment(ToyTask(n=4), replace(TINY, hand_offs=hand_offs), tmp_path)


def test_too_many_instances_are_refused_before_labelling(tmp_path: Path) -> None:
    clock = Clock()
    with pytest.raises(DataError, match="the test split has 40 examples, 2 seeds x 21"):
        Experiment(ToyTask(n=40), replace(TINY, instances=21), tmp_path, clock).run()
    assert clock.seconds == {}


def test_presets_are_the_papers() -> None:
    paper, quick = (experiment_settings(load_task("weather"), preset) for preset in ("paper", "quick"))
    assert (paper.token, paper.once) == (PRESETS["mwp-token"], PRESETS["mwp-once"])
    assert (paper.seeds, paper.instances) == (5, 100)
    assert (quick.token.units, quick.once.units) == (paper.token.units, paper.once.units)
    assert quick.seeds < paper.seeds
    assert quick.token.epochs < paper.token.epochs


def test_tasks_are_found_by_name() -> None:
    assert "weather" in find_tasks()
    assert load_task("weather") is ENTRY
    with pytest.raises(OptionError, match=r"unknown task 'tps'; available: .*weather"):
        load_task("tps")


def test_devices() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda")
    for name in ("tpu", "cpu:x", "meta"):
        with pytest.raises(OptionError, match="device"):
            choose_device(name)
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="device 'cuda' is not on this machine; use --device auto"):
            choose_device("cuda")


def test_only_the_methods_that_are_asked_for(tmp_path: Path) -> None:
    settings = replace(ExperimentSettings(), seeds=1, instances=8, methods=("ChowMean", "OneTimeModel"))
    results = Experiment(ToyTask(n=40), settings, tmp_path).run()
    references = {"Random", "OptimalWhole", "OptimalOneTime", "OptimalToken"}
    assert set(results.summary) == {"ChowMean", "OneTimeModel"} | references
    assert [path.name for path in (tmp_path / "rejectors").iterdir()] == ["OneTimeModel-seed0"]
    assert [(row.method, row.against) for row in results.comparisons] == [("OneTimeModel", "ChowMean")]


def test_a_method_that_does_not_apply_is_refused(tmp_path: Path) -> None:
    settings = replace(ExperimentSettings(), seeds=1, instances=8, methods=("TokenwiseModel",))
    with pytest.raises(OptionError, match="'TokenwiseModel' does not apply to task 'toy'; available: ChowMean, "):
        Experiment(WithExpert(completing, n=20), settings, tmp_path).run()
    assert not list(tmp_path.iterdir())


def test_resumed_equals_fresh_with_lazily_grown_trees(tmp_path: Path) -> None:
    """What earlier fits had grown used to enter the next fit's standardisation."""
    task = ToyTask(n=40, length=14)
    settings = replace(ExperimentSettings(), seeds=2, instances=10, methods=("TokenwiseModel",))
    settings = replace(settings, token=replace(settings.token, epochs=2))
    fresh = Experiment(task, settings, tmp_path).run()
    shutil.rmtree(tmp_path / "rejectors" / "TokenwiseModel-seed1")
    resumed = Experiment(task, settings, tmp_path).run()
    assert [seed.methods for seed in resumed.seeds] == [seed.methods for seed in fresh.seeds]


# -- OneTimeCost ---------------------------------------------------------------------------------------------------


def test_the_curve_of_one_time_cost_is_that_of_its_rejector(tmp_path: Path) -> None:
    """Every price, recomputed from the files of the run: the hand-offs it leads to are points of the curve."""
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
            kept = choose_by_cost(rejector.score(drafted), experiment_.grid, drafted.sequences.lengths, price)
            x, y = (float(part.gather(1, kept[:, None]).double().mean()) for part in (table.deferred, table.loss))
            assert (round(x, 6), round(y, 6)) in curve or x > most


def test_one_time_cost_is_compared_with_what_defers_no_finer(results: Results) -> None:
    against = {one.against for one in results.comparisons if one.method == "OneTimeCost"}
    assert against >= {"OneTimeModel", "OneTimeScore", "WholeModelEmbed", "ChowSum"}
    assert not against & {"TokenwiseModel", "OneTimeCost"}
    assert any(note.startswith("OneTimeCost") for note in results.notes)


# -- drawings of examples ------------------------------------------------------------------------------------------


class Draws(ToyTask):
    """Notes what it is asked to draw."""

    def __init__(self, drawn: str = "<p>drawn</p>", **sizes: Any) -> None:
        super().__init__(**sizes)
        self.drawn, self.asked = drawn, list[tuple[Examples, dict[float, Rollout]]]()

    def draw(self, examples: Examples, rollouts: Mapping[float, Rollout]) -> str:
        self.asked.append((examples, dict(rollouts)))
        return self.drawn


def run_drawn(task: Draws, folder: Path, **settings: Any) -> str:
    """Runs as the command does; the report."""
    entry = TaskEntry("toy", "a toy", {}, lambda *_: task)
    run_task(entry, None, replace(TINY, **settings), folder, device="cpu")
    return (folder / "report.html").read_text(encoding="utf-8")


def kept_by(rollout: Rollout) -> Tensor:
    """Tokens before the hand-off: all of a row that was not handed off."""
    return (rollout.sequences.mask() & ~rollout.by_expert).sum(1)


def test_a_task_draws_its_first_test_examples_at_rising_budgets(tmp_path: Path) -> None:
    task = Draws(n=40)
    assert "<p>drawn</p>" in run_drawn(task, tmp_path, methods=("OneTimeCost",))
    assert (tmp_path / "examples.html").read_text() == "<p>drawn</p>"
    ((examples, rollouts),) = task.asked  # once, whatever the number of seeds
    experiment_ = Experiment(task, TINY, tmp_path)
    validation, test = experiment_.splits.validation, experiment_.splits.test
    assert examples.ids.tolist() == test.examples.ids[:3].tolist()
    assert list(rollouts) == sorted(rollouts) == list(BUDGETS)
    rejector = load_rejector(tmp_path / "rejectors" / "OneTimeCost-seed0")
    assert isinstance(rejector, DraftNetwork)
    lengths = validation.draft.sequences.lengths
    for budget, rollout in rollouts.items():
        found = cost_price_for(budget, rejector.score(validation.draft), experiment_.grid, lengths, validation.table)
        first = test.draft.select(torch.arange(3))
        kept = choose_by_cost(rejector.score(first), experiment_.grid, first.sequences.lengths, found.threshold)
        expected = roll_out(task.predictor, task.expert, examples, HandOff(kept), task.spec)
        assert torch.equal(rollout.sequences.tokens, expected.sequences.tokens)
        assert torch.equal(rollout.by_expert, expected.by_expert)
    for one, other in pairwise(rollouts.values()):
        assert bool((kept_by(one) >= kept_by(other)).all())


def test_drawings_are_by_token_where_that_is_learned(tmp_path: Path) -> None:
    task = Draws(n=40)
    run_drawn(task, tmp_path, methods=("OneTimeCost", "TokenwiseModel"))
    ((examples, rollouts),) = task.asked
    rejector = load_rejector(tmp_path / "rejectors" / "TokenwiseModel-seed0", task.predictor)
    validation = Experiment(task, TINY, tmp_path).splits.validation
    assert validation.trees is not None
    swept = sweep_thresholds(rejector, validation.trees)
    for budget, rollout in rollouts.items():
        policy = Threshold(rejector, threshold_for(budget, swept).threshold)
        expected = roll_out(task.predictor, task.expert, examples, policy, task.spec)
        assert torch.equal(rollout.by_expert, expected.by_expert)
        assert torch.equal(rollout.sequences.tokens, expected.sequences.tokens)


def test_drawings_follow_the_odds_where_costs_are_not_learned(tmp_path: Path) -> None:
    task = Draws(n=40)
    run_drawn(task, tmp_path, methods=("OneTimeModel",))
    ((_, rollouts),) = task.asked
    experiment_ = Experiment(task, TINY, tmp_path)
    validation, test = experiment_.splits.validation, experiment_.splits.test
    rejector = load_rejector(tmp_path / "rejectors" / "OneTimeModel-seed0")
    assert isinstance(rejector, DraftNetwork)
    for budget, rollout in rollouts.items():
        lengths = validation.draft.sequences.lengths
        found = once_threshold_for(
            budget, rejector.score(validation.draft), experiment_.grid, lengths, validation.table
        )
        first = test.draft.select(torch.arange(3))
        kept = choose_hand_off(rejector.score(first), experiment_.grid, found.threshold)
        assert torch.equal(kept_by(rollout), torch.minimum(kept, first.sequences.lengths))


def test_notes_tell_of_what_was_run(tmp_path: Path) -> None:
    notes = run_toy(ToyTask(n=40), tmp_path, seeds=1, methods=("OneTimeCost",)).notes
    assert [note.split()[0] for note in notes] == ["OneTimeCost"]


@pytest.mark.parametrize("is_papers", [True, False])
def test_the_papers_figures_stand_beside_the_papers_task_alone(is_papers: bool, tmp_path: Path) -> None:
    task = ToyTask(n=40)
    task.name, task.is_papers = "tsp", is_papers
    results = run_toy(task, tmp_path, seeds=1, methods=("ChowMean",))
    assert bool(results.paper) is is_papers
    assert any("The paper's figures" in note for note in results.notes) is is_papers


def test_drawings_of_an_earlier_run_go(tmp_path: Path) -> None:
    """Where OneTimeCost is not run nothing is drawn; what lay in the folder came from other settings."""
    run_drawn(Draws(n=40), tmp_path)
    task = Draws(n=40)
    assert "<p>drawn</p>" not in run_drawn(task, tmp_path, methods=("ChowMean",))
    assert task.asked == []
    assert not (tmp_path / "examples.html").exists()


def test_a_drawing_that_could_do_more_stays_out_of_the_report(tmp_path: Path) -> None:
    report = run_drawn(Draws("<p>drawn</p><script>alert(1)</script>", n=40), tmp_path)
    assert "<p>drawn</p>" not in report
    assert "alert(1)" not in report


# -- labels are kept -----------------------------------------------------------------------------------------------


def named(task: ToyTask) -> FunctionExpert:
    expert = completing(task)
    expert.fingerprint = "toy"
    return expert


def test_a_run_that_goes_on_asks_the_expert_nothing(tmp_path: Path, spy: Callable[[Any, str], list[Any]]) -> None:
    task = WithExpert(named, n=40, length=4)
    fresh = run_toy(task, tmp_path)
    assert len(list((tmp_path / "labels").glob("*.safetensors"))) == 3  # train, validation, test
    assert fresh.provenance.expert_calls.made > 0
    shutil.rmtree(tmp_path / "rejectors")
    asked = spy(task.expert, "complete")
    again = run_toy(task, tmp_path)
    assert asked == []
    assert again.seeds == fresh.seeds
    assert again.provenance.expert_calls == fresh.provenance.expert_calls
    more = run_toy(task, tmp_path, seeds=1)  # other test instances: only their labels are new
    assert {int(one) for examples, *_ in asked for one in examples.ids} <= set(task.split("test").ids.tolist())
    assert asked
    assert set(more.summary) == set(fresh.summary)


def test_an_expert_without_a_name_keeps_no_labels(tmp_path: Path) -> None:
    run_toy(WithExpert(completing, n=30, length=4), tmp_path, instances=10)
    assert {path.name for path in tmp_path.iterdir()} == {"rejectors"}


# -- what networks start from --------------------------------------------------------------------------------------


def entry_for(hyperparameters: str) -> TaskEntry:
    return replace(ENTRY, hyperparameters=hyperparameters)


@pytest.mark.parametrize(
    ("hyperparameters", "once", "cost"),
    [("mwp", PRESETS["mwp-once"], PERCEPTRON), ("xsum", TRANSFORMER, TRANSFORMER), ("tsp", TRANSFORMER, TRANSFORMER)],
)
def test_what_scores_drafts_by_task_and_by_choice(hyperparameters: str, once: Settings, cost: Settings) -> None:
    entry = entry_for(hyperparameters)
    usual = experiment_settings(entry, "paper")
    assert (usual.once, usual.cost) == (once, cost)
    by_perceptron = experiment_settings(entry, "paper", "draft_mlp")
    assert (by_perceptron.once, by_perceptron.cost) == (PRESETS[f"{hyperparameters}-once"], PERCEPTRON)
    by_attention = experiment_settings(entry, "paper", "draft_transformer")
    assert by_attention.once == by_attention.cost == TRANSFORMER
    assert by_perceptron.token == by_attention.token == usual.token


def test_the_papers_network_by_token_comes_with_the_papers_hyperparameters() -> None:
    entry = entry_for("xsum")
    assert experiment_settings(entry, "paper").token == BY_FACTS
    assert experiment_settings(entry, "paper", architecture="lstm").token == PRESETS["xsum-token"]
    assert experiment_settings(entry, "paper", architecture="mlp").token == BY_FACTS
    assert experiment_settings(entry_for("mwp"), "paper", architecture="mlp").token == replace(
        PRESETS["mwp-token"], architecture="mlp"
    )


@pytest.mark.parametrize("hyperparameters", ["mwp", "xsum", "tsp"])
@pytest.mark.parametrize("architecture", [None, "draft_mlp", "draft_transformer"])
def test_quick_settings_are_the_same_but_smaller(hyperparameters: str, architecture: str | None) -> None:
    """And every one of them makes a network."""
    paper, quick = (experiment_settings(entry_for(hyperparameters), one, architecture) for one in ("paper", "quick"))
    drafted = draft(ToyTask(n=4).predictor, ToyTask(n=4).split("train"), ToyTask(n=4).spec)
    for one, other in ((paper.once, quick.once), (paper.cost, quick.cost)):
        assert one.architecture == other.architecture
        assert other.epochs < one.epochs
        assert other.units * other.layers <= one.units * one.layers
        for settings in (one, other):
            sizes = Sizes(2, 3, 5, True, settings.layers, settings.units, settings.dropout, (0, 5))
            assert DRAFT_NETWORKS[settings.architecture](sizes, "toy").eval().score(drafted).shape == (4, 2)


def test_hyperparameters_and_architectures_that_nobody_knows() -> None:
    with pytest.raises(
        OptionError,
        match=r"unknown hyperparameters of task 'weather' 'table 9'; available: mwp, pronounce, tsp, xsum",
    ):
        experiment_settings(entry_for("table 9"), "quick")
    message = "unknown architecture by draft 'lstm'; available: draft_mlp, draft_transformer"
    with pytest.raises(OptionError, match=message):
        experiment_settings(ENTRY, "quick", "lstm")
    with pytest.raises(OptionError, match="unknown token-level architecture 'gru'; available: lstm, mlp"):
        experiment_settings(ENTRY, "quick", architecture="gru")


def test_attention_over_drafts_from_end_to_end(tmp_path: Path) -> None:
    small = replace(TINY.cost, architecture="draft_transformer", units=16, epochs=2)
    results = run_toy(ToyTask(n=30), tmp_path, seeds=1, once=small, cost=small)
    assert set(results.summary) >= ONCE
    for name in ("WholeModelEmbed", "OneTimeModel", "OneTimeCost"):
        assert load_rejector(tmp_path / "rejectors" / f"{name}-seed0").kind == "draft_transformer"
