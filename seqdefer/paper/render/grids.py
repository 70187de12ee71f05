"""Tables as grids of text, built column by column, because the best number of a column is bold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from seqdefer.report.markup import number

NOT_MEASURED = "–"
Item = TypeVar("Item")


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
        grids.append(some_columns(grid, places))
    return grids or [grid]


def some_columns(grid: Grid, places: Sequence[int]) -> Grid:
    """Return a grid with the columns at these places."""
    bands = [replace(band, rows=tuple(tuple(row[i] for i in places) for row in band.rows)) for band in grid.bands]
    return replace(grid, columns=tuple(grid.columns[i] for i in places), bands=tuple(bands))
