"""`seqdefer reproduce` from end to end on toys: what it leaves behind, that it goes on where it was stopped, that what
it prints is what plain experiments measure, and that every choice is made without test data."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from test_experiment import FITTED, OPTIMAL
from test_lab import ENTRIES, PLAN, RESAMPLES, SEEDS, Spy, Toy, ToyOptions, cells_of, contents, install

from seqdefer import cli, experiment, splits
from seqdefer.curves import Ends, Run, Sweep, paired_bootstrap
from seqdefer.engine import draft
from seqdefer.environment import Clock
from seqdefer.experiment import Experiment
from seqdefer.interfaces import Task
from seqdefer.labelling import jobs
from seqdefer.labels import hand_off_table
from seqdefer.losses import rule_of_thumb
from seqdefer.reproduction import command, studies
from seqdefer.reproduction.claims import CLAIMS, judge
from seqdefer.reproduction.command import Choices, reproduce
from seqdefer.reproduction.lab import USUAL, Lab, Variant
from seqdefer.reproduction.plan import STUDIES, ablated_settings, settings_of
from seqdefer.reproduction.records import (
    Contrast,
    Judgements,
    Line,
    Row,
    Study,
    load_judgements,
    load_origins,
    load_study,
)
from seqdefer.results import Results
from seqdefer.settings import GRANULARITY, METHODS, ExperimentSettings
from seqdefer.shards import DamagedShardWarning
from seqdefer.splits import Splits
from seqdefer.testing.fakes import blank_prefixes

TINY = Choices("tiny", figures=False)
DRAWN = [".pdf", ".svg"] if find_spec("matplotlib") else []
VARYING = {"origins.json"}  # it tells seconds
LABELLING = ("label hand-offs", "label decisions")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


@dataclass(frozen=True)
class Finished:
    folder: Path
    made: Mapping[str, Study]


@pytest.fixture(scope="module")
def finished(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """All studies, made at one go. Nobody may change the folder."""
    folder = tmp_path_factory.mktemp("finished")
    return Finished(folder, reproduce("all", folder, replace(TINY, figures=bool(DRAWN)), command="seqdefer ..."))


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Path:
    """The finished folder, to do with as one likes."""
    return Path(shutil.copytree(finished.folder, tmp_path / "copy"))


def final_files(folder: Path) -> dict[str, bytes]:
    """What is for people; the tasks' own folders hold what it was made from."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name not in VARYING}


def same_but_for_drawings(folder: Path, finished: Finished) -> bool:
    expected = final_files(finished.folder)
    return final_files(folder) == {name: data for name, data in expected.items() if Path(name).suffix not in DRAWN}


def rows_of(study: Study, task: str, method: str | None = None) -> list[Row]:
    return [row for row in study.rows if row.task == task and method in (None, row.method)]


# -- what it leaves behind -----------------------------------------------------------------------------------------


def test_files_of_a_reproduction(finished: Finished) -> None:
    studies_files = {f"{name}{ending}" for name in STUDIES for ending in [".json", ".csv", ".tex", *DRAWN]}
    verdicts = {f"verdicts{ending}" for ending in (".json", ".csv", ".tex", ".md")}
    assert {*final_files(finished.folder), *VARYING} == studies_files | verdicts | VARYING
    assert {path.name for path in finished.folder.iterdir() if path.is_dir()} == set(PLAN.tasks)
    assert not list(finished.folder.rglob(".*"))  # nothing written aside was left
    assert all(data for data in final_files(finished.folder).values())


def test_records_come_back_as_they_were(finished: Finished) -> None:
    assert list(finished.made) == list(STUDIES)
    for name, study in finished.made.items():
        assert study.name == name
        assert load_study(finished.folder / f"{name}.json") == study
    judgements = Judgements("tiny", SEEDS, tuple(judge(finished.made)))
    assert load_judgements(finished.folder / "verdicts.json") == judgements


def test_tables_for_other_programs_hold_every_figure(finished: Finished) -> None:
    for name, study in finished.made.items():
        with (finished.folder / f"{name}.csv").open(newline="") as file:
            lines = list(csv.DictReader(file))
        if study.lines:
            assert len(lines) == sum(len(line.mean) for line in study.lines)
            continue
        kept = [(line["task"], line["method"], float(line["improvement_mean"])) for line in lines]
        assert kept == [(row.task, row.method, row.improvement_mean) for row in study.rows]


def test_studies_are_of_the_tasks_of_the_plan(finished: Finished) -> None:
    both = ["spell", "solve"]
    expected = {**dict.fromkeys(STUDIES, both), "table-ablation": ["spell"]}
    assert {name: list(study.tasks) for name, study in finished.made.items()} == expected
    for study in finished.made.values():
        assert (study.preset, study.seeds) == ("tiny", SEEDS)
        assert set(study.instances.values()) == {12}
        assert {row.task for row in study.rows} == set(study.tasks)
        assert all(row.paper is None for row in study.rows)  # the paper knows of no toys
        assert all(len(row.improvements) == SEEDS for row in study.rows)


