"""The code in the documentation runs, and does what the text says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from doc_pages import DOCS, PAGES, ROOT, Block, blocks_of, page_name, python_blocks, run_blocks, write_speller

from seqdefer.cli import main
from seqdefer.evaluation.results import Results, load_results
from seqdefer.interfaces import Task, TaskEntry
from seqdefer.testing import check_task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Path]:
    """A temporary current folder: examples write to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("docs"))
        yield Path.cwd()


def test_blocks_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "a\n```python\nx = 1\n```\n<!-- no-test: it is slow -->\n```python\nx = 2\n```\n```sh\nx\n```\n\n"
        "```python\ny = x\n```\n"
        "<!-- no-test below: they are old -->\n## More\n```sh\nz\n```\n"
    )
    assert blocks_of(page) == [
        Block("python", "x = 1\n", 2),
        Block("python", "x = 2\n", 6, "it is slow"),
        Block("sh", "x\n", 9),
        Block("python", "y = x\n", 13),
        Block("sh", "z\n", 18, "they are old"),
    ]
    assert run_blocks(page)["y"] == 1


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_code_that_is_not_run_has_a_reason(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    without = [line for line in text.splitlines() if "<!-- no-test" in line and not REASON.fullmatch(line)]
    assert not without, "write: <!-- no-test: REASON -->, in a few words"
    marks = [block for block in blocks_of(page) if not block.is_run]
    assert len(marks) >= text.count("<!-- no-test"), "a mark stands right before the block that it is about"


def test_error_shows_the_line_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as raised:
        run_blocks(page)
    assert raised.traceback[-1].lineno + 1 == 5


REASON = re.compile(r"<!-- no-test(?: below)?: \S+(?: \S+)+ -->")
ENTRY_POINT_GROUPS = {"seqdefer.experts", "seqdefer.networks", "seqdefer.tsp.predictors"}


def resolve(name: str) -> Any:
    """Import the module of a dotted name, and get the rest of the name from it."""
    module, _, rest = name.rpartition(".")
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return getattr(resolve(module), rest)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_names_in_the_text_exist(page: Path) -> None:
    names = set(re.findall(r"`(seqdefer(?:\.\w+)+)", page.read_text(encoding="utf-8"))) - ENTRY_POINT_GROUPS
    for name in sorted(names):
        resolve(name)


@pytest.fixture(scope="module")
def tutorial(folder: Path) -> dict[str, Any]:
    """The names that the tutorial defines; it has called `check_task`."""
    return run_blocks(DOCS / "writing-a-task.md")


def test_tutorial_is_short() -> None:
    code = "".join(block.code for block in python_blocks(DOCS / "writing-a-task.md"))
    code = re.sub(r'WORDS = """.*?"""', "", code, flags=re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) < 125


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
def test_tutorial_expert_that_completes(tutorial: dict[str, Any]) -> None:
    task: Task = tutorial["Speller"](tutorial["SpellerOptions"]())
    task.expert = tutorial["Corrector"](tutorial["Lexicon"](0.3))
    check_task(task)


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


@pytest.mark.slow
def test_tutorial_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fitted model of the file writes words for users' own inputs, and refuses what is not a word."""
    write_speller(tmp_path / "speller.py")
    folder = str(tmp_path / "model")
    assert main(["fit", str(tmp_path / "speller.py"), "--words", "120", "--out", folder, "--quiet"]) == 0
    capsys.readouterr()
    assert main(["generate", folder, "iwlsnr", "cqndle", "--budget", "1", "--json"]) == 0
    written = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["output"] for one in written] == ["island", "candle"]
    assert main(["generate", folder, "two words"]) == 2
    assert "is not a word of 1 to 8 letters" in capsys.readouterr().err


# -- figures -------------------------------------------------------------------------------------------------------

FIGURE = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*[A-Za-z])")
NO_FIGURE = re.compile(r"`[^`]*`|Python 3\.\d+|\bbudgets? (?:of )?0\.\d+|\bone of 0\.\d+")


