"""HTML and SVG as nested calls: what is not marked as markup is escaped, so forgetting to escape is impossible.

element("p", "loss < ", element("b", name))
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

NBSP = "\u00a0"  # keeps a number and its sign on one line
_VOID = frozenset({"input", "meta", "link", "br"})
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")  # no XML can hold these


class Markup(str):
    """Text that is markup already. Every other string is escaped, so that no name or note can write into a page."""

    __slots__ = ()


def escape(text: str) -> Markup:
    return text if isinstance(text, Markup) else Markup(html.escape(_UNPRINTABLE.sub("�", text)))


def element(tag: str, *children: str, **attributes: str | float | bool | None) -> Markup:
    """`element("td", name, class_="best")`; in an attribute's name `_` reads `-`; None and False leave it out."""
    kept = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    present = {name: value for name, value in kept.items() if value is not None and value is not False}
    opening = "".join(f' {name}="{escape("" if value is True else str(value))}"' for name, value in present.items())
    inner = "".join(escape(child) for child in children)
    return Markup(f"<{tag}{opening}>" if tag in _VOID else f"<{tag}{opening}>{inner}</{tag}>")


def join(parts: Iterable[str]) -> Markup:
    return Markup("".join(escape(part) for part in parts))


def number(value: float, decimals: int) -> str:
    """Fixed decimals, with a true minus sign, and no minus zero."""
    text = f"{value:.{decimals}f}"
    return text.replace("-", "−") if float(text) else text.lstrip("-")
