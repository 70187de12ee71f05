"""How each study is laid out: records in, grids of text out, the paper's figures always beside ours.

    for grid in layout_study(load_study("runs/reproduce/table1.json")):
        print(grid.title, [column.heading for column in grid.columns])

This is the one place that knows which rows, columns and blocks a table has. Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seqdefer.errors import unknown
from seqdefer.evaluation.results import Block
from seqdefer.paper.records import Contrast, Judgement, Judgements, Line, Row, Study
from seqdefer.paper.render.grids import Band, Cell, Column, Grid, Rows, Strip, figures, labels, texts, weave
from seqdefer.report.markup import number
from seqdefer.report.svg import BLOCKS, block_of

BUDGETS = (0, 10, 20, 50, 100)  # percent of the tokens, at which the table of the curves reads them off
STRATEGIES = {"free": "no teacher forcing", "teacher": "teacher forcing", "scheduled": "scheduled sampling"}
CHOSEN, DEFAULT = "*", "†"
LEARNED = ("OneTimeModel", "OneTimeCost")  # whose choice of |J| is worth a column
SHOWN_CONTRASTS = 3  # of a claim, the weakest; verdicts.json and .csv have them all
MULTIPLE = "times the mean gain"  # what the figure of alpha counts in: what the expert gains on average
IS_PERCENT = "%: improvement over Random."
IS_BEST = "Bold: best of its block."


def layout_study(study: Study) -> list[Grid]:
    if study.name not in _LAYOUTS:
        raise unknown("study", study.name, _LAYOUTS)
    return _LAYOUTS[study.name](study)


def layout_judgements(judgements: Judgements) -> list[Grid]:
    """A band for each claim, a row for each task."""
    columns = (
        Column("Claim", align="left", width=0.24),
        Column("Task", align="left"),
        Column("Verdict", align="left"),
        Column("Difference in points of % improvement [95 % interval]", align="left", width=0.3),
        Column("Likely reason", align="left", width=0.18),
    )
    claims: dict[str, list[Judgement]] = {}
    for judgement in judgements.judgements:
        claims.setdefault(judgement.claim, []).append(judgement)
    bands = tuple(Band("", tuple(_judgement_cells(row, row is rows[0]) for row in rows)) for rows in claims.values())
    caption = f"Paired bootstrap over {_runs(judgements.seeds)} and their test instances; preset {judgements.preset}."
    return [Grid("verdicts", "The paper's claims, and what our intervals say of them", columns, bands, caption)]


def _judgement_cells(judgement: Judgement, is_first: bool) -> tuple[Cell, ...]:
    # Those that speak against the claim come first: a wide interval may reach lower, and decides nothing.
    weakest = sorted(judgement.contrasts, key=lambda one: (one.high > 0, one.low))
    lines = [_contrast_text(one) for one in weakest[:SHOWN_CONTRASTS]]
    if len(weakest) > SHOWN_CONTRASTS:
        lines.append(f"and {len(weakest) - SHOWN_CONTRASTS} stronger ones")
    contrasts = "\n".join(lines)
    statement = judgement.statement if is_first else ""
    return tuple(map(Cell, (statement, judgement.task, judgement.verdict, contrasts, judgement.reason)))


def _contrast_text(contrast: Contrast) -> str:
    sign = "+" if contrast.difference > 0 else ""
    interval = f"[{number(contrast.low, 2)}, {number(contrast.high, 2)}]"
    return f"{contrast.first} over {contrast.second}: {sign}{number(contrast.difference, 2)} {interval}"


# --- what the drawings are made from too -----------------------------------------------------------------------------


def methods_by_block(measured: Iterable[Row | Line]) -> dict[Block, list[str]]:
    """Methods in the order they come in, blocks in the order of the paper's table, empty ones left out."""
    blocks: dict[Block, list[str]] = {block: [] for block in BLOCKS}
    for item in measured:
        names = blocks[block_of(item.method, item.granularity)]
        if item.method not in names:
            names.append(item.method)
    return {block: names for block, names in blocks.items() if names}


def of_task(study: Study, task: str) -> list[Row]:
    return [row for row in study.rows if row.task == task]


