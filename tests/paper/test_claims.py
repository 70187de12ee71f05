"""The paper's claims, judged on made-up studies; and the paper's figures, read off the paper itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import made_up
import pytest

from seqdefer.evaluation.published import PAPER
from seqdefer.evaluation.results import PaperFigure
from seqdefer.paper import plan
from seqdefer.paper.claims import CLAIMS, Claim, judge, verdict_of
from seqdefer.paper.plan import PLANS
from seqdefer.paper.records import Contrast, Judgement, Row, Study, Verdict

Interval = tuple[float, float]
ABOVE, BELOW, ACROSS = (0.5, 2.0), (-2.0, -0.5), (-1.0, 1.0)
WHOLE = ["ChowMean", "ChowSum", *(f"ChowQuantile{level}" for level in ("0.0", "0.4", "0.8", "1.0")), "WholeModelEmbed"]
SIZES = {"tsp": (5, 10, 15, 20, 25, 30, 35, 40, 45, 51), "xsum": (3, 4, 5, 7, 10, 13, 15, 17, 21)}
CHOSEN = {"tsp": 45, "xsum": 17}  # the best but all positions, by the validation data of the made-up study
RULE = "OneTimeModel, alpha = 2.573 (rule of thumb)"
EXTREMES = ("OneTimeModel, alpha = 0", "OneTimeModel, alpha = 49.6")
ALPHAS = [EXTREMES[0], "OneTimeModel, alpha = 0.1938", "OneTimeModel, alpha = 3.1", EXTREMES[1]]

each_claim = pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)


# -- intervals -----------------------------------------------------------------------------------------------------


def contrast(first: str, second: str, interval: Interval, task: str = "tsp") -> Contrast:
    return Contrast(task, first, second, sum(interval) / 2, *interval)


@pytest.mark.parametrize(
    ("intervals", "verdict"),
    [
        ([ABOVE], "holds"),
        ([BELOW], "does not hold"),
        ([ACROSS], "undecided"),
        ([ABOVE, ABOVE, ABOVE], "holds"),
        ([ABOVE, ACROSS], "undecided"),
        ([ACROSS, BELOW], "does not hold"),  # one that is refuted is enough
        ([ABOVE, BELOW], "does not hold"),
        ([(0.0, 1.0)], "undecided"),  # an interval that touches 0 does not exclude it
        ([(1e-9, 1.0)], "holds"),
        ([(-1.0, 0.0)], "undecided"),
        ([(-1.0, -1e-9)], "does not hold"),
        ([(-1.0, 1e-9)], "undecided"),
        ([(0.0, 0.0)], "undecided"),  # the same outcome
        ([(-1.0, -0.01), *[ABOVE] * 4], "undecided"),  # one in five may come out below 0 by chance
        ([(-1.0, -0.5), *[ABOVE] * 4], "does not hold"),
    ],
)
def test_verdicts(intervals: list[Interval], verdict: Verdict) -> None:
    for order in permutations(intervals):
        assert verdict_of([contrast("one", "other", interval) for interval in order]) == verdict


# -- claims on made-up studies -------------------------------------------------------------------------------------


def labels_of(study: Study, task: str) -> list[str]:
    """What the study calls its rows."""
    if study.name == "figure-alpha":
        return [RULE, *ALPHAS]
    return [_label(row) for row in study.rows if row.task == task]


def _label(row: Row) -> str:
    if "hand_offs" in row.varied:
        return f"{row.method}, |J| = {row.varied['hand_offs']}"
    if "architecture" in row.varied:
        return f"{row.varied['architecture'].upper()}, {row.varied['strategy']}, {row.varied['inputs']}"
    return row.method


def with_contrasts(study: Study, interval: Callable[[str, str], Interval]) -> Study:
    """Every row against every other, the rule of thumb against the others."""
    contrasts = [
        contrast(first, second, interval(first, second), task)
        for task in study.tasks
        for first in ([RULE] if study.name == "figure-alpha" else labels_of(study, task))
        for second in labels_of(study, task)
        if first != second
    ]
    return replace(study, contrasts=tuple(contrasts))


def all_studies(interval: Callable[[str, str], Interval]) -> dict[str, Study]:
    return {name: with_contrasts(make(), interval) for name, make in made_up.STUDIES.items()}


def rests_on(name: str, task: str) -> set[tuple[str, str]]:
    """The comparisons that the words of a claim ask for, those with methods that a task has not included."""
    once = ["OneTimeScore", "OneTimeEntropy"]
    token = ["TokenwiseScore", "TokenwiseEntropy"]
    sized = {size: [f"{method}, |J| = {size}" for method in ("OneTimeModel", *once)] for size in SIZES.get(task, ())}
    inputs, strategies = ("states", "facts"), ("free", "teacher", "scheduled")
    pairs: dict[str, Iterable[tuple[str, str]]] = {
        "one-time-beats-whole": (("OneTimeModel", other) for other in WHOLE),
        "token-beats-whole": (("TokenwiseModel", other) for other in WHOLE),
        "token-beats-one-time": [("TokenwiseModel", "OneTimeModel")],
        "model-beats-confidence-whole": (("WholeModelEmbed", other) for other in WHOLE if other != "WholeModelEmbed"),
        "model-beats-confidence-one-time": (("OneTimeModel", other) for other in once),
        "model-beats-confidence-token": (("TokenwiseModel", other) for other in token),
        "token-confidence-beats-whole": ((name, other) for name in token for other in WHOLE),
        "all-positions-is-not-the-best": (
            (sized[CHOSEN[task]][0], sized[SIZES[task][-1]][0]) for task in (task,) if task in SIZES
        ),
        "one-time-beats-confidence-at-every-size": (
            (model, other) for model, *others in sized.values() for other in others
        ),
        "recurrent-beats-mlp": (
            (f"LSTM, {strategy}, {shown}", f"MLP, {strategy}, {shown}") for strategy in strategies for shown in inputs
        ),
        "teacher-forcing-hurts": (
            (f"{kind}, free, {shown}", f"{kind}, teacher, {shown}") for kind in ("LSTM", "MLP") for shown in inputs
        ),
        "extreme-alpha-hurts": ((RULE, other) for other in EXTREMES),
    }
    return set(pairs[name])


def study_of(claim: Claim, interval: Callable[[str, str], Interval]) -> Study:
    return with_contrasts(made_up.STUDIES[claim.study](), interval)


def judged(claim: Claim, *studies: Study) -> dict[str, Judgement]:
    """By task, and by what rejectors see where a study tries several sets of inputs."""
    return {one.task: one for one in judge({study.name: study for study in studies}) if one.claim == claim.name}


def place_of(pair: tuple[str, str], claim: Claim, task: str) -> str:
    """The judgement that a comparison belongs to."""
    return f"{task} ({pair[0].rpartition(', ')[2]})" if claim.study == "table-ablation" else task


@each_claim
def test_claims_rest_on_the_comparisons_of_their_words(claim: Claim) -> None:
    study = study_of(claim, lambda *_: ABOVE)
    expected: dict[str, set[tuple[str, str]]] = {}
    for task in study.tasks:
        known = {(one.first, one.second) for one in study.contrasts if one.task == task}
        for pair in rests_on(claim.name, task) & known:
            expected.setdefault(place_of(pair, claim, task), set()).add(pair)
    found = judged(claim, study)
    assert found
    assert expected == {
        place: {(one.first, one.second) for one in judgement.contrasts} for place, judgement in found.items()
    }
    assert all(one.task == place.split(" (")[0] for place, judgement in found.items() for one in judgement.contrasts)


@each_claim
@pytest.mark.parametrize(
    ("interval", "verdict"), [(ABOVE, "holds"), (BELOW, "does not hold"), (ACROSS, "undecided")], ids=str
)
def test_every_claim_is_judged_either_way(claim: Claim, interval: Interval, verdict: Verdict) -> None:
    found = judged(claim, study_of(claim, lambda *_: interval))
    assert found
    for one in found.values():
        assert one.verdict == verdict
        assert one.statement == claim.statement
        assert bool(one.reason) is (verdict != "holds")


@each_claim
def test_each_of_its_comparisons_can_bring_a_claim_down_and_no_other(claim: Claim) -> None:
    pairs = {pair for task in made_up.TASKS for pair in rests_on(claim.name, task)}
    holding = study_of(claim, lambda *pair: ABOVE if pair in pairs else BELOW)
    assert {one.verdict for one in judged(claim, holding).values()} == {"holds"}
    for place, one in enumerate(holding.contrasts):
        if (one.first, one.second) in pairs:
            refuted = (*holding.contrasts[:place], replace(one, low=-2, high=-1), *holding.contrasts[place + 1 :])
            found = judged(claim, replace(holding, contrasts=refuted))
            down = {place for place, judgement in found.items() if judgement.verdict == "does not hold"}
            assert down == {place_of((one.first, one.second), claim, one.task)}


@each_claim
def test_a_claim_without_its_study_is_not_judged(claim: Claim) -> None:
    others = [make() for name, make in made_up.STUDIES.items() if name != claim.study]
    assert not judged(claim, *(with_contrasts(study, lambda *_: ABOVE) for study in others))
    assert not judged(claim, made_up.STUDIES[claim.study]())  # there, but nothing was compared


def test_without_studies_there_are_no_verdicts() -> None:
    assert judge({}) == []


def test_names_and_statements_tell_claims_apart() -> None:
    assert len({claim.name for claim in CLAIMS}) == len({claim.statement for claim in CLAIMS}) == len(CLAIMS)
    assert {claim.study for claim in CLAIMS} <= set(plan.STUDIES)


# -- what validation data chose ------------------------------------------------------------------------------------


def all_positions_chosen(study: Study) -> Study:
    return replace(study, rows=tuple(replace(row, is_chosen=row.is_default) for row in study.rows))


def test_all_positions_are_compared_with_the_best_smaller_size_even_where_they_were_chosen() -> None:
    (claim,) = (claim for claim in CLAIMS if claim.name == "all-positions-is-not-the-best")
    for interval, verdict in ((ABOVE, "holds"), (BELOW, "does not hold"), (ACROSS, "undecided")):
        found = judged(claim, all_positions_chosen(study_of(claim, lambda *_, interval=interval: interval)))
        assert {task: one.verdict for task, one in found.items()} == {"tsp": verdict, "xsum": verdict}
        (only,) = found["tsp"].contrasts
        assert (only.first, only.second) == ("OneTimeModel, |J| = 45", "OneTimeModel, |J| = 51")


@pytest.mark.parametrize("place", [0, -1])
def test_a_rule_of_thumb_that_is_an_extreme_itself_says_nothing_of_extremes(place: int) -> None:
    (claim,) = (claim for claim in CLAIMS if claim.name == "extreme-alpha-hurts")
    study = study_of(claim, lambda *_: ABOVE)
    rows = sorted((row for row in study.rows if row.task == "tsp"), key=lambda row: row.varied["alpha"])
    rows = [replace(row, is_default=row is rows[place]) for row in rows]
    assert judged(claim, study)
    assert "tsp" not in judged(claim, replace(study, rows=tuple(rows)))


def other_outcome(row: Row) -> Row:
    turned = tuple(-one for one in reversed(row.improvements))
    return replace(row, improvements=turned, improvement_mean=-row.improvement_mean, audc_mean=1 / row.audc_mean)


def test_no_claim_is_picked_by_what_test_data_say() -> None:
    """Other outcomes of the rows change no verdict: which contrasts count is up to validation data."""
    studies = all_studies(lambda first, second: ABOVE if first < second else BELOW)
    turned = {
        name: replace(study, rows=tuple(other_outcome(row) for row in study.rows)) for name, study in studies.items()
    }
    assert judge(turned) == judge(studies)


def test_no_verdict_mentions_test_data() -> None:
    for interval in (ABOVE, BELOW, ACROSS):
        studies = all_studies(lambda *_, interval=interval: interval)
        studies["table-handoffs"] = all_positions_chosen(studies["table-handoffs"])
        for one in judge(studies):
            labels = [name for pair in one.contrasts for name in (pair.first, pair.second)]
            assert not re.search(r"test (data|set|split)", " ".join([one.statement, one.reason, *labels]))


# -- the paper's figures -------------------------------------------------------------------------------------------

NUMBER = r"-?\d+(?:\.\d+)?"


@pytest.fixture(scope="module")
def paper(shared_dir: Path) -> str:
    return (shared_dir / "paper" / "learning-to-partially-defer.tex").read_text(encoding="utf-8")


def table_of(paper: str, label: str) -> Iterator[tuple[str, list[PaperFigure | None]]]:
    """The rows of a table: what stands first, and its pairs of columns, AUDC (std) and % improvement (std)."""
    tables = re.findall(r"\\begin{table.*?\\end{table", paper, re.S)
    (table,) = (part for part in tables if f"\\label{{{label}}}" in part)
    for line in table.split("\\\\"):
        plain = re.sub(r"\\(hline|midrule|toprule|bottomrule)|\\textbf{|}|\s", " ", line)
        first, *cells = [re.sub(r"\s+", " ", cell).strip() for cell in plain.split("&")]
        if len(cells) >= 2 and all(re.fullmatch(rf"-|{NUMBER} ?\({NUMBER}\)", cell) for cell in cells):
            pairs = zip(cells[::2], cells[1::2], strict=True)
            yield first, [None if "-" in pair else PaperFigure(*_numbers("".join(pair))) for pair in pairs]


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(NUMBER, text)]


def named(first: str) -> str:
    """A method as we write it."""
    name = first.replace("Softmax", "Score")
    quantile = re.fullmatch(rf"ChowQuantile ({NUMBER})", name)
    return f"ChowQuantile{float(quantile[1])}" if quantile else name


def test_table_1_is_the_papers(paper: str) -> None:
    """Optimal is of the finest granularity that the task has."""
    printed: dict[str, dict[str, PaperFigure]] = {"tsp": {}, "xsum": {}, "weather": {}}
    rows = list(table_of(paper, "tab:auctokenlevel"))
    assert len(rows) == 2 + 7 + 3 + 3
    for first, figures in rows:
        for task, figure in zip(printed, figures, strict=True):
            optimal = "OptimalOneTime" if task == "tsp" else "OptimalToken"
            if figure is not None:
                printed[task][optimal if first == "Optimal" else named(first)] = figure
    assert printed == PAPER


@pytest.mark.parametrize(
    ("task", "label", "length"),
    [("tsp", "tab:aucscoresTSPNumexperts", 50), ("xsum", "tab:aucscoresXSUMNumexperts", 20)],
)
def test_hand_offs_are_the_papers(task: str, label: str, length: int, paper: str) -> None:
    rows = {int(first): figures for first, figures in table_of(paper, label)}
    methods = ("OneTimeModel", "OneTimeScore", "OneTimeEntropy")
    ours = {size: [plan.papers_hand_offs(task, method, size) for method in methods] for size in range(length + 2)}
    assert rows == {size: figures for size, figures in ours.items() if any(figures)}
    assert tuple(rows) == (*PLANS["paper"].tasks[task].hand_offs, length + 1)


def test_the_ablation_is_the_papers(paper: str) -> None:
    strategies = {"No Teacher Forcing": "free", "Teacher Forcing": "teacher", "Scheduled Sampling": "scheduled"}
    rows = {first: figure for first, (figure,) in table_of(paper, "tab:aucscoresarch")}
    ours = {
        f"{kind.upper()} {words}": plan.papers_ablation("xsum", kind, strategy)
        for kind in plan.ARCHITECTURES
        for words, strategy in strategies.items()
    }
    ours["TokenwiseSoftmax"] = plan.papers_ablation_baseline("xsum", "TokenwiseScore")
    ours["TokenwiseEntropy"] = plan.papers_ablation_baseline("xsum", "TokenwiseEntropy")
    assert rows == ours
    assert set(plan.ABLATED) == set(strategies.values())


def test_the_paper_has_figures_for_its_own_tasks_alone() -> None:
    assert plan.papers_ablation("pronounce", "lstm", "free") is None
    assert plan.papers_ablation_baseline("weather", "TokenwiseScore") is None
    assert plan.papers_ablation("xsum", "lstm", "explore") is None
    assert plan.papers_hand_offs("weather", "OneTimeModel", 5) is None
    assert plan.papers_hand_offs("tsp", "OneTimeCost", 5) is None
    assert plan.papers_hand_offs("tsp", "OneTimeModel", 6) is None


def test_the_protocol_is_the_papers(paper: str) -> None:
    assert "averaged over five runs, each with 100 test instances" in paper
    assert PLANS["paper"].seeds == 5
    assert list(PLANS["paper"].tasks) == ["weather", "tsp", "xsum"]
    assert PLANS["paper"].text == "xsum"
