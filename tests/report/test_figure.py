"""Curves as a matplotlib figure, and the card of a report."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from seqdefer.errors import MissingExtraError, OptionError
from seqdefer.evaluation.results import Results
from seqdefer.report.drawn_curves import default_names, extent, mean_curves
from seqdefer.report.figure import CARD_FILE, plot_curves, write_card

pytest.importorskip("matplotlib", reason="needs the extra 'figures'")


def test_the_figure_holds_the_mean_curves(results: Results) -> None:
    curves = mean_curves(results)
    (axes,) = plot_curves(results).axes
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert set(lines) == set(default_names(results, curves))
    for name, line in lines.items():
        x, y = line.get_data()
        assert list(y) == pytest.approx(curves[name].mean)
        assert (min(x), max(x)) == (0.0, extent(results))
    (axes,) = plot_curves(results, ["ChowSum"]).axes
    assert [line.get_label() for line in axes.get_lines()] == ["ChowSum"]
    with pytest.raises(OptionError, match="unknown method 'ChowSun'"):
        plot_curves(results, ["ChowSun"])


def test_notebooks_show_the_figure(results: Results) -> None:
    """A figure that pyplot does not know was shown as `<Figure size 700x420 with 1 Axes>`."""
    shown = plot_curves(results)._repr_png_()  # type: ignore[attr-defined]
    assert struct.unpack(">II", shown[16:24]) == (700, 420)


def test_the_card_has_the_size_of_cards_and_is_always_the_same(results: Results, tmp_path: Path) -> None:
    path = write_card(results, tmp_path)
    assert path == tmp_path / CARD_FILE
    content = path.read_bytes()
    assert struct.unpack(">II", content[16:24]) == (1200, 630)
    assert write_card(results, tmp_path) == path
    assert path.read_bytes() == content


def test_without_matplotlib(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report needs none; a figure says which extra it needs."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert write_card(results, tmp_path) is None
    with pytest.raises(MissingExtraError, match=r"seqdefer\[figures\]"):
        plot_curves(results)
