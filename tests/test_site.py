"""The documentation site: generated files are up to date, links work, and built pages load nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from doc_pages import DOCS, OWN_TESTS, ROOT, goes_with_commands, python_blocks, run_blocks

import seqdefer
from seqdefer import registry
from seqdefer.paper.claims import WHOLE
from seqdefer.paper.records import load_study

PAGES = sorted({*DOCS.rglob("*.md")} - {*DOCS.glob("results/*")})  # data, not pages
DRAWINGS = ("coverage", "drift", "granularities", "curve", "decision-tree", "writing")
PAGES_MADE = (
    "benchmarks.md",
    "commands.md",
    "drift.md",
    "fidelity.md",
    "guarantees.md",
    "recipes.md",
    "results.md",
    "service.md",
    "settings.md",
    "speech-results.md",
    "speed.md",
    "tsp-as-published.md",
)
GENERATED = [*PAGES_MADE, *(f"images/{name}.svg" for name in DRAWINGS)]
ADDED = {"changelog.md", "contributing.md"}  # by tools/hooks.py
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)")
# What a browser loads by itself, in contrast to links.
REMOTE = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?(?:https?:)?//"
    r"|<link\b[^>]*\bhref=[\"']?(?:https?:)?//|(?:url\(|@import )[\"']?(?:https?:)?//"
)


def page_name(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


# -- without MkDocs ------------------------------------------------------------------------------------------------


def test_every_task_has_its_recipes_on_the_page() -> None:
    own = {point.name for point in import_module("generate")._own_entry_points("seqdefer.tasks")}
    assert set(import_module("recipes_page").TASKS) == own - {"text"}  # text has those of xsum


def test_every_generated_file_is_tested() -> None:
    assert sorted(import_module("generate").GENERATED) == sorted(GENERATED)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_file_is_up_to_date(name: str) -> None:
    if name == "commands.md" and sys.version_info[:2] != (3, 11):
        pytest.skip("argparse wraps help differently in each Python version; the page is made with 3.11")
    made = import_module("generate").GENERATED[name]()
    assert (DOCS / name).read_text(encoding="utf-8") == made, "stale; run: python tools/generate.py"


@pytest.mark.parametrize(("page", "task"), [("weather", "weather"), ("tsp", "tsp"), ("text", "xsum")])
def test_results_on_the_pages_of_tasks_are_those_of_the_study(page: str, task: str) -> None:
    """The first two columns of a table of methods, and the first of differences, are from docs/results."""
    study = load_study(DOCS / "results" / "ours" / "table1.json")
    expected = {
        row.method: f"{row.improvement_mean:.2f} ({row.improvement_std:.2f})" for row in study.rows if row.task == task
    }
    for one in study.contrasts:
        if one.task == task:
            expected[f"{one.first} over {one.second}"] = f"{one.difference:.2f} [{one.low:.2f}, {one.high:.2f}]"
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    n_checked = 0
    for line in re.findall(r"^\| (?=\**[A-Z][\w.]+\** )(.+) \|$", text, re.MULTILINE):
        name, *cells = (cell.strip(" *") for cell in line.split("|"))
        name = re.sub(r" \(.*|,.*", "", name).strip("*")
        if name in expected and len(cells) > (1 if " over " in name else 3):
            assert cells[0 if " over " in name else 1] == expected[name], name
            n_checked += 1
    assert n_checked > 15


@pytest.mark.parametrize("recipe", ["published", "ours"])
def test_results_in_the_readme_are_those_of_the_studies(recipe: str) -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").split("| | recipe |")[1].splitlines()[2:8]
    shown = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    rows = [cells[2:6] for cells in shown if cells[1] == {"published": "as published", "ours": "ours"}[recipe]]
    measured = load_study(DOCS / "results" / recipe / "table1.json").rows
    for task, (token, once, cost, whole) in zip(("weather", "tsp", "xsum"), rows, strict=True):
        found = {row.method: row for row in measured if row.task == task}
        best = max((found[name] for name in WHOLE), key=lambda row: row.improvement_mean)
        named = {name: found.get(name) for name in ("TokenwiseModel", "OneTimeModel", "OneTimeCost")}
        expected = [
            row and f"{row.improvement_mean:.2f} ({row.improvement_std:.2f})" for row in (*named.values(), best)
        ]
        assert [token or None, once or None, cost or None, whole] == expected


def test_commands_page_ignores_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed plug-in must not change a tracked file."""
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[seqdefer.tasks]\nspeller = plugin:ENTRY\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "installed", registry.installed.__wrapped__)  # not what was read before
    assert "speller" in registry.find_tasks()
    assert "speller" not in import_module("generate").help_of(["run"])


def test_every_command_is_in_the_reference() -> None:
    """A new command is not missed because its help has another form."""
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "seqdefer" / "cli").glob("*.py")))
    for command in re.findall(r"add_parser\(\s*\"([a-z-]+)\"", source):
        assert f"\n## seqdefer {command}\n" in page


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_work_in_the_repository(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken


def test_pictures_of_reports_are_small() -> None:
    pictures = sorted((DOCS / "images").glob("report-*.webp"))
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    assert set(re.findall(r"images/(report-[a-z]+\.webp)", page)) == {one.name for one in pictures}
    assert all(one.stat().st_size < 150_000 for one in pictures)
    assert (DOCS / "assets" / "weather-report.html").stat().st_size < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [one for one in PAGES if python_blocks(one) and one.name not in OWN_TESTS and not goes_with_commands(one)],
    ids=page_name,
)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.chdir(tmp_path)  # examples write to the current folder
    run_blocks(page)


# -- with MkDocs ----------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra: docs")

    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted({*map(page_name, PAGES), *ADDED})


def test_docstrings_become_markdown() -> None:
    pytest.importorskip("griffe", reason="griffe comes with the extra: docs")
    markdown = import_module("docstrings").markdown
    template = "A loss.\n\nFormula:   a * b.\nReference: section 1,\n           and 2.\nExample:\n>>> 1 + 1\n2\n"
    expected = "A loss.\n\n**Formula:** a * b.\n\n**Reference:** section 1, and 2.\n\n**Example:** \n\n"
    assert markdown(template).startswith(expected)
    assert markdown(template).endswith("```pycon\n>>> 1 + 1\n2\n```")
    assert markdown("Plain words\non two lines.") == "Plain words\non two lines."
    assert "```text\nscores  (B, L)\nloss    (B, L)\n```" in markdown(
        "Inputs:    scores  (B, L)\n           loss    (B, L)"
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "material", "mkdocstrings_handlers"):
        pytest.importorskip(module, reason="needs the extra: docs")
    folder = tmp_path_factory.mktemp("site")
    # Without --quiet, which would also hide warnings from --strict.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


@pytest.mark.slow
def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in {".html", ".css", ".svg"}]
    assert len(files) > len(PAGES)
    found = {path.name: match[0] for path in files if (match := REMOTE.search(path.read_text(encoding="utf-8")))}
    assert not found


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    places = {f"{getattr(seqdefer, name).__module__}.{name}" for name in seqdefer.__all__ if name != "__version__"}
    assert not {place for place in places if f'id="{place}"' not in text}