def test_origins_tell_where_the_figures_come_from(finished: Finished) -> None:
    origins = load_origins(finished.folder / "origins.json")
    assert origins.command == "seqdefer ..."
    assert set(origins.tasks) == {"spell", "spell (blind)", "solve"}
    for told in origins.tasks.values():
        assert told.seeds == tuple(range(SEEDS))
        assert told.settings["instances"] == 12
        assert told.data
        assert told.models
        assert told.machine["device"].startswith("cpu")
    fitted = {"spell": {*METHODS}, "spell (blind)": {"TokenwiseModel"}, "solve": {*METHODS[:11]}}
    for task, methods in fitted.items():
        assert set(origins.tasks[task].seconds) - {"label", "oracles"} == methods


def test_every_claim_is_judged_where_it_applies(finished: Finished) -> None:
    judged = {(one.claim, one.task.split(" (")[0]) for one in judge(finished.made)}
    by_token = {claim.name for claim in CLAIMS if "token" in claim.name} | {
        "recurrent-beats-mlp",
        "teacher-forcing-hurts",
    }
    assert judged == {
        (claim.name, task) for claim in CLAIMS for task in PLAN.tasks if task == "spell" or claim.name not in by_token
    }
    known = {one for study in finished.made.values() for one in study.contrasts}
    for judgement in judge(finished.made):
        for one in judgement.contrasts:
            assert one in known


# -- stopped and gone on with --------------------------------------------------------------------------------------


class StopsOnceInEach:
    """A meter that is interrupted in the middle of every stage that it has not seen yet, as by Ctrl-C."""

    def __init__(self) -> None:
        self.seen = set[str]()

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        def advance(steps: int) -> None:
            if name not in self.seen:
                self.seen.add(name)
                raise KeyboardInterrupt

        yield advance


def test_stopped_in_each_stage_in_turn(finished: Finished, tmp_path: Path) -> None:
    meter, made = StopsOnceInEach(), dict[str, Study]()
    while not made:
        before = len(meter.seen)
        with suppress(KeyboardInterrupt):
            made = reproduce("all", tmp_path, TINY, meter=meter)
        assert made or len(meter.seen) == before + 1
    labels = {f"{what} ({part})" for what in LABELLING for part in ("train", "validation", "test")}
    fits = {f"fit {method} (seed {seed})" for method in FITTED for seed in range(SEEDS)}
    sweeps = {f"sweep thresholds (seed {seed})" for seed in range(SEEDS)}
    assert meter.seen == labels | fits | sweeps | {f"bootstrap ({task})" for task in PLAN.tasks}
    assert same_but_for_drawings(tmp_path, finished)
    if DRAWN:
        reproduce("all", tmp_path, replace(TINY, figures=True))
        assert final_files(tmp_path) == final_files(finished.folder)


def test_stopped_between_studies(copied: Path, finished: Finished) -> None:
    def stop(study: Any, paths: list[Path]) -> None:
        if study.name == "table-handoffs":
            raise KeyboardInterrupt

    for name in final_files(copied):
        (copied / name).unlink()
    with pytest.raises(KeyboardInterrupt):
        reproduce("all", copied, TINY, written=stop)
    assert (copied / "table-handoffs.json").is_file()
    assert not (copied / "figure-alpha.json").exists()
    reproduce("all", copied, TINY)
    assert same_but_for_drawings(copied, finished)


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import pytest, torch
from test_lab import cells_of, install
from test_reproduction import TINY
from seqdefer.reproduction.command import reproduce

torch.optim.AdamW([torch.zeros(1)]).zero_grad()  # loads much, once for all forks
install(pytest.MonkeyPatch())
folder, chance = Path(sys.argv[1]), random.Random(0)
for wanted in sorted(chance.sample(range(int(sys.argv[2])), 4)) + [None]:
    child = os.fork()
    if not child:
        reproduce("all", folder, TINY)
        os._exit(0)
    while wanted is not None and len(cells_of(folder)) < wanted:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before it was killed"
        time.sleep(0.01)
    if wanted is not None:
        time.sleep(chance.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the process that is killed is a fork")
def test_killed_at_random_moments_and_finished(finished: Finished, tmp_path: Path) -> None:
    """For real, by SIGKILL: nothing is cleaned up after it. The moments are numbers of cells that are there."""
    arguments = [str(tmp_path / "out"), str(len(cells_of(finished.folder)))]
    process = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments],
        capture_output=True, text=True, check=False, timeout=300, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert [int(status) for status in process.stdout.split()] == [9] * 4 + [0]
    assert same_but_for_drawings(tmp_path / "out", finished)
    assert {path.name for path in cells_of(tmp_path / "out")} == {path.name for path in cells_of(finished.folder)}


