"""`seqdefer label` and `seqdefer cache`, and the labelling options of `run`, `fit` and `reproduce`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Capture
from labelling_toy import ENTRY, HeldToy, ToyOptions, files_in

from seqdefer.cli import main
from seqdefer.evaluation.results import load_results
from seqdefer.labels.jobs import LabelPart
from seqdefer.labels.manifest import labelling_name
from seqdefer.tasks.tsp.experts import TourExpert

pytest.importorskip("numba", reason="needs the extra 'tsp'")
Spy = Callable[[Any, str], list[Any]]

SIZES = ["--cities", "8", "--train", "12", "--validation", "4", "--test", "6", "--expert", "search", "--effort", "0"]
TESTED = ["--seeds", "1", "--instances", "6"]
PARTS = {"train": 12, "validation": 4, "test": 6}


def labelled(out: Path, *more: str) -> int:
    return main(["label", "tsp", *SIZES, *TESTED, "--shard-size", "4", "--out", str(out), "--quiet", *more])


def run(out: Path, *more: str) -> int:
    few = ["--methods", "OneTimeScore,ChowMean", "--quiet", "--json"]
    return main(["run", "tsp", *SIZES, *TESTED, *few, "--out", str(out), *more])


@pytest.fixture
def folder(tmp_path: Path, capsys: Capture) -> Path:
    """The folder of a labelled run: 3 shards of train, 1 of validation, 2 of test."""
    assert labelled(tmp_path / "run") == 0
    capsys.readouterr()
    return tmp_path / "run"


def printed_json(capsys: Capture) -> Any:
    return json.loads(capsys.readouterr().out)


def test_output_of_label(tmp_path: Path, capsys: Capture) -> None:
    assert labelled(tmp_path, "--json") == 0
    printed = printed_json(capsys)
    assert printed["labels"] == str(tmp_path / "labels")
    assert {part["split"]: part["rows"] for part in printed["parts"]} == PARTS
    assert [(part["kind"], part["found"], part["made"]) for part in printed["parts"]] == [
        ("hand-offs", 0, 3), ("hand-offs", 0, 1), ("hand-offs", 0, 2),
    ]  # fmt: skip
    assert all(part["expert_calls"] > part["rows"] for part in printed["parts"])
    assert printed["seconds"] > 0
    sizes = [path.stat().st_size for path in (tmp_path / "labels").glob("*.safetensors")]
    assert sum(part["bytes"] for part in printed["parts"]) == sum(sizes)
    assert labelled(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"labels in {tmp_path / 'labels'}"
    assert lines[1].split()[:3] == ["split", "kind", "rows"]
    first = printed["parts"][0]
    assert lines[2].split() == [
        "train", "hand-offs", "12", "3", "0", f"{first['bytes']:,}", f"{first['expert_calls']:,}",
    ]  # fmt: skip


def test_run_finds_labels_in_the_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spy: Spy, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = [*SIZES, *TESTED, "--preset", "paper", "--quiet"]
    assert main(["label", "tsp", *sizes]) == 0
    asked = spy(TourExpert, "hand_offs")
    assert main(["run", "tsp", *sizes, "--methods", "OneTimeScore,ChowMean"]) == 0
    assert asked == []


@pytest.mark.parametrize(("seeds", "instances"), [(1, 4), (3, 2)])
def test_test_instances_of_all_runs_are_labelled(seeds: int, instances: int, tmp_path: Path, capsys: Capture) -> None:
    few = ["--seeds", str(seeds), "--instances", str(instances), "--splits", "test", "--out", str(tmp_path)]
    assert main(["label", "tsp", *SIZES, *few, "--quiet", "--json"]) == 0
    assert [part["rows"] for part in printed_json(capsys)["parts"]] == [seeds * instances]


def test_rollouts_reach_the_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("seqdefer.registry.load_task", lambda _: ENTRY)
    some = ["--rollouts", "4", "--splits", "train", "--out", str(tmp_path), "--quiet", "--json"]
    assert main(["label", "toy", *some]) == 0
    assert sorted(part["kind"] for part in printed_json(capsys)["parts"]) == ["hand-offs", "trees"]
    name = labelling_name(HeldToy(ToyOptions()), LabelPart("trees", "train", torch.arange(20), 4))
    assert (tmp_path / "labels" / f"{name}.json").is_file()


def test_run_finds_labels_of_any_shard_size(folder: Path, spy: Spy, capsys: Capture) -> None:
    before, asked = files_in(folder / "labels"), spy(TourExpert, "hand_offs")
    assert run(folder) == 0
    assert asked == []
    assert files_in(folder / "labels") == before
    assert load_results(folder).provenance.expert_calls.made > 22


def test_labels_in_another_folder(folder: Path, tmp_path: Path, spy: Spy, capsys: Capture) -> None:
    asked = spy(TourExpert, "hand_offs")
    assert run(tmp_path / "other", "--labels", str(folder / "labels")) == 0
    assert asked == []
    assert not (tmp_path / "other" / "labels").exists()
    capsys.readouterr()
    assert labelled(tmp_path / "other", "--labels", str(folder / "labels"), "--json") == 0
    printed = printed_json(capsys)
    assert (printed["labels"], sum(part["made"] for part in printed["parts"])) == (str(folder / "labels"), 0)


@pytest.mark.slow
def test_a_run_with_workers_is_the_same_run(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(tmp_path / "alone") == 0
    assert run(tmp_path / "many", "--engine", "local", "--workers", "2") == 0
    capsys.readouterr()
    alone, many = (load_results(tmp_path / name) for name in ("alone", "many"))
    assert alone.seeds == many.seeds
    assert alone.provenance.expert_calls == many.provenance.expert_calls
    assert files_in(tmp_path / "alone" / "labels") == files_in(tmp_path / "many" / "labels")
    assert "label" in many.provenance.seconds


@pytest.mark.slow
def test_a_fit_with_workers_labels_no_test_data(tmp_path: Path, capsys: Capture) -> None:
    small = ["--draft-architecture", "draft_mlp", "--method", "OneTimeCost", "--quiet"]
    by = ["--engine", "local", "--workers", "1", "--labels", str(tmp_path / "labels")]
    assert main(["fit", "tsp", *SIZES, *small, *by, "--out", str(tmp_path / "model")]) == 0
    assert main(["cache", "ls", str(tmp_path / "labels"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(one["split"] for one in printed["labellings"]) == ["train", "validation"]


def test_chosen_splits(tmp_path: Path, capsys: Capture) -> None:
    assert labelled(tmp_path, "--splits", "validation", "--json") == 0
    assert [part["split"] for part in printed_json(capsys)["parts"]] == ["validation"]
    assert labelled(tmp_path, "--splits", "validation,both") == 2
    assert "unknown split 'both'; available: test, train, validation" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["label", "run", "fit"])
def test_bad_options(command: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    for more, message in {
        ("--engine", "dask"): "unknown engine 'dask'; available: local, ray",
        ("--workers", "2"): "--workers 2 needs an engine; add --engine local or --engine ray",
        ("--shard-size", "0"): "--shard-size is 0; it must be at least 1",
        ("--threads", "0"): "--threads is 0; it must be at least 1",
        ("--device", "abacus"): "abacus",
        ("--out", str(tmp_path / "file" / "out")): "choose another folder with --out",
        ("--labels", str(tmp_path / "file" / "labels")): "choose another folder with --labels",
    }.items():
        assert main([command, "tsp", *SIZES, "--out", str(tmp_path / "out"), "--quiet", *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_without_ray_nothing_is_prepared(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["label", "tsp", *SIZES, "--out", str(tmp_path / "out"), "--engine", "ray"]) == 2
    assert "-m pip install 'seqdefer[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_cache_finds_the_labels_of_a_fitted_model(tmp_path: Path, capsys: Capture) -> None:
    """Regression: it listed none, and verified all of them."""
    assert labelled(tmp_path / "model" / "work", "--splits", "validation") == 0
    capsys.readouterr()
    for folder in ("model", "model/work", "model/work/labels"):
        assert main(["cache", "ls", str(tmp_path / folder), "--json"]) == 0
        printed = printed_json(capsys)
        assert [one["split"] for one in printed["labellings"]] == ["validation"]
        assert printed["labels"] == str(tmp_path / "model" / "work" / "labels")


# -- cache ---------------------------------------------------------------------------------------------------------


def test_ls(folder: Path, capsys: Capture) -> None:
    assert main(["cache", "ls", str(folder), "--json"]) == 0
    printed = printed_json(capsys)
    assert {one["split"]: one["rows"] for one in printed["labellings"]} == PARTS
    assert all((one["task"], one["kind"], one["missing"]) == ("tsp", "hand-offs", 0) for one in printed["labellings"])
    assert printed["unfinished"] == {"shards": 0, "bytes": 0, "half_written": 0}
    one, other, *_ = printed["labellings"]
    sizes = [path.stat().st_size for path in (folder / "labels").glob("*.safetensors")]
    assert sum(each["bytes"] for each in printed["labellings"]) == sum(sizes)
    (folder / "labels" / f"{one['name']}.json").unlink()
    for half in ("safetensors", "json"):
        (folder / "labels" / f".{'0' * 16}.{half}.half").touch()
    assert main(["cache", "ls", str(folder / "labels")]) == 0  # the store itself works too
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2
    assert f"{other['bytes']:,}" in lines[2].split()
    assert last.startswith(f"unfinished: {one['shards']} shards ({one['bytes']:,} bytes), 2 partial files; ")


def test_ls_counts_missing_shards(folder: Path, capsys: Capture) -> None:
    for path in sorted((folder / "labels").glob("*.safetensors"))[:2]:
        path.unlink()
    assert main(["cache", "ls", str(folder), "--json"]) == 0
    printed = printed_json(capsys)
    assert sum(one["missing"] for one in printed["labellings"]) == 2
    assert printed["unfinished"] == {"shards": 0, "bytes": 0, "half_written": 0}
    (folder / "labels" / f".{'0' * 16}.json.half").touch()
    assert main(["cache", "ls", str(folder)]) == 0
    assert "unfinished: 0 shards (0 bytes), 1 partial files" in capsys.readouterr().out


def test_verify(folder: Path, capsys: Capture) -> None:
    assert main(["cache", "verify", str(folder)]) == 0
    assert capsys.readouterr().out == f"all 6 shards in {folder / 'labels'} are intact\n"
    path = sorted((folder / "labels").glob("*.safetensors"))[2]
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["cache", "verify", str(folder)]) == 1
    assert capsys.readouterr().out.startswith(f"{path} is damaged: ")
    assert main(["cache", "verify", str(folder), "--json"]) == 1
    assert list(printed_json(capsys)["damaged"]) == [str(path)]


def test_rm(folder: Path, capsys: Capture) -> None:
    path = sorted((folder / "labels").glob("*.safetensors"))[2]
    whole = files_in(folder / "labels")
    path.write_bytes(b"damaged")
    assert main(["cache", "rm", str(folder), "--damaged"]) == 0
    assert capsys.readouterr().out == f"removed {path}\n"
    assert labelled(folder) == 0
    assert files_in(folder / "labels") == whole
    capsys.readouterr()
    assert main(["cache", "rm", str(folder), "--unfinished"]) == 0
    assert capsys.readouterr().out == "nothing was removed\n"
    name = next((folder / "labels").glob("*.json")).stem
    assert main(["cache", "rm", str(folder), name[:12], "--json"]) == 0
    assert str(folder / "labels" / f"{name}.json") in printed_json(capsys)["removed"]
    next((folder / "labels").glob("*.safetensors")).write_bytes(b"damaged")
    (folder / "labels" / f".{'0' * 16}.json.half").touch()
    assert main(["cache", "rm", str(folder), "--damaged", "--unfinished", "--json"]) == 0
    assert len(printed_json(capsys)["removed"]) == 2
    assert main(["cache", "rm", str(folder), "--all"]) == 0
    assert list((folder / "labels").iterdir()) == []


def test_bad_cache_commands(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    for arguments, message in {
        ("rm", str(folder)): "nothing to remove; give names (seqdefer cache ls lists them), or --damaged",
        ("rm", str(folder), "zz"): "unknown labelling 'zz'; available: ",
        ("ls", str(tmp_path / "nowhere")): f"no folder {tmp_path / 'nowhere'}; give the folder of --labels",
    }.items():
        assert main(["cache", *arguments]) == 2
        assert message in capsys.readouterr().err
