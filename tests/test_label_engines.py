"""Engines: the same files whoever labels, and whatever is killed meanwhile."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from labelling_toy import ENTRY, HAND_OFFS, TREES, HeldToy, ToyOptions, files_in, label_toy

from seqdefer import cores
from seqdefer.cores import THREADS
from seqdefer.errors import ContractError, DataError, LostWorkerError, MissingExtraError, OptionError
from seqdefer.experiment import load_task
from seqdefer.labelling.engines import EngineSettings, Failure, Source
from seqdefer.labelling.jobs import Part, cut, label
from seqdefer.labelling.processes import LostWorkerWarning
from seqdefer.splits import label_task
from seqdefer.store import read_json

needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="signals of this kind are not there")


def test_a_labelling_is_its_shards_and_a_manifest(toy_labels: dict[str, bytes]) -> None:
    suffixes = [name.partition(".")[2] for name in toy_labels]
    assert (suffixes.count("safetensors"), suffixes.count("json")) == (HAND_OFFS + TREES, 5)


# -- whoever labels ------------------------------------------------------------------------------------------------


def test_workers_make_what_this_process_makes(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    label_toy(tmp_path, engine="local", workers=2)
    assert files_in(tmp_path / "labels") == toy_labels
    made = label_toy(tmp_path, engine="local", workers=2)
    assert [(one.found, one.made) for one in made] == [(4, 0)] * 5


def test_only_what_is_missing_is_made(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    label_toy(tmp_path)
    lost = sorted((tmp_path / "labels").glob("*.safetensors"))[::7]
    for path in lost:
        path.unlink()
    made = label_toy(tmp_path, engine="local", workers=1)
    assert sum(one.made for one in made) == len(lost) == 3
    assert files_in(tmp_path / "labels") == toy_labels


def test_tours_of_the_local_search(tmp_path: Path) -> None:
    """A real predictor and a real solver, which takes its threads from the worker."""
    pytest.importorskip("numba", reason="needs the extra 'tsp'")
    entry = load_task("tsp")
    options = dataclasses.replace(entry.presets["quick"], cities=9, train=12, validation=6, test=6, effort=1)
    found = []
    for engine in (None, "local"):
        how = EngineSettings(engine=engine, workers=engine and 2, shard_size=6, labels=tmp_path / str(engine))
        sizes = {"seeds": 1, "instances": 6, "rollouts": 2}
        label_task(entry, options, tmp_path, ["train", "test"], how, **sizes, device="cpu")
        found.append(files_in(tmp_path / str(engine)))
    assert found[0] == found[1]
    assert len(found[0]) == 3 + 2


def test_a_worker_uses_the_threads_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS, "7")
    monkeypatch.chdir(tmp_path)
    assert cores.n_threads() == 7
    threads = torch.get_num_threads()
    source = Source.of(ENTRY, ToyOptions(), tmp_path, "cpu", 3)
    try:
        assert isinstance(source.load(), HeldToy)
        assert (cores.n_threads(), torch.get_num_threads()) == (3, 3)
    finally:
        torch.set_num_threads(threads)
    for wrong in ("0", "many", "-1"):
        monkeypatch.setenv(THREADS, wrong)
        with pytest.raises(OptionError, match=f"{THREADS} is '{wrong}'; it must be a number of threads, 1 or more"):
            cores.n_threads()


# -- what goes wrong in a worker -----------------------------------------------------------------------------------


def test_an_error_of_a_worker_is_an_error_here(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the first validation example cannot be measured; give another") as raised:
        label_toy(tmp_path, ToyOptions(fails="error"), engine="local", workers=1)
    assert "in _fail" in str(raised.value.__cause__)  # where it arose
    kept = files_in(tmp_path / "labels")
    assert kept.items() <= toy_labels.items()  # what was finished stays, and no manifest says more
    assert len(kept) == 8


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    class Odd(Exception):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(first)

    failure = Failure.of(Odd("what happened", "and more"))
    assert failure.error is None
    with pytest.raises(RuntimeError, match=r"in a worker:\n(.*\n)*.*Odd: what happened"):
        failure.throw()


def test_warnings_of_a_worker_are_told_here(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the first validation example is odd"):
        label_toy(tmp_path, ToyOptions(fails="warning"), engine="local", workers=1)


@needs_signals
def test_a_shard_that_kills_its_workers_is_given_up(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    said = (
        r"a worker died \(signal 9\) at shard [0-9a-f]{16}, 3 times so far; if memory was short, take fewer --workers"
    )
    with pytest.warns(LostWorkerWarning, match="it is replaced"), pytest.raises(LostWorkerError, match=said):
        label_toy(tmp_path, ToyOptions(fails="death"), engine="local", workers=1)
    assert files_in(tmp_path / "labels").items() <= toy_labels.items()


def test_a_worker_that_has_loaded_something_else_refuses(tmp_path: Path) -> None:
    """As on a machine of a cluster that does not see the same folder."""
    ours, theirs = HeldToy(ToyOptions()), HeldToy(ToyOptions())
    theirs.predictor.fingerprint = "trained elsewhere"
    for kind in ("hand-offs", "trees"):
        (job, *_) = cut(ours, Part(kind, "train", torch.arange(20), 3))  # type: ignore[arg-type]
        label(ours, job)
        with pytest.raises(ContractError, match=f"shard {job.name} was asked for, .* let all workers read the same"):
            label(theirs, job)


# -- choices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": "dask"}, "unknown engine 'dask'; available: local, ray"),
        ({"engine": "local", "workers": 0}, "--workers is 0; it must be at least 1"),
        ({"threads": 0}, "--threads is 0; it must be at least 1"),
        ({"shard_size": -1}, "--shard-size is -1; it must be at least 1"),
        ({"engine": "local", "address": "host:1"}, "--address is for --engine ray; the engine is local"),
        ({"workers": 2}, "--workers 2 needs an engine: --engine local, or --engine ray"),
    ],
)
def test_choices_that_make_no_sense_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        EngineSettings(**given)  # type: ignore[arg-type]


def test_without_ray_the_line_that_installs_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingExtraError, match=r"needs the package 'ray'; install it with: pip install 'seqdefer\[ray\]'"
    ):
        label_toy(tmp_path, engine="ray", workers=1)
    assert not (tmp_path / "labels").exists()


def test_an_expert_without_a_name_has_no_use_for_workers(tmp_path: Path) -> None:
    entry = dataclasses.replace(ENTRY, prepare=nameless)
    sizes = {"seeds": 1, "instances": 5, "rollouts": 2}
    for engine in (None, "local"):
        with pytest.raises(OptionError, match=r"the expert of task 'toy' has no name .* so its labels cannot be kept"):
            label_task(entry, ToyOptions(), tmp_path, ["test"], EngineSettings(engine=engine), **sizes)  # type: ignore[arg-type]


def nameless(options: ToyOptions, *_: object) -> HeldToy:
    task = HeldToy(options)
    task.expert.fingerprint = ""
    return task


def test_unknown_splits_are_refused(tmp_path: Path) -> None:
    sizes = {"seeds": 1, "instances": 5, "rollouts": 2}
    with pytest.raises(OptionError, match="unknown split 'all'; available: test, train, validation"):
        label_task(ENTRY, ToyOptions(), tmp_path, ["all"], EngineSettings(), **sizes)  # type: ignore[arg-type, list-item]


def test_a_manifest_tells_what_it_is(tmp_path: Path) -> None:
    (made, *_) = label_toy(tmp_path)
    plain = read_json(tmp_path / "labels" / f"{made.manifest.name}.json")
    assert (plain["task"], plain["split"], plain["kind"], plain["rows"]) == ("toy", "train", "hand-offs", 20)
    assert (plain["shard_size"], [shard["rows"] for shard in plain["shards"]]) == (5, [5, 5, 5, 5])
    assert (plain["expert"], plain["options"]["length"]) == ("toy expert", 14)
    assert all(shard["made"] >= 5 and shard["size"] > 0 for shard in plain["shards"])
