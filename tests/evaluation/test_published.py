"""Published figures equal those in the source of the paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqdefer.evaluation.published import PAPER, published_ablation, published_ablation_baseline, published_hand_offs
from seqdefer.evaluation.results import PaperFigure
from seqdefer.paper.plan import ARCHITECTURES, PLANS, STRATEGIES

NUMBER = r"-?\d+(?:\.\d+)?"


@pytest.fixture(scope="module")
def paper(shared_dir: Path) -> str:
    return (shared_dir / "paper" / "learning-to-partially-defer.tex").read_text(encoding="utf-8")


def table_of(paper: str, label: str) -> Iterator[tuple[str, list[PaperFigure | None]]]:
    """Yield the first cell of each row and its pairs of columns, AUDC (std) and % improvement (std)."""
    tables = re.findall(r"\\begin{table.*?\\end{table", paper, re.S)
    (table,) = (part for part in tables if f"\\label{{{label}}}" in part)
    for line in table.split("\\\\"):
        plain = re.sub(r"\\(hline|midrule|toprule|bottomrule)|\\textbf{|}|\s", " ", line)
        first, *cells = [re.sub(r"\s+", " ", cell).strip() for cell in plain.split("&")]
        if len(cells) >= 2 and all(re.fullmatch(rf"-|{NUMBER} ?\({NUMBER}\)", cell) for cell in cells):
            pairs = zip(cells[::2], cells[1::2], strict=True)
            yield first, [None if "-" in pair else PaperFigure(*_numbers("".join(pair))) for pair in pairs]


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(NUMBER, text)]


def named(first: str) -> str:
    """Return our name of a method."""
    name = first.replace("Softmax", "Score")
    quantile = re.fullmatch(rf"ChowQuantile ({NUMBER})", name)
    return f"ChowQuantile{float(quantile[1])}" if quantile else name


def test_table_1_is_the_papers(paper: str) -> None:
    """The paper's Optimal is the expert's loss at every budget, or nothing else could be 0 on TSP."""
    printed: dict[str, dict[str, PaperFigure]] = {"tsp": {}, "xsum": {}, "weather": {}}
    rows = list(table_of(paper, "tab:auctokenlevel"))
    assert len(rows) == 2 + 7 + 3 + 3
    for first, figures in rows:
        for task, figure in zip(printed, figures, strict=True):
            if figure is not None:
                printed[task]["OptimalFree" if first == "Optimal" else named(first)] = figure
    assert printed == PAPER


@pytest.mark.parametrize(
    ("task", "label", "length"),
    [("tsp", "tab:aucscoresTSPNumexperts", 50), ("xsum", "tab:aucscoresXSUMNumexperts", 20)],
)
def test_hand_offs_are_the_papers(task: str, label: str, length: int, paper: str) -> None:
    rows = {int(first): figures for first, figures in table_of(paper, label)}
    methods = ("OneTimeModel", "OneTimeScore", "OneTimeEntropy")
    ours = {size: [published_hand_offs(task, method, size) for method in methods] for size in range(length + 2)}
    assert rows == {size: figures for size, figures in ours.items() if any(figures)}
    assert tuple(rows) == (*PLANS["paper"].tasks[task].hand_offs, length + 1)


def test_the_ablation_is_the_papers(paper: str) -> None:
    strategies = {"No Teacher Forcing": "free", "Teacher Forcing": "teacher", "Scheduled Sampling": "scheduled"}
    rows = {first: figure for first, (figure,) in table_of(paper, "tab:aucscoresarch")}
    ours = {
        f"{kind.upper()} {words}": published_ablation("xsum", kind, strategy)
        for kind in ARCHITECTURES
        for words, strategy in strategies.items()
    }
    ours["TokenwiseSoftmax"] = published_ablation_baseline("xsum", "TokenwiseScore")
    ours["TokenwiseEntropy"] = published_ablation_baseline("xsum", "TokenwiseEntropy")
    assert rows == ours
    assert set(STRATEGIES) == set(strategies.values())


def test_other_tasks_have_no_published_figures() -> None:
    assert published_ablation("pronounce", "lstm", "free") is None
    assert published_ablation_baseline("weather", "TokenwiseScore") is None
    assert published_ablation("xsum", "lstm", "explore") is None
    assert published_hand_offs("weather", "OneTimeModel", 5) is None
    assert published_hand_offs("tsp", "OneTimeCost", 5) is None
    assert published_hand_offs("tsp", "OneTimeModel", 6) is None


def test_the_protocol_is_the_papers(paper: str) -> None:
    assert "averaged over five runs, each with 100 test instances" in paper
    assert PLANS["paper"].seeds == 5
    assert list(PLANS["paper"].tasks) == ["weather", "tsp", "xsum"]
    assert PLANS["paper"].ablated_task == "xsum"
