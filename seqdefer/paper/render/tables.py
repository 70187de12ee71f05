"""The tables of the studies as grids of text, with the paper's figures beside ours.

    for grid in layout_study(load_study("runs/reproduce/table1.json")):
        print(grid.title, [column.heading for column in grid.columns])

Grids are built column by column, because the best number of a column is bold. `latex.py` and `files.py` write them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from seqdefer.errors import unknown
from seqdefer.evaluation.results import Block
from seqdefer.paper.records import Contrast, Judgement, Judgements, Line, Row, Study
from seqdefer.report.markup import number
from seqdefer.report.style import BLOCKS, decimals_for, group_by_block

BUDGETS = (0, 10, 20, 50, 100)  # percent of the tokens
STRATEGY_NAMES = {"free": "no teacher forcing", "teacher": "teacher forcing", "scheduled": "scheduled sampling"}
CHOSEN_MARK, DEFAULT_MARK, NOT_MEASURED = "*", "†", "–"
LEARNED = ("OneTimeModel", "OneTimeCost")  # methods with a column of validation figures
MAX_CONTRASTS = 3  # per claim, the weakest; verdicts.json and .csv hold all
MULTIPLE = "times the mean gain"  # the unit of alpha_1: the mean gain of the expert
PERCENT_REMARK = "%: improvement over Random."
BEST_REMARK = "Bold: best of its block."
Item = TypeVar("Item")


# --- grids -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    text: str  # may hold line breaks
    is_best: bool = False


@dataclass(frozen=True)
class Column:
    heading: str
    group: str = ""  # a heading above neighbours that share it
    align: Literal["left", "right"] = "right"
    width: float | None = None  # share of the page, for text that wraps


@dataclass(frozen=True)
class Band:
    """The rows between two rules, with one cell per column of the grid."""

    title: str
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Grid:
    name: str  # for labels: table-handoffs-tsp
    title: str
    columns: tuple[Column, ...]
    bands: tuple[Band, ...]
    caption: str = ""

    @property
    def n_characters(self) -> int:
        """Width in characters: the longest line of each column, plus the gaps."""
        rows = [row for band in self.bands for row in band.rows]
        texts = [[column.heading, *(row[place].text for row in rows)] for place, column in enumerate(self.columns)]
        return sum(2 + max(len(line) for text in column for line in text.split("\n")) for column in texts)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Runs of neighbouring columns with the same group, and their lengths."""
        found: list[tuple[str, int]] = []
        for column in self.columns:
            count = found.pop()[1] if found and found[-1][0] == column.group else 0
            found.append((column.group, count + 1))
        return found


@dataclass(frozen=True)
class Rows(Generic[Item]):
    """The records behind the rows of a band; None where nothing was measured."""

    items: Sequence[Item | None]
    has_best: bool = True


FilledColumn = tuple[Column, list[list[Cell]]]  # cells by band


def text_column(column: Column, bands: Iterable[Rows[Item]], text: Callable[[Item], str] = str) -> FilledColumn:
    return column, [[Cell("" if item is None else text(item)) for item in band.items] for band in bands]


def number_column(
    column: Column,
    bands: Iterable[Rows[Item]],
    value: Callable[[Item], float],
    best: Callable[[Iterable[float]], float],
    after: Callable[[Item], str] = lambda _: "",
    decimals: int = 2,
) -> FilledColumn:
    """Print a number and the text `after` it in each row. `best` is min or max.

    Numbers are compared as printed, so that ties are bold, as in the paper. Where all are equal, none is bold.
    """

    def cells(band: Rows[Item]) -> list[Cell]:
        texts = [None if item is None else number(value(item), decimals) for item in band.items]
        known = [value(item) for item in band.items if item is not None]
        is_contest = band.has_best and (len({*texts} - {None}) > 1 or len(texts) == 1)
        top = number(best(known), decimals) if known and is_contest else None
        return [
            Cell(NOT_MEASURED) if item is None or text is None else Cell(text + after(item), text == top)
            for item, text in zip(band.items, texts, strict=True)
        ]

    return column, [cells(band) for band in bands]


def make_grid(
    name: str, title: str, caption: str, filled: Sequence[FilledColumn], titles: Iterable[str] | None = None
) -> Grid:
    """Turn columns into rows. `titles` name the bands."""
    bands = [tuple(zip(*cells, strict=True)) for cells in zip(*(cells for _, cells in filled), strict=True)]
    titled = zip([""] * len(bands) if titles is None else titles, bands, strict=True)
    return Grid(name, title, tuple(column for column, _ in filled), tuple(Band(*band) for band in titled), caption)


def split_groups(grid: Grid) -> list[Grid]:
    """Return a narrower grid for each group of columns; columns without a group are in all of them."""
    grids = []
    for group in (group for group, _ in grid.groups if group):
        places = [place for place, column in enumerate(grid.columns) if column.group in ("", group)]
        bands = [replace(band, rows=tuple(tuple(row[i] for i in places) for row in band.rows)) for band in grid.bands]
        grids.append(replace(grid, columns=tuple(grid.columns[i] for i in places), bands=tuple(bands)))
    return grids or [grid]


