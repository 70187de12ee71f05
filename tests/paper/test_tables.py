"""Tables and files of a study: every number in its place, the paper's beside ours, for any names of tasks."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_up
import pytest
from results_page import _changes, results_page, verdict_summary
from rich.console import Console

from seqdefer.errors import MissingExtraError
from seqdefer.evaluation.results import PaperFigure, Provenance
from seqdefer.paper.records import (
    Contrast,
    Judgement,
    Judgements,
    Origins,
    Row,
    Study,
    Verdict,
    load_judgements,
    load_study,
    save,
)
from seqdefer.paper.render.files import (
    csv_of,
    markdown_of,
    markdown_text,
    tables_of,
    verdicts_csv_of,
    write_judgements,
    write_studies,
)
from seqdefer.paper.render.grids import Cell, Column, Grid, Rows, number_column, split_groups
from seqdefer.paper.render.latex import latex_of, latex_text
from seqdefer.paper.render.rows import rows_of_task
from seqdefer.paper.render.tables import layout_studies, layout_verdicts
from seqdefer.report.markup import number

HOSTILE = "a_b|<x>&%"
RECORDS = Path(__file__).parents[2] / "docs" / "results"
each_study = pytest.mark.parametrize("name", made_up.STUDIES)


def texts_of(grid: Grid) -> list[list[str]]:
    return [[cell.text for cell in row] for band in grid.bands for row in band.rows]


def column_of(grid: Grid, heading: str, group: str = "") -> list[Cell]:
    place = next(i for i, column in enumerate(grid.columns) if (column.heading, column.group) == (heading, group))
    return [row[place] for band in grid.bands for row in band.rows]


def text_of(mean: float, std: float | None) -> str:
    return number(mean, 2) + ("" if std is None else f" ({number(std, 2)})")


def ours_and_papers(row: Row) -> list[str]:
    ours = text_of(row.improvement_mean, row.improvement_std)
    return [ours] + ([text_of(row.paper.improvement, row.paper.improvement_std)] if row.paper else [])


def printed(studies: Sequence[Study] | Judgements, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in tables_of(studies, width):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["table1", "table-handoffs", "figure-alpha", "table-psi", "table-ablation"])
def test_every_number_is_in_its_row(name: str) -> None:
    """Both recipes' and the paper's, in the row of the method or variant."""
    studies = made_up.of_both(name)
    lines = [" | ".join(row) for grid in layout_studies(studies) for row in texts_of(grid)]
    for study in studies:
        for row in study.rows:
            wanted = ours_and_papers(row)
            assert any(all(text in line for text in wanted) for line in lines), (row.task, row.method, row.varied)


@pytest.mark.parametrize("name", ["table1", "table-handoffs", "table-psi", "table-ablation"])
def test_columns_belong_to_their_recipe(name: str) -> None:
    """A column of one recipe is the same without the other."""
    both = made_up.of_both(name)
    for study in both:
        for joint, alone in zip(layout_studies(both), layout_studies([study]), strict=True):
            words = "ours" if study.recipe == "ours" else "as published"
            keys = [(column.heading, column.group) for column in alone.columns if column.group.startswith(words)]
            assert len(keys) >= 2
            for heading, group in keys:
                ours = [cell for cell in column_of(joint, heading, group) if cell.text not in ("–", "")]
                assert ours == [cell for cell in column_of(alone, heading, group) if cell.text not in ("–", "")]


def test_table1_has_the_papers_blocks() -> None:
    grids = layout_studies(made_up.of_both("table1"))
    assert [grid.name for grid in grids] == ["table1-tsp", "table1-xsum", "table1-weather"]
    for grid in grids:
        assert grid.groups == [("", 1), ("as published", 3), ("ours", 3), ("the paper", 1)]
    assert [band.title for band in grids[0].bands] == ["Reference", "Whole sequence", "One-time"]
    assert [band.title for band in grids[1].bands] == ["Reference", "Whole sequence", "One-time", "Token-level"]
    by_method = {row[0]: row for row in texts_of(grids[0])}
    assert by_method["OneTimeModel"][-1] == "11.52 (2.41)"
    assert by_method["OneTimeCost"][1:4] == ["–", "–", ""], "a method of ours"
    assert by_method["OneTimeCost"][-1] == ""


@pytest.mark.parametrize("name", ["table1", "table-handoffs", "table-ablation"])
def test_a_task_that_one_recipe_lacks_still_shows_the_paper(name: str) -> None:
    """Only the rows of the first recipe were searched for the paper's figures."""
    published, ours = made_up.of_both(name, ["tsp", "xsum"])
    partly = replace(published, tasks={"tsp": published.tasks["tsp"]}, rows=tuple(rows_of_task(published, "tsp")))
    for one, other in zip(layout_studies([published, ours]), layout_studies([partly, ours]), strict=True):
        papers = [(column.heading, column.group) for column in one.columns if column.group == "the paper"]
        assert papers
        assert [column_of(one, *key) for key in papers] == [column_of(other, *key) for key in papers]


