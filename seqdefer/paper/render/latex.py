"""Grids as LaTeX: floating tables in the style of booktabs, for \\input. Every text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable

from seqdefer.paper.render.grids import Cell, Grid

COLUMN_CHARACTERS, PAGE_CHARACTERS = 56, 112  # of a two-column paper, in small print

_LATEX = {
    **{char: rf"\{char}" for char in "&%$#_{}"},
    **{char: f"{{{char}}}" for char in "[]*"},  # LaTeX would read them as an option at the start of a row
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''", "\n": r"\newline ", "\u00a0": "~",
    "|J|": r"$|\mathcal{J}|$", "α₁": r"$\alpha_1$", "α_L": r"$\alpha_L$", "α": r"$\alpha$", "µ": r"$\mu$",
    "−": "$-$", "×": r"$\times$", "±": r"$\pm$", "≤": r"$\leq$", "≥": r"$\geq$",
    "²": "$^2$", "³": "$^3$", "°": r"$^\circ$", "†": r"\dag{}",
    "–": "--", "—": "---", "…": r"\ldots{}", "’": "'", "“": "``", "”": "''",
}  # fmt: skip
_SPECIAL = re.compile("|".join(map(re.escape, sorted(_LATEX, key=len, reverse=True))) + "|[^ -~À-ÿ]")


def latex_of(grids: Iterable[Grid]) -> str:
    head = "% Needs \\usepackage[T1]{fontenc} and \\usepackage{array,booktabs,graphicx}.\n"
    return head + "\n".join(map(_table, grids))


def latex_text(text: str) -> str:
    """Escape any text. A character that pdfLaTeX lacks becomes its code point."""
    return _SPECIAL.sub(lambda found: _LATEX.get(found[0]) or f"{{[}}U+{ord(found[0]):04X}{{]}}", text)


def _table(grid: Grid) -> str:
    is_wrapped = any(column.width for column in grid.columns)
    table = "table*" if is_wrapped or grid.n_characters > COLUMN_CHARACTERS else "table"
    tabular, caption = _tabular(grid), " ".join(f"{grid.title}. {grid.caption}".split())
    if grid.n_characters > PAGE_CHARACTERS and not is_wrapped:
        tabular = f"\\resizebox{{\\textwidth}}{{!}}{{%\n{tabular}%\n}}"
    label = re.sub("[^a-z0-9]+", "-", grid.name.lower()).strip("-")
    return (
        f"\\begin{{{table}}}\n\\centering\n\\small\n\\setlength{{\\tabcolsep}}{{4pt}}\n"
        f"\\caption{{{latex_text(caption)}}}\n\\label{{tab:{label}}}\n"
        f"{tabular}\n\\end{{{table}}}\n"
    )


def _tabular(grid: Grid) -> str:
    wrapped = r">{\raggedright\arraybackslash}p{%s\textwidth}"
    shape = "".join(wrapped % column.width if column.width else column.align[0] for column in grid.columns)
    heads = _row([latex_text(column.heading) for column in grid.columns])
    bands = []
    for band in grid.bands:
        title = rf"\multicolumn{{{len(grid.columns)}}}{{l}}{{\emph{{{latex_text(band.title)}}}}}" if band.title else ""
        rows = [_row(map(_cell, row)) for row in band.rows]
        bands.append("\n".join([_row([title])] * bool(title) + rows))
    body = "\n\\midrule\n".join([_groups(grid) + heads, *filter(None, bands)])
    return f"\\begin{{tabular}}{{{shape}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}"


def _groups(grid: Grid) -> str:
    """Return the row of group headings, each with a rule below it."""
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
