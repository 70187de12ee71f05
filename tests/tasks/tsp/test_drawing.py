"""Drawings of tours: authors of edges, valid markup, escaping, and layout in a real browser."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from browsers import chromium
from hypothesis import given, settings
from hypothesis import strategies as st

from seqdefer.errors import ContractError
from seqdefer.report.markup import Markup, element
from seqdefer.tasks.tsp.data import gaussian_instances
from seqdefer.tasks.tsp.drawing import STYLE, WIDTH, TourDrawing, draw_gallery, draw_tour

pytestmark = pytest.mark.usefixtures("one_thread")

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert(1)</script>\"'&</title></style>\x00\ud800"
Edge = frozenset[tuple[float, float]]


def a_drawing(n: int = 12, kept: int = 7, **changes: Any) -> TourDrawing:
    cities = gaussian_instances(1, n, seed=0)[0]
    tour = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    by_expert = torch.arange(n) >= kept
    return replace(TourDrawing(cities, tour, by_expert, torch.arange(n), 3.42, 0.2, "instance 1"), **changes)


def draw(drawing: TourDrawing, **words: str) -> ElementTree.Element:
    return ElementTree.fromstring(
        draw_tour(drawing.cities, drawing.tour, drawing.by_expert, drawing.optimal, ratio=1.0, **words)
    )


def shapes(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [shape for shape in svg.iter() if shape.get("class") == name]


def edges(svg: ElementTree.Element, name: str) -> Counter[Edge]:
    """Return the edges of a line, each as its two ends."""
    found: Counter[Edge] = Counter()
    for shape in shapes(svg, name):
        first = last = (0.0, 0.0)
        for command, numbers in re.findall(r"([MLZ])([^MLZ]*)", shape.get("d", "")):
            point = tuple(float(number) for number in numbers.split()) if command != "Z" else first
            assert len(point) == 2
            if command == "M":
                first = point
            else:
                found[frozenset((last, point))] += 1
            last = point
    return found


def places(svg: ElementTree.Element, n: int) -> dict[int, tuple[float, float]]:
    """Return the place of each city, read off the expert's own tour, which visits them in order."""
    (road,) = shapes(svg, "tour-road")
    points = [tuple(map(float, pair.split())) for pair in road.get("d", "").strip("MZ").split("L")]
    return {city: (point[0], point[1]) for city, point in zip(range(n), points, strict=True)}


@settings(max_examples=40)
@given(authors=st.lists(st.booleans(), min_size=4, max_size=12))
def test_an_edge_belongs_to_the_author_of_its_end(authors: list[bool]) -> None:
    n = len(authors)
    drawing = a_drawing(n, by_expert=torch.tensor(authors))
    svg, tour = draw(drawing), drawing.tour.tolist()
    at = places(svg, n)
    wanted: dict[bool, Counter[Edge]] = {False: Counter(), True: Counter()}
    for position in range(1, n + 1):
        writer = authors[position] if position < n else authors[-1]
        wanted[writer][frozenset((at[tour[position - 1]], at[tour[position % n]]))] += 1
    assert edges(svg, "tour-predictor") == wanted[False]
    assert edges(svg, "tour-expert") == wanted[True]
    assert sum(edges(svg, "tour-road").values()) == n
    assert len(shapes(svg, "tour-expert-city")) == sum(authors)
    assert len(shapes(svg, "tour-predictor-city")) == n - sum(authors)
    changes = sum(one != two for one, two in pairwise(authors))
    assert len(shapes(svg, "tour-hand-off")) == changes


def test_start_and_hand_off_are_marked() -> None:
    drawing = a_drawing(12, kept=7)
    svg = draw(drawing)
    at = places(svg, 12)
    (start,) = shapes(svg, "tour-start")
    assert (float(start.get("cx", "")), float(start.get("cy", ""))) == at[int(drawing.tour[0])]
    (mark,) = shapes(svg, "tour-hand-off")
    corners = [tuple(map(float, pair.split())) for pair in mark.get("d", "").strip("MZ").split("L")]
    x, y = (sum(values) / 4 for values in zip(*corners, strict=True))
    assert (x, y) == pytest.approx(at[int(drawing.tour[6])], abs=0.1)


def test_authors_differ_without_colour() -> None:
    svg = draw(a_drawing())
    dashes = [shapes(svg, name)[0].get("stroke-dasharray") for name in ("tour-predictor", "tour-expert")]
    assert dashes[0] is None
    assert dashes[1] is not None


def test_north_is_up_and_the_shape_is_kept() -> None:
    cities = torch.tensor([[0.0, 0.0], [2.0, 0.0], [2.0, 1.0], [0.0, 1.0]])
    drawing = a_drawing(4, cities=cities)
    at = places(draw(drawing), 4)
    assert at[3][1] < at[0][1]
    assert at[1][0] - at[0][0] == pytest.approx(2 * (at[0][1] - at[3][1]))
    alone = ElementTree.fromstring(draw_tour(cities, drawing.tour, drawing.by_expert, drawing.optimal))
    assert alone.get("viewBox") == "0 0 300 150"


@pytest.mark.parametrize(
    "cities",
    [
        torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [5.0, 0.0]]),  # on a line
        torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 4.0], [0.0, 9.0]]),
        torch.ones(4, 2),
        torch.tensor([[0.0, 0.0], [1e99, 1e99], [1e-99, 1.0], [0.0, 9.0]], dtype=torch.float64),
        gaussian_instances(1, 1000, seed=0)[0],
    ],
)
def test_every_city_is_on_the_canvas(cities: torch.Tensor) -> None:
    n = len(cities)
    drawing = a_drawing(n, cities=cities)
    points = places(draw(drawing), n).values()
    assert all(0 <= x <= WIDTH and 0 <= y <= WIDTH for x, y in points)
    width, height = map(float, str(ElementTree.fromstring(_alone(drawing)).get("viewBox")).split()[2:])
    assert 0.5 <= height / width <= 1.25