def test_headroom_stands_beside_the_improvement() -> None:
    rows = [replace(row, headroom=place + 0.4) for place, row in enumerate(made_up.psi(["tsp"]).rows)]
    (grid,) = layout_studies([replace(made_up.psi(["tsp"]), rows=(rows[0], replace(rows[1], headroom=None)))])
    assert [cell.text for cell in column_of(grid, "% of headroom", "ours")] == ["0", ""]


def test_best_of_a_block_is_bold() -> None:
    study = made_up.table1(["tsp"])
    (grid,) = layout_studies([study])
    rows = {row.method: row for row in study.rows}
    names = column_of(grid, "Method")
    for heading in ("AUDC", "%"):
        cells = column_of(grid, heading, "ours")
        bold = [name.text for name, cell in zip(names, cells, strict=True) if cell.is_best]
        for block in ("whole", "once"):
            members = [name for name, row in rows.items() if row.granularity == block]
            assert max(members, key=lambda name: rows[name].improvement_mean) in bold
        assert len(bold) == 2, "references do not compete"


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([1.001, 1.004, 0.5], [True, True, False]),  # equal as printed
        ([1.0, 1.0], [False, False]),  # all equal
        ([1.0], [True]),
        ([None, 2.0, 1.0], [False, True, False]),
        ([None], [False]),
    ],
)
def test_ties_are_bold_too(values: list[float | None], best: list[bool]) -> None:
    _, (cells,) = number_column(Column("%"), [Rows(values)], float, max)
    assert [cell.is_best for cell in cells] == best


def test_curves_are_read_at_the_budgets() -> None:
    study = made_up.curves(["tsp"])
    (grid,) = layout_studies([study])
    assert [column.heading for column in grid.columns] == ["Method", "0 %", "10 %", "20 %", "50 %", "100 %"]
    found = {row[0]: row[1:] for row in texts_of(grid)}
    for line in study.lines:
        assert found[line.method] == [text_of(line.mean[step], line.std[step]) for step in (0, 10, 20, 50, 100)]
    assert "% longer than the expert's tour" in grid.caption


def test_hand_offs_mark_the_choice_of_validation_data() -> None:
    grid = layout_studies(made_up.of_both("table-handoffs"))[0]
    sizes = [row[0] for row in texts_of(grid)]
    assert sizes == ["5", "10", "15", "20", "25", "30", "35", "40", "45", "51"]
    for recipe in ("as published", "ours"):
        judged = [cell.text for cell in column_of(grid, "validation %", f"{recipe}: OneTimeModel")]
        assert [size for size, text in zip(sizes, judged, strict=True) if text.endswith("*")] == ["45"]
        assert judged[0] == "9.05"
        measured = [cell.text for cell in column_of(grid, "%", f"{recipe}: OneTimeModel")]
        assert [size for size, text in zip(sizes, measured, strict=True) if text.endswith("†")] == ["51"]
    papers = [column.heading for column in grid.columns if column.group == "the paper"]
    assert papers == ["OneTimeModel %", "OneTimeScore %", "OneTimeEntropy %"], "the paper has no OneTimeCost"
    assert {cell.text for cell in column_of(grid, "OneTimeScore %", "the paper")} == {"−6.00 (1.50)"}


