"""The table at the end of a run, for the terminal: the paper's blocks, our figures, the paper's beside them."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from seqdefer.plots import BLOCKS, names_by_block
from seqdefer.results import Results, Summary


def results_table(results: Results) -> Table:
    runs = len(results.seeds)
    table = Table(
        title=f"{escape(results.task)}: mean (std) over {runs} run{'s' * (runs > 1)}; lower AUDC is better",
        box=box.SIMPLE_HEAD,
        caption=escape(
            f"AUDC: area under the curve of loss, {results.units.loss}, against deferred {results.units.deferred}"
        ),
    )
    table.add_column("method")
    for heading in ("AUDC", "% over Random") + (("paper: % over Random",) if results.paper else ()):
        table.add_column(heading, justify="right")
    for block, names in names_by_block(results).items():
        rows = {name: results.summary[name] for name in names}
        table.add_row(f"[bold]{BLOCKS[block]}[/bold]")
        best = max(row.improvement_mean for row in rows.values())
        for name, row in rows.items():
            table.add_row(*_cells(name, row, results, block != "reference" and row.improvement_mean == best))
    return table


def _cells(name: str, row: Summary, results: Results, is_best: bool) -> list[str]:
    cells = [
        f"  {escape(name)}",
        f"{row.audc_mean:.4g} ({row.audc_std:.2g})",
        f"{row.improvement_mean:.2f} ({row.improvement_std:.2f})",
    ]
    if results.paper:
        figure = results.paper.get(name)
        cells.append("" if figure is None else f"{figure.improvement:.2f} ({figure.improvement_std or 0:.2f})")
    return [f"[bold]{cell}[/bold]" if is_best else cell for cell in cells]
