"""`seqdefer reproduce` resumes where it stopped, and its studies share cells."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_studies import DRAWN, RECIPES, TINY, Finished, cells_of, final_files, rows_of, same_but_for_drawings

from seqdefer.paper.records import Judgements, Row, Study, load_judgements, load_study
from seqdefer.paper.reproduce import Choices, LeftOutWarning, reproduce

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("installed")]


@pytest.fixture
def cells(copied: Path) -> Path:
    """A folder with all cells and no study."""
    for name in final_files(copied):
        (copied / name).unlink()
    return copied


# -- interruptions --------------------------------------------------------------------------------------------------


def rows_in(made: Mapping[str, Mapping[str, Study]]) -> dict[tuple[str, str], list[Row]]:
    """Return the rows of one task, by study and recipe."""
    return {
        (name, recipe): rows_of(study, "spell")
        for name, by_recipe in made.items()
        for recipe, study in by_recipe.items()
    }


KILLED = """
import os, random, signal, sys, time
from dataclasses import replace
from pathlib import Path
import pytest, torch
from toy_studies import TINY, cells_of, install
from seqdefer.paper.reproduce import reproduce

torch.optim.AdamW([torch.zeros(1)]).zero_grad()  # import torch once for all forks
install(pytest.MonkeyPatch())
folder, chance, ONE_TASK = Path(sys.argv[1]), random.Random(0), replace(TINY, tasks=("spell",))
for wanted in sorted(chance.sample(range(int(sys.argv[2])), 4)) + [None]:
    child = os.fork()
    if not child:
        reproduce("all", folder, ONE_TASK)
        if wanted is not None:
            signal.pause()  # it is killed even if the machine is so busy that it could finish first
        os._exit(0)
    while wanted is not None and len(cells_of(folder)) < wanted:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it failed before it was killed"
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
    arguments = [str(tmp_path), str(len(cells_of(finished.folder / "spell")))]
    command = [sys.executable, "-c", KILLED, *arguments]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=paths)
    assert process.returncode == 0, process.stderr
    assert [int(status) for status in process.stdout.split()] == [9] * 4 + [0]
    names = [{path.name for path in cells_of(folder / "spell")} for folder in (tmp_path, finished.folder)]
    assert names[0] == names[1]
    written = {
        name: {recipe: load_study(tmp_path / recipe / f"{name}.json") for recipe in by_recipe}
        for name, by_recipe in finished.made.items()
    }
    assert rows_in(written) == rows_in(finished.made)


# -- shared cells -------------------------------------------------------------------------------------------------


def done(work: dict[str, list[tuple[Any, ...]]]) -> dict[str, int]:
    """Count and clear the calls. Loads are not counted: every fit tries to load first."""
    counts = {name: len(calls) for name, calls in work.items() if calls and name != "load_rejector"}
    for calls in work.values():
        calls.clear()
    return counts


def test_studies_share_cells(tmp_path: Path, work: dict[str, list[tuple[Any, ...]]]) -> None:
    # Three splits of two tasks by two recipes, which see different inputs; trees of one task.
    labels = {"draft": 12, "hand_off_table": 12, "enumerate_trees": 6}
    reproduce("table1", tmp_path, TINY)  # two tasks, two seeds, two recipes; costs only by ours
    assert done(work) == {"fit_whole": 8, "fit_once": 8, "fit_cost": 4, "fit_token": 4, **labels}
    reproduce("figure-curves", tmp_path, TINY)
    assert done(work) == {}
    reproduce("table-handoffs", tmp_path, TINY)
    sizes = {name: Counter(len(grid) for _, _, grid, *_ in work[name]) for name in ("fit_once", "fit_cost")}
    # Ours has L + 1 = 4 and 5 in table 1, the published recipe 3.
    assert sizes == {"fit_once": {2: 8, 3: 4, 4: 2, 5: 2}, "fit_cost": {2: 4, 3: 4}}
    assert done(work) == {"fit_once": 16, "fit_cost": 8, **labels}
    reproduce("figure-alpha", tmp_path, TINY)
    # Three sizes of J: three alphas of the plan, and as published the rule of thumb; each recipe's alpha is known.
    assert done(work) == {"fit_once": 3 * (3 + 4) * 4, **labels}
    reproduce("table-psi", tmp_path, TINY)  # mean absolute error; cross-entropy is in table 1
    assert done(work) == {"fit_once": 8, **labels}
    # Two architectures, three strategies; as published, the LSTM trained freely is in table 1.
    reproduce("table-ablation", tmp_path, TINY)
    assert done(work) == {"fit_token": 22, "draft": 6, "hand_off_table": 6, "enumerate_trees": 6}


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
        for recipe, study in reproduce(name, tmp_path, replace(TINY, tasks=("solve",)))[name].items():
            assert list(study.tasks) == ["solve"]
            assert list(study.rows) == rows_of(finished.made[name][recipe], "solve")