def test_alpha_has_both_costs_and_no_column_of_the_paper() -> None:
    (grid,) = layout_studies([made_up.alpha(["tsp"])])
    assert not any("paper" in column.heading + column.group for column in grid.columns)
    rule = next(row for row in texts_of(grid) if row[0].endswith("‡"))
    assert rule[:3] == ["0.83 ‡", "2.573", "0.05146"]
    assert rule[3].endswith(" †")
    assert next(row for row in texts_of(grid) if row[0] == "2")[-1] == "10.00 *"
    assert "†: the recipe's choice. ‡: the rule of thumb." in grid.caption


def test_ablation_shows_how_long_networks_learned() -> None:
    study = made_up.ablation()
    rows = [replace(row, training={"epochs": 9.5, "best_epoch": 4.0} if row.varied else {}) for row in study.rows]
    (grid,) = layout_studies([replace(study, rows=tuple(rows))])
    assert [cell.text for cell in column_of(grid, "epochs", "ours")] == ["9.5"] * 6 + [""] * 2
    assert [cell.text for cell in column_of(grid, "best epoch", "ours")] == ["4.0"] * 6 + [""] * 2
    assert "Epochs: until" in grid.caption
    assert "Epochs: until" not in layout_studies([study])[0].caption


def test_a_single_run_has_no_spread() -> None:
    study = replace(made_up.table1(["pronounce"]), seeds=1)
    (grid,) = layout_studies([study])
    assert not any("(" in text for row in texts_of(grid) for text in row)
    assert grid.caption.startswith("From 1 run of 100 test instances")


def test_verdicts_in_a_small_terminal_have_no_column_of_ten_letters() -> None:
    """Bug: eleven verdicts took 300 lines, because six columns shared 80 characters."""
    found = made_up.judgements()
    narrow, wide = printed(found, 80), printed(found, 160)
    assert "Differences and likely reasons: verdicts.md" in " ".join(narrow.split())
    assert "[95 % interval]" not in narrow
    assert "[95 % interval]" in wide
    assert len(narrow.splitlines()) < 4 * len(found.judgements) + 10
    assert {one.verdict for one in found.judgements} <= {
        word for word in ("holds", "does not hold", "undecided") if word in narrow
    }


def test_verdicts_have_a_row_for_each_task() -> None:
    grid = layout_verdicts(made_up.judgements())
    first, second, third = texts_of(grid)
    assert first[:5] == [
        "Partial deferral beats whole deferral",
        "tsp",
        "ours",
        "holds",
        "OneTimeModel over ChowMean: +5.34 [3.10, 7.25]",
    ]
    assert second[0] == "", "the statement appears once"
    assert second[4].split("\n")[1] == "OneTimeModel, |J| = 5 over ChowSum: +0.50 [−1.00, 2.00]"
    assert third[2:] == ["ours", "undecided", "", "Too few runs"]
    assert len(grid.bands) == 2


def test_the_deciding_contrast_comes_first() -> None:
    """Wide intervals that reach lower hid the contrast that decides."""
    wide = [Contrast("tsp", "OneTimeModel", f"wide {place}", 0.0, -20.0 - place, 20.0) for place in range(4)]
    against = Contrast("tsp", "OneTimeModel", "ChowSum", -2.0, -3.0, -1.0)
    judged = Judgement("claim", "It is better", "tsp", "ours", "does not hold", (*wide, against))
    grid = layout_verdicts(Judgements("paper", 3, (judged,)))
    assert texts_of(grid)[0][4].split("\n") == [
        "OneTimeModel over ChowSum: −2.00 [−3.00, −1.00]",
        "OneTimeModel over wide 3: 0.00 [−23.00, 20.00]",
        "OneTimeModel over wide 2: 0.00 [−22.00, 20.00]",
        "and 2 stronger ones",
    ]


