"""Executors: the same files from every executor, and what happens when workers fail."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from labelling_toy import ENTRY, GATE, Gate, HeldToy, ToyOptions, files_in, label_toy, prepare

from seqdefer import environment
from seqdefer.environment import THREADS_VARIABLE
from seqdefer.errors import ContractError, DataError, LostWorkerError, OptionError
from seqdefer.evaluation.splits import label_task
from seqdefer.labels.executors import processes
from seqdefer.labels.executors.base import MAX_ATTEMPTS, JobFailure, JobResult, TaskSource, try_job
from seqdefer.labels.executors.processes import LostWorkerWarning, ProcessExecutor
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.labels.jobs import LabelPart, make_jobs, run_job
from seqdefer.labels.label_store import LabelStore
from seqdefer.registry import load_task
from seqdefer.storage.shards import Store

pytestmark = pytest.mark.slow

needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")


Spy = Callable[[Any, str], list[Any]]


# -- equal files ---------------------------------------------------------------------------------------------------


def test_processes_make_the_same_files(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    label_toy(tmp_path, engine="local", workers=2)
    assert files_in(tmp_path / "labels") == toy_labels
    assert multiprocessing.active_children() == []
    made = label_toy(tmp_path, engine="local", workers=2)
    assert [(one.found, one.made) for one in made] == [(4, 0)] * 5


def test_only_missing_shards_are_made(toy_labels: dict[str, bytes], tmp_path: Path, spy: Spy) -> None:
    label_toy(tmp_path)
    lost = sorted((tmp_path / "labels").glob("*.safetensors"))[::10]
    for path in lost:
        path.unlink()
    started = spy(BaseProcess, "start")
    made = label_toy(tmp_path, engine="local", workers=5)
    assert sum(one.made for one in made) == len(lost) == len(started) == 2  # no more workers than jobs
    assert files_in(tmp_path / "labels") == toy_labels


def test_tours_are_equal_from_a_process(tmp_path: Path) -> None:
    """A real predictor and solver; the solver takes its threads from the worker."""
    pytest.importorskip("numba", reason="needs the extra 'tsp'")
    entry = load_task("tsp")
    options = dataclasses.replace(entry.presets["quick"], cities=9, train=12, validation=6, test=6, effort=1)
    found = []
    for engine in (None, "local"):
        how = ExecutorSettings(engine=engine, workers=engine and 2, shard_size=6, labels=tmp_path / str(engine))
        sizes = {"seeds": 1, "instances": 6, "rollouts": 2}
        label_task(entry, options, tmp_path, ["train", "test"], how, **sizes, device="cpu")
        found.append(files_in(tmp_path / str(engine)))
    assert found[0] == found[1]
    assert len(found[0]) == 3 + 2


def test_a_worker_uses_the_threads_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, "7")
    monkeypatch.chdir(tmp_path)
    assert environment.n_threads() == 7
    threads = torch.get_num_threads()
    source = TaskSource(ENTRY, ToyOptions(), tmp_path, "cpu", 3)
    try:
        assert isinstance(source.load(), HeldToy)
        assert (environment.n_threads(), torch.get_num_threads()) == (3, 3)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.delenv(THREADS_VARIABLE)
    assert environment.n_threads() == environment.n_cores()
    for wrong in ("0", "many", "-1"):
        monkeypatch.setenv(THREADS_VARIABLE, wrong)
        with pytest.raises(
            OptionError, match=f"{THREADS_VARIABLE} is '{wrong}'; it must be a number of threads, 1 or more"
        ):
            environment.n_threads()


def test_relative_paths_start_at_the_folder_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers may start elsewhere, as those of Ray do."""
    found = []

    def look(options: ToyOptions, folder: Path, *_: object) -> HeldToy:
        found.append((Path("data.csv").resolve(), folder.resolve()))
        return HeldToy(options)

    monkeypatch.setenv(THREADS_VARIABLE, "1")
    monkeypatch.chdir(tmp_path)
    entry = dataclasses.replace(ENTRY, prepare=look)
    source = TaskSource(entry, ToyOptions(), Path("out").resolve(), "cpu", torch.get_num_threads())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    source.load()
    assert found == [(tmp_path / "data.csv", tmp_path / "out")]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_cores_respect_affinity() -> None:
    code = (
        "import os; from seqdefer.environment import n_cores\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(n_cores())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "1\n"


def test_workers_are_spread_over_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    sources = {device: TaskSource(ENTRY, ToyOptions(), Path(), device) for device in ("cuda", "cuda:1", "cpu")}
    devices = {
        device: [processes._assign_gpu(source, number).device for number in range(4)]
        for device, source in sources.items()
    }
    assert devices == {"cuda": ["cuda:0", "cuda:1"] * 2, "cuda:1": ["cuda:1"] * 4, "cpu": ["cpu"] * 4}


# -- failing workers ---------------------------------------------------------------------------------------------


def test_an_error_in_a_worker_is_raised_in_the_driver(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the first validation example cannot be measured; give another") as raised:
        label_toy(tmp_path, ToyOptions(fails="error"), engine="local", workers=1)
    assert "in _fail" in str(raised.value.__cause__)
    assert multiprocessing.active_children() == []
    kept = files_in(tmp_path / "labels")
    assert kept.items() <= toy_labels.items()  # finished shards stay, without a manifest
    assert len(kept) == 8


def test_an_error_in_the_driver_ends_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(store: Store, name: str, packed: bytes) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Store, "write", full)
    with pytest.raises(OSError, match="no room") as raised:
        label_toy(tmp_path, engine="local", workers=2)
    assert multiprocessing.active_children() == []
    assert raised.traceback  # even while the traceback is alive


def unloadable(options: ToyOptions, *more: Any) -> HeldToy:
    if multiprocessing.parent_process() is not None:
        raise DataError("this machine has no such data; copy it there")
    return prepare(options, *more)


def test_a_worker_that_cannot_load_the_task_reports_why(tmp_path: Path) -> None:
    entry = dataclasses.replace(ENTRY, prepare=unloadable)
    sizes = {"seeds": 1, "instances": 5, "rollouts": 2, "device": "cpu"}
    with pytest.raises(DataError, match="this machine has no such data; copy it there"):
        label_task(entry, ToyOptions(), tmp_path, ["test"], ExecutorSettings(engine="local", workers=1), **sizes)  # type: ignore[arg-type]


class Unpicklable(Exception):
    """Pickles, but does not unpickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def test_an_error_that_cannot_be_pickled_is_reported_as_text() -> None:
    failure = JobFailure.of(Unpicklable("what happened", "and more"))
    assert failure.error is None
    with pytest.raises(RuntimeError, match=r"in a worker:\n(.*\n)*.*Unpicklable: what happened"):
        failure.throw()


def test_warnings_of_a_worker_are_raised_in_the_driver(tmp_path: Path) -> None:
    with pytest.raises(UserWarning, match="the first validation example is odd"):
        label_toy(tmp_path, ToyOptions(fails="warning"), engine="local", workers=1)
    assert len(files_in(tmp_path / "labels")) == 8 + 1  # its shard was stored first


def test_every_shard_comes_with_its_warnings() -> None:
    """The filters of the driver apply, not those of the worker."""
    task = HeldToy(ToyOptions(fails="warning"))
    (job, *_) = make_jobs(task, LabelPart("hand-offs", "validation", torch.arange(5)))
    for action in ("error", "ignore", "once"):
        with warnings.catch_warnings():
            warnings.simplefilter(action)  # type: ignore[arg-type]
            for index in (3, 4):
                result = try_job(task, index, job)
                assert isinstance(result, JobResult)
                assert set(result.warnings) == {("the first validation example is odd", UserWarning)}
                assert result.index == index


@needs_signals
def test_a_shard_that_kills_its_workers_is_given_up(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    error = r"a worker \(signal 9\) died on shard [0-9a-f]{16} in 3 attempts; if memory ran out, use fewer --workers"
    with (
        pytest.warns(LostWorkerWarning, match="it is replaced") as caught,
        pytest.raises(LostWorkerError, match=error),
    ):
        label_toy(tmp_path, ToyOptions(fails="death"), engine="local", workers=1)
    assert len(caught) == 2  # the third death is the error
    assert files_in(tmp_path / "labels").items() <= toy_labels.items()


def test_workers_may_die_on_many_shards(
    toy_labels: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: deaths are counted per shard, not in total."""
    monkeypatch.setenv(GATE, str(Gate.closed(tmp_path / "gate", stop=-1).folder))
    options, how = ToyOptions(fails="exits"), ExecutorSettings(engine="local", workers=1)
    with pytest.warns(LostWorkerWarning, match=r"a worker \(status 3\) died on shard") as caught:
        label_task(ENTRY, options, tmp_path, ["test"], how, seeds=1, instances=15, rollouts=3, device="cpu")
    assert len(caught) == MAX_ATTEMPTS == 3
    shards = {name: content for name, content in files_in(tmp_path / "labels").items() if "safetensors" in name}
    assert shards.items() <= toy_labels.items()
    assert len(shards) == 3


def test_a_worker_with_another_task_refuses(tmp_path: Path) -> None:
    """A machine of a cluster may see another folder."""
    ours, theirs = HeldToy(ToyOptions()), HeldToy(ToyOptions())
    theirs.predictor.fingerprint = "trained elsewhere"
    for kind in ("hand-offs", "trees"):
        (job, *_) = make_jobs(ours, LabelPart(kind, "train", torch.arange(20), 3))  # type: ignore[arg-type]
        run_job(ours, job)
        with pytest.raises(ContractError, match=f"the job is for shard {job.name}, .* let all workers read the same"):
            run_job(theirs, job)


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": "local", "workers": 0}, "--workers is 0; it must be at least 1"),
        ({"engine": "local", "address": "host:1"}, "--address needs --engine ray; the engine is local"),
    ],
)
def test_bad_settings(given: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ExecutorSettings(**given)  # type: ignore[arg-type]


def test_settings_start_their_executor(tmp_path: Path) -> None:
    chosen = ExecutorSettings(engine="local", threads=3).start(ENTRY, ToyOptions(), tmp_path, "cpu")
    assert isinstance(chosen, ProcessExecutor)
    assert (chosen.workers, chosen.source.threads) == (environment.n_cores(), 3)
    assert ExecutorSettings(workers=1).start(ENTRY, ToyOptions(), tmp_path, "cpu") is None  # this process


def test_an_expert_without_a_fingerprint_is_refused(tmp_path: Path) -> None:
    entry = dataclasses.replace(ENTRY, prepare=nameless)
    sizes = {"seeds": 1, "instances": 5, "rollouts": 2}
    for how in (ExecutorSettings(), ExecutorSettings(engine="local")):
        with pytest.raises(OptionError, match="the expert of task 'toy' has no fingerprint"):
            label_task(entry, ToyOptions(), tmp_path, ["test"], how, **sizes)
    executor = ProcessExecutor(TaskSource(entry, ToyOptions(), tmp_path, "cpu"), 1)
    with pytest.raises(OptionError, match="has no fingerprint"):
        LabelStore(nameless(ToyOptions()), Store(tmp_path), executor)


def nameless(options: ToyOptions, *_: object) -> HeldToy:
    task = HeldToy(options)
    task.expert.fingerprint = ""
    return task
