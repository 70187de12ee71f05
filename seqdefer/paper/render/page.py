"""The documentation page "Results", made from the records in a folder: verdicts first, then study by study.

Path("docs/results.md").write_text(results_page(Path("docs/results")))
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from seqdefer.evaluation.results import Provenance
from seqdefer.paper.records import Origins, Study, load_judgements, load_origins, load_study
from seqdefer.paper.render.files import VERDICTS, markdown_of, markdown_row, markdown_table, markdown_text
from seqdefer.paper.render.tables import layout_study, layout_verdicts
from seqdefer.report.markup import number

NOTES_FILE = "notes.md"  # handwritten remarks on the runs, in the folder of the records
LINKED_FOLDER = "results"  # the folder of the files, seen from the page
ORIGINS_ANCHOR = "where-the-figures-come-from"
# What the paper shows, by study, in the order of the page.
PAPER_SHOWS = {
    "table1": "The paper's main table: area under the deferral curve and improvement over a random rejector, for "
    "whole, one-time and token-level deferral. Its model-based rejectors beat their confidence-based counterparts, and "
    "token-level deferral is best where the expert supports it.",
    "figure-curves": "The paper's deferral curves: the remaining loss against the number of tokens that the expert "
    "writes, for XSUM in the main text, for TSP and MWP in the appendix, without numbers. Closer to the lower left "
    "corner is better.",
    "table-handoffs": "The paper's one-time rejectors with fewer hand-off points to choose from, on TSP and XSUM. All "
    "points are not the best choice there, most clearly on XSUM, and the rejector beats confidence at every size of J.",
    "figure-alpha": "The paper's one-time rejectors trained with different costs of deferring a whole sequence, α₁: "
    "lines over the size of J, without numbers. Extreme costs do worse; α_L = 0.01 is best on TSP, 0.01 or 0.015 on "
    "XSUM, in unnamed units. Its rule of thumb for α₁ is the median of the expert's gains on the training examples.",
    "table-ablation": "The paper's token-level rejectors on XSUM, LSTM and MLP, trained without teacher forcing, with "
    "teacher forcing, and with scheduled sampling. LSTMs beat MLPs, and teacher forcing hurts.",
}


def results_page(folder: Path) -> str:
    """Return the page in Markdown. Its links expect the files of the folder in `results`, beside the page."""
    origins_file = folder / "origins.json"
    origins = load_origins(origins_file) if origins_file.is_file() else Origins("", {})
    studies = [load_study(path) for path in (folder / f"{name}.json" for name in PAPER_SHOWS) if path.is_file()]
    notes = folder / NOTES_FILE
    parts = [_opening(has_studies=bool(studies)), _verdicts(folder), *(_study(study, origins) for study in studies)]
    parts += [_origins(origins), notes.read_text(encoding="utf-8") if notes.is_file() else ""]
    return "\n".join(filter(None, parts))


def _opening(*, has_studies: bool) -> str:
    if not has_studies:
        return "# Results\n\nThere are none yet. `seqdefer reproduce all` makes them.\n"
    return (
        "# Results\n\nEvery table and figure of the paper, reproduced, with the paper's numbers beside ours. `%` is "
        "the improvement of the area under the deferral curve over that of Random; parentheses hold the standard "
        "deviation over the runs.\n"
    )


def _verdicts(folder: Path) -> str:
    path = folder / f"{VERDICTS}.json"
    if not path.is_file():
        return ""
    rule = (
        "A claim rests on differences that should be above 0. It holds where all their 95 % intervals are above 0. It "
        "does not hold where one interval, widened for the number of differences, is below 0. Otherwise it is "
        "undecided. The intervals come from a paired bootstrap over runs and their test instances."
    )
    grid = layout_verdicts(load_judgements(path))
    parts = [
        f"## {grid.title}",
        rule,
        verdict_summary(folder),
        "The differences behind each verdict, the weakest first:",
        markdown_table(grid).rstrip(),
        _links(VERDICTS, "csv", "tex", "json"),
    ]
    return "\n\n".join(parts) + "\n"


def verdict_summary(folder: Path) -> str:
    """Return the verdicts as a Markdown table with a line for each claim and a column for each task."""
    claims: dict[str, dict[str, list[str]]] = {}
    for one in load_judgements(folder / f"{VERDICTS}.json").judgements:
        task, _, inputs = one.task.removesuffix(")").partition(" (")
        verdict = f"{one.verdict} ({inputs})" if inputs else one.verdict
        claims.setdefault(one.statement, {}).setdefault(task, []).append(verdict)
    tasks = list(dict.fromkeys(task for found in claims.values() for task in found))
    rows = [[statement, *(", ".join(found.get(task, [])) for task in tasks)] for statement, found in claims.items()]
    lines = [["claim", *tasks], ["---"] * (len(tasks) + 1), *rows]
    return "\n".join(markdown_row(map(markdown_text, line)) for line in lines)


def _study(study: Study, origins: Origins) -> str:
    title, grids = markdown_text(study.title), layout_study(study)
    tables = markdown_table(grids[0]) if len(grids) == 1 else markdown_of(grids)  # one table needs no second title
    parts = [
        f"## {title}",
        PAPER_SHOWS[study.name],
        f"![{title}]({LINKED_FOLDER}/{study.name}.svg)",
        tables.rstrip(),
        "\n".join(f"- {markdown_text(note)}" for note in study.notes),
        f"```sh\nseqdefer reproduce {study.name} --preset {study.preset}\n```",
        f"Data, models, machine and seconds: [below](#{ORIGINS_ANCHOR})." if origins.tasks else "",
        _links(study.name, "csv", "tex", "pdf", "json"),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _links(name: str, *suffixes: str) -> str:
    return "Files: " + ", ".join(f"[{one.upper()}]({LINKED_FOLDER}/{name}.{one})" for one in suffixes) + "."


def _origins(origins: Origins) -> str:
    tasks = [_task_origins(name, provenance) for name, provenance in origins.tasks.items()]
    command = f"```sh\n{origins.command}\n```\n" if origins.command else ""
    return "\n".join(["## Where the figures come from\n", command, *tasks]) if tasks else ""


def _task_origins(name: str, provenance: Provenance) -> str:
    def listed(facts: Mapping[str, str]) -> str:
        return "; ".join(f"{key}: {text}" for key, text in facts.items())

    calls = provenance.expert_calls
    stages = {stage: f"{number(value, 0)} s" for stage, value in provenance.seconds.items() if value >= 0.5}
    facts = {
        "seqdefer": provenance.version,
        "data": listed(provenance.data),
        "models": listed(provenance.models),
        "machine": listed(provenance.machine),
        "seconds": f"{number(sum(provenance.seconds.values()), 0)} ({listed(stages)})" if stages else "",
        "expert calls": f"{calls.made} made, {calls.saved} saved" if calls.made or calls.saved else "",
    }
    rows = [markdown_row((key, markdown_text(text))) for key, text in facts.items() if text]
    return "\n".join([f"### {markdown_text(name)}\n", "| | |", "|---|---|", *rows, ""])