# --- records, for tables and figures ---------------------------------------------------------------------------------


def measured_tasks(study: Study) -> list[str]:
    known = {record.task for record in study.lines or study.rows}
    return [task for task in study.tasks if task in known]


def rows_of_task(study: Study, task: str) -> list[Row]:
    return [row for row in study.rows if row.task == task]


def methods_by_block(records: Iterable[Row | Line]) -> dict[Block, list[str]]:
    return group_by_block((record.method, record.granularity) for record in records)


def inputs_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(str(row.varied["inputs"]) for row in rows if row.varied))


def network_of(row: Row) -> tuple[str, str]:
    """Return the architecture and the training strategy of a row of the ablation, in words."""
    strategy = str(row.varied["strategy"])
    return str(row.varied["architecture"]).upper(), STRATEGY_NAMES.get(strategy, strategy)


# --- verdicts --------------------------------------------------------------------------------------------------------


def layout_verdicts(judgements: Judgements) -> Grid:
    """Lay out a band for each claim and a row for each task."""
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
    return tuple(map(Cell, (statement, judgement.task, judgement.verdict, "\n".join(lines), judgement.reason)))


def _contrast_text(contrast: Contrast) -> str:
    sign = "+" if contrast.difference > 0 else ""
    interval = f"[{number(contrast.low, 2)}, {number(contrast.high, 2)}]"
    return f"{contrast.first} over {contrast.second}: {sign}{number(contrast.difference, 2)} {interval}"


# --- studies ---------------------------------------------------------------------------------------------------------


def layout_study(study: Study) -> list[Grid]:
    """Lay out one grid for table 1, and one per task for the other studies."""
    if study.name == "table1":
        return [_table1(study)]
    layouts = {"figure-curves": _curves, "table-handoffs": _sweep, "figure-alpha": _sweep, "table-ablation": _ablation}
    if study.name not in layouts:
        raise unknown("study", study.name, ["table1", *layouts])
    return [layouts[study.name](study, task) for task in measured_tasks(study)]


def _table1(study: Study) -> Grid:
    blocks = methods_by_block(study.rows)
    filled = [text_column(Column("Method", align="left"), map(Rows, blocks.values()))]
    for task in study.tasks:
        rows = {row.method: row for row in rows_of_task(study, task)}
        bands = [Rows([rows.get(name) for name in names], block != "reference") for block, names in blocks.items()]
        filled += [_areas(study, task, bands), *_improvements(study, task, bands)]
    area = "AUDC: area under the deferral curve, lower is better."
    caption = _caption(study, None, area, PERCENT_REMARK, BEST_REMARK)
    return make_grid(study.name, study.title, caption, filled, map(BLOCKS.__getitem__, blocks))


def _curves(study: Study, task: str) -> Grid:
    """Read the curves off at a few budgets."""
    lines = {line.method: line for line in study.lines if line.task == task}
    blocks = methods_by_block(lines.values())
    bands = [Rows([lines[name] for name in names], block != "reference") for block, names in blocks.items()]
    decimals = decimals_for(loss for line in lines.values() for loss in line.mean)
    filled = [text_column(Column("Method", align="left"), map(Rows, blocks.values()))]
    filled += [_losses_at(study, bands, budget, decimals) for budget in BUDGETS]
    remark = f"Loss ({study.tasks[task].loss_unit}) by the share of the tokens that the expert writes."
    return _task_grid(study, task, (remark, BEST_REMARK), filled, map(BLOCKS.__getitem__, blocks))


def _losses_at(study: Study, bands: Sequence[Rows[Line]], budget: int, decimals: int) -> FilledColumn:
    def at(losses: Sequence[float]) -> float:
        return losses[round(budget / 100 * (len(losses) - 1))]

    spread: Callable[[Line], str] = _spread(study, lambda line: at(line.std), decimals)
    return number_column(Column(f"{budget} %"), bands, lambda line: at(line.mean), min, spread, decimals)


def _sweep(study: Study, task: str) -> Grid:
    """Lay out a row for each value of the setting that is swept, and columns for each method."""
    is_alpha = study.name == "figure-alpha"  # which the paper draws without printing numbers
    settings = {"times": MULTIPLE, "alpha": "α₁", "alpha_token": "α_L"} if is_alpha else {"hand_offs": "|J|"}
    rows, swept = rows_of_task(study, task), next(iter(settings))
    values = sorted({row.varied[swept] for row in rows})
    lines = [[row for row in rows if row.varied[swept] == value] for value in values]
    filled = []
    for key, heading in settings.items():
        marks = [_default_mark(line) if key == swept else "" for line in lines]
        texts = [f"{line[0].varied[key]:.4g}{mark}" for line, mark in zip(lines, marks, strict=True)]
        filled.append(text_column(Column(heading), [Rows(texts)]))
    for method in dict.fromkeys(row.method for row in rows):
        band = Rows([next((row for row in line if row.method == method), None) for line in lines])
        filled += _improvements(study, method, [band], has_validation=method in LEARNED, has_paper=not is_alpha)
    default = "the rule of thumb" if is_alpha else "the default"
    return _task_grid(study, task, (PERCENT_REMARK, "Bold: best of its column.", *_marks(rows, default)), filled)


