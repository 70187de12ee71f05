"""The files of a study: JSON, CSV in full precision, LaTeX, Markdown, figures; and its tables for the terminal.

    for path in write_studies([as_published, ours], Path("runs/reproduce")):
        print(path)

Equal records give equal bytes. Only grids hold rounded numbers.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqdefer.paper.records import Judgements, Line, Row, Study, save
from seqdefer.paper.render.figures import figure_files
from seqdefer.paper.render.grids import Cell, Grid, some_columns, split_groups
from seqdefer.paper.render.latex import latex_of
from seqdefer.paper.render.tables import layout_studies, layout_verdicts
from seqdefer.storage.files import write_bytes, write_text

if TYPE_CHECKING:
    from rich.table import Table

VERDICTS = "verdicts"
MAX_NAME_LENGTH = 24  # longer names wrap in the terminal
MIN_VERDICTS_WIDTH = 120  # of a terminal that can hold the differences behind them


def write_studies(studies: Sequence[Study], folder: Path, *, figures: bool = True) -> list[Path]:
    """Write RECIPE/NAME.json and .csv for each study of one name; NAME.tex, .pdf and .svg show them together.

    Figures come last: without matplotlib the others exist already."""
    written, base = [], folder / studies[0].name
    for study in studies:
        own = folder / study.recipe / study.name
        written += [
            save(study, own.with_suffix(".json")),
            write_bytes(own.with_suffix(".csv"), csv_of(study).encode()),
        ]
    written.append(write_text(base.with_suffix(".tex"), latex_of(layout_studies(studies))))
    drawn = figure_files(studies) if figures else {}
    return written + [write_bytes(base.with_suffix(ending), data) for ending, data in drawn.items()]


def write_judgements(judgements: Judgements, folder: Path) -> list[Path]:
    """Write verdicts.json, .csv, .tex and .md."""
    base, grids = folder / VERDICTS, [layout_verdicts(judgements)]
    return [
        save(judgements, base.with_suffix(".json")),
        write_bytes(base.with_suffix(".csv"), verdicts_csv_of(judgements).encode()),
        write_text(base.with_suffix(".tex"), latex_of(grids)),
        write_text(base.with_suffix(".md"), markdown_of(grids)),
    ]


# --- CSV -------------------------------------------------------------------------------------------------------------


def csv_of(study: Study) -> str:
    """Return RFC 4180 text with a line for each row of the study, or for each point of its curves."""
    if study.lines:
        return _csv([point for line in study.lines for point in _points(line)])
    varied, trained = (
        list(dict.fromkeys(key for row in study.rows for key in getattr(row, name))) for name in ("varied", "training")
    )
    return _csv([_flat_row(row, varied, trained) for row in study.rows])


def _points(line: Line) -> list[dict[str, Any]]:
    names = {"task": line.task, "method": line.method, "granularity": line.granularity}
    points = zip(line.deferred, line.mean, line.std, strict=True)
    return [{**names, "deferred": x, "loss_mean": mean, "loss_std": std} for x, mean, std in points]


def _flat_row(row: Row, varied: Iterable[str], trained: Iterable[str]) -> dict[str, Any]:
    numbers = ("is_default", "is_chosen", "audc_mean", "audc_std", "improvement_mean", "improvement_std")
    papers = ("audc", "audc_std", "improvement", "improvement_std")
    return {
        **{name: getattr(row, name) for name in ("task", "method", "granularity")},
        **{name: row.varied.get(name) for name in varied},
        **{name: getattr(row, name) for name in numbers},
        "improvements": ";".join(map(repr, row.improvements)),
        "validation": row.validation,
        "headroom": row.headroom,
        **{name: row.training.get(name) for name in trained},
        **{f"paper_{name}": getattr(row.paper, name, None) for name in papers},
    }


def verdicts_csv_of(judgements: Judgements) -> str:
    """Return a line for each contrast; a judgement without contrasts has one line."""
    lines = []
    for row in judgements.judgements:
        claim = {name: getattr(row, name) for name in ("claim", "statement", "task", "recipe", "verdict")}
        for contrast in row.contrasts or (None,):
            numbers = {name: getattr(contrast, name, None) for name in ("first", "second", "difference", "low", "high")}
            lines.append({**claim, **numbers, "reason": row.reason})
    return _csv(lines)


def _csv(lines: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)  # writes floats that read back exactly
    writer.writerow(lines[0] if lines else ())
    for line in lines:
        writer.writerow(str(value).lower() if isinstance(value, bool) else value for value in line.values())
    return text.getvalue()


# --- Markdown --------------------------------------------------------------------------------------------------------

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "~": "&#126;", "$": "&#36;", "\n": "<br>"}


def markdown_text(text: str) -> str:
    """Escape any text for Markdown, inside tables and outside."""
    return re.sub(r"[\\`*_\[\]|&<>~$\n]", lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), text)


def markdown_of(grids: Iterable[Grid]) -> str:
    return "\n".join(f"**{markdown_text(grid.title)}**\n\n{markdown_table(grid)}" for grid in grids)


def markdown_table(grid: Grid) -> str:
    """Return a table without its title."""
    headings = [": ".join(filter(None, (column.group, column.heading))) for column in grid.columns]
    lines = [markdown_row(map(markdown_text, headings))]
    lines.append(markdown_row("---" if column.align == "left" else "---:" for column in grid.columns))
    for band in grid.bands:
        if band.title:
            lines.append(markdown_row([f"*{markdown_text(band.title)}*"] + [""] * (len(grid.columns) - 1)))
        lines += [markdown_row(map(_markdown_cell, row)) for row in band.rows]
    table = "\n".join(lines)
    return f"{table}\n\n{markdown_text(grid.caption)}\n"


def _markdown_cell(cell: Cell) -> str:
    return f"**{markdown_text(cell.text)}**" if cell.is_best else markdown_text(cell.text)


def markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# --- the terminal ----------------------------------------------------------------------------------------------------


def tables_of(records: Sequence[Study] | Judgements, width: int = 80) -> list[Table]:
    """Return tables for a console of `width` characters. A wider grid is split into a table per group of columns;
    verdicts leave their differences to the file."""
    from rich.console import Console

    if isinstance(records, Judgements):
        grid = layout_verdicts(records)
        if width < MIN_VERDICTS_WIDTH:
            where = f"Differences and likely reasons: {VERDICTS}.md."
            grid = dataclasses.replace(some_columns(grid, range(4)), caption=f"{grid.caption} {where}")
        return [_rich_table(grid)]
    ruler = Console(width=10_000)
    tables: list[Table] = []
    for grid in layout_studies(records):
        whole = _rich_table(grid)
        fits = ruler.measure(whole).maximum <= width
        tables += [whole] if fits else map(_rich_table, split_groups(grid))
    return tables


def _rich_table(grid: Grid) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text  # unlike strings, never parsed as markup

    table = Table(title=Text(grid.title), caption=Text(grid.caption), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, column in enumerate(grid.columns):
        heading = "\n".join(filter(None, (column.group, column.heading)))
        # Short names stay on one line; numbers may wrap.
        is_name = place == 0 and all(len(row[0].text) <= MAX_NAME_LENGTH for band in grid.bands for row in band.rows)
        table.add_column(Text(heading), justify=column.align, overflow="fold", no_wrap=is_name)
    for band in grid.bands:
        table.add_section()
        if band.title:
            table.add_row(Text(band.title, style="italic"))
        for row in band.rows:
            table.add_row(*(Text(cell.text, style="bold" if cell.is_best else "") for cell in row))
    return table
