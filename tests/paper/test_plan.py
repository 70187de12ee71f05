"""Plans name tasks and options that exist, and change only what they study."""

from __future__ import annotations

from dataclasses import replace

import pytest
from runs import FITS

<<<<<<< HEAD
from seqdefer.paper import plan
from seqdefer.paper.plan import settings_of
from seqdefer.registry import load_task
=======
from seqdefer.evaluation import experiment, splits
from seqdefer.labels import jobs
from seqdefer.methods.registry import all_methods
from seqdefer.paper.claims import CLAIMS, judge
from seqdefer.paper.plan import STUDIES
from seqdefer.paper.records import Judgements, Row, Study, load_judgements, load_origins, load_study
from seqdefer.paper.reproduce import Choices, reproduce
from tests.paper.test_lab import PLAN, SEEDS, Spy, install
>>>>>>> core-tests

planned = pytest.mark.parametrize(
    ("preset", "name"), [(preset, name) for preset in ("paper", "quick") for name in plan.PLANS[preset].tasks]
)


@planned
def test_plans_name_tasks_and_options_that_exist(preset: str, name: str) -> None:
    entry, task = load_task(name), plan.PLANS[preset].tasks[name]
    options = replace(entry.presets[task.preset], **task.options)  # raises for unknown names and values out of range
    for changes in task.inputs.values():
        replace(options, **changes)
    assert plan.PLANS[preset].tasks[plan.PLANS[preset].ablated_task].inputs


<<<<<<< HEAD
@planned
def test_cells_of_the_ablation_differ_only_in_what_is_ablated(preset: str, name: str) -> None:
    """Both architectures have the paper's hyperparameters, with at most the epochs of the preset."""
    entry, task = load_task(name), plan.PLANS[preset].tasks[name]
    default = settings_of(entry, task, 2)
    papers = entry.hyperparameters.published_token or default.token
    for architecture in plan.ARCHITECTURES:
        for strategy in plan.STRATEGIES:
            chosen = plan.ablated_settings(entry, default, architecture, strategy)
            assert (chosen.token.architecture, chosen.strategy) == (architecture, strategy)
            assert chosen.token.epochs <= default.token.epochs
            same = replace(chosen.token, architecture=papers.architecture, epochs=papers.epochs)
            assert same == papers
            assert replace(chosen, token=default.token, strategy=default.strategy) == default
=======
@pytest.fixture(name="installed", scope="module", autouse=True)
def installed_fixture() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


@dataclass(frozen=True)
class Finished:
    folder: Path
    made: Mapping[str, Study]


@cache
def made_under(temporary: Path) -> Finished:
    """Once for all files that need it: it takes seconds."""
    folder = temporary / "reproduced"
    return Finished(folder, reproduce("all", folder, replace(TINY, figures=bool(DRAWN)), command="seqdefer ..."))


@pytest.fixture(name="finished", scope="module")
def finished_fixture(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """All studies, made at one go. Nobody may change the folder."""
    return made_under(tmp_path_factory.getbasetemp())


@pytest.fixture(name="copied")
def copied_fixture(finished: Finished, tmp_path: Path) -> Path:
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


@pytest.fixture(name="work")
def work_fixture(spy: Spy) -> dict[str, list[tuple[Any, ...]]]:
    """Every fit, every labelling, every rejector that is loaded."""
    others = {"load_rejector": experiment, "draft": jobs, "hand_off_table": jobs, "enumerate_trees": splits}
    return {name: spy(owner, name) for name, owner in (FITS | others).items()}


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
    fitted = {"spell": {*all_methods()}, "spell (blind)": {"TokenwiseModel"}, "solve": {*list(all_methods())[:11]}}
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
>>>>>>> core-tests
