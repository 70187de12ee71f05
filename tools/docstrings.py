"""Griffe extension: convert the docstrings of this package to Markdown for the API pages.

- A labelled paragraph of the template of losses ("Formula:   phi(z) = ...") keeps its label and its columns.
- An example (`>>> ...`) becomes a code block; Markdown would read it as a quotation.
- The comment after a field of a class, which gives its shape, becomes its docstring.

Functions and classes are always shown, constants and members of classes only with a docstring: fields of records are in
the signature, and a method without a docstring does what its interface says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

LABEL = re.compile(r"(Formula|Reference|Requires|Inputs|Prefer|Example): *(.*)")
COMMENT = re.compile(r"  # (?!fmt:|noqa|type:)(.+)")
PROMPT = (">>> ", "... ")


class Docstrings(Extension):
    """Rewrites the docstring of every object."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if isinstance(obj, Attribute) and obj.docstring is None:
            obj.docstring = _trailing_comment(obj)
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
        elif obj.is_attribute or (obj.parent is not None and obj.parent.is_class):
            obj.public = False


def _trailing_comment(field: Attribute) -> Docstring | None:
    is_field = field.annotation is not None and field.parent is not None and field.parent.is_class
    found = COMMENT.search(field.lines[-1]) if is_field and field.lines else None
    return Docstring(found[1], parent=field) if found else None


def markdown(text: str) -> str:
    """Return a docstring as Markdown."""
    lines = text.expandtabs().splitlines()
    paragraphs = (list(block) for is_blank, block in groupby(lines, lambda line: not line.strip()) if not is_blank)
    return "\n\n".join(part for paragraph in paragraphs for part in _parts(paragraph))


def _parts(paragraph: list[str]) -> Iterator[str]:
    """Split a paragraph at labels and at the start of an example."""
    part: list[str] = []
    for line in paragraph:
        if part and (LABEL.match(line) or (line.startswith(PROMPT[0]) and not part[0].startswith(PROMPT[0]))):
            yield _render(part)
            part = []
        part.append(line)
    yield _render(part)


def _render(part: list[str]) -> str:
    label = LABEL.match(part[0])
    if label:
        rest = [label[2], *(line.strip() for line in part[1:])] if label[1] != "Inputs" else []
        return f"**{label[1]}:** " + (" ".join(rest) if rest else _fenced("text", _table(part)))
    if part[0].startswith(PROMPT[0]):
        return _fenced("pycon", part)
    if part[0].startswith("    "):
        return _fenced("text", part)
    return "\n".join(part)


def _table(part: list[str]) -> list[str]:
    """Return the columns of a labelled table without the label."""
    return [part[0].replace("Inputs:", "       ", 1), *part[1:]]


def _fenced(language: str, lines: list[str]) -> str:
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join([f"\n\n```{language}", *(line[indent:].rstrip() for line in lines), "```"])
