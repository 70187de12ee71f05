"""Drawings of the documentation: SVG in the colours of the reports. `tools/generate.py` writes them to docs/images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

PREDICTOR, EXPERT, OPTIMAL = "#0062bd", "#c2500a", "#6b7280"
INK, SOFT, RULE, PAPER = "#1f2733", "#5b6675", "#e3e7ec", "#ffffff"
FONT = "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif"

Point = tuple[float, float]


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    ground = f'<rect width="{width}" height="{height}" fill="{PAPER}" rx="6"/>'
    body = "\n".join([f"<title>{escape(title)}</title>", ground, *parts])
    return f'{head} role="img" font-family="{FONT}" font-size="16" fill="{INK}">\n{body}\n</svg>\n'


def text(x: float, y: float, words: str, **attributes: str | float) -> str:
    plain = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}"{plain}>{escape(words)}</text>'


def path(points: Sequence[Point], *, closed: bool = False, **attributes: str | float) -> str:
    plain = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    steps = "L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path d="M{steps}{"Z" if closed else ""}"{plain}/>'


# -- one sentence, four ways ---------------------------------------------------------------------------------------

WIDTH, MARGIN, GAP, TILE, STEP = 590, 20, 5, 36, 84
PREDICTOR_WORDS = ["Floods", "close", "ten", "schools", "in", "south", "London"]
EXPERT_WORDS = ["Floods", "close", "twelve", "schools", "in", "north", "Wales"]
# Title, tokens, and positions of the expert's tokens of each row.
ROWS = [
    ("Predictor alone", PREDICTOR_WORDS, set[int]()),
    ("Whole deferral", EXPERT_WORDS, set(range(7))),
    ("One-time deferral", EXPERT_WORDS, set(range(2, 7))),
    ("Token-level deferral", EXPERT_WORDS, {2, 5}),
]


def granularities() -> str:
    """Draw one sentence at each granularity."""
    parts = _legend()
    for number, row in enumerate(ROWS):
        parts += _row(62 + number * STEP, *row)
    return svg(WIDTH, 62 + len(ROWS) * STEP, "Whole, one-time and token-level deferral of one sentence", parts)


def _legend() -> list[str]:
    places = [(MARGIN, PREDICTOR, "written by the predictor"), (MARGIN + 230, EXPERT, "written by the expert")]
    tiles = [f'<rect x="{x}" y="18" width="16" height="16" rx="3" fill="{colour}"/>' for x, colour, _ in places]
    return [*tiles, *(text(x + 24, 32, words, fill=SOFT) for x, _, words in places)]


def _row(top: float, name: str, words: Sequence[str], by_expert: set[int]) -> list[str]:
    share = f"expert: {len(by_expert)} of {len(words)} tokens"
    parts = [
        text(MARGIN, top + 12, name, font_weight=600),
        text(WIDTH - MARGIN, top + 12, share, text_anchor="end", fill=SOFT),
    ]
    x = float(MARGIN)
    for position, word in enumerate(words):
        width = 9 * len(word) + 23
        colour = EXPERT if position in by_expert else PREDICTOR
        parts.append(f'<rect x="{x:g}" y="{top + 22:g}" width="{width}" height="{TILE}" rx="5" fill="{colour}"/>')
        parts.append(text(x + width / 2, top + 46, word, text_anchor="middle", fill=PAPER))
        x += width + GAP
    return parts


# -- a deferral curve ----------------------------------------------------------------------------------------------

LEFT, RIGHT_EDGE, TOP, BOTTOM = 36.0, 560.0, 60.0, 370.0
METHOD: list[Point] = [(0, 1), (0.06, 0.8), (0.15, 0.6), (0.28, 0.43), (0.45, 0.3), (0.65, 0.22), (0.85, 0.2), (1, 0.2)]
BEST: list[Point] = [(0, 1), (0.04, 0.66), (0.1, 0.4), (0.18, 0.22), (0.3, 0.11), (0.45, 0.07), (1, 0.07)]


def curve() -> str:
    """Draw a deferral curve with Random and Optimal."""
    ends = [METHOD[0], METHOD[-1]]
    (_, first), (_, last) = _placed(ends)
    parts = [
        path(_placed([(0, 0), *METHOD, (1, 0)]), closed=True, fill=PREDICTOR, fill_opacity=0.12),
        *_axes(),
        path(_placed(ends), fill="none", stroke=SOFT, stroke_width=2, stroke_dasharray="3 5"),
        path(_placed(BEST), fill="none", stroke=OPTIMAL, stroke_width=2),
        path(_placed(METHOD), fill="none", stroke=PREDICTOR, stroke_width=3, stroke_linejoin="round"),
        *(f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{INK}"/>' for x, y in _placed(ends)),
        text(LEFT + 14, first + 2, "predictor alone", font_weight=600),
        text(RIGHT_EDGE, last + 24, "expert alone", font_weight=600, text_anchor="end"),
        text(LEFT + 226, TOP + 98, "Random: defer by a coin flip", fill=SOFT),
        text(LEFT + 170, TOP + 176, "a method", fill=PREDICTOR, font_weight=600),
        text(LEFT + 134, BOTTOM - 60, "AUDC: the shaded area", fill=PREDICTOR),
        text(LEFT + 234, _placed(BEST)[-1][1] - 7, "Optimal, in hindsight", fill=OPTIMAL),
    ]
    return svg(WIDTH, 432, "A deferral curve: loss against tokens from the expert", parts)


def _placed(points: Sequence[Point]) -> list[Point]:
    """Convert points in the unit square to coordinates of the drawing."""
    return [(round(LEFT + x * (RIGHT_EDGE - LEFT), 1), round(BOTTOM - y * (BOTTOM - TOP), 1)) for x, y in points]


def _axes() -> list[str]:
    lines = path([(LEFT, TOP - 18), (LEFT, BOTTOM), (RIGHT_EDGE + 8, BOTTOM)], fill="none", stroke=SOFT)
    return [
        lines,
        text(LEFT - 14, TOP - 28, "mean loss", font_weight=600),
        text(LEFT, BOTTOM + 24, "0", text_anchor="middle", fill=SOFT),
        text(RIGHT_EDGE, BOTTOM + 24, "all", text_anchor="middle", fill=SOFT),
        text((LEFT + RIGHT_EDGE) / 2, BOTTOM + 46, "tokens from the expert", text_anchor="middle", font_weight=600),
    ]


# -- a decision tree -----------------------------------------------------------------------------------------------

TREE = {"": 295.0, "k": 165.0, "d": 425.0, "kk": 100.0, "kd": 230.0, "dk": 360.0, "dd": 490.0}
LEVEL, FIRST_LEVEL = 72.0, 44.0


def tree() -> str:
    """Draw seven prefixes and eight sequences of three tokens. A node is named by the decisions that lead to it."""
    parts = [text(MARGIN, 32, "left: keep", fill=PREDICTOR)]
    parts.append(text(WIDTH - MARGIN, 32, "right: defer", fill=EXPERT, text_anchor="end"))
    for name, x in TREE.items():
        for choice, shift in (("k", -32.5), ("d", 32.5)):
            end = TREE.get(name + choice, x + shift)
            parts.append(_branch((x, _height(name)), (end, _height(name + choice)), choice))
    for name, x in TREE.items():
        place = f'cx="{x:g}" cy="{_height(name):g}"'
        parts.append(f'<circle {place} r="9" fill="{PAPER}" stroke="{INK}" stroke-width="2"/>')
    parts.append(text(MARGIN, _height("kkk") + 34, "8 sequences, each with a loss and a number of expert tokens"))
    return svg(WIDTH, int(_height("kkk")) + 56, "The decision tree of a sequence of three tokens", parts)


def _height(name: str) -> float:
    return FIRST_LEVEL + LEVEL * len(name)


def _branch(start: Point, end: Point, choice: str) -> str:
    return path([start, end], stroke=EXPERT if choice == "d" else PREDICTOR, stroke_width=3, fill="none")


PICTURES = {"granularities.svg": granularities, "curve.svg": curve, "decision-tree.svg": tree}
