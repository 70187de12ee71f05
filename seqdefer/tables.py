"""The table at the end of a run, for the terminal: the paper's blocks, our figures, the paper's beside them."""

from __future__ import annotations

from rich import box
from rich.table import Table

from seqdefer.results import Results, Summary

BLOCKS = {"reference": "References", "whole": "Whole deferral", "once": "One-time deferral", "token": "Token level"}


def results_table(results: Results) -> Table:
    runs = len(results.seeds)
    table = Table(
        title=f"{results.task}: mean (std) over {runs} run{'s' * (runs > 1)}; lower AUDC is better",
        box=box.SIMPLE_HEAD,
        caption=f"AUDC: area under the curve of loss, {results.units.loss}, against deferred {results.units.deferred}",
    )
    table.add_column("method")
    for heading in ("AUDC", "% over Random") + (("paper: % over Random",) if results.paper else ()):
        table.add_column(heading, justify="right")
    for block, title in BLOCKS.items():
        rows = {name: row for name, row in results.summary.items() if block_of(name, row) == block}
        if not rows:
            continue
        table.add_row(f"[bold]{title}[/bold]")
        best = max(row.improvement_mean for row in rows.values())
        for name, row in rows.items():
            table.add_row(*_cells(name, row, results, block != "reference" and row.improvement_mean == best))
    return table


def block_of(name: str, row: Summary) -> str:
    return "reference" if name == "Random" or name.startswith("Optimal") else row.granularity


def _cells(name: str, row: Summary, results: Results, is_best: bool) -> list[str]:
    cells = [
        f"  {name}",
        f"{row.audc_mean:.4g} ({row.audc_std:.2g})",
        f"{row.improvement_mean:.2f} ({row.improvement_std:.2f})",
    ]
    if results.paper:
        figure = results.paper.get(name)
        cells.append("" if figure is None else f"{figure.improvement:.2f} ({figure.improvement_std or 0:.2f})")
    return [f"[bold]{cell}[/bold]" if is_best else cell for cell in cells]