# -- shared between studies ----------------------------------------------------------------------------------------


@pytest.fixture
def work(spy: Spy) -> dict[str, list[tuple[Any, ...]]]:
    """Every fit, every labelling, every rejector that is loaded."""
    fits = ("fit_whole", "fit_once", "fit_cost", "fit_token", "load_rejector")
    labels = {"draft": jobs, "hand_off_table": jobs, "enumerate_trees": splits}
    return {name: spy(owner, name) for name, owner in (dict.fromkeys(fits, experiment) | labels).items()}


def done(work: dict[str, list[tuple[Any, ...]]]) -> dict[str, int]:
    """How often, since this was asked last. A rejector is looked for before it is fitted."""
    counts = {name: len(calls) for name, calls in work.items() if calls and name != "load_rejector"}
    for calls in work.values():
        calls.clear()
    return counts


def test_studies_share_cells(tmp_path: Path, work: dict[str, list[tuple[Any, ...]]]) -> None:
    labels = {"draft": 6, "hand_off_table": 6, "enumerate_trees": 3}  # three splits of two tasks, trees of one
    reproduce("table1", tmp_path, TINY)
    assert done(work) == {"fit_whole": 4, "fit_once": 4, "fit_cost": 4, "fit_token": 2, **labels}
    reproduce("figure-curves", tmp_path, TINY)
    assert done(work) == {}
    reproduce("table-handoffs", tmp_path, TINY)
    sizes = [len(grid) for _, _, grid, *_ in work["fit_once"] + work["fit_cost"]]
    assert set(sizes) == {2, 3}  # with L + 1 = 4 and 5 they are in table 1
    assert done(work) == {"fit_once": 8, "fit_cost": 8, **labels}
    reproduce("figure-alpha", tmp_path, TINY)  # three times; the rule of thumb is in table 1
    assert done(work) == {"fit_once": 12, **labels}
    reproduce("table-ablation", tmp_path, TINY)  # two architectures, three strategies, two sets of inputs
    assert done(work) == {"fit_token": 24, "draft": 6, "hand_off_table": 6, "enumerate_trees": 6}


def test_what_is_there_is_not_made_again(
    copied: Path, finished: Finished, work: dict[str, list[tuple[Any, ...]]]
) -> None:
    before = cells_of(copied)
    assert reproduce("all", copied, TINY) == finished.made
    assert not any(work.values())
    assert cells_of(copied) == before
    assert final_files(copied) == final_files(finished.folder)


def test_neither_order_nor_other_tasks_matter(finished: Finished, tmp_path: Path) -> None:
    for name in ("figure-alpha", "table-handoffs", "table1"):
        study = reproduce(name, tmp_path, replace(TINY, tasks=("solve",)))[name]
        assert list(study.tasks) == ["solve"]
        assert list(study.rows) == rows_of(finished.made[name], "solve")


def test_more_seeds_use_the_cells_of_fewer(
    copied: Path, finished: Finished, work: dict[str, list[tuple[Any, ...]]]
) -> None:
    fewer = reproduce("table1", copied, replace(TINY, seeds=1))["table1"]
    assert not any(work.values())
    more = reproduce("table1", copied, replace(TINY, seeds=3))["table1"]
    assert {name: n for name, n in done(work).items() if name.startswith("fit_")} == {
        "fit_whole": 2, "fit_once": 2, "fit_cost": 2, "fit_token": 1,
    }  # fmt: skip
    for one, two, three in zip(fewer.rows, finished.made["table1"].rows, more.rows, strict=True):
        assert two.improvements == three.improvements[:2]
        assert one.improvements == three.improvements[:1]


def test_damaged_cells_are_made_again(copied: Path, finished: Finished) -> None:
    for place, path in enumerate(sorted(cells_of(copied))[::3]):
        path.write_bytes(path.read_bytes()[: 10 * (place % 7)])
    with pytest.warns(DamagedShardWarning, match="is damaged: .*; it is removed and made again"):
        assert reproduce("all", copied, TINY) == finished.made
    assert final_files(copied) == final_files(finished.folder)


# -- the slow way --------------------------------------------------------------------------------------------------


def settings_of_toy(name: str, **changes: Any) -> ExperimentSettings:
    return replace(settings_of(ENTRIES[name], PLAN.tasks[name], SEEDS), **changes)


def toy(name: str, **changes: Any) -> Toy:
    return Toy(name, replace(ENTRIES[name].presets["tiny"], **changes))


