"""The documentation page "Results", made from the records in a folder: verdicts first, then study by study.

Path("docs/results.md").write_text(results_page(Path("docs/results")))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from seqdefer.evaluation.results import Provenance
from seqdefer.paper.records import Judgements, Study, load_judgements, load_origins, load_study
from seqdefer.paper.render.files import VERDICTS, markdown_of, markdown_row, markdown_table, markdown_text
from seqdefer.paper.render.tables import layout_studies, layout_verdicts
from seqdefer.recipes import IN_WORDS
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
    "table-psi": "The paper proves its bounds for two surrogates of one-time deferral and does not say which one its "
    "experiments minimise. Both are measured here; the default is cross-entropy.",
    "table-ablation": "The paper's token-level rejectors on XSUM, LSTM and MLP, trained without teacher forcing, with "
    "teacher forcing, and with scheduled sampling. LSTMs beat MLPs, and teacher forcing hurts.",
}


def results_page(folder: Path) -> str:
    """Return the page in Markdown. Its links expect the files of the folder in `results`, beside the page."""
    studies = {name: _load_all(folder, name) for name in PAPER_SHOWS}
    studies = {name: found for name, found in studies.items() if found}
    notes = folder / NOTES_FILE
    verdicts = _verdicts(folder) if studies else ""
    parts = [_opening(has_studies=bool(studies)), verdicts, *map(_study, studies.values())]
    parts += [_origins(folder), notes.read_text(encoding="utf-8") if notes.is_file() else ""]
    return "\n".join(filter(None, parts))


def _load_all(folder: Path, name: str) -> list[Study]:
    """Load the studies of one name, as published first."""
    paths = [folder / recipe / f"{name}.json" for recipe in IN_WORDS]
    return [load_study(path) for path in paths if path.is_file()]


def _opening(*, has_studies: bool) -> str:
    if not has_studies:
        return "# Results\n\nThere are none yet. `seqdefer reproduce all` makes them.\n"
    return (
        "# Results\n\n<!-- no-test below: reproductions take minutes to hours -->\n\n"
        "Every table and figure of the paper, reproduced twice. **As published** is the paper's method: "
        "its inputs, networks, hyperparameters, losses and training. **Ours** is the default of this package: other "
        "inputs, networks and training under the same names of methods. [Recipes](recipes.md) lists the differences. "
        "The paper's own numbers stand beside both. `%` is the improvement of the area under the deferral curve over "
        "that of Random; parentheses hold the standard deviation over the runs. *Headroom* is the share of what an "
        "expert free of charge would gain (OptimalFree); mixtures of both models can gain more.\n\nTwo differences "
        "show in methods without a network too: on xsum the published recipe counts ROUGE on words and ours on token "
        "ids, and one-time methods choose from the hand-offs of the recipe.\n"
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
    judgements = load_judgements(path)
    grid = layout_verdicts(judgements)
    parts = [
        f"## {grid.title}",
        rule,
        verdict_summary(judgements),
        _changes(judgements),
        "The differences behind each verdict, the weakest first:",
        markdown_table(grid).rstrip(),
        _links(VERDICTS, "csv", "tex", "json"),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def verdict_summary(judgements: Judgements) -> str:
    """Return the verdicts as a Markdown table: a line for each claim, a column for each task and recipe."""
    known = {(one.statement, one.task, one.recipe): one.verdict for one in judgements.judgements}
    statements = dict.fromkeys(one.statement for one in judgements.judgements)
    tasks = dict.fromkeys(one.task for one in judgements.judgements)
    recipes = [recipe for recipe in IN_WORDS if any(one.recipe == recipe for one in judgements.judgements)]
    places = [(task, recipe) for task in tasks for recipe in recipes]
    lines = [["claim", *(f"{task}, {IN_WORDS[recipe]}" for task, recipe in places)], ["---"] * (len(places) + 1)]
    lines += [[statement, *(known.get((statement, *place), "") for place in places)] for statement in statements]
    return "\n".join(markdown_row(map(markdown_text, line)) for line in lines)


def _changes(judgements: Judgements) -> str:
    """Say in words how many verdicts the recipes share, and which differ."""
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    for one in judgements.judgements:
        pairs.setdefault((one.statement, one.task), {})[one.recipe] = one.verdict
    both = {place: verdicts for place, verdicts in pairs.items() if len(verdicts) == len(IN_WORDS)}
    differ = {place: verdicts for place, verdicts in both.items() if len(set(verdicts.values())) > 1}
    if not both:
        return ""
    lines = [
        f"- {markdown_text(statement)} On {markdown_text(task)}: "
        + ", ".join(f"{IN_WORDS[recipe]} {verdict}" for recipe, verdict in verdicts.items())
        + "."
        for (statement, task), verdicts in differ.items()
    ]
    said = f"The recipes agree on {len(both) - len(differ)} of {len(both)} verdicts"
    return f"{said}." if not differ else "\n".join([f"{said}. They differ on these:\n", *lines])


def _study(studies: Sequence[Study]) -> str:
    first = studies[0]
    title, grids = markdown_text(first.title), layout_studies(studies)
    notes = [
        f"- {IN_WORDS[study.recipe].capitalize()}: {markdown_text(note)}" for study in studies for note in study.notes
    ]
    parts = [
        f"## {title}",
        PAPER_SHOWS[first.name],
        f"![{title}]({LINKED_FOLDER}/{first.name}.svg)",
        markdown_of(grids).rstrip(),
        "\n".join(notes),
        f"```sh\nseqdefer reproduce {first.name} --preset {first.preset}\n```",
        f"Data, models, machine and seconds: [below](#{ORIGINS_ANCHOR}).",
        _links(first.name, "tex", "pdf", *(f"{study.recipe}/{kind}" for study in studies for kind in ("csv", "json"))),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _links(name: str, *kinds: str) -> str:
    """Return links to NAME.tex for "tex" and to ours/NAME.csv for "ours/csv"."""
    links = []
    for kind in kinds:
        recipe, _, suffix = kind.rpartition("/")
        words = f"{suffix.upper()} {IN_WORDS[recipe]}" if recipe else suffix.upper()
        links.append(f"[{words}]({LINKED_FOLDER}/{recipe + '/' if recipe else ''}{name}.{suffix})")
    return f"Files: {', '.join(links)}."


def _origins(folder: Path) -> str:
    parts = []
    for recipe, words in IN_WORDS.items():
        if (path := folder / recipe / "origins.json").is_file():
            origins = load_origins(path)
            parts.append(f"### {words.capitalize()}\n")
            parts += [task_origins(f"{name}, {words}", provenance) for name, provenance in origins.tasks.items()]
    return "\n".join(["## Where the figures come from\n", *filter(None, parts)]) if parts else ""


def task_origins(name: str, provenance: Provenance) -> str:
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
        "expert calls in labelling": f"{calls.made} made, {calls.saved} saved" if calls.made or calls.saved else "",
    }
    rows = [markdown_row((key, markdown_text(text))) for key, text in facts.items() if text]
    command = [f"```sh\n{provenance.command}\n```\n"] if provenance.command else []
    return "\n".join([f"#### {markdown_text(name)}\n", *command, "| | |", "|---|---|", *rows, ""])