# --- CSV -------------------------------------------------------------------------------------------------------------


@each_study
def test_csv_reads_back_exactly(name: str) -> None:
    study = made_up.STUDIES[name]()
    lines = list(csv.DictReader(io.StringIO(csv_of(study), newline="")))
    if study.lines:
        points = [point for line in study.lines for point in zip(line.deferred, line.mean, line.std, strict=True)]
        assert [tuple(float(one[key]) for key in ("deferred", "loss_mean", "loss_std")) for one in lines] == points
        return
    assert len(lines) == len(study.rows)
    for line, row in zip(lines, study.rows, strict=True):
        assert (line["task"], line["method"], line["granularity"]) == (row.task, row.method, row.granularity)
        for field in ("audc_mean", "audc_std", "improvement_mean", "improvement_std"):
            assert float(line[field]) == getattr(row, field)
        assert tuple(map(float, line["improvements"].split(";"))) == row.improvements
        assert {key: line[key] for key in row.varied} == {key: csv_text(value) for key, value in row.varied.items()}
        assert line["paper_improvement"] == ("" if row.paper is None else str(row.paper.improvement))
        assert line["validation"] == ("" if row.validation is None else str(row.validation))
        assert line["is_chosen"] == str(row.is_chosen).lower()


def csv_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_csv_is_rfc_4180() -> None:
    name = 'a "b", c\nd'
    row = replace(made_up.table1(["tsp"]).rows[0], task=name, paper=PaperFigure(None, None, 1.0, None))
    text = csv_of(made_up.make_study("table1", [name], [row]))
    assert text.count("\r\n") == 2
    assert '"a ""b"", c\nd"' in text
    (line,) = csv.DictReader(io.StringIO(text, newline=""))
    assert line["task"] == name
    assert line["paper_audc"] == ""


def test_verdicts_csv_has_a_line_for_each_contrast() -> None:
    lines = list(csv.DictReader(io.StringIO(verdicts_csv_of(made_up.judgements()), newline="")))
    assert [line["difference"] for line in lines] == ["5.336", "-1.5", "0.5", ""]
    assert [line["verdict"] for line in lines] == ["holds", "does not hold", "does not hold", "undecided"]


# --- LaTeX -----------------------------------------------------------------------------------------------------------


def check_latex(text: str) -> None:
    """Check that braces and environments are balanced, and that every row has a cell per column."""
    plain = re.sub(r"\\[\\{}&%$#_]|(?<!\\)%.*", lambda found: r"\\" if found[0] == r"\\" else "", text)
    depth, opened = 0, []
    for token in re.finditer(r"\\begin\{([a-z*]+)\}|\\end\{([a-z*]+)\}|[{}]", plain):
        if token[1]:
            opened.append(token[1])
        elif token[2]:
            assert opened.pop() == token[2]
        else:
            depth += 1 if token[0] == "{" else -1
            assert depth >= 0
    assert depth == 0
    assert not opened
    assert plain.count("$") % 2 == 0
    for shape, body in re.findall(r"\\begin\{tabular\}\{([^\n]*)\}\n(.*?)\\end\{tabular\}", plain, re.DOTALL):
        columns = len(re.findall("[lrp]", re.sub(r"\\[a-z]+", "", shape)))
        for row in body.split(r"\\")[:-1]:
            spans = [int(count) for count in re.findall(r"\\multicolumn\{(\d+)\}", row)]
            assert row.count("&") + 1 + sum(spans) - len(spans) == columns, row


