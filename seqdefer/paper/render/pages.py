"""The page "Results" of the documentation, from the records in a folder: verdicts first, then study by study.

    Path("docs/results.md").write_text(results_page(Path("docs/results")))

Nothing is run. A study that is not in the folder is not on the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from seqdefer.evaluation.results import Provenance
from seqdefer.paper.records import Origins, Study, load_judgements, load_origins, load_study
from seqdefer.paper.render.layouts import layout_judgements, layout_study
from seqdefer.paper.render.writing import VERDICTS, markdown_of, markdown_table, markdown_text
from seqdefer.report.markup import number

NOTES = "notes.md"  # what people have to say of how it was run, in the folder of the records
LINKED = "results"  # the folder of the files, as the page sees it
ORIGINS = "where-the-figures-come-from"
# What the paper shows there, by the name of a study, in the order of the page.
PAPER_SHOWS = {
    "table1": "The paper's main table: area under the deferral curve and improvement over a random rejector, for "
    "whole, one-time and token-level deferral. Its model-based rejectors beat their confidence-based counterparts, and "
    "token-level deferral is best where the expert can do it.",
    "figure-curves": "The paper's deferral curves: the loss that is left against the number of tokens that the expert "
    "writes, for XSUM in the main text, for TSP and MWP in the appendix, without numbers. Closer to the lower left "
    "corner is better.",
    "table-handoffs": "The paper's one-time rejectors with fewer hand-off points to choose from, on TSP and XSUM. All "
    "points are not the best choice there, most clearly on XSUM, and the rejector beats confidence at every size of J.",
    "figure-alpha": "The paper's one-time rejectors trained with different costs of deferring a whole sequence, α₁: "
    "lines over the size of J, without numbers. Extreme costs do worse; α_L = 0.01 is best on TSP, 0.01 or 0.015 on "
    "XSUM, in units it does not name. Its rule of thumb for α₁ is the median of what the expert gains on the training "
    "examples.",
    "table-ablation": "The paper's token-level rejectors on XSUM, LSTM and MLP, trained without teacher forcing, with "
    "it, and with less and less of it. LSTMs beat MLPs, and teacher forcing harms.",
}


def results_page(folder: Path) -> str:
    """Markdown, whose links expect the folder's files in `results` beside the page."""
    origins = _origins(folder)
    studies = [load_study(path) for path in (folder / f"{name}.json" for name in PAPER_SHOWS) if path.is_file()]
    parts = [_opening(studies), _verdicts(folder)]
    parts += [_study_section(study, origins) for study in studies]
    parts += [_origins_section(origins)] if origins.tasks else []
    parts += [_read(folder / NOTES)]
    return "\n".join(filter(None, parts))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _origins(folder: Path) -> Origins:
    path = folder / "origins.json"
    return load_origins(path) if path.is_file() else Origins("", {})


def _opening(studies: list[Study]) -> str:
    if not studies:
        return "# Results\n\nThere are none yet. `seqdefer reproduce all` makes them.\n"
    return (
        "# Results\n\nEvery table and figure of the paper, made again, with the paper's numbers beside ours. `%` is "
        "the improvement of the area under the deferral curve over Random's; a standard deviation over the runs is in "
        "parentheses.\n"
    )


def _verdicts(folder: Path) -> str:
    path = folder / f"{VERDICTS}.json"
    if not path.is_file():
        return ""
    words = (
        "A claim rests on differences that should be above 0. It holds where all their 95 % intervals are; it does not "
        "hold where one interval, widened for as many as there are, is below 0; otherwise it is undecided. Intervals "
        "are of a paired bootstrap over runs and their test instances."
    )
    (grid,) = layout_judgements(load_judgements(path))
    parts = [
        f"## {grid.title}",
        words,
        verdict_summary(folder),
        "What each rests on, the weakest of its differences first:",
        markdown_table(grid).rstrip(),
        _links(VERDICTS, ("csv", "tex", "json")),
    ]
    return "\n\n".join(parts) + "\n"


def verdict_summary(folder: Path) -> str:
    """The verdicts without what they rest on, a line for each claim and a column for each task, in Markdown."""
    claims: dict[str, dict[str, list[str]]] = {}
    for one in load_judgements(folder / f"{VERDICTS}.json").judgements:
        task, _, inputs = one.task.removesuffix(")").partition(" (")
        verdict = f"{one.verdict} ({inputs})" if inputs else one.verdict
        claims.setdefault(one.statement, {}).setdefault(task, []).append(verdict)
    tasks = list(dict.fromkeys(task for found in claims.values() for task in found))
    rows = [[statement, *(", ".join(found.get(task, [])) for task in tasks)] for statement, found in claims.items()]
    lines = [["claim", *tasks], ["---"] * (len(tasks) + 1), *rows]
    return "\n".join(f"| {' | '.join(markdown_text(cell) for cell in line)} |" for line in lines)


def _study_section(study: Study, origins: Origins) -> str:
    title, grids = markdown_text(study.title), layout_study(study)
    tables = markdown_table(grids[0]) if len(grids) == 1 else markdown_of(grids)  # one alone has the section's title
    parts = [
        f"## {title}",
        PAPER_SHOWS[study.name],
        f"![{title}]({LINKED}/{study.name}.svg)",
        tables.rstrip(),
        "\n".join(f"- {markdown_text(note)}" for note in study.notes),
        f"```sh\nseqdefer reproduce {study.name} --preset {study.preset}\n```",
        f"Data, models, machine and seconds: [below](#{ORIGINS})." if origins.tasks else "",
        _links(study.name, ("csv", "tex", "pdf", "json")),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _links(name: str, endings: tuple[str, ...]) -> str:
    return "Files: " + ", ".join(f"[{ending.upper()}]({LINKED}/{name}.{ending})" for ending in endings) + "."


def _origins_section(origins: Origins) -> str:
    tasks = [_task_origins(name, provenance) for name, provenance in origins.tasks.items()]
    command = f"```sh\n{origins.command}\n```\n" if origins.command else ""
    return "\n".join(["## Where the figures come from\n", command, *tasks])


def _task_origins(name: str, provenance: Provenance) -> str:
    calls = provenance.expert_calls
    total = sum(provenance.seconds.values())
    stages = {stage: f"{number(value, 0)} s" for stage, value in provenance.seconds.items() if value >= 0.5}
    facts = {
        "seqdefer": provenance.version,
        "data": _listed(provenance.data),
        "models": _listed(provenance.models),
        "machine": _listed(provenance.machine),
        "seconds": f"{number(total, 0)} ({_listed(stages)})" if stages else "",
        "expert calls": f"{calls.made} made, {calls.saved} saved" if calls.made or calls.saved else "",
    }
    rows = [f"| {key} | {markdown_text(text)} |" for key, text in facts.items() if text]
    return "\n".join([f"### {markdown_text(name)}\n", "| | |", "|---|---|", *rows, ""])


def _listed(facts: Mapping[str, str]) -> str:
    return "; ".join(f"{key}: {text}" for key, text in facts.items())