def assert_same_figures(row: Row, results: Results) -> None:
    """Bit by bit: the same sums in the same order."""
    summary = results.summary[row.method]
    ours = (row.audc_mean, row.audc_std, row.improvement_mean, row.improvement_std)
    assert ours == (summary.audc_mean, summary.audc_std, summary.improvement_mean, summary.improvement_std)
    assert row.improvements == tuple(seed.methods[row.method].improvement for seed in results.seeds)


@pytest.fixture(scope="module", params=["spell", "solve"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What `seqdefer run` measures."""
    name: str = request.param
    return Experiment(toy(name), settings_of_toy(name), tmp_path_factory.mktemp("plain")).run()


def test_table_1_is_what_a_run_measures(plain: Results, finished: Finished) -> None:
    rows = rows_of(finished.made["table1"], plain.task)
    assert [row.method for row in rows] == list(plain.summary)
    assert {row.method for row in rows} >= {"Random", "OptimalWhole", "OptimalOneTime", *FITTED[:3]}
    for row in rows:
        assert_same_figures(row, plain)
        assert row.is_default
    assert rows == rows_of(finished.made["figure-curves"], plain.task)


def test_contrasts_of_table_1_are_those_of_a_run(plain: Results, finished: Finished) -> None:
    told = {(one.first, one.second): one for one in finished.made["table1"].contrasts if one.task == plain.task}
    for one in plain.comparisons:
        ours = told.pop((one.method, one.against))
        assert ours.difference == one.difference
        assert ours.low <= ours.difference <= ours.high  # wider as a rule: runs are drawn, too
    assert {first for first, _ in told} <= {"WholeModelEmbed", "TokenwiseScore", "TokenwiseEntropy"}
    assert all(GRANULARITY[second] == "whole" for _, second in told)


class Apart:
    """Variants of one task, each fitted and swept by an experiment of its own."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task, self.folder = task, folder
        self.splits = Splits(task, folder, seeds=SEEDS, instances=12)
        self.runs = [dict[str, Sweep]() for _ in range(SEEDS)]

    def measure(self, label: str, method: str, **changes: Any) -> Results:
        settings = settings_of_toy(self.task.name, methods=(method,), **changes)
        plain = Experiment(self.task, settings, self.folder, splits=self.splits, variant=label)
        results = plain.run()
        for seed, sweeps in enumerate(self.runs):
            rejectors = plain.fit(self.splits.train, self.splits.validation, seed)
            sweeps[label] = plain.sweep(seed, rejectors).sweeps[method]
        return results

    def contrast(self, first: str, second: str) -> Contrast:
        test, splits = self.splits.test.table, self.splits
        runs = [Run(Ends.of(test.select(splits.rows(seed))), sweeps) for seed, sweeps in enumerate(self.runs)]
        found = paired_bootstrap(runs, first, second, n_resamples=RESAMPLES, over_runs=True)
        return Contrast(self.task.name, first, second, found.difference, found.low, found.high)


def assert_same_contrasts(study: Study, apart: Apart) -> None:
    """All that are between the variants."""
    labels = set(apart.runs[0])
    told = [one for one in study.contrasts if one.task == apart.task.name and {one.first, one.second} <= labels]
    assert {label for one in told for label in (one.first, one.second)} == labels
    assert told == [apart.contrast(one.first, one.second) for one in told]


@pytest.mark.parametrize("name", ["spell", "solve"])
def test_hand_offs_are_what_experiments_with_that_many_measure(name: str, finished: Finished, tmp_path: Path) -> None:
    study, apart = finished.made["table-handoffs"], Apart(toy(name), tmp_path)
    rows = rows_of(study, name)
    for row in rows:
        size = row.varied["hand_offs"]
        assert_same_figures(row, apart.measure(f"{row.method}, |J| = {size}", row.method, hand_offs=size))
        assert row.is_default is (size == apart.task.spec.length + 1)
    methods = ("OneTimeModel", "OneTimeCost", "OneTimeScore", "OneTimeEntropy")
    sizes = (2, 3, apart.task.spec.length + 1)
    assert [(row.varied["hand_offs"], row.method) for row in rows] == list(product(sizes, methods))
    assert_same_contrasts(study, apart)


@pytest.mark.parametrize("name", ["spell", "solve"])
def test_alphas_are_what_experiments_with_that_alpha_measure(name: str, finished: Finished, tmp_path: Path) -> None:
    study, apart = finished.made["figure-alpha"], Apart(toy(name), tmp_path)
    for row in rows_of(study, name):
        label = f"OneTimeModel, alpha = {row.varied['alpha']:.4g}{' (rule of thumb)' if row.is_default else ''}"
        told = {} if row.is_default else {"alpha": row.varied["alpha"]}  # the rule of thumb needs not be told
        assert_same_figures(row, apart.measure(label, "OneTimeModel", **told))
    assert len(apart.runs[0]) == len(PLAN.times) + 1
    assert_same_contrasts(study, apart)


@pytest.mark.parametrize("inputs", ["blind", "own"])
def test_the_ablation_is_what_experiments_with_those_settings_measure(
    inputs: str, finished: Finished, tmp_path: Path
) -> None:
    study, apart = finished.made["table-ablation"], Apart(toy("spell", blind=inputs == "blind"), tmp_path)
    for row in study.rows:
        if row.varied.get("inputs") == inputs:
            architecture, strategy = row.varied["architecture"], row.varied["strategy"]
            chosen = ablated_settings(ENTRIES["spell"], settings_of_toy("spell"), architecture, strategy)
            label = f"{architecture.upper()}, {strategy}, {inputs}"
            changes = {"token": chosen.token, "strategy": strategy}
            assert_same_figures(row, apart.measure(label, "TokenwiseModel", **changes))
    assert len(apart.runs[0]) == 6
    assert_same_contrasts(study, apart)


def test_the_ablation_has_the_baselines_of_table_1(finished: Finished) -> None:
    for name in ("TokenwiseScore", "TokenwiseEntropy"):
        (ours,), (usual,) = (rows_of(finished.made[study], "spell", name) for study in ("table-ablation", "table1"))
        assert ours == usual


# -- curves --------------------------------------------------------------------------------------------------------


def alone(task: Task) -> tuple[float, float]:
    """Mean losses of the predictor alone and of the expert alone, on the test instances of each seed."""
    examples = task.split("test")
    drawn = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))[: SEEDS * 12]
    examples = examples.select(drawn)
    drafted = draft(task.predictor, examples, task.spec).sequences
    completed = task.expert.complete(examples, blank_prefixes(examples, task.spec), task.spec)
    losses = [task.sequence_loss(examples, written).double().view(SEEDS, 12) for written in (drafted, completed)]
    return float(losses[0].mean()), float(losses[1].mean())


