"""SVG drawings of tours with two authors, single or in a gallery.

    Path("tour.svg").write_text(draw_tour(cities, tour, by_expert, optimal, title="Instance 1"))

The expert's own tour is the broad pale background. On top is the tour as written: the predictor's part solid, the
expert's dashed. An edge belongs to the author of the city at its end, the closing edge to the author of the last city.
A single drawing has the colours of a white page; a gallery uses those of its page, light or dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from seqdefer.errors import ContractError
from seqdefer.report.markup import NBSP, Markup, element, join, number

Point = tuple[float, float]

WIDTH = 300.0  # of a drawing, in user units (about pixels)
_MARGIN = 12.0
_CROWDED = 60  # cities, above which lines and dots get thinner
_PREDICTOR, _EXPERT, _ROAD, _INK, _PAPER = "#0062bd", "#c2500a", "#dfe4ea", "#1c2430", "#ffffff"


@dataclass(frozen=True)
class TourDrawing:
    """One tour of a gallery, with the facts of its caption."""

    cities: Tensor  # (N, 2)
    tour: Tensor  # int64 (N,)
    by_expert: Tensor  # bool (N,): whether the expert wrote each position
    optimal: Tensor  # int64 (N,): the expert's own tour
    percent_over: float  # how much longer than the expert's own
    budget: float | None = None  # share of the tokens (0 to 1) that the policy may defer on average
    title: str = ""

    @property
    def deferred(self) -> int:
        return int(self.by_expert.sum())

    @property
    def heading(self) -> str:
        budget = [] if self.budget is None else [f"budget {number(100 * self.budget, 0)}{NBSP}%"]
        words = ", ".join([*([self.title] if self.title else []), *budget])
        return words[:1].upper() + words[1:]


# --- one drawing -----------------------------------------------------------------------------------------------------


def draw_tour(
    cities: Tensor,
    tour: Tensor,
    by_expert: Tensor,
    optimal: Tensor,
    *,
    title: str = "",
    description: str = "",
    ratio: float | None = None,
) -> Markup:
    """Return one SVG element. cities (N, 2), tour (N,), by_expert bool (N,), optimal (N,).

    `title` and `description` serve screen readers; `ratio` is height over width, by default that of the cities."""
    _check(cities, tour, by_expert, optimal)
    height = WIDTH * (_ratio_of(cities) if ratio is None else ratio)
    points = _place(cities, height)
    scale = min(1.0, (_CROWDED / len(points)) ** 0.5)
    written, authors = tour.tolist(), by_expert.tolist()
    layers = [
        _line(_closed([points[city] for city in optimal.tolist()]), "road", _ROAD, 9 * scale),
        _line(_part(points, written, authors, by_expert=False), "predictor", _PREDICTOR, 2.4 * scale),
        _line(_part(points, written, authors, by_expert=True), "expert", _EXPERT, 2.4 * scale, dash=scale),
        join(_dot(points[city], author, 3.2 * scale) for city, author in zip(written, authors, strict=True)),
        join(_hand_off(points[city], max(scale, 0.5)) for city in _hand_offs(written, authors)),
        _start(points[written[0]], max(scale, 0.5)),
    ]
    return element(
        "svg",
        element("title", title or f"Tour of {len(points)} cities"),
        element("desc", description or _describe(authors)),
        *layers,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:g} {_short(height)}",
        role="img",
        class_="tour",
    )


def _check(cities: Tensor, tour: Tensor, by_expert: Tensor, optimal: Tensor) -> None:
    n = len(cities)
    if cities.ndim != 2 or cities.shape[1] != 2 or n == 0:
        raise ContractError(f"cities have the shape {tuple(cities.shape)}; a drawing needs (N, 2)")
    if by_expert.shape != (n,):
        raise ContractError(f"by_expert has the shape {tuple(by_expert.shape)}; {n} cities need ({n},)")
    for name, order in {"tour": tour, "optimal": optimal}.items():
        if sorted(order.tolist()) != list(range(n)):
            raise ContractError(f"{name} does not visit every one of the {n} cities once: {order.tolist()}")


def _ratio_of(cities: Tensor) -> float:
    """Return height over width, clipped to fit a page."""
    width, height = (cities.amax(0) - cities.amin(0)).tolist()
    return min(max(height / width, 0.5), 1.25) if width else 1.0


def _place(cities: Tensor, height: float) -> list[Point]:
    """Place the cities on the canvas: as large as fits, centred, north up."""
    low, high = cities.double().amin(0), cities.double().amax(0)
    room = (WIDTH - 2 * _MARGIN, height - 2 * _MARGIN)
    spans = (high - low).tolist()
    factor = min((space / span for space, span in zip(room, spans, strict=True) if span), default=1.0)
    offsets = ((cities.double() - (low + high) / 2) * factor).tolist()
    return [(WIDTH / 2 + x, height / 2 - y) for x, y in offsets]


def _part(points: Sequence[Point], tour: Sequence[int], authors: Sequence[bool], *, by_expert: bool) -> str:
    """Return the path of one author; its stretches begin at the other author's last city."""
    ends = [*tour[1:], tour[0]]
    writers = [*authors[1:], authors[-1]]  # of the edge from each position
    steps = []
    is_open = False
    for start, end, writer in zip(tour, ends, writers, strict=True):
        if writer == by_expert:
            steps += [] if is_open else [f"M{_at(points[start])}"]
            steps.append(f"L{_at(points[end])}")
        is_open = writer == by_expert
    return "".join(steps)


