"""A table as text, before it is LaTeX, Markdown or a terminal's; built column by column, because columns have a best.

    methods, bands = ["Random", "OneTimeModel"], [Rows([random, model])]
    areas = figures(Column("AUDC"), bands, lambda row: row.audc_mean, decimals=2, best=min)
    grid = weave("table1", "Main results", "Lower is better.", [labels(Column("Method"), [methods]), areas])

What stands in which table is in `layouts.py`, how it is written in `writing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from seqdefer.report.markup import number

NOT_MEASURED = "–"
Item = TypeVar("Item")


@dataclass(frozen=True)
class Cell:
    text: str  # a line end is a line end in the table too
    is_best: bool = False


@dataclass(frozen=True)
class Column:
    heading: str
    group: str = ""  # a heading over neighbours that share it
    align: Literal["left", "right"] = "right"
    width: float | None = None  # of wrapped text: a share of the width of the page


@dataclass(frozen=True)
class Band:
    """The rows between two rules, as many cells in each as the grid has columns."""

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
    def letters(self) -> int:
        """Of the longest line in each column, and what keeps columns apart."""
        rows = [row for band in self.bands for row in band.rows]
        texts = [[column.heading, *(row[place].text for row in rows)] for place, column in enumerate(self.columns)]
        return sum(2 + max(len(line) for text in column for line in text.split("\n")) for column in texts)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Runs of neighbours with the same group, and how many columns each has."""
        found: list[tuple[str, int]] = []
        for column in self.columns:
            count = found.pop()[1] if found and found[-1][0] == column.group else 0
            found.append((column.group, count + 1))
        return found


@dataclass(frozen=True)
class Rows(Generic[Item]):
    """What the rows of a band stand for; None where it was not measured."""

    items: Sequence[Item | None]
    has_best: bool = True


@dataclass(frozen=True)
class Strip:
    """A column and its cells, band by band."""

    column: Column
    bands: Sequence[Sequence[Cell]]


def labels(column: Column, bands: Iterable[Iterable[str]]) -> Strip:
    return Strip(column, [[Cell(label) for label in band] for band in bands])


def texts(column: Column, bands: Sequence[Rows[Item]], text: Callable[[Item], str]) -> Strip:
    return Strip(column, [[Cell("" if item is None else text(item)) for item in band.items] for band in bands])


def figures(
    column: Column,
    bands: Sequence[Rows[Item]],
    value: Callable[[Item], float],
    decimals: int,
    best: Callable[[Iterable[float]], float],
    after: Callable[[Item], str] = lambda _: "",
) -> Strip:
    """A number for each row, and `after` it what else there is to say. `best` of a band is min or max."""
    return Strip(column, [_figures(band, value, decimals, best, after) for band in bands])


def _figures(
    band: Rows[Item],
    value: Callable[[Item], float],
    decimals: int,
    best: Callable[[Iterable[float]], float],
    after: Callable[[Item], str],
) -> list[Cell]:
    """Compared as printed, so that ties are bold, as in the paper; where several are all alike, none is."""
    shown = {number(value(item), decimals) for item in band.items if item is not None}
    is_contest = band.has_best and (len(shown) > 1 or len(band.items) == 1)
    top = number(best(value(item) for item in band.items if item is not None), decimals) if shown else ""

    def cell(item: Item) -> Cell:
        text = number(value(item), decimals)
        return Cell(text + after(item), is_contest and text == top)

    return [Cell(NOT_MEASURED) if item is None else cell(item) for item in band.items]


def weave(name: str, title: str, caption: str, strips: Sequence[Strip], titles: Sequence[str] = ()) -> Grid:
    """Columns become rows; `titles` are the bands'."""
    bands = [tuple(zip(*cells, strict=True)) for cells in zip(*(strip.bands for strip in strips), strict=True)]
    named = zip(titles or [""] * len(bands), bands, strict=True)
    columns = tuple(strip.column for strip in strips)
    return Grid(name, title, columns, tuple(Band(band, rows) for band, rows in named), caption)


def split_groups(grid: Grid) -> list[Grid]:
    """A narrower grid for each group of columns, with the columns that belong to none in all of them."""
    groups = [group for group, _ in grid.groups if group]
    return [_columns_of(grid, group) for group in groups] or [grid]


def _columns_of(grid: Grid, group: str) -> Grid:
    places = [place for place, column in enumerate(grid.columns) if column.group in ("", group)]
    bands = [Band(band.title, tuple(tuple(row[place] for place in places) for row in band.rows)) for band in grid.bands]
    columns = tuple(grid.columns[place] for place in places)
    return Grid(grid.name, grid.title, columns, tuple(bands), grid.caption)