def lines_of(study: Study, task: str) -> dict[str, Line]:
    return {line.method: line for line in study.lines if line.task == task}


@pytest.mark.parametrize("name", ["spell", "solve"])
def test_curves_run_from_the_predictor_alone_to_the_expert_alone(name: str, finished: Finished) -> None:
    lines = lines_of(finished.made["figure-curves"], name)
    assert set(lines) == {row.method for row in rows_of(finished.made["table1"], name)}
    first, last = alone(toy(name))
    for method, line in lines.items():
        assert len(line.deferred) == len(line.mean) == len(line.std) == 101
        assert line.deferred == pytest.approx(np.linspace(0, line.deferred[-1], 101))
        if not method.startswith("Optimal"):  # which may do better at once, and need not spend a budget
            assert (line.mean[0], line.mean[-1]) == pytest.approx((first, last))


@pytest.mark.parametrize("name", ["spell", "solve"])
def test_no_method_beats_its_oracle(name: str, finished: Finished) -> None:
    lines = lines_of(finished.made["figure-curves"], name)
    rows = {row.method: row for row in rows_of(finished.made["table1"], name)}
    for method in set(rows) - set(OPTIMAL.values()):
        oracle = OPTIMAL[GRANULARITY[method]]
        assert np.all(np.array(lines[oracle].mean) <= np.array(lines[method].mean) + 1e-9), method
        pairs = zip(rows[oracle].improvements, rows[method].improvements, strict=True)
        assert all(best >= reached - 1e-9 for best, reached in pairs)


# -- choices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["table-handoffs", "figure-alpha"])
def test_validation_data_choose_one_variant_of_each_method(name: str, finished: Finished) -> None:
    study = finished.made[name]
    for task in study.tasks:
        for method in {row.method for row in rows_of(study, task)}:
            rows = rows_of(study, task, method)
            judged = [row.validation for row in rows]
            assert None not in judged
            (chosen,) = (row for row in rows if row.is_chosen)
            assert chosen.validation == max(value for value in judged if value is not None)


def test_only_variants_are_chosen_among(finished: Finished) -> None:
    for name in ("table1", "figure-curves", "table-ablation"):
        assert not any(row.is_chosen for row in finished.made[name].rows)


def judged_row(value: float | None, size: int, method: str = "OneTimeModel") -> Row:
    return Row("toy", method, "once", 1.0, 0.0, 1.0, 0.0, (1.0,), {"hand_offs": size}, validation=value)


