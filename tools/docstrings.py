"""What the API pages make of docstrings: Markdown, from the forms that this package uses.

- A labelled paragraph of the template of losses ("Formula:   phi(z) = ...") keeps its label and its columns.
- An example (`>>> ...`) becomes a block of code. Markdown would quote it three times.
- The comment behind a field of a class, where shapes stand, becomes its docstring.

Functions and classes are shown in any case, constants and members of classes only with a docstring: those of records
stand in the signature, and a method that says nothing does what the interface says.
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
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if isinstance(obj, Attribute) and obj.docstring is None:
            obj.docstring = _comment_behind(obj)
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
        elif obj.is_attribute or (obj.parent is not None and obj.parent.is_class):
            obj.public = False


def _comment_behind(field: Attribute) -> Docstring | None:
    is_field = field.annotation is not None and field.parent is not None and field.parent.is_class
    found = COMMENT.search(field.lines[-1]) if is_field and field.lines else None
    return Docstring(found[1], parent=field) if found else None


def markdown(text: str) -> str:
    """The docstring as Markdown, one paragraph or block after the other."""
    lines = text.expandtabs().splitlines()
    paragraphs = (list(block) for is_blank, block in groupby(lines, lambda line: not line.strip()) if not is_blank)
    return "\n\n".join(part for paragraph in paragraphs for part in _parts(paragraph))


def _parts(paragraph: list[str]) -> Iterator[str]:
    """A paragraph, cut at labels and where an example begins."""
    part: list[str] = []
    for line in paragraph:
        if part and (LABEL.match(line) or (line.startswith(PROMPT[0]) and not part[0].startswith(PROMPT[0]))):
            yield _shown(part)
            part = []
        part.append(line)
    yield _shown(part)


def _shown(part: list[str]) -> str:
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
    """The columns of a labelled table, moved to the left."""
    return [part[0].replace("Inputs:", "       ", 1), *part[1:]]


def _fenced(language: str, lines: list[str]) -> str:
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join([f"\n\n```{language}", *(line[indent:].rstrip() for line in lines), "```"])
