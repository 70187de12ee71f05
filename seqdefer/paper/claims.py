"""The paper's qualitative claims, each judged by the paired intervals of our studies.

A claim rests on contrasts, differences that should be above 0. It holds where all their 95 % intervals are. It does not
hold where one is below 0 altogether, its interval widened by Bonferroni's rule for as many as there are: of twenty
differences between equals, one would otherwise be below 0 every other time. Else it is undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from seqdefer.methods.registry import all_methods
from seqdefer.paper.plan import ABLATED, ARCHITECTURES
from seqdefer.paper.records import Contrast, Judgement, Row, Study, Verdict
from seqdefer.paper.studies import ablated_label, size_label

WHOLE = [name for name, one in all_methods().items() if one.granularity == "whole"]


@dataclass(frozen=True)
class Claim:
    """`contrasts(study, task)` are those of a study that the claim rests on, by what rejectors see where a study tries
    several sets of inputs; none where it does not apply."""

    name: str
    statement: str
    study: str
    contrasts: Callable[[Study, str], dict[str, list[Contrast]]]
    otherwise: str  # the likely reason where it does not hold


def judge(studies: Mapping[str, Study]) -> list[Judgement]:
    """Every claim on every task that a study at hand has contrasts for."""
    judgements = []
    for claim in CLAIMS:
        study = studies.get(claim.study)
        for task in () if study is None else study.tasks:
            assert study is not None
            groups = claim.contrasts(study, task)
            for inputs, contrasts in groups.items():
                if contrasts:
                    where = f"{task} ({inputs})" if len(groups) > 1 else task
                    judgements.append(_judged(claim, where, contrasts))
    return judgements


def _judged(claim: Claim, where: str, contrasts: Sequence[Contrast]) -> Judgement:
    verdict = verdict_of(contrasts)
    reason = "" if verdict == "holds" else REASONS.get((claim.name, where), claim.otherwise)
    return Judgement(claim.name, claim.statement, where, verdict, tuple(contrasts), reason)


def verdict_of(contrasts: Sequence[Contrast]) -> Verdict:
    if all(one.low > 0 for one in contrasts):
        return "holds"
    widen = NormalDist().inv_cdf(1 - 0.025 / len(contrasts)) / NormalDist().inv_cdf(0.975)
    is_below = [one.difference + widen * (one.high - one.difference) < 0 for one in contrasts]
    return "does not hold" if any(is_below) else "undecided"


def _find(study: Study, task: str, pairs: Iterable[tuple[str, str]]) -> list[Contrast]:
    """The contrasts of these pairs; pairs that the study has not are left out."""
    known = {(one.first, one.second): one for one in study.contrasts if one.task == task}
    return [known[pair] for pair in pairs if pair in known]


def _against(method: str, others: Sequence[str]) -> Callable[[Study, str], dict[str, list[Contrast]]]:
    return lambda study, task: {"": _find(study, task, [(method, other) for other in others])}


def _confidence_over_whole(study: Study, task: str) -> dict[str, list[Contrast]]:
    pairs = [(name, other) for name in ("TokenwiseScore", "TokenwiseEntropy") for other in WHOLE]
    return {"": _find(study, task, pairs)}


def _rows(study: Study, task: str) -> list[Row]:
    return [row for row in study.rows if row.task == task and row.method == "OneTimeModel"]


def _chosen_size(study: Study, task: str) -> dict[str, list[Contrast]]:
    """All positions against the best other size, by validation data."""
    judged = {row.varied["hand_offs"]: row.validation for row in _rows(study, task) if row.validation is not None}
    if len(judged) < 2:
        return {}
    most = max(judged)
    best = max((size for size in judged if size < most), key=lambda size: judged[size])
    return {"": _find(study, task, [(size_label("OneTimeModel", best), size_label("OneTimeModel", most))])}


def _at_every_size(study: Study, task: str) -> dict[str, list[Contrast]]:
    pairs = [
        (size_label("OneTimeModel", row.varied["hand_offs"]), size_label(other, row.varied["hand_offs"]))
        for row in _rows(study, task)
        for other in ("OneTimeScore", "OneTimeEntropy")
    ]
    return {"": _find(study, task, pairs)}


def _extremes(study: Study, task: str) -> dict[str, list[Contrast]]:
    """The rule of thumb against the least and the largest alpha_1 that were tried, where it lies between them."""
    rows = sorted(_rows(study, task), key=lambda row: row.varied["alpha"])
    found = [one for one in study.contrasts if one.task == task]  # in the order of the rows, without the rule
    is_between = len(rows) > 2 and not rows[0].is_default and not rows[-1].is_default
    return {"": [found[0], found[-1]] if is_between and found else []}


def _inputs(study: Study) -> list[str]:
    return list(dict.fromkeys(row.varied["inputs"] for row in study.rows if "inputs" in row.varied))


def _recurrent(study: Study, task: str) -> dict[str, list[Contrast]]:
    return {
        inputs: _find(
            study,
            task,
            [(ablated_label(inputs, "lstm", strategy), ablated_label(inputs, "mlp", strategy)) for strategy in ABLATED],
        )
        for inputs in _inputs(study)
    }


def _teacher(study: Study, task: str) -> dict[str, list[Contrast]]:
    return {
        inputs: _find(
            study,
            task,
            [(ablated_label(inputs, one, "free"), ablated_label(inputs, one, "teacher")) for one in ARCHITECTURES],
        )
        for inputs in _inputs(study)
    }


CLAIMS = (
    Claim(
        "one-time-beats-whole",
        "One-time deferral by a model beats every whole-sequence method.",
        "table1",
        _against("OneTimeModel", WHOLE),
        "The gains are small beside the spread over test instances, or the predictor errs along the whole sequence, so "
        "that a later hand-off saves little.",
    ),
    Claim(
        "token-beats-whole",
        "Token-level deferral by a model beats every whole-sequence method.",
        "table1",
        _against("TokenwiseModel", WHOLE),
        "The gains are small beside the spread over test instances.",
    ),
    Claim(
        "token-beats-one-time",
        "Where both apply, token-level deferral beats one-time deferral.",
        "table1",
        _against("TokenwiseModel", ["OneTimeModel"]),
        "The expert's first tokens put the predictor right for the rest, and then one hand-off does as well.",
    ),
    Claim(
        "model-beats-confidence-whole",
        "For whole sequences, the model beats confidence.",
        "table1",
        _against("WholeModelEmbed", [name for name in WHOLE if name != "WholeModelEmbed"]),
        "A model that says which of two answers is better learns little from so few examples, while uncertainty needs "
        "none. The paper's own table has it so.",
    ),
    Claim(
        "model-beats-confidence-one-time",
        "In one-time deferral, the model beats confidence.",
        "table1",
        _against("OneTimeModel", ["OneTimeScore", "OneTimeEntropy"]),
        "There are few training examples for many hand-offs.",
    ),
    Claim(
        "model-beats-confidence-token",
        "In token-level deferral, the model beats confidence.",
        "table1",
        _against("TokenwiseModel", ["TokenwiseScore", "TokenwiseEntropy"]),
        "Plain uncertainty already ranks most of the tokens that the expert would write better.",
    ),
    Claim(
        "token-confidence-beats-whole",
        "Even confidence, token by token, beats every whole-sequence method (the paper: on XSUM).",
        "table1",
        _confidence_over_whole,
        "The paper says so of XSUM alone. Where uncertainty is a variance, it does not tell who is right.",
    ),
    Claim(
        "all-positions-is-not-the-best",
        "All positions are not the best set of hand-offs: the best smaller J, by validation data, beats them.",
        "table-handoffs",
        _chosen_size,
        "More positions cost no more than they bring where a network learns what hand-offs have in common.",
    ),
    Claim(
        "one-time-beats-confidence-at-every-size",
        "Whatever the size of J, one-time deferral by a model beats confidence.",
        "table-handoffs",
        _at_every_size,
        "With few hand-offs to choose from, all methods come close to whole deferral.",
    ),
    Claim(
        "recurrent-beats-mlp",
        "A recurrent token-level rejector beats a perceptron.",
        "table-ablation",
        _recurrent,
        "Where the inputs already say what was written before, memory adds little, and more weights overfit.",
    ),
    Claim(
        "teacher-forcing-hurts",
        "Teacher forcing hurts token-level rejectors.",
        "table-ablation",
        _teacher,
        "Prefixes that hindsight steers and those that the rejector steers are too much alike to matter here.",
    ),
    Claim(
        "extreme-alpha-hurts",
        "Extreme alpha_1 hurts: the rule of thumb beats the least and the largest that were tried.",
        "figure-alpha",
        _extremes,
        "Curves are drawn by moving a threshold, which makes up for much of what alpha_1 sets in training.",
    ),
)

# What is known of one task.
REASONS: dict[tuple[str, str], str] = {
    **dict.fromkeys(
        [("all-positions-is-not-the-best", "tsp"), ("all-positions-is-not-the-best", "xsum")],
        "Attention over the steps makes room for all positions; the paper's perceptron has a row of weights for each.",
    ),
    ("one-time-beats-whole", "xsum"): "The two models disagree at half of the positions of a text: wherever it is "
    "handed over, little of what went before is kept, and all one-time and whole methods come out close to Random.",
    ("recurrent-beats-mlp", "xsum (facts)"): "The facts of a proposed token already say what was written before: "
    "memory adds nothing, and its weights cost something.",
    ("teacher-forcing-hurts", "xsum (states)"): "With so few documents validation stops the training within the first "
    "epochs, before the ways in which rollouts are steered have grown apart.",
    ("extreme-alpha-hurts", "xsum"): "One-time deferral gains little on texts, whatever alpha_1 is.",
}
