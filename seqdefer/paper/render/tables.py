"""The tables of the studies as grids of text: as published, ours, and the paper's figures beside each other.

    studies = [load_study(f"runs/reproduce/{recipe}/table1.json") for recipe in ("published", "ours")]
    for grid in layout_studies(studies):
        print(grid.title, [column.heading for column in grid.columns])

`latex.py` and `files.py` write them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from seqdefer.errors import unknown
from seqdefer.paper.records import Contrast, Judgement, Judgements, Line, Row, Study
from seqdefer.paper.render.grids import (
    Band,
    Cell,
    Column,
    FilledColumn,
    Grid,
    Item,
    Rows,
    make_grid,
    number_column,
    text_column,
)
from seqdefer.paper.render.rows import (
    MULTIPLE,
    PSI_NAMES,
    all_rows,
    measured_parts,
    measured_tasks,
    methods_by_block,
    network_of,
    rows_of_task,
)
from seqdefer.recipes import IN_WORDS
from seqdefer.report.markup import number
from seqdefer.report.style import BLOCKS, HEADROOM, decimals_for

BUDGETS = (0, 10, 20, 50, 100)  # percent of the tokens
TRAINING_HEADINGS = {
    "epochs": "epochs",
    "best_epoch": "best epoch",
    "by_teacher": "% by the teacher",
    "by_closed_trees": "% by closed trees",
}
TRAINING_REMARK = (
    "Epochs: until training stopped, and the one whose weights were kept. By the teacher, by closed trees: decisions "
    "of training rollouts that hindsight, or trees without that branch, turned against the rejector; means."
)
CHOSEN_MARK, DEFAULT_MARK, RULE_MARK = "*", "†", "‡"
LEARNED = ("OneTimeModel", "OneTimeCost")  # methods with a column of validation figures
MAX_CONTRASTS = 3  # per claim, the weakest; verdicts.json and .csv hold all
PERCENT_REMARK = "%: improvement over Random."
BEST_REMARK = "Bold: best of its block."


# --- verdicts --------------------------------------------------------------------------------------------------------


def layout_verdicts(judgements: Judgements) -> Grid:
    """Lay out a band for each claim and a row for each task and recipe."""
    columns = (
        Column("Claim", align="left", width=0.22),
        Column("Task", align="left"),
        Column("Recipe", align="left"),
        Column("Verdict", align="left"),
        Column("Difference in points of % improvement [95 % interval]", align="left", width=0.28),
        Column("Likely reason, from our runs", align="left", width=0.18),
    )
    claims: dict[str, list[Judgement]] = {}
    for judgement in judgements.judgements:
        claims.setdefault(judgement.claim, []).append(judgement)
    bands = tuple(Band("", tuple(_verdict_cells(row, row is rows[0]) for row in rows)) for rows in claims.values())
    caption = f"Paired bootstrap over {_runs(judgements.seeds)} and their test instances; preset {judgements.preset}."
    return Grid("verdicts", "The paper's claims and our verdicts", columns, bands, caption)


def _verdict_cells(judgement: Judgement, is_first: bool) -> tuple[Cell, ...]:
    # Contrasts against the claim come first: a wide interval may reach lower and decides nothing.
    weakest = sorted(judgement.contrasts, key=lambda one: (one.high > 0, one.low))
    lines = [_contrast_text(one) for one in weakest[:MAX_CONTRASTS]]
    if len(weakest) > MAX_CONTRASTS:
        lines.append(f"and {len(weakest) - MAX_CONTRASTS} stronger ones")
    statement = judgement.statement if is_first else ""
    recipe, differences = IN_WORDS.get(judgement.recipe, judgement.recipe), "\n".join(lines)
    return tuple(map(Cell, (statement, judgement.task, recipe, judgement.verdict, differences, judgement.reason)))


def _contrast_text(contrast: Contrast) -> str:
    sign = "+" if contrast.difference > 0 else ""
    interval = f"[{number(contrast.low, 2)}, {number(contrast.high, 2)}]"
    return f"{contrast.first} over {contrast.second}: {sign}{number(contrast.difference, 2)} {interval}"


# --- studies ---------------------------------------------------------------------------------------------------------


def layout_studies(studies: Sequence[Study]) -> list[Grid]:
    """Lay out the studies of one name by several recipes: a grid for each task, or for each task and recipe."""
    joint = {"table1": _table1, "table-handoffs": _hand_offs, "table-psi": _psis, "table-ablation": _ablation}
    apart = {"figure-curves": _curves, "figure-alpha": _alphas}
    name = studies[0].name
    if name in joint:
        return [joint[name](studies, task) for task in measured_tasks(studies)]
    if name in apart:
        return [apart[name](study, task) for study, task in measured_parts(studies)]
    raise unknown("study", name, [*joint, *apart])


def _table1(studies: Sequence[Study], task: str) -> Grid:
    blocks = methods_by_block(all_rows(studies, task))
    filled = [text_column(Column("Method", align="left"), map(Rows, blocks.values()))]
    for study in studies:
        rows = {row.method: row for row in rows_of_task(study, task)}
        bands = [Rows([rows.get(name) for name in names], block != "reference") for block, names in blocks.items()]
        filled += _outcomes(study, IN_WORDS[study.recipe], bands)
    known = {row.method: row for row in all_rows(studies, task)}
    filled += _papers([Rows([known[name] for name in names]) for names in blocks.values()])
    area = "AUDC: area under the deferral curve, lower is better."
    remarks = (area, PERCENT_REMARK, HEADROOM, BEST_REMARK)
    return _task_grid(studies, task, remarks, filled, map(BLOCKS.__getitem__, blocks))


def _curves(study: Study, task: str) -> Grid:
    """Read the curves off at a few budgets."""
    lines = {line.method: line for line in study.lines if line.task == task}
    blocks = methods_by_block(lines.values())
    bands = [Rows([lines[name] for name in names], block != "reference") for block, names in blocks.items()]
    decimals = decimals_for(loss for line in lines.values() for loss in line.mean)
    filled = [text_column(Column("Method", align="left"), map(Rows, blocks.values()))]
    filled += [_losses_at(study, bands, budget, decimals) for budget in BUDGETS]
    remark = f"Loss ({study.tasks[task].loss_unit}) by the share of the tokens that the expert writes."
    return _task_grid([study], task, (remark, BEST_REMARK), filled, map(BLOCKS.__getitem__, blocks))


def _losses_at(study: Study, bands: Sequence[Rows[Line]], budget: int, decimals: int) -> FilledColumn:
    def at(losses: Sequence[float]) -> float:
        return losses[round(budget / 100 * (len(losses) - 1))]

    spread: Callable[[Line], str] = _spread(study, lambda line: at(line.std), decimals)
    return number_column(Column(f"{budget} %"), bands, lambda line: at(line.mean), min, spread, decimals)


def _hand_offs(studies: Sequence[Study], task: str) -> Grid:
    """Lay out a row for each size of J, and columns for each method by each recipe."""
    rows = all_rows(studies, task)
    sizes, methods = sorted({row.varied["hand_offs"] for row in rows}), dict.fromkeys(row.method for row in rows)

    def band(study: Study, method: str) -> list[Rows[Row]]:
        known = {row.varied["hand_offs"]: row for row in rows_of_task(study, task) if row.method == method}
        return [Rows([known.get(size) for size in sizes])]

    filled = [text_column(Column("|J|"), [Rows(sizes)])]
    for study in studies:
        for method in methods:
            if any(band(study, method)[0].items):
                group = f"{IN_WORDS[study.recipe]}: {method}"
                filled += _improvements(study, group, band(study, method), has_validation=method in LEARNED)
    for method in methods:
        known = {row.varied["hand_offs"]: row for row in rows if row.method == method}
        filled += _papers([Rows([known.get(size) for size in sizes])], method)
    marks = _marks(rows, "the recipe's choice")
    return _task_grid(studies, task, (PERCENT_REMARK, "Bold: best of its column.", *marks), filled)


def _alphas(study: Study, task: str) -> Grid:
    """Lay out a row for each alpha_1 and a column for each size of J; the paper draws them without numbers."""
    rows = rows_of_task(study, task)
    sizes = sorted({row.varied["hand_offs"] for row in rows})
    alphas = list({row.varied["alpha"]: row for row in sorted(rows, key=lambda row: row.varied["alpha"])}.values())
    times = [f"{row.varied['times']:.4g}" + f" {RULE_MARK}" * row.varied["is_rule"] for row in alphas]
    filled = [text_column(Column(MULTIPLE), [Rows(times)])]
    for key, heading in {"alpha": "α₁", "alpha_token": "α_L"}.items():
        filled.append(text_column(Column(heading), [Rows([f"{row.varied[key]:.4g}" for row in alphas])]))
    for size in sizes:
        known = {row.varied["alpha"]: row for row in rows if row.varied["hand_offs"] == size}
        band = Rows([known.get(row.varied["alpha"]) for row in alphas])
        filled += _improvements(study, f"|J| = {size}", [band], has_validation=len(sizes) == 1)
    remarks = [PERCENT_REMARK, "Bold: best of its column.", *_marks(rows, "the recipe's choice")]
    return _task_grid([study], task, [*remarks, f"{RULE_MARK}: the rule of thumb."], filled)


def _psis(studies: Sequence[Study], task: str) -> Grid:
    """Lay out a row for each surrogate of one-time deferral."""
    names = list(dict.fromkeys(row.varied["psi"] for row in all_rows(studies, task)))
    shown = [PSI_NAMES.get(name, name) for name in names]
    filled = [text_column(Column("Surrogate", align="left"), [Rows(shown)])]
    for study in studies:
        known = {row.varied["psi"]: row for row in rows_of_task(study, task)}
        filled += _outcomes(study, IN_WORDS[study.recipe], [Rows([known.get(name) for name in names])])
    marks = _marks(all_rows(studies, task), "the recipe's choice")
    remarks = (PERCENT_REMARK, HEADROOM, "Bold: best of its column.", *marks)
    return _task_grid(studies, task, [*remarks, *_contrast_remarks(studies, task)], filled)


def _contrast_remarks(studies: Sequence[Study], task: str) -> list[str]:
    contrasts = [(study, one) for study in studies for one in study.contrasts if one.task == task]
    return [f"{IN_WORDS[study.recipe].capitalize()}, {_contrast_text(one)}." for study, one in contrasts]


def _ablation(studies: Sequence[Study], task: str) -> Grid:
    """Lay out a row for each network and baseline, and columns for each recipe; the paper's come last."""

    def name_of(row: Row) -> str:
        return ", ".join(network_of(row)) if row.varied else row.method

    rows = all_rows(studies, task)
    networks, baselines = (
        list(dict.fromkeys(name_of(row) for row in rows if bool(row.varied) is is_network))
        for is_network in (True, False)
    )
    filled = [text_column(Column("Method", align="left"), [Rows(networks), Rows(baselines)])]
    for study in studies:
        known = {name_of(row): row for row in rows_of_task(study, task)}
        bands = [Rows(list(map(known.get, networks))), Rows(list(map(known.get, baselines)), has_best=False)]
        group = IN_WORDS[study.recipe]
        filled += [_areas(study, group, bands), *_improvements(study, group, bands)]
        for fact, heading in TRAINING_HEADINGS.items():
            if any(fact in row.training for row in known.values()):
                filled.append(text_column(Column(heading, group), bands, _training_text(fact)))
    of_any = {name_of(row): row for row in rows}
    filled += _papers([Rows([of_any[name] for name in names]) for names in (networks, baselines)])
    remarks = [PERCENT_REMARK, "Bold: best network."] + [TRAINING_REMARK] * any(row.training for row in rows)
    return _task_grid(studies, task, remarks, filled)