def claims_of(text: str) -> Iterator[str]:
    """Yield rows of tables, items of lists and paragraphs, without code and headings."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for part in re.split(r"\n\n+|\n(?=[|>#-])|(?<=\|)\n", text):
        if not part.startswith("#"):
            yield part


def unsourced(page: Path) -> list[str]:
    """Return figures of a page that are on none of the pages that their row, item or paragraph links to."""
    found = []
    for claim in claims_of(page.read_text(encoding="utf-8")):
        figures = FIGURE.findall(NO_FIGURE.sub("", re.sub(r"\]\([^)]*\)", "]", claim)))
        links = {link.partition("#")[0] for link in re.findall(r"\]\(([^):]+\.md[^)]*)\)", claim)}
        sources = "\n".join((page.parent / link).read_text(encoding="utf-8") for link in links)
        known = set(re.findall(r"(?<![\d.])\d+\.\d+", sources))
        found += [f"{figure} in: {claim.strip()[:80]}" for figure in figures if figure not in known]
    return found


@pytest.mark.parametrize("page", [DOCS / "which-to-use.md", DOCS / "faq.md"], ids=page_name)
def test_figures_are_on_the_pages_that_are_linked(page: Path) -> None:
    """Pages that repeat figures of others name the others, and change with them."""
    assert not unsourced(page)


def test_figures_of_the_readmes_first_screen_are_on_the_pages_that_are_linked(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    quote = "\n".join(line.removeprefix("> ") for line in text.splitlines() if line.startswith(">"))
    assert "Time" in quote
    page = tmp_path / "quote.md"
    page.write_text(quote.replace("docs/", f"{DOCS}/"))
    assert not unsourced(page)


def test_a_figure_without_a_source_is_found(tmp_path: Path) -> None:
    (tmp_path / "source.md").write_text("It took 1.25 s, or 2.50 s.")
    page = tmp_path / "page.md"
    page.write_text(
        "Qwen2.5 0.5B at a budget of 0.2 takes 1.25 s ([here](source.md)).\n\n| a | [b](source.md) | 1.25 (2.50) |\n"
        "| a | b | 1.25 |\n- 1.2 s ([here](source.md#it))\n"
    )
    assert [one[:4] for one in unsourced(page)] == ["1.25", "1.2 "]


# -- answers of the FAQ --------------------------------------------------------------------------------------------


def test_numbers_of_the_faq_are_those_of_the_code() -> None:
    from seqdefer.registry import load_task
    from seqdefer.tasks.text.options import RANGES
    from seqdefer.tasks.text.task import LENGTH_SHARE, MAX_LENGTH

    text = " ".join((DOCS / "faq.md").read_text(encoding="utf-8").split())
    quick, paper = (load_task("text").presets[name] for name in ("quick", "paper"))
    assert (
        f"`fit` takes {quick.train_documents} texts to learn from and {quick.validation_documents} to measure with by "
        f"default, `--preset paper` up to {paper.train_documents:,} and {paper.validation_documents}" in text
    )
    assert f"as long as {LENGTH_SHARE:.0%}".replace("%", " %") in text
    assert f"{MAX_LENGTH} tokens at most; `length=` (`--length`) takes up to {RANGES['length'][1]:,}" in text


def test_a_function_that_asks_somebody_is_an_expert() -> None:
    """The FAQ: the expert may be a person; whole and one-time deferral need nothing else."""
    from seqdefer.testing import FunctionExpert, ToyTask, check_expert

    task = ToyTask(n=4)
    asked: list[Any] = []

    def ask(given: Any, written: list[int]) -> list[int]:
        asked.append(given)
        return [*written, *[1] * (task.spec.length - len(written))]

    check_expert(FunctionExpert(ask), task.split("test"), task.spec)
    assert asked


def test_readmes_first_numbers_are_those_of_their_pages() -> None:
    speed = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    large, t5 = speed.split("## With a T5 pair")[0].split("## On a CPU")[0], speed.split("## With a T5 pair")[1]
    on_cpu, on_gpu = t5.split("On a GPU:")[:2]
    at_20 = [part.split("| at once |")[1].splitlines()[2:5] for part in (on_cpu, on_gpu, large)]
    found = [[row.split(" | ")[3] for row in rows] for rows in at_20]
    head = " ".join(
        (ROOT / "README.md").read_text(encoding="utf-8").split("## Install")[0].replace("\n> ", " ").split()
    )
    assert f"it runs {found[0][0]} times as fast as its expert alone on two CPU cores" in head
    assert f"and {found[1][0]} times on a GPU" in head
    assert f"[{found[2][0]} times as fast](docs/speed.md) as the 7B alone, {found[2][1]} times with 8" in head
    assert f"and {found[2][2]} times with 32" in head
    text = (ROOT / "docs" / "text.md").read_text(encoding="utf-8")
    assert "3 give 73.1 (65 % of the way)" in text
    assert "(56 % of the way)" in text
