"""The figures of studies: complete labels, nothing cut off, equal bytes for equal studies."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import made_up
import pytest

pytest.importorskip("matplotlib", reason="needs the extra 'figures'")

from seqdefer.paper.records import Study
from seqdefer.paper.render.figures import LogScale, draw_study, figure_files, figure_style

HOSTILE = "a_b|<x>&%$y$"
each_study = pytest.mark.parametrize("name", made_up.STUDIES)


@cache
def files_of(name: str) -> dict[str, bytes]:
    return figure_files(made_up.STUDIES[name]())


def texts_of(svg: bytes) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def texts_drawn(study: Study) -> list[str]:
    from matplotlib.text import Text

    with figure_style():
        return [text.get_text() for text in draw_study(study).findobj(Text)]


@each_study
def test_panels_are_named(name: str) -> None:
    """The title is the name of the task; a dollar sign starts no formula."""
    assert HOSTILE in texts_of(figure_files(made_up.STUDIES[name]([HOSTILE]))[".svg"])


@each_study
@pytest.mark.parametrize("count", [1, 4])
def test_nothing_is_cut_off(name: str, count: int) -> None:
    """All drawings are within the page, which has the width of a column or of the text of a paper."""
    with figure_style():
        figure = draw_study(made_up.STUDIES[name](["tsp", "xsum", "weather", "pronounce"][:count]))
        figure.draw_without_rendering()
        drawn = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert width == (3.35 if count == 1 else 6.9)
    assert min(drawn.x0, drawn.y0, width - drawn.x1, height - drawn.y1) > -0.005


def test_dots_of_table1() -> None:
    texts = texts_of(files_of("table1")[".svg"])
    methods = [name for name, block in made_up.METHODS.items() if block != "reference"]
    assert [text for text in texts if text in methods] == methods, "labelled once, at the left"
    assert {"Whole sequence", "One-time", "Token-level", "ours, ± 1 standard deviation", "paper"} <= set(texts)


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


def test_sweeps_explain_their_marks() -> None:
    texts = texts_of(files_of("table-handoffs")[".svg"])
    assert {"OneTimeModel", "OneTimeEntropy", "paper", "chosen by validation data"} <= set(texts)
    texts = texts_of(files_of("figure-alpha")[".svg"])
    assert {"OneTimeModel", "rule of thumb", "0", "0.1", "1", "10"} <= set(texts)
    assert "paper" not in texts, "the paper prints no numbers there"


def test_ablation_shows_all_inputs() -> None:
    texts = texts_of(files_of("table-ablation")[".svg"])
    assert {"inputs: states", "inputs: facts", "LSTM", "MLP", "By confidence"} <= set(texts)
    assert texts.count("scheduled sampling") == 2


def test_legend_names_the_paper_only_where_it_is_drawn() -> None:
    study = made_up.ablation()
    assert "paper" in texts_of(files_of("table-ablation")[".svg"])
    assert "paper" not in texts_drawn(replace(study, rows=tuple(replace(row, paper=None) for row in study.rows)))


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
        "import sys, made_up; from pathlib import Path; from seqdefer.paper.render.files import write_study; "
        "write_study(made_up.hand_offs(), Path(sys.argv[1]))"
    )
    settings = {"PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, env={**os.environ, **settings})
    theirs = {suffix: (tmp_path / f"table-handoffs{suffix}").read_bytes() for suffix in (".pdf", ".svg")}
    assert theirs == files_of("table-handoffs")
