"""docs/fidelity.md: every item of the paper, its place in the code, its test and a verdict, from tools/fidelity.toml.

Figures of our code are read from the code, and whether hyperparameters are the paper's is found by comparison.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from page_parts import table

from seqdefer.registry import load_task

SOURCE = Path(__file__).with_name("fidelity.toml")
TESTS = Path(__file__).parents[1] / "tests"
VERDICTS = {"faithful": "faithful", "published": "faithful under `published`", "deviates": "**deviates**"}
COLUMNS = {
    "TSP-OneTime": ("tsp", "once"),
    "XSUM-Tokenlevel": ("xsum", "token"),
    "XSUM-OneTime": ("xsum", "once"),
    "MWP-Tokenlevel": ("weather", "token"),
    "MWP-OneTime": ("weather", "once"),
}
FIGURE = re.compile(r"\{(\w+):([\w.-]+)\}")
HEAD = """# Fidelity

Every definition, loss, baseline, oracle, hyperparameter, protocol step and theorem of *Learning to Partially Defer for
Sequences*: where it is in the paper, where it is in the code, the test that pins it, and whether it is the same.

- **faithful**: as in the paper, or our choice where the paper is silent; the remark says which.
- **faithful under `published`**: by `--recipe published`. The default recipe, `ours`, differs as described;
  [Recipes](recipes.md) has all of its settings.
- **deviates**: differs in both recipes, or what the paper prints is wrong ([errata](theory.md#errata)). *Newly found*
  marks what was on no list before this page was made.

Equations, tables and statements are numbered as in the paper, and appendices are A to H. Tests are in `tests/`. This
page is generated from `tools/fidelity.toml`; figures of the code are read from the code.
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One item of the paper. Texts may hold figures of the code, such as {tsp:presets.paper.train}."""

    item: str
    paper: str
    code: tuple[str, ...]
    tests: tuple[str, ...]
    verdict: str
    note: str = ""
    ours: str = ""
    found: bool = False
    untested: str = ""

    @property
    def judgement(self) -> str:
        """The last cell: verdict, remark, what our recipe does."""
        text = VERDICTS[self.verdict]
        if self.note:
            text += f": {self.note}"
        if self.ours:
            text += f". *Ours*: {self.ours}"
        return f"{text}. *Newly found*" if self.found else text


@dataclass(frozen=True)
class Section:
    """A table of the page."""

    title: str
    rows: tuple[Row, ...]


def read_sections(content: str | None = None) -> list[Section]:
    """Return the tables of the page, hyperparameters first within theirs."""
    written = tomllib.loads(SOURCE.read_text(encoding="utf-8") if content is None else content)
    return [
        Section(
            section["title"],
            (
                *(hyperparameter_row(**one) for one in section.get("hyperparameter", ())),
                *(_row(one) for one in section.get("row", ())),
            ),
        )
        for section in written["section"]
    ]


def _row(written: dict[str, Any]) -> Row:
    return Row(**{name: tuple(value) if isinstance(value, list) else value for name, value in written.items()})


def hyperparameter_row(item: str, field: str, paper: list[Any]) -> Row:
    """Return the row of a hyperparameter. The verdict is that of comparing the published recipes with the paper."""
    published, ours = ([_setting(name, column, field) for column in COLUMNS.values()] for name in ("published", "ours"))
    is_same = published == paper
    printed = ", ".join(map(_number, paper))
    differing = [
        f"{column} {_number(value)}"
        for column, value, other in zip(COLUMNS, ours, published, strict=True)
        if value != other
    ]
    return Row(
        item=f"{item} (`{field}`): {printed}",
        paper="D, table 2, TSP-OneTime to MWP-OneTime",
        code=("seqdefer.hyperparameters.Settings",),
        tests=("test_hyperparameters.py::test_published_recipes_hold_the_papers_table",),
        verdict=("published" if differing else "faithful") if is_same else "deviates",
        note="" if is_same else f"the published recipe has {', '.join(map(_number, published))}",
        ours=", ".join(differing),
    )


def _setting(recipe: str, column: tuple[str, str], field: str) -> Any:
    task, part = column
    return getattr(getattr(load_task(task).recipes[recipe], part), field)


# -- figures of the code -------------------------------------------------------------------------------------------


def fill(text: str) -> str:
    """Replace {task:path}, {code:name} and {default:function.argument} by what the code has."""
    return FIGURE.sub(lambda match: _number(figure(match[1], match[2])), text)


def figure(kind: str, name: str) -> Any:
    """Return a figure of the code: a constant, the default of an argument, or a part of a task's entry."""
    if kind == "code":
        return resolve(name)
    if kind == "default":
        function, _, argument = name.rpartition(".")
        return inspect.signature(resolve(function)).parameters[argument].default
    first, *path = name.split(".")
    entry = load_task(kind)
    value: Any = entry.recipes[first] if first in entry.recipes else getattr(entry, first)
    for part in path:
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def _number(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_number, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -- references ----------------------------------------------------------------------------------------------------


def resolve(name: str) -> Any:
    """Return what a dotted name stands for: a module, or something in one."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        outer, _, last = name.rpartition(".")
        if not outer:
            raise
        return getattr(resolve(outer), last)


@cache
def tests_in(path: Path) -> frozenset[str]:
    """Return the names of the test functions in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(one.name for one in tree.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_"))


def find_problems(sections: Iterable[Section]) -> Iterator[str]:
    """Yield what is wrong with rows: references to nothing, and verdicts without what they need."""
    for row in (row for section in sections for row in section.rows):
        yield from (f"{row.item}: {problem}" for problem in _problems_of(row))


def _problems_of(row: Row) -> Iterator[str]:
    for name in row.code:
        try:
            resolve(name)
        except (AttributeError, ImportError):
            yield f"no code {name}"
    for reference in row.tests:
        file, _, function = reference.partition("::")
        if not (TESTS / file).is_file() or function not in tests_in(TESTS / file):
            yield f"no test {reference}"
    for text in (row.item, row.note, row.ours, row.untested):
        for kind, name in FIGURE.findall(text):
            try:
                figure(kind, name)
            except Exception as error:  # whatever is wrong with it
                yield f"no figure {kind}:{name} ({error!r})"
    if row.verdict not in VERDICTS:
        yield f"no verdict {row.verdict}"
    if row.verdict == "deviates" and not row.note:
        yield "a deviation without a reason"
    if row.verdict == "published" and not row.ours:
        yield "the default recipe's difference is missing"
    if not row.tests and not row.untested:
        yield "neither a test nor a reason why there is none"


# -- the page ------------------------------------------------------------------------------------------------------


def fidelity_page() -> str:
    """Return the page."""
    sections = read_sections()
    return "\n".join([HEAD, _count(sections), "", *(_table(section) for section in sections)])


def _count(sections: list[Section]) -> str:
    rows = [row for section in sections for row in section.rows]
    counts = Counter(row.verdict for row in rows)
    words = ", ".join(f"{counts[name]} {text.replace('*', '')}" for name, text in VERDICTS.items())
    return f"{len(rows)} items: {words}."


def _table(section: Section) -> str:
    rows = []
    for row in section.rows:
        code = " ".join(f"`{name}`" for name in row.code) or "–"
        tests = " ".join(f"`{reference}`" for reference in row.tests) or row.untested
        rows.append([fill(cell) for cell in (row.item, row.paper, code, tests, row.judgement)])
    head = ("item", "in the paper", "in the code", "test", "verdict")
    return f"## {section.title}\n\n{table(head, rows)}"