@each_study
@pytest.mark.parametrize("tasks", [["tsp"], ["xsum", "weather"], [HOSTILE]])
def test_latex_is_balanced(name: str, tasks: list[str]) -> None:
    text = latex_of(layout_studies(made_up.of_both(name, tasks)))
    check_latex(text)
    assert text.isascii()
    labels = re.findall(r"\\label\{(.*)\}", text)
    assert len(set(labels)) == len(labels) == text.count(r"\caption{")
    assert all(re.fullmatch("tab:[a-z0-9-]+", label) for label in labels)


def test_latex_of_verdicts_is_balanced() -> None:
    text = latex_of([layout_verdicts(made_up.judgements())])
    check_latex(text)
    assert r"OneTimeModel, $|\mathcal{J}|$ = 5 over ChowSum: +0.50 {[}$-$1.00, 2.00{]}" in text


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        (HOSTILE, r"a\_b\textbar{}\textless{}x\textgreater{}\&\%"),
        ("\\input{x}", r"\textbackslash{}input\{x\}"),
        ("α₁ ≥ 5 °C² ~ #1 $^", r"$\alpha_1$ $\geq$ 5 $^\circ$C$^2$ \textasciitilde{} \#1 \$\textasciicircum{}"),
        ("*[0]", "{*}{[}0{]}"),  # LaTeX would read them as options of a row
        ("Zoë 東\x07", "Zoë {[}U+6771{]}{[}U+0007{]}"),
    ],
)
def test_latex_escapes(text: str, escaped: str) -> None:
    assert latex_text(text) == escaped


# --- Markdown and the terminal ---------------------------------------------------------------------------------------


@each_study
def test_markdown_rows_have_the_same_cells(name: str) -> None:
    text = markdown_of(layout_studies(made_up.of_both(name, [HOSTILE])))
    assert r"a\_b\|&lt;x&gt;&amp;%" in text
    assert "<x>" not in text
    for table in text.split("\n\n")[1::3]:
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(counts) == 1


def test_markdown_text() -> None:
    assert markdown_text("**b** `c` [d](e)\n~~f~~ $g$") == (
        r"\*\*b\*\* \`c\` \[d\](e)<br>&#126;&#126;f&#126;&#126; &#36;g&#36;"
    )


def test_terminal_parses_no_markup_in_names() -> None:
    text = printed([made_up.table1(["[red]x", HOSTILE])], 200)
    assert "[red]x" in text
    assert HOSTILE in text


def test_wide_tables_are_split_on_a_narrow_terminal() -> None:
    studies = made_up.of_both("table1", ["xsum"])
    assert printed(studies, 200).count("ChowMean") == 1
    narrow = printed(studies, 80)
    assert narrow.count("ChowMean") == 3
    assert max(map(len, narrow.splitlines())) <= 80
    assert all(text in narrow for study in studies for row in study.rows for text in ours_and_papers(row))
    (grid,) = layout_studies(studies)
    sizes = {"as published": 3, "ours": 3, "the paper": 1}
    assert [part.groups for part in split_groups(grid)] == [[("", 1), one] for one in sizes.items()]


# --- files -----------------------------------------------------------------------------------------------------------


@each_study
def test_equal_studies_give_equal_files(name: str, tmp_path: Path) -> None:
    """A loaded study equals the study that was saved."""
    first = write_studies(made_up.of_both(name), tmp_path / "first", figures=False)
    of_each = [f"{recipe}/{name}.{kind}" for recipe in ("published", "ours") for kind in ("json", "csv")]
    assert [path.relative_to(tmp_path / "first").as_posix() for path in first] == [*of_each, f"{name}.tex"]
    loaded = [load_study(path) for path in first if path.suffix == ".json"]
    second = write_studies(loaded, tmp_path / "second", figures=False)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_published_files_are_those_of_the_records(tmp_path: Path) -> None:
    for name in made_up.STUDIES:
        studies = [load_study(RECORDS / recipe / f"{name}.json") for recipe in ("published", "ours")]
        write_studies(studies, tmp_path, figures=False)
    write_judgements(load_judgements(RECORDS / "verdicts.json"), tmp_path)
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert path.read_bytes() == (RECORDS / path.relative_to(tmp_path)).read_bytes(), path.name