def _hand_offs(tour: Sequence[int], authors: Sequence[bool]) -> list[int]:
    """Return the cities after which the author changes."""
    return [city for city, (before, after) in zip(tour, pairwise(authors), strict=False) if before != after]


def _describe(authors: Sequence[bool]) -> str:
    n, deferred = len(authors), sum(authors)
    if deferred in (0, n):
        return f"The {'expert' if deferred else 'predictor'} wrote the whole tour."
    if list(authors) == [False] * (n - deferred) + [True] * deferred:
        return f"The predictor wrote the first {n - deferred} cities, the expert the other {deferred}."
    return f"The expert wrote {deferred} of the {n} cities."


# --- shapes ----------------------------------------------------------------------------------------------------------


def _short(value: float) -> str:
    return f"{round(value, 1):g}"


def _at(point: Point) -> str:
    return f"{_short(point[0])} {_short(point[1])}"


def _closed(points: Sequence[Point]) -> str:
    return "M" + "L".join(_at(point) for point in points) + "Z"


def _line(path: str, part: str, colour: str, width: float, dash: float = 0) -> Markup:
    if not path:
        return Markup()
    return element(
        "path",
        d=path,
        class_=f"tour-{part}",
        fill="none",
        stroke=colour,
        stroke_width=_short(width),
        stroke_dasharray=f"{_short(6 * dash)} {_short(3.5 * dash)}" if dash else None,
        stroke_linejoin="round",
        stroke_linecap=None if dash else "round",
    )


def _dot(point: Point, by_expert: bool, radius: float) -> Markup:
    part, colour = ("expert", _EXPERT) if by_expert else ("predictor", _PREDICTOR)
    x, y = (_short(value) for value in point)
    return element("circle", cx=x, cy=y, r=_short(radius), class_=f"tour-{part}-city", fill=colour)


def _start(point: Point, scale: float) -> Markup:
    """Return a ring, which leaves a hand-off at the first city visible."""
    x, y = (_short(value) for value in point)
    ring = {"cx": x, "cy": y, "r": _short(8 * scale), "fill": "none"}
    halo = element("circle", **ring, class_="tour-halo", stroke=_PAPER, stroke_width=_short(5 * scale))
    return join([halo, element("circle", **ring, class_="tour-start", stroke=_INK, stroke_width=_short(2 * scale))])


def _hand_off(point: Point, scale: float) -> Markup:
    x, y = point
    half = 6.5 * scale
    corners = [(x, y - half), (x + half, y), (x, y + half), (x - half, y)]
    return element(
        "path",
        d=_closed(corners),
        class_="tour-hand-off",
        fill=_INK,
        stroke=_PAPER,
        stroke_width=_short(2 * scale),
        stroke_linejoin="round",
    )


# --- the gallery -----------------------------------------------------------------------------------------------------

# CSS rules override the attributes of the drawing, so that it takes the page's colours where the page defines them. All
# names begin with `tour`, so that nothing else on the page changes.
STYLE = f"""
.tours {{
  --tour-predictor: var(--token-0, {_PREDICTOR}); --tour-expert: var(--once-0, {_EXPERT});
  --tour-road: var(--rule, {_ROAD}); --tour-ink: var(--ink, {_INK}); --tour-paper: var(--paper, {_PAPER});
}}
.tours svg {{ display: block; overflow: visible; }}
.tours .tour-road {{ stroke: var(--tour-road); }}
.tours .tour-predictor {{ stroke: var(--tour-predictor); }}
.tours .tour-expert {{ stroke: var(--tour-expert); }}
.tours .tour-predictor-city {{ fill: var(--tour-predictor); }}
.tours .tour-expert-city {{ fill: var(--tour-expert); }}
.tours .tour-start {{ stroke: var(--tour-ink); }}
.tours .tour-halo {{ stroke: var(--tour-paper); }}
.tours .tour-hand-off {{ fill: var(--tour-ink); stroke: var(--tour-paper); }}
.tours-legend {{
  display: flex; flex-wrap: wrap; gap: 6px 24px; margin: 16px 0 0; padding: 0; list-style: none; font-size: 14px;
}}
.tours-legend li {{ display: flex; align-items: center; gap: 9px; }}
.tours-legend svg {{ flex: none; }}
.tours-grid {{
  display: grid; grid-template-columns: repeat(var(--tours-columns), minmax(0, 1fr)); gap: 32px 28px; margin-top: 24px;
}}
.tours-grid figure {{ display: flex; flex-direction: column; margin: 0; break-inside: avoid; }}
.tours-grid .tour {{ width: 100%; height: auto; }}
.tours-grid .tours-strip {{ width: 100%; height: 5px; margin-top: 12px; }}
.tours-grid figcaption {{ margin-top: 8px; font-size: 14px; line-height: 1.4; }}
.tours-grid figcaption span {{ display: block; color: var(--soft, inherit); }}
@media screen and (max-width: 860px) {{ .tours-grid {{ grid-template-columns: repeat(2, minmax(0, 1fr)); }} }}
@media screen and (max-width: 560px) {{
  .tours-legend {{ gap: 6px 14px; font-size: 13.5px; }}
  .tours-grid {{ grid-template-columns: minmax(0, 1fr); }}
  .tours-grid figure {{ width: 100%; max-width: 420px; margin: 0 auto; }}
}}
@media print {{
  .tours-grid {{ gap: 6mm; }}
  .tours-grid figcaption {{ font-size: 8pt; }}
  .tours-legend {{ font-size: 9pt; }}
}}
"""