def named_networks(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """The rows of the ablation that a network has, by its label, then by what it sees."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.varied:
            found.setdefault(_network_label(row.varied), {})[str(row.varied["inputs"])] = row
    return found


def _network_label(varied: Mapping[str, Any]) -> str:
    strategy = str(varied["strategy"])
    return f"{str(varied['architecture']).upper()}, {STRATEGIES.get(strategy, strategy)}"


def inputs_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(str(row.varied["inputs"]) for row in rows if row.varied))


# --- studies ---------------------------------------------------------------------------------------------------------


def _table1(study: Study) -> list[Grid]:
    """Methods in the paper's blocks; for each task AUDC, % improvement and the paper's."""
    blocks = methods_by_block(study.rows)
    strips = [labels(Column("Method", align="left"), blocks.values())]
    for task in study.tasks:
        rows = {row.method: row for row in of_task(study, task)}
        bands = [Rows([rows.get(name) for name in names], block != "reference") for block, names in blocks.items()]
        strips += [_areas(study, task, bands), *_improvements(study, task, bands)]
    caption = _caption(study, "AUDC: area under the deferral curve, lower is better.", IS_PERCENT, IS_BEST)
    return [weave(study.name, study.title, caption, strips, [BLOCKS[block] for block in blocks])]


def _curves(study: Study) -> list[Grid]:
    """For each task the loss that is left at a few budgets."""
    return [_curves_of(study, task) for task in study.tasks if any(line.task == task for line in study.lines)]


def _curves_of(study: Study, task: str) -> Grid:
    lines = {line.method: line for line in study.lines if line.task == task}
    blocks = methods_by_block(lines.values())
    bands = [Rows([lines[name] for name in names], block != "reference") for block, names in blocks.items()]
    decimals = _decimals(max(map(abs, line.mean)) for line in lines.values())
    strips = [labels(Column("Method", align="left"), blocks.values())]
    strips += [_losses_at(study, bands, budget, decimals) for budget in BUDGETS]
    remark = f"Loss ({study.tasks[task].loss_unit}) by the share of the tokens that the expert writes."
    caption = _caption(study, remark, IS_BEST, task=task)
    return weave(
        f"{study.name}-{task}", f"{study.title} ({task})", caption, strips, [BLOCKS[block] for block in blocks]
    )


def _losses_at(study: Study, bands: Sequence[Rows[Line]], budget: int, decimals: int) -> Strip:
    def step(line: Line) -> int:
        return round(budget / 100 * (len(line.mean) - 1))

    def after(line: Line) -> str:
        return _spread(study, line.std[step(line)], decimals)

    return figures(Column(f"{budget} %"), bands, lambda line: line.mean[step(line)], decimals, min, after)


def _hand_offs(study: Study) -> list[Grid]:
    return _sweeps(study, {"hand_offs": "|J|"}, "what is done by default")


def _alpha(study: Study) -> list[Grid]:
    has_paper = any(row.paper for row in study.rows)  # it draws these, and prints no figures
    settings = {"times": MULTIPLE, "alpha": "α₁", "alpha_token": "α_L"}
    return _sweeps(study, settings, "the rule of thumb", has_paper=has_paper)


def _sweeps(study: Study, settings: Mapping[str, str], default: str, *, has_paper: bool = True) -> list[Grid]:
    """For each task a row for each value of the first of the settings, and columns for each method."""
    return [_sweep(study, task, settings, default, has_paper) for task in study.tasks if of_task(study, task)]


def _sweep(study: Study, task: str, settings: Mapping[str, str], default: str, has_paper: bool) -> Grid:
    rows, first = of_task(study, task), next(iter(settings))
    values = sorted({row.varied[first] for row in rows})
    lines = [[row for row in rows if row.varied[first] == value] for value in values]
    strips = []
    for key, heading in settings.items():
        daggers = [_dagger(line) if key == first else "" for line in lines]
        shown = [f"{line[0].varied[key]:.4g}{dagger}" for line, dagger in zip(lines, daggers, strict=True)]
        strips.append(labels(Column(heading), [shown]))
    for method in dict.fromkeys(row.method for row in rows):
        found = [next((row for row in line if row.method == method), None) for line in lines]
        is_judged = method in LEARNED
        strips += _improvements(study, method, [Rows(found)], has_validation=is_judged, has_paper=has_paper)
    remarks = (IS_PERCENT, "Bold: best of its column.", *_marks(rows, default))
    return weave(f"{study.name}-{task}", f"{study.title} ({task})", _caption(study, *remarks, task=task), strips)


def _ablation(study: Study) -> list[Grid]:
    """For each task a row for each network and baseline, columns for each kind of inputs, the paper's last."""
    return [_ablation_of(study, task) for task in study.tasks if of_task(study, task)]


def _ablation_of(study: Study, task: str) -> Grid:
    rows = of_task(study, task)
    networks, baselines = named_networks(rows), [row for row in rows if not row.varied]
    names = [f"{name}{_dagger(variants.values())}" for name, variants in networks.items()]
    strips = [labels(Column("Method", align="left"), [names, [row.method for row in baselines]])]
    for inputs in inputs_of(rows):
        # Baselines see no inputs: theirs is the same figure in every group, to compare with.
        bands = [Rows([variants.get(inputs) for variants in networks.values()]), Rows(baselines, has_best=False)]
        group = f"inputs: {inputs}"
        strips += [_areas(study, group, bands), *_improvements(study, group, bands, has_paper=False)]
    papers = [next((row for row in variants.values() if row.paper), None) for variants in networks.values()]
    strips.append(texts(Column("paper %"), [Rows(papers), Rows(baselines)], _paper_text))
    shown = [row for row in rows if row.varied]  # the marks are the networks'
    caption = _caption(study, IS_PERCENT, "Bold: best network.", *_marks(shown, "what is done by default"), task=task)
    return weave(f"{study.name}-{task}", f"{study.title} ({task})", caption, strips)


_LAYOUTS = {
    "table1": _table1,
    "figure-curves": _curves,
    "table-handoffs": _hand_offs,
    "figure-alpha": _alpha,
    "table-ablation": _ablation,
}


# --- columns ---------------------------------------------------------------------------------------------------------


def _areas(study: Study, group: str, bands: Sequence[Rows[Row]]) -> Strip:
    decimals = _decimals(abs(row.audc_mean) for band in bands for row in band.items if row is not None)

    def after(row: Row) -> str:
        return _spread(study, row.audc_std, decimals)

    return figures(Column("AUDC", group), bands, lambda row: row.audc_mean, decimals, min, after)


def _improvements(
    study: Study, group: str, bands: Sequence[Rows[Row]], *, has_validation: bool = False, has_paper: bool = True
) -> list[Strip]:
    """Ours; validation data's, which then bears the star; the paper's."""

    def after(row: Row) -> str:
        return _spread(study, row.improvement_std, 2) + ("" if has_validation else _star(row))

    strips = [figures(Column("%", group), bands, lambda row: row.improvement_mean, 2, max, after)]
    if has_validation:
        strips.append(texts(Column("validation %", group), bands, _validation_text))
    if has_paper:
        strips.append(texts(Column("paper %", group), bands, _paper_text))
    return strips


def _validation_text(row: Row) -> str:
    return ("" if row.validation is None else number(row.validation, 2)) + _star(row)


def _paper_text(row: Row) -> str:
    if row.paper is None:
        return ""
    std = row.paper.improvement_std
    return number(row.paper.improvement, 2) + ("" if std is None else f" ({number(std, 2)})")


def _star(row: Row) -> str:
    return f" {CHOSEN}" if row.is_chosen else ""


def _dagger(rows: Iterable[Row]) -> str:
    return f" {DEFAULT}" if any(row.is_default for row in rows) else ""


def _marks(rows: Sequence[Row], default: str) -> list[str]:
    """What the marks mean, of those that stand in the table."""
    chosen = [f"{CHOSEN}: chosen by validation data."] if any(row.is_chosen for row in rows) else []
    return chosen + ([f"{DEFAULT}: {default}."] if any(row.is_default for row in rows) else [])


def _spread(study: Study, std: float, decimals: int) -> str:
    return f" ({number(std, decimals)})" if study.seeds > 1 else ""


def _decimals(sizes: Iterable[float]) -> int:
    """Four digits of the largest, two after the point at least."""
    largest = max(sizes, default=0) or 1
    return min(max(3 - math.floor(math.log10(largest)), 2), 6)


def _caption(study: Study, *remarks: str, task: str | None = None) -> str:
    counts = {name: study.instances[name] for name in study.tasks if task in (None, name)}
    alike = len(set(counts.values())) == 1
    instances = str(next(iter(counts.values()))) if alike else ", ".join(f"{n} ({name})" for name, n in counts.items())
    mean = "Mean (standard deviation) over" if study.seeds > 1 else "From"
    return " ".join((f"{mean} {_runs(study.seeds)} of {instances} test instances, preset {study.preset}.", *remarks))


def _runs(seeds: int) -> str:
    return f"{seeds} run{'s' * (seeds > 1)}"
