"""Grids as LaTeX: floating tables in the style of booktabs, to be read in by \\input. Every text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable

from seqdefer.paper.render.grids import Cell, Column, Grid

# Letters that a column of a two-column paper, and its page, hold in small print.
COLUMN, PAGE = 56, 112

_LATEX = {
    **{letter: rf"\{letter}" for letter in "&%$#_{}"},
    **{letter: f"{{{letter}}}" for letter in "[]*"},  # at the start of a row they would be read as an option
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "\n": r"\newline ",
    "\u00a0": "~",
    "|J|": r"$|\mathcal{J}|$",
    "α₁": r"$\alpha_1$",
    "α_L": r"$\alpha_L$",
    "α": r"$\alpha$",
    "−": "$-$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "²": "$^2$",
    "³": "$^3$",
    "µ": r"$\mu$",
    "°": r"$^\circ$",
    "†": r"\dag{}",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "’": "'",
    "“": "``",
    "”": "''",
}
_SPECIAL = re.compile("|".join(map(re.escape, sorted(_LATEX, key=len, reverse=True))) + "|[^ -~À-ÿ]")


def latex_of(grids: Iterable[Grid]) -> str:
    head = "% Needs \\usepackage[T1]{fontenc} and \\usepackage{array,booktabs,graphicx}.\n"
    return head + "\n".join(map(_table, grids))


def latex_text(text: str) -> str:
    """Anything as text of LaTeX; a letter that pdfLaTeX has not is named by its number."""
    return _SPECIAL.sub(lambda found: _LATEX[found[0]] if found[0] in _LATEX else _numbered(found[0]), text)


def _numbered(letter: str) -> str:
    return f"{{[}}U+{ord(letter):04X}{{]}}"


def _in_one_line(text: str) -> str:
    return latex_text(" ".join(text.split()))


def _table(grid: Grid) -> str:
    is_wrapped = any(column.width for column in grid.columns)
    table = "table*" if is_wrapped or grid.letters > COLUMN else "table"
    tabular = _tabular(grid)
    if grid.letters > PAGE and not is_wrapped:
        tabular = f"\\resizebox{{\\textwidth}}{{!}}{{%\n{tabular}%\n}}"
    label = re.sub("[^a-z0-9]+", "-", grid.name.lower()).strip("-")
    return (
        f"\\begin{{{table}}}\n\\centering\n\\small\n\\setlength{{\\tabcolsep}}{{4pt}}\n"
        f"\\caption{{{_in_one_line(f'{grid.title}. {grid.caption}')}}}\n\\label{{tab:{label}}}\n"
        f"{tabular}\n\\end{{{table}}}\n"
    )


def _tabular(grid: Grid) -> str:
    shape = "".join(map(_shape, grid.columns))
    heads = _row([latex_text(column.heading) for column in grid.columns])
    bands = []
    for band in grid.bands:
        title = rf"\multicolumn{{{len(grid.columns)}}}{{l}}{{\emph{{{latex_text(band.title)}}}}}" if band.title else ""
        rows = [_row(map(_cell, row)) for row in band.rows]
        bands.append("\n".join([_row([title])] * bool(title) + rows))
    body = "\n\\midrule\n".join([_groups(grid) + heads, *filter(None, bands)])
    return f"\\begin{{tabular}}{{{shape}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}"


def _shape(column: Column) -> str:
    if column.width:
        return rf">{{\raggedright\arraybackslash}}p{{{column.width}\textwidth}}"
    return column.align[0]


def _groups(grid: Grid) -> str:
    """The headings over the headings, each with its rule."""
    if not any(column.group for column in grid.columns):
        return ""
    cells, rules, place = [], [], 1
    for group, count in grid.groups:
        cells.append(rf"\multicolumn{{{count}}}{{c}}{{{latex_text(group)}}}")
        rules += [rf"\cmidrule(lr){{{place}-{place + count - 1}}}"] if group else []
        place += count
    return f"{_row(cells)}\n{''.join(rules)}\n"


def _cell(cell: Cell) -> str:
    return rf"\textbf{{{latex_text(cell.text)}}}" if cell.is_best else latex_text(cell.text)


def _row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"