def _training_text(fact: str) -> Callable[[Row], str]:
    return lambda row: number(row.training[fact], 1) if fact in row.training else ""


def _task_grid(
    studies: Sequence[Study],
    task: str,
    remarks: Iterable[str],
    filled: Sequence[FilledColumn],
    titles: Iterable[str] | None = None,
) -> Grid:
    """Make a grid; one of several recipes names them in its columns, one of a single recipe in its title."""
    first, recipes = studies[0], "" if len(studies) > 1 else f", {IN_WORDS[studies[0].recipe]}"
    name = f"{first.name}-{task}" + ("" if len(studies) > 1 else f"-{first.recipe}")
    caption = _caption(next(study for study in studies if task in study.instances), task, *remarks)
    return make_grid(name, f"{first.title} ({task}{recipes})", caption, filled, titles)


# --- columns ---------------------------------------------------------------------------------------------------------


def _outcomes(study: Study, group: str, bands: Sequence[Rows[Row]]) -> list[FilledColumn]:
    """Return the columns of area, improvement and headroom."""
    headroom = text_column(Column("% of headroom", group), bands, _headroom_text)
    return [_areas(study, group, bands), *_improvements(study, group, bands), headroom]


def _headroom_text(row: Row) -> str:
    return "" if row.headroom is None else number(row.headroom, 0)


