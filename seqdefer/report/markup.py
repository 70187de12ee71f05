"""HTML and SVG as nested calls. Every string that is not `Markup` is escaped.

element("p", "loss < ", element("b", name))
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

NBSP = "\u00a0"  # keeps a number and its unit on one line
_VOID = frozenset({"input", "meta", "link", "br"})
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")  # not allowed in XML


class Markup(str):
    """A string that is markup already and is not escaped again."""

    __slots__ = ()


def escape(text: str) -> Markup:
    return text if isinstance(text, Markup) else Markup(html.escape(_UNPRINTABLE.sub("�", text)))


def element(tag: str, *children: str, **attributes: str | float | bool | None) -> Markup:
    """Return an element: `element("td", name, class_="best")`.

    In the names of attributes `_` stands for `-`. Attributes that are None or False are left out.
    """
    kept = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    present = {name: value for name, value in kept.items() if value is not None and value is not False}
    opening = "".join(f' {name}="{escape("" if value is True else str(value))}"' for name, value in present.items())
    inner = "".join(escape(child) for child in children)
    return Markup(f"<{tag}{opening}>" if tag in _VOID else f"<{tag}{opening}>{inner}</{tag}>")


def join(parts: Iterable[str]) -> Markup:
    return Markup("".join(escape(part) for part in parts))


def number(value: float, decimals: int) -> str:
    """Format with fixed decimals, a true minus sign and no minus zero."""
    text = f"{value:.{decimals}f}"
    return text.replace("-", "−") if float(text) else text.lstrip("-")


def section(title: str, *children: str) -> Markup:
    return element("section", element("h2", title), *children)


def scrolling(table: Markup, label: str) -> Markup:
    """Wrap a table in a box that scrolls, so that the page does not; the keyboard can focus and scroll it."""
    return element("div", table, class_="scrolling", tabindex=0, role="region", aria_label=label)


def percent(share: float) -> str:
    return f"{round(100 * share, 2):g}%"


def colour(block: str, shade: int = 0) -> str:
    return f"--c:var(--{block}-{shade})"


def values_table(caption: str, titles: Iterable[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Return a table of values; the first cell of a row is its heading."""
    head = element("tr", *(element("th", title, scope="col") for title in titles))
    body = [
        element("tr", element("th", name, scope="row"), *(element("td", cell) for cell in cells))
        for name, *cells in rows
    ]
    parts = element("caption", caption), element("thead", head), element("tbody", *body)
    return element("table", *parts, class_="values")


def folded_table(summary: str, caption: str, titles: Iterable[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Return a table of values that opens at a click on its summary."""
    return element("details", element("summary", summary), scrolling(values_table(caption, titles, rows), summary))