def _ablation(study: Study, task: str) -> Grid:
    """Lay out a row for each network and baseline, and columns for each set of inputs; the paper's come last."""
    rows = rows_of_task(study, task)
    networks: dict[str, dict[Any, Row]] = {}
    for row in rows:
        if row.varied:
            networks.setdefault(", ".join(network_of(row)), {})[row.varied["inputs"]] = row
    baselines = [row for row in rows if not row.varied]
    names = [f"{name}{_default_mark(variants.values())}" for name, variants in networks.items()]
    methods = [row.method for row in baselines]
    filled = [text_column(Column("Method", align="left"), [Rows(names), Rows(methods)])]
    for inputs in inputs_of(rows):
        # Baselines see no inputs: they show the same figure in every group.
        bands = [Rows([variants.get(inputs) for variants in networks.values()]), Rows(baselines, has_best=False)]
        group = f"inputs: {inputs}"
        filled += [_areas(study, group, bands), *_improvements(study, group, bands, has_paper=False)]
    papers = [next((row for row in variants.values() if row.paper), None) for variants in networks.values()]
    filled.append(text_column(Column("paper %"), [Rows(papers), Rows(baselines)], _paper_text))
    marks = _marks([row for row in rows if row.varied], "the default")
    return _task_grid(study, task, (PERCENT_REMARK, "Bold: best network.", *marks), filled)


def _task_grid(
    study: Study, task: str, remarks: Iterable[str], filled: Sequence[FilledColumn], titles: Iterable[str] | None = None
) -> Grid:
    caption = _caption(study, task, *remarks)
    return make_grid(f"{study.name}-{task}", f"{study.title} ({task})", caption, filled, titles)


# --- columns ---------------------------------------------------------------------------------------------------------


def _areas(study: Study, group: str, bands: Sequence[Rows[Row]]) -> FilledColumn:
    decimals = decimals_for(row.audc_mean for band in bands for row in band.items if row is not None)
    spread: Callable[[Row], str] = _spread(study, lambda row: row.audc_std, decimals)
    return number_column(Column("AUDC", group), bands, lambda row: row.audc_mean, min, spread, decimals)


def _improvements(
    study: Study, group: str, bands: Sequence[Rows[Row]], *, has_validation: bool = False, has_paper: bool = True
) -> list[FilledColumn]:
    """Return our column, that of validation data, which then carries the mark of the choice, and the paper's."""
    spread: Callable[[Row], str] = _spread(study, lambda row: row.improvement_std)

    def after(row: Row) -> str:
        return spread(row) + ("" if has_validation else _chosen_mark(row))

    def validation(row: Row) -> str:
        return ("" if row.validation is None else number(row.validation, 2)) + _chosen_mark(row)

    filled = [number_column(Column("%", group), bands, lambda row: row.improvement_mean, max, after)]
    filled += [text_column(Column("validation %", group), bands, validation)] if has_validation else []
    return filled + ([text_column(Column("paper %", group), bands, _paper_text)] if has_paper else [])


def _paper_text(row: Row) -> str:
    if row.paper is None:
        return ""
    std = row.paper.improvement_std
    return number(row.paper.improvement, 2) + ("" if std is None else f" ({number(std, 2)})")


def _chosen_mark(row: Row) -> str:
    return f" {CHOSEN_MARK}" if row.is_chosen else ""


def _default_mark(rows: Iterable[Row]) -> str:
    return f" {DEFAULT_MARK}" if any(row.is_default for row in rows) else ""


def _marks(rows: Sequence[Row], default: str) -> list[str]:
    """Explain the marks that the table holds."""
    chosen = [f"{CHOSEN_MARK}: chosen by validation data."] if any(row.is_chosen for row in rows) else []
    return chosen + ([f"{DEFAULT_MARK}: {default}."] if any(row.is_default for row in rows) else [])


def _spread(study: Study, std: Callable[[Item], float], decimals: int = 2) -> Callable[[Item], str]:
    """Return what prints a standard deviation; nothing after a single run."""
    return lambda item: f" ({number(std(item), decimals)})" if study.seeds > 1 else ""


def _caption(study: Study, task: str | None, *remarks: str) -> str:
    counts = {name: study.instances[name] for name in study.tasks if task in (None, name)}
    alike = len(set(counts.values())) == 1
    instances = str(next(iter(counts.values()))) if alike else ", ".join(f"{n} ({name})" for name, n in counts.items())
    mean = "Mean (standard deviation) over" if study.seeds > 1 else "From"
    return " ".join((f"{mean} {_runs(study.seeds)} of {instances} test instances, preset {study.preset}.", *remarks))


def _runs(seeds: int) -> str:
    return f"{seeds} run{'s' * (seeds > 1)}"