def _areas(study: Study, group: str, bands: Sequence[Rows[Row]]) -> FilledColumn:
    decimals = decimals_for(row.audc_mean for band in bands for row in band.items if row is not None)
    spread: Callable[[Row], str] = _spread(study, lambda row: row.audc_std, decimals)
    return number_column(Column("AUDC", group), bands, lambda row: row.audc_mean, min, spread, decimals)


def _improvements(
    study: Study, group: str, bands: Sequence[Rows[Row]], *, has_validation: bool = False
) -> list[FilledColumn]:
    """Return our column and that of validation data, which then carries the mark of the choice."""
    spread: Callable[[Row], str] = _spread(study, lambda row: row.improvement_std)

    def after(row: Row) -> str:
        return spread(row) + ("" if has_validation else _chosen_mark(row)) + _default_mark(row)

    def validation(row: Row) -> str:
        return ("" if row.validation is None else number(row.validation, 2)) + _chosen_mark(row)

    filled = [number_column(Column("%", group), bands, lambda row: row.improvement_mean, max, after)]
    return filled + ([text_column(Column("validation %", group), bands, validation)] if has_validation else [])


def _papers(bands: Sequence[Rows[Row]], heading: str = "") -> list[FilledColumn]:
    """Return the column of the paper's figures, or none where it has none."""
    is_known = any(row is not None and row.paper for band in bands for row in band.items)
    return [text_column(Column(f"{heading} %".strip(), "the paper"), bands, _paper_text)] if is_known else []


