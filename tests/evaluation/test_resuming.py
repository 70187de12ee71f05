"""A stopped run resumes from what the same recipe made, and nothing that is fitted depends on test data."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracles import WithExpert, completing
from small_runs import FITS, FITTED, TINY, found_in, run_toy, run_weather
from torch import Tensor

from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.interfaces import SplitName
from seqdefer.progress import Clock
from seqdefer.testing import FunctionExpert, ToyTask
from seqdefer.types import Examples, Sequences

pytestmark = pytest.mark.slow


def weights_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_a_second_run_from_nothing_is_the_same(finished: Path, record: Path, tmp_path: Path) -> None:
    run_weather(record, tmp_path)
    assert found_in(tmp_path) == found_in(finished)
    assert weights_of(tmp_path) == weights_of(finished)


def test_a_run_resumes_from_the_rejectors_it_finds(
    finished: Path, record: Path, tmp_path: Path, spy: Callable[[Any, str], list[Any]]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    (folder / "results.json").unlink()
    shutil.rmtree(folder / "rejectors" / "OneTimeModel-seed1")
    (folder / "rejectors" / "TokenwiseModel-seed0" / "model.safetensors").write_bytes(b"damaged")
    (folder / "rejectors" / "WholeModelEmbed-seed0" / "config.json").write_text('{"kind": "of the future"}')
    fits = {name: spy(module, name) for name, module in FITS.items()}
    run_weather(record, folder)
    assert [len(fits[name]) for name in ("fit_whole", "fit_once", "fit_cost", "fit_token")] == [1, 1, 0, 1]
    assert found_in(folder) == found_in(finished)
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
def test_an_interrupted_run_resumes(
    stage: str, finished_before: int, finished: Path, record: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_weather(record, tmp_path, Stops(stage, after=1))
    assert not (tmp_path / "results.json").exists()
    assert len(list(tmp_path.glob("rejectors/*/config.json"))) == finished_before
    run_weather(record, tmp_path)
    assert found_in(tmp_path) == found_in(finished)
    assert weights_of(tmp_path) == weights_of(finished)


class OtherCosts(ToyTask):
    """The same sequences and losses, but dearer expert tokens."""

    def token_cost(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        return super().token_cost(examples, prefixes, tokens) + 0.5


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on the toy. Tests must not change it."""
    folder = tmp_path_factory.mktemp("toy")
    run_toy(ToyTask(n=40, length=3), folder, seeds=1)
    return folder


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
    task: ToyTask, settings: dict[str, Any], refitted: list[str], toy_run: Path, tmp_path: Path
) -> None:
    """Another cost of the expert's tokens once found the rejector that was fitted for the old one."""
    folder, clock = Path(shutil.copytree(toy_run, tmp_path / "copy")), Clock()
    Experiment(task, replace(TINY, seeds=1, **settings), folder, clock).run()
    fitted = [stage.removeprefix("fit ") for stage in clock.seconds if stage.startswith("fit ")]
    assert sorted(fitted) == sorted(refitted)


def test_resumed_equals_fresh_with_lazily_grown_trees(tmp_path: Path) -> None:
    """Trees that earlier fits had grown once entered the next fit's standardisation."""
    task = ToyTask(n=40, length=14)
    settings = replace(ExperimentSettings(), seeds=2, instances=10, methods=("TokenwiseModel",))
    settings = replace(settings, token=replace(settings.token, epochs=2))
    fresh = Experiment(task, settings, tmp_path).run()
    shutil.rmtree(tmp_path / "rejectors" / "TokenwiseModel-seed1")
    resumed = Experiment(task, settings, tmp_path).run()
    assert [seed.methods for seed in resumed.seeds] == [seed.methods for seed in fresh.seeds]


# -- stored labels -------------------------------------------------------------------------------------------------


def named(task: ToyTask) -> FunctionExpert:
    expert = completing(task)
    expert.fingerprint = "toy"
    return expert


def test_a_resumed_run_makes_no_expert_calls(tmp_path: Path, spy: Callable[[Any, str], list[Any]]) -> None:
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


# -- test data ----------------------------------------------------------------------------------------------------


class OtherTest(ToyTask):
    """The toy with another test split."""

    def split(self, name: SplitName) -> Examples:
        other = ToyTask(self.n, self.spec.length, self.vocabulary, seed=9)
        return other.split(name) if name == "test" else super().split(name)


def test_nothing_is_fitted_or_chosen_on_test_data(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    first, second = run_toy(ToyTask(n=40, length=3), one), run_toy(OtherTest(n=40, length=3), other)
    assert first.summary["ChowSum"] != second.summary["ChowSum"]
    assert weights_of(one) == weights_of(other)


def test_seeds_differ_in_instances_and_weights(tmp_path: Path) -> None:
    results, weights = run_toy(ToyTask(n=40, length=3), tmp_path), weights_of(tmp_path)
    assert results.seeds[0].methods["ChowSum"] != results.seeds[1].methods["ChowSum"]
    one, other = (weights[f"rejectors/OneTimeModel-seed{seed}/model.safetensors"] for seed in (0, 1))
    assert one != other
