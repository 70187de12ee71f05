"""Panels that a task adds to the report, and the check that they only draw and write."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

EXAMPLES_FILE = "examples.html"  # what a task has drawn of a run


@dataclass(frozen=True)
class Panel:
    """A section that a task adds, such as its tours. `html` is inserted as it is: it must come from our own code."""

    title: str
    html: str


def panels_of(folder: Path) -> list[Panel]:
    """Return the drawings in the folder of a run. Skip a file that could do more than show something."""
    path = folder / EXAMPLES_FILE
    html = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [Panel("Examples along the budget", html)] if html and is_harmless(html) else []


def is_harmless(html: str) -> bool:
    """Return whether a fragment only draws, writes and offers sound to play: no scripts, handlers or links, nothing
    fetched, nothing embedded but sound.

    Accept only the markup that `report.markup` writes, because browsers repair other markup, each in its own way.
    Styles are not searched for addresses: the content security policy of the page forbids fetching.
    """
    place, open_tags = 0, list[str]()
    while place < len(html):
        token = _TOKEN.match(html, place)
        if token is None or not _is_allowed(token, open_tags):
            return False
        place = token.end()
    return not open_tags


# Text, a whole style element, sound that is part of the page, a start tag with attributes in double quotes, an end tag.
_TOKEN = re.compile(
    r"[^<]+|(?P<style><style>[^<]*</style>)"
    r'|(?P<sound><audio class="[a-z-]+" controls="" src="data:audio/flac;base64,[A-Za-z0-9+/]+=*"></audio>)'
    r'|<(?P<start>[a-z]+)(?P<attributes>(?: [a-zA-Z0-9-]+="[^"<>]*")*)>'
    r"|</(?P<end>[a-z]+)>"
)
_TEXT_TAGS = re.compile(
    "div|section|p|span|b|i|em|strong|small|mark|code|br|ul|ol|li|dl|dt|dd|table|thead|tbody|tr|th|td|figure|figcaption"
)
_DRAWING_TAGS = re.compile("g|path|circle|rect|line|polyline|polygon|text|tspan|title|desc")
# Not `id` or `data-...`: the script of the page finds its parts by them.
_ATTRIBUTES = re.compile(
    r"class|style|role|aria-[a-z]+|lang|dir|hidden|scope|colspan|rowspan|width|height|viewBox|preserveAspectRatio|xmlns"
    r"|d|points|pathLength|transform|[cdr]?[xy][12]?|r|opacity|visibility|(?:fill|stroke|font|text|letter|word)(?:-[a-z]+)*"
    r"|dominant-baseline|vector-effect|paint-order|shape-rendering"
)


def _is_allowed(token: re.Match[str], open_tags: list[str]) -> bool:
    """Return whether a token is allowed at its place, and update `open_tags`.

    Inside a drawing, browsers parse a style as tags and leave the drawing at a text tag. Outside, they read a title to
    its end as text.
    """
    is_in_drawing = "svg" in open_tags
    start, end = token["start"], token["end"]
    if end:
        return bool(open_tags) and open_tags.pop() == end
    if token["style"] or token["sound"]:
        return not is_in_drawing
    if not start:
        return True
    is_in_place = start == "svg" or (_DRAWING_TAGS if is_in_drawing else _TEXT_TAGS).fullmatch(start)
    names = re.findall(r' ([a-zA-Z0-9-]+)="', token["attributes"])
    is_inside_text = open_tags[-1:] in (["title"], ["desc"])
    if start != "br":
        open_tags.append(start)
    return bool(is_in_place) and not is_inside_text and all(_ATTRIBUTES.fullmatch(name) for name in names)