def _paper_text(row: Row) -> str:
    if row.paper is None:
        return ""
    std = row.paper.improvement_std
    return number(row.paper.improvement, 2) + ("" if std is None else f" ({number(std, 2)})")


def _chosen_mark(row: Row) -> str:
    return f" {CHOSEN_MARK}" if row.is_chosen else ""


def _default_mark(row: Row) -> str:
    return f" {DEFAULT_MARK}" if row.is_default and row.varied else ""


def _marks(rows: Sequence[Row], default: str) -> list[str]:
    """Explain the marks that the table holds."""
    chosen = [f"{CHOSEN_MARK}: chosen by validation data."] if any(row.is_chosen for row in rows) else []
    return chosen + ([f"{DEFAULT_MARK}: {default}."] if any(row.is_default for row in rows) else [])


def _spread(study: Study, std: Callable[[Item], float], decimals: int = 2) -> Callable[[Item], str]:
    """Return what prints a standard deviation; nothing after a single run."""
    return lambda item: f" ({number(std(item), decimals)})" if study.seeds > 1 else ""


def _caption(study: Study, task: str, *remarks: str) -> str:
    mean = "Mean (standard deviation) over" if study.seeds > 1 else "From"
    instances = study.instances[task]
    return " ".join((f"{mean} {_runs(study.seeds)} of {instances} test instances, preset {study.preset}.", *remarks))


def _runs(seeds: int) -> str:
    return f"{seeds} run{'s' * (seeds > 1)}"
