"""Generated sequences and the table of results in the terminal."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pytest
from fake_report import timed
from rich.console import Console

from seqdefer.evaluation.results import Results, SeedResult, Units, summarise
from seqdefer.report.style import BLOCKS
from seqdefer.report.terminal import results_table, written_lines


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([("P", "predictor"), (" IH", "expert"), (" N", "expert")], "P [IH N]"),
        ([("a", "expert"), (" b", "predictor"), ("\n c", "expert")], "[a] b\n [c]"),
        ([("a", "predictor"), (" ", "expert"), ("b", "predictor")], "a[ ]b"),
        ([("a", "predictor"), ("", "expert")], "a[]"),
    ],
)
def test_a_space_before_a_word_is_not_marked(pieces: list[tuple[str, str]], shown: str) -> None:
    tokens = [{"text": text, "source": source} for text, source in pieces]
    row = {"tokens": tokens, "expert_tokens": 1, "predictor_tokens": 1, "switches": 1}
    assert next(written_lines(row, colours=False)).plain == shown
    coloured = next(written_lines(row, colours=True))
    assert coloured.plain == "".join(text for text, _ in pieces)
    marked = [coloured.plain[span.start : span.end] for span in coloured.spans if span.style]
    assert marked == [words for words in re.findall(r"\[(.*?)\]", shown) if words]


def test_terminal_table_has_blocks_and_unparsed_names(results: Results) -> None:
    seeds = [SeedResult(0, {"[/red] mine": results.seeds[0].methods["ChowSum"], **results.seeds[0].methods})]
    table = results_table(replace(results, summary=summarise(seeds), units=Units("error [K]")))
    out = StringIO()
    Console(file=out, width=120).print(table)
    for words in (*BLOCKS.values(), "[/red] mine", "error [K]"):
        assert words in out.getvalue()


def test_terminal_table_marks_the_best_and_quotes_the_paper(results: Results) -> None:
    best = {"ChowMean", "OneTimeModel", "TokenwiseModel"}
    for paper in (results.paper, {}):
        columns = results_table(replace(results, paper=paper)).columns
        bold = {cell for cell in columns[1].cells if "[bold]" in str(cell)}
        assert bold == {f"[bold]{row.audc_mean:.3f} ({row.audc_std:.3f})[/bold]"
                        for name, row in results.summary.items() if name in best}  # fmt: skip
        assert ["paper" in str(column.header) for column in columns] == [False] * 4 + [True] * bool(paper)


def test_terminal_table_has_a_column_for_each_other_cost(results: Results) -> None:
    columns = results_table(timed(results)).columns
    assert [str(column.header).startswith("by seconds") for column in columns] == [False] * 5 + [True]
    shown = timed(results).by_cost("seconds")
    assert shown is not None
    row = shown.summary["TokenwiseModel"]
    assert f"{row.improvement_mean:.2f} ({row.improvement_std:.2f})" in columns[-1].cells
