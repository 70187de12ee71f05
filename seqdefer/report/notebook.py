"""Output in notebooks: texts with the expert's tokens in another colour, and the curve of a fitted model.

Every text is escaped. Colours are inline, because notebooks strip style sheets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seqdefer.budgets.calibration import LossCurve
from seqdefer.report.markup import NBSP, Markup, element, number
from seqdefer.report.style import INK, LIGHT, RULE, SOFT

WIDTH, HEIGHT, MARGIN = 360, 160, 34  # of the curve, in pixels
STEPS = 50
EXPERT_STYLE = f"color:{LIGHT['once'][0]};font-weight:600;text-decoration:underline"
PREDICTOR_STYLE = f"color:{LIGHT['token'][0]}"


def generation_html(rows: Iterable[Mapping[str, Any]], share: float, n: int) -> Markup:
    """Draw outputs, as `Generation.rows` gives them, of `n` in all."""
    listed = [element("li", *_tokens(row["tokens"]), style="margin:4px 0;white-space:pre-wrap") for row in rows]
    more = element("p", f"… and {n - len(listed)} more", style=f"color:{SOFT}") if n > len(listed) else Markup()
    legend = element(
        "p",
        element("span", "predictor", style=PREDICTOR_STYLE),
        " · ",
        element("span", "expert", style=EXPERT_STYLE),
        f": {number(100 * share, 1)}{NBSP}% of all tokens (budgets hold on average, not for each output)",
        style=f"color:{SOFT}",
    )
    return element("div", legend, element("ol", *listed), more)


def _tokens(tokens: Sequence[Mapping[str, Any]]) -> list[Markup]:
    return [
        element(
            "span",
            one["text"],
            style=PREDICTOR_STYLE if one["source"] == "predictor" else EXPERT_STYLE,
            title=f"{one['source']}, score {number(one['score'], 2)}",
        )
        for one in tokens
    ]


def model_html(title: str, curve: LossCurve | None) -> Markup:
    """Draw a model: its name, and what its budgets buy where that was measured."""
    return element("div", element("p", element("code", title)), Markup() if curve is None else curve_svg(curve))


def curve_svg(curve: LossCurve) -> Markup:
    """Draw mean loss against the share of tokens by the expert, beside deferring at random."""
    last = max(point.share for point in curve.points) or 1.0
    shares = [last * step / STEPS for step in range(STEPS + 1)]
    losses = [curve.loss_at(share) for share in shares]
    ends = [curve.random_at(shares[0]), curve.random_at(shares[-1])]
    low, high = min(*losses, *ends), max(*losses, *ends)

    def at(share: float, loss: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * share / last
        y = MARGIN / 2 + (HEIGHT - 1.5 * MARGIN) * (high - loss) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    drawn = " ".join(at(share, loss) for share, loss in zip(shares, losses, strict=True))
    chance = f"{at(shares[0], ends[0])} {at(shares[-1], ends[1])}"
    return element(
        "svg",
        element("polyline", points=chance, fill="none", stroke=LIGHT["reference"][0], stroke_dasharray="6 4"),
        element("polyline", points=drawn, fill="none", stroke=LIGHT["token"][0], stroke_width=2),
        _label(MARGIN, HEIGHT - 4, f"0{NBSP}%", "middle"),
        _label(WIDTH - MARGIN, HEIGHT - 4, f"{number(100 * last, 0)}{NBSP}%", "middle"),
        _label(WIDTH / 2, HEIGHT - 4, "tokens by the expert", "middle"),
        _label(2, MARGIN / 2 + 4, number(high, 1), "start"),
        _label(2, HEIGHT - MARGIN, number(low, 1), "start"),
        element("title", f"{curve.unit} on {curve.inputs} validation inputs; dashed: deferring at random"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        width=WIDTH,
        height=HEIGHT,
        style=f"border:1px solid {RULE};background:#ffffff",
    )


def _label(x: float, y: float, text: str, anchor: str) -> Markup:
    return element("text", text, x=f"{x:g}", y=f"{y:g}", text_anchor=anchor, font_size=11, fill=INK)