def _alone(drawing: TourDrawing) -> str:
    return draw_tour(drawing.cities, drawing.tour, drawing.by_expert, drawing.optimal)


@pytest.mark.parametrize(
    ("by_expert", "words"),
    [
        ([False] * 4, "The predictor wrote the whole tour."),
        ([True] * 4, "The expert wrote the whole tour."),
        ([False, False, False, True], "The predictor wrote the first 3 cities, the expert the other 1."),
        ([False, True, False, True], "The expert wrote 2 of the 4 cities."),
    ],
)
def test_titles_for_screen_readers(by_expert: list[bool], words: str) -> None:
    svg = draw(a_drawing(4, by_expert=torch.tensor(by_expert)))
    assert svg.get("role") == "img"
    assert [svg.findtext(f"{SVG}{tag}") for tag in ("title", "desc")] == ["Tour of 4 cities", words]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cities": torch.zeros(12, 3)}, r"cities have the shape \(12, 3\)"),
        ({"by_expert": torch.zeros(11, dtype=torch.bool)}, r"by_expert has the shape \(11,\); 12 cities need \(12,\)"),
        ({"tour": torch.zeros(12, dtype=torch.int64)}, "tour does not visit every one of the 12 cities once"),
        ({"optimal": torch.arange(11)}, "optimal does not visit"),
    ],
)
def test_bad_input(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        draw(a_drawing(12, **changes))


# --- the gallery -----------------------------------------------------------------------------------------------------


def test_captions() -> None:
    page = draw_gallery([a_drawing(), a_drawing(kept=12, budget=None, title="", percent_over=-0.0)])
    figures = ElementTree.fromstring(page).findall(".//figure")
    captions = [" ".join("".join(figure.find("figcaption").itertext()).split()) for figure in figures]  # type: ignore[union-attr]
    assert captions == [
        "Instance 1, budget 20 %3.4 % over the expert’s tourexpert wrote 5 of 12 cities",
        "0.0 % over the expert’s tourexpert wrote 0 of 12 cities",
    ]
    assert figures[0].findtext(f"{SVG}svg/{SVG}desc") == (
        "The predictor wrote the first 7 cities, the expert the other 5. It is 3.4\u00a0% longer than the expert's own"
        " tour."
    )


def test_the_legend_names_what_is_drawn() -> None:
    def names(*drawings: TourDrawing) -> list[str | None]:
        return [item.findtext("span") for item in ElementTree.fromstring(draw_gallery(drawings)).iter("li")]

    always = ["the predictor’s part", "the expert’s part", "the expert’s own tour", "start"]
    assert names(a_drawing(kept=0)) == always
    assert names(a_drawing(kept=0), a_drawing()) == [*always, "hand-off"]


def test_the_strip_shows_every_position_once() -> None:
    page = ElementTree.fromstring(draw_gallery([a_drawing(by_expert=torch.tensor([False, True] * 3 + [True] * 6))]))
    (strip,) = shapes(page, "tours-strip")
    spans = [
        (int(start), int(stop), path.get("class") == "tour-expert-city")
        for path in strip
        for start, stop in re.findall(r"M(\d+) 0H(\d+)", path.get("d", ""))
    ]
    assert sorted(spans) == [
        (0, 1, False),
        (1, 2, True),
        (2, 3, False),
        (3, 4, True),
        (4, 5, False),
        (5, 12, True),
    ]


def test_no_drawings_no_gallery() -> None:
    assert draw_gallery([]) == ""


def test_words_are_escaped_and_nothing_is_fetched() -> None:
    page = draw_gallery([a_drawing(title=HOSTILE)]) + draw(a_drawing(), title=HOSTILE, description=HOSTILE).tag
    assert "<script" not in page
    assert "\x00" not in page
    assert not re.search(r"url\(|href|@import|src=", page)
    assert "<" not in STYLE
    svg = draw(a_drawing(), title=HOSTILE, description=HOSTILE)
    assert svg.findtext(f"{SVG}title", "").startswith("<script>alert(1)</script>")


# --- in a browser ----------------------------------------------------------------------------------------------------

PAGE_STYLE = ":root{--paper:#fff;--rule:#dfe4ea;--once-0:#123456} body{margin:0;background:var(--paper)}"
COLUMNS = "return getComputedStyle(document.querySelector('.tours-grid')).gridTemplateColumns.split(' ').length"
COLOUR = "return getComputedStyle(document.querySelector('.tour .tour-%s')).stroke"


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Any]:
    with chromium(tmp_path / "profile") as opened:
        yield opened


@pytest.mark.browser
def test_the_gallery_fits_desk_tablet_and_phone(driver: Any, tmp_path: Path) -> None:
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("style", Markup(PAGE_STYLE)),
    ]
    gallery = draw_gallery([a_drawing(50, kept, title=HOSTILE) for kept in (50, 40, 20, 0)])
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html>{element('html', element('head', *head), element('body', gallery))}")
    for width, columns in {1280: 4, 800: 2, 390: 1}.items():
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(path.as_uri())
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        assert driver.execute_script(COLUMNS) == columns
    assert driver.execute_script(COLOUR % "expert") == "rgb(18, 52, 86)"  # the page's own
    assert driver.execute_script(COLOUR % "predictor") == "rgb(0, 98, 189)"  # the page has none
    assert [entry for entry in driver.get_log("browser") if entry["level"] != "INFO"] == []