@pytest.mark.parametrize(
    ("judged", "chosen"),
    [([1.0, 3.0, 2.0], 1), ([2.0, 1.0, 2.0], 0), ([-1.0, -1.0], 0), ([None, -5.0, None], 1), ([None, None], None)],
)
def test_one_is_chosen_even_among_equals(judged: Sequence[float | None], chosen: int | None) -> None:
    """All that were equally good used to be marked; a claim then took the first, a figure circled them all."""
    rows = [judged_row(value, size) for size, value in enumerate(judged)]
    others = [judged_row(100.0, 9, "OneTimeCost")]  # another method's figures are another matter
    found = studies._with_choices(studies.Part([*rows, *others], [], []))
    assert [row.is_chosen for row in found.rows] == [place == chosen for place in range(len(rows))] + [True]


def training_table(task: Task) -> Any:
    examples = task.split("train")
    return hand_off_table(task, examples, draft(task.predictor, examples, task.spec))[0]


def assert_alphas_agree(study: Study, task: Task, times: Sequence[float]) -> None:
    table, rows = training_table(task), rows_of(study, task.name)
    gain = float((table.loss[:, -1] - table.loss[:, 0]).double().mean())
    unit = gain if gain > 0 else 1.0
    for row in rows:
        varied = row.varied
        assert varied["alpha"] == pytest.approx(varied["times"] * unit)
        assert varied["alpha_token"] == pytest.approx(varied["alpha"] / task.spec.length)
    (rule,) = (row for row in rows if row.is_default)
    assert rule.varied["alpha"] == rule_of_thumb(table)
    others = sorted(one for one in times if one * unit != rule.varied["alpha"])
    assert sorted(row.varied["times"] for row in rows if row is not rule) == pytest.approx(others)
    assert [row.varied["alpha"] for row in rows] == sorted(row.varied["alpha"] for row in rows)


@pytest.mark.parametrize("name", ["spell", "solve"])
def test_alphas_agree_with_the_rule_of_thumb(name: str, finished: Finished) -> None:
    assert_alphas_agree(finished.made["figure-alpha"], toy(name), PLAN.times)


@pytest.mark.parametrize(("slips", "gains"), [("2", True), ("0", False)])
def test_a_rule_of_thumb_of_zero(slips: str, gains: bool, tmp_path: Path) -> None:
    """A predictor that is seldom beaten: the median gain is 0, and where the mean is none either, alpha is plain."""
    choices = replace(TINY, tasks=("spell",), options={"spell": {"slips": slips}})
    study = reproduce("figure-alpha", tmp_path, choices)["figure-alpha"]
    assert_alphas_agree(study, toy("spell", slips=int(slips)), PLAN.times)
    (rule,) = (row for row in study.rows if row.is_default)
    assert (rule.varied["alpha"], rule.varied["times"]) == (0, 0)
    assert sum(row.varied["alpha"] == 0 for row in study.rows) == 1  # one of those that are tried anyway, but once
    assert all(one.first != one.second for one in study.contrasts)
    assert sum(row.is_chosen for row in study.rows) == 1
    assert (max(row.varied["alpha"] for row in study.rows) == max(PLAN.times)) is not gains


def test_validation_figures_are_means_over_the_seeds(copied: Path, finished: Finished) -> None:
    """Of the cells' own, which the tests of cells look into."""
    reproduce("table-handoffs", copied, TINY)
    for name in PLAN.tasks:
        lab = Lab(ENTRIES[name], toy(name), settings_of_toy(name), copied / name, Clock())
        for row in rows_of(finished.made["table-handoffs"], name):
            variant = USUAL if row.is_default else Variant(hand_offs=row.varied["hand_offs"])
            judged = [lab.cell(variant, row.method, seed).validation for seed in range(SEEDS)]
            assert row.validation == pytest.approx(np.mean([value for value in judged if value is not None]))


# -- nothing leaks -------------------------------------------------------------------------------------------------


def choices_of(study: Study) -> list[Any]:
    return [(row.task, row.method, dict(row.varied), row.validation, row.is_chosen) for row in study.rows]


def test_no_choice_hangs_on_test_data(finished: Finished, tmp_path: Path) -> None:
    """With other test data all rejectors, validation figures, alphas and choices are the same, and the figures not."""
    other = {name: {"test_seed": "9"} for name in PLAN.tasks}
    made = reproduce("all", tmp_path, replace(TINY, options=other))
    for name, study in made.items():
        usual = finished.made[name]
        assert choices_of(study) == choices_of(usual)
        assert study.notes == usual.notes
        assert [row.improvement_mean for row in study.rows] != [row.improvement_mean for row in usual.rows]
    for task in PLAN.tasks:
        ours, usual_ones = (contents(folder / task / "rejectors") for folder in (tmp_path, finished.folder))
        assert len(ours) > 20
        assert ours == usual_ones
        assert not {path.name for path in cells_of(tmp_path / task)} & {path.name for path in cells_of(finished.folder)}


