"""The job of `seqdefer reproduce`: prepare the tasks, make the studies by both recipes, write each when it is done.

OUT/TASK/               labels, rejectors and cells
OUT/RECIPE/STUDY.json   what was measured by one recipe, and .csv; origins.json
OUT/STUDY.tex           both recipes beside each other, and .pdf, .svg; verdicts.*
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from seqdefer.errors import DataError, InputError, OptionError, require_known
from seqdefer.paper.cells import measure_cells
from seqdefer.paper.claims import judge
from seqdefer.paper.labs import BOTH, Choices, Labs
from seqdefer.paper.plan import STUDIES, ReproductionPlan
from seqdefer.paper.records import Judgements, Study, join_studies, load_study, study_of_task
from seqdefer.paper.render.files import write_judgements, write_studies
from seqdefer.paper.render.panels import require_matplotlib
from seqdefer.paper.studies import Studies
from seqdefer.progress import Clock, Meter, Silent


class LeftOutWarning(UserWarning):
    """A study of an earlier command does not belong beside those of this one."""


OnWritten = Callable[[Sequence[Study] | Judgements, list[Path]], None]
Made = dict[str, dict[str, Study]]  # by name of the study and recipe


def reproduce(
    name: str,
    folder: Path,
    choices: Choices,
    *,
    command: str = "",
    meter: Meter | None = None,
    written: OnWritten = lambda *_: None,
) -> Made:
    """Make the study `name`, or all, by each recipe, in `folder`. Call `written` with the records and their files."""
    require_known("study", name, (*STUDIES, "all"))
    plan, seeds, clock = choices.plan, choices.n_seeds, Clock(meter or Silent())
    labs = Labs(folder, choices, clock)
    names = STUDIES if name == "all" else (name,)
    asked = choices.named_tasks or plan.tasks
    wanted = {one: [task for task in plan.tasks_of(one) if task in asked] for one in names}
    if not any(wanted.values()):
        known = ", ".join(plan.tasks_of(name))
        raise OptionError(f"{name} does not use the task {', '.join(choices.named_tasks)}; its tasks: {known}")
    used = {task for tasks in wanted.values() for task in tasks}
    for task in sorted(choices.options.keys() - used):
        raise OptionError(f"--set {task}: this command does not run the task {task}, only {', '.join(sorted(used))}")
    if choices.figures:  # fail before hours of work, not after
        require_matplotlib()
    labs.prepare(task for tasks in wanted.values() for task in tasks)
    found = _load_studies(folder, choices.preset, seeds, labs)
    makers = {
        recipe: Studies(plan, choices.preset, recipe, seeds, labs.by(recipe), clock) for recipe in choices.recipes
    }
    if choices.jobs > 1:
        measure_cells([cell for maker in makers.values() for cell in maker.cells(wanted)], folder, choices, clock)
    made: Made = {}
    for one, tasks in wanted.items():
        if tasks:
            made[one] = {
                recipe: _with_earlier_tasks(maker.make(one, tasks), found.get((one, recipe)), plan)
                for recipe, maker in makers.items()
            }
            found.update({(one, recipe): study for recipe, study in made[one].items()})
            labs.save_origins(command)
            both = [found[one, recipe] for recipe in BOTH if (one, recipe) in found]
            written(both, write_studies(both, folder, figures=choices.figures))
    in_order = [found[one, recipe] for one in STUDIES for recipe in BOTH if (one, recipe) in found]
    judgements = Judgements(choices.preset, seeds, tuple(judge(in_order)))
    if judgements.judgements:
        written(judgements, write_judgements(judgements, folder))
    return made


def _load_studies(folder: Path, preset: str, seeds: int, labs: Labs) -> dict[tuple[str, str], Study]:
    """Load the studies of earlier commands that were made of the same data, models and settings."""
    found = {}
    for name in STUDIES:
        for recipe in BOTH:
            path = folder / recipe / f"{name}.json"
            if not path.is_file():
                continue
            try:
                study = load_study(path)
                is_same = (study.name, study.recipe, study.preset, study.seeds) == (name, recipe, preset, seeds)
                if is_same and labs.made(study):
                    found[name, recipe] = study
                    continue
                reason = "it is of other data, models, settings or seeds"
            except (DataError, InputError) as error:
                reason = str(error)
            if recipe not in labs.choices.recipes:  # others are made again now
                warnings.warn(
                    f"{path} is left out: {reason}; make it again: --recipe {recipe}", LeftOutWarning, stacklevel=3
                )
    return found


def _with_earlier_tasks(study: Study, found: Study | None, plan: ReproductionPlan) -> Study:
    """Add the tasks that only an earlier command measured."""
    studies = {task: one for one in (found, study) if one for task in one.tasks}
    order = [task for task in dict.fromkeys((*plan.tasks, *studies)) if task in studies]
    return join_studies([study_of_task(studies[task], task) for task in order])
