"""Studies as files for people: CSV in full precision, LaTeX, Markdown, tables for the terminal, figures.

    for path in write_study(study, Path("runs/reproduce")):
        print(path)

Every file is written aside and renamed, and an equal record gives equal bytes. Numbers are rounded in the grids only.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqdefer.paper.records import Contrast, Judgements, Line, Row, Study, save
from seqdefer.paper.render.figures import figure_files
from seqdefer.paper.render.grids import Cell, Grid, split_groups
from seqdefer.paper.render.latex import latex_of
from seqdefer.paper.render.layouts import layout_judgements, layout_study
from seqdefer.storage.files import write_aside, write_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "csv_of",
    "judgements_csv_of",
    "latex_of",
    "markdown_of",
    "markdown_table",
    "markdown_text",
    "rich_tables",
    "tables_of",
    "write_judgements",
    "write_study",
]

VERDICTS = "verdicts"
LONGEST_NAME = 24  # letters, of what stands in one line of the terminal


def write_study(study: Study, folder: Path, *, figures: bool = True) -> list[Path]:
    """NAME.json, .csv, .tex, .pdf and .svg. The figures come last: without matplotlib the others are there already."""
    base = folder / study.name
    written = [
        save(study, base.with_suffix(".json")),
        _write_bytes(base.with_suffix(".csv"), csv_of(study).encode()),
        write_text(base.with_suffix(".tex"), latex_of(layout_study(study))),
    ]
    drawn = figure_files(study) if figures else {}
    return written + [_write_bytes(base.with_suffix(ending), data) for ending, data in drawn.items()]


def write_judgements(judgements: Judgements, folder: Path) -> list[Path]:
    """verdicts.json, .csv, .tex and .md."""
    base, grids = folder / VERDICTS, layout_judgements(judgements)
    return [
        save(judgements, base.with_suffix(".json")),
        _write_bytes(base.with_suffix(".csv"), judgements_csv_of(judgements).encode()),
        write_text(base.with_suffix(".tex"), latex_of(grids)),
        write_text(base.with_suffix(".md"), markdown_of(grids)),
    ]


def _write_bytes(path: Path, data: bytes) -> Path:
    """As they are: text would get the line ends of the system."""

    def write(aside: Path) -> None:
        aside.write_bytes(data)

    return write_aside(path, write)


# --- CSV -------------------------------------------------------------------------------------------------------------


def csv_of(study: Study) -> str:
    """RFC 4180: a line for each row of the study, all of its fields, what is varied in columns of its own; of a study
    of curves, a line for each point."""
    if study.lines:
        return _csv([point for line in study.lines for point in _points(line)])
    varied = list(dict.fromkeys(key for row in study.rows for key in row.varied))
    return _csv([_flat_row(row, varied) for row in study.rows])


def _points(line: Line) -> list[dict[str, Any]]:
    names = {"task": line.task, "method": line.method, "granularity": line.granularity}
    points = zip(line.deferred, line.mean, line.std, strict=True)
    return [{**names, "deferred": x, "loss_mean": mean, "loss_std": std} for x, mean, std in points]


def _flat_row(row: Row, varied: Iterable[str]) -> dict[str, Any]:
    paper = row.paper
    return {
        "task": row.task,
        "method": row.method,
        "granularity": row.granularity,
        **{key: row.varied.get(key) for key in varied},
        "is_default": row.is_default,
        "is_chosen": row.is_chosen,
        "audc_mean": row.audc_mean,
        "audc_std": row.audc_std,
        "improvement_mean": row.improvement_mean,
        "improvement_std": row.improvement_std,
        "improvements": ";".join(map(repr, row.improvements)),
        "validation": row.validation,
        "paper_audc": paper and paper.audc,
        "paper_audc_std": paper and paper.audc_std,
        "paper_improvement": paper and paper.improvement,
        "paper_improvement_std": paper and paper.improvement_std,
    }


def judgements_csv_of(judgements: Judgements) -> str:
    """A line for each contrast; a judgement that has none has one line too."""
    lines = []
    for row in judgements.judgements:
        told = {"claim": row.claim, "statement": row.statement, "task": row.task, "verdict": row.verdict}
        lines += [{**told, **_flat_contrast(item), "reason": row.reason} for item in row.contrasts or (None,)]
    return _csv(lines)


def _flat_contrast(contrast: Contrast | None) -> dict[str, Any]:
    names = ("first", "second", "difference", "low", "high")
    return {name: None if contrast is None else getattr(contrast, name) for name in names}


def _csv(lines: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)  # its floats are written so that they read back the same
    writer.writerow(lines[0] if lines else ())
    for line in lines:
        writer.writerow(str(value).lower() if isinstance(value, bool) else value for value in line.values())
    return text.getvalue()


# --- Markdown --------------------------------------------------------------------------------------------------------

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "~": "&#126;", "$": "&#36;", "\n": "<br>"}


def markdown_text(text: str) -> str:
    """Anything as text of Markdown, within a table or without."""
    return re.sub(r"[\\`*_\[\]|&<>~$\n]", lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), text)


def markdown_of(grids: Iterable[Grid]) -> str:
    return "\n".join(f"**{markdown_text(grid.title)}**\n\n{markdown_table(grid)}" for grid in grids)


def markdown_table(grid: Grid) -> str:
    """Without its title, for where that is a heading."""
    headings = [": ".join(filter(None, (column.group, column.heading))) for column in grid.columns]
    lines = [_markdown_row(map(markdown_text, headings))]
    lines.append(_markdown_row("---" if column.align == "left" else "---:" for column in grid.columns))
    for band in grid.bands:
        if band.title:
            lines.append(_markdown_row([f"*{markdown_text(band.title)}*"] + [""] * (len(grid.columns) - 1)))
        lines += [_markdown_row(map(_markdown_cell, row)) for row in band.rows]
    table = "\n".join(lines)
    return f"{table}\n\n{markdown_text(grid.caption)}\n"


def _markdown_cell(cell: Cell) -> str:
    return f"**{markdown_text(cell.text)}**" if cell.is_best else markdown_text(cell.text)


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# --- the terminal ----------------------------------------------------------------------------------------------------


def tables_of(record: Study | Judgements, width: int = 80) -> list[Table]:
    """A study or the verdicts, for a console of `width` letters."""
    grids = layout_study(record) if isinstance(record, Study) else layout_judgements(record)
    return rich_tables(grids, width)


def rich_tables(grids: Iterable[Grid], width: int = 80) -> list[Table]:
    """For a console of `width` letters; a grid that is wider comes apart, a table for each group of its columns."""
    from rich.console import Console

    ruler = Console(width=10_000)
    tables: list[Table] = []
    for grid in grids:
        whole = _rich_table(grid)
        fits = ruler.measure(whole).maximum <= width
        tables += [whole] if fits else map(_rich_table, split_groups(grid))
    return tables


def _rich_table(grid: Grid) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text  # unlike a string, it is no markup

    table = Table(title=Text(grid.title), caption=Text(grid.caption), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, column in enumerate(grid.columns):
        heading = "\n".join(filter(None, (column.group, column.heading)))
        # Names stay whole where they stand alone; figures may take two lines.
        is_name = place == 0 and all(len(row[0].text) <= LONGEST_NAME for band in grid.bands for row in band.rows)
        table.add_column(Text(heading), justify=column.align, overflow="fold", no_wrap=is_name)
    for band in grid.bands:
        table.add_section()
        if band.title:
            table.add_row(Text(band.title, style="italic"))
        for row in band.rows:
            table.add_row(*(Text(cell.text, style="bold" if cell.is_best else "") for cell in row))
    return table