# -- the command line ----------------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> int:
    return cli.main(["reproduce", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["table2"], "unknown study 'table2'; available: all, figure-alpha, figure-curves, table-ablation, "),
        (["all", "--preset", "huge"], "unknown preset 'huge'; available: paper, quick, tiny"),
        (["all", "--tasks", "spell,sing"], "unknown task of the preset tiny 'sing'; available: solve, spell"),
        (["all", "--set", "sing.n=4"], "unknown task of the preset tiny 'sing'; available: solve, spell"),
        (["all", "--set", "solve.m=4"], "unknown option of solve 'm'; available: blind, by_token, length, n, seed, "),
        (["all", "--set", "spell.n=many"], "--set spell.n=many: it must be of type int"),
        (["all", "--set", "spell.blind=maybe"], "--set spell.blind=maybe: it must be yes or no"),
        (["all", "--set", "spell.n"], "--set spell.n: it must be TASK.OPTION=VALUE, such as "),
        (["all", "--set", "n=4"], "--set n=4: it must be TASK.OPTION=VALUE, such as "),
        (["all", "--set", ".n=4"], "--set .n=4: it must be TASK.OPTION=VALUE, such as "),
        (["all", "--set", "spell.=4"], "--set spell.=4: it must be TASK.OPTION=VALUE, such as "),
        (
            ["all", "--seeds", "4"],
            "the test split has 40 examples, 4 seeds x 12 instances need more; lower ",
        ),
        (["all", "--instances", "21"], "the test split has 40 examples, 2 seeds x 21 instances need more; lower "),
        (["all", "--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["all", "--seeds", "-1"], "--seeds is -1; it must be at least 1"),
        (["all", "--instances", "0"], "--instances is 0; it must be at least 1"),
        (["all", "--seeds", "two"], "argument --seeds: invalid int value: 'two'; see: seqdefer reproduce --help"),
        (["table-ablation", "--tasks", "solve"], "table-ablation has no part on solve; its tasks: spell"),
        (["all", "--device", "tpu"], "unknown device 'tpu'; available: auto, cpu, cuda"),
        (["all", "--what"], "unrecognized arguments: --what; see: seqdefer --help"),
        ([], "the following arguments are required: NAME; see: seqdefer reproduce --help"),
    ],
)
def test_mistakes_are_told_in_one_line_before_any_labelling(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: Capture,
    work: dict[str, list[tuple[Any, ...]]],
) -> None:
    preset = [] if "--preset" in arguments else ["--preset", "tiny"]
    assert run(*arguments, *preset, "--out", tmp_path / "out", "--no-figures") == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert told.err.startswith(f"seqdefer: {words}")
    assert not any(work.values())
    assert not (tmp_path / "out").exists()


def test_options_of_all_tasks_are_read_before_the_first_is_prepared(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A predictor that took an hour to train was trained before a misspelt option of the next task was refused."""
    prepared = []
    noting = {
        name: replace(entry, prepare=lambda *given, entry=entry: prepared.append(1) or entry.prepare(*given))
        for name, entry in ENTRIES.items()
    }
    monkeypatch.setattr(command, "load_task", noting.__getitem__)
    assert run("all", "--preset", "tiny", "--set", "solve.lenght=4", "--out", tmp_path, "--no-figures") == 2
    assert "unknown option of solve 'lenght'" in capsys.readouterr().err
    assert prepared == []


def test_without_matplotlib_figures_are_refused_before_any_work(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, work: dict[str, list[tuple[Any, ...]]]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("table1", "--preset", "tiny", "--out", tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "pip install 'seqdefer[figures]'" in told
    assert not any(work.values())
    assert not (tmp_path / "out").exists()
    assert run("table1", "--preset", "tiny", "--tasks", "solve", "--out", tmp_path / "out", "--no-figures") == 0


def test_json_is_a_document_for_each_study(copied: Path, finished: Finished, capsys: Capture) -> None:
    assert run("all", "--preset", "tiny", "--out", copied, "--json", "--quiet", "--no-figures") == 0
    told = capsys.readouterr()
    printed = [json.loads(line) for line in told.out.splitlines()]
    files = [copied / f"{name}.json" for name in (*STUDIES, "verdicts")]
    assert printed == [json.loads(path.read_text()) for path in files]
    assert final_files(copied) == final_files(finished.folder)
    said = [line.split() for line in told.err.splitlines()]
    assert [words[0] for words in said] == ["written:"] * 6
    for path, words in zip(files, said, strict=True):
        assert str(path) in words
        assert all(Path(word).is_file() for word in words[1:])


def test_tables_are_printed_for_people(copied: Path, finished: Finished, capsys: Capture) -> None:
    assert run("table-ablation", "--preset", "tiny", "--out", copied, "--quiet", "--no-figures") == 0
    told = capsys.readouterr()
    for row in finished.made["table-ablation"].rows:
        assert f"{abs(row.improvement_mean):.2f}" in told.out
    assert all(words in told.out for words in ("LSTM", "MLP", "recurrent", "eacher forcing"))  # verdicts come last
    assert load_origins(copied / "origins.json").command.startswith("seqdefer reproduce table-ablation --preset tiny")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars are drawn: stderr is taken for a terminal."""
    for name, value in {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "1", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.usefixtures("watched")
def test_json_goes_into_a_file_while_bars_are_drawn(copied: Path, capsys: Capture) -> None:
    """rich took what was printed while its bars stood for theirs: `--json > studies.json` left an empty file."""
    assert run("table1", "--preset", "tiny", "--out", copied, "--json", "--no-figures") == 0
    told = capsys.readouterr()
    assert "bootstrap" in told.err
    files = [copied / "table1.json", copied / "verdicts.json"]
    assert [json.loads(line) for line in told.out.splitlines()] == [json.loads(path.read_text()) for path in files]


@pytest.mark.usefixtures("watched")
def test_bars_are_not_drawn_over_tables(copied: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one terminal for both, a table was written past the bars, and its last rows were gone when they moved."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("table1", "--preset", "tiny", "--out", copied, "--no-figures") == 0
    told = capsys.readouterr()
    assert told.out == ""  # all went through the console that knows of the bars
    assert all(method in told.err for method in METHODS)


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What writes tensors has an error of its own for it, which nobody expected."""

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    assert run("table1", "--preset", "tiny", "--out", tmp_path, "--quiet", "--no-figures") == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert "No space left on device; mend that and run again" in told.err


def test_what_is_set_reaches_the_task_as_its_own_type(tmp_path: Path, capsys: Capture) -> None:
    given = ["--set", "solve.n=30", "--set", "solve.by-token=yes", "--set", "solve.length=2"]
    options = ["--tasks", "solve", "--seeds", "1", "--instances", "5", "--json", "--quiet", "--no-figures"]
    assert run("table1", "--preset", "tiny", "--out", tmp_path, *given, *options) == 0
    study = load_study(tmp_path / "table1.json")
    assert (study.seeds, dict(study.instances), study.tasks["solve"].length) == (1, {"solve": 5}, 2)
    assert {row.method for row in study.rows} >= {"TokenwiseModel", "OptimalToken"}
    chosen = command.with_options(ToyOptions(), {"n": "30", "by-token": "no", "seed": "7"}, "solve")
    assert chosen == ToyOptions(n=30, by_token=False, seed=7)


def test_ctrl_c_says_that_the_same_command_goes_on(
    finished: Finished, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    arguments = ["table1", "--preset", "tiny", "--out", tmp_path, "--quiet", "--no-figures"]
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "fit_cost", stop)
        assert run(*arguments) == 130
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "seqdefer: stopped; the same command goes on from what is finished\n")
    assert cells_of(tmp_path)
    assert not (tmp_path / "table1.json").exists()
    assert run(*arguments) == 0
    assert load_study(tmp_path / "table1.json") == finished.made["table1"]


def test_help_names_the_studies(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("--help")
    told = capsys.readouterr()
    assert stopped.value.code == 0
    for words in (*STUDIES, "--set TASK.OPTION=VALUE", "--preset paper|quick", "--no-figures", "goes on"):
        assert words in told.out


# -- one folder, several commands ----------------------------------------------------------------------------------


def test_a_task_that_is_measured_later_joins_its_study(finished: Finished, tmp_path: Path) -> None:
    for task in ("solve", "spell"):
        reproduce("figure-alpha", tmp_path, replace(TINY, tasks=(task,)))
    kept = (tmp_path / "figure-alpha.json").read_bytes()
    assert kept == (finished.folder / "figure-alpha.json").read_bytes()


def test_studies_of_other_data_give_no_verdicts_beside_ours(tmp_path: Path) -> None:
    other = replace(TINY, options={"spell": {"slips": "2"}})
    reproduce("table-handoffs", tmp_path, replace(other, tasks=("spell",)))
    reproduce("figure-alpha", tmp_path, replace(TINY, tasks=("spell",)))
    told = {one.claim for one in load_judgements(tmp_path / "verdicts.json").judgements}
    assert told == {"extreme-alpha-hurts"}
    reproduce("figure-alpha", tmp_path, replace(other, tasks=("spell",)))
    assert "all-positions-is-not-the-best" in {
        one.claim for one in load_judgements(tmp_path / "verdicts.json").judgements
    }
