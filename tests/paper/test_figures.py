"""The figures of studies: complete labels, nothing cut off, equal bytes for equal studies."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import made_up
import pytest

pytest.importorskip("matplotlib", reason="needs the extra 'figures'")

from seqdefer.paper.records import Study
from seqdefer.paper.render.figures import draw_studies, figure_files
from seqdefer.paper.render.panels import figure_style
from seqdefer.paper.render.rows import rows_of_task
from seqdefer.paper.render.sweep_figures import LogScale

HOSTILE = "a_b|<x>&%$y$"
BY_SIZE: dict[str, Any] = {"sizes": (5, 30, 51), "times": (0.0, 0.83, 2.0, 16.0)}
each_study = pytest.mark.parametrize("name", made_up.STUDIES)


@cache
def files_of(name: str) -> dict[str, bytes]:
    return figure_files(made_up.of_both(name))


def texts_of(svg: bytes) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def texts_drawn(*studies: Study) -> list[str]:
    from matplotlib.text import Text

    with figure_style():
        return [text.get_text() for text in draw_studies(studies).findobj(Text)]


def legend_of(*studies: Study) -> list[str]:
    with figure_style():
        return [text.get_text() for legend in draw_studies(studies).legends for text in legend.get_texts()]


@each_study
def test_panels_are_named(name: str) -> None:
    """The title names the task, and the recipe where each has a panel; a dollar sign starts no formula."""
    texts = texts_of(figure_files(made_up.of_both(name, [HOSTILE]))[".svg"])
    if name in ("figure-curves", "table-handoffs", "figure-alpha"):
        assert {f"{HOSTILE}, as published", f"{HOSTILE}, ours"} <= set(texts)
    else:
        assert texts.count(HOSTILE) == 1
        assert {"as published", "ours"} <= set(texts)


@each_study
@pytest.mark.parametrize(("count", "n_recipes"), [(1, 1), (4, 1), (3, 2)])
def test_nothing_is_cut_off(name: str, count: int, n_recipes: int) -> None:
    """All drawings are within the page, which has the width of a column or of the text of a paper."""
    studies = made_up.of_both(name, ["tsp", "xsum", "weather", "pronounce"][:count])[-n_recipes:]
    is_apart = name in ("figure-curves", "table-handoffs", "figure-alpha")
    with figure_style():
        figure = draw_studies(studies)
        figure.draw_without_rendering()
        drawn = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert width == (3.35 if count == 1 and not (is_apart and n_recipes == 2) else 6.9)
    assert min(drawn.x0, drawn.y0, width - drawn.x1, height - drawn.y1) > -0.005


def test_dots_of_table1() -> None:
    texts = texts_of(files_of("table1")[".svg"])
    methods = [name for name, block in made_up.METHODS.items() if block != "reference"]
    assert [text for text in texts if text in methods] == methods, "labelled once, at the left"
    assert {"Whole sequence", "One-time", "Token-level", "as published", "ours", "the paper"} <= set(texts)
    assert texts.count("± 1 standard deviation") == 3, "once in each panel"


@pytest.mark.parametrize("name", ["table1", "table-psi", "table-ablation"])
def test_marks_of_a_row_do_not_hide_each_other(name: str) -> None:
    """Both recipes and the paper have equal figures; their marks still are apart."""
    ours = made_up.STUDIES[name](["xsum"])
    with figure_style():
        figure = draw_studies([replace(ours, recipe="published"), ours])
        figure.draw_without_rendering()
        (axes,) = (one for one in figure.axes if one.axison)
        marks = [line for line in axes.lines if line.get_marker() in ("o", "s", "^") and len(line.get_xdata()) == 1]
    places = sorted(axes.transData.transform((0, line.get_ydata()[0]))[1] * 72 / figure.dpi for line in marks)
    assert len(marks) >= 4
    assert min(high - low for low, high in pairwise(places)) > marks[0].get_markersize()


def test_a_task_that_one_recipe_lacks_still_shows_the_paper() -> None:
    """Only the rows of the first recipe were searched for the paper's figures."""
    published, ours = made_up.of_both("table1", ["tsp", "xsum"])
    partly = replace(published, tasks={"tsp": published.tasks["tsp"]}, rows=tuple(rows_of_task(published, "tsp")))
    with figure_style():
        both, one = (draw_studies(studies) for studies in ([published, ours], [partly, ours]))
        hollow = [
            [sum(line.get_markerfacecolor() == "white" for line in axes.lines) for axes in figure.axes]
            for figure in (both, one)
        ]
    assert hollow[0] == hollow[1]
    assert all(hollow[0])


def test_curves_show_the_best_of_each_granularity() -> None:
    study = made_up.curves(["xsum"])
    texts = texts_drawn(study)
    best = {}
    for row in sorted(study.rows, key=lambda row: -row.audc_mean):
        best[row.granularity] = row.method
    drawn = {text for text in texts if text in made_up.METHODS}
    assert drawn == {*best.values(), "Random"}
    assert "100 × (1 − ROUGE-1)" in texts
    assert "deferred tokens per sequence" in texts