def test_without_matplotlib_tables_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'seqdefer\[figures\]'"):
        write_studies([made_up.table1()], tmp_path)
    assert sorted(path.suffix for path in tmp_path.rglob("*.*")) == [".csv", ".json", ".tex"]


# --- the page --------------------------------------------------------------------------------------------------------


def test_page_shows_the_origins(tmp_path: Path) -> None:
    """Of some studies, with no notes and no expert calls; the published page has all."""
    save(made_up.table1(), tmp_path / "ours" / "table1.json")
    provenance = Provenance(
        version="1.2",
        command="seqdefer reproduce all --tasks weather",
        data={"data": "jena | 8 years"},
        machine={"device": "cpu", "cores": "2"},
        seconds={"fit": 1234.6, "labels": 10.0},
    )
    save(Origins("seqdefer reproduce all", {"weather": provenance}), tmp_path / "ours" / "origins.json")
    page = results_page(tmp_path)
    assert re.findall("^## (.*)$", page, re.MULTILINE) == ["Made up table1", "Where the figures come from"]
    assert "#### weather, ours\n\n```sh\nseqdefer reproduce all --tasks weather\n```\n" in page
    assert r"| data | data: jena \| 8 years |" in page
    assert "| machine | device: cpu; cores: 2 |" in page
    assert "| seconds | 1245 (fit: 1235 s; labels: 10 s) |" in page
    assert "expert calls" not in page
    assert page.count("[below](#where-the-figures-come-from)") == 1


# The verdicts of three claims by both recipes; the second task of the last has one recipe only.
VERDICTS: dict[tuple[str, str], dict[str, Verdict]] = {
    ("A beats B.", "tsp"): {"published": "holds", "ours": "holds"},
    ("A beats B.", "xsum"): {"published": "holds", "ours": "does not hold"},
    ("C hurts.", "tsp"): {"published": "undecided", "ours": "holds"},
    ("D helps.", "tsp"): {"published": "undecided", "ours": "undecided"},
    ("D helps.", "xsum"): {"ours": "holds"},
}


def judgements_of(verdicts: dict[tuple[str, str], dict[str, Verdict]]) -> Judgements:
    judged = [
        Judgement(statement, statement, task, recipe, verdict, ())
        for (statement, task), by_recipe in verdicts.items()
        for recipe, verdict in by_recipe.items()
    ]
    return Judgements("paper", 5, tuple(judged))


def test_verdicts_have_a_column_for_each_task_and_recipe() -> None:
    lines = [line[2:-2].split(" | ") for line in verdict_summary(judgements_of(VERDICTS)).splitlines()]
    assert lines[0] == ["claim", "tsp, as published", "tsp, ours", "xsum, as published", "xsum, ours"]
    assert lines[2:] == [
        ["A beats B.", "holds", "holds", "holds", "does not hold"],
        ["C hurts.", "undecided", "holds", "", ""],
        ["D helps.", "undecided", "undecided", "", "holds"],
    ]


def test_changes_count_the_verdicts_that_both_recipes_have() -> None:
    said = _changes(judgements_of(VERDICTS))
    assert said.splitlines() == [
        "The recipes agree on 2 of 4 verdicts. They differ on these:",
        "",
        "- A beats B. On xsum: as published holds, ours does not hold.",
        "- C hurts. On tsp: as published undecided, ours holds.",
    ]
    same = {place: one for place, one in VERDICTS.items() if len(one) == 2 and len({*one.values()}) == 1}
    assert _changes(judgements_of(same)) == "The recipes agree on 2 of 2 verdicts."
    assert _changes(judgements_of({("D helps.", "xsum"): {"ours": "holds"}})) == ""


def test_page_of_an_empty_folder(tmp_path: Path) -> None:
    assert "There are none yet" in results_page(tmp_path)
    save(Judgements("paper", 5, ()), tmp_path / "verdicts.json")
    results_page(tmp_path)