def draw_gallery(drawings: Sequence[TourDrawing], *, columns: int = 4) -> Markup:
    """Return a legend and a grid of captioned drawings of equal height; one column on a phone.

    Drawings are in row order: with `columns` budgets per instance, a row is an instance and a column a budget."""
    if not drawings:
        return Markup()
    ratio = max(_ratio_of(drawing.cities) for drawing in drawings)
    grid = element(
        "div",
        *(_figure(drawing, ratio) for drawing in drawings),
        class_="tours-grid",
        style=f"--tours-columns:{max(1, min(columns, len(drawings)))}",
    )
    return element("div", element("style", Markup(STYLE)), _legend(drawings), grid, class_="tours")


def _figure(drawing: TourDrawing, ratio: float) -> Markup:
    n = len(drawing.tour)
    over = f"{number(drawing.percent_over, 1)}{NBSP}%"
    description = f"{_describe(drawing.by_expert.tolist())} It is {over} longer than the expert's own tour."
    svg = draw_tour(
        drawing.cities,
        drawing.tour,
        drawing.by_expert,
        drawing.optimal,
        title=f"Tour of {n} cities" + (f": {drawing.heading}" if drawing.heading else ""),
        description=description,
        ratio=ratio,
    )
    caption = element(
        "figcaption",
        element("b", drawing.heading) if drawing.heading else "",
        element("span", element("b", over), " over the expert’s tour"),
        element("span", f"expert wrote {drawing.deferred} of {n} cities"),
    )
    return element("figure", svg, _strip(drawing.by_expert.tolist()), caption)


def _strip(authors: Sequence[bool]) -> Markup:
    """Return the sequence as a bar from the first token to the last, coloured by author."""
    return element(
        "svg",
        _spans(authors, by_expert=False),
        _spans(authors, by_expert=True),
        class_="tours-strip",
        viewBox=f"0 0 {len(authors)} 1",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _spans(authors: Sequence[bool], *, by_expert: bool) -> Markup:
    """Return one rectangle per stretch: one per token would leave hairlines."""
    borders = [0, *(place for place, (one, two) in enumerate(pairwise(authors), start=1) if one != two), len(authors)]
    mine = [(start, stop) for start, stop in pairwise(borders) if authors[start] == by_expert]
    path = "".join(f"M{start} 0H{stop}V1H{start}Z" for start, stop in mine)
    part, colour = ("expert", _EXPERT) if by_expert else ("predictor", _PREDICTOR)
    return element("path", d=path, class_=f"tour-{part}-city", fill=colour) if path else Markup()


def _legend(drawings: Sequence[TourDrawing]) -> Markup:
    middle = (9.0, 9.0)
    has_hand_off = any(_hand_offs(drawing.tour.tolist(), drawing.by_expert.tolist()) for drawing in drawings)
    entries = [
        ("the predictor’s part", 28, _line("M1 9L27 9", "predictor", _PREDICTOR, 2.4)),
        ("the expert’s part", 28, _line("M1 9L27 9", "expert", _EXPERT, 2.4, dash=1)),
        ("the expert’s own tour", 28, _line("M5 9L23 9", "road", _ROAD, 9)),
        ("start", 18, join([_dot(middle, False, 3.2), _start(middle, 1)])),
        *([("hand-off", 18, _hand_off(middle, 1))] if has_hand_off else []),
    ]
    items = [element("li", _key(drawing, width), element("span", words)) for words, width, drawing in entries]
    return element("ul", *items, class_="tours-legend")


def _key(drawing: Markup, width: int) -> Markup:
    return element("svg", drawing, viewBox=f"0 0 {width} 18", width=width, height=18, aria_hidden="true")