def test_more_seeds_reuse_the_cells_of_fewer(
    copied: Path, finished: Finished, work: dict[str, list[tuple[Any, ...]]]
) -> None:
    fewer = reproduce("table1", copied, replace(TINY, seeds=1))["table1"]
    assert not any(work.values())
    more = reproduce("table1", copied, replace(TINY, seeds=3))["table1"]
    assert {name: n for name, n in done(work).items() if name.startswith("fit_")} == {
        "fit_whole": 4, "fit_once": 4, "fit_cost": 2, "fit_token": 2,
    }  # fmt: skip
    for recipe in RECIPES:
        two_seeds = finished.made["table1"][recipe]
        for one, two, three in zip(fewer[recipe].rows, two_seeds.rows, more[recipe].rows, strict=True):
            assert two.improvements == three.improvements[:2]
            assert one.improvements == three.improvements[:1]


# -- one folder, several commands ----------------------------------------------------------------------------------


def test_a_later_task_joins_its_study(finished: Finished, cells: Path) -> None:
    for task in ("solve", "spell"):
        reproduce("figure-alpha", cells, replace(TINY, tasks=(task,)))
    for name in ("published/figure-alpha.json", "ours/figure-alpha.json", "figure-alpha.tex"):
        assert (cells / name).read_bytes() == (finished.folder / name).read_bytes()


def test_a_later_recipe_joins_its_study(finished: Finished, cells: Path) -> None:
    """One recipe after the other leaves the bytes of both at once."""
    for recipe in ("ours", "published"):
        made = reproduce("all", cells, replace(TINY, recipes=(recipe,)))
        assert {name: list(by_recipe) for name, by_recipe in made.items()} == {name: [recipe] for name in made}
    assert same_but_for_drawings(cells, finished)
    if DRAWN:
        reproduce("all", cells, replace(TINY, recipes=("ours",), figures=True))
        assert final_files(cells) == final_files(finished.folder)


OTHER_TESTS = {
    "other examples": replace(TINY, options={"solve": {"test_seed": "9"}}),
    "fewer instances": replace(TINY, instances=11),
    "fewer runs": replace(TINY, seeds=1),
    "another expert": replace(TINY, options={"solve": {"expert": "another"}}),
}


@pytest.mark.parametrize("change", OTHER_TESTS)
def test_recipes_on_other_test_data_are_not_shown_together(change: str, tmp_path: Path) -> None:
    """The other recipe may be older than a change of the test data: its figures are not comparable."""

    def shown_after(choices: Choices, recipe: str) -> tuple[list[str], set[str]]:
        shown: list[list[str]] = []

        def note(records: Any, _: Any) -> None:
            if not isinstance(records, Judgements):
                shown.append([study.recipe for study in records])

        wanted = replace(choices, tasks=("solve",), recipes=(recipe,))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            reproduce("table-handoffs", tmp_path, wanted, written=note)
        (recipes,) = shown
        other = {"ours": "published", "published": "ours"}[recipe]
        is_beside = (tmp_path / other / "table-handoffs.json").is_file()
        left_out = [str(one.message) for one in said if issubclass(one.category, LeftOutWarning)]
        assert len(left_out) == (is_beside and other not in recipes)
        assert all(f"--recipe {other}" in one and "other data" in one for one in left_out)
        return recipes, {one.recipe for one in load_judgements(tmp_path / "verdicts.json").judgements}

    assert shown_after(TINY, "published") == (["published"], {"published"})
    assert shown_after(OTHER_TESTS[change], "ours") == (["ours"], {"ours"})
    both = ["published", "ours"]
    assert shown_after(OTHER_TESTS[change], "published") == (both, set(both))
    assert shown_after(TINY, "ours") == (["ours"], {"ours"})


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
