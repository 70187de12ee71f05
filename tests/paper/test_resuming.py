"""`seqdefer reproduce` resumes where it stopped, and its studies share cells."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_studies import DRAWN, PLAN, SEEDS, TINY, Finished, cells_of, final_files, rows_of, same_but_for_drawings

from seqdefer.paper.records import Study, load_judgements
from seqdefer.paper.reproduce import reproduce
from seqdefer.storage.shards import DamagedShardWarning
from tests.evaluation.test_experiment import FITTED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("installed")]

LABELLING = ("label hand-offs", "label decisions")


# -- interruptions --------------------------------------------------------------------------------------------------


class InterruptsEachStage:
    """A meter that raises KeyboardInterrupt once in every stage."""

    def __init__(self) -> None:
        self.seen = set[str]()

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        def advance(steps: int) -> None:
            if name not in self.seen:
                self.seen.add(name)
                raise KeyboardInterrupt

        yield advance


def test_interrupted_in_each_stage(finished: Finished, tmp_path: Path) -> None:
    meter, made = InterruptsEachStage(), dict[str, Study]()
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


def test_interrupted_between_studies(copied: Path, finished: Finished) -> None:
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
from toy_studies import TINY, cells_of, install
from seqdefer.paper.reproduce import reproduce

torch.optim.AdamW([torch.zeros(1)]).zero_grad()  # import torch once for all forks
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
def test_killed_at_random_moments(finished: Finished, tmp_path: Path) -> None:
    """SIGKILL leaves no time to clean up. The moments are numbers of stored cells."""
    arguments = [str(tmp_path / "out"), str(len(cells_of(finished.folder)))]
    command = [sys.executable, "-c", KILLED, *arguments]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=paths)
    assert process.returncode == 0, process.stderr
    assert [int(status) for status in process.stdout.split()] == [9] * 4 + [0]
    assert same_but_for_drawings(tmp_path / "out", finished)
    assert {path.name for path in cells_of(tmp_path / "out")} == {path.name for path in cells_of(finished.folder)}


# -- shared cells -------------------------------------------------------------------------------------------------


def done(work: dict[str, list[tuple[Any, ...]]]) -> dict[str, int]:
    """Count and clear the calls. Loads are not counted: every fit tries to load first."""
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


def test_stored_cells_are_not_measured_again(
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


def test_more_seeds_reuse_the_cells_of_fewer(
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


def test_damaged_cells_are_measured_again(copied: Path, finished: Finished) -> None:
    for place, path in enumerate(sorted(cells_of(copied))[::3]):
        path.write_bytes(path.read_bytes()[: 10 * (place % 7)])
    with pytest.warns(DamagedShardWarning, match="is damaged: .*; it is removed and made again"):
        assert reproduce("all", copied, TINY) == finished.made
    assert final_files(copied) == final_files(finished.folder)


# -- one folder, several commands ----------------------------------------------------------------------------------


def test_a_later_task_joins_its_study(finished: Finished, tmp_path: Path) -> None:
    for task in ("solve", "spell"):
        reproduce("figure-alpha", tmp_path, replace(TINY, tasks=(task,)))
    kept = (tmp_path / "figure-alpha.json").read_bytes()
    assert kept == (finished.folder / "figure-alpha.json").read_bytes()


def test_studies_of_other_data_give_no_verdicts(tmp_path: Path) -> None:
    other = replace(TINY, options={"spell": {"slips": "2"}})
    reproduce("table-handoffs", tmp_path, replace(other, tasks=("spell",)))
    reproduce("figure-alpha", tmp_path, replace(TINY, tasks=("spell",)))
    claims = {one.claim for one in load_judgements(tmp_path / "verdicts.json").judgements}
    assert claims == {"extreme-alpha-hurts"}
    reproduce("figure-alpha", tmp_path, replace(other, tasks=("spell",)))
    assert "all-positions-is-not-the-best" in {
        one.claim for one in load_judgements(tmp_path / "verdicts.json").judgements
    }
