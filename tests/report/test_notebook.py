"""What notebooks show is well-formed and escaped."""

from __future__ import annotations

from xml.etree import ElementTree

from seqdefer.budgets.calibration import LossCurve, LossPoint
from seqdefer.report.notebook import WIDTH, curve_svg, generation_html, model_html

CURVE = LossCurve("100 x (1 - <b>)", 30, "r", (LossPoint(0.0, 80.0), LossPoint(0.4, 60.0), LossPoint(1.0, 50.0)))


def test_a_curve_is_drawn_beside_chance() -> None:
    drawing = ElementTree.fromstring(curve_svg(CURVE))
    chance, curve = (line.get("points", "").split() for line in drawing.iter("{http://www.w3.org/2000/svg}polyline"))
    assert curve[0] == chance[0]
    assert curve[-1] == chance[-1]
    heights = [float(point.split(",")[1]) for point in curve]
    assert heights == sorted(heights)  # the loss falls, and SVG counts from the top
    assert max(float(point.split(",")[0]) for point in curve) < WIDTH
    assert drawing.findtext("{http://www.w3.org/2000/svg}title", "").startswith("100 x (1 - <b>) on 30")


def test_a_flat_curve_is_drawn_too() -> None:
    flat = LossCurve("u", 2, "r", (LossPoint(0.0, 5.0),))
    assert "nan" not in curve_svg(flat)


def test_outputs_are_escaped() -> None:
    token = {"text": "<script>", "source": "expert", "score": 0.5}
    drawn = generation_html([{"tokens": [token, {**token, "source": "predictor"}]}], 0.5, 3)
    assert "<script>" not in drawn
    assert drawn.count("&lt;script&gt;") == 2
    assert "and 2 more" in drawn
    ElementTree.fromstring(drawn.replace("\u00a0", " "))
    assert "<i>" not in model_html("<i>", None)
