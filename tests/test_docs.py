"""The code in the documentation runs, and does what the text says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from seqdefer.cli import main
from seqdefer.evaluation.results import Results, load_results
from seqdefer.interfaces import TaskEntry

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?P<mark><!-- no-test -->\s*)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    code: str
    line: int  # in the page, of its first line


def python_blocks(page: Path) -> list[Block]:
    """Return the Python blocks of a page, except those right after the comment `<!-- no-test -->`."""
    text = page.read_text(encoding="utf-8")
    found = [match for match in BLOCK.finditer(text) if not match["mark"]]
    return [Block(match["code"], text.count("\n", 0, match.start("code"))) for match in found]


def run_blocks(page: Path) -> dict[str, Any]:
    """Run the blocks in order, in one namespace. Tracebacks show the lines of the page."""
    names: dict[str, Any] = {"__name__": page.stem.replace("-", "_")}
    for block in python_blocks(page):
        exec(compile("\n" * block.line + block.code, page, "exec", dont_inherit=True), names)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Path]:
    """A temporary current folder: examples write to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("docs"))
        yield Path.cwd()


def test_blocks_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "a\n```python\nx = 1\n```\n<!-- no-test -->\n```python\nx = 2\n```\n```sh\nx\n```\n\n```python\ny = x\n```\n"
    )
    assert python_blocks(page) == [Block("x = 1\n", 2), Block("y = x\n", 13)]
    assert run_blocks(page)["y"] == 1


def test_error_shows_the_line_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as raised:
        run_blocks(page)
    assert raised.traceback[-1].lineno + 1 == 5


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ENTRY_POINT_GROUPS = {"seqdefer.experts", "seqdefer.networks", "seqdefer.tsp.predictors"}


def resolve(name: str) -> Any:
    """Import the module of a dotted name, and get the rest of the name from it."""
    module, _, rest = name.rpartition(".")
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return getattr(resolve(module), rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_the_text_exist(page: Path) -> None:
    names = set(re.findall(r"`(seqdefer(?:\.\w+)+)", page.read_text(encoding="utf-8"))) - ENTRY_POINT_GROUPS
    for name in sorted(names):
        resolve(name)


@pytest.fixture(scope="module")
def tutorial(folder: Path) -> dict[str, Any]:
    """The names that the tutorial defines; it has called `check_task`."""
    return run_blocks(ROOT / "docs" / "writing-a-task.md")


def test_tutorial_is_short() -> None:
    code = "".join(block.code for block in python_blocks(ROOT / "docs" / "writing-a-task.md"))
    code = re.sub(r'WORDS = """.*?"""', "", code, flags=re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) < 100


@pytest.mark.slow
def test_tutorial_learns(tutorial: dict[str, Any], folder: Path) -> None:
    """The margins are wide: another seed, machine or version of PyTorch changes the numbers, not the outcome."""
    results: Results = tutorial["results"]
    improvement = {name: method.improvement_mean for name, method in results.summary.items()}
    assert improvement["TokenwiseModel"] > 25
    assert improvement["OneTimeModel"] > 5
    others = [value for name, value in improvement.items() if name != "OptimalFree"]  # whose expert costs nothing
    assert improvement["OptimalToken"] >= max(others) - 1e-6
    assert (folder / "runs/speller/report.html").stat().st_size > 10_000
    assert {path.name for path in (folder / "runs/speller/rejectors").iterdir()} == {
        "OneTimeModel-seed0",
        "TokenwiseModel-seed0",
        "WholeModelEmbed-seed0",
        "OneTimeCost-seed0",
    }


@pytest.mark.slow
def test_tutorial_entry(tutorial: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line finds the task and its options, as if it were installed."""
    entry: TaskEntry = tutorial["ENTRY"]
    monkeypatch.setattr("seqdefer.registry.load_task", {"speller": entry}.__getitem__)
    options = ["--words", "60", "--slips", "0.2", "--seeds", "1", "--instances", "50", "--quiet"]
    assert main(["run", "speller", *options, "--out", str(tmp_path)]) == 0
    results = load_results(tmp_path)
    assert results.task == "speller"
    assert results.provenance.settings["task"] == {"words": 60, "slips": 0.2}