def test_curves_show_an_oracle_that_can_be_reached() -> None:
    """An expert that costs nothing is below all curves; it took the place of the best oracle."""
    study = made_up.curves(["pronounce"])
    areas = {"OptimalToken": 0.2, "OptimalOneTime": 0.3}
    rows = [replace(row, audc_mean=areas.get(row.method, row.audc_mean)) for row in study.rows]
    (row,) = (row for row in rows if row.method == "OptimalToken")
    (line,) = (line for line in study.lines if line.method == "OptimalToken")
    free = replace(line, method="OptimalFree", mean=tuple(line.mean[-1] for _ in line.mean))
    rows.append(replace(row, method="OptimalFree", audc_mean=0.1))
    texts = texts_drawn(replace(study, lines=(*study.lines, free), rows=tuple(rows)))
    assert {text for text in texts if text.startswith("Optimal")} == {"OptimalToken"}


def test_sweeps_explain_their_marks() -> None:
    texts = texts_of(files_of("table-handoffs")[".svg"])
    assert {"OneTimeModel", "OneTimeEntropy", "the paper", "chosen by validation data"} <= set(texts)
    texts = texts_of(files_of("figure-alpha")[".svg"])
    assert {"OneTimeModel", "rule of thumb", "0", "0.1", "1", "10"} <= set(texts)
    assert "the paper" not in texts, "the paper prints no numbers there"


@pytest.mark.parametrize("is_rule", [True, False])
def test_alphas_by_size_are_lines_over_sizes(is_rule: bool) -> None:
    """One line for each alpha_1, as in the paper, and for the recipe's own."""
    study = made_up.alpha(["tsp"], **BY_SIZE, is_rule=is_rule)
    with figure_style():
        (axes,) = draw_studies([study]).axes
    sizes = tuple(sorted({row.varied["hand_offs"] for row in study.rows}))
    drawn = [tuple(line.get_ydata()) for line in axes.lines if tuple(line.get_xdata()) == sizes]
    assert len(sizes) == 3
    by_alpha: dict[float, list[float]] = {}
    for row in study.rows:
        by_alpha.setdefault(row.varied["alpha"], []).append(row.improvement_mean)
    assert sorted(drawn) == sorted(tuple(means) for means in by_alpha.values())
    own = "rule of thumb" if is_rule else "the recipe's alpha"
    times = ["0 times the mean gain", "2 times the mean gain", "16 times the mean gain"]
    assert legend_of(study) == [*times, own, "chosen by validation data"], "nothing that is not drawn"


def test_a_rule_among_the_plans_multiples_is_drawn_once() -> None:
    """One recipe has alpha_1 = 0 as a multiple of the plan, the other as its own: its line was drawn twice."""
    ours = made_up.alpha(["tsp"], **BY_SIZE, is_rule=True)
    zero = [
        replace(row, varied={**row.varied, "times": 0.0, "alpha": 0.0}) for row in ours.rows if row.varied["is_own"]
    ]
    others = [row for row in ours.rows if row.varied["times"] > 0 and not row.varied["is_own"]]
    published = replace(made_up.alpha(["tsp"], **BY_SIZE, is_rule=False), recipe="published")
    with figure_style():
        _, axes = draw_studies([published, replace(ours, rows=(*others, *zero))]).axes
    sizes = {row.varied["hand_offs"] for row in ours.rows}
    assert sum(len(line.get_xdata()) == len(sizes) for line in axes.lines) == 3


def test_ablation_shows_all_networks_once() -> None:
    texts = texts_of(files_of("table-ablation")[".svg"])
    assert {"LSTM", "MLP", "By confidence"} <= set(texts)
    assert texts.count("scheduled sampling") == 2


def test_legend_names_the_paper_only_where_it_is_drawn() -> None:
    study = made_up.ablation()
    assert "the paper" in texts_of(files_of("table-ablation")[".svg"])
    assert "the paper" not in texts_drawn(replace(study, rows=tuple(replace(row, paper=None) for row in study.rows)))


def test_zero_is_left_of_the_decades() -> None:
    scale = LogScale.of([0.0, 0.05, 1.0, 20.0])
    assert scale.place(0) < scale.place(0.05) - 0.1
    assert scale.place(20) - scale.place(2) == pytest.approx(1)
    places, labels = scale.ticks()
    assert labels == ["0", "0.1", "1", "10"]
    assert places == [scale.place(0), -1, 0, 1]
    assert LogScale.of([0.0]).ticks()[1] == ["0", "1"]


def test_fonts_are_embedded_as_truetype() -> None:
    pdf = files_of("figure-alpha")[".pdf"]
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf


@pytest.mark.slow
def test_another_process_gives_equal_figures(tmp_path: Path) -> None:
    """Neither the order of sets nor the user's matplotlib settings matter."""
    (tmp_path / "matplotlibrc").write_text("font.size: 20\nlines.linewidth: 5\n")
    code = (
        "import sys, made_up; from pathlib import Path; from seqdefer.paper.render.files import write_studies; "
        "write_studies(made_up.of_both('table-handoffs'), Path(sys.argv[1]))"
    )
    settings = {"PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, env={**os.environ, **settings})
    theirs = {suffix: (tmp_path / f"table-handoffs{suffix}").read_bytes() for suffix in (".pdf", ".svg")}
    assert theirs == files_of("table-handoffs")
